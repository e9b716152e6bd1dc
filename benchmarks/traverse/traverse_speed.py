"""Networks run part by part and as a whole, timed in turns.

Each contender is a process of its own, and they work one at a time, in rounds that alternate their
order. One process for all would not do: `mallopt` turns glibc's own adjustment off for good, so the
contender with the tuned allocator would change the others'; and a compilation that takes too long
can be stopped only with its process.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import nan
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RLIMIT_DATA, setrlimit
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.common import turns
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.inductor import inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.traverse.traverse_memory import (
    MIB,
    Child,
    Failed,
    Setting,
    caught,
    engine_of,
    mebibytes,
    nbytes,
    peaked,
    ready,
    resident,
    trim,
    work,
)
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing
from demask.machine.describe import format_threads, load_average
from traverse_networks import named

BENCHMARK = Benchmark(
    "tiled networks and the untiled ones",
    "hours",
    needs=(DEV, SHARED_DATA),
    quick="--only squeeze-excite --sizes 256 --threads 1 --rounds 2 --least 0.05 --contenders NCHW|demask",
)

SIZES = {
    "TAEF2": (1024, 2048, 4096),
    "RRDB-23": (1024,),
    "U-Net": (1024,),
    "squeeze-excite": (1024,),
    "dense": (1024,),
    "SD decoder": (512,),
    "ResNet-18": (2048,),
    "dw12": (1024, 2048),
    "blur20": (2048, 4096),
    "pool20": (1024, 2048),
}
ROUNDS = 5
LEAST = 0.3  # seconds of untimed calls in a turn, and of timed ones
LONG = 3.0  # seconds of a call from which a turn is that call alone: nothing stays warm over it
HEAVY = 4096 * MIB  # more than this no process keeps while others have their turns
COMPILING = 300.0  # seconds that a compilation, with the first call, may take
LEFT = 3  # GiB of the machine's memory that are left to everything but the contender
MEMORY = "512MiB"

NCHW, NHWC = "untiled, NCHW", "untiled, channels_last"
TUNED, COMPILED = "channels_last, tuned allocator", "torch.compile, channels_last"
WHOLE = (NHWC, NCHW, TUNED, COMPILED)  # the first is what the others are compared with


# --- a contender, in its process ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """The first call. peak: bytes beyond those before it, output included. error: largest
    difference from the reference; flips: how many of its 8-bit values differ, None where it is no
    picture."""

    prepared: float
    seconds: float
    peak: int
    output: int
    error: float
    equal: bool
    flips: int | None
    macs: int


def serve(pipe: Connection, setting: Setting, who: str, reference: Path, limit: int) -> None:
    """Prepares a contender, calls and checks it, says how that went; then a turn per question."""
    setrlimit(RLIMIT_DATA, (limit, limit))  # an error here, and not the kernel's choice of a victim
    call: list[Callable[[], object]] = []
    first = caught(started, setting, who, reference, call)
    pipe.send(first)
    while not isinstance(first, Failed):
        try:
            (least,) = pipe.recv()
        except EOFError:
            return
        pipe.send(caught(turn, call[0], least, first.seconds, who))


@torch.no_grad()
def started(setting: Setting, who: str, reference: Path, call: list[Callable[[], object]]) -> Checked:
    """The contender's call is put into `call`; what it returns first is checked."""
    start = perf_counter()
    network, x = contender(setting, who)
    run = inductor(network, x) if who == COMPILED else partial(quietly, network, x)
    prepared = perf_counter() - start
    y: Any
    y, peak, seconds = peaked(run)
    macs = work(network, x) if who == NHWC else 0
    if who == NHWC:
        np.save(reference, y.numpy())
    error, equal, flips = compared(y, np.load(reference, mmap_mode="r"))
    call.append(run)
    return Checked(prepared, seconds, peak, nbytes(y), error, equal, flips, macs)


@torch.no_grad()
def quietly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def contender(setting: Setting, who: str) -> tuple[nn.Module, Tensor]:
    """The network as this contender runs it, and its input in the layout it likes."""
    if who == TUNED:
        fix_allocator()
    _, model, x = ready(setting)
    if who != NCHW:
        x = x.contiguous(memory_format=torch.channels_last)
    if who not in WHOLE:
        return engine_of(setting).tile(model, (x,), memory=who.partition(", ")[2]), x
    if who != NCHW:
        model = model.to(memory_format=torch.channels_last)
    return model, x


def compared(y: Tensor, expected: np.ndarray) -> tuple[float, bool, int | None]:
    """Largest difference, whether all is equal, and the 8-bit values that differ; channel by
    channel, since both may be large."""
    error, flips, equal = 0.0, 0, True
    for k in range(y.shape[1]):
        ours, theirs = y[:, k], torch.from_numpy(np.array(expected[:, k]))
        error = max(error, float((ours - theirs).abs().max()))
        equal = equal and torch.equal(ours, theirs)
        flips += int((eight_bit(ours) != eight_bit(theirs)).sum())
    return error, equal, flips if y.ndim == 4 else None


def eight_bit(y: Tensor) -> Tensor:
    """Values of a picture, of which 0 is black and 1 white, as they are stored.

    >>> eight_bit(torch.tensor([-1.0, 0.5, 2.0])).tolist()
    [0, 128, 255]
    """
    return (y.clamp(0, 1) * 255).round().to(torch.uint8)


def turn(call: Callable[[], object], least: float, last: float, who: str) -> float:
    """Seconds of a call; of long ones one alone, else the median of a few after others untimed.
    The tuned allocator's pool is filled by an untimed call however long it takes."""
    turns.settle()
    if last > LONG and who != TUNED:
        seconds = median(turns.repeated(call, 0.0))
    else:
        seconds = turns.turn(call, least)
    turns.settle()  # threads that spin would be in the next one's way
    if resident() > HEAVY:
        trim()
    return seconds


# --- rounds -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """One network, size and number of threads. checked: the contenders that ran, or why they did
    not. samples: seconds of every turn, by contender and round."""

    setting: Setting
    checked: dict[str, Checked | Failed] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def macs(self) -> int:
        return max((c.macs for c in self.checked.values() if isinstance(c, Checked)), default=0)

    def relative(self, who: str, other: str) -> float | None:
        """Seconds of one over those of the other: the median of the rounds."""
        pairs = zip(self.samples.get(who, []), self.samples.get(other, []), strict=False)
        ratios = [ours / theirs for ours, theirs in pairs]
        return median(ratios) if ratios else None


def measured(setting: Setting, options: argparse.Namespace, console: Console) -> Row:
    """All contenders started one after another, then their turns."""
    row, running = Row(setting), {}
    names = [who for who in (*WHOLE, *map(ours, options.memory)) if re.search(options.contenders, who)]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for who in dict.fromkeys([NHWC, *names]):
            child = Child(serve, setting, who, Path(folder, "reference.npy"), options.limit * 2**30)
            stack.callback(child.stop)
            patience = options.patience if who == COMPILED else float("inf")
            row.checked[who] = first = child.answer(patience)
            console.print(f"{setting.title}, {format_threads(setting.threads)}: {who}: {describe(first)}")
            if isinstance(first, Checked):
                running[who] = child
            elif who == NHWC:
                break  # nothing to compare with
        sampled(row, running, options, console)
    return row


def sampled(row: Row, running: dict[str, Child], options: argparse.Namespace, console: Console) -> None:
    """Adds the seconds of every turn. A contender that fails now is out, with its turns."""
    row.samples.update({who: [] for who in running})
    for k in range(options.rounds):
        for who in list(running)[:: -1 if k % 2 else 1]:
            seconds = running[who].ask(options.least)
            if isinstance(seconds, Failed):
                row.checked[who] = seconds
                del running[who], row.samples[who]
                continue
            row.samples[who].append(seconds)
        latest = (f"{who} {taken[-1]:.3f}" for who, taken in row.samples.items())
        console.print(f"  round {k + 1}: {'; '.join(latest)}")


def ours(memory: str) -> str:
    return f"demask, {memory}"


def describe(first: Checked | Failed) -> str:
    if isinstance(first, Failed):
        return first.reason
    return f"{first.seconds:.3f} s, {mebibytes(first.peak)} MiB, difference {first.error:.1e}"


# --- the page -----------------------------------------------------------------------------------

AGAINST = ["network", "threads", "contender", *(f"time over {who}" for who in WHOLE)]
HEAD = [
    "network",
    "threads",
    "contender",
    "ms",
    "GFLOP/s",
    "peak, MiB",
    "largest difference",
    "8-bit values that differ",
    "first, s",
]


def lines(row: Row) -> Iterator[list[Cell]]:
    """A line of the table per contender."""
    for who, checked in row.checked.items():
        first: list[Cell] = [row.setting.title, row.setting.threads, who]
        if isinstance(checked, Failed):
            yield [*first, f"not run: {checked.reason}", *[None] * (len(HEAD) - len(first) - 1)]
            continue
        taken = Timing.of(row.samples[who]) if row.samples[who] else None
        flops = 2e-9 * row.macs / taken.median if taken and row.macs else None
        yield [
            *first,
            taken,
            flops,
            checked.peak / MIB,
            "equal" if checked.equal else checked.error,
            checked.flips,
            checked.prepared,
        ]


def against(row: Row) -> Iterator[list[Cell]]:
    """A line per budget: its time over each untiled contender's."""
    for who in row.samples:
        if who not in WHOLE:
            ratios = (row.relative(who, other) for other in WHOLE)
            yield [row.setting.title, row.setting.threads, who, *ratios]


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    times = [[row[f"time over {who}"] for who in WHOLE] for row in rows]
    times = [[time for time in line if isinstance(time, float)] for line in times]
    speeds = [1 / max(line) for line in times if line] or [nan]
    lost = f"slower in {sum(speed < 1 for speed in speeds)} of {len(speeds)}"
    return f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as the fastest untiled; {lost}"


def page(rows: Sequence[Row], least: float) -> Page:
    text = f"""
Size: the side of the larger of input and output, in pixels. Batch 1, float32. *Untiled*: the model
as it is, NCHW being what torch does by default. *Tuned allocator*: glibc keeps what is freed
(`M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of 2 GB), so that no activation is faulted in anew.
*torch.compile*: with freezing, in channels_last. *demask*: `demask.traverse.tile` under the budget
named. All but *NCHW* take their input in channels_last.

Each contender is a process of its own; they take turns in rounds that alternate their order, with
everybody else at rest. A turn is one call where calls take over {LONG:.0f} s, else the median of
those of {least} s, after as many untimed ones. Milliseconds: the median (10 %–90 % quantile) of the
rounds; times over others': medians, round by round. *Peak*: of the first call, beyond what was
there before, output included. *Difference*: from untiled channels_last. *First*: what comes before
the first call: planning, compiling."""
    ratios = [line for row in rows for line in against(row)]
    contenders = [line for row in rows for line in lines(row)]
    tables = [Table(AGAINST, ratios, 3, merge=True), Table(HEAD, contenders, 3, merge=True)]
    return Page("Networks run part by part, and as a whole", [text, *tables], summarize)


# --- the command line ---------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", default=list(SIZES), metavar="NETWORK")
    add("--sizes", type=int, nargs="+", help="pixels a side, instead of each network's own")
    add("--threads", type=int, nargs="+", default=[2, 1])
    add("--rounds", type=int, default=ROUNDS)
    add("--memory", nargs="+", default=[MEMORY], metavar="BUDGET", help="of demask, e.g. 128MiB")
    add("--contenders", default="", metavar="PATTERN", help="only those whose name has it")
    add("--patience", type=float, default=COMPILING, help="seconds for torch.compile")
    add("--least", type=float, default=LEAST, help="seconds of a turn of short calls")
    add("--limit", type=int, default=max(in_all() // 2**30 - LEFT, 1), help="GiB that a contender may take")
    add("--engine", default="demask.traverse", metavar="MODULE")
    add("--output", type=Path, help="a page of its own, in place of the ledger")
    return parser.parse_args()


def in_all() -> int:
    """Bytes of memory of this machine."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    options, console, before = arguments(), Console(markup=False), load_average()
    named(options.only)
    settings = [
        Setting(name, size, threads, options.engine)
        for name in options.only
        for size in options.sizes or SIZES.get(name, (1024,))
        for threads in options.threads
    ]
    results = list[Row]()
    for k, setting in enumerate(settings, 1):
        console.print(f"{k} of {len(settings)}: {setting.title}")
        results.append(measured(setting, options, console))
        notes = "allocator tuned only where stated", f"{options.rounds} rounds"
        run = Run.now(*notes, before=before)
        save("traverse_speed", page(results, options.least), run, options.output)


if __name__ == "__main__":
    main()
