"""Questions about the nodes of a graph: readers, input-dependent nodes, sizes of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.fake_tensors import FakeTensor
from demask.ops import Table, op_name, schema

aten = torch.ops.aten
POINTWISE = ("... -> ...", "..., ... -> ...", "..., ..., ... -> ...")
COPY = aten.clone.default  # memory of its own, to be written over
# Calls that read the sizes of their operand, never its values.
_SIZES = ("new_", "sym_size", "sym_numel", "sym_stride")


def input_dependent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value depends on the values of inputs, not on their sizes alone. The others
    need to be computed once per tuple of sizes: border maps, side networks, tables of positions.
    A copy that is written over is made in every call.
    """
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        sizes_only = name.startswith(_SIZES) or "_like." in name
        tags = getattr(node.target, "tags", ())
        operand = node.args[0] if sizes_only and node.args else None  # of it the sizes are read
        reads = any(source in dependent for source in node.all_input_nodes if source is not operand)
        again = node.op in ("placeholder", "output") or node.target is COPY
        again = again or torch.Tag.nondeterministic_seeded in tags
        if again or (node.op.startswith("call_") and reads):
            dependent.add(node)
    return dependent


def only_reader(node: fx.Node) -> fx.Node | None:
    """The one node that reads a value, None if there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_pointwise(node: fx.Node, table: Table) -> bool:
    """Whether a call works on each position alone, as the table says; changes of strides do not."""
    entry = table.get(op_name(node.target)) if node.op == "call_function" else None
    moves = node.target is aten.contiguous.default
    return entry is not None and entry.line in POINTWISE and not moves


def channels_of(node: fx.Node, axis: int) -> int | None:
    """The size of one axis, None if it is dynamic or there is none."""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.ndim <= axis:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def per_channel(tensor: Tensor, rank: int, axis: int, count: int) -> Tensor | None:
    """A constant that is broadcast along all axes but one, as a vector (count,); else None."""
    shape = (1,) * (rank - tensor.ndim) + tuple(tensor.shape)
    if len(shape) != rank or any(n != 1 for k, n in enumerate(shape) if k != axis):
        return None
    return tensor.reshape(-1).expand(count) if shape[axis] in (1, count) else None


@dataclass(frozen=True, slots=True)
class ExampleSizes:
    """The dynamic sizes of the example inputs, by their symbols: export may have captured other
    ones (it takes a batch of one for two)."""

    sizes: Mapping[Any, int]

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[Any]) -> ExampleSizes:
        """inputs: the values of the graph's placeholders."""
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        sizes = {}
        for node, value in zip(nodes, inputs, strict=True):
            expected = getattr(node.meta.get("val"), "shape", ())
            for size, real in zip(expected, getattr(value, "shape", ()), strict=False):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    sizes[size.node.expr] = int(real)
        return cls(sizes)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The sizes of a node's value."""
        return tuple(map(self.size, node.meta["val"].shape))

    def size(self, size: Any) -> int:
        """A size as a number: dynamic ones are those of the example inputs."""
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self.sizes)
        return int(value) if value.is_Integer else schema.hint(size)
