"""Replacement of calls that torch's exporter has no ONNX function for by calls that it has one for.

Most of them take numbers computed from dynamic sizes, where the exporter supports only constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.graph.editor import GraphEditor
from demask.ops import schema
from demask.ops.schema import fake, same_size
from demask.ops.traits import OF_TWO_TENSORS

aten = torch.ops.aten
Rule = Callable[[GraphEditor, fx.Node], fx.Node]
_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def _shifted(editor: GraphEditor, node: fx.Node, op: Any) -> fx.Node:
    a, b = node.args
    return editor.call(op, a, editor.call(operator.pow, 2, b))


def _root(editor: GraphEditor, node: fx.Node) -> fx.Node:
    return editor.call(operator.pow, node.args[0], 0.5)


#: arithmetic on sizes that the exporter does not support
_SIZES: Mapping[Any, Rule] = {
    torch.sym_sqrt: _root,
    getattr(torch, "_sym_sqrt", None): _root,
    operator.lshift: lambda editor, node: _shifted(editor, node, operator.mul),
    operator.rshift: lambda editor, node: _shifted(editor, node, operator.floordiv),
}


def canonicalize(graph: fx.Graph) -> None:
    """Replace calls that the exporter does not support, in place."""
    editor = GraphEditor.in_place(graph)
    for node in list(graph.nodes):
        rule = _rule(node)
        if rule is None:
            continue
        with graph.inserting_before(node):
            replacement = rule(editor, node)
        editor.replace(node, replacement, inherit=True)


def _rule(node: fx.Node) -> Rule | None:
    if node.target is aten.scaled_dot_product_attention.default:
        rank = fake(node).ndim
        if rank > 4:
            return _flat_attention if _has_equal_batch(node) else None
        return _attention_of_rank_4 if 1 < rank < 4 and len(node.args) > 2 else None
    if node.target in OF_TWO_TENSORS and takes_sizes(node):
        return _as_tensor
    if node.target is aten.roll.default and takes_sizes(node):
        return _rolled
    return _SIZES.get(node.target)


def _attention_of_rank_4(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """Attention with leading axes of size 1 added, to have four axes."""
    tensors, rest = list(node.args[:3]), node.args[3:]
    added = 4 - fake(node).ndim
    for _ in range(added):
        tensors = [editor.call(aten.unsqueeze.default, x, 0) for x in tensors]
    result = editor.call(node.target, *tensors, *rest, **node.kwargs)
    for _ in range(added):
        result = editor.call(aten.squeeze.dim, result, 0)
    return result


def _flat_attention(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """Attention over more than four axes, the leading ones flattened into one."""
    arguments = schema.arguments(node)
    query, mask = arguments["query"], arguments["attn_mask"]
    last = fake(query).ndim - 4
    tensors = [editor.call(aten.flatten.using_ints, arguments[name], 0, last) for name in ("query", "key", "value")]
    if mask is not None and fake(mask).ndim > 3:
        batch, mask_sizes = editor.sizes(query)[:-2], editor.sizes(mask)[-2:]
        mask = editor.call(aten.expand.default, mask, [*batch, *mask_sizes])
        mask = editor.call(aten.flatten.using_ints, mask, 0, last)
    options = {name: arguments[name] for name in ("is_causal", "scale", "enable_gqa")}
    result = editor.call(node.target, *tensors, mask, 0.0, **options)
    batch, size = editor.sizes(query)[:-1], editor.sizes(arguments["value"])[-1]
    return editor.call(aten.reshape.default, result, [*batch, size])


def _has_equal_batch(node: fx.Node) -> bool:
    """Whether the operands of attention have equal batch and head sizes."""
    query, *others = (fake(x).shape[:-2] for x in node.args[:3])
    return all(len(other) == len(query) and all(map(same_size, query, other)) for other in others)


def _as_tensor(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """The call with its number operand as a tensor."""
    dtype = fake(node).dtype
    number = editor.call(aten.scalar_tensor.default, node.args[1], dtype=dtype)
    return editor.call(OF_TWO_TENSORS[node.target], node.args[0], number)


def _rolled(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """roll(x, s) == cat(x[n - s % n:], x[:n - s % n])"""
    x, shifts, *rest = node.args
    dims: Any = rest[0] if rest and rest[0] else None
    result: Any = x if dims else editor.call(aten.reshape.default, x, [-1])
    for shift, dim in zip(shifts, dims or [0], strict=True):  # type: ignore[arg-type]
        length = editor.call(aten.sym_size.int, result, dim)
        start = editor.call(operator.sub, length, editor.call(operator.mod, shift, length))
        spans = ((start, length), (0, start))
        result = editor.call(aten.cat.default, [editor.call(aten.slice.Tensor, result, dim, *s) for s in spans], dim)
    if dims:
        return result
    sizes = [editor.call(aten.sym_size.int, x, k) for k in range(fake(node).ndim)]
    return editor.call(aten.reshape.default, result, sizes)


def takes_sizes(node: fx.Node) -> bool:
    """Whether a call takes tensors, and numbers computed from dynamic sizes."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [n.meta.get("val") for n in leaves if isinstance(n, fx.Node)]
    return any(isinstance(v, _SYMBOLIC) for v in values) and any(isinstance(v, Tensor) for v in values)
