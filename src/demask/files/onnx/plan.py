"""Execution plans of ONNX graphs: nodes with their entries, constants, values freed per step."""

from __future__ import annotations

import itertools
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.files.onnx.model import AttributeReference, Graph, OnnxFile, OnnxNode
from demask.files.onnx.op_functions import OnnxEntry
from demask.files.onnx.ops import ENTRIES
from demask.files.onnx.quantized_weights import grids_of
from demask.files.onnx.values import MAX_HOST, NUMPY, Host
from demask.graph.provenance import OnnxPort, QuantizationGrid

FEW = 16  # elements of a stored float constant that arithmetic on sizes may use (Resize's scales)
MAX_NODES = 1_000_000  # after functions of the file are inlined
MAX_MODULES = 50_000
MAX_PATH = 16  # nested modules that a dotted name creates
# Ops by their operands that are weights or biases in integers.
QUANTIZED = {
    "DequantizeLinear": (0,),
    "QLinearConv": (3, 8),
    "QLinearMatMul": (0, 3),
    "MatMulInteger": (0, 1),
    "ConvInteger": (0, 1),
}
EntryOf = Callable[[OnnxNode], OnnxEntry]
_TAKEN = frozenset(dir(nn.Module())) | {"plan", "interface", "recordings"}  # OnnxModule's


@dataclass(frozen=True, slots=True)
class OnnxStep:
    """One node, with plans in place of graphs in its attributes. version: of its op set. drops:
    names that no later step reads."""

    node: OnnxNode
    entry: OnnxEntry
    version: int
    drops: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the name of its entry, because the entry's functions may be lambdas."""
        return _read_step, (self.node, self.entry.domain, self.entry.name, self.version, self.drops)


def _read_step(node: OnnxNode, domain: str, name: str, version: int, drops: tuple[str, ...]) -> OnnxStep:
    return OnnxStep(node, ENTRIES[domain, name], version, drops)


@dataclass(frozen=True, slots=True)
class OnnxPlan:
    """A graph that can run. constants: the value of each constant, or its name in the module."""

    steps: tuple[OnnxStep, ...]
    constants: Mapping[str, Host | str]  # str: name of a tensor of the module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ports: tuple[OnnxPort, ...] = ()  # outputs as the file declares them


def _may_be_weights(constant: Tensor | Host) -> bool:
    return isinstance(constant, Tensor) and constant.is_floating_point() and constant.numel() > FEW


class OnnxPlanner:
    """Builds the plan of a file, and collects the tensors of its module.

    tensors: by their names in the module. stored: those of them that are buffers, not parameters.
    grids: of those that are quantized. entry_of: the function of a node. Default: that of the table
    `ENTRIES`; BadInput for ops that it lacks.
    """

    def __init__(self, file: OnnxFile, entry_of: EntryOf | None = None):
        self.file = file
        self.entry_of = entry_of or _entry_of_table
        self.checked = entry_of is None
        self.tensors: dict[str, Tensor] = {}
        self.stored: set[str] = set()
        self.grids: dict[str, QuantizationGrid] = {}
        self.modules: set[str] = set()
        self.fresh = itertools.count()
        self.nodes = 0

    def plan(self, graph: Graph | None = None, opsets: Mapping[str, int] | None = None) -> OnnxPlan:
        """The plan of a graph, by default the file's."""
        graph = self.file.graph if graph is None else graph
        opsets = self.file.opsets if opsets is None else opsets
        inlined = [n for node in graph.nodes for n in self._inline(node, opsets)]
        nodes = [(node, opsets) for node, opsets in inlined if node.op != "Constant"]
        if self.checked:
            _check_known([n for n, _ in nodes])
        constants = dict(graph.constants)
        constants |= {n.outputs[0]: _constant_value(n) for n, _ in inlined if n.op == "Constant"}
        stored = {n.inputs[k] for n, _ in nodes for k in self.entry_of(n).stored if k < len(n.inputs)}
        literals = set(constants) - set(graph.constants)
        if not any(map(_may_be_weights, self.file.graph.constants.values())):  # some exporters write nodes alone
            literals = {name for name in literals if not _may_be_weights(constants[name])}
        stored |= literals
        quantized = {n.inputs[k] for n, _ in nodes for k in QUANTIZED.get(n.op, ()) if k < len(n.inputs)}
        known = {name: self._add_constant(name, t, name in stored, name in quantized) for name, t in constants.items()}
        for name, grid in grids_of((n for n, _ in nodes), constants).items():
            constant = known[name]
            self.grids[str(constant.tensor_name if isinstance(constant, Host) else constant)] = grid
        steps = [self._step(n, opsets) for n, opsets in nodes]
        outputs = tuple(port.name for port in graph.outputs)
        inputs = tuple(port.name for port in graph.inputs)
        _check_distinct([*inputs, *constants, *(o for n, _ in nodes for o in n.outputs if o)])
        return OnnxPlan(tuple(_with_dropped_names(steps, outputs)), known, inputs, outputs, graph.outputs)

    def _add_constant(self, name: str, tensor: Tensor | Host, stored: bool, quantized: bool) -> Host | str:
        """The value of a constant while the graph runs; adds its tensor to the module's."""
        if isinstance(tensor, Host):
            return tensor
        path = _module_path(name)
        if len(self.modules) > MAX_MODULES:
            path = path.replace(".", "_")
        while path in self.modules or any(part in self.tensors for part in (path, *_parent_paths(path))):
            path = f"{_module_path(name).replace('.', '_')}_{next(self.fresh)}"  # not in a submodule
        self.tensors[path] = tensor
        self.modules.update(_parent_paths(path))
        is_parameter = quantized or (tensor.is_floating_point() and not stored)
        if not is_parameter or not tensor.ndim:
            self.stored.add(path)
        if tensor.dtype not in NUMPY or tensor.numel() > MAX_HOST:
            return path
        is_few = stored and tensor.numel() <= FEW
        is_weight = tensor.is_floating_point() and tensor.ndim > 0 and not is_few
        return Host(tensor.numpy().copy(), tensor.dtype, path, folds=not is_weight)

    def _step(self, node: OnnxNode, opsets: Mapping[str, int]) -> OnnxStep:
        attributes = {
            k: self.plan(v, opsets) if isinstance(v, Graph) else _as_host(v) for k, v in node.attributes.items()
        }
        version = opsets.get(node.domain, self.file.opsets.get(node.domain, 1))
        return OnnxStep(replace(node, attributes=attributes), self.entry_of(node), version, ())

    def _inline(self, node: OnnxNode, opsets: Mapping[str, int]) -> Iterator[tuple[OnnxNode, Mapping[str, int]]]:
        """The node, or the nodes of the function that the file defines for its op."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise BadInput(f"{node}: the file's functions expand to over {MAX_NODES} nodes")
        function = self.file.functions.get((node.domain, node.op))
        if function is None:
            yield node, opsets
            return
        prefix = f"{(node.name or node.op)[-100:]}_{next(self.fresh)}."
        names = ChainMap(dict(zip(function.inputs, node.inputs, strict=False)))
        names |= dict.fromkeys(function.inputs[len(node.inputs) :], "")
        names |= {o: n for o, n in zip(function.outputs, node.outputs, strict=False) if n}
        attributes = {k: v for k, v in {**function.attributes, **node.attributes}.items() if v is not ...}
        inner_opsets = {**opsets, **function.opsets}
        for inner in function.nodes:
            yield from self._inline(_at_call(inner, names, prefix, attributes), inner_opsets)


def _as_host(value: Any) -> Any:
    """An attribute, a small tensor as `Host`: `torch.export` does not read values of tensors."""
    if not isinstance(value, Tensor) or value.dtype not in NUMPY or value.numel() > MAX_HOST:
        return value
    return Host.of(value.numpy().copy())


def _at_call(node: OnnxNode, names: ChainMap[str, str], prefix: str, arguments: Mapping[str, Any]) -> OnnxNode:
    """A node of a function's body at a call: with the names and attributes of that call.

    names: values by their names in the body. arguments: attributes of the call.
    """

    def name(old: str) -> str:
        return names.setdefault(old, prefix + old) if old else ""

    attributes = {}
    for key, value in node.attributes.items():
        if isinstance(value, AttributeReference):
            if value.name in arguments:
                attributes[key] = arguments[value.name]
        elif isinstance(value, Graph):
            attributes[key] = _graph_at_call(value, names.new_child(), prefix, arguments)
        else:
            attributes[key] = value
    return OnnxNode(
        node.op,
        node.domain,
        prefix + node.name,
        tuple(map(name, node.inputs)),
        tuple(map(name, node.outputs)),
        attributes,
    )


def _graph_at_call(graph: Graph, names: ChainMap[str, str], prefix: str, arguments: Mapping[str, Any]) -> Graph:
    for port in graph.inputs:
        names[port.name] = prefix + port.name
    constants = {names.setdefault(k, prefix + k): v for k, v in graph.constants.items()}
    inputs = tuple(replace(port, name=names[port.name]) for port in graph.inputs)
    nodes = tuple(_at_call(node, names, prefix, arguments) for node in graph.nodes)
    outputs = tuple(replace(p, name=names.get(p.name, prefix + p.name)) for p in graph.outputs)
    return Graph(graph.name, nodes, constants, inputs, outputs)


def _entry_of_table(node: OnnxNode) -> OnnxEntry:
    return ENTRIES[node.domain, node.op]


def _check_known(nodes: list[OnnxNode]) -> None:
    """Raise BadInput for ops that demask has no function for."""
    missing = Counter(n.op if not n.domain else f"{n.domain}.{n.op}" for n in nodes if (n.domain, n.op) not in ENTRIES)
    if missing:
        words = ", ".join(f"{op} ({count})" for op, count in missing.most_common(20))
        first = next(n for n in nodes if (n.domain, n.op) not in ENTRIES)
        raise BadInput(f"demask has no function for these ONNX ops: {words}; first: {first}")


def _check_distinct(names: list[str]) -> None:
    """Raise BadInput if two values have one name after functions are inlined."""
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise BadInput(f"two values named {twice!r}; expected unique names")


_KINDS = {"value_float": float, "value_int": int, "value_string": str}


def _constant_value(node: OnnxNode) -> Tensor | Host:
    """The value of a Constant node."""
    if not node.attributes:
        raise BadInput(f"{node}: expected one attribute, got none")
    key, value = next(iter(node.attributes.items()))
    if key in ("value", "sparse_value") and isinstance(value, Tensor | Host):
        return value
    kind = _KINDS.get(key.removesuffix("s"))
    items = value if key.endswith("s") and isinstance(value, tuple) else (value,)
    if kind is None or not all(type(item) is kind for item in items):
        raise BadInput(f"{node}: expected a value, got {key!r} of type {type(value).__name__}")
    if kind is str:
        return Host.of(np.array(value, dtype=object))
    return torch.tensor(value, dtype=torch.float32 if kind is float else torch.int64)


def _with_dropped_names(steps: list[OnnxStep], outputs: tuple[str, ...]) -> list[OnnxStep]:
    """The steps, each with the names that no later step reads."""
    read_later, reversed_steps = set(outputs), []
    for step in reversed(steps):
        names = {name for name in (*_names_read_by(step), *step.node.outputs) if name}
        reversed_steps.append(replace(step, drops=tuple(sorted(names - read_later))))
        read_later |= names
    return reversed_steps[::-1]


def _names_read_by(step: OnnxStep) -> Iterator[str]:
    yield from step.node.inputs
    for plan in step.node.attributes.values():
        if isinstance(plan, OnnxPlan):
            yield from plan.outputs
            for inner in plan.steps:
                yield from _names_read_by(inner)


def _module_path(name: str) -> str:
    """A name that torch's modules accept: dotted parts, no part an attribute of `nn.Module`."""
    parts = [
        "".join(c if c.isalnum() or c in "_ -+:/@#" else "_" for c in part)[:200] for part in name.split(".", MAX_PATH)
    ]
    parts = [f"p{part}" if part.startswith("__") else part for part in parts]
    return ".".join(f"{p}_" if not p or p in _TAKEN else p for p in parts)


def _parent_paths(path: str) -> Iterator[str]:
    """The paths of the modules that contain a tensor of this name."""
    parts = path.split(".")
    return (".".join(parts[:k]) for k in range(1, len(parts)))
