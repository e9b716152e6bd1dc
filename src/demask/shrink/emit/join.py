"""Joins: pointwise ops over several values, whose layouts may differ.

A sum is never emitted as scatters and an add: one operand is put in the output's layout (padded, if
the order makes it a prefix), the constants of all operands are added as one vector, and the other
operand is added at its positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import key_of
from demask.ops import Relation, schema
from demask.ops.schema import fake
from demask.ops.traits import SUM_SIGNS
from demask.shrink.emit.adapt import mark_effect
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, cut_positions

aten = torch.ops.aten


def emit_join(context: EmitContext, relation: Relation) -> None:
    """Emit a join with every operand in the output's layout; a sum adds at positions."""
    node = relation.node
    layout = context.placement.value[node, 0]
    if (same := find_unchanged_operand(context, relation, layout)) is not None:
        context.emit(node, 0, same, layout)
        return
    value = None
    if node.target in SUM_SIGNS:
        value = _concatenate_disjoint(context, relation, layout) or _emit_sum(context, relation, layout)
    if value is not None:
        value.meta = {**node.meta, **value.meta}
        context.emit(node, 0, value, layout)
        return
    broadcast = relation.entry.affine is None  # statistics and scales are vectors
    values = [context.operand(relation, k, broadcast=broadcast) for k in range(len(relation.operands))]
    values = _expand_constants(context, relation, values, layout)
    args, kwargs = context.arguments(relation, values, [layout])
    context.finish(node, node.target, args, kwargs, [layout])


def _expand_constants(context: EmitContext, relation: Relation, values: list[Any], layout: Layout) -> list[Any]:
    """The operands, of which constants broadcast. They are expanded if only they have some axis, or
    if a number without axes would not decide the dtype as its operand did."""
    sizes = context.sizes(relation.node, 0, layout)
    covered = set()
    for k, value in enumerate(values):
        if isinstance(value, fx.Node):
            shape = fake(value).shape
            offset = len(sizes) - len(shape)
            covered |= {d + offset for d, n in enumerate(shape) if not schema.same_size(n, 1)}
        elif isinstance(relation.operands[k].value, fx.Node):
            raise AssertionError("an operand was lost")
    missing = [d for d, n in enumerate(sizes) if n != 1 and d not in covered]
    dtypes = {fake(n).dtype for n in values if isinstance(n, fx.Node)}
    if not missing and len(dtypes) < 2:
        return values
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node) and operand.value.op != "get_attr":
            values[k] = context.operand(relation, k)
    return values


def _emit_sum(context: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """a ± b with operands in different layouts along one axis; None for other layouts."""
    sources = [operand.value for operand in relation.operands]
    if not all(isinstance(s, fx.Node) and s.op != "get_attr" for s in sources):
        return None
    alpha = schema.arguments(relation.node).get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    signs = [1, alpha * SUM_SIGNS[relation.node.target]]
    layouts = [h for k in range(2) if (h := _layout_of(context, relation, k)) is not None]
    if not _same_shape(relation) or len(layouts) < 2 or not all(_has_output_position(h, layout) for h in layouts):
        return None
    differing = [[a for a in range(len(layout)) if h[a] != layout[a]] for h in layouts]
    axes = {axis for axes in differing for axis in axes}
    if len(axes) != 1 or signs[0] == 0 or 0 in signs:
        return None
    axis = axes.pop()
    base = _choose_base(layouts, layout, axis, signs)
    if base is None:
        return None
    return _add_at(context, relation, layout, axis, base, signs)


def _concatenate_disjoint(context: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """a + b, each zero where the other is not, as a concatenation along one axis; else None."""
    sources = [operand.value for operand in relation.operands]
    if relation.node.target is not aten.add.Tensor or schema.arguments(relation.node)["alpha"] != 1:
        return None
    if not all(isinstance(s, fx.Node) and s.op != "get_attr" for s in sources):
        return None
    layouts = [h for k in range(2) if (h := _layout_of(context, relation, k)) is not None and len(h) == len(layout)]
    if len(layouts) < 2:
        return None
    differing = {a for h in layouts for a in range(len(layout)) if h[a] != layout[a]}
    if len(differing) != 1:
        return None
    (axis,) = differing
    size = fake(relation.node).shape[axis]
    if any(len(axes[axis]) == 0 for axes in relation.ins) or not isinstance(size, int):
        return None
    wanted = list(range(size)) if layout[axis] is None else list(layout[axis] or ())
    present = [set(wanted if (positions := h[axis]) is None else positions) for h in layouts]
    parts = [[p for p in wanted if p in positions] for positions in present]
    if not all(parts) or sorted(parts[0] + parts[1]) != sorted(wanted):
        return None
    if bool((_delta(context, relation, layout, axis, [1, 1], wanted) != 0).any()):
        return None
    return _concatenate(context, relation, layout, axis, parts, wanted)


def _concatenate(context, relation, layout: Layout, axis: int, parts, wanted: list[int]) -> fx.Node:
    first, second = (0, 1) if parts[0][0] == wanted[0] else (1, 0)
    pieces = []
    for k in (first, second):
        part = list(layout)
        part[axis] = cut_positions(parts[k], fake(relation.node).shape[axis])
        piece = context.adapter.adapt(relation.operands[k].value, tuple(part))
        if relation.ins[k] != relation.outs[0]:
            sizes = context.sizes(relation.node, 0, tuple(part))
            piece = context.editor.call(aten.expand.default, piece, sizes)
        pieces.append(piece)
    joined = context.editor.call(aten.cat.default, pieces, axis)
    flat = parts[first] + parts[second]
    if flat == wanted:
        return joined
    index = context.store.index([flat.index(p) for p in wanted])
    return mark_effect(context.editor.call(aten.index_select.default, joined, axis, index), "scatter")


def _layout_of(context: EmitContext, relation: Relation, k: int) -> Layout | None:
    return context.adapter.have(key_of(relation.operands[k].value))


def _has_output_position(available: Layout, layout: Layout) -> bool:
    """Whether an operand has any position of the output. If not, it is a constant here."""
    pairs = zip(available, layout, strict=True)
    return all(h is None or w is None or bool(set(h) & set(w)) for h, w in pairs)


def _same_shape(relation: Relation) -> bool:
    return relation.ins[0] == relation.outs[0] == relation.ins[1]


def find_unchanged_operand(context: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """The operand that a call returns unchanged, or None: x + 0 and x · 1 are x. Does not apply to
    a neutral parameter, which training may change."""
    if relation.entry.neutral is None or len(relation.operands) != 2:
        return None
    value, neutral_operands = relation.entry.neutral
    scaled = schema.arguments(relation.node).get("alpha", 1) != 1  # a + alpha · b
    for k in neutral_operands:
        if _is_parameter(context, relation.operands[k].value):
            continue
        if scaled and k == 0:
            continue
        other = relation.operands[1 - k].value
        if not isinstance(other, fx.Node) or other.op == "get_attr":
            continue
        same = fake(other).dtype == _dtype(relation) and relation.ins[1 - k] == relation.outs[0]
        if same and _is_all(context, relation, k, value):
            return context.operand(relation, 1 - k)
    return None


def _is_parameter(context: EmitContext, source: Any) -> bool:
    is_constant = isinstance(source, fx.Node) and source.op == "get_attr"
    return is_constant and context.store.source[str(source.target)].parameter


def _is_all(context: EmitContext, relation: Relation, k: int, value: float) -> bool:
    """Whether an operand is known to be one value at every live position."""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node):
        return source == value
    fact, slot = context.facts[key_of(source)], context.placement.slot[relation.node, k]
    known = fact.known & (fact.fill == value)
    for axis, positions in enumerate(slot):
        if positions is not None and known.shape[axis] != 1:
            known = known.index_select(axis, torch.tensor(positions, dtype=torch.long))
    return bool(known.all())


def _dtype(relation: Relation) -> torch.dtype:
    return fake(relation.node).dtype


def _choose_base(layouts: list[Any], layout: Layout, axis: int, signs: list[Any]) -> int | None:
    """The operand to lay out first: one that already has the wanted layout, else one that is a run
    of it, else the larger; never a subtracted one."""
    usable = [k for k in range(2) if signs[k] == 1]
    want = layout[axis]
    scores = []
    for k in usable:
        positions = layouts[k][axis]
        if positions == want:
            return k
        run = _is_run(positions, want)
        scores.append((run, len(positions) if positions is not None else 1 << 60, -k))
    return -max(scores)[2] if scores else None


def _is_run(positions: Any, want: Any) -> bool:
    """Whether the positions are consecutive among the wanted ones."""
    if positions is None or (want is None and not positions):
        return False
    offsets = {p: k for k, p in enumerate(want)} if want is not None else None
    first = positions[0] if offsets is None else offsets.get(positions[0])
    if first is None:
        return False
    return all((p if offsets is None else offsets.get(p)) == first + k for k, p in enumerate(positions))


def _add_at(context, relation, layout: Layout, axis: int, base: int, signs: list[Any]) -> fx.Node:
    adapter, other = context.adapter, 1 - base
    source, added = relation.operands[base].value, relation.operands[other].value
    size = fake(relation.node).shape[axis]
    positions = layout[axis]
    wanted = list(range(size)) if positions is None else list(positions)
    delta = _delta(context, relation, layout, axis, signs, wanted)
    if (grown := _extend_prefix(context, relation, layout, axis, base, signs, delta)) is not None:
        return grown
    laid_out = _lay_out(context, source, layout, axis, wanted, delta)
    offsets = {p: k for k, p in enumerate(wanted)}
    available = adapter.have(key_of(added))[axis]
    mine = [p for p in (range(size) if available is None else available) if p in offsets]
    part = list(layout)
    part[axis] = tuple(mine) if mine != list(range(size)) else None
    value = adapter.adapt(added, tuple(part))
    targets = [offsets[p] for p in mine]
    dtype = _dtype(relation)
    if fake(value).dtype != dtype:
        value = context.editor.call(aten.to.dtype, value, dtype)
    if targets == list(range(len(wanted))):
        return context.editor.call(aten.add.Tensor, laid_out, value, alpha=signs[other])
    index = context.store.index(targets)
    args = (laid_out, axis, index, value)
    return mark_effect(context.editor.call(aten.index_add.default, *args, alpha=signs[other]), "scatter-add")


def _extend_prefix(context, relation, layout: Layout, axis: int, base: int, signs, delta) -> fx.Node | None:
    """A sum of which the base is a prefix and the rest is the other operand alone: the base with
    the common positions added, then the rest. None where that is not so."""
    editor, adapter = context.editor, context.adapter
    source, added = relation.operands[base].value, relation.operands[1 - base].value
    own, other = (adapter.have(key_of(n))[axis] for n in (source, added))
    wanted = layout[axis] or tuple(range(fake(relation.node).shape[axis]))
    if own is None or other is None or signs[1 - base] != 1 or len(own) >= len(wanted):
        return None
    own_places = {p: k for k, p in enumerate(own)}
    common, rest = [p for p in other if p in own_places], list(wanted[len(own) :])
    if tuple(wanted[: len(own)]) != tuple(own) or list(other) != common + rest:
        return None
    if bool((delta != 0).any()) or not _is_aligned(context, relation, layout, axis):
        return None
    first, second = adapter.emitted[key_of(source)].node, adapter.emitted[key_of(added)].node
    if common:
        part = adapter.select(second, axis, range(len(common)))
        index = context.store.index([own_places[p] for p in common])
        first = mark_effect(editor.call(aten.index_add.default, first, axis, index, part), "scatter-add")
        second = adapter.select(second, axis, range(len(common), len(other)))
    return editor.call(aten.cat.default, [first, second], axis)


def _is_aligned(context: EmitContext, relation: Relation, layout: Layout, axis: int) -> bool:
    """Whether the operands have the output's layout, except along one axis, and its dtype."""
    for operand in relation.operands:
        available = context.adapter.have(key_of(operand.value))
        if any(h != w for a, (h, w) in enumerate(zip(available, layout, strict=True)) if a != axis):  # type: ignore[arg-type]
            return False
        if fake(operand.value).dtype != _dtype(relation):
            return False
    return True


def _delta(context, relation, layout, axis: int, signs, wanted: list[int]) -> Tensor:
    """One vector: the sum of the known values of every operand at positions that it lacks."""
    total = torch.zeros((), dtype=_dtype(relation))
    for k, operand in enumerate(relation.operands):
        key = key_of(operand.value)
        available = context.adapter.have(key)[axis]
        fill = context.adapter.fill(key, layout, axis, list(layout))
        available = set(wanted) if available is None else set(available)
        missing = torch.tensor([p not in available for p in wanted])
        shape = [len(wanted) if d == axis else 1 for d in range(fill.ndim)]
        total = total + torch.where(missing.view(shape), fill, torch.zeros((), dtype=fill.dtype)) * signs[k]
    return total.to(_dtype(relation))


def _lay_out(context, source: fx.Node, layout, axis: int, wanted: list[int], delta: Tensor) -> fx.Node:
    """The base operand in the output's layout, with the constants of the join added."""
    adapter = context.adapter
    available = adapter.have(key_of(source))[axis]
    part = list(layout)
    real = fake(source).shape[axis]
    have = list(range(real)) if available is None else list(available)
    if set(have) >= set(wanted):
        part[axis], have = layout[axis], wanted  # Nothing is missing: only the order may differ.
    elif set(have) <= set(wanted):
        part[axis] = available
    else:
        needed = set(wanted)
        have = [p for p in have if p in needed]
        part[axis] = cut_positions(have, real)
    base = adapter.adapt(source, tuple(part))
    if fake(base).dtype != delta.dtype:
        base = context.editor.call(aten.to.dtype, base, delta.dtype)
    places = set(have)
    missing = [k for k, p in enumerate(wanted) if p not in places]
    value = 0.0
    if missing:
        index = torch.tensor(missing)
        fills = delta.index_select(axis, index) if delta.shape[axis] != 1 else delta
        if bool((fills == fills.reshape(-1)[0]).all()):
            value = fills.reshape(-1)[0].item()
            is_filled = torch.zeros(len(wanted), dtype=torch.bool).index_fill(0, index, True)
            shape = [len(wanted) if d == axis else 1 for d in range(delta.ndim)]
            delta = delta.masked_fill(is_filled.view(shape), 0)
        order = {p: k for k, p in enumerate(wanted)}
        base = adapter.scatter(base, axis, tuple(order[p] for p in have), len(wanted), value)
    if bool((delta != 0).any()):
        base = context.editor.call(aten.add.Tensor, base, context.store.constant(delta, "shift"))
    return base
