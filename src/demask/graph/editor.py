"""Edits to the graph of a program; every node that is added has a fake value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.fake_values import FakeValues, mode_of
from demask.graph.program import Constant, Program, copy_graph
from demask.ops import schema
from demask.ops.traits import VIEWS

aten = torch.ops.aten


class GraphEditor:
    """Edits a copy of a program's graph; `finish` returns the program of that copy.

    A call gets its value (meta["val"]) from a template node, so that no op without a fake kernel is
    run, or from a run on the fake values of its operands. Methods called `call...`, `sizes` and
    `read_constant` add at the graph's insertion point (`graph.inserting_before`), the others before
    the node that will read what they add.

    copies: the copy of each node of the program. constants: those that the graph may read, by name.
    origin: the node that new calls replace, in whose module they are; None if unknown.
    """

    def __init__(self, program: Program, graph: fx.Graph | None = None):
        """graph: edited in place of a copy of the program's."""
        self.program = program
        self.graph, self.copies = copy_graph(program) if graph is None else (graph, {})
        self.constants: dict[str, Constant] = dict(program.constants) if graph is None else {}
        self.values = FakeValues.of(mode_of(program.graph))
        self.origin: fx.Node | None = None

    @classmethod
    def empty(cls, program: Program) -> GraphEditor:
        """Appends to a new graph, without constants, that is called as the program is."""
        return cls(program, fx.Graph())

    @classmethod
    def in_place(cls, graph: fx.Graph) -> GraphEditor:
        """Edits a graph that belongs to no program."""
        return cls(Program(graph, {}, None, None, ()), graph)

    # ------------------------------------------------------------------- at the insertion point

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`; operands may be nodes, numbers, lists of both. A view of what is not
        dense, which may be refused, is a reshape."""
        if target in VIEWS and not self.values.is_contiguous(args[0].meta["val"]):
            target = aten.reshape.default
        node = self._append(target, args, kwargs)
        self.set_value(node)
        return node

    def call_for(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call in place of `node`: with its metadata, but a value of its own."""
        call = self.call(target, *args, **kwargs)
        call.meta = {**node.meta, **call.meta}
        return call

    def call_named(
        self, target: Any, arguments: Mapping[str, Any], node: fx.Node | None = None
    ) -> fx.Node:
        """A call with its arguments by name; node: the one in whose place it is, if any."""
        args, kwargs = schema.call(target, arguments)
        if node is None:
            return self.call(target, *args, **kwargs)
        return self.call_for(node, target, *args, **kwargs)

    def call_shaped(
        self, shape: Any, like: fx.Node, target: Any, args: Any, kwargs: Any
    ) -> fx.Node:
        """A call whose result is known to be dense, of a shape and of the dtype of its operand
        `like`: a run on fake values would compute sums of symbols for it."""
        value = like.meta["val"]
        if not self.values.is_contiguous(value):
            return self.call(target, *args, **kwargs)
        node = self._append(target, tuple(args), kwargs)
        same = len(shape) == value.ndim and all(map(schema.same_size, shape, value.shape))
        node.meta["val"] = value if same else self.values.dense(shape, value)
        return node

    def _append(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if self.origin is not None and "nn_module_stack" in self.origin.meta:
            node.meta["nn_module_stack"] = self.origin.meta["nn_module_stack"]
        return node

    def set_value(self, node: fx.Node) -> None:
        """Set the fake value of a call."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = self.values.call(node, args, kwargs)

    def read_constant(self, name: str) -> fx.Node:
        """A node that reads a constant."""
        read = self.graph.create_node("get_attr", name)
        read.meta = {"val": self.values.like(self.constants[name].tensor)}
        return read

    def sizes(self, node: Any) -> list[Any]:
        """The sizes of a node's value as call arguments: numbers, or nodes that read them."""
        return [
            size if isinstance(size, int) else self.call(aten.sym_size.int, node, axis)
            for axis, size in enumerate(node.meta["val"].shape)
        ]

    # ------------------------------------------------------------------------- before a reader

    def insert(
        self, reader: fx.Node, like: fx.Node | None, target: Any, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """A call before `reader`, with the metadata of `like`, value included (None: the value of a
        run on fake operands)."""
        with self.graph.inserting_before(reader):
            if like is None:
                return self.call(target, *args, **kwargs)
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "effect"}
        return node

    def repeat_call(
        self, node: fx.Node, reader: fx.Node | None = None, /, **changed: Any
    ) -> fx.Node:
        """The call `node` before `reader` (itself), with some arguments changed."""
        args, kwargs = schema.call(node.target, schema.arguments(node) | changed)
        return self.insert(reader or node, node, node.target, *args, **kwargs)

    def replace(self, node: fx.Node, value: Any, *, inherit: bool = False) -> None:
        """Let `value` be read in place of `node`, which is erased. inherit: `value` takes the
        metadata of `node` that it lacks."""
        if inherit:
            value.meta = {**node.meta, **value.meta}
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    # ---------------------------------------------------------------------- constants and calls

    def add_constant(self, name: str, tensor: Tensor, reader: fx.Node, *,
                     parameter: bool = False, separator: str = "_") -> fx.Node:  # fmt: skip
        """Reads a new constant before `reader`: called `name`, or `name` with a number after it."""
        numbered = (f"{name}{separator}{k}" if k else name for k in range(len(self.constants) + 1))
        free = next(one for one in numbered if one not in self.constants)
        self.constants[free] = Constant(tensor.contiguous(), free, parameter)
        with self.graph.inserting_before(reader):
            return self.read_constant(free)

    def replace_constant(self, read: fx.Node, tensor: Tensor, reader: fx.Node) -> fx.Node:
        """Reads `tensor` for `reader` in place of the constant that `read` reads: under its name if
        no other node reads it, else under a new one."""
        constant = self.constants[str(read.target)]
        reads = [n for n in self.graph.nodes if n.op == "get_attr" and n.target == read.target]
        if all(set(n.users) <= {reader} for n in reads):
            self.constants[str(read.target)] = replace(constant, tensor=tensor, aliases=())
            for twin in reads:
                twin.meta = {"val": self.values.like(tensor)}
            return read
        return self.add_constant(constant.name, tensor, reader, parameter=constant.parameter)

    def tensor(self, node: Any) -> Tensor | None:
        """The constant that a node reads, None if it reads none."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return self.constants[str(node.target)].tensor
        return None

    def calls(self, *targets: Any) -> list[fx.Node]:
        """The calls of these ops (of all, if none is named), in order."""
        return [n for n in self.graph.nodes
                if n.op == "call_function" and (not targets or n.target in targets)]  # fmt: skip

    def finish(self) -> Program:
        """The program of the edited graph, without calls and constants that nothing reads."""
        drop_unread(self.graph)
        read = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        constants = {name: c for name, c in self.constants.items() if name in read}
        return self.program.with_graph(self.graph, constants)


def drop_unread(graph: fx.Graph) -> None:
    """Erase every call that nothing reads; inputs stay."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def reshape_views(graph: fx.Graph) -> None:
    """Replace views, which some strides refuse, by reshapes, which copy where they must: values may
    get other strides than where the graph was captured."""
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default
