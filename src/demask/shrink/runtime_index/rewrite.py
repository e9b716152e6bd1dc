"""A program whose run-time indices come as inputs: the same outputs from less work.

    indexed(analysis, picks)(x, index) == masked(analysis, picks)(x, index)

where `masked` computes every value whole and then puts the fill wherever the index does not say:
the network "with the other channels set to their fill, by hand". In `indexed` what the index leaves
out is not computed: weights are gathered, activations come small, and are scattered only where a
reader wants the whole axis.
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
from demask.shrink.emit.adapt import Made, marked
from demask.shrink.emit.border_map import absorbed
from demask.shrink.emit.context import EmitContext
from demask.shrink.emit.contraction import plus_constants
from demask.shrink.layout.cells import At, Layout, RunTimeIndex
from demask.shrink.layout.placement import Placement
from demask.shrink.runtime_index.analysis import IndexPlan, Pick, planned

aten = torch.ops.aten


def with_inputs(
    program: Program, more: Mapping[str, Tensor | int]
) -> tuple[Program, dict[str, fx.Node], dict[fx.Node, fx.Node]]:
    """The program with more positional inputs, behind those it has, and their nodes by name.

    more: by name, an int n for an index into n positions (int64 [k], k free), or the fake value of
    an input like it. Also gives the map from the old nodes to the new.
    """
    editor = GraphEditor(program)
    graph = editor.graph
    spec = program.in_spec
    leaves = spec.child(0).num_leaves
    places = [node for node in graph.nodes if node.op == "placeholder"]
    count = spec.child(0).num_children
    names, made = list(program.names), {}
    mode = editor.values.mode
    behind = places[leaves - 1] if leaves else None
    for k, (name, given) in enumerate(more.items()):
        first = next(iter(graph.nodes)) if behind is None else behind
        with graph.inserting_before(first) if behind is None else graph.inserting_after(first):
            node = graph.placeholder(name)
        node.meta["val"] = _index_value(mode, name, given) if isinstance(given, int) else given
        names.insert(count + k, name)
        made[name] = behind = node
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    wide = ((*args, *[0] * len(more)), kwargs)
    new = replace(editor.finish(), in_spec=pytree.tree_structure(wide), names=tuple(names))
    return new, made, editor.copies


def _index_value(mode: Any, name: str, size: int) -> Tensor:
    """A fake int64 index of a length that only run time tells."""
    if size < 2:
        raise BadInput(f"expected an index into at least 2 positions, found {size} for {name!r}")
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    example = torch.zeros(max(2, size // 2), dtype=torch.int64)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))


def indexed(analysis: Analysis, picks: Mapping[Key, Pick]) -> Program:
    """The program that computes what `masked` does, and picked values at their indices alone.

    Indices hold at least one position: torch has no convolution of no channels.
    """
    return _written(analysis, picks, push=True)


def masked(analysis: Analysis, picks: Mapping[Key, Pick]) -> Program:
    """The program that computes all, and puts fills where the indices do not say."""
    return _written(analysis, picks, push=False)


def _written(analysis: Analysis, picks: Mapping[Key, Pick], *, push: bool) -> Program:
    program, relations = analysis.program, analysis.relations
    # What is known of a picked value holds no longer: elsewhere it is its fill.
    opaque = {node: Declined("what is computed of it comes at run time") for node, _ in picks}
    facts = replace(analysis, bound={**relations, **opaque}).known
    plan = planned(program.graph, relations, facts, picks, push=push)
    walk = _IndexRewriter(program, plan)
    for node in program.graph.nodes:
        walk.visit(node)
    return walk.editor.finish()


class _IndexRewriter(EmitContext):
    """Appends every live call again, operands at the indices that the plan says."""

    def __init__(self, program: Program, plan: IndexPlan):
        whole = {key: _whole(schema.outputs(key[0])[key[1]]) for key in plan.reads}
        super().__init__(
            program, plan.relations, plan.facts, Needs({}, {}, {}), Placement(whole, {})
        )
        self.plan = plan

    def keep(self, node: fx.Node, k: int, made: fx.Node, layout: Layout | None) -> None:
        """Note what a call made, and at which indices; what is picked is taken or put."""
        value = schema.outputs(node)[k]
        if not isinstance(value, Tensor):
            return
        at, pick = self.plan.made(node, k), self.plan.picks.get((node, k))
        fill = self.plan.fills.get((node, k))
        self.adapter.made[node, k] = Made(made, _whole(value), at, fill[1] if fill else None)
        if pick is None:
            return
        mine: At = ((pick.axis, pick.index),)
        small = self.adapter.adapt(self._named(node, k), _whole(value), at=mine)
        if isinstance(pick.fill, Tensor):
            shape = [1] * (value.ndim - pick.fill.ndim) + list(pick.fill.shape)
            held = Made(small, _whole(value), mine, pick.fill.to(value.dtype).reshape(shape))
        else:
            base = self.adapter.made[pick.fill, 0].node
            held = Made(self.adapter.put(small, pick.axis, pick.index, base), _whole(value))
        self.adapter.made[node, k] = held

    def _named(self, node: fx.Node, k: int) -> fx.Node:
        """A node that stands for output k of a call."""
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
            self._added(relation)
        else:
            self._plain(relation)

    def operand(self, relation: Relation, k: int, *, broadcast: bool = False) -> Any:
        source = relation.operands[k].value
        if not isinstance(source, fx.Node):
            return source
        value = source.meta["val"]
        value = value if isinstance(value, Tensor) else schema.outputs(source)[0]
        at = self.plan.wants[relation.node, k]
        return self.adapter.adapt(source, _whole(value), at=at)

    def sizes(self, node: fx.Node, k: int, layout: Layout) -> list[Any]:
        at = dict(self.plan.made(node, k))
        value = schema.outputs(node)[k]
        return [self.length(at[a]) if a in at else self.pool.size(n)
                for a, n in enumerate(value.shape)]  # fmt: skip

    def length(self, index: RunTimeIndex) -> Any:
        """How many positions an index tells, as a call argument."""
        size = self.pool.size(self._length(index))
        inner = index.outer * index.inner
        return size if inner == 1 else self.editor.call(operator.mul, size, inner)

    def _plain(self, relation: Relation) -> None:
        """The same op, on less."""
        node = relation.node
        values = [self.operand(relation, k) for k in range(len(relation.operands))]
        if node in self.plan.shifts:
            values[relation.factors[0]] = self._shifted(relation, values[relation.factors[0]])
        args, kwargs = self._again(relation, values)
        if relation.entry.fill != "sum":
            self.finish(node, node.target, args, kwargs, None)
            return
        made = self._product(relation, values, args, kwargs)
        if node in self.plan.shifts:
            made = self._with_rest(relation, made)
        made.meta = {**node.meta, **made.meta}
        self.keep(node, 0, made, None)

    def _product(self, relation: Relation, values: list[Any], args: Any, kwargs: Any) -> fx.Node:
        """A contraction of a shape that is told; a run on fake values takes long to find it."""
        node, first = relation.node, values[relation.factors[0]]
        if not relation.window or first.meta["val"].dtype != node.meta["val"].dtype:
            return self.editor.call(node.target, *args, **kwargs)
        return self.editor.call_shaped(self.shape(node, None), first, node.target, args, kwargs)

    def shape(self, node: fx.Node, layout: Layout | None) -> list[Any]:
        at = dict(self.plan.made(node, 0))
        return [
            n if axis not in at else at[axis].outer * at[axis].inner * self._length(at[axis])
            for axis, n in enumerate(node.meta["val"].shape)
        ]

    def _length(self, index: RunTimeIndex) -> Any:
        return self.adapter.made[index.source, 0].node.meta["val"].shape[0]

    def _again(self, relation: Relation, values: list[Any]) -> tuple[Any, Any]:
        """The arguments of a call; sizes among them follow what is made."""
        node = relation.node
        if node in self.plan.chosen:
            layouts = [_whole(value) for value in schema.outputs(node)]
            return self.arguments(relation, values, layouts, self._groups(relation))
        names = {operand.name for operand in relation.operands}
        found = schema.arguments(node)
        plain = {name: v if name in names else self.argument(v) for name, v in found.items()}
        return schema.call(node.target, schema.replaced(plain, relation.operands, values))

    def _groups(self, relation: Relation) -> dict[str, Any]:
        """A grouped convolution of which some groups are made has as many groups."""
        node = relation.node
        if not relation.is_grouped or node not in self.plan.chosen:
            return {}
        letter, index = self.plan.chosen[node]
        places = [*(relation.ins[k] for k in relation.factors), relation.outs[0]]
        every = all(letter in relation.letters(axes) for axes in places)
        return {"groups": self.length(index)} if every else {}

    def _shifted(self, relation: Relation, x: fx.Node) -> fx.Node:
        """The first factor less its fill, so that what is left out is zero."""
        _, fact = self.plan.shifts[relation.node]
        first = relation.factors[0]
        at = self.plan.wants[relation.node, first]
        fill = self.pool.constant(fact.fill, "fill")
        for axis, index in at:
            if fact.fill.shape[axis] != 1:
                where = self.adapter.positions(index)
                fill = self.editor.call(aten.index_select.default, fill, axis, where)
        return self.editor.call(aten.sub.Tensor, x, fill)

    def _with_rest(self, relation: Relation, made: fx.Node) -> fx.Node:
        """What the fills leave, added: a bias, or a border map under zero padding."""
        letter, fact = self.plan.shifts[relation.node]
        first = relation.factors[0]
        source = relation.operands[first].value
        facts = {**self.facts, key_of(source): fact}
        kept = tuple(() if letter in axis else None for axis in relation.ins[first])
        whole = _whole(relation.node.meta["val"])
        left = absorbed(relation, facts, kept)
        return plus_constants(self, relation, whole, made, left, self.plan.made(relation.node, 0))

    def _added(self, relation: Relation) -> None:
        """a + scatter(b): b is added at its positions."""
        k = self.plan.added[relation.node]
        ((axis, index),) = self.plan.wants[relation.node, k]
        small, other = self.operand(relation, k), self.operand(relation, 1 - k)
        args = (other, axis, self.adapter.positions(index), small)
        made = marked(self.editor.call(aten.index_add.default, *args), "scatter-add")
        made.meta = {**relation.node.meta, **made.meta}
        self.keep(relation.node, 0, made, None)


def _whole(value: Any) -> Layout:
    return (None,) * value.ndim
