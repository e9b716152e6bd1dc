"""Calls of functions that the file defines: written out to be edited, and put back unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demask.files.onnx.edit.protos import copy_of, graph_names, is_standard, rename, subgraphs


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call, and the nodes that it was replaced with."""

    call: Any
    nodes: tuple[Any, ...]


def write_out_calls(model: Any) -> tuple[Any, list[WrittenCall]]:
    """The file with the bodies of functions in place of their calls. Calls stay of a body of
    another op set."""
    functions = {_key(function, function.name): function for function in model.functions}
    if not functions:
        return model, []
    new, calls = copy_of(model), []
    taken = graph_names(model.graph) | {node.name for node in model.graph.node}
    del new.graph.node[:]
    for node in model.graph.node:
        nodes = list(_written_out(node, functions, new, taken))
        if nodes != [node]:
            calls.append(WrittenCall(node, tuple(nodes)))
        new.graph.node.extend(nodes)
    return new, calls


def put_back_calls(model: Any, calls: Sequence[WrittenCall], original: Any) -> Any:
    """The file with the calls whose nodes are unchanged, without functions that nothing calls."""
    places = {node.SerializeToString(): k for k, node in enumerate(model.graph.node)}
    nodes: dict[int, Any] = dict(enumerate(model.graph.node))
    for call in calls:
        at = [places.get(node.SerializeToString(), -1) for node in call.nodes]
        if min(at) >= 0:
            nodes = {k: node for k, node in nodes.items() if k not in at} | {max(at): call.call}
    new = copy_of(model)
    del new.graph.node[:], new.functions[:]
    new.graph.node.extend(nodes[k] for k in sorted(nodes))
    unused = _called(original.graph.node, original) - _called(new.graph.node, original)
    new.functions.extend(f for f in original.functions if _key(f, f.name) not in unused)
    return new


def _key(proto: Any, name: str) -> tuple[str, str, str]:
    return "" if is_standard(proto) else proto.domain, name, proto.overload


def _called(nodes: Collection[Any], model: Any) -> set[tuple[str, str, str]]:
    """The functions that nodes call, directly or not."""
    functions = {_key(function, function.name): function for function in model.functions}
    called, queue = set(), list(nodes)
    while queue:
        node = queue.pop()
        key = _key(node, node.op_type)
        if key in functions and key not in called:
            called.add(key)
            queue += functions[key].node
        queue += [inner for graph in subgraphs(node) for inner in graph.node]
    return called


def _written_out(node: Any, functions: dict[Any, Any], model: Any, taken: set[str]) -> Iterator[Any]:
    """A node, or the nodes of the function that it calls. taken: names of the file; it grows."""
    function = functions.get(_key(node, node.op_type))
    if function is None or not _fits(function, model):
        yield node
        return
    names = dict(zip(function.output, node.output, strict=False))
    names = {formal: actual for formal, actual in names.items() if actual}
    names |= {name: node.input[k] if k < len(node.input) else "" for k, name in enumerate(function.input)}
    values = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
    prefix = next(filter(None, node.output))  # which no other node has

    def fresh(name: str) -> str:
        name = f"{prefix}/{name}"
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    for inner in function.node:
        copy = copy_of(inner)
        copy.name = fresh(inner.name) if inner.name else ""
        for k, name in enumerate(inner.input):
            copy.input[k] = names.get(name, name)
        for k, name in enumerate(inner.output):
            if name and name not in names:
                names[name] = fresh(name)
            copy.output[k] = names[name] if name else ""
        _bind(copy, values)
        for graph in subgraphs(copy):
            inner_names = sorted(graph_names(graph) - {"", *names})
            rename(graph, names | {name: fresh(name) for name in inner_names})
        yield from _written_out(copy, functions, model, taken)


def _bind(node: Any, values: Mapping[str, Any]) -> None:
    """Give attributes that are those of the function the values of the call, in place."""
    attributes = [copy_of(attribute) for attribute in node.attribute]
    del node.attribute[:]
    for attribute in attributes:
        if not attribute.ref_attr_name:
            node.attribute.append(attribute)
        elif attribute.ref_attr_name in values:
            node.attribute.append(values[attribute.ref_attr_name])
            node.attribute[-1].name = attribute.name
    for graph in subgraphs(node):
        for inner in graph.node:
            _bind(inner, values)


def _fits(function: Any, model: Any) -> bool:
    """Whether the body can stand in the main graph."""
    versions = {e.domain: e.version for e in model.opset_import}
    if any(versions.get(e.domain, e.version) != e.version for e in function.opset_import):
        return False
    computed = {name for node in function.node for name in node.output}
    if not computed.issuperset(function.output):
        return False
    model.opset_import.extend(e for e in function.opset_import if e.domain not in versions)
    return True
