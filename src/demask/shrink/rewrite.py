"""The new graph: every live call again, on smaller operands.

One small function per kind of call; which kind a call is follows from its relation.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.compat.symbolic_shapes import free_unbacked_symbols
from demask.facts.known import Facts, Relations, created, key_of, value_of
from demask.facts.masks import along
from demask.facts.needed import Needs
from demask.failures import attributed
from demask.graph.build import Builder, mode_of
from demask.graph.fold import drop_unread
from demask.graph.program import Program
from demask.graph.provenance import Cut, Reason
from demask.ops import Declined, Relation, op_name, schema
from demask.ops.padded import PLAIN
from demask.ops.schema import same_size
from demask.shrink.adapt import Adapter, Made
from demask.shrink.cells import Layout, Positions, whole
from demask.shrink.contract import emit_contraction
from demask.shrink.join import emit_join, unchanged
from demask.shrink.movement import emit_move, is_untouched
from demask.shrink.norm import emit_cut_norm
from demask.shrink.place import Placement
from demask.shrink.pool import Pool, module_of
from demask.shrink.recurrent import emit_recurrent
from demask.shrink.ties import is_join

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A smaller program, how its tensors were cut, and why what was kept was kept."""

    program: Program
    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...]
    apart: bool = False  # from the part that no input decides


def rewrite(
    program: Program, relations: Relations, facts: Facts, needs: Needs, placement: Placement
) -> Rewritten:
    """The program that computes the same outputs from only what `placement` keeps. Raises
    CallFailed where the rule of a call fails."""
    walk = Rewriter(program, relations, facts, needs, placement)
    for node in program.graph.nodes:
        with attributed(node):
            walk.visit(node)
    graph = walk.build.graph
    drop_unread(graph)
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    kept = {name: c for name, c in walk.pool.constants.items() if name in read}
    cuts = {name: cut for name, cut in walk.pool.cuts.items() if name in read}
    return Rewritten(program.with_graph(graph, kept), cuts, tuple(walk.reasons))


class Rewriter:
    """Walks the old graph and appends to the new one."""

    def __init__(
        self, program, relations: Relations, facts: Facts, needs: Needs, placement: Placement
    ):
        self.relations, self.facts, self.needs, self.placement = relations, facts, needs, placement
        self.build = Builder(fx.Graph(), mode_of(program.graph))
        self.old_inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.inputs: dict[fx.Node, fx.Node] = {}
        for node in self.old_inputs:
            self.inputs[node] = self.build.graph.node_copy(node)
        self.pool = Pool(self.build, program.constants, list(self.inputs.values()))
        self.adapter = Adapter(self.build, self.pool, facts)
        self.numbers: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if (symbol := _decided(node)) is not None:
                self.pool.made_by.setdefault(symbol, partial(self._number, node))
        self.reasons: list[Reason] = []

    def visit(self, node: fx.Node) -> None:
        self.build.replaced = node
        if node.op == "placeholder":
            self.keep(node, 0, self.inputs[node], None)
        elif node.op == "output":
            self._output(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            self._call(node)

    def keep(self, node: fx.Node, k: int, made: fx.Node, layout: Layout | None) -> None:
        value = schema.outputs(node)[k]
        if isinstance(value, Tensor):
            full = tuple(None for _ in value.shape)
            self.adapter.made[node, k] = Made(made, full if layout is None else layout)

    def _call(self, node: fx.Node) -> None:
        live = [k for k in range(len(schema.outputs(node))) if (node, k) in self.placement.value]
        if not live:
            return
        relation = self.relations[node]
        if isinstance(relation, Declined):
            self._barrier(node, relation, live)
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
                self._supersets(relation, k)

    def _supersets(self, relation: Relation, k: int) -> None:
        """Say where positions are computed that nothing needs, because others need their cell."""
        whole_axes = relation.window | relation.complete | relation.moved
        layout = self.placement.value[relation.node, k]
        for axis, letters in enumerate(relation.outs[k]):
            read = along(self.needs.live[relation.node, k], axis)
            size = schema.outputs(relation.node)[k].shape[axis]
            if set(letters) & whole_axes or len(read) == 1 or not isinstance(size, int):
                continue
            held = size if layout[axis] is None else len(layout[axis] or ())
            if held > int(read.sum()):
                text = "cut together with axes or tensors that need more"
                self.reason(relation.node, axis, held - int(read.sum()), text)

    def _barrier(self, node: fx.Node, why: Declined, live: list[int]) -> None:
        """An op with no rule gets its operands whole, and what it makes is whole."""
        count, outputs = 0, schema.outputs(node)
        for source in node.all_input_nodes:
            held = self.adapter.have(key_of(source))
            if held is not None and any(p is not None for p in held):
                axis = next(k for k, p in enumerate(held) if p is not None)
                self.reason(node, axis, value_of(source).shape[axis], why.text, barrier=True)
                count += 1
        axis, unread = (0, 0) if count else self._unread(node, live)
        if not count:
            self.reason(node, axis, unread, why.text, barrier=True)
        args, kwargs = self.argument(node.args), self.argument(node.kwargs)
        self.finish(node, node.target, args, kwargs, None, same=free_unbacked_symbols(outputs))

    def _unread(self, node: fx.Node, live: list[int]) -> tuple[int, int]:
        """Along which axis a call makes most positions that nothing reads, and how many."""
        found = [(0, 0)]
        for k in live:
            for axis in range(self.needs.live[node, k].ndim):
                read = along(self.needs.live[node, k], axis)
                found.append((axis, int((~read).sum()) if len(read) > 1 else 0))
        return max(found, key=lambda row: row[1])

    def reason(
        self, node: fx.Node, axis: int, count: Any, text: str, *, barrier: bool = False
    ) -> None:
        """Note why slices are kept; barrier: because nothing is known of the call itself."""
        count = count if isinstance(count, int) else 0
        op = op_name(node.target) if barrier else ""
        self.reasons.append(Reason(node.name, module_of(node), axis, count, text, op))

    def finish(
        self, node, target, args, kwargs, layouts: list[Layout | None] | None, *, same: Any = False
    ) -> None:
        """Append the call that replaces `node`, outputs in the given layouts (None: whole). same:
        its value is that of `node`, which would get other symbols from a run."""
        like = self._like(node, args, layouts[0] if layouts else None)
        if same:
            made = self._copied(node, args, kwargs)
        elif like is None:
            made = self.build.call(target, *args, **kwargs)
        else:
            shape = like.meta["val"].shape
            made = self.build.call_shaped(shape, like, target, args, kwargs)
        made.meta = {**node.meta, **made.meta}
        outputs = schema.outputs(node)
        if not isinstance(node.meta.get("val"), (list, tuple)):
            if isinstance(outputs[0], Tensor):
                self.keep(node, 0, made, layouts[0] if layouts else None)
            else:
                self.numbers[node] = made
            return
        for k in range(len(outputs)):
            if (node, k) in self.placement.value:
                part = self.build.call(operator.getitem, made, k)
                self.keep(node, k, part, layouts[k] if layouts else None)

    def _like(self, node: fx.Node, args: Any, layout: Layout | None) -> fx.Node | None:
        """The operand of the new call that has its output's shape and dtype, if one surely has."""
        relation = self.relations.get(node)
        if not isinstance(relation, Relation) or relation.moved or len(relation.outs) != 1:
            return None
        if relation.entry.fill != "run" or relation.entry.args is not None:
            return None
        old, sizes = node.meta["val"], self.shape(node, layout)
        for arg in args:
            value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
            if (
                not isinstance(value, Tensor)
                or value.dtype != old.dtype
                or value.ndim != len(sizes)
            ):
                continue
            if all(same_size(a, b) for a, b in zip(value.shape, sizes, strict=True)):
                return arg
        return None

    def shape(self, node: fx.Node, layout: Layout | None) -> list[Any]:
        """The sizes of what a call makes, in a layout (None: whole)."""
        old = node.meta["val"]
        held = layout or (None,) * old.ndim
        return [n if p is None else len(p) for n, p in zip(old.shape, held, strict=True)]

    def argument(self, value: Any) -> Any:
        """An argument for the new graph: tensors whole, sizes recomputed."""
        return map_arg(value, self._argument)

    def _argument(self, node: fx.Node) -> Any:
        value = value_of(node)
        if isinstance(value, Tensor):
            return self.adapter.adapt(node, tuple(None for _ in value.shape))
        if node in self.numbers:
            return self.numbers[node]
        if isinstance(value, torch.SymInt):
            return self.pool.expression(value.node.expr)
        if isinstance(value, int):
            return value
        return self._number(node)

    def _number(self, node: fx.Node) -> Any:
        """A number that no size is, made by the call that made it."""
        if node not in self.numbers:
            args, kwargs = self.argument(node.args), self.argument(node.kwargs)
            decided = _decided(node) is not None
            made = self._copied(node, args, kwargs) if decided else None
            self.numbers[node] = made or self.build.call(node.target, *args, **kwargs)
        return self.numbers[node]

    def _copied(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The call of a node again, which makes the same value."""
        made = self.build.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        return made

    def operand(self, relation: Relation, k: int, *, broadcast: bool = False) -> Any:
        """Operand k of a call in the layout its slot asks for."""
        source = relation.operands[k].value
        if not isinstance(source, fx.Node):
            return source
        slot = self.placement.slot[relation.node, k]
        # An op that moves positions and is kept as it is moves along whole axes.
        axes = zip(relation.ins[k], slot, strict=True)
        want = tuple(None if set(axis) & relation.moved else p for axis, p in axes)
        return self.adapter.adapt(source, want, broadcast=broadcast)

    def sizes(self, node: fx.Node, k: int, layout: Layout) -> list[Any]:
        """The sizes of output k of an old node in a layout, as call arguments."""
        value = schema.outputs(node)[k]
        return [
            self.pool.size(size) if layout[axis] is None else len(layout[axis] or ())
            for axis, size in enumerate(value.shape)
        ]

    def arguments(
        self,
        relation: Relation,
        values: list[Any],
        layouts: list[Layout],
        more: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> tuple[Any, Any]:
        """All arguments of a call again: cut operands, rebuilt sizes, recomputed dynamic ones;
        `more`, by name, above all."""
        node = relation.node
        found = schema.arguments(node)
        names = {operand.name for operand in relation.operands}
        plain = {name: v if name in names else self.argument(v) for name, v in found.items()}
        plain = schema.replaced(plain, relation.operands, values)
        if relation.entry.args is not None:
            made: Any = [self.sizes(node, k, layout) for k, layout in enumerate(layouts)]
            plain |= relation.entry.args(node, made)
        return schema.call(node.target, plain | dict(more))

    def _output(self, node: fx.Node) -> None:
        """The model's outputs keep their shape."""
        values = []
        for value in node.args[0]:  # type: ignore[union-attr]
            values.append(self.argument(value) if isinstance(value, fx.Node) else value)
            held = self.adapter.have(key_of(value)) or () if isinstance(value, fx.Node) else ()
            if any(p is not None for p in held):
                axis = next((k for k, p in enumerate(held) if p is not None), 0)
                self.reason(
                    value, axis, value_of(value).shape[axis], "the model's output keeps its shape"
                )
        self.build.graph.output(tuple(values))


def _decided(node: fx.Node) -> Any:
    """The symbol of a number that values decide, if a call makes it (`item`, a size of `nonzero`);
    else None."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.SymInt):
        return None
    return value.node.expr if value.node.expr.is_Symbol and free_unbacked_symbols(value) else None


def emit_plain(walk: Rewriter, relation: Relation, live: list[int]) -> None:
    """A call whose operands and outputs share their cells: the same op, on less."""
    node = relation.node
    layouts = [walk.placement.value.get((node, k)) for k in range(len(relation.outs))]
    known = [tuple(None for _ in axes) for axes in relation.outs]
    filled = [layout if layout is not None else known[k] for k, layout in enumerate(layouts)]
    if layouts[0] is not None and (same := unchanged(walk, relation, layouts[0])) is not None:
        walk.keep(node, 0, same, layouts[0])
        return
    for k in range(len(relation.operands)):
        explain(walk, relation, k)
    if relation.entry.affine and relation.complete and layouts[0] is not None:
        held = walk.placement.slot[node, 0]
        if held != layouts[0] and schema.arguments(node).get("weight") is not None:
            sizes = node.meta["val"].shape
            both = zip(layouts[0], held, sizes, strict=True)
            # A position that others keep and the norm does not see is known: readers put it in.
            layout = tuple(_within(want, have, size) for want, have, size in both)
            made = emit_cut_norm(walk, relation, layout)
            made.meta = {**node.meta, **made.meta}
            walk.keep(node, 0, made, layout)
            return
        layouts[0] = filled[0] = held
    values = [walk.operand(relation, k) for k in range(len(relation.operands))]
    args, kwargs = walk.arguments(relation, values, filled)
    walk.finish(node, node.target, args, kwargs, layouts)


def emit_created(walk: Rewriter, relation: Relation) -> None:
    """What a call makes of no value, and is not known, since it is not finite: a number all over,
    made without the operand whose shape it had."""
    node, layout = relation.node, walk.placement.value[relation.node, 0]
    fact = created(relation)
    if fact is None:
        args, kwargs = walk.argument(node.args), walk.argument(node.kwargs)
        walk.finish(node, node.target, args, kwargs, None)
        return
    made = walk.pool.full(walk.sizes(node, 0, layout), fact.fill)
    made.meta = {**node.meta, **made.meta}
    walk.keep(node, 0, made, layout)


def _within(want: Positions, have: Positions, size: Any) -> Positions:
    """The wanted positions of an axis that are held."""
    if have is None:
        return want
    held = set(have)
    return whole([p for p in (range(size) if want is None else want) if p in held], size)


def explain(walk: Rewriter, relation: Relation, k: int) -> None:
    """Say why positions are put back before a call: what is known of them does not suffice it."""
    source = relation.operands[k].value
    if not isinstance(source, fx.Node) or source.op == "get_attr":
        return
    held, want = walk.adapter.have(key_of(source)), walk.placement.slot[relation.node, k]
    for axis, letters in enumerate(relation.ins[k]):
        if held is None or held[axis] is None or held[axis] == want[axis]:
            continue
        have = set(held[axis] or ())
        wanted = range(value_of(source).shape[axis]) if want[axis] is None else want[axis] or ()
        count = len([p for p in wanted if p not in have])
        if set(letters) & relation.complete:
            why = "needs the whole axis"
        elif relation.entry.fill == "sum" and relation.entry.reads_padding(relation.node):
            why = "pads with zeros, so a constant entering it differs at the border and is computed"
        else:
            continue
        if count:
            walk.reason(relation.node, axis, count, f"{schema_name(relation)} {why}")


def schema_name(relation: Relation) -> str:
    """The op's plain name, for readers of the report."""
    target = PLAIN.get(relation.node.target, relation.node.target)
    return str(target).removeprefix("aten.").partition(".")[0]
