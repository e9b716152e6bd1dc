"""A sparse weight as the stream that a kernel reads: offsets and values, block by block.

Rows are assigned to threads by their nonzeros. Columns are split into blocks whose inputs about fit
in the L1 cache. Rows that are computed together have similar lengths; zeros pad them to one length.

Rows that read the same input channels, with few zeros among them, are a dense block. A dense layer is
one block; a grouped convolution has one per group, a weight with rows or columns of zeros one without
these. Rows of zeros are a block without channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_steps import Layer, Selection, Span, Step
from demask.exec.tape.tape import NoPlan
from demask.kernels.cpu.tiles import sparse_tile as tile
from demask.kernels.cpu.tiles.sparse_tile import BLOCK, FIRST, LAST, RECORD

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
    kinds = is_used.astype(np.int64) if one else _kinds_of_rows(reads)
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


def full_block(matrix: Csr, channels: int, taps: int) -> DenseBlock:
    """The only block of a weight without zeros, with its values row by row."""
    weight = matrix.values.reshape(matrix.count, channels, taps)
    return DenseBlock(np.arange(matrix.count), np.arange(channels), weight)


def _kinds_of_rows(reads: np.ndarray) -> np.ndarray:
    """A number per row, equal for rows that read the same channels."""
    return np.unique(np.packbits(reads, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


WIDE = 2**16  # offsets from this on have 32 bits


@dataclass(frozen=True, slots=True)
class Csr:
    """A checked weight with the row and column of each nonzero, bias and scale."""

    rows: np.ndarray  # int32
    columns: np.ndarray  # int32
    values: np.ndarray  # float32, int8, or bfloat16 stored as int16
    kind: str  # dtype name of the values
    bias: np.ndarray  # float32 per row
    scale: np.ndarray
    count: int  # number of rows

    def __len__(self) -> int:
        return len(self.columns)

    def per_row(self) -> np.ndarray:
        """Number of nonzeros of each row."""
        return np.bincount(self.rows, minlength=self.count)


def read(step: Layer, weights: Sequence[Tensor], columns: int) -> Csr:
    """The weight of a step.

    Raises BadInput for spans, row starts or columns that are out of range, NoPlan for dtypes that
    the kernels do not support.
    """
    weight = step.weight
    dtypes = (torch.float32, torch.bfloat16) if weight.scale is None else (torch.int8,)
    values = _span_array(weights, weight.values, dtypes)
    if weight.csr is None:
        rows, column_indices, values = _nonzeros_of_dense(step, values, columns)
    else:
        starts, column_indices = (_span_array(weights, span, (torch.int32,)) for span in weight.csr[1:])
        starts, count = starts.astype(np.int64), len(column_indices)
        if starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
            raise BadInput(f"expected row starts from 0 up to {count} in {_dtype_name(step)}")
        if count and (column_indices.min() < 0 or column_indices.max() >= columns):
            raise BadInput(f"expected columns below {columns} in {_dtype_name(step)}")
        rows = np.repeat(np.arange(step.fields.out, dtype=np.int32), np.diff(starts))
        column_indices, values = _sort_columns(rows, column_indices, values)
    bias, scale = (
        np.full(step.fields.out, fill, np.float32) if span is None else _span_array(weights, span, (torch.float32,))
        for span, fill in ((step.bias, 0.0), (weight.scale, 1.0))
    )
    kind = {"int16": "bfloat16"}.get(values.dtype.name, values.dtype.name)
    return Csr(rows, column_indices, values, kind, bias, scale, step.fields.out)


def _sort_columns(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values with ascending columns in each row, the order in which plans add them.

    Plans split columns into blocks, so that they would add others in different orders.
    """
    is_sorted = (np.diff(columns) >= 0) | (np.diff(rows) > 0)
    if is_sorted.all():
        return columns, values
    order = np.lexsort((columns, rows))
    return columns[order], values[order]


def _nonzeros_of_dense(step: Layer, values: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of the nonzeros of a dense weight."""
    if len(values) != step.fields.out * columns:
        shape = f"{step.fields.out} x {columns}"
        raise BadInput(f"expected a matrix {shape} in {_dtype_name(step)}, got {len(values)} values")
    if values.all():
        rows, columns_in_row = np.indices((step.fields.out, columns), np.int32).reshape(2, -1)
        return rows, columns_in_row, values
    nonzero_positions = np.flatnonzero(values)
    rows, columns_in_row = np.divmod(nonzero_positions, columns)
    return rows.astype(np.int32), columns_in_row.astype(np.int32), values[nonzero_positions]


def selected(step: Step[Selection], weights: Sequence[Tensor], channels: int) -> np.ndarray:
    """The channel numbers of a selection from `channels`, int32.

    Raises BadInput for numbers out of range.
    """
    assert step.index is not None  # `check_step` tells
    numbers = _span_array(weights, step.index, (torch.int32,))
    if numbers.min() < (-1 if step.fields.padded else 0) or numbers.max() >= channels:
        raise BadInput(f"expected channel numbers below {channels}, got up to {numbers.max()}")
    return numbers


def _span_array(weights: Sequence[Tensor], span: Span, dtypes: tuple[torch.dtype, ...]) -> np.ndarray:
    """The elements of a span as an array. Raises NoPlan for other dtypes than `dtypes`."""
    number, begin, end = span
    if number >= len(weights) or end > weights[number].numel():
        raise BadInput(f"expected weight tensors that contain {span}, got {len(weights)}")
    tensor = weights[number].detach().flatten()[begin:end]
    if tensor.dtype not in dtypes:
        raise NoPlan(f"a tensor of {tensor.dtype}; kernels support {dtypes}")
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def _dtype_name(step: Layer) -> str:
    return step.name or step.op


@dataclass(frozen=True, slots=True)
class Stream:
    """The data that one thread reads: blocks, records, offsets, values."""

    blocks: np.ndarray
    records: np.ndarray
    offsets: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class LineOffsets:
    """Positions of nonzeros and rows, in lines.

    channels, lines: of each nonzero its input channel and its line within the channel; out, add: of
    each row its line in the output and in the added value; pitch: lines of an input channel.
    """

    channels: np.ndarray
    lines: np.ndarray
    out: np.ndarray
    add: np.ndarray
    pitch: int


def dealt(counts: np.ndarray, threads: int) -> list[np.ndarray]:
    """Consecutive rows for each thread, with about the same number of nonzeros.

    Rows are consecutive because threads that write to neighboring lines slow each other down.
    """
    totals = np.cumsum(counts)
    ends = np.searchsorted(totals, totals[-1] * np.arange(1, threads) / threads)
    return np.split(np.arange(len(counts)), np.minimum(ends + 1, len(counts)))


def packed(weight: Csr, offsets: LineOffsets, rows: np.ndarray, block: int, side: int, line: int) -> Stream:
    """The stream of some rows, in blocks of `block` input channels, `side` rows together.

    line: bytes of a vector.
    """
    number = np.full(weight.count, -1, np.int64)
    number[rows] = np.arange(len(rows))
    nonzeros = np.flatnonzero(number[weight.rows] >= 0)
    row, channel = number[weight.rows[nonzeros]], offsets.channels[nonzeros]
    blocks = int(channel.max()) // block + 1 if len(channel) else 1
    count = len(rows)
    block_number = (channel // block).astype(np.int64)
    cell = block_number * count + row
    order = np.argsort(cell, kind="stable")
    lengths = np.bincount(cell, minlength=blocks * count).reshape(blocks, count)
    first = np.where(lengths.any(0), (lengths > 0).argmax(0), 0)
    last = np.where(lengths.any(0), blocks - 1 - (lengths[::-1] > 0).argmax(0), 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].reshape(blocks, count)
    records, table, source, is_nonzero = [], np.zeros(blocks, BLOCK), [], []
    record_count, written = 0, 0
    for k in range(blocks):
        block_rows = np.flatnonzero((lengths[k] > 0) | (first == k))
        flags = (first[block_rows] == k) * FIRST + (last[block_rows] == k) * LAST
        groups = _group_rows(block_rows, lengths[k][block_rows], flags, side)
        block_records, read, valid, written = _block_records(groups, lengths[k], starts[k], written)
        if written > tile.MOST:
            raise NoPlan(f"a thread has more than {tile.MOST} nonzeros of one layer")
        group_rows = groups.ravel()
        flags = (first[group_rows] == k) * FIRST + (last[group_rows] == k) * LAST
        block_records["end"] = block_records["end"] * 4 + flags
        _set_row_fields(block_records, rows[group_rows], weight, offsets)
        end = record_count + len(block_records)
        table[k] = (k * block * offsets.pitch * line, record_count, end)
        record_count = end
        records.append(block_records)
        source.append(read)
        is_nonzero.append(valid)
    return _stream_arrays(
        weight,
        offsets,
        nonzeros[order][np.concatenate(source)],
        np.concatenate(is_nonzero),
        table,
        np.concatenate([*records, np.zeros(side, RECORD)]),
        block,
    )


def _set_row_fields(records: np.ndarray, rows: np.ndarray, weight: Csr, offsets: LineOffsets) -> None:
    records["out"], records["add"] = offsets.out[rows], offsets.add[rows]
    records["bias"], records["scale"] = weight.bias[rows], weight.scale[rows]


@dataclass(frozen=True, slots=True)
class Slices:
    """Groups of rows with one row per lane.

    ends: end of the vectors of each group, starting with 0; rows: row of each lane (-1: none);
    source: the nonzero of each lane of each vector (-1: none).
    """

    ends: np.ndarray
    rows: np.ndarray
    source: np.ndarray


def sliced(weight: Csr, rows: np.ndarray, lanes: int) -> Slices:
    """Some rows in groups of `lanes`, longest first."""
    lengths = weight.per_row()
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    groups = np.full(-(-len(order) // lanes) * lanes, -1)
    groups[: len(order)] = order
    groups = groups.reshape(-1, lanes)
    group_lengths = np.where(groups >= 0, lengths[groups], 0)
    longest = group_lengths.max(1)
    step = np.arange(int(longest.sum())) - np.repeat(np.cumsum(longest) - longest, longest)
    group = np.repeat(np.arange(len(groups)), longest)
    nonzeros = starts[groups[group]] + step[:, None]
    source = np.where(step[:, None] < group_lengths[group], nonzeros, -1)
    return Slices(np.concatenate([[0], np.cumsum(longest)]).astype(np.int32), groups, source)


def _group_rows(rows: np.ndarray, lengths: np.ndarray, flags: np.ndarray, side: int) -> np.ndarray:
    """Rows computed together [groups, side], with equal flags and similar lengths.

    The last row of an incomplete group repeats: it is computed twice with the same result.
    """
    if side == 1:
        return rows[:, None]
    groups = [np.zeros((0, side), np.int64)]
    for kind in np.unique(flags):
        kind_rows = rows[flags == kind]
        kind_rows = kind_rows[np.argsort(-lengths[flags == kind], kind="stable")]
        missing = -len(kind_rows) % side
        groups.append(np.concatenate([kind_rows, np.repeat(kind_rows[-1:], missing)]).reshape(-1, side))
    return np.concatenate(groups)


def _block_records(
    groups: np.ndarray, lengths: np.ndarray, starts: np.ndarray, written: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Records of a block; of each stream position the nonzero that it reads, and whether it is not padding; the end of
    the stream.

    Padding reads the last nonzero of its row, or of the group's longest one if it has none: other lines may have
    anything, and 0 * inf is NaN.
    """
    side = groups.shape[1]
    longest = lengths[groups].max(1) if len(groups) else np.zeros(0, np.int64)
    ends = written + np.cumsum(longest * side)
    records = np.zeros(groups.size, RECORD)
    records["end"] = np.repeat(np.minimum(ends, tile.MOST), side)
    total = int(longest.sum())
    group = np.repeat(np.arange(len(groups)), longest)
    step = np.arange(total) - np.repeat(np.cumsum(longest) - longest, longest)
    valid = step[:, None] < lengths[groups][group]
    own_lengths = lengths[groups]
    rows = np.where(own_lengths > 0, groups, groups[np.arange(len(groups)), own_lengths.argmax(1)][:, None])[group]
    nonzeros = starts[rows] + np.minimum(step[:, None], lengths[rows] - 1)
    return records, nonzeros.ravel(), valid.ravel(), int(ends[-1]) if len(ends) else written


def _stream_arrays(
    weight: Csr,
    offsets_of_lines: LineOffsets,
    nonzero: np.ndarray,
    is_nonzero: np.ndarray,
    table: np.ndarray,
    records: np.ndarray,
    block: int,
) -> Stream:
    """Offsets and values of these nonzeros; values of padding are zeros."""
    values = np.where(is_nonzero, weight.values[nonzero], weight.values.dtype.type(0))
    channels = (offsets_of_lines.channels[nonzero] % block).astype(np.int64)  # offsets may have 32 bits
    offsets = channels * offsets_of_lines.pitch + offsets_of_lines.lines[nonzero]
    largest = int(offsets.max()) if len(offsets) else 0
    return Stream(table, records, offsets.astype(np.uint16 if largest < WIDE else np.uint32), values)
