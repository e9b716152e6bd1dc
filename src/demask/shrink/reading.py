"""What the table and the sweeps read off a program: a pass begins here."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from demask.facts.known import Facts, Relations, is_matrix, known
from demask.facts.needed import Needs
from demask.failures import CallFailed, attributed
from demask.graph.program import Program
from demask.ops import Declined, Relation, Table, bind, op_name, schema
from demask.shrink.fibers import Fibers
from demask.shrink.place import Placer, settled
from demask.shrink.pool import module_of
from demask.shrink.ties import is_constant, is_grouped


@dataclass(frozen=True)
class Reading:
    """A program, what the table says of its calls, and what is known of its values."""

    program: Program
    table: Table
    relations: Relations
    facts: Facts
    borders: bool = True
    frugal: bool = False

    @classmethod
    def of(
        cls, program: Program, table: Table, *, frugal: bool = False, borders: bool = True
    ) -> Reading:
        """frugal: known values that would have to be stored as matrices are computed instead;
        borders: False for those that would leave a border map. Calls whose rules fail have none."""
        relations = relations_of(program.graph, table)
        return cls._of(program, table, relations, frugal, borders)._checked()

    @classmethod
    def _of(cls, program, table, relations, frugal: bool, borders: bool) -> Reading:
        values = {name: constant.tensor for name, constant in program.constants.items()}
        while True:
            try:
                zeros = () if borders else _framed(relations)
                facts = known(program.graph, relations, values, frugal=frugal, zeros=zeros,
                              trained=program.trained)  # fmt: skip
                return cls(program, table, relations, facts, borders, frugal)
            except CallFailed as failure:
                relations = _without(relations, failure)

    def again(self, program: Program, *, frugal: bool = False) -> Reading:
        """Another form of the program, read alike."""
        return Reading.of(program, self.table, frugal=frugal, borders=self.borders)

    def without(self, failure: CallFailed) -> Reading:
        """The same program, where nothing is known of a call whose rule failed. Raises `failure`
        itself where that was so already."""
        relations = _without(self.relations, failure)
        read = Reading._of(self.program, self.table, relations, self.frugal, self.borders)
        return read._checked()

    def _checked(self) -> Reading:
        """The reading in which no rule fails before anything is rewritten."""
        try:
            _ = self.placer
        except CallFailed as failure:
            return self.without(failure)
        return self

    @property
    def failed(self) -> dict[str, str]:
        """The calls whose rules failed, in words, by what failed: later passes name calls anew."""
        places: dict[tuple[str, str], list[str]] = {}
        for node, relation in self.relations.items():
            if isinstance(relation, Failed):
                key = (op_name(node.target), relation.text)
                places.setdefault(key, []).append(module_of(node) or node.name)
        return {
            f"{op}: {text}": f"{op} at {_listed(where)} is kept as it is: {text}"
            for (op, text), where in places.items()
        }

    @cached_property
    def _settled(self) -> tuple[Needs, Placer]:
        return settled(self.program.graph, self.relations, self.facts)

    @property
    def needs(self) -> Needs:
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
        calls = (fact for (node, _), fact in self.facts.items() if node.op == "call_function")
        return any(map(is_matrix, calls))


def _framed(relations: Relations) -> set[fx.Node]:
    """Values that a padded window reads, and those that are moved to such values."""
    found: set[fx.Node] = set()
    for node, relation in reversed(list(relations.items())):
        if not isinstance(relation, Relation):
            continue
        read = relation.operands if node in found and relation.moved else ()
        with attributed(node):
            if relation.entry.fill == "sum" and relation.entry.reads_padding(node):
                read = (relation.operands[relation.factors[0]],)
        for operand in read:
            if isinstance(operand.value, fx.Node) and operand.value.op == "call_function":
                found.add(operand.value)
    return found


def relations_of(graph: fx.Graph, table: Table) -> dict[fx.Node, Relation | Declined]:
    """What the table says of every call of a graph: Failed where its entry fails on a call."""
    return {
        node: _relation(node, table)
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and _makes_tensors(node)
    }


class Failed(Declined):
    """A call whose rule raised an exception."""

    __slots__ = ()


def _relation(node: fx.Node, table: Table) -> Relation | Declined:
    try:
        with attributed(node):
            return _with_weights(bind(node, table))
    except CallFailed as failure:
        return Failed(failure_text(failure))


def failure_text(failure: CallFailed) -> str:
    """Why a call whose rule failed is declined."""
    return f"its rule failed ({failure.reason}); please report it"


def _without(relations: Relations, failure: CallFailed) -> Relations:
    """The relations, with none for a call whose rule failed."""
    if not isinstance(relations.get(failure.node), Relation):
        raise failure
    return {**relations, failure.node: Failed(failure_text(failure))}


def _listed(places: list[str], most: int = 5) -> str:
    """The first places, and how many more there are."""
    more = len(places) - most
    return ", ".join(places[:most]) + (f" and {more} more" if more > 0 else "")


def _with_weights(relation: Relation | Declined) -> Relation | Declined:
    """Groups are cut one by one, which takes a weight that can be cut."""
    if not isinstance(relation, Relation) or not is_grouped(relation):
        return relation
    held = any(is_constant(relation.operands[k].value) for k in relation.factors)
    return relation if held else Declined("a grouped convolution whose weight is computed")


def _makes_tensors(node: fx.Node) -> bool:
    return all(isinstance(value, Tensor) for value in schema.outputs(node))
