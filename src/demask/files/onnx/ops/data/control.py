"""ONNX ops that run graphs: If, Loop, Scan, SequenceMap.

Conditions and counts that are known without looking into a tensor are decided in Python, so that an
`If` on sizes goes away and a `Loop` with a fixed count is written out. Others are read from their
tensor, which `torch.export` cannot record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import Host, number_of, numbers_of

if TYPE_CHECKING:
    from demask.files.onnx.plan import OnnxPlan
    from demask.graph.provenance import OnnxPort

OPS = Ops()
MAX_TURNS = 100_000  # a loop of more would not end in reasonable time, or not at all
Run = Callable[["OnnxPlan", Sequence[Value]], list[Value]]
AsTensor = Callable[[Value], Tensor]


def _decided(value: Value, what: str) -> Any:
    """A number that decides what runs; read from its tensor where it is one."""
    if isinstance(value, Tensor) and torch.compiler.is_exporting():
        raise BadInput(
            f"expected {what} that is known before the network runs, got one that the network "
            "computes from its inputs' values: fix the input that decides it, by "
            "demask.from_onnx(path, inputs={NAME: VALUE}) or, on the command line, --fix NAME=VALUE"
        )
    return number_of(value)


def _count(number: Any) -> int:
    """A number of turns; BadInput for a size that `torch.export` keeps symbolic."""
    if isinstance(number, torch.SymInt):
        raise BadInput(
            "expected a fixed number of turns, got a size that is dynamic; export with a fixed "
            "size there"
        )
    return int(number)


@OPS("If")
def branch(
    cond: Value, *, then_branch: OnnxPlan, else_branch: OnnxPlan, run: Run
) -> tuple[Value, ...]:  # fmt: skip
    """The outputs of one of two graphs."""
    return tuple(run(then_branch if _decided(cond, "a condition") else else_branch, []))


@OPS("Loop")
def loop(
    limit: Value = None, going: Value = None, *state: Value, body: OnnxPlan, run: Run,
    as_tensor: AsTensor,
) -> tuple[Value, ...]:  # fmt: skip
    """The last state, and what each turn gave, stacked.

    The condition that the body gives counts even where none came in, as in onnxruntime."""
    turns = None if limit is None else _count(_decided(limit, "a number of turns"))
    going = Host.of(np.array(True)) if going is None else going
    ports = body.ports[1 + len(state) :]
    rows: list[list[Value]] = [[] for _ in ports]
    turn = 0
    while (turns is None or turn < turns) and _decided(going, "a condition"):
        if turn >= MAX_TURNS:
            raise BadInput(f"expected at most {MAX_TURNS} turns of a loop, got more")
        going, *made = run(body, [Host.of(np.array(turn)), going, *state])
        state = tuple(made[: len(state)])
        for row, value in zip(rows, made[len(state) :], strict=True):
            row.append(value)
        turn += 1
    stacks = [_stacked(r, port, 0, as_tensor) for r, port in zip(rows, ports, strict=True)]
    return (*state, *stacks)


def _stacked(row: list[Value], port: OnnxPort, axis: int, as_tensor: AsTensor) -> Value:
    """What the turns gave, along a new axis; of no turns, as the file says of the output."""
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
    *inputs: Value, body: OnnxPlan, num_scan_inputs: int, version: int, run: Run, as_tensor: AsTensor,
    scan_input_axes: Sequence[int] = (), scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (), scan_output_directions: Sequence[int] = (),
    directions: Sequence[int] = (),
) -> tuple[Value, ...]:  # fmt: skip
    """The last state, and what each turn gave, stacked; a turn takes a slice of every scan input.

    Before opset 9: for each example of a batch, over the first `sequence_lens` of its slices."""
    if version < 9:
        return _batched(inputs, body, num_scan_inputs, directions, run, as_tensor)
    split = len(inputs) - num_scan_inputs
    axes = list(scan_input_axes) or [0] * num_scan_inputs
    slices = [as_tensor(x).unbind(a) if _count(as_tensor(x).shape[a]) else ()
              for x, a in zip(inputs[split:], axes, strict=True)]  # fmt: skip
    backward = list(scan_input_directions) or [0] * num_scan_inputs
    slices = [s[::-1] if b else s for s, b in zip(slices, backward, strict=True)]
    state, rows = _scanned(inputs[:split], slices, body, run)
    places = list(scan_output_axes) or [0] * len(rows)
    reverse = list(scan_output_directions) or [0] * len(rows)
    stacks = [_stacked(row[::-1] if b else row, port, axis, as_tensor) for row, port, axis, b in
              zip(rows, body.ports[split:], places, reverse, strict=True)]  # fmt: skip
    return (*state, *stacks)


def _scanned(
    state: Sequence[Value], slices: Sequence[Sequence[Value]], body: OnnxPlan, run: Run
) -> tuple[Sequence[Value], list[list[Value]]]:
    """The last state, and for each scan output what the turns gave."""
    rows: list[list[Value]] = [[] for _ in body.ports[len(state) :]]
    for taken in zip(*slices, strict=True):
        made = run(body, [*state, *taken])
        state = made[: len(state)]
        for row, value in zip(rows, made[len(state) :], strict=True):
            row.append(value)
    return state, rows


def _batched(
    inputs: Sequence[Value], body: OnnxPlan, count: int, directions: Sequence[int], run: Run,
    as_tensor: AsTensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Scan of opset 8: batch axis 0, scanned axis 1; slices past a length are zero."""
    lengths, *rest = inputs
    tensors = [as_tensor(v) for v in rest]
    states, columns = tensors[: len(rest) - count], tensors[len(rest) - count :]
    batch, whole = _count(columns[0].shape[0]), _count(columns[0].shape[1])
    steps = [whole] * batch if lengths is None else [_count(n) for n in numbers_of(lengths)]
    backward = list(directions) or [0] * count
    results = []
    for b, n in enumerate(steps):
        slices = [x[b].unbind(0)[:n] for x in columns]
        slices = [s[::-1] if r else s for s, r in zip(slices, backward, strict=True)]
        state, rows = _scanned([s[b] for s in states], slices, body, run)
        stacks = [_stacked(row, port, 0, as_tensor) for row, port in
                  zip(rows, body.ports[len(state) :], strict=True)]  # fmt: skip
        padded = [_padded(as_tensor(s), whole) for s in stacks]
        results.append([*map(as_tensor, state), *padded])
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _padded(rows: Tensor, length: int) -> Tensor:
    """Rows, with zeros behind them up to a length."""
    missing = rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))
    return torch.cat([rows, missing])


@OPS("SequenceMap")
def sequence_map(
    sequence: Value, *others: Value, body: OnnxPlan, run: Run
) -> tuple[list[Value], ...]:  # fmt: skip
    """A graph's outputs for each element of a sequence, as sequences. others: sequences that go
    along, or one value for all."""
    if not isinstance(sequence, list):
        raise BadInput(f"expected a sequence, got {type(sequence).__name__}")
    made: list[list[Value]] = [[] for _ in body.outputs]
    for k, element in enumerate(sequence):
        beside = [v[k] if isinstance(v, list) else v for v in others]
        for row, value in zip(made, run(body, [element, *beside]), strict=True):
            row.append(value)
    return tuple(made)
