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
from itertools import zip_longest
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn, ops

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.value import Value
from demask.ops import Relation, Table, bind, schema
from demask.ops.flow import carry, carry_back
from demask.ops.schema import fake
from demask.ops.traits import AVERAGE_POOLS, CONVOLUTIONS, MAX_POOLS, PADS
from demask.rewrites.rule import Pass, case, rule

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


def insert_slices(x: Value, where: Sequence[Progression]) -> Value:
    """Slices of the last axes of a value. where: one progression per axis."""
    for axis, (first, step, count) in enumerate(where, x.rank - len(where)):
        if (first, count) != (0, x.shape[axis]):
            x = x.slice(axis, first, first + (count - 1) * step + 1, step)
    return x


def cuts_of(x: Value) -> list[Value]:
    """The consecutive slices that end at a value, the first one first."""
    return [*cuts_of(x.arg("self")), x] if x.calls(aten.slice.Tensor) else []


def root_of(x: Value) -> Value:
    """The value before the slices that end at a value."""
    return cuts[0].arg("self") if (cuts := cuts_of(x)) else x


def cut_of(part: Value) -> tuple[int, Any, Any, Any]:
    """Axis, start, end and step of a slice; a negative start is resolved if the size is known."""
    x, dim, start, end, step = part.arguments.values()
    axis, start = dim % x.rank, start or 0
    size = x.shape[axis]
    if isinstance(start, int) and isinstance(size, int):
        start = min(max(start + size if start < 0 else start, 0), size)
    return axis, start, end, step


def _share_slices(program: Program, table: Table) -> Program:
    """If windows and slices read only every g-th position of a value, and the value can be computed
    at these positions only, the program with one slice that they share."""
    editor = GraphEditor(program)
    gaps, optional = gaps_of(editor.graph, table), skippable_axes(editor.graph, table)
    changed = False
    for x in [Value(node, editor) for node in editor.graph.nodes if node in optional]:
        readers = [_last_slice(user) for user in x.users]
        windows = [reader for reader in readers if window_gaps(reader.node) is not None]
        steppers = [reader for reader in readers if reader in windows or reader.calls(aten.slice.Tensor)]
        if len(steppers) > 1 or windows:
            some = tuple(g if free else 1 for g, free in zip(gaps[x.node], optional[x.node], strict=True))
            changed |= _shared(x, some, steppers)
    return editor.finish() if changed else program


def _last_slice(x: Value) -> Value:
    """The last of consecutive slices, if each is the only reader of the one before it; other values
    themselves."""
    readers = x.users if x.calls(aten.slice.Tensor) else ()
    return _last_slice(readers[0]) if len(readers) == 1 and readers[0].calls(aten.slice.Tensor) else x


def _shared(x: Value, gaps: Gaps, readers: Sequence[Value]) -> bool:
    """Let readers share a slice of the positions that they read; whether the graph changed."""
    sizes = x.shape
    axes = [k for k, gap in enumerate(gaps) if gap != 1 and isinstance(sizes[k], int)]
    first = min(axes, default=len(sizes))
    where = [
        (0, g or n or 1, -(-n // (g or n or 1))) if k in axes else (0, 1, n)
        for k, (g, n) in enumerate(zip(gaps, sizes, strict=True))
    ][first:]
    if all(count == n for (_, _, count), n in zip(where, sizes[first:], strict=True)):
        return False
    steps = [step for _, step, _ in where]
    less = {reader.node: _less(reader, [*[1] * first, *steps]) for reader in readers}
    if not all(less.values()) or all(_is_shared_slice(reader, x, where) for reader in readers):
        return False
    graph = x.editor.graph
    with graph.inserting_before(next(node for node in graph.nodes if node in x.node.users)):
        small = insert_slices(x, where)
    for node, again in less.items():
        assert again is not None
        with graph.inserting_before(node):
            x.editor.replace(node, again(small).node, inherit=True)
    return True


Again = Callable[[Value], Value]  # repeats a call on a slice of its operand


def _less(reader: Value, every: Sequence[int]) -> Again | None:
    """A function that repeats a call on every g-th position of its operand; None if its windows
    would change. every: g for each axis."""
    if reader.calls(aten.slice.Tensor):
        return lambda x: insert_slices(x, _less_slices(reader, x, every))
    arguments, rank = reader.arguments, len(window_gaps(reader.node) or ())
    source, steps = "input" if "input" in arguments else "self", every[-rank:]
    if any(step > 1 for step in every[:-rank]):
        return None
    sizes, weight = arguments[source].shape[-rank:], arguments.get("weight")
    kernel = list(arguments["kernel_size"]) if weight is None else list(weight.shape[2:])
    less = {
        name: [
            max(n // g, int(name != "padding"))
            for n, g in zip(per_axis(arguments[name] or kernel, rank), steps, strict=True)
        ]
        for name in ("stride", "padding", "dilation")
    }
    axes = zip([-(-n // g) for n, g in zip(sizes, steps, strict=True)], *less.values(), kernel, strict=True)
    if [_count_windows(*axis) for axis in axes] != list(reader.shape[-rank:]):
        return None
    return lambda x: reader.like(**less, **{source: x})


def _less_slices(reader: Value, x: Value, every: Sequence[int]) -> list[Progression]:
    """The positions of consecutive slices among every g-th position of their operand, which x has."""
    where: list[Progression] = [(0, 1, n) for n in x.shape]
    for axis, (first, step) in _slices_by_axis(reader).items():
        where[axis] = (first // every[axis], max(step // every[axis], 1), reader.shape[axis])
    return where


def _slices_by_axis(x: Value) -> dict[int, tuple[int, int]]:
    """First position and step of consecutive slices, by axis."""
    cuts: dict[int, tuple[int, int]] = {}
    for axis, start, _, step in map(cut_of, cuts_of(x)):
        first, gap = cuts.get(axis, (0, 1))
        cuts[axis] = (first + start * gap, step * gap)
    return cuts


def _is_shared_slice(reader: Value, x: Value, where: Sequence[Progression]) -> bool:
    axes = enumerate(where, x.rank - len(where))
    wanted = {axis: (start, step) for axis, (start, step, count) in axes if count != x.shape[axis]}
    return reader.calls(aten.slice.Tensor) and _slices_by_axis(reader) == wanted


def _read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.max_pool2d(x, 3, 1, 1)
    return y[:, :, ::2, ::3], y[:, :, ::4, 3::6]


X = (2, 3, 8, 9)  # the shape of most cases
SHARED_SLICES = Pass(
    "shared slices",
    _share_slices,
    "Windows and slices that read only every g-th position of a value share one slice of it",
    cases=(case(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3, 2, 2, 2)), X), case(_read_twice, X)),
)


@rule(
    aten.slice.Tensor,
    cases=(
        case(lambda x: F.pad(x, (0, 0, 4, 1))[:, :, ::2], X),
        case(lambda x: aten.constant_pad_nd(x, [3, 2], 1.0)[..., ::3], X, dynamic={0: (0, 2)}),
        case(lambda x: aten.constant_pad_nd(x, [0, 2])[..., :7:2], X),
    ),
    refused=(
        case(lambda x: x[..., ::2], X),
        case(lambda x: F.pad(x, (2, 2), "reflect")[..., ::2], X[1:]),
        case(lambda x: aten.constant_pad_nd(x, [2, 1])[..., 1::2], X),
        case(lambda x: aten.constant_pad_nd(x, [2, 1])[..., :7], X),
        case(lambda x: aten.constant_pad_nd(x, [2, 1])[..., ::2], X, dynamic={0: (3,)}),
        case(lambda x: aten.constant_pad_nd(x, [1, 1])[..., ::2], X),
        case(lambda x: aten.constant_pad_nd(x, [-2, 1])[..., ::2], X),
        case(lambda x: aten.constant_pad_nd(x, [8, 0])[..., :3:2], X),
    ),
)
def slice_before_pad(out: Value, x: Value, *cut: Any) -> Value | None:
    """pad(x)[::s] == pad(x[::s]), if the padding before x is a multiple of s."""
    if not x.calls(*PADS) or x.arguments.get("mode", "constant") != "constant":
        return None
    axis, start, _, step = cut_of(out)
    inner, flat = x.arg("self"), list(x.arg("pad"))
    size, count, k = inner.shape[axis], out.shape[axis], 2 * (inner.rank - 1 - axis)
    flat += [0] * (k + 2 - len(flat))
    if start or step == 1 or not all(isinstance(n, int) for n in (size, count, flat[k], step)):
        return None
    before, less = flat[k] // step, -(-size // step)
    if flat[k] % step or not 0 <= before <= count:
        return None
    flat[k : k + 2] = [before, count - less - before]
    small = insert_slices(inner, [(0, step, less), *((0, 1, n) for n in inner.shape[axis + 1 :])])
    return x.like(self=small, pad=flat)


@rule(
    *MAX_POOLS,
    cases=(
        case(lambda x: F.max_pool2d(aten.constant_pad_nd(x, [1, 1, 1, 1], -math.inf), 3, 2), X),
        case(lambda x: F.max_pool2d(aten.constant_pad_nd(x, [1, 1], -math.inf), 3, 2, (1, 0)), X),
        case(lambda x: F.max_pool1d(aten.constant_pad_nd(x, [1, 1], -math.inf), 2, 2, ceil_mode=True), (2, 3, 8)),
    ),
    refused=(
        case(lambda x: F.max_pool2d(x, 3, 2, 1), X),
        case(lambda x: F.max_pool2d(aten.constant_pad_nd(x, [1, 1, 1, 1], -9.0), 3, 2), X),
        case(lambda x: F.max_pool2d(aten.constant_pad_nd(x, [1, 1, 1, 1, 1, 1], -math.inf), 3, 2), X),
        case(lambda x: F.max_pool2d(aten.constant_pad_nd(x, [1, 1], -math.inf), 3, 2), X, dynamic={0: (3,)}),
        case(lambda x: F.max_pool1d(aten.constant_pad_nd(x, [0, -1], -math.inf), 3, 2, 1), (2, 3, 8)),
        case(lambda x: F.max_pool1d(aten.constant_pad_nd(x, [2, 2], -math.inf), 3, 1), (2, 3, 8)),
        case(lambda x: F.max_pool1d(aten.constant_pad_nd(x, [1, 0], -math.inf), 2, 1), (2, 3, 8)),
    ),
)
def absorb_pad(
    out: Value, x: Value, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Value | None:
    """A max pool of a value padded with the lowest number has that padding itself."""
    if not x.calls(aten.constant_pad_nd.default) or x.arg("value") != -math.inf:
        return None
    inner, pads, rank = x.arg("self"), list(x.arg("pad")), MAX_POOLS[out.target]
    sizes = inner.shape[-rank:]
    if len(pads) > 2 * rank or not all(isinstance(n, int) for n in (*pads, *sizes)) or min(pads) < 0:
        return None
    before = [*[0] * (rank - len(pads) // 2), *pads[-2::-2]]
    before = [a + b for a, b in zip(per_axis(padding, rank), before, strict=True)]
    kernel = per_axis(kernel_size, rank)
    axes = zip(sizes, per_axis(stride or kernel, rank), before, per_axis(dilation, rank), kernel, strict=True)
    if [_count_windows(*axis) for axis in axes] != list(out.shape[-rank:]):
        return None
    if any(b > k // 2 for b, k in zip(before, kernel, strict=True)):
        return None
    return out.like(self=inner, padding=before, ceil_mode=False)


@rule(
    aten.constant_pad_nd.default,
    cases=(case(lambda x: aten.constant_pad_nd(aten.constant_pad_nd(x, [1, 2]), [0, 1, 2, 0]), X),),
    refused=(
        case(lambda x: aten.constant_pad_nd(x, [1, 2]), X),
        case(lambda x: aten.constant_pad_nd(aten.constant_pad_nd(x, [1, 2]), [0, 1], 1.0), X),
        case(lambda x: aten.constant_pad_nd(aten.constant_pad_nd(x, [1, 2]), [-2, 1]), X),
        case(lambda x: [aten.constant_pad_nd(y := aten.constant_pad_nd(x, [1, 2]), [0, 1]), y], X),
    ),
)
def merge_pads(out: Value, x: Value, pad: list[Any], value: Any) -> Value | None:
    """Two consecutive pads with the same number are one."""
    if not x.calls(out.target) or x.arg("value") != value or len(x.users) > 1:
        return None
    pads = [list(pad), list(x.arg("pad"))]
    if not all(isinstance(n, int) and n >= 0 for each in pads for n in each):
        return None
    return x.like(pad=[a + b for a, b in zip_longest(*pads, fillvalue=0)])


@rule(
    aten.slice.Tensor,
    cases=(
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[:, :, ::2], X),
        case(lambda x: F.avg_pool2d(x, 2)[..., ::2], X, dynamic={0: (0, 2)}),
        case(lambda x: F.avg_pool1d(x, 4, 1, ceil_mode=True)[..., ::4], (2, 3, 9)),
    ),
    refused=(
        case(lambda x: x[..., ::2], X),
        case(lambda x: [(y := F.max_pool2d(x, 3, 1, 1))[..., ::2], y], X),
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[:, 0:3:2], X),
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[:, :, 1::2], X),
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[..., :: x.shape[0]], X, dynamic={0: (0,)}),
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[..., : x.shape[3] : 2], X, dynamic={0: (3,)}),
        case(lambda x: F.max_pool2d(x, 3, 1, 1)[..., :4:2], X),
    ),
)
def absorb_slice(out: Value, pool: Value, *cut: Any) -> Value | None:
    """A slice of every s-th window of a pool, which nothing else reads, is a larger stride."""
    if not pool.calls(*MAX_POOLS, *AVERAGE_POOLS) or len(pool.users) > 1:
        return None
    arguments, rank = pool.arguments, (MAX_POOLS | AVERAGE_POOLS)[pool.target]
    axis, start, _, step = cut_of(out)
    k, size = axis - (out.rank - rank), arguments["self"].shape[axis]
    if k < 0 or start or not isinstance(step, int) or not isinstance(size, int):
        return None
    kernel = per_axis(arguments["kernel_size"], rank)
    stride = per_axis(arguments["stride"] or kernel, rank)
    stride[k] *= step
    padding, dilation = (per_axis(arguments.get(name, 1), rank)[k] for name in ("padding", "dilation"))
    if _count_windows(size, stride[k], padding, dilation, kernel[k]) != out.shape[axis]:
        return None
    return pool.like(stride=stride, ceil_mode=False)


def _count_windows(size: int, stride: int, padding: int, dilation: int, kernel: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
