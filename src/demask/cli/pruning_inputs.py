"""What `demask prune` reads: labelled images (handwritten digits, zips and folders of class/name.jpg), and
a network (of a function of the user's, or a small one for digits) with its weights."""

from __future__ import annotations

import inspect
import io
import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput

DIGITS = "digits"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
TEST_FOLDERS = ("test", "val", "valid", "validation")
MAX_BYTES, MAX_PIXELS = 64 << 20, 1 << 26  # of a file, and of its picture
TEST_SHARE = 0.2  # of images that come without a test set
DIGITS_WIDTH = 24  # of the built-in network: its training takes seconds
COUNTS = ("num_classes", "classes", "n_classes")  # parameters that take the number of classes


@dataclass(frozen=True, slots=True)
class LabelledImages:
    """Images, uint8 (n, channels, rows, columns), and their classes, int64 (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: Tensor) -> LabelledImages:
        """The images at these positions."""
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
    train = _read_classes(path, side)
    names = tuple(sorted(train))
    if len(names) < 2:
        raise BadInput(f"{path} has the classes {list(names)}: expected two or more, a folder for each, class/name.jpg")
    if test is None:
        both = _stack_images(train, names, path)
        order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
        tested, rest = order.tensor_split([max(int(TEST_SHARE * len(both)), 1)])
        return ImageData(both.rows(rest), both.rows(tested), names)
    tested = _read_classes(test, side)
    if unknown := sorted(set(tested) - set(names)):
        raise BadInput(f"{test} has classes that {path} lacks: {', '.join(unknown[:3])}")
    return ImageData(_stack_images(train, names, path), _stack_images(tested, names, test), names)


def _read_digits(seed: int) -> ImageData:
    from demask.cli.digits import load_digits

    digits = load_digits(seed=seed)
    train, test = (
        LabelledImages((255 * images).round().to(torch.uint8), labels)
        for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels))
    )
    return ImageData(train, test, tuple(map(str, range(10))))


def _read_classes(path: Path, side: int | None) -> dict[str, list[np.ndarray]]:
    """The images of each class, (rows, columns, 3) each, by the name of its folder."""
    images: dict[str, list[np.ndarray]] = {}
    for name, data in _image_files(path):
        images.setdefault(PurePosixPath(name).parent.name, []).append(_decode(data, name, side))
    if not images:
        raise BadInput(f"{path} has no images: expected a folder for each class, class/name.jpg")
    if "" in images:
        raise BadInput(f"{path} has images outside of folders: expected class/name.jpg")
    return images


def _image_files(path: Path) -> Iterator[tuple[str, bytes]]:
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


def _decode(data: bytes, name: str, side: int | None) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(f"image files need Pillow ({error}): pip install pillow") from error
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BadInput(f"{name}: {picture.width} x {picture.height} pixels are too many")
            colored = picture.convert("RGB")
            if side is not None and colored.size != (side, side):
                colored = colored.resize((side, side), Image.Resampling.BILINEAR)
            return np.asarray(colored)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{name}: not an image that Pillow reads ({error})") from error


def _stack_images(images: dict[str, list[np.ndarray]], names: tuple[str, ...], path: Path) -> LabelledImages:
    sizes = {array.shape for arrays in images.values() for array in arrays}
    if len(sizes) > 1:
        few = ", ".join(f"{h} x {w}" for h, w, _ in sorted(sizes)[:3])
        raise BadInput(f"{path} has images of several sizes ({few}): expected one; resize them with --side 32")
    stacked = np.stack([array for name in names for array in images.get(name, [])])
    labels = [k for k, name in enumerate(names) for _ in images.get(name, [])]
    return LabelledImages(torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels))


def build_network(function: str | None, classes: int, channels: int) -> nn.Module:
    """A network with as many outputs as classes.

    function: "module:function" (or a class), called with the number of classes if it has a
    parameter for it (num_classes, classes) or takes any keyword; else without arguments. None for
    the built-in network, which takes images of one channel (digits). Raises BadInput where there is
    no such function, or it returns no network.
    """
    if function is None:
        if channels != 1:
            raise BadInput("expected --network MODULE:FUNCTION for images in color; the built-in network reads digits")
        from demask.cli.digits import DigitNet

        return DigitNet(DIGITS_WIDTH)
    build = _import_function(function)
    try:
        network = build(**_class_count_argument(build, classes))
    except Exception as error:  # the user's code
        raise BadInput(f"--network {function} failed: {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise BadInput(f"expected --network {function} to return an nn.Module, got {type(network).__name__}")
    return network


def _import_function(text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise BadInput(f"expected --network MODULE:FUNCTION, such as torchvision.models:resnet18, got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"--network {text}: {error}") from error


def _class_count_argument(build: Any, classes: int) -> dict[str, int]:
    try:
        parameters = inspect.signature(build).parameters
    except ValueError:  # of a built-in
        return {}
    name = next((name for name in COUNTS if name in parameters), None)
    if name is None and any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = COUNTS[0]
    return {name: classes} if name else {}


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a state dict into a network, in place: .safetensors, or .pt and .pth of tensors alone.

    Counters of batch norms may be missing. Raises BadInput for a file of another network.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, weights_only=True)
        absent, unknown = network.load_state_dict(state, strict=False)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # of a pickle, a header, or shapes that differ
        first = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise BadInput(f"{path} does not fit the network: {first}") from error
    absent = [name for name in absent if not name.endswith("num_batches_tracked")]
    if absent or unknown:
        word, names = ("lacks", absent) if absent else ("has unknown", unknown)
        raise BadInput(f"{path} does not fit the network: it {word} {', '.join(names[:3])}")
