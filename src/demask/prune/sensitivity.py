"""What accuracy each group costs, and what its removal saves, by the share that is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.capture.shared_captures import share_captures
from demask.graph.isolation import in_isolation
from demask.graph.provenance import provenance_of
from demask.pages import Curve, Lines, OnPage, Page, PageSource, StepCharts, TextTable
from demask.progress import ProgressStep, progress
from demask.prune.coupling import as_arguments
from demask.prune.masked_copies import PredictedTime, PruningOptions, call_evaluate, masked_copy, pruner_of_copy
from demask.prune.plots import draw_sensitivity
from demask.prune.scores import L1
from demask.shrink.demask import demask

AMOUNTS = (0.1, 0.25, 0.5, 0.75, 0.9)
DRAWN = 8  # groups with a chart, those that lose most


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """A network with some slices of one group removed, and nothing else.

    group: its name; "" for the network as it is. size, removed: slices of the group. accuracy: what
    `evaluate` returned of the masked network. parameters, macs: of that network after `demask`.
    milliseconds: predicted for a call of it on the example inputs, the sum of its layers.

    Example:
        >>> from demask import prune
        >>> prune.SensitivityRow("conv1", 16, 4, 0.9, 100, 200, 0.5).amount
        0.25
    """

    group: str
    size: int
    removed: int
    accuracy: float
    parameters: int
    macs: int
    milliseconds: float

    @property
    def amount(self) -> float:
        """The share of the group's slices that is removed."""
        return self.removed / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Sensitivity(PageSource):
    """Accuracy, parameters, MACs and predicted milliseconds by group and amount.

    It prints as a table; `to_html` and notebooks also show charts.

    Attributes:
        dense: the row of the network as it is.
        rows: one for each group and amount, in the order of the network.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.ones(1, 4)
        >>> result = prune.sensitivity(net, lambda net: -net(x).norm().item(), (x,), amounts=(0.5,))
        >>> result.rows[0].group, result.rows[0].removed, result.rows[0].macs, result.dense.macs
        ('0', 4, 24, 48)
    """

    dense: SensitivityRow
    rows: tuple[SensitivityRow, ...]

    @property
    def by_group(self) -> dict[str, list[SensitivityRow]]:
        """The rows of each group, by its name, from the smallest amount on."""
        names = dict.fromkeys(row.group for row in self.rows)
        return {name: [row for row in self.rows if row.group == name] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The rows in JSON types."""
        rows = [asdict(row) | {"amount": row.amount} for row in self.rows]
        return {"dense": asdict(self.dense), "rows": rows}

    def plot(self, path: str | Path) -> None:
        """Write a picture to `path` (.svg, .png or .pdf): accuracy, MACs and milliseconds by the
        amount, one line for each group. Raises BadInput without matplotlib (extra `plot`)."""
        draw_sensitivity(self, Path(path))

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        amounts = sorted({round(row.amount, 2) for row in self.rows})
        few = len(amounts) <= 6
        heads = [f"at {100 * a:.0f} %" for a in amounts] if few else ["at least", "at most"]
        dense, table = self.dense, list[tuple[str, ...]]()
        for name, rows in self.by_group.items():
            ends = [f"{row.accuracy:.4g} at {100 * row.amount:.0f} %" for row in (rows[0], rows[-1])]
            cells = _accuracy_at(rows, amounts) if few else ends
            last = rows[-1]
            table.append(
                (
                    name,
                    str(last.size),
                    *cells,
                    f"{100 * last.macs / max(dense.macs, 1):.1f} %",
                    f"{last.milliseconds:.3g}",
                )
            )
        line = (
            f"as it is: accuracy {dense.accuracy:.4g}, {dense.parameters:,} parameters, "
            f"{dense.macs:,} MACs, {dense.milliseconds:.3g} ms (predicted). MACs and ms of "
            "all: the network's, at the largest amount."
        )
        return Page(
            "demask sensitivity",
            (
                TextTable(("accuracy", "slices", *heads, "MACs of all", "ms of all"), table, "Accuracy by group"),
                Lines([line], is_wrapped=True, is_close=True),
                OnPage([self._accuracy_charts()]),
            ),
        )

    def _accuracy_charts(self) -> StepCharts:
        """The accuracy of each group by the share of it that is removed, most lost first."""
        worst = sorted(self.by_group.items(), key=lambda group: group[1][-1].accuracy)
        curves = [
            Curve(name, [(0.0, self.dense.accuracy), *((100 * row.amount, row.accuracy) for row in rows)], True)
            for name, rows in worst[:DRAWN]
        ]
        words = f"The {DRAWN} groups that lose most." if len(worst) > DRAWN else ""
        return StepCharts(curves, 100.0, (), "What each group costs", words, "% removed")


def _accuracy_at(rows: Sequence[SensitivityRow], amounts: Sequence[float]) -> list[str]:
    """The accuracy at each amount; a group of few slices has not all of them."""
    by_amount = {round(row.amount, 2): f"{row.accuracy:.4g}" for row in rows}
    return [by_amount.get(amount, "") for amount in amounts]


@in_isolation
@public
def sensitivity(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    example_inputs: Any,
    *,
    amounts: Iterable[float] = AMOUNTS,
    structure: str = "channel",
    score: Any = None,
    skip: Iterable[str] = (),
    recover: Callable[[nn.Module], Any] | None = None,
) -> Sensitivity:
    """Accuracy and cost of the network with one group pruned, for each group and amount.

    For each the least important slices of the group are masked in a copy, the copy is evaluated and
    demasked: parameters and MACs are those of the smaller network, and milliseconds are predicted
    for it from measured ops of this machine. `model` does not change. On a terminal, a bar is shown
    beyond two seconds.

    Args:
        model: an `nn.Module`, trained.
        evaluate: takes a network in eval mode and returns a number, higher for a better network.
        example_inputs: as of `Pruner`; MACs and milliseconds are those of one call on them.
        amounts: shares of a group's slices, above 0 and below 1; rounded down to full slices, at
            least one. Default: (0.1, 0.25, 0.5, 0.75, 0.9).
        structure, score, skip: as of `Pruner`. Default: channels by L1.
        recover: called with each masked copy before it is evaluated, such as
            `lambda net: prune.recalibrate_norms(net, batches)`. Default: None.

    Returns:
        A `Sensitivity`; `str` is a table, `to_dict` is for JSON, `plot` draws it.

    Raises:
        BadInput: an amount out of range, or `evaluate` raises or returns no finite number.

    Example:
        >>> import torch
        >>> from demask import prune
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.ones(1, 4)
        >>> result = prune.sensitivity(net, lambda net: -net(x).norm().item(), (x,), amounts=(0.5,))
        >>> [(row.amount, row.parameters) for row in result.rows]
        [(0.5, 30)]
    """
    shares = [*amounts]
    if not shares or not all(isinstance(share, (int, float)) and 0 < share < 1 for share in shares):
        raise BadInput(f"expected amounts above 0 and below 1, got {shares}")
    shares = sorted(set(shares))
    options = PruningOptions(score or L1(), structure, skip if isinstance(skip, str) else [*skip])
    with share_captures():  # copies differ in the values of weights alone
        pruner = pruner_of_copy(model, example_inputs, options)
        tasks = [(c.name, c.units, n) for c in pruner.candidates for n in _unit_counts(c.units, shares)]
        time = PredictedTime(pruner)
        measure = _Measurement(model, evaluate, example_inputs, options, recover, time)
        with progress("sensitivity", len(tasks) + 1) as step:
            dense = measure.row("", 0, 0, step)
            measure = replace(measure, dense=dense)
            rows = tuple(measure.row(*task, step) for task in tasks)
    time.save()
    return Sensitivity(dense, rows)


def _unit_counts(units: int, shares: Sequence[float]) -> list[int]:
    """The distinct numbers that shares of some units are, from 1 to all but one."""
    return sorted({min(max(int(share * units + 1e-9), 1), units - 1) for share in shares} - {0})


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Measures one row after the other; see `sensitivity`."""

    model: nn.Module
    evaluate: Callable[[nn.Module], float]
    example_inputs: Any
    options: PruningOptions
    recover: Callable[[nn.Module], Any] | None
    time: PredictedTime
    dense: SensitivityRow | None = None  # of the network as it is, once it is measured

    def row(self, group: str, size: int, removed: int, step: ProgressStep) -> SensitivityRow:
        amounts = {group: removed} if removed else {}
        copy, _ = masked_copy(self.model, self.example_inputs, amounts, self.options)
        words = f"{group} without {removed} of {size}" if removed else "the network as it is"
        if self.recover is not None and removed:
            self.recover(copy)
        with torch.no_grad():
            accuracy = call_evaluate(self.evaluate, copy.eval(), words)
        parameters, macs = self._sizes_after_demask(copy, group)
        milliseconds = self.time.milliseconds(amounts)
        step(words)
        return SensitivityRow(group, size, removed, accuracy, parameters, macs, milliseconds)

    def _sizes_after_demask(self, copy: nn.Module, group: str) -> tuple[int, int]:
        """Parameters and MACs after `demask`. Single weights that leave no output and no input of
        their layer zero let it remove what it removes of the full network, and no more."""
        weights = dict(copy.named_parameters())
        is_dense_group = self.recover is None and group in weights and not _has_zero_slice(weights[group])
        if self.dense is not None and is_dense_group:
            return self.dense.parameters, self.dense.macs
        slim = demask(copy, *as_arguments(self.example_inputs), check=False, result="graph")
        after = provenance_of(slim).after
        return after.parameters, after.macs


def _has_zero_slice(weight: torch.Tensor) -> bool:
    axes = range(weight.ndim)
    nonzeros = [(weight != 0).sum([d for d in axes if d != axis]) for axis in axes]
    return weight.ndim < 2 or any(bool((count == 0).any()) for count in nonzeros)
