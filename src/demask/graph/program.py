"""Programs: a captured network as a graph of ATen ops, constant tensors and a call signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from demask.graph.input_domains import Domain
from demask.graph.provenance import Interface
from demask.graph.queries import ExampleSizes


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that the graph reads by `get_attr`.

    tensor: its value. name: its fully qualified name in the model. parameter: whether it is a
    parameter (else a buffer); persistent: whether it is in the state dict. aliases: all its names
    in the model, in the model's order, if it has several (tied weights). declared: bool of its
    shape, True where zeros are removed weights; None: all zeros are.
    """

    tensor: Tensor
    name: str
    parameter: bool
    requires_grad: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    declared: Tensor | None = None

    @property
    def trains(self) -> bool:
        """Whether training may change it: a parameter, but not quantized weights of a file."""
        return self.parameter and (self.tensor.is_floating_point() or self.tensor.is_complex())

    def moved(self, move: Callable[[Tensor], Tensor]) -> Constant:
        """The constant with `move` applied to its tensor and to `declared`."""
        declared = None if self.declared is None else move(self.declared)
        return replace(self, tensor=move(self.tensor), declared=declared)


@dataclass(frozen=True, slots=True)
class Program:
    """One call of a network, captured in eval mode.

    graph: placeholders are the flattened inputs, `get_attr` targets are keys of `constants`, the
    output is a flat tuple; every node with a tensor value has meta["val"]. in_spec, out_spec: the
    pytrees of arguments and outputs. names: the argument names of forward. notes: remarks on the
    capture for the user. training: the model's flag. guards: conditions on dynamic sizes, as
    Python. interface: of the ONNX file that the network was read from. example: the dynamic sizes
    of the example inputs. written: the inputs that a call writes to; the last outputs are their
    values after it, and `out_spec` is of the outputs before these. domains: the values that inputs
    may have, by name, other than any numbers.
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
    example: ExampleSizes = field(default_factory=ExampleSizes)
    written: tuple[str, ...] = ()
    domains: Mapping[str, Domain] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, Tensor | None]:
        """By parameter that trains, where its zeros are removed weights; None: everywhere."""
        return {name: c.declared for name, c in self.constants.items() if c.trains}

    def with_graph(self, graph: fx.Graph, constants: Mapping[str, Constant] | None = None) -> Program:
        """The same call signature with another graph (and other constants)."""
        return replace(self, graph=graph, constants=self.constants if constants is None else constants)


def module_of(node: fx.Node) -> str:
    """The fully qualified name of the module whose code contains a call."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def path_of(node: fx.Node) -> str:
    """The path of the module whose code contains a call, for all calls of that module."""
    return module_of(node).partition("@")[0]


def copy_graph(program: Program) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the program's graph, and the copy of each node."""
    graph, mapping = fx.Graph(), {}
    output: Any = graph.graph_copy(program.graph, mapping, return_output_node=True)
    value, old = output
    mapping[old] = graph.output(value)
    mapping[old].meta.update(old.meta)
    return graph, mapping


def copy_tensors(program: Program, of: Iterable[Constant] | None = None) -> Program:
    """The program with copies of its tensors; tied tensors remain tied. of: copy only tensors that
    share memory with these constants, or with one another without being tied."""
    taken = None if of is None else {c.tensor.untyped_storage().data_ptr() for c in of}
    own: dict[Any, Tensor] = {}
    constants = {}
    for name, constant in program.constants.items():
        tensor = constant.tensor
        memory = tensor.data_ptr() or id(tensor)  # empty tensors have none
        key = (memory, tensor.dtype, tensor.shape, tensor.stride())
        if key not in own:
            storage = tensor.untyped_storage().data_ptr()
            own[key] = tensor.clone() if taken is None or storage in taken else tensor
            if taken is not None:
                taken.add(storage)
        constants[name] = replace(constant, tensor=own[key])
    return program.with_graph(program.graph, constants)
