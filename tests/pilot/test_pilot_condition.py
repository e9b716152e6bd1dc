"""condition(): channels by what a pilot finds important, and the front door to all conditions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.ops import TABLE
from demask.pilot.condition import KINDS, condition, condition_of, slower
from demask.pilot.conditions.base import Condition, Decision, text
from demask.pilot.conditions.channel_conditions import ConstantChannels, Precision, Skip, targets_of
from demask.pilot.conditions.channel_conditions import PilotValue as Value
from demask.pilot.data.collect import collect
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.simplifiers.rounding import Bits
from demask.pilot.simplifiers.simplify import simplify
from demask.shrink.pipeline import canonicalize, capture_program


class Net(nn.Module):
    """Two convolutions, the second added to the first; a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.end = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.a(x)))
        return self.end((y + self.b(y)).mean((2, 3)))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean.normal_()
    return model


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def by_hand(net: Net, x: Tensor, a: Tensor, b: Tensor, others=(0.0, 0.0)) -> Tensor:
    """The network with channels outside a and b set to `others`."""
    first = torch.relu(net.norm(net.a(x)))
    y = put(first, a, others[0])
    return net.end((y + put(net.b(y), b, others[1])).mean((2, 3)))


def rounded(net: Net, x: Tensor, by: str | Bits) -> Net:
    """The simplified network, as a module of its own class."""
    made = Net().eval()
    made.load_state_dict(simplify(net, (x,), by=by).state_dict())
    return made


def put(value: Tensor, index: Tensor, other: float | Tensor) -> Tensor:
    kept = torch.zeros(value.shape[1], dtype=torch.bool)
    kept[index] = True
    return torch.where(kept[:, None, None], value, torch.as_tensor(other))


def test_targets_end_before_sums(net: Net, x: Tensor):
    found, left = targets_of(Analysis(canonicalize(capture_program(net, (x,), None, None), TABLE), TABLE))
    assert [(t.layer, t.node.name, t.axis, t.size) for t in found] == [("a", "relu", 1, 8), ("b", "conv2d_1", 1, 8)]
    assert left == (Decision("end", "dense", "the network's output is returned in full"),)


def test_skip_sets_what_is_unimportant_to_zero(net: Net, x: Tensor):
    half = condition(net, (x,), pilot="bits:4", condition="skip:0.5", check=False)
    found = half(x)
    a, b = half.last
    pilot = rounded(net, x, "bits:4")
    seen = torch.relu(pilot.norm(pilot.a(x))).abs().mean((2, 3)).amax(0)  # of the batch the largest
    assert a.tolist() == sorted(seen.topk(4).indices.tolist())
    assert len(b) == 4
    torch.testing.assert_close(found, by_hand(net, x, a, b))
    assert not half.conditioned.exact
    assert half.conditioned.pilot == "bits:4"
    torch.testing.assert_close(half(x[:1]).shape, torch.Size([1, 4]))


@pytest.mark.nightly
def test_all_kept_is_the_network(net: Net, x: Tensor):
    for text_ in ("skip:1.0", "constant:1.0", "value:1.0", "skip:threshold=0.0"):
        made = condition(net, (x,), pilot="bits:4", condition=text_, check=False)
        torch.testing.assert_close(made(x), net(x))


@pytest.mark.nightly
def test_a_threshold_is_of_the_mean(net: Net, x: Tensor):
    made = condition(net, (x,), pilot="bits:8", condition="skip:threshold=1.0", check=False)
    made(x)
    magnitudes = made.pilot(x)
    assert made.last[0].tolist() == [k for k, m in enumerate(magnitudes[0]) if m > magnitudes[0].mean()]
    none = condition(net, (x,), pilot="bits:8", condition="skip:threshold=99", check=False)
    none(x)
    assert [len(index) for index in none.last] == [1, 1]  # the most important one


@pytest.mark.nightly
def test_constant_takes_numbers_and_means(net: Net, x: Tensor):
    made = ConstantChannels(0.5, value=0.25).applied(net, (x,), None, "bits:8", TABLE)
    torch.testing.assert_close(made(x), by_hand(net, x, *_last(made, x), (0.25, 0.25)))
    mean = ConstantChannels(0.5).applied(net, (x,), None, "bits:8", TABLE)
    y = torch.relu(net.norm(net.a(x)))
    fills = tuple(v.mean((0, 2, 3))[:, None, None] for v in (y, net.b(y)))
    torch.testing.assert_close(mean(x), by_hand(net, x, *_last(mean, x), fills))


def _last(made, x: Tensor):
    made(x)
    return made.last


def test_value_keeps_the_pilots_own(net: Net, x: Tensor):
    made = condition(net, (x,), pilot=Bits(3), condition="value:0.5", check=False)
    pilot = rounded(net, x, Bits(3))
    first = torch.relu(pilot.norm(pilot.a(x)))
    fills = first, pilot.b(first)
    torch.testing.assert_close(made(x), by_hand(net, x, *_last(made, x), fills))
    with pytest.raises(BadInput, match="live input"):
        condition(net, (x,), pilot=collect(net, (x,)), condition="value:0.5", check=False)


def test_precision_runs_two_parts(net: Net, x: Tensor):
    made = condition(net, (x,), pilot="bits:8", condition="precision:0.5:bits=2", check=False)
    found = made(x)
    a, _, rest_a, rest_b = made.last
    assert sorted([*a.tolist(), *rest_a.tolist()]) == list(range(8))
    pilot = rounded(net, x, "bits:2")
    mixed = Net().eval()
    mixed.load_state_dict(net.state_dict())
    for layer, few, index in ((mixed.a, pilot.a, rest_a), (mixed.b, pilot.b, rest_b)):
        layer.weight[index] = few.weight[index]
    torch.testing.assert_close(found, mixed(x))


def test_data_of_an_earlier_frame(net: Net, x: Tensor):
    before = collect(net, (x[:1],))
    made = condition(net, (x,), pilot=before, condition="skip:0.25", check=False)
    torch.testing.assert_close(made(x), by_hand(net, x, *made.last))
    assert made.last[0].tolist() == sorted(before.priorities("a").topk(2).indices.tolist())
    again = collect(net, (-x[1:2],))
    made.update(again)
    made(x)
    assert made.last[0].tolist() == sorted(again.priorities("a").topk(2).indices.tolist())
    with pytest.raises(BadInput, match="no magnitudes of 'a'"):
        made.update(ExecutionData("channel", {"z": torch.ones(8)}, "a test"))
    with pytest.raises(BadInput, match="8 positions of 'a'"):
        made.update(ExecutionData("channel", {"a": torch.ones(3), "b": torch.ones(8)}, "a test"))
    live = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
    with pytest.raises(BadInput, match="needs no update"):
        live.update(before)


def test_an_empty_index_computes_all(net: Net, x: Tensor):
    made = condition(net, (x,), pilot="bits:8", condition="skip:0.5", check=False)
    none, two = torch.tensor([], dtype=torch.int64), torch.tensor([5, 2])
    torch.testing.assert_close(made.run([none, two], (x,)), by_hand(net, x, none, two))
    torch.testing.assert_close(made.run([two, none], (x,)), by_hand(net, x, two, none))


@pytest.mark.nightly
def test_the_model_is_not_changed(net: Net, x: Tensor):
    state = {name: t.clone() for name, t in net.state_dict().items()}
    before = net(x)
    made = condition(net, (x,), pilot="exponents", condition="skip:0.5", check=False)
    made.network.get_parameter("a.weight").zero_()
    assert torch.equal(net(x), before)
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())


@pytest.mark.nightly
def test_layers_are_chosen_by_pattern(net: Net, x: Tensor):
    made = condition(net, (x,), pilot="bits:8", condition="skip:0.5:layers=b", check=False)
    assert [d.what for d in made.conditioned.decisions] == ["skip", "dense", "dense"]
    with pytest.raises(BadInput, match="nothing of this network"):
        condition(net, (x,), pilot="bits:8", condition="skip:0.5:layers=none", check=False)


def test_a_pilot_of_other_layers_is_refused(net: Net, x: Tensor):
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(128, 4)).eval()
    with pytest.raises(BadInput, match="to have layer 'a'"):
        condition(net, (x,), pilot=other, condition="skip:0.5", check=False)
    with pytest.raises(BadInput, match="needs a pilot"):
        condition(net, (x,), condition="skip:0.5", check=False)


def test_texts():
    assert all(issubclass(kind, object) and kind.name for kind in KINDS)
    assert condition_of("skip:0.5") == Skip(0.5)
    for made in (
        Skip(0.5),
        Skip(threshold=0.5),
        Value(0.25),
        Precision(0.5, bits=4),
        ConstantChannels(0.5, value=0.5),
        ConstantChannels(0.5),
        Skip(0.5, layers="a.*"),
    ):
        assert isinstance(made, Condition)
        assert condition_of(text(made)) == made
    for wrong, words in (
        ("none", "expected one of"),
        ("skip", "one of keep and threshold"),
        ("skip:2", "at most 1"),
        ("skip:x", "expected float"),
        ("skip:0.5:bits=4", "no parameter"),
        ("route", "not complete"),
        ("constant:0.5:value=x", "'mean'"),
        ("precision:0.5:bits=99", "1 to 16 bits"),
        ("skip:threshold=-1", "0 or more"),
    ):
        with pytest.raises(BadInput, match=words):
            condition_of(wrong)
    with pytest.raises(BadInput, match="got int"):
        condition_of(5)  # type: ignore[arg-type]


def clock_of(model: float, conditioned: float):
    """Seconds that calls of the model and of the conditioned module seem to take, in turns."""
    now, calls = [0.0], itertools.count()

    def clock() -> float:
        k = next(calls)
        if k % 2:  # the end of a call; rounds go forward, then backward
            first = (k // 2) % 4 in (0, 3)
            now[0] += model if first else conditioned
        return now[0]

    return clock


def test_never_slower(net: Net, x: Tensor):
    before = collect(net, (x,))
    slow = condition(net, (x,), pilot=before, condition="skip:0.5", clock=clock_of(1.0, 2.0))
    assert slow.conditioned.decisions[0].layer == "the network, whole"
    assert "ratio 0.50" in slow.conditioned.decisions[0].why
    assert slow.conditioned.exact
    assert {one.what for one in slow.conditioned.decisions[1:]} == {"as it was"}
    assert torch.equal(slow(x), net(x))
    assert slower(net, slow, ((x,), {}), clock_of(2.0, 1.0)) == ""


@pytest.mark.nightly
def test_a_knob_with_a_guarantee(net: Net):
    chance = torch.Generator().manual_seed(2)
    inputs = [torch.randn(300, 3, 6, 6, generator=chance) for _ in range(3)]
    example = (inputs[0][:2],)
    for loss, expected in ((0.9, True), (0.0, False)):
        made = condition(
            net, example, pilot="bits:8", condition="skip", check=False, calibration=inputs, loss=loss, knobs=(0.9, 0.5)
        )
        assert (made.guarantee.threshold is not None) == expected
        assert (made.conditioned.decisions[0].what == "skip") == expected
    assert torch.equal(made(inputs[0]), net(inputs[0]))
    with pytest.raises(BadInput, match="named without it"):
        condition(net, example, pilot="bits:8", condition="skip:0.5", calibration=inputs)


def test_an_empty_batch():
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    for text_ in ("skip:0.5", "value:0.5"):
        made = condition(plain, (torch.randn(3, 8),), pilot="bits:4", condition=text_, check=False)
        assert made(torch.randn(0, 8)).shape == (0, 4)


def test_precision_says_that_it_saves_no_time(net: Net, x: Tensor):
    made = Precision(0.5).applied(net, (x,), None, "bits:8", TABLE)
    assert "saves no time" in made.conditioned.decisions[0].why


@pytest.mark.parametrize(
    ("name", "batches", "labels", "words"),
    [
        ("skip", [], None, "got none"),
        ("columns", [2], None, "leave calibration out"),
        ("order", [2], None, "leave calibration out"),
        ("skip", [2], torch.zeros(3).long(), r"\[3\]"),
    ],
)
def test_calibration_that_cannot_be(net: Net, x: Tensor, name, batches, labels, words):
    given_ = [x[:n] for n in batches]
    with pytest.raises(BadInput, match=words):
        condition(net, (x,), pilot="bits:8", condition=name, calibration=given_, labels=labels, knobs=(0.9,))


def test_a_condition_with_one_value_too_many_is_refused() -> None:
    for wrong in ("skip:0.5:0.1:3:4:5:6:7:8:9", "certified:2:3:4:5:6:7"):
        with pytest.raises(BadInput, match="has no parameter"):
            condition_of(wrong)
