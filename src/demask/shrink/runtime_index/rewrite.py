"""A program whose run-time indices are inputs: the same outputs from less work.

    emit_indexed(analysis, picks)(x, index) == emit_masked(analysis, picks)(x, index)

`emit_masked` computes every value whole and then writes the fill wherever the index has no
position: the reference. `emit_indexed` does not compute positions outside the index: weights are
gathered, activations are small, and are scattered only where a reader needs the whole axis.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.compat.dynamo import ConstantSource
from demask.compat.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.known import Key, key_of
from demask.facts.needed import Needs
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Declined, Relation, schema
from demask.ops.schema import fake
from demask.shrink.emit.adapt import EmittedValue, mark_effect
from demask.shrink.emit.border_map import absorb_constants
from demask.shrink.emit.context import EmitContext
from demask.shrink.emit.contraction import add_constants
from demask.shrink.layout.cells import Layout, RunTimeIndex, RunTimeSupports
from demask.shrink.layout.placement import Placement
from demask.shrink.runtime_index.analysis import IndexedSupport, IndexPlan, plan_indices

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
        small = self.adapter.adapt(self._output_node(node, k), _whole(value), run_time=support)
        if isinstance(pick.fill, Tensor):
            shape = [1] * (value.ndim - pick.fill.ndim) + list(pick.fill.shape)
            emitted = EmittedValue(small, _whole(value), support, pick.fill.to(value.dtype).reshape(shape))
        else:
            base = self.adapter.emitted[pick.fill, 0].node
            emitted = EmittedValue(self.adapter.scatter_at(small, pick.axis, pick.index, base), _whole(value))
        self.adapter.emitted[node, k] = emitted

    def _output_node(self, node: fx.Node, k: int) -> fx.Node:
        """A node of output k of a call."""
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
