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

from torch import Tensor, fx, nn

from demask.compat.onednn import available, ops
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.queries import COPY, input_dependent
from demask.graph.value import Value, aten
from demask.ops.schema import same_size
from demask.ops.traits import CONVOLUTIONS
from demask.rewrites.rule import Pass, case
from demask.tune.epilogue import Epilogue, convolution, epilogue_of
from demask.tune.fold_affine import contraction_weight, is_linear, summands

# Whether to fuse a layer. Called with the layer, its epilogue, and whether another value is added.
Wanted = Callable[[Value, Epilogue, bool], bool]


def fuse_epilogues(program: Program, wanted: Wanted) -> Program:
    """The program with layers and their epilogues fused if `wanted` returns True."""
    editor, is_changed = GraphEditor(program), False
    live = input_dependent(editor.graph)
    for node in editor.calls(*CONVOLUTIONS, aten.linear.default):
        layer = Value(node, editor)
        if node not in live or not _is_fusible(layer):
            continue
        chain = epilogue_chain(layer, live)
        if wanted(layer, chain.after, chain.other is not None):
            fused = _linear(layer, chain) if is_linear(layer) else _convolution(layer, chain)
            live.update((chain.last.node, fused))
            editor.replace(chain.last.node, fused)
            is_changed = True
    return editor.finish() if is_changed else program


def _is_fusible(layer: Value) -> bool:
    """Whether oneDNN has a kernel for a layer."""
    weight = contraction_weight(layer)
    if weight is None or layer.dtype is not weight.dtype or not available(weight.dtype, weight.device):
        return False
    geometry = [n for key in ("stride", "padding", "dilation") for n in layer.arguments.get(key, ())]
    return all(type(n) is int for n in geometry)


@dataclass(frozen=True, slots=True)
class EpilogueChain:
    """The calls that can be fused with a layer. last: the last of them, or the layer itself. after:
    the activation. other: the value added before it."""

    last: Value
    after: Epilogue
    other: Value | None


def epilogue_chain(layer: Value, live: set[fx.Node]) -> EpilogueChain:
    """The calls after a layer that oneDNN could compute with it."""
    last, other, reader = layer, None, layer.only_user
    if reader is not None and (addend := _addend(layer, reader, live)) is not None:
        last, other, reader = reader, addend, reader.only_user
    act = None if reader is None else epilogue_of(reader.node)
    fits = other is None or (act is not None and act.name == "relu" and not is_linear(layer))
    if reader is None or act is None or not fits or reader.dtype is not layer.dtype:
        return EpilogueChain(last, Epilogue(), other)
    return EpilogueChain(reader, act, other)


def _addend(layer: Value, reader: Value, live: set[fx.Node]) -> Value | None:
    """The value that `reader` adds to a layer's output, if oneDNN can add it."""
    sides = summands(reader)
    other = None if sides is None else sides[1] if sides[0] == layer else sides[0]
    if other is None or other == layer or not other.is_tensor:
        return None
    if other.dtype is not layer.dtype or other.rank != layer.rank:
        return None
    is_map = same_size(other.shape[0], 1) and all(map(same_size, layer.shape[1:], other.shape[1:]))
    one_map = is_map and not is_linear(layer) and other.node not in live
    return other if other.is_shaped(layer) or one_map else None


def _convolution(layer: Value, chain: EpilogueChain) -> fx.Node:
    editor, arguments, last = layer.editor, layer.arguments, chain.last.node
    count = layer.rank - 2
    padding, stride, dilation = (_per_axis(arguments[key], count) for key in ("padding", "stride", "dilation"))
    with editor.graph.inserting_before(last):
        sizes = [n.node if isinstance(n, Value) else n for n in arguments["input"].sizes]
    geometry = (padding, stride, dilation, arguments["groups"])
    x, weight, bias = (None if v is None else v.node for v in map(arguments.get, ("input", "weight", "bias")))
    if count == 2:
        pack = ops()._reorder_convolution_weight.default
        weight = editor.insert(last, weight, pack, weight, *geometry, sizes)
    other = None if chain.other is None else chain.other.node
    if chain.other is not None and not same_size(chain.other.shape[0], chain.last.shape[0]):
        # One map for all images: oneDNN broadcasts slowly, but adds to an expanded copy in place.
        spread = [sizes[0]] + [-1] * (count + 1)
        other = editor.insert(last, last, aten.expand.default, other, spread)
        other = editor.insert(last, last, COPY, other)
    target, args = convolution(x, weight, bias, geometry, chain.after, other)
    return editor.insert(last, last, target, *args)


def _per_axis(value: Any, count: int) -> list[int]:
    return list(value) * count if len(value) == 1 else list(value)


def _linear(layer: Value, chain: EpilogueChain) -> fx.Node:
    editor, last, after = layer.editor, chain.last.node, chain.after
    x, weight, bias = (None if v is None else v.node for v in map(layer.arg, ("input", "weight", "bias")))
    packed = editor.insert(last, weight, ops()._reorder_linear_weight.default, weight, None)
    if chain.other is not None:
        binary = ops()._linear_pointwise.binary
        return editor.insert(last, last, binary, x, chain.other.node, packed, bias, "add")
    activation = (after.name, list(after.scalars), after.algorithm)
    return editor.insert(last, last, ops()._linear_pointwise.default, x, packed, bias, *activation)


class _InFloat32(nn.Module):
    """A network in float32 that stays so: oneDNN has no float64."""

    def __init__(self, *layers: nn.Module, residual: bool = False):
        super().__init__()
        self.layers, self.residual = nn.Sequential(*layers), residual

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (self.layers(x) + x).relu() if self.residual else self.layers(x)


_CASES = (
    case(_InFloat32(nn.Conv2d(2, 6, 3), nn.SiLU()), (2, 2, 4, 5), dynamic={0: (0,)}),
    case(_InFloat32(nn.Conv2d(2, 2, 3, padding=1), residual=True), (2, 2, 4, 5)),
    case(_InFloat32(nn.Linear(6, 4), nn.GELU()), (2, 3, 6)),
    case(_InFloat32(nn.Linear(6, 6), residual=True), (2, 6)),
)


def epilogues_fused(wanted: Wanted) -> Pass:
    """The pass that fuses layers with their epilogues where that is wanted."""
    return Pass(
        "the fusion of epilogues",
        lambda program, table: fuse_epilogues(program, wanted),
        "relu(conv(x) + y) == conv_add_relu(x, y)",
        cases=_CASES,
        exact=False,
        tolerance=1e-6,  # sums in float32, in another order
    )
