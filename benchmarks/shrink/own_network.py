"""The user's own network back: what demask() and verify() take, and how fast the result is.

    python -m benchmarks run own_network                     all three tables, about 20 minutes
    python -m benchmarks run own_network --parts time speed  two of them

time: seconds of demask() for networks of several sizes (YOLO where ultralytics is installed).
memory: demask(), per form of the result, and verify() of a LLaMA of 1.1 billion parameters in
bfloat16, the result included and the model not; needs 12 GiB.
speed: one image through the masked network, that by torch.compile, its own class back, and a
graph, in turns.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor, fx, nn

import demask
import networks
from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.inductor import forget, inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.common.turns import turn
from benchmarks.traverse.traverse_memory import peaked
from cifar import IMAGE, ResNet, masked
from demask.graph.capture.capture import capture
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing
from demask.machine.describe import load_average

BENCHMARK = Benchmark(
    "results in the user's own class: seconds and memory of demask() and verify(), speed",
    "about 20 minutes",
    needs=(DEV, "12 GiB of memory"),
    quick="--parts speed --runs 3",
)

HEADS = {
    "speed": ["network", "masked, ms", "torch.compile, ms", "own class, ms", "graph, ms"],
    "time": ["network", "parameters", "came back", "demask(), ms", "of it torch.export, ms"],
    "memory": ["call", "seconds", "peak beyond the networks, GiB", "of the weights"],
}
TITLES = {
    "speed": "Batch 1, one thread",
    "time": "Time of demask()",
    "memory": "Memory: a LLaMA of 1.1 billion parameters in bfloat16",
}


def zeroed(*tensors: Tensor, share: float = 0.5) -> None:
    """The first positions of these tensors become zero."""
    with torch.no_grad():
        for tensor in tensors:
            tensor[: int(len(tensor) * share)] = 0


def perceptron() -> tuple[nn.Module, Tensor]:
    """Three linear layers, 50,000 parameters."""
    net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 170), nn.ReLU(), nn.Linear(170, 10))
    zeroed(net[0].weight, net[0].bias, net[2].weight, net[2].bias)
    return net.eval(), torch.randn(2, 64)


def residual(depth: int) -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    net = masked(networks.randomised(ResNet(depth), generator), generator, shifts=False)
    return net, torch.randn(2, *IMAGE)


def classifier(name: str) -> tuple[nn.Module, Tensor]:
    """Half of the channels inside of every block masked, so that the result can be of its class."""
    net = networks.built(name, torch.Generator().manual_seed(0))
    networks.mask_inside(net)
    return net, torch.randn(2, 3, 224, 224)


def detector(name: str) -> tuple[nn.Module, Tensor]:
    from ultralytics.nn.tasks import DetectionModel  # type: ignore[import-not-found]

    net = DetectionModel(name, verbose=False).eval()
    for part in net.modules():
        if type(part).__name__ == "Bottleneck":
            zeroed(part.cv1.conv.weight, part.cv1.bn.weight, part.cv1.bn.bias)
    return net, torch.rand(2, 3, 128, 160)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear layers": perceptron,
    "ResNet-20": lambda: residual(20),
    "ResNet-56": lambda: residual(56),
    "ResNet-18": lambda: classifier("resnet18"),
    "DenseNet-121": lambda: classifier("densenet121"),
    "YOLOv8n": lambda: detector("yolov8n.yaml"),
    "YOLO11n": lambda: detector("yolo11n.yaml"),
}
FAST = {"ResNet-18": "resnet18", "MobileNetV2": "mobilenet_v2", "GoogLeNet": "googlenet"}


def time_rows(runs: int) -> Iterator[list[Cell]]:
    torch.manual_seed(0)
    contenders = {}
    for name, make in NETWORKS.items():
        try:
            contenders[name] = make()
        except ImportError:
            print(f"{name}: not installed")
    for model, x in contenders.values():
        demask.demask(model, (x,))  # a first call imports and compiles
    whole: dict[str, list[float]] = {name: [] for name in contenders}
    export: dict[str, list[float]] = {name: [] for name in contenders}
    slim: dict[str, Any] = {}
    for _ in track(range(runs), "demask()", transient=True):
        for name, (model, x) in contenders.items():
            start = perf_counter()
            slim[name] = demask.demask(model, (x,))
            middle = perf_counter()
            capture(model, (x,))
            whole[name].append(middle - start)
            export[name].append(perf_counter() - middle)
    for name, (model, _) in contenders.items():
        record = slim[name].demasked
        form = "own class" if type(slim[name]) is type(model) else "graph"
        yield [
            name,
            f"{record.before.parameters:,} → {record.after.parameters:,}",
            form,
            Timing.of(whole[name]),
            Timing.of(export[name]),
        ]


def memory_rows(runs: int) -> Iterator[list[Cell]]:
    networks.torchvision()  # which transformers looks for
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        zeroed(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)
        with torch.no_grad():  # half of the head groups, which read as many of the heads
            layer.self_attn.o_proj.weight[:, :1024] = 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    tokens = torch.randint(0, 32000, (2, 16))
    calls = {
        'demask(modules="auto")': lambda: demask.demask(model, (tokens,), modules="auto"),
        'demask(result="class")': lambda: demask.demask(model, (tokens,), result="class"),
        'demask(result="graph")': lambda: demask.demask(model, (tokens,), result="graph"),
        "verify()": lambda: demask.verify(model, slim, (tokens,)),
        "the model itself": lambda: model(tokens),
    }
    slim: Any = None
    for name, call in calls.items():
        gc.collect()  # graphs refer to themselves
        with torch.no_grad():
            result, peak, seconds = peaked(call)
        if slim is None:
            slim = result
            assert type(slim) is type(model)
        yield [name, seconds, peak / 2**30, peak / weights]


def speed_rows(runs: int) -> Iterator[list[Cell]]:
    fix_allocator()
    for name, key in FAST.items():
        torch.manual_seed(0)
        model, x = classifier(key)
        one = x[:1]
        own, graph = (demask.demask(model, (one,), result=r) for r in ("class", "graph"))
        assert type(own) is type(model)
        assert isinstance(graph, fx.GraphModule)
        calls = [partial(model, one), inductor(model, one), partial(own, one), partial(graph, one)]
        taken: list[list[float]] = [[] for _ in calls]
        with torch.no_grad():
            for _ in track(range(runs), name, transient=True):
                for call, samples in zip(calls, taken, strict=True):
                    samples.append(turn(call, 0.2))
        yield [name, *map(Timing.of, taken)]
        forget()


ROWS = {"time": time_rows, "memory": memory_rows, "speed": speed_rows}


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of networks in their own class."""
    speeds = [row["masked, ms"].median / row["own class, ms"].median for row in rows]
    compared = [row for row in rows if row["torch.compile, ms"] is not None]
    lost = sum(row["own class, ms"].median > row["torch.compile, ms"].median for row in compared)
    return (
        f"in its own class {min(speeds):.2f} to {max(speeds):.2f} times as fast as masked; "
        f"slower than torch.compile of the masked network in {lost} of {len(compared)}"
        if rows
        else ""
    )


def page(rows: dict[str, list[list[Cell]]]) -> Page:
    """rows: of the parts that were measured now; those of others stay in the ledger."""
    parts: list[str | Table] = []
    for part, head in HEADS.items():
        parts += [f"## {TITLES[part]}", Table(head, rows.get(part, ()), merge=True)]
    parts[0] = f"Milliseconds: median (10 %–90 % quantile) of runs in turns.\n\n{parts[0]}"
    return Page("The user's own class", parts, summarize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, list[list[Cell]]] = {}
    for part in options.parts:
        before = load_average()
        measured[part] = list(ROWS[part](options.runs))
        run = Run.now("1 thread", f"{options.runs} runs", before=before)
        text = save("own_network", page(measured), run, options.output)
        Console().print(Markdown(text))


if __name__ == "__main__":
    main()
