"""What oneDNN computes as it stores: the activation, or the sum, behind a convolution or a linear
layer, as torch names it. And the inverse: every such call as the ATen calls it stands for.

The ops are torch's own (its compiler emits them); they take float32 and bfloat16 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.program import Program
from demask.ops import schema
from demask.tune.draft import Draft

aten = torch.ops.aten
CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_LINEAR = aten.linear.default


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An activation as oneDNN is asked for it."""

    name: str = "none"
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


# ATen op, what oneDNN calls it, which of its arguments are the scalars.
_ACTIVATIONS = (
    (aten.relu.default, "relu", ()),
    (aten.sigmoid.default, "sigmoid", ()),
    (aten.tanh.default, "tanh", ()),
    (aten.hardswish.default, "hardswish", ()),
    (aten.hardsigmoid.default, "hardsigmoid", ()),
    (aten.silu.default, "swish", ()),
    (aten.leaky_relu.default, "leaky_relu", ("negative_slope",)),
    (aten.hardtanh.default, "hardtanh", ("min_val", "max_val")),
    (aten.clamp.default, "hardtanh", ("min", "max")),
    (aten.gelu.default, "gelu", ()),
)


def ops() -> Any:
    """torch's namespace of these ops."""
    return torch.ops.mkldnn


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Does this torch have these ops for such tensors?"""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    known = all(hasattr(ops(), name) for name in ("_convolution_pointwise", "_linear_pointwise",
                                                  "_reorder_convolution_weight"))  # fmt: skip
    return known and (dtype is torch.float32 or (dtype is torch.bfloat16 and _has_bf16()))


def _has_bf16() -> bool:
    return bool(ops()._is_mkldnn_bf16_supported())


def epilogue(node: fx.Node) -> Epilogue | None:
    """The activation that a call is, None if it is none of them."""
    for target, name, scalars in _ACTIVATIONS:
        if node.target is target:
            found = schema.arguments(node)
            values = [found[key] for key in scalars]
            if any(type(v) not in (int, float) for v in values):
                return None
            algorithm = found["approximate"] if name == "gelu" else ""
            return Epilogue(name, tuple(map(float, values)), algorithm)
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


def plain_call(after: Epilogue, x: Tensor) -> Tensor:
    """An activation of a tensor, over it where torch can."""
    if after.name == "none":
        return x
    target = next(target for target, known, _ in _ACTIVATIONS if known == after.name)
    over = getattr(aten, f"{target._opname}_", None)
    function = target if over is None else over.default
    return function(x, *after.scalars, **({"approximate": after.algorithm} if
                                          after.name == "gelu" else {}))  # fmt: skip


def plain(program: Program) -> Program:
    """The program with every fused call as the ATen calls it stands for, weights as they are: it
    runs in any dtype on any device, and exports."""
    draft = Draft(program)
    names = {
        ops()._convolution_pointwise.default: _plain_convolution,
        ops()._convolution_pointwise.binary: _plain_convolution,
        ops()._linear_pointwise.default: _plain_linear,
        ops()._linear_pointwise.binary: _plain_linear,
    }
    for node in draft.calls():
        if node.target in (ops()._reorder_convolution_weight.default,
                           ops()._reorder_linear_weight.default):  # fmt: skip
            draft.put(node, node.args[0])  # type: ignore[arg-type]
        elif node.target in names:
            draft.put(node, names[node.target](draft, node))
    return draft.done()


def _plain_convolution(draft: Draft, node: fx.Node) -> fx.Node:
    found = schema.arguments(node)
    target = CONVOLUTIONS[len(found["padding"])]
    geometry = (found["stride"], found["padding"], found["dilation"], found["groups"])
    made = draft.call(node, node, target, found["X"], found["W"], found["B"], *geometry)
    if "other" not in found:
        return _plain_activation(
            draft, node, made, found["attr"], found["scalars"], found["algorithm"]
        )
    made = draft.call(node, node, aten.add.Tensor, made, found["other"])
    return _plain_activation(draft, node, made, found["unary_attr"] or "none", (), "")


def _plain_linear(draft: Draft, node: fx.Node) -> fx.Node:
    found = schema.arguments(node)
    made = draft.call(node, node, _LINEAR, found["X"], found["W"], found["B"])
    if "other" not in found:
        return _plain_activation(
            draft, node, made, found["attr"], found["scalars"], found["algorithm"]
        )
    return draft.call(node, node, aten.add.Tensor, made, found["other"])


def _plain_activation(
    draft: Draft, node: fx.Node, x: fx.Node, name: str, scalars: Any, algorithm: str
) -> fx.Node:
    if name == "none":
        return x
    target = next(target for target, known, _ in _ACTIVATIONS if known == name)
    if name == "gelu":
        return draft.call(node, node, target, x, approximate=algorithm or "none")
    return draft.call(node, node, target, x, *scalars)
