"""Arithmetic on numbers known while a network is traced, some of them symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from demask.compat.symbolic_shapes import statically_known_false, statically_known_true
from demask.files.onnx.size_fractions import plain
from demask.files.onnx.values import Host


def on_host(
    real: Callable[..., Any], symbolic: Callable[..., Any] | None = None, dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    """A host function: `real` on arrays of numpy's dtypes, `symbolic` on each element if some are
    symbolic (None: compute on tensors). dtype: of the result, by default the first input's."""

    def call(*arrays: Any) -> Any:
        if not any(a.dtype == object for a in arrays):
            with np.errstate(all="ignore"):
                return np.asarray(real(*arrays))
        if symbolic is None:
            return NotImplemented
        result = elements(symbolic, *arrays)
        return result if dtype is None else Host.of(result, dtype)

    return call


def elements(function: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """`function` applied elementwise to broadcast arrays, as an array of objects."""
    results = np.frompyfunc(function, len(arrays), 1)(*map(objects, arrays))
    return np.asarray(results, dtype=object)


def objects(array: np.ndarray) -> np.ndarray:
    """The array with Python numbers as elements."""
    if array.dtype not in (np.float16, np.float32):
        return array.astype(object)
    # 0.7, not 0.699999988: ten times the latter is 7 in float32 but less in Python's float64
    return np.asarray(np.frompyfunc(float, 1, 1)(array.astype(np.str_)), dtype=object)


def settled(condition: Any) -> Any:
    """A condition as a bool if it is equal for all sizes, else unchanged."""
    if isinstance(condition, bool) or statically_known_true(condition):
        return bool(condition)
    return False if statically_known_false(condition) else condition


def either(condition: Any, a: Any, b: Any) -> Any:
    """a if the condition is true, else b."""
    condition = settled(condition)
    if isinstance(condition, bool):
        return a if condition else b
    return torch.sym_ite(condition, plain(a), plain(b))
