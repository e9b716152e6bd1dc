"""Equal modules share one capture; modules that only look equal do not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import demask
from demask.graph.capture import shared_captures as sharing
from demask.graph.capture.capture import capture_programs
from demask.graph.program import Program
from demask.shrink import submodules as partial


class Block(nn.Module):
    """Two layers, `index` (which of the blocks this is) not read. act: of the hidden units."""

    def __init__(self, index: int = 0, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.index, self.act, self.factor = index, act, 1.0
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y = self.factor * self.b(self.act(self.a(x)))
        if cache is not None:
            cache[self.index] = y
        return x + y


class Odd(Block):
    """Every third block has another activation: the code reads which one this is."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        act = torch.tanh if getattr(self, "index", 0) % 3 == 2 else F.relu
        return x + self.b(act(self.a(x)))


class Numbered(Block):
    """A buffer by whose value the code decides."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(number))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) if self.number else x - self.b(F.relu(self.a(x)))


class Tabled(Block):
    """An array, whose numbers the code reads, and a tensor that is no buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.table, self.shift = np.arange(6.0) + number, torch.full((6,), number + 1.0)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) * float(self.table[1]) + self.shift


class Literal(Block):
    """A tensor that the code makes of a number from outside of the module."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) * torch.tensor([2.0])


class Configured(Block):
    """Reads an object that is no module."""

    def __init__(self, index: int, scale: float) -> None:
        super().__init__(index)
        self.options = Options(scale)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) * self.options.scale


class Options:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model_of(make: Callable[[int], nn.Module], count: int = 4) -> Model:
    """Blocks of which other units are masked in each, as many in all."""
    torch.manual_seed(0)
    model = Model([make(k) for k in range(count)]).eval()
    with torch.no_grad():
        for k, block in enumerate(model.blocks):
            inner: Any = block
            inner.a.weight[k : k + 5] = 0
            inner.a.bias[k : k + 5] = 0
    return model


def counted(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are captured from now on."""
    seen: list[nn.Module] = []

    def watched(model: Any, *rest: Any, **options: Any) -> Any:
        seen.append(model)
        return capture_programs(model, *rest, **options)

    monkeypatch.setattr(sharing, "capture_programs", watched)
    return seen


def dump(program: Program) -> list[str]:
    """All that there is to say of a program but where its tensors are."""
    nodes = [
        (n.op, str(n.target), str(n.args), str(n.kwargs), str(n.meta.get("val")), str(n.meta.get("nn_module_stack")))
        for n in program.graph.nodes
    ]
    constants = [
        (name, c.tensor.tolist(), c.parameter, c.requires_grad, c.persistent, c.aliases)
        for name, c in program.constants.items()
    ]
    rest = (program.in_spec, program.out_spec, program.names, program.notes, program.guards)
    return [*map(str, nodes), *map(str, constants), str((*rest, program.training))]


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def test_a_shared_program_is_the_one_that_a_capture_makes() -> None:
    model = model_of(Block)
    with sharing.share_captures():
        shared = [next(sharing.shared_captures(b, (X,), None, "all")) for b in model.blocks]
    for program, block in zip(shared, model.blocks, strict=True):
        assert dump(program) == dump(next(capture_programs(block, (X,), None, "all")))
        own = {tensor.data_ptr() for tensor in block.parameters()}
        assert {c.tensor.data_ptr() for c in program.constants.values()} <= own


def test_what_is_asked_for_after_the_shared_programs_is_captured() -> None:
    """The first block was captured with all sizes dynamic; of the second, fewer are asked for."""
    model = model_of(lambda k: Block())
    with sharing.share_captures():
        next(sharing.shared_captures(model.blocks[0], (X,), None, "all"))
        several = [*sharing.shared_captures(model.blocks[1], (X,), None, "all")]
    expected = [*capture_programs(model.blocks[1], (X,), None, "all")]
    assert len(several) > 1 and [*map(dump, several)] == [*map(dump, expected)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["graph", "class"])
def test_parts_with_a_shared_capture_are_as_without(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = model_of(Block), counted(monkeypatch)
    slim: Any = demask.demask(model, (X,), modules="auto", result=form)
    assert len(seen) == (2 if form == "graph" else 4), "one more, to watch what is read"
    monkeypatch.setattr(partial, "share_captures", contextlib.nullcontext)
    alone: Any = demask.demask(model, (X,), modules="auto", result=form)
    assert len(seen) >= 6
    assert slim.demasked.to_dict() == alone.demasked.to_dict()
    state, other = slim.state_dict(), alone.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)
    for one, two in zip(slim.blocks, alone.blocks, strict=True):
        assert type(one).__name__ == type(two).__name__
        assert getattr(one, "code", "") == getattr(two, "code", "")
    assert torch.equal(slim(X), alone(X))
    torch.testing.assert_close(slim(X), model(X))
    assert slim.demasked.after.parameters < slim.demasked.before.parameters


def closure(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * F.relu(x)


def with_factor(k: int) -> Block:
    block = Block()
    block.factor = 1.0 + k
    return block


def with_hook(k: int) -> Block:
    block = Block()
    if k % 2:
        block.a.register_forward_hook(lambda module, inputs, output: output + 1)
    return block


def with_forward(k: int) -> Block:
    block = Block()
    if k % 2:
        block.forward = lambda x: 3 * x + block.b(F.relu(block.a(x)))  # type: ignore[method-assign]
    return block


def tied(k: int) -> Block:
    block = Block()
    block.c = nn.Linear(6, 10)  # type: ignore[assignment]
    if k == 1:
        block.c.weight = block.a.weight  # type: ignore[assignment,union-attr]
    if k == 2:
        block.c.weight = nn.Parameter(block.a.weight.data)  # type: ignore[assignment,union-attr]
    return block


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


LOOK_EQUAL: dict[str, Callable[[int], nn.Module]] = {
    "an integer that is read": Odd,
    "an integer in a buffer": lambda k: Numbered(k % 2),
    "a float": with_factor,
    "an activation, a function": lambda k: Block(0, [F.relu, torch.tanh][k % 2]),
    "an activation, a module": lambda k: Block(0, [nn.ReLU(), Tanh()][k % 2]),
    "a closure": lambda k: Block(0, closure(1.0 + k)),
    "a partial function": lambda k: Block(0, functools.partial(F.leaky_relu, negative_slope=0.1 * k)),
    "a hook": with_hook,
    "forward of the instance": with_forward,
    "an array, and a tensor that is no buffer": Tabled,
    "an object": lambda k: Configured(0, 1.0 + k),
}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:the hooks of")
@pytest.mark.parametrize("kind", LOOK_EQUAL)
def test_blocks_that_look_equal_share_nothing(kind: str) -> None:
    """Without the check of the result, which would find out."""
    model = model_of(LOOK_EQUAL[kind])
    slim: Any = demask.demask(model, (X,), modules=["blocks.*"], check=False, result="graph")
    torch.testing.assert_close(slim(X), model(X))
    other = 5 * X.flip(0)
    torch.testing.assert_close(slim(other), model(other))


SHARE: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "equal": (lambda k: Block(), 1),
    "a number that is not read": (Block, 2),
    "a closure over equal numbers": (lambda k: Block(0, closure(2.0)), 1),
    "equal objects": (lambda k: Configured(0, 2.0), 1),
    "parametrized": (lambda k: doubled(Block()), 1),
    "a tensor that the code makes": (lambda k: Literal(), 4),
}


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled(block: Block) -> Block:
    parametrize.register_parametrization(block.b, "weight", Double())
    return block


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHARE)
def test_blocks_that_are_equal_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count = SHARE[kind]
    model, seen = model_of(make), counted(monkeypatch)
    slim: Any = demask.demask(model, (X,), modules=["blocks.*"], check=False, result="graph")
    assert len(seen) == count
    torch.testing.assert_close(slim(X), model(X))


def test_shapes_of_inputs_and_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, blocks = counted(monkeypatch), [Block(), Block(), Block()]
    blocks[1].b = nn.Linear(10, 6, bias=False)
    calls = [
        (blocks[0], X),
        (blocks[0], X.double()),
        (blocks[0], X.T.contiguous().T),
        (blocks[0], X[:2]),
        (blocks[1], X),
        (blocks[2].double(), X.double()),
        (Block().eval(), X),
        (Block().requires_grad_(False), X),
    ]
    with sharing.share_captures():
        for block, x in calls:
            with contextlib.suppress(demask.DemaskError):
                next(sharing.shared_captures(block, (x,), None, None))
    assert len(seen) == len(calls)


def test_dynamic_sizes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    with sharing.share_captures():
        for shapes in (None, "all", None, {"x": {1: torch.export.Dim.AUTO}}):
            with contextlib.suppress(demask.DemaskError):
                next(sharing.shared_captures(Block().eval(), (X,), None, shapes))
    assert len(seen) == 3


def test_ties_count() -> None:
    """A weight that two layers have, or two weights in the same memory."""
    parts = [sharing.Anatomy.of(tied(k), ()).parts for k in (0, 1, 2, 0, 1, 2)]
    assert parts[:3] == parts[3:]
    assert all(parts[a] != parts[b] for a, b in ((0, 1), (0, 2), (1, 2)))


def test_the_model_is_as_it_was() -> None:
    model = model_of(Block)
    before = [type(module) for module in model.modules()]
    demask.demask(model, (X,), modules="auto")
    assert [type(module) for module in model.modules()] == before
    assert [getattr(block, "index", None) for block in model.blocks] == [0, 1, 2, 3]
