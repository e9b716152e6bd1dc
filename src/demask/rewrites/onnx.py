"""Calls that torch's exporter has no ONNX function for, as calls that it has one for.

Most of them take numbers computed from dynamic sizes, where the exporter supports only constants.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.graph.value import Value
from demask.ops.schema import same_size
from demask.ops.traits import OF_TWO_TENSORS
from demask.rewrites.normalize import join
from demask.rewrites.rule import Phase, case, rule

aten = torch.ops.aten
ROWS = {0: (0,)}  # the number of rows is known only at run time


def _is_size(value: Any) -> bool:
    """Whether a number is computed from sizes that are known only at run time."""
    return isinstance(value, Value) and not value.is_tensor


@rule(
    torch.sym_sqrt,
    getattr(torch, "_sym_sqrt", torch.sym_sqrt),
    cases=(case(lambda x: x / torch.sym_sqrt(x.shape[0]), (5, 6), dynamic=ROWS),),
)
def root_of_a_size(out: Value, size: Value) -> Value:
    """sqrt(n) == n ** 0.5"""
    return size.call(operator.pow, size, 0.5)


@rule(operator.lshift, cases=(case(lambda x: x * (x.shape[0] << 1), (5, 6), dynamic=ROWS),))
def size_shifted_left(out: Value, size: Any, bits: Any) -> Value:
    """n << k == n * 2 ** k"""
    return out.call(operator.mul, size, out.call(operator.pow, 2, bits))


@rule(operator.rshift, cases=(case(lambda x: x * (x.shape[0] >> 1), (5, 6), dynamic=ROWS),))
def size_shifted_right(out: Value, size: Any, bits: Any) -> Value:
    """n >> k == n // 2 ** k"""
    return out.call(operator.floordiv, size, out.call(operator.pow, 2, bits))


@rule(
    *OF_TWO_TENSORS,
    cases=(
        case(lambda x: x.abs() ** x.shape[0], (5, 6), dynamic=ROWS),
        case(lambda x: x[0, 0] + torch.bitwise_and(torch.arange(6), x.shape[0]), (5, 6), dynamic=ROWS),
    ),
    refused=(case(lambda x: x**3, (5, 6), dynamic=ROWS),),
    exact=False,
)
def number_from_sizes(out: Value, x: Value, number: Any) -> Value | None:
    """A number computed from dynamic sizes is an operand."""
    if not _is_size(number):
        return None
    return out.call(OF_TWO_TENSORS[out.target], x, out.call(aten.scalar_tensor.default, number, dtype=out.dtype))


@rule(
    aten.roll.default,
    cases=(
        case(lambda x: x.roll(x.shape[0] // 2 + 1, 0), (5, 6), dynamic=ROWS),
        case(lambda x: x.roll((x.shape[0] // 2, -1), (0, 1)), (5, 6), dynamic=ROWS),
        case(lambda x: x.roll(x.shape[0]), (5, 6), dynamic=ROWS),
    ),
    refused=(case(lambda x: x.roll(2, 0), (5, 6), dynamic=ROWS),),
)
def roll_by_a_size(out: Value, x: Value, shifts: list[Any], dims: list[int]) -> Value | None:
    """roll(x, s) == cat([x[n - s % n:], x[:n - s % n]])"""
    if not any(map(_is_size, shifts)):
        return None
    result = x if dims else x.reshape([-1])
    for shift, dim in zip(shifts, dims or [0], strict=True):
        length = out.call(aten.sym_size.int, result, dim)
        start = length - out.call(operator.mod, shift, length)
        result = join([result.slice(dim, start, length), result.slice(dim, 0, start)], dim)
    return result if dims else result.reshape([out.call(aten.sym_size.int, x, k) for k in range(out.rank)])


def _attention(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, 2 * key, mask)


@rule(
    aten.scaled_dot_product_attention.default,
    cases=(case(_attention, (4, 6), (5, 6)), case(_attention, (3, 4, 6), (3, 5, 6), (4, 5))),
    refused=(case(_attention, (2, 3, 4, 6), (2, 3, 5, 6)), case(_attention, (2, 2, 3, 4, 6), (2, 2, 3, 5, 6))),
    exact=False,
)
def attention_over_fewer_axes(out: Value, query: Value, key: Value, value: Value, *options: Any) -> Value | None:
    """Attention of fewer than four axes gets axes of size one before them."""
    if out.rank > 3:
        return None
    operands = {"query": query, "key": key, "value": value}
    for _ in range(4 - out.rank):
        operands = {name: operand.unsqueeze(0) for name, operand in operands.items()}
    result = out.like(**operands)
    for _ in range(4 - out.rank):
        result = result.squeeze(0)
    return result


@rule(
    aten.scaled_dot_product_attention.default,
    cases=(
        case(_attention, (2, 2, 3, 4, 6), (2, 2, 3, 5, 6)),
        case(_attention, (2, 2, 3, 4, 6), (2, 2, 3, 5, 6), (2, 1, 3, 4, 5)),
        case(_attention, (2, 2, 3, 4, 6), (2, 2, 3, 5, 6), (4, 5), dynamic={0: (0,), 1: (0,)}),
    ),
    refused=(case(_attention, (2, 3, 4, 6), (2, 3, 5, 6)), case(_attention, (2, 2, 3, 4, 6), (2, 1, 3, 5, 6))),
    exact=False,
)
def attention_over_more_axes(
    out: Value, query: Value, key: Value, value: Value, mask: Value | None, *options: Any
) -> Value | None:
    """Attention of more than four axes runs on the leading ones merged into one."""
    if out.rank < 5 or not all(_same_batch(query, other) for other in (key, value)):
        return None
    last = query.rank - 4
    operands = {name: x.flatten(0, last) for name, x in (("query", query), ("key", key), ("value", value))}
    if mask is not None and mask.rank > 3:
        batch, mask_sizes = query.sizes[:-2], mask.sizes[-2:]
        mask = mask.expand([*batch, *mask_sizes]).flatten(0, last)
    result = out.like(**operands, attn_mask=mask, dropout_p=0.0)
    batch, size = query.sizes[:-1], value.sizes[-1]
    return result.reshape([*batch, size])


def _same_batch(a: Value, b: Value) -> bool:
    """Whether operands of attention have equal batch and head sizes."""
    return a.rank == b.rank and all(map(same_size, a.shape[:-2], b.shape[:-2]))


ONNX = Phase(
    "what ONNX has functions for",
    (
        root_of_a_size,
        size_shifted_left,
        size_shifted_right,
        number_from_sizes,
        roll_by_a_size,
        attention_over_fewer_axes,
        attention_over_more_axes,
    ),
)
