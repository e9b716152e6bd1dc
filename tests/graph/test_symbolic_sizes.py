"""Code that asks for the length of a tensor, and hooks that write weights, are captured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import demask
from demask.errors import NotExportable
from demask.graph.capture.capture import capture


class Long(nn.Module):
    def forward(self, x):
        return x.new_ones(len(x), 3) + x.view(len(x), -1)[:, :3]


class Along(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)

    def forward(self, x):
        y = self.a(x)
        return torch.take_along_dim(y, y.argsort(1), 1) + y.take_along_dim(y[:, :1].argsort(-1), -1)


class Strict(nn.Module):
    """Code that takes ints alone."""

    def forward(self, x):
        if not isinstance(len(x), int):
            raise TypeError("an int, please")
        return x + len(x)


@pytest.mark.parametrize("net", [Long(), Along()], ids=["len", "take_along_dim"])
def test_any_batch(net):
    slim = demask.demask(net.eval(), (torch.randn(2, 4, 5),), result="graph")
    for batch in (2, 1, 7):
        x = torch.randn(batch, 4, 5)
        assert torch.equal(slim(x), net(x))


def test_code_that_takes_ints_alone_is_captured_for_one_size():
    program = capture(Strict(), (torch.randn(2, 5),))
    assert [n.meta["val"].shape[0] for n in program.graph.find_nodes(op="placeholder")] == [2]


def test_a_model_runs_on_sizes_of_its_call_alone():
    """Not on those that an export is tried with: kernels of torch read beyond states of other batches."""
    sizes = set()

    class OneLayer(nn.Module):
        def forward(self, x, state):
            if type(state) is torch.Tensor:
                sizes.add(state.shape)
            if len(state) != 1:
                raise ValueError("a state of one layer, please")
            return x + state[0]

    capture(OneLayer(), (torch.randn(3, 2, 6), torch.randn(1, 2, 6)))
    assert sizes <= {(1, 2, 6)}


def test_functions_are_restored():
    before = len, torch.take_along_dim, torch.Tensor.take_along_dim
    capture(Along(), (torch.randn(2, 4, 5),))
    assert before == (len, torch.take_along_dim, torch.Tensor.take_along_dim)
    assert "len" not in globals() and "take_along_dim" not in vars(torch.Tensor)


def hooked(hook) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4)).eval()
    net[0].register_forward_pre_hook(hook)
    return net


KEEP = torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0])[:, None]


def test_hooks_that_mask_weights_before_each_call():
    net = hooked(_mask)
    x = torch.randn(3, 6)
    slim = demask.demask(net, (x,))
    assert torch.allclose(slim(x), net(x), atol=1e-6)
    assert type(slim) is nn.Sequential and slim[0].weight.shape == (4, 6)


def _mask(layer: nn.Module, _) -> None:
    layer.weight.data.mul_(KEEP)


def _grow(layer: nn.Module, _) -> None:
    layer.weight.data.add_(1.0)


def test_hooks_that_write_other_weights_at_each_call_are_refused():
    with pytest.raises(NotExportable):
        demask.demask(hooked(_grow), (torch.randn(3, 6),))
