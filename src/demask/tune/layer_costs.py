"""What a layer costs on this machine in each of the forms it may take: questions to the cost model.

Operands are drawn with a generator of their own; the caller's random state does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.onednn import available, ops
from demask.graph.queries import ExampleSizes
from demask.machine.cost import Costs, Question
from demask.ops import schema
from demask.tune.epilogue import Epilogue, convolution, plain_call
from demask.tune.passes.channels_last import FORMATS
from demask.tune.passes.pack_pixels import GROUPS

aten = torch.ops.aten
CACHE, SETS = 2**20, 5  # bytes; sets of operands
NONE = Epilogue()
PLAIN, FUSED = "plain", "fused"  # forms of a layer; the others are f"{count} pixels"


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution or linear layer on given shapes; `target` is the ATen op."""

    target: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: tuple[Any, ...]  # stride, padding, dilation, groups; of a linear layer none
    bias: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, node: fx.Node, example: ExampleSizes) -> Layer:
        """The layer that a call of an ATen op is, on the sizes of the example."""
        found = schema.arguments(node)
        keys = [key for key in ("stride", "padding", "dilation", "groups") if key in found]
        geometry = tuple(_spread(found[key], node) for key in keys)
        value = node.meta["val"]
        shapes = example.shape(found["input"]), example.shape(found["weight"])
        bias = found["bias"] is not None
        return cls(str(node.target), *shapes, geometry, bias, value.dtype, value.device)

    @property
    def convolves(self) -> bool:
        return bool(self.geometry)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of what it makes."""
        with torch.device("meta"):
            return tuple(_call(self, PLAIN, False, torch.empty)().shape)

    def wider(self, rows: int = 0, columns: int = 0) -> Layer:
        """With more output and input channels."""
        out, inner = (1, 0) if "transpose" in self.target else (0, 1)
        weight, x = list(self.weight), list(self.x)
        weight[out] += rows
        weight[inner] += columns
        x[1 if self.convolves else -1] += columns
        return replace(self, weight=tuple(weight), x=tuple(x))


@dataclass(frozen=True, slots=True)
class Asker:
    """Seconds of layers and joins in their forms, on the example's sizes, by a cost model."""

    costs: Costs
    example: ExampleSizes

    def of(self, node: fx.Node) -> Layer:
        """The layer that a call of an ATen op is."""
        return Layer.of(node, self.example)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The sizes of a node's value."""
        return self.example.shape(node)

    def forms(self, layer: Layer, last: bool) -> list[str]:
        """The forms that a layer can take; last: channels last in memory."""
        known = [PLAIN]
        fusible = "transpose" not in layer.target and available(layer.dtype, layer.device)
        if fusible:
            known.append(FUSED)
        narrow = last and len(layer.x) == 4 and layer.convolves and layer.weight[0] <= 16
        if fusible and narrow and layer.geometry[3] == 1:
            stride, _, dilation, _ = layer.geometry
            if stride[1] == 1 and dilation[1] == 1:
                known += [f"{n} pixels" for n in GROUPS if layer.out[3] % n == 0]
        return known

    def layer(
        self, layer: Layer, last: bool, after: Epilogue = NONE, *, other: bool = False
    ) -> tuple[str, float]:
        """The fastest form of a layer with its epilogue, and its seconds."""
        found = {form: self.seconds(layer, form, last, after, other)
                 for form in self.forms(layer, last)}  # fmt: skip
        best = min(found, key=found.__getitem__)
        return best, found[best]

    def seconds(self, layer: Layer, form: str, last: bool, after: Epilogue, other: bool) -> float:
        """Seconds of one form."""
        made = math.prod(layer.out)
        products = made * math.prod(layer.weight) // max(_outputs(layer), 1)
        moved = math.prod(layer.x) + made * (2 if other else 1) + math.prod(layer.weight)
        order = "channels last" if last else "plain layout"
        name = f"{form}; {order}; {layer}; {after}; {'added to' if other else 'alone'}"

        def make() -> Callable[[], object]:
            return _call(layer, form, last, _drawn(), after, other)

        return self.costs.seconds(
            Question(name, 2.0 * products, 4.0 * moved, _in_turns(make, 4 * moved))
        )

    def call(self, target: Any, last: bool, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
             *args: Any, index: int = 0) -> float:  # fmt: skip
        """Seconds of a call on float operands of these shapes; then an index of `index` positions
        below it, if it is not 0; then `args`."""
        moved = 4.0 * sum(map(math.prod, shapes))
        order = "channels last" if last else "plain layout"
        name = f"{target}; {order}; {list(shapes)}; {dtype}; {args}; index {index}"

        def make() -> Callable[[], object]:
            draw = _drawn()
            tensors = [_laid(draw(*s, dtype=dtype), last) for s in shapes]
            if index:
                tensors.insert(1, torch.arange(index))
                return lambda: target(tensors[0], *args, *tensors[1:])
            return lambda: target(*tensors, *args)

        return self.costs.seconds(Question(name, moved / 4, moved, _in_turns(make, moved)))


def _in_turns(make: Callable[[], Callable[[], object]], size: float) -> Any:
    """The call on several sets of operands in turns, where one would stay in the cache although
    what a network made a moment ago does not."""
    if size < CACHE:
        return make

    def several() -> Callable[[], object]:
        calls = cycle([make() for _ in range(SETS)])
        return lambda: next(calls)()

    return several


def _outputs(layer: Layer) -> int:
    return layer.weight[1 if "transpose" in layer.target else 0]


def _spread(value: Any, node: fx.Node) -> Any:
    """A geometry as numbers, one per axis."""
    if not isinstance(value, (list, tuple)):
        return value
    count = node.meta["val"].ndim - 2
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _drawn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return draw


def _laid(tensor: Tensor, last: bool) -> Tensor:
    if last and tensor.ndim in FORMATS:
        return tensor.contiguous(memory_format=FORMATS[tensor.ndim])
    return tensor


def _call(
    layer: Layer, form: str, last: bool, draw: Callable[..., Tensor],
    after: Epilogue = NONE, other: bool = False,
) -> Callable[[], Any]:  # fmt: skip
    """The call to time: a layer, what is added, the activation; weights are ready beforehand."""
    kind: Any = {"dtype": layer.dtype}
    if draw is not torch.empty:
        kind["device"] = layer.device
    x, weight = _laid(draw(*layer.x, **kind), last), draw(*layer.weight, **kind)
    bias = draw(_outputs(layer), **kind) if layer.bias else None
    if form == PLAIN:
        return _plain(layer, x, _laid(weight, last), bias, last, draw, kind, after, other)
    if not layer.convolves:
        return _linear(x, weight, bias, draw, kind, after, other)
    stride, padding, dilation, groups = layer.geometry
    if form != FUSED:
        count = int(form.split()[0])
        weight = torch.cat([torch.nn.functional.pad(weight, (k, count - 1 - k))
                            for k in range(count)])  # fmt: skip
        bias = None if bias is None else bias.repeat(count)
        stride = (stride[0], count)
    if weight.ndim == 4:
        weight = ops()._reorder_convolution_weight(
            weight, padding, stride, dilation, groups, list(x.shape)
        )
    target, args = convolution(x, weight, bias, padding, stride, dilation, groups, after)
    if not other:
        return lambda: target(*args)
    buffer = torch.empty_like(target(*args)).zero_()
    target, args = convolution(x, weight, bias, padding, stride, dilation, groups, after, buffer)
    target = ops()._convolution_pointwise_.binary
    return lambda: target(args[1], args[0], *args[2:])


def _plain(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None, last: bool, draw: Any,
           kind: Any, after: Epilogue, other: bool) -> Callable[[], Any]:  # fmt: skip
    packet, _, overload = layer.target.removeprefix("aten.").partition(".")
    target: Any = getattr(getattr(aten, packet), overload)
    if layer.convolves:
        stride, padding, dilation, groups = layer.geometry
        function = getattr(torch, packet)
        if "transpose" in packet:
            geometry = (stride, padding, 0, groups, dilation)
        else:
            geometry = (stride, padding, dilation, groups)
        made = lambda: function(x, weight, bias, *geometry)  # noqa: E731
    else:
        made = lambda: target(x, weight, bias)  # noqa: E731
    added = _laid(draw(*made().shape, **kind), last) if other else None

    def call() -> Any:
        y = made()
        if added is not None:
            y = y.add_(added)
        return plain_call(after, y)

    return call


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, draw: Any, kind: Any,
            after: Epilogue, other: bool) -> Callable[[], Any]:  # fmt: skip
    packed = ops()._reorder_linear_weight(weight, None)
    if other:
        added = draw(*x.shape[:-1], weight.shape[0], **kind)
        return lambda: ops()._linear_pointwise.binary(x, added, packed, bias, "add")
    scalars = list(after.scalars)
    return lambda: ops()._linear_pointwise.default(
        x, packed, bias, after.name, scalars, after.algorithm
    )
