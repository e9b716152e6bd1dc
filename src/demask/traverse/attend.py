"""Attention whose keys and values lie on disk: read block by block for each band of queries.

    attention(q, k, v) == online softmax over blocks of rows of k and v        (`reductions`)

In memory they are read whole, and torch's own kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, fx

from demask.ops import schema
from demask.traverse.axes import Axes, Window, cut_shape, empty, length
from demask.traverse.reductions import attention

SCORES = 2**22  # bytes of the scores of one block
aten = torch.ops.aten


class Rows(Protocol):
    """Where rows are read from."""

    def read(self, window: Window, into: Tensor) -> None: ...


def streams_keys(node: fx.Node) -> bool:
    """Can a call take its keys and values in blocks?"""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    found = schema.arguments(node)
    plain = found["attn_mask"] is None and not found["is_causal"] and not found["dropout_p"]
    return plain and not found["enable_gqa"]


def keys_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The keys and the values of a call."""
    found = schema.arguments(node)
    return found["key"], found["value"]


def attend(
    node: fx.Node, q: Tensor, sources: Mapping[fx.Node, Rows], axes: Mapping[fx.Node, Axes]
) -> Tensor:
    """The call for some queries."""
    keys, values = (
        _blocks(n, sources[n], axes[n], _block_rows(node, tuple(q.shape))) for n in keys_of(node)
    )
    return attention(q, keys, values, scale=schema.arguments(node)["scale"])


def temporary(node: fx.Node, queries: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `attend` allocates: two blocks and their copies, scores, weights, and sums."""
    rows, wide = _block_rows(node, queries), max(dtype.itemsize, 4)
    blocks = sum(math.prod(n.meta["val"].shape[:-2]) * rows * n.meta["val"].shape[-1]
                 for n in keys_of(node))  # fmt: skip
    scores = math.prod(queries[:-1]) * rows
    width = max(n.meta["val"].shape[-1] for n in keys_of(node))
    return wide * (2 * blocks + 2 * scores + 4 * math.prod(queries[:-1]) * (width + 2))


def _block_rows(node: fx.Node, queries: tuple[int, ...]) -> int:
    """Keys of one block."""
    return max(64, SCORES // (4 * max(math.prod(queries[:-1]), 1)))


def _blocks(node: fx.Node, source: Rows, axes: Axes, rows: int) -> Iterator[Tensor]:
    value, columns = node.meta["val"], (0, length(node, axes, 1))
    count = length(node, axes, 0)
    for start in range(0, count, rows):
        window = (start, min(start + rows, count)), columns
        block = empty(cut_shape(value.shape, axes, window), axes, value.dtype)
        source.read(window, block)
        yield block
