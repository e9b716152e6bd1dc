"""Layers by minimal filtering: equal to float64, the same bits for any plan, and the values of the
definition where these are not finite."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
from random_segments import MOST, computed_as, draw, sees, stays_within_memory, widths
from torch import Tensor
from torch.nn.functional import conv2d

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import SparseWeight, conv_step
from demask.exec.tape import segment_plan, tape, tape_builder
from demask.exec.tape.layers import layer_plan, winograd_layer
from demask.exec.tape.layers.window_piece import read_weight
from demask.exec.tape.layers.winograd_layer import filtered_sizes
from demask.exec.tape.segment_plan import NoPlan, SegmentPlan
from demask.kernels.llvm.isa import Isa
from segment_drafts import RELU, Draft, check

ACTS = (None, RELU, ("silu", ()), ("gelu", ()))


@pytest.fixture
def anywhere(monkeypatch) -> None:
    """Minimal filtering also where it does not pay."""
    computed_as("filtered", monkeypatch)


def layer(weight: Tensor, **fields) -> tuple[SegmentProgram, list[Tensor]]:
    """A program of one convolution with a dense weight [outputs, channels, 3, 3] and a bias."""
    out = len(weight)
    window = {"kernel": (3, 3), "padding": ((1, 1), (1, 1))}
    spans = SparseWeight((0, 0, weight.numel())), (1, 0, out)
    step = conv_step(0, *spans, out, **window | fields)
    return SegmentProgram(("image",), (step,), (1,)), [weight.flatten(), draw(out)]


def drawn(out: int, channels: int) -> Tensor:
    return draw(out, channels, 3, 3) / (9 * channels) ** 0.5


# ------------------------------------------------------------------------------------------ values


@pytest.mark.sampled(5)
@widths(MOST)
@pytest.mark.parametrize("size", [(9, 7), (14, 14), (33, 4), (4, 31), (20, 45)], ids=str)
def test_layers_equal_float64(size, isa: Isa, filtered, anywhere) -> None:
    channels = itertools.cycle([(1, 1), (3, 19), (17, 5), (40, 24)])
    pads = itertools.cycle([((1, 1), (1, 1)), ((0, 0), (2, 1)), ((2, 0), (0, 1))])
    count = 0
    for batch, threads, act in itertools.product((1, 3), (1, 2, 3), ACTS[:2]):
        inner, outer = next(channels)
        program, weights = layer(drawn(outer, inner), padding=next(pads), act=act)
        check(program, weights, [draw(batch, inner, *size)], threads, isa)
        count += 1
    assert len(filtered) >= count > 0


def test_weights_of_a_batch_are_read_once(monkeypatch) -> None:
    read, real = [], layer_plan.read_weight

    def noted(step, weights, channels):
        read.append(step)
        return real(step, weights, channels)

    monkeypatch.setattr(layer_plan, "read_weight", noted)
    program, weights = layer(drawn(16, 16))
    SegmentPlan.of(program, weights, [draw(5, 16, 14, 14)], 2)
    assert len(read) == 1


def test_rows_and_columns_of_zeros(filtered) -> None:
    """As where a part of the channels is masked: rows of zeros are the bias, or what is added."""
    weight = drawn(40, 48)
    weight[torch.arange(40) % 3 == 0] = 0
    weight[:, torch.arange(48) % 4 == 1] = 0
    program, weights = layer(weight, act=RELU)
    for threads in (1, 2):
        check(program, weights, [draw(2, 48, 14, 20)], threads)
    assert set(filtered) == {(26, 36, 9)}


def test_values_of_other_sizes_around_them(filtered) -> None:
    """Strides, pools and elementwise steps read the grids that layers by minimal filtering want."""
    draft = Draft((1, 16, 30, 26))
    x = draft.conv(0, 32, density=1.0, act=RELU)
    y = draft.pool(draft.add(x, draft.conv(x, 32, density=1.0)), stride=2)
    z = draft.conv(draft.conv(x, 32, stride=(2, 2), density=1.0), 32, density=1.0, add=y)
    draft.conv(draft.select(z, list(range(0, 32, 2))), 8, kernel=1, density=1.0)
    for threads in (1, 2, 3):
        draft.check(threads=threads)
    assert len(filtered) >= 6


def test_rounding_is_that_of_the_definition() -> None:
    """Errors are not larger than those of sums one after the other, which are 64 ulps and more."""
    weight = drawn(48, 64)
    program, weights = layer(weight)
    x = draw(1, 64, 28, 28)
    want = conv2d(x.double(), weight.double(), weights[1].double(), padding=1)
    errors = []
    for filters in (True, False):
        plan = SegmentPlan.of(program, weights, [x], 1, filters=filters)
        assert (plan.planned is not None) is filters
        errors.append(float((plan([x])[0] - want).abs().max()))
    assert errors[0] <= 2 * errors[1]


# ------------------------------------------------------------------------------------------- bits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
def test_all_plans_give_the_same_bits(seed: int, filtered) -> None:
    draft = Draft((3, 16, *((14, 14), (31, 18), (9, 40))[seed]), seed=seed)
    x = draft.conv(0, 24, density=1.0, act=ACTS[seed])
    draft.conv(draft.conv(x, 24, density=1.0, add=x), 17, density=1.0)
    draft.check(threads=(1, 2, 3, 4), at_once=True)
    assert len(filtered) >= 4 * 3


def test_a_size_pays_for_all_its_layers() -> None:
    """Whether it does depends on its layers and on the waste of even tiles alone."""

    def sizes(size: tuple[int, int], *outputs: tuple[int, int]) -> set[tuple[int, int]]:
        layers = []
        for out, kernel in outputs:
            weight = torch.ones(out * 32 * kernel**2)
            step = conv_step(0, SparseWeight((0, 0, len(weight))), None, out, (kernel, kernel))
            layers.append((step, read_weight(step, [weight], 32), size))
        return set(filtered_sizes(layers, 8))

    assert sizes((28, 28), (32, 3)) == {(28, 28)}
    assert not sizes((28, 28), (32, 3), (2000, 1))  # 14 % more products of 1 x 1
    assert sizes((56, 56), (32, 3), (2000, 1)) == set()  # hardly any is saved
    assert sizes((56, 56), (32, 3), (96, 1)) == {(56, 56)}
    assert not sizes((7, 7), (32, 3))
    assert not sizes((28, 28), (4, 3))


# ----------------------------------------------------------------------- values that are not finite


def spoiled(kind: str, x: Tensor, weight: Tensor) -> None:
    """Put values into an image, or weights, whose outputs are not finite."""
    if kind == "nan":
        x[0, 3, 5, 5] = torch.nan
    elif kind == "inf":
        x[0, 3, 5, 5], x[0, 4, 9, 2] = torch.inf, -torch.inf
    elif kind == "overflow":
        x[0, :, 3, 3] = 3e38
        weight *= 20
    elif kind == "inner":  # the sum of two taps overflows, which no output has
        x[0, 2, 4, 4] = x[0, 2, 4, 5] = x[0, 2, 5, 4] = x[0, 2, 5, 5] = 3e38
        weight[:, 2] *= 1e-3
    elif kind == "weight":
        weight[2, 1, 0, 2] = torch.inf


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["nan", "inf", "overflow", "inner", "weight"])
def test_what_is_not_finite_is_that_of_the_definition(kind: str, threads: int) -> None:
    weight, x = drawn(20, 16), draw(1, 16, 14, 14)
    spoiled(kind, x, weight)
    program, weights = layer(weight)
    plan = SegmentPlan.of(program, weights, [x], threads)
    (y,) = plan([x])
    assert plan.definition is not None
    (want,) = SegmentPlan.of(program, weights, [x], threads, filters=False)([x])
    assert torch.equal(y.view(torch.int32), want.view(torch.int32))
    if kind in ("nan", "inf"):
        exact = conv2d(x.double(), weight.double(), weights[1].double(), padding=1)
        assert torch.equal(y.isnan(), exact.isnan())


def test_denormals_and_signed_zeros() -> None:
    weight, x = drawn(20, 16), draw(1, 16, 14, 14) * 1e-39
    x[:, :, ::3] = -0.0
    program, weights = layer(weight)
    weights[1].zero_()
    check(program, weights, [x], 1)


def test_calls_after_a_failure(monkeypatch) -> None:
    """The next 1, then 2, then 4 calls go to the definition at once; a success starts anew."""
    program, weights = layer(drawn(16, 16))
    good, bad = draw(1, 16, 14, 14), torch.full((1, 16, 14, 14), torch.nan)
    plan, tried = SegmentPlan.of(program, weights, [good], 1), []
    run = segment_plan.Batch.run

    def noted(batch, *arguments):
        tried.append(batch is plan.batches[0])
        return run(batch, *arguments)

    monkeypatch.setattr(segment_plan.Batch, "run", noted)

    def tries(x: Tensor) -> bool:
        del tried[:]
        plan([x])
        return any(tried)

    assert [tries(bad) for _ in range(9)] == [True, False, True, False, False, True] + [False] * 3
    plan([bad])
    assert [tries(good), tries(good), tries(bad), tries(good), tries(good)] == [True, True, True, False, True]


def test_lanes_without_images_do_not_count(filtered) -> None:
    """Lanes that no tile uses contain what earlier values have left."""
    program, weights = layer(drawn(16, 16))
    x = draw(1, 16, 14, 14)
    plan = SegmentPlan.of(program, weights, [x], 1)
    memory = plan.batches[0].take(1, 2)
    memory.arenas[0].memory[4096:] = np.full((len(memory.arenas[0].memory) - 4096) // 4, np.nan, np.float32).tobytes()
    plan.batches[0].spare.append(memory)
    plan([x])
    assert filtered
    assert plan.definition is None


def test_weights_are_not_held() -> None:
    program, weights = layer(drawn(16, 16))
    good = draw(1, 16, 14, 14)
    plan = SegmentPlan.of(program, weights, [good], 1)
    weights.clear()
    gc.collect()
    plan([good])
    with pytest.raises(NoPlan, match="freed"):
        plan([good * torch.nan])


# ----------------------------------------------------------------------------------------- kernels


def test_nothing_beside_its_memory_is_touched(filtered, anywhere) -> None:
    program, weights = layer(drawn(13, 11), act=RELU)
    for threads, size in ((1, (11, 13)), (2, (3, 5)), (2, (14, 14))):
        stays_within_memory(program, weights, [draw(1, 11, *size)], threads)
    assert len(filtered) >= 3


# --------------------------------------------------------------------------------- planted faults


def other_filter(real):
    wrong = real.copy()
    wrong[1, 1] = 0.25
    return wrong


@pytest.mark.parametrize(
    "name, wrong", [("FILTER", other_filter), ("pack_winograd", lambda real: lambda w, rows: real(w[::-1], rows))]
)
def test_planted_faults_of_values(name: str, wrong) -> None:
    program, weights = layer(drawn(16, 16))
    sees(winograd_layer, name, wrong, lambda: check(program, weights, [draw(1, 16, 14, 14)], 1))


def test_squares_at_odd_places_are_seen(monkeypatch) -> None:
    """With tiles of any size, plans differ in their bits."""
    real = tape_builder.grid_for
    monkeypatch.setattr(tape_builder, "SIDE", 1)
    monkeypatch.setattr(winograd_layer, "grid_for", lambda *args, **_: real(*args[:5]))
    draft = Draft((1, 16, 14, 14))
    draft.conv(0, 24, density=1.0)
    with pytest.raises(AssertionError):
        draft.check(threads=(1, 2, 3, 4), at_once=True)


def test_a_failure_that_nobody_notices_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(winograd_layer, "INEXACT", tape.INEXACT - 1)
    weight, x = drawn(20, 16), draw(1, 16, 14, 14)
    spoiled("inf", x, weight)
    with pytest.raises(AssertionError):
        program, weights = layer(weight)
        (y,) = SegmentPlan.of(program, weights, [x], 1)([x])
        exact = conv2d(x.double(), weight.double(), padding=1)
        assert torch.equal(y.isnan(), exact.isnan())
