"""Zarr arrays, version 3, with the metadata of OME-NGFF 0.5 (https://ngff.openmicroscopy.org/0.5).

A result is a group of levels, each half as large as the one before it. A chunk of a level is the
mean of one chunk of the level before it, so that each is written once, by whoever writes the first
level, and no two writers share a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.dtype_conversion import name_of
from demask.traverse.storage.store import EDGE, ArrayInfo, SliceStore, first_line

SMALLEST = 32  # rows of a chunk of the last level
TYPES = {
    "N": ("t", "time"),
    "C": ("c", "channel"),
    "D": ("z", "space"),
    "H": ("y", "space"),
    "W": ("x", "space"),
    "L": ("x", "space"),
}


def open_store(path: Path) -> SliceStore:
    """The array at a path, or the largest level of an OME-NGFF group there."""
    try:
        node = zarr.open(str(path), mode="r")
    except Exception as error:  # of many types, by what is missing or damaged
        raise BadInput(f"{path}: expected a Zarr array or group: {first_line(error)}") from error
    if isinstance(node, zarr.Array):
        names: Any = getattr(node.metadata, "dimension_names", None)
        known = names and all(isinstance(n, str) and len(n) == 1 for n in names)
        return SliceStore.of(node, str(path), layout="".join(names).upper() if known else None)
    attributes: dict[str, Any] = dict(node.attrs)
    scales = (attributes.get("ome", attributes).get("multiscales") or [None])[0]
    if not isinstance(scales, dict) or not scales.get("datasets"):
        raise BadInput(f"{path}: this Zarr group has no images of OME-NGFF; name an array in it")
    return _largest_level(node, scales, str(path))


def _largest_level(group: zarr.Group, scales: dict[str, Any], name: str) -> SliceStore:
    dataset = scales["datasets"][0]
    try:
        array: Any = group[dataset["path"]]
        axes = [axis if isinstance(axis, dict) else {"name": axis} for axis in scales["axes"]]
        letters = "".join(axis["name"] for axis in axes).upper()
    except (KeyError, TypeError) as error:
        raise BadInput(f"{name}: its OME-NGFF metadata lacks {error}") from error
    transforms = dataset.get("coordinateTransformations", ())
    sizes = next((t["scale"] for t in transforms if t.get("type") == "scale"), [1.0] * len(letters))
    to_ours = {other.upper(): ours for ours, (other, _) in TYPES.items() if ours != "L"}
    scale = {
        to_ours[letter]: (float(size), axis.get("unit"))
        for letter, size, axis in zip(letters, sizes, axes, strict=True)
        if letter in to_ours
    }
    return SliceStore.of(array, name, layout=letters, metadata={"scale": scale})


class Pyramid:
    """The levels of a result, written together, in boxes of full chunks."""

    def __init__(self, levels: Sequence[Any], info: ArrayInfo):
        self.levels, self.info = levels, info
        self.shape, self.dtype, self.chunks = levels[0].shape, levels[0].dtype, levels[0].chunks

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        return self.levels[0][index]

    def __setitem__(self, index: tuple[slice, ...], values: np.ndarray) -> None:
        level, letters = torch.from_numpy(values), self.info.letters
        self.levels[0][index] = values
        for array in self.levels[1:]:
            level = halve(level, letters, bool(self.info.metadata.get("labels")))
            index = tuple(
                slice(part.start // 2, part.start // 2 + size) if letter in "HW" else part
                for part, size, letter in zip(index, level.shape, letters, strict=True)
            )
            array[index] = level.numpy()


def halve(values: Tensor, letters: str, is_labels: bool = False) -> Tensor:
    """Values at half the rows and columns: means of 2 x 2, or every second label. At an odd end the
    mean is of the positions that are there."""
    for axis, letter in enumerate(letters):
        if letter not in "HW":
            continue
        even = values.index_select(axis, torch.arange(0, values.shape[axis], 2))
        if is_labels:
            values = even
            continue
        last = values.shape[axis] - 1
        odd = torch.arange(1, values.shape[axis] + 1, 2).clamp(max=last)
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        mean = (even.to(wide) + values.index_select(axis, odd).to(wide)) / 2
        values = mean if values.dtype.is_floating_point else mean.round()
        values = values.to(even.dtype)
    return values.contiguous()


def letters(images: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The axes in the order of OME-NGFF, t c z y x, without a single image's N."""
    return "".join(k for k in images if k != "N" or shape[images.index("N")] > 1)


def _level_sizes(info: ArrayInfo) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and chunks of each level."""
    assert info.chunks is not None
    shape, chunk = info.shape, info.chunks
    sizes = [(shape, chunk)]
    spatial = [k for k, letter in enumerate(info.letters) if letter in "HW"]
    while (
        all(chunk[k] >= 2 * SMALLEST and chunk[k] % 2 == 0 for k in spatial)
        and spatial
        and max(shape[k] for k in spatial) > EDGE
    ):
        shape, chunk = (
            tuple(-(-n // 2) if k in spatial else n for k, n in enumerate(sizes_)) for sizes_ in (shape, chunk)
        )
        sizes.append((shape, chunk))
    return sizes


def create(path: Path, info: ArrayInfo) -> None:
    """Create a group with its levels and metadata."""
    try:
        group = zarr.open_group(str(path), mode="w-", zarr_format=3)
        levels = _level_sizes(info)
        names = [TYPES[letter][0] for letter in info.letters]
        for number, (shape, chunk) in enumerate(levels):
            group.create_array(str(number), shape=shape, chunks=chunk, dtype=name_of(info.dtype), dimension_names=names)
        group.attrs["ome"] = {"version": "0.5", "multiscales": [_multiscales(info, len(levels))]}
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: {first_line(error)}") from error


def _multiscales(info: ArrayInfo, levels: int) -> dict[str, Any]:
    scale: Mapping[str, tuple[float, str | None]] = info.metadata.get("scale", {})
    axes = []
    for letter in info.letters:
        name, kind = TYPES[letter]
        unit = scale.get(letter, (1.0, None))[1]
        axes.append({"name": name, "type": kind} | ({"unit": unit} if unit else {}))
    datasets = []
    for level in range(levels):
        sizes = [scale.get(letter, (1.0, None))[0] * (2**level if letter in "HW" else 1) for letter in info.letters]
        transform = {"type": "scale", "scale": [float(size) for size in sizes]}
        datasets.append({"path": str(level), "coordinateTransformations": [transform]})
    kind = "nearest" if info.metadata.get("labels") else "mean"
    return {"name": "result", "axes": axes, "datasets": datasets, "type": kind}


def open_again(path: Path, info: ArrayInfo) -> SliceStore:
    """The levels, open for writing."""
    group: Any = zarr.open_group(str(path), mode="r+")
    return SliceStore.of(Pyramid([group[str(k)] for k in range(len(_level_sizes(info)))], info), str(path))
