"""Whether the mask of an attention shows each query at least one key, which makes the average of a
constant that constant: where a mask hides all keys of a query, torch returns 0.

Masks are computed from positions (`arange`), which facts do not store, so the mask is read as an
expression of the coordinates of one element, from its last call up: axes become labels, and moved
axes move the labels. Where queries and keys are equally many, both get one label: what holds then
holds on the diagonal, where each query meets its own key. A causal mask, `k <= q`, is true there
since both sides are the same expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.facts.masks import Fact
from demask.facts.ranges import compute_ranges
from demask.numerics import is_all
from demask.ops import Declined, Relation, op_name, schema
from demask.ops.schema import fake

Position = Any  # of an axis: a name for any position, a number, or ("+", name, number)
Expression = Any  # a number, a position, or a tuple of a name and what it depends on

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")
}
_AND = ("__and__", "bitwise_and", "logical_and")
_OR = ("__or__", "bitwise_or", "logical_or")
_NOT = ("bitwise_not", "logical_not")
_COPIES = ("to", "_to_copy", "clone", "alias", "contiguous", "detach")
_CONSTANTS = ("full", "new_full", "scalar_tensor")


def shows_each_query(
    relation: Relation, relations: Mapping[fx.Node, Relation | Declined], facts: Mapping[tuple[fx.Node, int], Fact]
) -> bool:
    """Whether the `attn_mask` of a call of attention has for each query, for all inputs, a key that
    it does not hide: one that is True, or a finite number.

    Args:
        relation: of a call of `scaled_dot_product_attention` with a mask.
        relations, facts: of the calls that compute the mask.
    """
    call = schema.arguments(relation.node)
    (axes,) = (
        axes for operand, axes in zip(relation.operands, relation.ins, strict=True) if operand.name == "attn_mask"
    )
    at: list[Position] = [axis[0] if axis else 0 for axis in axes]
    queries, keys = (fake(call[name]).shape[-2] for name in ("query", "key"))
    if schema.same_size(queries, keys):
        at[-2:] = ["diagonal" if position else 0 for position in at[-2:]]
    mask = call["attn_mask"]
    if _is_shown(_Elements(relations, facts).of(mask, tuple(at))):
        return True
    return fake(mask).is_floating_point() and _is_finite(mask, relations, facts)


def _is_shown(value: Expression) -> bool:
    if isinstance(value, tuple):
        return value[0] == "where" and all(map(_is_shown, value[1:]))
    return value if isinstance(value, bool) else _is_number(value) and math.isfinite(value)


def _is_finite(
    node: fx.Node, relations: Mapping[fx.Node, Relation | Declined], facts: Mapping[tuple[fx.Node, int], Fact]
) -> bool:
    """Whether no element of a tensor is infinite for any input."""
    before, stack = {node}, [node]
    while stack:
        operands = set(stack.pop().all_input_nodes) - before
        before |= operands
        stack += operands
    constants = {
        str(operand.target): facts[operand, 0].fill
        for operand in before
        if operand.op == "get_attr" and is_all(facts[operand, 0].known)
    }
    nodes = [operand for operand in node.graph.nodes if operand in before]
    bound = [relations.get(operand) for operand in nodes]
    table = {op_name(r.node.target): r.entry for r in bound if isinstance(r, Relation)}
    return all(map(math.isfinite, compute_ranges(nodes, constants, table)[node]))


def _is_number(value: Expression) -> bool:
    return isinstance(value, (int, float))


@dataclass(frozen=True)
class _Elements:
    """Elements of computed tensors as expressions: equal ones are equal for all inputs and all
    positions with equal names."""

    relations: Mapping[fx.Node, Relation | Declined]
    facts: Mapping[tuple[fx.Node, int], Fact]

    def of(self, node: Any, at: tuple[Position, ...]) -> Expression:
        """The element of a tensor at one position per axis; a number is itself."""
        if not isinstance(node, fx.Node):
            return node
        known = self._known(node, at)
        if known is None and isinstance(node.target, OpOverload):
            known = self._computed(node, at)
        return ("element", node, at) if known is None else known

    def broadcast(self, node: Any, at: tuple[Position, ...]) -> Expression:
        """The element of an operand that broadcasts to axes with some positions."""
        if not (isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)):
            return node
        shape = fake(node).shape
        own = at[len(at) - len(shape) :]
        return self.of(node, tuple(0 if n == 1 else k for n, k in zip(shape, own, strict=True)))

    def _known(self, node: fx.Node, at: tuple[Position, ...]) -> Expression | None:
        """The number that an element is known to be."""
        fact = self.facts.get((node, 0))
        if fact is None or not fact.known.numel() or not is_all(fact.known):
            return None
        fill = fact.fill
        for k, position in enumerate(at):  # the diagonal of axes with one name
            for j in range(k):
                if position and position == at[j] and fill.shape[j] == fill.shape[k] != 1:
                    return self._uniform(fill.diagonal(0, j, k))
        return self._uniform(fill)

    def _uniform(self, fill: Tensor) -> Expression | None:
        first = fill.flatten()[:1]
        return first.item() if first.numel() and is_all(fill == first) else None

    def _computed(self, node: fx.Node, at: tuple[Position, ...]) -> Expression | None:
        """The element as an expression of those of the operands."""
        name, call = op_name(node.target).split(".")[1], schema.arguments(node)
        relation = self.relations.get(node)
        if name in _CONSTANTS:
            value = call.get("fill_value", call.get("s"))
            return value if _is_number(value) else None
        if name == "arange":
            return _plus(at[0], call.get("start", 0)) if call.get("step", 1) == 1 else None
        if name == "slice":
            moved = _plus(at[call["dim"]], call["start"] or 0) if call["step"] == 1 else None
            axis = call["dim"] % len(at)
            return None if moved is None else self.of(call["self"], (*at[:axis], moved, *at[axis + 1 :]))
        if name == "index":
            return self._indexed(call["self"], call["indices"], at)
        if isinstance(relation, Relation) and relation.entry.fill == "same":
            return self._moved(relation, at)
        names = ("mask", "value", "self") if name == "masked_fill" else ("condition", "self", "other")
        operands = [self.broadcast(call[key], at) for key in names if key in call]
        if name in _COPIES:
            return _converted(operands[0], node)
        if name in ("add", "sub") and call["alpha"] == 1 and _is_number(operands[1]):
            return _plus(operands[0], operands[1] if name == "add" else -operands[1])
        sources = (fake(value) for value in node.all_input_nodes)
        integers = not any(
            isinstance(value, Tensor) and value.is_floating_point() for value in sources
        )  # NaN differs from itself; sizes are integers
        if name in _COMPARISONS and integers:
            return _compared(name, *operands)
        if name in ("where", "masked_fill"):
            condition, one, other = operands
            chosen = one if condition else other
            return chosen if isinstance(condition, bool) else ("where", one, other)
        bools = [value for value in operands if isinstance(value, bool)]
        if name in _NOT and bools:
            return not bools[0]
        if name in _AND:
            return False if False in bools else True if len(bools) == 2 else (name, *operands)
        if name in _OR:
            return True if True in bools else False if len(bools) == 2 else (name, *operands)
        return None

    def _indexed(self, node: fx.Node, indices: Any, at: tuple[Position, ...]) -> Expression | None:
        """The element of a tensor at positions that tensors name."""
        values = [fake(index) if isinstance(index, fx.Node) else None for index in indices]
        if any(value is None or value.dtype == torch.bool for value in values):
            return None
        rank = max(value.ndim for value in values if value is not None)
        positions = [self.broadcast(index, at[:rank]) for index in indices]
        if all(_is_position(position) for position in positions):
            return self.of(node, (*positions, *at[rank:]))
        return ("index", node, *positions, *at[rank:])

    def _moved(self, relation: Relation, at: tuple[Position, ...]) -> Expression | None:
        """The element that a call copies along with its axes."""
        axes, (operand, *more) = relation.outs[0], relation.operands
        source = relation.ins[0]
        if more or relation.moved or relation.mixed or any(len(a) > 1 for a in (*axes, *source)):
            return None
        positions = {axis[0]: position for axis, position in zip(axes, at, strict=True) if axis}
        if any(axis and axis[0] not in positions for axis in source):
            return None
        return self.of(operand.value, tuple(positions[a[0]] if a else 0 for a in source))


def _is_position(value: Expression) -> bool:
    """Whether an expression is one of a position, never negative: Python's indices wrap."""
    base, added = _split(value)
    return isinstance(base, str | None) and isinstance(added, int) and added >= 0


def _split(value: Expression) -> tuple[Expression, float]:
    """An expression as one that is no sum, or None, and the number added to it."""
    if _is_number(value):
        return None, value
    return (value[1], value[2]) if isinstance(value, tuple) and value[0] == "+" else (value, 0)


def _plus(value: Expression, number: Any) -> Expression | None:
    base, added = _split(value)
    if not (_is_number(number) and isinstance(number + added, int)):
        return None
    if base is None:
        return added + number
    return ("+", base, added + number) if added + number else base


def _compared(name: str, one: Expression, other: Expression) -> Expression:
    """A comparison of integers, decided where both have one base or one is a position."""
    compare = _COMPARISONS[name]
    (base, added), (other_base, other_added) = _split(one), _split(other)
    if base == other_base:
        return compare(added, other_added)
    is_least = isinstance(base, str) and other_base is None and name in ("ge", "gt")
    is_other_least = isinstance(other_base, str) and base is None and name in ("le", "lt")
    if (is_least or is_other_least) and compare(added, other_added):
        return True
    return (name, one, other)


def _converted(value: Expression, node: fx.Node) -> Expression:
    """An element in the dtype of a call."""
    dtype = fake(node).dtype
    if isinstance(value, bool) and dtype == torch.bool:
        return value
    if _is_number(value):
        return torch.tensor(value).to(dtype).item()
    (source,) = (fake(operand) for operand in node.all_input_nodes[:1])
    return value if source.dtype == dtype else ("to", dtype, value)
