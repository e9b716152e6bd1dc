"""Canonical calls: one notation for equivalent calls, for which the table has one entry."""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from demask.failures import Log
from demask.graph.editor import GraphEditor
from demask.graph.normalize.split_recurrent import split_recurrent
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.schema import same_shape, same_size
from demask.ops.traits import COPIES, TRANSPOSES, VIEW_OR_RESHAPE

aten = torch.ops.aten


def canonicalize_calls(program: Program, log: Log | None = None) -> Program:
    """The same program with canonical calls: `expand_as` as expand, `stack` as cat, `glu` as a
    product. Slices of whole axes (torch.export emits one per `:`) are removed. A call whose rule
    fails does not change, and is recorded in `log`."""
    log = Log() if log is None else log
    layers = log.attempt("the split of recurrent calls", lambda: split_recurrent(program), program)
    editor = GraphEditor(layers)
    for node in editor.calls(aten.slice.Tensor, *_RULES):
        with editor.graph.inserting_before(node):
            what = f"the canonical notation of {node.name} ({node.target})"
            log.attempt(what, partial(_canonicalize, editor, node), None)
    return editor.finish()


def _canonicalize(editor: GraphEditor, node: fx.Node) -> None:
    """Replace a call by its canonical form, if that is another one."""
    if node.target is aten.slice.Tensor and _is_whole(node):
        value: Any = node.args[0]
    else:
        rule = _RULES.get(node.target)
        value = None if rule is None else rule(editor, node)
    if value is not None:
        editor.replace(node, value, inherit=value not in node.all_input_nodes)


def _is_whole(node: fx.Node) -> bool:
    """Whether a slice takes a whole axis."""
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    return step == 1 and same_shape(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]


def _expand_as(editor: GraphEditor, node: fx.Node) -> fx.Node:
    x, other = node.args
    return editor.call(aten.expand.default, x, editor.sizes(other))


def _broadcast(editor: GraphEditor, node: fx.Node) -> fx.Node:
    return editor.call(aten.expand.default, *node.args)


def _view_as(editor: GraphEditor, node: fx.Node) -> fx.Node:
    x, other = node.args
    return editor.call(aten.reshape.default, x, editor.sizes(other))


def _type_as(editor: GraphEditor, node: fx.Node) -> fx.Node:
    x, other = node.args
    return editor.call(aten.to.dtype, x, other.meta["val"].dtype)  # type: ignore[union-attr]


def _stack(editor: GraphEditor, node: fx.Node) -> fx.Node:
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return editor.call(aten.cat.default, [editor.call(aten.unsqueeze.default, p, dim) for p in parts], dim)


def _repeated(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """`repeat_interleave`: each position of an axis repeated: a new axis, expanded and merged."""
    x, count = node.args[0], node.args[1]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None or not isinstance(count, int):
        return None
    return _repeat_axis(editor, x, dim % x.meta["val"].ndim, count, inner=True)  # type: ignore[arg-type,union-attr,operator]


def _tiled(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """`repeat`: an axis repeated as a whole: a new axis before it, expanded and merged."""
    x: Any = node.args[0]
    counts: Any = list(node.args[1])  # type: ignore[arg-type]
    if not all(isinstance(n, int) for n in counts):
        return None
    for _ in range(len(counts) - x.meta["val"].ndim):
        x = editor.call(aten.unsqueeze.default, x, 0)
    for dim, count in enumerate(counts):
        x = x if count == 1 else _repeat_axis(editor, x, dim, count, inner=False)
    return x


def _repeat_axis(editor: GraphEditor, x: fx.Node, dim: int, count: int, *, inner: bool) -> fx.Node:
    """x with an axis repeated: each position (`inner`), or the axis as a whole."""
    sizes = editor.sizes(x)
    unsqueezed = editor.call(aten.unsqueeze.default, x, dim + inner)
    shape = [*sizes[: dim + inner], count, *sizes[dim + inner :]]
    expanded = editor.call(aten.expand.default, unsqueezed, shape)
    size = sizes[dim] * count if isinstance(sizes[dim], int) else editor.call(operator.mul, sizes[dim], count)
    return editor.call(aten.reshape.default, expanded, [*sizes[:dim], size, *sizes[dim + 1 :]])


def _indexed(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """x[index] with one constant index: positions are selected, then reshaped."""
    x, indices = node.args
    present = [(k, i) for k, i in enumerate(indices) if i is not None]  # type: ignore[arg-type]
    if len(present) != 1 or not isinstance(present[0][1], fx.Node) or present[0][1].op != "get_attr":
        return None
    (axis, read), shape = present[0], x.meta["val"].shape  # type: ignore[union-attr]
    constant = editor.constants[str(read.target)]
    if constant.tensor.dtype not in (torch.int64, torch.int32) or not isinstance(shape[axis], int):
        return None
    flat = (constant.tensor.long() % shape[axis]).reshape(-1)
    index_node = editor.add_constant(f"{constant.name}_rows", flat, node, separator="")
    rows = editor.call(aten.index_select.default, x, axis, index_node)
    if constant.tensor.ndim == 1:
        return rows
    sizes = editor.sizes(x)
    return editor.call(aten.reshape.default, rows, [*sizes[:axis], *constant.tensor.shape, *sizes[axis + 1 :]])


def _selected(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """`index_select` by an index known only at run time: x[:, index]."""
    arguments: Any = node.args
    x, dim, index = arguments
    rank, is_constant = x.meta["val"].ndim, index.op == "get_attr"
    if is_constant or index.meta["val"].ndim != 1 or not rank:
        return None
    return editor.call(aten.index.Tensor, x, [*[None] * (dim % rank), index])


def _put(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """x[mask] = number: a masked fill."""
    arguments = schema.arguments(node)
    x, indices, value = arguments["self"], arguments["indices"], arguments["values"]
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.meta["val"].dtype != torch.bool:
        return None
    if value.meta["val"].ndim or arguments["accumulate"]:
        return None
    for _ in range(x.meta["val"].ndim - mask.meta["val"].ndim):
        mask = editor.call(aten.unsqueeze.default, mask, -1)
    return editor.call(aten.masked_fill.Tensor, x, mask, value)


def _squeeze(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """`squeeze` with explicit axes: axes may be cut to size one later."""
    x = node.args[0]
    ones = [k for k, n in enumerate(x.meta["val"].shape) if same_size(n, 1)]  # type: ignore[union-attr]
    return editor.call(aten.squeeze.dims, x, ones)


def _squeeze_at(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """`squeeze` of an axis whose size is not one: its operand."""
    x, dim = node.args
    if same_size(x.meta["val"].shape[dim], 1):  # type: ignore[union-attr,index]
        return None
    return x  # type: ignore[return-value]


def _glu(editor: GraphEditor, node: fx.Node) -> fx.Node:
    x: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else -1
    half = x.meta["val"].shape[dim] // 2
    value = editor.call(aten.slice.Tensor, x, dim, 0, half)
    gate = editor.call(aten.slice.Tensor, x, dim, half, 2 * half)
    return editor.call(aten.mul.Tensor, value, editor.call(aten.sigmoid.default, gate))


def _viewed(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A view that merges permuted axes, as a concatenation or an index selection."""
    return _unstacked(editor, node) or _shuffled(editor, node)


def _unstacked(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """Values stacked along a new axis that is merged into the next axis are a concatenation:
    stack((a, b)).reshape(...) is cat((a, b)), whose operands may lose different positions (the
    directions of an LSTM in an ONNX file)."""
    inner: Any = node.args[0]
    is_permuted = inner.target is aten.permute.default
    order = [d % inner.meta["val"].ndim for d in inner.args[1]] if is_permuted else None
    stack = inner.args[0] if is_permuted else inner
    if stack.target is not aten.cat.default or not all(_is_new_axis(p) for p in stack.args[0]):
        return None
    axis = stack.args[1] % stack.meta["val"].ndim if len(stack.args) > 1 else 0
    if any(p.args[1] % p.meta["val"].ndim != axis for p in stack.args[0]):
        return None
    order = order or list(range(stack.meta["val"].ndim))
    position = order.index(axis)
    shape, split_shape = node.meta["val"].shape, inner.meta["val"].shape
    if len(shape) != len(split_shape) - 1 or position == len(shape):
        return None
    if not _splits(shape, split_shape, position, 2):
        return None
    remaining = [d - (d > axis) for d in order if d != axis]
    parts = [p.args[0] for p in stack.args[0]]
    if remaining != sorted(remaining):
        parts = [editor.call(aten.permute.default, p, remaining) for p in parts]
    return editor.call(aten.cat.default, parts, position)


def _is_new_axis(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.unsqueeze.default


def _shuffled(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """An axis that is split, permuted and merged (a channel shuffle), as a permutation of the axis,
    of which single positions can be removed."""
    inner: Any = node.args[0]
    while inner.target in COPIES:
        inner = inner.args[0]
    if inner.target not in TRANSPOSES:
        return None
    split = inner.args[0]
    if split.target not in _VIEWS:
        return None
    x, parts = split.args[0], split.meta["val"].shape
    order = list(range(len(parts)))
    if inner.target is aten.transpose.int:
        a, b = (d % len(parts) for d in inner.args[1:3])
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % len(parts) for d in inner.args[1]]
    if not same_shape(node.meta["val"], x.meta["val"]):
        return None
    return _permuted(editor, node, x, parts, order)


def _permuted(editor: GraphEditor, reader: fx.Node, x: fx.Node, parts: Any, order: list[int]) -> fx.Node | None:
    """x with one axis, which was split into several axes of `parts`, in another order."""
    shape = x.meta["val"].shape
    changed = [k for k, d in enumerate(order) if k != d]
    if not changed:
        return None
    axis, count = changed[0], len(parts) - len(shape) + 1
    while axis and not _splits(shape, parts, axis, count):
        axis -= 1
    if not _splits(shape, parts, axis, count) or changed[-1] >= axis + count:
        return None
    sizes = list(parts[axis : axis + count])
    inner_order = [d - axis for d in order[axis : axis + count]]
    index = torch.arange(shape[axis]).view(sizes).permute(inner_order).reshape(-1)
    index_node = editor.add_constant(f"{x.name}_shuffle", index, reader, separator="")
    return editor.call(aten.index_select.default, x, axis, index_node)


def _splits(shape: Any, parts: Any, axis: int, count: int) -> bool:
    """Whether `parts` is `shape` with one static axis split into `count` axes."""
    split_sizes = parts[axis : axis + count]
    if count < 2 or not all(isinstance(n, int) for n in [*split_sizes, shape[axis]]):
        return False
    other_parts = [*parts[:axis], *parts[axis + count :]]
    other_sizes = [*shape[:axis], *shape[axis + 1 :]]
    is_split = math.prod(split_sizes) == shape[axis] and len(other_parts) == len(other_sizes)
    return is_split and all(map(same_size, other_parts, other_sizes))


def _index_add(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """x.index_add(dim, index, y) with a constant index: x plus y scattered into zeros."""
    x, dim, index, y = node.args
    constant = editor.constants.get(str(index.target)) if index.op == "get_attr" else None  # type: ignore[union-attr]
    positions = constant.tensor.tolist() if constant else []
    if constant is None or len(set(positions)) != len(positions):
        return None
    size, rank = x.meta["val"].shape[dim], x.meta["val"].ndim  # type: ignore[union-attr,index]
    source = {position: k for k, position in enumerate(positions)}
    inverse = torch.tensor([source.get(k, len(positions)) for k in range(size)])
    # The name may be that of an inverse of another index, from an earlier pass.
    index_node = editor.add_constant(f"{constant.name}_inverse", inverse, node, separator="")
    zeros = [0, 0] * (rank - dim % rank - 1) + [0, 1]  # type: ignore[operator]
    padded = editor.call(aten.constant_pad_nd.default, y, zeros)
    scattered = editor.call(aten.index_select.default, padded, dim, index_node)
    return editor.call(aten.add.Tensor, x, scattered, alpha=node.kwargs.get("alpha", 1))


def _written(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """Slices that are written one by one into a tensor until nothing of it is left, as the parts of
    keys into an empty one: their concatenation."""
    dim, parts, whole = None, dict[int, tuple[int, fx.Node]](), node
    while whole.target is aten.slice_scatter.default:
        arguments = schema.arguments(whole)
        rank = whole.meta["val"].ndim
        dim = arguments["dim"] % rank if dim is None else dim
        size, part = node.meta["val"].shape[dim], arguments["src"]
        start, end = arguments["start"] or 0, arguments["end"]
        end = size if end is None else end
        sizes = (size, start, end, part.meta["val"].shape[dim])
        if arguments["dim"] % rank != dim or arguments["step"] != 1:
            return None
        if not all(isinstance(n, int) for n in sizes):
            return None
        start, end = (min(n + size if n < 0 else n, size) for n in (start, end))
        if any(start < other + length and other < end for other, (length, _) in parts.items()):
            return None
        parts[start], whole = (end - start, part), arguments["self"]
        if sum(length for length, _ in parts.values()) == size:
            return editor.call(aten.cat.default, [p for _, (_, p) in sorted(parts.items())], dim)
    return None


def _rotated(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """Pairs of numbers that are multiplied as complex ones: their real and imaginary parts."""
    product: Any = node.args[0]
    factors: Any = product.args if product.target is aten.mul.Tensor else ()
    pairs = [f.args[0] for f in factors if isinstance(f, fx.Node) and f.target is aten.view_as_complex.default]
    others = [
        f
        for f in factors
        if isinstance(f, fx.Node) and f.meta["val"].is_complex() and f.target is not aten.view_as_complex.default
    ]
    if len(pairs) != 1 or len(others) != 1:
        return None
    call, both = editor.call, (pairs[0], editor.call(aten.view_as_real.default, others[0]))
    (a, b), (c, d) = ([call(aten.select.int, pair, -1, k) for k in (0, 1)] for pair in both)
    parts = (
        call(aten.sub.Tensor, call(aten.mul.Tensor, a, c), call(aten.mul.Tensor, b, d)),
        call(aten.add.Tensor, call(aten.mul.Tensor, a, d), call(aten.mul.Tensor, b, c)),
    )
    return call(aten.cat.default, [call(aten.unsqueeze.default, part, -1) for part in parts], -1)


_VIEWS = VIEW_OR_RESHAPE | {aten.unflatten.int}


def _einsum(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """`einsum` as products of two operands, which the table has, from left to right: with letters
    for dots, after sums over the axes that one operand alone has. Repeated letters stay."""
    equation, values = str(node.args[0]).replace(" ", ""), list(node.args[1])  # type: ignore[arg-type]
    left, arrow, right = equation.partition("->")
    parts = left.split(",")
    spare = "".join(sorted(set(string.ascii_letters) - set(equation), reverse=True))
    ranks = [value.meta["val"].ndim for value in values]
    dots = [spare[: rank - len(part) + 3] if "." in part else "" for part, rank in zip(parts, ranks, strict=True)]
    if len(set(dots) - {""}) > 1 or any(len(set(p.replace(".", ""))) < len(p.replace(".", "")) for p in parts):
        return None
    all_dots = max(dots, key=len)
    if not arrow:
        letters = left.replace(".", "").replace(",", "")
        right = all_dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    right = right.replace("...", all_dots)
    parts = [part.replace("...", all_dots) for part in parts]
    equal = len(parts) == 2 and not set(parts[0]) ^ set(parts[1]) - set(right)
    if equal and f"{','.join(parts)}->{right}" == equation:
        return None
    terms = list(zip(parts, values, strict=True))
    while len(terms) > 1:
        (one, a), (other, b), *rest = terms
        needed = set(right).union(*(letters for letters, _ in rest))
        one, a = _sum_axes(editor, (one, a), needed | set(other))
        other, b = _sum_axes(editor, (other, b), needed | set(one))
        product = "".join(c for c in dict.fromkeys(one + other) if c in needed) if rest else right
        call = editor.call(aten.einsum.default, f"{one},{other}->{product}", [a, b])
        terms = [(product, call), *rest]
    if len(parts) > 1:
        return terms[0][1]
    letters, value = _sum_axes(editor, terms[0], set(right))
    return editor.call(aten.permute.default, value, [letters.index(letter) for letter in right])


def _sum_axes(editor: GraphEditor, term: tuple[str, fx.Node], needed: set[str]) -> tuple[str, fx.Node]:
    """A tensor and the letters of its axes, without those that are not needed, which are summed."""
    letters, value = term
    axes = [k for k, letter in enumerate(letters) if letter not in needed]
    if not axes:
        return term
    summed = editor.call(aten.sum.dim_IntList, value, axes)
    return "".join(letter for letter in letters if letter in needed), summed


_RULES: dict[Any, Callable[[GraphEditor, fx.Node], fx.Node | None]] = {
    aten.index_add.default: _index_add,
    aten.view.default: _viewed,
    aten.reshape.default: _viewed,
    aten.broadcast_to.default: _broadcast,
    aten.expand_as.default: _expand_as,
    aten.view_as.default: _view_as,
    aten.reshape_as.default: _view_as,
    aten.type_as.default: _type_as,
    aten.stack.default: _stack,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze_at,
    aten.glu.default: _glu,
    aten.einsum.default: _einsum,
    aten.repeat_interleave.self_int: _repeated,
    aten.repeat.default: _tiled,
    aten.index.Tensor: _indexed,
    aten.index_select.default: _selected,
    aten.index_put.default: _put,
    aten.slice_scatter.default: _written,
    aten.view_as_real.default: _rotated,
}

CANONICALIZED = frozenset(
    str(target) for target in _RULES if target not in _VIEWS
)  # ops that need no entry of their own
