"""One vector through perceptrons on Fashion-MNIST, and through a feed-forward block: certificates,
columns, dense.

Contenders take turns in one process, another input at every call: torch, torch.compile, ONNX
Runtime (float32, and its dynamic int8 as a peer that changes outputs), demask's own dense kernel,
columns of zero inputs skipped, rows proved zero skipped (8 bits; 4 bits first). "hot": calls follow
one another; "flushed": 96 MiB are read before each call, by one thread, whose core is that of the
call (torch's second thread would spin on the other core while contenders start). Before anything is
timed, logits and hidden values of all test images are compared bit for bit with the own dense
kernel, classes with torch's.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.inductor import NAME, inductor
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.common.turns import settle
from benchmarks.pilot.trained_networks import DATA, SPECS, TRANSFORMER, Bytes, documents, images, network
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing
from demask.machine.describe import load_average
from demask.ops import TABLE
from demask.pilot.chains.exact_conditions import Certified, Columns, chained, unconditioned

BENCHMARK = Benchmark(
    "one vector through perceptrons: certificates, columns, dense",
    "not timed",
    needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"),
    quick="--networks none --rounds 2 --images 200 --threads 1",
)

FLUSHED = 96 * 2**20  # bytes
CALLS, SKIPPED = 30, 3  # of one contender in a round, and how many of them are not counted
EXACT = ("own dense", "columns", "certified", "certified, 2 levels")
MODES = (
    (Columns(), ("dense",)),
    (Columns(), ("dense", "columns")),
    (Certified(), ("dense", "columns", "certified")),
    (Certified(levels=2), ("dense", "columns", "two")),
)
DENSE = ("torch", NAME, "ONNX Runtime", "own dense")  # what a gain is over: the fastest of them
INPUTS = 256  # that take turns

Call = Callable[[Tensor], Tensor]


def runtime(model: nn.Module, x: Tensor, threads: int, narrow: bool) -> Call:
    """A network in ONNX Runtime, its threads spinning within a call alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns of its own calls
            torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
        if narrow:
            whole = onnx.load(path)
            del whole.graph.value_info[:]  # shapes that the quantizer's own moves make wrong
            path = Path(folder) / "narrow.onnx"
            quantize_dynamic(whole, path)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda inputs: torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])


def compiled(model: nn.Module, x: Tensor) -> Call:
    """A network compiled for inputs of this size."""
    buffer = x.clone()
    call: Any = inductor(model, buffer)
    return lambda inputs: (buffer.copy_(inputs), call())[1]


def contenders(model: nn.Module, inputs: Sequence[Tensor], threads: int) -> dict[str, Call]:
    """By name, what runs the network. Modes are chosen on 16 of the inputs."""
    sample = (torch.cat(list(inputs[:16])),) if inputs[0].ndim == 2 else (inputs[0],)
    calls: dict[str, Call] = {
        "torch": model,
        NAME: compiled(model, inputs[0]),
        "ONNX Runtime": runtime(model, inputs[0], threads, False),
        "ONNX Runtime, int8": runtime(model, inputs[0], threads, True),
        "own dense": unconditioned(model, sample),
    }
    for condition in (Columns(), Certified(), Certified(levels=2)):
        levels = getattr(condition, "levels", 1)
        name = condition.name if levels == 1 else f"{condition.name}, {levels} levels"
        conditioned = condition.applied(model, sample, None, None, TABLE)
        calls[name] = conditioned
        print(f"  {name}:", "; ".join(map(str, conditioned.conditioned.decisions)), flush=True)
    return calls


@dataclass(slots=True)
class Checked:
    """Over all inputs: how many had other bits than the own dense kernel (than torch, where nothing
    pays and the network stays as it was), in any hidden value or output, and how many another class
    than torch, by contender."""

    inputs: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)


def checked(model: nn.Sequential, calls: dict[str, Call], inputs: Sequence[Tensor]) -> Checked:
    """Compare on all inputs. Hidden values are those of the network cut after each ReLU, whether
    or not skipping pays there."""
    parts: list[dict[str, Call]] = [{name: calls[name] for name in EXACT}]
    sample = (torch.cat(list(inputs[:16])),) if inputs[0].ndim == 2 else (inputs[0],)
    for k, layer in enumerate(list(model)[:-1]):
        if isinstance(layer, nn.ReLU):
            cut = model[: k + 1]
            networks = (chained(cut, sample, None, kind, modes, TABLE, always=True) for kind, modes in MODES)
            parts.append(dict(zip(EXACT, networks, strict=True)))
    result = Checked(len(inputs), dict.fromkeys(EXACT[1:], 0), dict.fromkeys(calls, 0))
    for x in inputs:
        dense, plain = [part["own dense"](x) for part in parts], model(x)
        for name in EXACT[1:]:
            results = [part[name](x) for part in parts]
            expected = [plain, *dense[1:]] if as_it_was(calls[name]) else dense
            result.bits[name] += not all(map(_same, results, expected))
        classes = {name: int(call(x).flatten().argmax()) for name, call in calls.items()}
        for name, one in classes.items():
            result.classes[name] += one != classes["torch"]
    return result


def as_it_was(conditioned: Any) -> bool:
    """Whether nothing pays in a network, which so has torch's own bits."""
    return all(one.what == "as it was" for one in conditioned.conditioned.decisions)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def rounds(
    calls: dict[str, Call], inputs: Sequence[Tensor], count: int, flushed: bool, bar: Progress
) -> dict[str, list[float]]:
    """Median seconds of a call, per contender and round."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    flush, turn = np.ones(FLUSHED // 8), cycle(inputs)
    task = bar.add_task("flushed" if flushed else "hot", total=count * len(calls))
    names = list(calls)
    for number in range(count):
        for name in names if number % 2 else names[::-1]:
            call, seconds = calls[name], []
            settle()
            for _ in range(CALLS):
                x = next(turn)
                if flushed:
                    flush.sum()
                start = perf_counter()
                call(x)
                seconds.append(perf_counter() - start)
            taken[name].append(median(seconds[SKIPPED:]))
            bar.advance(task)
    return taken


HEAD = [
    "network",
    "threads",
    "caches",
    "contender",
    "ms",
    "times as fast as the fastest dense one",
    "times as fast as columns",
    "inputs with other bits",
    "with another class than torch",
]


def cells(name: str, threads: int, regime: str, taken: dict[str, list[float]], result: Checked) -> Iterator[list[Cell]]:
    """A row for each contender."""
    timings = {one: Timing.of(seconds) for one, seconds in taken.items()}
    dense = min(timings[one].median for one in DENSE)
    for one, timing in timings.items():
        over = timings["columns"].median / timing.median if one.startswith("cert") else None
        yield [
            name,
            threads,
            regime,
            one,
            timing,
            dense / timing.median,
            over,
            result.bits.get(one),
            result.classes[one],
        ]


def page(rows: Sequence[Sequence[Cell]], options: argparse.Namespace) -> Page:
    text = f"""
Perceptrons of `trained_networks.py`, and the feed-forward block 768-3072-768 of a small decoder
(transformer); batch 1. Medians of calls, of {options.rounds} rounds: median (10 %–90 % quantile).
At most {options.images:,} inputs were compared. *Flushed*: {FLUSHED >> 20} MiB are read before each
call. ONNX Runtime in int8 changes outputs. Where no input is zero, *columns* is the network as it
was, compared with torch's own bits."""
    return Page("One vector", [text, Table(HEAD, rows, 4, merge=True)], summarize)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the exact contenders compare with the fastest dense one."""
    spans = []
    for who in EXACT[1:]:
        gains = [row[HEAD[5]] for row in rows if row["contender"] == who]
        spans.append(
            f"{who} {min(gains):.2f} to {max(gains):.2f} (slower in {sum(gain < 1 for gain in gains)} of {len(gains)})"
        )
    return "times as fast as the fastest dense contender: " + ", ".join(spans)


@torch.no_grad()
def setting(name: str, cache: Path, data: Path) -> tuple[nn.Sequential, list[Tensor]]:
    """A network and its inputs, one by one: test images, or what a block's norm gives its
    feed-forward part at each place of a text."""
    model = network(name, cache, data)
    if name == TRANSFORMER:
        assert isinstance(model, Bytes)
        block, block_inputs = model.blocks[1], []
        hook = block.ffn.register_forward_pre_hook(lambda m, args: block_inputs.append(args[0]))  # type: ignore[union-attr]
        text = documents()
        model(text[: 64 * (len(text) // 64)].view(-1, 64)[:48])
        hook.remove()
        return block.ffn, [x.view(1, 1, -1) for x in block_inputs[0].flatten(0, 1)]  # type: ignore[return-value]
    x, _ = images("test", data, SPECS[name].standard)
    return model, [one[None] for one in x]  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--networks", nargs="+", default=[*SPECS, TRANSFORMER])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=10_000, help="that are compared")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    rows: list[list[Cell]] = []
    with Progress(transient=True) as bar, torch.no_grad():
        for name in options.networks:
            model, inputs = setting(name, options.cache, options.data)
            result = None
            for threads in options.threads:
                torch.set_num_threads(threads)
                calls = contenders(model, inputs, threads)
                result = result or checked(model, calls, inputs[: options.images])
                print(f"{name}: {result}", flush=True)
                for regime in ("hot", "flushed"):
                    taken = rounds(calls, inputs[:INPUTS], options.rounds, regime == "flushed", bar)
                    rows += cells(name, threads, regime, taken, result)
            save("pilot_mlp", page(rows, options), Run.now(allocator, before=before), options.output)


if __name__ == "__main__":
    main()
