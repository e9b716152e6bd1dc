"""Memory of a batched network is at most what its plan says; a network that is not refused computes
the same at any batch."""

import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from demask.errors import BadInput
from demask.traverse.batching.batch import batch
from demask.traverse.batching.levels import WORK
from test_traverse_batch import NETWORKS, leaves, made, source


class Live(TorchDispatchMode):
    """Bytes of the storages that calls make and that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in leaves(made):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in given | self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def free(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", ["module", "file"])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("at_once", [None, 2])
def test_memory_is_at_most_what_the_plan_says(kind, place, at_once, tmp_path):
    model, x = made(kind, torch.float32)
    weights = source(place, model, tmp_path)
    module = batch(model, (x,), inputs=8, weights=weights, at_once=at_once)
    x = torch.randn(8, *kind.example[1:])
    module(x)
    with Live() as live:
        module(x)
    plan = module.plan
    if weights is not None:
        assert plan.resident == sum(t.nbytes for t in module.held.state_dict().values())
    assert 0 < live.peak <= plan.peak - WORK - plan.resident


class Shuffled(nn.Module):
    """Random moves of a batch's axis among others, with products between; some mix its inputs."""

    def __init__(self, seed):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])
        self.seed = seed

    def forward(self, x):  # x: batch, 2, 3, 6
        draw, n = random.Random(self.seed), x.shape[0]
        for _ in range(draw.randint(2, 5)):
            order = draw.sample(range(3), 3)
            back = [order.index(k) for k in range(3)]
            sizes = [(n, 2, 3)[k] for k in order]
            weight = self.weights[draw.randrange(3)]
            y = x.permute(*order, 3)
            match draw.randrange(6):
                case 0:
                    y = F.linear(y, weight)
                case 1:
                    y = F.linear(y.reshape(sizes[0] * sizes[1], sizes[2], 6), weight).relu()
                case 2:
                    y = torch.mm(y.reshape(-1, 6), weight)
                case 3:
                    y = y - y.mean(draw.randrange(4), keepdim=True)
                case 4:
                    y = y.softmax(draw.randrange(4))
                case 5:
                    y = y.flip(draw.randrange(4)) + y
            x = y.reshape(*sizes, 6).permute(*back, 3)
        return x @ self.weights[0]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_not_refused_is_right(seed):
    torch.manual_seed(seed)
    model = Shuffled(seed).double()
    x = torch.randn(5, 2, 3, 6, dtype=torch.float64)
    expected = model(x)
    alone = torch.cat([model(x[k : k + 1]) for k in range(5)])
    apart = torch.allclose(expected, alone, rtol=1e-12, atol=1e-12)
    if not apart:
        with pytest.raises(BadInput):
            batch(model, (x,))
        return
    for at_once in (None, 1, 2):
        module = batch(model, (x,), inputs=3, at_once=at_once)
        assert torch.allclose(module(x), expected, rtol=1e-12, atol=1e-12)
