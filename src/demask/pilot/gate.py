"""Training in which only the units of the highest priority are updated.

Within `with gate:` the weight gradients of linear layers and convolutions are computed for the
chosen rows (output units, filters) alone. `gate.step(optimizer)` then shows the optimizer those
rows alone, so that neither the other weights nor their state in the optimizer change. The model
itself is not changed: torch's functions are intercepted (`TorchFunctionMode`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.overrides import TorchFunctionMode

from demask.errors import BadInput

BY = ("pilot", "magnitude", "random")
# Each element of a parameter has its own update: rows can be left out.
BY_ELEMENT = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)


@dataclass(frozen=True, slots=True)
class Gated:
    """A layer: its name, weight and bias, whose first axes are its units."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def units(self) -> int:
        return len(self.weight)


class Gate(TorchFunctionMode):
    """A context in which training updates only the most important units of each layer.

    Layers are nn.Linear, nn.Conv1d and nn.Conv2d whose weight requires gradients. A unit is a row
    of the weight (an output unit or a filter) with its element of the bias. A priority is a number
    that rates the importance of a unit. Within `with gate:` gradients of weights and biases are
    computed for the chosen units alone and are 0 for others. Then `gate.step(optimizer)` updates
    only the chosen units and their state in the optimizer. All gradients are computed for grouped
    convolutions, convolutions with padding="same" or "valid" or one image without a batch, and
    calls under autocast; `step` still updates only the chosen units.

    Args:
        model: the network to train.
        priorities: for by="pilot": an ExecutionData, a mapping from layer names to one finite
            number per unit (a tensor or a sequence), or a function without arguments that returns
            one of these; default None, for other values of `by`.
        fraction: share of each layer's units that is updated, above 0, at most 1; the number of
            units is rounded up.
        by: how units are chosen: "pilot" (the default) by `priorities`, "magnitude" by the L2 norm
            of a unit's weights, or "random".
        every: number of steps after which units are chosen again, 1 or more; default None: never.
        rest: whether parameters of other layers (norms, embeddings) are updated; default True.
        seed: seed for by="random"; default 0.

    Attributes:
        layers: the layers, a tuple of records with `name`, `weight`, `bias` and `units`.
        rows: by layer name, the numbers of the chosen units, ascending, int64 [chosen units].
        updated: number of tensor elements that were updated so far, summed over all steps.
        steps: number of calls of `step` so far.

    Raises:
        BadInput: a value is out of range, priorities are missing, do not fit or are set with
            another value of `by`, or no layer of the model requires gradients.

    Example:
        >>> import torch
        >>> from demask.pilot import Gate
        >>> layer = torch.nn.Linear(3, 4, bias=False)
        >>> gate = Gate(layer, {"": torch.tensor([0.0, 2.0, 1.0, 3.0])}, fraction=0.5)  # "": itself
        >>> optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.1), layer.weight.clone()
        >>> with gate:
        ...     layer(torch.ones(2, 3)).sum().backward()
        >>> gate.step(optimizer)
        >>> gate.rows[""].tolist(), (layer.weight != before).any(1).tolist()
        ([1, 3], [False, True, False, True])
    """

    def __init__(
        self,
        model: nn.Module,
        priorities: Any = None,
        *,
        fraction: float,
        by: Literal["pilot", "magnitude", "random"] = "pilot",
        every: int | None = None,
        rest: bool = True,
        seed: int = 0,
    ):
        super().__init__()
        if by not in BY:
            raise BadInput(f"expected by to be one of {', '.join(BY)}, got {by!r}")
        if not 0 < fraction <= 1:
            raise BadInput(f"expected a fraction above 0 and up to 1, got {fraction!r}")
        if every is not None and (type(every) is not int or every < 1):
            raise BadInput(f"expected every to be a number of steps or None, got {every!r}")
        if (by == "pilot") != (priorities is not None):
            raise BadInput(
                "priorities are for by='pilot', which needs them: an ExecutionData from "
                "demask.pilot.collect, a mapping, or a function of none"
            )
        self.fraction, self.by, self.every, self.rest = fraction, by, every, rest
        self.layers = tuple(_layers(model))
        if not self.layers:
            raise BadInput("the model has no linear layer or convolution that trains")
        self.steps = self.updated = 0
        self._read_priorities: Callable[[], Any] = priorities if callable(priorities) else lambda: priorities
        self._draw = torch.Generator().manual_seed(seed)
        self.rows: dict[str, Tensor] = {}
        self._by_weight: dict[int, Tensor] = {}
        self.choose()

    def choose(self) -> None:
        """Chooses units again, by the current priorities, and stores their numbers in `rows`.

        Raises:
            BadInput: priorities are missing or do not fit.
        """
        current = self._read_priorities() if self.by == "pilot" else None
        for layer in self.layers:
            priorities = self._priorities(layer, current)
            count = math.ceil(self.fraction * layer.units)
            chosen = priorities.argsort(descending=True, stable=True)[:count].sort().values
            self.rows[layer.name] = chosen
            self._by_weight[id(layer.weight)] = chosen.to(layer.weight.device)

    def _priorities(self, layer: Gated, current: Any) -> Tensor:
        if self.by == "random":
            return torch.rand(layer.units, generator=self._draw)
        if self.by == "magnitude":
            return torch.linalg.vector_norm(layer.weight.detach().flatten(1), dim=1).cpu()
        named = current.mean().magnitudes if hasattr(current, "magnitudes") else current
        if not isinstance(named, Mapping) or layer.name not in named:
            raise BadInput(
                f"there are no priorities of layer {layer.name!r}; collect them from a network with the same layers"
            )
        numbers = torch.as_tensor(named[layer.name]).detach().cpu().float()
        if numbers.shape != (layer.units,) or not bool(numbers.isfinite().all()):
            raise BadInput(
                f"priorities of {layer.name!r}: expected {layer.units} finite numbers, got shape {tuple(numbers.shape)}"
            )
        return numbers

    # ----------------------------------------------------------------------------------- gradients

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        if func in _CALLS and torch.is_grad_enabled():
            output = self._gated(func, args, keywords)
            if output is not None:
                return output
        return func(*args, **keywords)

    def _gated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The call with gradients of the chosen rows alone; None where it stays as it is."""
        names, apply = _CALLS[func]
        bound = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
        x, weight = bound["input"], bound["weight"]
        rows = self._by_weight.get(id(weight))
        if rows is None or len(rows) == len(weight) or not weight.requires_grad:
            return None
        if torch.is_autocast_enabled(x.device.type) or type(x) not in (Tensor, nn.Parameter):
            return None
        return apply(bound, rows)

    # ---------------------------------------------------------------------------------- the update

    def step(self, optimizer: optim.Optimizer) -> None:
        """Runs one step of the optimizer for the chosen units (and for other layers, if `rest`).

        Optimizers such as Adam correct their moments by a count of steps, which belongs to the
        full parameter, not to a unit.

        Args:
            optimizer: one that updates each element by itself: SGD, Adam, AdamW, Adamax, NAdam,
                RAdam, RMSprop, Adagrad, Adadelta, ASGD or Rprop.

        Raises:
            BadInput: the optimizer is another one, such as LBFGS.
        """
        if not isinstance(optimizer, BY_ELEMENT):
            known = ", ".join(kind.__name__ for kind in BY_ELEMENT)
            raise BadInput(
                f"expected an optimizer that updates each number by itself ({known}), got {type(optimizer).__name__}"
            )
        rows = {}
        for layer in self.layers:
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    rows[parameter] = self._by_weight[id(layer.weight)]
        with self._narrowed(optimizer, rows):
            optimizer.step()
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            self.choose()

    @contextmanager
    def _narrowed(self, optimizer: optim.Optimizer, rows: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
        """The optimizer sees the chosen rows of parameters, gradients and state."""
        narrow: list[_NarrowParameter] = []
        hidden: list[tuple[Tensor, Tensor]] = []
        try:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is None:
                    continue
                if parameter in rows:
                    narrow.append(_NarrowParameter(parameter, rows[parameter], optimizer.state))
                    self.updated += len(rows[parameter]) * parameter[0].numel()
                elif self.rest:
                    self.updated += parameter.numel()
                else:
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None
            yield
        finally:
            for one in narrow:
                one.widen()
            for parameter, grad in hidden:
                parameter.grad = grad


class _NarrowParameter:
    """A parameter cut to some rows, with its gradient and its state in the optimizer."""

    def __init__(self, parameter: nn.Parameter, rows: Tensor, state: Any):
        self.parameter, self.rows, self.state = parameter, rows, state
        self.data, self.grad = parameter.data, parameter.grad
        self.full_state = {
            name: value
            for name, value in state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        }
        assert self.grad is not None
        grad = self.grad.to_dense()[rows]
        parameter.grad = None
        parameter.data = self.data[rows]
        parameter.grad = grad
        for name, value in self.full_state.items():
            state[parameter][name] = value[rows]

    def widen(self) -> None:
        """Write the rows back into the full parameter; new state is zero elsewhere."""
        small = self.parameter.data
        self.parameter.grad = None
        self.parameter.data = self.data
        self.parameter.grad = self.grad
        with torch.no_grad():  # counted by torch as a write, so that plans of weights notice it
            self.parameter.index_copy_(0, self.rows, small)
        entries = self.state.get(self.parameter, {})
        for name, value in list(entries.items()):
            if not isinstance(value, Tensor) or value.shape != small.shape:
                continue
            complete = self.full_state.get(name)
            if complete is None:
                complete = value.new_zeros(self.data.shape)
            entries[name] = complete.index_copy_(0, self.rows, value)


def _layers(model: nn.Module) -> Iterator[Gated]:
    seen = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
            continue
        weight, bias = module.weight, module.bias
        if isinstance(weight, nn.Parameter) and weight.requires_grad and id(weight) not in seen:
            seen.add(id(weight))
            trains = bias is not None and bias.requires_grad
            yield Gated(name, weight, bias if trains and isinstance(bias, nn.Parameter) else None)


# ------------------------------------------------------------- gradients of some rows, as functions


class _GatedLinear(torch.autograd.Function):
    """linear(x, w, b) whose weight and bias have gradients in some rows, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight, rows) = grads, ctx.saved_tensors
        for_x = grad @ weight if ctx.needs_input_grad[0] else None
        some = grad.index_select(-1, rows).reshape(-1, len(rows))
        for_weight = for_bias = None
        if ctx.needs_input_grad[1]:
            rows_of_weight = some.t() @ x.reshape(-1, x.shape[-1])
            for_weight = torch.zeros_like(weight).index_copy_(0, rows, rows_of_weight)
        if ctx.needs_input_grad[2]:
            for_bias = grad.new_zeros(len(weight)).index_copy_(0, rows, some.sum(0))
        return for_x, for_weight, for_bias, None


class _GatedConv(torch.autograd.Function):
    """A convolution without groups whose weight and bias have gradients in some rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        ctx.geometry = geometry
        stride, padding, dilation = geometry
        zeros = [0] * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, zeros, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight, rows) = grads, ctx.saved_tensors
        rest = (*ctx.geometry, False, [0] * len(ctx.geometry[0]), 1)
        backward = torch.ops.aten.convolution_backward
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = backward(grad, x, weight, None, *rest, [True, False, False])[0]
        some = grad.index_select(1, rows)
        if ctx.needs_input_grad[1]:
            rows_of_weight = backward(some, x, weight[rows], None, *rest, [False, True, False])[1]
            for_weight = torch.zeros_like(weight).index_copy_(0, rows, rows_of_weight)
        if ctx.needs_input_grad[2]:
            summed = some.sum([0, *range(2, some.ndim)])
            for_bias = grad.new_zeros(len(weight)).index_copy_(0, rows, summed)
        return for_x, for_weight, for_bias, None, None


def _linear(bound: Mapping[str, Any], rows: Tensor) -> Tensor:
    apply: Any = _GatedLinear.apply
    return apply(bound["input"], bound["weight"], bound["bias"], rows)


def _conv(bound: Mapping[str, Any], rows: Tensor) -> Tensor | None:
    axes = bound["weight"].ndim - 2
    if bound["groups"] != 1 or isinstance(bound["padding"], str):
        return None
    if bound["input"].ndim != axes + 2:
        return None  # one image without a batch
    geometry = tuple(_each(bound[name], axes) for name in ("stride", "padding", "dilation"))
    apply: Any = _GatedConv.apply
    return apply(bound["input"], bound["weight"], bound["bias"], rows, geometry)


def _each(value: Any, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_CALLS: dict[Any, tuple[tuple[str, ...], Callable[..., Tensor | None]]] = {
    F.linear: (_CONV[:3], _linear),
    F.conv2d: (_CONV, _conv),
    F.conv1d: (_CONV, _conv),
}
