"""Axes that must be complete, over what varies of them alone.

A norm, a softmax or a mean reads a whole axis, of which some positions may be known before any
input comes. What those add to a sum, a mean or a variance is a constant; and what becomes of them
is told by few values per token:

    layer norm  y_c = g_c · (-m/s) + g_c f_c · (1/s) + b_c      m, s of all N, from the live alone
    RMS norm    y_c = g_c f_c · (1/s)
    softmax     y_c = exp(f_c) / Σ                              equal ones merged: one with + ln n

So where every reader multiplies the axis by constant weights, W · y = W_live · y_live + U · z, with
z those values and U what the weights of the known positions make of them (design, section 4).
Nothing is cut here: known positions leave as zeros, and the passes that follow remove them.
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
from demask.ops import Relation, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.traits import IDENTITIES
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten
_PASS = IDENTITIES | {aten.dropout.default}
_BARE = {aten.addmm.default: aten.mm.default}  # the product alone, without what is added to it


def condensed(analysis: LayoutAnalysis) -> Program | None:
    """The program with such calls on what varies alone; None where there are none."""
    program, relations, facts = analysis.program, analysis.relations, analysis.known
    found = {
        node: axis
        for node, relation in relations.items()
        if isinstance(relation, Relation) and (axis := _partly_known(relation, facts)) is not None
    }
    if not found:
        return None
    walk = _Condenser(program, relations, facts)
    changed = [walk.visit(node, axis) for node, axis in found.items()]
    return walk.editor.finish() if any(changed) else None


@dataclass(frozen=True, slots=True)
class _CompleteAxis:
    """A complete axis: its dimension and size, the positions that vary, those that are known, and
    what is known of these (float64)."""

    dim: int
    size: int
    live: tuple[int, ...]
    dead: tuple[int, ...]
    fill: Tensor

    @property
    def share(self) -> float:
        return len(self.live) / self.size


def _partly_known(relation: Relation, facts: Facts) -> _CompleteAxis | None:
    """The one complete axis of a call, if some of its positions are known and some are not."""
    if not relation.entry.rest:
        return None
    dims = [k for k, axis in enumerate(relation.ins[0]) if set(axis) & relation.complete]
    source = relation.operands[0].value
    if len(dims) != 1 or not isinstance(source, fx.Node):
        return None
    weight = schema.arguments(relation.node).get("weight")
    if isinstance(weight, fx.Node) and not bool(facts[key_of(weight)].known.all()):
        return None  # a scale that only a call tells
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
    """What a call over the live positions made. scattered: the output, zero where known (before
    scale and shift). values: [..., k] along the axis, what known positions depend on; columns: for
    each known position its k factors, float64 [dead, k]."""

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
        self.pool = ConstantStore(self.editor)

    def visit(self, node: fx.Node, axis: _CompleteAxis) -> bool:
        """Replace a call, if what is known of its axis can be kept out of it."""
        kind = self.relations[node].entry.rest  # type: ignore[union-attr]
        with self.graph.inserting_before(self.copies[node]):
            if kind in _REDUCED:
                self._replace(node, self._reduction(node, axis, kind))
                return True
            readers = self._readers(node, axis.dim)
            if readers is None and not (kind != "softmax" and self._scaled_away(node, axis)):
                return False
            shared = {"softmax": self._softmax, "layer": self._layer, "rms": self._rms}[kind](
                node, axis
            )
            made = self._scaled(node, shared) if kind != "softmax" else shared.scattered
        self._replace(node, made)
        for reader in readers or ():
            self._correct(reader, shared, axis)
        return True

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        self.editor.replace(self.copies[node], made, inherit=True)
        self.copies[node] = made

    def _source(self, node: fx.Node) -> fx.Node:
        source = self.relations[node].operands[0].value  # type: ignore[union-attr]
        return self.copies[source]

    def _live(self, node: fx.Node, axis: _CompleteAxis) -> fx.Node:
        index = self.pool.here(torch.tensor(axis.live), f"{node.name}_live")
        return self.editor.call(aten.index_select.default, self._source(node), axis.dim, index)

    def _reduction(self, node: fx.Node, axis: _CompleteAxis, kind: str) -> fx.Node:
        """sum, mean, maximum or minimum of the live positions, and of what is known beforehand."""
        found = schema.arguments(self.copies[node])
        found[self.relations[node].operands[0].name] = self._live(node, axis)  # type: ignore[union-attr]
        made = self.editor.call_named(node.target, found)
        if kind == "max":
            return self.editor.call(aten.clamp_min.default, made, float(axis.fill.max()))
        if kind == "min":
            return self.editor.call(aten.clamp_max.default, made, float(axis.fill.min()))
        total = float(axis.fill.sum())
        if kind == "mean":
            made, total = self.editor.call(aten.mul.Tensor, made, axis.share), total / axis.size
        return self.editor.call(aten.add.Tensor, made, total) if total else made

    def _softmax(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        values, group, count = torch.unique(axis.fill, return_inverse=True, return_counts=True)
        logits = values + count.double().log()
        live, k = self._live(node, axis), len(values)
        pads = [0, 0] * (node.meta["val"].ndim - axis.dim - 1)
        if k == 1:
            both = self.editor.call(
                aten.constant_pad_nd.default, live, [*pads, 0, 1], float(logits[0])
            )
        else:
            shape = [k if d == axis.dim else n for d, n in enumerate(self.editor.sizes(live))]
            line = logits.view([-1 if d == axis.dim else 1 for d in range(len(shape))])
            merged = self.pool.here(line.to(node.meta["val"].dtype), f"{node.name}_merged")
            both = self.editor.call(aten.expand.default, merged, shape)
            both = self.editor.call(aten.cat.default, [live, both], axis.dim)
        found = schema.arguments(self.copies[node]) | {"self": both}
        made, n = self.editor.call_named(node.target, found), len(axis.live)
        first = self.editor.call(aten.slice.Tensor, made, axis.dim, 0, n)
        last = self.editor.call(aten.slice.Tensor, made, axis.dim, n, n + k)
        columns = torch.zeros(len(axis.dead), k, dtype=torch.float64)
        columns[torch.arange(len(group)), group] = 1 / count[group].double()
        return _Shared(self._scattered(first, axis), last, columns)

    def _layer(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        """Moments of the whole axis from those of its live part, then (x - m) / s."""
        call, live, dead = self.editor.call, self._live(node, axis), len(axis.dead)
        both = call(aten.var_mean.correction, live, [axis.dim], correction=0, keepdim=True)
        var, mean = (self._item(both, k) for k in range(2))
        middle = float(axis.fill.mean())
        spread = float(((axis.fill - middle) ** 2).sum()) / axis.size
        whole = call(aten.mul.Tensor, mean, axis.share)
        if middle:
            whole = call(aten.add.Tensor, whole, middle * dead / axis.size)
        off = call(aten.sub.Tensor, mean, whole)
        var = call(aten.add.Tensor, var, call(aten.mul.Tensor, off, off))
        away = call(aten.sub.Tensor, whole, middle) if middle else whole
        rest = call(aten.mul.Tensor, call(aten.mul.Tensor, away, away), dead / axis.size)
        var = call(aten.add.Tensor, call(aten.mul.Tensor, var, axis.share), rest)
        var = call(aten.add.Tensor, var, spread + schema.arguments(node)["eps"])
        scale = call(aten.rsqrt.default, var)
        shift = call(aten.neg.default, call(aten.mul.Tensor, whole, scale))
        made = call(aten.addcmul.default, shift, live, scale)
        return self._two(node, axis, made, shift, scale)

    def _rms(self, node: fx.Node, axis: _CompleteAxis) -> _Shared:
        """x / s, s from the live squares and what the known ones add to their mean."""
        call, live = self.editor.call, self._live(node, axis)
        eps = schema.arguments(node)["eps"]
        eps = torch.finfo(node.meta["val"].dtype).eps if eps is None else eps
        eps += float((axis.fill**2).sum()) / axis.size
        squares = call(aten.mean.dim, call(aten.mul.Tensor, live, live), [axis.dim], True)
        squares = call(aten.mul.Tensor, squares, axis.share)
        scale = call(aten.rsqrt.default, call(aten.add.Tensor, squares, eps))
        return self._two(node, axis, call(aten.mul.Tensor, live, scale), None, scale)

    def _two(
        self,
        node: fx.Node,
        axis: _CompleteAxis,
        made: fx.Node,
        shift: fx.Node | None,
        scale: fx.Node,
    ) -> _Shared:
        """The values known positions depend on, -m/s and 1/s, and their factors g and g · f."""
        gains = self._gains(node)[list(axis.dead)]
        pairs = [(shift, gains), (scale, gains * axis.fill)]
        pairs = [(v, c) for v, c in pairs if v is not None and bool((c != 0).any())]
        values = [v for v, _ in pairs]
        both = (
            self.editor.call(aten.cat.default, values, axis.dim)
            if len(values) > 1
            else values[0] if values else None
        )  # fmt: skip
        columns = torch.stack([c for _, c in pairs], 1) if pairs else torch.zeros(len(axis.dead), 0)
        return _Shared(self._scattered(made, axis), both, columns)

    def _gains(self, node: fx.Node) -> Tensor:
        """The norm's scale, float64."""
        weight = schema.arguments(node).get("weight")
        size = node.meta["val"].shape[-1]
        if weight is None:
            return torch.ones(size, dtype=torch.float64)
        return self.facts[key_of(weight)].fill.double().expand(size)

    def _scaled_away(self, node: fx.Node, axis: _CompleteAxis) -> bool:
        """Is nothing left of the known positions, whatever the statistics?"""
        gains = self._gains(node)[list(axis.dead)]
        layer = self.relations[node].entry.rest == "layer"  # type: ignore[union-attr]
        return bool((gains == 0).all()) or (not layer and bool((gains * axis.fill == 0).all()))

    def _scaled(self, node: fx.Node, shared: _Shared) -> fx.Node:
        """Scale and shift, over the whole axis: known positions are left with their shift."""
        found = schema.arguments(self.copies[node])
        weight, bias = found.get("weight"), found.get("bias")
        if weight is None:
            return shared.scattered
        if bias is None:
            return self.editor.call(aten.mul.Tensor, shared.scattered, weight)
        return self.editor.call(aten.addcmul.default, bias, shared.scattered, weight)

    def _item(self, node: fx.Node, k: int) -> fx.Node:
        return self.editor.call(operator.getitem, node, k)

    def _scattered(self, made: fx.Node, axis: _CompleteAxis) -> fx.Node:
        """Live positions back where they were, zeros between."""
        pads = [0, 0] * (made.meta["val"].ndim - axis.dim - 1)
        wide = self.editor.call(aten.constant_pad_nd.default, made, [*pads, 0, 1])
        at = {p: k for k, p in enumerate(axis.live)}
        take = torch.tensor([at.get(p, len(axis.live)) for p in range(axis.size)])
        index = self.pool.here(take, f"{made.name}_scattered")
        return self.editor.call(aten.index_select.default, wide, axis.dim, index)

    def _readers(self, node: fx.Node, dim: int) -> list[_AxisReader] | None:
        """The products with constant weights that are all that reads an axis, if so."""
        found: list[_AxisReader] = []
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
                if weight.meta["val"].ndim != 2:
                    return None
                found.append(_AxisReader((), user, weight))
                continue
            plain = relation.entry.fill == "same" and not (relation.moved | relation.window)
            if not (plain or user.target in _PASS) or letters not in relation.outs[0]:
                return None
            more = self._readers(user, relation.outs[0].index(letters))
            if more is None:
                return None
            found += [_AxisReader((user, *r.moves), r.product, r.weight) for r in more]
        return found

    def _correct(self, reader: _AxisReader, shared: _Shared, axis: _CompleteAxis) -> None:
        """Add to a product what the weights of the known positions make of the shared values."""
        constant = self.pool.source[str(reader.weight.target)]
        rows = reader.product.target is not aten.linear.default  # [in, out]
        weight = constant.tensor.double().index_select(0 if rows else 1, torch.tensor(axis.dead))
        columns = shared.columns.to(weight)
        rest = columns.T @ weight if rows else weight @ columns
        if shared.values is None or not bool((rest != 0).any()):
            return
        old = self.copies[reader.product]
        with self.graph.inserting_before(old):
            name = _sibling(constant.name)
            tensor = rest.to(constant.tensor.dtype)
            made = Constant(tensor, name, constant.parameter, constant.requires_grad)
            read = self.editor.read_constant(self.pool.add(made))
            values = shared.values
            for move in reader.moves:
                values = self._again(move, values, len(shared.columns.T))
            target = _BARE.get(old.target, old.target)  # type: ignore[call-overload]
            more = self.editor.call(target, values, read)
        with self.graph.inserting_after(old):
            both = self.graph.call_function(aten.add.Tensor, (old, more))
        old.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
        self.editor.set_value(both)
        both.meta = {**old.meta, **both.meta}
        self.copies[reader.product] = both

    def _again(self, move: fx.Node, value: fx.Node, k: int) -> fx.Node:
        """A move, of the k shared values in the place of the axis."""
        relation: Any = self.relations[move]
        copy = self.copies[move]
        before = next(o.value for o in relation.operands if isinstance(o.value, fx.Node))
        found = schema.arguments(copy) | {relation.operands[0].name: value}
        if relation.entry.args is not None:
            axis = next(d for d, n in enumerate(value.meta["val"].shape)
                        if not schema.same_size(n, before.meta["val"].shape[d]))  # fmt: skip
            out = relation.outs[0].index(relation.ins[0][axis])
            sizes = self.editor.sizes(copy)
            sizes[out] = k
            found |= relation.entry.args(move, [sizes])
        return self.editor.call_named(move.target, found)


_REDUCED = ("sum", "mean", "max", "min")


def _sibling(name: str) -> str:
    """`fc.weight` -> `fc.rest`: what the weights of known positions make of shared values."""
    prefix, _, last = name.rpartition(".")
    leaf = "rest" if last == "weight" else f"{last}_rest"
    return f"{prefix}.{leaf}" if prefix else leaf
