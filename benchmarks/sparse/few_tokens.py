"""Linear layers with one to eight tokens, and sparse products with few columns, next to torch, MKL and SciPy:
`python -m benchmarks run few_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import scipy
import scipy.sparse
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks.common.catalog import BENCH, Benchmark
from benchmarks.common.command import command
from benchmarks.common.ledger import Cell, Page, Table
from demask.machine.clock import Timing, race
from demask.sparse import PackedLinear, spmm

BENCHMARK = Benchmark(
    "linear layers token by token, and sparse products with few columns",
    "about 5 minutes",
    needs=(BENCH,),
    quick="--networks bfloat16_70% csr_2048x512_10% --threads 1 --pairs 3 --seconds 1",
)

MEMORY = 2**28  # bytes of weights that take turns: more than caches hold
SIZE, TOKENS, COLUMNS = 4096, (1, 2, 4, 8), (1, 2, 4, 8)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}
LAYERS = [f"{name}_{zeros}%" for name in DTYPES for zeros in (0, 50, 70, 80, 90)]
MATRICES = {
    "csr_2048x512_10%": (2048, 512, 0.1),
    "csr_512x2048_5%": (512, 2048, 0.05),
    "csr_4096x4096_30%": (4096, 4096, 0.3),
}
OURS, DENSE, TORCH, SCIPY = "demask", "dense kernel", "torch", "SciPy"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. form: of the packed weight. size: its bytes, of those of the dense one. error: against float64,
    relative to the largest output."""

    name: str
    columns: int
    threads: int
    form: str
    size: float
    error: float
    timings: Mapping[str, Timing]

    def speed(self, other: str) -> float | None:
        """How many times as fast as another one."""
        return self.timings[other].median / self.timings[OURS].median if other in self.timings else None


def layer_rows(name: str, threads: int, pairs: int, seconds: float) -> Iterator[Row]:
    """A layer in its own dtype by torch, packed, and packed without regard to zeros."""
    kind, _, share = name.partition("_")
    dtype, zeros = DTYPES[kind], int(share.rstrip("%")) / 100
    stored = torch.int8 if kind == "int8" else dtype
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
    layer.weight.data *= torch.rand(SIZE, SIZE) >= zeros
    packed = PackedLinear.from_dense(layer, dtype=stored)
    weight = layer.weight.detach()
    count = -(-MEMORY // (weight.numel() * weight.element_size()))
    weights = cycle([weight.clone() for _ in range(count)])

    def copies(form: str) -> Iterator[PackedLinear]:
        return cycle([PackedLinear.from_dense(layer, form, dtype=stored) for _ in range(count)])

    packs = copies(packed.form)
    denses = packs if packed.form == "dense" else copies("dense")
    exact = packed.packed
    size = exact.nbytes / (weight.numel() * weight.element_size())
    for tokens in TOKENS:
        x = torch.randn(tokens, SIZE).to(dtype)
        wide = PackedLinear(exact, dtype=torch.float32)
        expected = x.double() @ wide.weight.double().T
        error = float((wide(x.float()) - expected).abs().max() / expected.abs().max())
        calls: dict[str, Callable[[], Tensor]] = {
            OURS: lambda x=x: next(packs)(x),
            DENSE: lambda x=x: next(denses)(x),
            TORCH: lambda x=x: F.linear(x, next(weights)),
        }
        timings = Timing.of_each(race(calls, pairs, 1 + count, seconds=seconds))
        yield Row(name, tokens, threads, packed.form, size, error, timings)


def matrix_rows(name: str, threads: int, pairs: int, seconds: float) -> Iterator[Row]:
    """spmm of a matrix in CSR, torch's product of it (MKL), and SciPy's, which has one thread."""
    rows, columns, density = MATRICES[name]
    torch.manual_seed(0)
    dense = torch.randn(rows, columns) * (torch.rand(rows, columns) < density)
    csr = dense.to_sparse_csr()
    matrix = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), dense.shape)
    other = scipy.sparse.csr_matrix(dense.numpy())
    for n in COLUMNS:
        x = torch.randn(columns, n)
        expected = dense.double() @ x.double()
        error = float((spmm(matrix, x) - expected).abs().max() / expected.abs().max())
        calls: dict[str, Callable[[], object]] = {
            OURS: lambda x=x: spmm(matrix, x),
            TORCH: lambda x=x: matrix @ x,
            SCIPY: lambda x=x: other @ x.numpy(),
        }
        yield Row(name, n, threads, "CSR", 2 * density, error, Timing.of_each(race(calls, pairs, seconds=seconds)))


def rows(chosen: Sequence[str], threads: Sequence[int], pairs: int, seconds: float, bar: Progress) -> Iterator[Row]:
    step = bar.add_task("", total=len(chosen) * len(threads))
    for count in threads:
        torch.set_num_threads(count)
        for name in chosen:
            bar.update(step, description=f"{name}, {count} threads")
            with torch.no_grad():
                yield from (matrix_rows if name in MATRICES else layer_rows)(name, count, pairs, seconds)
            bar.advance(step)


HEAD = [
    "matrix",
    "columns",
    "threads",
    "form",
    "bytes of dense",
    "demask, ms",
    "dense kernel, ms",
    "torch, ms",
    "SciPy, ms",
    "over torch",
    "over the dense kernel",
    "over SciPy",
    "error",
]


def cells(row: Row) -> list[Cell]:
    timings = [row.timings.get(who) for who in (OURS, DENSE, TORCH, SCIPY)]
    speeds = [row.speed(who) for who in (TORCH, DENSE, SCIPY)]
    return [row.name.replace("_", ", "), row.columns, row.threads, row.form, row.size, *timings, *speeds, row.error]


def page(rows: Sequence[Row]) -> Page:
    text = f"""
Linear layers of {SIZE:,} x {SIZE:,} with random weights and zeros in no pattern, whose weights come from memory:
copies of {MEMORY >> 20} MiB in all take turns. *demask*: `PackedLinear` in the form that it chooses. *dense
kernel*: the same with form "dense", which reads the zeros, too: what is gained over it is gained by zeros.
*torch*: `F.linear` in the layer's dtype; *int8* rows are bfloat16 layers whose weights demask stores in 8 bits,
which rounds. Products in CSR (float32, 32-bit indices): `spmm`, torch's `@` (MKL) and SciPy {scipy.__version__}, which
has one thread, on matrices that caches hold. *columns*: tokens, or columns of x. All contenders of a row run in
turns in one process (median, 10 %–90 % quantile). *Error*: of sums, against float64, relative to the largest
output."""
    speeds = [speed for row in rows if (speed := row.speed(TORCH))]
    summary = (
        f"{min(speeds):.2f} to {max(speeds):.2f} times as fast as torch, slower in "
        f"{sum(speed < 1 for speed in speeds)} of {len(speeds)} settings"
    )
    return Page("Linear layers token by token", [text, Table(HEAD, [*map(cells, rows)], 4)], summary)


def main() -> None:
    command("few_tokens", __doc__, rows, page, 2.0, [*LAYERS, *MATRICES])


if __name__ == "__main__":
    main()
