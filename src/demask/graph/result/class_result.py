"""Results of the caller's own class: recorded call signatures, and conversion to graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from demask.errors import NotExportable
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.input_specs import input_specs
from demask.graph.program import Program
from demask.graph.provenance import InputSpec, Provenance
from demask.graph.result.computed_tensors import parametrized_tensors
from demask.graph.result.demasked_module import attach, build
from demask.graph.result.resize import tensors_of

_CALL = "_demasked_call"  # attribute of a module: the call that it was demasked for


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The arguments of a call, with an InputSpec in place of each tensor."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def record_call(module: nn.Module, provenance: Provenance, args: Any, kwargs: Mapping[str, Any] | None) -> None:
    """Record the provenance (`.demasked`) and the call of a module of any class, in place."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    specs = iter(provenance.inputs)
    call_leaves = [next(specs, _spec_of_input(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    vars(module)[_CALL] = CallSpec(*pytree.tree_unflatten(call_leaves, spec))
    vars(module)["demasked"] = provenance


def _spec_of_input(leaf: Tensor) -> InputSpec:
    sizes = tuple(leaf.shape)
    return InputSpec("input", sizes, str(leaf.dtype).removeprefix("torch."), sizes)


def is_class_result(module: Any) -> bool:
    """Whether a module is a demasked network of the caller's own class."""
    return isinstance(module, nn.Module) and _CALL in vars(module)


def call_with(module: nn.Module, values: Iterable[Tensor]) -> tuple[Any, dict[str, Any]]:
    """The recorded call of a result of the caller's own class, with tensors in place of its own."""
    call: CallSpec = vars(module)[_CALL]
    tensors = iter(values)
    args, kwargs = pytree.tree_map(
        lambda leaf: next(tensors) if isinstance(leaf, InputSpec) else leaf,
        (call.args, dict(call.kwargs)),
        is_leaf=lambda leaf: isinstance(leaf, InputSpec),
    )
    return args, kwargs


def as_graph(module: Any, *, every_size: bool = False) -> Any:
    """A demasked network of the caller's own class as a graph module that shares its tensors, for
    writing files; other values unchanged. Raises NotExportable.

    every_size: whether it takes all sizes that the code of the class does, as far as torch.export
    proves them; else those that the network was demasked for.
    """
    if not is_class_result(module):
        return module
    call: CallSpec = vars(module)[_CALL]
    marks: dict[int, InputSpec] = {}

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, InputSpec):
            return leaf
        example = torch.zeros(leaf.example, dtype=getattr(torch, leaf.dtype))
        device = next((p.device for p in module.parameters()), example.device)
        example = example.to(device)
        marks[id(example)] = leaf
        return example

    inputs: Any = pytree.tree_map(drawn, (call.args, call.kwargs), is_leaf=lambda leaf: isinstance(leaf, InputSpec))

    def every(leaf: Tensor) -> dict[int, Any]:
        return dict.fromkeys(range(leaf.ndim), Dim.AUTO)

    def dynamic(leaf: Tensor) -> dict[int, Any]:
        sizes = marks[id(leaf)].sizes
        return {axis: Dim.AUTO for axis, size in enumerate(sizes) if isinstance(size, str)}

    program: Program | None = None
    for shapes in (every, dynamic) if every_size else (dynamic,):
        with contextlib.suppress(NotExportable):
            program = program or capture(module, inputs[0], inputs[1], shapes)
    program = program or capture(module, inputs[0], inputs[1], {})
    program = fold_constants(functionalize(program, writes=True))
    record = _of_graph(vars(module)["demasked"])
    specs = {spec.name: spec for spec in input_specs(program)}
    sizes = [replace(spec, sizes=specs[spec.name].sizes) if spec.name in specs else spec for spec in record.inputs]
    record = replace(record, guards=program.guards, inputs=tuple(sizes))
    graph = build(program, record).train(module.training)
    names = {name for name, _ in tensors_of(graph)}
    for computed in parametrized_tensors(module):
        names.update(computed.source_names())  # the graph has what they compute
    for name, tensor in tensors_of(module):  # tensors that this call does not read
        if name not in names:
            attach(graph, name, tensor)
    return graph


def _of_graph(record: Provenance) -> Provenance:
    """The record of a network for its graph, which has plain ops: timings of the optimized network
    do not apply to it."""
    if record.speed is None:
        return record
    note = "optimized parts are plain ops here: optimize this network for their speed"
    return replace(record, speed=None, decisions=(), notes=(*record.notes, note))
