"""What the law tests draw: tensors for the shapes of a case, and masks over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from demask.ops.entry import Shape
from demask.ops.relation import Relation

Axes = frozenset[int] | None


def drawn(shape: Shape, generator: torch.Generator, sizes: Iterable[int] | None = None) -> Tensor:
    """A tensor for a shape of a case, float64; some activations are whole numbers, so that
    comparisons and roundings meet equal values."""
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
    # + 0.0: a draw of -0.0 is another input than 0.0 for atan2, and sums lose the difference.
    return value if shape.constant else torch.where(uniform < 0.6, value.round() + 0.0, value)


def drawn_support(size: int, generator: torch.Generator) -> Tensor:
    """Which positions of an axis are alive: bool [size]; none, all, one, or any."""
    kind = int(torch.randint(8, (), generator=generator))
    if kind == 0:
        return torch.zeros(size, dtype=torch.bool)
    if kind == 1:
        return torch.arange(size) == int(torch.randint(max(size, 1), (), generator=generator))
    if kind < 5:
        return torch.rand(size, generator=generator) < 0.5
    return torch.ones(size, dtype=torch.bool)


def drawn_mask(sizes: Iterable[int], generator: torch.Generator, axes: Axes = None) -> Tensor:
    """A bool mask, the product of a support per axis; axes that are alive all along are 1 long.

    axes: those that may be masked; None: every one.
    """
    sizes = list(sizes)
    mask = torch.ones([1] * len(sizes), dtype=torch.bool)
    for axis, size in enumerate(sizes):
        support = drawn_support(size, generator)
        if (axes is None or axis in axes) and not bool(support.all()):
            mask = mask & support.view([-1 if k == axis else 1 for k in range(len(sizes))])
    return mask


def drawn_scale(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """A factor per position, 0 where the mask is off; powers of two keep equal values equal."""
    low, high = (0.5, 0.9) if of == "positive" else (0.5, 2.0)
    pick = torch.rand(mask.shape, generator=generator) < 0.5
    return torch.where(pick, low, high).double() * mask


def drawn_fill(mask: Tensor, of: str | int, generator: torch.Generator) -> Tensor:
    """What stands where the mask is off: zeros, one value, or a value per position; else 0."""
    kind = int(torch.randint(3, (), generator=generator))
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    if of == "positive":
        values = 0.2 + 0.6 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    elif kind == 0:
        values = torch.zeros(mask.shape, dtype=torch.float64)
    if kind == 1:
        values = values.flatten()[:1].reshape([1] * mask.ndim).expand(mask.shape)
    return values.masked_fill(mask, 0.0)


def tied_masks(relation: Relation, generator: torch.Generator) -> list[Tensor]:
    """A mask per operand that is the product of one support per letter: what reads back loses the
    positions that it makes."""
    support = {
        letter: torch.ones(size or 1, dtype=torch.bool)
        if letter in relation.complete
        else drawn_support(size or 1, generator)
        for letter, size in relation.size.items()
    }
    support |= {letter: support[letter.removesuffix("^")] for letter in relation.back}
    return [_spelled_mask(axes, support) for axes in relation.ins]


def _spelled_mask(axes: Any, support: Mapping[str, Tensor]) -> Tensor:
    """The product of the supports of all letters, in the shape of the axes."""
    mask, shape = torch.ones((), dtype=torch.bool), []
    for axis in axes:
        for letter in axis:
            mask = mask.unsqueeze(-1) & support[letter]
        shape.append(math.prod(len(support[letter]) for letter in axis))
    return mask.reshape(shape)
