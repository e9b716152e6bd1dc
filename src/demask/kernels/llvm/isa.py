"""Vector width and LLVM target of a processor."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class Isa:
    """An LLVM target. lanes: float32 elements of the widest vector; registers: vector registers."""

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

    @property
    def is_arm(self) -> bool:
        """Whether it has the instructions of NEON."""
        return self.triple.startswith(("aarch64", "arm64"))  # macOS writes arm64

    @property
    def has_masks(self) -> bool:
        """Whether an instruction loads or stores some of the lanes of a vector. Elsewhere LLVM branches for each."""
        return self.name.startswith("AVX")


AVX512 = Isa("AVX-512", "x86_64-unknown-linux-gnu", "skylake-avx512", "-prefer-256-bit", 16, 32)
AVX2 = Isa("AVX2", "x86_64-unknown-linux-gnu", "haswell", "", 8, 16)
NEON = Isa("NEON", "aarch64-unknown-linux-gnu", "neoverse-n1", "", 4, 32)


@functools.cache
def host() -> Isa:
    """The target of this machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    available = llvm.get_host_cpu_features()
    features = available.flatten()
    if available.get("avx512f") and available.get("avx512vl") and available.get("avx512dq"):
        # By default, LLVM uses 256-bit vectors on many processors that have wider ones.
        return Isa("AVX-512", triple, cpu, f"{features},-prefer-256-bit", 16, 32)
    if available.get("avx2") and available.get("fma"):
        return Isa("AVX2", triple, cpu, features, 8, 16)
    narrow = Isa("128 bits", triple, cpu, features, 4, 16)
    return replace(narrow, registers=32) if narrow.is_arm else narrow
