"""ONNX ops over windows of each channel: pooling, unpooling, local response norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ints, Ops
from demask.files.onnx.ops.nn.linear import is_even, padded, padding_of, windows
from demask.files.onnx.values import product

OPS = Ops()
_MAX = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_MEAN = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
_WHOLE_MEAN = {1: functional.adaptive_avg_pool1d, 2: functional.adaptive_avg_pool2d, 3: functional.adaptive_avg_pool3d}
_SUMS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """Windows over the last axes of a tensor. before, after: padding. ceil: round counts up."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    ceil: bool

    @classmethod
    def of(
        cls,
        x: Tensor,
        kernel_shape: Sequence[int],
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
        auto_pad: str,
        ceil_mode: int,
    ) -> PoolWindow:
        """The windows of a node's attributes."""
        axes = windows(x.ndim, kernel_shape, None)
        stride, dilation = list(strides or (1,) * axes), list(dilations or (1,) * axes)
        before, after = padding_of(x.shape[2:], kernel_shape, stride, dilation, pads, auto_pad)
        ceil = bool(ceil_mode) and not auto_pad.startswith("SAME")
        return cls(list(kernel_shape), stride, dilation, before, after, ceil)

    @property
    def spans(self) -> list[int]:
        """Extent of a window along each axis."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    def even(self, sizes: Sequence[int]) -> PoolWindow | None:
        """Equal windows that torch's pools support: equal padding on both sides, at most half a
        window, and windows beyond the end only if rounded up. None if there are none."""
        known = all(isinstance(n, int) for n in self.before)
        if not known or any(2 * b > n for b, n in zip(self.before, self.spans, strict=True)):
            return None
        if is_even(self.before, self.after):
            return self
        if not all(isinstance(n, int) for n in (*self.after, *sizes)):
            return None
        candidates = [replace(self, after=self.before, ceil=ceil) for ceil in (False, True)]
        counts = self.counts(sizes)
        return next((candidate for candidate in candidates if candidate.counts(sizes) == counts), None)

    def covered(self, sizes: Sequence[int]) -> PoolWindow:
        """The windows with the padding that they read, so that no count is rounded up."""
        if not self.ceil:
            return self
        reach = [(n - 1) * s for n, s in zip(self.counts(sizes), self.stride, strict=True)]
        after = [m + span - n - b for m, span, n, b in zip(reach, self.spans, sizes, self.before, strict=True)]
        return replace(self, after=after, ceil=False)

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Number of windows along each axis; none starts in the padding after."""
        counts = []
        for k, size in enumerate(sizes):
            stride, first = self.stride[k], size + self.before[k]
            rest = first + self.after[k] - self.spans[k]
            up = torch.sym_min(-(-rest // stride) + 1, -(-first // stride)) if self.ceil else 0
            counts.append(up if self.ceil else rest // stride + 1)
        return counts


@OPS("MaxPool")
def max_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
    outputs: int,
) -> Any:
    """The maximum of each window; as a second output its flat index in x."""
    window = PoolWindow.of(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    wide = x if x.is_floating_point() else x.float()  # torch: no 1-d kernel for 8 bits
    even, shift = window.even(x.shape[2:]), [0] * len(kernel_shape)
    if even is None:
        even = window.covered(x.shape[2:])
        wide, shift = padded(wide, even.before, even.after, -torch.inf), even.before
        even = replace(even, before=[0] * len(shift))
    call = (even.kernel, even.stride, even.before, even.dilation, even.ceil)
    pool = _MAX[x.ndim - 2]
    if outputs == 1:
        return pool(wide, *call).to(x.dtype)
    values, indices = pool(wide, *call, return_indices=True)
    return values.to(x.dtype), _flat_indices(_unravel_positions(indices, wide.shape[2:], shift), x.shape, storage_order)


def _unravel_positions(indices: Tensor, sizes: Sequence[int], before: Sequence[int]) -> list[Tensor]:
    """Per axis the positions of flat indices into padded planes, without the padding."""
    positions = []
    for size, pad in zip(reversed(sizes), reversed(before), strict=True):
        positions.append(indices % size - pad)
        indices = indices // size
    return positions[::-1]


def _flat_indices(positions: list[Tensor], shape: Sequence[int], storage_order: int) -> Tensor:
    """Flat indices into x; in storage order 1 the first axis of a plane is innermost."""
    planes, channels, sizes = shape[0], shape[1], list(shape[2:])
    pairs = list(zip(positions, sizes, strict=True))
    flat = torch.zeros_like(positions[0])
    for position, size in reversed(pairs) if storage_order else pairs:
        flat = flat * size + position
    plane = torch.arange(planes * channels, device=flat.device) * product(sizes)
    return flat + plane.reshape(planes, channels, *[1] * len(sizes))


@OPS("AveragePool")
def average_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The mean of each window, over x or (`count_include_pad`) also its padding."""
    window = PoolWindow.of(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    wide = x.float() if x.dtype in _HALVES and x.ndim == 5 else x
    even = window.even(x.shape[2:])
    # If padding counts, torch only counts its own padding.
    if even is not None and set(window.dilation) == {1} and not (count_include_pad and even is not window):
        result = _MEAN[x.ndim - 2](wide, even.kernel, even.stride, even.before, even.ceil, bool(count_include_pad))
        return result.to(x.dtype)
    exact = window.covered(x.shape[2:])
    more = [n - m for n, m in zip(exact.after, window.after, strict=True)]
    ones = padded(wide.new_ones(1, 1, *x.shape[2:]), window.before, window.after, float(bool(count_include_pad)))
    shares = _window_means(padded(ones, [0] * len(more), more), exact)
    return (_window_means(padded(wide, exact.before, exact.after), exact) / shares).to(x.dtype)


def _window_means(x: Tensor, window: PoolWindow) -> Tensor:
    """The mean of each window of x, which is already padded."""
    axes, window_size = x.ndim - 2, product(window.kernel)
    if set(window.dilation) == {1}:
        return _MEAN[axes](x, window.kernel, window.stride)
    weight = x.new_full((1, 1, *window.kernel), 1 / window_size).expand(x.shape[1], 1, *window.kernel)
    return _SUMS[axes](x, weight, None, window.stride, 0, window.dilation, x.shape[1])


@OPS("LpPool")
def lp_pool(
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: float = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The p-norm of each window."""
    window = PoolWindow.of(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
    window, wide = window.covered(x.shape[2:]), x.float() if x.dtype in _HALVES else x
    powers = padded(wide.abs().pow(p), window.before, window.after)
    return (_window_means(powers, window) * product(window.kernel)).pow(1 / p).to(x.dtype)


def _spatial_axes(x: Tensor) -> list[int]:
    return list(range(2, x.ndim))


@OPS("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel."""
    if x.ndim - 2 not in _WHOLE_MEAN:
        return x.mean(_spatial_axes(x), keepdim=True)
    return _WHOLE_MEAN[x.ndim - 2](x, 1)


OPS("GlobalMaxPool")(lambda x: x.amax(_spatial_axes(x), keepdim=True))
OPS("GlobalLpPool")(lambda x, *, p=2: torch.linalg.vector_norm(x, p, _spatial_axes(x), keepdim=True))


@OPS("MaxUnpool")
def max_unpool(
    x: Tensor,
    indices: Tensor,
    output_shape: Ints | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Zeros with the values of x at flat indices into the tensor that was pooled. A larger
    `output_shape` appends zeros."""
    axes = windows(x.ndim, kernel_shape, None)
    stride, pads = strides or (1,) * axes, pads or (0,) * 2 * axes
    sizes = [
        (n - 1) * s + k - pads[i] - pads[axes + i]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], stride, kernel_shape, strict=True))
    ]
    shape = [*x.shape[:2], *sizes]
    flat = x.new_zeros(product(shape)).scatter(0, indices.reshape(-1), x.reshape(-1))
    result = flat.reshape(shape)
    if output_shape is None:
        return result
    if len(output_shape) != x.ndim:
        raise BadInput(f"expected {x.ndim} sizes in output_shape, got {len(output_shape)}")
    more = [n - m for n, m in zip(output_shape[2:], sizes, strict=True)]
    return padded(result, [0] * axes, more)


@OPS("LRN")
def local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """x divided by a power of the mean square of its channel and neighboring channels."""
    planes = x.square().reshape(x.shape[0], 1, x.shape[1], -1)
    planes = functional.pad(planes, (0, 0, (size - 1) // 2, size // 2))
    mean = functional.avg_pool2d(planes, (size, 1), stride=1).reshape(x.shape)
    return x / (bias + alpha * mean).pow(beta)
