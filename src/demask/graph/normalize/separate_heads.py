"""Heads that were merged into a dynamic batch stay apart.

`x.view(length, batch * heads, size)` puts an axis that can be cut (heads) and one that cannot (a
batch known at run time) into one, of which nothing can be cut. Where a later view takes them apart
again, the calls between are made on the axes apart: a batched product as a matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.program import Program
from demask.ops import Declined, Relation, Table, bind, schema
from demask.ops.entries.movement import refined
from demask.ops.schema import same_shape
from demask.ops.traits import RESHAPES, SQUEEZES

aten = torch.ops.aten
_VIEWS = RESHAPES - SQUEEZES


@dataclass(frozen=True, slots=True)
class _Apart:
    """A value with its mixed axes apart, and how many axes each of the merged value's became."""

    node: fx.Node
    counts: tuple[int, ...]

    def axis(self, k: int) -> int:
        """Where axis k of the merged value starts."""
        return sum(self.counts[:k])


def unmerged(program: Program, table: Table) -> Program:
    """The program without axes that merge a dynamic size with another and are split again."""
    if not any(node.target in _VIEWS and _merges(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    walk = _Unmerger(editor, table)
    for node in editor.calls():
        walk.visit(node)
    if not walk.split:
        return program
    drop_unread(editor.graph)
    left = set(editor.graph.nodes)
    for old, apart in walk.apart.items():
        if old in left and apart.node in left and apart.node is not old:
            walk.merge(old, apart)
    return editor.finish()


def _merges(node: fx.Node) -> bool:
    """Does a view make an axis out of a dynamic and another one?"""
    found = refined(list(node.args[0].meta["val"].shape), list(node.meta["val"].shape))  # type: ignore[union-attr]
    return not isinstance(found, Declined) and any(_mixed(axis, found[2]) for axis in found[1])


def _mixed(axis: list[str], sizes: Any) -> bool:
    kinds = {sizes[letter] is None for letter in axis}
    return len(kinds) == 2


class _Unmerger:
    """Walks a graph and makes, beside calls on merged axes, the same on axes apart."""

    def __init__(self, editor: GraphEditor, table: Table):
        self.editor, self.table = editor, table
        self.apart: dict[fx.Node, _Apart] = {}
        self.split = 0

    def visit(self, node: fx.Node) -> None:
        with self.editor.graph.inserting_before(node):
            if node.target in _VIEWS:
                self._view(node)
            elif any(source in self.apart for source in node.all_input_nodes):
                made = self._again(node)
                if made is not None:
                    made.node.meta = {**node.meta, **made.node.meta}
                    self.apart[node] = made

    def merge(self, old: fx.Node, apart: _Apart) -> None:
        """Let what still reads a merged value read the other, merged."""
        with self.editor.graph.inserting_before(apart.node.next):
            made = self.editor.call(aten.reshape.default, apart.node, self._merged(apart, old))
        old.replace_all_uses_with(made)

    def _merged(self, apart: _Apart, old: fx.Node) -> list[Any]:
        sizes, k, found = self.editor.sizes(apart.node), 0, []
        for count, size in zip(apart.counts, old.meta["val"].shape, strict=True):
            found.append(sizes[k] if count == 1 else size if isinstance(size, int) else -1)
            k += count
        return found

    def _view(self, node: fx.Node) -> None:
        source: Any = node.args[0]
        base = self.apart[source].node if source in self.apart else source
        shape = list(node.meta["val"].shape)
        found = refined(list(base.meta["val"].shape), shape)
        if isinstance(found, Declined):
            return
        before, after, letters = found
        if source in self.apart and self._frees(self.apart[source], before, after, letters):
            node = self._parted(node, base)
        if not any(_mixed(axis, letters) for axis in after):
            return
        where = {axis[0]: k for k, axis in enumerate(before) if len(axis) == 1}
        held, sizes, counts = self.editor.sizes(base), [], []
        for k, axis in enumerate(after):
            if not _mixed(axis, letters):
                sizes.append(_size(self.editor, node, k))
                counts.append(1)
                continue
            parts = [
                letters[a] if letters[a] is not None else held[where[a]] if a in where else None
                for a in axis
            ]
            if None in parts:
                return
            sizes += parts
            counts.append(len(parts))
        made = self.editor.call(aten.reshape.default, base, sizes)
        self.apart[node] = _Apart(made, tuple(counts))

    def _frees(self, apart: _Apart, before: Any, after: Any, letters: Any) -> bool:
        """Does a view take out of a mixed axis what can be cut?"""
        merged = {
            letter
            for k, count in enumerate(apart.counts)
            for axis in before[apart.axis(k) : apart.axis(k) + count]
            for letter in axis
            if count > 1 and letters[letter] is not None
        }
        still = {letter for axis in after if _mixed(axis, letters) for letter in axis}
        return bool(merged - still)

    def _parted(self, node: fx.Node, base: fx.Node) -> fx.Node:
        """A view that takes merged axes apart, of the axes apart."""
        made = base
        if not same_shape(base.meta["val"], node.meta["val"]):
            sizes = [_size(self.editor, node, k) for k in range(node.meta["val"].ndim)]
            made = self.editor.call_for(node, aten.reshape.default, base, sizes)
        node.replace_all_uses_with(made)
        self.split += 1
        return made

    def _again(self, node: fx.Node) -> _Apart | None:
        """A call on axes apart, if it has a form there."""
        rule: Callable[[fx.Node], _Apart | None] | None = {
            aten.transpose.int: self._permuted,
            aten.permute.default: self._permuted,
            aten.softmax.int: self._along,
            aten.bmm.default: self._product,
            aten.baddbmm.default: self._product,
        }.get(node.target)  # type: ignore[arg-type]
        return (rule or self._pointwise)(node)

    def _permuted(self, node: fx.Node) -> _Apart | None:
        source = self.apart[node.args[0]]  # type: ignore[index]
        rank, found = len(source.counts), schema.arguments(node)
        if node.target is aten.permute.default:
            order = [d % rank for d in found["dims"]]
        else:
            order = list(range(rank))
            i, j = found["dim0"] % rank, found["dim1"] % rank
            order[i], order[j] = order[j], order[i]
        dims = [source.axis(d) + k for d in order for k in range(source.counts[d])]
        made = self.editor.call(aten.permute.default, source.node, dims)
        return _Apart(made, tuple(source.counts[d] for d in order))

    def _along(self, node: fx.Node) -> _Apart | None:
        """A softmax along an axis that is not merged."""
        source, found = self.apart[node.args[0]], schema.arguments(node)  # type: ignore[index]
        dim = found["dim"] % len(source.counts)
        if source.counts[dim] != 1:
            return None
        found |= {"self": source.node, "dim": source.axis(dim)}
        return _Apart(self.editor.call_named(node.target, found), source.counts)

    def _product(self, node: fx.Node) -> _Apart | None:
        """A batched product, its batch apart; what baddbmm adds is added."""
        *added, a, b = node.args
        left, right = self.apart.get(a), self.apart.get(b)  # type: ignore[arg-type]
        if (
            left is None
            or right is None
            or left.counts != right.counts
            or left.counts[1:] != (1, 1)
        ):
            return None
        lead = zip(left.node.meta["val"].shape[:-2], right.node.meta["val"].shape[:-2], strict=True)
        if not all(schema.same_size(m, n) for m, n in lead):
            return None
        if any(node.kwargs.get(name, 1) != 1 for name in ("beta", "alpha")):
            return None
        made = self.editor.call(aten.matmul.default, left.node, right.node)
        for term in added:
            other = self._broadcast(term, left.counts)
            if other is None:
                return None
            made = self.editor.call(aten.add.Tensor, made, other)
        return _Apart(made, left.counts)

    def _pointwise(self, node: fx.Node) -> _Apart | None:
        relation = bind(node, self.table)
        if not isinstance(relation, Relation) or relation.entry.args is not None or relation.moved:
            return None
        if relation.complete or relation.window or relation.entry.fill != "run":
            return None
        counts = next(self.apart[s].counts for s in node.all_input_nodes if s in self.apart)
        if len(relation.outs) != 1 or relation.entry.line not in (
            "... -> ...",
            "..., ... -> ...",
            "..., ..., ... -> ...",
        ):
            return None
        values = [self._broadcast(operand.value, counts) for operand in relation.operands]
        if any(value is None for value in values):
            return None
        found = schema.replaced(schema.arguments(node), relation.operands, values)
        return _Apart(self.editor.call_named(node.target, found), counts)

    def _broadcast(self, value: Any, counts: tuple[int, ...]) -> Any:
        """An operand beside one with axes apart; None where its axes cannot be told apart."""
        if not isinstance(value, fx.Node):
            return value
        if value in self.apart:
            return self.apart[value].node if self.apart[value].counts == counts else None
        shape = value.meta["val"].shape
        made = value
        for k, count in reversed(list(enumerate(counts[len(counts) - len(shape) :]))):
            if count == 1:
                continue
            if not schema.same_size(shape[k], 1):
                return None
            for _ in range(count - 1 if k else 0):
                made = self.editor.call(aten.unsqueeze.default, made, k)
        return made


def _size(editor: GraphEditor, node: fx.Node, axis: int) -> Any:
    """A size of a view as it was asked for, so that nothing reads the view itself."""
    found = schema.arguments(node)
    asked = found.get("size", found.get("shape"))
    size = node.meta["val"].shape[axis]
    if isinstance(size, int):
        return size
    if asked is not None and len(asked) == node.meta["val"].ndim and asked[axis] != -1:
        return asked[axis]
    return editor.call(aten.sym_size.int, node, axis)
