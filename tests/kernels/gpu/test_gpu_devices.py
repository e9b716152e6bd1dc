"""A sparse layer trained by two processes, half of the examples each, as by one with all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import own_process
from demask.sparse import SparseLinear

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20), nn.Linear(20, 8)]
    with torch.no_grad():
        for layer in layers:
            layer.weight *= torch.rand_like(layer.weight) < 0.3
    first, second = layers
    return nn.Sequential(SparseLinear.from_dense(first, "relu"), SparseLinear.from_dense(second))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Two steps of training; the parameters then."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def work(rank: int, folder: str) -> None:
    """One of two processes: on its GPU where there are two, else on the CPU."""
    cuda = torch.cuda.device_count() >= 2
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    where = f"file://{folder}/meeting"
    dist.init_process_group("nccl" if cuda else "gloo", where, rank=rank, world_size=2)
    model = DistributedDataParallel(network().to(device))
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    found = step(model, x.chunk(2)[rank].to(device))
    torch.save([p.cpu() for p in found], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_train_as_one(tmp_path: Path):
    own_process.spawn(work, (str(tmp_path),), 2)
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    wanted = step(network(), x)
    for rank in range(2):
        for a, b in zip(torch.load(tmp_path / f"{rank}.pt"), wanted, strict=True):
            torch.testing.assert_close(a, b)
