"""Positions that do not depend on the input, though their value may vary with the input's size.

What is known is input-independent. So are more values: a constant that enters a zero-padded window
has another value at the border, and the mean over an image of such a constant depends on the
image's size. Neither depends on the content of the image, so one evaluation for one image serves a
full batch. One forward sweep over the relations that `known` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Key, Relations, key_of, operand_facts, over_letters, window_mask
from demask.facts.masks import Fact, all_over, any_over, mixed, project, spread
from demask.facts.movement import moved_fact
from demask.facts.trained import trained_nodes
from demask.numerics import to_computable
from demask.ops import Relation, schema
from demask.ops.schema import fake

IndependentMasks = dict[Key, Tensor]


def find_input_independent(
    graph: fx.Graph, relations: Relations, facts: Facts, batch: set[sympy.Symbol], parameters: Collection[str] = ()
) -> IndependentMasks:
    """Per value, a mask of what is the same for every input of one size, and along every axis whose
    size contains one of the `batch` symbols. What calls compute from parameters alone is excluded:
    it stays as it is, to be trained. parameters: by get_attr target."""
    masks: IndependentMasks = {key: fact.known for key, fact in facts.items()}
    trained = trained_nodes(graph, parameters)
    for node in graph.nodes:
        relation = relations.get(node)
        if node.op != "call_function" or not isinstance(relation, Relation):
            continue
        if node in trained or relation.entry.free or not only_carries_batch(relation, batch):
            continue
        inputs = _inputs(relation, facts, masks)
        for k in range(len(relation.outs)):
            mask = _output_mask(relation, k, inputs)
            # Elsewhere a side network has no value: the call must be finite for some number.
            whole = mask is None or relation.total or bool(mask.all())
            if mask is not None and (whole or finite_argument(relation, facts) is not None):
                masks[node, k] = masks[node, k] | mask
    return masks


def finite_argument(relation: Relation, facts: Facts) -> float | None:
    """A number at which a pointwise call is finite in all computed operands; None if there is
    none."""
    dtypes = [fake(o.value).dtype for o in relation.operands if isinstance(o.value, fx.Node)]
    signature = relation.entry.line, len(relation.outs)
    pointwise = signature in (("... -> ...", 1), ("..., ... -> ...", 1), ("..., ..., ... -> ...", 1))
    if not pointwise or torch.bool in dtypes:
        return None
    arguments, inputs = schema.arguments(relation.node), operand_facts(relation, facts)
    for number in (1.0, 0.5, 2.0):
        values = [
            o.value
            if not isinstance(o.value, fx.Node)
            else fact.fill
            if o.value.op == "get_attr"
            else torch.full([1] * fact.fill.ndim, number).to(fact.fill.dtype)
            for o, fact in zip(relation.operands, inputs, strict=True)
        ]
        output = schema.call_with(relation.node, schema.replace_operands(arguments, relation.operands, values))
        if bool(torch.isfinite(to_computable(output)).all()):
            return number
    return None


def batch_sizes(graph: fx.Graph) -> set[sympy.Symbol]:
    """The symbols of dimension 0 of the inputs."""
    shapes = [
        fake(node).shape
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
    ]
    dynamic: list[Any] = [shape[0] for shape in shapes if shape and not isinstance(shape[0], int)]
    return {size.node.expr for size in dynamic if size.node.expr.is_Symbol}


def has_batch_symbol(size: Any, batch: set[sympy.Symbol]) -> bool:
    """Whether a size depends on the batch size."""
    return not isinstance(size, int) and bool(size.node.expr.free_symbols & batch)


def only_carries_batch(relation: Relation, batch: set[sympy.Symbol]) -> bool:
    """Whether the call for one input equals the call for many, cut to the first: batch axes are
    only carried, each as an axis of its own."""
    node, gone = relation.node, relation.window | relation.complete | relation.moved
    output_letters = relation.letters(relation.outs[0])
    values = [
        (fake(o.value), axes)
        for o, axes in zip(relation.operands, relation.ins, strict=True)
        if isinstance(o.value, fx.Node)
    ]
    for value, axes in [*values, *zip(schema.outputs(node), relation.outs, strict=True)]:
        for size, axis in zip(value.shape, axes, strict=True):
            if has_batch_symbol(size, batch):
                whole = not size.node.expr.is_Symbol or len(axis) != 1
                if whole or axis[0] in gone or axis[0] not in output_letters:
                    return False
    if relation.entry.args is not None or relation.moved:
        return True  # Their sizes are rebuilt from shapes.
    names = {operand.name for operand in relation.operands}
    rest = [v for name, v in schema.arguments(node).items() if name not in names]
    return not any(_contains_batch_size(v, batch) for v in rest)


def _contains_batch_size(value: Any, batch: set[sympy.Symbol]) -> bool:
    """Whether a plain argument contains a number that depends on the batch size."""
    if isinstance(value, (list, tuple)):
        return any(_contains_batch_size(item, batch) for item in value)
    number = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(number, torch.SymInt) and has_batch_symbol(number, batch)


def _inputs(relation: Relation, facts: Facts, masks: Mapping[Key, Tensor]) -> list[Fact]:
    """The operands' facts, in which input-independent positions count as known."""
    result = []
    known = operand_facts(relation, facts)
    for operand, fact, axes in zip(relation.operands, known, relation.ins, strict=True):
        if isinstance(operand.value, fx.Node):
            mask = masks[key_of(operand.value)]
            dynamic = [k for k, axis in enumerate(axes) if any(relation.size[a] is None for a in axis)]
            if operand.value.op != "get_attr":
                mask = mask.all(dim=dynamic, keepdim=True) if dynamic else mask
                fact = _with_known(fact, mask | fact.known)
        result.append(fact)
    return result


def as_known(facts: Facts, masks: IndependentMasks) -> Facts:
    """Facts in which input-independent positions count as known."""
    return {key: _with_known(fact, masks[key]) for key, fact in facts.items()}


def _with_known(fact: Fact, mask: Tensor) -> Fact:
    """The fact with a mask as its known positions. Those without a value get the fill 1, so that
    they never count as zeros."""
    if mask is fact.known:
        return fact
    fill = torch.where(mask & ~fact.known, torch.ones_like(fact.fill), fact.fill)
    known, fill = torch.broadcast_tensors(mask, fill)
    return Fact(known, fill, fact.removed)


def _output_mask(relation: Relation, k: int, inputs: list[Fact]) -> Tensor | None:
    entry, order = relation.entry, list(relation.size)
    if relation.moved:
        plain = [Fact(fact.known, torch.zeros_like(fact.fill)) for fact in inputs]
        result = moved_fact(relation, k, plain)
        return None if result is None else result.known
    if k > 0 or entry.fill in ("none", "recur"):
        return None
    output_letters = relation.letters(relation.outs[0])
    gone = set(relation.complete | relation.window) | (set(order) - output_letters)
    if entry.fill == "sum":
        mask = _contraction_mask(relation, inputs)
    else:
        mask = torch.ones([1] * len(order), dtype=torch.bool)
        for operand, fact in enumerate(inputs):
            mask = mask & all_over(over_letters(relation, operand, fact).known, order, gone)
    axes = relation.outs[0]
    mask = all_over(mask, order, mixed(axes, relation.size))
    return project(mask, axes, order, relation.size)


def _contraction_mask(relation: Relation, inputs: list[Fact]) -> Tensor:
    """Where every product in the sum is zero or has two input-independent factors."""
    order = list(relation.size)
    pairs = [[window_mask(relation, k, inputs[k], zero=zero) for k in relation.factors] for zero in (True, False)]
    zero, both = pairs[0][0] | pairs[0][1], pairs[1][0] & pairs[1][1]
    mask = ~any_over(~(zero | both), order, relation.contracted)
    for k, fact in enumerate(inputs):
        if k not in relation.factors:
            mask = mask & spread(fact.known, relation.ins[k], order, relation.size)
    return mask
