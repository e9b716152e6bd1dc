"""Kernels as machine code, compiled in this process by LLVM: no compiler, no files."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from demask.kernels.llvm.emitter import Emitter, Kernel
from demask.kernels.llvm.isa import Isa, host


def source(kernels: Iterable[Kernel], isa: Isa) -> str:
    """A module of LLVM IR with these kernels as functions k0, k1, …"""
    module = ir.Module("kernels")
    module.triple = isa.triple
    for place, kernel in enumerate(kernels):
        e = Emitter(module, f"k{place}", kernel.arguments, isa)
        kernel.emit(e)
        e.done()
    return str(module)


def optimized(text: str, isa: Isa) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """The module as LLVM's passes leave it. Short loops over nonzeros gain nothing by unrolling and
    take several times as long to compile; vectors are spelled out."""
    target = llvm.Target.from_triple(isa.triple)
    machine = target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.PipelineTuningOptions(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


def assembly(kernels: Iterable[Kernel], isa: Isa) -> str:
    """Machine code in words, for any target."""
    if isa != host():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    module, machine = optimized(source(kernels, isa), isa)
    return machine.emit_assembly(module)


class Code:
    """Compiled kernels of this process, each kept as long as the process lives."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, Isa], int] = {}
        self.engines: list[Any] = []
        self.lock = threading.Lock()

    def addresses(self, kernels: Iterable[Kernel], isa: Isa | None = None) -> dict[Any, int]:
        """Where the machine code of each kernel begins. isa: what may be used of this machine
        (None: all)."""
        isa = isa or host()
        wanted = list(dict.fromkeys(kernels))
        with self.lock:
            missing = [kernel for kernel in wanted if (kernel, isa) not in self.known]
            if missing:
                module, machine = optimized(source(missing, isa), isa)
                engine = llvm.create_mcjit_compiler(module, machine)
                engine.finalize_object()
                self.engines.append(engine)
                for place, kernel in enumerate(missing):
                    self.known[kernel, isa] = engine.get_function_address(f"k{place}")
            return {kernel: self.known[kernel, isa] for kernel in wanted}


CODE = Code()
