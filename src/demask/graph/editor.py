"""Editor of a program's graph; every added node has a fake value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.fake_values import FakeValues, mode_of
from demask.graph.program import Constant, Program, copy_graph
from demask.ops import Table, schema
from demask.ops.traits import VIEWS

aten = torch.ops.aten
NO_OPS = Table({})


class GraphEditor:
    """Edits a copy of a program's graph; `finish` returns the program of that copy.

    The value (meta["val"]) of a new call is copied from a template node, since some ops have no
    fake kernel, or computed from the fake values of its operands. The methods `call...`, `sizes`
    and `read_constant` add nodes at the graph's insertion point (`graph.inserting_before`), the
    other methods before the node that reads the new one.

    copies: the copy of each node of the program. constants: those that the graph may read, by name.
    origin: the node that new calls replace, whose module they belong to; None if unknown. table: of
    ops, for what is derived from relations.
    """

    def __init__(self, program: Program, graph: fx.Graph | None = None, table: Table = NO_OPS):
        """graph: the graph to edit; None: a copy of the program's graph."""
        self.program, self.table = program, table
        self.graph, self.copies = copy_graph(program) if graph is None else (graph, {})
        self.constants: dict[str, Constant] = dict(program.constants) if graph is None else {}
        self.origin: fx.Node | None = None

    @cached_property
    def values(self) -> FakeValues:
        """The fake values of the program. Computed when first read: a new mode imports
        torch's compiler, which takes a second."""
        return FakeValues.of(mode_of(self.program.graph))

    @classmethod
    def empty(cls, program: Program) -> GraphEditor:
        """An editor of a new, empty graph without constants, with the program's call signature."""
        return cls(program, fx.Graph())

    @classmethod
    def in_place(cls, graph: fx.Graph) -> GraphEditor:
        """An editor of a graph that belongs to no program."""
        return cls(Program(graph, {}, None, None, ()), graph)

    # ------------------------------------------------------------------- at the insertion point

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call of `target`; operands may be nodes, numbers, and lists of both. A view of a
        tensor that is not dense, which torch may refuse, becomes a reshape."""
        if target in VIEWS and not self.values.is_contiguous(args[0].meta["val"]):
            target = aten.reshape.default
        node = self._append(target, args, kwargs)
        self.set_value(node)
        return node

    def call_for(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call with the metadata of `node`, but a value of its own."""
        call = self.call(target, *args, **kwargs)
        call.meta = {**node.meta, **call.meta}
        return call

    def call_named(self, target: Any, arguments: Mapping[str, Any], node: fx.Node | None = None) -> fx.Node:
        """A new call with its arguments by name; node: the node whose metadata it gets, or None."""
        args, kwargs = schema.bind_arguments(target, arguments)
        if node is None:
            return self.call(target, *args, **kwargs)
        return self.call_for(node, target, *args, **kwargs)

    def call_shaped(self, shape: Any, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A new call whose output is dense, of a shape and of the dtype of its operand `like`:
        cheaper than a run on fake values, which computes with symbols."""
        value = like.meta["val"]
        if not self.values.is_contiguous(value):
            return self.call(target, *args, **kwargs)
        node = self._append(target, tuple(args), kwargs)
        is_same_shape = len(shape) == value.ndim and all(map(schema.same_size, shape, value.shape))
        node.meta["val"] = value if is_same_shape else self.values.dense(shape, value)
        return node

    def _append(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A new call without a value, in the module of `origin`."""
        node = self.graph.call_function(target, args, kwargs)
        if self.origin is not None and "nn_module_stack" in self.origin.meta:
            node.meta["nn_module_stack"] = self.origin.meta["nn_module_stack"]
        return node

    def set_value(self, node: fx.Node) -> None:
        """Compute the fake value of a call and store it in meta["val"]."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = self.values.call(node, args, kwargs)

    def read_constant(self, name: str) -> fx.Node:
        """A new node that reads a constant."""
        read = self.graph.create_node("get_attr", name)
        read.meta = {"val": self.values.like(self.constants[name].tensor)}
        return read

    def constant(self, name: str, tensor: Tensor, *, parameter: bool = False, separator: str = "_") -> fx.Node:
        """A new node that reads a new constant, named `name`, with a number if taken."""
        numbered = (f"{name}{separator}{k}" if k else name for k in range(len(self.constants) + 1))
        unused = next(candidate for candidate in numbered if candidate not in self.constants)
        self.constants[unused] = Constant(tensor.contiguous(), unused, parameter)
        return self.read_constant(unused)

    def sizes(self, node: Any) -> list[Any]:
        """The sizes of a node's value as call arguments: numbers, or nodes that read them."""
        return [
            size if isinstance(size, int) else self.call(aten.sym_size.int, node, axis)
            for axis, size in enumerate(node.meta["val"].shape)
        ]

    # ------------------------------------------------------------------------- before a reader

    def insert(self, reader: fx.Node, like: fx.Node | None, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call before `reader`, with the metadata of `like`, including its value; for None,
        the value is computed from the fake operands."""
        with self.graph.inserting_before(reader):
            if like is None:
                return self.call(target, *args, **kwargs)
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "effect"}
        return node

    def repeat_call(self, node: fx.Node, reader: fx.Node | None = None, /, **changed: Any) -> fx.Node:
        """A copy of the call `node` with some arguments changed, before `reader` (default: before
        `node`)."""
        args, kwargs = schema.bind_arguments(node.target, schema.arguments(node) | changed)
        return self.insert(reader or node, node, node.target, *args, **kwargs)

    def replace(self, node: fx.Node, value: Any, *, inherit: bool = False) -> None:
        """Let readers of `node` read `value`, and erase `node`. inherit: `value` gets the metadata
        of `node` that it lacks."""
        if inherit:
            value.meta = {**node.meta, **value.meta}
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    # ---------------------------------------------------------------------- constants and calls

    def add_constant(
        self, name: str, tensor: Tensor, reader: fx.Node, *, parameter: bool = False, separator: str = "_"
    ) -> fx.Node:
        """A node before `reader` that reads a new constant, named `name`, with a number if
        taken."""
        with self.graph.inserting_before(reader):
            return self.constant(name, tensor, parameter=parameter, separator=separator)

    def replace_constant(self, read: fx.Node, tensor: Tensor, reader: fx.Node) -> fx.Node:
        """A node that reads `tensor` for `reader` in place of the constant that `read` reads. The
        constant is replaced if no other node reads it; else there is a new one."""
        constant = self.constants[str(read.target)]
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == read.target]
        if all(set(n.users) <= {reader} for n in reads):
            self.constants[str(read.target)] = replace(constant, tensor=tensor, aliases=())
            for twin in reads:
                twin.meta = {"val": self.values.like(tensor)}
            return read
        return self.add_constant(constant.name, tensor, reader, parameter=constant.parameter)

    def tensor(self, node: Any) -> Tensor | None:
        """The tensor of the constant that a node reads; None if it reads none."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.constants[str(node.target)].tensor
        return None

    def calls(self, *targets: Any) -> list[fx.Node]:
        """The calls of these ops (of all ops for no argument), in graph order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]

    def finish(self) -> Program:
        """The program of the edited graph, without calls and constants that nothing reads."""
        drop_unread(self.graph)
        read = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        constants = {name: c for name, c in self.constants.items() if name in read}
        return self.program.with_graph(self.graph, constants)


def drop_unread(graph: fx.Graph) -> None:
    """Erase every node that nothing reads, except for inputs and calls with effects."""
    for node in reversed(list(graph.nodes)):
        stays = node.users or node.op in ("placeholder", "output")
        if not stays and not schema.has_effect(node):
            graph.erase_node(node)


def reshape_views(graph: fx.Graph) -> None:
    """Replace views, which fail for some strides, by reshapes, which copy if necessary: values may
    have other strides than at capture."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
