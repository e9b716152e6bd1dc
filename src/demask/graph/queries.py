"""Queries of graphs: readers, input-dependent nodes, sizes of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.fake_tensors import FakeTensor
from demask.ops import Table, op_name, schema
from demask.ops.schema import fake, same_size

aten = torch.ops.aten
POINTWISE = ("... -> ...", "..., ... -> ...", "..., ..., ... -> ...")
COPY = aten.clone.default  # a copy that later calls overwrite
# Calls that read the sizes of their operand, never its values.
_SIZES = ("new_", "sym_size", "sym_numel", "sym_stride")


def has_shape(node: fx.Node, shape: Sequence[Any]) -> bool:
    """Whether a value is a tensor of this shape."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != len(shape):
        return False
    return all(map(same_size, value.shape, shape))


def input_dependent(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value depends on the values of inputs, not only on their sizes. The others
    are computed once per tuple of sizes: border maps, side networks, tables of positions. COPY
    calls count as input-dependent, since later calls overwrite the copies.
    """
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        sizes_only = name.startswith(_SIZES) or "_like." in name
        tags = getattr(node.target, "tags", ())
        operand = node.args[0] if sizes_only and node.args else None  # only its sizes are read
        reads_dependent = any(source in dependent for source in node.all_input_nodes if source is not operand)
        is_dependent = node.op in ("placeholder", "output") or node.target is COPY
        is_dependent = is_dependent or torch.Tag.nondeterministic_seeded in tags
        if is_dependent or (node.op.startswith("call_") and reads_dependent):
            dependent.add(node)
    return dependent


def only_reader(node: fx.Node) -> fx.Node | None:
    """The only reader of a node; None if there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_pointwise(node: fx.Node, table: Table) -> bool:
    """Whether the table states that a call is pointwise; changes of strides are not."""
    entry = table.get(op_name(node.target)) if node.op == "call_function" else None
    moves = node.target is aten.contiguous.default
    return entry is not None and entry.line in POINTWISE and not moves


def channels_of(node: fx.Node, axis: int) -> int | None:
    """The size of one axis; None if it is dynamic or does not exist."""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.ndim <= axis:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def per_channel(tensor: Tensor, rank: int, axis: int, count: int) -> Tensor | None:
    """A constant that broadcasts along all axes but one, as a vector (count,); else None."""
    shape = (1,) * (rank - tensor.ndim) + tuple(tensor.shape)
    if len(shape) != rank or any(n != 1 for k, n in enumerate(shape) if k != axis):
        return None
    return tensor.reshape(-1).expand(count) if shape[axis] in (1, count) else None


@dataclass(frozen=True, slots=True)
class ExampleSizes:
    """The dynamic sizes of the example inputs, by symbol. torch.export may have used other sizes: a
    batch of one is captured as two. Symbols that are absent have their captured sizes."""

    sizes: Mapping[Any, int] = field(default_factory=dict)
    known: dict[Any, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # by expression

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[Any]) -> ExampleSizes:
        """The sizes of inputs, the values of the graph's placeholders; the captured sizes for
        another number of inputs, as of an exported program that is passed without any."""
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        sizes = {}
        for node, value in zip(nodes, inputs, strict=True) if len(nodes) == len(inputs) else ():
            expected = getattr(node.meta.get("val"), "shape", ())
            for size, real in zip(expected, getattr(value, "shape", ()), strict=False):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    sizes[size.node.expr] = int(real)
        return cls(sizes)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a node's value for the example inputs."""
        return tuple(map(self.size, fake(node).shape))

    def size(self, size: Any) -> int:
        """A size as a number; dynamic sizes have their values in the example inputs."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self.known:
            value = expression.subs(self.sizes)
            self.known[expression] = int(value) if value.is_Integer else schema.example_size(size)
        return self.known[expression]
