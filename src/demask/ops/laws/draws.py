"""Random tensors for the shapes of a case of the law tests, and random masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from demask.ops.entry import Shape
from demask.ops.relation import Relation

Axes = frozenset[int] | None


def draw_tensor(shape: Shape, generator: torch.Generator, sizes: Iterable[int] | None = None) -> Tensor:
    """A float64 tensor for a shape of a case. Some activations are integers, so that comparisons
    and rounding see equal values."""
    size = tuple(shape.sizes if sizes is None else sizes)
    if isinstance(shape.of, int):
        return torch.randint(shape.of, size, generator=generator)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    if shape.of == "bool":
        return uniform < 0.5
    if shape.of == "zero":
        return torch.zeros(size, dtype=torch.float64)
    if shape.of == "positive":
        return 0.2 + 0.6 * uniform  # below 1 too: logit
    value = torch.randn(size, generator=generator, dtype=torch.float64)
    # + 0.0: atan2 distinguishes -0.0 from 0.0, and sums lose the sign.
    return value if shape.constant else torch.where(uniform < 0.6, value.round() + 0.0, value)


def draw_support(size: int, generator: torch.Generator) -> Tensor:
    """The live positions of an axis, bool [size]: none, all, one, or random ones."""
    choice = int(torch.randint(8, (), generator=generator))
    if choice == 0:
        return torch.zeros(size, dtype=torch.bool)
    if choice == 1:
        return torch.arange(size) == int(torch.randint(max(size, 1), (), generator=generator))
    if choice < 5:
        return torch.rand(size, generator=generator) < 0.5
    return torch.ones(size, dtype=torch.bool)


def draw_mask(sizes: Iterable[int], generator: torch.Generator, axes: Axes = None) -> Tensor:
    """A bool mask, the product of a support per axis; fully live axes have size 1.

    axes: those that may be masked; None: all.
    """
    sizes = list(sizes)
    mask = torch.ones([1] * len(sizes), dtype=torch.bool)
    for axis, size in enumerate(sizes):
        support = draw_support(size, generator)
        if (axes is None or axis in axes) and not bool(support.all()):
            mask = mask & support.view([-1 if k == axis else 1 for k in range(len(sizes))])
    return mask


def draw_scale(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """A factor per position, 0 where the mask is 0. There are two factors, so that equal values
    occur."""
    low, high = (0.5, 0.9) if of == "positive" else (0.5, 2.0)
    pick = torch.rand(mask.shape, generator=generator) < 0.5
    return torch.where(pick, low, high).double() * mask


def draw_fill(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """Values where the mask is 0: zeros, one value, or a value per position; 0 elsewhere."""
    choice = int(torch.randint(3, (), generator=generator))
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if of == "positive":
        values = 0.2 + 0.6 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    elif choice == 0:
        values = torch.zeros(mask.shape, dtype=torch.float64)
    if choice == 1:
        values = values.flatten()[:1].reshape([1] * mask.ndim).expand(mask.shape)
    return values.masked_fill(mask, 0.0)


def draw_tied_masks(relation: Relation, generator: torch.Generator) -> list[Tensor]:
    """A mask per operand, the product of one support per letter: the input and the output of a
    recurrence lose the same positions."""
    support = {
        letter: torch.ones(size or 1, dtype=torch.bool)
        if letter in relation.complete
        else draw_support(size or 1, generator)
        for letter, size in relation.size.items()
    }
    support |= {letter: support[letter.removesuffix("^")] for letter in relation.back}
    return [_mask_of(axes, support) for axes in relation.ins]


def _mask_of(axes: Any, support: Mapping[str, Tensor]) -> Tensor:
    """The product of the supports of all letters, in the shape of the axes."""
    mask, shape = torch.ones((), dtype=torch.bool), []
    for axis in axes:
        for letter in axis:
            mask = mask.unsqueeze(-1) & support[letter]
        shape.append(math.prod(len(support[letter]) for letter in axis))
    return mask.reshape(shape)
