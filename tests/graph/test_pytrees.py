"""Objects of classes that are registered as pytrees without keys, as inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import demask
from demask.pytree_paths import leaves_with_paths
from demask.traverse import batch


@dataclass
class Pair:
    first: Tensor
    second: Tensor


class Named(dict):
    """As an output of diffusers: a mapping."""


pytree.register_pytree_node(
    Pair,
    lambda pair: ((pair.first, pair.second), None),
    lambda children, _: Pair(*children),
    serialized_type_name="test_pytrees.Pair",
)
pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), list(named)),
    lambda children, keys: Named(zip(keys, children, strict=True)),
    serialized_type_name="test_pytrees.Named",
)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.a.weight.data[:3] = 0

    def forward(self, x: Pair) -> Named:
        hidden = torch.relu(self.a(x.first))
        return Named(sample=self.b(hidden), rest=Pair(hidden, hidden * x.second))


def inputs(n: int = 3) -> tuple[Pair]:
    torch.manual_seed(1)
    return (Pair(torch.randn(n, 4), torch.randn(n, 1)),)


@pytest.mark.parametrize("result", ["auto", "graph"])
def test_demasked_verified_and_saved(result: str, tmp_path: Path) -> None:
    net = Network().eval()
    slim = demask.demask(net, inputs(), result=result)
    assert demask.verify(net, slim, inputs()).ok
    for n in (3, 5):  # the first dimension inside of an object is dynamic, too
        expected, actual = net(*inputs(n)), slim(*inputs(n))
        assert type(actual) is Named and type(actual["rest"]) is Pair
        torch.testing.assert_close(actual["sample"], expected["sample"])
    if result == "graph":
        demask.save(slim, tmp_path / "slim.demask")
        loaded = demask.load(tmp_path / "slim.demask")
        assert torch.equal(loaded(*inputs())["sample"], slim(*inputs())["sample"])
    demask.to_onnx(slim, tmp_path / "slim.onnx", inputs())


def test_batched() -> None:
    net = Network().eval()
    torch.testing.assert_close(batch(net, inputs())(*inputs(7))["sample"], net(*inputs(7))["sample"])


def test_paths() -> None:
    named = Named(a=Pair(1, 2), b=3)  # type: ignore[arg-type]
    paths = [(pytree.keystr(path), leaf) for path, leaf in leaves_with_paths(named)]
    assert paths == [("['a'][0]", 1), ("['a'][1]", 2), ("['b']", 3)]
