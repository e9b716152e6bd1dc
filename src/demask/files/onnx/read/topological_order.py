"""Names and order: each name is made once, before it is read; calls of a file's functions end."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from demask.errors import BadInput, RefusedFile
from demask.files.onnx.model import Function, Graph, OnnxFile, OnnxNode

MAX_CALLED = 500_000  # nodes that calls of the file's own functions become, and their names
MAX_DEPTH = 32  # calls and graphs inside each other

Key = tuple[str, str]


def in_order(file: OnnxFile) -> OnnxFile:
    """The file with the nodes of each graph in an order in which they can run: their own, if it is
    one. BadInput: a name made twice, or by nothing, or a circle. RefusedFile: calls without end."""
    Calls(file.functions).check(file.graph)
    functions = {key: _function(key, f) for key, f in file.functions.items()}
    return replace(file, graph=_graph(file.graph, set()), functions=functions)


def _function(key: Key, function: Function) -> Function:
    try:
        both = set(function.inputs) & set(function.outputs)
        if both or len(set(function.outputs)) != len(function.outputs):
            raise BadInput("an output that is an input or is given twice; expected results")
        nodes = _nodes(function.nodes, function.inputs, function.outputs, set())
    except BadInput as error:
        raise type(error)(f"the file's function {'.'.join(key)!r}: {error}") from None
    return replace(function, nodes=nodes)


def _graph(graph: Graph, outer: set[str]) -> Graph:
    given = [*(port.name for port in graph.inputs), *graph.constants]
    nodes = _nodes(graph.nodes, given, [port.name for port in graph.outputs], outer)
    return replace(graph, nodes=nodes)


def _nodes(
    nodes: Sequence[OnnxNode], given: Sequence[str], outputs: Sequence[str], outer: set[str]
) -> tuple[OnnxNode, ...]:
    """Nodes in order. given: what is there before them. outer: what the graphs around show; it is
    as before in the end."""
    made = _made(nodes, given, outer)
    reads = [list(dict.fromkeys(_reads(node))) for node in nodes]
    for node, names in zip(nodes, reads, strict=True):
        for name in names:
            if name not in made and name not in outer:
                raise BadInput(f"{node} reads {name!r}, which nothing makes")
    for name in outputs:
        if name not in made and name not in outer:
            raise BadInput(f"nothing makes the output {name!r}")
    needs = [[k for k in (made.get(name, -1) for name in names) if k >= 0] for names in reads]
    order = _sorted(nodes, needs)
    found = []
    outer.update(given)
    for k in order:
        found.append(_with_graphs(nodes[k], outer))
        outer.update(filter(None, nodes[k].outputs))
    outer.difference_update(made)
    return tuple(found)


def _made(nodes: Sequence[OnnxNode], given: Sequence[str], outer: set[str]) -> dict[str, int]:
    """Which node makes each name (-1: it is given)."""
    made: dict[str, int] = {}
    named = [("the graph", -1, name) for name in given]
    named += [(node, k, name) for k, node in enumerate(nodes) for name in node.outputs if name]
    for node, k, name in named:
        if name in made or name in outer:
            raise BadInput(f"{node} makes {name!r}, which is there already; names are made once")
        if not name:
            raise BadInput("an input or a constant has no name")
        made[name] = k
    return made


def _with_graphs(node: OnnxNode, outer: set[str]) -> OnnxNode:
    inner = {k: v for k, v in node.attributes.items() if isinstance(v, Graph)}
    if not inner:
        return node
    try:
        done = {key: _graph(graph, outer) for key, graph in inner.items()}
    except BadInput as error:
        raise type(error)(f"in a graph of {node}: {error}") from None
    return replace(node, attributes={**node.attributes, **done})


def _reads(node: OnnxNode) -> Iterator[str]:
    """What a node reads, itself or in its graphs."""
    yield from filter(None, node.inputs)
    for value in node.attributes.values():
        if isinstance(value, Graph):
            yield from _free(value)


def _free(graph: Graph) -> Iterator[str]:
    """What a graph reads and does not make."""
    made = {*(port.name for port in graph.inputs), *graph.constants}
    made.update(name for node in graph.nodes for name in node.outputs)
    read = (name for node in graph.nodes for name in _reads(node))
    for name in (*read, *(port.name for port in graph.outputs)):
        if name not in made:
            yield name


def _sorted(nodes: Sequence[OnnxNode], needs: list[list[int]]) -> Sequence[int]:
    """An order of nodes with those that each needs before it; of several that can come next, the
    first in the file comes."""
    if all(max(before, default=-1) < k for k, before in enumerate(needs)):
        return range(len(nodes))
    waits = [len(set(before)) for before in needs]
    behind: list[list[int]] = [[] for _ in nodes]
    for k, before in enumerate(needs):
        for other in set(before):
            behind[other].append(k)
    ready, order = [k for k, n in enumerate(waits) if n == 0], []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for other in behind[k]:
            waits[other] -= 1
            if waits[other] == 0:
                heapq.heappush(ready, other)
    if len(order) < len(nodes):
        raise BadInput(f"nodes that wait for each other: {_circle(nodes, needs, set(order))}")
    return order


def _circle(nodes: Sequence[OnnxNode], needs: list[list[int]], done: set[int]) -> str:
    """Nodes of a circle, as text."""
    k = min(set(range(len(nodes))) - done)
    seen: dict[int, None] = {}
    while k not in seen:
        seen[k] = None
        k = next(other for other in needs[k] if other not in done)
    walk = list(seen)
    circle = walk[walk.index(k) :]
    words = [str(nodes[k]) for k in reversed(circle)]
    return " -> ".join([*words[:4], *(["..."] if len(words) > 4 else []), words[0]])


@dataclass(slots=True)
class Calls:
    """What calls of the file's own functions become. weighed: nodes and depth of each."""

    functions: Mapping[Key, Function]
    weighed: dict[Key, tuple[int, int]] = field(default_factory=dict)
    open: list[Key] = field(default_factory=list)

    def check(self, graph: Graph) -> None:
        """Raise where the calls are too many, too deep, or one inside itself."""
        for key in self.functions:
            self._function(key)
        self._nodes(graph.nodes)

    def _nodes(self, nodes: Iterable[OnnxNode]) -> tuple[int, int]:
        """How many nodes these become by calls, and how deep they are."""
        count = depth = 0
        for node in nodes:
            key = (node.domain, node.op)
            graphs = [g for g in node.attributes.values() if isinstance(g, Graph)]
            if key not in self.functions and not graphs:
                continue
            weights = [self._nodes(graph.nodes) for graph in graphs]
            if key in self.functions:
                weights.append(self._call(node, key))
            count += sum(n for n, _ in weights)
            depth = max(depth, 1 + max(d for _, d in weights))
            if count > MAX_CALLED or depth > MAX_DEPTH:
                raise RefusedFile(
                    f"{node}: calls of the file's own functions become more than {MAX_CALLED} "
                    f"nodes and names, or {MAX_DEPTH} levels"
                )
        return count, depth

    def _call(self, node: OnnxNode, key: Key) -> tuple[int, int]:
        function = self.functions[key]
        for word, there, given in (
            ("inputs", function.inputs, node.inputs), ("outputs", function.outputs, node.outputs),
        ):  # fmt: skip
            if len(given) > len(there):
                raise BadInput(f"{node}: expected at most {len(there)} {word}, got {len(given)}")
        return self._function(key)

    def _function(self, key: Key) -> tuple[int, int]:
        if key in self.open:
            raise RefusedFile(f"the file's function {'.'.join(key)!r} calls itself")
        if key not in self.weighed:
            if len(self.open) > MAX_DEPTH:
                raise RefusedFile(f"functions that call each other over {MAX_DEPTH} levels")
            self.open.append(key)
            function = self.functions[key]
            count, depth = self._nodes(function.nodes)
            self.open.pop()
            names = map(len, (function.inputs, function.outputs, function.attributes))
            self.weighed[key] = count + _count(function.nodes) + sum(names), depth
        return self.weighed[key]


def _count(nodes: Iterable[OnnxNode]) -> int:
    """How many nodes these are, with those of their graphs."""
    graphs = [g for node in nodes for g in node.attributes.values() if isinstance(g, Graph)]
    return len(list(nodes)) + sum(_count(graph.nodes) for graph in graphs)
