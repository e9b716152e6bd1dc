"""Which kernel multiplies on a GPU: those that can are measured once, the fastest is kept.

Measurements lie in the file of `machine.cost`, by the device, the sizes, the density and the type.
What is decompressed and given to the dense library is always one of the candidates, so a sparse
matrix is slower than a dense one by no more than its decompression.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demask.machine.cost import Costs, Question
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.gpu_formats import TILE, MatrixFormats, processors_of

CALLS = 12  # per measurement
COPIES = 8  # of a matrix at most, so that it is read from memory and not from the cache
WIDEST = 128  # columns of a tile
Run = Callable[["KernelChoice", CsrMatrix, MatrixFormats], object]


class KernelChoice(NamedTuple):
    """kind: "rows", "bitmap" or "dense". height, width: of a tile; for SDDMM, entries (or rows) and
    the step of the sum. split: parts of the sum."""

    kind: str
    height: int = 0
    width: int = 0
    warps: int = 4
    split: int = 1


def candidates(task: str, m: CsrMatrix, n: int, bits: bool, processors: int) -> list[KernelChoice]:
    """What could be fast, the best guess first. task: "spmm", "turned" or "sddmm" (n: length of
    its sums). bits: whether there is a bitmap."""
    density = m.col.numel() / max(m.size[0] * m.size[1], 1)
    if task == "sddmm":
        rows = [KernelChoice("rows", *shape) for shape in ((32, 128, 4), (16, 64, 2), (8, 128, 1))]
        tiles = [
            KernelChoice("bitmap", *shape) for shape in ((128, 64, 4), (128, 32, 8), (64, 64, 4))
        ]
    else:
        rows, tiles = _by_rows(n), _by_bitmap(task, m, n, processors)
    tiles = tiles if bits else []
    whole = [KernelChoice("dense")]
    if m.values.dtype == torch.float32 or density < 0.03:
        order = [rows, tiles, whole] if density < 0.2 else [whole, rows, tiles]
    else:
        order = [tiles, whole, rows] if n <= WIDEST or task == "sddmm" else [whole, tiles, rows]
    return [choice for group in order for choice in group]


def _by_rows(n: int) -> list[KernelChoice]:
    width = min(max(_power(n), 8), WIDEST)
    return [
        KernelChoice("rows", area * warps // width, width, warps)
        for area, warps in ((256, 1), (128, 1), (256, 2), (512, 2))
        if area * warps >= width
    ]


def _by_bitmap(task: str, m: CsrMatrix, n: int, processors: int) -> list[KernelChoice]:
    width = min(max(_power(n), 16), WIDEST)
    found = []
    for height, warps in ((128, 8), (64, 4), (128, 4)):
        if width == WIDEST and warps == 4 and height == 128:
            continue  # its sums do not fit registers
        high, tiles = -(-m.size[0] // height), -(-m.size[1] // TILE)
        blocks, steps = (tiles, high) if task == "turned" else (high, tiles)
        blocks *= -(-n // width)
        for waves in (2, 1, 4):
            split = max(1, min(waves * processors // blocks, steps // 4, 16))
            found.append(KernelChoice("bitmap", height, width, warps, split))
    return list(dict.fromkeys(found))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1)
def costs() -> Costs:
    """The machine's measurements, read once."""
    return Costs.open()


_CHOSEN: dict[Any, KernelChoice] = {}


def choose(task: str, m: CsrMatrix, form: MatrixFormats, x: Tensor, run: Run) -> KernelChoice:
    """The fastest way to run a task with this matrix and x: measured at the first call of its kind,
    but not while a CUDA graph is recorded, when the guess is taken."""
    n = x.shape[1]
    what = kind_of(task, m, x)
    key = (x.device, what)
    if key in _CHOSEN:
        return _CHOSEN[key]
    options = candidates(task, m, n, form.bitmap(m) is not None, processors_of(x.device))
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return options[0]
    here = f"{torch.cuda.get_device_name(x.device)} {what}"
    with torch.cuda.device(x.device):
        _CHOSEN[key] = fastest(here, options, lambda c: recorded(c, m, form, run), costs())
    return _CHOSEN[key]


def kind_of(task: str, m: CsrMatrix, x: Tensor) -> str:
    """What calls have in common for which one choice is good: numbers of columns up to the same
    power of two, densities that agree in two digits."""
    density = m.col.numel() / max(m.size[0] * m.size[1], 1)
    lies = "columns" if x.stride(1) == 1 else "rows"
    named = "" if m.names is None else " named"
    return f"{task} {m.size}{named} n={_power(x.shape[1])} d={density:.1e} {x.dtype} by {lies}"


def fastest(
    here: str, options: Sequence[KernelChoice], make: Callable[[KernelChoice], Callable[[], object]],
    known: Costs,
) -> KernelChoice:  # fmt: skip
    """The option whose call takes least, as far as it runs here; what is not known is measured and
    written down. here: the device and the kind of call. make: of an option, the call to time."""
    asked = {c: Question(f"{here} {' '.join(map(str, c))}", 0.0, 0.0, partial(make, c))
             for c in options}  # fmt: skip
    taken = {c: known.seconds(question) for c, question in asked.items()}
    known.save()
    return min(options, key=lambda c: taken[c])


def recorded(
    choice: KernelChoice, m: CsrMatrix, form: MatrixFormats, run: Run
) -> Callable[[], object]:
    """CALLS calls as one CUDA graph that reads copies of the matrix in turn: together they are
    larger than three times the cache, or there are COPIES."""
    run(choice, m, form)  # kernels are compiled, tensors made
    props: Any = torch.cuda.get_device_properties(m.values.device)
    bytes_ = max(m.values.nbytes + m.size[0] * m.size[1] * 3 // 16, 1)
    count = min(COPIES, -(-3 * props.L2_cache_size // bytes_))
    several = [(m, form)]
    for _ in range(count - 1):
        own = m._replace(values=m.values.clone(), col=m.col.clone())
        several.append((own, copy.deepcopy(form)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one, its in several:
            run(choice, one, its)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(CALLS):
            run(choice, *several[k % count])
    return partial(_replayed, graph, several)


def _replayed(graph: Any, _: object) -> None:
    """The tensors live as long as the graph."""
    graph.replay()
