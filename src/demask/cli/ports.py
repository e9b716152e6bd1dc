"""The inputs of networks as commands see them: names, sizes, types, and arrays that fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.graph.provenance import NAMELESS


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """An input of a network: its name, its sizes (dynamic ones by name) and its type."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, sizes: Sequence[int | str], dtype: torch.dtype) -> NetworkInput:
        """With INPUT.AXIS as the names of dynamic sizes that have none."""
        named = (f"{name}.{k}" if n in NAMELESS else n for k, n in enumerate(sizes))
        return cls(name, tuple(named), dtype)

    def __str__(self) -> str:
        sizes = ", ".join("any" if isinstance(n, str) else str(n) for n in self.sizes)
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} [{sizes}]"

    def agrees(self, shape: Sequence[int | str], start: int = 0) -> bool:
        """Whether fixed sizes are alike, from an axis on."""
        if len(shape) != len(self.sizes):
            return False
        pairs = zip(self.sizes[start:], shape[start:], strict=True)
        return all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in pairs)


def matched(arrays: Mapping[str, Tensor], ports: Sequence[NetworkInput], path: Path) -> dict[str, Tensor]:
    """One array for each input: by name, else in order."""
    names = [port.name for port in ports]
    if set(names) <= set(arrays):
        return {name: arrays[name] for name in names}
    if len(arrays) != len(ports):
        raise BadInput(f"{path}: expected arrays for {names}, got {list(arrays)}")
    return dict(zip(names, arrays.values(), strict=True))


def fitted(array: Tensor, port: NetworkInput, path: Path, start: int = 0) -> Tensor:
    """An array in the type of an input; BadInput where its sizes, from axis `start` on, or its type
    do not fit. Numbers of uint8 become x / 255 for an input of floating ones."""
    kind = str(array.dtype).removeprefix("torch.")
    if port.dtype.is_floating_point and array.dtype == torch.uint8:
        array = array.to(port.dtype) / 255
    elif port.dtype.is_floating_point == array.is_floating_point():
        array = array.to(port.dtype)
    if array.dtype != port.dtype or not port.agrees(array.shape, start):
        raise BadInput(f"{path}: expected input {port}, got {kind} {list(array.shape)}")
    return array
