"""ONNX ops of ai.onnx.preview.training: one step of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops

OPS = Ops("ai.onnx.preview.training")


def _grouped(tensors: tuple[Tensor, ...], parts: int) -> Iterator[tuple[Tensor, ...]]:
    """For each variable its value, gradient and so on; the inputs are all values, then all
    gradients, and so on."""
    count = len(tensors) // parts
    return zip(*(tensors[k * count : (k + 1) * count] for k in range(parts)), strict=True)


def _flat(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(tensor for column in zip(*results, strict=True) for tensor in column)


@OPS("Adagrad")
def adagrad(
    rate: Tensor,
    step: Tensor,
    *tensors: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Tensor, ...]:
    """New values, and the new sums of squared gradients."""
    rate = rate / (1 + step * decay_factor)
    results = []
    for x, gradient, squares in _grouped(tensors, 3):
        gradient = norm_coefficient * x + gradient
        new = squares + gradient * gradient
        results.append((x - rate * gradient / (new.sqrt() + epsilon), new))
    return _flat(results)


@OPS("Adam")
def adam(
    rate: Tensor,
    step: Tensor,
    *tensors: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Tensor, ...]:
    """New values, momenta, and averages of squared gradients."""
    safe = step.clamp(min=1)
    adjusted = rate * (1 - beta**safe).sqrt() / (1 - alpha**safe)
    rate = torch.where(step > 0, adjusted, rate)
    results = []
    for x, gradient, momentum, squares in _grouped(tensors, 4):
        gradient = norm_coefficient * x + gradient
        momentum = alpha * momentum + (1 - alpha) * gradient
        squares = beta * squares + (1 - beta) * (gradient * gradient)
        new = x - rate * (momentum / (squares.sqrt() + epsilon))
        results.append(((1 - norm_coefficient_post) * new, momentum, squares))
    return _flat(results)


@OPS("Momentum")
def momentum(
    rate: Tensor, step: Tensor, *tensors: Tensor, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Tensor, ...]:
    """New values and momenta."""
    if mode not in ("standard", "nesterov"):
        raise BadInput(f"expected mode standard or nesterov, got {mode!r}")
    factor = torch.where(step > 0, beta, 1.0)
    results = []
    for x, gradient, old in _grouped(tensors, 3):
        gradient = norm_coefficient * x + gradient
        new = alpha * old + factor.to(x.dtype) * gradient
        move = new if mode == "standard" else gradient + alpha * new
        results.append((x - rate * move, new))
    return _flat(results)
