"""Masks of layers whose results meet, made alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask
from demask import prune


class Meet(nn.Module):
    """Two convolutions with norms whose results are added, masked by norm of each alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.n = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.b, self.m = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.a(x)))
        return self.c(F.relu(x + self.m(self.b(x))))


X = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(1))


def masked(a: tuple[int, ...], b: tuple[int, ...]) -> Meet:
    net = Meet().eval()
    with torch.no_grad():
        net.a.weight[list(a)] = 0
        net.b.weight[list(b)] = 0
    return net


def test_as_many_slices_as_the_fewest_zeros_are_chosen_in_common() -> None:
    net = masked((0, 1, 2, 3), (2, 3, 4))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    norms = before["a.weight"].square().sum((1, 2, 3)) + before["b.weight"].square().sum((1, 2, 3))
    (done,) = prune.align(net, X)
    assert done.size == 8 and set(done.slices) == set(norms.argsort()[:3].tolist()) >= {2, 3}
    (third,) = set(done.slices) - {2, 3}
    lost = {name: share for name, share in done.dropped.items() if "weight" in name and "." in name}
    assert ("b.weight" in lost) == (third in (0, 1)) and ("a.weight" in lost) == (third == 4)
    whole = before["b.weight"] if third in (0, 1) else before["a.weight"]
    name = "b.weight" if third in (0, 1) else "a.weight"
    assert lost[name] == pytest.approx(float(whole[third].norm() / whole.norm()))
    assert str(done).startswith(f"{done.name}: 3 of 8 slices masked alike; masked of ")
    slim = demask.demask(net, (X,), result="class")
    assert type(slim) is Meet and slim.a.out_channels == slim.b.out_channels == 5
    torch.testing.assert_close(slim(X), net(X), atol=1e-5, rtol=1e-5)


def test_masks_last_and_what_is_alike_stays() -> None:
    net = masked((0, 5), (0, 5))
    (done,) = prune.align(net, (X,))  # shifts of the norms
    assert done.slices == (0, 5) and all("weight" not in n or n[0] in "nm" for n in done.dropped)
    assert prune.align(net, (X,)) == ()
    net.train()(X).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.eval()(X)
    assert not net.a.weight[[0, 5]].any() and not net.n.bias[[0, 5]].any()


def test_a_layer_that_is_not_masked_stays() -> None:
    net = masked((0, 1), ())
    with pytest.warns(match="masks nothing: of the 8 slices of a, b.weight has none that is zero"):
        assert prune.align(net, X) == ()
    assert all("_orig" not in name for name, _ in net.named_parameters())
    net = masked((0, 1), (2, 3))
    with pytest.warns(match="no two weights with zeros"):
        assert prune.align(net, X, skip=["b"]) == ()


def test_bad_input() -> None:
    with pytest.raises(demask.BadInput, match="structure"):
        prune.align(Meet(), X, structure="layers")
    with pytest.raises(demask.BadInput, match="nothing"):
        prune.align(Meet(), X, skip=["nothing"])
