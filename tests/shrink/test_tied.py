"""Tied tensors: cut once, and still under every name that the model had for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import demask
from demask.files.pt2 import read_model
from demask.graph.result.demasked_module import Demasked
from graphs import to_graph

WORDS, WIDTH, MASKED = 7, 8, 3
TOKENS = torch.arange(12) % WORDS


class Language(nn.Module):
    """Embedding and output layer share a weight; a batch norm and a buffer have two names."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = self.again = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embed.weight
        scale = torch.randn(words, dtype=torch.double)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("twin", scale, persistent=False)
        self.double().eval()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.again(self.mid(self.embed(tokens)))
        return self.head(x) * self.scale + self.twin


def masked(*, embed: bool = True, words: int = WORDS) -> Language:
    """Units of the stream masked everywhere, or (not `embed`) only behind the embedding."""
    model = Language(words)
    with torch.no_grad():
        for tensor in (model.mid.weight, model.mid.bias, model.norm.bias):
            tensor[:MASKED] = 0
        if embed:
            model.embed.weight[:, :MASKED] = 0
    return model


def slimmed(model: nn.Module) -> Demasked:
    return to_graph(model, (TOKENS,))


def same(slim: nn.Module, model: nn.Module, tokens: Tensor = TOKENS) -> None:
    torch.testing.assert_close(slim(tokens), model(tokens), rtol=1e-12, atol=1e-12)


def check_tied(slim: nn.Module) -> None:
    """Under all names of the model, and one tensor each."""
    assert set(slim.state_dict()) == set(Language().state_dict())
    assert slim.embed.weight is slim.head.weight
    assert slim.norm.running_mean is slim.again.running_mean
    assert slim.norm.num_batches_tracked is slim.again.num_batches_tracked
    assert slim.scale is slim.twin
    assert {n for n, _ in slim.named_parameters()} == {n for n, _ in Language().named_parameters()}


@pytest.mark.parametrize("model", [Language(), masked()], ids=["as it is", "cut"])
def test_every_name_stays_and_is_one_tensor(model: Language) -> None:
    slim = slimmed(model)
    same(slim, model)
    check_tied(slim)
    sizes = slim.demasked.after
    assert sizes.parameters == sum(t.numel() for t in slim.parameters())
    assert sizes.buffers == sum(t.numel() for t in slim.buffers())
    cuts = slim.demasked.cuts
    assert cuts["embed.weight"] == cuts["head.weight"]
    assert cuts["head.weight"].source == "embed.weight"


def test_what_went_is_counted_once() -> None:
    record = slimmed(masked()).demasked
    assert record.removed["embed"] == WORDS * MASKED
    assert sum(record.removed.values()) == record.before.parameters - record.after.parameters


def test_a_copy_is_tied_in_itself() -> None:
    slim = slimmed(masked())
    twin = copy.deepcopy(slim)
    check_tied(twin)
    assert twin.embed.weight is not slim.embed.weight
    check_tied(copy.deepcopy(twin))


def test_the_state_goes_into_another_result() -> None:
    slim, other = slimmed(masked()), slimmed(masked())
    with torch.no_grad():
        other.embed.weight.add_(1)
    other.load_state_dict(slim.state_dict())
    same(other, slim)


def test_an_archive_keeps_the_names(tmp_path) -> None:
    slim = slimmed(masked())
    demask.save(slim, tmp_path / "slim.demask")
    loaded = demask.load(tmp_path / "slim.demask")
    check_tied(loaded)
    assert {n for n, _ in loaded.named_buffers(remove_duplicate=False)} == {
        n for n, _ in slim.named_buffers(remove_duplicate=False)
    }
    same(loaded, slim)
    check_tied(slimmed(loaded))


def test_a_pt2_keeps_the_names(tmp_path) -> None:
    slim = slimmed(masked())
    demask.to_pt2(slim, tmp_path / "slim.pt2")
    plain = torch.export.load(tmp_path / "slim.pt2")
    assert set(plain.state_dict) == set(slim.state_dict())
    same(plain.module(), slim)
    again = to_graph(read_model(tmp_path / "slim.pt2"))
    check_tied(again)
    assert again.demasked.after == slim.demasked.after


def test_twice_is_once() -> None:
    once = slimmed(masked())
    twice = slimmed(once)
    check_tied(twice)
    assert {n: c.source for n, c in twice.demasked.cuts.items()} == {n: c.source for n, c in once.demasked.cuts.items()}
    assert twice.demasked.after == once.demasked.after


def test_both_uses_train_it() -> None:
    model = masked()
    slim = slimmed(model)
    for module in (model, slim):
        module(TOKENS).square().sum().backward()
    wanted = model.embed.weight.grad[:, MASKED:]
    torch.testing.assert_close(slim.embed.weight.grad, wanted, rtol=1e-10, atol=1e-10)


def test_cut_two_ways_each_name_goes_with_its_module() -> None:
    model = masked(embed=False, words=3)
    tokens = TOKENS % 3
    slim = to_graph(model, (tokens,))
    same(slim, model, tokens)
    assert slim.embed.weight.shape == (3, WIDTH)
    assert slim.head.weight.shape == (3, WIDTH - MASKED)
    assert set(slim.state_dict()) == set(model.state_dict())
    assert {slim.demasked.cuts[n].source for n in ("embed.weight", "head.weight")} == {"embed.weight"}
    twice = to_graph(slim, (tokens,))
    assert {n: t.shape for n, t in twice.state_dict().items()} == {n: t.shape for n, t in slim.state_dict().items()}


def test_a_mask_on_one_of_two_uses_leaves_each_its_name() -> None:
    model = Language()
    prune.random_structured(model.head, "weight", amount=2, dim=1)
    slim = slimmed(model)
    same(slim, model)
    assert slim.embed.weight.shape == (WORDS, WIDTH)
    assert slim.head.weight.shape == (WORDS, WIDTH - 2)
    assert not any("orig" in name or "_1" in name for name in slim.state_dict())


class Settled(nn.Module):
    """A convolution of constants, which folding turns into a number of its weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.first = nn.Conv1d(2, 2, 2, stride=2, groups=2)
        self.last = nn.Conv1d(2, 2, 1, stride=2, groups=2)
        with torch.no_grad():
            for dead in (self.norm.weight, self.last.weight[1], self.last.bias[1]):
                dead.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.avg_pool1d(self.first(self.norm(x)), 3, stride=2, padding=1)
        return self.last(y.transpose(1, 2) @ y)


def test_what_folding_makes_is_no_cut_of_the_weight_it_is_named_for() -> None:
    net, x = Settled().double().eval(), torch.randn(3, 2, 8).double()
    slim = to_graph(net, (x,))
    assert slim.last.weight.shape == (1, 1, 1)
    assert "last.weight" not in slim.demasked.cuts
    torch.testing.assert_close(slim(x), net(x))


class Offset(nn.Module):
    """Adds an input to a buffer of the same shape; both may be one tensor."""

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x) + self.offset[:1], 2 * y


def test_an_input_may_be_a_tensor_of_the_model() -> None:
    net = Offset(torch.randn(3, 2)).eval()
    args = torch.randn(3, 4), net.get_buffer("offset")
    slim = demask.demask(net, args)
    for n in (3, 5):
        other = torch.randn(n, 4), torch.randn(n, 2)
        for actual, expected in zip(slim(*other), net(*other), strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_row_of_zeros_unties_no_weight() -> None:
    """The head without the row would save a 41st of its products, and store all its other rows again."""
    model = masked(words=41)
    model.mid = nn.Linear(WIDTH, WIDTH).double()
    wide = nn.Sequential(model.mid, nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH)).double()
    with torch.no_grad():
        model.embed.weight[3] = wide[1].weight[:90] = wide[1].bias[:90] = 0
    model.mid = wide
    slim = slimmed(model)
    assert slim.embed.weight is slim.head.weight
    same(slim, model)


class Twice(nn.Module):
    """A weight that one call reads as it is, and others changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(9, 9)), nn.Buffer(torch.rand(9, 9) < 0.9)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight * self.mask)
        return functional.linear(x, (self.weight * 2).t()) + functional.linear(x, self.weight)


def test_folding_stores_no_weight_twice() -> None:
    model, x = Twice().double().eval(), torch.randn(2, 9).double()
    slim = to_graph(model, (x,))
    assert sum(tensor.numel() for tensor in slim.state_dict().values() if tensor.is_floating_point()) == 81
    torch.testing.assert_close(slim(x), model(x))
