"""ONNX's recurrent ops: LSTM, GRU and plain recurrent layers.

Where definitions are equal, torch's own op runs; otherwise the steps are computed one by one. Gates
in ONNX's order: LSTM i, o, f, c; GRU z, r, h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops

OPS = Ops()
aten = torch.ops.aten
Activation = Callable[[Tensor], Tensor]
States = list[Tensor]

_BACKWARD = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

#: function and defaults of alpha and beta, if it takes them; None: no default in ONNX
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float | None, ...]]] = {
    "relu": (torch.relu, ()),
    "tanh": (torch.tanh, ()),
    "sigmoid": (torch.sigmoid, ()),
    "softsign": (functional.softsign, ()),
    "softplus": (functional.softplus, ()),
    "affine": (lambda x, alpha, beta: x * alpha + beta, (None, None)),
    "leakyrelu": (functional.leaky_relu, (0.01,)),
    "thresholdedrelu": (lambda x, alpha: torch.where(x >= alpha, x, 0.0), (1.0,)),
    "scaledtanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (None, None)),
    "hardsigmoid": (lambda x, alpha, beta: (alpha * x + beta).clamp(0.0, 1.0), (0.2, 0.5)),
    "elu": (functional.elu, (1.0,)),
}

ZERO_AT_ZERO = set(_ACTIVATIONS) - {"sigmoid", "softplus", "affine", "hardsigmoid"}


@dataclass(frozen=True, slots=True)
class RecurrentDirection:
    """One direction of a layer: its weights in ONNX's order and its options.
    calls: the activations of one direction; peephole: weights of the gates i, o, f."""

    w: Tensor
    r: Tensor
    biases: tuple[Tensor, Tensor] | None
    peephole: tuple[Tensor, ...] | None
    calls: Sequence[Activation]
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = False

    def active(self, k: int, x: Tensor) -> Tensor:
        """Activation k of x, clamped to the clip."""
        return self.calls[k](x if self.clip is None else x.clamp(-self.clip, self.clip))

    def read(self, h: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        """The recurrent part of gates (rows from `start` to `end`, by default all): R h + bias."""
        bias = None if self.biases is None else self.biases[1][start:end]
        return functional.linear(h, self.r[start:end], bias)


def _lstm_step(way: RecurrentDirection, x: Tensor, states: States) -> States:
    h, c = states
    i, o, f, g = (x + way.read(h)).chunk(4, -1)
    if way.peephole is not None:
        i, f = i + way.peephole[0] * c, f + way.peephole[2] * c
    i = way.active(0, i)
    f = 1 - i if way.input_forget else way.active(0, f)
    c = f * c + i * way.active(1, g)
    if way.peephole is not None:
        o = o + way.peephole[1] * c
    return [way.active(0, o) * way.calls[2](c), c]  # not clipped, as in ONNX Runtime


def _gru_step(way: RecurrentDirection, x: Tensor, states: States) -> States:
    h, size = states[0], states[0].shape[-1]
    z, r, n = x.chunk(3, -1)
    if way.linear_before_reset:
        read_z, read_r, read_n = way.read(h).chunk(3, -1)
        r = way.active(0, r + read_r)
        n = way.active(1, n + r * read_n)
    else:
        read_z, read_r = way.read(h, 0, 2 * size).chunk(2, -1)
        r = way.active(0, r + read_r)
        n = way.active(1, n + way.read(r * h, 2 * size))
    z = way.active(0, z + read_z)
    return [(1 - z) * n + z * h]


def _rnn_step(way: RecurrentDirection, x: Tensor, states: States) -> States:
    return [way.active(0, x + way.read(states[0]))]


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """The inputs of a layer. x: [time, batch, features], or batch first in layout 1. w, r, b,
    peephole: weights of all directions. lens: steps per sample. initial: states, None for zeros."""

    x: Tensor
    w: Tensor
    r: Tensor
    b: Tensor | None
    lens: Tensor | None
    initial: tuple[Tensor | None, ...]
    peephole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecurrentAttributes:
    """The attributes that all kinds of layers have. layout 1: batch first."""

    direction: str
    layout: int
    activations: Sequence[str] | None
    alphas: Sequence[float]
    betas: Sequence[float]
    hidden_size: int | None


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """A kind of layer."""

    order: tuple[int, ...]  # index in ONNX's gates of each of torch's
    usual: tuple[str, ...]  # default activations, with which torch's op is equal, those of gates first
    torch_op: Callable[..., Any]
    step: Callable[[RecurrentDirection, Tensor, States], States]  # computes the states of the next step


_LSTM = RecurrentKind((0, 2, 3, 1), ("sigmoid", "tanh", "tanh"), aten.lstm.input, _lstm_step)
_GRU = RecurrentKind((1, 0, 2), ("sigmoid", "tanh"), aten.gru.input, _gru_step)
_RNN = RecurrentKind((0,), ("tanh",), aten.rnn_tanh.input, _rnn_step)
_RNN_RELU = RecurrentKind((0,), ("relu",), aten.rnn_relu.input, _rnn_step)
KINDS = {"LSTM": _LSTM, "GRU": _GRU, "RNN": _RNN}


def direction_activations(op: str, names: Sequence[str] | None, direction: int) -> tuple[list[str], list[str]]:
    """The activations of the gates of a direction, and those of its values, in lower case."""
    usual = KINDS[op].usual
    count = len(usual)
    own = [n.lower() for n in names[direction * count :][:count]] if names else list(usual)
    gates = 0 if op == "RNN" else 1
    return own[:gates], own[gates:]


def _run_torch_op(kind: RecurrentKind, way: RecurrentDirection, x: Tensor, states: States, lens: Tensor | None) -> Any:
    """The outputs and last states of one direction, by torch's own op."""
    parts = [way.w, way.r, *(way.biases or ())]
    if len(kind.order) > 1:
        chunks = [part.chunk(len(kind.order)) for part in parts]
        parts = [torch.cat([chunk[k] for k in kind.order]) for chunk in chunks]
    initial = states if len(states) > 1 else states[0]
    with_states = [s.unsqueeze(0) for s in states] if len(states) > 1 else initial.unsqueeze(0)  # type: ignore[union-attr]
    y, *ends = kind.torch_op(x, with_states, parts, way.biases is not None, 1, 0.0, False, False, False)
    if lens is None:
        return y, [end.squeeze(0) for end in ends]
    last = (lens - 1).clamp(min=0).reshape(1, -1, 1).expand(1, -1, y.shape[-1])
    end = torch.where(lens.unsqueeze(-1) > 0, y.gather(0, last).squeeze(0), states[0])
    return y, [end, *(end.squeeze(0) for end in ends[1:])]


def _run_steps(kind: RecurrentKind, way: RecurrentDirection, x: Tensor, states: States, lens: Tensor | None) -> Any:
    """The outputs and last states of one direction, step by step."""
    outputs = []
    gates = functional.linear(x, way.w, None if way.biases is None else way.biases[0])
    for t, gate in enumerate(gates.unbind(0)):
        new = kind.step(way, gate, states)
        if lens is not None:
            is_active = (lens > t).unsqueeze(-1)
            new = [torch.where(is_active, n, s) for n, s in zip(new, states, strict=True)]
        states = new
        outputs.append(states[0])
    return torch.stack(outputs), states


def _reverse_time(x: Tensor, lens: Tensor | None) -> Tensor:
    """x reversed in time, per sample over its own length."""
    if lens is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    index = torch.where(t < lens, lens - 1 - t, t).unsqueeze(-1)
    return x.gather(0, index.expand(x.shape))


def _run_direction(
    run: Callable[..., Any],
    kind: RecurrentKind,
    way: RecurrentDirection,
    x: Tensor,
    states: States,
    lens: Tensor | None,
    backward: bool,
) -> tuple[Tensor, States]:
    """The outputs and last states of one direction; outputs after a sample's end are zero."""
    y, ends = run(kind, way, _reverse_time(x, lens) if backward else x, states, lens)
    if lens is not None:
        t = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
        y = torch.where((t < lens).unsqueeze(-1), y, 0.0)
    return (_reverse_time(y, lens) if backward else y), ends


def _run_layer(
    kind: RecurrentKind, inputs: RecurrentInputs, attributes: RecurrentAttributes, outputs: int, **options: Any
) -> tuple[Tensor, ...]:
    """Outputs and last states of a layer in all its directions. options: of its directions."""
    x, w, r, b, lens = inputs.x, inputs.w, inputs.r, inputs.b, inputs.lens
    _check_sizes(w, r, attributes)
    initial, peephole = inputs.initial, inputs.peephole
    backward, lens = _BACKWARD[attributes.direction], None if lens is None else lens.to(torch.int64)
    names = [n.lower() for n in attributes.activations or kind.usual * len(backward)]
    usual = names == list(kind.usual * len(backward)) and peephole is None
    usual &= not any(value for key, value in options.items() if key != "linear_before_reset")
    usual &= options.get("linear_before_reset", True) != 0 and not (lens is not None and outputs > 2)
    count = len(kind.usual)
    calls = _read_activations(names, attributes.alphas, attributes.betas, count * len(backward))
    if attributes.layout:
        x, initial = x.transpose(0, 1), [s if s is None else s.transpose(0, 1) for s in initial]
    size = (x.shape[1], r.shape[-1])
    runs = []
    for d, back in enumerate(backward):
        way = RecurrentDirection(
            w[d],
            r[d],
            None if b is None else tuple(b[d].chunk(2)),  # type: ignore[arg-type]
            None if peephole is None else peephole[d].chunk(3),
            calls[d * count : (d + 1) * count],
            **options,
        )
        states = [x.new_zeros(size) if s is None else s[d] for s in initial]
        run = _run_torch_op if usual else _run_steps
        runs.append(_run_direction(run, kind, way, x, states, lens, back))
    results = [torch.stack([y for y, _ in runs], 1)]
    results += [torch.stack(ends) for ends in zip(*(ends for _, ends in runs), strict=True)]
    if attributes.layout:
        results = [results[0].permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in results[1:])]
    return tuple(results[:outputs])


def _check_sizes(w: Tensor, r: Tensor, attributes: RecurrentAttributes) -> None:
    direction, hidden_size = attributes.direction, attributes.hidden_size
    if direction not in _BACKWARD or w.shape[0] != len(_BACKWARD[direction]):
        raise BadInput(f"expected weights of direction {direction!r}, got those of {w.shape[0]}")
    if hidden_size not in (None, r.shape[-1]):
        raise BadInput(f"expected hidden_size {r.shape[-1]} as in the weights, got {hidden_size}")


def _read_activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], count: int
) -> list[Activation]:
    """The functions with these names, bound to the next alpha and beta if they take them."""
    if len(names) != count or not set(names) <= set(_ACTIVATIONS):
        raise BadInput(f"expected {count} activations out of {sorted(_ACTIVATIONS)}, got {names}")
    rest, functions = [iter(alphas), iter(betas)], []
    for name in names:
        function, defaults = _ACTIVATIONS[name]
        values = [next(k, default) for k, default in zip(rest, defaults, strict=False)]
        if None in values:
            raise BadInput(f"expected activation_alpha and activation_beta for {name!r}, got none")
        functions.append(partial(_apply_with, function, values) if values else function)
    return functions


def _apply_with(function: Callable[..., Tensor], values: Sequence[Any], x: Tensor) -> Tensor:
    return function(x, *values)


@OPS("LSTM")
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    """The hidden states of all steps, and the last hidden and cell states."""
    inputs = RecurrentInputs(x, w, r, b, sequence_lens, (initial_h, initial_c), p)
    attributes = RecurrentAttributes(direction, layout, activations, activation_alpha, activation_beta, hidden_size)
    return _run_layer(_LSTM, inputs, attributes, outputs, clip=clip, input_forget=bool(input_forget))


@OPS("GRU")
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    """The hidden states of all steps, and the last hidden state."""
    inputs = RecurrentInputs(x, w, r, b, sequence_lens, (initial_h,))
    attributes = RecurrentAttributes(direction, layout, activations, activation_alpha, activation_beta, hidden_size)
    return _run_layer(_GRU, inputs, attributes, outputs, clip=clip, linear_before_reset=bool(linear_before_reset))


@OPS("RNN")
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    outputs: int,
) -> tuple[Tensor, ...]:
    """The hidden states of all steps, and the last hidden state."""
    relu = {name.lower() for name in activations or ()} == {"relu"}
    inputs = RecurrentInputs(x, w, r, b, sequence_lens, (initial_h,))
    attributes = RecurrentAttributes(direction, layout, activations, activation_alpha, activation_beta, hidden_size)
    return _run_layer(_RNN_RELU if relu else _RNN, inputs, attributes, outputs, clip=clip)
