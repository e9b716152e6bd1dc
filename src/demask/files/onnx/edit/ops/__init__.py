"""Handlers of ONNX ops, one file per family."""

from demask.files.onnx.edit.calls import HANDLERS, handle
from demask.files.onnx.edit.ops import contraction, move, pointwise, quantized, recurrent, reduce, window

FAMILIES = (contraction, move, pointwise, quantized, recurrent, reduce, window)

__all__ = ["FAMILIES", "HANDLERS", "handle"]
