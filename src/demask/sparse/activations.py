"""Activations by the names that users and programs have for them, and as torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from demask.errors import BadInput
from demask.sparse.program import Act

Activation = str | nn.Module | None

NAMED: dict[str, Act] = {
    **{name: (name, ()) for name in (
        "relu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "silu", "gelu", "gelu_tanh")},
    "relu6": ("clamp", (0.0, 6.0)),
    "leaky_relu": ("leaky_relu", (0.01,)),
}  # fmt: skip
MODULES: dict[type[nn.Module], Callable[[Any], Act]] = {
    nn.ReLU: lambda m: ("relu", ()),
    nn.ReLU6: lambda m: ("clamp", (0.0, 6.0)),
    nn.Hardtanh: lambda m: ("clamp", (float(m.min_val), float(m.max_val))),
    nn.LeakyReLU: lambda m: ("leaky_relu", (float(m.negative_slope),)),
    nn.Sigmoid: lambda m: ("sigmoid", ()),
    nn.Tanh: lambda m: ("tanh", ()),
    nn.Hardswish: lambda m: ("hardswish", ()),
    nn.Hardsigmoid: lambda m: ("hardsigmoid", ()),
    nn.SiLU: lambda m: ("silu", ()),
    nn.GELU: lambda m: ("gelu_tanh" if m.approximate == "tanh" else "gelu", ()),
}
MADE: dict[str, Callable[..., nn.Module]] = {
    "relu": nn.ReLU,
    "clamp": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
}


def act_of(activation: Activation) -> Act | None:
    """An activation as programs have it; BadInput for one that is not computed with layers.

    >>> act_of("relu6"), act_of(nn.LeakyReLU(0.2)), act_of(None)
    (('clamp', (0.0, 6.0)), ('leaky_relu', (0.2,)), None)
    """
    if activation is None:
        return None
    if isinstance(activation, str) and activation in NAMED:
        return NAMED[activation]
    if isinstance(activation, nn.Module) and type(activation) in MODULES:
        return MODULES[type(activation)](activation)
    names = [*NAMED, *(kind.__name__ for kind in MODULES)]
    raise BadInput(f"expected an activation of {names}, got {activation!r:.80}")


def module_of(act: Act) -> nn.Module:
    """torch's module that computes it."""
    return MADE[act[0]](*act[1])
