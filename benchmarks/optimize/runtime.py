"""Masked ONNX files in ONNX Runtime, as they are and slimmed: `python -m benchmarks run runtime`.

Writes benchmarks/results/runtime.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor

import demask
import networks
from benchmarks.common.catalog import DEV, SHARED_DATA, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Cell, Page, Table
from benchmarks.shrink import encoder, residual
from demask.machine.clock import Timing, race
from demask.machine.describe import format_counts
from demask.optimize_onnx import deploy

BENCHMARK = Benchmark(
    "masked ONNX files in ONNX Runtime, original and slimmed",
    "at most 20 s a setting",
    needs=(DEV, SHARED_DATA),
    quick="--networks MobileNetV2 --threads 1 --pairs 3 --seconds 2",
)

FACES = Path(__file__).parents[3] / "shared" / "data" / "ultraface_rfb_320.onnx"
MASKED = 0.4  # of the channels of each convolution of the face detector


@dataclass(frozen=True, slots=True)
class Row:
    """One file, one number of threads. error: relative to the largest output, in the runtime."""

    network: str
    threads: int
    report: demask.Report
    form: str
    error: float
    original: Timing
    minimal: Timing
    result: Timing

    @property
    def speed(self) -> float:
        """The time of the original file over that of the one that was written."""
        return self.original.median / self.result.median


def faces(path: Path, *, constants: bool) -> tuple[Tensor, ...]:
    """The face detector with masked channels. constants: its weights are no inputs of the graph,
    as they are in the file, where that prevents the runtime from fusing norms into them."""
    model, generator = onnx.load(FACES), np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 4:
            weight = onnx.numpy_helper.to_array(tensor).copy()
            weight[generator.permutation(len(weight))[: int(MASKED * len(weight))]] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    if constants:
        names = {tensor.name for tensor in model.graph.initializer}
        inputs = [port for port in model.graph.input if port.name not in names]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 8
    onnx.save(model, path)
    return (torch.randn(1, 3, 240, 320),)


def torchvision(path: Path, name: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    model = networks.mask(networks.built(name, generator), generator)
    image = torch.randn(1, 3, 224, 224)
    demask.to_onnx(model.eval(), path, (image,))
    return (image,)


def cifar(path: Path) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    model = residual.network("ResNet-56", generator)
    image = torch.randn(1, 3, 32, 32)
    masked = residual.cifar.masked(model, generator, shifts=True)
    demask.to_onnx(masked.eval(), path, (image,))
    return (image,)


def bert(path: Path) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    model, _ = encoder.masked(encoder.encoder("sdpa"), torch.Generator().manual_seed(0))
    ids = torch.randint(0, 30522, (1, 128))
    demask.to_onnx(model.eval(), path, (ids,))
    return (ids,)


FILES: Mapping[str, Callable[[Path], tuple[Tensor, ...]]] = {
    "UltraFace RFB-320": lambda path: faces(path, constants=False),
    "the same, weights no inputs": lambda path: faces(path, constants=True),
    "ResNet-50": lambda path: torchvision(path, "resnet50"),
    "MobileNetV2": lambda path: torchvision(path, "mobilenet_v2"),
    "ResNet-56 (CIFAR)": cifar,
    "encoder, 1 x 128 tokens": bert,
}


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    with tempfile.TemporaryDirectory() as folder:
        original, minimal, result = (Path(folder) / f"{n}.onnx" for n in ("original", "minimal", "result"))
        for name in chosen:
            bar.update(step, description=f"exporting {name}")
            inputs = FILES[name](original)
            read = partial(demask.from_onnx, original)
            deploy(read, inputs, minimal, file=original, minimal=True)
            for count in threads:
                bar.update(step, description=f"{name}, {count} threads")
                deployed = deploy(read, inputs, result, file=original, threads=count)
                calls = {
                    kind: call(path, inputs, count)
                    for kind, path in (("original", original), ("minimal", minimal), ("result", result))
                }
                timings = Timing.of_each(race(calls, pairs, seconds=seconds))
                same = deployed.slim.demasked.after == deployed.slim.demasked.before
                form = "as it was" if same else deployed.slim.demasked.decisions[0].chosen
                yield Row(
                    name,
                    count,
                    demask.report(deployed.slim),
                    form,
                    deployed.error or 0.0,
                    *(timings[kind] for kind in calls),
                )
                bar.advance(step)


def call(path: Path, inputs: Sequence[Tensor], threads: int) -> Callable[[], object]:
    """A call of a file in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: session.run(None, feed)


HEAD = [
    "network",
    "threads",
    "parameters",
    "MACs left",
    "original, ms",
    "minimal, ms",
    "slim, ms",
    "speed",
    "what was written",
    "difference",
]


def cells(row: Row) -> list[Cell]:
    before, after = row.report.before, row.report.after
    return [
        row.network,
        row.threads,
        f"{before.parameters:,} → {after.parameters:,}",
        after.macs / before.macs,
        row.original,
        row.minimal,
        row.result,
        row.speed,
        row.form,
        row.error,
    ]


def page(rows: Sequence[Row]) -> Page:
    counts = format_counts(t for row in rows for t in (row.original, row.minimal, row.result))
    slower = sum(row.speed < 1 for row in rows)
    text = f"""
*Original*: the masked file, in ONNX Runtime {onnxruntime.__version__}. *Minimal*: `demask slim
--minimal`, every width as small as it can be. *Slim*: `demask slim`, which measures widths in
multiples of 1, 4, 8 and 16, and constants that enter padded windows computed or added as maps, and
writes the file as it was where nothing is faster. UltraFace: a trained face detector,
{MASKED:.0%} of the channels of each convolution masked, shifts of norms nonzero; its file lists all
weights as inputs, which prevents the runtime from fusing norms, so the second row has it without.
ResNet-50, MobileNetV2: random weights, half of the channels masked, norms included; ResNet-56:
trained, half of the channels, shifts nonzero; encoder: half of the heads and units. Batch 1,
float32. Milliseconds are the median (10 %–90 % quantile) of {counts} alternated calls in one
process; threads wait without spinning, which would take the cores from the next contender.
*Difference*: of the outputs, relative to the largest."""
    speeds = [row.speed for row in rows]
    summary = f"{min(speeds):.2f} to {max(speeds):.2f} times as fast; slower in {slower} of {len(rows)}"
    return Page("Masked ONNX files in ONNX Runtime", [text, Table(HEAD, [*map(cells, rows)], 2)], summary)


def main() -> None:
    command("runtime", __doc__, rows, page, 20.0, list(FILES))


if __name__ == "__main__":
    main()
