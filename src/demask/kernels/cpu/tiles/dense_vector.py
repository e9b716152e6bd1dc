"""The dense kernel for one position: lanes are rows of the weight.

    for block of U vectors of rows:  acc[u] = bias
        for k:  acc[u] += x[k] * weight[k][u]
        out[rows] = act(acc + add[rows])

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
            sums = [e.variable(e.vector, bias) for bias in biases]
            begin = e.b.mul(first, fields["count"])
            weights = e.at(fields.pointer("weights"), begin, FLOAT)
            with e.loop(I64(0), fields["count"]) as k:
                value = e.splat(e.load(FLOAT, x, k))
                row = self._vectors(e, weights, e.b.mul(k, I64(rows)), e.vector)
                for sum_, weight in zip(sums, row, strict=True):
                    sum_.set(e.fma(value, weight, sum_.get()))
            outs = self._vectors(e, fields.pointer("outs"), first, e.ints)
            adds = self._vectors(e, fields.pointer("adds"), first, e.ints)
            for sum_, place, other in zip(sums, outs, adds, strict=True):
                self._write(e, sum_.get(), (out, place), (add, other))

    def _vectors(self, e: Emitter, table: Value, first: Value, kind: ir.Type) -> list[Value]:
        """The vectors of a block in a table, from an element on."""
        elements = [e.at(table, e.b.add(first, I64(u * e.lanes)), FLOAT)
                    for u in range(self.vectors)]  # fmt: skip
        return [e.b.load(address, typ=kind, align=4) for address in elements]

    def _write(self, e: Emitter, value: Value, out: tuple[Value, Value],
               add: tuple[Value, Value]) -> None:  # fmt: skip
        """Write one vector of sums to its rows."""
        is_row = e.b.icmp_signed(">=", out[1], ir.Constant(e.ints, [0] * e.lanes))
        if self.add:
            value = e.b.fadd(value, e.gather(*add, is_row, e.splat(0.0)))
        e.scatter(activated(e, value, self.act), *out, is_row)
