"""Where each value of a pass lies: in the memory of a value that is no longer read, in the arena,
or where torch puts it.

The graph stays functional; this says how its calls are made. Values that alias each other (views)
are one *body*: it is alive as long as any of them is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.compat.dispatch import (
    OpOverload,
    base_name,
    has_composite_kernel,
    overload_name,
    schema_of,
)
from demask.compat.onednn import ops
from demask.graph.node_records import TensorType
from demask.graph.queries import COPY, input_dependent
from demask.ops import traits
from demask.ops.entry import op_name

aten = torch.ops.aten
# Views in which several elements lie at one place.
_STRETCHES = re.compile("expand|broadcast|meshgrid|as_strided|unfold")


@dataclass(frozen=True, slots=True)
class InPlace:
    """A call that writes its result over one operand: what to call instead."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InArena:
    """A call that writes into memory planned for it: the overload that takes `out`, and the steps
    from which and up to which its body is alive."""

    target: OpOverload
    start: int
    end: int


class _Bodies:
    """Values by the memory they share: union-find."""

    def __init__(self, graph: fx.Graph, live: set[fx.Node]):
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.parent: dict[fx.Node, fx.Node] = {node: node for node in graph.nodes}
        for node in graph.nodes:
            if node.op == "call_function" and node in live and not fresh(node):
                for source in node.all_input_nodes:
                    self.join(node, source)
        self.live = live

    def root(self, node: fx.Node) -> fx.Node:
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        self.parent[self.root(node)] = self.root(other)

    def members(self, node: fx.Node) -> list[fx.Node]:
        root = self.root(node)
        return [other for other in self.parent if self.root(other) is root]

    def ours(self, node: fx.Node) -> bool:
        """Is the memory of a value made by the pass, not the caller's, kept, or given back?"""
        for member in self.members(node):
            kept = member.op != "call_function" or member not in self.live
            stretched = _STRETCHES.search(str(member.target)) is not None
            if kept or stretched or any(user.op == "output" for user in member.users):
                return False
        return True

    def last(self, node: fx.Node) -> int:
        """The last step that reads a body."""
        return max(
            (self.order[user] for member in self.members(node) for user in member.users), default=0
        )


def kept_bodies(graph: fx.Graph, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of some values that share memory with what is kept between calls."""
    live = input_dependent(graph)
    bodies = _Bodies(graph, live)
    return [n for n in nodes if any(m not in live for m in bodies.members(n))]


def fresh(node: fx.Node) -> bool:
    """Does a call return memory of its own, never that of an operand?"""
    target = node.target
    if not isinstance(target, OpOverload) or "unsafe" in base_name(target):
        return False  # the unsafe views share memory without saying so
    name = op_name(target)
    if name in traits.OWN_MEMORY:
        return True
    if name in traits.SUMS_OF_PRODUCTS and len(node.all_input_nodes) > 1:
        return True
    aliases = any(r.alias_info is not None for r in schema_of(target).returns)
    return not aliases and not has_composite_kernel(target)


def decided(graph: fx.Graph) -> dict[fx.Node, InPlace | InArena]:
    """What is written over an operand, and what into the arena; all else is left to torch."""
    if any(node.target is aten.as_strided.default for node in graph.nodes):
        return {}  # it speaks of memory as the calls before it left it
    live = input_dependent(graph)
    bodies = _Bodies(graph, live)
    found: dict[fx.Node, InPlace | InArena] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node in live and isinstance(node.target, OpOverload):
            over = _over(node, bodies)
            if over is not None:
                base, call = over
                found[node] = call
                bodies.join(node, base)
    for node in graph.nodes:
        if node in found or node.op != "call_function" or node not in live:
            continue
        target = _with_out(node)
        if target is not None and bodies.ours(node):
            found[node] = InArena(target, bodies.order[node], bodies.last(node))
    return found


def _over(node: fx.Node, bodies: _Bodies) -> tuple[fx.Node, InPlace] | None:
    """The operand that a call may write over, and how."""
    pointwise = ops()._convolution_pointwise
    if node.target is pointwise.binary:
        x, other, *rest = node.args
        if _dies(node, other, bodies) and _alike(node, other):
            target = ops()._convolution_pointwise_.binary
            return other, InPlace(target, (other, x, *rest), node.kwargs)  # type: ignore[return-value]
        return None
    target = _inplace(node.target)  # type: ignore[arg-type]
    if target is None:
        return None
    orders = [node.args]
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        orders.append((node.args[1], node.args[0]))
    for args in orders:
        base = args[0] if args else None
        if _dies(node, base, bodies) and _alike(node, base):
            return base, InPlace(target, tuple(args), node.kwargs)  # type: ignore[return-value]
    return None


def _dies(node: fx.Node, base: Any, bodies: _Bodies) -> bool:
    """Is a call the last to read a body of ours, and once?"""
    if not isinstance(base, fx.Node) or not bodies.ours(base):
        return False
    members = set(bodies.members(base))
    others = [source for source in node.all_input_nodes if source is not base]
    reads = sum(argument is base for argument in node.args)
    return bodies.last(base) == bodies.order[node] and reads == 1 and not members & set(others)


def _alike(node: fx.Node, base: Any) -> bool:
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
    """The overload that writes into memory it is given, if it is no copy behind the scenes."""
    target: Any = node.target
    value = node.meta.get("value")
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not fresh(node):
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
        kinds = [str(a.type) for a in schema_of(op).arguments if not a.is_out]
        if kinds == [str(a.type) for a in schema_of(target).arguments]:
            return op
    return None
