"""Dense layers of segments equal the same program in float64: odd sizes, any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sparse_plan import MOST, check, draw
from torch.nn.functional import conv2d

from demask.kernels.llvm.isa import AVX2, AVX512, host
from demask.sparse.plan.layers.dense import dense_layer
from demask.sparse.plan.layers.dense.dense_tiling import (
    DenseProblem,
    best_tiling,
    pack,
    split_outputs,
)
from demask.sparse.plan.segment_plan import SegmentPlan
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ConvStep
from sparse_cases import layer, matrix

GEOMETRY = [
    # kernel, stride, padding, dilation
    ((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    ((1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1)),
    ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    ((3, 2), (2, 1), ((0, 1), (1, 0)), (1, 1)),
    ((3, 3), (1, 1), ((4, 4), (4, 4)), (4, 4)),
    ((7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1)),
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("isa", MOST, ids=lambda isa: isa.name)
@pytest.mark.parametrize("place", range(len(GEOMETRY)))
def test_convolutions(place, isa, emitted):
    kernel, stride, padding, dilation = GEOMETRY[place]
    sizes = [(1, 9, 7, 3, 13), (3, 14, 14, 17, 8), (1, 33, 20, 40, 1), (5, 6, 5, 1, 31)]
    for k, (batch, height, width, inputs, outputs) in enumerate(sizes):
        density = (1.0, 0.97)[k % 2] if inputs * outputs > 100 else 1.0
        weight = matrix(outputs, inputs * kernel[0] * kernel[1], density, dtype=torch.float32)
        program, weights = layer("image", weight, draw(outputs), kernel=kernel, stride=stride,
                                 padding=padding, dilation=dilation, act=("silu", ()))  # fmt: skip
        check(program, weights, [draw(batch, inputs, height, width)], 1 + (place + k) % 3, isa)
    assert len(emitted) >= len(sizes)


def test_a_sum_is_added_and_may_be_overwritten(emitted):
    program, weights = layer("image", matrix(9, 9 * 9, 1.0, dtype=torch.float32), draw(9),
                             kernel=(3, 3), padding=((1, 1), (1, 1)), act=("relu", ()))  # fmt: skip
    first = program.steps[0]
    assert isinstance(first, ConvStep)
    fields = {"x": 1, "add": 1} | {"act": None}
    second = ConvStep(**{n: getattr(first, n) for n in first.__slots__} | fields)
    third = ConvStep(**{n: getattr(first, n) for n in first.__slots__} | {"x": 2, "add": 1})
    both = SegmentProgram(("image",), (first, second, third), (3,))
    check(both, weights, [draw(1, 9, 19, 11)])
    assert len(emitted) == 3


def test_zeros_of_a_dense_layer_propagate_nan():
    weight = matrix(8, 4 * 9, 1.0, dtype=torch.float32)
    weight[2, 4] = 0.0
    program, weights = layer("image", weight, kernel=(3, 3), padding=((1, 1), (1, 1)))
    x = draw(1, 4, 12, 12)
    x[0, 0, 5, 5], x[0, 1, 2, 2] = torch.nan, torch.inf
    (output,) = SegmentPlan.of(program, weights, [x], 1)([x])
    expected = conv2d(x.double(), weight.double().reshape(8, 4, 3, 3), padding=1)
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.isinf(), expected.isinf())


@pytest.mark.parametrize("outputs", range(1, 70))
def test_blocks_cover_the_outputs(outputs):
    for rows in range(1, 17):
        blocks = split_outputs(outputs, rows)
        assert blocks is None or rows * blocks[0] + (rows - 1) * blocks[1] == outputs
    for isa in (host(), AVX512, AVX2):
        problem = DenseProblem(((7, 5),), outputs, 33, 9, (1, 1), (2, 2))
        tiling = best_tiling(problem, isa)[1]
        sums = tiling.rows * tiling.tile[0] * tiling.tile[1]
        assert sums < isa.registers
        assert pack(np.zeros((outputs, 33, 9), np.float32), tiling).size == outputs * 33 * 9


def test_a_planted_fault_is_seen(monkeypatch):
    monkeypatch.setattr(dense_layer, "pack", lambda w, tiling: pack(w[:, ::-1], tiling))
    program, weights = layer("image", matrix(8, 4 * 9, 1.0, dtype=torch.float32), kernel=(3, 3))
    with pytest.raises(AssertionError):
        check(program, weights, [draw(1, 4, 9, 9)])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_is_packed_once_for_all_tiles(threads, monkeypatch):
    """Tiles of several sizes, and threads that share positions, read the same copy."""
    packs: list[int] = []

    def counted(weight, tiling):
        packs.append(weight.size)
        return pack(weight, tiling)

    monkeypatch.setattr(dense_layer, "pack", counted)
    program, weights = layer("image", matrix(9, 4 * 9, 1.0, dtype=torch.float32), kernel=(3, 3))
    check(program, weights, [draw(1, 4, 57, 43)], threads)
    assert sum(packs) == 9 * 4 * 9
