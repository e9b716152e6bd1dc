"""The code of a result calls torch's own bindings; each computes what its op computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from demask.graph.result.codegen import binding
from demask.ops import TABLE
from demask.ops.entry import Shape
from demask.ops.laws import draw_tensor, law_cases, target_of
from graphs import to_graph

CASES = [(name, k, case) for name, k, case in law_cases(TABLE) if name.startswith("aten.")]


def function(spelled: str):
    here = torch
    for step in spelled.split(".")[1:]:
        here = getattr(here, step)
    return here


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "k", "case"), CASES, ids=[f"{n}-{k}" for n, k, _ in CASES])
def test_a_binding_is_its_op(name: str, k: int, case) -> None:
    spelled = binding(*name.split(".")[1:])
    if spelled is None:
        return  # The op is called as it stands in the graph.
    generator = torch.Generator().manual_seed(k)

    def made(value: object) -> object:
        return draw_tensor(value, generator) if isinstance(value, Shape) else value

    args, kwargs = pytree.tree_map(made, (case.args, dict(case.kwargs)))
    torch.manual_seed(0)
    expected = target_of(name)(*args, **kwargs)
    torch.manual_seed(0)
    found = function(spelled)(*args, **kwargs)
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def test_a_list_with_gaps_has_no_binding() -> None:
    assert binding("index_put", "default") is None
    assert binding("slice", "Tensor") is None


def test_the_graph_keeps_its_overloads_and_the_code_does_not() -> None:
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(x).flatten(1).sin()

    slim = to_graph(Net(), (torch.randn(3, 4, 2),))
    assert torch.ops.aten.relu.default in {node.target for node in slim.graph.nodes}
    assert "torch.ops.aten" not in slim.code
    assert copy.deepcopy(slim).code == slim.code


def deep() -> nn.Module:
    """Two layers three levels down, one of them twice, and one beside a tensor."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return self.linear(x) * self.weight

    relu = nn.ReLU()
    return nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4), relu, Scale(), relu))).eval()


def test_deep_modules_are_looked_up_once() -> None:
    net, x = deep(), torch.randn(3, 4)
    slim = to_graph(net, (x,))
    lines = slim.code.splitlines()
    assert sum("._modules" in line for line in lines) == 4  # of the network, 0, 0.0 and 0.0.2
    assert not any("getattr(self" in line or "self.0" in line for line in lines)
    assert torch.equal(slim(x), net(x))


def test_plain_arguments_are_not_flattened() -> None:
    class Net(nn.Module):
        def forward(self, x, *, pair):
            return x + pair[0] * pair[1] if isinstance(pair, tuple) else x * pair

    x = torch.randn(3, 4)
    for pair, flattened in ((x, 0), ((x, x + 1), 1)):
        slim = to_graph(Net(), (x,), {"pair": pair})
        assert slim.code.count("tree_flatten") == flattened
        assert torch.equal(slim(x, pair=pair), Net()(x, pair=pair))


def test_what_is_put_in_the_place_of_a_deep_module_is_called() -> None:
    slim, x = to_graph(deep(), (torch.randn(3, 4),)), torch.randn(3, 4)
    for network in (slim, copy.deepcopy(slim)):
        inner = network.get_submodule("0.0")
        network.set_submodule("0.0.2.linear", nn.Identity())
        hidden = inner.get_submodule("0")(x).relu()
        assert torch.equal(network(x), (hidden * inner.get_parameter("2.weight")).relu())


def test_code_with_deep_modules_is_compiled_and_exported_whole() -> None:
    slim, x = to_graph(deep(), (torch.randn(3, 4),)), torch.randn(3, 4)
    compiled = torch.compile(slim, backend="eager", fullgraph=True)
    for strict in (False, True):
        for network in (slim, nn.Sequential(nn.Identity(), slim)):
            exported = torch.export.export(network, (x,), strict=strict)
            assert torch.equal(exported.module()(x), slim(x))
    assert torch.equal(compiled(x), slim(x))
    slim.set_submodule("0.0.0", nn.Identity())
    assert torch.equal(compiled(x), slim(x))


def test_a_reduction_has_no_binding() -> None:
    """Where it is left out, torch's bindings do not reduce, and its ops do."""
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()):
        assert torch.equal(to_graph(loss, (x, y))(x, y), loss(x, y))
    assert binding("mse_loss") is None
