"""Absorption of gathers and slices of channels into the layers after them.

    conv(x[:, p], W) == conv(x, W')      with columns of zeros in W' for channels not in p

Depthwise layers and activations in between compute all channels, with kernels of zeros. A gather
copies its value and ends the blocked layout that a runtime uses between layers, while a few more
channels often cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, is_pointwise
from demask.ops import Table, schema
from demask.ops.schema import fake
from demask.ops.traits import OUTPUT_AXIS
from demask.tune.fold_affine import channel_axis, contraction_weight
from demask.tune.pad_channels import is_depthwise, is_pooling, is_rounding

aten = torch.ops.aten
COPY = 96  # multiply-adds that take as long as copying one value and restoring its layout


@dataclass(slots=True)
class _GatherRegion:
    """The calls after a gather. count, positions: channels before it, and those that it selects.
    through: calls between it and the layers (`readers`) that can absorb it."""

    count: int
    positions: Tensor
    through: dict[fx.Node, None] = field(default_factory=dict)
    readers: dict[fx.Node, None] = field(default_factory=dict)


def absorb_gathers(program: Program, table: Table) -> Program:
    """The program without gathers that cost more than they save."""
    editor = GraphEditor(program)
    for node in editor.calls(aten.index_select.default, aten.slice.Tensor):
        live = input_dependent(editor.graph)
        region = _region(editor, node, table) if node in live else None
        if region is not None and _worth(editor, region):
            _apply(editor, node, region)
    return editor.finish()


def _region(editor: GraphEditor, gather: fx.Node, table: Table) -> _GatherRegion | None:
    """The calls after a gather, if it can be absorbed into all layers that read it."""
    arguments = schema.arguments(gather)
    source, axis = arguments["self"], arguments["dim"]
    value = fake(gather)
    axis %= value.ndim
    count, selected = channels_of(source, axis), channels_of(gather, axis)
    if count is None or selected is None or (axis != 1 and axis != value.ndim - 1):
        return None
    positions = _positions(editor, gather, count)
    if positions is None or len(positions) != selected or len(set(positions.tolist())) != selected:
        return None
    region, stack = _GatherRegion(count, positions), [gather]
    while stack:
        node = stack.pop()
        for user in node.users:
            if _can_absorb(editor, user, node, axis):
                region.readers[user] = None
            elif _passes(editor, user, axis, table):
                region.through[user] = None
                stack.append(user)
            else:
                return None
    return region


def _positions(editor: GraphEditor, gather: fx.Node, count: int) -> Tensor | None:
    """The channels, of `count`, that a gather or slice selects; None if they are not constant."""
    arguments = schema.arguments(gather)
    if gather.target is aten.index_select.default:
        return editor.tensor(arguments["index"])
    ends = [arguments["start"], arguments["end"], arguments["step"]]
    if not all(n is None or isinstance(n, int) for n in ends):
        return None
    return torch.arange(count)[slice(*ends)]


def _can_absorb(editor: GraphEditor, user: fx.Node, node: fx.Node, axis: int) -> bool:
    """Whether a layer contracts the channels of `node`, so that its weight can absorb a gather."""
    weight = contraction_weight(editor, user)
    if weight is None or schema.arguments(user)["input"] is not node:
        return False
    plain = schema.arguments(user).get("groups", 1) == 1
    return plain and channel_axis(user) == axis


def _passes(editor: GraphEditor, user: fx.Node, axis: int, table: Table) -> bool:
    """Whether a call computes each channel separately, so that it can compute all of them."""
    if contraction_weight(editor, user) is not None:
        return axis == 1 and is_depthwise(editor, user)
    one = len(user.all_input_nodes) == 1
    if is_rounding(editor, user):
        return True
    return one and (is_pointwise(user, table) or (axis == 1 and is_pooling(user)))


def _worth(editor: GraphEditor, region: _GatherRegion) -> bool:
    """Whether the gather's copy takes longer than the multiply-adds that it saves."""
    more, selected = region.count - len(region.positions), len(region.positions)
    products = 0
    for reader in region.readers:
        weight = contraction_weight(editor, reader)
        assert weight is not None
        products += more * weight.numel() // weight.shape[1 - OUTPUT_AXIS[reader.target]]
    return bool(region.readers) and products <= COPY * selected


def _apply(editor: GraphEditor, gather: fx.Node, region: _GatherRegion) -> None:
    """Remove a gather and widen the calls after it."""
    depthwise = [node for node in region.through if contraction_weight(editor, node) is not None]
    for node in depthwise:
        _spread(editor, node, region, rows=True)
        changed = schema.arguments(node) | {"groups": region.count}
        node.args, node.kwargs = schema.bind_arguments(node.target, changed)
    for node in region.readers:
        _spread(editor, node, region, rows=False)
    axis = schema.arguments(gather)["dim"] % fake(gather).ndim
    for node in region.through:
        shape = list(fake(node).shape)
        shape[axis] = region.count
        node.meta["val"] = editor.values.dense(shape, fake(node))
    editor.replace(gather, schema.arguments(gather)["self"])


def _spread(editor: GraphEditor, node: fx.Node, region: _GatherRegion, *, rows: bool) -> None:
    """Move a layer's rows (or columns) to their channels before the gather; others are zeros."""
    arguments = schema.arguments(node)
    for name in ("weight", "bias") if rows and arguments["bias"] is not None else ("weight",):
        tensor = editor.tensor(arguments[name])
        assert tensor is not None
        axis = 0 if rows else 1 - OUTPUT_AXIS[node.target]
        shape = list(tensor.shape)
        shape[axis] = region.count
        wide = tensor.new_zeros(shape).index_copy(axis, region.positions, tensor)
        node.replace_input_with(arguments[name], editor.replace_constant(arguments[name], wide, node))
