"""Graphs as plain values for pickle, and the reverse, without tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from demask.compat.dispatch import OpOverload, overload_name, schema_of
from demask.ops.custom import is_custom_op


@dataclass(frozen=True, slots=True)
class NodeReference:
    """A node by its name, in the arguments of another node."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a node's tensor value: dtype, sizes (dynamic ones as expressions), device type.
    It is stored in meta["value"]; unlike fake tensors it can be pickled."""

    dtype: torch.dtype
    sizes: tuple[int | str, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, value: Any) -> TensorType | None:
        """The type of a fake tensor; None for other values."""
        if not isinstance(value, torch.Tensor):
            return None
        sizes = tuple(s if isinstance(s, int) else str(s.node.expr) for s in value.shape)
        return cls(value.dtype, sizes, value.device.type)


@dataclass(frozen=True, slots=True)
class Overload:
    """An op by its names: ("aten::relu", "default")."""

    name: str
    overload: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of a graph: the arguments of `Graph.create_node`; value: its type, if known."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    value: TensorType | None = None


def records_of(graph: fx.Graph) -> tuple[NodeRecord, ...]:
    """The nodes of a graph in order, without most of `meta`; `graph_of` is the inverse."""

    def plain(leaf: Any) -> Any:
        return NodeReference(leaf.name) if isinstance(leaf, fx.Node) else leaf

    def row(node: fx.Node) -> NodeRecord:
        target: Any = node.target
        if isinstance(target, OpOverload):
            target = Overload(schema_of(target).name, overload_name(target))
        args, kwargs = (map_aggregate(value, plain) for value in (node.args, node.kwargs))
        return NodeRecord(node.op, node.name, target, args, kwargs, node.meta.get("value"))

    return tuple(row(node) for node in graph.nodes)


def graph_of(rows: Sequence[NodeRecord]) -> fx.Graph:
    """A graph with the nodes of `rows`. Raises AttributeError if an op of another library is not
    registered: import that library first."""
    graph, nodes = fx.Graph(), {}

    def resolved(leaf: Any) -> Any:
        return nodes[leaf.name] if isinstance(leaf, NodeReference) else leaf

    for row in rows:
        target = _named_op(row.target) if isinstance(row.target, Overload) else row.target
        args, kwargs = (map_aggregate(value, resolved) for value in (row.args, row.kwargs))
        node = graph.create_node(row.op, target, args, kwargs, name=row.name)
        node.name = row.name  # torch.fx adds numbers to names of builtins
        nodes[row.name] = node
        if row.value is not None:
            node.meta["value"] = row.value
    return graph


def _named_op(overload: Overload) -> OpOverload:
    """The op with these names; a custom op's module is imported."""
    namespace, _, name = overload.name.partition("::")
    if namespace == "demask":
        is_custom_op(name)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload.overload)
