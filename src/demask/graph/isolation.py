"""Public functions that capture or run a network do so in a fixed state of torch, one at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.utils import _pytree as pytree

from demask.compat.ambient import FIXED, Defaults, isolated, never_trace
from demask.graph.example_runs import copy_in_eval, equal_outputs, run_seeded

P = ParamSpec("P")
T = TypeVar("T")
_INSIDE: ContextVar[bool] = ContextVar("demask_isolated", default=False)


def in_isolation(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of functions that capture, run or compare networks: results do not depend on what
    is in effect around the call (autocast, modes, other threads).

    Only the default dtype and device may: where the network's code creates tensors without either,
    it computes something else under other defaults. Those of the caller are used then.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if _INSIDE.get():
            return function(*args, **kwargs)
        defaults = Defaults.current()
        if defaults != FIXED:
            bound = signature.bind(*args, **kwargs).arguments
            defaults = _needed_defaults(defaults, bound.get("model"), bound.get("args", ()), bound.get("kwargs"))
        token = _INSIDE.set(True)
        try:
            with isolated(defaults):
                return function(*args, **kwargs)
        finally:
            _INSIDE.reset(token)

    return never_trace(wrapper)


def _needed_defaults(own: Defaults, model: Any, args: Any, kwargs: Mapping[str, Any] | None) -> Defaults:
    """`own` if a network computes something else without them, else FIXED."""
    if not isinstance(model, nn.Module) or not isinstance(args, tuple):
        return FIXED
    with isolated():
        network = copy_in_eval(model)

    def run(defaults: Defaults) -> list[Any] | None:
        try:
            with isolated(defaults):
                return pytree.tree_leaves(run_seeded(network, (args, dict(kwargs or {}))))
        except Exception:  # the network's code fails with these defaults
            return None

    fixed, with_own = run(FIXED), run(own)
    if with_own is None or (fixed is not None and all(map(equal_outputs, fixed, with_own))):
        return FIXED
    return own
