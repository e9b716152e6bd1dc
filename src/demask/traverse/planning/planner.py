"""From a budget to a plan: where the graph is cut, and how each piece runs.

Between two cuts lies a segment; what crosses a cut is kept as a map (its dependence closure, as in
Occam, arXiv 2006.15308). Cuts are forced where a call waits for all rows of something (statistics,
keys of attention); others are offered where little crosses. A dynamic program over the cuts finds
the fastest sequence of segments of which none takes more than the budget: the memory of a segment
depends on its own cuts alone, and a plan takes as much as its largest segment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from demask.errors import BudgetTooSmall
from demask.machine.byte_sizes import human
from demask.machine.roofline import TWO_CORES
from demask.traverse.analysis.flow import Flow
from demask.traverse.analysis.streamed_attention import streams_keys
from demask.traverse.planning.plan import BANDS, BARRIER, FRUSTUMS, LAYERWISE, Segment, TilePlan
from demask.traverse.planning.plan_memory import (
    LIBRARIES,
    MemoryLayout,
    count_steps,
    laid,
    step_macs,
    tile_at,
    value_bytes,
    written_over,
)
from demask.traverse.planning.schedule import Step, at_once, ends_of, middle
from demask.traverse.planning.stage import Stage, staged
from demask.traverse.planning.stage_memory import memory

BANDS_TRIED = tuple(2**k for k in range(12))
TILES_TRIED = (1024, 512, 256, 128, 64, 32, 16)
CUTS, MANY = 12, 400  # offered between forced ones; fewer in graphs of many calls
RECOMPUTED = 0.003  # of the multiply-adds may run twice where that saves a map


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One way to run the calls between two cuts."""

    segment: Segment
    seconds: float
    bytes: int  # with the maps that live beside it


class Planner:
    """The search for one flow. again: cheap values are computed twice rather than kept; spills:
    maps lie on disk; tiles: they may overlap."""

    def __init__(
        self,
        flow: Flow,
        *,
        again: bool,
        spills: bool,
        tiles: bool = True,
        workers: int = 1,
        smallest: int = 2**20,
    ):
        self.flow, self.spills, self.smallest = flow, spills, smallest
        self.calls = list(flow.calls)
        self.place = {node: k for k, node in enumerate(self.calls)}
        self.outputs = {n for n in flow.outputs if isinstance(n, fx.Node)}
        self.forced = _forced(flow, self.calls)
        self.tiles, self.workers = tiles, workers
        self.known: dict[tuple[int, int, str, int, int], StageChoice] = {}
        self.stages: dict[tuple[int, int], Stage] = {}
        self.again = frozenset[fx.Node]()
        self.last = self._last_reads()
        if again:
            self.again = self._cheap()
            self.last = self._last_reads()

    def _last_reads(self) -> dict[fx.Node, int]:
        """The last call that reads each value; what is computed again reads where it is read."""
        found: dict[fx.Node, int] = {}
        for n in reversed(list(self.flow.program.graph.nodes)):
            if n in self.flow.axes:
                found[n] = max((self._read_at(u, found) for u in n.users), default=-1)
        return found

    def _read_at(self, user: fx.Node, last: Mapping[fx.Node, int]) -> int:
        if user.op == "output":
            return len(self.calls)
        return max(self.place[user], last[user]) if user in self.again else self.place[user]

    def _cheap(self) -> frozenset[fx.Node]:
        """Values across forced cuts that are computed again rather than kept: what they are made of
        is kept anyway, and all of them together take few multiply-adds."""
        total = sum(self.flow.macs(n) for n in self.calls)
        found, spent = set[fx.Node](), 0
        for cut in self.forced:
            crossing = self._crossing(cut)
            for v in sorted(crossing - self.outputs, key=lambda v: -value_bytes(v)):
                read = [n for n in v.all_input_nodes if n in self.flow.axes]
                held = all(n in crossing or n.op == "placeholder" for n in read)
                held = held and not self._read_whole(v)
                cost = self.flow.macs(v) if v in self.flow.local else math.inf
                if held and v not in found and spent + cost <= RECOMPUTED * total:
                    found.add(v)
                    spent += int(cost)
        return frozenset(found)

    def _crossing(self, cut: int) -> set[fx.Node]:
        """Values made before a cut that are read behind it."""
        calls = (n for n in self.flow.axes if n.op == "call_function")
        return {n for n in calls if self.place[n] < cut <= self.last[n]}

    def cuts(self) -> list[int]:
        """Forced cuts, and the narrowest places between them."""
        ends = sorted({0, len(self.calls), *self.forced})
        crossing = self._crossing_bytes()
        offered: list[tuple[float, int]] = []
        for low, high in itertools.pairwise(ends):
            inner = [
                (crossing[k], k)
                for k in range(low + 1, high)
                if crossing[k] <= min(crossing[max(low, k - 1)], crossing[min(high, k + 1)])
            ]
            offered += inner
        offered.sort()
        spread: list[int] = []
        for _, k in offered:
            if len(spread) < (CUTS if len(self.calls) < MANY else CUTS // 3):
                spread.append(k)
        return sorted({*ends, *spread})

    def _crossing_bytes(self) -> list[float]:
        change = [0.0] * (len(self.calls) + 2)
        for node, last in self.last.items():
            if node.op == "call_function" and last > self.place[node]:
                size = value_bytes(node)
                change[self.place[node] + 1] += size
                change[min(last, len(self.calls)) + 1] -= size
        total, found = 0.0, []
        for step in change:
            total += step
            found.append(total)
        return found

    def pieces(self, low: int, high: int) -> tuple[list[fx.Node], set[fx.Node]]:
        """The calls between two cuts, with those made again for them; and what is kept of them."""
        mine = self.calls[low:high]
        inside, front = set(mine), list[fx.Node]()
        stack = [n for node in mine for n in node.all_input_nodes]
        while stack:
            node = stack.pop()
            if node in self.again and node not in inside:
                inside.add(node)
                front.append(node)
                stack += node.all_input_nodes
        front.sort(key=self.place.__getitem__)
        keeps = {
            n for n in mine if n in self.flow.axes and n not in self.again and self._kept(n, high)
        }
        return front + mine, keeps

    def _kept(self, node: fx.Node, high: int) -> bool:
        """Is a value read behind a cut?"""
        return self.last[node] >= high

    def choices(self, low: int, high: int, budget: float) -> list[StageChoice]:
        """Ways to run the calls between two cuts, among them the best within a budget."""
        nodes, keeps = self.pieces(low, high)
        if self._is_barrier(nodes):
            segment = Segment(BARRIER, tuple(n.name for n in nodes), ())
            return [StageChoice(segment, 0.0, self._beside(low, high, set()))]
        if (low, high) not in self.stages:
            self.stages[low, high] = staged(self.flow, nodes, keeps)
        stage = self.stages[low, high]

        def one(mode: str, rows: int = 0, columns: int = 0) -> StageChoice:
            key = low, high, mode, rows, columns
            if key not in self.known:
                self.known[key] = self._choice(stage, nodes, (low, high), mode, rows, columns)
            return self.known[key]

        found = [one(LAYERWISE)]
        if stage.streams and ends_of(stage):
            found += _bands(stage, lambda rows: one(BANDS, rows), budget)
        if self.tiles and self._tiles(stage):
            width = max(stage.flow.columns(v) for v in ends_of(stage))
            sizes = [n for n in TILES_TRIED if n < width]
            fits = next((c for n in sizes if (c := one(FRUSTUMS, n, n)).bytes <= budget), None)
            found += [fits] if fits is not None else [one(FRUSTUMS, n, n) for n in sizes[-1:]]
        return found

    def made(self, low: int, high: int, mode: str, rows: int, columns: int) -> Segment:
        """The calls between two cuts in one mode; layer-wise where they cannot run in it."""
        nodes, keeps = self.pieces(low, high)
        if self._is_barrier(nodes):
            return Segment(BARRIER, tuple(n.name for n in nodes), ())
        stage = staged(self.flow, nodes, keeps)
        can = stage.streams and bool(ends_of(stage)) and (mode != FRUSTUMS or self._tiles(stage))
        way = (mode, rows, columns) if can else (LAYERWISE, 0, 0)
        return self._choice(stage, nodes, (low, high), *way).segment

    def _is_barrier(self, nodes: Sequence[fx.Node]) -> bool:
        return not any(n in self.flow.axes or n in self.flow.gathers for n in nodes)

    def _tiles(self, stage: Stage) -> bool:
        """Have all values columns, so that tiles can be cut along them?"""
        axes = self.flow.axes
        values = [*stage.enters, *(u.value for u in stage.units if u.value in axes)]
        return (
            stage.streams and bool(ends_of(stage)) and all(axes[v][1] is not None for v in values)
        )

    def _choice(
        self, stage: Stage, nodes: Sequence[fx.Node], cuts: tuple[int, int], mode: str, rows: int,
        columns: int,
    ) -> StageChoice:  # fmt: skip
        low, high = cuts
        names, keeps = (tuple(n.name for n in some) for some in (nodes, stage.targets))
        spills = tuple(v.name for v in stage.targets if self._spilled(v))
        count = self.workers if mode == BANDS else 1
        segment = Segment(mode, names, keeps, spills, rows=rows, columns=columns, workers=count)
        maps = frozenset(v for v in [*stage.enters, *stage.targets] if self._is_map(v))
        steps = _sample(stage, segment)
        where = memory(stage, steps, maps, estimate=True)
        over = {} if mode == FRUSTUMS or count > 1 else written_over(stage, steps, maps)
        over = {a: b for a, b in over.items() if self.last[b] < high}
        segment = replace(
            segment,
            over={a.name: b.name for a, b in over.items()},
            steps=count_steps(stage, segment),
            bytes=count * where.size,
            traffic=sum(value_bytes(v) for v in [*stage.enters, *stage.targets]),
        )
        doing = step_macs(stage, steps[0]) * segment.steps if mode == FRUSTUMS else _all_macs(stage)
        segment = replace(segment, macs=doing)
        beside = self._beside(low, high, set(over))
        taken = segment.bytes + where.packed + count * where.beside
        return StageChoice(segment, _seconds(stage, segment), beside + taken)

    def _is_map(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not self._spilled(node) and not self._leaves(node)

    def _leaves(self, node: fx.Node) -> bool:
        """Is a value only handed out, to a sink?"""
        return node in self.outputs and all(u.op == "output" for u in node.users)

    def _read_whole(
        self, node: fx.Node, unless: Callable[[fx.Node], bool] = lambda reader: False
    ) -> bool:
        """Does a call read all rows of a value at once, but for calls that take blocks of them?"""
        readers = [u for u in node.users if u.op == "call_function" and not unless(u)]
        return any(e.whole and e.source is node for u in readers for e in self.flow.edges(u))

    def _spilled(self, node: fx.Node) -> bool:
        return (
            self.spills
            and not self._leaves(node)
            and not self._read_whole(node, unless=streams_keys)
            and value_bytes(node) >= self.smallest
        )

    def _beside(self, low: int, high: int, over: set[fx.Node]) -> int:
        """Bytes of the maps that live while the calls between two cuts run."""
        made = [*self.calls[:high]]
        live = 0
        for n in made:
            if n not in self.flow.axes or n in self.again or n in over or not self._is_map(n):
                continue
            before, behind = self.place[n] < low, self._kept(n, high)
            if behind or (before and self._kept(n, low)):
                live += value_bytes(n)
        return live

    def search(self, budget: float) -> tuple[float, list[Segment]] | None:
        """The fastest sequence of segments within a budget of live bytes, and its seconds."""
        cuts = self.cuts()
        best: dict[int, tuple[float, list[Segment]]] = {0: (0.0, [])}
        for j, high in enumerate(cuts):
            for low in cuts[:j]:
                for choice in self.choices(low, high, budget) if low in best else ():
                    seconds = best[low][0] + choice.seconds
                    if choice.bytes <= budget and seconds < best.get(high, (math.inf,))[0]:
                        best[high] = seconds, [*best[low][1], choice.segment]
        return best.get(len(self.calls))

    def least(self) -> tuple[float, float, list[Segment]]:
        """The fewest live bytes, by estimates that may be some rows too low; the seconds of the
        segments that take them, and these."""
        cuts = self.cuts()
        best: dict[int, tuple[float, float, list[Segment]]] = {0: (0.0, 0.0, [])}
        for j, high in enumerate(cuts[1:], 1):
            ways = [(max(best[low][0], c.bytes), best[low][1] + c.seconds, low, c.segment)
                    for low in cuts[:j] for c in self.choices(low, high, 0)]  # fmt: skip
            size, seconds, low, segment = min(ways, key=lambda way: way[:2])
            best[high] = size, seconds, [*best[low][2], segment]
        return best[len(self.calls)]


def _bands(stage: Stage, one: Callable[[int], StageChoice], budget: float) -> list[StageChoice]:
    """The lowest bands, and the fastest that fit. Memory grows with the height of bands by so much
    a row, which two heights tell; the others are tried where the estimate calls for them."""
    heights = [n for n in BANDS_TRIED if n < max(ends_of(stage).values())]
    if not heights:
        return []
    least, more = one(heights[0]), one(heights[min(6, len(heights) - 1)])
    apart = max(more.segment.rows - least.segment.rows, 1)
    slope = max(more.bytes - least.bytes, 0) / apart

    def guess(rows: int) -> tuple[float, int]:
        extra = int(slope * (rows - least.segment.rows))
        like = replace(least.segment, rows=rows, bytes=least.segment.bytes + extra)
        like = replace(like, steps=count_steps(stage, like))
        fits = least.bytes + 0.9 * extra <= budget
        return (_seconds(stage, like) if fits else math.inf), rows

    for seconds, rows in sorted(guess(n) for n in heights):
        found = one(rows) if seconds < math.inf else least
        if found.bytes <= budget:
            return [least, found]
    return [least]


def _forced(flow: Flow, calls: Sequence[fx.Node]) -> list[int]:
    """Where a call waits for all rows of something made since the last cut."""
    found: list[int] = []
    group: set[fx.Node] = set()
    ready: set[fx.Node] = set()  # whole values made since the last cut
    for k, node in enumerate(calls):
        cut = node in flow.local or node in flow.gathers
        waits = any(e.whole and e.source in group for e in flow.edges(node))
        waits |= any(n in ready for n in node.all_input_nodes) and cut
        waits |= any(n in ready and n in flow.gathers for n in node.all_input_nodes)
        waits |= bool(group) and cut != _streams(flow, calls[k - 1])
        if waits:
            found.append(k)
            group, ready = set(), set()
        group.add(node)
        if node not in flow.axes:
            ready.add(node)
    return found


def _streams(flow: Flow, node: fx.Node) -> bool:
    return node in flow.local or node in flow.gathers


def _sample(stage: Stage, segment: Segment) -> list[Step]:
    """Steps that stand for all others: two in the middle of bands, a tile in the middle."""
    if segment.mode == BANDS:
        return middle(stage, segment.rows)
    if segment.mode == FRUSTUMS:
        ends, (rows, columns) = ends_of(stage), (segment.rows, segment.columns)
        top = max(ends.values()) // 2 // rows * rows
        left = max(stage.flow.columns(v) for v in ends) // 2 // columns * columns
        return [tile_at(stage, (top, top + rows), (left, left + columns))]
    return [at_once(stage)]


def _all_macs(stage: Stage) -> int:
    return sum(stage.flow.macs(u.node) for u in stage.units)


def _seconds(stage: Stage, segment: Segment) -> float:
    """An estimate, to rank plans by."""
    at = TWO_CORES
    seconds = segment.macs / at.macs + segment.bytes / at.new + segment.traffic / at.far
    again = max(segment.macs / max(_all_macs(stage), 1), 1)
    for unit in stage.units:
        moved = 2 * value_bytes(unit.value)
        seconds += again * moved / (at.near if moved / segment.steps < at.cache else at.far)
    spilled = sum(value_bytes(v) for v in stage.targets if v.name in segment.spills)
    return seconds + segment.steps * len(stage.units) * at.call + 2 * spilled / at.disk


def planned(
    flow: Flow,
    budget: int,
    *,
    beside: int = 0,
    disk: bool = True,
    workers: int = 1,
) -> tuple[TilePlan, MemoryLayout]:
    """The fastest plan found within a budget, and where everything lies.

    beside: bytes the call takes for other things. disk: maps may be kept in files. BudgetTooSmall:
    no plan fits; `least` bytes would do.
    """
    room, tried = budget - beside, list[Planner]()
    for tiles, spills in itertools.product((False, True), repeat=2):
        if spills and not disk:
            continue
        both = [Planner(flow, again=again, spills=spills, tiles=tiles, workers=workers)
                for again in (False, True)]  # fmt: skip
        both = both if both[1].again else both[:1]
        tried += both
        made = [found for p in both if (found := _fitted(p, room)) is not None]
        if made:
            layout = min(made, key=lambda found: found[0])[1]
            return packed_plan(flow, layout, budget, beside), layout
    planner, found = min(((p, p.least()) for p in tried), key=lambda pair: pair[1][0])
    least = _exact(planner, found[1:])[1].peak + beside
    raise BudgetTooSmall(
        f"no plan of this network fits {human(budget)}; the least budget that would do is about "
        f"{human(math.ceil(least * 1.01))}",
        least,
    )


def _fitted(planner: Planner, room: int) -> tuple[float, MemoryLayout] | None:
    """The fastest segments whose exact layout fits, after their seconds; estimates of memory may
    be some rows too low."""
    limit = float(room - LIBRARIES)
    for _ in range(8):
        found = planner.search(limit)
        if found is None:
            break
        made = _exact(planner, found)
        if made[1].peak <= room:
            return made
        limit -= made[1].peak - room
    size, seconds, segments = planner.least()
    made = _exact(planner, (seconds, segments)) if size + LIBRARIES <= room else None
    return made if made is not None and made[1].peak <= room else None


def _exact(planner: Planner, found: tuple[float, list[Segment]]) -> tuple[float, MemoryLayout]:
    """Segments that were found, as they really lie, after their seconds."""
    return found[0], laid(planner.flow, found[1])


def packed_plan(flow: Flow, layout: MemoryLayout, budget: int, beside: int) -> TilePlan:
    """The plan of segments as they lie: exact counts."""
    exact = tuple(place.segment for place in layout.places)
    live = layout.live + beside
    total = sum(s.macs for s in exact)
    untiled = sum(flow.macs(n) for n in flow.calls)
    sizes = tuple(tuple(n.meta["val"].shape) for n in flow.inputs if n in flow.axes)
    return TilePlan(exact, budget, live + layout.overhead, live, layout.overhead, total, untiled,
                sum(s.traffic for s in exact), sizes, notes=tuple(_refused(flow)))  # fmt: skip


def _refused(flow: Flow) -> Iterator[str]:
    """Which calls run whole, and why."""
    for node, text in flow.refusals.items():
        yield f"{node.name} runs whole: {text}"
