"""Windows over each channel by itself, against torch in float64, on drawn geometry."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from demask.kernels.cpu.window import WindowKernel, WindowRunner, WindowSizes, WindowTask
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, Isa, host
from demask.kernels.llvm.jit import assembly
from guarded import guarded

DRAWS = settings(
    derandomize=True, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
F = torch.nn.functional
GARBAGE = 77.0
CLAMP, RELU = ("clamp", (-0.5, 0.75)), ("relu", ())


def narrower(lanes: int) -> Isa:
    """This machine with shorter vectors."""
    return replace(host(), name=f"{lanes} lanes", lanes=lanes, registers=16)


ISAS = [host()] + [narrower(lanes) for lanes in (8, 4) if lanes < host().lanes]


def inputs(window: WindowKernel, image: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, columns, channels], the weight [channels, 1, *size], the bias [channels]."""
    g = torch.Generator().manual_seed(seed)
    c = window.channels
    x, weight = torch.randn(*image, c, generator=g), torch.randn(c, 1, *window.size, generator=g)
    return x, weight, torch.randn(c, generator=g)


def expected(
    window: WindowKernel,
    pad: tuple[int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    onto: Tensor | None = None,
) -> Tensor:
    """What torch makes of it in float64 [rows, columns, channels]."""
    image = x.double().permute(2, 0, 1)[None]
    size, step, dilation = window.size, window.step, window.dilation
    if window.mode == "max":
        lowest = F.pad(image, (pad[1], pad[1], pad[0], pad[0]), value=-torch.inf)
        made = F.max_pool2d(lowest, size, step, 0, dilation)
    else:
        if window.mode == "mean":
            weight, bias = torch.full_like(weight, 1 / window.divisor), None
        wide = None if bias is None else bias.double()
        made = F.conv2d(image, weight.double(), wide, step, pad, dilation, window.channels)
    made = made[0].permute(1, 2, 0)
    made = made if onto is None else made + onto.double()
    name, numbers = window.act or ("", ())
    return made.relu() if name == "relu" else made.clamp(*numbers) if name == "clamp" else made


def close(made: Tensor, true: Tensor) -> None:
    """Within 64 units in the last place of the largest: one order of a sum of up to 49 terms."""
    finite = true.isfinite()
    assert torch.equal(made.double()[~finite], true[~finite])
    if finite.any():
        gap = (made.double() - true)[finite].abs().max()
        assert gap <= 64 * torch.finfo(torch.float32).eps * true[finite].abs().max().clamp(min=1e-9)


def places(x: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    return (x.data_ptr(), out.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())


def sizes(x: Tensor, out: Tensor, pad: tuple[int, int]) -> WindowSizes:
    return WindowSizes(*x.shape[:2], *out.shape[:2], x.stride(0), out.stride(0), *pad)


def pair(low: int, high: int):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def drawn(draw) -> tuple[WindowKernel, tuple[int, int], tuple[int, int]]:
    """A window, the sizes of an image and its padding."""
    channels = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 10, 16, 17, 32, 33, 64, 67, 70]))
    mode = draw(st.sampled_from(["conv", "conv", "mean", "max"]))
    size, step, dilation = draw(pair(1, 7)), draw(pair(1, 3)), draw(pair(1, 2))
    act = draw(st.sampled_from([None, RELU, CLAMP]))
    add = mode == "conv" and draw(st.booleans())
    image, pad = draw(st.tuples(st.integers(1, 20), st.integers(1, 50))), draw(pair(0, 5))
    reach = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
    assume(all(n + 2 * p > r for n, p, r in zip(image, pad, reach, strict=True)))
    return WindowKernel(size, step, dilation, channels, mode, 5, act, add), image, pad


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@settings(DRAWS, max_examples=20)
@given(drawn(), st.booleans(), st.integers(1, 3))
def test_drawn_geometry(isa, geometry, biased, threads):
    """A slice of a longer block is filled, and nothing beside it."""
    window, image, pad = geometry
    x, weight, bias = inputs(window, image)
    bias = bias if biased and window.mode == "conv" else None
    true = expected(window, pad, x, weight, bias)
    rows, columns, channels = true.shape
    block = torch.full((rows + 2, columns + 3, channels), GARBAGE)
    out = block[1:-1, 1 : columns + 1]
    onto = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.copy_(onto)
    wide = torch.full((image[0], image[1] + 2, channels), torch.nan)
    wide[:, 1:-1] = x
    x = wide[:, 1:-1]
    task = WindowTask(window, sizes(x, out, pad), threads, isa)
    task.run(places(x, out, weight, bias))
    close(out, expected(window, pad, x, weight, bias, onto if window.add else None))
    out.fill_(GARBAGE)
    assert bool((block == GARBAGE).all())


GUARDED = [
    WindowKernel((3, 3), (1, 1), (1, 1), 3),
    WindowKernel((3, 3), (1, 1), (1, 1), 32, act=RELU),
    WindowKernel((5, 3), (1, 1), (1, 2), 67, add=True),
    WindowKernel((3, 3), (2, 2), (1, 1), 10),
    WindowKernel((2, 2), (2, 2), (1, 1), 16, "max"),
    WindowKernel((3, 5), (1, 1), (1, 1), 1, "mean", 15),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("end", [True, False], ids=["end", "beginning"])
@pytest.mark.parametrize("window", GUARDED, ids=str)
def test_kernels_stay_in_their_buffers(window, end, isa):
    for image, pad in (((9, 40), (1, 1)), ((6, 7), (0, 0)), ((8, 33), (2, 1))):
        parts = inputs(window, image)
        true = expected(window, pad, *parts)
        x, weight, bias = (guarded(t, end) for t in parts)
        out = guarded(torch.zeros(true.shape), end)
        WindowTask(window, sizes(x, out, pad), 2, isa).run(places(x, out, weight, bias))
        close(out, true)


@pytest.mark.parametrize("window", GUARDED, ids=str)
def test_a_value_does_not_depend_on_its_part(window):
    """Bit for bit: all rows at once, some of them, and by several threads."""
    image, pad = (24, 70), (1, 1)
    x, weight, bias = inputs(window, image)
    shape = expected(window, pad, x, weight, bias).shape
    whole = torch.zeros(shape)
    WindowTask(window, sizes(x, whole, pad), 1, host()).run(places(x, whole, weight, bias))
    for threads in (2, 3, 7):
        made = torch.zeros(shape)
        WindowTask(window, sizes(x, made, pad), threads, host()).run(places(x, made, weight, bias))
        assert torch.equal(made, whole)
    for begin, end in ((0, 1), (0, 5), (3, 9), (shape[0] - 2, shape[0])):
        low = begin * window.step[0] - pad[0]
        high = (end - 1) * window.step[0] - pad[0] + (window.size[0] - 1) * window.dilation[0] + 1
        part = x[max(low, 0) : min(high, image[0])]
        made = torch.zeros(end - begin, *shape[1:])
        given_ = sizes(part, made, (max(-low, 0), pad[1]))
        WindowTask(window, given_, 1, host()).run(places(part, made, weight, bias))
        assert torch.equal(made, whole[begin:end])


@pytest.mark.parametrize("planted", ["top", "left", "rows_in"])
def test_a_planted_fault_is_seen(planted):
    window, pad = GUARDED[0], (1, 1)
    x, weight, bias = inputs(window, (9, 40))
    true = expected(window, pad, x, weight, bias)
    out = torch.zeros(true.shape)
    wrong = sizes(x, out, pad)
    change = -1 if planted == "rows_in" else 1
    wrong = wrong._replace(**{planted: getattr(wrong, planted) + change})
    WindowTask(window, wrong, 1, host()).run(places(x, out, weight, bias))
    with pytest.raises(AssertionError):
        close(out, true)


@pytest.mark.parametrize("mode", ["conv", "mean", "max"])
@pytest.mark.parametrize("act", [None, RELU, CLAMP])
def test_what_is_no_number_stays(mode, act):
    window = WindowKernel((3, 3), (1, 1), (1, 1), 3, mode, 9, act)
    x, weight, bias = inputs(window, (8, 30))
    clean = expected(window, (1, 1), x, weight, bias)
    x[4, 9, 1] = torch.nan
    out = torch.zeros(8, 30, 3)
    WindowTask(window, sizes(x, out, (1, 1)), 1, host()).run(places(x, out, weight, bias))
    reached = torch.zeros(8, 30, 3, dtype=torch.bool)
    reached[3:6, 8:11, 1] = True
    assert torch.equal(out.isnan(), reached)
    close(out[~reached], clean[~reached])


def test_a_runner_serves_threads_and_sizes_at_once():
    window = WindowKernel((3, 3), (1, 1), (1, 1), 10)
    runner, wrong = WindowRunner(window), []

    def work(seed: int) -> None:
        for k in range(20):
            x, weight, bias = inputs(window, (20 + k % 3, 30 + seed), seed)
            out = torch.zeros(x.shape)
            runner.run(sizes(x, out, (1, 1)), 2, places(x, out, weight, bias))
            try:
                close(out, expected(window, (1, 1), x, weight, bias))
            except AssertionError as error:
                wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_kernels_compile_for_other_machines(isa):
    words = {"AVX-512": ("vfmadd", "zmm"), "AVX2": ("vfmadd", "ymm"), "NEON": ("fmla", "v0.4s")}
    for channels, step in ((32, 1), (3, 1), (10, 2)):
        text = assembly([WindowKernel((3, 3), (step, step), (1, 1), channels)], isa)
        assert all(word in text for word in words[isa.name])


@pytest.mark.skipif(AVX2.triple[:6] not in host().triple or sys.platform != "linux", reason="runs on x86-64 alone")
def test_code_for_avx2_runs_here():
    if host().lanes < AVX2.lanes:
        pytest.skip("this machine has no AVX2")
    for window in GUARDED:
        x, weight, bias = inputs(window, (9, 40))
        true = expected(window, (1, 1), x, weight, bias)
        out = torch.zeros(true.shape)
        WindowTask(window, sizes(x, out, (1, 1)), 1, AVX2).run(places(x, out, weight, bias))
        close(out, true)
