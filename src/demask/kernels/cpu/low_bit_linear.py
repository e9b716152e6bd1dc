"""Estimates of a linear layer computed from low-bit weights; no row of float32 weights is read.

The weights of a row are s_g q_j, with integer q_j and a scale s_g for each group g of columns (or
one for all); the input is x_j = lo + t u_j + e_j as in `zero_proof`. For each row the estimate is

    lo Σ_g s_g Σ q_j + t Σ_g s_g P_g + bias,        P_g = Σ q_j u_j over the columns of the group

P_g is exact. The weights are those of `pilot.simplifiers.rounding`, so the error against their
product with x in exact arithmetic is that of the input, |e| <= (0.5 + 0.03) t where t is a 65535th
of its range (0 included), and that of float32 in as many sums as there are groups:

    |error| <= Σ|s q| * range * (2^-17 * 1.06 + (groups + 8) 2^-23) + 2^-24 |bias|

4-bit weights are stored in the upper halves of bytes, as 16 q, with scales divided by 16. Layouts
are those of `zero_proof`; scales: [tile][group][rows of the tile].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from demask.kernels.cpu.gemv import AHEAD
from demask.kernels.cpu.int_dot import Listed, joined, whole
from demask.kernels.cpu.zero_proof import numbers_of
from demask.kernels.llvm.emitter import I32, I64, Emitter, Fields, Value, Variable

#: constants of a row, in this order: one vector each per vector of rows
ROW = ("total", "bias")
#: weights, scales, constants: addresses; begin, end, step: tiles of `pitch` bytes, with scales
#: of `scale_pitch` bytes; parts: groups with a scale, each of `each` groups of columns; u0 to
#: numbers: slots of the input as written by `zero_proof.Quantise`; out: slot
ESTIMATE = np.dtype([(key, "<i8") for key in (
    "weights", "scales", "constants", "begin", "end", "step", "pitch", "scale_pitch", "parts",
    "each", "u0", "u1", "groups", "count", "numbers", "out")])  # fmt: skip


@contextmanager
def _while_below(e: Emitter, numbers: Value, k: Variable, ends: tuple[Value, Value]) -> Iterator[None]:
    """Runs its body while number k of a list is below ends[0] and k is below ends[1], the length of
    the list; k is incremented after each run.
    """
    b = e.b
    head, body, after = (e.function.append_basic_block(n) for n in ("head", "body", "end"))
    b.branch(head)
    b.position_at_end(head)
    number = e.load_long(I32, numbers, k.get())
    is_below = b.icmp_signed("<", number, ends[0])
    b.cbranch(b.and_(is_below, b.icmp_signed("<", k.get(), ends[1])), body, after)
    b.position_at_end(body)
    yield
    k.set(b.add(k.get(), I64(1)))
    b.branch(head)
    b.position_at_end(after)


@dataclass(frozen=True, slots=True)
class EstimateKernel:
    """The estimates for every `step`-th tile of `vectors` vectors. bits: 8 or 4."""

    bits: int
    vectors: int
    instruction: str
    ahead: int = AHEAD

    arguments = 2

    def emit(self, e: Emitter) -> None:
        """Write k(call, arena)."""
        f, b = Fields(e, ESTIMATE.names), e.b
        listed = Listed(e, f, self.instruction, self.bits, self.ahead, signed=True)
        x, count, line = numbers_of(e, f), f.count("count"), self.vectors * e.isa.line
        with e.loop(f["begin"], f["end"], f["step"]) as tile:
            base = e.at(f.pointer("weights"), b.mul(tile, f["pitch"]))
            scales = e.at(f.pointer("scales"), b.mul(tile, f["scale_pitch"]))
            estimates = [e.variable(e.vector, e.splat(0.0)) for _ in range(self.vectors)]
            k = e.variable(I64, I64(0))
            with e.loop(I64(0), f["parts"]) as part:
                sums = [[e.variable(e.ints, whole(e, 0)) for _ in range(2)] for _ in estimates]
                limit = b.mul(b.add(part, I64(1)), f["each"])
                with _while_below(e, listed.groups, k, (limit, count)):
                    listed.add(base, k.get(), sums)
                part_scales = e.at(scales, b.mul(part, I64(line)))
                for v, (low, high) in enumerate(sums):
                    product = joined(e, low.get(), high.get())
                    estimates[v].set(e.fma(e.read(part_scales, v), product, estimates[v].get()))
            for v, sum_ in enumerate(estimates):
                vector = b.add(b.mul(tile, I64(self.vectors)), I64(v))
                row_constants = e.at(f.pointer("constants"), b.mul(vector, I64(len(ROW) * e.isa.line)))
                total, bias = (e.read(row_constants, k) for k in range(len(ROW)))
                y = e.fma(sum_.get(), x["step"], e.fma(total, x["lo"], bias))
                b.store(y, e.line(e.at(f.slot("out"), b.mul(tile, I64(line))), v), align=4)
