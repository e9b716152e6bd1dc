"""The depthwise kernel: each output channel reads one input channel; lanes are tiles of positions.

    for channel: for each of its output channels: for area of positions: for block of the area:
        sum[i][j] = bias + add[i][j]
        for row of taps:
            for each line of x that the block reads: for each tap and position (i, j) that read it:
                sum[i][j] += broadcast(weight[tap]) · line
        out[i][j] = act(sum[i][j])

Lines over an edge of a tile are read from a stored border, or, if the value has none, permuted in
registers from the line that has these pixels (`edges`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I32, I64, Emitter, Fields, Value
from demask.ops.activations import Act

#: call of the kernel; x, out and add are (slot of the arena, byte offset); pitches: bytes from
#: channel to channel; channels: of x; outputs: per channel of x; tiles: areas, as in `dense_tile`
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "x_pitch", "out_pitch", "add_pitch",
    "channels", "outputs", "weights", "biases", "tiles", "tile_begin", "tile_end")])  # fmt: skip

Position = tuple[int, int]
Block = tuple[int, int, int, int]  # first row, first column, rows, columns
Edge = tuple[int, int, int, int]  # row, column, line to permute, number of the permutation


@dataclass(frozen=True, slots=True)
class DepthwiseTileKernel:
    """The kernel for areas of one shape.

    blocks: of an area; the sums of a block stay in registers. taps: rows and columns that a
    position reads; stride: rows and columns of x from position to position. rows: lines from row to
    row of x, out and, if there is one, the added value. edges: the rows and columns of x that are
    permuted, with `lanes`. Rows, columns and lines are relative to those of the area.
    """

    blocks: tuple[Block, ...]
    taps: tuple[tuple[int, ...], ...]
    stride: Position
    rows: tuple[int, ...]
    act: Act | None
    edges: tuple[Edge, ...] = ()
    lanes: tuple[tuple[int, ...], ...] = ()

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        keys, taps = ("x", "out", "add")[: len(self.rows)], len(self.taps[0]) * len(self.taps[1])
        bases = {key: fields.buffer(key) for key in keys}
        with e.loop(I64(0), fields["channels"]) as channel:
            x = e.at(bases["x"], e.b.mul(channel, fields["x_pitch"]))
            first = e.b.mul(channel, fields["outputs"])
            with e.loop(first, e.b.add(first, fields["outputs"])) as row:
                lines = [x, *(e.at(bases[key], e.b.mul(row, fields[f"{key}_pitch"])) for key in keys[1:])]
                weights = e.at(fields.pointer("weights"), e.b.mul(row, I64(4 * taps)))
                bias = e.splat(e.load(FLOAT, fields.pointer("biases"), row))
                with e.loop(fields["tile_begin"], fields["tile_end"]) as tile:
                    table = e.at(fields.pointer("tiles"), e.b.mul(tile, I64(16)))
                    addresses = [e.line(base, e.load_long(I32, table, k)) for k, base in enumerate(lines)]
                    permuted: dict[Position, Value] = {}
                    for block in self.blocks:
                        self._block(e, block, addresses, (weights, bias), permuted)

    def _block(
        self,
        e: Emitter,
        block: Block,
        addresses: list[Value],
        row: tuple[Value, Value],
        permuted: dict[Position, Value],
    ) -> None:
        """Compute a block. addresses: the addresses of the area; row: of the weights, and the bias."""
        top, left, height, width = block
        positions = [(top + i, left + j) for i in range(height) for j in range(width)]
        sums = dict.fromkeys(positions, row[1])
        if len(addresses) > 2:
            added = {(i, j): e.read(addresses[2], i * self.rows[2] + j) for i, j in positions}
            sums = {at: e.b.fadd(value, row[1]) for at, value in added.items()}
        x, columns = addresses[0], len(self.taps[1])
        for number, tap in enumerate(self.taps[0]):
            x = e.opaque(x)  # LLVM would otherwise keep lines from one row of taps to the next
            weights = [e.splat(e.load(FLOAT, row[0], number * columns + k)) for k in range(columns)]
            for (y, z), uses in self._uses(tap, positions).items():
                line = self._line(e, x, (y, z), permuted)
                for k, at in uses:
                    sums[at] = e.fma(line, weights[k], sums[at])
        for (i, j), value in sums.items():
            e.write(activated(e, value, self.act), addresses[1], i * self.rows[1] + j)

    def _uses(self, tap: int, positions: list[Position]) -> dict[Position, list[tuple[int, Position]]]:
        """The rows and columns of x that a row of taps reads: numbers of taps, positions."""
        uses: dict[Position, list[tuple[int, Position]]] = {}
        for k, column in enumerate(self.taps[1]):
            for i, j in positions:
                position = i * self.stride[0] + tap, j * self.stride[1] + column
                uses.setdefault(position, []).append((k, (i, j)))
        return dict(sorted(uses.items()))

    def _line(self, e: Emitter, x: Value, at: Position, permuted: dict[Position, Value]) -> Value:
        """The line of x at a row and column."""
        if at in permuted:
            return permuted[at]
        for *edge, line, number in self.edges:
            if tuple(edge) == at:
                permuted[at] = e.permuted(e.read(x, line), self.lanes[number])
                return permuted[at]
        return e.read(x, at[0] * self.rows[0] + at[1])
