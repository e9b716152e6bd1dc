"""Reductions computed part by part: each position enters a small state exactly once.

    finish(update(update(begin(), a), b)) == reduction(a and b together)
    finish(merge(state of a, state of b)) == the same, whatever the order

Sums are kept in float64, those of whole numbers in int64, where they are exact. Moments are merged
as Chan, Golub and LeVeque do (Updating formulae and a pairwise algorithm for computing sample
variances, 1979), each piece of a part shifted by its own mean, which costs no digits then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from demask.ops import schema
from demask.ops.entry import Declined, op_name
from demask.ops.relation import Relation
from demask.traverse.axes import NONE, Axes, Window, cut_shape

State = tuple[Tensor, ...]
#: a piece and the copies of it that an update makes stay in the cache of one core
_PIECE = 512 << 10


class Reduction(Protocol):
    """One reduction of a graph. bytes: of a state. temporary: what one update allocates at most."""

    @property
    def bytes(self) -> int: ...
    def temporary(self, window: Window) -> int: ...
    def begin(self) -> State: ...
    def update(self, state: State, part: Tensor, window: Window) -> None: ...
    def merge(self, state: State, other: State) -> None: ...
    def finish(self, state: State) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ReducedOperand:
    """Where an operand's positions go. shape: the operand's; dims: those reduced; axes: along which
    its parts are cut; given: its dtype; work: the one a piece is computed in; out, dtype: the
    result's.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    axes: Axes
    given: torch.dtype
    work: torch.dtype
    out: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kept(self) -> tuple[int, ...]:
        """The operand's shape, reduced axes one long: that of each tensor of a state."""
        return tuple(1 if k in self.dims else n for k, n in enumerate(self.shape))

    @property
    def count(self) -> int:
        """How many positions become one."""
        return math.prod(self.shape[k] for k in self.dims)

    def pieces(self, part: Tensor, window: Window) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """A part in pieces of a few hundred KiB, in `work`, each with its first position."""
        first = [0] * len(self.shape)
        for axis, (start, _) in zip(self.axes, window, strict=True):
            if axis is not None:
                first[axis] = start
        if part.numel():
            for piece, at in _pieces(part, tuple(first), _PIECE // self.work.itemsize):
                yield piece.to(self.work), at

    def view(self, held: Tensor, piece: Tensor, first: tuple[int, ...]) -> Tensor:
        """The entries of a state's tensor that a piece goes into."""
        for axis, start in enumerate(first):
            if axis not in self.dims and piece.shape[axis] != self.shape[axis]:
                held = held.narrow(axis, start, piece.shape[axis])
        return held

    def full(self, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full(self.kept, value, dtype=dtype)

    def result(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).reshape(self.out)


def _pieces(
    part: Tensor, first: tuple[int, ...], limit: int
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """A tensor in pieces of at most `limit` entries, cut along what is outermost in memory."""
    if part.numel() <= limit or max(part.shape) == 1:
        yield part, first
        return
    axis = max(range(part.ndim), key=lambda k: (part.shape[k] > 1, part.stride(k)))
    size = part.shape[axis]
    step = max(size * limit // part.numel(), 1)
    for start in range(0, size, step):
        at = (*first[:axis], first[axis] + start, *first[axis + 1 :])
        yield from _pieces(part.narrow(axis, start, min(step, size - start)), at, limit)


@dataclass(frozen=True, slots=True)
class _Base:
    """tensors: bytes of a state per kept position; copies, small: tensors as large as a piece, and
    as one of the state's, that are alive at once in an update."""

    place: ReducedOperand
    tensors: int
    copies: int
    small: int

    @property
    def bytes(self) -> int:
        return self.tensors * math.prod(self.place.kept)

    def temporary(self, window: Window) -> int:
        place = self.place
        sizes = cut_shape(place.shape, place.axes, window)
        piece = min(math.prod(sizes), _PIECE // place.work.itemsize)
        kept = math.prod(n for k, n in enumerate(sizes) if k not in place.dims)
        copies = self.copies + 2 * (place.given != place.work)  # one piece, and the one before it
        return copies * piece * place.work.itemsize + 8 * self.small * min(kept, piece)


@dataclass(frozen=True, slots=True)
class Folded(_Base):
    """Sums, products, extrema: acc = combine(acc, of(piece)) from a neutral element.

    of: (piece, dims) -> the piece reduced, axes kept; combine: changes its first operand; last:
    what the result is of the accumulator.
    """

    start: float
    dtype: torch.dtype
    of: Callable[[Tensor, tuple[int, ...]], Tensor]
    combine: Callable[[Tensor, Tensor], Any]
    last: Callable[[Tensor], Tensor] = Tensor.detach

    def begin(self) -> State:
        return (self.place.full(self.start, self.dtype),)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        for piece, first in self.place.pieces(part, window):
            held = self.place.view(state[0], piece, first)
            self.combine(held, self.of(piece, self.place.dims))

    def merge(self, state: State, other: State) -> None:
        self.combine(state[0], other[0])

    def finish(self, state: State) -> Tensor:
        return self.place.result(self.last(state[0]))


@dataclass(frozen=True, slots=True)
class Moments(_Base):
    """Count, mean and sum of squared deviations. last: (mean, sum of squares) -> the result."""

    last: Callable[[Tensor, Tensor], Tensor]

    def begin(self) -> State:
        return self.place.full(0), self.place.full(0), self.place.full(0)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        dims, scratch = self.place.dims, None
        for piece, first in self.place.pieces(part, window):
            if scratch is None or scratch.shape != piece.shape:
                scratch = torch.empty_like(piece)
            count = math.prod(piece.shape[k] for k in dims)
            near = piece.sum(dims, keepdim=True).div_(count)
            torch.sub(piece, near, out=scratch)
            rest = scratch.sum(dims, keepdim=True).double().div_(count)  # the mean's rounding
            squares = scratch.mul_(scratch).sum(dims, keepdim=True).double()
            squares.addcmul_(rest, rest, value=-count)
            held = tuple(self.place.view(t, piece, first) for t in state)
            _merge_moments(held, (count, rest.add_(near), squares))

    def merge(self, state: State, other: State) -> None:
        _merge_moments(state, other)

    def finish(self, state: State) -> Tensor:
        return self.last(state[1], state[2])


def _merge_moments(state: State, other: tuple[Any, ...]) -> None:
    """Chan, Golub and LeVeque: the moments of two sets from those of each."""
    (count, mean, squares), (more, theirs, added) = state, other
    apart = theirs - mean
    share = more / (count + more).clamp_(min=1)
    squares.add_(added).addcmul_(apart.square() * count, share)
    mean.addcmul_(apart, share)
    count.add_(more)


@dataclass(frozen=True, slots=True)
class LogSumExp(_Base):
    """The largest value and the sum of exp(x - largest)."""

    def begin(self) -> State:
        return self.place.full(-math.inf), self.place.full(0)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        dims = self.place.dims
        for piece, first in self.place.pieces(part, window):
            peak = piece.amax(dims, keepdim=True)
            total = (piece - _finite(peak)).exp_().sum(dims, keepdim=True)
            held = tuple(self.place.view(t, piece, first) for t in state)
            _merge_exponentials(held, (peak.double(), total.double()))

    def merge(self, state: State, other: State) -> None:
        _merge_exponentials(state, other)

    def finish(self, state: State) -> Tensor:
        return self.place.result(state[1].log() + _finite(state[0]))


def _finite(peak: Tensor) -> Tensor:
    """0 in the place of infinite peaks: inf - inf has no value."""
    return torch.where(peak.isinf(), 0.0, peak)


def _merge_exponentials(state: State, other: State) -> None:
    (peak, total), (theirs, added) = state, other
    top = torch.maximum(peak, theirs)
    base = _finite(top)
    total.mul_((peak - base).exp_()).addcmul_(added, (theirs - base).exp_())
    peak.copy_(top)


@dataclass(frozen=True, slots=True)
class Extreme(_Base):
    """Value and place of the largest (or smallest); of equal ones the first. NaN is beyond all.

    dim: along which the place is told; -1: in the whole operand, flattened.
    """

    largest: bool
    dim: int

    def begin(self) -> State:
        far = _beyond(self.place.work, self.largest)
        unset = math.prod(self.place.shape)  # beyond every place
        return self.place.full(far, self.place.work), self.place.full(unset, torch.int64)

    def update(self, state: State, part: Tensor, window: Window) -> None:
        for piece, first in self.place.pieces(part, window):
            found = self._all(piece, first) if self.dim < 0 else self._along(piece, first)
            self.merge(tuple(self.place.view(t, piece, first) for t in state), found)

    def merge(self, state: State, other: State) -> None:
        (value, place), (theirs, there) = state, other
        beyond = theirs > value if self.largest else theirs < value
        nans, mine = theirs != theirs, value != value
        same = (theirs == value) | (nans & mine)
        better = ((beyond | nans) & ~mine) | (same & (there < place))
        value.copy_(torch.where(better, theirs, value))
        place.copy_(torch.where(better, there, place))

    def finish(self, state: State) -> Tensor:
        return self.place.result(state[1])

    def _all(self, piece: Tensor, first: tuple[int, ...]) -> State:
        flat = piece.argmax() if self.largest else piece.argmin()
        inside = torch.unravel_index(flat, piece.shape)
        value, place = piece[inside], torch.zeros((), dtype=torch.int64)
        for at, start, size in zip(inside, first, self.place.shape, strict=True):
            place = place * size + at + start
        return value.reshape(self.place.kept), place.reshape(self.place.kept)

    def _along(self, piece: Tensor, first: tuple[int, ...]) -> State:
        find = piece.argmax if self.largest else piece.argmin
        place = find(self.dim, keepdim=True)
        return piece.gather(self.dim, place), place + first[self.dim]


def _beyond(dtype: torch.dtype, largest: bool) -> float:
    """What every value is larger (or smaller) than, or equal to."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def reduction(
    node: fx.Node, relation: Relation, axes: Mapping[fx.Node, Axes]
) -> Reduction | Declined:
    """How a call is computed from parts of its operand, or why it cannot be.

    axes: of each value that is cut. A cut axis that is not reduced is one of the state's.
    """
    name = op_name(node.target)
    rule = _RULES.get(name)
    if rule is None:
        return Declined(f"{name} is no reduction that has a rule for parts")
    x = relation.operands[0].value
    value, made = x.meta["val"], node.meta["val"]
    if value.dtype.is_complex or not all(isinstance(n, int) for n in value.shape):
        return Declined(f"{name} of complex numbers, or of a size known at run time")
    dims, found = _reduced(relation, made), schema.arguments(node)
    if not dims:
        return Declined(f"{name} leaves several positions, or reduces no axis")
    work = _wide(found.get("dtype") or value.dtype)
    sizes, out = tuple(value.shape), tuple(made.shape)
    return rule(
        ReducedOperand(sizes, dims, axes.get(x, NONE), value.dtype, work, out, made.dtype), found
    )


def _reduced(relation: Relation, made: Tensor) -> tuple[int, ...]:
    """The operand's axes of which one position, or none, is left; none of pools that leave more."""
    marked = relation.window or relation.complete
    dims = tuple(k for k, letters in enumerate(relation.ins[0]) if set(letters) & marked)
    return () if relation.window and any(made.shape[k] != 1 for k in dims) else dims


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in single, as torch does."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _into(join: Callable[[Tensor, Tensor], Tensor], held: Tensor, other: Tensor) -> None:
    held.copy_(join(held, other.to(held.dtype)))


_MAX, _MIN = partial(_into, torch.maximum), partial(_into, torch.minimum)


def _sum(place: ReducedOperand, found: Mapping[str, Any], *, mean: bool = False) -> Reduction:
    dtype = torch.float64 if place.work.is_floating_point else torch.int64
    last = partial(torch.div, other=place.count) if mean else Tensor.detach
    return Folded(place, 8, 0, 2, 0, dtype, _total, Tensor.add_, last)


def _total(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
    return piece.sum(dims, keepdim=True)


def _prod(place: ReducedOperand, found: Mapping[str, Any]) -> Reduction:
    dtype = torch.float64 if place.work.is_floating_point else torch.int64

    def product(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        for dim in dims:
            piece = piece.prod(dim, keepdim=True, dtype=dtype)
        return piece

    wide = 2 * (8 // place.work.itemsize)
    return Folded(place, 8, wide, 2, 1, dtype, product, Tensor.mul_)


def _norm(place: ReducedOperand, found: Mapping[str, Any]) -> Reduction | Declined:
    power = found.get("ord", found.get("p"))
    power = 2.0 if power is None else float(power)
    double, wide = torch.float64, 1 + (8 // place.work.itemsize) * (place.work.itemsize < 8)
    if power == math.inf:
        return Folded(place, 8, 1, 3, 0, double, _farthest, _MAX)
    if power <= 0:
        return Declined(f"a norm of order {power}")

    def powers(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        return _total(piece.abs().double().pow_(power), dims)  # a square may be too large for float

    root = partial(torch.pow, exponent=1 / power)
    return Folded(place, 8, wide, 2, 0, double, powers, Tensor.add_, root)


def _farthest(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
    return piece.abs().amax(dims, keepdim=True)


def _extreme(place: ReducedOperand, found: Mapping[str, Any], *, largest: bool) -> Reduction:
    if place.work == torch.bool:
        return _truth(place, found, every=not largest)
    start, dtype = _beyond(place.work, largest), place.work
    of = partial(torch.amax if largest else torch.amin, keepdim=True)
    return Folded(place, dtype.itemsize, 0, 2, start, dtype, of, _MAX if largest else _MIN)


def _truth(place: ReducedOperand, found: Mapping[str, Any], *, every: bool) -> Reduction:
    reduce, join = (torch.all, torch.logical_and) if every else (torch.any, torch.logical_or)

    def of(piece: Tensor, dims: tuple[int, ...]) -> Tensor:
        return reduce(piece.bool(), dim=dims, keepdim=True)

    return Folded(place, 1, 1, 3, every, torch.bool, of, partial(_into, join))


def _spread(place: ReducedOperand, found: Mapping[str, Any], *, root: bool = False) -> Reduction:
    correction = found.get("correction", 1.0 if found.get("unbiased", True) else 0.0)
    left = max(place.count - (1.0 if correction is None else float(correction)), 0.0)

    def last(mean: Tensor, squares: Tensor) -> Tensor:
        return place.result((squares / left).sqrt_() if root else squares / left)

    return Moments(place, 24, 1, 9, last)


def _moments(place: ReducedOperand, found: Mapping[str, Any]) -> Moments:
    if not place.work.is_floating_point:
        place = replace(place, work=torch.float64)

    def last(mean: Tensor, squares: Tensor) -> Tensor:
        return place.result(torch.stack([mean, squares / place.count]))

    return Moments(place, 24, 1, 9, last)


def _log_sum_exp(place: ReducedOperand, found: Mapping[str, Any]) -> Reduction:
    if not place.work.is_floating_point:
        place = replace(place, work=place.dtype)
    return LogSumExp(place, 16, 1, 8)


def _place_of(
    place: ReducedOperand, found: Mapping[str, Any], *, largest: bool
) -> Reduction | Declined:
    if place.work == torch.bool:
        return Declined("the place of the largest of truth values")
    dim = -1 if found["dim"] is None else place.dims[0]
    return Extreme(place, place.work.itemsize + 8, 1, 4, largest, dim)


_Rule = Callable[[ReducedOperand, Mapping[str, Any]], "Reduction | Declined"]
_OVERLOADS: list[tuple[str, tuple[str, ...], _Rule]] = [
    ("sum", ("default", "dim_IntList"), _sum),
    ("mean", ("default", "dim"), partial(_sum, mean=True)),
    ("prod", ("default", "dim_int"), _prod),
    *((op, ("default",), partial(_extreme, largest=True)) for op in ("amax", "max")),
    *((op, ("default",), partial(_extreme, largest=False)) for op in ("amin", "min")),
    ("any", ("default", "dim", "dims"), partial(_truth, every=False)),
    ("all", ("default", "dim", "dims"), partial(_truth, every=True)),
    ("var", ("default", "dim", "correction"), _spread),
    ("std", ("default", "dim", "correction"), partial(_spread, root=True)),
    ("logsumexp", ("default",), _log_sum_exp),
    ("linalg_vector_norm", ("default",), _norm),
    ("norm", ("Scalar", "ScalarOpt_dim"), _norm),
    ("argmax", ("default",), partial(_place_of, largest=True)),
    ("argmin", ("default",), partial(_place_of, largest=False)),
    *((f"adaptive_avg_pool{d}d", ("default",), partial(_sum, mean=True)) for d in (1, 2, 3)),
]
_RULES: dict[str, _Rule] = {
    "demask.moments.default": _moments,
    **{f"aten.{op}.{overload}": rule for op, names, rule in _OVERLOADS for overload in names},
}


def moments_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean and population variance over some axes, kept one long, stacked, in float64.

    >>> moments_of(torch.tensor([[1.0, 3.0]]), (1,)).flatten()
    tensor([2., 1.], dtype=torch.float64)
    """
    dims, double = tuple(dim % x.ndim for dim in dims), torch.float64
    place = ReducedOperand(tuple(x.shape), dims, NONE, x.dtype, _wide(x.dtype), (), double)
    made = _moments(replace(place, out=(2, *place.kept)), {})
    made.update(state := made.begin(), x, ((0, 1), (0, 1)))
    return made.finish(state)


def attention(
    q: Tensor,
    keys: Iterable[Tensor],
    values: Iterable[Tensor],
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(q · keys * scale + mask) · values, keys and values in blocks of rows.

    q: (..., t, d); a block of keys: (..., s, d), of values: (..., s, e); mask: (..., t, S) for all
    S rows, added, or of truth values, False where a key is left out; a query without keys gives 0.
    scale: 1 / sqrt(d) if None. Source: Milakov and Gimelshein, Online normalizer calculation for
    softmax, 2018, in the order of FlashAttention.

    >>> q, k = torch.randn(1, 5, 4), torch.randn(1, 6, 4)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(q, k, k)
    >>> torch.allclose(attention(q, k.split(4, 1), k.split(4, 1)), whole, atol=1e-6)
    True
    """
    near = q.to(_wide(q.dtype)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    peak, total = near.new_full((*near.shape[:-1], 1), -math.inf), near.new_zeros(())
    found, first = near.new_zeros(()), 0
    for k, v in zip(keys, values, strict=True):
        seen = None if mask is None else mask[..., first : first + k.shape[-2]]
        first += k.shape[-2]
        scores = _scores(near, k.to(near.dtype), seen)
        top = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, share = scores.sub_(_finite(top)).exp_(), (peak - _finite(top)).exp_()
        total = total * share + weights.sum(-1, keepdim=True)
        found, peak = found * share + weights @ v.to(near.dtype), top
    return (found / torch.where(total == 0, 1.0, total)).to(q.dtype)


def _scores(near: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    scores = near @ k.transpose(-2, -1)
    if seen is None:
        return scores
    return scores.masked_fill_(~seen, -math.inf) if seen.dtype == torch.bool else scores.add_(seen)


__all__ = ["Reduction", "State", "attention", "moments_of", "reduction"]
