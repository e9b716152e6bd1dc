"""An ONNX file as frozen values, returned by `read.reader` and run by `module`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from demask.graph.provenance import OnnxPort


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A call of one op. inputs, outputs: names of values, "" for an optional one that is absent.
    attributes: ints, floats, text, tuples of them, tensors, or graphs."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        name = self.name or next(filter(None, self.outputs), "")
        return f"node {name!r} ({self.domain + '.' if self.domain else ''}{self.op})"


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which they can run. constants: initializers by name."""

    name: str
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Tensor]
    inputs: tuple[OnnxPort, ...]
    outputs: tuple[OnnxPort, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """An op that the file itself defines: a body with named inputs, outputs and attributes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]  # name -> default, or ... for a required attribute
    nodes: tuple[OnnxNode, ...]
    opsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AttributeReference:
    """An attribute whose value is an attribute of the enclosing function, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """The parts of an ONNX file that demask uses. opsets: version by domain ("" is ONNX's own)."""

    graph: Graph
    opsets: Mapping[str, int]
    metadata: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[tuple[str, str], Function] = field(default_factory=dict)
    ir_version: int = 0
    doc: str = ""
