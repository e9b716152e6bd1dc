"""Pilots of packed 8 or 4 bits, and chosen rows: the sums of the network that the text says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import pytest
import torch
from test_pilot_gemv import ISAS, bits
from torch import Tensor, nn

from demask.errors import BadInput
from demask.kernels.cpu import zero_proof as certify
from demask.kernels.llvm.isa import AVX2, Isa, host
from demask.ops import TABLE
from demask.pilot.chains import chain_plan, packing
from demask.pilot.chains import ordered_plan as order_plan
from demask.pilot.chains.ordered_chain import Falling, OrderedLayer
from demask.pilot.chains.ordered_graph import Order
from demask.pilot.chains.ordered_plan import ChosenUnits, Estimated, packed, unfit
from demask.pilot.simplifiers.rounding import Bits, quantized

KINDS = (Bits(8), Bits(4), Bits(4, 64), Bits(8, 12), Bits(4, 8))
SIZES = ((1, 1), (37, 67), (300, 130), (17, 784))


def drawn(rows: int, columns: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a bias and inputs: of both signs, not negative, mostly zero, zero."""
    draw = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(size, generator=draw) for size in ((rows, columns), (rows,), (4, columns)))
    x[1] = x[1].relu()
    x[2] *= torch.rand(columns, generator=draw) > 0.9
    x[3] = 0
    return weight * scale, bias, x / scale


def expected(weight: Tensor, bias: Tensor | None, x: Tensor, kind: Bits) -> tuple[Tensor, Tensor]:
    """(the layer with rounded weights, the error that `kernels.estimate` states), in float64."""
    low = quantized(weight, kind.bits, kind.group).double()
    shift = torch.zeros(len(weight)) if bias is None else bias
    groups = 1 if kind.group is None else -(-weight.shape[1] // kind.group)
    span = (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).double()[:, None]
    part = span * (2**-17 * 1.06 + (groups + 8) * 2**-23)
    error = low.abs().sum(1) * part + 2**-24 * shift.double().abs()
    return x.double() @ low.T + shift.double(), error


def off(weight: Tensor, bias: Tensor | None, x: Tensor, kind: Bits, threads: int = 1, isa: Isa | None = None) -> bool:
    """Whether an estimate is off by more than is stated."""
    found = Estimated(packed(weight, bias, kind, isa), threads)(x).double()
    exact, error = expected(weight, bias, x, kind)
    assert found.shape == exact.shape
    return bool(((found - exact).abs() > error).any())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS, ids=Bits.text)
def test_estimates_are_off_by_no_more_than_is_stated(isa: Isa, kind: Bits):
    for size, threads in product(SIZES, (1, 2)):
        weight, bias, x = drawn(*size)
        assert not off(weight, bias, x, kind, threads, isa)
        assert not off(weight, None, x + 3, kind, threads, isa)
    for scale in (1e-20, 1e12):
        assert not off(*drawn(37, 67, scale), kind, 1, isa)


@pytest.mark.parametrize("kind", KINDS, ids=Bits.text)
def test_the_weights_are_those_of_the_simplifier(kind: Bits):
    """Of each column alone, which 16 bits hold exactly."""
    weight, _, _ = drawn(37, 67)
    weight[3], weight[4, :12] = 0, 0
    plan = Estimated(packed(weight, None, kind), 1)
    found = plan(torch.eye(67)).T
    assert torch.allclose(found, quantized(weight, kind.bits, kind.group), rtol=1e-6, atol=0)


def test_one_rounding_serves_all():
    weight, _, _ = drawn(37, 67)
    q, scale = packing.quantised(weight.numpy())
    made = torch.from_numpy(q) * torch.from_numpy(scale)[:, None]
    assert torch.equal(made, quantized(weight, 8))
    tiny = torch.full((2, 3), 1e-44).numpy()
    assert not packing.quantised(tiny)[0].any()


@pytest.mark.parametrize("how", ["madd", "mul"])
def test_all_ways_to_multiply_bytes_give_the_same_bits(how: str, monkeypatch: pytest.MonkeyPatch):
    isa = host() if how == "mul" else AVX2
    if isa.triple != host().triple:
        pytest.skip("instructions of another processor")
    weight, bias, x = drawn(300, 130)
    for kind in (Bits(8), Bits(4, 64)):
        first = Estimated(packed(weight, bias, kind), 1)(x)
        monkeypatch.setattr(certify, "dot_instruction", lambda isa: how)
        second = Estimated(packed(weight, bias, kind, isa), 1)(x)
        assert torch.allclose(second, first, rtol=1e-6, atol=1e-6)
        if isa is host():
            assert torch.equal(bits(second), bits(first))
        monkeypatch.undo()


@pytest.mark.parametrize("isa", ISAS)
def test_chosen_rows_have_the_bits_of_the_dense_kernel(isa: Isa):
    for size, threads in product(SIZES, (1, 2)):
        weight, bias, x = drawn(*size)
        dense = chain_plan.ChainPlan([chain_plan.ChainLayer(weight, bias, False)], ["dense"], 1, isa)(x)
        plan, order = ChosenUnits(weight, bias, threads, isa), torch.randperm(len(weight)).int()
        for count in {0, 1, len(weight) // 3, len(weight)}:
            values = torch.full_like(dense, 7.0)
            plan(x, order[:count].contiguous(), values)
            given = torch.zeros(len(weight), dtype=torch.bool)
            given[order[:count].long()] = True
            assert torch.equal(bits(values[:, given]), bits(dense[:, given]))
            assert bool((values[:, ~given] == 7.0).all())


@pytest.mark.parametrize("fault", ["scales", "weights", "constants"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    """One scale a little off, one weight off by a step, one sum of weights left out."""
    real = packing.few

    def broken(*given: object) -> packing.Few:
        few = real(*given)  # type: ignore[arg-type]
        array = getattr(few, fault).copy()
        if fault == "scales":
            array[0, 1, 5] *= 1.01
        elif fault == "weights":
            array[0, 3, 5, 1] ^= 1
        else:
            array[0, 0, 5] = 0
        return replace(few, **{fault: packing.in_huge_pages(array)})

    weight, bias, x = drawn(37, 130)
    assert not off(weight, bias, x, Bits(4, 64))
    monkeypatch.setattr(packing, "few", broken)
    assert off(weight, bias, x, Bits(4, 64))


# ----------------------------------------------------------------------------------- in an order


def test_up_to_four_inputs_are_run_by_kernels():
    weight, bias, x = drawn(300, 130)
    layer = OrderedLayer(weight, bias, Bits(4, 64))
    few = layer.pilot(x)
    assert "low" not in vars(layer)  # nothing was unpacked
    many = layer.pilot(torch.cat([x, x]))
    assert "low" in vars(layer)
    assert not torch.equal(few, many[:4])
    assert not bool(((few - many[:4]).abs() > 2 * expected(weight, bias, x, Bits(4, 64))[1]).any())
    units = torch.tensor([7, 0, 299])
    assert torch.equal(layer.rows(x.T.contiguous().T, units), layer.rows(x, units))
    assert torch.allclose(layer.rows(torch.cat([x, x]), units)[:4], layer.rows(x, units), atol=1e-4)


def test_what_is_not_finite_is_left_to_torch():
    weight, bias, x = drawn(37, 67)
    weight[2, 3] = torch.inf
    layer = OrderedLayer(weight, bias, Bits(8))
    assert torch.equal(layer.pilot(x).isfinite(), layer.pilot(torch.cat([x, x]))[:4].isfinite())
    assert layer.rows(x, torch.tensor([2])).shape == (4, 1)


def test_units_that_are_none_are_refused():
    layer = OrderedLayer(*drawn(37, 67)[:2], Bits(8))
    for units in ([37], [-1], [0] * 38):
        with pytest.raises(BadInput, match="0 to 36"):
            layer.rows(torch.zeros(1, 67), torch.tensor(units))


def test_calls_at_the_same_time_do_not_meet():
    weight, bias, x = drawn(300, 130)
    layer = OrderedLayer(weight, bias, Bits(8))
    alone = [layer.pilot(row[None]) for row in x]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: layer.pilot(x[k % 4][None]), range(200)))
    assert all(torch.equal(bits(y), bits(alone[k % 4])) for k, y in enumerate(found))


def test_threads_that_change_are_seen():
    weight, bias, x = drawn(300, 130)
    layer, before = OrderedLayer(weight, bias, Bits(8)), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(layer.pilot(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("pilot", ["bits:8", "bits:4", "bits:4:64", "bits:3:64", "bits:8:10"])
def test_the_pilot_alone_is_the_network_of_its_text(pilot: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 4)).eval()
    x = torch.randn(2, 100)
    made = Order(deadline=0.0).applied(net, (x,), None, pilot, TABLE)
    _, bits_, *group = pilot.split(":")
    said = Bits(int(bits_), int(group[0]) if group else None)
    with torch.no_grad():
        h = x.double()
        for layer in (net[0], net[2]):
            low = quantized(layer.weight, said.bits, said.group).double()
            h = torch.relu(h @ low.T + layer.bias.double())
        exact = h @ net[4].weight.double().T + net[4].bias.double()
    assert torch.allclose(made(x).double(), exact, atol=1e-4)
    slow = [d.why for d in made.conditioned.decisions if "unpacked" in d.why]
    assert bool(slow) == bool(unfit(said, 100)) == (pilot in ("bits:3:64", "bits:8:10"))
    assert made.last["0"].units == (0, 0)


def test_pilots_that_no_kernel_reads_say_why():
    assert unfit(Bits(8, 10), 10) == ""  # one group
    assert "multiple of 8" in unfit(Bits(4, 12), 100)
    assert "columns" in unfit(Bits(8), order_plan.certify.MOST_COLUMNS + 1)


def test_pieces_of_an_order_are_those_of_a_stable_sort():
    draw = torch.Generator().manual_seed(5)
    for count, step in ((1, 1), (700, 64), (3000, 1000), (5000, 7)):
        values = torch.randn(count, generator=draw).mul(50).round() / 8  # many are equal
        values[:: max(count // 9, 1)] = -0.0
        values[count // 2] = torch.inf
        order = Falling(values)
        found = [order.places(k, min(k + step, count)) for k in range(0, count, step)]
        assert torch.equal(torch.cat(found).long(), values.argsort(descending=True, stable=True))
