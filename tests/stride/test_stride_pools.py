"""Average pools as convolutions and back: windows of all kinds, over sizes 1 to 20."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from demask.graph.capture.capture import capture
from demask.stride import average_pools as pools
from demask.stride.average_pools import AveragePool, convs_to_pools, pools_to_convs
from stride_programs import Net, calls, ran

aten = torch.ops.aten
_POOL = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
_CONV = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}
LIMIT = 1e-12  # float64: sums of at most 7 ** 3 terms


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


# --- convolutions that are pools ------------------------------------------------------------------


def convolved(seed: int, *, dense: bool = False, bias: bool = False):
    """A convolution whose weights are one number per channel."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool, sizes, channels = drawn(seed)
    rank = len(sizes)
    fit = zip(pool.kernel, sizes, pool.padding, strict=True)
    kernel = [min(k, n + 2 * p) for k, n, p in fit]
    values = torch.randn(channels, generator=generator, dtype=torch.float64)
    if rng.random() < 0.5:
        values = values[:1].expand(channels).abs()
    if rng.random() < 0.5:
        values = torch.full((channels,), 1 / rng.randint(1, 30), dtype=torch.float64)
    taps = values.reshape(-1, *[1] * (rank + 1)).expand(-1, 1, *kernel).contiguous()
    if dense:
        taps = taps * torch.eye(channels).reshape(channels, channels, *[1] * rank)
    net = Net()
    x = net.input((2, channels, *sizes))
    weight = net.constant(taps)
    offset = net.constant(torch.ones(channels, dtype=torch.float64)) if bias else None
    made = net.call(
        _CONV[rank], x, weight, offset, list(pool.stride), list(pool.padding), [1] * rank, 1 if dense else channels
    )
    given = torch.randn((2, channels, *sizes), generator=generator, dtype=torch.float64)
    return net.program(made), given


@pytest.mark.parametrize("dense", [False, True])
def test_convolutions_of_one_number_per_channel_become_pools(dense):
    whole = 0
    for seed in range(200):
        program, x = convolved(seed, dense=dense)
        made = convs_to_pools(program)
        assert not calls(made, *_CONV.values())
        assert len(calls(made, *_POOL.values())) == 1
        whole += len(calls(made)) == 1
        same(ran(made, x)[0], ran(program, x)[0])
    assert 40 < whole < 160  # some need a factor, some do not


def _one(weight: torch.Tensor, groups: int, *, bias: bool = False, dilation: int = 1, pad: int = 1):
    net = Net()
    channels = weight.shape[1] * groups
    offset = net.constant(torch.zeros(len(weight))) if bias else None
    x = net.input((1, channels, 8, 8), torch.float32)
    return net.program(
        net.call(aten.conv2d.default, x, net.constant(weight), offset, [2, 2], [pad, pad], [dilation, dilation], groups)
    )


def _changed(weight: torch.Tensor, at: tuple[int, ...], value: float) -> torch.Tensor:
    made = weight.clone()
    made[at] = value
    return made


_OWN = torch.full((4, 1, 3, 3), 0.5)
_DENSE = _OWN * torch.eye(4).reshape(4, 4, 1, 1)


@pytest.mark.parametrize(
    "program",
    [
        _one(_changed(_OWN, (0, 0, 1, 2), 0.5000001), 4),
        _one(_changed(_OWN, (0, 0, 1, 2), 0.0), 4),
        _one(_changed(_DENSE, (0, 1, 1, 1), 1e-30), 1),
        _one(_OWN * 0, 4),
        _one(_OWN * float("nan"), 4),
        _one(torch.full((8, 1, 3, 3), 0.5), 4),  # two channels made of each
        _one(_OWN, 4, bias=True),
        _one(_OWN, 4, dilation=2),
        _one(_OWN, 4, pad=2),  # more than half a window
        _one(_DENSE.flip(0), 1),  # channels change places
    ],
)
def test_others_stay_convolutions(program):
    assert len(calls(convs_to_pools(program), aten.conv2d.default)) == 1


def test_an_image_smaller_than_its_window_is_no_pool_in_3d():
    for size, stays in ((2, True), (3, False)):
        net = Net()
        x = net.input((1, 2, size, 4, 4))
        taps = net.constant(torch.ones(2, 1, 3, 1, 1, dtype=torch.float64))
        one = [1] * 3
        program = net.program(net.call(_CONV[3], x, taps, None, one, [1, 0, 0], one, 2))
        assert bool(calls(convs_to_pools(program), _CONV[3])) is stays


def test_the_cases_beside_them_become_pools():
    for weight, groups in ((_OWN, 4), (_DENSE, 1), (torch.full((4, 2, 1, 1), 0.0), 2)):
        if not weight.any():  # two groups of an identity each
            weight = torch.eye(2).repeat(2, 1).reshape(4, 2, 1, 1)
        program = _one(weight, groups, pad=0)
        assert not calls(convs_to_pools(program), aten.conv2d.default)


def test_a_map_that_others_read_past_stays():
    program, _ = built(next(s for s in range(100) if _has_map(s)))
    there = pools_to_convs(program)
    (conv,) = calls(there, *_CONV.values())
    (output,) = there.graph.find_nodes(op="output")
    output.args = ((*output.args[0], conv),)
    assert len(calls(convs_to_pools(there), aten.mul.Tensor)) == 1


def _has_map(seed: int) -> bool:
    return bool(calls(pools_to_convs(built(seed)[0]), aten.mul.Tensor))


def test_adaptive_pools_whose_windows_have_one_size():
    net = (
        nn.Sequential(nn.AdaptiveAvgPool2d((4, 6)), nn.AdaptiveAvgPool2d(2), nn.Flatten(2), nn.AdaptiveAvgPool1d(1))
        .double()
        .eval()
    )
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    program = capture(net, (x,), dynamic_shapes={})
    there = pools_to_convs(program)
    assert len(calls(there, *_CONV.values())) == 3
    same(ran(there, x)[0], net(x))
    assert len(calls(convs_to_pools(there), *_POOL.values())) == 3
    overlapping = nn.AdaptiveAvgPool2d(5)
    program = capture(overlapping, (x,))
    assert calls(pools_to_convs(program), aten.adaptive_avg_pool2d.default)


def test_integers_stay():
    net = Net()
    x = net.input((1, 2, 4, 4), torch.int64)
    program = net.program(net.call(aten.avg_pool2d.default, x, [2, 2]))
    assert calls(pools_to_convs(program), aten.avg_pool2d.default)


def test_float32_is_within_rounding():
    for seed in range(50):
        program, x = built(seed, torch.float32)
        same(ran(pools_to_convs(program), x)[0], ran(program, x)[0], 1e-5)


def test_sizes_known_at_run_time():
    """The batch may be dynamic, always; images where windows all count the same."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2)).eval()
    x = torch.randn(2, 3, 24, 24)
    program = capture(net, (x,))
    there = pools_to_convs(program)
    assert len(calls(there, aten.conv2d.default)) == 3
    assert len(calls(convs_to_pools(there), aten.conv2d.default)) == 1
    program = capture(net, (x,), dynamic_shapes="all")
    assert len(calls(pools_to_convs(program), aten.conv2d.default)) == 3
    uncounted = nn.Sequential(nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.ReLU()).eval()
    program = capture(uncounted, (x,), dynamic_shapes="all")
    assert len(calls(pools_to_convs(program), aten.avg_pool2d.default)) == 1


def test_a_pool_keeps_what_it_is():
    pool = AveragePool((3,), (2,), (1,), ceil=True)
    assert not pool.is_even
    assert replace(pool, divisor=4).is_even
    assert pool.counts((4,)).tolist() == [3, 3, 2]
    assert replace(pool, include=False).counts((4,)).tolist() == [2, 3, 1]
    assert pool.pads((4,)) == ((1, 2),)
