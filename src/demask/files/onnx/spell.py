"""Calls that torch's exporter has no ONNX function for, as others: mostly those that take numbers
that follow from dynamic sizes, where it takes constants alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.graph.build import Builder, mode_of, same_size, sizes_of
from demask.ops import schema
from demask.ops.traits import OF_TWO_TENSORS

aten = torch.ops.aten
Rule = Callable[[Builder, fx.Node], fx.Node]
_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def _shifted(build: Builder, node: fx.Node, op: Any) -> fx.Node:
    a, b = node.args
    return build.call(op, a, build.call(operator.pow, 2, b))


def _root(build: Builder, node: fx.Node) -> fx.Node:
    return build.call(operator.pow, node.args[0], 0.5)


#: arithmetic on sizes that the exporter does not know
_SIZES: Mapping[Any, Rule] = {
    torch.sym_sqrt: _root,
    getattr(torch, "_sym_sqrt", None): _root,
    operator.lshift: lambda build, node: _shifted(build, node, operator.mul),
    operator.rshift: lambda build, node: _shifted(build, node, operator.floordiv),
}


def spell(graph: fx.Graph) -> None:
    """Put calls that the exporter takes in the place of others."""
    build = Builder(graph, mode_of(graph))
    for node in list(graph.nodes):
        rule = _rule(node)
        if rule is None:
            continue
        with graph.inserting_before(node):
            made = rule(build, node)
        made.meta = {**node.meta, **made.meta}
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _rule(node: fx.Node) -> Rule | None:
    if node.target is aten.scaled_dot_product_attention.default:
        rank = node.meta["val"].ndim
        if rank > 4:
            return _attended_flat if _has_one_front(node) else None
        return _attended if 1 < rank < 4 and len(node.args) > 2 else None
    if node.target in OF_TWO_TENSORS and takes_sizes(node):
        return _as_tensor
    if node.target is aten.roll.default and takes_sizes(node):
        return _rolled
    return _SIZES.get(node.target)


def _attended(build: Builder, node: fx.Node) -> fx.Node:
    """Attention over axes of size 1 in front."""
    tensors, rest = list(node.args[:3]), node.args[3:]
    more = 4 - node.meta["val"].ndim
    for _ in range(more):
        tensors = [build.call(aten.unsqueeze.default, x, 0) for x in tensors]
    made = build.call(node.target, *tensors, *rest, **node.kwargs)
    for _ in range(more):
        made = build.call(aten.squeeze.dim, made, 0)
    return made


def _attended_flat(build: Builder, node: fx.Node) -> fx.Node:
    """Attention over more axes, those in front as one."""
    given = schema.arguments(node)
    query, mask = given["query"], given["attn_mask"]
    last = query.meta["val"].ndim - 4
    tensors = [build.call(aten.flatten.using_ints, given[name], 0, last)
               for name in ("query", "key", "value")]  # fmt: skip
    if mask is not None and mask.meta["val"].ndim > 3:
        front, own = sizes_of(build, query)[:-2], sizes_of(build, mask)[-2:]
        mask = build.call(aten.expand.default, mask, [*front, *own])
        mask = build.call(aten.flatten.using_ints, mask, 0, last)
    more = {name: given[name] for name in ("is_causal", "scale", "enable_gqa")}
    made = build.call(node.target, *tensors, mask, 0.0, **more)
    front, size = sizes_of(build, query)[:-1], sizes_of(build, given["value"])[-1]
    return build.call(aten.reshape.default, made, [*front, size])


def _has_one_front(node: fx.Node) -> bool:
    """Whether the operands of attention have the same axes in front, heads among them."""
    query, *others = (x.meta["val"].shape[:-2] for x in node.args[:3])  # type: ignore[union-attr]
    return all(len(other) == len(query) and all(map(same_size, query, other)) for other in others)


def _as_tensor(build: Builder, node: fx.Node) -> fx.Node:
    """The call with its number as a tensor."""
    dtype = node.meta["val"].dtype
    number = build.call(aten.scalar_tensor.default, node.args[1], dtype=dtype)
    return build.call(OF_TWO_TENSORS[node.target], node.args[0], number)


def _rolled(build: Builder, node: fx.Node) -> fx.Node:
    """roll(x, s) == cat(x[n - s % n:], x[:n - s % n])"""
    x, shifts, *rest = node.args
    dims: Any = rest[0] if rest and rest[0] else None
    made: Any = x if dims else build.call(aten.reshape.default, x, [-1])
    for shift, dim in zip(shifts, dims or [0], strict=True):  # type: ignore[arg-type]
        length = build.call(aten.sym_size.int, made, dim)
        start = build.call(operator.sub, length, build.call(operator.mod, shift, length))
        spans = ((start, length), (0, start))
        made = build.call(
            aten.cat.default, [build.call(aten.slice.Tensor, made, dim, *s) for s in spans], dim
        )
    if dims:
        return made
    sizes = [build.call(aten.sym_size.int, x, k) for k in range(node.meta["val"].ndim)]
    return build.call(aten.reshape.default, made, sizes)


def takes_sizes(node: fx.Node) -> bool:
    """Whether numbers among a call's arguments follow from dynamic sizes."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [n.meta.get("val") for n in leaves if isinstance(n, fx.Node)]
    return any(isinstance(v, _SYMBOLIC) for v in values) and any(
        isinstance(v, Tensor) for v in values
    )
