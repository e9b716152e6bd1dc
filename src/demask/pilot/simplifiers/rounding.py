"""Weights rounded in place: to k bits per row or group, or to powers of two.

    Q(W)[r, c] == s_r * round(W[r, c] / s_r),   s_r = max|W[r, :]| / (2^(k-1) - 1)

The graph stays as it is; rounded weights are stored in their own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.result.demasked_module import Demasked
from demask.pilot.weight_layers import by_rows, check_finite, from_rows, layers_of
from demask.shrink.build_uncut import build_uncut

SCALE_BYTES = 4  # of one float32 scale
MOST_BITS = 16


@dataclass(frozen=True, slots=True)
class Bits:
    """A simplifier that rounds weights to few bits: each becomes an integer times a scale.

    A simplifier derives a cheaper network from a network. Pass a simplifier, or its text, as `by`
    of `simplify` and `compare`: "bits:8" is `Bits(8)`, "bits:4:64" is `Bits(4, 64)`. The method is
    symmetric round-to-nearest quantization of linear, convolution and recurrent weights. Each
    output row (a unit or a filter), or each group of columns of a row, has a scale: the largest
    magnitude divided by 2^(bits - 1) - 1. Rounded weights keep their dtype, so the network is not
    faster; `weight_bytes` returns the bytes of the packed form.

    Args:
        bits: bits per weight, an integer from 1 to 16. With 1 bit, a weight becomes its sign times
            the mean magnitude of its row or group.
        group: number of columns that share a scale, an integer of 1 or more; default None: the
            full row. The columns of a filter are its weights in the order of `weight.flatten(1)`;
            the last group of a row may have fewer.

    Raises:
        BadInput: `bits` or `group` is out of range or no integer; when the simplifier is applied: a
            weight contains Inf or NaN.

    Example:
        >>> import torch
        >>> from demask.pilot import Bits, simplify
        >>> layer = torch.nn.Linear(3, 1, bias=False)
        >>> layer.weight.data = torch.tensor([[1.0, 0.6, 0.1]])
        >>> simplify(layer, (torch.eye(3),), by=Bits(2))(torch.eye(3)).flatten().tolist()
        [1.0, 1.0, 0.0]
    """

    bits: int
    group: int | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= MOST_BITS:
            raise BadInput(f"expected 1 to {MOST_BITS} bits, got {self.bits!r}; such as 'bits:8'")
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise BadInput(f"expected groups of one column or more, got {self.group!r}")

    def text(self) -> str:
        """The simplifier's text, such as "bits:4:64"."""
        return f"bits:{self.bits}" + (f":{self.group}" if self.group else "")

    def applied(self, analysis: Analysis) -> Demasked:
        """The network with rounded weights, a `Demasked` module.

        Args:
            analysis: facts about the captured network, which is not changed.

        Raises:
            BadInput: a weight contains Inf or NaN.
        """
        change = partial(quantized, bits=self.bits, group=self.group)
        return _rounded(analysis, change, self.text())

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes of one weight in packed form: `bits` per element, a float32 scale per row or group.

        Args:
            weight: a tensor of any shape.
            rows: number of output units or filters of the weight.
        """
        columns = weight.numel() // max(rows, 1)
        groups = 1 if self.group is None else math.ceil(columns / self.group)
        return weight.numel() * self.bits / 8 + rows * groups * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Exponents:
    """A simplifier that rounds each weight to the nearest power of two, with its sign.

    A simplifier derives a cheaper network from a network. A weight halfway between two powers
    becomes the one of larger magnitude; 0 stays 0. Pass `Exponents()`, or its text "exponents", as
    `by` of `simplify` and `compare`. The weights of linear, convolution and recurrent layers are
    rounded and keep their dtype, so the network is not faster; `weight_bytes` returns the bytes
    that signs and exponents would take. There are no parameters.

    Raises:
        BadInput: when the simplifier is applied: a weight contains Inf or NaN.

    Example:
        >>> import torch
        >>> from demask.pilot import Exponents, simplify
        >>> layer = torch.nn.Linear(3, 1, bias=False)
        >>> layer.weight.data = torch.tensor([[0.3, -3.1, 1.5]])
        >>> simplify(layer, (torch.eye(3),), by=Exponents())(torch.eye(3)).flatten().tolist()
        [0.25, -4.0, 2.0]
    """

    def text(self) -> str:
        """The simplifier's text, "exponents"."""
        return "exponents"

    def applied(self, analysis: Analysis) -> Demasked:
        """The network with powers of two as weights, a `Demasked` module.

        Args:
            analysis: facts about the captured network, which is not changed.

        Raises:
            BadInput: a weight contains Inf or NaN.
        """
        return _rounded(analysis, powers, self.text())

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes of one weight in packed form: per element a sign bit and an exponent.

        The exponent has as many bits as the range of exponents in `weight` and a code for 0 need.

        Args:
            weight: a tensor of any shape.
            rows: not used.
        """
        exponents = torch.frexp(weight[weight != 0].float()).exponent
        span = int(exponents.max() - exponents.min()) + 1 if exponents.numel() else 1
        return weight.numel() * (1 + math.ceil(math.log2(span + 1))) / 8


def quantized(rows: Tensor, bits: int, group: int | None = None) -> Tensor:
    """A matrix (rows, columns) with values on `2^bits - 1` levels per row, or per group of columns.

    Computed in float32, or float64 for float64; rows of zeros stay zero.

    >>> quantized(torch.tensor([[1.0, 0.4, 0.1]]), 2).tolist()
    [[1.0, 0.0, 0.0]]
    """
    wide = rows if rows.dtype == torch.float64 else rows.float()
    columns = wide.shape[1]
    if bits == 1:
        parts, filled = _split_into_groups(wide, group), _split_into_groups(torch.ones_like(wide), group)
        rounded = parts.sign() * parts.abs().sum(-1, keepdim=True) / filled.sum(-1, keepdim=True)
    else:
        q, scale = levels(wide, bits, group)
        rounded = torch.where(scale == 0, _split_into_groups(wide, group), q * scale)
    return rounded.flatten(1)[:, :columns]


def levels(rows: Tensor, bits: int, group: int | None = None) -> tuple[Tensor, Tensor]:
    """(q [rows, groups, columns of a group], scale [rows, groups, 1]) of a matrix [rows, columns],
    floating point: integers in its dtype, so that q times scale are the rounded weights. q is
    0 where the scale is, and in the padding of the last group. bits: 2 or more.

    >>> q, scale = levels(torch.tensor([[0.5, -2.0, 1.0]]), 3)
    >>> q.tolist(), scale.flatten().tolist()
    ([[[1.0, -3.0, 2.0]]], [0.6666666865348816])
    """
    parts = _split_into_groups(rows, group)
    scale = parts.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (parts / torch.where(scale == 0, torch.inf, scale)).round(), scale


def _split_into_groups(rows: Tensor, group: int | None) -> Tensor:
    """[rows, columns] as [rows, groups, columns of a group], zeros after the last column."""
    count, columns = rows.shape
    width = max(columns if group is None else min(group, columns), 1)
    padded = torch.nn.functional.pad(rows, (0, -columns % width))
    return padded.reshape(count, -(-columns // width), width)


def powers(values: Tensor) -> Tensor:
    """The nearest ±2^e of every value, by difference; 0 for 0.

    >>> powers(torch.tensor([0.3, -3.1, 1.5, 0.0])).tolist()
    [0.25, -4.0, 2.0, 0.0]
    """
    wide = values if values.dtype == torch.float64 else values.float()
    mantissa, exponent = torch.frexp(wide)  # |mantissa| in [0.5, 1)
    up = (mantissa.abs() >= 0.75).to(exponent.dtype)
    return torch.ldexp(mantissa.sign() * 0.5, exponent + up)


def _rounded(analysis: Analysis, change: Callable[[Tensor], Tensor], text: str) -> Demasked:
    program, layers = analysis.program, layers_of(analysis)
    constants = dict(program.constants)
    for key, rows in {layer.weight: layer.rows for layer in layers}.items():
        weight = constants[key].tensor
        check_finite(weight, constants[key].name)
        rounded = from_rows(change(by_rows(weight, rows)), weight, rows)
        constants[key] = replace(constants[key], tensor=rounded)
    after = program.with_graph(program.graph, constants)
    changed = {layer.weight for layer in layers}
    return build_uncut(analysis, after, [f"{text}: {len(changed)} weights rounded"])
