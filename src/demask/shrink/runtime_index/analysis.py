"""Run-time supports: calls that are computed only at an index, where the index is an input.

An `IndexedSupport` states about one value: along this axis only the positions in this index are
computed; elsewhere it is a constant (or a value that is an input). The consequences follow from the
relations, in two sweeps:

    forward:   op(scatter(x, fill)) == scatter(op(x), op(fill))       along axes that an op carries
    backward:  op(x)[index] == op(x[index])                           likewise

and at a contraction over the axis, sum_c x_c · w_c == sum_{c in index} (x_c − fill_c) · w_c + the
contribution of the fills (nothing, a bias or a border map). A value that readers need in several
ways is computed whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.carriers import one_value
from demask.facts.known import Facts, Key, Relations, forward, is_absorbing, key_of, value_of
from demask.facts.masks import Fact, finite_fact
from demask.ops import Relation, schema
from demask.ops.notation import Axes
from demask.ops.schema import fake
from demask.shrink.layout.cells import RunTimeIndex, RunTimeSupports
from demask.shrink.layout.ties import whole_letters

WHOLE: RunTimeSupports = ()


@dataclass(frozen=True, slots=True)
class IndexedSupport:
    """A run-time support of a value: only the positions of an axis that are in an index are
    computed.

    axis: of the value. index: the positions. fill: value of the other positions: a constant that
    broadcasts over the value, or an input of the graph with the value's shape.
    """

    axis: int
    index: RunTimeIndex
    fill: Tensor | fx.Node


@dataclass(slots=True)
class IndexPlan:
    """The result of the sweeps. picks: by value.

    fills: values that are `fill` outside an index: support and fill. chosen: calls computed only at
    an index: their letter, and its index. wants: per call and operand, the support that it reads.
    shifts: contractions whose first factor is not 0 where it is not read, with its fact there.
    added: sums that add one operand at an index. reads: per value, the support that is read; the
    whole value if it is read in two ways.
    """

    relations: Relations
    facts: Facts
    picks: Mapping[Key, IndexedSupport]
    fills: dict[Key, tuple[RunTimeSupports, Tensor]] = field(default_factory=dict)
    chosen: dict[fx.Node, tuple[str, RunTimeIndex]] = field(default_factory=dict)
    wants: dict[tuple[fx.Node, int], RunTimeSupports] = field(default_factory=dict)
    shifts: dict[fx.Node, tuple[str, Fact]] = field(default_factory=dict)
    added: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[Key, RunTimeSupports] = field(default_factory=dict)

    def output_supports(self, node: fx.Node, k: int) -> RunTimeSupports:
        """The support at which a call computes an output."""
        relation = self.relations.get(node)
        if node not in self.chosen or not isinstance(relation, Relation):
            return WHOLE
        letter, index = self.chosen[node]
        return at_letter(relation, relation.outs[k], letter, index)

    def value_supports(self, key: Key) -> RunTimeSupports:
        """The support at which a value is available to readers."""
        pick = self.picks.get(key)
        if pick is None:
            return self.output_supports(*key)
        return WHOLE if isinstance(pick.fill, fx.Node) else ((pick.axis, pick.index),)


def plan_indices(
    graph: fx.Graph, relations: Relations, facts: Facts, picks: Mapping[Key, IndexedSupport], *, push: bool
) -> IndexPlan:
    """The plan of which call uses which index.

    push: False gathers and scatters only at the picks, so that every call is computed whole: the
    reference for the plan with push. Raises BadInput for a pick of anything but the output of a
    call.
    """
    for node, k in picks:
        if node.op != "call_function" or not isinstance(schema.outputs(node)[k], Tensor):
            raise BadInput(f"expected a pick of the output of a call, got {node.name!r}")
    plan = IndexPlan(relations, facts, picks)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            _visit_forward(plan, node, push)
    for node in reversed(graph.nodes):
        _visit_backward(plan, node, push)
    return plan


def letter_at(relation: Relation, axes: Axes, axis: int, index: RunTimeIndex) -> str | None:
    """The letter of an axis whose positions are in an index, or None."""
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


def at_letter(relation: Relation, axes: Axes, letter: str, index: RunTimeIndex) -> RunTimeSupports:
    """The index of a letter, on the axis of a tensor that has it; WHOLE where none has."""
    for axis, letters in enumerate(axes):
        if letter in letters:
            k = letters.index(letter)
            outer, inner = _count(relation, letters[:k]), _count(relation, letters[k + 1 :])
            if outer is None or inner is None:
                return WHOLE
            return ((axis, RunTimeIndex(index.source, index.size, outer, inner)),)
    return WHOLE


def pointwise_letters(relation: Relation) -> frozenset[str]:
    """Letters along which every position of every output depends on that position alone."""
    output_letters = [relation.letters(axes) for axes in relation.outs]
    if relation.back or relation.entry.free or not output_letters:
        return frozenset()
    excluded = relation.window | relation.complete | relation.moved | whole_letters(relation)
    common = frozenset.intersection(*output_letters) - excluded - relation.contracted
    return frozenset(a for a in common if relation.size[a] is not None)


def _count(relation: Relation, letters: Sequence[str]) -> int | None:
    total = 1
    for letter in letters:
        size = relation.size[letter]
        if size is None:
            return None
        total *= size
    return total


def _visit_forward(plan: IndexPlan, node: fx.Node, push: bool) -> None:
    """Forward: the outputs of a call whose operands are constant outside an index."""
    relation = plan.relations.get(node)
    picks = {k: plan.picks[node, k] for k in range(len(schema.outputs(node))) if (node, k) in plan.picks}
    sources = {pick.index.source for pick in picks.values()}
    if push and isinstance(relation, Relation):
        for index in _indices(plan, relation):
            if sources <= {index.source} and _known_outside(plan, relation, index):
                break
    for k, pick in picks.items():
        plan.fills.pop((node, k), None)
        if push and isinstance(pick.fill, Tensor):
            value = schema.outputs(node)[k]
            plan.fills[node, k] = (((pick.axis, pick.index),), _expand_rank(pick.fill, value))


def _indices(plan: IndexPlan, relation: Relation) -> list[RunTimeIndex]:
    """The indices outside of which some operand is constant, one per source."""
    indices: dict[fx.Node, RunTimeIndex] = {}
    for operand in relation.operands:
        if isinstance(operand.value, fx.Node) and key_of(operand.value) in plan.fills:
            for _, index in plan.fills[key_of(operand.value)][0]:
                indices.setdefault(index.source, index)
    return list(indices.values())


def _letters(plan: IndexPlan, relation: Relation, index: RunTimeIndex) -> dict[int, str]:
    """Per operand that is constant outside an index, the letter of the index in it."""
    letters: dict[int, str] = {}
    for k, operand in enumerate(relation.operands):
        key = key_of(operand.value) if isinstance(operand.value, fx.Node) else None
        for axis, other in plan.fills[key][0] if key in plan.fills else ():
            letter = letter_at(relation, relation.ins[k], axis, other)
            if other.source is index.source and letter is not None:
                letters[k] = letter
    return letters


def _known_outside(plan: IndexPlan, relation: Relation, index: RunTimeIndex) -> bool:
    """Whether the outputs are constant outside an index; if so, the call is set to that index."""
    letters = _letters(plan, relation, index)
    if len(set(letters.values())) != 1:
        return False
    (letter,) = set(letters.values())
    if letter not in pointwise_letters(relation):
        return False
    facts = dict(plan.facts)
    for k, operand in enumerate(relation.operands):
        if k in letters:
            key = key_of(operand.value)
            facts[key] = _fact(plan.fills[key][1])
    outputs = forward(relation, facts, plan.relations)
    if any(fact is None or not bool(fact.known.all()) for fact in outputs):
        return False
    plan.chosen[relation.node] = (letter, RunTimeIndex(index.source, index.size))
    for k, fact in enumerate(outputs):
        assert fact is not None
        value = schema.outputs(relation.node)[k]
        supports = at_letter(relation, relation.outs[k], letter, index)
        plan.fills[relation.node, k] = (supports, _expand_rank(fact.fill, value))
    return True


def _fact(fill: Tensor) -> Fact:
    return finite_fact(torch.ones([1] * fill.ndim, dtype=torch.bool), fill)


def _expand_rank(fill: Tensor, value: Tensor) -> Tensor:
    """A fill in the dtype of a value, with all of its axes."""
    shape = [1] * (value.ndim - fill.ndim) + list(fill.shape)
    return fill.to(value.dtype).reshape(shape)


def _visit_backward(plan: IndexPlan, node: fx.Node, push: bool) -> None:
    """Backward: the support at which a call computes its outputs, and so reads its operands."""
    if node.op == "output":
        for source in node.all_input_nodes:
            _add_read(plan, source, WHOLE)
        return
    relation = plan.relations.get(node)
    keys = [(node, k) for k in range(len(schema.outputs(node)))]
    if relation is None or not any(key in plan.reads for key in keys):
        return
    if not isinstance(relation, Relation):
        for source in node.all_input_nodes:
            _add_read(plan, source, WHOLE)
        return
    if push and node not in plan.chosen:
        _choose(plan, relation)
    wants = _wants(plan, relation, push)
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node):
            plan.wants[node, k] = wants[k]
            if operand.value.op != "get_attr":
                _add_read(plan, operand.value, wants[k])


def _add_read(plan: IndexPlan, source: fx.Node, supports: RunTimeSupports) -> None:
    """Add a read of a value; one read in two ways is computed whole."""
    if source.op == "get_attr" or not isinstance(value_of(source), Tensor):
        return
    key = key_of(source)
    plan.reads[key] = supports if plan.reads.get(key, supports) == supports else WHOLE


def _choose(plan: IndexPlan, relation: Relation) -> None:
    """Compute a call at an index where all reads of it are at that index."""
    node, supports = relation.node, set()
    for k in range(len(relation.outs)):
        if (node, k) not in plan.reads:
            continue
        pick = plan.picks.get((node, k))
        support = ((pick.axis, pick.index),) if pick is not None else plan.reads[node, k]
        axis, index = support[0] if support else (0, None)
        letter = letter_at(relation, relation.outs[k], axis, index) if index else None
        supports.add((letter, index and RunTimeIndex(index.source, index.size)))
    if len(supports) == 1:
        letter, index = supports.pop()
        if letter is not None and index is not None and letter in pointwise_letters(relation):
            plan.chosen[node] = (letter, index)


def _wants(plan: IndexPlan, relation: Relation, push: bool) -> list[RunTimeSupports]:
    """The supports at which a call reads its operands."""
    wants = [WHOLE] * len(relation.operands)
    if relation.node in plan.chosen:
        letter, index = plan.chosen[relation.node]
        wants = [at_letter(relation, axes, letter, index) for axes in relation.ins]
    if push:
        summed = _summed_letter(plan, relation)
        for k, axes in enumerate(relation.ins):
            if summed is not None:
                more = at_letter(relation, axes, *summed)
                wants[k] = wants[k] + more if _is_disjoint(wants[k], more) else wants[k]
        if summed is None and relation.node not in plan.chosen:
            _add_at(plan, relation, wants)
    return wants


def _is_disjoint(a: RunTimeSupports, b: RunTimeSupports) -> bool:
    return not {axis for axis, _ in a} & {axis for axis, _ in b}


def _summed_letter(plan: IndexPlan, relation: Relation) -> tuple[str, RunTimeIndex] | None:
    """The letter that a contraction sums over an index alone, and the index: elsewhere one factor
    is zero, or a constant times constants. Else None."""
    if relation.entry.fill != "sum" or relation.back:
        return None
    for index in _indices(plan, relation):
        letters = _letters(plan, relation, index)
        summed = {a for k, a in letters.items() if k in relation.factors} & relation.contracted
        if len(summed) != 1 or not summed.isdisjoint(whole_letters(relation)):
            continue
        (letter,) = summed
        wide = [axes for axes in relation.ins if at_letter(relation, axes, letter, index)]
        if len(wide) != len(relation.factors) or _is_axis_shared(plan, relation, letter):
            continue
        if _is_rest_known(plan, relation, letters, letter):
            return letter, index
    return None


def _is_axis_shared(plan: IndexPlan, relation: Relation, letter: str) -> bool:
    """Whether some axis has both the summed letter and the one that the call is computed at."""
    if relation.node not in plan.chosen:
        return False
    other = plan.chosen[relation.node][0]
    return any({letter, other} <= set(axis) for axes in relation.ins for axis in axes)


def _is_rest_known(plan: IndexPlan, relation: Relation, letters: dict[int, str], letter: str) -> bool:
    """Whether the contribution outside the index is known; adds it to the plan if not 0."""
    factors = [k for k, a in letters.items() if a == letter and k in relation.factors]
    fills = [plan.fills[key_of(relation.operands[k].value)][1] for k in factors]
    if any(bool((fill == 0).all()) for fill in fills):
        return True
    other = [k for k in relation.factors if k not in factors]
    if factors != [relation.factors[0]] or not all(schema.is_constant(relation.operands[k].value) for k in other):
        return False
    fact = _fact(fills[0])
    summed = is_absorbing(relation) and bool(one_value(relation, fact).known.all())
    if relation.is_grouped or not summed:
        return False  # A fill that varies along the image has no border map.
    plan.shifts[relation.node] = (letter, fact)
    return True


def _add_at(plan: IndexPlan, relation: Relation, wants: list[RunTimeSupports]) -> None:
    """a + scatter(b): add b at its positions. An operand that is read at no index stays whole."""
    arguments = schema.arguments(relation.node)
    if relation.node.target is not torch.ops.aten.add.Tensor or arguments.get("alpha", 1) != 1:
        return
    if not relation.ins[0] == relation.ins[1] == relation.outs[0]:
        return
    dtype = fake(relation.node).dtype
    for k in (1, 0):
        value, other = relation.operands[k].value, relation.operands[1 - k].value
        if schema.is_constant(value) or schema.is_constant(other) or key_of(value) not in plan.fills:
            continue
        supports, fill = plan.fills[key_of(value)]
        same = fake(value).dtype == fake(other).dtype == dtype
        if same and len(supports) == 1 and bool((fill == 0).all()):
            wants[k] = supports
            plan.added[relation.node] = k
            return
