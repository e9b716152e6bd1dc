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
from torch import Tensor, fx, nn

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import channels_of, input_dependent, per_channel
from demask.graph.value import Value
from demask.ops import Table
from demask.ops.traits import JOINS, OUTPUT_AXIS
from demask.rewrites.rule import Pass, case
from demask.tune.fold_affine import channel_axis, contraction_weight, replace_layer, summands

aten = torch.ops.aten


@dataclass(slots=True)
class Sum:
    """A join as a sum over C channels. constant: (C,) float64. terms: a value, and for each channel
    of the join its channel in the value, (C,) int64, -1 for none. inner: the calls of the join."""

    axis: int
    constant: Tensor
    terms: list[tuple[Value, Tensor]]
    inner: list[Value] = field(default_factory=list)

    def taken(self, which: Tensor) -> Sum:
        """The sum of the selected channels. which: channels of this sum, -1 for none."""
        present = which >= 0
        index = which.clamp_min(0)
        return Sum(
            self.axis,
            torch.where(present, self.constant[index], torch.zeros((), dtype=torch.float64)),
            [(value, torch.where(present, where[index], -torch.ones_like(index))) for value, where in self.terms],
            self.inner,
        )


def rewrite_joins(program: Program, table: Table) -> Program:
    """The program with joins as sums."""
    editor, is_changed = GraphEditor(program), False
    live = input_dependent(editor.graph)
    for node in reversed(editor.calls(*JOINS)):
        root = Value(node, editor)
        if node.users and node in live and not _is_inside_larger_tree(root):
            total = _JoinReader(root, live).read()
            if total is not None and _share_channels(total):
                is_changed |= _emit(total, root, live)
    return editor.finish() if is_changed else program


def _is_inside_larger_tree(join: Value) -> bool:
    return join.only_user is not None and join.only_user.calls(*JOINS)


def _share_channels(total: Sum) -> bool:
    """Whether two terms share a channel, unlike those of a plain cat."""
    count = sum((where >= 0).long() for _, where in total.terms)
    return bool((torch.as_tensor(count) > 1).any()) and len(total.terms) > 1


def _merged(terms: list[tuple[Value, Tensor]]) -> list[tuple[Value, Tensor]]:
    """The terms, with those of one value at different channels merged into one."""
    merged: list[tuple[Value, Tensor]] = []
    for value, where in terms:
        for k, (known, other) in enumerate(merged):
            if known == value and not bool(((other >= 0) & (where >= 0)).any()):
                merged[k] = (value, torch.maximum(other, where))
                break
        else:
            merged.append((value, where))
    return merged


@dataclass(frozen=True, slots=True)
class _JoinReader:
    """Reads the tree of a join as a sum. root: the join. live: what depends on inputs."""

    root: Value
    live: set[fx.Node]

    @property
    def axis(self) -> int:
        return self.root.arg("dim") % self.root.rank

    def read(self) -> Sum | None:
        """The join as a sum; None if its channels are not on a channel axis of known size."""
        if self.count(self.root) is None or self.axis not in (1, self.root.rank - 1):
            return None
        total = self.tree(self.root)
        return Sum(self.axis, total.constant, _merged(total.terms), total.inner)

    def count(self, value: Value) -> int | None:
        """The number of channels; None if it is dynamic, or if there are none."""
        return channels_of(value.node, self.axis)

    def tree(self, value: Value) -> Sum:
        """A value as a sum. One that other calls read, or that is no join, is a single term."""
        readers: dict[Any, Callable[[Value], Sum | None]] = {
            aten.add.Tensor: self.add,
            aten.cat.default: self.cat,
            aten.constant_pad_nd.default: self.pad,
            aten.slice.Tensor: self.slice,
            aten.index_select.default: self.select,
            aten.index_add.default: self.scatter,
        }
        read = readers.get(value.target) if value == self.root or len(value.users) == 1 else None
        total = None if read is None else read(value)
        if total is not None:
            total.inner.append(value)
            return total
        count = self.count(value)
        assert count is not None
        return Sum(self.axis, torch.zeros(count, dtype=torch.float64), [(value, torch.arange(count))])

    def source(self, call: Value) -> Value | None:
        """The operand of a call that moves channels, if theirs is the only axis that it changes."""
        source: Value = call.arg("self")
        if self.count(source) is None or call.arguments.get("dim", self.axis) % call.rank != self.axis:
            return None
        return source

    def add(self, call: Value) -> Sum | None:
        """An addition as a sum."""
        sides = summands(call)
        if sides is None:
            return None
        x, other = sides
        count, value = self.count(call), other.constant
        whole = [side.is_tensor and side.is_shaped(call) for side in sides]
        if value is not None and count is not None and whole[0]:
            vector = per_channel(value, call.rank, self.axis, count)
            if vector is not None:
                total = self.tree(x)
                return Sum(self.axis, total.constant + vector.double(), total.terms, total.inner)
        if not whole[0] or self.count(other) != count or count is None:
            return None
        if other.rank != call.rank or (other.node in self.live and not whole[1]):
            return None  # the call broadcasts: it is a term itself
        a, b = self.tree(x), self.tree(other)
        return Sum(self.axis, a.constant + b.constant, a.terms + b.terms, a.inner + b.inner)

    def cat(self, call: Value) -> Sum | None:
        """A concatenation as a sum."""
        parts: list[Value] = call.arg("tensors")
        if call.arg("dim") % call.rank != self.axis or any(self.count(part) is None for part in parts):
            return None
        return _joined(self.axis, [self.tree(part) for part in parts])

    def pad(self, call: Value) -> Sum | None:
        """A pad as a sum; None if other axes are padded or channels cropped."""
        source, rank = self.source(call), call.rank
        pads = list(call.arg("pad")) + [0] * (2 * rank - len(call.arg("pad")))
        here = 2 * (rank - 1 - self.axis)
        low, high = pads[here], pads[here + 1]
        if source is None or any(pads[:here]) or any(pads[here + 2 :]) or not all(isinstance(n, int) for n in pads):
            return None
        if min(low, high) < 0:
            return None
        padded = self.tree(source)
        none = [torch.full((n,), -1, dtype=torch.long) for n in (low, high)]
        which = torch.cat([none[0], torch.arange(len(padded.constant)), none[1]])
        padded = padded.taken(which)
        padded.constant[which < 0] = float(call.arg("value") or 0)
        return padded

    def slice(self, call: Value) -> Sum | None:
        """A slice of channels as a sum."""
        source, ends = self.source(call), [call.arg(name) for name in ("start", "end", "step")]
        if source is None or not all(n is None or isinstance(n, int) for n in ends):
            return None
        return self.tree(source).taken(torch.arange(source.shape[self.axis])[slice(*ends)])

    def select(self, call: Value) -> Sum | None:
        """A gather of channels as a sum."""
        source, index = self.source(call), call.arg("index").constant
        if source is None or index is None or index.ndim != 1:
            return None
        return self.tree(source).taken(index.long())

    def scatter(self, call: Value) -> Sum | None:
        """An index_add as a sum: `source` added at channels `index` of `self`."""
        target, index = self.source(call), call.arg("index").constant
        if target is None or index is None or index.ndim != 1:
            return None
        if call.arg("alpha") != 1 or len(index.unique()) != len(index):
            return None
        base, added = self.tree(target), self.tree(call.arg("source"))
        which = torch.full((len(base.constant),), -1, dtype=torch.long)
        which[index.long()] = torch.arange(len(index))
        spread = added.taken(which)
        return Sum(self.axis, base.constant + spread.constant, base.terms + spread.terms, base.inner + spread.inner)


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


def _emit(total: Sum, root: Value, live: set[fx.Node]) -> bool:
    """Replace the root by a chain of additions, other terms first, then each layer; whether there is
    a layer."""
    owned = [value.node in live and _is_owned_layer(value, total) for value, _ in total.terms]
    branches = [term for term, mine in zip(total.terms, owned, strict=True) if mine]
    others = [term for term, mine in zip(total.terms, owned, strict=True) if not mine]
    if not branches:
        return False
    editor = root.editor
    with editor.graph.inserting_before(root.node):
        terms = [_placed(value, where, total.axis, root) for value, where in others if value.node in live]
        constant: Tensor | None = total.constant
        for value, where in branches:
            terms.append(_branch(value, where, constant, root))
            constant = None
        fixed = [_placed(value, where, total.axis, root) for value, where in others if value.node not in live]
        if fixed:  # their sum depends on no input: it is computed once per size
            terms.insert(1, sum(fixed[1:], fixed[0]))
    partial_sum = terms[0].node
    for term in terms[1:]:
        partial_sum = editor.insert(root.node, root.node, aten.add.Tensor, partial_sum, term.node)
    editor.replace(root.node, partial_sum)
    return True


def _is_owned_layer(value: Value, total: Sum) -> bool:
    """Whether a term is a layer that only the tree reads. Rows of a grouped convolution cannot
    move: they are bound to their columns."""
    if contraction_weight(value) is None or value.arguments.get("groups", 1) != 1:
        return False
    once = sum(other == value for other, _ in total.terms) == 1
    return once and set(value.users) <= set(total.inner) and channel_axis(value) == total.axis


def _placed(value: Value, where: Tensor, axis: int, root: Value) -> Value:
    """A term at its channels of the join, with zeros at the others."""
    count = value.shape[axis]
    is_prefix = torch.equal(where[:count], torch.arange(count))
    more = len(where) - count
    if is_prefix and more == 0:
        return value
    after = [0, 0] * (value.rank - 1 - axis)
    if is_prefix and more > 0 and bool((where[count:] < 0).all()):
        return value.pad([*after, 0, more], 0.0)
    if bool((where < 0).any()):
        value = value.pad([*after, 0, 1], 0.0)
        where = torch.where(where < 0, torch.full_like(where, count), where)
    return value.index_select(axis, _read(root, f"{value.name}_index", where.int()))


def _read(root: Value, name: str, tensor: Tensor) -> Value:
    return Value(root.editor.add_constant(name, tensor, root.node), root.editor)


def _branch(value: Value, where: Tensor, constant: Tensor | None, root: Value) -> Value:
    """A layer that writes at its channels of the join, with the join's constant in its bias."""
    add = constant if constant is not None and bool((constant != 0).any()) else None
    weight, bias = (None if x is None else x.constant for x in (value.arg("weight"), value.arg("bias")))
    assert weight is not None
    axis, present, index = OUTPUT_AXIS[value.target], where >= 0, where.clamp_min(0)
    shape = [1] * weight.ndim
    shape[axis] = -1
    grown = torch.where(present.reshape(shape), weight.index_select(axis, index), weight.new_zeros(()))
    if bias is not None:
        bias = torch.where(present, bias[index].double(), torch.zeros((), dtype=torch.float64))
    offset = bias if add is None else add if bias is None else bias + add
    layer = replace_layer(value, grown, offset, root)
    layer.node.meta = dict(root.node.meta)
    return layer


class _Join(nn.Module):
    """A branch added at some channels of another, as demasking writes sums of masked branches."""

    def __init__(self, branch: nn.Module, other: nn.Module):
        super().__init__()
        self.branch, self.other, self.shift = branch, other, nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        axis, after = (1, [0, 0, 0, 0]) if x.ndim == 4 else (-1, [])
        shift = self.shift.reshape(1, 6, 1, 1) if x.ndim == 4 else self.shift
        wide = torch.constant_pad_nd(self.other(x).relu(), [*after, 1, 1], 0.5) + shift
        return wide.index_add(axis, torch.tensor([5, 0, 2]), self.branch(x))


_CASES = (
    case(_Join(nn.Conv2d(2, 3, 1), nn.Conv2d(2, 4, 1)), (2, 2, 4, 5)),
    case(_Join(nn.ConvTranspose2d(2, 3, 1, bias=False), nn.Conv2d(2, 4, 1)), (2, 2, 4, 5)),
    case(_Join(nn.Linear(5, 3), nn.Linear(5, 4)), (2, 3, 5), dynamic={0: (0, 1)}),
)


JOINS_AS_SUMS = Pass(
    "joins as sums",
    rewrite_joins,
    "index_add(pad(x), i, conv(y)) == x + conv'(y), where conv' writes at the channels i",
    cases=_CASES,
    exact=False,
)
