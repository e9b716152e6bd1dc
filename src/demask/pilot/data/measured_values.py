"""The values at which magnitudes are measured: the output of a layer for its readers.

It is the output of the last of the calls after a layer that work on each position alone: bias,
batch norm, a sum, an activation. The table says which axis has its parts, and which the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from demask.ops.schema import fake
from demask.ops.traits import CLAMPS, RELUS
from demask.pilot.recurrent_units import output_of_units
from demask.pilot.weight_layers import WeightLayer, layers_of

aten = torch.ops.aten
KINDS = ("channel", "unit", "head", "token", "tile:T")


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A value that is measured.

    name: of the layer. node: the call that returns the value. axis: of its parts; None for tiles,
    which are along the last two axes. batch: the axis of the inputs, None where it has none.
    remaining, size: of a network that was cut, which parts these are, of how many. tile: its side.
    """

    name: str
    node: fx.Node
    axis: int | None
    batch: int | None
    remaining: tuple[int, ...] | None = None
    size: int | None = None
    tile: int = 0

    def measured(self, value: Tensor, measure: str) -> tuple[Tensor, tuple[int, int] | None]:
        """Magnitudes float32 (inputs, parts) of a value, and the grid of its tiles. measure: "mean" or "max" of
        |value|, or "sum" of the value."""
        # One copy in a dtype that sums; of images it is as large as the value.
        wide = value.detach().float() if measure == "sum" else value.detach().abs().float()
        wide = wide.unsqueeze(0) if self.batch is None else wide.movedim(self.batch, 0)
        if self.axis is None:
            return _tiles(wide, self.tile, measure)
        shift = self.batch is None or self.batch > self.axis
        part_axis = self.axis + 1 if shift else self.axis
        parts = wide.movedim(part_axis, 1).flatten(2) if wide.ndim > 2 else wide.unsqueeze(2)
        magnitudes = parts.amax(2) if measure == "max" else parts.sum(2) if measure == "sum" else parts.mean(2)
        if self.remaining is None:
            return magnitudes, None
        full = magnitudes.new_zeros(len(magnitudes), self.size or 0)
        return full.index_copy(1, torch.tensor(self.remaining, dtype=torch.int64), magnitudes), None


def _tiles(wide: Tensor, side: int, measure: str) -> tuple[Tensor, tuple[int, int]]:
    maps = wide.flatten(1, -3)  # (inputs, channels, rows, columns)
    if measure == "sum":
        rows, columns = (-n % side for n in maps.shape[2:])
        tiles = F.avg_pool2d(F.pad(maps.sum(1, keepdim=True), (0, columns, 0, rows)), side, divisor_override=1)
        return tiles.flatten(1), (tiles.shape[2], tiles.shape[3])
    maps = maps.amax(1, keepdim=True) if measure == "max" else maps.mean(1, keepdim=True)
    if measure == "max":
        tiles = F.max_pool2d(maps, side, ceil_mode=True)
    else:
        tiles = F.avg_pool2d(maps, side, ceil_mode=True, count_include_pad=False)
    return tiles.flatten(1), (tiles.shape[2], tiles.shape[3])


def sites_of(
    analysis: Analysis, per: str = "channel", cuts: Mapping[str, Cut] | None = None
) -> tuple[MeasuredValue, ...]:
    """The measured values of a program, in the order in which they run. cuts: of a network that was
    cut.

    Raises BadInput for an unknown kind of part, or one that the network does not have.
    """
    kind, _, number = per.partition(":")
    known = kind in ("channel", "unit", "head", "token") and not number
    if not known and not (kind == "tile" and number.isdecimal() and int(number) > 0):
        raise BadInput(f"expected parts per {', '.join(KINDS)}, got {per!r}; such as 'tile:8'")
    relations = analysis.relations
    if kind == "head":
        sites = _heads(relations)
    else:
        layers = layers_of(analysis)
        candidates = (_site(layer, kind, relations, cuts or {}, int(number or 0)) for layer in layers)
        sites = [site for site in candidates if site is not None]
    if not sites:
        raise BadInput(
            f"the network has no {kind}s: no call has outputs with such parts; expected another of {', '.join(KINDS)}"
        )
    return tuple(sites)


def _site(
    layer: WeightLayer, kind: str, relations: Mapping[fx.Node, Relation | Declined], cuts: Mapping[str, Cut], tile: int
) -> MeasuredValue | None:
    if layer.relation.back:
        return _units(layer) if kind in ("channel", "unit") else None
    if layer.axis is None:
        return None
    rank = fake(layer.node).ndim
    windows = bool(layer.relation.window)
    node = epilogue_end(layer.node, relations)
    batch = batch_axis(node)
    if kind == "tile":
        return MeasuredValue(layer.name, node, None, batch, tile=tile) if windows and rank >= 4 else None
    if kind == "token":
        axis = _tokens(layer, batch)
        return None if axis is None or windows else MeasuredValue(layer.name, node, axis, batch)
    if kind == "unit" and windows:
        return None
    remaining, size = _remaining(layer, cuts)
    return MeasuredValue(layer.name, node, layer.axis, batch, remaining, size)


def _units(layer: WeightLayer) -> MeasuredValue | None:
    """The hidden units of a recurrent call, once for its weights."""
    output = output_of_units(layer.node)
    is_first = layer.relation.operands[layer.operand].value is schema.arguments(layer.node)["params"][0]
    if output is None or not is_first:
        return None
    return MeasuredValue(layer.name, output, fake(output).ndim - 1, batch_axis(output))


def _tokens(layer: WeightLayer, batch: int | None) -> int | None:
    """The one other axis of a sequence of vectors."""
    rank = fake(layer.node).ndim
    rest = [k for k in range(rank) if k not in (layer.axis, batch)]
    return rest[0] if rank >= 2 and len(rest) == 1 and batch is not None else None


def _remaining(layer: WeightLayer, cuts: Mapping[str, Cut]) -> tuple[tuple[int, ...] | None, int | None]:
    cut = cuts.get(layer.weight)
    if cut is None or len(layer.rows) != 1:
        return None, None
    axis = layer.rows[0]
    return cut.kept[axis], cut.shape[axis]


def epilogue_end(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> fx.Node:
    """The last call after `node` that works on each position alone, through calls with one reader
    each."""
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
    value, output = fake(node), fake(relation.node)
    return all(axes == relation.outs[0] for axes in mine) and value.ndim == output.ndim


def count_inputs(calls: Iterable[Mapping[fx.Node, Any]]) -> int:
    """How many inputs calls have: the size of the first axis of the first tensor, 1 where there is none."""
    return sum(next((t.shape[0] for t in call.values() if isinstance(t, Tensor) and t.ndim), 1) for call in calls)


def batch_axis(node: fx.Node) -> int | None:
    """The axis of a value that has the size of the batch, which is dynamic."""
    shape: Any = fake(node).shape
    dynamic = [k for k, size in enumerate(shape) if not isinstance(size, int)]
    alone = [k for k in dynamic if shape[k].node.expr.is_Symbol]
    return alone[0] if len(dynamic) == len(alone) == 1 else None


def _heads(relations: Mapping[fx.Node, Relation | Declined]) -> list[MeasuredValue]:
    """The outputs of attention, (inputs, heads, positions, features), also where it is written as a
    product of a softmax with the values."""
    sites: list[MeasuredValue] = []
    for node, relation in relations.items():
        mixes = isinstance(relation, Relation) and relation.entry.fill == "mix"
        if mixes and fake(node).ndim >= 4:
            sites.append(MeasuredValue(_module(node, sites), node, fake(node).ndim - 3, batch_axis(node)))
    return sites


def _module(node: fx.Node, before: list[MeasuredValue]) -> str:
    stack: Any = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    name = paths[-1] if paths else node.name
    count = sum(site.name.partition("#")[0] == name for site in before)
    return name if not count else f"{name}#{count + 1}"


def zeroed(node: fx.Node) -> bool:
    """Whether a call sets negative values to zero."""
    if node.target in RELUS:
        return True
    if node.target is aten.dropout.default:
        source: Any = node.args[0]
        return zeroed(source)
    if node.target in CLAMPS:
        arguments = schema.arguments(node)
        return arguments.get("min", arguments.get("min_val")) == 0
    return False
