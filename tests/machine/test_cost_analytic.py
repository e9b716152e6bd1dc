"""Costs that are worked out, of constants or of a calibration, and how far they are off."""

from functools import partial
from math import inf, isnan, log

import pytest
import torch

from demask.failures import strict
from demask.machine.cost import COPY, MATMUL, SMALLEST, CostError, Costs, Question
from test_cost import Asked, Clock, raising, refused, ticking, write


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
