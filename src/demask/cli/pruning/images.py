"""Labelled images of `demask prune`: handwritten digits; zips and folders of class/name.jpg."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput

DIGITS = "digits"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
TEST_FOLDERS = ("test", "val", "valid", "validation")
MAX_BYTES, MAX_PIXELS = 64 << 20, 1 << 26  # of a file, and of its picture
TEST_SHARE = 0.2  # of images that come without a test set


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Images, uint8 (n, channels, rows, columns), and their classes, int64 (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Tensor) -> LabelledImages:
        """The images at these places."""
        return LabelledImages(self.images[index], self.labels[index])


@dataclass(frozen=True, slots=True)
class ImageData:
    """Images to train with and, never seen in training, to test; and the names of the classes."""

    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]


def read_images(source: str, test: Path | None, side: int | None, seed: int) -> ImageData:
    """The images of a source.

    Args:
        source: "digits" for scikit-learn's bundled scans; or a zip or folder of class/name.jpg. A
            folder may have such folders in `train` and `test` (or `val`).
        test: a zip or folder of test images; None for the source's own, or a fifth of the images,
            drawn by `seed`.
        side: resize to side x side pixels; None where all images have one size.

    Raises:
        BadInput: no images, images of several sizes, or a package is missing.
    """
    if source == DIGITS:
        return _read_digits(seed)
    path = Path(source)
    if test is None and path.is_dir():
        inner = next((path / name for name in TEST_FOLDERS if (path / name).is_dir()), None)
        if inner is not None and (path / "train").is_dir():
            path, test = path / "train", inner
    train = _read(path, side)
    names = tuple(sorted(train))
    if len(names) < 2:
        raise BadInput(f"{path} has the classes {list(names)}: expected two or more, a folder for each, class/name.jpg")
    if test is None:
        whole = _stacked(train, names, path)
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed))
        tested, rest = order.tensor_split([max(int(TEST_SHARE * len(whole)), 1)])
        return ImageData(whole.rows(rest), whole.rows(tested), names)
    tested = _read(test, side)
    if unknown := sorted(set(tested) - set(names)):
        raise BadInput(f"{test} has classes that {path} lacks: {', '.join(unknown[:3])}")
    return ImageData(_stacked(train, names, path), _stacked(tested, names, test), names)


def _read_digits(seed: int) -> ImageData:
    from demask.cli.demo.digits import load_digits

    digits = load_digits(seed=seed)
    train, test = (
        LabelledImages((255 * images).round().to(torch.uint8), labels)
        for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels))
    )
    return ImageData(train, test, tuple(map(str, range(10))))


def _read(path: Path, side: int | None) -> dict[str, list[np.ndarray]]:
    """The images of each class, (rows, columns, 3) each, by the name of its folder."""
    images: dict[str, list[np.ndarray]] = {}
    for name, data in _files(path):
        images.setdefault(PurePosixPath(name).parent.name, []).append(_decoded(data, name, side))
    if not images:
        raise BadInput(f"{path} has no images: expected a folder for each class, class/name.jpg")
    if "" in images:
        raise BadInput(f"{path} has images outside of folders: expected class/name.jpg")
    return images


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the image files in a folder or zip, by name."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in SUFFIXES and file.is_file():
                yield file.relative_to(path).as_posix(), file.read_bytes()
        return
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise BadInput(
            f'no such folder or file: {path}; expected a folder or zip of class/name.jpg, or the word "{DIGITS}"'
        ) from error
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: expected a zip of class/name.jpg ({error})") from error
    with archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            if PurePosixPath(entry.filename).suffix.lower() in SUFFIXES:
                if entry.file_size > MAX_BYTES:
                    raise BadInput(f"{path}: {entry.filename} has {entry.file_size:,} bytes, more than {MAX_BYTES:,}")
                yield entry.filename, _read_entry(archive, entry, path)


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> bytes:
    try:
        return archive.read(entry)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise BadInput(f"{path}: {entry.filename} is damaged or encrypted ({error}): copy the zip again") from error


def _decoded(data: bytes, name: str, side: int | None) -> np.ndarray:
    image = _pillow()
    try:
        with image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BadInput(f"{name}: {picture.width} x {picture.height} pixels are too many")
            colored = picture.convert("RGB")
            if side is not None and colored.size != (side, side):
                colored = colored.resize((side, side), image.Resampling.BILINEAR)
            return np.asarray(colored)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{name}: not an image that Pillow reads ({error})") from error


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"image files need Pillow ({error}): pip install pillow") from error
    return Image


def _stacked(images: dict[str, list[np.ndarray]], names: tuple[str, ...], path: Path) -> LabelledImages:
    sizes = {array.shape for arrays in images.values() for array in arrays}
    if len(sizes) > 1:
        few = ", ".join(f"{h} x {w}" for h, w, _ in sorted(sizes)[:3])
        raise BadInput(f"{path} has images of several sizes ({few}): expected one; resize them with --side 32")
    stacked = np.stack([array for name in names for array in images.get(name, [])])
    labels = [k for k, name in enumerate(names) for _ in images.get(name, [])]
    return LabelledImages(torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))
