"""The size of a program: parameters, multiply-adds and bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.failures import CallFailed, attributed
from demask.graph.program import Constant, Program, path_of
from demask.graph.provenance import Sizes
from demask.graph.queries import ExampleSizes
from demask.ops import Declined, Relation, schema
from demask.ops.schema import fake


def measure_program(program: Program, relations: Mapping[fx.Node, Relation | Declined]) -> Sizes:
    """Parameters, MACs of one call on the example inputs, bytes; tied tensors count once."""
    constants = _distinct_constants(program).values()
    return _sizes(
        [c.tensor for c in constants if c.parameter],
        [c.tensor for c in constants if not c.parameter],
        sum_macs(relations, program.example),
    )


def count_numbers(program: Program) -> int:
    """The elements of the floating-point tensors of a program; tied tensors count once."""
    tensors = [constant.tensor for constant in _distinct_constants(program).values()]
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())


def sum_macs(relations: Mapping[fx.Node, Relation | Declined], example: ExampleSizes) -> int:
    """MACs of all calls; those without a relation count as 0."""
    return sum(_macs(relation, example) for relation in relations.values())


def _sizes(parameters: Collection[Tensor], buffers: Collection[Tensor], macs: int) -> Sizes:
    return Sizes(
        parameters=sum(tensor.numel() for tensor in parameters),
        macs=macs,
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *buffers)),
        buffers=sum(tensor.numel() for tensor in buffers),
    )


def _macs(relation: Relation | Declined, example: ExampleSizes) -> int:
    """MACs of a call; 0 for one without a relation."""
    if not isinstance(relation, Relation):
        return 0
    try:
        with attributed(relation.node):
            return count_macs(relation, example)
    except CallFailed:
        return 0


def count_macs(relation: Relation, example: ExampleSizes | None = None) -> int:
    """Multiplications that are summed, from the letters of the table line. example: the dynamic
    sizes; None: the captured ones."""
    sizes = letter_sizes(relation, ExampleSizes() if example is None else example)
    return sum(math.prod(sizes[a] for a in letters) for letters in mac_products(relation))


def mac_products(relation: Relation) -> list[list[str]]:
    """The multiplications of a call as a sum of products of letter sizes: the letters of each."""
    if relation.back:
        return _recurrent_products(relation)
    if relation.entry.fill not in ("sum", "mix"):
        return []
    first, second = relation.factors
    outputs = relation.letters(relation.outs[0])
    if relation.entry.fill == "sum":
        kernel = relation.window & relation.letters(relation.ins[second])
        return [sorted(outputs | relation.contracted | kernel)]
    values = sorted(relation.letters(relation.ins[relation.entry.main]) | outputs)
    if not relation.contracted:
        return [values]
    # Attention: queries times keys, then weights times values.
    weights = relation.letters(relation.ins[first]) | relation.letters(relation.ins[second])
    return [sorted(weights), values]


def _recurrent_products(relation: Relation) -> list[list[str]]:
    """Every entry of every matrix once per step."""
    weights = [relation.letters(axes) for axes in relation.ins if len(axes) == 2]
    steps = sorted(relation.letters(relation.ins[0]) - frozenset().union(*weights))
    return [[*steps, *sorted(weight)] for weight in weights]


def letter_sizes(relation: Relation, example: ExampleSizes) -> dict[str, int]:
    """The size of every letter on the example inputs."""
    sizes = {letter: size for letter, size in relation.size.items() if size is not None}
    shapes = [fake(o.value).shape if isinstance(o.value, fx.Node) else () for o in relation.operands]
    shapes += [value.shape for value in schema.outputs(relation.node)]
    for axes, shape in zip([*relation.ins, *relation.outs], shapes, strict=True):
        for axis, size in zip(axes, shape, strict=True):
            rest = [a for a in axis if a not in sizes]
            if len(rest) == 1:
                known = math.prod(sizes[a] for a in axis if a in sizes)
                sizes[rest[0]] = example.size(size) // max(known, 1)
    return sizes


def measure_modules(program: Program, relations: Mapping[fx.Node, Relation | Declined]) -> dict[str, tuple[int, int]]:
    """Parameters and MACs by module, in order of execution; the sums are those of
    `measure_program`. A call belongs to the module of the largest tensor that it reads, or else to
    the module that contains it."""
    owners = {name: _owning_module(name, constant) for name, constant in program.constants.items()}
    parameters, macs = dict[str, int](), dict[str, int]()
    for node, relation in relations.items():
        read = [name for name in map(_constant_name, node.all_input_nodes) if name in owners]
        largest = max(read, key=lambda name: program.constants[name].tensor.numel(), default="")
        path, count = (owners[largest] if largest else path_of(node), _macs(relation, program.example))
        for owner in (*map(owners.__getitem__, read), *[path] * bool(count)):
            parameters.setdefault(owner, 0)
        macs[path] = macs.get(path, 0) + count
    for name, constant in _distinct_constants(program).items():
        if constant.parameter:
            path = owners[name]
            parameters[path] = parameters.get(path, 0) + constant.tensor.numel()
    rows = {path: (count, macs.get(path, 0)) for path, count in parameters.items()}
    return {path: row for path, row in rows.items() if any(row)}


def _owning_module(name: str, constant: Constant) -> str:
    return next(iter(constant.aliases), name).rpartition(".")[0]


def _constant_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "get_attr" else ""


def _distinct_constants(program: Program) -> dict[str, Constant]:
    """The constants that have elements, one of those that share memory, by name."""
    firsts: dict[int, str] = {}
    for name, constant in program.constants.items():
        if constant.tensor.numel():
            firsts.setdefault(constant.tensor.data_ptr(), name)
    return {name: program.constants[name] for name in firsts.values()}


def count_elements_written(program: Program) -> int:
    """Elements that the calls of a program write, on the captured sizes."""
    total = 0
    for node in program.graph.nodes:
        for value in schema.outputs(node) if node.op == "call_function" else ():
            if isinstance(value, Tensor):
                total += math.prod(schema.example_size(size) for size in value.shape)
    return total


def measure_module(network: nn.Module | ExportedProgram, macs: int = 0) -> Sizes:
    """The size of a network by its own tensors, of which tied ones count once, without the masks of
    torch.nn.utils.prune."""
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    masks = {name.removesuffix("_orig") + "_mask" for name in parameters if name.endswith("_orig")}
    others = [tensor for name, tensor in buffers.items() if name not in masks]
    return _sizes(parameters.values(), others, macs)
