"""Masked and demasked residual networks, timed in turns with networks built by hand:
`python -m benchmarks run residual`.

ResNet-20 and -56 have their trained CIFAR-10 weights (shared/data next to the project) and real
images; the wide one is random. Half of each convolution's output channels are masked, drawn anew
for each layer, so the sides of a residual add never agree. Writes benchmarks/results/residual.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from rich.progress import Progress
from torch import Tensor, nn

import cifar
import demask
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.command import command
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Table
from demask.graph.capture.capture import capture
from demask.judge import ULPS
from demask.machine.clock import Timing, race
from demask.machine.describe import format_counts
from networks import randomised

BENCHMARK = Benchmark(
    "ResNet-20, -56 and a wide one: masked, demasked, and built by hand at the widths left",
    "at most 20 s a setting",
    needs=(DEV, SHARED_DATA),
    quick="--threads 1 --pairs 3 --seconds 2",
)

NETWORKS = ("ResNet-20", "ResNet-56", "ResNet-20, 4 x wide")
BATCHES = (64, 1)


def network(name: str, generator: torch.Generator) -> cifar.ResNet:
    """A network by name; FileNotFoundError where its weights are not next to the project."""
    if name.endswith("wide"):
        model = cifar.ResNet(20, 64)
        randomised(model, generator, gain=2.0)
        return model
    return cifar.trained(int(name.rpartition("-")[2]))


@dataclass(frozen=True, slots=True)
class Row:
    """One network in one setting. difference: relative, in float64. calls: before and after.
    compiled: by torch.compile, the masked and the demasked network."""

    network: str
    shifts: str
    batch: int
    threads: int
    report: demask.Report
    calls: tuple[int, int]
    difference: float
    masked: Timing
    result: Timing
    hand: Timing
    compiled: tuple[Timing, Timing]

    @property
    def speed(self) -> float:
        """How many times as fast the demasked network is: the ratio of the medians."""
        return self.masked.median / self.result.median


def rows(threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    """Every network, masked in both ways, at every batch size and number of threads."""
    tasks = [(name, shifts) for name in NETWORKS for shifts in (True, False)]
    step = bar.add_task("", total=len(tasks) * len(BATCHES) * len(threads))
    pixels, _ = cifar.images(max(BATCHES))
    for name, shifts in tasks:
        bar.update(step, description=f"demasking {name}")
        generator = torch.Generator().manual_seed(0)
        model = cifar.masked(network(name, generator), generator, shifts=shifts)
        example = (pixels[:2],)
        slim = demask.demask(model, example, result="graph")
        hand = cifar.HandResNet(model)
        difference = checked(model, slim, example)
        report, calls = demask.report(slim), (calls_of(model, example), calls_of(slim, example))
        for batch in BATCHES:
            for count in threads:
                bar.update(step, description=f"{name}, batch {batch}, {count} threads")
                models = {"masked": model, "result": slim, "hand": hand}
                times = timed(models, pixels[:batch], count, pairs, seconds)
                shift_kind = "nonzero" if shifts else "zero"
                yield Row(name, shift_kind, batch, count, report, calls, difference, *times[:3], (times[3], times[4]))
                bar.advance(step)


def calls_of(model: nn.Module, example: tuple[Tensor]) -> int:
    """The calls of the captured graph."""
    return sum(node.op == "call_function" for node in capture(model, example).graph.nodes)


def checked(model: nn.Module, slim: nn.Module, example: tuple[Tensor]) -> float:
    """The relative difference of the two in float64, both computed there; raises Mismatch above
    1e-10, or where the float32 networks that are timed differ by more than 64 ulps."""
    ulps = demask.verify(model, slim, example, check=False).ulps
    if ulps > ULPS:
        raise demask.Mismatch(f"expected at most {ULPS:g} ulps in float32, got {ulps:.3g}")
    wide, inputs = deepcopy(model).double(), (example[0].double(),)
    return demask.verify(wide, demask.demask(wide, inputs, result="graph"), inputs).max_rel


def timed(models: dict[str, nn.Module], images: Tensor, threads: int, pairs: int, seconds: float) -> list[Timing]:
    """All networks on the same images, called in turns: in the order of `models`, and then the
    masked and the demasked one by torch.compile."""
    torch.set_num_threads(threads)
    calls: dict[str, Callable[[], object]] = {name: lambda model=model: model(images) for name, model in models.items()}
    calls |= {f"{name}, {NAME}": inductor(models[name], images) for name in ("masked", "result")}
    with torch.no_grad():
        timings = Timing.of_each(race(calls, pairs, seconds=seconds))
    return list(timings.values())


HEAD = [
    "network",
    "shifts",
    "batch",
    "threads",
    "parameters",
    "MACs left",
    "masked, ms",
    "demasked, ms",
    "speed",
    "by hand, ms",
    f"masked, {NAME}, ms",
    f"demasked, {NAME}, ms",
    "difference",
]


def cells(row: Row) -> list[Cell]:
    before, after = row.report.before, row.report.after
    return [
        row.network,
        row.shifts,
        row.batch,
        row.threads,
        f"{before.parameters:,} → {after.parameters:,}",
        after.macs / before.macs,
        row.masked,
        row.result,
        row.speed,
        row.hand,
        *row.compiled,
        row.difference,
    ]


def page(rows: Sequence[Row]) -> Page:
    counts = format_counts(t for row in rows for t in (row.masked, row.result, row.hand))
    speeds = [row.speed for row in rows]
    slower = sum(speed < 1 for speed in speeds)
    text = f"""
Half of each convolution's output channels are masked, drawn anew for each layer. Shifts *nonzero*:
batch norms stay as they are, so masked channels are constants; *zero*: they are 0. ResNet-20 and
-56 have their trained weights, the wide one random ones; images are real. Milliseconds are the
median (10 %–90 % quantile) of {counts} alternated calls of each network in one process.
*Demasked*: `demask.demask(model, images, result="graph")`. *By hand*:
a module written for the widths that are left, joins by slices and index_add; where shifts are
nonzero it lacks what constants need (border maps, constants at joins), so it is less work there.
*MACs left*: demasked / masked. *Difference*: relative to the largest output, in float64."""
    calls = """
Fewer MACs are no speed where a forward pass is mostly calls: the demasked graph has more of them,
some only to keep shapes or to give constants their border; border maps of one size are one call.
The ratio depends on the allocator: with memory returned to the kernel each forward pass faults
its activations in again, which favors the network that allocates less. `demask()` is minimal and
knows no machine: it times nothing, and never rounds an odd channel count up."""
    first = {(row.network, row.shifts): row for row in rows}.values()
    effects = [[r.network, r.shifts, f"{r.calls[0]} → {r.calls[1]}", *r.report.scatters.values()] for r in first]
    return Page(
        "Residual networks, masked and demasked",
        [
            text,
            Table(HEAD, [*map(cells, rows)], 4),
            calls,
            Table(["network", "shifts", "calls", *rows[0].report.scatters], effects, 2),
        ],
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as masked; slower in {slower} of {len(rows)}",
    )


def main() -> None:
    command("residual", __doc__, rows, page, seconds=8.0)


if __name__ == "__main__":
    main()
