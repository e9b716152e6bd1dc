"""Which positions of a value its readers need: every g-th from the first on, along each axis.

    a convolution or a pool      gcd(stride, padding, dilation), without the
                                 stride of one window; so a strided convolution
                                 of one tap reads all, unless it was dilated
    y[first::s], gap g of y      gcd(first, s g)
    a call that carries axes     the gaps of its value

A backward sweep from the outputs over the letters of the op table. Gap 0: only the first position;
1: all positions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, ops

from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import carry, carry_back
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS, MAX_POOLS, PADS

aten = ops.aten
Gaps = tuple[int, ...]  # distance of the positions that are read, per axis of a value


def gaps_of(graph: fx.Graph, table: Table) -> dict[fx.Node, Gaps]:
    """By value, the distance of the positions that its readers need, along each axis.

    >>> import torch
    >>> from torch import nn
    >>> from demask.graph.capture.capture import capture
    >>> from demask.ops import TABLE
    >>> net = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 3, padding=2, dilation=2, stride=2)).eval()
    >>> graph = capture(net, (torch.ones(1, 1, 8, 8),)).graph
    >>> [gaps for node, gaps in gaps_of(graph, TABLE).items() if node.name == "relu"]
    [(1, 1, 2, 2)]
    """
    gaps_by_node: dict[fx.Node, Gaps] = {}
    for node in reversed(graph.nodes):
        for operand, gaps in _read(node, gaps_by_node, table):
            before = gaps_by_node.get(operand, (0,) * len(gaps))
            gaps_by_node[operand] = tuple(map(math.gcd, before, gaps))
    return gaps_by_node


def _read(node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps], table: Table) -> Iterator[tuple[fx.Node, Gaps]]:
    """The operands of a node, with the gaps of the positions that it reads."""
    known = dict(_windows(node) or _slice(node, gaps_by_node) or _carried(node, gaps_by_node, table))
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            yield operand, known.get(operand, (1,) * value.ndim)


def _windows(node: fx.Node) -> list[tuple[fx.Node, Gaps]] | None:
    """The input of a convolution or max pool, with its gaps."""
    axes = window_gaps(node)
    if axes is None:
        return None
    x = node.args[0]
    lead = fake(x).ndim - len(axes)
    return [(x, (*[1] * lead, *axes))]  # type: ignore[list-item]


def window_gaps(node: fx.Node) -> Gaps | None:
    """The gaps of a convolution or max pool along its spatial axes; None for other calls."""
    if node.target not in CONVOLUTIONS | MAX_POOLS:
        return None
    arguments = schema.arguments(node)
    weight = arguments.get("weight")
    kernel = list(arguments["kernel_size"]) if weight is None else list(fake(weight).shape[2:])
    rank = len(kernel)
    stride, padding, dilation = (
        per_axis(arguments[name] or kernel, rank) for name in ("stride", "padding", "dilation")
    )
    stride = (s if n != 1 else 0 for s, n in zip(stride, fake(node).shape[-rank:], strict=True))
    return tuple(map(math.gcd, stride, padding, dilation))


def per_axis(value: Any, rank: int) -> list[int]:
    """An argument as one number per axis."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


def _slice(node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps]) -> list[tuple[fx.Node, Gaps]] | None:
    """The source of a slice, with its gaps; None for other calls."""
    if node.target is not aten.slice.Tensor or node not in gaps_by_node:
        return None
    cut = schema.arguments(node)
    first, step = cut["start"] or 0, cut["step"]
    if not isinstance(first, int) or not isinstance(step, int) or first < 0:
        return None
    gaps = list(gaps_by_node[node])
    axis = cut["dim"] % len(gaps)
    gaps[axis] = math.gcd(first, step * gaps[axis])
    return [(cut["self"], tuple(gaps))]


def _carried(node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps], table: Table) -> list[tuple[fx.Node, Gaps]]:
    """The operands of a call along whose axes it carries positions, with the gaps of its value."""
    relation = bind(node, table) if node.op == "call_function" and node in gaps_by_node else None
    if not isinstance(relation, Relation) or len(relation.outs) != 1:
        return []
    reads: dict[fx.Node, Gaps] = {}
    carried = carry_back(relation, dict(enumerate(gaps_by_node[node])))
    for operand, gaps, axes in zip(relation.operands, carried, relation.ins, strict=True):
        if isinstance(operand.value, fx.Node):
            axis_gaps = tuple(gaps.get(k, int(bool(axis))) for k, axis in enumerate(axes))
            before = reads.get(operand.value, (0,) * len(axis_gaps))
            reads[operand.value] = tuple(map(math.gcd, before, axis_gaps))
    return list(reads.items())


def skippable_axes(graph: fx.Graph, table: Table) -> dict[fx.Node, tuple[bool, ...]]:
    """The values that can be computed at some positions only, with a flag per axis: outputs of
    convolutions and pools along spatial axes, and values of calls that carry these axes."""
    flags_by_node: dict[fx.Node, tuple[bool, ...]] = {}
    for node in graph.nodes:
        value, axes = node.meta.get("val"), window_gaps(node)
        if axes is not None:
            lead = value.ndim - len(axes)
            flags_by_node[node] = (*[False] * lead, *[True] * len(axes))
        elif any(n in flags_by_node for n in node.all_input_nodes) and any(flags := _skips(node, flags_by_node, table)):
            flags_by_node[node] = flags
    return flags_by_node


def _skips(node: fx.Node, flags_by_node: Mapping[fx.Node, tuple[bool, ...]], table: Table) -> tuple[bool, ...]:
    """Whether positions can be skipped, for each axis of a call that carries or shifts it."""
    if node.target in PADS | {aten.slice.Tensor}:
        return flags_by_node.get(node.args[0], ())  # type: ignore[arg-type]
    relation = bind(node, table) if node.op == "call_function" else None
    if not isinstance(relation, Relation) or len(relation.outs) != 1:
        return ()
    flags = [
        {k: True for k, free in enumerate(_flags(operand.value, flags_by_node)) if free}
        for operand in relation.operands
    ]
    (carried,) = carry(relation, flags, operator.or_)
    return tuple(k in carried for k in range(len(relation.outs[0])))


def _flags(value: Any, flags_by_node: Mapping[fx.Node, tuple[bool, ...]]) -> tuple[bool, ...]:
    return flags_by_node.get(value, ()) if isinstance(value, fx.Node) else ()


__all__ = ["Gaps", "gaps_of", "per_axis", "skippable_axes", "window_gaps"]
