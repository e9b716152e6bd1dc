"""Where each value of a graph is stored: in the memory of a value that is no longer read, in the
arena, or in memory that torch allocates.

The graph stays functional; only the calls that run it change. Values that alias each other (views)
share one *buffer*, which is alive as long as any of them is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from demask.compat.dispatch import OpOverload, base_name, has_composite_kernel, overload_name, schema_of
from demask.compat.onednn import ops
from demask.graph.node_records import TensorType
from demask.graph.queries import COPY, input_dependent
from demask.ops import traits
from demask.ops.entry import op_name

aten = torch.ops.aten
# Views in which several elements share one address.
_STRETCHES = re.compile("expand|broadcast|meshgrid|as_strided|unfold")


@dataclass(frozen=True, slots=True)
class InPlace:
    """A call that writes its result over one operand: target and arguments to call instead."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InArena:
    """A call that writes into the arena. target: the overload with `out`. start, end: positions in
    the graph of the first and last call during which its buffer is alive."""

    target: OpOverload
    start: int
    end: int


class _Buffers:
    """Values grouped by the memory they share (union-find)."""

    def __init__(self, graph: fx.Graph, live: set[fx.Node]):
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}
        for node in graph.nodes:
            if node.op == "call_function" and node in live and not returns_new_memory(node):
                for source in node.all_input_nodes:
                    self.join(node, source)
        self.live = live

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of a value's buffer."""
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """Put two values into one buffer."""
        self.parent[self.root(node)] = self.root(other)

    def members(self, node: fx.Node) -> list[fx.Node]:
        """The values that share memory with a value."""
        root = self.root(node)
        return [other for other in self.parent if self.root(other) is root]

    def is_own(self, node: fx.Node) -> bool:
        """Whether a value's memory is allocated by the call, and neither cached nor returned."""
        for member in self.members(node):
            foreign = member.op != "call_function" or member not in self.live
            stretched = _STRETCHES.search(str(member.target)) is not None
            if foreign or stretched or any(user.op == "output" for user in member.users):
                return False
        return True

    def last_read(self, node: fx.Node) -> int:
        """Position in the graph of the last call that reads a value's buffer."""
        return max((self.order[user] for member in self.members(node) for user in member.users), default=0)


def sharing_cached(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of `nodes` that share memory with values cached between calls."""
    live = input_dependent(graph)
    buffers = _Buffers(graph, live)
    return [n for n in nodes if any(m not in live for m in buffers.members(n))]


def returns_new_memory(node: fx.Node) -> bool:
    """Whether a call returns new memory, never that of an operand."""
    target = node.target
    if not isinstance(target, OpOverload) or "unsafe" in base_name(target):
        return False  # the unsafe views share memory, which their schemas do not state
    name = op_name(target)
    if name in traits.OWN_MEMORY:
        return True
    if name in traits.SUMS_OF_PRODUCTS and len(node.all_input_nodes) > 1:
        return True
    aliases = any(r.alias_info is not None for r in schema_of(target).returns)
    return not aliases and not has_composite_kernel(target)


def assign_buffers(graph: fx.Graph) -> dict[fx.Node, InPlace | InArena]:
    """The calls that write over an operand or into the arena; torch allocates for all others."""
    if any(node.target is aten.as_strided.default for node in graph.nodes):
        return {}  # as_strided depends on the memory layout that earlier calls produced
    live = input_dependent(graph)
    buffers = _Buffers(graph, live)
    decisions: dict[fx.Node, InPlace | InArena] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node in live and isinstance(node.target, OpOverload):
            over = _over(node, buffers)
            if over is not None:
                base, call = over
                decisions[node] = call
                buffers.join(node, base)
    for node in graph.nodes:
        if node in decisions or node.op != "call_function" or node not in live:
            continue
        target = _with_out(node)
        if target is not None and buffers.is_own(node):
            decisions[node] = InArena(target, buffers.order[node], buffers.last_read(node))
    return decisions


def _over(node: fx.Node, buffers: _Buffers) -> tuple[fx.Node, InPlace] | None:
    """The operand that a call may write over, and how."""
    pointwise, operands = ops()._convolution_pointwise, cast(Any, node.args)
    if node.target is pointwise.binary:
        x, other, *rest = operands
        if _dies(node, other, buffers) and _are_interchangeable(node, other):
            target = ops()._convolution_pointwise_.binary
            return other, InPlace(target, (other, x, *rest), node.kwargs)
        return None
    target = _inplace(node.target)  # type: ignore[arg-type]
    if target is None:
        return None
    orders = [operands]
    if node.target is aten.add.Tensor and len(operands) == 2 and not node.kwargs:
        orders.append(operands[::-1])
    for args in orders:
        base: Any = args[0] if args else None
        if _dies(node, base, buffers) and _are_interchangeable(node, base):
            return base, InPlace(target, tuple(args), node.kwargs)
    return None


def _dies(node: fx.Node, base: Any, buffers: _Buffers) -> bool:
    """Whether a call is the last to read `base`, reads it once, and may write over it."""
    if not isinstance(base, fx.Node) or not buffers.is_own(base):
        return False
    members = set(buffers.members(base))
    others = [source for source in node.all_input_nodes if source is not base]
    reads = sum(argument is base for argument in node.args)
    return buffers.last_read(base) == buffers.order[node] and reads == 1 and not members & set(others)


def _are_interchangeable(node: fx.Node, base: Any) -> bool:
    """Whether two values have the same shape, strides, dtype and device."""
    mine = node.meta.get("value")
    return isinstance(mine, TensorType) and mine == base.meta.get("value")


def _inplace(target: OpOverload) -> OpOverload | None:
    """The overload that writes over its first operand: `add_.Tensor` for `add.Tensor`."""
    packet = getattr(aten, f"{base_name(target)}_", None) if target.namespace == "aten" else None
    op = getattr(packet, overload_name(target), None) if packet is not None else None
    if op is None or torch.Tag.generated in op.tags:
        return None
    names = [a.name for a in schema_of(op).arguments]
    return op if names == [a.name for a in schema_of(target).arguments] else None


def _with_out(node: fx.Node) -> OpOverload | None:
    """The overload that writes into `out`, unless it is generated: then it computes and copies."""
    target: Any = node.target
    value = node.meta.get("value")
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not returns_new_memory(node):
        return None
    if not isinstance(value, TensorType) or value.device != "cpu":
        return None
    if target is COPY:
        return aten.copy_.default
    names = [a.name for a in schema_of(target).arguments]
    for overload in target.overloadpacket.overloads():
        op = getattr(target.overloadpacket, overload)
        plain = [a.name for a in schema_of(op).arguments if not a.is_out]
        outs = len(schema_of(op).arguments) - len(plain)
        if outs != 1 or plain != names or torch.Tag.generated in op.tags:
            continue
        types = [str(a.type) for a in schema_of(op).arguments if not a.is_out]
        if types == [str(a.type) for a in schema_of(target).arguments]:
            return op
    return None
