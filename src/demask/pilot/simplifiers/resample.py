"""Axes that became shorter: their segments and factors, and how values along them are resampled.

An axis is a sequence of segments (a class token, then patches), and a segment is a product of
factors, major first (rows, columns). A factor has a full size and a small one. Resampling is linear
along each factor: D, a matrix (small, full), shortens, R, a matrix (full, small), lengthens.

    W x ~ W R x_small      so a weight that sums over a full axis becomes W R: its sum is preserved

since every row of R sums to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from demask.errors import BadInput

MODES = ("nearest", "bilinear", "bicubic", "area")


@dataclass(frozen=True, slots=True)
class Factor:
    """Sizes of one factor of an axis; None for a dynamic one, which is never resampled. inner: the
    axis that it is, where that runs over several segments."""

    full: int | None
    small: int | None
    inner: Axis | None = None

    @property
    def scaled(self) -> bool:
        return self.full != self.small


Segment = tuple["Factor", ...]
Axis = tuple[Segment, ...]


def axis_of(full: int | None, small: int | None) -> Axis:
    """An axis of one factor."""
    return ((Factor(full, small),),)


def scaled(axis: Axis) -> bool:
    """Whether an axis is shorter than it was."""
    return any(factor.scaled for segment in axis for factor in segment)


def size(axis: Axis, *, full: bool = False) -> int | None:
    """The size of an axis; None where dynamic.

    >>> size(((Factor(1, 1),), (Factor(8, 4), Factor(8, 4)))), size(axis_of(8, 4), full=True)
    (17, 8)
    """
    total = 0
    for segment in axis:
        sizes = [factor.full if full else factor.small for factor in segment]
        if any(n is None for n in sizes):
            return None
        total += prod(n for n in sizes if n is not None)
    return total


def split(axis: Axis, sizes: list[int | None]) -> list[Axis] | None:
    """An axis as a product of axes of these full sizes, major first; None where it is not one.

    >>> split(((Factor(8, 8), Factor(6, 3)),), [4, 12]) == [
    ...     ((Factor(4, 4),),), ((Factor(2, 2), Factor(6, 3)),)]
    True
    """
    if len(sizes) == 1:
        return [axis]
    if len(axis) != 1:
        return None
    left, parts = list(axis[0]), []
    for wanted in sizes:
        taken: list[Factor] = []
        if wanted is None:
            if not left or left[0].full is not None:
                return None
            parts.append(((left.pop(0),),))
            continue
        while (product := prod(f.full or 0 for f in taken)) < wanted:
            if not left or left[0].full is None:
                return None
            rest = wanted // product
            if wanted % product == 0 and left[0].full > rest and left[0].full % rest == 0:
                pair = _halved(left[0], rest)
                if pair is None:
                    return None
                left[:1] = pair
            taken.append(left.pop(0))
        if product != wanted:
            return None
        alone = taken[0].inner if len(taken) == 1 else None
        parts.append(alone or (tuple(taken) or (Factor(1, 1),),))
    return None if any(factor.full != 1 for factor in left) else parts


def _halved(factor: Factor, major: int) -> list[Factor] | None:
    """A factor as a major and a minor one: where it is scaled the minor one stays as it is (windows
    of a fixed size), if that divides."""
    assert factor.full is not None
    assert factor.small is not None
    if factor.inner is not None:
        return None
    minor = factor.full // major
    if not factor.scaled:
        return [Factor(major, major), Factor(minor, minor)]
    if factor.small % minor:
        return None
    return [Factor(major, factor.small // minor), Factor(minor, minor)]


def merged(axes: list[Axis]) -> Axis:
    """The product of axes."""
    if len(axes) == 1:
        return axes[0]
    return (tuple(factor for axis in axes for factor in _factors(axis)),)


def _factors(axis: Axis) -> Segment:
    """An axis as factors: one, where it runs over segments."""
    return axis[0] if len(axis) == 1 else (Factor(size(axis, full=True), size(axis), axis),)


def resampled(tensor: Tensor, dim: int, axis: Axis, mode: str, *, summed: bool) -> Tensor:
    """A full constant along a shorter axis. summed: it is multiplied and summed along the axis."""
    parts, start, last = [], 0, tensor.movedim(dim, -1)
    for segment in axis:
        sizes = [factor.full or 0 for factor in segment]
        part = last[..., start : start + prod(sizes)].unflatten(-1, sizes)
        start += prod(sizes)
        for k, factor in enumerate(segment):
            if factor.inner is not None:
                part = resampled(part, k - len(segment), factor.inner, mode, summed=summed)
            elif factor.scaled:
                part = _along(part, k - len(segment), factor, mode, summed)
        parts.append(part.flatten(-len(segment)))
    return torch.cat(parts, -1).movedim(-1, dim).contiguous()


def _along(part: Tensor, dim: int, factor: Factor, mode: str, summed: bool) -> Tensor:
    assert factor.full is not None
    assert factor.small is not None
    if summed:
        matrix = matrix_of(factor.small, factor.full, mode).T
    else:
        matrix = matrix_of(factor.full, factor.small, mode)
    moved = part.movedim(dim, -1) @ matrix.T.to(part.dtype)
    return moved.movedim(-1, dim)


@cache
def matrix_of(before: int, after: int, mode: str) -> Tensor:
    """The matrix (after, before) that resamples a vector, float64; its rows sum to one.

    >>> matrix_of(4, 2, "bilinear").tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    check_mode(mode)
    eye = torch.eye(before, dtype=torch.float64)[None, None]
    if mode == "area" and after > before:
        mode = "nearest"  # the mean of a part of one position
    corners = {"align_corners": False} if mode in ("bilinear", "bicubic") else {}
    return interpolate(eye, size=(after, before), mode=mode, **corners)[0, 0]


def full_matrix(axis: Axis, mode: str) -> Tensor:
    """The matrix (full, small) that resizes a value along an axis to full size, float64."""
    total = size(axis, full=True)
    assert total is not None
    # Of every full position, its weight on every small one: the identity, summed.
    return resampled(torch.eye(total, dtype=torch.float64), 1, axis, mode, summed=True)


def check_mode(mode: str) -> None:
    """Raise BadInput for an unknown mode."""
    if mode not in MODES:
        raise BadInput(f"expected one of {', '.join(MODES)}, got {mode!r}")
