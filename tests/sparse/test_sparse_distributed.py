"""Sparse training over two processes (gloo): rows split between them, and batches (DDP), give what
one process gives."""

from __future__ import annotations

import itertools
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import own_process
from demask.sparse import SparseLinear, sddmm, spmm
from sparse_cases import csr, matrix

pytestmark = [
    pytest.mark.nightly,  # two processes import torch
    pytest.mark.skipif(not dist.is_available(), reason="torch has no distributed package"),
]
RANKS = 2
ROWS, INNER, COLUMNS = 37, 29, 24


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def spawn(work, *given):
    """Run work(rank, *given) in every process of a group."""
    own_process.spawn(_entered, (work, free_port(), given), RANKS)


def _entered(rank, work, port, given):
    torch.set_num_threads(1)
    place = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    try:
        work(rank, *given)
    finally:
        dist.destroy_process_group()


def as_csr(dense):
    values, crow, col = csr(dense)
    return torch.sparse_csr_tensor(crow, col, values, dense.shape, check_invariants=True)


def operands():
    torch.manual_seed(0)
    w = matrix(ROWS, INNER, 0.2, dtype=torch.float32)
    return w, torch.randn(INNER, COLUMNS), torch.randn(ROWS, COLUMNS)


def split_rows(rank):
    """Products and gradients of each process's rows are those rows of the whole, to the bit; the
    gradients of x add up."""
    w, x, slope = operands()
    cut = [0, ROWS // 3, ROWS]
    mine = slice(cut[rank], cut[rank + 1])
    made, whole = spmm(as_csr(w[mine]), x), spmm(as_csr(w), x)
    assert torch.equal(made, whole[mine])
    of_values = sddmm(slope[mine], x, as_csr(w[mine]), transposed=True).values()
    reference = sddmm(slope, x, as_csr(w), transposed=True)
    first = int(reference.crow_indices()[cut[rank]])
    assert torch.equal(of_values, reference.values()[first : first + len(of_values)])
    given = x.clone().requires_grad_()
    spmm(as_csr(w[mine]), given).backward(slope[mine])
    dist.all_reduce(given.grad)
    wanted = w.double().T @ slope.double()
    torch.testing.assert_close(given.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    parts = [torch.empty(b - a, COLUMNS) for a, b in itertools.pairwise(cut)]
    if rank == 0:
        parts[0].copy_(made)
        dist.recv(parts[1], 1)
        assert torch.equal(torch.cat(parts), whole)
    else:
        dist.send(made, 0)


def network():
    torch.manual_seed(0)
    layers = []
    for rows, columns in ((20, 16), (4, 20)):
        weight = matrix(rows, columns, 0.4, dtype=torch.float32)
        layers += [SparseLinear(weight, torch.zeros(rows)), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(net, inputs, targets, steps=10):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()


def split_batches(rank):
    """Under DDP each process has half of the batch; weights end as in one process with all of it,
    and alike in both."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(32, 16), torch.randn(32, 4)
    alone, shared = network(), network()
    train(alone, inputs, targets)
    half = slice(16 * rank, 16 * rank + 16)
    train(DistributedDataParallel(shared), inputs[half], targets[half])
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        both = [torch.empty_like(other) for _ in range(RANKS)]
        dist.all_gather(both, other.detach())
        assert torch.equal(both[0], both[1])
    assert not torch.equal(network()[0].values, shared[0].values)


@pytest.mark.parametrize("work", [split_rows, split_batches])
def test_two_processes_are_as_one(work):
    spawn(work)
