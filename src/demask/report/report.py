"""`report(slim)`: what was removed, what was not and why, from the network's provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.provenance import Provenance, Reason
from demask.report.page import write_page
from demask.report.text import EFFECTS, render
from demask.report.values import Decline, ReportValues


@dataclass(frozen=True, slots=True)
class Report(ReportValues):
    """What `demask.demask` or `demask.optimize` did to one network; `print` shows it as tables.

    Attributes:
        before, after: parameters (elements of floating tensors; masks are none), MACs of one call
            on the example inputs (of their batch size, even where it is dynamic), bytes of all
            tensors.
        removed: parameters removed per module, most first.
        scatters: number of ops that only restore shapes, by effect; every effect is present.
        declined: what was not removed and why, most slices first.
        notes: further remarks (dynamic dimensions, rules that were used).
        speed: of `demask.optimize`: seconds of the original and of the result, measured in turns.
        decisions: of `demask.optimize`: the choice for each piece, and the seconds of all others.
        densities: of sparse layers, the share of weights that is stored.
        form: "class" where the result has the class of the original, else "graph".
        graph_reasons: where and why parts of the result are graphs.
        zeros: where nothing was removed for no known reason, slices of zeros by tensor.

    Example:
        >>> import demask, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:6].zero_(), model[0].bias[:6].zero_()
        >>> report = demask.report(demask.demask(model.eval(), (torch.ones(1, 4),)))
        >>> report.before.parameters, report.after.parameters, dict(report.removed)
        (58, 16, {'0': 30, '2': 12})
    """

    def __str__(self) -> str:
        return render(self)

    def to_html(self, path: str | Path) -> None:
        """Write the report to `path` as one page that needs no other file; whole or not at all."""
        write_page(self, Path(path))


@public
def report(slim: nn.Module) -> Report:
    """A `Report` of what was removed from a network that a function of demask returned.

    Args:
        slim: the network; it is not changed.

    Raises:
        BadInput: `slim` is any other module.

    Example:
        >>> import demask, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> with torch.no_grad():  # six of eight hidden units are always zero
        ...     _ = model[0].weight[:6].zero_(), model[0].bias[:6].zero_()
        >>> slim = demask.demask(model, (torch.ones(2, 4),))
        >>> print(demask.report(slim).summary)
        58 -> 16 parameters, 96 -> 24 MACs
    """
    provenance = getattr(slim, "demasked", None)
    if not isinstance(provenance, Provenance):
        raise BadInput(
            f"expected a network that demask returned, got a {type(slim).__name__} without the "
            "attribute `demasked`; call demask.demask(model, args) and report its result"
        )
    result = Report(
        before=provenance.before,
        after=provenance.after,
        removed=_largest_first(provenance.removed),
        scatters=dict.fromkeys(EFFECTS, 0) | dict(provenance.effects),
        declined=_grouped(provenance.reasons),
        notes=provenance.notes,
        speed=provenance.speed,
        decisions=provenance.decisions,
        densities=provenance.densities,
        form=provenance.form,
        graph_reasons=provenance.graph_reasons,
    )
    return replace(result, zeros=_zero_slices(slim)) if result.nothing_removed else result


def _zero_slices(network: nn.Module) -> dict[str, int]:
    """Rows and columns of weights that are zero, by tensor; those without any are left out."""
    counts = {}
    for name, weight in network.named_parameters():
        if weight.ndim > 1 and weight.numel() and weight.is_floating_point():
            zeros = weight.detach() == 0
            slices = zeros.flatten(1).all(1).sum() + zeros.transpose(0, 1).flatten(1).all(1).sum()
            counts[name] = int(slices)
    return {name: count for name, count in counts.items() if count}


def _largest_first(removed: Mapping[str, int]) -> dict[str, int]:
    counts = [(module, count) for module, count in removed.items() if count]
    return dict(sorted(counts, key=lambda row: (-row[1], row[0])))


def _grouped(reasons: tuple[Reason, ...]) -> tuple[Decline, ...]:
    """One decline per text: the sum of its slices, its places in order, each once. Reasons without
    slices (an op without rule that no masked value reaches) are left out."""
    by_text: dict[str, list[Reason]] = {}
    for reason in (reason for reason in reasons if reason.count):
        by_text.setdefault(reason.text, []).append(reason)
    declines = [
        Decline(
            text,
            sum(reason.count for reason in group),
            tuple(dict.fromkeys(reason.module or reason.node for reason in group)),
        )
        for text, group in by_text.items()
    ]
    return tuple(sorted(declines, key=lambda decline: (-decline.slices, decline.text)))
