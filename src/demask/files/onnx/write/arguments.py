"""Checks of arguments of `to_onnx`."""

from __future__ import annotations

from demask.errors import BadInput
from demask.files.onnx.read.reader import installed


def check_opset(opset: int | None) -> None:
    """Raise BadInput for a version that the installed onnx does not know."""
    if opset is None:
        return
    installed()
    import onnx

    latest = onnx.defs.onnx_opset_version()
    if isinstance(opset, bool) or opset not in range(1, latest + 1):
        raise BadInput(f"expected a version of ONNX's op set from 1 to {latest}, got {opset!r}")


def check_tolerance(tolerance: float | None) -> None:
    """Raise BadInput where a tolerance is not a positive finite number."""
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise BadInput(f"expected tolerance=None or a number above 0, got {tolerance}")
