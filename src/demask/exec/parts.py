"""The steps of a plan as one program, in which every call is a call of ATen on parts.

A band of rows of conv(relu(x)) becomes

    rows = slice(x, 2, 8, 13); y = relu(rows); z = conv(cat([last two rows of y before, y]))

so that whatever runs, measures or translates programs does so with tiled execution: nothing is computed twice that the
plan does not compute twice, and every value lives as long as the plan lets it live. Values between segments, and
results, are *joins*: concatenations of parts. In a memory, each part is written to its position as soon as it is
computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.exec.analysis.flow import Flow, flow_of_calls
from demask.exec.axes import Window, cut_shape, full_window
from demask.exec.local.call import Sliding, grown
from demask.exec.local.carried import LocalApply, LocalRearrange, size_arguments
from demask.exec.local.dispatch import Local, LocalMove, PositionRun
from demask.exec.local.resize import LocalResize
from demask.exec.local.windows import LocalAvgPool, LocalConv, LocalMaxPool
from demask.exec.planning.plan import Segment
from demask.exec.planning.plan_memory import stage_of, steps_of
from demask.exec.planning.schedule import LiveRows, Stage, Step, Unit
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Table
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.ops.traits import ADAPTIVE_AVERAGE_POOLS, CONV_OF_AXES, MAXIMA, MEANS, SUMS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PartsProgram:
    """A program of parts.

    joins: calls that only concatenate parts. writes: by part, the joins that contain it, and its first position along
    each axis there. outside: inputs, and joins, that are outside of the memory for which the plan is: they are read by
    slices.
    """

    program: Program
    joins: frozenset[fx.Node]
    writes: Mapping[fx.Node, tuple[tuple[fx.Node, tuple[int, ...]], ...]]
    outside: frozenset[fx.Node]


def flow_in_calls(program: Program, table: Table) -> Flow:
    """The flow of a program whose calls on parts are calls of ATen; others run on full values."""
    flow = flow_of_calls(program, table).without_compiler
    local = {node: here for node, here in flow.local.items() if _is_call(here)}
    gathers = {node: here for node, here in flow.gathers.items() if _is_reduced(flow, node)}
    return replace(flow, local=local, gathers=gathers)


def _is_reduced(flow: Flow, node: fx.Node) -> bool:
    """Whether a gathered call is a sum, a mean or a maximum over rows and columns."""
    operand: Any = flow.gathers[node]
    cut = {axis for axis in flow.axes[flow.gathered(node)] if axis is not None}
    return node.target in _REDUCTIONS and cut <= set(operand.operand.dims)


def write_tile(stage: Stage, step: Step) -> Program:
    """The program of one tile. Its inputs are windows of the values that enter a stage, in their order, then the
    `uncut_operands`; its results are windows of the targets. stage: of calls that `can_write`."""
    writer = PartsWriter(stage.flow)
    graph = writer.editor.graph
    for node in graph.find_nodes(op="placeholder"):
        graph.erase_node(node)
    first = next(iter(graph.nodes), None)
    for value in (*stage.enters, *uncut_operands(stage)):
        with graph.inserting_before(first):
            entering = graph.placeholder(value.name)
        if value in stage.flow.axes:
            window = step[value].computed, step[value].columns
            entering.meta["val"] = fake(value).new_empty(cut_shape(fake(value).shape, stage.flow.axes[value], window))
            writer.blocks[value] = LivePart(entering, window)
        else:
            entering.meta["val"] = fake(value)
            writer.values[value] = entering
    for unit in stage.units:
        writer.run_unit(unit, step)
    results = tuple(writer.blocks[value].node for value in stage.targets)
    graph.output(results)
    names = tuple(node.name for node in graph.find_nodes(op="placeholder"))
    specs = {"in_spec": pytree.tree_structure((names, {})), "out_spec": pytree.tree_structure(results)}
    return replace(writer.editor.finish(), names=names, guards=(), written=(), **specs)


def can_write(stage: Stage) -> bool:
    """Whether the tiles of a stage are programs of their own: its calls on parts are calls of ATen."""
    local = [stage.flow.local.get(node) for unit in stage.units for node in unit.nodes]
    is_cut = stage.is_streamable and not stage.sinks and bool(stage.targets)
    return is_cut and all(map(_is_written, local)) and all(isinstance(fake(n), Tensor) for n in uncut_operands(stage))


def uncut_operands(stage: Stage) -> list[fx.Node]:
    """The values without rows that a stage reads, but for constants."""
    nodes = (node for unit in stage.units for node in unit.nodes)
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes)
    return [n for n in read if n not in stage.flow.axes and n not in stage.flow.constants]


def _is_written(local: Local | None) -> bool:
    return local is not None and _is_call(local)


def write_out(flow: Flow, segments: Sequence[Segment]) -> PartsProgram:
    """The program of a plan's steps. flow: of `flow_in_calls`."""
    writer = PartsWriter(flow)
    for segment in segments:
        writer.run(segment)
    return writer.finish()


@dataclass(frozen=True, slots=True)
class LivePart:
    """A part of a value: its node, and its window."""

    node: fx.Node
    window: Window


@dataclass(slots=True)
class PartsWriter:
    """Writes the program. values: by value of the flow, its full value. blocks: the parts in memory, of a segment.
    partials: of reductions, over the rows so far."""

    flow: Flow
    editor: GraphEditor = field(init=False)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    blocks: dict[fx.Node, LivePart] = field(default_factory=dict)
    partials: dict[fx.Node, fx.Node] = field(default_factory=dict)
    joins: dict[fx.Node, None] = field(default_factory=dict)
    writes: dict[fx.Node, list[tuple[fx.Node, tuple[int, ...]]]] = field(default_factory=dict)
    outside: set[fx.Node] = field(default_factory=set)
    outputs: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        program = self.flow.program
        self.editor = GraphEditor.empty(program)
        self.editor.constants = dict(program.constants)
        self.outputs = self.flow.outputs
        for node in program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node] = self.editor.graph.node_copy(node)
        self.outside = {self.values[n] for n in self.flow.inputs if n in self.flow.axes}

    def run(self, segment: Segment) -> None:
        stage = stage_of(self.flow, segment)
        targets: dict[fx.Node, list[LivePart]] = {value: [] for value in stage.targets}
        self.blocks = {}
        for step in steps_of(stage, segment):
            for value in stage.enters:
                self._extend(value, step[value], self._entering(self.values[value], value, step[value].computed, step))
            for unit in stage.units:
                self.run_unit(unit, step)
                rows = step.get(unit.value)
                if unit.value in targets and rows is not None and rows.computed[0] < rows.computed[1]:
                    self._add_part(targets[unit.value], unit.value, (rows.computed, rows.columns))
            self._trim(stage, step)
        for unit in stage.sinks:
            self.values[unit.node] = self.finish_reduction(unit.node)
        for value, parts in targets.items():
            is_result = self.outputs.count(value) == 1 and all(user.op == "output" for user in value.users)
            self.values[value] = self._join(value, parts, is_outside=is_result or value.name in segment.spills)

    def _add_part(self, parts: list[LivePart], value: fx.Node, computed: Window) -> None:
        """Append what a step computes of a stored value, without what earlier tiles computed of it: tiles overlap."""
        (top, bottom), (left, right) = computed
        last = parts[-1].window if parts else ((0, 0), (0, 0))
        is_same_line = last[0][1] == bottom
        top = last[0][0] if is_same_line else max(top, last[0][1])
        left = max(left, last[1][1]) if is_same_line else left
        if top < bottom and left < right:
            window = (top, bottom), (left, right)
            parts.append(LivePart(self.cut(self.blocks[value], value, window), window))

    def run_unit(self, unit: Unit, step: Step) -> None:
        if unit.node in self.flow.gathers:
            self._reduce(unit.node, step)
            return
        if unit.node not in self.flow.local:
            for node in unit.nodes:
                copied = self.editor.graph.node_copy(node, self.full_value)
                if node in self.flow.axes:
                    self.blocks[node] = LivePart(copied, full_window(node, self.flow.axes[node]))
                else:
                    self.values[node] = copied
            return
        rows = step[unit.value]
        if rows.computed[0] >= rows.computed[1]:
            return
        window, inner = (rows.computed, rows.columns), dict[fx.Node, fx.Node]()
        for node in unit.nodes:
            inner[node] = self.call_on_part(self.flow.local[node], window, inner)
        self._extend(unit.value, rows, inner[unit.value])

    def _reduce(self, node: fx.Node, step: Step) -> None:
        """Reduce the rows of a step, each of which is counted once, and combine the result with those before."""
        source = self.flow.gathered(node)
        rows = step.get(node, step[source])
        if rows.done < rows.end:
            self.reduce_part(node, ((rows.done, rows.end), rows.columns))

    def reduce_part(self, node: fx.Node, window: Window) -> None:
        """Reduce a window of the operand, and combine the result with those before."""
        source = self.flow.gathered(node)
        part = self.cut(self.blocks[source], source, window)
        rule = _REDUCTIONS[node.target]
        operand: Any = self.flow.gathers[node]
        partial = self.editor.call(rule.reduce, part, list(operand.operand.dims), True)
        before = self.partials.get(node)
        self.partials[node] = partial if before is None else self.editor.call(rule.combine, before, partial)

    def finish_reduction(self, node: fx.Node) -> fx.Node:
        """The result of a reduction, after all of its rows."""
        operand: Any = self.flow.gathers[node]
        result = self.partials.pop(node)
        if _REDUCTIONS[node.target].is_mean:
            result = self.editor.call(aten.div.Tensor, result, float(operand.operand.count))
        return self.editor.call(aten.reshape.default, result, list(operand.operand.out))

    def full_value(self, node: fx.Node) -> fx.Node:
        """The full value of an operand of a call that runs uncut."""
        return self.blocks[node].node if node in self.blocks else self.values[node]

    def call_on_part(self, local: Local, window: Window, inner: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A call on the parts that a window of its output needs."""
        reads = {read.operand: read for read in local.reads}
        values: list[Any] = []
        for k, (operand, cut) in enumerate(zip(local.relation.operands, local.call.cuts, strict=True)):
            value = operand.value
            if value in inner:
                values.append(inner[value])
                continue
            if k in reads:
                needs = reads[k].rules[0](*window[0]), reads[k].rules[1](*window[1])
                if any(start >= end for start, end in needs):
                    values.append(None)  # the window is in a border
                    continue
                part = self.cut(self.blocks[value], value, needs)
            else:
                part = self.values.get(value, value) if isinstance(value, fx.Node) else value
            for axis, rule, arrives, w in zip(cut.axes, cut.rules, cut.arrives, window, strict=True):
                if axis is not None and rule is not None and not arrives:
                    part = self._narrow(part, axis, rule(*w))
            values.append(part)
        computed = local.kind.computed_window(window)
        result = _CALLS[type(local.kind)](self.editor, local, values, window)
        return self.cut(LivePart(result, computed), local.node, window)

    def _extend(self, value: fx.Node, rows: LiveRows, computed: fx.Node | None) -> None:
        """Append computed rows to those in memory."""
        if computed is None:
            return
        if rows.first < rows.done:
            before = self.cut(self.blocks[value], value, ((rows.first, rows.done), rows.columns))
            axis = self.flow.axes[value][0]
            computed = self.editor.call(aten.cat.default, [before, computed], axis)
        self.blocks[value] = LivePart(computed, ((rows.first, rows.end), rows.columns))

    def _trim(self, stage: Stage, step: Step) -> None:
        """Keep only what the next step reads of each value: the memory of all else is free."""
        for value, rows in step.items():
            block = self.blocks.get(value)
            if block is None or rows.keep >= rows.end or block.window[0][1] != rows.end:
                continue
            window = (max(rows.keep, block.window[0][0]), rows.end), rows.columns
            self.blocks[value] = LivePart(self.cut(block, value, window), window)

    def _entering(self, full: fx.Node, value: fx.Node, rows: Interval, step: Step) -> fx.Node | None:
        """Rows of a complete value; None for none. A value outside is always sliced, as that is how it is read."""
        if rows[0] >= rows[1]:
            return None
        window = rows, step[value].columns
        if full in self.outside and window == full_window(value, self.flow.axes[value]):
            axis = self.flow.axes[value][0]
            return self.editor.call(aten.slice.Tensor, full, axis, *rows)
        return self.cut(LivePart(full, full_window(value, self.flow.axes[value])), value, window)

    def cut(self, block: LivePart, value: fx.Node, window: Window) -> fx.Node:
        """The part of a block in a window."""
        node = block.node
        for axis, (start, end), (low, high) in zip(self.flow.axes[value], window, block.window, strict=True):
            if axis is not None and (start, end) != (low, high):
                node = self._narrow(node, axis, (start - low, end - low))
        return node

    def _narrow(self, node: fx.Node, axis: int, interval: Interval) -> fx.Node:
        if interval == (0, fake(node).shape[axis]):
            return node
        return self.editor.call(aten.slice.Tensor, node, axis, *interval)

    def _join(self, value: fx.Node, parts: Sequence[LivePart], *, is_outside: bool) -> fx.Node:
        """The full value of parts that cover it."""
        if len(parts) == 1 and not is_outside:
            return parts[0].node
        rows_axis, columns_axis = self.flow.axes[value]
        lines, joins = [], list[fx.Node]()
        for _, line in itertools.groupby(parts, key=lambda part: part.window[0]):
            nodes = [part.node for part in line]
            if len(nodes) > 1:
                joins.append(self.editor.call(aten.cat.default, nodes, columns_axis))
            lines.append(joins[-1] if len(nodes) > 1 else nodes[0])
        joins.append(self.editor.call(aten.cat.default, lines, rows_axis))
        self.joins.update(dict.fromkeys(joins))
        for part in parts:
            at = [0] * fake(value).ndim
            for axis, (start, _) in zip((rows_axis, columns_axis), part.window, strict=True):
                if axis is not None:
                    at[axis] = start
            self.writes.setdefault(part.node, []).append((joins[-1], tuple(at)))
        if is_outside:
            self.outside.add(joins[-1])
        return joins[-1]

    def finish(self) -> PartsProgram:
        program, results = self.flow.program, []
        for value in self.outputs:
            results.append(self.values.get(value, value) if isinstance(value, fx.Node) else value)
        output = self.editor.graph.output(tuple(results))
        output.meta = dict(next(iter(program.graph.find_nodes(op="output"))).meta)
        finished = self.editor.finish()
        there = set(finished.graph.nodes)
        writes = {node: tuple(joins) for node, joins in self.writes.items() if node in there}
        return PartsProgram(finished, frozenset(self.joins), writes, frozenset(self.outside & there))


# ------------------------------------------------------------- calls on parts, by kind


def _is_call(local: Local) -> bool:
    """Whether the call's part is computed by calls of ATen."""
    kind = local.kind
    if any(read.all_rows for read in local.reads):
        return False
    if isinstance(kind, LocalMove):
        is_one_operand = all(run.source <= 0 for moved in kind.axes for run in moved.runs)
        return (is_one_operand or len(kind.axes) == 1) and all(_is_block_move(moved.runs) for moved in kind.axes)
    if isinstance(kind, LocalAvgPool):
        return len(kind.axes) > 1  # divisors are arguments of pools of images and volumes only
    if isinstance(kind, LocalResize):
        return local.relation.entry.region == "nearest" and all(_factor(s) for s in kind.axes)
    return type(kind) in _CALLS


def _apply(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """The op itself, with size arguments of the part."""
    call = local.call
    shape = call.sizes(local.kind.computed_window(window))
    return editor.call_named(call.node.target, call.arguments(values, **size_arguments(call, shape)))


def _convolve(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """A convolution. A border of unequal ends is padded first."""
    kind: Any = local.kind
    x, weight, bias = [*values, None][:3]
    padding, margins = kind.padding(window)
    stride, dilation = kind.steps()
    target = CONV_OF_AXES[len(kind.axes)]
    groups = local.call.bound["groups"]
    x = _padded_operand(editor, local, x, window, margins, 0.0)
    return editor.call(target, x, weight, bias, stride, padding, dilation, groups)


def _max_pool(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """A max pool without padding of its own: outside of the image is -inf."""
    kind: Any = local.kind
    x = _padded_operand(editor, local, values[0], window, kind.margins(window), -math.inf)
    arguments = local.call.arguments([x], padding=[0] * len(kind.axes), ceil_mode=False)
    return editor.call_named(local.node.target, arguments)


def _average_pool(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """An average pool; at the border, a sum divided by the number of positions of each window."""
    kind: Any = local.kind
    margins, zeros = kind.margins(window), [0] * len(kind.axes)
    if not any(map(any, margins.values())):
        return editor.call_named(local.node.target, local.call.arguments(values, padding=zeros, ceil_mode=False))
    x = _padded_operand(editor, local, values[0], window, margins, 0.0)
    override = local.call.bound["divisor_override"]
    arguments = local.call.arguments([x], padding=zeros, ceil_mode=False, divisor_override=override or 1)
    sums = editor.call_named(local.node.target, arguments)
    if override:
        return sums
    counts = editor.constant(f"{local.node.name}.counts", kind.divisors(window, local.call.dtype))
    return editor.call(aten.div.Tensor, sums, counts)


def _padded_operand(
    editor: GraphEditor, local: Local, x: fx.Node | None, window: Window, margins: Mapping[int, Interval], value: float
) -> fx.Node:
    """The first operand with a border of `value`. x: None where a window reads the border only."""
    if x is not None:
        return _padded(editor, x, margins, value)
    kind: Any = local.kind
    filled = torch.full(grown(kind.operand(window), margins), value, dtype=local.call.dtype)
    return editor.constant(f"{local.node.name}.padding", filled)


def _padded(editor: GraphEditor, x: fx.Node, margins: Mapping[int, Interval], value: float) -> fx.Node:
    if not any(map(any, margins.values())):
        return x
    pads = [n for axis in range(-1, min(margins) - 1, -1) for n in margins.get(axis, (0, 0))]
    return editor.call(aten.constant_pad_nd.default, x, pads, value)


def _upsample(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """Positions repeated, of the part that a window reads; the window of the result."""
    kind: Any = local.kind
    shape = fake(values[0]).shape
    sizes = [shape[s.axis] * _factor(s) for s in kind.axes]
    result = editor.call(local.node.target, values[0], sizes, None)
    cut, computed = local.call.cuts[0], kind.computed_window(window)
    for axis, operand, rule, (start, end) in zip(local.axes, cut.axes, cut.rules, computed, strict=True):
        if axis is not None and operand is not None and rule is not None:
            low = rule(start, end)[0] * (local.call.shape[axis] // cut.shape[operand])
            if (start - low, end - low) != (0, fake(result).shape[axis]):
                result = editor.call(aten.slice.Tensor, result, axis, start - low, end - low)
    return result


def _factor(s: Sliding) -> int:
    """The integer by which an axis grows; 0 for other factors."""
    g = s.geometry
    factor = g.output // max(g.input, 1)
    return factor if factor * g.input == g.output and g.number("scale_factors", None) in (None, factor) else 0


def _move(editor: GraphEditor, local: Local, values: list[Any], window: Window) -> fx.Node:
    """Moved positions, axis by axis: slices, concatenated; a border of one value is padded."""
    kind: Any = local.kind
    margins, lists = dict[int, Interval](), kind.runs_within(window)
    if any(all(run.source < 0 for run in listed) for listed in lists):  # the window is in a border
        filled = torch.full(local.call.sizes(window), kind.axes[0].value, dtype=local.call.dtype)
        return editor.constant(f"{local.node.name}.padding", filled)
    for moved, listed in zip(kind.axes, lists, strict=True):
        parts = []
        for k, run in enumerate(listed):
            axis = moved.axis - len(local.call.shape)
            if run.source < 0:
                before, after = margins.get(axis, (0, 0))
                margins[axis] = (before, run.count) if k else (run.count, after)
                continue
            stop = run.start + (run.count - 1) * run.step + 1
            part = values[run.source]
            is_all = (run.start, stop, run.step) == (0, fake(part).shape[axis], 1)
            arguments = moved.axis, run.start, stop, run.step
            parts.append(part if is_all else editor.call(aten.slice.Tensor, part, *arguments))
        values = [parts[0] if len(parts) == 1 else editor.call(aten.cat.default, parts, moved.axis)]
    return _padded(editor, values[0], margins, float(kind.axes[0].value))


def _is_block_move(runs: Iterable[PositionRun]) -> bool:
    """Whether runs are slices, with a border at most at both ends."""
    listed = list(runs)
    return len(listed) <= _RUNS and all(
        (run.index is None and run.step >= 1) if run.source >= 0 else k in (0, len(listed) - 1)
        for k, run in enumerate(listed)
    )


_RUNS = 64  # of one axis; more make a part of many calls
_CALLS: Mapping[type, Any] = {
    LocalApply: _apply,
    LocalRearrange: _apply,
    LocalConv: _convolve,
    LocalMaxPool: _max_pool,
    LocalAvgPool: _average_pool,
    LocalMove: _move,
    LocalResize: _upsample,
}


@dataclass(frozen=True, slots=True)
class _PartReduction:
    """reduce: of a part. combine: of two results. is_mean: whether the sum is divided by the count."""

    reduce: Any
    combine: Any
    is_mean: bool = False


_SUM = _PartReduction(aten.sum.dim_IntList, aten.add.Tensor)
_MEAN = replace(_SUM, is_mean=True)
_MAX = _PartReduction(aten.amax.default, aten.maximum.default)
_REDUCTIONS: Mapping[Any, _PartReduction] = {
    **dict.fromkeys(SUMS, _SUM),
    **dict.fromkeys(MEANS | ADAPTIVE_AVERAGE_POOLS.keys(), _MEAN),
    **dict.fromkeys(MAXIMA, _MAX),
}
