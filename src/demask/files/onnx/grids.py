"""Quantized networks in ONNX files: weights as the whole numbers that they were, ops by their names.

`demask` works on the floats that a quantized weight stands for. Written as floats they would no
longer tell a runtime that the layer can run on whole numbers, so they go back onto the grid that
they came from: only where each number on it gives the very float.
"""

from __future__ import annotations

from typing import Any

import torch


def translations() -> dict[Any, Any]:
    """What torch's exporter writes for demask's own ops."""
    from onnxscript import ir, opset18 as op

    def quantize(x: Any, scale: Any, zero_point: Any, axis: int, dtype: int) -> Any:
        kind = ir.DataType(dtype)
        if zero_point is None and kind != ir.DataType.UINT8:
            zero_point = op.Sub(scale, scale)
        if zero_point is not None and zero_point.dtype != kind:
            zero_point = op.Cast(zero_point, to=int(kind))
        return op.QuantizeLinear(x, scale, zero_point, axis=axis)

    def dequantize(x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
        return op.DequantizeLinear(x, scale, zero_point, axis=axis)

    ops = torch.ops.demask
    return {ops.quantize.default: quantize, ops.dequantize.default: dequantize}
