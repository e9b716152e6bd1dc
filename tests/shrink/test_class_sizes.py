"""What is said of the size of a network of the caller's class: the work that it does, and what
another result would save."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import demask
from demask.pages.html import document
from html_page import HtmlPage


class Attention(nn.Module):
    """Its code states the number of heads, or their width alone."""

    def __init__(self, is_fixed: bool) -> None:
        super().__init__()
        self.heads, self.width = 4 if is_fixed else -1, 4
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        parts = self.qkv(x).reshape(n, tokens, 3, self.heads, self.width)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(n, tokens, width if self.heads > 0 else -1))


class Block(nn.Module):
    def __init__(self, is_fixed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention(is_fixed)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class FirstToken(nn.Module):
    """A vision transformer of which one token is read. Heads of both blocks are zero, and units."""

    def __init__(self, is_fixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.Sequential(Block(is_fixed), Block(is_fixed))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)
        with torch.no_grad():
            for block, rows in zip(self.blocks, (slice(4, 8), slice(8)), strict=True):
                block.attn.proj.weight[:, rows] = 0  # type: ignore[union-attr,index]
            self.blocks[0].up.weight[10:20] = 0  # type: ignore[union-attr,index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.norm(self.blocks(x))[:, 0])


class Convolutions(nn.Module):
    """A channel in two is zero; the last call reads every other position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1, stride=2)
        with torch.no_grad():
            for tensor in (self.a.weight, self.a.bias, self.b.weight, self.b.bias):
                assert tensor is not None
                tensor[::2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.norm(self.a(x))))))


X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def counted(network: nn.Module) -> int:
    """The multiply-adds that torch counts of a call."""
    with FlopCounterMode(display=False) as flops, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network(X)
    return flops.get_total_flops() // 2


@pytest.mark.parametrize("kind", [FirstToken, Convolutions])
def test_macs_are_those_of_the_network_that_comes_back(kind: type[nn.Module]) -> None:
    """Not those of a graph, which skips the tokens that nothing reads."""
    net = kind().eval()
    slim = demask.demask(net, (X,), result="class")
    report = demask.report(slim)
    assert type(slim) is kind and report.before.macs == counted(net)
    assert report.after.macs == counted(slim) < counted(net)
    assert sum(row.macs[1] for row in report.modules) == report.after.macs
    assert demask.report(demask.demask(net, (X,), result="graph")).after.macs <= counted(slim)


def test_macs_of_a_network_of_which_nothing_is_removed() -> None:
    net: Any = FirstToken(is_fixed=True).eval()
    slim = demask.demask(net, (X,), result="class")
    assert demask.report(slim).after.macs == counted(slim)


def test_no_advice_where_nothing_more_would_be_saved() -> None:
    """Both blocks become graphs, so the network is as small as one graph."""
    net = FirstToken(is_fixed=True).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slim: Any = demask.demask(net, (X,))
    graph: Any = demask.demask(net, (X,), result="graph")
    least, left = (one.demasked.after.parameters for one in (graph, slim))
    assert type(slim) is FirstToken and left == least
    (text,) = (str(one.message) for one in caught if "demask() returns" in str(one.message))
    assert text.endswith("with 2 of its modules as graphs")
    report = demask.report(slim)
    assert not report.better and not any("0 fewer" in note for note in report.notes)
    page = HtmlPage(document(report.page())).text
    assert page.partition("What would free more ")[2].startswith("Nothing that demask knows of.")
