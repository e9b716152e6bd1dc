"""How the axes of a stored array are those of images: (N, C, H, W), (N, C, D, H, W), (N, C, L)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from demask.errors import BadInput
from demask.traverse.storage.boxes import Box

# Letters of other conventions: T time and P position (series of images), S samples, Z, Y, X. T next
# to N names the frames of videos, which a network takes together as it does D.
ALIASES = {"T": "N", "P": "N", "S": "C", "Z": "D", "Y": "H", "X": "W"}
KINDS = ("NCHW", "NCDHW", "NCL")


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
        letters = _letters(text.upper())
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

    @property
    def text(self) -> str:
        """The letters of the array's axes, "." for other axes of size one."""
        named = dict(zip(self.axes, self.letters, strict=True))
        return "".join(named.get(k, ".") for k in range(self.rank))

    def region(self, rows: tuple[int, int], columns: tuple[int, int]) -> AxisOrder:
        """The order of a part of each image: its first and end row, first and end column."""
        shape, origin = list(self.shape), list(self.origin)
        for k, (first, end) in zip((-2, -1), (rows, columns), strict=True):
            shape[k], origin[k] = end - first, origin[k] + first
        return replace(self, shape=tuple(shape), origin=tuple(origin))

    def in_array(self, box: Box) -> Box:
        """A box of the images as a box of the array."""
        result = [(0, 1)] * self.rank
        for axis, (start, end), first in zip(self.axes, box, self.origin, strict=True):
            if axis is not None:
                result[axis] = start + first, end + first
        return tuple(result)

    def in_images(self, box: Box) -> Box:
        """A box of the array as a box of the images."""
        return tuple(
            (0, 1) if axis is None else (box[axis][0] - first, box[axis][1] - first)
            for axis, first in zip(self.axes, self.origin, strict=True)
        )

    def view_images(self, values: Tensor) -> Tensor:
        """Values of a box of the array, viewed as those of images."""
        present = [axis for axis in self.axes if axis is not None]
        for axis in sorted(set(range(self.rank)) - set(present), reverse=True):
            values = values.squeeze(axis)
        ranks = {axis: k for k, axis in enumerate(sorted(present))}
        values = values.permute([ranks[axis] for axis in present])
        for k, axis in enumerate(self.axes):
            if axis is None:
                values = values.unsqueeze(k)
        return values

    def array_shape(self) -> tuple[int, ...]:
        """The shape of an array of these images."""
        sizes = [1] * self.rank
        for axis, size in zip(self.axes, self.shape, strict=True):
            if axis is not None:
                sizes[axis] = size
        return tuple(sizes)


def _letters(text: str) -> list[str]:
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
    kinds = {len(kind): kind for kind in KINDS}
    if len(shape) not in kinds:
        raise BadInput(
            f"{name}: expected images (N, C, H, W), volumes (N, C, D, H, W) or "
            f"sequences (N, C, L), got {tuple(shape)}; name the axes: layout='HWC'"
        )
    kind = kinds[len(shape)]
    sizes = tuple(map(int, shape))
    return AxisOrder(kind, tuple(range(len(kind))), sizes, len(kind), (0,) * len(kind))
