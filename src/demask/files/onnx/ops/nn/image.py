"""ONNX ops on images: sampling, regions of interest, boxes, decoding."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from demask.errors import BadInput
from demask.files.onnx.op_functions import Float, Int, Ints, Ops
from demask.files.onnx.ops.data.move import padded
from demask.files.onnx.values import product

OPS = Ops()

_SAMPLED = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}


@OPS("GridSample")
def grid_sample(
    x: Tensor, grid: Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    """x sampled at the points of a grid, with coordinates from -1 to 1 along each axis."""
    if mode not in _SAMPLED:
        raise BadInput(f"expected mode linear, nearest or cubic, got {mode!r}")
    if x.ndim not in (4, 5) or (x.ndim == 5 and _SAMPLED[mode] == "bicubic"):
        raise BadInput(f"demask does not sample {x.ndim - 2} axes in mode {mode}")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise BadInput(f"expected padding_mode zeros, border or reflection, got {padding_mode!r}")
    dtype = x.dtype
    if dtype != grid.dtype:
        wider = x.is_floating_point() and dtype.itemsize > grid.dtype.itemsize
        x, grid = (x, grid.to(dtype)) if wider else (x.to(grid.dtype), grid)
    result = F.grid_sample(x, grid, _SAMPLED[mode], padding_mode, bool(align_corners))
    return result if result.dtype == dtype else result.to(dtype)


@OPS("AffineGrid")
def affine_grid(theta: Tensor, size: Ints, *, align_corners: int = 0) -> Tensor:
    """The points of a regular grid transformed by matrices."""
    # not F.affine_grid, which warns about sizes of 1
    return torch.affine_grid_generator(theta, size, bool(align_corners))


@OPS("Col2Im")
def col2im(
    x: Tensor,
    image_shape: Ints,
    block_shape: Ints,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """The image of the blocks in x, summed where blocks overlap."""
    rank = len(image_shape)
    dilations, strides = dilations or [1] * rank, strides or [1] * rank
    before, after = (list(pads or [0] * 2 * rank)[k : k + rank] for k in (0, rank))
    if rank == 2 and before == after and x.is_floating_point():
        sizes, blocks, steps, shifts = map(tuple, (image_shape, block_shape, dilations, strides))
        return F.fold(x, sizes, blocks, steps, tuple(before), shifts)
    positions: Any = 0
    padded_sizes = [a + n + b for a, n, b in zip(before, image_shape, after, strict=True)]
    for k, size in enumerate(padded_sizes):
        count = (size - dilations[k] * (block_shape[k] - 1) - 1) // strides[k] + 1
        inner = torch.arange(block_shape[k], device=x.device) * dilations[k]
        outer = torch.arange(count, device=x.device) * strides[k]
        shape = [1] * 2 * rank
        shape[k], shape[rank + k] = block_shape[k], count
        positions = positions * size + (inner.unsqueeze(1) + outer).reshape(shape)
    blocks = x.reshape(x.shape[0], -1, x.shape[2] * product(block_shape))
    image = x.new_zeros(*blocks.shape[:2], product(padded_sizes))
    image = image.index_add(2, positions.reshape(-1), blocks).reshape(*blocks.shape[:2], *padded_sizes)
    cut = [(-a, -b) for a, b in zip(before, after, strict=True)]
    return padded(image, [(0, 0), (0, 0), *cut])


@OPS("RoiAlign")
def roi_align(
    x: Tensor,
    rois: Tensor,
    batch: Tensor,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    coordinate_transformation_mode: str | None = None,
    version: int,
) -> Tensor:
    """Each region of x, resampled to one size: the mean or maximum of points in each bin."""
    default_mode = "output_half_pixel" if version < 16 else "half_pixel"
    half = (coordinate_transformation_mode or default_mode) == "half_pixel"
    if mode not in ("avg", "max"):
        raise BadInput(f"expected mode avg or max, got {mode!r}")
    rois = rois * spatial_scale - (0.5 if half else 0.0)
    (n, c, h, w), average = x.shape, mode == "avg"
    row, down, rows = _sample_points(rois[:, 1], rois[:, 3], h, output_height, sampling_ratio, half)
    column, right, columns = _sample_points(rois[:, 0], rois[:, 2], w, output_width, sampling_ratio, half)
    row = row + batch.long().reshape(-1, 1, 1) * h
    positions = row[:, :, None, :, None] * w + column[:, None, :, None, :]
    weights = (down[:, :, None, :, None] * right[:, None, :, None, :]).to(x.dtype)
    pixels = x.permute(0, 2, 3, 1).reshape(n * h * w, c)
    if average:
        weights = weights / (rows * columns).clamp(min=1).reshape(-1, 1, 1, 1, 1).to(x.dtype)
        result = F.embedding_bag(
            positions.flatten(3).flatten(0, 2), pixels, mode="sum", per_sample_weights=weights.flatten(3).flatten(0, 2)
        )
    else:
        result = (F.embedding(positions, pixels) * weights.unsqueeze(-1)).flatten(3, 4)
        exists = (_is_sampled(rows, row)[:, :, None] & _is_sampled(columns, column)[:, None]).flatten(1)
        result = result.masked_fill(~exists[:, None, None, :, None], -math.inf).amax(3)
        result = torch.where(exists.any(1)[:, None, None, None], result, 0)
    return result.reshape(-1, output_height, output_width, c).permute(0, 3, 1, 2)


def _sample_points(
    start: Tensor, end: Tensor, size: Any, bins: int, ratio: int, half: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis, per region, bin and sampling point: the two nearest positions and their
    weights, [regions, bins, 2 * points]; and the number of points of each region."""
    length = end - start if half else (end - start).clamp(min=1)
    step = (length / bins).reshape(-1, 1, 1)
    counts = torch.full_like(step, ratio) if ratio > 0 else step.ceil()
    most = ratio if ratio > 0 else max([1, *map(int, counts.flatten().tolist())])
    points = torch.arange(most, device=start.device)
    inner = (points + 0.5) * step / counts.clamp(min=1)
    outer = torch.arange(bins, device=start.device).unsqueeze(1) * step
    position = start.reshape(-1, 1, 1) + outer + inner
    in_range = (position >= -1) & (position <= size) & (points < counts)
    position = position.clamp(0, size - 1)
    low = position.floor()
    weights = torch.stack([1 - (position - low), position - low], -1) * in_range.unsqueeze(-1)
    neighbors = torch.stack([low, (low + 1).clamp(max=size - 1)], -1).long()
    return neighbors.flatten(2), weights.flatten(2), counts.flatten()


def _is_sampled(counts: Tensor, positions: Tensor) -> Tensor:
    """Whether each point of `_sample_points` exists, for each region."""
    points = torch.arange(positions.shape[2], device=positions.device) // 2
    return points < counts.unsqueeze(1)


@OPS("MaxRoiPool")
def max_roi_pool(x: Tensor, rois: Tensor, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0) -> Tensor:
    """The largest value in each bin of each region of x, 0 in empty bins."""
    result = x.new_zeros(rois.shape[0], x.shape[1], *pooled_shape)
    for k, (image, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (math.floor(n * spatial_scale + 0.5) for n in corners)
        rows = _bin_ranges(top, bottom, x.shape[2], pooled_shape[0])
        columns = _bin_ranges(left, right, x.shape[3], pooled_shape[1])
        for i, (a, b) in enumerate(rows):
            for j, (c, d) in enumerate(columns):
                if a < b and c < d:
                    result[k, :, i, j] = x[int(image), :, a:b, c:d].amax((1, 2))
    return result


def _bin_ranges(first: int, last: int, size: int, bins: int) -> list[tuple[int, int]]:
    length = max(last - first + 1, 1)
    return [
        (min(max(first + k * length // bins, 0), size), min(max(first - (-(k + 1) * length // bins), 0), size))
        for k in range(bins)
    ]


@OPS("NonMaxSuppression")
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    limit: Int = 0,
    iou: Float = 0.0,
    threshold: Float = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """Indices [image, class, box] of boxes that no better box of their class overlaps."""
    if torch.compiler.is_exporting():
        raise BadInput(
            "expected a call outside of torch.export, which cannot record how boxes are compared "
            "one by one; cut the file before this node (onnx.utils.extract_model)"
        )
    # numpy is faster for many small steps
    corners, values = (t.detach().float().cpu().numpy() for t in (boxes, scores))
    first, second = corners[..., :2], corners[..., 2:]
    if center_point_box:
        low, high = first - second / 2, first + second / 2
    else:
        low, high = np.minimum(first, second), np.maximum(first, second)
    selected = [
        (image, kind, box)
        for image in range(scores.shape[0])
        for kind in range(scores.shape[1])
        for box in _select_boxes(low[image], high[image], values[image, kind], limit, iou, threshold)
    ]
    return torch.tensor(selected, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _select_boxes(
    low: np.ndarray, high: np.ndarray, scores: np.ndarray, limit: int, iou: float, threshold: float | None
) -> list[int]:
    """Indices of boxes by descending score, without those that a better one overlaps."""
    order = np.argsort(-scores, kind="stable")
    order = order if threshold is None else order[scores[order] > threshold]
    low, high = low[order], high[order]
    area = (high - low).prod(-1)
    remaining = np.arange(len(order))
    selected: list[int] = []
    while len(remaining) and len(selected) < limit:
        best, remaining = remaining[0], remaining[1:]
        selected.append(int(order[best]))
        common = np.minimum(high[best], high[remaining]) - np.maximum(low[best], low[remaining])
        shared = common.clip(0).prod(-1)
        union = area[best] + area[remaining] - shared
        is_overlap = (shared > 0) & (area[best] > 0) & (area[remaining] > 0) & (union > 0)
        remaining = remaining[~(is_overlap & (shared / np.where(is_overlap, union, 1) > iou))]
    return selected


@OPS("DeformConv")
def deform_conv(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """A convolution whose kernel points are shifted and weighted separately at each position."""
    if x.ndim != 4:
        raise BadInput(f"expected images of 2 axes, got {x.ndim - 2}")
    # an axis of one position has no range from -1 to 1
    x = padded(x, [(0, int(isinstance(s, int) and s == 1)) for s in (0, 0, *x.shape[2:])])
    (n, c, h, w), (kh, kw), (oh, ow) = x.shape, weight.shape[2:], offset.shape[2:]
    strides, dilations, pads = strides or (1, 1), dilations or (1, 1), pads or (0,) * 4
    offset = offset.reshape(n, offset_group, kh, kw, 2, oh, ow)
    coordinates = []
    for axis, (size, kernel, out) in enumerate(((h, kh, oh), (w, kw, ow))):
        inner = torch.arange(kernel, device=x.device) * dilations[axis] - pads[axis]
        outer = torch.arange(out, device=x.device) * strides[axis]
        inner = inner.reshape([1] * axis + [-1] + [1] * (3 - axis))
        outer = outer.reshape([-1] + [1] * (1 - axis))
        coordinates.append((offset[:, :, :, :, axis] + (inner + outer)) * 2 / (size - 1) - 1)
    grid = torch.stack(coordinates[::-1], -1).reshape(n * offset_group, kh * kw * oh, ow, 2)
    pictures = x.reshape(n * offset_group, c // offset_group, h, w)
    samples = F.grid_sample(pictures, grid.to(x.dtype), align_corners=True)
    samples = samples.reshape(n, offset_group, -1, kh * kw, oh * ow)
    if mask is not None:
        samples = samples * mask.reshape(n, offset_group, 1, kh * kw, oh * ow)
    rows = weight.reshape(group, weight.shape[0] // group, -1)
    result = (rows @ samples.reshape(n, group, -1, oh * ow)).reshape(n, -1, oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


@OPS("ImageDecoder")
def decode(encoded: Tensor, *, pixel_format: str = "RGB", device: torch.device) -> Tensor:
    """The image in a file's bytes, [height, width, channels]; empty if it cannot be read."""
    if pixel_format not in ("RGB", "BGR", "Grayscale"):
        raise BadInput(f"expected pixel_format RGB, BGR or Grayscale, got {pixel_format!r}")
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput("ImageDecoder needs the Pillow package: pip install pillow") from error
    try:
        data = io.BytesIO(encoded.cpu().numpy().tobytes())
        picture = Image.open(data).convert("L" if pixel_format == "Grayscale" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        channels = 1 if pixel_format == "Grayscale" else 3
        return torch.zeros(0, 0, channels, dtype=torch.uint8, device=device)
    pixels = np.array(picture).reshape(picture.height, picture.width, -1)
    pixels = pixels[..., ::-1].copy() if pixel_format == "BGR" else pixels
    return torch.from_numpy(pixels).to(device)
