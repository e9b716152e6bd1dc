"""Tracing of demasked networks with their dynamic dimensions, to write them in other formats."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree

from demask.compat.fake_shapes import shapes_only
from demask.compat.fx_internals import PyTreeCodeGen, codegen_of
from demask.errors import BadInput, NotExportable
from demask.files.node_codec import DTYPES
from demask.graph.guards import are_true, fixed_symbols
from demask.graph.provenance import InputSpec, Provenance

SEED = 0
MAX_EXAMPLE = 2**31  # elements of one example input


def export_graph(slim: fx.GraphModule) -> ExportedProgram:
    """The ExportedProgram of a demasked network in eval mode.

    Raises:
        NotExportable: torch.export does not accept the network.
    """
    args, kwargs, shapes = example(slim)
    with _in_eval(slim), warnings.catch_warnings(), shapes_only(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        try:
            return torch.export.export(slim, args, kwargs, dynamic_shapes=shapes)
        except Exception as error:
            message = (str(error).strip().splitlines() or [""])[0]
            raise NotExportable(
                f"{type(error).__name__}: {message}",
                "the demasked graph",
                "demask the model again with dynamic_shapes that name fewer dynamic dimensions",
            ) from error


@contextmanager
def _in_eval(slim: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in slim.modules()]
    slim.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def example(slim: fx.GraphModule) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Example args and kwargs with sizes of the input specs, and their dynamic dimensions."""
    provenance, codegen = getattr(slim, "demasked", None), codegen_of(slim.graph)
    if not isinstance(provenance, Provenance) or not isinstance(codegen, PyTreeCodeGen):
        raise BadInput("expected a network of demask(), got one without slim.demasked")
    placeholders = slim.graph.find_nodes(op="placeholder")
    specs: dict[str, InputSpec] = {spec.name: spec for spec in provenance.inputs}
    if len(placeholders) == len(provenance.inputs):
        specs = {n.name: s for n, s in zip(placeholders, provenance.inputs, strict=True)}
    # torch.export treats a dynamic dimension of size 1 as constant.
    sizes_from_2 = _symbol_sizes(provenance.inputs, 2)
    least = 2 if are_true(provenance.guards, sizes_from_2) else 0
    fixed = fixed_symbols(provenance.guards, sizes_from_2)
    generator, shapes, leaves = torch.Generator().manual_seed(SEED), ShapesCollection(), []
    device = next((p.device for p in slim.parameters()), torch.device("cpu"))
    for node in placeholders:
        if node.name not in specs:
            leaves.append(_python_constant(node))
            continue
        tensor = _example_tensor(specs[node.name], least, generator).to(device)
        named_sizes = zip(specs[node.name].sizes, tensor.shape, strict=True)
        dims = {
            axis: Dim.DYNAMIC
            for axis, (size, length) in enumerate(named_sizes)
            if isinstance(size, str) and size not in fixed and length > 1
        }
        if dims:
            shapes[tensor] = dims
        leaves.append(tensor)
    args, kwargs = pytree.tree_unflatten(leaves, codegen.pytree_info.in_spec)
    return args, kwargs, shapes.dynamic_shapes(slim, args, kwargs)


def accepts(slim: fx.GraphModule, args: Any, kwargs: Any) -> bool:
    """Whether a call has the inputs of a demasked network; a call without inputs has."""
    if not args and not kwargs:
        return True
    specs: tuple[InputSpec, ...] = slim.demasked.inputs  # type: ignore[assignment, union-attr]
    own_args, own_kwargs, _ = example(slim)
    own_call, call_inputs = (pytree.tree_flatten(call) for call in ((own_args, own_kwargs), (args, dict(kwargs or {}))))
    tensors = [leaf for leaf in call_inputs[0] if isinstance(leaf, Tensor)]
    if own_call[1] != call_inputs[1] or len(tensors) != len(specs):
        return False
    sizes: dict[str, int] = {}
    return all(
        str(tensor.dtype).removeprefix("torch.") == spec.dtype
        and len(tensor.shape) == len(spec.sizes)
        and all(
            n == (size if isinstance(size, int) else sizes.setdefault(size, n))
            for n, size in zip(tensor.shape, spec.sizes, strict=True)
        )
        for tensor, spec in zip(tensors, specs, strict=True)
    )


def _python_constant(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, bool | int | float | str) else None


def _symbol_sizes(specs: Sequence[InputSpec], least: int) -> dict[str, int]:
    """The example's size of each symbol, at least `least`."""
    return {
        size: max(n, least)
        for spec in specs
        for size, n in zip(spec.sizes, spec.example, strict=False)
        if isinstance(size, str)
    }


def _example_tensor(spec: InputSpec, least: int, generator: torch.Generator) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or len(spec.sizes) != len(spec.example):
        raise BadInput(f"input {spec.name}: expected a dtype and one example size per dimension")
    pairs = zip(spec.sizes, spec.example, strict=True)
    sizes = [max(n, least) if isinstance(size, str) else n for size, n in pairs]
    if any(type(n) is not int or n < 0 for n in sizes) or math.prod(sizes) > MAX_EXAMPLE:
        raise BadInput(f"input {spec.name}: the example sizes {sizes} cannot be allocated")
    if dtype.is_floating_point or dtype.is_complex:
        drawn_dtype = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(sizes, generator=generator, dtype=drawn_dtype).to(dtype)
    return torch.zeros(sizes, dtype=dtype)
