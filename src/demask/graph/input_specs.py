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


def example_batch(program: Program) -> int:
    """The example's size of the dynamic axis that is the first one of every input with axes; 0 if
    there is none. torch.export captures a batch of one as two, which `InputSpec.example` has."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    first = {str(v.shape[0]): v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim}
    [size] = first.values() if len(first) == 1 else [0]
    return 0 if isinstance(size, int) else program.example.size(size)
