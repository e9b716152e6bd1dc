"""optimize() against ONNX Runtime and OpenVINO: `python -m benchmarks run executors`.

Writes benchmarks/results/executors.md.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import cifar
import demask
import networks
from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.tables import RESULTS, command, format_spread, markdown
from benchmarks.optimize.runtime import MASKED, call, faces
from benchmarks.shrink import encoder
from benchmarks.shrink.peers_called import compiled, openvino_module
from demask.machine.timing import Timing, time_alternately

BENCHMARK = Benchmark(
    "optimize() against ONNX Runtime and OpenVINO on the masked and the demasked network",
    "about 1 minute a setting", ("executors.md",), needs=(BENCH,),
    quick="--networks ResNet-20 --threads 1 --pairs 3 --seconds 2",
)  # fmt: skip

OURS, TORCH = "optimize()", "original in PyTorch"
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


class HiddenState(nn.Module):
    """The last hidden state of an encoder, of token numbers."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(input_ids=ids).last_hidden_state


def token_encoder() -> tuple[nn.Module, Tensor]:
    """A MiniLM-sized encoder with random weights, half of its heads and units masked."""
    torch.manual_seed(0)
    model, _ = encoder.masked(encoder.encoder("sdpa"), torch.Generator().manual_seed(0))
    return HiddenState(model).eval(), torch.randint(0, 30522, (1, 128))


FACES, ENCODER = "UltraFace RFB-320", "encoder, 128 tokens"
TARGETS = {  # least ratios; 1.0 for others, 0.95 for unmasked ones
    "ResNet-20": 1.8, "ResNet-56": 2.0, "ResNet-56, batch 64": 2.0, "MobileNetV2": 1.5,
    "MobileNetV2, batch 16": 1.5, FACES: 1.8, ENCODER: 1.2,
}  # fmt: skip
NAMES = {
    "ResNet-18": "resnet18", "ResNet-50": "resnet50", "MobileNetV2": "mobilenet_v2",
    "MobileNetV3-Large": "mobilenet_v3_large", "ShuffleNetV2": "shufflenet_v2_x1_0",
    "EfficientNet-B0": "efficientnet_b0", "RegNetY-400MF": "regnet_y_400mf",
    "DenseNet-121": "densenet121", "SqueezeNet": "squeezenet1_1",
}  # fmt: skip
SETTINGS: Mapping[str, Setting] = {
    "ResNet-20": (small(20), 1), "ResNet-56": (small(56), 1),
    "ResNet-56, shifts nonzero": (small(56, shifts=True), 1),
    "ResNet-56, batch 64": (small(56), 64),
    FACES: (face_detector, 1),
    ENCODER: (token_encoder, 1),
    **{name: (classifier(of), 1) for name, of in NAMES.items()},
    "MobileNetV2, batch 16": (classifier("mobilenet_v2"), 16),
    **{f"{name}, unmasked": (classifier(of, masked=False), 1) for name, of in NAMES.items()},
}  # fmt: skip


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
    def runtime(self) -> str:
        """The fastest contender that is not of PyTorch."""
        others = [name for name in self.timings if name not in (OURS, TORCH)]
        return min(others, key=lambda name: self.timings[name].median)

    @property
    def ratio(self) -> float:
        """How many times as fast as that optimize() is."""
        return self.timings[self.runtime].median / self.timings[OURS].median

    @property
    def target(self) -> float:
        """The target ratio."""
        return TARGETS.get(self.name, 1.0)


def rows(
    chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress
) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    for name in chosen:
        make, batch = SETTINGS[name]
        model, image = make()
        images = torch.cat([image, *(torch.randn_like(image) for _ in range(batch - 1))])
        with tempfile.TemporaryDirectory() as folder:
            bar.update(step, description=f"{name}: exporting")
            files = write_files(model, images, Path(folder))
            for count in threads:
                bar.update(step, description=f"{name}, {count} threads")
                yield measured(name, model, images, files, count, pairs, seconds)
                bar.advance(step)


def write_files(model: nn.Module, images: Tensor, folder: Path) -> dict[str, Path]:
    """ONNX files of the masked and the demasked network; one where nothing is masked."""
    files = {"masked": folder / "masked.onnx"}
    demask.to_onnx(model, files["masked"], (images,))
    slim = demask.demask(model, (images,), result="graph")
    if demask.report(slim).removed:
        files["demasked"] = folder / "demasked.onnx"
        demask.to_onnx(slim, files["demasked"], (images,))
    return files


def measured(name: str, model: nn.Module, images: Tensor, files: Mapping[str, Path], threads: int,
             pairs: int, seconds: float) -> Row:  # fmt: skip
    """One row: all contenders in turns."""
    torch.set_num_threads(threads)
    fast = demask.optimize(model, (images,), threads=threads)
    calls: dict[str, Callable[[], object]] = {OURS: lambda: fast(images)}
    calls[TORCH] = lambda: model(images)
    for kind, path in files.items():
        calls[f"ONNX Runtime, {kind}"] = call(path, (images,), threads)
        graph = openvino_module().Core().read_model(str(path))
        graph.reshape(list(images.shape))
        run = compiled(graph, threads)
        calls[f"OpenVINO, {kind}"] = lambda run=run: run(images)
    with torch.no_grad():
        error = difference(fast, model, images)
        timings = time_alternately(calls, pairs, seconds=seconds)
    return Row(name, threads, demask.report(fast).decisions[0].chosen, error, timings)


def difference(fast: nn.Module, model: nn.Module, images: Tensor) -> float:
    """The largest error of an output against the original in float64, relative to the largest of
    that output."""
    wide = tree_leaves(model.double()(images.double() if images.is_floating_point() else images))
    model.float()
    return max(float((y - want).abs().max() / want.abs().max())
               for y, want in zip(tree_leaves(fast(images)), wide, strict=True))  # fmt: skip


HEAD = [
    "network", "threads", "original, ms", "optimize(), ms", "fastest runtime, ms", "which", "ratio",
    "target", "", "what optimize() chose", "error",
]  # fmt: skip


def cells(row: Row) -> list[str]:
    timings = row.timings
    spreads = (format_spread(timings[name]) for name in (TORCH, OURS, row.runtime))
    loses = "slower" if row.ratio < 1 else "below the target" if row.ratio < row.target else ""
    target = f"{row.target}" if row.name in TARGETS else ""
    return [row.name, str(row.threads), *spreads, row.runtime, f"{row.ratio:.2f}", target, loses,
            row.form, f"{row.error:.0e}"]  # fmt: skip


def listed(rows: Sequence[Row]) -> str:
    """Names of rows, with their numbers of threads."""
    threads: dict[str, list[str]] = {}
    for row in rows:
        threads.setdefault(row.name, []).append(str(row.threads))
    return "; ".join(f"{name} ({' and '.join(of)})" for name, of in threads.items()) or "none"


def page(rows: Sequence[Row], words: str) -> str:
    means = []
    for label, is_kind in (("half masked", False), ("unmasked", True)):
        ratios = [row.ratio for row in rows if ("unmasked" in row.name) is is_kind]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            means.append(
                f"{label} {mean:.2f} ({sum(r < 1 for r in ratios)} of {len(ratios)} slower)"
            )
    return f"""# optimize() against ONNX Runtime and OpenVINO

{words} ONNX Runtime {onnxruntime.__version__}, OpenVINO {openvino_module().__version__}.

Slower than the fastest runtime (threads): {listed([row for row in rows if row.ratio < 1])}.
Below the target ratio: {listed([row for row in rows if 1 <= row.ratio < row.target])}.

Batch 1 unless the name says otherwise, float32. All contenders of a row run in turns in one process
(median, 10 %–90 % quantile, ms). The runtimes get the masked file and the one that
`demask.to_onnx(demask.demask(model))` writes; the fastest of the four is the rival. Threads of ONNX
Runtime wait without spinning, which would take the cores from the next contender. ResNet-20 and
ResNet-56: trained, half of the channels masked; the others: torchvision, random weights, half of
the channels masked, shifts of norms nonzero, or nothing masked. UltraFace: trained, {MASKED:.0%} of
the channels of each convolution masked; encoder: 6 layers of width 384, 12 heads, 1,536 units,
random weights, half of the heads and units masked. *Ratio*: time of the rival over that of
optimize(). *Error*: against the original in float64, relative to the largest output.

Geometric means of the ratios: {"; ".join(means)}.

{markdown(HEAD, [cells(row) for row in rows])}
"""


def main() -> None:
    command(__doc__, rows, HEAD, cells, page, RESULTS / "executors.md", 10.0, list(SETTINGS))


if __name__ == "__main__":
    main()
