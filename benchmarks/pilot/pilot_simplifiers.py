"""Simplifiers of two networks: what each keeps, and what it costs. `demask pilot compare`, with
intervals, on trained ResNets for CIFAR-10."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import Progress

import cifar
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from demask.machine.allocator import fix_allocator
from demask.machine.describe import load_average
from demask.pilot import Comparison, compare
from demask.pilot.guarantee import clopper_pearson

BENCHMARK = Benchmark(
    "simplifiers of two networks: agreement and cost",
    "about 10 minutes",
    needs=(DEV, SHARED_DATA),
    quick="--depths 20 --images 50 --pairs 1",
)

BY = (
    "bits:8",
    "bits:6",
    "bits:4",
    "bits:4:64",
    "bits:2",
    "exponents",
    "rank:0.5",
    "rank:0.25",
    "channels:0.75",
    "channels:0.5",
    "downsample:2:bilinear",
    "downsample:2:area",
)
BATCH = 50
HEAD = [
    "network",
    "simplifier",
    "same class, %",
    "interval",
    "error",
    "correlation",
    "zeros: precision, %",
    "zeros: recall, %",
    "weights, %",
    "MACs, %",
    "times as fast",
]


def cells(network: str, comparison: Comparison) -> Iterator[list[Cell]]:
    """A row for each simplifier."""
    for row in comparison.rows:
        if row.refused:
            yield [network, row.by, None, f"refused: {row.refused}", *[None] * (len(HEAD) - 4)]
            continue
        same = comparison.same[row.by]
        low, high = clopper_pearson(sum(same), len(same))
        zeros = [None if share is None else 100 * share for share in (row.precision, row.recall)]
        yield [
            network,
            row.by,
            100 * sum(same) / len(same),
            f"{100 * low:.1f}–{100 * high:.1f}",
            row.error,
            row.correlation,
            *zeros,
            100 * row.weight_bytes / comparison.weight_bytes,
            100 * row.macs / comparison.macs,
            row.speed,
        ]


def page(rows: Sequence[Sequence[Cell]], images: int) -> Page:
    text = f"""
ResNets trained for CIFAR-10, {images:,} test images (JPEG). *Same class*: images on which the
simplified network names the class that the full one names, with a Clopper-Pearson interval of 95 %.
*Error*: of all outputs, relative, Euclidean. *Correlation*: of magnitudes per channel with the full
run's, mean over layers. *Zeros*: those after ReLU that the simplified run predicts, element by
element. *Weights*: bytes as they would be stored, of the full network's. *Times as fast*: as the
full network, in turns, one thread, batches of {BATCH}: rounded weights are computed with as float32
here, so theirs says nothing."""
    same = [share for row in rows if isinstance(share := row[2], float)]
    speeds = [row[-1] for row in rows if isinstance(row[-1], float) and row[-2] != 100]
    span = f"{min(speeds, default=1):.2f} to {max(speeds, default=1):.2f} times as fast"
    summary = (
        f"the same class on {min(same):.0f} to {max(same):.0f} % of images; with fewer "
        f"multiplications {span}, slower in {sum(n < 1 for n in speeds)} of "
        f"{len(speeds)}"
    )
    return Page("Simplifiers", [text, Table(HEAD, rows, 2)], summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", choices=(20, 56), default=(20, 56))
    parser.add_argument("--images", type=int, default=900)
    parser.add_argument("--pairs", type=int, default=11, help="calls of each, in turns; 0: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, at most, for each")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    torch.set_num_threads(1)
    calls = [(part,) for part in cifar.images(options.images)[0].split(BATCH)]
    rows: list[list[Cell]] = []
    with Progress(transient=True) as bar:
        for depth in options.depths:
            task = bar.add_task("", total=None)
            comparison = compare(
                cifar.trained(depth),
                calls,
                by=BY,
                pairs=options.pairs,
                seconds=options.seconds,
                progress=lambda words, task=task: bar.update(task, description=words),
            )
            rows += cells(f"ResNet-{depth}", comparison)
    run = Run.now(allocator, before=before)
    print(save("pilot_simplifiers", page(rows, options.images), run, options.output))


if __name__ == "__main__":
    main()
