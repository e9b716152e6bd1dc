"""Convex groups of calls that a sparse segment can replace.

A region is convex: no path leaves it and enters it again, so one call can replace it. It starts and
ends with layers that should be sparse, and with activations and sums that are fused into them. All
calls between them are included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.exec.steps.called_op import RECURRENT
from demask.exec.steps.match_calls import ANY, MatchedCall, calls_of
from demask.exec.steps.segment_rows import lowering_of
from demask.exec.steps.segment_steps import CHANNELS_LAST
from demask.graph.editor import GraphEditor

Wanted = Callable[[GraphEditor, MatchedCall], bool]


@dataclass(frozen=True, slots=True)
class SegmentRegion:
    """Calls that become one segment, in the order of the graph."""

    calls: tuple[MatchedCall, ...]

    @property
    def nodes(self) -> set[fx.Node]:
        return {call.node for call in self.calls}


def regions(editor: GraphEditor, dtype: torch.dtype, core: Wanted, allowed: Wanted) -> list[SegmentRegion]:
    """The largest possible regions of a graph. Recurrent layers are in segments.

    core: whether another layer should be in a segment. allowed: whether a layer may be between such
    layers.
    """
    calls = calls_of(editor, dtype)
    core_layers = {
        node
        for node, call in calls.items()
        if lowering_of(call.step) == RECURRENT or (call.is_layer and core(editor, call))
    }
    known = {
        node: call for node, call in calls.items() if not call.is_layer or node in core_layers or allowed(editor, call)
    }
    segment_regions = []
    for group in _together(known, _segment_levels(editor.graph, known)):
        inside = _between(group, known, core_layers)
        for part in _connected_calls(inside, known):
            segment_regions.append(SegmentRegion(tuple(known[node] for node in part)))
    return segment_regions


def _can_join(source: fx.Node, call: MatchedCall, known: Mapping[fx.Node, MatchedCall]) -> bool:
    """Whether a call can read a value within a segment: one computed there, of the same kind, or
    of one that a step makes the same."""
    if source not in known:
        return False
    makes = known[source].makes
    return call.kind in (makes, ANY) or {call.kind, makes} <= set(CHANNELS_LAST)


def _segment_levels(graph: fx.Graph, known: Mapping[fx.Node, MatchedCall]) -> dict[fx.Node, int]:
    """The largest number of times that a path to a node has left the segments.

    It never decreases along a path, so connected calls of one level are convex.
    """
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        call = known.get(node)
        sources: Iterable[fx.Node] = node.all_input_nodes if call is None else call.reads
        level[node] = 0
        for source in sources:
            is_within = call is not None and _can_join(source, call, known)
            has_left = source in known and not is_within
            level[node] = max(level[node], level[source] + has_left)
    return level


def _together(known: Mapping[fx.Node, MatchedCall], level: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Groups of calls of one level that read each other's values, or the same values."""
    groups = _NodeGroups(known)
    for node, call in known.items():
        for source in call.reads:
            if _can_join(source, call, known) and level[source] == level[node]:
                groups.join(node, source)
            else:
                groups.join(node, (source, level[node]))
    return groups.parts()


def _between(group: list[fx.Node], known: Mapping[fx.Node, MatchedCall], core_layers: set[fx.Node]) -> list[fx.Node]:
    """The calls of a group on paths between core layers, and those fused into such layers."""
    members = set(group)
    after, before = core_layers & members, core_layers & members
    for node in group:
        if any(_can_join(s, known[node], known) for s in after.intersection(known[node].reads)):
            after.add(node)
    for node in reversed(group):
        if node in before:
            reads = members.intersection(known[node].reads)
            before.update(s for s in reads if _can_join(s, known[node], known))
    inside, last = after & before, _only_outputs(known)
    for node in group:
        if node not in inside and _is_stored(known[node], inside, members, last):
            inside.add(node)
    return [node for node in group if node in inside]


def _only_outputs(known: Mapping[fx.Node, MatchedCall]) -> set[fx.Node]:
    """The calls that are not layers whose results only become outputs of the network."""
    last: set[fx.Node] = set()
    for node in reversed(list(known)):
        are_last = (user in last or user.op == "output" for user in node.users)
        if not known[node].is_layer and all(are_last):
            last.add(node)
    return last


def _is_stored(call: MatchedCall, inside: set[fx.Node], group: set[fx.Node], last: set[fx.Node]) -> bool:
    """Whether a call after a region can be fused into its last layer, or ends the network.

    Its other operands must be available: values of the group outside of the region may depend on
    it.
    """
    within = inside.intersection(call.reads)
    has_one_reader = any(len(source.users) == 1 for source in within)
    is_fused = call.is_elementwise and has_one_reader
    is_last = call.node in last and bool(within)
    return (is_fused or is_last) and not group.intersection(call.reads) - inside


def _connected_calls(inside: list[fx.Node], known: Mapping[fx.Node, MatchedCall]) -> list[list[fx.Node]]:
    """Connected groups of calls, in their order."""
    groups, members = _NodeGroups(inside), set(inside)
    for node in inside:
        for source in known[node].reads:
            is_joined = source in members and _can_join(source, known[node], known)
            groups.join(node, source if is_joined else (source,))
    return groups.parts()


class _NodeGroups:
    """Union-find over nodes and other keys that they share."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.nodes = list(nodes)
        self.parent: dict[Any, Any] = {}

    def root(self, key: Any) -> Any:
        while (parent := self.parent.setdefault(key, key)) is not key:
            key = parent
        return key

    def join(self, key: Any, other: Any) -> None:
        self.parent[self.root(key)] = self.root(other)

    def parts(self) -> list[list[fx.Node]]:
        parts: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            parts[self.root(node)].append(node)
        return list(parts.values())
