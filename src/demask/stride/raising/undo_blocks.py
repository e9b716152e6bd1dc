"""Convolutions over blocks or phases of their input, rewritten as strided convolutions.

    conv(space_to_depth(x, s), w)                     == conv(x, w over positions, stride s)
    sum over phases r of conv(x[r::s], w[r::s])       == conv(x, w, stride s)

Zero taps around a kernel are dropped, and evenly spaced taps become a dilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.editor import GraphEditor
from demask.ops import schema
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS, VIEW_OR_RESHAPE

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
    if weight is None or _moves(arguments):
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
    phases = [_phase(editor, addend) for addend in addends]
    if any(p is None for p in phases):
        return None
    first: Any = phases[0]
    x, step, rank = first[0], first[1], len(first[1])
    reach = [
        max(p[2][k] + (p[3].shape[2 + k] - 1) * p[4][k] for p in phases) + 1  # type: ignore[index]
        for k in range(rank)
    ]
    dense = first[3].new_zeros(*first[3].shape[:2], *reach)
    for phase in phases:
        source, steps, start, weight, gaps = phase  # type: ignore[misc]
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


def _moves(arguments: Any) -> bool:
    """Whether a convolution has a stride, padding or dilation."""
    return any(n != 1 for n in (*arguments["stride"], *arguments["dilation"])) or (
        isinstance(arguments["padding"], str) or any(arguments["padding"])
    )


def _blocks(node: fx.Node, rank: int) -> tuple[fx.Node, tuple[int, ...]] | None:
    """The value before a rearrangement of blocks into channels, and the block sizes; None for
    other nodes."""
    if node.target is aten.pixel_unshuffle.default and rank == 2:
        return node.args[0], (node.args[1],) * 2  # type: ignore[return-value]
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
    return _Strided(x.args[0], strided.weight, strided.step, tuple(before))  # type: ignore[arg-type]


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
    read = editor.add_constant(_named(editor, name), weight, node, parameter=True)
    groups = schema.arguments(conv)["groups"]
    return editor.insert(node, node, conv.target, x, read, bias, list(strided.step), padding, dilation, groups)


def _named(editor: GraphEditor, name: str) -> str:
    """The module path of a constant."""
    return editor.constants[name].name


__all__ = ["undo_blocks", "undo_phases"]
