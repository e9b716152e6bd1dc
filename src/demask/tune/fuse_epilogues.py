"""Fusion of convolutions and linear layers with the sum and activation after them: oneDNN computes
all in one call.

    relu(conv(x) + y) == conv_add_relu(x, y)

y is a value of the same shape, or one map for all images (a border map). Weights are packed for
oneDNN once: values that depend on no input are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from demask.compat.onednn import available, ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import COPY, input_dependent, only_reader
from demask.ops import schema
from demask.ops.schema import fake, same_size
from demask.ops.traits import CONVOLUTIONS
from demask.tune.epilogue import Epilogue, convolution, epilogue_of
from demask.tune.fold_affine import contraction_weight

aten = torch.ops.aten
# Whether to fuse a layer. Called with the layer, its epilogue, and whether another value is added.
Wanted = Callable[[fx.Node, Epilogue, bool], bool]


def fuse_epilogues(program: Program, wanted: Wanted) -> Program:
    """The program with layers and their epilogues fused if `wanted` returns True."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    for node in editor.calls(*CONVOLUTIONS, aten.linear.default):
        weight = contraction_weight(editor, node)
        value = fake(node)
        if weight is None or node not in live or not available(weight.dtype, weight.device):
            continue
        if value.dtype is not weight.dtype or not all(type(n) is int for n in _geometry(node)):
            continue
        convolves = node.target is not aten.linear.default
        if convolves and value.ndim != weight.ndim:
            continue  # an image without a batch
        _fuse(editor, node, live, wanted, convolves)
    return editor.finish()


def _geometry(node: fx.Node) -> list[Any]:
    """Strides, paddings and dilations of a convolution; none of a linear layer."""
    arguments = schema.arguments(node)
    return [n for key in ("stride", "padding", "dilation") for n in arguments.get(key, ())]


@dataclass(frozen=True, slots=True)
class EpilogueChain:
    """The calls that can be fused with a layer. last: the last of them, or the layer itself. after:
    the activation. other: the value added before it."""

    last: fx.Node
    after: Epilogue
    other: fx.Node | None


def epilogue_chain(node: fx.Node, live: set[fx.Node]) -> EpilogueChain:
    """The calls after a layer that oneDNN could compute with it."""
    convolves = node.target is not aten.linear.default
    last, other = node, None
    reader = only_reader(node)
    if reader is not None and (addend := _addend(node, reader, live, convolves)) is not None:
        last, other = reader, addend
        reader = only_reader(last)
    act = None if reader is None else epilogue_of(reader)
    fits = other is None or (act is not None and act.name == "relu" and convolves)
    if reader is None or act is None or not fits:
        return EpilogueChain(last, Epilogue(), other)
    if fake(reader).dtype is not fake(node).dtype:
        return EpilogueChain(last, Epilogue(), other)
    return EpilogueChain(reader, act, other)


def _fuse(editor: GraphEditor, node: fx.Node, live: set[fx.Node], wanted: Wanted, convolves: bool) -> None:
    calls = epilogue_chain(node, live)
    if not wanted(node, calls.after, calls.other is not None):
        return
    make = _convolution if convolves else _linear
    layer = make(editor, node, calls.last, calls.after, calls.other)
    live.update((calls.last, layer))
    editor.replace(calls.last, layer)


def _addend(node: fx.Node, reader: fx.Node, live: set[fx.Node], convolves: bool) -> fx.Node | None:
    """The value that `reader` adds to a layer's output, if oneDNN can add it."""
    if reader.target is not aten.add.Tensor or len(reader.args) != 2 or reader.kwargs:
        return None
    sides: Any = reader.args
    other = sides[1] if sides[0] is node else sides[0]
    if other is node or not isinstance(other, fx.Node):
        return None
    mine, theirs = fake(node), other.meta.get("val")
    if not isinstance(theirs, torch.Tensor) or theirs.dtype is not mine.dtype:
        return None
    if theirs.ndim != mine.ndim or fake(reader).ndim != mine.ndim:
        return None
    whole = all(map(same_size, mine.shape, theirs.shape))
    images = all(map(same_size, mine.shape[1:], theirs.shape[1:]))
    one_map = convolves and images and same_size(theirs.shape[0], 1) and other not in live
    return other if whole or one_map else None


def _convolution(editor: GraphEditor, node: fx.Node, last: fx.Node, after: Epilogue, other: fx.Node | None) -> fx.Node:
    arguments = schema.arguments(node)
    count = fake(node).ndim - 2
    padding, stride, dilation = (_per_axis(arguments[key], count) for key in ("padding", "stride", "dilation"))
    sizes = [
        size if isinstance(size, int) else editor.insert(last, None, aten.sym_size.int, arguments["input"], axis)
        for axis, size in enumerate(fake(arguments["input"]).shape)
    ]
    geometry = (padding, stride, dilation, arguments["groups"])
    weight = arguments["weight"]
    if count == 2:
        pack = ops()._reorder_convolution_weight.default
        weight = editor.insert(last, weight, pack, weight, *geometry, sizes)
    if other is not None and not same_size(fake(other).shape[0], fake(last).shape[0]):
        # One map for all images: oneDNN broadcasts slowly, but adds to an expanded copy in place.
        spread = [sizes[0]] + [-1] * (count + 1)
        other = editor.insert(last, last, aten.expand.default, other, spread)
        other = editor.insert(last, last, COPY, other)
    target, args = convolution(arguments["input"], weight, arguments["bias"], geometry, after, other)
    return editor.insert(last, last, target, *args)


def _per_axis(value: Any, count: int) -> list[int]:
    return list(value) * count if len(value) == 1 else list(value)


def _linear(editor: GraphEditor, node: fx.Node, last: fx.Node, after: Epilogue, other: fx.Node | None) -> fx.Node:
    arguments = schema.arguments(node)
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    packed = editor.insert(last, weight, ops()._reorder_linear_weight.default, weight, None)
    if other is not None:
        return editor.insert(last, last, ops()._linear_pointwise.binary, x, other, packed, bias, "add")
    activation = (after.name, list(after.scalars), after.algorithm)
    return editor.insert(last, last, ops()._linear_pointwise.default, x, packed, bias, *activation)
