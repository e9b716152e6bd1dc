"""Pretrained networks that ship in packages, as they are and masked: `python -m benchmarks run
real_models` runs each from the first call to the last.

The packages are wanted for their files alone (`make nightly` installs them), and not imported:
rapidocr-onnxruntime, nudenet, silero-vad, facenet-pytorch.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import demask
from benchmarks.common.catalog import Benchmark
from benchmarks.common.inductor import NAME, forget, inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save, text_of
from demask.machine.clock import Timing, race
from demask.machine.describe import load_average

BENCHMARK = Benchmark(
    "pretrained networks from packages, from the first call to the last",
    "about an hour",
    needs=("`make .venv/real.stamp`",),
    quick="--networks pnet",
    measures=("shrink", "facts", "graph", "ops", "files", "tune", "traverse"),
)

VARIANTS = ("as it is", "half of the channels", "90 % zeros")
SECONDS = 6.0  # of calls in alternation, at most
FEW = 256  # numbers of a tensor that stays as it is where single weights are masked
DETECTOR, PAGE_PIXELS = "ch_PP-OCRv4_det_infer", 960
BUDGETS = ("512MiB", "72MiB", "48MiB", "32MiB")
PIXELS = {
    "ch_PP-OCRv4_det_infer": (96, 128),
    "ch_PP-OCRv4_rec_infer": (48, 160),
    "ch_ppocr_mobile_v2.0_cls_infer": (48, 192),
    "320n": (320, 320),
}
LEAST = 1e-2  # of an output: ONNX Runtime computes a sigmoid to 1e-7, however small it is
SAMPLES, RATE = 576, 16_000  # of sound: 64 of the chunk before, and 512
# Which of two networks runs is decided by the value of an input, the rate of the sound.
FIXED = {"silero_vad": {"sr": RATE}, "silero_vad_op18_ifless": {"sr": RATE}}
FACES = {"pnet": 48, "rnet": 24, "onet": 48}  # pixels


class FaceNet(nn.Module):
    """A network of MTCNN (Zhang et al., 2016): convolutions with PReLU and pools, perhaps a linear
    layer, then heads, the first through a softmax."""

    def __init__(self, convolutions: list, hidden: tuple[int, int] | None, heads: dict[str, Any]):
        super().__init__()
        self.pools: list[nn.Module | None] = []
        for k, (before, after, kernel, pool) in enumerate(convolutions, 1):
            self.add_module(f"conv{k}", nn.Conv2d(before, after, kernel))
            self.add_module(f"prelu{k}", nn.PReLU(after))
            self.pools.append(nn.MaxPool2d(*pool, ceil_mode=True) if pool else None)
        self.hidden = len(convolutions) + 1 if hidden else 0
        if hidden:
            self.add_module(f"dense{self.hidden}", nn.Linear(*hidden))
            self.add_module(f"prelu{self.hidden}", nn.PReLU(hidden[1]))
        self.heads = list(heads)
        for name, head in heads.items():
            self.add_module(name, head)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Scores that sum to one, then boxes (and landmarks)."""
        for k, pool in enumerate(self.pools, 1):
            x = getattr(self, f"prelu{k}")(getattr(self, f"conv{k}")(x))
            x = pool(x) if pool else x
        if self.hidden:
            x = x.permute(0, 3, 2, 1).flatten(1)
            x = getattr(self, f"prelu{self.hidden}")(getattr(self, f"dense{self.hidden}")(x))
        first, *rest = (getattr(self, name)(x) for name in self.heads)
        return (first.softmax(1), *rest)


def face_net(name: str) -> FaceNet:
    """One of "pnet", "rnet", "onet", with random weights."""
    match name:
        case "pnet":
            heads = {"conv4_1": nn.Conv2d(32, 2, 1), "conv4_2": nn.Conv2d(32, 4, 1)}
            return FaceNet([(3, 10, 3, (2, 2)), (10, 16, 3, ()), (16, 32, 3, ())], None, heads)
        case "rnet":
            layers = [(3, 28, 3, (3, 2)), (28, 48, 3, (3, 2)), (48, 64, 2, ())]
            heads = {"dense5_1": nn.Linear(128, 2), "dense5_2": nn.Linear(128, 4)}
            return FaceNet(layers, (576, 128), heads)
    layers = [(3, 32, 3, (3, 2)), (32, 64, 3, (3, 2)), (64, 64, 3, (2, 2)), (64, 128, 2, ())]
    sizes = {"dense6_1": 2, "dense6_2": 4, "dense6_3": 10}
    heads = {head: nn.Linear(256, size) for head, size in sizes.items()}
    return FaceNet(layers, (1152, 256), heads)


@dataclass(frozen=True, slots=True)
class Source:
    """A pretrained network in a file of a package: an ONNX file, or weights of a FaceNet."""

    name: str
    package: str
    path: Path

    @property
    def is_onnx(self) -> bool:
        return self.path.suffix == ".onnx"


FILES = {
    "rapidocr_onnxruntime": ("models/*.onnx",),
    "nudenet": ("320n.onnx",),
    "silero_vad": ("data/*.onnx",),
    "facenet_pytorch": ("data/?net.pt",),
}


def sources() -> dict[str, Source]:
    """The networks of the packages that are installed, by name."""
    by_name = {}
    for package, patterns in FILES.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            paths = sorted(p for pattern in patterns for p in Path(folder).glob(pattern))
            by_name |= {p.stem: Source(p.stem, package, p) for p in paths}
    return by_name


def network(source: Source, variant: str, folder: Path) -> tuple[nn.Module, Path | None]:
    """The network, masked; and the ONNX file it was read from."""
    if source.is_onnx:
        path = masked_file(source.path, variant, folder)
        return demask.from_onnx(path, inputs=FIXED.get(source.name)), path
    model = face_net(source.name)
    model.load_state_dict(torch.load(source.path, weights_only=True))
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            for tensor in (layer.weight, layer.bias) if variant == VARIANTS[1] else ():
                tensor.data.copy_(torch.from_numpy(without_channels(tensor.data.numpy(), 0)))
    for tensor in model.parameters() if variant == VARIANTS[2] else ():
        tensor.data.copy_(torch.from_numpy(without_small(tensor.data.numpy())))
    return model.eval(), None


def masked_file(path: Path, variant: str, folder: Path) -> Path:
    """The ONNX file itself, or a masked copy of it in `folder`."""
    if variant == VARIANTS[0]:
        return path
    model = onnx.load(path)
    tensors = {name: t for graph in graphs_of(model.graph) for name, t in _tensors(graph)}
    channels: dict[str, int] = {}
    for graph in graphs_of(model.graph):
        for node in graph.node:
            if node.op_type in ("Conv", "ConvTranspose"):
                axes = (int(node.op_type == "ConvTranspose"), 0)
                channels |= dict(zip(node.input[1:3], axes, strict=False))
    for name, tensor in tensors.items():
        values = onnx.numpy_helper.to_array(tensor)
        if variant == VARIANTS[1]:
            values = without_channels(values, channels[name]) if name in channels else values
        elif values.dtype.kind == "f":
            values = without_small(values)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    masked = folder / f"{path.stem}.onnx"
    onnx.save(model, masked)
    return masked


def without_channels(values: np.ndarray, axis: int) -> np.ndarray:
    """Every second channel zero, from the second on."""
    values = values.copy()
    values[(slice(None),) * axis + (slice(1, None, 2),)] = 0
    return values


def without_small(values: np.ndarray) -> np.ndarray:
    """The smallest 90 % of a matrix's or kernel's numbers zero."""
    if values.ndim < 2 or values.size < FEW:
        return values
    size = np.abs(values)
    return np.where(size < np.quantile(size, 0.9), 0, values).astype(values.dtype)


def graphs_of(graph: Any) -> Iterator[Any]:
    """A graph and those in its nodes' attributes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)


def _tensors(graph: Any) -> Iterator[tuple[str, Any]]:
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                yield node.output[0], attribute.t


def example(source: Source, model: Any, batch: int = 1) -> tuple[Tensor, ...]:
    """Seeded inputs of the sizes that the network is used with."""
    draw = torch.Generator().manual_seed(0)
    if not source.is_onnx:
        return (torch.randn(batch, 3, FACES[source.name], FACES[source.name], generator=draw),)
    inputs = []
    for port in model.interface.inputs:
        sizes = [n if isinstance(n, int) and n else batch for n in port.sizes]
        if len(sizes) == 4:
            sizes[2:] = PIXELS[source.name]
        elif port.name == "input":
            sizes[1] = SAMPLES
        elif port.name == "state":
            sizes = [2, batch, 128]
        if source.package == "rapidocr_onnxruntime":
            inputs.append(page_image(*sizes))
            continue
        inputs.append(torch.tensor(RATE) if port.name == "sr" else torch.randn(sizes, generator=draw))
    return tuple(inputs)


def page_image(batch: int, channels: int, height: int, width: int) -> Tensor:
    """A page with lines of random bars, from -1 (black) to 1 (white): on noise a text detector
    computes scores of 1e-6, of which a sigmoid has two digits."""
    draw = torch.Generator().manual_seed(0)
    image = torch.ones(batch, channels, height, width)
    for y in range(6, height - 10, 18):
        bars = torch.rand(12, width, generator=draw) < 0.5
        image[:, :, y : y + 12] = torch.where(bars, -1.0, 1.0)[: height - y]
    return image


def in_runtime(
    path: Path, inputs: tuple[Tensor, ...], fixed: Mapping[str, Any] | None = None
) -> tuple[Any, list[np.ndarray]]:
    """A session of ONNX Runtime on one thread, and its outputs; fixed: the inputs that are stored
    in the file, by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    return session, session.run(None, _feed(session, inputs, fixed))


def _feed(session: Any, inputs: tuple[Tensor, ...], fixed: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    fixed_arrays = {name: np.array(value) for name, value in (fixed or {}).items()}
    free = [port.name for port in session.get_inputs() if port.name not in fixed_arrays]
    return fixed_arrays | {name: x.numpy() for name, x in zip(free, inputs, strict=True)}


def error(expected: Any, outputs: Any) -> float:
    """The largest difference of an output, relative to its largest value; to LEAST where that is
    less."""
    return max(
        float(np.abs(np.subtract(a, b)).max() / max(np.abs(a).max(), LEAST))
        for a, b in zip(expected, outputs, strict=True)
    )


@dataclass(slots=True)
class Row:
    """One network, one mask: sizes, seconds of each step, times of one call.

    sizes: bytes of the file read and of the file written. verified: demask.verify's words. error:
    of the file written, against the network, both in ONNX Runtime where the network came from an
    ONNX file. failure: the step that failed, and why.
    """

    source: Source
    variant: str
    parameters: tuple[int, int] = (0, 0)
    sizes: tuple[int, int] = (0, 0)
    verified: str = ""
    error: float = float("nan")
    seconds: dict[str, float] = field(default_factory=dict)
    calls: Mapping[str, Timing] = field(default_factory=dict)
    failure: str = ""

    def step(self, name: str, function: Callable[[], Any]) -> Any:
        """What a step returns; its time is noted in seconds of this process."""
        start = time.process_time()
        self.failure = name  # unless it ends
        result = function()
        self.failure = ""
        self.seconds[name] = time.process_time() - start
        return result


def run(source: Source, variant: str, folder: Path, *, timed: bool = False) -> Row:
    """Every step of one network, from its file to the one that is written. timed: with
    `optimize()`, and calls in alternation."""
    row = Row(source, variant)
    try:
        _steps(row, folder, timed)
    except Exception as failed:
        row.failure = f"{row.failure}: {type(failed).__name__}: {failed}"
        if not isinstance(failed, demask.errors.DemaskError):
            row.failure += "\n" + traceback.format_exc()
    return row


def _steps(row: Row, folder: Path, timed: bool) -> None:
    source, written = row.source, folder / "written.onnx"
    model, path = row.step("read", lambda: network(source, row.variant, folder))
    inputs = example(source, model)
    slim = row.step("demask", lambda: demask.demask(model, inputs))
    row.parameters = (slim.demasked.before.parameters, slim.demasked.after.parameters)
    row.verified = str(row.step("verify", lambda: demask.verify(model, slim, inputs)))
    row.step("save", lambda: demask.save(slim, folder / "slim.demask"))
    again = row.step("load", lambda: demask.load(folder / "slim.demask"))
    with torch.no_grad():
        plain = [t.numpy() for t in _leaves(model(*inputs))]
        assert error([t.numpy() for t in _leaves(slim(*inputs))], _arrays(again(*inputs))) == 0
    row.step("to_onnx", lambda: demask.to_onnx(slim, written, inputs))
    session, outputs = row.step("ONNX Runtime", lambda: in_runtime(written, inputs))
    fixed = FIXED.get(source.name)
    first, expected = in_runtime(path, inputs, fixed) if path else (None, plain)
    row.error = error(expected, outputs)
    row.sizes = ((path or source.path).stat().st_size, written.stat().st_size)
    if not timed:
        return
    fast = row.step("optimize", lambda: demask.optimize(model, inputs, threads=1))
    calls: dict[str, Callable[[], Any]] = {
        "network": lambda: model(*inputs),
        "demasked": lambda: slim(*inputs),
        "optimized": lambda: fast(*inputs),
    }
    add_compiled(calls, model, inputs)
    if first is not None:
        calls["ONNX Runtime"] = lambda: first.run(None, _feed(first, inputs, fixed))
    calls["ONNX Runtime, demasked"] = lambda: session.run(None, _feed(session, inputs))
    with torch.no_grad():
        row.calls = Timing.of_each(race(calls, seconds=SECONDS))


def add_compiled(calls: dict[str, Callable[[], Any]], model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Adds a call by torch.compile of what torch.export makes of the network: it traces no module of
    an ONNX file itself."""
    with contextlib.suppress(Exception):  # what it does not compile is no failure of ours
        calls[NAME] = inductor(torch.export.export(model, inputs).module(), *inputs)


def _leaves(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _arrays(value: Any) -> list[np.ndarray]:
    return [t.detach().numpy() for t in _leaves(value)]


CALLS = ("network", NAME, "demasked", "optimized", "ONNX Runtime", "ONNX Runtime, demasked")
HEAD = [
    "network",
    "mask",
    "parameters",
    "file, KB",
    "equal",
    "file differs by",
    "demask, s",
    "to_onnx, s",
    *(f"{name}, ms" for name in CALLS),
]


def cells(row: Row) -> list[Cell]:
    """A line of the table."""
    if row.failure:
        first = row.failure.splitlines()[0][:160].replace("|", "/")
        return [row.source.name, row.variant, f"fails at {first}", *[None] * (len(HEAD) - 3)]
    before, after = row.parameters
    original, written = row.sizes
    return [
        row.source.name,
        row.variant,
        f"{before:,} → {after:,}",
        f"{original / 1e3:,.0f} → {written / 1e3:,.0f}",
        row.verified.partition(":")[0],
        row.error,
        row.seconds["demask"],
        row.seconds["to_onnx"],
        *map(row.calls.get, CALLS),
    ]


TILES = [
    "budget",
    "peak of the plan, MiB",
    "multiplications, times",
    "differs by",
    "tiled, ms",
    "network, ms",
    f"{NAME}, ms",
]


def tiles(source: Source, folder: Path) -> list[list[Cell]]:
    """The detector on a large page within budgets of memory: lines of a table."""
    model, _ = network(source, VARIANTS[0], folder)
    x = page_image(1, 3, PAGE_PIXELS, PAGE_PIXELS)
    tiled = {budget: demask.traverse.tile(model, (x,), memory=budget) for budget in BUDGETS}
    calls: dict[str, Callable[[], Any]] = {"": lambda: model(x)}
    calls |= {budget: (lambda run=run: run(x)) for budget, run in tiled.items()}
    add_compiled(calls, model, (x,))
    with torch.no_grad():
        timings, expected = Timing.of_each(race(calls, seconds=SECONDS)), _arrays(model(x))
        return [
            [
                budget,
                run.plan.peak / 2**20,
                run.plan.recompute,
                error(expected, _arrays(run(x))),
                timings[budget],
                timings[""],
                timings.get(NAME),
            ]
            for budget, run in tiled.items()
        ]


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    timings = [[row[f"{name}, ms"] for name in CALLS[:4]] for row in rows]
    medians = [
        [t.median if isinstance(t, Timing) else t for t in line if t is not None]
        for line in timings
        if line[0] is not None
    ]
    lost = sum(line[-1] > min(line[:-1]) for line in medians)
    failed = sum(row["parameters"].startswith("fails") for row in rows)
    return (
        f"{failed} of {len(rows)} fail; optimized, {lost} of {len(medians)} are slower than "
        "the fastest other way in PyTorch"
    )


def page(rows: Sequence[Row], tiled: Sequence[list[Cell]]) -> Page:
    text = f"""
Networks as packages ship them, as they are, with every second channel of each convolution masked,
and with the smallest 90 % of the weights zero: read, demasked, verified, saved and loaded,
written as an ONNX file and compared in ONNX Runtime, optimized. Seconds of the process, once;
milliseconds: median (10 %–90 % quantile) of calls in alternation. *{NAME}*: of the masked
network as torch.export writes it; empty where it does not compile. "Fails" says at which step, and
why."""
    tiles_text = f"""
## The detector in tiles

`demask.traverse.tile` of {DETECTOR} on a page of {PAGE_PIXELS} x {PAGE_PIXELS} pixels. The
difference is relative to the largest score; the network's kernels for other sizes round in
another order."""
    table = Table(HEAD, [*map(cells, rows)], 2, merge=True)
    title = "Pretrained networks, from the first call to the last"
    return Page(title, [text, table, tiles_text, Table(TILES, tiled, merge=True)], summarize)


def main() -> None:
    """Run what is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=sorted(sources()), default=None)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options, rows, before = parser.parse_args(), list[Row](), load_average()
    torch.set_num_threads(1)
    chosen = {
        name: source for name, source in sources().items() if options.networks is None or name in options.networks
    }
    tiled = []
    if DETECTOR in chosen:
        with tempfile.TemporaryDirectory() as folder:
            tiled = tiles(chosen[DETECTOR], Path(folder))
    for source in chosen.values():
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(source, variant, Path(folder), timed=True))
            print(*map(text_of, cells(rows[-1])), rows[-1].failure, sep=" | ", flush=True)
            now = Run.now("1 thread", before=before)
            save("real_models", page(rows, tiled), now, options.output)
            forget()


if __name__ == "__main__":
    main()
