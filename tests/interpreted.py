"""Triton's interpreter in a process of its own: the tests' process never sees it.

`TRITON_INTERPRET` counts when a kernel's file is imported, and would count for everything that
imports Triton then.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any

import pytest
import torch


@lru_cache(maxsize=1)
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def run_on(device: str, check: Callable[..., Any], *given: Any) -> Any:
    """check(device, *given) on a GPU ("cuda"), or ("cpu") interpreted elsewhere; its errors are
    raised here. Skips where Triton or the GPU is missing."""
    pytest.importorskip("triton")
    if device == "cpu":
        return _pool().submit(check, device, *given).result()
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return check(device, *given)


DEVICES = ("cpu", "cuda")
