"""Modules of a network of the caller's class as small graphs, inside of fixed borders.

A network of the caller's class keeps zeros where several layers would have to be masked alike. Most
of them lie inside of blocks: a graph in the place of such a block computes the same outputs from
the same inputs, so nothing around it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import DemaskError
from demask.graph.example_runs import Inputs, copy_in_eval
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import provenance_of
from demask.graph.result.computed_tensors import remove_parametrizations
from demask.graph.result.resize import put_module

CALLERS = ("generate",)  # methods that call modules in other ways than forward does
LEAST_OF_MODULE, LEAST_OF_NETWORK = 0.2, 0.03  # of the size, that a graph must save
VISIBLE = 8  # a graph removes up to this many times the zeros: with values also queries and keys

Demasked = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], nn.Module]


@dataclass(slots=True)
class _Calls:
    """How a module is called: how often, and with what, the first time."""

    count: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def are_of_tensors(self) -> bool:
        """Whether it is called once, with tensors alone: other calls may leave some out."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return self.count == 1 and bool(leaves) and all(isinstance(x, Tensor) for x in leaves)


def with_small_graphs(
    own: nn.Module, inputs: Inputs, demasked: Demasked, objective: str = "parameters"
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of a network of the caller's class with graphs in the place of the smallest modules in
    which they save enough, and these graphs by path.

    demasked: the graph that computes a module, for the args and kwargs of its call. objective: the
    attribute of Sizes by which it is enough.
    """
    plain = structural_copy(own, share=True)
    remove_parametrizations(plain)
    zeros, sizes, by_macs = _count_zeros(plain), _count_parameters(own), objective == "macs"
    # Of MACs, how many zeros cost is known of the graph.
    least = {
        path: max(LEAST_OF_MODULE * size, 0 if by_macs else LEAST_OF_NETWORK * sizes[""])
        for path, size in sizes.items()
    }
    wanted = [path for path, count in zeros.items() if path and count * VISIBLE >= max(least[path], 1)]
    calls = _record_calls(own, inputs, wanted) if wanted else {}
    graphs: dict[str, nn.Module] = {}
    for path in sorted(calls, key=lambda path: -path.count(".")):
        call = calls[path]
        if not call.are_of_tensors() or any(done.startswith(f"{path}.") for done in graphs):
            continue
        module = structural_copy(own.get_submodule(path), share=True)
        hooks = _take_hooks(module)
        try:
            graph = demasked(module, call.args, call.kwargs)
        except DemaskError:
            continue
        vars(graph).update(hooks)
        record = provenance_of(graph)
        full, whole, fewer = sizes[path], sizes[""], _count_parameters(graph)[""]
        if by_macs:
            full, fewer, whole = (record.before.macs, record.after.macs, provenance_of(own).after.macs)
        if full - fewer >= max(LEAST_OF_MODULE * full, LEAST_OF_NETWORK * whole):
            graphs[path] = graph
    copy = structural_copy(own, share=True) if graphs else own
    for path, graph in graphs.items():
        put_module(copy, path, graph)
    return copy, graphs


def _take_hooks(module: nn.Module) -> dict[str, Any]:
    """Remove the hooks of a module itself, in place; returns them by the attributes they are in."""
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, dict) and "hooks" in name and "state_dict" not in name
    ]
    hooks = {name: vars(module)[name] for name in names}
    vars(module).update({name: type(value)() for name, value in hooks.items()})
    return hooks


def has_methods(network: nn.Module, names: Sequence[str] = CALLERS) -> bool:
    """Whether a network has methods of its own: by default, such that call its modules in other
    ways."""
    return any(hasattr(module, name) for module in network.modules() for name in names)


def _count_parameters(network: nn.Module) -> dict[str, int]:
    """The parameters in every module."""
    sizes: dict[str, int] = {}
    for path, module in network.named_modules():
        sizes[path] = sum(p.numel() for p in module.parameters())
    return sizes


def _count_zeros(network: nn.Module) -> dict[str, int]:
    """The numbers in rows and columns of zeros in the weights below each module that has layers:
    those of its own layers, and its own."""
    counts: Counter[str] = Counter()
    holders = {path for path, module in network.named_modules() if [*module.children()]}
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                live = (weight != 0).flatten(2).any(2) if weight.ndim > 2 else weight != 0
                live_size = int(live.any(1).sum()) * int(live.any(0).sum())
                each = weight.numel() // max(live.numel(), 1)
                layer = name.rpartition(".")[0]
                path = layer if layer in holders else layer.rpartition(".")[0]
                counts[path] += weight.numel() - live_size * each
    return dict(counts)


def _record_calls(network: nn.Module, inputs: Inputs, paths: list[str]) -> dict[str, _Calls]:
    """The calls of modules in one run of a copy."""
    calls: dict[str, _Calls] = {}
    work = copy_in_eval(network)

    def hook(path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(path, _Calls(0, args, dict(kwargs))).count += 1

        return note

    for path in paths:
        work.get_submodule(path).register_forward_pre_hook(hook(path), with_kwargs=True)
    with torch.no_grad():
        work(*inputs[0], **inputs[1])
    return calls
