"""ONNX ops that read back what they made one step before: LSTM, GRU and plain recurrent layers.

Where ONNX means what torch means, torch's own op runs; else the steps are written out. Gates in
ONNX's order: LSTM i, o, f, c; GRU z, r, h.
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

#: function, and the defaults of alpha and beta, as far as it takes them; None: ONNX knows none
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


@dataclass(frozen=True, slots=True)
class Way:
    """One direction of a layer: its weights in ONNX's order, and how a step goes.
    calls: the activations of one direction; peephole: of the gates i, o, f."""

    w: Tensor
    r: Tensor
    biases: tuple[Tensor, Tensor] | None
    peephole: tuple[Tensor, ...] | None
    calls: Sequence[Activation]
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = False

    def active(self, k: int, x: Tensor) -> Tensor:
        """Activation number k of x, cut to the clip."""
        return self.calls[k](x if self.clip is None else x.clamp(-self.clip, self.clip))

    def read(self, h: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        """What gates (all: those in rows from `start` to `end`) read of h."""
        bias = None if self.biases is None else self.biases[1][start:end]
        return functional.linear(h, self.r[start:end], bias)


def _lstm_step(way: Way, x: Tensor, states: States) -> States:
    h, c = states
    i, o, f, g = (x + way.read(h)).chunk(4, -1)
    if way.peephole is not None:
        i, f = i + way.peephole[0] * c, f + way.peephole[2] * c
    i = way.active(0, i)
    f = 1 - i if way.input_forget else way.active(0, f)
    c = f * c + i * way.active(1, g)
    if way.peephole is not None:
        o = o + way.peephole[1] * c
    return [way.active(0, o) * way.calls[2](c), c]  # not clipped, as ONNX Runtime reads the text


def _gru_step(way: Way, x: Tensor, states: States) -> States:
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


def _rnn_step(way: Way, x: Tensor, states: States) -> States:
    return [way.active(0, x + way.read(states[0]))]


@dataclass(frozen=True, slots=True)
class RecurrentKind:
    """A kind of layer. order: where torch's gates are among ONNX's; usual: its activations, with
    which torch's op `whole` says the same; step: its states, one step on."""

    order: tuple[int, ...]
    usual: tuple[str, ...]
    whole: Callable[..., Any]
    step: Callable[[Way, Tensor, States], States]


_LSTM = RecurrentKind((0, 2, 3, 1), ("sigmoid", "tanh", "tanh"), aten.lstm.input, _lstm_step)
_GRU = RecurrentKind((1, 0, 2), ("sigmoid", "tanh"), aten.gru.input, _gru_step)
_RNN = RecurrentKind((0,), ("tanh",), aten.rnn_tanh.input, _rnn_step)
_RNN_RELU = RecurrentKind((0,), ("relu",), aten.rnn_relu.input, _rnn_step)


def _whole(kind: RecurrentKind, way: Way, x: Tensor, states: States, lens: Tensor | None) -> Any:
    """The outputs and last states of one direction, by torch's own op."""
    parts = [way.w, way.r, *(way.biases or ())]
    if len(kind.order) > 1:
        chunks = [part.chunk(len(kind.order)) for part in parts]
        parts = [torch.cat([chunk[k] for k in kind.order]) for chunk in chunks]
    given = states if len(states) > 1 else states[0]
    with_states = [s.unsqueeze(0) for s in states] if len(states) > 1 else given.unsqueeze(0)  # type: ignore[union-attr]
    y, *ends = kind.whole(
        x, with_states, parts, way.biases is not None, 1, 0.0, False, False, False
    )
    if lens is None:
        return y, [end.squeeze(0) for end in ends]
    last = (lens - 1).clamp(min=0).reshape(1, -1, 1).expand(1, -1, y.shape[-1])
    end = torch.where(lens.unsqueeze(-1) > 0, y.gather(0, last).squeeze(0), states[0])
    return y, [end, *(end.squeeze(0) for end in ends[1:])]


def _stepped(kind: RecurrentKind, way: Way, x: Tensor, states: States, lens: Tensor | None) -> Any:
    """The outputs and last states of one direction, step by step."""
    made = []
    gates = functional.linear(x, way.w, None if way.biases is None else way.biases[0])
    for t, gate in enumerate(gates.unbind(0)):
        new = kind.step(way, gate, states)
        if lens is not None:
            runs = (lens > t).unsqueeze(-1)
            new = [torch.where(runs, n, s) for n, s in zip(new, states, strict=True)]
        states = new
        made.append(states[0])
    return torch.stack(made), states


def _turned(x: Tensor, lens: Tensor | None) -> Tensor:
    """x backward in time: of each sample, as many steps as it has."""
    if lens is None:
        return x.flip(0)
    t = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    index = torch.where(t < lens, lens - 1 - t, t).unsqueeze(-1)
    return x.gather(0, index.expand(x.shape))


def _one_way(
    run: Callable[..., Any], kind: RecurrentKind, way: Way, x: Tensor, states: States, lens: Tensor | None,
    backward: bool,
) -> tuple[Tensor, States]:  # fmt: skip
    """The outputs and last states of one direction; outputs after a sample's end are zero."""
    y, ends = run(kind, way, _turned(x, lens) if backward else x, states, lens)
    if lens is not None:
        t = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
        y = torch.where((t < lens).unsqueeze(-1), y, 0.0)
    return (_turned(y, lens) if backward else y), ends


def _layer(
    kind: RecurrentKind, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, lens: Tensor | None,
    given: Sequence[Tensor | None], peephole: Tensor | None, *, direction: str, layout: int,
    names: Sequence[str] | None, alphas: Sequence[float], betas: Sequence[float],
    hidden_size: int | None, outputs: int, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Y, and the last states, of a layer in all its directions."""
    if direction not in _BACKWARD or w.shape[0] != len(_BACKWARD[direction]):
        raise BadInput(f"expected weights of direction {direction!r}, got those of {w.shape[0]}")
    if hidden_size not in (None, r.shape[-1]):
        raise BadInput(f"expected hidden_size {r.shape[-1]} as in the weights, got {hidden_size}")
    backward, lens = _BACKWARD[direction], None if lens is None else lens.to(torch.int64)
    names = [n.lower() for n in names or kind.usual * len(backward)]
    usual = names == list(kind.usual * len(backward)) and peephole is None
    usual &= not any(value for key, value in options.items() if key != "linear_before_reset")
    usual &= options.get("linear_before_reset", True) != 0 and not (
        lens is not None and outputs > 2
    )
    calls = _activations(names, alphas, betas, len(kind.usual) * len(backward))
    if layout:
        x, given = x.transpose(0, 1), [s if s is None else s.transpose(0, 1) for s in given]
    size = (x.shape[1], r.shape[-1])
    ways = []
    for d, back in enumerate(backward):
        way = Way(w[d], r[d], None if b is None else tuple(b[d].chunk(2)),  # type: ignore[arg-type]
                  None if peephole is None else peephole[d].chunk(3),
                  calls[d * len(kind.usual) : (d + 1) * len(kind.usual)], **options)  # fmt: skip
        states = [x.new_zeros(size) if s is None else s[d] for s in given]
        ways.append(_one_way(_whole if usual else _stepped, kind, way, x, states, lens, back))
    found = [torch.stack([y for y, _ in ways], 1)]
    found += [torch.stack(ends) for ends in zip(*(ends for _, ends in ways), strict=True)]
    if layout:
        found = [found[0].permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in found[1:])]
    return tuple(found[:outputs])


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], count: int
) -> list[Activation]:
    """The functions named. Those that take an alpha or beta have the next one given."""
    if len(names) != count or not set(names) <= set(_ACTIVATIONS):
        raise BadInput(f"expected {count} activations out of {sorted(_ACTIVATIONS)}, got {names}")
    rest, found = [iter(alphas), iter(betas)], []
    for name in names:
        function, defaults = _ACTIVATIONS[name]
        values = [next(k, default) for k, default in zip(rest, defaults, strict=False)]
        if None in values:
            raise BadInput(f"expected activation_alpha and activation_beta for {name!r}, got none")
        found.append(partial(_applied, function, values) if values else function)
    return found


def _applied(function: Callable[..., Tensor], values: Sequence[Any], x: Tensor) -> Tensor:
    return function(x, *values)


@OPS("LSTM")
def lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, initial_c: Tensor | None = None, p: Tensor | None = None, *,
    activation_alpha: Sequence[float] = (), activation_beta: Sequence[float] = (),
    activations: Sequence[str] | None = None, clip: float | None = None,
    direction: str = "forward", hidden_size: int | None = None, input_forget: int = 0,
    layout: int = 0, outputs: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The hidden states of all steps, and the last hidden and cell states."""
    return _layer(
        _LSTM, x, w, r, b, sequence_lens, (initial_h, initial_c), p, direction=direction,
        layout=layout, names=activations, alphas=activation_alpha, betas=activation_beta,
        hidden_size=hidden_size, outputs=outputs, clip=clip, input_forget=bool(input_forget),
    )  # fmt: skip


@OPS("GRU")
def gru(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, *, activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (), activations: Sequence[str] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None,
    layout: int = 0, linear_before_reset: int = 0, outputs: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The hidden states of all steps, and the last ones."""
    return _layer(
        _GRU, x, w, r, b, sequence_lens, (initial_h,), None, direction=direction, layout=layout,
        names=activations, alphas=activation_alpha, betas=activation_beta,
        hidden_size=hidden_size, outputs=outputs, clip=clip,
        linear_before_reset=bool(linear_before_reset),
    )  # fmt: skip


@OPS("RNN")
def rnn(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None, *, activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (), activations: Sequence[str] | None = None,
    clip: float | None = None, direction: str = "forward", hidden_size: int | None = None,
    layout: int = 0, outputs: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The hidden states of all steps, and the last ones."""
    relu = {name.lower() for name in activations or ()} == {"relu"}
    return _layer(
        _RNN_RELU if relu else _RNN, x, w, r, b, sequence_lens, (initial_h,), None,
        direction=direction, layout=layout, names=activations, alphas=activation_alpha,
        betas=activation_beta, hidden_size=hidden_size, outputs=outputs, clip=clip,
    )  # fmt: skip
