"""Windows that read only every s-th position, and slices of their outputs.

conv(x, stride, dilation, padding all multiples of g) == conv(x[::g], all of them / g)
max_pool(x, stride)[::s]                              == max_pool(x, stride * s)

Which positions of a value its readers need, every g-th from the first on along each axis, is computed by a
backward sweep from the outputs over the letters of the op table (gap 0: only the first; 1: all):

    a convolution or a pool      gcd(stride, padding, dilation), without the
                                 stride of one window; so a strided convolution
                                 of one tap reads all, unless it was dilated
    y[first::s], gap g of y      gcd(first, s g)
    a call that carries axes     the gaps of its value
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, ops

from demask.graph.editor import GraphEditor
from demask.graph.queries import only_reader
from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import carry, carry_back
from demask.ops.schema import fake
from demask.ops.traits import AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, PADS

aten = ops.aten

Gaps = tuple[int, ...]  # distance of the positions that are read, per axis of a value


def gaps_of(graph: fx.Graph, table: Table) -> dict[fx.Node, Gaps]:
    """By value, the distance of the positions that its readers need, along each axis.

    >>> import torch
    >>> from torch import nn
    >>> from demask.graph.capture.capture import capture
    >>> from demask.ops import TABLE
    >>> net = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 3, padding=2, dilation=2, stride=2)).eval()
    >>> graph = capture(net, (torch.ones(1, 1, 8, 8),)).graph
    >>> [gaps for node, gaps in gaps_of(graph, TABLE).items() if node.name == "relu"]
    [(1, 1, 2, 2)]
    """
    gaps_by_node: dict[fx.Node, Gaps] = {}
    for node in reversed(graph.nodes):
        for operand, gaps in _gaps_of_operands(node, gaps_by_node, table):
            before = gaps_by_node.get(operand, (0,) * len(gaps))
            gaps_by_node[operand] = tuple(map(math.gcd, before, gaps))
    return gaps_by_node


def _gaps_of_operands(
    node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps], table: Table
) -> Iterator[tuple[fx.Node, Gaps]]:
    known = dict(_window_reads(node) or _slice(node, gaps_by_node) or _carried(node, gaps_by_node, table))
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, Tensor):
            yield operand, known.get(operand, (1,) * value.ndim)


def _window_reads(node: fx.Node) -> list[tuple[fx.Node, Gaps]] | None:
    """The input of a convolution or max pool, with its gaps."""
    axes = window_gaps(node)
    if axes is None:
        return None
    x = schema.source_of(node)
    return [(x, (*[1] * (fake(x).ndim - len(axes)), *axes))]


def window_gaps(node: fx.Node) -> Gaps | None:
    """The gaps of a convolution or max pool along its spatial axes; None for other calls."""
    if node.target not in CONVOLUTIONS | MAX_POOLS:
        return None
    arguments = schema.arguments(node)
    weight = arguments.get("weight")
    kernel = list(arguments["kernel_size"]) if weight is None else list(fake(weight).shape[2:])
    rank = len(kernel)
    stride, padding, dilation = (
        per_axis(arguments[name] or kernel, rank) for name in ("stride", "padding", "dilation")
    )
    stride = (s if n != 1 else 0 for s, n in zip(stride, fake(node).shape[-rank:], strict=True))
    return tuple(map(math.gcd, stride, padding, dilation))


def per_axis(value: Any, rank: int) -> list[int]:
    """An argument as one number per axis."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * rank if len(values) == 1 else values


def _slice(node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps]) -> list[tuple[fx.Node, Gaps]] | None:
    """The source of a slice, with its gaps; None for other calls."""
    if node.target is not aten.slice.Tensor or node not in gaps_by_node:
        return None
    cut = schema.arguments(node)
    first, step = cut["start"] or 0, cut["step"]
    if not isinstance(first, int) or not isinstance(step, int) or first < 0:
        return None
    gaps = list(gaps_by_node[node])
    axis = cut["dim"] % len(gaps)
    gaps[axis] = math.gcd(first, step * gaps[axis])
    return [(cut["self"], tuple(gaps))]


def _carried(node: fx.Node, gaps_by_node: Mapping[fx.Node, Gaps], table: Table) -> list[tuple[fx.Node, Gaps]]:
    """The operands of a call along whose axes it carries positions, with the gaps of its value."""
    relation = bind(node, table) if node.op == "call_function" and node in gaps_by_node else None
    if not isinstance(relation, Relation) or len(relation.outs) != 1:
        return []
    reads: dict[fx.Node, Gaps] = {}
    carried = carry_back(relation, dict(enumerate(gaps_by_node[node])))
    for operand, gaps, axes in zip(relation.operands, carried, relation.ins, strict=True):
        if isinstance(operand.value, fx.Node):
            axis_gaps = tuple(gaps.get(k, int(bool(axis))) for k, axis in enumerate(axes))
            before = reads.get(operand.value, (0,) * len(axis_gaps))
            reads[operand.value] = tuple(map(math.gcd, before, axis_gaps))
    return list(reads.items())


def skippable_axes(graph: fx.Graph, table: Table) -> dict[fx.Node, tuple[bool, ...]]:
    """The values that can be computed at some positions only, with a flag per axis: outputs of
    convolutions and pools along spatial axes, and values of calls that carry these axes."""
    flags_by_node: dict[fx.Node, tuple[bool, ...]] = {}
    for node in graph.nodes:
        value, axes = node.meta.get("val"), window_gaps(node)
        if axes is not None:
            lead = value.ndim - len(axes)
            flags_by_node[node] = (*[False] * lead, *[True] * len(axes))
        elif any(n in flags_by_node for n in node.all_input_nodes) and any(flags := _skips(node, flags_by_node, table)):
            flags_by_node[node] = flags
    return flags_by_node


def _skips(node: fx.Node, flags_by_node: Mapping[fx.Node, tuple[bool, ...]], table: Table) -> tuple[bool, ...]:
    """Whether positions can be skipped, for each axis of a call that carries or shifts it."""
    if node.target in PADS | {aten.slice.Tensor}:
        return flags_by_node.get(schema.source_of(node), ())
    relation = bind(node, table) if node.op == "call_function" else None
    if not isinstance(relation, Relation) or len(relation.outs) != 1:
        return ()
    flags = [
        {k: True for k, free in enumerate(_flags(operand.value, flags_by_node)) if free}
        for operand in relation.operands
    ]
    (carried,) = carry(relation, flags, operator.or_)
    return tuple(k in carried for k in range(len(relation.outs[0])))


def _flags(value: Any, flags_by_node: Mapping[fx.Node, tuple[bool, ...]]) -> tuple[bool, ...]:
    return flags_by_node.get(value, ()) if isinstance(value, fx.Node) else ()


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
        node = schema.source_of(node)


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
        readers = [_last_slice(node) for node in x.users]
        steppers = [n for n in readers if window_gaps(n) is not None or n.target is aten.slice.Tensor]
        if len(steppers) > 1 or any(window_gaps(node) is not None for node in steppers):
            some = tuple(g if free else 1 for g, free in zip(gaps[x], optional[x], strict=True))
            changed |= _shared(editor, x, some, steppers)
    return changed


def _last_slice(node: fx.Node) -> fx.Node:
    """The last of consecutive slices, if each is the only reader of the one before it; other nodes
    themselves."""
    reader = only_reader(node) if node.target is aten.slice.Tensor else None
    more = reader is not None and reader.target is aten.slice.Tensor
    return _last_slice(reader) if more and reader is not None else node


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
    if not all(less.values()) or all(_is_shared_slice(node, x, where) for node in readers):
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
        _count_windows(-(-sizes[k] // steps[k]), *(less[name][k] for name in names), kernel[k])  # type: ignore[call-arg]
        for k in range(rank)
    ]
    if counts != list(fake(node).shape[-rank:]):
        return None

    def again(editor: GraphEditor, x: fx.Node) -> fx.Node:
        return editor.repeat_call(node, **less, **{source: x})

    return again


def _less_slices(node: fx.Node, every: Sequence[int]) -> Again:
    """A function that repeats consecutive slices on every g-th position of their operand."""
    cuts, shape = _slices_by_axis(node), fake(node).shape

    def again(editor: GraphEditor, x: fx.Node) -> fx.Node:
        where: list[Progression] = [(0, 1, n) for n in fake(x).shape]
        for axis, (first, step) in cuts.items():
            where[axis] = (first // every[axis], max(step // every[axis], 1), shape[axis])
        return insert_slices(editor, node, x, where)

    return again


def _slices_by_axis(node: fx.Node) -> dict[int, tuple[int, int]]:
    """First position and step of consecutive slices, by axis."""
    cuts: dict[int, tuple[int, int]] = {}
    for axis, start, _, step in reversed([cut_of(cut) for cut in cuts_of(node)]):
        first, gap = cuts.get(axis, (0, 1))
        cuts[axis] = (first + start * gap, step * gap)
    return cuts


def _is_shared_slice(node: fx.Node, x: fx.Node, where: Sequence[Progression]) -> bool:
    first = fake(x).ndim - len(where)
    wanted = {
        first + k: (start, step) for k, (start, step, count) in enumerate(where) if count != fake(x).shape[first + k]
    }
    return node.target is aten.slice.Tensor and _slices_by_axis(node) == wanted


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
    small = insert_slices(editor, node, inner, [(0, step, less), *_all_positions_after(inner, axis)])
    flat[k : k + 2] = [before // step, count - less - before // step]
    args, kwargs = schema.bind_arguments(x.target, arguments | {"self": small, "pad": flat})
    return editor.insert(node, node, x.target, *args, **kwargs)


def _all_positions_after(x: fx.Node, axis: int) -> list[Progression]:
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
    counts = [_count_windows(*axis) for axis in axes]
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
    counts = [_count_windows(*axis) for axis in axes]
    if counts != list(fake(node).shape[-rank:]):
        return None
    args, kwargs = schema.bind_arguments(pool.target, arguments | {"stride": step})
    return editor.insert(node, node, pool.target, *args, **kwargs)


def _count_windows(size: int, stride: int, padding: int, dilation: int, kernel: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
