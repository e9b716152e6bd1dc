"""The TAEF2 decoder streamed to pictures of 4096² and 16384² pixels:
`python -m benchmarks run traverse_large`.

The smaller one is compared with the untiled run, which takes 12 GiB; the larger one, of which the
untiled run would take 192 GiB, is written to a memory-mapped file and drawn smaller. Each is
measured in a process of its own. Writes benchmarks/results/traverse_large.md and .json, and the
pictures next to them with --pictures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from benchmarks.traverse.traverse_memory import (
    SMALL,
    Failed,
    Setting,
    engine_of,
    fresh,
    mebibytes,
    peaked,
    ready,
)
from benchmarks.traverse.traverse_speed import eight_bit
from demask.files import atomic_write as atomic
from traverse_networks import NETWORKS, named, write_latent

BENCHMARK = Benchmark(
    "TAEF2's decoder streamed to pictures of 4096² and 16384² pixels", "hours",
    ("traverse_large.md", "traverse_large.json", "traverse_large_4096.png",
     "traverse_large_16384.png"),
    needs=(DEV, SHARED_DATA, "12 GiB of memory"), quick="--only 512 --threads 1 --memory 64MiB",
)  # fmt: skip

NETWORK = "TAEF2"
BUDGETS = {4096: "256MiB", 16384: "1GB"}  # under 1.0 GB of memory is the aim for the larger one
COMPARED = 4096  # the largest side at which the untiled run fits into 24 GiB
SHOWN = 1024  # pixels a side of the pictures drawn


@dataclass(frozen=True, slots=True)
class Run:
    """One run. peak: bytes of memory beyond those before it, what of its output was in memory
    included. predicted: by the plan, 0 where there is none. words: its report."""

    seconds: float
    peak: int
    predicted: int = 0
    words: str = ""


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
    streamed: Run | Failed
    whole: Run | Failed | None
    difference: Difference | None


# --- what the processes do ----------------------------------------------------------------------


@torch.no_grad()
def streamed(setting: Setting, source: Path, target: Path, budget: str) -> Run:
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
    return Run(seconds, peak, int(getattr(plan, "peak", 0)), str(plan or ""))


@torch.no_grad()
def whole(setting: Setting, source: Path, target: Path) -> Run:
    """The same by the untiled network in channels_last; the file is read and written untimed."""
    _, model, _ = ready(setting)
    model = model.to(memory_format=torch.channels_last)
    x = torch.from_numpy(np.load(source)).contiguous(memory_format=torch.channels_last)
    y, peak, seconds = peaked(lambda: model(x))
    file = np.lib.format.open_memmap(target, "w+", np.uint8, tuple(y.shape))
    for k in range(y.shape[1]):
        file[:, k] = eight_bit(y[:, k]).numpy()
    file.flush()
    return Run(seconds, peak)


# --- pictures -----------------------------------------------------------------------------------


def compared(ours: Path, theirs: Path) -> Difference:
    """Of two files of 8-bit values of one shape, channel by channel."""
    a, b = (np.load(path, mmap_mode="r") for path in (ours, theirs))
    if a.shape != b.shape or a.dtype != np.uint8 or b.dtype != np.uint8:
        raise ValueError(f"expected two pictures, got {a.shape} {a.dtype}, {b.shape} {b.dtype}")
    gaps = [np.abs(a[:, k].astype(np.int16) - b[:, k]) for k in range(a.shape[1])]
    count = sum(int(np.count_nonzero(one)) for one in gaps)
    return Difference(count, a.size, max(int(one.max()) for one in gaps))


def smaller(picture: np.ndarray, side: int) -> np.ndarray:
    """(rows, columns, 3) means of square blocks of a picture (1, 3, size, size), strip by strip."""
    step = max(picture.shape[2] // side, 1)
    strips = []
    for start in range(0, picture.shape[2] // step * step, step):
        strip = picture[0, :, start : start + step].astype(np.float32)
        strips.append(strip.reshape(3, step, -1, step).mean((1, 3)))
    return np.rint(np.stack(strips)).astype(np.uint8).transpose(0, 2, 1)


def draw(file: Path, target: Path) -> None:
    """A PNG of a file's picture, downsampled."""
    from PIL import Image

    image = Image.fromarray(smaller(np.load(file, mmap_mode="r"), SHOWN))
    with atomic.write(target) as out:
        image.save(out, format="png")


# --- rows ---------------------------------------------------------------------------------------


def measured(setting: Setting, options: argparse.Namespace, console: Console) -> Row:
    """One size: streamed, compared where it can be, and drawn where that was chosen."""
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
        both = isinstance(run, Run) and isinstance(against, Run)
        difference = compared(ours, theirs) if both else None
        if options.pictures and isinstance(run, Run):
            draw(ours, options.output.with_name(f"traverse_large_{size}.png"))
    return Row(size, budget, run, against, difference)


def describe_run(run: Run | Failed | None) -> str:
    if run is None:
        return "not run"
    if isinstance(run, Failed):
        return run.reason
    return f"{run.seconds:.1f} s, {mebibytes(run.peak)} MiB"


HEAD = ["pixels", "budget", "seconds", "peak, MiB", "predicted", "untiled, s",
        "untiled's peak, MiB", "8-bit values that differ", "by at most"]  # fmt: skip


def cells(row: Row) -> list[str]:
    predicted = row.streamed.predicted if isinstance(row.streamed, Run) else 0
    return [
        f"{row.size}²", row.budget, *_run(row.streamed), mebibytes(predicted) if predicted else "",
        *_run(row.whole), *_difference(row),
    ]  # fmt: skip


def _run(run: Run | Failed | None) -> list[str]:
    if isinstance(run, Run):
        return [f"{run.seconds:.1f}", mebibytes(run.peak)]
    return ["not run" if run is None else run.reason, ""]


def _difference(row: Row) -> list[str]:
    difference = row.difference
    return (
        ["", ""]
        if difference is None
        else [f"{difference.count:,} of {difference.values:,}", f"{difference.largest}"]
    )


def page(rows: Sequence[Row], words: str) -> str:
    said = "".join(
        f"- {row.size}²: {row.streamed.words}\n"
        for row in rows
        if isinstance(row.streamed, Run) and row.streamed.words
    )
    return f"""# Pictures larger than memory

{words}

The TAEF2 decoder with its trained weights, from a latent in a .npy file (a photograph's, reflected
as in mirrors) to a picture of 8-bit values in another, by `demask.traverse.stream`. *Peak*:
`VmHWM` of a process of its own less what was resident before the call; planning, reading and
writing included, but for what a first, small picture brought into memory: the libraries' code.
*Untiled*: the network as it is, in channels_last; reading and writing are not in its numbers, its
input neither.

{markdown(HEAD, [cells(row) for row in rows])}

{said}"""


def write(rows: Sequence[Row], words: str, output: Path) -> None:
    """The page, and the rows next to it as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(rows, words).rstrip() + "\n")
    stored = {"words": words, "rows": [asdict(row) for row in rows]}
    output.with_suffix(".json").write_text(json.dumps(stored, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=int, nargs="+", default=list(BUDGETS), metavar="SIDE", help="pixels")
    add("--memory", metavar="BUDGET", help="instead of each size's own")
    add("--compared", type=int, default=COMPARED, metavar="SIDE",
        help="largest size that is run untiled, too")  # fmt: skip
    add("--threads", type=int, default=2)
    add("--folder", type=Path, help="for the files, up to 1.4 GB; the system's by default")
    add("--cold", action="store_true", help="no small picture comes first")
    add("--pictures", action="store_true", help="write them as PNG, 1024 pixels a side at most")
    add("--engine", default="demask.traverse", metavar="MODULE")
    add("--output", type=Path, default=RESULTS / "traverse_large.md")
    return parser.parse_args()


def main() -> None:
    options, console, rows, before = arguments(), Console(markup=False), [], load_average()
    named([NETWORK])
    for size in options.only:
        setting = Setting(NETWORK, size, options.threads, options.engine, cold=options.cold)
        rows.append(measured(setting, options, console))
        notes = f"{options.threads} threads", "allocator not tuned"
        words = provenance("traverse_large", *notes, before=before)
        write(rows, words, options.output)


if __name__ == "__main__":
    main()
