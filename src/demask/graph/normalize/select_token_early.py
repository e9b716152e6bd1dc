"""What only one token needs is computed for one token, however many there are.

    layer(x)[:, 0]  ==  layer(x[:, :1])[:, 0]        for all that a layer does token by token

Along an axis of a known size the sweeps find this by themselves. A dynamic axis has no positions to
tell apart, so taking one is moved before every call that does the same to each (feature row 000-j).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import carry_back, is_split

aten = torch.ops.aten
_END = 2**63 - 1
_Take = tuple[int, int]  # the axis, and the position: 0 is the first, -1 the last


def early(program: Program, table: Table) -> Program:
    """The program with single positions of dynamic axes taken as early as can be."""
    if not any(_taken(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    todo = [node for node in editor.graph.nodes if _taken(node)]
    moved = False
    while todo:
        made = _move(editor, todo.pop(), table)
        moved |= made is not None
        todo += made or []
    return editor.finish() if moved else program


def _taken(node: fx.Node) -> _Take | None:
    """What a call takes, if it is one position of a dynamic axis."""
    is_select = node.target is aten.select.int
    if not (is_select or node.target is aten.slice.Tensor) or not node.users:
        return None
    found = schema.arguments(node)
    shape = found["self"].meta["val"].shape
    dim = found["dim"] % len(shape)
    if isinstance(shape[dim], int):
        return None
    if is_select:
        return (dim, found["index"]) if found["index"] in (0, -1) else None
    ends = (found["start"] or 0, _END if found["end"] is None else found["end"], found["step"])
    return {(0, 1, 1): (dim, 0), (-1, _END, 1): (dim, -1)}.get(ends)


def _move(editor: GraphEditor, node: fx.Node, table: Table) -> list[fx.Node] | None:
    """Take a position of what a value is made of; the calls that now take one."""
    take, source = _taken(node), node.all_input_nodes[0]
    if take is None or any(_taken(user) != take for user in source.users if not _is_size(user)):
        return None
    relation = bind(source, table) if source.op == "call_function" and _single(source) else None
    if not isinstance(relation, Relation) or relation.entry.free or len(relation.outs) != 1:
        return None
    dim, index = take
    places = [next(iter(axes), None) for axes in carry_back(relation, {dim: True})]
    if is_split(relation, dim) or all(place is None for place in places):
        return None
    return _again(editor, source, relation, places, dim, index)


def _again(
    editor: GraphEditor,
    source: fx.Node,
    relation: Relation,
    places: list[Any],
    dim: int,
    index: int,
) -> list[fx.Node]:
    ends = (0, 1) if index == 0 else (-1, _END)
    values, made = [], []
    with editor.graph.inserting_before(source.next):
        for operand, place in zip(relation.operands, places, strict=True):
            if place is None or not isinstance(operand.value, fx.Node):
                values.append(operand.value)
                continue
            part = editor.call(aten.slice.Tensor, operand.value, place, *ends)
            values.append(part)
            made.append(part)
        found = schema.replaced(schema.arguments(source), relation.operands, values)
        if relation.entry.args is not None:
            sizes: list[Any] = editor.sizes(source)
            sizes[dim] = 1
            every: Any = [sizes]
            found |= relation.entry.args(source, every)
        one = editor.call_named(source.target, found, source)
    for user in [u for u in source.users if _taken(u)]:
        with editor.graph.inserting_before(user):
            gone = user.target is aten.select.int
            final = editor.call(aten.squeeze.dim, one, dim) if gone else one
        final.meta = {**user.meta, **final.meta}
        user.replace_all_uses_with(final)
    return made


def _is_size(node: fx.Node) -> bool:
    return node.target is aten.sym_size.int


def _single(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
