"""What products on a GPU keep between calls."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Literal, Self

from demask.errors import BadInput

Policy = Literal["speed", "memory"]
_NOW: ContextVar[Policy] = ContextVar("keep", default="speed")


class keep:  # noqa: N801  (a context manager, as torch.no_grad)
    """What sparse matrices on a GPU keep between calls: a context manager.

    With "speed", the default, products with 128 columns or more are not slower than those of a dense matrix: where
    the dense library is the fastest, the decompressed matrix is cached while its values stay the same, which takes the
    memory of a dense one. With "memory" nothing is cached but nonzeros, their indices and a bit for each element; the
    matrix is decompressed in each call where the dense library is still the fastest. CUDA graphs decompress, too: a
    cached matrix would not follow values that change between replays. Products on the CPU keep nothing.

    Args:
        what: "speed" or "memory".

    Raises:
        BadInput: another word.

    >>> import torch
    >>> from demask.sparse import keep, spmm
    >>> with keep("memory"):
    ...     y = spmm(torch.eye(4).to_sparse_csr(), torch.ones(4, 200))
    >>> y.shape
    torch.Size([4, 200])
    """

    def __init__(self, what: Policy):
        if what not in ("speed", "memory"):
            raise BadInput(f'expected "speed" or "memory", got {what!r:.40}')
        self.what: Policy = what
        self.tokens: list[Token[Policy]] = []

    @staticmethod
    def now() -> Policy:
        """What is cached now."""
        return _NOW.get()

    def __enter__(self) -> Self:
        self.tokens.append(_NOW.set(self.what))
        return self

    def __exit__(self, *_: Any) -> None:
        _NOW.reset(self.tokens.pop())
