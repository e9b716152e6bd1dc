"""Joins: pointwise ops over several values, whose layouts may differ.

A sum never scatters and then adds: one operand is laid out (padded, if order made it a prefix), the
constants of all operands go in as one vector, and the others are added at their positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import key_of
from demask.ops import Relation, schema
from demask.ops.traits import SUM_SIGNS
from demask.shrink.emit.adapt import marked
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, whole

aten = torch.ops.aten


def emit_join(walk: EmitContext, relation: Relation) -> None:
    """Every operand in the output's layout; sums by adding at positions."""
    node = relation.node
    layout = walk.placement.value[node, 0]
    if (same := unchanged(walk, relation, layout)) is not None:
        walk.keep(node, 0, same, layout)
        return
    made = None
    if node.target in SUM_SIGNS:
        made = _disjoint(walk, relation, layout) or _sum(walk, relation, layout)
    if made is not None:
        made.meta = {**node.meta, **made.meta}
        walk.keep(node, 0, made, layout)
        return
    broadcast = relation.entry.affine is None  # statistics and scales are vectors
    values = [walk.operand(relation, k, broadcast=broadcast)
              for k in range(len(relation.operands))]  # fmt: skip
    values = _widened(walk, relation, values, layout)
    args, kwargs = walk.arguments(relation, values, [layout])
    walk.finish(node, node.target, args, kwargs, [layout])


def _widened(walk: EmitContext, relation: Relation, values: list[Any], layout: Layout) -> list[Any]:
    """Operands that are constants broadcast; if only they had some axis, or a number without axes
    would not decide the dtype as its operand did, they are written out."""
    sizes = walk.sizes(relation.node, 0, layout)
    covered = set()
    for k, value in enumerate(values):
        if isinstance(value, fx.Node):
            shape = value.meta["val"].shape
            offset = len(sizes) - len(shape)
            covered |= {d + offset for d, n in enumerate(shape) if not schema.same_size(n, 1)}
        elif isinstance(relation.operands[k].value, fx.Node):
            raise AssertionError("an operand was lost")
    missing = [d for d, n in enumerate(sizes) if n != 1 and d not in covered]
    dtypes = {n.meta["val"].dtype for n in values if isinstance(n, fx.Node)}
    if not missing and len(dtypes) < 2:
        return values
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node) and operand.value.op != "get_attr":
            values[k] = walk.operand(relation, k)
    return values


def _sum(walk: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """a ± b with operands in different layouts along one axis; None where the plain form does."""
    sources = [operand.value for operand in relation.operands]
    if not all(isinstance(s, fx.Node) and s.op != "get_attr" for s in sources):
        return None
    alpha = schema.arguments(relation.node).get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        return None
    signs = [1, alpha * SUM_SIGNS[relation.node.target]]  # type: ignore[index]
    held = [_held(walk, relation, k) for k in range(2)]
    if not _same_shape(relation) or any(h is None or not _meet(h, layout) for h in held):
        return None
    differing = [[a for a in range(len(layout)) if h[a] != layout[a]] for h in held]  # type: ignore[index]
    axes = {axis for axes in differing for axis in axes}
    if len(axes) != 1 or signs[0] == 0 or 0 in signs:
        return None
    axis = axes.pop()
    base = _base(held, layout, axis, signs)
    if base is None:
        return None
    return _add_at(walk, relation, layout, axis, base, signs)


def _disjoint(walk: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """a + b of which each is zero where the other is not: the two joined along one axis."""
    sources = [operand.value for operand in relation.operands]
    if relation.node.target is not aten.add.Tensor or schema.arguments(relation.node)["alpha"] != 1:
        return None
    if not all(isinstance(s, fx.Node) and s.op != "get_attr" for s in sources):
        return None
    held = [_held(walk, relation, k) for k in range(2)]
    if any(h is None or len(h) != len(layout) for h in held):
        return None
    differing = {a for h in held for a in range(len(layout)) if h[a] != layout[a]}  # type: ignore[index]
    if len(differing) != 1:
        return None
    (axis,) = differing
    size = relation.node.meta["val"].shape[axis]
    if any(len(axes[axis]) == 0 for axes in relation.ins) or not isinstance(size, int):
        return None
    wanted = list(range(size)) if layout[axis] is None else list(layout[axis] or ())
    mine = [[p for p in wanted if h[axis] is None or p in set(h[axis])] for h in held]  # type: ignore[index,arg-type]
    if not all(mine) or sorted(mine[0] + mine[1]) != sorted(wanted):
        return None
    if bool((_delta(walk, relation, layout, axis, [1, 1], wanted) != 0).any()):
        return None
    return _joined(walk, relation, layout, axis, mine, wanted)


def _joined(walk, relation, layout: Layout, axis: int, mine, wanted: list[int]) -> fx.Node:
    first, second = (0, 1) if mine[0][0] == wanted[0] else (1, 0)
    pieces = []
    for k in (first, second):
        part = list(layout)
        part[axis] = whole(mine[k], relation.node.meta["val"].shape[axis])
        piece = walk.adapter.adapt(relation.operands[k].value, tuple(part))
        if relation.ins[k] != relation.outs[0]:
            sizes = walk.sizes(relation.node, 0, tuple(part))
            piece = walk.editor.call(aten.expand.default, piece, sizes)
        pieces.append(piece)
    made = walk.editor.call(aten.cat.default, pieces, axis)
    flat = mine[first] + mine[second]
    if flat == wanted:
        return made
    index = walk.pool.index([flat.index(p) for p in wanted])
    return marked(walk.editor.call(aten.index_select.default, made, axis, index), "scatter")


def _held(walk: EmitContext, relation: Relation, k: int) -> Layout | None:
    return walk.adapter.have(key_of(relation.operands[k].value))


def _meet(held: Layout, layout: Layout) -> bool:
    """Does an operand hold anything of what the output wants? (Else it is a constant here.)"""
    pairs = zip(held, layout, strict=True)
    return all(h is None or w is None or bool(set(h) & set(w)) for h, w in pairs)


def _same_shape(relation: Relation) -> bool:
    return relation.ins[0] == relation.outs[0] == relation.ins[1]


def unchanged(walk: EmitContext, relation: Relation, layout: Layout) -> fx.Node | None:
    """x + 0 and x · 1 are x: the operand that the call leaves as it is, if one does. A parameter
    stays an operand: training may make it another number."""
    if relation.entry.neutral is None or len(relation.operands) != 2:
        return None
    value, places = relation.entry.neutral
    scaled = schema.arguments(relation.node).get("alpha", 1) != 1  # a + alpha · b
    for k in places:
        if _is_parameter(walk, relation.operands[k].value):
            continue
        if scaled and k == 0:
            continue
        other = relation.operands[1 - k].value
        if not isinstance(other, fx.Node) or other.op == "get_attr":
            continue
        same = (
            other.meta["val"].dtype == _dtype(relation) and relation.ins[1 - k] == relation.outs[0]
        )
        if same and _is_all(walk, relation, k, value):
            return walk.operand(relation, 1 - k)
    return None


def _is_parameter(walk: EmitContext, source: Any) -> bool:
    held = isinstance(source, fx.Node) and source.op == "get_attr"
    return held and walk.pool.source[str(source.target)].parameter


def _is_all(walk: EmitContext, relation: Relation, k: int, value: float) -> bool:
    """Is an operand known to be one value at every position that is kept?"""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node):
        return source == value
    fact, slot = walk.facts[key_of(source)], walk.placement.slot[relation.node, k]
    known = fact.known & (fact.fill == value)
    for axis, positions in enumerate(slot):
        if positions is not None and known.shape[axis] != 1:
            known = known.index_select(axis, torch.tensor(positions, dtype=torch.long))
    return bool(known.all())


def _dtype(relation: Relation) -> torch.dtype:
    return relation.node.meta["val"].dtype


def _base(held: list[Any], layout: Layout, axis: int, signs: list[Any]) -> int | None:
    """The operand to lay out first: one that is in place already, or a run of the output, or the
    larger; a subtracted one never."""
    usable = [k for k in range(2) if signs[k] == 1]
    want = layout[axis]
    scores = []
    for k in usable:
        positions = held[k][axis]
        if positions == want:
            return k
        run = _is_run(positions, want)
        scores.append((run, len(positions) if positions is not None else 1 << 60, -k))
    return -max(scores)[2] if scores else None


def _is_run(positions: Any, want: Any) -> bool:
    """Do the positions stand in the wanted ones one after another?"""
    if positions is None or (want is None and not positions):
        return False
    where = {p: k for k, p in enumerate(want)} if want is not None else None
    first = positions[0] if where is None else where.get(positions[0])
    if first is None:
        return False
    return all((p if where is None else where.get(p)) == first + k for k, p in enumerate(positions))


def _add_at(walk, relation, layout: Layout, axis: int, base: int, signs: list[Any]) -> fx.Node:
    adapter, other = walk.adapter, 1 - base
    source, added = relation.operands[base].value, relation.operands[other].value
    size = relation.node.meta["val"].shape[axis]
    positions = layout[axis]
    wanted = list(range(size)) if positions is None else list(positions)
    delta = _delta(walk, relation, layout, axis, signs, wanted)
    if (grown := _grown(walk, relation, layout, axis, base, signs, delta)) is not None:
        return grown
    made = _laid_out(walk, source, layout, axis, wanted, delta)
    at = {p: k for k, p in enumerate(wanted)}
    held = adapter.have(key_of(added))[axis]
    mine = [p for p in (range(size) if held is None else held) if p in at]
    part = list(layout)
    part[axis] = tuple(mine) if mine != list(range(size)) else None
    value = adapter.adapt(added, tuple(part))
    places = [at[p] for p in mine]
    dtype = _dtype(relation)
    if value.meta["val"].dtype != dtype:
        value = walk.editor.call(aten.to.dtype, value, dtype)
    if places == list(range(len(wanted))):
        return walk.editor.call(aten.add.Tensor, made, value, alpha=signs[other])
    index = walk.pool.index(places)
    args = (made, axis, index, value)
    return marked(
        walk.editor.call(aten.index_add.default, *args, alpha=signs[other]), "scatter-add"
    )


def _grown(walk, relation, layout: Layout, axis: int, base: int, signs, delta) -> fx.Node | None:
    """A sum whose base is a prefix of it, the rest being the other operand alone: the base with
    what meets it added, and the rest behind it."""
    editor, adapter = walk.editor, walk.adapter
    source, added = relation.operands[base].value, relation.operands[1 - base].value
    held, other = (adapter.have(key_of(n))[axis] for n in (source, added))
    wanted = layout[axis] or tuple(range(relation.node.meta["val"].shape[axis]))
    if held is None or other is None or signs[1 - base] != 1 or len(held) >= len(wanted):
        return None
    meets, rest = [p for p in other if p in set(held)], list(wanted[len(held) :])
    if tuple(wanted[: len(held)]) != tuple(held) or list(other) != meets + rest:
        return None
    if bool((delta != 0).any()) or not _plain(walk, relation, layout, axis):
        return None
    first, second = adapter.made[key_of(source)].node, adapter.made[key_of(added)].node
    if meets:
        part = adapter.select(second, axis, range(len(meets)))
        index = walk.pool.index([held.index(p) for p in meets])
        first = marked(editor.call(aten.index_add.default, first, axis, index, part), "scatter-add")
        second = adapter.select(second, axis, range(len(meets), len(other)))
    return editor.call(aten.cat.default, [first, second], axis)


def _plain(walk: EmitContext, relation: Relation, layout: Layout, axis: int) -> bool:
    """Do the operands stand in the output's layout and dtype but for one axis?"""
    for operand in relation.operands:
        held = walk.adapter.have(key_of(operand.value))
        if any(h != w for a, (h, w) in enumerate(zip(held, layout, strict=True)) if a != axis):  # type: ignore[arg-type]
            return False
        if operand.value.meta["val"].dtype != _dtype(relation):
            return False
    return True


def _delta(walk, relation, layout, axis: int, signs, wanted: list[int]) -> Tensor:
    """What every operand's known part adds at positions it does not hold: one vector."""
    total = torch.zeros((), dtype=_dtype(relation))
    for k, operand in enumerate(relation.operands):
        key = key_of(operand.value)
        held = walk.adapter.have(key)[axis]
        fill = walk.adapter.fill(key, layout, axis, list(layout))
        held = set(wanted) if held is None else set(held)
        missing = torch.tensor([p not in held for p in wanted])
        shape = [len(wanted) if d == axis else 1 for d in range(fill.ndim)]
        total = (
            total
            + torch.where(missing.view(shape), fill, torch.zeros((), dtype=fill.dtype)) * signs[k]
        )
    return total.to(_dtype(relation))


def _laid_out(
    walk, source: fx.Node, layout, axis: int, wanted: list[int], delta: Tensor
) -> fx.Node:
    """The base operand in the output's layout, with the constants of the join in it."""
    adapter = walk.adapter
    held = adapter.have(key_of(source))[axis]
    part = list(layout)
    real = source.meta["val"].shape[axis]
    have = list(range(real)) if held is None else list(held)
    if set(have) >= set(wanted):
        part[axis], have = layout[axis], wanted  # All is held, perhaps in another order.
    elif set(have) <= set(wanted):
        part[axis] = held
    else:
        have = [p for p in have if p in set(wanted)]
        part[axis] = whole(have, real)
    made = adapter.adapt(source, tuple(part))
    if made.meta["val"].dtype != delta.dtype:
        made = walk.editor.call(aten.to.dtype, made, delta.dtype)
    missing = [k for k, p in enumerate(wanted) if p not in set(have)]
    value = 0.0
    if missing:
        index = torch.tensor(missing)
        there = delta.index_select(axis, index) if delta.shape[axis] != 1 else delta
        if bool((there == there.reshape(-1)[0]).all()):
            value = there.reshape(-1)[0].item()
            at = torch.zeros(len(wanted), dtype=torch.bool).index_fill(0, index, True)
            shape = [len(wanted) if d == axis else 1 for d in range(delta.ndim)]
            delta = delta.masked_fill(at.view(shape), 0)
        order = {p: k for k, p in enumerate(wanted)}
        made = adapter.scattered(made, axis, tuple(order[p] for p in have), len(wanted), value)
    if bool((delta != 0).any()):
        made = walk.editor.call(aten.add.Tensor, made, walk.pool.constant(delta, "shift"))
    return made
