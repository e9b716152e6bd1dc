"""Functions in LLVM IR, written from Python: loops and vectors.

State of loops lies in `Variable`s, which LLVM turns into registers. A kernel is a frozen value with
a method `emit`: equal kernels are compiled once (`kernels.jit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from demask.kernels.llvm.isa import Isa

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
        return self.elementwise("fma", a, b, c)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger; NaN where `a` is NaN, as in torch. One instruction, where llvm.maxnum takes
        three for its own rule."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), b, a)

    def smaller(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), b, a)

    def largest(self, a: Value, b: Value) -> Value:
        """The larger; NaN where either is NaN, as in torch."""
        return self.b.select(self.b.fcmp_unordered("uno", b, b), b, self.larger(a, b))

    def elementwise(self, name: str, *operands: Value) -> Value:
        """LLVM's function of vectors "llvm.<name>" (fma, fabs, copysign), lane by lane."""
        function = f"llvm.{name}.v{self.lanes}f32"
        kinds = [self.vector] * len(operands)
        return self.b.call(self.intrinsic(function, self.vector, *kinds), operands)

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


class Fields:
    """The call of a kernel, its first argument: 64-bit fields by their names. Some are slots of the
    second argument, an array of addresses."""

    def __init__(self, e: Emitter, names: Iterable[str] | None):
        call, self.e = e.pointer(e.args[0]), e
        self.table = e.pointer(e.args[1])
        self.field = {name: e.load(I64, call, k) for k, name in enumerate(names or ())}

    def __getitem__(self, key: str) -> Value:
        return self.field[key]

    def slot(self, key: str, more: Value | None = None) -> Value:
        """The address in a slot, or in the one `more` places on."""
        place = self.field[key] if more is None else self.e.b.add(self.field[key], more)
        return self.e.pointer(self.e.load(I64, self.table, place))

    def buffer(self, key: str) -> Value:
        """The address of so many bytes after the one in the buffer's slot."""
        return self.e.at(self.slot(f"{key}_slot"), self.field[key])

    def pointer(self, key: str) -> Value:
        """An address that never moves."""
        return self.e.pointer(self.field[key])

    def count(self, key: str) -> Value:
        """The number in a slot."""
        return self.e.load(I64, self.slot(key))
