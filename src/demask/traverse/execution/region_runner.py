"""Run a network on rectangles of its outputs only, exactly.

A rectangle is a frustum: the positions of each value that it needs follow from the table's rules,
operand by operand, so that its halo is exactly what the layers read. At the image's border every
layer has its own padding; elsewhere it reads real positions. A rectangle runs in bands that stay in
the caches, and computes nothing twice.

Selected tiles are covered with few rectangles. Every rectangle runs with a halo and has the
overhead of its calls; a rectangle around two others also covers the positions between them.
Rectangles are merged, the best pair first, while merging reduces the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, fx

from demask.exec.analysis.flow import Flow
from demask.exec.planning.plan_memory import plan_stage_memory, step_macs, tile_at, value_bytes
from demask.exec.planning.schedule import Stage, Step, build_stage, full_step, target_rows, tile_bands
from demask.machine.cost import TWO_CORES
from demask.ops.schema import fake
from demask.traverse.execution.run import new_memory
from demask.traverse.execution.segment_executor import Counter, SegmentExecutor, SourcesAndSinks
from demask.traverse.storage.sources_and_sinks import tensor_sink, tensor_source

# Cost of rectangles by their heights and widths, in positions: arrays of one shape -> another.
Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]
MANY = 512  # rectangles to merge at most; for more, four tiles become one


class Rectangle(NamedTuple):
    """Rows `top` to `bottom` and columns `left` to `right` of an image, ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """The number of positions."""
        return (self.bottom - self.top) * (self.right - self.left)


def rectangles(selected: Tensor, tile: int, size: tuple[int, int], cost: Cost) -> tuple[Rectangle, ...]:
    """Rectangles that cover all selected tiles of an image of `size`, sorted by their top; they may
    overlap.

    selected: bool [rows, columns] of tiles of `tile` x `tile` positions; the last ones may be
    smaller.

    >>> corner = Tensor([[1, 0], [1, 1]]).bool()
    >>> for area in rectangles(corner, 8, (16, 12), lambda h, w: h * w + 1.0): print(*area)
    0 8 0 8
    8 16 0 12
    >>> for area in rectangles(corner, 8, (16, 12), lambda h, w: (h + 4) * (w + 4)): print(*area)
    0 16 0 12
    """
    tiles = runs(selected)
    while len(tiles) > MANY:
        selected, tile = _halve(selected), 2 * tile
        tiles = runs(selected)
    if not tiles:
        return ()
    bounds = np.minimum(np.array(tiles) * tile, [size[0], size[0], size[1], size[1]])
    return tuple(sorted(Rectangle(*map(int, row)) for row in merge(bounds, cost)))


def runs(selected: Tensor) -> list[tuple[int, int, int, int]]:
    """Runs of selected tiles in a row, extended over rows below with the same run: (top, bottom,
    left, right) in tiles. They cover each selected tile once, and no other tile."""
    result: list[tuple[int, int, int, int]] = []
    above: dict[tuple[int, int], int] = {}
    for row, line in enumerate(F.pad(selected, (1, 1)).diff(dim=1).tolist()):
        edges = [k for k, change in enumerate(line) if change]
        current: dict[tuple[int, int], int] = {}
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            k = above.get((left, right))
            if k is None:
                k = len(result)
                result.append((row, row, left, right))
            result[k] = (result[k][0], row + 1, left, right)
            current[left, right] = k
        above = current
    return result


def merge(bounds: np.ndarray, cost: Cost) -> np.ndarray:
    """Rectangles merged while that reduces the cost; or the one around all, where that is cheaper.

    bounds: int [count, (top, bottom, left, right)], as is the result.
    """
    result = bounds.astype(np.int64)
    gain = _saved_cost(result[:, None], result[None], cost)
    np.fill_diagonal(gain, -np.inf)
    while len(result) > 1:
        i, j = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[i, j] <= 0:
            break
        result[i] = _around(result[i], result[j])
        keep = (_around(result, result[i]) != result[i]).any(-1)
        keep[i] = True
        i = int(keep[:i].sum())
        result, gain = result[keep], gain[np.ix_(keep, keep)]
        gain[i] = gain[:, i] = _saved_cost(result[i], result, cost)
        gain[i, i] = -np.inf
    union = np.array([[*result.min(0)[[0]], *result.max(0)[[1]], *result.min(0)[[2]], *result.max(0)[[3]]]])
    return union if _costs(union, cost).sum() <= _costs(result, cost).sum() else result


def _halve(selected: Tensor) -> Tensor:
    """Tiles of twice the size, selected where one of their four tiles is."""
    return F.max_pool2d(selected[None].float(), 2, ceil_mode=True)[0] > 0


def _around(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.stack([low[..., 0], high[..., 1], low[..., 2], high[..., 3]], -1)


def _costs(bounds: np.ndarray, cost: Cost) -> np.ndarray:
    costs = cost(bounds[..., 1] - bounds[..., 0], bounds[..., 3] - bounds[..., 2])
    return np.asarray(costs, np.float64)


def _saved_cost(a: np.ndarray, b: np.ndarray, cost: Cost) -> np.ndarray:
    return _costs(a, cost) + _costs(b, cost) - _costs(_around(a, b), cost)


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
        elif node in flow.local and any(read.all_rows for read in flow.local[node].reads):
            reasons.setdefault(node, "reads all rows at once")
        elif reads and node not in flow.local:
            reasons.setdefault(node, "runs on full values only")
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
        uncut_calls = [n for n in flow.calls if n not in flow.local]
        main = build_stage(flow, cut_calls, {n for n in flow.outputs if isinstance(n, fx.Node)})
        targets = target_rows(main)
        rows, columns = max(targets.values()), max(map(flow.columns, targets))
        for unit in main.units:  # compile kernels once, before anything is timed
            flow.local[unit.node].kind.compile(unit.after, unit.addend is not None)
        return cls(flow, build_stage(flow, uncut_calls, ()), main, (rows, columns))

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

        values: constants, and uncut inputs. index: of the image in inputs and results. An output
        that another output depends on is written with its halo.
        """
        counter, ends = Counter(), SourcesAndSinks()
        axes = self.flow.axes
        for node, tensor in values.items():
            if node in axes:
                ends.sources[node] = tensor_source(tensor, axes[node], index)
            else:
                ends.uncut_values[node] = tensor
        for node, tensor in results.items():
            ends.sinks[node] = tensor_sink(tensor, axes[node], fake(node).dtype, index)
        empty = plan_stage_memory(self.front, (), frozenset())
        front = SegmentExecutor(self.front, empty, ends, new_memory(0), Counter())
        front.run([full_step(self.front)])
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
