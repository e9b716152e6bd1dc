"""The values of an ONNX file by their names: sizes, known elements, and the positions to compute.

The file is captured with every tensor of its graph as an output. So each name has its node in the
program, whatever normalization changes. The program is only analyzed: it is never run or exported.
Ops that demask cannot capture are calls of `demask::opaque`, of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, fx

from demask.errors import DemaskError
from demask.facts.known import key_of, value_of
from demask.files.onnx.edit.foreign import OpaqueOutput, opaque_call
from demask.files.onnx.model import Graph, OnnxFile, OnnxNode
from demask.files.onnx.module import OnnxModule
from demask.files.onnx.op_functions import OnnxEntry
from demask.files.onnx.ops import ENTRIES
from demask.files.onnx.ops.nn.recurrent import KINDS, ZERO_AT_ZERO, direction_activations
from demask.files.onnx.read.topological_order import names_read
from demask.files.onnx.values import Host, Value
from demask.graph.program import Program
from demask.ops import Table
from demask.ops.schema import fake
from demask.shrink.layout.cells import Layout, cut_positions
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.pipeline import canonicalize, programs_of

Size = Any  # an int, or an expression of sympy for a dynamic size
SUPPORTED = ("direction", "hidden_size", "layout")
OpaqueOutputs = Mapping[str, OpaqueOutput]  # by name; without those that are not tensors


@dataclass(frozen=True, slots=True)
class NamedValue:
    """One tensor of a file."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    known: np.ndarray  # where elements are equal for every input; of the tensor's rank, each dimension 1 or full
    fill: np.ndarray  # their values, alike
    layout: Layout | None  # the positions to compute; None where nothing reads the tensor but its known elements

    @classmethod
    def of(cls, analysis: LayoutAnalysis, node: fx.Node, layout: Layout | None) -> Self:
        """The value of a node."""
        fact = analysis.known[key_of(node)]
        value = value_of(node)
        shape = tuple(n if isinstance(n, int) else n.node.expr for n in value.shape)
        if layout is not None:
            layout = tuple(
                None if p is None or not isinstance(n, int) else cut_positions(p, n)
                for p, n in zip(layout, shape, strict=True)
            )
        fill = fact.fill.detach()
        is_exact = not fill.is_floating_point() or fill.dtype == torch.float64
        return cls(shape, value.dtype, fact.known.numpy(), (fill if is_exact else fill.double()).numpy(), layout)


@dataclass(frozen=True, slots=True)
class NamedValues:
    """The tensors of a file's main graph."""

    values: Mapping[str, NamedValue]
    hosts: Mapping[str, np.ndarray]  # numbers that are known without reading a tensor (sizes), ints or symbolic
    opaque: frozenset[str]  # ops that were not captured
    # sizes that the file leaves open, of which all of this is of the example's alone
    static: frozenset[str] = frozenset()


@dataclass(slots=True)
class _CaptureLog:
    """What one capture reads off: the node it is at, and its tensors and sizes by name. Copies of
    the module share it."""

    at: OnnxNode | None = None
    names: list[str] = field(default_factory=list)
    extra_roots: list[Tensor] = field(default_factory=list)
    hosts: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: int = 0

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class NamedModule(OnnxModule):
    """The network of a file that returns its outputs, operands of ops without a tensor output, then
    every tensor of its graph."""

    def __init__(self, file: OnnxFile, opaque: Collection[str], outputs: OpaqueOutputs):

        def capturable(node: OnnxNode) -> OnnxNode:
            if _opaque_name(node) in opaque:
                # Its operands include what its subgraphs read.
                return replace(node, domain="demask", inputs=tuple(names_read(node)), attributes={})
            is_recurrent = not node.domain and node.op in KINDS
            return (supported_layer(node) if is_recurrent else None) or node

        nodes = tuple(map(capturable, file.graph.nodes))
        file = replace(file, graph=replace(file.graph, nodes=nodes))
        self_opaque = {node.outputs for node in nodes if _opaque_name(node) in opaque}

        def entry_of(node: OnnxNode) -> OnnxEntry:
            if node.outputs in self_opaque:
                return OnnxEntry(node.op, node.domain, lambda *a: None)
            return ENTRIES[node.domain, node.op]

        super().__init__(file, entry_of)
        self.log = _CaptureLog()
        self.opaque, self.opaque_outputs = self_opaque, dict(outputs)
        self.tensors = {o for node in nodes for o in node.outputs if o}
        steps = tuple(replace(step, drops=()) for step in self.plan.steps)
        self.plan = replace(self.plan, steps=steps)

    def forward(self, *inputs: Any) -> Any:
        self.log.extra_roots = []
        values = self._values(self.plan, inputs, {})
        names = [*self.plan.inputs, *self.tensors]
        named = {n: values[n] for n in names if isinstance(values.get(n), Tensor)}
        roots = [
            self._tensor(v)
            for v in (values[name] for name in self.plan.outputs)
            if not isinstance(v, Host) or v.dtype is not None
        ]
        roots = [t for root in roots for t in (root if isinstance(root, list) else [root])]
        roots = [t for t in [*roots, *self.log.extra_roots] if isinstance(t, Tensor)]
        if torch.compiler.is_exporting():
            self.log.names, self.log.outputs = list(named), len(roots)
            hosts = {n: v for n, v in values.items() if isinstance(v, Host) and n in self.tensors}
            self.log.hosts.update({n: v.array for n, v in hosts.items()})
        return (*roots, *named.values())

    def _do(self, step: Any, plan: Any, values: dict[str, Value], recorder: Any) -> None:
        if step.node.outputs not in self.opaque:
            if plan is self.plan:
                self.log.at = step.node
            super()._do(step, plan, values, recorder)
            return
        operands = [self._tensor(values[name]) for name in step.node.inputs if name]
        tensors = [t if isinstance(t, Tensor) else torch.zeros(()) for t in operands]
        tensors += [t for v in operands if isinstance(v, list) for t in v if isinstance(t, Tensor)]
        outputs = [self.opaque_outputs.get(name) for name in step.node.outputs]
        present = [output for output in outputs if output is not None]
        if not present:
            self.log.extra_roots += tensors
        results = iter(opaque_call(tensors, present) if present else ())
        for name, output in zip(step.node.outputs, outputs, strict=True):
            values[name] = None if output is None else next(results)


def _opaque_name(node: OnnxNode) -> str:
    """The name by which a node of the main graph is opaque: that of its first output."""
    return next(filter(None, node.outputs), "")


def supported_layer(node: OnnxNode) -> OnnxNode | None:
    """A recurrent layer as one that torch has an op for, which reads as much and of which no more
    is known; None if there is none. It has no lengths of sequences and no peepholes. With other
    activations, units stay 0, too, if these are 0 at 0."""
    names = node.attributes.get("activations")
    count = 2 if node.attributes.get("direction") == "bidirectional" else 1
    values = {n for d in range(count) for n in direction_activations(node.op, names, d)[1]}
    if not values <= ZERO_AT_ZERO:
        return None
    attributes = {k: v for k, v in node.attributes.items() if k in SUPPORTED}
    if node.op == "GRU":
        attributes["linear_before_reset"] = 1
    elif values == {"relu"} and node.op == "RNN":
        attributes["activations"] = ("Relu",) * count
    inputs = ["" if k == 4 else name for k, name in enumerate(node.inputs[:7])]
    return replace(node, inputs=tuple(inputs), attributes=attributes)


def foreign_nodes(file: OnnxFile) -> set[str]:
    """Nodes (by their first output) of ops that demask has no function for, or that hold such."""

    def is_foreign(node: OnnxNode) -> bool:
        graphs = [v for v in node.attributes.values() if isinstance(v, Graph)]
        function = file.functions.get((node.domain, node.op))
        if function is not None:
            return any(map(is_foreign, function.nodes))
        known = (node.domain, node.op) in ENTRIES or node.op == "Constant"
        return not known or any(is_foreign(n) for graph in graphs for n in graph.nodes)

    return {_opaque_name(node) for node in file.graph.nodes if is_foreign(node)}


def name_values(file: OnnxFile, args: Sequence[Tensor], table: Table, outputs: Any) -> NamedValues:
    """Facts and layouts of the tensors of a file.

    Args:
        args: example inputs.
        table: of ATen ops.
        outputs: function from names to the `OpaqueOutput` of those that are tensors.

    Raises:
        NotExportable: the file cannot be captured.
    """
    layers = [n for n in file.graph.nodes if not n.domain and n.op in KINDS]
    opaque = foreign_nodes(file) | {_opaque_name(n) for n in layers if supported_layer(n) is None}
    while True:
        names = [o for n in file.graph.nodes if _opaque_name(n) in opaque for o in n.outputs if o]
        module = NamedModule(file, opaque, outputs(names) if names else {})
        try:
            program = next(programs_of(module, tuple(args), None, None))
            break
        except DemaskError:
            failed = module.log.at
            if failed is None or _opaque_name(failed) in opaque:
                raise
            calls = [n for n in file.graph.nodes if (n.domain, n.op) in file.functions]
            is_inner = not any(n.outputs == failed.outputs for n in file.graph.nodes)
            opaque = opaque | (set(map(_opaque_name, calls)) if is_inner else {_opaque_name(failed)})
    static = _static_sizes(program, file)
    program = canonicalize(program, table)
    result = next(node for node in program.graph.nodes if node.op == "output")
    leaves: Any = result.args[0]
    nodes = dict(zip(module.log.names, leaves[module.log.outputs :], strict=True))
    result.args = (tuple(leaves[: module.log.outputs]),)
    analysis = LayoutAnalysis.of(program, table)
    layouts = analysis.placer.placement().value
    values = {
        name: NamedValue.of(analysis, node, layouts.get(key_of(node)))
        for name, node in nodes.items()
        if isinstance(node, fx.Node)
    }
    return NamedValues(values, module.log.hosts, frozenset(opaque), frozenset(static))


def _static_sizes(program: Program, file: OnnxFile) -> set[str]:
    """The sizes that the file leaves open and that are static in the program, as `longer_inputs`
    names them."""
    inputs, static = list(program.graph.find_nodes(op="placeholder")), set()
    for node, port in zip(inputs, file.graph.inputs, strict=True):
        pairs = zip(fake(node).shape, port.sizes or (), strict=False)
        for axis, (size, name) in enumerate(pairs):
            if isinstance(name, str) and isinstance(size, int):
                static.add(name or f"{port.name}.{axis}")
    return static


def with_sizes(file: OnnxFile, shapes: Mapping[str, Sequence[int]], names: Collection[str]) -> OnnxFile:
    """The file with numbers in place of some of the sizes that it leaves open, from the shapes of
    its inputs."""
    ports = []
    for port in file.graph.inputs:
        sizes = port.sizes
        if sizes is not None:
            pairs = enumerate(zip(sizes, shapes[port.name], strict=True))
            sizes = tuple(size if (n or f"{port.name}.{k}") in names else n for k, (n, size) in pairs)
        ports.append(replace(port, sizes=sizes))
    return replace(file, graph=replace(file.graph, inputs=tuple(ports)))
