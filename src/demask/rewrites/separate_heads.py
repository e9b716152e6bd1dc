"""Separate heads that a view merges with a dynamic batch.

`x.view(length, batch * heads, size)` merges an axis that can be cut (heads) with a dynamic one
(batch) into an axis that cannot be cut. If a later view splits it again, the calls between the two
views compute on separate axes: a batched product becomes a matmul.
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
from demask.ops.entries.movement import common_refinement
from demask.ops.schema import fake, same_shape
from demask.ops.traits import RESHAPES, SQUEEZES

aten = torch.ops.aten
_VIEWS = RESHAPES - SQUEEZES


@dataclass(frozen=True, slots=True)
class _Separated:
    """A value with separate axes, and the number of axes for each axis of the merged value."""

    node: fx.Node
    counts: tuple[int, ...]

    def axis(self, k: int) -> int:
        """The first axis that axis k of the merged value became."""
        return sum(self.counts[:k])


def separate_heads(program: Program, table: Table) -> Program:
    """The program without axes that merge a dynamic axis with another one and are split again."""
    if not any(node.target in _VIEWS and _merges_dynamic_axis(node) for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    walk = _Unmerger(editor, table)
    for node in editor.calls():
        walk.visit(node)
    if not walk.split:
        return program
    drop_unread(editor.graph)
    remaining = set(editor.graph.nodes)
    for old, separated in walk.separated.items():
        if old in remaining and separated.node in remaining and separated.node is not old:
            walk.merge(old, separated)
    return editor.finish()


def _merges_dynamic_axis(node: fx.Node) -> bool:
    """Whether a view merges a dynamic and a static axis."""
    source: Any = node.args[0]
    refinement = common_refinement(list(fake(source).shape), list(fake(node).shape))
    return not isinstance(refinement, Declined) and any(
        _has_mixed_letters(axis, refinement[2]) for axis in refinement[1]
    )


def _has_mixed_letters(axis: list[str], sizes: Any) -> bool:
    """Whether an axis has dynamic and static letters."""
    kinds = {sizes[letter] is None for letter in axis}
    return len(kinds) == 2


class _Unmerger:
    """Adds, for calls on merged axes, the same calls on separate axes. separated: by node, the
    value with separate axes. split: the number of views that split merged axes."""

    def __init__(self, editor: GraphEditor, table: Table):
        self.editor, self.table = editor, table
        self.separated: dict[fx.Node, _Separated] = {}
        self.split = 0

    def visit(self, node: fx.Node) -> None:
        """Add the call of a node on separate axes, if there is one."""
        with self.editor.graph.inserting_before(node):
            if node.target in _VIEWS:
                self._view(node)
            elif any(source in self.separated for source in node.all_input_nodes):
                separated = self._again(node)
                if separated is not None:
                    separated.node.meta = {**node.meta, **separated.node.meta}
                    self.separated[node] = separated

    def merge(self, old: fx.Node, separated: _Separated) -> None:
        """Let readers of a merged value read the separated value, merged."""
        with self.editor.graph.inserting_before(separated.node.next):
            merged = self.editor.call(aten.reshape.default, separated.node, self._merged_sizes(separated, old))
        old.replace_all_uses_with(merged)

    def _merged_sizes(self, separated: _Separated, old: fx.Node) -> list[Any]:
        sizes, k, merged_sizes = self.editor.sizes(separated.node), 0, []
        for count, size in zip(separated.counts, fake(old).shape, strict=True):
            merged_sizes.append(sizes[k] if count == 1 else size if isinstance(size, int) else -1)
            k += count
        return merged_sizes

    def _view(self, node: fx.Node) -> None:
        """Add a view to separate axes, if the view merges axes; replace it if it splits them."""
        source: Any = node.args[0]
        base = self.separated[source].node if source in self.separated else source
        shape = list(fake(node).shape)
        refinement = common_refinement(list(fake(base).shape), shape)
        if isinstance(refinement, Declined):
            return
        before, after, letters = refinement
        if source in self.separated and self._frees(self.separated[source], before, after, letters):
            node = self._replace_split(node, base)
        if not any(_has_mixed_letters(axis, letters) for axis in after):
            return
        axis_of_letter = {axis[0]: k for k, axis in enumerate(before) if len(axis) == 1}
        base_sizes, sizes, counts = self.editor.sizes(base), [], []
        for k, axis in enumerate(after):
            if not _has_mixed_letters(axis, letters):
                sizes.append(_size(self.editor, node, k))
                counts.append(1)
                continue
            parts = [
                letters[a] if letters[a] is not None else base_sizes[axis_of_letter[a]] if a in axis_of_letter else None
                for a in axis
            ]
            if None in parts:
                return
            sizes += parts
            counts.append(len(parts))
        view = self.editor.call(aten.reshape.default, base, sizes)
        self.separated[node] = _Separated(view, tuple(counts))

    def _frees(self, separated: _Separated, before: Any, after: Any, letters: Any) -> bool:
        """Whether a view splits static letters from a mixed axis."""
        merged = {
            letter
            for k, count in enumerate(separated.counts)
            for axis in before[separated.axis(k) : separated.axis(k) + count]
            for letter in axis
            if count > 1 and letters[letter] is not None
        }
        still = {letter for axis in after if _has_mixed_letters(axis, letters) for letter in axis}
        return bool(merged - still)

    def _replace_split(self, node: fx.Node, base: fx.Node) -> fx.Node:
        """Replace a view that splits merged axes by a view of the separated value."""
        view = base
        if not same_shape(fake(base), fake(node)):
            sizes = [_size(self.editor, node, k) for k in range(fake(node).ndim)]
            view = self.editor.call_for(node, aten.reshape.default, base, sizes)
        node.replace_all_uses_with(view)
        self.split += 1
        return view

    def _again(self, node: fx.Node) -> _Separated | None:
        """A call on separate axes; None if there is none."""
        rules: dict[Any, Callable[[fx.Node], _Separated | None]] = {
            aten.transpose.int: self._permuted,
            aten.permute.default: self._permuted,
            aten.softmax.int: self._along,
            aten.bmm.default: self._product,
            aten.baddbmm.default: self._product,
        }
        return rules.get(node.target, self._pointwise)(node)

    def _permuted(self, node: fx.Node) -> _Separated | None:
        source = self.separated[schema.source_of(node)]
        rank, call_arguments = len(source.counts), schema.arguments(node)
        if node.target is aten.permute.default:
            order = [d % rank for d in call_arguments["dims"]]
        else:
            order = list(range(rank))
            i, j = call_arguments["dim0"] % rank, call_arguments["dim1"] % rank
            order[i], order[j] = order[j], order[i]
        dims = [source.axis(d) + k for d in order for k in range(source.counts[d])]
        permuted = self.editor.call(aten.permute.default, source.node, dims)
        return _Separated(permuted, tuple(source.counts[d] for d in order))

    def _along(self, node: fx.Node) -> _Separated | None:
        """A softmax along an axis that is not merged."""
        source, call_arguments = self.separated[schema.source_of(node)], schema.arguments(node)
        dim = call_arguments["dim"] % len(source.counts)
        if source.counts[dim] != 1:
            return None
        call_arguments |= {"self": source.node, "dim": source.axis(dim)}
        return _Separated(self.editor.call_named(node.target, call_arguments), source.counts)

    def _product(self, node: fx.Node) -> _Separated | None:
        """A batched product as a matmul, and the sum of baddbmm."""
        operands: Any = node.args
        *added, a, b = operands
        left, right = self.separated.get(a), self.separated.get(b)
        if left is None or right is None or left.counts != right.counts or left.counts[1:] != (1, 1):
            return None
        lead = zip(fake(left.node).shape[:-2], fake(right.node).shape[:-2], strict=True)
        if not all(schema.same_size(m, n) for m, n in lead):
            return None
        if any(node.kwargs.get(name, 1) != 1 for name in ("beta", "alpha")):
            return None
        product = self.editor.call(aten.matmul.default, left.node, right.node)
        for term in added:
            other = self._broadcast(term, left.counts)
            if other is None:
                return None
            product = self.editor.call(aten.add.Tensor, product, other)
        return _Separated(product, left.counts)

    def _pointwise(self, node: fx.Node) -> _Separated | None:
        relation = bind(node, self.table)
        if not isinstance(relation, Relation) or relation.entry.args is not None or relation.moved:
            return None
        if relation.complete or relation.window or relation.entry.fill != "run":
            return None
        counts = next(self.separated[s].counts for s in node.all_input_nodes if s in self.separated)
        if len(relation.outs) != 1 or relation.entry.line not in (
            "... -> ...",
            "..., ... -> ...",
            "..., ..., ... -> ...",
        ):
            return None
        values = [self._broadcast(operand.value, counts) for operand in relation.operands]
        if any(value is None for value in values):
            return None
        call_arguments = schema.replace_operands(schema.arguments(node), relation.operands, values)
        return _Separated(self.editor.call_named(node.target, call_arguments), counts)

    def _broadcast(self, value: Any, counts: tuple[int, ...]) -> Any:
        """Another operand, for separate axes; None if its merged axes cannot be separated."""
        if not isinstance(value, fx.Node):
            return value
        if value in self.separated:
            return self.separated[value].node if self.separated[value].counts == counts else None
        shape = fake(value).shape
        unsqueezed = value
        for k, count in reversed(list(enumerate(counts[len(counts) - len(shape) :]))):
            if count == 1:
                continue
            if not schema.same_size(shape[k], 1):
                return None
            for _ in range(count - 1 if k else 0):
                unsqueezed = self.editor.call(aten.unsqueeze.default, unsqueezed, k)
        return unsqueezed


def _size(editor: GraphEditor, node: fx.Node, axis: int) -> Any:
    """A size of a view, from its arguments if possible, so that no node reads the view itself."""
    call_arguments = schema.arguments(node)
    requested = call_arguments.get("size", call_arguments.get("shape"))
    size = fake(node).shape[axis]
    if isinstance(size, int):
        return size
    if requested is not None and len(requested) == fake(node).ndim and requested[axis] != -1:
        return requested[axis]
    return editor.call(aten.sym_size.int, node, axis)
