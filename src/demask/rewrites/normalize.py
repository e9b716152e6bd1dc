"""One notation for equivalent calls, for which the table of ops has one entry, and separate axes.

`CANONICAL` is what every engine applies after capture; `NORMALIZE` and `NORMALIZE_CLASS` are what
demask() applies before each analysis, the latter where the calls of the user's class must stay.
"""

from __future__ import annotations

import math
import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask.graph.split_recurrent import split_recurrent
from demask.graph.value import Value
from demask.ops import Declined, schema
from demask.ops.entries.contraction import PRODUCTS
from demask.ops.entries.movement import common_refinement
from demask.ops.schema import same_size
from demask.ops.traits import COPIES, SELECTS, SPLITS_OF_AXES, TAKES, TRANSPOSES, VIEW_OR_RESHAPE
from demask.rewrites.rule import NetworkCase, Pass, Phase, case, rule
from demask.rewrites.select_token_early import select_token_early
from demask.rewrites.separate_heads import separate_heads

aten = torch.ops.aten
_VIEWS = VIEW_OR_RESHAPE | {aten.unflatten.int}
X = (2, 4, 6)  # the shape of most cases


def join(values: list[Value], dim: int) -> Value:
    """Values joined along an axis."""
    return values[0].cat(values[1:], dim)


# ------------------------------------------------------------------------------- other notations


@rule(aten.slice.Tensor, cases=(case(lambda x: aten.slice(x, 1) * 2, X),), refused=(case(lambda x: x[:, 1:], X),))
def full_slice(out: Value, x: Value, dim: int, start: Any, end: Any, step: int) -> Value | None:
    """A slice of all positions is its operand (torch.export emits one per `:`)."""
    return x if out.is_shaped(x) else None


@rule(aten.broadcast_to.default, cases=(case(lambda x: aten.broadcast_to(x, (3, *X)), X),))
def broadcast_to(out: Value, x: Value, size: list[Any]) -> Value:
    """broadcast_to(x, size) == expand(x, size)"""
    return x.expand(size)


@rule(aten.expand_as.default, cases=(case(lambda x, y: x[:, :1].expand_as(y), X, X),))
def expand_as(out: Value, x: Value, other: Value) -> Value:
    """expand_as(x, y) == expand(x, sizes of y)"""
    return x.expand(other.sizes)


@rule(
    aten.view_as.default,
    aten.reshape_as.default,
    cases=(
        case(lambda x, y: x.view_as(y), X, (2, 24)),
        case(lambda x, y: x.transpose(1, 2).reshape_as(y), X, (2, 24)),
        case(lambda x, y: x.view_as(y), X, (2, 24), dynamic={0: (0,), 1: (0,)}),
    ),
)
def view_as(out: Value, x: Value, other: Value) -> Value:
    """view_as(x, y) == reshape(x, sizes of y)"""
    return x.reshape(other.sizes)


@rule(aten.type_as.default, cases=(case(lambda x, y: x.type_as(y.double()), X, X),))
def type_as(out: Value, x: Value, other: Value) -> Value:
    """type_as(x, y) == to(x, dtype of y)"""
    return x.to(other.dtype)


@rule(aten.stack.default, cases=(case(lambda x, y: torch.stack([x, y], 1), X, X),))
def stack(out: Value, parts: list[Value], dim: int) -> Value:
    """stack([x, y]) == cat([unsqueeze(x), unsqueeze(y)])"""
    return join([part.unsqueeze(dim) for part in parts], dim)


@rule(aten.squeeze.default, cases=(case(lambda x: x[:, :1].squeeze(), X),))
def squeeze(out: Value, x: Value) -> Value:
    """`squeeze` names its axes, since others may be cut to size one later."""
    return x.squeeze_dims([k for k, n in enumerate(x.shape) if same_size(n, 1)])


@rule(aten.squeeze.dim, cases=(case(lambda x: x.squeeze(1), X),), refused=(case(lambda x: x[:, :1].squeeze(1), X),))
def squeeze_dim(out: Value, x: Value, dim: int) -> Value | None:
    """`squeeze` of an axis whose size is not one is its operand."""
    return None if same_size(x.shape[dim], 1) else x


@rule(aten.glu.default, cases=(case(lambda x: F.glu(x, 1), X), case(lambda x: F.glu(x), X)))
def glu(out: Value, x: Value, dim: int) -> Value:
    """glu([a, b]) == a sigmoid(b)"""
    half = x.shape[dim] // 2
    value, gate = x.slice(dim, 0, half), x.slice(dim, half, 2 * half)
    return value * gate.sigmoid()


@rule(
    aten.repeat_interleave.self_int,
    cases=(
        case(lambda x: x.repeat_interleave(3, 1), X),
        case(lambda x: x.repeat_interleave(3, -3), X, dynamic={0: (0,)}),
    ),
    refused=(
        case(lambda x: x.repeat_interleave(3), X),
        case(lambda x: x.repeat_interleave(x.shape[0], 1), X, dynamic={0: (0,)}),
    ),
)
def repeat_interleave(out: Value, x: Value, count: int, dim: int | None, output_size: Any) -> Value | None:
    """Each position of an axis repeated: a new axis, expanded and merged."""
    if dim is None or not isinstance(count, int):
        return None
    return _repeat_axis(x, dim % x.rank, count, inner=True)


@rule(
    aten.repeat.default,
    cases=(case(lambda x: x.repeat(1, 2, 3), X), case(lambda x: x.repeat(2, 1, 1, 3), X, dynamic={0: (2,)})),
    refused=(case(lambda x: x.repeat(1, x.shape[0], 1), X, dynamic={0: (0,)}),),
)
def repeat(out: Value, x: Value, counts: list[int]) -> Value | None:
    """An axis repeated: a new axis before it, expanded and merged."""
    if not all(isinstance(n, int) for n in counts):
        return None
    for _ in range(len(counts) - x.rank):
        x = x.unsqueeze(0)
    for dim, count in enumerate(counts):
        x = x if count == 1 else _repeat_axis(x, dim, count, inner=False)
    return x


def _repeat_axis(x: Value, dim: int, count: int, *, inner: bool) -> Value:
    """x with an axis repeated: each position (`inner`), or all of them in turn."""
    sizes = x.sizes
    expanded = x.unsqueeze(dim + inner).expand([*sizes[: dim + inner], count, *sizes[dim + inner :]])
    return expanded.reshape([*sizes[:dim], sizes[dim] * count, *sizes[dim + 1 :]])


# ------------------------------------------------------------------------------------ selections


@rule(
    aten.index.Tensor,
    cases=(
        case(lambda x: x[:, torch.tensor([2, 0, -1])], X),
        case(lambda x: x[torch.tensor([[1, 0], [1, 1]])], X),
        case(lambda x: x[:, torch.tensor([2, 0], dtype=torch.int32)], X, dynamic={0: (0,)}),
    ),
    refused=(
        case(lambda x: x[torch.tensor([1, 0]), torch.tensor([2, 0])], X),
        case(lambda x, i: x[:, i], X, torch.tensor([1, 0])),
        case(lambda x: x[:, torch.tensor([True, False, True, True])], X),
        case(lambda x: x[:, :, torch.tensor([2, 0])], X, dynamic={0: (2,)}),
    ),
)
def constant_index(out: Value, x: Value, indices: list[Value | None]) -> Value | None:
    """x[index] with one constant index: positions are selected, then reshaped."""
    present = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    (axis, index), tensor = present[0], present[0][1].constant
    if len(present) != 1 or tensor is None:
        return None
    if tensor.dtype not in (torch.int64, torch.int32) or not isinstance(x.shape[axis], int):
        return None
    positions = out.read(f"{_constant_name(index)}_rows", (tensor.long() % x.shape[axis]).reshape(-1))
    rows = x.index_select(axis, positions)
    if tensor.ndim == 1:
        return rows
    sizes = x.sizes
    return rows.reshape([*sizes[:axis], *tensor.shape, *sizes[axis + 1 :]])


def _constant_name(read: Value) -> str:
    return read.editor.constants[str(read.target)].name


@rule(
    aten.index_select.default,
    cases=(case(lambda x, i: x.index_select(1, i), X, torch.tensor([1, 0])),),
    refused=(
        case(lambda x: x.index_select(1, torch.tensor([1, 0])), X),
        case(lambda x, i: x.index_select(1, i), X, torch.tensor(1)),
        case(lambda x, i: x.index_select(0, i), (), torch.tensor([0])),
    ),
)
def select_at_run_time(out: Value, x: Value, dim: int, index: Value) -> Value | None:
    """`index_select` by an index known only at run time is x[:, index]."""
    if index.constant is not None or index.rank != 1 or not x.rank:
        return None
    return x.call(aten.index.Tensor, x, [*[None] * (dim % x.rank), index])


@rule(
    aten.index_put.default,
    cases=(
        case(lambda x, y: x.index_put((y > 0,), torch.tensor(2.0, dtype=x.dtype)), X, X),
        case(lambda x, y: x.index_put((y > 0,), torch.tensor(2.0, dtype=x.dtype)), X, X[:1]),
    ),
    refused=(
        case(lambda x: x.index_put((torch.tensor([0]), torch.tensor([1])), torch.tensor(2.0, dtype=x.dtype)), X),
        case(
            lambda x, y, z: x.index_put((y > 0, z > 0), torch.tensor(2.0, dtype=x.dtype)),
            X,
            torch.tensor([1.0, 0]),
            torch.tensor([0, 0, 1.0, 0]),
        ),
        case(lambda x: x.index_put((torch.tensor([0]),), torch.tensor(2.0, dtype=x.dtype)), X),
        case(lambda x, y, z: x.index_put((y > 2,), z), X, X, (0,)),
        case(lambda x, y: x.index_put((y > 0,), torch.tensor(2.0, dtype=x.dtype), True), X, X),
    ),
)
def put_number(out: Value, x: Value, indices: list[Value], value: Value, accumulate: bool) -> Value | None:
    """x[mask] = number is a masked fill."""
    mask = indices[0]
    if len(indices) != 1 or mask.dtype != torch.bool:
        return None
    if value.rank or accumulate:
        return None
    for _ in range(x.rank - mask.rank):
        mask = mask.unsqueeze(-1)
    return x.masked_fill(mask, value)


@rule(
    aten.index_add.default,
    cases=(
        case(lambda x, y: x.index_add(1, torch.tensor([3, 0]), y), X, (2, 2, 6)),
        case(lambda x, y: x.index_add(-1, torch.tensor([3, 0]), y, alpha=2), X, (2, 4, 2)),
    ),
    refused=(
        case(lambda x, y: x.index_add(1, torch.tensor([3, 3]), y), X, (2, 2, 6)),
        case(lambda x, y, i: x.index_add(1, i, y), X, (2, 2, 6), torch.tensor([3, 0])),
        case(lambda x, y: x.index_add(2, torch.tensor([0]), y), X, (2, 4, 1), dynamic={0: (2,)}),
    ),
)
def add_at_constant(out: Value, x: Value, dim: int, index: Value, y: Value, alpha: Any) -> Value | None:
    """x.index_add(dim, index, y) with a constant index: x plus y scattered into zeros."""
    positions = None if index.constant is None else index.constant.tolist()
    if positions is None or len(set(positions)) != len(positions) or not isinstance(x.shape[dim], int):
        return None
    source = {position: k for k, position in enumerate(positions)}
    inverse = torch.tensor([source.get(k, len(positions)) for k in range(x.shape[dim])])
    # The name may be that of an inverse of another index, from an earlier pass.
    index = out.read(f"{_constant_name(index)}_inverse", inverse)
    scattered = y.pad([0, 0] * (x.rank - dim % x.rank - 1) + [0, 1]).index_select(dim, index)
    return x + (scattered if alpha == 1 else scattered * alpha)


@rule(
    aten.slice_scatter.default,
    cases=(
        case(
            lambda x, y: aten.slice_scatter(aten.slice_scatter(x.new_empty(X), x, 1, 0, 2), y, 1, -2),
            (2, 2, 6),
            (2, 2, 6),
        ),
    ),
    refused=(
        case(
            lambda x, y, z: aten.slice_scatter(aten.slice_scatter(x, y, 1, 0, 4), z, 2, 4, 6), (2, 8, 6), X, (2, 8, 2)
        ),
        case(lambda x, y: aten.slice_scatter(x, y, 1, 0, 4, 2), X, (2, 2, 6)),
        case(lambda x, y: aten.slice_scatter(aten.slice_scatter(x, y, 1, 0, 2), y, 1, 1, 3), X, (2, 2, 6)),
        case(lambda x, y: aten.slice_scatter(x, y, 1, 0, 4), X, X, dynamic={0: (1,), 1: (1,)}),
        case(lambda x, y: aten.slice_scatter(x, y, 1, 0, 2), X, (2, 2, 6)),
    ),
)
def written_slices(
    out: Value, x: Value, part: Value, dim: int, start: int | None, end: int | None, step: int
) -> Value | None:
    """Slices written one by one into a tensor until all of it is written are a concatenation."""
    axis, parts, target = None, dict[int, tuple[int, Value]](), out
    while target.calls(aten.slice_scatter.default):
        x, part, dim, start, end, step = target.arguments.values()
        axis = dim % x.rank if axis is None else axis
        size = out.shape[axis]
        start, end = start or 0, size if end is None else end
        if dim % x.rank != axis or step != 1:
            return None
        if not all(isinstance(n, int) for n in (size, start, end, part.shape[axis])):
            return None
        start, end = (min(n + size if n < 0 else n, size) for n in (start, end))
        if any(start < other + length and other < end for other, (length, _) in parts.items()):
            return None
        parts[start], target = (end - start, part), x
        if sum(length for length, _ in parts.values()) == size:
            return join([each for _, (_, each) in sorted(parts.items())], axis)
    return None


# ---------------------------------------------------------------------- views that merge moved axes


@rule(
    *VIEW_OR_RESHAPE,
    cases=(
        case(lambda x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 1).reshape(2, 8, 6), X, X),
        case(lambda x, y: torch.cat([x.unsqueeze(2), y.unsqueeze(2)], 2).reshape(2, 4, 12), X, X),
        case(lambda x, y: torch.cat([x[None], y[None]]).permute(1, 0, 2, 3).reshape(2, 8, 6), X, X),
        case(lambda x, y: torch.cat([x[None], y[None]]).permute(2, 0, 1, 3).reshape(4, 4, 6), X, X),
    ),
    refused=(
        case(lambda x: x.reshape(2, 24), X),
        case(lambda x, y: torch.cat([x, y], 1).reshape(2, 48), X, X),
        case(lambda x, y: torch.cat([x.unsqueeze(2), y.unsqueeze(2)], 1).reshape(2, 8, 6), X, X),
        case(lambda x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 1).reshape(2, 48), X, X),
        case(lambda x, y: torch.cat([x.unsqueeze(-1), y.unsqueeze(-1)], -1).permute(0, 1, 3, 2).reshape(8, 2, 6), X, X),
        case(lambda x, y: torch.cat([x.unsqueeze(3), y.unsqueeze(3)], 3).reshape(2, 4, 12), X, X),
        case(lambda x, y: torch.cat([x[None], y[None]]).reshape(2), (), ()),
    ),
)
def stacked_axis(out: Value, view: Value, size: list[Any]) -> Value | None:
    """Values stacked along an axis that is merged into the next one are a concatenation.

    stack((a, b)).reshape(...) is cat((a, b)), whose operands may lose different positions (the
    directions of an LSTM in an ONNX file)."""
    permuted = view.calls(aten.permute.default)
    order = [d % view.rank for d in view.arg("dims")] if permuted else list(range(view.rank))
    stacked = view.arg("self") if permuted else view
    if not stacked.calls(aten.cat.default):
        return None
    parts, axis = stacked.arg("tensors"), stacked.arg("dim") % stacked.rank
    if not all(part.calls(aten.unsqueeze.default) and part.arg("dim") % part.rank == axis for part in parts):
        return None
    position = order.index(axis)
    if out.rank != view.rank - 1 or position == out.rank or not _splits(out.shape, view.shape, position, 2):
        return None
    remaining = [d - (d > axis) for d in order if d != axis]
    parts = [part.arg("self") for part in parts]
    if remaining != sorted(remaining):
        parts = [part.permute(remaining) for part in parts]
    return join(parts, position)


@rule(
    *VIEW_OR_RESHAPE,
    cases=(
        case(lambda x: x.view(2, 2, 2, 6).transpose(1, 2).reshape(X), X),
        case(lambda x: x.view(2, 4, 3, 2).permute(0, 1, 3, 2).contiguous().view(X), X),
        case(lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).reshape(X), X, dynamic={0: (0,)}),
    ),
    refused=(
        case(lambda x: x.view(2, 24), X),
        case(lambda x: x.transpose(1, 2).reshape(X), X),
        case(lambda x: x.view(2, 2, 2, 6).transpose(1, 2).reshape(2, 2, 12), X),
        case(lambda x: x.view(2, 2, 2, 6).permute(0, 1, 2, 3).reshape(X), X),
        case(lambda x: x.view(2, 2, 2, 6).transpose(0, 1).reshape(X), X),
        case(lambda x: x.view(2, 2, 2, 4).permute(0, 2, 3, 1).reshape(2, 4, 4), (2, 4, 4)),
        case(lambda x: x.view(2, 2, 12).transpose(1, 2).reshape(X), X),
    ),
)
def shuffled_axis(out: Value, view: Value, size: list[Any]) -> Value | None:
    """An axis that is split, permuted and merged (a channel shuffle) is a selection of its positions."""
    while view.target in COPIES:
        view = view.arg("self")
    order, split = _unpermuted(view, single=True)
    if split.target not in _VIEWS:
        return None
    x, parts, changed = split.arg("self"), split.shape, [k for k, d in enumerate(order) if k != d]
    if not out.is_shaped(x) or not changed:
        return None
    axis, count = changed[0], len(parts) - x.rank + 1
    while axis and not _splits(x.shape, parts, axis, count):
        axis -= 1
    if not _splits(x.shape, parts, axis, count) or changed[-1] >= axis + count:
        return None
    inner = [d - axis for d in order[axis : axis + count]]
    positions = torch.arange(x.shape[axis]).view(list(parts[axis : axis + count])).permute(inner).reshape(-1)
    return x.index_select(axis, out.read(f"{x.name}_shuffle", positions))


def _splits(shape: Any, parts: Any, axis: int, count: int) -> bool:
    """Whether `parts` is `shape` with one static axis split into `count` axes."""
    split_sizes = parts[axis : axis + count]
    if count < 2 or not all(isinstance(n, int) for n in [*split_sizes, shape[axis]]):
        return False
    other_parts = [*parts[:axis], *parts[axis + count :]]
    other_sizes = [*shape[:axis], *shape[axis + 1 :]]
    is_split = math.prod(split_sizes) == shape[axis] and len(other_parts) == len(other_sizes)
    return is_split and all(map(same_size, other_parts, other_sizes))


def _unpermuted(value: Value, *, single: bool = False) -> tuple[list[int], Value]:
    """The order of the axes of a chain of transposes (single: of one), and the chain's operand."""
    order = list(range(value.rank))
    while value.target in TRANSPOSES:
        step, rank = list(range(len(order))), len(order)
        if value.target is aten.permute.default:
            step = [d % rank for d in value.arg("dims")]
        else:
            i, j = value.arg("dim0") % rank, value.arg("dim1") % rank
            step[i], step[j] = step[j], step[i]
        order = [step[k] for k in order]
        value = value.arg("self")
        if single:
            break
    return order, value


# -------------------------------------------------------------------------------------- products


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@rule(
    aten.view_as_real.default,
    cases=(case(_rotate, X, (4, 3)),),
    refused=(
        case(lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, 3, 2))), X),
        case(lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, 3, 2)) * 2), X),
        case(lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 4, 3, 2)) ** 2), X),
        case(lambda x: torch.view_as_real(torch.polar(x, x) * 2), X),
    ),
    exact=False,
)
def complex_product(out: Value, product: Value) -> Value | None:
    """Pairs of numbers that are multiplied as complex ones: their real and imaginary parts."""
    factors = [f for f in product.node.args if isinstance(f, torch.fx.Node)] if product.calls(aten.mul.Tensor) else []
    values = [Value(factor, out.editor) for factor in factors]
    pairs = [f.arg("self") for f in values if f.calls(aten.view_as_complex.default)]
    others = [f for f in values if f.dtype.is_complex and not f.calls(aten.view_as_complex.default)]
    if len(pairs) != 1 or len(others) != 1:
        return None
    (a, b), (c, d) = ([pair.select(-1, k) for k in (0, 1)] for pair in (pairs[0], others[0].view_as_real()))
    parts = (a * c - b * d, a * d + b * c)
    return join([part.unsqueeze(-1) for part in parts], -1)


def _einsum(equation: str, *shapes: tuple[int, ...]) -> NetworkCase:
    return case(lambda *operands: torch.einsum(equation, *operands), *shapes)


@rule(
    aten.einsum.default,
    cases=(
        _einsum("bi,oi,co->bc", (3, 4), (5, 4), (6, 5)),
        _einsum("...i,oi->...o", (2, 3, 4), (5, 4)),
        _einsum("bi,oi", (3, 4), (5, 4)),
        _einsum("bij,oi->bo", (3, 4, 5), (6, 4)),
        _einsum("bij->jb", (3, 4, 5)),
        _einsum("...->", (2, 3)),
    ),
    refused=(
        _einsum("bi,oi->bo", (3, 4), (5, 4)),
        _einsum("bii->b", (2, 3, 3)),
        _einsum("...i,...i->...", (3, 4), (2, 3, 4)),
    ),
    exact=False,
)
def einsum(out: Value, equation: str, operands: list[Value], path: Any) -> Value | None:
    """`einsum` as products of two operands, which the table has, from left to right: with letters
    for dots, after sums over the axes that one operand alone has. Repeated letters stay."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    spare = "".join(sorted(set(string.ascii_letters) - set(equation), reverse=True))
    dots = [
        spare[: operand.rank - len(part) + 3] if "." in part else ""
        for part, operand in zip(parts, operands, strict=True)
    ]
    if len(set(dots) - {""}) > 1 or any(len(set(p.replace(".", ""))) < len(p.replace(".", "")) for p in parts):
        return None
    all_dots = max(dots, key=len)
    if not arrow:
        letters = left.replace(".", "").replace(",", "")
        right = all_dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    right = right.replace("...", all_dots)
    parts = [part.replace("...", all_dots) for part in parts]
    equal = len(parts) == 2 and not (set(parts[0]) ^ set(parts[1])) - set(right)
    if equal and f"{','.join(parts)}->{right}" == equation:
        return None
    terms = list(zip(parts, operands, strict=True))
    while len(terms) > 1:
        (one, a), (other, b), *rest = terms
        needed = set(right).union(*(letters for letters, _ in rest))
        one, a = _sum_axes(one, a, needed | set(other))
        other, b = _sum_axes(other, b, needed | set(one))
        product = "".join(c for c in dict.fromkeys(one + other) if c in needed) if rest else right
        terms = [(product, out.call(aten.einsum.default, f"{one},{other}->{product}", [a, b])), *rest]
    if len(parts) > 1:
        return terms[0][1]
    letters, value = _sum_axes(*terms[0], set(right))
    return value.permute([letters.index(letter) for letter in right])


def _sum_axes(letters: str, value: Value, needed: set[str]) -> tuple[str, Value]:
    """A tensor and the letters of its axes, without those that are not needed, which are summed."""
    axes = [k for k, letter in enumerate(letters) if letter not in needed]
    if not axes:
        return letters, value
    return "".join(letter for letter in letters if letter in needed), value.sum(axes)


# ------------------------------------------------------------------------ selections before views


class _Projected(nn.Module):
    """A function of the output of a layer with constant weights, which reads its input repeated."""

    def __init__(self, take: Any, count: int = 1):
        super().__init__()
        self.layer, self.take, self.count = nn.Linear(6, 18), take, count

    def forward(self, x: Tensor) -> Any:
        return self.take(self.layer(torch.cat([x] * self.count)))


def _split_heads(x: Tensor) -> Tensor:
    """Queries, keys and values of two heads of three."""
    return x.view(x.shape[0], 4, 3, 2, 3)


@rule(
    *TAKES,
    cases=(
        case(_Projected(lambda p: _split_heads(p).permute(2, 0, 3, 1, 4)[0]), X),
        case(_Projected(lambda p: _split_heads(p).unbind(2)), X, dynamic={0: (0,)}),
        case(_Projected(lambda p: _split_heads(p).transpose(1, 2).split([1, 2], 1)), X),
        case(_Projected(lambda p: _split_heads(p)[:, :, :, 1:]), X),
    ),
    refused=(
        case(lambda x: x.view(2, 4, 3, 2)[:, :, 0], X),
        case(_Projected(lambda p: _split_heads(p)[:, 1]), X),
        case(_Projected(lambda p: p.view(2, 4, 18, 1)[..., 0]), X),
        case(_Projected(lambda p: p.view(2, 9, 8)[:, 1:]), X),
        case(_Projected(lambda p: p.view(2, 12, 6)[:, :, 1:]), X),
        case(_Projected(lambda p: p.unflatten(0, (2, -1)).select(0, 1), 2), X, dynamic={0: (0,)}),
    ),
)
def selection_before_view(out: Value, x: Value, *arguments: Any) -> Value | tuple[Value | None, ...] | None:
    """Positions of a split axis of a projection are selected before it is split.

    linear(x).view(b, t, 3, h, d).permute(2, 0, 3, 1, 4)[0]
      ==  linear(x)[..., rows].view(b, t, h, d).permute(0, 2, 1, 3)         rows of the queries

    Queries, keys and values of a fused projection then have separate axes, which can be cut
    independently."""
    order, view = _unpermuted(x)
    if view.target not in SPLITS_OF_AXES or not _is_projection(view.arg("self")):
        return None
    projected = view.arg("self")
    refinement = common_refinement(list(projected.shape), list(view.shape))
    if isinstance(refinement, Declined):
        return None
    before, after, sizes = refinement
    axis = order[out.arg("dim") % len(order)]
    source = next((k for k, letters in enumerate(before) if after[axis][:1] and after[axis][0] in letters), None)
    if source is None or len(before[source]) < 2 or any(sizes[letter] is None for letter in before[source]):
        return None
    parts = [k for k, letters in enumerate(after) if set(letters) & set(before[source])]
    if [after[k] for k in parts] != [[letter] for letter in before[source]]:
        return None
    rows = torch.arange(projected.shape[source]).view([view.shape[k] for k in parts])
    drops, view_sizes = out.target in SELECTS, _view_sizes(view)
    selected: list[Value | None] = []
    for number, positions in enumerate(_selected_positions(out, view.shape[axis])):
        if isinstance(out.fake, (list, tuple)) and not any(user.node.args[1] == number for user in out.users):
            selected.append(None)
            continue
        part = _take_positions(out, projected, source, rows.index_select(parts.index(axis), positions).reshape(-1))
        part = part.reshape(
            [len(positions) if k == axis else n for k, n in enumerate(view_sizes) if not (drops and k == axis)]
        )
        dims = [k - (drops and k > axis) for k in order if not (drops and k == axis)]
        selected.append(part if dims == list(range(len(dims))) else part.permute(dims))
    return tuple(selected) if isinstance(out.fake, (list, tuple)) else selected[0]


def _is_projection(value: Value) -> bool:
    """Whether a value is a product with a constant weight, or a view of one."""
    while value.target in SPLITS_OF_AXES:
        value = value.arg("self")
    return str(value.target) in PRODUCTS and any(node.op == "get_attr" for node in value.node.all_input_nodes)


def _selected_positions(take: Value, size: int) -> list[Tensor]:
    """Per output, the positions of an axis that a call selects."""
    output = schema.call_with(take.node, schema.arguments(take.node) | {"self": torch.arange(size), "dim": 0})
    return [t.reshape(-1) for t in (output if isinstance(output, (list, tuple)) else [output])]


def _take_positions(reader: Value, x: Value, axis: int, index: Tensor) -> Value:
    """Positions of an axis of x: a slice, if they follow one another."""
    first, last = int(index[0]), int(index[-1]) + 1
    if torch.equal(index, torch.arange(first, last)):
        return x.slice(axis, first, last)
    return x.index_select(axis, reader.read(f"{x.name}_rows", index))


def _view_sizes(view: Value) -> list[Any]:
    """The sizes of a view; dynamic ones are its own arguments if possible."""
    requested, shape = view.arguments.get("size", view.arguments.get("shape")), view.shape
    if requested is None or len(requested) != len(shape) or any(n == -1 for n in requested):
        return view.sizes
    return [n if isinstance(n, int) else size for n, size in zip(shape, requested, strict=True)]


# ---------------------------------------------------------------------------------------- phases


class _First(nn.Module):
    """The first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


_RECURRENT = Pass(
    "the split of recurrent calls",
    lambda program, table: split_recurrent(program),
    "layers(x) == layer_2(layer_1(x)); backward(x) == flip(forward(flip(x)))",
    cases=(case(nn.GRU(6, 4, 2), (5, 2, 6)), case(nn.LSTM(6, 4, bidirectional=True), (5, 2, 6), dynamic={0: (1,)})),
    exact=False,
)
_NOTATIONS = (
    full_slice,
    broadcast_to,
    expand_as,
    view_as,
    type_as,
    stack,
    squeeze,
    squeeze_dim,
    glu,
    repeat_interleave,
    repeat,
    constant_index,
    select_at_run_time,
    put_number,
    add_at_constant,
    written_slices,
    stacked_axis,
    shuffled_axis,
    complex_product,
    einsum,
)
_HEADS = Pass(
    "the separation of heads from a dynamic batch",
    separate_heads,
    "An axis of batch and heads that is split again later stays two axes in between",
    cases=(
        case(
            lambda x: x.view(-1, 4, 2, 3).transpose(1, 2).reshape(-1, 4, 3).exp().view(-1, 2, 4, 3),
            X,
            dynamic={0: (0,)},
        ),
    ),
)
_TOKENS = Pass(
    "the early selection of single tokens",
    select_token_early,
    "layer(x)[:, 0] == layer(x[:, :1])[:, 0], if the layer computes each token of a dynamic length for itself",
    cases=(case(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), _First()), X, dynamic={0: (1,)}),),
    exact=False,
)

CANONICAL = Phase("canonical calls", (_RECURRENT, *_NOTATIONS))
NORMALIZE = Phase("normal form", (*CANONICAL.entries, _HEADS, selection_before_view, _TOKENS))
NORMALIZE_CLASS = Phase("normal form of a class", (*CANONICAL.entries, _HEADS))

# Ops that need no entry in the table, since rules rewrite all or most of their calls.
REWRITTEN = frozenset(str(op) for op in CANONICAL.ops - VIEW_OR_RESHAPE - {aten.slice.Tensor})
