"""Depthwise convolutions and pools on parts, by the kernel: the run law, in float32."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from demask.exec import axes as parts
from demask.exec.axes import Axes
from demask.exec.local.kernels import CompiledDepthwise, CompiledPool, faster_kind, fused
from demask.kernels.cpu.window import WindowRunner
from demask.ops import Declined
from demask.ops.entry import Shape as S
from demask.tune.epilogue import Epilogue
from local_runs import DRAWS, IMAGE, Placed, Scratch, assert_close, exact_result, image_call, run, values_of, windows

F = torch.nn.functional


def placed(name: str, *args, **how) -> Placed:
    """A call on parts, by the kernel where it can be."""
    here = image_call(name, *args, **how)
    kind = faster_kind(here.kind)
    assert not isinstance(kind, Declined)
    return Placed(replace(here._here, kind=kind), here.call_axes)


def holds(kind: type, name: str, *args, pair: Axes = IMAGE, **kwargs) -> None:
    here = placed(name, *args, pair=pair, **kwargs)
    assert type(here.kind) is kind
    expected, values, scratch = exact_result(here), values_of(here), Scratch()
    chance = random.Random(zlib.crc32(repr((name, args, kwargs)).encode()))
    whole = here.run(
        [values.get(o.value, o.value) for o in here.relation.operands], parts.full_window(here.node, here.axes)
    )
    assert_close(whole, expected)
    for window in windows(expected.shape, here.axes, chance):
        made = run(here, window, values, scratch)
        assert_close(made, parts.part(expected, here.axes, window))
        if kind is CompiledDepthwise:
            assert torch.equal(made, parts.part(whole, here.axes, window)), window
            assert scratch.bytes == here.scratch_bytes(window) == 0


def pair_of(low: int, high: int):
    return st.tuples(st.integers(low, high), st.integers(low, high))


CHANNELS = st.sampled_from([1, 2, 3, 10, 16, 33, 64])


@settings(DRAWS, max_examples=40)
@given(
    CHANNELS,
    pair_of(5, 20),
    pair_of(1, 7),
    pair_of(1, 3),
    pair_of(0, 3),
    pair_of(1, 2),
    st.booleans(),
    st.sampled_from([(2, 3), (3, 2)]),
)
def test_convolutions(channels, size, kernel, stride, pad, dilation, bias, axes):
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(size, pad, reach, strict=True)))
    weight, vector = S((channels, 1, *kernel), True), S((channels,), True) if bias else None
    x, how = S((1, channels, *size)), (list(stride), list(pad), list(dilation), channels)
    holds(CompiledDepthwise, "aten.conv2d.default", x, weight, vector, *how, pair=axes)


@settings(DRAWS, max_examples=15)
@given(CHANNELS, st.integers(5, 60), st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_sequences(channels, size, kernel, stride, pad):
    assume(size + 2 * pad >= kernel and 2 * pad <= kernel)
    x, line = S((1, channels, size)), (2, None)
    weight = S((channels, 1, kernel), True)
    how = ([stride], [pad], [1], channels)
    holds(CompiledDepthwise, "aten.conv1d.default", x, weight, None, *how, pair=line)
    holds(CompiledPool, "aten.avg_pool1d.default", x, [kernel], [stride], [pad], pair=line)
    holds(CompiledPool, "aten.max_pool1d.default", x, [kernel], [stride], [pad], pair=line)


@pytest.mark.nightly
@settings(DRAWS, max_examples=40)
@given(
    CHANNELS,
    pair_of(7, 20),
    pair_of(1, 7),
    pair_of(1, 3),
    pair_of(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 5]),
)
def test_pools(channels, size, kernel, stride, pad, ceil, include, divisor):
    assume(all(2 * p <= k for p, k in zip(pad, kernel, strict=True)))
    x, how = S((1, channels, *size)), (list(kernel), list(stride), list(pad))
    holds(CompiledPool, "aten.avg_pool2d.default", x, *how, ceil, include, divisor)
    holds(CompiledPool, "aten.max_pool2d.default", x, *how, [1, 1], ceil)


def test_an_image_without_a_batch():
    x, how = S((10, 9, 12)), ([2, 1], [1, 1], [1, 1], 10)
    weight = S((10, 1, 3, 3), True)
    holds(CompiledDepthwise, "aten.conv2d.default", x, weight, None, *how, pair=(1, 2))


@pytest.mark.parametrize("planted", ["top", "left", "rows_in", "columns_in"])
def test_a_planted_fault_breaks_the_law(monkeypatch, planted):
    honest = WindowRunner.run

    def run_wrong(self, sizes, threads, places):
        change = 1 if planted in ("top", "left") else -1
        honest(self, sizes._replace(**{planted: getattr(sizes, planted) + change}), threads, places)

    monkeypatch.setattr(WindowRunner, "run", run_wrong)
    with pytest.raises(AssertionError):
        holds(CompiledDepthwise, *depthwise())


@pytest.mark.parametrize("name", ["max", "avg"])
@pytest.mark.parametrize("step", [1, 2])
def test_pools_are_bit_equal_to_torch(name, step):
    how = ([3, 3], [step, step], [1, 1])
    here = placed(f"aten.{name}_pool2d.default", S((1, 10, 21, 19)), *how)
    for window in windows(here.call.shape, here.axes, random.Random(0)):
        expected = parts.part(here.node.meta["val"], here.axes, window)
        assert torch.equal(run(here, window, values_of(here)), expected)


def depthwise(channels: int = 10, size: tuple[int, int] = (12, 17)):
    return (
        "aten.conv2d.default",
        S((1, channels, *size)),
        S((channels, 1, 3, 3), True),
        S((channels,), True),
        [1, 1],
        [1, 1],
        [1, 1],
        channels,
    )


ACTIVATIONS = {
    "none": (lambda v: v, ()),
    "relu": (torch.relu, ()),
    "hardtanh": (lambda v: v.clamp(-0.25, 0.5), (-0.25, 0.5)),
    "leaky_relu": (lambda v: F.leaky_relu(v, 0.1), (0.1,)),
    "hardswish": (F.hardswish, ()),
    "hardsigmoid": (F.hardsigmoid, ()),
    "swish": (F.silu, ()),
    "tanh": (torch.tanh, ()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("add", [False, True])
def test_activations_and_sums(name, add):
    here = placed(*depthwise())
    activation, scalars = ACTIVATIONS[name]
    after = None if name == "none" else Epilogue(name, scalars)
    whole = exact_result(here)
    base = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    for window in [((0, 12), (0, 17)), ((3, 7), (0, 17)), ((11, 12), (2, 5))]:
        more = {"add": True, "prefill": parts.part(base, here.axes, window)} if add else {}
        expected = activation(whole + base.double() if add else whole)
        made = run(here, window, values_of(here), after=after, **more)
        assert_close(made, parts.part(expected, here.axes, window))


def test_an_average_is_activated_behind():
    here = placed("aten.avg_pool2d.default", S((1, 3, 8, 9)), [3, 3], [1, 1], [1, 1])
    made = run(here, ((2, 5), (0, 9)), values_of(here), after=Epilogue("relu"))
    assert_close(made, exact_result(here)[:, :, 2:5].relu())


@pytest.mark.parametrize("name", ["none", "relu", "hardtanh", "leaky_relu", "swish"])
def test_what_is_fused(name):
    act = fused(Epilogue(name, ACTIVATIONS[name][1]))
    assert (act is not None) == (name in ("relu", "hardtanh", "leaky_relu"))
    assert fused(Epilogue("hardtanh", (float("nan"), 1.0))) is None


def test_weights_may_change_between_calls():
    """In place, unseen by autograd's versions, and as a view that is not dense."""
    here = placed(*depthwise())
    x, weight, bias = (node.meta["val"] for node in here.node.args[:3])
    cut, window = parts.empty(x.shape, IMAGE, x.dtype).copy_(x), ((0, 12), (0, 17))

    def check(weight: Tensor) -> None:
        double = [t.double() for t in (x, weight, bias)]
        made = here.run([cut, weight, bias], window)
        assert_close(made, F.conv2d(*double, padding=1, groups=10))

    check(weight)
    weight.mul_(2)
    check(weight)
    weight.data.add_(1)
    check(weight)
    check(weight.transpose(2, 3))
    bias.data.add_(1)
    check(weight)


def test_a_part_in_another_layout_is_left_to_torch():
    here = placed(*depthwise())
    operands = [node.meta["val"] for node in here.node.args[:3]]
    assert operands[0].stride(3) == 1
    assert_close(here.run(operands, ((0, 12), (0, 17))), exact_result(here))


KEPT = [
    (depthwise(), {"dtype": torch.float64}),
    (depthwise(), {"pair": (2, None)}),
    ((*depthwise()[:2], S((20, 10, 3, 3), True)), {}),
    ((*depthwise()[:2], S((20, 1, 3, 3), True), None, [1, 1], [1, 1], [1, 1], 10), {}),
    ((*depthwise()[:2], S((10, 1, 9, 3), True), None, [1, 1], [4, 1], [1, 1], 10), {}),
    (("aten.conv2d.default", S((2, 10, 8, 8)), S((10, 1, 3, 3), True), None, [1, 1], [1, 1], [1, 1], 10), {}),
    (("aten.max_pool2d.default", S((1, 3, 8, 8)), [3, 3]), {"dtype": torch.int64}),
    (("aten.relu.default", S((1, 3, 8, 8))), {}),
]


@pytest.mark.parametrize("call", KEPT, ids=str)
def test_other_calls_stay_as_they_are(call):
    args, how = call
    assert not isinstance(placed(*args, **how).kind, (CompiledDepthwise, CompiledPool))
