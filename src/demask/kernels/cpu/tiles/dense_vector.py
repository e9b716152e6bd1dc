"""The dense kernel for one position: lanes are rows of the weight.

    for block of U vectors of rows:  acc[u] = bias + add[rows]
        for k:  acc[u] += x[k] * weight[k][u]
        out[rows] = act(acc)

The order of sums is that of `dense_tile`, which computes the same layers in other plans.
Weights are packed in the order of use, [block][k][u][lane]: one sequential stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import FLOAT, I64, Emitter, Fields, Value
from demask.ops.activations import Act

#: call of the kernel; x: contiguous inputs; count: of inputs; begin, end: blocks. outs, adds,
#: biases: per row, the element of out (-1: no row) and of the added tensor, and the bias
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "begin", "end", "count", "weights",
    "outs", "adds", "biases")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenseVectorKernel:
    """The kernel for blocks of `vectors` times as many rows as there are lanes."""

    vectors: int
    add: bool
    act: Act | None

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        fields = Fields(e, CALL.names)
        x, out, add = (fields.buffer(key) for key in ("x", "out", "add"))
        rows = self.vectors * e.lanes
        with e.loop(fields["begin"], fields["end"]) as block:
            first = e.b.mul(block, I64(rows))
            biases = self._vectors(e, fields.pointer("biases"), first, e.vector)
            outs = self._vectors(e, fields.pointer("outs"), first, e.ints)
            adds = self._vectors(e, fields.pointer("adds"), first, e.ints)
            are_rows = [e.b.icmp_signed(">=", o, ir.Constant(e.ints, [0] * e.lanes)) for o in outs]
            sums = [e.variable(e.vector, bias) for bias in biases]
            for sum_, places, mask in zip(sums, adds if self.add else (), are_rows, strict=False):
                sum_.set(e.b.fadd(e.gather(add, places, mask, e.splat(0.0)), sum_.get()))
            begin = e.b.mul(first, fields["count"])
            weights = e.at(fields.pointer("weights"), begin, FLOAT)
            with e.loop(I64(0), fields["count"]) as k:
                value = e.splat(e.load(FLOAT, x, k))
                row = self._vectors(e, weights, e.b.mul(k, I64(rows)), e.vector)
                for sum_, weight in zip(sums, row, strict=True):
                    sum_.set(e.fma(value, weight, sum_.get()))
            for sum_, places, mask in zip(sums, outs, are_rows, strict=True):
                e.scatter(activated(e, sum_.get(), self.act), out, places, mask)

    def _vectors(self, e: Emitter, table: Value, first: Value, kind: ir.Type) -> list[Value]:
        """The vectors of a block in a table, from an element on."""
        elements = [e.at(table, e.b.add(first, I64(u * e.lanes)), FLOAT)
                    for u in range(self.vectors)]  # fmt: skip
        return [e.b.load(address, typ=kind, align=4) for address in elements]
