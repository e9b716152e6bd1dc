"""What writes a form: into a graph, or onto values without numbers, which tells what it costs.

A form names calls and constants, and is written the same by everything that has a `Write`: tests
have one that computes at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.ops import schema
from demask.ops.traits import CONVOLUTIONS

aten = torch.ops.aten


class Write(Protocol):
    """Calls and constants, in order; values are of its own kind. weight: is a constant made of a
    layer's weight, and a parameter as that was?"""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any: ...

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Any: ...

    def read(self, node: fx.Node) -> Any:
        """The value of a node that the form did not make."""
        ...


class Cost(NamedTuple):
    """What a form computes and writes: multiply-adds, elements, calls. Less is better, in this
    order; among forms of as many multiply-adds, those that round nothing come first."""

    macs: int
    rounds: bool
    elements: int
    nodes: int


@dataclass(slots=True)
class GraphWriter:
    """Writes before a node of a graph. name: of the module, under which new constants stand; equal
    ones are one. meta: what made nodes tell of themselves."""

    editor: GraphEditor
    reader: fx.Node
    name: str
    kept: dict[Any, str]
    meta: dict[str, Any] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.editor.insert(self.reader, None, target, *args, **kwargs)
        node.meta |= self.meta
        return node

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> fx.Node:
        held_bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (name, tensor.dtype, tuple(tensor.shape), held_bytes)
        held = self.kept.get(key)
        if held is None:
            full = f"{self.name}.{name}".lstrip(".")
            node = self.editor.add_constant(full, tensor, self.reader, parameter=weight)
            self.kept[key] = str(node.target)
            return node
        with self.editor.graph.inserting_before(self.reader):
            return self.editor.read_constant(held)

    def read(self, node: fx.Node) -> fx.Node:
        return node


@dataclass(slots=True)
class Counting:
    """Writes onto values that have shapes alone, and counts."""

    macs: int = 0
    elements: int = 0
    nodes: int = 0

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        made = target(*args, **kwargs)
        self.nodes += 1
        self.elements += made.numel()
        if target in CONVOLUTIONS:
            self.macs += made.numel() * args[1][0].numel()
        return made

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Tensor:
        return tensor.to("meta")

    def read(self, node: fx.Node) -> Tensor:
        value = node.meta["val"]
        shape = [schema.hint(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def cost(self, *, rounds: bool) -> Cost:
        return Cost(self.macs, rounds, self.elements, self.nodes)


__all__ = ["Cost", "Counting", "GraphWriter", "Write"]
