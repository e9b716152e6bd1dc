"""optimize(modules=...): parts of a model made fast, in a copy that is never slower."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import architectures
import demask
from demask.errors import Mismatch
from demask.failures import strict
from demask.machine import clock as timer
from demask.machine.cost import Costs
from demask.tune.parts import AGAIN, FastForward
from demask.tune.shape_cache import ENTRIES
from night import at_night
from test_language_models import llama

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

    monkeypatch.setattr(timer, "race", sampled)


def is_fast(part: Any) -> bool:
    """Whether a part has a graph that computes its calls."""
    return isinstance(vars(part).get("forward"), FastForward)


def optimized(model: nn.Module, **options: Any) -> Any:
    return demask.optimize(model, (X,), modules="auto", cache=False, **options)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Answers to whether a full network is as fast as the one given, in the order of asking."""
    answers: list[bool] = []
    real = race.CandidateRace.speed

    def speed(self: Any, name: str) -> Any:
        found, _ = real(self, name)
        fast = self.program is not None or answers.pop(0)  # each part alone is fast
        return module.replace(found, least=1.0 if fast else 0.5), not fast

    monkeypatch.setattr(race.CandidateRace, "speed", speed)
    return answers


def test_parts_are_made_fast_in_a_copy_of_the_model(tmp_path: Path) -> None:
    model = model_of()
    expected, words = model(X), []
    fast = optimized(model, progress=words.append)
    assert type(fast) is Model and all(map(is_fast, fast.blocks))
    assert type(fast.blocks[0]) is Block and fast.blocks[0].a.weight.shape == (26, 24)
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
    ("answers", "quick", "units"), [([True], True, 26), ([False, True], False, 26), ([False, False], False, 40)]
)
def test_the_whole_is_never_slower(raced: list[bool], answers: list[bool], quick: bool, units: int) -> None:
    """Fast parts; where the whole is slower with them, demasked ones; else those of the model."""
    model = model_of()
    raced += answers
    fast = optimized(model)
    assert not raced and all(is_fast(block) == quick for block in fast.blocks)
    torch.testing.assert_close(fast(X), model(X))
    assert len(fast.state_dict()["blocks.0.a.weight"]) == units
    found = demask.report(fast)
    names = {1: module.PARTS, 2: module.DEMASKED}
    chosen = module.GIVEN if units == 40 else names[len(answers)]
    assert found.decisions[0].chosen == chosen
    assert any("may be slower" in note for note in found.notes) == (len(answers) > 1)
    assert fast.blocks[0] is not model.blocks[0]


def test_parts_that_make_the_whole_differ_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = model_of(), race.CandidateRace.difference

    def planted(self: Any, network: Any) -> str:
        wrong = self.program is None and is_fast(network.blocks[0])
        return "output 0 by 1e6 units" if wrong else real(self, network)

    monkeypatch.setattr(race.CandidateRace, "difference", planted)
    with pytest.raises(Mismatch, match="output 0 by 1e6 units"):
        optimized(model)
    with strict(False):
        fast = optimized(model)
    assert type(fast.blocks[0]) is Block and not is_fast(fast.blocks[0])
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
    assert not is_fast(fast.blocks[0]) and is_fast(fast.blocks[1])


class Writer(Straight):
    """Writes tokens by calling its blocks in other ways than `forward` does: in steps, and with a
    cache that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 24)
        self.blocks = nn.ModuleList([Cached(), Cached()])
        self.head = nn.Linear(24, 5)

    def forward(self, ids: Tensor, cache: list[Any] | None = None) -> Tensor:
        x = self.tokens(ids)
        for k, block in enumerate(self.blocks):
            x = block(x, cache[k] if cache else None)
        return self.head(x)

    def generate(self, ids: Tensor, max_new_tokens: int, do_sample: bool = False) -> Tensor:
        cache, step = [Memory(), Memory()], ids
        for _ in range(max_new_tokens):
            step = self(step, cache)[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
        return ids


class Memory:
    """The sum of the tokens so far."""

    total: Any = 0.0


class Cached(nn.Module):
    """A block that adds the mean of the tokens so far, and units of a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.units = Block()

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        before = memory.total if memory else 0.0
        if memory:
            memory.total = before + x.sum(1, keepdim=True)
        return self.units(x + (before + x.cumsum(1)) / 8)


def writer() -> Writer:
    torch.manual_seed(0)
    model = Writer().eval()
    with torch.no_grad():
        for block in model.blocks:
            block.units.a.weight[::3] = 0  # type: ignore[index,union-attr]
            block.units.a.bias[::3] = 0  # type: ignore[index,union-attr]
    return model


IDS = torch.tensor([[1, 2, 3], [0, 4, 2]])


@functools.cache
def shared_writer() -> Any:
    """A model with a method, optimized: never to be called or changed."""
    return demask.optimize(writer(), (IDS,), cache=False)


def test_a_model_with_methods_stays_one() -> None:
    """Its class, with graphs in what is never called with objects; every length and batch."""
    model, fast = writer(), copy.deepcopy(shared_writer())
    assert type(fast) is Writer and fast.demasked.decisions[0].chosen == module.PARTS
    fast_parts = [name for name, part in fast.named_modules() if is_fast(part)]
    assert fast_parts == ["blocks.0.units", "blocks.1.units"]
    assert fast.blocks[0].units.a.weight.shape == (26, 24)
    for ids in (IDS, IDS[:1, :1], IDS.repeat(2, 3)):
        torch.testing.assert_close(fast(ids), model(ids))
        assert torch.equal(fast.generate(ids, 5), model.generate(ids, 5))


def test_a_model_that_is_only_saved_is_one_graph() -> None:
    """Methods that call no module, such as `save_pretrained`, do not split a model into parts."""
    net: Any = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).eval()
    net.save_pretrained = lambda path: None
    fast = demask.optimize(net, (torch.randn(3, 6),), cache=False)
    assert type(fast) is not nn.Sequential and "forward" not in vars(fast)


def taken(part: Any) -> list[tuple[int, ...]]:
    """The sizes that the graph of a part computes."""
    calls = vars(part)["forward"].by_graph
    return [tuple(key[0][1][0]) for key, by_graph in calls.items() if by_graph]


def test_sizes_that_were_not_measured_are_computed_by_the_code_at_first() -> None:
    model, fast = writer(), copy.deepcopy(shared_writer())
    part, ids = fast.blocks[0].units, IDS.repeat(1, 2)
    assert taken(part) == [(2, 3, 24), (2, 1, 24)]  # of the prompt, and of a step
    for k in range(AGAIN):
        assert (2, 6, 24) not in taken(part), k
        torch.testing.assert_close(fast(ids), model(ids))
    assert (2, 6, 24) in taken(part)
    for size in range(7, 20):  # each size has a plan of its own: few have one
        for _ in range(AGAIN):
            fast(IDS[:, :1].repeat(1, size))
    assert len(taken(part)) == ENTRIES


def scaled(part: Any) -> None:
    with torch.no_grad():
        part.b.weight.mul_(2)


def loaded(part: Any) -> None:
    part.load_state_dict({name: tensor * 2 for name, tensor in part.state_dict().items()})


def watched(part: Any) -> None:
    part.a.register_forward_hook(lambda *call: call[-1] * 2)


def by_data(part: Any) -> None:
    part.a.weight.data[0] = 3.0


@pytest.mark.parametrize("change", [scaled, loaded, watched, by_data])
@pytest.mark.parametrize("copied", [False, True])
def test_the_graph_is_of_the_weights_and_hooks_that_are_there(change: Any, copied: bool) -> None:
    fast: Any = copy.deepcopy(shared_writer())
    plain = demask.demask(writer(), (IDS,), result="class")
    for network in (fast, plain):
        change(network.blocks[0].units)
    if copied:
        fast = copy.deepcopy(fast)
    torch.testing.assert_close(fast(IDS), plain(IDS))
    assert not torch.allclose(fast(IDS), writer()(IDS))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_its_own_graphs_and_weights(copied: Any) -> None:
    model, fast = writer(), copy.deepcopy(shared_writer())
    other = copied(fast)
    forwards = [vars(network.blocks[0].units)["forward"] for network in (fast, other)]
    assert forwards[1].module is other.blocks[0].units and forwards[1].graph is not None
    torch.testing.assert_close(other(IDS), model(IDS))
    scaled(forwards[1].module)
    assert not torch.allclose(other(IDS), model(IDS)) and forwards[1].graph is None
    torch.testing.assert_close(fast(IDS), model(IDS))
    assert forwards[0].graph is not None


def test_it_trains_converts_and_is_demasked_by_its_own_code() -> None:
    model, fast = writer(), copy.deepcopy(shared_writer())
    fast.train()(IDS).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in fast.parameters())
    wide = copy.deepcopy(fast).eval().double()
    torch.testing.assert_close(wide(IDS), model.double()(IDS), rtol=1e-12, atol=0)
    model = model.float()
    again = demask.demask(fast.eval(), (IDS,), result="class")
    torch.testing.assert_close(again(IDS), model(IDS))
    assert signature(fast.blocks[0].units.forward) == signature(model.blocks[0].units.forward)


def test_generation_that_is_slower_is_not_returned(raced: list[bool]) -> None:
    """A part in a step, the network in a call, the network in `generate`: the last one is slower,
    and so is the demasked network."""
    model = writer()
    raced += [True, True, True, False, True, False]
    fast: Any = demask.optimize(model, (IDS,), cache=False)
    assert not raced and fast.demasked.decisions[0].chosen == module.GIVEN
    assert type(fast) is Writer and fast.blocks[0].units.a.weight.shape == (40, 24)
    assert torch.equal(fast.generate(IDS, 4), model.generate(IDS, 4))


def language_model(kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model of transformers and its example."""
    pytest.importorskip("transformers")
    names = architectures.transformers()
    sizes = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ids = torch.randint(4, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    if kind == "gpt2":
        config = names.GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        return names.GPT2LMHeadModel(config).eval(), {"input_ids": ids}
    if kind == "opt":
        config = names.OPTConfig(
            **sizes, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
        )
        return names.OPTForCausalLM(config).eval(), {"input_ids": ids}
    if kind == "t5":
        config = names.T5Config(
            **sizes, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
        inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
        return names.T5ForConditionalGeneration(config).eval(), inputs
    if kind == "whisper":
        config = names.WhisperConfig(
            **sizes, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
            decoder_ffn_dim=64, max_source_positions=20, max_target_positions=40,
            decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids[:, :4]}
        return names.WhisperForConditionalGeneration(config).eval(), inputs
    model, _ = llama(0)
    return model, {"input_ids": ids}


@pytest.mark.parametrize("kind", ["gpt2", *at_night("llama", "opt", "t5", "whisper")])
def test_language_models_generate_as_before(kind: str) -> None:
    model, inputs = language_model(kind)
    fast: Any = demask.optimize(model, (), inputs, cache=False)
    assert type(fast) is type(model)  # single layers, all that OPT has, are no faster as graphs
    assert any(map(is_fast, fast.modules())) == (kind != "opt")
    assert fast.config.use_cache and model.config.use_cache
    options = {"max_new_tokens": 5, "do_sample": False}
    for size in (6, 1, 4):
        other = {k: x if x.is_floating_point() else x[:, :size] for k, x in inputs.items()}
        torch.testing.assert_close(fast(**other).logits, model(**other).logits)
        for cache in (True, False):
            tokens = [m.generate(**other, **options, use_cache=cache) for m in (fast, model)]
            assert torch.equal(*tokens)
