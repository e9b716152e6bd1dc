"""Costs are measured once, kept whole or not at all, and worked out where none may be measured."""

import gc
import json
import os
import subprocess
import sys
from functools import partial
from itertools import count
from math import inf, isnan, log
from pathlib import Path

import pytest
import torch

from demask.errors import BadInput
from demask.failures import strict
from demask.installation import VERSION
from demask.machine import cost
from demask.machine.cost import COPY, MATMUL, SMALLEST, CostError, Costs, Question

CALIBRATION = {SMALLEST.name, MATMUL.name, COPY.name}


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch):
    """Other tests run at the same time."""
    monkeypatch.setattr(cost, "waiting_seconds", lambda: 0.0)


class Clock:
    """Seconds that pass only where a call asks for them."""

    def __init__(self):
        self.now, self.readings = 0.0, 0

    def __call__(self):
        self.readings += 1
        return self.now


class Asked:
    """A question whose calls take these seconds, the last for good, and what was asked of it."""

    def __init__(self, clock=None, *seconds, name="relu"):
        self.clock, self.seconds = clock or Clock(), list(seconds or [1.0])
        self.made = self.calls = 0
        self.question = Question(name, 8, 64, self.make)

    def make(self):
        self.made += 1
        return self.call

    def call(self):
        self.clock.now += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


def advance(clock, seconds):
    clock.now += seconds


def refuse(error):
    raise error


def refused():
    raise AssertionError("nothing was to be measured")


def ticking(path=False, threads=1, **options):
    """Costs by a clock on which every call takes one second."""
    return Costs.open(path, threads=threads, clock=count().__next__, **options)


def filled(path, name="relu", **options):
    """The file after one question was measured and saved."""
    costs = ticking(path, **options)
    costs.seconds(Asked(name=name).question)
    costs.save()
    return costs


def write(path, answers):
    path.write_text(json.dumps({"version": 1, "machines": {ticking().machine: answers}}))


def stored(path):
    return json.loads(path.read_text())["machines"]


# --- the cache ---


def test_what_one_process_measured_the_next_one_knows(tmp_path):
    path = tmp_path / "new" / "folder" / "costs.json"
    clock = Clock()
    first, asked = Costs.open(path, threads=1, clock=clock), Asked(clock, 0.25)
    assert not first.measured("relu")
    assert [first.seconds(asked.question), first.seconds(asked.question)] == [0.25, 0.25]
    assert first.measured("relu")
    assert not path.exists()
    first.save()
    second = Costs.open(path, threads=1, clock=refused)
    assert second.measured("relu")
    assert second.seconds(asked.question) == 0.25
    assert Costs.open(path, threads=1, measure=False).seconds(asked.question) == 0.25
    assert asked.made == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]


def test_what_a_busy_machine_measured_is_measured_again(tmp_path):
    """Calls of 1 to 9 seconds: their median counts in this process alone."""
    path, clock = tmp_path / "costs.json", Clock()
    asked = Asked(clock, *[1.0] * cost.WARMUP, 1.0, 9.0, 5.0)
    costs = Costs.open(path, threads=1, clock=clock)
    calm = Asked(clock, 1.0, 1.0, 1.0, 1.1, 1.2, name="calm")
    assert [costs.seconds(asked.question), costs.seconds(asked.question)] == [5.0, 5.0]
    costs.seconds(calm.question)
    costs.save()
    assert set(stored(path)[costs.machine]) == {"calm", *CALIBRATION}
    costs.forget(["relu"])
    assert costs.seconds(asked.question) == 5.0  # the last seconds, always
    costs.save()
    assert "relu" in stored(path)[costs.machine]


def test_what_threads_waited_for_is_measured_again(tmp_path, monkeypatch):
    """A process that shares its only core waits for half of the time; its measurements are used, and not written."""
    waited = iter([5.0, 5.2, 7.0, 7.01])
    monkeypatch.setattr(cost, "waiting_seconds", lambda: next(waited))
    costs = Costs.open(tmp_path / "costs.json", threads=1, clock=Clock())
    costs.time_calls({"busy": partial(advance, costs.clock, 0.5)}, 3)
    costs.time_calls({"idle": partial(advance, costs.clock, 0.5)}, 3)
    costs.save()
    assert costs.known("busy") == costs.known("idle") == 0.5
    again = Costs.open(tmp_path / "costs.json", threads=1)
    assert again.known("busy") is None and again.known("idle") == 0.5


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count the waiting")
def test_the_waiting_of_threads_is_counted() -> None:
    """Two processes compute on one core for half a second."""
    script = """
import os, time
from demask.machine.clock import waiting_seconds
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
child = os.fork()
before, end = waiting_seconds(), time.perf_counter() + 0.5
while time.perf_counter() < end:
    pass
if child:
    os.waitpid(child, 0)
    print(waiting_seconds() - before)
os._exit(0)
"""
    shown = subprocess.run([sys.executable, "-u", "-c", script], check=True, capture_output=True, text=True).stdout
    assert 0.1 < float(shown) < 0.6


def test_another_count_of_threads_is_another_machine(tmp_path):
    path = tmp_path / "costs.json"
    filled(path, threads=1)
    assert not ticking(path, threads=2).measured("relu")
    filled(path, threads=2)
    assert len(stored(path)) == 2
    assert all(set(answers) == CALIBRATION | {"relu"} for answers in stored(path).values())


def test_the_machine_says_what_its_numbers_hold_for(monkeypatch):
    machine = ticking(threads=3).machine
    for word in ("; 3 threads; ", torch.__version__, torch.backends.cpu.get_cpu_capability()):
        assert word in machine

    monkeypatch.setattr(Path, "read_text", lambda *_, **__: refuse(OSError("no /proc here")))
    elsewhere = ticking(threads=3).machine
    assert elsewhere.endswith(f"; demask {VERSION}")
    assert not elsewhere.startswith(";")  # it has some name


CORRUPT = {
    "empty": b"",
    "binary": b"\x00\xff\xfe\x80",
    "truncated": b'{"version": 1, "machines": {"M": {"relu": 0.',
    "deep": b"[" * 100_000,
    **{f"only {text}": text.encode() for text in ["[1, 2, 3]", "1", "null"]},
    "foreign": b'{"name": "demo", "dependencies": {}}',
    "another version": b'{"version": 2, "machines": {"M": {"relu": 0.5}}}',
    "no version": b'{"machines": {"M": {"relu": 0.5}}}',
    "no machines": b'{"version": 1}',
    "machines a list": b'{"version": 1, "machines": [{"relu": 0.5}]}',
    "machine a number": b'{"version": 1, "machines": {"M": 0.5}}',
    "machine a list": b'{"version": 1, "machines": {"M": [["relu", 0.5]]}}',
    "huge integer": b'{"version": 1, "machines": {"M": {"relu": 1%s}}}' % (b"0" * 5000),
    **{
        f"answer {bad}": b'{"version": 1, "machines": {"M": {"relu": %s}}}' % bad.encode()
        for bad in ["NaN", "-1.5", "0.0", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "null"]
    },
    "answer a list": b'{"version": 1, "machines": {"M": {"relu": [0.5]}}}',
    "too large": b'{"version": 1, "machines": {"M": {"relu": 0.5}}}' + b" " * 2**24,
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_ignored_and_overwritten(tmp_path, name):
    path = tmp_path / "costs.json"
    path.write_bytes(CORRUPT[name].replace(b'"M"', json.dumps(ticking().machine).encode()))
    costs, asked = ticking(path), Asked()
    assert not costs.measured("relu")
    assert costs.seconds(asked.question) == 1.0
    assert asked.made == 1
    costs.save()
    assert stored(path) == {costs.machine: dict.fromkeys([*CALIBRATION, "relu"], 1.0)}


def test_a_wrong_answer_among_good_ones_is_dropped_alone(tmp_path):
    path = tmp_path / "costs.json"
    write(path, {"good": 0.5, "bad": -0.5})
    costs = ticking(path)
    assert (costs.measured("good"), costs.measured("bad")) == (True, False)


def test_two_writers_keep_what_both_measured(tmp_path):
    path, clock = tmp_path / "costs.json", Clock()
    one, other = (Costs.open(path, threads=1, clock=clock) for _ in range(2))
    one.seconds(Asked(clock, 2.0, name="one").question)
    other.seconds(Asked(clock, 4.0, name="other").question)
    one.seconds(Asked(clock, 2.0, name="both").question)
    other.seconds(Asked(clock, 4.0, name="both").question)
    for last, both in [(one, 2.0), (other, 4.0), (one, 2.0)]:
        last.save()
        assert stored(path)[last.machine]["both"] == both  # the last writer's
    assert set(stored(path)[one.machine]) == CALIBRATION | {"one", "other", "both"}


def test_other_machines_survive_and_the_oldest_of_many_goes(tmp_path):
    path = tmp_path / "costs.json"
    others = {f"machine {number}": {"relu": 0.5} for number in range(7)}
    path.write_text(json.dumps({"version": 1, "machines": others}))
    ours = filled(path).machine
    assert list(stored(path)) == [*others, ours]
    assert {name: stored(path)[name] for name in others} == others
    newer = filled(path, threads=2).machine
    assert list(stored(path)) == [*list(others)[1:], ours, newer]
    filled(path, name="gelu")
    assert list(stored(path)) == [*list(others)[1:], newer, ours]


def test_the_oldest_answers_go_and_stay_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "MAX_ANSWERS", 4)
    path = tmp_path / "costs.json"
    costs = ticking(path)
    for name in "abcde":
        costs.seconds(Asked(name=name).question)
    for _ in range(2):
        costs.save()
        assert list(stored(path)[costs.machine]) == ["b", "c", "d", "e"]
        assert costs.measured("a")


def test_the_file_stays_smaller_than_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "MAX_BYTES", 2000)
    path = tmp_path / "costs.json"
    costs = ticking(path)
    names = [f"{number:0100}" for number in range(40)]
    for name in names:
        costs.seconds(Asked(name=name).question)
    monkeypatch.setattr(cost, "MAX_ANSWERS", 40)
    costs.save()
    assert path.stat().st_size <= 2000
    assert list(stored(path)[costs.machine]) == names[-10:]
    assert ticking(path).measured(names[-1])


@pytest.mark.parametrize("place", ["below a file", "a folder", "replace refused"])
def test_a_place_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    path = tmp_path / {"below a file": "file/costs.json", "a folder": "."}.get(place, "costs.json")
    if place == "replace refused":
        monkeypatch.setattr(os, "replace", lambda *_: refuse(PermissionError("in use")))
    assert filled(path).measured("relu")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write there")
def test_a_closed_folder_is_no_error(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    filled(folder / "costs.json")
    assert list(folder.iterdir()) == []


def test_an_interrupted_save_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    filled(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: refuse(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        filled(path, name="gelu")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["costs.json"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    old, new = tmp_path / ".costs-old", tmp_path / ".costs-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))  # another process may be writing in the new one
    filled(tmp_path / "costs.json")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".costs-new", "costs.json"]


def test_no_file_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs = filled(False)
    assert costs.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_later_change_of_folder_does_not_move_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = ticking("costs.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    costs.save()
    assert stored(tmp_path / "costs.json") == {}  # no entry for a machine without answers


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {}, "home/.cache"),
        ("linux", {"XDG_CACHE_HOME": "{}/mine"}, "mine"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache"),
        ("linux", {"HOME": "nowhere"}, None),
        ("linux", {"HOME": "nowhere", "XDG_CACHE_HOME": "{}/mine"}, "mine"),
        ("darwin", {"XDG_CACHE_HOME": "{}/mine"}, "home/Library/Caches"),
        ("win32", {}, "home/AppData/Local"),
        ("win32", {"LOCALAPPDATA": "{}/local", "XDG_CACHE_HOME": "{}/mine"}, "local"),
    ],
)
def test_the_file_is_where_the_platform_keeps_caches(tmp_path, monkeypatch, system, variables, expected):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "{}/home", **variables}.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    path = Path(os.path.realpath(tmp_path)) / f"{expected}/demask/costs.json"
    assert ticking(None).path == (path if expected else None)


# --- measuring ---


@pytest.mark.parametrize(("seconds", "calls"), [(2**-20, 15), (2**-10, 5), (2**-9, 3), (0.125, 3), (4.0, 3)])
def test_a_call_is_timed_until_it_is_enough(seconds, calls):
    clock = Clock()
    asked = Asked(clock, seconds)
    assert Costs.open(False, threads=1, clock=clock).seconds(asked.question) == seconds
    assert asked.calls == 2 + calls  # two of them untimed


def test_the_answer_is_the_median_without_the_warmup():
    clock = Clock()
    asked = Asked(clock, 64.0, 32.0, 8.0, 1.0, 2.0)
    assert Costs.open(False, threads=1, clock=clock).seconds(asked.question) == 2.0


def test_calls_that_were_held_up_do_not_end_the_sampling():
    clock = Clock()
    asked = Asked(clock, 0.0, 0.0, 0.5, 0.5, 0.5, 2**-20)
    assert Costs.open(False, threads=1, clock=clock).seconds(asked.question) == 0.5
    asked = Asked(clock, 0.0, 0.0, 0.5, 2**-20, 0.5, 2**-20, name="other")
    assert Costs.open(False, threads=1, clock=clock).seconds(asked.question) == 2**-20
    assert asked.calls == 2 + 15


def test_a_clock_that_stands_still_gives_an_answer_with_a_logarithm():
    costs = Costs.open(False, threads=1, clock=lambda: 7.0)
    assert costs.seconds(Asked().question) > 0
    assert costs.error().count == 1


@pytest.fixture
def threads():
    """A count that torch is set to, put back after."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def raising(_=None):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("make", [raising, lambda: raising], ids=["make", "call"])
@pytest.mark.parametrize("collects", [True, False])
@strict(False)
def test_what_raises_does_not_exist_and_is_not_kept(tmp_path, threads, make, collects):
    path, made = tmp_path / "costs.json", []
    costs = ticking(path, threads=2)
    (gc.enable if collects else gc.disable)()
    try:
        for _ in range(2):
            question = Question("torn", 8, 64, lambda: made.append(1) or make())
            assert costs.seconds(question) == inf
        after = gc.isenabled()
    finally:
        gc.enable()
    assert len(made) == 1  # these costs remember it, the file does not
    assert after == collects
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert not costs.measured("torn")
    assert costs.error().count == 0
    costs.save()
    assert set(stored(path)[costs.machine]) == CALIBRATION
    assert ticking(path, threads=2).seconds(Asked(name="torn").question) == 1.0


@strict(False)
def test_one_that_failed_here_keeps_the_answer_of_another_process(tmp_path):
    path = tmp_path / "costs.json"
    costs = ticking(path)
    assert costs.seconds(Question("relu", 8, 64, raising)) == inf
    filled(path)
    costs.save()
    assert stored(path)[costs.machine]["relu"] == 1.0
    assert costs.seconds(Asked().question) == inf  # an answer does not change meanwhile


def test_an_interrupt_passes_and_puts_all_back(threads):
    costs = ticking(threads=2)
    with pytest.raises(KeyboardInterrupt):
        costs.seconds(Question("slow", 8, 64, lambda: lambda: refuse(KeyboardInterrupt())))
    assert torch.get_num_threads() == threads
    assert gc.isenabled()
    assert not costs.measured("slow")


def test_calls_run_alone_and_all_is_put_back(threads):
    seen = set()

    def look():
        seen.add((torch.get_num_threads(), torch.is_grad_enabled(), gc.isenabled()))

    ticking(threads=2).seconds(Question("look", 8, 64, lambda: look() or look))
    assert seen == {(2, False, False)}
    assert Costs.open(False).threads == threads  # those of torch unless said
    assert (torch.get_num_threads(), torch.is_grad_enabled(), gc.isenabled()) == (3, True, True)


@pytest.mark.parametrize("threads", [0, -1])
def test_senseless_threads_are_refused(threads):
    with pytest.raises(BadInput, match=f"threads from 1 to .*got {threads}"):
        Costs.open(False, threads=threads)


def test_each_reading_of_the_clock_waits_for_a_gpu_in_use(monkeypatch):
    events = []
    clock = count()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    costs = Costs.open(False, threads=1, clock=lambda: events.append("read") or next(clock))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    costs.seconds(Asked(name="cpu").question)
    assert set(events) == {"read"}
    events.clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    costs.seconds(Asked(name="gpu").question)
    assert events == ["wait", "read"] * 6


def test_without_measuring_the_answer_is_worked_out_of_constants():
    def answer(flops, size, threads=1):
        costs = Costs.open(False, threads=threads, measure=False, clock=refused)
        return costs.seconds(Question("any", flops, size, refused))

    assert answer(0, 0) == 3e-6
    assert answer(5e10, 0) == answer(0, 1e10) == answer(5e10, 1e10) == 1 + 3e-6
    assert answer(5e10, 0, threads=4) == 0.25 + 3e-6
    costs = Costs.open(False, measure=False, clock=refused)
    costs.seconds(Question("any", 1, 1, refused))
    assert not costs.measured("any")


def test_without_measuring_the_file_gives_the_calibration(tmp_path):
    path = tmp_path / "costs.json"
    numbers = {SMALLEST.name: 0.125, MATMUL.name: 2.0, COPY.name: 4.0}
    write(path, numbers)
    costs = Costs.open(path, threads=1, measure=False, clock=refused)
    assert costs.seconds(Question("a", MATMUL.flops, 0, refused)) == 2.125
    assert costs.seconds(Question("b", MATMUL.flops, 3 * COPY.bytes, refused)) == 12.125
    del numbers[COPY.name]
    write(path, numbers)
    costs = Costs.open(path, threads=1, measure=False, clock=refused)
    assert costs.seconds(Question("a", 5e10, 0, refused)) == 1 + 3e-6


def test_the_calibration_is_asked_for_once(tmp_path):
    path, clock = tmp_path / "costs.json", Clock()
    costs = Costs.open(path, threads=1, clock=clock)
    costs.seconds(Asked(clock, name="a").question)
    assert clock.readings == 3 * 2 * 15 + 2 * 3  # calibration, on which no time passes, and "a"
    for _ in range(2):
        costs.seconds(Asked(clock, name="b").question)
        costs.error()
    assert clock.readings == 3 * 2 * 15 + 2 * 2 * 3
    costs.save()
    later = Costs.open(path, threads=1, clock=clock)
    later.seconds(Asked(clock, name="c").question)
    assert clock.readings == 3 * 2 * 15 + 3 * 2 * 3


@strict(False)
def test_a_machine_that_cannot_be_calibrated_has_constants(monkeypatch):
    monkeypatch.setattr(torch, "mm", raising)
    costs = ticking()
    assert costs.analytic(Question("any", 5e10, 0, refused)) == 1 + 3e-6
    assert costs.seconds(Asked().question) == 1.0


@pytest.mark.parametrize("question", [SMALLEST, MATMUL, COPY], ids=lambda question: question.name)
def test_the_calibration_does_what_it_says(question):
    result = question.make()()
    expected = {MATMUL.name: torch.full((512, 512), 512.0), COPY.name: torch.ones(2**21)}
    assert torch.equal(result, expected.get(question.name, torch.ones(8)))
    if question is COPY:
        assert question.bytes == 2 * result.nbytes
    if question is MATMUL:
        assert question.flops == 2 * 512**3
        assert question.bytes == 3 * result.nbytes


def test_the_error_is_that_of_the_questions_asked_and_measured(tmp_path):
    path = tmp_path / "costs.json"
    answers = {SMALLEST.name: 1.0, MATMUL.name: 1.0, COPY.name: 1.0}
    answers |= {"exact": 1.0, "half": 0.5, "twice": 2.0, "quarter": 0.25, "not asked": 64.0}
    write(path, answers)
    costs = Costs.open(path, threads=1, measure=False)
    assert costs.error().count == 0
    assert isnan(costs.error().median)
    for name in ("exact", "half", "twice", "half", "unknown"):
        costs.seconds(Question(name, 0, 0, refused))
    assert costs.error().count == 3
    assert costs.error().median == pytest.approx(log(2))
    costs.seconds(Question("quarter", 0, 0, refused))
    found = costs.error()
    assert found == CostError(4, found.median, found.high)
    assert found.median == pytest.approx(log(2))
    assert found.high == pytest.approx(log(2) * 1.7)  # 0.7 of the way from log(2) to log(4)
    costs.seconds(Question("exact", inf, 0, refused))  # no analytic answer
    assert costs.error().count == 3


def test_real_calls_by_the_real_clock():
    costs = Costs.open(False)
    question = Question("relu(f32[9])", 9, 72, lambda: partial(torch.relu, torch.ones(9)))
    assert 0 < costs.seconds(question) < inf
    assert costs.error().count == 1
