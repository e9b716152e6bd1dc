"""The values at which layers are conditioned: each layer's value before it is joined with another.

A layer's value is the output of the last call after it that works on each position alone and reads
nothing else but constants: its norm, its activation. Positions that are left out there are left out
of the layer and of all calls between; after a sum they would be left out of what the layer is added
to. An observer program returns one magnitude per position of each of these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import only_reader
from demask.ops import Declined, Relation
from demask.ops.schema import fake
from demask.pilot.conditions.base import Decision
from demask.pilot.data.lazy_weights import LoadedConstants
from demask.pilot.data.measured_values import batch_axis
from demask.pilot.data.sliced_run import walk
from demask.pilot.weight_layers import WeightLayer, layers_of
from demask.shrink.layout.ties import is_join

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ConditionedValue:
    """A value that is conditioned. layer: the name of its layer. node: the call that returns the
    value.
    axis: of its positions. size: how many."""

    layer: str
    node: fx.Node
    axis: int
    size: int


def targets_of(analysis: Analysis) -> tuple[tuple[ConditionedValue, ...], tuple[Decision, ...]]:
    """The conditioned values in the order in which they run, and why other layers have none."""
    targets, declined = [], []
    for layer in layers_of(analysis):
        why = _unfit(layer)
        node = _end(layer.node, analysis.relations)
        if not why and any(reader.op == "output" for reader in node.users):
            why = "the network's output is returned whole"
        if why:
            declined.append(Decision(layer.name, "dense", why))
            continue
        assert layer.axis is not None
        targets.append(ConditionedValue(layer.name, node, layer.axis, fake(node).shape[layer.axis]))
    return tuple(targets), tuple(declined)


def _unfit(layer: WeightLayer) -> str:
    """Why a layer is not conditioned; "" where it can be."""
    if layer.axis is None:
        return "a recurrent call reads its whole output"
    if not layer.relation.contracted:
        return "it works on each channel alone, and follows what it reads"
    size = fake(layer.node).shape[layer.axis]
    if not isinstance(size, int) or size < 2:
        return "it has one position, or as many as the input says"
    return ""


def _end(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> fx.Node:
    while (reader := only_reader(node)) is not None:
        relation = relations.get(reader)
        if not isinstance(relation, Relation) or not _follows(relation, node):
            break
        node = reader
    return node


def _follows(relation: Relation, node: fx.Node) -> bool:
    """Whether a call works on each position of a value alone, with constants."""
    if relation.entry.fill != "run" or relation.entry.free or len(relation.outs) != 1:
        return False
    marked = relation.window | relation.complete | relation.moved | relation.back
    if marked or is_join(relation):
        return False
    mine = [relation.ins[k] for k, o in enumerate(relation.operands) if o.value is node]
    same = fake(relation.node).ndim == fake(node).ndim
    return same and all(axes == relation.outs[0] for axes in mine)


def targets_of_layers(targets: Iterable[ConditionedValue], layers: Sequence[str], what: str) -> list[ConditionedValue]:
    """The targets of these layers; raises BadInput where one has none."""
    known = {target.layer: target for target in targets}
    missing = [name for name in layers if name not in known]
    if missing:
        raise BadInput(
            f"expected {what} to have layer {missing[0]!r}, as the network has; its "
            f"layers are {', '.join(list(known)[:5])}, …"
        )
    return [known[name] for name in layers]


def observing(program: Program, targets: Sequence[ConditionedValue], *, values: bool = False) -> Program:
    """The program that returns one magnitude per position of each target: the mean |value|, the
    largest over the inputs of a batch. values: also return the values themselves, after the
    magnitudes."""
    editor = GraphEditor(program)
    output = editor.graph.output_node()
    with editor.graph.inserting_before(output):
        nodes = [editor.copies[target.node] for target in targets]
        results = [_magnitude(editor, n, t.axis) for n, t in zip(nodes, targets, strict=True)]
        results += nodes if values else []
    output.args = (tuple(results),)
    spec = pytree.tree_structure((0,) * len(results))
    return replace(editor.finish(), out_spec=spec)


def _magnitude(editor: GraphEditor, node: fx.Node, axis: int) -> fx.Node:
    batch, rank = batch_axis(node), fake(node).ndim
    rest = [k for k in range(rank) if k not in (axis, batch)]
    magnitude = editor.call(aten.abs.default, node)
    if rest:
        magnitude = editor.call(aten.mean.dim, magnitude, rest)
    if batch is not None and batch != axis:
        over = 0 if batch < axis else 1
        more = [0, 1, 0, 0] if over else [0, 0, 0, 1]  # one input of zeros: a batch may be empty
        magnitude = editor.call(aten.constant_pad_nd.default, magnitude, more)
        magnitude = editor.call(aten.amax.default, magnitude, [over])
    return magnitude


def means(program: Program, targets: Sequence[ConditionedValue], leaves: list[object]) -> list[Tensor]:
    """The mean of each target per position, over one call; each with the rank of its value."""
    mean_of: dict[fx.Node, Tensor] = {}
    nodes = {target.node: target.axis for target in targets}

    def see(_: int, node: fx.Node, value: Tensor) -> None:
        if node in nodes:
            rest = [k for k in range(value.ndim) if k != nodes[node]]
            mean_of[node] = value.mean(rest, keepdim=True) if rest else value

    walk(program, LoadedConstants(program), [leaves], see)
    return [mean_of[target.node] for target in targets]
