"""The batch axis of each value, and a check that inputs of a batch stay separate.

    f(cat(x_1, ..., x_n)) == cat(f(x_1), ..., f(x_n))

holds for a network in which every call carries the letter of the batch from its operands to its
outputs. Calls that sum over it, normalize along it or move its positions mix inputs: such a network
is refused, with the name of the call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.program import Program
from demask.ops import Declined, Relation, schema
from demask.ops.flow import Part, follow, is_mixed
from demask.ops.schema import fake

_ADVICE = "inputs of a batch cannot be computed a few at a time; give a part of the model that can"


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """An axis of (outer, inputs, count) positions.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> BatchAxis(0, 2, 2).part(x.flatten(), 3, 1, 2).tolist()
    [2, 3, 8, 9]
    """

    axis: int
    outer: int = 1
    count: int = 1

    @property
    def copies(self) -> bool:
        """Whether a part of the batch is a copy, not a view."""
        return self.axis > 0 or self.outer > 1

    def part(self, value: Tensor, n: int, start: int, end: int) -> Tensor:
        """Inputs [start, end) of the n in a value; a copy where the axis is not the first."""
        if (start, end) == (0, n):
            return value
        inputs = self.cut(value, n).narrow(self.axis + 1, start, end - start)
        inputs = inputs.flatten(self.axis, self.axis + 2)
        return inputs if self.axis == 0 else inputs.contiguous()

    def put(self, into: Tensor, n: int, start: int, part: Tensor) -> None:
        """Write `part` to the inputs from `start` on of the n in a contiguous value."""
        size = part.shape[self.axis] // (self.outer * self.count)
        self.cut(into, n).narrow(self.axis + 1, start, size).copy_(self.cut(part, size))

    def cut(self, value: Tensor, n: int) -> Tensor:
        """A view of the value with its axis as three: outer, n, count."""
        return value.unflatten(self.axis, (self.outer, n, self.count))

    def full(self, like: Tensor, n: int) -> Tensor:
        """New memory for n inputs, of the shape and dtype of `like`, which has fewer."""
        shape = list(like.shape)
        shape[self.axis] = self.outer * n * self.count
        return like.new_empty(shape)


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """The batch axes of a program.

    by_value: the axis of every value of the batch; a tuple for calls with several outputs. sizes:
    values of integer nodes for 1, 2, ... inputs. symbol: the batch size in symbolic shapes.
    """

    by_value: Mapping[fx.Node, Any]
    sizes: Mapping[fx.Node, tuple[int, ...]]
    symbol: Any

    def nbytes(self, node: fx.Node, n: int) -> int:
        """Bytes that a value takes for n inputs."""
        return sum(
            math.prod(_size_for(size, self.symbol, n) for size in leaf.shape) * leaf.dtype.itemsize
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, Tensor)
        )


def find_batch_axes(analysis: Analysis, inputs: int) -> BatchAxes:
    """The batch axes of a program captured with a dynamic batch size.

    inputs: largest number at a time, for the table of sizes.

    Raises:
        BadInput: if no single size is dynamic, or a call mixes inputs of a batch.
    """
    program = analysis.program
    symbol = _symbol(program)
    batch_axes: dict[fx.Node, Any] = {}
    sizes: dict[fx.Node, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes[node] = tuple(_size_for(value, symbol, n) for n in range(1, inputs + 1))
        elif node.op == "placeholder":
            batch_axes |= _input_axis(node, symbol)
        elif node.target is operator.getitem:
            batch_axes |= _axis_of_output(node, batch_axes)
        elif node.op == "call_function":
            batch_axes |= _axes_of_call(node, batch_axes, symbol, analysis)
    return BatchAxes(batch_axes, sizes, symbol)


def _symbol(program: Program) -> Any:
    symbols = {
        size.node.expr
        for node in program.graph.find_nodes(op="placeholder")
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        for size in getattr(leaf, "shape", ())
        if isinstance(size, torch.SymInt)
    }
    if len(symbols) == 1 and next(iter(symbols)).is_Symbol:
        return symbols.pop()
    hint = " (" + program.notes[0] + ")" if not symbols and program.notes else ""
    raise BadInput(
        f"expected one dynamic size, the inputs' first, got {sorted(map(str, symbols))}{hint}; "
        "batch() takes networks that run at any batch size"
    )


def _size_for(size: Any, symbol: Any, n: int) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(symbol, n))


def _input_axis(node: fx.Node, symbol: Any) -> dict[fx.Node, BatchAxis]:
    """The batch axis of an input, its first one."""
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    if not any(isinstance(size, torch.SymInt) for size in shape):
        return {}
    if isinstance(shape[0], torch.SymInt) and all(isinstance(size, int) for size in shape[1:]):
        return {node: BatchAxis(0)}
    raise BadInput(f"input {node.name}: expected the batch as its first axis, got {tuple(shape)}")


def _axis_of_output(node: fx.Node, by_value: Mapping[fx.Node, Any]) -> dict[fx.Node, BatchAxis]:
    source: Any = node.args[0]
    axes = by_value.get(source)
    axis = None if axes is None else axes[node.args[1]]
    return {} if axis is None else {node: axis}


def _axes_of_call(
    node: fx.Node, by_value: Mapping[fx.Node, Any], symbol: Any, analysis: Analysis
) -> dict[fx.Node, Any]:
    reads = [source for source in node.all_input_nodes if source in by_value]
    outs = schema.outputs(node)
    if not any(isinstance(s, torch.SymInt) for out in outs for s in getattr(out, "shape", ())):
        return _check_without_batch(node, reads, analysis)
    relation = analysis.relation(node)
    if isinstance(relation, Declined):
        raise BadInput(f"{node.name}: {relation.text}, so {_ADVICE}")
    axes = [_batch_axis(relation, k, by_value, symbol) for k in range(len(outs))]
    has_several = isinstance(fake(node), (list, tuple))
    return {node: tuple(axes) if has_several else axes[0]}


def _check_without_batch(node: fx.Node, reads: list[fx.Node], analysis: Analysis) -> dict[fx.Node, Any]:
    """No batch axis, for a value without a dynamic size; BadInput if it reads the batch."""
    relation = analysis.relation(node) if reads else None
    free = isinstance(relation, Relation) and relation.entry.free
    if reads and not free and node.target is not torch.ops.aten.sym_size.int:
        raise BadInput(f"{node.name} ({node.target}) has no axis for the batch of {reads[0].name}: {_ADVICE}")
    return {}


def _batch_axis(relation: Relation, out: int, by_value: Mapping[fx.Node, Any], symbol: Any) -> BatchAxis | None:
    """The batch axis of an output; all operands' batch axes must lead to the same one."""
    shape = schema.outputs(relation.node)[out].shape
    axis = next((k for k, size in enumerate(shape) if isinstance(size, torch.SymInt)), None)
    read = [] if relation.entry.free else list(_carried_parts(relation, out, by_value))
    if axis is None:
        return None if not read else _refuse_mixed(relation)
    if not read:
        return _repeated_axis(relation, out, axis, symbol)
    part = read[0]
    if part is None or part.axis != axis or any(other != part for other in read):
        return _refuse_mixed(relation)
    outer = shape[axis].node.expr / (part.inner * symbol)
    return BatchAxis(axis, int(outer), part.inner) if outer.is_Integer else _refuse_mixed(relation)


def _carried_parts(relation: Relation, out: int, by_value: Mapping[fx.Node, Any]) -> Iterator[Part | None]:
    """The part of an output that each operand's batch axis becomes; None where there is none."""
    for k, operand in enumerate(relation.operands):
        batch_axis = by_value.get(operand.value)
        if batch_axis is not None:
            mixed = is_mixed(relation, k, batch_axis.axis)
            yield (None if mixed else follow(relation, k, Part(batch_axis.axis, batch_axis.count), out=out))


def _repeated_axis(relation: Relation, out: int, axis: int, symbol: Any) -> BatchAxis:
    """The batch axis of a value that is the same for every input, such as a repeated constant."""
    letters = relation.outs[out][axis]
    inside = {letter for axes in relation.ins for letter in relation.letters(axes)}
    if not relation.entry.free and set(letters) & inside:
        return _refuse_mixed(relation)
    size = schema.outputs(relation.node)[out].shape[axis]
    return BatchAxis(axis, 1, int(size.node.expr / symbol))


def _refuse_mixed(relation: Relation) -> Any:
    raise BadInput(f"{relation.node.name} ({relation.node.target}) mixes the inputs of a batch: {_ADVICE}")
