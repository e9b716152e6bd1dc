"""Convolutions of 3 x 3 taps by the minimal filtering of Winograd, F(2 x 2, 3 x 3).

Two neighboring outputs of a filter (g0, g1, g2) need four products instead of six:

    m = (d0 - d2) g0, (d1 + d2)(g0 + g1 + g2)/2, (d2 - d1)(g0 - g1 + g2)/2, (d1 - d3) g2
    y = m[0] + m[1] + m[2], m[1] - m[2] - m[3]

Along rows and columns, a tile of 2 x 2 outputs takes 16 products for each pair of channels instead
of 36. They are 16 products of matrices, one for each component, [tiles, inner] x [inner, outer]:

    for block of tiles:
        V[k, t, i] = transformed tile of 4 x 4 inputs
        M[k, t, o] = V[k] x U[k]                     # sums stay in registers
        out = act(transformed M + bias + add)

Where each input is followed by its copy, as after a nearest-neighbor resize by 2, and tiles begin
between copies, d1 = d2: the third component is zero, and 9 products are left.

y[0] does not read d3, nor y[1] d0. So tiles that contain outputs outside of a part of an image give
the same values as tiles of the full image, bit by bit: tiles begin at even rows and columns of the
image, wherever the part begins. Images are stored as (rows, columns, channels).

Andrew Lavin and Scott Gray: Fast Algorithms for Convolutional Neural Networks. CVPR 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Value
from demask.kernels.llvm.isa import Isa, host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import SpareTasks, job_of_calls
from demask.ops.activations import Act

#: Call of a kernel. scratch: memory of the thread; pitches: floats from row to row; top, left: row
#: and column of x where the first tile begins; skipped_rows, skipped_columns: outputs of the first
#: tiles before those of out; across: tiles of a row; tile, tile_end: numbers of the thread's tiles;
#: block: tiles of a block
CALL = np.dtype([(key, "<i8") for key in (
    "x", "out", "weight", "bias", "scratch", "x_pitch", "out_pitch", "rows_in", "columns_in",
    "rows_out", "columns_out", "top", "left", "skipped_rows", "skipped_columns", "across", "tile",
    "tile_end", "block")])  # fmt: skip
ADDRESSES = 4  # the first fields, addresses that change from call to call
MOST_TILES = 48  # of a block: more have no use, as weights are read from the caches anyway
MOST_GROUP = 12  # tiles multiplied together
UNROLLED = 4  # input channels per iteration
LEAST_TILES = 32  # for which one more thread pays
LINE = 64  # bytes of a cache line
#: call of a packer: the weight, the transformed weight, and strides of the former in floats
PACK = np.dtype([(key, "<i8") for key in ("weight", "packed", "outer", "inner", "rows", "columns")])
ALL, DOUBLED = (0, 1, 2, 3), (0, 1, 3)  # components that are not zero


@dataclass(frozen=True, slots=True)
class WinogradKernel:
    """The kernel for these numbers of channels.

    inner, outer: multiples of the lanes. doubled: whether each row, and each column, of the input
    is followed by its copy. add: whether to add to the values in out.
    """

    inner: int
    outer: int
    doubled: tuple[bool, bool] = (False, False)
    act: Act | None = None
    add: bool = False

    arguments = 2

    @property
    def components(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Along rows and columns."""
        rows, columns = (DOUBLED if is_doubled else ALL for is_doubled in self.doubled)
        return rows, columns

    @property
    def count(self) -> int:
        """The number of products for each tile and pair of channels."""
        return math.prod(map(len, self.components))

    def vectors(self, isa: Isa) -> int:
        """Vectors of output channels that are computed together."""
        most = 2 if isa.registers < 32 else 4
        return next(n for n in range(most, 0, -1) if self.outer // isa.lanes % n == 0)

    def group(self, isa: Isa) -> int:
        """Tiles that are multiplied together: their sums fit in the registers."""
        vectors = self.vectors(isa)
        return min((isa.registers - vectors - 1) // vectors, MOST_GROUP)

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        _WinogradBody(e, self).emit()


class _WinogradBody:
    """Writes the code of one kernel."""

    def __init__(self, e: Emitter, kernel: WinogradKernel):
        call = e.pointer(e.args[0])
        self.e, self.k = e, kernel
        self.field = {key: e.load(I64, call, n) for n, key in enumerate(CALL.names or ())}
        self.x, self.out, self.weight, self.zeros = (
            e.pointer(self.field[key]) for key in ("x", "out", "weight", "scratch")
        )
        border = _border_floats(kernel)
        self.unused = e.at(self.zeros, border, FLOAT)  # for outputs outside of the part
        self.inputs = e.at(self.zeros, 2 * border, FLOAT)
        self.input_plane = self._plane(kernel.inner)
        self.sum_plane = self._plane(kernel.outer)
        self.sums = e.at(self.inputs, e.b.mul(self.input_plane, I64(kernel.count)), FLOAT)

    def _plane(self, channels: int) -> Value:
        """Floats from a component to the next, which is in other sets of the cache."""
        return self.e.b.add(self.e.b.mul(self.field["block"], I64(channels)), I64(LINE // 4))

    def emit(self) -> None:
        e, b, f = self.e, self.e.b, self.field
        with e.loop(I64(0), I64(_border_floats(self.k)), e.lanes) as c:
            self._store(e.splat(0.0), self.zeros, c)
        with e.loop(f["tile"], f["tile_end"], f["block"]) as first:
            left = b.sub(f["tile_end"], first)
            count = b.select(b.icmp_signed("<", left, f["block"]), left, f["block"])
            with e.loop(I64(0), count) as t:
                self._transform_inputs(b.add(first, t), t)
            self._multiply(count)
            with e.loop(I64(0), count) as t:
                self._transform_sums(b.add(first, t), t)

    def _doubled_position(self, tile: Value) -> tuple[Value, Value]:
        """Twice the row and the column of a tile."""
        b, across = self.e.b, self.field["across"]
        row = b.udiv(tile, across)
        column = b.sub(tile, b.mul(row, across))
        return b.mul(row, I64(2)), b.mul(column, I64(2))

    def _addresses(
        self,
        base: Value,
        other: Value,
        rows: Sequence[Value],
        columns: Sequence[Value],
        sizes: tuple[str, str, str],
        channels: int,
    ) -> list[list[Value]]:
        """Addresses of the positions in these rows and columns; `other` outside of the image.

        sizes: names of the fields with the numbers of rows and columns, and the pitch.
        """
        e, b, (height, width, pitch) = self.e, self.e.b, (self.field[key] for key in sizes)
        result = []
        for y in rows:
            is_row = b.icmp_unsigned("<", y, height)
            row = e.at(base, b.mul(y, pitch), FLOAT)
            addresses = []
            for z in columns:
                inside = b.and_(is_row, b.icmp_unsigned("<", z, width))
                address = e.at(row, b.mul(z, I64(channels)), FLOAT)
                addresses.append(b.select(inside, address, other))
            result.append(addresses)
        return result

    # -- inputs

    def _transform_inputs(self, tile: Value, t: Value) -> None:
        e, b, f, k = self.e, self.e.b, self.field, self.k
        row, column = self._doubled_position(tile)
        rows, columns = (
            [b.add(b.add(f[key], position), I64(n)) for n in components]
            for key, position, components in zip(("top", "left"), (row, column), k.components, strict=True)
        )
        sizes = ("rows_in", "columns_in", "x_pitch")
        addresses = self._addresses(self.x, self.zeros, rows, columns, sizes, k.inner)
        target = e.at(self.inputs, b.mul(t, I64(k.inner)), FLOAT)
        with e.loop(I64(0), I64(k.inner), e.lanes) as c:
            values = [[self._load(address, c) for address in line] for line in addresses]
            by_column = [differences(self.e, list(line)) for line in zip(*values, strict=True)]
            for n, line in enumerate(zip(*by_column, strict=True)):
                for m, value in enumerate(differences(self.e, list(line))):
                    plane = b.mul(self.input_plane, I64(n * len(line) + m))
                    self._store(value, e.at(target, plane, FLOAT), c)

    # -- products

    def _multiply(self, count: Value) -> None:
        """Products of all components. Groups may contain tiles after the last: nobody reads their
        sums."""
        e, b, k = self.e, self.e.b, self.k
        vectors, group = k.vectors(e.isa), k.group(e.isa)
        width = vectors * e.lanes
        weight = e.variable(I64, I64(0))
        with e.loop(I64(0), I64(k.count)) as component:
            inputs = e.at(self.inputs, b.mul(component, self.input_plane), FLOAT)
            sums = e.at(self.sums, b.mul(component, self.sum_plane), FLOAT)
            with e.loop(I64(0), I64(k.outer), width) as o:
                own_weight = e.at(self.weight, weight.get(), FLOAT)
                with e.loop(I64(0), count, group) as t:
                    source = e.at(inputs, b.mul(t, I64(k.inner)), FLOAT)
                    target = e.at(sums, b.add(b.mul(t, I64(k.outer)), o), FLOAT)
                    self._multiply_group(own_weight, source, target, vectors, group)
                weight.set(b.add(weight.get(), I64(k.inner * width)))

    def _multiply_group(self, weight: Value, source: Value, target: Value, vectors: int, group: int) -> None:
        """Products of a group of tiles and a block of output channels."""
        e, b, k = self.e, self.e.b, self.k
        totals = [[e.variable(e.vector, e.splat(0.0)) for _ in range(vectors)] for _ in range(group)]
        with e.loop(I64(0), I64(k.inner), UNROLLED) as c:
            values = [[total.get() for total in line] for line in totals]
            inputs = e.at(source, c, FLOAT)
            weights = e.at(weight, b.mul(c, I64(vectors * e.lanes)), FLOAT)
            for n in range(UNROLLED):
                row = [self._load(weights, I64((n * vectors + v) * e.lanes)) for v in range(vectors)]
                for t, line in enumerate(values):
                    factor = e.splat(e.load(FLOAT, inputs, t * k.inner + n))
                    line[:] = [e.fma(factor, w, value) for w, value in zip(row, line, strict=True)]
            for line, own in zip(totals, values, strict=True):
                for total, value in zip(line, own, strict=True):
                    total.set(value)
        for t, line in enumerate(totals):
            for v, total in enumerate(line):
                self._store(total.get(), target, I64(t * k.outer + v * e.lanes))

    # -- outputs

    def _transform_sums(self, tile: Value, t: Value) -> None:
        e, b, f, k = self.e, self.e.b, self.field, self.k
        row, column = self._doubled_position(tile)
        rows, columns = (
            [b.add(b.sub(position, f[key]), I64(n)) for n in range(2)]
            for key, position in (("skipped_rows", row), ("skipped_columns", column))
        )
        sizes = ("rows_out", "columns_out", "out_pitch")
        addresses = self._addresses(self.out, self.unused, rows, columns, sizes, k.outer)
        source = e.at(self.sums, b.mul(t, I64(k.outer)), FLOAT)
        has_bias = b.icmp_signed("!=", f["bias"], I64(0))
        bias = b.select(has_bias, e.pointer(f["bias"]), self.zeros)
        height, width = map(len, k.components)
        with e.loop(I64(0), I64(k.outer), e.lanes) as c:
            planes = [[b.mul(self.sum_plane, I64(n * width + m)) for m in range(width)] for n in range(height)]
            sums = [[self._load(e.at(source, plane, FLOAT), c) for plane in line] for line in planes]
            by_row = [totals(self.e, line) for line in sums]
            added = self._load(bias, c)
            for m, line in enumerate(zip(*by_row, strict=True)):
                for n, value in enumerate(totals(self.e, list(line))):
                    value = b.fadd(value, added)
                    if k.add:
                        value = b.fadd(value, self._load(addresses[n][m], c))
                    self._store(activated(e, value, k.act), addresses[n][m], c)

    def _load(self, pointer: Value, index: Value) -> Value:
        return self.e.b.load(self.e.at(pointer, index, FLOAT), typ=self.e.vector, align=4)

    def _store(self, value: Value, pointer: Value, index: Value) -> None:
        self.e.b.store(value, self.e.at(pointer, index, FLOAT), align=4)


def differences(e: Emitter, d: list[Value]) -> list[Value]:
    """The components of four inputs, or of the three that differ."""
    b = e.b
    if len(d) == len(DOUBLED):
        return [b.fsub(d[0], d[1]), b.fadd(d[1], d[1]), b.fsub(d[1], d[2])]
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def totals(e: Emitter, m: list[Value]) -> list[Value]:
    """The two outputs of four components, or of those that are not zero."""
    b = e.b
    if len(m) == len(DOUBLED):
        return [b.fadd(m[0], m[1]), b.fsub(m[1], m[2])]
    return [b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])]


def _border_floats(kernel: WinogradKernel) -> int:
    """Floats of a position outside of the image, in full cache lines."""
    return -(-max(kernel.inner, kernel.outer) * 4 // LINE) * LINE // 4


def pack_winograd(weight: Tensor, kernel: WinogradKernel, isa: Isa | None = None) -> Tensor:
    """The float32 weight [outer, inner, 3, 3] transformed, in the order in which the kernel reads
    it: [component, rest], where rest is [block of output channels, inner, channel of the block].

    Computed in float64 and rounded once. Nothing but the result is allocated.
    """
    isa = isa or host()
    packer = packer_of(kernel, isa)
    packed = torch.empty(kernel.count, kernel.inner * kernel.outer)
    call = np.array([(weight.data_ptr(), packed.data_ptr(), *weight.stride())], PACK)
    job_of_calls(packer, call, isa).run(1)
    return packed


@dataclass(frozen=True, slots=True)
class WinogradPacker:
    """The kernel that transforms weights, for a `WinogradKernel` with these fields."""

    inner: int
    outer: int
    vectors: int
    doubled: tuple[bool, bool]

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        b, call = e.b, e.pointer(e.args[0])
        field = {key: e.load(I64, call, n) for n, key in enumerate(PACK.names or ())}
        weight, target = e.pointer(field["weight"]), e.variable(I64, I64(0))
        lane_numbers = ir.Constant(e.ints, list(range(e.lanes)))
        lanes = b.mul(e.splat(b.trunc(field["outer"], I32)), lane_numbers)
        wide = ir.VectorType(ir.DoubleType(), e.lanes)
        width = self.vectors * e.lanes
        with e.loop(I64(0), I64(self.outer), width) as o, e.loop(I64(0), I64(self.inner)) as i:
            for v in range(self.vectors):
                first = b.mul(b.add(o, I64(v * e.lanes)), field["outer"])
                base = e.at(weight, b.add(first, b.mul(i, field["inner"])), FLOAT)
                taps = [
                    [self._load_taps(e, base, (field["rows"], y), (field["columns"], x), lanes, wide) for x in range(3)]
                    for y in range(3)
                ]
                for n, value in enumerate(self._transformed(e, taps)):
                    value = b.fptrunc(value, e.vector)
                    position = b.add(target.get(), I64(n * self.inner * self.outer + v * e.lanes))
                    b.store(value, e.at(e.pointer(field["packed"]), position, FLOAT), align=4)
            target.set(b.add(target.get(), I64(width)))

    def _load_taps(
        self, e: Emitter, base: Value, row: tuple[Value, int], column: tuple[Value, int], lanes: Value, wide: Any
    ) -> Value:
        """A tap of the weights of as many output channels as there are lanes, in double precision.
        row, column: stride and number."""
        b = e.b
        offset = b.add(b.mul(row[0], I64(row[1])), b.mul(column[0], I64(column[1])))
        return b.fpext(e.gather(e.at(base, offset, FLOAT), lanes, e.every(), e.splat(0.0)), wide)

    def _transformed(self, e: Emitter, taps: list[list[Value]]) -> list[Value]:
        """The components of 3 x 3 taps."""
        rows, columns = (DOUBLED if is_doubled else ALL for is_doubled in self.doubled)
        by_column = [_filtered(e, list(column), rows) for column in zip(*taps, strict=True)]
        lines = zip(*by_column, strict=True)
        return [value for line in lines for value in _filtered(e, list(line), columns)]


def packer_of(kernel: WinogradKernel, isa: Isa) -> WinogradPacker:
    return WinogradPacker(kernel.inner, kernel.outer, kernel.vectors(isa), kernel.doubled)


def _filtered(e: Emitter, g: list[Value], components: tuple[int, ...]) -> list[Value]:
    """The components of a filter of three taps."""
    half = ir.Constant(g[0].type, [0.5] * e.lanes)
    even = e.b.fmul(e.b.fadd(g[0], g[2]), half)
    odd = e.b.fmul(g[1], half)
    values = (g[0], e.b.fadd(even, odd), e.b.fsub(even, odd), g[2])
    return [values[n] for n in components]


class WinogradSizes(NamedTuple):
    rows_in: int
    columns_in: int
    rows_out: int
    columns_out: int
    x_pitch: int
    out_pitch: int
    top: int
    left: int
    skipped_rows: int
    skipped_columns: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-(self.rows_out + self.skipped_rows) // 2), -(-(self.columns_out + self.skipped_columns) // 2)


class WinogradTask:
    """The calls of a kernel for inputs of one size, one per thread; not for two runs at once.

    scratch: bytes of each thread.
    """

    def __init__(self, kernel: WinogradKernel, sizes: WinogradSizes, threads: int, scratch: int, isa: Isa):
        height, across = sizes.tiles
        block, calls = block_tiles(kernel, scratch, isa), []
        for k in range(threads):
            ends = (height * across * n // threads for n in (k, k + 1))
            fields = (0, 0, 0, 0, 0, sizes.x_pitch, sizes.out_pitch, sizes.rows_in,
                      sizes.columns_in, sizes.rows_out, sizes.columns_out, sizes.top, sizes.left,
                      sizes.skipped_rows, sizes.skipped_columns, across, *ends, block)  # fmt: skip
            calls.append(fields)
        self.calls, self.threads, self.scratch = np.array(calls, CALL), threads, scratch
        self.addresses = self.calls.view(np.int64).reshape(threads, -1)
        self.job = job_of_calls(kernel, self.calls, isa)

    def run(self, addresses: tuple[int, int, int, int], scratch: int) -> None:
        """Run for the addresses of x, out, weight and bias, and of the memory of all threads."""
        self.addresses[:, :ADDRESSES] = addresses
        self.addresses[:, ADDRESSES] = scratch + self.scratch * np.arange(self.threads)
        self.job.run(self.threads)


def scratch_bytes(kernel: WinogradKernel, tiles: int, isa: Isa | None = None) -> int:
    """Bytes of memory of a thread for blocks of so many tiles."""
    group = kernel.group(isa or host())
    floats = -(-tiles // group) * group * (kernel.inner + kernel.outer) + 2 * LINE // 4
    return 4 * (2 * _border_floats(kernel) + kernel.count * floats)


def block_tiles(kernel: WinogradKernel, scratch: int, isa: Isa) -> int:
    """The tiles of a block, of which `scratch` bytes have room for; 0 for none."""
    group = kernel.group(isa)
    fixed = scratch_bytes(kernel, 0, isa)
    groups = max(scratch - fixed, 0) // (scratch_bytes(kernel, group, isa) - fixed)
    return min(groups, -(-MOST_TILES // group)) * group


class WinogradRunner:
    """Runs a kernel on parts of any size; several threads may use it at once."""

    def __init__(self, kernel: WinogradKernel, isa: Isa | None = None):
        self.kernel, self.isa = kernel, isa or host()
        self.spare = SpareTasks[tuple[WinogradSizes, int, int], WinogradTask]()

    def compile(self) -> None:
        """Compile now rather than in the first run, with the packer."""
        CODE.addresses([self.kernel, packer_of(self.kernel, self.isa)], self.isa)

    def run(
        self, sizes: WinogradSizes, threads: int, addresses: tuple[int, int, int, int], scratch: tuple[int, int]
    ) -> None:
        """Fill the output.

        addresses: of x, out, packed weight and bias (0: none). scratch: address and bytes of memory
        that has room for a block of tiles; as many threads run as it has room for.
        """
        address, size = scratch
        fits = max(size // scratch_bytes(self.kernel, 1, self.isa), 1)
        threads = max(1, min(threads, math.prod(sizes.tiles) // LEAST_TILES, fits))
        share = size // threads // LINE * LINE
        key = sizes, threads, share
        task = self.spare.take(key, lambda: WinogradTask(self.kernel, sizes, threads, share, self.isa))
        task.run(addresses, address)
        self.spare.put(key, task)
