"""Sparse products on a GPU, ours and cuBLAS, cuSPARSE, 2:4 and blocks:

    python -m benchmarks run gpu_sparse --data FOLDER

FOLDER: that of dlmc_subset.zip (shared/data next to the project). Needs torch for CUDA and Triton,
nothing from a network. Every result is compared with float64 before anything is timed. Times are
those of CUDA graphs that read copies of the weights in turn, more than three caches together;
contenders take turns; medians. Writes benchmarks/results/gpu_sparse.md and .json.

--seconds bounds it all: suite A (layers of language models), then B (really pruned networks); what
is left out is said. --device cpu shows that it runs, in Triton's interpreter, on tiny layers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from benchmarks.common.catalog import SHARED_DATA, Benchmark
from benchmarks.common.tables import provenance
from benchmarks.sparse.gpu_page import page
from benchmarks.sparse.gpu_problems import Problem, layers, pruned

BENCHMARK = Benchmark(
    "sparse products on a GPU: ours, cuBLAS, cuSPARSE, 2:4 and blocks", "at most 520 s",
    ("gpu_sparse.md", "gpu_sparse.json"),
    needs=("a CUDA GPU", SHARED_DATA),
    quick="--device cpu --seconds 30 --rounds 1",
)  # fmt: skip

if TYPE_CHECKING:
    from benchmarks.sparse.gpu_contenders import Case

RESULTS = Path(__file__).parents[1] / "results"
ROUNDS, CALLS = 25, 12
LONG = 0.02  # seconds of a graph; longer ones are replayed less often
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}


@dataclass(slots=True)
class Row:
    """What came out: seconds per call (median, 10 %, 90 %), who computed ours, the seconds of its
    first call for a new matrix, why others did not run, and the error of each that was compared."""

    title: str
    suite: str
    task: str
    sparsity: float
    n: int
    m: int
    k: int
    dtype: str
    nonzeros: int = 0
    choice: str = ""
    prepared: float = 0.0
    seconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


def recorded(calls: list[Callable[[], object]], device: str) -> tuple[Callable[[], object], int]:
    """All calls in turn, as one graph, and how many there are in it."""
    count = max(CALLS, len(calls))
    start = perf_counter()
    for _ in range(2):
        calls[0]()
    if device == "cuda":
        torch.cuda.synchronize()
    if perf_counter() - start > LONG:
        count = len(calls)
    if device != "cuda":
        return lambda: [call() for call in calls], len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(count):
            calls[k % len(calls)]()
    return graph.replay, count


def taken(run: Callable[[], object], device: str) -> float:
    """Seconds of one replay."""
    if device != "cuda":
        start = perf_counter()
        run()
        return perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def timed(
    contenders: Mapping[str, list[Callable[[], object]]], device: str, rounds: int,
    not_run: dict[str, str],
) -> dict[str, tuple[float, float, float]]:  # fmt: skip
    """Seconds per call of every contender: graphs are replayed in turns, forward and backward."""
    ready = {}
    for who, calls in contenders.items():
        with precise(who != "cuBLAS TF32"):
            try:
                ready[who] = recorded(calls, device)
            except Exception as failure:
                not_run[who] = f"no graph: {failure}"[:120]
    samples: dict[str, list[float]] = {who: [] for who in ready}
    for turn in range(rounds + 1):
        for who in list(ready)[:: -1 if turn % 2 else 1]:
            run, count = ready[who]
            slow = turn > 5 and samples[who][-1] * count > LONG
            if not slow:
                samples[who].append(taken(run, device) / count)
    return {who: _spread(seconds[1:] or seconds) for who, seconds in samples.items()}


def _spread(samples: list[float]) -> tuple[float, float, float]:
    ranked = sorted(samples)
    last = len(ranked) - 1
    return ranked[round(last * 0.5)], ranked[round(last * 0.1)], ranked[round(last * 0.9)]


class precise:  # noqa: N801
    """float32 products in float32, or in TF32."""

    def __init__(self, yes: bool):
        self.yes, self.before = yes, torch.backends.cuda.matmul.allow_tf32

    def __enter__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = not self.yes

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def measured(problem: Problem, device: str, seed: int, rounds: int) -> Row:
    """One problem: built, compared, timed. Where ours is wrong or fails, nothing is timed."""
    from benchmarks.sparse import gpu_contenders as who

    case = who.build_case(problem, device, seed)
    row = Row(
        problem.title, problem.suite, problem.task, problem.sparsity, problem.n, problem.m,
        problem.k, str(problem.dtype).removeprefix("torch."), int(case.w.count_nonzero()),
    )  # fmt: skip
    limit = ALLOWED[problem.dtype]
    with torch.no_grad(), precise(True):
        try:
            result, row.choice = who.ours_poisoned(case)
            row.errors["demask"] = who.error(case, result)
        except Exception as failure:
            row.not_run["demask"] = f"{type(failure).__name__}: {failure}"[:300]
            return row
        if not row.errors["demask"] <= limit:
            row.not_run["demask"] = f"{row.choice} is wrong by {row.errors['demask']:.1e}"
            return row
        row.prepared = prepared(case, device)
        calls = {}
        for name, make in who.CONTENDERS.items():
            try:
                products = make(case)
                if name not in who.OTHERS:
                    row.errors[name] = who.error(case, products[-1]())
                    if not row.errors[name] <= limit:
                        raise who.NotRun(f"wrong by {row.errors[name]:.1e}")
                calls[name] = products
            except Exception as failure:
                row.not_run[name] = f"{failure}"[:120] or type(failure).__name__
        row.seconds = timed(calls, device, rounds, row.not_run)
    return row


def prepared(case: Case, device: str) -> float:
    """Seconds of the first call for a matrix of which nothing is known but its kind."""
    from benchmarks.sparse import gpu_contenders as who

    calls = who.ours(case)
    calls[0]()
    who.forget()
    return taken(calls[0], device)


def rows(problems: Iterable[Problem], options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """What there was time for, and the titles of what there was not."""
    begin, results, left = perf_counter(), [], []
    for problem in problems:
        if perf_counter() - begin > options.seconds:
            left.append(problem.title)
            continue
        row = measured(problem, options.device, options.seed, options.rounds)
        results.append(row)
        times = {who: f"{1e6 * s[0]:.1f}" for who, s in row.seconds.items()}
        words = row.not_run.get("demask", f"{row.choice}; microseconds {times}")
        print(f"{row.title}: {words}", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return results, left


def device_words(device: str) -> str:
    """The device and the versions."""
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {python}"
    return f"{name}, {versions}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the folder of dlmc_subset.zip; else no suite B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=520, help="at most, for all")
    parser.add_argument("--every", type=int, default=9, help="of the collection's matrices")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_sparse.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a GPU that torch sees; --device cpu shows that this runs")
    if options.data and not (options.data / "dlmc_subset.zip").is_file():
        parser.error(f"--data: expected dlmc_subset.zip in {options.data}")
    return options


def main() -> None:
    options = arguments()
    if options.device == "cpu" and "TRITON_INTERPRET" not in os.environ:
        # it counts when Triton is imported, which torch may have done
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks", "run", "gpu_sparse", *sys.argv[1:]]
        )
    suites = [list(layers())] if options.device == "cuda" else [tiny()]
    if options.data:
        suites.append(list(pruned(options.data / "dlmc_subset.zip", options.every)))
    # B in between, so that a short run has some of both
    problems = [p for group in zip_long(suites) for p in group]
    results, left = rows(problems, options)
    text = page(
        results,
        left,
        provenance("gpu_sparse", device_words(options.device), f"seed {options.seed}"),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    stored = [{name: getattr(row, name) for name in Row.__slots__} for row in results]
    options.output.with_suffix(".json").write_text(json.dumps(stored, indent=1) + "\n")
    print(text)
    if any("demask" in row.not_run for row in results):
        sys.exit("some products of ours are wrong or failed: see the page")


def tiny() -> list[Problem]:
    """Layers that the interpreter gets through."""
    return list(islice(layers(((128, 256),), (4,), (0.9,)), 3))


def zip_long(suites: list[list[Problem]]) -> Iterable[list[Problem]]:
    """One of each suite in turn, until all are there."""
    for k in range(max(map(len, suites))):
        yield [suite[k] for suite in suites if k < len(suite)]


if __name__ == "__main__":
    main()
