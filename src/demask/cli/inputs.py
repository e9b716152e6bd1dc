"""Reading the data that commands run networks on: arrays in files, folders of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from demask.cli.models import Network, example
from demask.errors import BadInput
from demask.files.arrays import ARRAYS, read_arrays
from demask.graph.provenance import InputSpec

BATCH = 32
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class Port:
    """An input of a network: its name, its sizes (None: dynamic) and its type."""

    name: str
    sizes: tuple[int | None, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = ", ".join("any" if n is None else str(n) for n in self.sizes)
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} [{sizes}]"


def ports_of(network: Network) -> tuple[Port, ...]:
    """The inputs of a network that was read from a file."""
    if isinstance(network.model, ExportedProgram):
        users = set(network.model.graph_signature.user_inputs)
        nodes = [n for n in network.model.graph.nodes if n.op == "placeholder" and n.name in users]
        values = {n.name: n.meta.get("val") for n in nodes}
        found = [(n, v) for n, v in values.items() if isinstance(v, Tensor)]
        return tuple(Port(n, _sizes(v.shape), v.dtype) for n, v in found)
    specs: Any = network.model.demasked
    return tuple(Port(s.name, _sizes(s.sizes), getattr(torch, s.dtype)) for s in specs.inputs)


def check_same_inputs(a: Network, b: Network) -> None:
    """Raise BadInput where no call of one network can be a call of the other."""
    first, second = ports_of(a), ports_of(b)
    if len(first) != len(second) or not all(map(_agree, first, second)):
        raise BadInput(f"cannot compare networks of different inputs: {_words(first)} "
                       f"against {_words(second)}")  # fmt: skip


def _agree(a: Port, b: Port) -> bool:
    if a.dtype != b.dtype or len(a.sizes) != len(b.sizes):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(a.sizes, b.sizes, strict=True))


def _words(ports: tuple[Port, ...]) -> str:
    return ", ".join(str(port) for port in ports) or "no tensors"


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(n if isinstance(n, int) else None for n in shape)


def read_inputs(path: Path, network: Network, batch: int = BATCH) -> list[tuple[Tensor, ...]]:
    """The calls that the data in `path` makes of a network: inputs in batches of its own size, or
    of `batch` where that is dynamic.

    path: .npy (one input), .npz or .safetensors (an array for each input, by name, or in order),
    or a folder of images, which become RGB (or grey) numbers from 0 to 1. First axes run over the
    inputs; numbers of uint8 become x / 255 for networks that take floating ones. BadInput where
    they do not fit.
    """
    ports = ports_of(network)
    if not ports:
        raise BadInput("the network takes no tensors")
    arrays = _matched(_arrays(path, ports[0]), ports, path)
    tensors = [_fitted(array, port, path) for array, port in zip(arrays, ports, strict=True)]
    counts = {len(tensor) for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(f"{path}: expected as many of each input, one or more, got {sorted(counts)}")
    fixed = {port.sizes[0] for port in ports} - {None}
    step = int(min(n for n in fixed if n is not None)) if fixed else batch
    (count,) = counts
    if fixed and count % step:
        raise BadInput(f"{path}: the network takes {step} inputs at a time, got {count}; give a "
                       "multiple, or export it with a dynamic dimension 0")  # fmt: skip
    return list(_batches(tensors, count, step))


def example_of(network: Network) -> tuple[Tensor, ...]:
    """Example inputs of a network that was read from a file: seeded, of its sizes, dynamic ones 1
    at first and 16 behind."""
    if network.args:
        return network.args
    specs = (
        InputSpec(p.name, (), str(p.dtype).removeprefix("torch."),
                  tuple(n or (16 if k else 1) for k, n in enumerate(p.sizes)))
        for p in ports_of(network)
    )  # fmt: skip
    return tuple(map(example, specs))


def _batches(tensors: list[Tensor], count: int, step: int) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, count, step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def _arrays(path: Path, first: Port) -> Mapping[str, Tensor]:
    """The arrays in a file or folder, by name."""
    if path.is_dir():
        return {first.name: _images(path, first)}
    if path.suffix not in ARRAYS:
        raise BadInput(f"expected a file {', '.join(ARRAYS)} or a folder of images, got {path}")
    return {name or first.name: array for name, array in read_arrays(path).items()}


def _matched(arrays: Mapping[str, Tensor], ports: tuple[Port, ...], path: Path) -> list[Tensor]:
    """One array for each input: by name, else in order."""
    names = [port.name for port in ports]
    if set(names) <= set(arrays):
        return [arrays[name] for name in names]
    if len(arrays) != len(ports):
        raise BadInput(f"{path}: expected arrays for {names}, got {list(arrays)}")
    return list(arrays.values())


def _fitted(array: Tensor, port: Port, path: Path) -> Tensor:
    """An array in the type and of the sizes of an input."""
    if port.dtype.is_floating_point and array.dtype == torch.uint8:
        array = array.to(port.dtype) / 255
    elif port.dtype.is_floating_point and array.is_floating_point():
        array = array.to(port.dtype)
    elif array.dtype != port.dtype and not port.dtype.is_floating_point:
        array = array.to(port.dtype) if not array.is_floating_point() else array
    shape = list(array.shape)
    fits = array.dtype == port.dtype and len(shape) == len(port.sizes) > 0
    if not fits or any(n not in (None, m) for n, m in zip(port.sizes[1:], shape[1:], strict=True)):
        kind = str(array.dtype).removeprefix("torch.")
        raise BadInput(f"{path}: expected input {port}, got {kind} {shape}")  # fmt: skip
    return array


def _images(folder: Path, port: Port) -> Tensor:
    """All images of a folder, in the order of their names, uint8 (N, channels, H, W)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"a folder of images needs Pillow ({error}): pip install pillow, or give "
                       "a .npy file") from error  # fmt: skip
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES and p.is_file())
    if not paths:
        raise BadInput(f"{folder}: expected images ({', '.join(IMAGES)}), found none")
    mode = "L" if len(port.sizes) == 4 and port.sizes[1] == 1 else "RGB"
    found = []
    for path in paths:
        try:
            with Image.open(path) as image:
                pixels = np.array(image.convert(mode))
        except Exception as error:  # a decoder raises what it likes on a hostile file
            raise BadInput(f"{path}: cannot be read as an image: {error}") from error
        found.append(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1))
        if found[-1].shape != found[0].shape:
            raise BadInput(f"{folder}: expected images of one size, got {found[0].shape[1:]} and "
                           f"{found[-1].shape[1:]} ({path.name})")  # fmt: skip
    return torch.from_numpy(np.stack(found))
