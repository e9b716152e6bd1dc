"""Which calls of a graph a segment may take over, and which of them belong together.

A region is convex: no path leaves it and comes back, so one call can stand in its place. It begins
and ends with layers that are worth it, and with what is computed as they store: an activation, a
sum. All that lies between them is inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.sparse.segment.match_calls import MatchedCall, calls_of

Wanted = Callable[[GraphEditor, MatchedCall], bool]


@dataclass(frozen=True, slots=True)
class SegmentRegion:
    """Calls that become one segment, in the graph's order."""

    calls: tuple[MatchedCall, ...]

    @property
    def nodes(self) -> set[fx.Node]:
        return {call.node for call in self.calls}


def regions(
    editor: GraphEditor, dtype: torch.dtype, core: Wanted, allowed: Wanted
) -> list[SegmentRegion]:
    """The regions of a graph, largest possible.

    core: is a layer worth a segment? allowed: may another layer lie between such ones?
    """
    found = calls_of(editor, dtype)
    worth = {node for node, call in found.items() if call.is_layer and core(editor, call)}
    known = {node: call for node, call in found.items()
             if not call.is_layer or node in worth or allowed(editor, call)}  # fmt: skip
    made = []
    for group in _together(known, _levels(editor.graph, known)):
        inside = _between(group, known, worth)
        for part in _apart(inside, known):
            made.append(SegmentRegion(tuple(known[node] for node in part)))
    return made


def _joins(source: fx.Node, call: MatchedCall, known: Mapping[fx.Node, MatchedCall]) -> bool:
    """Can a call read a value within a segment: is it made there, as what it is read as?"""
    return source in known and known[source].makes == call.kind


def _levels(graph: fx.Graph, known: Mapping[fx.Node, MatchedCall]) -> dict[fx.Node, int]:
    """How often a path to a node has left what segments can compute, at most. It never falls along
    a path, so calls of one level between which there is no other make a convex set."""
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        call = known.get(node)
        sources: Iterable[fx.Node] = node.all_input_nodes if call is None else call.reads
        level[node] = 0
        for source in sources:
            within = call is not None and _joins(source, call, known)
            leaves = source in known and not within
            level[node] = max(level[node], level[source] + leaves)
    return level


def _together(
    known: Mapping[fx.Node, MatchedCall], level: Mapping[fx.Node, int]
) -> list[list[fx.Node]]:
    """Calls of one level, by what hangs together: they read each other's values, or the same."""
    group = _NodeGroups(known)
    for node, call in known.items():
        for source in call.reads:
            if _joins(source, call, known) and level[source] == level[node]:
                group.join(node, source)
            else:
                group.join(node, (source, level[node]))
    return group.parts()


def _between(
    group: list[fx.Node], known: Mapping[fx.Node, MatchedCall], worth: set[fx.Node]
) -> list[fx.Node]:
    """The calls of a group on a path from one layer that is worth it to another, and what such a
    layer computes as it stores."""
    members = set(group)
    behind, before = worth & members, worth & members
    for node in group:
        if any(_joins(s, known[node], known) for s in behind.intersection(known[node].reads)):
            behind.add(node)
    for node in reversed(group):
        if node in before:
            reads = members.intersection(known[node].reads)
            before.update(s for s in reads if _joins(s, known[node], known))
    inside = behind & before
    for node in group:
        if node not in inside and _is_stored(known[node], inside, members):
            inside.add(node)
    return [node for node in group if node in inside]


def _is_stored(call: MatchedCall, inside: set[fx.Node], group: set[fx.Node]) -> bool:
    """Can a call behind a region be computed as its last layer stores? What it adds must be there:
    a value of the group that is not in the region may be made of what is."""
    within = inside.intersection(call.reads)
    alone = any(len(source.users) == 1 for source in within)
    return call.is_pointwise and alone and not group.intersection(call.reads) - inside


def _apart(inside: list[fx.Node], known: Mapping[fx.Node, MatchedCall]) -> list[list[fx.Node]]:
    """Calls by what still hangs together, in their order."""
    group, members = _NodeGroups(inside), set(inside)
    for node in inside:
        for source in known[node].reads:
            joined = source in members and _joins(source, known[node], known)
            group.join(node, source if joined else (source,))
    return group.parts()


class _NodeGroups:
    """Union-find over nodes, and over other things that they share."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.nodes = list(nodes)
        self.parent: dict[Any, Any] = {}

    def root(self, one: Any) -> Any:
        while (parent := self.parent.setdefault(one, one)) is not one:
            one = parent
        return one

    def join(self, one: Any, other: Any) -> None:
        self.parent[self.root(one)] = self.root(other)

    def parts(self) -> list[list[fx.Node]]:
        found: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            found[self.root(node)].append(node)
        return list(found.values())
