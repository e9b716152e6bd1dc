"""Hooks of every kind of network that demask returns fire once a call, and change what they may."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import demask
from demask import pilot, sparse, traverse
from demask.graph.result.demasked_module import build
from demask.machine.byte_sizes import BUDGET
from demask.ops import TABLE
from demask.pilot.conditions.regions import Regions
from demask.pilot.route import Route, Router
from demask.shrink.pipeline import capture_program, shrink_program
from demask.traverse.execution.tiled_module import Tiled
from demask.tune.optimized_module import Optimized

IMAGE, ROWS = torch.randn(1, 3, 32, 32), torch.randn(2, 16)


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))


def rows() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def optimized() -> nn.Module:
    program, provenance = shrink_program(capture_program(images().eval(), (IMAGE,), None, None), TABLE)
    return build(program, provenance, Optimized).eval()


def conditioned(text: str) -> nn.Module:
    weights = None if text.startswith(("columns", "certified")) else "bits:8"
    return pilot.condition(rows(), (ROWS,), pilot=weights, condition=text, check=False)


NETWORKS = {
    "demasked": (lambda: demask.demask(images(), (IMAGE,)), IMAGE),
    "optimized": (optimized, IMAGE),
    "tiled": (lambda: traverse.tile(images(), (IMAGE,)), IMAGE),
    "regions": (lambda: Regions(0.1, tile=8, fill=0.0).applied(images(), (IMAGE,), None, None, TABLE), IMAGE),
    "batched": (lambda: traverse.batch(rows(), (ROWS,), inputs=2), ROWS),
    "columns": (lambda: conditioned("columns"), ROWS),
    "skip": (lambda: conditioned("skip:0.5"), ROWS),
    "route": (lambda: Router(rows(), rows(), Route(0.6, "margin")), ROWS),
    "sparse": (lambda: sparse.SparseLinear.from_dense(nn.Linear(16, 4)), ROWS),
}


@functools.cache
def network(name: str) -> nn.Module:
    return NETWORKS[name][0]().eval()


@contextmanager
def hooked(*handles) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_hooks_fire(name: str) -> None:
    module, x = network(name), NETWORKS[name][1]
    module(x)
    half, plain = module(x / 2), module(x)
    seen: list[str] = []

    def before(called: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append("before")
        return (args[0] / 2,)

    def after(called: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append("after")
        return output * 3

    with hooked(module.register_forward_pre_hook(before), module.register_forward_hook(after)):
        assert near(module(x), half * 3) and seen == ["before", "after"]

    def anywhere(called: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append("anywhere") if called is module else None

    with hooked(modules.register_module_forward_hook(anywhere)):
        module(x)
    assert near(module(x), plain) and seen == ["before", "after", "anywhere"]


@torch.no_grad()
def test_what_is_traced_of_a_tiled_network_is_its_graph() -> None:
    tiled = network("tiled")
    for strict in (False, True):
        program = torch.export.export(tiled, (IMAGE,), strict=strict)
        assert near(program.module()(IMAGE), tiled(IMAGE))


def test_a_tiled_network_takes_calls_like_the_example() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = images()

        def forward(self, x: Tensor, pair: dict[str, Tensor], *, factor: float = 1.0) -> Tensor:
            return self.net(x * factor) + pair["a"]

    model, args, named = Scaled(), (IMAGE, {"a": torch.ones(1, 3, 32, 32)}), {"factor": 2.0}
    tiled = traverse.tile(model, args, named)
    assert isinstance(tiled, Tiled) and near(tiled(*args, **named), model(*args, **named))
    assert not tiled(*args, **named).requires_grad
    for wrong in (args[:1], (IMAGE, IMAGE)):
        with pytest.raises((TypeError, ValueError)):
            tiled(*wrong, **named)


def test_budgets_have_one_default() -> None:
    functions = (traverse.plan, traverse.tile, traverse.stream, traverse.batch, traverse.traffic)
    assert {inspect.signature(f).parameters["memory"].default for f in functions} == {BUDGET}
