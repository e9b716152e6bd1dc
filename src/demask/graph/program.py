"""A captured network: a graph of ATen ops, its constant tensors, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from demask.graph.provenance import Interface


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor the graph reads by `get_attr`: its value, its fully qualified name in the model,
    whether it is a parameter (else a buffer), and whether it was persistent there. aliases: all
    its names there, in the model's order, where it had several (tied weights). declared: bool,
    of its shape: where a 0 says that the weight was removed; None: wherever there is a 0."""

    tensor: Tensor
    name: str
    parameter: bool
    requires_grad: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    declared: Tensor | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Constant:
        """The constant with its numbers cut or moved, and what was declared of them alike."""
        declared = None if self.declared is None else move(self.declared)
        return replace(self, tensor=move(self.tensor), declared=declared)


@dataclass(frozen=True, slots=True)
class Program:
    """One call of a network, captured in eval mode.

    graph: placeholders are the flattened inputs, `get_attr` targets are keys of `constants`, the
    output is a flat tuple; every node that makes a tensor has meta["val"]. in_spec, out_spec: the
    pytrees of the call and of what it returns. names: the argument names of forward. notes: what
    the user should know of the capture. training: the model's flag. guards: what
    must hold of the dynamic sizes. interface: of the ONNX file that the network came from.
    """

    graph: fx.Graph
    constants: Mapping[str, Constant]
    in_spec: Any
    out_spec: Any
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    training: bool = False
    guards: tuple[str, ...] = ()
    interface: Interface | None = None

    @property
    def trained(self) -> dict[str, Tensor | None]:
        """The parameters, and where a 0 of theirs says that it was removed (None: everywhere)."""
        return {name: c.declared for name, c in self.constants.items() if c.parameter}

    def with_graph(
        self, graph: fx.Graph, constants: Mapping[str, Constant] | None = None
    ) -> Program:
        """The same call with another graph (and other constants)."""
        return replace(
            self, graph=graph, constants=self.constants if constants is None else constants
        )


def module_of(node: fx.Node) -> str:
    """The fully qualified name of the module whose code contains a call."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def copy_graph(program: Program) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the program's graph, and the copy of each node."""
    graph, mapping = fx.Graph(), {}
    result: Any = graph.graph_copy(program.graph, mapping, return_output_node=True)
    value, old = result
    mapping[old] = graph.output(value)
    mapping[old].meta.update(old.meta)
    return graph, mapping


def owned(program: Program, of: Iterable[Constant] | None = None) -> Program:
    """The program with tensors of its own; tied ones stay tied. of: copy those alone that share
    memory with these constants."""
    shared = None if of is None else {c.tensor.untyped_storage().data_ptr() for c in of}
    clones: dict[Any, Tensor] = {}
    constants = {}
    for name, constant in program.constants.items():
        tensor = constant.tensor
        if shared is None or tensor.untyped_storage().data_ptr() in shared:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            constant = replace(constant, tensor=clones.setdefault(key, tensor.clone()))
        constants[name] = constant
    return program.with_graph(program.graph, constants)
