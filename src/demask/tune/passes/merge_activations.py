"""Merging of activations written as several calls into torch's single op.

    x * sigmoid(x) == silu(x)
    clamp(x / 6 + 1/2, 0, 1) == clamp(x + 3, 0, 6) / 6 == hardsigmoid(x)
    x * hardsigmoid(x) == hardswish(x)

Equal up to rounding. One call reads and writes memory once, and can be fused with a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.schema import fake

aten = torch.ops.aten
SIXTH = 1e-6  # largest relative error of 1/6 in float32


def merge_activations(program: Program) -> Program:
    """The program with each of these activations as one call."""
    editor = GraphEditor(program)
    for node in editor.calls(aten.mul.Tensor, aten.div.Tensor, aten.clamp.default):
        match = _silu(node) or _hardswish(node) or _hardsigmoid(node)
        if match is not None and fake(match[1]).dtype == fake(node).dtype:
            editor.replace(node, editor.insert(node, node, *match))
    return editor.finish()


Match = tuple[Any, fx.Node] | None  # an op and its operand


def _silu(node: fx.Node) -> Match:
    for x, other in _factors(node):
        if _is(other, aten.sigmoid.default) and other.args[0] is x:
            return aten.silu.default, x
    return None


def _hardswish(node: fx.Node) -> Match:
    for x, other in _factors(node):
        if _is(other, aten.hardsigmoid.default) and other.args[0] is x:
            return aten.hardswish.default, x
    inner = _scaled(node)
    for x, other in _factors(inner):
        if _between(other, 6) is x:
            return aten.hardswish.default, x
    return None


def _hardsigmoid(node: fx.Node) -> Match:
    x = _between(_scaled(node), 6)
    if x is None and (inner := _between(node, 1)) is not None:
        x = _scaled(inner)
    return None if x is None else (aten.hardsigmoid.default, x)


def _between(node: Any, high: int) -> fx.Node | None:
    """The x of clamp(x + high / 2, 0, high)."""
    if not _is(node, aten.clamp.default):
        return None
    arguments = schema.arguments(node)
    return _plus(arguments["self"], high / 2) if (arguments["min"], arguments["max"]) == (0, high) else None


def _plus(node: Any, number: float) -> fx.Node | None:
    """The x of x + number."""
    if not _is(node, aten.add.Tensor):
        return None
    arguments = schema.arguments(node)
    same = arguments["other"] == number and arguments["alpha"] == 1
    return arguments["self"] if same and isinstance(arguments["self"], fx.Node) else None


def _scaled(node: Any) -> fx.Node | None:
    """The x of x / 6."""
    divides = _is(node, aten.div.Tensor)
    if not divides and not _is(node, aten.mul.Tensor):
        return None
    x, number = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(number, int | float):
        return None
    return x if isclose(number, 6 if divides else 1 / 6, rel_tol=SIXTH) else None


def _factors(node: Any) -> list[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two values, in both orders; none for other calls."""
    if not _is(node, aten.mul.Tensor):
        return []
    a, b = node.args[:2]
    both = isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return [(a, b), (b, a)] if both else []


def _is(node: Any, target: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.target is target
