"""The steps of a plan as one program: it computes what the network does, from parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from demask.exec.analysis.flow import capture_at_sizes
from demask.exec.parts import PartsProgram, flow_in_calls, write_out
from demask.graph.result.demasked_module import build_plain
from demask.ops import TABLE
from demask.ops.schema import fake
from fuzz.images import Images
from fuzz.traversed import BANDS, FRUSTUMS, LAYERWISE, difference, told

MODES = [(BANDS, 1, 0), (BANDS, 5, 0), (FRUSTUMS, 6, 9), (LAYERWISE, 0, 0)]


def in_parts(model: nn.Module, x: Tensor, mode: str, rows: int, columns: int = 0, **options) -> PartsProgram:
    flow = flow_in_calls(capture_at_sizes(model, (x,)), TABLE)
    return write_out(flow, told(flow, mode, rows, columns, **options))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_drawn_networks_are_bit_equal(seed: int, mode: tuple[str, int, int]) -> None:
    """Numbers are integers, so that sums are exact in any order."""
    model = Images(seed, depth=6, rank=1 + seed % 3).eval()
    for spills in (False, True):
        parts = in_parts(model, model.example, *mode, seed=seed, spills=spills, again=seed % 2 == 0)
        assert difference(model, model.example, build_plain(parts.program)) == 0


class Ends(nn.Module):
    """What parts at an end of an image treat by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.wide = nn.ZeroPad2d((1, 2, 3, 4)), nn.Conv2d(3, 4, 5, padding=4)
        self.pool, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.up, self.last = nn.Upsample(scale_factor=3), nn.Conv2d(4, 4, 3, dilation=2, padding=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.up(self.mean(self.pool(self.wide(self.pad(x)))))
        z = self.last(torch.relu(y)) + y[:, :1]
        return torch.cat([z[:, :, 1:], y[:, :, :5]], 2), z.mean((2, 3)), z.amax((1, 2))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ends_of_images(mode: tuple[str, int, int]) -> None:
    torch.manual_seed(0)
    model, x = Ends().double().eval(), torch.randn(1, 3, 19, 17).double()
    parts = in_parts(model, x, *mode)
    assert difference(model, x, build_plain(parts.program)) < 1e-13


def test_nothing_but_parts_is_in_memory() -> None:
    """Bands of a row: no value of the program but joins has more rows than the windows of the layers need."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))).eval()
    x = torch.randn(1, 2, 32, 32)
    parts = in_parts(model, x, BANDS, 1)
    graph = parts.program.graph
    inside = [n for n in graph.nodes if n.op == "call_function" and n not in parts.joins]
    steady = [n for n in inside if n.target is torch.ops.aten.conv2d.default][9:-9]
    assert {fake(n).shape[2] for n in steady} == {1}
    assert max(fake(n).shape[2] for n in inside) <= 3 + 4  # the first band computes what the layers are ahead
    (join,) = parts.joins
    assert parts.outside == {join, next(iter(graph.find_nodes(op="placeholder")))}
    rows = [at[2] for part, joins in parts.writes.items() for _, at in joins for _ in range(fake(part).shape[2])]
    assert sorted(parts.writes[part][0][1][2] for part in parts.writes) == sorted(set(rows))
    assert sum(fake(part).shape[2] for part in parts.writes) == 32


def test_calls_without_a_form_in_calls_run_on_full_values() -> None:
    """A reflected border is no slice: the pad reads its operand in full, the others run in bands."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReflectionPad2d(2), nn.Conv2d(2, 1, 3)).double().eval()
    x = torch.randn(1, 1, 16, 16).double()
    flow = flow_in_calls(capture_at_sizes(model, (x,)), TABLE)
    uncut = [node.name for node in flow.calls if node not in flow.local]
    assert len(uncut) == 1 and "pad" in uncut[0]
    segments = told(flow, BANDS, 2)
    assert {segment.mode for segment in segments} == {BANDS, LAYERWISE}
    assert difference(model, x, build_plain(write_out(flow, segments).program)) < 1e-13
