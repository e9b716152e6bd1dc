"""Sparse products on a GPU, ours and cuBLAS, cuSPARSE, 2:4 and blocks:

    python -m benchmarks run gpu_sparse --data FOLDER

FOLDER: that of dlmc_subset.zip (shared/data next to the project). Needs torch for CUDA and Triton,
nothing from a network. Every result is compared with float64 before anything is timed. Times are
those of CUDA graphs that read copies of the weights in turn, more than three caches together;
contenders take turns; medians.

--seconds bounds it all: suite A (layers of language models), then B (really pruned networks); what
is left out is said. --device cpu shows that it runs, in Triton's interpreter, on tiny layers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from math import exp, log
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from benchmarks.common.catalog import SHARED_DATA, Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save
from benchmarks.sparse.gpu_problems import Problem, layers, pruned
from demask.machine.clock import Timing

BENCHMARK = Benchmark(
    "sparse products on a GPU: ours, cuBLAS, cuSPARSE, 2:4 and blocks",
    "at most 520 s",
    needs=("a CUDA GPU", SHARED_DATA),
    quick="--device cpu --seconds 30 --rounds 1",
    measures=("sparse/products", "kernels/gpu.py"),
)

if TYPE_CHECKING:
    from benchmarks.sparse.gpu_contenders import Case
    from demask.sparse.products.gpu_products import KernelChoice

ROUNDS, CALLS = 25, 12
LONG = 0.02  # seconds of a graph; longer ones are replayed less often
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 2e-3}
PEERS = ("cuBLAS", "cuBLAS TF32", "cuSPARSE", "2:4", "BSR")


@dataclass(slots=True)
class Row:
    """What came out: the seconds of a call of each, who computed ours, the seconds of its first
    call for a new matrix, why others did not run, and the error of each that was compared. swept: the
    seconds of our kernels, by their words."""

    problem: Problem
    nonzeros: int = 0
    choice: str = ""
    prepared: float = 0.0
    seconds: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    swept: dict[str, Timing] = field(default_factory=dict)


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
    contenders: Mapping[str, list[Callable[[], object]]], device: str, rounds: int, not_run: dict[str, str]
) -> dict[str, Timing]:
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
    return {who: Timing.of(seconds[1:] or seconds) for who, seconds in samples.items()}


@contextmanager
def precise(yes: bool) -> Iterator[None]:
    """float32 products in float32, or in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not yes
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measured(problem: Problem, device: str, seed: int, rounds: int, sweep: int = 0) -> Row:
    """One problem: built, compared, timed. Where ours is wrong or fails, nothing is timed.

    sweep: rounds in which all our kernels are timed first; the fastest of them is then ours. 0: the
    kernel is chosen as users' calls choose it.
    """
    from benchmarks.sparse import gpu_contenders as who

    case = who.build_case(problem, device, seed)
    row = Row(problem, int(case.w.count_nonzero()))
    limit = ALLOWED[problem.dtype]
    with torch.no_grad(), precise(True):
        choice = swept(case, device, sweep, row) if sweep else None
        try:
            result, row.choice = who.ours_poisoned(case, choice)
            row.errors["demask"] = who.error(case, result)
        except Exception as failure:
            row.not_run["demask"] = f"{type(failure).__name__}: {failure}"[:300]
            return row
        if not row.errors["demask"] <= limit:
            row.not_run["demask"] = f"{row.choice} is wrong by {row.errors['demask']:.1e}"
            return row
        row.prepared = prepared(case, device, choice)
        calls = {}
        for name, make in {**who.CONTENDERS, "demask": partial(who.ours, choice=choice)}.items():
            try:
                products = make(case)
                if name not in who.OTHERS:
                    row.errors[name] = who.error(case, products[-1]())
                    if not row.errors[name] <= limit:
                        raise who.NotRun(f"wrong by more than {limit:g}")
                calls[name] = products
            except Exception as failure:
                row.not_run[name] = f"{failure}"[:120] or type(failure).__name__
        row.seconds = timed(calls, device, rounds, row.not_run)
    return row


def swept(case: Case, device: str, rounds: int, row: Row) -> KernelChoice | None:
    """The fastest of our kernels that are right; their seconds and failures are entered into a row."""
    from benchmarks.sparse import gpu_contenders as who

    several, calls, limit = who.matrices(case), {}, ALLOWED[case.problem.dtype]
    choices = {who.words(choice): choice for choice in who.configurations(case)}
    for name, choice in choices.items():
        try:
            error = who.error(case, who.ours_poisoned(case, choice)[0])
            if not error <= limit:
                raise who.NotRun(f"is wrong by {error:.1e}")
            calls[name] = who.ours(case, several, choice)
        except Exception as failure:
            row.not_run[name] = f"{failure}"[:120] or type(failure).__name__
    row.swept = timed(calls, device, rounds, row.not_run)
    fastest = min(row.swept, key=lambda name: row.swept[name].median, default="")
    return choices.get(fastest)


def prepared(case: Case, device: str, choice: KernelChoice | None = None) -> float:
    """Seconds of the first call for a matrix of which nothing is known but its kind."""
    from benchmarks.sparse import gpu_contenders as who

    calls = who.ours(case, choice=choice)
    calls[0]()
    who.forget()
    return taken(calls[0], device)


def rows(
    problems: Iterable[Problem],
    options: argparse.Namespace,
    sweep: int = 0,
    done: Callable[[list[Row]], object] = lambda _: None,
) -> tuple[list[Row], list[str]]:
    """What there was time for, and the titles of what there was not. done: called after each row."""
    begin, results, left = perf_counter(), [], []
    for problem in problems:
        if perf_counter() - begin > options.seconds:
            left.append(problem.title)
            continue
        row = measured(problem, options.device, options.seed, options.rounds, sweep)
        results.append(row)
        done(results)
        times = {who: f"{1e6 * timing.median:.1f}" for who, timing in row.seconds.items()}
        words = row.not_run.get("demask", f"{row.choice}; microseconds {times}")
        print(f"{problem.title}: {words}", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return results, left


def device_words(device: str) -> str:
    """The device, and the version of Triton."""
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else "Triton's interpreter"
    return f"{name}, Triton {triton.__version__}"


#: (what, which rows, peer, how many times as fast)
GOALS: Sequence[tuple[str, Callable[[Problem], bool], str, float]] = (
    *(
        (
            f"bfloat16, n ≤ 64, layers from 8192², {s:.0%}",
            lambda p, s=s: (
                p.suite == "A"
                and p.task == "spmm"
                and p.n <= 64
                and p.m * p.k >= 8192**2
                and abs(p.sparsity - s) < 0.01
            ),
            "cuBLAS",
            goal,
        )
        for s, goal in ((0.7, 1.8), (0.8, 2.5), (0.9, 3.0))
    ),
    ("bfloat16 layers, all", lambda p: p.suite == "A" and p.task == "spmm", "cuSPARSE", 20.0),
    ("float32, really pruned networks", lambda p: p.suite == "B", "cuSPARSE", 3.0),
    ("bfloat16 SDDMM", lambda p: p.task == "sddmm", "cuSPARSE", 10.0),
)
HEAD = ["product", "demask, µs", "10 % to 90 %, µs", "by", "first call, ms", *PEERS, "useful TFLOP/s", "error"]


def ratios(rows: Iterable[Row], peer: str) -> list[float]:
    """The peer's time over ours, where both ran."""
    both = [row.seconds for row in rows if {"demask", peer} <= row.seconds.keys()]
    return [seconds[peer].median / seconds["demask"].median for seconds in both]


def goals(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    """Geometric means, and what was aimed at."""
    for what, among, peer, goal in GOALS:
        speeds = ratios((row for row in rows if among(row.problem)), peer)
        if speeds:
            mean = exp(sum(map(log, speeds)) / len(speeds))
            faster = sum(one > 1 for one in speeds)
            yield [what, peer, goal, mean, min(speeds), max(speeds), faster, len(speeds)]


def cells(row: Row) -> list[Cell]:
    ours = row.seconds["demask"]
    rate = 2 * row.nonzeros * row.problem.n / ours.median / 1e12
    return [
        row.problem.title,
        1e6 * ours.median,
        1e6 * (ours.high - ours.low),
        row.choice,
        1e3 * row.prepared,
        *(next(iter(ratios([row], peer)), None) for peer in PEERS),
        rate,
        row.errors["demask"],
    ]


def page(rows: Sequence[Row], left: Sequence[str]) -> Page:
    """left: titles of what there was no time for."""
    parts: list[str | Table] = [
        """
Medians of CUDA graphs that read copies of the weights in turn; contenders took turns. *10 % to
90 %*: between these quantiles. Under a peer: its time over ours, so that more than 1 means that
ours is faster. cuBLAS computes with the zeros; TF32, 2:4 and BSR (blocks of 64) compute something
else: they cut numbers, drop weights, or want blocks. Ours is measured once per kind of product;
`dense` means that it was fastest to decompress the weights and call cuBLAS. *First call*: of a new
matrix, whose form (tasks, bitmap) is computed then and cached. *Error*: of norms, against float64.
Geometric means first, and the goals:""",
        Table(["which", "against", "goal", "mean", "least", "most", "faster", "of"], [*goals(rows)], 2),
        Table(HEAD, [cells(row) for row in rows if "demask" in row.seconds]),
    ]
    failed: dict[str, list[str]] = {}
    for row in rows:
        for who, why in row.not_run.items():
            if "alone" not in why and "has no" not in why:
                failed.setdefault(f"{who}, {why}", []).append(row.problem.title)
    if failed:
        lines = (
            f"- {why}: {titles[0]}" + f" and {len(titles) - 1} more" * (len(titles) > 1)
            for why, titles in failed.items()
        )
        parts.append("\n".join(["Not run:", "", *lines]))
    if left:
        parts.append(f"No time was left for {len(left)}: " + "; ".join(left) + ".")
    spans = []
    for peer in ("cuBLAS", "cuSPARSE"):
        if speeds := ratios(rows, peer):
            slower = sum(one < 1 for one in speeds)
            spans.append(
                f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as {peer}, slower in {slower} of {len(speeds)}"
            )
    return Page("Sparse products on a GPU", parts, "; ".join(spans))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of dlmc_subset.zip; else no suite B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=520, help="at most, for all")
    parser.add_argument("--every", type=int, default=9, help="of the collection's matrices")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a GPU that torch sees; --device cpu shows that this runs")
    if options.data and not (options.data / "dlmc_subset.zip").is_file():
        parser.error(f"--data: expected dlmc_subset.zip in {options.data}")
    return options


def interpret(name: str) -> None:
    """Start a benchmark again, in Triton's interpreter."""
    if "TRITON_INTERPRET" not in os.environ:
        # it counts when Triton is imported, which torch may have done
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", "run", name, *sys.argv[1:]])


def main() -> None:
    options = arguments()
    if options.device == "cpu":
        interpret("gpu_sparse")
    suites = [list(layers())] if options.device == "cuda" else [tiny()]
    if options.data:
        suites.append(list(pruned(options.data / "dlmc_subset.zip", options.every)))
    # B in between, so that a short run has some of both
    problems = [p for group in zip_longest(*suites) for p in group if p is not None]
    results, left = rows(problems, options)
    run = Run.now(device_words(options.device), f"seed {options.seed}")
    print(save("gpu_sparse", page(results, left), run, options.output))
    if any("demask" in row.not_run for row in results):
        sys.exit("some products of ours are wrong or failed: see the page")


def tiny() -> list[Problem]:
    """Layers that the interpreter gets through."""
    return list(islice(layers(((128, 256),), (4,), (0.9,)), 3))


if __name__ == "__main__":
    main()
