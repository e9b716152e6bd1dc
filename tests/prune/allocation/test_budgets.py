"""Budgets: never exceeded, used up, met in the milliseconds that are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.errors import BadInput
from demask.ops import TABLE
from demask.prune import L1, L2, Cubic, Latency, LatencyPlan, MACs, OneShot, Pruner
from demask.prune.allocation import layer_seconds
from demask.prune.allocation.layer_seconds import NetworkTime, NetworkTimer, Width, resized
from demask.prune.removal_cost import Extent
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune.layer_costs import Layer


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24),
        nn.ReLU(),
        nn.Conv2d(24, 20, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(20, 5),
    ).eval()


X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def macs_after(model: nn.Module) -> int:
    return demask.demask(model, (X,)).demasked.after.macs


@pytest.mark.parametrize("share", [0.7, 0.3])
def test_macs_are_within_the_budget_and_use_it(share: float) -> None:
    model = small()
    whole = macs_after(small())
    pruned = Pruner(model, X, allocation=MACs(budget=share)).step()
    assert 0.93 * share * whole < pruned.after.macs <= share * whole
    assert macs_after(model) == pruned.after.macs
    again = small()
    Pruner(again, X, allocation=MACs(budget=int(share * whole))).step()
    for a, b in zip(model.buffers(), again.buffers(), strict=True):
        assert torch.equal(a, b)  # the masks among them


@pytest.mark.parametrize("score", [L1(), L2()])
def test_layers_of_small_weights_are_no_less_important(score: Any) -> None:
    """A rectifier passes a factor on, so both networks compute the same."""
    choices = []
    for factor in (1.0, 0.01):
        torch.manual_seed(0)
        net = nn.Sequential(*(m for n in (8, 32, 32) for m in (nn.Linear(n, 32), nn.ReLU())), nn.Linear(32, 4))
        for parameter in net[0].parameters():
            parameter.data *= factor
        net[2].weight.data /= factor
        pruner = Pruner(net, torch.zeros(1, 8), score=score, allocation=MACs(0.5))
        choices.append(pruner.step().left)
    assert choices[0] == choices[1]


def test_a_schedule_reaches_the_budget_in_steps() -> None:
    pruner = Pruner(small(), X, allocation=MACs(0.4), schedule=Cubic(0, 0.6, steps=3))
    steps = [pruner.step() for _ in range(4)]
    macs = [step.after.macs for step in steps]
    assert macs[0] > macs[1] >= macs[2] == macs[3]  # no slice that went returns
    whole = steps[0].before.macs
    assert 0.36 * whole < macs[2] <= 0.4 * whole
    expected = [whole * (1 - 0.6 * Cubic(0, 0.6, steps=3)(k) / 0.6) for k in (1, 2)]
    assert all(0.9 * b < a <= b for a, b in zip(macs, expected, strict=False))


def test_floors_are_kept() -> None:
    pruned = Pruner(small(), X, allocation=MACs(0.35, floor=0.5)).step()
    assert all(2 * pruned.left[name] >= pruned.units[name] for name in pruned.units)


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        (MACs(10), r"budget of at least [\d,]+ MACs"),
        (MACs(0.3, floor=0.9), r"budget of at least [\d,]+ MACs"),
        (Latency(1e-6, measure=lambda *a: NetworkTime(1.0, {"torch": 1.0})), "at least 1e\\+03 ms"),
    ],
)
def test_a_budget_that_nothing_meets_changes_nothing(allocation: Any, words: str) -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadInput, match=words):
        Pruner(model, X, allocation=allocation).step()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_budgets_remove_slices() -> None:
    with pytest.raises(BadInput, match="structure of slices"):
        Pruner(small(), X, structure="element", allocation=MACs(0.5)).step()


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan, True, "5"])
def test_wrong_budgets(wrong: Any) -> None:
    with pytest.raises(BadInput, match="expected budget"):
        MACs(wrong)
    with pytest.raises(BadInput, match="expected budget_ms"):
        Latency(wrong)
    with pytest.raises(BadInput, match="expected a floor"):
        MACs(0.5, floor=1.5)


def machine(layers: Callable[[int], float], between: float, runner: str = "torch") -> Callable[..., NetworkTime]:
    """A machine whose networks take seconds by their MACs, and some between layers."""

    def measure(network: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> NetworkTime:
        program = capture_program(network, args, kwargs, None)
        seconds = between + layers(shrink_program(program, TABLE)[1].after.macs)
        return NetworkTime(seconds, {runner: seconds})

    return measure


@pytest.fixture
def macs_as_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer takes a nanosecond per MAC."""

    def seconds(asker: Any, runner: str, layer: Layer) -> float:
        return 1e-9 * math.prod(layer.out) * math.prod(layer.weight[1:])

    monkeypatch.setattr(layer_seconds, "layer_seconds", seconds)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("macs_as_seconds")
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize(
    "measure",
    [
        machine(lambda macs: 1e-9 * macs, 0),
        machine(lambda macs: 1e-9 * macs, 2e-5, "segment"),
        machine(lambda macs: 1.3e-9 * macs, 1e-5),
        machine(lambda macs: 5e-8 * macs**0.8, 1e-5),
    ],
    ids=["exact", "between", "slower", "curved"],
)
def test_a_latency_is_met_and_was_predicted(measure: Any, share: float) -> None:
    whole = measure(small(), (X,), {}).seconds
    budget = 1e3 * (share * whole + 1e-5)
    model = small()
    latency = Latency(budget, cache=False, measure=measure)
    plan = Pruner(model, X, allocation=latency).step().plan
    assert isinstance(plan, LatencyPlan)
    assert plan.chosen in plan.trials and 1 <= len(plan.trials) <= 6
    assert plan.chosen.measured_ms == pytest.approx(1e3 * measure(model, (X,), {}).seconds)
    assert 0.8 * budget <= plan.chosen.measured_ms <= budget
    assert abs(plan.chosen.predicted_ms / plan.chosen.measured_ms - 1) <= 0.1
    assert "trial 1" in str(plan) and "(chosen)" in str(plan)


@pytest.mark.usefixtures("macs_as_seconds")
def test_all_slices_stay_in_a_network_that_is_fast_enough() -> None:
    latency = Latency(1e3, cache=False, measure=machine(lambda macs: 1e-9 * macs, 0))
    pruned = Pruner(small(), X, allocation=latency, schedule=OneShot(0.9)).step()
    assert pruned.left == pruned.units and pruned.after == pruned.before


def test_layers_at_other_widths() -> None:
    geometry = ((1, 1), (1, 1), (1, 1), 1)
    layer = Layer(
        "aten.conv2d.default", (2, 16, 8, 8), (24, 16, 3, 3), geometry, True, torch.float32, torch.device("cpu")
    )
    narrow = resized(layer, 5, 7)
    assert (narrow.x, narrow.weight, narrow.out) == ((2, 5, 8, 8), (7, 5, 3, 3), (2, 7, 8, 8))
    depthwise = Layer(
        layer.target, (2, 16, 8, 8), (16, 1, 3, 3), (*geometry[:3], 16), True, torch.float32, torch.device("cpu")
    )
    narrow = resized(depthwise, 6, 6)
    assert narrow.x[1] == narrow.weight[0] == narrow.geometry[3] == 6 and narrow.weight[1] == 1
    linear = Layer("aten.linear.default", (4, 9, 32), (8, 32), (), True, torch.float32, torch.device("cpu"))
    assert resized(linear, 20, 8).x == (4, 9, 20) and resized(linear, 20, 8).weight == (8, 20)


def test_widths_follow_counts() -> None:
    positions = torch.tensor([2, 2, 2])
    width = Width.of((Extent(4, {"a": positions}), Extent(3, {})))
    assert width.full == 30 and width.at({"a": 1}) == 18
    assert width.knots() == (1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30)


class Machine:
    """A clock, and networks that take its time: `pace` times theirs."""

    def __init__(self) -> None:
        self.now, self.pace = 0.0, 1.0

    def __call__(self) -> float:
        return self.now

    def network(self, seconds: float) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            self.now += self.pace * seconds
            return x

        network = nn.Identity()
        network.forward = forward
        return network


@pytest.mark.parametrize("longest", [1e-2, 2.0])  # timed by blocks, and by calls
def test_networks_are_timed_at_one_speed_of_the_machine(longest: float) -> None:
    machine = Machine()
    timer = NetworkTimer(threads=1, clock=machine)
    assert timer.seconds_of(machine.network(longest), (X,), {}) == pytest.approx(longest)
    for pace in (1.9, 0.8):
        machine.pace = pace
        seconds = timer.seconds_of(machine.network(0.3 * longest), (X,), {})
        assert seconds == pytest.approx(0.3 * longest)
    assert timer.ratios == pytest.approx([1.9, 0.8])


def test_networks_are_timed_by_their_quiet_calls() -> None:
    seconds = NetworkTimer(threads=1).seconds_of(nn.Linear(64, 64), (torch.randn(8, 64),), {})
    assert 0 < seconds < 1e-2
