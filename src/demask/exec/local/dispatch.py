"""One call on parts of its operands.

    run(parts of operands that needs(window) names, window) == op(full operands)[window]

The op's entry in the table selects the way: along carried axes, the op runs on the parts; views and
shuffles are copied; sliding windows read a border only where the image has one; moved positions
(slices, joins, pads, flips, rolls) are copied from their source, here.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.exec import axes as parts
from demask.exec.axes import COLUMNS, NONE, ROWS, Axes, Window
from demask.exec.local.call import LocalCall, LocalKind, OperandCut, Scratch, activate, narrowed, nbytes, stepped
from demask.exec.local.carried import LocalApply, LocalRearrange, is_rearranged
from demask.exec.local.kernels import faster_kind
from demask.exec.local.resize import LocalResize
from demask.exec.local.windows import windowed
from demask.ops import regions, schema
from demask.ops.entry import Declined, op_name
from demask.ops.flow import axis_of
from demask.ops.positions import IndexMap
from demask.ops.regions import Interval, Rule
from demask.ops.relation import Relation
from demask.ops.schema import fake
from demask.tune.epilogue import Epilogue

_MANY = 16  # more runs of one axis than that are selected by index, not copied one by one


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions [first, first + count) of an output's axis.

    They are read from positions start, start + step, ... of operand `source`; -1: padding. index:
    the positions, where they are no progression.
    """

    first: int
    count: int
    source: int
    start: int
    step: int
    index: Tensor | None = None


def runs(sources: Sequence[int], positions: Sequence[int]) -> list[PositionRun]:
    """The runs of an axis, each as long as possible (greedy)."""
    merged: list[PositionRun] = []
    k = 0
    while k < len(sources):
        end = k + 1
        step = positions[end] - positions[k] if end < len(sources) else 1
        while (
            end < len(sources)
            and sources[end] == sources[k]
            and (sources[k] < 0 or positions[end] - positions[end - 1] == step)
        ):
            end += 1
        merged.append(PositionRun(k, end - k, sources[k], positions[k], step if end - k > 1 else 1))
        k = end
    return merged


@dataclass(frozen=True, slots=True)
class MovedAxis:
    """One moved axis of the output, as runs. firsts: of each. value: of padding."""

    axis: int
    runs: tuple[PositionRun, ...]
    firsts: tuple[int, ...]
    value: float

    @staticmethod
    def of(axis: int, move: IndexMap) -> MovedAxis:
        axis_runs = tuple(runs(move.source.tolist(), move.position.tolist()))
        return MovedAxis(axis, axis_runs, tuple(run.first for run in axis_runs), move.value)

    def within(self, interval: Interval, lows: Sequence[int]) -> list[PositionRun]:
        """The runs of an interval, relative to its start.

        lows: per operand, the position along this axis at which its part begins.
        """
        start, end = interval
        first_run = max(bisect_right(self.firsts, start) - 1, 0)
        clipped = []
        for run in itertools.islice(self.runs, first_run, None):
            if run.first >= end:
                break
            low, high = max(run.first, start), min(run.first + run.count, end)
            if low >= high:
                continue
            position = run.start + (low - run.first) * run.step
            position -= lows[run.source] if run.source >= 0 else 0
            clipped.append(PositionRun(low - start, high - low, run.source, position, run.step))
        return clipped if len(clipped) <= _MANY else _merge_adjacent(clipped)


def _merge_adjacent(clipped: list[PositionRun]) -> list[PositionRun]:
    """Adjacent runs of one operand merged into one with an index."""
    merged = []
    for source, group in itertools.groupby(clipped, key=lambda run: run.source):
        members = list(group)
        index = [run.start + k * run.step for run in members for k in range(run.count)]
        merged.append(PositionRun(members[0].first, len(index), source, index[0], 0, torch.tensor(index)))
    return merged


@dataclass(frozen=True, slots=True, eq=False)
class LocalMove(LocalKind):
    """A call that moves positions: it copies runs of them."""

    call: LocalCall
    axes: tuple[MovedAxis, ...]

    @staticmethod
    def of(call: LocalCall) -> LocalMove | Declined:
        relation, axes = call.relation, []
        for axis, letters in enumerate(relation.outs[0]):
            if letters and letters[0] in relation.moved:
                move = relation.moves[0].get(letters[0].partition(">")[0])
                if move is None:
                    return Declined(f"{op_name(call.node.target)}: its positions are not known")
                axes.append(MovedAxis.of(axis, move))
        return LocalMove(call, tuple(axes))

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        for taken in itertools.product(*self.runs_within(window)):
            target, source = into, max(run.source for run in taken)
            for moved, run in zip(self.axes, taken, strict=True):
                target = target.narrow(moved.axis, run.first, run.count)
            if any(run.source < 0 for run in taken):
                value = next(a.value for a, run in zip(self.axes, taken, strict=True) if run.source < 0)
                target.fill_(value)
            else:
                self._copy(values[source], target, taken)

    def runs_within(self, window: Window) -> list[list[PositionRun]]:
        """The runs of each moved axis within a window, relative to its start and to those of the operands' parts."""
        return [
            moved.within(self.call.window(moved.axis, window), self._part_starts(moved.axis, window))
            for moved in self.axes
        ]

    def _part_starts(self, axis: int, window: Window) -> list[int]:
        """Per operand, the position at which its part begins along an axis."""
        if axis not in self.call.axes:
            return [0] * len(self.call.cuts)
        dim = self.call.axes.index(axis)
        rules = [cut.rules[dim] for cut in self.call.cuts]
        return [0 if rule is None else rule(*window[dim])[0] for rule in rules]

    def _copy(self, x: Tensor, into: Tensor, taken: Sequence[PositionRun]) -> None:
        selected: list[tuple[int, Tensor]] = []
        for moved, run in zip(self.axes, taken, strict=True):
            if run.index is not None:
                selected.append((moved.axis, run.index))
            elif run.step < 0:
                positions = run.start + run.step * torch.arange(run.count)
                selected.append((moved.axis, positions))
            elif run.step == 0:
                x = x.narrow(moved.axis, run.start, 1)
            else:
                x = stepped(x, moved.axis, run.start, run.count, run.step)
        for axis, index in selected[:-1]:
            x = x.index_select(axis, index)
        if selected:
            shape = [into.shape[k] if k == selected[-1][0] else n for k, n in enumerate(x.shape)]
            if tuple(shape) == tuple(into.shape):
                torch.index_select(x, *selected[-1], out=into)
                return
            x = x.index_select(*selected[-1])
        into.copy_(x)

    def allocated_bytes(self, window: Window) -> int:
        """The first of two selections, where indices select along two axes."""
        has_index = [
            any(r.index is not None or r.step < 0 for r in axis_runs) for axis_runs in self.runs_within(window)
        ]
        return self.call.bytes(window) if sum(has_index) > 1 else 0


RESIZES = ("nearest", "exact", "linear", "cubic")


@dataclass(frozen=True, slots=True)
class Read:
    """An operand that is cut.

    operand: its index. rules: what a window of the output needs along its rows and columns.
    all_rows: whether every window needs all of its rows.
    """

    node: fx.Node
    operand: int
    rules: tuple[Rule, Rule]
    all_rows: bool


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A call that can be run on parts of its operands."""

    node: fx.Node
    relation: Relation
    axes: Axes
    reads: tuple[Read, ...]
    call: LocalCall
    kind: LocalKind

    @property
    def pointwise(self) -> bool:
        """Whether the output may be written over an operand that is read at the same positions."""
        return self.kind.pointwise

    def needs(self, read: int, dim: int, start: int, end: int) -> Interval:
        """The interval of an operand that positions [start, end) along rows or columns need."""
        return self.reads[read].rules[dim](start, end)

    def run(
        self,
        operands: Sequence[Any],
        window: Window,
        into: Tensor | None = None,
        scratch: Scratch = parts.empty,
        *,
        after: Epilogue | None = None,
        add: bool = False,
    ) -> Tensor:
        """The output's part of a window, written into `into` where that is not None.

        Args:
            operands: of each operand of the relation, exactly the part that the window needs; all
                of it where it is not cut.
            add: whether to add to the values in `into`.
            after: an activation to apply last.

        Raises:
            ValueError: if `add` is set and the call is no convolution.
        """
        if add and not self.kind.adds:
            raise ValueError(f"{self.node}: expected a convolution to add onto, got {self.node.target}")
        call, computed = self.call, self.kind.computed_window(window)
        if into is None:
            into = parts.empty(call.sizes(window), self.axes, call.dtype)
        values = self._narrowed(operands, window)
        target = into if computed == window else scratch(call.sizes(computed), self.axes, call.dtype)
        if self.kind.adds:
            self.kind.run_onto(values, window, target, scratch, after, add)  # type: ignore[attr-defined]
            return into
        self.kind.run(values, window, target, scratch)
        if target is not into:
            origin = (computed[ROWS][0], computed[COLUMNS][0])
            into.copy_(parts.part(target, self.axes, window, origin))
        if after is not None:
            activate(after, into)
        return into

    def _narrowed(self, operands: Sequence[Any], window: Window) -> list[Any]:
        """The operands; those that arrive uncut are narrowed to what the window needs."""
        values = list(operands)
        for k, cut in enumerate(self.call.cuts):
            for axis, rule, arrives, w in zip(cut.axes, cut.rules, cut.arrives, window, strict=True):
                if axis is not None and rule is not None and not arrives:
                    values[k] = narrowed(values[k], axis, rule(*w))
        return values

    def macs(self, window: Window) -> int:
        """Multiply-adds that `run` executes."""
        return self.kind.macs(self.kind.computed_window(window))

    def scratch_bytes(self, window: Window) -> int:
        """Bytes that `run` requests from scratch."""
        computed = self.kind.computed_window(window)
        crop = 0 if computed == window else nbytes(self.call.sizes(computed), self.call.dtype)
        return crop + self.kind.scratch_bytes(window)

    def allocated_bytes(self, window: Window) -> int:
        """Bytes that torch allocates during `run`."""
        return self.kind.allocated_bytes(window)


def local(node: fx.Node, relation: Relation | Declined, axes: Mapping[fx.Node, Axes]) -> Local | Declined:
    """How a call runs on parts; Declined where it must run on full operands.

    axes: of the values that are cut, including the call's own.
    """
    if isinstance(relation, Declined):
        return relation
    name, pair = op_name(node.target), axes.get(node)
    if pair is None or pair[ROWS] is None:
        return Declined(f"{name}: no rows run through it")
    if len(relation.outs) != 1:
        return Declined(f"{name}: several outputs have no parts yet")
    operands = [_cut_operand(relation, k, pair, axes) for k in range(len(relation.operands))]
    for cut, _ in operands:
        if isinstance(cut, Declined):
            return cut
    bound = dict(schema.arguments(node))
    for index in relation.entry.indices:
        bound[index] = bound[index].meta["positions"]
    shape = tuple(schema.example_size(n) for n in fake(node).shape)
    call = LocalCall(relation, pair, shape, fake(node).dtype, bound, tuple(cut for cut, _ in operands))  # type: ignore[arg-type]
    kind = _select_kind(call)
    if isinstance(kind, Declined):
        return kind
    return Local(node, relation, pair, tuple(r for _, r in operands if r is not None), call, kind)


def _cut_operand(
    relation: Relation, k: int, pair: Axes, axes: Mapping[fx.Node, Axes]
) -> tuple[OperandCut | Declined, Read | None]:
    """How operand k is cut along the output's rows and columns, and what is read of it."""
    operand, operand_axes, rules, arrives = relation.operands[k], [], [], []
    value = fake(operand.value) if isinstance(operand.value, fx.Node) else None
    shape = () if value is None else tuple(schema.example_size(n) for n in value.shape)
    value_axes = axes.get(operand.value, NONE) if value is not None else NONE
    for dim, axis in enumerate(pair):
        along = None if axis is None else axis_of(relation, k, axis)
        here = along is not None and value_axes[dim] == along
        if here and dim == ROWS and regions.is_whole(relation, k, axis or 0):
            return Declined(f"{op_name(relation.node.target)} needs all rows at once"), None
        operand_axes.append(along)
        rules.append(None if along is None else regions.region_rule(relation, k, axis or 0))
        arrives.append(here)
    cut = OperandCut((operand_axes[0], operand_axes[1]), (rules[0], rules[1]), (arrives[0], arrives[1]), shape)
    if value_axes == NONE:
        return cut, None
    window_rules = []
    for dim in (ROWS, COLUMNS):
        cut_axis, rule = value_axes[dim], rules[dim]
        window_rules.append(rule if arrives[dim] else _all_positions(1 if cut_axis is None else shape[cut_axis]))
    return cut, Read(operand.value, k, (window_rules[0], window_rules[1]), all_rows=not arrives[ROWS])


def _all_positions(length: int) -> Rule:
    return lambda start, end: (0, length)


def _select_kind(call: LocalCall) -> LocalKind | Declined:
    """The way to run a call, selected by the table's roles of the axes that are cut."""
    relation = call.relation
    letters = {letter for axis in call.axes if axis is not None for letter in relation.outs[0][axis]}
    if letters & relation.moved:
        return LocalMove.of(call)
    if letters & relation.window and relation.entry.region in RESIZES:
        return LocalResize.of(call)
    if letters & relation.window:
        return faster_kind(windowed(call))
    if is_rearranged(call):
        return LocalRearrange.of(call)
    return LocalApply.of(call)
