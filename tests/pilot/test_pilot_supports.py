"""Run-time indices: a network on an index equals the network with all else set to its fill.

    indexed(analysis, picks)(x, index) == masked(analysis, picks)(x, index)

`emit_masked` is held against masks by hand, in plain torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.known import key_of
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE
from demask.ops.laws import LawModule, law_cases, relative_error, target_of
from demask.pilot.conditions.channel_conditions import Skip
from demask.shrink import runtime_index as planning
from demask.shrink.build_uncut import build_uncut
from demask.shrink.layout.cells import RunTimeIndex
from demask.shrink.pipeline import canonicalize, capture_program
from demask.shrink.runtime_index import IndexedSupport, add_inputs, emit_indexed, emit_masked

CASES = list(law_cases(TABLE))
SAMPLE = random.Random(0).sample(CASES, 5)
FILLS = ("zero", "constant", "vector")


class Branched(nn.Module):
    """Convolutions with strides, groups and padding, norms, a residual sum, a linear layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.b = nn.Conv2d(6, 10, 3, padding=1, stride=2)
        self.own = nn.Conv2d(10, 10, 3, padding=1, groups=10)
        self.c = nn.Conv2d(10, 10, 1)
        self.end = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.b(torch.relu(self.norm(self.a(x)))))
        z = y + self.c(torch.relu(self.own(y)))
        return self.end(torch.relu(z).mean((2, 3)))


class Heads(nn.Module):
    """Self-attention whose projections are linear layers, and a gated block behind it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = x + self.o(y)
        return y + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class Network:
    """A network, its input, and which values are picked: by name of the call, and axis."""

    made: type[nn.Module]
    shape: tuple[int, ...]
    places: tuple[tuple[str, int], ...]

    def program(self, seed: int, *, whole: bool) -> tuple[Program, Tensor]:
        torch.manual_seed(seed)
        model = self.made().double().eval()
        x = torch.randn(self.shape, dtype=torch.float64)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_() if not whole else None
                module.running_var.uniform_(0.5, 2) if not whole else None
        with torch.no_grad():
            for p in model.parameters() if whole else ():
                p.copy_(torch.randint(-2, 3, p.shape).double())
        return canonicalize(capture_program(model, (x,), None, None), TABLE), x


NETWORKS = (
    Network(Branched, (2, 3, 9, 9), (("relu", 1), ("silu", 1), ("conv2d_3", 1))),
    Network(Branched, (2, 3, 8, 9), (("conv2d_1", 1), ("relu_1", 1), ("mean", 1))),
    Network(Heads, (2, 7, 12), (("scaled_dot_product_attention", 1), ("mul", 2))),
    Network(Heads, (2, 7, 12), (("scaled_dot_product_attention", 1), ("silu", 2))),
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@dataclass
class Built:
    """Both programs of a law as modules, and the sizes of their indices."""

    small: Demasked
    whole: Demasked
    sizes: list[int]
    effects: list[str] = field(default_factory=list)

    def indices(self, share: float, seed: int) -> list[Tensor]:
        chance = torch.Generator().manual_seed(seed)
        return [torch.randperm(n, generator=chance)[: max(1, int(n * share))] for n in self.sizes]


def fill_of(kind: str, value: Tensor, axis: int, seed: int) -> Tensor:
    rank = value.ndim
    chance = torch.Generator().manual_seed(seed)
    shape = [value.shape[k] if k == axis and kind == "vector" else 1 for k in range(rank)]
    drawn = torch.randint(1, 4, shape, generator=chance).double()
    return drawn * (kind != "zero")


def built(program: Program, places: list[tuple[fx.Node, int]], kinds: list[str]) -> Built:
    sizes = [node.meta["val"].shape[axis] for node, axis in places]
    wide, inputs, mapping = add_inputs(program, {f"index_{k}": n for k, n in enumerate(sizes)})
    picks = {}
    for k, (node, axis) in enumerate(places):
        fill = fill_of(kinds[k], node.meta["val"], axis, k)
        picks[key_of(mapping[node])] = IndexedSupport(axis, RunTimeIndex(inputs[f"index_{k}"], sizes[k]), fill)
    analysis = Analysis(wide, TABLE)
    small, whole = emit_indexed(analysis, picks), emit_masked(analysis, picks)
    marks = [n.meta["effect"] for n in small.graph.nodes if "effect" in n.meta]
    return Built(build_uncut(analysis, small, ()), build_uncut(analysis, whole, ()), sizes, marks)


def by_name(program: Program, places: tuple[tuple[str, int], ...]) -> list[tuple[fx.Node, int]]:
    nodes = {node.name: node for node in program.graph.nodes}
    return [(nodes[name], axis) for name, axis in places]


@pytest.mark.nightly
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: f"{n.made.__name__}-{n.places[0][0]}")
def test_networks_on_an_index_equal_masked_ones(network: Network, fill: str):
    check_network(network, fill)


@pytest.mark.parametrize(("number", "fill"), [(0, "vector"), (2, "zero")])
def test_a_network_on_an_index_equals_the_masked_one(number: int, fill: str):
    check_network(NETWORKS[number], fill)


def check_network(network: Network, fill: str) -> None:
    program, _ = network.program(0, whole=False)
    places = by_name(program, network.places)
    made = built(program, places, [fill] * len(places))
    for batch, share in ((1, 1.0), (2, 0.5), (5, 0.01)):  # k changes between calls
        x = torch.randn((batch, *network.shape[1:]), dtype=torch.float64)
        index = made.indices(share, batch)
        assert relative_error([made.whole(x, *index)], [made.small(x, *index)]) <= 1e-12


@pytest.mark.parametrize("fill", FILLS)
def test_whole_numbers_are_equal_bit_for_bit(fill: str):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1, stride=2)
            self.c = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.b(torch.relu(self.a(x))))
            return (y + self.c(y)).sum((2, 3))

    network = Network(Net, (2, 3, 7, 7), (("relu", 1), ("relu_1", 1), ("conv2d_2", 1)))
    program, _ = network.program(1, whole=True)
    made = built(program, by_name(program, network.places), [fill] * 3)
    x = torch.randint(-3, 4, (3, 3, 7, 7)).double()
    for share in (1.0, 0.4):
        index = made.indices(share, 3)
        assert torch.equal(made.small(x, *index), made.whole(x, *index))


def test_masked_is_the_mask_by_hand():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    program = canonicalize(capture_program(net, (x,), None, None), TABLE)
    made = built(program, by_name(program, (("relu", 1),)), ["vector"])
    index = torch.tensor([4, 1])
    hidden = fill_of("vector", torch.empty(5, 6), 1, 0).expand(5, 6).clone()
    hidden[:, index] = torch.relu(net[0](x))[:, index]
    assert torch.allclose(made.whole(x, index), net[2](hidden), rtol=1e-12)
    assert torch.allclose(made.small(x, index), net[2](hidden), rtol=1e-12)
    assert made.small.graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy.default) == []


def test_work_is_left_out():
    """Convolutions get the channels of the index alone, on both sides."""
    program, x = NETWORKS[0].program(0, whole=False)
    made = built(program, by_name(program, NETWORKS[0].places), ["zero"] * 3)
    seen: list[tuple[int, ...]] = []

    class Watch(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.ops.aten.conv2d.default:
                seen.append(tuple(args[1].shape[:2]))
            return super().call_function(target, args, kwargs)

    Watch(made.small).boxed_run([x, *(torch.arange(n)[:3] for n in made.sizes)])
    assert seen == [(3, 3), (3, 3), (3, 1), (3, 3)]


@pytest.mark.parametrize(("name", "number", "case"), SAMPLE, ids=[f"{n}-{k}" for n, k, _ in SAMPLE])
def test_ops_on_an_index(name: str, number: int, case):
    check_op(name, number, case, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "number", "case"), CASES, ids=[f"{n}-{k}" for n, k, _ in CASES])
def test_every_op_on_an_index(name: str, number: int, case):
    check_op(name, number, case, 0)
    check_op(name, number, case, 1)


def check_op(name: str, number: int, case, seed: int) -> None:
    """Any two values of an op's law module picked along any axes."""
    chance = random.Random(f"{name} {number} {seed}")
    module = LawModule(target_of(name), case, seed)
    program = canonicalize(capture_program(module, module.inputs(0), None, None), TABLE)
    places = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        fits = node.op == "call_function" and isinstance(value, Tensor)
        for axis, size in enumerate(value.shape if fits and value.is_floating_point() else ()):
            if isinstance(size, int) and size > 1:
                places.setdefault(node, []).append(axis)
    if not places:
        pytest.skip("nothing here has an axis of a fixed size")
    nodes = chance.sample(list(places), min(2, len(places)))
    chosen = [(node, chance.choice(places[node])) for node in nodes]
    made = built(program, chosen, [chance.choice(FILLS) for _ in chosen])
    for share in (1.0, 0.5, 0.01):
        x, index = module.inputs(3), made.indices(share, seed)
        assert relative_error(made.whole(*x, *index), made.small(*x, *index)) <= 1e-10


def test_the_law_finds_a_wrong_letter(monkeypatch: pytest.MonkeyPatch):
    """A fault planted: windows count as carried, so positions next to them are forgotten."""
    right = planning.pointwise_letters
    monkeypatch.setattr(planning, "pointwise_letters", lambda r: right(r) | (r.window & r.letters(r.outs[0])))
    net = nn.Sequential(nn.ReLU(), nn.AvgPool1d(3, 1, 1), nn.ReLU()).double()
    x = torch.randn(2, 4, 9, dtype=torch.float64)
    program = canonicalize(capture_program(net, (x,), None, None), TABLE)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        made = built(program, by_name(program, (("relu_1", 2),)), ["zero"])
        index = made.indices(0.4, 0)
        assert relative_error([made.whole(x, *index)], [made.small(x, *index)]) <= 1e-12


def test_the_law_finds_a_forgotten_fill(monkeypatch: pytest.MonkeyPatch):
    """A fault planted: what a constant leaves to a contraction is dropped."""
    monkeypatch.setattr(planning, "_is_rest_known", lambda *_: True)
    program, x = NETWORKS[0].program(0, whole=False)
    made = built(program, by_name(program, NETWORKS[0].places), ["constant"] * 3)
    index = made.indices(0.5, 0)
    assert relative_error([made.whole(x, *index)], [made.small(x, *index)]) > 1e-3


def test_an_input_is_not_picked():
    program, _ = NETWORKS[2].program(0, whole=False)
    wide, inputs, mapping = add_inputs(program, {"index": 12})
    first = next(n for n in program.graph.nodes if n.op == "placeholder")
    pick = IndexedSupport(2, RunTimeIndex(inputs["index"], 12), torch.zeros(1, 1, 1))
    with pytest.raises(BadInput, match="output of a call"):
        emit_indexed(Analysis(wide, TABLE), {(mapping[first], 0): pick})
    with pytest.raises(BadInput, match="at least 2 positions"):
        add_inputs(program, {"index": 1})


def test_a_threshold_of_0_is_one() -> None:
    assert Skip(threshold=0).threshold == 0
    with pytest.raises(BadInput, match="threshold of 0 or more"):
        Skip(threshold=-1e-9)
