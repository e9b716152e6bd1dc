"""The calls of a segment as units: a call with the calls that are fused into it.

    relu(conv(x) + y)  is one unit, which reads x through the windows of the convolution and y as is

A unit computes one value. *enters*: values that a segment reads and others computed (inputs, maps).
*targets*: values that it must compute in full: maps that later segments read, and outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from demask.compat.onednn import available
from demask.ops.schema import fake
from demask.ops.traits import ADDS, CONVOLUTIONS
from demask.traverse.analysis.flow import Flow, FlowEdge
from demask.tune.epilogue import Epilogue, epilogue_of


@dataclass(frozen=True, slots=True)
class Unit:
    """A call and the calls fused into it.

    nodes: the call, then those fused into it. addend: a value that is added before the activation
    `after`. edges: the operands with rows; the addend is the last.
    """

    nodes: tuple[fx.Node, ...]
    edges: tuple[FlowEdge, ...]
    addend: fx.Node | None = None
    after: Epilogue | None = None

    @property
    def node(self) -> fx.Node:
        """The call itself."""
        return self.nodes[0]

    @property
    def value(self) -> fx.Node:
        """The value that the unit computes."""
        return self.nodes[-1]


@dataclass(frozen=True, slots=True)
class Stage:
    """The units of a segment in the order in which they run.

    enters: values with rows that are read but not computed here. targets: values computed in full.
    sinks: units of gathered calls. readers: the units that read each value, by index.
    """

    flow: Flow
    units: tuple[Unit, ...]
    enters: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]
    readers: dict[fx.Node, list[tuple[int, FlowEdge]]] = field(default_factory=dict)

    @property
    def sinks(self) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.node in self.flow.gathers)

    @property
    def wholes(self) -> tuple[Unit, ...]:
        """Units that can only run on whole values."""
        cut = self.flow.local.keys() | self.flow.gathers.keys()
        return tuple(u for u in self.units if u.node not in cut)

    def streamed(self, unit: Unit, maps: Container[fx.Node]) -> list[FlowEdge]:
        """The operands that a unit reads whole, in blocks, from their source."""
        return [e for e in unit.edges if e.whole and e.source in self.enters and e.source not in maps]

    @property
    def is_streamable(self) -> bool:
        """Whether the stage can run in parts: no unit waits for all rows of another's value."""
        computed = {u.value for u in self.units} | {u.node for u in self.units}
        waits = any(e.whole and e.source in computed for u in self.units for e in u.edges)
        gathered = {u.node for u in self.sinks}
        reads_statistics = any(n in gathered for u in self.units for n in u.node.all_input_nodes)
        return not self.wholes and not waits and not reads_statistics


def build_stage(flow: Flow, nodes: Sequence[fx.Node], keeps: Collection[fx.Node]) -> Stage:
    """The stage of some calls. keeps: those of their values that other segments read."""
    free, units = set(nodes), []  # free: calls of no unit yet, as a sum is fused into one operand
    for node in nodes:
        if node in free:
            units.append(_unit(flow, node, free, set(keeps)))
            free -= set(units[-1].nodes)
    units = _ordered(units)
    computed = {u.value for u in units}
    readers: dict[fx.Node, list[tuple[int, FlowEdge]]] = {}
    for k, unit in enumerate(units):
        for edge in unit.edges:
            readers.setdefault(edge.source, []).append((k, edge))
    enters = tuple(n for n in readers if n not in computed)
    targets = tuple(u.value for u in units if u.value in keeps and u.value in flow.axes)
    return Stage(flow, tuple(units), enters, targets, readers)


def _unit(flow: Flow, node: fx.Node, inside: set[fx.Node], keeps: set[fx.Node]) -> Unit:
    """The call fused with the sum and the activation that follow it, where oneDNN can fuse them."""
    unfused = Unit((node,), flow.edges(node))
    if node not in flow.local or not _fuses(node):
        return unfused
    nodes, edges, addend, after = [node], unfused.edges, None, None
    follower = _only(node, inside, keeps)
    if follower is not None and _adds(follower, node, flow):
        addend = next(n for n in follower.args if n is not node)
        edges += tuple(edge for edge in flow.edges(follower) if edge.source is addend)
        nodes.append(follower)
        follower = _only(follower, inside, keeps)
    if follower is not None and follower in flow.local:
        after = epilogue_of(follower)
        nodes += [follower] if after is not None else []
    return Unit(tuple(nodes), edges, addend, after)  # type: ignore[arg-type]


def _fuses(node: fx.Node) -> bool:
    value = fake(node)
    return node.target in CONVOLUTIONS and available(value.dtype, value.device)


def _only(node: fx.Node, inside: set[fx.Node], keeps: set[fx.Node]) -> fx.Node | None:
    """The only reader of a value, if it is in the same stage; else None."""
    readers = list(node.users)
    return readers[0] if len(readers) == 1 and readers[0] in inside and node not in keeps else None


def _adds(node: fx.Node, value: fx.Node, flow: Flow) -> bool:
    """Whether a call adds a value and another with rows, of the same shape and dtype."""
    if node.target not in ADDS or node.kwargs or len(node.args) != 2:
        return False
    other = next((n for n in node.args if n is not value), None)
    if not isinstance(other, fx.Node) or other not in flow.axes or node not in flow.local:
        return False
    other_value, value_added = fake(other), fake(node)
    return (
        isinstance(other_value, Tensor)
        and other_value.shape == value_added.shape
        and other_value.dtype == value_added.dtype
    )


def _ordered(units: list[Unit]) -> list[Unit]:
    """The units in topological order: a fused unit may read an addend that is computed after its
    convolution."""
    unit_of = {u.value: u for u in units}
    done, ordered = set[fx.Node](), []

    def put(unit: Unit) -> None:
        stack = [unit]
        while stack:
            top = stack[-1]
            missing = [unit_of[n] for n in _operands(top) if n in unit_of and n not in done]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if top.value not in done:
                done.add(top.value)
                ordered.append(top)

    for unit in units:
        put(unit)
    return ordered


def _operands(unit: Unit) -> list[fx.Node]:
    extra = [] if unit.addend is None else [unit.addend]
    return [*unit.node.all_input_nodes, *extra]
