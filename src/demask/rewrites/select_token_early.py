"""Select a token before the calls that compute each token separately.

    layer(x)[:, 0]  ==  layer(x[:, :1])[:, 0]        if the layer computes each token separately

Along a static axis the analysis of needed positions has the same effect. A dynamic axis has no
single positions, so the selection is moved before every call that computes its positions
separately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import carry_back, is_split
from demask.ops.schema import fake

aten = torch.ops.aten
_END = 2**63 - 1
_Take = tuple[int, int]  # the axis, and the position: 0 is the first, -1 the last


def select_token_early(program: Program, table: Table) -> Program:
    """The program with selections of one position of a dynamic axis as early as possible."""
    if not any(_taken(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    todo = [node for node in editor.graph.nodes if _taken(node)]
    moved = False
    while todo:
        selections = _move(editor, todo.pop(), table)
        moved |= selections is not None
        todo += selections or []
    return editor.finish() if moved else program


def _taken(node: fx.Node) -> _Take | None:
    """The axis and position that a call selects, if the axis is dynamic; else None."""
    is_select = node.target is aten.select.int
    if not (is_select or node.target is aten.slice.Tensor) or not node.users:
        return None
    call_arguments = schema.arguments(node)
    shape = fake(call_arguments["self"]).shape
    dim = call_arguments["dim"] % len(shape)
    if isinstance(shape[dim], int):
        return None
    if is_select:
        return (dim, call_arguments["index"]) if call_arguments["index"] in (0, -1) else None
    ends = (
        call_arguments["start"] or 0,
        _END if call_arguments["end"] is None else call_arguments["end"],
        call_arguments["step"],
    )
    return {(0, 1, 1): (dim, 0), (-1, _END, 1): (dim, -1)}.get(ends)


def _move(editor: GraphEditor, node: fx.Node, table: Table) -> list[fx.Node] | None:
    """Move a selection before the call that it selects from; the new selections, or None."""
    take = _taken(node)
    if take is None:  # it has gone with a call that was moved, too
        return None
    source = node.all_input_nodes[0]
    if any(_taken(user) != take for user in source.users if not _is_size(user)):
        return None
    relation = bind(source, table) if source.op == "call_function" and _single(source) else None
    if not isinstance(relation, Relation) or relation.entry.free or len(relation.outs) != 1:
        return None
    dim, index = take
    axes = [next(iter(operand_axes), None) for operand_axes in carry_back(relation, {dim: True})]
    if is_split(relation, dim) or all(axis is None for axis in axes):
        return None
    return _again(editor, source, relation, axes, dim, index)


def _again(
    editor: GraphEditor, source: fx.Node, relation: Relation, axes: list[Any], dim: int, index: int
) -> list[fx.Node]:
    """Repeat a call on one position of an axis; the new selections of its operands."""
    ends = (0, 1) if index == 0 else (-1, _END)
    values, selections = [], []
    with editor.graph.inserting_before(source.next):
        for operand, axis in zip(relation.operands, axes, strict=True):
            if axis is None or not isinstance(operand.value, fx.Node):
                values.append(operand.value)
                continue
            part = editor.call(aten.slice.Tensor, operand.value, axis, *ends)
            values.append(part)
            selections.append(part)
        call_arguments = schema.replace_operands(schema.arguments(source), relation.operands, values)
        if relation.entry.args is not None:
            sizes: list[Any] = editor.sizes(source)
            sizes[dim] = 1
            every: Any = [sizes]
            call_arguments |= relation.entry.args(source, every)
        call = editor.call_named(source.target, call_arguments, source)
    for user in [u for u in source.users if _taken(u)]:
        with editor.graph.inserting_before(user):
            drops_axis = user.target is aten.select.int
            final = editor.call(aten.squeeze.dim, call, dim) if drops_axis else call
        editor.replace(user, final, inherit=True)
    if not source.users:  # or it would be another reader of its operands
        editor.graph.erase_node(source)
    return selections


def _is_size(node: fx.Node) -> bool:
    return node.target is aten.sym_size.int


def _single(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
