"""Triton's interpreter in a process of its own: the tests' process never sees it. And what checks
of kernels share.

`TRITON_INTERPRET` counts when a kernel's file is imported, and would count for everything that
imports Triton then.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from demask.sparse.csr_matrix import CsrMatrix
from sparse_cases import csr

INTERPRET = "TRITON_INTERPRET"
DEVICES = ("cpu", "cuda")
#: of the error's norm to the reference's. The interpreter cuts bfloat16 off, where GPUs round.
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@lru_cache(maxsize=1)
def _pool() -> ProcessPoolExecutor:
    made = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    os.environ[INTERPRET] = "1"  # as the process begins: torch may import Triton
    try:
        made.submit(_begin).result()
    finally:
        del os.environ[INTERPRET]
    return made


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run_on(device: str, check: Callable[..., Any], *given: Any) -> Any:
    """check(device, *given) on a GPU ("cuda"), or ("cpu") interpreted elsewhere; its errors are
    raised here. Skips where Triton or the GPU is missing."""
    pytest.importorskip("triton")
    if device == "cpu":
        return _pool().submit(check, device, *given).result()
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return check(device, *given)


@contextmanager
def poisoned(device: str) -> Iterator[None]:
    """New memory holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(device == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def nowhere(t: Tensor, device: str, shift: int = 0) -> Tensor:
    """A copy that begins `shift` elements behind an aligned address, between NaN."""
    t = t.to(device)
    fill = torch.nan if t.is_floating_point() else 0
    memory = torch.full((t.numel() + 2 * shift + 64,), fill, dtype=t.dtype, device=device)
    memory[shift : shift + t.numel()] = t.reshape(-1)
    return memory[shift : shift + t.numel()].view(t.shape)


def rows_of(w: Tensor, device: str, shift: int = 0) -> CsrMatrix:
    """A dense matrix by its nonzeros."""
    values, crow, col = (nowhere(t, device, shift) for t in csr(w))
    return CsrMatrix(crow, col, values, None, (w.shape[0], w.shape[1]))


def error(found: Tensor, wanted: np.ndarray) -> float:
    """The norm of the difference to that of the reference; NaN where anything is NaN."""
    if not wanted.size:
        return 0.0
    difference = np.linalg.norm(found.detach().cpu().double().numpy() - wanted)
    return float(difference / max(np.linalg.norm(wanted), 1e-30))
