"""oneDNN's fused layers: convolutions and linear layers that also compute the activation or sum
after them. And the inverse: the ATen calls that are equivalent to a fused call.

The ops belong to torch (its compiler emits them). They accept float32 and bfloat16 on the CPU.
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
from demask.ops.activations import activations_by_op, find_onednn_activation
from demask.ops.traits import CONV_OF_AXES

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An activation in oneDNN's notation: name, parameters and algorithm."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


def epilogue_of(node: fx.Node) -> Epilogue | None:
    """The activation that a call computes; None if oneDNN has no such activation."""
    for activation, op in activations_by_op().get(node.target, ()):
        numbers = op.read(schema.arguments(node).__getitem__)
        if activation.onednn and op.onednn and numbers is not None:
            return Epilogue(activation.onednn, numbers, activation.algorithm)
    return None


def convolution(
    x: Any, weight: Any, bias: Any, geometry: tuple[Any, Any, Any, int], after: Epilogue, other: Any = None
) -> tuple[Any, tuple[Any, ...]]:
    """Target and arguments of a convolution with an epilogue. geometry: padding, stride, dilation,
    groups. other: a value added before the epilogue."""
    padding, stride, dilation, groups = geometry
    layer = (weight, bias, list(padding), list(stride), list(dilation), groups)
    if other is None:
        target = ops()._convolution_pointwise.default
        return target, (x, *layer, after.name, list(after.scalars), after.algorithm)
    unary = None if after.name == "none" else after.name
    return ops()._convolution_pointwise.binary, (x, other, *layer, "add", 1, unary, [], "")


def is_fused(node: fx.Node) -> bool:
    """Whether a call is a fused layer of oneDNN."""
    return node.target in _targets("_convolution_pointwise", "_linear_pointwise")


def is_pack(node: fx.Node) -> bool:
    """Whether a call packs a weight for a fused layer."""
    return node.target in _targets("_reorder_convolution_weight", "_reorder_linear_weight")


def _targets(*names: str) -> list[Any]:
    packets = [getattr(ops(), name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def pack_weight(node: fx.Node, weight: Tensor, x: Tensor) -> Tensor:
    """The weight of a fused call, packed for the sizes of its input `x`."""
    arguments = schema.arguments(node)
    if "padding" not in arguments:
        return ops()._reorder_linear_weight(weight, None)
    geometry = (arguments["padding"], arguments["stride"], arguments["dilation"], arguments["groups"])
    return ops()._reorder_convolution_weight(weight, *geometry, list(x.shape))


def apply_activation(after: Epilogue, x: Tensor) -> Tensor:
    """The activation of a tensor, computed in place if torch has such an op."""
    if after.name == "none":
        return x
    target, args, kwargs = _aten_activation(after.name, after.scalars, after.algorithm)
    over = getattr(aten, f"{base_name(target)}_", None)
    return (target if over is None else over.default)(x, *args, **kwargs)


def run_unfused(values: Mapping[str, Any]) -> Tensor:
    """The result of a fused call with these arguments, computed by ATen ops.

    Raises ValueError if the added tensor has another shape, which oneDNN would not check.
    """
    return _plain(values, lambda target, *args, **kwargs: target(*args, **kwargs), _same_shape)


def _same_shape(output: Tensor, other: Tensor) -> None:
    if output.shape != other.shape:
        raise ValueError(f"expected to add a tensor of shape {tuple(output.shape)}, got {tuple(other.shape)}")


def unfuse(program: Program) -> Program:
    """The program with fused calls replaced by ATen calls on unpacked weights: it runs in every
    dtype on every device, and can be exported."""
    editor = GraphEditor(program)
    for node in editor.calls():
        if is_pack(node):
            editor.replace(node, node.args[0])
        elif is_fused(node):
            call = partial(editor.insert, node, node)
            editor.replace(node, _plain(schema.arguments(node), call, lambda output, other: None))
    return editor.finish()


def _plain(arguments: Mapping[str, Any], call: Callable[..., Any], check: Callable[[Any, Any], None]) -> Any:
    """The result of the ATen calls of a fused one: layer, sum, activation. check: called with the
    layer's output and the value to add."""
    if "padding" in arguments:
        target = CONV_OF_AXES[len(arguments["padding"])]
        geometry = (arguments["stride"], arguments["padding"], arguments["dilation"], arguments["groups"])
        output = call(target, arguments["X"], arguments["W"], arguments["B"], *geometry)
    else:
        output = call(aten.linear.default, arguments["X"], arguments["W"], arguments["B"])
    name, scalars, algorithm = (arguments.get("attr"), arguments.get("scalars"), arguments.get("algorithm"))
    if "other" in arguments:
        check(output, arguments["other"])
        output = call(aten.add.Tensor, output, arguments["other"])
        name, scalars, algorithm = arguments.get("unary_attr"), (), ""
    if name in (None, "none"):
        return output
    target, args, kwargs = _aten_activation(name, scalars or (), algorithm)
    return call(target, output, *args, **kwargs)


def _aten_activation(name: Any, scalars: Any, algorithm: str | None) -> tuple[Any, list[Any], dict[str, Any]]:
    """An activation in ATen: op, arguments after the first, keyword arguments."""
    activation = find_onednn_activation(name, algorithm)
    if activation is None:
        raise ValueError(f"expected an activation that oneDNN has, got {name!r}, {algorithm!r}")
    op = activation.ops[0]
    return op.target, list(scalars), dict(op.where)
