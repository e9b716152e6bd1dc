"""Search for the fastest plan within a budget: cuts of the graph, and a mode for each segment.

The calls between two cuts are a segment; values that cross a cut are stored in full, as maps (the
dependence closure of Occam, arXiv 2006.15308). Cuts are forced where a call waits for all rows of a
value (statistics, keys of attention), and optional where few bytes cross. A dynamic program over
the cuts finds the fastest sequence of segments that all fit the budget: the memory of a segment
depends on its own cuts alone, and a plan takes as much memory as its largest segment.

Compiled kernels are faster than torch's ops, but may take more memory: for transformed weights, for
tiles, and for the compiler where a call compiles. A plan uses them where their memory fits: no
budget is too small that is enough for torch's ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from demask.errors import BudgetTooSmall
from demask.exec.analysis.flow import Flow
from demask.exec.analysis.partial_reductions import can_stream_keys
from demask.exec.device import Device
from demask.exec.planning.plan import BANDS, BARRIER, FRUSTUMS, LAYERWISE, Segment, TilePlan
from demask.exec.planning.plan_memory import (
    LIBRARIES,
    MemoryLayout,
    count_steps,
    find_overwrites,
    lay_out,
    lay_out_checked,
    plan_stage_memory,
    step_macs,
    tile_at,
    value_bytes,
)
from demask.exec.planning.schedule import Stage, Step, build_stage, full_step, middle_steps, target_rows, walk_bands
from demask.machine.byte_sizes import format_bytes
from demask.machine.cost import TWO_CORES
from demask.ops.schema import fake

Cut = Callable[[MemoryLayout], MemoryLayout]  # of the segments of a layout into tasks
BANDS_TRIED = tuple(2**k for k in range(12))
TILES_TRIED = (1024, 512, 256, 128, 64, 32, 16)
CUTS, MANY = 12, 400  # optional cuts; a third of them in graphs of MANY calls or more
FEW = 8  # bands of which all are measured for a device: the first ones compute what all layers are ahead
RECOMPUTED = 0.003  # largest share of multiply-adds to run twice to save maps


def plan_flow(
    flow: Flow,
    budget: int,
    *,
    reserved: int = 0,
    compiles: bool = False,
    workers: int = 1,
    cut: Callable[[Flow], Cut] | None = None,
    planners: Planners | None = None,
) -> tuple[Flow, TilePlan, MemoryLayout]:
    """The flow with the kernels that fit a budget, its fastest plan, and the memory layout.

    compiles: whether the call itself compiles the kernels, within the budget. cut: the function
    `cut` of `plan_tiles` for a flow. planners: of a flow without kernels of ours. For others see `plan_tiles`.

    Raises:
        BudgetTooSmall: if no plan fits; its `least` is a sufficient budget in bytes.
    """

    def planned(flow: Flow, reserved: int) -> tuple[Flow, TilePlan, MemoryLayout]:
        own_cut = None if cut is None else cut(flow)
        known = None if compiler else planners
        return flow, *plan_tiles(flow, budget, reserved=reserved, workers=workers, cut=own_cut, planners=known)

    compiler = flow.compiler_bytes
    if not compiler:
        return planned(flow, reserved)
    try:
        return planned(flow, reserved + compiler * compiles)
    except BudgetTooSmall:
        return planned(flow.without_compiler, reserved)


def lay_out_plan(flow: Flow, plan: TilePlan) -> tuple[Flow, MemoryLayout]:
    """The flow with the kernels that fit a plan's budget, and the memory layout of its segments.

    Plans from files may come from machines without our kernels. Raises BadInput where the plan
    cannot run.
    """
    layout = lay_out_checked(flow, plan.segments)
    if layout.peak <= max(plan.budget, plan.peak) or not flow.compiler_bytes:
        return flow, layout
    flow = flow.without_compiler
    return flow, lay_out_checked(flow, plan.segments)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One way to run the calls between two cuts."""

    segment: Segment
    seconds: float
    bytes: int  # including maps of other segments that are alive


class Planner:
    """The search for the plan of a flow.

    recompute: compute cheap values twice instead of storing maps. spills: store maps on disk.
    smallest: bytes of the smallest map stored on disk. cut: cuts the segments of a layout into
    tasks; None for none. Its methods' tiles: try overlapping tiles (frustums).
    """

    def __init__(
        self,
        flow: Flow,
        *,
        recompute: bool,
        spills: bool,
        workers: int = 1,
        smallest: int = 2**20,
        cut: Cut | None = None,
    ):
        self.flow, self.spills, self.smallest = flow, spills, smallest
        self.calls = list(flow.calls)
        self.index_of = {node: k for k, node in enumerate(self.calls)}
        self.outputs = {n for n in flow.outputs if isinstance(n, fx.Node)}
        self.forced = _forced_cuts(flow, self.calls)
        self.workers, self.cut = workers, cut
        self.cache: dict[tuple[int, int, str, int, int, int], StageChoice] = {}
        self.stages: dict[tuple[int, int], Stage] = {}
        self.recomputed = frozenset[fx.Node]()
        self.last = self._last_reads()
        if recompute:
            self.recomputed = self._find_cheap()
            self.last = self._last_reads()

    def _last_reads(self) -> dict[fx.Node, int]:
        """The index of the last call that reads each value. A recomputed call reads its operands
        where its own value is read."""
        last_reads: dict[fx.Node, int] = {}
        for n in reversed(list(self.flow.program.graph.nodes)):
            if n in self.flow.axes:
                last_reads[n] = max((self._read_at(u, last_reads) for u in n.users), default=-1)
        return last_reads

    def _read_at(self, user: fx.Node, last: Mapping[fx.Node, int]) -> int:
        if user.op == "output":
            return len(self.calls)
        index = self.index_of[user]
        return max(index, last[user]) if user in self.recomputed else index

    def _find_cheap(self) -> frozenset[fx.Node]:
        """Values across forced cuts to recompute instead of storing them: their operands are stored
        anyway, and all of them together take few multiply-adds."""
        total = sum(self.flow.macs(n) for n in self.calls)
        cheap, spent = set[fx.Node](), 0
        for cut in self.forced:
            calls = (n for n in self.flow.axes if n.op == "call_function")
            crossing = {n for n in calls if self.index_of[n] < cut <= self.last[n]}
            for v in sorted(crossing - self.outputs, key=lambda v: -value_bytes(v)):
                read = [n for n in v.all_input_nodes if n in self.flow.axes]
                is_cheap = all(n in crossing or n.op == "placeholder" for n in read)
                is_cheap = is_cheap and not self._is_read_in_full(v)
                cost = self.flow.macs(v) if v in self.flow.local else math.inf
                if is_cheap and v not in cheap and spent + cost <= RECOMPUTED * total:
                    cheap.add(v)
                    spent += int(cost)
        return frozenset(cheap)

    def cuts(self) -> list[int]:
        """Forced cuts, and optional cuts at local minima of the bytes that cross."""
        ends = sorted({0, len(self.calls), *self.forced})
        crossing = self._crossing_bytes()
        minima: list[tuple[float, int]] = []
        for low, high in itertools.pairwise(ends):
            minima += [
                (crossing[k], k)
                for k in range(low + 1, high)
                if crossing[k] <= min(crossing[max(low, k - 1)], crossing[min(high, k + 1)])
            ]
        most = CUTS if len(self.calls) < MANY else CUTS // 3
        return sorted({*ends, *(k for _, k in sorted(minima)[:most])})

    def _crossing_bytes(self) -> list[float]:
        change = [0.0] * (len(self.calls) + 2)
        for node, last in self.last.items():
            if node.op == "call_function" and last > self.index_of[node]:
                size = value_bytes(node)
                change[self.index_of[node] + 1] += size
                change[min(last, len(self.calls)) + 1] -= size
        return list(itertools.accumulate(change))

    def pieces(self, low: int, high: int) -> tuple[list[fx.Node], set[fx.Node]]:
        """The calls between two cuts, after those recomputed for them; and their values that later
        segments read."""
        calls = self.calls[low:high]
        inside, recomputed = set(calls), list[fx.Node]()
        stack = [n for node in calls for n in node.all_input_nodes]
        while stack:
            node = stack.pop()
            if node in self.recomputed and node not in inside:
                inside.add(node)
                recomputed.append(node)
                stack += node.all_input_nodes
        recomputed.sort(key=self.index_of.__getitem__)
        keeps = {n for n in calls if n in self.flow.axes and n not in self.recomputed and self.last[n] >= high}
        return recomputed + calls, keeps

    def choices(self, low: int, high: int, budget: float, tiles: bool) -> list[StageChoice]:
        """Ways to run the calls between two cuts, including the fastest within a budget."""
        nodes, keeps = self.pieces(low, high)
        if self._is_barrier(nodes):
            segment = Segment(BARRIER, tuple(n.name for n in nodes), ())
            return [StageChoice(segment, 0.0, self._live_map_bytes(low, high, set()))]
        if (low, high) not in self.stages:
            self.stages[low, high] = build_stage(self.flow, nodes, keeps)
        stage = self.stages[low, high]

        def choice(mode: str, rows: int = 0, columns: int = 0, row_steps: int = 1) -> StageChoice:
            key = low, high, mode, rows, columns, row_steps
            if key not in self.cache:
                self.cache[key] = self._build_choice(stage, nodes, (low, high), mode, rows, columns, row_steps)
            return self.cache[key]

        choices = [choice(LAYERWISE)]
        if stage.is_streamable and target_rows(stage):
            choices += _try_bands(stage, lambda rows, steps=1: choice(BANDS, rows, 0, steps), budget)
        if tiles and self._has_columns(stage):
            width = max(stage.flow.columns(v) for v in target_rows(stage))
            sizes = [n for n in TILES_TRIED if n < width]
            fit = next((c for n in sizes if (c := choice(FRUSTUMS, n, n)).bytes <= budget), None)
            choices += [fit] if fit is not None else [choice(FRUSTUMS, n, n) for n in sizes[-1:]]
        return choices

    def build_segment(self, low: int, high: int, mode: str, rows: int, columns: int) -> Segment:
        """The segment between two cuts in a mode; layer-wise where it cannot run in this mode."""
        nodes, keeps = self.pieces(low, high)
        if self._is_barrier(nodes):
            return Segment(BARRIER, tuple(n.name for n in nodes), ())
        stage = build_stage(self.flow, nodes, keeps)
        is_possible = (
            stage.is_streamable and bool(target_rows(stage)) and (mode != FRUSTUMS or self._has_columns(stage))
        )
        chosen = (mode, rows, columns) if is_possible else (LAYERWISE, 0, 0)
        return self._build_choice(stage, nodes, (low, high), *chosen).segment

    def _is_barrier(self, nodes: Sequence[fx.Node]) -> bool:
        return not any(n in self.flow.axes or n in self.flow.gathers for n in nodes)

    def _has_columns(self, stage: Stage) -> bool:
        """Whether the stage runs in parts and all of its values have columns to cut."""
        axes = self.flow.axes
        values = [*stage.enters, *(u.value for u in stage.units if u.value in axes)]
        return stage.is_streamable and bool(target_rows(stage)) and all(axes[v][1] is not None for v in values)

    def _build_choice(
        self,
        stage: Stage,
        nodes: Sequence[fx.Node],
        cuts: tuple[int, int],
        mode: str,
        rows: int,
        columns: int,
        row_steps: int = 1,
    ) -> StageChoice:
        low, high = cuts
        names, keeps = (tuple(n.name for n in some) for some in (nodes, stage.targets))
        spills = tuple(v.name for v in stage.targets if self._is_spilled(v))
        count = self.workers if mode == BANDS else 1
        segment = Segment(mode, names, keeps, spills, rows=rows, columns=columns, workers=count, row_steps=row_steps)
        maps = frozenset(v for v in [*stage.enters, *stage.targets] if self._is_map(v))
        steps = _sample_steps(stage, segment)
        stage_memory = plan_stage_memory(stage, steps, maps, estimate=True)
        over = {} if mode == FRUSTUMS or count > 1 else find_overwrites(stage, steps, maps)
        over = {a: b for a, b in over.items() if self.last[b] < high}
        segment = replace(
            segment,
            over={a.name: b.name for a, b in over.items()},
            steps=count_steps(stage, segment),
            bytes=count * stage_memory.size,
            traffic=sum(value_bytes(v) for v in [*stage.enters, *stage.targets]),
        )
        macs = step_macs(stage, steps[0]) * segment.steps if mode == FRUSTUMS else _all_macs(stage)
        segment = replace(segment, macs=macs)
        map_bytes = self._live_map_bytes(low, high, set(over))
        own_bytes = segment.bytes + stage_memory.packed + count * stage_memory.allocated
        return StageChoice(segment, _estimate_seconds(stage, segment), map_bytes + own_bytes)

    def _is_map(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not self._is_spilled(node) and not self._is_only_returned(node)

    def _is_only_returned(self, node: fx.Node) -> bool:
        return node in self.outputs and all(u.op == "output" for u in node.users)

    def _is_read_in_full(self, node: fx.Node, unless: Callable[[fx.Node], bool] = lambda reader: False) -> bool:
        """Whether a call reads all rows of a value at once. unless: readers to ignore."""
        readers = [u for u in node.users if u.op == "call_function" and not unless(u)]
        return any(e.all_rows and e.source is node for u in readers for e in self.flow.edges(u))

    def _is_spilled(self, node: fx.Node) -> bool:
        return (
            self.spills
            and not self._is_only_returned(node)
            and not self._is_read_in_full(node, unless=can_stream_keys)
            and value_bytes(node) >= self.smallest
        )

    def _live_map_bytes(self, low: int, high: int, over: set[fx.Node]) -> int:
        """Bytes of the maps that are alive while the calls between two cuts run. over: maps that
        overwrite others."""
        live = 0
        for n in self.calls[:high]:
            if n not in self.flow.axes or n in self.recomputed or n in over or not self._is_map(n):
                continue
            before, read_later = self.index_of[n] < low, self.last[n] >= high
            if read_later or (before and self.last[n] >= low):
                live += value_bytes(n)
        return live

    def search(self, budget: float, tiles: bool) -> tuple[float, list[Segment]] | None:
        """The predicted seconds and the segments of the fastest plan within a budget of live bytes;
        None where none fits."""
        cuts = self.cuts()
        best: dict[int, tuple[float, list[Segment]]] = {0: (0.0, [])}
        for j, high in enumerate(cuts):
            for low in cuts[:j]:
                for choice in self.choices(low, high, budget, tiles) if low in best else ():
                    seconds = best[low][0] + choice.seconds
                    if choice.bytes <= budget and seconds < best.get(high, (math.inf,))[0]:
                        best[high] = seconds, [*best[low][1], choice.segment]
        return best.get(len(self.calls))

    def least(self, tiles: bool) -> tuple[float, float, list[Segment]]:
        """The fewest live bytes, and the seconds and segments of that plan. The estimate of bytes
        may be some rows too low."""
        cuts = self.cuts()
        best: dict[int, tuple[float, float, list[Segment]]] = {0: (0.0, 0.0, [])}
        for j, high in enumerate(cuts[1:], 1):
            candidates = [
                (max(best[low][0], c.bytes), best[low][1] + c.seconds, low, c.segment)
                for low in cuts[:j]
                for c in self.choices(low, high, 0, tiles)
            ]
            size, seconds, low, segment = min(candidates, key=lambda candidate: candidate[:2])
            best[high] = size, seconds, [*best[low][2], segment]
        return best[len(self.calls)]


Planners = dict[bool, list[Planner]]  # by whether they store maps on disk


def _try_bands(stage: Stage, choose: Callable[..., StageChoice], budget: float) -> list[StageChoice]:
    """The bands of least height, and the fastest that fit the budget.

    Memory is linear in the height of bands: two heights determine it, and other heights are tried
    in the order of the estimated seconds. Where a row does not fit, as the layers before it are
    taller, it is computed in several steps.
    """
    tallest = max(target_rows(stage).values())
    choices = _try_heights(stage, choose, budget, [n for n in BANDS_TRIED if n < tallest])
    values = [*stage.enters, *(u.value for u in stage.units if u.value in stage.flow.axes)]
    finest = max(stage.flow.rows(v) for v in values) // tallest
    if finest > 1 and not any(choice.bytes <= budget for choice in choices):
        for steps in (2**k for k in range(1, finest.bit_length())):
            choices.append(choose(1, steps))
            if choices[-1].bytes <= budget:
                break
    return choices


def _try_heights(
    stage: Stage, choose: Callable[..., StageChoice], budget: float, heights: Sequence[int]
) -> list[StageChoice]:
    if not heights:
        return []
    lowest, higher = choose(heights[0]), choose(heights[min(6, len(heights) - 1)])
    row_difference = max(higher.segment.rows - lowest.segment.rows, 1)
    bytes_per_row = max(higher.bytes - lowest.bytes, 0) / row_difference

    def estimate(rows: int) -> tuple[float, int]:
        extra = int(bytes_per_row * (rows - lowest.segment.rows))
        scaled = replace(lowest.segment, rows=rows, bytes=lowest.segment.bytes + extra)
        scaled = replace(scaled, steps=count_steps(stage, scaled))
        fits = lowest.bytes + 0.9 * extra <= budget
        return (_estimate_seconds(stage, scaled) if fits else math.inf), rows

    for seconds, rows in sorted(estimate(n) for n in heights):
        candidate = choose(rows) if seconds < math.inf else lowest
        if candidate.bytes <= budget:
            return [lowest, candidate]
    return [lowest]


def _forced_cuts(flow: Flow, calls: Sequence[fx.Node]) -> list[int]:
    """Indices of calls that wait for all rows of a value computed since the last cut."""

    def runs_in_parts(node: fx.Node) -> bool:
        return node in flow.local or node in flow.gathers

    cuts: list[int] = []
    group: set[fx.Node] = set()
    ready: set[fx.Node] = set()  # full values computed since the last cut
    for k, node in enumerate(calls):
        cut = runs_in_parts(node)
        must_wait = any(e.all_rows and e.source in group for e in flow.edges(node))
        must_wait |= any(n in ready for n in node.all_input_nodes) and cut
        must_wait |= any(n in ready and n in flow.gathers for n in node.all_input_nodes)
        must_wait |= bool(group) and cut != runs_in_parts(calls[k - 1])
        if must_wait:
            cuts.append(k)
            group, ready = set(), set()
        group.add(node)
        if node not in flow.axes:
            ready.add(node)
    return cuts


def _sample_steps(stage: Stage, segment: Segment) -> list[Step]:
    """Representative steps: two in the middle of bands, more of bands of a part of a row, or a tile in the middle."""
    few = stage.flow.device is not None and segment.mode == BANDS and count_steps(stage, segment) <= FEW

    def sample(count: int) -> list[int]:
        """The first and the last steps, and those of two rows of the tallest target in the middle."""
        middle = count // 2
        return sorted({*range(FEW), *range(middle, middle + 2 * segment.row_steps), count - 1} & {*range(count)})

    if few or segment.row_steps > 1:
        return list(walk_bands(stage, segment.rows, row_steps=segment.row_steps, sample=sample))
    if segment.mode == BANDS:
        return middle_steps(stage, segment.rows)
    if segment.mode == FRUSTUMS:
        targets, (rows, columns) = target_rows(stage), (segment.rows, segment.columns)
        top = max(targets.values()) // 2 // rows * rows
        left = max(stage.flow.columns(v) for v in targets) // 2 // columns * columns
        return [tile_at(stage, (top, top + rows), (left, left + columns))]
    return [full_step(stage)]


def _all_macs(stage: Stage) -> int:
    return sum(stage.flow.macs(u.node) for u in stage.units)


def _estimate_seconds(stage: Stage, segment: Segment) -> float:
    """Estimated seconds, to rank plans by."""
    rates = TWO_CORES if stage.flow.device is None else stage.flow.device.rates
    seconds = segment.macs / rates.macs + segment.bytes / rates.new + segment.traffic / rates.far
    recomputation = max(segment.macs / max(_all_macs(stage), 1), 1)
    for unit in stage.units:
        moved = 2 * value_bytes(unit.value)
        rate = rates.near if moved / segment.steps < rates.cache else rates.far
        seconds += recomputation * moved / rate
    spilled = sum(value_bytes(v) for v in stage.targets if v.name in segment.spills)
    return seconds + segment.steps * len(stage.units) * rates.call + 2 * spilled / rates.disk


def plan_tiles(
    flow: Flow,
    budget: int,
    *,
    reserved: int = 0,
    disk: bool = True,
    workers: int = 1,
    cut: Cut | None = None,
    planners: Planners | None = None,
) -> tuple[TilePlan, MemoryLayout]:
    """The fastest plan within a budget, and its memory layout.

    Args:
        budget: bytes.
        reserved: bytes of the budget that the call uses for other data.
        disk: whether maps may be stored in files.
        cut: cuts the segments of a layout into tasks. All maps that are not read in full are then in
            files: any process can compute any task, and a plan is the same for one or several.
        planners: of earlier calls for the same flow and other budgets, which this one adds to: what they measured is
            not measured again.

    Raises:
        BudgetTooSmall: if no plan fits; its `least` is a sufficient budget in bytes.
    """
    available, tried, known = budget - reserved, list[tuple[Planner, bool]](), {} if planners is None else planners
    for tiles, spills in itertools.product((False, True), repeat=2):
        if (spills and not disk) or (cut is not None and not spills):
            continue
        if spills not in known:
            pair = [
                Planner(
                    flow,
                    recompute=recompute,
                    spills=spills,
                    workers=workers,
                    smallest=2**20 if cut is None and flow.device is None else 0,
                    cut=cut,
                )
                for recompute in (False, True)
            ]
            known[spills] = pair if pair[1].recomputed else pair[:1]
        tried += ((planner, tiles) for planner in known[spills])
        layouts = [fitted for p in known[spills] if (fitted := _find_fitting(p, available, tiles)) is not None]
        if layouts:
            layout = min(layouts, key=lambda fitted: fitted[0])[1]
            return packed_plan(flow, layout, budget, reserved), layout
    planner, fitted = min(((p, p.least(tiles)) for p, tiles in tried), key=lambda pair: pair[1][0])
    layout = _seconds_and_layout(planner, fitted[1:])[1]
    least = layout.peak + reserved
    raise BudgetTooSmall(
        f"no plan of this network fits {format_bytes(budget)}; the least budget that would do is "
        f"about {format_bytes(math.ceil(least * 1.01))}, of which libraries and kernels take "
        f"{format_bytes(layout.overhead)}",
        least,
    )


def _device_note(device: Device) -> str:
    words = {"dense": "as they are", "compressed": "as nonzeros and a bit for each element", "outside": "outside"}
    return (
        f"the memory is that of a device, in which this process is not counted; weights of a segment are "
        f'{words[device.weights]}; "on disk" is outside of that memory'
    )


def _find_fitting(planner: Planner, available: int, tiles: bool) -> tuple[float, MemoryLayout] | None:
    """The seconds and the exact layout of the fastest segments that fit; None where none fit. The
    limit is lowered where an estimate of memory was too low."""
    libraries = LIBRARIES if planner.flow.device is None else 0
    limit = float(available - libraries)
    for attempt in range(8):
        fastest = planner.search(limit, tiles)
        if fastest is None and not attempt:
            return None  # all plans are estimated to take more
        if fastest is None:
            break
        exact = _seconds_and_layout(planner, fastest)
        if exact[1].peak <= available:
            return exact
        limit -= exact[1].peak - available
    size, seconds, segments = planner.least(tiles)
    exact = _seconds_and_layout(planner, (seconds, segments)) if size + libraries <= available else None
    return exact if exact is not None and exact[1].peak <= available else None


def _seconds_and_layout(planner: Planner, fastest: tuple[float, list[Segment]]) -> tuple[float, MemoryLayout]:
    layout = lay_out(planner.flow, fastest[1])
    return fastest[0], layout if planner.cut is None else planner.cut(layout)


def packed_plan(flow: Flow, layout: MemoryLayout, budget: int, reserved: int) -> TilePlan:
    """The plan of placed segments, with exact counts."""
    exact = tuple(
        replace(placed.segment, stored=stored) for placed, stored in zip(layout.segments, layout.stored, strict=True)
    )
    live = layout.live + reserved
    total = sum(s.macs for s in exact)
    untiled = sum(flow.macs(n) for n in flow.calls)
    sizes = tuple(tuple(fake(n).shape) for n in flow.inputs if n in flow.axes)
    return TilePlan(
        exact,
        budget,
        live + layout.overhead,
        live,
        layout.overhead,
        total,
        untiled,
        sum(s.traffic for s in exact),
        sizes,
        notes=(
            *(f"{node.name} runs whole: {text}" for node, text in flow.refusals.items()),
            *([] if flow.device is None else [_device_note(flow.device)]),
        ),
    )
