"""Gates: the chosen rows are updated as they would be; the others, and their state, stay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from demask.errors import BadInput
from demask.pilot.gate import Gate, _GatedConv, _GatedLinear


class Net(nn.Module):
    """Convolutions of several kinds, norms, linear layers, one that does not train."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(10)
        self.b = nn.Conv2d(10, 12, (3, 1), stride=2, padding=(2, 0), dilation=(2, 1), bias=False)
        self.groups = nn.Conv2d(12, 12, 3, padding="same", groups=4)
        self.same = nn.Conv2d(12, 9, 3, padding="same")
        self.mirror = nn.Conv2d(9, 6, 3, padding=1, padding_mode="reflect")
        self.line = nn.Conv1d(6, 8, 3, padding=1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.groups(self.b(F.relu(self.norm(self.a(x)))))
        x = self.line(F.relu(self.mirror(self.same(x))).flatten(2))
        return self.head(self.frozen(F.relu(x).mean(2)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


def gated(net, fraction=0.4, **knobs):
    draw = torch.Generator().manual_seed(1)
    layers = Gate(net, fraction=1.0, by="magnitude").layers
    told = {layer.name: torch.rand(layer.units, generator=draw) for layer in layers}
    return Gate(net, told, fraction=fraction, **knobs)


def rows_of(gate):
    return {
        f"{layer.name}.{kind}": gate.rows[layer.name]
        for layer in gate.layers
        for kind in ("weight", "bias")
        if getattr(layer, kind) is not None
    }


def loss(net, x):
    return net(x).square().sum()


def test_gradients_of_chosen_rows_are_those_of_the_network(net):
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64, requires_grad=True)
    loss(net, x).backward()
    expected = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    for_x, x.grad = x.grad, None
    net.zero_grad()
    gate = gated(net)
    rows = rows_of(gate)
    assert set(gate.rows) == {"a", "b", "groups", "same", "mirror", "line", "head"}
    with gate:
        loss(net, x).backward()
    assert torch.allclose(x.grad, for_x)
    for name, grad in expected.items():
        found = net.get_parameter(name).grad
        if name not in rows:
            assert torch.allclose(found, grad), name
            continue
        assert torch.allclose(found[rows[name]], grad[rows[name]], rtol=1e-10), name
        others = torch.ones(len(grad), dtype=torch.bool)
        others[rows[name]] = False
        narrow = name.split(".")[0] not in ("groups", "same")  # these compute all
        assert bool((found[others] == 0).all()) == narrow, name


def test_only_chosen_rows_are_multiplied(net, monkeypatch):
    seen = []
    for kind in (_GatedLinear, _GatedConv):
        monkeypatch.setattr(kind, "apply", lambda *given, real=kind.apply: seen.append(given[3]) or real(*given))
    gate = gated(net)
    with gate:
        loss(net, torch.randn(1, 3, 8, 8, dtype=torch.float64))
    chosen = [gate.rows[name] for name in ("a", "b", "mirror", "line", "head")]
    assert all(torch.equal(a, b) for a, b in zip(seen, chosen, strict=True))
    with gate, torch.no_grad():
        net(torch.randn(1, 3, 8, 8, dtype=torch.float64))
    assert len(seen) == 5  # without gradients nothing is gated
    loss(net, torch.randn(1, 3, 8, 8, dtype=torch.float64))
    assert len(seen) == 5  # nor outside


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: optim.Adam(p, 0.1, weight_decay=0.1),
    "amsgrad": lambda p: optim.AdamW(p, 0.1, amsgrad=True, foreach=False),
    "foreach": lambda p: optim.AdamW(p, 0.1, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.1),
    "asgd": lambda p: optim.ASGD(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rest", [True, False])
def test_chosen_rows_move_as_ever_and_the_others_stay(net, name, rest):
    plain, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    gate = gated(net, rest=rest)
    rows = rows_of(gate)
    mine, theirs = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](plain.parameters())
    for _ in range(3):
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        # The plain network takes the same gradients from the same place, in all rows.
        plain.load_state_dict(net.state_dict())
        mine.zero_grad()
        theirs.zero_grad()
        loss(plain, x).backward()
        net.load_state_dict({**net.state_dict(), **dict(net.named_buffers())})
        with gate:
            loss(net, x).backward()
        theirs.step()
        gate.step(mine)
        for n, p in net.named_parameters():
            twin = plain.get_parameter(n)
            if not p.requires_grad or (n not in rows and not rest):
                assert torch.equal(p, before[n]), n
            elif n not in rows:
                assert torch.allclose(p, twin), n
            else:
                others = torch.ones(len(p), dtype=torch.bool)
                others[rows[n]] = False
                assert torch.allclose(p[rows[n]], twin[rows[n]], rtol=1e-6), n
                assert not torch.equal(p[rows[n]], before[n][rows[n]]), n
                assert torch.equal(p[others], before[n][others]), n
                _check_state(mine.state[p], theirs.state[twin], p.shape, rows[n], others)


def _check_state(state, twin, shape, rows, others):
    assert state.keys() == twin.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == shape:
            assert torch.allclose(value[rows], twin[key][rows]), key
            assert (value[others] == 0).all() or key == "ax", key


def test_state_of_rows_that_rest_is_kept(net):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    gate = Gate(net, fraction=0.5, by="random", every=1)
    optimizer = optim.Adam(net.parameters())
    for _ in range(4):
        rows = gate.rows["head"]
        others = torch.ones(5, dtype=torch.bool)
        others[rows] = False
        kept = {k: v.clone() for k, v in optimizer.state.get(net.head.weight, {}).items()}
        optimizer.zero_grad()
        with gate:
            loss(net, x).backward()
        gate.step(optimizer)
        state = optimizer.state[net.head.weight]
        assert state["exp_avg"].shape == (5, 8)
        for key in ("exp_avg", "exp_avg_sq") if kept else ():
            assert torch.equal(state[key][others], kept[key][others])
            assert not torch.equal(state[key][rows], kept[key][rows])
    assert gate.steps == 4


def test_every_step_counts_what_it_updated(net):
    gate = gated(net, rest=False)
    optimizer, x = optim.SGD(net.parameters(), 0.1), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        with gate:
            loss(net, x).backward()
        before = gate.updated
        values = {n: p.detach().clone() for n, p in net.named_parameters()}
        gate.step(optimizer)
        moved = sum(int((p != values[n]).sum()) for n, p in net.named_parameters())
        assert (
            gate.updated - before
            == sum(len(rows) * net.get_parameter(n)[0].numel() for n, rows in rows_of(gate).items())
            >= moved
        )


def test_priorities_may_come_from_a_function_again_and_again(net):
    asked = []

    def told():
        asked.append(1)
        return {
            layer.name: torch.arange(layer.units) * (-1.0) ** len(asked)
            for layer in Gate(net, fraction=1, by="random").layers
        }

    gate = Gate(net, told, fraction=0.5, every=2)
    optimizer, seen = optim.SGD(net.parameters(), 0.0), [gate.rows["head"].tolist()]
    for _ in range(4):
        gate.step(optimizer)
        seen.append(gate.rows["head"].tolist())
    assert seen == [[0, 1, 2], [0, 1, 2], [2, 3, 4], [2, 3, 4], [0, 1, 2]]


def test_magnitude_and_chance_choose_by_themselves(net):
    gate = Gate(net, fraction=0.3, by="magnitude")
    norms = net.a.weight.detach().flatten(1).norm(dim=1)
    assert set(gate.rows["a"].tolist()) == set(norms.topk(3).indices.tolist())
    draws = [Gate(net, fraction=0.3, by="random", seed=s).rows["a"].tolist() for s in (0, 0, 1, 2)]
    assert draws[0] == draws[1] and len({tuple(d) for d in draws}) > 1


def test_execution_data_is_taken_as_priorities(net):
    data = pytest.importorskip("demask.pilot.data.execution_data")
    layers = Gate(net, fraction=1, by="random").layers
    found = {layer.name: torch.arange(2.0 * layer.units).view(2, -1) for layer in layers}
    gate = Gate(net, data.ExecutionData("channel", found, "two inputs"), fraction=0.2)
    assert gate.rows["head"].tolist() == [4]


@pytest.mark.parametrize(
    ("given", "knobs", "words"),
    [
        (None, {"fraction": 0.5}, "priorities"),
        ({"a": [1.0]}, {"fraction": 0.5, "by": "random"}, "priorities"),
        (None, {"fraction": 0, "by": "random"}, "fraction"),
        (None, {"fraction": 0.5, "by": "chance"}, "one of pilot"),
        (None, {"fraction": 0.5, "by": "random", "every": 0}, "every"),
        ({"b": [1.0]}, {"fraction": 0.5}, "layer 'a'"),
        ({"a": [1.0]}, {"fraction": 0.5}, "10 finite"),
        ({"a": [float("nan")] * 10}, {"fraction": 0.5}, "10 finite"),
    ],
)
def test_other_gates_are_refused(net, given, knobs, words):
    with pytest.raises(BadInput, match=words):
        Gate(net, given, **knobs)


def test_models_and_optimizers_that_do_not_fit_are_refused(net):
    with pytest.raises(BadInput, match="no linear layer"):
        Gate(nn.BatchNorm1d(3), fraction=0.5, by="random")
    with pytest.raises(BadInput, match="LBFGS"):
        gated(net).step(optim.LBFGS(net.parameters()))


def test_a_failing_step_leaves_everything_whole(net):
    gate, optimizer = gated(net), optim.SGD(net.parameters(), 0.1)
    with gate:
        loss(net, torch.randn(1, 3, 8, 8, dtype=torch.float64)).backward()
    shapes = {n: p.shape for n, p in net.named_parameters()}

    def fail(*_):
        raise RuntimeError("planted")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        gate.step(optimizer)
    for n, p in net.named_parameters():
        assert p.shape == shapes[n] and (p.grad is None or p.grad.shape == shapes[n])
