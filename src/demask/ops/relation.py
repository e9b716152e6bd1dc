"""A line met with a node: letters with sizes, operands with axes. Everything reads ops this way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, fx

from demask.errors import TableError
from demask.ops import schema
from demask.ops.entry import Declined, Entry, SizedLine, Table, op_name
from demask.ops.notation import ELLIPSIS, Axes, Line, parse
from demask.ops.positions import Move, moves
from demask.ops.schema import Operand

MAX_AXIS = 2**28  # positions of an axis: facts and placements take memory for each of them
_BOUNDED = ("sum", "mean", "max", "min", "softmax")


@dataclass(frozen=True)
class Relation:
    """How one call's outputs depend on its operands.

    ins, outs: the letters of each axis of each operand and output. size: of each letter, None where
    dynamic. moves: per output, the position map of each moved axis that has one. window, complete,
    moved, back: marked letters. Letters in several operands but no output are contracted.
    """

    node: fx.Node
    entry: Entry
    operands: tuple[Operand, ...]
    ins: tuple[Axes, ...]
    outs: tuple[Axes, ...]
    size: Mapping[str, int | None]
    moves: tuple[Mapping[str, Move], ...]
    window: frozenset[str]
    complete: frozenset[str]
    moved: frozenset[str]
    back: frozenset[str] = frozenset()

    def letters(self, axes: Axes) -> frozenset[str]:
        return frozenset(letter for axis in axes for letter in axis)

    @cached_property
    def contracted(self) -> frozenset[str]:
        """Letters of products that are summed over: in two operands or more, in no output."""
        made = self.letters(tuple(axis for axes in self.outs for axis in axes))
        counts: dict[str, int] = {}
        for axes in self.ins:
            for letter in self.letters(axes) - made - self.moved - self.window - self.complete:
                counts[letter] = counts.get(letter, 0) + 1
        return frozenset(letter for letter, count in counts.items() if count > 1)

    @cached_property
    def factors(self) -> tuple[int, ...]:
        """The operands that are multiplied and summed; the others are added to the sum.

        A depthwise convolution sums over its window alone: its factors are the first two.
        """
        summed = self.contracted
        return tuple(k for k, a in enumerate(self.ins) if self.letters(a) & summed) or (0, 1)

    @property
    def total(self) -> bool:
        """Is what the call makes finite, whatever finite values its computed operands have?"""
        nodes = [o.value if isinstance(o.value, fx.Node) else None for o in self.operands]
        at = [k for k, node in enumerate(nodes) if node is not None and node.op != "get_attr"]
        entry = self.entry
        if entry.total:
            eps = schema.arguments(self.node).get("eps")
            allowed = {
                "all": True,
                "one": len(at) < 2,
                "first": at in ([], [0]),
                "eps": eps is None or eps > 0,
            }
            return allowed[entry.total]
        linear = entry.fill in ("sum", "mix", "same", "recur") or entry.rest in _BOUNDED
        kinds = [n.meta["val"].dtype for n in nodes if n is not None and n.op != "get_attr"]
        places = [kind for kind in kinds if not kind.is_floating_point and kind != torch.bool]
        looked_up = bool(places) and len(self.operands) > 1  # an index, or where parts end
        return not at or bool(self.moved) or entry.free or (linear and not looked_up)

    @property
    def is_grouped(self) -> bool:
        """Whether it is a contraction over composite axes, whose groups may keep unequal counts."""
        return self.entry.fill == "sum" and any(len(a) > 1 for axes in self.ins for a in axes)

    @property
    def selectors(self) -> tuple[int, ...]:
        """The operands of a sum that only choose among its weights at run time."""
        made = self.letters(tuple(axis for axes in self.outs for axis in axes))
        letters = [self.letters(axes) for axes in self.ins]
        return tuple(k for k, a in enumerate(letters) if a and a <= self.complete - made)

    @cached_property
    def mixed(self) -> frozenset[str]:
        """Letters along which a position of an output may depend on several of an operand."""
        return self.window | self.complete | self.moved | self.back | self.looped

    @cached_property
    def looped(self) -> frozenset[str]:
        """Letters along which a position depends, through what is read back, on every other."""
        found = [self.letters(axes) for axes in self.ins if self.letters(axes) & self.back]
        return frozenset(letter.removesuffix("^") for letters in found for letter in letters)


def bind(node: fx.Node, table: Table) -> Relation | Declined:
    """The relation of a call, or why there is none. Raises TableError when an entry is wrong."""
    name = op_name(node.target)
    entry = table.get(name)
    if entry is None:
        return Declined(f"no rule for {name}")
    spelled = entry.line if isinstance(entry.line, str) else entry.line(node)
    if isinstance(spelled, Declined):
        return spelled
    text, known = (spelled, {}) if isinstance(spelled, str) else (spelled.line, spelled.sizes)
    if isinstance(spelled, SizedLine) and spelled.mixes:
        entry = replace(entry, fill="mix", main=1)
    which = schema.operands(node, entry.indices)
    numbers = [*(operand.value for operand in which), schema.arguments(node).get("fill_value")]
    if schema.is_dynamic(numbers):
        return Declined(f"{name} with a number computed at run time")
    places = {name: _index(schema.arguments(node)[name]) for name in entry.indices}
    indices = {name: value for name, value in places.items() if value is not None}
    if len(indices) < len(places):
        return Declined(f"{name} with positions computed at run time")
    line = _expanded(parse(text), node, which)
    shapes = [schema.sizes(_value(operand)) for operand in which]
    made = [schema.sizes(value) for value in schema.outputs(node)]
    size = _sizes(line, shapes, made, known, f"{name} ({node.name})")
    if (length := _half_dynamic(line, [*shapes, *made])) is not None:
        return Declined(f"{name} with an axis of {length} in one tensor, of any size in another")
    longest = max((n for n in size.values() if n is not None), default=0)
    if longest > MAX_AXIS:
        return Declined(f"{name} with an axis of {longest:,} positions: more than {MAX_AXIS:,}")
    line = _broadcast(line, shapes, size)
    maps = moves(node, line, size, which, indices) if line.moved else [{} for _ in line.outs]
    return Relation(
        node, entry, which, line.ins, line.outs, size, tuple(maps),
        line.window, line.complete, line.moved, line.back,
    )  # fmt: skip


def _index(value) -> Tensor | None:
    """The value of a constant index, which folding leaves on its node."""
    return value.meta.get("positions") if isinstance(value, fx.Node) else None


def _value(operand: Operand):
    return operand.value.meta["val"] if isinstance(operand.value, fx.Node) else operand.value


def _expanded(line: Line, node: fx.Node, which: tuple[Operand, ...]) -> Line:
    """`...` spelled out, and the line cut to the operands that the call really has."""
    made = schema.outputs(node)
    given = _present(line, node, which)
    if len(given) != len(which) or len(line.outs) != len(made):
        raise TableError(
            f"entry of {node.target} names {len(line.ins)} operands and {len(line.outs)} outputs, "
            f"the call {node.name} has {len(which)} and {len(made)}"
        )
    ins = [
        _dots(axes, len(schema.sizes(_value(op)))) for axes, op in zip(given, which, strict=True)
    ]
    outs = [_dots(axes, len(schema.sizes(v))) for axes, v in zip(line.outs, made, strict=True)]
    for axes, rank, what in [
        *((a, len(schema.sizes(_value(op))), op.name) for a, op in zip(ins, which, strict=True)),
        *((a, len(schema.sizes(v)), "output") for a, v in zip(outs, made, strict=True)),
    ]:
        if len(axes) != rank:
            raise TableError(
                f"entry of {node.target}: {what} of {node.name} has {rank} axes, "
                f"the line says {len(axes)}"
            )
    return replace(line, ins=tuple(ins), outs=tuple(outs))


def _present(line: Line, node: fx.Node, which: tuple[Operand, ...]) -> list[Axes]:
    """The line's operands, those left out whose optional tensor is None in this call."""
    if not line.ins:
        return [()] * len(which)  # Nothing before the arrow: operands without axes, or none.
    if any(operand.index is not None for operand in which) or len(line.ins) == len(which):
        return list(line.ins)
    found = schema.arguments(node)
    names = [argument.name for argument in schema.signature(node.target) if argument.tensors]
    return [axes for name, axes in zip(names, line.ins, strict=False) if found[name] is not None]


def _dots(axes: Axes, rank: int) -> Axes:
    if ELLIPSIS not in axes:
        return axes
    at, count = axes.index(ELLIPSIS), rank - len(axes) + 1
    if count < 0:
        return axes[:at] + axes[at + 1 :]
    return axes[:at] + tuple((f"_{count - 1 - k}",) for k in range(count)) + axes[at + 1 :]


def _sizes(line, shapes, made, known, where: str) -> dict[str, int | None]:
    """The size of every letter; raises TableError where two axes disagree."""
    size: dict[str, int | None] = dict(known)
    seen = [*zip(line.ins, shapes, strict=True), *zip(line.outs, made, strict=True)]
    for axes, shape in seen:
        for axis, n in zip(axes, shape, strict=True):
            if len(axis) == 1 and (axis[0] not in size or size[axis[0]] == 1):
                size[axis[0]] = n
    for axes, shape in seen:
        for axis, n in zip(axes, shape, strict=True):
            _check_axis(axis, n, size, where)
    return size


def _half_dynamic(line: Line, shapes: list[tuple[schema.Size, ...]]) -> int | None:
    """The length of an axis that is static in one tensor of a call and dynamic in another: capture
    of some ops does not compare the two."""
    found: dict[str, set[int | None]] = {}
    for axes, shape in zip([*line.ins, *line.outs], shapes, strict=True):
        for axis, n in zip(axes, shape, strict=True):
            if len(axis) == 1 and n != 1:
                found.setdefault(axis[0], set()).add(n)
    mixed = (ns for ns in found.values() if None in ns and len(ns) > 1)
    return next((n for ns in mixed for n in ns if n is not None), None)


def _check_axis(axis, n, size: dict[str, int | None], where: str) -> None:
    missing = [letter for letter in axis if letter not in size]
    product = 1
    for letter in axis:
        factor = size.get(letter, 1)
        product = None if product is None or factor is None else product * factor
    if len(missing) == 1:
        whole = n is not None and product
        size[missing[0]] = n // product if whole and n is not None and product else None
        return
    if missing:
        raise TableError(f"{where}: sizes of {missing} cannot be told; give them with the line")
    if n not in (None, 1) and product not in (None, n):
        raise TableError(f"{where}: axis {axis} is {n} long, its letters make {product}")


def _broadcast(line: Line, shapes, size: Mapping[str, int | None]) -> Line:
    """An axis of size one whose letter is longer elsewhere is a literal 1."""

    def axis_of(axis, n):
        return () if n == 1 and len(axis) == 1 and size[axis[0]] != 1 else axis

    ins = tuple(
        tuple(axis_of(axis, n) for axis, n in zip(axes, shape, strict=True))
        for axes, shape in zip(line.ins, shapes, strict=True)
    )
    return replace(line, ins=ins)
