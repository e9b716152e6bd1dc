"""Plans of one linear layer in an order: all rows from weights of few bits, or chosen rows in full.

`Estimated` is the pilot of 8 or 4 bits (`kernels.cpu.low_bit_linear`). `ChosenUnits` computes rows
of the weight in place (`gemv.RowKernel`), with the bits of the dense kernel of `chain_plan`.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from demask.kernels.cpu import gemv
from demask.kernels.cpu import zero_proof as certify
from demask.kernels.cpu.low_bit_linear import ESTIMATE, EstimateKernel
from demask.kernels.llvm.isa import Isa, host
from demask.pilot.chains import packing
from demask.pilot.chains.chain_plan import INPUT, OUTPUT, ChainPlanBuilder, Runs
from demask.pilot.simplifiers.rounding import Bits

WIDTHS = {8: 4, 4: 8}  # columns in a group of the list, by bits


def unfit(bits: Bits, columns: int) -> str:
    """Why no kernel reads such weights; "" where one does.

    >>> unfit(Bits(4, 64), 784), unfit(Bits(3), 784)
    ('', 'weights of 3 bits are stored unpacked: kernels read 8 or 4')
    """
    if bits.bits not in WIDTHS:
        return f"weights of {bits.bits} bits are stored unpacked: kernels read 8 or 4"
    width = WIDTHS[bits.bits]
    if bits.group is not None and bits.group < columns and bits.group % width:
        return (
            f"weights in groups of {bits.group} columns are stored unpacked: with "
            f"{bits.bits} bits, kernels read groups of a multiple of {width}"
        )
    if columns > certify.MOST_COLUMNS:
        return f"{columns} columns are stored unpacked: kernels sum {certify.MOST_COLUMNS} at most"
    return ""


@dataclass(frozen=True, slots=True)
class Packed:
    """A layer's weights of few bits, packed for one instruction set."""

    few: packing.Few
    bits: int
    each: int  # groups of the list that share a scale
    rows: int
    columns: int
    vectors: int
    largest: float
    isa: Isa


def packed(weight: Tensor, bias: Tensor | None, bits: Bits, isa: Isa | None = None) -> Packed:
    """The packed weights of a layer: weight float32 [rows, columns], bias [rows] or None, in bits
    that are not `unfit`."""
    isa, (rows, columns) = isa or host(), weight.shape
    vectors = gemv.vectors_of(rows, isa, certify.tile_vectors(isa))
    biases = None if bias is None else bias.numpy()
    few = packing.few(weight.numpy(), biases, bits.bits, bits.group, vectors, isa)
    group = columns if bits.group is None else min(bits.group, columns)
    largest = float(weight.abs().max())
    each = -(-group // WIDTHS[bits.bits])
    return Packed(few, bits.bits, each, rows, columns, vectors, largest, isa)


class Estimated(Runs):
    """plan(x float32 [n, columns], contiguous) -> float32 [n, rows]: the layer with weights of few
    bits and inputs as whole numbers of 16 bits. Its errors: see `kernels.cpu.low_bit_linear`."""

    def __init__(self, layer: Packed, threads: int):
        builder, width, few = ChainPlanBuilder(threads, layer.isa), WIDTHS[layer.bits], layer.few
        builder.tape.phase()
        tiles, parts, size = few.scales.shape
        kernel = EstimateKernel(layer.bits, layer.vectors, certify.dot_instruction(layer.isa))
        for t in range(threads):
            u0, u1, groups, listed, numbers, _ = builder.quantised(t, INPUT, layer.columns, width, layer.largest)
            builder.call(t, kernel, ESTIMATE, weights=builder.keep_alive(few.weights),
                         scales=builder.keep_alive(few.scales),
                         constants=builder.keep_alive(few.constants),
                         begin=t, end=tiles, step=threads, pitch=few.weights[0].nbytes,
                         scale_pitch=few.scales[0].nbytes, parts=parts, each=layer.each, u0=u0,
                         u1=u1, groups=groups, count=listed, numbers=numbers,
                         out=OUTPUT)  # fmt: skip
        super().__init__(builder)
        self.rows, self.width = layer.rows, tiles * size

    def __call__(self, x: Tensor) -> Tensor:
        out, memory = torch.empty((len(x), self.width)), self.take_memory()
        slots, address, out_address = memory.arena.slots, x.data_ptr(), out.data_ptr()
        for row in range(len(x)):
            slots[INPUT] = address + 4 * row * x.shape[1]
            slots[OUTPUT] = out_address + 4 * row * self.width
            memory.job.run(self.threads)
        self.return_memory(memory)
        return out if self.width == self.rows else out[:, : self.rows].contiguous()


class ChosenUnits(Runs):
    """plan(x float32 [n, columns], units int32, out float32 [n, rows]), all contiguous: writes the
    rows `units` (numbers below `rows`) of the layer into `out`, and nothing else.

    The weight [rows, columns] is read in place and must be contiguous.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, threads: int, isa: Isa | None = None):
        (rows, columns), builder = weight.shape, ChainPlanBuilder(threads, isa or host())
        builder.tape.arrays += [weight, bias]
        biases = packing.biases(None if bias is None else bias.numpy(), rows)
        slots = builder.slots
        self.units, self.count = slots.several(threads, 4 * (rows + gemv.SLACK)), slots.last + 1
        slots.several(threads, 8)
        builder.tape.phase()
        for t in range(threads):
            cols, values, listed = builder.listed(t, "columns", INPUT, columns)
            builder.call(
                t,
                gemv.RowKernel(relu=False),
                gemv.ROWS,
                lists=self.units,
                counts=self.count,
                threads=threads,
                thread=t,
                weights=weight.data_ptr(),
                bias=builder.keep_alive(biases),
                pitch=4 * columns,
                cols=cols,
                values=values,
                count=listed,
                out=OUTPUT,
            )
        super().__init__(builder)

    def __call__(self, x: Tensor, units: Tensor, out: Tensor) -> None:
        memory = self.take_memory()
        arena, offsets = memory.arena, self.slots.offsets
        # the first thread's list has all units, the others' are empty: threads share its entries
        ctypes.memmove(arena.address + offsets[self.units], units.data_ptr(), 4 * len(units))
        struct.pack_into("<q", arena.memory, offsets[self.count], len(units))
        for row in range(len(x)):
            arena.slots[INPUT] = x.data_ptr() + 4 * row * x.shape[1]
            arena.slots[OUTPUT] = out.data_ptr() + 4 * row * out.shape[1]
            memory.job.run(self.threads)
        self.return_memory(memory)
