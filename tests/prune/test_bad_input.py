"""What users may get wrong: a clear error, and nothing is changed."""

from __future__ import annotations

import copy
import sqlite3

import pytest
import torch
from torch import nn

import demask
from demask import prune
from demask.errors import BadInput
from small_networks import X, closeness, network

Z = torch.ones(4, 6)


def small(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.fixture
def unchanged():
    """A network that must be as it was after the test."""
    model = small()
    before = copy.deepcopy(model.state_dict())
    yield model
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert number_of_hooks(model) == 0


def fails(view):
    raise ZeroDivisionError("no luck")


# -- what a Pruner is constructed with -------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"score": "l1"}, r"score to be one such as prune\.L1\(\), or a function; got 'l1'"),
        ({"score": prune.L1}, "got the class L1"),
        ({"allocation": 0.5}, r"allocation to be one such as prune\.MACs\(0\.5\)"),
        ({"allocation": prune.MACs}, "got the class MACs"),
        ({"schedule": 0.5}, r"schedule to be one such as prune\.OneShot\(0\.5\)"),
        ({"structure": "chanel"}, "expected a structure of channel, unit, head, .* got 'chanel'"),
        ({"skip": "0"}, "skip to be a list of names or globs, got '0'"),
        ({"skip": [0]}, r"skip to be a list of names or globs, got \[0\]"),
        ({"skip": ["conv*"]}, r"got 'conv\*', which names none; see model.named_modules"),
    ],
)
def test_options(unchanged, options, words):
    with pytest.raises(BadInput, match=words):
        prune.Pruner(unchanged, Z, **options)


@pytest.mark.parametrize("inputs", [(torch.ones(4, 5),), (Z, Z), (), [Z], None])
def test_example_inputs(unchanged, inputs):
    with pytest.raises(BadInput, match="example"):
        prune.Pruner(unchanged, inputs)


def test_an_optimized_network_cannot_be_masked():
    model = network().eval()
    fast = demask.optimize(model, (X,), cache=False)
    if fast.demasked.decisions[0].chosen == "given":
        pytest.skip("the original was the fastest")
    before = number_of_hooks(fast)
    try:
        prune.Pruner(fast, X)
    except BadInput as error:
        assert "prune the network that demask.optimize was called with" in str(error)
    assert number_of_hooks(fast) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own
def test_a_compiled_network_is_masked_as_its_original():
    model = small()
    pruner = prune.Pruner(torch.compile(model), Z)
    assert pruner.model is model and pruner.step(0.5).left == {"0": 4}


# -- what a step calls -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"score": fails}, "the score on 0 failed: ZeroDivisionError: no luck"),
        ({"score": lambda view: torch.full((8,), torch.nan)}, "8 of 8 scores of 0 are NaN"),
        ({"score": lambda view: torch.ones(3)}, "expected 8 scores for 0"),
        ({"schedule": fails}, "the schedule on step 1 failed"),
        ({"schedule": lambda step: 2}, "expected fraction"),
        ({"allocation": lambda s, f, p: 1 / 0}, "the allocation failed: ZeroDivisionError"),
        ({"allocation": lambda s, f, p: None}, "how many units stay by name, of 0; got None"),
        ({"allocation": lambda s, f, p: {}}, "how many units of 0 stay"),
        ({"allocation": lambda s, f, p: {"0": -3}}, "an integer of 0 or more"),
        ({"allocation": lambda s, f, p: {"0": torch.ones(3) > 0}}, r"or which, bool \[8\]"),
        ({"allocation": prune.MACs(budget=3)}, "expected a budget of at least 40 MACs"),
    ],
)
def test_steps(unchanged, options, words):
    pruner = prune.Pruner(unchanged, Z, **options)
    with pytest.raises(BadInput, match=words):
        pruner.step()
    assert pruner.steps == 0


# -- state -----------------------------------------------------------------------------------------


def state_of(model: nn.Module, score=None, **changes) -> dict:
    pruner = prune.Pruner(model, Z, score=score)
    model(Z)
    pruner.step()
    return pruner.state_dict() | changes


@pytest.mark.parametrize(
    "state, words",
    [
        (dict, "one without masks, statistics, steps, structure"),
        (lambda: state_of(small(), steps="x"), "one after 'x' steps"),
        (lambda: state_of(small(), steps=-1), "one after -1 steps"),
        (lambda: state_of(small(), masks=None), "expected masks by name"),
        (lambda: state_of(small(), statistics=None), "expected statistics of inputs by layer"),
        (lambda: state_of(small(), structure="element"), "a Pruner of channel, got one element"),
        (lambda: state_of(small(6)), r"a bool mask of \(8, 6\) for 0.weight, got torch.bool \(6"),
        (lambda: state_of(small(6), prune.Fluctuation(), masks={}), "statistics of the 8 input"),
        (
            lambda: state_of(small(), statistics={"9.weight": {"count": 1}}),
            "statistics of the layers 2.weight, got some of '9.weight'",
        ),
        (lambda: state_of(small(), statistics={"2.weight": {"count": 1}}), "this is the state of another pruner"),
    ],
)
def test_states_of_other_pruners(unchanged, state, words):
    pruner = prune.Pruner(unchanged, Z, score=prune.Fluctuation())
    with pytest.raises(BadInput, match=words):
        pruner.load_state_dict(state())
    assert pruner.steps == 0 and not pruner.masks()
    pruner.remove()


def test_a_state_with_statistics_continues():
    first, second = (prune.Pruner(small(), Z, score=prune.Fluctuation()) for _ in range(2))
    first.model(torch.randn(4, 6))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.scores()["0"], second.scores()["0"])


# -- searches, sensitivity, norms ------------------------------------------------------------------

FOREIGN = {
    "notes.log": b"my notes\nand a last line without its end",
    "one.log": b"a single line",
    "bytes.journal": bytes(range(256)),
    "other.log": b'{"a": 1}\n',
    "text.sqlite": b"not a database",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_storages_that_are_other_files_stay_as_they_are(name, tmp_path):
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    path = tmp_path / name
    path.write_bytes(FOREIGN[name])
    with pytest.raises(BadInput, match=r"as the trials of a search .*give another file"):
        prune.search(network(), closeness, (X,), trials=1, storage=path)
    assert path.read_bytes() == FOREIGN[name]


def test_a_database_of_other_tables_stays_as_it_is(tmp_path):
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    path = tmp_path / "mine.db"
    database = sqlite3.connect(path)
    database.execute("create table birds (name)")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(BadInput, match="it has the tables birds"):
        prune.search(network(), closeness, (X,), trials=1, storage=path)
    assert path.read_bytes() == before


def test_a_client_is_no_address():
    with pytest.raises(BadInput, match=r"client to be a distributed\.Client, got 'tcp"):
        prune.search(network(), closeness, (X,), trials=1, client="tcp://host:8786")


def test_amounts_are_numbers():
    with pytest.raises(BadInput, match="amounts above 0 and below 1"):
        prune.sensitivity(network(), closeness, (X,), amounts=("half",))


def test_names_to_skip_are_a_list():
    for call in (prune.sensitivity, prune.search):
        with pytest.raises(BadInput, match="skip to be a list"):
            call(network(), closeness, (X,), skip="0")


def test_one_batch_is_no_list_of_batches():
    with pytest.raises(BadInput, match=r"got one Tensor: pass \[batch\]"):
        prune.recalibrate_norms(nn.BatchNorm1d(6), Z)


# -- after demask ----------------------------------------------------------------------------------


def test_an_optimizer_of_another_network_stays_as_it_is():
    model, other = small(), small()
    prune.Pruner(model, Z).step()
    slim = demask.demask(model, (Z,))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="no parameter of the network that was demasked"):
        demask.carry(slim, optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=True))


def test_what_is_no_small_network_cannot_be_expanded():
    with pytest.raises(BadInput, match="expected a network that demask returned, got a Sequential"):
        demask.expand(small())
