"""Causal decoders of videos, laid out as Wan's and CogVideoX's with random weights: untiled, within
budgets of memory, and in chunks of frames: `python -m benchmarks run video`.

Every number is measured in a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.common.catalog import Benchmark
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save, text_of
from benchmarks.traverse.traverse_memory import MIB, Failed, fresh, nbytes, peaked
from demask.errors import BudgetTooSmall
from demask.machine.describe import format_threads, load_average
from demask.traverse import tile
from video_networks import CogVideoXDecoder, WanDecoder

BENCHMARK = Benchmark(
    "causal decoders of videos: untiled, within budgets, and in chunks of frames",
    "minutes",
    quick="--size 6 --frames 5 --only Wan",
)

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "Wan": lambda: WanDecoder(16, 16, 1),
    "CogVideoX, norms of each frame": lambda: CogVideoXDecoder(16, 16, 8, 1, per_frame=True),
    "CogVideoX": lambda: CogVideoXDecoder(16, 16, 8, 1),
}
SHARES = (3, 8)  # budgets are the untiled run's memory over these
CHUNK, OVERLAPS = 2, (1, 3)  # latent frames; odd, as CogVideoX takes an odd number of frames
HEAD = [
    "network",
    "contender",
    "budget, MiB",
    "predicted, MiB",
    "measured, MiB",
    "seconds",
    "MACs over untiled",
    "largest error",
    "of the largest value",
]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run: a network's name, latent frames, rows and columns of the latent, threads, and
    the file of the untiled result."""

    network: str
    frames: int
    size: int
    threads: int
    expected: str


@dataclass(frozen=True, slots=True)
class Call:
    """One contender, in bytes and seconds. budget, predicted, work: of plans, else None."""

    network: str
    contender: str
    peak: int
    seconds: float
    error: float
    largest: float
    budget: int | None = None
    predicted: int | None = None
    work: float | None = None

    def cells(self) -> list[Cell]:
        planned = [n and n / MIB for n in (self.budget, self.predicted)]
        return [
            self.network,
            self.contender,
            *planned,
            self.peak / MIB,
            self.seconds,
            self.work,
            self.error,
            self.error / self.largest,
        ]


def ready(setting: Setting) -> tuple[nn.Module, Tensor]:
    """A network and its latent; a small call brings the libraries' code into memory first."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    model = NETWORKS[setting.network]().eval()
    model(torch.randn(1, 16, 3, 4, 4))
    return model, torch.randn(1, 16, setting.frames, setting.size, setting.size)


def measured(setting: Setting, contender: str, call: Callable[[], Any], **planned: Any) -> Call:
    """Memory of a first call without its result, seconds of a second, error to the untiled."""
    y, peak, _ = peaked(call)
    peak = max(peak - nbytes(y), 0)
    del y
    start = perf_counter()
    y = call()
    seconds = perf_counter() - start
    path = Path(setting.expected)
    if not path.exists():
        torch.save(y, path)
    expected = torch.load(path)
    error, largest = float((y - expected).abs().max()), float(expected.abs().max())
    return Call(setting.network, contender, peak, seconds, error, largest, **planned)


@torch.no_grad()
def untiled(setting: Setting) -> Call:
    model, z = ready(setting)
    return measured(setting, "untiled", lambda: model(z))


@torch.no_grad()
def compiled(setting: Setting) -> Call:
    model, z = ready(setting)
    return measured(setting, NAME, inductor(model, z))


@torch.no_grad()
def tiled(setting: Setting, share: int, whole: int) -> Call:
    """In a share of the untiled memory; where there is no plan for it, in the least."""
    model, z = ready(setting)
    budget = whole // share
    try:
        module = tile(model, (z,), memory=budget)
    except BudgetTooSmall as error:
        budget = error.least
        module = tile(model, (z,), memory=budget)
    plan = module.plan
    return measured(
        setting, f"`tile`, 1/{share}", lambda: module(z), budget=budget, predicted=int(plan.peak), work=plan.recompute
    )


@torch.no_grad()
def chunked(setting: Setting, overlap: int) -> Call:
    """The untiled network on CHUNK latent frames at a time and `overlap` before them, whose frames
    are dropped: what earlier frames left in its layers is lost."""
    model, z = ready(setting)
    words = f"chunks of {CHUNK} latent frames, {overlap} before"
    return measured(setting, words, lambda: in_chunks(model, z, overlap))


def in_chunks(model: nn.Module, z: Tensor, overlap: int) -> Tensor:
    """The frames of all chunks; a first one has one latent frame more, which becomes one frame."""
    count, size = z.shape[2], 8 * z.shape[3]
    video = torch.empty(1, 3, 4 * (count - 1) + 1, size, size)
    video[:, :, : 4 * CHUNK + 1] = model(z[:, :, : CHUNK + 1])
    for first in range(CHUNK + 1, count, CHUNK):
        chunk = model(z[:, :, max(first - overlap, 0) : first + CHUNK])
        start = 4 * (first - 1) + 1
        video[:, :, start : start + 4 * CHUNK] = chunk[:, :, -4 * CHUNK :]
    return video


def calls(setting: Setting, console: Console) -> list[Call]:
    whole = fresh(untiled, setting)
    if isinstance(whole, Failed):
        raise SystemExit(f"{setting.network}: {whole.reason}")
    tasks: list[tuple[Callable[..., Call], tuple[int, ...]]] = [(compiled, ())]
    tasks += [(tiled, (share, whole.peak)) for share in SHARES]
    tasks += [(chunked, (overlap,)) for overlap in OVERLAPS]
    results = [whole]
    for task, numbers in tasks:
        call = fresh(task, setting, *numbers)
        if isinstance(call, Failed):
            raise SystemExit(f"{setting.network}, {task.__name__} {numbers}: {call.reason}")
        results.append(call)
        console.print("; ".join(map(text_of, call.cells())))
    return results


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the plans, against the faster of the untiled and the compiled network."""
    whole: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["contender"] in ("untiled", NAME):
            whole.setdefault(row["network"], []).append(row)
    plans = [row for row in rows if row["budget, MiB"] is not None]
    speeds = [min(other["seconds"] for other in whole[row["network"]]) / row["seconds"] for row in plans]
    shares = [row["measured, MiB"] / whole[row["network"]][0]["measured, MiB"] for row in plans]
    return (
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as the fastest whole network, "
        f"in {min(shares):.2f} to {max(shares):.2f} of the untiled memory; slower in "
        f"{sum(speed < 1 for speed in speeds)} of {len(speeds)}"
    )


def page(results: Sequence[Call], options: argparse.Namespace) -> Page:
    frames, size = 4 * (options.frames - 1) + 1, 8 * options.size
    text = f"""
Causal decoders laid out as those of Wan 2.1 and CogVideoX, narrower and with random weights, from
{options.frames} latent frames of {options.size} x {options.size} to {frames} frames of
{size} x {size} in float32. *tile*: in a share of the untiled memory, or the least there is a plan
for. *Predicted*: `plan.peak`. *Measured*: what the process takes at most during a first call (of
torch.compile: the first after compiling), beyond what it took before and without the result.
Seconds are of a second call. *Chunks*: the untiled network on {CHUNK} latent frames at a time with
some before them, whose frames are dropped; a causal network remembers more than those, and norms
over all frames (CogVideoX) see a chunk alone, so that frames differ. Wan's values end at -1 and 1,
so that an error of 2 is the largest there is."""
    table = Table(HEAD, [call.cells() for call in results], 2, merge=True)
    return Page("Decoders of videos", [text, table], summarize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--frames", type=int, default=9, help="latent frames, an odd number")
    parser.add_argument("--size", type=int, default=16, help="rows and columns of the latent")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    before, console, results = load_average(), Console(markup=False), list[Call]()
    for name in options.only:
        with TemporaryDirectory() as folder:
            expected = str(Path(folder, "untiled.pt"))
            setting = Setting(name, options.frames, options.size, options.threads, expected)
            results += calls(setting, console)
        run = Run.now(format_threads(options.threads), before=before)
        save("video", page(results, options), run, options.output)


if __name__ == "__main__":
    main()
