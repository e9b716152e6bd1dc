"""Functions in LLVM IR, written from Python: loops, vectors, activations.

State of loops lies in `Variable`s, which LLVM turns into registers. A kernel is a frozen value with
a method `emit`: equal kernels are compiled once (`kernels.jit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from demask.kernels.act import Act
from demask.kernels.isa import Isa

BYTE, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
BIT, FLOAT, POINTER, VOID = ir.IntType(1), ir.FloatType(), ir.PointerType(), ir.VoidType()
Value = Any  # an ir.Value; llvmlite has no types


class Kernel(Protocol):
    """A function to compile; a frozen dataclass, so that equal ones are one."""

    def emit(self, e: Emitter) -> None:
        """Write the body."""
        ...

    @property
    def arguments(self) -> int:
        """How many arguments it takes: pointers or 64-bit numbers; it returns nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Variable:
    """A place for a value that loops change."""

    e: Emitter
    place: Value
    type: Any

    def get(self) -> Value:
        return self.e.b.load(self.place, typ=self.type)

    def set(self, value: Value) -> None:
        self.e.b.store(value, self.place)


class Emitter:
    """Writes one function into an LLVM module. `b` is llvmlite's builder."""

    def __init__(self, module: ir.Module, name: str, arguments: int, isa: Isa):
        self.isa, self.lanes, self.module = isa, isa.lanes, module
        self.vector = ir.VectorType(FLOAT, isa.lanes)
        self.ints = ir.VectorType(I32, isa.lanes)
        self.function = ir.Function(module, ir.FunctionType(VOID, [I64] * arguments), name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        self.args = self.function.args

    def done(self) -> None:
        """End the function."""
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(self.function.basic_blocks[1])

    # -- numbers and memory

    def pointer(self, address: Value) -> Value:
        return self.b.inttoptr(address, POINTER)

    def at(self, pointer: Value, index: Value | int, kind: Any = BYTE) -> Value:
        """The address of element `index`."""
        place = I64(index) if isinstance(index, int) else index
        return self.b.gep(pointer, [place], source_etype=kind)

    def load(self, kind: Any, pointer: Value, index: Value | int = 0) -> Value:
        return self.b.load(self.at(pointer, index, kind), typ=kind)

    def load_long(self, kind: Any, pointer: Value, index: Value | int = 0) -> Value:
        """An unsigned number as one of 64 bits."""
        return self.b.zext(self.load(kind, pointer, index), I64)

    def opaque(self, pointer: Value) -> Value:
        """The same address, computed once: LLVM would add its terms in each instruction that reads
        there, and Intel's processors split such instructions in two."""
        kind = ir.FunctionType(POINTER, [POINTER])
        return self.b.asm(kind, "", "=r,0", [pointer], side_effect=False)

    def line(self, pointer: Value, index: Value | int = 0) -> Value:
        """The address of vector `index`."""
        if isinstance(index, int):
            return self.at(pointer, index * self.isa.line)
        return self.at(pointer, self.b.mul(index, I64(self.isa.line)))

    def prefetch(self, pointer: Value) -> None:
        """Ask for a line that will be written to."""
        ask = self.intrinsic("llvm.prefetch.p0", VOID, POINTER, I32, I32, I32)
        self.b.call(ask, [pointer, I32(1), I32(3), I32(1)])

    def read(self, pointer: Value, lines: int = 0) -> Value:
        """An aligned vector."""
        place = self.line(pointer, lines) if lines else pointer
        return self.b.load(place, typ=self.vector, align=self.isa.line)

    def write(self, value: Value, pointer: Value, lines: int = 0) -> None:
        place = self.line(pointer, lines) if lines else pointer
        self.b.store(value, place, align=self.isa.line)

    def variable(self, kind: Any, value: Value | None = None) -> Variable:
        found = Variable(self, ir.IRBuilder(self.entry).alloca(kind), kind)
        if value is not None:
            found.set(value)
        return found

    # -- control

    @contextmanager
    def loop(self, begin: Value, end: Value, step: Value | int = 1) -> Iterator[Value]:
        """Runs its body for begin <= i < end."""
        step = I64(step) if isinstance(step, int) else step
        index = self.variable(I64, begin)
        head, body, behind = (self.function.append_basic_block(n) for n in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = index.get()
        self.b.cbranch(self.b.icmp_signed("<", i, end), body, behind)
        self.b.position_at_end(body)
        yield i
        index.set(self.b.add(i, step))
        self.b.branch(head)
        self.b.position_at_end(behind)

    # -- vectors

    def splat(self, value: Value) -> Value:
        """A number (or a Python float) in every lane."""
        if isinstance(value, (int, float)):
            return ir.Constant(self.vector, [float(value)] * self.lanes)
        kind = ir.VectorType(value.type, self.lanes)
        hole = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(hole, value, I32(0))
        return self.b.shuffle_vector(first, hole, ir.Constant(self.ints, [0] * self.lanes))

    def intrinsic(self, name: str, result: Any, *kinds: Any) -> ir.Function:
        """LLVM's function of this name, declared."""
        if name not in self.module.globals:
            ir.Function(self.module, ir.FunctionType(result, kinds), name)
        return self.module.globals[name]

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        name = f"llvm.fma.v{self.lanes}f32"
        return self.b.call(self.intrinsic(name, self.vector, *[self.vector] * 3), [a, b, c])

    def larger(self, a: Value, b: Value) -> Value:
        """The larger; NaN where `a` is NaN, as in torch. One instruction, where llvm.maxnum takes
        three for its own rule."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), b, a)

    def smaller(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), b, a)

    def permuted(self, x: Value, lanes: Sequence[int], fill: float = 0.0) -> Value:
        """Lane k is lane lanes[k] of x, or the fill where that is negative."""
        picks = [self.lanes if lane < 0 else lane for lane in lanes]
        return self.b.shuffle_vector(x, self.splat(fill), ir.Constant(self.ints, picks))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """As many vectors as they have lanes: lane k of row r becomes lane r of row k. In each of
        log2(lanes) rounds, rows and lanes that differ in one bit change places."""
        found, distance = list(rows), 1
        while distance < self.lanes:
            low = [k if not k & distance else self.lanes + k - distance for k in range(self.lanes)]
            high = [k + distance if not k & distance else self.lanes + k for k in range(self.lanes)]
            for k in range(self.lanes):
                if not k & distance:
                    a, b = found[k], found[k + distance]
                    found[k] = self.b.shuffle_vector(a, b, ir.Constant(self.ints, low))
                    found[k + distance] = self.b.shuffle_vector(a, b, ir.Constant(self.ints, high))
            distance *= 2
        return found

    def places(self, pointer: Value, index: Value) -> Value:
        """Addresses of the float32 elements that a vector of int32 counts."""
        found = self.b.gep(pointer, [index], source_etype=FLOAT)
        found.type = ir.VectorType(POINTER, self.lanes)
        return found

    def gather(self, pointer: Value, index: Value, mask: Value, other: Value) -> Value:
        """The float32 elements that a vector of int32 counts; `other` where the mask is not set."""
        n, places = self.lanes, self.places(pointer, index)
        name = f"llvm.masked.gather.v{n}f32.v{n}p0"
        kinds = (places.type, I32, ir.VectorType(BIT, n), self.vector)
        return self.b.call(self.intrinsic(name, self.vector, *kinds), [places, I32(4), mask, other])

    def scatter(self, value: Value, pointer: Value, index: Value, mask: Value) -> None:
        """Write the lanes of which the mask is set to elements counted by a vector of int32."""
        n, places = self.lanes, self.places(pointer, index)
        name = f"llvm.masked.scatter.v{n}f32.v{n}p0"
        kinds = (self.vector, places.type, I32, ir.VectorType(BIT, n))
        self.b.call(self.intrinsic(name, VOID, *kinds), [value, places, I32(4), mask])

    def every(self) -> Value:
        """A mask with every lane set."""
        return ir.Constant(ir.VectorType(BIT, self.lanes), [1] * self.lanes)

    def total(self, x: Value) -> Value:
        """The sum of the lanes."""
        add = self.intrinsic(f"llvm.vector.reduce.fadd.v{self.lanes}f32", FLOAT, FLOAT, self.vector)
        return self.b.call(add, [FLOAT(0.0), x], fastmath=("reassoc",))

    # -- activations

    def activated(self, x: Value, act: Act | None) -> Value:
        """act(x), by the method of its name."""
        if act is None:
            return x
        name, numbers = act
        return getattr(self, f"_{name}")(x, *numbers)

    def _relu(self, x: Value) -> Value:
        return self.larger(x, self.splat(0.0))

    def _clamp(self, x: Value, least: float, largest: float) -> Value:
        return self.smaller(self.larger(x, self.splat(least)), self.splat(largest))

    def _leaky_relu(self, x: Value, slope: float) -> Value:
        low = self.b.fmul(x, self.splat(slope))
        return self.b.select(self.b.fcmp_ordered("<", x, self.splat(0.0)), low, x)

    def _hardsigmoid(self, x: Value) -> Value:
        sixth = self.b.fmul(self.b.fadd(x, self.splat(3.0)), self.splat(1 / 6))
        return self._clamp(sixth, 0.0, 1.0)

    def _hardswish(self, x: Value) -> Value:
        return self.b.fmul(x, self._hardsigmoid(x))

    def _sigmoid(self, x: Value) -> Value:
        one = self.splat(1.0)
        return self.b.fdiv(one, self.b.fadd(one, self.exp(self.b.fneg(x))))

    def _silu(self, x: Value) -> Value:
        return self.b.fdiv(x, self.b.fadd(self.splat(1.0), self.exp(self.b.fneg(x))))

    def _tanh(self, x: Value) -> Value:
        """1 - 2 / (exp(2x) + 1)."""
        more = self.b.fadd(self.exp(self.b.fadd(x, x)), self.splat(1.0))
        return self.b.fsub(self.splat(1.0), self.b.fdiv(self.splat(2.0), more))

    def _gelu(self, x: Value) -> Value:
        half = self.b.fmul(x, self.splat(0.5))
        return self.fma(half, self.erf(self.b.fmul(x, self.splat(math.sqrt(0.5)))), half)

    def _gelu_tanh(self, x: Value) -> Value:
        cubic = self.fma(self.b.fmul(x, x), self.splat(0.044715), self.splat(1.0))
        inner = self.b.fmul(self.b.fmul(x, self.splat(math.sqrt(2 / math.pi))), cubic)
        half = self.b.fmul(x, self.splat(0.5))
        return self.fma(half, self._tanh(inner), half)

    def exp(self, x: Value) -> Value:
        """e**x within 2 units in the last place; x is clamped to [-87, 88], so it is finite.

        x = n ln 2 + r with |r| <= ln 2 / 2; e**r by its Taylor series of degree 7; 2**n by its
        bits. n is rounded by adding 1.5 * 2**23, which leaves it in the lowest bits of the sum.
        """
        b, clamped = self.b, self._clamp(x, -87.0, 88.0)
        magic = self.splat(12582912.0)
        shifted = self.fma(clamped, self.splat(1 / math.log(2)), magic)
        n = b.fsub(shifted, magic)
        high = 0.693145751953125  # ln 2 in 17 bits, and the rest: n * high is exact
        r = self.fma(n, self.splat(-high), clamped)
        r = self.fma(n, self.splat(high - math.log(2)), r)
        y = self.splat(1 / math.factorial(7))
        for k in range(6, -1, -1):
            y = self.fma(y, r, self.splat(1 / math.factorial(k)))
        bits = b.shl(b.bitcast(shifted, self.ints), ir.Constant(self.ints, [23] * self.lanes))
        return b.bitcast(b.add(b.bitcast(y, self.ints), bits), self.vector)

    def erf(self, x: Value) -> Value:
        """The error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
        b, one = self.b, self.splat(1.0)
        size = self.b.select(b.fcmp_ordered("<", x, self.splat(0.0)), b.fneg(x), x)
        t = b.fdiv(one, self.fma(size, self.splat(0.3275911), one))
        y = self.splat(1.061405429)
        for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            y = self.fma(y, t, self.splat(factor))
        found = b.fsub(one, b.fmul(b.fmul(y, t), self.exp(b.fneg(b.fmul(size, size)))))
        return b.select(b.fcmp_ordered("<", x, self.splat(0.0)), b.fneg(found), found)
