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
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.common.turns import settle
from benchmarks.pilot.pilot_mlp import setting
from benchmarks.pilot.trained_networks import DATA, TRANSFORMER
from cifar import trained as residual
from demask.machine.allocator import fix_allocator
from demask.machine.clock import Timing
from demask.machine.describe import format_threads, load_average
from demask.ops import TABLE
from demask.pilot.chains.exact_conditions import GAIN
from demask.pilot.condition import condition_of
from demask.pilot.explain import BETTER, EXACT, Explanation, explain

BENCHMARK = Benchmark(
    "predictions of explain(), and measurements",
    "not timed",
    needs=(DEV, "a folder of trained networks (`--cache`)", "Fashion-MNIST"),
    quick="--networks none --rounds 2 --threads 1",
)

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


def rounds(calls: dict[Any, Callable[[Tensor], Any]], inputs: Sequence[Tensor], count: int) -> dict[Any, Timing]:
    """Of the medians of rounds."""
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
    return {key: Timing.of(one) for key, one in taken.items()}


HEAD = [
    "network",
    "pilot",
    "condition",
    "predicted, ms",
    "measured, ms",
    "error, %",
    "gain, predicted",
    "gain, measured",
    "changed answers, %",
    "predicted to pay",
    "pays",
]


def cells(name: str, explanation: Explanation, timings: dict[Any, Timing]) -> Iterator[list[Cell]]:
    """A row for each pair."""
    as_it_is, columns = timings[None].median, timings.get(("", "columns"))
    for line in explanation.lines:
        timing = timings.get((line.pilot, line.condition))
        setting = [name, line.pilot or "none", line.condition]
        if line.seconds is None or timing is None:
            yield [*setting, *[None] * 6, f"no: {line.why[:60]}", None]
            continue
        gain = as_it_is / timing.median
        pays = gain >= GAIN
        if pays and line.condition in EXACT and line.pilot and columns is not None:
            pays = columns.median / timing.median >= BETTER
        yield [
            *setting,
            1e3 * line.seconds,
            timing,
            100 * (line.seconds / timing.median - 1),
            line.gain,
            gain,
            100 * (line.loss or 0.0),
            "yes" if line.use else "no",
            "yes" if pays else "no",
        ]


def page(rows: Sequence[Sequence[Cell]], count: int) -> Page:
    text = f"""
*Predicted* by `explain` from {INPUTS} inputs; *measured*: the median (10 %–90 % quantile) of
{count} rounds of {CALLS - SKIPPED} calls. A pair *pays* where it is at least {GAIN} times as fast
as the network as it is, and an exact one with a pilot {BETTER} times as fast as columns alone."""
    errors = [cell for row in rows if isinstance(cell := row[5], float)]
    near = sum(abs(error) <= 20 for error in errors)
    wrong = sum(row[-1] is not None and row[-1] != row[-2] for row in rows)
    summary = f"{near} of {len(errors)} predicted times within 20 %; {wrong} wrong about what pays"
    return Page("Predicted and measured", [text, Table(HEAD, rows, 3)], summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of trained networks")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Fashion-MNIST")
    parser.add_argument("--networks", nargs="+", choices=list(TRIPLES), default=list(TRIPLES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    allocator, before = fix_allocator(), load_average()
    torch.set_num_threads(options.threads)
    rows: list[list[Cell]] = []
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
            rows += cells(name, explanation, rounds(calls, inputs, options.rounds))
    run = Run.now(format_threads(options.threads), allocator, before=before)
    print(save("pilot_explain", page(rows, options.rounds), run, options.output))


if __name__ == "__main__":
    main()
