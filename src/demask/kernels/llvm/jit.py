"""Kernels compiled to machine code in this process by LLVM, without a compiler or files."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from demask.kernels.llvm.emitter import Emitter, Kernel
from demask.kernels.llvm.isa import Isa, host


def source(kernels: Iterable[Kernel], isa: Isa) -> str:
    """The LLVM IR of a module that has these kernels as functions k0, k1, ..."""
    module = ir.Module("kernels")
    module.triple = isa.triple
    for number, kernel in enumerate(kernels):
        e = Emitter(module, f"k{number}", kernel.arguments, isa)
        kernel.emit(e)
        e.finish()
    return str(module)


def optimized(text: str, isa: Isa) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """The module after LLVM's passes, and its target machine.

    Unrolling short loops over nonzeros takes several times as long to compile and gains nothing;
    kernels write vectors explicitly.
    """
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
    """Assembly text of kernels for any target."""
    if isa != host():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    module, machine = optimized(source(kernels, isa), isa)
    return machine.emit_assembly(module)


class Code:
    """Compiled kernels, cached as long as the process lives."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, Isa], int] = {}
        self.engines: list[Any] = []
        self.lock = threading.Lock()

    def addresses(self, kernels: Iterable[Kernel], isa: Isa | None = None) -> dict[Any, int]:
        """Entry address of each kernel.

        isa: the instructions to use; all of this machine by default.
        """
        isa = isa or host()
        requested = list(dict.fromkeys(kernels))
        with self.lock:
            missing = [kernel for kernel in requested if (kernel, isa) not in self.known]
            if missing:
                module, machine = optimized(source(missing, isa), isa)
                engine = llvm.create_mcjit_compiler(module, machine)
                engine.finalize_object()
                self.engines.append(engine)
                for number, kernel in enumerate(missing):
                    self.known[kernel, isa] = engine.get_function_address(f"k{number}")
            return {kernel: self.known[kernel, isa] for kernel in requested}


CODE = Code()
