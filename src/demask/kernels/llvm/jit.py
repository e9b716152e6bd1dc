"""Kernels compiled to machine code by LLVM in this process, or by an earlier one, whose files
(`machine.private_files`) this one reads.

The files are named by content: equal names for kernels with equal machine code only. A name is
computed without writing the kernel's IR, which takes a third of the time of compiling it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from demask.kernels.llvm import activations
from demask.kernels.llvm.emitter import Emitter, Kernel
from demask.kernels.llvm.isa import Isa, host
from demask.machine.private_files import PrivateFiles, cache_folder, files_digest

FORMAT = "1"  # of what the named files contain
SCALARS = (type(None), bool, int, str, bytes)


def kernel_key(kernel: Any, isa: Isa) -> str | None:
    """64 hexadecimal digits: of the kernel's class and fields, the files that write its IR, the
    processor, and the versions of LLVM and llvmlite.

    None if these do not determine the code: a class or an activation defined while the program
    runs, other fields than numbers and texts, files that are missing or newer than the process.
    """
    emit = type(kernel).emit
    if emit.__module__ != type(kernel).__module__:  # set from outside of its file
        return None
    written_by = _files_digest(emit.__module__)
    try:
        content = (_content_of(kernel), _content_of(isa))
    except TypeError:
        return None
    if written_by is None:
        return None
    versions = (FORMAT, llvmlite.__version__, llvm.llvm_version_info, sys.byteorder)
    return hashlib.sha256(repr((content, written_by, versions)).encode()).hexdigest()


def _content_of(value: Any) -> str:
    """The content of a value. Raises TypeError for values whose content is not known."""
    if isinstance(value, str) and not _is_of_the_package(value):
        raise TypeError(f"the activation {value} is defined elsewhere")
    if type(value) in SCALARS:
        return repr(value)
    if isinstance(value, np.integer):
        return repr(int(value))
    if type(value) is float:
        return value.hex()  # tells -0.0 from 0.0
    if type(value) is tuple:
        return f"({' '.join(map(_content_of, value))})"
    if not dataclasses.is_dataclass(value) or "<locals>" in type(value).__qualname__:
        raise TypeError(f"expected numbers, texts, tuples and dataclasses, got {type(value)}")
    fields = " ".join(_content_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return f"{type(value).__module__}.{type(value).__qualname__}({fields})"


def _is_of_the_package(name: str) -> bool:
    """Whether a text is not the name of an activation that was registered at run time."""
    lowering = activations.LOWERINGS.get(name)
    return lowering is None or getattr(lowering, "__module__", "") == activations.__name__


@functools.cache
def _files_digest(module: str) -> str | None:
    """Hash of the files that write the IR of a module's kernels: its own, and all of the package
    that kernels import."""
    kernels = Path(__file__).parents[1]
    own = getattr(sys.modules.get(module), "__file__", None)
    files = [*sorted(kernels.rglob("*.py")), kernels.parent / "ops" / "activations.py"]
    if own is None or not own.endswith(".py") or not kernels.is_dir():
        return None
    return files_digest(dict.fromkeys([*files, Path(own)]))


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
                for kernel, address in zip(missing, self._load(missing, isa), strict=True):
                    self.known[kernel, isa] = address
            return {kernel: self.known[kernel, isa] for kernel in requested}

    def _load(self, kernels: list[Kernel], isa: Isa) -> list[int]:
        """Entry addresses of kernels that are not known yet."""
        module = llvm.parse_assembly("")
        module.triple = isa.triple
        engine = llvm.create_mcjit_compiler(module, target_machine(isa))
        names = []
        for number, kernel in enumerate(kernels):
            key = kernel_key(kernel, isa)
            name = f"k{number}" if key is None else f"k_{key}"
            if name not in names:  # kernels with NaN as fill values differ from each other
                content = self._object_file(kernel, isa, name, key)
                engine.add_object_file(llvm.ObjectFileRef.from_data(content))
            names.append(name)
        engine.finalize_object()
        self.engines.append(engine)
        return [engine.get_function_address(name) for name in names]

    def _object_file(self, kernel: Kernel, isa: Isa, name: str, key: str | None) -> bytes:
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
