"""Handlers of ONNX ops, one file per family."""

from demask.files.onnx.edit.calls import HANDLERS, handle
from demask.files.onnx.edit.ops import carried, contraction, move, recurrent

FAMILIES = (carried, contraction, move, recurrent)

__all__ = ["FAMILIES", "HANDLERS", "handle"]
