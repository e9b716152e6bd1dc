"""The graph that is emitted: what emitters of single calls read and append to."""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.compat.symbolic_shapes import free_unbacked_symbols
from demask.facts.carriers import CarriedChannels
from demask.facts.known import Facts, Relations, key_of, value_of
from demask.facts.needed import Needs
from demask.graph.editor import GraphEditor
from demask.graph.program import module_of
from demask.graph.provenance import Reason
from demask.ops import Relation, op_name, schema
from demask.ops.schema import fake, same_size
from demask.shrink.emit.adapt import Adapter, EmittedValue
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.cells import Layout
from demask.shrink.layout.placement import Placement


class EmitContext:
    """Walks the old graph and appends to the new one, by a rule per call (`_call`)."""

    def __init__(
        self,
        program,
        relations: Relations,
        facts: Facts,
        needs: Needs,
        placement: Placement,
        carried: Mapping[fx.Node, CarriedChannels] = types.MappingProxyType({}),
    ):
        self.relations, self.facts, self.needs, self.placement = relations, facts, needs, placement
        self.carried = carried
        self.editor = GraphEditor.empty(program)
        self.old_inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.inputs: dict[fx.Node, fx.Node] = {}
        for node in self.old_inputs:
            self.inputs[node] = self.editor.graph.node_copy(node)
        self.store = ConstantStore(self.editor)
        self.adapter = Adapter(self.editor, self.store, facts)
        self.numbers: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if (symbol := _run_time_symbol(node)) is not None:
                self.store.size_emitters.setdefault(symbol, partial(self._number, node))
        self.reasons: list[Reason] = []

    def visit(self, node: fx.Node) -> None:
        """Append what replaces a node of the old graph."""
        self.editor.origin = node
        if node.op == "placeholder":
            self.emit(node, 0, self.inputs[node], None)
        elif node.op == "output":
            self._output(node)
        elif node.op == "call_function" and node.target is not operator.getitem:
            self._call(node)

    def _call(self, node: fx.Node) -> None:
        """Append the calls that replace a live call."""
        raise NotImplementedError

    def emit(self, node: fx.Node, k: int, new: fx.Node, layout: Layout | None) -> None:
        """Set the node, and its layout (None: whole), of output k of an old node."""
        value = schema.outputs(node)[k]
        if isinstance(value, Tensor):
            full = tuple(None for _ in value.shape)
            self.adapter.emitted[node, k] = EmittedValue(new, full if layout is None else layout)
            self.store.read_sizes(new)

    def reason(self, node: fx.Node, axis: int, count: Any, text: str, *, barrier: bool = False) -> None:
        """Add a reason why known slices are computed. barrier: because the op has no rule."""
        count = count if isinstance(count, int) else 0
        op = op_name(node.target) if barrier else ""
        self.reasons.append(Reason(node.name, module_of(node), axis, count, text, op))

    def finish(self, node, target, args, kwargs, layouts: list[Layout | None] | None, *, same: Any = False) -> None:
        """Append the call that replaces `node`.

        layouts: of its outputs (None: whole). same: whether its value is that of `node`; a run on
        fake values would introduce other symbols.
        """
        like = self._output_like(node, args, layouts[0] if layouts else None)
        if same:
            new = self._copy_call(node, args, kwargs)
        elif like is None:
            new = self.editor.call(target, *args, **kwargs)
        else:
            shape = fake(like).shape
            new = self.editor.call_shaped(shape, like, target, args, kwargs)
        new.meta = {**node.meta, **new.meta}
        outputs = schema.outputs(node)
        if not isinstance(node.meta.get("val"), (list, tuple)):
            if isinstance(outputs[0], Tensor):
                self.emit(node, 0, new, layouts[0] if layouts else None)
            else:
                self.numbers[node] = new
            return
        for k in range(len(outputs)):
            if (node, k) in self.placement.value:
                part = self.editor.call(operator.getitem, new, k)
                self.emit(node, k, part, layouts[k] if layouts else None)

    def _output_like(self, node: fx.Node, args: Any, layout: Layout | None) -> fx.Node | None:
        """The operand that certainly has the shape and dtype of the new output, or None."""
        relation = self.relations.get(node)
        if not isinstance(relation, Relation) or relation.moved or len(relation.outs) != 1:
            return None
        if relation.entry.fill != "run" or relation.entry.args is not None:
            return None
        old, sizes = fake(node), self.shape(node, layout)
        for arg in args:
            value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
            if not isinstance(value, Tensor) or value.dtype != old.dtype or value.ndim != len(sizes):
                continue
            if all(same_size(a, b) for a, b in zip(value.shape, sizes, strict=True)):
                return arg
        return None

    def shape(self, node: fx.Node, layout: Layout | None) -> list[Any]:
        """The sizes of a call's output in a layout (None: whole)."""
        old = fake(node)
        positions = layout or (None,) * old.ndim
        return [n if p is None else len(p) for n, p in zip(old.shape, positions, strict=True)]

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
            return self.store.expression(value.node.expr)
        if isinstance(value, int):
            return value
        return self._number(node)

    def _number(self, node: fx.Node) -> Any:
        """A number that is no size, computed by a copy of its call."""
        if node not in self.numbers:
            args, kwargs = self.argument(node.args), self.argument(node.kwargs)
            is_symbol = _run_time_symbol(node) is not None
            number = self._copy_call(node, args, kwargs) if is_symbol else None
            self.numbers[node] = number or self.editor.call(node.target, *args, **kwargs)
        return self.numbers[node]

    def _copy_call(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        copy = self.editor.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copy.meta = dict(node.meta)
        return copy

    def operand(self, relation: Relation, k: int, *, broadcast: bool = False) -> Any:
        """Operand k of a call in the layout of its slot."""
        source = relation.operands[k].value
        if not isinstance(source, fx.Node):
            return source
        slot = self.placement.slot[relation.node, k]
        # An op that moves positions, if not rewritten, moves along full axes.
        axes = zip(relation.ins[k], slot, strict=True)
        want = tuple(None if set(axis) & relation.moved else p for axis, p in axes)
        return self.adapter.adapt(source, want, broadcast=broadcast)

    def sizes(self, node: fx.Node, k: int, layout: Layout) -> list[Any]:
        """The sizes of output k of an old node in a layout, as call arguments."""
        value = schema.outputs(node)[k]
        return [
            self.store.size(size) if layout[axis] is None else len(layout[axis] or ())
            for axis, size in enumerate(value.shape)
        ]

    def arguments(
        self,
        relation: Relation,
        values: list[Any],
        layouts: list[Layout],
        more: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> tuple[Any, Any]:
        """All arguments of the new call: cut operands, rebuilt sizes, recomputed dynamic ones;
        `more` overrides them by name."""
        node = relation.node
        old = schema.arguments(node)
        names = {operand.name for operand in relation.operands}
        plain = {name: v if name in names else self.argument(v) for name, v in old.items()}
        plain = schema.replace_operands(plain, relation.operands, values)
        if relation.entry.args is not None:
            output_sizes: Any = [self.sizes(node, k, layout) for k, layout in enumerate(layouts)]
            plain |= relation.entry.args(node, output_sizes)
        return schema.bind_arguments(node.target, plain | dict(more))

    def removed(self, source: fx.Node) -> tuple[int, int] | None:
        """The first axis of a value of which positions were removed, and their number; None if
        there is none."""
        layout, sizes = self.adapter.have(key_of(source)) or (), schema.sizes(value_of(source))
        for axis, (positions, size) in enumerate(zip(layout, sizes, strict=False)):
            if positions is not None and size is not None and len(positions) < size:
                return axis, size - len(positions)
        return None

    def _output(self, node: fx.Node) -> None:
        """Append the outputs, whose shapes do not change."""
        values, outputs = [], cast(Any, node.args[0])
        for value in outputs:
            values.append(self.argument(value) if isinstance(value, fx.Node) else value)
            removed = self.removed(value) if isinstance(value, fx.Node) else None
            if removed is not None:
                self.reason(value, *removed, "the model's output keeps its shape")
        self.editor.graph.output(tuple(values))


def _run_time_symbol(node: fx.Node) -> Any:
    """The symbol of a number that depends on values, if a call computes it (`item`, a size of
    `nonzero`); else None."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.SymInt):
        return None
    return value.node.expr if value.node.expr.is_Symbol and free_unbacked_symbols(value) else None


def sizes_depend_on_values(node: fx.Node) -> bool:
    """Whether the sizes of what a call returns depend on values."""
    return bool(free_unbacked_symbols(schema.outputs(node)))
