"""The analysis that a program is cut by: which positions of each axis must be computed, too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from demask.facts.analysis import Analysis
from demask.facts.known import is_matrix
from demask.facts.needed import Needs
from demask.failures import CallFailed
from demask.graph.program import Program
from demask.ops import Table
from demask.shrink.layout.heads import Fibers
from demask.shrink.layout.placement import Placer, settled


@dataclass(frozen=True, eq=False)
class LayoutAnalysis(Analysis):
    """An analysis with the axes tied that must be cut alike. `of` returns one in which no rule
    fails before anything is rewritten; so do `again` and `without`."""

    @classmethod
    def of(cls, program: Program, table: Table, *, borders: bool = True) -> LayoutAnalysis:
        """The analysis of a program. borders: as of `Analysis`."""
        return cls(program, table, borders=borders)._checked()

    def again(self, program: Program, *, frugal: bool = False) -> Self:
        return super().again(program, frugal=frugal)._checked()

    def without(self, failure: CallFailed) -> Self:
        return super().without(failure)._checked()

    def _checked(self) -> Self:
        try:
            _ = self.placer
        except CallFailed as failure:
            return self.without(failure)
        return self

    @cached_property
    def _settled(self) -> tuple[Needs, Placer]:
        return settled(self)

    @property
    def needs(self) -> Needs:
        """What is needed, also by calls that are computed at more than that (`settled`)."""
        return self._settled[0]

    @property
    def placer(self) -> Placer:
        """Every axis tied to those that must be cut alike."""
        return self._settled[1]

    @cached_property
    def fibers(self) -> Fibers:
        return Fibers(self.placer)

    @property
    def has_matrices(self) -> bool:
        """Would known values have to be stored as matrices?"""
        calls = (fact for (node, _), fact in self.known.items() if node.op == "call_function")
        return any(map(is_matrix, calls))
