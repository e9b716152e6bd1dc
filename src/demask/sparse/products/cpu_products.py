"""Sparse times dense and SDDMM on the CPU by kernels that read CSR directly (`kernels.cpu`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu.csr import CALL, pieces, vector
from demask.kernels.cpu.sddmm import CALL as SDDMM_CALL
from demask.kernels.cpu.sddmm import Sampled
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.kernels.plan_cache import TensorCache, identity, version
from demask.kernels.thread_team import ENTRY, Job
from demask.ops.activations import Act, apply_activation
from demask.sparse.csr_matrix import CsrMatrix


def sddmm(m: CsrMatrix, a: Tensor, b: Tensor) -> Tensor:
    """a[row] · b[column] at every nonzero [nonzeros], float32 on the CPU, in the order of m.

    a [rows, k], b [columns, k]. Values of m are not read. A sum is the same for any number of
    threads.
    Raises BadInput for invalid indices.
    """
    sums, k = torch.zeros(m.col.numel()), a.shape[1]
    if m.crow.numel() <= 1 or not k:
        return sums
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    crow, col = m.crow.contiguous(), m.col.contiguous()
    names = None if m.names is None else m.names.contiguous()
    threads = max(1, min(torch.get_num_threads(), m.col.numel() * k // WORK))
    deal = dealt(crow, threads, 1)
    isa = host()
    kernel = Sampled(k % isa.lanes > 0, col.dtype == torch.int64, names is not None)
    calls, bad = np.zeros(threads, SDDMM_CALL), np.zeros(threads * LINE // 8, np.int64)
    calls["crow"], calls["col"] = crow.data_ptr(), col.data_ptr()
    calls["names"] = 0 if names is None else names.data_ptr()
    calls["order"], calls["begin"], calls["end"] = (deal.order.ctypes.data, deal.ends[:-1], deal.ends[1:])
    calls["a"], calls["a_pitch"] = a.data_ptr(), 4 * a.stride(0)
    calls["x"], calls["x_pitch"] = b.data_ptr(), 4 * b.stride(0)
    calls["out"], calls["vectors"], calls["left"] = sums.data_ptr(), k // isa.lanes, k % isa.lanes
    calls["rows"], calls["columns"], calls["entries"] = *m.size, m.col.numel()
    calls["bad"] = bad.ctypes.data + LINE * np.arange(threads)
    entries = np.zeros(threads, ENTRY)
    entries["code"] = CODE.addresses([kernel])[kernel]
    entries["call"] = calls.ctypes.data + SDDMM_CALL.itemsize * np.arange(threads)
    ends = np.arange(threads + 1, dtype=np.int64)
    Job(entries, ends, threads, np.zeros(1, np.int64)).run(threads)
    if bad.any():
        raise BadInput(
            f"expected row starts that rise to {m.col.numel()}, rows below {m.size[0]} and columns below {m.size[1]}"
        )
    return sums


LINE = 64  # bytes of a cache line
WORK = 1 << 15  # products for which one more thread pays
OFTEN = 8  # reads of a row of x for which a padded copy pays
SPARE = 4  # cached calls per size
SIZES = 64  # with cached calls; also matrices with cached deals


class Options(NamedTuple):
    """Fields of kernels, by their names."""

    wide: bool
    named: bool
    biased: bool
    act: Act | None
    padded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """Rows in the order of the threads that compute them, the end of each thread's share, and
    cached tasks by size.
    """

    order: np.ndarray
    ends: tuple[int, ...]
    spare: dict[Any, list[SpmmTask]] = field(default_factory=dict)


class SpmmTask:
    """Calls of the kernels for products of one size; not for two runs at once."""

    def __init__(self, deal: Deal, n: int, options: Options):
        self.deal = deal  # keeps its order alive for machine code
        parts = pieces(n, host(), options._asdict())
        threads = self.threads = len(deal.ends) - 1
        self.calls = np.zeros(threads * len(parts), CALL)
        self.bad = np.zeros(threads * LINE // 8, np.int64)
        self.firsts = np.array([4 * part.first for part in parts] * threads, np.int64)
        codes = CODE.addresses(part.kernel for part in parts)
        entries = np.zeros(len(self.calls), ENTRY)
        for k, call in enumerate(self.calls):
            thread, part = k // len(parts), parts[k % len(parts)]
            begin, end = deal.ends[thread], deal.ends[thread + 1]
            side = getattr(part.kernel, "side", 1)
            call["begin"], call["end"] = begin, end
            call["together"] = begin + (end - begin) // side * side
            call["tiles"], call["left"] = part.tiles, part.left
            call["bad"] = self.bad.ctypes.data + thread * LINE
            entries[k] = codes[part.kernel], self.calls[k:].ctypes.data
        self.calls["order"] = deal.order.ctypes.data
        ends = np.arange(threads + 1, dtype=np.int64) * len(parts)
        self.job = Job(entries, ends, threads, np.zeros(1, np.int64))

    def run(self, m: CsrMatrix, x: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Compute into `out`. Returns whether all indices were in range."""
        fields = self.calls.view(np.int64).reshape(len(self.calls), -1)
        # in the order of CALL
        fields[:, :4] = (
            m.crow.data_ptr(),
            m.col.data_ptr(),
            m.values.data_ptr(),
            0 if m.names is None else m.names.data_ptr(),
        )
        self.calls["x"], self.calls["x_pitch"] = self.firsts + x.data_ptr(), 4 * x.stride(0)
        self.calls["out"] = self.firsts + out.data_ptr()
        self.calls["out_pitch"] = 4 * out.shape[1]
        self.calls["bias"] = 0 if bias is None else bias.data_ptr()
        fields[:, -4:-1] = (*m.size, m.values.numel())
        self.job.run(self.threads)
        valid = not self.bad.any()
        self.bad[:] = 0
        return valid


def multiplied(m: CsrMatrix, x: Tensor, bias: Tensor | None, act: Act | None) -> Tensor:
    """act(m @ x + bias) [rows, n], float32 on the CPU.

    x [columns of m, n]: elements of a row are contiguous, rows have any stride. bias [rows]. Raises
    BadInput for invalid indices.
    """
    n = x.shape[1]
    out = torch.empty(m.size[0], n)
    if m.names is not None:
        _fill_empty_rows(out, bias, act)
    if m.crow.numel() <= 1 or not n:
        return out
    x, padded = _pad_rows(x, m.values.numel())
    m = CsrMatrix(*(None if t is None else t.contiguous() for t in m[:4]), m.size)  # type: ignore[arg-type]
    if m.values.data_ptr() % 4:  # external memory may be unaligned
        m = m._replace(values=m.values.clone())
    bias = None if bias is None else bias.contiguous()
    threads = max(1, min(torch.get_num_threads(), m.values.numel() * n // WORK))
    deal = dealt(m.crow, threads, max(1, LINE // (4 * n)))
    wide = m.col.dtype == torch.int64
    options = Options(wide, m.names is not None, bias is not None, act, padded)
    spare = deal.spare.setdefault((n, options), [])
    try:
        task = spare.pop()
    except IndexError:
        task = SpmmTask(deal, n, options)
    valid = task.run(m, x, out, bias)
    if len(spare) < SPARE:
        spare.append(task)
    if len(deal.spare) > SIZES:
        deal.spare.clear()
    if valid:
        return out
    entries, columns = m.values.numel(), m.size[1]
    raise BadInput(f"expected row starts that rise to {entries} and columns below {columns}")


def _pad_rows(x: Tensor, entries: int) -> tuple[Tensor, bool]:
    """(x with contiguous rows, whether rows are padded to full aligned vectors).

    x is copied into padded rows if each row is read often enough.
    """
    rows, n = x.shape
    lanes = vector(n, host())
    if n > 1 and n % lanes and entries >= OFTEN * rows:
        padded = torch.zeros(rows, -(-n // lanes) * lanes)
        padded[:, :n] = x
        return padded, True
    return (x.contiguous() if x.stride(1) != 1 or (n == 1 and x.stride(0) != 1) else x), False


def _fill_empty_rows(out: Tensor, bias: Tensor | None, act: Act | None) -> None:
    value = apply_activation(torch.zeros(1) if bias is None else bias, act)
    out.copy_(value.reshape(-1, 1).expand_as(out))


DEALS: TensorCache[Deal] = TensorCache(SIZES)


def dealt(crow: Tensor, threads: int, unit: int) -> Deal:
    """The deal of a matrix, cached as long as its row starts live.

    unit: rows that share a cache line of the output and stay together. If row starts were changed
    without notice, shares are uneven, but every row is still computed once.
    """
    key = (*identity([crow]), version(crow), threads, unit)
    deal = DEALS.entries.get(key)
    return deal or DEALS.put(key, [crow], deal_rows(crow.numpy(), threads, unit))


def deal_rows(crow: np.ndarray, threads: int, unit: int) -> Deal:
    """Rows assigned to threads in units, longest first, back and forth (0, 1, 1, 0, 0, 1, ...).

    Threads get about the same number of nonzeros; each computes its longest rows first.

    >>> deal_rows(np.array([0, 1, 6, 8, 11]), 2, 1).order.tolist()  # 1, 5, 2, 3 nonzeros
    [1, 0, 3, 2]
    """
    counts = np.diff(crow.astype(np.int64))
    firsts = np.arange(0, len(counts), unit)
    ranked = np.argsort(-np.add.reduceat(counts, firsts), kind="stable")
    turn = np.arange(len(firsts)) % (2 * threads)
    owner = np.empty(len(firsts), np.int64)
    owner[ranked] = np.minimum(turn, 2 * threads - 1 - turn)
    thread = np.repeat(owner, unit)[: len(counts)]
    order = np.lexsort((-counts, thread)).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum(np.bincount(thread, minlength=threads))])
    return Deal(order, tuple(ends.tolist()))
