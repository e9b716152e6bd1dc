"""The positions that layers compute and read: windows of outputs, and borders of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from demask.exec.steps.segment_steps import Window
from demask.exec.tape.tile_layout import At, Border, GridLayout, TileGrid, areas_of, at_array


@dataclass(frozen=True, slots=True)
class OutputWindow:
    """The positions of an output that one stream of nonzeros computes.

    taps: for each kernel position, the row or column that it reads, relative to the output position
    times the stride (None: it reads nothing).
    """

    start: tuple[int, int]
    step: tuple[int, int]
    stride: tuple[int, int]
    taps: tuple[tuple[int | None, ...], ...]


def windows(window: Window) -> list[OutputWindow]:
    """One window for a convolution; one per stride offset for a transposed convolution."""
    if not window.transposed:
        taps = tuple(
            tuple(k * d - p[0] for k in range(n))
            for n, d, p in zip(window.kernel, window.dilation, window.padding, strict=True)
        )
        return [OutputWindow((0, 0), (1, 1), window.stride, taps)]
    output_windows = []
    for i in range(window.stride[0]):
        for j in range(window.stride[1]):
            taps = tuple(_transposed_taps(window, axis, offset) for axis, offset in enumerate((i, j)))
            output_windows.append(OutputWindow((i, j), window.stride, (1, 1), taps))
    return output_windows


def _transposed_taps(window: Window, axis: int, offset: int) -> tuple[int | None, ...]:
    """Output position s*i + offset reads input i + tap: s*(i + tap) + d*k = s*i + offset + p."""
    s, d, p = window.stride[axis], window.dilation[axis], window.padding[axis][0]
    shifts = [offset + p - d * k for k in range(window.kernel[axis])]
    return tuple(shift // s if shift % s == 0 else None for shift in shifts)


def reach(grid: TileGrid, out: TileGrid, all_: Sequence[OutputWindow]) -> Border:
    """The border that windows read around the parts of an input, for the parts of an output."""
    border = [0, 0, 0, 0]
    for window in all_:
        for axis in (0, 1):
            taps = [tap for tap in window.taps[axis] if tap is not None]
            for part in range(out.parts) if taps else ():
                in_area, out_area = grid.part(part), out.part(part)
                stride, step = window.stride[axis], window.step[axis]
                first = out_area[axis] // step * stride - in_area[axis]
                last = first + (out_area[2 + axis] // step - 1) * stride
                border[2 * axis] = max(border[2 * axis], -(first + min(taps)))
                excess = last + max(taps) - (in_area[2 + axis] - 1)
                border[2 * axis + 1] = max(border[2 * axis + 1], excess)
    return border[0], border[1], border[2], border[3]


def positions_of(sizes: Sequence[tuple[int, int]], parts: Iterable[int]) -> np.ndarray:
    """The positions [n, 3] of some parts. sizes: rows and columns of each part."""
    return at_array((part, i, j) for part in parts for i in range(sizes[part][0]) for j in range(sizes[part][1]))


def written(window: OutputWindow, at: np.ndarray) -> np.ndarray:
    """The positions [n, 3] of an output that a window writes, of its own positions."""
    return at * (1, *window.step) + (0, *window.start)


def touched(window: OutputWindow, grid: TileGrid, out: TileGrid) -> set[At]:
    """The positions of an input that a window reads."""
    positions: set[At] = set()
    for part in range(out.parts):
        in_area, out_area = grid.part(part), out.part(part)
        axes = []
        for axis in (0, 1):
            stride, step = window.stride[axis], window.step[axis]
            first = out_area[axis] // step * stride - in_area[axis]
            taps = [tap for tap in window.taps[axis] if tap is not None]
            axes.append({first + k * stride + tap for k in range(out_area[2 + axis] // step) for tap in taps})
        positions |= {(part, i, j) for i in axes[0] for j in axes[1]}
    return positions


def first_position(window: OutputWindow, grid: TileGrid, out: TileGrid, at: np.ndarray) -> np.ndarray:
    """The rows and columns [n, 2] of parts of the input that a tap of 0 reads for output positions
    [n, 3]."""
    first, first_out = (np.array(areas_of(each))[:, :2][at[:, 0]] for each in (grid, out))
    return (first_out // window.step + at[:, 1:]) * window.stride - first


def first_read(window: OutputWindow, x: GridLayout, out: GridLayout, at: np.ndarray) -> np.ndarray:
    """The lines [n] that a tap of 0 reads for output positions [n, 3], not counting borders.

    A tap reads that many rows and columns from there.
    """
    y, z = first_position(window, x.grid, out.grid, at).T
    return at[:, 0] * x.part_pitch + y * x.row + z
