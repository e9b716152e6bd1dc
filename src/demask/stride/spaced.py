"""Windows that slide over every s-th position alone, and slices of what they make.

conv(x, stride, dilation, padding all multiples of g) == conv(x[::g], all of them / g)
max_pool(x, stride)[::s]                              == max_pool(x, stride * s)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, ops

from demask.ops import schema
from demask.stride.unblocked import CONVOLUTIONS
from demask.tune.draft import Draft

aten = ops.aten
Every = tuple[int, int, int]  # first position, step, how many

MAX_POOLS: Mapping[Any, Callable[..., Tensor]] = {
    aten.max_pool1d.default: F.max_pool1d, aten.max_pool2d.default: F.max_pool2d,
    aten.max_pool3d.default: F.max_pool3d,
}  # fmt: skip
AVERAGE_POOLS = {
    aten.avg_pool1d.default: F.max_pool1d, aten.avg_pool2d.default: F.max_pool2d,
    aten.avg_pool3d.default: F.max_pool3d,
}  # fmt: skip


def slices(
    draft: Draft, reader: fx.Node, x: fx.Node, where: Sequence[Every]
) -> fx.Node:  # fmt: skip
    """Positions of the last axes of a value."""
    rank = x.meta["val"].ndim
    for k, (first, step, count) in enumerate(where):
        axis = rank - len(where) + k
        if (first, step, count) != (0, 1, x.meta["val"].shape[axis]):
            stop = first + (count - 1) * step + 1
            x = draft.call(reader, None, aten.slice.Tensor, x, axis, first, stop, step)
    return x


def cuts_of(node: fx.Node) -> Iterator[fx.Node]:
    """The slices that a value went through, the last one first."""
    while node.target is aten.slice.Tensor:
        yield node
        node = node.args[0]  # type: ignore[assignment]


def root_of(node: Any) -> Any:
    last = list(cuts_of(node))
    return last[-1].args[0] if last else node


def cut_of(node: fx.Node) -> tuple[int, Any, Any, Any]:
    found = schema.arguments(node)
    rank = found["self"].meta["val"].ndim
    return found["dim"] % rank, found["start"], found["end"], found["step"]


def spaced(draft: Draft, node: fx.Node) -> fx.Node | None:
    """A convolution or a pool that reads every g-th position alone: of those."""
    if node.target not in CONVOLUTIONS and node.target not in MAX_POOLS:
        return None
    found = schema.arguments(node)
    x: Any = found.get("input", found.get("self"))
    weight = found.get("weight")
    kernel = list(found["kernel_size"]) if weight is None else list(weight.meta["val"].shape[2:])
    rank = len(kernel)
    sizes = x.meta["val"].shape[-rank:]
    if isinstance(found["padding"], str) or not all(isinstance(n, int) for n in sizes):
        return None
    names = ("stride", "padding", "dilation")
    each = {name: _each(found[name] or kernel, rank) for name in names}
    beside = _beside(x, node, rank)
    apart = [
        math.gcd(*(each[name][k] for name in names))
        if kernel[k] > 1
        else math.gcd(beside[k], each["stride"][k], each["padding"][k])
        for k in range(rank)
    ]
    small = [-(-n // g) for n, g in zip(sizes, apart, strict=True)]
    made = [_windows(small[k], *(each[name][k] // apart[k] for name in names), kernel[k])  # type: ignore[call-arg]
            for k in range(rank)]  # fmt: skip
    if set(apart) == {1} or made != list(node.meta["val"].shape[-rank:]):
        return None
    where = [(0, g, n) for g, n in zip(apart, small, strict=True)]
    less = {name: [max(n // g, name != "padding") for n, g in zip(each[name], apart, strict=True)]
            for name in names}  # fmt: skip
    source = "input" if "input" in found else "self"
    given = found | less | {source: slices(draft, node, x, where)}
    args, kwargs = schema.call(node.target, given)
    return draft.call(node, node, node.target, *args, **kwargs)


def _beside(x: fx.Node, reader: fx.Node, rank: int) -> list[int]:
    """The steps in which all others read a value: a window of one position follows them."""
    found = [0] * rank
    for user in x.users:
        step, last = [1] * rank, user
        while user is not reader and last.target is aten.slice.Tensor:
            axis, start, _, each = cut_of(last)
            if start == 0 and axis >= x.meta["val"].ndim - rank and isinstance(each, int):
                step[axis - x.meta["val"].ndim] = each
            if len(last.users) != 1:
                break
            last = next(iter(last.users))
        if user is not reader:
            found = [math.gcd(a, b) for a, b in zip(found, step, strict=True)]
    return [n or 1 for n in found]


def padded(draft: Draft, node: fx.Node) -> fx.Node | None:
    """A max pool of what was padded with the lowest value: it pads so itself."""
    x: Any = node.args[0] if node.target in MAX_POOLS else None
    if x is None or x.target is not aten.constant_pad_nd.default:
        return None
    found, pad = schema.arguments(node), schema.arguments(x)
    rank = len(found["kernel_size"])
    pads, sizes = list(pad["pad"]), pad["self"].meta["val"].shape[-rank:]
    own = _each(found["padding"], rank)
    if pad["value"] != -math.inf or len(pads) > 2 * rank:
        return None
    if not all(isinstance(n, int) for n in (*pads, *sizes)):
        return None
    before = [0] * rank
    for k in range(len(pads) // 2):
        before[rank - 1 - k] = pads[2 * k]
    if any(a and b for a, b in zip(own, before, strict=True)):
        return None
    before = [a + b for a, b in zip(own, before, strict=True)]
    kernel = _each(found["kernel_size"], rank)
    steps = _each(found["stride"] or kernel, rank)
    each = zip(sizes, steps, before, _each(found["dilation"], rank), kernel, strict=True)
    made = [_windows(*one) for one in each]
    small = all(0 <= b <= k // 2 for b, k in zip(before, kernel, strict=True))
    if not small or found["ceil_mode"] or made != list(node.meta["val"].shape[-rank:]):
        return None
    args, kwargs = schema.call(node.target, found | {"self": pad["self"], "padding": before})
    return draft.call(node, node, node.target, *args, **kwargs)


def padded_once(draft: Draft, node: fx.Node) -> fx.Node | None:
    """Two paddings with one value, one behind the other: one."""
    inner: Any = node.args[0] if node.target is aten.constant_pad_nd.default else None
    if inner is None or inner.target is not node.target or len(inner.users) > 1:
        return None
    outer, first = schema.arguments(node), schema.arguments(inner)
    pads = [list(outer["pad"]), list(first["pad"])]
    flat = [n for pad in pads for n in pad]
    if outer["value"] != first["value"] or not all(isinstance(n, int) and n >= 0 for n in flat):
        return None
    size = max(map(len, pads))
    both = [a + b for a, b in zip(*([*p, *[0] * (size - len(p))] for p in pads), strict=True)]
    return draft.call(node, node, node.target, first["self"], both, first["value"])


def pooled(draft: Draft, node: fx.Node) -> fx.Node | None:
    """A slice of a pool that nobody else reads: a pool of a longer stride."""
    if node.target is not aten.slice.Tensor:
        return None
    pool, cuts = root_of(node), list(cuts_of(node))[::-1]
    if not isinstance(pool, fx.Node) or pool.target not in {**MAX_POOLS, **AVERAGE_POOLS}:
        return None
    if any(len(cut.users) > 1 for cut in cuts[:-1]) or len(pool.users) > 1:
        return None
    found, rank = schema.arguments(pool), len(schema.arguments(pool)["kernel_size"])
    sizes, kernel = found["self"].meta["val"].shape[-rank:], _each(found["kernel_size"], rank)
    step = _each(found["stride"] or kernel, rank)
    for cut in cuts:
        axis, start, _, each = cut_of(cut)
        axis -= node.meta["val"].ndim - rank
        if axis < 0 or start or not isinstance(each, int):
            return None
        step[axis] *= each
    dilation = _each(found.get("dilation", 1), rank)
    if found["ceil_mode"] or not all(isinstance(n, int) for n in sizes):
        return None
    made = [_windows(*each) for each in zip(sizes, step, _each(found["padding"], rank), dilation,
                                            kernel, strict=True)]  # fmt: skip
    if made != list(node.meta["val"].shape[-rank:]):
        return None
    args, kwargs = schema.call(pool.target, found | {"stride": step})
    return draft.call(node, node, pool.target, *args, **kwargs)


def _each(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


def _windows(size: int, stride: int, padding: int, dilation: int, kernel: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
