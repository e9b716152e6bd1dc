"""Order of nodes: each name is defined once, before it is read; calls of functions terminate."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from demask.errors import BadInput, RefusedFile
from demask.files.onnx.model import Function, Graph, OnnxFile, OnnxNode

MAX_CALLED = 500_000  # nodes and names after the file's own functions are inlined
MAX_DEPTH = 32  # nested calls and graphs

Key = tuple[str, str]


def sort_nodes(file: OnnxFile) -> OnnxFile:
    """The file with the nodes of each graph in topological order, unchanged if they are in one.

    Raises:
        BadInput: a name defined twice or not at all, or a cycle of nodes.
        RefusedFile: recursive, too many or too deep calls.
    """
    FunctionCalls(file.functions).check(file.graph)
    functions = {key: _function(key, f) for key, f in file.functions.items()}
    return replace(file, graph=_graph(file.graph, set()), functions=functions)


def _function(key: Key, function: Function) -> Function:
    try:
        common = set(function.inputs) & set(function.outputs)
        if common or len(set(function.outputs)) != len(function.outputs):
            raise BadInput("an output that is an input or occurs twice; expected distinct results")
        nodes = _nodes(function.nodes, function.inputs, function.outputs, set())
    except BadInput as error:
        raise type(error)(f"the file's function {'.'.join(key)!r}: {error}") from None
    return replace(function, nodes=nodes)


def _graph(graph: Graph, outer: set[str]) -> Graph:
    known = [*(port.name for port in graph.inputs), *graph.constants]
    nodes = _nodes(graph.nodes, known, [port.name for port in graph.outputs], outer)
    return replace(graph, nodes=nodes)


def _nodes(
    nodes: Sequence[OnnxNode], known: Sequence[str], outputs: Sequence[str], outer: set[str]
) -> tuple[OnnxNode, ...]:
    """Nodes in order. known: names before the first node. outer: names of enclosing graphs,
    modified during the call and restored."""
    definitions = _definitions(nodes, known, outer)
    reads = [list(dict.fromkeys(names_read(node))) for node in nodes]
    for node, names in zip(nodes, reads, strict=True):
        for name in names:
            if name not in definitions and name not in outer:
                raise BadInput(f"{node} reads {name!r}, which is not defined")
    for name in outputs:
        if name not in definitions and name not in outer:
            raise BadInput(f"the output {name!r} is not defined")
    needs = [[k for k in (definitions.get(name, -1) for name in names) if k >= 0] for names in reads]
    order = _sorted(nodes, needs)
    ordered = []
    outer.update(known)
    for k in order:
        ordered.append(_with_graphs(nodes[k], outer))
        outer.update(filter(None, nodes[k].outputs))
    outer.difference_update(definitions)
    return tuple(ordered)


def _definitions(nodes: Sequence[OnnxNode], known: Sequence[str], outer: set[str]) -> dict[str, int]:
    """Index of the node that defines each name, -1 for the names in `known`."""
    definitions: dict[str, int] = {}
    named = [("the graph", -1, name) for name in known]
    named += [(node, k, name) for k, node in enumerate(nodes) for name in node.outputs if name]
    for node, k, name in named:
        if name in definitions or name in outer:
            raise BadInput(f"{node} defines {name!r}, which is already defined; expected unique names")
        if not name:
            raise BadInput("an input or a constant has no name")
        definitions[name] = k
    return definitions


def _with_graphs(node: OnnxNode, outer: set[str]) -> OnnxNode:
    inner = {k: v for k, v in node.attributes.items() if isinstance(v, Graph)}
    if not inner:
        return node
    try:
        ordered = {key: _graph(graph, outer) for key, graph in inner.items()}
    except BadInput as error:
        raise type(error)(f"in a graph of {node}: {error}") from None
    return replace(node, attributes={**node.attributes, **ordered})


def names_read(node: OnnxNode) -> Iterator[str]:
    """Names that a node reads, itself or in its graphs."""
    yield from filter(None, node.inputs)
    for value in node.attributes.values():
        if isinstance(value, Graph):
            yield from _names_of_outer_graph(value)


def _names_of_outer_graph(graph: Graph) -> Iterator[str]:
    """Names that a graph reads and does not define."""
    definitions = {*(port.name for port in graph.inputs), *graph.constants}
    definitions.update(name for node in graph.nodes for name in node.outputs)
    read = (name for node in graph.nodes for name in names_read(node))
    for name in (*read, *(port.name for port in graph.outputs)):
        if name not in definitions:
            yield name


def _sorted(nodes: Sequence[OnnxNode], needs: list[list[int]]) -> Sequence[int]:
    """Indices of nodes in topological order; of nodes that can be next, the first in the file is.

    needs: per node, the nodes whose outputs it reads.
    """
    if all(max(before, default=-1) < k for k, before in enumerate(needs)):
        return range(len(nodes))
    missing = [len(set(before)) for before in needs]
    readers: list[list[int]] = [[] for _ in nodes]
    for k, before in enumerate(needs):
        for other in set(before):
            readers[other].append(k)
    ready, order = [k for k, n in enumerate(missing) if n == 0], []
    while ready:
        k = heapq.heappop(ready)
        order.append(k)
        for other in readers[k]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready, other)
    if len(order) < len(nodes):
        raise BadInput(f"nodes that wait for each other: {_cycle(nodes, needs, set(order))}")
    return order


def _cycle(nodes: Sequence[OnnxNode], needs: list[list[int]], done: set[int]) -> str:
    """Nodes of a cycle, as text."""
    k = min(set(range(len(nodes))) - done)
    seen: dict[int, None] = {}
    while k not in seen:
        seen[k] = None
        k = next(other for other in needs[k] if other not in done)
    path = list(seen)
    cycle = path[path.index(k) :]
    words = [str(nodes[k]) for k in reversed(cycle)]
    return " -> ".join([*words[:4], *(["..."] if len(words) > 4 else []), words[0]])


@dataclass(slots=True)
class FunctionCalls:
    """Bounds on calls of the file's own functions. weighed: nodes and depth of each function."""

    functions: Mapping[Key, Function]
    weighed: dict[Key, tuple[int, int]] = field(default_factory=dict)
    open: list[Key] = field(default_factory=list)

    def check(self, graph: Graph) -> None:
        """Raise RefusedFile where calls are too many, too deep or recursive."""
        for key in self.functions:
            self._function(key)
        self._nodes(graph.nodes)

    def _nodes(self, nodes: Iterable[OnnxNode]) -> tuple[int, int]:
        """Number of nodes that calls expand to, and depth of nested calls and graphs."""
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
                    f"{node}: calls of the file's own functions expand to more than {MAX_CALLED} "
                    f"nodes and names, or {MAX_DEPTH} levels"
                )
        return count, depth

    def _call(self, node: OnnxNode, key: Key) -> tuple[int, int]:
        function = self.functions[key]
        for word, expected, actual in (
            ("inputs", function.inputs, node.inputs),
            ("outputs", function.outputs, node.outputs),
        ):
            if len(actual) > len(expected):
                raise BadInput(f"{node}: expected at most {len(expected)} {word}, got {len(actual)}")
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
            self.weighed[key] = count + _count_nested_nodes(function.nodes) + sum(names), depth
        return self.weighed[key]


def _count_nested_nodes(nodes: Iterable[OnnxNode]) -> int:
    graphs = [g for node in nodes for g in node.attributes.values() if isinstance(g, Graph)]
    return len(list(nodes)) + sum(_count_nested_nodes(graph.nodes) for graph in graphs)
