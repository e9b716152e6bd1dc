"""What optimize() chose is taken from a file, for the same network on the same machine only."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import demask
from demask.failures import strict
from demask.files import optimized_files
from demask.files.optimized_files import EARLIER, LIMIT, MOST
from demask.machine import clock as timer
from demask.machine.cost import Costs
from demask.machine.private_files import PrivateFiles
from demask.tune.optimized_module import Optimized

module = importlib.import_module("demask.optimize")
race = importlib.import_module("demask.tune.race")
GIVEN, USED = "given", "chosen on "
X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(5))


class Clock:
    """Seconds of each contender by name, in the place of measured ones; `others` for the rest."""

    def __init__(self) -> None:
        self.seconds = {GIVEN: [1.0]}
        self.others = [0.5]

    def sampled(self, contenders, pairs=30, warmup=3, **_):
        for call in contenders.values():
            call()
        rows = {name: self.seconds.get(name, self.others) for name in contenders}
        return {name: (row * 30)[: max(pairs, 2)] for name, row in rows.items()}


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """Costs that are computed and seconds that are set: the machine's speed is not tested."""
    real, clock = Costs.open.__func__, Clock()

    def opened(cls, path=None, **options):
        return real(cls, path, **{**options, "measure": False})

    monkeypatch.setattr(Costs, "open", classmethod(opened))
    monkeypatch.setattr(timer, "race", clock.sampled)
    return clock


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "costs.json"


def network(last: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), last()
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4], model[1].bias[:4] = 0, 0, 0
    return model


def files(cache):
    folder = cache.with_suffix(".networks")
    return sorted(folder.iterdir()) if folder.exists() else []


def is_from_file(result: nn.Module) -> bool:
    return any(note.startswith(USED) for note in result.demasked.notes)


def test_a_second_run_takes_the_choice_from_the_file(cache, monkeypatch) -> None:
    model = network()
    first = demask.optimize(model, (X,), cache=cache)
    assert not is_from_file(first) and len(files(cache)) == 1
    assert cache.with_suffix(".networks").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(module, "shrink_program", None)  # is not called
    again = demask.optimize(model, (X,), cache=cache)
    assert is_from_file(again) and isinstance(again, Optimized)
    assert "2.00 x" in again.demasked.notes[-1] and USED in str(demask.report(again))
    assert replace(again.demasked, notes=first.demasked.notes) == first.demasked
    for batch in (2, 5):
        x = torch.randn(batch, 3, 10, 10)
        assert torch.equal(first(x), again(x))
    with torch.no_grad():  # the result owns its weights
        model[3].weight.zero_()
    assert torch.equal(first(X), again(X))


def changed_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model[3].weight[0, 7, 0, 0] += 1e-3


def masked_further(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[4], model[0].bias[4], model[1].bias[4] = 0, 0, 0


CHANGES = {
    "weight": lambda m: (changed_weight(m), X, {}),
    "mask": lambda m: (masked_further(m), X, {}),
    "graph": lambda m: (m.__setitem__(4, nn.Tanh()), X, {}),
    "threads": lambda m: (None, X, {"threads": 2}),
    "backends": lambda m: (None, X, {"backends": ("torch",)}),
    "sizes": lambda m: (None, X[:, :, :9], {}),
    "batch": lambda m: (None, X.repeat(2, 1, 1, 1), {}),
    "layout": lambda m: (None, X.contiguous(memory_format=torch.channels_last), {}),
    "dtype": lambda m: (m.double(), X.double(), {}),
    "table": lambda m: (None, X, {"table": demask.ops.TABLE.extended({})}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", CHANGES)
def test_another_network_or_option_is_measured(what: str, cache) -> None:
    model = network()
    demask.optimize(model, (X,), cache=cache, threads=1)
    _, x, options = CHANGES[what](model)
    other = demask.optimize(model, (x,), **{"cache": cache, "threads": 1, **options})
    assert not is_from_file(other)
    assert len(files(cache)) == (1 if what == "table" else 2)


def test_another_version_of_the_code_is_measured(cache, monkeypatch) -> None:
    demask.optimize(network(), (X,), cache=cache)
    monkeypatch.setattr(optimized_files, "_code_digest", lambda: "other")
    assert not is_from_file(demask.optimize(network(), (X,), cache=cache))


def test_all_of_the_code_counts(monkeypatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(optimized_files, "files_digest", read.extend)
    optimized_files._code_digest.__wrapped__()
    package = Path(demask.__file__).parent
    names = {str(path.relative_to(package)) for path in read}
    assert {"__init__.py", "optimize.py", "tune/race.py", "exec/tape/tape.py"} <= names
    assert names == {str(path.relative_to(package)) for path in package.rglob("*.py")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]],
)
def test_a_damaged_file_is_replaced(damage, cache) -> None:
    model = network()
    demask.optimize(model, (X,), cache=cache)
    (path,) = files(cache)
    path.write_bytes(damage(path.read_bytes()))
    other = demask.optimize(model, (X,), cache=cache)
    assert not is_from_file(other)
    assert any(note.startswith(f"{EARLIER}: its file is not used") for note in other.demasked.notes)
    assert is_from_file(demask.optimize(model, (X,), cache=cache))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("content", [b"", b"no archive", b"2026-11-24 00:00 UTC\nno archive"])
def test_a_foreign_file_is_not_used(content: bytes, cache) -> None:
    demask.optimize(network(), (X,), cache=cache)
    (path,) = files(cache)
    PrivateFiles(path.parent, "network", LIMIT, MOST).write(path.name, content)
    other = demask.optimize(network(), (X,), cache=cache)
    assert any(note.startswith(f"{EARLIER}: its file is not used") for note in other.demasked.notes)


def test_a_network_that_computes_something_else_is_not_taken(cache) -> None:
    demask.optimize(network(), (X,), cache=cache)
    (path,) = files(cache)
    other = network()
    changed_weight(other)
    demask.optimize(other, (X,), cache=cache)
    wrong = next(file for file in files(cache) if file != path)
    stored = PrivateFiles(path.parent, "network", LIMIT, MOST)
    stored.write(path.name, stored.read(wrong.name))
    with strict(False):
        result = demask.optimize(network(), (X,), cache=cache)
    assert not is_from_file(result)
    assert any(f"{EARLIER}: left out, output 0" in note for note in result.demasked.notes)
    assert (result(X) - network()(X)).abs().max() < 1e-5


def test_a_choice_that_is_slower_now_is_measured_anew(cache, clock) -> None:
    demask.optimize(network(), (X,), cache=cache)
    clock.seconds[EARLIER] = [1.1]
    other = demask.optimize(network(), (X,), cache=cache)
    assert any("may be slower now (ratio 0.91)" in note for note in other.demasked.notes)
    assert other.demasked.decisions[0].chosen != GIVEN and not is_from_file(other)


def test_few_rounds_that_do_not_suffice_become_many(cache, clock) -> None:
    demask.optimize(network(), (X,), cache=cache)
    clock.seconds[EARLIER] = [1.1, 1.1, 1.1, 1.1, 1.1, *[0.5] * 25]
    assert is_from_file(demask.optimize(network(), (X,), cache=cache))


def test_what_a_busy_machine_measured_is_measured_anew(cache, clock) -> None:
    clock.seconds[GIVEN] = [1.5]
    demask.optimize(network(), (X,), cache=cache)
    clock.seconds[GIVEN] = [1.0]
    other = demask.optimize(network(), (X,), cache=cache)
    assert any("the machine was slower when it was chosen" in n for n in other.demasked.notes)
    again = demask.optimize(network(), (X,), cache=cache)
    assert is_from_file(again)
    assert not any(note.startswith(EARLIER) for note in again.demasked.notes)
    clock.seconds[GIVEN] = [2.0]  # now it is busy
    assert is_from_file(demask.optimize(network(), (X,), cache=cache))


def test_what_is_not_stored(cache, clock) -> None:
    demask.optimize(network(), (X,), cache=False)
    demask.optimize(network(), (X,), cache=cache, precision="bf16")
    clock.others = [0.1, 0.5, 0.9]  # a wide spread
    demask.optimize(network(), (X,), cache=cache)
    clock.others = [2.0]  # the original network is returned
    demask.optimize(network(), (X,), cache=cache)
    assert files(cache) == []


def test_parts_have_files_of_their_own(cache) -> None:
    model = nn.Sequential(network(), nn.Flatten())
    demask.optimize(model, (X,), modules=["0"], cache=cache)
    again = demask.optimize(model, (X,), modules=["0"], cache=cache)
    assert len(files(cache)) == 1
    assert any(USED in note for note in again.demasked.notes)
