"""The bytes of a graph's values that are alive at each of its calls."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, fx, nn

from demask.compat.dispatch import OpOverload, schema_of
from demask.ops.schema import example_size
from demask.pages import Span, Timeline


def memory_timeline(network: nn.Module) -> Timeline | None:
    """The calls of a graph module against the bytes of the inputs and values that it still reads
    or returns, on the example's sizes, without parameters; None for other networks, and where a
    size is unknown."""
    if not isinstance(network, fx.GraphModule):
        return None
    nodes = [node for node in network.graph.nodes if node.op not in ("get_attr", "output")]
    owners = {node: node for node in nodes}
    for node in nodes:
        if (viewed := _viewed(node)) is not None:
            owners[node] = owners.get(viewed, node)
    position = {node: k for k, node in enumerate(nodes)}
    last = dict.fromkeys(nodes, 0)
    for node in nodes:
        reads = [position.get(user, len(nodes)) for user in node.users] or [position[node]]
        last[owners[node]] = max(last[owners[node]], *reads)
    sizes = {node: _bytes(node) for node in nodes if owners[node] is node}
    if None in sizes.values():
        return None
    changes = [0] * (len(nodes) + 2)
    for node, size in sizes.items():
        changes[position[node]] += size or 0
        changes[last[node] + 1] -= size or 0
    spans, alive = list[Span](), 0
    for node, change in zip(nodes, changes, strict=False):
        alive += change
        if node.op != "placeholder":
            spans.append(Span(str(node.name), 1.0, alive))
    heading = "Values in memory, call by call"
    return Timeline(spans, "calls, in order", heading) if spans else None


def _viewed(node: fx.Node) -> fx.Node | None:
    """The value whose memory a call's result is a part of; None if it has its own."""
    target, operands = node.target, node.all_input_nodes
    if not operands:
        return None
    if isinstance(target, OpOverload):
        returns = schema_of(target).returns
        return operands[0] if returns and returns[0].alias_info is not None else None
    return operands[0] if getattr(target, "__name__", "") == "getitem" else None


def _bytes(node: fx.Node) -> int | None:
    """Bytes of a call's results; None if a size is unknown."""
    value: Any = node.meta.get("val", node.meta.get("value"))
    total = 0
    for one in value if isinstance(value, (tuple, list)) else (value,):
        sizes = one.shape if isinstance(one, Tensor) else getattr(one, "sizes", None)
        if sizes is None:
            if one is None and node.op != "placeholder" and value is None:
                return None
            continue
        if any(isinstance(size, str) for size in sizes):
            return None
        total += math.prod(map(example_size, sizes)) * one.dtype.itemsize
    return total
