"""How many multiply-adds this machine makes, by loops that LLVM compiles on the spot."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from time import perf_counter
from typing import Any

import llvmlite.binding as llvm
import numpy as np

CHAINS = 14  # independent sums: two units times a latency of four, and some to spare
WINDOW = 8192  # bytes that operands are read from: any first cache holds them
LINE = 64  # bytes

# Sums that each take one multiply-add a turn. Words: the operands' address, turns.
SUMS = """
declare {vector} @llvm.fma.{name}({vector}, {vector}, {vector})
define void @f(ptr %words) {{
entry:
  %x = load ptr, ptr %words
  %at1 = getelementptr i64, ptr %words, i64 1
  %turns = load i64, ptr %at1
  %one = load {vector}, ptr %x, align 4
  br label %turn
turn:
  %k = phi i64 [0, %entry], [%next, %turn]
{sums}
  %far = mul i64 %k, {stride}
  %offset = and i64 %far, {mask}
  %start = getelementptr i8, ptr %x, i64 %offset
{steps}
  %next = add i64 %k, 1
  %more = icmp ult i64 %next, %turns
  br i1 %more, label %turn, label %end
end:
{stores}
  ret void
}}
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A machine function of the address of int64 words, and the engine that holds its code."""

    call: Callable[[int], None]
    engine: Any

    def __call__(self, *words: int) -> None:
        arguments = np.array(words, np.int64)
        self.call(arguments.ctypes.data)


def compiled(text: str) -> Compiled:
    """The function `f` of this LLVM text for this very processor, with its widest vectors."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )
    module = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"\n{text}')
    module.verify()
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    form = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # other threads of Python run meanwhile
    return Compiled(form(engine.get_function_address("f")), engine)


def aligned(size: int) -> np.ndarray:
    """Zeroed bytes that start on a page."""
    values = np.zeros(size + 4096, np.uint8)
    start = -values.ctypes.data % 4096
    return values[start : start + size]


def together(tasks: Sequence[Callable[[], None]]) -> None:
    """Every task done, each in a thread of its own."""
    threads = [Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, slots=True)
class Peak:
    """Multiply-adds on so many threads, in 1e9 floating-point operations a second: with operands in
    registers, in the first cache, and there but four bytes after the start of a line."""

    threads: int
    registers: float
    memory: float
    misaligned: float


def sums(lanes: int, *, memory: bool) -> str:
    """The text of `CHAINS` independent sums of vectors, operands in memory or in registers."""
    vector, name = f"<{lanes} x float>", f"v{lanes}f32"
    heads, steps, stores = [], [], []
    for n in range(CHAINS):
        heads.append(f"  %sum{n} = phi {vector} [%one, %entry], [%new{n}, %turn]")
        if memory:
            steps.append(f"  %at{n}_ = getelementptr i8, ptr %start, i64 {n * LINE}")
            steps.append(f"  %in{n} = load {vector}, ptr %at{n}_, align 4")
        operand = f"%in{n}" if memory else "%one"
        steps.append(f"  %new{n} = call {vector} @llvm.fma.{name}({vector} %one, {vector} {operand}, {vector} %sum{n})")
        stores.append(f"  store {vector} %new{n}, ptr %x, align 4")
    return SUMS.format(
        vector=vector,
        name=name,
        sums="\n".join(heads),
        steps="\n".join(steps),
        stores="\n".join(stores),
        stride=CHAINS * LINE,
        mask=WINDOW - 1 & -LINE,
    )


def rate(loop: Compiled, lanes: int, threads: int, offset: int, turns: int = 1_000_000) -> float:
    """1e9 operations a second of a loop of `sums` on so many threads: the best of eight runs."""
    places = [aligned(WINDOW + (CHAINS + 1) * LINE) for _ in range(threads)]
    tasks = [lambda at=at: loop(at.ctypes.data + offset, turns) for at in places]
    taken = []
    for _ in range(8):
        start = perf_counter()
        together(tasks)
        taken.append(perf_counter() - start)
    return 2e-9 * lanes * CHAINS * turns * threads / min(taken)


def peak(threads: int) -> Peak:
    """What this machine's multiply-add units do at best, on so many threads."""
    features = llvm.get_host_cpu_features()
    lanes = next((n for n, name in ((16, "avx512f"), (8, "avx2")) if features.get(name)), 4)
    registers, read = (compiled(sums(lanes, memory=memory)) for memory in (False, True))
    return Peak(
        threads, rate(registers, lanes, threads, 0), rate(read, lanes, threads, 0), rate(read, lanes, threads, 4)
    )
