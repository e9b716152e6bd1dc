"""Convolutions and products of matrices: rows of weights are cut as the output, columns as the
operand. Known operands that are not computed are added to the bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from demask.files.onnx.edit.calls import HANDLERS, NodeEdit
from demask.files.onnx.edit.editor import all_positions, require
from demask.files.onnx.edit.protos import copy_of
from demask.shrink.layout.cells import Layout, Positions, cut_positions

NODE_BYTES = 160  # of a node that selects positions, and its constants
INTEGERS = {
    "ConvInteger": (1, 3, (3,)),
    "MatMulInteger": (1, 3, (3,)),
    "QLinearConv": (3, 5, (4, 5, 8)),
    "QLinearMatMul": (3, 5, (4, 5)),
}
# operands: the weights, their zero point, and those that may have an element per output channel
Lost = dict[int, float]


def contracted(
    edit: NodeEdit, k: int, axis: int, rows: np.ndarray, *, integers: bool = False
) -> tuple[list[int], Lost]:
    """The positions of a summed axis of operand k to read, and the known values, other than 0, at
    the others. rows: the weights by position of that axis. integers: whether the operand's zero
    point (operand 2) is subtracted: from the known values, too, which are 0 after that if both come
    from a DynamicQuantizeLinear."""
    editor, name = edit.editor, edit.name(k)
    rows = rows.reshape(len(rows), -1)
    used = (rows != 0).any(1)
    require(name in editor.layouts, "its operand is known")
    present = all_positions(editor.layouts[name][axis], len(rows))
    read = [p for p in present if used[p]] or present[:1]
    saved = (len(present) - len(read)) * rows.shape[1] * rows.itemsize
    if saved < NODE_BYTES + 8 * len(read):  # a selection costs more than it saves
        read = present
    missing = [p for p in range(len(rows)) if p not in set(read) and used[p]]
    zero_point = 0.0
    if integers and missing and edit.name(2):
        source = editor.constants.producers.get(name)
        if source is not None and source.op_type == "DynamicQuantizeLinear":
            require(edit.name(2) == source.output[2], "the zero point is that of another value")
            return read, {}
        require(edit.constant(2).size == 1, "a zero point per row")
        zero_point = float(edit.constant(2).item())
    fill = editor.fill(name).astype(np.float64)
    editor.is_known(name, (*[None] * axis, tuple(missing), *[None] * (fill.ndim - axis - 1)))
    columns = np.moveaxis(fill, axis, 0).reshape(fill.shape[axis], -1)
    columns = columns[missing] if fill.shape[axis] != 1 else columns
    is_uniform = not missing or bool((columns == columns[:, :1]).all())
    require(is_uniform, "known values that differ along several axes")
    values = np.broadcast_to(columns[:, 0] - zero_point, [len(missing)])
    return read, {p: float(v) for p, v in zip(missing, values, strict=True) if v}


def sum_of(weights: np.ndarray, axis: int, lost: Lost) -> np.ndarray:
    """The products of weights with known values, summed along an axis."""
    columns = np.take(weights, list(lost), axis).astype(np.float64)
    return np.tensordot(columns, list(lost.values()), ([axis], [0]))


def _integers(edit: NodeEdit, axis: int) -> tuple[int, tuple[int, ...], np.ndarray]:
    """Of a node: the operand that has its weights; operands that may have one element per output
    channel; and the weights, less their zero point if they are integers. axis: of these channels.
    """
    w, point, per_channel = INTEGERS.get(edit.node.op_type, (1, 0, ()))
    weights = edit.constant(w)
    if not point:
        return w, per_channel, weights
    if edit.name(point):
        zero_point = edit.constant(point).astype(np.int16)
        if zero_point.size > 1:
            require(zero_point.ndim == 1, "a zero point per matrix")
            zero_point = zero_point.reshape([-1 if k == axis % weights.ndim else 1 for k in range(weights.ndim)])
        weights = weights.astype(np.int16) - zero_point
    return w, tuple(k for k in per_channel if edit.name(k) and edit.constant(k).size > 1), weights


@HANDLERS("Conv", "com.microsoft.FusedConv", "ConvInteger", "QLinearConv")
def convolution(edit: NodeEdit) -> Sequence[Layout | None]:
    """conv(x, w)[:, p] == conv(x[:, q], w[p, q]) + conv(x[:, r], w[p, r]), of which x[:, r] is
    known: a bias where there is no padding, else one more channel of ones. To its output a fused
    convolution adds operand 3 at the same positions."""
    editor, groups, rank = edit.editor, edit.attributes.get("group", 1), len(edit.shape(0))
    w, per_channel, weights = _integers(edit, 0)
    is_integer = edit.node.op_type in INTEGERS
    b = {"ConvInteger": 0, "QLinearConv": 8}.get(edit.node.op_type, 2)
    bias = edit.name(b) if b else ""
    require(not bias or bias in editor.constants, "its bias is computed")
    images = (None,) * (rank - 2)
    batch, rows = edit.layout[:2]
    if groups > 1 and (groups != len(weights) or groups != edit.shape(0)[1]):
        edit.adapt(0, (batch, None, *images))
        rows = None
    elif groups > 1:
        edit.adapt(0, (batch, rows, *images))
        edit.adapt(w, (rows, *([None] * (rank - 1))))
        edit.set("group", len(all_positions(rows, groups)))
    if not is_integer and edit.name(3):  # of a fused convolution
        edit.adapt(3, (batch, rows, *images))
    for k in {*per_channel, b} if bias else per_channel:
        edit.adapt(k, (rows,))
    if groups > 1:
        return [(batch, rows, *images)]
    selected = weights[all_positions(rows, len(weights))]
    read, lost = contracted(edit, 0, 1, np.moveaxis(selected, 1, 0), integers=is_integer)
    columns = cut_positions(read, weights.shape[1])
    edit.adapt(0, (batch, columns, *images))
    edit.adapt(w, (rows, columns, *images))
    if lost:
        added = sum_of(selected, 1, lost)
        auto_pad = edit.attributes.get("auto_pad", "NOTSET")
        if any(edit.attributes.get("pads", ())) or auto_pad not in ("NOTSET", "VALID"):
            require(not is_integer, "known values next to padding")
            _add_channel_of_ones(edit, selected[:, read], added[:, None], 1)
        else:
            require(b, "known values, and no bias")
            old = editor.array(bias)[all_positions(rows, len(weights))] if bias else 0
            total = added.reshape(len(added), -1).sum(1) + old
            dtype = np.dtype(np.int32) if is_integer else weights.dtype
            edit.replace(b, editor.replacement(total.astype(dtype), bias or edit.name(w)))
    return [(batch, rows, *images)]


def _add_channel_of_ones(edit: NodeEdit, weights: np.ndarray, added: np.ndarray, axis: int) -> None:
    """Give the operand one more channel, of ones, and the weights what it adds."""
    editor, rank = edit.editor, len(edit.shape(0))
    ones = editor.pad_end(edit.new.input[0], rank, 1, 1, edit.name(0), weights.dtype)
    edit.replace(0, ones)
    both = np.concatenate([weights, added.astype(weights.dtype)], axis)
    edit.replace(1, editor.replacement(both, edit.name(1)))


@HANDLERS("ConvTranspose")
def transposed_convolution(edit: NodeEdit) -> Sequence[Layout | None]:
    """conv(x, w)[:, p] == conv(x[:, q], w[q, p]) + conv(x[:, r], w[r, p]), of which x[:, r] is
    known: one more channel of ones."""
    weights, rank = edit.constant(1), len(edit.shape(0))
    require(edit.attributes.get("group", 1) == 1, "it has groups")
    images = (None,) * (rank - 2)
    batch, rows = edit.layout[:2]
    selected = weights[:, all_positions(rows, weights.shape[1])]
    read, lost = contracted(edit, 0, 1, selected)
    columns = cut_positions(read, len(weights))
    edit.adapt(0, (batch, columns, *images))
    edit.adapt(1, (columns, rows, *images))
    if lost:
        _add_channel_of_ones(edit, selected[read], sum_of(selected, 0, lost)[None], 0)
    if edit.name(2):
        edit.adapt(2, (rows,))
    return [(batch, rows, *images)]


@HANDLERS("Gemm", "com.microsoft.FusedGemm")
def gemm(edit: NodeEdit) -> Sequence[Layout | None]:
    """(x @ w + b)[:, p] == x[:, q] @ w[q, p] + b[p]."""
    attributes, editor = edit.attributes, edit.editor
    require(not attributes.get("transA") and "broadcast" not in attributes, "transposed")
    weights, is_transposed = edit.constant(1), attributes.get("transB", 0)
    batch, rows = edit.layout
    w_io = weights.T if is_transposed else weights  # i: input, o: output feature
    w_io = w_io[:, all_positions(rows, w_io.shape[1])]
    read, lost = contracted(edit, 0, 1, w_io)
    columns = cut_positions(read, len(w_io))
    edit.adapt(0, (batch, columns))
    edit.adapt(1, (rows, columns) if is_transposed else (columns, rows))
    bias = edit.name(2)
    if bias:
        edit.adapt(2, edit.broadcast(2, edit.layout), broadcast=True)
    if lost:
        added = attributes.get("alpha", 1.0) * sum_of(w_io, 0, lost)
        if bias:
            require(bias in editor.constants and attributes.get("beta", 1.0) == 1, "its bias")
            old = editor.array(bias)
            require(old.ndim < 2 or len(old) == 1, "its bias has rows")
            old = np.broadcast_to(old.reshape(-1), edit.editor.shape(edit.node.output[0])[1:])
            added = added + old[all_positions(rows, len(old))]
        new = editor.replacement(added.astype(weights.dtype), bias or edit.name(1))
        edit.replace(2, new)
    return [(batch, rows)]


@HANDLERS("MatMul", "MatMulInteger", "QLinearMatMul", "com.microsoft.FusedMatMul")
def product(edit: NodeEdit) -> Sequence[Layout | None]:
    """(x @ w)[..., p] == x[..., q] @ w[q, p] + x[..., r] @ w[r, p]."""
    w, _, _ = INTEGERS.get(edit.node.op_type, (1, 0, ()))
    require(min(len(edit.shape(0)), len(edit.shape(w))) > 1, "vectors")
    attributes = edit.attributes
    require(not (attributes.get("transBatchA") or attributes.get("transBatchB")), "moved axes")
    if edit.name(w) not in edit.editor.constants or attributes.get("transA"):
        return _product_of_values(edit)
    is_integer = edit.node.op_type in INTEGERS
    _, per_channel, weights = _integers(edit, -1)
    layout, editor = edit.layout, edit.editor
    is_transposed = bool(attributes.get("transB"))
    if is_transposed:
        weights = weights.swapaxes(-1, -2)
    w_io = weights[..., all_positions(layout[-1], weights.shape[-1])]
    axis = len(edit.shape(0)) - 1
    read, lost = contracted(edit, 0, axis, np.moveaxis(w_io, -2, 0), integers=is_integer)
    columns = cut_positions(read, weights.shape[-2])
    edit.adapt(0, (*edit.broadcast(0, layout)[:-1], columns))
    both = (layout[-1], columns) if is_transposed else (columns, layout[-1])
    edit.adapt(w, (*edit.broadcast(w, layout)[:-2], *both))
    for k in per_channel:
        edit.adapt(k, (layout[-1],))
    if lost:
        require(w_io.ndim == 2 and edit.node.op_type != "QLinearMatMul", "known values")
        total = attributes.get("alpha", 1.0) * sum_of(w_io, 0, lost)
        dtype = np.dtype(np.int32) if is_integer else weights.dtype
        added = editor.tensor(total.astype(dtype), edit.name(1), "known")
        output = edit.node.output[0]
        edit.new.output[0] = editor.fresh(output, "product")
        editor.nodes.append(copy_of(edit.new))
        edit.sum_with(added, output)
    return [layout]


def _product_of_values(edit: NodeEdit) -> Sequence[Layout | None]:
    """The product of two values: the summed axis is read where neither is known to be 0."""
    require(edit.node.op_type not in INTEGERS, "computed integers")
    layout, names = edit.layout, (edit.name(0), edit.name(1))
    swaps = [bool(edit.attributes.get(name)) for name in ("transA", "transB")]
    ranks = [len(edit.shape(0)), len(edit.shape(1))]
    axes = (ranks[0] - 1 - swaps[0], ranks[1] - 2 + swaps[1])  # summed ones
    size = edit.shape(0)[axes[0]]
    read = _read_along(edit, list(zip(names, axes, strict=True)), size)
    sides = ((layout[-2], read), (read, layout[-1]))
    for k, side in enumerate(sides):
        edit.adapt(k, (*edit.broadcast(k, layout)[:-2], *(side[::-1] if swaps[k] else side)))
    return [layout]


def _read_along(edit: NodeEdit, sides: Sequence[tuple[str, int]], size: Any) -> Positions:
    """The positions of a summed axis at which no operand is known to be 0. sides: the operands and
    their axes."""
    if not isinstance(size, int):
        return None
    is_zero = np.zeros(size, bool)
    for name, axis in sides:
        zero = edit.editor.zeros(name)
        is_zero |= zero.all(tuple(k for k in range(zero.ndim) if k != axis))
    require(not is_zero.all(), "every product is 0")
    return cut_positions(np.flatnonzero(~is_zero).tolist(), size)


@HANDLERS("Einsum")
def einsum(edit: NodeEdit) -> Sequence[Layout | None]:
    """einsum("ab,bc->ac", x, w)[p, q] == einsum("ab,bc->ac", x[p, r], w[r, q]), where x or w is 0
    at the positions of b that are left out."""
    terms, arrow, output = edit.attributes["equation"].replace(" ", "").partition("->")
    letters = terms.split(",")
    require(arrow and "." not in terms, "axes without a letter of its equation")
    sides = {
        c: [(edit.name(k), term.index(c)) for k, term in enumerate(letters) if c in term]
        for c in terms.replace(",", "")
    }
    sizes = {c: [edit.editor.shape(name)[axis] for name, axis in pairs] for c, pairs in sides.items()}
    require(all(size == row[0] for row in sizes.values() for size in row), "sizes that broadcast")
    layouts = dict(zip(output, edit.layout, strict=True))
    layouts |= {c: _read_along(edit, sides[c], sizes[c][0]) for c in sides if c not in layouts}
    for k, term in enumerate(letters):
        edit.adapt(k, tuple(layouts[c] for c in term))
    return [edit.layout]
