"""What oneDNN computes as it stores: the activation, or the sum, behind a convolution or a linear
layer, as torch names it. And the inverse: every such call as the ATen calls it stands for.

The ops are torch's own (its compiler emits them); they take float32 and bfloat16 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import base_name
from demask.compat.onednn import ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.activations import by_onednn, by_op
from demask.ops.traits import CONV_OF_AXES

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An activation as oneDNN is asked for it."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


def epilogue(node: fx.Node) -> Epilogue | None:
    """The activation that a call is, None if it is none of them."""
    for activation, op in by_op().get(node.target, ()):
        numbers = op.read(schema.arguments(node).__getitem__)
        if activation.onednn and op.onednn and numbers is not None:
            return Epilogue(activation.onednn, numbers, activation.algorithm)
    return None


def convolution(
    x: Any, weight: Any, bias: Any, padding: Any, stride: Any, dilation: Any, groups: int,
    after: Epilogue, other: Any = None,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Target and arguments of a convolution with its epilogue; other: what is added before it."""
    geometry = (weight, bias, list(padding), list(stride), list(dilation), groups)
    if other is None:
        target = ops()._convolution_pointwise.default
        return target, (x, *geometry, after.name, list(after.scalars), after.algorithm)
    unary = None if after.name == "none" else after.name
    return ops()._convolution_pointwise.binary, (x, other, *geometry, "add", 1, unary, [], "")


def is_fused(node: fx.Node) -> bool:
    """Is a call a layer of oneDNN's, with its epilogue?"""
    return node.target in _targets("_convolution_pointwise", "_linear_pointwise")


def is_pack(node: fx.Node) -> bool:
    """Does a call lay a weight out for such a layer?"""
    return node.target in _targets("_reorder_convolution_weight", "_reorder_linear_weight")


def _targets(*names: str) -> list[Any]:
    packets = [getattr(ops(), name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def packed(node: fx.Node, weight: Tensor, x: Tensor) -> Tensor:
    """The weight of a fused call, laid out for what it convolves."""
    found = schema.arguments(node)
    if "padding" not in found:
        return ops()._reorder_linear_weight(weight, None)
    geometry = (found["padding"], found["stride"], found["dilation"], found["groups"])
    return ops()._reorder_convolution_weight(weight, *geometry, list(x.shape))


def plain_call(after: Epilogue, x: Tensor) -> Tensor:
    """An activation of a tensor, over it where torch can."""
    if after.name == "none":
        return x
    target, args, kwargs = _activation(after.name, after.scalars, after.algorithm)
    over = getattr(aten, f"{base_name(target)}_", None)
    return (target if over is None else over.default)(x, *args, **kwargs)


def run_plain(values: Mapping[str, Any]) -> Tensor:
    """What a fused call makes of these arguments, by the ATen ops it stands for. ValueError where
    what it adds has another shape: oneDNN would not check."""
    return _plain(values, lambda target, *args, **kwargs: target(*args, **kwargs), _same_shape)


def _same_shape(made: Tensor, other: Tensor) -> None:
    if made.shape != other.shape:
        raise ValueError(f"expected {tuple(made.shape)} to be added, got {tuple(other.shape)}")


def plain(program: Program) -> Program:
    """The program with every fused call as the ATen calls it stands for, weights as they are: it
    runs in any dtype on any device, and exports."""
    editor = GraphEditor(program)
    for node in editor.calls():
        if is_pack(node):
            editor.replace(node, node.args[0])
        elif is_fused(node):
            call = partial(editor.insert, node, node)
            editor.replace(node, _plain(schema.arguments(node), call, lambda made, other: None))
    return editor.finish()


def _plain(
    found: Mapping[str, Any], call: Callable[..., Any], check: Callable[[Any, Any], None]
) -> Any:
    """The ATen calls of a fused one: the layer, what is added, the activation."""
    if "padding" in found:
        target = CONV_OF_AXES[len(found["padding"])]
        geometry = (found["stride"], found["padding"], found["dilation"], found["groups"])
        made = call(target, found["X"], found["W"], found["B"], *geometry)
    else:
        made = call(aten.linear.default, found["X"], found["W"], found["B"])
    name, scalars, algorithm = found.get("attr"), found.get("scalars"), found.get("algorithm")
    if "other" in found:
        check(made, found["other"])
        made = call(aten.add.Tensor, made, found["other"])
        name, scalars, algorithm = found.get("unary_attr"), (), ""
    if name in (None, "none"):
        return made
    target, args, kwargs = _activation(name, scalars or (), algorithm)
    return call(target, made, *args, **kwargs)


def _activation(
    name: Any, scalars: Any, algorithm: str | None
) -> tuple[Any, list[Any], dict[str, Any]]:
    """An activation in ATen: op, arguments, keyword arguments."""
    activation = by_onednn(name, algorithm)
    if activation is None:
        raise ValueError(f"expected an activation that oneDNN has, got {name!r}, {algorithm!r}")
    op = activation.ops[0]
    return op.target, list(scalars), dict(op.where)
