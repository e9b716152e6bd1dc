"""Reading the networks that commands are given, whatever their file is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.files.onnx.module import from_onnx
from demask.files.onnx.write import remembering
from demask.files.pt2 import read_model
from demask.files.tracing import MAX_EXAMPLE
from demask.graph.capture import capture
from demask.graph.provenance import InputSpec, Interface, Port, Provenance

IMAGE, LENGTH = 224, 16  # dynamic sizes of an ONNX file that nobody told: of images, of others


@dataclass(frozen=True, slots=True)
class Network:
    """A network read from a file, and example arguments: empty where the program tells them. file:
    where it was read from, if that is an ONNX file."""

    model: ExportedProgram | fx.GraphModule
    args: tuple[Tensor, ...]
    file: Path | None = None

    @property
    def module(self) -> nn.Module:
        """The network as something that can be called."""
        if isinstance(self.model, ExportedProgram):
            return self.model.module(check_guards=False)
        return self.model


def read_network(path: Path, sizes: Sequence[str] | None = None) -> Network:
    """The network in a .pt2 file, an archive of demask or an ONNX file; raises BadInput for
    anything else. sizes: "name=number" for dynamic sizes of an ONNX file."""
    if path.suffix == ".onnx":
        return _read_onnx(path, _chosen(sizes or ()))
    if sizes:
        raise BadInput(f"--size is for ONNX files, and {path} is none; leave it out")
    model = read_model(path)
    if isinstance(model, ExportedProgram):
        return Network(model, ())
    record = cast(Provenance, model.demasked)
    return Network(model, tuple(map(example, record.inputs)))


def example(spec: InputSpec) -> Tensor:
    """A tensor of the input's example size: seeded normal numbers, or zeros in integer types."""
    if math.prod(spec.example) > MAX_EXAMPLE:
        raise BadInput(f"input {spec.name!r}: sizes {list(spec.example)} are too large: "
                       f"more than {MAX_EXAMPLE:,} elements")  # fmt: skip
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(spec.example, dtype=dtype)
    return torch.randn(spec.example, generator=torch.Generator().manual_seed(0)).to(dtype)


def _read_onnx(path: Path, sizes: Mapping[str, int]) -> Network:
    module = from_onnx(path)
    interface = cast(Interface, module.interface)
    known = {name for port in interface.inputs for name in _names(port) if name}
    if unknown := set(sizes) - known:
        has = ", ".join(sorted(known)) or "none"
        raise BadInput(f"--size {min(unknown)}: {path} has no such size; it has {has}")
    specs = [_spec(port, sizes) for port in interface.inputs]
    args = tuple(map(example, specs))
    return Network(remembering(capture(module, args)), args, path)


def _spec(port: Port, sizes: Mapping[str, int]) -> InputSpec:
    """An input of an ONNX file with numbers for its dynamic sizes."""
    if port.sizes is None or not isinstance(getattr(torch, port.dtype or "-", None), torch.dtype):
        raise BadInput(
            f"input {port.name!r}: expected a tensor of a known rank and type, got {port.dtype!r}; "
            "use demask.from_onnx(path) and give example inputs in Python"
        )
    made = []
    for axis, (size, name) in enumerate(zip(port.sizes, _names(port), strict=True)):
        guess = 1 if axis == 0 else IMAGE if len(port.sizes) == 4 and axis > 1 else LENGTH
        made.append(size if isinstance(size, int) else sizes.get(name, guess))
    return InputSpec(port.name, port.sizes, port.dtype, tuple(made))


def _names(port: Port) -> list[str]:
    """What --size calls each size: its name in the file, else the input and the axis."""
    return ["" if isinstance(size, int) else size or f"{port.name}_{axis}"
            for axis, size in enumerate(port.sizes or ())]  # fmt: skip


def _chosen(sizes: Sequence[str]) -> dict[str, int]:
    found = {}
    for text in sizes:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or not 0 < int(number) <= MAX_EXAMPLE:
            raise BadInput(f"expected --size NAME=NUMBER, such as --size batch=8, got {text!r}")
        found[name] = int(number)
    return found
