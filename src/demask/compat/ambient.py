"""The state of torch in which demask computes, whatever is in effect where it is called.

A caller may be inside of `torch.autocast`, `torch.inference_mode`, a default device or dtype, a
mode (`FlopCounterMode`, `torch.device("meta")`) or a function that torch.compile traces. Constants
folded there would be in bfloat16, on no device, or without gradients for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu")


class Defaults(NamedTuple):
    """The dtype and device of tensors that are created without one."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    @classmethod
    def current(cls) -> Defaults:
        """Those in effect in this thread."""
        return cls(torch.get_default_dtype(), torch.get_default_device())


FIXED = Defaults()


class _Lock:
    """One lock for all threads of the process; a child process has a free one of its own.

    torch.export and torch.fx replace functions of the full process while they trace, so that two
    captures at once fail in each other's tables.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()


_CAPTURES = _Lock()


def one_at_a_time() -> threading.RLock:
    """The lock of captures, a context: the thread that has it may enter it again."""
    return _CAPTURES.lock


@contextlib.contextmanager
def isolated(defaults: Defaults = FIXED) -> Iterator[None]:
    """A context that one thread at a time enters, in which torch is in a fixed state: no autocast,
    no inference mode, gradients on, no modes, the default dtype and device `defaults`, no cached
    parametrizations, and no hooks of all modules. The state before is restored.

    The default dtype, the cache and these hooks are of the process: other threads miss them until
    the context ends, where they are set at all."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        stack.enter_context(_without_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_autocast())
        stack.enter_context(_with_defaults(defaults))
        stack.enter_context(_without_cached_parametrizations())
        stack.enter_context(_without_global_hooks())
        yield


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """No function modes (a default device is one) and no dispatch modes."""
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    active = [kind for kind in _DEVICE_TYPES if _is_autocast(kind)]
    for kind in active:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in active:
            torch.set_autocast_enabled(kind, True)


def _is_autocast(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # torch was built without this device
        return False


@contextlib.contextmanager
def _with_defaults(defaults: Defaults) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(defaults.dtype)
    try:
        if defaults.device == FIXED.device:
            yield
        else:
            with defaults.device:
                yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    """Outside of `parametrize.cached()`, whose cache knows modules by their id, as copies have."""
    enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Without the hooks of all modules of the process, which profilers register."""
    tables = [
        value
        for name, value in vars(torch.nn.modules.module).items()
        if name.startswith("_global_") and isinstance(value, dict) and value
    ]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, registered in zip(tables, hooks, strict=True):
            table.update(registered)


def never_trace(function: Any) -> Any:
    """A function that torch.compile calls and does not trace, nor what it calls. Unlike
    `torch.compiler.disable` this does not import the compiler, which takes a second."""
    assert isinstance(function, FunctionType)
    frames: Any = vars(torch._C)["_dynamo"].eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="demask captures networks itself")
    return function
