"""Broadcastable masks: a dimension of size 1 represents a full axis along which nothing varies.

A mask over a tensor is a bool tensor of its rank. Every dimension is 1 ("the same all along") or
the axis' full size. A mask over letters has one dimension per letter. Dynamic axes are always 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from demask.numerics import all_along, any_along, has_only_finite, is_all, to_computable, without_repeats
from demask.ops.notation import Axes, Axis


@dataclass(frozen=True)
class Fact:
    """What is known of a tensor before any input: `known` (bool) and, where known, its value
    `fill`.

    Both have the tensor's rank; every dimension is 1 or full. Where unknown, the fill is 0.
    removed: for values computed from parameters, where a 0 removes what it is multiplied with;
    None: everywhere the value is known to be 0.
    """

    known: Tensor
    fill: Tensor
    removed: Tensor | None = None
    _over: dict[tuple[bool, tuple[int, ...]], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def zero(self) -> Tensor:
        """Where every element is exactly 0 (-0.0 too) and counts as removed. Like every mask that
        is stored for a weight it is short: as large as the weight only for scattered zeros."""
        if self.removed is not None:
            return shorten_mask(self.removed)
        return shorten_mask(without_repeats(self.known) & (without_repeats(self.fill) == 0))

    @property
    def zeros_alone(self) -> Fact:
        """The fact in which known values other than 0 are unknown."""
        return Fact(self.zero, torch.zeros(self.zero.shape, dtype=self.fill.dtype))

    @property
    def untrained(self) -> Fact:
        """The fact without the values of parameters."""
        return self if self.removed is None else self.zeros_alone

    def all_over(self, axes: tuple[int, ...], *, zero: bool) -> Tensor:
        """Where the tensor is known (or zero) all along some axes, which get size 1, as does every
        axis along which nothing varies. Cached: every sweep queries the weights."""
        key = (zero, axes)
        if key not in self._over:
            mask = self.zero if zero else self.known
            self._over[key] = shorten_mask(all_along(mask, axes, keepdim=True) if axes else mask)
        return self._over[key]


def shorten_mask(mask: Tensor) -> Tensor:
    """The mask with size 1 for every axis along which it does not vary."""
    for axis, n in enumerate(mask.shape):
        if n > 1:
            codes = mask.view(torch.uint8)
            some, every = codes.amax(axis, keepdim=True), codes.amin(axis, keepdim=True)
            mask = some.view(torch.bool) if torch.equal(some, every) else mask
    return mask


def unknown_fact(rank: int, dtype: torch.dtype) -> Fact:
    """The fact of a tensor of which nothing is known."""
    return Fact(torch.zeros([1] * rank, dtype=torch.bool), torch.zeros([1] * rank, dtype=dtype))


def finite_fact(known: Tensor, fill: Tensor) -> Fact:
    """The fact of finite values only: NaN and infinity count as unknown."""
    if not has_only_finite(fill):
        known = known & torch.isfinite(to_computable(fill))
    shape = torch.broadcast_shapes(known.shape, fill.shape)
    if not is_all(known):  # else no copy: constants are as large as the network
        fill = torch.where(known, fill, torch.zeros((), dtype=fill.dtype))
    return Fact(known.expand(shape), fill.expand(shape))


def spread(mask: Tensor, axes: Axes, order: Sequence[str], size: Mapping[str, int | None]) -> Tensor:
    """A mask over a tensor's axes as a mask over the letters `order` (1 for a letter it lacks)."""
    shape: list[int] = []
    letters: list[str] = []
    for axis, n in zip(axes, mask.shape, strict=True):
        letters += axis
        shape += [1] * len(axis) if n == 1 else _full(axis, size)
    mask = mask.reshape(shape)
    index = {letter: k for k, letter in enumerate(letters)}
    mask = mask.permute([index[letter] for letter in order if letter in index])
    sizes = iter(mask.shape)
    return mask.reshape([next(sizes) if letter in index else 1 for letter in order])


def project(mask: Tensor, axes: Axes, order: Sequence[str], size: Mapping[str, int | None]) -> Tensor:
    """The inverse of `spread`, for a mask that is 1 along every letter not in `axes`."""
    index = {letter: k for k, letter in enumerate(order)}
    letters = [letter for axis in axes for letter in axis]
    rest = [k for k, letter in enumerate(order) if letter not in letters]
    mask = mask.permute([index[letter] for letter in letters] + rest)
    mask = mask.reshape(mask.shape[: len(letters)])
    full = [n for axis in axes for n in _sizes(axis, mask, letters, size)]
    mask = mask.expand(full)
    shape, k = [], 0
    for axis in axes:
        n = 1
        for _ in axis:
            n *= full[k]
            k += 1
        shape.append(n)
    return mask.reshape(shape)


def _sizes(axis: Axis, mask: Tensor, letters: list[str], size: Mapping[str, int | None]) -> list[int]:
    """The sizes of the letters of one axis: all 1, or all full."""
    here = [mask.shape[letters.index(letter)] for letter in axis]
    if all(n == 1 for n in here):
        return here
    return _full(axis, size)


def _full(axis: Axis, size: Mapping[str, int | None]) -> list[int]:
    return [1 if (n := size[letter]) is None else n for letter in axis]


def mixed(axes: Axes, size: Mapping[str, int | None]) -> set[str]:
    """Letters that share an axis with a dynamic letter: a mask cannot separate them."""
    dynamic = [axis for axis in axes if len(axis) > 1 and any(size[a] is None for a in axis)]
    return {letter for axis in dynamic for letter in axis}


def any_over(mask: Tensor, order: Sequence[str], letters: Collection[str]) -> Tensor:
    """`any` along some letters, which get size 1."""
    dims = [k for k, letter in enumerate(order) if letter in letters and mask.shape[k] != 1]
    return any_along(mask, dims, keepdim=True) if dims else mask


def all_over(mask: Tensor, order: Sequence[str], letters: Collection[str]) -> Tensor:
    """`all` along some letters, which get size 1."""
    return ~any_over(~mask, order, letters)


def uniform_over(fact: Fact, order: Sequence[str], letters: set[str] | frozenset[str]) -> Fact:
    """The fact, known along some letters only where it is known all along with one value; not along an axis without
    elements."""
    known, fill, removed = fact.known, fact.fill, fact.removed
    for k, letter in enumerate(order):
        if letter in letters and known.shape[k] == 0:
            known, fill = (t.new_zeros([*t.shape[:k], 1, *t.shape[k + 1 :]]) for t in (known, fill))
        elif letter in letters and known.shape[k] != 1:
            first = fill.narrow(k, 0, 1)
            known = all_along(known & (fill == first), [k], keepdim=True)
            fill = first
    removed = None if removed is None else all_over(removed, order, letters)
    return Fact(known, torch.where(known, fill, torch.zeros((), dtype=fill.dtype)), removed)


def along(mask: Tensor, axis: int) -> Tensor:
    """A 1-D mask: any element at each position of one axis (length 1: the same all along)."""
    rest = [k for k in range(mask.ndim) if k != axis]
    return any_along(mask, rest) if rest else mask
