"""Run-time supports: which calls are made on an index alone, where the index comes with the input.

A `Pick` says of one value: along this axis only the positions in this index are computed; elsewhere
it is a constant (or a value that comes with the input). What follows is read off the table's lines,
in two sweeps:

    forward:   op(scatter(x, fill)) == scatter(op(x), op(fill))       along axes that a line carries
    backward:  op(x)[index] == op(x[index])                           likewise

and at a contraction over the axis, sum_c x_c · w_c == sum_{c in index} (x_c − fill_c) · w_c + what
the fills leave (nothing, a bias or a border map). A value that readers want in several ways is
computed whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.known import Facts, Key, Relations, forward, is_absorbing, key_of, value_of
from demask.facts.masks import Fact, finite_fact
from demask.ops import Relation, schema
from demask.ops.notation import Axes
from demask.shrink.emit.border_map import one_value
from demask.shrink.layout.cells import At, RunTimeIndex
from demask.shrink.layout.ties import forced

WHOLE: At = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """Of an axis of a value only the positions in an index are computed.

    axis: of the value. index: which positions. fill: what the others are: a constant that
    broadcasts over the value, or an input of the graph of the value's shape.
    """

    axis: int
    index: RunTimeIndex
    fill: Tensor | fx.Node


@dataclass(slots=True)
class IndexPlan:
    """What the sweeps find. picks: by value.

    fills: values that are `fill` outside an index: where, and what. chosen: calls made on an index
    alone: their letter, and the index of that letter. wants: per call and operand, what it is read
    at. shifts: contractions whose first factor leaves something where it is not read, with the fact
    of it. added: sums that add one operand at an index. reads: per value, at what it is read; read
    in two ways it is read whole.
    """

    relations: Relations
    facts: Facts
    picks: Mapping[Key, Pick]
    fills: dict[Key, tuple[At, Tensor]] = field(default_factory=dict)
    chosen: dict[fx.Node, tuple[str, RunTimeIndex]] = field(default_factory=dict)
    wants: dict[tuple[fx.Node, int], At] = field(default_factory=dict)
    shifts: dict[fx.Node, tuple[str, Fact]] = field(default_factory=dict)
    added: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[Key, At] = field(default_factory=dict)

    def made(self, node: fx.Node, k: int) -> At:
        """The indices at which a call makes an output."""
        relation = self.relations.get(node)
        if node not in self.chosen or not isinstance(relation, Relation):
            return WHOLE
        letter, index = self.chosen[node]
        return at_letter(relation, relation.outs[k], letter, index)

    def held(self, key: Key) -> At:
        """The indices at which readers find a value."""
        pick = self.picks.get(key)
        if pick is None:
            return self.made(*key)
        return WHOLE if isinstance(pick.fill, fx.Node) else ((pick.axis, pick.index),)


def planned(
    graph: fx.Graph, relations: Relations, facts: Facts, picks: Mapping[Key, Pick], *, push: bool
) -> IndexPlan:
    """Where which index is used. push: False gathers and scatters at the picks alone, so that every
    call is made whole: what the plan with push must equal."""
    for node, k in picks:
        if node.op != "call_function" or not isinstance(schema.outputs(node)[k], Tensor):
            raise BadInput(f"expected a pick of a tensor that a call makes, found {node.name!r}")
    plan = IndexPlan(relations, facts, picks)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _spread(plan, node, push)
    for node in reversed(graph.nodes):
        _ask(plan, node, push)
    return plan


def letter_at(relation: Relation, axes: Axes, axis: int, index: RunTimeIndex) -> str | None:
    """The letter of an axis whose positions an index tells."""
    before = 1
    for k, letter in enumerate(axes[axis]):
        size = relation.size[letter]
        if size is None:
            return None
        after = _count(relation, axes[axis][k + 1 :])
        if (before, size, after) == (index.outer, index.size, index.inner):
            return letter
        before *= size
    return None


def at_letter(relation: Relation, axes: Axes, letter: str, index: RunTimeIndex) -> At:
    """The index of a letter, on the axis of a tensor that has it; WHOLE where none has."""
    for axis, letters in enumerate(axes):
        if letter in letters:
            k = letters.index(letter)
            outer, inner = _count(relation, letters[:k]), _count(relation, letters[k + 1 :])
            if outer is None or inner is None:
                return WHOLE
            return ((axis, RunTimeIndex(index.source, index.size, outer, inner)),)
    return WHOLE


def carried(relation: Relation) -> frozenset[str]:
    """Letters along which every position of every output depends on that position alone."""
    made = [relation.letters(axes) for axes in relation.outs]
    if relation.back or relation.entry.free or not made:
        return frozenset()
    marked = relation.window | relation.complete | relation.moved | forced(relation)
    found = frozenset.intersection(*made) - marked - relation.contracted
    return frozenset(a for a in found if relation.size[a] is not None)


def _count(relation: Relation, letters: Sequence[str]) -> int | None:
    total = 1
    for letter in letters:
        size = relation.size[letter]
        if size is None:
            return None
        total *= size
    return total


def _spread(plan: IndexPlan, node: fx.Node, push: bool) -> None:
    """Forward: what a call makes of operands that are constant outside an index."""
    relation = plan.relations.get(node)
    mine = {k: plan.picks[node, k] for k in range(len(schema.outputs(node)))
            if (node, k) in plan.picks}  # fmt: skip
    sources = {pick.index.source for pick in mine.values()}
    if push and isinstance(relation, Relation):
        for index in _indices(plan, relation):
            if sources <= {index.source} and _known_outside(plan, relation, index):
                break
    for k, pick in mine.items():
        plan.fills.pop((node, k), None)
        if push and isinstance(pick.fill, Tensor):
            value = schema.outputs(node)[k]
            plan.fills[node, k] = (((pick.axis, pick.index),), _ranked(pick.fill, value))


def _indices(plan: IndexPlan, relation: Relation) -> list[RunTimeIndex]:
    """The indices outside of which some operand is constant, one per source."""
    found: dict[fx.Node, RunTimeIndex] = {}
    for operand in relation.operands:
        if isinstance(operand.value, fx.Node) and key_of(operand.value) in plan.fills:
            for _, index in plan.fills[key_of(operand.value)][0]:
                found.setdefault(index.source, index)
    return list(found.values())


def _letters(plan: IndexPlan, relation: Relation, index: RunTimeIndex) -> dict[int, str]:
    """Per operand that is constant outside an index, the letter that it stands on there."""
    found: dict[int, str] = {}
    for k, operand in enumerate(relation.operands):
        key = key_of(operand.value) if isinstance(operand.value, fx.Node) else None
        for axis, mine in plan.fills[key][0] if key in plan.fills else ():
            letter = letter_at(relation, relation.ins[k], axis, mine)
            if mine.source is index.source and letter is not None:
                found[k] = letter
    return found


def _known_outside(plan: IndexPlan, relation: Relation, index: RunTimeIndex) -> bool:
    """Are the outputs constant outside an index? Then the call is made on the index."""
    letters = _letters(plan, relation, index)
    if len(set(letters.values())) != 1:
        return False
    (letter,) = set(letters.values())
    if letter not in carried(relation):
        return False
    facts = dict(plan.facts)
    for k, operand in enumerate(relation.operands):
        if k in letters:
            key = key_of(operand.value)
            facts[key] = _fact(plan.fills[key][1])
    found = forward(relation, facts)
    if any(fact is None or not bool(fact.known.all()) for fact in found):
        return False
    plan.chosen[relation.node] = (letter, RunTimeIndex(index.source, index.size))
    for k, fact in enumerate(found):
        assert fact is not None
        value = schema.outputs(relation.node)[k]
        at = at_letter(relation, relation.outs[k], letter, index)
        plan.fills[relation.node, k] = (at, _ranked(fact.fill, value))
    return True


def _fact(fill: Tensor) -> Fact:
    return finite_fact(torch.ones([1] * fill.ndim, dtype=torch.bool), fill)


def _ranked(fill: Tensor, value: Tensor) -> Tensor:
    """A fill in the dtype of a value, with all of its axes."""
    shape = [1] * (value.ndim - fill.ndim) + list(fill.shape)
    return fill.to(value.dtype).reshape(shape)


def _ask(plan: IndexPlan, node: fx.Node, push: bool) -> None:
    """Backward: at what a call makes its outputs, and so wants its operands."""
    if node.op == "output":
        for source in node.all_input_nodes:
            _want(plan, source, WHOLE)
        return
    relation = plan.relations.get(node)
    keys = [(node, k) for k in range(len(schema.outputs(node)))]
    if relation is None or not any(key in plan.reads for key in keys):
        return
    if not isinstance(relation, Relation):
        for source in node.all_input_nodes:
            _want(plan, source, WHOLE)
        return
    if push and node not in plan.chosen:
        _choose(plan, relation)
    wants = _wants(plan, relation, push)
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node):
            plan.wants[node, k] = wants[k]
            if operand.value.op != "get_attr":
                _want(plan, operand.value, wants[k])


def _want(plan: IndexPlan, source: fx.Node, at: At) -> None:
    """Note how a value is read; read in two ways it is made whole."""
    if source.op == "get_attr" or not isinstance(value_of(source), Tensor):
        return
    key = key_of(source)
    plan.reads[key] = at if plan.reads.get(key, at) == at else WHOLE


def _choose(plan: IndexPlan, relation: Relation) -> None:
    """Make a call on an index where all that is read of it is read at that index."""
    node, found = relation.node, set()
    for k in range(len(relation.outs)):
        if (node, k) not in plan.reads:
            continue
        pick = plan.picks.get((node, k))
        at = ((pick.axis, pick.index),) if pick is not None else plan.reads[node, k]
        axis, index = at[0] if at else (0, None)
        letter = letter_at(relation, relation.outs[k], axis, index) if index else None
        found.add((letter, index and RunTimeIndex(index.source, index.size)))
    if len(found) == 1:
        letter, index = found.pop()
        if letter is not None and index is not None and letter in carried(relation):
            plan.chosen[node] = (letter, index)


def _wants(plan: IndexPlan, relation: Relation, push: bool) -> list[At]:
    """At what a call reads its operands."""
    wants = [WHOLE] * len(relation.operands)
    if relation.node in plan.chosen:
        letter, index = plan.chosen[relation.node]
        wants = [at_letter(relation, axes, letter, index) for axes in relation.ins]
    if push:
        summed = _summed(plan, relation)
        for k, axes in enumerate(relation.ins):
            if summed is not None:
                more = at_letter(relation, axes, *summed)
                wants[k] = wants[k] + more if _apart(wants[k], more) else wants[k]
        if summed is None and relation.node not in plan.chosen:
            _add_at(plan, relation, wants)
    return wants


def _apart(a: At, b: At) -> bool:
    return not {axis for axis, _ in a} & {axis for axis, _ in b}


def _summed(plan: IndexPlan, relation: Relation) -> tuple[str, RunTimeIndex] | None:
    """The letter that a contraction sums over an index alone: outside of it one factor is zero, or
    a constant that meets constants."""
    if relation.entry.fill != "sum" or relation.back:
        return None
    for index in _indices(plan, relation):
        letters = _letters(plan, relation, index)
        summed = {a for k, a in letters.items() if k in relation.factors} & relation.contracted
        if len(summed) != 1 or not summed.isdisjoint(forced(relation)):
            continue
        (letter,) = summed
        wide = [axes for axes in relation.ins if at_letter(relation, axes, letter, index)]
        if len(wide) != len(relation.factors) or _collides(plan, relation, letter):
            continue
        if _leaves(plan, relation, letters, letter):
            return letter, index
    return None


def _collides(plan: IndexPlan, relation: Relation, letter: str) -> bool:
    """Does some axis hold both the summed letter and the one that the call is made on?"""
    if relation.node not in plan.chosen:
        return False
    other = plan.chosen[relation.node][0]
    return any({letter, other} <= set(axis) for axes in relation.ins for axis in axes)


def _leaves(plan: IndexPlan, relation: Relation, letters: dict[int, str], letter: str) -> bool:
    """Can what is left outside the index be told? Notes it where it is not nothing."""
    factors = [k for k, a in letters.items() if a == letter and k in relation.factors]
    fills = [plan.fills[key_of(relation.operands[k].value)][1] for k in factors]
    if any(bool((fill == 0).all()) for fill in fills):
        return True
    other = [k for k in relation.factors if k not in factors]
    if factors != [relation.factors[0]] or not all(
        schema.is_constant(relation.operands[k].value) for k in other
    ):
        return False
    fact = _fact(fills[0])
    summed = is_absorbing(relation) and bool(one_value(relation, fact).known.all())
    if relation.is_grouped or not summed:
        return False  # What differs from place to place leaves no border map.
    plan.shifts[relation.node] = (letter, fact)
    return True


def _add_at(plan: IndexPlan, relation: Relation, wants: list[At]) -> None:
    """a + scatter(b) adds b at its positions; an operand that is read at nothing stays whole."""
    found = schema.arguments(relation.node)
    if relation.node.target is not torch.ops.aten.add.Tensor or found.get("alpha", 1) != 1:
        return
    if not relation.ins[0] == relation.ins[1] == relation.outs[0]:
        return
    dtype = relation.node.meta["val"].dtype
    for k in (1, 0):
        value, other = relation.operands[k].value, relation.operands[1 - k].value
        if (
            schema.is_constant(value)
            or schema.is_constant(other)
            or key_of(value) not in plan.fills
        ):
            continue
        at, fill = plan.fills[key_of(value)]
        same = value.meta["val"].dtype == other.meta["val"].dtype == dtype
        if same and len(at) == 1 and bool((fill == 0).all()):
            wants[k] = at
            plan.added[relation.node] = k
            return
