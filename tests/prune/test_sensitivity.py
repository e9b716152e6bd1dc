"""Sensitivity: accuracy and cost by group and amount; the real removal is what was predicted."""

import json

import pytest
import torch
from torch import nn

import demask
from demask import prune
from demask.errors import BadInput
from small_networks import SIZES, X, closeness, network


@pytest.fixture(scope="module")
def found():
    return prune.sensitivity(network(), closeness, (X,), amounts=(0.25, 0.5, 0.9))


def test_rows_are_all_groups_and_amounts(found):
    assert list(found.by_group) == list(SIZES)
    assert [(r.group, r.removed, r.size) for r in found.rows] == [
        (name, max(int(share * size), 1), size) for name, size in SIZES.items() for share in (0.25, 0.5, 0.9)
    ]
    assert found.dense.accuracy == 0 and found.dense.removed == 0
    assert all(row.accuracy < 0 for row in found.rows)


def test_the_real_removal_is_what_the_pruner_predicted(found):
    for row in found.rows[::2]:  # of every group and every amount
        model = network()
        pruner = prune.Pruner(
            model,
            (X,),
            allocation=lambda s, f, p, row=row: {
                name: len(x) - (row.removed if name == row.group else 0) for name, x in s.items()
            },
        )
        after = pruner.step().after
        assert (row.parameters, row.macs) == (after.parameters, after.macs)
        assert row.accuracy == closeness(model)
        pruner.remove()
        slim = demask.demask(model, (X,))
        assert (row.parameters, row.macs) == (slim.demasked.after.parameters, slim.demasked.after.macs)
    before = prune.Pruner(network(), (X,)).step().before
    assert (found.dense.parameters, found.dense.macs) == (before.parameters, before.macs)


def test_single_weights_cost_what_demask_leaves():
    """Few zeros leave all slices, for which demask is not called; many zeros remove some."""
    rows = prune.sensitivity(network(), closeness, (X,), amounts=(0.1, 0.95), structure="element")
    for row in rows.rows[:4]:
        model = network()
        left = {row.group: row.size - row.removed}
        pruner = prune.Pruner(
            model,
            (X,),
            structure="element",
            allocation=lambda s, f, p, left=left: {n: left.get(n, len(x)) for n, x in s.items()},
        )
        pruner.step()
        pruner.remove()
        after = demask.demask(model, (X,)).demasked.after
        assert (row.parameters, row.macs) == (after.parameters, after.macs)
    assert {row.macs < rows.dense.macs for row in rows.rows} == {True, False}


def test_predicted_milliseconds_fall_with_a_large_layer():
    """Where a layer is all the work, half of it takes about half of the time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    x = torch.randn(64, 512)
    rows = prune.sensitivity(model, lambda net: 1.0, (x,), amounts=(0.5,))
    assert 0.2 < rows.rows[0].milliseconds / rows.dense.milliseconds < 0.9


def test_the_model_is_unchanged():
    model = network().train()
    model(X).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]

    def recover(net):
        with torch.no_grad():
            net[0].weight.zero_()

    prune.sensitivity(model, closeness, (X,), amounts=(0.5,), recover=recover, score=prune.Taylor())
    assert model.training and list(before) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def test_recovery_helps():
    """The norm after the layer that reads masked channels has other statistics then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    prune.recalibrate_norms(model, [X])
    reference = model(X).detach()

    def evaluate(net):
        with torch.no_grad():
            return -float((net(X) - reference).norm())

    def recalibrate(net):
        prune.recalibrate_norms(net, [X])

    plain = prune.sensitivity(model, evaluate, (X,), amounts=(0.5,))
    better = prune.sensitivity(model, evaluate, (X,), amounts=(0.5,), recover=recalibrate)
    assert [row.group for row in better.rows] == ["0"]
    assert better.rows[0].accuracy > plain.rows[0].accuracy
    assert better.rows[0].macs == plain.rows[0].macs


def test_the_table_and_json(found):
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    macs = [r for r in found.rows if r.group == "3"][-1].macs
    assert f"{100 * macs / found.dense.macs:.1f}" in rows["3"]
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["rows"]) == 9 and data["rows"][0]["amount"] == 1 / 6


def test_the_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "sensitivity.svg")
    assert (tmp_path / "sensitivity.svg").read_text().count("predicted milliseconds") == 1
    with pytest.raises(BadInput, match=r"ends in \.svg"):
        found.plot(tmp_path / "sensitivity.gif")


@pytest.mark.parametrize("amounts", [(), (0.0,), (0.5, 1.0), (-0.1,)])
def test_bad_amounts(amounts):
    with pytest.raises(BadInput, match="above 0 and below 1"):
        prune.sensitivity(network(), closeness, (X,), amounts=amounts)


def test_an_evaluation_that_fails_is_named():
    def evaluate(model):
        if bool((model[3].weight == 0).all((1, 2, 3)).any()):
            raise RuntimeError("no luck")
        return 1.0

    with pytest.raises(BadInput, match=r"evaluate failed on 3 without 4 of 8: RuntimeError: no luck"):
        prune.sensitivity(network(), evaluate, (X,), amounts=(0.5,))
