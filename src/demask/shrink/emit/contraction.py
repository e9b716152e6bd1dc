"""Contractions: operands and weights cut alike; the bias absorbs constants of known inputs.

A convolution that computes only every s-th window absorbs the progression of positions as a stride:

    conv(x, stride=s)[first::step][:count] == conv(x[low:high], stride=s * step)

where x is padded or cropped to what these windows read. A slice after a convolution of stride 1,
hoisted to it through ops that carry positions, makes the convolution strided.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import schema_of
from demask.facts.carriers import output_channels
from demask.facts.known import key_of
from demask.facts.masks import any_over, project, spread
from demask.graph.program import Constant
from demask.graph.provenance import Cut
from demask.ops import Relation, schema
from demask.ops.regions import Geometry, geometry
from demask.ops.schema import fake, same_size
from demask.shrink.emit.adapt import mark_effect
from demask.shrink.emit.border_map import Absorbed, absorb_constants, constants_alone
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext
from demask.shrink.layout.cells import Layout, Positions, RunTimeSupports, cut_positions
from demask.shrink.layout.group_packs import even_packs
from demask.shrink.layout.ties import strided_axes

aten = torch.ops.aten


def space_evenly(relation: Relation, layout: Layout) -> Layout:
    """The layout with every windowed axis evenly spaced: positions between are computed as well.

    A single window keeps the distance to the end of its axis.
    """
    axes = strided_axes(relation)
    sizes = fake(relation.node).shape
    return tuple(cut_positions(_progression(p), sizes[k]) if k in axes and p else p for k, p in enumerate(layout))


def _progression(positions: tuple[int, ...]) -> range:
    steps = [b - a for a, b in itertools.pairwise(positions)]
    return range(positions[0], positions[-1] + 1, math.gcd(*steps) or 1)


def strided_arguments(
    context: EmitContext, relation: Relation, layout: Layout, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments of a convolution that computes only the windows in a layout."""
    node = relation.node
    target: Any = node.target
    arguments = {a.name: a.default_value for a in schema_of(target).arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    axes = strided_axes(relation)
    windows = [_window(geometry(relation, 0, axis), layout[axis]) for axis in axes]
    steps, pads = [step for step, _ in windows], [pad for _, pad in windows]
    own = [_symmetric_padding(geometry(relation, 0, k), w, layout[k]) for k, w in zip(axes, windows, strict=True)]
    padding = [n or 0 for n in own]
    if None in own:
        edges = [(0, 0) if n is not None else pad for n, pad in zip(own, pads, strict=True)]
        flat = [n for pair in reversed(edges) for n in pair]
        arguments["input"] = context.editor.call(aten.constant_pad_nd.default, arguments["input"], flat, 0)
    return schema.bind_arguments(target, arguments | {"stride": steps, "padding": padding})


def _window(axis: Geometry, taken: Positions) -> tuple[int, tuple[int, int]]:
    """The stride of the convolution that computes some windows, and its padding before and after
    (negative: positions that no window reads)."""
    first, step, last = 0, 1, axis.output - 1
    if taken is not None:
        first, last = taken[0], taken[-1]
        step = taken[1] - taken[0] if len(taken) > 1 else max(axis.output, 1)
    before = axis.padding - first * axis.step
    after = last * axis.step - axis.padding + axis.reach + 1 - axis.input
    return axis.step * step, (before, after)


def _symmetric_padding(axis: Geometry, window: tuple[int, tuple[int, int]], taken: Positions) -> int | None:
    """The convolution's own padding, if equal on both sides and for as many windows; else None."""
    stride, (before, _) = window
    count = axis.output if taken is None else len(taken)
    windows = (axis.input + 2 * before - axis.reach - 1) // stride + 1
    return before if before >= 0 and windows == count else None


def emit_contraction(context: EmitContext, relation: Relation) -> None:
    """Emit a linear layer, matmul or convolution on fewer positions; its bias absorbs constants."""
    node = relation.node
    layout = space_evenly(relation, context.placement.value[node, 0])
    alone = _without_dead_kernel(relation, constants_alone(relation, context.facts, layout), layout)
    last = relation.operands[-1]
    is_fixed = last.name != "bias" or schema.is_constant(last.value)
    if alone.kernel is not None and is_fixed:
        none = tuple(() if k == output_channels(relation) else p for k, p in enumerate(layout))
        _emit_as(context, node, _emit_rows(context, relation, layout, none, alone), layout)
        return
    if relation.is_grouped:
        groups = _live_groups(context, relation)
        constants = _absorb_dropped(context, relation, groups.slot)
        constants = _without_dead_kernel(relation, constants, groups.layout)
        value, constants = _emit_groups(context, relation, groups, constants)
        value = add_constants(context, relation, groups.layout, value, constants)
        _emit_as(context, node, value, groups.layout)
        return
    constants = _without_dead_kernel(relation, _absorb_dropped(context, relation), layout)
    if constants.kernel is not None and is_fixed and (rows := _reached_layout(context, relation, layout)) != layout:
        value = _emit_rows(context, relation, layout, rows, constants)
    else:
        value = _emit_dense(context, relation, layout, constants)
        if _fits_bias(relation, constants):
            constants = replace(constants, bias=None)
        value = add_constants(context, relation, layout, value, constants)
    _emit_as(context, node, value, layout)


def emit_one_contraction(context: EmitContext, relation: Relation) -> None:
    """Emit a contraction as one call, if the layouts allow it: its bias absorbs constants, and the
    weights of channels that stay those of all that these carry (`facts.carriers`)."""
    node, layout = relation.node, context.placement.value[relation.node, 0]
    constants = _absorb_dropped(context, relation)
    if relation.is_grouped:
        value, constants = _emit_groups(context, relation, _packed_groups(context, relation), constants)
    else:
        value = _emit_dense(context, relation, layout, constants)
        if _fits_bias(relation, constants):
            constants = replace(constants, bias=None)
    _emit_as(context, node, add_constants(context, relation, layout, value, constants), layout)


def _carry(context: EmitContext, relation: Relation, slot: Layout, constants: Absorbed) -> Absorbed:
    """The constants that a contraction has to add after its weight was replaced by one in which
    channels that stay carry the products of dropped ones. slot: of the first factor."""
    carried, second = context.carried.get(relation.node), relation.factors[1]
    if carried is None:
        return constants
    live = torch.zeros(carried.valid.numel(), dtype=torch.bool)
    live[slice(None) if slot[carried.axis] is None else list(slot[carried.axis] or ())] = True
    target = str(relation.operands[second].value.target)
    old = context.store.source[target]
    summed = old.tensor.to(torch.float64, copy=True).contiguous()
    groups = len(carried.valid)
    axis = next(k for k, a in enumerate(relation.ins[second]) if set(a) & relation.contracted)
    if groups > 1 and axis == 1:  # [(group output), input, ...]
        parts = summed.view(groups, -1, *summed.shape[1:]).movedim(2, 1)
    else:  # [(group input), output, ...], or one group
        first = summed.movedim(axis, 0)
        parts = first.view(groups, -1, *first.shape[1:]) if groups > 1 else first[None]
    for g, dropped, carriers, factors, constant in carried.combinations(live):
        products = parts[g][dropped]
        parts[g][carriers] += torch.einsum("dc,d...->c...", factors, products)
        context.store.source[target] = replace(old, tensor=summed.to(old.tensor.dtype))
        if carried.has_constant:
            shift = torch.einsum("d,d...->...", constant, products)
            shift = shift.reshape(len(shift), -1).sum(1)
            out, rank = output_channels(relation), fake(relation.node).ndim
            bias = shift.view([-1 if k == out else 1 for k in range(rank)])
            bias = bias if constants.bias is None else constants.bias + bias
            constants = replace(constants, bias=bias)
    return replace(constants, kernel=None) if carried.has_all_constants else constants


def _without_dead_kernel(relation: Relation, constants: Absorbed, layout: Layout) -> Absorbed:
    """The absorbed constants, without a kernel that is zero for all live output channels."""
    if constants.kernel is None:
        return constants
    axis = output_channels(relation)
    transposed = "output_padding" in schema.arguments(relation.node)
    kernel = cut(constants.kernel, (None, layout[axis]) if transposed else (layout[axis],))
    return constants if bool((kernel != 0).any()) else replace(constants, kernel=None)


def _emit_as(context: EmitContext, node: fx.Node, value: fx.Node, layout: Layout) -> None:
    value.meta = {**node.meta, **value.meta}
    context.emit(node, 0, value, layout)


def _reached_layout(context: EmitContext, relation: Relation, layout: Layout) -> Layout:
    """The layout without output channels that only constants reach (a border map suffices)."""
    if relation.node in context.carried:  # any of them may read a carrier
        return layout
    first, second = relation.factors
    order, axis = list(relation.size), output_channels(relation)
    weight = context.facts[key_of(relation.operands[second].value)]
    live = ~spread(weight.zero, relation.ins[second], order, relation.size)
    inside = torch.ones([1] * len(order), dtype=torch.bool)
    for positions, letters in zip(context.placement.slot[relation.node, first], relation.ins[first], strict=True):
        if positions is not None and set(letters) & relation.contracted:
            mask = torch.zeros(relation.size[letters[0]] or 1, dtype=torch.bool)
            mask[list(positions)] = True
            inside = inside & spread(mask, (letters,), order, relation.size)
    letters = relation.outs[0][axis]
    reached = any_over(live & inside, order, set(order) - set(letters))
    reached = project(reached, (letters,), order, relation.size).expand(_size(relation))
    wanted = layout[axis]
    rows = [p for p in (range(_size(relation)) if wanted is None else wanted) if bool(reached[p])]
    return tuple(cut_positions(rows, _size(relation)) if k == axis else p for k, p in enumerate(layout))


def _emit_rows(context: EmitContext, relation: Relation, layout: Layout, rows: Layout, constants: Absorbed) -> fx.Node:
    """Emit a border map for all channels, and add those that inputs reach at their positions."""
    node, editor, axis = relation.node, context.editor, output_channels(relation)
    offsets = {p: k for k, p in enumerate(layout[axis] or range(_size(relation)))}
    places = [offsets[p] for p in rows[axis] or ()]
    vector = torch.zeros(_size(relation), dtype=torch.float64)
    if relation.operands[-1].name == "bias":
        vector += _constant(context, relation.operands[-1].value).double()
    if places:
        vector[list(rows[axis] or ())] = 0
    vector = vector.view([-1 if k == axis else 1 for k in range(len(layout))])
    bias = vector if bool((vector != 0).any()) else None
    value = _constants(context, relation, layout, replace(constants, bias=bias))
    sizes = context.sizes(node, 0, layout)
    if not places:
        values = [fake(n) if isinstance(n, fx.Node) else n for n in sizes]
        if all(same_size(a, b) for a, b in zip(fake(value).shape, values, strict=True)):
            return value
        return editor.call(aten.clone.default, editor.call(aten.expand.default, value, sizes))
    live = _emit_dense(context, relation, rows, constants)
    wide = editor.call(aten.expand.default, value, sizes)
    value = editor.call(aten.index_add.default, wide, axis, context.store.index(places), live)
    return mark_effect(value, "scatter-add")


def _absorb_dropped(context: EmitContext, relation: Relation, slot: Layout | None = None) -> Absorbed:
    """What dropped channels add to a contraction that channels that stay do not carry. slot: the
    layout of the first factor, if it is not that of the placement."""
    slot = slot or context.placement.slot.get((relation.node, relation.factors[0]))
    if slot is None:
        return Absorbed(None, None)
    return _carry(context, relation, slot, absorb_constants(relation, context.facts, slot))


def _bias_of(relation: Relation) -> str | None:
    """The argument that can be a bias vector over the output channels, or None."""
    arguments = schema.arguments(relation.node)
    name = "self" if relation.node.target is aten.addmm.default else "bias"
    if name not in arguments:
        return None
    old = arguments[name]
    takes = old is None or (schema.is_constant(old) and fake(old).ndim == 1)
    return name if takes else None


def _fits_bias(relation: Relation, constants: Absorbed) -> bool:
    """Whether the op's own bias can absorb the constants, for a weight that is stored."""
    is_stored = any(schema.is_constant(relation.operands[k].value) for k in relation.factors)
    if constants.bias is None or not is_stored or _bias_of(relation) is None:
        return False
    return constants.bias.numel() == constants.bias.shape[output_channels(relation)]


def _emit_dense(context: EmitContext, relation: Relation, layout: Layout, constants: Absorbed) -> fx.Node:
    """The contraction, its own bias with constants added."""
    bias_name = _bias_of(relation) if _fits_bias(relation, constants) else None
    values = [
        None if operand.name == bias_name else _operand(context, relation, k, layout)
        for k, operand in enumerate(relation.operands)
    ]
    more = {} if bias_name is None else {bias_name: _bias(context, relation, layout, constants.bias)}
    if _reads_no_channel(relation, values):
        sizes = context.sizes(relation.node, 0, layout)
        last = values[-1] if relation.operands[-1].name == "bias" else None
        bias = last if bias_name is None else more[bias_name]
        if not isinstance(bias, fx.Node):
            dtype = fake(relation.node).dtype
            return context.store.full(sizes, torch.zeros((), dtype=dtype))
        wide = [-1 if k == output_channels(relation) else 1 for k in range(len(layout))]
        value = context.editor.call(aten.view.default, bias, wide)
        value = context.editor.call(aten.expand.default, value, sizes)
        return context.editor.call(aten.clone.default, value)
    args, kwargs = context.arguments(relation, values, [layout], more)
    return _call(context, relation, layout, args, kwargs)


def _reads_no_channel(relation: Relation, values: list[Any]) -> bool:
    """Whether a convolution reads no channel: torch rejects it with a bias, and returns no channel
    without one."""
    if not relation.entry.region:
        return False
    read = 0 if "output_padding" in schema.arguments(relation.node) else 1
    return not fake(values[relation.factors[1]]).shape[read]


def _call(context: EmitContext, relation: Relation, layout: Layout, args: Any, kwargs: Any) -> fx.Node:
    """The contraction, its output in a layout."""
    node, target = relation.node, relation.node.target
    if any(layout[axis] is not None for axis in strided_axes(relation)):
        args, kwargs = strided_arguments(context, relation, layout, args, kwargs)
    first = args[relation.factors[0]] if args else None
    if not isinstance(first, fx.Node) or not relation.entry.region:
        return context.editor.call(target, *args, **kwargs)
    if fake(first).dtype != fake(node).dtype:
        return context.editor.call(target, *args, **kwargs)
    sizes = zip(fake(node).shape, layout, strict=True)
    shape = [n if p is None else len(p) for n, p in sizes]
    return context.editor.call_shaped(shape, first, target, args, kwargs)


def _operand(context: EmitContext, relation: Relation, k: int, layout: Layout) -> Any:
    """An operand for the output channels in `layout`: constants are cut to it."""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return context.operand(relation, k)
    want = list(context.placement.slot[relation.node, k])
    for axis, letters in enumerate(relation.ins[k]):
        for out, output_axis in enumerate(relation.outs[0]):
            if letters and letters == output_axis and not set(letters) & relation.window:
                want[axis] = layout[out]
    return context.adapter.adapt(source, tuple(want))


def _bias(context: EmitContext, relation: Relation, layout: Layout, extra: Any) -> fx.Node:
    """The old bias plus absorbed constants, over the output channels in `layout`; a parameter."""
    whole, want = _summed_bias(context, relation, extra), (layout[output_channels(relation)],)
    name = context.store.add(whole.moved(lambda tensor: cut(tensor, want)))
    context.store.cuts[name] = Cut(whole.name, tuple(whole.tensor.shape), want)
    return context.store.read(name)


def _summed_bias(context: EmitContext, relation: Relation, extra: Tensor) -> Constant:
    """The old bias plus absorbed constants, over all output channels."""
    old = next((o.value for o in relation.operands if o.name == _bias_of(relation)), None)
    total = extra.reshape(-1).expand(_size(relation)) if extra.numel() == 1 else extra.reshape(-1)
    weight = context.store.source[str(_weight(relation).target)]
    total = total + (_constant(context, old).double() if old is not None else 0)
    total = total.to(weight.tensor.dtype)
    source = None if old is None else context.store.source[str(old.target)]
    name = _sibling(weight.name, "bias") if source is None else source.name
    grad = weight.requires_grad if source is None else source.requires_grad
    declared = None if weight.declared is None else torch.zeros_like(total, dtype=torch.bool)
    return Constant(total, name, weight.parameter, grad, declared=declared)


def _constant(context: EmitContext, node: fx.Node) -> Tensor:
    return context.store.source[str(node.target)].tensor


def _weight(relation: Relation) -> fx.Node:
    return next(
        o.value for k, o in enumerate(relation.operands) if k in relation.factors and schema.is_constant(o.value)
    )


def _sibling(name: str, leaf: str) -> str:
    prefix, _, last = name.rpartition(".")
    if last == leaf:
        return name
    leaf = leaf if last == "weight" else f"{last}_{leaf}"
    return f"{prefix}.{leaf}" if prefix else leaf


def _size(relation: Relation) -> int:
    return fake(relation.node).shape[output_channels(relation)]


def add_constants(
    context: EmitContext,
    relation: Relation,
    layout: Layout,
    value: fx.Node,
    constants: Absorbed,
    run_time: RunTimeSupports = (),
) -> fx.Node:
    """The output plus what the op itself could not absorb: a border map, a constant that is no bias
    vector.

    run_time: axes of the output that are computed only at run-time indices.
    """
    if constants.bias is None and constants.kernel is None:
        return value
    rest = _constants(context, relation, layout, constants)
    offset = fake(relation.node).ndim - fake(rest).ndim
    varies = [(a - offset, i) for a, i in run_time if fake(rest).shape[a - offset] != 1]
    rest = context.adapter.gather(rest, tuple(varies))
    return context.editor.call(aten.add.Tensor, value, rest)


def _constants(context: EmitContext, relation: Relation, layout: Layout, constants: Absorbed) -> fx.Node:
    """The contribution of constant inputs: a map of one image, a vector, or both added."""
    value = None
    if constants.bias is not None:
        extra = _cut_to(constants.bias.to(fake(relation.node).dtype), layout)
        value = context.store.constant(extra, "shift")
    if constants.kernel is not None:
        border = _border_map(context, relation, layout, constants.kernel)
        value = border if value is None else context.editor.call(aten.add.Tensor, border, value)
    assert value is not None
    return value


def _cut_to(tensor: Tensor, layout: Layout) -> Tensor:
    return cut(tensor, tuple(p if tensor.shape[k] != 1 else None for k, p in enumerate(layout)))


def _border_map(context: EmitContext, relation: Relation, layout: Layout, kernel: Tensor) -> fx.Node:
    """conv(ones [1, 1, H, W], kernel): the contribution of constant channels at every position."""
    node, editor = relation.node, context.editor
    arguments = schema.arguments(node)
    source, weight = arguments["input"], _weight(relation)
    constant = context.store.source[str(weight.target)]
    transposed = "output_padding" in arguments
    axis = output_channels(relation)
    live = layout[axis] if layout[axis] is not None else tuple(range(_size(relation)))
    rows = kernel.movedim(1, 0) if transposed else kernel
    positions = tuple(p for p in live or () if bool((rows[p] != 0).any()))
    kernel = cut(kernel.to(constant.tensor.dtype), (None, positions) if transposed else (positions,))
    name = context.store.add(
        Constant(kernel, _sibling(constant.name, "border"), constant.parameter, constant.requires_grad)
    )
    value = fake(source)
    space = [context.store.size(size) for size in value.shape[-(kernel.ndim - 2) :]]
    stored = context.store.read(name)
    ones = context.store.ones([1, 1, *space], stored)
    plain = {k: v for k, v in arguments.items() if k not in ("input", "weight", "bias")}
    plain = {k: context.argument(v) for k, v in plain.items()}
    plain |= {"input": ones, "weight": stored, "bias": None, "groups": 1}
    border = mark_effect(editor.call_named(node.target, plain), "border map")
    if value.ndim == kernel.ndim - 1:
        border = editor.call(aten.squeeze.dim, border, 0)
    for k in strided_axes(relation):
        if (taken := layout[k]) is not None:
            border = context.adapter.select(border, k, taken)
    offsets = [k for k, p in enumerate(live or ()) if p in set(positions)]
    return context.adapter.scatter(border, axis, offsets, len(live or ()), 0.0)


@dataclass(frozen=True, slots=True)
class _ConvGroups:
    """The groups of a grouped convolution: per group, old positions along the input and the output
    axis; and the layouts of its input and output, whose channels are sorted by group."""

    inputs: list[list[int]]
    outputs: list[list[int]]
    slot: Layout
    layout: Layout


def _live_groups(context: EmitContext, relation: Relation) -> _ConvGroups:
    """Groups with live outputs. One with constant inputs only has one of them, so that it is a
    group."""
    layout = space_evenly(relation, context.placement.value[relation.node, 0])
    slot = context.placement.slot[relation.node, 0]
    x_axis, out_axis = _axis_of(relation.ins[0]), _axis_of(relation.outs[0])
    count, fan_in, fan_out = _counts(relation)
    ins = _per_group(slot[x_axis], count, fan_in)
    outs = _per_group(layout[out_axis], count, fan_out)
    pairs = [(i or [g * fan_in], o) for g, (i, o) in enumerate(zip(ins, outs, strict=True)) if o]

    def with_groups(other: Layout, axis: int, groups: list[list[int]], size: int) -> Layout:
        flat = [p for group in groups for p in group]
        return tuple(cut_positions(flat, size) if k == axis else p for k, p in enumerate(other))

    ins, outs = [i for i, _ in pairs], [o for _, o in pairs]
    return _ConvGroups(
        ins, outs, with_groups(slot, x_axis, ins, count * fan_in), with_groups(layout, out_axis, outs, count * fan_out)
    )


def _packed_groups(context: EmitContext, relation: Relation) -> _ConvGroups:
    """The groups of a convolution with equally many channels in each: several of the old ones
    where these have different numbers (`layout.group_packs`)."""
    layout = context.placement.value[relation.node, 0]
    slot = context.placement.slot[relation.node, 0]
    count, fan_in, fan_out = _counts(relation)
    ins = _per_group(slot[_axis_of(relation.ins[0])], count, fan_in)
    outs = _per_group(layout[_axis_of(relation.outs[0])], count, fan_out)
    packs = even_packs([len(i) for i in ins], [len(o) for o in outs])
    inputs, outputs = ([[p for g in pack for p in groups[g]] for pack in packs] for groups in (ins, outs))
    return _ConvGroups(inputs, outputs, slot, layout)


def _emit_groups(
    context: EmitContext, relation: Relation, groups: _ConvGroups, constants: Absorbed
) -> tuple[fx.Node, Absorbed]:
    """A grouped convolution: one for each run of groups with equally many inputs and outputs,
    concatenated. Returns the value, and what its bias could not absorb."""
    x_axis, out_axis = _axis_of(relation.ins[0]), _axis_of(relation.outs[0])
    runs = _runs(groups)
    x = context.adapter.adapt(relation.operands[0].value, groups.slot)
    bias = schema.arguments(relation.node)["bias"]
    vector = None if bias is None else context.store.source.get(str(bias.target))
    if _fits_bias(relation, constants):
        assert constants.bias is not None
        vector, constants = (_summed_bias(context, relation, constants.bias), replace(constants, bias=None))
    pieces, start = [], 0
    for run in runs:
        width = sum(len(group) for group in run.inputs)
        part = x if len(runs) == 1 else context.editor.call(aten.slice.Tensor, x, x_axis, start, start + width)
        start += width
        suffix = "" if len(runs) == 1 else f"_g{run.outputs[0][0] // _counts(relation)[2]}"
        pieces.append(_emit_run(context, relation, run, part, groups.layout, vector, suffix))
    value = pieces[0] if len(pieces) == 1 else context.editor.call(aten.cat.default, pieces, out_axis)
    return value, constants


def _axis_of(axes: Any) -> int:
    return next(k for k, axis in enumerate(axes) if len(axis) > 1)


def _counts(relation: Relation) -> tuple[int, int, int]:
    """Groups, inputs per group, outputs per group."""
    groups = schema.arguments(relation.node)["groups"]
    x, out = fake(relation.node.args[0]), fake(relation.node)
    a, b = _axis_of(relation.ins[0]), _axis_of(relation.outs[0])
    return groups, x.shape[a] // groups, out.shape[b] // groups


def _per_group(positions: Any, groups: int, each: int) -> list[list[int]]:
    flat = range(groups * each) if positions is None else sorted(positions)
    by_group: list[list[int]] = [[] for _ in range(groups)]
    for p in flat:
        by_group[p // each].append(p)
    return by_group


@dataclass(frozen=True, slots=True)
class _GroupRun:
    """Consecutive groups with equally many inputs and outputs: old positions, per group."""

    inputs: list[list[int]]
    outputs: list[list[int]]


def _runs(groups: _ConvGroups) -> list[_GroupRun]:
    runs: list[_GroupRun] = []
    for i, o in zip(groups.inputs, groups.outputs, strict=True):
        if not runs or (len(runs[-1].inputs[0]), len(runs[-1].outputs[0])) != (len(i), len(o)):
            runs.append(_GroupRun([], []))
        runs[-1].inputs.append(i)
        runs[-1].outputs.append(o)
    return runs


def _emit_run(
    context: EmitContext,
    relation: Relation,
    run: _GroupRun,
    x: fx.Node,
    layout: Layout,
    vector: Constant | None,
    suffix: str,
) -> fx.Node:
    """One grouped convolution. vector: of which its bias is cut. suffix: of names of constants."""
    node, arguments = relation.node, schema.arguments(relation.node)
    old = context.store.source[str(_weight(relation).target)]
    transposed = "output_padding" in arguments
    kernel = old.moved(lambda tensor: _group_weight(relation, tensor, run, transposed))
    name = context.store.add(replace(kernel, name=f"{old.name}{suffix}"))
    cut_old = _group_cut(relation, old, run, transposed)
    if cut_old is not None:
        context.store.cuts[name] = cut_old
    flat, bias = tuple(p for group in run.outputs for p in group), arguments["bias"]
    if vector is not None:
        short = vector.moved(lambda tensor: cut(tensor, (flat,)))
        bias_name = context.store.add(replace(short, name=f"{vector.name}{suffix}"))
        context.store.cuts[bias_name] = Cut(vector.name, tuple(vector.tensor.shape), (flat,))
        bias = context.store.read(bias_name)
    elif bias is not None:
        bias = context.adapter.adapt(bias, (cut_positions(list(flat), _size(relation)),))
    plain = {k: v if k in ("input", "weight", "bias") else context.argument(v) for k, v in arguments.items()}
    plain |= {"input": x, "weight": context.store.read(name), "bias": bias, "groups": len(run.inputs)}
    args, kwargs = schema.bind_arguments(node.target, plain)
    axis = _axis_of(relation.outs[0])
    layout = tuple(flat if k == axis else p for k, p in enumerate(layout))
    return _call(context, relation, layout, args, kwargs)


def _group_weight(relation: Relation, weight: Tensor, run: _GroupRun, transposed: bool) -> Tensor:
    """The weight of a run: for each group its own rows and columns, with zeros between the old
    groups that it has several of."""
    _, fan_in, fan_out = _counts(relation)
    parts = []
    for ins, outs in zip(run.inputs, run.outputs, strict=True):
        pairs = [(torch.tensor(ins), fan_in), (torch.tensor(outs), fan_out)]
        (rows, each), (columns, other) = pairs if transposed else pairs[::-1]
        block = weight[rows.to(weight.device)][:, (columns % other).to(weight.device)]
        separate = (rows // each)[:, None] != (columns // other)[None, :]
        wide = separate.view(*separate.shape, *[1] * (weight.ndim - 2)).to(weight.device)
        parts.append(block.masked_fill(wide, 0))
    return torch.cat(parts).contiguous()


def _group_cut(relation: Relation, old: Constant, run: _GroupRun, transposed: bool) -> Cut | None:
    """The cut of a run's weight; columns are those of its first group. None where groups are
    several of the old ones."""
    _, fan_in, fan_out = _counts(relation)
    if any(p // fan_in != ins[0] // fan_in for ins in run.inputs for p in ins):
        return None
    if any(p // fan_out != outs[0] // fan_out for outs in run.outputs for p in outs):
        return None
    rows = run.inputs if transposed else run.outputs
    columns = run.outputs[0] if transposed else run.inputs[0]
    each = fan_out if transposed else fan_in
    positions = (tuple(p for g in rows for p in g), tuple(p % each for p in columns))
    rest = (None,) * (old.tensor.ndim - 2)
    return Cut(old.name, tuple(old.tensor.shape), (*positions, *rest))
