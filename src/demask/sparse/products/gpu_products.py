"""Products with sparse matrices on a GPU, with measured kernel choice.

    spmm, spmm_transposed, sddmm, densified, sparse_product

A matrix is a `CsrMatrix`, with or without its empty rows, in float32, float16 or bfloat16. Sums are
in float32 in a fixed order, so that repeated calls return the same bits. Dense tiles multiply
zeros, too: where x is infinite, they return NaN as a dense product does.

Candidates of a product are measured once, and the fastest is used. Measurements are stored in the file
of `machine.cost`, by device, sizes, density and dtype. Decompression followed by the dense library is
always a candidate, so a sparse matrix is slower than a dense one by at most its decompression; and with many
columns the dense matrix is cached, unless in `keep("memory")`, so that it is not slower at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demask.kernels import gpu
from demask.machine.cost import Costs, Question
from demask.ops.activations import Act, apply_activation
from demask.sparse.csr_matrix import CsrMatrix, like, row_of
from demask.sparse.products.gpu_formats import ALIGNED, TILE, MatrixFormats, formats_of, processors_of
from demask.sparse.products.keep import keep

TRANSPOSED = "transposed"  # name of the transposed product in cost files
CALLS = 12  # per measurement
COPIES = 8  # most copies of a matrix, so that it is read from memory and not from the cache
WIDEST = 128  # columns of a tile
CACHED_FROM = 128  # columns of x from which a dense matrix is cached
FEW_COLUMNS = ((8, 1), (16, 2), (32, 1), (8, 4))  # lanes that share a row, and warps, for at most 8 columns
Run = Callable[["KernelChoice", CsrMatrix, MatrixFormats], object]


class KernelChoice(NamedTuple):
    """kind: "rows", "bitmap", "dense" (decompressed in each call) or "cached". height, width: of a tile;
    for SDDMM, entries (or rows) and the step of the sum. split: parts of the sum; for "rows", the lanes
    that share a row.
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
        rows, tiles = _row_kernels(n), _bitmap_kernels(task, m, n, processors)
    tiles = tiles if bits else []
    is_cached = task != "sddmm" and n >= CACHED_FROM and keep.now() == "speed"
    dense = [KernelChoice("cached" if is_cached else "dense")]
    if m.values.dtype == torch.float32 or density < 0.03:
        order = [rows, tiles, dense] if density < 0.2 else [dense, rows, tiles]
    else:
        order = [tiles, dense, rows] if n <= WIDEST or task == "sddmm" else [dense, tiles, rows]
    return [choice for group in order for choice in group]


def _row_kernels(n: int) -> list[KernelChoice]:
    width = min(_next_power_of_two(n), WIDEST)
    if width <= 8:
        return [KernelChoice("rows", 32 * warps // lanes, width, warps, lanes) for lanes, warps in FEW_COLUMNS]
    return [
        KernelChoice("rows", area * warps // width, width, warps)
        for area, warps in ((256, 1), (128, 1), (256, 2), (512, 2))
        if area * warps >= width
    ]


def _bitmap_kernels(task: str, m: CsrMatrix, n: int, processors: int) -> list[KernelChoice]:
    width = min(max(_next_power_of_two(n), 16), WIDEST)
    choices = []
    for height, warps in ((128, 8), (64, 4), (128, 4)):
        if width == WIDEST and warps == 4 and height == 128:
            continue  # its sums do not fit in registers
        high, tiles = -(-m.size[0] // height), -(-m.size[1] // TILE)
        blocks, steps = (tiles, high) if task == TRANSPOSED else (high, tiles)
        blocks *= -(-n // width)
        for waves in (2, 4, 8, 1):
            split = max(1, min(waves * processors // blocks, steps // 4, 16))
            choices.append(KernelChoice("bitmap", height, width, warps, split))
    return list(dict.fromkeys(choices))


def _next_power_of_two(n: int) -> int:
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
    key = (x.device, kind, keep.now())
    is_recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if key in _CHOSEN:
        return _in_graph(_CHOSEN[key]) if is_recorded else _CHOSEN[key]
    options = candidates(task, m, n, formats.bitmap(m) is not None, processors_of(x.device))
    if not x.is_cuda or is_recorded:
        return _in_graph(options[0]) if is_recorded else options[0]
    device_and_kind = f"{torch.cuda.get_device_name(x.device)} {kind}"
    with torch.cuda.device(x.device):
        _CHOSEN[key] = fastest(device_and_kind, options, lambda c: recorded(c, m, formats, run), costs())
    return _CHOSEN[key]


def _in_graph(choice: KernelChoice) -> KernelChoice:
    """The choice for a CUDA graph that is recorded: a cached matrix would not follow values that change later."""
    return choice._replace(kind="dense") if choice.kind == "cached" else choice


def kind_of(task: str, m: CsrMatrix, x: Tensor) -> str:
    """A description of the calls that share one choice: sizes, number of columns rounded up to a
    power of two, density to two digits, dtype and memory order.
    """
    density = m.col.numel() / max(m.size[0] * m.size[1], 1)
    order = "columns" if x.stride(1) == 1 else "rows"
    named = "" if m.names is None else " named"
    return f"{task} {m.size}{named} n={_next_power_of_two(x.shape[1])} d={density:.1e} {x.dtype} by {order}"


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
        for matrix, matrix_formats in [*copies, *copies]:  # the second call keeps a dense matrix
            run(choice, matrix, matrix_formats)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(CALLS):
            run(choice, *copies[k % count])
    return partial(_replay, graph, copies)


def _replay(graph: Any, _: object) -> None:
    """Replay a graph. The second argument refers to its tensors, which must live as long."""
    graph.replay()


TYPES = (torch.float32, torch.float16, torch.bfloat16)
FINISH, AREA = 256, 1024  # columns and elements of a program that sums parts
AT_ONCE = 256  # products, or outputs, per program of a sparse product


def takes(m: CsrMatrix, x: Tensor) -> bool:
    """Whether kernels support these dtypes and sizes (positions must fit in 32 bits)."""
    return m.values.dtype in TYPES and x.dtype == m.values.dtype and m.col.numel() < 2**31 - 64


def spmm(
    m: CsrMatrix, x: Tensor, bias: Tensor | None = None, act: Act | None = None, choice: KernelChoice | None = None
) -> Tensor:
    """act(m @ x + bias) [rows, n] with x [columns, n], in the memory order of x.

    Raises BadInput for invalid indices.
    """
    if act is not None and act[0] not in gpu.ACTIVATIONS:  # registered at run time
        return apply_activation(spmm(m, x, bias, None, choice), act)
    formats = formats_of(m)
    out = like(x, m.size[0], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_align(m.values))
    return run(m, formats, x, bias, act, choice or select_kernel("spmm", m, x), out)


def select_kernel(task: str, m: CsrMatrix, a: Tensor, b: Tensor | None = None) -> KernelChoice:
    """The kernel for "spmm" (a: x), TRANSPOSED (a: x) or "sddmm", measured at the first call,
    without bias and activation.
    """
    formats = formats_of(m)
    if task == "sddmm":
        out, other = a.new_empty(m.col.shape), a if b is None else b
        return choose(task, m, formats, a, lambda c, m, formats: run_sddmm(m, formats, a, other, c, out))
    if task == TRANSPOSED:
        out = like(a, m.size[1], a.shape[1])
        return choose(task, m, formats, a, lambda c, m, formats: run_transposed(m, formats, a, c, out))
    out = like(a, m.size[0], a.shape[1])
    return choose(task, m, formats, a, lambda c, m, formats: run(m, formats, a, None, None, c, out))


def spmm_transposed(m: CsrMatrix, x: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """The transpose of m times x: [columns, n] with x [rows, n].

    It uses the bitmap of m, or a transposed CSR.
    """
    formats = formats_of(m)
    out = like(x, m.size[1], x.shape[1])
    if not out.numel():
        return out
    m = m._replace(values=_align(m.values))
    return run_transposed(m, formats, x, choice or select_kernel(TRANSPOSED, m, x), out)


def sddmm(m: CsrMatrix, a: Tensor, b: Tensor, choice: KernelChoice | None = None) -> Tensor:
    """a[row] · b[column] for every nonzero of m, in the order of CSR; values of m are not read.

    a [rows, k], b [columns, k]: that is a @ b.T sampled at m; for a @ c pass c.T.
    """
    formats = formats_of(m)
    out = torch.empty(m.col.shape, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    return run_sddmm(m, formats, a, b, choice or select_kernel("sddmm", m, a, b), out)


def densified(m: CsrMatrix, formats: MatrixFormats | None = None) -> Tensor:
    """The dense matrix [rows, columns]; duplicate entries are summed."""
    bits = (formats or formats_of(m)).bitmap(m)
    rows, columns = m.size
    if bits is None:
        dense = torch.zeros(rows * columns, dtype=torch.float32, device=m.values.device)
        positions = row_of(m) * columns + m.col.long()
        return dense.index_add_(0, positions, m.values.float()).view(rows, columns).to(m.values.dtype)
    dense = torch.empty(rows, columns, dtype=m.values.dtype, device=m.values.device)
    if dense.numel():
        grid = (bits.high // 64, bits.tiles)
        _launch(
            gpu.decompress,
            grid,
            bits.masks,
            bits.starts,
            m.values,
            bits.high,
            dense,
            rows,
            columns,
            HEIGHT=64,
            num_warps=4,
        )
    return dense


def dense_of(m: CsrMatrix, formats: MatrixFormats | None = None) -> Tensor:
    """The dense matrix, cached for later calls unless `keep` says otherwise or a graph is recorded."""
    formats = formats or formats_of(m)
    if keep.now() == "memory" or (m.values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return densified(m, formats)
    return formats.dense(m, lambda: densified(m, formats))


def run(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
) -> Tensor:
    """`spmm` with one kernel, into `out`."""
    if not m.col.numel():
        return _fill_empty_rows(out, bias, act)
    if choice.kind in DENSE:
        return _dense_product(DENSE[choice.kind](m, formats), x, bias, act, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, formats, x, bias, act, choice, out, False)
    return _by_rows(m, formats, x, bias, act, choice, out)


def run_transposed(m: CsrMatrix, formats: MatrixFormats, x: Tensor, choice: KernelChoice, out: Tensor) -> Tensor:
    """`spmm_transposed` with one kernel, into `out`."""
    if not m.col.numel():
        return out.zero_()
    if choice.kind in DENSE:
        return _dense_product(DENSE[choice.kind](m, formats).t(), x, None, None, out)
    if choice.kind == "bitmap":
        return _by_bitmap(m, formats, x, None, None, choice, out, True)
    transpose = formats.transposed(m)
    size = (m.size[1], m.size[0])
    transposed = CsrMatrix(transpose.crow, transpose.col, m.values[transpose.order], None, size)
    return _by_rows(transposed, formats_of(transposed), x, None, None, choice, out)


def _cached(m: CsrMatrix, formats: MatrixFormats) -> Tensor:
    return formats.dense(m, lambda: densified(m, formats))


DENSE: dict[str, Callable[[CsrMatrix, MatrixFormats], Tensor]] = {"dense": densified, "cached": _cached}


def run_sddmm(m: CsrMatrix, formats: MatrixFormats, a: Tensor, b: Tensor, choice: KernelChoice, out: Tensor) -> Tensor:
    """`sddmm` with one kernel, into `out`."""
    k = a.shape[1]
    if choice.kind == "dense":
        return out.copy_((a @ b.t())[row_of(m), m.col.long()])
    if choice.kind == "bitmap":
        bits = formats.bitmap(m)
        assert bits is not None
        grid = (bits.tiles, bits.high // choice.height)
        _launch(
            gpu.sddmm_bitmap, grid,
            bits.masks, bits.starts, bits.high, a, a.stride(0), a.stride(1), b, b.stride(0),
            b.stride(1), out, m.size[0], m.size[1], k, HEIGHT=choice.height, STEP=choice.width,
            WIDE=_is_interpreted(a), num_warps=choice.warps,
        )  # fmt: skip
        return out
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    begins, ends, rows = formats.parts(m, choice.height)
    _launch(
        gpu.sddmm_rows,
        (len(begins),),
        begins,
        ends,
        rows,
        formats.narrow(m),
        a,
        a.stride(0),
        b,
        b.stride(0),
        out,
        k,
        ENTRIES=choice.height,
        STEP=choice.width,
        num_warps=choice.warps,
    )
    return out


def sparse_product(a: CsrMatrix, b: CsrMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """a @ b as row starts, columns (in the dtype of those of a) and values.

    Sums that are zero are stored, too. Both matrices have their empty rows.
    """
    for operand in (a, b):
        formats_of(operand)  # checks indices
    columns, device = b.size[1], a.col.device
    begins = b.crow[:-1].long()[a.col.long()]
    counts = b.crow.diff().long()[a.col.long()]
    offsets = counts.cumsum(0) - counts
    total = int(counts.sum())
    keys = torch.empty(total, dtype=torch.int64, device=device)
    products = torch.empty(total, dtype=torch.float32, device=device)
    entries = a.col.numel()
    if total:
        _launch(
            gpu.expand,
            (-(-total // AT_ONCE),),
            offsets,
            entries,
            entries.bit_length(),
            row_of(a),
            begins,
            a.values,
            b.col,
            b.values,
            keys,
            products,
            total,
            columns,
            COUNT=AT_ONCE,
        )
    keys, order = torch.sort(keys, stable=True)
    unique_keys, counts = torch.unique_consecutive(keys, return_counts=True)
    values = torch.empty(len(unique_keys), dtype=a.values.dtype, device=device)
    if total:
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        grid = (-(-len(unique_keys) // AT_ONCE),)
        _launch(gpu.compress, grid, products, order, ends, values, len(unique_keys), COUNT=AT_ONCE)
    starts = torch.arange(a.size[0] + 1, device=device) * columns
    crow = torch.searchsorted(unique_keys, starts).to(a.crow.dtype)
    return crow, (unique_keys % max(columns, 1)).to(a.col.dtype), values


def _by_rows(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
) -> Tensor:
    """`spmm` by `gpu.spmm_rows`."""
    n, (name, numbers) = x.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    if choice.split > 1:
        x = _padded(x, choice.width)
    elif x.stride(1) != 1:
        x = x.contiguous()
    if m.names is not None:
        _fill_empty_rows(out, bias, act)  # rows that are not stored
    tasks = formats.tasks(m, choice.height)
    count = len(tasks.begins)
    if not count:
        return out
    partial = torch.empty(tasks.slots, n, dtype=torch.float32, device=x.device)
    bias_or_any = x if bias is None else bias
    grid = (-(-count // choice.height), -(-n // choice.width))
    _launch(
        gpu.spmm_rows, grid,
        tasks.begins, tasks.ends, tasks.targets, count, formats.narrow(m), m.values, x, x.stride(0),
        out, out.stride(0), out.stride(1), partial, bias_or_any, float(first), float(second), n,
        ROWS=choice.height, LANES=choice.split, WIDTH=choice.width, SPLIT=tasks.slots > 0, BIASED=bias is not None,
        ACT=name, num_warps=choice.warps,
    )  # fmt: skip
    if tasks.slots:
        split_rows = tasks.rows, tasks.firsts, tasks.counts
        _sum_parts(partial, split_rows, len(tasks.rows), (0, 1), out, bias, act)
    return out


def _by_bitmap(
    m: CsrMatrix,
    formats: MatrixFormats,
    x: Tensor,
    bias: Tensor | None,
    act: Act | None,
    choice: KernelChoice,
    out: Tensor,
    transposed: bool,
) -> Tensor:
    """`spmm`, or the transposed product, by `gpu.spmm_bitmap`."""
    bits, (name, numbers) = formats.bitmap(m), act or ("", ())
    assert bits is not None
    first, second = (*numbers, 0.0, 0.0)[:2]
    (rows, n), height = out.shape, choice.height
    steps = bits.high // height if transposed else bits.tiles
    share = -(-steps // choice.split)
    splits = -(-steps // share)
    blocks = bits.tiles if transposed else bits.high // height
    partial = torch.empty(splits if splits > 1 else 0, rows, n, device=x.device)
    bias_or_any = x if bias is None else bias
    grid = (blocks, -(-n // choice.width), splits)
    _launch(
        gpu.spmm_bitmap, grid,
        bits.masks, bits.starts, m.values, bits.high, bits.tiles, x, x.stride(0), x.stride(1), out,
        out.stride(0), out.stride(1), partial, bias_or_any, float(first), float(second), x.shape[0],
        rows, n, share, HEIGHT=height, WIDTH=choice.width, TRANSPOSED=transposed, SPLIT=splits > 1,
        BIASED=bias is not None, ACT=name, WIDE=_is_interpreted(x), num_warps=choice.warps,
    )  # fmt: skip
    if splits > 1:
        _sum_parts(partial, None, rows, (splits, rows), out, bias, act)
    return out


def _sum_parts(
    partial: Tensor,
    listed: tuple[Tensor, Tensor, Tensor] | None,
    count: int,
    parts: tuple[int, int],
    out: Tensor,
    bias: Tensor | None,
    act: Act | None,
) -> None:
    """Sum partial results by `gpu.finish`.

    listed: rows, first slots and numbers of parts of `count` rows; None for all rows. parts: number
    of parts of all rows, and slots from part to part.
    """
    n, (name, numbers) = out.shape[1], act or ("", ())
    first, second = (*numbers, 0.0, 0.0)[:2]
    width = min(max(16, 1 << (n - 1).bit_length()), FINISH)
    height = AREA // width
    _launch(
        gpu.finish, (-(-count // height), -(-n // width)), partial, *(listed or [partial] * 3),
        count, *parts, out, out.stride(0), out.stride(1), partial if bias is None else bias,
        float(first), float(second), n, HEIGHT=height, WIDTH=width, LISTED=listed is not None,
        BIASED=bias is not None, ACT=name,
    )  # fmt: skip


def _fill_empty_rows(out: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    value = out.new_zeros(1) if bias is None else bias
    value = value if act is None else apply_activation(value.float(), act)
    return out.copy_(value.reshape(-1, 1).expand_as(out))


def _dense_product(w: Tensor, x: Tensor, bias: Tensor | None, act: Act | None, out: Tensor) -> Tensor:
    if bias is None:
        torch.mm(w, x, out=out)
    else:
        torch.addmm(bias[:, None], w, x, out=out)
    return out if act is None else out.copy_(apply_activation(out, act))


def _padded(x: Tensor, width: int) -> Tensor:
    """x [k, width], contiguous; the columns that are added are not set."""
    if x.shape[1] == width and x.is_contiguous():
        return x
    wide = x.new_empty(len(x), width)
    wide[:, : x.shape[1]] = x
    return wide


def _align(values: Tensor) -> Tensor:
    """Values at an address that supports vector loads."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % ALIGNED else values


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **options: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    device = first.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](first, *arguments, **options)
    else:
        kernel[grid](first, *arguments, **options)


def _is_interpreted(x: Tensor) -> bool:
    return not x.is_cuda
