"""Rectangles of a network's outputs, exactly, and nothing else of them.

A rectangle is a frustum: the positions of each value that it needs follow from the table's rules,
operand by operand, so that its halo is what the layers read and not an estimate. At the image's
border every layer has its own padding; elsewhere it reads real positions. The executor is that of
`demask.traverse`: a rectangle is walked in bands that stay in the caches, nothing in it made twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from demask.machine.roofline import TWO_CORES
from demask.traverse.analysis.flow import Flow
from demask.traverse.execution.rectangles import Rectangle
from demask.traverse.execution.run import fresh
from demask.traverse.execution.segment_executor import Counter, Ends, Sweep
from demask.traverse.planning.plan_memory import step_macs, tile_at, value_bytes
from demask.traverse.planning.schedule import Step, target_rows, tile_bands, whole_step
from demask.traverse.planning.stage import Stage, build_stage
from demask.traverse.planning.stage_memory import plan_stage_memory
from demask.traverse.storage.sources_and_sinks import tensor_sink, tensor_source

# So much takes a band's largest value. Measured: 8 MiB took 13 % longer, and rectangles of 26 MiB
# that were cut in two 7 %. Bands of fewer rows cost more calls than caches save.
BLOCK, LEAST = 32 * 2**20, 16  # bytes, rows


def refusals(flow: Flow) -> list[str]:
    """Why a network cannot be run on parts of an image: what reads all positions, by node."""
    found = dict(flow.refusals)
    for node in flow.calls:
        reads = [n.name for n in node.all_input_nodes if n in flow.axes]
        if node in flow.gathers:
            found.setdefault(node, "is made of all positions")
        elif node in flow.local and any(read.whole for read in flow.local[node].reads):
            found.setdefault(node, "reads all rows at once")
        elif reads and node not in flow.local:
            found.setdefault(node, "runs on whole values only")
    for node in flow.outputs:
        if not isinstance(node, fx.Node) or flow.axes.get(node) != (2, 3):
            found[node] = "is an output that is no image (n, c, rows, columns) as the input is"
        elif node.op != "call_function":
            found[node] = "is returned as it is"
    return [f"{getattr(node, 'name', node)} {text}" for node, text in found.items()]


@dataclass(frozen=True, slots=True)
class RegionNetwork:
    """A network of which rectangles can be run. front: the calls that no image reaches; main: the
    others. size: rows and columns of its largest output, whose positions rectangles count; another
    output's follow in proportion."""

    flow: Flow
    front: Stage
    main: Stage
    size: tuple[int, int]

    @classmethod
    def of(cls, flow: Flow) -> RegionNetwork:
        """Of a flow without refusals."""
        cut = [n for n in flow.calls if n in flow.local]
        rest = [n for n in flow.calls if n not in flow.local]
        main = build_stage(flow, cut, {n for n in flow.outputs if isinstance(n, fx.Node)})
        ends = target_rows(main)
        rows, columns = max(ends.values()), max(map(flow.columns, ends))
        for unit in main.units:  # machine code is made once, before anything is timed
            flow.local[unit.node].kind.compile(unit.after, unit.addend is not None)
        return cls(flow, build_stage(flow, rest, ()), main, (rows, columns))

    def frustum(self, where: Rectangle) -> Step:
        """The positions of each value that a rectangle needs."""
        rows, columns = (where.top, where.bottom), (where.left, where.right)
        return tile_at(self.main, rows, columns)

    def macs(self, where: Rectangle) -> int:
        """Multiply-adds of a rectangle with its halo."""
        return step_macs(self.main, self.frustum(where))

    def seconds(self, where: Rectangle) -> float:
        """An estimate of the time of a rectangle with its halo, to compare rectangles by."""
        step = self.frustum(where)
        moved = 0.0
        for unit in self.main.units:
            held, share = step[unit.value], 1 / max(self._positions(unit.value), 1)
            moved += 2 * value_bytes(unit.value) * share * _positions(held.computed, held.columns)
        bands = -(-(where.bottom - where.top) // self.band(where))
        calls, at = bands * len(self.main.units), TWO_CORES
        return step_macs(self.main, step) / at.macs + moved / at.near + calls * at.call

    def band(self, where: Rectangle) -> int:
        """Rows of a rectangle to make at a time, so that what one call reads and writes stays in
        the caches."""
        height, width = self.size
        row = max(map(value_bytes, (u.value for u in self.main.units))) / height
        row *= (where.right - where.left) / width
        return max(int(BLOCK / max(row, 1)), LEAST)

    def _positions(self, node: fx.Node) -> int:
        return self.flow.rows(node) * self.flow.columns(node)

    def steps(self, places: Sequence[Rectangle]) -> Iterator[Step]:
        """The steps in which rectangles are made, one after another."""
        for where in places:
            yield from tile_bands(self.main, self.frustum(where), self.band(where))

    def run(
        self,
        places: Sequence[Rectangle],
        given: Mapping[fx.Node, Any],
        results: Mapping[fx.Node, Tensor],
        index: int,
    ) -> Counter:
        """Write rectangles of one image into `results`. given: constants, and inputs, whole;
        index: which of their images and of the results'. An output that another is made of is
        written with its halo. Returns what was done."""
        counter, ends = Counter(), Ends()
        axes = self.flow.axes
        for node, value in given.items():
            if node in axes:
                ends.sources[node] = tensor_source(value, axes[node], index)
            else:
                ends.wholes[node] = value
        for node, value in results.items():
            ends.sinks[node] = tensor_sink(value, axes[node], node.meta["val"].dtype, index)
        empty = plan_stage_memory(self.front, (), frozenset())
        Sweep(self.front, empty, ends, fresh(0), Counter()).run([whole_step(self.front)])
        steps = list(self.steps(places))
        held = plan_stage_memory(self.main, steps, frozenset())
        Sweep(self.main, held, ends, fresh(held.size), counter).run(steps)
        return counter


def fitted(windows: RegionNetwork, tile: int) -> Any:
    """The estimate of time as a function of a rectangle's height and width, for many at once: area
    and halo. It is exact where rules are linear, away from the image's border."""
    tall, wide = windows.size
    heights = sorted({min(tile, tall), min(4 * tile, tall)})
    widths = sorted({min(tile, wide), min(4 * tile, wide)})
    rows, found = [], []
    for h in heights:
        for w in widths:
            top, left = (tall - h) // 2, (wide - w) // 2
            found.append(windows.seconds(Rectangle(top, top + h, left, left + w)))
            rows.append([h * w, h, w, 1])
    area, high, broad, alone = np.linalg.lstsq(np.array(rows, float), np.array(found), rcond=None)[
        0
    ]

    def cost(h: np.ndarray, w: np.ndarray) -> np.ndarray:
        return area * h * w + high * h + broad * w + alone

    return cost


def _positions(rows: tuple[int, int], columns: tuple[int, int]) -> int:
    return max(rows[1] - rows[0], 0) * max(columns[1] - columns[0], 0)


__all__ = ["RegionNetwork", "fitted", "refusals"]
