"""optimize(): equal outputs, never slower, nothing of the user's is changed."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import demask
import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from demask.errors import BadInput, Mismatch
from demask.failures import strict
from demask.machine import clock as timer
from demask.machine.cost import Costs
from demask.tune.optimized_module import Optimized
from fuzz.laws import difference
from micro import MICROS
from night import at_night

module = importlib.import_module("demask.optimize")
race = importlib.import_module("demask.tune.race")
LIMIT = 64 * torch.finfo(torch.float32).eps  # of the largest output: what optimize() promises
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Costs worked out, not measured, and few rounds: what is tested is not how long it takes."""
    real = Costs.open.__func__

    def opened(cls, path=None, **options):
        return real(cls, path, **{**options, "measure": False})

    monkeypatch.setattr(Costs, "open", classmethod(opened))
    monkeypatch.setattr(race, "ROUNDS", 2)
    monkeypatch.setattr(race, "PAIRS", 3)
    monkeypatch.setattr(timer, "lower_bound", lambda *_: 1.0)


def fast(model: nn.Module, *args, **options):
    """The optimized network: a candidate, with none left out. Strict mode raises before that."""
    found = demask.optimize(model, args, **{"cache": False, **options})
    assert [n for n in found.demasked.notes if "left out" in n or "no further" in n] == []
    assert found.demasked.decisions[0].chosen != module.GIVEN
    return found


def agree(a: object, b: object, limit: float = LIMIT) -> None:
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True):
        if isinstance(x, Tensor):
            assert difference(x.detach(), y.detach()) <= limit
        else:
            assert x == y


def prefer(monkeypatch, name: str) -> None:
    """Let the candidate of this name win every race."""

    def sampled(contenders, pairs=30, warmup=3, **_):
        for call in contenders.values():
            call(), call()
        return {n: [0.5 if n == name else 1.0] * max(pairs, 2) for n in contenders}

    monkeypatch.setattr(timer, "race", sampled)


CHOSEN = ("conv_bn_relu_conv", "misaligned_residual", "lstm", "several_inputs_and_outputs", "conv1d")
DENSE = ("torch",)  # no segments, next to which not all of these forms are built
FORMS = ("demasked alone", "norms in the weights", "layers with their epilogues", "channels last")


# By day each form of one network.
@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "form"), [*itertools.product(CHOSEN, FORMS)])
def test_equal_outputs(name: str, form: str, monkeypatch) -> None:
    prefer(monkeypatch, form)
    torch.manual_seed(7)
    model, args = next(c for c in MICROS if c.name == name).make()
    model.eval()
    found = fast(model, *args, backends=DENSE)
    whole = found.demasked.decisions[0]
    assert whole.chosen == form or form not in whole.seconds
    for batch in (len(args[0]), 1, 5):
        inputs = tuple(torch.randn(batch, *a.shape[1:]) for a in args)
        with torch.no_grad():
            agree(model(*inputs), found(*inputs))


def convs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(5))


# Bounds of the ratios: of the fastest candidate (lower), of the demasked network (lower, upper).
RETURNED = {"norms in the weights": (0.97, 0.0, 0.0), "demasked alone": (0.96, 0.9, 0.98), "given": (0.96, 0.9, 0.96)}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_when_the_fastest_form_may_be_slower(name: str, monkeypatch) -> None:
    prefer(monkeypatch, "norms in the weights")
    fastest, low, high = RETURNED[name]
    asked = iter((fastest, 1 / fastest, low, 1 / high if high else 1))
    monkeypatch.setattr(timer, "lower_bound", lambda *_: next(asked))
    model = convs()
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4], model[1].bias[:4] = 0, 0, 0
    found = demask.optimize(model, (X,), backends=DENSE, cache=False)  # the baseline may be chosen
    agree(model(X), found(X))
    record = found.demasked
    assert isinstance(found, Optimized) == (name == "norms in the weights")
    assert any("may be slower than the original network" in n for n in record.notes) == (name != "norms in the weights")
    assert record.decisions[0].chosen == name and name in record.decisions[0].seconds
    shown = demask.report(found)
    text = str(shown)
    assert text.lstrip().startswith("returned: " + name.replace("given", "the original network"))
    assert f"{name.replace('given', 'original')} (returned)" in text
    if name == "given":
        assert shown.summary == "nothing removed: the original is returned, no candidate is faster"
        assert record.before == record.after and record.cuts == {}
    else:
        assert record.after.parameters < record.before.parameters


@pytest.mark.parametrize(("least", "rounds"), [(timer.CLEAR, 10), (1.0, 30)])
def test_fewer_rounds_where_the_fastest_is_clearly_faster(least, rounds, monkeypatch) -> None:
    monkeypatch.setattr(race, "PAIRS", 30)
    monkeypatch.setattr(timer, "lower_bound", lambda *_: least)
    assert fast(convs(), X, backends=DENSE).demasked.speed.pairs == rounds


@pytest.mark.parametrize("form", ["norms in the weights", "demasked alone"])
def test_the_result_has_weights_of_its_own(form: str, monkeypatch) -> None:
    prefer(monkeypatch, form)
    model = nn.Sequential(convs(), nn.Conv2d(4, 4, 1)).eval()
    found = fast(model, X, backends=DENSE)
    assert found.demasked.decisions[0].chosen == form
    expected = found(X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(2)
    assert torch.equal(found(X), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int4"},
        {"precision": "float32"},
        {"backends": ("torch", "cuda")},
        {"backends": ("sparse",)},
        {"backends": ()},
        {"threads": 0},
        {"threads": -1},
    ],
    ids=str,
)
def test_bad_input(options) -> None:
    with pytest.raises(BadInput):
        fast(convs(), X, **options)


def plant(monkeypatch, spoil) -> None:
    """Let `spoil(net)` change the form "norms in the weights" as it is built."""
    real = module.build

    def build(program, provenance, kind=module.Demasked):
        made = real(program, provenance, kind)
        return spoil(made) if kind is Optimized else made

    monkeypatch.setattr(module, "build", build)


def spoiled(change):
    def spoil(made):
        class Spoiled(type(made)):
            def __call__(self, *args, **kwargs):
                return pytree.tree_map(change, super().__call__(*args, **kwargs))

        made.__class__ = Spoiled
        return made

    return spoil


def raising(error: Exception):
    def change(_: Tensor) -> Tensor:
        raise error

    return change


def is_left_out(monkeypatch, change, model=None, args=(X,), error=Mismatch) -> str:
    """Why the form is left out; strict mode raises `error`."""
    plant(monkeypatch, spoiled(change))
    model = convs() if model is None else model
    with pytest.raises(error):
        demask.optimize(model, args, cache=False)
    with strict(False):
        found = demask.optimize(model, args, cache=False)
    assert not isinstance(found, Optimized)
    notes = [note for note in found.demasked.notes if "is left out" in note]
    assert notes, "a form with other outputs took part"
    return notes[0]


def test_other_numbers_are_left_out(monkeypatch) -> None:
    assert "differ" in is_left_out(monkeypatch, lambda t: t * 1.001)


def test_what_is_right_for_the_example_alone_is_left_out(monkeypatch) -> None:
    model = convs()
    expected = model(X)

    def change(made: Tensor) -> Tensor:
        return made if torch.allclose(made, expected, rtol=1e-3) else made * 1.001

    assert "random numbers" in is_left_out(monkeypatch, change, model)


def test_what_is_no_number_is_left_out(monkeypatch) -> None:
    is_left_out(monkeypatch, lambda t: t * float("nan"))


def test_one_number_that_is_none_is_left_out(monkeypatch) -> None:
    is_left_out(monkeypatch, lambda t: t.index_fill(0, torch.tensor([0]), float("nan")))


def test_another_shape_is_left_out(monkeypatch) -> None:
    is_left_out(monkeypatch, lambda t: t.unsqueeze(0))


def test_another_dtype_is_left_out(monkeypatch) -> None:
    is_left_out(monkeypatch, lambda t: t.double())


def test_other_positions_are_left_out(monkeypatch) -> None:
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convs()

        def forward(self, x):
            return self.net(x).flatten(1).argmax(1)

    is_left_out(monkeypatch, lambda t: t + 1, Classes().eval())


@pytest.mark.parametrize("error", [KeyError("no"), RuntimeError(""), *at_night(
    RuntimeError("no"), ValueError("no"), TypeError("no"), NotImplementedError("no"),
    IndexError("no"), AttributeError("no"), AssertionError("no"))], ids=repr)  # fmt: skip
def test_a_form_that_fails_is_left_out(monkeypatch, error) -> None:
    assert "it fails" in is_left_out(monkeypatch, raising(error), error=type(error))


def test_nothing_of_the_users_is_changed() -> None:
    model = convs()
    model[1].train()  # flags are the user's, of each module
    flags = [m.training for m in model.modules()]
    names = [sorted(vars(m)) for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    tensors = {k: id(v) for k, v in model.named_parameters()}
    x, threads = X.clone(), torch.get_num_threads()
    random, grad = torch.get_rng_state(), torch.is_grad_enabled()
    fast(model, x, threads=2)
    assert flags == [m.training for m in model.modules()]
    assert names == [sorted(vars(m)) for m in model.modules()]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert tensors == {k: id(v) for k, v in model.named_parameters()}
    assert torch.equal(x, X) and torch.get_num_threads() == threads
    assert torch.equal(random, torch.get_rng_state()) and torch.is_grad_enabled() == grad


class Writes(nn.Module):
    """Writes into its input."""

    def __init__(self):
        super().__init__()
        self.net = convs()

    def forward(self, x):
        return self.net(x.mul_(0.5))


def test_a_network_that_writes_to_its_input_is_refused_and_the_input_stays() -> None:
    x = X.clone()
    with pytest.raises(demask.NotExportable, match="input x is changed by forward"):
        fast(Writes().eval(), x)
    assert torch.equal(x, X)


CORRUPT = (b"", b"{", b"[1, 2]", b'{"version": 1}')
OTHERS = (b"\xff\xfe", b'{"version": 1, "machines": {"x": {"a": "b"}}}')


@pytest.mark.parametrize("content", [*OTHERS, *(pytest.param(text, marks=pytest.mark.nightly) for text in CORRUPT)])
def test_a_corrupt_cache_is_no_cache(content, tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    model = convs()
    agree(model(X), fast(model, X, cache=path)(X))
    if path.read_bytes() != content:
        json.loads(path.read_bytes())


def test_an_exported_program() -> None:
    model = convs()
    exported = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("n")},))
    found = fast(exported, X)
    agree(model(X), found(X))
    agree(model(X[:1]), found(X[:1]))


@dataclass
class Answer:
    image: Tensor
    total: Tensor


pytree.register_dataclass(Answer)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = convs()

    def forward(self, x, *, factor, flag=True):
        y = self.net(x * factor)
        return Answer(y, y.sum((1, 2, 3)) if flag else y)


def test_named_inputs_and_a_dataclass() -> None:
    model, factor = Named().eval(), torch.rand(2, 1, 1, 1)
    found = fast(model, X, kwargs={"factor": factor, "flag": True})
    a, b = model(X, factor=factor), found(X, factor=factor, flag=True)
    assert type(b) is Answer and dataclasses.is_dataclass(b)
    agree((a.image, a.total), (b.image, b.total))


def test_no_convolution() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 6)
    agree(model(x), fast(model, x)(x))


def test_an_encoder_layer() -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        wanted = model(x)
    agree(wanted, fast(model, x)(x))


def test_positions_as_inputs() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    x = torch.randint(11, (3, 4))
    found = fast(model, x)
    for given in (x, torch.randint(11, (5, 4)), torch.randint(11, (1, 4))):
        agree(model(given), found(given))


def test_no_parameters_no_tensors() -> None:
    class Plain(nn.Module):
        def forward(self, x):
            return (x.exp() + 1).log().sum(1), x

    x = torch.randn(3, 4)
    agree(Plain()(x), fast(Plain(), x)(x))


def test_an_image_without_a_batch() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3)).eval()
    x = torch.randn(3, 10, 9)
    agree(model(x), fast(model, x)(x))


@pytest.mark.parametrize("form", [*FORMS[3:], *at_night(*FORMS[:3])])
def test_one_image(form: str, monkeypatch) -> None:
    prefer(monkeypatch, form)
    model = convs()
    found = fast(model, X[:1], backends=DENSE)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 10, 10)
        agree(model(x), found(x))


@pytest.mark.parametrize("form", [*FORMS[2:], *at_night(*FORMS[:2])])
def test_outputs_lie_in_memory_as_before(form: str, monkeypatch) -> None:
    """A user's view of an output works on what optimize() gives back."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convs()

        def forward(self, x):
            y = self.net(x)
            return y, y[:, :2], y.transpose(2, 3), F.interpolate(y, scale_factor=2.0)

    prefer(monkeypatch, form)
    model = Parts().eval()
    for a, b in zip(model(X), fast(model, X, backends=DENSE)(X), strict=True):
        assert a.stride() == b.stride()


def test_next_to_segments_images_are_in_channels_last_only() -> None:
    pytest.importorskip("llvmlite")
    names = set(fast(convs(), X).demasked.decisions[0].seconds)
    dense = set(fast(convs(), X, backends=DENSE).demasked.decisions[0].seconds)
    assert {"segments of all layers", "demasked alone", "channels last"} <= names
    assert not {"norms in the weights", "layers with their epilogues"} & names
    assert set(FORMS) <= dense


def test_optimized_again() -> None:
    model = convs()
    once = fast(model, X)
    agree(model(X), fast(once, X)(X))
    agree(model(X), demask.demask(once, (X,))(X))


def test_a_bfloat16_network() -> None:
    model = convs().bfloat16()
    x = X.bfloat16()
    agree(model(x), fast(model, x)(x), 0.05)


def test_verified_and_saved(tmp_path) -> None:
    model = convs()
    found = fast(model, X)
    assert demask.verify(model, found, (X,)).ok
    demask.save(found, tmp_path / "x.demask")
    again = demask.load(tmp_path / "x.demask")
    agree(found(X), again(X), 0)
    assert again.demasked.decisions == found.demasked.decisions
    assert replace(again.demasked, decisions=()) == replace(found.demasked, decisions=())


@pytest.mark.nightly
@pytest.mark.parametrize("name", [c.name for c in MICROS])
def test_measured(name: str, monkeypatch) -> None:
    """Every micro-network, with costs measured: whichever is the fastest computes the same."""
    monkeypatch.undo()
    monkeypatch.setattr(race, "ROUNDS", 5)
    torch.manual_seed(7)
    model, args = next(c for c in MICROS if c.name == name).make()
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fastest = demask.optimize(model, args, cache=False)
    with torch.no_grad():
        agree(model(*args), fastest(*args))
