"""Squeezes of dynamic axes, with guards on the sizes.

`squeeze` drops an axis of size one and has no effect on others, so that its output's rank was
determined by the example. The graph states that case explicitly, and its guards refuse other sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from demask.compat.symbolic_shapes import free_unbacked_symbols
from demask.graph.editor import GraphEditor
from demask.graph.guards import to_python
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.traits import SQUEEZES

aten = torch.ops.aten


def squeeze_static_axes(program: Program) -> Program:
    """The program whose squeezes drop only static axes; guards fix the sizes of dynamic ones."""
    if not any(_is_dynamic(node) for node in program.graph.nodes):
        return program
    editor, guards = GraphEditor(program), dict.fromkeys(program.guards)
    for node in filter(_is_dynamic, editor.calls()):
        x: Any = node.args[0]
        shape = x.meta["val"].shape
        with editor.graph.inserting_before(node):
            value = x
            for dim in sorted(_dims(node), reverse=True):
                size = shape[dim]
                if isinstance(size, int):
                    value = editor.call(aten.squeeze.dim, value, dim) if size == 1 else value
                    continue
                if free_unbacked_symbols(size):  # data-dependent: torch decides in each call
                    value = editor.call(aten.squeeze.dim, value, dim)
                    continue
                is_one, text = schema.example_size(size) == 1, to_python(size.node.expr)
                if text is not None:
                    guards[f"{text} == 1" if is_one else f"{text} >= 2"] = None
                value = editor.call(aten.select.int, value, dim, 0) if is_one else value
        editor.replace(node, value)
    # In-place calls, whose outputs no node reads, are still in the graph: nothing may be dropped.
    return replace(program, graph=editor.graph, guards=tuple(guards))


def _dims(node: fx.Node) -> list[int]:
    """The axes that a squeeze drops if their size is one."""
    rank = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    dims: Any = schema.arguments(node).get("dim", range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def _is_dynamic(node: fx.Node) -> bool:
    """Whether a call squeezes a dynamic axis."""
    if node.target not in SQUEEZES:
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return any(not isinstance(shape[dim], int) for dim in _dims(node))
