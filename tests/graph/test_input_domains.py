"""Inputs are drawn from what the example shows and the caller states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.graph.input_domains import FORMS, Domain, draw_like

EXAMPLES = {
    "numbers": (torch.tensor([0.5, -1.0, 2.0]), "any"),
    "integers": (torch.tensor([[3, 7, 3], [5, 4, 3]]), "any"),
    "a mask of floats": (torch.tensor([1.0, 0, 0, 1, 1]), "mask"),
    "bools": (torch.tensor([True, False]), "mask"),
    "one-hot rows": (torch.eye(5)[[3, 1, 1, 0]], "one-hot"),
    "one-hot channels": (torch.eye(4)[torch.tensor([[3, 1], [1, 0]])].permute(0, 2, 1), "one-hot"),
    "a batch vector": (torch.tensor([0, 0, 1, 1, 1, 3]), "sorted"),
    "offsets": (torch.tensor([0.0, 0.5, 0.5, 4.0]), "sorted"),
    "positions": (torch.arange(7), "distinct"),
    "a permutation": (torch.tensor([[2, 0, 1, 3], [0, 3, 2, 1]]), "distinct"),
    "ones": (torch.ones(4), "any"),
    "one number": (torch.tensor(3), "any"),
    "one float": (torch.tensor(0.5), "any"),
    "nothing": (torch.zeros(0), "any"),
    "complex": (torch.ones(2, dtype=torch.complex64), "any"),
    "half": (torch.randn(6).half(), "any"),
}
HOLDS: dict[str, Callable[[Tensor], bool]] = {
    "any": lambda x: True,
    "mask": lambda x: bool(((x == 0) | (x == 1)).all()),
    "one-hot": lambda x: any(bool(((x == 1).sum(k) == 1).all()) for k in range(x.ndim)),
    "sorted": lambda x: bool((x.diff() >= 0).all()),
    "distinct": lambda x: bool((x.sort(-1).values.diff(dim=-1) > 0).all()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_drawn_values_are_of_the_form_of_the_example(name: str) -> None:
    example, form = EXAMPLES[name]
    domain = Domain.of(example)
    assert domain.form == form
    for seed in range(20):
        drawn = draw_like(example, torch.Generator().manual_seed(seed))
        assert drawn.shape == example.shape and drawn.dtype == example.dtype
        assert HOLDS[form](drawn)
        whole = not example.is_floating_point() and not example.is_complex()
        if whole and example.numel() and example.dtype is not torch.bool:
            assert drawn.min() >= example.min() and drawn.max() <= example.max()
    moved = domain.reorder(example, torch.Generator().manual_seed(0))
    assert moved.shape == example.shape and HOLDS[form](moved)


class Table(nn.Module):
    """Looks rows up, and fails outside of them; divides by what must not be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, index: Tensor, scale: Tensor) -> Tensor:
        return self.layer(self.rows(index)) / scale.sqrt()


def call() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Table().eval(), (torch.tensor([0, 3, 3]), torch.tensor([[2.0], [3], [2.5]]))


def test_stated_ranges_are_what_checks_draw_from(monkeypatch: pytest.MonkeyPatch) -> None:
    net, args = call()
    seen: list[tuple[Tensor, Tensor]] = []
    forward = Table.forward

    def watched(self: nn.Module, index: Tensor, scale: Tensor) -> Tensor:
        if type(index) is Tensor:
            seen.append((index, scale))
        return forward(self, index, scale)

    monkeypatch.setattr(Table, "forward", watched)
    inputs = {"index": (0, 4), "scale": (1.5, 9)}
    slim = demask.demask(net, args, inputs=inputs)
    assert demask.verify(net, slim, args, inputs=inputs).ok
    assert any(int(index.max()) == 4 for index, _ in seen)
    assert all(float(scale.min()) >= 1.5 and float(scale.max()) <= 9 for _, scale in seen)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"rows": (0, 1)}, "inputs names 'rows'; expected one of"),
        ({"index": (3, 0)}, "low <= high"),
        ({"index": (0, float("nan"))}, "low <= high"),
        ({"index": "mixed"}, "or one of"),
        ({"index": 4}, "or one of"),
        ({"index": (0, 2)}, "not in its range"),
        ([("index", (0, 4))], "must be a mapping"),
    ],
)
def test_other_statements_are_refused(inputs: object, message: str) -> None:
    net, args = call()
    for function in (demask.demask, demask.optimize):
        with pytest.raises(demask.BadInput, match=message):
            function(net, args, inputs=inputs)  # type: ignore[arg-type]
    with pytest.raises(demask.BadInput, match=message):
        demask.verify(net, net, args, inputs=inputs)  # type: ignore[arg-type]
    with pytest.raises(demask.BadInput, match="leave one out"):
        demask.demask(net, args, inputs={"index": (0, 4)}, modules=["layer"])
    assert FORMS


def test_inputs_that_the_network_rejects_are_not_compared_and_verify_says_so() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if float(x.abs().max()) > 1:
                raise ValueError("expected numbers up to 1")
            return self.layer(x)

    net, x = Strict().eval(), torch.rand(2, 4)
    result = demask.verify(net, net, (x,))
    assert result.ok and "6 runs" in result.coverage and "expected numbers up to 1" in str(result)
    assert not demask.verify(net, net, (x,), inputs={"x": (-1, 1)}).coverage


def test_edges_of_a_graph_name_its_nodes() -> None:
    """At other batch sizes too: nodes and edges have one dynamic size each."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.zeros_like(y).index_add(0, edges[1], y[edges[0]])

    torch.manual_seed(0)
    net, args = Sums().eval(), (torch.randn(10, 6), torch.randint(0, 10, (2, 30)))
    assert demask.verify(net, demask.demask(net, args), args).ok
