"""Blocks that live at the same time never overlap; views are where the plan says."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demask.machine import arena
from demask.machine.arena import (
    ALIGNMENT,
    ArenaPlan,
    Block,
    View,
    allocate,
    owners,
    peak_bytes,
    plan_arena,
    strided_bytes,
)


@st.composite
def block(draw) -> Block:
    start = draw(st.integers(0, 30))
    return Block(draw(st.integers(0, 5000)), start, start + draw(st.integers(0, 12)))


def broken(blocks: list[Block], plan: ArenaPlan) -> list[str]:
    """What is wrong with a plan."""
    found = []
    for k, (mine, at) in enumerate(zip(blocks, plan.offsets, strict=True)):
        if at % ALIGNMENT or at < 0:
            found.append(f"{k} is not aligned")
        if at + mine.size > plan.size:
            found.append(f"{k} ends behind the arena")
        for j in range(k):
            other, there = blocks[j], plan.offsets[j]
            together = mine.start <= other.end and other.start <= mine.end
            if together and at < there + other.size and there < at + mine.size:
                found.append(f"{k} overlaps {j}")
    return found


def aligned_peak(blocks: list[Block]) -> int:
    return peak_bytes([Block(-(-b.size // ALIGNMENT) * ALIGNMENT, b.start, b.end) for b in blocks])


@settings(max_examples=300, deadline=None)
@given(st.lists(block(), max_size=25))
def test_blocks_alive_at_once_do_not_overlap(blocks):
    plan = plan_arena(blocks)
    assert broken(blocks, plan) == []
    assert plan.size >= peak_bytes(blocks)
    assert plan.size <= sum(-(-b.size // ALIGNMENT) * ALIGNMENT for b in blocks)
    assert plan_arena(blocks) == plan


@settings(max_examples=200, deadline=None)
@given(st.lists(block(), max_size=25))
def test_the_peak_is_the_most_bytes_at_any_step(blocks):
    steps = [sum(b.size for b in blocks if b.start <= s <= b.end) for s in range(45)]
    assert peak_bytes(blocks) == max(steps)


def test_blocks_one_after_another_share_a_place():
    blocks = [Block(640, k, k) for k in range(9)]
    assert plan_arena(blocks) == ArenaPlan((0,) * 9, 640)
    assert plan_arena([]) == ArenaPlan((), 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=0, max_size=4),
            st.randoms(use_true_random=False),
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
        ),
        max_size=6,
    )
)
def test_views_are_where_the_plan_says(drawn):
    views, blocks = [], []
    for shape, random, dtype in drawn:
        order = list(range(len(shape)))
        random.shuffle(order)
        stride, step = [0] * len(shape), 1
        for axis in order:
            stride[axis], step = step, step * max(shape[axis], 1)
        views.append((tuple(shape), tuple(stride), dtype))
        blocks.append(Block(strided_bytes(shape, stride, dtype), 0, 0))
    plan = plan_arena(blocks)
    placed = [View(at, *view) for at, view in zip(plan.offsets, views, strict=True)]
    tensors = allocate(plan.size, placed, torch.device("cpu"))
    base = min((t.data_ptr() - v.offset for t, v in zip(tensors, placed, strict=True) if t.numel()), default=0)
    for tensor, view in zip(tensors, placed, strict=True):
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (view.shape, view.stride, view.dtype)
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert tensor.data_ptr() == base + view.offset
    for k, tensor in enumerate(tensors):
        tensor.fill_(k + 1 if tensor.dtype is not torch.bool else True)
    for k, tensor in enumerate(tensors):  # all alive at once: nobody wrote over anybody
        assert bool((tensor == (k + 1 if tensor.dtype is not torch.bool else True)).all())


def test_two_arenas_share_nothing():
    view = View(0, (4,), (1,), torch.float32)
    (a,), (b,) = (allocate(64, [view], torch.device("cpu")) for _ in range(2))
    a.fill_(1), b.fill_(2)
    assert a.sum() == 4


def test_an_overlap_is_noticed(monkeypatch):
    """Planted: lifetimes that touch at a step are taken for apart."""
    blocks = [Block(64, 0, 1), Block(64, 1, 2)]
    assert broken(blocks, ArenaPlan((0, 0), 64)) == ["1 overlaps 0"]
    assert broken(blocks, ArenaPlan((0, 63), 128)) != []
    monkeypatch.setattr(arena, "align_size", lambda size: size)
    assert broken([Block(3, 0, 1), Block(3, 0, 1)], plan_arena([Block(3, 0, 1)] * 2)) != []


@pytest.mark.nightly
@settings(max_examples=5000, deadline=None)
@given(st.lists(block(), max_size=60))
def test_many_plans(blocks):
    assert broken(blocks, plan_arena(blocks)) == []


@pytest.mark.parametrize("seed", range(20))
def test_values_that_share_memory_are_not_read_after_they_are_overwritten(seed: int) -> None:
    """Drawn programs: of values with one owner, each is read for the last time by the call that writes the next."""
    draw = Random(seed)
    calls: list[tuple[int, list[int]]] = []
    for value in range(20):
        calls.append((value, draw.sample(range(value), min(value, draw.randint(0, 3)))))
    allowed = {(k, v) for k, (_, operands) in enumerate(calls) for v in operands if draw.random() < 0.7}
    shared = owners(calls, lambda k, v: (k, v) in allowed)
    reads = {v: max((k for k, (_, operands) in enumerate(calls) if v in operands), default=v) for v in range(20)}
    for owner in set(shared.values()):
        chain = [v for v in range(20) if shared[v] == owner]
        assert chain[0] == owner
        for before, after in itertools.pairwise(chain):
            assert reads[before] == after and (after, before) in allowed
    last = owners(calls, lambda k, v: (k, v) in allowed, last=True)
    assert {(v, w) for v in range(20) for w in range(20) if shared[v] == shared[w]} == {
        (v, w) for v in range(20) for w in range(20) if last[v] == last[w]
    }
    assert all(owner == max(v for v in range(20) if last[v] == owner) for owner in last.values())
