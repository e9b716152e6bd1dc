"""Random networks of images, sequences and volumes for traversal.

Weights and inputs are small integers, in float64 unless told, so that every sum is exact and
any order of summation gives the same bits; `smooth` networks have real weights, norms and resizes.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from fuzz.image_steps import KINDS

SIZES = {1: [(20, 90)], 2: [(9, 40), (9, 33)], 3: [(6, 14), (5, 12), (4, 7)]}
POSITIONS = 6000  # at most, of one value
Step = tuple  # the name of a kind, which value it reads, its arguments


class Images(nn.Module):
    """A network of `depth` drawn calls. exact: every value is an integer (or half of one).
    rank: spatial axes. example: of one image."""

    def __init__(
        self, seed: int, depth: int = 7, *, exact: bool = True, rank: int = 2, dtype: torch.dtype = torch.float64
    ):
        super().__init__()
        self.dtype = dtype
        self.draw, self.exact, self.pair = random.Random(seed), exact, seed % 3 == 0
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList()
        size = [self.draw.randint(*ends) for ends in SIZES[rank]]
        self.example = self.numbers((1, self.draw.choice([1, 3, 4]), *size))
        self.steps: list[Step] = []
        self._build(depth)

    def numbers(self, shape) -> Tensor:
        if self.exact:
            return torch.randint(-2, 3, shape, generator=self.generator).to(self.dtype)
        return torch.randn(shape, generator=self.generator, dtype=self.dtype)

    def weight(self, shape) -> int:
        """The index of new weights."""
        self.weights.append(nn.Parameter(self.numbers(shape), requires_grad=False))
        return len(self.weights) - 1

    def _build(self, depth: int) -> None:
        values, rank = [self.example], self.example.ndim
        names = [
            name
            for name, kind in KINDS.items()
            for _ in range(kind.often)
            if kind.rank in (None, rank) and not (self.exact and kind.smooth)
        ]
        while len(self.steps) < depth:
            name = self.draw.choice(names)
            at = self.draw.randrange(max(0, len(values) - 3), len(values))
            drawn = KINDS[name].draw(self, values, at)
            if drawn is None:
                continue
            try:
                made = self._run((name, at, *drawn), values)
            except (RuntimeError, ValueError):
                continue  # a window larger than what is left
            if self._fits(made):
                self.steps.append((name, at, *drawn))
                values.append(made)

    def _fits(self, made: Tensor) -> bool:
        positions = made.shape[2:]
        small = positions.numel() <= POSITIONS and min(positions) >= 2 and made.shape[1] <= 24
        return small and bool(made.isfinite().all()) and bool(made.abs().max() <= 2**40)

    def _run(self, step: Step, values: list[Tensor]) -> Tensor:
        name, at, *rest = step
        return KINDS[name].run(self, values[at], values, *rest)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            values.append(self._run(step, values))
        if self.pair:
            return values[-1], values[-2]
        return values[-1]

    def batch(self, count: int) -> Tensor:
        """Several images."""
        return torch.cat([self.example, *(self.numbers(self.example.shape) for _ in range(count - 1))])
