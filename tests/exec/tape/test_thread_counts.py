"""Outputs have the same bits for any number of threads, images at once, and grid of tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from random_segments import WIDTHS, sees

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import linear_step
from demask.exec.tape import value_moves
from demask.exec.tape.layers import dense_layer, pack_weights
from demask.exec.tape.segment_plan import SegmentPlan
from demask.kernels.llvm.isa import host
from segment_drafts import Draft, check
from sparse_cases import csr, matrix, weight

LAWS = {"threads": (1, 2, 3, 4), "at_once": True}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (13, 14), (37, 40), (150, 131)], ids=str)
def test_means_of_values_of_all_sizes(size: tuple[int, int]) -> None:
    """Terms from 1e-12 to 1e12, of both signs; ones that nearly cancel; and ones that are halfway
    between two roundings."""
    draft = Draft((3, 5, *size), kind="image")
    x = draft.inputs[0]
    x[:, 1:3] *= 10 ** x[:, 1:3].mul(3).clamp(-12, 12)
    x[:, 3] = 1.0 + 2.0**-23 * (x[:, 3] * 100).round()
    x[:, 3, 0, 0] = 2.0**13
    x[:, 4] = 2.0**-149 * x[:, 4].mul(9).round()
    cancelled = x[:, 2].view(3, -1)
    half = cancelled.shape[1] // 2
    cancelled[:, half : 2 * half] = -cancelled[:, :half].flip(1)
    draft.mean(0)
    for isa in WIDTHS:
        draft.check(isa=isa, **LAWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(5, 9), (40, 31)], ids=str)
def test_means_that_are_not_finite(size: tuple[int, int]) -> None:
    x = torch.randn(2, 6, *size)
    x[0, 0, 2, 3] = x[1, 1, -1, -1] = torch.inf
    x[0, 2, 0, 0], x[0, 2, -1, -1] = torch.inf, -torch.inf
    x[1, 3, 1, 1] = -torch.inf
    x[1, 4, 2, 2] = torch.nan
    x[0, 5, 3, 1], x[0, 5, 1, 3] = torch.nan, torch.inf
    draft = Draft((1, 1, 1, 1))
    draft.inputs = [x]
    draft.mean(0)
    y = SegmentPlan.of(draft.program(1), [], [x], 1)([x])[0]
    want = x.mean((2, 3), keepdim=True)
    assert torch.equal(y.isnan(), want.isnan())
    torch.testing.assert_close(y, want, equal_nan=True)
    draft.check(1, **LAWS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_rows_with_columns_in_any_order(dtype: str, count: int) -> None:
    """The order of sums is that of columns, not that in which a matrix has them."""
    weights, fields = csr(matrix(24, 3000, 0.2, dtype=torch.float32)), {}
    for begin, end in pairwise(weights[1].tolist()):
        order = begin + torch.randperm(end - begin)
        weights[0][begin:end], weights[2][begin:end] = weights[0][order], weights[2][order]
    weights += [torch.randn(24), torch.rand(24) + 0.5]
    if dtype == "int8":
        weights[0], fields = weights[0].mul(30).round().char(), {"scale": (4, 0, 24)}
    elif dtype == "bfloat16":
        weights[0] = weights[0].bfloat16()
    spans = replace(weight(24, len(weights[0])), **fields)
    step = linear_step(0, spans, (3, 0, 24), 24)
    steps = step, replace(step, reads=(0, 1), adds=True, act=("silu", ()))
    inputs = [torch.randn(count, 3000)]
    check(SegmentProgram(("tokens",), steps, (1, 2)), weights, inputs, **LAWS)


def shared_positions() -> None:
    """Threads share the positions of dense layers."""
    draft = Draft((1, 16, 30, 26))
    draft.conv(0, 17, 1, density=1.0)
    draft.check(**LAWS)


def channels_in_reverse(real):
    """Dense layers add channels in reverse where threads share positions."""

    def reverse(piece, block):
        block = real(piece, block)
        step = 1 if len(piece.shape.parts) == 1 else -1
        return replace(block, channels=block.channels[::step], weight=block.weight[:, ::step])

    return reverse


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "owner, name, wrong, test",
    [
        # the first sums of means are so small that later ones are rounded by their order
        (value_moves, "exponent", lambda _: lambda pixels: -30, lambda: test_means_of_values_of_all_sizes((37, 40))),
        (
            pack_weights,
            "_sort_columns",
            lambda _: lambda rows, columns, values: (columns, values),
            lambda: test_rows_with_columns_in_any_order("float32", 1),
        ),
        (dense_layer, "_restrict_to_window", channels_in_reverse, shared_positions),
    ],
    ids=["means", "columns", "channels"],
)
def test_a_planted_fault_is_seen(owner, name: str, wrong, test) -> None:
    if name == "_sort_columns" and host().lanes < 8:
        pytest.skip("has no columns to sort")
    sees(owner, name, wrong, test)
