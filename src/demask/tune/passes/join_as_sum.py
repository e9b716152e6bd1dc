"""Joins as sums of layers that write at their places.

What demasking leaves of an add whose sides keep different channels is a small tree of scatter-adds,
slices, cats and pads. All of them are one thing, a sum of values each of which stands at some of
the channels:

    y[c] = constant[c] + sum over k of x_k[where_k[c]]          (nothing where where_k[c] is -1)

A layer read by the tree alone can write at its places itself, its rows moved and the constant in
its bias: then the join is a plain add, which its convolution does as it stores (`fuse`).
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
from demask.ops.schema import same_shape
from demask.ops.traits import JOIN_TREES, JOINS, OUTPUT_AXIS
from demask.tune.passes.fold_affine import channel_axis, contraction, rewritten

aten = torch.ops.aten
FORMS = ("grow", "place")  # a branch's rows at their places; or a 1 x 1 convolution puts them there


@dataclass(slots=True)
class Sum:
    """A join: constant (C,) float64, and its terms: a node, and where in it each channel comes from
    (C,), -1 for none."""

    axis: int
    constant: Tensor
    terms: list[tuple[fx.Node, Tensor]]
    inner: list[fx.Node] = field(default_factory=list)  # the calls it stands for

    def taken(self, which: Tensor) -> Sum:
        """Of these channels alone; -1 stands for none."""
        there = which >= 0
        at = which.clamp_min(0)
        return Sum(
            self.axis,
            torch.where(there, self.constant[at], torch.zeros((), dtype=torch.float64)),
            [(node, torch.where(there, where[at], -torch.ones_like(at)))
             for node, where in self.terms],
            self.inner,
        )  # fmt: skip


Chooser = Callable[[GraphEditor, Sum, fx.Node, fx.Node], str | None]


def summed(program: Program, choose: Chooser) -> Program:
    """The program with its joins as sums, where `choose(editor, sum, branch, join)` names a form of
    FORMS for a branch (None: the join stays as it is)."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    for node in reversed(editor.calls(*JOINS)):
        if node.users and node in live and not _inside(node):
            found = _read(editor, node, live)
            if found is not None and _overlaps(found):
                _emit(editor, found, node, live, choose)
    return editor.finish()


def _inside(node: fx.Node) -> bool:
    """Is a call read by a larger tree alone?"""
    reader = only_reader(node)
    return reader is not None and reader.target in JOINS


def _overlaps(found: Sum) -> bool:
    """Do two terms meet at a channel? A plain cat is no sum."""
    count = sum((where >= 0).long() for _, where in found.terms)
    return bool((torch.as_tensor(count) > 1).any()) and len(found.terms) > 1


def _read(editor: GraphEditor, root: fx.Node, live: set[fx.Node]) -> Sum | None:
    found = schema.arguments(root)
    axis = found["dim"] % root.meta["val"].ndim
    if channels_of(root, axis) is None or axis not in (1, root.meta["val"].ndim - 1):
        return None
    made = _tree(editor, root, axis, root, live)
    return Sum(axis, made.constant, _merged(made.terms), made.inner)


def _merged(terms: list[tuple[fx.Node, Tensor]]) -> list[tuple[fx.Node, Tensor]]:
    """Parts of one value that stand at different channels are one term."""
    found: list[tuple[fx.Node, Tensor]] = []
    for node, where in terms:
        for k, (known, there) in enumerate(found):
            if known is node and not bool(((there >= 0) & (where >= 0)).any()):
                found[k] = (node, torch.maximum(there, where))
                break
        else:
            found.append((node, where))
    return found


def _tree(editor: GraphEditor, node: fx.Node, axis: int, root: fx.Node, live: set[fx.Node]) -> Sum:
    """A node as a sum; one that others read too, or that is no such call, is a term."""
    if node is root or (only_reader(node) is not None and node.target in JOIN_TREES):
        made = _call(editor, node, axis, root, live)
        if made is not None:
            made.inner.append(node)
            return made
    count = channels_of(node, axis)
    assert count is not None
    return Sum(axis, torch.zeros(count, dtype=torch.float64), [(node, torch.arange(count))])


def _call(
    editor: GraphEditor, node: fx.Node, axis: int, root: fx.Node, live: set[fx.Node]
) -> Sum | None:
    found = schema.arguments(node)
    rank = node.meta["val"].ndim

    def inner(x: Any) -> Sum:
        return _tree(editor, x, axis, root, live)

    if node.target is aten.add.Tensor:
        return _added(editor, node, axis, live, inner)
    if node.target is aten.cat.default:
        parts: Any = found["tensors"]
        if found["dim"] % rank != axis or any(channels_of(p, axis) is None for p in parts):
            return None
        return _joined(axis, [inner(part) for part in parts])
    source = found.get("self")
    if not isinstance(source, fx.Node) or channels_of(source, axis) is None:
        return None
    if node.target is aten.constant_pad_nd.default:
        return _padded(found, rank, axis, inner(source))
    if found["dim"] % rank != axis:
        return None
    if node.target is aten.slice.Tensor:
        span = slice(found["start"], found["end"], found["step"])
        if not all(n is None or isinstance(n, int) for n in (span.start, span.stop, span.step)):
            return None
        return inner(source).taken(torch.arange(channels_of(source, axis) or 0)[span])
    index = editor.tensor(found["index"])
    if index is None or index.ndim != 1:
        return None
    if node.target is aten.index_select.default:
        return inner(source).taken(index.long())
    return _scattered(found, axis, index.long(), channels_of(source, axis) or 0, inner)


def _added(
    editor: GraphEditor, node: fx.Node, axis: int, live: set[fx.Node], inner: Callable[[Any], Sum]
) -> Sum | None:
    x, other, *rest = node.args
    if rest or node.kwargs or not (isinstance(x, fx.Node) and isinstance(other, fx.Node)):
        return None
    shape = node.meta["val"].shape
    value = editor.tensor(other)
    count = channels_of(node, axis)
    whole = [isinstance(side.meta["val"], Tensor) and same_shape(side.meta["val"], node.meta["val"])
             for side in (x, other)]  # fmt: skip
    if value is not None and count is not None and whole[0]:
        vector = per_channel(value, len(shape), axis, count)
        if vector is not None:
            made = inner(x)
            return Sum(axis, made.constant + vector.double(), made.terms, made.inner)
    if not whole[0] or channels_of(other, axis) != count or count is None:
        return None
    if other.meta["val"].ndim != len(shape) or (other in live and not whole[1]):
        return None  # what is broadcast here is a term as it is
    a, b = inner(x), inner(other)
    return Sum(axis, a.constant + b.constant, a.terms + b.terms, a.inner + b.inner)


def _joined(axis: int, parts: list[Sum]) -> Sum:
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


def _padded(found: dict[str, Any], rank: int, axis: int, given: Sum) -> Sum | None:
    pads = list(found["pad"]) + [0] * (2 * rank - len(found["pad"]))
    here = 2 * (rank - 1 - axis)
    low, high = pads[here], pads[here + 1]
    if any(pads[:here]) or any(pads[here + 2 :]) or not all(isinstance(n, int) for n in pads):
        return None
    if min(low, high) < 0:
        return None
    none = [torch.full((n,), -1, dtype=torch.long) for n in (low, high)]
    which = torch.cat([none[0], torch.arange(len(given.constant)), none[1]])
    made = given.taken(which)
    made.constant[which < 0] = float(found["value"] or 0)
    return made


def _scattered(
    found: dict[str, Any], axis: int, index: Tensor, count: int, inner: Callable[[Any], Sum]
) -> Sum | None:
    """base with `source` added at `index`."""
    if found["alpha"] != 1 or len(index.unique()) != len(index):
        return None
    base, added = inner(found["self"]), inner(found["source"])
    which = torch.full((count,), -1, dtype=torch.long)
    which[index] = torch.arange(len(index))
    at = added.taken(which)
    return Sum(axis, base.constant + at.constant, base.terms + at.terms, base.inner + at.inner)


def _emit(
    editor: GraphEditor, found: Sum, root: fx.Node, live: set[fx.Node], choose: Chooser
) -> None:
    """The sum in place of the root: what layers cannot take first, then each layer added."""
    owned = [node in live and _owned(editor, node, found) for node, _ in found.terms]
    branches = [term for term, mine in zip(found.terms, owned, strict=True) if mine]
    others = [term for term, mine in zip(found.terms, owned, strict=True) if not mine]
    forms = [choose(editor, found, node, root) for node, _ in branches]
    if not branches or None in forms:
        return
    terms = [_placed(editor, node, where, found.axis, root, forms[0])
             for node, where in others if node in live]  # fmt: skip
    constant: Tensor | None = found.constant
    for (node, where), form in zip(branches, forms, strict=True):
        terms.append(_branch(editor, node, where, constant, form, root))
        constant = None
    fixed = [(node, where) for node, where in others if node not in live]
    if fixed:
        terms.insert(1, _offsets(editor, fixed, found.axis, root))
    made = terms[0]
    for term in terms[1:]:
        made = editor.insert(root, root, aten.add.Tensor, made, term)
    editor.replace(root, made)


def _owned(editor: GraphEditor, node: fx.Node, found: Sum) -> bool:
    """Is a term a layer that nothing but the tree reads? Not one in groups, whose rows are bound to
    their columns."""
    if contraction(editor, node) is None or schema.arguments(node).get("groups", 1) != 1:
        return False
    once = sum(n is node for n, _ in found.terms) == 1
    return once and set(node.users) <= set(found.inner) and channel_axis(node) == found.axis


def _placed(
    editor: GraphEditor,
    node: fx.Node,
    where: Tensor,
    axis: int,
    root: fx.Node,
    form: str | None = None,
) -> fx.Node:
    """A term at its channels, zeros at the others."""
    count = channels_of(node, axis) or 0
    if form == "place" and axis == 1 and not torch.equal(where[:count], torch.arange(count)):
        return _through(editor, node, where, None, root)
    if torch.equal(where, torch.arange(count)):
        return node
    rank, more = node.meta["val"].ndim, len(where) - count
    after = [0, 0] * (rank - 1 - axis)
    if more > 0 and torch.equal(where[:count], torch.arange(count)) and (where[count:] < 0).all():
        return editor.insert(root, None, aten.constant_pad_nd.default, node, [*after, 0, more], 0.0)
    if bool((where < 0).any()):
        node = editor.insert(root, None, aten.constant_pad_nd.default, node, [*after, 0, 1], 0.0)
        where = torch.where(where < 0, torch.full_like(where, count), where)
    read = editor.add_constant(f"{node.name}_index", where.int(), root)
    return editor.insert(root, None, aten.index_select.default, node, axis, read)


def _offsets(
    editor: GraphEditor, terms: list[tuple[fx.Node, Tensor]], axis: int, root: fx.Node
) -> fx.Node:
    """Terms that no input reaches, summed once per size."""
    made = [_placed(editor, node, where, axis, root) for node, where in terms]
    total = made[0]
    for term in made[1:]:
        total = editor.insert(root, None, aten.add.Tensor, total, term)
    return total


def _branch(
    editor: GraphEditor, node: fx.Node, where: Tensor, constant: Tensor | None, form: str | None,
    root: fx.Node,
) -> fx.Node:  # fmt: skip
    """A layer that writes at its places of the join, with the join's constant in its bias."""
    found = schema.arguments(node)
    weight, axis = editor.tensor(found["weight"]), OUTPUT_AXIS[node.target]
    assert weight is not None
    bias = None if found["bias"] is None else editor.tensor(found["bias"])
    there, at = where >= 0, where.clamp_min(0)
    add = constant if constant is not None and bool((constant != 0).any()) else None
    if form == "place":
        return _through(editor, node, where, add, root)
    shape = [1] * weight.ndim
    shape[axis] = -1
    grown = torch.where(there.reshape(shape), weight.index_select(axis, at), weight.new_zeros(()))
    if bias is not None:
        bias = torch.where(there, bias[at].double(), torch.zeros((), dtype=torch.float64))
    offset = bias if add is None else add if bias is None else bias + add
    made = rewritten(editor, node, grown, offset, root)
    made.meta = dict(root.meta)
    return made


def _through(
    editor: GraphEditor, node: fx.Node, where: Tensor, constant: Tensor | None, root: fx.Node
) -> fx.Node:
    """A 1 x 1 convolution that puts channels at their places; with a stride, where rows and columns
    are skipped."""
    value = node.meta["val"]
    node, stride = _unskipped(node)
    count = channels_of(node, 1) or 0
    kernel = torch.zeros(len(where), count, *[1] * (value.ndim - 2), dtype=value.dtype)
    there = (where >= 0).nonzero().flatten()
    kernel[there, where[there]] = 1
    read = editor.add_constant(f"{node.name}_places", kernel, root)
    bias = None
    if constant is not None:
        bias = editor.add_constant(f"{node.name}_shift", constant.to(value.dtype), root)
    target = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}[value.ndim]
    return editor.insert(root, root, target, node, read, bias, stride)


def _unskipped(node: fx.Node) -> tuple[fx.Node, list[int]]:
    """What slices that keep every s-th row or column were taken of, and the s of each axis."""
    axes = node.meta["val"].ndim - 2
    source, stride = node, [1] * axes
    while source.target is aten.slice.Tensor:
        found = schema.arguments(source)
        axis, step = found["dim"] - 2, found["step"]
        inner = found["self"]
        size = inner.meta["val"].shape[found["dim"]]
        whole = isinstance(size, int) and source.meta["val"].shape[found["dim"]] == -(-size // step)
        if axis < 0 or stride[axis] != 1 or (found["start"] or 0) != 0 or not whole:
            break
        source, stride[axis] = inner, step
    return source, stride
