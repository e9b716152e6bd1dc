"""The sparse kernel for one position: lanes are rows of the weight.

    for group of rows:  acc[r] = bias[r] + add[r]
        for k:  acc[r] += value[k][r] * x[column[k][r]]
        out[r] = act(acc[r])

The order of sums is that of `sparse_tile`, which computes the same layers in other plans.

Rows of similar length are grouped, so that little padding is needed (sliced ELLPACK: Monakov,
Lokhmotov and Avetisyan 2010). Gathering a vector of inputs costs about as much as single loads;
with lanes as positions, only one of sixteen would be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from demask.kernels.llvm.activations import activated
from demask.kernels.llvm.emitter import BYTE, I16, I32, I64, Emitter, Fields, Value
from demask.ops.activations import Act

#: call of the kernel. ends: per group; columns, values: a vector per k; outs, adds, biases, scales:
#: a vector per group: elements of out (-1: no row) and of the added tensor, bias and scale of rows
CALL = np.dtype([(key, "<i8") for key in (
    "x_slot", "x", "out_slot", "out", "add_slot", "add", "begin", "end", "ends", "columns",
    "values", "outs", "adds", "biases", "scales")])  # fmt: skip


@dataclass(frozen=True, slots=True)
class SparseVectorKernel:
    """The kernel for groups of as many rows as there are lanes. values: dtype of the weights."""

    add: bool
    act: Act | None
    values: str = "float32"

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        field = Fields(e, CALL.names)
        buffers = [field.buffer(key) for key in ("x", "out", "add")]
        ends = field.pointer("ends")
        with e.loop(field["begin"], field["end"]) as group:
            first = e.load_long(I32, ends, group)
            last = e.load_long(I32, ends, e.b.add(group, I64(1)))
            self._compute_group(e, field, group, (first, last), buffers)

    def _compute_group(
        self, e: Emitter, field: Fields, group: Value, span: tuple[Value, Value], bases: list[Value]
    ) -> None:
        x, out, add = bases

        def vector(key: str, kind: Value, row: Value) -> Value:
            address = e.at(e.pointer(field[key]), e.b.mul(row, I64(e.lanes)), kind.element)
            return e.b.load(address, typ=kind, align=1)

        outs = vector("outs", e.ints, group)
        is_row = e.b.icmp_signed(">=", outs, ir.Constant(e.ints, [0] * e.lanes))
        scale = vector("scales", e.vector, group) if self.values == "int8" else None
        added = None
        if self.add:
            added = e.gather(add, vector("adds", e.ints, group), is_row, e.splat(0.0))
        sums = e.variable(e.vector, _initial_sums(e, vector("biases", e.vector, group), added, scale))
        with e.loop(*span) as k:
            inputs = e.gather(x, vector("columns", e.ints, k), e.every(), e.splat(0.0))
            sums.set(e.fma(self._values(e, vector, k), inputs, sums.get()))
        value = sums.get() if scale is None else e.b.fmul(sums.get(), scale)
        e.scatter(activated(e, value, self.act), out, outs, is_row)

    def _values(self, e: Emitter, vector: Value, k: Value) -> Value:
        if self.values == "float32":
            return vector("values", e.vector, k)
        kind = ir.VectorType(I16 if self.values == "bfloat16" else BYTE, e.lanes)
        stored = vector("values", kind, k)
        if self.values == "int8":
            return e.b.sitofp(stored, e.vector)
        half = ir.Constant(e.ints, [16] * e.lanes)
        return e.b.bitcast(e.b.shl(e.b.zext(stored, e.ints), half), e.vector)


def _initial_sums(e: Emitter, bias: Value, added: Value | None, scale: Value | None) -> Value:
    """The initial sums: divided by the scale by which sums are multiplied at the end."""
    if scale is None:
        return bias if added is None else e.b.fadd(added, bias)
    inverse = e.b.fdiv(e.splat(1.0), scale)
    value = e.b.fmul(bias, inverse)
    return value if added is None else e.fma(added, inverse, value)
