"""Emits the program of a network of the caller's class: every call once, with smaller operands.

Where the layouts of a `ClassPlacer` cannot be had by that alone, the values and operands of the
call are collected: they keep their sizes in the next attempt, so attempts end.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.carriers import CarriedChannels
from demask.facts.known import Facts, Key, Relations, key_of
from demask.facts.needed import Needs
from demask.failures import attributed
from demask.graph.program import Program
from demask.ops import Declined, Relation, schema
from demask.shrink.emit.contraction import emit_one_contraction
from demask.shrink.emit.emit_program import Rewriter, Rewritten, explain
from demask.shrink.emit.plain import emit_move, is_untouched
from demask.shrink.emit.recurrent import emit_recurrent
from demask.shrink.layout.class_layout import FixedSizes
from demask.shrink.layout.placement import Placement

# Ops that compute the same where both apply.
_VIEWS = {torch.ops.aten.reshape, torch.ops.aten._unsafe_view, torch.ops.aten.view}


def rewrite_for_class(
    program: Program,
    relations: Relations,
    facts: Facts,
    needs: Needs,
    placement: Placement,
    fixed: FixedSizes,
    carried: Mapping[fx.Node, CarriedChannels],
) -> tuple[Rewritten, FixedSizes]:
    """The program that computes the same outputs in the layouts of `placement`, and what has to
    keep its size for every call to stay one call: `fixed` if this is so. Raises CallFailed."""
    context = ClassRewriter(program, relations, facts, needs, placement, carried)
    for node in program.graph.nodes:
        with attributed(node):
            context.visit(node)
    values = context.values | context.adapter.converted
    return context.rewritten(), fixed.including(values, context.operands)


class ClassRewriter(Rewriter):
    """Appends every call again. values, operands: of calls that did not stay one call."""

    def __init__(self, *program_with_layouts: Any):
        super().__init__(*program_with_layouts)
        self.values: set[Key] = set()
        self.operands: set[tuple[fx.Node, int]] = set()

    def _call(self, node: fx.Node) -> None:
        live = [k for k in range(len(schema.outputs(node))) if (node, k) in self.placement.value]
        if not live:
            return
        nodes, relation = self.editor.graph.nodes, self.relations[node]
        before = len(nodes)
        if isinstance(relation, Declined):
            self._emit_barrier(node, relation, live)
        elif relation.entry.free:
            self._create(relation)
        elif relation.moved and not is_untouched(self, relation, live):
            if not self._take_parts(relation):
                emit_move(self, relation, live)
        elif relation.entry.fill == "sum":
            explain(self, relation, 0)
            emit_one_contraction(self, relation)
        elif relation.back:
            emit_recurrent(self, relation, zeros=False)
        else:
            self._repeat(relation)
        added = list(itertools.islice(reversed(nodes), len(nodes) - before))
        calls = [
            n
            for n in added
            if n.op == "call_function"
            and n.target is not operator.getitem
            and any(isinstance(value, Tensor) for value in schema.outputs(n))
        ]
        is_same = len(calls) == 1 and "effect" not in calls[0].meta
        if not (is_same and _family(calls[0]) == _family(node)):
            self.values |= {(node, k) for k in live}
            operands = relation.operands if isinstance(relation, Relation) else ()
            self.operands |= {(node, k) for k in range(len(operands))}

    def _repeat(self, relation: Relation) -> None:
        """Append a call whose operands and outputs share their cells."""
        node = relation.node
        layouts = [self.placement.value.get((node, k)) for k in range(len(relation.outs))]
        full = [tuple(None for _ in axes) for axes in relation.outs]
        for k in range(len(relation.operands)):
            explain(self, relation, k)
        values = [self.operand(relation, k) for k in range(len(relation.operands))]
        filled = [full[k] if layout is None else layout for k, layout in enumerate(layouts)]
        args, kwargs = self.arguments(relation, values, filled)
        self.finish(node, node.target, args, kwargs, layouts)

    def _take_parts(self, relation: Relation) -> bool:
        """Append a call that takes parts of an axis one after another, or every n-th position (a
        slice, a split), with the sizes that the parts have now. False where it takes others."""
        node, arguments = relation.node, dict(schema.arguments(relation.node))
        if len(relation.operands) != 1 or any(len(moves) != 1 for moves in relation.moves):
            return False
        slot = self.placement.slot[node, 0]
        layouts = [self.placement.value.get((node, k)) for k in range(len(relation.outs))]
        taken = []
        for layout, outs, moves in zip(layouts, relation.outs, relation.moves, strict=True):
            ((letter, move),) = moves.items()
            moved = [
                next(
                    (d for d, axis in enumerate(axes) if any(re.split("[<>]", name)[0] == letter for name in axis)),
                    None,
                )
                for axes in (relation.ins[0], outs)
            ]
            if layout is None or moved[0] is None or moved[1] is None:
                return False
            have, want = slot[moved[0]], layout[moved[1]]
            offsets = {p: k for k, p in enumerate(have)} if have is not None else None
            rows = move.position.tolist()
            rows = rows if want is None else [rows[p] for p in want]
            taken.append(rows if offsets is None else [offsets.get(p, -1) for p in rows])
        steps = [part[1] - part[0] if len(part) > 1 else 1 for part in taken]
        is_slice = node.target is torch.ops.aten.slice.Tensor
        if not all(taken) or min(steps) < 1 or (max(steps) > 1 and not is_slice):
            return False
        if taken != [list(range(p[0], p[-1] + 1, n)) for p, n in zip(taken, steps, strict=True)]:
            return False
        sizes = [len(part) for part in taken]
        if is_slice:
            arguments |= {"start": taken[0][0], "end": taken[0][-1] + 1, "step": steps[0]}
        elif "split_size" in arguments:
            arguments["split_size"] = sizes[0] if isinstance(arguments["split_size"], int) else sizes
        elif "split_sizes" in arguments:
            arguments["split_sizes"] = sizes
        elif "chunks" not in arguments or len(set(sizes)) > 1:
            return False
        source = relation.operands[0]
        arguments[source.name] = self.adapter.adapt(source.value, slot)
        args, kwargs = schema.bind_arguments(node.target, arguments)
        self.finish(node, node.target, args, kwargs, layouts)
        return True

    def _create(self, relation: Relation) -> None:
        """Append a call that creates a tensor, whose operands give no more than a shape and a
        dtype."""
        node = relation.node
        layout = self.placement.value[node, 0]
        arguments = dict(schema.arguments(node))
        for name, value in arguments.items():
            is_value = isinstance(value, fx.Node) and key_of(value) in self.adapter.emitted
            if name == "size":
                arguments[name] = self.sizes(node, 0, layout)
            else:
                arguments[name] = self.adapter.emitted[key_of(value)].node if is_value else self.argument(value)
        args, kwargs = schema.bind_arguments(node.target, arguments)
        self.finish(node, node.target, args, kwargs, [layout])


def _family(node: fx.Node) -> Any:
    """What two calls have in common that compute the same on tensors of other sizes."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return torch.ops.aten.view if packet in _VIEWS else packet
