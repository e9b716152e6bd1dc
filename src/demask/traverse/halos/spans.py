"""The input positions that tiles of the outputs read along one image axis, without borders.

    needed(A) = [start(A), end(A)):  a tile that begins at A, in positions of the input, reads from
    start(A) on, and one that ends at A reads to before end(A)

computed from the outputs to the inputs: the union of the needs of a value's readers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from torch import Tensor, fx

from demask.ops import Table
from demask.ops.entry import Declined
from demask.ops.flow import Part, follow
from demask.ops.relation import Relation, bind
from demask.ops.schema import fake
from demask.traverse.halos.axis_steps import SAME, AxisStep, Rules
from demask.traverse.halos.record import HaloRecording

NAMES = ("rows", "columns")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SpanEdge:
    """One value that a call reads.

    step: positions read along the image axis; None where every position reads all of the value
    (`whole`), or none of it. why: reason why a value with the axis is read whole. like: whether
    such a value has as many positions as the output.
    """

    source: fx.Node
    step: AxisStep | None = None
    whole: bool = False
    why: str = ""
    like: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """A recording along one image axis.

    edges: the values that each node reads. parts: of the values that have the axis. scales:
    positions of the first input per position of a value. outputs: of the network.
    """

    edges: Mapping[fx.Node, tuple[SpanEdge, ...]]
    parts: Mapping[fx.Node, Part]
    scales: Mapping[fx.Node, Fraction]
    outputs: tuple[fx.Node, ...]

    def scale(self, node: fx.Node) -> Fraction:
        """Positions of the first input per index of a value's axis."""
        part = self.parts[node]
        covers = part.covers(fake(node).shape[part.axis])
        return self.scales[node] / (part.inner if covers else 1)

    @property
    def read_whole(self) -> tuple[fx.Node, ...]:
        """The values with the axis that a call without the axis reads whole."""
        sources = (
            edge.source
            for node, edges in self.edges.items()
            for edge in edges
            if edge.why and not (edge.like and node in self.parts)
        )
        return tuple(dict.fromkeys(sources))

    @property
    def seeds(self) -> tuple[fx.Node, ...]:
        """The values to tile: the outputs, and values that global calls read."""
        return tuple(n for n in dict.fromkeys((*self.outputs, *self.read_whole)) if n in self.parts)


def relations_of(recording: HaloRecording, table: Table) -> dict[fx.Node, Relation | Declined]:
    """The relation of every call; those with several outputs are read through their outputs."""
    return {
        node: bind(node, table)
        for node in recording.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    }


def paths_of(
    recording: HaloRecording,
    relations: Mapping[fx.Node, Relation | Declined],
    inputs: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> Paths:
    """The paths of an image axis through a recording.

    inputs: the placeholders that have the image axis. last: the image cannot be enlarged. Raises
    TooSmall as `Rules.step`.
    """
    parts, scales, edges = dict(inputs), {}, {}
    first = next(iter(inputs.values()), None)
    for node, part in inputs.items():
        scales[node] = Fraction(first.size, part.size) if first else Fraction(1)
    for node in recording.graph.nodes:
        if node.op != "call_function" or not isinstance(fake(node), Tensor):
            continue
        relation, out = _read(node, relations)
        part = _part_of(relation, node, out, parts)
        if part is not None:
            parts[node] = part
        edges[node] = tuple(
            _edge(relation, k, source, (node, out), parts, rules, last) for k, source in _sources(relation, node)
        )
        if part is not None:
            scales[node] = _scale(edges[node], scales, parts, part)
    outputs = tuple(node for node in recording.outputs if node is not None)
    live = _live(edges, outputs)
    needed = live.union(inputs)
    return Paths(_only(edges, needed), _only(parts, needed), _only(scales, needed), outputs)


def _only(by_node: dict[fx.Node, Value], nodes: set[fx.Node]) -> dict[fx.Node, Value]:
    return {node: value for node, value in by_node.items() if node in nodes}


def _live(edges: Mapping[fx.Node, tuple[SpanEdge, ...]], outputs: tuple[fx.Node, ...]) -> set[fx.Node]:
    """The nodes that the outputs depend on."""
    live = set(outputs)
    for node in reversed(list(edges)):
        if node in live:
            live.update(edge.source for edge in edges[node])
    return live


def _read(node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]) -> tuple[Relation | Declined, int]:
    """The relation that computes a value, and the index of the value among its outputs."""
    if node.target is operator.getitem:
        call, out = node.args
        return relations[call], out  # type: ignore[index,return-value]
    return relations[node], 0


def _sources(relation: Relation | Declined, node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The operands that are nodes, with their index in the relation."""
    if isinstance(relation, Relation):
        operands = [(k, operand.value) for k, operand in enumerate(relation.operands)]
        return [(k, value) for k, value in operands if isinstance(value, fx.Node)]
    call: Any = node.args[0] if node.target is operator.getitem else node
    return list(enumerate(call.all_input_nodes))


def _part_of(relation: Relation | Declined, node: fx.Node, out: int, parts: Mapping[fx.Node, Part]) -> Part | None:
    """The part of a value's axes that is the image axis: that of the first operand that has it, or
    the finest on the same axis. A call without a rule is assumed to keep the axis if it keeps the
    shape."""
    candidates: list[Part | None] = []
    for k, source in _sources(relation, node):
        if source in parts and isinstance(relation, Relation):
            candidates.append(follow(relation, k, parts[source], out=out))
        elif source in parts and fake(source).shape == fake(node).shape:
            candidates.append(parts[source])
    known = [part for part in candidates if part is not None]
    alike = [part for part in known if part.axis == known[0].axis]
    return min(alike, key=lambda part: part.inner, default=None)


def _edge(
    relation: Relation | Declined,
    operand: int,
    source: fx.Node,
    reader: tuple[fx.Node, int],
    parts: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> SpanEdge:
    before, after = parts.get(source), parts.get(reader[0])
    if before is None:
        return SpanEdge(source, whole=True)
    like = after is not None and before.size == after.size
    if isinstance(relation, Declined):
        return SpanEdge(source, None, True, relation.text, like)
    if after is None:
        return SpanEdge(source, None, True, "reduces all positions to one value", like)
    step = rules.step(relation, operand, (before, after), reader[1], last)
    return SpanEdge(source, None, True, step, like) if isinstance(step, str) else SpanEdge(source, step)


def _scale(edges, scales: Mapping[fx.Node, Fraction], parts, part: Part) -> Fraction:
    """The scale of a value, from the first operand that is read in steps, else from sizes."""
    for edge in edges:
        if edge.step is not None:
            return scales[edge.source] * edge.step.scale
    source = next(edge.source for edge in edges if edge.source in scales)
    return scales[source] * Fraction(parts[source].size, part.size)


# --- from outputs to inputs ---------------------------------------------------------------------

Span = tuple[float, float]
ALL: Span = (-math.inf, math.inf)


def spans(paths: Paths, position: Fraction, *, local: bool) -> dict[fx.Node, Span]:
    """For each value, where a tile that begins at `position` starts to read, and where one that
    ends there stops.

    position: of the first input. local: treat global calls as position by position; where one ends
    the axis, its operand is tiled.
    """
    result: dict[fx.Node, Span] = {}
    for node in paths.seeds if local else paths.outputs:
        own = position / paths.scales[node] if node in paths.parts else None
        result[node] = ALL if own is None else (math.floor(own), math.ceil(own))
    for node in reversed(list(paths.edges)):
        span = result.get(node)
        if span is None:
            continue
        for edge in paths.edges[node]:
            needed = _through(edge, span, local)
            if needed is not None:
                result[edge.source] = _union(result.get(edge.source), needed)
    return result


def _through(edge: SpanEdge, span: Span, local: bool) -> Span | None:
    """The span of an operand that a reader with `span` needs; None: nothing."""
    step = SAME if local and edge.why and edge.like else edge.step
    if span == ALL:
        return None if local else ALL
    if step is None:
        return ALL if edge.whole and not local else None
    return step.start(int(span[0])), step.end(int(span[1]))


def _union(a: Span | None, b: Span) -> Span:
    return b if a is None else (min(a[0], b[0]), max(a[1], b[1]))


def alignments(paths: Paths, inputs: Mapping[fx.Node, Part]) -> Iterator[Fraction]:
    """The positions of the first input where tiles may begin, for one period of all steps."""
    ends = [paths.scale(node) for node in (*paths.seeds, *inputs)]
    grid, period = least_multiple(ends), least_multiple([*ends, *_periods(paths)])
    yield from (grid * k for k in range(int(period / grid)))


def _periods(paths: Paths) -> Iterator[Fraction]:
    for node, edges in paths.edges.items():
        if node in paths.scales:
            yield paths.scales[node]
        for edge in edges:
            if edge.step is not None and edge.step.exact:
                yield edge.step.period * paths.scales[node]


def alignment(paths: Paths, node: fx.Node) -> int:
    """The number of positions of which crops of this input begin at a multiple, so that strided
    layers sample the same positions as in the whole image."""
    return int(least_multiple([Fraction(1), *(s / paths.scales[node] for s in paths.scales.values())]))


def least_multiple(values: list[Fraction]) -> Fraction:
    """The least common multiple."""
    distinct = set(values)
    tops, bottoms = (v.numerator for v in distinct), (v.denominator for v in distinct)
    return Fraction(math.lcm(*tops), math.gcd(*bottoms))
