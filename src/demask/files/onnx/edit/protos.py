"""Nodes of ONNX files as protocol buffers; a file in another version of ONNX's op set."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from demask.errors import NotExportable

GRAPH, GRAPHS = 5, 10  # types of attributes
STANDARD = ("", "ai.onnx")


def is_standard(node: Any) -> bool:
    """Whether a node's op is ONNX's own."""
    return node.domain in STANDARD


def op_of(node: Any) -> str:
    """The name of a node's op, with its domain unless that is ONNX's own."""
    return node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"


def copy_of(proto: Any) -> Any:
    """A copy of a message, equal byte for byte until it is changed."""
    copy = type(proto)()
    copy.CopyFrom(proto)
    return copy


def shell_of(model: Any) -> Any:
    """A copy of a file without the nodes and tensors of its graph."""
    copy = copy_of(model)
    del copy.graph.node[:], copy.graph.initializer[:]
    # A message keeps the memory of what was deleted from it.
    return type(copy).FromString(copy.SerializePartialToString())


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a node, text as str."""
    from onnx import helper

    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Replace an attribute where it stands, or add it; None removes it."""
    from onnx import helper

    at = next((k for k, a in enumerate(node.attribute) if a.name == name), None)
    if value is None:
        if at is not None:
            del node.attribute[at]
    elif at is None:
        node.attribute.append(helper.make_attribute(name, value))
    elif attributes_of(node)[name] != value:
        node.attribute[at].CopyFrom(helper.make_attribute(name, value))


def graph_reads(node: Any) -> list[str]:
    """The names that the subgraphs of a node read from the graph around it."""
    return [name for graph in subgraphs(node) for name in outer_reads(graph)]


def outer_reads(graph: Any, bound: Collection[str] = ()) -> list[str]:
    """The names that a subgraph reads from the graph around it."""
    inner = {*bound, *(v.name for v in graph.input), *(t.name for t in graph.initializer)}
    reads: list[str] = []
    for node in graph.node:
        names = [*node.input, *graph_reads(node)]
        reads += [name for name in names if name and name not in inner]
        inner |= set(node.output)
    return reads + [value.name for value in graph.output if value.name not in inner]


def graph_names(graph: Any) -> set[str]:
    """The names of all values of a graph and of its subgraphs."""
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names |= {*node.input, *node.output}
        for inner in subgraphs(node):
            names |= graph_names(inner)
    return names


def subgraphs(node: Any) -> list[Any]:
    """The graphs in a node's attributes."""
    single = [a.g for a in node.attribute if a.type == GRAPH]
    return single + [g for a in node.attribute if a.type == GRAPHS for g in a.graphs]


def tensors_of(graph: Any) -> Iterator[Any]:
    """The tensors that a graph and its subgraphs store."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from tensors_in(node)


def stored_bytes(graph: Any) -> int:
    """The bytes of the tensors that a graph and its subgraphs store, without names."""
    return sum(len(tensor.raw_data) or tensor.ByteSize() for tensor in tensors_of(graph))


def tensors_in(node: Any) -> Iterator[Any]:
    """The tensors among a node's attributes, and in its subgraphs."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for graph in subgraphs(node):
        yield from tensors_of(graph)


def rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename values of a graph and of its subgraphs, in place."""
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for values in (node.input, node.output):
            for k, name in enumerate(values):
                values[k] = names.get(name, name)
        for inner in subgraphs(node):
            rename(inner, names)


def opset_of(model: Any) -> int:
    """The version of ONNX's op set that a file has."""
    return next((e.version for e in model.opset_import if is_standard(e)), 1)


def with_opset(model: Any, opset: int) -> Any:
    """A ModelProto converted by `onnx.version_converter`; itself if it has that version.

    Raises:
        NotExportable: the converter has no form of an op in that version.
    """
    from onnx import helper, version_converter

    if opset_of(model) == opset:
        return model
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:  # of C++, or a RuntimeError
        reason = (str(error).strip().splitlines() or ["no reason"])[-1]
        raise NotExportable(
            f"onnx's version converter fails from op set {opset_of(model)} to {opset}: {reason}",
            "the file",
            "leave --opset (opset=) out, or choose one nearer to the file's",
        ) from error
    least = helper.find_min_ir_version_for(converted.opset_import, ignore_unknown=True)
    converted.ir_version = max(model.ir_version, least)
    # What describes values is no matter of versions, but the converter drops some of it.
    described = {tensor.name: tensor for tensor in model.graph.initializer}
    described |= {tuple(node.output): node for node in model.graph.node}
    new = [(tensor.name, tensor) for tensor in converted.graph.initializer]
    new += [(tuple(node.output), node) for node in converted.graph.node]
    for key, item in new:
        if key in described:
            item.doc_string = described[key].doc_string
            item.ClearField("metadata_props")
            item.metadata_props.extend(described[key].metadata_props)
    for ports in ("input", "output", "quantization_annotation", "metadata_props"):
        converted.graph.ClearField(ports)
        getattr(converted.graph, ports).extend(getattr(model.graph, ports))
    converted.ClearField("training_info")
    converted.training_info.extend(model.training_info)
    converted.functions.extend(model.functions[len(converted.functions) :])
    return converted
