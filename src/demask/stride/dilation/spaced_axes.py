"""Spaced axes: position k of the original axis is at a later position of a longer axis.

A strided convolution computed with stride 1 has its valid values at positions 0, s, 2 s, ... of
each axis. Positions between them are not valid: calls after it read only the valid ones
(`spaced_calls`, `spaced_windows`). A `SpacedAxis` lists the valid positions of one axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.ops import schema
from demask.ops.schema import fake
from demask.stride.average_pools import PAD, copy_metadata
from demask.stride.targets import Target

aten = torch.ops.aten
# The fill of invalid positions that does not change a reduction, by its name.
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class SpacedAxis:
    """An axis of length `size` whose valid positions are `places`, in ascending order."""

    positions: tuple[int, ...]
    size: int

    @classmethod
    def even(cls, count: int, gap: int, size: int) -> SpacedAxis:
        """An axis with valid positions 0, gap, 2 gap, ..."""
        return cls(tuple(range(0, count * gap, gap)), size)

    @property
    def count(self) -> int:
        """Number of valid positions."""
        return len(self.positions)

    @property
    def gap(self) -> int | None:
        """The distance of valid positions, if they begin at 0, are evenly spaced, and the next one
        would be beyond the axis, where only padding is read. Else None."""
        gap = self.size if self.count == 1 else self.positions[1] - self.positions[0]
        fits = self.positions == tuple(range(0, self.count * gap, gap))
        return gap if fits and self.size <= self.count * gap else None

    @property
    def is_all(self) -> bool:
        """Whether every position is valid."""
        return self.count == self.size

    def valid_mask(self) -> Tensor:
        """Mask of valid positions, bool (size,)."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[list(self.positions)] = True
        return mask

    def nearest(self) -> Tensor:
        """For each position the index k of the last valid one up to it, int64 (size,)."""
        return (self.valid_mask().cumsum(0) - 1).clamp_min(0)


Nodes = Mapping[fx.Node, fx.Node]
SpacedAxes = Mapping[int, SpacedAxis]  # the spaced axes of a value; all others are unchanged


def merge_axes(parts: Sequence[SpacedAxis]) -> SpacedAxis:
    """Axes merged into one, in row-major order."""
    positions = torch.zeros((), dtype=torch.int64)
    for part in parts:
        positions = positions.unsqueeze(-1) * part.size + torch.tensor(part.positions)
    return SpacedAxis(tuple(positions.flatten().tolist()), math.prod(part.size for part in parts))


def only_spaced(axes: Mapping[int, SpacedAxis]) -> SpacedAxes:
    """The axes without those on which every position is valid."""
    return {axis: part for axis, part in axes.items() if not part.is_all}


def mask_of(spacing: SpacedAxes, rank: int) -> Tensor:
    """Mask of the valid positions of a value: bool, broadcastable, of size 1 along axes that are
    not spaced."""
    mask = torch.ones([1] * rank, dtype=torch.bool)
    for axis, part in spacing.items():
        mask = mask & part.valid_mask().reshape([-1 if k == axis else 1 for k in range(rank)])
    return mask


@dataclass(frozen=True, slots=True)
class NotSpaced:
    """Why a call cannot read spaced axes. short: operands that would have to be spaced, too."""

    text: str
    short: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedRule:
    """How a call runs on spaced axes.

    outs: the spaced axes of each output. emit: inserts the calls. non_finite: whether invalid
    positions may be Inf or NaN although no value of the network is. broadcast: operands of one
    position, which fits every spacing; strides before them may remain.
    """

    outs: tuple[SpacedAxes, ...]
    emit: Callable[[Emission], fx.Node]
    non_finite: bool = False
    broadcast: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedPlan:
    """The calls to rewrite for a target, in order, with their rules."""

    target: Target
    analysis: Analysis
    steps: dict[fx.Node, SpacedRule] = field(default_factory=dict)

    def spacings(self, node: Any) -> tuple[SpacedAxes, ...]:
        """The spaced axes of each output of a node; empty for a node that is not rewritten."""
        step = self.steps.get(node) if isinstance(node, fx.Node) else None
        return () if step is None else step.outs

    def spacing(self, node: Any) -> SpacedAxes:
        """The spaced axes of a node's only output."""
        outs = self.spacings(node)
        return outs[0] if len(outs) == 1 else {}

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a call that have spaced axes."""
        return [n for n in node.all_input_nodes if any(self.spacings(n))]

    def is_finite(self, x: fx.Node) -> bool:
        """Whether no position of a value is Inf or NaN, so that 0 times it is 0."""
        whole = not fake(x).is_floating_point()
        return whole or (self.target.finite and not (x in self.steps and self.steps[x].non_finite))

    def multiplies(self, x: fx.Node) -> bool:
        """Whether a value is masked by multiplication, rather than by a selection."""
        plain = self.target.finite or "select" not in self.target.ops
        return plain and self.is_finite(x) and "multiply" in self.target.ops

    def may_mask(self, x: fx.Node, fill: float = 0, scale: float = 1) -> bool:
        """Whether the target can set invalid positions to `fill` and multiply valid ones by
        `scale`."""
        selects = "select" in self.target.ops and (scale == 1 or "multiply" in self.target.ops)
        return selects or (fill == 0 and self.multiplies(x))


class Emission:
    """Inserts the calls that replace `node`. replacements: of the nodes before it."""

    def __init__(self, editor: GraphEditor, node: fx.Node, replacements: Nodes, plan: SpacedPlan):
        self.editor, self.node, self.plan = editor, node, plan
        self.replacements = replacements

    def read(self, node: fx.Node) -> fx.Node:
        """The replacement of an operand, or the operand itself."""
        return self.replacements.get(node, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call inserted before the node, with the node's metadata."""
        call = self.editor.insert(self.node, None, target, *args, **kwargs)
        return copy_metadata(call, self.node)

    def again(self, /, **changed: Any) -> fx.Node:
        """The node's own call on the replacements of its operands, with some arguments changed."""
        arguments = map_arg(schema.arguments(self.node), self.read)
        args, kwargs = schema.bind_arguments(self.node.target, arguments | changed)
        return self.call(self.node.target, *args, **kwargs)

    def constant(self, name: str, tensor: Tensor) -> fx.Node:
        """A new constant, named after the node."""
        return self.editor.add_constant(f"{self.node.name}_{name}", tensor, self.node)

    def longer(self, x: fx.Node, more: Mapping[int, int]) -> fx.Node:
        """`x` with `more[axis]` zeros appended to each axis."""
        rank = fake(x).ndim
        flat = [n for axis in reversed(range(rank)) for n in (0, more.get(axis, 0))]
        return self.call(PAD, x, flat) if any(flat) else x

    def masked(self, x: fx.Node, spacing: SpacedAxes, *, fill: float = 0, scale: float = 1) -> fx.Node:
        """The replacement of `x` at valid positions, `fill` elsewhere. scale: a factor, used if the
        mask is a product (`SpacedPlan.multiplies`)."""
        product, x = fill == 0 and self.plan.multiplies(x), self.read(x)
        value = fake(x)
        keep = mask_of(spacing, value.ndim)
        if product:
            dtype = value.dtype
            return self.call(aten.mul.Tensor, x, self.constant("mask", keep.to(dtype) * scale))
        other = self.constant("fill", torch.tensor(fill, dtype=value.dtype))
        return self.call(aten.where.self, self.constant("mask", keep), x, other)


def mean_correction(over: SpacedAxes, kind: str) -> float:
    """The factor that corrects a reduction of a masked value: a mean counts masked zeros, too."""
    return math.prod(part.size / part.count for part in over.values()) if kind == "mean" else 1


def reduced(x: fx.Node, over: SpacedAxes, outs: tuple[SpacedAxes, ...], kind: str) -> SpacedRule:
    """The rule of a reduction over spaced axes of a masked operand. kind: key of NEUTRAL."""
    share = mean_correction(over, kind)

    def emit(here: Emission) -> fx.Node:
        fill, dtype = NEUTRAL[kind], fake(x).dtype
        if fill and not dtype.is_floating_point:
            fill = torch.iinfo(dtype).min if fill < 0 else torch.iinfo(dtype).max
        first = share if fill == 0 and here.plan.multiplies(x) else 1
        masked = here.masked(x, over, fill=fill, scale=first)
        total = here.again(self=masked)
        return total if first == share else here.call(aten.mul.Tensor, total, share)

    return SpacedRule(outs, emit)


@dataclass(frozen=True, slots=True)
class SpacedReader:
    """A call that reads values with spaced axes, and the plan so far."""

    editor: GraphEditor
    node: fx.Node
    plan: SpacedPlan
