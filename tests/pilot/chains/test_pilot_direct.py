"""Chains called without their graph: the same answers, and never where something looks at the call
or has changed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from demask.machine.clock import set_threads
from demask.ops import TABLE
from demask.pilot.chains import chain_op
from demask.pilot.chains.exact_conditions import Chained, Columns, chained

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def perceptron(rank: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
    return net, torch.randn([1] * (rank - 1) + [16]).relu()


def made(net: nn.Module, x: Tensor) -> Chained:
    """A conditioned network that was called once, and so has a plan to call directly."""
    found = chained(net, (x,), None, Columns(), ("columns",), TABLE, always=True)
    found(x)
    return found


def direct(module: nn.Module):
    return vars(type(module)).get("direct")


@pytest.fixture
def graphs(monkeypatch) -> list[int]:
    """Counts calls that go through the op."""
    seen: list[int] = []
    on_cpu = chain_op.on_cpu

    def counted(x, weights, layers):
        seen.append(1)
        return on_cpu(x, weights, layers)

    monkeypatch.setattr(chain_op, "on_cpu", counted)
    return seen


@pytest.mark.parametrize("rank", [2, 3])
def test_the_same_bits_without_the_graph(rank, graphs):
    net, x = perceptron(rank)
    module = made(net, x)
    through = type(module).forward(module, x)
    del graphs[:]
    assert direct(module) is not None
    assert torch.equal(module(x), through) and module(x).shape == net(x).shape and not graphs


def test_what_is_given_back_is_nobody_elses():
    net, x = perceptron()
    module = made(net, x)
    first = module(x)
    kept = first.clone()
    module(x + 1)
    assert torch.equal(first, kept)


def written(module: nn.Module) -> None:
    module.get_parameter("0.weight").mul_(2)


def swapped(module: nn.Module) -> None:
    old = module.get_parameter("2.weight")
    module.get_submodule("2").weight = nn.Parameter(old.detach() * 3)


def pointed_elsewhere(module: nn.Module) -> None:
    weight = module.get_parameter("2.weight")
    weight.data = weight.data * 3


def loaded(module: nn.Module) -> None:
    module.load_state_dict({key: 2 * value for key, value in module.state_dict().items()})


@pytest.mark.parametrize("change", [written, swapped, pointed_elsewhere, loaded])
def test_changed_weights_are_seen(change):
    net, x = perceptron()
    module = made(net, x)
    before = module(x)
    change(module)
    weights = [module.get_parameter(f"{k}.{name}") for k in (0, 2) for name in ("weight", "bias")]
    expected = chain_op.plain(x, weights, "columns+bias+relu,columns+bias")
    for _ in range(4):  # by torch's ops first, then by a new plan
        assert torch.allclose(module(x), expected, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-2)


def test_other_inputs_go_through_the_graph():
    net, x = perceptron()
    module = made(net, x)
    for other in (x.double(), x[:, :8], x[0], [x]):
        with pytest.raises(Exception):  # noqa: B017
            module(other)
    several = torch.randn(3, 16)
    assert torch.allclose(module(several), net(several), atol=1e-6)
    assert torch.allclose(module(several.T.contiguous().T), net(several), atol=1e-6)
    assert torch.allclose(module(input=x), net(x), atol=1e-6)


def test_gradients_go_through_torch():
    net, x = perceptron()
    module = made(net, x)
    with torch.enable_grad():
        out = module(x)
        assert out.requires_grad
        out.sum().backward()
    assert module.get_parameter("0.weight").grad is not None


def test_hooks_are_called():
    net, x = perceptron()
    module, seen = made(net, x), []
    handle = module.register_forward_hook(lambda m, args, out: seen.append(1))
    module(x)
    handle.remove()
    every = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(2))
    module(x)
    every.remove()
    assert seen[0] == 1 and 2 in seen[1:]


def test_modes_see_the_ops():
    net, x = perceptron()
    module, seen = made(net, x), []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, kinds, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Functions(), Dispatched()):
        del seen[:]
        with mode:
            module(x)
        assert chain_op.CHAIN in seen


def test_threads_have_their_own_plans():
    net, x = perceptron()
    module = made(net, x)
    expected = module(x)
    with set_threads(1 + torch.get_num_threads()):
        assert torch.equal(module(x), expected) and torch.equal(module(x), expected)


def test_transforms_and_copies():
    net, x = perceptron()
    module = made(net, x)
    rows = torch.randn(4, 1, 16)
    mapped = torch.vmap(module)(rows)
    assert torch.allclose(mapped, net(rows), atol=1e-6)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert direct(other) is None
        assert torch.equal(other(x), module(x)) and torch.equal(other(x), module(x))
        assert direct(other) is not None and direct(other) is not direct(module)


def test_graphs_of_more_than_a_chain_stay_graphs():
    net, x = perceptron()
    longer = nn.Sequential(net, nn.Softmax(1)).eval()
    module = made(longer, x)
    assert direct(module) is None and torch.allclose(module(x), longer(x), atol=1e-6)
