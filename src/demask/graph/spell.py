"""One spelling for calls that say the same: the table then needs one entry for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from demask.graph.build import Builder, mode_of, same_shape, sizes_of
from demask.graph.program import Program, copied

aten = torch.ops.aten


def spelled(program: Program) -> Program:
    """The same program with `expand_as` as expand, `stack` as cat, `glu` as its product; slices
    of whole axes (torch.export writes one for every `:`) are gone."""
    graph, _ = copied(program)
    build = Builder(graph, mode_of(graph))
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is aten.slice.Tensor and _is_whole(node):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target in _RULES:
                made = _RULES[node.target](build, node)
                made.meta = {**node.meta, **made.meta}
                node.replace_all_uses_with(made)
                graph.erase_node(node)
    return program.with_graph(graph)


def _is_whole(node: fx.Node) -> bool:
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    return step == 1 and same_shape(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]


def _expand_as(build: Builder, node: fx.Node) -> fx.Node:
    x, other = node.args
    return build.call(aten.expand.default, x, sizes_of(build, other))  # type: ignore[arg-type]


def _view_as(build: Builder, node: fx.Node) -> fx.Node:
    x, other = node.args
    return build.call(aten.reshape.default, x, sizes_of(build, other))  # type: ignore[arg-type]


def _type_as(build: Builder, node: fx.Node) -> fx.Node:
    x, other = node.args
    return build.call(aten.to.dtype, x, other.meta["val"].dtype)  # type: ignore[union-attr]


def _stack(build: Builder, node: fx.Node) -> fx.Node:
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return build.call(aten.cat.default, [build.call(aten.unsqueeze.default, p, dim) for p in parts], dim)


def _glu(build: Builder, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else -1
    half = x.meta["val"].shape[dim] // 2
    value = build.call(aten.slice.Tensor, x, dim, 0, half)
    gate = build.call(aten.slice.Tensor, x, dim, half, 2 * half)
    return build.call(aten.mul.Tensor, value, build.call(aten.sigmoid.default, gate))


_RULES: dict[Any, Callable[[Builder, fx.Node], fx.Node]] = {
    aten.expand_as.default: _expand_as,
    aten.view_as.default: _view_as,
    aten.reshape_as.default: _view_as,
    aten.type_as.default: _type_as,
    aten.stack.default: _stack,
    aten.glu.default: _glu,
}
