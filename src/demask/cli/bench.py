"""`demask bench`: times a model against its demasked, optimized and compiled versions; its table and its
picture."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import median
from textwrap import fill, shorten
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import demask
from demask.cli.read_network import NetworkFile, NetworkInput, example
from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.files import atomic_write as atomic
from demask.graph.example_inputs import expected_domains
from demask.graph.program import path_of
from demask.graph.result.demasked_module import Demasked
from demask.judge import compare
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing, checked_threads, race, set_threads
from demask.machine.describe import (
    BUSY,
    describe_machine,
    format_counts,
    format_milliseconds,
    format_spread,
    format_threads,
    has_wide_spread,
    load_average,
)
from demask.pages import Lines, OnPage, Page, PageSource, TextTable
from demask.progress import ProgressStep
from demask.report import Report
from demask.report.sections import module_sections
from demask.report.values import ModuleRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORIGINAL, DEMASKED, OPTIMIZED = "original", "demasked", "optimized"
REASON_LENGTH = 60  # characters of an error that a row shows

ROUNDS = 10  # calls of each network
OTHER_CALLS = "(calls without weights)"
MODULE_TIMES_NOTE = (
    "Milliseconds: medians, with every op timed alone. Their sum is more than a call takes "
    "that is not interrupted after each op."
)
ORIGINAL_COLOR, FASTER, SLOWER = "#8c8c8c", "#2a78b5", "#d1661f"  # differ for the color-blind, too
WORD_COLOR = "#444444"
WIDTH, BAR, REST = 8.5, 0.3, 0.75  # inches: the picture, each row, a panel's title and axis
LABEL = 0.38  # of a panel's width, left free for the words after the longest bar
REACH = 1.6  # times the largest median: a longer whisker is cut, or one outlier hides all bars
DOTS = 200  # per inch, where the format has dots

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A network that is timed."""

    name: str
    module: nn.Module
    parameters: int = 0  # as in reports
    preparation: float | None = None  # seconds that demask(), optimize() or torch.compile took
    failure: str = ""  # why it cannot run

    @classmethod
    def of(cls, name: str, module: nn.Module, parameters: int = 0, preparation: float | None = None) -> Contender:
        """The module, which is put in eval mode, as a contender."""
        for part in module.modules():
            part.training = False  # not eval(): the module of an exported program refuses it
        return cls(name, module, parameters, preparation)


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure: every batch size at every number of threads."""

    threads: tuple[int, ...] = ()  # () for torch's own number
    batches: tuple[int, ...] = ()  # () for the example's
    pairs: int = 30  # calls of each contender, in turns
    seconds: float = 60.0  # at most, per setting
    compiled: bool = True  # whether torch.compile takes part

    @property
    def steps(self) -> int:
        """How many steps `bench` tells of: its first ones, then each setting's own."""
        settings = max(1, len(self.threads)) * max(1, len(self.batches))
        return 2 + 4 * settings if self.compiled else 1 + 2 * settings


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One contender in one setting."""

    threads: int
    batch: int
    contender: str
    parameters: int  # as in reports
    preparation: float | None = None  # seconds of demask(), optimize(), or torch.compile with its first call
    timing: Timing | None = None
    ratio: float | None = None  # the original's median over its own: below 1 is a loss
    difference: float | None = None  # the largest from the original's outputs, relative to the largest of them
    failure: str = ""  # why there are no numbers

    @property
    def setting(self) -> str:
        """`2 threads, batch 8`."""
        return _describe_setting(self.threads, self.batch)

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
        modules = [] if self.modules is None else module_sections(self.modules, MODULE_TIMES_NOTE)
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
    slim, seconds = timed(lambda: demask.demask(network.model, network.args, result="graph"))
    batches = batches_of(slim, settings.batches)
    plain = (
        Contender.of(ORIGINAL, network.module, slim.demasked.before.parameters),
        Contender.of(DEMASKED, slim, slim.demasked.after.parameters, seconds),
    )
    if settings.compiled:
        step("setting torch.compile up")
        compiled(Contender("", nn.Softplus()), ((torch.zeros(64),), {}))  # it imports what the first would pay for
    rows, shown = list[BenchRow](), demask.report(slim) if modules else None
    for threads, batch in product(counts, batches):
        inputs, where = inputs_of(slim, batch, network.args), _describe_setting(threads, batch)
        with set_threads(threads):
            with torch.no_grad():
                _first_outputs(partial(network.module, *inputs[0], **inputs[1]), ORIGINAL, batch)
            step(f"optimizing for {where}")
            ready = [*plain, optimized(network, inputs, threads)]
            ready += _compile_each(plain, inputs, where, step) if settings.compiled else []
            if shown is not None and not rows:
                shown = with_times(shown, (network.module, slim), inputs, settings.pairs)
            step(f"measuring {where}, at most {settings.seconds:g} s")
            rows += _measure_setting(ready, inputs, settings, threads, batch)
    words = f"{describe_machine()}, demask {demask.__version__}; {allocator}."
    load = f"Load before and after: {before}, {load_average()}."
    return Bench(name, tuple(rows), f"{words} {load}", shown)


def _describe_setting(threads: int, batch: int) -> str:
    return f"{format_threads(threads)}, batch {batch}"


def _compile_each(plain: Sequence[Contender], inputs: Inputs, where: str, step: ProgressStep) -> Iterator[Contender]:
    torch.compiler.reset()  # what was compiled for other threads and sizes
    for contender in plain:
        step(f"compiling {contender.name} for {where}")
        yield compiled(contender, inputs)


@torch.no_grad()
def _measure_setting(
    ready: Sequence[Contender], inputs: Inputs, settings: BenchSettings, threads: int, batch: int
) -> list[BenchRow]:
    """A row per contender, with timings and differences where it runs."""
    calls = {c.name: partial(c.module, *inputs[0], **inputs[1]) for c in ready if not c.failure}
    outputs = {name: _first_outputs(call, name, batch) for name, call in calls.items()}
    timings = Timing.of_each(race(calls, settings.pairs, seconds=settings.seconds))
    rows = {c.name: BenchRow(threads, batch, c.name, c.parameters, c.preparation, failure=c.failure) for c in ready}
    for name, timing in timings.items():
        rows[name] = replace(
            rows[name],
            timing=timing,
            ratio=timings[ORIGINAL].median / timing.median,
            difference=relative_difference(outputs[ORIGINAL], outputs[name]),
        )
    return list(rows.values())


def _first_outputs(call: Callable[[], Any], name: str, batch: int) -> Any:
    """A copy of what the call returns; BadInput where it fails."""
    try:
        return pytree.tree_map_only(Tensor, torch.clone, call())
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"{name} does not run on inputs of batch {batch} ({reason(error)}); try another --batch"
        ) from error


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What `make` returns, and the seconds it took."""
    start = perf_counter()
    return make(), perf_counter() - start


def optimized(network: NetworkFile, inputs: Inputs, threads: int) -> Contender:
    """The result of optimize() for these inputs and threads."""
    from demask.optimize import optimize

    fast, seconds = timed(lambda: optimize(network.model, *inputs, threads=threads))
    return Contender.of(OPTIMIZED, fast, fast.demasked.after.parameters, seconds)


@torch.no_grad()
def compiled(contender: Contender, inputs: Inputs) -> Contender:
    """The contender compiled as one graph for these sizes; a graph break is a failure."""
    name = f"{contender.name}, compiled"
    try:
        with _without_caches_and_logs():
            module = torch.compile(contender.module, fullgraph=True, dynamic=False)
            _, seconds = timed(lambda: module(*inputs[0], **inputs[1]))
    except Exception as error:  # whatever a compiler, a toolchain or generated code may raise
        return replace(contender, name=name, preparation=None, failure=reason(error))
    return Contender(name, cast(nn.Module, module), contender.parameters, seconds)


@contextmanager
def _without_caches_and_logs() -> Iterator[None]:
    """Without torch's caches, so that every compilation starts from nothing, and without its
    warnings and logs, which describe its internals."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    try:
        with uncached, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def reason(error: Exception) -> str:
    """An error in few words: its first line, or its type."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    words = lines[0] if lines else type(error).__name__
    return shorten(words, REASON_LENGTH, placeholder="…")


def batches_of(slim: Demasked, requested: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes to measure: the requested ones, by default that of the example.

    Raises BadInput for another batch size where dimension 0 of no input is dynamic.
    """
    sized = [spec for spec in slim.demasked.inputs if spec.sizes]
    dynamic = [spec for spec in sized if isinstance(spec.sizes[0], str)]
    own = (dynamic or sized)[0].example[0] if sized else 1
    others = [batch for batch in requested if batch != own]
    if others and not dynamic:
        raise BadInput(
            f"cannot run batch {others[0]}: dimension 0 of the inputs is fixed to {own} in this "
            "file; export the model with a dynamic dimension 0, or leave --batch out"
        )
    return tuple(requested) or (own,)


def inputs_of(slim: Demasked, batch: int, args: Sequence[Tensor] = ()) -> Inputs:
    """Arguments of that batch size for the original of `slim`: `args` where they fit, else seeded
    random numbers.

    Raises BadInput where the network takes inputs that are not tensors.
    """
    specs = slim.demasked.inputs
    names = {spec.sizes[0] for spec in specs if spec.sizes and isinstance(spec.sizes[0], str)}
    leaves, domains = [], expected_domains(slim)
    for k, spec in enumerate(specs):
        sizes = zip(spec.sizes, spec.example, strict=True)
        sized = tuple(batch if size in names else own for size, own in sizes)
        port = NetworkInput.of(spec.name, spec.sizes, getattr(torch, spec.dtype))
        fits = len(args) == len(specs) and tuple(args[k].shape) == sized
        leaves.append(args[k] if fits else example(port, sized, domains.get(spec.name)))
    tree = signature_of(slim.graph).in_spec
    if len(leaves) != tree.num_leaves:
        odd = ", ".join(slim.demasked.values) or "some"
        raise BadInput(f"cannot make inputs for this network: {odd} of them are no tensors")
    return pytree.tree_unflatten(leaves, tree)


def relative_difference(expected: Any, got: Any) -> float:
    """The largest difference of any tensor, relative to the largest value of that tensor.

    Infinite where only one of the two is finite, or the shapes differ.

    >>> relative_difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    return max((compare(a, b).relative for a, b in pairs if isinstance(a, Tensor)), default=0.0)


def with_times(report: Report, networks: tuple[nn.Module, nn.Module], inputs: Inputs, rounds: int) -> Report:
    """The report with seconds of each module in the two networks; what belongs to none of them is a
    row of its own."""
    pairs = [_module_seconds(network, inputs, min(rounds, ROUNDS)) for network in networks]
    names = {row.name for row in report.modules}
    others = [sum(s for name, s in of.items() if name not in names) for of in pairs]
    rows = [replace(row, seconds=(pairs[0].get(row.name), pairs[1].get(row.name))) for row in report.modules]
    last = ModuleRow(OTHER_CALLS, (0, 0), (0, 0), seconds=(others[0], others[1]))
    return replace(report, modules=(*rows, last))


@torch.no_grad()
def _module_seconds(network: nn.Module, inputs: Inputs, rounds: int) -> Mapping[str, float]:
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
        self.seconds[self._module_of(n)] += perf_counter() - start
        return value

    def _module_of(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        tensors = [
            (value.numel(), str(source.target))
            for source in node.all_input_nodes
            if source.op == "get_attr" and isinstance(value := self.env.get(source), Tensor)
        ]
        return max(tensors)[1].rpartition(".")[0] if tensors else path_of(node)


def _table(measured: Bench) -> TextTable:
    heads = ("", "parameters", "milliseconds", "speed", "difference", "setup")
    lines, rules = list[tuple[str, ...]](), []
    for setting, rows in measured.settings.items():
        rules.append(len(lines))
        lines.append((setting,))
        for row in rows:
            lines.append((f"  {row.contender}", f"{row.parameters:,}", *_row_cells(row)))
    return TextTable(heads, lines, "Times", title=measured.model, unbroken=(0, 1, 3, 4, 5), rules=rules)


def _row_cells(row: BenchRow) -> tuple[str, ...]:
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


def draw(bench: Bench, path: Path) -> None:
    """Write the picture to `path`, complete or not at all; its suffix says the format.

    One panel per setting, each with an axis of its own that starts at zero, and one bar with whiskers
    per contender; losses are hatched.
    """
    from matplotlib.figure import Figure

    settings = bench.settings
    heights = [BAR * len(rows) + REST for rows in settings.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.0), layout="constrained")
    panels = figure.subplots(len(settings), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (setting, rows) in zip(panels, settings.items(), strict=True):
        _draw_setting(axes, setting, rows)
    panels[-1].set_xlabel("milliseconds per call", fontsize=9)
    figure.suptitle(bench.model, fontsize=12, parse_math=False)
    figure.supxlabel(_caption(bench), x=0.01, ha="left", fontsize=7, color=WORD_COLOR, parse_math=False)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=DOTS)


def _draw_setting(axes: Axes, setting: str, rows: Sequence[BenchRow]) -> None:
    """One setting: its bars from the top down, and a line at the median of the original."""
    axes.set_title(setting, loc="left", fontsize=10)
    timings = [row.timing for row in rows if row.timing]
    reach = min(max(t.high for t in timings), REACH * max(t.median for t in timings))
    for position, row in enumerate(rows):
        _draw_contender(axes, position, row, 1e3 * reach)
    axes.set_xlim(0, 1e3 * reach / (1 - LABEL))
    axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_contender(axes: Axes, position: int, row: BenchRow, reach: float) -> None:
    """One contender: bar, whiskers and words; where it failed, the reason alone.

    reach: milliseconds at which a whisker ends in an arrow, and the words say where it would end.
    """
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dotted line
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "parse_math": False, "bbox": box}
    style |= {"xytext": (7, 0), "textcoords": "offset points"}
    if row.timing is None:
        words = f"fails: {row.failure}"
        axes.annotate(words, (0, position), **style, style="italic", color=WORD_COLOR)
        return
    low, median, high = (1e3 * t for t in (row.timing.low, row.timing.median, row.timing.high))
    color = SLOWER if row.is_loss else ORIGINAL_COLOR if row.contender == ORIGINAL else FASTER
    axes.barh(
        position, median, height=0.62, color=color, hatch="///" if row.is_loss else None, edgecolor="white", linewidth=0
    )
    end = min(high, reach)
    axes.errorbar(
        median, position, xerr=[[median - low], [end - median]], fmt="none", ecolor="black", elinewidth=1, capsize=3
    )
    words = f"{format_milliseconds(row.timing.median)} ms"
    if row.contender == ORIGINAL:
        axes.axvline(median, color=ORIGINAL_COLOR, linestyle=":", linewidth=1, zorder=0)
    else:
        words += f", {row.ratio:.2f} ×{' (slower)' if row.is_loss else ''}"
    if high > reach:
        axes.plot(end, position, marker=">", color="black", markersize=5)
        words += f"; 90 %: {format_milliseconds(row.timing.high)}"
    style |= {"weight": "bold" if row.is_loss else "normal"}
    axes.annotate(words, (end, position), **style)


def _caption(bench: Bench) -> str:
    busy = f" {BUSY}" if has_wide_spread(bench.timings) else ""
    words = (
        f"Median, whiskers 10 %–90 %, of {format_counts(bench.timings)} calls in turns; × is the "
        f"speed relative to the original.{busy} {bench.machine}"
    )
    return fill(words, 165)
