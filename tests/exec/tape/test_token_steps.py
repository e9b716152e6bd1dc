"""Norms, softmax, products of two values and attention in plans: at most 64 units in the last place
of the largest element more than float64, with the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from random_segments import EPS, WIDTHS, SegmentDraft, outputs, same_bits, sees, stays_within_memory, widths
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import call_step
from demask.exec.tape import write_call
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tape_builder import TapeBuilder
from demask.kernels.llvm.isa import Isa
from segment_drafts import RELU, all_at_once, exact

UNITS = 64 * 2.0**-23


# ------------------------------------------------------------------------------------------ norms


@pytest.mark.sampled(5)
@widths()
@pytest.mark.parametrize("shape", [(3, 11, 40), (1, 1, 1), (2, 33, 7), (5, 3), (130, 6)], ids=str)
def test_norms(shape: Sequence[int], isa: Isa) -> None:
    draft = SegmentDraft(tuple(shape), kind="tokens")
    made = [draft.norm(0, count) for count in (0, 1, 2)]
    made += [draft.norm(0, count, name="rms") for count in (0, 1)]
    draft.linear(draft.norm(draft.linear(0, 9)), 4)
    same_bits(draft, *made, draft.norm(draft.linear(0, 9)), isa=isa)


def test_norms_of_numbers_far_from_zero() -> None:
    """Means are subtracted before squares are added: nothing cancels."""
    draft = SegmentDraft((4, 300), kind="tokens")
    draft.inputs[0] += torch.tensor([[1e4], [-1e5], [0.0], [1e6]])
    draft.inputs[0][2] = 7.0
    (y,) = same_bits(draft, draft.norm(0, 0))
    assert bool((y[2] == 0).all())


def test_norms_of_numbers_that_are_not_finite() -> None:
    rows = [[nan, 1, 2], [inf, 1, 2], [-inf, inf, 0], [3e38, -3e38, 0], [1e-40, 0, -0.0], [-0.0] * 3]
    for name in ("norm", "rms"):
        draft = SegmentDraft((len(rows), 3), kind="tokens")
        draft.inputs[0] = torch.tensor(rows)
        value = draft.norm(0, 0, name=name)
        (want,) = exact(draft.program(value), [], draft.inputs)
        (y,) = outputs(draft, value)
        assert torch.allclose(y.double(), want, UNITS, 0.0, equal_nan=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch", [1, 3])
def test_norms_of_pixels(batch: int) -> None:
    """An image whose channels come last needs no memory and no copy of its own."""
    for height, width in ((5, 7), (14, 14), (1, 3)):
        draft = SegmentDraft((batch, 6, height, width))
        x = draft.conv(0, 6)
        last = draft.call("permute", x, kind="pixels", numbers=(0, 2, 3, 1))
        y = draft.linear(draft.linear(draft.norm(last, kind="pixels"), 20, act=("gelu", ())), 6)
        y = draft.call("permute", y, kind="image", numbers=(0, 3, 1, 2))
        y = draft.add(draft.conv(y, 6), x)
        normed = draft.norm(draft.call("permute", y, kind="pixels", numbers=(0, 2, 3, 1)), kind="pixels")
        draft.check(threads=(1, 2, 3))
        with all_at_once():
            draft.check(y, normed, threads=(1, 2, 3))
        builder = TapeBuilder(draft.program(y), draft.weights, draft.inputs, WIDTHS[0], 1)
        assert builder.parts[last] == (x, 0)


# -------------------------------------------------------------------------------------- products


@pytest.mark.sampled(3)
@widths()
@pytest.mark.parametrize(
    "batch, rows, terms, columns", [((), 5, 3, 4), ((2,), 1, 1, 1), ((2, 3), 37, 9, 20), ((1, 2), 130, 33, 8)]
)
def test_products(batch: tuple, rows: int, terms: int, columns: int, isa: Isa) -> None:
    draft = SegmentDraft((*batch, rows, terms), (*batch, columns, terms), (*batch, columns, rows), kind="tokens")
    left, right, last = (draft.call("reshape", k, kind="matrices", numbers=draft.shape(k)) for k in range(3))
    rank = len(batch) + 2
    order = (*range(rank - 2), rank - 1, rank - 2)
    turned = draft.call("permute", right, kind="matrices", numbers=order)
    scores = draft.call("matmul", left, turned, kind="matrices")
    shares = draft.call("softmax", draft.add(scores, scores), kind="matrices")
    again = draft.call("matmul", shares, last, kind="matrices")
    same_bits(draft, scores, shares, again, isa=isa)


def test_factors_that_are_read_from_no_single_place() -> None:
    """Joined, padded and computed factors are written first."""
    draft = SegmentDraft((2, 4, 6), (2, 2, 6), kind="tokens")
    x = draft.call("reshape", 0, kind="matrices", numbers=(-1, 4, 6))
    joined = draft.call("join", 0, 1, kind="matrices", numbers=(1,))
    padded = draft.call("pad", 1, kind="matrices", numbers=(0, 0, 1, 3))
    mixed = draft.call("reshape", 0, kind="matrices", numbers=(-1, 6, 4))
    same_bits(draft, *(draft.call("matmul", x, y, kind="matrices") for y in (joined, padded, mixed)))


def test_products_of_numbers_that_are_not_finite() -> None:
    draft = SegmentDraft((1, 20, 3), (1, 3, 5), kind="tokens")
    draft.inputs[0][0, :4, 0] = torch.tensor([nan, inf, -inf, 1e-41])
    draft.inputs[1][0, 0, :3] = torch.tensor([0.0, inf, -0.0])
    parts = [draft.call("reshape", k, kind="matrices", numbers=draft.shape(k)) for k in (0, 1)]
    (y,) = outputs(draft, draft.call("matmul", *parts, kind="matrices"))
    assert torch.allclose(y, draft.inputs[0] @ draft.inputs[1], 1e-5, 1e-6, equal_nan=True)


# ------------------------------------------------------------------------------------- attention


@pytest.mark.sampled(4)
@widths()
@pytest.mark.parametrize("batch, length, heads, width", [(1, 5, 2, 3), (1, 130, 3, 8), (3, 17, 2, 4)])
def test_attention(batch: int, length: int, heads: int, width: int, isa: Isa) -> None:
    draft = SegmentDraft((batch, length, heads * width), kind="tokens")
    y = draft.attention(0, heads)
    same_bits(draft, draft.norm(draft.linear(y, heads * width, 1.0, add=0)), isa=isa)


def test_heads_of_one_image_need_no_memory() -> None:
    draft = SegmentDraft((1, 40, 12), kind="tokens")
    y = draft.attention(0, 3)
    draft.linear(y, 5)
    builder = TapeBuilder(draft.program(y + 1), draft.weights, draft.inputs, WIDTHS[0], 2)
    query = next(k for k, step in enumerate(draft.steps, 1) if step.op == "permute")
    assert builder.parts == {query: (1, 0), y: (y - 2, 0)}
    same_bits(draft, y + 1)


@pytest.mark.parametrize("static", [False, True])
def test_masks(static: bool) -> None:
    """A mask is added to the scores; a row of -inf alone gives zeros, as in torch."""
    length, heads = 21, 2
    mask = torch.zeros(2, heads, length, length)
    mask[..., 3:, :5], mask[:, 1, 4], mask[..., 7, 7] = -inf, -inf, 2.5
    draft = SegmentDraft((2, length, 8), mask.shape, kind="tokens")
    draft.inputs[1] = mask
    added = draft.call("reshape", 1, kind="matrices", numbers=tuple(mask.shape))
    y = draft.attention(0, heads, added)
    numbers = (1,) if static else ()
    program = draft.program(y, static=numbers)
    (want,) = exact(program, draft.weights, draft.inputs)
    for threads in (1, 3):
        (found,) = SegmentPlan.of(program, draft.weights, draft.inputs, threads)(draft.inputs)
        assert float((found - want).abs().max()) <= UNITS * float(want.abs().max())
        assert bool((found[:, 4, 4:] == 0).all())


def test_scores_that_are_not_finite() -> None:
    query, key, value = (torch.randn(1, 1, 6, 4) for _ in range(3))
    key[0, 0, 2] = nan
    for row, number in ((0, inf), (1, -inf), (3, 1e20)):
        query[0, 0, row] = number
    draft = SegmentDraft(*[(1, 1, 6, 4)] * 3, kind="tokens")
    for keys in (key, torch.ones_like(key)):
        draft.inputs = [query, keys, value]
        draft.steps = []
        parts = [draft.call("reshape", k, kind="matrices", numbers=(1, 1, 6, 4)) for k in range(3)]
        (y,) = outputs(draft, draft.call("attention", *parts, kind="matrices"))
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels lose some NaN
            want = F.scaled_dot_product_attention(query.double(), keys.double(), value.double())
        assert torch.allclose(y.double(), want, 1e-5, 1e-6, equal_nan=True)


def test_programs_with_tokens_stay_within_their_memory() -> None:
    """Reads of inputs and writes of outputs beside them would stop the process."""
    for length in (3, 16, 33, 130):
        draft = SegmentDraft((1, length, 6), kind="tokens")
        y = draft.norm(draft.attention(0, 2))
        heads = draft.heads(y, 3)
        program = draft.program(y, draft.add(y, 0, RELU), heads)
        for isa in WIDTHS:
            stays_within_memory(program, draft.weights, draft.inputs, 1, isa)


# ------------------------------------------------------------------------------ kernels and checks


@pytest.mark.parametrize(
    "name, shapes, numbers, count",
    [
        ("norm", [(4, 3)], (4, EPS), None),
        ("norm", [(4, 3)], (3, -1.0), None),
        ("norm", [(4, 3)], (3, EPS), 9),
        ("rms", [(4, 3)], (3, EPS), 6),
        ("matmul", [(4, 3), (4, 3)], (), None),
        ("matmul", [(2, 4, 3), (3, 4)], (), None),
        ("attention", [(1, 4, 3), (1, 4, 3)], (), None),
        ("attention", [(1, 4, 3), (1, 5, 3), (1, 4, 3)], (), None),
        ("attention", [(1, 4, 3)] * 3 + [(1, 4, 3)], (), None),
    ],
    ids=str,
)
def test_invalid_sizes(name: str, shapes: list, numbers: tuple, count: int | None) -> None:
    kind = "tokens" if name in ("norm", "rms") else "matrices"
    moves = [call_step((k,), "reshape", kind, shape) for k, shape in enumerate(shapes)]
    first, span = len(shapes), None if count is None else (0, 0, count)
    step = call_step(tuple(range(first, 2 * first)), name, kind, numbers, span)
    program = SegmentProgram(("tokens",) * first, (*moves, step), (2 * first,))
    with pytest.raises(BadInput):
        program.shapes(shapes)


@pytest.mark.parametrize(
    "owner, name, wrong, test",
    [
        (
            write_call._ValueProducts,
            "_factor_offsets",
            lambda real: lambda self, k, transposed: real(self, k, False),
            lambda: test_attention(1, 5, 2, 3, WIDTHS[0]),
        ),
        (write_call, "prod", lambda _: lambda sizes: 1, lambda: test_products((2, 3), 37, 9, 20, WIDTHS[0])),
        (write_call, "SoftmaxKernel", lambda real: lambda *_: real(), lambda: test_masks(False)),
    ],
    ids=["factors not transposed", "one matrix", "rows of -inf"],
)
def test_a_planted_fault_is_seen(owner, name: str, wrong, test) -> None:
    sees(owner, name, wrong, test, (AssertionError, IndexError, RuntimeError))
