"""What plans and caches remember of weights: changes are seen, nothing outlives a network."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from demask.kernels import plan_cache
from demask.kernels.memory_probe import MemoryProbe
from demask.ops import TABLE
from demask.pilot import Columns
from demask.pilot.chains.chain_op import chain
from demask.pilot.chains.exact_conditions import chained
from demask.sparse import SparseConv2d, SparseLinear, spmm
from demask.sparse.products import gpu_formats as gpu_forms

CACHES = (plan_cache.WEIGHTS, gpu_forms.FORMATS)


def pruned(layer: Any) -> Any:
    prune.l1_unstructured(layer, "weight", 0.8)
    return prune.remove(layer, "weight")


class Chained(nn.Module):
    """One call of the op."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode, self.weight = mode, nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return chain(x, [self.weight], self.mode)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)).eval()


def conditioned() -> nn.Module:
    """One chain, whether it pays or not."""
    return chained(perceptron(), (row(),), None, Columns(), ("columns",), TABLE, always=True)


def sizes() -> list[int]:
    return [len(part) for cache in CACHES for part in (cache.entries, cache.finalizers)]


def row() -> Tensor:
    return torch.relu(torch.randn(1, 64, generator=torch.Generator().manual_seed(1)))


def image() -> Tensor:
    return row().reshape(1, 4, 4, 4)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: SparseLinear.from_dense(pruned(nn.Linear(64, 32))), row),
    "convolution": (lambda: SparseConv2d.from_dense(pruned(nn.Conv2d(4, 8, 3))), image),
    **{mode: (lambda mode=mode: Chained(mode), row) for mode in ("dense", "columns", "certified+relu", "two+relu")},
    "network of columns": (conditioned, row),
}


def replaced(module: nn.Module, make: Callable[[Tensor], nn.Parameter]) -> None:
    for path, p in list(module.named_parameters()):
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, make(p))


def each(change: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def changed(module: nn.Module) -> None:
        for p in module.parameters():
            change(p)

    return changed


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "mul_": each(lambda p: p.mul_(0.5)),
    "copy_": each(lambda p: p.copy_(p * 0.5)),
    "data.mul_": each(lambda p: p.data.mul_(0.5)),
    "numpy": each(lambda p: p.detach().numpy().__imul__(0.5)),
    "data = new": each(lambda p: setattr(p, "data", p.data * 0.5)),
    "new parameters": lambda m: replaced(m, lambda p: nn.Parameter(p * 0.5)),
    "NaN": each(lambda p: p.fill_(torch.nan)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("name", NETWORKS)
def test_changed_weights_are_seen(name: str, inference: bool) -> None:
    """At the next call, and at those after it."""
    make, draw = NETWORKS[name]
    with torch.inference_mode(inference), torch.no_grad():
        first, x = make(), draw()
        for how, change in CHANGES.items():
            net = copy.deepcopy(first)
            before = [net(x) for _ in range(3)][-1]
            change(net)
            wanted = copy.deepcopy(net)(x)
            assert not torch.equal(before, wanted), how
            for _ in range(3):
                torch.testing.assert_close(net(x), wanted, equal_nan=True, msg=f"{name}: {how}")


def trained(layer: nn.Module, x: Tensor) -> nn.Module:
    for _ in range(2):
        layer(x).sum().backward()
    return layer


def functional() -> Tensor:
    w = pruned(nn.Linear(64, 32)).weight.detach().to_sparse_csr()
    spmm(w, torch.randn(64, 5))
    return w


def called(make: Callable[[], nn.Module], draw: Callable[[], Tensor]) -> nn.Module:
    net = make()
    with torch.no_grad():
        for x in (draw(), draw(), draw().repeat(3, *[1] * (draw().ndim - 1))):
            net(x)
    return net


MADE: dict[str, Callable[[], object]] = {
    **{name: (lambda given=given: called(*given)) for name, given in NETWORKS.items()},
    "trained": lambda: trained(NETWORKS["linear"][0](), row().repeat(8, 1)),
    "trained convolution": lambda: trained(NETWORKS["convolution"][0](), image()),
    "spmm": functional,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("name", MADE)
def test_nothing_outlives_a_network(name: str, inference: bool) -> None:
    gc.collect()
    before = sizes()
    networks = []
    with torch.inference_mode(inference and not name.startswith("trained")):
        networks = [MADE[name]() for _ in range(4)]
    gone = [
        weakref.ref(t) for net in networks if isinstance(net, nn.Module) for t in (*net.parameters(), *net.buffers())
    ]
    del networks
    gc.collect()
    assert sizes() == before
    assert not any(ref() is not None for ref in gone)


def test_a_full_cache_is_cleared_with_its_finalizers() -> None:
    cache: plan_cache.TensorCache[int] = plan_cache.TensorCache(2)
    tensors = [torch.ones(3) for _ in range(5)]
    for k, t in enumerate(tensors):
        assert cache.put(plan_cache.identity([t]), [t], k) == k
    assert list(cache.entries.values()) == [4] and len(cache.finalizers) == 1
    del tensors, t
    assert not cache.entries and not cache.finalizers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (64, 70)])
def test_probes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A write to all of a tensor is seen, however it is strided; nothing else is."""
    for strided in (lambda t: t, lambda t: t.t() if t.ndim == 2 else t, lambda t: t[..., ::2]):
        t = torch.randint(-9, 9, shape).to(dtype)
        t = strided(t) if t.ndim else t
        other = torch.ones(3)
        probe = MemoryProbe([t, other])
        assert probe.same()
        t += 1
        size, whole = t.element_size(), t.is_contiguous()
        words = t.numel() and (size >= 4 or (whole and t.numel() * size >= 4))
        assert probe.same() == (not words)
