"""Predicted and measured peaks of memory of networks run part by part:
`python -m benchmarks run traverse_memory`.

Every number is measured in a process of its own. Budgets rise in equal ratios from the least one
for which there is a plan to what the untiled run takes.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import importlib
import multiprocessing
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save, text_of
from demask.errors import BudgetTooSmall
from demask.machine.allocator import M_MMAP_THRESHOLD
from demask.machine.describe import load_average
from traverse_networks import Network, named

BENCHMARK = Benchmark(
    "predicted and measured peaks of memory of tiled networks",
    "hours",
    needs=(DEV, SHARED_DATA),
    quick="--only squeeze-excite --size 256 --budgets 2 --threads 1",
)

MIB = 2**20
SIZES = {
    "TAEF2": 1024,
    "RRDB-23": 1024,
    "U-Net": 1024,
    "ResNet-18": 2048,
    "squeeze-excite": 1024,
    "dense": 1024,
    "dw12": 1024,
    "SD decoder": 512,
}
SMALL = 64  # the size of the call that brings the libraries' code and threads into memory
BUDGETS = 4
SHARE, SLACK = 0.05, 16 * MIB  # how far a peak may be from its prediction: the larger of the two
FIXED = 128 * 1024  # bytes from which a block is mapped on its own, where that is fixed


# --- a process of its own -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no result."""

    reason: str


class Child:
    """A fresh process that runs `task(pipe, *args)`: nothing of this one's memory is in it."""

    def __init__(self, task: Callable[..., None], *args: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=task, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is seen here

    def answer(self, patience: float = inf) -> Any:
        """What it says next; Failed, and the process is gone, where it died or took too long."""
        if not self.pipe.poll(None if patience == inf else patience):
            self.stop()
            return Failed(f"not within {patience:.0f} s")
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return Failed(f"ended with exit code {self.process.exitcode}")

    def ask(self, *question: Any, patience: float = inf) -> Any:
        try:
            self.pipe.send(question)
        except BrokenPipeError:
            return Failed("is gone")
        return self.answer(patience)

    def stop(self) -> None:
        """Ends it: by closing the pipe where it waits for a question, else at once."""
        if self.pipe.closed:
            return
        self.pipe.close()
        self.process.join(1.0)
        self.process.kill()
        self.process.join()


def fresh(task: Callable[..., Any], *args: Any, patience: float = inf) -> Any:
    """What `task(*args)` returns in a process of its own, or Failed."""
    child = Child(_answer, task, args)
    result = child.answer(patience)
    child.stop()
    return result


def _answer(pipe: Connection, task: Callable[..., Any], args: Sequence[Any]) -> None:
    pipe.send(caught(task, *args))


def caught(task: Callable[..., Any], *args: Any) -> Any:
    """What `task(*args)` returns; Failed, with the trace on stderr, where it raises."""
    try:
        return task(*args)
    except Exception as error:
        traceback.print_exc()
        return Failed(f"{type(error).__name__}: {error}".partition("\n")[0])


# --- memory -------------------------------------------------------------------------------------


def resident(line: str = "VmRSS") -> int:
    """Bytes of this process that are in memory now; VmHWM: at most since the last reset."""
    match = re.search(rf"^{line}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def trim() -> None:
    """Return what is free to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peaked(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a call returns, the bytes of memory that it took at most beyond those before it, its
    result included, and its seconds."""
    trim()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    start = perf_counter()
    result = call()
    seconds = perf_counter() - start
    return result, max(resident("VmHWM") - before, 0), seconds


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- multiply-adds, counted at the calls --------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts the multiply-adds of convolutions, products and attention that torch executes,
    whoever calls it: a plan's own count is compared with it."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs or {})
        self.macs += _macs(func._schema.name.partition("::")[2], arguments, out)
        return out


def _macs(name: str, arguments: dict[str, Any], out: Any) -> int:
    first = out[0] if isinstance(out, (tuple, list)) else out
    if "attention" in name and "query" in arguments:
        return arguments["key"].shape[-2] * (arguments["query"].numel() + first.numel())
    if name in PRODUCTS:
        left = next(arguments[key] for key in LEFT if key in arguments)
        return first.numel() * left.shape[-1]
    weight = arguments.get("weight", arguments.get("W"))
    if "conv" not in name or weight is None:
        return 0
    is_transposed = "transpose" in name or arguments.get("transposed", False)
    places = next(arguments[key] for key in LEFT if key in arguments) if is_transposed else first
    return places.numel() * prod(weight.shape[1:])


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_linear_pointwise")
LEFT = ("mat1", "batch1", "input", "X", "self")


@torch.no_grad()
def counted(model: nn.Module, x: Tensor) -> int:
    """The multiply-adds of a call."""
    with Counted() as mode:
        model(x)
    return mode.macs


@torch.no_grad()
def work(model: nn.Module, x: Tensor) -> int:
    """The same by the shapes alone: nothing is computed."""
    return counted(copy.deepcopy(model).to("meta"), x.to("meta"))


# --- what the processes do ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run. engine: the module that has plan() and tile(). fixed: glibc maps every block
    from 128 KiB on its own. cold: no small call comes before the one that is measured."""

    network: str
    size: int
    threads: int
    engine: str = "demask.traverse"
    fixed: bool = False
    cold: bool = False

    @property
    def title(self) -> str:
        return f"{self.network}, {self.size}²"


def ready(setting: Setting) -> tuple[Network, nn.Module, Tensor]:
    """A network and its input, with the process set as the setting says."""
    torch.set_num_threads(setting.threads)
    if setting.fixed:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FIXED)
    network = named([setting.network])[setting.network]
    return network, network.make(), network.inputs(setting.size)[0]


def engine_of(setting: Setting) -> ModuleType:
    return importlib.import_module(setting.engine)


@dataclass(frozen=True, slots=True)
class Untiled:
    """Of the run as a whole, channels_last. peak: without the output."""

    peak: int
    output: int
    macs: int
    seconds: float


@torch.no_grad()
def untiled(setting: Setting) -> Untiled:
    network, model, x = ready(setting)
    model = model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    if not setting.cold:
        model(network.inputs(SMALL)[0])
    y, peak, seconds = peaked(lambda: model(x))
    output = nbytes(y)
    del y
    return Untiled(max(peak - output, 0), output, work(model, x), seconds)


@torch.no_grad()
def least(setting: Setting, most: int) -> int:
    """The least budget for which there is a plan, in bytes; BudgetTooSmall where it is more than
    `most`."""
    _, model, x = ready(setting)
    try:
        engine_of(setting).plan(model, (x,), memory=MIB)
    except BudgetTooSmall as error:
        if error.least > most:
            raise
        return error.least
    return MIB


@dataclass(frozen=True, slots=True)
class Tiled:
    """Of a call under a budget, in bytes. peak: measured, without the output; again: of a second
    call, for which no kernel has to be compiled. predicted: by the plan. macs, untiled_macs: as the
    plan says; counted: at torch's calls. error, equal: against untiled, channels_last."""

    predicted: int
    peak: int
    again: int
    output: int
    macs: int
    untiled_macs: int
    counted: int
    seconds: float
    error: float
    equal: bool
    words: str


@torch.no_grad()
def tiled(setting: Setting, memory: int) -> Tiled:
    network, model, x = ready(setting)
    if not setting.cold:
        model(network.inputs(SMALL)[0])
    network_in_tiles = engine_of(setting).tile(model, (x,), memory=memory)
    y, peak, seconds = peaked(lambda: network_in_tiles(x))
    output = nbytes(y)
    del y
    y, again, _ = peaked(lambda: network_in_tiles(x))
    macs = counted(network_in_tiles, x)
    model = model.to(memory_format=torch.channels_last)
    expected = model(x.contiguous(memory_format=torch.channels_last))
    plan = network_in_tiles.plan
    return Tiled(
        int(plan.peak),
        max(peak - output, 0),
        max(again - output, 0),
        output,
        int(plan.macs),
        int(plan.macs_untiled),
        macs,
        seconds,
        float((y - expected).abs().max()),
        torch.equal(y, expected),
        str(plan),
    )


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One network under one budget, in bytes. number: of the budget, from the least on."""

    setting: Setting
    number: int
    budget: int
    whole: Untiled
    tiled: Tiled | Failed

    @property
    def off(self) -> int:
        """Measured minus predicted."""
        assert isinstance(self.tiled, Tiled)
        return self.tiled.peak - self.tiled.predicted

    @property
    def is_close(self) -> bool:
        return isinstance(self.tiled, Tiled) and abs(self.off) <= max(SHARE * self.tiled.predicted, SLACK)

    @property
    def is_within(self) -> bool:
        return isinstance(self.tiled, Tiled) and self.tiled.peak <= self.budget


def budgets(low: int, high: int, count: int) -> list[int]:
    """Bytes from low to high in equal ratios, both included; low alone where it is no less.

    >>> budgets(10, 1000, 3), budgets(10, 5, 3)
    ([10, 100, 1000], [10])
    """
    if low >= high or count < 2:
        return [low]
    return [round(low * (high / low) ** (k / (count - 1))) for k in range(count)]


def rows(setting: Setting, count: int, patience: float, console: Console) -> Iterator[Row]:
    """One network under `count` budgets. Raises LookupError, with the reason, where there are
    none."""
    whole = fresh(untiled, setting, patience=patience)
    if isinstance(whole, Failed):
        raise LookupError(f"untiled: {whole.reason}")
    console.print(f"{setting.title}: untiled {mebibytes(whole.peak)} MiB, {whole.seconds:.1f} s")
    most = 4 * (whole.peak + whole.output) + 64 * MIB
    low = fresh(least, setting, most, patience=patience)
    if isinstance(low, Failed):
        raise LookupError(f"no plan: {low.reason}")
    for number, budget in enumerate(budgets(low, whole.peak, count), 1):
        row = Row(setting, number, budget, whole, fresh(tiled, setting, budget, patience=patience))
        console.print("  ", "; ".join(map(text_of, cells(row))))
        yield row


HEAD = [
    "network",
    "threads",
    "budget no.",
    "budget, MiB",
    "untiled, MiB",
    "predicted, MiB",
    "measured, MiB",
    "again, MiB",
    "off, MiB",
    "off, %",
    "close",
    "within the budget",
    "MACs, planned",
    "MACs, counted",
    "seconds",
    "untiled, s",
    "largest difference",
]


def mebibytes(size: float) -> str:
    """Mebibytes in words; tenths below ten.

    >>> mebibytes(3 * MIB / 2), mebibytes(1500 * MIB)
    ('1.5', '1,500')
    """
    return f"{size / MIB:,.{0 if abs(size) >= 10 * MIB else 1}f}"


def cells(row: Row) -> list[Cell]:
    run, whole = row.tiled, row.whole
    first = [row.setting.title, row.setting.threads, row.number, row.budget / MIB, whole.peak / MIB]
    if isinstance(run, Failed):
        return [*first, run.reason, *[None] * (len(HEAD) - len(first) - 1)]
    return [
        *first,
        run.predicted / MIB,
        run.peak / MIB,
        run.again / MIB,
        row.off / MIB,
        100 * row.off / max(run.predicted, 1),
        yes(row.is_close),
        yes(row.is_within),
        run.macs / run.untiled_macs if run.untiled_macs else None,
        run.counted / whole.macs if whole.macs else None,
        run.seconds,
        whole.seconds,
        "equal" if run.equal else run.error,
    ]


def yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    within, close = (sum(row[name] == "yes" for row in rows) for name in ("within the budget", "close"))
    return f"within the budget in {within} of {len(rows)}; close to the prediction in {close}"


def page(rows: Sequence[Row], refused: Sequence[str]) -> Page:
    """refused: networks that could not be planned, with the reason."""
    text = f"""
*Predicted*: `plan.peak`. *Measured*: `VmHWM` of a process of its own, less what was resident before
the call (after `malloc_trim(0)`, the mark reset by `/proc/self/clear_refs`), less the output that
the call returns; where the largest moment comes before the output is written this is too small by
what was missing of it. *Again*: of a second call, for which no kernel has to be compiled. *Off*:
measured minus predicted; *close*: no more than the larger of {SHARE:.0%} and {mebibytes(SLACK)}
MiB. *MACs*: over those of the untiled run, as the plan says and as counted at torch's calls of
convolutions, products and attention, to which kernels of demask do not belong. Seconds are of one
call, the first. *Difference*: of the outputs, from the untiled run in channels_last."""
    table = Table(HEAD, [*map(cells, rows)], 3, merge=True)
    parts = [text, table, *(f"Not run: {one}." for one in refused)]
    return Page("Peaks of memory, predicted and measured", parts, summarize)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SIZES), metavar="NETWORK")
    parser.add_argument("--size", type=int, help="rows and columns, instead of each network's own")
    parser.add_argument("--budgets", type=int, default=BUDGETS, metavar="COUNT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for each process")
    parser.add_argument("--fixed", action="store_true", help="glibc maps every block from 128 KiB on its own")
    parser.add_argument("--cold", action="store_true", help="no small call comes first")
    parser.add_argument("--engine", default="demask.traverse", metavar="MODULE")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    return parser.parse_args()


def main() -> None:
    options, console, before = arguments(), Console(markup=False), load_average()
    results, refused = list[Row](), list[str]()
    named(options.only)
    fixed, usual = f"glibc maps from {FIXED // 1024} KiB on", "allocator not tuned"
    for name in options.only:
        size = options.size or SIZES.get(name, 1024)
        setting = Setting(name, size, options.threads, options.engine, options.fixed, options.cold)
        try:
            for row in rows(setting, options.budgets, options.patience, console):
                results.append(row)
        except LookupError as error:
            refused.append(f"{setting.title}: {error}")
            console.print(refused[-1])
        run = Run.now(fixed if options.fixed else usual, before=before)
        save("traverse_memory", page(results, refused), run, options.output)


if __name__ == "__main__":
    main()
