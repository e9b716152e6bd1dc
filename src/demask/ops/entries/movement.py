"""Entries of ops that only move values: views, permutations, slices, concatenations, pads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry, SizedLine
from demask.ops.entry import Shape as S
from demask.ops.schema import fake


def _first_operand_sizes(node: fx.Node) -> list[Any]:
    """The sizes of the first operand; dynamic ones as SymInt."""
    return list(fake(schema.operands(node)[0].value).shape)


def _letters(rank: int) -> list[str]:
    return [f"a{k}" for k in range(rank)]


def view(node: fx.Node) -> SizedLine | Declined:
    """The common refinement of the two shapes: `n 12 -> n 3 4` is `n (a b) -> n a b`."""
    old, new = _first_operand_sizes(node), list(schema.outputs(node)[0].shape)
    refinement = common_refinement(old, new)
    if isinstance(refinement, Declined):
        return refinement
    before, after, sizes = refinement
    return SizedLine(f"{_line(before)} -> {_line(after)}", sizes)


def _line(axes: list[list[str]]) -> str:
    """One side of a line from the letters of each axis."""
    return " ".join("1" if not a else a[0] if len(a) == 1 else f"({' '.join(a)})" for a in axes)


def common_refinement(
    old: list[Any], new: list[Any]
) -> tuple[list[list[str]], list[list[str]], dict[str, int | None]] | Declined:
    """The letters of each axis of both shapes, major first, and the sizes of letters: the common
    refinement of the shapes, by equal running products. Declined if there is none."""
    before: list[list[str]] = [[] for _ in old]
    after: list[list[str]] = [[] for _ in new]
    sizes: dict[str, int | None] = {}
    i = j = 0
    left: list[Any] = list(old)
    right: list[Any] = list(new)
    while i < len(left) and j < len(right):
        if schema.same_size(left[i], 1):
            i += 1
        elif schema.same_size(right[j], 1):
            j += 1
        else:
            step = _split(left[i], right[j])
            if step is None:
                return Declined(f"view from {_shape_text(old)} to {_shape_text(new)} has no common refinement")
            letter = f"a{len(sizes)}"
            size, left[i], right[j] = step
            sizes[letter] = size if isinstance(size, int) else None
            before[i].append(letter)
            after[j].append(letter)
    return before, after, sizes


def _expr(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _shape_text(sizes: Any) -> str:
    """A shape as text; long expressions of dynamic sizes as `?`."""
    texts = [str(size) for size in sizes]
    return f"({', '.join(text if len(text) <= 8 else '?' for text in texts)})"


def _split(a: Any, b: Any) -> tuple[Any, Any, Any] | None:
    """The next common factor, major first: (factor, remaining size of a, of b); None if none."""
    if schema.same_size(a, b):
        return a, 1, 1
    if isinstance(a, int) and isinstance(b, int):
        small = math.gcd(a, b)
        if small in (a, b):
            # Row-major: the major factor is shared first, the rest by the next axes.
            return small, a // small, b // small
        return None
    return _split_dynamic(a, b)


def _split_dynamic(a: Any, b: Any) -> tuple[Any, Any, Any] | None:
    """As `_split`, for dynamic sizes."""
    import sympy

    quotient = sympy.cancel(_expr(a) / _expr(b))
    big, small, swap = (a, b, False)
    if not quotient.is_polynomial() or quotient.as_numer_denom()[1] != 1:
        quotient, (big, small), swap = 1 / quotient, (b, a), True
    quotient = sympy.cancel(quotient)
    if quotient.as_numer_denom()[1] != 1:
        return None
    rest = int(quotient) if quotient.is_Integer else _Dynamic(quotient)
    del big
    return (small, 1, rest) if swap else (small, rest, 1)


class _Dynamic:
    """A dynamic size that no tensor has: the remaining factor of a composite axis."""

    def __init__(self, expr: Any):
        self.node = self
        self.expr = expr


def _sizes_as(name: str) -> Callable[[fx.Node, Any], dict[str, Any]]:
    return lambda node, sizes: {name: sizes[0]}


def _unflattened(node: fx.Node, sizes: Any) -> dict[str, Any]:
    call_arguments = schema.arguments(node)
    start = call_arguments["dim"] % len(_first_operand_sizes(node))
    return {"sizes": sizes[0][start : start + len(call_arguments["sizes"])]}


def _permute(node: fx.Node) -> str:
    before = _letters(len(_first_operand_sizes(node)))
    after = [before[dim % len(before)] for dim in schema.arguments(node)["dims"]]
    return f"{' '.join(before)} -> {' '.join(after)}"


def _transpose(node: fx.Node) -> str:
    before, call_arguments = _letters(len(_first_operand_sizes(node))), schema.arguments(node)
    after = list(before)
    if before:
        i, j = (dim % len(before) for dim in list(call_arguments.values())[1:])
        after[i], after[j] = before[j], before[i]
    return f"{' '.join(before)} -> {' '.join(after)}"


def _matrix_transpose(node: fx.Node) -> str:
    before = _letters(len(_first_operand_sizes(node)))
    return f"{' '.join(before)} -> {' '.join([*before[:-2], before[-1], before[-2]])}"


def _axes_moved(node: fx.Node) -> str:
    """`movedim`: some axes to other places, the others in order."""
    before, call_arguments = _letters(len(_first_operand_sizes(node))), schema.arguments(node)
    source, destination = (
        [d % len(before) for d in ([dims] if isinstance(dims, int) else dims)]
        for dims in (call_arguments["source"], call_arguments["destination"])
    )
    rest = iter([axis for k, axis in enumerate(before) if k not in source])
    places = dict(zip(destination, source, strict=True))
    after = [before[places[k]] if k in places else next(rest) for k in range(len(before))]
    return f"{' '.join(before)} -> {' '.join(after)}"


def _reverse(node: fx.Node) -> str:
    before = _letters(len(_first_operand_sizes(node)))
    return f"{' '.join(before)} -> {' '.join(before[::-1])}"


def _unsqueeze(node: fx.Node) -> str:
    before = _letters(len(_first_operand_sizes(node)))
    dim = schema.arguments(node)["dim"] % (len(before) + 1)
    return f"{' '.join(before)} -> {' '.join([*before[:dim], '1', *before[dim:]])}"


def _expand(node: fx.Node) -> str:
    old, new = _first_operand_sizes(node), list(schema.outputs(node)[0].shape)
    added = len(new) - len(old)
    after = [f"e{k}" for k in range(len(new))]
    is_expanded = [schema.same_size(n, 1) and not schema.same_size(new[k + added], 1) for k, n in enumerate(old)]
    before = ["1" if expanded else letter for expanded, letter in zip(is_expanded, after[added:], strict=True)]
    return f"{' '.join(before)} -> {' '.join(after)}"


def _dims(node: fx.Node) -> set[int]:
    """The axes along which positions move."""
    call_arguments, rank = schema.arguments(node), len(_first_operand_sizes(node))
    if "pad" in call_arguments or "padding" in call_arguments:
        count = len(call_arguments["pad"] if "pad" in call_arguments else call_arguments["padding"]) // 2
        return set(range(rank - count, rank))
    dims = call_arguments.get("dims", call_arguments.get("dim"))
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % rank for dim in dims} if dims else set(range(rank))


def _moved(node: fx.Node, drops: bool = False) -> str | Declined:
    """Axes in `dim` are moved, in operands and outputs; with `drops` the outputs lack them."""
    dims, tensors = _dims(node), schema.operands(node, ("index",))
    if any(not isinstance(o.value, fx.Node) for o in tensors):
        return Declined("positions of a number in the place of a tensor")
    marked = [f"@a{k}" if k in dims else f"a{k}" for k in range(len(_first_operand_sizes(node)))]
    after = [axis for axis in marked if not (drops and axis.startswith("@"))]
    before = ", ".join([" ".join(marked)] * len(tensors))
    return f"{before} -> {', '.join([' '.join(after)] * len(schema.outputs(node)))}"


def _adds_number(node: fx.Node) -> bool:
    """Whether a pad adds positions with a number of its own, not with values of its input."""
    call_arguments = schema.arguments(node)
    grows = any(not isinstance(n, int) or n > 0 for n in call_arguments["pad"])
    return grows and call_arguments.get("mode", "constant") == "constant"


def _slice(node: fx.Node) -> str | Declined:
    """x[:] along a dynamic axis is the full axis; torch.export emits one per ellipsis."""
    call_arguments = schema.arguments(node)
    new, old = schema.outputs(node)[0].shape, _first_operand_sizes(node)
    dim = call_arguments["dim"] % len(old)
    if call_arguments["step"] == 1 and schema.same_size(new[dim], old[dim]):
        return "... -> ..."
    return _moved(node)


def _chosen(node: fx.Node) -> str | Declined:
    """x[i, :, j]: indexed axes must be complete; the others are carried."""
    call_arguments, rank = schema.arguments(node), len(_first_operand_sizes(node))
    indexed = [k for k, index in enumerate(call_arguments["indices"]) if index is not None]
    dtypes = {fake(call_arguments["indices"][k]).dtype for k in indexed}
    if not dtypes <= {torch.int64, torch.int32}:
        return Declined("positions selected by a mask")
    if not indexed:
        return "... -> ..."
    before = [f"!a{k}" if k in indexed else f"a{k}" for k in range(rank)]
    after = [axis for k, axis in enumerate(before) if k not in indexed]
    is_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    after.insert(indexed[0] if is_adjacent else 0, "...")
    return f"{' '.join(before)}{', ...' * len(indexed)} -> {' '.join(after)}"


def _gathered(node: fx.Node) -> str | Declined:
    """Axis `dim` must be complete; the other axes must have equal sizes, and are carried."""
    call_arguments, old = schema.arguments(node), _first_operand_sizes(node)
    dim = call_arguments["dim"] % max(len(old), 1)
    new = schema.outputs(node)[0].shape
    if any(k != dim and not schema.same_size(a, b) for k, (a, b) in enumerate(zip(old, new, strict=True))):
        return Declined("a gather that takes only a part of its other axes")
    after = _letters(len(old))
    before = ["!s" if k == dim else axis for k, axis in enumerate(after)]
    return f"{' '.join(before)}, {' '.join(after)} -> {' '.join(after)}"


def _dropped(node: fx.Node) -> str | Declined:
    return _moved(node, drops=True)


def _pixel_shuffle(node: fx.Node) -> SizedLine:
    r = schema.arguments(node)["upscale_factor"]
    height, width = _first_operand_sizes(node)[-2:]
    sizes = {"r": r, "s": r, "h": _static(height), "w": _static(width)}
    return SizedLine("... (c !r !s) h w -> ... c (h !r) (w !s)", sizes)


def _pixel_unshuffle(node: fx.Node) -> SizedLine:
    r = schema.arguments(node)["downscale_factor"]
    height, width = schema.outputs(node)[0].shape[-2:]
    sizes = {"r": r, "s": r, "h": _static(height), "w": _static(width)}
    return SizedLine("... c (h !r) (w !s) -> ... (c !r !s) h w", sizes)


def _channel_shuffle(node: fx.Node) -> SizedLine:
    groups = schema.arguments(node)["groups"]
    return SizedLine("n (!g c) ... -> n (c !g) ...", {"g": groups})


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None


_X = S((2, 3, 4))
_VIEW = Case((S((2, 12)), [2, 3, 4]), {})
_FLAT = Case((S((2, 3, 4)), [2, 12]), {})


def _entry(line: Any, *cases: Case, **more: Any) -> Entry:
    return Entry(line, fill="same", cases=cases, **more)


ENTRIES = [
    ("aten.view.default", _entry(view, _VIEW, _FLAT, args=_sizes_as("size"))),
    ("aten._unsafe_view.default", _entry(view, _VIEW, args=_sizes_as("size"))),
    ("aten.reshape.default", _entry(view, _VIEW, _FLAT, args=_sizes_as("shape"))),
    ("aten.flatten.using_ints", _entry(view, Case((S((2, 3, 4, 5)), 1), {}))),
    ("aten.unflatten.int", _entry(view, Case((S((2, 12)), 1, [3, 4]), {}), args=_unflattened)),
    ("aten.permute.default", _entry(_permute, Case((_X, [2, 0, 1]), {}))),
    ("aten.transpose.int", _entry(_transpose, Case((_X, 1, 2), {}))),
    ("aten.swapaxes.default", _entry(_transpose, Case((_X, 1, 2), {}))),
    ("aten.swapdims.default", _entry(_transpose, Case((_X, 0, 2), {}))),
    ("aten.mT.default", _entry(_matrix_transpose, Case((_X,), {}))),
    ("aten.movedim.int", _entry(_axes_moved, Case((_X, 0, -1), {}))),
    ("aten.movedim.intlist", _entry(_axes_moved, Case((S((2, 3, 4, 5)), [3, 0], [0, 2]), {}))),
    ("aten.t.default", _entry(_reverse, Case((S((2, 3)),), {}))),
    ("aten.numpy_T.default", _entry(_reverse, Case((S((2, 3)),), {}))),
    ("aten.unsqueeze.default", _entry(_unsqueeze, Case((_X, 1), {}), Case((_X, -1), {}))),
    ("aten.squeeze.dim", _entry(view, Case((S((2, 1, 3)), 1), {}))),
    ("aten.squeeze.dims", _entry(view, Case((S((2, 1, 3, 1)), [1, 3]), {}))),
    ("aten.squeeze.default", _entry(view, Case((S((2, 1, 3)),), {}))),
    ("aten.expand.default", _entry(_expand, Case((S((2, 1, 3)), [2, 5, 3]), {}),
                                   args=_sizes_as("size"))),
    ("aten.slice.Tensor", _entry(
        _slice, Case((_X, 1, 1, 3), {}), Case((S((2, 7)), 1, 0, 7, 3), {}))),
    ("aten.narrow.default", _entry(_moved, Case((_X, 2, 1, 2), {}))),
    ("aten.select.int", _entry(_dropped, Case((_X, 1, 2), {}))),
    ("aten.unbind.int", _entry(_dropped, Case((_X, 1), {}))),
    ("aten.split.Tensor", _entry(_moved, Case((S((2, 7)), 3, 1), {}))),
    ("aten.split_with_sizes.default", _entry(_moved, Case((S((2, 7)), [3, 4], 1), {}))),
    ("aten.chunk.default", _entry(_moved, Case((S((2, 6)), 2, 1), {}))),
    ("aten.tensor_split.sections", _entry(_moved, Case((S((2, 7)), 3, 1), {}))),
    ("aten.tensor_split.indices", _entry(_moved, Case((S((2, 7)), [2, 5], 1), {}))),
    ("aten.cat.default", _entry(_moved, Case(([_X, S((2, 5, 4))], 1), {}))),
    ("aten.flip.default", _entry(_moved, Case((_X, [1]), {}))),
    ("aten.roll.default", _entry(_moved, Case((_X, [1], [2]), {}))),
    ("aten.constant_pad_nd.default", _entry(
        _moved, Case((_X, [1, 2]), {}), Case((S((2, 3, 4, 5)), [1, 0, 0, 2, 2, 1], 0.5), {}),
        pads=_adds_number)),
    ("aten.pad.default", _entry(
        _moved, Case((_X, [1, 2]), {}), Case((_X, [1, 2], "reflect"), {}),
        Case((S((2, 3, 4, 5)), [1, 2, 2, 1], "replicate"), {}),
        Case((S((2, 3, 4, 5)), [1, 2, 2, 1], "circular"), {}), pads=_adds_number)),
    *((f"aten.{kind}_pad{d}d.default", _entry(
        _moved, Case((S((2, 3, 4, 5, 3)[: d + 2]), [1, 2, 2, 1, 1, 1][: 2 * d]), {})))
      for kind in ("reflection", "replication") for d in (1, 2, 3)),
    ("aten.index_select.default", _entry(_moved, Case((_X, 1, S((4,), True, 3)), {}),
                                         indices=("index",))),
    ("aten.index.Tensor", _entry(
        _chosen, Case((S((5, 3, 4)), [S((2, 6), of=5)]), {}),
        Case((S((3, 5, 4)), [None, S((6,), of=5), S((6,), of=4)]), {}),
        Case((S((5, 3, 4)), [S((6,), of=5), None, S((6,), of=4)]), {}))),
    ("aten.gather.default", _entry(_gathered, Case((S((5, 3)), 0, S((4, 3), of=5)), {}))),
    ("aten.slice_scatter.default", _entry(_moved, Case((_X, S((2, 2, 4)), 1, 1, 3), {}))),
    ("aten.pixel_shuffle.default", _entry(_pixel_shuffle, Case((S((2, 12, 3, 4)), 2), {}))),
    ("aten.pixel_unshuffle.default", _entry(_pixel_unshuffle, Case((S((2, 3, 4, 6)), 2), {}))),
    ("aten.channel_shuffle.default", _entry(_channel_shuffle, Case((S((2, 6, 3)), 3), {}))),
]  # fmt: skip
