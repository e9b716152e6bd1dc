"""Single dense layers: GFLOP/s of their kernels next to the peak, and rivals:
`python -m benchmarks run dense_layers`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor, nn

import demask
from benchmarks.common import limits
from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Cell, Page, Table
from benchmarks.optimize.runtime import call
from benchmarks.shrink.peers_called import compiled, openvino_module
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import SparseWeight, conv_step, linear_step
from demask.exec.tape.segment_plan import SegmentPlan
from demask.kernels.thread_team import Job
from demask.machine.clock import Timing, race
from demask.machine.describe import format_threads
from demask.sparse.segment.segment_op import segment

BENCHMARK = Benchmark(
    "dense layers: GFLOP/s of each kind next to the machine's peak, torch and two runtimes",
    "about 2 s a setting",
    needs=(BENCH,),
    quick="--networks conv_3x3_14 --threads 1 --pairs 3 --seconds 1",
)

OURS, CALL, TORCH, ORT, OPENVINO = "kernel", "call", "PyTorch", "ONNX Runtime", "OpenVINO"
#: least share of the peak in registers, by the first words of a name; on maps of 28 pixels or more
TARGETS = {"conv_3x3_56": 0.8, "conv_3x3_28": 0.8, "conv_1x1_56": 0.7, "conv_1x1_28": 0.7}
Make = Callable[[], tuple[nn.Module, Tensor]]


def conv(channels: int, out: int, kernel: int, size: int, **fields: int) -> Make:
    """A convolution with random weights, padded by half of its kernel, and an image."""

    def make() -> tuple[nn.Module, Tensor]:
        dilation = fields.get("dilation", 1)
        padding = fields.get("padding", (kernel - 1) // 2 * dilation)
        layer = nn.Conv2d(channels, out, kernel, **fields | {"padding": padding})
        return layer.eval(), torch.randn(1, channels, size, size)

    return make


def transposed(channels: int, out: int, kernel: int, size: int, stride: int, padding: int) -> Make:
    return lambda: (
        nn.ConvTranspose2d(channels, out, kernel, stride, padding).eval(),
        torch.randn(1, channels, size, size),
    )


def linear(channels: int, out: int, tokens: int) -> Make:
    return lambda: (nn.Linear(channels, out).eval(), torch.randn(tokens, channels))


LAYERS: Mapping[str, Make] = {
    "first_7x7_stride_2": conv(3, 64, 7, 224, stride=2),
    "first_3x3": conv(3, 32, 3, 224),
    "first_3x3_stride_2": conv(3, 32, 3, 224, stride=2),
    "conv_3x3_56": conv(64, 64, 3, 56),
    "conv_3x3_28": conv(128, 128, 3, 28),
    "conv_3x3_14": conv(256, 256, 3, 14),
    "conv_3x3_7": conv(512, 512, 3, 7),
    "conv_3x3_stride_2": conv(64, 128, 3, 56, stride=2),
    "conv_3x3_dilation_2": conv(128, 128, 3, 28, dilation=2),
    "conv_1x1_56": conv(64, 256, 1, 56),
    "conv_1x1_28": conv(512, 128, 1, 28),
    "conv_1x1_14": conv(1024, 256, 1, 14),
    "conv_1x1_7": conv(512, 2048, 1, 7),
    "conv_1x1_stride_2": conv(256, 512, 1, 56, stride=2),
    "grouped_3x3_28": conv(128, 128, 3, 28, groups=8),
    "grouped_3x3_14": conv(256, 256, 3, 14, groups=32),
    "depthwise_3x3_112": conv(32, 32, 3, 112, groups=32),
    "depthwise_3x3_14": conv(384, 384, 3, 14, groups=384),
    "depthwise_5x5_28": conv(240, 240, 5, 28, groups=240),
    "depthwise_5x5_7": conv(960, 960, 5, 7, groups=960),
    "transposed_2x2_stride_2": transposed(128, 64, 2, 28, 2, 0),
    "transposed_4x4_stride_2": transposed(128, 64, 4, 28, 2, 1),
    "linear_1_token": linear(1024, 1000, 1),
    "linear_64_tokens": linear(384, 1536, 64),
}


def program_of(layer: nn.Module) -> tuple[SegmentProgram, list[Tensor]]:
    """A layer as a program of one step, and its weights."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    weight = (weight.transpose(0, 1) if is_transposed else weight).flatten(1).contiguous()
    spans = SparseWeight((0, 0, weight.numel())), (1, 0, len(bias)), len(bias)
    if isinstance(layer, nn.Linear):
        return SegmentProgram(("tokens",), (linear_step(0, *spans),), (1,)), [weight, bias]
    pads = tuple((p, p) for p in layer.padding)
    step = conv_step(0, *spans, layer.kernel_size, layer.stride, pads, layer.dilation, layer.groups, is_transposed)
    return SegmentProgram(("image",), (step,), (1,)), [weight, bias]


@dataclass(frozen=True, slots=True)
class Row:
    """One layer and number of threads. flops: floating-point operations."""

    name: str
    threads: int
    flops: float
    error: float
    peak: limits.Peak
    timings: Mapping[str, Timing]

    @property
    def rate(self) -> float:
        """1e9 operations per second of the kernel."""
        return self.flops / self.timings[OURS].median / 1e9

    @property
    def share(self) -> float:
        """Of the peak with operands in registers."""
        return self.rate / self.peak.registers

    @property
    def ratio(self) -> float:
        """The time of the fastest other one over that of the call."""
        others = (self.timings[name].median for name in (TORCH, ORT, OPENVINO))
        return min(others) / self.timings[CALL].median


def kernel_alone(plan: SegmentPlan, x: Tensor, y: Tensor, threads: int) -> Callable[[], object]:
    """A call of the phases of a plan of one layer between those that convert its input and output.

    They compute borders of the layer's input and output, too.
    """
    (batch,) = plan.batches
    memory = batch.take(threads, 2)
    memory.arenas[0].slots[1:3] = [x.data_ptr(), y.data_ptr()]
    memory.job.run(threads)
    ends = np.ascontiguousarray(batch.ready.ends[threads:-threads])
    addresses = np.array([memory.arenas[0].address], np.int64)
    job = Job(batch.ready.entries, ends, threads, addresses)
    keep = plan, memory, x, y
    return lambda: (job.run(threads), keep)


def measured(name: str, threads: int, pairs: int, seconds: float, peak: limits.Peak, folder: Path) -> Row:
    """One row: all contenders in turns."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    layer, x = LAYERS[name]()
    program, weights = program_of(layer)
    text, path = program.text(), folder / f"{name}.onnx"
    demask.to_onnx(layer, path, (x,))
    graph = openvino_module().Core().read_model(str(path))
    graph.reshape(list(x.shape))
    run = compiled(graph, threads)
    with torch.no_grad():
        want, wide = layer(x), layer.double()(x.double())
        layer.float()
        plan = SegmentPlan.of(program, weights, [x], threads)
        (y,) = segment([x], weights, text)
        error = float((y - wide).abs().max() / wide.abs().max())
        calls = {
            OURS: kernel_alone(plan, x, torch.empty_like(want), threads),
            CALL: lambda: segment([x], weights, text),
            TORCH: lambda: layer(x),
            ORT: call(path, (x,), threads),
            OPENVINO: lambda: run(x),
        }
        timings = Timing.of_each(race(calls, pairs, seconds=seconds))
    outputs = x if isinstance(layer, nn.ConvTranspose2d) else want
    positions = outputs.numel() // outputs.shape[1]
    return Row(name, threads, 2.0 * layer.weight.numel() * positions, error, peak, timings)


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    with tempfile.TemporaryDirectory() as folder:
        for count in threads:
            peak = limits.peak(count)
            for name in chosen:
                bar.update(step, description=f"{name}, {count} threads")
                yield measured(name, count, pairs, seconds, peak, Path(folder))
                bar.advance(step)


HEAD = [
    "layer",
    "threads",
    "MFLOP",
    "kernel, ms",
    "GFLOP/s",
    "of the peak in registers",
    "of the peak from the first cache",
    "target",
    "call, ms",
    "PyTorch, ms",
    "ONNX Runtime, ms",
    "OpenVINO, ms",
    "fastest other over call",
    "error",
]


def cells(row: Row) -> list[Cell]:
    timings = row.timings
    return [
        row.name.replace("_", " "),
        row.threads,
        row.flops / 1e6,
        timings[OURS],
        row.rate,
        row.share,
        row.rate / row.peak.memory,
        TARGETS.get(row.name),
        *(timings[name] for name in (CALL, TORCH, ORT, OPENVINO)),
        row.ratio,
        row.error,
    ]


def page(rows: Sequence[Row]) -> Page:
    peaks = {row.threads: row.peak for row in rows}
    best = "; ".join(
        f"{format_threads(count)}: {p.registers:.1f} in registers, {p.memory:.1f} from the first "
        f"cache, {p.misaligned:.1f} from there and misaligned"
        for count, p in peaks.items()
    )
    text = f"""
Multiply-adds that this machine makes, in GFLOP/s, by loops compiled on the spot: {best}.

*Kernel*: the layer alone, of a program of one layer for `demask::segment`, with values in the
layout of the kernels, including the borders around tiles. *Call*: the op, which also converts its
input and output, as a network does once. Batch 1, float32, random weights without zeros. All
contenders of a row run in turns in one process (median, 10 %–90 % quantile). FLOP: two per
multiply-add, those of padding counted. *Asked*: the least share of the peak in registers. *Error*:
against float64, relative to the largest output. ONNX Runtime {onnxruntime.__version__}, OpenVINO
{openvino_module().__version__}."""
    ratios, slower = [row.ratio for row in rows], sum(row.ratio < 1 for row in rows)
    missed = sum(row.share < TARGETS.get(row.name, 0) for row in rows)
    summary = (
        f"a call is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the fastest of "
        f"three others, slower in {slower} of {len(rows)}; kernels reach less of the peak "
        f"than the target in {missed}"
    )
    return Page("Dense layers next to the machine's peak", [text, Table(HEAD, [*map(cells, rows)], 2)], summary)


def main() -> None:
    command("dense_layers", __doc__, rows, page, 2.0, list(LAYERS))


if __name__ == "__main__":
    main()
