"""The TAEF2 decoder streamed into OME-Zarr and COG, with Dask workers, and after a kill:
`python -m benchmarks run stores`.

A picture of 16,384² pixels from a random latent, into each format, in a process of its own under
1 GB; one of 4,096² by 1, 2 and 4 worker processes of one thread each, and again after its process
was killed. `--rows` chooses from these.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.traverse.traverse_memory import MIB, Failed, caught, fresh, mebibytes, peaked, resident
from demask.machine.describe import format_threads, load_average
from demask.traverse import stream
from traverse_networks import NETWORKS, named

BENCHMARK = Benchmark(
    "TAEF2's decoder streamed into OME-Zarr and COG, by Dask workers, and after a kill",
    "hours",
    needs=(DEV, SHARED_DATA, "the extra `stream`"),
    quick="--large 1024 --size 1024 --memory 128MiB --budget 128MiB --workers 1 2",
)

NETWORK = "TAEF2"
SMALL = 256  # pixels a side of the picture that comes first, for the libraries' code


HEAD = ["what", "pixels", "workers", "seconds", "peak, MiB", "predicted, MiB", "values", "note"]
Answer = tuple[float, int, int] | Failed  # seconds, bytes at the peak, predicted bytes


def line(what: str, size: int, workers: int, answer: Answer, target: Path, note: str = "") -> list[Cell]:
    """A line of the table. workers: 0 for none."""
    first = [what, f"{size}²", str(workers or "none")]
    if isinstance(answer, Failed):
        return [*first, answer.reason, *[None] * (len(HEAD) - len(first) - 1)]
    seconds, peak, predicted = answer
    return [*first, seconds, peak / MIB if peak else None, predicted / MIB, digest_of(target)[:8], note]


def write_random(path: Path, side: int) -> Path:
    """A latent of random numbers, written channel by channel."""
    shape = (1, _channels(), side, side)
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    generator = np.random.default_rng(0)
    for k in range(shape[1]):
        file[0, k] = generator.standard_normal((side, side), np.float32)
    file.flush()
    return path


def _channels() -> int:
    return int(named([NETWORK])[NETWORK].inputs(SMALL)[0].shape[1])


def digest_of(path: Path) -> str:
    """A digest of the values of a result, rows by rows."""
    digest = hashlib.blake2b(digest_size=8)
    if path.suffix == ".zarr":
        import zarr

        array: Any = zarr.open(path, mode="r")["0"]
        for top in range(0, array.shape[1], 512):
            digest.update(np.ascontiguousarray(array[:, top : top + 512]).tobytes())
        return digest.hexdigest()
    import rasterio

    with rasterio.open(path) as data:
        for top in range(0, data.height, 512):
            rows = min(512, data.height - top)
            part = data.read(window=rasterio.windows.Window(0, top, data.width, rows))
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


# --- what the processes do ----------------------------------------------------------------------


def streamed(source: Path, target: Path, budget: str, threads: int) -> tuple[float, int, int]:
    """Seconds, peak and prediction of a stream in this process, after a small one."""
    torch.set_num_threads(threads)
    model = named([NETWORK])[NETWORK].make()
    small = write_random(source.with_name("small.npy"), SMALL // NETWORKS[NETWORK].grows)
    stream(model, small, target.with_name(f"small-{target.name}"), memory=budget, output="uint8")
    done, peak, seconds = peaked(lambda: stream(model, source, target, memory=budget, output="uint8"))
    return seconds, peak, done.peak


def begin_worker() -> int:
    """One thread; the memory of this worker now, from which its peak counts."""
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def warm(small: Path, budget: str) -> None:
    """A small stream in each worker, for the libraries' code."""
    streamed_once(small, small.with_name(f"warm-{os.getpid()}.npy"), budget)


def distributed(source: Path, target: Path, budget: str, workers: int) -> tuple[float, list[int], int]:
    """Seconds, the peak of each worker, and the prediction."""
    from distributed import Client, LocalCluster

    torch.set_num_threads(1)
    model = named([NETWORK])[NETWORK].make()
    small = write_random(source.with_name("small.npy"), SMALL // NETWORKS[NETWORK].grows)
    options: dict[str, Any] = {"memory": budget, "output": "uint8"}
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit=0,
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(warm, small, budget)
        stream(model, small, target.with_name("small.zarr"), client=client, **options)
        before = client.run(begin_worker)
        start = time.perf_counter()
        done = stream(model, source, target, client=client, **options)
        seconds = time.perf_counter() - start
        peaks = client.run(resident, "VmHWM")
    return seconds, [peaks[k] - before[k] for k in before], done.peak


def killed(source: Path, target: Path, budget: str, after: float) -> tuple[float, int, int]:
    """Seconds, rows done before and the prediction of a stream whose process was killed."""
    task = multiprocessing.get_context("spawn").Process(target=streamed_once, args=(source, target, budget))
    task.start()
    journal = target.with_name(f".{target.name}.partial") / "journal.jsonl"
    task.join(after)
    while task.is_alive() and not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
        time.sleep(0.2)
    task.kill()
    task.join()
    start = time.perf_counter()
    done = streamed_once(source, target, budget)
    return time.perf_counter() - start, done.resumed, done.peak


def streamed_once(source: Path, target: Path, budget: str) -> Any:
    """A stream with one thread."""
    torch.set_num_threads(1)
    model = named([NETWORK])[NETWORK].make()
    return stream(model, source, target, memory=budget, output="uint8")


# --- rows ---------------------------------------------------------------------------------------


def large(options: argparse.Namespace, folder: Path, *, name: str) -> Iterator[list[Cell]]:
    """A large picture in one format."""
    source = write_random(folder / "large.npy", options.large // NETWORKS[NETWORK].grows)
    answer = fresh(streamed, source, folder / name, options.memory, options.threads)
    yield line(name, options.large, 0, answer, folder / name)


def by_workers(options: argparse.Namespace, folder: Path) -> Iterator[list[Cell]]:
    """A picture by several numbers of workers."""
    source = write_source(options, folder)
    for count in options.workers:
        target, note = folder / f"workers-{count}.zarr", ""
        answer = caught(distributed, source, target, options.budget, count)
        if not isinstance(answer, Failed):
            seconds, peaks, predicted = answer
            note = f"peaks {', '.join(map(mebibytes, peaks))} MiB"
            answer = seconds, max(peaks), predicted
        yield line("workers", options.size, count, answer, target, note)


def after_a_kill(options: argparse.Namespace, folder: Path) -> Iterator[list[Cell]]:
    """The same picture, by a process that was killed and another that resumes."""
    source, target = write_source(options, folder), folder / "killed.zarr"
    answer, note = caught(killed, source, target, options.budget, options.kill), ""
    if not isinstance(answer, Failed):
        seconds, resumed, predicted = answer
        note = f"{resumed:,} rows of the result before the kill"
        answer = seconds, 0, predicted
    yield line("killed, then resumed", options.size, 1, answer, target, note)


def write_source(options: argparse.Namespace, folder: Path) -> Path:
    """The latent of the smaller pictures."""
    return write_random(folder / "source.npy", options.size // NETWORKS[NETWORK].grows)


ROWS: dict[str, Callable[[argparse.Namespace, Path], Iterator[list[Cell]]]] = {
    "zarr": partial(large, name="picture.ome.zarr"),
    "cog": partial(large, name="picture.cog.tif"),
    "workers": by_workers,
    "killed": after_a_kill,
}


TEXT = """
The TAEF2 decoder with its trained weights, from a random latent in a .npy file to pictures of 8-bit
values, by `demask.traverse.stream`. *Peak*: `VmHWM` less what was resident before the call, of the
process, or of the worker that took most. *Values*: a digest of the result, the same
for any number of workers, for none, and after a kill: the plan is one."""


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    said = (
        f"{row['what']} {row['pixels']}, workers {row['workers']}: {row['seconds']:.0f} s"
        for row in rows
        if isinstance(row["seconds"], float)
    )
    return "; ".join(said)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--large", type=int, default=16384, metavar="SIDE")
    add("--memory", default="1GB", help="budget of the large pictures")
    add("--size", type=int, default=4096, metavar="SIDE", help="of the picture of the workers")
    add("--budget", default="512MiB", help="of each worker")
    add("--workers", type=int, nargs="+", default=[1, 2, 4])
    add("--kill", type=float, default=20.0, metavar="SECONDS", help="at least, before the kill")
    add("--threads", type=int, default=2)
    add("--folder", type=Path, help="for the files, up to 3 GB; the system's by default")
    add("--output", type=Path, help="a page of its own, in place of the ledger")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    return parser.parse_args()


def main() -> None:
    options, console, before = arguments(), Console(markup=False), load_average()
    named([NETWORK])
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    rows = list[list[Cell]]()
    notes = f"{format_threads(options.threads)}, workers 1"
    with TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for row in chain.from_iterable(ROWS[what](options, folder) for what in options.rows):
            console.print(row)
            rows.append(row)
            page = Page("Streams into stores", [TEXT, Table(HEAD, rows, 3, merge=True)], summarize)
            save("stores", page, Run.now(notes, before=before), options.output)


if __name__ == "__main__":
    main()
