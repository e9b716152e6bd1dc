"""Calls of a graph rewritten as calls that segments can hold, before regions are sought."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.queries import has_shape, input_dependent
from demask.ops.schema import fake, same_size
from demask.rewrites.driver import apply_rules
from demask.rewrites.segment import SEGMENT

aten = torch.ops.aten


def prepare_calls(editor: GraphEditor) -> None:
    """Rewrite calls of a graph for segments, in place."""
    apply_rules(editor, SEGMENT)
    drop_unread(editor.graph)
    _expand_static_addends(editor)
    _read_sizes_from_inputs(editor)


def _read_sizes_from_inputs(editor: GraphEditor) -> None:
    """Read dynamic sizes from inputs if possible: a segment does not return all of its values."""
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in editor.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for axis, size in enumerate(value.shape):
                if not isinstance(size, int):
                    known.setdefault(size.node.expr, (node, axis))
    for node in editor.calls(aten.sym_size.int):
        size = node.meta["val"]
        if not isinstance(size, int) and size.node.expr in known:
            node.args = known[size.node.expr]


def _expand_static_addends(editor: GraphEditor) -> None:
    """Expand values that depend on sizes alone, such as border maps, to the shapes to which they
    are added: segments add values of one shape."""
    live = input_dependent(editor.graph)
    for node in editor.calls(aten.add.Tensor):
        shape = fake(node).shape
        for side, other in ((0, 1), (1, 0)):
            value, x = node.args[side], node.args[other]
            if not isinstance(value, fx.Node) or value in live or x not in live:
                continue
            is_tensor = isinstance(value.meta.get("val"), Tensor) and len(shape) > 2
            if is_tensor and has_shape(x, shape) and not has_shape(value, shape):
                with editor.graph.inserting_before(node):
                    expanded = editor.call(aten.expand.default, value, _new_sizes(editor, value, x))
                node.update_arg(side, expanded)


def _new_sizes(editor: GraphEditor, value: fx.Node, x: fx.Node) -> list[Any]:
    """The sizes of x for an expansion of a value; -1 for those that the value has: they need not be
    read from x, which would be computed before the expansion, in another segment."""
    sizes, old = editor.sizes(x), fake(value).shape
    new = fake(x).shape
    first = len(new) - len(old)
    return [-1 if k >= first and same_size(new[k], old[k - first]) else size for k, size in enumerate(sizes)]
