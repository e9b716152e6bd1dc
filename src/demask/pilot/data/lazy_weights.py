"""Networks whose weights stay in a file until they are needed: archives of demask, safetensors.

The network is captured with hollow tensors: of the right shapes, zeros that take no memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from demask.errors import BadInput
from demask.files.archive import Outline, outline
from demask.files.weight_file import StoredTensor, WeightFile, with_weights
from demask.graph.program import Program


class ConstantSource(Protocol):
    """Reads the constants of a program from memory or a file."""

    def nbytes(self, name: str) -> int:
        """Bytes of a constant."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These constants, in memory."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedConstants:
    """Constants that are in memory anyway."""

    program: Program

    def nbytes(self, name: str) -> int:
        return self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.program.constants[name].tensor for name in names}


@dataclass(frozen=True, slots=True)
class Filed:
    """Constants in a file; those that the capture added are in memory.

    places: by name, the tensor in the file and the order of its axes there.
    """

    program: Program
    file: WeightFile
    places: Mapping[str, tuple[StoredTensor, tuple[int, ...]]]

    def nbytes(self, name: str) -> int:
        stored = self.places.get(name)
        return stored[0].nbytes if stored else self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        if name not in self.places:
            return self.program.constants[name].tensor
        stored, order = self.places[name]
        back = [order.index(axis) for axis in range(len(order))]
        return self.file.tensor(stored).permute(back)


def stored_source(network: Outline, program: Program) -> Filed:
    """Where the constants of a program are stored that was captured from an outlined network."""
    places = {}
    for key, constant in program.constants.items():
        names = (key, constant.name, *constant.aliases)
        name = next((n for n in names if n in network.places), None)
        if name is not None:
            places[key] = network.places[name]
    return Filed(program, network.file, places)


def outlined(model: nn.Module | str | os.PathLike[str], weights: Any) -> Outline:
    """A network and its file: a .demask archive, or a module and a .safetensors file of its names.

    Raises BadInput where the file does not fit, RefusedFile for an unsafe one.
    """
    if isinstance(model, nn.Module):
        file = WeightFile.read(weights)
        copy, places = with_weights(model, file, StoredTensor.hollow)
        orders = {name: (t, tuple(range(len(t.shape)))) for name, t in places.items()}
        return Outline(copy, file, orders)
    path = Path(model)
    if path.suffix == ".pt2":
        raise BadInput(
            f"{path}: a .pt2 is read as a whole; to run it slice by slice, write it "
            "as .demask once: demask.save(demask.demask(program), path)"
        )
    return outline(path)
