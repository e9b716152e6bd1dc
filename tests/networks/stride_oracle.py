"""An oracle of stride forms: on one convolution, is a form sound? By trying, not by thinking.

It knows nothing of why a form refuses. It writes the form anyway, wherever it could stand, computes
at once, and compares with what a stride keeps, on inputs with negatives, zeros, the largest
numbers, small ones that lose bits when halved, and Inf and NaN at every position by itself. On
targets that are `finite`, a channel of an input counts only where all of its numbers are. A form
that refuses what holds on all of them is as wrong as one that accepts what does not.

Integers (int32) wrap around. Torch has no such convolutions and pools on CPUs: they are computed in
float64, which holds all sums here exactly, and wrapped.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demask.facts.ranges import ANY, Range, dtype_range
from demask.stride.forms import FORMS, StrideForm
from demask.stride.strided_conv import ConvAxis, FormInputs, StridedConv
from demask.stride.targets import Target

aten = torch.ops.aten
_CONVS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_WINDOWED = (
    *_CONVS.values(),
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
)
FLOAT, WHOLE = torch.float32, torch.int32
MOST = {FLOAT: torch.finfo(FLOAT).max, WHOLE: torch.iinfo(WHOLE).max}
LEAST = {FLOAT: -MOST[FLOAT], WHOLE: torch.iinfo(WHOLE).min}
TINY = torch.finfo(FLOAT).smallest_normal
HALVED = 1e-45  # the smallest number: half of it is 0
# A number that three times itself, and a third of that, is not.
THIRD = next(
    v
    for v in torch.rand(99, generator=torch.Generator().manual_seed(0)).tolist()
    if float(torch.tensor(v) * 3 * (1 / 3)) != v
)


@dataclass(slots=True)
class Eager:
    """Computes what forms write. Convolutions of the input itself are computed once."""

    computed: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        if target not in _WINDOWED:
            return target(*args, **kwargs)
        if target not in _CONVS.values():
            return _computed(target, *args, **kwargs)
        key = (id(args[0]), id(args[1]), *map(repr, args[3:]))
        if key not in self.computed:
            # The operands are stored, too, so that no other value gets their ids.
            self.computed[key] = (_computed(target, *args, **kwargs), args)
        return self.computed[key][0]

    def constant(self, name: str, tensor: Tensor, *, weight: bool = False) -> Tensor:
        return tensor

    def read(self, node: Any) -> Any:
        raise AssertionError("functions here read nothing else")


def _computed(target: Any, *args: Any, **kwargs: Any) -> Tensor:
    if args[0].is_floating_point():
        return target(*args, **kwargs)
    exact = [a.double() if isinstance(a, Tensor) else a for a in args]
    return target(*exact, **kwargs).trunc().to(torch.int64).to(args[0].dtype)


# --- functions after the convolution, and targets ---


@dataclass(frozen=True, slots=True)
class Function:
    """A function after the convolution: its steps, and the range after each."""

    steps: tuple[Callable[[Any, Any], Any], ...] = ()
    ranges: tuple[Range, ...] = ()
    bounded: bool = False  # it maps infinite numbers to finite ones


def _leaky(write: Any, y: Tensor) -> Tensor:
    if y.is_floating_point():
        return torch.where(y >= 0, y, y * 0.25)
    return torch.where(y >= 0, y, y >> 3)


def _clamped(write: Any, y: Tensor) -> Tensor:
    return y.clamp(0, 6)


FUNCTIONS: Mapping[torch.dtype, Mapping[str, Function]] = {
    FLOAT: {
        "linear": Function(),
        "relu": Function((lambda w, y: y.relu(),), (Range(0, ANY.high),)),
        "below": Function((lambda w, y: y.clamp(max=0),), (Range(ANY.low, 0),)),
        "leaky": Function((_leaky,), (ANY,)),
        "relu6": Function((_clamped,), (Range(0, 6),), bounded=True),
    },
    WHOLE: {
        "linear": Function(),
        "relu": Function((lambda w, y: y.relu(),), (Range(0, MOST[WHOLE]),)),
        "below": Function((lambda w, y: y.clamp(-5, 0),), (Range(-5, 0),)),
        "leaky": Function((_leaky,), (Range(LEAST[WHOLE] >> 3, MOST[WHOLE]),)),
    },
}


def _target(ops: str, **more: Any) -> Target:
    return Target("tried", frozenset(ops.split()), **more)


def _masking(ops: str, **more: Any) -> list[Target]:
    return [
        _target(f"{ops} select", **more),
        _target(f"{ops} multiply", finite=True, **more),
        _target(f"{ops} multiply", **more),
    ]


_PRODUCT = "max_pool multiply"
TARGETS: Mapping[str, list[Target]] = {
    "mask_max_pool": [*_masking("max_pool"), _target("max_pool select pad", pool_ceil=False)],
    "two_masks": [
        _target(_PRODUCT, finite=True),
        _target(_PRODUCT),
        _target(_PRODUCT, mask=1.0),
        *(_target(_PRODUCT, finite=True, mask=a) for a in (0.5, 1.0, 3.0, 2.0**126)),
    ],
    "select_max_pool": [_target("max_pool select"), _target("max_pool select pad", pool_ceil=False)],
    "mask_min_pool": [*_masking("min_pool"), _target("min_pool select pad", pool_ceil=False)],
    "select_min_pool": [_target("min_pool select"), _target("min_pool select pad", pool_ceil=False)],
    "pool_1x1": [_target("max_pool")],
    "slice": [_target("slice")],
    "mask_sum_pool": [*_masking("sum_pool pad"), _target("sum_pool select pad", pool_ceil=False)],
    "mask_avg_pool": [_target("avg_pool pad multiply select"), *_masking("avg_pool pad multiply")[1:]],
    "split": _masking("max_pool relu add"),
    "rotate": [_target("rotate multiply add crop", finite=True)],
    "space_to_depth": [_target("space_to_depth pad", finite=True), _target("space_to_depth pad")],
    "phase_split": [_target("slice add pad")],
}


# --- inputs and layers ---


@functools.cache
def inputs(sizes: tuple[int, ...], channels: int, dtype: torch.dtype) -> Tensor:
    """(rows, channels, *sizes): integers small enough that every sum of them is exact; each
    special number at each position by itself, in the first channel and in the last."""
    shape, draw = (channels, *sizes), torch.Generator().manual_seed(0)
    rows = [torch.zeros(shape), torch.ones(shape), -torch.ones(shape)]
    rows += [torch.randint(-8, 9, shape, generator=draw).float() for _ in range(3)]
    batch = torch.stack(rows).to(dtype)
    special = [MOST[dtype], *([torch.inf, -torch.inf, torch.nan] if dtype is FLOAT else [])]
    spikes = []
    for value, channel in itertools.product(special, {0, channels - 1}):
        eye = torch.zeros(batch[0, 0].numel(), channels, batch[0, 0].numel(), dtype=dtype)
        eye[:, channel].fill_diagonal_(value)
        spikes.append(eye.reshape(-1, *shape))
    return torch.cat([batch, *spikes])


@functools.cache
def layer(kernel: tuple[int, ...], channels: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights without zeros, and biases that alone make the selected numbers special ones."""
    ends = (MOST[dtype], LEAST[dtype])
    special = (THIRD, HALVED) if dtype is FLOAT else (1, 1)
    biases = torch.tensor([0, 0, 3, -5, *ends, *special], dtype=dtype)
    draw = torch.Generator().manual_seed(1)
    shape = (len(biases), channels // groups, *kernel)
    weight = torch.randint(1, 4, shape, generator=draw)
    weight *= torch.randint(0, 2, shape, generator=draw) * 2 - 1
    weight[[0, 4, 6, 7]], weight[[1, 5]] = 1, -1
    return weight.to(dtype), biases


# --- one cell ---


@dataclass(frozen=True, slots=True)
class Cell:
    """One convolution. axes: pads before and after may differ, which a form pads explicitly."""

    axes: tuple[ConvAxis, ...]
    dtype: torch.dtype = FLOAT
    function: str = "linear"
    channels: int = 1
    groups: int = 1

    def site(self) -> StridedConv:
        chosen = FUNCTIONS[self.dtype][self.function]
        known = (dtype_range(self.dtype), *chosen.ranges)
        return StridedConv(self.axes, (self.channels, 8), self.groups, self.dtype, known)

    def call(self) -> FormInputs:
        kernel = tuple(axis.kernel for axis in self.axes)
        weight, bias = layer(kernel, self.channels, self.groups, self.dtype)
        x = inputs(tuple(axis.size for axis in self.axes), self.channels, self.dtype)
        return FormInputs(x, weight, bias, weight, FUNCTIONS[self.dtype][self.function].steps)


@dataclass(frozen=True, slots=True)
class Truth:
    """selected: what the stride keeps of the wide value, after each function. finite: rows and
    channels whose inputs and wide values are all finite. large: rows with the largest number.
    greatest: of the wide values of a channel, in float64. strided: by the strided convolution."""

    selected: tuple[Tensor, ...]
    finite: Tensor
    large: Tensor
    greatest: Tensor
    strided: tuple[Tensor, ...]


def truth(cell: Cell, site: StridedConv, call: FormInputs, write: Eager) -> Truth:
    pads = [n for axis in reversed(cell.axes) for n in (axis.before, axis.after)]
    padded = aten.constant_pad_nd.default(call.x, pads, 0) if any(pads) else call.x
    rank, dilation = site.rank, [axis.dilation for axis in cell.axes]
    convolve = functools.partial(write.call, _CONVS[rank], padded, call.weight, call.bias)
    ones, none = [1] * rank, [0] * rank
    values = [convolve(ones, none, dilation, cell.groups)]
    own = [axis.before for axis in cell.axes]
    if any(pads) and own == [axis.after for axis in cell.axes]:
        # Torch may sum in another order where it pads itself: forms must equal that to the bit.
        by_torch = write.call(_CONVS[rank], call.x, call.weight, call.bias, ones, own, dilation, cell.groups)
        large = (call.x.abs() == MOST[cell.dtype]).flatten(1).any(1)
        assert torch.allclose(by_torch[~large], values[0][~large], rtol=1e-5, equal_nan=True)
        values = [by_torch]
    strided = [convolve(site.stride, none, dilation, cell.groups)]
    for step in call.steps:
        values.append(step(write, values[-1]))
        strided.append(step(write, strided[-1]))
    picks = (..., *(slice(None, None, axis.stride) for axis in cell.axes))
    finite = values[0].isfinite().flatten(2).all(2)
    finite &= call.x.isfinite().flatten(1).all(1)[:, None]
    large = (call.x.abs() == MOST[cell.dtype]).flatten(1).any(1)[:, None]
    flat = (..., *[None] * rank)
    selected = tuple(v[picks] for v in values)
    greatest = values[0].double().abs().flatten(2).amax(2)
    return Truth(selected, finite[flat], large[flat], greatest[flat], tuple(strided))


def holds(
    form: StrideForm,
    cell: Cell,
    site: StridedConv,
    call: FormInputs,
    target: Target,
    place: int,
    expected: Truth,
    write: Eager,
) -> bool:
    """Is the form, written at a place whatever it refuses, what the stride keeps?"""
    try:
        output = form.built(write, site, target, call, place)
    except (RuntimeError, TypeError, OverflowError):
        return False
    exact = not form.rounds or site.integral
    anew = form.name in ("space_to_depth", "phase_split")  # other sums
    wanted = (expected.strided if anew else expected.selected)[place]
    if output.shape != wanted.shape or output.dtype != wanted.dtype:
        return False
    if target.finite:
        # Declared finite, also times the masks, which a form may take where nothing bounds the values.
        counts = expected.finite
        known = site.ranges[place]
        if form.name == "two_masks" and known.high == math.inf and (known.low >= 0 or not site.drops):
            counts = counts & (expected.greatest * max(target.masks) <= MOST[cell.dtype])
        output = torch.where(counts, output, wanted)
    if anew and cell.dtype is FLOAT:  # which sums of the largest numbers overflow is the kernel's
        output = torch.where(expected.large, wanted, output)
    if exact:
        same = (output == wanted) | ((output != output) & (wanted != wanted))
        return bool(same.all())
    slack = 1e-5 if anew else TINY  # sums of numbers of about 1; a product, all of whose are small
    return torch.allclose(output, wanted, rtol=1e-5, atol=slack, equal_nan=True)


def misses(
    axes: tuple[ConvAxis, ...], forms: Mapping[str, StrideForm] = FORMS, channels: int = 1, groups: int = 1
) -> Iterator[str]:
    """Where forms and oracle disagree on a convolution, in each dtype and before each function."""
    if any(axis.wide < 1 for axis in axes):
        return
    for dtype, functions in FUNCTIONS.items():
        write, before = Eager(), {}
        for function in functions:
            cell = Cell(axes, dtype, function, channels, groups)
            call = cell.call()
            tried = Tried(cell, cell.site(), call, truth(cell, cell.site(), call, write), write, before)
            for name, form in forms.items():
                for target in TARGETS[name]:
                    if name != "two_masks" or not _undecided(cell, target):
                        yield from tried.missed(form, target)


@dataclass(frozen=True, slots=True)
class Tried:
    """A cell and what is known of it. before: what holds before any function, by form and
    target, which is the same before all of them."""

    cell: Cell
    site: StridedConv
    call: FormInputs
    expected: Truth
    write: Eager
    before: dict[Any, bool]

    def sound(self, form: StrideForm, target: Target, place: int) -> bool:
        if place:
            return self._holds(form, target, place)
        if (form.name, target) not in self.before:
            self.before[form.name, target] = self._holds(form, target, 0)
        return self.before[form.name, target]

    def _holds(self, form: StrideForm, target: Target, place: int) -> bool:
        return holds(form, self.cell, self.site, self.call, target, place, self.expected, self.write)

    def missed(self, form: StrideForm, target: Target) -> Iterator[str]:
        place = form.first_sound(self.site, target)
        bounded = FUNCTIONS[self.cell.dtype][self.cell.function].bounded
        hidden = bounded and not target.finite and "select" not in target.ops
        for at in range(len(self.site.ranges)) if isinstance(place, str) else [place]:
            if hidden and at:
                continue
            sound, where = self.sound(form, target, at), f"{form.name} on {_said(target)}"
            if sound and isinstance(place, str):
                yield f"{self.cell}: {where} refused, but sound at {at}: {place}"
            if not sound and not isinstance(place, str):
                yield f"{self.cell}: {where} accepted at {at}, but unsound"


def _undecided(cell: Cell, target: Target) -> bool:
    """Bounded functions hide Inf, and only some NaN arise with them: there the form may refuse
    more than it must. Integers are refused whatever their size. Of the values below zero none is
    so small that it loses bits."""
    bounded = FUNCTIONS[cell.dtype][cell.function].bounded
    return cell.function == "below" or (cell.dtype is WHOLE and target.mask == 1) or (bounded and not target.finite)


def _said(target: Target) -> str:
    more = [f"mask={target.mask:g}", *(["finite"] if target.finite else [])]
    return f"{'+'.join(sorted(target.ops))} ({', '.join(more)})"


# --- the grid ---

KERNELS, STRIDES, DILATIONS, PADS, SIZES = (range(1, 8), range(1, 5), range(1, 4), range(4), range(1, 21))


def grid(kernel: int, stride: int) -> Iterator[ConvAxis]:
    """All axes of a kernel and a stride."""
    for dilation, before, after, size in itertools.product(DILATIONS, PADS, PADS, SIZES):
        yield ConvAxis(size, kernel, stride, dilation, before, after)


def sample(count: int, seed: int) -> Iterator[ConvAxis]:
    """`count` axes for each kernel and stride, among them the smallest and the largest."""
    draw = random.Random(seed)
    for kernel, stride in itertools.product(KERNELS, STRIDES):
        cells = [axis for axis in grid(kernel, stride) if axis.wide > 0]
        yield from (cells[0], cells[-1])
        yield from draw.sample(cells, count - 2)
