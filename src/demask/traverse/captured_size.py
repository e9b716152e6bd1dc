"""Capture of a network for one input size, without memory for the input.

The example input is a fake tensor, without values: the image need not fit into memory. Sizes that
the network's file declares are checked first, so that the error names them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.symbolic_shapes import ShapeEnv
from demask.errors import BadInput
from demask.exec.analysis.flow import capture_at_sizes
from demask.files.onnx.module import from_onnx
from demask.files.pt2 import read_model
from demask.graph.capture.capture import recorded_interface
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.traverse.storage.dtype_conversion import can_store, name_of

Sizes = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class SizedNetwork:
    """A module with one input.

    sizes: of the input, text for those that vary; sizes, dtype: None where nothing declares them.
    remedy: the function that exports the network again for other sizes.
    """

    module: nn.Module
    name: str
    sizes: Sizes | None = None
    dtype: torch.dtype | None = None
    remedy: str = ""


def network_of(model: Any) -> SizedNetwork:
    """The network of a module, an exported program or a path.

    Raises:
        BadInput: if `model` is none of these, or takes more than one tensor.
    """
    name = "the network"
    if isinstance(model, str | os.PathLike):
        name, path = str(model), Path(model)
        model = from_onnx(path) if path.suffix == ".onnx" else read_model(path)
    if isinstance(model, ExportedProgram):
        sizes, dtype = _exported_input(model, name)
        # With its guards, which fail for sizes that it was not exported for.
        return SizedNetwork(model.module(check_guards=True), name, sizes, dtype, "torch.export.export")
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected a network or the path of one, got {type(model).__name__}")
    interface = recorded_interface(model)
    ports: Any = None if interface is None else interface.inputs
    remedy = "torch.onnx.export"
    if isinstance(model, Demasked):
        ports, remedy = model.demasked.inputs, "demask.demask"
    if ports is None:
        return SizedNetwork(model, name)
    if len(ports) != 1 or ports[0].sizes is None:
        raise BadInput(f"{name} takes {len(ports)} inputs; stream() takes networks of one tensor")
    dtype = getattr(torch, str(ports[0].dtype), None)
    return SizedNetwork(model, name, tuple(ports[0].sizes), dtype, remedy)


def _exported_input(model: ExportedProgram, name: str) -> tuple[Sizes, torch.dtype]:
    users = model.graph_signature.user_inputs
    nodes = [n for n in model.graph.nodes if n.op == "placeholder" and n.name in users]
    values = [n.meta.get("val") for n in nodes]
    if len(users) != 1 or not isinstance(values[0], Tensor):
        raise BadInput(f"{name} takes {len(users)} inputs; stream() takes networks of one tensor")
    sizes = tuple(n if isinstance(n, int) else str(n) for n in values[0].shape)
    return sizes, values[0].dtype


def captured(network: SizedNetwork, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    """The program of a network for one image of this shape and dtype.

    If nothing declares the input's dtype: uint8 images stay uint8 if every call accepts them. Else
    they are converted to the parameters' dtype, as are images of 16 bits or floating point.
    """
    _check_sizes(network, shape)
    if network.dtype is not None:
        would_round = dtype.is_floating_point and not network.dtype.is_floating_point
        if would_round or not can_store(dtype, network.dtype):
            takes, holds = name_of(network.dtype), name_of(dtype)
            raise BadInput(f"{network.name} takes {takes}, and the source holds {holds}: convert it first")
        return _capture_one_image(network, shape, network.dtype)
    parameter_dtype = next((p.dtype for p in network.module.parameters() if p.is_floating_point()), None)
    is_pixels = dtype.is_floating_point or dtype in (torch.uint8, torch.uint16)
    if parameter_dtype is None or not is_pixels:
        return _capture_one_image(network, shape, dtype)
    if dtype == torch.uint8:
        with suppress(BadInput):
            program = _capture_one_image(network, shape, dtype)
            if not _mixes_dtypes(program):
                return program
    return _capture_one_image(network, shape, parameter_dtype)


def _capture_one_image(network: SizedNetwork, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        example = torch.empty(shape, dtype=dtype)
    try:
        with _quiet():
            return capture_at_sizes(network.module, (example,))
    except BadInput as error:
        hint = ""
        if len(shape) == 3:
            hint = "; a single image without an axis for N is read with one: array[None]"
        raise BadInput(
            f"{network.name} does not take {name_of(dtype)} of {shape}, one image of the source{hint}: {error}"
        ) from error


def _mixes_dtypes(program: Program) -> bool:
    """Whether a call other than a pointwise op reads both uint8 and floating-point tensors.

    Such a call fails when it runs, but not on fake tensors.
    """
    return any(
        node.op == "call_function"
        and torch.Tag.pointwise not in getattr(node.target, "tags", ())
        and _reads(node, lambda t: t.dtype == torch.uint8)
        and _reads(node, Tensor.is_floating_point)
        for node in program.graph.nodes
    )


def _reads(node: fx.Node, has_property: Any) -> bool:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(value, Tensor) and has_property(value) for value in values)


def _check_sizes(network: SizedNetwork, shape: tuple[int, ...]) -> None:
    """Raise BadInput where the network's fixed sizes are not those of an image."""
    sizes = network.sizes
    if sizes is None:
        return
    if len(sizes) != len(shape):
        raise BadInput(
            f"{network.name} takes inputs of {len(sizes)} axes, {_sizes_text(sizes)}, "
            f"and one image of the source has {len(shape)}: {shape}"
        )
    fixed = [k for k, n in enumerate(sizes) if isinstance(n, int) and n != shape[k]]
    if not fixed:
        return
    mismatch = f"{network.name} takes {_sizes_text(sizes)}, and one image of the source is {shape}"
    if 1 in fixed and len(sizes) > 2:
        raise BadInput(f"{mismatch}: expected {sizes[1]} channels on axis 1, got {shape[1]}")
    raise BadInput(f"{mismatch}: its sizes are fixed. Export it for any size:\n{_export_code(network, shape)}")


def _export_code(network: SizedNetwork, shape: tuple[int, ...]) -> str:
    """Code that exports the network for any size. The example has two images: torch.export takes a
    size of one for a constant."""
    sizes = network.sizes or shape
    known = [n if isinstance(n, int) else m for n, m in zip(sizes, shape, strict=True)]
    example = ", ".join(map(str, [2, *known[1:]]))
    axes = ", ".join(f"{k}: AUTO" for k in range(len(known)) if k != 1)
    file = ", path, dynamo=True" if network.remedy == "torch.onnx.export" else ""
    return (
        f"  AUTO = torch.export.Dim.AUTO\n  {network.remedy}(model, (torch.randn({example}),)"
        f"{file}, dynamic_shapes=({{{axes}}},))"
    )


def _sizes_text(sizes: Sizes) -> str:
    return f"({', '.join(map(str, sizes))})"


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without torch's log of errors: the raised BadInput contains them."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
