"""Reading and writing of ONNX files."""

from demask.files.onnx.module import from_onnx
from demask.files.onnx.write.writer import to_onnx

__all__ = ["from_onnx", "to_onnx"]
