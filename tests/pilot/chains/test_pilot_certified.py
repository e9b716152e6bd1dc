"""Certificates: no row that is not zero is ever proved zero, and no bit of any output changes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from test_pilot_gemv import ISAS, bits, drawn
from torch import Tensor

from demask.exec.tape.tape import NoPlan
from demask.kernels.cpu import zero_proof as certify
from demask.kernels.llvm.isa import AVX2, Isa, host
from demask.pilot.chains import packing
from demask.pilot.chains.chain_plan import ChainLayer, ChainPlan, LayerCounts
from demask.pilot.simplifiers.rounding import quantized

MODES = ("certified", "two")


def seen_of(layer: ChainLayer, x: Tensor, mode: str, isa: Isa | None = None) -> list[LayerCounts]:
    """What a mode saw of each input; its bits are those of the dense product."""
    seen: list[list[LayerCounts]] = []
    found = ChainPlan([layer], [mode], 2, isa)(x, seen)
    assert torch.equal(bits(found), bits(ChainPlan([layer], ["dense"], 1, isa)(x)))
    return [one[0] for one in seen]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_the_dense_product(isa: Isa, mode: str):
    for size, zeros in product(((37, 67), (1, 1), (300, 129)), (0.0, 0.7, 1.0)):
        layer, x = drawn(*size, zeros=zeros)
        seen_of(layer, x, mode, isa)
        seen_of(layer, x.relu(), mode, isa)
        seen_of(ChainLayer(layer.weight, None, True), x - 3, mode, isa)


def just_above(weight: Tensor, x: Tensor, ulps: int) -> Tensor:
    """Biases with which the dense product is `ulps` units of float32 above zero."""
    sums = ChainPlan([ChainLayer(weight, None, False)], ["dense"], 1)(x)[0]
    bias = -sums
    for _ in range(ulps):
        bias = torch.nextafter(bias, torch.tensor(torch.inf))
    return bias


@pytest.mark.parametrize("mode", MODES)
def test_rows_just_above_zero_are_never_proved_zero(mode: str):
    """Adversaries: the dense product is 0, 1 or 2 units in the last place above zero, or below."""
    draw = torch.Generator().manual_seed(2)
    for kind, scale in product(range(4), (1e-20, 1.0, 1e12)):
        weight = torch.randn((200, 130), generator=draw) * scale
        if kind == 1:  # one weight decides the scale, all others are rounded to 0
            weight[:, 7] = 300 * scale
        if kind == 2:  # halfway between two steps of the scale
            weight = (torch.randint(-126, 126, (200, 130), generator=draw) + 0.5) * scale
            weight[:, 0] = 127 * scale
        x = torch.randn((1, 130), generator=draw)
        x = x.relu() if kind == 3 else x
        for ulps in (0, 1, 2):
            bias = just_above(weight, x, ulps)
            seen_of(ChainLayer(weight, bias, True), x, mode)
            assert ulps == 0 or bool((ChainPlan([ChainLayer(weight, bias, True)], ["dense"], 1)(x) > 0).all())


@pytest.mark.parametrize("mode", MODES)
def test_errors_of_rounded_inputs_that_all_add_up_are_paid_for(mode: str):
    """Every input is rounded against its weight by nearly half a step: sums are just above zero."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randint(1, 128, (1, 130), generator=draw) * 1.0
    weight[0, 1] = 127
    weight *= (-1.0) ** torch.arange(130)
    u = torch.randint(1, 9, (1, 130), generator=draw)  # of 65535 levels: few, so little else rounds
    x = (u + 0.49 * weight.sign()) / certify.LEVELS
    x[0, 0], x[0, 1] = 0, 1
    layer = ChainLayer(weight, just_above(weight, x, 1), True)
    assert seen_of(layer, x, mode)[0].rows == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_bound_holds_in_exact_arithmetic(mode: str):
    """A row is proved zero only if its sum in float64 is below zero by more than nothing."""
    for seed in range(4):
        layer, x = drawn(784, 256, zeros=0.5 * (seed % 2), seed=seed)
        plan = ChainPlan([layer], [mode], 1)
        assert layer.bias is not None
        exact = x.double() @ layer.weight.double().T + layer.bias.double()
        assert not bool(((plan(x) == 0) & (exact > 1e-4)).any())


def test_most_zeros_are_proved():
    """8 bits prove more than 4 alone; two levels prove what 8 bits do."""
    layer, x = drawn(784, 1024, zeros=0.0)
    layer = ChainLayer(layer.weight, layer.bias - 20, True)  # type: ignore[operator]
    one, two = seen_of(layer, x, "certified"), seen_of(layer, x, "two")
    live = [(y > 0).sum().item() for y in ChainPlan([layer], ["dense"], 1)(x)]
    for first, second, count in zip(one, two, live, strict=True):
        zeros = 1024 - count
        assert (1024 - first.rows) / zeros > 0.8
        assert first.rows == second.rows <= second.first


def test_what_is_not_finite_is_computed():
    layer, x = drawn(64, 40, zeros=0.0)
    for k, value in enumerate((float("nan"), float("inf"), -float("inf"), 3e38)):
        held = x.clone()
        held[0, k] = value
        for mode in MODES:
            assert seen_of(layer, held, mode)[0].rows == 40


def test_dead_rows_are_proved():
    weight, x = torch.zeros(40, 64), torch.rand(1, 64)
    for mode in MODES:
        assert seen_of(ChainLayer(weight, None, True), x, mode)[0].rows == 0


def test_certificates_need_a_relu():
    layer, _ = drawn(8, 8, zeros=0.0)
    with pytest.raises(NoPlan, match="ReLU"):
        ChainPlan([ChainLayer(layer.weight, None, False)], ["certified"], 1)


@pytest.mark.parametrize("how", ["madd", "mul"])
def test_all_ways_to_multiply_bytes_give_the_same_sums(how: str, monkeypatch: pytest.MonkeyPatch):
    """Whole sums are exact, so the same rows are open."""
    layer, x = drawn(300, 200, zeros=0.3)
    isa = host() if how == "mul" else AVX2
    if isa.triple != host().triple:
        pytest.skip("instructions of another processor")
    for mode in MODES:
        expected = [one.rows for one in seen_of(layer, x, mode)]
        monkeypatch.setattr(certify, "dot_instruction", lambda isa: how)
        assert [one.rows for one in seen_of(layer, x, mode, isa)] == expected
        monkeypatch.undo()


def test_constants_bound_what_they_name():
    """scale · q + center is off by at most `least`; sums in `size` and `norm` are rounded up."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn((19, 33), generator=draw).numpy()
    whole = packing.pack_8_bits(weight, None, 1, AVX2)
    named = dict(zip(certify.CONSTANTS, whole.constants.transpose(1, 0, 2), strict=True))
    held = {key: value.reshape(-1)[:19].astype(np.float64) for key, value in named.items()}
    q, _ = packing.quantize_rows(weight)
    off = np.abs(weight.astype(np.float64) - held["scale"][:, None] * q)
    assert (off.max(1) <= held["least"]).all()
    assert (np.sqrt((off**2).sum(1)) <= held["norm"]).all()
    assert (held["scale"] * np.abs(q.astype(np.float64)).sum(1) <= held["size"]).all()
    assert (np.abs(weight).max(1) <= held["largest"]).all()


def test_weights_are_rounded_as_by_the_simplifier():
    weight = torch.randn((37, 67), generator=torch.Generator().manual_seed(3))
    q, scale = packing.quantize_rows(weight.numpy())
    assert torch.equal(torch.from_numpy(q) * torch.from_numpy(scale)[:, None], quantized(weight, 8))
    assert not packing.quantize_rows(np.full((2, 3), 1e-44, np.float32))[0].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_planted_fault_is_seen(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Without the term of the rounded weights, rows above zero are proved zero."""
    real = packing.bound_constants

    def broken(*given: object) -> np.ndarray:
        found = real(*given)  # type: ignore[arg-type]
        found[:, certify.CONSTANTS.index("least")] = 0
        return found

    layer, x = drawn(300, 400, zeros=0.0)
    bias = just_above(layer.weight, x[:1], 2)
    monkeypatch.setattr(packing, "bound_constants", broken)
    with pytest.raises(AssertionError):
        seen_of(ChainLayer(layer.weight, bias, True), x[:1], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("error")
def test_sums_beyond_float32_prove_nothing_and_warn_of_nothing(mode: str):
    """Rows whose constants overflow are computed."""
    weight = torch.full((20, 64), 3e38) * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    for bias in (None, torch.full((20,), 3.4e38), torch.full((20,), -3.4e38)):
        (seen,) = seen_of(ChainLayer(weight, bias, True), torch.rand(1, 64), mode)
        assert seen.rows == 20
