"""`demask demo`: a pruned network and its demasked version, measured on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import demask
from demask.cli.digits import BATCH, DigitNet, Digits, accuracy, prune_channels, train
from demask.files import atomic_write as atomic
from demask.graph.provenance import Sizes
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, race, set_threads
from demask.machine.describe import BUSY, format_counts, format_spread, format_threads, has_wide_spread
from demask.pages import Lines, OnPage, Page, PageSource, TextTable
from demask.progress import ProgressStep
from demask.report.report import Report
from demask.report.sections import decline_line, module_sections, scatters_reasons

EPOCHS, TUNING = 5, 4  # before and after pruning; enough for 98 % of the test images
EXAMPLE = 8  # images that demask traces the networks with, and counts MACs for
IMAGES = 256  # per timed forward pass
PATIENCE = 6.0  # seconds of timing per number of threads; an idle machine needs 2 to 4
SEED = 0


@dataclass(frozen=True, slots=True)
class DemoNetwork:
    """One network of the comparison: its sizes, how well it reads, and how long it takes."""

    sizes: Sizes  # MACs are those of one image
    accuracy: float
    difference: float  # largest absolute difference of any test logit from the masked network's
    # per number of threads, seconds per forward pass of IMAGES images
    timings: Mapping[int, Timing] = field(default_factory=dict)

    def timed(self, threads: int, timing: Timing) -> DemoNetwork:
        """The same network with one more timing."""
        return replace(self, timings={**self.timings, threads: timing})


@dataclass(frozen=True, slots=True)
class Demo(PageSource):
    """Results of the demo: three contenders by name, the report, and the machine in words."""

    contenders: Mapping[str, DemoNetwork]
    report: Report
    machine: str

    @property
    def threads(self) -> tuple[int, ...]:
        """The thread counts measured."""
        return tuple(self.contenders["masked"].timings)

    def speed(self, name: str, over: str, threads: int) -> float:
        """How many times as fast as `over` the network `name` is: the ratio of their medians."""
        times = {key: one.timings[threads].median for key, one in self.contenders.items()}
        return times[over] / times[name]

    def to_dict(self) -> dict[str, Any]:
        """The demo's numbers as plain dictionaries, ready for JSON; times in seconds."""
        return {
            "images": IMAGES,
            "contenders": {name: asdict(one) for name, one in self.contenders.items()},
            "speedup": {count: self.speed("demasked", "masked", count) for count in self.threads},
            "report": self.report.to_dict(),
            "machine": self.machine,
        }

    def page(self) -> Page:
        """What the command prints and writes, as sections."""
        remarks = Lines([*_remarks(self)], "Notes", is_wrapped=True)
        modules = OnPage([*module_sections(self.report)])
        return Page("demask demo", (_table(self), modules, remarks), self.report.summary)


def run(digits: Digits, step: ProgressStep, runs: int, keep: Path | None = None) -> Demo:
    """Train, prune, demask, check and measure; every seed is fixed.

    step: moves a progress bar of `steps(digits)` steps. runs: timed forward passes per network and
    number of threads (fewer where the machine is busy). keep: where to write the masked network as
    a .pt2 file, for the other commands to work on. Raises Mismatch if the demasked network
    computed something else.
    """
    machine = f"torch {torch.__version__}, {fix_allocator()}"
    # One thread for all but the timing: the same network however many cores there are, and none
    # waits for one that a busy machine has put aside (ten times slower on two busy cores).
    with set_threads(1):
        dense, masked = trained(digits, step)
        if keep is not None:
            save_program(masked, digits.test_images, keep)
        networks, report, contenders = compare(dense, masked, digits, step)
    for threads in _thread_counts():
        timings = _time_networks(networks, digits, threads, runs, step)
        contenders = {name: one.timed(threads, timings[name]) for name, one in contenders.items()}
    return Demo(contenders, report, machine)


def trained(digits: Digits, step: ProgressStep) -> tuple[nn.Module, nn.Module]:
    """The network as trained, and the same pruned and fine-tuned with its masks active."""
    torch.manual_seed(SEED)
    masked = DigitNet()
    train(masked, digits, EPOCHS, lambda: step("training"), seed=SEED)
    dense = deepcopy(masked)
    prune_channels(masked)
    train(masked, digits, TUNING, lambda: step("fine-tuning the pruned network"), seed=SEED + 1)
    return dense, masked


def compare(
    dense: nn.Module, masked: nn.Module, digits: Digits, step: ProgressStep
) -> tuple[dict[str, nn.Module], Report, dict[str, DemoNetwork]]:
    """`dense`, `masked` and what demask makes of it; its report; and all three, not yet timed."""
    step("demasking")
    example = (digits.test_images[:EXAMPLE],)
    slim = demask.demask(masked, example, result="graph")
    demask.verify(masked, slim, example)
    report = demask.report(slim)
    sizes = {"dense": demask.report(demask.demask(dense, example, result="graph")).before}
    sizes |= {"masked": report.before, "demasked": report.after}
    networks = {"dense": dense, "masked": masked, "demasked": slim.eval()}
    logits = {name: _logits(network, digits.test_images) for name, network in networks.items()}
    contenders = {
        name: DemoNetwork(
            replace(sizes[name], macs=sizes[name].macs // EXAMPLE),
            accuracy(network, digits),
            (logits[name] - logits["masked"]).abs().max().item(),
        )
        for name, network in networks.items()
    }
    return networks, report, contenders


def steps(digits: Digits) -> int:
    """How many steps `run` makes: one per training batch, one to demask, one per timing."""
    batches = len(digits.train_labels) // BATCH * (EPOCHS + TUNING)
    return batches + 1 + len(_thread_counts())


def save_program(model: nn.Module, images: Tensor, path: Path) -> None:
    """Write `model` as torch.export sees it, masks and all, with a dynamic number of images."""
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        # Pruning's hooks set `weight` on each call; the exported graph computes it all the same.
        warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
        program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: batch},))
    with atomic.write(path) as file:
        torch.export.save(program, file)


def _thread_counts() -> tuple[int, ...]:
    return (1, 2) if torch.get_num_threads() > 1 else (1,)


def _logits(network: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([network(part) for part in images.split(IMAGES)])


def _time_networks(
    networks: Mapping[str, nn.Module], digits: Digits, threads: int, runs: int, step: ProgressStep
) -> dict[str, Timing]:
    step(f"measuring, threads: {threads}")
    images = digits.test_images[:IMAGES]

    def forward(network: nn.Module) -> Callable[[], Tensor]:
        return lambda: network(images)

    with set_threads(threads), torch.inference_mode():
        calls = {name: forward(network) for name, network in networks.items()}
        return Timing.of_each(race(calls, runs, seconds=PATIENCE))


def _table(demo: Demo) -> TextTable:
    rows = [(label, *map(text, demo.contenders.values())) for label, text in _row_texts(demo).items()]
    scatters = demo.report.scatters["scatter"] + demo.report.scatters["scatter-add"]
    rows.append(("scatters left", "–", "–", f"{scatters} (see below)" if scatters else "0"))
    return TextTable(
        ("", *demo.contenders), rows, "Before and after", title="A residual CNN that reads handwritten digits"
    )


def _row_texts(demo: Demo) -> dict[str, Callable[[DemoNetwork], str]]:
    """The table's rows: a label, and the text for one contender."""

    def milliseconds(threads: int) -> Callable[[DemoNetwork], str]:
        return lambda one: format_spread(one.timings[threads])

    timed = {f"ms, {format_threads(threads)}": milliseconds(threads) for threads in demo.threads}
    return {
        "parameters": lambda one: f"{one.sizes.parameters:,}",
        "MACs per image": lambda one: f"{one.sizes.macs:,}",
        "bytes": lambda one: f"{one.sizes.bytes:,}",
        **timed,
        "test accuracy": lambda one: f"{100 * one.accuracy:.1f} %",
        "difference from masked": lambda one: f"{one.difference:.2g}",
    }


def _remarks(demo: Demo) -> Iterator[str]:
    for threads in demo.threads:
        pruned = demo.speed("masked", "dense", threads)
        gained = demo.speed("demasked", "masked", threads)
        yield (
            f"On {format_threads(threads)} masked runs at {pruned:.2f} x the speed of dense, "
            f"demasked at {gained:.2f} x the speed of masked."
        )
    yield from scatters_reasons(demo.report)
    yield from map(decline_line, demo.report.declined)
    timings = [timing for one in demo.contenders.values() for timing in one.timings.values()]
    if has_wide_spread(timings):
        yield BUSY
    yield (
        f"Milliseconds for {IMAGES} images: median (10 %–90 % quantile) of "
        f"{format_counts(timings)} alternated runs. Difference: the largest of any test logit. "
        f"{demo.machine}."
    )
