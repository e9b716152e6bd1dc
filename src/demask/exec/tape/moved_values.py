"""Values that are elements of other values at other positions, such as permuted or sliced ones.

A move needs no code of its own: its op, applied to the numbers of the elements of its operands,
tells where each element of the result comes from. Moves of moves are one: only values that other
steps read, and outputs, are written, straight from values that are no moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.called_op import MOVED, PRODUCT
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_rows import call, constants_of, lowering_of
from demask.exec.steps.segment_steps import SPATIAL, AnyStep
from demask.exec.tape.tape import Buffer, KernelCall, NoPlan, Tape, by_thread
from demask.exec.tape.tile_layout import GridLayout, at_array
from demask.kernels.cpu.tiles.called import ElementGather
from demask.kernels.cpu.tiles.relayout import CALL

Shape = tuple[int, ...]
NUMBERS = 2**32  # of the elements of a value; 0 is for elements that are zero


def is_move(step: AnyStep) -> bool:
    """Whether a step only moves elements, and adds zeros."""
    return lowering_of(step) == MOVED


@dataclass(slots=True)
class MovedValues:
    """The moved values of a program. shapes: of all values."""

    program: SegmentProgram
    weights: Sequence[Tensor]
    shapes: Sequence[Shape]
    numbered: dict[int, Tensor] = field(default_factory=dict)
    pixels: dict[int, tuple[int, np.ndarray] | None] = field(default_factory=dict)
    in_place: dict[int, bool] = field(default_factory=dict)

    def step(self, value: int) -> AnyStep | None:
        """The step that computes a value; None for an input."""
        number = value - len(self.program.inputs)
        return self.program.steps[number] if number >= 0 else None

    def sources(self, step: AnyStep) -> tuple[int, ...]:
        """The values whose memory a step reads: of moved operands of a move, their sources."""
        if not is_move(step):
            factors = factors_of(step)
            return tuple(self.factor_source(x) if x in factors else x for x in step.reads)
        origins: dict[int, None] = {}
        for x in step.reads:
            inner = self.step(x)
            origins |= dict.fromkeys((x,) if inner is None or not is_move(inner) else self.sources(inner))
        return tuple(origins)

    @property
    def written(self) -> set[int]:
        """The moved values that other steps read, unless from where their elements are, and outputs
        that are the same move of each channel: those are stored as other values are."""
        read = {x for step in self.program.steps if not is_move(step) for x in self.sources(step)}
        return read | {v for v in self.program.outputs if self.by_pixel(v) is not None}

    def by_pixel(self, value: int) -> tuple[int, np.ndarray] | None:
        """The source of an image or a signal that has the same elements of each of its channels,
        and their numbers [batch, height, width] of channel 0, -1 for zeros; None for others."""
        if value not in self.pixels:
            self.pixels[value] = self._by_pixel(value)
        return self.pixels[value]

    def _by_pixel(self, value: int) -> tuple[int, np.ndarray] | None:
        step, shape = self.step(value), self.shapes[value]
        if step is None or not is_move(step) or self.program.kinds[value] not in SPATIAL:
            return None
        sources = self.sources(step)
        old = self.shapes[sources[0]]
        is_plain = len(sources) == 1 and self.program.kinds[sources[0]] in SPATIAL
        if not is_plain or old[1] != shape[1]:
            return None
        numbers, pitch = self.numbers(value), prod(old[2:])
        first = numbers[:, :1]
        offsets = torch.arange(shape[1], dtype=numbers.dtype) * pitch
        expected = first + offsets.reshape(-1, *[1] * (len(shape) - 2))
        if not torch.equal(numbers, torch.where(first == 0, 0.0, expected)):
            return None
        numbers = first[:, 0].numpy() - 1 - sources[0] * NUMBERS
        return sources[0], np.where(first[:, 0].numpy() == 0, -1, numbers).astype(np.int64)

    @property
    def stored(self) -> set[int]:
        """The values that outputs are read from."""
        outputs: set[int] = set()
        for value in self.program.outputs:
            step = self.step(value)
            if step is not None and is_move(step) and value not in self.written:
                outputs.update(self.sources(step))
            else:
                outputs.add(value)
        return outputs

    def numbers(self, value: int) -> Tensor:
        """Where the elements of a value are: NUMBERS * source + 1 + element, as float64; or 0."""
        step = self.step(value)
        if step is None or not is_move(step):
            count = prod(self.shapes[value])
            if count >= NUMBERS:
                raise NoPlan(f"value {value} has {count} elements")
            first = value * NUMBERS + 1
            return torch.arange(first, first + count, dtype=torch.float64).reshape(self.shapes[value])
        if value not in self.numbered:
            operands = [self.numbers(x) for x in step.reads]
            kind = self.program.kinds[step.x]
            tensors = constants_of(step, kind, operands[0], self.weights)
            self.numbered[value] = call(step, kind, operands, *tensors)
        return self.numbered[value]

    def by_channel(self, value: int) -> Tensor:
        """`numbers` as an array [batch, channels, height, width]."""
        return as_image(self.program.kinds[value], self.numbers(value))

    def location(self, value: int) -> tuple[int, int] | None:
        """The value of which a moved one is a range of channels, and the first of these."""
        step = self.step(value)
        if step is None or not is_move(step) or len(sources := self.sources(step)) != 1:
            return None
        own, source = self.by_channel(value), self.by_channel(sources[0])
        first = (source[0, :, 0, 0] == own[0, 0, 0, 0]).nonzero().flatten().tolist()
        is_range = len(first) == 1 and torch.equal(own, source[:, first[0] : first[0] + own.shape[1]])
        return (sources[0], first[0]) if is_range else None

    def factor_source(self, value: int) -> int:
        """The value that has the elements of a factor of a product where the kernel can read them:
        their positions are the sum of one per row and one per column. Otherwise the value itself."""
        step = self.step(value)
        if step is None or not is_move(step) or len(sources := self.sources(step)) != 1:
            return value
        if value not in self.in_place:
            self.in_place[value] = self._is_separable(value, sources[0])
        return sources[0] if self.in_place[value] else value

    def _is_separable(self, value: int, source: int) -> bool:
        """Whether the channels of a source depend on rows alone and its positions on columns, or
        the other way around."""
        numbers = self.numbers(value)
        if not bool((numbers > 0).all()):
            return False
        channel_numbers = self.by_channel(source)
        _, channels, height, width = channel_numbers.shape
        flat = torch.zeros(channel_numbers.numel(), dtype=torch.int64)
        first = source * NUMBERS + 1
        flat[(channel_numbers - first).long().flatten()] = torch.arange(channel_numbers.numel())
        rest, x = divmod_of(flat[(numbers - first).long()], height * width)
        image, channel = divmod_of(rest, channels)
        position = image * height * width + x

        def is_fixed(positions: Tensor, axis: int) -> bool:
            return bool((positions == positions.narrow(axis, 0, 1)).all())

        return any(is_fixed(channel, a) and is_fixed(position, b) for a, b in ((-1, -2), (-2, -1)))

    def keeps_images(self, counts: Sequence[int]) -> bool:
        """Whether each image is computed from that image alone, for these numbers of images.

        Calls of ops mix images only where a value has another first size than the inputs.
        """
        if not any(step.op in CALLED for step in self.program.steps):
            return True
        for count in counts:
            inputs = [(count, *shape[1:]) for shape in self.shapes[: len(self.program.inputs)]]
            try:
                shapes = self.program.shapes(inputs)
            except BadInput:
                return False
            if any(len(shape) < 2 or shape[0] != count for shape in shapes):
                return False
        return True


def elements_of(layout: GridLayout, kind: str, shape: Shape, flat: np.ndarray) -> np.ndarray:
    """The elements in a buffer of elements of a value, numbered in the order of its shape."""
    if kind in ("tokens", "matrices"):
        x, channel = np.divmod(flat, shape[-1])
        image = y = np.zeros_like(x)
        if kind == "matrices":
            number, x = np.divmod(x, shape[-2])
            channel = number * shape[-1] + channel
    elif kind == "pixels":
        rest, channel = np.divmod(flat, shape[3])
        rest, x = np.divmod(rest, shape[2])
        image, y = np.divmod(rest, shape[1])
    else:
        height, width = (1, shape[2]) if kind == "signal" else shape[2:]
        rest, x = np.divmod(flat, width)
        rest, y = np.divmod(rest, height)
        image, channel = np.divmod(rest, shape[1])
    elements = channel * (layout.pitch * layout.lanes) + layout.element(image, y, x)
    if elements.size and int(elements.max()) >= 2**31:
        raise NoPlan("a value has more than 2**31 elements")
    return elements


def as_image(kind: str, x: Tensor) -> Tensor:
    """A value as an array [batch, channels, height, width] (`segment_steps.canonical`)."""
    if kind == "pixels":
        return x.permute(0, 3, 1, 2)
    if kind in ("tokens", "matrices"):
        x = x.reshape(1, -1, x.shape[-1]) if kind == "tokens" else x.reshape(-1, *x.shape[-2:])
        return x.transpose(1, 2).reshape(1, -1, 1, x.shape[1])
    return x.unsqueeze(2) if kind == "signal" else x


def factors_of(step: AnyStep) -> tuple[int, ...]:
    """The operands of a product whose elements are read one by one."""
    return step.reads[1:3] if lowering_of(step) == PRODUCT else ()


def divmod_of(x: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of integers that are not negative."""
    return x // divisor, x % divisor


@dataclass(frozen=True, slots=True)
class MoveWriter:
    """Writes moved values to a tape. sources: buffers of values, by number."""

    tape: Tape
    moved: MovedValues
    sources: Mapping[int, Buffer]
    lanes: int

    def to_buffer(self, value: int, out: Buffer) -> None:
        """Write a value in the layout of a buffer, without borders."""
        layout, channels = out.layout, out.layout.size[1]
        by_channel = self.moved.by_channel(value).transpose(0, 1).numpy()
        at = at_array(layout.inside())
        image, y, x, is_inside = layout.pixels(at)
        pixel = [np.where(is_inside, a, 0) for a in (image, y, x)]
        rows = np.where(is_inside, by_channel[:, pixel[0], pixel[1], pixel[2]], 0)
        lines = np.arange(channels)[:, None] * layout.pitch + layout.line(*at.T)
        parts = np.broadcast_to(at[:, 0], lines.shape).reshape(-1)
        threads = self.tape.threads
        if layout.grid.parts == threads:
            picked = [np.flatnonzero(parts == thread) for thread in range(threads)]
        else:
            picked = [np.arange(begin, end) for begin, end in by_thread(lines.size, threads)]
        self._write_lines((out, 0), rows.reshape(-1, self.lanes), lines.reshape(-1), picked)

    def to_output(self, value: int, slot: int) -> None:
        """Write a value to an output."""
        numbers = self.moved.numbers(value).reshape(-1).numpy()
        padded = np.zeros(-(-len(numbers) // self.lanes) * self.lanes)
        padded[: len(numbers)] = numbers
        rows, tail = padded.reshape(-1, self.lanes), len(numbers) % self.lanes
        lines, full = np.arange(len(rows)), len(numbers) // self.lanes
        picked = [np.arange(*span) for span in by_thread(full, self.tape.threads)]
        self._write_lines((slot, 0), rows, lines, picked)
        if tail:
            self._write_lines((slot, 0), rows, lines, [np.array([full])], tail)

    def _write_lines(
        self,
        out: tuple[Buffer | int, int],
        rows: np.ndarray,
        lines: np.ndarray,
        picked: Sequence[np.ndarray],
        tail: int = 0,
    ) -> None:
        """Write lines of elements. rows: their numbers; picked: the lines of each thread."""
        owner, number = np.divmod(rows.astype(np.int64), NUMBERS)
        owner = np.where(rows == 0, -1, owner)
        values = [v for v in self.sources if (owner == v).any()] or [next(iter(self.sources))]
        is_first = np.ones(len(rows), bool)  # whether no source has been written to a line
        for value in values:
            source = self.sources[value]
            is_own = owner == value
            flat = np.where(is_own, number - 1, 0)
            kind, shape = self.moved.program.kinds[value], self.moved.shapes[value]
            table = np.where(is_own, elements_of(source.layout, kind, shape, flat), -1)
            is_read = is_own.any(1) | (is_first & (owner < 0).all(1))
            for thread, own in enumerate(picked):
                for partial in (False, True):
                    k = own[is_read[own] & (is_first[own] != partial)]
                    if len(k):
                        kernel = ElementGather(partial, tail)
                        buffers = {"x": (source, 0), "out": out}
                        self.tape.add(
                            thread,
                            KernelCall(
                                kernel,
                                CALL,
                                buffers,
                                {
                                    "count": len(k),
                                    "table": table[k].astype(np.int32),
                                    "lines": lines[k].astype(np.int32),
                                },
                            ),
                        )
            is_first &= ~is_read
