"""The minimality oracle: the slices of a module's weights that no output depends on.

    re-randomizing any remaining slice of any weight, alone, changes some output

It complements the laws, which an engine that removes nothing satisfies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

Draw = Callable[[int], tuple[Any, ...]]


def missed(slim: nn.Module, args: tuple[Any, ...] | Draw, seeds: int = 3) -> list[str]:
    """Slices of weights that no output depends on, as "name, axis 0: position 3".

    Weights are parameters and floating-point buffers. Each slice of each axis is re-randomized
    alone, unless its gradient is not zero for one of `seeds` random inputs. args: inputs, which are
    shuffled, or a function that returns random inputs by an index. For float64 modules: differences
    below 1e-12 of the largest output count as rounding.

    >>> net = torch.nn.Linear(2, 3).double()
    >>> missed(torch.nn.Sequential(net, torch.nn.Softmax(-1)), (torch.randn(4, 2).double(),))
    []
    """
    oracle = _Oracle(slim, args if callable(args) else partial(_shuffled, args), seeds)
    slices = []
    for name, value in oracle.weights.items():
        for axis, size in enumerate(value.shape):
            has_gradient = oracle.moves[name]
            other_axes = [k for k in range(value.ndim) if k != axis]
            is_used = has_gradient.any(other_axes) if other_axes else has_gradient
            slices += [
                f"{name}, axis {axis}: position {k}"
                for k in range(size)
                if not bool(is_used[k]) and not oracle.moved(name, axis, k)
            ]
    return slices


class _Oracle:
    """A module, its outputs for random inputs, and the weights that have nonzero gradients."""

    def __init__(self, slim: nn.Module, draw: Draw, seeds: int):
        self.slim, self.draw, self.seeds = slim, draw, seeds
        named = [*slim.named_parameters(), *slim.named_buffers()]
        self.weights = {n: v.detach() for n, v in named if v.is_floating_point() and v.numel()}
        self.draws: list[tuple[tuple[Any, ...], list[Tensor]]] = []
        self.moves = {n: torch.zeros_like(v, dtype=torch.bool) for n, v in self.weights.items()}
        for seed in range(seeds):
            self._differentiate(self._draw(seed)[0])

    def _differentiate(self, draw: tuple[Any, ...]) -> None:
        """Mark the weights with a nonzero gradient of a random sum of the outputs."""
        weights = {name: v.clone().requires_grad_() for name, v in self.weights.items()}
        try:
            outputs = [v for v in _tensors(functional_call(self.slim, weights, draw)) if v.requires_grad]
        except RuntimeError:
            return  # Some op has no gradient for a weight: every slice is re-randomized.
        if not outputs:
            return
        generator = torch.Generator().manual_seed(0)
        total = sum((v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum() for v in outputs)
        gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)  # type: ignore[arg-type]
        scale = max(float(v.detach().abs().max()) if v.numel() else 0.0 for v in outputs)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                self.moves[name] |= gradient.abs() > 1e-9 * scale

    def moved(self, name: str, axis: int, position: int) -> bool:
        """Whether an output changes if one slice of a weight is re-randomized or set to zero."""
        value = self.weights[name]
        generator = torch.Generator().manual_seed(position)
        scale = float(value.abs().max()) + 1.0
        for attempt in range(4 * self.seeds):
            draw, before = self._draw(attempt)
            changed = value.clone()
            weight_slice = changed.select(axis, position)
            random_slice = scale * torch.randn(weight_slice.shape, generator=generator, dtype=value.dtype)
            weight_slice.copy_(random_slice if attempt % 3 < 2 else torch.zeros_like(random_slice))
            with torch.no_grad():
                after = _tensors(functional_call(self.slim, {name: changed}, draw))
            if any(_differs(a, b) for a, b in zip(before, after, strict=True)):
                return True
        return False

    def _draw(self, number: int) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The random inputs with an index, and the module's outputs for them."""
        while len(self.draws) <= number:
            draw = self.draw(len(self.draws))
            with torch.no_grad():
                self.draws.append((draw, _tensors(self.slim(*draw))))
        return self.draws[number]


def _differs(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs differ by more than rounding."""
    if not a.is_floating_point():
        return not torch.equal(a, b)
    is_equal = (a == b) | (a.isnan() & b.isnan())
    if bool(is_equal.all()):
        return False
    gap, scale = (a - b).abs()[~is_equal].max(), a.abs().nan_to_num(0, 0, 0).max()
    return bool(gap.isnan()) or bool(gap > 1e-12 * scale)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shuffled(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Inputs with permuted values; floats are scaled by 0.9 to 1.1, except for seed 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator)
        permuted = leaf.detach().reshape(-1)[order].reshape(leaf.shape)
        if not permuted.is_floating_point() or seed == 0:
            return permuted
        return permuted * (0.9 + 0.2 * torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype))

    return pytree.tree_map(draw, args)


__all__ = ["missed"]
