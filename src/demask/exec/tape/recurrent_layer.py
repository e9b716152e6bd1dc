"""Recurrent layers on a tape.

    gates = W_ih x + b_ih + b_hh     a dense layer, for all time steps at once
    rows  = recurrence(gates)        one thread per few rows of the batch (`kernels.cpu.recurrent`)

Lanes of values are positions, those of the recurrence are hidden units: gates are transposed before
it, and rows after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demask.exec.steps.called_op import RECURRENT
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_rows import lowering_of
from demask.exec.steps.segment_steps import Numbers, SparseWeight, Step, as_conv, linear_step
from demask.exec.steps.segment_weights import part
from demask.exec.tape.layers.layer_plan import emit_alone
from demask.exec.tape.layers.window_piece import pieces, read_weight
from demask.exec.tape.moved_values import MovedValues
from demask.exec.tape.tape import Buffer, KernelCall, NoPlan, aligned, by_thread
from demask.exec.tape.tile_layout import NO_BORDER, GridLayout, TileGrid, at_array
from demask.exec.tape.value_moves import Moves, rows_of
from demask.kernels.cpu import recurrent
from demask.kernels.cpu.recurrent import RecurrentKernel, most_rows
from demask.kernels.cpu.tiles.relayout import Gather, Scatter

ONE_TILE = TileGrid(1, 1, 1, 1, 1)
# Cycles of a vector of eight weights: to load it from the second level of the cache, to multiply
# it by the state of one row. Measured with 128 units.
LOAD, PRODUCT, LANES = 0.6, 0.6, 8


def recurrent_cycles(moved: MovedValues) -> float:
    """Estimated cycles of the recurrences of a program."""
    cycles, first = 0.0, len(moved.program.inputs)
    for value, step in enumerate(moved.program.steps, first):
        if lowering_of(step) == RECURRENT:
            hidden, _, batch_first, _ = step.fields.numbers
            batch, steps = moved.shapes[value][:2] if batch_first else moved.shapes[value][1::-1]
            gates = recurrent.CELLS[step.op][0]
            cycles += steps * gates * hidden**2 / LANES * (LOAD + PRODUCT * batch)
    return cycles


def write_recurrent(value: int, moves: Moves, moved: MovedValues, sources: Sequence[Buffer], out: Buffer) -> None:
    """Write a recurrent layer. sources: its input, and initial states if there are any."""
    step = moved.step(value)
    assert step is not None
    _RecurrentLayer(step, moves, moved, sources, out).write()


@dataclass(frozen=True, slots=True)
class _RecurrentLayer:
    """Writes one recurrent layer.

    The memory of the recurrence: for each row of the batch one line of hidden units per state,
    [batch, 2 + steps, line]: the state before the first step, those of all steps, and the cell
    state. Backwards, those of all steps come before the state that they begin with.
    """

    step: Step[Numbers]
    moves: Moves
    moved: MovedValues
    sources: Sequence[Buffer]
    out: Buffer

    @property
    def hidden(self) -> int:
        return self.step.fields.numbers[0]

    @property
    def batch_first(self) -> bool:
        return bool(self.step.fields.numbers[2])

    @property
    def backwards(self) -> bool:
        return bool(self.step.fields.numbers[3])

    @property
    def sizes(self) -> tuple[int, int]:
        first, second, _ = self.moved.shapes[self.step.x]
        return (second, first) if self.batch_first else (first, second)

    @property
    def line(self) -> int:
        lanes = self.moves.isa.lanes
        return -(-self.hidden // lanes) * lanes

    @property
    def gate_count(self) -> int:
        return recurrent.CELLS[self.step.op][0] * self.hidden

    def write(self) -> None:
        tape, (steps, batch) = self.moves.tape, self.sizes
        parameters = self._parameters()
        gates = self._write_gates(parameters)
        tape.phase()
        flat_gates = self._new_memory(steps * batch * self.gate_count)
        states = self._new_memory(batch * (2 + steps) * self.line)
        self._to_rows(gates, flat_gates, self.gate_count * np.arange(steps * batch))
        elements = [self._state_row(0), self._state_row(steps + 1)]
        if self.backwards:
            elements[0] = self._state_row(steps)
        for source, row in zip(self.sources[1:], elements, strict=False):
            self._to_rows(source, states, row)
        tape.phase()
        self._write_recurrence(parameters, flat_gates, states)
        tape.phase()
        self._from_rows(states)

    def _parameters(self) -> list[Tensor]:
        """W_ih, W_hh and the biases of input and state, float32."""
        assert self.step.index is not None
        channels = self.moved.shapes[self.step.x][-1]
        stored = part(self.step.index, self.moved.weights).detach().float()
        parts = CALLED[self.step.op].split(stored, channels, self.step.fields.numbers)
        return parts if len(parts) > 2 else [*parts, *[torch.zeros(self.gate_count)] * 2]

    def _write_gates(self, parameters: Sequence[Tensor]) -> Buffer:
        """Write what the input contributes to the gates, as a dense layer."""
        weight, _, bias, state_bias = parameters
        bias = bias + state_bias
        if self.step.op == "gru":  # that of gate n is scaled with the product of the state
            bias[2 * self.hidden :] = parameters[2][2 * self.hidden :]
        x, tape, isa = self.sources[0], self.moves.tape, self.moves.isa
        grid = x.layout.grid
        pitch = tape.thread_bytes // isa.line if grid.parts > 1 else 0
        size = (1, self.gate_count, *x.layout.size[2:])
        gates = Buffer(GridLayout(size, grid, NO_BORDER, isa.lanes, pitch))
        spans = (0, 0, weight.numel()), (1, 0, bias.numel())
        conv = as_conv(linear_step(0, SparseWeight(spans[0]), spans[1], self.gate_count))
        layer = read_weight(conv, [weight.flatten(), bias], weight.shape[1])
        emit_alone(tape, isa, pieces(conv, layer, x, None, gates))
        return gates

    def _new_memory(self, elements: int) -> Buffer:
        """Memory for so many elements, and a vector after them: the last one may reach into it."""
        lanes = self.moves.isa.lanes
        if elements >= 2**29:
            raise NoPlan(f"a recurrent layer has {elements} elements")
        return Buffer(GridLayout((1, -(-elements // lanes) + 1, 1, 1), ONE_TILE, NO_BORDER, lanes))

    def _state_row(self, number: int) -> np.ndarray:
        """The element of the state with a number of each row of the batch."""
        steps, batch = self.sizes
        return (np.arange(batch) * (2 + steps) + number) * self.line

    def _to_rows(self, source: Buffer, to: Buffer, elements: np.ndarray) -> None:
        """Write the channels of each position of a value one after another. elements: those of
        the first channel of each."""
        rows = self._line_table(source.layout, elements)
        pitches = self.moves.pitch(source), 4
        self.moves.moved(Scatter(), (source, 0), (to, 0), source.layout, pitches, rows)

    def _from_rows(self, states: Buffer) -> None:
        """Write the result: the states of all steps, then the last state."""
        steps, _ = self.sizes
        first = 0 if self.backwards else 1
        last = steps + 1
        if self.step.op == "gru":
            last = 0 if self.backwards else steps
        numbers = [*range(first, first + steps), last]
        elements = np.stack([self._state_row(number) for number in numbers])  # [1 + steps, batch]
        elements = elements.T if self.batch_first else elements
        rows = self._line_table(self.out.layout, elements.reshape(-1))
        pitches = 4, self.moves.pitch(self.out)
        self.moves.moved(Gather(), (states, 0), (self.out, 0), self.out.layout, pitches, rows)

    def _line_table(self, layout: GridLayout, elements: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
        """Positions of a value with the elements of their lanes."""
        at = at_array(layout.inside())
        _, _, x, is_inside = layout.pixels(at)
        return rows_of(layout, at, np.where(is_inside, elements[np.where(is_inside, x, 0)], -1))

    def _write_recurrence(self, parameters: Sequence[Tensor], gates: Buffer, states: Buffer) -> None:
        """Write the recurrence: tiles of rows of the batch, shared by the threads."""
        tape, isa, (steps, batch) = self.moves.tape, self.moves.isa, self.sizes
        most = most_rows(self.step.op, isa.registers)
        tiles = by_thread(batch, -(-batch // most))
        step, gate_line = 4 * self.line, 4 * self.gate_count
        gate_step, gate_row = gate_line * batch, gate_line
        if self.batch_first:
            gate_step, gate_row = gate_line, gate_line * steps
        row = step * (2 + steps)
        begin, gate_begin, cell = 0, 0, step * (1 + steps)
        if self.backwards:
            begin, gate_begin, cell = step * steps, gate_step * (steps - 1), step
            step, gate_step = -step, -gate_step
        weights, biases = self._pack_recurrent(parameters)
        fields = {
            "gate_step": gate_step,
            "gate_row": gate_row,
            "step": step,
            "row": row,
            "cell": cell,
            "units": self.hidden,
            "blocks": self.line // isa.lanes,
            "steps": steps,
            "weights": weights,
            "biases": biases,
        }
        for thread, (first, end) in enumerate(by_thread(len(tiles), tape.threads)):
            for low, high in tiles[first:end]:
                kernel = RecurrentKernel(self.step.op, high - low, len(self.sources) == 1)
                locations = {"gates": (gates, gate_begin + low * gate_row), "rows": (states, begin + low * row)}
                tape.add(thread, KernelCall(kernel, recurrent.CALL, locations, fields))

    def _pack_recurrent(self, parameters: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """W_hh as the kernel reads it, [blocks, units, gates, lanes], and the biases that it adds,
        [blocks, lanes]."""
        hidden, lanes, line = self.hidden, self.moves.isa.lanes, self.line
        gates = self.gate_count // hidden
        padded = np.zeros((gates, line, hidden), np.float32)
        padded[:, :hidden] = parameters[1].reshape(gates, hidden, hidden).numpy()
        blocks = padded.reshape(gates, line // lanes, lanes, hidden).transpose(1, 3, 0, 2)
        biases = np.zeros(line, np.float32)
        biases[:hidden] = parameters[3].numpy()[2 * hidden : 3 * hidden]
        return aligned(np.ascontiguousarray(blocks)), aligned(biases)
