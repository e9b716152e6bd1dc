"""Example inputs that a network remembers, where none are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.graph.result import Demasked
from demask.ops.schema import hint


def examples(
    networks: Iterable[nn.Module | ExportedProgram], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The inputs to run: those given, or drawn to the sizes that a file or a result remembers (the
    first of `networks` that does). Raises BadInput where some of these are no tensors."""
    if args or kwargs:
        return args, kwargs
    for known in networks:
        if isinstance(known, Demasked):
            values = [
                _drawn(spec.example, getattr(torch, spec.dtype)) for spec in known.demasked.inputs
            ]
            spec = known.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
            return _filled(values, spec)
        if isinstance(known, ExportedProgram):
            specs = known.graph_signature.user_inputs
            nodes = [n for n in known.graph.nodes if n.op == "placeholder" and n.name in specs]
            fakes = [n.meta["val"] for n in nodes]
            shaped = [
                _drawn([hint(s) for s in v.shape], v.dtype) if isinstance(v, Tensor) else v
                for v in fakes
            ]
            return _filled(shaped, known.call_spec.in_spec)
    return args, kwargs


def _filled(values: list[Any], spec: Any) -> tuple[Any, dict[str, Any]]:
    if len(values) != spec.num_leaves:
        raise BadInput("the network takes inputs that are no tensors: give example inputs")
    return pytree.tree_unflatten(values, spec)


def _drawn(shape: Any, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(list(shape), dtype=dtype)
    return torch.randn(list(shape), generator=torch.Generator().manual_seed(0)).to(dtype)


def like(leaf: Tensor, draw: torch.Generator) -> Tensor:
    """Other numbers in the shape of a tensor: normally distributed, or whole ones of its range."""
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=draw).to(leaf)
    if leaf.numel() == 0:
        return leaf
    low, high = int(leaf.min()), int(leaf.max())
    return torch.randint(low, high + 1, leaf.shape, generator=draw).to(leaf)
