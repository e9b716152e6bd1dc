"""One vector by columns: dense, columns and rows give the same bits, on every instruction set."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from demask.exec.tape.tape import NoPlan
from demask.kernels.cpu import gemv
from demask.kernels.llvm.isa import AVX2, AVX512, Isa, host
from demask.pilot.chains import packing
from demask.pilot.chains.chain_plan import ChainLayer, ChainPlan, LayerCounts

HOSTS = (host(), AVX512, AVX2)  # the last two as this machine has them, if it does
ISAS = [
    pytest.param(isa, id=isa.name, marks=[pytest.mark.nightly] if k else [])
    for k, isa in enumerate(HOSTS)
    if isa.lanes <= host().lanes and isa.triple == host().triple
]
SIZES = ((37, 67), (1, 1), (130, 300), (16, 16), (257, 33))


def drawn(columns: int, rows: int, *, zeros: float, seed: int = 0) -> tuple[ChainLayer, Tensor]:
    """A layer and three inputs, of which a share is zero."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn((rows, columns), generator=draw)
    bias = torch.randn(rows, generator=draw)
    x = torch.randn((3, columns), generator=draw)
    x = x * (torch.rand((3, columns), generator=draw) >= zeros)
    return ChainLayer(weight, bias, True), x


def chained(layer: ChainLayer, x: Tensor) -> Tensor:
    """The product as the kernel promises it: a chain of fused multiply-adds (in float64, which
    holds a product of two float32 exactly, rounded to float32 once per step but for double
    rounding, which `close` allows for)."""
    found = torch.zeros(x.shape[0], layer.weight.shape[0], dtype=torch.float64)
    for k in range(x.shape[1]):
        found = (found + x[:, k : k + 1].double() * layer.weight[:, k].double()).float().double()
    bias = 0 if layer.bias is None else layer.bias.double()
    return torch.relu(found + bias).float()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def test_tiles_of_rows_waste_little() -> None:
    sizes = [gemv.vectors_of(rows, AVX512, 16) for rows in (10, 17, 768, 3072, 4096)]
    assert sizes == [1, 2, 12, 16, 16]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_columns_have_the_bits_of_the_dense_product(isa: Isa, size: tuple[int, int]):
    for zeros, threads in product((0.0, 0.7, 1.0), (1, 2)):
        layer, x = drawn(*size, zeros=zeros)
        dense = ChainPlan([layer], ["dense"], threads, isa)(x)
        assert torch.equal(bits(ChainPlan([layer], ["columns"], threads, isa)(x)), bits(dense))
        assert torch.allclose(dense, chained(layer, x), rtol=1e-5, atol=1e-5)
        exact = torch.relu(x.double() @ layer.weight.double().T + layer.bias.double())  # type: ignore[union-attr]
        assert torch.allclose(dense.double(), exact, rtol=1e-5, atol=1e-4)


def test_whole_numbers_are_exact():
    draw = torch.Generator().manual_seed(1)
    weight = torch.randint(-9, 9, (67, 130), generator=draw).float()
    x = torch.randint(-9, 9, (4, 130), generator=draw).float()
    for relu, mode in product((False, True), ("dense", "columns")):
        found = ChainPlan([ChainLayer(weight, None, relu)], [mode], 2)(x)
        assert torch.equal(found, torch.relu(x @ weight.T) if relu else x @ weight.T)


def test_signed_zeros_underflow_and_infinities_change_no_bit():
    """-0 in inputs and biases, products that underflow to -0, NaN and infinite inputs."""
    weight = torch.tensor([[-1e-30, 1.0, 0.0], [1e-30, -1.0, -0.0], [0.0, -0.0, 0.0]])
    bias = torch.tensor([-0.0, -0.0, 0.0])
    x = torch.tensor(
        [[1e-30, 0.0, 0.0], [1e-30, -0.0, -0.0], [-0.0, -0.0, -0.0], [float("nan"), 0.0, 1.0], [float("inf"), 0.0, 0.0]]
    )
    for held, relu in product((bias, None), (False, True)):
        layer = ChainLayer(weight, held, relu)
        dense = ChainPlan([layer], ["dense"], 1)(x)
        assert torch.isnan(dense[3, 0])  # NaN is not taken for a zero
        assert torch.equal(bits(ChainPlan([layer], ["columns"], 1)(x)), bits(dense))


def test_what_was_seen_is_what_was_there():
    layer, x = drawn(130, 300, zeros=0.8)
    seen: list[list[LayerCounts]] = []
    ChainPlan([layer], ["columns"], 2)(x, seen)
    assert [one[0].columns for one in seen] == (x != 0).sum(1).tolist()
    assert seen[0][0].rows == 300


def test_infinite_weights_have_no_plan():
    layer, _ = drawn(8, 8, zeros=0.0)
    layer.weight[3, 4] = float("inf")
    with pytest.raises(NoPlan, match="NaN or infinities"):
        ChainPlan([layer], ["columns"], 1)


def test_several_calls_at_once_have_memory_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    layer, x = drawn(130, 300, zeros=0.5)
    plan = ChainPlan([layer, ChainLayer(torch.randn(5, 300), None, False)], ["certified", "columns"], 1)
    expected = plan(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(plan, [x] * 40))


def test_tiles_hold_the_weights():
    """tile_columns()[tile, column, row] == weight[tile · rows + row, column], and 0 beyond."""
    weight = np.arange(35 * 3, dtype=np.float32).reshape(35, 3)
    found = packing.tile_columns(weight, 1, AVX512)
    assert found.shape == (3, 3, 16)
    assert np.array_equal(found.transpose(0, 2, 1).reshape(48, 3)[:35], weight)
    assert not found.transpose(0, 2, 1).reshape(48, 3)[35:].any()


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A list that leaves out a live column gives other bits."""
    layer, x = drawn(130, 67, zeros=0.5)
    dense = ChainPlan([layer], ["dense"], 1)(x)
    emit = gemv.CompactKernel.emit

    def broken(self: gemv.CompactKernel, e: object) -> None:
        monkeypatch.setattr(gemv, "below", lambda e, count: real(e, e.b.sub(count, gemv.I64(1))))
        emit(self, e)  # type: ignore[arg-type]

    real = gemv.below
    from demask.kernels.llvm.jit import CODE

    monkeypatch.setattr(gemv.CompactKernel, "emit", broken)
    monkeypatch.setattr(CODE, "known", {})
    assert not torch.equal(ChainPlan([layer], ["columns"], 1)(x), dense)
