"""Whether an edited ONNX file computes what the original does: both run on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput, Mismatch
from demask.files.onnx.check import UNITS, draws, onnxruntime, relative_error, session
from demask.files.onnx.edit.foreign import longer_inputs
from demask.files.onnx.values import numpy_of

QUANTIZED = ("DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "ConvInteger",
             "QLinearConv", "QLinearMatMul")  # fmt: skip
FUSED = 0.05  # the runtime's fused integer kernels differ by this much from the file's own ops
Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Verdict:
    """error: the largest difference from the original, relative to the largest value of its output;
    None if nothing could run the files. by: what ran them."""

    error: float | None
    by: str


def compare_files(
    original: str, edited: bytes, inputs: Sequence[Tensor], tolerance: float | None
) -> Verdict:
    """Compare two files on the example, zeros, ones, and tiny, large, negative and normal numbers,
    at the example's sizes and at larger ones where the file leaves sizes open. Inputs on which the
    original fails are skipped.

    Raises:
        Mismatch: an output differs by more than `tolerance` (default: 84 units in the last place of
            the largest value, or what rounding of the inputs moves it), or the edited file
            fails.
    """
    pair = _runners(original, edited, optimized=True)
    if pair is None:
        return Verdict(None, "nothing")
    model, names, by = _declared(original), [p.name for p in pair[0].get_inputs()], "ONNX Runtime"
    cases = [(d.kind, _feeds(names, d.inputs)) for d in draws(inputs)]
    ones = [torch.ones_like(x) if x.is_floating_point() else x for x in inputs]
    cases.append(("ones", _feeds(names, ones)))
    cases += [(f"{kind}, larger sizes", longer_inputs(model, feeds)) for kind, feeds in cases]
    plain = _runners(original, edited, optimized=False)
    is_quantized = any(node.op_type in QUANTIZED for node in model.graph.node)
    errors = [0.0]
    for k, (kind, feeds) in enumerate(cases):
        reference = _outputs(plain[0], feeds) if plain else None
        expected = _outputs(pair[0], feeds)
        if expected is None:
            if k == 0:
                raise BadInput(f"ONNX Runtime fails on the original network, on {kind}")
            continue
        moved = [reference, *(_outputs(pair[0], _nudged(feeds, seed)) for seed in range(3))]
        if is_quantized and plain and reference is not None:
            errors.append(_worst(kind, reference, _outputs(plain[1], feeds), [], tolerance))
            _worst(kind, expected, _outputs(pair[1], feeds), moved, tolerance or FUSED)
        else:
            errors.append(_worst(kind, expected, _outputs(pair[1], feeds), moved, tolerance))
    return Verdict(max(errors), by)


def _runners(original: str, edited: bytes, *, optimized: bool) -> tuple[Any, Any] | None:
    """Both files, ready to run; None where nothing here runs the original."""
    if onnxruntime() is None:
        return None
    try:
        first = session(original, optimized=optimized)
    except BadInput:
        return None
    try:
        return first, session(edited, optimized=optimized)
    except BadInput as error:
        raise Mismatch(f"the edited file does not load: {error}") from error


def _declared(path: str) -> Any:
    import onnx

    return onnx.load(path, load_external_data=False)


def _feeds(names: Sequence[str], inputs: Sequence[Tensor]) -> Feeds:
    return {name: numpy_of(x) for name, x in zip(names, inputs, strict=True)}


def _nudged(feeds: Feeds, seed: int) -> Feeds:
    """Inputs with every number rounded to one of its neighbors, at random."""
    draw, nudged = np.random.default_rng(seed), dict(feeds)
    for name, array in feeds.items():
        if array.dtype.kind == "f":
            ends = np.where(draw.integers(2, size=array.shape), np.inf, -np.inf)
            nudged[name] = np.nextafter(array, ends.astype(array.dtype))
    return nudged


def _outputs(runner: Any, feeds: Feeds) -> list[Any] | None:
    try:
        return runner.run(None, dict(feeds))
    except Exception:  # its exceptions share no base class
        return None


def _worst(
    kind: str, expected: list[Any], outputs: list[Any] | None, moved: Sequence[list[Any] | None],
    tolerance: float | None,
) -> float:  # fmt: skip
    """The largest relative difference of floats. Raises Mismatch if one is too large."""
    if outputs is None:
        raise Mismatch(f"the edited file fails on {kind}, on which the original runs")
    worst = 0.0
    for k, (a, b) in enumerate(zip(expected, outputs, strict=True)):
        others = [run[k] for run in moved if run is not None]
        error = _difference(a, b)
        allowed = tolerance
        if allowed is None:
            is_float = isinstance(a, np.ndarray) and a.dtype.kind == "f"
            units = UNITS * float(np.finfo(a.dtype).eps) if is_float else 0.0
            allowed = max([units, *(_difference(a, c) for c in others)])
        if not error <= allowed:
            raise Mismatch(f"output {k} differs by {error:.2g} relative to its largest value "
                           f"(on {kind}; allowed are {allowed:.2g})")  # fmt: skip
        worst = max(worst, error if error < np.inf else 0.0)
    return worst


def _difference(a: Any, b: Any) -> float:
    """Largest |a - b| relative to the largest |a|; infinite for what cannot be subtracted."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return 0.0 if _equal(a, b) else np.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    return relative_error(a, b, exact=a.dtype.kind != "f")


def _equal(a: Any, b: Any) -> bool:
    """Whether sequences and mappings, as the runtime returns them, are equal."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)
