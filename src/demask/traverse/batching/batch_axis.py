"""Where in each value the inputs of a batch lie, and whether they stay apart.

    f(cat(x_1, ..., x_n)) == cat(f(x_1), ..., f(x_n))

holds of a network in which every call carries the letter of the batch from its operands to its
outputs. Calls that sum over it, normalise along it or move its positions mix inputs: such a
network is refused, with the name of the call.
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

_ADVICE = "inputs of a batch cannot be computed a few at a time; give a part of the model that can"


@dataclass(frozen=True, slots=True)
class Lane:
    """An axis of (outer, inputs, count) positions: where each input's lie.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> Lane(0, 2, 2).part(x.flatten(), 3, 1, 2).tolist()
    [2, 3, 8, 9]
    """

    axis: int
    outer: int = 1
    count: int = 1

    @property
    def copies(self) -> bool:
        """Is a part of it a copy?"""
        return self.axis > 0 or self.outer > 1

    def part(self, value: Tensor, n: int, start: int, end: int) -> Tensor:
        """Inputs start..end of the n in a value, contiguous where they are not first in it."""
        if (start, end) == (0, n):
            return value
        found = self.cut(value, n).narrow(self.axis + 1, start, end - start)
        found = found.flatten(self.axis, self.axis + 2)
        return found if self.axis == 0 else found.contiguous()

    def put(self, into: Tensor, n: int, start: int, part: Tensor) -> None:
        """Write inputs start.. of the n in a contiguous value."""
        size = part.shape[self.axis] // (self.outer * self.count)
        self.cut(into, n).narrow(self.axis + 1, start, size).copy_(self.cut(part, size))

    def cut(self, value: Tensor, n: int) -> Tensor:
        """The value with its axis as three."""
        return value.unflatten(self.axis, (self.outer, n, self.count))

    def full(self, like: Tensor, n: int) -> Tensor:
        """New memory for n inputs of which `like` holds some."""
        shape = list(like.shape)
        shape[self.axis] = self.outer * n * self.count
        return like.new_empty(shape)


@dataclass(frozen=True, slots=True)
class Lanes:
    """of: the lane of every value of the batch (per output, where a call makes several). sizes: of
    nodes that are numbers, what they are for 1, 2, ... inputs. symbol: the batch, in sizes."""

    of: Mapping[fx.Node, Any]
    sizes: Mapping[fx.Node, tuple[int, ...]]
    symbol: Any

    def nbytes(self, node: fx.Node, n: int) -> int:
        """Bytes that a value takes for n inputs."""
        return sum(
            math.prod(_at(size, self.symbol, n) for size in leaf.shape) * leaf.dtype.itemsize
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, Tensor)
        )


def lanes_of(analysis: Analysis, inputs: int) -> Lanes:
    """The lanes of a program captured with a dynamic batch. BadInput where the batch is no such
    thing, or its inputs do not stay apart. inputs: the most at a time, for the table of sizes."""
    program = analysis.program
    symbol = _symbol(program)
    of: dict[fx.Node, Any] = {}
    sizes: dict[fx.Node, tuple[int, ...]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes[node] = tuple(_at(value, symbol, n) for n in range(1, inputs + 1))
        elif node.op == "placeholder":
            of |= _given(node, symbol)
        elif node.target is operator.getitem:
            of |= _picked(node, of)
        elif node.op == "call_function":
            of |= _made(node, of, symbol, analysis)
    return Lanes(of, sizes, symbol)


def _symbol(program: Program) -> Any:
    found = {
        size.node.expr
        for node in program.graph.find_nodes(op="placeholder")
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        for size in getattr(leaf, "shape", ())
        if isinstance(size, torch.SymInt)
    }
    if len(found) == 1 and next(iter(found)).is_Symbol:
        return found.pop()
    words = " (" + program.notes[0] + ")" if not found and program.notes else ""
    raise BadInput(
        f"expected one dynamic size, the inputs' first, got {sorted(map(str, found))}{words}; "
        "batch() takes networks that run at any batch size"
    )


def _at(size: Any, symbol: Any, n: int) -> int:
    """A size for n inputs."""
    return size if isinstance(size, int) else int(size.node.expr.subs(symbol, n))


def _given(node: fx.Node, symbol: Any) -> dict[fx.Node, Lane]:
    """Of an input: its first axis."""
    shape: Any = getattr(node.meta.get("val"), "shape", ())
    if not any(isinstance(size, torch.SymInt) for size in shape):
        return {}
    if isinstance(shape[0], torch.SymInt) and all(isinstance(size, int) for size in shape[1:]):
        return {node: Lane(0)}
    raise BadInput(f"input {node.name}: expected the batch as its first axis, got {tuple(shape)}")


def _picked(node: fx.Node, of: Mapping[fx.Node, Any]) -> dict[fx.Node, Lane]:
    source: Any = node.args[0]
    lanes = of.get(source)
    found = None if lanes is None else lanes[node.args[1]]  # type: ignore[index]
    return {} if found is None else {node: found}


def _made(
    node: fx.Node, of: Mapping[fx.Node, Any], symbol: Any, analysis: Analysis
) -> dict[fx.Node, Any]:
    reads = [source for source in node.all_input_nodes if source in of]
    outs = schema.outputs(node)
    if not any(isinstance(s, torch.SymInt) for out in outs for s in getattr(out, "shape", ())):
        return _without(node, reads, analysis)
    relation = analysis.relation(node)
    if isinstance(relation, Declined):
        raise BadInput(f"{node.name}: {relation.text}, so {_ADVICE}")
    lanes = [_lane(relation, k, of, symbol) for k in range(len(outs))]
    several = isinstance(node.meta["val"], (list, tuple))
    return {node: tuple(lanes) if several else lanes[0]}


def _without(node: fx.Node, reads: list[fx.Node], analysis: Analysis) -> dict[fx.Node, Any]:
    """A value in which there is nothing of the batch."""
    relation = analysis.relation(node) if reads else None
    free = isinstance(relation, Relation) and relation.entry.free
    if reads and not free and node.target is not torch.ops.aten.sym_size.int:
        raise BadInput(f"{node.name} ({node.target}) has no axis for the batch of {reads[0].name}: "
                       f"{_ADVICE}")  # fmt: skip
    return {}


def _lane(relation: Relation, out: int, of: Mapping[fx.Node, Any], symbol: Any) -> Lane | None:
    """The lane of an output; the operands' lanes lead to one and the same."""
    shape = schema.outputs(relation.node)[out].shape
    axis = next((k for k, size in enumerate(shape) if isinstance(size, torch.SymInt)), None)
    read = [] if relation.entry.free else list(_carried(relation, out, of))
    if axis is None:
        return None if not read else _mixes(relation)
    if not read:
        return _spread(relation, out, axis, symbol)
    part = read[0]
    if part is None or part.axis != axis or any(other != part for other in read):
        return _mixes(relation)
    outer = shape[axis].node.expr / (part.inner * symbol)
    return Lane(axis, int(outer), part.inner) if outer.is_Integer else _mixes(relation)


def _carried(relation: Relation, out: int, of: Mapping[fx.Node, Any]) -> Iterator[Part | None]:
    """Where each operand's lane is in an output; None where it does not get there."""
    for k, operand in enumerate(relation.operands):
        lane = of.get(operand.value)
        if lane is not None:
            mixed = is_mixed(relation, k, lane.axis)
            yield None if mixed else follow(relation, k, Part(lane.axis, lane.count), out=out)


def _spread(relation: Relation, out: int, axis: int, symbol: Any) -> Lane:
    """A value that is the same for every input: made of none, or of a constant repeated."""
    letters = relation.outs[out][axis]
    inside = {letter for axes in relation.ins for letter in relation.letters(axes)}
    if not relation.entry.free and set(letters) & inside:
        return _mixes(relation)
    size = schema.outputs(relation.node)[out].shape[axis]
    return Lane(axis, 1, int(size.node.expr / symbol))


def _mixes(relation: Relation) -> Any:
    raise BadInput(f"{relation.node.name} ({relation.node.target}) mixes the inputs of a batch: "
                   f"{_ADVICE}")  # fmt: skip
