"""Selections and scales equal the same program in float64, step by step: for odd sizes, any number
of threads and any width of vectors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from random_segments import STRIDES, sees, widths

from demask.errors import BadInput
from demask.exec.steps.segment_steps import select_step
from demask.exec.tape import tape_builder, value_moves
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tape_builder import TapeBuilder
from demask.kernels.cpu.tiles.mean import exponent
from demask.ops.activations import ACTIVATIONS
from segment_drafts import RELU, Draft, all_at_once, compare

SIZES = [(1, 9, 7), (3, 5, 11), (1, 20, 33), (5, 1, 6)]
NUMBERS = {
    "in order": [0, 1, 2, 3, 4],
    "the first": [0, 1],
    "the last": [3, 4],
    "one": [2],
    "reversed": [4, 3, 2, 1, 0],
    "repeated": [2, 2, 0, 2, 4, 4, 1, 1, 3],
    "with gaps": [0, 2, 4],
    "with zeros": [-1, 1, 2, -1, -1, 0],
    "only zeros": [-1, -1],
    "zeros behind": [0, 1, 2, 3, 4, -1, -1],
}

# ------------------------------------------------------------------------------------- selections


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NUMBERS)
def test_selections_of_images(name: str) -> None:
    for k, (batch, height, width) in enumerate(SIZES):
        draft = Draft((batch, 5, height, width), seed=k)
        for stride in STRIDES:
            y = draft.select(0, NUMBERS[name], stride)
            draft.select(y, [0])
        draft.check(threads=1 + k % 3)


@pytest.mark.parametrize("size", [(13, 9), (22, 6), (40, 30)], ids=str)
def test_parts_of_selections_begin_between_those_of_the_image(size: tuple[int, int]) -> None:
    """Threads share rows or columns; those that a thread selects may be of another one."""
    draft = Draft((1, 3, *size))
    for stride in STRIDES[1:]:
        draft.select(0, [2, 0, -1], stride)
    for threads in (2, 3):
        draft.check(threads=threads)


@pytest.mark.sampled(2)
@widths()
def test_selections_on_every_width(isa) -> None:
    draft = Draft((3, 5, 13, 10))
    x = draft.conv(0, 5, act=RELU)
    for k, numbers in enumerate(NUMBERS.values()):
        y = draft.select(x, numbers, STRIDES[k % len(STRIDES)])
        draft.conv(y, 3)
    draft.check(isa=isa)


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("tokens", (7, 5)),
        ("tokens", (2, 3, 5)),
        ("tokens", (5,)),
        ("tokens", (40, 5)),
        ("signal", (1, 5, 23)),
        ("signal", (3, 5, 4)),
    ],
    ids=str,
)
def test_selections_of_tokens_and_signals(kind: str, shape: tuple[int, ...]) -> None:
    draft = Draft(shape, kind=kind)
    for numbers in NUMBERS.values():
        draft.select(0, numbers)
    draft.cat(3, 0, 6)
    draft.check(threads=1)
    draft.check(4, 11)


@pytest.mark.parametrize("number", [-2, -1, 6])
def test_selections_of_channels_that_are_not_there_are_refused(number: int) -> None:
    draft = Draft((1, 6, 3, 3))
    index = draft.stored(torch.tensor([0, number], dtype=torch.int32))
    draft.append(select_step(0, index, (1, 1), number == -2))
    with pytest.raises(BadInput, match="expected channel numbers below 6"):
        SegmentPlan.of(draft.program(), draft.weights, draft.inputs, 1)


def test_means_of_more_pixels_begin_at_larger_sums() -> None:
    assert [exponent(pixels) for pixels in (1, 49, 2**14, 2**14 + 1)] == [16, 16, 16, 17]


def test_every_channel_of_zeros_is_zero() -> None:
    """Also where channel 0, which the kernel reads instead, is not finite."""
    draft = Draft((1, 3, 6, 6))
    y = draft.select(0, [-1, 1, -1])
    z = draft.conv(y, 2)
    draft.inputs[0][:, 0] = torch.nan
    found = draft.check(y, z)(draft.inputs)
    assert not found[0][:, [0, 2]].any() and bool(found[1].isfinite().all())


# ----------------------------------------------------------------------------------------- scales


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch, together", [(1, False), (3, True), (3, False), (5, True)])
def test_scales(batch: int, together: bool) -> None:
    for k, (height, width) in enumerate(((9, 7), (1, 6), (20, 33), (1, 1))[batch % 2 :: 2]):
        draft = Draft((batch, 6, height, width), (batch, 6, 1, 1), seed=k)
        draft.scale(0, 1)
        draft.scale(0, 1, ("sigmoid", ()))
        gate = draft.conv(draft.mean(0), 6, 1, act=("hardsigmoid", ()))
        y = draft.scale(0, gate, RELU)
        draft.conv(y, 4, add=draft.conv(0, 4))
        draft.pool(draft.scale(y, 1, ("tanh", ())))
        with all_at_once(batch) if together else nullcontext():
            draft.check(threads=1 + k % 3)
            draft.check(len(draft.steps) + 1, threads=1 + k % 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_scales(name: str) -> None:
    draft = Draft((2, 3, 5, 6), (2, 3, 1, 1))
    draft.scale(0, 1, (name, (-0.5, 2.0)[: ACTIVATIONS[name].count]))
    draft.check()


@pytest.mark.sampled(3)
@widths()
@pytest.mark.parametrize("batch", [1, 3])
def test_scales_on_every_width(batch: int, isa) -> None:
    draft = Draft((batch, 8, 11, 10))
    x = draft.conv(0, 8, act=RELU)
    gate = draft.conv(draft.conv(draft.mean(x), 4, 1, act=RELU), 8, 1, act=("sigmoid", ()))
    draft.conv(draft.scale(x, gate), 8, 1, add=x)
    with all_at_once():
        draft.check(len(draft.steps), isa=isa)


def test_factors_that_are_parts() -> None:
    """Slices of one gate, and a gate that is concatenated."""
    draft = Draft((2, 4, 6, 7))
    gate = draft.conv(draft.mean(0), 8, 1, act=("sigmoid", ()))
    a, b = (draft.select(gate, list(range(k, k + 4))) for k in (0, 4))
    y = draft.cat(draft.scale(0, a), draft.scale(0, b))
    z = draft.scale(y, draft.cat(b, a))
    draft.check(threads=1)
    with all_at_once():
        draft.check(z)


# --------------------------------------------------------------------------------- planted faults


def no_stride(real):
    return lambda self, selection, *rest: real(self, selection._replace(stride=(1, 1)), *rest)


def no_rows_of_others(real):
    """Selections read no rows or columns of other threads."""

    def reads(self, step, grid):
        needs = real(self, step, grid)
        if step.op == "select":
            return [replace(need, border=(0, 0, 0, 0)) for need in needs]
        return needs

    return reads


def strided() -> None:
    draft = Draft((1, 3, 40, 30))
    for stride in STRIDES:
        draft.select(0, [2, 0, -1], stride)
    draft.check(threads=3)


def scales_and_selections() -> None:
    draft = Draft((2, 4, 9, 7), (2, 4, 1, 1))
    draft.scale(0, 1)
    draft.select(0, [1, -1, 0])
    draft.select(0, [1, 3], (2, 2))
    with all_at_once():
        draft.check(threads=1)


FAULTS = {
    "every image is scaled by the factors of the first": (
        value_moves.move,
        "ScaleKernel",
        lambda real: lambda act, lanes: real(act, (lanes[0],) * len(lanes)),
        scales_and_selections,
    ),
    "channels of zeros are channel 0": (
        tape_builder,
        "selected",
        lambda real: lambda *args: real(*args).clip(0),
        scales_and_selections,
    ),
    "no stride": (value_moves.Moves, "select", no_stride, scales_and_selections),
    "no rows of others": (TapeBuilder, "needs_of", no_rows_of_others, strided),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    sees(*FAULTS[fault])


def test_the_comparison_sees_what_is_not_finite() -> None:
    draft = Draft((1, 2, 3, 3))
    program = draft.program(draft.select(0, [1, 0]))
    found = draft.inputs[0][:, [1, 0]]
    compare([found], program, draft.weights, draft.inputs)
    found[0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError):
        compare([found], program, draft.weights, draft.inputs)
