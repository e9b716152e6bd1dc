"""Values whose positions stand apart: what was at position k of an axis is at another, further on.

A strided convolution that is computed with stride 1 has its value at positions 0, s, 2 s, ... of
each axis. What stands between them means nothing and is read by nobody: each call behind reads the
grid alone (`grid_rules`, `grid_windows`), and a grid in a longer axis is told by a `Spread`.
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
from demask.stride.average_pools import PAD, described
from demask.stride.targets import Target

aten = torch.ops.aten
# What stands between positions, of reductions over an axis, so that it does not count.
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class Spread:
    """Position k of an axis stands at places[k], rising, of an axis `size` long."""

    places: tuple[int, ...]
    size: int

    @classmethod
    def even(cls, count: int, gap: int, size: int) -> Spread:
        """Positions 0, gap, 2 gap, ..."""
        return cls(tuple(range(0, count * gap, gap)), size)

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def gap(self) -> int | None:
        """The distance of a grid that begins at 0 and ends where its next position would be beyond
        the axis: what is read there is padding, as it was. None for other places."""
        gap = self.size if self.count == 1 else self.places[1] - self.places[0]
        fits = self.places == tuple(range(0, self.count * gap, gap))
        return gap if fits and self.size <= self.count * gap else None

    @property
    def is_all(self) -> bool:
        """Does every position mean something?"""
        return self.count == self.size

    def keep(self) -> Tensor:
        """bool [size]: the positions that mean something."""
        made = torch.zeros(self.size, dtype=torch.bool)
        made[list(self.places)] = True
        return made

    def nearest(self) -> Tensor:
        """int64 [size]: of each position, the k whose place is the last one before it."""
        return (self.keep().cumsum(0) - 1).clamp_min(0)


Nodes = Mapping[fx.Node, fx.Node]
Grid = Mapping[int, Spread]  # of the axes whose positions stand apart; nothing is said of others


def merged(parts: Sequence[Spread]) -> Spread:
    """Axes merged into one, the first one major."""
    places = torch.zeros((), dtype=torch.int64)
    for part in parts:
        places = places.unsqueeze(-1) * part.size + torch.tensor(part.places)
    return Spread(tuple(places.flatten().tolist()), math.prod(part.size for part in parts))


def kept(axes: Mapping[int, Spread]) -> Grid:
    """The grid of axes, without those of which every position means something."""
    return {axis: part for axis, part in axes.items() if not part.is_all}


def mask_of(grid: Grid, rank: int) -> Tensor:
    """bool, one axis per axis of a value: what of it means something; long along the grid alone."""
    made = torch.ones([1] * rank, dtype=torch.bool)
    for axis, part in grid.items():
        made = made & part.keep().reshape([-1 if k == axis else 1 for k in range(rank)])
    return made


@dataclass(frozen=True, slots=True)
class NotSpaced:
    """Why a call cannot read a grid. short: operands that would have to stand on one too."""

    text: str
    short: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedRule:
    """How a call is made on grids: where the positions of each output stand, and the calls. wild:
    may Inf or NaN stand between the positions, though no value of the network is? beside: operands
    of one position, which fits every grid; strides before them may be left behind."""

    outs: tuple[Grid, ...]
    emit: Callable[[Emission], fx.Node]
    wild: bool = False
    beside: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SpacedPlan:
    """What is to be rewritten for a target: calls in order, and how the values of each stand."""

    target: Target
    analysis: Analysis
    steps: dict[fx.Node, SpacedRule] = field(default_factory=dict)

    def grids(self, node: Any) -> tuple[Grid, ...]:
        """How the values that a node makes stand; nothing of one that stays as it is."""
        found = self.steps.get(node) if isinstance(node, fx.Node) else None
        return () if found is None else found.outs

    def grid(self, node: Any) -> Grid:
        """How the one value of a node stands."""
        found = self.grids(node)
        return found[0] if len(found) == 1 else {}

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a call whose positions stand apart."""
        return [n for n in node.all_input_nodes if any(self.grids(n))]

    def is_finite(self, x: fx.Node) -> bool:
        """Is nothing that stands in a value Inf or NaN, so that 0 times it is 0?"""
        whole = not x.meta["val"].is_floating_point()
        return whole or (self.target.finite and not (x in self.steps and self.steps[x].wild))

    def multiplies(self, x: fx.Node) -> bool:
        """Is a mask of zeros a factor? Else it chooses."""
        plain = self.target.finite or "select" not in self.target.ops
        return plain and self.is_finite(x) and "multiply" in self.target.ops

    def may_mask(self, x: fx.Node, fill: float = 0, scale: float = 1) -> bool:
        """Can what stands between the positions of a value be made `fill`, and the value `scale`
        times as large?"""
        chooses = "select" in self.target.ops and (scale == 1 or "multiply" in self.target.ops)
        return chooses or (fill == 0 and self.multiplies(x))


class Emission:
    """Calls before `node` that stand for it, on operands that stand apart. made: what stands for
    each node so far."""

    def __init__(self, editor: GraphEditor, node: fx.Node, made: Nodes, plan: SpacedPlan):
        self.editor, self.node, self.made, self.plan = editor, node, made, plan

    def read(self, node: fx.Node) -> fx.Node:
        """What stands for an operand."""
        return self.made.get(node, node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.editor.insert(self.node, None, target, *args, **kwargs)
        return described(made, self.node)

    def again(self, /, **changed: Any) -> fx.Node:
        """The call itself, on what stands for its operands, with some arguments changed."""
        found = map_arg(schema.arguments(self.node), self.read)
        args, kwargs = schema.call(self.node.target, found | changed)
        return self.call(self.node.target, *args, **kwargs)

    def constant(self, name: str, tensor: Tensor) -> fx.Node:
        return self.editor.add_constant(f"{self.node.name}_{name}", tensor, self.node)

    def longer(self, x: fx.Node, more: Mapping[int, int]) -> fx.Node:
        """`x` with as many zeros behind each axis."""
        rank = x.meta["val"].ndim
        flat = [n for axis in reversed(range(rank)) for n in (0, more.get(axis, 0))]
        return self.call(PAD, x, flat) if any(flat) else x

    def masked(self, x: fx.Node, grid: Grid, *, fill: float = 0, scale: float = 1) -> fx.Node:
        """What stands for `x` on the grid, `fill` elsewhere. scale: a factor, if the mask is one
        (`Plan.multiplies`)."""
        product, x = fill == 0 and self.plan.multiplies(x), self.read(x)
        value = x.meta["val"]
        keep = mask_of(grid, value.ndim)
        if product:
            dtype = value.dtype
            return self.call(aten.mul.Tensor, x, self.constant("mask", keep.to(dtype) * scale))
        other = self.constant("fill", torch.tensor(fill, dtype=value.dtype))
        return self.call(aten.where.self, self.constant("mask", keep), x, other)


def share_of(over: Grid, kind: str) -> float:
    """What a reduction of a masked value lacks: of a mean, all zeros between are counted."""
    return math.prod(part.size / part.count for part in over.values()) if kind == "mean" else 1


def reduced(x: fx.Node, over: Grid, outs: tuple[Grid, ...], kind: str) -> SpacedRule:
    """A reduction of its first operand over axes of which positions stand apart: of what is masked.
    kind: one of NEUTRAL."""
    share = share_of(over, kind)

    def emit(here: Emission) -> fx.Node:
        fill, dtype = NEUTRAL[kind], x.meta["val"].dtype
        if fill and not dtype.is_floating_point:
            fill = torch.iinfo(dtype).min if fill < 0 else torch.iinfo(dtype).max
        first = share if fill == 0 and here.plan.multiplies(x) else 1
        masked = here.masked(x, over, fill=fill, scale=first)
        made = here.again(self=masked)
        return made if first == share else here.call(aten.mul.Tensor, made, share)

    return SpacedRule(outs, emit)


@dataclass(frozen=True, slots=True)
class SpacedReader:
    """A call that reads values on grids."""

    editor: GraphEditor
    node: fx.Node
    plan: SpacedPlan
