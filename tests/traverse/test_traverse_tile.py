"""tile() and plan(): networks within budgets of memory, through the public names."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask
import traverse_networks as networks
from demask.errors import BadInput, BudgetTooSmall
from demask.exec.local import kernels
from demask.traverse import plan, tile
from demask.traverse.execution import run
from demask.traverse.execution.segment_executor import SegmentExecutor
from night import at_night
from tiled_networks import EPS, MIB, NETWORKS, build, least, same


def by_day(*names: str) -> list:
    """All networks, but for these at night."""
    return [*names, *at_night(*(name for name in NETWORKS if name not in names))]


@pytest.mark.parametrize("name", by_day("decoder", "gated"))
def test_the_result_within_budgets_from_the_least_to_plenty(name: str) -> None:
    model, x = build(name)
    low = least(model, x)
    for budget in (low, low + (2**30 - low) // 2000, 2**30):
        module = tile(model, (x,), memory=budget)
        assert module.plan.peak <= budget and module.plan.live + module.plan.overhead == module.plan.peak
        same(model, module, x)
        assert module.counted.macs == module.plan.macs


@pytest.mark.parametrize("name", by_day("SRVGG"))
def test_the_least_budget_does_and_less_is_refused_in_words(name: str) -> None:
    model, x = build(name)
    low = least(model, x)
    assert plan(model, (x,), memory=low).peak <= low
    with pytest.raises(BudgetTooSmall, match="no plan of this network fits"):
        plan(model, (x,), memory="5MiB")


GOLDEN = """\
1 segments; peak 21.9 MiB of 24.0 MiB (live 13.5 MiB, process 8.47 MiB); 6.795e+08 MACs (1.0000 x \
untiled); traffic 18.0 MiB
   mode   tile      steps  calls                  keeps     memory    MACs      traffic
0  bands  128 rows  9      conv2d … conv2d_1 (3)  conv2d_1  13.4 MiB  6.79e+08  18.0 MiB"""


def test_a_plan_prints() -> None:
    convs = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)
    text = str(plan(nn.Sequential(*convs), (torch.empty(1, 3, 1024, 768),), memory="24MiB"))
    assert text == GOLDEN, text


def test_plan_and_tile_agree_and_nothing_runs() -> None:
    model, x = build("decoder")
    first = plan(model, (x,), memory="32MiB")
    assert tile(model, (x,), memory="32MiB").plan == first
    assert plan(model, (torch.empty(1, 4, 20000, 16),), memory="300MiB").budget == 300 * MIB


class TwoConvolutions(nn.Module):
    """The sum of two convolutions, each of which could be fused with it."""

    def __init__(self):
        super().__init__()
        self.long, self.short = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.long(x) + self.short(x))


def test_a_sum_is_fused_into_one_of_its_convolutions() -> None:
    torch.manual_seed(0)
    model, x = TwoConvolutions().eval(), torch.randn(1, 4, 40, 30)
    for memory in (least(model, x), 2**30):
        same(model, tile(model, (x,), memory=memory), x)


# --- layouts and types ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
def test_the_layout_of_the_input_is_that_of_the_result(form) -> None:
    model, x = build("decoder")
    module = tile(model, (x,))
    assert module(x.to(memory_format=form)).is_contiguous(memory_format=form)
    same(model, module, x.to(memory_format=form))
    strided = torch.randn(1, 4, 24, 40)[..., ::2]
    same(model, module, strided)


@pytest.mark.parametrize(
    "dtype", [torch.float64, *(pytest.param(d, marks=pytest.mark.nightly) for d in EPS if d.itemsize < 8)]
)
@pytest.mark.parametrize("name", ["decoder", pytest.param("U-Net", marks=pytest.mark.nightly)])
def test_other_types(name: str, dtype: torch.dtype) -> None:
    model, x = build(name, dtype)
    for memory in (least(model, x), "64MiB"):
        same(model, tile(model, (x,), memory=memory), x)


def test_behind_the_pools_every_bit_is_torchs_in_channels_last(monkeypatch) -> None:
    """The tail of TAEF2, from its first enlargement on, by torch's convolutions: no sums over
    space."""
    monkeypatch.setattr(kernels, "compiles", lambda: False)
    torch.manual_seed(0)
    model = networks.tiny_decoder(32, pooled=True)[6:].eval()
    x = torch.randn(1, 64, 24, 32).contiguous(memory_format=torch.channels_last)
    module = tile(model, (x,), memory=least(model, x) + 4 * MIB)
    assert any(segment.mode == "bands" for segment in module.plan.segments)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(memory_format=torch.channels_last)(x)
    assert torch.equal(module(x), expected)


# --- what goes in and what comes out --------------------------------------------------------------


class Several(nn.Module):
    """A time embedding, a constant, a dict, an input handed on, a map and a pooled vector."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor, t: Tensor, mask: Tensor | None = None, *, gain: float = 1.0):
        y = self.first(x) + self.time(t)[:, :, None, None]
        y = y if mask is None else y * mask
        z = self.last(F.relu(y))
        return {"z": z * gain, "same": x, "pooled": z.mean((2, 3)), "one": torch.ones(2), "more": [y, 7, y]}


def several() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    draw = torch.randn(1, 3, 30, 22), torch.randn(1, 5), torch.randn(1, 1, 30, 22)
    return Several().eval(), *draw


def test_inputs_without_rows_are_each_images_own_or_all_images() -> None:
    model, x, t, _ = several()
    xs, ts = torch.cat([x, x + 1]), torch.cat([t, t * 2])
    module = tile(model, (xs, ts))
    for time in (ts, t):
        with torch.no_grad():
            expected, result = model(xs, time), module(xs, time)
        assert torch.equal(result["one"], torch.ones(2)) and torch.equal(result["same"], xs)
        torch.testing.assert_close(result["z"], expected["z"], rtol=0, atol=2e-6)
        torch.testing.assert_close(result["pooled"], expected["pooled"], rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match=r"input 't': the plan is for \(1, 5\), got \(3, 5\)"):
        module(xs, torch.cat([ts, t]))


def test_another_constant_than_the_examples_is_refused() -> None:
    model, x, t, _ = several()
    with pytest.raises(ValueError, match=r"input 'gain': expected 1.0, .* got 3.0"):
        tile(model, (x, t), {"gain": 1.0})(x, t, gain=3.0)


def test_several_inputs_and_outputs() -> None:
    model, x, t, mask = several()
    module = tile(model, (x, t, mask), {"gain": 2.0}, memory="13MiB")
    with torch.no_grad():
        expected, result = model(x, t, mask, gain=2.0), module(x, t, mask, gain=2.0)
    assert list(result) == list(expected) and result["more"][1] == 7
    assert torch.equal(result["same"], x) and torch.equal(result["one"], torch.ones(2))
    for key in ("z", "pooled"):
        torch.testing.assert_close(result[key], expected[key], rtol=0, atol=2e-6)
    torch.testing.assert_close(result["more"][0], expected["more"][0], rtol=0, atol=2e-6)


def test_a_result_does_not_share_memory_with_the_input() -> None:
    model, x, t, _ = several()
    module = tile(model, (x, t))
    before = x.clone()
    module(x, t)["z"].zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["autoencoder", *at_night("decoder", "U-Net")])
def test_images_of_a_batch_run_one_after_another(name: str) -> None:
    model, x = build(name)
    batch = torch.cat([x, x.flip(2), x * 0.5])
    module = tile(model, (batch[:2],), memory="64MiB")
    for count in (1, 2, 3):
        same(model, module, batch[:count])
    assert module.plan.images and module.counted.macs == 3 * module.plan.macs


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 3, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.conv(x))


@pytest.mark.parametrize(
    "mix",
    [lambda x: x - x.mean(0, keepdim=True), lambda x: x.flip(0), lambda x: x + x[:1], lambda x: x.transpose(0, 1)],
)
def test_batches_that_mix_are_refused(mix) -> None:
    with pytest.raises(BadInput, match="mixes the images of a batch"):
        tile(Mixing(mix), (torch.randn(2, 3, 9, 9),))


def test_wrong_calls_are_refused_in_words() -> None:
    model, x = build("decoder")
    module = tile(model, (x,))
    for wrong, error, words in (
        (x[:, :, :-1], ValueError, r"the plan is for \(1, 4, 24, 20\), got \(1, 4, 23, 20\)"),
        (x.double(), ValueError, "expected torch.float32, got torch.float64"),
        (None, (ValueError, TypeError), "NoneType|expected a call like"),
        (torch.cat([x, x]), ValueError, "for one image at a time, got 2"),
        (x[:0], ValueError, "expected inputs of one number of images, got"),
    ):
        with pytest.raises(error, match=words):
            module(wrong)
    for args in ((), (x, x)):
        with pytest.raises(TypeError, match="positional argument"):
            module(*args)
    for memory in ("much", -1, 0, "5"):
        with pytest.raises(BadInput):
            tile(model, (x,), memory=memory)


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(BadInput, match="no input has rows to cut"):
        tile(nn.Linear(4, 4), (torch.randn(2, 4),))


class Strange(nn.Module):
    """Calls that demask has no rule for between layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x)).cumsum(2)
        y = torch.fft.fft2(y).real
        return self.b(torch.sort(y, dim=3)[0] * 1e-3)


def test_calls_without_a_rule_run_whole() -> None:
    torch.manual_seed(0)
    model, x = Strange().double().eval(), torch.randn(1, 3, 33, 21).double()
    same(model, tile(model, (x,), memory=least(model, x)), x, ulps=256)  # of a transform


@pytest.mark.parametrize("shape", [(1, 3, 1, 40), (1, 3, 40, 1), (1, 3, 7, 5), (1, 3, 2, 2)])
def test_small_and_odd_sizes(shape) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 5, 5, padding=2, stride=2), nn.GELU()
    ).eval()
    x = torch.randn(shape)
    for memory in (least(model, x), "20MiB"):
        same(model, tile(model, (x,), memory=memory), x)


def test_training_models_run_in_eval_mode_and_record_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    x = torch.randn(1, 3, 12, 12, requires_grad=True)
    module = tile(model, (x,))
    assert model.training and not module(x).requires_grad
    same(model, module, x)


# --- its life -------------------------------------------------------------------------------------


def test_weights_are_read_at_every_call() -> None:
    model, x = build("squeeze-excite")
    module = tile(model, (x,))
    before = module(x)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.5)
    assert torch.equal(module(x), copy.deepcopy(module)(x))
    assert not torch.allclose(module(x), before)


def stored(module: nn.Module, folder) -> nn.Module:
    demask.save(module, folder / "tiled.demask")
    return demask.load(folder / "tiled.demask")


AGAIN = {
    "deepcopy": lambda module, folder: copy.deepcopy(module),
    "pickle": lambda module, folder: pickle.loads(pickle.dumps(module)),
    "save": stored,
}


@functools.cache
def tiled(name: str) -> tuple[nn.Module, Tensor]:
    model, x = build(name)
    return tile(model, (torch.cat([x, x]),), memory=least(model, x) + MIB), x


@pytest.mark.parametrize("how", AGAIN)
@pytest.mark.parametrize("name", ["decoder", *at_night("autoencoder", "U-Net")])
def test_copies_keep_plan_and_result(name: str, how: str, tmp_path) -> None:
    module, x = tiled(name)
    other = AGAIN[how](module, tmp_path)
    assert other.plan == module.plan and type(other) is not nn.Module
    assert torch.equal(other(x), module(x)) and other.counted == module.counted
    assert torch.equal(other(torch.cat([x, x])), module(torch.cat([x, x])))


# --- memory ---------------------------------------------------------------------------------------


def allocated(call) -> int:
    """Bytes that torch's allocator holds at most during a call, beside what it held before."""
    with torch.profiler.profile(profile_memory=True) as seen:
        call()
    held, most = 0, 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("name", ["decoder", "gated", *at_night("U-Net", "squeeze-excite", "SRVGG")])
def test_no_more_memory_is_used_than_the_plan_says(name: str, monkeypatch) -> None:
    model, (n, c, h, w) = NETWORKS[name][0](), NETWORKS[name][1]
    x = torch.randn(n, c, 4 * h, 4 * w)
    module, arenas = tile(model, (x,), memory=least(model, x) + MIB), []
    module(x)

    def marked(size: int) -> Tensor:
        arenas.append(torch.from_numpy(np.full(size + 64, 165, np.uint8)))
        return arenas[-1]

    monkeypatch.setattr(run, "new_memory", marked)
    results = []
    beside = allocated(lambda: results.append(module(x))) - results[0].nbytes
    (arena,) = arenas
    touched = sum(bool((page != 165).any()) for page in arena.split(4096)) * 4096
    where = module.ready().layout
    said = max(p.allocated + held for p, held in zip(where.segments, where.uncut_bytes, strict=True))
    assert 0.9 * where.size <= touched <= where.size + 4096 and where.size <= module.plan.live
    assert beside <= said + 64 * 1024


@pytest.mark.parametrize("name", by_day("gated"))
def test_every_call_is_rehearsed_where_the_budget_is_tight(name: str, monkeypatch) -> None:
    model, x = build(name)
    ran: set[str] = set()
    make = SegmentExecutor._compute

    def spied(self, k, unit, step):
        ran.add(unit.node.name)
        return make(self, k, unit, step)

    monkeypatch.setattr(SegmentExecutor, "_compute", spied)
    module = tile(model, (x,), memory=least(model, x) + MIB)
    rehearsed = set(ran)
    module(x)
    assert rehearsed == ran and ran
    ran.clear()
    tile(model, (x,), memory="1GiB")
    assert not ran


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_the_first_call_keeps_the_least_budget() -> None:
    """In a process of its own, of which a call may load code."""
    code = """
import torch, demask, demask.errors
def kib():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
torch.set_num_threads(1)
n = torch.nn
model = n.Sequential(n.Conv2d(3, 16, 3, padding=1), n.GroupNorm(4, 16), n.SiLU(),
                     n.Conv2d(16, 16, 3, padding=1), n.ReLU(), n.Conv2d(16, 3, 3, padding=1)).eval()
x = torch.randn(1, 3, 512, 512)
try:
    demask.traverse.tile(model, (x,), memory=1)
except demask.errors.BudgetTooSmall as error:
    budget = error.least
small = demask.traverse.tile(model, (x,), memory=budget)
open("/proc/self/clear_refs", "w").write("5")
before = kib()
small(x)
print(budget, 1024 * (kib() - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1] / "networks",
        check=True,
    )
    budget, used = map(int, done.stdout.split())
    assert used <= budget
