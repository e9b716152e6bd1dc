"""Comparison of an ONNX file with the network that it was written from, by calling both.

The inputs are the example, zeros, and tiny, large, negative and normal random numbers. Rounding
differs between implementations, so floats may differ by UNITS in the last place of an output's
largest value. Where they differ by more, `graph.rounding` measures how far rounding alone moves
that output: where all scores of a detector are near 1e-5, a sigmoid that is accurate to the last
digit of 1 is 1 % off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput, Mismatch
from demask.files.onnx.read.reader import installed
from demask.graph.input_domains import Domain
from demask.graph.rounding import Rounding
from demask.ops import Table

UNITS = 84  # in the last place of the largest value: 1e-5 in float32, for sums in another order
ATTRIBUTES = float(np.finfo(np.float32).eps)  # relative; attributes of ONNX ops are float32
MOVED = 8  # times the change of an output when every call is rounded; operands were rounded too
LARGE = 1e4
TINY = 1e-9
Arrays = list[np.ndarray]
Run = Callable[[Sequence[Tensor]], Arrays]
Change = Callable[[Tensor], Tensor]
Filled = Callable[[Sequence[Tensor]], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Draw:
    """Inputs of one call. kind: description of the inputs, for messages."""

    kind: str
    inputs: tuple[Tensor, ...]


def draws(example: Sequence[Tensor], domains: Sequence[Domain] | None = None) -> list[Draw]:
    """The example and inputs of its shapes; integers, which may be indices, stay the example's.

    domains: of each input. Numbers of any size are drawn for floating-point inputs whose domain has
    no bounds; for others those of the domain. Default: what the example shows.
    """
    domains = [Domain.of(x) for x in example] if domains is None else domains
    kinds: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
        "zeros": lambda x, _: torch.zeros_like(x),
        "tiny numbers": lambda x, draw: _normal(x, draw, TINY),
        "large numbers": lambda x, draw: _normal(x, draw, 16 if _is_half(x) else LARGE),
        "negative numbers": lambda x, draw: _normal(x, draw, 1, torch.Tensor.abs, torch.neg),
        "normal numbers": lambda x, draw: _normal(x, draw, 1),
    }
    results = [Draw("the example", tuple(x.detach() for x in example))]
    for seed, (kind, fill) in enumerate(kinds.items()):
        draw = torch.Generator().manual_seed(seed)
        inputs = [
            x if not x.is_floating_point()
            else fill(x.detach(), draw) if domain == Domain() else domain.draw(x, draw)
            for x, domain in zip(example, domains, strict=True)
        ]  # fmt: skip
        results.append(Draw(kind, tuple(inputs)))
    return results if any(x.is_floating_point() for x in example) else results[:1]


def _normal(x: Tensor, draw: torch.Generator, scale: float, *then: Change) -> Tensor:
    """Normal numbers of x's shape and dtype. then: applied in float32, as some dtypes lack ops."""
    numbers = torch.randn(x.shape, generator=draw) * scale
    for change in then:
        numbers = change(numbers)
    return numbers.to(x)


def _is_half(x: Tensor) -> bool:
    return x.dtype == torch.float16


def add_row(draw: Draw, axes: Sequence[bool]) -> Draw:
    """The draw with the first row repeated in each input whose first axis is dynamic (`axes`)."""
    rows = [torch.cat([x, x[:1]]) if more else x
            for x, more in zip(draw.inputs, axes, strict=True)]  # fmt: skip
    return Draw(f"{draw.kind}, one row more", tuple(rows))


@dataclass(frozen=True, slots=True)
class OutputComparator:
    """Comparator of outputs.

    network: the file was written from it. filled: returns its args and kwargs for input tensors.
    table: of its ops. tolerance: largest allowed difference, relative to the largest value of an
    output; None selects the rule of this module. least: relative difference that is always allowed,
    also for integers (one step of quantized values).
    """

    network: fx.GraphModule
    filled: Filled
    table: Table
    tolerance: float | None = None
    least: float = 0.0
    rounding: Rounding = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding(self.network, self.table))

    def difference(self, draw: Draw, expected: Arrays, outputs: Arrays) -> float:
        """The largest difference, relative to the largest value of its output. Raises Mismatch,
        with the kind of input and the output, where one is too large."""
        if len(expected) != len(outputs):
            raise Mismatch(f"{len(outputs)} outputs, expected {len(expected)} (on {draw.kind})")
        errors = [self._error(*pair) for pair in zip(expected, outputs, strict=True)]
        bad = [k for k, error in enumerate(errors) if not error <= self._allowed(expected[k])]
        if bad and self.tolerance is None:
            bad = self._beyond_rounding(bad, draw, expected, outputs)
        if bad:
            raise Mismatch(
                _describe(bad[0], draw, expected[bad[0]], outputs[bad[0]], errors[bad[0]])
            )
        return max((error for error in errors if error < np.inf), default=0.0)

    def _error(self, a: np.ndarray, b: np.ndarray) -> float:
        """Largest |a - b| relative to the largest |a|; infinite where shapes, dtypes or values that
        cannot be subtracted differ."""
        if a.shape != b.shape or a.dtype != b.dtype:
            return np.inf
        small_int = a.dtype.kind in "iu" and a.dtype.itemsize < 4 and (self.least or self.tolerance)
        return relative_error(a, b, exact=a.dtype.kind != "f" and not small_int)

    def _allowed(self, a: np.ndarray) -> float:
        if self.tolerance is not None:
            return self.tolerance
        if a.dtype.kind != "f":
            return self.least
        return max(self.least, UNITS * float(np.finfo(a.dtype).eps), ATTRIBUTES)

    def _beyond_rounding(
        self, bad: list[int], draw: Draw, expected: Arrays, outputs: Arrays
    ) -> list[int]:
        """The outputs among `bad` that differ by more than rounding explains. Each run can only
        explain more, so runs stop when no output is left."""
        runs = self.rounding.runs(*self.filled(draw.inputs))
        rounded = [_arrays(next(runs))]
        for run in runs:
            rounded.append(_arrays(run))
            bad = [k for k in bad if not _is_rounding(
                [run[k] for run in rounded], expected[k], outputs[k], self._allowed(expected[k])
            )]  # fmt: skip
            if not bad:
                break
        return bad


def relative_error(a: np.ndarray, b: np.ndarray, *, exact: bool) -> float:
    """Largest |a - b| relative to the largest |a|, of arrays of one shape and dtype; infinite where
    one is not finite and they differ, and with `exact` where they differ at all."""
    if exact:
        return 0.0 if np.array_equal(a, b) else np.inf
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=a.dtype.kind == "f"):
        return np.inf
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    return float(np.abs(x - y).max(initial=0.0)) / (float(np.abs(x).max(initial=0.0)) or 1.0)


def _is_rounding(runs: Arrays, a: np.ndarray, b: np.ndarray, allowed: float) -> bool:
    """Whether rounding explains the difference of outputs `a` and `b`: it moves the output as far,
    or b is no less accurate than a. runs: the output in float64, then with every call rounded."""
    clean, *noisy = runs
    if not all(run.shape == a.shape == b.shape for run in runs) or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        moves = np.any([run != clean for run in noisy], axis=0)
        return bool(np.all((a == b) | moves))
    with np.errstate(all="ignore"):
        is_small = np.all([np.abs(run) < np.finfo(a.dtype).max / 2 for run in runs], axis=0)
        if not np.all(np.isfinite(a[is_small]) & np.isfinite(b[is_small])):
            return False
        moved = np.max([np.abs(run - clean)[is_small] for run in noisy], axis=0)
        gap = np.abs(a[is_small].astype(np.float64) - b[is_small])
        limit = allowed * np.abs(a[is_small]).max(initial=0)
        is_within = gap <= limit + MOVED * np.maximum(moved, _median(moved))
        own_error = np.abs(a - clean)[is_small].max(initial=0)  # runtimes may be far less accurate
        return bool(np.all(is_within | (np.abs(b - clean)[is_small] <= own_error)))


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if values.size else 0.0


def _describe(k: int, draw: Draw, a: np.ndarray, b: np.ndarray, error: float) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        difference = f"is {b.dtype} {b.shape}, expected {a.dtype} {a.shape}"
    elif error < np.inf:
        difference = f"differs by {error:.2g} relative to its largest value"
    else:
        index = np.unravel_index(int(np.argmax(_differ(a, b))), a.shape)
        difference = f"differs: {b[index]} at {tuple(map(int, index))}, expected {a[index]}"
    return f"output {k} {difference} (on {draw.kind})"


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both = np.isnan(a) & np.isnan(b) if a.dtype.kind == "f" else False
    return (a != b) & ~both & ~(np.isfinite(a) & np.isfinite(b) & (a.dtype.kind == "f"))


def torch_run(network: fx.GraphModule, filled: Filled) -> Run:
    """A function that calls a network in eval mode and returns arrays."""

    def run(inputs: Sequence[Tensor]) -> Arrays:
        args, kwargs = filled([x.clone() for x in inputs])
        with torch.no_grad():
            return _arrays(network(*args, **kwargs))

    return run


def _arrays(outputs: Any) -> Arrays:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [leaf.detach().cpu().numpy() for leaf in leaves]


def session(model: str | bytes, threads: int = 1, *, optimized: bool = True) -> Any:
    """A session of ONNX Runtime, None where that is not installed.

    Args:
        model: path or bytes of the file.
        threads: of each op.
        optimized: whether the runtime may fuse and fold.

    Raises:
        BadInput: the runtime does not accept the file.
    """
    if (runtime := onnxruntime()) is None:
        return None
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    # Spinning threads of one session would occupy cores that the next session needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimized:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes share no base
        raise BadInput(f"ONNX Runtime does not take the network: {first_line(error)}") from error


def file_run(model: bytes, *, optimized: bool = True) -> Run:
    """A function that runs a file in ONNX Runtime, or in `onnx`'s reference implementation."""
    runner = session(model, optimized=optimized)
    if runner is None:
        from onnx.reference import ReferenceEvaluator

        runner = ReferenceEvaluator(installed().ModelProto.FromString(model))
        names = runner.input_names
    else:
        names = [port.name for port in runner.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> Arrays:
        pairs = zip(names, inputs, strict=True)
        feed: Any = {name: x.detach().cpu().numpy() for name, x in pairs}
        return [np.asarray(value) for value in runner.run(None, feed)]

    return run


def onnxruntime() -> Any:
    """The package onnxruntime, None where it is missing."""
    try:
        import onnxruntime as runtime
    except ImportError:
        return None
    return runtime


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check(model: bytes, judge: OutputComparator, several: Iterable[Draw]) -> float:
    """The largest difference between a file and the network that it was written from.

    Draws after the example on which the network itself fails are skipped. So are draws on which a
    quantized network differs only through ONNX Runtime's own rewriting, which computes in fewer
    bits than the file specifies.

    Raises:
        Mismatch: an output differs.
        BadInput: the runtime does not accept the file.
    """
    network, file = torch_run(judge.network, judge.filled), file_run(model)
    worst = 0.0
    for k, draw in enumerate(several):
        try:
            expected = network(draw.inputs)
        except Exception as error:
            if k == 0:
                raise BadInput(f"the network fails on {draw.kind}: {first_line(error)}") from error
            continue
        try:
            worst = max(worst, judge.difference(draw, expected, _called(file, draw)))
        except Mismatch as error:
            if not _is_rewriting(model, judge, draw, expected):
                raise
            if not judge.least:
                words = "with ONNX Runtime's own optimizations disabled it is equal"
                raise Mismatch(f"{error}; {words}") from error
    return worst


def _called(file: Run, draw: Draw) -> Arrays:
    try:
        return file(draw.inputs)
    except Exception as error:
        raise Mismatch(f"the file fails on {draw.kind}: {first_line(error)}") from error


def _is_rewriting(model: bytes, judge: OutputComparator, draw: Draw, expected: Arrays) -> bool:
    """Whether there is no difference when the runtime does not rewrite the file."""
    if onnxruntime() is None:
        return False
    try:
        judge.difference(draw, expected, _called(file_run(model, optimized=False), draw))
    except (Mismatch, BadInput):
        return False
    return True
