"""Where magnitudes are taken: the value that a layer makes for those that read it.

A layer's site is the last of the calls behind it that work on each position alone: bias, batch
norm, a sum, an activation. Which axis has its parts, and which the inputs, follows from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.provenance import Cut
from demask.graph.queries import only_reader
from demask.ops import Declined, Relation, schema
from demask.ops.traits import CLAMPS, RELUS
from demask.pilot.weight_layers import WeightLayer, layers_of

aten = torch.ops.aten
KINDS = ("channel", "unit", "head", "token", "tile:T")


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A value that is measured.

    name: of the layer. node: what makes the value. axis: along which its parts lie; None for tiles,
    which lie along the last two. batch: the axis of the inputs, None where they are not told apart.
    kept, size: of a network that was cut, which parts these are, of how many. tile: its side.
    """

    name: str
    node: fx.Node
    axis: int | None
    batch: int | None
    kept: tuple[int, ...] | None = None
    size: int | None = None
    tile: int = 0

    def measured(self, value: Tensor, measure: str) -> tuple[Tensor, tuple[int, int] | None]:
        """Magnitudes float32 (inputs, parts) of a value, and the grid of its tiles."""
        # One copy in a dtype that sums; of images it is as large as the value.
        wide = value.detach().abs().float()
        wide = wide.unsqueeze(0) if self.batch is None else wide.movedim(self.batch, 0)
        if self.axis is None:
            return _tiles(wide, self.tile, measure)
        shift = self.batch is None or self.batch > self.axis
        at = self.axis + 1 if shift else self.axis
        parts = wide.movedim(at, 1).flatten(2) if wide.ndim > 2 else wide.unsqueeze(2)
        found = parts.amax(2) if measure == "max" else parts.mean(2)
        if self.kept is None:
            return found, None
        whole = found.new_zeros(len(found), self.size or 0)
        return whole.index_copy(1, torch.tensor(self.kept, dtype=torch.int64), found), None


def _tiles(wide: Tensor, side: int, measure: str) -> tuple[Tensor, tuple[int, int]]:
    maps = wide.flatten(1, -3)  # (inputs, channels, rows, columns)
    maps = maps.amax(1, keepdim=True) if measure == "max" else maps.mean(1, keepdim=True)
    if measure == "max":
        found = F.max_pool2d(maps, side, ceil_mode=True)
    else:
        found = F.avg_pool2d(maps, side, ceil_mode=True, count_include_pad=False)
    return found.flatten(1), (found.shape[2], found.shape[3])


def sites_of(
    analysis: Analysis,
    per: str = "channel",
    cuts: Mapping[str, Cut] | None = None,
) -> tuple[MeasuredValue, ...]:
    """The sites of a program, in the order in which they run. cuts: of a network that was cut.

    BadInput for a kind of part there is none of, or that the network has none of.
    """
    kind, _, number = per.partition(":")
    known = kind in ("channel", "unit", "head", "token") and not number
    if not known and not (kind == "tile" and number.isdecimal() and int(number) > 0):
        raise BadInput(f"expected parts per {', '.join(KINDS)}, got {per!r}; such as 'tile:8'")
    relations = analysis.relations
    if kind == "head":
        found = _heads(relations)
    else:
        layers = layers_of(analysis)
        made = (_site(layer, kind, relations, cuts or {}, int(number or 0)) for layer in layers)
        found = [site for site in made if site is not None]
    if not found:
        raise BadInput(f"the network has no {kind}s: no call makes values that have such parts; "
                       f"expected another of {', '.join(KINDS)}")  # fmt: skip
    return tuple(found)


def _site(
    layer: WeightLayer, kind: str, relations: Mapping[fx.Node, Relation | Declined],
    cuts: Mapping[str, Cut], tile: int,
) -> MeasuredValue | None:  # fmt: skip
    if layer.axis is None:
        return None
    rank = layer.node.meta["val"].ndim
    windows = bool(layer.relation.window)
    node = behind(layer.node, relations)
    batch = batch_axis(node)
    if kind == "tile":
        return (
            MeasuredValue(layer.name, node, None, batch, tile=tile)
            if windows and rank >= 4
            else None
        )
    if kind == "token":
        axis = _tokens(layer, batch)
        return None if axis is None or windows else MeasuredValue(layer.name, node, axis, batch)
    if kind == "unit" and windows:
        return None
    kept, size = _kept(layer, cuts)
    return MeasuredValue(layer.name, node, layer.axis, batch, kept, size)


def _tokens(layer: WeightLayer, batch: int | None) -> int | None:
    """The one other axis of a sequence of vectors."""
    rank = layer.node.meta["val"].ndim
    rest = [k for k in range(rank) if k not in (layer.axis, batch)]
    return rest[0] if rank >= 2 and len(rest) == 1 and batch is not None else None


def _kept(layer: WeightLayer, cuts: Mapping[str, Cut]) -> tuple[tuple[int, ...] | None, int | None]:
    """Which rows of the original weight are left."""
    cut = cuts.get(layer.weight)
    if cut is None or len(layer.rows) != 1:
        return None, None
    axis = layer.rows[0]
    return cut.kept[axis], cut.shape[axis]


def behind(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> fx.Node:
    """The last call behind `node` that works on each position alone, and is read by nobody else."""
    while (reader := only_reader(node)) is not None:
        relation = relations.get(reader)
        if not isinstance(relation, Relation) or not _is_epilogue(relation, node):
            break
        node = reader
    return node


def _is_epilogue(relation: Relation, node: fx.Node) -> bool:
    if relation.entry.fill != "run" or len(relation.outs) != 1 or relation.entry.free:
        return False
    if relation.window or relation.complete or relation.moved or relation.back:
        return False
    mine = [relation.ins[k] for k, o in enumerate(relation.operands) if o.value is node]
    value, made = node.meta["val"], relation.node.meta["val"]
    return all(axes == relation.outs[0] for axes in mine) and value.ndim == made.ndim


def batch_axis(node: fx.Node) -> int | None:
    """The axis of a value that has the size of the batch, which is dynamic."""
    value = node.meta["val"]
    found = [k for k, size in enumerate(value.shape) if not isinstance(size, int)]
    alone = [k for k in found if value.shape[k].node.expr.is_Symbol]
    return alone[0] if len(found) == len(alone) == 1 else None


def _heads(relations: Mapping[fx.Node, Relation | Declined]) -> list[MeasuredValue]:
    """Values that attention mixes, (inputs, heads, positions, features); also where it is spelled
    out, as a product of a softmax with the values."""
    found: list[MeasuredValue] = []
    for node, relation in relations.items():
        mixes = isinstance(relation, Relation) and relation.entry.fill == "mix"
        if mixes and node.meta["val"].ndim >= 4:
            found.append(MeasuredValue(_module(node, found), node, node.meta["val"].ndim - 3,
                              batch_axis(node)))  # fmt: skip
    return found


def _module(node: fx.Node, before: list[MeasuredValue]) -> str:
    """The module in which a call stands; the call's name where that is not known."""
    stack: Any = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    name = paths[-1] if paths else node.name
    count = sum(site.name.partition("#")[0] == name for site in before)
    return name if not count else f"{name}#{count + 1}"


def zeroed(node: fx.Node) -> bool:
    """Does a call make zeros of what is below zero?"""
    if node.target in RELUS:
        return True
    if node.target is aten.dropout.default:
        source: Any = node.args[0]
        return zeroed(source)
    if node.target in CLAMPS:
        found = schema.arguments(node)
        return found.get("min", found.get("min_val")) == 0
    return False
