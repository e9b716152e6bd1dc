"""A result refuses sizes for which the captured graph is not the network."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import demask
from demask.graph.guards import REFUSE_VALUE, are_true, size_checks, value_checks
from demask.graph.provenance import InputSpec
from graphs import to_graph


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x.relu()


class Flat(nn.Module):
    """On the example the strided layer leaves one row, and export takes that for a fact."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 4), nn.Conv2d(8, 4, (1, 3), padding=(0, 1))
        with torch.no_grad():
            self.a.weight[:4] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_branch_taken_by_size_is_checked() -> None:
    slim = to_graph(Branches(), (torch.randn(5, 3),))
    x = torch.randn(4, 3)
    assert torch.equal(slim(x), x * 2)
    with pytest.raises(ValueError, match=">= 4"):
        slim(x[:3])
    assert to_graph(slim, (x,)).demasked.guards == slim.demasked.guards


def test_an_expression_that_became_a_number_is_checked() -> None:
    model = Flat().double().eval()
    auto = (dict.fromkeys((0, 2, 3), Dim.AUTO),)
    slim = to_graph(model, (torch.randn(2, 3, 6, 20).double(),), dynamic_shapes=auto)
    for size in ((6, 20), (3, 31)):
        x = torch.randn(1, 3, *size).double()
        torch.testing.assert_close(slim(x), model(x), rtol=1e-12, atol=1e-12)
    for module in (slim, copy.deepcopy(slim)):
        with pytest.raises(ValueError, match="captured for sizes with"):
            module(torch.randn(1, 3, 20, 20).double())


class ByShape(nn.Module):
    """A branch that the sizes of an image decide."""

    def __init__(self, condition) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if self.condition(x.shape[2], x.shape[3]) else x * 2


CONDITIONS = [
    (lambda h, w: h % 2, (25, 8), (27, 9), (24, 8)),
    (lambda h, w: h * 1.5 > 30, (24, 8), (40, 9), (20, 8)),
    (lambda h, w: h > w, (24, 8), (9, 8), (8, 9)),
    (lambda h, w: int(h / 3) == 8, (25, 8), (24, 20), (23, 8)),
    (lambda h, w: h == w or not h % 7, (14, 8), (14, 20), (9, 8)),
    (lambda h, w: h**0.5 // 1 == 5, (26, 8), (26, 20), (9, 8)),
]


@pytest.mark.parametrize(("condition", "example", "same", "other"), CONDITIONS)
def test_a_branch_is_never_taken_for_sizes_that_take_the_other(condition, example, same, other):
    model = ByShape(condition)
    slim = to_graph(model, (torch.randn(2, 3, *example),), dynamic_shapes="all")
    x = torch.randn(1, 3, *same)
    assert torch.equal(slim(x), model(x))
    with pytest.raises(ValueError, match="demask an example like yours"):
        slim(torch.randn(1, 3, *other))


class Squeezing(nn.Module):
    """Its rows are those of a batch, but for a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).squeeze()


def test_a_result_takes_its_own_example() -> None:
    """An example of one row is captured as two."""
    model = Squeezing().eval()
    with torch.no_grad():
        model.a.weight[:4], model.a.bias[:4] = 0, 0
    for rows in (1, 2):
        x = torch.randn(rows, 4)
        slim = to_graph(model, (x,))
        torch.testing.assert_close(slim(x), model(x))
        assert slim.demasked.after.parameters < slim.demasked.before.parameters
        with pytest.raises(ValueError, match="size"):
            slim(torch.randn(3 - rows, 4))
    assert any("(s" in note and ">= 2" in note for note in to_graph(model, (x[:1],)).demasked.notes)


def test_one_tensor_for_two_inputs_is_two() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y.relu()

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    slim = to_graph(Product(), (x, x))
    assert torch.equal(slim(x, y), x * y.relu())


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None, factor: float = 2.0, mode: str = "", **more) -> Tensor:
        y = self.a(x) * factor
        if shift is not None:
            y = y + shift
        return y * more["scale"] if mode == "scaled" else y


@pytest.mark.parametrize(
    ("position", "other", "words"),
    [
        (1, torch.ones(1, 3), "shift: expected None.*got Tensor"),
        (2, 3.0, "factor: expected 2.0.*got 3.0"),
        (2, torch.ones(()), "factor: expected 2.0.*got Tensor"),
        (2, None, "factor: expected 2.0.*got None"),
        (3, "scaled", "mode: expected 'plain'.*got 'scaled'"),
    ],
)
def test_inputs_that_are_no_tensors_are_those_of_the_example(position, other, words, tmp_path):
    model, args = Optional().eval(), (torch.randn(2, 3), None, 2.0, "plain")
    slim = to_graph(model, args)
    demask.save(slim, tmp_path / "slim")
    changed = (*args[:position], other, *args[position + 1 :])
    for module in (slim, copy.deepcopy(slim), demask.load(tmp_path / "slim")):
        assert torch.equal(module(*args), model(*args))
        with pytest.raises(ValueError, match=words):
            module(*changed)
    again = to_graph(slim, args).demasked
    assert again.values == slim.demasked.values
    assert again.guards == slim.demasked.guards


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan, 0.1 + 0.2, -0.0, 10**40, True])
def test_any_number_of_the_example_is_taken_again(factor: float) -> None:
    (line,) = value_checks({"k": "k"}, {"k": repr(factor)})
    refused: list[object] = []
    names = {REFUSE_VALUE: lambda *given: refused.append(given)}
    exec(line, names | {"k": factor})
    assert refused == []
    for other in (0.3, None, torch.tensor(1.0)):
        exec(line, names | {"k": other})
    assert len(refused) == 3


def test_values_from_elsewhere_are_not_code() -> None:
    for text in ("print(1)", "[1]", "(", "__import__('os')", "1j", "b''"):
        assert list(value_checks({"x": "x"}, {"x": text})) == []
    assert list(value_checks({"x": "x"}, {"__import__('os')": "1"})) == []


def test_a_keyword_that_forward_does_not_name_is_dynamic() -> None:
    model, x = Optional().eval(), torch.randn(2, 3)
    given = {"mode": "scaled", "scale": x}
    for shapes in (None, "all"):
        slim = to_graph(model, (x,), given, dynamic_shapes=shapes)
        y = torch.randn(5, 3)
        for names in (("mode", "scale"), ("scale", "mode")):
            inputs = {name: {"mode": "scaled", "scale": y}[name] for name in names}
            torch.testing.assert_close(slim(y, **inputs), model(y, **inputs))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_one_beside_other_batches_stays_one(batch: int) -> None:
    """Positions for all texts: the example itself is not refused."""
    model, shift = Optional().eval(), torch.randn(1, 3)
    slim = to_graph(model, (torch.randn(batch, 3), shift))
    for count in (batch, 5):
        x = torch.randn(count, 3)
        given = shift.expand(count, -1) if batch == 1 else shift  # as many as there are texts
        torch.testing.assert_close(slim(x, given), model(x, given))


def test_a_refusal_is_one_error_and_nothing_is_printed(capfd) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    slim = to_graph(model, (torch.randn(2, 3, 8, 9),))
    branches = to_graph(Branches(), (torch.randn(5, 3),))
    for module, size in ((slim, (1, 3, 9, 9)), (copy.deepcopy(slim), (1, 5)), (branches, (1, 3))):
        with pytest.raises(ValueError, match="demask"):
            module(torch.randn(size))
    assert capfd.readouterr() == ("", "")


def test_a_static_size_is_checked(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    slim = to_graph(model, (torch.randn(2, 3, 8, 9),))
    demask.save(slim, tmp_path / "slim.demask")
    for module in (slim, demask.load(tmp_path / "slim.demask")):
        assert module(torch.randn(1, 3, 8, 9)).shape == (1, 4, 6, 7)
        with pytest.raises(ValueError, match=r"input: expected sizes \(s\w+, 3, 8, 9\).*got"):
            module(torch.randn(1, 3, 9, 9))


@pytest.mark.parametrize(
    "guard", ["print(1)", "s0.real == 1", "s1 == 1", "max(s0, 'a') == 1", "(lambda: 1)() == 1", "("]
)
def test_a_guard_from_elsewhere_is_a_comparison_of_sizes_or_nothing(guard: str) -> None:
    spec = InputSpec("x", ("s0", "y"), "float32", (2, 3))
    assert list(size_checks({"x": "x"}, [spec], [guard])) == []
    (line,) = size_checks({"x": "x"}, [spec], ["(s0) == (2*y)"])
    assert line.startswith("if not (x.shape[0] == 2 * x.shape[1]): _refuse_sizes(")


def test_names_from_elsewhere_are_not_code() -> None:
    assert list(size_checks({"x": "x"}, [InputSpec("__import__('os')", (3,), "float32", (3,))], [])) == []
    spec = InputSpec("x", ("__import__('os')", 3), "float32", (1, 3))
    assert "import" not in "".join(size_checks({"x": "x"}, [spec], []))


def test_inputs_of_one_size_are_refused_with_two() -> None:
    """Export took the two batches for one; a batch of one would be broadcast in silence."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    slim = to_graph(Sum().eval(), (torch.randn(3, 4), torch.randn(3, 4)))
    slim(torch.randn(5, 4), torch.randn(5, 4))
    with pytest.raises(ValueError, match="expected sizes"):
        slim(torch.randn(5, 4), torch.randn(1, 4))


def test_a_condition_that_divides_by_zero_does_not_hold() -> None:
    assert are_true(["7 % (s0 - 2) == 1"], {"s0": 5}) and not are_true(["7 % (s0 - 2) == 1"], {"s0": 2})
