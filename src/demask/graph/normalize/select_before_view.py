"""Select positions before an axis is split instead of after.

    linear(x).view(b, t, 3, h, d).permute(2, 0, 3, 1, 4)[0]
      ==  linear(x)[..., rows].view(b, t, h, d).permute(0, 2, 1, 3)         rows of the queries

Queries, keys and values of a fused projection then have separate axes, which can be cut
independently.
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
from demask.ops.entries.movement import common_refinement
from demask.ops.traits import SELECTS, SPLITS_OF_AXES, TAKES, TRANSPOSES

aten = torch.ops.aten


def select_before_view(program: Program) -> Program:
    """The program with slices of a projection's output in the place of slices of its views."""
    if not any(node.target in TAKES and _split_of(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    for node in editor.calls():
        split = _split_of(node) if node.target in TAKES else None
        if split is not None:
            with editor.graph.inserting_before(node):
                _hoist(editor, node, *split)
    return editor.finish()


def _split_of(node: fx.Node) -> tuple[fx.Node, list[int], int, list[int], int] | None:
    """For a call that selects positions of a split axis of a projection: the view that splits it,
    the order of the view's axes, the axis of the view, the view's axes that the split axis became,
    and the split axis. None for other calls."""
    order, source = _unpermuted(node.args[0])
    if source.target not in SPLITS_OF_AXES or not _is_projection(source.args[0]):
        return None
    shape = list(source.meta["val"].shape)
    projected: Any = source.args[0]
    refinement = common_refinement(list(projected.meta["val"].shape), shape)
    dim = schema.arguments(node)["dim"]
    if isinstance(refinement, Declined):
        return None
    before, after, sizes = refinement
    axis = order[dim % len(order)]
    projected_axis = next(
        (k for k, letters in enumerate(before) if after[axis][:1] and after[axis][0] in letters), None
    )
    if (
        projected_axis is None
        or len(before[projected_axis]) < 2
        or any(sizes[a] is None for a in before[projected_axis])
    ):
        return None
    parts = [k for k, letters in enumerate(after) if set(letters) & set(before[projected_axis])]
    if [after[k] for k in parts] != [[a] for a in before[projected_axis]]:
        return None
    if parts != list(range(parts[0], parts[0] + len(parts))):
        return None
    return source, order, axis, parts, projected_axis


def _unpermuted(value: Any) -> tuple[list[int], fx.Node]:
    """The order of the axes of a chain of transposes, and the operand of the chain."""
    order = list(range(value.meta["val"].ndim))
    while value.target in TRANSPOSES:
        call_arguments = schema.arguments(value)
        step, rank = list(range(len(order))), len(order)
        if value.target is aten.permute.default:
            step = [d % rank for d in call_arguments["dims"]]
        else:
            i, j = call_arguments["dim0"] % rank, call_arguments["dim1"] % rank
            step[i], step[j] = step[j], step[i]
        order = [step[k] for k in order]
        value = value.args[0]
    return order, value


def _is_projection(node: Any) -> bool:
    """Whether a node is a product with a constant weight, or a view of one."""
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
    projected_axis: int,
) -> None:
    """Replace a selection after a view (see `_split_of`) by one before it."""
    shape = view.meta["val"].shape
    count = [int(shape[k]) for k in parts]
    rows = torch.arange(torch.tensor(count).prod()).view(count)  # type: ignore[arg-type]
    drops_axis = node.target in SELECTS
    taken = _taken(node, axis, int(shape[axis]))
    has_one_output = not isinstance(node.meta["val"], (list, tuple))
    users = [node] if has_one_output else [u for u in node.users if u.target is operator.getitem]
    sizes = _view_sizes(editor, view)
    for user in users:
        take = taken[0 if user is node else user.args[1]]  # type: ignore[index,call-overload]
        index = rows.index_select(parts.index(axis), take).reshape(-1)
        part = _rows(editor, node, view.args[0], projected_axis, index)  # type: ignore[arg-type]
        split = [len(take) if k == axis else n for k, n in enumerate(sizes) if not (drops_axis and k == axis)]
        part = editor.call(aten.reshape.default, part, split)
        remaining = [k for k in order if not (drops_axis and k == axis)]
        dims = [k - (drops_axis and k > axis) for k in remaining]
        if dims != list(range(len(dims))):
            part = editor.call(aten.permute.default, part, dims)
        part.meta = {**user.meta, **part.meta}
        user.replace_all_uses_with(part)


def _taken(node: fx.Node, axis: int, size: int) -> list[Tensor]:
    """Per output, the selected positions of an axis."""
    call_arguments = schema.arguments(node) | {"self": torch.arange(size), "dim": 0}
    args, kwargs = schema.bind_arguments(node.target, call_arguments)
    output = node.target(*args, **kwargs)  # type: ignore[operator]
    return [t.reshape(-1) for t in (output if isinstance(output, (list, tuple)) else [output])]


def _rows(editor: GraphEditor, reader: fx.Node, source: fx.Node, axis: int, index: Tensor) -> fx.Node:
    """New calls: positions of an axis of `source`."""
    first, last = int(index[0]), int(index[-1]) + 1
    if torch.equal(index, torch.arange(first, last)):
        return editor.call(aten.slice.Tensor, source, axis, first, last)
    read = editor.add_constant(f"{source.name}_rows", index, reader, separator="")
    return editor.call(aten.index_select.default, source, axis, read)


def _view_sizes(editor: GraphEditor, view: fx.Node) -> list[Any]:
    """The sizes of a view; dynamic ones are its own arguments if possible."""
    call_arguments = schema.arguments(view)
    requested, shape = (call_arguments.get("size", call_arguments.get("shape")), view.meta["val"].shape)
    if requested is None or len(requested) != len(shape) or any(a == -1 for a in requested):
        return editor.sizes(view)
    return [n if isinstance(n, int) else a for n, a in zip(shape, requested, strict=True)]
