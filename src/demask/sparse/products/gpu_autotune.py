"""Choice of the GPU kernel of a product: candidates are measured once, and the fastest is used.

Measurements are stored in the file of `machine.cost`, by device, sizes, density and dtype.
Decompression followed by the dense library is always a candidate, so a sparse matrix is slower than
a dense one by at most its decompression.
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

TRANSPOSED = "transposed"  # name of the transposed product in cost files
CALLS = 12  # per measurement
COPIES = 8  # most copies of a matrix, so that it is read from memory and not from the cache
WIDEST = 128  # columns of a tile
Run = Callable[["KernelChoice", CsrMatrix, MatrixFormats], object]


class KernelChoice(NamedTuple):
    """kind: "rows", "bitmap" or "dense". height, width: of a tile; for SDDMM, entries (or rows) and
    the step of the sum. split: parts of the sum.
    """

    kind: str
    height: int = 0
    width: int = 0
    warps: int = 4
    split: int = 1


def candidates(task: str, m: CsrMatrix, n: int, bits: bool, processors: int) -> list[KernelChoice]:
    """Kernels that may be the fastest, the most likely first.

    task: "spmm", TRANSPOSED or "sddmm" (n: length of its sums). bits: whether there is a bitmap.
    """
    density = m.col.numel() / max(m.size[0] * m.size[1], 1)
    if task == "sddmm":
        rows = [KernelChoice("rows", *shape) for shape in ((32, 128, 4), (16, 64, 2), (8, 128, 1))]
        tiles = [KernelChoice("bitmap", *shape) for shape in ((128, 64, 4), (128, 32, 8), (64, 64, 4))]
    else:
        rows, tiles = _by_rows(n), _by_bitmap(task, m, n, processors)
    tiles = tiles if bits else []
    dense = [KernelChoice("dense")]
    if m.values.dtype == torch.float32 or density < 0.03:
        order = [rows, tiles, dense] if density < 0.2 else [dense, rows, tiles]
    else:
        order = [tiles, dense, rows] if n <= WIDEST or task == "sddmm" else [dense, tiles, rows]
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
    choices = []
    for height, warps in ((128, 8), (64, 4), (128, 4)):
        if width == WIDEST and warps == 4 and height == 128:
            continue  # its sums do not fit in registers
        high, tiles = -(-m.size[0] // height), -(-m.size[1] // TILE)
        blocks, steps = (tiles, high) if task == TRANSPOSED else (high, tiles)
        blocks *= -(-n // width)
        for waves in (2, 1, 4):
            split = max(1, min(waves * processors // blocks, steps // 4, 16))
            choices.append(KernelChoice("bitmap", height, width, warps, split))
    return list(dict.fromkeys(choices))


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@lru_cache(maxsize=1)
def costs() -> Costs:
    """The measurements of this machine, read once."""
    return Costs.open()


_CHOSEN: dict[Any, KernelChoice] = {}


def choose(task: str, m: CsrMatrix, formats: MatrixFormats, x: Tensor, run: Run) -> KernelChoice:
    """The fastest kernel for a task with this matrix and x, measured at the first call of its kind.

    While a CUDA graph is recorded, nothing can be measured: the first candidate is returned.
    """
    n = x.shape[1]
    kind = kind_of(task, m, x)
    key = (x.device, kind)
    if key in _CHOSEN:
        return _CHOSEN[key]
    options = candidates(task, m, n, formats.bitmap(m) is not None, processors_of(x.device))
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return options[0]
    device_and_kind = f"{torch.cuda.get_device_name(x.device)} {kind}"
    with torch.cuda.device(x.device):
        _CHOSEN[key] = fastest(device_and_kind, options, lambda c: recorded(c, m, formats, run), costs())
    return _CHOSEN[key]


def kind_of(task: str, m: CsrMatrix, x: Tensor) -> str:
    """A description of the calls that share one choice: sizes, number of columns rounded up to a
    power of two, density to two digits, dtype and memory order.
    """
    density = m.col.numel() / max(m.size[0] * m.size[1], 1)
    order = "columns" if x.stride(1) == 1 else "rows"
    named = "" if m.names is None else " named"
    return f"{task} {m.size}{named} n={_power(x.shape[1])} d={density:.1e} {x.dtype} by {order}"


def fastest(
    device_and_kind: str,
    options: Sequence[KernelChoice],
    make: Callable[[KernelChoice], Callable[[], object]],
    known: Costs,
) -> KernelChoice:
    """The option with the fastest call; unknown ones are measured and saved.

    device_and_kind: prefix of the names of measurements. make: function option -> call to time.
    """
    questions = {c: Question(f"{device_and_kind} {' '.join(map(str, c))}", 0.0, 0.0, partial(make, c)) for c in options}
    seconds = {c: known.seconds(question) for c, question in questions.items()}
    known.save()
    return min(options, key=lambda c: seconds[c])


def recorded(choice: KernelChoice, m: CsrMatrix, formats: MatrixFormats, run: Run) -> Callable[[], object]:
    """CALLS calls as one CUDA graph, which alternate between copies of the matrix.

    Together the copies are larger than three times the cache, or there are COPIES of them.
    """
    run(choice, m, formats)  # compiles kernels and creates tensors
    properties: Any = torch.cuda.get_device_properties(m.values.device)
    bytes_ = max(m.values.nbytes + m.size[0] * m.size[1] * 3 // 16, 1)
    count = min(COPIES, -(-3 * properties.L2_cache_size // bytes_))
    copies = [(m, formats)]
    for _ in range(count - 1):
        copy_ = m._replace(values=m.values.clone(), col=m.col.clone())
        copies.append((copy_, copy.deepcopy(formats)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for matrix, matrix_formats in copies:
            run(choice, matrix, matrix_formats)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(CALLS):
            run(choice, *copies[k % count])
    return partial(_replayed, graph, copies)


def _replayed(graph: Any, _: object) -> None:
    """Replay a graph. The second argument refers to its tensors, which must live as long."""
    graph.replay()
