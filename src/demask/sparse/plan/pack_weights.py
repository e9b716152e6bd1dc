"""A sparse weight as the stream that a kernel reads: offsets and values, block by block.

Rows are dealt to threads by their nonzeros, columns are cut into blocks whose inputs about fit into
the first cache, and rows that go side by side are of about one length, filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu import sparse_tile as tile
from demask.kernels.cpu.sparse_tile import BLOCK, FIRST, LAST, RECORD
from demask.sparse.plan.tape import NoPlan
from demask.sparse.segment_program import NAMES, ConvStep, LinearStep, Span

WIDE = 2**16  # offsets from here on have 32 bits


@dataclass(frozen=True, slots=True)
class Csr:
    """A checked weight: per nonzero its row and column; what kernels multiply with."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray  # float32; int16 that hold a bfloat16; int8
    kind: str  # of the values: the name of a dtype
    bias: np.ndarray  # float32 per row
    scale: np.ndarray
    count: int  # of rows

    def __len__(self) -> int:
        return len(self.columns)

    def per_row(self) -> np.ndarray:
        return np.bincount(self.rows, minlength=self.count)


def read(step: ConvStep | LinearStep, weights: Sequence[Tensor], columns: int) -> Csr:
    """The weight of a step; BadInput where its spans, row starts or columns are out of range,
    NoPlan for dtypes that kernels do not take."""
    weight = step.weight
    starts = _span(weights, weight.crow, (torch.int32,)).astype(np.int64)
    found = _span(weights, weight.col, (torch.int32,)).astype(np.int64)
    kinds = (torch.float32, torch.bfloat16) if weight.scale is None else (torch.int8,)
    values = _span(weights, weight.values, kinds)
    if starts[0] != 0 or starts[-1] != len(found) or (np.diff(starts) < 0).any():
        raise BadInput(f"expected row starts from 0 up to {len(found)} in {_name(step)}")
    if len(found) and (found.min() < 0 or found.max() >= columns):
        raise BadInput(f"expected columns below {columns} in {_name(step)}")
    rows = np.repeat(np.arange(step.out), np.diff(starts))
    bias, scale = (np.full(step.out, fill, np.float32) if span is None
                   else _span(weights, span, (torch.float32,))
                   for span, fill in ((step.bias, 0.0), (weight.scale, 1.0)))  # fmt: skip
    kind = {"int16": "bfloat16"}.get(values.dtype.name, values.dtype.name)
    return Csr(rows, found, values, kind, bias, scale, step.out)


def _span(weights: Sequence[Tensor], span: Span, kinds: tuple[torch.dtype, ...]) -> np.ndarray:
    number, begin, end = span
    if number >= len(weights) or end > weights[number].numel():
        raise BadInput(f"expected tensors that hold {span}, got {len(weights)}")
    tensor = weights[number].detach().flatten()[begin:end]
    if tensor.dtype not in kinds:
        raise NoPlan(f"a tensor of {tensor.dtype}, where kernels take {kinds}")
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()


def _name(step: ConvStep | LinearStep) -> str:
    return step.name or NAMES[type(step)]


@dataclass(frozen=True, slots=True)
class Stream:
    """What one thread reads: blocks, records, offsets, values."""

    blocks: np.ndarray
    records: np.ndarray
    offsets: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Places:
    """Where nonzeros and rows lie, in lines: of each nonzero its input channel and its line beyond
    the channel's first; per row its line in out and in what is added; lines of an input channel."""

    channels: np.ndarray
    lines: np.ndarray
    out: np.ndarray
    add: np.ndarray
    pitch: int


def dealt(counts: np.ndarray, threads: int) -> list[np.ndarray]:
    """Rows for each thread, about as many nonzeros for each; neighbours, since threads that write
    to neighbouring lines disturb one another."""
    done = np.cumsum(counts)
    cuts = np.searchsorted(done, done[-1] * np.arange(1, threads) / threads)
    return np.split(np.arange(len(counts)), np.minimum(cuts + 1, len(counts)))


def packed(weight: Csr, places: Places, rows: np.ndarray, block: int, side: int,
           line: int) -> Stream:  # fmt: skip
    """The stream of some rows, in blocks of `block` input channels, `side` rows side by side;
    line: bytes of a vector."""
    number = np.full(weight.count, -1, np.int64)
    number[rows] = np.arange(len(rows))
    picked = np.flatnonzero(number[weight.rows] >= 0)
    row, channel = number[weight.rows[picked]], places.channels[picked]
    blocks = int(channel.max()) // block + 1 if len(channel) else 1
    count = len(rows)
    kb = channel // block
    cell = kb * count + row
    order = np.argsort(cell, kind="stable")
    lengths = np.bincount(cell, minlength=blocks * count).reshape(blocks, count)
    first = np.where(lengths.any(0), (lengths > 0).argmax(0), 0)
    last = np.where(lengths.any(0), blocks - 1 - (lengths[::-1] > 0).argmax(0), 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].reshape(blocks, count)
    records, table, source = [], np.zeros(blocks, BLOCK), []
    done, written = 0, 0
    for k in range(blocks):
        here = np.flatnonzero((lengths[k] > 0) | (first == k))
        flags = (first[here] == k) * FIRST + (last[here] == k) * LAST
        groups = _groups(here, lengths[k][here], flags, side)
        made, read, written = _records(groups, lengths[k], starts[k], written)
        if written > tile.MOST:
            raise NoPlan(f"a thread has more than {tile.MOST} nonzeros of one layer")
        own = groups.ravel()
        made["end"] = made["end"] * 4 + (first[own] == k) * FIRST + (last[own] == k) * LAST
        real = rows[own]
        made["out"], made["add"] = places.out[real], places.add[real]
        made["bias"], made["scale"] = weight.bias[real], weight.scale[real]
        table[k] = (k * block * places.pitch * line, done, done + len(made))
        done += len(made)
        records.append(made)
        source.append(read)
    return _stream(weight, places, picked[order], np.concatenate(source), table,
                   np.concatenate([*records, np.zeros(side, RECORD)]), block)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slices:
    """Rows as lanes: per group where its vectors end (from 0 on), a row of each lane (-1: none);
    per vector the nonzeros it takes (-1: none)."""

    ends: np.ndarray
    rows: np.ndarray
    source: np.ndarray


def sliced(weight: Csr, rows: np.ndarray, lanes: int) -> Slices:
    """Some rows, as many at once as there are lanes, longest first."""
    lengths = weight.per_row()
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    groups = np.full(-(-len(order) // lanes) * lanes, -1)
    groups[: len(order)] = order
    groups = groups.reshape(-1, lanes)
    own = np.where(groups >= 0, lengths[groups], 0)
    longest = own.max(1)
    step = np.arange(int(longest.sum())) - np.repeat(np.cumsum(longest) - longest, longest)
    group = np.repeat(np.arange(len(groups)), longest)
    taken = starts[groups[group]] + step[:, None]
    source = np.where(step[:, None] < own[group], taken, -1)
    return Slices(np.concatenate([[0], np.cumsum(longest)]).astype(np.int32), groups, source)


def _groups(rows: np.ndarray, lengths: np.ndarray, flags: np.ndarray, side: int) -> np.ndarray:
    """Rows that go side by side [groups, side]: of one kind, of about one length. A row fills up
    what is left over: it is computed twice, the same."""
    if side == 1:
        return rows[:, None]
    found = [np.zeros((0, side), np.int64)]
    for kind in np.unique(flags):
        own = rows[flags == kind]
        own = own[np.argsort(-lengths[flags == kind], kind="stable")]
        more = -len(own) % side
        found.append(np.concatenate([own, np.repeat(own[-1:], more)]).reshape(-1, side))
    return np.concatenate(found)


def _records(groups: np.ndarray, lengths: np.ndarray, starts: np.ndarray,
             written: int) -> tuple[np.ndarray, np.ndarray, int]:  # fmt: skip
    """Records of one block; for each place of the stream the nonzero it takes, -1 for none."""
    side = groups.shape[1]
    longest = lengths[groups].max(1) if len(groups) else np.zeros(0, np.int64)
    ends = written + np.cumsum(longest * side)
    made = np.zeros(groups.size, RECORD)
    made["end"] = np.repeat(np.minimum(ends, tile.MOST), side)
    total = int(longest.sum())
    group = np.repeat(np.arange(len(groups)), longest)
    step = np.arange(total) - np.repeat(np.cumsum(longest) - longest, longest)
    taken = starts[groups][group] + step[:, None]
    valid = step[:, None] < lengths[groups][group]
    return made, np.where(valid, taken, -1).ravel(), int(ends[-1]) if len(ends) else written


def _stream(weight: Csr, places: Places, picked: np.ndarray, source: np.ndarray, table: np.ndarray,
            records: np.ndarray, block: int) -> Stream:  # fmt: skip
    """Offsets and values in the order of `source`; its holes are zeros that read the first line."""
    values = np.zeros(len(source), weight.values.dtype)
    offsets = np.zeros(len(source), np.int64)
    real = source >= 0
    nonzero = picked[source[real]]
    values[real] = weight.values[nonzero]
    offsets[real] = places.channels[nonzero] % block * places.pitch + places.lines[nonzero]
    most = int(offsets.max()) if len(offsets) else 0
    return Stream(table, records, offsets.astype(np.uint16 if most < WIDE else np.uint32), values)
