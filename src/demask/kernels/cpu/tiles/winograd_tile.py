"""Convolutions of 3 x 3 taps with stride 1 by minimal filtering, F(2 x 2, 3 x 3), in segments.

The algorithm is that of `kernels.cpu.winograd`, in the layout of segments: a vector is one position
of all tiles of the grid, so that a square of 2 x 2 outputs is four vectors, and all transforms are
sums of vectors.

    for block of squares:
        V[k, c, s] = component k of the 4 x 4 inputs of square s in channel c
        for component k: for block of R output channels: for group of G squares:
            M[k, o, s] = sum over c of broadcast(U[k, o, c]) · V[k, c, s]
        out = act(sums of M + bias + add)

Squares begin at even rows and columns of the image (`TileGrid.unit`), whatever the grid is: all
outputs have the same bits for any number of threads. Where an output is not finite, it may differ
from the definition (NaN instead of inf): the kernel says so in a slot of the arena, and the segment
is computed again by a plan without this kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.tiles.dense_tile import TILE, add_products
from demask.kernels.cpu.winograd import differences, totals
from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value
from demask.ops.activations import Act

#: call of the kernel; x, out, add and scratch are (slot of the arena, byte offset); offsets: bytes
#: of each channel, in tables; pitches: bytes from row to row; planes: bytes from component to
#: component; wide, thin: numbers of output blocks; tiles: the first line of each square; inexact:
#: the slot that is set to 1 where an output is not finite
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "scratch_slot", "scratch", "x_offsets",
    "out_offsets", "add_offsets", "x_pitch", "out_pitch", "add_pitch", "input_plane",
    "sum_plane", "channels", "outputs", "wide", "thin", "weights", "biases", "tiles", "tile_end",
    "inexact")])  # fmt: skip
COMPONENTS = 16  # products of a square and a pair of channels
#: rows: coefficients of g0, g1, g2
FILTER = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


@dataclass(frozen=True, slots=True)
class WinogradTileKernel:
    """The kernel for blocks of `block` squares.

    rows: output channels of a wide block. group: squares multiplied together, of which a block has
    a whole number. lanes: those of the grid that are tiles of images.
    """

    rows: int
    group: int
    block: int
    lanes: int
    add: bool
    act: Act | None

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        _Body(e, self).emit()


class _Body:
    """Writes the code of one kernel."""

    def __init__(self, e: Emitter, kernel: WinogradTileKernel):
        self.e, self.k, self.f = e, kernel, Fields(e, CALL.names)
        self.inputs = self.f.buffer("scratch")
        self.sums = e.at(self.inputs, e.b.mul(self.f["input_plane"], I64(COMPONENTS)))
        self.inexact = e.variable(e.vector, e.splat(0.0))

    def emit(self) -> None:
        e, b, end = self.e, self.e.b, self.f["tile_end"]
        with e.loop(I64(0), end, self.k.block) as first:
            left = b.sub(end, first)
            count = b.select(b.icmp_signed("<", left, I64(self.k.block)), left, I64(self.k.block))
            groups = b.udiv(b.add(count, I64(self.k.group - 1)), I64(self.k.group))
            computed = b.mul(groups, I64(self.k.group))
            with e.loop(I64(0), computed) as s:  # after the last square the last one again
                at, last = b.add(first, s), b.sub(end, I64(1))
                later = b.add(at, I64(self.k.block))
                numbers = [b.select(b.icmp_signed("<", n, last), n, last) for n in (at, later)]
                self._transform_inputs(numbers[0], s, numbers[1])
            self._multiply(computed)
            with e.loop(I64(0), count) as s:
                self._transform_sums(b.add(first, s), s)
        total = e.total(self.inexact.get())
        is_inexact = b.fcmp_unordered("uno", total, total)
        with b.if_then(is_inexact):
            b.store(I64(1), e.at(self.f.table, self.f["inexact"], I64))

    def _square_address(self, key: str, tile: Value) -> Value:
        """The address of the first line of a square in channel 0."""
        e = self.e
        lines = e.at(self.f.pointer("tiles"), e.b.mul(tile, I64(TILE.itemsize)))
        number = (TILE.names or ()).index(key)
        return e.line(self.f.buffer(key), e.load_long(I32, lines, number))

    def _row_addresses(self, key: str, square: Value, channel: Value, count: int) -> list[Value]:
        """The addresses of the first lines of the rows of a square in a channel."""
        e = self.e
        offset = e.load(I64, self.f.pointer(f"{key}_offsets"), channel)
        first = e.at(square, offset)
        pitch = self.f[f"{key}_pitch"]
        return [e.opaque(e.at(first, e.b.mul(pitch, I64(n)))) for n in range(count)]

    def _transform_inputs(self, tile: Value, s: Value, later: Value) -> None:
        """Fill the components of a square, and fetch the right half of a later one into the L2
        cache, while products are computed."""
        e, b, square = self.e, self.e.b, self._square_address("x", tile)
        target = e.line(self.inputs, s)
        right = e.line(self._square_address("x", later), 2)
        with e.loop(I64(0), self.f["channels"]) as c:
            for row in self._row_addresses("x", right, c, 4):
                e.prefetch(row, writes=False, near=False)
            rows = self._row_addresses("x", square, c, 4)
            own = e.line(target, b.mul(c, I64(self.k.block)))
            lines = [differences(e, [e.read(row, z) for row in rows]) for z in range(4)]
            for n, line in enumerate(zip(*lines, strict=True)):
                for m, value in enumerate(differences(e, list(line))):
                    e.write(value, e.at(own, b.mul(self.f["input_plane"], I64(4 * n + m))))

    def _multiply(self, count: Value) -> None:
        """Sums of all components."""
        e, b, k, f = self.e, self.e.b, self.k, self.f
        weight = e.variable(I64, f["weights"])
        with e.loop(I64(0), I64(COMPONENTS)) as component:
            inputs = e.at(self.inputs, b.mul(component, self.f["input_plane"]))
            target = e.variable(I64, b.ptrtoint(e.at(self.sums, b.mul(component, self.f["sum_plane"])), I64))
            for rows, blocks in ((k.rows, "wide"), (k.rows - 1, "thin")):
                if not rows:
                    continue
                with e.loop(I64(0), f[blocks]):
                    own = e.pointer(weight.get())
                    with e.loop(I64(0), count, k.group) as s:
                        self._multiply_group(own, e.line(inputs, s), e.line(e.pointer(target.get()), s), rows)
                    size = b.mul(f["channels"], I64(4 * rows))
                    weight.set(b.add(weight.get(), size))
                    target.set(b.add(target.get(), I64(rows * k.block * e.isa.line)))

    def _multiply_group(self, weight: Value, source: Value, target: Value, rows: int) -> None:
        """The sums of a block of output channels and a group of squares."""
        e, b, k = self.e, self.e.b, self.k
        sums = [[e.variable(e.vector, e.splat(0.0)) for _ in range(k.group)] for _ in range(rows)]
        with e.loop(I64(0), self.f["channels"]) as c:
            inputs = e.line(source, b.mul(c, I64(k.block)))
            weights = e.at(weight, b.mul(c, I64(rows)), FLOAT)
            totals = [[sum_.get() for sum_ in row] for row in sums]
            add_products(e, totals, functools.partial(e.read, inputs), lambda r: e.splat(e.load(FLOAT, weights, r)))
            for row, row_totals in zip(sums, totals, strict=True):
                for sum_, total in zip(row, row_totals, strict=True):
                    sum_.set(total)
        for r, row in enumerate(sums):
            for s, sum_ in enumerate(row):
                e.write(sum_.get(), target, r * k.block + s)

    def _transform_sums(self, tile: Value, s: Value) -> None:
        e, b, k = self.e, self.e.b, self.k
        out, source = self._square_address("out", tile), e.line(self.sums, s)
        add = self._square_address("add", tile) if k.add else None
        with e.loop(I64(0), self.f["outputs"]) as o:
            own = e.line(source, b.mul(o, I64(k.block)))
            planes = [b.mul(self.f["sum_plane"], I64(n)) for n in range(COMPONENTS)]
            sums = [e.read(e.at(own, plane)) for plane in planes]
            by_row = [totals(e, sums[n : n + 4]) for n in range(0, COMPONENTS, 4)]
            bias = e.splat(e.load(FLOAT, self.f.pointer("biases"), o))
            rows = self._row_addresses("out", out, o, 2)
            added = None if add is None else self._row_addresses("add", add, o, 2)
            inexact = self.inexact.get()
            for m, line in enumerate(zip(*by_row, strict=True)):
                for n, value in enumerate(totals(e, list(line))):
                    value = b.fadd(value, bias)
                    if added is not None:
                        value = b.fadd(value, e.read(added[n], m))
                    inexact = e.fma(self._own_lanes(value), e.splat(0.0), inexact)
                    e.write(activated(e, value, k.act), rows[n], m)
            self.inexact.set(inexact)

    def _own_lanes(self, value: Value) -> Value:
        """The lanes that are tiles of images, zeros in others: their values are of no use."""
        lanes = [n if n < self.k.lanes else -1 for n in range(self.e.lanes)]
        return value if self.k.lanes == self.e.lanes else self.e.permuted(value, lanes)
