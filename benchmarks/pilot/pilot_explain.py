"""Predictions of explain() and measurements, for pairs fixed beforehand.

Each pair of pilot and condition of TRIPLES is predicted from inputs of its network, then built and
timed in turns with the network as it is, every call on another input, after one call on each.
"pays" is measured: at least 1.05 times faster, and for pilots of exact conditions than columns
alone, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.catalog import DEV, Benchmark
from benchmarks.common.tables import RESULTS, load_average, markdown, provenance
from benchmarks.common.turns import settle
from benchmarks.pilot.pilot_mlp import setting
from benchmarks.pilot.trained_networks import DATA, TRANSFORMER
from cifar import trained as residual
from demask.machine.allocator import fix_allocator
from demask.ops import TABLE
from demask.pilot.chains.exact_conditions import GAIN
from demask.pilot.condition import condition_of
from demask.pilot.explain import BETTER, EXACT, Explanation, explain

BENCHMARK = Benchmark(
    "predictions of explain(), and measurements", "not timed", ("pilot_explain.md",),
    needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"),
    quick="--networks none --rounds 2 --threads 1",
)  # fmt: skip

RESIDUAL = "ResNet-20"
EXACTLY = (("", "columns"), ("bits:8", "certified"), ("bits:8", "certified:levels=2"))
SKIPS = (("bits:8", "skip:0.5"), ("bits:4", "skip:0.25"))
TRIPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "l1-1e-3": (*EXACTLY, SKIPS[0]),
    "l1-1e-4": (*EXACTLY, SKIPS[0]),
    "none": (*EXACTLY, *SKIPS),
    "wide": (*EXACTLY, SKIPS[0]),
    TRANSFORMER: EXACTLY,
    RESIDUAL: (*EXACTLY[:2], *SKIPS),
}
INPUTS, CALLS, SKIPPED = 64, 128, 64  # each input once before any is timed


def network(name: str, cache: Path, data: Path) -> tuple[nn.Module, list[Tensor]]:
    """A network and its inputs."""
    if name == RESIDUAL:
        draw = torch.Generator().manual_seed(0)
        return residual(20), [torch.randn((1, 3, 32, 32), generator=draw) for _ in range(INPUTS)]
    return setting(name, cache, data)


def rounds(calls: dict[Any, Callable[[Tensor], Any]], inputs: Sequence[Tensor],
           count: int) -> dict[Any, float]:  # fmt: skip
    """The median over rounds of the median seconds of a call."""
    taken: dict[Any, list[float]] = {key: [] for key in calls}
    turn = cycle(inputs)
    for number in range(count):
        for key in list(calls)[:: 1 if number % 2 else -1]:
            seconds = []
            settle()
            for _ in range(CALLS):
                x = next(turn)
                start = perf_counter()
                calls[key](x)
                seconds.append(perf_counter() - start)
            taken[key].append(median(seconds[SKIPPED:]))
    return {key: median(one) for key, one in taken.items()}


def lines(name: str, explanation: Explanation, seconds: dict[Any, float]) -> Iterator[list[str]]:
    """A line of the table for each pair."""
    as_it_is, columns = seconds[None], seconds.get(("", "columns"))
    for line in explanation.lines:
        pair = line.pilot, line.condition
        if line.seconds is None or pair not in seconds:
            yield [name, line.pilot or "none", line.condition, "", "", "", "", "", line.why[:60]]
            continue
        taken = seconds[pair]
        pays = as_it_is / taken >= GAIN
        if pays and line.condition in EXACT and line.pilot and columns is not None:
            pays = columns / taken >= BETTER
        yield [
            name, line.pilot or "none", line.condition, f"{line.seconds * 1e3:.3f}",
            f"{taken * 1e3:.3f}", f"{line.seconds / taken - 1:+.0%}",
            f"{line.gain:.2f} / {as_it_is / taken:.2f}",
            f"{line.loss:.1%}", f"{'use' if line.use else 'do not use'} / "
            f"{'pays' if pays else 'does not pay'}",
        ]  # fmt: skip


HEAD = [
    "network", "pilot", "condition", "predicted, ms", "measured, ms", "error",
    "gain, predicted / measured", "changed answers", "verdict / measured",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--networks", nargs="+", choices=list(TRIPLES), default=list(TRIPLES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "pilot_explain.md")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    torch.set_num_threads(options.threads)
    table: list[list[str]] = []
    for name in options.networks:
        model, inputs = network(name, options.cache, options.data)
        inputs = inputs[:INPUTS]
        explanation = explain(model, inputs, candidates=TRIPLES[name])
        print(f"{name}: {explanation}", flush=True)
        calls: dict[Any, Callable[[Tensor], Any]] = {None: model}
        for line in explanation.lines:
            if line.seconds is not None:
                kind, pilot = condition_of(line.condition), line.pilot or None
                exact = line.condition in EXACT
                batch = torch.cat(inputs[:16]) if exact and inputs[0].ndim == 2 else inputs[0]
                conditioned = kind.applied(model, (batch,), None, None if exact else pilot, TABLE)
                calls[line.pilot, line.condition] = conditioned
        with torch.no_grad():
            table += lines(name, explanation, rounds(calls, inputs, options.rounds))
        print(markdown(HEAD, table[-len(explanation.lines) :]), flush=True)
    words = provenance("pilot_explain", allocator, before=before)
    words += f" {options.threads} threads, {options.rounds} rounds."
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(f"# Predicted and measured\n\n{words}\n\n{markdown(HEAD, table)}\n")


if __name__ == "__main__":
    main()
