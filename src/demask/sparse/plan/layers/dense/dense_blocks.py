"""Dense blocks of a weight: rows that read the same input channels, with few zeros among them.

A dense layer is one block; a grouped convolution has one per group, a weight with rows or columns
of zeros one without these. Rows of zeros are a block without channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from demask.sparse.plan.layers.pack_weights import Csr

DENSE = 0.9  # share of nonzeros from which a weight is multiplied with its zeros
LEAST_ROWS = 3  # mean rows of the blocks of a weight: with fewer, values are read too often


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """rows, channels: of the output and the input, ascending. weight: [rows, channels, taps]."""

    rows: np.ndarray
    channels: np.ndarray
    weight: np.ndarray


def dense_blocks(matrix: Csr, channels: np.ndarray, count: int, taps: int) -> list[DenseBlock]:
    """The dense blocks of a weight; none if it has too many zeros.

    channels: input channel of each nonzero, of `count`. taps: positions of the kernel.
    """
    reads = np.zeros((matrix.count, count), bool)
    reads[matrix.rows, channels] = True
    is_used, columns = reads.any(1), reads.any(0)
    one = len(matrix) >= DENSE * is_used.sum() * columns.sum() * taps
    kinds = is_used.astype(np.int64) if one else _kinds(reads)
    unique, number = np.unique(kinds, return_inverse=True)
    groups = [np.flatnonzero(kinds == kind) for kind in unique]
    supports = [np.flatnonzero(reads[rows].any(0)) for rows in groups]
    products = sum(len(rows) * len(read) for rows, read in zip(groups, supports, strict=True))
    few = sum(len(read) > 0 for read in supports) * LEAST_ROWS <= max(is_used.sum(), LEAST_ROWS)
    if len(matrix) < DENSE * products * taps or not few:
        return []
    is_only = sum(len(read) > 0 for read in supports) == 1  # rows of zeros have no nonzeros
    row_of, channel_of = np.zeros(matrix.count, np.int64), np.zeros(count, np.int64)
    blocks = []
    for k, (rows, read) in enumerate(zip(groups, supports, strict=True)):
        block = DenseBlock(rows, read, np.zeros((len(rows), len(read), taps), np.float32))
        row_of[rows], channel_of[read] = np.arange(len(rows)), np.arange(len(read))
        own = slice(None) if is_only else number[matrix.rows] == k
        if len(read):
            tap = matrix.columns[own] % taps if taps > 1 else 0
            where = row_of[matrix.rows[own]] * len(read) + channel_of[channels[own]]
            block.weight.reshape(-1)[where * taps + tap] = matrix.values[own]
        blocks.append(block)
    return blocks


def whole_block(matrix: Csr, channels: int, taps: int) -> DenseBlock:
    """The only block of a weight without zeros, with its values row by row."""
    weight = matrix.values.reshape(matrix.count, channels, taps)
    return DenseBlock(np.arange(matrix.count), np.arange(channels), weight)


def _kinds(reads: np.ndarray) -> np.ndarray:
    """A number per row, equal for rows that read the same channels."""
    return np.unique(np.packbits(reads, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
