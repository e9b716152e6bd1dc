"""Timing is fair and tidy: alternated order, no garbage collection, honest quantiles."""

import ctypes
import gc
import platform
import random
from itertools import count
from statistics import median

import pytest

import own_process
from demask.errors import BadInput
from demask.machine.allocator import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, THRESHOLDS, fix_allocator
from demask.machine.clock import Timing, lower_bound, race


def recording(calls, *names):
    return {name: lambda name=name: calls.append(name) for name in names}


def test_rounds_alternate_their_order_after_the_warmup():
    calls = []
    race(recording(calls, "a", "b", "c"), rounds=3, warmup=2, clock=count().__next__)
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]
    assert calls[6:] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


def test_quick_calls_are_timed_after_untimed_ones_of_their_own():
    calls = []
    race(recording(calls, "a", "b"), rounds=2, warmup=0, clock=count(step=2**-9).__next__)
    assert calls == ["a", "b", "b", "b", "b", "a", "a", "a"]  # two of 1/512 second are QUICK
    race(recording(calls := [], "a"), rounds=2, warmup=0, clock=count(step=2**-9).__next__)
    assert calls == ["a", "a"]  # no other call was between


def test_timings_come_from_the_clock():
    # First round: a took 1, b took 5. Second round, turned: b took 7, a took 3.
    seconds = iter([0, 1, 10, 15, 20, 27, 30, 33])
    timings = Timing.of_each(race(recording([], "a", "b"), rounds=2, warmup=0, clock=lambda: next(seconds)))
    assert timings == {"a": Timing(2.0, 1.2, 2.8, 2), "b": Timing(6.0, 5.2, 6.8, 2)}


@pytest.mark.parametrize(("seconds", "rounds"), [(0, 1), (3, 2), (4, 2), (4.5, 3), (100, 5)])
def test_no_round_starts_after_the_time_is_up(seconds, rounds):
    ticks = iter(range(100))  # each call takes one tick, so a round of two takes 2
    contenders = recording([], "a", "b")
    timings = Timing.of_each(race(contenders, 5, 0, seconds=seconds, clock=lambda: next(ticks)))
    assert {timing.count for timing in timings.values()} == {rounds}


def test_quantiles_hold_the_middle_of_the_samples():
    timing = Timing.of([float(second) for second in range(101)])
    assert (timing.low, timing.median, timing.high, timing.count) == (10, 50, 90, 101)


def test_one_sample_is_its_own_quantiles():
    assert Timing.of([0.25]) == Timing(0.25, 0.25, 0.25, 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_meanwhile_and_put_back(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        seen = []
        race({"a": lambda: seen.append(gc.isenabled())}, rounds=2)
        with pytest.raises(ZeroDivisionError):
            race({"a": lambda: 1 / 0}, rounds=2)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(seen)
    assert after == enabled


@pytest.mark.parametrize(("rounds", "warmup"), [(0, 3), (-1, 3), (5, -1)])
def test_senseless_counts_are_refused(rounds, warmup):
    with pytest.raises(BadInput, match=f"got rounds={rounds}, warmup={warmup}"):
        race({"a": lambda: None}, rounds, warmup)


def test_a_timing_of_nothing_is_refused():
    with pytest.raises(BadInput, match="at least one sample"):
        Timing.of([])


class FakeLibrary:
    """A C library whose mallopt accepts values up to `limit` and remembers what it accepted."""

    def __init__(self, limit):
        self.limit, self.accepted = limit, {}

    def mallopt(self, option, value):
        if option == M_MMAP_THRESHOLD and value > self.limit:
            return 0
        self.accepted[option] = value
        return 1


@pytest.mark.parametrize(
    ("limit", "mapped", "words"),
    [
        (2**31, THRESHOLDS[0], "allocator retains freed memory (glibc, blocks up to 1,907 MiB)"),
        (2**25, THRESHOLDS[1], "allocator retains freed memory (glibc, blocks up to 32 MiB)"),
    ],
)
def test_the_allocator_keeps_as_much_as_it_can(monkeypatch, limit, mapped, words):
    library = FakeLibrary(limit)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert fix_allocator() == words
    assert library.accepted == {M_MMAP_THRESHOLD: mapped, M_TRIM_THRESHOLD: THRESHOLDS[0]}


def test_elsewhere_the_allocator_stays_and_the_words_say_so(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert fix_allocator() == "allocator as by default (mallopt needs glibc)"
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.39"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeLibrary(limit=0))
    assert fix_allocator() == "allocator as by default (mallopt refused)"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert "has no attribute 'mallopt'" in fix_allocator()


@pytest.mark.nightly
def test_the_real_allocator_answers():
    # In a process of its own: the setting lasts for the life of the process.
    code = "from demask.machine.allocator import fix_allocator; print(fix_allocator())"
    status, out, err = own_process.run(code)
    expected = "retains freed" if platform.libc_ver()[0] == "glibc" else "as by default"
    assert status == 0 and out.startswith(f"allocator {expected}"), err


def test_a_lower_bound_is_below_the_ratio_and_an_upper_one_above():
    draw = random.Random(3)
    given, result = ([draw.gauss(1, 0.2) for _ in range(40)] for _ in range(2))
    ratio = median(given) / median(result)
    assert lower_bound(given, result) < ratio < 1 / lower_bound(result, given)
