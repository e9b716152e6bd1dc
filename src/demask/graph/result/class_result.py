"""Results of the caller's own class: what they remember beside their provenance, and as graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from demask.errors import NotExportable
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.provenance import InputSpec, Provenance
from demask.graph.result.demasked_module import attach, build
from demask.graph.result.resize import tensors_of

_CALL = "_demasked_call"  # of a module: how it was called when it was demasked


@dataclass(frozen=True, slots=True)
class CallSpec:
    """The arguments of a call, with an InputSpec in place of each tensor."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def remember(
    module: nn.Module, provenance: Provenance, args: Any, kwargs: Mapping[str, Any] | None
) -> None:
    """Let a module of any class be a demasked network: `.demasked`, and how it is called."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    known = iter(provenance.inputs)
    kept = [next(known, _spec(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    vars(module)[_CALL] = CallSpec(*pytree.tree_unflatten(kept, spec))
    vars(module)["demasked"] = provenance


def _spec(leaf: Tensor) -> InputSpec:
    sizes = tuple(leaf.shape)
    return InputSpec("input", sizes, str(leaf.dtype).removeprefix("torch."), sizes)


def is_class_result(module: Any) -> bool:
    """Is a module a demasked network of the caller's own class?"""
    return isinstance(module, nn.Module) and _CALL in vars(module)


def as_graph(module: Any) -> Any:
    """A demasked network of the caller's own class as a graph, which shares its tensors; anything
    else as it is. What files are written from. Raises NotExportable."""
    if not is_class_result(module):
        return module
    call: CallSpec = vars(module)[_CALL]
    marks: dict[int, InputSpec] = {}

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, InputSpec):
            return leaf
        made = torch.zeros(leaf.example, dtype=getattr(torch, leaf.dtype))
        device = next((p.device for p in module.parameters()), made.device)
        made = made.to(device)
        marks[id(made)] = leaf
        return made

    inputs: Any = pytree.tree_map(drawn, (call.args, call.kwargs),
                             is_leaf=lambda leaf: isinstance(leaf, InputSpec))  # fmt: skip

    def dynamic(leaf: Tensor) -> dict[int, Any]:
        sizes = marks[id(leaf)].sizes
        return {axis: Dim.AUTO for axis, size in enumerate(sizes) if isinstance(size, str)}

    try:
        program = capture(module, inputs[0], inputs[1], dynamic)
    except NotExportable:
        program = capture(module, inputs[0], inputs[1], {})
    program = folded(functionalized(program))
    graph = build(program, _of_graph(vars(module)["demasked"])).train(module.training)
    held = {name for name, _ in tensors_of(graph)}
    for name, tensor in tensors_of(module):  # what this call does not read
        if name not in held:
            attach(graph, name, tensor)
    return graph


def _of_graph(record: Provenance) -> Provenance:
    """The record of a network for its graph, whose parts are in plain ops: what was measured of
    optimized ones does not hold for it."""
    if record.speed is None:
        return record
    note = "optimized parts are plain ops here: optimize this network for their speed"
    return replace(record, speed=None, decisions=(), notes=(*record.notes, note))
