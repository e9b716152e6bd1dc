"""optimize(modules=...): parts of a model made fast, in a copy that is never slower."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask.errors import Mismatch
from demask.failures import strict
from demask.machine.cost import Costs
from demask.tune.module.optimized_module import Optimized
from test_language_models import OPTIONS, llama

module = importlib.import_module("demask.optimize")
race = importlib.import_module("demask.tune.race")
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
X = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(self.norm(x))))


class Model(nn.Module):
    """Blocks, a third of whose units are masked, and code that no capture takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) if float(x.detach().sum()) < 1e9 else x

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)


def model_of() -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.a.weight[::3] = 0  # type: ignore[index,union-attr]
            block.a.bias[::3] = 0  # type: ignore[index,union-attr]
    return model


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs worked out, not measured; forms with fused calls are twice as fast as others."""
    real: Any = Costs.open
    unbound = real.__func__

    def opened(cls: Any, path: Any = None, **options: Any) -> Any:
        return unbound(cls, path, **{**options, "measure": False})

    monkeypatch.setattr(Costs, "open", classmethod(opened))

    def sampled(contenders: Any, pairs: int, *_: Any, **options: Any) -> Any:
        slow = (module.GIVEN, module.DEMASKED)
        return {n: [1.0 if n in slow else 0.5] * max(pairs, 2) for n in contenders}

    monkeypatch.setattr(race, "sample_seconds", sampled)


def optimized(model: nn.Module, **options: Any) -> Any:
    return demask.optimize(model, (X,), modules="auto", cache=False, **options)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers to whether a whole network is as fast as the one given, in the order of asking."""
    answers: list[bool] = []
    real = race.CandidateRace.speed

    def speed(self: Any, name: str) -> Any:
        if self.program is not None:
            return real(self, name)
        found, _ = real(self, name)
        fast = answers.pop(0)
        return module.replace(found, least=1.0 if fast else 0.5), not fast

    monkeypatch.setattr(race.CandidateRace, "speed", speed)
    return answers


def test_parts_are_made_fast_in_a_copy_of_the_model(tmp_path: Path) -> None:
    model = model_of()
    expected, words = model(X), []
    fast = optimized(model, progress=words.append)
    assert type(fast) is Model and all(isinstance(block, Optimized) for block in fast.blocks)
    assert type(model.blocks[0]) is Block and torch.equal(model(X), expected)
    torch.testing.assert_close(fast(X), expected)
    torch.testing.assert_close(fast(X[:2]), model(X[:2]))
    assert torch.equal(fast.predict(X), model.predict(X))
    assert demask.verify(model, fast, (X,)).ok
    found = demask.report(fast)
    assert found.speed is not None and found.after.parameters < found.before.parameters
    places = [decision.place for decision in found.decisions]
    assert places[:2] == [module.WHOLE, "blocks.0"] and "blocks.1" in places
    assert found.decisions[0].chosen == module.PARTS
    assert any(text.startswith("blocks.1: ") for text in words)


class Straight(Model):
    """The same without the code that no capture takes."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_file_holds_the_graph_in_plain_ops(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Straight().eval()
    fast = optimized(model)
    demask.save(fast, tmp_path / "fast.demask")
    loaded = demask.load(tmp_path / "fast.demask")
    torch.testing.assert_close(loaded(X), model(X))
    assert demask.report(loaded).speed is None and demask.report(fast).speed is not None
    assert any("optimize this network" in note for note in demask.report(loaded).notes)
    demask.to_pt2(fast, tmp_path / "fast.pt2")
    again = torch.export.load(tmp_path / "fast.pt2").module()
    torch.testing.assert_close(again(X), model(X))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(demask.NotExportable, match="what to change"):
        demask.save(optimized(model_of()), tmp_path / "fast.demask")
    assert not any(tmp_path.iterdir())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("answers", "kind", "units"),
    [([True], Optimized, 26), ([False, True], Block, 26), ([False, False], Block, 40)],
)
def test_the_whole_is_never_slower(
    raced: list[bool], answers: list[bool], kind: type, units: int
) -> None:
    """Fast parts; where the whole is slower with them, demasked ones; else those of the model."""
    model = model_of()
    raced += answers
    fast = optimized(model)
    assert not raced and all(isinstance(block, kind) for block in fast.blocks)
    torch.testing.assert_close(fast(X), model(X))
    assert kind is Optimized or len(fast.state_dict()["blocks.0.a.weight"]) == units
    found = demask.report(fast)
    names = {1: module.PARTS, 2: module.DEMASKED}
    chosen = module.GIVEN if units == 40 else names[len(answers)]
    assert found.decisions[0].chosen == chosen
    assert any("may be slower" in note for note in found.notes) == (len(answers) > 1)
    assert fast.blocks[0] is not model.blocks[0]


def test_parts_that_make_the_whole_differ_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = model_of(), race.CandidateRace.difference

    def planted(self: Any, network: Any) -> str:
        wrong = self.program is None and isinstance(network.blocks[0], Optimized)
        return "output 0 by 1e6 units" if wrong else real(self, network)

    monkeypatch.setattr(race.CandidateRace, "difference", planted)
    with pytest.raises(Mismatch, match="output 0 by 1e6 units"):
        optimized(model)
    with strict(False):
        fast = optimized(model)
    assert type(fast.blocks[0]) is Block
    assert any("left out, output 0" in note for note in fast.demasked.notes)


def test_names_are_those_of_demask() -> None:
    model = model_of()
    for names in ("blocks.0", ["blocks.7"], ["*.nothing"], ["blocks.0", "blocks.0.a"]):
        with pytest.raises(demask.BadInput) as one:
            demask.optimize(model, (X,), modules=names, cache=False)
        with pytest.raises(demask.BadInput) as other:
            demask.demask(model, (X,), modules=names)
        assert str(one.value) == str(other.value)
    fast: Any = demask.optimize(model, (X,), modules=["*.1"], cache=False)
    assert type(fast.blocks[0]) is Block and isinstance(fast.blocks[1], Optimized)


@pytest.mark.nightly
def test_a_language_model_whose_layers_take_no_cache_uses_none() -> None:
    model, ids = llama(0)
    fast: Any = demask.optimize(model, (), {"input_ids": ids}, modules="auto", cache=False)
    assert all(isinstance(layer, Optimized) for layer in fast.model.layers)
    torch.testing.assert_close(fast(ids).logits, model(ids).logits)
    assert model.config.use_cache and not fast.config.use_cache
    assert any("use_cache is off" in note for note in demask.report(fast).notes)
    units: Any = demask.optimize(model, (), {"input_ids": ids}, modules=["*.mlp"], cache=False)
    assert units.config.use_cache
    assert torch.equal(units.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
