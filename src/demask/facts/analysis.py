"""What the table states about the calls of a program, and what the sweeps derive from it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor, fx

from demask.facts.carriers import CarriedChannels, carries_constants, find_carried
from demask.facts.input_independent import IndependentMasks, batch_sizes, find_input_independent
from demask.facts.known import Facts, Relations, compute_facts, key_of
from demask.facts.masks import along
from demask.facts.needed import Edge, Needs, needed, operand_need
from demask.facts.ranges import Ranges, compute_ranges
from demask.failures import CallFailed, attributed
from demask.graph.program import Program, module_of
from demask.ops import Declined, Relation, Table, bind, op_name, schema
from demask.ops.schema import fake


class Failed(Declined):
    """A call whose rule raised an exception."""

    __slots__ = ()

    @classmethod
    def of(cls, failure: CallFailed) -> Failed:
        """The failure of a rule as a reason."""
        return cls(f"its rule failed ({failure.reason}); please report it")


@dataclass(frozen=True, eq=False)
class Analysis:
    """Relations of the calls of a program, and what follows from them. Each property is computed
    once, at its first use: the graph must not change meanwhile.

    Args:
        program: the program to analyze, functional and with folded constants.
        table: the op table that relations are bound by.
        frugal: whether known values that would have to be stored as matrices are computed instead.
        borders: False: values that would leave a border map count as unknown.
        carriers: whether channels carry others (`facts.carriers`); with borders=False, also for
            constants before padding.
        bound: relations that exist already, such as those of calls whose rules failed.
    """

    program: Program
    table: Table
    frugal: bool = False
    borders: bool = True
    carriers: bool = False
    bound: Mapping[fx.Node, Relation | Declined] = field(default_factory=dict, repr=False)

    def again(self, program: Program, *, frugal: bool = False) -> Self:
        """The analysis, with the same options, of another version of the program."""
        bound = self._bound if program.graph is self.program.graph else {}
        return replace(self, program=program, frugal=frugal, bound=bound)

    def without(self, failure: CallFailed) -> Self:
        """The analysis in which nothing is known of a call whose rule failed. Raises `failure`
        itself if the call had failed before."""
        if not isinstance(self._bound.get(failure.node), Relation):
            raise failure
        return replace(self, bound={**self._bound, failure.node: Failed.of(failure)})

    @cached_property
    def _bound(self) -> dict[fx.Node, Relation | Declined]:
        return dict(self.bound)

    def relation(self, node: fx.Node) -> Relation | Declined:
        """What the table states about a call: Failed if its entry raises an exception for it."""
        if node not in self._bound:
            try:
                with attributed(node):
                    self._bound[node] = bind(node, self.table)
            except CallFailed as failure:
                self._bound[node] = Failed.of(failure)
        return self._bound[node]

    @cached_property
    def relations(self) -> Relations:
        """The relation of every call that returns tensors. Groups are cut one by one, which
        requires a constant weight."""
        return {
            node: _with_weights(self.relation(node))
            for node in self.program.graph.nodes
            if node.op == "call_function"
            and node.target is not operator.getitem
            and all(isinstance(value, Tensor) for value in schema.outputs(node))
        }

    @property
    def failed(self) -> dict[str, str]:
        """The calls whose rules failed, in words, by failure: later passes name calls anew."""
        places: dict[tuple[str, str], list[str]] = {}
        for node, relation in self.relations.items():
            if isinstance(relation, Failed):
                key = (op_name(node.target), relation.text)
                places.setdefault(key, []).append(module_of(node) or node.name)
        return {
            f"{op}: {text}": f"{op} at {_list_places(modules)} stays as it is: {text}"
            for (op, text), modules in places.items()
        }

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The tensors of the program, by get_attr target."""
        return {name: constant.tensor for name, constant in self.program.constants.items()}

    @cached_property
    def known(self) -> Facts:
        """The known positions and values of every value. Raises CallFailed where a rule fails, as
        `needed` does."""
        carriers = self.carriers
        zeros = () if self.borders else _values_before_padding(self.relations, carriers=carriers)
        return compute_facts(
            self.program.graph,
            self.relations,
            self.constants,
            frugal=self.frugal,
            zeros=zeros,
            trained=self.program.trained,
        )

    @cached_property
    def needed(self) -> Needs:
        """The needed positions of every value."""
        return self.needed_with({})

    def needed_with(self, computed: Mapping[fx.Node, Sequence[Tensor]]) -> Needs:
        """The needed positions if more is computed, as in `facts.needed`."""
        return needed(self.program.graph, self.relations, self.known, computed, self._carried_positions)

    @cached_property
    def carried(self) -> Mapping[fx.Node, CarriedChannels]:
        """The channels of each call that others can carry, if carriers are used."""
        if not self.carriers:
            return {}
        graph, constants = self.program.graph, not self.borders
        return find_carried(graph, self.relations, self.known, constants=constants)

    @cached_property
    def _carried_positions(self) -> Mapping[Edge, Tensor]:
        """Of each such call, the positions that it does not need. With border maps, carriers are
        chosen here: the last call that reads the channels of a window decides for those before. A call reads
        all channels that have weights of its live outputs and that others need, too: they may be carriers, and
        are computed anyway."""
        edges: dict[Edge, Tensor] = {}
        relations = {n: r for n, r in self.relations.items() if isinstance(r, Relation)}
        for node, channels in self.carried.items():
            edges[node, relations[node].factors[0]] = channels.valid.reshape(
                [-1 if k == channels.axis else 1 for k in range(len(relations[node].ins[relations[node].factors[0]]))]
            )
        readers: dict[fx.Node | None, list[fx.Node]] = {}
        for node, channels in self.carried.items() if self.borders else ():
            readers.setdefault(channels.window, []).append(node)
        rounds = [*itertools.zip_longest(*(nodes[::-1] for nodes in readers.values()))]
        while rounds:
            needs, before = needed(self.program.graph, self.relations, self.known, carried=edges), dict(edges)
            for node in filter(None, rounds.pop(0)):
                relation, channels = relations[node], self.carried[node]
                edge = node, relation.factors[0]
                value = needs.live[key_of(relation.operands[edge[1]].value)]
                weighed = operand_need(relation, edge[1], [needs.live[node, 0]], self.known)
                live, weighed = (along(m, channels.axis).expand(channels.valid.numel()) for m in (value, weighed))
                read = live & weighed
                channels = replace(channels, valid=channels.valid & weighed.view(channels.valid.shape))
                edges[edge] = edges[edge] & ~(read | channels.lacking(read)).view(edges[edge].shape)
            if not rounds and not all(torch.equal(mask, before[edge]) for edge, mask in edges.items()):
                rounds.append((*self.carried,))  # the outputs of a call are more where a later one has carriers there
        return edges

    @cached_property
    def input_independent(self) -> IndependentMasks:
        """Where values are the same for all inputs of one size."""
        graph, trained = self.program.graph, self.program.trained
        return find_input_independent(graph, self.relations, self.known, batch_sizes(graph), trained)

    @cached_property
    def ranges(self) -> Ranges:
        """The bounds of every value."""
        return compute_ranges(self.program.graph.nodes, self.constants, self.table)


def _values_before_padding(relations: Relations, *, carriers: bool) -> set[fx.Node]:
    """Values that a padded window reads, and values that are moved to such values. carriers:
    without those of windows in which no border map is needed."""
    framed: set[fx.Node] = set()
    for node, relation in reversed(list(relations.items())):
        if not isinstance(relation, Relation):
            continue
        read = relation.operands if node in framed and relation.moved else ()
        with attributed(node):
            padded = relation.entry.fill == "sum" and relation.entry.reads_padding(node)
            if padded and not (carriers and carries_constants(relation)):
                read = (relation.operands[relation.factors[0]],)
        for operand in read:
            if isinstance(operand.value, fx.Node) and operand.value.op == "call_function":
                framed.add(operand.value)
    return framed


def _list_places(places: list[str], most: int = 5) -> str:
    """The first places in words, and how many more there are."""
    more = len(places) - most
    return ", ".join(places[:most]) + (f" and {more} more" if more > 0 else "")


def _with_weights(relation: Relation | Declined) -> Relation | Declined:
    """The relation of a call; Declined for a grouped convolution without a constant weight, and for a recurrent layer
    with weights of dynamic sizes."""
    if not isinstance(relation, Relation):
        return relation
    weights = relation.operands[relation.factors[1] :] if relation.back else ()
    if not all(isinstance(n, int) for weight in weights for n in fake(weight.value).shape):
        return Declined("a recurrent layer whose weights have dynamic sizes")
    if not relation.is_grouped:
        return relation
    constant = any(schema.is_constant(relation.operands[k].value) for k in relation.factors)
    return relation if constant else Declined("a grouped convolution whose weight is computed")
