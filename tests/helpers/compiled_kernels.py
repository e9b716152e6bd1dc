"""Triton's kernels compiled for a GPU that is not here, and what its instructions are."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers: per thread. stack: bytes per thread. found: instructions, by their names."""

    registers: int
    stack: int
    found: Counter[str]

    def count(self, start: str) -> int:
        """Instructions whose name begins so."""
        return sum(n for name, n in self.found.items() if name.startswith(start))


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    even: Iterable[str],
    warps: int,
    target: int = 90,
) -> Compiled:
    """The kernel for sm_90. types: of arguments ("*fp32", "i32"). constants: those known when it is
    compiled, by their names. even: arguments that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attrs)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _said(tools / "cuobjdump", "-res-usage", file.name)
        text = _said(tools / "nvdisasm", file.name)
    registers, stack = (int(re.findall(rf"{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    line = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)"
    return Compiled(registers, stack, Counter(re.findall(line, text, re.M)))


def _said(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
