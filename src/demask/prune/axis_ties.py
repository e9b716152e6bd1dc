"""Ties of axes: which axes of a program's values and weights have the same slices.

Every axis is a list of cells, major first (`Cells`): the letters of a relation tie the axes of a
call cell by cell, and a view splits them. A call that moves positions (cat, slice, pad, index) ties
two cells position by position. Cells that must stay uncut are forced: those of inputs and outputs,
of windows, of axes that a call normalizes over or reads in full, of dynamic sizes, and of ops
without an entry.

The roles of a constant's axes say what the calls that read it do with its slices.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Key, key_of
from demask.graph.program import Program
from demask.graph.queries import input_dependent
from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import base
from demask.ops.notation import Axes
from demask.ops.schema import fake
from demask.ops.traits import EXPANSIONS
from demask.shrink.layout.cells import Cells
from demask.shrink.layout.placement import CellAxes
from demask.shrink.layout.ties import whole_letters

READS, ROWS, LOOKUP, SHIFTS = "reads", "rows", "lookup", "shifts"
AxisRoles = defaultdict[int, set[tuple[int, str]]]  # by axis: cells and their roles
Roles = defaultdict[Key, AxisRoles]


def find_roles(ties: AxisTies) -> dict[str, AxisRoles]:
    """By constant and axis: cells and their roles. READS: the positions are summed over; ROWS: they
    are outputs of a product; LOOKUP: of an embedding; SHIFTS: of other calls (biases, norms)."""
    roles: Roles = defaultdict(lambda: defaultdict(set))
    constants: dict[str, AxisRoles] = defaultdict(lambda: defaultdict(set))
    for node in reversed(list(ties.program.graph.nodes)):
        if node.op == "get_attr":
            for axis, cell_roles in roles[node, 0].items():
                constants[str(node.target)][axis] |= cell_roles
        elif node in ties.relations:
            _add_reader(ties, node, roles)
        elif node in ties.weights and node in ties.letters:
            _trace_back(ties, node, roles)
    return constants


def _add_reader(ties: AxisTies, node: fx.Node, roles: Roles) -> None:
    """Add the roles of the constants that a call reads."""
    relation, letters = ties.relations[node], ties.letters[node]
    read = relation.contracted | relation.back
    is_product = relation.entry.fill in ("sum", "mix", "recur")
    is_lookup = relation.entry.fill == "same" and relation.complete and len(relation.operands) > 1  # rows of a table
    factors = _multiplied_operands(relation)
    for k, operand in enumerate(relation.operands):
        if operand.value not in ties.weights:
            continue
        rows = LOOKUP if is_lookup else ROWS if is_product and k in factors else SHIFTS
        for d, axis in enumerate(relation.ins[k]):
            roles[key_of(operand.value)][d] |= {(letters[a], READS if a in read else rows) for a in axis}


def _multiplied_operands(relation: Relation) -> set[int]:
    """The operands that are multiplied; of a recurrent call, its matrices."""
    if relation.back:
        return {k for k, axes in enumerate(relation.ins) if len(axes) == 2}
    return set(relation.factors)


def _trace_back(ties: AxisTies, node: fx.Node, roles: Roles) -> None:
    """Add the roles of the operands of a computed weight, letter by letter."""
    relation, letters = bind(node, ties.table), ties.letters[node]
    assert isinstance(relation, Relation)
    cell_roles: dict[str, set[str]] = defaultdict(set)
    for out, axes in enumerate(relation.outs):
        for d, axis in enumerate(axes):
            for cell, role in roles[node, out][d]:
                same = set(ties.leaves([cell]))
                for a in axis:
                    cell_roles[base(a)] |= {role} if same & set(ties.leaves([letters[a]])) else set()
    for k, operand in enumerate(relation.operands):
        if isinstance(operand.value, fx.Node):
            for d, axis in enumerate(relation.ins[k]):
                roles[key_of(operand.value)][d] |= {(letters[a], role) for a in axis for role in cell_roles[base(a)]}


MOST_PARTS = 8  # of an axis whose positions a move separates


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

    @property
    def is_tie(self) -> bool:
        """Whether every axis is one cell: positions of cells are tied."""
        return all(len(cells) == 1 for cells in (self.out, *self.ins.values()))

    def has_blocks(self, n: int) -> bool:
        """Whether full blocks of n positions are moved, in order."""
        if len(self.source) % n:
            return False
        source, position = self.source.reshape(-1, n), self.position.reshape(-1, n)
        real = source[:, 0] >= 0
        steps = position[:, :1] + torch.arange(n)
        is_one_block = bool((source == source[:, :1]).all()) and not bool((position[real, 0] % n).any())
        return is_one_block and bool((position[real] == steps[real]).all())

    def is_repeated(self, m: int, sizes: Mapping[int, int]) -> bool:
        """Whether m equal parts of the axes, of so many positions, are moved in the same way."""
        if len(self.source) % m or any(size % m for size in sizes.values()):
            return False
        source, position = self.source.reshape(m, -1), self.position.reshape(m, -1)
        steps = torch.tensor([*(sizes[k] // m for k in range(len(sizes))), 0])[source[0]]
        expected = position[0] + torch.arange(m)[:, None] * steps
        real = source[0] >= 0
        alike = bool((source == source[0]).all()) and torch.equal(position[:, real], expected[:, real])
        return alike and bool((position[0] < steps)[real].all())

    def takes_one_of(self, n: int, operand: int) -> bool:
        """Whether of every n positions of an operand the same one is taken, or none."""
        return len((self.position[self.source == operand] % n).unique()) <= 1


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
    """

    def __init__(self, program: Program, table: Table):
        self.program, self.table = program, table
        self.cells = Cells()
        self.value: dict[Key, CellAxes] = {}
        self.letters: dict[fx.Node, dict[str, int]] = {}
        self.relations: dict[fx.Node, Relation] = {}
        self.weights: set[fx.Node] = set()
        self.moves: list[Move] = []
        self._constants: dict[str, CellAxes] = {}
        self._forced_by: list[tuple[tuple[int, ...], fx.Node]] = []
        self._dependent = input_dependent(program.graph)
        for node in program.graph.nodes:
            self._add(node)
        self._force_lasting()
        while any(self._align_move(move) for move in self.moves):
            pass

    def leaves(self, cells: Iterable[int]) -> list[int]:
        """The final cells of an axis."""
        return self.cells.leaves(cells)

    def constant(self, name: str) -> CellAxes:
        """The cells of each axis of a constant."""
        return self._constants[name]

    def cause(self, cell: int) -> fx.Node | None:
        """The first call for which a cell stays uncut; None for one that another rule forces."""
        return next((n for cells, n in self._forced_by if cell in self.leaves(cells)), None)

    def names(self) -> Iterator[str]:
        """The constants that the graph reads, in the order of their first use."""
        return iter(self._constants)

    def force(self, name: str) -> None:
        """Require a constant to stay uncut."""
        for axis in self._constants[name]:
            self.cells.force(axis)

    # --- nodes ------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.weights.add(node)
            self.value[node, 0] = self._constants.setdefault(str(node.target), self._fresh_cell(fake(node)))
        elif node.op == "output":
            self._force_operands(node)
        elif node.op == "placeholder":
            self._add_uncut(node)
        elif node.target is not operator.getitem:
            self._add_call(node)
        elif key_of(node)[0] in self.weights:
            self.weights.add(node)

    def _fresh_cell(self, tensor: Tensor) -> CellAxes:
        return tuple((self.cells.new(size),) for size in schema.sizes(tensor))

    def _add_uncut(self, node: fx.Node) -> None:
        for k, output in enumerate(schema.outputs(node)):
            if isinstance(output, Tensor):
                self.value[node, k] = self._fresh_cell(output)
                self._force(chain.from_iterable(self.value[node, k]), node)

    def _force(self, cells: Iterable[int], node: fx.Node) -> None:
        """Require cells to stay uncut. node: the call that needs it."""
        mine = tuple(cells)
        self.cells.force(mine)
        self._forced_by.append((mine, node))

    def _force_operands(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self._force(chain.from_iterable(self.value.get(key_of(source), ())), node)

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
            self._add_uncut(node)
            self._force_operands(node)
            return
        if node not in self.weights:
            self.relations[node] = relation
        self._add_relation(node, relation)

    def _add_relation(self, node: fx.Node, relation: Relation) -> None:
        letters = {letter: self.cells.new(size) for letter, size in relation.size.items()}
        letters |= {letter: letters[letter.removesuffix("^")] for letter in relation.back}
        self.letters[node] = letters
        self._force([letters[a] for a in self._uncut_letters(node, relation)], node)
        for k, axes in enumerate(relation.outs):
            self.value[node, k] = _cells_of(axes, letters)
        if relation.entry.free:
            return
        for k, operand in enumerate(relation.operands):
            if isinstance(operand.value, fx.Node) and key_of(operand.value) in self.value:
                mine = _cells_of(relation.ins[k], letters)
                for a, b in zip(mine, self.value[key_of(operand.value)], strict=True):
                    if not self.cells.unify(a, b):
                        self._force((*a, *b), node)
        self._add_moves(relation, letters)

    def _uncut_letters(self, node: fx.Node, relation: Relation) -> set[str]:
        """The letters that must stay uncut. Weights are computed once, before anything is cut: what
        is normalized over there may be cut afterwards."""
        uncut = whole_letters(relation)
        if node in self.weights:
            return uncut - relation.complete | {a for a in uncut if relation.size[a] is None}
        return uncut

    def _force_lasting(self) -> None:
        """Force the cells of slices that depend on inputs where they are read, although all that
        computes them is zero: a value that does not vary along them is added to them, or repeated.
        What is multiplied with zeros, as the keys of a head of which the values are zero, is not
        read."""
        lasting: dict[Key, set[int]] = {}
        for node, relation in self.relations.items():
            if relation.entry.free:
                continue
            letters = self.letters[node]
            leaves = {a: set(self.leaves([cell])) for a, cell in letters.items()}
            contracted = set[int]().union(*(leaves[a] for a in relation.contracted))
            operands, outs = (
                [{c for a in relation.letters(axes) for c in leaves[a]} for axes in every]
                for every in (relation.ins, relation.outs)
            )
            values = [o.value for o in relation.operands]
            last = [
                lasting.get(key_of(v), set()) & cells if isinstance(v, fx.Node) else set()
                for v, cells in zip(values, operands, strict=True)
            ]
            carried = (
                {c for a in relation.letters(relation.outs[0]) - relation.mixed for c in leaves[a]}
                if _combines_operands(relation)
                else set()
            )
            result: set[int] = set()
            for k, value in enumerate(values):
                if not self._depends_on_inputs(value):
                    continue
                mine = last[k] | (carried - operands[k])
                for j in _factors_of(relation, k):
                    vanishes = operands[j] - last[j]
                    mine -= vanishes - contracted if values[j] in self.weights else vanishes
                for maps in relation.moves:
                    for name in maps:
                        if mine & leaves.get(f"{name}<{k}", set()):
                            mine |= leaves.get(f"{name}>0", set())
                result |= mine
            self._force(result - set[int]().union(*outs), node)
            for k, cells in enumerate(outs):
                if schema.outputs(node)[k].is_floating_point():
                    lasting[node, k] = result & cells

    def _depends_on_inputs(self, value: Any) -> bool:
        """Whether an operand has numbers that depend on inputs; conditions and indices select."""
        return isinstance(value, fx.Node) and value in self._dependent and fake(value).is_floating_point()

    # --- moves ------------------------------------------------------------------------------------

    def _add_moves(self, relation: Relation, letters: dict[str, int]) -> None:
        for out, maps in enumerate(relation.moves):
            for name, index in maps.items():
                ins = {k: (letters[f"{name}<{k}"],) for k in range(len(relation.operands)) if f"{name}<{k}" in letters}
                if f"{name}>{out}" in letters and f"{name}>{out}" in relation.letters(relation.outs[out]):
                    cells = (letters[f"{name}>{out}"],)
                    self.moves.append(Move(ins, cells, index.source, index.position))
                else:  # a position of its own: the axis ends
                    self._force(chain.from_iterable(ins.values()), relation.node)

    def position_ties(self) -> Iterator[PositionTies]:
        """The ties position by position between final cells."""
        for move in self.moves:
            for cut in self._major_moves(move):
                if not cut.is_tie:
                    continue
                for k, cells in cut.ins.items():
                    taken = (cut.source == k).nonzero().squeeze(1)
                    yield PositionTies(cells[0], cut.out[0], cut.position[taken], taken)

    def _major_moves(self, move: Move) -> Iterator[Move]:
        """A move between the major cells of its axes, where the minor ones are tied or forced; the
        last ones cannot be cut further."""
        ins = {k: tuple(self.leaves(v)) for k, v in move.ins.items()}
        stack = [Move(ins, tuple(self.leaves(move.out)), move.source, move.position)]
        while stack:
            cut = stack.pop()
            rest = None if cut.is_tie else self._without_minor(cut)
            if rest is None:
                yield cut
            else:
                stack += rest

    def _align_move(self, move: Move) -> bool:
        """Tie the minor cells that a move leaves in place, and force those that it separates;
        whether a cell was split or forced."""
        is_changed = False
        for cut in self._major_moves(move):
            if not cut.is_tie:
                is_changed |= self._split_minor(cut)
        return is_changed

    def _without_minor(self, cut: Move) -> list[Move] | None:
        """The move without its minor cells, if they are dealt with: tied, or forced; or without a
        major one of which all positions have it."""
        lists = [cut.out, *cut.ins.values()]
        if not all(lists):
            return None
        m = self.cells.size(cut.out[0]) or 1
        is_shared = len({cells[0] for cells in lists}) == 1 and min(map(len, lists)) > 1
        if is_shared and self._is_repeated(cut, m):
            ins, n = {k: cells[1:] for k, cells in cut.ins.items()}, len(cut.source) // m
            return [Move(ins, cut.out[1:], cut.source[:n], cut.position[:n])]
        n = self.cells.size(cut.out[-1]) or 1
        if len({cells[-1] for cells in lists}) == 1 and cut.has_blocks(n):
            ins = {k: cells[:-1] for k, cells in cut.ins.items()}
            return [Move(ins, cut.out[:-1], cut.source[::n], cut.position[::n] // n)]
        for k, cells in cut.ins.items():
            n = self.cells.size(cells[-1]) or 1
            if len(cells) > 1 and self.cells.forced(cells[-1]) and cut.takes_one_of(n, k):
                ins = {**cut.ins, k: cells[:-1]}
                position = torch.where(cut.source == k, cut.position // n, cut.position)
                return [Move(ins, cut.out, cut.source, position)]
        n = self.cells.size(cut.out[-1]) or 1
        if len(cut.out) > 1 and self.cells.forced(cut.out[-1]) and n <= MOST_PARTS:
            parts = range(n)
            return [Move(cut.ins, cut.out[:-1], cut.source[p::n], cut.position[p::n]) for p in parts]
        return None

    def _split_minor(self, cut: Move) -> bool:
        """Tie or force the minor cells of a move; whether something changed."""
        lists = [cells for cells in (cut.out, *cut.ins.values()) if cells]
        if len(lists) <= len(cut.ins):
            return self._force_fresh(c for cells in lists for c in cells)
        sizes = [self.cells.size(cells[-1]) for cells in lists]
        several = [n for n, cells in zip(sizes, lists, strict=True) if len(cells) > 1]
        if None in sizes:
            return self._force_fresh(c for cells in lists for c in cells)
        n = min(n or 1 for n in several)
        if cut.has_blocks(n) and not any((m or 1) % n for m in sizes):
            common = next(c[-1] for c, m in zip(lists, sizes, strict=True) if len(c) > 1 and m == n)
            for cells, m in zip(lists, sizes, strict=True):
                if cells[-1] != common:
                    self.cells.unify(cells[-1:], [self.cells.new((m or 1) // n), common])
            return True
        for first in {cells[0] for cells in lists if len(cells) > 1}:
            m = self.cells.size(first) or 1
            others = [cells for cells in lists if cells[0] != first]
            if others and self._is_repeated(cut, m):
                parts = [[first, self.cells.new(self._axis_length(cells) // m)] for cells in others]
                if all(self.cells.unify(a, b) for a, b in zip(others, parts, strict=True)):
                    return True
        for k, cells in cut.ins.items():
            if len(cells) > 1 and cut.takes_one_of(self.cells.size(cells[-1]) or 1, k):
                return self._force_fresh(cells[-1:])
        if len(cut.out) > 1 and (self.cells.size(cut.out[-1]) or 1) <= MOST_PARTS:
            return self._force_fresh(cut.out[-1:])
        return self._force_fresh(c for cells in lists for c in cells)

    def _is_repeated(self, cut: Move, m: int) -> bool:
        sizes = {k: self._axis_length(cells) for k, cells in cut.ins.items()}
        return m > 1 and len(sizes) == max(sizes, default=0) + 1 and cut.is_repeated(m, sizes)

    def _axis_length(self, cells: Iterable[int]) -> int:
        return math.prod(self.cells.size(cell) or 1 for cell in cells)

    def _force_fresh(self, cells: Iterable[int]) -> bool:
        """Force cells; whether one was not forced before."""
        fresh = [cell for cell in cells if not self.cells.forced(cell)]
        self.cells.force(fresh)
        return bool(fresh)


def _combines_operands(relation: Relation) -> bool:
    """Whether each output is computed from numbers of all operands, at positions that broadcast."""
    entry = relation.entry
    is_expanded = relation.node.target in EXPANSIONS
    return entry.fill in ("sum", "mix") or is_expanded or (entry.fill == "run" and not entry.affine)


def _factors_of(relation: Relation, operand: int) -> list[int]:
    """The operands of which a zero makes the output zero whatever another operand is."""
    entry, every = relation.entry, range(len(relation.operands))
    if entry.fill == "mix":
        factors = [entry.main]
    elif entry.fill == "sum":
        factors = list(relation.factors) if operand in relation.factors else []
    else:
        factors = {"any": list(every), "first": [0]}.get(entry.zero, [])
    return [k for k in factors if k != operand]


def _cells_of(axes: Axes, letters: Mapping[str, int]) -> CellAxes:
    return tuple(tuple(letters[a] for a in axis) for axis in axes)
