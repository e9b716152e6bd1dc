"""One block of memory for the values of a pass, each at an offset that its lifetime allows.

What is not alive at the same time may lie at the same place. Blocks are placed largest first, each
at the lowest offset where it meets no block that lives while it does (greedy by size: Pisarchyk
and Lee 2020, "Efficient memory management for deep neural net inference", algorithm 3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are in use from step `start` up to and with step `end`."""

    size: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Where each block lies, in bytes from the beginning, and how long the arena is."""

    offsets: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in an arena: its offset in bytes, and what torch needs to see it."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def aligned(size: int) -> int:
    """Bytes that a block of some size takes.

    >>> aligned(1), aligned(64)
    (64, 64)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def planned(blocks: Sequence[Block]) -> ArenaPlan:
    """Offsets at which no two blocks that live at the same time overlap.

    >>> planned([Block(64, 0, 1), Block(64, 1, 2), Block(64, 2, 3)])
    Plan(offsets=(0, 64, 0), size=128)
    """
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for k in sorted(range(len(blocks)), key=lambda k: (-blocks[k].size, blocks[k].start)):
        mine = blocks[k]
        beside = [j for j in placed if blocks[j].start <= mine.end and mine.start <= blocks[j].end]
        offset = 0
        for j in sorted(beside, key=lambda j: offsets[j]):
            if offset + mine.size <= offsets[j]:
                break
            offset = max(offset, _aligned(offsets[j] + blocks[j].size))
        offsets[k] = offset
        placed.append(k)
    ends = (offset + block.size for offset, block in zip(offsets, blocks, strict=True))
    return ArenaPlan(tuple(offsets), _aligned(max(ends, default=0)))


def peak(blocks: Sequence[Block]) -> int:
    """Bytes alive at once at most: no plan is smaller, but for alignment.

    >>> peak([Block(64, 0, 1), Block(64, 1, 2), Block(64, 2, 3)])
    128
    """
    change: dict[int, int] = {}
    for block in blocks:
        change[block.start] = change.get(block.start, 0) + block.size
        change[block.end + 1] = change.get(block.end + 1, 0) - block.size
    return max(itertools.accumulate(change[step] for step in sorted(change)), default=0)


def extent(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a strided tensor spans.

    >>> extent((2, 3), (3, 1), torch.float32)
    24
    """
    if math.prod(shape) == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


def allocate(size: int, views: Sequence[View], device: torch.device) -> list[Tensor]:
    """The views of a new arena of `size` bytes, uninitialised; its memory lives as long as they."""
    with torch.inference_mode(False):  # who takes it next may be outside of it
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -memory.data_ptr() % ALIGNMENT
        return [_seen(memory[skipped + view.offset :], view) for view in views]


def _seen(memory: Tensor, view: View) -> Tensor:
    span = memory[: extent(view.shape, view.stride, view.dtype)]
    return span.view(view.dtype).as_strided(view.shape, view.stride)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
