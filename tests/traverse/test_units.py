"""Units side by side: the network in tiles computes what the network does, and what is exchanged is counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.traverse import Device, Memory, batch, plan, spread
from demask.traverse.units import LAYOUTS
from fuzz.images import Images
from fuzz.traversed import difference
from instruction_networks import drawn, images, mobilenet, resnet

FLOAT = 4


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("units", [2, 4, 6])
def test_drawn_networks_are_bit_equal(seed: int, units: int) -> None:
    """Numbers are integers, so that sums are exact in any order."""
    model = Images(seed, depth=6, rank=1 + seed % 3).eval()
    for one in spread(model, (model.example,), device=Device(units=units)).layouts:
        assert difference(model, model.example, one.module) == 0, one.layout
        assert one.units == units == len(one.macs)


@pytest.mark.parametrize("network", [resnet, mobilenet])
def test_classifiers(network) -> None:
    model, x = drawn(network()), images(1, 3, 48, 40)
    traffic = spread(model, (x,), device=Device(units=4))
    for one in traffic.layouts:
        torch.testing.assert_close(one.module(x), model(x), rtol=1e-4, atol=1e-5)
        assert one.exchanged > 0 and one.balance >= 1
        assert one.outside > x.nbytes + model(x).nbytes
    assert "checkerboard" in str(traffic) and "4 units" in str(traffic)


def convolution(size: int = 32, reach: int = 1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Conv2d(3, 8, 2 * reach + 1, padding=reach).eval(), torch.randn(1, 3, size, size)


@pytest.mark.parametrize("reach", [1, 2])
def test_borders_by_hand(reach: int) -> None:
    """Of one convolution of 32 x 32 positions: per cut two borders, of `reach` lines and the corners."""
    model, x = convolution(reach=reach)
    line = 32 * 3 * FLOAT * reach
    by_name = {one.layout: one for one in spread(model, (x,), device=Device(units=4)).layouts}
    assert list(by_name["strips"].borders.values()) == [3 * 2 * line]
    assert by_name["columns"].exchanged == 3 * 2 * line
    assert by_name["quadrants"].exchanged == 4 * (2 * 16 * reach + reach * reach) * 3 * FLOAT
    # Mirrored strips 0 1 2 3 3 2 1 0: between the two of unit 3, and nowhere else, nothing is exchanged.
    assert by_name["mirrored"].exchanged == 6 * 2 * line
    assert by_name["checkerboard"].exchanged > by_name["quadrants"].exchanged
    weights = sum(p.nbytes for p in model.parameters())
    for one in by_name.values():
        assert one.weights == 3 * weights
        assert one.outside == weights + x.nbytes + 8 * 32 * 32 * FLOAT
        assert sum(one.macs) == 32 * 32 * 8 * 3 * (2 * reach + 1) ** 2 and one.balance == 1.0
        parts = 160 * one.outside + 12.5 * (one.weights + one.exchanged) + 1.25 * one.inside
        assert one.microjoules == pytest.approx(parts / 1e6)


def test_a_border_is_exchanged_once_for_all_its_readers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    (one,) = spread(Two().eval(), (torch.randn(1, 3, 32, 32),), device=Device(units=2), layouts=("strips",)).layouts
    assert one.borders == {"x": 2 * 2 * 32 * 3 * FLOAT}


def test_one_unit_exchanges_nothing() -> None:
    for one in spread(*_with_args(), device=Device(units=1)).layouts:
        assert one.exchanged == one.weights == 0 and one.balance == 1


def _with_args() -> tuple[nn.Module, tuple[Tensor]]:
    model, x = convolution()
    return model, (x,)


def test_a_layer_after_which_one_unit_computes_the_rest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(4 if k else 3, 4, 3, padding=1) for k in range(3))).eval()
    x = torch.randn(1, 3, 16, 16)
    (full,) = spread(model, (x,), layouts=("strips",)).layouts
    (first,) = spread(model, (x,), layouts=("strips",), until="0").layouts
    assert torch.allclose(first.module(x), model(x), atol=1e-6)
    per_layer = 16 * 16 * 4 * 9
    assert full.macs == (per_layer * (3 + 4 + 4) // 4,) * 4
    assert first.macs == (per_layer * 3 // 4 + 2 * per_layer * 4, *(per_layer * 3 // 4,) * 3)
    assert first.borders["conv2d"] == 3 * 4 * 16 * 4 * FLOAT  # the other units' strips
    with pytest.raises(BadInput, match="expected the name of a module that runs"):
        spread(model, (x,), until="9")


@pytest.mark.parametrize("units", [1, 2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_unit_has_about_as_many_tiles(name: str, units: int) -> None:
    layout = LAYOUTS[name](units)
    places = list(itertools.product(range(layout.rows), range(layout.columns)))
    counts = [sum(layout.unit(i, j) == unit for i, j in places) for unit in range(units)]
    assert min(counts) >= 1 and sum(counts) == len(places)
    assert max(counts) - min(counts) <= (1 if name == "z order" else 0)
    if name == "checkerboard" and units > 3:
        assert all(layout.unit(i, j) != layout.unit(i, j + 1) for i, j in places if j + 1 < layout.columns)


def test_what_a_unit_needs_by_hand() -> None:
    """Two convolutions, two units: half of the rows and a border line, a layer's weights, and half of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)).eval()
    x = torch.randn(1, 3, 16, 10)
    own = 8 * 10 * FLOAT
    border = 10 * FLOAT
    weights = [sum(p.nbytes for p in layer.parameters()) for layer in model]
    layers = [3 * (own + border) + 4 * (own + border), 4 * (own + border) + 8 * own]
    needed = max(layer + weight for layer, weight in zip(layers, weights, strict=True)) + sum(weights) // 2
    device = Device((needed, Memory(rate=1e9, picojoules=2.0), Memory(rate=1e8)), units=2, macs=1e12)
    traffic = spread(model, (x,), device=device, layouts=("strips",))
    (one,) = traffic.layouts
    assert one.needed == needed and "more than a unit has" not in str(traffic)
    assert one.seconds == one.outside / 1e8
    parts = 160 * one.outside + 2 * (one.weights + one.exchanged) + 1.25 * one.inside
    assert one.microjoules == pytest.approx(parts / 1e6)
    assert "more than a unit has: strips" in str(
        spread(model, (x,), device=Device(needed - 1, units=2), layouts=("strips",))
    )
    slow = Device(units=2, macs=1e3)
    assert spread(model, (x,), device=slow, layouts=("strips",)).layouts[0].seconds == max(one.macs) / 1e3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"units": 0}, "expected 1 to 256 units"),
        ({"units": 2.0}, "expected 1 to 256 units"),
        ({"memory": ()}, "expected 1 to 3 memories"),
        ({"memory": ("1KiB",) * 4}, "expected 1 to 3 memories"),
        ({"memory": (1.5,)}, "expected an amount of memory"),
        ({"macs": 0}, "expected multiply-adds per second"),
        ({"call": -1.0}, "expected seconds"),
    ],
)
def test_bad_devices(options, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Device(**options)


@pytest.mark.parametrize("options", [{"rate": 0}, {"rate": float("nan")}, {"picojoules": -1}, {"size": 0}])
def test_bad_memories(options) -> None:
    with pytest.raises(BadInput):
        Memory(**options)


def test_plans_are_for_one_unit_and_a_size() -> None:
    model, args = _with_args()
    for device, what in (
        (Device("64KiB", units=2), "plans are for one unit"),
        (Device(), "with the size of its memory"),
    ):
        for call in (
            lambda device=device: plan(model, args, device=device),
            lambda device=device: batch(model, args, memory=device),
        ):
            with pytest.raises(BadInput, match=what):
                call()


def test_plans_are_ranked_by_the_rates_of_their_device() -> None:
    """Steps that take long are few; where they take nothing, bands are as low as the caches like them."""
    model, x = convolution(256)
    slow, fast = (plan(model, (x,), device=Device("1MiB", call=call)) for call in (1.0, 0.0))
    assert slow.segments[0].steps < fast.segments[0].steps


def test_bad_arguments() -> None:
    model, args = _with_args()
    for options, what in (({"layouts": ("spiral",)}, "expected layouts of strips"),):
        with pytest.raises(BadInput, match=what):
            spread(model, args, **options)
    with pytest.raises(BadInput, match="no input has rows"):
        spread(nn.Linear(3, 3), (torch.ones(1, 3),))
