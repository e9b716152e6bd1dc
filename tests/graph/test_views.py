"""Writes through calls that are views for some sizes and copies for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from demask.errors import NotExportable
from demask.graph.capture import functionalize as functional
from graphs import to_graph
from test_micro import difference


def turned(y: Tensor) -> Tensor:
    return y.transpose(0, 1)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda y: turned(y).flatten(1)[:, ::2].zero_(),
    "reshape": lambda y: turned(y).reshape(y.shape[1], -1)[:, ::2].zero_(),
    "contiguous": lambda y: turned(y).contiguous()[:, ::2].zero_(),
    "memory format": lambda y: turned(y)[..., None].contiguous(memory_format=torch.channels_last)[:, ::2].zero_(),
    "same dtype": lambda y: turned(y).to(y.dtype)[:, ::2].zero_(),
    "view": lambda y: y.view(y.shape[0], -1)[:, ::2].zero_(),
    "expand": lambda y: y[:, :1].expand(-1, 8, -1).clone()[:, ::2].zero_(),
}


class Written(nn.Module):
    """A linear layer over [positions, batch, features], then a write through some view of it."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(6, 6).double(), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.transpose(0, 1))
        self.write(y)
        return y + 1


def errors(name: str) -> list[float]:
    """How far off the result is at each batch that it does not refuse."""
    net, found = Written(WRITES[name]).eval(), []
    slim = to_graph(net, (torch.randn(3, 8, 6).double(),))
    for batch in (3, 2, 1):
        x = torch.randn(batch, 8, 6).double()
        try:
            made = slim(x)
        except ValueError as error:
            assert ">= 2" in str(error)
            assert batch == 1
        else:
            found.append(difference(net(x), made))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
def test_writes_through_what_may_copy(name):
    assert max(errors(name)) <= 1e-10


class Rows(nn.Module):
    """A write of rows whose number and length are quotients of the image's sizes."""

    def __init__(self, write: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Conv2d(3, 3, 1).double(), write

    def forward(self, x: Tensor) -> Tensor:
        y, width = self.layer(x), x.shape[3] // 4
        self.write(y, width)
        return y + 1


COMPUTED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rows of no length": lambda y, n: y.reshape(-1, 3, n).contiguous().reshape(-1)[:5].zero_(),
    "slice": lambda y, n: y[:, :, :, n : 2 * n].zero_(),
    "select": lambda y, n: y[:, :, :, n].zero_(),
    "narrow": lambda y, n: y.narrow(3, n, n).zero_(),
    "from the end": lambda y, n: y.narrow(3, -3, 2).zero_(),
    "halves": lambda y, n: y.chunk(2, 2)[1].mul_(2),
    "parts": lambda y, n: y.split([n, y.shape[3] - 2 * n, n], 3)[1].mul_(2),
    "pieces": lambda y, n: y.tensor_split(3, 2)[2].add_(y.tensor_split(3, 2)[2]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPUTED)
@torch.no_grad()  # autograd refuses writes into parts of splits
def test_writes_at_places_that_sizes_tell(name):
    net, sizes = Rows(COMPUTED[name]).eval(), {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}
    slim = to_graph(net, (torch.randn(2, 3, 12, 12).double(),), dynamic_shapes=(sizes,))
    for shape in ((2, 3, 12, 12), (3, 3, 9, 16)):
        x = torch.randn(shape).double()
        assert difference(net(x), slim(x)) <= 1e-10


def test_a_view_of_one_image_that_is_baked_in_is_noticed(monkeypatch):
    assert len(errors("flatten")) == 2
    monkeypatch.setattr(functional, "_one_layout", lambda graph: ())
    assert max(errors("flatten")) > 1e-10


class Strided(nn.Module):
    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.layer, self.order = nn.Linear(6, 6), order
        self.layer.weight.data[:3] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).transpose(*self.order).as_strided((5, 2), (3, 1))


def test_as_strided_reads_memory_as_the_model_lays_it_out():
    x = torch.randn(4, 6)
    net = Strided((0, 0))
    assert difference(net(x), to_graph(net, (x,))(x)) <= 1e-6
    with pytest.raises(NotExportable, match="as_strided"):
        to_graph(Strided((0, 1)), (x,))


class Heads(nn.Module):
    """Attention of two heads, each of which has one value left, in another position."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(12, 2)
        keep = torch.zeros(36).index_fill(0, torch.tensor([*range(24), 29, 31]), 1)
        self.heads.in_proj_weight.data *= keep[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


def test_a_view_of_what_is_left_may_copy():
    net, x = Heads().double().eval(), torch.randn(4, 5, 12).double()
    slim = to_graph(net, (x,))
    assert slim.heads.out_proj.weight.shape == (12, 2)
    assert difference(net(x), slim(x)) <= 1e-10


@pytest.mark.parametrize("start", [0, 1, -2])
def test_writes_into_a_part_that_begins_anywhere(start: int) -> None:
    model = Written(lambda y: y.narrow(2, start, 2).mul_(3)).eval()
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    assert difference(model(x), to_graph(model, (x,))(x)) == 0
