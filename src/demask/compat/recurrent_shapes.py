"""Shapes of recurrent calls on fake tensors, which torch finds by running every step.

That takes long, and it fixes the number of steps: torch.export then takes the length of the example
for the only one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_OPS: tuple[Any, ...] = (
    aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
)  # fmt: skip


class _Patch:
    """The kernels of recurrent calls on fake tensors, replaced while any thread asks for it.

    torch registers its step-by-step form per op, in `py_kernels` (torch/_decomp), for the whole
    process, and has no narrower scope: real tensors do not pass through it. The first thread to
    enter puts ours there, the last to leave restores torch's; calls of other threads run torch's
    meanwhile.
    """

    def __init__(self) -> None:
        self.lock, self.threads, self.before = threading.Lock(), 0, {}
        self.here = threading.local()

    def enter(self) -> None:
        depth = getattr(self.here, "depth", 0)
        with self.lock:
            if not self.threads:
                self.before = {op: dict(op.py_kernels) for op in _OPS}
                for op, kernels in self.before.items():
                    shaped = _shaped(op)
                    _install(op, {key: self._either(shaped, k) for key, k in kernels.items()})
            self.threads += depth == 0
        self.here.depth = depth + 1

    def leave(self) -> None:
        self.here.depth -= 1
        with self.lock:
            self.threads -= self.here.depth == 0
            if not self.threads:
                for op, kernels in self.before.items():
                    _install(op, kernels)

    def _either(self, shaped: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Our kernel in threads that asked for it, torch's in others."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            return (shaped if getattr(self.here, "depth", 0) else plain)(*args, **kwargs)

        return kernel


_PATCH = _Patch()


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """While it lasts, recurrent calls of this thread on fake tensors make empty tensors of the
    right shape."""
    _PATCH.enter()
    try:
        yield
    finally:
        _PATCH.leave()


def _install(op: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    op.py_kernels.update(kernels)  # the same keys, so that no thread ever sees one missing
    op._dispatch_cache.clear()


def _shaped(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """What a call makes, empty. Raises RuntimeError where the sizes do not fit each other."""

    def made(x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first):
        states = list(hx) if op is aten.lstm.input else [hx]
        two = 2 if bidirectional else 1
        batch = x.shape[0 if batch_first else 1]
        for state in states:
            if state.shape[0] != layers * two or state.shape[1] != batch:
                raise RuntimeError(
                    f"expected {layers * two} initial states for a batch of {batch}, "
                    f"got {tuple(state.shape)}"
                )
        if x.shape[2] != params[0].shape[1]:
            raise RuntimeError(f"expected {params[0].shape[1]} input features, got {x.shape[2]}")
        out = x.new_empty([x.shape[0], x.shape[1], two * states[0].shape[2]])
        return (out, *(state.new_empty(state.shape) for state in states))

    return made
