"""Several units side by side: which tiles of every feature map are on which unit, and what they exchange.

Each value with rows is cut into the tiles of a layout. A unit computes its own tiles of every layer, from its own tiles
of the layer before and a border of others', which is exchanged once per feature map. Weights are loaded from outside
once, a share by each unit, and passed on to the others. A layer that needs all rows runs on one unit.

    tiles of conv(x) == conv(tiles of x, with what their windows read of other tiles)

The network in tiles is a program of calls of ATen (`demask.exec.parts`): it computes the same outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.exec.analysis.flow import Flow
from demask.exec.axes import Window, full_window
from demask.exec.device import Device
from demask.exec.parts import LivePart, PartsWriter
from demask.graph.program import Program, module_of
from demask.graph.result.demasked_module import build_plain
from demask.machine.byte_sizes import format_bytes
from demask.ops.schema import fake
from demask.pages import Lines, Page, PageSource, TextTable

aten = torch.ops.aten


class Layout(NamedTuple):
    """A grid of tiles over every feature map, and the unit of the tile in each row and column of it."""

    rows: int
    columns: int
    unit: Callable[[int, int], int]


def _strips(units: int) -> Layout:
    return Layout(units, 1, lambda i, j: i)


def _columns(units: int) -> Layout:
    return Layout(1, units, lambda i, j: j)


def _mirrored(units: int) -> Layout:
    """Two strips for each unit: the two halves of the image in opposite order, so that they meet on one unit."""
    return Layout(2 * units, 1, lambda i, j: min(i, 2 * units - 1 - i))


def _sides(units: int) -> tuple[int, int]:
    rows = next(k for k in range(math.isqrt(units), 0, -1) if units % k == 0)
    return rows, units // rows


def _quadrants(units: int) -> Layout:
    rows, columns = _sides(units)
    return Layout(rows, columns, lambda i, j: i * columns + j)


def _checkerboard(units: int) -> Layout:
    """Four tiles for each unit, none next to another of the same unit: a balance of what parts of images cost."""
    rows, columns = _sides(units)
    return Layout(2 * rows, 2 * columns, lambda i, j: i % rows * columns + j % columns)


def _z_order(units: int) -> Layout:
    """Sixteen tiles a unit along the Z curve of Morton, cut into runs."""
    side = 1 << max(math.ceil(math.log2(max(units, 1)) / 2) + 2, 1)

    def position(i: int, j: int) -> int:
        bits = range(side.bit_length())
        return sum((i >> b & 1) << (2 * b + 1) | (j >> b & 1) << (2 * b) for b in bits)

    return Layout(side, side, lambda i, j: position(i, j) * units // (side * side))


LAYOUTS: Mapping[str, Callable[[int], Layout]] = {
    "strips": _strips,
    "columns": _columns,
    "quadrants": _quadrants,
    "checkerboard": _checkerboard,
    "z order": _z_order,
    "mirrored": _mirrored,
}


@dataclass(frozen=True, slots=True)
class LayoutTraffic:
    """What a layout of units costs, for one input.

    Attributes:
        layout: its name. units, tiles: numbers of units, and of tiles of each feature map.
        macs: multiply-adds of each unit.
        outside: bytes from and to outside: inputs, outputs, and every weight once.
        weights: bytes of weights that units pass on to each other.
        borders: bytes of feature maps that units send to each other, by the name of the value.
        inside: bytes that units read and write in their own memories.
        needed: the most bytes that a unit has in its memory: tiles until their last use with the borders that came,
            its share of all weights, and those of the layer that runs.
        microjoules: energy of these bytes.
        seconds: what takes longest: the multiply-adds of the busiest unit, or the bytes outside, between or inside
            units, as all of these overlap (the roofline of Williams, Waterman and Patterson, 2009).
        module: the network in these tiles, an nn.Module with equal outputs.

    Example:
        >>> import torch
        >>> from demask.traverse import spread
        >>> net, x = torch.nn.Conv2d(3, 8, 3, padding=1).eval(), torch.randn(1, 3, 32, 32)
        >>> (one,) = spread(net, (x,), layouts=("mirrored",)).layouts
        >>> one.tiles, one.balance, one.weights == 3 * (8 * 3 * 9 + 8) * 4
        (8, 1.0, True)
    """

    layout: str
    units: int
    tiles: int
    macs: tuple[int, ...]
    outside: int
    weights: int
    borders: Mapping[str, int]
    inside: int
    needed: int
    microjoules: float
    seconds: float
    module: nn.Module = field(repr=False)

    @property
    def exchanged(self) -> int:
        """Bytes of feature maps that units send to each other."""
        return sum(self.borders.values())

    @property
    def balance(self) -> float:
        """The most multiply-adds of a unit over the mean, 1.0 where all have as many."""
        return max(self.macs) * len(self.macs) / max(sum(self.macs), 1)


@dataclass(frozen=True, slots=True)
class UnitTraffic(PageSource):
    """The traffic of several layouts, from `spread`; prints as a table.

    Attributes:
        layouts: a `LayoutTraffic` for each layout, a tuple.
        device: that it is for.

    Example:
        >>> import torch
        >>> from demask.traverse import Device, spread
        >>> net, x = torch.nn.Conv2d(3, 8, 3, padding=1).eval(), torch.randn(1, 3, 32, 32)
        >>> rows, columns = spread(net, (x,), device=Device(units=4), layouts=("strips", "columns")).layouts
        >>> rows.exchanged == columns.exchanged == 6 * 32 * 3 * 4  # 6 lines of 32 positions, 3 floats each
        True
    """

    layouts: tuple[LayoutTraffic, ...]
    device: Device

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        head = ("layout", "tiles", "outside", "weights", "borders", "inside", "needs", "uJ", "us", "balance")
        rows = [
            (
                one.layout,
                str(one.tiles),
                *map(format_bytes, (one.outside, one.weights, one.exchanged, one.inside, one.needed)),
                f"{one.microjoules:.1f}",
                f"{1e6 * one.seconds:.1f}",
                f"{one.balance:.2f}",
            )
            for one in self.layouts
        ]
        own = self.device.memories[0]
        limit = "" if own.size is None else f" of {format_bytes(own.bytes)} each"
        lines = [f"{self.device.units} units{limit}; bytes of one input; weights and borders: from unit to unit"]
        if large := [one.layout for one in self.layouts if one.needed > own.bytes]:
            lines.append(f"more than a unit has: {', '.join(large)}")
        return Page("demask: units", (TextTable(head, rows, "Layouts"), Lines(lines, is_close=True)))


def unit_traffic(flow: Flow, device: Device, layouts: Sequence[str], until: str | None) -> UnitTraffic:
    """The traffic of layouts of a flow. Raises BadInput as `spread`."""
    if unknown := [name for name in layouts if name not in LAYOUTS]:
        raise BadInput(f"expected layouts of {', '.join(LAYOUTS)}, got {unknown[0]!r}")
    if not flow.axes:
        raise BadInput("no input has rows to cut: expected images (N, C, H, W), volumes or sequences")
    if until is not None:
        flow = _cut_until(flow, until)
    return UnitTraffic(tuple(_traffic(flow, name, device) for name in layouts), device)


def _cut_until(flow: Flow, module: str) -> Flow:
    """The flow in which calls after those of a module run uncut."""
    calls = list(flow.calls)
    names = [module_of(node).partition("@")[0] for node in calls]
    last = max((k for k, name in enumerate(names) if name == module or name.startswith(f"{module}.")), default=None)
    if last is None:
        raise BadInput(f"expected the name of a module that runs, got {module!r}; such as {names[0]!r}")
    later = set(calls[last + 1 :])
    local = {node: here for node, here in flow.local.items() if node not in later}
    gathers = {node: here for node, here in flow.gathers.items() if node not in later}
    return replace(flow, local=local, gathers=gathers)


def _traffic(flow: Flow, name: str, device: Device) -> LayoutTraffic:
    layout, units = LAYOUTS[name](device.units), device.units
    writer = _UnitWriter(flow, layout, units)
    program = writer.write()
    constants = [t for node, t in flow.constants.items() if node.users]
    weights = sum(t.numel() * t.element_size() for t in constants)
    ends = [*flow.inputs, *(n for n in flow.outputs if isinstance(n, fx.Node))]
    outside = weights + sum(_bytes(node) for node in ends)
    between = (units - 1) * weights
    borders = {node.name: size for node, size in writer.exchanged().items() if size}
    # Innermost first; units read their own memories at the same time.
    pairs = list(zip(device.memories, (writer.inside, between + sum(borders.values()), outside), strict=True))
    seconds = max(size / memory.rate / (units if k == 0 else 1) for k, (memory, size) in enumerate(pairs))
    return LayoutTraffic(
        layout=name,
        units=units,
        tiles=layout.rows * layout.columns,
        macs=tuple(writer.macs),
        outside=outside,
        weights=between,
        borders=borders,
        inside=writer.inside,
        needed=writer.most_bytes() + weights // units,
        microjoules=sum(memory.picojoules * size for memory, size in pairs) / 1e6,
        seconds=max(seconds, max(writer.macs) / device.macs),
        module=build_plain(program),
    )


def _bytes(node: fx.Node) -> int:
    value = fake(node)
    return math.prod(value.shape) * value.dtype.itemsize if isinstance(value, Tensor) else 0


class _UnitWriter(PartsWriter):
    """Writes the network in tiles, and counts what each unit reads.

    tiles: by value, the part and the window at each place of the grid; empty ones are left out. needed: by value and
    unit, which positions it reads. sent: bytes of results of one unit that others
    read. macs, inside: of each unit, and bytes of all.
    """

    def __init__(self, flow: Flow, layout: Layout, units: int):
        super().__init__(flow)
        self.layout, self.units = layout, units
        self.tiles: dict[fx.Node, dict[tuple[int, int], LivePart]] = {}
        self.needed: dict[fx.Node, dict[int, np.ndarray[Any, Any]]] = {}
        self.sent: dict[fx.Node, int] = {}
        self.macs, self.inside = [0] * units, 0

    def write(self) -> Program:
        """The program in tiles."""
        for node in self.flow.inputs:
            if node in self.flow.axes:
                self._distribute(node, self.values[node])
        for node in self.flow.calls:
            if node in self.flow.local:
                self._run_in_tiles(node)
            elif node in self.flow.gathers:
                self._gather(node)
            else:
                self._run_on_one_unit(node)
        for node in self.outputs:
            if isinstance(node, fx.Node) and node in self.tiles and node.op == "call_function":
                self.values[node] = self._assembled(node, full_window(node, self.flow.axes[node])).node
        return self.finish().program

    def grid(self, node: fx.Node) -> Iterator[tuple[int, int, Window]]:
        """The tiles of a value: row and column of the grid, and the window."""
        rows, columns = self.flow.rows(node), self.flow.columns(node)
        for i in range(self.layout.rows):
            for j in range(self.layout.columns):
                window = _share(rows, i, self.layout.rows), _share(columns, j, self.layout.columns)
                if all(start < end for start, end in window):
                    yield i, j, window

    def _distribute(self, node: fx.Node, full: fx.Node) -> None:
        """Cut a full value into tiles."""
        block = LivePart(full, full_window(node, self.flow.axes[node]))
        self.tiles[node] = {(i, j): LivePart(self.cut(block, node, w), w) for i, j, w in self.grid(node)}

    def _run_in_tiles(self, node: fx.Node) -> None:
        local, parts = self.flow.local[node], {}
        for i, j, window in self.grid(node):
            unit, windows = self.layout.unit(i, j), dict[fx.Node, Window]()
            for read in local.reads:
                need = read.rules[0](*window[0]), read.rules[1](*window[1])
                if all(start < end for start, end in need):
                    windows[read.node] = _around(windows.get(read.node, need), need)
            self.blocks = {value: self._assembled(value, need, unit) for value, need in windows.items()}
            parts[i, j] = LivePart(self.call_on_part(local, window, {}), window)
            self.macs[unit] += local.macs(window)
            self.inside += sum(map(self._part_bytes, windows, windows.values())) + self._part_bytes(node, window)
            self.inside += sum(_bytes(n) for n in node.all_input_nodes if n.op == "get_attr")
        self.tiles[node] = parts

    def _gather(self, node: fx.Node) -> None:
        """Reduce each tile on its unit, and the results on the first."""
        source = self.flow.gathered(node)
        for (i, j), part in self.tiles[source].items():
            self.blocks = {source: part}
            self.reduce_part(node, part.window)
            self.inside += self._part_bytes(source, part.window)
            if self.layout.unit(i, j):
                self.sent[node] = self.sent.get(node, 0) + _bytes(node)
        self.values[node] = self.finish_reduction(node)

    def _run_on_one_unit(self, node: fx.Node) -> None:
        """Run a call on full values, on the first unit."""
        self.blocks = {}
        for value in node.all_input_nodes:
            if value in self.tiles:
                self.blocks[value] = self._assembled(value, full_window(value, self.flow.axes[value]), 0)
        copied = self.editor.graph.node_copy(node, self.full_value)
        self.macs[0] += self.flow.macs(node)
        self.inside += _bytes(node) + sum(map(_bytes, node.all_input_nodes))
        if node not in self.flow.axes:
            self.values[node] = copied
            return
        self._distribute(node, copied)
        for (i, j), part in self.tiles[node].items():
            if self.layout.unit(i, j):
                self.sent[node] = self.sent.get(node, 0) + self._part_bytes(node, part.window)

    def _assembled(self, node: fx.Node, window: Window, unit: int | None = None) -> LivePart:
        """A window of a value, from its tiles. unit: that reads it."""
        if unit is not None:
            flags = self.needed.setdefault(node, {}).setdefault(
                unit, np.zeros((self.flow.rows(node), self.flow.columns(node)), bool)
            )
            flags[slice(*window[0]), slice(*window[1])] = True
        lines: dict[int, list[fx.Node]] = {}
        for (i, _), part in self.tiles[node].items():
            inside = _within(part.window[0], window[0]), _within(part.window[1], window[1])
            if all(start < end for start, end in inside):
                lines.setdefault(i, []).append(self.cut(part, node, inside))
        rows_axis, columns_axis = self.flow.axes[node]
        joined = [self._join_nodes(line, columns_axis) for line in lines.values()]
        return LivePart(self._join_nodes(joined, rows_axis), window)

    def _join_nodes(self, nodes: Sequence[fx.Node], axis: int | None) -> fx.Node:
        return nodes[0] if len(nodes) == 1 else self.editor.call(aten.cat.default, list(nodes), axis)

    def _part_bytes(self, node: fx.Node, window: Window) -> int:
        positions = math.prod(end - start for start, end in window)
        return _bytes(node) // max(self.flow.rows(node) * self.flow.columns(node), 1) * positions

    def exchanged(self) -> dict[fx.Node, int]:
        """Bytes of each value that units send to others: what each reads and has not, once."""
        total = dict(self.sent)
        for node, by_unit in self.needed.items():
            total[node] = total.get(node, 0) + sum(self._border(node, unit) for unit in by_unit)
        return total

    def _border(self, node: fx.Node, unit: int) -> int:
        """Bytes of a value that a unit reads and has not."""
        flags = self.needed.get(node, {}).get(unit)
        if flags is None:
            return 0
        missing = flags.copy()
        for (i, j), part in self.tiles[node].items():
            if self.layout.unit(i, j) == unit:
                missing[slice(*part.window[0]), slice(*part.window[1])] = False
        return int(missing.sum()) * (_bytes(node) // missing.size)

    def most_bytes(self) -> int:
        """The most bytes that a unit has of values until their last use, and of the weights of the call that runs."""
        calls, constants = list(self.flow.calls), self.flow.constants
        numbers = {node: k for k, node in enumerate(calls)}
        live = np.zeros((len(calls), self.units), np.int64)
        for node in (*self.flow.inputs, *calls):
            first = numbers.get(node, 0)
            last = max((numbers[user] for user in node.users if user in numbers), default=first)
            live[first : last + 1] += np.array([self._bytes_on(node, unit) for unit in range(self.units)])
        for node, k in numbers.items():
            live[k] += sum(_bytes(n) for n in node.all_input_nodes if n in constants)
        return int(live.max(initial=0))

    def _bytes_on(self, node: fx.Node, unit: int) -> int:
        """Bytes of a value in the memory of a unit: its tiles, and the borders that it reads."""
        if node not in self.tiles:
            return 0 if unit else _bytes(node)
        own = (part.window for (i, j), part in self.tiles[node].items() if self.layout.unit(i, j) == unit)
        return self._border(node, unit) + sum(self._part_bytes(node, window) for window in own)


def _share(size: int, k: int, count: int) -> tuple[int, int]:
    return size * k // count, size * (k + 1) // count


def _around(a: Window, b: Window) -> Window:
    rows, columns = (tuple(zip(*pair, strict=True)) for pair in zip(a, b, strict=True))
    return (min(rows[0]), max(rows[1])), (min(columns[0]), max(columns[1]))


def _within(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])
