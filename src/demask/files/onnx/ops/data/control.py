"""ONNX ops that run graphs, and ops on sequences (lists) and optional values (None if absent)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Int, Ops, Value
from demask.files.onnx.values import Host, number_of, numbers_of
from demask.graph.provenance import OnnxPort

OPS = Ops()
MAX_ITERATIONS = 100_000  # more would not end in reasonable time, or not at all
AsTensor = Callable[[Value], Tensor]

OPS("SequenceEmpty")(lambda *, dtype=1: [])


@OPS("SequenceConstruct")
def sequence_of(*elements: Value) -> list[Value]:
    """The inputs as a sequence."""
    return list(elements)


def _require_sequence(sequence: Value) -> list[Any]:
    if not isinstance(sequence, list):
        raise BadInput(f"expected a sequence, got {type(sequence).__name__}")
    return sequence


@OPS("SequenceInsert")
def inserted(sequence: Value, element: Value, position: Int | None = None) -> list[Value]:
    """The sequence with an element inserted at a position, by default at the end."""
    elements = _require_sequence(sequence)
    end = len(elements)
    index = end if position is None else position
    if not -end <= index <= end:
        raise BadInput(f"expected a position in [{-end}, {end}], got {index}")
    index = index + end if index < 0 else index
    return [*elements[:index], element, *elements[index:]]


@OPS("SequenceErase")
def erased(sequence: Value, position: Int = -1) -> list[Value]:
    """The sequence without the element at a position, by default the last."""
    elements = _require_sequence(sequence)
    index = range(len(elements))[position]
    return [*elements[:index], *elements[index + 1 :]]


@OPS("SequenceAt")
def element(sequence: Value, position: Int) -> Value:
    """The element at a position, negative ones from the end."""
    return _require_sequence(sequence)[position]


@OPS("SequenceLength")
def length(sequence: Value) -> Host:
    """The number of elements."""
    return Host.of(np.array(len(_require_sequence(sequence))))


def _host_split(x: np.ndarray, split: np.ndarray | None = None, *, axis: int = 0, keepdims: int = 1) -> Any:
    length = x.shape[axis]
    if split is None:
        parts = [np.take(x, [k] if keepdims else k, axis) for k in range(length)]
    else:
        sizes = [split.item()] * -(-length // split.item()) if split.ndim == 0 else split.tolist()
        parts = np.split(x, np.cumsum(sizes)[:-1].astype(int), axis)
    return [np.asarray(part) for part in parts]


@OPS("SplitToSequence")
def split_to_sequence(
    x: Value, split: Value = None, *, axis: int = 0, keepdims: int = 1, as_tensor: Callable[[Value], Tensor]
) -> list[Value]:
    """Parts of x along an axis: of `split` sizes, or of one size, where the last may be smaller."""
    if isinstance(x, Host) and x.folds and not isinstance(split, Tensor):
        sizes = None if split is None else split.array  # type: ignore[union-attr]
        return [Host.of(part, x.dtype) for part in _host_split(x.array, sizes, axis=axis, keepdims=keepdims)]
    tensor = as_tensor(x)
    if split is None:
        return list(tensor.split(1, axis) if keepdims else tensor.unbind(axis))
    scalar = (split.array if isinstance(split, Host) else split).ndim == 0  # type: ignore[union-attr]
    return list(tensor.split(number_of(split) if scalar else numbers_of(split), axis))


@OPS("ConcatFromSequence")
def concatenated(sequence: Value, *, axis: int, new_axis: int = 0, as_tensor: Callable[[Value], Tensor]) -> Value:
    """The elements concatenated along an axis, or stacked along a new one."""
    elements = _require_sequence(sequence)
    known = [v for v in elements if isinstance(v, Host) and (v.folds or v.dtype is None)]
    if known and len(known) == len(elements):
        arrays = [v.array for v in known]
        result = np.stack(arrays, axis) if new_axis else np.concatenate(arrays, axis)
        return Host.of(result, known[0].dtype)
    tensors = [as_tensor(v) for v in elements]
    return torch.stack(tensors, axis) if new_axis else torch.cat(tensors, axis)


@OPS("Optional")
def optional(x: Value = None, *, type: str = "") -> Value:
    """x, or None."""
    return x


@OPS("OptionalHasElement")
def has_element(x: Value = None) -> Host:
    """Whether there is a value."""
    return Host.of(np.array(x is not None))


@OPS("OptionalGetElement")
def got_element(x: Value) -> Value:
    """The value; BadInput if there is none."""
    if x is None:
        raise BadInput("expected an optional that has a value, got an empty one")
    return x


class Subgraph(Protocol):
    """The plan of a graph in an attribute: its outputs, and how the file declares them."""

    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def ports(self) -> tuple[OnnxPort, ...]: ...


Run = Callable[[Subgraph, Sequence[Value]], list[Value]]


def _control_value(value: Value, what: str) -> Any:
    """A number that controls what runs; read from its tensor if it is one."""
    if isinstance(value, Tensor) and torch.compiler.is_exporting():
        raise BadInput(
            f"expected {what} that is known before the network runs, got one that the network "
            "computes from its inputs' values: fix the input that determines it, by "
            "demask.from_onnx(path, inputs={NAME: VALUE}) or, on the command line, --fix NAME=VALUE"
        )
    return number_of(value)


def _fixed_count(number: Any) -> int:
    """A number of iterations; BadInput for a symbolic size of `torch.export`."""
    if isinstance(number, torch.SymInt):
        raise BadInput("expected a fixed number of iterations, got a dynamic size; export with a fixed size there")
    return int(number)


@OPS("If")
def branch(cond: Value, *, then_branch: Subgraph, else_branch: Subgraph, run: Run) -> tuple[Value, ...]:
    """The outputs of one of two graphs, selected by a condition."""
    return tuple(run(then_branch if _control_value(cond, "a condition") else else_branch, []))


@OPS("Loop")
def loop(
    limit: Value = None, condition: Value = None, *state: Value, body: Subgraph, run: Run, as_tensor: AsTensor
) -> tuple[Value, ...]:
    """The last state, and the outputs of all iterations, stacked.

    The condition that the body returns is used even if there is no initial one, as in onnxruntime.
    """
    count = None if limit is None else _fixed_count(_control_value(limit, "a number of iterations"))
    condition = Host.of(np.array(True)) if condition is None else condition
    ports = body.ports[1 + len(state) :]
    rows: list[list[Value]] = [[] for _ in ports]
    iteration = 0
    while (count is None or iteration < count) and _control_value(condition, "a condition"):
        if iteration >= MAX_ITERATIONS:
            raise BadInput(f"expected at most {MAX_ITERATIONS} iterations of a loop, got more")
        condition, *results = run(body, [Host.of(np.array(iteration)), condition, *state])
        state = tuple(results[: len(state)])
        for row, value in zip(rows, results[len(state) :], strict=True):
            row.append(value)
        iteration += 1
    stacks = [_stack_iterations(r, port, 0, as_tensor) for r, port in zip(rows, ports, strict=True)]
    return (*state, *stacks)


def _stack_iterations(row: list[Value], port: OnnxPort, axis: int, as_tensor: AsTensor) -> Value:
    """Outputs of iterations along a new axis; if there are none, an empty tensor like `port`."""
    if not row:
        sizes = [n if isinstance(n, int) else 0 for n in port.sizes or ()]
        sizes.insert(axis % (len(sizes) + 1), 0)
        return as_tensor(Host.of(np.zeros(sizes))).to(getattr(torch, port.dtype))
    known = [v for v in row if isinstance(v, Host) and v.folds]
    if len(known) == len(row):
        return Host.of(np.stack([v.array for v in known], axis), known[0].dtype)
    return torch.stack([as_tensor(v) for v in row], axis)


@OPS("Scan")
def scan(
    *inputs: Value,
    body: Subgraph,
    num_scan_inputs: int,
    version: int,
    run: Run,
    as_tensor: AsTensor,
    scan_input_axes: Sequence[int] = (),
    scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (),
    directions: Sequence[int] = (),
) -> tuple[Value, ...]:
    """The last state, and the outputs of all iterations, stacked. Each iteration takes a slice of
    every scan input.

    Before opset 9: per sample of a batch, over its first `sequence_lens` slices."""
    if version < 9:
        return _scan_batches(inputs, body, num_scan_inputs, directions, run, as_tensor)
    split = len(inputs) - num_scan_inputs
    axes = list(scan_input_axes) or [0] * num_scan_inputs
    slices = [
        as_tensor(x).unbind(a) if _fixed_count(as_tensor(x).shape[a]) else ()
        for x, a in zip(inputs[split:], axes, strict=True)
    ]
    backward = list(scan_input_directions) or [0] * num_scan_inputs
    slices = [s[::-1] if b else s for s, b in zip(slices, backward, strict=True)]
    state, rows = _run_slices(inputs[:split], slices, body, run)
    output_axes = list(scan_output_axes) or [0] * len(rows)
    reverse = list(scan_output_directions) or [0] * len(rows)
    stacks = [
        _stack_iterations(row[::-1] if b else row, port, axis, as_tensor)
        for row, port, axis, b in zip(rows, body.ports[split:], output_axes, reverse, strict=True)
    ]
    return (*state, *stacks)


def _run_slices(
    state: Sequence[Value], slices: Sequence[Sequence[Value]], body: Subgraph, run: Run
) -> tuple[Sequence[Value], list[list[Value]]]:
    """The last state, and the values of all iterations per scan output."""
    rows: list[list[Value]] = [[] for _ in body.ports[len(state) :]]
    for current in zip(*slices, strict=True):
        results = run(body, [*state, *current])
        state = results[: len(state)]
        for row, value in zip(rows, results[len(state) :], strict=True):
            row.append(value)
    return state, rows


def _scan_batches(
    inputs: Sequence[Value], body: Subgraph, count: int, directions: Sequence[int], run: Run, as_tensor: AsTensor
) -> tuple[Tensor, ...]:
    """Scan of opset 8: batch axis 0, scanned axis 1; outputs past a length are zero."""
    lengths, *rest = inputs
    tensors = [as_tensor(v) for v in rest]
    states, columns = tensors[: len(rest) - count], tensors[len(rest) - count :]
    batch, length = _fixed_count(columns[0].shape[0]), _fixed_count(columns[0].shape[1])
    steps = [length] * batch if lengths is None else [_fixed_count(n) for n in numbers_of(lengths)]
    backward = list(directions) or [0] * count
    results = []
    for b, n in enumerate(steps):
        slices = [x[b].unbind(0)[:n] for x in columns]
        slices = [s[::-1] if r else s for s, r in zip(slices, backward, strict=True)]
        state, rows = _run_slices([s[b] for s in states], slices, body, run)
        stacks = [
            _stack_iterations(row, port, 0, as_tensor) for row, port in zip(rows, body.ports[len(state) :], strict=True)
        ]
        padded = [_pad_rows(as_tensor(s), length) for s in stacks]
        results.append([*map(as_tensor, state), *padded])
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _pad_rows(rows: Tensor, length: int) -> Tensor:
    """Rows, followed by zeros up to a length."""
    missing = rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))
    return torch.cat([rows, missing])


@OPS("SequenceMap")
def sequence_map(sequence: Value, *others: Value, body: Subgraph, run: Run) -> tuple[list[Value], ...]:
    """A graph's outputs for each element of a sequence, as sequences. others: sequences of the same
    length, or one value for all elements."""
    if not isinstance(sequence, list):
        raise BadInput(f"expected a sequence, got {type(sequence).__name__}")
    outputs: list[list[Value]] = [[] for _ in body.outputs]
    for k, element in enumerate(sequence):
        arguments = [v[k] if isinstance(v, list) else v for v in others]
        for row, value in zip(outputs, run(body, [element, *arguments]), strict=True):
            row.append(value)
    return tuple(outputs)
