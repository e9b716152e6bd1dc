"""Reductions part by part equal the whole; calls that need all rows equal themselves in parts."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from demask.exec.analysis import partial_reductions as reductions
from demask.exec.analysis.partial_reductions import Reduction, attention, reduction
from demask.exec.analysis.split_global_ops import with_moments
from demask.exec.axes import Axes, empty, part
from demask.ops import TABLE, Declined, bind
from demask.ops.laws import call_node
from night import at_night

aten, own = torch.ops.aten, torch.ops.demask
SPLIT = with_moments(TABLE)
ROWS_AND_COLUMNS: Axes = (2, 3)
EXACT = 1e-11  # float64: a few hundred terms in another order, of which some cancel

# op, arguments behind the tensor, keywords
FLOATS = [
    (aten.sum.default, (), {}), (aten.sum.dim_IntList, ([2, 3], True), {}),
    (aten.sum.dim_IntList, ([2],), {}), (aten.mean.default, (), {}),
    (aten.mean.dim, ([-1, -2],), {}), (aten.mean.dim, ([0, 2], True), {}),
    (aten.amax.default, ([2, 3],), {}), (aten.amin.default, ([2], True), {}),
    (aten.max.default, (), {}), (aten.min.default, (), {}), (aten.var.default, (), {}),
    (aten.var.dim, ([2, 3], False), {}),
    (aten.var.correction, ([1, 2, 3],), {"correction": 0, "keepdim": True}),
    (aten.std.correction, ([2, 3],), {}), (aten.std.default, (False,), {}),
    (aten.std.dim, ([2],), {}), (aten.prod.default, (), {}), (aten.prod.dim_int, (2,), {}),
    (aten.any.default, (), {}), (aten.all.dim, (2,), {}), (aten.all.dims, ([2, 3],), {}),
    (aten.logsumexp.default, ([2, 3], True), {}), (aten.logsumexp.default, ([2],), {}),
    (aten.linalg_vector_norm.default, (2, [2, 3], True), {}),
    (aten.linalg_vector_norm.default, (3.5, [2]), {}),
    (aten.linalg_vector_norm.default, (float("inf"),), {}), (aten.norm.Scalar, (1,), {}),
    (aten.norm.ScalarOpt_dim, (2, [2, 3]), {}), (aten.argmax.default, (), {}),
    (aten.argmax.default, (2, True), {}), (aten.argmin.default, (-1,), {}),
    (own.moments.default, ([2, 3],), {}), (own.moments.default, ([0, 1, 2],), {}),
    (aten.adaptive_avg_pool2d.default, ([1, 1],), {}),
]  # fmt: skip
INTEGERS = [
    (aten.sum.default, (), {}),
    (aten.sum.dim_IntList, ([2, 3],), {}),
    (aten.sum.dim_IntList, ([2],), {"dtype": torch.int32}),
    (aten.prod.default, (), {}),
    (aten.amax.default, ([2, 3],), {}),
    (aten.amin.default, ([2],), {}),
    (aten.max.default, (), {}),
    (aten.any.dims, ([2, 3],), {}),
    (aten.argmax.default, (), {}),
    (aten.argmin.default, (2,), {}),
]
TRUTHS = [
    (aten.any.default, (), {}),
    (aten.all.dim, (2,), {}),
    (aten.sum.default, (), {}),
    (aten.amax.default, ([2, 3],), {}),
]
PARTICULAR = (aten.logsumexp.default, aten.argmax.default, aten.argmin.default, aten.amax.default)
ROUTINE = settings(max_examples=25, deadline=None)


def named(cases: list[Any]) -> list[Any]:
    return [pytest.param(c, id=f"{c[0]}{c[1]}".replace("aten.", "")) for c in cases]


def made(case: tuple[Any, ...], x: Tensor, axes: Axes = ROWS_AND_COLUMNS) -> Reduction:
    """The reduction of one call on an operand that is cut along `axes`."""
    target, args, kwargs = case
    node = call_node(target, x, *args, **kwargs)
    relation = bind(node, SPLIT)
    assert not isinstance(relation, Declined), relation
    found = reduction(node, relation, {node.args[0]: axes})  # type: ignore[dict-item]
    assert not isinstance(found, Declined), found
    return found


def laid(x: Tensor, axes: Axes) -> Tensor:
    """The same values in memory as parts have them."""
    return empty(tuple(x.shape), axes, x.dtype).copy_(x)


def cuts(length: int, draw: random.Random) -> list[tuple[int, int]]:
    places = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 4)))})
    return list(itertools.pairwise(places))


def in_parts(case: tuple[Any, ...], x: Tensor, seed: int, axes: Axes = ROWS_AND_COLUMNS) -> Tensor:
    """The call computed from a drawn partition, in a drawn order, by drawn workers."""
    draw, found, x = random.Random(seed), made(case, x, axes), laid(x, axes)
    columns = [(0, 1)] if axes[1] is None else cuts(x.shape[axes[1]], draw)
    windows = [(rows, span) for rows in cuts(x.shape[axes[0]], draw) for span in columns]
    draw.shuffle(windows)
    states = [found.begin() for _ in range(draw.randint(1, 3))]
    assert all(sum(t.nbytes for t in state) == found.bytes for state in states)
    for window in windows:
        found.update(draw.choice(states), part(x, axes, window), window)
    draw.shuffle(states)
    for other in states[1:]:
        found.merge(states[0], other)
    return found.finish(states[0])


def gap(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |a|; infinite where shapes, dtypes or places of NaN and infinity differ.
    Numbers so small that they have fewer digits count as the smallest that has all of them."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    apart = (a.double() - b.double()).abs()[a != b].max()
    kind = torch.finfo(a.dtype if a.is_floating_point() else torch.float32)
    largest = a.double().abs().max().clamp(min=kind.tiny / kind.eps)
    return float(apart / largest) if apart.isfinite() else float("inf")


@st.composite
def sizes(draw) -> tuple[int, ...]:
    return tuple(draw(st.integers(1, n)) for n in (2, 5, 13, 11))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", named(FLOATS))
@ROUTINE
@given(shape=sizes(), seed=st.integers(0, 9999), piece=st.sampled_from([64, 1024, 1 << 19]))
def test_any_partition_and_order_gives_the_value_of_the_whole(case, shape, seed, piece):
    target, args, kwargs = case
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = target(x, *args, **kwargs)
    with mock.patch.object(reductions, "_PIECE", piece):
        assert whole.isnan().any() or gap(whole, in_parts(case, x, seed)) <= EXACT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", named(INTEGERS))
@ROUTINE
@given(shape=sizes(), seed=st.integers(0, 9999), piece=st.sampled_from([64, 1024]))
def test_whole_numbers_are_exact(case, shape, seed, piece):
    target, args, kwargs = case
    generator = torch.Generator().manual_seed(seed)
    for dtype in (torch.int64, torch.int32, torch.int8):
        x = torch.randint(-100, 100, shape, generator=generator).to(dtype)
        with mock.patch.object(reductions, "_PIECE", piece):
            assert gap(target(x, *args, **kwargs), in_parts(case, x, seed)) == 0


@pytest.mark.parametrize("case", named(TRUTHS))
@ROUTINE
@given(shape=sizes(), seed=st.integers(0, 9999))
def test_truth_values_are_exact(case, shape, seed):
    target, args, kwargs = case
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.9
    assert gap(target(x, *args, **kwargs), in_parts(case, x, seed)) == 0


@pytest.mark.parametrize("case", named(FLOATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_are_no_worse_than_torch(case, dtype):
    target, args, kwargs = case
    x = (torch.randn(1, 6, 40, 33, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    wide = target(x.double(), *args, **kwargs)
    if target in (aten.prod.default, aten.prod.dim_int):
        wide = wide.to(dtype).double()  # beyond the range of the dtype
    mine = in_parts(case, x, 1)
    assert mine.dtype == target(x, *args, **kwargs).dtype
    ulps = 4  # one rounding of the result, and of sums over a piece
    assert gap(wide, mine.to(wide.dtype)) <= ulps * torch.finfo(dtype).eps


@pytest.mark.parametrize("axes", [(2, None), (1, None)])
@pytest.mark.parametrize("case", named([FLOATS[3], FLOATS[8], FLOATS[10], FLOATS[28]]))
def test_sequences_are_cut_along_one_axis(case, axes):
    target, args, kwargs = case
    x = torch.randn(2, 7, 9, dtype=torch.float64)
    assert gap(target(x, *args, **kwargs), in_parts(case, x, 3, axes)) <= EXACT


@pytest.mark.parametrize("border", [0.0, 1e4])
def test_variance_keeps_its_digits_where_the_mean_is_large(border):
    """A mean of 1000 beside a deviation of 1, and a border of another value seen first."""
    x = torch.randn(1, 8, 96, 64, generator=torch.Generator().manual_seed(0)) + 1000
    x[:, :, :16] = border
    case = (aten.var.correction, ([2, 3],), {})
    expected = aten.var.correction(x.double(), [2, 3])
    for seed in range(5):
        assert gap(expected, in_parts(case, x, seed).double()) <= 1e-6
    inside = x[:, :, 16:]
    assert gap(inside.double().var((2, 3)), in_parts(case, inside, 1).double()) <= 1e-6


def test_infinities_and_ties_are_those_of_the_whole():
    low = torch.full((1, 2, 6, 4), -torch.inf, dtype=torch.float64)
    high = low.clone()
    high[0, 1, 3, 2] = torch.inf
    for x in (low, high, torch.zeros_like(low), torch.full_like(low, -800.0)):
        for case in (c for c in FLOATS if c[0] in PARTICULAR):
            whole = case[0](x, *case[1])
            for seed in range(8):
                assert torch.allclose(in_parts(case, x, seed).double(), whole.double(), atol=0)
    nans = torch.zeros(1, 2, 6, 4, dtype=torch.float64)
    nans[0, 1, 2:4, 1] = torch.nan
    for seed in range(8):
        for op in (aten.argmax.default, aten.argmin.default):
            assert torch.equal(in_parts((op, (), {}), nans, seed), op(nans))
        assert in_parts((aten.amax.default, ([2, 3],), {}), nans, seed).isnan().sum() == 1


@pytest.mark.parametrize("case", named([FLOATS[0], *FLOATS[11:14], FLOATS[-3], FLOATS[-2]]))
def test_planted_faults_are_seen(case):
    x = torch.randn(1, 3, 12, 10, dtype=torch.float64) + torch.arange(12.0).reshape(12, 1)
    whole, found = case[0](x, *case[1], **case[2]), made(case, x)
    state = found.begin()
    for window in (((0, 7), (0, 10)), ((6, 12), (0, 10))):  # row 6 twice
        found.update(state, part(x, ROWS_AND_COLUMNS, window), window)
    assert gap(whole, found.finish(state)) > 1e-4


def test_a_mean_of_variances_is_seen():
    x = torch.randn(1, 3, 12, 10, dtype=torch.float64) + torch.arange(12.0).reshape(12, 1)
    case = (aten.var.correction, ([2, 3],), {"correction": 0})
    whole, *halves = (v.var((2, 3), correction=0) for v in (x, x[:, :, :6], x[:, :, 6:]))
    assert gap(whole, in_parts(case, x, 0)) <= EXACT < 0.1 < gap(whole, sum(halves) / 2)


def test_what_has_no_rule_says_why():
    x = torch.randn(1, 3, 8, 8)
    node = call_node(aten.softmax.int, x, 2)
    relation: Any = bind(node, TABLE)
    assert "softmax" in reduction(node, relation, {}).text  # type: ignore[union-attr]
    assert isinstance(bind(call_node(aten.renorm.default, x, 2, 0, 1.0), SPLIT), Declined)
    node = call_node(aten.adaptive_avg_pool2d.default, x, [2, 1])
    relation = bind(node, SPLIT)
    assert "several positions" in reduction(node, relation, {}).text  # type: ignore[union-attr]


def allocated(run: Any) -> int:
    """The most bytes alive at once of those that a function allocates."""
    run()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as found:
        run()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, *at_night(torch.bfloat16, torch.float64)])
@pytest.mark.parametrize("case", named(FLOATS))
def test_an_update_allocates_no_more_than_it_says(case, dtype):
    x = laid(torch.randn(1, 64, 24, 128).to(dtype), ROWS_AND_COLUMNS)
    found = made(case, x)
    with mock.patch.object(reductions, "_PIECE", 1 << 18):
        for window in (((0, 16), (0, 128)), ((3, 4), (0, 128)), ((0, 16), (10, 20))):
            state, piece = found.begin(), part(x, ROWS_AND_COLUMNS, window)
            said = found.scratch_bytes(window)
            assert allocated(partial(found.update, state, piece, window)) <= said <= (1 << 18) * 8


# attention


MASKS = {
    "none": lambda t, s, dtype: None,
    "causal": lambda t, s, dtype: torch.ones(t, s, dtype=torch.bool).tril(),
    "added": lambda t, s, dtype: torch.randn(t, s, dtype=dtype),
}


@pytest.mark.parametrize("kind", MASKS)
@ROUTINE
@given(seed=st.integers(0, 9999), t=st.integers(1, 9), s=st.integers(1, 20))
def test_attention_over_blocks_of_keys_equals_attention(kind, seed, t, s):
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    for dtype, bound in ((torch.float64, EXACT), (torch.float32, 1e-6)):
        q, k, v = (torch.randn(1, 2, n, d, generator=generator, dtype=dtype) for n, d in ((t, 8), (s, 8), (s, 5)))
        mask = MASKS[kind](t, s, dtype)
        blocks = [end - start for start, end in cuts(s, draw)]
        found = attention(q, k.split(blocks, 2), v.split(blocks, 2), scale=0.3, mask=mask)
        whole = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3)
        assert gap(whole, found) <= bound
    assert attention(q, [k], [v]).shape == (1, 2, t, 5)


def test_a_query_without_keys_gives_zero_and_large_scores_do_not_overflow():
    q, k = torch.full((1, 2, 4), 300.0), torch.randn(1, 6, 4) * 300
    seen = torch.tensor([[False] * 6, [True] * 6])
    found = attention(q, k.split(2, 1), k.split(2, 1), mask=seen)
    assert found[0, 0].eq(0).all()
    assert gap(F.scaled_dot_product_attention(q, k, k)[:, 1], found[:, 1]) <= 1e-6
