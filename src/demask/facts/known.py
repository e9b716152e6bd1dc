"""Values that are known before any input: one forward sweep over the graph.

Four formulas serve the full table. The table line of a call says which one applies:
- pointwise: known where every operand is known, or where a factor is a known zero;
- contraction: known where every product in the sum has a zero or two known factors;
- complete and windowed axes: known only where the full axis is known (windows: with one value);
- moves: the index map, applied to masks and fills.
In addition, the affine law: where a norm's scale is 0, the output is its shift for every input.

Attention leaves a constant that constant if its mask shows each query at least one key: where a mask hides
all keys of a query, torch returns 0. Masks are computed from positions (`arange`), which facts do not
store, so the mask is read as an expression of the coordinates of one element, from its last call up: axes
become labels, and moved axes move the labels. Where queries and keys are equally many, both get one label:
what holds then holds on the diagonal, where each query meets its own key. A causal mask, `k <= q`, is true
there since both sides are the same expression.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.facts.fills import call, missing_letters, results_on_fills
from demask.facts.masks import Fact, all_over, any_over, finite_fact, mixed, project, spread, uniform_over, unknown_fact
from demask.facts.movement import moved_fact, shorten_axis
from demask.facts.ranges import compute_ranges
from demask.facts.recurrent import zero_unit_facts
from demask.facts.trained import computed_fact, constant_fact, is_computed_weight, trained_nodes
from demask.failures import attributed
from demask.numerics import has_any, is_all, to_computable
from demask.ops import Declined, Relation, op_name, schema
from demask.ops.notation import Axes
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


Key = tuple[fx.Node, int]  # a node and which of its outputs
Facts = dict[Key, Fact]
Relations = Mapping[fx.Node, "Relation | Declined"]


def key_of(node: fx.Node) -> Key:
    """The value of a node: a `getitem` is an alias of one output of its source."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return (node.args[0], schema.output_of(node))
    return (node, 0)


def value_of(node: fx.Node) -> Any:
    """The fake value of a node; for a `getitem`, that of the output it selects."""
    source, k = key_of(node)
    value = source.meta.get("val")
    return value[k] if isinstance(value, (list, tuple)) else value


def compute_facts(
    graph: fx.Graph,
    relations: Relations,
    constants: Mapping[str, Tensor],
    *,
    frugal: bool = False,
    zeros: Collection[fx.Node] = (),
    trained: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> Facts:
    """The fact of every tensor that the graph computes.

    Args:
        constants: by get_attr target; nothing is known of a constant that is absent.
        frugal: whether known values other than 0 that vary along several axes count as unknown,
            because storing them takes more than computing them. Such values computed from constants
            alone always count as unknown: constant folding chose not to store them.
        zeros: nodes of which only zeros count as known.
        trained: the constants that are parameters, and where a 0 of each counts as removed (None:
            everywhere). What calls compute from parameters alone is computed at run time, so that
            the parameters can be trained.

    Raises:
        CallFailed: the rule of a call fails.
    """
    facts: Facts = {}
    from_constants: set[fx.Node] = set()
    weights = trained_nodes(graph, trained)
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in constants:
            target = str(node.target)
            facts[node, 0] = constant_fact(constants[target], trained.get(target))
        elif node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            _put_nothing(facts, node)
        elif node.op == "call_function":
            relation, sources = relations.get(node), node.all_input_nodes
            if sources and all(s.op == "get_attr" or s in from_constants for s in sources):
                from_constants.add(node)
            if isinstance(relation, Relation):
                with attributed(node):
                    outputs = forward(relation, facts, relations, weights=node in weights)
                    _put(facts, node, outputs, frugal or node in from_constants)
            else:
                _put_nothing(facts, node)
        for k in range(len(schema.outputs(node)) if node in zeros else 0):
            facts[node, k] = facts[node, k].zeros_alone
        for k in range(len(schema.outputs(node)) if is_computed_weight(node, weights) else 0):
            facts[node, k] = computed_fact(facts[node, k])
    return facts


def _put_nothing(facts: Facts, node: fx.Node) -> None:
    if node.target is operator.getitem and key_of(node) in facts:
        return
    for k, value in enumerate(schema.outputs(node)):
        if isinstance(value, Tensor):
            facts[node, k] = unknown_fact(value.ndim, value.dtype)


def _put(facts: Facts, node: fx.Node, outputs: list[Fact | None], frugal: bool) -> None:
    for k, (value, fact) in enumerate(zip(schema.outputs(node), outputs, strict=True)):
        if fact is None:
            facts[node, k] = unknown_fact(value.ndim, value.dtype)
            continue
        fact = _shorten(finite_fact(fact.known, fact.fill.to(value.dtype)))
        if frugal and is_matrix(fact):
            fact = fact.zeros_alone
        facts[node, k] = fact


def is_matrix(fact: Fact) -> bool:
    """Whether known values other than 0 vary along several axes."""
    return sum(n > 1 for n in fact.fill.shape) > 1 and bool((fact.known & (fact.fill != 0)).any())


def operand_facts(relation: Relation, facts: Facts) -> list[Fact]:
    """The facts of a call's operands; a plain number is known."""
    operands = []
    for operand, axes in zip(relation.operands, relation.ins, strict=True):
        if isinstance(operand.value, fx.Node):
            # Another operand may make an axis dynamic.
            dynamic = {a for axis in axes for a in axis if relation.size[a] is None}
            operands.append(_uniform_along(dynamic, axes, facts[key_of(operand.value)]))
        else:
            operands.append(Fact(torch.ones((), dtype=torch.bool), torch.as_tensor(operand.value)))
    return operands


def _uniform_along(letters: Collection[str], axes: Axes, fact: Fact) -> Fact:
    """The fact, known along the axes with some letters only where it is uniform."""
    order = [str(k) for k in range(len(axes))]
    names = {str(k) for k, axis in enumerate(axes) if fact.known.shape[k] != 1 and set(axis) & set(letters)}
    return uniform_over(fact, order, names) if names else fact


def forward(relation: Relation, facts: Facts, relations: Relations, *, weights: bool = False) -> list[Fact | None]:
    """The facts of a call's outputs; None where nothing is known. relations: of the calls before
    it. weights: whether the call computes weights from weights, of which only zeros count."""
    inputs, count = operand_facts(relation, facts), len(relation.outs)
    entry = relation.entry
    if weights:
        inputs = [fact.zeros_alone for fact in inputs]
    elif relation.moved or entry.fill in ("same", "mix"):
        inputs = [fact.untrained for fact in inputs]
    if entry.fill == "scatter":  # Any position may reach any other.
        inputs = [
            _uniform_along(relation.complete, axes, fact) for axes, fact in zip(relation.ins, inputs, strict=True)
        ]
    if entry.free:
        return [created_fact(relation)] * count
    if relation.moved:
        return [moved_fact(relation, k, inputs) for k in range(count)]
    if entry.fill == "none" or not any(has_any(f.known) or has_any(f.zero) for f in inputs):
        return [None] * count
    if entry.fill == "sum":
        return [_contract(relation, inputs)]
    if entry.fill == "recur":
        return zero_unit_facts(relation, inputs)
    if entry.fill in ("same", "mix"):
        may_hide = _may_mask_all(relation, inputs) and not shows_each_query(relation, relations, facts)
        return [_same(relation, inputs, zeros_alone=may_hide), *[None] * (count - 1)]
    return _run(relation, inputs)


def _order(relation: Relation) -> list[str]:
    return list(relation.size)


def over_letters(relation: Relation, operand: int, fact: Fact) -> Fact:
    """The fact of an operand, over all letters of the relation."""
    order, axes = _order(relation), relation.ins[operand]
    masks = [
        None if mask is None else spread(mask, axes, order, relation.size)
        for mask in (fact.known, fact.fill, fact.removed)
    ]
    return Fact(*masks)  # type: ignore[arg-type]


def _project(relation: Relation, fact: Fact, out: int = 0) -> Fact:
    """A fact over letters, as the fact of an output; letters that it lacks already have size 1."""
    order, axes = _order(relation), relation.outs[out]
    fact = uniform_over(fact, order, mixed(axes, relation.size))
    shape = torch.broadcast_shapes(fact.known.shape, fact.fill.shape)
    wide = Fact(fact.known.expand(shape), fact.fill.expand(shape))
    return Fact(project(wide.known, axes, order, relation.size), project(wide.fill, axes, order, relation.size))


def _reduced_letters(relation: Relation, operand: int, out: int = 0) -> set[str]:
    """Letters of an operand that the output lacks or that must be complete or uniform."""
    letters = relation.letters(relation.ins[operand])
    return set(letters - relation.letters(relation.outs[out])) | set(letters & relation.window)


def _same(relation: Relation, inputs: list[Fact], *, zeros_alone: bool) -> Fact | None:
    """The fact of a call that copies values; a window over one value returns that value.
    zeros_alone: whether other values may become zeros."""
    order = _order(relation)
    main = relation.entry.main
    wide = over_letters(relation, main, inputs[main])
    wide = uniform_over(wide, order, _reduced_letters(relation, main) | set(relation.complete))
    if relation.entry.reads_padding(relation.node) or zeros_alone:
        wide = Fact(wide.zero, wide.fill)
    return _project(relation, wide)


def _may_mask_all(relation: Relation, inputs: list[Fact]) -> bool:
    """Whether a mask may hide all values of which an average is computed, which is then 0."""
    for k, operand in enumerate(relation.operands):
        if operand.name == "attn_mask":
            mask, order = over_letters(relation, k, inputs[k]), _order(relation)
            is_bool = mask.fill.dtype == torch.bool
            seen = mask.known & mask.fill if is_bool else mask.known  # -inf is no known value
            return not is_all(any_over(seen, order, relation.complete))
    return False


def created_fact(relation: Relation) -> Fact | None:
    """The fact of a created tensor: the op, run with every size 1. It may be infinite."""
    rank = len(relation.outs[0])
    arguments = schema.arguments(relation.node)
    if "size" in arguments:
        arguments["size"] = [1] * rank
    if any(schema.is_dynamic(v) for name, v in arguments.items() if name not in ("self", "input")):
        return None
    values = [torch.zeros([1] * rank, dtype=fake(o.value).dtype) for o in relation.operands]
    arguments = schema.replace_operands(arguments, relation.operands, values)
    if "device" in arguments:
        arguments["device"] = None
    return Fact(torch.ones([1] * rank, dtype=torch.bool), call(relation.node, arguments))


def _run(relation: Relation, inputs: list[Fact]) -> list[Fact | None]:
    """Facts of the outputs, known where all operands are: the op is run on their fills."""
    order = _order(relation)
    facts: list[Fact | None] = [None] * len(relation.outs)
    arguments = schema.arguments(relation.node)
    names = {o.name for o in relation.operands}
    if any(schema.is_dynamic(v) for name, v in arguments.items() if name not in names):
        return facts
    wide = [over_letters(relation, k, fact) for k, fact in enumerate(inputs)]
    mask = torch.ones([1] * len(order), dtype=torch.bool)
    for k, fact in enumerate(wide):
        if k not in relation.positions:
            mask = mask & all_over(fact.known, order, relation.complete)
    if has_any(mask) and (values := results_on_fills(relation, inputs, arguments)) is not None:
        facts = [_output_fact(relation, mask, fact, k) for k, fact in enumerate(values)]
    facts[0] = _apply_affine(relation, wide, _apply_zeros(relation, wide, facts[0]))
    return [None if fact is None else _project(relation, fact, k) for k, fact in enumerate(facts)]


def _output_fact(relation: Relation, mask: Tensor, result: Fact, out: int) -> Fact | None:
    """The fact of an output from results on fills, known where the mask is on all along the letters
    that the output lacks."""
    if out and not result.fill.is_floating_point():
        return None  # Which of equal values an index names differs between devices.
    order, axes = _order(relation), relation.outs[out]
    known, value = (spread(m, axes, order, relation.size) for m in (result.known, result.fill))
    mask = all_over(mask, order, missing_letters(relation, out)) & known
    return Fact(*torch.broadcast_tensors(mask, value))


def _apply_zeros(relation: Relation, wide: list[Fact], fact: Fact | None) -> Fact | None:
    """The fact with 0 where a factor is 0, unless the other factor is known and not finite."""
    factors = {"": [], "any": wide, "first": wide[:1]}[relation.entry.zero]
    for factor in factors:
        zero = factor.zero
        if fact is not None and fact.fill.is_floating_point():
            zero = zero & ~(fact.known & ~torch.isfinite(to_computable(fact.fill)))
        if not has_any(zero):
            continue
        if fact is None:
            fact = Fact(zero, torch.zeros(zero.shape, dtype=factor.fill.dtype))
            continue
        is_zero, fill = torch.broadcast_tensors(zero, fact.fill)
        mask, fill = torch.broadcast_tensors(fact.known | zero, fill.masked_fill(is_zero, 0))
        fact = Fact(mask, fill)
    return fact


def _apply_affine(relation: Relation, wide: list[Fact], fact: Fact | None) -> Fact | None:
    """The fact with the shift where the scale is 0."""
    by_name = {(o.name): wide[k] for k, o in enumerate(relation.operands)}
    if relation.entry.affine is None or "weight" not in by_name:
        return fact
    zero = by_name["weight"].zero
    shift = by_name["bias"].fill if "bias" in by_name else torch.zeros((), dtype=by_name["weight"].fill.dtype)
    if "bias" in by_name:
        zero = zero & by_name["bias"].known
    if not has_any(zero):
        return fact
    if fact is None:
        fact = Fact(torch.zeros_like(zero), torch.zeros(zero.shape, dtype=shift.dtype))
    mask, zero, fill, shift = torch.broadcast_tensors(fact.known, zero, fact.fill, shift)
    return Fact(mask | zero, torch.where(zero, shift, fill))


def _contract(relation: Relation, inputs: list[Fact]) -> Fact | None:
    """The fact of sum_i a_i · b_i: known where every product has a zero or two known factors."""
    order, factors = _order(relation), relation.factors
    over = relation.contracted | (relation.complete - relation.letters(relation.outs[0]))
    mask = ~any_over(contributions(relation, inputs), order, over)
    if not has_any(mask):
        return None
    fill = known_sum(relation, inputs)
    for k, fact in enumerate(inputs):
        if k not in factors and k not in relation.selectors:
            added = over_letters(relation, k, fact)
            mask, fill = mask & added.known, fill + added.fill
    return _project(relation, Fact(*torch.broadcast_tensors(mask, fill)))


def _shorten(fact: Fact) -> Fact:
    """The fact with size 1 for every axis along which nothing varies."""
    for axis, n in enumerate(fact.fill.shape):
        if n > 1:
            fact = shorten_axis(fact, axis)
    return fact


def contributions(relation: Relation, inputs: list[Fact], *, absorb: bool = False) -> Tensor:
    """Over letters: the products a_i · b_i that are neither zero nor known.

    absorb: whether known products count as known although, under zero padding, their sum varies
    along the border (a border map absorbs them, see `is_absorbing`). Window letters have size 1: a
    product over a window is known if each of its products is.
    """
    zeros = [window_mask(relation, k, inputs[k], zero=True) for k in relation.factors]
    zero = zeros[0] | zeros[1]
    constant = is_absorbing(relation) if absorb else constant_sums(relation)
    if relation.entry.fill == "sum" and constant:
        first, second = relation.factors
        plain = over_letters(relation, first, inputs[first])
        plain = uniform_over(plain, _order(relation), uniform_letters(relation))
        zero = zero | (plain.known & window_mask(relation, second, inputs[second], zero=False))
    return ~(zero | uniform_keys(relation, inputs))


def uniform_keys(relation: Relation, inputs: list[Fact]) -> Tensor:
    """Over letters: where the keys of attention are known and equal for every token. Their products
    add one number to all logits of a row, and softmax does not depend on it."""
    if relation.entry.fill != "mix" or not relation.contracted:
        return torch.zeros((), dtype=torch.bool)
    keys = relation.factors[1]
    fact = over_letters(relation, keys, inputs[keys].untrained)
    return uniform_over(fact, _order(relation), relation.complete).known


def window_mask(relation: Relation, k: int, fact: Fact, *, zero: bool) -> Tensor:
    """Over letters: where an operand is known (or zero) throughout its windows."""
    axes = relation.ins[k]
    dims = tuple(d for d, axis in enumerate(axes) if axis and set(axis) <= relation.window)
    return spread(fact.all_over(dims, zero=zero), axes, _order(relation), relation.size)


def constant_sums(relation: Relation) -> bool:
    """Whether known products sum to a value that is constant along windows and dynamic axes. False
    where weights are chosen at run time (their complete axis)."""
    if relation.complete or relation.entry.reads_padding(relation.node):
        return False
    return all(relation.size[letter] is not None for letter in relation.contracted)


def is_absorbing(relation: Relation) -> bool:
    """Whether the sum of known products can be added to the result of a smaller call: as a
    constant, or under zero padding as a border map, which stores the kernel."""
    padded = not relation.complete and relation.entry.reads_padding(relation.node)
    return constant_sums(relation) or (padded and schema.is_constant(relation.operands[relation.factors[1]].value))


def uniform_letters(relation: Relation) -> frozenset[str]:
    """Letters along which a known operand must have one value for its products to be summed
    beforehand: windows, and under zero padding all letters that the kernel lacks, as a border map
    covers one image."""
    if constant_sums(relation):
        return relation.window
    first, second = (relation.letters(relation.ins[k]) for k in relation.factors)
    return relation.window | (first - second)


def known_sum(relation: Relation, inputs: list[Fact]) -> Tensor:
    """Over letters: the sum of the products of known factors, in float64."""
    order = _order(relation)
    if not constant_sums(relation):
        return torch.zeros([1] * len(order), dtype=torch.float64)
    a, b = (over_letters(relation, k, inputs[k]) for k in relation.factors)
    a = uniform_over(a, order, relation.window)
    if not (has_any(a.fill != 0) and has_any(b.fill != 0)):
        return torch.zeros([1] * len(order), dtype=torch.float64)
    kernel = relation.window & relation.letters(relation.ins[relation.factors[1]])
    over = set(relation.contracted | kernel)
    return sum_products(a.fill.double(), b.fill.double(), order, over, relation.size)


def sum_products(a: Tensor, b: Tensor, order: list[str], over: set[str], size: Mapping[str, int | None]) -> Tensor:
    """The sum of a · b over some letters, shaped like a mask. Letters of size 1 in both operands
    count with their full size."""
    dims = [k for k, letter in enumerate(order) if letter in over]
    count = 1
    for k in dims:
        if a.shape[k] == 1 and b.shape[k] == 1:
            count *= size[order[k]] or 1
    rest = [k for k in range(len(order)) if k not in dims]
    permutation = rest + dims
    shape = torch.broadcast_shapes(a.shape, b.shape)
    flat = [
        t.expand([shape[k] if k in dims else t.shape[k] for k in range(len(order))])
        .permute(permutation)
        .reshape([t.shape[k] for k in rest] + [-1])
        for t in (a, b)
    ]
    total = _dot(*flat) * count
    result = total.reshape(list(total.shape) + [1] * len(dims))
    return result.permute([permutation.index(k) for k in range(len(order))])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum over the last dimension of a product, as an einsum that does not store the
    product."""
    letters = "abcdefghijklmnopqrstuvwxyz"[: a.ndim - 1]
    left = "".join(c for c, n in zip(letters, a.shape, strict=False) if n != 1)
    right = "".join(c for c, n in zip(letters, b.shape, strict=False) if n != 1)
    out = "".join(c for c in letters if c in left or c in right)
    shape = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    a = a.reshape([n for n in a.shape[:-1] if n != 1] + [a.shape[-1]])
    b = b.reshape([n for n in b.shape[:-1] if n != 1] + [b.shape[-1]])
    return torch.einsum(f"{left}Z,{right}Z->{out}", a, b).reshape(shape)
