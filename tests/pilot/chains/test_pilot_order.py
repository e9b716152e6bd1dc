"""Order: units by importance, until the deadline; the others keep the pilot's value."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from demask.errors import BadInput
from demask.ops import TABLE
from demask.pilot.chains.ordered_chain import Limit, OrderedChain, OrderedLayer
from demask.pilot.chains.ordered_graph import Order
from demask.pilot.simplifiers.rounding import Bits, quantized

BITS = Bits(3, 16)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(24, 150),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(150, 170, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(170, 3),
    ).eval()


def tensors(net):
    return [(m.weight, m.bias) for m in net if isinstance(m, nn.Linear)]


def reference(net, x, counts):
    """The answer with so many units of each hidden layer in full, written out, in float64."""
    x, pairs, pilots = x.double().flatten(1), tensors(net), []
    low = x.clone()
    for weight, bias in pairs[:-1]:
        pilots.append(F.linear(low, quantized(weight, 3, 16).double(), _double(bias)))
        low = pilots[-1].relu()
    for k, (weight, bias) in enumerate(pairs[:-1]):
        out = pairs[k + 1][0].double().norm(dim=0)
        chosen = (pilots[k] * out).amax(0).argsort(descending=True)[: counts[k]]
        values = pilots[k].clone()
        values[:, chosen] = F.linear(x, weight.double(), _double(bias))[:, chosen]
        x = values.relu()
    return F.linear(x, pairs[-1][0].double(), _double(pairs[-1][1]))


def _double(tensor):
    return None if tensor is None else tensor.double()


def chain(net, clock=None, block=4000):
    layers = [OrderedLayer(w, b, BITS) for w, b in tensors(net)]
    return OrderedChain(layers, block, *([clock] if clock else []))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 1.0])
def test_bytes_say_which_units_are_computed(net, rows, share):
    made, x = chain(net), torch.randn(rows, 24)
    whole = sum(layer.nbytes for layer in made.ordered)
    limit = Limit(bytes=made.pilot_bytes + share * whole)
    y, done = made(x, limit)
    assert done.units == tuple(int(share * n + 1e-9) for n in done.of) and done.of == (150, 170)
    assert done.bytes <= math.ceil(limit.bytes)
    expected = reference(net, x.view(rows, 24), done.units)
    assert torch.allclose(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_ends_are_the_pilot_and_the_network(net):
    made, x = chain(net), torch.randn(2, 24)
    pilot = copy.deepcopy(net)
    for layer in (pilot[1], pilot[4]):
        layer.weight.data = quantized(layer.weight.data, 3, 16)
    assert torch.equal(made(x, Limit(bytes=0))[0], pilot(x))
    assert torch.equal(made(x, Limit(seconds=0))[0], pilot(x))
    whole, done = made(x, Limit())
    assert done.units == done.of
    assert torch.allclose(whole, net(x), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(pilot(x), net(x), atol=1e-3)


class Slow(OrderedLayer):
    """A layer whose work takes time on a clock of its own: 1 for a pilot, 2 in full, 3 a block."""

    now = 0.0

    def __init__(self, *given):
        super().__init__(*given)
        Slow.now = 0.0

    def pilot(self, x):
        Slow.now += 1
        return super().pilot(x)

    def full(self, x):
        Slow.now += 2
        return super().full(x)

    def refine(self, x, units, values):
        Slow.now += 3
        super().refine(x, units, values)


@pytest.mark.parametrize("seconds", [0, 2, 3, 4, 5, 9, 14, 40, 60, 103, 104, 200])
def test_after_the_deadline_at_most_one_block_is_finished(net, seconds):
    layers = [Slow(w, b, BITS) for w, b in tensors(net)]
    made = OrderedChain(layers, 4000, lambda: Slow.now)  # blocks of 41 and 6 units: 4 and 29 of them
    x = torch.randn(1, 24)
    made(x, Limit(seconds=0))  # how long the last layer takes
    y, done = made(x, Limit(seconds=seconds))
    least, most = 2 + 2, 2 + 33 * 3 + 2
    assert done.pilot == 2
    assert max(least, min(seconds, most)) <= done.seconds < max(seconds, least) + 3
    assert done.units == (0, 0) if seconds <= least else done.units > (0, 0)
    assert (done.units == done.of) == (seconds > most - 3)
    assert torch.allclose(y.double(), reference(net, x, done.units), atol=1e-5, rtol=1e-5)


def test_a_late_pilot_is_the_answer(net):
    layers = [Slow(w, b, BITS) for w, b in tensors(net)]
    made, x = OrderedChain(layers, 4000, lambda: Slow.now), torch.randn(1, 24)
    assert torch.equal(made(x, Limit(seconds=1))[0], made(x, Limit(bytes=0))[0])


def test_a_large_last_layer_is_run_in_order_too():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    made, x = chain(net), torch.randn(1, 32)
    assert not made.last_in_full
    y, done = made(x, Limit(bytes=made.pilot_bytes + 0.5 * (96 * 32 * 8)))
    assert done.of == (96, 32) and done.units == (48, 16)
    whole, _ = made(x, Limit())
    assert torch.allclose(whole, net(x), atol=1e-5)
    hidden = made.piloted(x)[1]
    kept = (y == hidden)[0]  # of the pilot
    assert int(kept.sum()) == 16
    assert hidden[0, ~kept].abs().min() >= hidden[0, kept].abs().max()


def test_priorities_are_what_a_unit_adds_at_most(net):
    made, x = chain(net), torch.randn(3, 24)
    values = made.piloted(x)[0]
    expected = values.amax(0)  # all norms alike
    made.layers[1].columns_norm.fill_(1.0)
    assert torch.equal(made.priorities(0, values), expected)
    made.layers[1].columns_norm[7] = 1e6
    values[:, 7] = 0.1
    assert made.priorities(0, values).argmax() == 7


# ------------------------------------------------------------------------------------- the network


class Two(nn.Module):
    """Two chains, a GELU and a layer read twice."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(20, 64), nn.Linear(64, 20)
        self.head = nn.Sequential(nn.Linear(20, 90), nn.ReLU(), nn.Linear(90, 2))
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)
        self.wide = nn.Linear(20, 20).double()

    def forward(self, x):
        x = x + self.down(F.relu(self.up(x)))
        x = x + self.b(F.gelu(self.a(x)))
        return self.head(x), self.wide(x.double())


def test_every_chain_is_found_and_the_rest_is_said(net):
    torch.manual_seed(0)
    model, x = Two().eval(), torch.randn(2, 3, 20)
    made = Order(bytes="1MB").applied(model, (x,), None, "bits:8", TABLE)
    said = {d.layer: (d.what, d.why) for d in made.conditioned.decisions}
    assert {n for n, (what, _) in said.items() if what == "in order"} == {"up", "down", "head.0", "head.2"}
    assert "gelu" in said["a"][1] and "float64" in said["wide"][1]
    assert set(made.last) == {"up", "head.0"} and made.last["up"] is None
    for y, expected in zip(made(x), model(x), strict=True):
        assert y.shape == expected.shape
        assert torch.allclose(y, expected, atol=1e-5)
    assert made.last["up"].units == (64, 20)
    assert not made.conditioned.exact and made.conditioned.pilot == "bits:8"
    assert set(made.state_dict()) == set(model.state_dict())


def test_the_module_can_be_copied_pickled_and_called_with_any_batch(net):
    x = torch.randn(4, 24)
    made = Order(bytes=60_000).applied(net, (x[:2],), None, BITS, TABLE)
    expected = made(x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x), expected)
        assert other.last["1"].units == made.last["1"].units
        assert other.conditioned == made.conditioned
    assert made(x[:1]).shape == (1, 3)
    assert net[3].p == 0.5 and len(list(net.children())) == 7  # the model is as it was


def test_weights_that_change_are_seen(net):
    x = torch.randn(1, 24)
    made = Order(bytes=10**9).applied(net, (torch.randn(2, 24),), None, None, TABLE)
    with torch.no_grad():
        before = made(x)
        made.get_parameter("4.weight").mul_(2)
        net[4].weight.mul_(2)
    after = made(x)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, net(x), atol=1e-5)


def test_what_does_not_fit_takes_the_plain_path(net):
    made = Order(bytes=1).applied(net, (torch.randn(2, 24),), None, None, TABLE)
    x = torch.randn(2, 24)
    x[0, 0] = math.nan
    assert torch.equal(made(x).isnan(), net(x).isnan()) and made.last["1"] is None
    x = torch.randn(2, 24, requires_grad=True)
    assert not made(x).requires_grad and made.last["1"] is not None
    pairs = [t for pair in tensors(net) for t in pair if t is not None]
    y = made.ordered_0(x, *pairs)
    assert torch.allclose(y, net(x), atol=1e-6) and y.requires_grad and made.last["1"] is None
    assert torch.allclose(made.double()(x.double()), net.double()(x.double()))


@pytest.mark.parametrize(
    ("knobs", "pilot", "words"),
    [
        ({}, None, "deadline"),
        ({"deadline": -1.0}, None, "0 seconds"),
        ({"deadline": math.nan}, None, "0 seconds"),
        ({"bytes": "3 apples"}, None, "memory"),
        ({"bytes": 5}, "exponents", "few bits"),
        ({"bytes": 5}, nn.ReLU(), "few bits"),
    ],
)
def test_other_orders_are_refused(net, knobs, pilot, words):
    with pytest.raises(BadInput, match=words):
        Order(**knobs).applied(net, (torch.randn(2, 24),), None, pilot, TABLE)
