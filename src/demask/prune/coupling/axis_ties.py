"""Ties of axes: which axes of a program's values and weights have the same slices.

Every axis is a list of cells, major first (`Cells`): the letters of a relation tie the axes of a
call cell by cell, and a view splits them. A call that moves positions (cat, slice, pad, index) ties
two cells position by position. Cells that must stay whole are forced: those of inputs and outputs,
of windows, of axes that a call normalizes over or reads as a whole, of dynamic sizes, and of ops
without an entry.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Key, key_of
from demask.graph.program import Program
from demask.graph.queries import input_dependent
from demask.ops import Relation, Table, bind, schema
from demask.ops.notation import Axes
from demask.ops.traits import EXPANSIONS
from demask.shrink.layout.cells import Cells
from demask.shrink.layout.placement import CellAxes
from demask.shrink.layout.ties import whole_letters


@dataclass(frozen=True, slots=True)
class Move:
    """Positions along an output's axis, each from a position along an operand's axis.

    ins: by operand, the cells of its axis. out: those of the output's axis, of n positions.
    source: int64 [n], the operand of each position, -1 for padding; position: int64 [n], along it.
    """

    ins: Mapping[int, tuple[int, ...]]
    out: tuple[int, ...]
    source: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class PositionTies:
    """Cells that are tied position by position: position a[k] of one and b[k] of the other."""

    left: int
    right: int
    a: Tensor
    b: Tensor


class AxisTies:
    """The cells of every axis of a program. Built once.

    Attributes:
        cells: the cells, tied.
        value: the cells of each axis, by value; constants, by the node that reads them.
        letters: by call, the cell of each letter of its relation.
        relations: by call that depends on inputs, its relation.
        weights: the nodes that are computed from constants alone, and these constants.
        moves: the ties position by position.
        expanded: cells that repeat one position.
    """

    def __init__(self, program: Program, table: Table):
        self.program, self.table = program, table
        self.cells = Cells()
        self.value: dict[Key, CellAxes] = {}
        self.letters: dict[fx.Node, dict[str, int]] = {}
        self.relations: dict[fx.Node, Relation] = {}
        self.weights: set[fx.Node] = set()
        self.moves: list[Move] = []
        self.expanded: list[int] = []
        self._constants: dict[str, CellAxes] = {}
        self._dependent = input_dependent(program.graph)
        for node in program.graph.nodes:
            self._add(node)
        while any(self._align(move) for move in self.moves):
            pass

    def leaves(self, cells: Iterable[int]) -> list[int]:
        """The final cells of an axis."""
        return self.cells.leaves(cells)

    def constant(self, name: str) -> CellAxes:
        """The cells of each axis of a constant."""
        return self._constants[name]

    def names(self) -> Iterator[str]:
        """The constants that the graph reads, in the order of their first use."""
        return iter(self._constants)

    def force(self, name: str) -> None:
        """Require a constant to stay whole."""
        for axis in self._constants[name]:
            self.cells.force(axis)

    # --- nodes ------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.weights.add(node)
            self.value[node, 0] = self._constants.setdefault(
                str(node.target), self._fresh(node.meta["val"])
            )
        elif node.op == "output":
            self._force_operands(node)
        elif node.op == "placeholder":
            self._add_whole(node)
        elif node.target is not operator.getitem:
            self._add_call(node)
        elif key_of(node)[0] in self.weights:
            self.weights.add(node)

    def _fresh(self, tensor: Tensor) -> CellAxes:
        return tuple((self.cells.new(size),) for size in schema.sizes(tensor))

    def _add_whole(self, node: fx.Node) -> None:
        for k, output in enumerate(schema.outputs(node)):
            if isinstance(output, Tensor):
                self.value[node, k] = self._fresh(output)
                self._force(self.value[node, k])

    def _force(self, axes: CellAxes) -> None:
        for axis in axes:
            self.cells.force(axis)

    def _force_operands(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self._force(self.value.get(key_of(source), ()))

    def _add_call(self, node: fx.Node) -> None:
        outputs = schema.outputs(node)
        if not any(isinstance(output, Tensor) for output in outputs):
            return  # Sizes, which no cut changes.
        sources = node.all_input_nodes
        if sources and all(source in self.weights for source in sources):
            self.weights.add(node)
        is_tensor = all(isinstance(output, Tensor) for output in outputs)
        relation = bind(node, self.table) if is_tensor else None
        if not isinstance(relation, Relation):
            self._add_whole(node)
            self._force_operands(node)
            return
        if node not in self.weights:
            self.relations[node] = relation
        self._add_relation(node, relation)

    def _add_relation(self, node: fx.Node, relation: Relation) -> None:
        letters = {letter: self.cells.new(size) for letter, size in relation.size.items()}
        letters |= {letter: letters[letter.removesuffix("^")] for letter in relation.back}
        self.letters[node] = letters
        self.cells.force(letters[a] for a in self._whole(node, relation))
        for k, axes in enumerate(relation.outs):
            self.value[node, k] = _cells_of(axes, letters)
        if relation.entry.free:
            return
        for k, operand in enumerate(relation.operands):
            if isinstance(operand.value, fx.Node) and key_of(operand.value) in self.value:
                mine = _cells_of(relation.ins[k], letters)
                for a, b in zip(mine, self.value[key_of(operand.value)], strict=True):
                    if not self.cells.unify(a, b):
                        self._force((a, b))
        if node.target in EXPANSIONS:
            known = relation.letters(relation.ins[0])
            self.expanded += [cell for letter, cell in letters.items() if letter not in known]
        self._add_moves(relation, letters)

    def _whole(self, node: fx.Node, relation: Relation) -> set[str]:
        """The letters that must stay whole. Weights are computed once, before anything is cut: what
        is normalized over there may be cut afterwards."""
        whole = whole_letters(relation)
        if node in self.weights:
            return whole - relation.complete | {a for a in whole if relation.size[a] is None}
        return whole | self._unlike(relation)

    def _unlike(self, relation: Relation) -> set[str]:
        """Letters along which a zero slice does not vanish: an operand that depends on inputs, and
        varies not along the letter, is added to it."""
        entry, added = relation.entry, range(len(relation.operands))
        if entry.fill == "sum":
            added = [k for k in added if k not in relation.factors]
        elif entry.fill != "run" or entry.zero == "any" or entry.affine:
            return set()
        elif entry.zero == "first":
            added = [0]
        letters = relation.letters(relation.outs[0]) - relation.mixed
        varying = [k for k in added if self._varies(relation.operands[k].value)]
        return {a for k in varying for a in letters - relation.letters(relation.ins[k])}

    def _varies(self, value: Any) -> bool:
        """Whether an operand is a number that depends on inputs; conditions only select."""
        return (
            isinstance(value, fx.Node)
            and value in self._dependent
            and value.meta["val"].dtype != torch.bool
        )

    # --- moves ------------------------------------------------------------------------------------

    def _add_moves(self, relation: Relation, letters: dict[str, int]) -> None:
        for out, maps in enumerate(relation.moves):
            for base, index in maps.items():
                ins = {k: (letters[f"{base}<{k}"],) for k in range(len(relation.operands))
                       if f"{base}<{k}" in letters}  # fmt: skip
                if f"{base}>{out}" in letters and f"{base}>{out}" in relation.letters(
                    relation.outs[out]
                ):
                    cells = (letters[f"{base}>{out}"],)
                    self.moves.append(Move(ins, cells, index.source, index.position))
                else:  # a position of its own: the axis ends
                    for axis in ins.values():
                        self.cells.force(axis)

    def position_ties(self) -> Iterator[PositionTies]:
        """The ties position by position between final cells."""
        for move in self.moves:
            ends = self._reduce(move)
            if ends is None:
                continue
            ins, out, source, position = ends
            for k, cell in ins.items():
                taken = (source == k).nonzero().squeeze(1)
                yield PositionTies(cell, out, position[taken], taken)

    def _reduce(self, move: Move) -> tuple[dict[int, int], int, Tensor, Tensor] | None:
        """A move between the major cells of its axes, the others being tied: cells by operand, cell
        of the output, source, position. None where nothing moves, or all is forced."""
        out, ins = self.leaves(move.out), {k: self.leaves(v) for k, v in move.ins.items()}
        source, position = move.source, move.position
        while any(len(cells) > 1 for cells in (out, *ins.values())):
            n = self.cells.size(out[-1]) or 1
            if any(not cells or cells[-1] != out[-1] for cells in ins.values()):
                return None
            out, ins = out[:-1], {k: cells[:-1] for k, cells in ins.items()}
            source, position = source.reshape(-1, n)[:, 0], position.reshape(-1, n)[:, 0] // n
            if not out or not all(ins.values()):
                return None
        return {k: cells[0] for k, cells in ins.items()}, out[0], source, position

    def _align(self, move: Move) -> bool:
        """Tie the minor cells that a move leaves in place; whether anything was tied.

        Where axes are not made of whole blocks of a common size, they are forced.
        """
        lists = [self.leaves(move.out), *(self.leaves(v) for v in move.ins.values())]
        source, position = move.source, move.position
        while any(len(cells) > 1 for cells in lists):
            sizes = [self.cells.size(cells[-1]) if cells else 1 for cells in lists]
            several = [n for n, cells in zip(sizes, lists, strict=True) if len(cells) > 1]
            n = None if None in sizes else min(n or 1 for n in several)
            if n is None or any((m or 1) % n for m in sizes) or not _in_blocks(source, position, n):
                return self._force_lists(lists)
            common = next(c[-1] for c, m in zip(lists, sizes, strict=True) if len(c) > 1 and m == n)
            others = [cells for cells in lists if cells[-1] != common]
            if others:
                for cells in others:
                    self.cells.unify(cells[-1:], [self.cells.new(self._major(cells, n)), common])
                return True
            lists = [cells[:-1] for cells in lists]
            source, position = source.reshape(-1, n)[:, 0], position.reshape(-1, n)[:, 0] // n
        is_partial = any(lists) and not all(lists)
        return self._force_lists(lists) if is_partial else False

    def _major(self, cells: list[int], n: int) -> int:
        return (self.cells.size(cells[-1]) or 1) // n

    def _force_lists(self, lists: list[list[int]]) -> bool:
        """Force cells; whether one was not forced before."""
        fresh = [c for cells in lists for c in cells if not self.cells.forced(c)]
        self.cells.force(fresh)
        return bool(fresh)


def _cells_of(axes: Axes, letters: Mapping[str, int]) -> CellAxes:
    return tuple(tuple(letters[a] for a in axis) for axis in axes)


def _in_blocks(source: Tensor, position: Tensor, n: int) -> bool:
    """Whether a map moves whole blocks of n positions, in order."""
    if len(source) % n:
        return False
    source, position = source.reshape(-1, n), position.reshape(-1, n)
    real = source[:, 0] >= 0
    steps = position[:, :1] + torch.arange(n)
    whole = bool((source == source[:, :1]).all()) and not bool((position[real, 0] % n).any())
    return whole and bool((position[real] == steps[real]).all())
