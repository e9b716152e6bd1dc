"""Order of nodes: each name is defined once, before it is read; calls of functions terminate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

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
    _check_calls(file)
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
    for graph in _graphs(node):
        yield from _names_of_outer_graph(graph)


def _names_of_outer_graph(graph: Graph) -> Iterator[str]:
    """Names that a graph reads and does not define."""
    definitions = {*(port.name for port in graph.inputs), *graph.constants}
    definitions.update(name for node in graph.nodes for name in node.outputs)
    read = (name for node in graph.nodes for name in names_read(node))
    for name in (*read, *(port.name for port in graph.outputs)):
        if name not in definitions:
            yield name


def _sorted(nodes: Sequence[OnnxNode], needs: list[list[int]]) -> Sequence[int]:
    """Indices of nodes in topological order, those of the file if they are in one.

    needs: per node, the nodes whose outputs it reads.
    """
    if all(max(before, default=-1) < k for k, before in enumerate(needs)):
        return range(len(nodes))
    try:
        return tuple(TopologicalSorter(dict(enumerate(needs))).static_order())
    except CycleError as error:
        words = [str(nodes[k]) for k in error.args[1]]  # the first is the last, too
        cycle = " -> ".join([*words[:-1][:4], *(["..."] if len(words) > 5 else []), words[0]])
        raise BadInput(f"nodes that wait for each other: {cycle}") from None


def _check_calls(file: OnnxFile) -> None:
    """Raise RefusedFile where calls of the file's own functions are recursive, too many or too deep.

    Functions are inlined by `OnnxPlanner`, not by libraries: onnx_ir's pass takes time quadratic in the
    calls (8,000 of them: 35 s), and the one of onnx drops default values of attributes. Nor does onnx_ir
    read the graph: it ignores sparse initializers, and creates values for names that are not defined.
    """
    inner = {key: tuple(_nested_nodes(function.nodes)) for key, function in file.functions.items()}
    calls = {key: {(n.domain, n.op) for n in nodes} & inner.keys() for key, nodes in inner.items()}
    weights: dict[Key, tuple[int, int]] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            function = file.functions[key]
            count, depth = _weigh_calls(function.nodes, file.functions, weights)
            names = map(len, (function.inputs, function.outputs, function.attributes))
            weights[key] = count + len(inner[key]) + sum(names), depth
    except CycleError as error:
        raise RefusedFile(f"the file's function {'.'.join(error.args[1][0])!r} calls itself") from None
    _weigh_calls(file.graph.nodes, file.functions, weights)


def _weigh_calls(
    nodes: Iterable[OnnxNode], functions: Mapping[Key, Function], weights: Mapping[Key, tuple[int, int]]
) -> tuple[int, int]:
    """Number of nodes and names that calls expand to, and depth of nested calls and graphs. weights:
    both, of each function."""
    count = depth = 0
    for node in nodes:
        inner = [_weigh_calls(graph.nodes, functions, weights) for graph in _graphs(node)]
        if function := functions.get((node.domain, node.op)):
            for word, expected, actual in (
                ("inputs", function.inputs, node.inputs),
                ("outputs", function.outputs, node.outputs),
            ):
                if len(actual) > len(expected):
                    raise BadInput(f"{node}: expected at most {len(expected)} {word}, got {len(actual)}")
            inner.append(weights[node.domain, node.op])
        if inner:
            count += sum(n for n, _ in inner)
            depth = max(depth, 1 + max(d for _, d in inner))
        if count > MAX_CALLED or depth > MAX_DEPTH:
            raise RefusedFile(
                f"{node}: calls of the file's own functions expand to more than {MAX_CALLED} "
                f"nodes and names, or {MAX_DEPTH} levels"
            )
    return count, depth


def _graphs(node: OnnxNode) -> list[Graph]:
    return [value for value in node.attributes.values() if isinstance(value, Graph)]


def _nested_nodes(nodes: Iterable[OnnxNode]) -> Iterator[OnnxNode]:
    """Nodes, and those of their graphs."""
    for node in nodes:
        yield node
        for graph in _graphs(node):
            yield from _nested_nodes(graph.nodes)
