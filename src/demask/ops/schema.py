"""A call read through its op's schema: arguments by name, tensor operands in order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import schema_of

Size = int | None  # None: dynamic


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an op's schema. tensors: whether it takes tensors, one or a list. length: of
    a list of numbers that may be given as one number, for all of it."""

    name: str
    kwarg_only: bool
    tensors: bool
    has_default: bool
    default: Any
    length: int | None = None


@functools.cache
def signature(target: Any) -> tuple[Argument, ...]:
    """The arguments of an op; torch makes its own objects anew at every look."""
    return tuple(
        Argument(a.name, a.kwarg_only, "Tensor" in str(a.type), a.has_default_value(),
                 a.default_value, a.N)
        for a in schema_of(target).arguments
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor a call reads: its argument's name, its index where the argument is a list, and
    what stands there: a node, or a plain number in the place of a tensor."""

    name: str
    index: int | None
    value: Any


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call by its schema name, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(signature(node.target)):
        if position < len(node.args) and not argument.kwarg_only:
            found[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            default = argument.default
            found[argument.name] = list(default) if isinstance(default, list) else default
    return found


def call(target: Any, found: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that spell `found` for an op, trailing defaults left out."""
    args, kwargs = [], {}
    for argument in signature(target):
        value = found[argument.name]
        if not argument.kwarg_only:
            args.append((value, argument.has_default and value == argument.default))
        elif not (argument.has_default and value == argument.default):
            kwargs[argument.name] = value
    while args and args[-1][1]:
        args.pop()
    return tuple(value for value, _ in args), kwargs


def operands(node: fx.Node, skip: tuple[str, ...] = ()) -> tuple[Operand, ...]:
    """The tensors a call reads, in schema order; missing optional tensors, and arguments named in
    `skip`, are left out."""
    found = arguments(node)
    result: list[Operand] = []
    for argument in signature(node.target):
        value = found[argument.name]
        if value is None or not argument.tensors or argument.name in skip:
            continue
        if isinstance(value, (list, tuple)):
            result += [Operand(argument.name, k, v) for k, v in enumerate(value) if v is not None]
        else:
            result.append(Operand(argument.name, None, value))
    return tuple(result)


def replaced(found: Mapping[str, Any], which: tuple[Operand, ...], values: Any) -> dict[str, Any]:
    """`found` with `values` standing where the operands `which` stood."""
    result = dict(found)
    for operand, value in zip(which, values, strict=True):
        if operand.index is None:
            result[operand.name] = value
        else:
            items = list(result[operand.name])
            items[operand.index] = value
            result[operand.name] = items
    return result


def sizes(value: Any) -> tuple[Size, ...]:
    """The sizes of a tensor, fake or real; None for dynamic ones. A number has none."""
    if not isinstance(value, torch.Tensor):
        return ()
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def outputs(node: fx.Node) -> tuple[Any, ...]:
    """The fake values a node makes, one per output."""
    value = node.meta.get("val")
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def is_constant(value: object) -> bool:
    """Whether an operand is the same in every call: a number, or a tensor of the network."""
    return not isinstance(value, fx.Node) or value.op == "get_attr"


def is_dynamic(value: Any) -> bool:
    """Does an argument hold a size known only at run time (a node that is not a tensor)?"""
    if isinstance(value, fx.Node):
        return not isinstance(value.meta.get("val"), torch.Tensor)
    if isinstance(value, (list, tuple)):
        return any(is_dynamic(item) for item in value)
    return False


def same_size(a: Any, b: Any) -> bool:
    """Are two sizes the same number or the same expression, without guarding on dynamic ones?"""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return a.node.expr == b.node.expr


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, dynamic sizes included, without guarding on them."""
    return a.ndim == b.ndim and all(map(same_size, a.shape, b.shape))


def hint(size: Any) -> int:
    """The example's value of a size; 1 where that depends on values (what `nonzero` finds)."""
    found = size if isinstance(size, int) else size.node.hint
    return 1 if found is None else int(found)


def concrete(value: Any) -> Any:
    """An argument with every run-time size replaced by the example's."""
    if isinstance(value, fx.Node):
        return hint(value.meta["val"])
    if isinstance(value, (list, tuple)):
        return [concrete(item) for item in value]
    return value
