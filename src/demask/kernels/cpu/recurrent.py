"""Kernels of recurrent layers: all time steps of some rows of a batch, on one thread.

    for t: for block of hidden units: for row:
        sum[gate] = gates[t, row, gate] + W_hh[gate] h[t - 1, row]
        h[t, row], c = cell(sum, h[t - 1, row], c)

`gates` is what the input contributes, W_ih x + b_ih + b_hh. Lanes are hidden units; sums are in the
order of h for any number of rows, so a row has the same bits in any batch. Rows are vectors one
after another in memory: the state before the first step, then one state per step.

Gates in order: LSTM i, f, g, o; GRU r, z, n. Source: torch.nn.LSTM, torch.nn.GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I64, Emitter, Fields, Value, Variable

#: fields of a call. gates, rows: the first gates, and the state before the first step, of the first
#: row; bytes from step to step and from row to row of both; cell: bytes from the state before the
#: first step to the cell state; units, blocks: hidden units, and vectors of them; weights:
#: [blocks, units, gates, lanes]; biases: of h in gate n of a GRU, [blocks, lanes]
CALL = np.dtype([(key, "<i8") for key in (
    "gates_slot", "gates", "rows_slot", "rows", "gate_step", "gate_row", "step", "row", "cell",
    "units", "blocks", "steps", "weights", "biases")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _UnitState:
    """Where the state of a block of a row is: of the step before, of this step, the cell state."""

    before: Value
    after: Value
    cell: Value


def _lstm(e: Emitter, sums: Sequence[Value], x: Value, at: _UnitState) -> None:
    """c = f c + i g; h = o tanh(c)."""
    i, f, o = (activated(e, sums[k], ("sigmoid", ())) for k in (0, 1, 3))
    g = activated(e, sums[2], ("tanh", ()))
    c = e.b.fadd(e.b.fmul(f, e.read(at.cell)), e.b.fmul(i, g))
    e.write(c, at.cell)
    e.write(e.b.fmul(o, activated(e, c, ("tanh", ()))), at.after)


def _gru(e: Emitter, sums: Sequence[Value], x: Value, at: _UnitState) -> None:
    """n = tanh(x + r sum); h = (h - n) z + n. x: what the input contributes to n."""
    r, z = (activated(e, sums[k], ("sigmoid", ())) for k in (0, 1))
    n = activated(e, e.b.fadd(x, e.b.fmul(r, sums[2])), ("tanh", ()))
    distance = e.b.fsub(e.read(at.before), n)
    e.write(e.b.fadd(e.b.fmul(distance, z), n), at.after)


#: name in `segment_calls.CALLED` -> gates, and the function that writes the state of a step
CELLS: dict[str, tuple[int, Callable[[Emitter, Sequence[Value], Value, _UnitState], None]]] = {
    "lstm": (4, _lstm),
    "gru": (3, _gru),
}


def most_rows(name: str, registers: int) -> int:
    """The rows whose sums, states and one weight fit in the vector registers.

    >>> most_rows("lstm", 32), most_rows("lstm", 16)
    (6, 3)
    """
    return (registers - 1) // (CELLS[name][0] + 1)


@dataclass(frozen=True, slots=True)
class RecurrentKernel:
    """The kernel of a layer for so many rows. zero: whether the states before the first step are
    zero, which the kernel then writes."""

    name: str
    rows: int
    zero: bool

    arguments = 2

    @property
    def gates(self) -> int:
        """Sums per hidden unit."""
        return CELLS[self.name][0]

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        gates, rows = fields.buffer("gates"), fields.buffer("rows")
        if self.zero:
            self._write_zero_states(e, fields, rows)
        with e.loop(I64(0), fields["steps"]) as t:
            x = e.at(gates, e.b.mul(t, fields["gate_step"]))
            before = e.at(rows, e.b.mul(t, fields["step"]))
            weights = e.variable(I64, fields["weights"])
            with e.loop(I64(0), fields["blocks"]) as block:
                first = e.b.mul(block, I64(e.isa.line))
                sums = self._sums(e, fields, (x, before), first, weights)
                for row, gate_sums in enumerate(sums):
                    shift = e.b.add(e.b.mul(fields["row"], I64(row)), first)
                    state = e.at(before, shift)
                    cell = e.at(e.at(rows, shift), fields["cell"])
                    at = _UnitState(state, e.at(state, fields["step"]), cell)
                    added = self._gate(e, fields, e.at(x, first), row, self.gates - 1)
                    CELLS[self.name][1](e, gate_sums, added, at)

    def _write_zero_states(self, e: Emitter, fields: Fields, rows: Value) -> None:
        with e.loop(I64(0), fields["blocks"]) as block:
            for row in range(self.rows):
                state = e.at(e.line(rows, block), e.b.mul(fields["row"], I64(row)))
                e.write(e.splat(0.0), state)
                e.write(e.splat(0.0), e.at(state, fields["cell"]))

    def _gate(self, e: Emitter, fields: Fields, x: Value, row: int, gate: int) -> Value:
        """What the input contributes to a gate of a block: unaligned, as are its neighbors."""
        units = e.b.mul(fields["units"], I64(4 * gate))
        offset = e.b.add(e.b.mul(fields["gate_row"], I64(row)), units)
        return e.b.load(e.at(x, offset), typ=e.vector, align=4)

    def _sums(
        self, e: Emitter, fields: Fields, addresses: tuple[Value, Value], first: Value, weights: Variable
    ) -> list[list[Value]]:
        """The sums of a block, [rows][gates]. addresses: gates and states of the first row; first:
        bytes before the block; weights: the address of its weights, then of the next ones."""
        x, before = e.at(addresses[0], first), addresses[1]
        states = [e.at(before, e.b.mul(fields["row"], I64(row))) for row in range(self.rows)]
        starts = [[self._gate(e, fields, x, row, gate) for gate in range(self.gates)] for row in range(self.rows)]
        if self.name == "gru":  # r scales the product and its bias, but not what x contributes
            for row in starts:
                row[2] = e.read(e.at(fields.pointer("biases"), first))
        sums = [[e.variable(e.vector, start) for start in row] for row in starts]
        with e.loop(I64(0), fields["units"]) as k:
            own_weights = e.pointer(weights.get())
            factors = [e.splat(e.load(FLOAT, state, k)) for state in states]
            for gate in range(self.gates):
                weight = e.read(own_weights, gate)
                for row, factor in zip(sums, factors, strict=True):
                    row[gate].set(e.fma(weight, factor, row[gate].get()))
            weights.set(e.b.add(weights.get(), I64(self.gates * e.isa.line)))
        return [[total.get() for total in row] for row in sums]
