"""Padding of values with channels of zeros if that is cheaper than narrow layers.

A stream that grows from join to join is padded at each; at its final width from the start, it needs
no pads. And kernels are faster for some widths than for smaller ones. A call that computes a wider
value has rows of zeros in its weight, a call that reads it columns of zeros:

    conv(x, W) == conv(pad(x), [W 0])        pad(relu(conv(x, W))) == relu(conv(x, [W; 0]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, is_pointwise
from demask.ops import Table, schema
from demask.ops.schema import fake
from demask.ops.traits import OUTPUT_AXIS, POOLS
from demask.tune.fold_affine import channel_axis, contraction_weight

aten = torch.ops.aten
QUANTIZE, DEQUANTIZE = torch.ops.demask.quantize.default, torch.ops.demask.dequantize.default


@dataclass(slots=True)
class Widening:
    """A plan to append `more` channels of zeros. values: those that become wider. rows, columns:
    layers whose weights grow. fixed: values that depend on no input and get a pad."""

    axis: int
    more: int
    values: dict[fx.Node, None] = field(default_factory=dict)
    rows: dict[fx.Node, None] = field(default_factory=dict)
    columns: dict[fx.Node, None] = field(default_factory=dict)
    fixed: dict[fx.Node, None] = field(default_factory=dict)

    def others(self, node: fx.Node) -> list[fx.Node]:
        """Readers of a value that need a slice of it, since they cannot become wider."""
        return [u for u in node.users if u not in self.values and u not in self.columns]


# Whether a widening is faster. pad: the call that it removes; None if it only rounds up a width.
Worth = Callable[[GraphEditor, Widening, fx.Node | None], bool]


def remove_pads(program: Program, worth: Worth, table: Table) -> Program:
    """The program without pads, if `worth` finds wider values faster."""
    editor = GraphEditor(program)
    for pad in reversed(editor.calls(aten.constant_pad_nd.default)):
        live = input_dependent(editor.graph)
        pad_arguments = _pad(pad) if pad in live else None
        if pad_arguments is None:
            continue
        source, axis, more = pad_arguments
        plan = plan_widening(editor, source, axis, more, live, table)
        if plan is not None and worth(editor, plan, pad):
            apply_widening(editor, plan)
            editor.replace(pad, source)
    return editor.finish()


def round_widths(program: Program, wanted: Callable[[int], int], worth: Worth, table: Table) -> Program:
    """The program with the widths of layers rounded up to `wanted(width)` if that is faster."""
    editor = GraphEditor(program)
    for node in editor.calls(*OUTPUT_AXIS):
        live = input_dependent(editor.graph)
        if node not in live or contraction_weight(editor, node) is None:
            continue
        axis = channel_axis(node)
        count = channels_of(node, axis)
        more = 0 if count is None else wanted(count) - count
        if more > 0:
            plan = plan_widening(editor, node, axis, more, live, table)
            # Readers of a slice would copy it: no kernel is so much faster by its width.
            sliced = plan is not None and any(map(plan.others, plan.values))
            if plan is not None and not sliced and worth(editor, plan, None):
                apply_widening(editor, plan)
    return editor.finish()


def _pad(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Source, axis and count of a pad that appends zeros along the channels; None for others."""
    arguments = schema.arguments(node)
    pads, rank = list(arguments["pad"]), fake(node).ndim
    if (
        not fake(node).is_floating_point()
        or not all(isinstance(n, int) for n in pads)
        or (arguments["value"] or 0) != 0
    ):
        return None
    padded_ends = [k for k, n in enumerate(pads) if n]
    axis = rank - 1 - padded_ends[0] // 2 if padded_ends else 0
    if len(padded_ends) != 1 or padded_ends[0] % 2 == 0 or pads[padded_ends[0]] < 0:
        return None
    return (arguments["self"], axis, pads[padded_ends[0]]) if axis == 1 or axis == rank - 1 else None


def plan_widening(
    editor: GraphEditor, start: fx.Node, axis: int, more: int, live: set[fx.Node], table: Table
) -> Widening | None:
    """All values that must become wider with `start`; None if one of them cannot."""
    plan, stack = Widening(axis, more), [start]
    while stack:
        node = stack.pop()
        if node in plan.values or node in plan.fixed:
            continue
        if node not in live and node.op != "placeholder":
            plan.fixed[node] = None
            continue
        sources = _sources(editor, node, axis, table)
        if sources is None:
            return None
        plan.values[node] = None
        if contraction_weight(editor, node) is not None:
            plan.rows[node] = None
        stack += sources
        stack += [user for user in node.users if _follows(editor, user, node, table)]
        for user in node.users:
            if _contracts_axis(editor, user, node, axis):
                plan.columns[user] = None
    return plan


def _sources(editor: GraphEditor, node: fx.Node, axis: int, table: Table) -> list[fx.Node] | None:
    """The operands that must become wider with a value; None if it cannot become wider."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return None
    if contraction_weight(editor, node) is not None:
        arguments = schema.arguments(node)
        if is_depthwise(editor, node):
            return [arguments["input"]] if axis == 1 else None
        return [] if channel_axis(node) == axis and arguments.get("groups", 1) == 1 else None
    if node.target is aten.constant_pad_nd.default:
        pad = _pad(node)
        return [] if pad is not None and pad[1] == axis else None
    if is_pointwise(node, table) and len(node.all_input_nodes) == 1:
        return node.all_input_nodes if _keeps_zero(node) else None
    if is_rounding(editor, node):
        return [node.all_input_nodes[0]]
    if axis == 1 and is_pooling(node):
        return node.all_input_nodes
    if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        sides: Any = node.args
        alike = all(
            isinstance(s, fx.Node) and channels_of(s, axis) == channels_of(node, axis) and fake(s).ndim == value.ndim
            for s in sides
        )
        return list(sides) if alike else None
    return None


def is_depthwise(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether a convolution computes each channel from the same channel of its input."""
    weight, arguments = contraction_weight(editor, node), schema.arguments(node)
    groups = arguments.get("groups", 1)
    return (
        weight is not None
        and groups > 1
        and weight.shape[0] == groups
        and (channels_of(arguments["input"], 1) == groups)
    )


def is_pooling(node: fx.Node) -> bool:
    """Whether a call pools an image, each channel separately."""
    if node.target is aten.mean.dim:
        arguments = schema.arguments(node)
        rank, dims = fake(arguments["self"]).ndim, arguments["dim"] or [1]
        return all(dim % rank > 1 for dim in dims)
    return node.target in POOLS and fake(node).ndim == POOLS[node.target] + 2


def is_rounding(editor: GraphEditor, node: fx.Node) -> bool:
    """Whether a call quantizes with one scale, or dequantizes such a value: zero becomes the zero
    point, and zero again."""
    source: Any = node.args[0] if node.target is DEQUANTIZE else node
    if not isinstance(source, fx.Node) or source.target is not QUANTIZE:
        return False
    scale, points = editor.tensor(node.args[1]), [editor.tensor(n.args[2]) for n in (node, source)]
    if scale is None or any(t is not None and t.numel() != 1 for t in (scale, *points)):
        return False
    known = [n.args[2] is None or t is not None for n, t in zip((node, source), points, strict=True)]
    return all(known) and len({0 if t is None else int(t) for t in points}) == 1


def _keeps_zero(node: fx.Node) -> bool:
    """Whether a pointwise call maps zero to zero."""
    zero = torch.zeros(1, dtype=fake(node).dtype)
    return bool((schema.call_on(node, lambda _: zero) == 0).all())


def _follows(editor: GraphEditor, user: fx.Node, node: fx.Node, table: Table) -> bool:
    """Whether a reader becomes wider with its operand, as sums, depthwise layers, activations and
    pools do. Others read a slice."""
    if user.target is aten.add.Tensor:
        return node in user.args
    if is_pointwise(user, table) and len(user.all_input_nodes) == 1:
        return _keeps_zero(user)
    if is_rounding(editor, user):
        return True
    if is_pooling(user):
        return True
    return contraction_weight(editor, user) is not None and is_depthwise(editor, user)


def _contracts_axis(editor: GraphEditor, user: fx.Node, node: fx.Node, axis: int) -> bool:
    if contraction_weight(editor, user) is None or schema.arguments(user)["input"] is not node:
        return False
    return channel_axis(user) == axis and schema.arguments(user).get("groups", 1) == 1


def apply_widening(editor: GraphEditor, plan: Widening) -> None:
    """Append the channels: weights get rows and columns of zeros, other readers a slice."""
    depthwise = {node for node in plan.rows if is_depthwise(editor, node)}
    for node in plan.rows:
        _grow(editor, node, plan.more, rows=True)
    for node in plan.columns:
        _grow(editor, node, plan.more, rows=False)
    for node in plan.values:
        count = channels_of(node, plan.axis)
        assert count is not None
        others = plan.others(node)
        value, shape = fake(node), list(fake(node).shape)
        shape[plan.axis] = count + plan.more
        node.meta["val"] = editor.values.dense(shape, value)
        if node in depthwise:
            args, kwargs = schema.bind_arguments(node.target, schema.arguments(node) | {"groups": count + plan.more})
            node.args, node.kwargs = args, kwargs
        if node.target is aten.constant_pad_nd.default:
            padded = schema.arguments(node)
            pads = [n + plan.more if n else 0 for n in padded["pad"]]
            node.args, node.kwargs = schema.bind_arguments(node.target, padded | {"pad": pads})
        if others:
            with editor.graph.inserting_after(node):
                cut = editor.graph.call_function(aten.slice.Tensor, (node, plan.axis, 0, count))
            cut.meta["val"] = value
            for user in others:
                user.replace_input_with(node, cut)
    for node in plan.fixed:
        _pad_fixed(editor, node, plan)


def _pad_fixed(editor: GraphEditor, node: fx.Node, plan: Widening) -> None:
    """Pad a value that depends on no input, for the readers that become wider."""
    users = [user for user in node.users if user in plan.values]
    first = next(n for n in editor.graph.nodes if n in users)
    after = [0, 0] * (fake(node).ndim - 1 - plan.axis)
    padded = editor.insert(first, None, aten.constant_pad_nd.default, node, [*after, 0, plan.more], 0.0)
    for user in users:
        user.replace_input_with(node, padded)


def _grow(editor: GraphEditor, node: fx.Node, more: int, *, rows: bool) -> None:
    """Append rows (output channels) or columns (input channels) of zeros to a layer's weight."""
    arguments = schema.arguments(node)
    weight = editor.tensor(arguments["weight"])
    assert weight is not None
    out = OUTPUT_AXIS[node.target]
    names = ["weight", "bias"] if rows and arguments["bias"] is not None else ["weight"]
    for name in names:
        tensor = editor.tensor(arguments[name])
        assert tensor is not None
        axis = 0 if name == "bias" else out if rows else 1 - out
        shape = list(tensor.shape)
        shape[axis] = more
        grown = torch.cat([tensor, tensor.new_zeros(shape)], axis)
        node.replace_input_with(arguments[name], editor.replace_constant(arguments[name], grown, node))
