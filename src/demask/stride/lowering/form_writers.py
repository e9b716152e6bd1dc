"""Writers of forms: into a graph, or on meta tensors, to count the cost.

A form is a sequence of calls and constants, written through the `FormWriter` protocol. Tests have a
writer that computes eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.ops import schema
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS

aten = torch.ops.aten


class FormWriter(Protocol):
    """Receives the calls and constants of a form, in order. Values are of the writer's own type."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a call."""
        ...

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Any:
        """A constant. weight: whether it is computed from a layer's weight: then a parameter."""
        ...

    def read(self, node: fx.Node) -> Any:
        """The value of a node outside the form."""
        ...


class Cost(NamedTuple):
    """Cost of a form: multiply-adds, whether it rounds, written elements, calls. Costs compare in
    this order; less is better."""

    macs: int
    rounds: bool
    elements: int
    nodes: int


@dataclass(slots=True)
class GraphWriter:
    """Writes a form before a node of a graph. name: of the module to which new constants belong.
    constants: names of those written so far, by content; equal ones are shared. meta: metadata of
    new nodes."""

    editor: GraphEditor
    reader: fx.Node
    name: str
    constants: dict[Any, str]
    meta: dict[str, Any] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.editor.insert(self.reader, None, target, *args, **kwargs)
        node.meta |= self.meta
        return node

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> fx.Node:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (name, tensor.dtype, tuple(tensor.shape), content)
        known = self.constants.get(key)
        if known is None:
            full = f"{self.name}.{name}".lstrip(".")
            node = self.editor.add_constant(full, tensor, self.reader, parameter=weight)
            self.constants[key] = str(node.target)
            return node
        with self.editor.graph.inserting_before(self.reader):
            return self.editor.read_constant(known)

    def read(self, node: fx.Node) -> fx.Node:
        return node


@dataclass(slots=True)
class CostCounter:
    """Runs a form on meta tensors and counts its cost. batch: a size that differs from call to
    call, and is counted as 1."""

    batch: Any = None
    macs: int = 0
    elements: int = 0
    nodes: int = 0

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        value = target(*args, **kwargs)
        self.nodes += 1
        self.elements += value.numel()
        if target in CONVOLUTIONS:
            self.macs += value.numel() * args[1][0].numel()
        return value

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Tensor:
        return tensor.to("meta")

    def read(self, node: fx.Node) -> Tensor:
        value = fake(node)
        shape = [1 if self._is_batch(size) else schema.example_size(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def _is_batch(self, size: Any) -> bool:
        return not isinstance(size, int) and str(size) == str(self.batch)

    def cost(self, *, rounds: bool) -> Cost:
        """The cost of all calls so far."""
        return Cost(self.macs, rounds, self.elements, self.nodes)


__all__ = ["Cost", "CostCounter", "FormWriter", "GraphWriter"]
