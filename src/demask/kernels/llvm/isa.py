"""What a processor can do, as far as kernels care: float32 lanes of a vector, LLVM's target."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class Isa:
    """A target of LLVM's. lanes: float32 numbers in the widest vector; registers: how many of
    these vectors there are."""

    name: str
    triple: str
    cpu: str
    features: str
    lanes: int
    registers: int

    @property
    def line(self) -> int:
        """Bytes of a vector."""
        return 4 * self.lanes


AVX512 = Isa("AVX-512", "x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 16, 32)
AVX2 = Isa("AVX2", "x86_64-unknown-linux-gnu", "haswell", "", 8, 16)
NEON = Isa("NEON", "aarch64-unknown-linux-gnu", "neoverse-n1", "", 4, 32)


@functools.cache
def host() -> Isa:
    """This machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    found = llvm.get_host_cpu_features()
    features = found.flatten()
    if found.get("avx512f") and found.get("avx512vl") and found.get("avx512dq"):
        # LLVM prefers vectors of 256 bits on many processors that have longer ones.
        return Isa("AVX-512", triple, cpu, f"{features},-prefer-256-bit", 16, 32)
    if found.get("avx2") and found.get("fma"):
        return Isa("AVX2", triple, cpu, features, 8, 16)
    # macOS writes arm64
    registers = 32 if triple.startswith(("aarch64", "arm64")) else 16
    return Isa("128 bits", triple, cpu, features, 4, registers)
