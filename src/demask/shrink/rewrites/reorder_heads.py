"""Heads that lost different positions: live positions first in each head.

The size of a head is one number for all heads, so an axis (head, position) has the union of the
positions that its heads need. But the order of positions within a head is free where only products
and moves over that head read them: with each head's live positions first, all heads shrink to the
size of the largest.

    cut(W_v), attend, cut(W_o)  ==  cut(P W_v), attend, cut(W_o P^-1)        P per head

Nothing is cut here: gathers are added where such values enter and leave. The following passes
absorb them into the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.schema import fake
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.heads import HeadGroup
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten


def reorder_heads(analysis: LayoutAnalysis) -> Program | None:
    """The program with such heads reordered; None where no head would become smaller."""
    groups = [group for group in analysis.head_groups.groups if group.order is not None]
    if not groups:
        return None
    editor = GraphEditor(analysis.program)
    store = ConstantStore(editor)
    for group in groups:
        _reorder(group, editor, store)
    return editor.finish()


def _reorder(group: HeadGroup, editor: GraphEditor, store: ConstantStore) -> None:
    """Add gathers where values of a head group enter and leave."""
    order, copies = group.order, editor.copies
    assert order is not None
    inverse = torch.argsort(order, dim=1)
    for (node, k), axis in group.enters:
        for value in _nodes_of_output(copies[node], k):
            with editor.graph.inserting_before(value.next):
                gathered = _gather(value, axis, order, editor, store)
            value.replace_all_uses_with(gathered, delete_user_cb=lambda user, gathered=gathered: user is not gathered)
    for node, k, axis in group.leaves:
        _gather_operand(copies[node], k, axis, inverse, editor, store)
    for node, k, axis in group.constants:
        _gather_operand(copies[node], k, axis, order, editor, store)


def _nodes_of_output(node: fx.Node, k: int) -> list[fx.Node]:
    if not isinstance(fake(node), (list, tuple)):
        return [node]
    return [user for user in node.users if user.args[1] == k]


def _gather_operand(node: fx.Node, k: int, axis: int, order: Tensor, editor: GraphEditor, store: ConstantStore) -> None:
    """Make a call read operand k gathered along an axis."""
    operand = schema.operands(node)[k]
    with editor.graph.inserting_before(node):
        gathered = _gather(operand.value, axis, order, editor, store)
    arguments = schema.replace_operands(schema.arguments(node), (operand,), [gathered])
    args, kwargs = schema.bind_arguments(node.target, arguments)
    node.args, node.kwargs = tuple(args), kwargs


def _gather(value: fx.Node, axis: int, order: Tensor, editor: GraphEditor, store: ConstantStore) -> fx.Node:
    """The entries of an axis (..., head, position), positions of each head in a new order."""
    heads, size = order.shape
    whole = order + torch.arange(heads).unsqueeze(1) * size
    count = fake(value).shape[axis] // (heads * size)
    index = (whole + torch.arange(count).view(-1, 1, 1) * heads * size).reshape(-1)
    read = store.constant_here(index, f"{value.name}_order")
    return editor.call(aten.index_select.default, value, axis, read)
