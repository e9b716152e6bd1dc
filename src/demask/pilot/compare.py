"""compare(): what each simplifier preserves of a network, and what it costs, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec.call_groups import Constants, bind_inputs, walk
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.files import atomic_write as atomic
from demask.files.atomic_write import PICTURE_DOTS, check_picture
from demask.graph.isolation import in_isolation
from demask.machine.byte_sizes import format_bytes
from demask.machine.clock import Timing, race
from demask.ops import TABLE, Table
from demask.pages import Lines, Page, PageSource, TextTable
from demask.pilot.data.execution_data import BARS
from demask.pilot.data.measured_values import MeasuredValue, count_inputs, sites_of, zeroed
from demask.pilot.simplifiers.simplify import Simplifier, simplifier
from demask.pilot.weight_layers import layers_of
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import capture_program
from demask.shrink.program_size import measure_program

FIGURE_WIDTH, BAR_HEIGHT = 10.0, 0.34  # inches


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write the picture to `path`, completely or not at all; its suffix is the format.
    Refused simplifiers have the word instead of bars."""
    check_picture(path)
    from matplotlib.figure import Figure

    rows = comparison.rows
    figure = Figure(figsize=(FIGURE_WIDTH, BAR_HEIGHT * len(rows) + 1.1), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True, squeeze=False)[0]
    columns = (
        ("same class, %", [None if row.agreement is None else 100 * row.agreement for row in rows]),
        ("correlation", [row.correlation for row in rows]),
        ("recall of zeros, %", [None if row.recall is None else 100 * row.recall for row in rows]),
        ("weights, % of full", [100 * row.weight_bytes / comparison.weight_bytes for row in rows]),
    )
    for axes, (title, values) in zip(panels, columns, strict=True):
        _draw_panel(axes, title, values, rows)
    panels[0].set_yticks(range(len(rows)), [row.by for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(f"{comparison.inputs} inputs", fontsize=10)
    with atomic.write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=PICTURE_DOTS)


def _draw_panel(axes: Axes, title: str, values: Sequence[float | None], rows: tuple[ComparisonRow, ...]) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    for position, (value, row) in enumerate(zip(values, rows, strict=True)):
        words = "refused" if row.refused else "–" if value is None else f"{value:.3g}"
        length = 0.0 if row.refused or value is None else max(value, 0.0)
        axes.barh(position, length, height=0.65, color=BARS)
        axes.annotate(words, (length, position), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.margins(x=0.2)


DEFAULT = ("bits:8", "bits:4", "exponents", "rank:0.5", "channels:0.5", "downsample:2")
WIDTH = 112


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One simplifier of a `Comparison`: how far its outputs differ, and what a call costs.

    Attributes:
        by: the simplifier's text, such as "bits:8".
        agreement: share of outputs (rows of the first output, 0 to 1) whose largest entry has the
            same index as in the full network; None where outputs are no class scores.
        error: ‖simplified - full‖ / ‖full‖ over all outputs, in the Euclidean norm.
        correlation: Pearson's, of mean magnitudes per channel with the full run's; the mean over
            layers.
        precision: share of the zeros after ReLU that are zero in the full run, too; None without
            ReLU or where the maps do not correspond.
        recall: share of the full run's zeros after ReLU that are zero here, too; None likewise.
        weight_bytes: of all floating-point constants, as the simplifier would store them.
        macs: multiply-adds of one call.
        speed: the full network's time over this one's; None without timing.
        timing: of a call, in seconds; None without timing.
        refused: why there are no numbers; "" where there are.
    """

    by: str
    agreement: float | None = None
    error: float | None = None
    correlation: float | None = None
    precision: float | None = None
    recall: float | None = None
    weight_bytes: int = 0
    macs: int = 0
    speed: float | None = None
    timing: Timing | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Comparison(PageSource):
    """The result of `compare`: for each simplifier, how far outputs differ and what a call costs.

    A simplifier derives a cheaper network from the full one. `print` shows a comparison as a table.
    Score vectors are the vectors along the last axis of the first output, one score per class.

    Attributes:
        rows: one per simplifier, in the order of the call: `by` (its text), `agreement` (share of
            score vectors with the same largest entry as the full network's), `error` (relative,
            Euclidean norm), `correlation` (of channel magnitudes), `precision` and `recall` of
            zeros after ReLU, `weight_bytes` (of floating-point constants, as the simplifier would
            store them), `macs` (multiply-adds of the first call), `speed` (times as fast as the
            full network), `timing`, and `refused` (why there are no numbers, or ""). Shares are
            from 0 to 1; a number that does not apply is None.
        inputs: number of inputs (sizes of the first axis, summed over the calls).
        weight_bytes: bytes of all tensors of the full network.
        macs: multiply-adds of the first call of the full network.
        zeros: share of elements after ReLU that are zero in the full network, 0 to 1; None without
            a ReLU.
        timing: of the first call of the full network, in seconds: `median`, `low` and `high` (10 %
            and 90 % quantiles), `count`; None without timing.
        same: by simplifier's text, a tuple with one bool per score vector, in the order of the
            inputs: whether its largest entry has the same index as in the full network. () where
            the simplifier was refused, or outputs have one axis or one class alone.

    Example:
        >>> import torch
        >>> from demask.pilot import compare
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = Sequential(Linear(8, 16), ReLU(), Linear(16, 4))
        >>> comparison = compare(net, (torch.randn(32, 8),), by=["bits:8", "bits:4"], pairs=0)
        >>> comparison.weight_bytes, [(row.by, row.weight_bytes) for row in comparison.rows]
        (848, [('bits:8', 352), ('bits:4', 256)])
    """

    rows: tuple[ComparisonRow, ...]
    inputs: int
    weight_bytes: int
    macs: int
    zeros: float | None
    timing: Timing | None
    same: Mapping[str, tuple[bool, ...]]

    def to_dict(self) -> dict[str, Any]:
        """The numbers as nested dictionaries, ready for JSON; times in seconds, `same` left out."""
        numbers = asdict(self)
        del numbers["same"]
        return numbers

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        heads = (
            "simplifier",
            "same class",
            "error",
            "correlation",
            "zeros: precision",
            "recall",
            "weights",
            "MACs",
            "speed",
        )
        speed = "1 ×" if self.timing else "–"
        size = format_bytes(self.weight_bytes)
        rows: list[tuple[str, ...]] = [("(full)", "", "", "", "", "", size, f"{self.macs:.3g}", speed)]
        for row in self.rows:
            rows.append((row.by, *([""] * (len(heads) - 1) if row.refused else _row_cells(row))))
        zeros = "" if self.zeros is None else f"; {_format_percent(self.zeros)} zeros after ReLU"
        refused = [f"{r.by}: refused: {r.refused}" for r in self.rows if r.refused]
        return Page(
            "demask pilot compare",
            (
                TextTable(heads, rows, "Simplifiers", unbroken=(0,), pad_edge=False, width=WIDTH),
                Lines([f"{self.inputs} inputs{zeros}", *refused], is_close=True),
            ),
        )


@in_isolation
@public
def compare(
    model: nn.Module | ExportedProgram,
    inputs: Any,
    *,
    by: Sequence[str | Simplifier] = DEFAULT,
    pairs: int = 15,
    seconds: float = 10.0,
    progress: Callable[[str], None] | None = None,
    table: Table = TABLE,
) -> Comparison:
    """A `Comparison`: how far the outputs of simplified networks differ, and what a call costs.

    The full network and each simplified network run on the same inputs, and are timed in turns.

    Args:
        model: the network, an nn.Module (run in eval mode) or an ExportedProgram, which is not
            changed.
        inputs: the arguments of one call, a tuple, or an iterable of such tuples.
        by: simplifiers or their texts ("bits:N", "bits:N:G", "exponents", "rank:F", "channels:F",
            "downsample:N", "downsample:N:mode"; `simplify` explains each). Default: bits:8, bits:4,
            exponents, rank:0.5, channels:0.5 and downsample:2. A simplifier that does not fit the
            network has a row that says why.
        pairs: how often each simplified network and the full one are timed in turns, on the first
            input, 0 or more; default 15, 0 for no timing.
        seconds: longest time for the timing of one simplifier, in seconds; default 10.
        progress: function that is called with a line of text before each step; default None.
        table: facts about each ATen op; default: the library's table.

    Raises:
        BadInput: there are no inputs, an input is no tuple or does not fit the first, an entry of
            `by` is no simplifier, or `pairs` is negative.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from demask.pilot import compare
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = Sequential(Linear(8, 16), ReLU(), Linear(16, 4))
        >>> comparison = compare(net, (torch.randn(32, 8),), by=["bits:8", "bits:2"], pairs=0)
        >>> comparison.rows[0].error < 0.05 < comparison.rows[1].error
        True
    """
    report = progress or (lambda words: None)
    chosen = [simplifier(one) for one in by]
    if not isinstance(inputs, Iterable):
        raise BadInput(f"expected inputs, a tuple or several, got {type(inputs).__name__}")
    calls = [inputs] if isinstance(inputs, tuple) else list(inputs)
    if not calls:
        raise BadInput("expected one input or more, got none")
    report("running the full network")
    program = capture_program(model, calls[0] if isinstance(calls[0], tuple) else (calls[0],), {}, None)
    analysis = Analysis(program, table)
    full = _Observed.of(analysis, {}, calls)
    runnable = build_uncut(analysis, program, ())  # run as the pilots are, so that times compare
    measured = []
    for one in chosen:
        report(one.text())
        measured.append(_comparison_row(one, analysis, full, calls, runnable, (pairs, seconds)))
    rows = tuple(row for row, _, _ in measured)
    first = next((timing for _, _, timing in measured if timing is not None), None)
    here = capture_program(runnable, calls[0], {}, None)  # of these inputs' sizes, as the pilots are
    sizes = measure_program(here, Analysis(here, table).relations)
    same = {row.by: agreed for row, agreed, _ in measured}
    return Comparison(rows, full.count, sizes.bytes, sizes.macs, full.zero_share(), first, same)


def _comparison_row(
    one: Simplifier,
    analysis: Analysis,
    full: _Observed,
    calls: list[Any],
    runnable: nn.Module,
    limits: tuple[int, float],
) -> tuple[ComparisonRow, tuple[bool, ...], Timing | None]:
    try:
        slim = one.applied(analysis)
    except BadInput as error:
        return ComparisonRow(one.text(), refused=str(error)), (), None
    pilot = Analysis(capture_program(slim, calls[0], {}, None), analysis.table)
    seen = _Observed.of(pilot, slim.demasked.cuts, calls)
    same = full.agreed(seen)
    precision, recall = full.zero_rates(seen)
    timings: dict[str, Timing] = {}
    if limits[0]:
        timings = _time_alternately({"full": runnable, "pilot": slim}, calls[0], *limits)
    row = ComparisonRow(
        one.text(),
        sum(same) / len(same) if same else None,
        full.error(seen),
        full.correlation(seen),
        precision,
        recall,
        _weight_bytes(one, pilot),
        measure_program(pilot.program, pilot.relations).macs,
        timings["full"].median / timings["pilot"].median if timings else None,
        timings.get("pilot"),
    )
    return row, same, timings.get("full")


@torch.no_grad()
def _time_alternately(
    networks: Mapping[str, nn.Module], args: tuple[Any, ...], pairs: int, seconds: float
) -> dict[str, Timing]:
    contenders = {name: (lambda net=net: net(*args)) for name, net in networks.items()}
    return Timing.of_each(race(contenders, pairs, seconds=seconds))


def _weight_bytes(one: Simplifier, pilot: Analysis) -> int:
    """Bytes of all floating constants: weights as the simplifier stores them, the rest as it is."""
    layers = {layer.weight: layer for layer in layers_of(pilot)}
    total = 0.0
    for name, tensor in pilot.constants.items():
        if not tensor.is_floating_point():
            continue
        if name in layers:
            rows = math.prod(tensor.shape[axis] for axis in layers[name].rows)
            total += one.weight_bytes(tensor, rows)
        else:
            total += tensor.nbytes
    return round(total)


class _Observed:
    """The outputs of a network on all inputs, magnitudes per channel, and zeros after ReLU."""

    def __init__(self, sites: Sequence[MeasuredValue]):
        self.sites: dict[fx.Node, list[MeasuredValue]] = {}
        for site in sites:
            self.sites.setdefault(site.node, []).append(site)
        self.magnitudes: dict[str, list[Tensor]] = {site.name: [] for site in sites}
        self.zeros: dict[str, list[Tensor]] = {}
        self.outputs: list[Any] = []
        self.count = 0

    @classmethod
    def of(cls, analysis: Analysis, cuts: Any, calls: list[Any]) -> _Observed:
        program = analysis.program
        seen = cls(sites_of(analysis, "channel", cuts))
        bound = [bind_inputs(program, args, {}) for args in calls]
        run = walk(Constants(program), bound, seen.see, outputs=True)
        seen.outputs = run.outputs
        seen.count = count_inputs(bound)
        return seen

    def see(self, k: int, node: fx.Node, value: Any) -> None:
        for site in self.sites.get(node, ()):
            self.magnitudes[site.name].append(site.measured(value, "mean")[0])
            if zeroed(node):
                self.zeros.setdefault(site.name, []).append(_restore_cut_channels(value == 0, site))

    def agreed(self, other: _Observed) -> tuple[bool, ...]:
        """Per row of the first output, whether the largest entry has the same index; () where there
        are no classes."""
        same: list[bool] = []
        for mine, theirs in zip(self.outputs, other.outputs, strict=True):
            a, b = (_float_tensors(out)[0] for out in (mine, theirs))
            if a.ndim < 2 or a.shape[-1] < 2:
                return ()
            same += (a.argmax(-1) == b.argmax(-1)).flatten().tolist()
        return tuple(same)

    def error(self, other: _Observed) -> float | None:
        """The relative error of all outputs, in the Euclidean norm, in float64."""
        gap = norm = 0.0
        for mine, theirs in zip(self.outputs, other.outputs, strict=True):
            for a, b in zip(_float_tensors(mine), _float_tensors(theirs), strict=True):
                gap += float((a.double() - b.double()).square().sum())
                norm += float(a.double().square().sum())
        return math.sqrt(gap / norm) if norm else None

    def correlation(self, other: _Observed) -> float | None:
        """Pearson's, of magnitudes over inputs and channels, the mean over layers that vary."""
        coefficients = []
        for name, mine in self.magnitudes.items():
            a, b = (torch.cat(mine).double(), torch.cat(other.magnitudes.get(name) or [torch.empty(0)]))
            if a.shape == b.shape and float(a.std()) > 0 and float(b.std()) > 0:
                coefficients.append(float(torch.corrcoef(torch.stack([a.flatten(), b.double().flatten()]))[0, 1]))
        return sum(coefficients) / len(coefficients) if coefficients else None

    def zero_rates(self, other: _Observed) -> tuple[float | None, float | None]:
        """Precision and recall of the other's zeros."""
        hit = claimed = actual = 0
        for name, mine in self.zeros.items():
            for a, b in zip(mine, other.zeros.get(name, ()), strict=False):
                b = _resize_zeros(b, a)
                if b is None:
                    return None, None
                hit, claimed, actual = (hit + int((a & b).sum()), claimed + int(b.sum()), actual + int(a.sum()))
        return (hit / claimed if claimed else None), (hit / actual if actual else None)

    def zero_share(self) -> float | None:
        every = [m for maps in self.zeros.values() for m in maps]
        count = sum(m.numel() for m in every)
        return sum(int(m.sum()) for m in every) / count if count else None


def _restore_cut_channels(zeros: Tensor, site: MeasuredValue) -> Tensor:
    """Zeros of all channels of the full network: those that were cut are zero."""
    if site.remaining is None or site.axis is None:
        return zeros
    shape = [site.size if k == site.axis else n for k, n in enumerate(zeros.shape)]
    full = torch.ones([n or 0 for n in shape], dtype=torch.bool)
    return full.index_copy(site.axis, torch.tensor(site.remaining, dtype=torch.int64), zeros)


def _resize_zeros(zeros: Tensor, full: Tensor) -> Tensor | None:
    """A pilot's zeros in the size of the full map: the nearest position of a smaller image."""
    if zeros.shape == full.shape:
        return zeros
    if zeros.ndim == full.ndim and zeros.ndim in (3, 4, 5) and zeros.shape[:2] == full.shape[:2]:
        return F.interpolate(zeros.float(), full.shape[2:], mode="nearest").bool()
    return None


def _float_tensors(out: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _row_cells(row: ComparisonRow) -> list[str]:
    speed = "–" if row.speed is None else f"{row.speed:.2f} ×"
    return [
        _format_percent(row.agreement),
        "–" if row.error is None else f"{row.error:.2g}",
        "–" if row.correlation is None else f"{row.correlation:.3f}",
        _format_percent(row.precision),
        _format_percent(row.recall),
        format_bytes(row.weight_bytes),
        f"{row.macs:.3g}",
        speed,
    ]


def _format_percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"
