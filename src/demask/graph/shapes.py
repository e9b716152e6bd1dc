"""Shapes of recurrent calls on fake tensors, which torch finds by running every step.

That takes long, and it fixes the number of steps: torch.export then takes the length of the example
for the only one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from demask.ops.recurrent import LSTM

aten = torch.ops.aten
_OPS: tuple[Any, ...] = (
    aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
)  # fmt: skip


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """While it lasts, recurrent calls on fake tensors make empty tensors of the right shape.

    torch registers its step-by-step form per op, in `py_kernels` (torch/_decomp): real tensors do
    not pass through it.
    """
    before = {op: dict(op.py_kernels) for op in _OPS}
    try:
        for op in _OPS:
            _install(op, dict.fromkeys(op.py_kernels, _shaped(op)))
        yield
    finally:
        for op, kernels in before.items():
            _install(op, kernels)


def _install(op: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


def _shaped(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """What a call makes, empty. Raises RuntimeError where the sizes do not fit each other."""

    def made(x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first):
        states = list(hx) if str(op) == LSTM else [hx]
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
