"""How the axes of a stored array are those of images: (N, C, H, W), (N, C, D, H, W), (N, C, L)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from demask.errors import BadInput
from demask.ops.regions import Interval
from demask.traverse.storage.boxes import Box

# Letters of other conventions: T time and P position (series of images), S samples, Z, Y, X. T next
# to N names the frames of videos, which a network takes together as it does D.
ALIASES = {"T": "N", "P": "N", "S": "C", "Z": "D", "Y": "H", "X": "W"}
KINDS = {len(kind): kind for kind in ("NCHW", "NCDHW", "NCL")}  # by rank


@dataclass(frozen=True, slots=True)
class AxisOrder:
    """The axes of an array of images.

    letters: of the images, one of KINDS. axes: for each letter the axis of the array, None for a
    letter that it lacks (size one). shape: of the images, without what `origin` leaves out. rank:
    of the array; its other axes have size one. origin: first position of the images, per letter.
    """

    letters: str
    axes: tuple[int | None, ...]
    shape: tuple[int, ...]
    rank: int
    origin: tuple[int, ...]

    @classmethod
    def of(cls, text: str, shape: Sequence[int], name: str = "the array") -> AxisOrder:
        """The order of an array of this shape whose axes are named by `text`, such as "HWC" or
        "TCZYX". Axes of size one may have any letter.

        Raises:
            BadInput: the letters do not fit the shape, or name no images.

        >>> AxisOrder.of("HWC", (64, 48, 3)).shape
        (1, 3, 64, 48)
        """
        letters = _our_letters(text.upper())
        if len(letters) != len(shape):
            raise BadInput(
                f"{name} has {len(shape)} axes {tuple(shape)}, layout={text!r} names "
                f"{len(letters)}; give one letter of N, C, D, H, W per axis"
            )
        wide = [letter for letter, size in zip(letters, shape, strict=True) if size != 1]
        kind = "NCL" if "L" in letters else "NCDHW" if "D" in wide else "NCHW"
        unknown = [letter for letter in wide if letter not in kind or wide.count(letter) > 1]
        missing = [letter for letter in kind[2:] if letter not in letters]
        if unknown or missing:
            raise BadInput(
                f"{name}: layout={text!r} of {tuple(shape)} "
                + (f"has the axis {unknown[0]} more than images do" if unknown else f"has no axis {missing[0]}")
                + '; expected letters such as "NCHW", "HWC" or "TCZYX"'
            )
        axes = tuple(_axis_of(letter, letters, shape) for letter in kind)
        sizes = tuple(1 if axis is None else int(shape[axis]) for axis in axes)
        return cls(kind, axes, sizes, len(shape), (0,) * len(kind))

    @classmethod
    def unchanged(cls, shape: Sequence[int]) -> AxisOrder:
        """The order of an array whose axes are those of the images, or of any other value."""
        dims, sizes = tuple(range(len(shape))), tuple(map(int, shape))
        return cls(usual_letters(len(sizes)), dims, sizes, len(sizes), (0,) * len(sizes))

    @property
    def text(self) -> str:
        """The letters of the array's axes, "." for other axes of size one."""
        named = dict(zip(self.axes, self.letters, strict=True))
        return "".join(named.get(k, ".") for k in range(self.rank))

    @property
    def box(self) -> Box:
        """The box of the array that has the images."""
        return self.in_array(tuple((0, size) for size in self.shape))

    def image(self, index: int | None) -> AxisOrder:
        """The order of one image; None for all."""
        return self if index is None else self.part({0: (index, index + 1)})

    def part(self, parts: Mapping[int, Interval]) -> AxisOrder:
        """The order of a part of the images: an interval for each of some letters, by their number."""
        shape, origin = list(self.shape), list(self.origin)
        for k, (first, end) in parts.items():
            shape[k], origin[k] = end - first, origin[k] + first
        return replace(self, shape=tuple(shape), origin=tuple(origin))

    def in_array(self, box: Box) -> Box:
        """A box of the images as a box of the array."""
        result = [(0, 1)] * self.rank
        for axis, (start, end), first in zip(self.axes, box, self.origin, strict=True):
            if axis is not None:
                result[axis] = start + first, end + first
        return tuple(result)

    def view_images(self, values: Tensor) -> Tensor:
        """Values of a box of the array, viewed as those of images."""
        pairs = [(1, 1) if axis is None else (values.shape[axis], values.stride(axis)) for axis in self.axes]
        return values.as_strided([size for size, _ in pairs], [step for _, step in pairs])

    def view_array(self, values: Tensor) -> Tensor:
        """The inverse of `view_images`."""
        sizes, steps = [1] * self.rank, [1] * self.rank
        for axis, size, step in zip(self.axes, values.shape, values.stride(), strict=True):
            if axis is not None:
                sizes[axis], steps[axis] = size, step
        return values.as_strided(sizes, steps)


def _our_letters(text: str) -> list[str]:
    """The letters of KINDS that the letters of other conventions stand for."""
    is_video = "N" in text and "T" in text and not {"D", "Z"} & set(text)
    aliases = ALIASES | ({"T": "D"} if is_video else {})
    return [aliases.get(letter, letter) for letter in text]


def _axis_of(letter: str, letters: Sequence[str], shape: Sequence[int]) -> int | None:
    """The axis of a letter: the one that is not of size one if several have it."""
    candidates = [k for k, other in enumerate(letters) if other == letter]
    return max(candidates, key=lambda k: shape[k] != 1) if candidates else None


def usual_order(shape: Sequence[int], name: str = "the array") -> AxisOrder:
    """The order of an array whose axes nobody named: N and C first, as in torch."""
    if len(shape) not in KINDS:
        raise BadInput(
            f"{name}: expected images (N, C, H, W), volumes (N, C, D, H, W) or "
            f"sequences (N, C, L), got {tuple(shape)}; name the axes: layout='HWC'"
        )
    return AxisOrder.unchanged(shape)


def usual_letters(rank: int) -> str:
    """The letters of a value of some rank: of images, or any."""
    return KINDS.get(rank, "NCABEFGIJKMOPQRU"[:rank])
