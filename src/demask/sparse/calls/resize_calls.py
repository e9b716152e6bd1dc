"""Entries of the table of called ops for resizes of images and signals.

Their numbers: 1 or 0 for `align_corners` of ops that have it, then per axis the new size, an
integer, or the factor, a float, from which torch computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import fx

from demask.errors import BadInput
from demask.ops.schema import fake, same_size
from demask.sparse.calls.called_op import MOVED, RESIZED, CalledOp, Match, Numbers, Shape
from demask.sparse.segment_steps import SPATIAL

aten = torch.ops.aten
LARGEST_SIZE = 2**24  # of an axis, as in plans
FACTORS = (2.0, 4.0, 8.0, 16.0)  # torch reads the same pixels for such a factor and its sizes


def sizes_and_factors(numbers: Numbers, flags: int) -> tuple[list[int] | None, list[float] | None]:
    """New sizes, or factors. flags: how many numbers come before them."""
    rest = list(numbers[flags:])
    return (rest, None) if type(rest[0]) is int else (None, rest)


def resized_sizes(sizes: Sequence[Any], numbers: Numbers, flags: int) -> list[Any]:
    """The new size of each axis, from the old ones, which may be symbolic."""
    return [n if type(n) is int else torch.sym_int(size * n) for size, n in zip(sizes, numbers[flags:], strict=True)]


def _arguments(flags: int, xs: Sequence[Any], n: Numbers, c: Any) -> tuple[Any, ...]:
    sizes, factors = sizes_and_factors(n, flags)
    return (xs[0], sizes, *map(bool, n[:flags]), factors)


def _match(flags: int, arguments: Mapping[str, Any], node: fx.Node) -> Match | None:
    x, sizes, factors = (arguments[key] for key in ("input", "output_size", "scale_factors"))
    value = fake(node)
    numbers: list[Any]
    if sizes is None:
        numbers = [float(factor) for factor in factors or ()]
    elif all(type(size) is int for size in sizes):
        numbers = list(sizes)
    else:
        numbers = _factors(fake(x).shape[2:], value.shape[2:])
    flag = [int(arguments["align_corners"])] if flags else []
    return ((x,), (*flag, *numbers), ()) if len(numbers) == value.ndim - 2 else None


def _factors(before: Shape, after: Shape) -> list[float]:
    """The factors of sizes that are known only at run time; none unless they are powers of two."""
    factors = []
    for old, new in zip(before, after, strict=True):
        same = [f for f in FACTORS if same_size(new, old * int(f))]
        factors += same[:1] or ([1.0] if same_size(new, old) else [])
    return factors


def _shape(axes: int, flags: int, shapes: Sequence[Shape], n: Numbers, count: int) -> Shape:
    x, rest = shapes[0], n[flags:]
    one_type = len({type(value) for value in rest}) == 1
    if len(x) != axes + 2 or len(rest) != axes or not one_type:
        raise BadInput(f"expected {axes} sizes or factors of an image or a signal, got {n!r:.80}")
    if any(flag not in (0, 1) for flag in n[:flags]) or not all(0 < v < inf for v in rest):
        raise BadInput(f"expected positive sizes or factors, after a flag, got {n!r:.80}")
    sizes = resized_sizes(x[2:], n, flags)
    if any(type(size) is int and not 1 <= size < LARGEST_SIZE for size in sizes):
        raise BadInput(f"expected new sizes of 1 to {LARGEST_SIZE - 1}, got {sizes}")
    return (*x[:2], *sizes)


def _resize(op: Any, axes: int, lowering: str, flags: int = 0) -> CalledOp:
    """The entry of an op. flags: whether it has `align_corners`."""
    return CalledOp(
        op,
        partial(_arguments, flags),
        (op,),
        partial(_match, flags),
        partial(_shape, axes, flags),
        lowering,
        numbers=axes + flags,
        reals=True,
        kinds=SPATIAL,
    )


#: name in the texts of programs -> the op
RESIZES: dict[str, CalledOp] = {
    "nearest": _resize(aten.upsample_nearest2d.vec, 2, MOVED),
    "nearest exact": _resize(aten._upsample_nearest_exact2d.vec, 2, MOVED),
    "nearest of a signal": _resize(aten.upsample_nearest1d.vec, 1, MOVED),
    "nearest exact of a signal": _resize(aten._upsample_nearest_exact1d.vec, 1, MOVED),
    "linear of a signal": _resize(aten.upsample_linear1d.vec, 1, RESIZED, 1),
    "bilinear": _resize(aten.upsample_bilinear2d.vec, 2, RESIZED, 1),
    "bicubic": _resize(aten.upsample_bicubic2d.vec, 2, RESIZED, 1),
}
