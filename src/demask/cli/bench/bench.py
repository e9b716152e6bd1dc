"""`demask bench`: times a model against its demasked, optimized and compiled versions.

Milliseconds by module, of a network and of its demasked version, for the page of a bench.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import demask
from demask.cli.bench import contenders
from demask.cli.bench.contenders import ORIGINAL, Contender, Inputs
from demask.cli.read_network import NetworkFile
from demask.errors import BadInput
from demask.graph.program import path_of
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, checked_threads, race, set_threads
from demask.machine.describe import (
    BUSY,
    describe_machine,
    format_counts,
    format_spread,
    format_threads,
    has_wide_spread,
    load_average,
)
from demask.pages import Lines, OnPage, Page, PageSource, TextTable
from demask.progress import ProgressStep
from demask.report import Report
from demask.report.module_sections import module_sections
from demask.report.values import ModuleRow

ROUNDS = 10  # calls of each network
OTHERS = "(calls without weights)"
WORDS = (
    "Milliseconds: medians, with every op timed alone. Their sum is more than a call takes "
    "that is not interrupted after each op."
)


def with_times(report: Report, networks: tuple[nn.Module, nn.Module], inputs: Inputs, rounds: int) -> Report:
    """The report with seconds of each module in the two networks; what belongs to none of them is a
    row of its own."""
    pairs = [_seconds(network, inputs, min(rounds, ROUNDS)) for network in networks]
    names = {row.name for row in report.modules}
    others = [sum(s for name, s in of.items() if name not in names) for of in pairs]
    rows = [replace(row, seconds=(pairs[0].get(row.name), pairs[1].get(row.name))) for row in report.modules]
    last = ModuleRow(OTHERS, (0, 0), (0, 0), seconds=(others[0], others[1]))
    return replace(report, modules=(*rows, last))


@torch.no_grad()
def _seconds(network: nn.Module, inputs: Inputs, rounds: int) -> Mapping[str, float]:
    """The median of each module's seconds in some calls, after one that is not timed."""
    clocks = [_OpClock(network) for _ in range(rounds + 1)]
    for clock in clocks:
        clock.run(*pytree.tree_leaves(inputs), enable_io_processing=False)
    return {name: median(clock.seconds[name] for clock in clocks[1:]) for name in clocks[0].seconds}


class _OpClock(fx.Interpreter):
    """Runs a graph op by op. seconds: by the module of the largest tensor that an op reads, or else
    by the module that contains the op."""

    def __init__(self, network: nn.Module):
        super().__init__(network)
        self.seconds = defaultdict[str, float](float)

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if not n.op.startswith("call"):
            return super().run_node(n)
        start = perf_counter()
        value = super().run_node(n)
        self.seconds[self._owner(n)] += perf_counter() - start
        return value

    def _owner(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        largest = max(self._tensors(node), default=(0, ""))[1]
        return largest.rpartition(".")[0] if largest else path_of(node)

    def _tensors(self, node: fx.Node) -> Iterator[tuple[int, str]]:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and isinstance(value := self.env.get(source), Tensor):
                yield value.numel(), str(source.target)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure: every batch size (none: the example's) at every number of threads (none:
    torch's own).

    pairs: calls of each contender, in turns. seconds: at most, per setting. compiled: whether
    torch.compile takes part.
    """

    threads: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    pairs: int = 30
    seconds: float = 60.0
    compiled: bool = True

    @property
    def steps(self) -> int:
        """How many steps `bench` tells of: its first ones, then each setting's own."""
        settings = max(1, len(self.threads)) * max(1, len(self.batches))
        return 2 + 4 * settings if self.compiled else 1 + 2 * settings


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One contender in one setting.

    parameters: as in reports. preparation: seconds that demask(), optimize(), or torch.compile with
    its first call took. ratio: the original's median over its own, so below 1 is a loss.
    difference: the largest from the original's outputs, relative to the largest of them. failure:
    why there are no numbers; empty where there are.
    """

    threads: int
    batch: int
    contender: str
    parameters: int
    preparation: float | None = None
    timing: Timing | None = None
    ratio: float | None = None
    difference: float | None = None
    failure: str = ""

    @property
    def setting(self) -> str:
        """`2 threads, batch 8`."""
        return _setting(self.threads, self.batch)

    @property
    def is_loss(self) -> bool:
        """Whether it is slower than the original, in the digits shown."""
        return self.ratio is not None and round(self.ratio, 2) < 1

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON values; an infinite difference as a word."""
        value = self.difference
        infinite = value is not None and not isfinite(value)
        return asdict(self) | {"difference": str(value) if infinite else value}


@dataclass(frozen=True, slots=True)
class Bench(PageSource):
    """The measurements of one model: rows by setting, and a description of the machine. modules:
    the demasked network's, with their times in the first setting, if a page shows them."""

    model: str
    rows: tuple[BenchRow, ...]
    machine: str
    modules: Report | None = None

    @property
    def settings(self) -> Mapping[str, tuple[BenchRow, ...]]:
        """The rows of each setting, by its words."""
        names = dict.fromkeys(row.setting for row in self.rows)
        return {name: tuple(r for r in self.rows if r.setting == name) for name in names}

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The timings of all rows that have one."""
        return tuple(row.timing for row in self.rows if row.timing is not None)

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain dictionaries, ready for JSON; times in seconds."""
        rows = [row.to_dict() for row in self.rows]
        return {"model": self.model, "rows": rows, "machine": self.machine}

    def page(self) -> Page:
        """What the command prints and writes, as sections."""
        remarks = Lines([*_remarks(self)], "Notes", is_wrapped=True)
        modules = [] if self.modules is None else module_sections(self.modules, WORDS)
        return Page("demask bench", (_table(self), OnPage([*modules]), remarks))


def bench(
    network: NetworkFile, name: str, settings: BenchSettings, step: ProgressStep, *, modules: bool = False
) -> Bench:
    """Time a network, in eval mode, in every setting. modules: each module, too, in the first.

    name: the title of the table. step: moves a progress bar of `settings.steps` steps. The
    allocator is fixed for the rest of the process; torch's number of threads is restored. Raises
    BadInput where a batch size does not fit the network.
    """
    counts = tuple(map(checked_threads, settings.threads or (None,)))
    before, allocator = load_average(), fix_allocator()
    step("demasking")
    slim, seconds = contenders.timed(lambda: demask.demask(network.model, network.args, result="graph"))
    batches = contenders.batches_of(slim, settings.batches)
    plain = (
        Contender.of(ORIGINAL, network.module, slim.demasked.before.parameters),
        Contender.of(contenders.DEMASKED, slim, slim.demasked.after.parameters, seconds),
    )
    if settings.compiled:
        step("setting torch.compile up")
        contenders.set_up_compiler()
    rows, shown = list[BenchRow](), demask.report(slim) if modules else None
    for threads, batch in product(counts, batches):
        inputs, where = contenders.inputs_of(slim, batch, network.args), _setting(threads, batch)
        with set_threads(threads):
            with torch.no_grad():
                _first(partial(network.module, *inputs[0], **inputs[1]), ORIGINAL, batch)
            step(f"optimizing for {where}")
            ready = [*plain, contenders.optimized(network, inputs, threads)]
            ready += _compiled(plain, inputs, where, step) if settings.compiled else []
            if shown is not None and not rows:
                shown = with_times(shown, (network.module, slim), inputs, settings.pairs)
            step(f"measuring {where}, at most {settings.seconds:g} s")
            rows += _measured(ready, inputs, settings, threads, batch)
    words = f"{describe_machine()}, demask {demask.__version__}; {allocator}."
    load = f"Load before and after: {before}, {load_average()}."
    return Bench(name, tuple(rows), f"{words} {load}", shown)


def _setting(threads: int, batch: int) -> str:
    return f"{format_threads(threads)}, batch {batch}"


def _compiled(plain: Sequence[Contender], inputs: Inputs, where: str, step: ProgressStep) -> Iterator[Contender]:
    torch.compiler.reset()  # what was compiled for other threads and sizes
    for contender in plain:
        step(f"compiling {contender.name} for {where}")
        yield contenders.compiled(contender, inputs)


@torch.no_grad()
def _measured(
    ready: Sequence[Contender], inputs: Inputs, settings: BenchSettings, threads: int, batch: int
) -> list[BenchRow]:
    """A row per contender, with timings and differences where it runs."""
    calls = {c.name: partial(c.module, *inputs[0], **inputs[1]) for c in ready if not c.failure}
    outputs = {name: _first(call, name, batch) for name, call in calls.items()}
    timings = Timing.of_each(race(calls, settings.pairs, seconds=settings.seconds))
    rows = {c.name: BenchRow(threads, batch, c.name, c.parameters, c.preparation, failure=c.failure) for c in ready}
    for name, timing in timings.items():
        rows[name] = replace(
            rows[name],
            timing=timing,
            ratio=timings[ORIGINAL].median / timing.median,
            difference=contenders.difference(outputs[ORIGINAL], outputs[name]),
        )
    return list(rows.values())


def _first(call: Callable[[], Any], name: str, batch: int) -> Any:
    """A copy of what the call returns; BadInput where it fails."""
    try:
        return pytree.tree_map_only(Tensor, torch.clone, call())
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"{name} does not run on inputs of batch {batch} ({contenders.reason(error)}); try another --batch"
        ) from error


def _table(measured: Bench) -> TextTable:
    heads = ("", "parameters", "milliseconds", "speed", "difference", "setup")
    lines, rules = list[tuple[str, ...]](), []
    for setting, rows in measured.settings.items():
        rules.append(len(lines))
        lines.append((setting,))
        for row in rows:
            lines.append((f"  {row.contender}", f"{row.parameters:,}", *_cells(row)))
    return TextTable(heads, lines, "Times", title=measured.model, unbroken=(0, 1, 3, 4, 5), rules=rules)


def _cells(row: BenchRow) -> tuple[str, ...]:
    """The cells of a row after its name and size."""
    preparation = "–" if row.preparation is None else f"{row.preparation:.1f} s"
    if row.timing is None or row.ratio is None:
        return f"fails: {row.failure}", "–", "–", preparation
    speed = f"{'slower, ' if row.is_loss else ''}{row.ratio:.2f} ×"
    differs = "–" if row.contender == ORIGINAL else f"{row.difference:.1e}" if row.difference else "0"
    return format_spread(row.timing), speed, differs, preparation


def _remarks(measured: Bench) -> Iterator[str]:
    if has_wide_spread(measured.timings):
        yield BUSY
    yield (
        f"Milliseconds: median (10 %–90 % quantile) of {format_counts(measured.timings)}"
        " alternating calls. Speed: the original's median over its own. Difference: the largest"
        " from the original's outputs, relative to the largest of them. Setup: the time of"
        " demask(), optimize(), or torch.compile with its first call."
    )
    yield measured.machine
