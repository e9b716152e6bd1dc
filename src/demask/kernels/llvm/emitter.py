"""Write LLVM IR functions with loops and vectors from Python.

Loop state is stored in `Variable`s, which LLVM keeps in registers. A kernel is a frozen dataclass
with a method `emit`, so equal kernels are compiled once (`kernels.llvm.jit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from llvmlite import ir

from demask.kernels.llvm.isa import Isa

BYTE, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
BIT, POINTER, VOID = ir.IntType(1), ir.PointerType(), ir.VoidType()
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
WORDS = {FLOAT: "f32", DOUBLE: "f64", I32: "i32", I64: "i64"}  # in names of LLVM's functions
Value = Any  # an ir.Value; llvmlite is not typed


class Kernel(Protocol):
    """A function to compile. Implementations are frozen dataclasses, compared by value."""

    def emit(self, e: Emitter) -> None:
        """Write the body."""
        ...

    @property
    def arguments(self) -> int:
        """Number of arguments, all pointers or 64-bit integers. Nothing is returned."""
        ...


@dataclass(frozen=True, slots=True)
class Variable:
    """A value in memory that loops change."""

    e: Emitter
    address: Value
    type: Any

    def get(self) -> Value:
        return self.e.b.load(self.address, typ=self.type)

    def set(self, value: Value) -> None:
        self.e.b.store(value, self.address)


class Emitter:
    """Writes one function into an LLVM module. `b` is the IRBuilder of llvmlite."""

    def __init__(self, module: ir.Module, name: str, arguments: int, isa: Isa):
        self.isa, self.lanes, self.module = isa, isa.lanes, module
        self.number: ir.Type = FLOAT  # of lanes
        self.bytes = 4
        self.vector = ir.VectorType(FLOAT, isa.lanes)
        self.ints = ir.VectorType(I32, isa.lanes)
        self.function = ir.Function(module, ir.FunctionType(VOID, [I64] * arguments), name)
        self.entry = self.function.append_basic_block("entry")
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        self.args = self.function.args
        self.zeros: dict[int, Value] = {}  # by number of lanes, which kernels change

    def finish(self) -> None:
        """End the function."""
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(self.function.basic_blocks[1])

    # -- numbers and memory

    def pointer(self, address: Value) -> Value:
        return self.b.inttoptr(address, POINTER)

    def at(self, pointer: Value, index: Value | int, kind: Any = BYTE) -> Value:
        """The address of element `index` of type `kind`."""
        offset = I64(index) if isinstance(index, int) else index
        return self.b.gep(pointer, [offset], source_etype=kind)

    def load(self, kind: Any, pointer: Value, index: Value | int = 0) -> Value:
        return self.b.load(self.at(pointer, index, kind), typ=kind)

    def load_long(self, kind: Any, pointer: Value, index: Value | int = 0) -> Value:
        """An unsigned integer, extended to 64 bits."""
        return self.b.zext(self.load(kind, pointer, index), I64)

    def opaque(self, pointer: Value) -> Value:
        """The same address, hidden from LLVM's address folding.

        LLVM would otherwise repeat its terms in every instruction that reads from it, and Intel
        processors split such instructions in two.
        """
        kind = ir.FunctionType(POINTER, [POINTER])
        return self.b.asm(kind, "", "=r,0", [pointer], side_effect=False)

    def line(self, pointer: Value, index: Value | int = 0) -> Value:
        """The address of vector `index`, counted in full vectors."""
        if isinstance(index, int):
            return self.at(pointer, index * self.isa.line)
        return self.at(pointer, self.b.mul(index, I64(self.isa.line)))

    def prefetch(self, pointer: Value, writes: bool = True, near: bool = True) -> None:
        """Prefetch the cache line at an address, for writing or for reading; near: into the L1
        cache, not the L2 cache alone."""
        prefetch = self.intrinsic("llvm.prefetch.p0", VOID, POINTER, I32, I32, I32)
        self.b.call(prefetch, [pointer, I32(int(writes)), I32(3 if near else 2), I32(1)])

    def read(self, pointer: Value, lines: int = 0) -> Value:
        """An aligned vector, `lines` vectors after the pointer."""
        address = self.line(pointer, lines) if lines else pointer
        return self.b.load(address, typ=self.vector, align=self.isa.line)

    def write(self, value: Value, pointer: Value, lines: int = 0) -> None:
        address = self.line(pointer, lines) if lines else pointer
        self.b.store(value, address, align=self.isa.line)

    def variable(self, kind: Any, value: Value | None = None) -> Variable:
        variable = Variable(self, ir.IRBuilder(self.entry).alloca(kind), kind)
        if value is not None:
            variable.set(value)
        return variable

    # -- control

    @contextmanager
    def loop(self, begin: Value, end: Value, step: Value | int = 1) -> Iterator[Value]:
        """Runs its body for begin <= i < end in steps of `step`."""
        step = I64(step) if isinstance(step, int) else step
        index = self.variable(I64, begin)
        head, body, after = (self.function.append_basic_block(n) for n in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = index.get()
        self.b.cbranch(self.b.icmp_signed("<", i, end), body, after)
        self.b.position_at_end(body)
        yield i
        index.set(self.b.add(i, step))
        self.b.branch(head)
        self.b.position_at_end(after)

    # -- vectors

    def splat(self, value: Value) -> Value:
        """A scalar (or a Python number, of the type of `vector`) in every lane."""
        if isinstance(value, (int, float)):
            return ir.Constant(self.vector, [float(value)] * self.lanes)
        kind = ir.VectorType(value.type, self.lanes)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        if self.lanes not in self.zeros:  # a constant is formatted once
            self.zeros[self.lanes] = ir.Constant(self.ints, [0] * self.lanes)
        return self.b.shuffle_vector(first, undefined, self.zeros[self.lanes])

    def intrinsic(self, name: str, result: Any, *kinds: Any) -> ir.Function:
        """The LLVM function with this name, declared in the module."""
        if name not in self.module.globals:
            ir.Function(self.module, ir.FunctionType(result, kinds), name)
        return self.module.globals[name]

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.elementwise("fma", a, b, c)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger value; NaN where `a` is NaN, as in torch.

        One instruction; llvm.maxnum needs three for its own NaN rule.
        """
        return self.b.select(self.b.fcmp_ordered("<", a, b), b, a)

    def smaller(self, a: Value, b: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered(">", a, b), b, a)

    def largest(self, a: Value, b: Value) -> Value:
        """The larger value; NaN where either is NaN, as in torch."""
        return self.b.select(self.b.fcmp_unordered("uno", b, b), b, self.larger(a, b))

    def elementwise(self, name: str, *operands: Value) -> Value:
        """The LLVM vector function "llvm.<name>" (fma, fabs, copysign) of each lane."""
        kind = operands[0].type
        function = f"llvm.{name}.v{self.lanes}{WORDS[kind.element]}"
        return self.b.call(self.intrinsic(function, kind, *[kind] * len(operands)), operands)

    def permuted(self, x: Value, lanes: Sequence[int], fill: float = 0.0) -> Value:
        """Lane k is lane lanes[k] of x, or the fill value if lanes[k] is negative."""
        sources = [self.lanes if lane < 0 else lane for lane in lanes]
        return self.b.shuffle_vector(x, self.splat(fill), ir.Constant(self.ints, sources))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """The transpose of as many vectors as they have lanes.

        Lane k of row r becomes lane r of row k. Each of the log2(lanes) rounds swaps rows and lanes
        that differ in one bit.
        """
        vectors, distance = list(rows), 1
        while distance < self.lanes:
            low = [k if not k & distance else self.lanes + k - distance for k in range(self.lanes)]
            high = [k + distance if not k & distance else self.lanes + k for k in range(self.lanes)]
            for k in range(self.lanes):
                if not k & distance:
                    a, b = vectors[k], vectors[k + distance]
                    vectors[k] = self.b.shuffle_vector(a, b, ir.Constant(self.ints, low))
                    vectors[k + distance] = self.b.shuffle_vector(a, b, ir.Constant(self.ints, high))
            distance *= 2
        return vectors

    def addresses(self, pointer: Value, index: Value) -> Value:
        """Addresses of the float32 elements with these int32 numbers."""
        addresses = self.b.gep(pointer, [index], source_etype=FLOAT)
        addresses.type = ir.VectorType(POINTER, self.lanes)
        return addresses

    def load_masked(self, pointer: Value, mask: Value, other: float = 0.0) -> Value:
        """A vector from memory; lanes outside of the mask are `other` and are not read."""
        if not self.isa.has_masks:
            return self._load_lanes(self._neighbors(pointer), mask, self.splat(other))
        name = f"llvm.masked.load.v{self.lanes}{WORDS[self.number]}.p0"
        load = self.intrinsic(name, self.vector, POINTER, I32, mask.type, self.vector)
        return self.b.call(load, [pointer, I32(4), mask, self.splat(other)])

    def store_masked(self, value: Value, pointer: Value, mask: Value) -> None:
        """Write the lanes of a vector that are in the mask."""
        if not self.isa.has_masks:
            self._store_lanes(value, self._neighbors(pointer), mask)
            return
        name = f"llvm.masked.store.v{self.lanes}{WORDS[self.number]}.p0"
        store = self.intrinsic(name, VOID, self.vector, POINTER, I32, mask.type)
        self.b.call(store, [value, pointer, I32(4), mask])

    def _neighbors(self, pointer: Value) -> list[Value]:
        """The addresses of the numbers of a vector in memory."""
        return [self.at(pointer, k, self.number) for k in range(self.lanes)]

    def _lane_addresses(self, addresses: Sequence[Value], mask: Value) -> Iterator[tuple[Value, Value]]:
        """(lane, its address), by selects in place of branches: that of a word nobody reads where it is not masked."""
        word = self.opaque(ir.IRBuilder(self.entry).alloca(self.number))
        for k, address in enumerate(addresses):
            yield I32(k), self.b.select(self.b.extract_element(mask, I32(k)), address, word)

    def _load_lanes(self, addresses: Sequence[Value], mask: Value, other: Value) -> Value:
        vector = ir.Constant(self.vector, ir.Undefined)
        for lane, address in self._lane_addresses(addresses, mask):
            vector = self.b.insert_element(vector, self.b.load(address, typ=self.number, align=4), lane)
        return self.b.select(mask, vector, other)

    def _store_lanes(self, value: Value, addresses: Sequence[Value], mask: Value) -> None:
        for lane, address in self._lane_addresses(addresses, mask):
            self.b.store(self.b.extract_element(value, lane), address, align=4)

    def gather(self, pointer: Value, index: Value, mask: Value, other: Value) -> Value:
        """The float32 elements with these int32 numbers; `other` where not masked."""
        n, addresses = self.lanes, self.addresses(pointer, index)
        if not self.isa.has_masks:
            return self._load_lanes([self.b.extract_element(addresses, I32(k)) for k in range(n)], mask, other)
        name = f"llvm.masked.gather.v{n}f32.v{n}p0"
        kinds = (addresses.type, I32, ir.VectorType(BIT, n), self.vector)
        return self.b.call(self.intrinsic(name, self.vector, *kinds), [addresses, I32(4), mask, other])

    def scatter(self, value: Value, pointer: Value, index: Value, mask: Value) -> None:
        """Write the lanes with a set mask to the elements with these int32 numbers."""
        n, addresses = self.lanes, self.addresses(pointer, index)
        if not self.isa.has_masks:
            self._store_lanes(value, [self.b.extract_element(addresses, I32(k)) for k in range(n)], mask)
            return
        name = f"llvm.masked.scatter.v{n}f32.v{n}p0"
        kinds = (self.vector, addresses.type, I32, ir.VectorType(BIT, n))
        self.b.call(self.intrinsic(name, VOID, *kinds), [value, addresses, I32(4), mask])

    def every(self) -> Value:
        """A mask with every lane set."""
        return ir.Constant(ir.VectorType(BIT, self.lanes), [1] * self.lanes)

    def total(self, x: Value) -> Value:
        """The sum of the lanes."""
        number = x.type.element
        name = f"llvm.vector.reduce.fadd.v{self.lanes}{WORDS[number]}"
        return self.b.call(self.intrinsic(name, number, number, x.type), [number(0.0), x], fastmath=("reassoc",))


class Fields:
    """The named 64-bit fields of a kernel call, its first argument.

    Some fields are slots: indices into the second argument, an array of addresses.
    """

    def __init__(self, e: Emitter, names: Iterable[str] | None):
        call, self.e = e.pointer(e.args[0]), e
        self.table = e.pointer(e.args[1])
        self.field = {name: e.load(I64, call, k) for k, name in enumerate(names or ())}

    def __getitem__(self, key: str) -> Value:
        return self.field[key]

    def slot(self, key: str, offset: Value | None = None) -> Value:
        """The address in a slot, or in the slot `offset` positions after it."""
        index = self.field[key] if offset is None else self.e.b.add(self.field[key], offset)
        return self.e.pointer(self.e.load(I64, self.table, index))

    def buffer(self, key: str) -> Value:
        """The address of a buffer: the address in its slot plus its byte offset."""
        return self.e.at(self.slot(f"{key}_slot"), self.field[key])

    def pointer(self, key: str) -> Value:
        """An address that is the same in every call."""
        return self.e.pointer(self.field[key])

    def count(self, key: str) -> Value:
        """The number stored at the address in a slot."""
        return self.e.load(I64, self.slot(key))
