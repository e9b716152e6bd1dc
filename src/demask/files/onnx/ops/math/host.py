"""Arithmetic on numbers that are known while a network is traced, some of them symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from demask.compat.symbolic_shapes import statically_known_false, statically_known_true
from demask.files.onnx.size_fractions import plain
from demask.files.onnx.values import Host


def on_host(
    real: Callable[..., Any], symbolic: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """A host function: `real` on arrays of numpy's dtypes; where some elements are symbolic,
    `symbolic` on each (tensors do it if None). dtype: of the outcome, if not the first input's."""

    def call(*arrays: Any) -> Any:
        if not any(a.dtype == object for a in arrays):
            with np.errstate(all="ignore"):
                return np.asarray(real(*arrays))
        if symbolic is None:
            return NotImplemented
        made = elements(symbolic, *arrays)
        return made if dtype is None else Host.of(made, dtype)

    return call


def elements(function: Callable[..., Any], *arrays: Any) -> np.ndarray:
    """function(elements) for elements in the same place, as an array of objects."""
    found = np.frompyfunc(function, len(arrays), 1)(*map(objects, arrays))
    return np.asarray(found, dtype=object)


def objects(array: np.ndarray) -> np.ndarray:
    """The array with Python's numbers for elements."""
    if array.dtype not in (np.float16, np.float32):
        return array.astype(object)
    # 0.7, not 0.699999988: ten times the latter is 7 in float32 but less in Python's floats
    return np.asarray(np.frompyfunc(float, 1, 1)(array.astype(np.str_)), dtype=object)


def settled(truth: Any) -> Any:
    """A truth as a bool if no size can change it, else as it is."""
    if isinstance(truth, bool) or statically_known_true(truth):
        return bool(truth)
    return False if statically_known_false(truth) else truth


def either(truth: Any, a: Any, b: Any) -> Any:
    """a if the truth holds, else b."""
    truth = settled(truth)
    if isinstance(truth, bool):
        return a if truth else b
    return torch.sym_ite(truth, plain(a), plain(b))
