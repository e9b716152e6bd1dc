"""Selections of evenly spaced positions, rewritten as slices, and sums over blocks, as strided convolutions.

    max_pool(where(m, y, c), s)      == y[first::s]    one selected position per window; y >= c
    avg_pool(where(m, y, 0), s) * n  == y[first::s]    n: the divisor of windows
    relu(y)[::s] - relu(-y)[::s]     == y[::s]

Each rule is an identity. Pooling the numbers of positions determines which one a window selects;
ranges of values (`facts.ranges`) determine which may be dropped. Masks that multiply assume that
0 · x is 0.

    conv(space_to_depth(x, s), w)                     == conv(x, w over positions, stride s)
    sum over phases r of conv(x[r::s], w[r::s])       == conv(x, w, stride s)

Zero taps around a kernel are dropped, and evenly spaced taps become a dilation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.facts.ranges import Range, compute_ranges
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import is_pointwise
from demask.ops import Relation, Table, bind, schema
from demask.ops.schema import fake
from demask.ops.traits import (
    AVERAGE_POOLS,
    CONVOLUTIONS,
    DIVISIONS,
    MAX_POOLS,
    MULTIPLICATIONS,
    VIEW_OR_RESHAPE,
    WHERES,
)
from demask.stride.strided_slices import (
    Progression,
    absorb_pad,
    absorb_slices,
    cut_of,
    cuts_of,
    insert_slices,
    merge_pads,
    root_of,
    share_slices,
    slice_before_pad,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Strided:
    """A convolution of x with stride `step`, whose kernel begins `before` positions before x."""

    x: fx.Node
    weight: Tensor
    step: tuple[int, ...]
    before: tuple[int, ...]


def undo_blocks(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """The strided convolution that is equal to one over blocks; None if a call is none."""
    if node.target not in CONVOLUTIONS:
        return None
    arguments = schema.arguments(node)
    weight = editor.tensor(arguments["weight"])
    if weight is None or _has_stride_padding_or_dilation(arguments):
        return None
    rank = weight.ndim - 2
    blocks = _blocks(arguments["input"], rank)
    if blocks is None:
        return None
    x, step = blocks
    count = math.prod(step)
    outer, inner = weight.shape[0], weight.shape[1] // count
    parts = weight.reshape(outer, inner, *step, *weight.shape[2:])
    order = [n for k in range(rank) for n in (2 + rank + k, 2 + k)]
    spread = parts.permute(0, 1, *order)
    sizes = [n * s for n, s in zip(weight.shape[2:], step, strict=True)]
    dense = spread.reshape(outer, inner, *sizes)
    return _emit(editor, node, _unpadded(_Strided(x, dense, step, (0,) * rank)), arguments["bias"])


def undo_phases(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """The strided convolution that is equal to a sum over phases; None if a call is none."""
    addends = list(_addends(node))
    if len(addends) < 2 or any(addend.target not in CONVOLUTIONS for addend in addends):
        return None
    phases = [phase for addend in addends if (phase := _phase(editor, addend)) is not None]
    if len(phases) < len(addends):
        return None
    first = phases[0]
    x, step, rank = first[0], first[1], len(first[1])
    reach = [max(p[2][k] + (p[3].shape[2 + k] - 1) * p[4][k] for p in phases) + 1 for k in range(rank)]
    dense = first[3].new_zeros(*first[3].shape[:2], *reach)
    for phase in phases:
        source, steps, start, weight, gaps = phase
        if source is not x or steps != step or weight.shape[:2] != dense.shape[:2]:
            return None
        taps = tuple(slice(a, a + (n - 1) * d + 1, d) for a, n, d in zip(start, weight.shape[2:], gaps, strict=True))
        if bool(dense[(slice(None), slice(None), *taps)].any()):
            return None
        dense[(slice(None), slice(None), *taps)] = weight
    biases = [b for conv in addends if (b := schema.arguments(conv)["bias"]) is not None]
    groups = {schema.arguments(conv)["groups"] for conv in addends}
    if len(biases) > 1 or len(groups) > 1 or set(step) == {1}:
        return None
    strided = _unpadded(_Strided(x, dense, step, (0,) * rank))
    return _emit(editor, node, strided, biases[0] if biases else None, like=addends[0])


def _addends(node: Any) -> Iterator[fx.Node]:
    """The addends of a tree of sums whose inner nodes have no other readers."""
    stack = [node]
    while stack:
        top = stack.pop()
        inner = top is node or (isinstance(top, fx.Node) and len(top.users) == 1)
        if inner and isinstance(top, fx.Node) and top.target is aten.add.Tensor and not top.kwargs:
            stack += top.args[::-1]
        elif isinstance(top, fx.Node):
            yield top


def _phase(editor: GraphEditor, conv: fx.Node) -> tuple[Any, ...] | None:
    """Source, its steps, first position of the phase, weight, and distance of taps in the source;
    None if a convolution reads no phase."""
    arguments = schema.arguments(conv)
    weight = editor.tensor(arguments["weight"])
    if weight is None or set(arguments["stride"]) != {1} or any(arguments["padding"]):
        return None
    rank = weight.ndim - 2
    start, step, x = [0] * rank, [1] * rank, arguments["input"]
    while x.target is aten.slice.Tensor:
        cut = schema.arguments(x)
        axis = cut["dim"] % fake(x).ndim - (fake(x).ndim - rank)
        if axis < 0 or not isinstance(cut["start"], int) or step[axis] != 1:
            return None
        start[axis], step[axis], x = cut["start"], cut["step"], cut["self"]
    dilation = list(arguments["dilation"]) * (rank if len(arguments["dilation"]) == 1 else 1)
    gaps = [d * s for d, s in zip(dilation, step, strict=True)]
    return x, tuple(step), tuple(start), weight, tuple(gaps)


def _has_stride_padding_or_dilation(arguments: Any) -> bool:
    return any(n != 1 for n in (*arguments["stride"], *arguments["dilation"])) or (
        isinstance(arguments["padding"], str) or any(arguments["padding"])
    )


def _blocks(node: fx.Node, rank: int) -> tuple[fx.Node, tuple[int, ...]] | None:
    """The value before a rearrangement of blocks into channels, and the block sizes; None for
    other nodes."""
    if node.target is aten.pixel_unshuffle.default and rank == 2:
        arguments = schema.arguments(node)
        return arguments["self"], (arguments["downscale_factor"],) * 2
    if node.target not in VIEW_OR_RESHAPE:
        return None
    permuted: Any = node.args[0]
    if permuted.target is not aten.permute.default:
        return None
    parted: Any = permuted.args[0]
    if parted.target not in VIEW_OR_RESHAPE:
        return None
    x: Any = parted.args[0]
    shape, wide = fake(x).shape, fake(parted).shape
    lead = len(shape) - rank
    if lead < 1 or len(wide) != len(shape) + rank:
        return None
    steps = tuple(int(wide[lead + 1 + 2 * k]) for k in range(rank))
    whole = all(wide[lead + 2 * k] * steps[k] == shape[lead + k] for k in range(rank))
    order = [*range(lead), *range(lead + 1, lead + 2 * rank, 2), *range(lead, lead + 2 * rank, 2)]
    output = fake(node).shape
    blocked = all(output[lead + k] == wide[lead + 2 * k] for k in range(rank))
    right = whole and blocked and list(permuted.args[1]) == order
    return (x, steps) if right and output[lead - 1] == shape[lead - 1] * math.prod(steps) else None


def _unpadded(strided: _Strided) -> _Strided:
    """A convolution without a pad before it: the kernel begins before the input instead."""
    x, rank = strided.x, len(strided.step)
    if x.target is not aten.constant_pad_nd.default or schema.arguments(x)["value"]:
        return strided
    pads: Any = list(schema.arguments(x)["pad"])
    if len(pads) > 2 * rank or not all(isinstance(n, int) for n in pads):
        return strided
    before = [0] * rank
    for k in range(len(pads) // 2):
        before[rank - 1 - k] = pads[2 * k]
    return _Strided(schema.source_of(x), strided.weight, strided.step, tuple(before))


def _emit(
    editor: GraphEditor, node: fx.Node, strided: _Strided, bias: Any, like: fx.Node | None = None
) -> fx.Node | None:
    """The convolution as a call, its kernel without zeros around it. like: the convolution whose
    op, groups and name of the weight it gets; default `node`."""
    rank, weight = len(strided.step), strided.weight
    first, dilation, sizes = [], [], fake(strided.x).shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        return None
    for k in range(rank):
        rest = [a for a in range(weight.ndim) if a != 2 + k]
        taps = (weight != 0).any(rest) if rest else weight != 0
        positions = taps.nonzero().flatten().tolist() or [0]
        gap = math.gcd(*(p - positions[0] for p in positions)) or 1
        index = torch.arange(positions[0], positions[-1] + 1, gap)
        weight = weight.index_select(2 + k, index)
        first.append(positions[0])
        dilation.append(gap)
    before = [b - a for a, b in zip(first, strided.before, strict=True)]
    out = [int(n) for n in fake(node).shape[-rank:]]
    reach = [d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
    after = [(o - 1) * s + r + 1 - n - b for o, s, r, n, b in zip(out, strided.step, reach, sizes, before, strict=True)]
    own = [
        b >= 0 and (n + 2 * b - r - 1) // s + 1 == o
        for o, s, r, n, b in zip(out, strided.step, reach, sizes, before, strict=True)
    ]
    x, padding = strided.x, before
    if not all(own):
        flat = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
        x = editor.insert(node, None, aten.constant_pad_nd.default, x, flat, 0)
        padding = [0] * rank
    conv = like or node
    name = str(schema.arguments(conv)["weight"].target)
    read = editor.add_constant(_constant_path(editor, name), weight, node, parameter=True)
    groups = schema.arguments(conv)["groups"]
    return editor.insert(node, node, conv.target, x, read, bias, list(strided.step), padding, dilation, groups)


def _constant_path(editor: GraphEditor, name: str) -> str:
    return editor.constants[name].name


def rewrite_as_slices(program: Program, table: Table) -> Program:
    """The program with slices for all calls that select every s-th position; the same program if
    there are none."""
    editor = GraphEditor(program)
    changed = False
    rules = (
        partial(_pool, table),
        partial(_mean, table),
        partial(_unmasked, table),
        _split,
        _factors,
        slice_before_pad,
        absorb_pad,
        merge_pads,
        absorb_slices,
        undo_blocks,
        undo_phases,
    )
    while any(_rewritten(editor, rule) for rule in rules) or share_slices(editor, table):
        changed = True
    return editor.finish() if changed else program


def _rewritten(editor: GraphEditor, rule: Callable[[GraphEditor, fx.Node], fx.Node | None]) -> bool:
    """Apply a rule to every call; whether it changed one."""
    changed = False
    for node in editor.calls():
        replacement = rule(editor, node) if node.users else None
        if replacement is not None:
            editor.replace(node, replacement)
            changed = True
    return changed


# --- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Masked:
    """value * scale where `keep`, `fill` elsewhere. keep: bool, the spatial shape."""

    value: fx.Node
    keep: Tensor
    fill: float
    scale: float = 1.0


def _masked(table: Table, editor: GraphEditor, node: Any, rank: int) -> _Masked | None:
    """A call as a mask over the last `rank` axes, the same for all images and channels; None if it
    is none."""
    masked = _select(editor, node) or _product(editor, node) or _through(table, editor, node, rank)
    if masked is None:
        return None
    shape = fake(masked.value).shape[-rank:]
    lead = masked.keep.shape[:-rank] if masked.keep.ndim > rank else ()
    if any(n != 1 for n in lead) or not all(isinstance(n, int) for n in shape):
        return None
    left = (1,) * (rank - masked.keep.ndim)
    keep = masked.keep.reshape(*left, *masked.keep.shape[max(masked.keep.ndim - rank, 0) :])
    if tuple(fake(masked.value).shape) != tuple(fake(node).shape):
        return None
    return _Masked(masked.value, keep.expand(shape), masked.fill, masked.scale)


def _select(editor: GraphEditor, node: fx.Node) -> _Masked | None:
    """A selection by a constant mask, with a number at the other positions."""
    arguments = schema.arguments(node) if isinstance(node.target, OpOverload) else {}
    if node.target in WHERES:
        keep, yes, no = (_constant(editor, arguments["condition"]), arguments["self"], arguments["other"])
    elif node.target is aten.masked_fill.Scalar:
        keep, yes, no = _constant(editor, arguments["mask"]), arguments["value"], arguments["self"]
    else:
        return None
    if keep is None:
        return None
    for value, other, mask in ((yes, no, keep), (no, yes, ~keep)):
        fill = _scalar_value(editor, other)
        if fill is not None and isinstance(value, fx.Node) and value.op != "get_attr":
            return _Masked(value, mask, fill)
    return None


def _through(table: Table, editor: GraphEditor, node: fx.Node, rank: int) -> _Masked | None:
    """A pointwise function of a masked value, as a mask of the function's value."""
    relation = bind(node, table) if is_pointwise(node, table) else None
    if not isinstance(relation, Relation) or len(relation.operands) != 1:
        return None
    source = relation.operands[0].value
    masked = _masked(table, editor, source, rank) if isinstance(source, fx.Node) else None
    if masked is None:
        return None
    name, dtype = relation.operands[0].name, fake(masked.value).dtype
    arguments = schema.arguments(node)
    fill = float(schema.call_with(node, arguments | {name: torch.tensor(masked.fill, dtype=dtype)}))
    value = _scaled(editor, node, masked.value, masked.scale)
    return _Masked(editor.repeat_call(node, **{name: value}), masked.keep, fill)


def _product(editor: GraphEditor, node: fx.Node) -> _Masked | None:
    """A product with a constant that has one nonzero number."""
    if node.target is not aten.mul.Tensor:
        return None
    for value, other in (node.args, node.args[::-1]):
        mask = _constant(editor, other)
        if mask is None or mask.numel() == 1 or not isinstance(value, fx.Node):
            continue
        nonzero = mask[mask != 0]
        if nonzero.numel() and bool((nonzero == nonzero[0]).all()):
            return _Masked(value, mask != 0, 0.0, float(nonzero[0]))
    return None


def _constant(editor: GraphEditor, node: Any) -> Tensor | None:
    """The value of a node that is a constant or computed only from constants; else None."""
    if not isinstance(node, fx.Node) or node.op == "get_attr":
        return editor.tensor(node)
    order: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        top = stack.pop()
        order.pop(top, None)
        order[top] = None
        if top.op not in ("call_function", "get_attr") or len(order) > 64:
            return None
        if not isinstance(top.meta.get("val"), Tensor) or not _is_small_and_static(fake(top)):
            return None
        stack += top.all_input_nodes
    values: dict[fx.Node, Any] = {}
    for n in reversed(order):
        values[n] = editor.tensor(n) if n.op == "get_attr" else schema.call_on(n, values.__getitem__)
    return values[node]


def _is_small_and_static(value: Tensor) -> bool:
    return all(isinstance(n, int) for n in value.shape) and value.numel() <= 2**24


def _scalar_value(editor: GraphEditor, value: Any) -> float | None:
    """A number, or the element of a constant with one; else None."""
    tensor = _constant(editor, value)
    if tensor is not None:
        return float(tensor.reshape(-1)[0]) if tensor.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


# --- pools ----------------------------------------------------------------------------------------


def _pool(table: Table, editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A slice in place of a pool whose windows select one position each."""
    average = node.target in AVERAGE_POOLS
    if not average and node.target not in MAX_POOLS:
        return None
    arguments = schema.arguments(node)
    x, rank = arguments["self"], len(arguments["kernel_size"])
    sizes = fake(x).shape[-rank:]
    if not all(isinstance(n, int) for n in sizes):
        return None
    masked = _masked(table, editor, x, rank)
    masked = masked or _Masked(x, torch.ones(sizes, dtype=torch.bool), 0.0)
    where = _picked(node, masked.keep)
    if where is None or [count for *_, count in where] == list(sizes):
        return None
    factor = masked.scale
    if average:
        shares = schema.call_with(node, arguments | {"self": masked.keep[None, None].double()}).unique()
        if masked.fill or len(shares) != 1:
            return None
        factor *= 1 / round(1 / float(shares))
    elif not (bool(masked.keep.all()) or _is_least(table, editor, masked)):
        return None
    return _scaled(editor, node, insert_slices(editor, node, masked.value, where), factor)


def _picked(node: fx.Node, keep: Tensor) -> list[Progression] | None:
    """The positions that the windows of a pool select, as a progression per axis; None unless each
    window selects one, evenly spaced."""
    arguments = schema.arguments(node)
    pool = getattr(F, f"max_pool{(MAX_POOLS | AVERAGE_POOLS)[node.target]}d")
    args = arguments["kernel_size"], arguments["stride"] or None, arguments["padding"]
    more = {"ceil_mode": arguments["ceil_mode"], "dilation": arguments.get("dilation", 1)}
    numbers = torch.arange(1, keep.numel() + 1, dtype=torch.float64).view(keep.shape)
    last = pool(torch.where(keep, numbers, 0.0)[None, None], *args, **more)[0, 0]
    first = -pool(torch.where(keep, -numbers, -math.inf)[None, None], *args, **more)[0, 0]
    if not bool(((first == last) & (last > 0)).all()):
        return None
    return _evenly(torch.unravel_index((last - 1).long(), keep.shape))


def _evenly(coordinates: Sequence[Tensor]) -> list[Progression] | None:
    """Coordinates of an evenly spaced grid as a progression per axis; None for other coordinates.

    coordinates: one tensor per axis, of the grid's shape.
    """
    progressions: list[Progression] = []
    for axis, positions in enumerate(coordinates):
        line = positions.movedim(axis, 0).reshape(positions.shape[axis], -1)
        if not bool((line == line[:, :1]).all()):
            return None
        row = line[:, 0].tolist()
        steps = {b - a for a, b in itertools.pairwise(row)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            return None
        progressions.append((row[0], steps.pop() if steps else 1, len(row)))
    return progressions


def _is_least(table: Table, editor: GraphEditor, masked: _Masked) -> bool:
    """Whether the fill of a mask is never larger than the values at other positions."""
    dtype = fake(masked.value).dtype
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    if masked.fill == lowest:
        return True
    low, high = _range(table, editor, masked.value)
    return min(low * masked.scale, high * masked.scale) >= masked.fill


def _range(table: Table, editor: GraphEditor, node: fx.Node) -> Range:
    constants = {name: constant.tensor for name, constant in editor.constants.items()}
    return compute_ranges(editor.graph.nodes, constants, table)[node]


def _mean(table: Table, editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A mean over a slice, scaled, in place of a mean over a value masked to evenly spaced
    positions."""
    if node.target is not aten.mean.dim and node.target is not aten.adaptive_avg_pool2d.default:
        return None
    x = node.args[0]
    rank = fake(x).ndim - 2 if isinstance(x, fx.Node) else 0
    axes = schema.arguments(node).get("dim")
    axes = None if axes is None else sorted(a % (rank + 2) for a in axes)
    if axes is None and list(schema.arguments(node)["output_size"]) != [1, 1]:
        return None
    if rank < 1 or (axes is not None and axes != list(range(2, rank + 2))):
        return None
    masked = _masked(table, editor, x, rank)
    if masked is None or masked.fill or bool(masked.keep.all()):
        return None
    shape = tuple(
        int(masked.keep.any([b for b in range(rank) if b != a]).sum()) if rank > 1 else int(masked.keep.sum())
        for a in range(rank)
    )
    if math.prod(shape) != int(masked.keep.sum()):
        return None
    where = _evenly([p.view(shape) for p in masked.keep.nonzero().unbind(1)])
    if where is None:
        return None
    share = int(masked.keep.sum()) / masked.keep.numel()
    small = insert_slices(editor, node, masked.value, where)
    mean = editor.repeat_call(node, **{next(iter(schema.arguments(node))): small})
    return _scaled(editor, node, mean, masked.scale * share)


# --- slices ---------------------------------------------------------------------------------------


def _unmasked(table: Table, editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """A slice of the value before a mask, if the mask selects all positions of the slice."""
    if node.target is not aten.slice.Tensor or any(u.target is aten.slice.Tensor for u in node.users):
        return None
    root, cuts = root_of(node), list(cuts_of(node))[::-1]
    rank = fake(root).ndim - 2 if isinstance(root, fx.Node) else 0
    masked = _masked(table, editor, root, rank) if rank > 0 and root.op == "call_function" else None
    if masked is None:
        return None
    mask, sliced_value = masked.keep[None, None], masked.value
    for cut in cuts:
        axis, start, stop, step = cut_of(cut)
        if axis < 2:
            return None
        mask = aten.slice.Tensor(mask, axis, start, stop, step)
        sliced_value = editor.insert(node, None, aten.slice.Tensor, sliced_value, axis, start, stop, step)
    if not bool(mask.all()):
        return None
    return _scaled(editor, node, sliced_value, masked.scale)


# --- sums and factors -----------------------------------------------------------------------------


def _split(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """The value itself in place of relu(value) - relu(-value), with the slices of both."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    cuts = [[cut_of(cut) for cut in cuts_of(side)][::-1] for side in (a, b)]
    above, below = root_of(a), root_of(b)
    if cuts[0] != cuts[1] or not all(n.target is aten.relu.default for n in (above, below)):
        return None
    negative: Any = below.args[0]
    if _factor(editor, negative) != (above.args[0], -1.0):
        return None
    value: Any = above.args[0]
    for cut in cuts[0]:
        value = editor.insert(node, None, aten.slice.Tensor, value, *cut)
    return value


def _factor(editor: GraphEditor, node: fx.Node) -> tuple[Any, float] | None:
    """The value that a call multiplies by one number, and the number; else None."""
    if node.target is aten.neg.default:
        return node.args[0], -1.0
    if node.target in MULTIPLICATIONS:
        for value, other in (node.args, node.args[::-1]):
            number = _scalar_value(editor, other)
            if number is not None and isinstance(value, fx.Node):
                return value, number
    if node.target in DIVISIONS and not node.kwargs:
        number = _scalar_value(editor, node.args[1])
        if number and isinstance(node.args[0], fx.Node):
            return node.args[0], 1 / number
    return None


def _factors(editor: GraphEditor, node: fx.Node) -> fx.Node | None:
    """The value itself in place of two consecutive factors whose product is 1."""
    second = _factor(editor, node)
    first = None if second is None else _factor(editor, second[0])
    if second is None or first is None or not _are_inverse(first[1], second[1]):
        return None
    same = fake(first[0]).dtype == fake(node).dtype
    return first[0] if same else None


def _are_inverse(a: float, b: float) -> bool:
    """Whether the product of two numbers is 1, up to the rounding of a quotient and products."""
    return math.isclose(a * b, 1, rel_tol=2.0**-50)


def _scaled(editor: GraphEditor, reader: fx.Node, x: fx.Node, factor: float) -> fx.Node:
    return x if factor == 1 else editor.insert(reader, x, aten.mul.Tensor, x, factor)


__all__ = ["rewrite_as_slices"]
