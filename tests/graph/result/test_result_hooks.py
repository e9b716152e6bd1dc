"""Hooks of a model: those that watch a layer stay on it, of all others a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_result_modules import X, residual
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

import demask
from graphs import to_graph


def test_hooks_that_watch_layers_fire_after() -> None:
    model, seen = residual(), []
    model.body.two.register_forward_hook(lambda *_: seen.append("two"))
    model.act.register_forward_pre_hook(lambda *_: seen.append("act"))
    slim = to_graph(model, (X,))
    seen.clear()
    torch.testing.assert_close(slim(X), residual()(X))
    assert seen == ["act", "two", "act"]
    assert not any("hooks" in note for note in slim.demasked.notes)


def test_what_a_hook_computes_is_computed_once() -> None:
    """It is in the program; a mask that it makes is cut."""
    model, mask = residual(), torch.tensor([1.0] * 5 + [0.0] * 3)[:, None, None]
    model.stem.register_forward_hook(lambda module, args, out: out * 2)
    model.body.one.register_forward_hook(lambda module, args, out: out * mask)
    model.norm.register_forward_hook(lambda module, args, out: out.mul_(3))
    said = "the hooks of stem, body.one, norm are not carried over: this graph contains what they"
    with pytest.warns(UserWarning, match=said):
        slim = to_graph(model, (X,))
    assert slim.body.one.out_channels < 6
    torch.testing.assert_close(slim(X), model(X))


class Nested(nn.Module):
    """Layers in blocks; one layer is not a module of the table, one is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
        self.up, self.same = nn.Upsample(scale_factor=2), nn.Identity()
        self.dead = nn.Conv2d(6, 6, 1)
        nn.init.zeros_(self.dead.weight)
        nn.init.zeros_(self.dead.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.same(self.block(x)))
        return x + self.dead(x)


PUTS: dict[str, Any] = {
    "a hook": lambda module: module.register_forward_hook(lambda *_: None),
    "a pre hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "a hook with keywords": lambda module: module.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    "a backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("put", PUTS.values(), ids=PUTS)
@pytest.mark.parametrize("name", ["", "block", "up", "same", "dead"])
def test_hooks_of_what_is_not_called_are_told(name, put) -> None:
    model = Nested().eval()
    put(model.get_submodule(name))
    where = name or "the network itself"
    said = f"the hooks of {where} are not carried over: it is not called in this graph"
    with pytest.warns(UserWarning, match=said) as caught:
        slim = to_graph(model, (X,))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert said in str(demask.report(slim)).replace("\n", " ").replace("  ", " ")
    torch.testing.assert_close(slim(X), model(X))


def test_every_name_is_told_once() -> None:
    model, seen = Nested().eval(), []
    for name in ("block", "block.0", "same"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with pytest.warns(UserWarning, match="the hooks of block, same are .* they are not called"):
        slim = to_graph(model, (X,))
    seen.clear()
    slim(X)
    assert seen == ["block.0"]


def test_networks_of_their_own_class_keep_all_hooks() -> None:
    model, seen = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 2)), []
    model[0][0].weight.data[:3], model[0][0].bias.data[:3] = 0, 0
    model[0].register_forward_hook(lambda *_: seen.append("block"))
    slim = demask.demask(model.eval(), (torch.randn(3, 4),), result="class")
    seen.clear()
    slim(torch.randn(3, 4))
    assert slim[0][0].out_features == 3 and seen == ["block"]


def test_hooks_that_compute_weights_are_no_users_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    prune.random_unstructured(model[0], "weight", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch: use the parametrization
        old_spectral_norm(model[2])
    parametrizations.weight_norm(model[3])
    slim = to_graph(model.eval(), (torch.randn(3, 4),))
    assert not any("hooks" in note for note in slim.demasked.notes)
