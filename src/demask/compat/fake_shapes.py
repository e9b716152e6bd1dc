"""Shapes of some calls on fake tensors without the calls that torch makes to find them.

torch runs every step of a recurrent call, which takes long and fixes the number of steps:
torch.export then takes the length of the example for the only one. Norms and activations of dynamic
sizes it decomposes, a dozen calls each: more than half of the time of exporting a convolutional
network.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._prims_common import is_channels_last_contiguous_or_false, is_contiguous_or_false
from torch._subclasses.fake_impls import get_fast_op_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from demask.compat.ambient import one_at_a_time

aten = torch.ops.aten
_RECURRENT = tuple(getattr(aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
_ACTIVATIONS = tuple(
    getattr(aten, name).default for name in ("relu", "silu", "gelu", "sigmoid", "hardtanh", "hardswish", "hardsigmoid")
)


class _Patch:
    """Our kernels of calls on fake tensors, in torch's tables while a thread wants them.

    torch registers kernels for the full process, and has no narrower scope: real tensors do not
    pass through them. One thread at a time has them; calls of others run torch's meanwhile.
    """

    def __init__(self) -> None:
        self.thread, self.depth = 0, 0
        self.before: dict[Any, dict[Any, Callable[..., Any]]] = {}

    def is_on(self) -> bool:
        """Whether the current thread wants our kernels."""
        return self.thread == threading.get_ident()

    def install(self) -> None:
        self.before = {op: dict(op.py_kernels) for op in _RECURRENT}
        for op, kernels in self.before.items():
            shaped = _shaped(op)
            _replace_kernels(op, {key: _either(shaped, kernel) for key, kernel in kernels.items()})
        for op, fits in _FITS.items():
            if op in decomposition_table:
                get_fast_op_impls().setdefault(op, _ShapeKernel(op, fits))

    def restore(self) -> None:
        for op, kernels in self.before.items():
            _replace_kernels(op, kernels)
        for op in _FITS:
            if isinstance(get_fast_op_impls().get(op), _ShapeKernel):
                del get_fast_op_impls()[op]


_PATCH = _Patch()


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """While it lasts, recurrent calls of this thread on fake tensors, and norms and activations of
    dynamic sizes, make empty tensors of the right shape."""
    with one_at_a_time():
        if not _PATCH.depth:
            _PATCH.install()
            _PATCH.thread = threading.get_ident()
        _PATCH.depth += 1
        try:
            yield
        finally:
            _PATCH.depth -= 1
            if not _PATCH.depth:
                _PATCH.thread = 0
                _PATCH.restore()


# --- recurrent calls ------------------------------------------------------------------------------


def _either(shaped: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Our kernel in threads that switched it on, torch's in others."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return (shaped if _PATCH.is_on() else plain)(*args, **kwargs)

    return kernel


def _replace_kernels(op: Any, kernels: dict[Any, Callable[..., Any]]) -> None:
    op.py_kernels.update(kernels)  # the same keys, so that no thread ever sees one missing
    op._dispatch_cache.clear()


def _shaped(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """A kernel that returns empty outputs; RuntimeError where sizes do not fit each other."""

    def outputs(x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first):
        states = list(hx) if op is aten.lstm.input else [hx]
        two = 2 if bidirectional else 1
        batch = x.shape[0 if batch_first else 1]
        for state in states:
            if state.shape[0] != layers * two or state.shape[1] != batch:
                raise RuntimeError(
                    f"expected {layers * two} initial states for a batch of {batch}, got {tuple(state.shape)}"
                )
        if x.shape[2] != params[0].shape[1]:
            raise RuntimeError(f"expected {params[0].shape[1]} input features, got {x.shape[2]}")
        out = x.new_empty([x.shape[0], x.shape[1], two * states[0].shape[2]])
        return (out, *(state.new_empty(state.shape) for state in states))

    return outputs


# --- norms and activations ------------------------------------------------------------------------


class _ShapeKernel:
    """Our kernel in threads that switched it on and where it fits, torch's otherwise."""

    def __init__(self, op: Any, fits: Callable[..., bool]) -> None:
        self.op, self.fits = op, fits

    def __call__(self, mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            x = args[0] if args else None
            if kwargs or not _PATCH.is_on() or not self.fits(*args):
                return decomposition_table[self.op](*args, **kwargs)
            assert isinstance(x, Tensor)
            output = x.new_empty_strided(x.shape, x.stride())
            if self.op is _BATCH_NORM:
                return output, x.new_empty((0,)), x.new_empty((0,))
            return output


def _is_dense_float(x: Any, *_: Any) -> bool:
    """Whether a value is dense and floating-point, row-major or channels last."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
        return False
    return is_contiguous_or_false(x) or is_channels_last_contiguous_or_false(x)


def _is_plain_norm(x: Any, *args: Any) -> bool:
    """Whether that holds for a batch norm on the CPU whose tensors fit its input."""
    tensors = [value for value in args[:4] if value is not None]
    return (
        _is_dense_float(x)
        and x.ndim > 1
        and x.device.type == "cpu"
        and all(value is not None for value in args[2:4])
        and all(
            value.dtype == x.dtype
            and value.ndim == 1
            and value.device == x.device
            and isinstance(value.shape[0], int)
            and isinstance(x.shape[1], int)
            and value.shape[0] == x.shape[1]
            for value in tensors
        )
    )


_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
_FITS: dict[Any, Callable[..., bool]] = {_BATCH_NORM: _is_plain_norm, **dict.fromkeys(_ACTIVATIONS, _is_dense_float)}
