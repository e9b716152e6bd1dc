"""The size of a program, and of what it computes: what has to shrink."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, fx, nn

from demask.failures import CallFailed, attributed
from demask.graph.program import Program
from demask.graph.provenance import Sizes
from demask.ops import Declined, Relation, schema


def sizes_of(program: Program, relations: Mapping[fx.Node, Relation | Declined]) -> Sizes:
    """Parameters, MACs of one call on the example sizes, bytes; tied tensors count once."""
    tensors = {
        c.tensor.data_ptr(): c.tensor for c in program.constants.values() if c.tensor.numel()
    }
    floating = [t for t in tensors.values() if t.is_floating_point()]
    return Sizes(
        parameters=sum(t.numel() for t in floating),
        macs=sum(map(_macs, relations.values())),
        bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
    )


def _macs(relation: Relation | Declined) -> int:
    """MACs of a call; 0 for one without a relation."""
    if not isinstance(relation, Relation):
        return 0
    try:
        with attributed(relation.node):
            return macs_of(relation)
    except CallFailed:
        return 0


def macs_of(relation: Relation) -> int:
    """Multiplications that are summed, from the letters of the table line."""
    if relation.back:
        return _recurrent_macs(relation)
    if relation.entry.fill not in ("sum", "mix"):
        return 0
    sizes = _letter_sizes(relation)
    first, second = relation.factors
    kernel = relation.window & relation.letters(relation.ins[second])
    if relation.entry.fill == "sum":
        letters = relation.letters(relation.outs[0]) | relation.contracted | kernel
        return math.prod(sizes[a] for a in letters)
    main = relation.letters(relation.ins[relation.entry.main])
    values = math.prod(sizes[a] for a in main | relation.letters(relation.outs[0]))
    if not relation.contracted:
        return values
    # Attention: queries times keys, then weights times values.
    weights = relation.letters(relation.ins[first]) | relation.letters(relation.ins[second])
    return math.prod(sizes[a] for a in weights) + values


def _recurrent_macs(relation: Relation) -> int:
    """Every entry of every matrix once per step."""
    sizes = _letter_sizes(relation)
    weights = [relation.letters(axes) for axes in relation.ins if len(axes) == 2]
    steps = relation.letters(relation.ins[0]) - frozenset().union(*weights)
    return math.prod(sizes[a] for a in steps) * sum(math.prod(sizes[a] for a in w) for w in weights)


def _letter_sizes(relation: Relation) -> dict[str, int]:
    """The size of every letter on the example."""
    sizes = {letter: size for letter, size in relation.size.items() if size is not None}
    shapes = [
        o.value.meta["val"].shape if isinstance(o.value, fx.Node) else () for o in relation.operands
    ]
    shapes += [value.shape for value in schema.outputs(relation.node)]
    for axes, shape in zip([*relation.ins, *relation.outs], shapes, strict=True):
        for axis, size in zip(axes, shape, strict=True):
            rest = [a for a in axis if a not in sizes]
            if len(rest) == 1:
                known = math.prod(sizes[a] for a in axis if a in sizes)
                sizes[rest[0]] = schema.hint(size) // max(known, 1)
    return sizes


def count_removed(before: Program, after: Program) -> dict[str, int]:
    """Per module, the number of removed parameters."""
    counts: dict[str, int] = {}
    for sign, constants in ((1, before.constants), (-1, after.constants)):
        for name, constant in constants.items():
            if constant.tensor.is_floating_point():
                module = next(iter(constant.aliases), name).rpartition(".")[0]
                counts[module] = counts.get(module, 0) + sign * constant.tensor.numel()
    return {module: count for module, count in counts.items() if count > 0}


def traffic(program: Program) -> int:
    """Elements that the calls of a program write, on the example sizes."""
    total = 0
    for node in program.graph.nodes:
        for value in schema.outputs(node) if node.op == "call_function" else ():
            if isinstance(value, Tensor):
                total += math.prod(schema.hint(size) for size in value.shape)
    return total


def measure_module(network: nn.Module) -> Sizes:
    """The sizes of a network, without its MACs; tied tensors count once."""
    tensors = {t.data_ptr(): t for t in (*network.parameters(), *network.buffers()) if t.numel()}
    floating = [t.numel() for t in tensors.values() if t.is_floating_point()]
    return Sizes(sum(floating), 0, sum(t.numel() * t.element_size() for t in tensors.values()))
