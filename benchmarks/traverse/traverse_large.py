"""The TAEF2 decoder streamed to pictures of 4096² and 16384² pixels:
`python -m benchmarks run traverse_large`.

The smaller one is compared with the untiled run, which takes 12 GiB; the larger one, of which the
untiled run would take 192 GiB, is written to a memory-mapped file. Each is measured in a process of
its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.traverse.traverse_memory import MIB, SMALL, Failed, Setting, engine_of, fresh, mebibytes, peaked, ready
from benchmarks.traverse.traverse_speed import eight_bit
from demask.machine.describe import format_threads, load_average
from traverse_networks import NETWORKS, named, write_latent

BENCHMARK = Benchmark(
    "TAEF2's decoder streamed to pictures of 4096² and 16384² pixels",
    "hours",
    needs=(DEV, SHARED_DATA, "12 GiB of memory"),
    quick="--only 512 --threads 1 --memory 64MiB",
)

NETWORK = "TAEF2"
BUDGETS = {4096: "256MiB", 16384: "1GB"}  # under 1.0 GB of memory is the aim for the larger one
COMPARED = 4096  # the largest side at which the untiled run fits into 24 GiB


@dataclass(frozen=True, slots=True)
class Call:
    """One call. peak: bytes of memory beyond those before it, what of its output was in memory
    included. predicted: by the plan, 0 where there is none."""

    seconds: float
    peak: int
    predicted: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the 8-bit values of two pictures."""

    count: int
    values: int
    largest: int


@dataclass(frozen=True, slots=True)
class Row:
    """One size: streamed, and untiled where that was chosen. Failed says why there is none."""

    size: int
    budget: str
    streamed: Call | Failed
    whole: Call | Failed | None
    difference: Difference | None


# --- what the processes do ----------------------------------------------------------------------


@torch.no_grad()
def streamed(setting: Setting, source: Path, target: Path, budget: str) -> Call:
    """From file to file, in 8 bits. setting: of a small picture, run first unless it is cold."""
    _, model, x = ready(setting)
    engine = engine_of(setting)

    def call(source: Path) -> Any:
        return engine.stream(model, str(source), str(target), memory=budget, output="uint8")

    if not setting.cold:
        small = source.with_name("small.npy")
        np.save(small, x.numpy())
        call(small)
    plan, peak, seconds = peaked(lambda: call(source))
    return Call(seconds, peak, int(getattr(plan, "peak", 0)))


@torch.no_grad()
def whole(setting: Setting, source: Path, target: Path) -> Call:
    """The same by the untiled network in channels_last; the file is read and written untimed."""
    _, model, _ = ready(setting)
    model = model.to(memory_format=torch.channels_last)
    x = torch.from_numpy(np.load(source)).contiguous(memory_format=torch.channels_last)
    y, peak, seconds = peaked(lambda: model(x))
    file = np.lib.format.open_memmap(target, "w+", np.uint8, tuple(y.shape))
    for k in range(y.shape[1]):
        file[:, k] = eight_bit(y[:, k]).numpy()
    file.flush()
    return Call(seconds, peak)


# --- rows ---------------------------------------------------------------------------------------


def compared(ours: Path, theirs: Path) -> Difference:
    """Of two files of 8-bit values of one shape, channel by channel."""
    a, b = (np.load(path, mmap_mode="r") for path in (ours, theirs))
    if a.shape != b.shape or a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(f"expected two pictures, got {a.shape} {a.dtype}, {b.shape} {b.dtype}")
    gaps = [np.abs(a[:, k].astype(np.int16) - b[:, k]) for k in range(a.shape[1])]
    count = sum(int(np.count_nonzero(one)) for one in gaps)
    return Difference(count, a.size, max(int(one.max()) for one in gaps))


def measured(setting: Setting, options: argparse.Namespace, console: Console) -> Row:
    """One size: streamed, and compared where it can be."""
    size, budget = setting.size, options.memory or BUDGETS.get(setting.size, "1GB")
    small = replace(setting, size=SMALL)
    with TemporaryDirectory(dir=options.folder) as folder:
        source, ours, theirs = (Path(folder, f"{n}.npy") for n in ("latent", "ours", "theirs"))
        side = size // NETWORKS[NETWORK].grows
        write_latent(source, side, side)
        run = fresh(streamed, small, source, ours, budget)
        console.print(f"{size}², {budget}: {describe_run(run)}")
        against = fresh(whole, small, source, theirs) if size <= options.compared else None
        console.print(f"{size}², untiled: {describe_run(against)}")
        both = isinstance(run, Call) and isinstance(against, Call)
        difference = compared(ours, theirs) if both else None
    return Row(size, budget, run, against, difference)


def describe_run(run: Call | Failed | None) -> str:
    if run is None:
        return "not run"
    if isinstance(run, Failed):
        return run.reason
    return f"{run.seconds:.1f} s, {mebibytes(run.peak)} MiB"


HEAD = [
    "pixels",
    "budget",
    "streamed, s",
    "streamed, MiB",
    "predicted, MiB",
    "untiled, s",
    "untiled, MiB",
    "8-bit values that differ",
    "of",
    "by at most",
]


def cells(row: Row) -> list[Cell]:
    predicted = row.streamed.predicted / MIB if isinstance(row.streamed, Call) else None
    gap = row.difference
    differing = [None] * 3 if gap is None else [gap.count, gap.values, gap.largest]
    return [f"{row.size}²", row.budget, *run_cells(row.streamed), predicted, *run_cells(row.whole), *differing]


def run_cells(run: Call | Failed | None) -> list[Cell]:
    if isinstance(run, Call):
        return [run.seconds, run.peak / MIB]
    return ["not run" if run is None else run.reason, None]


TEXT = """
The TAEF2 decoder with its trained weights, from a latent in a .npy file (a photograph's, reflected
as in mirrors) to a picture of 8-bit values in another, by `demask.traverse.stream`. *MiB*:
`VmHWM` of a process of its own less what was resident before the call; planning, reading and
writing included, but for what a first, small picture brought into memory: the libraries' code.
*Untiled*: the network as it is, in channels_last; reading and writing are not in its numbers, its
input neither."""


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    def words(row: Mapping[str, Any], kind: str) -> str:
        seconds, peak = row[f"{kind}, s"], row[f"{kind}, MiB"]
        return f"{peak:,.0f} MiB and {seconds:,.0f} s" if isinstance(peak, float) else seconds

    return "; ".join(
        f"{row['pixels']}: streamed {words(row, 'streamed')}, untiled {words(row, 'untiled')}" for row in rows
    )


def page(rows: Sequence[Row]) -> Page:
    table = Table(HEAD, [*map(cells, rows)], 2, merge=True)
    return Page("Pictures larger than memory", [TEXT, table], summarize)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=int, nargs="+", default=list(BUDGETS), metavar="SIDE", help="pixels")
    add("--memory", metavar="BUDGET", help="instead of each size's own")
    add("--compared", type=int, default=COMPARED, metavar="SIDE", help="largest size that is run untiled, too")
    add("--threads", type=int, default=2)
    add("--folder", type=Path, help="for the files, up to 1.4 GB; the system's by default")
    add("--cold", action="store_true", help="no small picture comes first")
    add("--engine", default="demask.traverse", metavar="MODULE")
    add("--output", type=Path, help="a page of its own, in place of the ledger")
    return parser.parse_args()


def main() -> None:
    options, console, rows, before = arguments(), Console(markup=False), [], load_average()
    named([NETWORK])
    for size in options.only:
        setting = Setting(NETWORK, size, options.threads, options.engine, cold=options.cold)
        rows.append(measured(setting, options, console))
        notes = format_threads(options.threads), "allocator not tuned"
        save("traverse_large", page(rows), Run.now(*notes, before=before), options.output)


if __name__ == "__main__":
    main()
