"""Base classes and helpers of the ways to run a call on parts of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import schema_of
from demask.exec.axes import COLUMNS, Axes, Window, cut_shape, strides
from demask.machine.arena import align_size
from demask.ops import regions, schema
from demask.ops.regions import Geometry, Interval, Rule
from demask.ops.relation import Relation
from demask.tune.epilogue import Epilogue, apply_activation

Scratch = Callable[[Sequence[int], Axes, torch.dtype], Tensor]  # shape, axes, dtype -> memory
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperandCut:
    """How one operand is cut along the output's rows and columns.

    axes: its axes along rows and columns, None where it has none. rules: the interval that a window
    needs along each. arrives: whether the operand arrives as a part along each; else it is narrowed
    here. shape: of the full operand.
    """

    axes: Axes
    rules: tuple[Rule | None, Rule | None]
    arrives: tuple[bool, bool]
    shape: Sizes

    def part(self, window: Window) -> Sizes:
        """The shape of the part that a window needs."""
        needs = [(0, 1) if rule is None else rule(*w) for rule, w in zip(self.rules, window, strict=True)]
        return cut_shape(self.shape, self.axes, (needs[0], needs[1]))


@dataclass(frozen=True, slots=True, eq=False)
class LocalCall:
    """A call that is computed in parts.

    axes, shape, dtype: of its output. bound: its arguments by name, operands as nodes. cuts: one
    per operand.
    """

    relation: Relation
    axes: Axes
    shape: Sizes
    dtype: torch.dtype
    bound: Mapping[str, Any]
    cuts: tuple[OperandCut, ...]

    @property
    def node(self) -> fx.Node:
        return self.relation.node

    def sizes(self, window: Window) -> Sizes:
        return cut_shape(self.shape, self.axes, window)

    def bytes(self, window: Window) -> int:
        return nbytes(self.sizes(window), self.dtype)

    def arguments(self, values: Sequence[Any], **changed: Any) -> dict[str, Any]:
        """The arguments by name, with `values` for the operands and other changes."""
        return schema.replace_operands(self.bound, self.relation.operands, values) | changed

    def window(self, axis: int, window: Window) -> Interval:
        """The interval of an axis of the output; all positions where it is not cut."""
        dim = self.axes.index(axis) if axis in self.axes else None
        return (0, self.shape[axis]) if dim is None else window[dim]


class LocalKind:
    """A way to run a call on parts.

    pointwise: whether the output may be written over an operand. adds: whether the call can add to
    the values in the output's memory. compiler_bytes: that the compiler of its kernel takes; 0
    where there is nothing to compile.
    """

    pointwise = False
    adds = False
    compiler_bytes = 0

    def computed_window(self, window: Window) -> Window:
        """The window that `run` fills. It contains the requested one."""
        return window

    def run(self, values: list[Any], window: Window, into: Tensor, scratch: Scratch) -> None:
        """Fill `into`, the part `computed_window(window)`, from exactly what the window needs."""
        raise NotImplementedError

    def scratch_bytes(self, window: Window) -> int:
        """Bytes of scratch that `run` requests."""
        return 0

    def allocated_bytes(self, window: Window) -> int:
        """Bytes that torch allocates during `run`, in addition to scratch."""
        return 0

    def compile(self, after: Epilogue | None, add: bool) -> None:
        """Compile a kernel of ours, if any, for this activation, with or without adding to the
        output."""

    @property
    def without_compiler(self) -> LocalKind:
        """The same call by torch's ops, which take no compiler."""
        return self

    def macs(self, window: Window) -> int:
        """Multiply-adds of a window."""
        return 0

    def onednn_key(self, window: Window) -> Any:
        """A key of the kernel that oneDNN creates and caches for a window; None for no kernel."""
        return None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weight as `pack_weight` lays it out; 0 where it stays as it is."""
        return 0


@dataclass(frozen=True, slots=True)
class Sliding:
    """One axis along which a window slides.

    axis: negative index of the axis, the same for output and operand.
    """

    axis: int
    geometry: Geometry

    def margins(self, interval: Interval) -> tuple[int, int, int]:
        """Positions that an interval of the output reads: before the operand's first, inside the
        operand, after its last."""
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

    def margins(self, window: Window) -> dict[int, Interval]:
        """The numbers of positions that a window reads before and after the operand, per axis."""
        ends = ((s.axis, s.margins(i)) for s, i in zip(self.axes, self.intervals(window), strict=True))
        return {axis: (before, after) for axis, (before, _, after) in ends}

    def operand(self, window: Window) -> tuple[int, ...]:
        """The shape of the first operand's part for a window."""
        return self.call.cuts[0].part(window)


def out_overload(target: Any) -> Any:
    """The overload that writes into an `out` tensor; None where torch generates it as a copy."""
    names = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    for overload in target.overloadpacket.overloads():
        op = getattr(target.overloadpacket, overload)
        plain = [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]
        real = torch.Tag.generated not in op.tags
        if real and len(schema_of(op).arguments) == len(plain) + 1 and plain == names:
            return op
    return None


def is_same_format(x: Tensor, into: Tensor) -> bool:
    """Whether both tensors are dense in the same memory format of torch's image kernels."""
    # volumes are pooled into contiguous memory only
    formats = (torch.contiguous_format, torch.channels_last) if x.ndim == 4 else (torch.contiguous_format,)
    return any(x.is_contiguous(memory_format=f) and into.is_contiguous(memory_format=f) for f in formats)


def write_result(op: Any, into: Tensor, *args: Any, over: Any = None) -> None:
    """Write an op's result into `into`.

    Image kernels accept any `out`, and write it as if it were dense in the input's memory format:
    in other formats the result is copied. over: the packet that has the `out` overload.
    """
    if is_same_format(args[0], into):
        (over or op).out(*args, out=into)
    else:
        into.copy_(op.default(*args))


def writes_in_place(call: LocalCall, window: Window) -> bool:
    """Whether the parts of output and operand are dense, so that `write_result` copies nothing."""
    axis = call.axes[COLUMNS]
    if axis is not None and window[COLUMNS] != (0, call.shape[axis]):
        return False
    cut = call.cuts[0]
    return is_same_format(_dense(cut.part(window), cut.axes), _dense(call.sizes(window), call.axes))


def _dense(shape: Sizes, axes: Axes) -> Tensor:
    layout = torch.empty_strided(shape, strides(shape, axes), device="meta")
    return layout.unsqueeze(-2) if layout.ndim == 3 else layout


def narrowed(value: Tensor, axis: int, interval: Interval) -> Tensor:
    """A view of an interval of an axis."""
    return value.narrow(axis, interval[0], interval[1] - interval[0])


def stepped(value: Tensor, axis: int, start: int, count: int, step: int) -> Tensor:
    """A view of `count` positions of an axis: start, start + step, ..."""
    stop = start + (count - 1) * step + 1
    return torch.ops.aten.slice.Tensor(value, axis, start, stop, step)


def padded(
    x: Tensor,
    axes: Axes,
    margins: Mapping[int, Interval],
    value: float,
    scratch: Scratch,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A copy with a border of `value`. margins: per negative axis, positions before and after."""
    copy = scratch(grown(x.shape, margins), axes, dtype or x.dtype)
    interior = copy
    for axis, (before, after) in margins.items():
        for start, count in ((0, before), (interior.shape[axis] - after, after)):
            if count:
                interior.narrow(axis, start, count).fill_(value)
        interior = interior.narrow(axis, before, interior.shape[axis] - before - after)
    interior.copy_(x)
    return copy


def grown(shape: Sequence[int], margins: Mapping[int, Interval]) -> Sizes:
    """A shape with margins added."""
    sizes = list(shape)
    for axis, (before, after) in margins.items():
        sizes[axis] += before + after
    return tuple(sizes)


def activate(after: Epilogue, into: Tensor) -> None:
    """Apply an activation to a part in place."""
    activated = apply_activation(after, into)
    if activated is not into:
        into.copy_(activated)


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor in scratch, aligned as in an arena."""
    return align_size(math.prod(shape) * dtype.itemsize)
