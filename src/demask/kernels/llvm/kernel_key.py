"""Names of compiled kernels by content: equal for kernels with equal machine code only.

A name is computed without writing the kernel's IR, which takes a third of the time of compiling it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from demask.kernels.llvm import activations
from demask.kernels.llvm.isa import Isa
from demask.machine.private_files import files_digest

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
        content = (_text(kernel), _text(isa))
    except TypeError:
        return None
    if written_by is None:
        return None
    versions = (FORMAT, llvmlite.__version__, llvm.llvm_version_info, sys.byteorder)
    return hashlib.sha256(repr((content, written_by, versions)).encode()).hexdigest()


def _text(value: Any) -> str:
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
        return f"({' '.join(map(_text, value))})"
    if not dataclasses.is_dataclass(value) or "<locals>" in type(value).__qualname__:
        raise TypeError(f"expected numbers, texts, tuples and dataclasses, got {type(value)}")
    fields = " ".join(_text(getattr(value, field.name)) for field in dataclasses.fields(value))
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
