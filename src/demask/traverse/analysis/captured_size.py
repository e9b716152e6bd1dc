"""A network of any kind, captured for inputs of one size, at no cost of memory.

The example input is a fake tensor: it has a shape and no values, so a network can be captured for
an image that fits into no memory. What a file says of its sizes is checked first, so that a network
with fixed ones is refused in the user's words.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.compat.fake_tensors import FakeTensorMode
from demask.compat.symbolic_shapes import ShapeEnv
from demask.errors import BadInput
from demask.files.onnx.module import from_onnx
from demask.files.pt2.io import read_model
from demask.graph.capture.capture import interface_of
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.traverse.analysis.flow import read
from demask.traverse.storage.dtype_conversion import holds, name_of

Sizes = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class SizedNetwork:
    """A module, and what is known of its one input: its sizes (text for those that vary) and dtype;
    None where only the module's code knows. remedy: a call that makes one of other sizes."""

    module: nn.Module
    name: str
    sizes: Sizes | None = None
    dtype: torch.dtype | None = None
    remedy: str = ""


def network_of(model: Any) -> SizedNetwork:
    """The network that a user names. BadInput: it is none, or takes more than one tensor."""
    name = "the network"
    if isinstance(model, str | os.PathLike):
        name, path = str(model), Path(model)
        model = from_onnx(path) if path.suffix == ".onnx" else read_model(path)
    if isinstance(model, ExportedProgram):
        sizes, dtype = _exported_input(model, name)
        # With its guards: they hold for every size that it was exported for, and no other.
        return SizedNetwork(
            model.module(check_guards=True), name, sizes, dtype, "torch.export.export"
        )
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected a network or the path of one, got {type(model).__name__}")
    interface = interface_of(model)
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


def captured(network: SizedNetwork, shape: tuple[int, ...], held: torch.dtype) -> Program:
    """The program of a network for one image of this shape, held as this dtype.

    Where the network's code alone knows what it takes: images of uint8 stay what they are if every
    call can take them, else they are converted, as are floating numbers, to its parameters' dtype.
    """
    _check_sizes(network, shape)
    if network.dtype is not None:
        _check_dtype(network.name, held, network.dtype)
        return _read(network, shape, network.dtype)
    own = next((p.dtype for p in network.module.parameters() if p.is_floating_point()), None)
    if held.is_floating_point:
        return _read(network, shape, own or held)
    if held != torch.uint8 or own is None:
        return _read(network, shape, held)
    try:
        program = _read(network, shape, held)
    except BadInput:
        return _read(network, shape, own)
    return _read(network, shape, own) if _wants_numbers(program) else program


def _read(network: SizedNetwork, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        example = torch.empty(shape, dtype=dtype)
    try:
        with _quiet():
            return read(network.module, (example,))
    except BadInput as error:
        hint = ""
        if len(shape) == 3:
            hint = "; a single image without an axis for N is read with one: array[None]"
        raise BadInput(
            f"{network.name} does not take {name_of(dtype)} of {shape}, one image of the source"
            f"{hint}: {error}"
        ) from error


def _wants_numbers(program: Program) -> bool:
    """Does a call read 8 bits beside floating numbers, and not convert them? Only pointwise ops do;
    fake tensors let others pass."""
    return any(
        node.op == "call_function"
        and torch.Tag.pointwise not in getattr(node.target, "tags", ())
        and _reads(node, lambda t: t.dtype == torch.uint8)
        and _reads(node, Tensor.is_floating_point)
        for node in program.graph.nodes
    )


def _reads(node: fx.Node, holds: Any) -> bool:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(value, Tensor) and holds(value) for value in values)


def _check_dtype(name: str, held: torch.dtype, wanted: torch.dtype) -> None:
    rounded = held.is_floating_point and not wanted.is_floating_point
    if rounded or not holds(held, wanted):
        raise BadInput(f"{name} takes {name_of(wanted)}, and the source holds {name_of(held)}: "
                       "convert it first")  # fmt: skip


def _check_sizes(network: SizedNetwork, shape: tuple[int, ...]) -> None:
    """Raise BadInput where sizes that the network has fixed are not those of an image."""
    sizes = network.sizes
    if sizes is None:
        return
    if len(sizes) != len(shape):
        raise BadInput(f"{network.name} takes inputs of {len(sizes)} axes, {_spelled(sizes)}, and "
                       f"one image of the source has {len(shape)}: {shape}")  # fmt: skip
    fixed = [k for k, n in enumerate(sizes) if isinstance(n, int) and n != shape[k]]
    if not fixed:
        return
    words = f"{network.name} takes {_spelled(sizes)}, and one image of the source is {shape}"
    if 1 in fixed and len(sizes) > 2:
        raise BadInput(f"{words}: expected {sizes[1]} channels on axis 1, got {shape[1]}")
    raise BadInput(
        f"{words}: its sizes are fixed. Make one of any size:\n{_remedy(network, shape)}"
    )


def _remedy(network: SizedNetwork, shape: tuple[int, ...]) -> str:
    """A call that makes the network anew, of any size. The example has two images: torch.export
    takes a size of one for a constant."""
    sizes = network.sizes or shape
    known = [n if isinstance(n, int) else m for n, m in zip(sizes, shape, strict=True)]
    example = ", ".join(map(str, [2, *known[1:]]))
    axes = ", ".join(f"{k}: AUTO" for k in range(len(known)) if k != 1)
    file = ", path, dynamo=True" if network.remedy == "torch.onnx.export" else ""
    return (f"  AUTO = torch.export.Dim.AUTO\n  {network.remedy}(model, (torch.randn({example}),)"
            f"{file}, dynamic_shapes=({{{axes}}},))")  # fmt: skip


def _spelled(sizes: Sizes) -> str:
    return f"({', '.join(map(str, sizes))})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of what went wrong: our errors tell it."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
