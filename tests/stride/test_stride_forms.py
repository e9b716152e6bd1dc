"""Forms of strided convolutions: accepted where they are sound, refused where they are not."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from demask.facts.ranges import Range
from demask.stride import forms as module
from demask.stride.forms import FORMS, StrideForm, selected, zero_taps
from demask.stride.strided_conv import ConvAxis, StridedConv
from demask.stride.targets import Target
from stride_oracle import FLOAT, KERNELS, SIZES, STRIDES, WHOLE, Cell, grid, misses, sample

torch.set_num_threads(1)


def found(axes: Any, forms: dict[str, StrideForm] | None = None, **more: Any) -> list[str]:
    """The first misses."""
    return list(itertools.islice(misses(axes, forms or FORMS, **more), 5))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sample_of_the_grid_has_no_misses(kernel: int) -> None:
    axes = [axis for axis in sample(3, seed=kernel) if axis.kernel == kernel]
    assert len(axes) == 3 * len(STRIDES)
    assert [miss for axis in axes for miss in found((axis,))] == []


@pytest.mark.nightly
@pytest.mark.parametrize(("kernel", "stride"), list(itertools.product(KERNELS, STRIDES)))
def test_the_whole_grid_has_no_misses(kernel: int, stride: int) -> None:
    count = 0
    for axis in grid(kernel, stride):
        assert found((axis,)) == []
        count += axis.wide > 0
    assert count > 500


def images(count: int, seed: int, largest: int, rank: int) -> list[tuple[ConvAxis, ...]]:
    """Axes of images or volumes, each its own kernel, stride, dilation and pads."""
    draw, made = random.Random(seed), []
    while len(made) < count:
        axes = tuple(
            ConvAxis(
                draw.randint(1, largest),
                draw.randint(1, 7 - 2 * rank + 2),
                draw.randint(1, 4),
                draw.randint(1, 2),
                draw.randint(0, 3),
                draw.randint(0, 3),
            )
            for _ in range(rank)
        )
        if all(axis.wide > 0 for axis in axes):
            made.append(axes)
    return made


@pytest.mark.parametrize(("seed", "channels", "groups"), [(0, 1, 1), (1, 2, 1), (2, 4, 2)])
def test_images_have_no_misses(seed: int, channels: int, groups: int) -> None:
    for axes in images(8, seed, 6, 2):
        assert found(axes, channels=channels, groups=groups) == []


def test_volumes_have_no_misses() -> None:
    small = (ConvAxis(3, 1, 2), ConvAxis(3, 2, 3), ConvAxis(1, 1, 4, 1, 0, 1))  # than the windows of its pools
    for axes in [*images(5, 0, 3, 3), small]:
        assert found(axes) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_many_images_have_no_misses(seed: int) -> None:
    for axes in images(40, seed, 20 if seed < 2 else 9, 2):
        assert found(axes, channels=2, groups=1 + seed % 2) == []


# --- the oracle notices ---

AXES = (ConvAxis(7, 3, 2, 1, 1, 1),)


def changed(name: str, **changes: Any) -> dict[str, StrideForm]:
    return {name: replace(FORMS[name], **changes)}


@pytest.mark.parametrize(
    "name", ["mask_max_pool", "two_masks", "mask_min_pool", "mask_sum_pool", "mask_avg_pool", "split", "space_to_depth"]
)
def test_an_unsound_form_that_is_accepted_is_a_miss(name: str) -> None:
    wrong = changed(name, refused=lambda site, target, known: None)
    assert any("accepted" in miss for miss in found(AXES, wrong))


@pytest.mark.parametrize("name", FORMS)
def test_a_sound_form_that_is_refused_is_a_miss(name: str) -> None:
    wrong = changed(name, refused=lambda site, target, known: "out of caution")
    assert any("refused" in miss for miss in found(AXES, wrong))


@pytest.mark.parametrize(
    "name", ["mask_max_pool", "select_max_pool", "mask_min_pool", "select_min_pool", "mask_sum_pool", "split"]
)
def test_a_pool_that_ends_inside_is_a_miss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_excess_of_last_window", lambda site: [0] * site.rank)
    assert any("accepted" in miss for miss in found((ConvAxis(8, 2, 2),), {name: FORMS[name]}))


def test_a_mask_one_off_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "selected", lambda site: selected(site).roll(1, -1))
    assert found(AXES, {"mask_sum_pool": FORMS["mask_sum_pool"]})


# --- masks and reasons ---


def test_a_mask_is_one_where_the_stride_computes_and_zero_elsewhere() -> None:
    """Row 002-b, and 002-c: windows from each kept position on hold it first, and no other."""
    site = Cell((ConvAxis(8, 3, 2, 1, 1, 1), ConvAxis(9, 3, 3, 1, 1, 1))).site()
    mask = selected(site)
    assert mask.shape == (8, 9)
    assert mask.int().tolist() == [[int(i % 2 == 0 and j % 3 == 0) for j in range(9)] for i in range(8)]
    pooled = torch.nn.functional.avg_pool2d(mask[None].float(), (2, 3), divisor_override=1)
    assert bool((pooled == 1).all())


def site(low: float, high: float, dtype: torch.dtype = FLOAT, **more: Any) -> StridedConv:
    return StridedConv((ConvAxis(8, 3, 2, 1, 1, 1),), (1, 1), 1, dtype, (Range(low, high),), **more)


def reason(name: str, where: StridedConv, ops: str, **more: Any) -> str:
    return FORMS[name].refusal(where, Target("mine", frozenset(ops.split()), **more)) or ""


def test_a_refusal_says_why() -> None:
    ops = "max_pool multiply"
    assert "below the zeros" in reason("mask_max_pool", site(-1, 1), f"{ops} select")
    assert "is not declared finite" in reason("mask_max_pool", site(0, 1), ops)
    assert "has no max_pool" in reason("select_max_pool", site(0, 1), "select")
    assert "above the zeros" in reason("mask_min_pool", site(-1, 1), "min_pool select")
    assert "negative" in reason("select_min_pool", site(-(2.0**31), 1, WHOLE), "min_pool select")
    assert "rounds" in reason("two_masks", site(0, 1), ops, finite=True, mask=3.0)
    assert "overflow" in reason("two_masks", site(0, 3e38), ops, finite=True)
    assert "no 1 / 2" in reason("two_masks", site(0, 1, WHOLE), ops)
    assert "as large as their stride" in reason("pool_1x1", site(0, 1), "max_pool", pool_windows="stride")
    assert "up to 1" in reason("select_max_pool", site(0, 1), "max_pool select", pool_size=1)
    assert "cannot pad" in reason(
        "mask_sum_pool", replace(site(0, 1), axes=(ConvAxis(9, 3, 2),)), "sum_pool select", pool_ceil=False
    )
    assert "negative" in reason("split", site(-(2.0**31), 1, WHOLE), f"{ops} relu add")
    assert "zero weights" in reason("space_to_depth", site(0, 1), "space_to_depth pad")
    assert "run time" in reason("phase_split", site(0, 1, constant=False), "slice add pad")


def test_a_target_whose_numbers_are_bounded_takes_two_masks() -> None:
    bounded = Target("mine", frozenset({"max_pool", "multiply"}), finite=True, largest=1e4)
    assert FORMS["two_masks"].refusal(site(0, bounded.largest), bounded) is None


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (ConvAxis(8, 2, 2), False),
        (ConvAxis(8, 4, 4), False),
        (ConvAxis(8, 3, 2), True),
        (ConvAxis(8, 1, 2), True),
        (ConvAxis(1, 1, 2), False),
        (ConvAxis(8, 2, 2, 2), True),
        (ConvAxis(9, 3, 3), False),
    ],
)
def test_zero_taps_are_found_where_they_meet_the_input(axis: ConvAxis, expected: bool) -> None:
    assert zero_taps(Cell((axis,)).site()) is expected


@pytest.mark.parametrize("size", SIZES)
def test_positions_that_read_the_input_are_told(size: int) -> None:
    for axis in (a for a in sample(20, seed=size) if a.size == size):
        line = torch.zeros(axis.before + size + axis.after)
        line[axis.before : axis.before + size] = 1
        taps = [axis.dilation * j for j in range(axis.kernel)]
        for place in range(axis.wide):
            assert axis.reads(place) == any(bool(line[place + t]) for t in taps)
