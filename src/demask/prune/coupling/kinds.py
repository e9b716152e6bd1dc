"""Kinds of groups: channels, units of linear layers, heads of attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from demask.ops import Relation, schema
from demask.prune.coupling.axis_ties import AxisTies


class Kinds:
    """The kinds of the cells of a network.

    heads: cells along which attention is computed one by one. features: its other cells.
    convolved: those of convolutions.
    """

    def __init__(self, ties: AxisTies):
        self.ties = ties
        self.heads: set[int] = set()
        self.features: set[int] = set()
        self.convolved: set[int] = set()
        for node, relation in ties.relations.items():
            if relation.entry.fill == "mix":
                self._add_attention(relation, ties.letters[node])
            elif relation.entry.fill == "sum" and relation.window:
                self.convolved |= self._leaves(relation.size, ties.letters[node])
            elif relation.entry.fill == "sum" and not self._reads_weight(relation):
                self.features |= self._leaves(relation.contracted, ties.letters[node])

    def of(self, cells: set[int]) -> str:
        """The kind of a group with these cells."""
        if cells & self.heads:
            return "head"
        return "channel" if cells & (self.features | self.convolved) else "unit"

    def are_features(self, cells: Iterable[int]) -> bool:
        """Whether cells are features of attention, which no weight need read."""
        return not self.features.isdisjoint(cells)

    def _add_attention(self, relation: Relation, letters: Mapping[str, int]) -> None:
        values = relation.letters(relation.ins[relation.entry.main])
        outputs = relation.letters(relation.outs[0])
        heads = self._leaves(values & outputs & relation.letters(relation.ins[0]), letters)
        every = {a for axes in (*relation.ins, *relation.outs) for a in relation.letters(axes)}
        self.heads |= heads
        self.features |= self._leaves(every, letters) - heads

    def _leaves(self, names: Iterable[str], letters: Mapping[str, int]) -> set[int]:
        """The cells of letters that can be cut."""
        cells = self.ties.cells
        leaves = self.ties.leaves(letters[a] for a in names)
        return {c for c in leaves if not cells.forced(c) and cells.size(c) != 1}

    def _reads_weight(self, relation: Relation) -> bool:
        values = [relation.operands[k].value for k in relation.factors]
        return any(schema.is_constant(v) or v in self.ties.weights for v in values)
