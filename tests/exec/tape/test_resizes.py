"""Resizes by weighted sums in plans: torch's own weights, and its results of values that are not
finite, which depend on what it multiplies by zero."""

from __future__ import annotations

from itertools import product
from math import inf, nan

import pytest
import torch
from random_segments import WIDTHS, SegmentDraft, stays_within_memory

from demask.errors import BadInput
from demask.exec.steps import reference as dense
from demask.exec.steps.called_op import RESIZED
from demask.exec.steps.segment_calls import CALLED, RESIZES
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import AnyStep, call_step
from demask.exec.tape import write_call
from demask.exec.tape.segment_plan import SegmentPlan
from segment_drafts import RELU, all_at_once

WEIGHTED = {
    name: 1 if "signal" in name else 2 for name, entry in CALLED.items() if entry.lowering == RESIZED
}  # name -> axes
SIZES = [(2.0, 2.0), (3.0, 1.5), (1.0, 0.6), (13, 11), (2, 3), (7, 1), (1, 9)]
SHAPES = [(2, 3, 7, 9), (1, 2, 1, 5), (3, 2, 2, 3)]
ULPS = 64  # promised for results of float32


def close(y: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether results are those of torch, if they are not finite, and else near them."""
    inside = want.isfinite()
    unit = torch.finfo(torch.float32).eps * x[x.isfinite()].abs().max()
    return torch.equal(y[~inside].nan_to_num(7.0), want[~inside].nan_to_num(7.0)) and bool(
        ((y - want)[inside].abs() <= ULPS * unit).all()
    )


def all_close(made: list, program: SegmentProgram, weights: list, inputs: list) -> None:
    expected = dense.run(program, inputs, weights)
    assert all(close(y, want, inputs[0]) for y, want in zip(made, expected, strict=True))


def step_of(name: str, align: int, sizes: tuple) -> tuple[AnyStep, str]:
    kind = "signal" if WEIGHTED[name] == 1 else "image"
    return call_step((0,), name, kind, (align, *sizes[-WEIGHTED[name] :])), kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("align", [0, 1])
def test_the_results_are_those_of_torch(name: str, align: int) -> None:
    generator = torch.Generator().manual_seed(align)
    for k, (shape, sizes) in enumerate(product(SHAPES, SIZES)):
        step, kind = step_of(name, align, sizes)
        x = torch.randn(shape[:2] + shape[4 - WEIGHTED[name] :], generator=generator)
        places = torch.randperm(x.numel(), generator=generator)[: k % 3]
        x.view(-1)[places] = torch.tensor([inf, -inf, nan])[: len(places)]
        program = SegmentProgram((kind,), (step,), (1,))
        (want,) = dense.run(program, [x], [])
        with all_at_once():
            (y,) = SegmentPlan.of(program, [], [x], 1 + k % 3, WIDTHS[k % len(WIDTHS)])([x])
        assert y.shape == want.shape and close(y, want, x), (shape, sizes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WEIGHTED)
def test_long_axes_have_weights_of_torch(name: str, monkeypatch) -> None:
    """In float32, source positions of long axes are rounded as torch does."""
    monkeypatch.setattr(write_call, "PROBED", 100)
    step, kind = step_of(name, 0, (700, 900))
    x = torch.randn((1, 1, 500, 650)[: 2 + WEIGHTED[name]])
    (want,) = dense.run(SegmentProgram((kind,), (step,), (1,)), [x], [])
    (y,) = SegmentPlan.of(SegmentProgram((kind,), (step,), (1,)), [], [x], 1)([x])
    assert close(y, want, x)


def test_layers_read_resizes() -> None:
    for k, isa in enumerate(WIDTHS):
        draft = SegmentDraft((2, 6, 8, 8), seed=k)
        x = draft.conv(0, 6, act=RELU)
        up = draft.call("bilinear", x, kind="image", numbers=(0, 2.0, 2.0))
        again = draft.call("nearest", up, kind="image", numbers=(33, 20))
        small = draft.call("bicubic", draft.conv(again, 5), kind="image", numbers=(1, 16, 16))
        draft.cat(small, up)
        draft.check(threads=1 + k % 3, isa=isa)


def test_threads_do_not_change_bits() -> None:
    draft = SegmentDraft((1, 6, 12, 10))
    x = draft.call("bilinear", draft.conv(0, 6), kind="image", numbers=(0, 30, 15))
    y = draft.call("bicubic", x, kind="image", numbers=(0, 12, 50))
    draft.check(x, y, threads=(1, 2, 3, 4))


def test_kernels_stay_within_their_memory() -> None:
    """Reads of inputs and writes of outputs beside them would stop the process."""
    for width in (7, 16, 20, 53):
        draft = SegmentDraft((1, 3, 4, width))
        draft.call("bilinear", 0, kind="image", numbers=(0, 9, 2 * width))
        draft.call("bicubic", 0, kind="image", numbers=(1, 3, 11))
        draft.call("nearest", 0, kind="image", numbers=(2.0, 2.0))
        draft.call("reflect", 0, kind="image", numbers=(1, 2, 3, 0))
        for isa in WIDTHS:
            stays_within_memory(draft.program(3, 4), [], draft.inputs, 1, isa)
            stays_within_memory(draft.program(1, 2, 3, 4), [], draft.inputs, 1, isa, all_close)


@pytest.mark.parametrize("numbers", [
    (0, 2), (0, 2, 2.0), (2, 2, 2), (0, -1, 2), (0, 0, 2), (0, 0.0, 2.0), (0, 0.1, 1.0),
    (0, 2**24, 1), (0, 1e30, 1.0),
], ids=str)  # fmt: skip
def test_invalid_numbers(numbers: tuple) -> None:
    with pytest.raises(BadInput):
        step = call_step((0,), "bilinear", "image", numbers)
        SegmentProgram(("image",), (step,), (1,)).shapes([(1, 2, 5, 5)])


def test_kinds_are_images_or_signals() -> None:
    for name, entry in RESIZES.items():
        kind = "image" if "signal" in name else "signal"
        numbers = (0,) * (entry.numbers or 0)
        with pytest.raises(BadInput):
            SegmentProgram(("tokens",), (call_step((0,), name, "tokens", numbers),), (1,))
        with pytest.raises(BadInput):
            program = SegmentProgram((kind,), (call_step((0,), name, kind, (2,) * len(numbers)),), (1,))
            program.shapes([(1, 2, 5, 5)[: 4 if kind == "image" else 3]])
