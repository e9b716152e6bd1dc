"""Selections of evenly spaced positions, rewritten as slices, and sums over blocks, as strided convolutions.

    max_pool(where(m, y, c), s)      == y[first::s]    one selected position per window; y >= c
    avg_pool(where(m, y, 0), s) * n  == y[first::s]    n: the divisor of windows
    relu(y)[::s] - relu(-y)[::s]     == y[::s]

Each rule is an identity. Pooling the numbers of positions determines which one a window selects;
ranges of values (`facts.ranges`) determine which may be dropped. Masks that multiply assume that
0 · x is 0.

    conv(space_to_depth(x, s), w)                     == conv(x, w over positions, stride s)
    sum over phases r of conv(x[r::s], w[r::s])       == conv(x, w, stride s)

Zero taps around a kernel are dropped, and evenly spaced taps become a dilation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from demask.facts.ranges import Range, compute_ranges
from demask.graph.queries import is_pointwise
from demask.graph.value import Value
from demask.ops import Relation, schema
from demask.ops.traits import (
    AVERAGE_POOLS,
    CONVOLUTIONS,
    DIVISIONS,
    MAX_POOLS,
    MULTIPLICATIONS,
    VIEW_OR_RESHAPE,
    WHERES,
)
from demask.rewrites.rule import Phase, case, rule
from demask.stride.strided_slices import (
    SHARED_SLICES,
    Progression,
    absorb_pad,
    absorb_slice,
    cut_of,
    cuts_of,
    insert_slices,
    merge_pads,
    root_of,
    slice_before_pad,
)

aten = torch.ops.aten
X = (2, 3, 6, 9)  # the shape of most cases


# --- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Masked:
    """value * scale where `keep`, `fill` elsewhere. keep: bool, the spatial shape."""

    value: Value
    keep: Tensor
    fill: float
    scale: float = 1.0


def _masked(x: Value, rank: int) -> _Masked | None:
    """A call as a mask over the last `rank` axes, the same for all images and channels; None if it
    is none."""
    masked = _select(x) or _product(x) or _through(x, rank)
    if masked is None:
        return None
    shape = masked.value.shape[-rank:]
    lead = masked.keep.shape[:-rank] if masked.keep.ndim > rank else ()
    if any(n != 1 for n in lead) or not all(isinstance(n, int) for n in shape):
        return None
    left = (1,) * (rank - masked.keep.ndim)
    keep = masked.keep.reshape(*left, *masked.keep.shape[max(masked.keep.ndim - rank, 0) :])
    if tuple(masked.value.shape) != tuple(x.shape):
        return None
    return _Masked(masked.value, keep.expand(shape), masked.fill, masked.scale)


def _select(x: Value) -> _Masked | None:
    """A selection by a constant mask, with a number at the other positions."""
    if x.calls(*WHERES):
        mask, yes, no = x.arguments.values()
    elif x.calls(aten.masked_fill.Scalar):
        no, mask, yes = x.arguments.values()
    else:
        return None
    keep = _constant(mask)
    if keep is None:
        return None
    for value, other, selected in ((yes, no, keep), (no, yes, ~keep)):
        fill = _scalar_value(other)
        if fill is not None and isinstance(value, Value) and value.constant is None:
            return _Masked(value, selected, fill)
    return None


def _through(x: Value, rank: int) -> _Masked | None:
    """A pointwise function of a masked value, as a mask of the function's value."""
    relation = x.relation if is_pointwise(x.node, x.editor.table) else None
    if not isinstance(relation, Relation) or len(relation.operands) != 1:
        return None
    name, source = relation.operands[0].name, Value(relation.operands[0].value, x.editor)
    masked = _masked(source, rank) if isinstance(source.node, fx.Node) else None
    if masked is None:
        return None
    fill = torch.tensor(masked.fill, dtype=masked.value.dtype)
    filled = float(schema.call_with(x.node, schema.arguments(x.node) | {name: fill}))
    return _Masked(x.like(**{name: _scaled(masked.value, masked.scale)}), masked.keep, filled)


def _product(x: Value) -> _Masked | None:
    """A product with a constant that has one nonzero number."""
    if not x.calls(aten.mul.Tensor):
        return None
    a, b = x.arguments.values()
    for value, other in ((a, b), (b, a)):
        mask = _constant(other)
        if mask is None or mask.numel() == 1 or not isinstance(value, Value):
            continue
        nonzero = mask[mask != 0]
        if nonzero.numel() and bool((nonzero == nonzero[0]).all()):
            return _Masked(value, mask != 0, 0.0, float(nonzero[0]))
    return None


def _constant(value: Any) -> Tensor | None:
    """The tensor of a value that is a constant or computed only from constants; else None."""
    if not isinstance(value, Value) or value.constant is not None:
        return value.constant if isinstance(value, Value) else None
    order: dict[fx.Node, None] = {}
    stack = [value.node]
    while stack:
        top = stack.pop()
        order.pop(top, None)
        order[top] = None
        if top.op not in ("call_function", "get_attr") or len(order) > 64:
            return None
        if not _is_small_and_static(top.meta.get("val")):
            return None
        stack += top.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for n in reversed(order):
        values[n] = value.editor.tensor(n) if n.op == "get_attr" else schema.call_on(n, values.__getitem__)
    return values[value.node]


def _is_small_and_static(value: Any) -> bool:
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in value.shape) and value.numel() <= 2**24


def _scalar_value(value: Any) -> float | None:
    """A number, or the element of a constant with one; else None."""
    tensor = _constant(value)
    if tensor is not None:
        return float(tensor.reshape(-1)[0]) if tensor.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _scaled(x: Value, factor: float) -> Value:
    return x if factor == 1 else x * factor


# --- pools ----------------------------------------------------------------------------------------


def _grid(x: Tensor, step: int = 3, value: float = 1.0) -> Tensor:
    """A mask of every s-th position of (6, 9)."""
    rows = [value * (i % step == 0 and j % step == 0) for i in range(6) for j in range(9)]
    return torch.tensor(rows, dtype=x.dtype).reshape(6, 9)


def _selected(x: Tensor, fill: float, step: int = 3) -> Tensor:
    return torch.where(_grid(x, step) > 0, x, fill)


@rule(
    *MAX_POOLS,
    cases=(
        case(lambda x: F.max_pool2d(x, 1, (2, 3)), X),
        case(lambda x: F.max_pool2d(_selected(x, -math.inf), 3), X, dynamic={0: (0,)}),
        case(lambda x: F.max_pool2d(_selected(x.relu(), 0.0), 3), X),
        case(lambda x: F.max_pool2d(x.sigmoid() * _grid(x, value=4.0), 3), X),
        case(lambda x: F.max_pool2d(x.masked_fill(_grid(x) == 0, -math.inf), 3), X),
        case(lambda x: F.max_pool2d(F.leaky_relu(_selected(x, -math.inf)), 3), X),
        case(lambda x: F.max_pool2d(_selected(x, -math.inf, 2), 2, ceil_mode=True), X),
    ),
    refused=(
        case(lambda x: F.max_pool2d(x, 3), X),
        case(lambda x: F.max_pool2d(x, 1, 3), X, dynamic={0: (2,)}),
        case(lambda x: F.max_pool2d(_selected(x, 0.0), 3), X),
        case(lambda x: F.max_pool2d(x.sigmoid() * _grid(x, value=-4.0), 3), X),
        case(lambda x: F.max_pool2d(_selected(x, -math.inf, 2), 3), X),
        case(lambda x, y: F.max_pool2d(torch.where(y > 0, x, -math.inf), 3), X, X),
        case(lambda x: F.max_pool2d(torch.where(_grid(x) > 0, x, -x - 9), 3), X),
        case(lambda x, y: F.max_pool2d(y * _selected(x, 0.0), 3), X, X),
        case(lambda x: F.max_pool2d(x.exp() * (_grid(x) + 2 * _grid(x, 2)), 3), X),
    ),
)
def max_pool_as_slices(out: Value, x: Value, *arguments: Any) -> Value | None:
    """A max pool whose windows select one position each is slices: the others are never larger."""
    masked, where = _select_per_window(out, x)
    if where is None or not (bool(masked.keep.all()) or _is_least(masked)):
        return None
    return _scaled(insert_slices(masked.value, where), masked.scale)


@rule(
    *AVERAGE_POOLS,
    cases=(
        case(lambda x: F.avg_pool2d(x * _grid(x), 3), X),
        case(lambda x: F.avg_pool2d(x * _grid(x, 2, 4.0), 2, ceil_mode=True, divisor_override=1), X),
    ),
    refused=(
        case(lambda x: F.avg_pool2d(x, 3), X),
        case(lambda x: F.avg_pool2d(_selected(x, 1.0), 3), X),
        case(lambda x: F.avg_pool2d(x * _grid(x, 2), 2, ceil_mode=True), X),
    ),
    exact=False,
)
def average_pool_as_slices(out: Value, x: Value, *arguments: Any) -> Value | None:
    """An average pool whose windows have one position each that is not zero is slices, divided."""
    masked, where = _select_per_window(out, x)
    if where is None or masked.fill:
        return None
    remaining = schema.arguments(out.node) | {"self": masked.keep[None, None].double()}
    shares = schema.call_with(out.node, remaining).unique()
    if len(shares) != 1:
        return None
    return _scaled(insert_slices(masked.value, where), masked.scale / round(1 / float(shares)))


def _select_per_window(pool: Value, x: Value) -> tuple[_Masked, list[Progression] | None]:
    """The operand of a pool as a mask, and the positions that its windows select, as a progression
    per axis; None unless each window selects one, evenly spaced."""
    arguments, rank = schema.arguments(pool.node), (MAX_POOLS | AVERAGE_POOLS)[pool.target]
    sizes = x.shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        return _Masked(x, torch.tensor(True), 0.0), None
    masked = _masked(x, rank) or _Masked(x, torch.ones(sizes, dtype=torch.bool), 0.0)
    keep, max_pool = masked.keep, getattr(F, f"max_pool{rank}d")
    args = arguments["kernel_size"], arguments["stride"] or None, arguments["padding"]
    more = {"ceil_mode": arguments["ceil_mode"], "dilation": arguments.get("dilation", 1)}
    numbers = torch.arange(1, keep.numel() + 1, dtype=torch.float64).view(keep.shape)
    last = max_pool(torch.where(keep, numbers, 0.0)[None, None], *args, **more)[0, 0]
    first = -max_pool(torch.where(keep, -numbers, -math.inf)[None, None], *args, **more)[0, 0]
    if not bool(((first == last) & (last > 0)).all()):
        return masked, None
    return masked, _evenly(torch.unravel_index((last - 1).long(), keep.shape))


def _evenly(coordinates: Sequence[Tensor]) -> list[Progression] | None:
    """Coordinates of an evenly spaced grid as a progression per axis; None for other coordinates.

    coordinates: one tensor per axis, of the grid's shape.
    """
    progressions: list[Progression] = []
    for axis, positions in enumerate(coordinates):
        line = positions.movedim(axis, 0).reshape(positions.shape[axis], -1)
        if not bool((line == line[:, :1]).all()):
            return None
        row = line[:, 0].tolist()
        steps = {b - a for a, b in itertools.pairwise(row)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            return None
        progressions.append((row[0], steps.pop() if steps else 1, len(row)))
    return progressions


def _is_least(masked: _Masked) -> bool:
    """Whether the fill of a mask is never larger than the values at other positions."""
    dtype = masked.value.dtype
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    if masked.fill == lowest:
        return True
    low, high = _range(masked.value)
    return min(low * masked.scale, high * masked.scale) >= masked.fill


def _range(x: Value) -> Range:
    editor = x.editor
    constants = {name: constant.tensor for name, constant in editor.constants.items()}
    return compute_ranges(editor.graph.nodes, constants, editor.table)[x.node]


@rule(
    aten.mean.dim,
    aten.adaptive_avg_pool2d.default,
    cases=(
        case(lambda x: (x * _grid(x)).mean((2, 3)), X),
        case(lambda x: F.adaptive_avg_pool2d(_selected(x, 0.0), 1), X),
    ),
    refused=(
        case(lambda x: x.mean((2, 3)), X),
        case(lambda x: (x * _grid(x)).mean((1, 2)), X),
        case(lambda x: (x * _grid(x)[0]).mean(()), (2, 9)),
        case(lambda x: F.adaptive_avg_pool2d(x * _grid(x), 3), X),
        case(lambda x: _selected(x, 1.0).mean((2, 3)), X),
        case(lambda x: (x * _grid(x, 1, 2.0)).mean((2, 3)), X),
        case(lambda x: (x * torch.tensor([1.0, 1, 0, 1, 0, 0], dtype=x.dtype)).mean((2,)), (2, 3, 6)),
        case(lambda x: (x * torch.tensor([[1.0, 0], [0, 1]], dtype=x.dtype)).mean((2, 3)), (2, 3, 2, 2)),
    ),
    exact=False,
)
def mean_of_slices(out: Value, x: Value, axes: list[int] | None, *arguments: Any) -> Value | None:
    """The mean of a value that is zero but at evenly spaced positions is the mean of slices, scaled."""
    rank, pools = x.rank - 2, out.calls(aten.adaptive_avg_pool2d.default)
    if pools and axes != [1, 1]:
        return None
    if rank < 1 or (not pools and sorted(axis % x.rank for axis in axes or ()) != [*range(2, x.rank)]):
        return None
    masked = _masked(x, rank)
    if masked is None or masked.fill or bool(masked.keep.all()):
        return None
    counts = [len(positions.unique()) for positions in masked.keep.nonzero().unbind(1)]
    count = int(masked.keep.sum())
    if math.prod(counts) != count:
        return None
    where = _evenly([positions.view(counts) for positions in masked.keep.nonzero().unbind(1)])
    if where is None:
        return None
    mean = out.like(self=insert_slices(masked.value, where))
    return _scaled(mean, masked.scale * count / masked.keep.numel())


# --- slices ---------------------------------------------------------------------------------------


@rule(
    aten.slice.Tensor,
    cases=(
        case(lambda x: _selected(x, 1.0)[:, :, ::3, ::3], X),
        case(lambda x: (x * _grid(x, value=2.0))[:, :, :1, 3::3], X),
    ),
    refused=(
        case(lambda x: x[:, :, ::3], X),
        case(lambda x: _selected(x, 1.0)[:, :, ::3], X),
        case(lambda x: _selected(x, 1.0)[:1, :, ::3, ::3], X),
        case(lambda x: torch.where(_grid(x)[0, :3] > 0, x, 1.0)[:, ::3], (2, 3)),
    ),
)
def slices_of_masked(out: Value, x: Value, *cut: Any) -> Value | None:
    """Slices of positions that a mask selects are slices of the value before the mask."""
    root, cuts = root_of(out), [cut_of(each) for each in cuts_of(out)]
    masked = _masked(root, root.rank - 2) if root.rank > 2 else None
    if masked is None or any(axis < 2 for axis, *_ in cuts):
        return None
    mask, value = masked.keep[None, None], masked.value
    for each in cuts:
        mask, value = aten.slice.Tensor(mask, *each), value.slice(*each)
    return _scaled(value, masked.scale) if bool(mask.all()) else None


# --- sums and factors -----------------------------------------------------------------------------


@rule(
    aten.sub.Tensor,
    cases=(
        case(lambda x: x.relu() - (-x).relu(), X),
        case(lambda x: x.relu()[:, :, ::2, ::3] - (x * -1.0).relu()[:, :, ::2, ::3], X),
    ),
    refused=(
        case(lambda x: torch.sub(x.relu(), (-x).relu(), alpha=2), X),
        case(lambda x: x.relu() - 1, X),
        case(lambda x: x.relu()[:, :, ::2] - (-x).relu()[:, :, 1::2], X),
        case(lambda x: x.relu() - F.relu6(-x), X),
        case(lambda x: x.relu() - (-2 * x).relu(), X),
        case(lambda x, y: x.relu() - (-y).relu(), X, X),
    ),
)
def halves(out: Value, a: Value, b: Any, alpha: Any) -> Value | None:
    """relu(x)[::s] - relu(-x)[::s] == x[::s]"""
    if alpha != 1 or not isinstance(b, Value):
        return None
    cuts, above, below = [cut_of(each) for each in cuts_of(a)], root_of(a), root_of(b)
    if cuts != [cut_of(each) for each in cuts_of(b)] or not (above.calls(RELU) and below.calls(RELU)):
        return None
    value = above.arg("self")
    if _factor(below.arg("self")) != (value, -1.0):
        return None
    for each in cuts:
        value = value.slice(*each)
    return value


RELU = aten.relu.default


def _factor(x: Value) -> tuple[Value, float]:
    """The value that a call multiplies by one number, and the number; 0 for other calls."""
    if x.calls(aten.neg.default):
        return x.arg("self"), -1.0
    if not x.calls(*MULTIPLICATIONS, *DIVISIONS):
        return x, 0.0
    a, b = x.arguments.values()
    divides = x.calls(*DIVISIONS)
    for value, other in ((a, b),) if divides else ((a, b), (b, a)):
        number = _scalar_value(other)
        if number is not None and isinstance(value, Value) and (number or not divides):
            return value, 1 / number if divides else number
    return x, 0.0


@rule(
    aten.neg.default,
    *MULTIPLICATIONS,
    *DIVISIONS,
    cases=(
        case(lambda x: x.neg().neg(), X),
        case(lambda x: x * 4 * 0.25, X),
        case(lambda x: (3.0 * x) / 3.0, X),
        case(lambda x: x * torch.tensor(5.0, dtype=x.dtype) / 5, X),
    ),
    refused=(
        case(lambda x, y: x * y, X, X),
        case(lambda x: x * 4, X),
        case(lambda x: x * 4 * 0.5, X),
        case(lambda x: x * 2 / 2, torch.tensor([1, 2])),
    ),
    exact=False,
)
def inverse_factors(out: Value, *operands: Any) -> Value | None:
    """Two consecutive factors whose product is 1 are none."""
    scaled, second = _factor(out)
    x, first = _factor(scaled)
    if not _are_inverse(first, second) or x.dtype != out.dtype:
        return None
    return x


def _are_inverse(a: float, b: float) -> bool:
    """Whether the product of two numbers is 1, up to the rounding of a quotient and products."""
    return math.isclose(a * b, 1, rel_tol=2.0**-50)


# --- sums over blocks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Strided:
    """A convolution of x with stride `step`, whose kernel begins `before` positions before x."""

    x: Value
    weight: Tensor
    step: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PhaseOfSum:
    """A convolution of every `step`-th position of x from `start` on. gaps: distance of its taps in x."""

    x: Value
    step: tuple[int, ...]
    start: tuple[int, ...]
    weight: Tensor
    gaps: tuple[int, ...]


def _blocked(x: Tensor, step: int = 2) -> Tensor:
    """Blocks of the image as channels, by views."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // step, step, w // step, step).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(n, c * step**2, h // step, w // step)


def _numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


def _on_blocks(rearrange: Any, weight: Tensor, **settings: Any) -> Any:
    return lambda x: F.conv2d(rearrange(x), weight, **settings)


_BLOCKS = _numbers(2, 12, 2, 1)
X8 = (2, 3, 8, 4)


@rule(
    *CONVOLUTIONS,
    cases=(
        case(_on_blocks(_blocked, _BLOCKS, bias=_numbers(2)), X8),
        case(_on_blocks(lambda x: F.pixel_unshuffle(x, 2), _BLOCKS), X8, dynamic={0: (0,)}),
        case(_on_blocks(lambda x: F.pixel_unshuffle(aten.constant_pad_nd(x, [1, 1, 2, 0]), 2), _BLOCKS), X8),
        case(_on_blocks(lambda x: F.pixel_unshuffle(aten.constant_pad_nd(x, [1, 1], 1.0), 2), _BLOCKS), X8),
    ),
    refused=(
        case(_on_blocks(lambda x: x, _numbers(2, 3, 1, 1)), X8),
        case(lambda x, w: F.conv2d(F.pixel_unshuffle(x, 2), w), X8, (2, 12, 1, 1)),
        case(_on_blocks(lambda x: F.pixel_unshuffle(x, 2), _BLOCKS, padding=1), X8),
        case(_on_blocks(lambda x: F.pixel_unshuffle(x, 2), _BLOCKS, stride=2), X8),
        case(_on_blocks(lambda x: F.pixel_unshuffle(x, 2), _BLOCKS, dilation=2), X8),
        case(_on_blocks(lambda x: F.pixel_unshuffle(x, 2), _BLOCKS), X8, dynamic={0: (2,)}),
    ),
    exact=False,
)
def blocks_as_stride(out: Value, x: Value, weight: Value, bias: Value | None, *settings: Any) -> Value | None:
    """A convolution of blocks that are channels is a strided convolution of the image."""
    taps, arguments = weight.constant, out.arguments
    if taps is None or _has_stride_padding_or_dilation(arguments):
        return None
    rank = taps.ndim - 2
    blocks = _blocks(x, rank)
    if blocks is None:
        return None
    image, step = blocks
    outer, inner = taps.shape[0], taps.shape[1] // math.prod(step)
    parts = taps.reshape(outer, inner, *step, *taps.shape[2:])
    spread = parts.permute(0, 1, *(n for k in range(rank) for n in (2 + rank + k, 2 + k)))
    dense = spread.reshape(outer, inner, *(n * s for n, s in zip(taps.shape[2:], step, strict=True)))
    return _strided_conv(out, _unpadded(_Strided(image, dense, step, (0,) * rank)), bias, out)


def _slice_phases(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum of convolutions of the phases of x, stride 2."""
    total = None
    for i, j in itertools.product((0, 1), (0, 1)):
        height, width = ((n - k - 2) // 2 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))
        taps = weight[:, :, i::2, j::2].contiguous()
        rows, columns = height + taps.shape[2], width + taps.shape[3]
        part = x[:, :, i : i + 2 * rows - 1 : 2, j : j + 2 * columns - 1 : 2]
        term = F.conv2d(part, taps, bias)
        total, bias = term if total is None else total + term, None
    assert total is not None
    return total


_TAPS, _SINGLE, X1 = _numbers(2, 3, 3, 3), _numbers(4, 4, 1), (3, 4, 8)


def _two_phases(first: slice, second: slice, bias: Tensor | None = None) -> Any:
    return lambda x: F.conv1d(x[..., first], _SINGLE, bias) + F.conv1d(x[..., second], _SINGLE, bias)


@rule(
    aten.add.Tensor,
    cases=(case(lambda x: _slice_phases(x, _TAPS), X), case(lambda x: _slice_phases(x, _TAPS, _numbers(2)), X)),
    refused=(
        case(lambda x, y: x + y, X, X),
        case(lambda x, y: F.conv1d(x[..., 0:7:2], _SINGLE) + y, X1, (3, 4, 4)),
        case(_two_phases(slice(0, 7, 2), slice(1, 8, 2), bias=_numbers(4)), X1),
        case(_two_phases(slice(0, 7, 2), slice(0, 7, 2)), X1),
        case(_two_phases(slice(0, 7, 1), slice(1, 8, 1)), X1),
        case(_two_phases(slice(0, 5, 2), slice(1, 8, 3)), X1),
        case(_two_phases(slice(0, 1, 2), slice(1, 8, 2)), X1),
        case(lambda x, y: F.conv1d(x[..., 0:7:2], _SINGLE) + F.conv1d(y[..., 1:8:2], _SINGLE), X1, X1),
    ),
    exact=False,
)
def phases_as_stride(out: Value, *operands: Any) -> Value | None:
    """A sum of convolutions of the phases of an image is a strided convolution of it."""
    addends = [] if _is_part_of_sum(out) else list(_addends(out))
    phases = [phase for addend in addends if (phase := _phase_of(addend)) is not None]
    if not phases or len(phases) < len(addends) or not all(addend.is_shaped(out) for addend in addends):
        return None
    first = phases[0]
    rank = len(first.step)
    reach = [max(p.start[k] + (p.weight.shape[2 + k] - 1) * p.gaps[k] for p in phases) + 1 for k in range(rank)]
    dense = first.weight.new_zeros(*first.weight.shape[:2], *reach)
    for each in phases:
        if each.x != first.x or each.step != first.step:
            return None
        spans = zip(each.start, each.weight.shape[2:], each.gaps, strict=True)
        taps = (slice(None), slice(None), *(slice(a, a + (n - 1) * d + 1, d) for a, n, d in spans))
        if bool(dense[taps].any()):
            return None
        dense[taps] = each.weight
    biases = [bias for conv in addends if (bias := conv.arg("bias")) is not None]
    if len(biases) > 1 or set(first.step) == {1}:
        return None
    strided = _unpadded(_Strided(first.x, dense, first.step, (0,) * rank))
    return _strided_conv(out, strided, biases[0] if biases else None, addends[0])


def _is_part_of_sum(out: Value) -> bool:
    """Whether the only reader of a sum is a sum of phases as well, which is to be replaced as one."""
    reader = out.users[0]
    sums = len(out.users) == 1 and reader.calls(aten.add.Tensor)
    return sums and all(_phase_of(addend) is not None for addend in _addends(reader))


def _addends(total: Value) -> Iterator[Any]:
    """The addends of a tree of sums whose inner sums have no other readers."""
    stack: list[Any] = [total]
    while stack:
        top = stack.pop()
        inner = isinstance(top, Value) and (top == total or len(top.users) == 1)
        if inner and top.calls(aten.add.Tensor) and top.arg("alpha") == 1:
            stack += [top.arg("other"), top.arg("self")]
        else:
            yield top


def _phase_of(conv: Any) -> _PhaseOfSum | None:
    """A convolution of a phase; None for others."""
    if not isinstance(conv, Value) or not conv.calls(*CONVOLUTIONS):
        return None
    arguments = conv.arguments
    weight = arguments["weight"].constant
    if weight is None or set(arguments["stride"]) != {1} or any(arguments["padding"]):
        return None
    rank = weight.ndim - 2
    start, step, x = [0] * rank, [1] * rank, arguments["input"]
    while x.calls(aten.slice.Tensor):
        x, dim, first, _, every = x.arguments.values()
        axis = dim % x.rank - (x.rank - rank)
        if axis < 0 or not isinstance(first, int) or step[axis] != 1:
            return None
        start[axis], step[axis] = first, every
    dilation = list(arguments["dilation"]) * (rank if len(arguments["dilation"]) == 1 else 1)
    gaps = tuple(d * s for d, s in zip(dilation, step, strict=True))
    return _PhaseOfSum(x, tuple(step), tuple(start), weight, gaps)


def _has_stride_padding_or_dilation(arguments: Any) -> bool:
    return any(n != 1 for n in (*arguments["stride"], *arguments["dilation"])) or any(arguments["padding"])


def _blocks(x: Value, rank: int) -> tuple[Value, tuple[int, ...]] | None:
    """The value before a rearrangement of blocks into channels, and the block sizes; None for
    other values."""
    if x.calls(aten.pixel_unshuffle.default) and rank == 2:
        return x.arg("self"), (x.arg("downscale_factor"),) * 2
    permuted = x.arg("self") if x.calls(*VIEW_OR_RESHAPE) else x
    parted = permuted.arg("self") if permuted.calls(aten.permute.default) else x
    if not parted.calls(*VIEW_OR_RESHAPE) or parted == x:
        return None
    image = parted.arg("self")
    shape, wide, output = image.shape, parted.shape, x.shape
    lead = len(shape) - rank
    if lead < 1 or len(wide) != len(shape) + rank:
        return None
    steps = tuple(int(wide[lead + 1 + 2 * k]) for k in range(rank))
    whole = all(wide[lead + 2 * k] * steps[k] == shape[lead + k] for k in range(rank))
    order = [*range(lead), *range(lead + 1, lead + 2 * rank, 2), *range(lead, lead + 2 * rank, 2)]
    blocked = all(output[lead + k] == wide[lead + 2 * k] for k in range(rank))
    right = whole and blocked and list(permuted.arg("dims")) == order
    return (image, steps) if right and output[lead - 1] == shape[lead - 1] * math.prod(steps) else None


def _unpadded(strided: _Strided) -> _Strided:
    """A convolution without a pad before it: the kernel begins before the input instead."""
    x, rank = strided.x, len(strided.step)
    if not x.calls(aten.constant_pad_nd.default) or x.arg("value"):
        return strided
    pads = list(x.arg("pad"))
    if len(pads) > 2 * rank or not all(isinstance(n, int) for n in pads):
        return strided
    before = (*[0] * (rank - len(pads) // 2), *pads[-2::-2])
    return _Strided(x.arg("self"), strided.weight, strided.step, before)


def _strided_conv(out: Value, strided: _Strided, bias: Any, like: Value) -> Value | None:
    """The convolution as a call, its kernel without zeros around it. like: the convolution whose
    op, groups and name of the weight it gets."""
    rank, weight = len(strided.step), strided.weight
    first, dilation, sizes = [], [], strided.x.shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        return None
    for k in range(rank):
        taps = (weight != 0).any([axis for axis in range(weight.ndim) if axis != 2 + k])
        positions = taps.nonzero().flatten().tolist() or [0]
        gap = math.gcd(*(p - positions[0] for p in positions)) or 1
        weight = weight.index_select(2 + k, torch.arange(positions[0], positions[-1] + 1, gap))
        first.append(positions[0])
        dilation.append(gap)
    before = [b - a for a, b in zip(first, strided.before, strict=True)]
    windows = [int(n) for n in out.shape[-rank:]]
    reach = [d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
    axes = list(zip(windows, strided.step, reach, sizes, before, strict=True))
    x, padding = strided.x, before
    if not all(b >= 0 and (n + 2 * b - r - 1) // s + 1 == o for o, s, r, n, b in axes):
        pads = [(b, (o - 1) * s + r + 1 - n - b) for o, s, r, n, b in axes]
        x, padding = x.pad([n for pair in reversed(pads) for n in pair], 0), [0] * rank
    editor = out.editor
    name = editor.constants[like.arg("weight").target].name
    read = Value(editor.add_constant(name, weight, out.node, parameter=True), editor)
    return out.call(like.target, x, read, bias, list(strided.step), padding, dilation, like.arg("groups"))


SUBSAMPLING_AS_SLICES = Phase(
    "subsampling as slices",
    (
        max_pool_as_slices,
        average_pool_as_slices,
        mean_of_slices,
        slices_of_masked,
        halves,
        inverse_factors,
        slice_before_pad,
        absorb_pad,
        merge_pads,
        absorb_slice,
        blocks_as_stride,
        phases_as_stride,
        SHARED_SLICES,
    ),
    repeat=True,
)

__all__ = ["SUBSAMPLING_AS_SLICES"]
