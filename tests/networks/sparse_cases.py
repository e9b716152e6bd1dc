"""Programs with one layer and their weights, and what they compute by definition."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import Conv, SparseWeight, conv_step, linear_step


def csr(dense: Tensor) -> list[Tensor]:
    """Values, row starts and columns of a matrix."""
    there = dense != 0
    crow = torch.cat([torch.zeros(1), there.sum(1).cumsum(0)]).to(torch.int32)
    return [dense[there], crow, there.nonzero()[:, 1].to(torch.int32)]


def as_csr(dense: Tensor, index: torch.dtype = torch.int32, values: Tensor | None = None) -> Tensor:
    """The matrix as torch.sparse_csr, with indices of this type."""
    nonzeros, crow, col = csr(dense)
    parts = crow.to(index), col.to(index), nonzeros if values is None else values
    return torch.sparse_csr_tensor(*parts, dense.shape, check_invariants=True)


def matrix(rows: int, columns: int, density: float, seed: int = 0, dtype=torch.float64) -> Tensor:
    """A random matrix with so many nonzeros."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    return (values * (torch.rand(rows, columns, generator=g) < density)).to(dtype)


def weight(rows: int, count: int) -> SparseWeight:
    """The spans of `csr` at the front of a list of weights."""
    return SparseWeight((0, 0, count), (1, 0, rows + 1), (2, 0, count))


def layer(kind: str, dense: Tensor, bias: Tensor | None = None, **fields):
    """A program of one layer, its weights: `fields` of a Conv, or none for a Linear."""
    weights = csr(dense)
    rows, spans = len(dense), weight(len(dense), len(weights[0]))
    if bias is not None:
        weights.append(bias)
    bias_span = None if bias is None else (3, 0, rows)
    if kind == "tokens":
        return SegmentProgram((kind,), (linear_step(0, spans, bias_span, rows, **fields),), (1,)), weights
    return SegmentProgram((kind,), (conv_step(0, spans, bias_span, rows, **fields),), (1,)), weights


def convolved(x: Tensor, dense: Tensor, step: Conv) -> Tensor:
    """A convolution of images by its definition: sums over places of the kernel, in float64."""
    images, w = x.double().numpy(), dense.double().numpy()
    batch, channels, *sizes = images.shape
    inner, outer = channels // step.fields.groups, step.fields.out // step.fields.groups
    w = w.reshape(step.fields.groups, outer, inner, *step.fields.kernel)
    images = images.reshape(batch, step.fields.groups, inner, *sizes)
    output = (transposed if step.fields.transposed else plain)(images, w, step)
    return torch.from_numpy(output.reshape(batch, step.fields.out, *output.shape[-2:]))


def plain(x: np.ndarray, w: np.ndarray, step: Conv) -> np.ndarray:
    (top, bottom), (left, right) = step.fields.padding
    x = np.pad(x, ((0, 0), (0, 0), (0, 0), (top, bottom), (left, right)))
    height, width = (
        (n - d * (k - 1) - 1) // s + 1
        for n, d, k, s in zip(x.shape[3:], step.fields.dilation, step.fields.kernel, step.fields.stride, strict=True)
    )
    total = np.zeros((*x.shape[:2], w.shape[1], height, width))
    for i in range(step.fields.kernel[0]):
        for j in range(step.fields.kernel[1]):
            at = x[..., i * step.fields.dilation[0] :, j * step.fields.dilation[1] :]
            at = at[..., :: step.fields.stride[0], :: step.fields.stride[1]][..., :height, :width]
            total += np.einsum("bgihw,goi->bgohw", at, w[..., i, j])
    return total


def transposed(x: np.ndarray, w: np.ndarray, step: Conv) -> np.ndarray:
    full = [
        (n - 1) * s + d * (k - 1) + 1
        for n, d, k, s in zip(x.shape[3:], step.fields.dilation, step.fields.kernel, step.fields.stride, strict=True)
    ]
    (top, bottom), (left, right) = step.fields.padding
    room = [n + max(0, -cut) for n, cut in zip(full, (bottom, right), strict=True)]
    total = np.zeros((*x.shape[:2], w.shape[1], *room))
    for i in range(step.fields.kernel[0]):
        for j in range(step.fields.kernel[1]):
            at = total[..., i * step.fields.dilation[0] :, j * step.fields.dilation[1] :]
            at = at[..., :: step.fields.stride[0], :: step.fields.stride[1]]
            at = at[..., : x.shape[3], : x.shape[4]]
            at += np.einsum("bgihw,goi->bgohw", x, w[..., i, j])
    return total[..., top : full[0] - bottom, left : full[1] - right]
