"""Chains in graphs: what is found, what it becomes, what stays, and that no output changes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.errors import BadInput
from demask.ops import TABLE
from demask.pilot import Certified, Columns, unconditioned
from demask.pilot.chains.chain_op import CHAIN, chain, fake, plain, steps

CONDITIONS = (Columns(), Certified(), Certified(levels=2))


def perceptron(live: float = 1.0) -> nn.Sequential:
    """Hidden values of which few are above zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 512),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(512, 512, bias=False),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    with torch.no_grad():
        model[1].bias -= live  # type: ignore[operator]
    return model.eval()


class Block(nn.Module):
    """A feed-forward part with a residual, an activation of any kind."""

    def __init__(self, act: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.ffn = nn.LayerNorm(256), nn.Sequential(nn.Linear(256, 1024), act, nn.Linear(1024, 256))
        with torch.no_grad():
            self.ffn[0].bias -= 0.8  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


def chains_in(module: nn.Module) -> list[str]:
    return [str(n.args[2]) for n in module.graph.nodes if n.target is CHAIN]  # type: ignore[union-attr]


def image(batch: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(batch, 3, 8, 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: f"{c.name}{getattr(c, 'levels', '')}")
def test_outputs_are_those_of_the_dense_chain(condition: Columns | Certified):
    model, x = perceptron(), image()
    state = copy.deepcopy(model.state_dict())
    made, dense = condition.applied(model, (x,), None, None, TABLE), unconditioned(model, (x,))
    assert made.conditioned.exact and len(chains_in(made)) == 1
    for batch in (1, 3, 5):
        assert torch.equal(made(image(batch)), dense(image(batch)))
    assert demask.verify(model, made, (x,)).ok
    assert {n for n, _ in made.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_modes_follow_the_inputs():
    made = Columns().applied(perceptron(), (image(),), None, None, TABLE)
    whats = {d.layer: d.what for d in made.conditioned.decisions}
    assert whats == {"1": "dense", "4": "columns", "6": "columns"}
    first = Certified().applied(perceptron(), (image(),), None, None, TABLE).conditioned.decisions[0]
    assert first.what == "certified" and "not proved zero" in first.why


def test_a_chain_that_gains_nothing_stays():
    model = perceptron(live=-5.0)
    for condition in CONDITIONS:
        made = condition.applied(model, (image(),), None, None, TABLE)
        assert chains_in(made) == []
        assert all(d.what == "as it was" for d in made.conditioned.decisions)
        assert "predicted gain" in made.conditioned.decisions[0].why


@pytest.mark.parametrize("tokens", [1, 40])
def test_feed_forward_of_one_token(tokens: int):
    """For one token there is a chain; for many, the reason why not."""
    model, x = Block(nn.ReLU()).eval(), torch.randn(1, tokens, 256)
    made = Certified().applied(model, (x,), None, None, TABLE)
    if tokens == 1:
        assert chains_in(made) == ["certified+bias+relu,columns+bias"]
        assert torch.equal(made(x), unconditioned(model, (x,))(x))
        assert demask.verify(model, made, (x,)).ok
    else:
        assert "40 rows in a call" in made.conditioned.decisions[0].why


def test_activations_without_zeros_are_named():
    made = Certified().applied(Block(nn.GELU()).eval(), (torch.randn(1, 1, 256),), None, None, TABLE)
    why = {d.layer: d.why for d in made.conditioned.decisions}
    assert "gelu after it produces no zeros to skip" in why["ffn.0"]
    assert chains_in(made) == []


def test_other_weights_stay_and_say_why():
    broken = perceptron()
    with torch.no_grad():
        broken[4].weight[3, 3] = float("inf")  # type: ignore[index]
    made = Columns().applied(broken, (image(),), None, None, TABLE)
    assert any("NaN or infinities" in d.why for d in made.conditioned.decisions)
    doubles = Columns().applied(perceptron().double(), (image().double(),), None, None, TABLE)
    assert any("float64" in d.why for d in doubles.conditioned.decisions)


def test_a_pilot_is_refused():
    for condition in CONDITIONS:
        with pytest.raises(BadInput, match="pilot"):
            condition.applied(perceptron(), (image(),), None, "bits:4", TABLE)
    with pytest.raises(BadInput, match="bits=8"):
        Certified(bits=4)


def test_gradients_and_other_dtypes_take_the_plain_path():
    model, x = perceptron(), image()
    made = Columns().applied(model, (x,), None, None, TABLE)
    leaf = x.clone().requires_grad_()
    made(leaf).sum().backward()
    other = x.clone().requires_grad_()
    model(other).sum().backward()
    assert torch.allclose(leaf.grad, other.grad, atol=1e-6)  # type: ignore[arg-type]
    assert torch.allclose(made.double()(x.double()), model.double()(x.double()), atol=1e-12)


def test_writes_into_weights_are_seen():
    made = Columns().applied(perceptron(), (image(),), None, None, TABLE)
    with torch.no_grad():
        before = made(image())
        made.get_parameter("6.weight").mul_(2)
        made.get_parameter("6.bias").mul_(2)
        for _ in range(3):
            assert torch.allclose(made(image()), 2 * before, rtol=1e-6)


def test_the_op_for_every_shape():
    weights = [torch.randn(7, 5), torch.randn(7), torch.randn(3, 7)]
    text = "columns+bias+relu,dense"
    for shape in ((5,), (1, 5), (2, 2, 5), (0, 5), (9, 5), (1, 4, 5)):
        x = torch.randn(shape)
        expected = plain(x, weights, text)
        assert chain(x, weights, text).shape == expected.shape
        assert torch.allclose(chain(x, weights, text), expected, atol=1e-6)
    x = torch.randn(2, 5)
    opcheck = torch.library.opcheck
    opcheck(CHAIN, (x, weights, text), test_utils=("test_schema", "test_faketensor"))
    mapped = torch.func.vmap(lambda row: chain(row, weights, text))(x)
    assert torch.allclose(mapped, plain(x, weights, text), atol=1e-6)


def test_texts_that_are_none():
    for text in ("", "columns+relu+bias", "fast", "dense,"):
        with pytest.raises(BadInput, match="expected layers"):
            steps(text)
    with pytest.raises(BadInput, match="weights and biases"):
        chain(torch.randn(1, 5), [torch.randn(7, 5)], "dense+bias")
    for weights in ([torch.randn(7, 5, 1)], [torch.randn(7, 5), torch.randn(6)]):
        with pytest.raises(BadInput, match="matrices and their biases"):
            fake(torch.randn(1, 5), weights, "dense+bias" if len(weights) > 1 else "dense")


def test_saved_loaded_and_spelled(tmp_path: Path):
    x = image()
    made = Certified().applied(perceptron(), (x,), None, None, TABLE)
    demask.save(made, tmp_path / "a.demask")
    assert torch.equal(demask.load(tmp_path / "a.demask")(x), made(x))
    ordinary = made.plain()
    assert not chains_in(ordinary)
    assert torch.allclose(ordinary(x), made(x), atol=1e-5)
    twin = copy.deepcopy(made)
    assert twin.conditioned == made.conditioned and torch.equal(twin(x), made(x))


def test_an_empty_example_is_called_empty():
    model = perceptron()
    made = Columns().applied(model, (torch.rand(0, 3, 8, 8),), None, None, TABLE)
    assert all("input is empty" in one.why for one in made.conditioned.decisions)
    assert made(torch.rand(0, 3, 8, 8)).shape == (0, 10)
