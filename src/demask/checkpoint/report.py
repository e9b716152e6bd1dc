"""What was removed from a checkpoint folder, and what its format keeps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from demask.checkpoint.blocks import check_blocks, fit_blocks
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.gguf_file import check_gguf
from demask.checkpoint.plan import CheckpointPlan, LayerSlices, find_cuts, fit_layers, new_name, new_shape, round_units
from demask.checkpoint.proof import CheckpointProof
from demask.checkpoint.targets import TARGETS, BlockFormat
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput
from demask.machine.byte_sizes import format_bytes, peak_memory
from demask.pages import Box, Lines, NetworkPicture, OnPage, Page, PageSource, TextTable

SCALE = 16  # rows and columns of the picture of a layer
LITTLE = 0.005  # of all parameters: less is not worth a word


@dataclass(frozen=True, slots=True)
class SliceCount:
    """The slices of a group."""

    name: str  # of its first parameter, without the layer's number
    kind: str
    layers: int  # that have them
    before: int
    live: tuple[int, int]  # the fewest and the most of a layer (and expert)
    written: int  # the most of a layer
    by_layer: tuple[int, ...]  # of each layer


@dataclass(frozen=True, slots=True)
class CheckpointReport(PageSource):
    """What `checkpoint.slim` did; it prints as a table, and is a page by `to_html`.

    Attributes:
        out: the new folder or file.
        bytes, parameters: of all tensors, before and after.
        layers: by stack, their number before and after.
        slices: by group, what there was and is.
        removable: the share of parameters that zeros make useless, in each layer by itself.
        removed: the share that the result does not have.
        by_layer: by loader, the share that the format with sizes by layer that it loads would not
            have; without loaders that have none for the class.
        advice: what the difference comes from; "" if there is none.
        notes: what stays, and why.
        proof: how it was compared with the original; None if it was not.
        memory: the most bytes of memory that this process has had; None where the system does not
            say.
    """

    out: Path
    bytes: tuple[int, int]
    parameters: tuple[int, int]
    layers: Mapping[str, tuple[int, int]]
    slices: tuple[SliceCount, ...]
    removable: float
    removed: float
    by_layer: Mapping[str, float]
    advice: str
    notes: tuple[str, ...]
    proof: CheckpointProof | None
    memory: int | None

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can represent."""
        return {**asdict(self), "out": str(self.out)}

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        head = ("slices", "layers", "before", "live", "written")
        table = TextTable(head, [_count_cells(row) for row in self.slices], "Slices", pad_edge=False)
        compared = str(self.proof or "not compared with the original")
        boxes = [box for row in self.slices for box in _count_boxes(row)]
        picture = NetworkPicture(boxes, "The layers", words="A box has the slices of a layer.")
        memory = [f"memory of this process: at most {format_bytes(self.memory or 0)}"]
        return Page(
            "demask slim",
            (
                table,
                Lines(self._size_lines(), "Sizes", is_close=True),
                OnPage([picture]),
                Lines([self._describe_shares()], "What would free more", is_close=True),
                Lines([compared], "Verification", is_close=True),
                Lines(memory * (self.memory is not None), "Memory", is_close=True),
                Lines(self.notes, "Notes", is_close=True),
            ),
        )

    def _size_lines(self) -> list[str]:
        sizes = " -> ".join(format_bytes(n) for n in self.bytes)
        numbers = " -> ".join(f"{n:,}" for n in self.parameters)
        lines = [f"{self.out}: {numbers} parameters, {sizes}"]
        changed = [(path, a, b) for path, (a, b) in self.layers.items() if a != b]
        return [*lines, *(f"{path}: {a} -> {b} layers" for path, a, b in changed)]

    def _describe_shares(self) -> str:
        """What zeros make useless, and what this format and others save of it."""
        shares = f"removable {self.removable:.1%}, in this format {self.removed:.1%}"
        more = [f"{name} {share:.1%}" for name, share in self.by_layer.items() if share > self.removed + LITTLE]
        if more:
            shares += f", with sizes by layer: {', '.join(more)}"
        return shares + (f"; {self.advice}" if self.advice else "")


def _count_cells(row: SliceCount) -> tuple[str, ...]:
    every = (row.live, (min(row.by_layer), row.written))
    spans = (" to ".join(map(str, sorted(set(ends)))) for ends in every)
    return f"{row.name} ({row.kind}s)", str(row.layers), str(row.before), *spans


def _count_boxes(row: SliceCount) -> list[Box]:
    """One box per layer: the share of the slices that was written."""
    return [
        Box(
            str(k),
            (SCALE, round(SCALE * count / row.before)),
            (SCALE, SCALE),
            f"{count:,} of {row.before:,} {row.kind}s written",
            f"{row.name} ({row.kind}s)",
        )
        for k, count in enumerate(row.by_layer)
        if row.before
    ]


def describe_plan(
    stored: StoredTensors,
    plan: CheckpointPlan,
    out: Path,
    original: CheckpointFolder,
    written: tuple[int, int],
    proof: CheckpointProof | None,
    notes: Sequence[str],
) -> CheckpointReport:
    """The report of a plan that was written.

    Args:
        stored: the tensors that the plan is of: those of `original` without what is removed on
            request.
        written: bytes and elements.
    """
    groups: dict[str, list[LayerSlices]] = defaultdict(list)
    counts: dict[str, list[int]] = defaultdict(list)
    for mine, count in zip(plan.slices, plan.counts, strict=True):
        groups[mine.group.name].append(mine)
        counts[mine.group.name].append(count)
    rows, useless, costs = list[SliceCount](), 0, list[tuple[int, str]]()
    for name, every in groups.items():
        group, width = every[0].group, every[0].width(stored.shapes)
        live = [sum(not f.dead for f in fates) for mine in every for fates in mine.fates]
        rows.append(
            SliceCount(
                _without_number(every[0]),
                group.kind,
                sum(len(mine.layers) for mine in every),
                group.size,
                (min(live), max(live)),
                max(counts[name]),
                tuple(counts[name]),
            )
        )
        useless += sum((group.size - n) * width for n in live)
        widest = max(every, key=lambda mine: mine.live)
        second = max((mine.live for mine in every if mine is not widest), default=widest.live)
        multiple = plan.multiple if group.kind == "unit" else 1
        fits = [round_units(count, group.size, multiple) for count in (second, widest.live)]
        if fits[0] < fits[1] and set(counts[name]) == {fits[1]}:
            kind, layer = widest.layers[0]
            costs.append(
                (
                    (fits[1] - fits[0]) * width * len(live),
                    f"{kind.stack}.{layer} costs the difference: mask it to {fits[0]} {group.kind}s",
                )
            )
    before, after = original.parameters, written[1]
    dropped = (
        before
        - stored.folder.parameters
        + sum(
            math.prod(stored.folder.stored(n).shape)
            for n in stored.folder.file_of
            if (at := stored.layer_of(n)) is not None and at[1] not in plan.layers[at[0].path]
        )
    )
    removable = min(1.0, (useless + dropped) / before)
    advice = ""
    if costs and removable - (before - after) / before > LITTLE:
        saved, text = max(costs)
        advice = f"{text} to save {saved / before:.1%} more"
    return CheckpointReport(
        out,
        (original.nbytes, written[0]),
        (before, after),
        {s.path: (len(s.kinds), len(plan.layers[s.path])) for s in stored.stacks},
        tuple(rows),
        removable,
        (before - after) / before,
        _shares_by_layer(stored, plan, before),
        advice,
        (*plan.notes, *notes),
        proof,
        peak_memory(),
    )


def _shares_by_layer(stored: StoredTensors, plan: CheckpointPlan, before: int) -> dict[str, float]:
    """By loader, the share of `before` elements that its format with sizes by layer lacks."""
    if stored.folder.scales or stored.adapter is not None:
        return {}
    shares: dict[str, float] = {}
    for name, loader in TARGETS.items():
        try:
            own = check_gguf(stored.model) if loader.architectures else check_blocks(stored.model, loader)
        except BadInput:
            continue
        counts, dropped = fit_layers(stored, plan.slices, plan.layers, own, loader.multiple)
        other = replace(plan, counts=counts, dropped=dropped, cuts=find_cuts(stored, plan.slices, counts))
        if isinstance(own, BlockFormat):
            other = fit_blocks(stored, other, own)
        left = sum(
            math.prod(new_shape(stored, other, tensor))
            for tensor in stored.folder.file_of
            if new_name(stored, other, tensor) is not None
        )
        shares[name] = 1 - left / before
    return shares


def _without_number(mine: LayerSlices) -> str:
    kind, member = mine.layers[0][0], mine.group.members[0]
    return f"{kind.stack}.*.{member.name.rpartition('.')[0] or member.name}"
