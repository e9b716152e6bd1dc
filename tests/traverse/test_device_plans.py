"""Plans for the memory of a device: rows and weights in it, and nothing of this process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from demask.errors import BadInput, BudgetTooSmall
from demask.exec.analysis.flow import capture_at_sizes, flow_of
from demask.exec.planning.plan_memory import lay_out, lay_out_checked
from demask.exec.planning.planner import packed_plan
from demask.exec.planning.schedule import walk_bands
from demask.ops import TABLE
from demask.traverse import Device, Plan, plan, tile
from demask.traverse.execution.tiled_module import tiled
from fuzz.traversed import BANDS, difference, told

ROW = 4 * 64 * 4  # bytes of a row of four channels of 64 columns


def stack(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4 if k else 3, 4, 3, padding=1) for k in range(layers)]
    return nn.Sequential(*(module for conv in convolutions for module in (conv, nn.ReLU()))).eval()


X = torch.zeros(1, 3, 64, 64)


@pytest.mark.parametrize("memory", ["32KiB", "128KiB", "1MiB", "8MiB"])
def test_small_memories(memory: str) -> None:
    net = stack()
    tiles = plan(net, (X,), device=Device(memory))
    assert Plan.from_dict(tiles.to_dict()) == tiles
    assert tiles.overhead == 0 and tiles.peak == tiles.live <= tiles.budget == Device(memory).bytes
    assert tiles.recompute == 1.0
    assert "this process is not counted" in str(tiles)
    weights = sum(p.numel() * 4 for p in net.parameters())
    if memory == "32KiB":
        assert {segment.mode for segment in tiles.segments} == {"bands"}
        rows = max(segment.bytes for segment in tiles.segments)
        assert tiles.live <= rows + weights and all(segment.rows < 16 for segment in tiles.segments)
    else:
        assert tiles.live >= weights / len(tiles.segments)


def test_the_least_memory_holds_what_layers_need() -> None:
    """Of one layer at least: three rows of its input, one of its output, and its weight."""
    net = stack(2)
    with pytest.raises(BudgetTooSmall, match="libraries and kernels take 0 B") as error:
        plan(net, (X,), device=Device(512))
    least = error.value.least
    weights = [p.numel() * 4 for p in net.parameters()]
    assert ROW <= least <= 3 * (3 * ROW) + sum(weights)
    assert plan(net, (X,), device=Device(int(least * 1.01) + 1)).peak <= least * 1.01 + 1
    outside = plan(net, (X,), device=Device(int(least * 1.01) + 1, weights="outside"))
    assert outside.live < least


def test_weights_take_what_they_are_stored_in() -> None:
    net = nn.Conv2d(8, 64, 3, padding=1, bias=False).eval()
    x = torch.zeros(1, 8, 32, 32)
    net.weight.data *= torch.rand_like(net.weight) < 0.1
    nonzeros, count = int(net.weight.count_nonzero()), net.weight.numel()
    live = {
        weights: plan(net, (x,), device=Device("1MiB", weights=weights)).live  # type: ignore[arg-type]
        for weights in ("dense", "compressed", "outside")
    }
    assert live["dense"] - live["outside"] == 4 * count
    assert live["compressed"] - live["outside"] == 4 * nonzeros + count // 8
    net.weight.data.fill_(1.0)  # the bits would be added
    full = plan(net, (x,), device=Device("1MiB", weights="compressed"))
    assert full.live == live["dense"]


def test_bad_devices_and_what_runs() -> None:
    for bad in (0, -1, "much", 1.5):
        with pytest.raises(BadInput):
            Device(bad)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="outside"):
        Device("1MiB", weights="none")  # type: ignore[arg-type]
    with pytest.raises(BudgetTooSmall):
        tile(stack(), (X,), memory="32KiB")  # the process itself takes more
    with pytest.raises(BudgetTooSmall):
        plan(stack(), (X,), memory="32KiB")


def test_a_row_of_a_deep_layer_in_several_steps() -> None:
    """A row of the result needs 16 of the input, and what the layers are ahead: steps of a part of a row take less."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4 if k else 3, 4, 3, 2, 1) for k in range(4)]
    model, x = nn.Sequential(*layers).double().eval(), torch.randn(1, 3, 256, 64).double()
    flow = flow_of(capture_at_sizes(model, (x,)), TABLE)
    (one,) = told(flow, BANDS, 1)
    sizes = []
    for steps in (1, 4, 16):
        layout = lay_out(flow, [replace(one, row_steps=steps)])
        module = tiled(flow.program, packed_plan(flow, layout, 2**40, 0), flow, layout, TABLE)
        assert difference(model, x, module) < 1e-13
        sizes.append(layout.segments[0].bytes)
        assert layout.segments[0].segment.macs == one.macs
    assert sizes[0] > 1.5 * sizes[1] > sizes[2]
    layout = lay_out(flow, [replace(one, row_steps=4, workers=2, over={})])
    module = tiled(flow.program, packed_plan(flow, layout, 2**40, 0), flow, layout, TABLE)
    assert difference(model, x, module) < 1e-13
    row = Device(sizes[2] * 2, weights="outside")
    small = plan(model, (x,), device=row)
    assert small.peak <= row.bytes and small.recompute == 1.0
    assert Plan.from_dict(small.to_dict()) == small


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_sampled_steps_are_those_of_the_walk(steps) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(nn.Conv2d(3, 3, 3, 2, 1) for _ in range(3))

        def forward(self, x):
            y = self.down[2](self.down[1](a := self.down[0](x)))
            return F.interpolate(y, scale_factor=4.0, mode="bilinear") + a, y

    flow = flow_of(capture_at_sizes(Net().eval(), (torch.randn(1, 3, 96, 16),)), TABLE)
    stage = lay_out(flow, told(flow, BANDS, 1)).segments[0].stage
    for band in (1, 4):
        walk = list(walk_bands(stage, band, row_steps=steps))
        half = len(walk) // 2
        some = [0, 1, half, half + 1, len(walk) - 1]
        sampled = walk_bands(stage, band, row_steps=steps, sample={len(walk): some}.__getitem__)
        assert list(sampled) == [walk[k] for k in some]


def test_a_row_in_no_step_is_refused() -> None:
    flow = flow_of(capture_at_sizes(stack(), (X,)), TABLE)
    (segment,) = told(flow, BANDS, 2)
    with pytest.raises(BadInput, match="in no step"):
        lay_out_checked(flow, [replace(segment, row_steps=0)])
