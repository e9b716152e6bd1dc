"""Border maps of one size as one convolution: their kernels stacked, its output split.

    conv(x, cat(a, b)) == cat(conv(x, a), conv(x, b))

The cost of a small call is that of calling, and a deep network has a border map per layer.
`separate_border_maps` is the inverse, for a network that is demasked again.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.value import Value
from demask.ops import schema
from demask.ops.traits import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from demask.rewrites.rule import Pass, Phase, case, rule

aten = torch.ops.aten
# Most elements of one stack on the example sizes: larger ones cost memory and save no time.
ELEMENTS = 2**18
_CONVOLUTIONS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS


def stack_border_maps(program: Program) -> Program:
    """The program with its small border maps of equal geometry computed together."""
    editor = GraphEditor(program)
    alike: dict[Any, list[list[Value]]] = defaultdict(lambda: [[]])
    for node in editor.calls(*_CONVOLUTIONS):
        call = Value(node, editor)
        if _is_border(call):
            stacks = alike[_geometry(call)]
            if sum(map(_elements, [*stacks[-1], call])) > ELEMENTS:
                stacks.append([])
            stacks[-1].append(call)
    large = [stack for stacks in alike.values() for stack in stacks if len(stack) > 1]
    for stack in large:
        _stack(stack)
    return editor.finish() if large else program


def _is_border(call: Value) -> bool:
    """Whether a convolution reads a channel of ones, or of ones with pads, by a stored kernel."""
    plain = call.arg("bias") is None and call.arg("groups") == 1
    ones, _ = _unpadded_ones(call.arg("input"))
    return plain and ones.calls(aten.new_ones.default) and call.arg("weight").constant is not None


def _unpadded_ones(source: Value) -> tuple[Value, tuple[Any, ...]]:
    """The operand of a pad and its pads; any other value itself, without pads."""
    if source.calls(aten.constant_pad_nd.default):
        return source.arg("self"), source.node.args[1:]
    return source, ()


def _geometry(call: Value) -> Any:
    """What two calls must have in common to be stacked: all but their kernels."""
    ones, pads = _unpadded_ones(call.arg("input"))
    rest = {name: value for name, value in call.arguments.items() if name not in ("input", "weight")}
    shape = repr((ones.node.args[1:], ones.node.kwargs, pads))
    return call.target, shape, repr(rest), call.arg("weight").shape[2:]


def _elements(call: Value) -> int:
    total = 1
    for size in call.shape:
        total *= schema.example_size(size)
    return total


def _output_axis(call: Value) -> int:
    """The axis of output channels of a convolution's kernel."""
    return 1 if call.calls(*TRANSPOSED_CONVOLUTIONS) else 0


def _stack(calls: list[Value]) -> None:
    first, axis = calls[0], _output_axis(calls[0])
    weights, graph = [call.arg("weight") for call in calls], first.editor.graph
    later = set(graph.nodes)
    for node in graph.nodes:
        if node is first.node:
            break
        later.discard(node)
    for weight in weights:
        if weight.node in later:
            first.node.prepend(weight.node)
    with graph.inserting_before(first.node):
        stacked = first.like(weight=weights[0].cat(weights[1:], axis))
        parts = stacked.call(aten.split_with_sizes.default, stacked, [weight.shape[axis] for weight in weights], 1)
        for k, call in enumerate(calls):
            part = first.editor.call_for(call.node, operator.getitem, parts.node, k)
            call.node.replace_all_uses_with(part)


def _maps(ones: Any, **geometry: Any) -> Callable[[Tensor], Tensor]:
    """Two maps that depend on sizes only, added to images."""
    kernels = [torch.linspace(-1, 1, 18).double().reshape(2, 1, 3, 3) * k for k in (1, 2)]

    def call(x: Tensor) -> Tensor:
        a, b = (F.conv2d(ones(x), kernel, **geometry) for kernel in kernels)
        return x + a * b

    return call


STACKED = Phase(
    "stacked border maps",
    (
        Pass(
            "one call for several border maps",
            lambda program, table: stack_border_maps(program),
            "(conv(x, a), conv(x, b)) == split(conv(x, cat(a, b))), where x is an image of ones",
            cases=(
                case(_maps(lambda x: x.new_ones([1, 1, 4, 5]), padding=1), (2, 2, 4, 5)),
                case(
                    _maps(lambda x: torch.constant_pad_nd(x.new_ones([1, 1, 2, x.shape[3]]), [1, 1, 2, 2])),
                    (2, 2, 4, 5),
                    dynamic={0: (0, 3)},
                ),
            ),
            exact=False,
        ),
    ),
)


def _split_of(conv: Any, *sizes: int, dim: int = 1, axis: int = 0) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, a, b: conv(x, torch.cat([a, b], axis)).split(sizes, dim)


@rule(
    aten.split_with_sizes.default,
    cases=(
        case(_split_of(F.conv2d, 2, 4), (2, 3, 7, 5), (2, 3, 3, 3), (4, 3, 3, 3)),
        case(_split_of(F.conv2d, 2, 4, dim=0), (3, 7, 8), (2, 3, 3, 3), (4, 3, 3, 3)),
        case(_split_of(F.conv_transpose1d, 2, 4, axis=1), (2, 3, 7), (3, 2, 3), (3, 4, 3), dynamic={0: (0,)}),
    ),
    refused=(
        case(lambda x, a, b: (torch.cat([a, b]) * x).split([2, 4], 1), (2, 6), (1, 6), (1, 6)),
        case(lambda x, w: F.conv1d(x, w).split([2, 4], 1), (2, 3, 7), (6, 3, 3)),
        case(_split_of(partial(F.conv1d, bias=torch.ones(6).double()), 2, 4), (2, 3, 7), (2, 3, 3), (4, 3, 3)),
        case(_split_of(partial(F.conv1d, groups=2), 2, 4), (2, 6, 7), (2, 3, 3), (4, 3, 3)),
        case(_split_of(F.conv1d, 2, 4, dim=0), (6, 3, 7), (2, 3, 3), (4, 3, 3)),
        case(_split_of(F.conv1d, 2, 1, axis=1), (2, 3, 7), (3, 2, 3), (3, 1, 3)),
        case(_split_of(F.conv1d, 3, 3), (2, 3, 7), (2, 3, 3), (4, 3, 3)),
    ),
    exact=False,
)
def separate_border_maps(out: Value, conv: Value, sizes: list[Any], dim: int) -> tuple[Value, ...] | None:
    """split(conv(x, cat(a, b))) == (conv(x, a), conv(x, b))"""
    if not conv.calls(*_CONVOLUTIONS) or not conv.arg("weight").calls(aten.cat.default):
        return None
    if conv.arg("bias") is not None or conv.arg("groups") != 1:
        return None
    kernels, axis = conv.arg("weight"), _output_axis(conv)
    if dim != conv.rank - 1 - _CONVOLUTIONS[conv.target]:
        return None
    if sizes != [kernel.shape[axis] for kernel in kernels.arg("tensors")]:
        return None
    return tuple(conv.like(weight=kernel) for kernel in kernels.arg("tensors"))


SEPARATE = Phase("separate border maps", (separate_border_maps,))
