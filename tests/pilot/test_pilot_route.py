"""Routing: which rows go to the full network, what comes back, and when it is refused."""

from __future__ import annotations

import importlib
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.machine.clock import race
from demask.ops import TABLE
from demask.pilot.route import Route, Router
from demask.pilot.router import entropy, margin, softmax

NOW = [0.0]  # seconds; only networks of the next kind take time


class Slow(nn.Module):
    """A linear layer that takes a while, by number of rows."""

    def __init__(self, inner: nn.Linear, seconds: float = 1.0):
        super().__init__()
        self.inner, self.seconds = inner, seconds
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        NOW[0] += self.seconds * len(x)
        return self.inner(x)


@pytest.fixture(autouse=True)
def a_clock_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("route", "router"):
        module = importlib.import_module(f"demask.pilot.{name}")
        monkeypatch.setattr(module, "race", partial(race, clock=lambda: NOW[0]))


def pair() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    full, pilot = nn.Linear(8, 4), nn.Linear(8, 4)
    with torch.no_grad():
        full.weight.mul_(8)
        pilot.weight.copy_(full.weight + 0.3 * torch.randn_like(full.weight))
        pilot.bias.copy_(full.bias)
    return full.eval(), pilot.eval()


@pytest.mark.parametrize("confidence", ["margin", "softmax", "entropy"])
def test_rows_are_those_of_one_network_or_the_other(confidence: str) -> None:
    full, pilot = pair()
    x = torch.randn(33, 8)
    router = Router(full, pilot, Route(0.6, confidence))
    with torch.no_grad():
        made, cheap, whole = router(x), pilot(x), full(x)
        sure = {"margin": margin, "softmax": softmax, "entropy": entropy}[confidence](cheap) > 0.6
    assert 0 < int(sure.sum()) < 33
    assert torch.equal(made[sure], cheap[sure])
    assert torch.allclose(made[~sure], whole[~sure], atol=1e-6)
    assert not torch.equal(made[~sure], cheap[~sure])
    assert router.last.escalated == int((~sure).sum())
    assert (router.last.rows, router.last.calls) == (33, 1)


def test_how_sure_scores_are() -> None:
    logits = torch.tensor([[0.0, 0, 0, 0], [30, 0, 0, 0], [math.log(3), 0, -90, -90]])
    assert margin(logits).tolist() == pytest.approx([0, 1, 0.5], abs=1e-6)
    assert softmax(logits).tolist() == pytest.approx([0.25, 1, 0.75], abs=1e-6)
    plain = 1 + (0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert entropy(logits).tolist() == pytest.approx([0, 1, plain], abs=1e-6)
    certain = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert [f(certain).item() for f in (margin, softmax, entropy)] == pytest.approx([1, 1, 1])


def test_scores_that_are_not_numbers_are_not_sure() -> None:
    full, pilot = pair()
    x = 5 * torch.randn(4, 8)

    class Unsure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return pilot(x).index_fill(0, torch.tensor([2]), math.nan)

    router = Router(full, Unsure(), Route(0.0))
    with torch.no_grad():
        assert router.unsure(router.pilot(x)).tolist() == [2]
        assert torch.allclose(router(x)[2], full(x)[2], atol=1e-6)


def test_both_answers_are_the_mean_of_probabilities() -> None:
    full, pilot = pair()
    x = torch.randn(9, 8)
    router = Router(full, pilot, Route(1.0, answer="both"))
    with torch.no_grad():
        expected = (full(x).softmax(1) + pilot(x).softmax(1)) / 2
        assert torch.allclose(router(x).exp(), expected, atol=1e-6)


class Two(nn.Module):
    """Class scores and features, of two inputs, one without rows."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(8, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, scale: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        y = self.layer(x * scale + shift)
        return {"scores": self.head(y), "mean": y.mean(1)}


def test_structures_keywords_and_inputs_without_rows() -> None:
    torch.manual_seed(1)
    full, pilot = Two(6).eval(), Two(2).eval()
    x, scale, shift = torch.randn(20, 8), torch.tensor(2.0), torch.randn(20, 1)
    router = Router(full, pilot, Route(0.2))
    with torch.no_grad():
        made = router(x, scale, shift=shift)
        whole, cheap = full(x, scale, shift=shift), pilot(x, scale, shift=shift)
        rows = router.unsure(cheap)
    assert 0 < len(rows) < 20
    for name in ("scores", "mean"):
        expected = cheap[name].index_copy(0, rows, whole[name][rows])
        assert torch.allclose(made[name], expected, atol=1e-6)


@pytest.mark.parametrize("wait", [None, 0, 2])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_stream_answers_as_calls_do_and_in_order(wait: int | None, fixed: bool) -> None:
    full, pilot = pair()
    parts = [5 * torch.randn(n, 8) for n in (7, 1, 0, 12, 40, 3)]
    slow = Slow(full, 0)
    router = Router(slow, pilot, Route(0.9))
    with torch.no_grad():
        found = list(router.stream(iter(parts), batch=8, wait=wait, fixed=fixed))
        sizes, slow.calls = slow.calls, []
        expected = [router(part) if len(part) else pilot(part) for part in parts]
        rows = sum(len(router.unsure(pilot(part))) for part in parts)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert [len(part) for part in found] == [7, 1, 0, 12, 40, 3]
    assert max(sizes) == 8
    if fixed:
        assert set(sizes) == {8}
    elif wait is None:
        assert sum(sizes) == rows
        assert sizes == [8] * (rows // 8) + [rows % 8] * (rows % 8 > 0)


def test_a_stream_says_what_it_did() -> None:
    full, pilot = pair()
    parts = torch.randn(6, 10, 8)
    router = Router(full, pilot, Route(0.5))
    with torch.no_grad():
        numbers = [number for number, _ in router.stream(((p,) for p in parts), tagged=True)]
        rows = sum(len(router.unsure(pilot(part))) for part in parts)
        list(router.stream(list(parts)))
    assert sorted(numbers) == list(range(6))
    last = router.last
    assert (last.rows, last.escalated, last.share) == (60, rows, rows / 60)
    assert last.latency is not None
    assert last.latency.count == 6


def test_tagged_answers_do_not_wait_for_earlier_ones() -> None:
    router = Router(nn.Identity(), nn.Identity(), Route(0.5))
    unsure, sure = torch.zeros(2, 4), 50 * torch.eye(4)[:2]
    parts = [unsure, sure, sure]
    tagged = [number for number, _ in router.stream(parts, batch=64, tagged=True)]
    assert tagged == [1, 2, 0]
    assert len(list(router.stream(parts, batch=64))) == 3


def test_no_batch_waits_longer_than_said() -> None:
    router = Router(nn.Identity(), nn.Identity(), Route(0.5))
    taken: list[int] = []

    def parts():
        for k in range(6):
            taken.append(k)
            yield torch.zeros(1, 4)

    waited = [taken[-1] - k for k, _ in enumerate(router.stream(parts(), batch=64, wait=2))]
    assert max(waited) <= 3


def test_applied_routes_where_it_pays() -> None:
    full, pilot = pair()
    x = 5 * torch.randn(32, 8)
    slow = Slow(full)
    routed = Route(0.5).applied(slow, (x,), None, pilot, TABLE)
    assert not routed.whole
    assert not routed.conditioned.exact
    with torch.no_grad():
        routed(x)
    assert 0 < routed.last.share < 0.5
    assert "route:0.5" in str(routed.conditioned)


def refused(route: Route, model: nn.Module, x: Tensor, pilot) -> str:
    """Why; the network comes back as it is."""
    routed = route.applied(model, (x,), None, pilot, TABLE)
    assert routed.whole
    assert routed.conditioned.exact
    with torch.no_grad():
        assert torch.equal(routed(x), model(x))
    assert routed.last.share == 1.0
    return routed.conditioned.decisions[0].why


def test_it_is_refused_where_it_does_not_pay() -> None:
    full, pilot = pair()
    x = torch.randn(20, 8)
    why = refused(Route(0.5), Slow(full), x, Slow(pilot, 1.1))
    assert "it does not pay: the pilot takes 2.2e+04 ms" in why
    # A quick pilot that is sure of nothing.
    assert "20 of 20 rows" in refused(Route(1.0), Slow(full), x, pilot)


class Centred(nn.Module):
    """Rows that depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Fixed(nn.Module):
    """A network that takes one number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(20, 4) * 2


def test_it_is_refused_where_rows_are_not_apart() -> None:
    x = torch.randn(20, 4)
    assert "depend on each other" in refused(Route(0.5), Centred(), x, nn.Identity())
    assert "another number of rows" in refused(Route(0.5), Fixed(), x, nn.Identity())
    assert "inf" in refused(Route(math.inf), nn.Identity(), x, nn.Identity())


def test_a_simplifier_can_be_the_pilot_and_the_model_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))  # in train mode
    before = {name: value.clone() for name, value in model.state_dict().items()}
    routed = Route(0.5).applied(model, (torch.randn(4, 8),), None, "bits:4", TABLE)
    assert routed.conditioned.pilot == "bits:4"
    assert model.training
    assert not routed.full.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def calibration(n: int = 2400) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    full, pilot = pair()
    x = torch.randn(n, 8)
    with torch.no_grad():
        labels = full(x).argmax(1)
    return full, pilot, x, labels


@pytest.mark.parametrize("labelled", [True, False])
def test_a_calibrated_route_keeps_its_promise_on_new_examples(labelled: bool) -> None:
    full, pilot, x, labels = calibration()
    found = Route.calibrated(Slow(full, 0.02), pilot, x, labels if labelled else None, 0.02)
    assert found.pays
    assert found.guarantee.threshold == found.route.threshold
    assert found.guarantee.sizes == (240, 960, 1200)
    assert found.pilot == 0
    assert found.gain == pytest.approx(64 / math.ceil(64 * found.share))
    assert found.stream_gain == pytest.approx(1 / found.share)
    assert "rows for the full network" in str(found)
    fresh = torch.randn(20_000, 8)
    with torch.no_grad():
        made = Router(full, pilot, found.route)(fresh).argmax(1)
        lost = (made != full(fresh).argmax(1)).float().mean()
        cheap = (pilot(fresh).argmax(1) != full(fresh).argmax(1)).float().mean()
    assert lost <= 0.02 < cheap


class Stepped(Slow):
    """It takes as long for a few rows as for a batch."""

    def forward(self, x: Tensor) -> Tensor:
        NOW[0] += 64 - len(x)
        return super().forward(x)


def test_a_calibration_says_do_not_use() -> None:
    full, pilot, x, labels = calibration(600)
    slow = Route.calibrated(Slow(full), Slow(pilot, 0.95), x, labels, 0.05)
    assert "does not pay" in slow.reason
    assert slow.route.threshold == math.inf
    assert slow.router.whole
    full_calls = Stepped(full)  # as slow for a few rows as for many
    stream = Route.calibrated(full_calls, Slow(pilot, 0.3), x, labels, 0.05)
    assert "route streams only" in stream.reason
    assert stream.router.whole
    assert stream.route.threshold < math.inf
    assert stream.gain < 1 < stream.stream_gain
    few = Route.calibrated(Slow(full, 0.02), pilot, x[:30], labels[:30], 0.001)
    assert "cannot be guaranteed" in few.reason
    assert not few.pays


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, p, x: Route(0.5, "hope"), "expected a confidence of"),
        (lambda f, p, x: Route(0.5, answer="none"), "expected an answer of"),
        (lambda f, p, x: Route(math.nan), "got nan"),
        (lambda f, p, x: Route(0.5).applied(f, (x,), None, None, TABLE), "needs a pilot that answers"),
        (lambda f, p, x: Route(0.5).applied(f, (x,), None, nn.Linear(8, 3), TABLE), "same outputs"),
        (lambda f, p, x: Router(nn.Flatten(0), nn.Flatten(0), Route(0.5))(x), r"got \[48\]"),
        (lambda f, p, x: Router(f, p, Route(0.5)).stream([x], batch=0), "batch >= 1"),
        (lambda f, p, x: Route.calibrated(f, p, x, torch.zeros(5)), "expected labels as 6"),
        (lambda f, p, x: Route.calibrated(f, p, (x, x[:3])), "as many in each"),
    ],
)
def test_what_is_wrong_is_said(call, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call(*pair(), torch.randn(6, 8))
