"""Contractions: operands and weights cut alike, what known inputs leave put into the bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import key_of
from demask.facts.masks import any_over, project, spread
from demask.graph.program import Constant
from demask.graph.provenance import Cut
from demask.ops import Relation, schema
from demask.ops.schema import same_size
from demask.shrink.emit.adapt import marked
from demask.shrink.emit.border_map import Absorbed, absorbed, constants_alone
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext
from demask.shrink.emit.strided_conv import sampled, spaced
from demask.shrink.layout.cells import At, Layout, whole
from demask.shrink.layout.ties import sampling

aten = torch.ops.aten


def emit_contraction(walk: EmitContext, relation: Relation) -> None:
    """linear, matmul, convolution: the same op on fewer positions; constants into the bias."""
    node = relation.node
    layout = spaced(relation, walk.placement.value[node, 0])
    alone = _wanted(relation, constants_alone(relation, walk.facts, layout), layout)
    last = relation.operands[-1]
    fixed = last.name != "bias" or schema.is_constant(last.value)
    if alone.kernel is not None and fixed:
        none = tuple(() if k == _channel(relation) else p for k, p in enumerate(layout))
        _keep(walk, node, _emit_rows(walk, relation, layout, none, alone), layout)
        return
    if relation.is_grouped:
        made, layout, slot = emit_groups(walk, relation)
        left = _wanted(relation, absorbed(relation, walk.facts, slot), layout)
        made = plus_constants(walk, relation, layout, made, left)
        _keep(walk, node, made, layout)
        return
    left = _wanted(relation, _absorb(walk, relation), layout)
    if left.kernel is not None and fixed and (rows := _rows(walk, relation, layout)) != layout:
        made = _emit_rows(walk, relation, layout, rows, left)
    else:
        made = _emit_dense(walk, relation, layout, left)
        if _takes(relation, left):
            left = replace(left, bias=None)
        made = plus_constants(walk, relation, layout, made, left)
    _keep(walk, node, made, layout)


def _wanted(relation: Relation, left: Absorbed, layout: Layout) -> Absorbed:
    """What was absorbed, if any output channel that is kept gets something of it."""
    if left.kernel is None:
        return left
    axis = _channel(relation)
    transposed = "output_padding" in schema.arguments(relation.node)
    kernel = cut(left.kernel, (None, layout[axis]) if transposed else (layout[axis],))
    return left if bool((kernel != 0).any()) else replace(left, kernel=None)


def _keep(walk: EmitContext, node: fx.Node, made: fx.Node, layout: Layout) -> None:
    made.meta = {**node.meta, **made.meta}
    walk.keep(node, 0, made, layout)


def _rows(walk: EmitContext, relation: Relation, layout: Layout) -> Layout:
    """The layout without output channels that no input left reaches (border map is all)."""
    first, second = relation.factors
    order, axis = list(relation.size), _channel(relation)
    weight = walk.facts[key_of(relation.operands[second].value)]
    live = ~spread(weight.zero, relation.ins[second], order, relation.size)
    kept = torch.ones([1] * len(order), dtype=torch.bool)
    for positions, letters in zip(
        walk.placement.slot[relation.node, first], relation.ins[first], strict=True
    ):
        if positions is not None and set(letters) & relation.contracted:
            mask = torch.zeros(relation.size[letters[0]] or 1, dtype=torch.bool)
            mask[list(positions)] = True
            kept = kept & spread(mask, (letters,), order, relation.size)
    letters = relation.outs[0][axis]
    reached = any_over(live & kept, order, set(order) - set(letters))
    reached = project(reached, (letters,), order, relation.size)
    held = layout[axis]
    rows = [p for p in (range(_size(relation)) if held is None else held) if bool(reached[p])]
    return tuple(whole(rows, _size(relation)) if k == axis else p for k, p in enumerate(layout))


def _emit_rows(
    walk: EmitContext, relation: Relation, layout: Layout, rows: Layout, left: Absorbed
) -> fx.Node:
    """Channels that only constants reach are the border map; the others are added to it."""
    node, editor, axis = relation.node, walk.editor, _channel(relation)
    at = {p: k for k, p in enumerate(layout[axis] or range(_size(relation)))}
    places = [at[p] for p in rows[axis] or ()]
    vector = torch.zeros(_size(relation), dtype=torch.float64)
    if relation.operands[-1].name == "bias":
        vector += _constant(walk, relation.operands[-1].value).double()
    if places:
        vector[list(rows[axis] or ())] = 0
    vector = vector.view([-1 if k == axis else 1 for k in range(len(layout))])
    bias = vector if bool((vector != 0).any()) else None
    made = _constants(walk, relation, layout, replace(left, bias=bias))
    sizes = walk.sizes(node, 0, layout)
    if not places:
        values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in sizes]
        if all(same_size(a, b) for a, b in zip(made.meta["val"].shape, values, strict=True)):
            return made
        return editor.call(aten.clone.default, editor.call(aten.expand.default, made, sizes))
    live = _emit_dense(walk, relation, rows, left)
    wide = editor.call(aten.expand.default, made, sizes)
    made = editor.call(aten.index_add.default, wide, axis, walk.pool.index(places), live)
    return marked(made, "scatter-add")


def _absorb(walk: EmitContext, relation: Relation) -> Absorbed:
    kept = walk.placement.slot.get((relation.node, relation.factors[0]))
    return Absorbed(None, None) if kept is None else absorbed(relation, walk.facts, kept)


def _bias_of(relation: Relation) -> str | None:
    """The argument that can take a bias vector over the output's channels."""
    found = schema.arguments(relation.node)
    name = "self" if relation.node.target is aten.addmm.default else "bias"
    if name not in found or relation.is_grouped:
        return None
    old = found[name]
    takes = old is None or (schema.is_constant(old) and old.meta["val"].ndim == 1)
    return name if takes else None


def _takes(relation: Relation, left: Absorbed) -> bool:
    """Can the op's own bias take what was absorbed?"""
    if left.bias is None or _bias_of(relation) is None:
        return False
    return left.bias.numel() == left.bias.shape[_channel(relation)]


def _emit_dense(walk: EmitContext, relation: Relation, layout: Layout, left: Absorbed) -> fx.Node:
    taken = _bias_of(relation) if _takes(relation, left) else None
    values = [None if operand.name == taken else _operand(walk, relation, k, layout)
              for k, operand in enumerate(relation.operands)]  # fmt: skip
    more = {} if taken is None else {taken: _bias(walk, relation, layout, left.bias)}
    if (bias := _bias_alone(relation, values)) is not None:
        wide = [-1 if k == _channel(relation) else 1 for k in range(len(layout))]
        made = walk.editor.call(aten.view.default, bias, wide)
        made = walk.editor.call(aten.expand.default, made, walk.sizes(relation.node, 0, layout))
        return walk.editor.call(aten.clone.default, made)
    args, kwargs = walk.arguments(relation, values, [layout], more)
    return _call(walk, relation, layout, args, kwargs)


def _bias_alone(relation: Relation, values: list[Any]) -> fx.Node | None:
    """The bias of a convolution that reads no channel: torch takes none of those, or returns none
    of its channels."""
    if not relation.window or relation.operands[-1].name != "bias":
        return None
    read = 0 if "output_padding" in schema.arguments(relation.node) else 1
    return None if values[relation.factors[1]].meta["val"].shape[read] else values[-1]


def _call(walk: EmitContext, relation: Relation, layout: Layout, args: Any, kwargs: Any) -> fx.Node:
    """The contraction, its output in a layout."""
    node, target = relation.node, relation.node.target
    if any(layout[axis] is not None for axis in sampling(relation)):
        args, kwargs = sampled(walk, relation, layout, args, kwargs)
    first = args[relation.factors[0]] if args else None
    if not isinstance(first, fx.Node) or not relation.window:
        return walk.editor.call(target, *args, **kwargs)
    if first.meta["val"].dtype != node.meta["val"].dtype:
        return walk.editor.call(target, *args, **kwargs)
    sizes = zip(node.meta["val"].shape, layout, strict=True)
    shape = [n if p is None else len(p) for n, p in sizes]
    return walk.editor.call_shaped(shape, first, target, args, kwargs)


def _operand(walk: EmitContext, relation: Relation, k: int, layout: Layout) -> Any:
    """An operand for output channels `layout`: constants are cut to it."""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return walk.operand(relation, k)
    want = list(walk.placement.slot[relation.node, k])
    for axis, letters in enumerate(relation.ins[k]):
        for out, made in enumerate(relation.outs[0]):
            if letters and letters == made and not set(letters) & relation.window:
                want[axis] = layout[out]
    return walk.adapter.adapt(source, tuple(want))


def _bias(walk: EmitContext, relation: Relation, layout: Layout, extra: Any) -> fx.Node:
    """The old bias plus what was absorbed, over the output channels in `layout`; a parameter."""
    axis = _channel(relation)
    old = next((o.value for o in relation.operands if o.name == _bias_of(relation)), None)
    vector = (
        extra.reshape(-1) if extra.shape[axis] != 1 else extra.reshape(-1).expand(_size(relation))
    )
    weight = walk.pool.source[str(_weight(relation).target)]
    total = vector + (_constant(walk, old).double() if old is not None else 0)
    total = cut(total.to(weight.tensor.dtype), (layout[axis],))
    source = None if old is None else walk.pool.source[str(old.target)]
    name = _sibling(weight.name, "bias") if source is None else source.name
    grad = weight.requires_grad if source is None else source.requires_grad
    declared = None if weight.declared is None else torch.zeros_like(total, dtype=torch.bool)
    made = walk.pool.add(Constant(total, name, weight.parameter, grad, declared=declared))
    walk.pool.cuts[made] = Cut(name, (len(vector),), (layout[axis],))
    return walk.pool.read(made)


def _constant(walk: EmitContext, node: fx.Node) -> Tensor:
    return walk.pool.source[str(node.target)].tensor


def _weight(relation: Relation) -> fx.Node:
    return next(o.value for k, o in enumerate(relation.operands)
                if k in relation.factors and schema.is_constant(o.value))  # fmt: skip


def _sibling(name: str, leaf: str) -> str:
    prefix, _, last = name.rpartition(".")
    if last == leaf:
        return name
    leaf = leaf if last == "weight" else f"{last}_{leaf}"
    return f"{prefix}.{leaf}" if prefix else leaf


def _channel(relation: Relation) -> int:
    """The output axis that the weight's output letter stands on."""
    letters = relation.letters(relation.ins[relation.factors[1]])
    return next(
        k
        for k, a in enumerate(relation.outs[0])
        if set(a) & letters and not set(a) & relation.window
    )


def _size(relation: Relation) -> int:
    return relation.node.meta["val"].shape[_channel(relation)]


def plus_constants(
    walk: EmitContext,
    relation: Relation,
    layout: Layout,
    made: fx.Node,
    left: Absorbed,
    at: At = (),
) -> fx.Node:
    """Add what the op itself could not take: a border map, a constant that is no bias vector.

    at: the axes of the output that are made at run-time indices alone.
    """
    if left.bias is None and left.kernel is None:
        return made
    rest = _constants(walk, relation, layout, left)
    offset = relation.node.meta["val"].ndim - rest.meta["val"].ndim
    varies = [(a - offset, i) for a, i in at if rest.meta["val"].shape[a - offset] != 1]
    rest = walk.adapter.picked(rest, tuple(varies))
    return walk.editor.call(aten.add.Tensor, made, rest)


def _constants(walk: EmitContext, relation: Relation, layout: Layout, left: Absorbed) -> fx.Node:
    """What constant inputs give: a map of one image, a vector, or both added."""
    made = None
    if left.bias is not None:
        extra = _laid(left.bias.to(relation.node.meta["val"].dtype), layout)
        made = walk.pool.constant(extra, "shift")
    if left.kernel is not None:
        border = _border_map(walk, relation, layout, left.kernel)
        made = border if made is None else walk.editor.call(aten.add.Tensor, border, made)
    assert made is not None
    return made


def _laid(tensor: Tensor, layout: Layout) -> Tensor:
    return cut(tensor, tuple(p if tensor.shape[k] != 1 else None for k, p in enumerate(layout)))


def _border_map(walk: EmitContext, relation: Relation, layout: Layout, kernel: Tensor) -> fx.Node:
    """conv(ones [1, 1, H, W], kernel): what constant channels give at every place of the image."""
    node, editor = relation.node, walk.editor
    found = schema.arguments(node)
    source, weight = found["input"], _weight(relation)
    constant = walk.pool.source[str(weight.target)]
    transposed = "output_padding" in found
    axis = _channel(relation)
    held = layout[axis] if layout[axis] is not None else tuple(range(_size(relation)))
    rows = kernel.movedim(1, 0) if transposed else kernel
    positions = tuple(p for p in held or () if bool((rows[p] != 0).any()))
    kernel = cut(
        kernel.to(constant.tensor.dtype), (None, positions) if transposed else (positions,)
    )
    name = walk.pool.add(Constant(kernel, _sibling(constant.name, "border"), constant.parameter,
                                  constant.requires_grad))  # fmt: skip
    value = source.meta["val"]
    space = [walk.pool.size(size) for size in value.shape[-(kernel.ndim - 2) :]]
    stored = walk.pool.read(name)
    ones = walk.pool.ones([1, 1, *space], stored)
    plain = {k: v for k, v in found.items() if k not in ("input", "weight", "bias")}
    plain = {k: walk.argument(v) for k, v in plain.items()}
    plain |= {"input": ones, "weight": stored, "bias": None, "groups": 1}
    made = marked(editor.call_named(node.target, plain), "border map")
    if value.ndim == kernel.ndim - 1:
        made = editor.call(aten.squeeze.dim, made, 0)
    for k in sampling(relation):
        if (taken := layout[k]) is not None:
            made = walk.adapter.select(made, k, taken)
    places = [k for k, p in enumerate(held or ()) if p in set(positions)]
    return walk.adapter.scattered(made, axis, places, len(held or ()), 0.0)


@dataclass(frozen=True, slots=True)
class _GroupRun:
    """Consecutive groups with as many inputs and as many outputs each."""

    groups: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]  # per group, the old positions within the input axis
    outputs: tuple[tuple[int, ...], ...]


def emit_groups(walk: EmitContext, relation: Relation) -> tuple[fx.Node, Layout, Layout]:
    """A grouped convolution whose groups kept different counts: one convolution per run of groups
    with equal counts, joined. Returns the value, its layout (channels sorted by group), and the
    layout its input came in."""
    node, layout = relation.node, list(spaced(relation, walk.placement.value[relation.node, 0]))
    x_axis, out_axis = _axis_of(relation.ins[0]), _axis_of(relation.outs[0])
    slot = list(walk.placement.slot[node, 0])
    count, fan_in, fan_out = _counts(relation)
    outs = _per_group(layout[out_axis], count, fan_out)
    ins = _per_group(slot[x_axis], count, fan_in)
    # A group that is all constants keeps one input, so that it is a group.
    ins = [i or ([g * fan_in] if o else []) for g, (i, o) in enumerate(zip(ins, outs, strict=True))]
    ins = [i if o else [] for i, o in zip(ins, outs, strict=True)]
    runs = _runs(ins, outs)
    slot[x_axis] = tuple(p for group in ins for p in group)
    if slot[x_axis] == tuple(range(count * fan_in)):
        slot[x_axis] = None
    x = walk.adapter.adapt(relation.operands[0].value, tuple(slot))
    pieces, start = [], 0
    for run in runs:
        width = sum(len(group) for group in run.inputs)
        part = (
            x
            if len(runs) == 1
            else walk.editor.call(aten.slice.Tensor, x, x_axis, start, start + width)
        )
        start += width
        pieces.append(_emit_run(walk, relation, run, part, tuple(layout), alone=len(runs) == 1))
    made = pieces[0] if len(pieces) == 1 else walk.editor.call(aten.cat.default, pieces, out_axis)
    flat = tuple(p for group in outs for p in group)
    layout[out_axis] = None if flat == tuple(range(count * fan_out)) else flat
    return made, tuple(layout), tuple(slot)


def _axis_of(axes: Any) -> int:
    return next(k for k, axis in enumerate(axes) if len(axis) > 1)


def _counts(relation: Relation) -> tuple[int, int, int]:
    """Groups, inputs per group, outputs per group."""
    groups = schema.arguments(relation.node)["groups"]
    x, out = relation.node.args[0].meta["val"], relation.node.meta["val"]  # type: ignore[union-attr]
    a, b = _axis_of(relation.ins[0]), _axis_of(relation.outs[0])
    return groups, x.shape[a] // groups, out.shape[b] // groups


def _per_group(positions: Any, groups: int, each: int) -> list[list[int]]:
    flat = range(groups * each) if positions is None else sorted(positions)
    found: list[list[int]] = [[] for _ in range(groups)]
    for p in flat:
        found[p // each].append(p)
    return found


def _runs(ins: list[list[int]], outs: list[list[int]]) -> list[_GroupRun]:
    runs: list[tuple[tuple[int, int], list[int]]] = []
    for g, (i, o) in enumerate(zip(ins, outs, strict=True)):
        if not o:
            continue
        shape = (len(i), len(o))
        if runs and runs[-1][0] == shape:
            runs[-1][1].append(g)
        else:
            runs.append((shape, [g]))
    return [_GroupRun(tuple(gs), tuple(tuple(ins[g]) for g in gs), tuple(tuple(outs[g]) for g in gs))
            for _, gs in runs]  # fmt: skip


def _emit_run(
    walk: EmitContext,
    relation: Relation,
    run: _GroupRun,
    x: fx.Node,
    layout: Layout,
    *,
    alone: bool,
) -> fx.Node:
    node, found = relation.node, schema.arguments(relation.node)
    old = walk.pool.source[str(_weight(relation).target)]
    transposed = "output_padding" in found
    cut_old = old.moved(lambda tensor: _group_weight(relation, tensor, run, transposed))
    suffix = "" if alone else f"_g{run.groups[0]}"
    name = walk.pool.add(replace(cut_old, name=f"{old.name}{suffix}"))
    flat = tuple(p for group in run.outputs for p in group)
    walk.pool.cuts[name] = _group_cut(relation, old, run, transposed)
    bias = found["bias"]
    if bias is not None:
        vector = walk.pool.source[str(bias.target)]
        short = vector.moved(lambda tensor: cut(tensor, (flat,)))
        made = walk.pool.add(replace(short, name=f"{vector.name}{suffix}"))
        walk.pool.cuts[made] = Cut(vector.name, tuple(vector.tensor.shape), (flat,))
        bias = walk.pool.read(made)
    plain = {
        k: v if k in ("input", "weight", "bias") else walk.argument(v) for k, v in found.items()
    }
    plain |= {"input": x, "weight": walk.pool.read(name), "bias": bias, "groups": len(run.groups)}
    args, kwargs = schema.call(node.target, plain)
    axis = _axis_of(relation.outs[0])
    layout = tuple(flat if k == axis else p for k, p in enumerate(layout))
    return _call(walk, relation, layout, args, kwargs)


def _group_weight(relation: Relation, weight: Tensor, run: _GroupRun, transposed: bool) -> Tensor:
    """The weight of a run: per group its own rows and columns."""
    _, fan_in, fan_out = _counts(relation)
    parts = []
    for ins, outs in zip(run.inputs, run.outputs, strict=True):
        rows, columns = (list(ins), [p % fan_out for p in outs]) if transposed else (
            list(outs), [p % fan_in for p in ins])  # fmt: skip
        parts.append(weight[rows][:, columns])
    return torch.cat(parts).contiguous()


def _group_cut(relation: Relation, old: Constant, run: _GroupRun, transposed: bool) -> Cut:
    """Where a run's weight came from; columns are those of its first group."""
    _, fan_in, fan_out = _counts(relation)
    rows = run.inputs if transposed else run.outputs
    columns = run.outputs[0] if transposed else run.inputs[0]
    each = fan_out if transposed else fan_in
    kept = (tuple(p for g in rows for p in g), tuple(p % each for p in columns))
    rest = (None,) * (old.tensor.ndim - 2)
    return Cut(old.name, tuple(old.tensor.shape), (*kept, *rest))
