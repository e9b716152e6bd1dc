"""Layouts of a network of the caller's class: one per value, which all its readers take as it is.

Every tie is rigid. The operands of a join, what a contraction sums and a table that several calls
read have one cell each, whose support is the union of what each of them needs. Axes that cannot be
cut by shapes alone are whole: those that a call moves (but for equal parts, and for joined parts),
outputs, and operands of calls without a rule. Every call stays, so every cell keeps at least one
position. A position that is computed although its value is known is computed from zeros that stay.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from demask.compat.dispatch import OpOverload
from demask.facts.analysis import Analysis
from demask.facts.carriers import CarriedChannels, output_channels
from demask.facts.known import Key, key_of
from demask.facts.needed import Needs
from demask.graph.program import path_of
from demask.ops import Relation, schema
from demask.ops.positions import IndexMap
from demask.ops.schema import fake
from demask.shrink.layout.group_packs import choose_packs
from demask.shrink.layout.placement import CellAxes, Placer

Operand = tuple[fx.Node, int]  # a call, and the number of one of its operands
# Arguments that say sizes, which the code of a module may have as numbers.
_SIZES = {
    "size",
    "shape",
    "split_size",
    "split_sizes",
    "chunks",
    "sizes",
    "start",
    "end",
    "normalized_shape",
    "repeats",
}


EVERYTHING = ""  # the path of the network itself


@dataclass(frozen=True, slots=True)
class FixedSizes:
    """What keeps its size in a network of the caller's class, by what needs it.

    values, operands: of calls of one program, which could not be emitted with shapes alone.
    modules: paths of modules whose code does not run at other sizes (EVERYTHING: nothing is cut).
    sized: paths of modules in which calls with sizes among their arguments do not.
    """

    values: frozenset[Key] = frozenset()
    operands: frozenset[Operand] = frozenset()
    modules: frozenset[str] = frozenset()
    sized: frozenset[str] = frozenset()

    def including(self, values: set[Key], operands: set[Operand]) -> FixedSizes:
        """With more values and operands."""
        return replace(self, values=self.values | values, operands=self.operands | operands)

    def widened(self, path: str, model: nn.Module) -> FixedSizes | None:
        """With more modules, after the code of one did not run at other sizes, or was not proved to
        compute the same: calls of it with sizes first, then all of it, then the modules around it.
        The second of a type means all of the type. None where nothing is left to cut."""
        modules = dict(model.named_modules())
        while path in self.modules:
            path = path.rpartition(".")[0]
        if not path and path in self.sized:
            return None
        kind = type(modules.get(path))
        if path not in self.sized and kind is not nn.MultiheadAttention:
            return replace(self, sized=self.sized | {path})
        alike = {name for name, module in modules.items() if path and type(module) is kind}
        more = alike if alike & self.modules else {path}
        return replace(self, sized=self.sized | more, modules=self.modules | more)

    def has(self, node: fx.Node) -> bool:
        """Whether all values and operands of a call keep their sizes."""
        path = path_of(node)
        if path in self.modules or EVERYTHING in self.modules:
            return True
        return path in self.sized and _has_size_argument(node)


@dataclass(frozen=True, slots=True)
class _Joined:
    """An axis whose positions are those of operands: cells of the axis and of each operand's."""

    out: tuple[int, ...]
    parts: dict[int, tuple[int, ...]]
    move: IndexMap


@dataclass(slots=True)
class _GroupedAxes:
    """The axes of a grouped convolution: cells of its input's and its output's channels.

    taps: weights per pair of an input and an output. packs: which groups become one, once chosen.
    """

    count: int
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    taps: int
    packs: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class _CarriedAxis:
    """Cells of the channels that a sum reads, and of its output channels."""

    cells: tuple[int, ...]
    outs: tuple[int, ...]
    channels: CarriedChannels


class ClassPlacer(Placer):
    """Ties the axes of a program such that every call can stay one call."""

    _cuts_norms = False

    def __init__(self, analysis: Analysis, needs: Needs, fixed: FixedSizes):
        super().__init__(analysis, needs, tied=True)
        self.fixed = fixed
        self.joined: list[_Joined] = []
        self.groups: list[_GroupedAxes] = []
        self.channels = analysis.carried
        self.carried: list[_CarriedAxis] = []

    def live(self, key: Key) -> bool:
        return key in self.needs.live

    def tie(self) -> None:
        super().tie()
        for node in self.graph.nodes:
            relation = self.relations.get(node)
            if isinstance(relation, Relation):
                self._tie_call(node, relation)
            elif node.op == "output" or _is_opaque(node):
                for source in node.all_input_nodes:
                    self._force(self.value.get(key_of(source), ()))
        for key, axes in self.value.items():
            if key in self.fixed.values or self.fixed.has(key[0]):
                self._force(axes)
        for operand, axes in self.slot.items():
            if operand in self.fixed.operands or self.fixed.has(operand[0]):
                self._force(axes)
        self._settle()

    def _tie_call(self, node: fx.Node, relation: Relation) -> None:
        """Tie what a call needs tied beyond the letters that its operands share."""
        is_sum = (node, 0) in self.slot and (node, 0) in self.value and relation.entry.fill == "sum"
        count = schema.arguments(node)["groups"] if relation.is_grouped else 1
        if is_sum and (channels := self.channels.get(node)) is not None:
            cells = self.slot[node, relation.factors[0]][channels.axis]
            outs = self.value[node, 0][output_channels(relation)]
            self.carried.append(_CarriedAxis(cells, outs, channels))
        if is_sum and relation.is_grouped:
            pairs = ((relation.ins[0], self.slot[node, 0]), (relation.outs[0], self.value[node, 0]))
            ins, outs = (next(c for a, c in zip(axes, cells, strict=True) if len(a) > 1) for axes, cells in pairs)
            taps = math.prod(fake(schema.arguments(node)["weight"]).shape[2:])
            self.groups.append(_GroupedAxes(count, (ins, outs), taps))
        for k in range(len(relation.outs)):
            if (node, k) in self.value and relation.moved and k < len(relation.moves):
                for letter, move in relation.moves[k].items():
                    self._tie_moved(relation, k, letter, move)
            if (node, k) in self.value and relation.entry.free:
                self._tie_created(relation, k)

    def _tie_created(self, relation: Relation, k: int) -> None:
        """Tie a created tensor to the one whose shape it has. Its sizes are numbers of the code
        otherwise, which fits itself in torch's own recurrent layers."""
        mine, tied = self.value[relation.node, k], False
        for operand in relation.operands if "like" in str(relation.node.target) else ():
            source = operand.value
            theirs = self.value.get(key_of(source), self.weights.get(source.target, ()))
            if len(mine) == len(theirs):
                tied = True
                for a, b in zip(mine, theirs, strict=True):
                    self._unify(a, b)
        if not (tied or _is_in_recurrent_layer(relation.node)):
            self._force(mine)

    def _tie_moved(self, relation: Relation, k: int, letter: str, move: IndexMap) -> None:
        """Tie an axis that a call moves: parts that are joined, or one of several equal parts; any
        other is whole."""
        node = relation.node
        out: tuple[int, ...] | None = None
        for axis, cells in zip(relation.outs[k], self.value[node, k], strict=True):
            if axis and axis[0] in relation.moved and axis[0].partition(">")[0] == letter:
                out = out or cells
        parts: dict[int, tuple[int, ...]] = {}
        for j, axes in enumerate(relation.ins):
            for axis, cells in zip(axes, self.slot.get((node, j), ()), strict=False):
                if any(name.partition("<")[0] == letter for name in axis):
                    parts.setdefault(j, cells)
        if out is not None and len(parts) > 1:
            self.joined.append(_Joined(out, parts, move))
        elif out is not None and len(parts) == 1 and (step := self._step_of_part(move, parts, out)):
            ((_, cells),) = parts.items()
            number = self.cells.new(math.prod(self._cell_sizes(cells)) // len(move.source))
            self.cells.force([number])
            self._unify((number, *out) if step == 1 else (*out, number), cells)
        else:
            self._force([() if out is None else out, *parts.values()])

    def _step_of_part(self, move: IndexMap, parts: dict[int, tuple[int, ...]], out: tuple[int, ...]) -> int:
        """The distance between positions that an output takes: 1 if it is one of several equal
        parts of an axis, as of a chunk; n if it is every n-th position; 0 if it is neither."""
        ((_, cells),) = parts.items()
        sizes, n, position = self._cell_sizes(cells), len(move.source), move.position
        if not all(sizes) or not all(self._cell_sizes(out)) or n < 2 or bool((move.source != 0).any()):
            return 0
        first, step = int(position[0]), int(position[1] - position[0])
        is_even = first % n == 0 if step == 1 else first < step and n * step == math.prod(sizes)
        is_even = is_even and math.prod(sizes) % n == 0 and step > 0
        return step if is_even and torch.equal(position, first + step * torch.arange(n)) else 0

    def _cell_sizes(self, cells: Sequence[int]) -> list[int]:
        """The sizes of an axis's cells, 0 for a dynamic one."""
        return [self.cells.size(cell) or 0 for cell in self.cells.leaves(cells)]

    def _tie_operand(self, relation: Relation, operand: int, axes: CellAxes) -> None:
        source = relation.operands[operand].value
        if source.op == "get_attr":
            theirs = self.weights.setdefault(source.target, axes)
        else:
            theirs = self.value.get(key_of(source), axes)
        if len(axes) != len(theirs):
            self._force([*axes, *theirs])
            return
        for mine, other in zip(axes, theirs, strict=True):
            if mine:
                self._unify(mine, other)

    def _unify(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Tie two axes; both are whole where their sizes do not divide."""
        if not self.cells.unify(a, b):
            self._force([a, b])

    def _force(self, axes: Sequence[Sequence[int]]) -> None:
        for cells in axes:
            self.cells.force(cells)

    def _strided_letters(self, relation: Relation) -> dict[str, int]:
        return {}

    def _find_orders(self) -> dict[int, list[int]]:
        return {}

    def _settle(self) -> None:
        """Add positions until every constraint holds: each of them only adds some. Groups become
        packs after all else holds."""
        for packed in (False, True):
            before: list[int | None] = []
            while before != (before := self.cells.counts()):
                self.cells.need_one()
                for cells, more in self._missing():
                    self.cells.need(cells, more)
                for group in self.groups if packed else ():
                    for cells, more in self._even_groups(group):
                        self.cells.need(cells, more)

    def _missing(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Positions that a constraint needs: a carrier for dropped constants of each group, and
        those of joined parts where their union has them, and the other way round."""
        for carried in self.carried:
            line, outs = self.cells.line(carried.cells), self.cells.line(carried.outs)
            valid = carried.channels.valid
            if line is None or outs is None or len(line) != valid.numel():
                continue
            is_read = outs.view(len(valid), -1).any(1)
            live = line.view(valid.shape) | ~is_read[:, None]
            yield carried.cells, carried.channels.lacking(live.reshape(-1))
        for joined in self.joined:
            line = self.cells.line(joined.out)
            parts = {j: self.cells.line(cells) for j, cells in joined.parts.items()}
            if line is None or any(part is None for part in parts.values()):
                self._force([joined.out, *joined.parts.values()])
                continue
            source, position, union = joined.move.source, joined.move.position, line.clone()
            for j, part in parts.items():
                assert part is not None
                union[source == j] |= part[position[source == j]]
            yield joined.out, union
            for j, part in parts.items():
                assert part is not None
                back = torch.zeros_like(part)
                back[position[(source == j) & union]] = True
                yield joined.parts[j], back

    def _even_groups(self, group: _GroupedAxes) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Positions for which every pack has equally many inputs, and equally many outputs."""
        lines = [self.cells.line(cells) for cells in group.axes]
        if lines[0] is None or lines[1] is None:
            return
        parts = [line.reshape(group.count, -1) for line in lines if line is not None]
        ins, outs = (part.sum(1).tolist() for part in parts)
        if group.packs is None:
            before, after = (self._count_parameters(cells) for cells in group.axes)
            weights = group.taps, before, after
            most = parts[0].shape[1], parts[1].shape[1]
            group.packs = choose_packs(ins, outs, most, weights)
        living = [g for g, pair in enumerate(zip(ins, outs, strict=True)) if any(pair)]
        packs = group.packs
        sizes = [max([1, *(sum(n[g] for g in pack) for pack in packs)]) for n in (ins, outs)]
        room = [len(pack) * part.shape[1] >= size for part, size in zip(parts, sizes, strict=True) for pack in packs]
        if not all(room) or not {*living} <= {g for pack in packs for g in pack}:
            packs = [[g] for g in living]
            sizes = [max([1, *n]) for n in (ins, outs)]
        for cells, part, size in zip(group.axes, parts, sizes, strict=True):
            even = part.clone()
            for pack in packs:
                channels = even[pack].reshape(-1)
                spare = (~channels).nonzero().squeeze(1)
                channels[spare[: size - int(channels.sum())]] = True
                even[pack] = channels.view(len(pack), -1)
            yield cells, even.reshape(-1)

    def _count_parameters(self, cells: tuple[int, ...]) -> int:
        """The numbers in weights of other calls per position of an axis."""
        leaves, total = set(self.cells.leaves(cells)), 0
        for axes in self.weights.values():
            lines = [self.cells.line(axis) for axis in axes]
            counts = [1 if line is None else int(line.sum()) for line in lines]
            for k, axis in enumerate(axes):
                if leaves & set(self.cells.leaves(axis)):
                    total += math.prod(counts[:k] + counts[k + 1 :])
                    break
        return total


def _is_opaque(node: fx.Node) -> bool:
    """Whether a node is a call that the table says nothing of, and that may read values."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and node.target is not torch.ops.aten.sym_size.int
    )


def _has_size_argument(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(_SIZES & schema.arguments(node).keys())


def _is_in_recurrent_layer(node: fx.Node) -> bool:
    """Whether a call is in the code of torch's own RNN, LSTM or GRU."""
    stack = node.meta.get("nn_module_stack")
    kind = list(stack.values())[-1][1] if stack else ""
    return "torch.nn.modules.rnn." in str(kind)
