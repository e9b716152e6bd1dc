"""Groups: slices that can only be removed together, and what demask removes when they are zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import demask
from demask import BadInput, NotExportable
from demask.prune import groups
from demask.prune.axis_ties import AxisTies
from prune_networks import IMAGE, NETWORKS, Attention, Drawn, Residual, broken_law, network, randomized

# By network: its groups of channels and of heads: name, number of slices, members.
EXPECTED = {
    "residual": ["stem 6 9", "a 5 5"],
    "padded shortcut": ["stem 4 6", "a 8 3", "b 4 3"],
    "concatenated": ["stem 4 7", "a 3 6", "b 5 3"],
    "excited": ["widen 8 8", "down 4 3"],
    "shuffled": ["stem 4 3", "stem#2 4 3", "branch 4 3"],
    "grouped": ["stem 6 5", "up 5 3"],
    "u-net": ["a 4 6", "b 3 4", "shuffled 4 3"],
    "attention": ["qkv#2 3 3", "up 10 5", "qkv 4 3"],
    "shared keys": ["qkv#2 3 3", "up 10 5", "qkv 2 3"],
    "latent keys": ["q#2 2 4", "q#3 4 5", "q 3 5"],
    "recurrent": ["lstm 5 11"],
    "embedded": ["hidden 6 4"],
    "one number added": ["head 2 3", "more 4 3"],
}


def summary(model: nn.Module, inputs, structure: str) -> list[str]:
    return [
        f"{g.name} {g.size} {len({(m.parameter, m.axis) for m in g.members})}"
        for g in groups(model, inputs, structure=structure)
    ]


def members(model: nn.Module, inputs) -> list[set[tuple[str, int, bool]]]:
    return [{(m.parameter, m.axis, m.produces) for m in g.members} for g in groups(model, inputs)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_hangs_together(name: str) -> None:
    model, inputs = network(name)
    both = [row for s in ("channel", "head") for row in summary(model, inputs, s)]
    assert both == EXPECTED[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_zero_slices_of_a_group_are_removed_everywhere_and_nothing_else(name: str) -> None:
    model, inputs = network(name)
    assert broken_law(model, inputs, structure="channel") == []


@pytest.mark.parametrize("shared", [4, 2])
def test_zero_heads_are_removed_with_the_keys_they_share(shared: int) -> None:
    torch.manual_seed(0)
    model = randomized(Attention(4, shared))
    assert broken_law(model, (torch.randn(2, 5, 8),), structure="head") == []


def test_zero_heads_are_removed_where_keys_and_scores_stay() -> None:
    """What their keys share, and what is added to their scores, meets values that are zero."""
    model, inputs = network("latent keys")
    assert broken_law(model, inputs, structure="head") == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(8))
def test_drawn_networks_obey_the_law(seed: int) -> None:
    torch.manual_seed(seed)
    assert broken_law(randomized(Drawn(seed)), (IMAGE,), seed=seed, wasteful=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8, 60))
def test_more_drawn_networks_obey_the_law(seed: int) -> None:
    torch.manual_seed(seed)
    assert broken_law(randomized(Drawn(seed, 12)), (IMAGE,), seed=seed, wasteful=True) == []


def test_a_planted_fault_breaks_the_law(monkeypatch) -> None:
    """A number added to all channels: without the rule for it they would count as removable."""
    model, inputs = network("one number added")
    assert broken_law(model, inputs) == []
    monkeypatch.setattr(AxisTies, "_force_lasting", lambda self: None)
    assert summary(model, inputs, "channel")[0] == "a 6 3"
    assert broken_law(model, inputs) != []


def test_ties_that_are_missing_break_the_law(monkeypatch) -> None:
    model, inputs = network("padded shortcut")
    monkeypatch.setattr(AxisTies, "position_ties", lambda self: iter(()))
    assert broken_law(model, inputs) != []


def test_positions_of_a_slice() -> None:
    model, inputs = network("attention")
    (heads,) = groups(model, inputs, structure="head")
    weight, _, out = heads.members
    assert weight.positions(1).tolist() == [3, 4, 5, 15, 16, 17, 27, 28, 29]
    assert out.positions(3).tolist() == [9, 10, 11]
    assert (weight.produces, out.produces) == (True, False)
    assert (~weight.mask(torch.tensor([True, False, True, True]))).nonzero().flatten().tolist() == (
        weight.positions(1).tolist()
    )
    assert heads.producers + heads.readers == heads.members


def test_flattened_channels_have_all_their_pixels() -> None:
    model, inputs = network("residual")
    stream = groups(model, inputs)[0]
    head = next(m for m in stream.members if m.parameter == "head.weight")
    assert head.positions(2).tolist() == [8, 9, 10, 11]


def test_fused_attention_of_torch() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    (heads,) = groups(model, torch.zeros(2, 3, 8), structure="head")
    assert heads.name == "self_attn"
    assert heads.members[0].positions(1).tolist() == [*range(4, 8), *range(12, 16), *range(20, 24)]
    (units,) = groups(model, torch.zeros(2, 3, 8), structure="unit")
    assert (units.name, units.size) == ("linear1", 12)


def test_skipped_layers_stay_whole() -> None:
    model, inputs = network("residual")
    assert [g.name for g in groups(model, inputs, skip=["a"])] == []
    assert [g.name for g in groups(model, inputs, skip=["head.*"])] == ["a"]
    assert [g.name for g in groups(model, inputs, skip=["*_norm.bias"])] == []
    with pytest.raises(BadInput, match=r"in skip, got 'tail'"):
        groups(model, inputs, skip=["tail"])


def test_masked_and_parametrized_weights_have_their_plain_names() -> None:
    model, inputs = network("residual")
    plain = members(model, inputs)
    prune.l1_unstructured(model.a, "weight", 0.5)
    parametrizations.weight_norm(model.b, "weight")
    assert members(model, inputs) == plain
    assert parametrize.is_parametrized(model.b, "weight")
    model(*inputs)


def test_groups_print_as_a_table() -> None:
    model, inputs = network("grouped")
    lines = str(groups(model, inputs)).splitlines()
    assert lines[2].split() == ["stem", "6", "channel", "stem.weight,", "grouped.weight", "up.weight"]


def test_the_model_is_not_changed() -> None:
    model = Residual().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    groups(model, IMAGE)
    assert model.training
    assert model.norm.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_bad_input() -> None:
    model, inputs = network("residual")
    with pytest.raises(BadInput, match="structure of channel, unit, head, expert; got 'row'"):
        groups(model, inputs, structure="row")
    with pytest.raises(BadInput, match="example_inputs to be a tuple"):
        groups(model, [IMAGE])
    with pytest.raises(demask.DemaskError):
        groups(model, (torch.zeros(2, 4, 8, 8),))


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_what_cannot_be_captured() -> None:
    with pytest.raises(NotExportable):
        groups(Branches(), torch.ones(3))


class Experts(nn.Module):
    """Experts that tokens select, in stacked weights, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 32, 16))
        self.down = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x, ends):
        up = torch.nn.functional.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
        left, right = up.chunk(2, 1)
        return torch.nn.functional.grouped_mm(left * right, self.down.transpose(1, 2), offs=ends)


def test_experts_and_their_units() -> None:
    rows = torch.randn(6, 16, dtype=torch.bfloat16)
    inputs = rows, torch.tensor([2, 4, 6], dtype=torch.int32)
    model = Experts().bfloat16()
    (experts,) = groups(model, inputs, structure="expert")
    assert (experts.size, experts.kind) == (3, "expert")
    assert [(m.parameter, m.axis) for m in experts.members] == [("gate_up", 0), ("down", 0)]
    (units,) = groups(model, inputs, structure="unit")
    assert [(m.parameter, m.axis, m.produces) for m in units.members] == [("gate_up", 1, True), ("down", 2, False)]
    assert units.members[0].positions(1).tolist() == [1, 17]
    pruned = demask.prune.Pruner(model, inputs, structure="expert").step(0.34)
    assert pruned.before == pruned.after  # demask leaves them: tokens may select a zero expert
    assert [bool((model.down[k] == 0).all()) for k in range(3)].count(True) == 1
