"""Reading the data that commands run networks on: arrays in files, folders of images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demask.cli.read_network import NetworkFile, NetworkInput, fitted, matched, ports_of
from demask.errors import BadInput
from demask.files.arrays import ARRAYS, read_arrays

BATCH = 32
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def check_same_inputs(a: NetworkFile, b: NetworkFile) -> None:
    """Raise BadInput where no call of one network can be a call of the other."""
    first, second = ports_of(a), ports_of(b)
    alike = len(first) == len(second) and all(
        p.dtype == q.dtype and p.agrees(q.sizes) for p, q in zip(first, second, strict=True)
    )
    if not alike:
        raise BadInput(f"cannot compare networks of different inputs: {_words(first)} against {_words(second)}")


def _words(ports: tuple[NetworkInput, ...]) -> str:
    return ", ".join(str(port) for port in ports) or "no tensors"


def read_inputs(path: Path, network: NetworkFile, batch: int = BATCH) -> list[tuple[Tensor, ...]]:
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
    arrays = matched(_read_arrays_or_read_images(path, ports[0]), ports, path)
    tensors = [fitted(arrays[port.name], port, path, start=1) for port in ports]
    if not all(tensor.ndim for tensor in tensors):
        raise BadInput(f"{path}: expected arrays whose first axes run over the inputs")
    counts = {len(tensor) for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        raise BadInput(f"{path}: expected as many of each input, one or more, got {sorted(counts)}")
    fixed = [n for n in (port.sizes[0] for port in ports) if isinstance(n, int)]
    step = min(fixed) if fixed else batch
    (count,) = counts
    if fixed and count % step:
        raise BadInput(
            f"{path}: the network takes {step} inputs at a time, got {count}; give a "
            "multiple, or export it with a dynamic dimension 0"
        )
    return [tuple(tensor[start : start + step] for tensor in tensors) for start in range(0, count, step)]


def _read_arrays_or_read_images(path: Path, first: NetworkInput) -> Mapping[str, Tensor]:
    if path.is_dir():
        return {first.name: _read_images(path, first)}
    if path.suffix not in ARRAYS:
        raise BadInput(f"expected a file {', '.join(ARRAYS)} or a folder of images, got {path}")
    return {name or first.name: array for name, array in read_arrays(path).items()}


def _read_images(folder: Path, port: NetworkInput) -> Tensor:
    """All images of a folder, in the order of their names, uint8 (N, channels, H, W)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"a folder of images needs Pillow ({error}): pip install pillow, or give a .npy file") from error
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES and p.is_file())
    if not paths:
        raise BadInput(f"{folder}: expected images ({', '.join(IMAGES)}), got none")
    mode = "L" if len(port.sizes) == 4 and port.sizes[1] == 1 else "RGB"
    images = []
    for path in paths:
        try:
            with Image.open(path) as image:
                pixels = np.array(image.convert(mode))
        except Exception as error:  # a decoder raises what it likes on a hostile file
            raise BadInput(f"{path}: cannot be read as an image: {error}") from error
        images.append(pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1))
        if images[-1].shape != images[0].shape:
            raise BadInput(
                f"{folder}: expected images of one size, got {images[0].shape[1:]} and "
                f"{images[-1].shape[1:]} ({path.name})"
            )
    return torch.from_numpy(np.stack(images))
