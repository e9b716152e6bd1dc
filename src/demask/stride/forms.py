"""Forms that compute all positions of a convolution with stride 1, and drop the superfluous ones.

    y: the convolution of stride 1; m: mask of selected (1) and dropped (0) positions; s: the stride

    mask_max_pool   max_pool(m y)                       where y >= 0
    two_masks       max_pool(a m y) (1 / a)             where y >= 0, for powers of two a, one or several
    select_max_pool max_pool(y where m, else -inf)
    mask_min_pool   min_pool(m y)                       where y <= 0
    select_min_pool min_pool(y where m, else inf)
    pool_1x1        max_pool(y), windows of one position
    slice           y[::s]
    mask_sum_pool   sum_pool(m y)
    mask_avg_pool   avg_pool(m y) s^2
    split           max_pool(relu(m y)) - max_pool(relu(-m y))
    rotate          selected positions moved to the front, one bit of the distance at a time; crop

Windows have the stride's size and start at selected positions; the last one may be incomplete.
`m y` is a selection if the target has one; as a product it is sound if no dropped y is Inf or NaN.
Except for mask_avg_pool, which divides and multiplies, the selected numbers do not change.

Forms that compute only the outputs of a strided convolution, with another order of sums.

space_to_depth: blocks of s positions become channels, and a kernel of stride s over positions
becomes one of stride 1 over blocks. Taps that complete its last block are zero.

    x[(i + q) s + r] w[q s + r], summed over q and r  ==  conv(blocks of x, blocks of w)

phase_split: each phase of the input (every s-th position) is convolved with its own taps of the
kernel, with stride 1. The sum over phases is the output. Every tap is used exactly once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from demask.facts.ranges import Range
from demask.ops.schema import fake
from demask.stride.strided_conv import ConvAxis, FormInputs, FormWriter, StridedConv
from demask.stride.targets import Target

aten = torch.ops.aten

_CONVOLVE = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


def blocks(axis: ConvAxis) -> int:
    """Number of blocks that a kernel covers."""
    return -(-axis.span // axis.stride)


@cache
def _taps_that_read(axis: ConvAxis) -> tuple[bool, bool]:
    """Whether any tap of the kernel in blocks is multiplied by a position of the input, and whether
    an added zero tap is."""
    taps = range(blocks(axis) * axis.stride)
    starts = [i * axis.stride - axis.before for i in range(axis.out)]
    meets = [any(0 <= start + t < axis.size for start in starts) for t in taps]
    zero = [t % axis.dilation != 0 or t >= axis.span for t in taps]
    return any(meets), any(m and z for m, z in zip(meets, zero, strict=True))


def zero_taps(site: StridedConv) -> bool:
    """Whether a zero weight that space_to_depth adds is multiplied by a position of the input."""
    met = [_taps_that_read(axis) for axis in site.axes]
    return any(zero and all(any_tap for any_tap, _ in met[:k] + met[k + 1 :]) for k, (_, zero) in enumerate(met))


def space_to_depth(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    """A convolution of stride 1 over blocks of the input. Arguments: see `StrideForm.built`."""
    del target, functions
    x = write.call(aten.constant_pad_nd.default, call.x, _block_pads(site), 0)
    x = _as_channels(write, site, x)
    weight = _weight(write, site, call)
    ones = [1] * site.rank
    return write.call(_CONVOLVE[site.rank], x, weight, call.bias, ones, [0] * site.rank, ones, site.groups)


def _block_pads(site: StridedConv) -> list[int]:
    """Zeros before and after each axis, the last axis first, that complete its blocks."""
    pads = []
    for axis in reversed(site.axes):
        length = _padded_length(axis)
        after = length - axis.before - axis.size
        # A kernel that reads no position of the input: only padding remains.
        pads += [axis.before, after] if after >= -axis.size else [length, -axis.size]
    return pads


def _padded_length(axis: ConvAxis) -> int:
    """Length of an axis in full blocks."""
    return (axis.out - 1 + blocks(axis)) * axis.stride


def _as_channels(write: FormWriter, site: StridedConv, x: Any) -> Any:
    """(n, c, b0 s0, b1 s1) -> (n, c s0 s1, b0, b1)."""
    inner, rank = site.channels[0], site.rank
    parts = [n for axis in site.axes for n in (_padded_length(axis) // axis.stride, axis.stride)]
    shape = list(x.shape) if isinstance(x, Tensor) else list(fake(x).shape)
    lead = [-1] if len(shape) == rank + 2 else []
    first = len(lead) + 1
    counts, steps = range(first, first + 2 * rank, 2), range(first + 1, first + 2 * rank, 2)
    x = write.call(aten.reshape.default, x, [*lead, inner, *parts])
    x = write.call(aten.permute.default, x, [*range(first), *steps, *counts])
    merged = [*lead, inner * math.prod(site.stride), *parts[::2]]
    return write.call(aten.reshape.default, x, merged)


def _weight(write: FormWriter, site: StridedConv, call: FormInputs) -> Any:
    """The weight (o, i, k0, k1) in blocks: (o, i s0 s1, blocks, blocks)."""
    assert call.numbers is not None
    outer, inner = call.numbers.shape[:2]
    long = [blocks(axis) * axis.stride for axis in site.axes]
    spread = call.numbers.new_zeros([outer, inner, *long])
    index = tuple(slice(0, axis.span, axis.dilation) for axis in site.axes)
    spread[(slice(None), slice(None), *index)] = call.numbers
    parts = [n for axis in site.axes for n in (blocks(axis), axis.stride)]
    steps, counts = range(3, 3 + 2 * site.rank, 2), range(2, 2 + 2 * site.rank, 2)
    permuted = spread.reshape([outer, inner, *parts]).permute([0, 1, *steps, *counts])
    merged = permuted.reshape([outer, inner * math.prod(site.stride), *parts[::2]])
    return write.constant("blocks", merged.contiguous(), weight=True)


def phase_split(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    """The sum of convolutions of stride 1, one for each phase of the input that has taps.
    Arguments: see `StrideForm.built`."""
    del target, functions
    x = call.x
    if any(axis.before or axis.after for axis in site.axes):
        pads = [n for axis in reversed(site.axes) for n in (axis.before, axis.after)]
        x = write.call(aten.constant_pad_nd.default, x, pads, 0)
    total, bias = None, call.bias
    for first in itertools.product(*(range(_phases(axis)) for axis in site.axes)):
        part = _phase(write, site, call, x, first, bias)
        total = part if total is None else write.call(aten.add.Tensor, total, part)
        bias = None
    return total


def _phases(axis: ConvAxis) -> int:
    """Number of phases: tap k is the first tap of phase k; later taps belong to these phases."""
    return min(axis.kernel, axis.stride // math.gcd(axis.stride, axis.dilation))


def _phase(write: FormWriter, site: StridedConv, call: FormInputs, x: Any, first: tuple[int, ...], bias: Any) -> Any:
    """The convolution of one phase. Its taps along each axis are j, j + s / g, ...; they read every
    s-th position from d j on with dilation d / g, where g = gcd(stride s, dilation d)."""
    dilation, taps = [], []
    for k, (axis, j) in enumerate(zip(site.axes, first, strict=True)):
        common = math.gcd(axis.stride, axis.dilation)
        every, gap = axis.stride // common, axis.dilation // common
        count = -(-(axis.kernel - j) // every)
        length = axis.out + (count - 1) * gap
        start = axis.dilation * j
        end = start + (length - 1) * axis.stride + 1
        x = write.call(aten.slice.Tensor, x, site.axis(k), start, end, axis.stride)
        dilation.append(gap)
        taps.append(slice(j, None, every))
    assert call.numbers is not None
    part = call.numbers[(slice(None), slice(None), *taps)]
    name = "phase_" + "_".join(map(str, first))
    weight = write.constant(name, part.contiguous(), weight=True)
    ones, none = [1] * site.rank, [0] * site.rank
    return write.call(_CONVOLVE[site.rank], x, weight, bias, ones, none, dilation, site.groups)


CONVOLVE = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
MAX_POOL = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}
AVG_POOL = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}

LACKING = "the target has no"
# Why a form is unsound for values of a range; None if it is sound.
Refusal = Callable[[StridedConv, Target, Range], "str | None"]
Build = Callable[[FormWriter, StridedConv, Target, FormInputs, int], Any]


@dataclass(frozen=True, slots=True)
class StrideForm:
    """One way to replace a strided convolution.

    needs: ops that the target must have. refused: why the form is unsound for a range of values.
    built(write, site, target, call, functions): writes the form; it replaces the convolution and
    the first `functions` functions after it. masks: whether it masks, by a selection or a product.
    rounds: whether it is equal only up to rounding.
    """

    name: str
    needs: tuple[str, ...]
    refused: Refusal
    built: Build
    masks: bool = False
    rounds: bool = False

    def first_sound(self, site: StridedConv, target: Target) -> int | str:
        """After how many functions the form is first sound: 0 directly after the convolution, k
        after the k-th function. Or why it never is."""
        if (lacking := self.lacking(site, target)) is not None:
            return lacking
        reasons = [self.refused(site, target, known) for known in site.ranges]
        first = next((k for k, reason in enumerate(reasons) if reason is None), None)
        return _join_reasons(reasons) if first is None else first

    def refusal(self, site: StridedConv, target: Target) -> str | None:
        """Why the form cannot be used; None if it is sound."""
        sound = self.first_sound(site, target)
        return sound if isinstance(sound, str) else None

    def lacking(self, site: StridedConv, target: Target) -> str | None:
        """Why the target cannot run the form: ops that it does not have; None if it has all."""
        absent = [op for op in self.needs if op not in target.ops]
        if self.masks and site.drops and not target.ops & {"select", "multiply"}:
            absent.append("select or multiply")
        return f"{LACKING} {' and no '.join(absent)}" if absent else None


def _join_reasons(reasons: list[str | None]) -> str:
    """The distinct reasons, each with the first function after which it applies."""
    first = dict(reversed([(reason, k) for k, reason in enumerate(reasons)]))
    distinct = sorted((k, reason) for reason, k in first.items())
    return ", and ".join(f"after function {k}: {r}" if k else str(r) for k, r in distinct)


# --- what is sound --------------------------------------------------------------------------------


def _always(site: StridedConv, target: Target, known: Range) -> str | None:
    return None


def _pool(site: StridedConv, target: Target, windows: list[int]) -> str | None:
    """Why the target has no pool with these windows and the stride's; None if it has."""
    if max(windows) > target.pool_size or max(site.stride) > target.pool_stride:
        return (
            f"its pools have windows up to {target.pool_size:g} and strides up to "
            f"{target.pool_stride:g}; needed are {windows} and {site.stride}"
        )
    if target.pool_windows == "stride" and windows != site.stride:
        return f"its pools have windows as large as their stride; needed are {windows}, {site.stride}"
    if not target.pool_ceil and windows == site.stride and any(_excess_of_last_window(site)):
        return None if "pad" in target.ops else ("its pools have no incomplete windows, and it cannot pad")
    return None


def _excess_of_last_window(site: StridedConv) -> list[int]:
    """Positions by which the last window reaches beyond the value, along each axis."""
    return [axis.out * axis.stride - axis.wide for axis in site.axes]


def _is_below_window(site: StridedConv) -> bool:
    """Whether a volume is smaller than a window: torch's 3D average pool rejects it."""
    return site.rank == 3 and any(axis.wide < axis.stride for axis in site.axes)


def _reason_against_product(site: StridedConv, target: Target) -> str | None:
    """Why a value cannot be multiplied by a mask on a target without selections."""
    finite = target.finite or site.integral or not site.drops_input
    if "select" in target.ops or finite:
        return None
    return "0 times Inf or NaN is NaN: masks multiply here; the target is not declared finite"


def _largest_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    if site.drops and known.low < 0:
        return f"values from {known} may be below the zeros of the mask"
    return _pool(site, target, site.stride) or _reason_against_product(site, target)


def _smallest_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    if site.drops and known.high > 0:
        return f"values from {known} may be above the zeros of the mask"
    return _highest_pool(site, target, known) or _reason_against_product(site, target)


def _highest_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    has_fills = site.drops or (not target.pool_ceil and any(_excess_of_last_window(site)))
    if has_fills and site.integral and known.low <= torch.iinfo(site.dtype).min:
        return f"the negative of {known.low:g} is no {site.dtype}"
    return _pool(site, target, site.stride)


def _two_masks(site: StridedConv, target: Target, known: Range) -> str | None:
    most = max(abs(known.low), abs(known.high))
    for a in target.masks:
        if site.integral:
            return f"integers of {site.dtype} have no 1 / {a:g}"
        if math.frexp(a)[0] != 0.5:
            return f"a product with {a:g} rounds: only powers of two and their inverses do not"
        if a < 1:
            return f"small numbers times {a:g} lose bits"
        is_declared = target.finite and most == math.inf  # products with masks are values of the target, too
        if a > 1 and not is_declared and not a * most <= torch.finfo(site.dtype).max:
            return f"{a:g} times values from {known} may overflow"
    multiplies = Target("", target.ops - {"select"}, finite=target.finite)
    return _largest_pool(site, target, known) or _reason_against_product(site, multiplies)


def _lowest_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    return _pool(site, target, site.stride)


def _single_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    return _pool(site, target, [1] * site.rank)


def _sum_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    if _is_below_window(site) and "pad" not in target.ops:
        return "torch has no pool with windows larger than a volume, and the target cannot pad"
    return _pool(site, target, site.stride) or _reason_against_product(site, target)


def _avg_pool(site: StridedConv, target: Target, known: Range) -> str | None:
    count = math.prod(site.stride)
    if count > 1 and site.integral:
        return "a mean of integers is rounded"
    if count > 1 and "multiply" not in target.ops:
        return f"the target cannot multiply by {count}"
    if any(_excess_of_last_window(site)) and "pad" not in target.ops:
        return "windows at the end are incomplete, and the target cannot pad"
    if count > 1 and not _stays_finite(site.dtype, count, known):
        return f"values from {known}, divided by {count} and multiplied, may overflow"
    within = Target("", target.ops, pool_size=target.pool_size, pool_stride=target.pool_stride)
    return _pool(site, within, site.stride) or _reason_against_product(site, target)


def _stays_finite(dtype: torch.dtype, count: int, known: Range) -> bool:
    """Whether (y / count) * count, which increases with y, is finite for all finite y in range."""
    limits = torch.finfo(dtype)
    ends = torch.tensor([max(known.low, limits.min), min(known.high, limits.max)], dtype=dtype)
    return bool((ends / count * count).isfinite().all())


def _split(site: StridedConv, target: Target, known: Range) -> str | None:
    if site.integral and known.low <= torch.iinfo(site.dtype).min:
        return f"the negative of {known.low:g} is no {site.dtype}"
    return _pool(site, target, site.stride) or _reason_against_product(site, target)


def _rotate(site: StridedConv, target: Target, known: Range) -> str | None:
    moves = any(axis.stride > 1 and axis.out > 1 for axis in site.axes)
    if moves and not (target.finite or site.integral):
        return "0 times Inf or NaN is NaN: the form needs masks; the target is not declared finite"
    return None


def _constant_weight(site: StridedConv, target: Target, known: Range) -> str | None:
    return None if site.constant else "its weights are computed at run time"


def _taps(site: StridedConv, target: Target, known: Range) -> str | None:
    if not site.constant:
        return _constant_weight(site, target, known)
    if not (target.finite or site.integral) and zero_taps(site):
        return "zero weights would multiply values that may be Inf or NaN: the result is NaN"
    return None


# --- what is written ------------------------------------------------------------------------------


def write_dense(write: FormWriter, site: StridedConv, call: FormInputs, functions: int) -> Any:
    """The convolution of stride 1, and the first `functions` functions after it."""
    x, padding = call.x, [axis.before for axis in site.axes]
    if any(axis.before != axis.after for axis in site.axes):
        pads = [n for axis in reversed(site.axes) for n in (axis.before, axis.after)]
        x, padding = write.call(aten.constant_pad_nd.default, x, pads, 0), [0] * site.rank
    dilation = [axis.dilation for axis in site.axes]
    y = write.call(CONVOLVE[site.rank], x, call.weight, call.bias, [1] * site.rank, padding, dilation, site.groups)
    for step in call.steps[:functions]:
        y = step(write, y)
    return y


def selected(site: StridedConv) -> Tensor:
    """Mask of the positions of the wide value that the stride selects: bool, its spatial shape."""
    mask = torch.zeros(site.wide, dtype=torch.bool)
    mask[tuple(slice(None, None, axis.stride) for axis in site.axes)] = True
    return mask


def _masked(write: FormWriter, site: StridedConv, target: Target, y: Any, fill: float = 0) -> Any:
    """The value at selected positions, `fill` elsewhere."""
    if not site.drops:
        return y
    if "select" in target.ops:
        other = write.constant("fill", torch.tensor(fill, dtype=site.dtype))
        return write.call(aten.where.self, write.constant("mask", selected(site)), y, other)
    return write.call(aten.mul.Tensor, y, write.constant("mask", selected(site).to(site.dtype)))


def _pool_windows(
    write: FormWriter, site: StridedConv, target: Target, y: Any, pool: Mapping[int, Any], fill: float, *more: Any
) -> Any:
    """A pool over windows of the stride's size. The value is padded if the target has no incomplete
    windows."""
    ceil, average = any(_excess_of_last_window(site)), pool is AVG_POOL
    if ceil and (not target.pool_ceil or (average and _is_below_window(site))):
        y, ceil = _padded(write, site, y, fill), False
    dilation = [] if average else [[1] * site.rank]
    return write.call(pool[site.rank], y, site.stride, site.stride, [0] * site.rank, *dilation, ceil, *more)


def _padded(write: FormWriter, site: StridedConv, y: Any, fill: float) -> Any:
    pads = [n for left in reversed(_excess_of_last_window(site)) for n in (0, left)]
    return write.call(aten.constant_pad_nd.default, y, pads, fill)


def _build_mask_max_pool(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions))
    return _pool_windows(write, site, target, y, MAX_POOL, 0 if site.drops else _lowest(site))


def _build_two_masks(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = write_dense(write, site, call, functions)
    sizes = [axis.out for axis in site.axes]
    numbers = itertools.islice(itertools.cycle(target.masks), math.prod(sizes))
    factors = torch.tensor(list(numbers), dtype=site.dtype).reshape(sizes)
    mask = torch.zeros(site.wide, dtype=site.dtype)
    mask[selected(site)] = factors.flatten()
    y = write.call(aten.mul.Tensor, y, write.constant("mask", mask))
    y = _pool_windows(write, site, target, y, MAX_POOL, 0 if site.drops else _lowest(site))
    is_one = len(target.masks) == 1
    return write.call(aten.mul.Tensor, y, 1 / target.masks[0] if is_one else write.constant("inverse", 1 / factors))


def _build_select(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    lowest = _lowest(site)
    y = _masked(write, site, target, write_dense(write, site, call, functions), lowest)
    return _pool_windows(write, site, target, y, MAX_POOL, lowest)


def _min_windows(write: FormWriter, site: StridedConv, target: Target, y: Any, fill: float) -> Any:
    """The minimum of windows of the stride's size."""
    negative = write.call(aten.neg.default, y)
    return write.call(aten.neg.default, _pool_windows(write, site, target, negative, MAX_POOL, -fill))


def _build_mask_min_pool(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions))
    return _min_windows(write, site, target, y, 0 if site.drops else _greatest(site))


def _build_select_min(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions), _greatest(site))
    return _min_windows(write, site, target, y, _greatest(site))


def _greatest(site: StridedConv) -> float:
    return torch.iinfo(site.dtype).max if site.integral else math.inf


def _lowest(site: StridedConv) -> float:
    return torch.iinfo(site.dtype).min if site.integral else -math.inf


def _build_pool_1x1(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = write_dense(write, site, call, functions)
    return write.call(MAX_POOL[site.rank], y, [1] * site.rank, site.stride)


def _build_slice(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = write_dense(write, site, call, functions)
    for k, axis in enumerate(site.axes):
        if axis.stride > 1:
            end = (axis.out - 1) * axis.stride + 1
            y = write.call(aten.slice.Tensor, y, site.axis(k), 0, end, axis.stride)
    return y


def _build_sum_pool(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions))
    if site.rank > 1:
        return _pool_windows(write, site, target, y, AVG_POOL, 0, True, 1)
    (axis,) = site.axes  # pools of one axis have no divisor
    if any(_excess_of_last_window(site)) and not target.pool_ceil:
        y = _padded(write, site, y, 0)
    flat = write.call(aten.unsqueeze.default, y, -2)
    windows, ceil = [1, axis.stride], target.pool_ceil and any(_excess_of_last_window(site))
    y = write.call(AVG_POOL[2], flat, windows, windows, [0, 0], ceil, True, 1)
    return write.call(aten.squeeze.dims, y, [-2])


def _build_avg_pool(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions))
    if any(_excess_of_last_window(site)):
        y = _padded(write, site, y, 0)
    y = write.call(AVG_POOL[site.rank], y, site.stride, site.stride)
    count = math.prod(site.stride)
    return y if count == 1 else write.call(aten.mul.Tensor, y, count)


def _build_split(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    y = _masked(write, site, target, write_dense(write, site, call, functions))
    signs = (y, write.call(aten.neg.default, y))
    parts = [write.call(aten.relu.default, part) for part in signs]
    above, below = (_pool_windows(write, site, target, part, MAX_POOL, 0) for part in parts)
    return write.call(aten.sub.Tensor, above, below)


def _build_rotate(write: FormWriter, site: StridedConv, target: Target, call: FormInputs, functions: int) -> Any:
    """Along each axis, output i moves back by i (s - 1): by 2^b (s - 1) for each bit b of i, the
    lowest bit first, so that no two outputs collide."""
    y = write_dense(write, site, call, functions)
    for k, axis in enumerate(site.axes):
        numbers = torch.arange(axis.out)
        for bit in range((axis.out - 1).bit_length() if axis.stride > 1 else 0):
            step = (axis.stride - 1) << bit
            positions = numbers * axis.stride - (axis.stride - 1) * (numbers & ((1 << bit) - 1))
            moves = (numbers >> bit) & 1 == 1
            rests = write.call(aten.mul.Tensor, y, _axis_mask(write, site, k, positions[~moves]))
            moved = write.call(aten.mul.Tensor, y, _axis_mask(write, site, k, positions[moves]))
            moved = write.call(aten.roll.default, moved, [-step], [site.axis(k)])
            y = write.call(aten.add.Tensor, rests, moved)
        if axis.out < axis.wide:
            y = write.call(aten.slice.Tensor, y, site.axis(k), 0, axis.out)
    return y


def _axis_mask(write: FormWriter, site: StridedConv, k: int, positions: Tensor) -> Any:
    """A mask of positions along one spatial axis, 1 elsewhere 0."""
    mask = torch.zeros(site.axes[k].wide, dtype=site.dtype)
    mask[positions] = 1
    return write.constant("mask", mask.reshape([-1] + [1] * (site.rank - 1 - k)))


FORMS: Mapping[str, StrideForm] = {
    form.name: form
    for form in (
        StrideForm("mask_max_pool", ("max_pool",), _largest_pool, _build_mask_max_pool, masks=True),
        StrideForm("two_masks", ("max_pool", "multiply"), _two_masks, _build_two_masks),
        StrideForm("select_max_pool", ("max_pool", "select"), _lowest_pool, _build_select),
        StrideForm("mask_min_pool", ("min_pool",), _smallest_pool, _build_mask_min_pool, masks=True),
        StrideForm("select_min_pool", ("min_pool", "select"), _highest_pool, _build_select_min),
        StrideForm("pool_1x1", ("max_pool",), _single_pool, _build_pool_1x1),
        StrideForm("slice", ("slice",), _always, _build_slice),
        StrideForm("mask_sum_pool", ("sum_pool",), _sum_pool, _build_sum_pool, masks=True),
        StrideForm("mask_avg_pool", ("avg_pool",), _avg_pool, _build_avg_pool, masks=True, rounds=True),
        StrideForm("split", ("max_pool", "relu", "add"), _split, _build_split, masks=True),
        StrideForm("rotate", ("rotate", "multiply", "add", "crop"), _rotate, _build_rotate),
        StrideForm("space_to_depth", ("space_to_depth", "pad"), _taps, space_to_depth, rounds=True),
        StrideForm("phase_split", ("slice", "add", "pad"), _constant_weight, phase_split, rounds=True),
    )
}

__all__ = ["FORMS", "StrideForm", "selected", "write_dense"]
