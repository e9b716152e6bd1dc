"""Heads that lost different positions: survivors first in each head.

The size of a head is one number for all heads, so an axis (head, position) keeps the positions that
any head keeps. But the order of positions within a head is free where only products and moves over
that head read them: with each head's survivors first, all heads shrink to the largest head's count.

    cut(W_v), attend, cut(W_o)  ==  cut(P W_v), attend, cut(W_o P^-1)        P per head

Nothing is cut here: gathers are put where such values come in and go out, and the passes that
follow absorb them into the weights (design, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.heads import Fiber
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten


def aligned(analysis: LayoutAnalysis) -> Program | None:
    """The program with such heads re-ordered; None where no head would become smaller."""
    fibers = [fiber for fiber in analysis.fibers.found if fiber.order is not None]
    if not fibers:
        return None
    editor = GraphEditor(analysis.program)
    pool = ConstantStore(editor)
    for fiber in fibers:
        _reorder(fiber, editor, pool)
    return editor.finish()


def _reorder(fiber: Fiber, editor: GraphEditor, pool: ConstantStore) -> None:
    """Gathers where values of a fiber come in and go out."""
    order, copies = fiber.order, editor.copies
    assert order is not None
    inverse = torch.argsort(order, dim=1)
    for (node, k), axis in fiber.enters:
        for value in _values(copies[node], k):
            with editor.graph.inserting_before(value.next):
                made = _gather(value, axis, order, editor, pool)
            value.replace_all_uses_with(
                made, delete_user_cb=lambda user, made=made: user is not made
            )
    for node, k, axis in fiber.leaves:
        _reread(copies[node], k, axis, inverse, editor, pool)
    for node, k, axis in fiber.constants:
        _reread(copies[node], k, axis, order, editor, pool)


def _values(node: fx.Node, k: int) -> list[fx.Node]:
    """The nodes that stand for output k of a call."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return [node]
    return [user for user in node.users if user.args[1] == k]


def _reread(
    node: fx.Node, k: int, axis: int, order: Tensor, editor: GraphEditor, pool: ConstantStore
) -> None:
    """Operand k of a call, gathered along an axis before the call reads it."""
    operand = schema.operands(node)[k]
    with editor.graph.inserting_before(node):
        made = _gather(operand.value, axis, order, editor, pool)
    found = schema.replaced(schema.arguments(node), (operand,), [made])
    args, kwargs = schema.call(node.target, found)
    node.args, node.kwargs = tuple(args), kwargs


def _gather(
    value: fx.Node, axis: int, order: Tensor, editor: GraphEditor, pool: ConstantStore
) -> fx.Node:
    """The entries of an axis (..., head, position), positions of each head in a new order."""
    heads, size = order.shape
    whole = order + torch.arange(heads).unsqueeze(1) * size
    count = value.meta["val"].shape[axis] // (heads * size)
    index = (whole + torch.arange(count).view(-1, 1, 1) * heads * size).reshape(-1)
    read = pool.here(index, f"{value.name}_order")
    return editor.call(aten.index_select.default, value, axis, read)
