"""`report(slim)`: what was removed, what was not and why, from the network's provenance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.compat.dispatch import OpOverload, schema_of
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.graph.provenance import GIVEN, Cut, Provenance, Reason, provenance_of
from demask.ops.schema import example_size
from demask.pages import Page, PageSource, Span, Timeline
from demask.report.sections import EFFECTS, report_sections
from demask.report.values import Decline, ModuleRow, ReportValues
from demask.shrink.pipeline import sliced_shape

NEAR_ZERO, MOST_NAMED = 1e-6, 3
_SCANNED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Report(ReportValues, PageSource):
    """The sizes of a network before and after demasking, and the reasons for what was not removed.

    The result of `report`; `print` shows it as tables, `to_html` and notebooks as a page.

    Attributes:
        before, after: sizes of the original and of the result, each with `parameters` (elements,
            as sum(p.numel() for p in net.parameters()) counts them), `buffers` (elements), `macs`
            (multiply-adds of one call on inputs of the example's sizes) and `bytes` (of all these
            tensors).
        batch: number of examples in that call, an int; 0 if it is not known. Texts have MACs of one
            example where it is.
        removed: removed parameters by module name, largest first.
        scatters: number of ops in the result that only restore shapes, by kind: "scatter",
            "scatter-add", "gather", "slice", "pad", "border map" (constants near padded borders).
        declined: a tuple of `Decline`, most slices first: zero rows and columns of weights that
            were not removed, and the reasons.
        notes: further remarks as texts, such as the dynamic dimensions.
        speed: timings of `demask.optimize`; None without them. Its first field has the seconds of a
            call of the original, `result` those of the result (median, 10 % and 90 % quantile);
            `ratio`: median of the original / median of the result; `least`: lower 95 % bound of the
            ratio; `pairs`: number of rounds; `threads`; `machine`: its description.
        decisions: of `demask.optimize`, one per part of the network: `place` (the part), `chosen`
            (the implementation) and `seconds` by implementation. Default: ().
        densities: stored share of the weights, from 0 to 1, by name of the sparse layer.
        form: "class" if the result has the class of the original, "graph" if it is a graph module.
        graph_reasons: texts that say which parts of the result are graph modules, and why.
        modules: the modules with parameters or MACs, in order of execution, each with `name`,
            `parameters` and `macs` (before and after, without those of submodules; MACs of one
            call), `weight` (shapes of its largest tensor; None if unknown) and `seconds` (None
            where they were not measured). Default: ().
        timeline: of graphs, the bytes of the values that are alive at each call; else None.
        zeros: if nothing was removed: number of rows and columns of zeros, by tensor name; else {}.

    Example:
        >>> import demask, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> model[0].weight.data[:6], model[0].bias.data[:6] = 0, 0  # six units are always zero
        >>> report = demask.report(demask.demask(model, (torch.ones(1, 4),)))
        >>> report.before.parameters, report.after.parameters, dict(report.removed)
        (58, 16, {'0': 30, '2': 12})
    """

    def page(self) -> Page:
        """What `print` and `to_html` show, as sections."""
        return Page("demask report", tuple(report_sections(self)), self.summary)


@in_isolation
@public
def report(slim: nn.Module) -> Report:
    """The `Report` on a network that a function of demask returned.

    Args:
        slim: a network with the attribute `demasked`, such as the result of `demask.demask` or
            `demask.optimize`. It is not changed.

    Raises:
        BadInput: `slim` has no attribute `demasked`.

    Example:
        >>> import demask, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> model[0].weight.data[:6], model[0].bias.data[:6] = 0, 0  # six units are always zero
        >>> slim = demask.demask(model, (torch.ones(2, 4),))
        >>> print(demask.report(slim).summary)
        58 -> 16 parameters, 48 -> 12 MACs per example
    """
    provenance = provenance_of(slim)
    result = Report(
        before=provenance.before,
        after=provenance.after,
        removed=_largest_first(provenance.removed),
        scatters=dict.fromkeys(EFFECTS, 0) | dict(provenance.effects),
        declined=_declines(provenance.reasons),
        notes=(*provenance.notes, *_describe_near_zeros(slim)),
        speed=provenance.speed,
        decisions=provenance.decisions,
        densities=provenance.densities,
        form=provenance.form,
        graph_reasons=provenance.graph_reasons,
        batch=provenance.batch,
        modules=_module_rows(provenance),
        timeline=memory_timeline(slim),
    )
    return replace(result, zeros=_zero_slices(slim)) if result.nothing_removed else result


def _module_rows(provenance: Provenance) -> tuple[ModuleRow, ...]:
    """The modules of a record, with the shapes of the largest tensor of which something is left."""
    cuts: dict[str, Cut] = {}
    for name, cut in provenance.cuts.items():
        path = name.rpartition(".")[0]
        if path not in cuts or math.prod(cuts[path].shape) < math.prod(cut.shape):
            cuts[path] = cut
    weights = {path: (cut.shape, sliced_shape(cut)) for path, cut in cuts.items()}
    timed = {one.place: (one.seconds.get(GIVEN), one.seconds.get(one.chosen)) for one in provenance.decisions}
    return tuple(
        ModuleRow(path, sizes.parameters, sizes.macs, weights.get(path), timed.get(path, (None, None)))
        for path, sizes in provenance.modules.items()
    )


def _zero_slices(network: nn.Module) -> dict[str, int]:
    """Rows and columns of weights that are zero, by tensor; those without any are left out."""
    counts = {}
    for name, weight in network.named_parameters():
        if weight.ndim > 1 and weight.numel() and weight.is_floating_point():
            zeros = weight.detach() == 0
            slices = zeros.flatten(1).all(1).sum() + zeros.transpose(0, 1).flatten(1).all(1).sum()
            counts[name] = int(slices)
    return {name: count for name, count in counts.items() if count}


def _describe_near_zeros(network: nn.Module) -> Iterator[str]:
    """A note on the rows of weights that are nearly zero, which stay: no threshold is used."""
    counts = {}
    for name, weight in network.named_parameters():
        if weight.ndim > 1 and weight.numel() and weight.dtype in _SCANNED and not weight.is_meta:
            largest = weight.detach().flatten(1).abs().amax(1)
            counts[name] = int(((largest > 0) & (largest < NEAR_ZERO * largest.max())).sum())
    named = [f"{count:,} of {name}" for name, count in counts.items() if count]
    if named:
        more = ", and more" if len(named) > MOST_NAMED else ""
        yield (
            f"rows of weights below {NEAR_ZERO:g} of their layer's largest, {', '.join(named[:MOST_NAMED])}{more}, "
            "stay, as they are not zero: set them to zero to have them removed"
        )


def _largest_first(removed: Mapping[str, int]) -> dict[str, int]:
    counts = [(module, count) for module, count in removed.items() if count]
    return dict(sorted(counts, key=lambda row: (-row[1], row[0])))


def _declines(reasons: tuple[Reason, ...]) -> tuple[Decline, ...]:
    """One decline per text: the sum of its slices, its modules in order, each once. Reasons without
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


def memory_timeline(network: nn.Module) -> Timeline | None:
    """The calls of a graph module against the bytes of the inputs and values that it still reads
    or returns, on the example's sizes, without parameters; None for other networks, and where a
    size is unknown."""
    if not isinstance(network, fx.GraphModule):
        return None
    nodes = [node for node in network.graph.nodes if node.op not in ("get_attr", "output")]
    owners = {node: node for node in nodes}
    for node in nodes:
        if (viewed := _viewed_operand(node)) is not None:
            owners[node] = owners.get(viewed, node)
    position = {node: k for k, node in enumerate(nodes)}
    last = dict.fromkeys(nodes, 0)
    for node in nodes:
        reads = [position.get(user, len(nodes)) for user in node.users] or [position[node]]
        last[owners[node]] = max(last[owners[node]], *reads)
    sizes = {node: _result_bytes(node) for node in nodes if owners[node] is node}
    if None in sizes.values():
        return None
    changes = [0] * (len(nodes) + 2)
    for node, size in sizes.items():
        changes[position[node]] += size or 0
        changes[last[node] + 1] -= size or 0
    spans, alive = list[Span](), 0
    for node, change in zip(nodes, changes, strict=False):
        alive += change
        if node.op != "placeholder":
            spans.append(Span(str(node.name), 1.0, alive))
    heading = "Values in memory, call by call"
    return Timeline(spans, "calls, in order", heading) if spans else None


def _viewed_operand(node: fx.Node) -> fx.Node | None:
    """The value whose memory a call's result is a part of; None if it has its own."""
    target, operands = node.target, node.all_input_nodes
    if not operands:
        return None
    if isinstance(target, OpOverload):
        returns = schema_of(target).returns
        return operands[0] if returns and returns[0].alias_info is not None else None
    return operands[0] if getattr(target, "__name__", "") == "getitem" else None


def _result_bytes(node: fx.Node) -> int | None:
    """Bytes of a call's results; None if a size is unknown."""
    value: Any = node.meta.get("val", node.meta.get("value"))
    total = 0
    for one in value if isinstance(value, (tuple, list)) else (value,):
        sizes = one.shape if isinstance(one, Tensor) else getattr(one, "sizes", None)
        if sizes is None:
            if one is None and node.op != "placeholder" and value is None:
                return None
            continue
        if any(isinstance(size, str) for size in sizes):
            return None
        total += math.prod(map(example_size, sizes)) * one.dtype.itemsize
    return total
