"""Emits the smaller graph: every live call again, on smaller operands.

One small function per family of calls; the relation of a call decides which one applies.

Norms that read full axes, of which only the needed positions are scaled and shifted.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.facts.carriers import CarriedChannels
from demask.facts.known import Facts, Relations, created_fact, key_of, value_of
from demask.facts.masks import along
from demask.facts.needed import Needs
from demask.failures import attributed
from demask.graph.program import Program
from demask.graph.provenance import Cut, Reason
from demask.ops import Declined, Relation, schema
from demask.ops.entries.padded import PLAIN
from demask.ops.schema import fake
from demask.shrink.emit.constant_store import cut
from demask.shrink.emit.context import EmitContext, sizes_depend_on_values
from demask.shrink.emit.contraction import emit_contraction
from demask.shrink.emit.join import emit_join, find_unchanged_operand
from demask.shrink.emit.plain import emit_move, is_untouched
from demask.shrink.emit.recurrent import emit_recurrent
from demask.shrink.layout.cells import Layout, Positions, cut_positions
from demask.shrink.layout.placement import Placement
from demask.shrink.layout.ties import is_join

aten = torch.ops.aten


def emit_cut_norm(context: EmitContext, relation: Relation, want: Layout) -> fx.Node:
    """The norm without scale and shift over full axes, cut to the wanted positions, then scaled
    and shifted: scales and shifts of other positions are removed.

        norm(x)[want] * weight[want] + bias[want] == norm(x, weight, bias)[want]
    """
    node, whole = relation.node, context.placement.slot[relation.node, 0]
    arguments = schema.arguments(node)
    bare: dict[str, Any] = {name: None for name in ("weight", "bias") if name in arguments}
    values = [context.operand(relation, 0), *[None] * (len(relation.operands) - 1)]
    args, kwargs = context.arguments(relation, values, [whole], bare)
    value = context.editor.call(node.target, *args, **kwargs)
    for axis, (have, positions) in enumerate(zip(whole, want, strict=True)):
        if have == positions:
            continue
        size = fake(node).shape[axis]
        offsets = {p: k for k, p in enumerate(range(size) if have is None else have)}
        rows = range(size) if positions is None else positions
        value = context.adapter.select(value, axis, [offsets[p] for p in rows])
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if arguments.get(name) is not None:
            value = context.editor.call(op, value, _vector(context, relation, name, want))
    return value


def _vector(context: EmitContext, relation: Relation, name: str, want: Layout) -> fx.Node:
    """A scale or shift cut to the wanted positions, shaped to broadcast over the output."""
    k = next(k for k, operand in enumerate(relation.operands) if operand.name == name)
    source, outs = relation.operands[k].value, relation.outs[0]
    axes = [next(d for d, a in enumerate(outs) if a == mine) for mine in relation.ins[k]]
    part = tuple(want[d] for d in axes)
    if axes == list(range(len(outs) - len(axes), len(outs))):
        return context.adapter.adapt(source, part)
    if source.op != "get_attr":
        vector = context.adapter.adapt(source, part)
        for d in range(min(axes), len(outs)):
            if d not in axes:
                vector = context.editor.call(aten.unsqueeze.default, vector, d - min(axes))
        return vector
    old = context.store.source[str(source.target)]
    sizes = cut(old.tensor, part).shape
    shape = [sizes[axes.index(d)] if d in axes else 1 for d in range(min(axes), len(outs))]
    vector = context.store.add(old.moved(lambda tensor: cut(tensor, part).reshape(shape)))
    context.store.cuts[vector] = Cut(old.name, tuple(old.tensor.shape), part)
    return context.store.read(vector)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A smaller program, the cuts of its tensors, and the reasons for known slices in it.

    has_side_network: whether a side network was split off before. forms: what else was rewritten
    before, in this order.
    """

    program: Program
    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...]
    has_side_network: bool = False
    forms: tuple[str, ...] = ()


def emit_program(
    program: Program,
    relations: Relations,
    facts: Facts,
    needs: Needs,
    placement: Placement,
    carried: Mapping[fx.Node, CarriedChannels] = types.MappingProxyType({}),
) -> Rewritten:
    """The program that computes the same outputs in the layouts of `placement`. carried: channels
    that carry others. Raises CallFailed where the rule of a call fails."""
    context = Rewriter(program, relations, facts, needs, placement, carried)
    for node in program.graph.nodes:
        with attributed(node):
            context.visit(node)
    return context.rewritten()


class Rewriter(EmitContext):
    """Appends every live call again, by the rule of its relation."""

    def rewritten(self) -> Rewritten:
        """What was emitted, after every node was visited."""
        smaller = self.editor.finish()
        cuts = {name: cut for name, cut in self.store.cuts.items() if name in smaller.constants}
        return Rewritten(smaller, cuts, tuple(self.reasons))

    def _call(self, node: fx.Node) -> None:
        live = [k for k in range(len(schema.outputs(node))) if (node, k) in self.placement.value]
        if not live:
            return
        relation = self.relations[node]
        if isinstance(relation, Declined):
            self._emit_barrier(node, relation, live)
        elif relation.entry.free:
            emit_created(self, relation)
        elif relation.moved:
            emit = emit_plain if is_untouched(self, relation, live) else emit_move
            emit(self, relation, live)
        elif relation.entry.fill == "sum":
            explain(self, relation, 0)
            emit_contraction(self, relation)
        elif relation.back:
            explain(self, relation, 0)
            emit_recurrent(self, relation)
        elif is_join(relation):
            emit_join(self, relation)
        else:
            emit_plain(self, relation, live)
        if isinstance(relation, Relation):
            for k in live:
                self._explain_supersets(relation, k)

    def _explain_supersets(self, relation: Relation, k: int) -> None:
        """Add reasons for positions that are computed though not needed: others need their cell."""
        whole_axes = relation.window | relation.complete | relation.moved
        layout = self.placement.value[relation.node, k]
        for axis, letters in enumerate(relation.outs[k]):
            read = along(self.needs.live[relation.node, k], axis)
            size = schema.outputs(relation.node)[k].shape[axis]
            if set(letters) & whole_axes or len(read) == 1 or not isinstance(size, int):
                continue
            computed = size if layout[axis] is None else len(layout[axis] or ())
            if computed > int(read.sum()):
                text = "cut together with axes or tensors that need more"
                self.reason(relation.node, axis, computed - int(read.sum()), text)

    def _emit_barrier(self, node: fx.Node, why: Declined, live: list[int]) -> None:
        """Emit an op without a rule: its operands and outputs are whole."""
        restored = [self.removed(source) for source in node.all_input_nodes]
        counts = [count for count in restored if count is not None]
        for axis, count in counts or [self._count_unread(node, live)]:
            self.reason(node, axis, count, why.text, barrier=True)
        args, kwargs = self.argument(node.args), self.argument(node.kwargs)
        self.finish(node, node.target, args, kwargs, None, same=sizes_depend_on_values(node))

    def _count_unread(self, node: fx.Node, live: list[int]) -> tuple[int, int]:
        """The axis of a call with most unread positions, and their number."""
        counts = [(0, 0)]
        for k in live:
            for axis in range(self.needs.live[node, k].ndim):
                read = along(self.needs.live[node, k], axis)
                counts.append((axis, int((~read).sum()) if len(read) > 1 else 0))
        return max(counts, key=lambda row: row[1])


def emit_plain(context: EmitContext, relation: Relation, live: list[int]) -> None:
    """Emit a call whose operands and outputs share their cells: the same op, on less."""
    node = relation.node
    layouts = [context.placement.value.get((node, k)) for k in range(len(relation.outs))]
    known = [tuple(None for _ in axes) for axes in relation.outs]
    filled = [layout if layout is not None else known[k] for k, layout in enumerate(layouts)]
    if layouts[0] is not None and (same := find_unchanged_operand(context, relation, layouts[0])) is not None:
        context.emit(node, 0, same, layouts[0])
        return
    for k in range(len(relation.operands)):
        explain(context, relation, k)
    if relation.entry.affine and relation.complete and layouts[0] is not None:
        whole_input = context.placement.slot[node, 0]
        if whole_input != layouts[0] and schema.arguments(node).get("weight") is not None:
            sizes = fake(node).shape
            both = zip(layouts[0], whole_input, sizes, strict=True)
            # A position live for others but not for the norm is known: readers fill it in.
            layout = tuple(_available_positions(want, have, size) for want, have, size in both)
            value = emit_cut_norm(context, relation, layout)
            value.meta = {**node.meta, **value.meta}
            context.emit(node, 0, value, layout)
            return
        layouts[0] = filled[0] = whole_input
    values = [context.operand(relation, k) for k in range(len(relation.operands))]
    args, kwargs = context.arguments(relation, values, filled)
    context.finish(node, node.target, args, kwargs, layouts)


def emit_created(context: EmitContext, relation: Relation) -> None:
    """Emit a created tensor that counts as unknown, since it is not finite: one number, without the
    operand whose shape it had."""
    node, layout = relation.node, context.placement.value[relation.node, 0]
    fact = created_fact(relation)
    if fact is None:
        args, kwargs = context.argument(node.args), context.argument(node.kwargs)
        context.finish(node, node.target, args, kwargs, None)
        return
    value = context.store.full(context.sizes(node, 0, layout), fact.fill)
    value.meta = {**node.meta, **value.meta}
    context.emit(node, 0, value, layout)


def _available_positions(want: Positions, have: Positions, size: Any) -> Positions:
    if have is None:
        return want
    available = set(have)
    return cut_positions([p for p in (range(size) if want is None else want) if p in available], size)


def explain(context: EmitContext, relation: Relation, k: int) -> None:
    """Add reasons for positions that are computed before a call although their values are known."""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node) or source.op == "get_attr":
        return
    layout, want = context.adapter.have(key_of(source)), context.placement.slot[relation.node, k]
    for axis, letters in enumerate(relation.ins[k]):
        if layout is None or layout[axis] is None or layout[axis] == want[axis]:
            continue
        have = set(layout[axis] or ())
        wanted = range(value_of(source).shape[axis]) if want[axis] is None else want[axis] or ()
        count = len([p for p in wanted if p not in have])
        if set(letters) & relation.complete:
            why = "needs the full axis"
        elif relation.entry.fill == "sum" and relation.entry.reads_padding(relation.node):
            why = "pads with zeros, so a constant entering it differs at the border and is computed"
        else:
            continue
        if count:
            context.reason(relation.node, axis, count, f"{schema_name(relation)} {why}")


def schema_name(relation: Relation) -> str:
    """The op's plain name, for readers of the report."""
    target = PLAIN.get(relation.node.target, relation.node.target)
    return str(target).removeprefix("aten.").partition(".")[0]
