"""Demasked networks as .pt2 files, which any torch reads without demask; and reading both kinds."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from demask.errors import BadInput, NotExportable
from demask.files import archive
from demask.files.atomic import check_writable, write
from demask.files.bounded import open_zip
from demask.files.codec import DTYPES
from demask.files.pt2_gate import open_pt2
from demask.graph.provenance import InputSpec, Provenance
from demask.graph.result import Demasked
from demask.graph.shapes import shapes_only

SEED = 0
MAX_EXAMPLE = 2**31  # elements of one example input


def to_pt2(slim: fx.GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a demasked network, in eval mode, as a .pt2 that plain torch.export.load reads.

    Dimensions that `slim.demasked.inputs` names stay dynamic. No sample inputs and no paths of
    this machine are in the file. NotExportable: torch.export does not take the network.
    """
    check_writable(path)
    if isinstance(slim, Demasked):
        slim = slim.plain()  # what another torch and machine can run
    args, kwargs, shapes = _example(slim)
    with _in_eval(slim), warnings.catch_warnings(), shapes_only(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        try:
            exported = torch.export.export(slim, args, kwargs, dynamic_shapes=shapes)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise NotExportable(
                f"{type(error).__name__}: {first}",
                "the demasked graph",
                "demask the model again with dynamic_shapes that name fewer dynamic dimensions",
            ) from error
        _strip(exported)
        with write(path) as file:
            torch.export.save(exported, file)


def read_model(
    path: str | os.PathLike[str], *, namespaces: Collection[str] = ()
) -> ExportedProgram | fx.GraphModule:
    """The model in the file at `path`: a demasked GraphModule, or the ExportedProgram of a .pt2.

    The content decides, not the suffix. Errors as `archive.load` and `pt2_gate.open_pt2`.
    """
    with open_zip(path) as file:
        demasked = archive.GRAPH in file.namelist()
    return archive.load(path) if demasked else open_pt2(path, namespaces=namespaces)


@contextmanager
def _in_eval(slim: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in slim.modules()]
    slim.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _example(slim: fx.GraphModule) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments to trace with, made from the input specs, and their dynamic dimensions."""
    provenance, codegen = getattr(slim, "demasked", None), slim.graph._codegen
    if not isinstance(provenance, Provenance) or not isinstance(codegen, _PyTreeCodeGen):
        raise BadInput("expected a demasked network (slim.demasked is missing); demask() makes one")
    placeholders = slim.graph.find_nodes(op="placeholder")
    specs: dict[str, InputSpec] = {spec.name: spec for spec in provenance.inputs}
    if len(placeholders) == len(provenance.inputs):
        specs = {n.name: s for n, s in zip(placeholders, provenance.inputs, strict=True)}
    generator, shapes, leaves = torch.Generator().manual_seed(SEED), ShapesCollection(), []
    device = next((p.device for p in slim.parameters()), torch.device("cpu"))
    for node in placeholders:
        if node.name not in specs:
            leaves.append(_constant(node))
            continue
        tensor = _example_tensor(specs[node.name], generator).to(device)
        named = enumerate(specs[node.name].sizes)
        dims = {axis: Dim.DYNAMIC for axis, size in named if isinstance(size, str)}
        if dims:
            shapes[tensor] = dims
        leaves.append(tensor)
    args, kwargs = pytree.tree_unflatten(leaves, codegen.pytree_info.in_spec)
    return args, kwargs, shapes.dynamic_shapes(slim, args, kwargs)


def _constant(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value if isinstance(value, bool | int | float | str) else None


def _example_tensor(spec: InputSpec, generator: torch.Generator) -> Tensor:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or len(spec.sizes) != len(spec.example):
        raise BadInput(f"input {spec.name}: expected a dtype and one example size per dimension")
    # torch.export takes a dynamic dimension of size 1 for a constant.
    pairs = zip(spec.sizes, spec.example, strict=True)
    sizes = [max(n, 2) if isinstance(size, str) else n for size, n in pairs]
    if any(type(n) is not int or n < 0 for n in sizes) or math.prod(sizes) > MAX_EXAMPLE:
        raise BadInput(f"input {spec.name}: the example sizes {sizes} cannot be allocated")
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(sizes, generator=generator, dtype=wide).to(dtype)
    return torch.zeros(sizes, dtype=dtype)


def _strip(exported: ExportedProgram) -> None:
    """Leave out what only debugging needs: stack traces name files of this machine."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack")}
    exported._example_inputs = None
