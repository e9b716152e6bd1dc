"""The tensor inputs of a program, as its record lists them."""

from __future__ import annotations

from torch import Tensor

from demask.graph.program import Program
from demask.graph.provenance import InputSpec
from demask.ops import schema


def input_specs(program: Program) -> tuple[InputSpec, ...]:
    """The names, sizes (dynamic ones as expressions), dtypes and example sizes of tensor inputs."""
    specs = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            sizes = tuple(s if isinstance(s, int) else str(s.node.expr) for s in value.shape)
            example = tuple(schema.example_size(s) for s in value.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            domain = program.domains.get(str(node.target))
            specs.append(InputSpec(node.name, sizes, dtype, example, domain))
    return tuple(specs)
