"""ONNX ops that reduce, or select elements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from demask.files.onnx.op_functions import Int, Ints, Ops
from demask.files.onnx.ops.math.math import UNSIGNED, widen, widened
from demask.files.onnx.values import extend_choice, product

OPS = Ops()
Reduction = Callable[[Tensor, list[int], bool], Tensor]


# -- over axes -----------------------------------------------------------------------------------


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.sum(x, axes, keep) if axes else x
    return torch.sum(x, axes, keep, dtype=x.dtype) if axes else x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keep) if axes else x
    count = product(x.shape[axis] for axis in axes)
    return torch.div(_sum(x, axes, keep), count, rounding_mode="trunc")


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keep, dtype=None if x.is_floating_point() else x.dtype)
    return x


def _extreme(function: Reduction, of_nothing: Callable[[torch.dtype], Any]) -> Reduction:
    """Max or min; where an axis has size 0, the number of the dtype that `of_nothing` returns."""

    def extreme(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return x
        if any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in axes):
            sizes = [1 if k in axes else n for k, n in enumerate(x.shape) if keep or k not in axes]
            return torch.full(sizes, of_nothing(x.dtype), dtype=x.dtype, device=x.device)
        return function(x, axes, keep)

    return extreme


def _least_number(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -torch.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _most_number(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return torch.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _norm(order: int) -> Reduction:
    def norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if not axes:
            return torch.abs(x)
        if x.is_floating_point():
            return torch.linalg.vector_norm(x, order, axes, keep)
        if order == 1:
            return _sum(torch.abs(x), axes, keep)
        return torch.sqrt(_sum(x * x, axes, keep).to(torch.float64)).to(x.dtype)

    return norm


def _log(x: Tensor) -> Tensor:
    return torch.log(x) if x.is_floating_point() else torch.log(x).to(x.dtype)


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not axes:
        return x
    if x.is_floating_point():
        return torch.logsumexp(x, axes, keep)
    return torch.logsumexp(x.to(torch.float64), axes, keep).to(x.dtype)


def _reduction(function: Reduction, ordered: bool = False) -> Callable[..., Tensor]:
    def call(x: Tensor, axes: Ints | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        every = [] if noop_with_empty_axes else list(range(x.ndim))
        selected = [axis % x.ndim for axis in axes] if axes else every
        return function(x, selected, bool(keepdims))

    return widened(call, ordered)


def _host_reduction(real: Any, each: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(x: np.ndarray, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        selected = None if axes is None else tuple(np.reshape(axes, -1).tolist())
        if not selected and noop_with_empty_axes:
            return x
        selected = selected or tuple(range(x.ndim))
        if x.dtype != object:
            return real.reduce(x, selected, dtype=x.dtype, keepdims=bool(keepdims))
        ufunc = np.frompyfunc(each, 2, 1)
        for axis in sorted((axis % x.ndim for axis in selected), reverse=True):
            reduced = np.asarray(ufunc.reduce(x, axis), dtype=object)
            x = np.expand_dims(reduced, axis) if keepdims else reduced
        return x

    return call


for _name, _function, _ordered, _host in (
    ("L1", _norm(1), False, None),
    ("L2", _norm(2), False, None),
    ("LogSum", lambda x, axes, keep: _log(_sum(x, axes, keep)), False, None),
    ("LogSumExp", _log_sum_exp, False, None),
    ("Max", _extreme(torch.amax, _least_number), True, _host_reduction(np.maximum, extend_choice(torch.sym_max))),
    ("Mean", _mean, False, None),
    ("Min", _extreme(torch.amin, _most_number), True, _host_reduction(np.minimum, extend_choice(torch.sym_min))),
    ("Prod", _prod, False, _host_reduction(np.multiply, operator.mul)),
    ("Sum", _sum, False, _host_reduction(np.add, operator.add)),
    ("SumSquare", lambda x, axes, keep: _sum(x * x, axes, keep), False, None),
):
    OPS(f"Reduce{_name}", host=_host)(_reduction(_function, _ordered))


# -- along an axis -------------------------------------------------------------------------------


def _arg(function: Callable[[Tensor, int, bool], Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        x = widen(x, ordered=True)
        if not select_last_index:
            return function(x, axis, bool(keepdims))
        return x.shape[axis] - 1 - function(torch.flip(x, (axis,)), axis, bool(keepdims))

    return call


OPS("ArgMax")(_arg(torch.argmax))
OPS("ArgMin")(_arg(torch.argmin))


def _cumulative(function: Callable[..., Tensor], start: int) -> Callable[..., Tensor]:
    def call(x: Tensor, axis: Int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        x = torch.flip(x, (axis,)) if reverse else x
        if exclusive:
            first = torch.full_like(x.narrow(axis, 0, 1), start)
            x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        result = function(x, axis, dtype=None if x.is_floating_point() else x.dtype)
        return torch.flip(result, (axis,)) if reverse else result

    return widened(call)


OPS("CumProd")(_cumulative(torch.cumprod, 1))
OPS("CumSum")(_cumulative(torch.cumsum, 0))


def _hardmax(x: Tensor, axis: int) -> Tensor:
    """1 at the first maximum, 0 elsewhere."""
    return torch.zeros_like(x).scatter(axis, torch.argmax(x, axis, True), 1)


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def call(x: Tensor, *, axis: int | None = None, version: int) -> Tensor:
        """Before opset 13: over all axes from `axis` on, flattened into one."""
        if version >= 13:
            return function(x, -1 if axis is None else axis)
        axis = 1 if axis is None else axis % max(x.ndim, 1)
        if axis == x.ndim - 1:
            return function(x, axis)
        return function(x.flatten(axis), -1).reshape(x.shape)

    return call


OPS("Hardmax")(_softmax(_hardmax))
OPS("LogSoftmax")(_softmax(lambda x, axis: torch.log_softmax(x, axis)))
OPS("Softmax")(_softmax(lambda x, axis: torch.softmax(x, axis)))


@OPS("LpNormalization")
def lp_normalized(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """x divided by its norm along an axis; 0 where the norm is 0."""
    norm = torch.linalg.vector_norm(x, p, (axis,), True)
    return torch.where(norm == 0, 0, x / norm)


@OPS("MeanVarianceNormalization")
def mean_variance_normalized(x: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    """x normalized to mean 0 and variance 1 over axes."""
    axes = list(axes)
    deviation = torch.sqrt(torch.var(x, axes, correction=0, keepdim=True))
    return (x - torch.mean(x, axes, True)) / (deviation + 1e-9)


# -- products ------------------------------------------------------------------------------------


@OPS("Einsum")
def einsum(*xs: Tensor, equation: str) -> Tensor:
    """The sum of products of an einsum equation."""
    return torch.einsum(equation, *xs)


@OPS("Det")
def determinant(x: Tensor) -> Tensor:
    """The determinant of each matrix."""
    matrix = x if x.dtype.itemsize > 2 else x.to(torch.float32)
    result = torch.linalg.det(matrix)
    return result if result.dtype == x.dtype else result.to(x.dtype)


# -- losses --------------------------------------------------------------------------------------


@OPS("NegativeLogLikelihoodLoss")
def negative_log_likelihood(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Tensor:
    """The loss of log probabilities [batch, classes, …] at the true classes."""
    ignored = -100 if ignore_index is None else ignore_index
    target = target if target.dtype == torch.int64 else target.to(torch.int64)
    return functional.nll_loss(x, target, weight, ignore_index=ignored, reduction=reduction)


@OPS("SoftmaxCrossEntropyLoss")
def cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of scores [batch, classes, …] at the true classes; the log probabilities."""
    log_probabilities = torch.log_softmax(scores, 1)
    loss = negative_log_likelihood(log_probabilities, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return loss if outputs < 2 else (loss, log_probabilities)


@OPS("TopK")
def top(x: Tensor, k: Int, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """The k largest values along an axis and their indices, the first of equal ones."""
    # not torch.topk, which returns any of equal values
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k)


@OPS("Unique")
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    """Distinct elements (slices along an axis), their first positions, the index of each element
    among them, and their counts."""
    x = x.reshape(-1) if axis is None else x
    axis = 0 if axis is None else axis
    distinct, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    positions = torch.arange(x.shape[axis], device=x.device)
    first = torch.full_like(counts, x.shape[axis]).scatter_reduce(0, inverse, positions, "amin")
    if sorted:
        return distinct, first, inverse, counts
    order = torch.argsort(first)
    return (distinct.index_select(axis, order), first[order], torch.argsort(order)[inverse], counts[order])


def _host_nonzero(x: np.ndarray) -> Any:
    return NotImplemented if x.dtype == object else np.stack(np.nonzero(np.atleast_1d(x)))


@OPS("NonZero", host=_host_nonzero)
def nonzero(x: Tensor) -> Tensor:
    """The indices of nonzero elements, [axes, count]."""
    x = torch.atleast_1d(x)
    return torch.nonzero(x != 0 if x.dtype in UNSIGNED else x).transpose(0, 1)
