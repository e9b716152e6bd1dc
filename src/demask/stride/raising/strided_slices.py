"""Windows that read only every s-th position, and slices of their outputs.

conv(x, stride, dilation, padding all multiples of g) == conv(x[::g], all of them / g)
max_pool(x, stride)[::s]                              == max_pool(x, stride * s)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx, ops

from demask.graph.editor import GraphEditor
from demask.graph.queries import only_reader
from demask.ops import Table, schema
from demask.ops.schema import fake
from demask.ops.traits import AVERAGE_POOLS, MAX_POOLS, PADS
from demask.stride.raising.read_steps import Gaps, gaps_of, per_axis, skippable_axes, window_gaps

aten = ops.aten
Progression = tuple[int, int, int]  # first position, step, count


def insert_slices(editor: GraphEditor, reader: fx.Node, x: fx.Node, where: Sequence[Progression]) -> fx.Node:
    """Slices of the last axes of a value, inserted before `reader`. where: one progression per
    axis."""
    rank = fake(x).ndim
    for k, (first, step, count) in enumerate(where):
        axis = rank - len(where) + k
        if (first, count) != (0, fake(x).shape[axis]):
            stop = first + (count - 1) * step + 1
            x = editor.insert(reader, None, aten.slice.Tensor, x, axis, first, stop, step)
    return x


def cuts_of(node: fx.Node) -> Iterator[fx.Node]:
    """The consecutive slices that end at a node, the last one first."""
    while node.target is aten.slice.Tensor:
        yield node
        node = node.args[0]  # type: ignore[assignment]


def root_of(node: Any) -> Any:
    """The value before the slices that end at a node."""
    last = list(cuts_of(node))
    return last[-1].args[0] if last else node


def cut_of(node: fx.Node) -> tuple[int, Any, Any, Any]:
    """Axis, start, end and step of a slice; a negative start is resolved if the size is known."""
    arguments = schema.arguments(node)
    value, start = fake(arguments["self"]), arguments["start"] or 0
    axis = arguments["dim"] % value.ndim
    size = value.shape[axis]
    if isinstance(start, int) and isinstance(size, int):
        start = min(max(start + size if start < 0 else start, 0), size)
    return axis, start, arguments["end"], arguments["step"]


def share_slices(editor: GraphEditor, table: Table) -> bool:
    """If windows and slices read only every g-th position of a value, and the value can be computed
    at these positions only, insert one slice that they share. Whether the graph changed."""
    gaps, optional = gaps_of(editor.graph, table), skippable_axes(editor.graph, table)
    changed = False
    for x in [node for node in editor.graph.nodes if node in optional]:
        readers = [_last(node) for node in x.users]
        steppers = [n for n in readers if window_gaps(n) is not None or n.target is aten.slice.Tensor]
        if len(steppers) > 1 or any(window_gaps(node) is not None for node in steppers):
            some = tuple(g if free else 1 for g, free in zip(gaps[x], optional[x], strict=True))
            changed |= _shared(editor, x, some, steppers)
    return changed


def _last(node: fx.Node) -> fx.Node:
    """The last of consecutive slices, if each is the only reader of the one before it; other nodes
    themselves."""
    reader = only_reader(node) if node.target is aten.slice.Tensor else None
    more = reader is not None and reader.target is aten.slice.Tensor
    return _last(reader) if more and reader is not None else node


def _shared(editor: GraphEditor, x: fx.Node, gaps: Gaps, readers: Sequence[fx.Node]) -> bool:
    """Let readers share a slice of the positions that they read; whether the graph changed."""
    sizes = fake(x).shape
    axes = [k for k, gap in enumerate(gaps) if gap != 1 and isinstance(sizes[k], int)]
    first = min(axes, default=len(sizes))
    where = [
        (0, g or n or 1, -(-n // (g or n or 1))) if k in axes else (0, 1, n)
        for k, (g, n) in enumerate(zip(gaps, sizes, strict=True))
    ][first:]
    if all(count == n for (_, _, count), n in zip(where, sizes[first:], strict=True)):
        return False
    steps = [step for _, step, _ in where]
    less = {node: _less(node, [*[1] * first, *steps]) for node in readers}
    if not all(less.values()) or all(_cuts_alike(node, x, where) for node in readers):
        return False
    reader = next(node for node in editor.graph.nodes if node in x.users)
    small = insert_slices(editor, reader, x, where)
    for node, rebuild in less.items():
        assert rebuild is not None
        editor.replace(node, rebuild(editor, small))
    return True


Again = Callable[[GraphEditor, fx.Node], fx.Node]  # repeats a call on a slice of its operand


def _less(node: fx.Node, every: Sequence[int]) -> Again | None:
    """A function that repeats a call on every g-th position of its operand; None if its windows
    would change. every: g for each axis."""
    if node.target is aten.slice.Tensor:
        return _less_slices(node, every)
    arguments, rank = schema.arguments(node), len(window_gaps(node) or ())
    source, steps = "input" if "input" in arguments else "self", every[-rank:]
    if any(step > 1 for step in every[:-rank]):
        return None
    sizes, weight = fake(arguments[source]).shape[-rank:], arguments.get("weight")
    kernel = list(arguments["kernel_size"]) if weight is None else list(fake(weight).shape[2:])
    names = ("stride", "padding", "dilation")
    less = {
        name: [
            max(n // g, int(name != "padding"))
            for n, g in zip(per_axis(arguments[name] or kernel, rank), steps, strict=True)
        ]
        for name in names
    }
    counts = [
        _windows(-(-sizes[k] // steps[k]), *(less[name][k] for name in names), kernel[k])  # type: ignore[call-arg]
        for k in range(rank)
    ]
    if counts != list(fake(node).shape[-rank:]):
        return None

    def again(editor: GraphEditor, x: fx.Node) -> fx.Node:
        return editor.repeat_call(node, **less, **{source: x})

    return again


def _less_slices(node: fx.Node, every: Sequence[int]) -> Again:
    """A function that repeats consecutive slices on every g-th position of their operand."""
    cuts, shape = _cuts(node), fake(node).shape

    def again(editor: GraphEditor, x: fx.Node) -> fx.Node:
        where: list[Progression] = [(0, 1, n) for n in fake(x).shape]
        for axis, (first, step) in cuts.items():
            where[axis] = (first // every[axis], max(step // every[axis], 1), shape[axis])
        return insert_slices(editor, node, x, where)

    return again


def _cuts(node: fx.Node) -> dict[int, tuple[int, int]]:
    """First position and step of consecutive slices, by axis."""
    cuts: dict[int, tuple[int, int]] = {}
    for axis, start, _, step in reversed([cut_of(cut) for cut in cuts_of(node)]):
        first, gap = cuts.get(axis, (0, 1))
        cuts[axis] = (first + start * gap, step * gap)
    return cuts


def _cuts_alike(node: fx.Node, x: fx.Node, where: Sequence[Progression]) -> bool:
    """Whether a reader already is the slice that would be shared."""
    first = fake(x).ndim - len(where)
    wanted = {
        first + k: (start, step) for k, (start, step, count) in enumerate(where) if count != fake(x).shape[first + k]
    }
    return node.target is aten.slice.Tensor and _cuts(node) == wanted


def slice_before_pad(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A pad of a slice in place of a slice of a pad, if the padding is a multiple of the step."""
    x: Any = node.args[0] if node.target is aten.slice.Tensor else None
    if x is None or x.target not in PADS or schema.arguments(x).get("mode", "constant") != "constant":
        return None
    arguments, (axis, start, _, step) = schema.arguments(x), cut_of(node)
    inner, flat = arguments["self"], list(arguments["pad"])
    size, k = fake(inner).shape[axis], 2 * (fake(inner).ndim - 1 - axis)
    flat += [0] * (k + 2 - len(flat))
    before, count = flat[k], fake(node).shape[axis]
    if start or not all(isinstance(n, int) for n in (size, count, before, step)) or step == 1:
        return None
    if before < 0 or before % step:
        return None
    less = -(-size // step)
    small = insert_slices(editor, node, inner, [(0, step, less), *_whole(inner, axis)])
    flat[k : k + 2] = [before // step, count - less - before // step]
    args, kwargs = schema.bind_arguments(x.target, arguments | {"self": small, "pad": flat})
    return editor.insert(node, node, x.target, *args, **kwargs)


def _whole(x: fx.Node, axis: int) -> list[Progression]:
    """All positions of the axes after one."""
    return [(0, 1, n) for n in fake(x).shape[axis + 1 :]]


def absorb_pad(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A max pool with padding in place of a max pool of a value padded with the lowest number."""
    x: Any = node.args[0] if node.target in MAX_POOLS else None
    if x is None or x.target is not aten.constant_pad_nd.default:
        return None
    arguments, pad = schema.arguments(node), schema.arguments(x)
    rank = len(arguments["kernel_size"])
    pads, sizes = list(pad["pad"]), fake(pad["self"]).shape[-rank:]
    own = per_axis(arguments["padding"], rank)
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
    kernel = per_axis(arguments["kernel_size"], rank)
    steps = per_axis(arguments["stride"] or kernel, rank)
    axes = zip(sizes, steps, before, per_axis(arguments["dilation"], rank), kernel, strict=True)
    counts = [_windows(*axis) for axis in axes]
    small = all(0 <= b <= k // 2 for b, k in zip(before, kernel, strict=True))
    if not small or arguments["ceil_mode"] or counts != list(fake(node).shape[-rank:]):
        return None
    return editor.repeat_call(node, self=pad["self"], padding=before)


def merge_pads(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """One pad in place of two consecutive pads with the same value."""
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
    return editor.insert(node, node, node.target, first["self"], both, first["value"])


def absorb_slices(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A pool with a larger stride in place of slices that alone read a pool."""
    if node.target is not aten.slice.Tensor:
        return None
    pool, cuts = root_of(node), list(cuts_of(node))[::-1]
    if not isinstance(pool, fx.Node) or pool.target not in MAX_POOLS | AVERAGE_POOLS:
        return None
    if any(len(cut.users) > 1 for cut in cuts[:-1]) or len(pool.users) > 1:
        return None
    arguments, rank = schema.arguments(pool), len(schema.arguments(pool)["kernel_size"])
    sizes, kernel = (fake(arguments["self"]).shape[-rank:], per_axis(arguments["kernel_size"], rank))
    step = per_axis(arguments["stride"] or kernel, rank)
    for cut in cuts:
        axis, start, _, more = cut_of(cut)
        axis -= fake(node).ndim - rank
        if axis < 0 or start or not isinstance(more, int):
            return None
        step[axis] *= more
    dilation = per_axis(arguments.get("dilation", 1), rank)
    if arguments["ceil_mode"] or not all(isinstance(n, int) for n in sizes):
        return None
    axes = zip(sizes, step, per_axis(arguments["padding"], rank), dilation, kernel, strict=True)
    counts = [_windows(*axis) for axis in axes]
    if counts != list(fake(node).shape[-rank:]):
        return None
    args, kwargs = schema.bind_arguments(pool.target, arguments | {"stride": step})
    return editor.insert(node, node, pool.target, *args, **kwargs)


def _windows(size: int, stride: int, padding: int, dilation: int, kernel: int) -> int:
    """Number of windows along an axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
