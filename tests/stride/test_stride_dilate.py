"""A stride pushed downstream as dilation computes what the strided network does: random networks of
every op that has a rule, on targets that can slice, choose, multiply or none of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import TABLE
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.stride import dilate as grid_rules
from demask.stride import spaced_windows as grid
from demask.stride.dilate import dilate
from demask.stride.spaced_windows import SpacedAxis, is_strided
from demask.stride.targets import Target
from stride_networks import Drawn
from stride_programs import calls, ran, text

aten = torch.ops.aten
TARGETS = {
    "multiply": Target("multiply", frozenset({"dilation", "multiply"}), finite=True),
    "select": Target("select", frozenset({"dilation", "select", "multiply"})),
    "slice": Target("slice", frozenset({"dilation", "select", "slice"})),
    "none": Target("none", frozenset({"dilation"})),
}
SLICES = Target("slices", frozenset({"dilation", "select", "multiply", "slice"}))
LIMIT = 1e-12  # float64


def check(seed: int, name: str, length: int | None = None) -> str:
    """Push the stride of a random network's first layer downstream: "refused", or "done" (computes
    the same)."""
    drawn = Drawn(seed)
    program = drawn.program(drawn.rng.randint(1, 5) if length is None else length)
    target = TARGETS[name]
    x = drawn.image(poison=not target.finite)
    (expected,) = ran(program, x)
    editor = GraphEditor(program)
    before = text(program.with_graph(editor.graph))
    strides = list(filter(is_strided, editor.graph.nodes))
    first = strides[0] if seed % 3 else drawn.rng.choice(strides)
    reason = dilate(editor, first, target, TABLE)
    if reason is not None:
        assert reason
        assert text(program.with_graph(editor.graph)) == before
        assert editor.constants.keys() == program.constants.keys()
        return "refused"
    # Others may be left: before it, or behind a grid that ended where one position was left.
    while (strided := next(filter(is_strided, editor.graph.nodes), None)) is not None:
        assert strided is not first
        if dilate(editor, strided, target, TABLE) is not None:
            break
    editor.graph.lint()
    made = editor.finish()
    (found,) = ran(made, x)
    same(found, expected)
    if drawn.whole:
        assert bool(((found == expected) | expected.isnan()).all())
    return "done"


def same(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order of sums; NaN and Inf where they were."""
    assert found.shape == expected.shape
    for special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(special(found), special(expected))
    if not expected.is_floating_point():
        assert torch.equal(found, expected)
        return
    scale = float(torch.where(expected.isfinite(), expected, 0).abs().max())
    rest = torch.where(expected.isfinite(), found - expected, 0).abs().max()
    assert float(rest) <= LIMIT * max(1.0, scale)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TARGETS)
def test_random_networks_compute_the_same(name):
    said = [check(seed, name) for seed in range(50)]
    # A map that is returned needs slices, a sum masks.
    least = {"multiply": 20, "select": 26, "slice": 43, "none": 1}[name]
    assert said.count("done") >= least


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("first", range(50, 5050, 1000))
def test_many_random_networks_compute_the_same(name, first):
    for seed in range(first, first + 1000):
        check(seed, name)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def a_pad_not_widened(monkeypatch):
    on = grid.SpacedWindow.on

    def wrong(self, source):
        pads, made = on(self, source)
        front = self.before
        return (front, pads[1] + pads[0] - front), made

    monkeypatch.setattr(grid.SpacedWindow, "on", wrong)


@fault
def a_mean_over_all(monkeypatch):
    monkeypatch.setattr(grid.Emission, "masked", lambda self, x, grid, **more: self.read(x))


@fault
def a_constant_as_it_was(monkeypatch):
    even = lambda self: torch.arange(self.size) % self.count  # noqa: E731
    monkeypatch.setattr(SpacedAxis, "nearest", even)


@fault
def a_mask_that_multiplies_nan(monkeypatch):
    monkeypatch.setattr(grid.SpacedPlan, "multiplies", lambda self, x: True)


@fault
def a_view_that_forgets_an_axis(monkeypatch):
    merged = grid_rules.merge_axes
    monkeypatch.setattr(grid_rules, "merge_axes", lambda parts: merged(parts[::-1]))


@fault
def two_grids_joined(monkeypatch):
    monkeypatch.setattr(grid_rules, "_plain", lambda *args: ())


@fault
def a_last_window_that_is_lost(monkeypatch):
    on = grid.SpacedWindow.on

    def wrong(self, source):
        (front, behind), made = on(self, source)
        less = max(0, behind - self.after * (source.gap or 1))
        return (front, behind - less), SpacedAxis(made.positions, made.size - less)

    monkeypatch.setattr(grid.SpacedWindow, "on", wrong)


@fault
def a_maximum_of_zeros(monkeypatch):
    monkeypatch.setattr(grid, "LOWEST", 0.0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, name):
    FAULTS[name](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        for seed in range(100):
            for target in ("multiply", "select", "slice"):
                check(seed, target)


# --- by hand --------------------------------------------------------------------------------------


def read(model: nn.Module, *args: Tensor, shapes: Any = None) -> Program:
    return rewrite(fold_constants(functionalize(capture(model.eval(), args, None, shapes))), CANONICAL)


def pushed(model: nn.Module, x: Tensor, name: str) -> Program | str:
    """The program of a model with the stride of its first strided layer pushed down."""
    program = read(model.double(), x)
    editor = GraphEditor(program)
    first = next(n for n in editor.graph.nodes if is_strided(n))
    reason = dilate(editor, first, TARGETS[name], TABLE)
    return editor.finish() if reason is None else reason


class Block(nn.Module):
    """A residual block whose two ways are strided."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, 1, 1)
        self.short = nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True), nn.Conv2d(3, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.b(torch.relu(self.norm(self.a(x)))) + self.short(x))
        return self.head(y.mean((2, 3)))


def test_both_ways_of_a_residual_block_are_pushed():
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 3, 15, 16, dtype=torch.float64)
    program = pushed(model, x, "select")
    assert isinstance(program, Program)
    assert not any(map(is_strided, program.graph.nodes))
    assert [n.args[5] for n in calls(program, aten.conv2d.default) if len(n.args) > 5][-1:] == [[2, 2]]
    for batch in (1, 2, 5):  # the batch stays dynamic
        x = torch.randn(batch, 3, 15, 16, dtype=torch.float64)
        with torch.no_grad():
            assert torch.allclose(ran(program, x)[0], model(x), rtol=0, atol=1e-12)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(4, 6, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    )


def test_strides_compose_and_weights_behind_a_view_are_spread():
    torch.manual_seed(0)
    model, x = lenet(), torch.randn(2, 1, 28, 28, dtype=torch.float64)
    program = pushed(model, x, "multiply")
    assert isinstance(program, Program)
    assert not any(map(is_strided, program.graph.nodes))
    (linear,) = calls(program, aten.linear.default)
    assert linear.args[0].meta["val"].shape[1] == linear.args[1].meta["val"].shape[1]
    last = calls(program, aten.conv2d.default)[-1]
    assert last.args[5] == [4, 4]
    with torch.no_grad():
        assert torch.allclose(ran(program, x)[0], model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("select", nn.Sequential(nn.Conv2d(3, 4, 3, 2)), "cannot slice"),
        ("select", nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.GroupNorm(2, 4)), "a full axis"),
        ("select", nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Upsample(scale_factor=2)), "windows"),
        ("none", nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten(), nn.Linear(4 * 49, 2)), "NaN"),
        ("select", nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(2)), "overlap"),
        ("multiply", nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveMaxPool2d(1)), "windows"),
    ],
)
def test_refusals_say_why(name, model, reason):
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert reason in pushed(model, x, name)
    made = pushed(model, x, "slice")
    assert isinstance(made, Program)
    with torch.no_grad():
        assert torch.allclose(ran(made, x)[0], model(x), rtol=0, atol=1e-12)


def test_a_mean_that_nothing_can_mask_is_a_convolution():
    """Its windows read the grid alone: NaN beside it does not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(2, 3, 15, 15, dtype=torch.float64)
    x[:, :, 1::2], x[..., 1::2] = float("nan"), float("nan")
    program = pushed(model, x, "none")
    assert isinstance(program, Program)
    with torch.no_grad():
        assert torch.allclose(ran(program, x)[0], model(x), rtol=0, atol=1e-12)


def test_pools_whose_windows_may_not_overlap_are_refused_or_sliced():
    apart = {"pool_windows": "stride"}
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    program = read(model.double(), torch.randn(2, 3, 16, 16, dtype=torch.float64))
    for ops, left in (({"dilation", "select", "multiply"}, 2), ({"dilation", "slice"}, 1)):
        editor = GraphEditor(program)
        target = Target("apart", frozenset(ops), **apart)
        reason = dilate(editor, editor.calls(aten.conv2d.default)[0], target, TABLE)
        assert (reason is None) is ("slice" in ops)
        assert reason is None or "do not overlap" in reason
        assert sum(map(is_strided, editor.graph.nodes)) == left


@pytest.mark.parametrize(("size", "fits"), [(3, True), (2, False)])
def test_windows_reach_over_as_much_as_the_targets(size, fits):
    """Of a dilated pool of two taps: over three positions."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(1))
    editor = GraphEditor(read(model.double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)))
    target = Target("small", frozenset({"dilation", "select", "multiply"}), pool_size=size)
    reason = dilate(editor, editor.calls(aten.conv2d.default)[0], target, TABLE)
    assert (reason is None) is fits
    assert reason is None or "windows would cover [3, 3]" in reason


def test_a_convolution_without_a_stride_is_none():
    editor = GraphEditor(read(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)))
    (conv,) = editor.calls(aten.conv2d.default)
    assert dilate(editor, conv, TARGETS["slice"], TABLE) == "it has no stride"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_in_words_behind_a_stride(padding):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, (3, 4), padding=padding))
    x = torch.randn(2, 3, 15, 16, dtype=torch.float64)
    made = pushed(model, x, "slice")
    assert isinstance(made, Program)
    assert not calls(made, aten.conv2d.padding)
    with torch.no_grad():
        assert torch.allclose(ran(made, x)[0], model(x), rtol=0, atol=1e-12)


def test_images_without_a_batch():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)
    model, x = nn.Sequential(*layers), torch.randn(3, 15, 16, dtype=torch.float64)
    program = read(model.double(), x, shapes={})
    editor = GraphEditor(program)
    assert dilate(editor, editor.calls(aten.conv2d.default)[0], SLICES, TABLE) is None
    with torch.no_grad():
        assert torch.allclose(ran(editor.finish(), x)[0], model(x), rtol=0, atol=1e-12)


def test_a_square_root_of_what_means_nothing_is_not_multiplied_by_zero():
    """What is read is positive, what stands between is not."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1, 2)
            nn.init.ones_(self.conv.weight), nn.init.zeros_(self.conv.bias)

        def forward(self, x):
            return torch.sqrt(self.conv(x)).mean((2, 3))

    x = torch.full((2, 1, 8, 8), -4.0, dtype=torch.float64)
    x[..., ::2, ::2] = 4
    assert "cannot mask" in pushed(Root(), x, "multiply")
    made = pushed(Root(), x, "select")
    assert isinstance(made, Program)
    assert bool((ran(made, x)[0] == 2).all())


def test_windows_of_padding_alone_are_not_multiplied_by_zero():
    """A window of two positions two apart may have none between its pads: -inf, times 0."""
    model = nn.Sequential(nn.Conv2d(1, 1, 2, 2), nn.MaxPool2d(2, 1, 1), nn.AdaptiveAvgPool2d(1))
    torch.manual_seed(0)
    x = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    for name in ("multiply", "select"):
        made = pushed(model, x, name)
        with torch.no_grad():
            finite = isinstance(made, str) or bool(ran(made, x)[0].isfinite().all())
        assert finite


def test_where_a_grid_stands():
    part = SpacedAxis.even(4, 3, 11)
    assert (part.positions, part.gap, part.count, part.is_all) == ((0, 3, 6, 9), 3, 4, False)
    assert SpacedAxis.even(4, 3, 13).gap is None  # position 12 would be read as padding
    assert SpacedAxis.even(1, 3, 2).gap == 2
    assert part.valid_mask().nonzero().flatten().tolist() == [0, 3, 6, 9]
    assert part.nearest().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert grid.merge_axes([SpacedAxis.even(2, 2, 3), SpacedAxis.even(2, 1, 2)]).positions == (0, 1, 4, 5)
