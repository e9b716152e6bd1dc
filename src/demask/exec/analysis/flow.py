"""A captured network, and how each of its calls can be computed in parts.

There are three kinds of calls. *Cut*: computes rows from rows (`local`). *Gathered*: reduces rows
to one value, each row counted once (`partial_reductions`). *Uncut*: everything else; it reads
and writes full values. A cut call that needs all rows of an operand (keys and values of attention)
waits until all of them are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.exec.analysis.partial_reductions import Reduction, reduction
from demask.exec.analysis.split_global_ops import split_global_calls, with_moments
from demask.exec.axes import Axes, axes_of, full_window, image_axes, length
from demask.exec.device import Device
from demask.exec.local.dispatch import Local, local
from demask.facts.analysis import Analysis
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.program import Program
from demask.ops import Table
from demask.ops.entry import Declined
from demask.ops.regions import Interval
from demask.ops.relation import Relation
from demask.ops.schema import fake
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.shrink.program_size import count_macs

Rule = Callable[[int, int], Interval]  # positions of an output -> those of an operand


@dataclass(frozen=True, slots=True)
class FlowEdge:
    """An operand with rows that a call reads.

    rules: from positions of the output to those of the operand, along rows and columns. all_rows:
    whether the call needs all of its rows.
    """

    source: fx.Node
    rules: tuple[Rule, Rule]
    all_rows: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """A program, and how each of its calls runs.

    axes: of the values that are cut. local, gathers: how cut and gathered calls run. refusals:
    reasons why other calls that read rows run uncut. device: whose memory plans are for; None for
    this process. parts: compiles the parts of a stage and its segment as networks of their own; None where plans have
    no such parts.
    """

    program: Program
    axes: Mapping[fx.Node, Axes]
    local: Mapping[fx.Node, Local]
    gathers: Mapping[fx.Node, Reduction]
    refusals: Mapping[fx.Node, str]
    relations: Mapping[fx.Node, Relation | Declined]
    device: Device | None = None
    parts: Callable[[Any, Any], Any] | None = None

    def macs(self, node: fx.Node) -> int:
        """Multiply-adds of a call on all of its operands."""
        here, relation = self.local.get(node), self.relations.get(node)
        if here is not None:
            return here.macs(full_window(node, self.axes[node]))
        return count_macs(relation) if isinstance(relation, Relation) else 0

    @property
    def compiler_bytes(self) -> int:
        """Bytes that the compiler of kernels takes; 0 where there is nothing to compile."""
        return max((here.kind.compiler_bytes for here in self.local.values()), default=0)

    @property
    def without_compiler(self) -> Flow:
        """The flow whose calls run by torch's ops, which take no compiler."""
        local = {node: replace(here, kind=here.kind.without_compiler) for node, here in self.local.items()}
        return replace(self, local=local)

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls in the order in which they run."""
        return tuple(_calls(self.program.graph))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The network's results, flat."""
        return tuple(next(iter(self.program.graph.find_nodes(op="output"))).args[0])

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.program.graph.find_nodes(op="placeholder"))

    @property
    def constants(self) -> dict[fx.Node, Tensor]:
        """The captured tensors that the calls read."""
        constants = self.program.constants
        return {n: constants[str(n.target)].tensor for n in self.program.graph.find_nodes(op="get_attr")}

    def edges(self, node: fx.Node) -> tuple[FlowEdge, ...]:
        """The operands with rows that a call reads; uncut calls read all of them."""
        if node in self.local:
            reads = self.local[node].reads
            return tuple(FlowEdge(read.node, read.rules, read.all_rows) for read in reads)
        if node in self.gathers:
            return (FlowEdge(self.gathered(node), (_same, _same), all_rows=False),)
        return tuple(FlowEdge(n, (_same, _same), all_rows=True) for n in node.all_input_nodes if n in self.axes)

    def gathered(self, node: fx.Node) -> fx.Node:
        """The operand with rows of a gathered call."""
        return next(n for n in node.all_input_nodes if n in self.axes)

    def rows(self, node: fx.Node) -> int:
        return length(node, self.axes[node], 0)

    def columns(self, node: fx.Node) -> int:
        return length(node, self.axes[node], 1)


def _same(start: int, end: int) -> Interval:
    return start, end


def capture_at_sizes(model: nn.Module | Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Program:
    """A model captured at the sizes of the example: functional, constants folded, canonical."""
    return rewrite(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))), CANONICAL)


def flow_of(program: Program, table: Table) -> Flow:
    """The flow of a program whose global calls are split into statistics and their application."""
    table = with_moments(table)
    program = _hoist_uncut_calls(split_global_calls(program, table))
    flow = _flow(program, table)
    reads = (read for here in flow.local.values() for read in here.reads if read.all_rows)
    inputs_read_in_full = {read.node for read in reads if read.node.op == "placeholder"}
    return _flow(_copy_inputs(program, inputs_read_in_full), table) if inputs_read_in_full else flow


def flow_of_calls(program: Program, table: Table) -> Flow:
    """The flow of a program as it is: calls that need all rows of their operand run uncut."""
    return _flow(_hoist_uncut_calls(program), table)


def _flow(program: Program, table: Table) -> Flow:
    inputs = {n: axes for n in program.graph.find_nodes(op="placeholder") if (axes := image_axes(n)) is not None}
    relations = Analysis(program, table).relations
    axes = axes_of(program.graph, relations, inputs)
    while new_inputs := _cut_anew(relations, axes):
        inputs |= new_inputs
        axes = axes_of(program.graph, relations, inputs)
    cut, gathers, refusals = {}, {}, {}
    for node, relation in relations.items():
        if not any(n in axes for n in node.all_input_nodes):
            continue
        if node in axes:
            local_call = relation if isinstance(relation, Declined) else local(node, relation, axes)
            if isinstance(local_call, Declined):
                refusals[node] = local_call.text
            else:
                cut[node] = local_call
        else:
            gather = relation if isinstance(relation, Declined) else reduction(node, relation, axes)
            if isinstance(gather, Declined):
                refusals[node] = gather.text
            else:
                gathers[node] = gather
    return Flow(program, axes, cut, gathers, refusals, relations)


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op == "call_function")


def _cut_anew(relations: Mapping[fx.Node, Relation | Declined], axes: Mapping[fx.Node, Axes]) -> dict[fx.Node, Axes]:
    """Axes of results of calls that must run uncut: they are cut anew, like inputs."""
    new_inputs = {}
    for node, relation in relations.items():
        if node in axes or not any(n in axes for n in node.all_input_nodes):
            continue
        is_whole = isinstance(relation, Declined) or isinstance(reduction(node, relation, axes), Declined)
        pair = image_axes(node) if is_whole else None
        if pair is not None and length(node, pair, 0) > 1:
            new_inputs[node] = pair
    return new_inputs


def _copy_inputs(program: Program, inputs: Collection[fx.Node]) -> Program:
    """The program whose calls read copies of some inputs: full values must be in memory."""
    for node in inputs:
        readers = [user for user in node.users if user.op == "call_function"]
        with program.graph.inserting_before(next(_calls(program.graph))):
            copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = fake(node)
        for reader in readers:
            reader.replace_input_with(node, copy)
    return program


def _hoist_uncut_calls(program: Program) -> Program:
    """The program with calls that depend on no rows moved first: they run once."""
    has_rows = {n for n in program.graph.find_nodes(op="placeholder") if image_axes(n) is not None}
    for node in program.graph.nodes:
        if node.op == "call_function" and any(n in has_rows for n in node.all_input_nodes):
            has_rows.add(node)
    op_order = {"placeholder": 0, "get_attr": 1, "output": 4}
    graph, mapping = fx.Graph(), {}
    for node in sorted(program.graph.nodes, key=lambda n: op_order.get(n.op, 2 + (n in has_rows))):
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return program.with_graph(graph)
