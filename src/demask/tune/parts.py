"""Parts of a network that are optimized one by one, and the calls that they get.

The forward of a module inside of a network of the caller's class: a graph, or the module's code.

The code of the network around the module, and methods such as `generate`, may call it in other ways
than the example did: with a cache, without a mask, with one token. So the module remains what it
was, with its attributes, and a graph computes the calls that it was captured for.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from demask.errors import BadInput
from demask.failures import is_strict
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.module_copy import own_state
from demask.graph.result.demasked_module import attach
from demask.graph.result.resize import put_module, tensors_of
from demask.machine.clock import is_faster
from demask.shrink.submodules import blocks_of, match_names
from demask.tune.optimized_module import Optimized
from demask.tune.race import CandidateRace
from demask.tune.shape_cache import ENTRIES
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


TOKENS = 3  # that are generated for a measurement
CALLS = 2  # distinct calls of a part that are measured: of the prompt and of one token
LEAST_ZEROS = 0.5  # of a layer's weights, for which the layer alone may be faster


class Generation(nn.Module):
    """A few tokens that a network generates from its example."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of `generate`, without its warnings."""
        network: Any = self.network
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            return network.generate(*args, **kwargs, max_new_tokens=TOKENS, do_sample=False)
        finally:
            logging.disable(disabled)


def generates(network: nn.Module, inputs: Inputs) -> bool:
    """Whether a network has a method `generate` that takes the example."""
    try:
        run_seeded(Generation(copy_in_eval(network, caches=True)), inputs)
    except Exception:  # of any type: then its methods are not measured
        return False
    return True


@dataclass(slots=True)
class PartCalls:
    """The distinct calls of a module, and whether others have objects among their inputs."""

    inputs: list[Inputs] = field(default_factory=list)
    types: set[Any] = field(default_factory=set)
    has_objects: bool = False

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a call, if it is of tensors and plain values, and not like one before."""
        kind = call_type(args, kwargs)
        self.has_objects = self.has_objects or kind is None
        if kind is not None and kind not in self.types and len(self.inputs) < CALLS:
            self.types.add(kind)
            self.inputs.append((args, dict(kwargs)))


def record_calls(network: nn.Module, inputs: Inputs, *, by_methods: bool) -> dict[str, PartCalls]:
    """The calls of all modules for the example: by `generate` first, where that takes it, then by
    the network itself."""
    calls: dict[str, PartCalls] = {}
    work = own_state(copy_in_eval(network, caches=by_methods))

    def hook(path: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, PartCalls()).add(args, kwargs)

        return note

    for path, module in work.named_modules():
        module.register_forward_pre_hook(hook(path), with_kwargs=True)
    if by_methods:
        with contextlib.suppress(Exception):  # of any type: a method with other arguments
            run_seeded(Generation(work), inputs)
    run_seeded(work, inputs)
    return calls


def parts_of(
    network: nn.Module, names: str | Sequence[str], calls: Mapping[str, PartCalls]
) -> Iterator[tuple[str, list[Inputs]]]:
    """The parts to optimize and their calls. With "auto", the outermost modules, from repeated
    blocks on, that are never called with objects; single layers only where zeros remain."""
    queue = blocks_of(network) if names == "auto" else match_names(network, names)
    for name in queue:
        module, own = network.get_submodule(name), calls.get(name)
        if own is not None and own.inputs and not (names == "auto" and own.has_objects):
            if names != "auto" or _may_be_faster(module):
                yield name, own.inputs
        elif names == "auto":
            queue += [f"{name}.{child}" for child, _ in module.named_children()]


def _may_be_faster(module: nn.Module) -> bool:
    """Whether a module has several calls, or a layer whose zeros need not be computed."""
    weights = [weight for weight in module.parameters() if weight.ndim > 1]
    is_layer = type(module).__module__.startswith("torch.nn.") and not [*module.children()]
    if not is_layer:
        return any(True for _ in module.parameters())
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return zeros > LEAST_ZEROS * sum(weight.numel() for weight in weights)


def put_graph(network: nn.Module, name: str, graph: Optimized, calls: Sequence[Inputs], threads: int) -> bool:
    """Let a graph compute a part of a network, in place; returns whether it does: not if the graph
    may be slower in one of the part's calls, without what optimize() measured, the first of them.

    The graph reads the part's own tensors where it has equal ones.
    """
    module = network.get_submodule(name)
    if isinstance(module, GraphModule):  # it takes the same calls as the optimized graph
        put_module(network, name, graph)
        return True
    own = dict(tensors_of(module))
    fast = FastForward.install(module, graph)
    if fast is None:
        return False
    with torch.no_grad():
        for path, tensor in tensors_of(graph):
            if path in own and _are_equal(own[path], tensor):
                attach(graph, path, own[path])
    graph.refresh()
    device = next(iter(own.values())).device
    fast.by_graph.update((call_type(args, kwargs), True) for args, kwargs in calls)
    for args, kwargs in calls[1:]:
        race = CandidateRace(_OwnCode(fast), None, args, kwargs, device, threads)
        race.modules[name] = module
        if not is_faster(race.speed(name)[0].least):
            fast.remove()
            return False
    return True


class _OwnCode(nn.Module):
    """A part of a network without its graph."""

    def __init__(self, fast: FastForward):
        super().__init__()
        self.forward = fast.own_code


def _are_equal(a: Tensor, b: Tensor) -> bool:
    same = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    return same and torch.equal(a, b)
