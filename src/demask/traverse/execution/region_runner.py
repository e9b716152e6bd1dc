"""Run a network on rectangles of its outputs only, exactly.

A rectangle is a frustum: the positions of each value that it needs follow from the table's rules,
operand by operand, so that its halo is exactly what the layers read. At the image's border every
layer has its own padding; elsewhere it reads real positions. A rectangle runs in bands that stay in
the caches, and computes nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, fx

from demask.machine.roofline import TWO_CORES
from demask.ops.schema import fake
from demask.traverse.analysis.flow import Flow
from demask.traverse.execution.rectangles import Rectangle
from demask.traverse.execution.run import new_memory
from demask.traverse.execution.segment_executor import Counter, SegmentExecutor, SourcesAndSinks
from demask.traverse.planning.plan_memory import step_macs, tile_at, value_bytes
from demask.traverse.planning.schedule import Step, target_rows, tile_bands, whole_step
from demask.traverse.planning.stage import Stage, build_stage
from demask.traverse.planning.stage_memory import plan_stage_memory
from demask.traverse.storage.sources_and_sinks import tensor_sink, tensor_source

# Bytes of a band's largest value, and fewest rows. Measured: 8 MiB took 13 % longer, and rectangles
# of 26 MiB that were cut in two 7 %. Bands of fewer rows cost more calls than caches save.
BLOCK, LEAST = 32 * 2**20, 16


def refusals(flow: Flow) -> list[str]:
    """Reasons why a network cannot run on parts of an image; empty where it can."""
    reasons = dict(flow.refusals)
    for node in flow.calls:
        reads = [n.name for n in node.all_input_nodes if n in flow.axes]
        if node in flow.gathers:
            reasons.setdefault(node, "reduces all positions")
        elif node in flow.local and any(read.whole for read in flow.local[node].reads):
            reasons.setdefault(node, "reads all rows at once")
        elif reads and node not in flow.local:
            reasons.setdefault(node, "runs on whole values only")
    for node in flow.outputs:
        if not isinstance(node, fx.Node) or flow.axes.get(node) != (2, 3):
            reasons[node] = "is an output, but no image (n, c, rows, columns) as the input is"
        elif node.op != "call_function":
            reasons[node] = "is returned as it is"
    return [f"{getattr(node, 'name', node)} {text}" for node, text in reasons.items()]


@dataclass(frozen=True, slots=True)
class RegionNetwork:
    """A network that can run on rectangles of its outputs.

    front: calls that depend on no image; main: the others. size: rows and columns of the largest
    output, in which rectangles are measured; those of other outputs are in proportion.
    """

    flow: Flow
    front: Stage
    main: Stage
    size: tuple[int, int]

    @classmethod
    def of(cls, flow: Flow) -> RegionNetwork:
        """The region network of a flow without refusals."""
        cut_calls = [n for n in flow.calls if n in flow.local]
        whole_calls = [n for n in flow.calls if n not in flow.local]
        main = build_stage(flow, cut_calls, {n for n in flow.outputs if isinstance(n, fx.Node)})
        targets = target_rows(main)
        rows, columns = max(targets.values()), max(map(flow.columns, targets))
        for unit in main.units:  # compile kernels once, before anything is timed
            flow.local[unit.node].kind.compile(unit.after, unit.addend is not None)
        return cls(flow, build_stage(flow, whole_calls, ()), main, (rows, columns))

    def frustum(self, rectangle: Rectangle) -> Step:
        """The positions of each value that a rectangle needs."""
        rows, columns = (rectangle.top, rectangle.bottom), (rectangle.left, rectangle.right)
        return tile_at(self.main, rows, columns)

    def macs(self, rectangle: Rectangle) -> int:
        """Multiply-adds of a rectangle with its halo."""
        return step_macs(self.main, self.frustum(rectangle))

    def seconds(self, rectangle: Rectangle) -> float:
        """Estimated seconds of a rectangle with its halo, to compare rectangles by."""
        step = self.frustum(rectangle)
        moved = 0.0
        for unit in self.main.units:
            rows, share = step[unit.value], 1 / max(self._positions(unit.value), 1)
            moved += 2 * value_bytes(unit.value) * share * _positions(rows.computed, rows.columns)
        bands = -(-(rectangle.bottom - rectangle.top) // self.band(rectangle))
        calls, rates = bands * len(self.main.units), TWO_CORES
        return step_macs(self.main, step) / rates.macs + moved / rates.near + calls * rates.call

    def band(self, rectangle: Rectangle) -> int:
        """Rows of a rectangle to compute at a time, so that the operands of a call stay in the
        caches."""
        height, width = self.size
        row = max(map(value_bytes, (u.value for u in self.main.units))) / height
        row *= (rectangle.right - rectangle.left) / width
        return max(int(BLOCK / max(row, 1)), LEAST)

    def _positions(self, node: fx.Node) -> int:
        return self.flow.rows(node) * self.flow.columns(node)

    def steps(self, rectangles: Sequence[Rectangle]) -> Iterator[Step]:
        """The steps that compute rectangles, one after another."""
        for rectangle in rectangles:
            yield from tile_bands(self.main, self.frustum(rectangle), self.band(rectangle))

    def run(
        self,
        rectangles: Sequence[Rectangle],
        values: Mapping[fx.Node, Any],
        results: Mapping[fx.Node, Tensor],
        index: int,
    ) -> Counter:
        """Write rectangles of one image into `results`. Returns multiply-adds and steps.

        values: constants, and whole inputs. index: of the image in inputs and results. An output
        that another output depends on is written with its halo.
        """
        counter, ends = Counter(), SourcesAndSinks()
        axes = self.flow.axes
        for node, tensor in values.items():
            if node in axes:
                ends.sources[node] = tensor_source(tensor, axes[node], index)
            else:
                ends.whole_values[node] = tensor
        for node, tensor in results.items():
            ends.sinks[node] = tensor_sink(tensor, axes[node], fake(node).dtype, index)
        empty = plan_stage_memory(self.front, (), frozenset())
        front = SegmentExecutor(self.front, empty, ends, new_memory(0), Counter())
        front.run([whole_step(self.front)])
        steps = list(self.steps(rectangles))
        memory = plan_stage_memory(self.main, steps, frozenset())
        SegmentExecutor(self.main, memory, ends, new_memory(memory.size), counter).run(steps)
        return counter


def fit_cost(windows: RegionNetwork, tile: int) -> Any:
    """Estimated seconds as a function of heights and widths (arrays): a fit of area, height, width.

    It is exact where rules are linear, away from the image's border.
    """
    tall, wide = windows.size
    heights = sorted({min(tile, tall), min(4 * tile, tall)})
    widths = sorted({min(tile, wide), min(4 * tile, wide)})
    rows, seconds = [], []
    for h in heights:
        for w in widths:
            top, left = (tall - h) // 2, (wide - w) // 2
            seconds.append(windows.seconds(Rectangle(top, top + h, left, left + w)))
            rows.append([h * w, h, w, 1])
    by_area, by_height, by_width, constant = np.linalg.lstsq(np.array(rows, float), np.array(seconds), rcond=None)[0]

    def cost(h: np.ndarray, w: np.ndarray) -> np.ndarray:
        return by_area * h * w + by_height * h + by_width * w + constant

    return cost


def _positions(rows: tuple[int, int], columns: tuple[int, int]) -> int:
    return max(rows[1] - rows[0], 0) * max(columns[1] - columns[0], 0)


__all__ = ["RegionNetwork", "fit_cost", "refusals"]
