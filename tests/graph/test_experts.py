"""Units that are zero in all experts go, however tokens are sent to experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.graph.capture import capture as one_call
from demask.graph.capture.capture import capture


def grouped(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by expert, one product (bfloat16: torch has the op for no other dtype here)."""
    ends = (chosen[:, None] == torch.arange(len(weight))).sum(0).cumsum(0).to(torch.int32)
    return torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def batched(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """A matrix taken for each row."""
    return torch.bmm(weight[chosen], x.unsqueeze(-1)).squeeze(-1)


class Experts(nn.Module):
    """Four gated experts, one for each row; of their 16 units 9 are always zero."""

    def __init__(self, product: Callable[..., Tensor]):
        super().__init__()
        self.router, self.product = nn.Linear(8, 4), product
        self.gate_up, self.down = (nn.Parameter(torch.randn(4, 32, 8)), nn.Parameter(torch.randn(4, 8, 16)))
        with torch.no_grad():
            self.gate_up[:, :3] = 0
            self.gate_up[:, 16 + 9 : 16 + 15] = 0

    def forward(self, x: Tensor) -> Tensor:
        chosen, order = self.router(x).argmax(-1).sort()
        gate, up = self.product(x[order], self.gate_up, chosen).chunk(2, -1)
        rows = self.product(nn.functional.silu(gate) * up, self.down, chosen)
        return torch.zeros_like(rows).index_put((order,), rows)


@pytest.mark.parametrize(
    ("product", "dtype", "rows", "units"),
    [(grouped, torch.bfloat16, 16, 8), (batched, torch.float64, 14, 7)],  # rows of whole 16 bytes
)
def test_units_dead_in_all_experts_go(product, dtype, rows: int, units: int) -> None:
    torch.manual_seed(0)
    model = Experts(product).to(dtype).eval()
    x = torch.randn(12, 8, dtype=dtype)
    slim = demask.demask(model, (x,))
    assert slim.get_parameter("gate_up").shape == (4, rows, 8)
    assert slim.get_parameter("down").shape == (4, 8, units)
    for y in (x, torch.randn(5, 8, dtype=dtype)):
        torch.testing.assert_close(slim(y), model(y), rtol=1e-12, atol=0)


def test_units_dead_in_one_expert_stay() -> None:
    torch.manual_seed(0)
    model = Experts(batched).double().eval()
    with torch.no_grad():
        model.gate_up[1:] = torch.randn(3, 32, 8)
    slim = demask.demask(model, (torch.randn(12, 8, dtype=torch.float64),))
    assert slim.get_parameter("gate_up").shape == (4, 32, 8)


class Expert(nn.Module):
    """Two layers: 808 numbers, of which 49 are of one unit and the last bias."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def added(x: Tensor, experts: nn.ModuleList, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows are selected for each expert, and added."""
    sums = torch.zeros_like(x)
    for k, expert in enumerate(experts):
        rows, order = torch.where(chosen == k)
        sums.index_add_(0, rows, expert(x[rows]) * weights[rows, order, None])
    return sums


def written(x: Tensor, experts: nn.ModuleList, weights: Tensor, chosen: Tensor) -> Tensor:
    """Rows are selected by a mask, and written."""
    sums = torch.zeros_like(x)
    for k, expert in enumerate(experts):
        mask = (chosen == k).any(-1)
        sums[mask] = sums[mask] + expert(x[mask]) * (weights * (chosen == k)).sum(-1)[mask, None]
    return sums


def multiplied(x: Tensor, experts: nn.ModuleList, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert gets every row."""
    return sum(
        expert(x) * (weights * (chosen == k)).sum(-1, keepdim=True)  # type: ignore[return-value]
        for k, expert in enumerate(experts)
    )


class Routed(nn.Module):
    """Four experts, of which each row takes two."""

    def __init__(self, mix: Callable[..., Tensor]):
        super().__init__()
        self.router, self.experts, self.mix = nn.Linear(16, 4), nn.ModuleList(), mix
        self.last = nn.Linear(16, 16)  # a dead expert is less than 3 % of it all: no graph
        self.experts.extend(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.last(x + self.mix(x, self.experts, weights, chosen))


@pytest.mark.parametrize("mix", [added, written, multiplied])
@pytest.mark.parametrize("result", ["class", "auto"])
def test_dead_experts_keep_one_unit_and_their_place(mix: Callable[..., Tensor], result: str) -> None:
    """The second and fourth expert are zero, the first has 8 dead units: the router selects among
    four as before, at any number of rows, also where no row takes an expert."""
    torch.manual_seed(0)
    model = Routed(mix).double().eval()
    with torch.no_grad():
        for k in (1, 3):
            for tensor in model.experts[k].parameters():
                tensor.zero_()
        for tensor in model.experts[0].up.parameters():  # type: ignore[union-attr]
            tensor[:8] = 0
    slim = demask.demask(model, (torch.randn(6, 16, dtype=torch.float64),), result=result)
    assert type(slim) is Routed
    assert [len(expert.up.weight) for expert in slim.experts] == [16, 1, 24, 1]  # type: ignore[union-attr]
    counts = [sum(p.numel() for p in expert.parameters()) for expert in slim.experts]  # type: ignore[union-attr]
    assert counts == [808 - 8 * 33, 49, 808, 49]
    for rows in (6, 1, 2, 33):
        x = torch.randn(rows, 16, dtype=torch.float64)
        torch.testing.assert_close(slim(x), model(x), rtol=1e-12, atol=1e-12)
        assert torch.equal(slim.router(x), model.router(x))  # type: ignore[operator]


class Looped(nn.Module):
    """As models of transformers are asked and told how their experts run."""

    def __init__(self):
        super().__init__()
        self.config, self.part = {"": "eager"}, Experts(batched)

    def get_experts_implementation(self) -> dict[str, str]:
        return dict(self.config)

    def set_experts_implementation(self, name: str | dict[str, str]) -> None:
        self.config.update(name if isinstance(name, dict) else {"": name})

    def forward(self, x: Tensor) -> Tensor:
        if self.config[""] != "eager":
            return self.part(x)
        chosen = self.part.router(x).argmax(-1)
        return torch.stack([row * int(k) for row, k in zip(x, chosen, strict=True)])


def test_a_loop_over_experts_is_captured_as_one_call() -> None:
    model = Looped().eval()
    program = capture(model, (torch.randn(6, 8),))
    assert one_call.NOTE in program.notes
    assert model.config == {"": "eager"}


def test_a_model_without_experts_keeps_its_setting() -> None:
    class Dense(Looped):
        def set_experts_implementation(self, name: str | dict[str, str]) -> None:
            raise ValueError("no experts")

        def forward(self, x: Tensor) -> Tensor:
            return self.part.router(x)

    assert one_call.NOTE not in capture(Dense().eval(), (torch.randn(6, 8),)).notes
