"""The minimality oracle: which slices of a module's weights no output depends on.

    re-randomizing any kept slice of any weight, alone, moves some output

It stands beside the laws: an engine that keeps everything passes those.
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
    alone. A gradient that is not zero on one of `seeds` draws of inputs shows that a slice moves an
    output, so only slices without one are tried, on four times as many. args: inputs, which are
    shuffled, or a function that draws those with a number. Meant for float64 modules: below 1e-12
    of the largest output a difference counts as rounding.

    >>> net = torch.nn.Linear(2, 3).double()
    >>> missed(torch.nn.Sequential(net, torch.nn.Softmax(-1)), (torch.randn(4, 2).double(),))
    []
    """
    oracle = _Oracle(slim, args if callable(args) else partial(_shuffled, args), seeds)
    found = []
    for name, value in oracle.weights.items():
        for axis, size in enumerate(value.shape):
            alive = oracle.moves[name]
            rest = [k for k in range(value.ndim) if k != axis]
            certain = alive.any(rest) if rest else alive
            found += [
                f"{name}, axis {axis}: position {k}"
                for k in range(size)
                if not bool(certain[k]) and not oracle.moved(name, axis, k)
            ]
    return found


class _Oracle:
    """A module, drawn inputs, what its outputs are on them, and which weights surely move them."""

    def __init__(self, slim: nn.Module, draw: Draw, seeds: int):
        self.slim, self.draw, self.seeds = slim, draw, seeds
        named = [*slim.named_parameters(), *slim.named_buffers()]
        self.weights = {n: v.detach() for n, v in named if v.is_floating_point() and v.numel()}
        self.draws: list[tuple[tuple[Any, ...], list[Tensor]]] = []
        self.moves = {n: torch.zeros_like(v, dtype=torch.bool) for n, v in self.weights.items()}
        for seed in range(seeds):
            self._differentiate(self._draw(seed)[0])

    def _differentiate(self, draw: tuple[Any, ...]) -> None:
        leaves = {name: v.clone().requires_grad_() for name, v in self.weights.items()}
        try:
            made = [
                v for v in _tensors(functional_call(self.slim, leaves, draw)) if v.requires_grad
            ]
        except RuntimeError:
            return  # Some op has no gradient for a weight: every slice is tried.
        if not made:
            return
        generator = torch.Generator().manual_seed(0)
        total = sum(
            (v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum() for v in made
        )
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
        scale = max(float(v.detach().abs().max()) if v.numel() else 0.0 for v in made)
        for name, slope in zip(leaves, slopes, strict=True):
            if slope is not None:
                self.moves[name] |= slope.abs() > 1e-9 * scale

    def moved(self, name: str, axis: int, position: int) -> bool:
        """Does any output change when one slice of a weight is drawn again, or set to zero?"""
        value = self.weights[name]
        generator = torch.Generator().manual_seed(position)
        scale = float(value.abs().max()) + 1.0
        for attempt in range(4 * self.seeds):
            draw, before = self._draw(attempt)
            changed = value.clone()
            part = changed.select(axis, position)
            fresh = scale * torch.randn(part.shape, generator=generator, dtype=value.dtype)
            part.copy_(fresh if attempt % 3 < 2 else torch.zeros_like(fresh))
            with torch.no_grad():
                after = _tensors(functional_call(self.slim, {name: changed}, draw))
            if any(_differs(a, b) for a, b in zip(before, after, strict=True)):
                return True
        return False

    def _draw(self, number: int) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The inputs with a number, and what the module makes of them."""
        while len(self.draws) <= number:
            draw = self.draw(len(self.draws))
            with torch.no_grad():
                self.draws.append((draw, _tensors(self.slim(*draw))))
        return self.draws[number]


def _differs(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return not torch.equal(a, b)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return False
    gap, scale = (a - b).abs()[~same].max(), a.abs().nan_to_num(0, 0, 0).max()
    return bool(gap.isnan()) or bool(gap > 1e-12 * scale)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shuffled(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Inputs like the given ones: their values at other places, floats moved by up to a tenth."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator)
        mixed = leaf.detach().reshape(-1)[order].reshape(leaf.shape)
        if not mixed.is_floating_point() or seed == 0:
            return mixed
        return mixed * (0.9 + 0.2 * torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype))

    return pytree.tree_map(draw, args)


__all__ = ["missed"]
