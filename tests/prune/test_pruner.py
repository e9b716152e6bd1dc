"""The Pruner: masks in training loops, what it reports, and what it refuses."""

from __future__ import annotations

import copy
import io
import os
import socket

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import demask
import own_process
from demask import BadInput
from demask.prune import (
    Activation,
    Cubic,
    Fluctuation,
    Global,
    Iterative,
    OneShot,
    OutlierWeighted,
    Pruner,
    Random,
    Taylor,
)
from prune_networks import IMAGE, Residual, network


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["residual", "excited", "u-net", "attention", "recurrent"])
def test_what_it_predicts_is_what_demask_removes(name: str) -> None:
    model, inputs = network(name)
    pruned = Pruner(model, inputs).step(0.5)
    record = demask.demask(model, inputs, result="graph").demasked
    assert (pruned.after.parameters, pruned.after.macs) == (record.after.parameters, record.after.macs)
    assert (pruned.before.parameters, pruned.before.macs) == (record.before.parameters, record.before.macs)
    assert pruned.after.macs < pruned.before.macs


@pytest.mark.parametrize("structure", ["channel", "element", "block:2x1", "2:4"])
def test_masked_weights_stay_zero_in_training_and_parameters_stay_the_same_objects(structure: str) -> None:
    model = mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, weight_decay=0.1)
    pruner = Pruner(model, X, structure=structure)
    for step in range(4):
        if step == 1:
            pruner.step(0.5)
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    masks = pruner.masks()
    assert all(p is q for p, q in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    for name, mask in masks.items():
        layer, tensor = name.split(".")
        assert not getattr(model[int(layer)], tensor)[~mask].any()
    expected = model(X)
    pruner.remove()
    assert {id(p) for p in model.parameters()} == {id(p) for p in parameters}
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in mlp().named_parameters()}
    assert not list(model.buffers())
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()


def test_masks_only_grow() -> None:
    model = mlp()
    pruner = Pruner(model, X, schedule=Cubic(0, 0.75, steps=3), score=Random())
    before: dict[str, Tensor] = {}
    for _ in range(5):
        pruner.step()
        masks = pruner.masks()
        assert all(not (masks[name] & ~mask).any() for name, mask in before.items())
        before = masks
    assert pruner.step(0.25).left == {"0": 2, "2": 2}


def test_steps_of_schedules() -> None:
    calls = []
    pruner = Pruner(mlp(), X, schedule=Iterative(2, lambda: calls.append(1), fraction=0.5))
    assert [pruner.step().left["0"] for _ in range(3)] == [6, 4, 4]
    assert len(calls) == 3


def test_structures_of_single_weights() -> None:
    model = mlp()
    Pruner(model, X, structure="2:4").step(0.5)
    zeros = (model[0].weight.reshape(8, 1, 4) == 0).sum(2)
    assert bool((zeros == 2).all())
    rest = model[4].weight[:, 4:]  # the last 2 of 6 inputs: both stay
    assert bool((rest != 0).all())
    model = mlp()
    Pruner(model, X, structure="block:4x1", skip=["4"]).step(0.5)
    blocks = (model[0].weight.reshape(2, 4, 4) == 0).sum(1)
    assert set(blocks.flatten().tolist()) == {0, 4}
    assert int((blocks == 4).sum()) == 4
    assert bool((model[4].weight != 0).all())


def test_elements_have_the_lowest_magnitudes() -> None:
    model, before = mlp(), mlp()
    Pruner(model, X, structure="element").step(0.25)
    magnitudes = before[2].weight.abs()
    expected = magnitudes > magnitudes.flatten().sort().values[11]
    assert torch.equal(model[2].weight != 0, expected)


def test_of_convolutions_inputs_are_consecutive_in_patterns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    Pruner(model, torch.zeros(1, 8, 6, 6), structure="2:4").step(0.5)
    assert bool(((model[0].weight.reshape(4, 2, 4, 3, 3) == 0).sum(2) == 2).all())


def test_what_reads_no_module_is_parametrized() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 4, 12, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8)
    pruner = Pruner(model, x, structure="element")
    pruner.step(0.5)
    weight = model.self_attn.out_proj.weight
    assert int((weight == 0).sum()) == 32
    model.train()(x).sum().backward()
    output = model.eval()(x)
    pruner.remove()
    assert type(model.self_attn.out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    torch.testing.assert_close(model(x), output, rtol=1e-6, atol=1e-6)


def test_parametrized_tensors_keep_their_parametrization() -> None:
    model = mlp()
    parametrizations.weight_norm(model[2], "weight")
    pruner = Pruner(model, X)
    pruner.step(0.5)
    assert int((model[2].weight == 0).all(1).sum()) == 3
    assert demask.demask(model, (X,)).demasked.after.parameters == pruner.removal_cost.masked(pruner.masks()).parameters


def test_state_is_saved_and_loaded() -> None:
    model, other = mlp(), mlp()
    pruner = Pruner(model, X, score=Activation(), schedule=Cubic(0, 0.75, steps=3))
    model(X)
    pruner.step()
    file = io.BytesIO()
    torch.save(pruner.state_dict(), file)
    file.seek(0)
    again = Pruner(other, X, score=Activation(), schedule=Cubic(0, 0.75, steps=3))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.masks().keys() == pruner.masks().keys()
    first, second = pruner.step(), again.step()
    assert (first.left, first.step) == (second.left, second.step)
    assert all(torch.equal(mask, again.masks()[name]) for name, mask in pruner.masks().items())
    torch.testing.assert_close(model(X), other(X), rtol=0, atol=0)


def test_two_pruners_of_one_model() -> None:
    model, inputs = network("attention")
    Pruner(model, inputs, structure="head").step(0.5)
    pruned = Pruner(model, inputs, structure="unit").step(0.5)
    record = demask.demask(model, inputs).demasked
    assert (pruned.after.parameters, pruned.after.macs) == (record.after.parameters, record.after.macs)


def test_allocations() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[:4] *= 1e-3
    assert Pruner(model, X, allocation=Global()).step(0.3).left == {"0": 4, "2": 6}
    assert Pruner(mlp(), X, allocation=Global(floor=0.9)).step(0.5).left == {"0": 8, "2": 6}
    left = Pruner(mlp(), X, allocation=OutlierWeighted(multiple=1.5)).step(0.5).left
    assert sum(left.values()) in (6, 7, 8)
    only = Pruner(mlp(), X, allocation=lambda scores, fraction, pruner: {"0": 3, "2": 6}).step()
    assert only.left == {"0": 3, "2": 6}


def test_example_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, values):
            return self.body(values)

    assert Pruner(Named(), {"values": X}).step().left == {"body.0": 4, "body.2": 3}


def nothing_changes(model: nn.Module, text: str, step) -> None:
    """`step` raises BadInput, and the model has the tensors it had."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInput, match=text):
        step()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[k]) or bool(t.isnan().any()) for k, t in before.items())


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda view: torch.full((view.candidates.units,), float("nan")), "8 of 8 scores of 0 are NaN"),
        (lambda view: torch.ones(3), "expected 8 scores for 0"),
        (lambda view: None, "expected 8 scores for 0, got None"),
        (Taylor(), "0.weight has no gradient: run loss.backward"),
        (Activation(), "no inputs of the layer of 2.weight were seen"),
        (Fluctuation(), "no inputs of the layer of 2.weight were seen"),
    ],
)
def test_scores_that_cannot_be_used(score, text: str) -> None:
    model = mlp()
    nothing_changes(model, text, Pruner(model, X, score=score).step)


def test_weights_of_nan_are_refused() -> None:
    model = mlp()
    pruner = Pruner(model, X)
    with torch.no_grad():
        model[2].weight[1, 1] = float("nan")
    nothing_changes(model, "1 of 6 scores of 2 are NaN", pruner.step)


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan"), "half", True])
def test_bad_fractions(fraction) -> None:
    model = mlp()
    nothing_changes(model, "from 0 to less than 1", lambda: Pruner(model, X).step(fraction))
    with pytest.raises(BadInput, match="from 0 to less than 1"):
        OneShot(fraction)


def test_a_group_never_vanishes_whole() -> None:
    assert Pruner(mlp(), X).step(0.999).left == {"0": 1, "2": 1}
    model = mlp()
    none = lambda scores, fraction, pruner: dict.fromkeys(scores, 0)  # noqa: E731
    nothing_changes(model, "all units of 0 would be masked", Pruner(model, X, allocation=none).step)


@pytest.mark.parametrize("structure", ["rows", "4:2", "0:4", "block:0x1", "block:4", ""])
def test_unknown_structures(structure: str) -> None:
    with pytest.raises(BadInput, match="expected a structure of channel"):
        Pruner(mlp(), X, structure=structure)


def test_nothing_to_prune() -> None:
    with pytest.raises(BadInput, match="has no channel that can be removed"):
        Pruner(nn.Linear(4, 2), X)
    with pytest.raises(BadInput, match="has no head that can be removed"):
        Pruner(mlp(), X, structure="head")


def test_states_of_others() -> None:
    model = mlp()
    pruner = Pruner(model, X)
    state = pruner.state_dict()
    nothing_changes(
        model, "Pruner of channel, got one element", lambda: pruner.load_state_dict({**state, "structure": "element"})
    )
    wrong = {"0.weight": torch.ones(3, 4, dtype=torch.bool)}
    nothing_changes(
        model, r"bool mask of \(8, 4\) for 0.weight", lambda: pruner.load_state_dict({**state, "masks": wrong})
    )


def test_training_mode_is_left_as_it_is() -> None:
    model = Residual().train()
    pruner = Pruner(model, IMAGE)
    pruner.step()
    assert all(module.training for module in model.modules())
    assert int(model.norm.num_batches_tracked) == 0


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _train_in_parallel(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = mlp()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    pruner = Pruner(parallel, X, score=Activation())
    for step in range(3):
        parallel(torch.randn(8, 4) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            pruner.step(0.5)
    torch.save((pruner.masks(), model.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_masks_are_equal_on_all_ranks(tmp_path) -> None:
    own_process.spawn(_train_in_parallel, (_port(), str(tmp_path)), 2)
    (masks, state), (other_masks, other_state) = (torch.load(tmp_path / f"{k}.pt") for k in (0, 1))
    assert masks
    assert all(torch.equal(mask, other_masks[name]) for name, mask in masks.items())
    assert all(torch.equal(tensor, other_state[name]) for name, tensor in state.items())
