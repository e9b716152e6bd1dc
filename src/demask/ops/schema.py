"""Calls read by the schemas of their ops: arguments by name, tensor operands in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.compat.dispatch import OpOverload, is_mutable, schema_of

Size = int | None  # None: dynamic


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an op's schema. tensors: whether it takes a tensor or a list of tensors.
    length: of a list of numbers for which a call may pass one number, or None."""

    name: str
    kwarg_only: bool
    tensors: bool
    has_default: bool
    default: Any
    length: int | None = None


@functools.cache
def signature(target: Any) -> tuple[Argument, ...]:
    """The arguments of an op; cached, since torch creates its objects at every access."""
    return tuple(
        Argument(a.name, a.kwarg_only, "Tensor" in str(a.type), a.has_default_value(), a.default_value, a.N)
        for a in schema_of(target).arguments
    )


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor operand of a call. name: of its argument; index: in the argument if that is a
    list, else None; value: a node, or a number in the place of a tensor."""

    name: str
    index: int | None
    value: Any


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call by its name in the schema, defaults included."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(signature(node.target)):
        if position < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        else:
            default = argument.default
            values[argument.name] = list(default) if isinstance(default, list) else default
    return values


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call draws random numbers; dropout draws none in eval mode."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    values = arguments(node)
    off = (values.get("train", True), values.get("training", True), values.get("dropout_p", 1.0))
    return all(value is None or bool(value) for value in off)


def has_effect(node: fx.Node) -> bool:
    """Whether a call does more than to return a value: it writes to an operand, or advances the
    generator of random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and (is_mutable(target) or draws_random_numbers(node))


def bind_arguments(target: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call of an op, from its arguments by name; trailing
    arguments with default values are left out."""
    args, kwargs = [], {}
    for argument in signature(target):
        value = values[argument.name]
        if not argument.kwarg_only:
            args.append((value, argument.has_default and value == argument.default))
        elif not (argument.has_default and value == argument.default):
            kwargs[argument.name] = value
    while args and args[-1][1]:
        args.pop()
    return tuple(value for value, _ in args), kwargs


def call_with(node: fx.Node, values: Mapping[str, Any]) -> Any:
    """The result of the op of a call, on other arguments, by name."""
    target: Any = node.target
    args, kwargs = bind_arguments(target, values)
    return target(*args, **kwargs)


def call_on(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """The result of the op of a call, on the values of its operands."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return target(*args, **kwargs)


def source_of(node: fx.Node) -> fx.Node:
    """The first argument of a call whose first argument is a value of the graph."""
    source = node.args[0]
    assert isinstance(source, fx.Node), node
    return source


def output_of(read: fx.Node) -> int:
    """Which output of a call with several a `getitem` reads."""
    index: Any = read.args[1]
    return index


def operands(node: fx.Node, skip: tuple[str, ...] = ()) -> tuple[Operand, ...]:
    """The tensor operands of a call in the order of the schema, without optional ones that are
    None and without the arguments named in `skip`."""
    values = arguments(node)
    tensors: list[Operand] = []
    for argument in signature(node.target):
        value = values[argument.name]
        if value is None or not argument.tensors or argument.name in skip:
            continue
        if isinstance(value, (list, tuple)):
            tensors += [Operand(argument.name, k, v) for k, v in enumerate(value) if v is not None]
        else:
            tensors.append(Operand(argument.name, None, value))
    return tuple(tensors)


def replace_operands(arguments_by_name: Mapping[str, Any], which: tuple[Operand, ...], values: Any) -> dict[str, Any]:
    """Arguments by name, with `values` in the place of the operands `which`."""
    updated = dict(arguments_by_name)
    for operand, value in zip(which, values, strict=True):
        if operand.index is None:
            updated[operand.name] = value
        else:
            items = list(updated[operand.name])
            items[operand.index] = value
            updated[operand.name] = items
    return updated


def sizes(value: Any) -> tuple[Size, ...]:
    """The shape of a tensor, fake or real, with None for dynamic sizes; () for a number."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def fake(node: Any) -> Tensor:
    """The fake tensor of a node: its shape, dtype, strides and device, without data."""
    return node.meta["val"]


def outputs(node: fx.Node) -> tuple[Any, ...]:
    """The fake values of a node's outputs."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def is_constant(value: object) -> bool:
    """Whether an operand is constant: a number, a parameter or a buffer."""
    return not isinstance(value, fx.Node) or value.op == "get_attr"


def is_dynamic(value: Any) -> bool:
    """Whether an argument contains a size known only at run time (a node that is no tensor)."""
    if isinstance(value, fx.Node):
        return not isinstance(value.meta.get("val"), torch.Tensor)
    if isinstance(value, (list, tuple)):
        return any(is_dynamic(item) for item in value)
    return False


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same expression; adds no guards."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.node.expr == b.node.expr


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dynamic sizes included; adds no guards."""
    return a.ndim == b.ndim and all(map(same_size, a.shape, b.shape))


def example_size(size: Any) -> int:
    """The value of a size in the example; 1 if it depends on values (the output of `nonzero`)."""
    value = size if isinstance(size, int) else size.node.hint
    return 1 if value is None else int(value)


def concrete(value: Any) -> Any:
    """An argument with the example's values in the place of sizes known only at run time."""
    if isinstance(value, fx.Node):
        return example_size(value.meta["val"])
    if isinstance(value, (list, tuple)):
        return [concrete(item) for item in value]
    return value
