"""explain(): predictions follow from bytes, and what does not pay is said not to."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace
from itertools import count

import pytest
import torch
from test_pilot_chain import perceptron
from torch import nn

from demask.errors import BadInput
from demask.machine.cost import Costs
from demask.ops import TABLE
from demask.pilot.chains import chain_cost as cost
from demask.pilot.chains import exact_conditions as chain
from demask.pilot.chains.chain_cost import NOMINAL, Uses, cached_shares, measured, reads
from demask.pilot.chains.chain_plan import LayerCounts
from demask.pilot.chains.exact_conditions import Columns
from demask.pilot.explain import explain

FIRST = (("", "columns"), ("bits:8", "certified"))


explained = importlib.import_module("demask.pilot.explain")


def inputs(n: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.rand(1, 3, 8, 8) for _ in range(n)]


def ticks(step: float):
    """A clock of which every look takes `step` seconds."""
    clock = count()
    return lambda: next(clock) * step


def test_bytes_of_each_mode():
    seen = LayerCounts(columns=100, first=200, rows=50)
    assert reads(400, 1000, "dense", seen).total == 4 * 400 * 1000
    assert reads(400, 1000, "columns", seen).total == 4 * 400 * 100
    one, two = (reads(400, 1000, mode, seen) for mode in ("certified", "two"))
    assert one.whole < 400 * 1000 and one.rows < 4 * 1000 * 50
    assert two.whole < one.whole


def test_seconds_are_bytes_over_bandwidth():
    moved = reads(4096, 784, "dense", LayerCounts(784, 4096, 4096))
    near = NOMINAL.seconds([moved], [1.0])
    assert near == pytest.approx(NOMINAL.call + NOMINAL.layer + moved.total * NOMINAL.near["dense"])
    flushed = NOMINAL.seconds([moved], [0.0])
    assert flushed - near == pytest.approx(moved.total * (NOMINAL.far["dense"] - NOMINAL.near["dense"]))
    assert near < NOMINAL.seconds([moved], [0.5]) < flushed


def test_caches_hold_what_is_read_most():
    """One of two calls reads each half, all of them the rest: least recently used goes first."""
    always, halves = torch.tensor([1.0]), torch.full((2,), 0.5)
    layers = [[Uses(torch.tensor([100.0]), always)], [Uses(torch.full((2,), 100.0), halves)]]
    assert cached_shares(layers, 300.0) == [1.0, 1.0]
    often, seldom = cached_shares(layers, 200.0)
    assert 0.7 < often <= 1 and 0.2 < seldom < often
    assert sum(cached_shares([[Uses(torch.tensor([400.0]), always)]], 100.0)) == pytest.approx(0.25, abs=0.01)


def test_what_pays_is_used():
    found = explain(perceptron(), inputs(), candidates=FIRST, machine=NOMINAL, clock=ticks(1e-3))
    columns, certified = found.lines
    assert columns.use and columns.exact and columns.loss == 0
    assert certified.seconds is not None and columns.seconds is not None
    assert found.seconds == pytest.approx(1e-3) and found.inputs == 3
    assert found.summary.startswith(("columns only", "use certified"))
    assert json.loads(json.dumps(found.to_dict()))["lines"][0]["condition"] == "columns"
    assert "use" in str(found)


def test_without_zeros_nothing_is_used():
    model = perceptron(live=-5.0)
    found = explain(model, inputs(), candidates=FIRST, machine=NOMINAL, clock=ticks(1e-3))
    assert [line.use for line in found.lines] == [False, False]
    assert found.summary == "use none: nothing pays here"
    assert "no zeros to speak of" in found.lines[0].why


def test_a_pilot_that_adds_nothing_to_columns_is_not_used():
    """The first layer's input is as good as all zeros, so certificates have nothing to save."""
    x = [torch.rand(1, 3, 8, 8) * (torch.rand(1, 3, 8, 8) < 0.02) for _ in range(3)]
    found = explain(perceptron(), x, candidates=FIRST, machine=NOMINAL, clock=ticks(1e-3))
    assert found.summary == "columns only, no pilot"
    assert not found.lines[1].use and "columns only, no pilot" in found.lines[1].why


def test_networks_without_chains():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    found = explain(model, inputs(), candidates=FIRST, machine=NOMINAL, clock=ticks(1e-3))
    assert not any(line.use for line in found.lines)
    assert "no linear layers" in found.lines[0].why


def test_a_pilot_as_large_as_the_network_does_not_pay():
    pairs = (("bits:8", "skip:0.5"), ("nonsense", "skip:0.5"))
    found = explain(perceptron(), inputs(), candidates=pairs, machine=NOMINAL, clock=ticks(1e-3))
    assert not any(line.use for line in found.lines)
    assert "the pilot's included" in found.lines[0].why and found.lines[0].gain == 1
    assert found.lines[1].why.startswith("refused")


def test_what_pays_and_changes_answers_is_not_used(monkeypatch):
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*convs, nn.Conv2d(64, 8, 3), nn.Flatten(), nn.Linear(800, 10)).eval()
    given = [torch.randn(1, 3, 12, 12) for _ in range(4)]
    pairs = (("channels:0.25", "skip:0.25"),)
    ask = {"candidates": pairs, "machine": NOMINAL}
    beside = explained._run_alternately  # half the time, whatever the clock says
    monkeypatch.setattr(explained, "_run_alternately", lambda *given: (0.5, beside(*given)[1]))
    careful = explain(model, given, **ask, clock=ticks(1.0)).lines[0]
    assert careful.gain > 1.2 and careful.loss > 0.01  # type: ignore[operator]
    assert not careful.use and "of the answers differ, 1.0% may" in careful.why
    assert explain(model, given, **ask, loss=1.0, clock=ticks(1.0)).lines[0].use


def test_what_no_count_sees_is_not_used():
    """Kernels of conditions in other spellings are no operations of torch."""
    pairs = (("bits:8", "certified:bits=8:levels=2"),)
    (two,) = explain(perceptron(), inputs(), candidates=pairs, machine=NOMINAL, clock=ticks(1e-3)).lines
    assert two.exact and two.condition == "certified:bits=8:levels=2"


def test_layers_that_are_no_chain_say_why():
    model, x = perceptron().double(), [one.double() for one in inputs()]
    found = explain(model, x, candidates=FIRST, machine=NOMINAL, clock=ticks(1e-3))
    assert "float64" in found.lines[0].why


@pytest.mark.parametrize("x", [torch.full((1, 3, 8, 8), math.nan), torch.rand(0, 3, 8, 8)])
def test_inputs_that_say_nothing(x: torch.Tensor):
    pairs = (("", "columns"), ("bits:8", "route:0.5"))
    found = explain(perceptron(), [x], candidates=pairs, machine=NOMINAL, clock=ticks(1e-3))
    assert not found.lines[1].use


def test_no_inputs():
    with pytest.raises(BadInput, match="expected inputs"):
        explain(perceptron(), [])


def kept(costs, seconds):
    """The costs with answers to all questions of a machine, after a round trip through a file."""
    costs._known |= dict.fromkeys(cost._measurement_names(costs), seconds)
    costs.save()
    return costs


def test_conditions_are_decided_by_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost.here(1) is NOMINAL
    costs = Costs.open(threads=1)
    usual = dict.fromkeys(cost._measurement_names(costs)[:2], 1e-05)
    large = [cost._large_layer(costs, kind, room) for room in (cost.NEAR, cost.MIDDLE, cost.FAR) for kind in cost.KINDS]
    costs._known |= {q.name: q.bytes * 2e-11 + 1e-5 for q in large} | usual
    costs.save()
    found = cost.here(1)
    assert found is not NOMINAL and found == measured(costs)
    assert cost.here(2) is NOMINAL


def test_numbers_of_a_busy_machine_are_not_believed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept(Costs.open(threads=1), 0.02)
    assert cost.here(1) is NOMINAL
    for room in ("NEAR", "FAR"):
        monkeypatch.setattr(cost, room, 3 * 2**16)
    costs = kept(Costs.open(threads=1, clock=ticks(1.0)), 0.02)
    assert measured(costs) is NOMINAL
    assert not any(map(costs.measured, cost._measurement_names(costs)))


def test_modes_are_chosen_by_the_machine(monkeypatch):
    x = inputs()[0]
    cheap = Columns().applied(perceptron(), (x,), None, None, TABLE).conditioned.decisions
    assert "columns" in {one.what for one in cheap}
    dear = replace(NOMINAL, call=1.0)  # next to which weights cost nothing
    monkeypatch.setattr(chain, "here", lambda: dear)
    found = Columns().applied(perceptron(), (x,), None, None, TABLE).conditioned.decisions
    assert {one.what for one in found} == {"as it was"}


def test_a_dense_layer_is_told_its_zeros(monkeypatch):
    slow = {at: getattr(NOMINAL, at) | {"columns": 1e-9} for at in ("near", "far")}
    monkeypatch.setattr(chain, "here", lambda: replace(NOMINAL, **slow))
    x = torch.rand(1, 192) * (torch.arange(192) % 2)
    net = nn.Sequential(nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    first = Columns().applied(net, (x,), None, None, TABLE).conditioned.decisions[0]
    assert "50.0% of its inputs are not zero" in first.why


@pytest.mark.nightly
def test_this_machine_is_measured():
    found = measured(Costs.open(False, threads=1))
    assert all(0 < found.near[kind] <= found.far[kind] < 1e-8 for kind in found.near)
    assert found.cache > 0
