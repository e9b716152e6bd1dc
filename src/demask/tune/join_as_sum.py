"""Joins rewritten as sums of layers that write at their own channels.

Demasking turns an add whose operands have different channels into a tree of scatter-adds, slices,
cats and pads. Each tree computes a sum of values, each of them at some of the channels:

    y[c] = constant[c] + sum over k of x_k[where_k[c]]          (no term where where_k[c] is -1)

A layer that only the tree reads can write at its channels itself, with its rows moved and the
constant in its bias. The join then is a plain add, which a convolution can compute
(`fuse_epilogues`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, only_reader, per_channel
from demask.ops import schema
from demask.ops.schema import fake, same_shape
from demask.ops.traits import JOIN_TREES, JOINS, OUTPUT_AXIS
from demask.tune.fold_affine import channel_axis, contraction_weight, replace_layer

aten = torch.ops.aten
# How a branch writes at its channels: rows for all channels, or a 1 x 1 convolution after it.
FORMS = ("grow", "place")


@dataclass(slots=True)
class Sum:
    """A join as a sum over C channels. constant: (C,) float64. terms: a node, and for each channel
    of the join its channel in the node, (C,) int64, -1 for none. inner: the calls of the join."""

    axis: int
    constant: Tensor
    terms: list[tuple[fx.Node, Tensor]]
    inner: list[fx.Node] = field(default_factory=list)

    def taken(self, which: Tensor) -> Sum:
        """The sum of the selected channels. which: channels of this sum, -1 for none."""
        present = which >= 0
        index = which.clamp_min(0)
        return Sum(
            self.axis,
            torch.where(present, self.constant[index], torch.zeros((), dtype=torch.float64)),
            [(node, torch.where(present, where[index], -torch.ones_like(index))) for node, where in self.terms],
            self.inner,
        )


Chooser = Callable[[GraphEditor, Sum, fx.Node, fx.Node], str | None]


def rewrite_joins(program: Program, choose: Chooser) -> Program:
    """The program with joins as sums. choose(editor, sum, branch, join): one of FORMS for a branch,
    or None to leave the join unchanged."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    for node in reversed(editor.calls(*JOINS)):
        if node.users and node in live and not _is_inside_larger_tree(node):
            total = _read(editor, node, live)
            if total is not None and _share_channels(total):
                _emit(editor, total, node, live, choose)
    return editor.finish()


def _is_inside_larger_tree(node: fx.Node) -> bool:
    reader = only_reader(node)
    return reader is not None and reader.target in JOINS


def _share_channels(total: Sum) -> bool:
    """Whether two terms share a channel, unlike those of a plain cat."""
    count = sum((where >= 0).long() for _, where in total.terms)
    return bool((torch.as_tensor(count) > 1).any()) and len(total.terms) > 1


def _read(editor: GraphEditor, root: fx.Node, live: set[fx.Node]) -> Sum | None:
    """A join as a sum; None if its channels are not on a channel axis of known size."""
    arguments = schema.arguments(root)
    axis = arguments["dim"] % fake(root).ndim
    if channels_of(root, axis) is None or axis not in (1, fake(root).ndim - 1):
        return None
    total = _tree(editor, root, axis, root, live)
    return Sum(axis, total.constant, _merged(total.terms), total.inner)


def _merged(terms: list[tuple[fx.Node, Tensor]]) -> list[tuple[fx.Node, Tensor]]:
    """The terms, with those of one node at different channels merged into one."""
    merged: list[tuple[fx.Node, Tensor]] = []
    for node, where in terms:
        for k, (known, other) in enumerate(merged):
            if known is node and not bool(((other >= 0) & (where >= 0)).any()):
                merged[k] = (node, torch.maximum(other, where))
                break
        else:
            merged.append((node, where))
    return merged


def _tree(editor: GraphEditor, node: fx.Node, axis: int, root: fx.Node, live: set[fx.Node]) -> Sum:
    """A node as a sum. A node that other calls read, or that is no join, is a single term."""
    if node is root or (only_reader(node) is not None and node.target in JOIN_TREES):
        total = _call(editor, node, axis, root, live)
        if total is not None:
            total.inner.append(node)
            return total
    count = channels_of(node, axis)
    assert count is not None
    return Sum(axis, torch.zeros(count, dtype=torch.float64), [(node, torch.arange(count))])


def _call(editor: GraphEditor, node: fx.Node, axis: int, root: fx.Node, live: set[fx.Node]) -> Sum | None:
    """A call of a join as a sum; None if it is none."""
    arguments = schema.arguments(node)
    rank = fake(node).ndim

    def inner(x: Any) -> Sum:
        return _tree(editor, x, axis, root, live)

    if node.target is aten.add.Tensor:
        return _added(editor, node, axis, live, inner)
    if node.target is aten.cat.default:
        parts: Any = arguments["tensors"]
        if arguments["dim"] % rank != axis or any(channels_of(p, axis) is None for p in parts):
            return None
        return _joined(axis, [inner(part) for part in parts])
    source = arguments.get("self")
    if not isinstance(source, fx.Node) or channels_of(source, axis) is None:
        return None
    if node.target is aten.constant_pad_nd.default:
        return _padded(arguments, rank, axis, inner(source))
    if arguments["dim"] % rank != axis:
        return None
    if node.target is aten.slice.Tensor:
        span = slice(arguments["start"], arguments["end"], arguments["step"])
        if not all(n is None or isinstance(n, int) for n in (span.start, span.stop, span.step)):
            return None
        return inner(source).taken(torch.arange(channels_of(source, axis) or 0)[span])
    index = editor.tensor(arguments["index"])
    if index is None or index.ndim != 1:
        return None
    if node.target is aten.index_select.default:
        return inner(source).taken(index.long())
    return _scattered(arguments, axis, index.long(), channels_of(source, axis) or 0, inner)


def _added(
    editor: GraphEditor, node: fx.Node, axis: int, live: set[fx.Node], inner: Callable[[Any], Sum]
) -> Sum | None:
    """An addition as a sum. inner: returns an operand as a sum."""
    x, other, *rest = node.args
    if rest or node.kwargs or not (isinstance(x, fx.Node) and isinstance(other, fx.Node)):
        return None
    shape = fake(node).shape
    value = editor.tensor(other)
    count = channels_of(node, axis)
    whole = [isinstance(fake(side), Tensor) and same_shape(fake(side), fake(node)) for side in (x, other)]
    if value is not None and count is not None and whole[0]:
        vector = per_channel(value, len(shape), axis, count)
        if vector is not None:
            total = inner(x)
            return Sum(axis, total.constant + vector.double(), total.terms, total.inner)
    if not whole[0] or channels_of(other, axis) != count or count is None:
        return None
    if fake(other).ndim != len(shape) or (other in live and not whole[1]):
        return None  # the call broadcasts: it is a term itself
    a, b = inner(x), inner(other)
    return Sum(axis, a.constant + b.constant, a.terms + b.terms, a.inner + b.inner)


def _joined(axis: int, parts: list[Sum]) -> Sum:
    """A concatenation of sums as a sum."""
    total = sum(len(part.constant) for part in parts)
    start, terms, inner = 0, [], []
    for part in parts:
        size = len(part.constant)
        for node, where in part.terms:
            spread = torch.full((total,), -1, dtype=torch.long)
            spread[start : start + size] = where
            terms.append((node, spread))
        start += size
        inner += part.inner
    return Sum(axis, torch.cat([part.constant for part in parts]), terms, inner)


def _padded(arguments: dict[str, Any], rank: int, axis: int, source: Sum) -> Sum | None:
    """A padded sum as a sum; None if other axes are padded or channels cropped."""
    pads = list(arguments["pad"]) + [0] * (2 * rank - len(arguments["pad"]))
    here = 2 * (rank - 1 - axis)
    low, high = pads[here], pads[here + 1]
    if any(pads[:here]) or any(pads[here + 2 :]) or not all(isinstance(n, int) for n in pads):
        return None
    if min(low, high) < 0:
        return None
    none = [torch.full((n,), -1, dtype=torch.long) for n in (low, high)]
    which = torch.cat([none[0], torch.arange(len(source.constant)), none[1]])
    padded = source.taken(which)
    padded.constant[which < 0] = float(arguments["value"] or 0)
    return padded


def _scattered(
    arguments: dict[str, Any], axis: int, index: Tensor, count: int, inner: Callable[[Any], Sum]
) -> Sum | None:
    """An index_add as a sum: `source` added at channels `index` of `self`, which has `count`."""
    if arguments["alpha"] != 1 or len(index.unique()) != len(index):
        return None
    base, added = inner(arguments["self"]), inner(arguments["source"])
    which = torch.full((count,), -1, dtype=torch.long)
    which[index] = torch.arange(len(index))
    spread = added.taken(which)
    return Sum(axis, base.constant + spread.constant, base.terms + spread.terms, base.inner + spread.inner)


def _emit(editor: GraphEditor, total: Sum, root: fx.Node, live: set[fx.Node], choose: Chooser) -> None:
    """Replace the root by a chain of additions: other terms first, then each layer."""
    owned = [node in live and _is_owned_layer(editor, node, total) for node, _ in total.terms]
    branches = [term for term, mine in zip(total.terms, owned, strict=True) if mine]
    others = [term for term, mine in zip(total.terms, owned, strict=True) if not mine]
    forms = [choose(editor, total, node, root) for node, _ in branches]
    if not branches or None in forms:
        return
    terms = [_placed(editor, node, where, total.axis, root, forms[0]) for node, where in others if node in live]
    constant: Tensor | None = total.constant
    for (node, where), form in zip(branches, forms, strict=True):
        terms.append(_branch(editor, node, where, constant, form, root))
        constant = None
    fixed = [(node, where) for node, where in others if node not in live]
    if fixed:
        terms.insert(1, _constant_sum(editor, fixed, total.axis, root))
    partial_sum = terms[0]
    for term in terms[1:]:
        partial_sum = editor.insert(root, root, aten.add.Tensor, partial_sum, term)
    editor.replace(root, partial_sum)


def _is_owned_layer(editor: GraphEditor, node: fx.Node, total: Sum) -> bool:
    """Whether a term is a layer that only the tree reads. Rows of a grouped convolution cannot
    move: they are bound to their columns."""
    if contraction_weight(editor, node) is None or schema.arguments(node).get("groups", 1) != 1:
        return False
    once = sum(n is node for n, _ in total.terms) == 1
    return once and set(node.users) <= set(total.inner) and channel_axis(node) == total.axis


def _placed(
    editor: GraphEditor, node: fx.Node, where: Tensor, axis: int, root: fx.Node, form: str | None = None
) -> fx.Node:
    """A term at its channels of the join, with zeros at the others."""
    count = channels_of(node, axis) or 0
    if form == "place" and axis == 1 and not torch.equal(where[:count], torch.arange(count)):
        return _through(editor, node, where, None, root)
    if torch.equal(where, torch.arange(count)):
        return node
    rank, more = fake(node).ndim, len(where) - count
    after = [0, 0] * (rank - 1 - axis)
    if more > 0 and torch.equal(where[:count], torch.arange(count)) and (where[count:] < 0).all():
        return editor.insert(root, None, aten.constant_pad_nd.default, node, [*after, 0, more], 0.0)
    if bool((where < 0).any()):
        node = editor.insert(root, None, aten.constant_pad_nd.default, node, [*after, 0, 1], 0.0)
        where = torch.where(where < 0, torch.full_like(where, count), where)
    read = editor.add_constant(f"{node.name}_index", where.int(), root)
    return editor.insert(root, None, aten.index_select.default, node, axis, read)


def _constant_sum(editor: GraphEditor, terms: list[tuple[fx.Node, Tensor]], axis: int, root: fx.Node) -> fx.Node:
    """The sum of terms that depend on no input, which is computed once per size."""
    placed = [_placed(editor, node, where, axis, root) for node, where in terms]
    total = placed[0]
    for term in placed[1:]:
        total = editor.insert(root, None, aten.add.Tensor, total, term)
    return total


def _branch(
    editor: GraphEditor, node: fx.Node, where: Tensor, constant: Tensor | None, form: str | None, root: fx.Node
) -> fx.Node:
    """A layer that writes at its channels of the join, with the join's constant in its bias."""
    arguments = schema.arguments(node)
    weight, axis = editor.tensor(arguments["weight"]), OUTPUT_AXIS[node.target]
    assert weight is not None
    bias = None if arguments["bias"] is None else editor.tensor(arguments["bias"])
    present, index = where >= 0, where.clamp_min(0)
    add = constant if constant is not None and bool((constant != 0).any()) else None
    if form == "place":
        return _through(editor, node, where, add, root)
    shape = [1] * weight.ndim
    shape[axis] = -1
    grown = torch.where(present.reshape(shape), weight.index_select(axis, index), weight.new_zeros(()))
    if bias is not None:
        bias = torch.where(present, bias[index].double(), torch.zeros((), dtype=torch.float64))
    offset = bias if add is None else add if bias is None else bias + add
    layer = replace_layer(editor, node, grown, offset, root)
    layer.meta = dict(root.meta)
    return layer


def _through(editor: GraphEditor, node: fx.Node, where: Tensor, constant: Tensor | None, root: fx.Node) -> fx.Node:
    """A 1 x 1 convolution that moves channels to those of the join. It has a stride if slices skip
    rows and columns before it."""
    value = fake(node)
    node, stride = _unskipped(node)
    count = channels_of(node, 1) or 0
    kernel = torch.zeros(len(where), count, *[1] * (value.ndim - 2), dtype=value.dtype)
    positions = (where >= 0).nonzero().flatten()
    kernel[positions, where[positions]] = 1
    read = editor.add_constant(f"{node.name}_places", kernel, root)
    bias = None
    if constant is not None:
        bias = editor.add_constant(f"{node.name}_shift", constant.to(value.dtype), root)
    target = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}[value.ndim]
    return editor.insert(root, root, target, node, read, bias, stride)


def _unskipped(node: fx.Node) -> tuple[fx.Node, list[int]]:
    """The value before slices that select every s-th row or column, and s for each axis."""
    axes = fake(node).ndim - 2
    source, stride = node, [1] * axes
    while source.target is aten.slice.Tensor:
        arguments = schema.arguments(source)
        axis, step = arguments["dim"] - 2, arguments["step"]
        inner = arguments["self"]
        size = fake(inner).shape[arguments["dim"]]
        whole = isinstance(size, int) and fake(source).shape[arguments["dim"]] == -(-size // step)
        if axis < 0 or stride[axis] != 1 or (arguments["start"] or 0) != 0 or not whole:
            break
        source, stride[axis] = inner, step
    return source, stride
