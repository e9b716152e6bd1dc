"""Pruning, demask() and carry() of networks on the CPU and, where there is one, on a GPU: the same
masks, and losses that go on where they were."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import demask
import own_process
from demask import prune
from demask.prune.scores import Score
from small_networks import X, network

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ("cpu", pytest.param("cuda", marks=GPU))
SCORES = (prune.L1(), prune.Taylor(), prune.Activation(), prune.Fluctuation(), prune.Random())


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def masks_of(score: Score, allocation: object, device: str) -> dict[str, torch.Tensor]:
    """Masks after two steps with gradients and inputs."""
    model, x = network().to(device), X.to(device)
    pruner = prune.Pruner(model, x[:2], score=score, allocation=allocation, schedule=prune.Cubic(0.0, 0.5, steps=2))
    for _ in range(2):
        model(x).square().sum().backward()
        pruner.step()
    masks = pruner.masks()
    assert {mask.device.type for mask in masks.values()} == {device}
    return masks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
def test_masks_are_those_of_the_cpu(score: Score, device: str) -> None:
    masks, again = (masks_of(deepcopy(score), None, where) for where in (device, "cpu"))
    assert masks.keys() == again.keys()
    assert all(torch.equal(mask.cpu(), again[name]) for name, mask in masks.items())


@pytest.mark.parametrize("device", DEVICES)
def test_budgets_of_macs(device: str) -> None:
    masks = masks_of(prune.L1(), prune.MACs(0.5), device)
    again = masks_of(prune.L1(), prune.MACs(0.5), "cpu")
    assert all(torch.equal(mask.cpu(), again[name]) for name, mask in masks.items())


@pytest.mark.parametrize("device", DEVICES)
def test_masks_are_stored_and_read(device: str) -> None:
    model = network().to(device)
    pruner = prune.Pruner(model, X[:2].to(device))
    pruner.step(0.5)
    state = {**pruner.state_dict()}
    state["masks"] = {name: mask.cpu() for name, mask in state["masks"].items()}
    other = prune.Pruner(network().to(device), X[:2].to(device))
    other.load_state_dict(state)
    assert all(torch.equal(mask, pruner.masks()[n]) for n, mask in other.masks().items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.AdamW))
def test_training_goes_on_after_demask(optimizer: type, device: str) -> None:
    """The masked network and the small one have the same losses, from the same states."""
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    x = X.to(device)
    losses = []
    for small in (False, True):
        model = network().to(device)
        steps = optimizer(model.parameters(), lr=0.01, **options)
        pruner = prune.Pruner(model, x[:2])

        def train(model: nn.Module, steps: torch.optim.Optimizer) -> float:
            loss = model(x).square().mean()
            steps.zero_grad()
            loss.backward()
            steps.step()
            return loss.item()

        train(model, steps)
        pruner.step(0.5)
        train(model, steps)
        pruner.remove()
        if small:
            slim = demask.demask(model, (x[:2],))
            assert {p.device.type for p in slim.parameters()} == {device}
            assert demask.verify(model, slim, (x[:2],)).ok
            demask.carry(slim, steps)
            model = slim
        losses.append(train(model, steps))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def _step_with_nccl(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("nccl", f"file://{folder}/meeting", rank=rank, world_size=1)
    model = network().cuda()
    pruner = prune.Pruner(model, X[:2].cuda(), score=prune.Fluctuation())
    model(X.cuda())
    assert pruner.step(0.5).left
    torch.distributed.destroy_process_group()


@GPU
def test_scores_are_averaged_by_nccl(tmp_path) -> None:
    own_process.spawn(_step_with_nccl, (str(tmp_path),), 1)
