"""What tiles of a network's outputs need of its inputs, on an endless image, along one image axis.

    needed(A) = [start(A), end(A)):  a tile that begins at A, in positions of the input, reads from
    start(A) on, and one that ends at A reads to before end(A)

found by walking from the outputs to the inputs: what a value's readers need of it, together.
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
from demask.traverse.halos.axis_steps import SAME, AxisStep, Rules
from demask.traverse.halos.record import HaloRecording

NAMES = ("rows", "columns")
Held = TypeVar("Held")


@dataclass(frozen=True, slots=True)
class SpanEdge:
    """One value that a call reads. step: how, along the image axis; None where every position reads
    all of it (`whole`), or none of it. why: the value has the axis and is read whole nevertheless.
    like: then, has the output as many positions?"""

    source: fx.Node
    step: AxisStep | None = None
    whole: bool = False
    why: str = ""
    like: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """A recording along one image axis.

    edges: what each node reads. places, scales: of the values that have the axis; a scale is
    positions of the first input per position. outputs: of the network.
    """

    edges: Mapping[fx.Node, tuple[SpanEdge, ...]]
    places: Mapping[fx.Node, Part]
    scales: Mapping[fx.Node, Fraction]
    outputs: tuple[fx.Node, ...]

    def scale(self, node: fx.Node) -> Fraction:
        """Positions of the first input per index of the axis in which a value has them."""
        place = self.places[node]
        covers = place.covers(node.meta["val"].shape[place.axis])
        return self.scales[node] / (place.inner if covers else 1)

    @property
    def lost(self) -> tuple[fx.Node, ...]:
        """The values with the axis that a call reads whole and makes something without it of."""
        found = (edge.source for node, edges in self.edges.items() for edge in edges
                 if edge.why and not (edge.like and node in self.places))  # fmt: skip
        return tuple(dict.fromkeys(found))

    @property
    def seeds(self) -> tuple[fx.Node, ...]:
        """Of what tiles are made: the outputs, and whatever a global call reads."""
        return tuple(n for n in dict.fromkeys((*self.outputs, *self.lost)) if n in self.places)


def relations_of(found: HaloRecording, table: Table) -> dict[fx.Node, Relation | Declined]:
    """Of every call; calls that make several values are read through those."""
    return {node: bind(node, table) for node in found.graph.nodes if node.op == "call_function"
            and node.target is not operator.getitem}  # fmt: skip


def paths_of(
    found: HaloRecording,
    relations: Mapping[fx.Node, Relation | Declined],
    inputs: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> Paths:
    """inputs: the placeholders that have the image axis. Raises TooSmall (`Rules.step`)."""
    places, scales, edges = dict(inputs), {}, {}
    first = next(iter(inputs.values()), None)
    for node, place in inputs.items():
        scales[node] = Fraction(first.size, place.size) if first else Fraction(1)
    for node in found.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
            continue
        relation, out = _read(node, relations)
        place = _place(relation, node, out, places)
        if place is not None:
            places[node] = place
        edges[node] = tuple(_edge(relation, k, source, (node, out), places, rules, last)
                            for k, source in _sources(relation, node))  # fmt: skip
        if place is not None:
            scales[node] = _scale(edges[node], scales, places, place)
    outputs = tuple(node for node in found.outputs if node is not None)
    live = _live(edges, outputs)
    kept = live.union(inputs)
    return Paths(_only(edges, kept), _only(places, kept), _only(scales, kept), outputs)


def _only(held: dict[fx.Node, Held], kept: set[fx.Node]) -> dict[fx.Node, Held]:
    return {node: value for node, value in held.items() if node in kept}


def _live(
    edges: Mapping[fx.Node, tuple[SpanEdge, ...]], outputs: tuple[fx.Node, ...]
) -> set[fx.Node]:
    """What the outputs depend on."""
    found = set(outputs)
    for node in reversed(list(edges)):
        if node in found:
            found.update(edge.source for edge in edges[node])
    return found


def _read(
    node: fx.Node, relations: Mapping[fx.Node, Relation | Declined]
) -> tuple[Relation | Declined, int]:
    """The relation that makes a value, and which of its outputs it is."""
    if node.target is operator.getitem:
        call, out = node.args
        return relations[call], out  # type: ignore[index,return-value]
    return relations[node], 0


def _sources(relation: Relation | Declined, node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The operands that are values, and where they stand in the relation."""
    if isinstance(relation, Relation):
        held = [(k, operand.value) for k, operand in enumerate(relation.operands)]
        return [(k, value) for k, value in held if isinstance(value, fx.Node)]
    call: Any = node.args[0] if node.target is operator.getitem else node
    return list(enumerate(call.all_input_nodes))


def _place(
    relation: Relation | Declined, node: fx.Node, out: int, places: Mapping[fx.Node, Part]
) -> Part | None:
    """Where the axis runs in a value: as the first operand says that has it there, or the finest
    on the same axis. A call without a rule is taken to leave the axis where it is if the shape
    stays."""
    found: list[Part | None] = []
    for k, source in _sources(relation, node):
        if source in places and isinstance(relation, Relation):
            found.append(follow(relation, k, places[source], out=out))
        elif source in places and source.meta["val"].shape == node.meta["val"].shape:
            found.append(places[source])
    known = [place for place in found if place is not None]
    alike = [place for place in known if place.axis == known[0].axis]
    return min(alike, key=lambda place: place.inner, default=None)


def _edge(
    relation: Relation | Declined,
    operand: int,
    source: fx.Node,
    made: tuple[fx.Node, int],
    places: Mapping[fx.Node, Part],
    rules: Rules,
    last: bool,
) -> SpanEdge:
    before, after = places.get(source), places.get(made[0])
    if before is None:
        return SpanEdge(source, whole=True)
    like = after is not None and before.size == after.size
    if isinstance(relation, Declined):
        return SpanEdge(source, None, True, relation.text, like)
    if after is None:
        return SpanEdge(source, None, True, "makes one value of all positions", like)
    step = rules.step(relation, operand, (before, after), made[1], last)
    return (
        SpanEdge(source, None, True, step, like)
        if isinstance(step, str)
        else SpanEdge(source, step)
    )


def _scale(edges, scales: Mapping[fx.Node, Fraction], places, place: Part) -> Fraction:
    """By the first operand that is read step by step, or else by the sizes."""
    for edge in edges:
        if edge.step is not None:
            return scales[edge.source] * edge.step.scale
    source = next(edge.source for edge in edges if edge.source in scales)
    return scales[source] * Fraction(places[source].size, place.size)


# --- the walk -----------------------------------------------------------------------------------

Span = tuple[float, float]
ALL: Span = (-math.inf, math.inf)


def spans(paths: Paths, at: Fraction, *, local: bool) -> dict[fx.Node, Span]:
    """Of each value, from where a tile that begins at `at` reads, and to where one that ends there.

    at: in positions of the first input. local: global calls are taken position by position, and
    where one ends the axis, a tile is made of what it reads.
    """
    found: dict[fx.Node, Span] = {}
    for node in paths.seeds if local else paths.outputs:
        place = at / paths.scales[node] if node in paths.places else None
        found[node] = ALL if place is None else (math.floor(place), math.ceil(place))
    for node in reversed(list(paths.edges)):
        span = found.get(node)
        if span is None:
            continue
        for edge in paths.edges[node]:
            theirs = _through(edge, span, local)
            if theirs is not None:
                found[edge.source] = _both(found.get(edge.source), theirs)
    return found


def _through(edge: SpanEdge, span: Span, local: bool) -> Span | None:
    """What a reader that needs `span` needs of one operand; None: nothing."""
    step = SAME if local and edge.why and edge.like else edge.step
    if span == ALL:
        return None if local else ALL
    if step is None:
        return ALL if edge.whole and not local else None
    return step.start(int(span[0])), step.end(int(span[1]))


def _both(a: Span | None, b: Span) -> Span:
    return b if a is None else (min(a[0], b[0]), max(a[1], b[1]))


def alignments(paths: Paths, inputs: Mapping[fx.Node, Part]) -> Iterator[Fraction]:
    """Where tiles may begin, in positions of the first input, until everything repeats."""
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
    """A crop of this input begins at a multiple of this many positions, so that every layer cuts
    its strides where the whole image does."""
    return int(
        least_multiple([Fraction(1), *(s / paths.scales[node] for s in paths.scales.values())])
    )


def least_multiple(values: list[Fraction]) -> Fraction:
    """The least common multiple."""
    distinct = set(values)
    tops, bottoms = (v.numerator for v in distinct), (v.denominator for v in distinct)
    return Fraction(math.lcm(*tops), math.gcd(*bottoms))
