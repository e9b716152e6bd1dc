"""Calls that torch.export specializes to the sizes of the example, although they need not be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from demask.compat.ambient import one_at_a_time

_ABSENT = object()


@contextlib.contextmanager
def symbolic_sizes(network: nn.Module) -> Iterator[Callable[[], bool]]:
    """Inside, `len` and `take_along_dim` of tensors with dynamic sizes are symbolic: the former in
    the files that define the network's classes. Other calls, also of other threads, are as before.
    The value tells whether there was such a tensor."""
    length, take = len, torch.take_along_dim
    seen: list[Any] = []

    def symbolic_length(value: Any, /) -> Any:
        if isinstance(value, Tensor) and value.ndim and isinstance(value.shape[0], torch.SymInt):
            seen.append(value)
            return value.shape[0]
        return length(value)

    def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, **out: Any) -> Tensor:
        shapes = [input.shape, indices.shape]
        is_symbolic = any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        if not is_symbolic or dim is None or out:
            return take(input, indices, dim, **out)
        seen.append(input)
        before, after = slice(dim % input.ndim), slice(dim % input.ndim + 1, None)
        wide = [torch.broadcast_shapes(*(shape[part] for shape in shapes)) for part in (before, after)]
        x, index = (value.expand(*wide[0], value.shape[dim], *wide[1]) for value in (input, indices))
        return x.gather(dim, index)

    own = {kind.__module__ for module in network.modules() for kind in type(module).__mro__}
    files = [sys.modules[name] for name in own if name in sys.modules and not _is_library(name)]
    patches = [
        (torch, "take_along_dim", take_along_dim),
        (Tensor, "take_along_dim", take_along_dim),
        *((file, "len", symbolic_length) for file in files),
    ]
    with one_at_a_time():
        before = [vars(owner).get(name, _ABSENT) for owner, name, _ in patches]
        try:
            for owner, name, function in patches:
                setattr(owner, name, function)
            yield lambda: bool(seen)
        finally:
            for (owner, name, _), value in zip(patches, before, strict=True):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


def _is_library(name: str) -> bool:
    """Whether a module is Python's or torch's."""
    return name.partition(".")[0] in ("torch", "builtins", "typing", "abc", "collections")
