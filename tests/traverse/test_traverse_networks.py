"""The networks of the benchmarks of traverse, and that what measures them measures right."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import traverse_networks as networks
from benchmarks.common import ledger
from benchmarks.common.ledger import Page, Run
from benchmarks.traverse import traverse_large as large
from benchmarks.traverse import traverse_memory as memory
from benchmarks.traverse import traverse_speed as speed
from benchmarks.traverse.traverse_memory import MIB, Failed

trained = pytest.mark.skipif(not networks.WEIGHTS.exists(), reason="TAEF2's weights are not in shared/data")
pytestmark = pytest.mark.nightly  # of benchmarks, not of the library
SLOW = ("SD decoder", "SD encoder")
CASES = [
    pytest.param(name, marks=[pytest.mark.nightly] if name in SLOW else [trained] * network.trained)
    for name, network in networks.NETWORKS.items()
]

# --- networks -----------------------------------------------------------------------------------


def side(network: networks.Network) -> int:
    return max(16 * network.grows, 32)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_network_is_whole(name: str) -> None:
    network = networks.NETWORKS[name]
    model, (x,) = network.make(), network.inputs(side(network))
    y, other = model(x), model(x + 0.1)
    assert not any(module.training for module in model.modules())
    assert max(x.shape[2], y.shape[2] if y.ndim == 4 else 0) == side(network)
    assert bool(y.isfinite().all())
    assert bool((y != other).any())
    if y.ndim == 4 and name != "pool20":
        assert float(((y > 0) & (y < 1)).float().mean()) > 0.02
        assert 0.05 < float(y.std()) < 1


@pytest.mark.parametrize("name", ["SRVGG-16", "blur20", "squeeze-excite", "ResNet-18"])
def test_a_network_is_the_same_each_time(name: str) -> None:
    network = networks.NETWORKS[name]
    first, second = network.make().state_dict(), network.make().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(*(network.inputs(side(network))[0] for _ in range(2)))


@pytest.mark.parametrize(
    ("make", "count"),
    # As published: TAESD's decoder, RealESRGAN_x4plus, realesr-animevideov3, and Stable
    # Diffusion's autoencoder without its 1 x 1 convolutions at the latent.
    [
        (lambda: networks.tiny_decoder(4, pooled=False), 1_222_531),
        (networks.RRDB, 16_697_987),
        (networks.SRVGG, 621_424),
        (networks.sd_decoder, 49_490_179),
        (networks.sd_encoder, 34_163_592),
    ],
    ids=["TAESD", "RRDB-23", "SRVGG-16", "SD decoder", "SD encoder"],
)
def test_networks_have_as_many_parameters_as_published(make: Callable[[], nn.Module], count: int) -> None:
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_decoder_has_thirty_group_norms_and_one_attention() -> None:
    found = [type(module) for module in networks.sd_decoder(32).modules()]
    assert found.count(nn.GroupNorm) == 30
    assert found.count(networks.Attention) == 1


@pytest.mark.nightly
@trained
@torch.no_grad()
def test_the_latent_decodes_to_the_picture() -> None:
    """White margins, and an orange dog in front of green leaves: the left third of the picture."""
    picture = networks.taef2()(networks.latent(96, 96)).clamp(0, 1)[0]
    assert float(picture[:, :40].min()) > 0.95
    dog = picture[:, 180:215, 340:380].mean((1, 2))
    assert dog[0] > dog[1] > dog[2]
    leaves = picture[:, 80:140, 80:140].mean((1, 2))
    assert leaves[1] > leaves[0]
    assert leaves[1] > leaves[2]


@trained
def test_a_latent_file_holds_the_latent(tmp_path: Path) -> None:
    networks.write_latent(tmp_path / "latent.npy", 100, 300)
    expected = networks.latent(100, 300)
    assert np.array_equal(np.load(tmp_path / "latent.npy"), expected.numpy())
    assert torch.equal(expected[:, :, 95:], expected[:, :, 91:96].flip(2))


@pytest.mark.parametrize(("length", "count"), [(1, 4), (2, 7), (5, 5), (5, 3), (5, 24)])
def test_mirrored_is_numpys_reflection(length: int, count: int) -> None:
    expected = np.pad(np.arange(length), (0, max(count - length, 0)), mode="reflect")[:count]
    assert networks.mirrored(length, count).tolist() == expected.tolist()


def test_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16, got 40"):
        networks.NETWORKS["U-Net"].inputs(40)
    with pytest.raises(SystemExit, match=r"expected some of TAEF2, .*; got UNet"):
        networks.named(["UNet", "dense"])


# --- what measures ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["U-Net", "ResNet-18", "dw12", "SD decoder, narrow"])
@torch.no_grad()
def test_multiply_adds_are_counted(name: str) -> None:
    """As torch's own counter does, to which the attention of CPUs is unknown."""
    if name in networks.NETWORKS:
        network, unknown = networks.NETWORKS[name], 0
        model, (x,) = network.make(), network.inputs(64)
    else:
        model, x, unknown = networks.sd_decoder(32), torch.rand(1, 4, 6, 5), 2 * 30 * 30 * 128
    with FlopCounterMode(display=False) as peer:
        model(x)
    assert 2 * (memory.counted(model, x) - unknown) == peer.get_total_flops()
    assert memory.work(model, x) == memory.counted(model, x)
    with torch.inference_mode():
        assert memory.counted(model, x) == memory.work(model, x)


def test_multiply_adds_of_convolutions_in_place_are_counted() -> None:
    x, weight = torch.rand(1, 8, 9, 7), torch.rand(4, 8, 3, 3)
    with torch.no_grad(), memory.Counted() as mode:
        torch.ops.mkldnn._convolution_pointwise_.binary(
            torch.zeros(1, 4, 9, 7), x, weight, None, [1, 1], [1, 1], [1, 1], 1, "add", 1.0, None, [], ""
        )
    assert mode.macs == 4 * 9 * 7 * 8 * 9


def test_resizes_are_no_products() -> None:
    with memory.Counted() as mode:
        nn.functional.interpolate(torch.rand(1, 2, 4, 4), scale_factor=2, mode="bilinear")
    assert mode.macs == 0


def taking(at_most: int, returned: int) -> tuple[int, int]:
    """The bytes measured of a call that takes `at_most` and returns `returned`, in MiB."""

    def call() -> torch.Tensor:
        torch.ones(at_most * MIB // 4).sum()
        return torch.ones(returned * MIB // 4)

    kept = torch.ones(48 * MIB // 4)  # were the mark not reset, it would show
    del kept
    result, peak, _ = memory.peaked(call)
    return peak, memory.nbytes(result)


@pytest.mark.nightly
def test_the_peak_of_a_call_is_measured() -> None:
    for at_most, returned in ((96, 16), (16, 32)):
        peak, output = memory.fresh(taking, at_most, returned)
        assert output == returned * MIB
        assert max(at_most, returned) - 1 <= peak / MIB <= max(at_most, returned) + 8


def failing() -> None:
    raise ValueError("planted\nsecond line")


def silent(pipe) -> None:
    time.sleep(60)


@pytest.mark.nightly
def test_a_process_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert memory.fresh(failing) == Failed("ValueError: planted")
    assert memory.fresh(os._exit, 3) == Failed("ended with exit code 3")
    child = memory.Child(silent)
    assert child.answer(0.01) == Failed("not within 0 s")
    assert not child.process.is_alive()


def test_differences_of_pictures_are_counted() -> None:
    """Planted: one value off by a thousandth on the other side of a half, one by two steps."""
    expected = torch.full((1, 2, 3, 4), 100.4 / 255)
    y = expected.clone()
    y[0, 0, 1, 1] += 0.2 / 255
    y[0, 1, 2, 3] += 2 / 255
    error, equal, flips = speed.compared(y, expected.numpy())
    assert error == pytest.approx(2 / 255, rel=1e-5)
    assert (equal, flips) == (False, 2)
    assert speed.compared(expected, expected.numpy()) == (0.0, True, 0)
    assert speed.compared(torch.ones(1, 2), np.ones((1, 2)))[2] is None


# --- the scripts, with a stand-in for demask.traverse ------------------------------------------

STAND_IN = """
    import copy
    from types import SimpleNamespace

    import numpy as np
    import torch

    from demask.errors import BudgetTooSmall

    LEAST, EXTRA, SHIFT = 3_000_000, {extra}, {shift}

    class Off(torch.nn.Module):
        def __init__(self, model, plan):
            super().__init__()
            self.model = copy.deepcopy(model).to(memory_format=torch.channels_last)
            self.plan = plan

        def forward(self, x):
            torch.ones(EXTRA)
            return self.model(x) + SHIFT

    def plan(model, args, kwargs=None, *, memory):
        memory = memory if isinstance(memory, int) else 2**29
        if memory < LEAST:
            raise BudgetTooSmall("no plan", LEAST)
        return SimpleNamespace(peak=memory, macs=9, macs_untiled=9)

    def tile(model, args, kwargs=None, *, memory):
        return Off(model, plan(model, args, memory=memory))

    def stream(model, source, destination, *, memory, output):
        y = model(torch.from_numpy(np.load(source))) + SHIFT
        np.save(destination, (y.clamp(0, 1) * 255).round().byte().numpy())
"""


Rows = list[dict[str, Any]]


def run(script, monkeypatch, folder: Path, *words: str, extra: int = 0, shift: float = 0.0) -> list[Rows]:
    """The rows of each table of a script's page, by column, run with a stand-in that is wrong as
    told."""
    text = dedent(STAND_IN).format(extra=extra, shift=shift)
    (folder / "stand_in.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    pages = []

    def save(name: str, page: Page, run: Run, output: Path) -> str:
        pages.append(page)
        return ledger.save(name, page, run, output)

    monkeypatch.setattr(script, "save", save)
    output = folder / "result.md"
    shared = ["--engine", "stand_in", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["script", *words, *shared])
    script.main()
    assert output.read_text().startswith("# ")
    return [[dict(zip(table.columns, row, strict=True)) for row in table.rows] for _, table in ledger.tables(pages[-1])]


@pytest.mark.nightly
def test_the_script_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--only", "blur20", "--size", "64", "--budgets", "1", "--threads", "1"]
    ((row,),) = run(memory, monkeypatch, tmp_path, *words, extra=16 * MIB, shift=0.5)
    assert 3_000_000 <= row["budget, MiB"] * MIB <= 3_300_000
    assert row["MACs, counted"] == row["MACs, planned"] == 1
    assert row["measured, MiB"] > 60
    assert row["largest difference"] == pytest.approx(0.5)
    assert row["close"] == row["within the budget"] == "**no**"


@pytest.mark.nightly
def test_the_script_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--only", "blur20", "--sizes", "32", "--threads", "1", "--rounds", "2"]
    words += ["--contenders", "demask|NCHW", "--least", "0.001"]
    (ratios,), rows = run(speed, monkeypatch, tmp_path, *words, shift=0.5)
    by_name = {row["contender"]: row for row in rows}
    assert list(by_name) == [speed.NHWC, speed.NCHW, "demask, 512MiB"]
    assert all(row["ms"].count == 2 for row in rows)
    assert ratios["contender"] == "demask, 512MiB" and ratios[f"time over {speed.NCHW}"] > 0
    assert by_name[speed.NHWC]["largest difference"] == "equal"
    assert by_name["demask, 512MiB"]["8-bit values that differ"] == 3 * 32 * 32
    work = 2e-9 * 20 * 3 * 9 * 32 * 32
    reference = by_name[speed.NHWC]
    assert reference["GFLOP/s"] == pytest.approx(work / reference["ms"].median)


@trained
@pytest.mark.nightly
def test_the_script_of_large_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--only", "128", "--threads", "1"]
    ((row,),) = run(large, monkeypatch, tmp_path, *words, shift=1 / 255)
    assert row["of"] == 3 * 128 * 128
    assert 0 < row["8-bit values that differ"] <= row["of"]
