"""Folding of batch norms, and of constants added or multiplied per channel, into weights.

    norm(W x + b) == (s W) x + (s b + t)        with s = scale / sqrt(var + eps), t = shift - s mean

A value m that does not depend on the input (a border map) may be added in between: norm(W x + b +
m) == (s W) x + (s b + t) + s m, where s m is computed once per size. Products are computed in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.graph.editor import GraphEditor, reshape_views
from demask.graph.program import Program
from demask.graph.queries import input_dependent, per_channel
from demask.graph.value import Value
from demask.ops import schema
from demask.ops.traits import COMMUTATIVE, OUTPUT_AXIS
from demask.rewrites.rule import Pass, Phase, case

aten = torch.ops.aten
# Calls of a layer and a constant vector v -> scale and shift.
_AFFINE: dict[Any, Callable[[Tensor], tuple[Tensor | None, Tensor | None]]] = {
    aten.mul.Tensor: lambda v: (v, None),
    aten.div.Tensor: lambda v: (1 / v, None),
    aten.add.Tensor: lambda v: (None, v),
    aten.sub.Tensor: lambda v: (None, -v),
}


@dataclass(frozen=True, slots=True)
class Affine:
    """x * scale + shift along one axis. scale, shift: float64 vectors; None for 1 and for 0."""

    x: Value
    axis: int
    scale: Tensor | None
    shift: Tensor | None


def fold_affine(program: Program) -> Program:
    """The program with norms and per-channel constants folded into the layers before them."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    reshape_views(editor.graph)
    for node in editor.calls(aten.batch_norm.default, *_AFFINE):
        call = Value(node, editor)
        step = _norm(call) if call.calls(aten.batch_norm.default) else _arithmetic(call)
        if step is not None and step.x.node in live:
            folded = _pushed(step, call, live)
            if folded is not None:
                live.add(folded.node)
                editor.replace(node, folded.node)
    return editor.finish()


def contraction_weight(call: Any) -> Tensor | None:
    """The weight of a contraction with constant weight and bias; None for other values."""
    if not isinstance(call, Value) or not call.calls(*OUTPUT_AXIS):
        return None
    arguments = call.arguments
    weight, bias = arguments["weight"].constant, arguments["bias"]
    if weight is None or (bias is not None and bias.constant is None):
        return None
    if OUTPUT_AXIS[call.target] == 1 and arguments["groups"] != 1:
        return None
    if not is_linear(call) and call.rank != weight.ndim:
        return None  # an image without a batch: its channels are on another axis
    return weight if weight.is_floating_point() else None


def is_linear(layer: Value) -> bool:
    """Whether a contraction is a linear layer, not a convolution."""
    return layer.calls(aten.linear.default)


def channel_axis(layer: Value) -> int:
    """The axis of a contraction's output channels."""
    return layer.rank - 1 if is_linear(layer) else 1


def summands(call: Value) -> tuple[Value, Value] | None:
    """The two values that a call adds; None for other calls."""
    if not call.calls(aten.add.Tensor) or call.arg("alpha") != 1:
        return None
    x, other = call.arg("self"), call.arg("other")
    return (x, other) if isinstance(x, Value) and isinstance(other, Value) else None


def replace_layer(layer: Value, weight: Tensor, bias: Tensor | None, reader: Value) -> Value:
    """The call that replaces a contraction, with another weight and bias, rounded to its dtype. It
    is inserted before `reader`, the only call that reads it."""
    editor, node = layer.editor, layer.node
    arguments = schema.arguments(node)
    dtype = layer.arg("weight").dtype
    kernel = editor.replace_constant(arguments["weight"], weight.to(dtype).contiguous(), node)
    offset = None
    if bias is not None and arguments["bias"] is not None:
        offset = editor.replace_constant(arguments["bias"], bias.to(dtype), node)
    elif bias is not None:
        name = str(arguments["weight"].target).rpartition(".")[0]
        offset = editor.add_constant(f"{name}.bias".lstrip("."), bias.to(dtype), reader.node, parameter=True)
    new = editor.repeat_call(node, reader.node, weight=kernel, bias=offset)
    editor.replace(node, new)
    return Value(new, editor)


def _arithmetic(call: Value) -> Affine | None:
    """A layer and a constant per channel as an affine map of the layer's output."""
    x, other = call.arg("self"), call.arg("other")
    if isinstance(x, Value) and x.constant is not None and call.calls(*COMMUTATIVE):
        x, other = other, x
    if contraction_weight(x) is None or call.dtype != x.dtype or call.arguments.get("alpha", 1) != 1:
        return None
    value = other.constant if isinstance(other, Value) else torch.tensor(other, dtype=torch.float64)
    axis = channel_axis(x)
    vector = None if value is None else per_channel(value, x.rank, axis, x.shape[axis])
    return None if vector is None else Affine(x, axis, *_AFFINE[call.target](vector.double()))


def _norm(call: Value) -> Affine | None:
    """A batch norm with constant statistics as an affine map."""
    if call.arg("training"):
        return None
    operands = [call.arg(name) for name in ("weight", "bias", "running_mean", "running_var")]
    weight, bias, mean, var = (None if x is None or x.constant is None else x.constant.double() for x in operands)
    if mean is None or var is None or any(x is not None and x.constant is None for x in operands):
        return None
    scale = torch.rsqrt(var + call.arg("eps"))
    if weight is not None:
        scale = scale * weight
    return Affine(call.arg("input"), 1, scale, (0 if bias is None else bias) - mean * scale)


def _pushed(step: Affine, reader: Value, live: set[fx.Node]) -> Value | None:
    """The value of `step`, by a change of the call that computes its operand; None if that is
    impossible."""
    x = step.x
    if len(x.users) != 1:
        return None
    if contraction_weight(x) is not None:
        return _into(step, reader) if channel_axis(x) == step.axis else None
    sides = summands(x) or ()
    varying = [side for side in sides if side.node in live]
    if len(varying) != 1 or not varying[0].is_shaped(x):
        return None
    inner = _pushed(Affine(varying[0], step.axis, step.scale, step.shift), reader, live)
    if inner is None:
        return None
    editor, offset = x.editor, next(side for side in sides if side.node not in live)
    with editor.graph.inserting_before(reader.node):
        if step.scale is not None:
            shape = [-1] + [1] * (x.rank - step.axis - 1)
            offset = offset * reader.read(f"{inner.name}_scale", step.scale.to(x.dtype).reshape(shape))
    total = Value(editor.insert(reader.node, x.node, aten.add.Tensor, inner.node, offset.node), editor)
    live.update((inner.node, total.node))
    return total


def _into(step: Affine, reader: Value) -> Value:
    """The layer that computes `step`, with its scale and shift in weight and bias."""
    axis, bias = OUTPUT_AXIS[step.x.target], step.x.arg("bias")
    weight = step.x.arg("weight").constant.double()
    bias = None if bias is None else bias.constant.double()
    if step.scale is not None:
        shape = [1] * weight.ndim
        shape[axis] = -1
        weight = weight * step.scale.reshape(shape)
        bias = None if bias is None else bias * step.scale
    if step.shift is not None:
        bias = step.shift if bias is None else bias + step.shift
    return replace_layer(step.x, weight, bias, reader)


def _norm_of(channels: int, *, affine: bool = True) -> nn.Module:
    norm = nn.BatchNorm2d(channels, affine=affine)
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        assert tensor is not None
        tensor.data.uniform_(0.5, 1.5)
    return norm


class _BorderMap(nn.Module):
    """A norm of a layer and a map that depends on sizes only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.map, self.norm = nn.Conv2d(2, 6, 3), nn.Conv2d(1, 6, 3), _norm_of(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.map(x.new_ones([1, 1, 4, 5])) + self.layer(x))


class _Scaled(nn.Module):
    """Constants per channel after a layer."""

    def __init__(self, layer: nn.Module, *shape: int):
        super().__init__()
        self.layer, self.constant = layer, nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.constant * (self.layer(x) / self.constant - 2) + self.constant


IMAGE = (2, 2, 4, 5)
FOLD_AFFINE = Pass(
    "the folding of norms into layers",
    lambda program, table: fold_affine(program),
    "norm(W x + b) == (s W) x + (s b + t)",
    cases=(
        case(nn.Sequential(nn.Conv2d(2, 6, 3), _norm_of(6)), IMAGE),
        case(nn.Sequential(nn.Conv2d(2, 6, 3, groups=2, bias=False), _norm_of(6, affine=False)), IMAGE),
        case(nn.Sequential(nn.ConvTranspose2d(2, 6, 3), _norm_of(6)), IMAGE),
        case(_BorderMap(), IMAGE, dynamic={0: (0,)}),
        case(_Scaled(nn.Conv2d(2, 6, 3), 6, 1, 1), IMAGE),
        case(_Scaled(nn.Linear(5, 6), 6), IMAGE),
    ),
    exact=False,
)
FOLD = Phase("folded norms", (FOLD_AFFINE,))
