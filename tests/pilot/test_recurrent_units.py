"""Hidden units of recurrent layers are measured and skipped: those that are left out are 0 at every step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.pilot import collect, condition, write_packets

KINDS = {
    "lstm": (nn.LSTM, {}),
    "stacked gru": (nn.GRU, {"num_layers": 2}),
    "both directions": (nn.LSTM, {"bidirectional": True}),
    "rnn without biases": (nn.RNN, {"bias": False}),
}
UNITS = 10


class Net(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        torch.manual_seed(0)
        kind, options = KINDS[name]
        self.rnn = kind(6, UNITS, batch_first=True, **options)
        self.head = nn.Linear(UNITS * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.rnn(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(y[:, -1]) + last.sum((0, 2))[:, None]

    def calls(self) -> list[str]:
        return ["l0", *["l1"] * (self.rnn.num_layers > 1), *["l0_reverse"] * self.rnn.bidirectional]


@torch.no_grad()
def without(model: Net, chosen: tuple[Tensor, ...]) -> Net:
    """The network whose other units have no weights, so that they are 0 at every step."""
    model = copy.deepcopy(model)
    for units, suffix in zip(chosen, model.calls(), strict=True):
        off = [unit for unit in range(UNITS) if unit not in units.tolist()]
        hidden = model.rnn.get_parameter(f"weight_hh_{suffix}")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            if hasattr(model.rnn, f"{name}_{suffix}"):
                gates = model.rnn.get_parameter(f"{name}_{suffix}").unflatten(0, (-1, UNITS))
                gates[:, off] = 0
        hidden[:, off] = 0
    return model


@pytest.mark.parametrize("name", KINDS)
def test_units_that_are_left_out_are_zero_at_every_step(name: str) -> None:
    model, x = Net(name).double().eval(), torch.randn(3, 5, 6).double()
    data = collect(model, (x,))
    names = ["rnn", "rnn#3"][: len(model.calls())]
    assert [tuple(data.magnitudes[one].shape) for one in names] == [(3, UNITS)] * len(names)
    assert list(data.magnitudes) == [*names, "head"]
    with torch.no_grad():
        first = model.rnn(x)[0][..., :UNITS].abs().mean(1).float()
    if len(model.calls()) == 1:
        torch.testing.assert_close(data.magnitudes["rnn"], first)
    for keep in (0.3, 0.5, 1.0):
        module = condition(model, (x,), pilot=data, condition=f"skip:{keep}:layers=rnn*", check=False)
        torch.testing.assert_close(module(x), without(model, module.last)(x), rtol=0, atol=1e-14)
        assert [len(units) for units in module.last] == [round(keep * UNITS)] * len(model.calls())
    torch.testing.assert_close(module(x), model(x), rtol=0, atol=1e-14)
    shorter = torch.randn(2, 5, 6).double()
    torch.testing.assert_close(module(shorter), model(shorter), rtol=0, atol=1e-14)


def test_contributions_of_units() -> None:
    """Of the last step's output alone the contribution is exact: the head is linear."""
    model, x = Net("lstm").eval(), torch.randn(4, 5, 6)
    data = collect(model, (x,), measure="contribution", per="unit")
    assert data.magnitudes["rnn"].shape == (4, UNITS) and bool((data.magnitudes["rnn"] > 0).all())


def test_units_are_read_from_packets(tmp_path) -> None:
    model, x = Net("stacked gru").eval(), torch.randn(2, 5, 6)
    data = collect(model, (x,))
    write_packets(tmp_path / "weights", model, data, block=64)
    expected = condition(model, (x,), pilot=data, condition="skip:0.3", check=False)
    outline = copy.deepcopy(model).to("meta")
    small = condition(outline, (x,), pilot=data, condition="skip:0.3", weights=tmp_path / "weights")
    with torch.no_grad():
        assert torch.equal(small(x), expected(x)) and small.bytes_read > 0


def test_other_conditions_leave_recurrent_layers_as_they_are() -> None:
    model, x = Net("lstm").eval(), torch.randn(2, 5, 6)
    with pytest.raises(BadInput, match="can only be skipped"):
        condition(model, (x,), pilot="bits:8", condition="constant:0.5:value=0:layers=rnn*", check=False)
    projected = nn.LSTM(6, 8, proj_size=3, batch_first=True).eval()
    with pytest.raises(BadInput, match="projected"):
        condition(Projected(projected), (x,), pilot="bits:8", condition="skip:0.5", check=False)


class Projected(nn.Module):
    def __init__(self, rnn: nn.LSTM):
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]
