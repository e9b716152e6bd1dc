"""A captured network as values that can be cut, and how: read once, asked by everything else.

Calls are of three kinds. *Cut*: makes rows from rows (`local`). *Gathered*: makes a whole value
from rows, each counted once (`reductions`). *Whole*: everything else; it takes whole values and
makes one. A call that reads rows whole (keys and values of attention) must wait until all are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.facts.analysis import Analysis
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.normalize.canonical_calls import spelled
from demask.graph.program import Program
from demask.ops import Table
from demask.ops.entry import Declined
from demask.ops.regions import Interval
from demask.ops.relation import Relation
from demask.shrink.program_size import macs_of
from demask.traverse.analysis.partial_reductions import Reduction, reduction
from demask.traverse.analysis.split_global_ops import parted, with_reductions
from demask.traverse.axes import Axes, axes_of, length, whole
from demask.traverse.local.dispatch import Local, local

Rule = Callable[[int, int], Interval]  # positions of an output -> those of an operand


@dataclass(frozen=True, slots=True)
class FlowEdge:
    """One operand with rows that a call reads. rules: along rows and columns; whole: all of it."""

    source: fx.Node
    rules: tuple[Rule, Rule]
    whole: bool


@dataclass(frozen=True, slots=True)
class Flow:
    """What is known of each call of a program.

    axes: of the values that are cut. local, gathers: how cut and gathered calls run. refusals: why
    a call that reads rows runs whole.
    """

    program: Program
    axes: Mapping[fx.Node, Axes]
    local: Mapping[fx.Node, Local]
    gathers: Mapping[fx.Node, Reduction]
    refusals: Mapping[fx.Node, str]
    relations: Mapping[fx.Node, Relation | Declined]

    def macs(self, node: fx.Node) -> int:
        """Multiply-adds of a call on all of its operands."""
        here, relation = self.local.get(node), self.relations.get(node)
        if here is not None:
            return here.macs(whole(node, self.axes[node]))
        return macs_of(relation) if isinstance(relation, Relation) else 0

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls in the order in which they run."""
        return tuple(_calls(self.program.graph))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the network returns, flat."""
        return tuple(next(iter(self.program.graph.find_nodes(op="output"))).args[0])  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(self.program.graph.find_nodes(op="placeholder"))

    @property
    def constants(self) -> dict[fx.Node, Tensor]:
        """The tensors that the calls read, as they were captured."""
        held = self.program.constants
        return {n: held[str(n.target)].tensor
                for n in self.program.graph.find_nodes(op="get_attr")}  # fmt: skip

    def edges(self, node: fx.Node) -> tuple[FlowEdge, ...]:
        """The operands with rows that a call reads: of whole calls, all of each."""
        if node in self.local:
            reads = self.local[node].reads
            return tuple(FlowEdge(read.node, read.rules, read.whole) for read in reads)
        if node in self.gathers:
            return (FlowEdge(self.gathered(node), (_same, _same), whole=False),)
        return tuple(FlowEdge(n, (_same, _same), whole=True)
                     for n in node.all_input_nodes if n in self.axes)  # fmt: skip

    def gathered(self, node: fx.Node) -> fx.Node:
        """The rows that a gathering call reads."""
        return next(n for n in node.all_input_nodes if n in self.axes)

    def rows(self, node: fx.Node) -> int:
        return length(node, self.axes[node], 0)

    def columns(self, node: fx.Node) -> int:
        return length(node, self.axes[node], 1)


def _same(start: int, end: int) -> Interval:
    return start, end


def read(
    model: nn.Module | Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Program:
    """A model captured at the sizes of the example, for traversal."""
    return spelled(folded(functionalized(capture(model, args, kwargs, dynamic_shapes={}))))


def flow_of(program: Program, table: Table) -> Flow:
    """The flow of a program; its global calls become statistics and what applies them."""
    table = with_reductions(table)
    program = _hoisted(parted(program, table))
    found = _flow(program, table)
    reads = (read for here in found.local.values() for read in here.reads if read.whole)
    entered = {read.node for read in reads if read.node.op == "placeholder"}
    return _flow(_copied(program, entered), table) if entered else found


def _flow(program: Program, table: Table) -> Flow:
    inputs = {n: axes for n in program.graph.find_nodes(op="placeholder")
              if (axes := _input_axes(n)) is not None}  # fmt: skip
    relations = Analysis(program, table).relations
    axes = axes_of(program.graph, relations, inputs)
    while afresh := _afresh(relations, axes):
        inputs |= afresh
        axes = axes_of(program.graph, relations, inputs)
    cut, gathers, refusals = {}, {}, {}
    for node, relation in relations.items():
        if not any(n in axes for n in node.all_input_nodes):
            continue
        if node in axes:
            found = relation if isinstance(relation, Declined) else local(node, relation, axes)
            if isinstance(found, Declined):
                refusals[node] = found.text
            else:
                cut[node] = found
        else:
            made = relation if isinstance(relation, Declined) else reduction(node, relation, axes)
            if isinstance(made, Declined):
                refusals[node] = made.text
            else:
                gathers[node] = made
    return Flow(program, axes, cut, gathers, refusals, relations)


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op == "call_function")


def _afresh(
    relations: Mapping[fx.Node, Relation | Declined], axes: Mapping[fx.Node, Axes]
) -> dict[fx.Node, Axes]:
    """Results of calls that must run whole: behind them rows begin anew, as behind an input."""
    found = {}
    for node, relation in relations.items():
        if node in axes or not any(n in axes for n in node.all_input_nodes):
            continue
        refused = isinstance(relation, Declined) or isinstance(
            reduction(node, relation, axes), Declined
        )
        pair = _input_axes(node) if refused else None
        if pair is not None and length(node, pair, 0) > 1:
            found[node] = pair
    return found


def _input_axes(node: fx.Node) -> Axes | None:
    """Images and volumes are cut along their first two spatial axes, sequences (N, C, L) along
    their positions."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim < 3:
        return None
    return (2, None) if value.ndim == 3 else (2, 3)


def _copied(program: Program, inputs: Collection[fx.Node]) -> Program:
    """The program whose calls read copies of some inputs: what is read whole must lie somewhere."""
    for node in inputs:
        readers = [user for user in node.users if user.op == "call_function"]
        with program.graph.inserting_before(next(_calls(program.graph))):
            made = program.graph.call_function(torch.ops.aten.clone.default, (node,))
        made.meta["val"] = node.meta["val"]
        for reader in readers:
            reader.replace_input_with(node, made)
    return program


def _hoisted(program: Program) -> Program:
    """The program with calls that no rows reach in front: they run once, whole."""
    reached = {n for n in program.graph.find_nodes(op="placeholder") if _input_axes(n) is not None}
    for node in program.graph.nodes:
        if node.op == "call_function" and any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    places = {"placeholder": 0, "get_attr": 1, "output": 4}
    graph, mapping = fx.Graph(), {}
    for node in sorted(program.graph.nodes, key=lambda n: places.get(n.op, 2 + (n in reached))):
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return program.with_graph(graph)
