"""Parts of stages as networks of their own, on the kernels of segments: the same as the network, in the same budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import demask
from demask.errors import BadInput, BudgetTooSmall
from demask.exec.analysis.flow import capture_at_sizes, flow_of
from demask.exec.axes import part
from demask.exec.parts import can_write, uncut_operands, write_tile
from demask.exec.planning.plan import BANDS, PARTS
from demask.exec.planning.plan_memory import stage_of, steps_of
from demask.exec.tape.segment_plan import SpareOutputs
from demask.exec.tape.tape import TapeArena
from demask.graph.result.demasked_module import build_plain
from demask.kernels.llvm import availability
from demask.machine.cost import Costs
from demask.ops import TABLE, schema
from demask.traverse import plan, tile
from demask.traverse.execution import stage_parts
from demask.traverse.execution.tiled_module import Tiled
from fuzz.images import Images
from fuzz.traversed import told

pytestmark = pytest.mark.skipif(not availability.is_installed(), reason="the kernels need llvmlite")


@pytest.fixture
def only_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 8 rows are chosen wherever they are possible."""
    monkeypatch.setattr(stage_parts, "HEIGHTS", (8,))
    monkeypatch.setattr(stage_parts, "LEAST", 0)
    monkeypatch.setattr(stage_parts, "MOST", inf)
    monkeypatch.setattr(stage_parts, "GAIN", inf)
    monkeypatch.setattr(stage_parts, "ROUNDS", 1)


def modes(module: Tiled) -> list[str]:
    return [segment.mode for segment in module.plan.segments]


def error(model: nn.Module, x: Tensor, module: nn.Module) -> float:
    """The largest difference from the network in float64, of its largest value."""
    with torch.no_grad():
        exact, actual = copy.deepcopy(model).double()(x.double()), module(x)
    pairs = zip(exact, actual, strict=True) if isinstance(exact, tuple) else [(exact, actual)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("seed", range(24))
def test_tiles_of_drawn_networks_are_networks(seed: int) -> None:
    """Bit equal, as numbers are integers; every tile on its own."""
    model = Images(seed, depth=6, rank=1 + seed % 3).eval()
    flow = flow_of(capture_at_sizes(model, (model.example,)), TABLE).without_compiler
    values: dict[fx.Node, Any] = flow.constants | dict(zip(flow.inputs, (model.example,), strict=True))
    for node in flow.calls:
        values[node] = schema.call_on(node, lambda n: values[n])
    for segment in told(flow, PARTS, 5, seed=seed):
        stage = stage_of(flow, segment)
        for step in steps_of(stage, segment) if segment.mode == PARTS and can_write(stage) else ():
            windows = {v: part(values[v], flow.axes[v], (step[v].computed, step[v].columns)) for v in step}
            inputs = (*(windows[v] for v in stage.enters), *(values[v] for v in uncut_operands(stage)))
            outputs = build_plain(write_tile(stage, step))(*inputs)
            assert all(map(torch.equal, outputs, (windows[v] for v in stage.targets)))


class Residual(nn.Module):
    """Skips, a stride, another resolution joined, channels moved to pixels, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down, self.up = nn.Conv2d(8, 16, 3, 2, 1), nn.Upsample(scale_factor=2)
        self.norm, self.last = nn.BatchNorm2d(24), nn.Conv2d(24, 12, 5, padding=4, dilation=2)
        self.pool, self.act = nn.MaxPool2d(3, 1, 1), nn.PReLU(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.first(x))
        y = y + self.deep(y)
        low = self.act(self.down(self.pool(y)))
        z = self.last(self.norm(torch.cat([self.up(low), y], 1)))
        return nn.functional.pixel_shuffle(z, 2), low


NETWORKS = {
    "residual": Residual,
    "borders": lambda: nn.Sequential(
        nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(3, 8, (5, 3), (2, 1)), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=3)
    ),
    "another resolution": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3)
    ),
    "one layer": lambda: nn.Conv2d(3, 4, 7, padding=3),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "channels last"])
@pytest.mark.parametrize(("rows", "threads"), [(8, 1), (8, 2), (5, 1)])
def test_networks_in_parts(
    name: str, last: bool, rows: int, threads: int, only_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 5 rows begin at odd rows, too, where those of another resolution are read otherwise."""
    monkeypatch.setattr(stage_parts, "HEIGHTS", (rows,))
    torch.manual_seed(0)
    model, x = NETWORKS[name]().eval(), torch.randn(1, 3, 60, 44)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        module = tile(model, (x,), memory="64MiB")
        assert PARTS in modes(module)
        assert error(model, x, module) < 3e-6
        assert module.counted.steps == sum(segment.steps for segment in module.plan.segments)
        assert module.counted.macs == module.plan.macs
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("only_parts")
def test_several_images_and_what_is_not_finite() -> None:
    model, x = NETWORKS["residual"]().eval(), torch.randn(3, 3, 40, 24)
    module = tile(model, (x,), memory="64MiB")
    assert PARTS in modes(module) and error(model, x, module) < 3e-6
    x[1, 2, 17, 5] = torch.inf
    for exact, actual in zip(model(x), module(x), strict=True):
        assert torch.equal(exact.isfinite(), actual.isfinite())


@pytest.mark.usefixtures("only_parts")
def test_memory_is_the_same_with_other_threads_and_after_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are recycled by the plans that computed them, and no more of them than a call takes."""
    model, x = nn.Conv2d(32, 32, 3, padding=1).eval(), torch.randn(1, 32, 128, 128)
    module, before, most = tile(model, (x,), memory="64MiB"), torch.get_num_threads(), list[int]()
    put = SpareOutputs.put

    def counted(self: SpareOutputs, outputs: list[Tensor]) -> None:
        put(self, outputs)
        most.append(len(self.ready[False]))

    monkeypatch.setattr(SpareOutputs, "put", counted)
    (parts,) = (placed.parts for placed in module.prepared.layout.segments if placed.parts is not None)
    assert any(plan.planned for network in parts.networks.values() for plan in network.plans)  # by minimal filtering
    infinite = x.clone()
    infinite[..., 5] = torch.inf
    try:
        for threads, values in ((before, x), (before + 1, x), (before, infinite), (before, x)):
            torch.set_num_threads(threads)
            assert torch.allclose(module(values), model(values), atol=1e-5, equal_nan=True)
            assert {plan.threads for network in parts.networks.values() for plan in network.plans} == {threads}
    finally:
        torch.set_num_threads(before)
    assert set(most) == {1}


@pytest.mark.usefixtures("only_parts")
def test_a_call_maps_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all networks of its parts: at the first and the last row, and between them."""
    model, x = nn.Conv2d(3, 8, 3, padding=1).eval(), torch.randn(1, 3, 64, 48)
    module, sizes = tile(model, (x,), memory="64MiB"), list[int]()
    module(x)
    init = TapeArena.__init__

    def counted(self: TapeArena, size: int) -> None:
        sizes.append(size)
        init(self, size)

    monkeypatch.setattr(TapeArena, "__init__", counted)
    module(x)
    (parts,) = (placed.parts for placed in module.prepared.layout.segments if placed.parts is not None)
    assert len(parts.networks) == 3 and len(sizes) == 1


@pytest.mark.usefixtures("only_parts")
def test_calls_at_the_same_time() -> None:
    """They share the memory of the kernels, one after the other."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)).eval()
    inputs = [torch.randn(1, 3, 64, 96) for _ in range(8)]
    module = tile(model, (inputs[0],), memory="64MiB")
    expected = [module(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(map(torch.equal, pool.map(module, inputs), expected))


@pytest.mark.usefixtures("only_parts")
def test_parts_that_fail_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(stage_parts, "segmented", fail)
    monkeypatch.setattr("demask.failures.is_strict", lambda: False)
    tiles = plan(nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 64, 64),), memory="64MiB")
    assert PARTS not in [s.mode for s in tiles.segments] and "planted" in "".join(tiles.notes)


@pytest.mark.usefixtures("only_parts")
def test_a_plan_with_parts_in_tasks_is_refused() -> None:
    module = tile(nn.Conv2d(3, 4, 3).eval(), (torch.zeros(1, 3, 64, 64),), memory="64MiB")
    data = module.plan.to_dict()
    data["segments"][-1]["stripe"] = 16
    with pytest.raises(BadInput, match="tasks"):
        module._unarchived(data)


@pytest.mark.usefixtures("only_parts")
def test_weights_are_those_of_the_call() -> None:
    """Written in place, through `.data`, replaced, and as a module is loaded."""
    torch.manual_seed(0)
    model, x = NETWORKS["residual"]().eval(), torch.randn(1, 3, 40, 24)
    module = tile(model, (x,), memory="64MiB")
    assert PARTS in modes(module)
    module(x)
    others = dict(module.named_parameters())
    with torch.no_grad():
        model.first.weight.mul_(2)
        others["first.weight"].mul_(2)
    assert error(model, x, module) < 3e-6
    model.last.bias.data.fill_(3.0)
    others["last.bias"].data.fill_(3.0)
    assert error(model, x, module) < 3e-6
    for value in model.parameters():
        nn.init.normal_(value)
    module.load_state_dict(model.state_dict(), strict=False)
    assert error(model, x, module) < 1e-5


@pytest.mark.usefixtures("only_parts")
def test_copied_pickled_saved_and_where_nothing_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS["residual"]().eval(), torch.randn(1, 3, 40, 24)
    module = tile(model, (x,), memory="64MiB")
    expected = module(x)
    demask.save(module, tmp_path / "tiled.pt2")
    loaded = demask.load(tmp_path / "tiled.pt2")
    assert modes(loaded) == modes(module)
    for other in (loaded, copy.deepcopy(module)):
        assert all(map(torch.equal, other(x), expected))
    monkeypatch.setattr(stage_parts.llvm, "is_installed", lambda: False)
    uncompiled = demask.load(tmp_path / "tiled.pt2")
    assert all(placed.parts is None for placed in uncompiled.prepared.layout.segments)
    assert error(model, x, uncompiled) < 3e-6


@pytest.mark.usefixtures("only_parts")
def test_parts_are_within_the_budget() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)).eval()
    x = torch.randn(1, 3, 256, 256)
    parts = plan(model, (x,), memory="64MiB")
    assert {segment.mode for segment in parts.segments} == {PARTS}
    assert parts.peak <= parts.budget
    with pytest.raises(BudgetTooSmall) as refused:
        plan(model, (x,), memory="1MiB")
    for memory in (parts.peak - 1, refused.value.least):
        assert plan(model, (x,), memory=memory).peak <= memory


@pytest.mark.usefixtures("only_parts")
def test_parts_read_and_write_values_on_disk() -> None:
    """A statistic of all rows is between two stages, and the value between them has no room in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 3, 3)
    )
    x = torch.randn(1, 3, 256, 256)
    for memory, is_on_disk in (("15MiB", True), ("64MiB", False)):
        module = tile(model, (x,), memory=memory)
        assert module.plan.segments[-1].mode == PARTS and any(s.spills for s in module.plan.segments) is is_on_disk
        assert error(model, x, module) < 3e-6


def test_slower_parts_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times; and parts that multiply much twice are not timed."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)).eval()
    x = torch.randn(1, 3, 256, 256)
    ratio = 0.5
    monkeypatch.setattr(stage_parts, "LEAST", 0)
    monkeypatch.setattr(stage_parts, "_time_over_bands", lambda placed, parts: ratio)
    assert plan(model, (x,), memory="16MiB").segments[0].mode == PARTS
    ratio = 0.95
    assert plan(model, (x,), memory="16MiB").segments[0].mode == BANDS
    ratio = 0.5
    monkeypatch.setattr(stage_parts, "MOST", 1.0)
    assert plan(model, (x,), memory="16MiB").segments[0].mode == BANDS


def test_the_first_part_of_a_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It maps the memory. Times that are known are not measured again."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)).eval()
    x = torch.randn(1, 3, 256, 256)
    monkeypatch.setattr(stage_parts, "LEAST", 0)
    monkeypatch.setattr(stage_parts, "HEIGHTS", (64,))
    seconds, timed = (0.0, 0.0, 0.0), 0  # of bands, a part, the first part

    def time_calls(self: Costs, calls: Mapping[str, Callable[[], object]], *_: Any, **__: Any) -> None:
        nonlocal timed
        timed += 1
        for call in calls.values():
            call()
        self._known.update(zip(calls, seconds, strict=True))

    monkeypatch.setattr(Costs, "time_calls", time_calls)
    for first, mode in ((0.1, PARTS), (100.0, BANDS)):
        costs, seconds, timed = Costs.open(False), (1.0, 0.1, first), 0
        monkeypatch.setattr(stage_parts, "costs_of_machine", lambda threads, costs=costs: costs)
        for _ in range(2):
            assert plan(model, (x,), memory="16MiB").segments[0].mode == mode and timed == 1


@pytest.mark.usefixtures("only_parts")
def test_what_parts_do_not_compute() -> None:
    """Values in float64, statistics, and sequences whose geometry is another for each part run in bands."""
    x = torch.randn(1, 3, 40, 24)
    for model, example in (
        (nn.Conv2d(3, 4, 3).double(), x.double()),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), x),
        (nn.Sequential(nn.Upsample(size=(57, 31), mode="bilinear"), nn.Conv2d(3, 4, 3)), x),
    ):
        module = tile(model.eval(), (example,), memory="64MiB")
        assert PARTS not in modes(module) and error(model, example, module) < 3e-6
