"""One memory block (arena) for the values of a forward pass, with planned offsets.

Values that are not live at the same time may share memory. Blocks are placed largest first, each at
the lowest offset where it overlaps no block that is live with it (greedy by size: Pisarchyk and Lee
2020, "Efficient memory management for deep neural net inference", algorithm 3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Value = TypeVar("Value", bound=Hashable)
ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Block:
    """`size` bytes that are in use from step `start` to step `end`, both included."""

    size: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The offset of each block from the start of the arena, and the size of the arena, in bytes."""

    offsets: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in an arena: its offset in bytes, shape, strides in elements, and dtype."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def align_size(size: int) -> int:
    """`size` bytes rounded up to a multiple of ALIGNMENT.

    >>> align_size(1), align_size(64)
    (64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_arena(blocks: Sequence[Block]) -> ArenaPlan:
    """Offsets at which no two blocks that are live at the same time overlap.

    >>> plan_arena([Block(64, 0, 1), Block(64, 1, 2), Block(64, 2, 3)])
    ArenaPlan(offsets=(0, 64, 0), size=128)
    """
    offsets = [0] * len(blocks)
    placed = sorted(range(len(blocks)), key=lambda k: (-blocks[k].size, blocks[k].start))
    starts, ends = (np.array([getattr(blocks[k], name) for k in placed]) for name in ("start", "end"))
    for count, k in enumerate(placed):
        new = blocks[k]
        live = [placed[j] for j in np.flatnonzero((starts[:count] <= new.end) & (ends[:count] >= new.start))]
        offset = 0
        for j in sorted(live, key=lambda j: offsets[j]):
            if offset + new.size <= offsets[j]:
                break
            offset = max(offset, align_size(offsets[j] + blocks[j].size))
        offsets[k] = offset
    size = max((offset + block.size for offset, block in zip(offsets, blocks, strict=True)), default=0)
    return ArenaPlan(tuple(offsets), align_size(size))


def owners(
    calls: Sequence[tuple[Value, Sequence[Value]]], may_overwrite: Callable[[int, Value], bool], *, last: bool = False
) -> dict[Value, Value]:
    """The value whose memory each value uses: itself, or an operand of its call that no later call reads.

    calls: the value that each call writes, and those that it reads, in order; a value may be written by several.
    may_overwrite: whether call k may write its result over an operand. last: the owner of values that share memory is
    the last of them, not the first.

    >>> owners([("x", ""), ("y", "x"), ("z", "yx")], lambda call, operand: True)
    {'x': 'x', 'y': 'y', 'z': 'y'}
    """
    last_reads = {value: k for k, (_, operands) in enumerate(calls) for value in operands}
    first: dict[Value, Value] = {}
    for k, (value, operands) in enumerate(calls):
        if value not in first:
            over = (v for v in operands if last_reads[v] == k and may_overwrite(k, v))
            base = next(over, value)
            first[value] = first.get(base, base)
    latest = {base: value for value, base in first.items()}
    return {value: latest[base] for value, base in first.items()} if last else first


def peak_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes in use at one step: a lower bound of the arena's size.

    >>> peak_bytes([Block(64, 0, 1), Block(64, 1, 2), Block(64, 2, 3)])
    128
    """
    change: dict[int, int] = {}
    for block in blocks:
        change[block.start] = change.get(block.start, 0) + block.size
        change[block.end + 1] = change.get(block.end + 1, 0) - block.size
    return max(itertools.accumulate(change[step] for step in sorted(change)), default=0)


def strided_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the last element of a strided tensor.

    >>> strided_bytes((2, 3), (3, 1), torch.float32)
    24
    """
    if math.prod(shape) == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


def allocate(size: int, views: Sequence[View], device: torch.device) -> list[Tensor]:
    """Uninitialized tensors at their offsets in a new arena of `size` bytes, which they own."""
    with torch.inference_mode(False):  # the next user may be outside of inference mode
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -memory.data_ptr() % ALIGNMENT
        return [_tensor_at(memory[skipped + view.offset :], view) for view in views]


def _tensor_at(memory: Tensor, view: View) -> Tensor:
    """The tensor that a view describes; its first byte is the first of `memory` (uint8)."""
    span = memory[: strided_bytes(view.shape, view.stride, view.dtype)]
    return span.view(view.dtype).as_strided(view.shape, view.stride)
