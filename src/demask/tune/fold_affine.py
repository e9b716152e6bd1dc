"""Folding of batch norms, and of constants added or multiplied per channel, into weights.

    norm(W x + b) == (s W) x + (s b + t)        with s = scale / sqrt(var + eps), t = shift - s mean

A value m that does not depend on the input (a border map) may be added in between: norm(W x + b +
m) == (s W) x + (s b + t) + s m, where s m is computed once per size. Products are computed in
float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor, reshape_views
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, only_reader, per_channel
from demask.ops import schema
from demask.ops.schema import fake
from demask.ops.traits import ARITHMETIC, COMMUTATIVE, OUTPUT_AXIS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Affine:
    """x * scale + shift along one axis. scale, shift: float64 vectors; None for 1 and for 0."""

    x: fx.Node
    axis: int
    scale: Tensor | None
    shift: Tensor | None


def fold_affine(program: Program) -> Program:
    """The program with norms and per-channel constants folded into the layers before them."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    reshape_views(editor.graph)
    for node in editor.calls():
        step = _step(editor, node)
        if step is not None and step.x in live:
            folded = _pushed(editor, step, node, live)
            if folded is not None:
                live.add(folded)
                editor.replace(node, folded)
    return editor.finish()


def contraction_weight(editor: GraphEditor, node: Any) -> Tensor | None:
    """The weight of a contraction with constant weight and bias; None for other calls."""
    if not isinstance(node, fx.Node) or node.target not in OUTPUT_AXIS:
        return None
    arguments = schema.arguments(node)
    weight = editor.tensor(arguments["weight"])
    if weight is None or (arguments["bias"] is not None and editor.tensor(arguments["bias"]) is None):
        return None
    if OUTPUT_AXIS[node.target] == 1 and arguments["groups"] != 1:
        return None
    batched = node.target is aten.linear.default or fake(node).ndim == weight.ndim
    if not batched:
        return None  # an image without a batch: its channels are on another axis
    return weight if weight.is_floating_point() else None


def channel_axis(node: fx.Node) -> int:
    """The axis of a contraction's output channels."""
    return fake(node).ndim - 1 if node.target is aten.linear.default else 1


def replace_layer(editor: GraphEditor, node: fx.Node, weight: Tensor, bias: Tensor | None, reader: fx.Node) -> fx.Node:
    """The call that replaces a contraction, with another weight and bias, rounded to its dtype. It
    is inserted before `reader`, the only call that reads it."""
    arguments = schema.arguments(node)
    dtype = fake(arguments["weight"]).dtype
    kernel = editor.replace_constant(arguments["weight"], weight.to(dtype).contiguous(), node)
    offset = None
    if bias is not None and arguments["bias"] is not None:
        offset = editor.replace_constant(arguments["bias"], bias.to(dtype), node)
    elif bias is not None:
        name = str(arguments["weight"].target).rpartition(".")[0]
        offset = editor.add_constant(f"{name}.bias".lstrip("."), bias.to(dtype), reader, parameter=True)
    layer = editor.repeat_call(node, reader, weight=kernel, bias=offset)
    editor.replace(node, layer)
    return layer


def _step(editor: GraphEditor, node: fx.Node) -> Affine | None:
    """A call as an affine map of a layer's output; None if it is none."""
    if node.target is aten.batch_norm.default:
        return _norm(editor, node)
    if node.target not in ARITHMETIC:
        return None
    x, other, *_ = node.args
    if node.kwargs or len(node.args) > 2 or not isinstance(x, fx.Node):
        return None
    if editor.tensor(x) is not None and node.target in COMMUTATIVE:
        x, other = other, x
    value = editor.tensor(other)
    if type(other) in (int, float):
        value = torch.tensor(other, dtype=torch.float64)
    if value is None or not isinstance(x, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    if contraction_weight(editor, x) is None or fake(x).ndim != fake(node).ndim:
        return None
    axis = channel_axis(x)
    count = channels_of(x, axis)
    vector = None if count is None else per_channel(value, fake(x).ndim, axis, count)
    if vector is None or fake(node).dtype != fake(x).dtype:
        return None
    if node.target is aten.mul.Tensor:
        return Affine(x, axis, vector.double(), None)
    if node.target is aten.div.Tensor:
        return Affine(x, axis, 1 / vector.double(), None)
    shift = -vector.double() if node.target is aten.sub.Tensor else vector.double()
    return Affine(x, axis, None, shift)


def _norm(editor: GraphEditor, node: fx.Node) -> Affine | None:
    """A batch norm with constant statistics as an affine map."""
    arguments = schema.arguments(node)
    if arguments["training"]:
        return None
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = [None if arguments[name] is None else editor.tensor(arguments[name]) for name in names]
    absent = any(arguments[n] is not None and t is None for n, t in zip(names, tensors, strict=True))
    if absent or tensors[2] is None or tensors[3] is None:
        return None
    weight, bias, mean, var = (None if t is None else t.double() for t in tensors)
    assert mean is not None and var is not None
    scale = torch.rsqrt(var + arguments["eps"])
    if weight is not None:
        scale = scale * weight
    return Affine(arguments["input"], 1, scale, (0 if bias is None else bias) - mean * scale)


def _pushed(editor: GraphEditor, step: Affine, reader: fx.Node, live: set[fx.Node]) -> fx.Node | None:
    """The node that computes `step`, by changing the call that computes its operand; None if that
    is impossible."""
    node = step.x
    if only_reader(node) is None:
        return None
    if contraction_weight(editor, node) is not None:
        return _into(editor, step, reader) if channel_axis(node) == step.axis else None
    plain = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if not plain or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    sides: Any = node.args
    varying = [side for side in sides if side in live]
    fixed = [side for side in sides if side not in live]
    if len(varying) != 1 or fake(varying[0]).shape != fake(node).shape:
        return None
    inner = _pushed(editor, Affine(varying[0], step.axis, step.scale, step.shift), reader, live)
    if inner is None:
        return None
    offset = fixed[0]
    if step.scale is not None:
        shape = [1] * (fake(node).ndim - step.axis)
        shape[0] = -1
        factor = step.scale.to(fake(node).dtype).reshape(shape)
        read = editor.add_constant(f"{inner.name}_scale", factor, reader)
        offset = editor.insert(reader, None, aten.mul.Tensor, offset, read)
    total = editor.insert(reader, node, aten.add.Tensor, inner, offset)
    live.update((inner, total))
    return total


def _into(editor: GraphEditor, step: Affine, reader: fx.Node) -> fx.Node:
    """The layer that computes `step`, with its scale and shift in weight and bias."""
    arguments = schema.arguments(step.x)
    axis = OUTPUT_AXIS[step.x.target]
    weight = editor.tensor(arguments["weight"])
    bias = None if arguments["bias"] is None else editor.tensor(arguments["bias"])
    assert weight is not None
    weight, bias = weight.double(), None if bias is None else bias.double()
    if step.scale is not None:
        shape = [1] * weight.ndim
        shape[axis] = -1
        weight = weight * step.scale.reshape(shape)
        bias = None if bias is None else bias * step.scale
    if step.shift is not None:
        bias = step.shift if bias is None else bias + step.shift
    return replace_layer(editor, step.x, weight, bias, reader)
