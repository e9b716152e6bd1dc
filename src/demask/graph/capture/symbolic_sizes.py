"""Calls that torch.export specializes to the sizes of the example, although they need not be."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_PATCHING = threading.RLock()


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[Callable[[], bool]]:
    """Inside, `len` and `take_along_dim` of tensors with dynamic sizes are symbolic. Other calls,
    also of other threads, are as before. The value tells whether there was such a tensor."""
    length, take = builtins.len, torch.take_along_dim
    seen: list[Any] = []

    def symbolic_length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and value.ndim and isinstance(value.shape[0], torch.SymInt):
            seen.append(value)
            return value.shape[0]
        return length(value)

    def take_along_dim(
        input: Tensor, indices: Tensor, dim: int | None = None, **out: Any
    ) -> Tensor:
        shapes = [input.shape, indices.shape]
        is_symbolic = any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        if not is_symbolic or dim is None or out:
            return take(input, indices, dim, **out)
        seen.append(input)
        before, after = slice(dim % input.ndim), slice(dim % input.ndim + 1, None)
        wide = [
            torch.broadcast_shapes(*(shape[part] for shape in shapes)) for part in (before, after)
        ]
        x, index = (
            value.expand(*wide[0], value.shape[dim], *wide[1]) for value in (input, indices)
        )
        return x.gather(dim, index)

    patches = [(builtins, "len", symbolic_length), (torch, "take_along_dim", take_along_dim),
               (Tensor, "take_along_dim", take_along_dim)]  # fmt: skip
    with _PATCHING:
        originals = [getattr(owner, name) for owner, name, _ in patches]
        try:
            for owner, name, function in patches:
                setattr(owner, name, function)
            yield lambda: bool(seen)
        finally:
            for (owner, name, _), original in zip(patches, originals, strict=True):
                setattr(owner, name, original)
