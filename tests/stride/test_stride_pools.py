"""Average pools as convolutions and back: windows of all kinds, over sizes 1 to 20."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from demask.graph.program import Program
from demask.rewrites.driver import rewrite
from demask.stride import average_pools as pools
from demask.stride.average_pools import POOLS_AS_CONVOLUTIONS, SCALED_SUMS_AS_POOLS, SUMS_AS_POOLS, AveragePool
from stride_programs import Net, calls, ran

aten = torch.ops.aten
_POOL = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
LIMIT = 1e-12  # float64: sums of at most 7 ** 3 terms


def pools_to_convs(program: Program) -> Program:
    return rewrite(program, POOLS_AS_CONVOLUTIONS)


def convs_to_pools(program: Program) -> Program:
    return rewrite(rewrite(program, SCALED_SUMS_AS_POOLS), SUMS_AS_POOLS)


def drawn(seed: int) -> tuple[AveragePool, tuple[int, ...], int]:
    """A pool, the sizes of an image that it takes, and a number of channels."""
    rng = random.Random(seed)
    rank = rng.choice([1, 1, 2, 2, 2, 3])
    while True:
        kernel = tuple(rng.randint(1, 7 if rank < 3 else 4) for _ in range(rank))
        pool = AveragePool(
            kernel,
            tuple(rng.randint(1, 4) for _ in range(rank)),
            tuple(rng.randint(0, k // 2) for k in kernel),
            rng.random() < 0.5,
            rng.random() < 0.5,
            rng.randint(1, 60) if rank > 1 and rng.random() < 0.3 else None,
        )
        sizes = tuple(rng.randint(1, 20 if rank < 3 else 9) for _ in range(rank))
        if rng.random() < 0.1 and rank < 3:  # larger than any image
            pool = replace(pool, kernel=(40,) * rank, stride=(40,) * rank, ceil=True)
        small = rank == 3 and any(map(int.__lt__, sizes, kernel))  # avg_pool3d takes none
        if not small and min(pool.lengths(sizes)) > 0:
            return pool, sizes, rng.randint(1, 4)


def built(seed: int, dtype: torch.dtype = torch.float64):
    pool, sizes, channels = drawn(seed)
    net, generator = Net(), torch.Generator().manual_seed(seed)
    shape = (channels, *sizes) if seed % 5 == 0 else (2, channels, *sizes)
    override = [] if len(sizes) == 1 else [pool.divisor]
    lists = list(pool.kernel), list(pool.stride), list(pool.padding)
    x = net.input(shape, dtype)
    made = net.call(_POOL[len(sizes)], x, *lists, pool.ceil, pool.include, *override)
    return net.program(made), torch.randn(shape, generator=generator, dtype=dtype)


def same(a: torch.Tensor, b: torch.Tensor, limit: float = LIMIT) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= limit * max(1.0, float(a.abs().max()))


def check(seed: int) -> None:
    """There and back again: no pool is left, then a pool is all that is left."""
    program, x = built(seed)
    (expected,) = ran(program, x)
    there = pools_to_convs(program)
    assert not calls(there, *_POOL.values())
    assert len(calls(there, *_CONV.values())) == 1
    same(ran(there, x)[0], expected)
    back = convs_to_pools(there)
    pool, sizes, _ = drawn(seed)
    if pool.taps(sizes) == pool.kernel:  # of windows larger than the image the rest is forgotten
        assert [n.target for n in calls(back)] == [n.target for n in calls(program)]
    same(ran(back, x)[0], expected)
    same(ran(back, x)[0], expected, 0.0 if _is_spelled_alike(program, back) else LIMIT)


def _is_spelled_alike(a, b) -> bool:
    (one,), (*_, other) = calls(a), calls(b)
    return AveragePool.of(one) == AveragePool.of(other)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("first", range(0, 600, 100))
def test_pools_become_convolutions_and_come_back(first):
    for seed in range(first, first + 100):
        check(seed)


def test_lengths_and_counts_are_those_of_aten():
    """The formulas of lengths and divisors, against pools of ones with sums as they are."""
    for seed in range(600, 900):
        pool, sizes, _ = drawn(seed)
        if len(sizes) == 1:
            continue
        op = torch.nn.functional.avg_pool2d if len(sizes) == 2 else torch.nn.functional.avg_pool3d
        ones = torch.ones(1, 1, *sizes, dtype=torch.float64)
        args = pool.kernel, pool.stride, pool.padding, pool.ceil, pool.include
        sums, means = op(ones, *args, 1)[0, 0], op(ones, *args, pool.divisor)[0, 0]
        assert tuple(sums.shape) == pool.lengths(sizes)
        assert torch.equal((sums / means).round().long(), pool.counts(sizes))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["_length", "_counts", "pads"])
def test_a_planted_fault_is_found(monkeypatch, name):
    """Windows that begin beyond the image; padding counted; no zeros behind for ceil_mode."""
    if name == "_length":
        monkeypatch.setattr(
            pools, "_length", lambda n, k, s, p, ceil: (n + 2 * p - k + (s - 1 if ceil else 0)) // s + 1
        )
    elif name == "_counts":
        monkeypatch.setattr(pools, "_counts", lambda n, k, s, p, count, include: [k] * count)
    else:
        even = lambda self, sizes: tuple((p, p) for p in self.padding)  # noqa: E731
        monkeypatch.setattr(AveragePool, "pads", even)
    found = 0
    for seed in range(100):
        try:
            check(seed)
        except (AssertionError, RuntimeError):
            found += 1
    assert found > 5


def test_float32_is_within_rounding():
    for seed in range(50):
        program, x = built(seed, torch.float32)
        same(ran(pools_to_convs(program), x)[0], ran(program, x)[0], 1e-5)


def test_a_pool_keeps_what_it_is():
    pool = AveragePool((3,), (2,), (1,), ceil=True)
    assert not pool.is_even
    assert replace(pool, divisor=4).is_even
    assert pool.counts((4,)).tolist() == [3, 3, 2]
    assert replace(pool, include=False).counts((4,)).tolist() == [2, 3, 1]
    assert pool.pads((4,)) == ((1, 2),)
