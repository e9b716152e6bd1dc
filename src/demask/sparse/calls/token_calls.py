"""Calls of transformers as steps of segments: norms and softmax over channels, products of two
values, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.ops.schema import fake, same_size
from demask.ops.traits import PRODUCTS_OF_VALUES
from demask.sparse.calls.called_op import FACTORS, OVER_CHANNELS, PRODUCT, CalledOp, Match, Numbers, Shape, same_shape
from demask.sparse.segment_steps import CHANNELS_LAST

aten = torch.ops.aten
MATRICES = ("matrices",)


def _softmax(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A softmax over channels of tokens, in the dtype of its operand."""
    rank = fake(node).ndim
    is_last = arguments["dim"] % rank == rank - 1 and arguments["dtype"] is None
    return ((arguments["self"],), (), ()) if is_last else None


def _norm(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A norm over channels of tokens, by constants if by any."""
    x, eps = arguments["input"], arguments["eps"]
    sizes, factors = list(arguments["normalized_shape"]), [arguments["weight"]]
    if "bias" in arguments:
        factors.append(arguments["bias"])
    while factors and factors[-1] is None:
        factors.pop()
    is_plain = len(sizes) == 1 and type(sizes[0]) is int and type(eps) is float
    return ((x,), (sizes[0], eps), tuple(factors)) if is_plain and None not in factors else None


def _norm_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    channels = shapes[0][-1]
    if type(n[0]) is not int or n[0] < 1 or channels != n[0]:
        raise BadInput(f"expected a norm of {channels} channels, got {n}")
    if count % n[0] or count // n[0] > 2 or n[1] < 0:
        raise BadInput(f"expected factors of {channels} channels, got {count}, and {n}")
    return shapes[0]


def _rms_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if count not in (0, n[0]):
        raise BadInput(f"expected a factor for each of {n[0]} channels, got {count}")
    return _norm_shape(shapes, n, count)


def _product(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """A product of matrices; one per item of a batch, the same for both operands."""
    left, right = (arguments[key] for key in ("self", "mat2" if "mat2" in arguments else "other"))
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    shapes = fake(left).shape, fake(right).shape
    is_batched = min(map(len, shapes)) >= 2 and _same(shapes[0][:-2], shapes[1][:-2])
    return ((left, right), (), ()) if is_batched else None


def _product_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    left, right = (tuple(shape) for shape in shapes)
    if left[:-2] != right[:-2] or left[-1] != right[-2]:
        raise BadInput(f"expected matrices that can be multiplied, got {left} and {right}")
    return (*left[:-1], right[-1])


def _attention(arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    """An attention with its usual scale, without dropout and mask, or with a mask that is added to
    the scores of each head (`rewrites/segment.py`)."""
    names = "query", "key", "value", "attn_mask"
    query, key, value, mask = (arguments[name] for name in names)
    if any(arguments[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")):
        return None
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    shapes = [fake(x).shape for x in operands]
    batch = shapes[0][:-2]
    if not batch or not all(_same(shape[:-2], batch) for shape in shapes):
        return None
    if mask is not None and not _same(shapes[3][-2:], (shapes[0][-2], shapes[1][-2])):
        return None
    return operands, (), ()


def _attention_shape(shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    if len(shapes) not in (3, 4):
        raise BadInput(f"expected query, key, value and perhaps a mask, got {shapes}")
    batch, (rows, width) = shapes[0][:-2], shapes[0][-2:]
    columns, last = shapes[1][-2], shapes[2][-1]
    fits = len(shapes[0]) > 2 and all(shape[:-2] == batch for shape in shapes)
    wanted = (rows, width), (columns, width), (columns, last), (rows, columns)
    if not fits or any(s[-2:] != w for s, w in zip(shapes, wanted, strict=False)):
        raise BadInput(f"expected operands of one attention, got {shapes}")
    return (*batch, rows, last)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


#: entries of `segment_calls.CALLED`
TOKEN_CALLS: dict[str, CalledOp] = {
    "softmax": CalledOp(
        aten.softmax.int, lambda xs, n, c: (xs[0], -1), (aten.softmax.int,), _softmax, same_shape,
        OVER_CHANNELS, numbers=0, kinds=CHANNELS_LAST),
    "norm": CalledOp(
        aten.layer_norm.default, lambda xs, n, c: (xs[0], [n[0]], *(*c, None, None)[:2], n[1]),
        (aten.layer_norm.default,), _norm, _norm_shape, OVER_CHANNELS, numbers=2,
        constants=FACTORS, optional=True, kinds=CHANNELS_LAST),
    "rms": CalledOp(
        aten.rms_norm.default, lambda xs, n, c: (xs[0], [n[0]], *(*c, None)[:1], n[1]),
        (aten.rms_norm.default,), _norm, _rms_shape, OVER_CHANNELS, numbers=2,
        constants=FACTORS, optional=True, kinds=CHANNELS_LAST),
    "matmul": CalledOp(
        aten.matmul.default, lambda xs, n, c: (xs[0], xs[1]),
        tuple(PRODUCTS_OF_VALUES), _product, _product_shape, PRODUCT, operands=2,
        numbers=0, kinds=MATRICES),
    "attention": CalledOp(
        aten.scaled_dot_product_attention.default, lambda xs, n, c: tuple(xs),
        (aten.scaled_dot_product_attention.default,), _attention, _attention_shape, PRODUCT,
        operands=None, numbers=0, kinds=MATRICES),
}  # fmt: skip
