"""Attention whose keys and values are stored on disk: read in blocks for each band of queries.

    attention(q, k, v) == online softmax over blocks of rows of k and v   (`partial_reductions`)

Keys and values in memory are read in full, by torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx

from demask.ops import schema
from demask.ops.regions import Interval
from demask.ops.schema import fake
from demask.traverse.analysis.partial_reductions import attention
from demask.traverse.axes import Axes, cut_shape, empty, length
from demask.traverse.storage.sources_and_sinks import RowSource

SCORES = 2**22  # bytes of the scores of one block
aten = torch.ops.aten


def can_stream_keys(node: fx.Node) -> bool:
    """Whether a call can read its keys and values in blocks."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    bound = schema.arguments(node)
    has_no_mask = bound["attn_mask"] is None and not bound["is_causal"] and not bound["dropout_p"]
    return has_no_mask and not bound["enable_gqa"]


def keys_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The keys and the values of a call."""
    bound = schema.arguments(node)
    return bound["key"], bound["value"]


def attend(
    node: fx.Node, q: Tensor, sources: Mapping[fx.Node, RowSource], axes: Mapping[fx.Node, Axes], columns: Interval
) -> Tensor:
    """The call's result for queries `q`. columns: interval of the values' and the result's."""
    rows, (keys, values) = _block_rows(node, tuple(q.shape)), keys_of(node)
    all_columns = 0, length(keys, axes[keys], 1)
    return attention(
        q,
        _blocks(keys, sources[keys], axes[keys], rows, all_columns),
        _blocks(values, sources[values], axes[values], rows, columns),
        scale=schema.arguments(node)["scale"],
    )


def scratch_bytes(node: fx.Node, queries: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `attend` allocates: two blocks and their copies, scores, weights, and sums."""
    rows, itemsize = _block_rows(node, queries), max(dtype.itemsize, 4)
    blocks = sum(math.prod(fake(n).shape[:-2]) * rows * fake(n).shape[-1] for n in keys_of(node))
    scores = math.prod(queries[:-1]) * rows
    width = max(fake(n).shape[-1] for n in keys_of(node))
    return itemsize * (2 * blocks + 2 * scores + 4 * math.prod(queries[:-1]) * (width + 2))


def _block_rows(node: fx.Node, queries: tuple[int, ...]) -> int:
    """The number of keys in a block."""
    return max(64, SCORES // (4 * max(math.prod(queries[:-1]), 1)))


def _blocks(node: fx.Node, source: RowSource, axes: Axes, rows: int, columns: Interval) -> Iterator[Tensor]:
    value, count = fake(node), length(node, axes, 0)
    for start in range(0, count, rows):
        window = (start, min(start + rows, count)), columns
        block = empty(cut_shape(value.shape, axes, window), axes, value.dtype)
        source.read(window, block)
        yield block
