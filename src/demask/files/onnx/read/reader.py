"""ONNX bytes -> `OnnxFile`: the only reader of untrusted ONNX files.

The result is consistent: each name is defined once and before it is read, each tensor has the bytes
that its sizes need, text is valid. Memory and time are bounded by the size of the file, by its
external files, and by limits here, of `tensors` and of `topological_order`. Bytes are checked against
limits before the protobuf library creates objects from them: a message has at least two bytes in a file
and about two hundred in memory, so a small file can exhaust memory.

Element types of less than 8 bits, which torch does not have, become attributes of nodes: a 4-bit zero
point is stored as int8, which no longer determines the type of QuantizeLinear's result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from demask.errors import BadInput, RefusedFile
from demask.files.onnx.model import AttributeReference, Function, Graph, OnnxFile, OnnxNode
from demask.files.onnx.read.tensors import (
    DTYPES,
    MAX_ELEMENTS,
    MAX_NAME,
    NARROW,
    STRING,
    ExternalData,
    decode_text,
    dense,
    file_bytes,
    tensor,
    text,
)
from demask.files.onnx.read.topological_order import sort_nodes
from demask.graph.provenance import OnnxPort
from demask.installation import install_command

MAX_FILE_BYTES = 2**31 - 1  # limit of protobuf
MAX_MESSAGES = 2_000_000  # twice a graph of 100,000 nodes with types
MAX_FIELDS = 2**24  # fields, and ends of messages
MAX_DEPTH = 64  # nested messages; a nested graph adds three
MAX_PACKED = 2**28  # bytes of variable-length numbers, each of which becomes 8

_DELIMITED = 2
_PACKED = object()
_WIDTHS = {1: 8, 5: 4}

#: by tag: the table of a nested message, or _PACKED for packed numbers
Fields = Mapping[int, Any]
#: ops whose output has the element type of an input: its position, the equivalent attribute
TYPED = {"QuantizeLinear": (2, "output_dtype"), "CastLike": (1, "to")}
__all__ = ["DTYPES", "NARROW", "STRING", "installed", "parse_model", "read", "tensor"]
FIRST_WITH_OPSETS = 3  # the first IR version whose files name their op sets
MAX_DOMAINS = 100
LISTED = 40  # bytes of a list item in memory
MAX_TEXT = 2**26  # characters of a description
#: the field of an attribute's value, by the number of the attribute's type
_VALUES = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings", 11: "sparse_tensor", 13: "tp"}
_SINGLE = {"f", "i", "s", "t", "g", "sparse_tensor", "tp"}
_EMPTY = {"t", "g", "sparse_tensor", "tp"}  # fields without a default
_ABOUT = {"name", "type", "doc_string", "ref_attr_name"}


def narrow_types(proto: Any) -> Mapping[str, int]:
    """Element types of less than 8 bits in a GraphProto or FunctionProto, by name of the value."""
    ports = chain(getattr(proto, "input", ()), proto.value_info)  # a function's inputs are names
    types = ((v.name, v.type.tensor_type.elem_type) for v in ports if not isinstance(v, str))
    constants = ((t.name, t.data_type) for t in getattr(proto, "initializer", ()))
    narrow: dict[str, int] = {n: k for n, k in chain(types, constants) if k in NARROW}
    for node in proto.node:
        declared = [a.t.data_type or a.i for a in node.attribute if a.name in ("value", "to", "output_dtype")]
        narrow |= {n: k for n, k in zip(node.output, declared, strict=False) if k in NARROW}
    return narrow


def with_types(nodes: tuple[OnnxNode, ...], types: Mapping[str, int]) -> tuple[OnnxNode, ...]:
    """The nodes, with attributes for element types that are lost in tensors of torch."""
    if not types:
        return nodes
    typed_nodes = []
    for node in nodes:
        attributes = {
            k: replace(v, nodes=with_types(v.nodes, types)) if isinstance(v, Graph) else v
            for k, v in node.attributes.items()
        }
        position, name = TYPED.get(node.op, (0, ""))
        if name and len(node.inputs) > position and node.inputs[position] in types:
            attributes = {name: types[node.inputs[position]], **attributes}
        typed_nodes.append(replace(node, attributes=attributes))
    return tuple(typed_nodes)


def installed() -> Any:
    """The `onnx` package; BadInput where it is missing."""
    try:
        import onnx
    except ImportError as error:
        message = f"ONNX files need the onnx package: {install_command('onnx')}"
        raise BadInput(message) from error
    return onnx


def read(path: str | os.PathLike[str]) -> OnnxFile:
    """The network in an ONNX file; BadInput or RefusedFile for anything else."""
    return read_with_proto(path)[0]


def read_with_proto(path: str | os.PathLike[str]) -> tuple[OnnxFile, Any]:
    """The network in an ONNX file, and its ModelProto without external data; errors as `read`."""
    onnx, file_path = installed(), Path(path)
    message = onnx.ModelProto.DESCRIPTOR
    try:
        data = file_bytes(path, lambda size, head: _check_head(size, head, message))
        try:
            _check_message(data, _field_table(message, {}))
        except IndexError:
            raise BadInput(_describe_damage(len(data))) from None
        proto = _parse_message(onnx, data)
        del data
        return parse_model(proto, file_path.parent, file_path.resolve().parent), proto
    except BadInput as error:
        raise type(error)(f"{path}: {error}") from error
    except MemoryError as error:
        raise BadInput(f"{path}: does not fit into memory") from error


def _check_head(size: int, head: bytes, message: Any) -> None:
    if size > MAX_FILE_BYTES:
        raise BadInput(
            f"{size} bytes; an ONNX file has at most {MAX_FILE_BYTES}, since protobuf reads no "
            "more: store the weights in a separate file (save_as_external_data)"
        )
    if not starts(head, message):
        raise BadInput("expected an ONNX file, got something else or an empty file")


def _parse_message(onnx: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise BadInput(f"expected an ONNX file, got a damaged one: {error}") from error


def parse_model(proto: Any, folder: Path, real: Path | None = None) -> OnnxFile:
    """The network in a ModelProto. folder: of external tensors. real: where links in `folder` may
    lead."""
    newest = installed().IR_VERSION
    if not 1 <= proto.ir_version <= newest:
        raise BadInput(
            f"ir_version {proto.ir_version}; expected 1 to {newest}, which this onnx package "
            "knows: update it, or export for an older one"
        )
    if not proto.HasField("graph"):
        raise BadInput("the file has no graph; expected a network")
    opsets = _read_opsets(proto)
    if not opsets and proto.ir_version < FIRST_WITH_OPSETS:
        opsets = {"": 1}
    reader = OnnxReader(ExternalData(folder, real), frozenset(opsets), frozenset())
    functions = {}
    for function in proto.functions:
        key = _op_name(function, function.name)
        if key in functions:
            raise BadInput(f"two functions named {'.'.join(key)!r}; expected distinct names")
        functions[key] = reader.function(function)
    metadata = {_doc_text(p.key): _doc_text(p.value) for p in proto.metadata_props}
    called = frozenset(domain for domain, _ in functions)
    reader = OnnxReader(reader.external, frozenset(opsets) | called, frozenset())
    graph = reader.graph(proto.graph, is_main=True)
    if not graph.outputs:
        raise BadInput("the graph has no outputs; expected some")
    return sort_nodes(
        OnnxFile(
            graph, opsets, metadata, functions, proto.ir_version, _doc_text(proto.doc_string or proto.graph.doc_string)
        )
    )


def _read_opsets(proto: Any) -> dict[str, int]:
    if len(proto.opset_import) > MAX_DOMAINS:
        raise BadInput(f"expected at most {MAX_DOMAINS} op sets, got {len(proto.opset_import)}")
    newest, opsets = installed().defs.onnx_opset_version(), {}
    for entry in proto.opset_import:
        domain, version = _domain_name(entry.domain), entry.version
        if opsets.setdefault(domain, version) != version:
            raise BadInput(f"op set {domain or 'ai.onnx'!r} in two versions; expected one")
        if version < 1 or (not domain and version > newest):
            raise BadInput(
                f"op set {domain or 'ai.onnx'!r} of version {version}; expected 1"
                + (" or later" if domain else f" to {newest}, the newest that this onnx knows")
            )
    return opsets


def _domain_name(name: Any) -> str:
    name = _printable_text(name, "a domain")
    return "" if name == "ai.onnx" else name


def _op_name(proto: Any, name: str) -> tuple[str, str]:
    """Domain and name of an op or a function, the name with its `overload` if it has one."""
    if not name:
        raise BadInput("a node or a function without the name of its op")
    overload = _printable_text(getattr(proto, "overload", ""), "an overload")
    name = _printable_text(name, "the name of an op")
    return _domain_name(proto.domain), f"{name}:{overload}" if overload else name


def _printable_text(value: Any, what: str) -> str:
    """Text that is printable, so that errors can quote it."""
    if not text(value, what).isprintable():
        raise BadInput(f"{what}: expected plain text, got {value[:40]!r}")
    return value


def _doc_text(value: Any) -> str:
    return text(value, "a description", MAX_TEXT)


def _value_names(values: Iterable[Any], what: str) -> tuple[str, ...]:
    names = tuple(values)
    for name in names:
        if type(name) is not str or len(name) > MAX_NAME:
            text(name, what)
    return names


@dataclass(frozen=True, slots=True)
class OnnxReader:
    """Converts messages of a model to values. domains: those that nodes may use. attributes: of the
    enclosing function, which its nodes may refer to."""

    external: ExternalData
    domains: Collection[str]
    attributes: Collection[str]

    def graph(self, proto: Any, is_main: bool = False) -> Graph:
        """A graph, its nodes in the file's order. is_main: whether it is the file's main graph, whose
        inputs with an initializer become constants."""
        name, constants = text(proto.name, "a graph's name"), {}
        tensors = [(t.name, tensor(t, self.external)) for t in proto.initializer]
        tensors += [(t.values.name, dense(t, self.external)) for t in proto.sparse_initializer]
        for key, value in tensors:
            if key in constants or not key:
                raise BadInput(f"two constants named {key!r}" if key else "a constant has no name")
            constants[key] = value
        inputs = tuple(map(_read_port, proto.input))
        if is_main:
            inputs = tuple(port for port in inputs if port.name not in constants)
        nodes = with_types(tuple(map(self.node, proto.node)), narrow_types(proto))
        return Graph(name, nodes, constants, inputs, tuple(map(_read_port, proto.output)))

    def node(self, proto: Any) -> OnnxNode:
        """A call of an op."""
        domain, op = _op_name(proto, proto.op_type)
        inputs = _value_names(proto.input, "a node's input")
        outputs = _value_names(proto.output, "a node's output")
        node = OnnxNode(op, domain, text(proto.name, "a node's name"), inputs, outputs, {})
        if not outputs:
            raise BadInput(f"{node} has no output; expected some")
        if domain not in self.domains:
            known = sorted(d or "ai.onnx" for d in self.domains)
            raise BadInput(f"{node}: the file names no version of the op set {domain or 'ai.onnx'!r}; it has {known}")
        if not proto.attribute:
            return node
        try:
            attributes = self.values(proto.attribute)
        except BadInput as error:
            raise type(error)(f"{node}: {error}") from None
        return OnnxNode(op, domain, node.name, inputs, outputs, attributes)

    def values(self, protos: Iterable[Any]) -> dict[str, Any]:
        """Attributes by name."""
        attributes: dict[str, Any] = {}
        for proto in protos:
            name = text(proto.name, "an attribute's name")
            if name in attributes or not name:
                raise BadInput(f"expected attributes of distinct names, got {name!r} twice or none")
            attributes[name] = self.value(proto, name)
        return attributes

    def value(self, proto: Any, name: str) -> Any:
        """The value of an attribute."""
        if proto.ref_attr_name:
            referred = text(proto.ref_attr_name, "an attribute's reference")
            if referred not in self.attributes:
                raise BadInput(f"attribute {name!r} refers to {referred!r}, which does not exist")
            return AttributeReference(referred)
        kinds = installed().AttributeProto
        if proto.type not in _VALUES:
            kind = kinds.AttributeType.Name(proto.type)
            raise BadInput(f"attribute {name!r} has type {kind}, which demask does not read")
        field = _VALUES[proto.type]
        value = getattr(proto, field)
        if not proto.HasField(field) if field in _SINGLE else not value:
            _check_default(proto, name, field)
        match field:
            case "s":
                return decode_text(value, f"attribute {name!r}")
            case "strings":
                return tuple(decode_text(s, f"attribute {name!r}") for s in value)
            case "t":
                return tensor(value, self.external)
            case "g":
                return self.graph(value)
            case "sparse_tensor":
                return dense(value, self.external)
            case "tp":
                return value.WhichOneof("value") or ""
        if field in _SINGLE:
            return value
        self.external.expand(LISTED * len(value), f"attribute {name!r}")
        return tuple(value)

    def function(self, proto: Any) -> Function:
        """An op that the file itself defines."""
        names = _value_names(proto.attribute, "a function's attribute")
        defaults = self.values(proto.attribute_proto)
        if len({*names, *defaults}) != len(names) + len(defaults):
            raise BadInput(f"function {proto.name!r} has an attribute twice")
        attributes = {**dict.fromkeys(names, ...), **defaults}
        opsets = _read_opsets(proto)
        reader = OnnxReader(self.external, {*self.domains, *opsets}, frozenset(attributes))
        inputs = _value_names(proto.input, "a function's input")
        outputs = _value_names(proto.output, "a function's output")
        nodes = with_types(tuple(map(reader.node, proto.node)), narrow_types(proto))
        return Function(inputs, outputs, attributes, nodes, opsets)


def _check_default(proto: Any, name: str, field: str) -> None:
    """Raise BadInput where a value is absent; absent numbers are 0 and absent lists are empty."""
    others = [f.name for f, _ in proto.ListFields() if f.name not in _ABOUT and f.name != field]
    if others or field in _EMPTY:
        raise BadInput(f"attribute {name!r}: expected a value in {field!r}, got {others or None}")


def _read_port(proto: Any) -> OnnxPort:
    name = _printable_text(proto.name, "the name of an input or output")
    if not name:
        raise BadInput("an input or output has no name")
    if not proto.type.HasField("tensor_type"):
        return OnnxPort(name, proto.type.WhichOneof("value") or "", None)
    tensor_type = proto.type.tensor_type
    dtypes: Mapping[int, Any] = {0: "", STRING: "", **DTYPES, **NARROW}
    if tensor_type.elem_type not in dtypes:
        raise BadInput(f"{name!r}: element type {tensor_type.elem_type} is not one that demask reads")
    dtype = str(dtypes[tensor_type.elem_type]).removeprefix("torch.")
    if not tensor_type.HasField("shape"):
        return OnnxPort(name, dtype, None)
    sizes = tuple(_dimension_size(d, name) for d in tensor_type.shape.dim)
    if math.prod(max(n, 1) for n in sizes if isinstance(n, int)) > MAX_ELEMENTS:
        raise BadInput(f"{name!r}: the sizes {list(sizes)} are more than any tensor has")
    return OnnxPort(name, dtype, sizes)


def _dimension_size(proto: Any, name: str) -> int | str:
    """A size, the name of a size, or "" if unknown (some exporters write -1)."""
    if not proto.HasField("dim_value"):
        return _printable_text(proto.dim_param, "the name of a size")
    if proto.dim_value < -1:
        raise BadInput(f"{name!r}: a dimension of size {proto.dim_value}; expected 0 or more")
    return "" if proto.dim_value == -1 else proto.dim_value


def starts(head: bytes, message: Any) -> bool:
    """Whether these can be the first bytes of a message of that kind."""
    known = {_field_tag(f, _wire_type(f)) for f in message.fields} & set(range(128))
    return bool(head) and head[0] in known


def _check_message(data: bytes, table: Fields) -> None:
    """Check a message in one step per field and end of message; IndexError past the data."""
    pos, end = 0, len(data)
    left, packed = MAX_MESSAGES, MAX_PACKED
    stack: list[tuple[int, Fields]] = []
    for _ in range(MAX_FIELDS):
        if pos >= end:
            if pos > end:
                raise BadInput(_describe_damage(pos))
            if not stack:
                return
            end, table = stack.pop()
            continue
        tag = data[pos]
        pos += 1
        if tag > 127:
            tag, pos = _varint(data, pos - 1)
        kind = tag & 7
        if kind != _DELIMITED:
            quick = kind == 0 and data[pos] < 128
            pos = pos + 1 if quick else _after_number(data, pos, kind)
            continue
        size = data[pos]
        pos += 1
        if size > 127:
            size, pos = _varint(data, pos - 1)
        if pos + size > end:
            raise BadInput(_describe_damage(pos))
        inner = table.get(tag)
        if inner is None or inner is _PACKED:
            packed -= size if inner else 0
            pos += size
        else:
            left -= 1
            stack.append((end, table))
            end, table = pos + size, inner
        if left < 0 or packed < 0 or len(stack) > MAX_DEPTH:
            raise RefusedFile(_describe_excess(left, packed))
    raise RefusedFile(f"more than {MAX_FIELDS} fields: too large a graph")


def _describe_excess(left: int, packed: int) -> str:
    if packed < 0:
        return f"more than {MAX_PACKED} bytes of packed numbers; weights belong into raw_data"
    if left < 0:
        return f"more than {MAX_MESSAGES} messages: too large a graph"
    return f"nested deeper than {MAX_DEPTH} levels"


def _after_number(data: bytes, pos: int, kind: int) -> int:
    """The position after a number. kind: wire type, 0 for variable length."""
    if kind == 0:
        while data[pos] > 127:
            pos += 1
        return pos + 1
    if kind not in _WIDTHS:
        raise BadInput(_describe_damage(pos))
    return pos + _WIDTHS[kind]


def _varint(data: bytes, pos: int) -> tuple[int, int]:
    """A number of variable length, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos
    raise BadInput(_describe_damage(pos))


def _describe_damage(pos: int) -> str:
    return (
        f"expected an ONNX file, got something else or a damaged or truncated one (byte {pos}); "
        "copy or export the file again"
    )


def _field_table(message: Any, tables: dict[str, dict[int, Any]]) -> Fields:
    """The table of a message, with tables of nested messages. tables: by name, filled here."""
    if message.full_name in tables:
        return tables[message.full_name]
    table = tables[message.full_name] = {}
    for field in message.fields:
        if field.message_type is not None:
            table[_field_tag(field, _DELIMITED)] = _field_table(field.message_type, tables)
        elif field.is_repeated and _wire_type(field) == 0:
            table[_field_tag(field, _DELIMITED)] = _PACKED
    return table


def _field_tag(field: Any, wire_type: int) -> int:
    return field.number << 3 | wire_type


def _wire_type(field: Any) -> int:
    if field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return _DELIMITED
    fixed = {field.TYPE_FLOAT: 5, field.TYPE_DOUBLE: 1}
    return fixed.get(field.type, 0)
