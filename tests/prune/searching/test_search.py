"""The search: its proposals, its storage, its workers; and what it does when one is killed."""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch

from small_networks import SIZES, X, closeness, network, noted_closeness

pytest.importorskip("optuna", reason="the extra `search` is not installed")

import demask
import own_process
from demask import prune
from demask.errors import BadInput, DemaskError
from demask.installation import install_command
from demask.prune.search import TrialStore
from demask.prune.trial import SearchTrial, propose

RANGES = {name: (0, size - 1) for name, size in SIZES.items()}
IDENTITY = {"model": "a", "cost": "macs", "budget": None}


def values(search):
    return [(t.number, t.removed, t.accuracy, t.macs) for t in search.trials]


@pytest.fixture(scope="module")
def reference():
    """Trials one after the other: more than the ten random ones that the sampler starts with."""
    return prune.search(network(), closeness, (X,), trials=15, batch=4, seed=3)


def test_trials_measure_what_demask_removes(reference):
    assert [t.number for t in reference.trials] == list(range(15))
    assert [set(t.removed) for t in reference.trials] == [set(SIZES)] * 15
    assert reference.dense.macs > max(t.macs for t in reference.trials[1:3])
    trial = reference.trials[7]
    model = network()
    pruner = reference.pruner(model, (X,), trial)
    assert {c.name: c.units - int(c.alive(pruner.masks()).sum()) for c in pruner.candidates} == (dict(trial.removed))
    pruner.remove()
    slim = demask.demask(model, (X,))
    assert slim.demasked.after.macs == trial.macs
    assert slim.demasked.after.parameters == trial.parameters
    assert closeness(model) == trial.accuracy


def test_the_model_and_the_random_generator_are_unchanged(reference):
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    prune.search(model, closeness, (X,), trials=1, recover=lambda net: torch.rand(3))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and list(before) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_the_front_holds_what_no_other_beats(reference):
    done = reference.trials
    for trial in done:
        beaten = any(
            other.macs <= trial.macs
            and other.accuracy >= trial.accuracy
            and (other.macs, other.accuracy) != (trial.macs, trial.accuracy)
            for other in done
        )
        assert (trial in reference.front) == (not beaten)
    assert reference.best.accuracy == max(t.accuracy for t in done)
    text = str(reference)
    assert max(map(len, text.splitlines())) <= 100 and "15 trials" in text
    assert json.loads(json.dumps(reference.to_dict()))["front"][-1] == reference.best.number


def test_recover_may_train_and_is_seeded():
    def noise(model):
        with torch.no_grad():
            model[8].bias += torch.rand(4)

    runs = [prune.search(network(), closeness, (X,), trials=2, recover=noise) for _ in range(2)]
    assert values(runs[0]) == values(runs[1])
    assert runs[0].trials[0].accuracy != runs[0].trials[1].accuracy


def test_networks_over_the_budget_are_not_evaluated():
    seen = []

    def evaluate(model):
        seen.append(model)
        return closeness(model)

    dense = prune.search(network(), closeness, (X,), trials=1).dense
    search = prune.search(network(), evaluate, (X,), trials=8, budget=0.4 * dense.macs, seed=1)
    over = [t for t in search.trials if t.macs > 0.4 * dense.macs]
    assert over and all(t.accuracy is None for t in over)
    assert len(seen) == 1 + len(search.trials) - len(over)  # and the network as it is
    assert search.best.macs <= 0.4 * dense.macs
    least = prune.search(network(), closeness, (X,), trials=1, amounts=(0.9, 0.9)).trials[0].macs
    tiny = prune.search(network(), closeness, (X,), trials=2, budget=least)
    with pytest.raises(BadInput, match=f"no trial fits the budget of {least}: the cheapest of 2"):
        _ = tiny.best
    assert "2 over the budget" in str(tiny)


@pytest.mark.parametrize("cost", ["macs", "parameters"])
def test_a_budget_that_nothing_fits_is_refused_at_once(cost):
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluated = []

    def evaluate(network):
        evaluated.append(network)
        return 1.0

    with pytest.raises(BadInput, match=f"no network fits the budget of 1 {cost}: with the largest"):
        prune.search(model, evaluate, (X,), trials=50, budget=1, cost=cost)
    assert len(evaluated) == 1  # the network as it is
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_other_costs(reference):
    by = {c: prune.search(network(), closeness, (X,), trials=2, cost=c) for c in ("ms", "parameters")}
    assert by["ms"].cost_of(by["ms"].trials[0]) == by["ms"].trials[0].milliseconds > 0
    assert by["parameters"].cost_of(by["parameters"].trials[0]) == reference.trials[0].parameters


def test_the_picture(reference, tmp_path):
    pytest.importorskip("matplotlib")
    reference.plot(tmp_path / "search.svg")
    assert "as it is" in (tmp_path / "search.svg").read_text()
    with pytest.raises(BadInput, match=r"ends in \.svg"):
        reference.plot(tmp_path / "search.txt")


# -- proposals ------------------------------------------------------------------------------------


def test_proposals_depend_on_the_history_and_the_seed_alone(reference):
    options = {"cost": "macs", "budget": None, "seed": 3}
    whole = propose(RANGES, reference.trials[:4], range(4, 8), **options)
    assert whole == propose(RANGES, reference.trials[:4], range(4, 8), **options)
    assert whole == [dict(t.removed) for t in reference.trials[4:8]]
    assert whole != propose(RANGES, reference.trials[:4], range(4, 8), **options | {"seed": 4})
    assert all(0 <= n <= RANGES[name][1] for p in whole for name, n in p.items())


def test_the_first_proposals_are_uniform():
    first = propose(RANGES, [], range(4), cost="macs", budget=None, seed=0)
    assert first[:3] == [{n: round(share * most) for n, (_, most) in RANGES.items()} for share in (0.25, 0.5, 0.75)]


@pytest.mark.parametrize("budget", [None, 60.0])
def test_proposals_get_better_than_chance(budget):
    """Accuracy falls with slices of all groups but "3", and cost with slices of all."""
    ranges = dict.fromkeys(SIZES, (0, 20))
    history = []
    for start in range(0, 60, 4):
        options = {"cost": "macs", "budget": budget, "seed": 0}
        for number, removed in enumerate(propose(ranges, history, range(start, start + 4), **options)):
            macs = 100 - sum(removed.values())
            fits = budget is None or macs <= budget
            accuracy = -float(removed["0"] + removed["6"]) if fits else None
            history.append(SearchTrial(start + number, removed, {}, accuracy, 0, macs, None))
    early, late = history[3:23], history[40:]

    def mean(trials):
        return sum(t.removed["3"] for t in trials) / len(trials)

    assert mean(late) > mean(early) + 3
    if budget is not None:
        over = [sum(t.accuracy is None for t in trials) for trials in (early, late)]
        assert over[1] < over[0]


# -- storage --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["search.journal", "search.sqlite"])
def test_a_search_goes_on_from_its_storage(reference, tmp_path, name):
    count = []

    def evaluate(model):
        count.append(1)
        if len(count) == 15:  # the network as it is, 13 trials, and this one
            raise RuntimeError("out of luck")
        return closeness(model)

    options = {"batch": 4, "seed": 3, "storage": tmp_path / name}
    with pytest.raises(BadInput, match=r"evaluate failed on .* trial 13: Runtime.*luck"):
        prune.search(network(), evaluate, (X,), trials=15, **options)
    search = prune.search(network(), evaluate, (X,), trials=15, **options)
    assert values(search) == values(reference)
    assert len(count) == 17
    again = prune.search(network(), evaluate, (X,), trials=6, **options)
    assert values(again) == values(reference)[:6] and len(count) == 17


SCRIPT = """
import sys
from small_networks import X, network, noted_closeness
from functools import partial
from demask import prune
prune.search(network(), partial(noted_closeness, folder=sys.argv[2]), (X,), trials=10, batch=4,
             seed=3, storage=sys.argv[1])
"""


def test_a_killed_process_goes_on(reference, tmp_path):
    """SIGKILL in the middle of a trial; the next process ends with what no kill would give."""
    folder, file = tmp_path / "seen", tmp_path / "search.journal"
    folder.mkdir()
    process = own_process.start(SCRIPT, file, folder)
    wait_for(lambda: len(list(folder.iterdir())) == 4)
    process.kill()
    process.communicate()
    with open(file, "ab") as journal:
        journal.write(b'{"op_code":')  # what a killed writer leaves
    before = len(stored_numbers(file))
    assert 1 <= before <= 3
    noted = partial(noted_closeness, folder=folder)
    search = prune.search(network(), noted, (X,), trials=10, batch=4, seed=3, storage=file)
    assert values(search) == values(reference)[:10]
    assert len(list(folder.iterdir())) == 4 + 10 - before
    assert len(stored_numbers(file)) == 10


def stored_numbers(file):
    """The numbers of the trials in a journal, as often as they are there."""
    lines = [line for line in file.read_bytes().splitlines() if b"demask trial" in line]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line)["user_attrs"]["demask trial"]["number"])
        except (ValueError, KeyError, TypeError):
            found.append(line)
    return found


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model": "other"}, "model"),
        ({"structure": "unit"}, "groups"),
        ({"amounts": (0.1, 0.5)}, "amounts"),
        ({"score": prune.L2()}, "score"),
        ({"seed": 4}, "seed"),
        ({"cost": "parameters"}, "cost"),
        ({"budget": 9.0}, "budget"),
        ({"skip": ["6"]}, "groups"),
    ],
)
def test_a_storage_of_another_search_is_refused(tmp_path, change, name):
    file = tmp_path / "search.journal"
    prune.search(network(), closeness, (X,), trials=1, storage=file)
    content, model, options = file.read_bytes(), network(), dict(change)
    if options.pop("model", None):
        with torch.no_grad():
            model[0].weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(BadInput, match=f"is of another search .*{name}.* differ"):
        prune.search(model, closeness, (X,), trials=1, storage=file, **options)
    assert file.read_bytes() == content


def test_what_is_no_storage_is_refused(tmp_path):
    (tmp_path / "text.journal").write_text("hello\n")
    (tmp_path / "text.db").write_text("hello" * 100)
    for name, words in (
        ("text.journal", "cannot read"),
        ("text.db", "cannot read"),
        ("search.txt", "ends in"),
        ("missing/search.db", "does not exist"),
    ):
        with pytest.raises(BadInput, match=words):
            prune.search(network(), closeness, (X,), trials=1, storage=tmp_path / name)


def test_a_trial_that_is_stored_twice_counts_once(tmp_path, reference):
    store = TrialStore(tmp_path / "search.journal", IDENTITY)
    for trial in (*reference.trials[:2], reference.trials[1]):
        store.add(trial)
    assert list(TrialStore(tmp_path / "search.journal", IDENTITY).trials().values()) == list(reference.trials[:2])


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 0}, "trials and batch of 1 or more"),
        ({"batch": 0}, "trials and batch of 1 or more"),
        ({"amounts": (0.5, 1.0)}, "from 0 to below 1"),
        ({"amounts": (0.0, 0.01)}, "amounts of one channel or more"),
        ({"cost": "flops"}, "one of macs, ms, parameters"),
        ({"budget": 0}, "a budget above 0"),
        ({"seed": -1}, "a seed of 0 or more"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(BadInput, match=words):
        prune.search(network(), closeness, (X,), **options)


@pytest.mark.parametrize("result", [float("nan"), "many", None])
def test_evaluations_that_are_no_number(result):
    with pytest.raises(BadInput, match=r"evaluate (returned nan|failed on) "):
        prune.search(network(), lambda model: result, (X,), trials=1)


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(BadInput, match=re.escape(install_command("search"))):
        prune.search(network(), closeness, (X,), trials=1)


# -- workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    """Two processes on this machine; one that is killed is started anew."""
    distributed = pytest.importorskip("distributed", reason="the extra `search` is not installed")
    with (
        own_process.workers(),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_what_cannot_be_sent_to_workers(client):
    lock = threading.Lock()
    with pytest.raises(BadInput, match="cannot be sent to workers"):
        prune.search(network(), lambda model: lock.locked(), (X,), trials=1, client=client)


def test_what_evaluate_raises_on_a_worker_is_raised(client):
    def fails(model):
        if float(model[0].weight.abs().min()) == 0:
            raise ValueError("on a worker")
        return 1.0

    with pytest.raises(BadInput, match=r"evaluate failed on the network of trial 0.*on a worker"):
        prune.search(network(), fails, (X,), trials=1, client=client)


@pytest.mark.nightly
def test_a_worker_that_is_killed_loses_no_trial(client, reference, tmp_path):
    """One worker is killed in the middle of a trial: all trials complete, once, as without."""
    folder, file = tmp_path / "seen", tmp_path / "search.journal"
    folder.mkdir()
    own, killed = os.getpid(), []

    def kill():
        wait_for(lambda: len(workers_seen()) >= 4)
        killed.append(random.choice(workers_seen()[-2:]))
        os.kill(killed[0], signal.SIGKILL)

    def workers_seen():
        names = sorted(folder.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
        pids = [int(path.name.partition("-")[0]) for path in names]
        return [pid for pid in pids if pid != own]

    killer = threading.Thread(target=kill)
    killer.start()
    search = prune.search(
        network(),
        partial(noted_closeness, folder=folder),
        (X,),
        trials=10,
        batch=4,
        seed=3,
        client=client,
        storage=file,
    )
    killer.join()
    assert killed and len(set(workers_seen()) | set(killed)) >= 2
    assert values(search) == values(reference)[:10]
    assert sorted(stored_numbers(file)) == list(range(10))


def test_a_trial_that_kills_its_worker_is_told_of(client, tmp_path):
    def fatal(model):
        if bool((model[0].weight == 0).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    client.run_on_scheduler(lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 0))
    with pytest.raises(DemaskError, match=r"trial \d killed its workers"):
        prune.search(network(), fatal, (X,), trials=2, amounts=(0.4, 0.5), client=client)
