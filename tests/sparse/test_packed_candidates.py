"""Candidates of optimize() with packed layers: which networks have them, and that they compute the same."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.graph.queries import ExampleSizes
from demask.graph.result.demasked_module import build_plain
from demask.kernels.llvm import availability as llvm
from demask.machine.cost import Costs
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program
from demask.sparse.packed_candidates import PACKED, ZEROS, packed_candidates, packed_layers_of
from demask.tune.layer_costs import LayerCosts
from demask.tune.optimized_module import Optimized

pytestmark = pytest.mark.skipif(not llvm.is_installed(), reason="packed layers need llvmlite")


def perceptron(dtype: torch.dtype = torch.float32, zeros: float = 0.7) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 130), nn.GELU(), nn.Linear(130, 70, bias=False)).eval().to(dtype)
    with torch.no_grad():
        for weight in net.parameters():
            weight *= torch.rand(weight.shape) >= zeros
    return net


def candidates(net: nn.Module, x: Tensor) -> dict[str, Any]:
    program = capture_program(net, (x,), {}, None)
    asker = LayerCosts(Costs.open(False, threads=1, measure=False), ExampleSizes.of(program.graph, [x]))
    return {one.name: one.program for one in packed_candidates(program, asker, TABLE, lambda _: None)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vectors", [1, 5])
def test_they_compute_the_same(dtype: torch.dtype, vectors: int) -> None:
    net, x = perceptron(dtype), torch.randn(vectors, 96).to(dtype)
    programs = candidates(net, x)
    assert [*programs] == [PACKED, ZEROS]
    expected = net.double()(x.double())
    for program in programs.values():
        with torch.no_grad():
            y = build_plain(program)(x)
        assert y.dtype == dtype
        assert (y - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    stored = [sum(layer.products for layer in packed_layers_of(program)) for program in programs.values()]
    weights = [weight for weight in net.parameters() if weight.ndim == 2]
    assert sum(int(w.count_nonzero()) for w in weights) * vectors <= stored[0] < stored[1]
    assert stored[1] == sum(w.numel() for w in weights) * vectors


def test_without_zeros_there_is_one() -> None:
    assert [*candidates(perceptron(zeros=0), torch.randn(1, 96))] == [PACKED]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.table(x).mean(1), self.table.weight)


HEAD = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2))


@pytest.mark.parametrize(
    ("net", "x"),
    [
        pytest.param(perceptron(), torch.randn(9, 96), id="many vectors"),
        pytest.param(perceptron().double(), torch.randn(1, 96).double(), id="float64"),
        pytest.param(Tied().eval(), torch.zeros(1, 4, dtype=torch.long), id="a tied weight"),
        pytest.param(HEAD, torch.randn(1, 3, 8, 8), id="a small head"),
    ],
)
def test_networks_without(net: nn.Module, x: Tensor) -> None:
    assert not candidates(net, x)


def test_optimize_returns_one_that_is_saved_and_says_what_it_multiplies(monkeypatch, tmp_path) -> None:
    net, x = perceptron(torch.bfloat16), torch.randn(1, 96).bfloat16()
    optimize = importlib.import_module("demask.optimize")
    monkeypatch.setattr("demask.sparse.packed_candidates.chosen_form", lambda *args, **options: "columns")
    monkeypatch.setattr(optimize, "_winner", lambda race, best, notes: (PACKED, race.speed(PACKED)[0]))
    fast = demask.optimize(net, (x,), cache=False)
    assert isinstance(fast, Optimized)
    record: Any = fast.demasked
    nonzeros = [int(weight.count_nonzero()) for weight in net.parameters() if weight.ndim == 2]
    assert record.after.macs == sum(nonzeros)
    assert {name: round(share, 1) for name, share in record.densities.items()} == {"0": 0.3, "2": 0.3}
    assert demask.verify(net, fast, (x,)).ok
    demask.save(fast, tmp_path / "fast.demask")
    again: Any = demask.load(tmp_path / "fast.demask")
    assert torch.equal(again(x), fast(x))
