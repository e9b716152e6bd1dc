"""Random networks of images for traversal: windows of every kind, skips, concatenations, resizes.

Weights and inputs are small whole numbers in float64, so that every sum is exact and any order of
summation gives the same bits; `smooth` networks have real weights, norms and resizes.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODES = ("zeros", "reflect", "replicate", "circular")


class Images(nn.Module):
    """A network of `depth` drawn calls. exact: every value is a whole number (or half of one)."""

    def __init__(self, seed: int, depth: int = 7, *, exact: bool = True):
        super().__init__()
        self.draw, self.exact, self.pair = random.Random(seed), exact, seed % 3 == 0
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList()
        size = (self.draw.randint(9, 40), self.draw.randint(9, 33))
        self.example = self._numbers((1, self.draw.choice([1, 3, 4]), *size))
        self.steps: list[tuple] = []
        self._build(depth)

    def _numbers(self, shape) -> Tensor:
        if self.exact:
            return torch.randint(-2, 3, shape, generator=self.generator).double()
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _build(self, depth: int) -> None:
        values = [self.example]
        while len(self.steps) < depth:
            step = self._step(values)
            try:
                made = self._run(step, values)
            except (RuntimeError, ValueError):
                continue  # a window larger than what is left
            large = made.shape[2] * made.shape[3] > 6000 or min(made.shape[2:]) < 2
            if large or made.shape[1] > 24 or made.abs().max() > 2**40:
                continue
            self.steps.append(step)
            values.append(made)

    def _step(self, values: list[Tensor]) -> tuple:
        at = self.draw.randrange(max(0, len(values) - 3), len(values))
        channels = values[at].shape[1]
        kinds = ["conv"] * 5 + ["pad", "max", "avg", "relu", "up", "cat", "add", "add", "shuffle",
                                "transposed", "slice", "affine", "flip"]  # fmt: skip
        kinds += [] if self.exact else ["bilinear", "group", "instance", "gate", "softmax", "mean",
                                        "layer"]  # fmt: skip
        return getattr(self, f"_{self.draw.choice(kinds)}")(values, at, channels)

    def _conv(self, values, at, c) -> tuple:
        groups = self.draw.choice([1, 1, c, *[g for g in (2, 4) if c % g == 0]])
        out = groups * self.draw.randint(1, max(1, 8 // groups))
        kernel = (self.draw.choice([1, 2, 3, 3, 5, 7]), self.draw.choice([1, 3, 3, 4]))
        stride = (self.draw.choice([1, 1, 1, 2, 3, 4]), self.draw.choice([1, 1, 2]))
        dilation = (self.draw.choice([1, 1, 2, 3]), self.draw.choice([1, 1, 2]))
        padding = tuple(
            self.draw.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)
        )
        weight = self._weight((out, c // groups, *kernel))
        bias = self._weight((out,)) if self.draw.random() < 0.5 else None
        return "conv", at, weight, bias, stride, padding, dilation, groups

    def _weight(self, shape) -> int:
        self.weights.append(nn.Parameter(self._numbers(shape), requires_grad=False))
        return len(self.weights) - 1

    def _transposed(self, values, at, c) -> tuple:
        kernel, stride = (
            (self.draw.randint(1, 5), 3),
            (self.draw.randint(1, 3), self.draw.choice([1, 2])),
        )
        padding = tuple(self.draw.randint(0, k // 2) for k in kernel)
        extra = tuple(self.draw.randint(0, s - 1) for s in stride)
        return "transposed", at, self._weight((c, 4, *kernel)), stride, padding, extra

    def _pad(self, values, at, c) -> tuple:
        sides = tuple(self.draw.randint(0, 3) for _ in range(4))
        return "pad", at, sides, self.draw.choice(["constant", "reflect", "replicate", "circular"])

    def _max(self, values, at, c) -> tuple:
        kernel = self.draw.choice([2, 3])
        return "max", at, kernel, self.draw.choice([1, 2, 3]), self.draw.randint(0, kernel // 2), \
            self.draw.random() < 0.5  # fmt: skip

    def _avg(self, values, at, c) -> tuple:
        stride, padding = self.draw.choice([1, 2]), self.draw.choice([0, 1])
        if self.exact:  # windows of two or four, which divide exactly
            return "avg", at, 2, stride, 0, False, True
        return "avg", at, 3, stride, padding, self.draw.random() < 0.5, self.draw.random() < 0.5

    def _relu(self, values, at, c) -> tuple:
        return "relu", at

    def _up(self, values, at, c) -> tuple:
        return "up", at, self.draw.choice([2, 2, 3, 1.5, 0.7])

    def _cat(self, values, at, c) -> tuple:
        alike = [k for k, v in enumerate(values) if v.shape[2:] == values[at].shape[2:]]
        return "cat", at, self.draw.choice(alike)

    def _add(self, values, at, c) -> tuple:
        alike = [k for k, v in enumerate(values) if v.shape == values[at].shape]
        return "add", at, self.draw.choice(alike)

    def _shuffle(self, values, at, c) -> tuple:
        return ("shuffle", at) if c % 4 == 0 else ("unshuffle", at)

    def _slice(self, values, at, c) -> tuple:
        return "slice", at, self.draw.randint(0, 3), self.draw.choice([1, 1, 2])

    def _affine(self, values, at, c) -> tuple:
        return "affine", at, self._weight((c, 1, 1)), self._weight((1, c, 1, 1))

    def _flip(self, values, at, c) -> tuple:
        return ("flip", at) if self.draw.random() < 0.3 else ("relu", at)

    def _bilinear(self, values, at, c) -> tuple:
        mode = self.draw.choice(["bilinear", "bilinear", "bicubic"])
        return "bilinear", at, self.draw.choice([2, 1.7, 0.6, 3]), mode, self.draw.random() < 0.5

    def _group(self, values, at, c) -> tuple:
        return "group", at, self.draw.choice([g for g in (1, 2, 3, 4) if c % g == 0]), \
            self._weight((c,)), self._weight((c,))  # fmt: skip

    def _instance(self, values, at, c) -> tuple:
        return "instance", at

    def _layer(self, values, at, c) -> tuple:
        return "layer", at

    def _gate(self, values, at, c) -> tuple:
        return "gate", at, self._weight((c, c, 1, 1))

    def _softmax(self, values, at, c) -> tuple:
        return "softmax", at

    def _mean(self, values, at, c) -> tuple:
        return "mean", at

    def _run(self, step: tuple, values: list[Tensor]) -> Tensor:
        kind, at, *rest = step
        x = values[at]
        match kind:
            case "conv":
                weight, bias, *geometry = rest
                return F.conv2d(
                    x, self.weights[weight], None if bias is None else self.weights[bias], *geometry
                )
            case "transposed":
                weight, *geometry = rest
                return F.conv_transpose2d(x, self.weights[weight], None, *geometry)
            case "pad":
                return F.pad(x, rest[0], mode=rest[1])
            case "max":
                return F.max_pool2d(x, rest[0], rest[1], rest[2], ceil_mode=rest[3])
            case "avg":
                return F.avg_pool2d(x, *rest)
            case "relu":
                return F.relu(x)
            case "up":
                return F.interpolate(x, scale_factor=rest[0])
            case "bilinear":
                return F.interpolate(x, scale_factor=rest[0], mode=rest[1], align_corners=rest[2])
            case "cat":
                return torch.cat([x, values[rest[0]]], 1)
            case "add":
                return x + values[rest[0]]
            case "shuffle":
                return F.pixel_shuffle(x, 2)
            case "unshuffle":
                return F.pixel_unshuffle(x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2], 2)
            case "slice":
                return x[:, :, rest[0] :: rest[1], : x.shape[3] - rest[0]]
            case "affine":
                return x * self.weights[rest[0]] + self.weights[rest[1]]
            case "flip":
                return x.flip(2)
            case "group":
                return F.group_norm(x, rest[0], self.weights[rest[1]], self.weights[rest[2]])
            case "instance":
                return F.instance_norm(x)
            case "layer":
                return F.layer_norm(x, x.shape[1:])
            case "gate":
                return x * torch.sigmoid(
                    F.conv2d(x.mean((2, 3), keepdim=True), self.weights[rest[0]])
                )
            case "softmax":
                return torch.softmax(x.flatten(2), -1).view(x.shape)
            case "mean":
                return x - x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True)
        raise ValueError(kind)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            values.append(self._run(step, values))
        if self.pair:
            return values[-1], values[-2]
        return values[-1]
