"""Weights of a result that change, in whatever way torch allows, are seen by the next call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from demask.graph.result.demasked_module import build
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.shrink.pipeline import capture_program, shrink_program
from demask.tune.channels_last import convert_layouts
from demask.tune.fold_affine import FOLD
from demask.tune.fuse_epilogues import fuse_epilogues
from demask.tune.optimized_module import Optimized
from demask.tune.stale_sources import CountedParameter, Sources
from fuzz.laws import difference

X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3))


class Border(nn.Module):
    """Packed weights, a border map, a plain layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.register_buffer("scale", torch.rand(4, 1, 1))
        self.head = nn.Linear(4, 2)
        with torch.no_grad():
            self.a.weight[:3] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.b(self.a(x).relu()) * self.scale).mean((2, 3)))


def optimized(last: bool = True) -> Optimized:
    torch.manual_seed(1)
    program, provenance = shrink_program(capture_program(Border().eval(), (X,), None, None), TABLE)
    program = fuse_epilogues(rewrite(program, FOLD), lambda *_: True)
    return build(convert_layouts(program, TABLE, lambda _: last), provenance, Optimized).eval()


def scaled_in_place(module: nn.Module, name: str, tensor: Tensor) -> None:
    tensor.mul_(0.5)


def copied_to(module: nn.Module, name: str, tensor: Tensor) -> None:
    tensor.copy_(tensor * 0.5)


def data_scaled(module: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        tensor.data.mul_(0.5)


def data_set(module: nn.Module, name: str, tensor: Tensor) -> None:
    tensor.data = tensor.data * 0.5


def another(module: nn.Module, name: str, tensor: Tensor) -> None:
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else nn.Buffer
    setattr(module, name, kind(tensor * 0.5))


def through_a_state(module: nn.Module, name: str, tensor: Tensor) -> None:
    module.state_dict()[name].mul_(0.5)


def in_inference_mode(module: nn.Module, name: str, tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.mul_(0.5)


WAYS = (scaled_in_place, copied_to, data_scaled, data_set, another, through_a_state, in_inference_mode)


def change(network: nn.Module, way: Callable[[nn.Module, str, Tensor], None]) -> None:
    with torch.no_grad():
        for module in list(network.modules()):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in list(tensors.items()):
                    if tensor is not None and tensor.is_floating_point():
                        way(module, name, tensor)


def fresh(network: nn.Module) -> Tensor:
    """What the network computes where nothing is kept from earlier calls."""
    return pickle.loads(pickle.dumps(network))(X)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_are_seen(way, last: bool) -> None:
    network = optimized(last)
    before = network(X)
    for _ in range(2):
        change(network, way)
        after = network(X)
        assert torch.equal(after, fresh(network)) and difference(before, after) > 0.01
        assert difference(network.plain()(X).detach(), after) < 1e-5


def test_a_change_is_seen_in_every_size() -> None:
    network = optimized()
    network(X), network(X[:1])
    change(network, data_scaled)
    network(X)
    assert torch.equal(network(X[:1]), pickle.loads(pickle.dumps(network))(X[:1]))


def test_replaced_modules_and_computed_weights_are_seen() -> None:
    network = optimized()
    network(X)
    network.head = nn.Linear(4, 2)
    assert torch.equal(network(X), fresh(network))
    prune.random_unstructured(network.head, "weight", 0.5)
    assert torch.equal(network(X), fresh(network))
    parametrize.register_parametrization(network.b, "weight", nn.Tanh())
    for _ in range(2):
        change(network, data_scaled)
        found = network(X)
        network.refresh()
        assert torch.equal(network(X), found)


def test_weights_that_do_not_change_are_taken_over_once() -> None:
    network = optimized()
    network(X)
    plan = network.plan_for((X,))
    for call in (network, network.plain(), torch.no_grad()(network)):
        call(X)
    assert network.plan_for((X,)) is plan and plan.valid()


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        network = pickle.loads(pickle.dumps(optimized()))
        network(X)
        plan = network.plan_for((X,))
        assert network.plan_for((X,)) is plan
    change(network, scaled_in_place)
    assert torch.equal(network(X), fresh(network))


def test_a_check_that_sees_nothing_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(Sources, "unchanged", lambda self: True)
    with pytest.raises(AssertionError):
        test_changed_weights_are_seen(scaled_in_place, True)


def test_a_counted_parameter_is_a_parameter() -> None:
    network = optimized()
    assert all(type(p) is CountedParameter for p in network.parameters())
    weight = network.head.weight
    assert isinstance(weight, nn.Parameter) and type(pickle.loads(pickle.dumps(weight))) is (nn.Parameter)
    assert type(copy.deepcopy(weight)) is CountedParameter
    assert type(weight * 1) is type(weight.data) is Tensor
    state = network.state_dict()
    assert all(type(value) is Tensor for value in state.values())
    network.load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict: bool) -> None:
    network = optimized()
    expected = network(X)
    program = torch.export.export(network, (X,), strict=strict)
    assert difference(expected, program.module()(X).detach()) < 1e-5
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert all(target.startswith("aten.") for target in targets), targets
    assert torch.equal(network(X), expected)


def test_compiled() -> None:
    network = optimized()
    expected = network(X)
    parent = nn.Sequential(network, nn.ReLU())
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(network, backend=backend, fullgraph=True)
        change(network, data_scaled)
        assert difference(network(X), compiled(X).detach()) < 1e-5
        inner = torch.compile(parent, backend=backend, fullgraph=True)
        assert difference(parent(X), inner(X).detach()) < 1e-5
    assert difference(expected, network(X)) > 0.01
