"""Values padded with channels of zeros, for which kernels are faster than for narrow ones.

A stream that grows from join to join is padded at each; at its final width from the start, it needs
no pads. And kernels are faster for some widths than for smaller ones. A call that computes a wider
value has rows of zeros in its weight, a call that reads it columns of zeros:

    conv(x, W) == conv(pad(x), [W 0])        pad(relu(conv(x, W))) == relu(conv(x, [W; 0]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, is_pointwise
from demask.graph.value import Value
from demask.ops import Table, schema
from demask.ops.traits import OUTPUT_AXIS, POOLS
from demask.rewrites.rule import Pass, case
from demask.tune.fold_affine import channel_axis, contraction_weight, summands

aten = torch.ops.aten
QUANTIZE, DEQUANTIZE = torch.ops.demask.quantize.default, torch.ops.demask.dequantize.default


@dataclass(slots=True)
class Widening:
    """A plan to append `more` channels of zeros. values: those that become wider. rows, columns:
    layers whose weights grow. fixed: values that depend on no input and get a pad."""

    axis: int
    more: int
    values: dict[Value, None] = field(default_factory=dict)
    rows: dict[Value, None] = field(default_factory=dict)
    columns: dict[Value, None] = field(default_factory=dict)
    fixed: dict[Value, None] = field(default_factory=dict)

    def others(self, value: Value) -> list[Value]:
        """Readers of a value that need a slice of it, since they cannot become wider."""
        return [user for user in value.users if user not in self.values and user not in self.columns]


def remove_pads(program: Program, table: Table) -> Program:
    """The program without pads, with wider values instead."""
    editor, is_changed = GraphEditor(program), False
    for node in reversed(editor.calls(aten.constant_pad_nd.default)):
        live, pad = input_dependent(editor.graph), Value(node, editor)
        source_and_width = _channel_pad(pad) if node in live else None
        if source_and_width is None:
            continue
        source, axis, more = source_and_width
        plan = plan_widening(source, axis, more, live, table)
        if plan is not None:
            apply_widening(plan)
            editor.replace(node, source.node)
            is_changed = True
    return editor.finish() if is_changed else program


def round_widths(program: Program, table: Table, multiple: int) -> Program:
    """The program with the widths of layers rounded up to a multiple."""
    editor, is_changed = GraphEditor(program), False
    for node in editor.calls(*OUTPUT_AXIS):
        live, layer = input_dependent(editor.graph), Value(node, editor)
        if node not in live or contraction_weight(layer) is None:
            continue
        axis = channel_axis(layer)
        more = -layer.shape[axis] % multiple
        plan = plan_widening(layer, axis, more, live, table) if more else None
        # Readers of a slice would copy it: no kernel is so much faster by its width.
        if plan is not None and not any(map(plan.others, plan.values)):
            apply_widening(plan)
            is_changed = True
    return editor.finish() if is_changed else program


def _channel_pad(pad: Value) -> tuple[Value, int, int] | None:
    """Source, axis and count of a pad that appends zeros along the channels; None for others."""
    pads, rank = list(pad.arg("pad")), pad.rank
    is_zero = pad.dtype.is_floating_point and (pad.arg("value") or 0) == 0
    if not is_zero or not all(isinstance(n, int) for n in pads):
        return None
    padded_ends = [k for k, n in enumerate(pads) if n]
    axis = rank - 1 - padded_ends[0] // 2 if padded_ends else 0
    if len(padded_ends) != 1 or padded_ends[0] % 2 == 0 or pads[padded_ends[0]] < 0:
        return None
    return (pad.arg("self"), axis, pads[padded_ends[0]]) if axis == 1 or axis == rank - 1 else None


def plan_widening(start: Value, axis: int, more: int, live: set[fx.Node], table: Table) -> Widening | None:
    """All values that must become wider with `start`; None if one of them cannot."""
    plan, stack = Widening(axis, more), [start]
    while stack:
        value = stack.pop()
        if value in plan.values or value in plan.fixed:
            continue
        if value.node not in live and value.node.op != "placeholder":
            plan.fixed[value] = None
            continue
        sources = _sources(value, axis, table)
        if sources is None:
            return None
        plan.values[value] = None
        if contraction_weight(value) is not None:
            plan.rows[value] = None
        stack += sources
        stack += [user for user in value.users if _follows(user, table)]
        for user in value.users:
            if contracts_axis(user, value, axis):
                plan.columns[user] = None
    return plan


def _sources(value: Value, axis: int, table: Table) -> list[Value] | None:
    """The operands that must become wider with a value; None if it cannot become wider."""
    if value.node.op != "call_function" or not value.is_tensor:
        return None
    if contraction_weight(value) is not None:
        if is_depthwise(value):
            return [value.arg("input")] if axis == 1 else None
        return [] if channel_axis(value) == axis and value.arguments.get("groups", 1) == 1 else None
    if value.calls(aten.constant_pad_nd.default):
        pad = _channel_pad(value)
        return [] if pad is not None and pad[1] == axis else None
    operands = list(value.operands)
    if is_pointwise(value.node, table) and len(operands) == 1:
        return operands if _keeps_zero(value) else None
    if is_rounding(value):
        return operands[:1]
    if axis == 1 and is_pooling(value):
        return operands
    sides, count = summands(value), channels_of(value.node, axis)
    if sides is None or any(channels_of(side.node, axis) != count or side.rank != value.rank for side in sides):
        return None
    return list(sides)


def is_depthwise(layer: Value) -> bool:
    """Whether a convolution computes each channel from the same channel of its input."""
    weight = contraction_weight(layer)
    groups = 1 if weight is None else layer.arguments.get("groups", 1)
    return weight is not None and groups > 1 and weight.shape[0] == groups == layer.arg("input").shape[1]


def is_pooling(call: Value) -> bool:
    """Whether a call pools an image, each channel separately."""
    if call.calls(aten.mean.dim):
        rank, dims = call.arg("self").rank, call.arg("dim") or [1]
        return all(dim % rank > 1 for dim in dims)
    return call.calls(*POOLS) and call.rank == POOLS[call.target] + 2


def is_rounding(call: Value) -> bool:
    """Whether a call quantizes with one scale, or dequantizes such a value: zero becomes the zero
    point, and zero again."""
    if not call.calls(QUANTIZE, DEQUANTIZE):
        return False
    source = call.operands[0] if call.calls(DEQUANTIZE) else call
    if not source.calls(QUANTIZE):
        return False
    editor, nodes = call.editor, (call.node, source.node)
    scale, points = editor.tensor(call.node.args[1]), [editor.tensor(n.args[2]) for n in nodes]
    if scale is None or any(t is not None and t.numel() != 1 for t in (scale, *points)):
        return False
    known = [n.args[2] is None or t is not None for n, t in zip(nodes, points, strict=True)]
    return all(known) and len({0 if t is None else int(t) for t in points}) == 1


def _keeps_zero(call: Value) -> bool:
    """Whether a pointwise call maps zero to zero."""
    zero = torch.zeros(1, dtype=call.dtype)
    return bool((schema.call_on(call.node, lambda _: zero) == 0).all())


def _follows(user: Value, table: Table) -> bool:
    """Whether a reader becomes wider with its operand, as sums, depthwise layers, activations and
    pools do. Others read a slice."""
    if user.calls(aten.add.Tensor):
        return True
    if is_pointwise(user.node, table) and len(user.operands) == 1:
        return _keeps_zero(user)
    return is_rounding(user) or is_pooling(user) or is_depthwise(user)


def contracts_axis(layer: Value, value: Value, axis: int) -> bool:
    """Whether a call is a layer that contracts an axis of a value, without groups."""
    if contraction_weight(layer) is None or layer.arg("input") != value:
        return False
    return channel_axis(layer) == axis and layer.arguments.get("groups", 1) == 1


def apply_widening(plan: Widening) -> None:
    """Append the channels: weights get rows and columns of zeros, other readers a slice."""
    depthwise = {layer for layer in plan.rows if is_depthwise(layer)}
    for layer in plan.rows:
        _grow(layer, plan.more, rows=True)
    for layer in plan.columns:
        _grow(layer, plan.more, rows=False)
    for value in plan.values:
        count, others, fake = value.shape[plan.axis], plan.others(value), value.fake
        set_width(value, plan.axis, count + plan.more)
        if value in depthwise:
            set_arguments(value, groups=count + plan.more)
        if value.calls(aten.constant_pad_nd.default):
            set_arguments(value, pad=[n + plan.more if n else 0 for n in value.arg("pad")])
        if others:
            graph = value.editor.graph
            with graph.inserting_after(value.node):
                cut = graph.call_function(aten.slice.Tensor, (value.node, plan.axis, 0, count))
            cut.meta["val"] = fake
            for user in others:
                user.node.replace_input_with(value.node, cut)
    for value in plan.fixed:
        _pad_fixed(value, plan)


def set_width(value: Value, axis: int, size: int) -> None:
    """Change one size of a value."""
    shape = list(value.shape)
    shape[axis] = size
    value.node.meta["val"] = value.editor.values.dense(shape, value.fake)


def set_arguments(call: Value, **changed: Any) -> None:
    """Change arguments of a call, in place."""
    node = call.node
    node.args, node.kwargs = schema.bind_arguments(call.target, schema.arguments(node) | changed)


def _pad_fixed(value: Value, plan: Widening) -> None:
    """Pad a value that depends on no input, for the readers that become wider."""
    users = [user.node for user in value.users if user in plan.values]
    first = next(n for n in value.editor.graph.nodes if n in users)
    with value.editor.graph.inserting_before(first):
        padded = value.pad([0, 0] * (value.rank - 1 - plan.axis) + [0, plan.more], 0.0)
    for user in users:
        user.replace_input_with(value.node, padded.node)


def _grow(layer: Value, more: int, *, rows: bool) -> None:
    """Append rows (output channels) or columns (input channels) of zeros to a layer's weight."""

    def grown(tensor: Tensor, axis: int) -> Tensor:
        shape = list(tensor.shape)
        shape[axis] = more
        return torch.cat([tensor, tensor.new_zeros(shape)], axis)

    change_weight(layer, grown, rows=rows)


def change_weight(layer: Value, change: Callable[[Tensor, int], Tensor], *, rows: bool) -> None:
    """Change the weight of a layer along its output channels (`rows`), as its bias, or along its
    input channels."""
    out = OUTPUT_AXIS[layer.target]
    axes = {"weight": out, "bias": 0} if rows else {"weight": 1 - out}
    for name, axis in axes.items():
        read = layer.arg(name)
        if read is not None:
            tensor = layer.editor.replace_constant(read.node, change(read.constant, axis), layer.node)
            layer.node.replace_input_with(read.node, tensor)


class _Padded(nn.Module):
    """Channels of zeros appended to an image."""

    def __init__(self, more: int):
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return torch.constant_pad_nd(x, [0, 0, 0, 0, 0, self.more])


class _PaddedSum(nn.Module):
    """A narrow stream that is padded where it joins a wider one, and read without the pad, too."""

    def __init__(self, narrow: nn.Module, wide: nn.Module):
        super().__init__()
        self.narrow, self.wide = narrow, wide

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(x).relu()
        after = [0, 0, 0, 0, 0, 3] if x.ndim == 4 else [0, 3]
        total = (torch.constant_pad_nd(y, after) + self.wide(x)).relu()
        return total.mean(1) + y.sum(1) if x.ndim == 4 else total.mean(2) + y.sum(2)


_PADS = (
    case(nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), _Padded(3), nn.Conv2d(8, 4, 1)), (2, 2, 4, 5)),
    case(_PaddedSum(nn.Conv2d(2, 5, 1), nn.Conv2d(2, 8, 1)), (2, 2, 4, 5)),
    case(_PaddedSum(nn.Linear(5, 5), nn.Linear(5, 8)), (2, 3, 5), dynamic={0: (0, 1)}),
)


PADS_REMOVED = Pass(
    "the removal of pads",
    remove_pads,
    "pad(relu(conv(x, W))) == relu(conv(x, [W; 0])); conv(x, W) == conv(pad(x), [W 0])",
    cases=_PADS,
    exact=False,
)


_DEPTHWISE = nn.Sequential(nn.Conv2d(2, 5, 1), nn.ReLU(), nn.Conv2d(5, 5, 3, groups=5), nn.MaxPool2d(2))
_WIDTHS = (
    case(nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 4, 1)), (2, 2, 4, 5)),
    case(nn.Sequential(*_DEPTHWISE, nn.Conv2d(5, 4, 1)), (2, 2, 4, 5)),
    case(nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 4)), (2, 3, 5), dynamic={0: (0,)}),
)


def widths_rounded(multiple: int) -> Pass:
    """The pass that rounds widths up to a multiple."""
    return Pass(
        f"widths in multiples of {multiple}",
        partial(round_widths, multiple=multiple),
        f"conv(relu(conv(x))) has a multiple of {multiple} channels in between",
        cases=_WIDTHS,
        exact=False,
    )
