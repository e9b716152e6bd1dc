"""Products of two sparse matrices as a dense one, and their gradients.

    sum over t, i, o of x[t, i] * w[i, o] * y[t, o]

is linear in each of x, w and y. Each kernel computes the factor of one of them: that of y is the product
x @ w, the others are its gradients. x and w are in CSR, y is dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.csr import narrowed
from demask.kernels.cpu.number_types import type_of_sums
from demask.kernels.llvm.emitter import I32, I64, WORDS, Emitter, Value

#: Call of a kernel. crow, col, values: of x; w_crow, w_col, w_values: of w; indices are int32 and in range.
#: y, pitch: the dense matrix, and bytes from row to row. begin, end: rows of x.
CALL = np.dtype([(key, "<i8") for key in (
    "crow", "col", "values", "w_crow", "w_col", "w_values", "y", "pitch", "begin", "end")])  # fmt: skip
OPERANDS = ("values", "w_values", "y")
TOGETHER = 4  # products in one iteration


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Adds the factor of one of `OPERANDS` to it. numbers: "f32" or "f64", of all of them."""

    of: str
    numbers: str = "f32"

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        e = narrowed(e, e.lanes, type_of_sums(self.numbers))
        b, number, call = e.b, e.number, e.pointer(e.args[0])
        field = {key: e.load(I64, call, k) for k, key in enumerate(CALL.names or ())}
        at = {key: e.pointer(address) for key, address in field.items()}
        fma = e.intrinsic(f"llvm.fma.{WORDS[number]}", number, number, number, number)

        def row_of(starts: str, row: Value) -> tuple[Value, Value]:
            return e.load_long(I32, at[starts], row), e.load_long(I32, at[starts], b.add(row, I64(1)))

        def add_product(position: Value, line: Value, value: Value) -> None:
            """Add to the target the product of the two others."""
            element = e.at(line, e.load_long(I32, at["w_col"], position), number)
            at_operand = {"values": value, "w_values": e.at(at["w_values"], position, number), "y": element}
            target = at_operand.pop(self.of)
            factors = [b.load(operand, typ=number) for operand in at_operand.values()]
            b.store(b.call(fma, [*factors, b.load(target, typ=number)]), target)

        with e.loop(field["begin"], field["end"]) as row:
            line = e.at(at["y"], b.mul(row, field["pitch"]))
            with e.loop(*row_of("crow", row)) as position:
                begin, end = row_of("w_crow", e.load_long(I32, at["col"], position))
                # in registers: the value, or several sums of it, so that none waits for the one before
                value = e.at(at["values"], position, number)
                zero, is_summed = number(0.0), self.of == "values"
                values = [e.variable(number, zero if is_summed else b.load(value, typ=number)) for _ in range(TOGETHER)]
                full = b.add(begin, b.and_(b.sub(end, begin), I64(-TOGETHER)))
                with e.loop(begin, full, TOGETHER) as first:
                    for k, copy in enumerate(values):
                        add_product(b.add(first, I64(k)), line, copy.address)
                with e.loop(full, end) as last:
                    add_product(last, line, values[0].address)
                if is_summed:
                    total = b.load(value, typ=number)
                    for sum_ in values:
                        total = b.fadd(total, sum_.get())
                    b.store(total, value)
