"""Random programs of all kinds of steps equal the same programs in float64, with the same bits for
any number of threads, on every width of vectors."""

from __future__ import annotations

import pytest
import torch
from random_segments import WIDTHS, check_random, random_segment, sees

import segment_drafts
from demask.exec.tape import tape_builder, value_moves
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tape import TapeArena
from segment_drafts import bits


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seeds", [range(k, k + 3) for k in range(0, 24, 3)], ids=str)
@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_random_programs(kind: str, seeds: range) -> None:
    for seed in seeds:
        check_random(seed, kind, isa=WIDTHS[seed % len(WIDTHS)])


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(k, k + 25) for k in range(24, 1024, 25)], ids=str)
@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_many_random_programs(kind: str, seeds: range) -> None:
    for seed in seeds:
        check_random(seed, kind, 9, threads=(1, 2, 3, 4), at_once=True, isa=WIDTHS[seed % len(WIDTHS)])


FAULTS = {
    "values in the memory of others begin at their first channel": (
        tape_builder,
        "owner_of",
        lambda real: lambda *args: (real(*args)[0], 0),
    ),
    "no activation": (
        value_moves.Moves,
        "pointwise",
        lambda real: lambda self, act, sources, out: real(self, None, sources, out),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    sees(*FAULTS[fault], lambda: test_random_programs("image", range(6)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seeds", [range(k, k + 6) for k in range(0, 24, 6)], ids=str)
@pytest.mark.parametrize("kind", ["image", "tokens"])
def test_memory_that_others_have_written(kind: str, seeds: range) -> None:
    """Plans compute the same bits in an arena of others, whose bytes may be any."""
    shared = 0
    for seed in seeds:
        draft = random_segment(seed, kind, 6)
        for filters in (True, False):
            plan = SegmentPlan.of(draft.program(), draft.weights, draft.inputs, 2, filters=filters)
            expected = plan(draft.inputs)
            plan.free()
            if not plan.used:
                continue
            arena = TapeArena(plan.used[-1][1] + 4096)
            for first, last in plan.used[1:]:
                arena.memory[first:last] = b"\xff" * (last - first)  # NaN
            plan.share(arena)
            assert all(map(torch.equal, map(bits, plan(draft.inputs)), map(bits, expected)))
            assert plan.batches[0].spare[0].arenas == [arena]
            shared += 1
    assert shared > 3


def test_plans_run_in_the_memory_that_check_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that have run before, in memory of their own."""
    arenas = list[TapeArena]()

    def allocate(size: int) -> TapeArena:
        arenas.append(TapeArena(size))
        return arenas[-1]

    monkeypatch.setattr(segment_drafts, "TapeArena", allocate)
    check_random(3)
    assert arenas and all(any(byte != 255 for byte in arena.memory[4096:]) for arena in arenas)
