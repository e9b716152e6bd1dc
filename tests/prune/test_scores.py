"""Scores against the formulas of their papers, and what Fluctuation does to biases."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import demask
from demask import BadInput
from demask.prune import L1, L2, Activation, Fluctuation, Pruner, Random, ScoreView, Taylor
from prune_networks import network

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


def mlp(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), activation or nn.ReLU(), nn.Linear(6, 3))


def scores_of(model: nn.Module, score, inputs=X, structure: str = "channel") -> dict:
    pruner = Pruner(model, inputs, score=score, structure=structure)
    if getattr(score, "needs_inputs", False):
        model(inputs)
    return pruner.scores()


def close(mine: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(mine, expected.double().flatten(), rtol=1e-5, atol=1e-7)


def test_norms_of_rows() -> None:
    model = mlp()
    close(scores_of(model, L1())["0"], model[0].weight.detach().abs().sum(1))
    close(scores_of(model, L2())["0"], model[0].weight.detach().norm(dim=1))
    close(scores_of(model, L2(), structure="element")["2.weight"], model[2].weight.detach().abs()[:].flatten())


def test_taylor_multiplies_weights_and_gradients() -> None:
    model = mlp()
    model(X).square().mean().backward()
    first = model[0]
    products = (first.weight * first.weight.grad).sum(1) + first.bias * first.bias.grad
    close(scores_of(model, Taylor())["0"], products.detach().square())


def test_wanda_of_elements_and_of_slices() -> None:
    model = mlp()
    hidden = torch.relu(model[0](X)).detach()
    expected = model[2].weight.detach().abs() * hidden.norm(dim=0)
    close(scores_of(model, Activation(), structure="element")["2.weight"], expected)
    close(scores_of(model, Activation())["0"], expected.sum(0))
    means = hidden.abs().mean(0)
    close(scores_of(model, Activation("minitron"))["0"], means * 3)  # read by three rows
    with pytest.raises(BadInput, match="kind to be 'wanda' or 'minitron'"):
        Activation("magnitude")


def test_flap_multiplies_variances_and_squared_columns() -> None:
    model = mlp()
    hidden = torch.relu(model[0](X)).detach()
    expected = hidden.var(0, correction=0) * model[2].weight.detach().square().sum(0)
    close(scores_of(model, Fluctuation())["0"], expected)


def test_inputs_of_grouped_convolutions_belong_to_their_groups() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2))
    x = torch.randn(3, 2, 5, 5)
    hidden = torch.relu(model[0](x)).detach().pow(2).sum((0, 2, 3)).sqrt().view(2, 1, 2)
    expected = model[2].weight.detach().abs().view(2, 3, 2) * hidden
    close(scores_of(model, Activation(), x, "element")["2.weight"], expected)


def test_statistics_are_those_of_all_batches() -> None:
    model = mlp()
    pruner = Pruner(model, X, score=Activation())
    for part in X.split(8):
        model(part)
    whole = scores_of(mlp(), Activation())
    close(pruner.scores()["0"], whole["0"])
    pruner.remove()
    assert not model[2]._forward_pre_hooks


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid()])
def test_bias_compensation_is_exact_for_constant_slices_and_demask_carries_it(activation) -> None:
    """Two hidden units do not change with the input: they are the first to go, and what they add
    becomes part of the next bias. After a sigmoid a masked unit is still one half."""
    model = mlp(activation)
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0
        model[0].bias[[1, 4]] = torch.tensor([0.7, 1.3])
    expected = model(X).detach()
    pruner = Pruner(model, X, score=Fluctuation())
    model(X)
    assert pruner.step(0.34).removed["0"].tolist() == [1, 4]
    torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-6)
    slim = demask.demask(model, (X,))
    torch.testing.assert_close(slim(X), expected, rtol=1e-5, atol=1e-6)
    assert slim.get_parameter("0.weight").shape == (4, 4)


def test_compensation_brings_outputs_closer() -> None:
    distances = []
    for compensation in (True, False):
        model, inputs = network("attention")
        expected = model(*inputs).detach()
        pruner = Pruner(model, inputs, score=Fluctuation(compensation), structure="unit")
        model(*inputs)
        pruner.step(0.5)
        distances.append((model(*inputs) - expected).detach().norm().item())
    assert distances[0] < distances[1]


def test_layers_without_a_bias_get_one() -> None:
    model = mlp()
    model[2] = nn.Linear(6, 3, bias=False)
    pruner = Pruner(model, X, score=Fluctuation())
    model(X)
    pruner.step(0.5)
    assert model[2].bias.shape == (3,)
    assert demask.verify(model, demask.demask(model, (X,)), (X,)).ok


def test_random_scores_repeat_with_their_seed() -> None:
    a, b, c = (scores_of(mlp(), Random(seed))["0"] for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_score_of_ones_own() -> None:
    seen = []

    def score(view: ScoreView) -> torch.Tensor:
        seen.append((view.group.name, len(view.weights), len(view.readers)))
        return torch.arange(view.candidates.units)

    pruner = Pruner(mlp(), X, score=score)
    assert pruner.step(0.5).removed["0"].tolist() == [0, 1, 2]
    assert seen == [("0", 1, 1)]


def test_copies_and_results_of_demask_add_nothing_to_statistics() -> None:
    model = mlp()
    pruner = Pruner(model, X, score=Activation())
    model(X)
    before = pruner.scores()
    copy.deepcopy(model)(X)
    demask.demask(model, (X,))(X)
    assert torch.equal(pruner.scores()["0"], before["0"])


def test_a_table_that_is_also_the_last_layer_has_the_inputs_of_that_layer() -> None:
    model, inputs = network("embedded")
    pruner = Pruner(model, inputs, score=Activation(), structure="element")
    model(*inputs)
    assert pruner.scores()["table.weight"].shape == (66,)
    pruner.step(0.5)
    assert torch.equal(model.last.weight, model.table.weight)
    assert int((model.last.weight == 0).sum()) == 33
