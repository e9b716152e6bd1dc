"""Minutes on a GPU: what is right, and how fast each of our kernels is:

    python -m benchmarks run gpu_session --minutes 8 --out FOLDER --data FOLDER

First the tests of `kernels/gpu` that need one. Then, for each product, all kernels that may be chosen, in
turns; the fastest of them against cuBLAS, cuSPARSE, 2:4 and blocks, as `gpu_sparse` times them; at last
a network. A line per finished row is printed and written to FOLDER/gpu_session.jsonl at once, and the page
and the ledger as far as they are: a run that is cut off keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import ROOT
from benchmarks.common.catalog import SHARED_DATA, Benchmark
from benchmarks.common.ledger import LEDGER, RESULTS, Cell, Page, Run, Table, save
from benchmarks.sparse import gpu_sparse
from benchmarks.sparse.gpu_problems import LAYERS, Problem, layer, pruned
from benchmarks.sparse.gpu_sparse import Row, device_words, interpret, rows, timed
from demask.machine.clock import Timing
from demask.sparse import SparseLinear

NAME = "gpu_session"
BENCHMARK = Benchmark(
    "each kernel for GPUs on the layers that matter most, and their tests",
    "8 minutes",
    needs=("a CUDA GPU", SHARED_DATA),
    quick=None,
    measures=("sparse/products", "kernels/gpu.py"),
)
SWEEP = 5  # rounds in which all our kernels are timed
TESTS = 90  # seconds for tests
#: columns and sparsities, the most wanted first
COLUMNS, SPARSITIES, WIDE = (1, 16, 4, 64, 2, 8), (0.7, 0.9, 0.8, 0.5), (256, 2048, 6272)


def problems(data: Path | None, every: int) -> Iterator[Problem]:
    """Layers of language models in bfloat16, really pruned matrices in float32, SDDMM in float32."""
    for n in COLUMNS:
        for sparsity in SPARSITIES:
            yield from (layer("spmm", m, k, n, sparsity) for m, k in LAYERS)
    if data is not None:
        yield from pruned(data / "dlmc_subset.zip", every, WIDE)
    for sparsity in SPARSITIES:
        yield layer("sddmm", 4096, 4096, 256, sparsity, torch.float32)


def tested(seconds: float) -> str:
    """The outcome of the tests that need a GPU, in one line."""
    words = [sys.executable, "-m", "pytest", "tests/kernels/gpu", "-q", "-p", "no:cacheprovider", "--tb=line"]
    try:
        done = subprocess.run(
            [*words, "-k", "cuda or on_a_gpu"], cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as cut:
        output = cut.stdout or b""
        return f"not finished in {seconds:g} s: {len(output.splitlines())} lines of dots, " + (
            "some failed" if b"F" in output else "none failed"
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")) or "passed" in line]
    return f"exit status {done.returncode}. " + "; ".join(lines or [done.stderr[-300:]])


class Mlp(nn.Module):
    """A gated block of a language model, with its residual sum."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def network(sparsity: float, n: int, device: str, rounds: int, sizes: tuple[int, int, int]) -> list[Cell]:
    """A row of the table of networks: `sizes` blocks, their width and hidden width, in bfloat16."""
    blocks, width, hidden = sizes
    with torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        dense = nn.Sequential(*(Mlp(width, hidden) for _ in range(blocks))).to(torch.bfloat16).eval()
        sparse = nn.Sequential(*(Mlp(width, hidden) for _ in range(blocks))).to(torch.bfloat16).eval()
        sparse.load_state_dict(dense.state_dict())
        for one, other in zip(dense.modules(), [*sparse.modules()], strict=True):
            if isinstance(one, Mlp) and isinstance(other, Mlp):
                for name in ("gate", "up", "down"):
                    linear: nn.Linear = getattr(one, name)
                    linear.weight *= torch.rand_like(linear.weight) >= sparsity
                    setattr(other, name, SparseLinear.from_dense(linear).eval())
        x = torch.randn(n, width, dtype=torch.bfloat16)
        wanted, result = dense(x).double(), sparse(x).double()
        error = float(torch.linalg.vector_norm(result - wanted) / torch.linalg.vector_norm(wanted))
        not_run: dict[str, str] = {}
        calls = {"demask": [partial(sparse, x)], "torch": [partial(dense, x)]}
        seconds = timed(calls, device, rounds, not_run)
    sizes_of = [sum(t.nbytes for t in model.state_dict().values()) for model in (dense, sparse)]
    times = [1e6 * seconds[who].median if who in seconds else None for who in ("demask", "torch")]
    title = f"{blocks} gated blocks {width}×{hidden}, n={n}, {sparsity:.0%}, bfloat16"
    return [title, *times, *(1e-6 * size for size in sizes_of[::-1]), error, "; ".join(not_run.values())]


def page(results: Sequence[Row], left: Sequence[str], networks: Sequence[list[Cell]], outcome: str) -> Page:
    """The page of `gpu_sparse`, with all our kernels, networks and the outcome of tests."""
    products = gpu_sparse.page(results, left)
    swept: list[list[Cell]] = [
        [row.problem.title, name, 1e6 * timing.median, timing.median / min(t.median for t in row.swept.values())]
        for row in results
        for name, timing in sorted(row.swept.items(), key=lambda item: item[1].median)
    ]
    head = ["network", "demask, µs", "torch, µs", "demask, MB", "torch, MB", "difference", "not run"]
    parts = [
        *products.parts,
        "Networks, replayed as one CUDA graph; their outputs are compared with those of the dense one in bfloat16:",
        Table(head, networks),
        "All our kernels, timed in turns before the fastest of each product met the others:",
        Table(["product", "kernel", "µs", "to the fastest"], swept, 2),
        f"Tests: {outcome}",
    ]
    return replace(products, title="A session on a GPU", parts=parts)


def stored(row: Row) -> str:
    """A row as a line of JSON."""
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name != "problem"}
    return json.dumps({"product": row.problem.title} | values, default=timing_or_text, ensure_ascii=False)


def timing_or_text(value: object) -> object:
    return asdict(value) if isinstance(value, Timing) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="at most, for all")
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument("--data", type=Path, help="the folder of dlmc_subset.zip; else no really pruned matrices")
    parser.add_argument("--every", type=int, default=25, help="of the collection's matrices")
    parser.add_argument("--only", default="", help="products whose title has this text")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=gpu_sparse.ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("expected a GPU that torch sees; --device cpu shows that this runs, in Triton's interpreter")
    if options.data and not (options.data / "dlmc_subset.zip").is_file():
        parser.error(f"--data: expected dlmc_subset.zip in {options.data}")
    if not on_gpu:
        interpret(NAME)
    end = perf_counter() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    outcome = tested(min(TESTS, 30 * options.minutes)) if on_gpu and not options.only else "not run"
    print(f"tests: {outcome}", flush=True)
    run = Run.now(device_words(options.device), f"seed {options.seed}")
    lines = options.out / f"{NAME}.jsonl"
    lines.write_text(json.dumps(asdict(run) | {"tests": outcome}) + "\n")
    networks: list[list[Cell]] = []

    def keep(results: Sequence[Row], left: Sequence[str] = ()) -> None:
        paper = options.out / f"{NAME}.md"
        save(NAME, page(results, left, networks, outcome), run, None if on_gpu else paper)
        if on_gpu:  # of a machine that may be gone the next minute
            shutil.copy(LEDGER, options.out)
            shutil.copy(RESULTS / paper.name, paper)

    def keep_row(results: list[Row]) -> None:
        with lines.open("a") as file:
            file.write(stored(results[-1]) + "\n")
        keep(results)

    every = list(problems(options.data, options.every)) if on_gpu else [layer("spmm", 64, 64, 1, 0.9)]
    chosen = [problem for problem in every if options.only in problem.title]
    reserve = 60 if on_gpu and not options.only else 0  # seconds for networks
    options.seconds = end - perf_counter() - reserve
    results, left = rows(chosen, options, min(SWEEP, options.rounds), keep_row)
    sizes = (4, 4096, 14336) if on_gpu else (1, 64, 96)
    for sparsity, n in ((0.7, 1), (0.9, 1), (0.9, 16)) if not options.only else ():
        if perf_counter() < end:
            networks.append(network(sparsity, n, options.device, options.rounds, sizes))
            print(*networks[-1], flush=True)
            with lines.open("a") as file:
                file.write(json.dumps({"network": networks[-1]}, ensure_ascii=False) + "\n")
    keep(results, left)
    failed = outcome.startswith("exit status") and not outcome.startswith("exit status 0")
    if failed or any("demask" in row.not_run for row in results):
        sys.exit("tests failed, or products of ours are wrong: see the page")


if __name__ == "__main__":
    main()
