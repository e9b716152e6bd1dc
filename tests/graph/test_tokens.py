"""What only one token needs is computed for one token, with a length known only at run time."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from demask import demask, verify
from demask.ops import TABLE, Entry
from micro_sequences import Attention
from night import at_night


class Classifier(nn.Module):
    """One pre-norm layer, and a head that reads one token."""

    def __init__(self, form: str, token: int):
        super().__init__()
        self.attention, self.norm, self.token = Attention(16, form=form), nn.LayerNorm(16), token
        self.inner, self.outer, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return self.head(self.norm(x)[:, self.token])


# Per sample of five tokens: keys and values of all, all else of one.
MACS = 2 * 5 * 16 * 16 + 16 * 16 + 2 * 5 * 16 + 16 * 16 + 2 * 16 * 32 + 16 * 3


@pytest.mark.nightly
@pytest.mark.parametrize(("form", "token"), [("products", -1), *at_night(("sdpa", 0), ("sdpa", -1), ("products", 0))])
def test_one_token_of_a_dynamic_length(form: str, token: int) -> None:
    torch.manual_seed(0)
    model = Classifier(form, token).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    slim = demask(model, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    for batch, length in ((2, 5), (3, 9), (1, 2)):
        y = torch.randn(batch, length, 16, dtype=torch.float64)
        assert float((model(y) - slim(y)).detach().abs().max()) <= 1e-12
    assert slim.demasked.after.macs == 2 * MACS
    assert demask(model, (x,)).demasked.after.macs == 2 * MACS


def test_a_token_that_others_read_stays() -> None:
    class Both(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x + self.attention(self.norm(x))
            return self.head(x[:, 0]), self.head(x)

    model = Both("sdpa", 0).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    slim = demask(model, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    y = torch.randn(3, 4, 16, dtype=torch.float64)
    for a, b in zip(model(y), slim(y), strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-12


class Prefixed(nn.Module):
    """A trained token in front of those that a masked layer makes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1)
        return self.head(torch.tanh(tokens))


def test_tokens_in_front_keep_channels_that_the_others_lose() -> None:
    torch.manual_seed(0)
    model = Prefixed().double().eval()
    with torch.no_grad():
        model.embed.weight[2:5] = 0
        model.embed.bias[2:5] = 0
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    slim = demask(model, (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},), result="graph")
    assert slim.state_dict()["embed.weight"].shape == (5, 6)
    assert slim.state_dict()["token"].shape == (1, 1, 8)
    assert verify(model, slim, (x,)).max_rel <= 1e-10
    both = demask(masked_token(model), (x,), result="class")
    assert both.embed.weight.shape == (5, 6) and both.token.shape == (1, 1, 5)
    assert verify(masked_token(model), both, (x,)).max_rel <= 1e-10


def masked_token(model: Prefixed) -> Prefixed:
    """The same, the token's channels masked alike."""
    masked = copy.deepcopy(model)
    with torch.no_grad():
        masked.token[..., 2:5] = 0
    return masked


def test_an_entry_of_the_user_lets_one_token_through() -> None:
    """An op that the table does not know, with an entry, is one like any other."""

    class Net(nn.Module):
        def __init__(self, between) -> None:
            super().__init__()
            self.a, self.b, self.between = nn.Linear(4, 8), nn.Linear(8, 8), between

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.between(self.a(x)))[:, 0]

    x = torch.randn(2, 4, 4)
    shapes = ({1: Dim.AUTO},)
    table = TABLE.extended({"aten::special_bessel_j0": Entry("... -> ...")})
    macs = []
    for between in (torch.tanh, torch.special.bessel_j0):
        model = Net(between).eval()
        slim = demask(model, (x,), dynamic_shapes=shapes, table=table)
        macs.append(slim.demasked.after.macs)
        assert verify(model, slim, (x,), table=table).ok
    assert macs[0] == macs[1] < slim.demasked.before.macs
