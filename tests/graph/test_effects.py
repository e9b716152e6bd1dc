"""What a call does besides returning: writes, random numbers, state in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import demask
from demask.cli.read_network import read_network


class Layers(nn.Module):
    """Two layers, half of whose hidden units are dead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        with torch.no_grad():
            self.a.weight[:4] = 0
            self.a.bias[:2] = 0

    def layers(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


class WritesFirst(Layers):
    def forward(self, x):
        x.mul_(2)
        return self.layers(x)


class WritesSlice(Layers):
    def forward(self, x):
        x[:, 0] = 0
        return self.layers(x)


class WritesResult(Layers):
    def forward(self, x):
        y = self.layers(x)
        x.add_(y)
        return y, x[:, :2]


class WritesView(Layers):
    def forward(self, x):
        x.view(-1)[:3].zero_()
        return self.layers(x)


class Swaps(Layers):
    def forward(self, x, z):
        z.copy_(x)
        x.zero_()
        return self.layers(z)


class DrawsDead(Layers):
    """Numbers that nobody reads, then as many as there are hidden units."""

    def forward(self, x):
        torch.rand(3)
        h = F.relu(self.a(x))
        return self.b(h * (1 + 0 * torch.randn_like(h)) + torch.randn_like(h))


WRITERS = (WritesFirst, WritesSlice, WritesResult, WritesView, Swaps)


def inputs_of(kind: type[nn.Module], step: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(step + 1)
    return tuple(torch.randn(3, 6) for _ in range(2 if kind is Swaps else 1))


def run(network: nn.Module, args: tuple[Tensor, ...]) -> list[Any]:
    """Outputs, inputs after the call, and the next random number."""
    copies = [arg.clone() for arg in args]
    torch.manual_seed(5)
    with torch.no_grad():
        outputs = torch.utils._pytree.tree_leaves(network(*copies))
    return [*outputs, *copies, torch.rand(1)]


def assert_same(network: nn.Module, other: nn.Module, kind: type[nn.Module]) -> None:
    for step in range(3):
        args = inputs_of(kind, step)
        for x, y in zip(run(network, args), run(other, args), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("result", ["auto", "graph"])
def test_writes_to_inputs_are_done_by_results_and_their_files(
    kind: type[nn.Module], result: str, tmp_path: Path
) -> None:
    net, args = kind().eval(), inputs_of(kind)
    before = [arg.clone() for arg in args]
    slim = demask.demask(net, args, result=result)
    assert all(map(torch.equal, args, before))
    assert len(slim.a.weight) == 4
    assert_same(net, slim, kind)
    assert demask.verify(net, slim, args).ok
    if result == "graph":
        demask.save(slim, tmp_path / "net.demask")
        assert_same(net, demask.load(tmp_path / "net.demask"), kind)
        demask.to_pt2(slim, tmp_path / "net.pt2")
        assert_same(net, torch.export.load(tmp_path / "net.pt2").module(), kind)
        assert_same(net, demask.demask(slim, args, result="graph"), kind)


@pytest.mark.parametrize("call", [demask.optimize, demask.traverse.tile, demask.stride.lower])
def test_where_a_write_is_not_done_it_is_refused_by_name(call: Any) -> None:
    net, args = WritesSlice().eval(), inputs_of(WritesSlice)
    with pytest.raises(demask.NotExportable, match=r"input x is changed by forward.*fill_") as e:
        call(net, args)
    assert "x = x.clone()" in e.value.advice and "WritesSlice" in e.value.where


def test_onnx_files_do_not_write_to_inputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    net, args = WritesSlice().eval(), inputs_of(WritesSlice)
    for network in (net, demask.demask(net, args, result="graph")):
        with pytest.raises(demask.NotExportable, match="input x is changed by forward"):
            demask.to_onnx(network, tmp_path / "net.onnx", args)
    assert not list(tmp_path.iterdir())


class WritesInside(Layers):
    """Writes to a value of its own: nobody else sees it."""

    def forward(self, x):
        y = self.a(x)
        y[:, 0] = 3
        y.clamp_(min=0)
        return self.b(y)


def test_writes_inside_are_in_files_of_networks_as_they_are(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    net, (x,) = WritesInside().eval(), inputs_of(WritesInside)
    demask.to_onnx(net, tmp_path / "net.onnx", (x,))
    session = ort.InferenceSession(tmp_path / "net.onnx")
    y = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(y), net(x).detach(), atol=1e-5, rtol=1e-5)
    program = torch.export.export(net, (x,))
    torch.export.save(program, tmp_path / "net.pt2")
    read = read_network(tmp_path / "net.pt2")
    slim = demask.demask(read.model, read.args)
    torch.testing.assert_close(slim(x), net(x), atol=1e-5, rtol=1e-5)


def test_a_file_writes_to_nothing_but_inputs(tmp_path: Path) -> None:
    from demask.files.archive import _add_nodes

    rows = [
        {"op": "placeholder", "name": "x", "target": "x", "args": [], "kwargs": {}},
        {"op": "get_attr", "name": "w", "target": "w", "args": [], "kwargs": {}},
        {
            "op": "call_function",
            "name": "c",
            "target": "aten.copy_.default",
            "args": [{"node": "w"}, {"node": "x"}],
            "kwargs": {},
        },
    ]
    module = nn.Module()
    module.register_buffer("w", torch.ones(2))
    with pytest.raises(demask.RefusedFile, match="expected an input"):
        _add_nodes(torch.fx.Graph(), rows, module)


@pytest.mark.parametrize("result", ["auto", "graph"])
def test_as_many_random_numbers_are_drawn(result: str) -> None:
    net, args = DrawsDead().eval(), inputs_of(DrawsDead)
    assert_same(net, demask.demask(net, args, result=result), DrawsDead)


def test_verify_compares_inputs_after_the_call() -> None:
    class Doubles(Layers):
        def forward(self, x):
            return self.layers(x * 2)

    writes, doubles = WritesFirst().eval(), Doubles().eval()
    result = demask.verify(writes, doubles, inputs_of(WritesFirst), check=False)
    assert not result.ok and "input" in result.failure and "after the call" in result.failure


def test_verify_compares_buffers_after_the_call() -> None:
    class Counts(Layers):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n += self.step
            return self.layers(x)

    counted = Counts(1).eval()
    demask.demask(counted, inputs_of(WritesFirst), modules=["a"])
    assert counted.n == 0
    one, two, args = Counts(1).eval(), Counts(2).eval(), inputs_of(WritesFirst)
    assert demask.verify(one, one, args).ok
    result = demask.verify(one, two, args, check=False)
    assert not result.ok and "buffer n after the call" in result.failure
    assert one.n == two.n == 0
    with pytest.raises(demask.NotExportable, match="n is changed by forward"):
        demask.demask(one, args)


# --- state in Python ------------------------------------------------------------------------------


class Neuron(nn.Module):
    """Integrates its inputs and fires."""

    def __init__(self) -> None:
        super().__init__()
        self.membrane: Any = 0.0

    def forward(self, x):
        u = self.membrane * 0.5 + x
        fired = (u >= 1).to(x)
        self.membrane = u * (1 - fired)
        return fired


class Below(Neuron):
    """Its threshold is far: the first calls do not show that it has a state."""

    def forward(self, x):
        u = self.membrane * 0.9 + x * 0.1
        self.membrane = u
        return (u >= 2).to(x)


class Counter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0

    def forward(self, x):
        self.k += 1
        return self.layers(x) * self.k


class History(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []

    def forward(self, x):
        y = self.layers(x) + sum(self.rows)
        self.rows.append(y.detach())
        return y


class FirstInput(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.detach().abs().mean()
        return self.layers(x / self.scale)


class Config:
    calls = 0


class InObject(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x):
        self.config.calls = self.config.calls + 1
        return self.layers(x) - self.config.calls


class Recorder(Layers):
    """Attributes that calls set and none reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        h = F.relu(self.a(x))
        self.hidden, self.calls = h, self.calls + 1
        return self.b(h)


class Cached(Layers):
    """A table that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x):
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.arange(x.shape[1]).to(x)
        return self.layers(x + self.table)


def spiking(kind: type[nn.Module]) -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), kind(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        net[0].weight *= 3
        net[0].weight[:3] = 0
    return net


STATEFUL = {
    "neuron": (lambda: spiking(Neuron), "1.membrane"),
    "below": (lambda: spiking(Below), "membrane"),
    "counter": (Counter, "k"),
    "history": (History, "rows"),
    "first input": (FirstInput, "scale"),
    "object": (InObject, "config"),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_modules_that_keep_state_stay_themselves(name: str) -> None:
    build, attribute = STATEFUL[name]
    torch.manual_seed(0)
    net, x = build().eval(), torch.randn(4, 6)
    slim = demask.demask(net, (x,))
    assert type(slim) is type(net)
    assert "state" in slim.demasked.notes[0]
    assert attribute in slim.demasked.notes[0]
    with torch.no_grad():
        for step in range(5):
            call = x * (1 + step / 2)
            torch.testing.assert_close(slim(call), net(call), atol=1e-5, rtol=1e-5)
    fresh = build().eval()
    for wrong in (
        lambda: demask.demask(fresh, (x,), result="graph"),
        lambda: demask.optimize(fresh, (x,), cache=False),
    ):
        with pytest.raises(demask.NotExportable, match="Python attributes are a state"):
            wrong()


@pytest.mark.parametrize("kind", [Recorder, Cached])
def test_attributes_that_no_call_reads_are_no_state(kind: type[nn.Module]) -> None:
    net, args = kind().eval(), inputs_of(kind)
    slim = demask.demask(net, args, result="graph")
    assert any("a call of the model sets" in note for note in slim.demasked.notes)
    assert_same(net, slim, kind)
    own = demask.demask(kind().eval(), args)
    assert type(own) is kind and own.a.out_features == 4


@pytest.mark.parametrize("kind", ["gru", "prune"])
def test_what_a_call_sets_to_equal_values_is_no_note(kind: str) -> None:
    """torch.export sets weights of recurrent layers, hooks of torch.nn.utils.prune masked ones."""
    net: Any = nn.GRU(4, 6) if kind == "gru" else nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if kind == "prune":
        prune.ln_structured(net[0], "weight", 3, 2, 0)
    slim = demask.demask(net.eval(), (torch.randn(3, 4),))
    assert not any("a call of the model sets" in note for note in slim.demasked.notes)


def test_demask_leaves_the_state_of_a_network_alone() -> None:
    torch.manual_seed(0)
    net, x = spiking(Neuron), torch.randn(4, 6)
    slim = demask.demask(net, (x,))
    assert net[1].membrane == slim[1].membrane == 0.0
    parts = demask.demask(net, (x,), modules=["0"])
    assert net[1].membrane == parts[1].membrane == 0.0


def test_what_is_dead_around_a_state_goes_if_its_state_never_changes() -> None:
    torch.manual_seed(0)
    net, x = spiking(Neuron), torch.randn(4, 6)
    net[0].bias.data[:3] = 0
    assert demask.demask(net, (x,))[0].out_features == 5
    net[0].bias.data[0] = 0.4  # the membrane of this unit rises until it fires
    slim = demask.demask(net, (x,))
    with torch.no_grad():
        for _ in range(12):
            torch.testing.assert_close(slim(x), net(x), atol=1e-5, rtol=1e-5)
    assert net[1].membrane.shape == (4, 8)


class Lateral(Neuron):
    """Its units inhibit each other: none of them has a state of its own."""

    def forward(self, x):
        u = self.membrane + x
        fired = (u >= 1).to(x)
        self.membrane = u * (1 - fired) - 0.1 * fired.sum(1, keepdim=True)
        return fired


def test_a_state_that_reads_other_units_stays() -> None:
    torch.manual_seed(0)
    net, x = spiking(Lateral), torch.randn(4, 6)
    net[0].bias.data[:3] = 0
    slim = demask.demask(net, (x,))
    with torch.no_grad():
        for step in range(12):
            torch.testing.assert_close(slim(x + step), net(x + step), atol=1e-5, rtol=1e-5)
