"""Resizes on a tape, with the weights that torch's own op has.

The op is applied to unit vectors, which gives the weights in the rounding of torch, and to vectors
with one NaN or infinity, which tells what it reads with a weight of zero: 0 * inf is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.kernels.cpu.tiles.resize import CALL, ResizeKernel
from demask.sparse.calls.resize_calls import sizes_and_factors
from demask.sparse.plan.tape import Buffer, KernelCall, NoPlan, aligned, by_thread
from demask.sparse.plan.tile_layout import GridLayout
from demask.sparse.plan.value_moves import Moves
from demask.sparse.segment_calls import CALLED
from demask.sparse.segment_steps import CallStep

PROBED = 256  # unit vectors at once
Taps = tuple[np.ndarray, np.ndarray]  # pixels and weights, [outputs, taps]
Axis = tuple[np.ndarray, np.ndarray, np.ndarray]  # taps, weights, lines; see `ResizeKernel`


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """What outputs along an axis read. lines: of the output, [n]. elements: [n, taps, lanes] of x;
    weights: the same shape. whole: numbers of lines [n, taps] if all lanes read their own lane;
    negative otherwise."""

    lines: np.ndarray
    elements: np.ndarray
    weights: np.ndarray
    whole: np.ndarray

    def fields(self, name: str, picked: np.ndarray, whole: bool) -> dict[str, Any]:
        """The fields of a call for some of the outputs."""
        taps = self.whole if whole else self.elements
        return {
            f"{name}s": len(picked),
            f"{name}_taps": aligned(taps[picked], np.int32),
            f"{name}_weights": aligned(self.weights[picked]),
            f"{name}_lines": aligned(self.lines[picked], np.int32),
        }


def write_resize(step: CallStep, moves: Moves, x: Buffer, out: Buffer) -> None:
    """Write a resize to the last phase of a tape, without borders."""
    channels, grid, threads = out.layout.size[1], out.layout.grid, moves.tape.threads
    taps = [_taps(step, axis, x.layout.size[2 + axis], out.layout.size[2 + axis]) for axis in range(2)]
    for part in range(grid.parts):
        axes = _axes(x.layout, out.layout, part, taps)
        if grid.parts == threads:
            _write(moves, (x, out), (part, 0, channels), axes)
            continue
        for thread, (begin, end) in enumerate(by_thread(channels, threads)):
            if begin < end:
                _write(moves, (x, out), (thread, begin, end), axes)


def _write(
    moves: Moves, buffers: tuple[Buffer, Buffer], share: tuple[int, int, int], axes: Sequence[ResizedAxis]
) -> None:
    """Write the calls of a thread: of rows and columns that read whole lines, and of the others."""
    thread, begin, end = share
    whole = [np.flatnonzero((axis.whole >= 0).all(1)) for axis in axes]
    others = [np.flatnonzero((axis.whole < 0).any(1)) for axis in axes]
    every = np.arange(len(axes[1].lines))
    for is_whole, picked in ((True, whole), (False, (whole[0], others[1])), (False, (others[0], every))):
        if not all(map(len, picked)):
            continue
        kernel = ResizeKernel(axes[0].weights.shape[1], axes[1].weights.shape[1], is_whole)
        fields: dict[str, Any] = {"begin": begin, "end": end}
        for key, buffer in zip(("x", "out"), buffers, strict=True):
            fields[f"{key}_pitch"] = moves.pitch(buffer)
        for name, axis, numbers in zip(("row", "column"), axes, picked, strict=True):
            fields |= axis.fields(name, numbers, is_whole)
        places = {key: (buffer, 0) for key, buffer in zip(("x", "out"), buffers, strict=True)}
        moves.tape.add(thread, KernelCall(kernel, CALL, places, fields))


def _axes(x: GridLayout, out: GridLayout, part: int, taps: Sequence[Taps]) -> list[ResizedAxis]:
    """Rows and columns of a part of the output.

    The number of an element is the sum of one number for its image and row, and one for its column.
    """
    grid, lane, zero = out.grid, np.arange(out.lanes), np.zeros(1, np.int64)
    image, tile = np.divmod(lane, grid.rows * grid.columns)
    is_used = image < grid.images
    image, tiles = np.where(is_used, image, 0), np.divmod(tile, grid.columns)
    area, first = grid.part(part), x.element(zero, zero, zero)
    axes = []
    for axis, length in enumerate((grid.height, grid.width)):
        place = np.arange(area[2 + axis])
        pixel = tiles[axis] * length + (area[axis] + place)[:, None]  # [outputs, lanes]
        is_read = is_used & (pixel < out.size[2 + axis])
        source, weights = (of[np.where(is_read, pixel, 0)].transpose(0, 2, 1) for of in taps[axis])
        if axis == 0:
            elements, own = x.element(image, source, zero), lane - tiles[1]
            lines = out.line(part, place, 0)
        else:
            elements, own, lines = x.element(zero, zero, source) - first, tiles[1], place
        whole = _whole(elements - own, is_read)
        if x.grid.images * x.grid.rows != grid.images * grid.rows or x.grid.columns != grid.columns:
            whole = np.full_like(whole, -1)
        axes.append(ResizedAxis(lines, elements, weights, whole))
    if int(axes[0].elements.max()) + int(axes[1].elements.max()) >= 2**31:
        raise NoPlan("a value has more than 2**31 elements")
    return axes


def _whole(elements: np.ndarray, is_read: np.ndarray) -> np.ndarray:
    """The numbers [n, taps] of lines that begin with these elements [n, taps, lanes], the same ones
    in all lanes that are read; -1 if there are none."""
    lanes, is_read = elements.shape[2], np.broadcast_to(is_read[:, None, :], elements.shape)
    least = np.where(is_read, elements, elements.max(initial=0)).min(2)
    most = np.where(is_read, elements, 0).max(2)
    is_line = ((least == most) & (least % lanes == 0)) | ~is_read.any(2)
    return np.where(is_line, np.where(is_read.any(2), least, 0) // lanes, -1)


def _taps(step: CallStep, axis: int, old: int, new: int) -> Taps:
    """The pixels and weights that each output reads along the height (0) or width (1)."""
    axis += len(step.numbers) - 3  # of the op, whose numbers are a flag and one per axis
    if axis < 0:
        return np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    taps: list[list[tuple[int, float]]] = [[] for _ in range(new)]
    clear = np.ones(new, bool)  # whether an output reads no element that it multiplies by zero
    for begin in range(0, old, PROBED):
        probe = _Probe(step, axis, old, new, range(begin, min(begin + PROBED, old)))
        weights, is_read, is_nan = probe.taken(1.0), probe.taken(nan).isnan(), probe.infinite()
        for x, out in is_read.nonzero().tolist():
            weight = float(weights[x, out])
            taps[out].append((begin + x, weight))
            if is_nan[x, out] and weight:  # the pixel is also read with a weight of zero
                taps[out].append((begin + x, 0.0))
        clear &= ~(is_nan & is_read).any(0).numpy()
    for own, is_clear in zip(taps, clear, strict=True):
        _extend(own, max(map(len, taps)), is_clear)
    pixels, factors = np.array(taps, np.float64).transpose(2, 0, 1)
    return pixels.astype(np.int64), factors.astype(np.float32)


def _extend(taps: list[tuple[int, float]], count: int, is_clear: bool) -> None:
    """Extend taps of one output to a count, without other results for any values."""
    while len(taps) < count:
        pixel, weight = taps[-1] if is_clear else next(tap for tap in taps if not tap[1])
        if is_clear:
            taps[-1:] = [(pixel, weight / 2), (pixel, weight / 2)]
        else:
            taps.append((pixel, 0.0))


@dataclass(frozen=True, slots=True)
class _Probe:
    """An op, applied to vectors of `old` elements that are zero but for one of `pixels`."""

    step: CallStep
    axis: int
    old: int
    new: int
    pixels: range

    def taken(self, value: float) -> Tensor:
        """The results [pixels, new] if the other element has a value."""
        return self._called(value, 1, 1)[..., 0]

    def infinite(self) -> Tensor:
        """Whether the results are NaN if the other element is infinite.

        Along the other axis, output 1 of 3 is between elements 1 and 2 of 4.
        """
        return self._called(inf, 4, 3)[..., min(1, len(self.step.numbers) - 2)].isnan()

    def _called(self, value: float, other: int, resized: int) -> Tensor:
        """The results [pixels, new, resized], for so many elements along the other axis."""
        axes = len(self.step.numbers) - 1
        other, resized = (other, resized) if axes == 2 else (1, 1)
        x = torch.zeros(len(self.pixels), 1, self.old, other)
        x[torch.arange(len(self.pixels)), 0, list(self.pixels), min(1, other - 1)] = value
        _, factors = sizes_and_factors(self.step.numbers, 1)
        sizes, scales = [self.new, resized], [factors and factors[self.axis], None]
        if self.axis == 1:
            x, sizes, scales = x.transpose(2, 3).contiguous(), sizes[::-1], scales[::-1]
        op = CALLED[self.step.call].op.overloadpacket.default
        result = op(x if axes == 2 else x[..., 0], sizes[:axes], bool(self.step.numbers[0]), *scales[:axes])
        result = result.reshape(len(x), *sizes)
        return result.transpose(1, 2) if self.axis == 1 else result
