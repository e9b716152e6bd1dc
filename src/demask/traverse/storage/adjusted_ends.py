"""Sinks that change what is written: classes in the place of scores, a mask, missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from demask.traverse.axes import Axes, Window, empty
from demask.traverse.storage.boxes import box_of


@dataclass(frozen=True, slots=True)
class ArgmaxSink:
    """Writes the number of the channel of the largest score, one channel, int64."""

    sink: Any
    axes: Axes

    def image(self, index: int) -> Self:
        """The sink of one image."""
        return replace(self, sink=self.sink.image(index))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sink.shape

    def write(self, window: Window, part: Tensor) -> None:
        """Write the classes of a window of scores."""
        self.sink.write(window, part.argmax(1, keepdim=True))

    def workspace(self, window: Window) -> int:
        """Bytes of the sink; the classes of a band are small next to its scores."""
        return self.sink.workspace(window)


@dataclass(frozen=True, slots=True)
class MaskSink:
    """Writes `fill` where a mask, bool [height, width] of the result, is False."""

    sink: Any
    axes: Axes
    wanted: Tensor
    fill: float

    def image(self, index: int) -> Self:
        """The sink of one image."""
        return replace(self, sink=self.sink.image(index))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sink.shape

    def write(self, window: Window, part: Tensor) -> None:
        """Write a window."""
        (top, bottom), (left, right) = window
        unwanted = ~self.wanted[top:bottom, left:right]
        if bool(unwanted.any()):
            copy = empty(part.shape, self.axes, part.dtype)
            part = copy.copy_(part).masked_fill_(unwanted, self.fill)
        self.sink.write(window, part)

    def workspace(self, window: Window) -> int:
        """Bytes of the sink."""
        return self.sink.workspace(window)


@dataclass(frozen=True, slots=True)
class NodataSink:
    """Writes `value` where all channels of the source, of the same size, have no data."""

    sink: Any
    axes: Axes
    source: Any
    missing: float
    value: float

    def image(self, index: int) -> Self:
        """The sink of one image."""
        return replace(self, sink=self.sink.image(index), source=self.source.image(index))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sink.shape

    def write(self, window: Window, part: Tensor) -> None:
        """Write a window."""
        shape = tuple(b - a for a, b in box_of(self.source.shape, self.source.axes, window))
        present = empty(shape, self.source.axes, self.source.dtype)
        self.source.read(window, present)
        absent = is_missing(present, self.missing).all(1, keepdim=True)
        if bool(absent.any()):
            copy = empty(part.shape, self.axes, part.dtype)
            part = copy.copy_(part).masked_fill_(absent, self.value)
        self.sink.write(window, part)

    def workspace(self, window: Window) -> int:
        """Bytes of the sink."""
        return self.sink.workspace(window)


@dataclass(frozen=True, slots=True)
class FilledSource:
    """A source whose missing values are 0, so that they do not spread through the network."""

    source: Any
    missing: float

    @property
    def axes(self) -> Axes:
        return self.source.axes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def image(self, index: int) -> Self:
        """The source of one image."""
        return replace(self, source=self.source.image(index))

    def placed(self, axes: Axes) -> Self:
        """The source with the axes of rows and columns."""
        return replace(self, source=replace(self.source, axes=axes))

    def read(self, window: Window, into: Tensor) -> None:
        """Fill a part with the positions of a window."""
        self.source.read(window, into)
        scale = {torch.uint8: 255.0, torch.uint16: 65535.0}.get(self.dtype, 1.0)
        missing = self.missing / scale if into.is_floating_point() else self.missing
        into.masked_fill_(is_missing(into, missing), 0)

    def workspace(self, window: Window) -> int:
        """Bytes of the source."""
        return self.source.workspace(window)


def is_missing(values: Tensor, missing: float) -> Tensor:
    """Where values are the one that marks missing data."""
    if missing != missing:
        return values.isnan()
    return values == torch.tensor(missing).to(values.dtype)


def nodata_of(metadata: Mapping[str, Any]) -> float | None:
    """The value that marks missing data, if there is one."""
    value = metadata.get("nodata")
    return None if value is None else float(value)
