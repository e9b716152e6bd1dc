"""Modules of a network of the caller's class as small graphs, inside of fixed borders.

A network of the caller's class keeps zeros where several layers would have to be masked alike. Most
of them lie inside of blocks: a graph in the place of such a block computes the same outputs from
the same inputs, so nothing around it changes.
"""

from __future__ import annotations

import itertools
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
from demask.graph.provenance import ModuleSizes, Provenance, provenance_of
from demask.graph.result.resize import put_module

CALLERS = ("generate",)  # methods that call modules in other ways than forward does
LEAST_OF_MODULE, LEAST_OF_NETWORK = 0.2, 0.03  # of the size, that a graph must save
NOTHING = ModuleSizes((0, 0), (0, 0))

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
    own: nn.Module, inputs: Inputs, demasked: Demasked, smallest: Provenance, objective: str = "parameters"
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A copy of a network of the caller's class with graphs in the place of the smallest modules in
    which they save enough, and these graphs by path.

    demasked: the graph that computes a module, for the args and kwargs of its call. smallest: the
    record of the graph of the network, which has no more in any module. objective: the attribute of
    Sizes by which it is enough.
    """
    sizes, by_macs = _count_parameters(own), objective == "macs"
    wanted = _find_larger(own, smallest, objective)
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


def _find_larger(own: nn.Module, smallest: Provenance, objective: str) -> list[str]:
    """The modules with layers that are larger in a network than in its smallest graph, by as much
    as a graph must save. A layer counts for the module that it is directly in."""
    record = provenance_of(own)
    holders = [path for path, module in own.named_modules() if path and [*module.children()]]
    full, fewer = Counter[str](), Counter[str]()
    for path, sizes in record.modules.items():
        size, least = (getattr(of, objective)[1] for of in (sizes, smallest.modules.get(path, NOTHING)))
        fewer[path if path in holders else path.rpartition(".")[0]] += size - least
        for above in itertools.accumulate(path.split("."), "{}.{}".format):
            full[above] += size
    of_network = max(1, LEAST_OF_NETWORK * getattr(record.after, objective))
    return [path for path in holders if fewer[path] >= max(LEAST_OF_MODULE * full[path], of_network)]


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
