"""Kernels compiled for processors that need not be here: what cannot be run is compiled at
least, to the vector instructions that it should have."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from demask.kernels.cpu.csr import Wide
from demask.kernels.cpu.recurrent import RecurrentKernel, most_rows
from demask.kernels.cpu.tiles.called import NormKernel, SoftmaxKernel
from demask.kernels.cpu.tiles.dense_channels import DenseChannelsKernel
from demask.kernels.cpu.tiles.dense_tile import DenseTileKernel
from demask.kernels.cpu.tiles.depthwise_tile import DepthwiseTileKernel
from demask.kernels.cpu.tiles.mean import MeanKernel
from demask.kernels.cpu.tiles.relayout import BorderKernel, Gather, Pointwise, PoolKernel, Scatter, TransposedKernel
from demask.kernels.cpu.tiles.sparse_tile import SparseTileKernel
from demask.kernels.cpu.tiles.sparse_vector import SparseVectorKernel
from demask.kernels.cpu.tiles.value_product import ValueProductKernel
from demask.kernels.cpu.tiles.winograd_tile import WinogradTileKernel
from demask.kernels.llvm.emitter import Kernel
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, Isa, host
from demask.kernels.llvm.jit import assembly
from demask.kernels.thread_team import TeamWork
from segment_drafts import RELU

GELU, SILU, EPS = ("gelu", ()), ("silu", ()), 1e-5
VECTORS = {"AVX-512": {"vfmadd", "zmm"}, "AVX2": {"vfmadd", "ymm"}, "NEON": {"fmla", "v0.4s"}}
# What a processor that runs these tests compiles for the others too: one kernel of each class.
ONE_OF_EACH = [
    SparseTileKernel((0, 1, 2), (0, 1, 2), (0, 3, 6), 2, GELU),
    DenseTileKernel((0, 1, 2), (0, 1, 2), (0, 3, 6), (0, 1, 8), 4, SILU),
    DenseChannelsKernel(((0, 1, 3), (0, 1)), 4, (2, 1), (0, 1, 2), True, GELU, 0, 1),
    ValueProductKernel(4, 2, True),
    SoftmaxKernel(True),
    NormKernel(True, EPS, 2),
    TransposedKernel(True),
    MeanKernel(((0, 1), (2, 3))),
    TeamWork(True),
]
OTHERS = [  # other numbers, forms and types
    SparseTileKernel((0,), (0,), None, 4, SILU, "bfloat16", True),
    SparseTileKernel((0, 9), (0, 1), None, 1, ("gelu_tanh", ()), "int8"),
    SparseVectorKernel(True, ("hardswish", ()), "int8"),
    SparseVectorKernel(False, None, "bfloat16"),
    DenseTileKernel((0, 1, 2), (0, 1, 2), (0, 3, 6), (0, 1, 2), 4, GELU),
    DenseTileKernel((0, 1), (0, 1), None, (0,), 3, None, 4),
    DenseTileKernel((0,), (0,), None, (0,), 16, None, 4),
    DenseTileKernel((0, 2, 9), (0, 1, 2), None, (0, 4), 2, RELU, 0),
    DenseChannelsKernel(((0,),), 1, (3,), (0,), False, None, 4),
    DenseChannelsKernel((), 0, (1,), (0,), False, RELU),
    DepthwiseTileKernel(((0, 0, 1, 7),), ((0, 2, 4),) * 2, (2, 2), (20, 7), SILU),
    ValueProductKernel(1, 8, False),
    NormKernel(False, EPS, 0),
    Gather(),
    Scatter(),
    TransposedKernel(False),
    PoolKernel((0, 1, 5), True),
    PoolKernel((0, 7), False),
    Pointwise(("tanh", ()), True),
    TeamWork(False),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_code_for_other_processors(isa: Isa) -> None:
    """Processors whose vectors are no wider than here run the kernels of the other tests."""
    lanes = ((*range(1, isa.lanes), -1),)
    kernels = [
        *ONE_OF_EACH,
        BorderKernel(lanes, ((0, 0, 9, 1), (0, 3, 40, 30))),
        DepthwiseTileKernel(
            ((0, 0, 1, 3), (1, 0, 1, 3)),
            ((-1, 0, 1), (0, 1)),
            (1, 1),
            (3, 3, 5),
            None,
            ((-1, 0, 4, 0), (2, 3, 1, 0)),
            lanes,
        ),
        WinogradTileKernel(6 if isa.registers == 16 else 12, 2, 4, isa.lanes - 1, True, RELU),
        RecurrentKernel("gru", most_rows("gru", isa.registers), True),
    ]
    is_run = isa.triple.partition("-")[0] == host().triple.partition("-")[0]
    if not is_run or isa.lanes > host().lanes:
        lstm = RecurrentKernel("lstm", most_rows("lstm", isa.registers), True)
        kernels += [kernel for kernel in (*OTHERS, lstm) if _fits(kernel, isa)]
    text = assembly(kernels, isa)
    wanted = {"fsqrt", "fdiv", "prfm"} if isa is NEON else {"vsqrtpd", "vdivps", "prefetch"}
    assert all(word in text for word in VECTORS[isa.name] | wanted)


@pytest.mark.parametrize("kernel", [Wide(3, 4, True), Wide(1, 4, True, 16, "bf16"), Gather(), Scatter()], ids=str)
def test_processors_without_masks_do_not_branch_for_each_lane(kernel: Kernel) -> None:
    def branches(isa: Isa) -> int:
        return len(re.findall(r"^\t(?:j\w+|b(?:\.\w+)?|[ct]bn?z)\t", assembly([kernel], isa), re.M))

    narrow = Isa("128 bits", AVX2.triple, "x86-64-v2", "", 4, 16)
    masks = branches(replace(AVX2, lanes=4))
    assert 0 < branches(NEON) <= masks + 2 and branches(narrow) <= masks + 2


def _fits(kernel: object, isa: Isa) -> bool:
    """Sixteen sums at once need more registers than AVX2 has."""
    return isa.registers > 16 or kernel != OTHERS[6]
