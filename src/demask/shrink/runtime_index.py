"""Run-time supports: calls that are computed only at an index, where the index is an input.

An `IndexedSupport` states about one value: along this axis only the positions in this index are
computed; elsewhere it is a constant (or a value that is an input). The consequences follow from the
relations, in two sweeps:

    forward:   op(scatter(x, fill)) == scatter(op(x), op(fill))       along axes that an op carries
    backward:  op(x)[index] == op(x[index])                           likewise

and at a contraction over the axis, sum_c x_c · w_c == sum_{c in index} (x_c − fill_c) · w_c + the
contribution of the fills (nothing, a bias or a border map). A value that readers need in several
ways is computed whole.

The program then has the indices as inputs, and computes the same outputs from less work:

    emit_indexed(analysis, picks)(x, index) == emit_masked(analysis, picks)(x, index)

`emit_masked` computes every value whole and then writes the fill wherever the index has no
position: the reference. `emit_indexed` does not compute positions outside the index: weights are
gathered, activations are small, and are scattered only where a reader needs the full axis.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.compat.dynamo import ConstantSource
from demask.compat.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.carriers import one_value
from demask.facts.known import Facts, Key, Relations, forward, is_absorbing, key_of, value_of
from demask.facts.masks import Fact, finite_fact
from demask.facts.needed import Needs
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Declined, Relation, schema
from demask.ops.notation import Axes
from demask.ops.schema import fake
from demask.shrink.emit.adapt import EmittedValue, mark_effect
from demask.shrink.emit.border_map import absorb_constants
from demask.shrink.emit.context import EmitContext
from demask.shrink.emit.contraction import add_constants
from demask.shrink.layout.cells import Layout, RunTimeIndex, RunTimeSupports
from demask.shrink.layout.placement import Placement
from demask.shrink.layout.ties import whole_letters

aten = torch.ops.aten


def add_inputs(
    program: Program, more: Mapping[str, Tensor | int]
) -> tuple[Program, dict[str, fx.Node], dict[fx.Node, fx.Node]]:
    """The program with more positional inputs, after the existing ones; their nodes by name; the
    map from old nodes to new.

    more: by name, an int n for an index into n positions (int64 [k], k free), or the fake value of
    a similar input.
    """
    editor = GraphEditor(program)
    graph = editor.graph
    spec = program.in_spec
    leaves = spec.child(0).num_leaves
    places = [node for node in graph.nodes if node.op == "placeholder"]
    count = spec.child(0).num_children
    names, inputs = list(program.names), {}
    mode = editor.values.mode
    last = places[leaves - 1] if leaves else None
    for k, (name, value) in enumerate(more.items()):
        first = next(iter(graph.nodes)) if last is None else last
        with graph.inserting_before(first) if last is None else graph.inserting_after(first):
            node = graph.placeholder(name)
        node.meta["val"] = _index_value(mode, name, value) if isinstance(value, int) else value
        names.insert(count + k, name)
        inputs[name] = last = node
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    wide = ((*args, *[0] * len(more)), kwargs)
    new = replace(editor.finish(), in_spec=pytree.tree_structure(wide), names=tuple(names))
    return new, inputs, editor.copies


def _index_value(mode: Any, name: str, size: int) -> Tensor:
    """A fake int64 index whose length is known only at run time."""
    if size < 2:
        raise BadInput(f"expected an index into at least 2 positions, got {size} for {name!r}")
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    example = torch.zeros(max(2, size // 2), dtype=torch.int64)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))


def emit_indexed(analysis: Analysis, picks: Mapping[Key, IndexedSupport]) -> Program:
    """The program that computes the same as `emit_masked`, and picked values only at their indices.

    Indices have at least one position: torch has no convolution of no channels.
    """
    return _rewrite(analysis, picks, push=True)


def emit_masked(analysis: Analysis, picks: Mapping[Key, IndexedSupport]) -> Program:
    """The program that computes all positions, and writes fills outside the indices."""
    return _rewrite(analysis, picks, push=False)


def _rewrite(analysis: Analysis, picks: Mapping[Key, IndexedSupport], *, push: bool) -> Program:
    program, relations = analysis.program, analysis.relations
    # The facts of a picked value do not apply: outside the index it is its fill.
    opaque = {node: Declined("its support is known only at run time") for node, _ in picks}
    facts = replace(analysis, bound={**relations, **opaque}).known
    plan = plan_indices(program.graph, relations, facts, picks, push=push)
    rewriter = _IndexRewriter(program, plan)
    for node in program.graph.nodes:
        rewriter.visit(node)
    return rewriter.editor.finish()


class _IndexRewriter(EmitContext):
    """Appends every live call again, operands at the indices in the plan."""

    def __init__(self, program: Program, plan: IndexPlan):
        whole = {key: _whole(schema.outputs(key[0])[key[1]]) for key in plan.reads}
        super().__init__(program, plan.relations, plan.facts, Needs({}, {}, {}), Placement(whole, {}))
        self.plan = plan

    def emit(self, node: fx.Node, k: int, new: fx.Node, layout: Layout | None) -> None:
        """Set the node of an output and its support; a picked value is gathered or scattered."""
        value = schema.outputs(node)[k]
        if not isinstance(value, Tensor):
            return
        supports, pick = self.plan.output_supports(node, k), self.plan.picks.get((node, k))
        fill = self.plan.fills.get((node, k))
        self.adapter.emitted[node, k] = EmittedValue(new, _whole(value), supports, fill[1] if fill else None)
        if pick is None:
            return
        support: RunTimeSupports = ((pick.axis, pick.index),)
        small = self.adapter.adapt(self._node_of_output(node, k), _whole(value), run_time=support)
        if isinstance(pick.fill, Tensor):
            shape = [1] * (value.ndim - pick.fill.ndim) + list(pick.fill.shape)
            emitted = EmittedValue(small, _whole(value), support, pick.fill.to(value.dtype).reshape(shape))
        else:
            base = self.adapter.emitted[pick.fill, 0].node
            emitted = EmittedValue(self.adapter.scatter_at(small, pick.axis, pick.index, base), _whole(value))
        self.adapter.emitted[node, k] = emitted

    def _node_of_output(self, node: fx.Node, k: int) -> fx.Node:
        if not isinstance(node.meta.get("val"), (list, tuple)):
            return node
        return next(n for n in node.users if n.target is operator.getitem and key_of(n)[1] == k)

    def _call(self, node: fx.Node) -> None:
        live = [k for k in range(len(schema.outputs(node))) if (node, k) in self.placement.value]
        if not live:
            return
        relation = self.relations[node]
        if isinstance(relation, Declined):
            args, kwargs = self.argument(node.args), self.argument(node.kwargs)
            self.finish(node, node.target, args, kwargs, None)
        elif node in self.plan.added:
            self._emit_added(relation)
        else:
            self._emit_plain(relation)

    def operand(self, relation: Relation, k: int, *, broadcast: bool = False) -> Any:
        source = relation.operands[k].value
        if not isinstance(source, fx.Node):
            return source
        value = fake(source)
        value = value if isinstance(value, Tensor) else schema.outputs(source)[0]
        supports = self.plan.wants[relation.node, k]
        return self.adapter.adapt(source, _whole(value), run_time=supports)

    def sizes(self, node: fx.Node, k: int, layout: Layout) -> list[Any]:
        supports = dict(self.plan.output_supports(node, k))
        value = schema.outputs(node)[k]
        return [self.length(supports[a]) if a in supports else self.store.size(n) for a, n in enumerate(value.shape)]

    def length(self, index: RunTimeIndex) -> Any:
        """The number of positions in an index, as a call argument."""
        size = self.store.size(self._length(index))
        inner = index.outer * index.inner
        return size if inner == 1 else self.editor.call(operator.mul, size, inner)

    def _emit_plain(self, relation: Relation) -> None:
        """Emit the same op, on less."""
        node = relation.node
        values = [self.operand(relation, k) for k in range(len(relation.operands))]
        if node in self.plan.shifts:
            values[relation.factors[0]] = self._shift(relation, values[relation.factors[0]])
        args, kwargs = self._arguments(relation, values)
        if relation.entry.fill != "sum":
            self.finish(node, node.target, args, kwargs, None)
            return
        value = self._product(relation, values, args, kwargs)
        if node in self.plan.shifts:
            value = self._with_rest(relation, value)
        value.meta = {**node.meta, **value.meta}
        self.emit(node, 0, value, None)

    def _product(self, relation: Relation, values: list[Any], args: Any, kwargs: Any) -> fx.Node:
        """A contraction of known shape, since a run on fake values is slow."""
        node, first = relation.node, values[relation.factors[0]]
        if not relation.window or fake(first).dtype != fake(node).dtype:
            return self.editor.call(node.target, *args, **kwargs)
        return self.editor.call_shaped(self.shape(node, None), first, node.target, args, kwargs)

    def shape(self, node: fx.Node, layout: Layout | None) -> list[Any]:
        supports = dict(self.plan.output_supports(node, 0))
        return [
            n if axis not in supports else supports[axis].outer * supports[axis].inner * self._length(supports[axis])
            for axis, n in enumerate(fake(node).shape)
        ]

    def _length(self, index: RunTimeIndex) -> Any:
        return fake(self.adapter.emitted[index.source, 0].node).shape[0]

    def _arguments(self, relation: Relation, values: list[Any]) -> tuple[Any, Any]:
        """The arguments of a call; sizes among them are those of its outputs."""
        node = relation.node
        if node in self.plan.chosen:
            layouts = [_whole(value) for value in schema.outputs(node)]
            return self.arguments(relation, values, layouts, self._groups(relation))
        names = {operand.name for operand in relation.operands}
        arguments = schema.arguments(node)
        plain = {name: v if name in names else self.argument(v) for name, v in arguments.items()}
        return schema.bind_arguments(node.target, schema.replace_operands(plain, relation.operands, values))

    def _groups(self, relation: Relation) -> dict[str, Any]:
        """The number of groups of a grouped convolution of which some groups are computed."""
        node = relation.node
        if not relation.is_grouped or node not in self.plan.chosen:
            return {}
        letter, index = self.plan.chosen[node]
        places = [*(relation.ins[k] for k in relation.factors), relation.outs[0]]
        every = all(letter in relation.letters(axes) for axes in places)
        return {"groups": self.length(index)} if every else {}

    def _shift(self, relation: Relation, x: fx.Node) -> fx.Node:
        """The first factor less its fill, so that it is zero outside the index."""
        _, fact = self.plan.shifts[relation.node]
        first = relation.factors[0]
        supports = self.plan.wants[relation.node, first]
        fill = self.store.constant(fact.fill, "fill")
        for axis, index in supports:
            if fact.fill.shape[axis] != 1:
                positions = self.adapter.positions(index)
                fill = self.editor.call(aten.index_select.default, fill, axis, positions)
        return self.editor.call(aten.sub.Tensor, x, fill)

    def _with_rest(self, relation: Relation, value: fx.Node) -> fx.Node:
        """The output plus the contribution of the fills: a bias or a border map."""
        letter, fact = self.plan.shifts[relation.node]
        first = relation.factors[0]
        source = relation.operands[first].value
        facts = {**self.facts, key_of(source): fact}
        layout = tuple(() if letter in axis else None for axis in relation.ins[first])
        whole = _whole(fake(relation.node))
        constants = absorb_constants(relation, facts, layout)
        return add_constants(self, relation, whole, value, constants, self.plan.output_supports(relation.node, 0))

    def _emit_added(self, relation: Relation) -> None:
        """Emit a + scatter(b): b is added at its positions."""
        k = self.plan.added[relation.node]
        ((axis, index),) = self.plan.wants[relation.node, k]
        small, other = self.operand(relation, k), self.operand(relation, 1 - k)
        args = (other, axis, self.adapter.positions(index), small)
        total = mark_effect(self.editor.call(aten.index_add.default, *args), "scatter-add")
        total.meta = {**relation.node.meta, **total.meta}
        self.emit(relation.node, 0, total, None)


def _whole(value: Any) -> Layout:
    return (None,) * value.ndim


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
    full value if it is read in two ways.
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
