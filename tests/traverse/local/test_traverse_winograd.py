"""3 x 3 convolutions on parts by Winograd's filtering: the run law, in float32, bit by bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from demask.errors import BudgetTooSmall
from demask.exec import axes as parts
from demask.exec.analysis.flow import flow_of
from demask.exec.axes import Axes
from demask.exec.local import kernels as local_kernels
from demask.exec.local.kernels import CompiledWinograd
from demask.exec.planning.planner import lay_out_plan, plan_flow, plan_tiles
from demask.kernels.cpu import winograd
from demask.kernels.cpu.winograd import WinogradKernel, WinogradRunner, WinogradSizes
from demask.kernels.llvm.isa import host
from demask.ops import TABLE
from demask.ops.entry import Shape as S
from demask.traverse import tile
from demask.traverse.captured_size import captured, network_of
from demask.tune.epilogue import Epilogue, apply_activation
from local_runs import DRAWS, IMAGE, Placed, Scratch, assert_close, exact_result, image_call, run, values_of, windows

CONV = ("aten.conv2d.default", S((1, 32, 13, 18)), S((48, 32, 3, 3), True), S((48,), True), [1, 1], [1, 1])


@pytest.fixture(autouse=True)
def small_images(monkeypatch):
    """Images of the tests are smaller than those for which the kernel pays."""
    monkeypatch.setattr(local_kernels, "LEAST_POSITIONS", 1)


def placed(*call, **how) -> Placed:
    here = image_call(*call, **how)
    assert isinstance(here.kind, CompiledWinograd)
    return here


def full_of(here: Placed, values: dict, **fused) -> Tensor:
    operands = [values.get(o.value, o.value) for o in here.relation.operands]
    into = fused.pop("prefill", None)
    into = None if into is None else parts.empty(into.shape, here.axes, into.dtype).copy_(into)
    return here.run(operands, parts.full_window(here.node, here.axes), into, **fused)


def holds(*call, pair: Axes = IMAGE, seed: int = 0) -> None:
    """Parts are bit-equal to those of the whole, which is close to the sum in float64."""
    here = placed(*call, pair=pair)
    values, expected = values_of(here), exact_result(here)
    whole = full_of(here, values)
    assert_close(whole, expected)
    for window in windows(expected.shape, here.axes, random.Random(seed)):
        scratch = Scratch()
        result = run(here, window, values, scratch)
        assert torch.equal(result, parts.part(whole, here.axes, window)), window
        assert scratch.bytes == here.scratch_bytes(window)
        assert here.allocated_bytes(window) == 0


CHANNELS = st.sampled_from([32, 48, 64])


@settings(DRAWS, max_examples=25)
@given(
    CHANNELS,
    CHANNELS,
    st.tuples(*[st.integers(1, 23)] * 2),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.booleans(),
    st.sampled_from([(2, 3), (3, 2)]),
    st.integers(0, 99),
)
def test_convolutions(inner, outer, size, padding, bias, axes, seed):
    (height, width), (down, along) = size, padding
    assume(height + 2 * down >= 3 and width + 2 * along >= 3)
    weight, vector = S((outer, inner, 3, 3), True), S((outer,), True) if bias else None
    x = S((1, inner, height, width))
    holds("aten.conv2d.default", x, weight, vector, [1, 1], [down, along], pair=axes, seed=seed)


def test_an_image_without_a_batch():
    x, weight = S((32, 9, 12)), S((32, 32, 3, 3), True)
    holds("aten.conv2d.default", x, weight, None, [1, 1], [1, 1], pair=(1, 2))


@pytest.mark.parametrize("planted", ["top", "left", "rows_in", "columns_in", "skipped_rows"])
def test_a_planted_fault_breaks_the_law(monkeypatch, planted):
    honest = WinogradRunner.run

    def run_wrong(self, sizes, threads, addresses, scratch):
        change = -1 if planted in ("rows_in", "columns_in") else 1
        wrong = sizes._replace(**{planted: getattr(sizes, planted) + change})
        honest(self, wrong, threads, addresses, scratch)

    monkeypatch.setattr(WinogradRunner, "run", run_wrong)
    with pytest.raises(AssertionError):
        holds(*CONV)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", ["relu", "swish", "leaky_relu"])
def test_sums_and_activations_are_fused(name, add):
    here = placed(*CONV)
    after = Epilogue(name, (0.1,) if name == "leaky_relu" else ())
    values, other = values_of(here), torch.randn(1, 48, 13, 18)
    expected = exact_result(here) + other.double() * add
    fused = {"after": after, "add": add}
    whole = full_of(here, values, prefill=other, **fused)
    assert_close(whole, apply_activation(after, expected))
    for window in windows(expected.shape, here.axes, random.Random(1)):
        part = parts.part(other, here.axes, window)
        result = run(here, window, values, prefill=part, **fused)
        expected_part = parts.part(whole, here.axes, window)
        if name == "swish":  # torch rounds SiLU in another way where a vector register is not full
            torch.testing.assert_close(result, expected_part, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(result, expected_part), window


def test_results_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(winograd, "LEAST_TILES", 1)
    here, results = placed(*CONV), []
    values, before = values_of(here), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 64):  # more than the scratch memory has room for, too
            torch.set_num_threads(threads)
            results.append(full_of(here, values))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_results_do_not_depend_on_the_memory_for_blocks(monkeypatch):
    here = placed(*CONV)
    values = values_of(here)
    results = [full_of(here, values)]
    for scratch in (0, 2**17):
        monkeypatch.setattr(local_kernels, "SCRATCH", scratch)
        results.append(full_of(here, values))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_weights_are_packed_once_for_all_windows():
    here = placed(*CONV)
    values, window = values_of(here), parts.full_window(here.node, here.axes)
    weight = next(o.value for o in here.relation.operands if o.name == "weight")
    whole, packed = full_of(here, values), here.kind.pack_weight(values[weight], window)
    assert packed.nbytes == here.kind.packed_bytes
    assert torch.equal(full_of(here, values | {weight: packed}), whole)
    strided = values[weight].contiguous(memory_format=torch.channels_last)
    assert torch.equal(here.kind.pack_weight(strided, window), packed)


def test_transformed_weights_are_rounded_once():
    weight, kernel = torch.randn(32, 32, 3, 3), WinogradKernel(32, 32)
    to = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]]).double()
    expected = torch.einsum("ky,oiyx,lx->kloi", to, weight.double(), to).float()
    width = kernel.vectors(host()) * host().lanes
    packed = winograd.pack_winograd(weight, kernel).reshape(4, 4, 32 // width, 32, width)
    assert torch.equal(packed.transpose(-1, -2).reshape(4, 4, 32, 32), expected)


@pytest.mark.parametrize("doubled", [(True, False), (False, True), (True, True)])
def test_products_of_doubled_positions_are_zero(doubled):
    """Without them, results are the same bit by bit."""
    rows, columns = (2 if is_doubled else 1 for is_doubled in doubled)
    x = torch.randn(1, 32, 12 // rows, 14 // columns)
    x = x.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    weight, results = torch.randn(32, 32, 3, 3), []
    for kernel in (WinogradKernel(32, 32), WinogradKernel(32, 32, doubled)):
        scratch, into = torch.empty(2**18), torch.empty_like(x)
        packed = winograd.pack_winograd(weight, kernel)
        sizes = WinogradSizes(12, 14, 12, 14, 14 * 32, 14 * 32, -1, -1, 0, 0)
        addresses = x.data_ptr(), into.data_ptr(), packed.data_ptr(), 0
        WinogradRunner(kernel).run(sizes, 1, addresses, (scratch.data_ptr(), scratch.nbytes))
        results.append(into)
    assert torch.equal(*results)
    assert_close(results[0], torch.conv2d(x.double(), weight.double(), padding=1))


class Enlarged(nn.Module):
    """A convolution of an image that is resized along rows, columns or both."""

    def __init__(self, factors: tuple[float, float], padding: int = 1):
        super().__init__()
        self.factors, self.conv = factors, nn.Conv2d(32, 32, 3, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(nn.functional.interpolate(x, scale_factor=self.factors))


@pytest.mark.parametrize("factors", [(2.0, 2.0), (2.0, 3.0), (1.0, 2.0), (1.5, 1.0)])
@pytest.mark.parametrize("padding", [0, 1])
def test_resizes_by_two_are_noticed(factors, padding):
    torch.manual_seed(0)
    model, x = Enlarged(factors, padding).eval(), torch.randn(1, 32, 22, 26)
    flow = flow_of(captured(network_of(model), tuple(x.shape), torch.float32), TABLE)
    kind = next(h.kind for h in flow.local.values() if isinstance(h.kind, CompiledWinograd))
    assert kind.kernel.doubled == tuple(f == 2.0 and padding == 1 for f in factors)
    with torch.no_grad():
        assert_close(tile(model, (x,), memory="64MiB")(x), model.double()(x.double()))


def test_wild_values_stay_in_their_windows():
    here = placed(*CONV)
    values = values_of(here)
    x = next(o.value for o in here.relation.operands if o.name != "weight")
    plain = full_of(here, values)
    for wild in (float("inf"), float("nan"), 3e38):
        changed = values[x].clone(memory_format=torch.preserve_format)
        changed[0, 3, 6, 7] = wild
        result = full_of(here, values | {x: changed})
        same = torch.ones(plain.shape, dtype=torch.bool)
        same[:, :, 5:8, 6:9] = False
        assert torch.equal(result[same], plain[same])
        assert not torch.equal(result[~same], plain[~same])


@pytest.mark.parametrize(
    "call, how",
    [
        ((CONV[0], S((1, 32, 13, 18)), S((48, 32, 3, 3), True), None, [2, 2], [1, 1]), {}),
        ((CONV[0], S((1, 32, 13, 18)), S((48, 32, 3, 3), True), None, [1, 1], [2, 2], [2, 2]), {}),
        ((CONV[0], S((1, 32, 13, 18)), S((48, 16, 3, 3), True), None, [1, 1], [1, 1], [1, 1], 2), {}),
        ((CONV[0], S((1, 32, 13, 18)), S((48, 32, 3, 1), True), None), {}),
        ((CONV[0], S((1, 32, 13, 18)), S((3, 32, 3, 3), True), None), {}),
        ((CONV[0], S((1, 33, 13, 18)), S((64, 33, 3, 3), True), None), {}),
        ((CONV[0], S((2, 32, 13, 18)), S((48, 32, 3, 3), True), None), {}),
        (CONV, {"pair": (2, None)}),
        (CONV, {"dtype": torch.float64}),
    ],
)
def test_other_calls_run_by_other_kernels(call, how):
    assert not isinstance(image_call(*call, **how).kind, CompiledWinograd)


def test_a_machine_without_kernels_runs_torchs_ops(monkeypatch):
    monkeypatch.setattr(local_kernels, "compiles", lambda: False)
    assert not isinstance(image_call(*CONV).kind, CompiledWinograd)


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers, nn.Conv2d(32, 32, 3)).eval()


def test_bands_and_workers_are_bit_equal():
    model, x = deep(), torch.randn(1, 32, 401, 210)
    plans = (("512MiB", 1), ("11.5MiB", 1), ("10.5MiB", 1), ("64MiB", 2), ("64MiB", 3))
    tiles = [tile(model, (x,), memory=memory, workers=workers) for memory, workers in plans]
    assert len({str(t.plan.segments) for t in tiles}) > 3  # else this tests nothing
    with torch.no_grad():
        results = [t(x) for t in tiles]
        assert_close(results[0], model.double()(x.double()))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_budgets_that_are_too_small_for_the_kernels_run_torchs_ops():
    model, shape = deep(), (1, 32, 150, 90)
    flow = flow_of(captured(network_of(model), shape, torch.float32), TABLE)
    assert flow.compiler_bytes and not flow.without_compiler.compiler_bytes
    with pytest.raises(BudgetTooSmall) as refused:
        plan_tiles(flow, 1)
    least = refused.value.least
    assert plan_flow(flow, int(least * 1.01))[0] is flow
    other, plan, layout = plan_flow(flow, int(least * 1.01), compiles=True)
    assert not other.compiler_bytes and layout.peak <= plan.budget
    assert lay_out_plan(flow, replace(plan, budget=2**40))[0] is flow
    tight = replace(plan, budget=layout.peak, peak=layout.peak)
    loaded, again = lay_out_plan(flow, tight)
    assert again.peak <= tight.budget and (not loaded.compiler_bytes or again.peak < layout.peak)
