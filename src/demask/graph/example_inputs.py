"""Example inputs with the recorded shapes of a network and values that its first ops accept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.graph.input_domains import Domain
from demask.graph.provenance import Provenance
from demask.graph.result.class_result import as_graph, call_with, is_class_result
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.module_calls import graph_of_calls
from demask.ops.entry import op_name
from demask.ops.schema import example_size
from demask.ops.traits import INDEXED

PIXELS = Domain(0, 255)
SCALES = (255, 127.5)  # divisors of pixels, for ranges of 0 to 1, or 2
# Ops whose outputs contain values of their operand.
_PASSED = frozenset(
    "aten." + name
    for name in (
        "to.dtype to.device to.dtype_layout to.other _to_copy.default type_as.default "
        "unsqueeze.default squeeze.dim squeeze.default squeeze.dims view.default reshape.default "
        "flatten.using_ints permute.default transpose.int expand.default clone.default "
        "contiguous.default slice.Tensor select.int alias.default detach.default where.self "
        "remainder.Scalar clamp.default _assert_tensor_metadata.default"
    ).split()
)


def draw_examples(
    networks: Iterable[nn.Module | ExportedProgram], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The inputs to run: args and kwargs, or if both are empty, random tensors with the sizes that
    the first possible network of `networks` records. Raises BadInput if it has other inputs."""
    if args or kwargs:
        return args, kwargs
    for network in networks:
        known = as_graph(network)
        if isinstance(known, Demasked):
            domains = expected_domains(known)
            values = [
                draw_input(spec.example, getattr(torch, spec.dtype), domains.get(spec.name))
                for spec in known.demasked.inputs
            ]
            if isinstance(network, nn.Module) and is_class_result(network):
                return call_with(network, values)
            spec = signature_of(known.graph).in_spec
            return unflatten_inputs(values, spec, known.demasked.values)
        if isinstance(known, ExportedProgram):
            domains = expected_domains(known)
            shaped = [
                draw_input([example_size(s) for s in v.shape], v.dtype, domains.get(name))
                if isinstance(v, Tensor)
                else v
                for name, v in inputs_of_program(known).items()
            ]
            users = known.graph_signature.input_specs
            others = [s.arg.name for s in users if s.kind is InputKind.USER_INPUT]
            others = [name for name in others if name not in inputs_of_program(known)]
            return unflatten_inputs(shaped, known.call_spec.in_spec, others)
    return args, kwargs


def inputs_of_program(program: ExportedProgram) -> dict[str, Any]:
    """The inputs of a program by name: a fake tensor, or another value."""
    names = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    return {node.name: node.meta.get("val") for node in nodes}


def unflatten_inputs(values: list[Any], spec: Any, others: Iterable[str] = ()) -> tuple[Any, dict[str, Any]]:
    """(args, kwargs) with these leaves. Raises BadInput if the call has more leaves. others: the
    names of inputs that are no tensors, for the message."""
    if len(values) != spec.num_leaves:
        names = ", ".join(others) or "some"
        raise BadInput(f"the network takes inputs that are no tensors ({names}): pass example inputs")
    return pytree.tree_unflatten(values, spec)


def draw_input(shape: Sequence[int], dtype: torch.dtype, domain: Domain | None = None) -> Tensor:
    """A tensor of seeded random values of a domain; without one, pixels for uint8, True
    for bool, zeros for other integer types, normally distributed numbers for floating-point types.

    >>> draw_input((2,), torch.int64, Domain(3, 3)).tolist(), draw_input((2,), torch.bool).tolist()
    ([3, 3], [True, True])
    """
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.ones(list(shape), dtype=dtype)
    domain = PIXELS if domain is None and dtype == torch.uint8 else domain
    if domain is not None:
        return domain.draw(torch.zeros(list(shape), dtype=dtype), generator)
    if not dtype.is_floating_point:
        return torch.zeros(list(shape), dtype=dtype)
    return torch.randn(list(shape), generator=generator).to(dtype)


def expected_domains(network: Demasked | ExportedProgram) -> dict[str, Domain]:
    """The domains of inputs, by name: those that the record has of the example, else what readers
    determine: positions in a table of n rows, pixels for a division by 255, a number that the input
    is compared with."""
    graph = network.graph if isinstance(network, ExportedProgram) else graph_of_calls(network)
    constants, domains = _constants(network, graph), {}
    if isinstance(network, ExportedProgram):
        inputs = inputs_of_program(network).items()
        dtypes = {name: v.dtype for name, v in inputs if isinstance(v, Tensor)}
    else:
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in network.demasked.inputs}
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in dtypes:
            continue
        integral = not dtypes[node.name].is_floating_point
        expected = [domain for domain in _expected_domains(node, constants, integral) if domain is not None]
        if expected:  # an index of several tables must fit the smallest
            domains[node.name] = min(expected, key=lambda domain: domain.high or 0)
    record = getattr(network, "demasked", None)
    specs = record.inputs if isinstance(record, Provenance) else ()
    return domains | {spec.name: spec.domain for spec in specs if spec.domain is not None}


def _expected_domains(source: fx.Node, constants: Mapping[str, Tensor], integral: bool) -> Iterator[Domain | None]:
    """The domain that each reader of an input expects, also readers after ops that move its values.
    integral: whether the input has an integer type."""
    seen, stack = {source}, [source]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op != "call_function":
                continue
            yield _domain(user, node, constants, integral)
            if op_name(user.target) in _PASSED and user not in seen:
                seen.add(user)
                stack.append(user)


def _domain(user: fx.Node, node: fx.Node, constants: Mapping[str, Tensor], integral: bool) -> Domain | None:
    """The domain that a call expects of one of its operands, or None."""
    name, args = op_name(user.target), cast(Any, user.args)
    if name.startswith(("aten.div.", "aten.mul.")):
        other = _number(args[1] if args[0] is node else args[0], constants)
        inverse = name.startswith("aten.mul.") and other is not None
        scale = 1 / other if inverse and other else other
        return PIXELS if scale is not None and any(_near(scale, n) for n in SCALES) else None
    if name in INDEXED:
        table, axis, positions = INDEXED[name]
        if args[positions] is node:
            return _rows(args[table], args[axis] if axis is not None else 0, constants)
    if name == "aten.index.Tensor" and node in args[1]:
        return _rows(args[0], args[1].index(node), constants)
    if integral and name.startswith("aten.eq."):
        other = _number(args[1] if args[0] is node else args[0], constants)
        return None if other is None else Domain(int(other), int(other))
    return None


def _near(a: float, b: float) -> bool:
    return abs(a - b) < 1e-4 * b


def _rows(table: Any, axis: Any, constants: Mapping[str, Tensor]) -> Domain | None:
    """The domain of positions along an axis of an indexed tensor, or None."""
    if not isinstance(table, fx.Node):
        return None
    value = constants.get(table.name, table.meta.get("val"))
    if not isinstance(value, Tensor) or not value.ndim:
        return None
    size = value.shape[axis]
    return Domain(0, size - 1) if isinstance(size, int) and size else None


def _number(operand: Any, constants: Mapping[str, Tensor]) -> float | None:
    """The number that an operand is, or that its constant of one element contains; else None."""
    if isinstance(operand, fx.Node):
        constant = constants.get(operand.name)
        return float(constant) if constant is not None and constant.numel() == 1 else None
    return operand if isinstance(operand, int | float) else None


def _constants(network: Demasked | ExportedProgram, graph: fx.Graph) -> dict[str, Tensor]:
    """The tensors that a network's graph reads, by name of the node."""
    if isinstance(network, ExportedProgram):
        signature = network.graph_signature
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        stored = {**network.constants, **network.state_dict}
        return {node: stored[name] for node, name in names.items() if name in stored}
    stored = dict(network.named_parameters(remove_duplicate=False))
    stored |= dict(network.named_buffers(remove_duplicate=False))
    nodes = graph.find_nodes(op="get_attr")
    return {node.name: stored[str(node.target)] for node in nodes if str(node.target) in stored}


def batch_axes(record: Any, leaves: list[Any]) -> list[set[int]]:
    """The axes of each input whose size is the dynamic dimension 0 of an input. record: the
    network's Provenance; for other objects there are no such axes."""
    if not isinstance(record, Provenance):
        return [set() for _ in leaves]
    sizes = [spec.sizes for spec in record.inputs]
    names = {n[0] for n in sizes if n and isinstance(n[0], str) and n[0].isidentifier()}
    tensors = iter(sizes)
    rows = [next(tensors, ()) if isinstance(leaf, Tensor) else () for leaf in leaves]
    return [{axis for axis, size in enumerate(row) if size in names} for row in rows]


def resize_batch(leaf: Any, axes: set[int], batch: int) -> Any:
    """An input with another batch size, repeated or sliced along `axes`."""
    for axis in sorted(axes):
        repeats = [-(-batch // max(1, leaf.shape[axis])) if k == axis else 1 for k in range(leaf.ndim)]
        leaf = leaf.repeat(repeats).narrow(axis, 0, batch)
    return leaf
