"""optimize() against ONNX Runtime, OpenVINO and torch.compile, each on the masked and on the
demasked network: `python -m benchmarks run executors`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import cifar
import demask
import networks
from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.command import command
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Table
from benchmarks.optimize.runtime import MASKED, call, faces
from benchmarks.shrink import encoder
from benchmarks.shrink.peers_called import compiled, openvino_module
from demask.machine.clock import Timing, race

BENCHMARK = Benchmark(
    "optimize() against ONNX Runtime, OpenVINO and torch.compile, each on both networks",
    "about 1 minute a setting",
    needs=(BENCH,),
    quick="--networks ResNet-20 --threads 1 --pairs 3 --seconds 2",
)

OURS, TORCH = "optimize()", "original in PyTorch"
RUNTIME, OPENVINO = "ONNX Runtime", "OpenVINO"
TOOLS = (RUNTIME, OPENVINO, NAME)
Setting = tuple[Callable[[], tuple[nn.Module, Tensor]], int]  # network and image, batch


def classifier(name: str, *, masked: bool = True) -> Callable[[], tuple[nn.Module, Tensor]]:
    """A torchvision network with random weights, half of its channels masked, shifts nonzero."""

    def make() -> tuple[nn.Module, Tensor]:
        generator = torch.Generator().manual_seed(0)
        model = networks.built(name, generator).eval()
        model = networks.mask(model, generator).eval() if masked else model
        return model, torch.randn(1, 3, 224, 224)

    return make


def small(depth: int, *, shifts: bool = False) -> Callable[[], tuple[nn.Module, Tensor]]:
    """A trained ResNet for CIFAR, half of its channels masked. shifts: whether norms keep theirs in
    masked channels."""

    def make() -> tuple[nn.Module, Tensor]:
        generator = torch.Generator().manual_seed(0)
        model = cifar.masked(cifar.trained(depth), generator, shifts=shifts).eval()
        return model, torch.randn(1, 3, 32, 32)

    return make


def face_detector() -> tuple[nn.Module, Tensor]:
    """A trained face detector, some channels of each convolution masked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "faces.onnx"
        (image,) = faces(path, constants=True)
        return demask.from_onnx(path).eval(), image


def token_encoder() -> tuple[nn.Module, Tensor]:
    """A MiniLM-sized encoder with random weights, half of its heads and units masked."""
    torch.manual_seed(0)
    model, _ = encoder.masked(encoder.encoder("sdpa"), torch.Generator().manual_seed(0))
    return encoder.HiddenState(model).eval(), torch.randint(0, 30522, (1, 128))


FACES, ENCODER = "UltraFace RFB-320", "encoder, 128 tokens"
TARGETS = {  # least ratios; 1.0 for others, 0.95 for unmasked ones
    "ResNet-20": 1.8,
    "ResNet-56": 2.0,
    "ResNet-56, batch 64": 2.0,
    "MobileNetV2": 1.5,
    "MobileNetV2, batch 16": 1.5,
    FACES: 1.8,
    ENCODER: 1.2,
}
NAMES = {
    "ResNet-18": "resnet18",
    "ResNet-50": "resnet50",
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3-Large": "mobilenet_v3_large",
    "ShuffleNetV2": "shufflenet_v2_x1_0",
    "EfficientNet-B0": "efficientnet_b0",
    "RegNetY-400MF": "regnet_y_400mf",
    "DenseNet-121": "densenet121",
    "SqueezeNet": "squeezenet1_1",
}
SETTINGS: Mapping[str, Setting] = {
    "ResNet-20": (small(20), 1),
    "ResNet-56": (small(56), 1),
    "ResNet-56, shifts nonzero": (small(56, shifts=True), 1),
    "ResNet-56, batch 64": (small(56), 64),
    FACES: (face_detector, 1),
    ENCODER: (token_encoder, 1),
    **{name: (classifier(of), 1) for name, of in NAMES.items()},
    "MobileNetV2, batch 16": (classifier("mobilenet_v2"), 16),
    **{f"{name}, unmasked": (classifier(of, masked=False), 1) for name, of in NAMES.items()},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One setting and number of threads. form: what optimize() chose; error: against the original
    in float64, relative to the largest output."""

    name: str
    threads: int
    form: str
    error: float
    timings: Mapping[str, Timing]

    @property
    def rival(self) -> str:
        """The fastest contender that is neither the original nor optimize()."""
        others = [name for name in self.timings if name not in (OURS, TORCH)]
        return min(others, key=lambda name: self.timings[name].median)

    @property
    def ratio(self) -> float:
        """How many times as fast as that optimize() is."""
        return self.timings[self.rival].median / self.timings[OURS].median

    def fastest(self, tool: str) -> Timing | None:
        """The faster timing of a tool, on the masked or on the demasked network."""
        timings = [timing for name, timing in self.timings.items() if name.startswith(tool)]
        return min(timings, key=lambda timing: timing.median, default=None)


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    for name in chosen:
        make, batch = SETTINGS[name]
        model, image = make()
        images = torch.cat([image, *(torch.randn_like(image) for _ in range(batch - 1))])
        with tempfile.TemporaryDirectory() as folder:
            bar.update(step, description=f"{name}: exporting")
            slim = demask.demask(model, (images,), result="graph")
            forms = {"masked": model}
            if demask.report(slim).removed:
                forms["demasked"] = slim
            for form, network in forms.items():
                demask.to_onnx(network, Path(folder, f"{form}.onnx"), (images,))
            for count in threads:
                bar.update(step, description=f"{name}, {count} threads")
                yield measured(name, forms, images, Path(folder), count, pairs, seconds)
                bar.advance(step)


def measured(
    name: str, forms: Mapping[str, nn.Module], images: Tensor, folder: Path, threads: int, pairs: int, seconds: float
) -> Row:
    """One row: all contenders in turns. forms: the network, masked and demasked; folder: with an
    ONNX file of each."""
    torch.set_num_threads(threads)
    model = forms["masked"]
    fast = demask.optimize(model, (images,), threads=threads)
    calls: dict[str, Callable[[], object]] = {OURS: lambda: fast(images)}
    calls[TORCH] = lambda: model(images)
    for form, network in forms.items():
        path = folder / f"{form}.onnx"
        calls[f"{RUNTIME}, {form}"] = call(path, (images,), threads)
        graph = openvino_module().Core().read_model(str(path))
        graph.reshape(list(images.shape))
        run = compiled(graph, threads)
        calls[f"{OPENVINO}, {form}"] = lambda run=run: run(images)
        calls[f"{NAME}, {form}"] = inductor(network, images)
    with torch.no_grad():
        error = difference(fast, model, images)
        timings = Timing.of_each(race(calls, pairs, seconds=seconds))
    return Row(name, threads, demask.report(fast).decisions[0].chosen, error, timings)


def difference(fast: nn.Module, model: nn.Module, images: Tensor) -> float:
    """The largest error of an output against the original in float64, relative to the largest of
    that output."""
    wide = tree_leaves(model.double()(images.double() if images.is_floating_point() else images))
    model.float()
    return max(
        float((y - want).abs().max() / want.abs().max())
        for y, want in zip(tree_leaves(fast(images)), wide, strict=True)
    )


HEAD = [
    "network",
    "threads",
    "original, ms",
    "optimize(), ms",
    *(f"{t}, ms" for t in TOOLS),
    "fastest",
    "ratio",
    "target",
    "what optimize() chose",
    "error",
]


def cells(row: Row) -> list[Cell]:
    return [
        row.name,
        row.threads,
        row.timings[TORCH],
        row.timings[OURS],
        *map(row.fastest, TOOLS),
        row.rival,
        row.ratio,
        TARGETS.get(row.name),
        row.form,
        row.error,
    ]


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Geometric means of the ratios, of masked and unmasked networks."""
    means = []
    for label, is_kind in (("half masked", False), ("unmasked", True)):
        ratios = [row["ratio"] for row in rows if ("unmasked" in row["network"]) is is_kind]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            means.append(f"{label} {mean:.2f} ({sum(r < 1 for r in ratios)} of {len(ratios)} slower)")
    return f"times the speed of the fastest runtime (geometric means): {'; '.join(means)}"


def list_losses(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows that are slower than the fastest runtime, and those below their target."""

    slower = [row for row in rows if row["ratio"] < 1]
    below = [row for row in rows if 1 <= row["ratio"] < (row["target"] or 1)]
    lines = []
    for which, part in (("Slower than the fastest runtime", slower), ("Below the target", below)):
        names = "; ".join(f"{row['network']} ({row['threads']})" for row in part)
        lines.append(f"{which} (threads): {names or 'none'}.")
    return "\n".join(lines)


def page(rows: Sequence[Row]) -> Page:
    text = f"""
Batch 1 unless the name says otherwise, float32. All contenders of a row run in turns in one process
(median, 10 %–90 % quantile, ms). The runtimes (ONNX Runtime {onnxruntime.__version__}, OpenVINO
{openvino_module().__version__}, torch.compile with constants frozen) get the masked network and the
one that `demask.demask` returns, the former two as ONNX files; a column shows the faster of both,
and the fastest of the six is the rival. Threads of ONNX Runtime wait without spinning, which would
take the cores from the next contender. ResNet-20 and ResNet-56: trained, half of the channels
masked; the others: torchvision, random weights, half of the channels masked, shifts of norms
nonzero, or nothing masked. UltraFace: trained, {MASKED:.0%} of the channels of each convolution
masked; encoder: 6 layers of width 384, 12 heads, 1,536 units, random weights, half of the heads and
units masked. *Ratio*: time of the rival over that of optimize(). *Error*: against the original in
float64, relative to the largest output."""
    title = "optimize() against ONNX Runtime, OpenVINO and torch.compile"
    table = Table(HEAD, [*map(cells, rows)], 2, merge=True)
    return Page(title, [list_losses, text, table], summarize)


def main() -> None:
    command("executors", __doc__, rows, page, 10.0, list(SETTINGS))


if __name__ == "__main__":
    main()
