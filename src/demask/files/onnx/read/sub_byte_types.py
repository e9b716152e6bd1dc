"""Element types of less than 8 bits, which torch does not have, as attributes of nodes.

A 4-bit zero point is stored as int8, which no longer determines the type of QuantizeLinear's
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from demask.files.onnx.model import Graph, OnnxNode
from demask.files.onnx.read.tensors import NARROW

#: ops whose output has the element type of an input: its position, the equivalent attribute
TYPED = {"QuantizeLinear": (2, "output_dtype"), "CastLike": (1, "to")}


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
