"""Predicted seconds of each implementation of a layer on this machine.

Operands are drawn with a separate generator: the caller's random state does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.onednn import available, ops
from demask.graph.queries import ExampleSizes
from demask.machine.cost import Costs, Question
from demask.ops import schema
from demask.ops.schema import fake
from demask.tune.channels_last import FORMATS
from demask.tune.epilogue import Epilogue, apply_activation, convolution

aten = torch.ops.aten
CACHE, SETS = 2**20, 5  # operands of more bytes are timed on several sets in turns, 5 at most
DRAWN = 2**16  # normal values, repeated in larger operands
NONE = Epilogue()
PLAIN, FUSED = "plain", "fused"  # implementations of a layer


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or linear layer with its input and weight shapes. target: the ATen op."""

    target: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: tuple[Any, ...]  # stride, padding, dilation, groups; empty for a linear layer
    bias: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node, example: ExampleSizes) -> Layer:
        """The layer of an ATen call, on the sizes of the example."""
        arguments = schema.arguments(node)
        keys = [key for key in ("stride", "padding", "dilation", "groups") if key in arguments]
        geometry = tuple(_per_axis(arguments[key], node) for key in keys)
        value = fake(node)
        shapes = example.shape(arguments["input"]), example.shape(arguments["weight"])
        bias = arguments["bias"] is not None
        return cls(str(node.target), *shapes, geometry, bias, value.dtype, value.device)

    @property
    def convolves(self) -> bool:
        """Whether the layer is a convolution."""
        return bool(self.geometry)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the layer's output."""
        return _shape_of_output(self)

    def work(self, other: bool) -> tuple[float, float]:
        """Operations of the layer, and bytes that it moves. other: whether a tensor is added."""
        outputs = math.prod(self.out)
        products = outputs * math.prod(self.weight) // max(_count_output_channels(self), 1)
        elements = math.prod(self.x) + outputs * (2 if other else 1) + math.prod(self.weight)
        return 2.0 * products, 4.0 * elements


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Predicted seconds of layers in each implementation, on the example's sizes."""

    costs: Costs
    example: ExampleSizes

    def of(self, node: fx.Node) -> Layer:
        """The layer of an ATen call."""
        return Layer.of(node, self.example)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The sizes of a node's value."""
        return self.example.shape(node)

    def implementations(self, layer: Layer) -> list[str]:
        """Names of the implementations of a layer."""
        is_numbered = "transpose" not in layer.target and not layer.target.endswith(".padding")  # no "same"
        is_fusible = is_numbered and available(layer.dtype, layer.device)
        return [PLAIN, FUSED] if is_fusible else [PLAIN]

    def layer(self, layer: Layer, last: bool, after: Epilogue = NONE, *, other: bool = False) -> tuple[str, float]:
        """The fastest implementation of a layer with its epilogue, and its seconds."""
        seconds = {name: self.seconds(layer, name, last, after, other) for name in self.implementations(layer)}
        best = min(seconds, key=seconds.__getitem__)
        return best, seconds[best]

    def seconds(self, layer: Layer, implementation: str, last: bool, after: Epilogue, other: bool) -> float:
        """Predicted seconds of one implementation (`form`) of a layer.

        last: whether images are in channels last. after: activation computed by the same call.
        other: whether another tensor is added, which is then read as well.
        """
        flops, size = layer.work(other)
        order = "channels last" if last else "plain layout"
        name = f"{implementation}; {order}; {layer}; {after}; {'added to' if other else 'alone'}"

        def make() -> Callable[[], object]:
            return _call(layer, implementation, last, _drawn(), after, other)

        return self.costs.seconds(Question(name, flops, size, _in_turns(make, size)))

    def roofline(self, layer: Layer, other: bool) -> float:
        """Seconds of a layer by the rates of this machine. other: whether a tensor is added."""
        return self.costs.roofline(*layer.work(other))


def _in_turns(make: Callable[[], Callable[[], object]], size: float) -> Any:
    """`make`, or for large operands one that cycles through several sets of them, together larger
    than the cache: a single set would stay there, unlike the values of a network."""
    if size < CACHE:
        return make

    def several() -> Callable[[], object]:
        count = min(SETS, 1 + math.ceil(SETS * CACHE / size))
        calls = cycle([make() for _ in range(count)])
        return lambda: next(calls)()

    return several


def _count_output_channels(layer: Layer) -> int:
    return layer.weight[1 if "transpose" in layer.target else 0]


def _per_axis(value: Any, node: fx.Node) -> Any:
    """A stride, padding or dilation as one number per axis."""
    if not isinstance(value, (list, tuple)):
        return value
    count = fake(node).ndim - 2
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _drawn() -> Callable[..., Tensor]:
    """A function that draws seeded normal tensors."""
    values = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))

    def draw(*shape: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        size = math.prod(shape)
        drawn = values.repeat(-(-size // DRAWN))[:size].view(shape)
        return drawn.to(device, dtype, copy=True)

    return draw


@lru_cache(maxsize=4096)
def _shape_of_output(layer: Layer) -> tuple[int, ...]:
    with torch.device("meta"):
        return tuple(_call(layer, PLAIN, False, torch.empty)().shape)


def _in_layout(tensor: Tensor, last: bool) -> Tensor:
    if last and tensor.ndim in FORMATS:
        return tensor.contiguous(memory_format=FORMATS[tensor.ndim])
    return tensor


def _call(
    layer: Layer,
    implementation: str,
    last: bool,
    draw: Callable[..., Tensor],
    after: Epilogue = NONE,
    other: bool = False,
) -> Callable[[], Any]:
    """The call to time: layer, sum and activation. Weights are packed beforehand."""
    options: Any = {"dtype": layer.dtype}
    if draw is not torch.empty:
        options["device"] = layer.device
    x, weight = _in_layout(draw(*layer.x, **options), last), draw(*layer.weight, **options)
    bias = draw(_count_output_channels(layer), **options) if layer.bias else None
    if implementation == PLAIN:
        product = _plain(layer, x, _in_layout(weight, last), bias)
        added = _in_layout(draw(*layer.out, **options), last) if other else None
        return partial(_activate_output, product, added, after)
    if not layer.convolves:
        return _linear(x, weight, bias, draw, options, after, other)
    stride, padding, dilation, groups = layer.geometry
    if weight.ndim == 4:
        weight = ops()._reorder_convolution_weight(weight, padding, stride, dilation, groups, list(x.shape))
    geometry = (padding, stride, dilation, groups)
    target, args = convolution(x, weight, bias, geometry, after)
    if not other:
        return lambda: target(*args)
    buffer = _in_layout(draw(*layer.out, **options), last)
    target, args = convolution(x, weight, bias, geometry, after, buffer)
    target = ops()._convolution_pointwise_.binary
    return lambda: target(args[1], args[0], *args[2:])


def _plain(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """The call of a layer's ATen op."""
    packet, _, overload = layer.target.removeprefix("aten.").partition(".")
    target: Any = getattr(getattr(aten, packet), overload)
    if layer.convolves:
        stride, padding, dilation, groups = layer.geometry
        function = getattr(torch, packet)
        if "transpose" in packet:
            geometry = (stride, padding, 0, groups, dilation)
        else:
            geometry = (stride, padding, dilation, groups)
        return lambda: function(x, weight, bias, *geometry)
    return lambda: target(x, weight, bias)


def _activate_output(product: Callable[[], Tensor], added: Tensor | None, after: Epilogue) -> Tensor:
    """The activation of a layer's output, after a sum with `added` if there is one."""
    y = product()
    if added is not None:
        y = y.add_(added)
    return apply_activation(after, y)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, draw: Any, options: Any, after: Epilogue, other: bool
) -> Callable[[], Any]:
    """The call of a linear layer of oneDNN. options: dtype and device of drawn tensors."""
    packed = ops()._reorder_linear_weight(weight, None)
    if other:
        added = draw(*x.shape[:-1], weight.shape[0], **options)
        return lambda: ops()._linear_pointwise.binary(x, added, packed, bias, "add")
    scalars = list(after.scalars)
    return lambda: ops()._linear_pointwise.default(x, packed, bias, after.name, scalars, after.algorithm)
