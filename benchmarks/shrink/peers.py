"""demask and its peers on the same masks, in one run: `python -m benchmarks run peers`.

Each network gets random weights and batch norm statistics (ResNet-56: trained ones, and it sees
photographs), and half of each convolution's output channels are zeroed, drawn anew for each layer.
Every contender starts from that same network: how it is called, and which settings it needed, is in
`peers_called.CALLED`. The masked network is the reference of all errors and speeds.

Needs the `bench` extra and torchvision (`make bench` installs both).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.utils import prune

import cifar
import networks
from benchmarks.common.catalog import BENCH, SHARED_DATA, Benchmark
from benchmarks.common.inductor import forget
from benchmarks.common.ledger import Cell, Derived, Page, Run, Table, save
from benchmarks.shrink.peers_called import (
    CALLED,
    DEMASK,
    FOLDED,
    MASKED,
    OPENVINO,
    PLAIN,
    SLIM_COMPILED,
    TORCH,
    WRONG,
    Outcome,
    outcomes,
    relative,
)
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, race
from demask.machine.describe import format_counts, load_average

BENCHMARK = Benchmark(
    "demask, torch-pruning, torch-simplify and OpenVINO on the same masks: speed and error",
    "at most 20 s a setting, and export",
    needs=(BENCH, SHARED_DATA),
    quick="--networks resnet18 --batches 1 --threads 1 --pairs 3 --seconds 3 --size 64",
)

NETWORKS = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "shufflenet_v2_x1_0",
    "densenet121",
    "vgg11_bn",
    "efficientnet_b0",
    "squeezenet1_1",
    "ResNet-56",
)
CIFAR = "ResNet-56"  # trained, on photographs of 32 x 32
PACKAGES = ("torch-simplify", "torch-pruning", "openvino", "torchvision")


def prepared(name: str, shifts: bool, size: int) -> tuple[nn.Module, Tensor]:
    """The masked network, zeros in its weights and no hooks, with two images.

    The layer that computes the outputs is not masked. shifts: masked channels keep their bias and
    batch norm, so they are constants; else whatever a dead channel meets is zeroed as well.
    """
    generator = torch.Generator().manual_seed(0)
    model = cifar.trained(56) if name == CIFAR else networks.built(name, generator)
    networks.mask(getattr(model, "features", model), generator)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and prune.is_pruned(layer):
            prune.remove(layer, "weight")
    images = drawn(name, 2, size, generator)
    return model if shifts else shiftless(model, images), images


def drawn(name: str, batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Images for a network: CIFAR's, or random ones."""
    if name == CIFAR:
        return cifar.images(batch)[0]
    return torch.randn(batch, 3, size, size, generator=generator)


@torch.no_grad()
def shiftless(model: nn.Module, images: Tensor) -> nn.Module:
    """The model, in place, with dead channels 0: their biases and batch norms are zeroed."""

    def silence(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        dead = inputs[0].abs().amax((0, 2, 3)) == 0
        for values in (norm.weight, norm.bias, norm.running_mean):
            values[dead] = 0

    hooks = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            layer.bias[layer.weight.flatten(1).abs().amax(1) == 0] = 0
        if isinstance(layer, nn.BatchNorm2d):
            hooks.append(layer.register_forward_pre_hook(silence))
    model(images)
    for hook in hooks:
        hook.remove()
    return model


@dataclass(frozen=True, slots=True)
class Case:
    """One masked network and the results of all contenders.

    rounding: the masked network's own error in float32. signal: the difference of its outputs on
    two images. Both relative to the largest output, as errors are.
    """

    network: str
    shifts: str
    rounding: float
    signal: float
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """The timings of one case in one setting; contenders that failed have none."""

    case: Case
    batch: int
    threads: int
    timings: Mapping[str, Timing]

    def faster(self) -> list[str]:
        """Contenders in torch that were faster than demask, which is a loss."""
        medians = {who: self.timings[who].median for who in TORCH if who in self.timings}
        own = medians.pop(DEMASK, 0.0)
        ours = (FOLDED, SLIM_COMPILED)
        return [who for who in medians if who not in ours and medians[who] < own]


def case(name: str, shifts: str, size: int) -> Case:
    """The results of all contenders on one masked network."""
    torch.set_num_threads(1)
    model, images = prepared(name, shifts == "kept", size)
    with torch.inference_mode():
        expected = model(images)
        exact = deepcopy(model).double()(images.double())
    return Case(
        name, shifts, relative(exact, expected), relative(expected, expected.flip(0)), outcomes(model, images, expected)
    )


def timed(case: Case, images: Tensor, threads: int, pairs: int, seconds: float) -> Row:
    """Torch's contenders in turns, then OpenVINO's: so that one pool of threads is at work."""
    torch.set_num_threads(threads)
    timings: dict[str, Timing] = {}
    with torch.no_grad():
        for family in (TORCH, OPENVINO):
            ready = {w: o.ready(images, threads) for w in family if (o := case.outcomes[w]).ready}
            calls = {w: (lambda call=call: call(images)) for w, call in ready.items()}
            timings |= Timing.of_each(race(calls, pairs, 2, seconds=seconds)) if calls else {}
    return Row(case, len(images), threads, timings)


def rows(options: argparse.Namespace, bar: Progress, skipped: dict[str, str]) -> Iterator[Row]:
    """Every network, masked both ways, at every batch size and number of threads."""
    tasks = [(name, shifts) for name in options.networks for shifts in options.shifts]
    step = bar.add_task("", total=len(tasks) * len(options.batches) * len(options.threads))
    for name, shifts in tasks:
        bar.update(step, description=f"shrinking {name}, shifts {shifts}")
        try:
            network_case = case(name, shifts, options.size)
        except FileNotFoundError:
            skipped[name] = "its weights or images are not in shared/data next to the project"
            bar.advance(step, len(options.batches) * len(options.threads))
            continue
        part = []
        for batch, threads in product(options.batches, options.threads):
            bar.update(step, description=f"{name}, batch {batch}, {threads} threads")
            images = drawn(name, batch, options.size, torch.Generator().manual_seed(batch))
            forget()
            part.append(timed(network_case, images, threads, options.pairs, options.seconds))
            bar.advance(step)
        light = replace(network_case, outcomes={w: replace(o, ready=None) for w, o in network_case.outcomes.items()})
        yield from (replace(row, case=light) for row in part)  # frees gigabytes of networks


def describe_outcome(outcome: Outcome, original: Outcome) -> str:
    """Numbers left of those in `original`, error, seconds; or why there is nothing."""
    if outcome.failure:
        return "fails: " + outcome.failure.replace("|", "/")
    error = f"**{outcome.error:.0e} wrong**" if outcome.wrong else f"{outcome.error:.0e}"
    share = 100 * outcome.numbers / original.numbers
    return f"{outcome.numbers / 1e6:.2f} M ({share:.0f} %), {error}, {outcome.seconds:.1f} s"


OUTCOMES = ["masked channels", "network", "stored", "rounding", "signal", *TORCH[1:], *OPENVINO]
TIMES = ["masked channels", "network", "batch", "threads", *TORCH, *OPENVINO, "faster than demask"]
SHIFTS = {"kept": "are constants", "zero": "are 0"}
TEXT = """
Half of each convolution's output channels are zeroed, drawn for each layer on its own: they *are 0*, or *are
constants*, the shifts of norms. Times: milliseconds, median (10 %–90 % quantile) of {calls} calls
in turns in one process; †: the result is wrong, with an error above {wrong:g}. OpenVINO is another runtime: compare
its columns with each other."""
RESULTS = """
## Results

Numbers left (of those stored), the error of the outputs relative to the largest, in float32, and seconds to build it.
*Rounding*: the masked network's own error in float32. *Signal*: the difference of its outputs on two images; an error
that large means that nothing is left."""


def results(cases: Iterable[Case]) -> Table:
    """Per network the result of each contender."""
    return Table(
        OUTCOMES,
        [
            [
                SHIFTS[c.shifts],
                c.network,
                f"{c.outcomes[MASKED].numbers / 1e6:.2f} M",
                c.rounding,
                c.signal,
                *(describe_outcome(c.outcomes[who], c.outcomes[MASKED]) for who in TORCH[1:]),
                *(describe_outcome(c.outcomes[who], c.outcomes[PLAIN]) for who in OPENVINO),
            ]
            for c in cases
        ],
        settings=2,
        merge=True,
    )


def times(rows: Iterable[Row]) -> Table:
    """Per setting the times of each contender, and those that beat demask."""

    def cells(row: Row) -> list[Cell]:
        faster = [who + " †" * row.case.outcomes[who].wrong for who in row.faster()]
        timings = (row.timings.get(who) for who in (*TORCH, *OPENVINO))
        return [SHIFTS[row.case.shifts], row.case.network, row.batch, row.threads, *timings, "; ".join(faster)]

    return Table(TIMES, [*map(cells, rows)], settings=4, merge=True)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many settings something in torch is faster, and computes the same."""
    parts = []
    for shifts in SHIFTS.values():
        if faster := [row["faster than demask"] for row in rows if row["masked channels"] == shifts]:
            right = sum(any("†" not in who for who in names.split("; ") if who) for names in faster)
            parts.append(
                f"masked channels {shifts}: of {len(faster)} settings, something in torch is faster than demask in "
                f"{sum(map(bool, faster))}, and something that computes the same in {right}"
            )
    return "; ".join(parts)


def describe_times(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was timed how often, over all runs that the rows are of."""
    calls = format_counts(cell for row in rows for cell in row.values() if isinstance(cell, Timing))
    return TEXT.format(wrong=WRONG, calls=calls)


def page(rows: Sequence[Row], skipped: Mapping[str, str]) -> Page:
    cases = {(row.case.shifts, row.case.network): row.case for row in rows}.values()
    parts: list[str | Table | Derived] = [describe_times, times(rows), RESULTS, results(cases)]
    parts += [f"{name} was skipped: {why}." for name, why in skipped.items()]
    called = "\n".join(f"- **{who}**: {text}" for who, text in CALLED.items())
    parts.append(f"## How each was called\n\n{called}")
    return Page("demask and its peers, on the same masks", parts, summarize)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="of torchvision, ResNet-56")
    parser.add_argument("--shifts", nargs="+", default=("kept", "zero"), choices=("kept", "zero"))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--size", type=int, default=224, help="of torchvision's images")
    parser.add_argument("--pairs", type=int, default=15, help="calls of each contender, in turns")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, per setting")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    return parser.parse_args()


def versions() -> str:
    """The peers' versions; SystemExit where one is not installed."""
    try:
        return ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    except PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: `make bench` installs it, as does the bench extra")


def main() -> None:
    options, packages = arguments(), versions()
    warnings.simplefilter("ignore")  # peers warn of torch's deprecations on every trace
    allocator, before, skipped = fix_allocator(), load_average(), {}
    console, results = Console(), []
    with Progress(console=console, transient=True) as bar:
        for row in rows(options, bar, skipped):
            results.append(row)
            run = Run.now(packages, allocator, before=before)
            text = save("peers", page(results, skipped), run, options.output)
    console.print(Markdown(text))


if __name__ == "__main__":
    main()
