"""Element types of less than 8 bits, which torch has no tensors for: said by attributes.

A zero point of 4 bits is held as int8, and does not tell what QuantizeLinear makes. The file does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from demask.files.onnx.model import Graph, OnnxNode
from demask.files.onnx.read.tensors import NARROW

#: ops whose output has the element type of an input: which one, the attribute that says it too
TYPED = {"QuantizeLinear": (2, "output_dtype"), "CastLike": (1, "to")}


def narrow_types(proto: Any) -> Mapping[str, int]:
    """The element types of those values of a GraphProto or FunctionProto that are narrow."""
    ports = chain(getattr(proto, "input", ()), proto.value_info)  # a function's inputs are names
    types = ((v.name, v.type.tensor_type.elem_type) for v in ports if not isinstance(v, str))
    constants = ((t.name, t.data_type) for t in getattr(proto, "initializer", ()))
    found: dict[str, int] = {n: k for n, k in chain(types, constants) if k in NARROW}
    for node in proto.node:
        told = [a.t.data_type or a.i for a in node.attribute
                if a.name in ("value", "to", "output_dtype")]  # fmt: skip
        found |= {n: k for n, k in zip(node.output, told, strict=False) if k in NARROW}
    return found


def said(nodes: tuple[OnnxNode, ...], types: Mapping[str, int]) -> tuple[OnnxNode, ...]:
    """The nodes, with attributes for the types that their inputs do not tell as tensors."""
    if not types:
        return nodes
    found = []
    for node in nodes:
        attributes = {k: replace(v, nodes=said(v.nodes, types)) if isinstance(v, Graph) else v
                      for k, v in node.attributes.items()}  # fmt: skip
        place, name = TYPED.get(node.op, (0, ""))
        if name and len(node.inputs) > place and node.inputs[place] in types:
            attributes = {name: types[node.inputs[place]], **attributes}
        found.append(replace(node, attributes=attributes))
    return tuple(found)
