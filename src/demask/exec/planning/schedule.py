"""The units of a stage, and the rows and columns of each value that are in memory in each step.

A unit is a call with the calls that are fused into it:

    relu(conv(x) + y)  is one unit, which reads x through the windows of the convolution and y as is

It computes one value. *enters*: values that a segment reads and others computed (inputs, maps).
*targets*: values that it must compute in full: maps that later segments read, and outputs.

Bands walk down the image. The rows that a step needs follow backward from the rows of the targets
that it completes: `end[v] = max over readers of needs(end[reader])`. Strides, dilation, delays of
residual branches and concatenations follow from the table's rules. Deep stages start before their
first output: a layer that is n rows ahead of the outputs is ahead from the first step on, else the
first step would compute all n rows at once.

Several workers run in parallel, each down its own strip. The first row of a strip differs by layer:
each layer begins at the rows that the strip's first outputs need, so that a worker needs nothing
from the worker above. The worker above ends there, and copies the few rows that it needs beyond
from the first steps of the worker below. Nothing is computed twice; only borders are exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from demask.compat.onednn import available
from demask.exec.analysis.flow import Flow, FlowEdge
from demask.exec.axes import Window, full_window
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.ops.traits import ADDS, CONVOLUTIONS
from demask.tune.epilogue import Epilogue, epilogue_of


@dataclass(frozen=True, slots=True)
class Unit:
    """A call and the calls fused into it.

    nodes: the call, then those fused into it. addend: a value that is added before the activation
    `after`. edges: the operands with rows; the addend is the last.
    """

    nodes: tuple[fx.Node, ...]
    edges: tuple[FlowEdge, ...]
    addend: fx.Node | None = None
    after: Epilogue | None = None

    @property
    def node(self) -> fx.Node:
        """The call itself."""
        return self.nodes[0]

    @property
    def value(self) -> fx.Node:
        """The value that the unit computes."""
        return self.nodes[-1]


@dataclass(frozen=True, slots=True)
class Stage:
    """The units of a segment in the order in which they run.

    enters: values with rows that are read but not computed here. targets: values computed in full.
    sinks: units of gathered calls. readers: the units that read each value, by index.
    """

    flow: Flow
    units: tuple[Unit, ...]
    enters: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]
    readers: dict[fx.Node, list[tuple[int, FlowEdge]]] = field(default_factory=dict)

    @property
    def sinks(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.node in self.flow.gathers)

    @property
    def uncut_units(self) -> tuple[Unit, ...]:
        """Units that can only run on full values."""
        cut = self.flow.local.keys() | self.flow.gathers.keys()
        return tuple(u for u in self.units if u.node not in cut)

    def streamed(self, unit: Unit, maps: Container[fx.Node]) -> list[FlowEdge]:
        """The operands that a unit reads in full, in blocks, from their source."""
        return [e for e in unit.edges if e.all_rows and e.source in self.enters and e.source not in maps]

    @property
    def is_streamable(self) -> bool:
        """Whether the stage can run in parts: no unit waits for all rows of another's value."""
        computed = {u.value for u in self.units} | {u.node for u in self.units}
        waits = any(e.all_rows and e.source in computed for u in self.units for e in u.edges)
        gathered = {u.node for u in self.sinks}
        reads_statistics = any(n in gathered for u in self.units for n in u.node.all_input_nodes)
        return not self.uncut_units and not waits and not reads_statistics


def build_stage(flow: Flow, nodes: Sequence[fx.Node], keeps: Collection[fx.Node]) -> Stage:
    """The stage of some calls. keeps: those of their values that other segments read."""
    free, units = set(nodes), []  # free: calls of no unit yet, as a sum is fused into one operand
    for node in nodes:
        if node in free:
            units.append(_fuse_unit(flow, node, free, set(keeps)))
            free -= set(units[-1].nodes)
    units = _sort_units(units)
    computed = {u.value for u in units}
    readers: dict[fx.Node, list[tuple[int, FlowEdge]]] = {}
    for k, unit in enumerate(units):
        for edge in unit.edges:
            readers.setdefault(edge.source, []).append((k, edge))
    enters = tuple(n for n in readers if n not in computed)
    targets = tuple(u.value for u in units if u.value in keeps and u.value in flow.axes)
    return Stage(flow, tuple(units), enters, targets, readers)


def _fuse_unit(flow: Flow, node: fx.Node, inside: set[fx.Node], keeps: set[fx.Node]) -> Unit:
    """The call fused with the sum and the activation that follow it, where oneDNN can fuse them."""
    unfused = Unit((node,), flow.edges(node))
    value = fake(node)
    can_fuse = node.target in CONVOLUTIONS and available(value.dtype, value.device)
    if node not in flow.local or not can_fuse:
        return unfused
    nodes, edges, addend, after = [node], unfused.edges, None, None
    follower = _only_reader(node, inside, keeps)
    if follower is not None and _is_sum_with(follower, node, flow):
        addend = next(n for n in follower.args if n is not node)
        edges += tuple(edge for edge in flow.edges(follower) if edge.source is addend)
        nodes.append(follower)
        follower = _only_reader(follower, inside, keeps)
    if follower is not None and follower in flow.local:
        after = epilogue_of(follower)
        nodes += [follower] if after is not None else []
    return Unit(tuple(nodes), edges, addend, after)  # type: ignore[arg-type]


def _only_reader(node: fx.Node, inside: set[fx.Node], keeps: set[fx.Node]) -> fx.Node | None:
    """The only reader of a value, if it is in the same stage; else None."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0] in inside and node not in keeps else None


def _is_sum_with(node: fx.Node, value: fx.Node, flow: Flow) -> bool:
    """Whether a call adds a value and another with rows, of the same shape and dtype."""
    if node.target not in ADDS or node.kwargs or len(node.args) != 2:
        return False
    other = next((n for n in node.args if n is not value), None)
    if not isinstance(other, fx.Node) or other not in flow.axes or node not in flow.local:
        return False
    other_value, value_added = fake(other), fake(node)
    return (
        isinstance(other_value, Tensor)
        and other_value.shape == value_added.shape
        and other_value.dtype == value_added.dtype
    )


def _sort_units(units: list[Unit]) -> list[Unit]:
    """The units in topological order: a fused unit may read an addend that is computed after its
    convolution."""
    unit_of = {u.value: u for u in units}
    done, ordered, stack = set[fx.Node](), [], units[::-1]
    while stack:
        top = stack[-1]
        operands = [*top.node.all_input_nodes, *([] if top.addend is None else [top.addend])]
        missing = [unit_of[n] for n in operands if n in unit_of and n not in done]
        if missing:
            stack.append(missing[0])
            continue
        stack.pop()
        if top.value not in done:
            done.add(top.value)
            ordered.append(top)
    return ordered


EMPTY: Interval = (0, 0)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a value in one step.

    first: of the rows in memory. done: end of the rows of earlier steps. end: of the rows after the
    step. keep: first row that the next step reads. columns: the same in every step of a walk. own:
    rows from there on are received from the next worker.
    """

    first: int
    done: int
    end: int
    keep: int
    columns: Interval
    own: int = 2**62

    @property
    def computed(self) -> Interval:
        """The rows that the step computes."""
        return self.done, min(self.end, max(self.own, self.done))

    @property
    def received(self) -> Interval:
        """The rows that the step receives from the next worker."""
        return max(self.done, min(self.own, self.end)), self.end

    @property
    def rows(self) -> int:
        """The number of rows in memory during the step."""
        return max(self.end - self.first, 0)

    @property
    def tail(self) -> int:
        """The number of rows that the next step reads again."""
        return max(self.end - self.keep, 0)


Step = Mapping[fx.Node, LiveRows]


def target_rows(stage: Stage) -> dict[fx.Node, int]:
    """The rows of the values that a stage computes in full: targets, and operands of sinks."""
    flow = stage.flow
    rows = {node: flow.rows(node) for node in stage.targets}
    return rows | {e.source: flow.rows(e.source) for u in stage.sinks for e in u.edges}


@dataclass(frozen=True, slots=True)
class Strip:
    """The rows of each value of one worker: from `first` to `last`.

    It computes those up to `own` and reads those up to `seen`; each worker reads the stage's
    entering values for itself. due: end of the rows that the worker above waits for. counted: of
    reductions, the rows that they count here; empty: from `first` to `last`.
    """

    first: Mapping[fx.Node, int]
    last: Mapping[fx.Node, int]
    own: Mapping[fx.Node, int]
    seen: Mapping[fx.Node, int]
    due: Mapping[fx.Node, int]
    counted: Mapping[fx.Node, Interval] = field(default_factory=dict)

    @property
    def borders(self) -> dict[fx.Node, int]:
        """The number of rows of each value that are received from the next worker."""
        return {v: self.seen[v] - n for v, n in self.own.items() if self.seen[v] > n}


def cut_strips(stage: Stage, workers: int) -> list[Strip]:
    """Strips for this many workers, or fewer where a border would not fit into the next strip."""
    for count in range(workers, 1, -1):
        candidate = _cut_strips(stage, count)
        pairs = itertools.pairwise(candidate)
        if all(a.last[v] >= a.first[v] and a.seen[v] <= b.own[v] for a, b in pairs for v in a.own):
            return candidate
    return [_full_strip(stage)]


def _full_strip(stage: Stage) -> Strip:
    rows = {v: stage.flow.rows(v) for v in _cut_values(stage)}
    return Strip(dict.fromkeys(rows, 0), rows, rows, rows, {})


def _cut_strips(stage: Stage, count: int) -> list[Strip]:
    rows = {v: stage.flow.rows(v) for v in _cut_values(stage)}
    tops = [_first_rows_of_strip(stage, rows, k / count) for k in range(count)]
    result: list[Strip] = []
    for k, first in enumerate(tops):
        last = tops[k + 1] if k + 1 < count else rows
        own = {v: rows[v] if v in stage.enters else last[v] for v in rows}
        seen = dict(own)
        for unit in stage.units:
            if unit.value not in own or unit.node in stage.flow.gathers:
                continue
            if first[unit.value] < own[unit.value]:
                for edge in _cut_edges(unit):
                    high = edge.rules[0](first[unit.value], own[unit.value])[1]
                    seen[edge.source] = max(seen[edge.source], high)
        due = {v: result[-1].seen[v] for v in result[-1].borders} if result else {}
        result.append(Strip(first, last, own, seen, due))
    return result


def _first_rows_of_strip(stage: Stage, rows: Mapping[fx.Node, int], share: float) -> dict[fx.Node, int]:
    """The first row of each value in the strip whose targets begin at a share of their rows."""
    if not share:
        return dict.fromkeys(rows, 0)
    first = dict(rows)
    for v, n in target_rows(stage).items():
        first[v] = min(first[v], math.floor(n * share))
    for unit in reversed(stage.units):
        value = unit.value
        if unit.node in stage.flow.gathers or first[value] >= rows[value]:
            continue
        for edge in _cut_edges(unit):
            low, high = edge.rules[0](first[value], rows[value])
            if low < high:
                first[edge.source] = min(first[edge.source], low)
    return first


def walk_bands(
    stage: Stage,
    band: int,
    strip: Strip | None = None,
    columns: Mapping[fx.Node, Interval] | None = None,
    row_steps: int = 1,
    sample: Callable[[int], Iterable[int]] = range,
) -> Iterator[Step]:
    """The steps of bands of `band` rows of the tallest target, down a strip or the full image.

    columns: of each value; None: the full width. row_steps: a row of the tallest target counts as so many: with more
    than one, layers before it advance in steps in which no row of it is completed. sample: the ascending numbers of
    the steps to yield, for their count; default: all.
    """
    strip = strip or _full_strip(stage)
    ends = target_rows(stage)
    height = max(ends.values()) * row_steps
    top = min(strip.first[v] * height // n for v, n in ends.items())
    bottom = max(math.ceil(strip.last[v] * height / n) for v, n in ends.items())
    ahead = _rows_ahead(stage, ends, height, max(band, row_steps))
    largest_lead = max((n * height / stage.flow.rows(v) for v, n in ahead.items()), default=0.0)
    start = math.ceil(largest_lead / band) * band if band < bottom - top else 0
    columns = columns or {v: (0, stage.flow.columns(v)) for v in _cut_values(stage)}

    def ends_after(row: int, done: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        last = row >= bottom
        wanted = {
            v: strip.last[v] if last else min(strip.last[v], math.floor(row * n / height)) for v, n in ends.items()
        }
        for v, n in strip.due.items() if last else ():
            wanted[v] = max(n, wanted.get(v, 0))
        return _rows_after(stage, strip, wanted, done, row, height, ahead)

    done = first_live = strip.first
    rows, following = range(top + band - start, bottom + band, band), 0
    for k in sample(len(rows)):
        if k != following:  # the rows of the steps before it, without these steps
            done = ends_after(rows[k - 1], strip.first)
            first_live = _first_rows_read(stage, strip, done)
        following = k + 1
        end = ends_after(rows[k], done)
        keep = _first_rows_read(stage, strip, end)
        step = {v: LiveRows(first_live[v], done[v], end[v], keep[v], columns[v], strip.own[v]) for v in columns}
        for unit in stage.sinks:  # each row is counted by one worker
            v = unit.edges[0].source
            begin, until = strip.counted.get(unit.node, (0, strip.last[v]))
            low, high = (max(min(n, until), begin) for n in (done[v], end[v]))
            step[unit.node] = LiveRows(low, low, high, high, columns[v])
        yield step
        done, first_live = end, keep


def tile_step(stage: Stage, window: Mapping[fx.Node, Window]) -> Step:
    """The step that computes a window of each target without rows of other steps. A reduction
    counts the window of its operand, without the rows around it."""
    need = {v: w for v, w in window.items() if not _is_empty(w)}
    for unit in reversed(stage.units):
        if unit.node in stage.flow.gathers or unit.value not in need:
            continue
        rows, columns = need[unit.value]
        for edge in _cut_edges(unit):
            read = edge.rules[0](*rows), edge.rules[1](*columns)
            if not _is_empty(read):
                before = need.get(edge.source, read)
                need[edge.source] = _union(before[0], read[0]), _union(before[1], read[1])
    steps = {v: _single_step(need.get(v, (EMPTY, EMPTY))) for v in _cut_values(stage)}
    for unit in stage.sinks:  # a tile's halo is not counted
        window_read = window[unit.edges[0].source]
        steps[unit.node] = _single_step((EMPTY, EMPTY) if _is_empty(window_read) else window_read)
    return steps


def tile_bands(stage: Stage, frustum: Step, band: int, row_steps: int = 1) -> Iterator[Step]:
    """The steps that compute the rows and columns of `frustum` in bands, none of them twice."""
    values = _cut_values(stage)
    first = {v: frustum[v].first for v in values}
    last = {v: frustum[v].end for v in values}
    columns = {v: frustum[v].columns for v in values}
    counted = {u.node: (frustum[u.node].done, frustum[u.node].end) for u in stage.sinks}
    return walk_bands(stage, band, Strip(first, last, last, last, {}, counted), columns, row_steps)


def _single_step(window: Window) -> LiveRows:
    (low, high), columns = window
    return LiveRows(low, low, high, high, columns)


def _is_empty(window: Window) -> bool:
    return any(start >= end for start, end in window)


def middle_steps(stage: Stage, band: int) -> list[Step]:
    """Two steps from the middle of `walk_bands`, representative of most of them."""
    ends, strip = target_rows(stage), _full_strip(stage)
    height = max(ends.values())
    row = height // 2 // band * band
    values = _cut_values(stage)
    done = dict.fromkeys(values, 0)
    steps: list[Step] = []
    first_live: dict[fx.Node, int] = {}
    for k in range(3):
        wanted = {v: min(n, (row + k * band) * n // height) for v, n in ends.items()}
        end = _rows_after(stage, strip, wanted, done, row, height, {})
        keep = _first_rows_read(stage, strip, end)
        if k:
            columns = {v: (0, stage.flow.columns(v)) for v in values}
            steps.append({v: LiveRows(first_live[v], done[v], end[v], keep[v], columns[v]) for v in values})
        done, first_live = end, keep
    return steps


def full_step(stage: Stage) -> Step:
    """The step that computes every value in full."""
    step = {}
    for node in _cut_values(stage):
        (_, rows), columns = full_window(node, stage.flow.axes[node])
        step[node] = LiveRows(0, 0, rows, rows, columns)
    return step


def _cut_edges(unit: Unit) -> list[FlowEdge]:
    return [edge for edge in unit.edges if not edge.all_rows]


def _cut_values(stage: Stage) -> list[fx.Node]:
    cut = stage.flow.axes
    return [*stage.enters, *(u.value for u in stage.units if u.value in cut)]


def _union(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _rows_ahead(stage: Stage, ends: Mapping[fx.Node, int], height: int, band: int) -> dict[fx.Node, float]:
    """Rows by which each value is ahead of its share, from the first band."""
    nothing = dict.fromkeys(_cut_values(stage), 0)
    strip = _full_strip(stage)
    wanted = {v: math.floor(min(band, height) * n / height) for v, n in ends.items()}
    end = _rows_after(stage, strip, wanted, nothing, 0, height, {})
    rows = stage.flow.rows
    return {v: max(0.0, n - rows(v) * min(band, height) / height) for v, n in end.items()}


def _rows_after(
    stage: Stage,
    strip: Strip,
    wanted: Mapping[fx.Node, int],
    done: Mapping[fx.Node, int],
    row: int,
    height: int,
    ahead: Mapping[fx.Node, float],
) -> dict[fx.Node, int]:
    """The end of the rows of each value after the step that completes `row` of the tallest target.

    wanted: rows of targets. done: rows of earlier steps. ahead: rows ahead of a value's share.
    """
    flow, end = stage.flow, dict(done)
    for v, n in wanted.items():
        end[v] = max(end[v], n)
    if row <= height:
        for v, lead in ahead.items():
            due = math.floor(row * flow.rows(v) / height + lead)
            end[v] = max(end[v], min(strip.own[v], due))
    for unit in reversed(stage.units):
        value = unit.value
        if unit.node in flow.gathers:
            continue
        last = min(end[value], strip.own[value])
        for edge in _cut_edges(unit) if done[value] < last else ():
            need = edge.rules[0](done[value], last)[1]
            end[edge.source] = max(end[edge.source], min(need, strip.seen[edge.source]))
    return end


def _first_rows_read(stage: Stage, strip: Strip, end: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The first row of each value that a later step reads; `end` where none is read again."""
    keep = dict(end)
    for unit in stage.units:
        if unit.node in stage.flow.gathers or end[unit.value] >= strip.own[unit.value]:
            continue
        for edge in _cut_edges(unit):
            low, high = edge.rules[0](end[unit.value], strip.own[unit.value])
            if low < high:
                keep[edge.source] = min(keep[edge.source], low)
    return keep
