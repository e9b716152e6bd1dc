"""Parts of a network that are optimized one by one, and the calls that they get."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.module_copy import own_state
from demask.graph.result.demasked_module import attach
from demask.graph.result.resize import put_module, tensors_of
from demask.machine.clock import is_faster
from demask.shrink.submodules import blocks_of, match_names
from demask.tune.module.fast_forward import FastForward, call_type
from demask.tune.module.optimized_module import Optimized
from demask.tune.race import CandidateRace

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
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            return self.network.generate(*args, **kwargs, max_new_tokens=TOKENS, do_sample=False)  # type: ignore[operator]
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
