"""Calls as segments hold them: attention with its usual scale and an added mask, slices, sums."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from demask.graph.value import Value
from demask.ops import schema
from demask.ops.schema import same_size
from demask.ops.traits import RESHAPES
from demask.rewrites.normalize import add_at_constant
from demask.rewrites.rule import Phase, case, rule

aten = torch.ops.aten
SAME = 1e-6  # relative difference of scales, below which they are the same in float32
HEADS = (2, 3, 4, 6)  # batch, heads, tokens, size of a head


def _attention(**options: Any) -> Any:
    return lambda x: F.scaled_dot_product_attention(x, 2 * x, 3 * x, **options)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, 2 * x, 3 * x, mask > 0.5)


@rule(
    aten.scaled_dot_product_attention.default,
    cases=(
        case(_attention(scale=0.5), HEADS),
        case(_attention(is_causal=True), HEADS),
        case(_attention(scale=6**-0.5), HEADS),
        case(_attention(attn_mask=torch.ones(4, 4, dtype=torch.bool)), HEADS),
        case(_attention(attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()), HEADS),
        case(_masked, HEADS, (4, 4)),
        case(lambda x, m: F.scaled_dot_product_attention(x, 2 * x, 3 * x, m), HEADS, (4, 4), dynamic={0: (0,)}),
    ),
    refused=(
        case(_attention(), HEADS),
        case(_attention(scale=0.5, dropout_p=0.5), HEADS),
        case(lambda x, m: F.scaled_dot_product_attention(x, 2 * x, 3 * x, m), HEADS, (2, 3, 4, 4)),
        case(lambda x, y: F.scaled_dot_product_attention(x, y, y, enable_gqa=True, scale=0.5), HEADS, (2, 1, 4, 6)),
        case(_attention(is_causal=True), HEADS, dynamic={0: (2,)}),
        case(_attention(scale=0.5), HEADS, dynamic={0: (3,)}),
    ),
    exact=False,
)
def attention_of_segments(
    out: Value,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout: float,
    causal: bool,
    scale: Any,
    grouped: bool,
) -> Value | None:
    """Attention has its usual scale, and a mask that is added to the scores of each head, or none."""
    width, rows, columns = query.shape[-1], query.shape[-2], key.shape[-2]
    if dropout or grouped:
        return None
    if scale is not None and (type(width) is not int or type(scale) is not float):
        return None
    if causal and not (type(rows) is type(columns) is int):
        return None
    if scale is None and not causal and (mask is None or _is_added(mask, query, key)):
        return None
    if scale is not None and abs(scale * math.sqrt(width) - 1) > SAME:
        query = query * (scale * math.sqrt(width))
    if causal:
        mask = out.read(f"{out.name}_mask", torch.full((rows, columns), -math.inf, dtype=query.dtype).triu(1))
    elif mask is not None and mask.dtype is torch.bool:
        known = _elements(mask)
        numbers = () if known is not None and bool(known.all()) else (("seen", 0.0), ("masked", -math.inf))
        read = [out.read(f"{out.name}_{name}", torch.tensor(n, dtype=query.dtype)) for name, n in numbers]
        mask = mask.call(aten.where.self, mask, *read) if read else None
    if mask is not None:
        mask = mask.expand([*query.sizes[:-1], key.sizes[-2]])
    return out.call(out.target, query, key, value, mask)


def _is_added(mask: Value, query: Value, key: Value) -> bool:
    """Whether a mask is of floats, with the shape of the scores."""
    shape = (*query.shape[:-1], key.shape[-2])
    return mask.dtype is not torch.bool and mask.rank == len(shape) and all(map(same_size, mask.shape, shape))


def _elements(mask: Value) -> Tensor | None:
    """A tensor with the elements of a constant value, perhaps repeated; None for another value."""
    node: Any = mask.node
    while node.target is aten.expand.default or node.target in RESHAPES:
        node = node.args[0]
    known: dict[fx.Node, Any] = {}

    def value(of: Any) -> Any:
        if of not in known:
            if of.op == "call_function":
                known[of] = schema.call_on(of, value)
            elif (constant := mask.editor.tensor(of)) is not None:
                known[of] = constant
            else:
                raise LookupError(of.name)
        return known[of]

    try:
        result = value(node)
    except LookupError:
        return None
    return result if isinstance(result, Tensor) else None


@rule(
    aten.prelu.default,
    cases=(
        case(lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)), (2, 3, 4)),
        case(lambda x: F.prelu(x, torch.tensor([0.25, 0.25, 0.25], dtype=x.dtype)), (2, 3, 4)),
    ),
    refused=(
        case(lambda x: F.prelu(x, torch.tensor([0.25, 0.5, 0.25], dtype=x.dtype)), (2, 3, 4)),
        case(lambda x, weight: F.prelu(x, weight), (2, 3, 4), (3,)),
    ),
)
def prelu_of_one_weight(out: Value, x: Value, weight: Value) -> Value | None:
    """A PReLU whose weights are the same for all channels is a leaky ReLU."""
    known = _elements(weight)
    if known is None or len(set(known.flatten().tolist())) != 1:
        return None
    return x.call(aten.leaky_relu.default, x, float(known.flatten()[0]))


@rule(
    aten.split_with_sizes.default,
    aten.split.Tensor,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    cases=(
        case(lambda x: x.split([1, 3], 1), (2, 4, 6)),
        case(lambda x: x.split(2, -1)[1], (2, 4, 6), dynamic={0: (0,)}),
        case(lambda x: x.chunk(2, 2), (2, 4, 6)),
        case(lambda x: x.tensor_split(4, -1)[1:3], (2, 4, 6)),
        case(lambda x: x.tensor_split([1, 3], 2), (2, 4, 6)),
    ),
    refused=(case(lambda x: x.split([1, x.shape[0] - 1]), (4, 6), dynamic={0: (0,)}),),
)
def split_as_slices(out: Value, x: Value, *arguments: Any) -> tuple[Value | None, ...] | None:
    """The outputs of a split are slices."""
    dim = out.arg("dim")
    sizes = [part.shape[dim] for part in out.fake]
    if not all(type(size) is int for size in sizes):
        return None
    starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return tuple(x.slice(dim, starts[k], starts[k + 1]) if k in out.outputs_read else None for k in range(len(sizes)))


@rule(
    aten.dropout.default,
    cases=(case(nn.Sequential(nn.Dropout(0.5), nn.ReLU()), (2, 4)),),
    refused=(case(lambda x: F.dropout(x, 0.5, training=True), (2, 4)),),
)
def dropout_in_eval_mode(out: Value, x: Value, p: float, train: bool) -> Value | None:
    """Dropout that draws nothing is its operand (it is often between a layer and a residual sum)."""
    return None if schema.draws_random_numbers(out.node) else x


SEGMENT = Phase(
    "calls of segments",
    (attention_of_segments, prelu_of_one_weight, split_as_slices, add_at_constant, dropout_in_eval_mode),
)
