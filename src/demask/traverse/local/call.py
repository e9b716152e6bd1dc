"""What the ways to run a call on parts of its operands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import schema_of
from demask.machine.arena import aligned
from demask.ops import regions, schema
from demask.ops.regions import Geometry, Interval, Rule
from demask.ops.relation import Relation
from demask.traverse.axes import COLUMNS, Axes, Window, cut_shape, strides
from demask.tune.epilogue import Epilogue

Scratch = Callable[[Sequence[int], Axes, torch.dtype], Tensor]  # shape, axes, dtype -> memory
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperandCut:
    """How one operand runs along the output's rows and columns.

    axes: its axes along them, None where it has none. rules: what a window needs along each.
    arrives: does it come as a part along each? What does not is narrowed here.
    """

    axes: Axes
    rules: tuple[Rule | None, Rule | None]
    arrives: tuple[bool, bool]
    shape: Sizes

    def part(self, window: Window) -> Sizes:
        """The shape of what a window needs of it."""
        needs = [
            (0, 1) if rule is None else rule(*w) for rule, w in zip(self.rules, window, strict=True)
        ]
        return cut_shape(self.shape, self.axes, (needs[0], needs[1]))


@dataclass(frozen=True, slots=True, eq=False)
class LocalCall:
    """A call of which parts are made. found: its arguments by name, operands as nodes."""

    relation: Relation
    axes: Axes
    shape: Sizes
    dtype: torch.dtype
    found: Mapping[str, Any]
    cuts: tuple[OperandCut, ...]

    @property
    def node(self) -> fx.Node:
        return self.relation.node

    def sizes(self, window: Window) -> Sizes:
        return cut_shape(self.shape, self.axes, window)

    def bytes(self, window: Window) -> int:
        return nbytes(self.sizes(window), self.dtype)

    def arguments(self, values: Sequence[Any], **changed: Any) -> dict[str, Any]:
        """The arguments by name, with these operands and changes."""
        return schema.replaced(self.found, self.relation.operands, values) | changed

    def window(self, axis: int, window: Window) -> Interval:
        """The interval of an axis of the output, all of it where it is not cut."""
        dim = self.axes.index(axis) if axis in self.axes else None
        return (0, self.shape[axis]) if dim is None else window[dim]


class LocalKind:
    """A way to run a call on parts. pointwise: may the output be written over an operand? adds: can
    it add onto what the output's memory holds?"""

    pointwise = False
    adds = False

    def made(self, window: Window) -> Window:
        """The window that `run` fills, which holds the one asked for."""
        return window

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        """Fill `into`, the part `made(window)`, from exactly what the window needs."""
        raise NotImplementedError

    def temporary(self, window: Window) -> int:
        """Bytes of scratch that `run` asks for."""
        return 0

    def beside(self, window: Window) -> int:
        """Bytes that torch allocates for results while `run` runs, beside scratch."""
        return 0

    def compiled(self, after: Epilogue | None, add: bool) -> int:
        """Make the machine code of runs with this activation, onto sums or not, if it is ours; the
        bytes that its compiler takes."""
        return 0

    def macs(self, window: Window) -> int:
        return 0

    def kernel(self, window: Window) -> Any:
        """What tells apart the kernels that oneDNN makes, and keeps, for windows; None for no such
        kernel."""
        return None

    @property
    def packs(self) -> int:
        """Bytes of the weight as `prepared` lays it out; 0 where it stays as it is."""
        return 0


@dataclass(frozen=True, slots=True)
class Sliding:
    """One axis along which a window slides. axis: of the output, counted from the end, as of the
    operand."""

    axis: int
    geometry: Geometry

    def margins(self, interval: Interval) -> tuple[int, int, int]:
        """Of an interval of the output: positions before the operand's first, positions of the
        operand, positions behind its last."""
        g = self.geometry
        low = interval[0] * g.step - g.padding
        high = (interval[1] - 1) * g.step - g.padding + g.reach + 1
        inside = max(min(high, g.input) - max(low, 0), 0)
        before = min(max(-low, 0), high - low)
        return before, inside, high - low - before - inside


def slidings(relation: Relation) -> tuple[Sliding, ...]:
    """The windowed axes of a call's output over its first operand."""
    axes, rank = relation.outs[0], len(relation.outs[0])
    return tuple(
        Sliding(k - rank, regions.geometry(relation, 0, k))
        for k, letters in enumerate(axes)
        if set(letters) & relation.window
    )


@dataclass(frozen=True, slots=True, eq=False)
class LocalWindows(LocalKind):
    """A call whose windows slide along `axes` of its first operand."""

    call: LocalCall
    axes: tuple[Sliding, ...]

    def intervals(self, window: Window) -> list[Interval]:
        rank = len(self.call.shape)
        return [self.call.window(rank + s.axis, window) for s in self.axes]

    def operand(self, window: Window) -> tuple[int, ...]:
        """The shape of the first operand's part."""
        return self.call.cuts[0].part(window)


def out_overload(target: Any) -> Any:
    """The overload that writes into memory it is given, if it is no copy behind the scenes."""
    names = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    for overload in target.overloadpacket.overloads():
        op = getattr(target.overloadpacket, overload)
        plain = [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]
        real = torch.Tag.generated not in op.tags
        if real and len(schema_of(op).arguments) == len(plain) + 1 and plain == names:
            return op
    return None


def _formats(rank: int) -> tuple[torch.memory_format, ...]:
    """Volumes are pooled into dense memory only."""
    return (torch.contiguous_format, *([torch.channels_last] if rank == 4 else []))


def alike(x: Tensor, into: Tensor) -> bool:
    """Are both dense in one of the layouts that torch's kernels of images write?"""
    return any(x.is_contiguous(memory_format=f) and into.is_contiguous(memory_format=f)
               for f in _formats(x.ndim))  # fmt: skip


def written(op: Any, into: Tensor, *args: Any, over: Any = None) -> None:
    """An op's result in `into`. Kernels of images take any `out`, and write it as if it were dense
    in the layout of the input: elsewhere the result is copied. over: what has the `out`."""
    if alike(args[0], into):
        (over or op).out(*args, out=into)
    else:
        into.copy_(op.default(*args))


def written_in_place(call: LocalCall, window: Window) -> bool:
    """Is the part of a window, and what it reads, dense as `written` needs it?"""
    axis = call.axes[COLUMNS]
    if axis is not None and window[COLUMNS] != (0, call.shape[axis]):
        return False
    cut = call.cuts[0]
    return alike(_dense(cut.part(window), cut.axes), _dense(call.sizes(window), call.axes))


def _dense(shape: Sizes, axes: Axes) -> Tensor:
    made = torch.empty_strided(shape, strides(shape, axes), device="meta")
    return made.unsqueeze(-2) if made.ndim == 3 else made


def narrowed(value: Tensor, axis: int, interval: Interval) -> Tensor:
    return value.narrow(axis, interval[0], interval[1] - interval[0])


def stepped(value: Tensor, axis: int, start: int, count: int, step: int) -> Tensor:
    """`count` positions of an axis, `step` apart."""
    stop = start + (count - 1) * step + 1
    return torch.ops.aten.slice.Tensor(value, axis, start, stop, step)


def padded(
    x: Tensor, axes: Axes, margins: Mapping[int, Interval], value: float, scratch: Scratch,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A copy with a border. margins: per axis, counted from the end, before and after."""
    made = scratch(grown(x.shape, margins), axes, dtype or x.dtype)
    inner = made
    for axis, (before, after) in margins.items():
        for start, count in ((0, before), (inner.shape[axis] - after, after)):
            if count:
                inner.narrow(axis, start, count).fill_(value)
        inner = inner.narrow(axis, before, inner.shape[axis] - before - after)
    inner.copy_(x)
    return made


def grown(shape: Sequence[int], margins: Mapping[int, Interval]) -> Sizes:
    sizes = list(shape)
    for axis, (before, after) in margins.items():
        sizes[axis] += before + after
    return tuple(sizes)


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a piece of scratch, as an arena holds it."""
    return aligned(math.prod(shape) * dtype.itemsize)
