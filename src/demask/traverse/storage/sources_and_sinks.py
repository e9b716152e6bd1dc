"""Sources and sinks of the parts of a value: tensors, and temporary files.

Arrays outside of memory are `stored_ends`; `dtype_conversion` converts numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.traverse.axes import Axes, Window, order, strides
from demask.traverse.storage.boxes import LIMIT, Box, box_of, elements, extents, pieces, view, within
from demask.traverse.storage.dense_file import Descriptor, FileLayout, fetch, named, reserve, store, temporary
from demask.traverse.storage.dtype_conversion import assign, check_conversion, convert, scratch_size, work_dtype
from demask.traverse.storage.stores.store import torch_dtype


class RowSource(Protocol):
    """A value whose parts can be read."""

    def read(self, window: Window, into: Tensor) -> None:
        """Fill `into`, in the layout of parts, with the positions of a window."""
        ...


class Sink(Protocol):
    """A value whose parts can be written: each position once, in any order."""

    def write(self, window: Window, part: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _TensorEnd:
    """Base class. axes: of the value. index: of an image in a batch, or None.

    `workspace` of a subclass: bytes that it allocates to read or write a window.
    """

    axes: Axes
    index: int | None
    tensor: Tensor

    def image(self, index: int) -> Self:
        """The source or sink of one image of the batch."""
        return replace(self, index=index)

    def placed(self, axes: Axes) -> Self:
        """The source or sink with the axes of rows and columns."""
        return replace(self, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the image, or of the batch."""
        whole = tuple(self.tensor.shape)
        return whole if self.index is None else (1, *whole[1:])

    def _in_batch(self, box: Box) -> Box:
        """A box of the image as a box of the batch."""
        return box if self.index is None else ((self.index, self.index + 1), *box[1:])


@dataclass(frozen=True, slots=True)
class TensorSource(_TensorEnd):
    """A tensor to read."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, window: Window, into: Tensor) -> None:
        box = box_of(self.shape, self.axes, window)
        assign(into, view(self.tensor, self._in_batch(box)))

    def workspace(self, window: Window) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class TensorSink(_TensorEnd):
    """A tensor to write to; floating-point parts are converted to 8 or 16 bits as images.

    values: dtype of the parts.
    """

    values: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def write(self, window: Window, part: Tensor) -> None:
        each = scratch_size(self.values, self.tensor.dtype)
        scratch = torch.empty(self.workspace(window) // max(each, 1), dtype=work_dtype(self.values))
        for box in self._boxes(window):
            values = within(part, box, self.axes, window)
            convert(values, view(self.tensor, self._in_batch(box)), self.axes, scratch)

    def workspace(self, window: Window) -> int:
        each = scratch_size(self.values, self.tensor.dtype)
        return each * elements(next(self._boxes(window), ()))

    def _boxes(self, window: Window) -> Iterator[Box]:
        """The window in boxes: one, or small ones to convert."""
        box = box_of(self.shape, self.axes, window)
        each = scratch_size(self.values, self.tensor.dtype)
        limit = LIMIT // each if each else elements(box)
        return pieces(box, order(len(box), self.axes), limit)


@dataclass(frozen=True, slots=True)
class Spill:
    """A value in a temporary file, deleted with the last reference to it if it has no name.

    The file has the layout of parts in memory: rows are contiguous and need no copy.
    """

    axes: Axes
    layout: FileLayout
    file: Descriptor
    is_named: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def read(self, window: Window, into: Tensor) -> None:
        box = self._checked_box(window, into)
        fetch(self.file, self.layout, box, into)

    def write(self, window: Window, part: Tensor) -> None:
        box = self._checked_box(window, part)
        store(self.file, self.layout, box, part)

    def workspace(self, window: Window) -> int:
        return 0

    def _checked_box(self, window: Window, part: Tensor) -> Box:
        box = box_of(self.shape, self.axes, window)
        if part.dtype != self.dtype or tuple(part.shape) != extents(box):
            raise ValueError(
                f"expected a part of {extents(box)} in {self.dtype}, got {tuple(part.shape)} in {part.dtype}"
            )
        return box

    def close(self) -> None:
        """Close the file, which deletes it if it has no name."""
        self.file.close()

    def delete(self) -> None:
        """Close and delete the file."""
        self.close()
        if self.is_named:
            Path(self.file.name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------- opening


def spill(
    shape: Sequence[int], dtype: torch.dtype, axes: Axes, folder: str | os.PathLike[str], name: str = ""
) -> Spill:
    """A temporary file for a value. Raises BadInput where the disk has no room for it.

    folder: on a disk; on many systems the default folder for temporary files is in memory. name: of
    a file that other processes open, too, and that is created if it does not exist; "": a new file
    without a name.
    """
    sizes = tuple(map(int, shape))
    layout = FileLayout(0, sizes, order(len(sizes), axes), dtype)
    file = named(Path(folder, name)) if name else temporary(folder)
    reserve(file, layout.end, Path(folder))
    return Spill(axes, layout, file, bool(name))


def tensor_source(data: Tensor | np.ndarray, axes: Axes, index: int | None = None) -> TensorSource:
    """A tensor or an array of any layout to read."""
    return TensorSource(axes, index, _tensor(data))


def tensor_sink(data: Tensor | np.ndarray, axes: Axes, values: torch.dtype, index: int | None = None) -> TensorSink:
    """A tensor or an array to write to, in place. values: dtype of the parts."""
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        raise BadInput("the destination is a read-only array; open it with mode='r+'")
    tensor = _tensor(data)
    check_conversion(values, tensor.dtype)
    return TensorSink(axes, index, tensor, values)


def in_place(end: Any) -> Tensor | None:
    """The image of a source or sink as a part; None unless it is a tensor in that layout."""
    if not isinstance(end, TensorSource | TensorSink):
        return None
    values = end.tensor.dtype if isinstance(end, TensorSource) else end.values
    if values != end.tensor.dtype:
        return None
    image = end.tensor if end.index is None else end.tensor[end.index : end.index + 1]
    expected = strides(tuple(image.shape), end.axes)
    triples = zip(image.shape, image.stride(), expected, strict=True)
    fits = all(size == 1 or stride == wanted for size, stride, wanted in triples)
    return image.as_strided(image.shape, expected) if fits else None


def _tensor(data: Tensor | np.ndarray) -> Tensor:
    if isinstance(data, Tensor):
        if data.device.type != "cpu" or data.layout != torch.strided:
            raise BadInput(
                f"expected a dense tensor on the CPU, got {data.layout} on {data.device}; move it first: tensor.cpu()"
            )
        return data.detach()
    torch_dtype(data.dtype, "the array")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that are read-only: a source is only read
            return torch.from_numpy(data)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the array's layout is not supported ({error}); copy it first") from error


__all__ = ["RowSource", "Sink", "Spill", "TensorSink", "TensorSource", "spill", "tensor_sink", "tensor_source"]
