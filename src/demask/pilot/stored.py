"""Networks whose weights stay in a file until they are needed: archives of demask, safetensors.

The network is captured with hollow tensors: of the right shapes, zeros that take no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.files.archive import outline
from demask.graph.copying import structural_copy
from demask.graph.program import Program
from demask.traverse.weights import Stored, WeightFile


class Source(Protocol):
    """Where the constants of a program come from."""

    def nbytes(self, name: str) -> int:
        """Bytes of a constant."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These constants, in memory."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """Constants that are in memory anyway."""

    program: Program

    def nbytes(self, name: str) -> int:
        return self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.program.constants[name].tensor for name in names}


@dataclass(frozen=True, slots=True)
class Filed:
    """Constants in a file; those that it has not (made by the capture) are in memory.

    places: by name, the tensor in the file and the order of its axes there.
    """

    program: Program
    file: WeightFile
    places: Mapping[str, tuple[Stored, tuple[int, ...]]]

    def nbytes(self, name: str) -> int:
        held = self.places.get(name)
        return held[0].nbytes if held else self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        if name not in self.places:
            return self.program.constants[name].tensor
        stored, order = self.places[name]
        back = [order.index(axis) for axis in range(len(order))]
        return self.file.tensor(stored).permute(back)


@dataclass(frozen=True, slots=True)
class Outlined:
    """A network with hollow tensors, and where those of each name lie."""

    model: nn.Module
    file: WeightFile
    places: Mapping[str, tuple[Stored, tuple[int, ...]]]

    def source(self, program: Program) -> Filed:
        """Where the constants of the captured program come from."""
        found = {}
        for key, constant in program.constants.items():
            names = (key, constant.name, *constant.aliases)
            name = next((n for n in names if n in self.places), None)
            if name is not None:
                found[key] = self.places[name]
        return Filed(program, self.file, found)


def outlined(model: nn.Module | str | os.PathLike[str], weights: Any) -> Outlined:
    """A network and its file: a .demask archive, or a module and a .safetensors file of its names.

    BadInput where the file does not fit; RefusedFile.
    """
    if isinstance(model, nn.Module):
        return _with_file(model, WeightFile.read(weights))
    path = Path(model)
    if path.suffix == ".pt2":
        raise BadInput(f"{path}: a .pt2 is read as a whole; to run it slice by slice, write it "
                       "as .demask once: demask.save(demask.demask(program), path)")  # fmt: skip
    found = outline(path)
    file = WeightFile.read(path, found.start)
    places = {name: (file.tensors[key], order) for name, (key, order) in found.stored.items()}
    return Outlined(found.slim, file, places)


def _with_file(model: nn.Module, file: WeightFile) -> Outlined:
    """A copy of the module whose tensors are hollow where the file has them."""
    copy, places = structural_copy(model, share=True), {}
    made: dict[int, Any] = {}
    for path, module in copy.named_modules(remove_duplicate=False):
        pools: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in pools:
            for leaf, tensor in list(slots.items()):
                name = f"{path}.{leaf}".lstrip(".")
                stored = file.tensors.get(name)
                if tensor is None or stored is None:
                    continue
                _check(file, name, stored, tensor)
                places[name] = (stored, tuple(range(len(stored.shape))))
                slots[leaf] = made.setdefault(id(tensor), _hollow(tensor, stored))
    _check_all(copy, file)
    return Outlined(copy, file, places)


def _hollow(tensor: Tensor, stored: Stored) -> Tensor:
    made = torch.zeros((), dtype=stored.dtype).expand(stored.shape)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def _check(file: WeightFile, name: str, stored: Stored, tensor: Tensor) -> None:
    if stored.shape != tuple(tensor.shape) or stored.dtype != tensor.dtype:
        raise BadInput(
            f"{file.path}: expected {name!r} to be {tuple(tensor.shape)} of {tensor.dtype}, as in "
            f"the model, got {stored.shape} of {stored.dtype}"
        )


def _check_all(copy: nn.Module, file: WeightFile) -> None:
    """Raise BadInput for a tensor on the meta device that the file does not have."""
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        if tensor.is_meta:
            raise BadInput(f"{file.path}: expected a tensor {name!r}, which the model has on the "
                           "meta device only; write it to the file too")  # fmt: skip
