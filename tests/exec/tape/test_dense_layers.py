"""Dense layers of segments: tilings, packed weights, and numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_segments import draw, sees
from torch.nn.functional import conv2d

from demask.exec.tape.layers import dense_layer
from demask.exec.tape.layers.dense_layer import DenseProblem, best_tiling, pack, split_outputs
from demask.exec.tape.segment_plan import SegmentPlan
from demask.kernels.llvm.isa import AVX2, AVX512, host
from segment_drafts import check
from sparse_cases import layer, matrix


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


@pytest.mark.parametrize("first", range(1, 70, 23))
def test_blocks_cover_the_outputs(first: int) -> None:
    for outputs in range(first, first + 23):
        blocks_cover(outputs)


def blocks_cover(outputs: int) -> None:
    for rows in range(1, 17):
        blocks = split_outputs(outputs, rows)
        assert blocks is None or rows * blocks[0] + (rows - 1) * blocks[1] == outputs
    for isa in (host(), AVX512, AVX2):
        problem = DenseProblem(((7, 5),), outputs, 33, 9, (1, 1), (2, 2))
        tiling = best_tiling(problem, isa)[1]
        sums = tiling.rows * tiling.tile[0] * tiling.tile[1]
        assert sums < isa.registers
        assert pack(np.zeros((outputs, 33, 9), np.float32), tiling).size == outputs * 33 * 9


def test_a_planted_fault_is_seen() -> None:
    program, weights = layer("image", matrix(8, 4 * 9, 1.0, dtype=torch.float32), kernel=(3, 3))
    sees(
        dense_layer,
        "pack",
        lambda real: lambda w, tiling: real(w[:, ::-1], tiling),
        lambda: check(program, weights, [draw(1, 4, 9, 9)]),
    )


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
