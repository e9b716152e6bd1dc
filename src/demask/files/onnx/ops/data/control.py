"""ONNX ops that run graphs: If, Loop, Scan, SequenceMap.

Conditions and counts that are known without reading a tensor are evaluated in Python, so an `If` on
sizes is resolved and a `Loop` with a fixed count is unrolled. Others are read from their tensor,
which `torch.export` cannot record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import Host, number_of, numbers_of
from demask.graph.provenance import OnnxPort


class Subgraph(Protocol):
    """The plan of a graph in an attribute: its outputs, and how the file declares them."""

    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def ports(self) -> tuple[OnnxPort, ...]: ...


OPS = Ops()
MAX_ITERATIONS = 100_000  # more would not end in reasonable time, or not at all
Run = Callable[[Subgraph, Sequence[Value]], list[Value]]
AsTensor = Callable[[Value], Tensor]


def _control_value(value: Value, what: str) -> Any:
    """A number that controls what runs; read from its tensor if it is one."""
    if isinstance(value, Tensor) and torch.compiler.is_exporting():
        raise BadInput(
            f"expected {what} that is known before the network runs, got one that the network "
            "computes from its inputs' values: fix the input that determines it, by "
            "demask.from_onnx(path, inputs={NAME: VALUE}) or, on the command line, --fix NAME=VALUE"
        )
    return number_of(value)


def _count(number: Any) -> int:
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
    count = None if limit is None else _count(_control_value(limit, "a number of iterations"))
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
    stacks = [_stack(r, port, 0, as_tensor) for r, port in zip(rows, ports, strict=True)]
    return (*state, *stacks)


def _stack(row: list[Value], port: OnnxPort, axis: int, as_tensor: AsTensor) -> Value:
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
        return _batched(inputs, body, num_scan_inputs, directions, run, as_tensor)
    split = len(inputs) - num_scan_inputs
    axes = list(scan_input_axes) or [0] * num_scan_inputs
    slices = [
        as_tensor(x).unbind(a) if _count(as_tensor(x).shape[a]) else ()
        for x, a in zip(inputs[split:], axes, strict=True)
    ]
    backward = list(scan_input_directions) or [0] * num_scan_inputs
    slices = [s[::-1] if b else s for s, b in zip(slices, backward, strict=True)]
    state, rows = _run_slices(inputs[:split], slices, body, run)
    output_axes = list(scan_output_axes) or [0] * len(rows)
    reverse = list(scan_output_directions) or [0] * len(rows)
    stacks = [
        _stack(row[::-1] if b else row, port, axis, as_tensor)
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


def _batched(
    inputs: Sequence[Value], body: Subgraph, count: int, directions: Sequence[int], run: Run, as_tensor: AsTensor
) -> tuple[Tensor, ...]:
    """Scan of opset 8: batch axis 0, scanned axis 1; outputs past a length are zero."""
    lengths, *rest = inputs
    tensors = [as_tensor(v) for v in rest]
    states, columns = tensors[: len(rest) - count], tensors[len(rest) - count :]
    batch, length = _count(columns[0].shape[0]), _count(columns[0].shape[1])
    steps = [length] * batch if lengths is None else [_count(n) for n in numbers_of(lengths)]
    backward = list(directions) or [0] * count
    results = []
    for b, n in enumerate(steps):
        slices = [x[b].unbind(0)[:n] for x in columns]
        slices = [s[::-1] if r else s for s, r in zip(slices, backward, strict=True)]
        state, rows = _run_slices([s[b] for s in states], slices, body, run)
        stacks = [_stack(row, port, 0, as_tensor) for row, port in zip(rows, body.ports[len(state) :], strict=True)]
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
