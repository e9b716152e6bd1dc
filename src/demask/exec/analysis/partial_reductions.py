"""Reductions computed part by part: each position enters a small state exactly once.

    finish(update(update(begin(), a), b)) == reduction(a and b together)
    finish(merge(state of a, state of b)) == the same, in either order

Sums are accumulated in float64, those of integers in int64, where they are exact. Moments are
merged by the method of Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for
computing sample variances, 1979); each piece is shifted by its own mean, to lose no digits.

Attention whose keys and values are stored on disk is one as well: an online softmax over blocks of
their rows, for each band of queries. Keys and values in memory are read in full, by torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from demask.exec.axes import NONE, Axes, RowSource, Window, cut_shape, empty, length
from demask.ops import schema
from demask.ops.entry import Declined, op_name
from demask.ops.regions import Interval
from demask.ops.relation import Relation
from demask.ops.schema import fake

aten = torch.ops.aten
SCORES = 2**22  # bytes of the scores of one block of keys
State = tuple[Tensor, ...]
Bound = Mapping[str, Any]  # arguments of a call, by name
_PIECE = 512 << 10  # bytes: a piece and an update's copies of it stay in the cache of one core


class Reduction(Protocol):
    """One reduction of a graph. bytes: of a state. scratch_bytes: upper bound for an update."""

    @property
    def bytes(self) -> int: ...
    def scratch_bytes(self, window: Window) -> int: ...
    def begin(self) -> State: ...
    def update(self, state: State, part: Tensor, window: Window) -> None: ...
    def merge(self, state: State, other: State) -> None: ...
    def finish(self, state: State) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ReducedOperand:
    """The operand and the result of a reduction.

    shape, operand_dtype: of the operand; dims: reduced; axes: along which its parts are cut; work:
    dtype that pieces are computed in; out, dtype: shape and dtype of the result.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    axes: Axes
    operand_dtype: torch.dtype
    work: torch.dtype
    out: tuple[int, ...]
    dtype: torch.dtype

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of a state: the operand's, reduced axes of size one."""
        return tuple(1 if k in self.dims else n for k, n in enumerate(self.shape))

    @property
    def count(self) -> int:
        """The number of positions reduced to one."""
        return math.prod(self.shape[k] for k in self.dims)

    def pieces(self, part: Tensor, window: Window) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Pieces of a part of a few hundred KiB in dtype `work`, each with its first position."""
        first = [0] * len(self.shape)
        for axis, (start, _) in zip(self.axes, window, strict=True):
            if axis is not None:
                first[axis] = start
        if part.numel():
            for piece, position in _cut_into_pieces(part, tuple(first), _PIECE // self.work.itemsize):
                yield piece.to(self.work), position

    def view(self, tensor: Tensor, piece: Tensor, first: tuple[int, ...]) -> Tensor:
        """A view of a state's tensor at the entries that a piece updates."""
        for axis, start in enumerate(first):
            if axis not in self.dims and piece.shape[axis] != self.shape[axis]:
                tensor = tensor.narrow(axis, start, piece.shape[axis])
        return tensor

    def full(self, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full(self.state_shape, value, dtype=dtype)

    def result(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).reshape(self.out)


def _cut_into_pieces(part: Tensor, first: tuple[int, ...], limit: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """A tensor in pieces of at most `limit` entries, cut along the outermost axis in memory."""
    if part.numel() <= limit or max(part.shape) == 1:
        yield part, first
        return
    axis = max(range(part.ndim), key=lambda k: (part.shape[k] > 1, part.stride(k)))
    size = part.shape[axis]
    step = max(size * limit // part.numel(), 1)
    for start in range(0, size, step):
        position = (*first[:axis], first[axis] + start, *first[axis + 1 :])
        yield from _cut_into_pieces(part.narrow(axis, start, min(step, size - start)), position, limit)


@dataclass(frozen=True, slots=True)
class _PartialReduction:
    """Sizes of a reduction. tensors: bytes of a state per output position; copies, small: tensors
    alive at once in an update, of the size of a piece and of a tensor of the state."""

    operand: ReducedOperand
    tensors: int
    copies: int
    small: int

    @property
    def bytes(self) -> int:
        return self.tensors * math.prod(self.operand.state_shape)

    def scratch_bytes(self, window: Window) -> int:
        operand = self.operand
        sizes = cut_shape(operand.shape, operand.axes, window)
        piece = min(math.prod(sizes), _PIECE // operand.work.itemsize)
        outputs = math.prod(n for k, n in enumerate(sizes) if k not in operand.dims)
        copies = self.copies + 2 * (operand.operand_dtype != operand.work)  # two converted pieces
        return copies * piece * operand.work.itemsize + 8 * self.small * min(outputs, piece)


@dataclass(frozen=True, slots=True)
class FoldReduction(_PartialReduction):
    """Sums, products, extrema: acc = combine(acc, of(piece)) from a neutral element.

    of: (piece, dims) -> the piece reduced, axes of size one; combine: changes its first operand;
    last: accumulator -> result.
    """

    start: float
    dtype: torch.dtype
    of: Callable[[Tensor, tuple[int, ...]], Tensor]
    combine: Callable[[Tensor, Tensor], Any]
    last: Callable[[Tensor], Tensor] = Tensor.detach

    def begin(self) -> State:
        return (self.operand.full(self.start, self.dtype),)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        for piece, first in self.operand.pieces(part, window):
            accumulator = self.operand.view(state[0], piece, first)
            self.combine(accumulator, self.of(piece, self.operand.dims))

    def merge(self, state: State, other: State) -> None:
        self.combine(state[0], other[0])

    def finish(self, state: State) -> Tensor:
        return self.operand.result(self.last(state[0]))


@dataclass(frozen=True, slots=True)
class MomentsReduction(_PartialReduction):
    """Count, mean and sum of squared deviations. last: (mean, sum of squares) -> the result."""

    last: Callable[[Tensor, Tensor], Tensor]

    def begin(self) -> State:
        return self.operand.full(0), self.operand.full(0), self.operand.full(0)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        dims, scratch = self.operand.dims, None
        for piece, first in self.operand.pieces(part, window):
            if scratch is None or scratch.shape != piece.shape:
                scratch = torch.empty_like(piece)
            count = math.prod(piece.shape[k] for k in dims)
            mean = piece.sum(dims, keepdim=True).div_(count)
            torch.sub(piece, mean, out=scratch)
            error = scratch.sum(dims, keepdim=True).double().div_(count)  # rounding of the mean
            squares = scratch.mul_(scratch).sum(dims, keepdim=True).double()
            squares.addcmul_(error, error, value=-count)
            views = tuple(self.operand.view(t, piece, first) for t in state)
            _merge_moments(views, (count, error.add_(mean), squares))

    def merge(self, state: State, other: State) -> None:
        _merge_moments(state, other)

    def finish(self, state: State) -> Tensor:
        return self.last(state[1], state[2])


def _merge_moments(state: State, other: tuple[Any, ...]) -> None:
    """Merge the moments of two sets (Chan, Golub and LeVeque)."""
    (count, mean, squares), (other_count, other_mean, other_squares) = state, other
    distance = other_mean - mean
    share = other_count / (count + other_count).clamp_(min=1)
    squares.add_(other_squares).addcmul_(distance.square() * count, share)
    mean.addcmul_(distance, share)
    count.add_(other_count)


@dataclass(frozen=True, slots=True)
class LogSumExpReduction(_PartialReduction):
    """The largest value and the sum of exp(x - largest)."""

    def begin(self) -> State:
        return self.operand.full(-math.inf), self.operand.full(0)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        dims = self.operand.dims
        for piece, first in self.operand.pieces(part, window):
            peak = piece.amax(dims, keepdim=True)
            total = (piece - _finite(peak)).exp_().sum(dims, keepdim=True)
            views = tuple(self.operand.view(t, piece, first) for t in state)
            _merge_exponentials(views, (peak.double(), total.double()))

    def merge(self, state: State, other: State) -> None:
        _merge_exponentials(state, other)

    def finish(self, state: State) -> Tensor:
        return self.operand.result(state[1].log() + _finite(state[0]))


def _finite(peak: Tensor) -> Tensor:
    """The peaks with 0 in place of infinite ones: inf - inf is NaN."""
    return torch.where(peak.isinf(), 0.0, peak)


def _merge_exponentials(state: State, other: State) -> None:
    (peak, total), (other_peak, other_total) = state, other
    top = torch.maximum(peak, other_peak)
    base = _finite(top)
    total.mul_((peak - base).exp_()).addcmul_(other_total, (other_peak - base).exp_())
    peak.copy_(top)


@dataclass(frozen=True, slots=True)
class ExtremeReduction(_PartialReduction):
    """Value and index of the largest (or smallest) along `dim` (-1: of the flattened operand).

    Of equal ones the first; NaN exceeds all."""

    largest: bool
    dim: int

    def begin(self) -> State:
        lowest = _neutral_extreme(self.operand.work, self.largest)
        unset = math.prod(self.operand.shape)  # larger than every index
        return self.operand.full(lowest, self.operand.work), self.operand.full(unset, torch.int64)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        for piece, first in self.operand.pieces(part, window):
            extremes = self._flat_extreme(piece, first) if self.dim < 0 else self._extreme_along_dim(piece, first)
            self.merge(tuple(self.operand.view(t, piece, first) for t in state), extremes)

    def merge(self, state: State, other: State) -> None:
        (value, index), (other_value, other_index) = state, other
        exceeds = other_value > value if self.largest else other_value < value
        is_other_nan, is_nan = other_value != other_value, value != value
        is_equal = (other_value == value) | (is_other_nan & is_nan)
        is_better = ((exceeds | is_other_nan) & ~is_nan) | (is_equal & (other_index < index))
        value.copy_(torch.where(is_better, other_value, value))
        index.copy_(torch.where(is_better, other_index, index))

    def finish(self, state: State) -> Tensor:
        return self.operand.result(state[1])

    def _flat_extreme(self, piece: Tensor, first: tuple[int, ...]) -> State:
        flat = piece.argmax() if self.largest else piece.argmin()
        inside = torch.unravel_index(flat, piece.shape)
        value, index = piece[inside], torch.zeros((), dtype=torch.int64)
        for coordinate, start, size in zip(inside, first, self.operand.shape, strict=True):
            index = index * size + coordinate + start
        return value.reshape(self.operand.state_shape), index.reshape(self.operand.state_shape)

    def _extreme_along_dim(self, piece: Tensor, first: tuple[int, ...]) -> State:
        find = piece.argmax if self.largest else piece.argmin
        index = find(self.dim, keepdim=True)
        return piece.gather(self.dim, index), index + first[self.dim]


def _neutral_extreme(dtype: torch.dtype, largest: bool) -> float:
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def reduction(node: fx.Node, relation: Relation, axes: Mapping[fx.Node, Axes]) -> Reduction | Declined:
    """The reduction of a call on parts of its operand; Declined where there is no rule.

    axes: of each value that is cut. A cut axis that is not reduced is an axis of the state.
    """
    name = op_name(node.target)
    rule = _RULES.get(name)
    if rule is None:
        return Declined(f"{name} is no reduction that has a rule for parts")
    x = relation.operands[0].value
    value, output = fake(x), fake(node)
    if value.dtype.is_complex or not all(isinstance(n, int) for n in value.shape):
        return Declined(f"{name} of complex numbers, or of a size known only at run time")
    dims, bound = _reduced_axes(relation, output), schema.arguments(node)
    if not dims:
        return Declined(f"{name} leaves several positions, or reduces no axis")
    work = _work_dtype(bound.get("dtype") or value.dtype)
    sizes, out = tuple(value.shape), tuple(output.shape)
    pair = axes.get(x, NONE)
    return rule(ReducedOperand(sizes, dims, pair, value.dtype, work, out, output.dtype), bound)


def _reduced_axes(relation: Relation, output: Tensor) -> tuple[int, ...]:
    """The axes of the operand that are removed or reduced to one position; () for other pools."""
    reduced_letters = relation.window or relation.complete
    dims = tuple(k for k, letters in enumerate(relation.ins[0]) if set(letters) & reduced_letters)
    return () if relation.window and any(output.shape[k] != 1 for k in dims) else dims


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    # float32 for half precision, as in torch
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _join_into(join: Callable[[Tensor, Tensor], Tensor], acc: Tensor, other: Tensor) -> None:
    acc.copy_(join(acc, other.to(acc.dtype)))


_MAX, _MIN = partial(_join_into, torch.maximum), partial(_join_into, torch.minimum)


def _sum(operand: ReducedOperand, bound: Bound, *, mean: bool = False) -> Reduction:
    dtype = torch.float64 if operand.work.is_floating_point else torch.int64
    last = partial(torch.div, other=operand.count) if mean else Tensor.detach
    return FoldReduction(operand, 8, 0, 2, 0, dtype, _sum_piece, Tensor.add_, last)


def _sum_piece(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
    return piece.sum(dims, keepdim=True)


def _prod(operand: ReducedOperand, bound: Bound) -> Reduction:
    dtype = torch.float64 if operand.work.is_floating_point else torch.int64

    def product(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        for dim in dims:
            piece = piece.prod(dim, keepdim=True, dtype=dtype)
        return piece

    copies = 2 * (8 // operand.work.itemsize)
    return FoldReduction(operand, 8, copies, 2, 1, dtype, product, Tensor.mul_)


def _norm(operand: ReducedOperand, bound: Bound) -> Reduction | Declined:
    power = bound.get("ord", bound.get("p"))
    power = 2.0 if power is None else float(power)
    dtype, copies = torch.float64, 1 + (8 // operand.work.itemsize) * (operand.work.itemsize < 8)
    if power == math.inf:
        return FoldReduction(operand, 8, 1, 3, 0, dtype, _largest_magnitude, _MAX)
    if power <= 0:
        return Declined(f"a norm of order {power}")

    def powers(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        return _sum_piece(piece.abs().double().pow_(power), dims)  # a square may be too large for float

    root = partial(torch.pow, exponent=1 / power)
    return FoldReduction(operand, 8, copies, 2, 0, dtype, powers, Tensor.add_, root)


def _largest_magnitude(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
    return piece.abs().amax(dims, keepdim=True)


def _extreme(operand: ReducedOperand, bound: Bound, *, largest: bool) -> Reduction:
    if operand.work == torch.bool:
        return _any_or_all(operand, bound, every=not largest)
    start, dtype = _neutral_extreme(operand.work, largest), operand.work
    of = partial(torch.amax if largest else torch.amin, keepdim=True)
    return FoldReduction(operand, dtype.itemsize, 0, 2, start, dtype, of, _MAX if largest else _MIN)


def _any_or_all(operand: ReducedOperand, bound: Bound, *, every: bool) -> Reduction:
    reduce, join = (torch.all, torch.logical_and) if every else (torch.any, torch.logical_or)

    def of(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        return reduce(piece.bool(), dim=dims, keepdim=True)

    return FoldReduction(operand, 1, 1, 3, every, torch.bool, of, partial(_join_into, join))


def _variance(operand: ReducedOperand, bound: Bound, *, root: bool = False) -> Reduction:
    correction = bound.get("correction", 1.0 if bound.get("unbiased", True) else 0.0)
    degrees = max(operand.count - (1.0 if correction is None else float(correction)), 0.0)

    def last(mean: Tensor, squares: Tensor) -> Tensor:
        return operand.result((squares / degrees).sqrt_() if root else squares / degrees)

    return MomentsReduction(operand, 24, 1, 9, last)


def _moments(operand: ReducedOperand, bound: Bound) -> MomentsReduction:
    if not operand.work.is_floating_point:
        operand = replace(operand, work=torch.float64)

    def last(mean: Tensor, squares: Tensor) -> Tensor:
        return operand.result(torch.stack([mean, squares / operand.count]))

    return MomentsReduction(operand, 24, 1, 9, last)


def _log_sum_exp(operand: ReducedOperand, bound: Bound) -> Reduction:
    if not operand.work.is_floating_point:
        operand = replace(operand, work=operand.dtype)
    return LogSumExpReduction(operand, 16, 1, 8)


def _argmax(operand: ReducedOperand, bound: Bound, *, largest: bool) -> Reduction | Declined:
    if operand.work == torch.bool:
        return Declined("the index of an extreme of booleans")
    dim = -1 if bound["dim"] is None else operand.dims[0]
    return ExtremeReduction(operand, operand.work.itemsize + 8, 1, 4, largest, dim)


_Rule = Callable[[ReducedOperand, Bound], "Reduction | Declined"]
_OVERLOADS: list[tuple[str, tuple[str, ...], _Rule]] = [
    ("sum", ("default", "dim_IntList"), _sum),
    ("mean", ("default", "dim"), partial(_sum, mean=True)),
    ("prod", ("default", "dim_int"), _prod),
    *((op, ("default",), partial(_extreme, largest=True)) for op in ("amax", "max")),
    *((op, ("default",), partial(_extreme, largest=False)) for op in ("amin", "min")),
    ("any", ("default", "dim", "dims"), partial(_any_or_all, every=False)),
    ("all", ("default", "dim", "dims"), partial(_any_or_all, every=True)),
    ("var", ("default", "dim", "correction"), _variance),
    ("std", ("default", "dim", "correction"), partial(_variance, root=True)),
    ("logsumexp", ("default",), _log_sum_exp),
    ("linalg_vector_norm", ("default",), _norm),
    ("norm", ("Scalar", "ScalarOpt_dim"), _norm),
    ("argmax", ("default",), partial(_argmax, largest=True)),
    ("argmin", ("default",), partial(_argmax, largest=False)),
    *((f"adaptive_avg_pool{d}d", ("default",), partial(_sum, mean=True)) for d in (1, 2, 3)),
]
_RULES: dict[str, _Rule] = {
    "demask.moments.default": _moments,
    **{f"aten.{op}.{overload}": rule for op, names, rule in _OVERLOADS for overload in names},
}


def moments_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean and population variance over some axes, stacked, float64; these axes have size one.

    >>> moments_of(torch.tensor([[1.0, 3.0]]), (1,)).flatten()
    tensor([2., 1.], dtype=torch.float64)
    """
    dims, double = tuple(dim % x.ndim for dim in dims), torch.float64
    operand = ReducedOperand(tuple(x.shape), dims, NONE, x.dtype, _work_dtype(x.dtype), (), double)
    reducer = _moments(replace(operand, out=(2, *operand.state_shape)), {})
    reducer.update(state := reducer.begin(), x, ((0, 1), (0, 1)))
    return reducer.finish(state)


def attention(
    q: Tensor,
    keys: Iterable[Tensor],
    values: Iterable[Tensor],
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(q · keys * scale + mask) · values, keys and values in blocks of rows.

    q: (..., t, d); a block of keys: (..., s, d), of values: (..., s, e). mask: (..., t, S), added,
    or bool, False where a key is masked; a query without keys gives 0. scale: 1 / sqrt(d) if None.
    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    >>> q, k = torch.randn(1, 5, 4), torch.randn(1, 6, 4)
    >>> full = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    >>> torch.allclose(attention(q, k.split(4, 1), k.split(4, 1)), full, atol=1e-6)
    True
    """
    queries = q.to(_work_dtype(q.dtype)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    peak, total = queries.new_full((*queries.shape[:-1], 1), -math.inf), queries.new_zeros(())
    result, first = queries.new_zeros(()), 0
    for k, v in zip(keys, values, strict=True):
        block_mask = None if mask is None else mask[..., first : first + k.shape[-2]]
        first += k.shape[-2]
        scores = _scores(queries, k.to(queries.dtype), block_mask)
        top = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, share = scores.sub_(_finite(top)).exp_(), (peak - _finite(top)).exp_()
        total = total * share + weights.sum(-1, keepdim=True)
        result, peak = result * share + weights @ v.to(queries.dtype), top
    return (result / torch.where(total == 0, 1.0, total)).to(q.dtype)


def _scores(queries: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = queries @ k.transpose(-2, -1)
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)


def can_stream_keys(node: fx.Node) -> bool:
    """Whether a call can read its keys and values in blocks."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    bound = schema.arguments(node)
    has_no_mask = bound["attn_mask"] is None and not bound["is_causal"] and not bound["dropout_p"]
    return has_no_mask and not bound["enable_gqa"]


def keys_of(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The keys and the values of a call."""
    bound = schema.arguments(node)
    return bound["key"], bound["value"]


def attend(
    node: fx.Node, q: Tensor, sources: Mapping[fx.Node, RowSource], axes: Mapping[fx.Node, Axes], columns: Interval
) -> Tensor:
    """The call's result for queries `q`. columns: interval of the values' and the result's."""
    rows, (keys, values) = _keys_per_block(node, tuple(q.shape)), keys_of(node)
    all_columns = 0, length(keys, axes[keys], 1)
    return attention(
        q,
        _blocks(keys, sources[keys], axes[keys], rows, all_columns),
        _blocks(values, sources[values], axes[values], rows, columns),
        scale=schema.arguments(node)["scale"],
    )


def attention_scratch_bytes(node: fx.Node, queries: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that `attend` allocates: two blocks and their copies, scores, weights, and sums."""
    rows, itemsize = _keys_per_block(node, queries), max(dtype.itemsize, 4)
    blocks = sum(math.prod(fake(n).shape[:-2]) * rows * fake(n).shape[-1] for n in keys_of(node))
    scores = math.prod(queries[:-1]) * rows
    width = max(fake(n).shape[-1] for n in keys_of(node))
    return itemsize * (2 * blocks + 2 * scores + 4 * math.prod(queries[:-1]) * (width + 2))


def _keys_per_block(node: fx.Node, queries: tuple[int, ...]) -> int:
    return max(64, SCORES // (4 * max(math.prod(queries[:-1]), 1)))


def _blocks(node: fx.Node, source: RowSource, axes: Axes, rows: int, columns: Interval) -> Iterator[Tensor]:
    value, count = fake(node), length(node, axes, 0)
    for start in range(0, count, rows):
        window = (start, min(start + rows, count)), columns
        block = empty(cut_shape(value.shape, axes, window), axes, value.dtype)
        source.read(window, block)
        yield block
