"""Activations: one table of their names, ATen ops, modules, references and names in oneDNN.

An activation is elementwise, with up to two numbers as parameters. Segments, kernels and files
refer to it by name and numbers (`Act`), so names never change. Its lowerings are in
`kernels.llvm.activations` and `kernels.gpu` (Triton).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.errors import BadInput

Act = tuple[str, tuple[float, ...]]  # an activation: its name and its numbers
ActivationLike = str | nn.Module | None
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Equivalent:
    """An ATen op, or a class of torch.nn, that computes an activation.

    numbers: names of the arguments (attributes) that are its numbers, or the numbers themselves.
    where: the values that other arguments must have. onednn: whether oneDNN can fuse calls of the
    op into the layer before them.
    """

    target: Any
    numbers: tuple[str | float, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    onednn: bool = True

    def read(self, value: Callable[[str], Any]) -> tuple[float, ...] | None:
        """The activation's numbers; None for another activation, and for numbers that are missing
        or known only at run time. value: returns the value of an argument, by name."""
        numbers = [value(number) if isinstance(number, str) else number for number in self.numbers]
        is_other = any(value(name) != required for name, required in self.where.items())
        if is_other or not all(isinstance(number, (int, float)) for number in numbers):
            return None
        return tuple(map(float, numbers))


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation.

    reference: computes it in ATen ops from a tensor and the numbers. ops, modules: its equivalents;
    the first is used where demask emits a call or a module. presets: names for users with their
    numbers; an activation without numbers is named by its own name. onednn: its name in oneDNN, ""
    if there is none; algorithm: oneDNN's name of a variant. exponential: whether it computes an
    exponential. nonnegative: whether no result is below zero, as a function of the numbers.
    """

    name: str
    reference: Callable[..., Tensor]
    ops: tuple[Equivalent, ...]
    modules: tuple[Equivalent, ...] = ()
    presets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    onednn: str = ""
    algorithm: str = ""
    exponential: bool = False
    nonnegative: Callable[..., bool] = lambda *numbers: False

    @property
    def count(self) -> int:
        """The number of its parameters."""
        return len(self.ops[0].numbers)


def _plain(name: str, reference: Callable[..., Tensor], module: type[nn.Module], **more: Any) -> Activation:
    """An activation without numbers whose ATen op has its name."""
    ops = (Equivalent(getattr(aten, name).default),)
    return Activation(name, reference, ops, (Equivalent(module),), **{"onednn": name, **more})


def _gelu(name: str, reference: Callable[..., Tensor], approximate: str) -> Activation:
    where = {"approximate": approximate}
    return Activation(
        name,
        reference,
        (Equivalent(aten.gelu.default, (), where),),
        (Equivalent(nn.GELU, (), where),),
        onednn="gelu",
        algorithm=approximate,
        exponential=True,
    )


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        _plain("relu", torch.relu, nn.ReLU, nonnegative=lambda: True),
        _plain("sigmoid", torch.sigmoid, nn.Sigmoid, exponential=True, nonnegative=lambda: True),
        _plain("tanh", torch.tanh, nn.Tanh, exponential=True),
        _plain("hardswish", F.hardswish, nn.Hardswish),
        _plain("hardsigmoid", F.hardsigmoid, nn.Hardsigmoid, nonnegative=lambda: True),
        _plain("silu", F.silu, nn.SiLU, onednn="swish", exponential=True),
        _plain("mish", F.mish, nn.Mish, exponential=True),
        _gelu("gelu", F.gelu, "none"),
        _gelu("gelu_tanh", partial(F.gelu, approximate="tanh"), "tanh"),
        Activation(
            "clamp",
            torch.clamp,
            (
                Equivalent(aten.hardtanh.default, ("min_val", "max_val")),
                Equivalent(aten.clamp.default, ("min", "max")),
                Equivalent(aten.relu6.default, (0.0, 6.0), onednn=False),
            ),
            (Equivalent(nn.Hardtanh, ("min_val", "max_val")), Equivalent(nn.ReLU6, ("min_val", "max_val"))),
            presets={"relu6": (0.0, 6.0)},
            onednn="hardtanh",
            nonnegative=lambda least, largest: least >= 0,
        ),
        Activation(
            "leaky_relu",
            F.leaky_relu,
            (Equivalent(aten.leaky_relu.default, ("negative_slope",)),),
            (Equivalent(nn.LeakyReLU, ("negative_slope",)),),
            presets={"leaky_relu": (0.01,)},
            onednn="leaky_relu",
        ),
        Activation(
            "elu",
            F.elu,
            (Equivalent(aten.elu.default, ("alpha",), {"scale": 1, "input_scale": 1}, onednn=False),),
            (Equivalent(nn.ELU, ("alpha",)),),
            presets={"elu": (1.0,)},
            exponential=True,
        ),
        _plain("selu", F.selu, nn.SELU, exponential=True, onednn=""),
    )
}


def apply_activation(x: Tensor, act: Act | None) -> Tensor:
    """act(x), computed by the reference; x if act is None."""
    return x if act is None else ACTIVATIONS[act[0]].reference(x, *act[1])


def activations_by_op() -> dict[Any, list[tuple[Activation, Equivalent]]]:
    """The activations that calls of an ATen op may compute, with the equivalents, by op."""
    entries: dict[Any, list[tuple[Activation, Equivalent]]] = {}
    for activation in ACTIVATIONS.values():
        for op in activation.ops:
            entries.setdefault(op.target, []).append((activation, op))
    return entries


def find_onednn_activation(name: Any, algorithm: str | None) -> Activation | None:
    """The activation with this name and algorithm in oneDNN; None if there is none."""
    for activation in ACTIVATIONS.values():
        algorithms = ("", algorithm or "none")
        if name and name == activation.onednn and activation.algorithm in algorithms:
            return activation
    return None


def presets() -> dict[str, Act]:
    """The activations by their names for users: "relu6" -> ("clamp", (0.0, 6.0))."""
    entries = ACTIVATIONS.values()
    without_numbers: dict[str, Act] = {entry.name: (entry.name, ()) for entry in entries if not entry.count}
    return without_numbers | {
        name: (entry.name, numbers) for entry in entries for name, numbers in entry.presets.items()
    }


def act_of(activation: ActivationLike) -> Act | None:
    """The activation with a name, or of a module of torch; None for None.

    Raises BadInput for one that is not in the table.

    >>> act_of("relu6"), act_of(nn.LeakyReLU(0.2)), act_of(None)
    (('clamp', (0.0, 6.0)), ('leaky_relu', (0.2,)), None)
    """
    if activation is None:
        return None
    names = presets()
    if isinstance(activation, str) and activation in names:
        return names[activation]
    modules = [(entry.name, module) for entry in ACTIVATIONS.values() for module in entry.modules]
    for name, module in modules:
        if type(activation) is module.target:
            numbers = module.read(partial(getattr, activation))
            if numbers is not None:
                return name, numbers
    expected = [*names, *dict.fromkeys(module.target.__name__ for _, module in modules)]
    raise BadInput(f"expected an activation of {expected}, got {activation!r:.80}")


def activation_module(act: Act) -> nn.Module:
    """A new module of torch that computes an activation."""
    module = ACTIVATIONS[act[0]].modules[0]
    return module.target(**dict(zip(map(str, module.numbers), act[1], strict=True)), **module.where)
