"""Regions: rectangles of a network equal the same part of its full run, whatever its layers; few
rectangles hold all selected tiles; what is not run is filled in, and what was missed is told."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demask import BadInput
from demask.exec.analysis.flow import capture_at_sizes, flow_of
from demask.ops import TABLE
from demask.pilot.conditions.base import parsed, text
from demask.pilot.conditions.regions import InRegions, Regions, contrast, per_tile
from demask.traverse.execution import region_runner as windows
from demask.traverse.execution.region_runner import MANY, Rectangle, RegionNetwork, fit_cost, rectangles, refusals, runs
from demask.traverse.storage.sources_and_sinks import tensor_source
from fuzz.images import Images
from fuzz.traversed import flat

TOLERANCE = 1e-12  # of the largest value, in float64: kernels of other sizes
UNTOUCHED = 77.0


class Banded(RegionNetwork):
    """Windows whose rectangles are walked in low bands."""

    def band(self, where: Rectangle) -> int:
        return 1 + (where.top + where.right) % 5


def interval(draw: random.Random, length: int) -> tuple[int, int]:
    """Some positions, often from the first or up to the last."""
    low, high = sorted(draw.sample(range(length + 1), 2))
    return draw.choice([(low, high), (0, high), (low, length), (0, length)])


def part(value: Tensor, where: Rectangle, size: tuple[int, int]) -> tuple[slice, ...]:
    """A rectangle's positions of an output, in proportion."""
    (h, w), (tall, wide) = value.shape[2:], size
    return (
        slice(None),
        slice(None),
        slice(where.top * h // tall, where.bottom * h // tall),
        slice(where.left * w // wide, where.right * w // wide),
    )


@torch.no_grad()
def wrong(model: nn.Module, x: Tensor, seed: int, exact: bool, count: int = 3) -> str | None:
    """What is wrong with drawn rectangles of a network; None where it has none to run."""
    expected, flow = flat(model(x)), flow_of(capture_at_sizes(model, (x,)), TABLE)
    if refusals(flow):
        return None
    draw = random.Random(seed)
    engine = (Banded if seed % 2 else RegionNetwork).of(flow)
    for _ in range(count):
        where = Rectangle(*interval(draw, engine.size[0]), *interval(draw, engine.size[1]))
        results = {node: torch.full_like(value, UNTOUCHED) for node, value in zip(flow.outputs, expected, strict=True)}
        done = engine.run([where], flow.constants | {flow.inputs[0]: x}, results, 0)
        for value, made in zip(expected, results.values(), strict=True):
            here = part(value, where, engine.size)
            apart = (made - value).abs()
            bound = 0.0 if exact else TOLERANCE * max(float(value.abs().max()), 1e-3)
            if bool((apart[here] > bound).any()):
                return f"differs by {float(apart[here].max()):.3g} in {where}"
            made[here] = UNTOUCHED
            if bool(((made != UNTOUCHED) & (apart > bound)).any()):
                return f"writes something else beside {where}"
        if done.macs > engine.macs(where) and not _transposes(model):
            return f"{done.macs} multiply-adds, said {engine.macs(where)}"
    return ""


def _transposes(model: nn.Module) -> bool:
    """Such convolutions multiply rows at the border of two bands twice."""
    return any(step[0] == "transposed" for step in getattr(model, "steps", ()))


def checked(seeds: range) -> int:
    """How many drawn networks ran; each right."""
    found = {}
    for seed in seeds:
        model = Images(seed, exact=seed % 2 == 0, rank=2).eval()
        found[seed] = wrong(model, model.example, seed, model.exact)
    assert not any(found.values()), {seed: one for seed, one in found.items() if one}
    return sum(one == "" for one in found.values())


def test_rectangles_of_random_networks_equal_the_full_run():
    assert checked(range(16)) >= 5


@pytest.mark.nightly
@pytest.mark.parametrize("start", range(16, 416, 40))
def test_rectangles_of_many_random_networks(start: int):
    assert checked(range(start, start + 40)) >= 8  # the others are refused


class Mixed(nn.Module):
    """Strides, dilation, a residual, a resize, a concatenation, a depthwise kernel; integers
    where asked for."""

    def __init__(self, whole: bool, mode: str = "nearest"):
        super().__init__()
        self.first, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.wide, self.deep = (nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 4, 5, padding=2, groups=4))
        self.last, self.mode = nn.Conv2d(8, 2, 3, padding=1), mode
        generator = torch.Generator().manual_seed(1)
        for weight in self.parameters():
            drawn = (
                torch.randint(-2, 3, weight.shape, generator=generator).double()
                if whole
                else torch.randn(weight.shape, generator=generator).double()
            )
            weight.data = drawn

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = self.down(y)
        z = torch.relu(self.wide(z) + z)
        corners = {} if self.mode == "nearest" else {"align_corners": False}
        z = F.interpolate(self.deep(z), size=y.shape[2:], mode=self.mode, **corners)
        return self.last(torch.cat([y, z], 1))


def mixed(whole: bool = True, mode: str = "nearest", dtype=torch.float64) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-2, 3, (1, 2, 37, 46), generator=generator)
    return Mixed(whole, mode).eval().to(dtype), x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", [0, 1])
def test_whole_numbers_are_equal_bit_for_bit(seed, dtype):
    model, x = mixed(dtype=dtype)
    assert wrong(model, x, seed, exact=True, count=10) == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_float64_is_equal_but_for_rounding(mode):
    model, x = mixed(False, mode)
    assert wrong(model, x, 3, exact=False, count=6) == ""


CORNERS = [
    (0, 9, 0, 11),
    (0, 9, 35, 46),
    (28, 37, 0, 11),
    (28, 37, 35, 46),
    (0, 37, 20, 24),
    (17, 18, 0, 46),
    (12, 20, 15, 31),
    (36, 37, 45, 46),
]


@pytest.mark.parametrize("corner", CORNERS)
@torch.no_grad()
def test_corners_edges_and_the_middle(corner):
    model, x = mixed()
    flow, where = flow_of(capture_at_sizes(model, (x,)), TABLE), Rectangle(*corner)
    engine, made = RegionNetwork.of(flow), torch.full((1, 2, 37, 46), UNTOUCHED).double()
    engine.run([where], flow.constants | {flow.inputs[0]: x}, {flow.outputs[0]: made}, 0)
    here = part(made, where, engine.size)
    assert torch.equal(made[here], model(x)[here])
    made[here] = UNTOUCHED
    assert bool((made == UNTOUCHED).all())


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("end", [0, 1])
def test_a_halo_one_position_short_is_noticed(monkeypatch, axis, end):
    class Short:
        """A source that gives zeros, as if it were padding, for the first or the last row or column
        of a window inside the image."""

        def __init__(self, value, axes, index):
            self.source = tensor_source(value, axes, index)

        def read(self, window, into):
            self.source.read(window, into)
            if window[axis - 2][end] != (0, self.source.shape[axis])[end]:
                into.narrow(axis, end * (into.shape[axis] - 1), 1).zero_()

    monkeypatch.setattr(windows, "tensor_source", Short)
    model, x = mixed()
    assert "differs by" in str(wrong(model, x, 1, exact=True, count=20))


# --- rectangles ---------------------------------------------------------------------------------


def halo_cost(h: np.ndarray, w: np.ndarray) -> np.ndarray:
    return (h + 10.0) * (w + 10.0) + 200.0


@pytest.mark.parametrize("seed", range(8))
def test_rectangles_hold_all_tiles_and_cost_no_more_than_the_runs(seed):
    generator = torch.Generator().manual_seed(seed)
    share = [0.02, 0.1, 0.3, 0.6][seed % 4]
    selected = torch.rand(13, 17, generator=generator) < share
    size = (13 * 8 - 3, 17 * 8 - 5)
    found = rectangles(selected, 8, size, halo_cost)
    where = torch.zeros(size, dtype=torch.bool)
    for one in found:
        assert 0 <= one.top < one.bottom <= size[0] and 0 <= one.left < one.right <= size[1]
        where[one.top : one.bottom, one.left : one.right] = True
    large = selected.repeat_interleave(8, 0).repeat_interleave(8, 1)[: size[0], : size[1]]
    assert not bool((large & ~where).any())
    alone = [Rectangle(8 * a, min(8 * b, size[0]), 8 * c, min(8 * d, size[1])) for a, b, c, d in runs(selected)]
    assert _cost(found) <= _cost(alone)


def _cost(places) -> float:
    return sum(float(halo_cost(np.array(p.bottom - p.top), np.array(p.right - p.left))) for p in places)


def test_runs_cover_each_tile_once():
    selected = torch.rand(9, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    count = torch.zeros(9, 11)
    for top, bottom, left, right in runs(selected):
        count[top:bottom, left:right] += 1
    assert torch.equal(count, selected.float())


def test_many_tiles_apart_are_coarsened_first():
    board = torch.arange(64)[:, None] + torch.arange(64)
    found = rectangles(board % 2 == 0, 4, (256, 256), lambda h, w: h * w + 1e-9)
    assert len(found) <= MANY and sum(one.pixels for one in found) >= 256 * 256 // 2


def test_costs_say_what_frustums_take():
    model, x = mixed()
    engine = RegionNetwork.of(flow_of(capture_at_sizes(model, (x,)), TABLE))
    cost = fit_cost(engine, 8)
    for h, w in [(8, 8), (16, 24), (24, 8)]:
        where = Rectangle(7, 7 + h, 9, 9 + w)
        said, exact = float(cost(np.array(h), np.array(w))), engine.seconds(where)
        assert abs(said - exact) < 0.1 * exact


# --- activity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (17, 9), (8, 8), (1, 5), (41, 30)])
def test_contrast_is_that_of_each_block_and_the_first_of_the_next(size):
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    found = contrast(x)
    for i in range(found.shape[1]):
        for j in range(found.shape[2]):
            block = x[:, :, 8 * i : 8 * i + 9, 8 * j : 8 * j + 9]
            expected = (block.amax((2, 3)) - block.amin((2, 3))).amax(1)
            assert torch.equal(found[:, i, j], expected)


@pytest.mark.parametrize(("size", "tile", "grow"), [((64, 48), 16, 0), ((61, 47), 13, 5)])
def test_a_tile_sees_every_active_position_near_it(size, tile, grow):
    for place in [(0, 0), (size[0] - 1, size[1] - 1), (20, 31), (33, 12)]:
        x = torch.zeros(1, 1, *size)
        x[0, 0, place[0], place[1]] = 1
        for activity in (x[:, 0], contrast(x)):
            found = per_tile(activity, size, tile, grow)[0]
            rows = [k for k in range(found.shape[0]) if tile * k - grow <= place[0] < tile * (k + 1) + grow]
            columns = [k for k in range(found.shape[1]) if tile * k - grow <= place[1] < tile * (k + 1) + grow]
            assert all(found[r, c] == 1 for r in rows for c in columns)


def test_what_is_no_number_is_run():
    x = torch.zeros(1, 8, 8)
    x[0, 0, 0] = torch.nan
    assert per_tile(x, (8, 8), 4)[0, 0, 0] == torch.inf


# --- the condition ------------------------------------------------------------------------------


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), *more).eval()


def spots(count: int = 2, size: int = 96) -> Tensor:
    """Images with something in one place each."""
    x = torch.zeros(count, 3, size, size)
    for k in range(count):
        x[k, :, 20 + 30 * k : 34 + 30 * k, 40:60] = torch.rand(3, 14, 20)
    return x


@torch.no_grad()
def test_images_have_regions_of_their_own():
    model, x = net(), spots()
    module = Regions(0.1, tile=16, grow=2, fill=0.25).applied(model, (x,), None, None, TABLE)
    y, full = module(x), model(x)
    assert len(module.last.images) == 2 and not any(one.is_full for one in module.last.images)
    assert module.last.images[0].areas != module.last.images[1].areas
    where = module.last.where[:, None].expand_as(y)
    assert torch.allclose(y[where], full[where], atol=1e-6)
    assert bool((y[~where] == 0.25).all())
    assert torch.equal(module(x[:1]), y[:1])
    assert "image 0: " in str(module.last) and 0 < module.last.images[0].work < 0.5


@torch.no_grad()
def test_the_fill_is_the_pilots_answer_or_a_function_of_the_input():
    model, x = net(), spots(1)
    pilot = Regions(0.02, tile=16).applied(model, (x,), None, "downsample:2:area", TABLE)
    y = pilot(x)
    where = pilot.last.where[:, None].expand_as(y)
    assert torch.equal(y[~where], pilot.filled(x)[~where])
    assert torch.allclose(y[where], model(x)[where], atol=1e-6) and bool(where.any())
    itself = Regions(0.1, tile=16, fill=lambda x: 2 * x).applied(model, (x,), None, None, TABLE)
    y = itself(x)
    assert torch.equal(y[:, :, 70:], 2 * x[:, :, 70:])
    assert pilot.conditioned.pilot == "downsample:2:area" and not pilot.conditioned.exact


@torch.no_grad()
def test_a_function_may_say_what_is_active():
    model, x = net(), spots(1)
    before = torch.zeros_like(x)

    def changed(x: Tensor) -> Tensor:  # since an earlier frame
        return (x - before).abs().amax(1)

    module = Regions(0.0, tile=16, fill=0.0).applied(model, (x,), None, changed, TABLE)
    module(x)
    assert 0 < module.last.images[0].selected < 0.2
    module(before)
    assert module.last.images[0].areas == () and module.last.images[0].work == 0


@torch.no_grad()
def test_the_whole_image_is_run_where_rectangles_would_cost_more():
    model, x = net(), torch.rand(1, 3, 96, 96)
    module = Regions(0.1, tile=16, fill=0.0).applied(model, (x,), None, None, TABLE)
    y = module(x)
    (ran,) = module.last.images
    assert ran.is_full and ran.work == 1 and torch.allclose(y, model(x), atol=1e-6)


@torch.no_grad()
def test_regions_without_a_threshold_are_the_network_bit_for_bit_in_whole_numbers():
    model, x = mixed()
    module = Regions(-1.0, tile=8, fill=0.0).applied(model, (x,), None, None, TABLE)
    assert torch.equal(module(x), model(x))


def test_the_model_is_not_changed():
    model, x = net(), spots(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Regions(0.1, tile=16, fill=0.0).applied(model, (x,), None, None, TABLE)(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_weights_are_those_of_the_model_at_every_call():
    model, x = net(), spots(1)
    module = Regions(0.1, tile=16, fill=0.0).applied(model, (x,), None, None, TABLE)
    model[0].weight.mul_(2)
    y = module(x)
    where = module.last.where[:, None].expand_as(y)
    assert torch.allclose(y[where], model(x)[where], atol=1e-6)


@torch.no_grad()
def test_what_was_missed_is_told():
    model, x = net(), spots(1)
    x[0, :, 80:84, 4:8] = 0.05  # below the threshold
    module = Regions(0.1, tile=16, grow=2, fill=lambda x: model(torch.zeros_like(x)))
    here = module.applied(model, (x,), None, None, TABLE)
    here(x)
    found = Regions.missed(model(x), here.filled(x), here.last.where, 1e-4)
    outside = ((model(x) - here.filled(x)).abs().amax(1) > 1e-4)[0, 76:90, 0:14]
    assert 0 < found.missed <= float(outside.sum()) / 96**2 and 0 < found.recall < 1
    assert Regions.missed(model(x), model(x), here.last.where, 1e-4).recall == 1


@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(1, 3), nn.InstanceNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()], ids=str
)
def test_networks_that_read_the_whole_image_are_refused(layer):
    with pytest.raises(BadInput, match="cannot be run in regions"):
        Regions(fill=0.0).applied(net(layer), (spots(1),), None, None, TABLE)


def test_the_refusal_names_the_call():
    with pytest.raises(BadInput, match="group_norm"):
        Regions(fill=0.0).applied(net(nn.GroupNorm(1, 3)), (spots(1),), None, None, TABLE)


def test_arguments_that_make_no_sense_are_refused():
    model, x = net(), spots(1)
    for make in (lambda: Regions(tile=0), lambda: Regions(grow=-1), lambda: Regions(fill="mean")):
        with pytest.raises(BadInput):
            make()
    with pytest.raises(BadInput, match="needs a pilot"):
        Regions().applied(model, (x,), None, None, TABLE)
    with pytest.raises(BadInput, match="expected a simplifier"):
        Regions(fill=0.0).applied(model, (x,), None, 3, TABLE)
    module = Regions(fill=0.0).applied(model, (x,), None, lambda x: x, TABLE)
    with pytest.raises(BadInput, match="map of activity"):
        module(x)


def test_the_text_names_it():
    chosen = parsed("regions:0.2:tile=32:fill=0.5", [Regions])
    assert chosen == Regions(0.2, tile=32, fill=0.5) and text(chosen).startswith("regions:0.2")
    assert isinstance(chosen.applied(net(), (spots(1),), None, None, TABLE), InRegions)


def test_images_unlike_the_example_are_refused_with_a_way_out():
    module = Regions(fill=0.0).applied(net(), (spots(1),), None, None, TABLE)
    for x in (spots(1)[..., :-8], spots(1).repeat(2, 1, 1, 1), spots(1)[:0]):
        with pytest.raises(BadInput, match="condition the network with such an example"):
            module(x)
