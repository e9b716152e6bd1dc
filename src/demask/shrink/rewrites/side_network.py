"""Side networks: values that depend on the size of the input alone are computed for one image.

    f(x) == f(x * live + side * ~live)      side: the network of x run on constants, batch 1

A constant channel that entered a zero-padded depthwise convolution is a map, the same for every
image of one size. Such channels are split off their value, and the calls that compute them are
repeated for one image. A contraction that reads both is split in two, for its sum over side
channels is again one map for the full batch. Nothing is cut here: masks are added that show what
nothing needs, and the following passes remove it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.input_independent import IndependentMasks, as_known, batch_sizes, finite_argument, has_batch_symbol
from demask.facts.known import Facts, Key, Relations, key_of
from demask.facts.needed import Needs, needed
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.numerics import has_any
from demask.ops import Relation, schema
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten


def split_side_network(analysis: LayoutAnalysis) -> Program | None:
    """The program with its side networks split off; None where it has none."""
    program, relations, facts = analysis.program, analysis.relations, analysis.known
    batch = batch_sizes(program.graph)
    if not batch:
        return None
    independent = analysis.input_independent
    varying = {key for key, mask in independent.items() if has_any(mask & ~facts[key].known)}
    if not varying:
        return None
    needs = needed(program.graph, relations, as_known(facts, independent))
    parts = _side_positions(varying, facts, independent, needs, batch)
    parts = {key: part for key, part in parts.items() if _is_computed_per_image(key, relations, varying, batch)}
    if not parts:
        return None
    return _Splitter(program, relations, facts, independent, needs, batch, parts).run()


def _side_positions(
    varying: set[Key], facts: Facts, independent: IndependentMasks, needs: Needs, batch: set[sympy.Symbol]
) -> dict[Key, Tensor]:
    """Per value, its positions that are read and input-independent but not known, as a mask that
    varies along one axis at most."""
    parts = {}
    for key in varying:
        value = schema.outputs(key[0])[key[1]]
        if not value.dtype.is_floating_point or not _has_batch_axis(key, batch):
            continue
        mask = _along_one(needs.value[key] & independent[key] & ~facts[key].known)
        if bool(mask.any()):
            parts[key] = mask
    return parts


def _is_computed_per_image(key: Key, relations: Relations, varying: set[Key], batch: set[sympy.Symbol]) -> bool:
    """Whether input-independent positions are computed for every image, instead of only moved from
    a side network to their readers."""
    if key not in varying or not _has_batch_axis(key, batch):
        return False
    relation = relations.get(key[0])
    if not isinstance(relation, Relation) or relation.entry.fill != "same" or relation.window:
        return True
    sources = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
    return any(_is_computed_per_image(key_of(source), relations, varying, batch) for source in sources)


def _has_batch_axis(key: Key, batch: set[sympy.Symbol]) -> bool:
    return any(has_batch_symbol(size, batch) for size in schema.outputs(key[0])[key[1]].shape)


def _along_one(mask: Tensor) -> Tensor:
    """The largest part of a mask that varies along one axis only."""
    long = [k for k, n in enumerate(mask.shape) if n != 1]
    if len(long) < 2:
        return mask
    lines = [mask.all(dim=[k for k in long if k != axis], keepdim=True) for axis in long]
    return max(lines, key=lambda line: float(line.float().mean()))


@dataclass(slots=True)
class _Splitter:
    """Walks the old graph and appends to the new one."""

    program: Program
    relations: Relations
    facts: Facts
    independent: IndependentMasks
    needs: Needs
    batch: set[sympy.Symbol]
    parts: dict[Key, Tensor]
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sides: dict[fx.Node, fx.Node] = field(default_factory=dict)
    wholes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    splits: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    editor: GraphEditor = field(init=False)
    store: ConstantStore = field(init=False)

    def run(self) -> Program:
        self.editor = GraphEditor.empty(self.program)
        self.editor.constants |= self.program.constants
        for node in self.program.graph.find_nodes(op="placeholder"):
            self.copies[node] = self.editor.graph.node_copy(node)
        self.store = ConstantStore(self.editor)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                self.copies[node] = self._copy(node)
        return self.editor.finish()

    def _copy(self, node: fx.Node) -> fx.Node:
        """A copy of a node of the old graph, which reads both parts of a split value."""
        relation = self.relations.get(node)
        if node.target is operator.getitem:
            return self.editor.graph.node_copy(node, self.copies.__getitem__)
        if isinstance(relation, Relation) and self._is_linear(relation):
            return self._emit_both(relation)
        if isinstance(relation, Relation) and self._reads_parts(relation):
            return self._copy_reader(relation)
        return self.editor.graph.node_copy(node, self._whole)

    def _reads_parts(self, relation: Relation) -> bool:
        values = [o.value for o in relation.operands if isinstance(o.value, fx.Node)]
        return any(v.op != "get_attr" and key_of(v) in self.parts for v in values)

    def _copy_reader(self, relation: Relation) -> fx.Node:
        """A call that reads split values whole, or only their live part if it needs no more."""
        node, values = relation.node, []
        for k, operand in enumerate(relation.operands):
            value = operand.value
            if isinstance(value, fx.Node):
                part = self.parts.get(key_of(value))
                read = self.needs.edge.get((node, k))
                unread = part is not None and (read is None or not bool((read & part).any()))
                # A quotient or a power never reads the zeros at unread positions.
                alone = unread and relation.total
                value = self._split(value)[0] if alone else self._whole(value)
            values.append(value)
        arguments = map_arg(schema.arguments(node), self.copies.get)
        arguments = schema.replace_operands(arguments, relation.operands, values)
        return self.editor.call_named(node.target, arguments, node)

    def _is_linear(self, relation: Relation) -> bool:
        """Whether the call is linear in the one split value it reads, except for a bias."""
        if relation.entry.fill != "sum" or relation.operands[relation.factors[0]].index is not None:
            return False
        first = relation.factors[0]
        rest = [o for k, o in enumerate(relation.operands) if k != first]
        added = {o.name for k, o in enumerate(relation.operands) if k not in relation.factors}
        split = key_of(relation.operands[first].value) in self.parts
        return split and all(schema.is_constant(o.value) for o in rest) and added <= {"bias"}

    def _emit_both(self, relation: Relation) -> fx.Node:
        """f(live) + f(side), the second without its bias."""
        node, operand = relation.node, relation.operands[relation.factors[0]]
        live, side = self._split(operand.value)
        arguments = schema.arguments(node)
        main = map_arg(arguments, self.copies.get) | {operand.name: live}
        rest = {name: None if name == "bias" else v for name, v in arguments.items()}
        one = self._for_one(rest | {operand.name: None}) | {operand.name: side}
        parts = [self.editor.call_named(node.target, f, node) for f in (main, one)]
        return self.editor.call_for(node, aten.add.Tensor, *parts)

    def _whole(self, node: fx.Node) -> fx.Node:
        """An operand: the sum of its live and its side part."""
        if node.op == "get_attr" or key_of(node) not in self.parts:
            return self.copies[node]
        if node not in self.wholes:
            live, side = self._split(node)
            self.wholes[node] = self.editor.call_for(node, aten.add.Tensor, live, side)
        return self.wholes[node]

    def _split(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """A value with its side positions zero, and these positions for one image."""
        if node in self.splits:
            return self.splits[node]
        mask = self.parts[key_of(node)]
        dtype = node.meta["val"].dtype
        live, side = (self.store.constant(m.to(dtype), "mask") for m in (~mask, mask))
        self.splits[node] = (
            self.editor.call_for(node, aten.mul.Tensor, self.copies[node], live),
            self.editor.call_for(node, aten.mul.Tensor, self._value_for_one_image(node), side),
        )
        return self.splits[node]

    def _value_for_one_image(self, node: fx.Node) -> fx.Node:
        """A value for one image, correct wherever it is input-independent."""
        if node.op == "get_attr":
            return self.copies[node]
        if node not in self.sides:
            self.sides[node] = self._compute_side(node)
        return self.sides[node]

    def _compute_side(self, node: fx.Node) -> fx.Node:
        key, alone = key_of(node), isinstance(node.meta["val"], Tensor)
        fact = self.facts[key]
        if alone and not bool((self.independent[key] & ~fact.known).any()):
            sizes = [self._size(size) for size in schema.outputs(key[0])[key[1]].shape]
            fill = self.store.constant(fact.fill, "fill")
            return self.editor.call_for(node, aten.expand.default, fill, sizes)
        args, kwargs = (self._for_one(a) for a in (node.args, dict(node.kwargs)))
        relation = self.relations.get(node)
        if isinstance(relation, Relation) and not relation.total:
            args, kwargs = self._finite(relation, schema.arguments(node))
        return self.editor.call_for(node, node.target, *args, **kwargs)

    def _finite(self, relation: Relation, arguments: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments for one image, with a number for which the call is finite wherever the
        value is not input-independent. The original network never computes that value for one
        image."""
        mask, number = self.independent[relation.node, 0], finite_argument(relation, self.facts)
        for_one = self._for_one(arguments)
        values = [self._for_one(o.value) for o in relation.operands]
        for k, operand in enumerate(relation.operands):
            if schema.is_constant(operand.value) or bool(mask.all()) or number is None:
                continue
            dtype = operand.value.meta["val"].dtype
            inside = self.store.constant(mask.to(dtype), "mask")
            outside = self.store.constant(~mask * torch.tensor(number).to(dtype), "mask")
            masked = self.editor.call(aten.mul.Tensor, values[k], inside)
            values[k] = self.editor.call(aten.add.Tensor, masked, outside)
        return schema.bind_arguments(relation.node.target, schema.replace_operands(for_one, relation.operands, values))

    def _for_one(self, value: Any) -> Any:
        """An argument of a call, for a batch of one."""

        def one(node: fx.Node) -> Any:
            fake = node.meta.get("val")
            if isinstance(fake, (Tensor, list, tuple)):
                return self._value_for_one_image(node)
            return self._size(fake) if isinstance(fake, torch.SymInt) else self.copies[node]

        return map_arg(value, one)

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        return self.store.expression(size.node.expr.subs(dict.fromkeys(self.batch, 1)))
