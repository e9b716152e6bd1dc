"""Dense layers with output channels in lanes: the same bits as with tiles of positions, for any
size, batch and number of threads; nothing beside their memory is touched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_segments import MOST, draw, sees, stays_within_memory, weigh, widths
from torch import Tensor

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.tape import tape
from demask.exec.tape.layers import dense_layer, layer_plan
from demask.exec.tape.layers.dense_layer import (
    ChannelProblem,
    ChannelTiling,
    PositionLines,
    best_channels,
    groups_of,
    pack_channels,
)
from demask.exec.tape.segment_plan import SegmentPlan
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, Isa, host
from segment_drafts import Draft, check
from sparse_cases import layer, matrix

NEVER = (0.0, 1.0)  # factors: channels are in no lanes
PLAIN = {"kernel": (1, 1), "act": ("relu", ())}
PADDED = {"kernel": (3, 3), "padding": ((1, 1), (1, 1)), "act": ("silu", ())}
LAYERS = {
    # fields of the layer, input and output channels, batch, height, width
    "7x7": (PADDED, 9, 70, 1, 7, 7),
    "one vector": (PADDED, 5, 3, 1, 5, 3),
    "1x1": (PLAIN, 37, 130, 1, 7, 6),
    "stride": (PADDED | {"stride": (2, 2)}, 6, 33, 1, 14, 13),
    "dilation": (PADDED | {"padding": ((2, 2), (2, 2)), "dilation": (2, 2)}, 4, 17, 2, 6, 9),
    "groups": (PADDED | {"groups": 2}, 12, 40, 1, 4, 9),
    "transposed": (PADDED | {"transposed": True, "stride": (2, 2)}, 6, 20, 1, 4, 3),
    "wide": (PADDED, 3, 20, 3, 14, 14),
    "signal": (PADDED | {"kernel": (1, 3), "padding": ((0, 0), (1, 1))}, 8, 48, 2, 1, 11),
    "one position": (PADDED, 7, 40, 1, 1, 1),
}


def made(name: str) -> tuple[SegmentProgram, list[Tensor], Tensor]:
    """Program, weights and input of a layer."""
    fields, inputs, outputs, batch, height, width = LAYERS[name]
    kernel = math.prod(fields.get("kernel", (1, 1)))
    dense = matrix(outputs, inputs // fields.get("groups", 1) * kernel, 1.0, dtype=torch.float32)
    return *layer("image", dense, draw(outputs), **fields), draw(batch, inputs, height, width)


@pytest.mark.sampled(12)
@widths(MOST)
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_as_tiles(name: str, isa: Isa, always, monkeypatch) -> None:
    program, weights, x = made(name)
    plan = check(program, weights, [x], (1, 2, 3), isa, each=True)
    assert always
    for threads, factors in ((1, NEVER), (2, (math.inf, 0.0))):  # tiles alone, and both
        weigh(monkeypatch, *factors)
        (other,) = SegmentPlan.of(program, weights, [x], threads, isa)([x])
        assert torch.equal(plan([x])[0], other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2, 7, 15])
def test_tokens(count: int, always) -> None:
    """Few tokens: most lanes of a line would be empty."""
    program, weights = layer("tokens", matrix(50, 33, 1.0, dtype=torch.float32), draw(50), act=("relu", ()))
    for threads in (1, 2):
        check(program, weights, [draw(count, 33)], threads, each=True)
    assert always == [0, 0, 1]


def test_numbers_that_are_not_finite(always, monkeypatch) -> None:
    """NaN, infinity, -0 and denormals give what they give with tiles."""
    program, weights, x = made("7x7")
    x[0, 0, 2, 2], x[0, 1, 5, 5], x[0, 2], x[0, 3] = torch.nan, torch.inf, -0.0, 1e-41
    weights[0][:200] = -0.0
    (y,) = SegmentPlan.of(program, weights, [x], 1)([x])
    weigh(monkeypatch, *NEVER)
    (tiles,) = SegmentPlan.of(program, weights, [x], 1)([x])
    assert torch.equal(y.isnan(), tiles.isnan()) and bool(y.isnan().any())
    finite = torch.where(y.isnan(), 0.0, y), torch.where(tiles.isnan(), 0.0, tiles)
    assert torch.equal(*(z.view(torch.int32) for z in finite))


def test_values_in_shared_memory(always) -> None:
    """Concatenations, and rows of zeros that are the bias alone."""
    draft = Draft((2, 12, 5, 7))
    y = draft.conv(0, 24, density=1.0, act=("relu", ()))
    z = draft.conv(draft.cat(y, 0), 24, density=1.0, groups=2, add=y)
    draft.conv(draft.cat(z, y), 9, density=1.0, groups=3)
    draft.check(threads=2)
    weight = matrix(40, 8, 1.0, dtype=torch.float32)
    weight[[0, 17, 39]] = 0.0
    program, weights = layer("image", weight, draw(40), **PLAIN)
    check(program, weights, [draw(1, 8, 7, 7)], each=True)
    assert always


# ----------------------------------------------------------------------------------------- choices


class Planned(Exception):
    """The plan is there; its code is not compiled."""


def kind_of(channels: int, outputs: int, size: int) -> set[str]:
    """The kernels that compute a layer with a kernel of 3x3 by the definition, with 16 lanes and
    one thread."""
    program, weights = layer(
        "image", matrix(outputs, channels * 9, 1.0, dtype=torch.float32), kernel=(3, 3), padding=((1, 1), (1, 1))
    )
    kinds: set[str] = set()

    def record(self, isa):
        kinds.update(type(call.kernel).__name__ for phase in self.phases for calls in phase for call in calls)
        raise Planned

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Planned):
        patch.setattr(tape.Tape, "done", record)
        patch.setattr(layer_plan, "filtered_block", lambda *_: None)
        patch.setattr(layer_plan, "filtered_sizes", lambda *_: frozenset())
        SegmentPlan.of(program, weights, [draw(1, channels, size, size)], 1, AVX512)
    return {kind for kind in kinds if kind.startswith("Dense")}


def test_channels_are_in_lanes_where_positions_leave_lanes_empty() -> None:
    assert kind_of(64, 64, 7) == kind_of(64, 64, 14) == {"DenseChannelsKernel"}
    assert kind_of(64, 64, 8) == kind_of(64, 7, 7) == {"DenseTileKernel"}
    assert kind_of(64, 68, 7) == {"DenseChannelsKernel", "DenseTileKernel"}


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
@pytest.mark.parametrize("outputs", [1, 16, 17, 100, 217])
def test_sums_fit_in_registers(outputs: int, isa: Isa) -> None:
    for lines in ((isa.lanes,), (1,), (isa.lanes, 3, 0)):
        cycles, tiling = best_channels(ChannelProblem(lines, outputs, 300, 9, True), isa)
        assert cycles > 0 and 1 <= tiling.inner <= 300
        assert tiling.vectors * (tiling.most + 1) + 1 < isa.registers


def test_groups_have_each_position_once() -> None:
    for count in range(17):
        for most in range(1, 17):
            groups = groups_of(count, most)
            assert [k for own in groups for k in own] == list(range(count))
            assert all(0 < len(own) <= most for own in groups)


def test_weights_are_in_the_order_of_use() -> None:
    weight = np.arange(12 * 3 * 2, dtype=np.float32).reshape(12, 3, 2)
    packed = pack_channels(weight, ChannelTiling(4, 2, 2), 4)
    wide, thin = weight[:8].transpose(1, 2, 0), weight[8:].transpose(1, 2, 0)
    assert np.array_equal(packed, np.concatenate([wide.ravel(), thin.ravel()]))
    assert packed.ctypes.data % 64 == 0


# ----------------------------------------------------------------------------------------- kernels


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["7x7", "one vector", "stride", "groups", "one position"])
def test_nothing_beside_its_memory_is_touched(name: str, monkeypatch, always) -> None:
    monkeypatch.setattr(dense_layer, "FETCHED", 0)
    program, weights, x = made(name)
    stays_within_memory(program, weights, [x])
    assert always


# --------------------------------------------------------------------------------- planted faults


def without_a_position(real):
    def lines_of(piece, parts):
        lines = real(piece, parts)
        return PositionLines(lines.table, [lines.lanes[0][:-1], *lines.lanes[1:]])

    return lines_of


FAULTS = {
    "other weights": ("pack_channels", lambda real: lambda w, *rest: real(np.ascontiguousarray(w[:, ::-1]), *rest)),
    "lost position": ("lines_of", without_a_position),
    "positions of a group are taken for neighbors": (
        "_position_groups",
        lambda real: lambda *args: {tuple(range(len(lanes))): own for lanes, own in real(*args).items()},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, always) -> None:
    program, weights, x = made("transposed")  # lines with gaps, for 8 and 16 lanes
    if fault.startswith("positions") and host().lanes < 8:
        pytest.skip("four positions of a group are neighbors here")
    sees(dense_layer, *FAULTS[fault], lambda: check(program, weights, [x], 1))
