"""What a graph says that masks which are alike would save: as much as such masks do save."""

import re

import pytest
import torch
from torch import nn

import demask
from demask.graph.provenance import ALIKE_WOULD
from demask.pages.html import document
from html_page import HtmlPage


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(x + y)


class Residual(nn.Module):
    """Two widths, each with a stream that layers are added to; the last one is flattened."""

    inputs = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first, self.second = Block(8), Block(8)
        self.wider = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.third = Block(12)
        self.head = nn.Linear(12 * 16, 5)

    def forward(self, x):
        x = self.second(self.first(torch.relu(self.stem(x))))
        return self.head(self.third(self.wider(x)).flatten(1))


class Tokens(nn.Module):
    """Linear layers that are added in the last axis, with a norm of all."""

    inputs = (2, 4, 6)

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 16, bias=False)
        self.up, self.down = nn.Linear(16, 20), nn.Linear(20, 16, bias=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.down(torch.relu(self.up(x))))


class Joined(nn.Module):
    """What two layers are added to is joined with other channels: nothing is counted there."""

    inputs = (2, 3, 8, 8)

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Conv2d(3, 8, 3, bias=False) for _ in range(2))
        self.other = nn.Conv2d(3, 4, 3, bias=False)
        self.head = nn.Conv2d(12, 4, 3)
        self.tail = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        both = self.left(x) + self.right(x)
        return self.head(torch.cat([both, self.other(x)], 1)), self.tail(both)


def graph(kind, masks):
    """A network of which half of the channels that are added are zero, as a graph. masks: of a
    layer by its width."""
    torch.manual_seed(0)
    net = kind().eval()
    with torch.no_grad():
        for name, layer in net.named_modules():
            if re.search(r"stem|conv2|wider|embed|down|left|right", name):
                gone = masks(layer.weight.shape[0])
                for tensor in filter(lambda t: t is not None, (layer.weight, layer.bias)):
                    tensor[gone] = 0
    return demask.demask(net, (torch.randn(kind.inputs),), result="graph")


def different(seed):
    """Other channels in each layer."""
    generator = torch.Generator().manual_seed(seed)
    return lambda width: torch.randperm(width, generator=generator)[: width // 2]


@pytest.mark.parametrize(("kind", "is_exact"), [(Residual, True), (Tokens, True), (Joined, False)])
def test_the_saving_that_is_told_is_real(kind, is_exact):
    alike = graph(kind, lambda width: torch.arange(width // 2)).demasked
    assert not any(note.startswith(ALIKE_WOULD) for note in alike.notes)
    slim = graph(kind, different(1))
    mixed, page = slim.demasked, document(demask.report(slim).page())
    (note,) = (note for note in mixed.notes if note.startswith(ALIKE_WOULD))
    would, fewer = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:param|fewer)", note))
    assert mixed.after.parameters - would == fewer > 0
    assert would == alike.after.parameters if is_exact else would > alike.after.parameters
    assert note.partition(": ")[2].startswith("mask the same channels of ")
    assert HtmlPage(page).text.partition("What would free more ")[2].startswith(f"M{note[1:]}.")
