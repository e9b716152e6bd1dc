"""The analysis that a program is cut by: it adds the positions of each axis to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from demask.facts.analysis import Analysis
from demask.facts.known import Relations, is_matrix
from demask.facts.needed import Needs
from demask.failures import CallFailed
from demask.graph.program import Program
from demask.ops import Table
from demask.shrink.layout.class_layout import ClassPlacer, FixedSizes
from demask.shrink.layout.heads import HeadGroups
from demask.shrink.layout.placement import Placer, settle_needs
from demask.shrink.layout.points import with_carried_points


@dataclass(frozen=True, eq=False)
class LayoutAnalysis(Analysis):
    """An analysis in which axes that must be cut alike are tied. `of`, `again` and `without` return
    one in which no rule fails before emission.

    carries_points: whether convolutions without a neighborhood carry positions of images, instead
    of sliding a window of one. fixed: for a network of the caller's class: what keeps its size.
    """

    carries_points: bool = False
    fixed: FixedSizes | None = None

    @classmethod
    def of(
        cls, program: Program, table: Table, *, borders: bool = True, fixed: FixedSizes | None = None
    ) -> LayoutAnalysis:
        """The analysis of a program. borders: as in `Analysis`."""
        is_class = fixed is not None
        borders, carriers = borders and not is_class, borders or is_class
        return cls(program, table, borders=borders, carriers=carriers, fixed=fixed)._checked()

    def fixing(self, fixed: FixedSizes) -> Self:
        """The analysis in which more keeps its size."""
        return replace(self, fixed=fixed, bound=self._bound)._checked()

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
    def relations(self) -> Relations:
        relations = super().relations
        if not self.carries_points:
            return relations
        return {node: with_carried_points(relation) for node, relation in relations.items()}

    @cached_property
    def _settled(self) -> tuple[Needs, Placer]:
        return settle_needs(self, self._new_placer)

    def _new_placer(self, needs: Needs) -> Placer:
        return Placer(self, needs) if self.fixed is None else ClassPlacer(self, needs, self.fixed)

    @property
    def needs(self) -> Needs:
        """The needs, including those of calls computed at more positions (`settle_needs`)."""
        return self._settled[0]

    @property
    def placer(self) -> Placer:
        """Every axis tied to those that must be cut alike."""
        return self._settled[1]

    @cached_property
    def head_groups(self) -> HeadGroups:
        return HeadGroups(self.placer)

    @property
    def has_matrices(self) -> bool:
        """Whether known values would have to be stored as matrices."""
        calls = (fact for (node, _), fact in self.known.items() if node.op == "call_function")
        return any(map(is_matrix, calls))
