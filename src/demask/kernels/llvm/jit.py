"""Kernels compiled to machine code by LLVM in this process, or by an earlier one, whose files
(`machine.private_files`) this one reads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from demask.kernels.llvm.emitter import Emitter, Kernel
from demask.kernels.llvm.isa import Isa, host
from demask.kernels.llvm.kernel_key import kernel_key
from demask.machine.cache_folder import cache_folder
from demask.machine.private_files import PrivateFiles

LIMIT, MOST = 2**28, 2**24  # bytes of all files of kernels, and of one


def source(kernels: Iterable[Kernel], isa: Isa, names: Iterable[str] | None = None) -> str:
    """The LLVM IR of a module that has these kernels as functions.

    names: of the functions; k0, k1, ... by default.
    """
    module, kernels = ir.Module("kernels"), list(kernels)
    module.triple = isa.triple
    names = (f"k{number}" for number in range(len(kernels))) if names is None else names
    for name, kernel in zip(names, kernels, strict=True):
        e = Emitter(module, name, kernel.arguments, isa)
        kernel.emit(e)
        e.finish()
    return str(module)


def target_machine(isa: Isa) -> llvm.TargetMachine:
    """LLVM's target for an instruction set."""
    target = llvm.Target.from_triple(isa.triple)
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3)


def optimized(text: str, isa: Isa) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """The module after LLVM's passes, and its target machine.

    Unrolling short loops over nonzeros takes several times as long to compile and gains nothing;
    kernels write vectors explicitly.
    """
    machine = target_machine(isa)
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
    """Compiled kernels, cached as long as the process lives.

    files: those of earlier and later processes, if any. compiled: how many this process compiled.
    """

    def __init__(self, files: PrivateFiles | None = None) -> None:
        self.known: dict[tuple[Any, Isa], int] = {}
        self.engines: list[Any] = []
        self.lock = threading.Lock()
        self.files = files
        self.compiled = 0

    def addresses(self, kernels: Iterable[Kernel], isa: Isa | None = None) -> dict[Any, int]:
        """Entry address of each kernel.

        isa: the instructions to use; all of this machine by default.
        """
        isa = isa or host()
        requested = list(dict.fromkeys(kernels))
        with self.lock:
            missing = [kernel for kernel in requested if (kernel, isa) not in self.known]
            if missing:
                for kernel, address in zip(missing, self._loaded(missing, isa), strict=True):
                    self.known[kernel, isa] = address
            return {kernel: self.known[kernel, isa] for kernel in requested}

    def _loaded(self, kernels: list[Kernel], isa: Isa) -> list[int]:
        """Entry addresses of kernels that are not known yet."""
        module = llvm.parse_assembly("")
        module.triple = isa.triple
        engine = llvm.create_mcjit_compiler(module, target_machine(isa))
        names = []
        for number, kernel in enumerate(kernels):
            key = kernel_key(kernel, isa)
            name = f"k{number}" if key is None else f"k_{key}"
            if name not in names:  # kernels with NaN as fill values differ from each other
                content = self._object(kernel, isa, name, key)
                engine.add_object_file(llvm.ObjectFileRef.from_data(content))
            names.append(name)
        engine.finalize_object()
        self.engines.append(engine)
        return [engine.get_function_address(name) for name in names]

    def _object(self, kernel: Kernel, isa: Isa, name: str, key: str | None) -> bytes:
        """An object file with a kernel as a function of this name."""
        files = None if key is None else self.files
        content = None if files is None or key is None else files.read(key)
        if content is None:
            self.compiled += 1
            module, machine = optimized(source([kernel], isa, [name]), isa)
            content = machine.emit_object(module)
            if files is not None and key is not None:
                files.write(key, content)
        return content


def _usual_files() -> PrivateFiles | None:
    """The files in demask's cache folder; None where the system has no such folder."""
    folder = cache_folder()
    return PrivateFiles.of(folder and folder / "kernels", "kernel", LIMIT, MOST)


CODE = Code(_usual_files())
