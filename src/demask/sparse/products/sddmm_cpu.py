"""SDDMM on the CPU by kernels that read indices directly (`kernels.cpu.sddmm`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.kernels.cpu.sddmm import CALL, Sampled
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.kernels.thread_team import ENTRY, Job
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.spmm_cpu import LINE, WORK, dealt


def sampled(m: CsrMatrix, a: Tensor, b: Tensor) -> Tensor:
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
    calls, bad = np.zeros(threads, CALL), np.zeros(threads * LINE // 8, np.int64)
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
    entries["call"] = calls.ctypes.data + CALL.itemsize * np.arange(threads)
    ends = np.arange(threads + 1, dtype=np.int64)
    Job(entries, ends, threads, np.zeros(1, np.int64)).run(threads)
    if bad.any():
        raise BadInput(
            f"expected row starts that rise to {m.col.numel()}, rows below {m.size[0]} and columns below {m.size[1]}"
        )
    return sums
