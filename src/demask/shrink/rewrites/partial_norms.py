"""Calls over a complete axis, of which only the positions that vary are read.

A norm, a softmax or a mean reads a full axis, of which some positions may be known before any
input. What these add to a sum, a mean or a variance is a constant, and a few values per token
determine their outputs:

    layer norm  y_c = g_c · (-m/s) + g_c f_c · (1/s) + b_c      m, s of all N, from the live alone
    RMS norm    y_c = g_c f_c · (1/s)
    softmax     y_c = exp(f_c) / Σ                              equal ones merged: one with + ln n

So where every reader multiplies the axis by constant weights, W · y = W_live · y_live + U · z, with
z these values and U computed from the weights of the known positions. Nothing is cut here: known
positions become zeros, and the following passes remove them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Relations, key_of
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program
from demask.numerics import rms_norm_eps
from demask.ops import Relation, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.schema import fake
from demask.ops.traits import IDENTITIES
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten
_PASS = IDENTITIES | {aten.dropout.default}
_BARE = {aten.addmm.default: aten.mm.default}  # the product alone, without the addend


def condense_axes(analysis: LayoutAnalysis) -> Program | None:
    """The program with such calls on what varies alone; None where there are none."""
    program, relations, facts = analysis.program, analysis.relations, analysis.known
    axes = {
        node: axis
        for node, relation in relations.items()
        if isinstance(relation, Relation) and (axis := _find_partly_known(relation, facts)) is not None
    }
    if not axes:
        return None
    condenser = _Condenser(program, relations, facts)
    changed = [condenser.visit(node, axis) for node, axis in axes.items()]
    return condenser.editor.finish() if any(changed) else None


@dataclass(frozen=True, slots=True)
class _CompleteAxis:
    """A complete axis: its dimension and size, the positions that vary (`live`), those that are
    known (`dead`), and the values of these (float64)."""

    dim: int
    size: int
    live: tuple[int, ...]
    dead: tuple[int, ...]
    fill: Tensor

    @property
    def share(self) -> float:
        return len(self.live) / self.size


def _find_partly_known(relation: Relation, facts: Facts) -> _CompleteAxis | None:
    """The one complete axis of a call, if only some of its positions are known; else None."""
    if not relation.entry.rest:
        return None
    dims = [k for k, axis in enumerate(relation.ins[0]) if set(axis) & relation.complete]
    source = relation.operands[0].value
    if len(dims) != 1 or not isinstance(source, fx.Node):
        return None
    weight = schema.arguments(relation.node).get("weight")
    if isinstance(weight, fx.Node) and not bool(facts[key_of(weight)].known.all()):
        return None  # a scale computed by a call
    (dim,), fact = dims, facts[key_of(source)]
    if fact.known.shape[dim] == 1 or not fact.fill.is_floating_point():
        return None
    rest = [k for k in range(fact.known.ndim) if k != dim]
    low, high = (f(fact.fill, rest) if rest else fact.fill for f in (torch.amin, torch.amax))
    known = (fact.known.all(dim=rest) if rest else fact.known) & (low == high)
    if not bool(known.any()) or bool(known.all()):
        return None
    live, dead = (tuple(m.nonzero().flatten().tolist()) for m in (~known, known))
    return _CompleteAxis(dim, len(known), live, dead, low[known].double())


@dataclass(frozen=True, slots=True)
class _Shared:
    """The result of a call over the live positions.

    scattered: the output, zero where known (before scale and shift). values: [..., k] along the
    axis, the values that known positions depend on. columns: k factors for each known position,
    float64 [dead, k].
    """

    scattered: fx.Node
    values: fx.Node | None
    columns: Tensor


@dataclass(frozen=True, slots=True)
class _AxisReader:
    """A product that reads an axis, and the moves between."""

    moves: tuple[fx.Node, ...]
    product: fx.Node
    weight: fx.Node


class _Condenser:
    """Changes a copy of a graph call by call."""

    def __init__(self, program: Program, relations: Relations, facts: Facts):
        self.relations, self.facts = relations, facts
        self.editor = GraphEditor(program)
        self.graph, self.copies = self.editor.graph, self.editor.copies
        self.store = ConstantStore(self.editor)

    def visit(self, node: fx.Node, axis: _CompleteAxis) -> bool:
        """Replace a call by one on the live positions of its axis; returns whether it can be."""
        kind = self._relation(node).entry.rest
        with self.graph.inserting_before(self.copies[node]):
            if kind in _REDUCED:
                self._replace(node, self._reduction(node, axis, kind))
                return True
            readers = self._readers(node, axis.dim)
            if readers is None and not (kind != "softmax" and self._is_scaled_away(node, axis)):
                return False
            shared = {"softmax": self._softmax, "layer": self._layer_norm, "rms": self._rms_norm}[kind](node, axis)
            output = self._apply_scale(node, shared) if kind != "softmax" else shared.scattered
        self._replace(node, output)
        for reader in readers or ():
            self._correct(reader, shared, axis)
        return True

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        self.editor.replace(self.copies[node], new, inherit=True)
        self.copies[node] = new

    def _relation(self, node: fx.Node) -> Relation:
        relation = self.relations[node]
        assert isinstance(relation, Relation)
        return relation

    def _source(self, node: fx.Node) -> fx.Node:
        source = self._relation(node).operands[0].value
        return self.copies[source]

    def _select_live(self, node: fx.Node, axis: _CompleteAxis) -> fx.Node:
        index = self.store.constant_here(torch.tensor(axis.live), f"{node.name}_live")
        return self.editor.call(aten.index_select.default, self._source(node), axis.dim, index)

    def _reduction(self, node: fx.Node, axis: _CompleteAxis, kind: str) -> fx.Node:
        """The sum, mean, maximum or minimum of the live positions and of the known values."""
        arguments = schema.arguments(self.copies[node])
        arguments[self._relation(node).operands[0].name] = self._select_live(node, axis)
        reduced = self.editor.call_named(node.target, arguments)
        if kind == "max":
            return self.editor.call(aten.clamp_min.default, reduced, float(axis.fill.max()))
        if kind == "min":
            return self.editor.call(aten.clamp_max.default, reduced, float(axis.fill.min()))
        total = float(axis.fill.sum())
        if kind == "mean":
            reduced, total = (self.editor.call(aten.mul.Tensor, reduced, axis.share), total / axis.size)
        return self.editor.call(aten.add.Tensor, reduced, total) if total else reduced

    def _softmax(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        values, group, count = torch.unique(axis.fill, return_inverse=True, return_counts=True)
        logits = values + count.double().log()
        live, k = self._select_live(node, axis), len(values)
        pads = [0, 0] * (fake(node).ndim - axis.dim - 1)
        if k == 1:
            both = self.editor.call(aten.constant_pad_nd.default, live, [*pads, 0, 1], float(logits[0]))
        else:
            shape = [k if d == axis.dim else n for d, n in enumerate(self.editor.sizes(live))]
            line = logits.view([-1 if d == axis.dim else 1 for d in range(len(shape))])
            merged = self.store.constant_here(line.to(fake(node).dtype), f"{node.name}_merged")
            both = self.editor.call(aten.expand.default, merged, shape)
            both = self.editor.call(aten.cat.default, [live, both], axis.dim)
        arguments = schema.arguments(self.copies[node]) | {"self": both}
        probabilities, n = self.editor.call_named(node.target, arguments), len(axis.live)
        first = self.editor.call(aten.slice.Tensor, probabilities, axis.dim, 0, n)
        last = self.editor.call(aten.slice.Tensor, probabilities, axis.dim, n, n + k)
        columns = torch.zeros(len(axis.dead), k, dtype=torch.float64)
        columns[torch.arange(len(group)), group] = 1 / count[group].double()
        return _Shared(self._scatter(first, axis), last, columns)

    def _layer_norm(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        """Moments of the full axis from those of its live part, then (x - m) / s."""
        call, live, dead = self.editor.call, self._select_live(node, axis), len(axis.dead)
        both = call(aten.var_mean.correction, live, [axis.dim], correction=0, keepdim=True)
        var, mean = (self._item(both, k) for k in range(2))
        known_mean = float(axis.fill.mean())
        known_variance = float(((axis.fill - known_mean) ** 2).sum()) / axis.size
        whole = call(aten.mul.Tensor, mean, axis.share)
        if known_mean:
            whole = call(aten.add.Tensor, whole, known_mean * dead / axis.size)
        offset = call(aten.sub.Tensor, mean, whole)
        var = call(aten.add.Tensor, var, call(aten.mul.Tensor, offset, offset))
        known_offset = call(aten.sub.Tensor, whole, known_mean) if known_mean else whole
        rest = call(aten.mul.Tensor, call(aten.mul.Tensor, known_offset, known_offset), dead / axis.size)
        var = call(aten.add.Tensor, call(aten.mul.Tensor, var, axis.share), rest)
        var = call(aten.add.Tensor, var, known_variance + schema.arguments(node)["eps"])
        scale = call(aten.rsqrt.default, var)
        shift = call(aten.neg.default, call(aten.mul.Tensor, whole, scale))
        normalized = call(aten.addcmul.default, shift, live, scale)
        return self._share(node, axis, normalized, shift, scale)

    def _rms_norm(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        """x / s, with s from the live squares and the known part of their mean."""
        call, live = self.editor.call, self._select_live(node, axis)
        eps = schema.arguments(node)["eps"]
        eps = rms_norm_eps(fake(node).dtype) if eps is None else eps
        eps += float((axis.fill**2).sum()) / axis.size
        squares = call(aten.mean.dim, call(aten.mul.Tensor, live, live), [axis.dim], True)
        squares = call(aten.mul.Tensor, squares, axis.share)
        scale = call(aten.rsqrt.default, call(aten.add.Tensor, squares, eps))
        return self._share(node, axis, call(aten.mul.Tensor, live, scale), None, scale)

    def _share(
        self, node: fx.Node, axis: _CompleteAxis, normalized: fx.Node, shift: fx.Node | None, scale: fx.Node
    ) -> _Shared:
        """What known positions depend on, -m/s and 1/s, and their factors g and g · f."""
        gains = self._norm_scale(node)[list(axis.dead)]
        pairs = [(shift, gains), (scale, gains * axis.fill)]
        pairs = [(v, c) for v, c in pairs if v is not None and bool((c != 0).any())]
        values = [v for v, _ in pairs]
        both = (
            self.editor.call(aten.cat.default, values, axis.dim) if len(values) > 1 else values[0] if values else None
        )
        columns = torch.stack([c for _, c in pairs], 1) if pairs else torch.zeros(len(axis.dead), 0)
        return _Shared(self._scatter(normalized, axis), both, columns)

    def _norm_scale(self, node: fx.Node) -> Tensor:
        """The norm's scale, float64."""
        weight = schema.arguments(node).get("weight")
        size = fake(node).shape[-1]
        if weight is None:
            return torch.ones(size, dtype=torch.float64)
        return self.facts[key_of(weight)].fill.double().expand(size)

    def _is_scaled_away(self, node: fx.Node, axis: _CompleteAxis) -> bool:
        """Whether the known positions become 0 for all statistics."""
        gains = self._norm_scale(node)[list(axis.dead)]
        layer = self._relation(node).entry.rest == "layer"
        return bool((gains == 0).all()) or (not layer and bool((gains * axis.fill == 0).all()))

    def _apply_scale(self, node: fx.Node, shared: _Shared) -> fx.Node:
        """Scale and shift, over the full axis: known positions have only their shift."""
        arguments = schema.arguments(self.copies[node])
        weight, bias = arguments.get("weight"), arguments.get("bias")
        if weight is None:
            return shared.scattered
        if bias is None:
            return self.editor.call(aten.mul.Tensor, shared.scattered, weight)
        return self.editor.call(aten.addcmul.default, bias, shared.scattered, weight)

    def _item(self, node: fx.Node, k: int) -> fx.Node:
        return self.editor.call(operator.getitem, node, k)

    def _scatter(self, values: fx.Node, axis: _CompleteAxis) -> fx.Node:
        """Live positions at their old places, zeros between."""
        pads = [0, 0] * (fake(values).ndim - axis.dim - 1)
        wide = self.editor.call(aten.constant_pad_nd.default, values, [*pads, 0, 1])
        offsets = {p: k for k, p in enumerate(axis.live)}
        take = torch.tensor([offsets.get(p, len(axis.live)) for p in range(axis.size)])
        index = self.store.constant_here(take, f"{values.name}_scattered")
        return self.editor.call(aten.index_select.default, wide, axis.dim, index)

    def _readers(self, node: fx.Node, dim: int) -> list[_AxisReader] | None:
        """The products with constant weights that read an axis; None if anything else reads it."""
        readers: list[_AxisReader] = []
        for user in node.users:
            relation = self.relations.get(user)
            if not isinstance(relation, Relation):
                return None
            places = [k for k, o in enumerate(relation.operands) if o.value is node]
            letters = relation.ins[places[0]][dim] if len(places) == 1 else ()
            if len(letters) != 1:
                return None
            if str(user.target) in PRODUCTS and letters[0] in relation.contracted:
                weight = relation.operands[relation.factors[1]].value
                if places[0] != relation.factors[0] or not schema.is_constant(weight):
                    return None
                if fake(weight).ndim != 2:
                    return None
                readers.append(_AxisReader((), user, weight))
                continue
            plain = relation.entry.fill == "same" and not (relation.moved | relation.window)
            if not (plain or user.target in _PASS) or letters not in relation.outs[0]:
                return None
            more = self._readers(user, relation.outs[0].index(letters))
            if more is None:
                return None
            readers += [_AxisReader((user, *r.moves), r.product, r.weight) for r in more]
        return readers

    def _correct(self, reader: _AxisReader, shared: _Shared, axis: _CompleteAxis) -> None:
        """Add the contribution of known positions to a product: weights times shared values."""
        constant = self.store.source[str(reader.weight.target)]
        rows = reader.product.target is not aten.linear.default  # [in, out]
        weight = constant.tensor.double().index_select(0 if rows else 1, torch.tensor(axis.dead))
        columns = shared.columns.to(weight)
        rest = columns.T @ weight if rows else weight @ columns
        if shared.values is None or not bool((rest != 0).any()):
            return
        old = self.copies[reader.product]
        with self.graph.inserting_before(old):
            name = _rest_name(constant.name)
            tensor = rest.to(constant.tensor.dtype)
            factors = Constant(tensor, name, constant.parameter, constant.requires_grad)
            read = self.editor.read_constant(self.store.add(factors))
            values = shared.values
            for move in reader.moves:
                values = self._apply_move(move, values, len(shared.columns.T))
            target = _BARE.get(old.target, old.target)  # type: ignore[call-overload]
            more = self.editor.call(target, values, read)
        with self.graph.inserting_after(old):
            both = self.graph.call_function(aten.add.Tensor, (old, more))
        old.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
        self.editor.set_value(both)
        both.meta = {**old.meta, **both.meta}
        self.copies[reader.product] = both

    def _apply_move(self, move: fx.Node, value: fx.Node, k: int) -> fx.Node:
        """A move, applied to the k shared values in place of the axis."""
        relation: Any = self.relations[move]
        copy = self.copies[move]
        before = next(o.value for o in relation.operands if isinstance(o.value, fx.Node))
        arguments = schema.arguments(copy) | {relation.operands[0].name: value}
        if relation.entry.args is not None:
            axis = next(d for d, n in enumerate(fake(value).shape) if not schema.same_size(n, fake(before).shape[d]))
            out = relation.outs[0].index(relation.ins[0][axis])
            sizes = self.editor.sizes(copy)
            sizes[out] = k
            arguments |= relation.entry.args(move, [sizes])
        return self.editor.call_named(move.target, arguments)


_REDUCED = ("sum", "mean", "max", "min")


def _rest_name(name: str) -> str:
    """`fc.weight` -> `fc.rest`: the name of the factors of shared values."""
    prefix, _, last = name.rpartition(".")
    leaf = "rest" if last == "weight" else f"{last}_rest"
    return f"{prefix}.{leaf}" if prefix else leaf
