"""Squeezes of dynamic axes, said in a way that does not depend on what their size is.

`squeeze` drops an axis where it is one long and does nothing elsewhere, so what it makes of a
dynamic axis was decided by the example. That decision is written into the graph, and the result
refuses the sizes for which it would be another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from demask.compat.symbolic_shapes import free_unbacked_symbols
from demask.graph.editor import GraphEditor
from demask.graph.guards import spelled
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.traits import SQUEEZES

aten = torch.ops.aten


def squeezed(program: Program) -> Program:
    """The program whose squeezes drop static axes alone; its guards hold what the others were."""
    if not any(_is_dynamic(node) for node in program.graph.nodes):
        return program
    editor, guards = GraphEditor(program), dict.fromkeys(program.guards)
    for node in filter(_is_dynamic, editor.calls()):
        x: Any = node.args[0]
        shape = x.meta["val"].shape
        with editor.graph.inserting_before(node):
            made = x
            for dim in sorted(_dims(node), reverse=True):
                size = shape[dim]
                if isinstance(size, int):
                    made = editor.call(aten.squeeze.dim, made, dim) if size == 1 else made
                    continue
                if free_unbacked_symbols(size):  # by no input: torch decides in each call
                    made = editor.call(aten.squeeze.dim, made, dim)
                    continue
                one, text = schema.hint(size) == 1, spelled(size.node.expr)
                if text is not None:
                    guards[f"{text} == 1" if one else f"{text} >= 2"] = None
                made = editor.call(aten.select.int, made, dim, 0) if one else made
        editor.replace(node, made)
    # In-place calls, whose results nothing reads, are still in the graph: nothing is dropped.
    return replace(program, graph=editor.graph, guards=tuple(guards))


def _dims(node: fx.Node) -> list[int]:
    """The axes that a squeeze drops if they are one long."""
    rank = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    dims: Any = schema.arguments(node).get("dim", range(rank))
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def _is_dynamic(node: fx.Node) -> bool:
    if node.target not in SQUEEZES:
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return any(not isinstance(shape[dim], int) for dim in _dims(node))
