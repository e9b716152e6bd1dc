"""verify() of networks whose float64 copies take too much memory: a sample of layers in float64."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from test_language_models import llama

module = importlib.import_module("demask.verify")
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def pair(count: int = 3, dtype: torch.dtype = torch.float32, modules: Any = "auto") -> Any:
    """A model, it demasked, and its input."""
    return copy.deepcopy(shared_pair(count, dtype, modules))


@functools.cache
def shared_pair(count: int, dtype: torch.dtype, modules: Any) -> Any:
    torch.manual_seed(0)
    model = Model(count).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.a.weight[::3] = 0  # type: ignore[index,union-attr]
    model, x = model.to(dtype), X.to(dtype)
    return model, demask.demask(model, (x,), modules=modules), x


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory", lambda: 1024.0)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters the modules have that are converted to float64."""
    sizes: list[int] = []
    real = nn.Module.double

    def double(self: nn.Module) -> nn.Module:
        sizes.append(sum(p.numel() for p in self.parameters()))
        return real(self)

    monkeypatch.setattr(nn.Module, "double", double)
    return sizes


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_compared_in_float64(dtype: torch.dtype, widened: list[int]) -> None:
    model, slim, x = pair(dtype=dtype)
    del widened[:]
    found = demask.verify(model, slim, (x,))
    assert found.ok and found.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert found.max_rel <= 1e-10 and found.dtype == str(dtype).removeprefix("torch.")
    assert 0 < max(widened) <= max(sum(p.numel() for p in b.parameters()) for b in model.blocks)
    for words in ("3 of 3 layers were compared (blocks.0, blocks.1", "GiB", f"in {found.dtype} only"):
        assert words in found.coverage and words in str(found)


@pytest.mark.nightly
@pytest.mark.usefixtures("little")
def test_one_pair_of_copies_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slim, x = pair()
    copies: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    real = module._wide

    def wide(*args: Any) -> nn.Module:
        copy = real(*args)
        copies.append(weakref.ref(copy))
        alive.append(sum(ref() is not None for ref in copies))
        return copy

    monkeypatch.setattr(module, "_wide", wide)
    gc.collect()
    gc.disable()
    try:
        assert demask.verify(model, slim, (x,)).ok
    finally:
        gc.enable()
    assert alive == [1, 2] * 3


def test_what_fits_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slim, x = pair()
    size = 8 * sum(p.numel() for m in (model, slim) for p in m.parameters())
    for memory, layers in ((4 * size, 0), (4 * size - 1, 3), (math.inf, 0)):
        monkeypatch.setattr(module, "memory", lambda memory=memory: memory)
        found = demask.verify(model, slim, (x,))
        assert found.ok and len(found.layers) == layers and bool(found.coverage) == bool(layers)


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**28 < module.memory() < 2**50


@pytest.mark.nightly
@pytest.mark.usefixtures("little")
def test_the_sample_holds_both_ends_and_the_middle() -> None:
    names = [f"blocks.{k}" for k in range(40)]
    sample = module._sample_names(names)
    assert len(sample) == len(set(sample)) == 11 and sample == sorted(sample, key=names.index)
    assert {names[0], names[20], names[39]} <= set(sample) and sample == module._sample_names(names)
    assert module._sample_names(names[:2]) == names[:2]
    model, slim, x = pair(14)
    found = demask.verify(model, slim, (x,))
    assert len(found.layers) == 11 and "11 of 14 layers" in found.coverage


@pytest.mark.usefixtures("little")
def test_a_fault_that_bfloat16_hides_is_seen_in_its_layer() -> None:
    model, slim, x = pair(dtype=torch.bfloat16)
    with torch.no_grad():
        slim.blocks[1].b.weight[3, 4] *= 1.02
    found = demask.verify(model, slim, (x,), check=False)
    assert not found.ok and "layer blocks.1" in found.failure and found.ulps <= module.ULPS
    assert found.layers == ("blocks.0", "blocks.1")
    with pytest.raises(demask.Mismatch, match=r"layer blocks\.1"):
        demask.verify(model, slim, (x,))


@pytest.mark.usefixtures("little")
def test_a_fault_around_the_layers_is_seen_in_the_own_dtype() -> None:
    model, slim, x = pair()
    with torch.no_grad():
        slim.stem.weight.add_(0.1)
    found = demask.verify(model, slim, (x,), check=False)
    assert not found.ok and found.max_rel <= 1e-10 and "last place" in found.failure


@pytest.mark.usefixtures("little")
def test_a_graph_has_no_layers_and_is_compared_whole() -> None:
    model, slim, x = pair(modules=None)
    found = demask.verify(model, slim, (x,))
    assert found.layers == ("blocks.0", "blocks.1", "blocks.2")  # of its own class
    graph = demask.demask(model, (x,), result="graph")
    found = demask.verify(model, graph, (x,))
    assert found.ok and not found.layers and not found.coverage


@pytest.mark.usefixtures("little")
def test_outputs_that_do_not_depend_on_the_input_are_reported() -> None:
    model, slim, x = pair()
    assert demask.verify(model, slim, (x,)).vacuous == ()
    for network in (model, slim):
        nn.init.zeros_(network.stem.weight)
    assert demask.verify(model, slim, (x,)).vacuous == ("output",)


@pytest.mark.nightly
@pytest.mark.usefixtures("little")
def test_a_language_model_in_bfloat16() -> None:
    model, ids = llama(0)
    model = model.bfloat16()
    slim = demask.demask(model, (), {"input_ids": ids}, modules="auto")
    found = demask.verify(model, slim, (), {"input_ids": ids})
    assert found.ok and found.layers == ("model.layers.0", "model.layers.1")
    assert found.max_rel <= 1e-10 and found.dtype == "bfloat16"
