"""Batch norms, and constants added or multiplied per channel, go into the weights before them.

    norm(W x + b) == (s W) x + (s b + t)        with s = scale / sqrt(var + eps), t = shift - s mean

What does not depend on the input may stand between (a border map m): norm(W x + b + m) ==
(s W) x + (s b + t) + s m, and s m is computed once per size. The products are taken in float64.
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
from demask.ops.traits import ARITHMETIC, COMMUTATIVE, OUTPUT_AXIS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Affine:
    """x * scale + shift along one axis: float64 vectors, None for 1 and 0."""

    x: fx.Node
    axis: int
    scale: Tensor | None
    shift: Tensor | None


def absorbed(program: Program) -> Program:
    """The program with every such norm and constant in the weights of the layer before it."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    reshape_views(editor.graph)
    for node in editor.calls():
        step = _step(editor, node)
        if step is not None and step.x in live:
            made = _pushed(editor, step, node, live)
            if made is not None:
                live.add(made)
                editor.replace(node, made)
    return editor.finish()


def contraction(editor: GraphEditor, node: Any) -> Tensor | None:
    """The weight of a call that multiplies by a constant one, its bias constant too; else None."""
    if not isinstance(node, fx.Node) or node.target not in OUTPUT_AXIS:
        return None
    found = schema.arguments(node)
    weight = editor.tensor(found["weight"])
    if weight is None or (found["bias"] is not None and editor.tensor(found["bias"]) is None):
        return None
    if OUTPUT_AXIS[node.target] == 1 and found["groups"] != 1:
        return None
    batched = node.target is aten.linear.default or node.meta["val"].ndim == weight.ndim
    if not batched:
        return None  # an image without a batch: its channels stand on another axis
    return weight if weight.is_floating_point() else None


def channel_axis(node: fx.Node) -> int:
    """The axis that a contraction's output channels stand on."""
    return node.meta["val"].ndim - 1 if node.target is aten.linear.default else 1


def rewritten(
    editor: GraphEditor, node: fx.Node, weight: Tensor, bias: Tensor | None, reader: fx.Node
) -> fx.Node:
    """A contraction with another weight and bias in its place, moved before `reader`, which alone
    reads it; float64 tensors are rounded."""
    found = schema.arguments(node)
    dtype = found["weight"].meta["val"].dtype
    kernel = editor.replace_constant(found["weight"], weight.to(dtype).contiguous(), node)
    offset = None
    if bias is not None and found["bias"] is not None:
        offset = editor.replace_constant(found["bias"], bias.to(dtype), node)
    elif bias is not None:
        name = str(found["weight"].target).rpartition(".")[0]
        offset = editor.add_constant(
            f"{name}.bias".lstrip("."), bias.to(dtype), reader, parameter=True
        )
    made = editor.repeat_call(node, reader, weight=kernel, bias=offset)
    editor.replace(node, made)
    return made


def _step(editor: GraphEditor, node: fx.Node) -> Affine | None:
    """A call as an affine map of one operand, if it is one."""
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
    if contraction(editor, x) is None or x.meta["val"].ndim != node.meta["val"].ndim:
        return None
    axis = channel_axis(x)
    count = channels_of(x, axis)
    vector = None if count is None else per_channel(value, x.meta["val"].ndim, axis, count)
    if vector is None or node.meta["val"].dtype != x.meta["val"].dtype:
        return None
    if node.target is aten.mul.Tensor:
        return Affine(x, axis, vector.double(), None)
    if node.target is aten.div.Tensor:
        return Affine(x, axis, 1 / vector.double(), None)
    shift = -vector.double() if node.target is aten.sub.Tensor else vector.double()
    return Affine(x, axis, None, shift)


def _norm(editor: GraphEditor, node: fx.Node) -> Affine | None:
    found = schema.arguments(node)
    if found["training"]:
        return None
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = [None if found[name] is None else editor.tensor(found[name]) for name in names]
    absent = any(found[n] is not None and t is None for n, t in zip(names, tensors, strict=True))
    if absent or tensors[2] is None or tensors[3] is None:
        return None
    weight, bias, mean, var = (None if t is None else t.double() for t in tensors)
    assert mean is not None and var is not None
    scale = torch.rsqrt(var + found["eps"])
    if weight is not None:
        scale = scale * weight
    return Affine(found["input"], 1, scale, (0 if bias is None else bias) - mean * scale)


def _pushed(
    editor: GraphEditor, step: Affine, reader: fx.Node, live: set[fx.Node]
) -> fx.Node | None:
    """The node that computes step of its x, by changing what computes x; None if it cannot be."""
    node = step.x
    if only_reader(node) is None:
        return None
    if contraction(editor, node) is not None:
        return _into(editor, step, reader) if channel_axis(node) == step.axis else None
    plain = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if not plain or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    sides: Any = node.args
    varying = [side for side in sides if side in live]
    fixed = [side for side in sides if side not in live]
    if len(varying) != 1 or varying[0].meta["val"].shape != node.meta["val"].shape:
        return None
    inner = _pushed(editor, Affine(varying[0], step.axis, step.scale, step.shift), reader, live)
    if inner is None:
        return None
    offset = fixed[0]
    if step.scale is not None:
        shape = [1] * (node.meta["val"].ndim - step.axis)
        shape[0] = -1
        factor = step.scale.to(node.meta["val"].dtype).reshape(shape)
        read = editor.add_constant(f"{inner.name}_scale", factor, reader)
        offset = editor.insert(reader, None, aten.mul.Tensor, offset, read)
    made = editor.insert(reader, node, aten.add.Tensor, inner, offset)
    live.update((inner, made))
    return made


def _into(editor: GraphEditor, step: Affine, reader: fx.Node) -> fx.Node:
    found = schema.arguments(step.x)
    axis = OUTPUT_AXIS[step.x.target]
    weight = editor.tensor(found["weight"])
    bias = None if found["bias"] is None else editor.tensor(found["bias"])
    assert weight is not None
    weight, bias = weight.double(), None if bias is None else bias.double()
    if step.scale is not None:
        shape = [1] * weight.ndim
        shape[axis] = -1
        weight = weight * step.scale.reshape(shape)
        bias = None if bias is None else bias * step.scale
    if step.shift is not None:
        bias = step.shift if bias is None else bias + step.shift
    return rewritten(editor, step.x, weight, bias, reader)
