"""Which masks of attention are proved to show each query a key: no proof where one may hide all."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import demask
from demask.facts.analysis import Analysis
from demask.facts.known import shows_each_query
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL

LENGTHS = (7, 1, 12)  # of the sequences; the first is that of the example


class Attention(nn.Module):
    """One attention of x to itself, or to its first positions, with a mask of numbers."""

    def __init__(self, mask: Callable[..., Tensor], keys: int | None = None) -> None:
        super().__init__()
        self.mask, self.keys = mask, keys
        self.register_buffer("triangle", torch.ones(16, 16).tril().bool())
        self.bias = nn.Parameter(torch.randn(31))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        y = x if self.keys is None else x[:, :, : self.keys]
        mask = self.mask(self, numbers, x.shape[2], y.shape[2])
        return F.scaled_dot_product_attention(x, y, y, attn_mask=mask)


def steps(n: int) -> Tensor:
    return torch.arange(n)


def causal(self, numbers, n, m):
    return steps(m)[None] <= steps(n)[:, None]


def window(self, numbers, n, m):
    query, key = steps(n)[:, None], steps(m)[None]
    return (key <= query) & (key > query - 4)


def chunks(self, numbers, n, m):
    """Texts that are packed into one sequence do not see each other."""
    text = (numbers > 0).long().cumsum(-1)
    rows = torch.arange(numbers.shape[0])[:, None, None, None]
    query, key = steps(n)[None, None, :, None], steps(m)[None, None, None, :]
    return (text[rows, query] == text[rows, key]) & (key <= query)


def every(self, numbers, n, m):
    return (steps(n) >= 0)[None, None, :, None].expand(numbers.shape[0], -1, -1, -1)


def stored(self, numbers, n, m):
    return self.triangle[:n, :n]


def some_more(self, numbers, n, m):
    return causal(self, numbers, n, m) | (numbers > 0)[:, None, None]


def infinite(self, numbers, n, m):
    return torch.zeros(n, m).masked_fill(~causal(self, numbers, n, m), -math.inf)


def least(self, numbers, n, m):
    seen = (numbers > 0)[:, None, None]
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def trained_distance(self, numbers, n, m):
    return self.bias[(steps(n)[:, None] - steps(m)[None]).clamp(-15, 15) + 15]


def distance(self, numbers, n, m):
    """ALiBi's bias."""
    return (steps(m)[None] - steps(n)[:, None]).float() * self.bias[0]


# those that hide all keys of a query
def before(self, numbers, n, m):
    return steps(m)[None] < steps(n)[:, None]


def much_before(self, numbers, n, m):
    return steps(m)[None] <= steps(n)[:, None] - 2


def given(self, numbers, n, m):
    return (numbers > 0)[:, None, None]


def given_and_causal(self, numbers, n, m):
    return causal(self, numbers, n, m) & (numbers > 0)[:, None, None]


def other_rows(self, numbers, n, m):
    """The numbers of the queries are those of the keys, of another row."""
    return numbers[:, None, :, None] == numbers.flip(0)[:, None, None, :]


def last_first(self, numbers, n, m):
    """Negative positions count from the end: the sum of positions is no position."""
    position = -numbers[:, None, None, :].long().abs() - 1
    return steps(16)[1:][position] == steps(16)[position] + 1


def two_before(self, numbers, n, m):
    return steps(m)[None] <= torch.add(steps(n)[:, None], 1, alpha=-2)


def unequal(self, numbers, n, m):
    """NaN differs from itself."""
    roots = numbers.sqrt()
    return roots[:, None, :, None] == roots[:, None, None, :]


def hidden(self, numbers, n, m):
    seen = (numbers > 0)[:, None, None]
    return torch.zeros(n, m).masked_fill(~seen, -math.inf)


SHOWN = [causal, window, chunks, every, stored, some_more, infinite, least, trained_distance, distance]
HIDDEN = [before, much_before, two_before, given, given_and_causal, other_rows, last_first, unequal, hidden]


def example(net: Attention, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, length, 4, generator=draw)
    return x, torch.randint(-1, 2, (2, length if net.keys is None else net.keys), generator=draw).float()


def is_proved(net: Attention) -> bool:
    args = example(net, LENGTHS[0])
    length = torch.export.Dim("length", max=15)
    shapes = None if net.keys else ({2: length}, {1: length})
    program = rewrite(fold_constants(functionalize(capture(net, args, dynamic_shapes=shapes))), CANONICAL)
    analysis = Analysis(program, TABLE)
    (call,) = (r for n, r in analysis.relations.items() if "attention" in n.name)
    return shows_each_query(call, analysis.relations, analysis.known)


def hides_all(net: Attention) -> bool:
    """Whether a row of the mask hides all, for some numbers of some length."""
    for length in LENGTHS:
        for seed in range(40):
            _, numbers = example(net, length, seed)
            keys = length if net.keys is None else net.keys
            mask = net.mask(net, numbers, length, keys)
            seen = mask if mask.dtype == torch.bool else mask > -math.inf
            if not bool(seen.any(-1).all()):
                return True
    return False


@pytest.mark.parametrize("mask", SHOWN)
def test_masks_that_show_each_query_a_key(mask):
    net = Attention(mask)
    assert not hides_all(net)
    assert is_proved(net)


@pytest.mark.parametrize("mask", HIDDEN)
def test_no_proof_where_a_query_may_see_nothing(mask):
    net = Attention(mask)
    assert hides_all(net)
    assert not is_proved(net)


def test_queries_and_keys_of_different_number_have_no_diagonal():
    net = Attention(lambda self, numbers, n, m: steps(m)[None] >= steps(n)[:, None], keys=3)
    assert not is_proved(net)
    assert not is_proved(Attention(lambda *_: steps(3)[None] - 5 >= -steps(1)[:, None], keys=3))
    assert is_proved(Attention(lambda *_: steps(3)[None] + 5 >= 5, keys=3))


@pytest.mark.parametrize("mask", [causal, given_and_causal])
def test_constant_heads_go_where_each_query_sees_a_key(mask):
    """The values of head 1 are constants; their average is too, where one is seen."""

    class Heads(Attention):
        def __init__(self) -> None:
            super().__init__(mask)
            self.v, self.out = nn.Linear(4, 4), nn.Linear(8, 3)
            with torch.no_grad():
                self.v.weight[:] = 0

        def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
            shown = self.mask(self, numbers, x.shape[2], x.shape[2])
            values = torch.stack([x[:, 0], self.v(x[:, 1])], 1)
            heads = F.scaled_dot_product_attention(x, x, values, attn_mask=shown)
            return self.out(heads.transpose(1, 2).flatten(2))

    net = Heads().double().eval()
    x, numbers = example(net, LENGTHS[0])
    slim = demask.demask(net, (x.double(), numbers), result="graph")
    for length in LENGTHS[:1]:
        for seed in range(5):
            x, numbers = example(net, length, seed)
            assert torch.allclose(net(x.double(), numbers), slim(x.double(), numbers), atol=1e-12)
    left = slim.demasked.after.parameters
    assert (left < 25) == (mask is causal), left
