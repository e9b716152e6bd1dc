"""Positions are taken before an axis is split, not after.

    linear(x).view(b, t, 3, h, d).permute(2, 0, 3, 1, 4)[0]
      ==  linear(x)[..., rows].view(b, t, h, d).permute(0, 2, 1, 3)         rows of the queries

Queries, keys and values of a fused projection then have axes of their own, which can be cut apart
(feature row 000-j: gathers propagate toward the inputs).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Declined, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.entries.movement import refined
from demask.ops.traits import SELECTS, SPLITS_OF_AXES, TAKES, TRANSPOSES

aten = torch.ops.aten


def hoisted(program: Program) -> Program:
    """The program with slices of a projection's split output taken from the output itself."""
    if not any(node.target in TAKES and _split_of(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    for node in editor.calls():
        found = _split_of(node) if node.target in TAKES else None
        if found is not None:
            with editor.graph.inserting_before(node):
                _hoist(editor, node, *found)
    return editor.finish()


def _split_of(node: fx.Node) -> tuple[fx.Node, list[int], int, list[int], int] | None:
    """What a call takes positions of, if of a projection's split axis: the view that splits it, its
    axes as they come, which of them is taken from, the parts of the axis, and the axis."""
    order, source = _unpermuted(node.args[0])
    if source.target not in SPLITS_OF_AXES or not _is_projection(source.args[0]):
        return None
    shape = list(source.meta["val"].shape)
    projected: Any = source.args[0]
    found = refined(list(projected.meta["val"].shape), shape)
    dim = schema.arguments(node)["dim"]
    if isinstance(found, Declined):
        return None
    before, after, sizes = found
    axis = order[dim % len(order)]
    home = next(
        (k for k, letters in enumerate(before) if after[axis][:1] and after[axis][0] in letters),
        None,
    )
    if home is None or len(before[home]) < 2 or any(sizes[a] is None for a in before[home]):
        return None
    parts = [k for k, letters in enumerate(after) if set(letters) & set(before[home])]
    if [after[k] for k in parts] != [[a] for a in before[home]]:
        return None
    if parts != list(range(parts[0], parts[0] + len(parts))):
        return None
    return source, order, axis, parts, home


def _unpermuted(value: Any) -> tuple[list[int], fx.Node]:
    """The value that transposes are made of, and which of its axes each axis is."""
    order = list(range(value.meta["val"].ndim))
    while value.target in TRANSPOSES:
        found = schema.arguments(value)
        step, rank = list(range(len(order))), len(order)
        if value.target is aten.permute.default:
            step = [d % rank for d in found["dims"]]
        else:
            i, j = found["dim0"] % rank, found["dim1"] % rank
            step[i], step[j] = step[j], step[i]
        order = [step[k] for k in order]
        value = value.args[0]
    return order, value


def _is_projection(node: Any) -> bool:
    """A product with a constant weight, perhaps seen through a view."""
    while node.target in SPLITS_OF_AXES:
        node = node.args[0]
    return str(node.target) in PRODUCTS and any(s.op == "get_attr" for s in node.all_input_nodes)


def _hoist(
    editor: GraphEditor,
    node: fx.Node,
    view: fx.Node,
    order: list[int],
    axis: int,
    parts: list[int],
    home: int,
) -> None:
    shape = view.meta["val"].shape
    count = [int(shape[k]) for k in parts]
    rows = torch.arange(torch.tensor(count).prod()).view(count)  # type: ignore[arg-type]
    gone = node.target in SELECTS
    made = _taken(node, axis, int(shape[axis]))
    single = not isinstance(node.meta["val"], (list, tuple))
    users = [node] if single else [u for u in node.users if u.target is operator.getitem]
    sizes = _asked(editor, view)
    for user in users:
        take = made[0 if user is node else user.args[1]]  # type: ignore[index,call-overload]
        index = rows.index_select(parts.index(axis), take).reshape(-1)
        part = _rows(editor, node, view.args[0], home, index)  # type: ignore[arg-type]
        split = [
            len(take) if k == axis else n for k, n in enumerate(sizes) if not (gone and k == axis)
        ]
        part = editor.call(aten.reshape.default, part, split)
        kept = [k for k in order if not (gone and k == axis)]
        dims = [k - (gone and k > axis) for k in kept]
        if dims != list(range(len(dims))):
            part = editor.call(aten.permute.default, part, dims)
        part.meta = {**user.meta, **part.meta}
        user.replace_all_uses_with(part)


def _taken(node: fx.Node, axis: int, size: int) -> list[Tensor]:
    """Per output, the positions taken of an axis."""
    found = schema.arguments(node) | {"self": torch.arange(size), "dim": 0}
    args, kwargs = schema.call(node.target, found)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    return [t.reshape(-1) for t in (result if isinstance(result, (list, tuple)) else [result])]


def _rows(
    editor: GraphEditor, reader: fx.Node, source: fx.Node, axis: int, index: Tensor
) -> fx.Node:
    """Positions of an axis, taken before `reader`."""
    first, last = int(index[0]), int(index[-1]) + 1
    if torch.equal(index, torch.arange(first, last)):
        return editor.call(aten.slice.Tensor, source, axis, first, last)
    read = editor.add_constant(f"{source.name}_rows", index, reader, separator="")
    return editor.call(aten.index_select.default, source, axis, read)


def _asked(editor: GraphEditor, view: fx.Node) -> list[Any]:
    """The sizes of a view, as they were asked for where they are dynamic."""
    found = schema.arguments(view)
    asked, shape = found.get("size", found.get("shape")), view.meta["val"].shape
    if asked is None or len(asked) != len(shape) or any(a == -1 for a in asked):
        return editor.sizes(view)
    return [n if isinstance(n, int) else a for n, a in zip(shape, asked, strict=True)]
