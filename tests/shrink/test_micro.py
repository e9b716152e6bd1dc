"""Every micro-network: exact, at most its hand count, idempotent, trainable, copyable."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import micro_recurrent  # noqa: F401  (their networks join MICROS)
import micro_sequences  # noqa: F401
from graphs import to_graph
from micro import MICROS, Micro


def made(case: Micro):
    torch.manual_seed(7)
    model, args = case.make()
    return model.double().eval(), tuple(a.double() for a in args)


@functools.cache
def demasked(case: Micro) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A network, its example inputs, and its graph demasked: shared, so never to be changed."""
    model, args = made(case)
    return model, args, to_graph(model, args)


def difference(a: object, b: object) -> float:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    worst = 0.0
    for x, y in pairs:
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        assert torch.equal(x.isnan(), y.isnan())
        worst = max(worst, float((x - y).detach().abs().max() / x.detach().abs().max().clamp(min=1e-300)))
    return worst


def weights(module: torch.nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in [*module.parameters(), *module.buffers()]}
    return sum(t.numel() for t in tensors.values() if t.is_floating_point())


@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_exact_and_as_small_as_by_hand(case: Micro) -> None:
    model, args, slim = demasked(case)
    for batch in (len(args[0]), 1, 5):
        inputs = tuple(torch.randn(batch, *a.shape[1:], dtype=a.dtype) for a in args)
        assert difference(model(*inputs), slim(*inputs)) <= 1e-10
    assert weights(slim) <= case.weights, (weights(slim), case.weights, str(slim.graph))
    assert slim.demasked.after.parameters == sum(p.numel() for p in slim.parameters())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_idempotent(case: Micro) -> None:
    _, args, once = demasked(case)
    twice = to_graph(once, args)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (once, twice)]
    assert shapes[0] == shapes[1]
    assert len(once.graph.nodes) == len(twice.graph.nodes), (str(once.graph), str(twice.graph))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [c for c in MICROS if c.resizable], ids=lambda c: c.name)
def test_exact_at_any_image_size(case: Micro) -> None:
    model, args = made(case)
    shapes = [dict.fromkeys((0, 2, 3), Dim.AUTO)]
    wrapped = (tuple(shapes),) if type(model).__name__ == "Net" else shapes
    slim = to_graph(model, args, dynamic_shapes=wrapped)
    for height, width in (args[0].shape[-2:], (19, 23), (24, 14)):
        x = torch.randn(3, 3, height, width, dtype=torch.float64)
        assert difference(model(x), slim(x)) <= 1e-10
    assert weights(slim) <= case.weights


@pytest.mark.sampled(18)
@pytest.mark.parametrize("case", MICROS, ids=lambda c: c.name)
def test_an_ordinary_module(case: Micro) -> None:
    model, args, shared = demasked(case)
    before = {k: v.clone() for k, v in made(case)[0].state_dict().items()}
    slim, twin = copy.deepcopy(shared), copy.deepcopy(shared)
    assert difference(slim(*args), twin(*args)) == 0
    with torch._dynamo.config.patch(allow_rnn=True):  # torch traces its recurrent modules if asked
        compiled = torch.compile(slim, fullgraph=True, backend="eager")
        assert difference(slim(*args), compiled(*args)) == 0
    slim.train()
    if list(slim.parameters()):
        sum(leaf.sum() for leaf in pytree.tree_leaves(slim(*args))).backward()
        assert any(p.grad is not None for p in slim.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
