"""The forward of a module inside of a network of the caller's class: a graph, or the module's code.

The code of the network around the module, and methods such as `generate`, may call it in other ways
than the example did: with a cache, without a mask, with one token. So the module remains what it
was, with its attributes, and a graph computes the calls that it was captured for.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import is_strict
from demask.tune.module.optimized_module import Optimized
from demask.tune.module.shape_cache import ENTRIES
from demask.tune.stale_sources import Sources, sources_of

FORWARD = "forward"
AGAIN = 3  # the call with the same sizes from which on the graph is called: its plan costs time
SIZES = 256  # of which calls are counted, at most
_PLAIN = (bool, int, float, str, type(None))


def call_type(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a graph of a call depends on, as a key: shapes and dtypes of tensors, other values, and
    names. None if the call has objects, such as a cache of keys and values."""
    try:
        return _type_of(args), tuple(kwargs), _type_of(tuple(kwargs.values()))
    except TypeError:
        return None


def _type_of(value: Any) -> Any:
    """The part of a key for one value. Raises TypeError for an object."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return type(value), *map(_type_of, value)
    if isinstance(value, _PLAIN):
        return type(value), value
    raise TypeError(type(value).__name__)


@dataclass(eq=False)
class FastForward:
    """The forward of one module: a graph for calls that it takes, the module's code for others.

    The code runs in train mode, while torch.compile or torch.export trace a call, where modules
    inside have hooks, after weights have changed, and for calls with objects. Other sizes than
    those that were measured are computed by the graph if they come again.

    module: whose class has the code. graph: None where weights have changed. sources: the weights.
    inside: the modules in the module. by_graph: whether the graph takes a call, by `call_type`.
    calls: how often other calls came.
    """

    module: nn.Module
    graph: Optimized | None
    sources: Sources
    inside: list[nn.Module]
    by_graph: dict[Any, bool] = field(default_factory=dict)
    calls: Counter[Any] = field(default_factory=Counter)

    @classmethod
    def install(cls, module: nn.Module, graph: Optimized) -> FastForward | None:
        """Let a graph compute the calls of a module, in place; None, and nothing is changed, where
        it has a forward of its own already, or weights that are computed on access."""
        names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        sources = None if FORWARD in vars(module) else sources_of(module, names)
        if sources is None:
            return None
        inside = [part for part in module.modules() if part is not module]
        fast = cls(module, graph, sources, inside)
        vars(module)[FORWARD] = fast
        return fast

    def remove(self) -> None:
        """Let the module's code compute all of its calls again."""
        del vars(self.module)[FORWARD]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module."""
        if torch.compiler.is_compiling() or not self._is_valid():
            return self.own_code(*args, **kwargs)
        key = call_type(args, kwargs)
        if key is None or not self._takes(key):
            return self.own_code(*args, **kwargs)
        assert self.graph is not None
        try:
            return self.graph(*args, **kwargs)
        except Exception as error:  # of any type: the code may take it, or has its own error
            if is_strict() and not isinstance(error, (BadInput, TypeError)):
                raise
        outputs = self.own_code(*args, **kwargs)
        self.by_graph[key] = False
        return outputs

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's code, which callers may read."""
        return inspect.signature(self._code())

    def own_code(self, *args: Any, **kwargs: Any) -> Any:
        """What the code of the module's class returns."""
        return self._code()(*args, **kwargs)

    def _code(self) -> Any:
        return type(self.module).forward.__get__(self.module)

    def _is_valid(self) -> bool:
        """Whether the graph computes what the code does at present, seen from outside as well."""
        if self.graph is None or self.module.training:
            return False
        if not self.sources.unchanged():
            self.graph = None
            return False
        return not any(part._forward_hooks or part._forward_pre_hooks or FORWARD in vars(part) for part in self.inside)

    def _takes(self, key: Any) -> bool:
        """Whether the graph is called for a call: for new sizes from the `AGAIN`-th time on."""
        known = self.by_graph.get(key)
        if known is not None:
            return known
        if sum(self.by_graph.values()) >= ENTRIES or len(self.calls) >= SIZES:
            return False
        self.calls[key] += 1
        if self.calls[key] < AGAIN:
            return False
        self.by_graph[key] = True
        return True

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; a graph of other weights is left out."""
        return vars(self) | {"graph": self.graph if self.sources.unchanged() else None}
