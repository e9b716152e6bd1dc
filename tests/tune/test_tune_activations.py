"""Activations written as several calls become one, and only those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from demask.graph.result.demasked_module import build_plain
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune.passes.merge_activations import merge_activations
from fuzz.laws import difference

X = torch.linspace(-9, 9, 181).view(1, 1, -1)
SIXTH = float(torch.tensor(1 / 6))


class Called(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]):
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * 1.5)


def calls(run: Callable[[Tensor], Tensor]) -> list[str]:
    """The ops behind the first one, of a network that computes the same."""
    model = Called(run)
    program, _ = shrink_program(capture_program(model, (X,), None, None), TABLE)
    made = build_plain(merge_activations(program))
    assert difference(model(X), made(X)) < 1e-6
    return [node.target._opname for node in made.graph.nodes if node.op == "call_function"][1:]


ONE = {
    "silu": lambda x: x * x.sigmoid(),
    "silu, turned": lambda x: x.sigmoid() * x,
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardsigmoid, scaled first": lambda x: (x * SIXTH + 0.5).clamp(0.0, 1.0),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "hardswish, of a hardsigmoid": lambda x: x * ((x + 3).clamp(0, 6) / 6),
    "hardswish, by a product": lambda x: ((x + 3.0).clamp(0.0, 6.0) * x) * SIXTH,
    "hardswish, scaled first": lambda x: (x / 6 + 0.5).clamp(0, 1) * x,
}


@pytest.mark.parametrize("name", ONE)
def test_several_calls_become_one(name: str) -> None:
    assert calls(ONE[name]) == [name.partition(",")[0]]


OTHERS = {
    "a fifth": lambda x: (x * 0.2 + 0.5).clamp(0, 1),
    "another shift": lambda x: (x + 2).clamp(0, 6) / 6,
    "other limits": lambda x: (x + 3).clamp(0, 5) / 6,
    "one limit": lambda x: (x + 3).clamp(min=0) / 6,
    "the gate of another value": lambda x: x.neg() * x.sigmoid(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_function_stays(name: str) -> None:
    assert not {"silu", "hardsigmoid", "hardswish"} & set(calls(OTHERS[name]))
