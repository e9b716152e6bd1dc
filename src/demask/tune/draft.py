"""A program while it is rewritten for one machine: a copy of its graph, and its constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.fake_tensors import FakeTensor
from demask.graph.build import Builder, mode_of
from demask.graph.fold import drop_unread
from demask.graph.program import Constant, Program, copied
from demask.ops import Table, op_name, schema

aten = torch.ops.aten
POINTWISE = ("... -> ...", "..., ... -> ...", "..., ..., ... -> ...")
COPY = aten.clone.default  # memory of its own, to be written over
# Calls that read the sizes of what they are given, never its values.
_SIZES = ("new_", "sym_size", "sym_numel", "sym_stride")


class Draft:
    """A copy of a program, to be changed in place; `done` gives it back as a program.

    A node put in the place of another takes over its value's shape and dtype (meta["val"]), so
    that no op is run on fake values that has no fake kernel.
    """

    def __init__(self, program: Program):
        self.program = program
        self.graph, _ = copied(program)
        self.constants: dict[str, Constant] = dict(program.constants)
        self.build = Builder(self.graph, mode_of(self.graph))

    def calls(self, *targets: Any) -> list[fx.Node]:
        """The calls of these ops (of all, if none is named), in order."""
        return [n for n in self.graph.nodes
                if n.op == "call_function" and (not targets or n.target in targets)]  # fmt: skip

    def tensor(self, node: Any) -> Tensor | None:
        """The constant that a node reads, None if it is none."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.constants[str(node.target)].tensor
        return None

    def swapped(self, read: fx.Node, tensor: Tensor, reader: fx.Node) -> fx.Node:
        """What `reader` reads in place of the constant that `read` reads: under its name, if nobody
        else reads it, else beside it."""
        constant = self.constants[str(read.target)]
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == read.target]
        if all(set(n.users) <= {reader} for n in reads):
            self.constants[str(read.target)] = replace(constant, tensor=tensor, aliases=())
            for twin in reads:
                twin.meta = {"val": self.build.fake(tensor)}
            return read
        return self.constant(constant.name, tensor, reader, parameter=constant.parameter)

    def constant(
        self, name: str, tensor: Tensor, reader: fx.Node, *, parameter: bool = False
    ) -> fx.Node:
        """A new constant, read before `reader`; under `name`, or `name` with a number."""
        free = next(n for k in range(len(self.constants) + 1)
                    if (n := f"{name}_{k}" if k else name) not in self.constants)  # fmt: skip
        self.constants[free] = Constant(tensor.contiguous(), free, parameter)
        with self.graph.inserting_before(reader):
            read = self.graph.create_node("get_attr", free)
        read.meta = {"val": self.build.fake(tensor)}
        return read

    def call(self, reader: fx.Node, like: fx.Node | None, target: Any, *args: Any,
             **kwargs: Any) -> fx.Node:  # fmt: skip
        """A call before `reader`, whose value has the shape of `like`'s (None: found by running
        it on fake values)."""
        with self.graph.inserting_before(reader):
            if like is None:
                return self.build.call(target, *args, **kwargs)
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "effect"}
        return node

    def again(self, node: fx.Node, reader: fx.Node | None = None, **changed: Any) -> fx.Node:
        """The call `node` before `reader` (itself), with some arguments changed."""
        args, kwargs = schema.call(node.target, schema.arguments(node) | changed)
        return self.call(reader or node, node, node.target, *args, **kwargs)

    def put(self, node: fx.Node, value: fx.Node) -> None:
        """Let `value` be read in place of `node`, which goes."""
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def done(self) -> Program:
        """The program; what nobody reads any more is gone."""
        drop_unread(self.graph)
        read = {n.target for n in self.graph.nodes if n.op == "get_attr"}
        constants = {k: c for k, c in self.constants.items() if k in read}
        return self.program.with_graph(self.graph, constants)


def reshaped(graph: fx.Graph) -> None:
    """Turn views, which some strides refuse, into reshapes, which copy where they must: values may
    come to lie in memory otherwise than where the graph was captured."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def by_values(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value depends on the values of inputs, not on their sizes alone. The others
    need to be computed once per tuple of sizes: border maps, side networks, tables of positions.
    A copy that is made to be written over is made in every call.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        sizes_only = name.startswith(_SIZES) or "_like." in name
        tags = getattr(node.target, "tags", ())
        operand = node.args[0] if sizes_only and node.args else None  # of it the sizes are read
        reads = any(source in found for source in node.all_input_nodes if source is not operand)
        again = node.op in ("placeholder", "output") or node.target is COPY
        again = again or torch.Tag.nondeterministic_seeded in tags
        if again or (node.op.startswith("call_") and reads):
            found.add(node)
    return found


@dataclass(frozen=True, slots=True)
class Example:
    """The dynamic sizes of the example inputs, by their symbols: export may have captured other
    ones (it takes a batch of one for two)."""

    sizes: Mapping[Any, int]

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[Any]) -> Example:
        """inputs: what is given for the placeholders of the graph."""
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        found = {}
        for node, value in zip(nodes, inputs, strict=True):
            expected = getattr(node.meta.get("val"), "shape", ())
            for size, real in zip(expected, getattr(value, "shape", ()), strict=False):
                if not isinstance(size, int) and size.node.expr.is_Symbol:
                    found[size.node.expr] = int(real)
        return cls(found)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The sizes of a node's value."""
        return tuple(map(self.size, node.meta["val"].shape))

    def size(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        value = size.node.expr.subs(self.sizes)
        return int(value) if value.is_Integer else schema.hint(size)


def is_pointwise(node: fx.Node, table: Table) -> bool:
    """Does a call work on each position alone, as the table says? Not those that lay out anew."""
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


def only_reader(node: fx.Node) -> fx.Node | None:
    """The one node that reads a value, None if there are several."""
    return next(iter(node.users)) if len(node.users) == 1 else None
