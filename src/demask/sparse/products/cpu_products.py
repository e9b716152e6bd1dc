"""Sparse times dense and SDDMM on the CPU by kernels that read CSR directly (`kernels.cpu`)."""

from __future__ import annotations

from itertools import pairwise
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu.csr import CALL, isa_of_sums, pieces, vector
from demask.kernels.cpu.number_types import is_supported
from demask.kernels.cpu.sddmm import CALL as SDDMM_CALL
from demask.kernels.cpu.sddmm import Sampled
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import ENTRY, Job, SpareTasks, job_of_calls
from demask.ops.activations import Act, apply_activation
from demask.sparse.csr_matrix import CSR_NUMBERS, CsrMatrix

WORK = 1 << 19  # products of a thread for which another one pays: starting it takes about 0.1 ms where cores are shared
FULL = 8  # columns: products with fewer take as long for each nonzero
LONG, PARTS = 2**15, 128  # nonzeros of a part of a row, at least; parts of all nonzeros, about
OFTEN = 8  # reads of a row of x for which a padded copy pays


def sddmm(m: CsrMatrix, a: Tensor, b: Tensor) -> Tensor:
    """a[row] · b[column] at every nonzero [nonzeros], float32 or float64 on the CPU, in the order of m.

    a [rows, k], b [columns, k]. Values of m are not read. A sum is the same for any number of
    threads.
    Raises BadInput for invalid indices.
    """
    sums, k = a.new_zeros(m.col.numel()), a.shape[1]
    if m.crow.numel() <= 1 or not k:
        return sums
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    crow, col = m.crow.contiguous(), m.col.contiguous()
    names = None if m.names is None else m.names.contiguous()
    threads = threads_for(m.col.numel() * k)
    numbers, size = CSR_NUMBERS[a.dtype], a.element_size()
    ends, lanes = shares(crow, threads), isa_of_sums(host(), numbers).lanes
    calls, bad = np.zeros(threads, SDDMM_CALL), np.zeros(threads, np.int64)
    calls["crow"], calls["col"] = crow.data_ptr(), col.data_ptr()
    calls["names"] = 0 if names is None else names.data_ptr()
    calls["begin"], calls["end"] = ends[:-1], ends[1:]
    calls["a"], calls["a_pitch"] = a.data_ptr(), size * a.stride(0)
    calls["x"], calls["x_pitch"] = b.data_ptr(), size * b.stride(0)
    calls["out"], calls["vectors"], calls["left"] = sums.data_ptr(), k // lanes, k % lanes
    calls["rows"], calls["columns"], calls["entries"] = *m.size, m.col.numel()
    calls["bad"] = bad.ctypes.data + 8 * np.arange(threads)
    kernel = Sampled(k % lanes > 0, 8 * col.element_size(), names is not None, numbers=numbers)
    job_of_calls(kernel, calls, host()).run(threads)
    if bad.any():
        raise BadInput(
            f"expected row starts that rise to {m.col.numel()}, rows below {m.size[0]} and columns below {m.size[1]}"
        )
    return sums


class Options(NamedTuple):
    """Fields of kernels, by their names."""

    column_bits: int
    named: bool
    biased: bool
    act: Act | None
    padded: bool = False
    numbers: str = "f32"


class KernelCalls:
    """The calls of some kernels by each of a number of threads; not for two runs at once.

    calls: the memory of all calls, a structure `kind` for each: those of the first thread first.
    """

    def __init__(self, kernels: tuple[Any, ...], threads: int, kind: np.dtype[Any]):
        codes = CODE.addresses(kernels)
        self.structures = np.zeros(threads * len(kernels), kind)
        entries = np.zeros(len(self.structures), ENTRY)
        for k in range(len(entries)):
            entries[k] = codes[kernels[k % len(kernels)]], self.structures[k:].ctypes.data
        ends = np.arange(threads + 1, dtype=np.int64) * len(kernels)
        self.calls, self.threads = self.structures.view(np.int64).data, threads
        self.job = Job(entries, ends, threads, np.zeros(1, np.int64))


class SpmmTask(KernelCalls):
    """Products with n columns."""

    def __init__(self, n: int, options: Options, threads: int):
        self.parts = pieces(n, host(), options._asdict())
        super().__init__(tuple(part.kernel for part in self.parts), threads, CALL)
        bad = np.zeros(threads, np.int64)
        self.bad = bad.data
        self.structures["tiles"] = [part.tiles for part in self.parts] * threads
        self.structures["left"] = [part.left for part in self.parts] * threads
        self.structures["bad"] = bad.ctypes.data + 8 * np.repeat(np.arange(threads), len(self.parts))

    def run(self, m: CsrMatrix, x: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Compute into `out`. Returns whether all indices were in range."""
        crow, col, values, names, size = m
        matrix = crow.data_ptr(), col.data_ptr(), values.data_ptr(), 0 if names is None else names.data_ptr()
        sizes, width = (0 if bias is None else bias.data_ptr(), *size, values.numel()), x.element_size()
        x_start, x_pitch = x.data_ptr(), width * x.stride(0)
        out_start, out_pitch = out.data_ptr(), width * out.shape[1]
        offset = 0
        for share in pairwise(shares(crow, self.threads)):
            for piece in self.parts:
                first = width * piece.first
                columns = x_start + first, x_pitch, out_start + first, out_pitch
                VARYING.pack_into(self.calls, offset, *matrix, *columns, *sizes, *share)
                offset += CALL.itemsize
        self.job.run(self.threads)
        if not any(self.bad):
            return True
        for thread in range(self.threads):
            self.bad[thread] = 0
        return False


VARYING = Struct(f"={list(CALL.names or ()).index('tiles')}q")  # the fields that each run sets
TASKS: SpareTasks[Any, Any] = SpareTasks()  # `KernelCalls` by the arguments that make them


def multiplied(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """act(m @ x + bias) [rows, n], on the CPU: float32, with values of m of any of `CSR_NUMBERS`, or all float64.

    x [columns of m, n]: elements of a row are contiguous, rows have any stride. bias [rows]. Raises
    BadInput for invalid indices.
    """
    crow, col, values, names, size = m
    n, entries = x.shape[1], values.numel()
    out = x.new_empty(size[0], n)
    if act is not None and x.dtype == torch.float64:
        return apply_activation(multiplied(m, x, bias, None), act)
    if not is_supported(CSR_NUMBERS[values.dtype], host()):
        values = values.float()
    if names is not None:
        _fill_empty_rows(out, bias, act)
        names = names.contiguous()
    if crow.numel() <= 1 or not n:
        return out
    if entries > 2 * LONG and (split := split_rows(m)) is not None:
        return _multiplied_by_parts(m, split, x, bias, act)
    numbers = CSR_NUMBERS[values.dtype]
    x, padded = _pad_rows(x, entries, vector(n, isa_of_sums(host(), numbers)))
    values = values.contiguous()
    if values.data_ptr() % values.element_size():  # external memory may be unaligned
        values = values.clone()
    bias = None if bias is None else bias.contiguous()
    options = Options(8 * col.element_size(), names is not None, bias is not None, act, padded, numbers)
    key = n, options, threads_for(entries * max(n, FULL))
    task: SpmmTask = TASKS.take(key, lambda: SpmmTask(*key))
    valid = task.run(CsrMatrix(crow.contiguous(), col.contiguous(), values, names, size), x, out, bias)
    TASKS.put(key, task)
    if valid:
        return out
    raise BadInput(f"expected row starts that rise to {entries} and columns below {size[1]}")


class SplitRows(NamedTuple):
    """A matrix whose rows are parts of the rows of another, which has so many parts of each row from a first one on."""

    parts: CsrMatrix
    firsts: Tensor
    counts: Tensor


def split_rows(m: CsrMatrix) -> SplitRows | None:
    """The matrix with rows that are far longer than others in parts, so that threads share them; None if there are no
    such rows, or row starts do not rise. The parts do not depend on threads, so that sums do not.

    >>> from demask.sparse.csr_matrix import CsrMatrix
    >>> split_rows(CsrMatrix(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.ones(2), None, (1, 2))) is None
    True
    """
    lengths, most = m.crow.diff(), max(LONG, m.col.numel() // PARTS)
    if int(lengths.max()) <= 2 * most or int(lengths.min()) < 0:
        return None
    counts = ((lengths + most - 1) // most).clamp(min=1).long()
    firsts = counts.cumsum(0) - counts
    row = torch.arange(len(counts)).repeat_interleave(counts)
    starts = m.crow[row] + (torch.arange(len(row)) - firsts[row]) * most
    crow = torch.cat([starts, m.crow[-1:]]).to(m.crow.dtype)
    return SplitRows(CsrMatrix(crow, m.col, m.values, None, (len(row), m.size[1])), firsts, counts)


def _multiplied_by_parts(m: CsrMatrix, split: SplitRows, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """`multiplied`, with the parts of each row added in their order."""
    sums = multiplied(split.parts, x, None, None)
    y = sums[split.firsts]
    for row in (split.counts > 1).nonzero().flatten().tolist():
        first, count = int(split.firsts[row]), int(split.counts[row])
        for part in range(first + 1, first + count):
            y[row] += sums[part]
    rows = m.names
    if rows is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < m.size[0]:
        raise BadInput(f"expected rows below {m.size[0]}, got {int(rows.min())} to {int(rows.max())}")
    shift = None if bias is None else bias if rows is None else bias[rows.long()]
    y = apply_activation(y if shift is None else y + shift[:, None], act)
    if rows is None:
        return y
    out = x.new_empty(m.size[0], x.shape[1])
    _fill_empty_rows(out, bias, act)
    out[rows.long()] = y
    return out


def threads_for(products: int) -> int:
    """How many threads pay for a number of multiply-adds."""
    return 1 if products < 2 * WORK else min(torch.get_num_threads(), products // WORK)


def _pad_rows(x: Tensor, entries: int, lanes: int) -> tuple[Tensor, bool]:
    """(x with contiguous rows, whether rows are padded to full aligned vectors of `lanes`).

    x is copied into padded rows if each row is read often enough.
    """
    rows, n = x.shape
    if n > 1 and entries >= OFTEN * rows and n % lanes:
        padded = x.new_zeros(rows, -(-n // lanes) * lanes)
        padded[:, :n] = x
        return padded, True
    return (x.contiguous() if x.stride(1) != 1 or (n == 1 and x.stride(0) != 1) else x), False


def _fill_empty_rows(out: Tensor, bias: Tensor | None, act: Act | None) -> None:
    value = apply_activation(out.new_zeros(1) if bias is None else bias, act)
    out.copy_(value.reshape(-1, 1).expand_as(out))


def shares(crow: Tensor, threads: int) -> list[int]:
    """Row starts of the shares of threads, which have about the same number of nonzeros; then the number of rows.

    Where starts of rows do not rise, shares are uneven, but every row is in one of them.

    >>> shares(torch.tensor([0, 1, 6, 8, 11]), 2)  # rows of 1, 5, 2 and 3 nonzeros
    [0, 2, 4]
    """
    rows = crow.numel() - 1
    if threads == 1:
        return [0, rows]
    starts = crow.numpy()
    targets = np.arange(1, threads) * (int(starts[-1]) / threads)
    inner = np.searchsorted(starts, targets, "left").clip(0, rows)
    return [0, *np.maximum.accumulate(inner).tolist(), rows]
