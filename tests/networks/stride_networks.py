"""Random networks after strided convolutions, of every call that has a rule on grids."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from demask.graph.program import Program
from stride_programs import Net

aten = torch.ops.aten
_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
_MAX = {1: aten.max_pool1d.default, 2: aten.max_pool2d.default, 3: aten.max_pool3d.default}
_MEAN = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
_ONE = {1: aten.adaptive_avg_pool1d.default, 2: aten.adaptive_avg_pool2d.default, 3: aten.adaptive_avg_pool3d.default}


class Drawn:
    """A random network after a strided convolution. whole: computes in integers alone, so
    that sums are exact in any order."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.net = Net()
        self.whole = self.rng.random() < 0.4
        self.dtype = torch.int64 if self.whole and self.rng.random() < 0.5 else torch.float64
        self.rank = self.rng.choice([1, 2, 2, 2, 3])
        high = {1: 20, 2: 14, 3: 7}[self.rank]
        sizes = tuple(self.rng.randint(3, high) for _ in range(self.rank))
        self.shape = (2, self.rng.choice([2, 4]), *sizes)
        self.x = self.net.input(self.shape, self.dtype)
        self.forked = self.rng.random() < 0.4
        if self.forked:  # strides in parallel branches, none before the other
            plain = self.point(self.x) if self.rng.random() < 0.5 else self.x
            self.first = self.rng.choice([self.branches, self.deep])(plain)
        else:
            self.first = self.conv(self.x, strided=True)

    # What is drawn.

    def numbers(self, *shape: int) -> Tensor:
        if self.whole:
            return torch.randint(-2, 3, shape, generator=self.generator).to(self.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def constant(self, *shape: int) -> fx.Node:
        return self.net.constant(self.numbers(*shape))

    def each(self, low: int, high: int) -> list[int]:
        return [self.rng.randint(low, high) for _ in range(self.rank)]

    def windows(self, x: fx.Node, kernel: int, dilation: int) -> tuple[list[int], ...] | None:
        """kernel, stride, padding, dilation; None where no window fits."""
        k, s, d = self.each(1, kernel), self.each(1, 3), self.each(1, dilation)
        p = [self.rng.randint(0, n // 2) for n in k]
        spans = [a * (b - 1) + 1 for a, b in zip(d, k, strict=True)]
        sizes = x.meta["val"].shape[2:]
        fit = all(n + 2 * q >= span for n, q, span in zip(sizes, p, spans, strict=True))
        return (k, s, p, d) if fit else None

    # Calls: a value computed from another, or None where it takes no such value.

    def conv(self, x: fx.Node, *, strided: bool = False) -> Any:
        window = self.windows(x, 3, 2)
        if window is None and not strided:
            return None
        k, s, p, d = window or ([1] * self.rank, [2] * self.rank, [0] * self.rank, [1] * self.rank)
        if strided:
            s = [self.rng.randint(2, 3), *s[1:]]
        inner, groups = x.meta["val"].shape[1], self.rng.choice([1, 1, 2])
        groups = inner if self.rng.random() < 0.2 else groups if inner % groups == 0 else 1
        outer = inner if groups == inner else 4
        weight = self.constant(outer, inner // groups, *k)
        bias = self.constant(outer) if self.rng.random() < 0.5 else None
        return self.net.call(_CONV[self.rank], x, weight, bias, s, p, d, groups)

    def max_pool(self, x: fx.Node) -> Any:
        window = self.windows(x, 3, 2)
        lacking = self.rank == 1 and self.dtype is torch.int64  # torch has no such pool
        if window is None or lacking:
            return None
        return self.net.call(_MAX[self.rank], x, *window, self.rng.random() < 0.5)

    def avg_pool(self, x: fx.Node) -> Any:
        window = self.windows(x, 3, 1)
        if window is None or self.whole:
            return None
        if any(k > n for k, n in zip(window[0], x.meta["val"].shape[2:], strict=True)):
            return None  # avg_pool3d takes no smaller image
        if self.rng.random() < 0.2 and self.rank < 3:  # a window larger than any image
            window = [40] * self.rank, [40] * self.rank, [0] * self.rank, []
            return self.net.call(_MEAN[self.rank], x, *window[:3], True)
        flags = self.rng.random() < 0.5, self.rng.random() < 0.5
        override = [] if self.rank == 1 else [self.rng.choice([None, None, 5])]
        return self.net.call(_MEAN[self.rank], x, *window[:3], *flags, *override)

    def pad(self, x: fx.Node) -> Any:
        flat = [self.rng.randint(0, 2) for _ in range(2 * self.rng.randint(1, self.rank))]
        return self.net.call(aten.constant_pad_nd.default, x, flat, self.rng.choice([0, 2]))

    def point(self, x: fx.Node) -> Any:
        ops = [aten.relu.default, aten.neg.default, aten.abs.default]
        more = [aten.sigmoid.default, aten.hardswish.default, aten.exp.default]
        y = self.net.call(self.rng.choice(ops if self.whole else ops + more), x)
        return self.net.call(aten.clamp.default, y, -9, 9)

    def norm(self, x: fx.Node) -> Any:
        if self.whole:
            return None
        count = x.meta["val"].shape[1]
        three = [self.constant(count) for _ in range(3)]
        var = self.net.constant(self.numbers(count).abs() + 0.5)
        return self.net.call(aten.batch_norm.default, x, *three, var, False, 0.1, 1e-5, False)

    def layer_norm(self, x: fx.Node) -> Any:
        """Over channels, which a permutation brings to the end."""
        if self.whole:
            return None
        count, axes = x.meta["val"].shape[1], list(range(2, self.rank + 2))
        last = self.net.call(aten.permute.default, x, [0, *axes, 1])
        y = self.net.call(aten.layer_norm.default, last, [count], self.constant(count), None)
        return self.net.call(aten.permute.default, y, [0, self.rank + 1, *range(1, self.rank + 1)])

    def residual(self, x: fx.Node) -> Any:
        return self.net.call(aten.add.Tensor, x, self.point(x))

    def branches(self, x: fx.Node, step: int = 2) -> Any:
        """A strided block and its strided shortcut."""
        channels = x.meta["val"].shape[1]
        even, one = [step] * self.rank, [1] * self.rank
        k = self.rng.choice([1, 3])
        weight = self.constant(channels, channels, *[k] * self.rank)
        pads = [k // 2] * self.rank
        long = self.net.call(_CONV[self.rank], x, weight, None, even, pads, one, 1)
        long = self.point(long)
        small = min(x.meta["val"].shape[2:]) < step  # avg_pool3d takes no such image
        if self.rng.random() < 0.5 or self.whole or small:
            short = self.net.call(
                _CONV[self.rank], x, self.constant(channels, 1, *one), None, even, [0] * self.rank, one, channels
            )
        else:
            short = self.net.call(_MEAN[self.rank], x, even, even, [0] * self.rank, True)
        if self.rng.random() < 0.3:
            return self.net.call(aten.cat.default, [long, short], 1)
        return self.net.call(aten.add.Tensor, short, long)

    def deep(self, x: fx.Node) -> Any:
        """Two strides in parallel with one of their product."""
        channels, one = x.meta["val"].shape[1], [1] * self.rank
        long = x
        for k in (3, 1):
            weight = self.constant(channels, channels, *[k] * self.rank)
            pads, two = [k // 2] * self.rank, [2] * self.rank
            long = self.net.call(_CONV[self.rank], long, weight, None, two, pads, one, 1)
        short = self.net.call(
            _CONV[self.rank], x, self.constant(channels, 1, *one), None, [4] * self.rank, [0] * self.rank, one, channels
        )
        return self.net.call(aten.add.Tensor, *self.rng.sample([long, short], 2))

    def gate(self, x: fx.Node) -> Any:
        """A factor per channel, computed from the mean of each (squeeze and excitation)."""
        if self.whole:
            return None
        axes = list(range(2, self.rank + 2))
        if self.rng.random() < 0.5:
            mean = self.net.call(aten.mean.dim, x, axes, True)
        else:
            mean = self.net.call(_ONE[self.rank], x, [1] * self.rank)
        gate = self.net.call(aten.sigmoid.default, self._mixed(mean))
        return self.net.call(aten.mul.Tensor, x, gate)

    def _mixed(self, x: fx.Node) -> fx.Node:
        channels, ones = x.meta["val"].shape[1], [1] * self.rank
        weight = self.constant(channels, channels, *ones)
        return self.net.call(_CONV[self.rank], x, weight, None, ones, [0] * self.rank, ones, 1)

    def shifted(self, x: fx.Node) -> Any:
        """A constant for each position, or each channel."""
        shape = x.meta["val"].shape[1:]
        shape = shape if self.rng.random() < 0.5 else (shape[0], *[1] * self.rank)
        op = self.rng.choice([aten.add.Tensor, aten.mul.Tensor, aten.maximum.default])
        return self.net.call(op, x, self.constant(*shape))

    def split(self, x: fx.Node) -> Any:
        """Half of the channels takes another way."""
        half = x.meta["val"].shape[1] // 2
        if half * 2 != x.meta["val"].shape[1]:
            return None
        parts = self.net.call(aten.split.Tensor, x, half, 1)
        a, b = (self.net.call(operator.getitem, parts, k) for k in range(2))
        return self.net.call(aten.cat.default, [self.point(b), a], 1)

    def barrier(self, x: fx.Node) -> Any:
        """Calls that have no rule on grids."""
        if self.rng.random() < 0.8 or self.whole:
            return None
        if self.rng.random() < 0.5:
            return self.net.call(aten.flip.default, x, [2])
        return self.net.call(aten.softmax.int, x, 2)

    # Ends.

    def end(self, x: fx.Node) -> fx.Node:
        kinds = [self.flat, self.tokens, self.extremes, self.sums, self.map]
        return self.rng.choice(kinds if self.whole else [*kinds, self.mean, self.mean])(x)

    def map(self, x: fx.Node) -> fx.Node:
        return x

    def linear(self, x: fx.Node) -> fx.Node:
        last = x.meta["val"].shape[-1]
        bias = self.constant(3) if self.rng.random() < 0.5 else None
        return self.net.call(aten.linear.default, x, self.constant(3, last), bias)

    def flat(self, x: fx.Node) -> fx.Node:
        y = self.net.call(aten.flatten.using_ints, x, 1)
        return self.linear(self.point(y) if self.rng.random() < 0.5 else y)

    def tokens(self, x: fx.Node) -> fx.Node:
        shape = x.meta["val"].shape
        y = self.net.call(aten.view.default, x, [shape[0], shape[1], -1])
        y = self.linear(self.net.call(aten.transpose.int, y, 1, 2))
        kind = aten.sum.dim_IntList if self.whole else aten.mean.dim
        return self.net.call(kind, y, [1])

    def mean(self, x: fx.Node) -> fx.Node:
        if self.rng.random() < 0.5:
            axes = list(range(-self.rank, 0))
            return self.linear(self.net.call(aten.mean.dim, x, axes))
        y = self.net.call(_ONE[self.rank], x, [1] * self.rank)
        return self.flat(y)

    def extremes(self, x: fx.Node) -> fx.Node:
        op = self.rng.choice([aten.amax.default, aten.amin.default])
        return self.net.call(op, x, self.rng.choice([[2], list(range(2, self.rank + 2))]))

    def sums(self, x: fx.Node) -> fx.Node:
        return self.net.call(aten.sum.dim_IntList, x, list(range(2, self.rank + 2)))

    def program(self, length: int) -> Program:
        kinds: list[Callable[[fx.Node], Any]] = [
            self.conv, self.conv, self.max_pool, self.avg_pool, self.pad, self.point, self.norm,
            self.layer_norm, self.residual, self.branches, self.deep, self.gate, self.shifted,
            self.split, self.barrier,
        ]  # fmt: skip
        x = self.first
        for _ in range(length):
            y = self.rng.choice(kinds)(x)
            x = x if y is None else y
        return self.net.program(self.end(x))

    def image(self, *, poison: bool) -> Tensor:
        """An input; NaN (of integers a large one) where the strided convolution never reads it."""
        x = self.numbers(*self.shape)
        if not poison or self.forked:
            return x
        args: Any = self.first.args
        strides, pads, gaps = args[3], args[4], args[5]
        weight = self.net.constants[str(args[1].target)].tensor
        for k, (s, p, d) in enumerate(zip(strides, pads, gaps, strict=True)):
            count = self.first.meta["val"].shape[2 + k]
            read = {s * o - p + d * t for o in range(count) for t in range(weight.shape[2 + k])}
            unread = [j for j in range(self.shape[2 + k]) if j not in read]
            wrong = float("nan") if x.is_floating_point() else 12345
            x.index_fill_(2 + k, torch.tensor(unread, dtype=torch.int64), wrong)
        return x
