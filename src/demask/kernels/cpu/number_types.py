"""Numbers of weights in memory, which kernels read as float32; float64 stays as it is."""

from __future__ import annotations

from llvmlite import ir

from demask.kernels.llvm.emitter import BYTE, DOUBLE, FLOAT, I16, I32, Emitter, Value
from demask.kernels.llvm.isa import Isa

HALF = ir.HalfType()
#: the type in memory, by name: float32, bfloat16, float16, 8-bit integers, whose sums are scaled afterwards, float64
TYPES = {"f32": FLOAT, "bf16": I16, "f16": HALF, "i8": BYTE, "f64": DOUBLE}
SIZES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "f64": 8}  # bytes


def is_supported(numbers: str, isa: Isa) -> bool:
    """Whether a processor converts numbers of a type by instructions."""
    return numbers != "f16" or "x86" not in isa.triple or isa.lanes == 16 or "+f16c" in isa.features


def type_of_sums(numbers: str) -> ir.Type:
    """The type in which numbers are multiplied and summed."""
    return DOUBLE if numbers == "f64" else FLOAT


def read_vector(e: Emitter, numbers: str, pointer: Value) -> Value:
    """A vector of consecutive numbers, as float32 or float64."""
    kind = TYPES[numbers]
    return as_float(e, numbers, e.b.load(pointer, typ=ir.VectorType(kind, e.lanes), align=SIZES[numbers]))


def read_number(e: Emitter, numbers: str, pointer: Value, position: Value) -> Value:
    """The number at a position, as float32 or float64."""
    return as_float(e, numbers, e.load(TYPES[numbers], pointer, position))


def as_float(e: Emitter, numbers: str, value: Value) -> Value:
    """A number, or a vector of numbers, as float32; float64 stays as it is."""
    b, is_vector = e.b, isinstance(value.type, ir.VectorType)
    if numbers in ("f32", "f64"):
        return value
    floats, words = (e.vector, e.ints) if is_vector else (FLOAT, I32)
    if numbers == "bf16":  # the upper half of a float32
        half = e.splat(I32(16)) if is_vector else I32(16)
        return b.bitcast(b.shl(b.zext(value, words), half), floats)
    return b.fpext(value, floats) if numbers == "f16" else b.sitofp(b.sext(value, words), floats)
