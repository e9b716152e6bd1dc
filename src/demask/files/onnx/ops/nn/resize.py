"""ONNX's Resize and Upsample: `F.interpolate` where that is equal, otherwise axis by axis.

Along an axis each output is a weighted sum of a few inputs ("taps"). Their positions and weights
follow from sizes and attributes, and are computed in numpy, or in torch if a size is symbolic; `xp`
is one of these modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demask.compat.symbolic_shapes import guard_or_true, require, statically_known_true
from demask.errors import BadInput
from demask.files.onnx.op_functions import Floats, Ints, Ops
from demask.files.onnx.values import SYMBOLIC

OPS = Ops()
MAX_SIZE = 2**24  # positions on an axis, as each is computed before torch could refuse the size
MAX_MATRIX = 2**27

_HALF = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
_COORDINATES = (*_HALF, "align_corners", "asymmetric", "tf_half_pixel_for_nn", "tf_crop_and_resize")
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
_ROUND: dict[str, Callable[[Any, Any], Any]] = {
    "round_prefer_floor": lambda xp, x: xp.ceil(x - 0.5),
    "round_prefer_ceil": lambda xp, x: xp.floor(x + 0.5),
    "floor": lambda xp, x: xp.floor(x),
    "ceil": lambda xp, x: xp.ceil(x),
}


@dataclass(frozen=True, slots=True)
class ResizeAxis:
    """The resize of one axis: sizes before and after, their ratio in the file, and the limits of
    the part that is used (0 to 1, unless it is cropped)."""

    index: int
    size: Any
    new: Any
    scale: Any
    limits: tuple[Any, Any] = (0.0, 1.0)

    @property
    def symbolic(self) -> bool:
        """Whether a size is symbolic."""
        return any(isinstance(n, SYMBOLIC) for n in (self.size, self.new, self.scale))

    @property
    def even(self) -> bool:
        """Whether the scale is exactly the ratio of the sizes."""
        return self.symbolic or self.size * self.scale == self.new


@dataclass(frozen=True, slots=True)
class ResizeAttributes:
    """The attributes of a resize."""

    mode: str
    coordinates: str
    nearest: str
    a: float = -0.75
    outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


@OPS("Resize")
def resize(
    x: Tensor,
    roi: Floats | None = None,
    scales: Floats | None = None,
    sizes: Ints | None = None,
    *,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    version: int,
) -> Tensor:
    """x resized by scales or to sizes."""
    if version < 11:
        return upsample(x, roi or [], mode=mode)
    kind = ResizeAttributes(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )
    indices = [n % x.ndim for n in (range(x.ndim) if axes is None else axes)]
    count = len(scales or sizes or [])
    if bool(scales) == bool(sizes) or count != len(indices):
        raise BadInput(f"expected {len(indices)} scales or as many sizes, got {count}")
    is_uncropped = kind.coordinates != "tf_crop_and_resize"
    limits = _roi_limits([0.0] * count + [1.0] * count if is_uncropped else roi or [], count)
    if scales:
        ratios = [_scale_as_fraction(s) for s in scales]
        new = [_scaled_size(x.shape[k], ratio) for k, ratio in zip(indices, ratios, strict=True)]
    else:
        new, ratios = _sizes_by_policy([x.shape[k] for k in indices], sizes or [], keep_aspect_ratio_policy)
    resized_axes = [ResizeAxis(k, x.shape[k], *rest) for k, *rest in zip(indices, new, ratios, limits, strict=True)]
    return _resize_axes(x, resized_axes, kind)


def _roi_limits(roi: list[Any], axes: int) -> list[tuple[Any, Any]]:
    if len(roi) != 2 * axes:
        raise BadInput(f"expected a roi of {2 * axes} numbers, got {len(roi)}")
    return list(zip(roi[:axes], roi[axes:], strict=True))


@OPS("Upsample")
def upsample(x: Tensor, scales: Floats, *, mode: str = "nearest") -> Tensor:
    """x with sizes multiplied by scales; also Resize before opset 11."""
    if len(scales) != x.ndim:
        raise BadInput(f"expected {x.ndim} scales, got {len(scales)}")
    mode = {"bilinear": "linear"}.get(mode, mode)
    if mode not in ("nearest", "linear"):
        raise BadInput(f"expected mode nearest or linear, got {mode!r}")
    resized_axes = [
        ResizeAxis(k, x.shape[k], _scaled_size(x.shape[k], _scale_as_fraction(s)), _scale_as_fraction(s))
        for k, s in enumerate(scales)
    ]
    smaller = [a for a in resized_axes if not isinstance(a.scale, SYMBOLIC) and a.scale < 1]
    larger = [a for a in resized_axes if a not in smaller]
    # ceil, as in onnxruntime and in the tests of opset 10
    x = _resize_axes(x, smaller, ResizeAttributes(mode, "asymmetric", "ceil"))
    return _resize_axes(x, larger, ResizeAttributes(mode, "asymmetric", "floor"))


def _scale_as_fraction(scale: Any) -> Any:
    """A float32 scale as the fraction that it was rounded from: 3/5 for 0.60000002."""
    if isinstance(scale, SYMBOLIC):
        return scale
    if scale <= 0:
        raise BadInput(f"expected scales above 0, got {scale}")
    near = Fraction(scale).limit_denominator(1000)
    return near if np.float32(float(near)) == np.float32(scale) else Fraction(scale)


def _scaled_size(size: Any, scale: Any) -> Any:
    # also for crops, as in onnxruntime and in ONNX's shape inference, against ONNX's text
    if isinstance(scale, SYMBOLIC):
        return math.floor(size * scale)
    return size * scale.numerator // scale.denominator


def _sizes_by_policy(sizes: list[Any], wanted: list[Any], policy: str) -> tuple[list[Any], list[Any]]:
    """New sizes and scales for the `wanted` sizes of the file."""
    if policy == "stretch":
        return wanted, [_size_ratio(new, old) for new, old in zip(wanted, sizes, strict=True)]
    if policy not in ("not_larger", "not_smaller"):
        raise BadInput(f"expected policy stretch, not_larger or not_smaller, got {policy!r}")
    ratios = [_size_ratio(new, old) for new, old in zip(wanted, sizes, strict=True)]
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(scale * n + Fraction(1, 2)) for n in sizes], [scale] * len(sizes)


def _size_ratio(new: Any, old: Any) -> Any:
    return Fraction(new, old) if isinstance(new, int) and isinstance(old, int) else new / old


def _resize_axes(x: Tensor, axes: list[ResizeAxis], kind: ResizeAttributes) -> Tensor:
    _check_attributes(kind)
    axes = [a for a in axes if not _is_unchanged(a)]
    if not axes:
        return x
    for axis in axes:
        if isinstance(axis.new, int) and axis.new > MAX_SIZE:
            raise BadInput(f"expected at most {MAX_SIZE} positions on axis {axis.index}, got {axis.new}")
    at_once = _at_once(x, axes, kind)
    if at_once is not None:
        return at_once
    if kind.mode == "nearest":
        for axis in axes:
            x = _select_nearest(x, axis, kind)
        return x
    result = x if x.is_floating_point() else x.to(torch.float64)
    for axis in axes:
        result = _interpolate_axis(result, axis, kind)
    if x.is_floating_point():
        return result
    limits = torch.iinfo(x.dtype)
    return result.round().clamp(limits.min, limits.max).to(x.dtype)


def _check_attributes(kind: ResizeAttributes) -> None:
    for name, value, allowed in (
        ("mode", kind.mode, ("nearest", "linear", "cubic")),
        ("coordinate_transformation_mode", kind.coordinates, _COORDINATES),
        ("nearest_mode", kind.nearest, tuple(_ROUND)),
    ):
        if value not in allowed:
            raise BadInput(f"expected {name} {' or '.join(allowed)}, got {value!r}")
    if kind.antialias and kind.mode == "nearest":
        raise BadInput("expected no antialias in mode nearest")


def _is_unchanged(axis: ResizeAxis) -> bool:
    """Whether the axis does not change."""
    if axis.limits != (0.0, 1.0):
        return False
    if not isinstance(axis.scale, SYMBOLIC):
        return axis.scale == 1
    if axis.index > 1:
        return statically_known_true(axis.size == axis.new)
    # samples and channels are not resized: two sizes that are equal in the example always are
    if not guard_or_true(axis.size == axis.new):
        return False
    require(axis.size == axis.new)
    return True


def _at_once(x: Tensor, axes: list[ResizeAxis], kind: ResizeAttributes) -> Tensor | None:
    """The result of one call of F.interpolate; None where it is not equal."""
    if not 3 <= x.ndim <= 5 or not x.is_floating_point() or x.dtype.itemsize < 2:
        return None
    if any(a.index < 2 or not (a.even or _scaled_size(a.size, a.scale) == a.new) for a in axes):
        return None
    if kind.mode == "nearest":
        mode_sets = [_nearest_mode(a, kind) for a in axes]
        modes = set.intersection(*mode_sets)
        return _interpolate(x, axes, min(modes, key=len), None) if modes else None
    cubic = kind.mode == "cubic"
    if kind.antialias or (cubic and (x.ndim != 4 or kind.a != -0.75 or kind.outside)):
        return None
    corners = kind.coordinates == "align_corners"
    if not corners and kind.coordinates not in _HALF:
        return None
    uneven = kind.coordinates == "half_pixel_symmetric" or corners
    is_pytorch = kind.coordinates == "pytorch_half_pixel"
    if any((uneven and not a.even) or (is_pytorch and _is_one(a.new)) for a in axes):
        return None
    return _interpolate(x, axes, "bicubic" if cubic else _LINEAR[x.ndim], corners)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _interpolate(x: Tensor, axes: list[ResizeAxis], mode: str, corners: bool | None) -> Tensor:
    by_scale = all(isinstance(a.scale, Fraction) for a in axes) and any(a.symbolic or not a.even for a in axes)
    spatial = {a.index: a for a in axes}
    if by_scale:
        scales = [_rounded_up_scale(spatial[k].scale) if k in spatial else 1.0 for k in range(2, x.ndim)]
        return F.interpolate(x, scale_factor=scales, mode=mode, align_corners=corners)
    sizes = [spatial[k].new if k in spatial else x.shape[k] for k in range(2, x.ndim)]
    return F.interpolate(x, size=sizes, mode=mode, align_corners=corners)


def _rounded_up_scale(scale: Fraction) -> float:
    """A scale for torch, slightly larger if no float is exact: 100 * 0.29 < 29 would round the size
    down to 28."""
    near = float(scale)
    return near if Fraction(near) == scale else near * (1 + 2.0**-40)


def _nearest_mode(axis: ResizeAxis, kind: ResizeAttributes) -> set[str]:
    """The modes of F.interpolate that select the same positions."""
    if not axis.symbolic:
        # as torch computes it, in float32
        wanted, last = _nearest_positions(axis, kind), axis.size - 1
        step = np.float32(axis.size / axis.new if axis.even else 1 / axis.scale)
        positions = np.arange(axis.new, dtype=np.float32)
        candidates = {"nearest": positions * step, "nearest-exact": (positions + np.float32(0.5)) * step}
        return {
            name
            for name, coordinates in candidates.items()
            if np.array_equal(np.minimum(np.floor(coordinates), last), wanted)
        }
    if kind.coordinates == "asymmetric" and kind.nearest == "floor":
        return {"nearest"}
    is_multiple = isinstance(axis.scale, Fraction) and axis.scale.denominator == 1
    if is_multiple and kind.coordinates in _HALF and kind.nearest.startswith("round"):
        return {"nearest", "nearest-exact"}
    is_doubled = is_multiple and axis.scale == 2 and kind.coordinates == "asymmetric"
    if is_doubled and kind.nearest == "round_prefer_floor":
        return {"nearest"}
    is_exact = kind.coordinates in _HALF and kind.nearest == "round_prefer_ceil"
    return {"nearest-exact"} if is_exact else set()


def _array_module(axis: ResizeAxis) -> Any:
    return torch if axis.symbolic else np


def _old_coordinates(axis: ResizeAxis, kind: ResizeAttributes) -> Any:
    """Coordinate on the old axis of each position of the new axis."""
    xp, size, new = _array_module(axis), axis.size, axis.new
    scale = axis.scale if isinstance(axis.scale, SYMBOLIC) else float(axis.scale)
    positions = xp.arange(new, dtype=xp.float64)
    width = new if axis.even else size * scale
    if kind.coordinates == "asymmetric":
        return positions / scale
    if kind.coordinates == "tf_half_pixel_for_nn":
        return (positions + 0.5) / scale
    if kind.coordinates == "align_corners":
        return positions * 0 if _is_one(width) else positions * (size - 1) / (width - 1)
    if kind.coordinates == "tf_crop_and_resize":
        start, end = axis.limits
        if _is_one(new):
            return positions * 0 + 0.5 * (start + end) * (size - 1)
        return positions * ((end - start) * (size - 1) / (width - 1)) + start * (size - 1)
    if kind.coordinates == "pytorch_half_pixel" and _is_one(new):
        return positions * 0
    offset = 0.0
    if kind.coordinates == "half_pixel_symmetric" and not axis.even:
        offset = size / 2 * (1 - new / width)
    return offset + (positions + 0.5) / scale - 0.5


def _nearest_positions(axis: ResizeAxis, kind: ResizeAttributes) -> Any:
    """The nearest position on the old axis of each position of the new axis."""
    xp = _array_module(axis)
    return xp.clip(_ROUND[kind.nearest](xp, _old_coordinates(axis, kind)), 0, axis.size - 1)


def _as_tensor_like(array: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(array, Tensor):
        return array.to(like.device, dtype)
    return torch.tensor(array.tolist(), dtype=dtype, device=like.device)


def _select_nearest(x: Tensor, axis: ResizeAxis, kind: ResizeAttributes) -> Tensor:
    positions = _as_tensor_like(_nearest_positions(axis, kind), x, torch.int64)
    return _extrapolate(x.index_select(axis.index, positions), axis, kind)


def _extrapolate(x: Tensor, axis: ResizeAxis, kind: ResizeAttributes) -> Tensor:
    """x with the extrapolation value where a crop extends beyond the axis."""
    if kind.coordinates != "tf_crop_and_resize":
        return x
    origin = _old_coordinates(axis, kind)
    beyond = (origin < 0) | (origin > axis.size - 1)
    if not axis.symbolic and not beyond.any():
        return x
    mask = _as_tensor_like(beyond, x, torch.bool).reshape([-1] + [1] * (x.ndim - 1 - axis.index))
    return x.masked_fill(mask, kind.extrapolation)


def _tap_positions(axis: ResizeAxis, kind: ResizeAttributes) -> tuple[Any, Any]:
    """Positions on the old axis and their weights, each [new size, taps]."""
    xp, reach = _array_module(axis), {"linear": 1, "cubic": 2}[kind.mode]
    shrink = min(axis.scale, 1) if kind.antialias else 1
    first = math.floor(-reach / shrink) + 1
    origin = _old_coordinates(axis, kind)
    left = xp.ceil(origin) - 1
    offsets = xp.arange(first, 2 - first, dtype=xp.float64)
    weights = _tap_weights(xp, (offsets - (origin - left)[:, None]) * float(shrink), kind)
    if kind.antialias:
        weights = weights / weights.sum(-1)[:, None]
    positions = left[:, None] + offsets
    if kind.outside:
        weights = xp.where((positions < 0) | (positions > axis.size - 1), 0.0, weights)
        totals = weights.sum(-1)[:, None]
        weights = weights / xp.where(totals == 0, 1.0, totals)
    return xp.clip(positions, 0, axis.size - 1), weights


def _tap_weights(xp: Any, distance: Any, kind: ResizeAttributes) -> Any:
    """The interpolation kernel at some distances."""
    x = xp.abs(distance)
    if kind.mode == "linear":
        return xp.clip(1 - x, 0, 1)
    a = kind.a
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return xp.where(x <= 1, near, xp.where(x < 2, far, 0.0))


def _interpolate_axis(x: Tensor, axis: ResizeAxis, kind: ResizeAttributes) -> Tensor:
    """x with one axis resized: each position is a weighted sum of its taps."""
    positions, weights = _tap_positions(axis, kind)
    count = weights.shape[1]
    if count > 4 and not axis.symbolic:
        return _extrapolate(_matrix_product(x, axis, positions, weights), axis, kind)
    shape = [-1] + [1] * (x.ndim - 1 - axis.index)
    parts = [
        x.index_select(axis.index, _as_tensor_like(positions[:, k], x, torch.int64))
        * _as_tensor_like(weights[:, k], x, x.dtype).reshape(shape)
        for k in range(count)
    ]
    return _extrapolate(sum(parts[1:], parts[0]), axis, kind)


def _matrix_product(x: Tensor, axis: ResizeAxis, positions: np.ndarray, weights: np.ndarray) -> Tensor:
    """x times a matrix of the weights, which is faster than many taps."""
    if axis.new * axis.size > MAX_MATRIX:
        raise BadInput(f"a resize from {axis.size} to {axis.new} positions is too large for demask")
    matrix = np.zeros((axis.new, axis.size))
    np.add.at(matrix, (np.arange(axis.new)[:, None], positions.astype(np.int64)), weights)
    weight = _as_tensor_like(matrix, x, x.dtype)
    if axis.index == x.ndim - 2:
        return weight @ x
    return F.linear(x.movedim(axis.index, -1), weight).movedim(-1, axis.index)
