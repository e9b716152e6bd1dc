"""Random programs of all kinds of steps equal the same programs in float64, with the same bits for
any number of threads, on every width of vectors."""

from __future__ import annotations

import pytest
from random_segments import WIDTHS, check_random, sees

from demask.exec.tape import tape_builder, value_moves


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
