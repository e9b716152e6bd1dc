"""Layers that add nothing leave their list: the network of the caller's class is less deep."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from demask.errors import DemaskError
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import ModuleSizes, Provenance
from demask.ops.schema import fake
from demask.shrink.check import describe_difference

# Attributes of a layer with its own number, and of configs with the number of layers.
_NUMBER = re.compile(r"layer_?(idx|id|index|number)|block_?(idx|id|index)")
_COUNT = re.compile(r"(num|n)_.*layers?|\w*_layers|n_?layers?|depth")
Smaller = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], nn.Module]


@dataclass(frozen=True, slots=True)
class ShorterNetwork:
    """A network without the layers that added nothing. names: the path of each layer in the
    original network, by its path now. removed: parameters by path of the layers that went."""

    network: nn.Module
    names: Mapping[str, str]
    removed: Mapping[str, int]

    def original_record(self, record: Provenance) -> Provenance:
        """The record of what the shorter network became, for the original network."""
        layers = ", ".join(self.removed)
        return replace(
            record,
            cuts={name: replace(cut, source=self._original(cut.source)) for name, cut in record.cuts.items()},
            removed={**{self._original(path): n for path, n in record.removed.items()}, **self.removed},
            modules={
                **{self._original(path): sizes for path, sizes in record.modules.items()},
                **{path: ModuleSizes((n, 0), (0, 0)) for path, n in self.removed.items()},
            },
            notes=(f"layers that add nothing were removed, and later ones renumbered: {layers}", *record.notes),
        )

    def _original(self, name: str) -> str:
        for new, old in self.names.items():
            if name == new or name.startswith(f"{new}."):
                return f"{old}{name[len(new) :]}"
        return name


def without_dead_layers(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, smaller: Smaller
) -> ShorterNetwork | None:
    """The network without the layers of its lists that return their input, if there are any and it
    computes the same without; else None.

    smaller: the graph that computes a module; a layer is removed if that has no calls.
    """
    lists = {path: part for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1}
    layers = [f"{path}.{k}".lstrip(".") for path, part in lists.items() for k in range(len(part))]
    inputs = args, dict(kwargs or {})
    if not layers:
        return None
    dead = [
        path
        for path, call in _find_unchanging(model, inputs, layers)
        if _is_identity(smaller, model.get_submodule(path), *call)
    ]
    gone: dict[str, set[int]] = defaultdict(set)
    for path in dead:
        holder, _, k = path.rpartition(".")
        gone[holder].add(int(k))
    gone = {path: which for path, which in gone.items() if len(which) < len(lists[path])}
    if not gone:
        return None
    copy, names = structural_copy(model, share=True), {}
    removed = {
        f"{path}.{k}".lstrip("."): sum(p.numel() for p in lists[path][k].parameters())
        for path, which in gone.items()
        for k in sorted(which)
    }
    for path, which in gone.items():
        names |= _shorten(copy, path, which)
    try:
        differs = describe_difference(copy, model, args, kwargs, caches=False)
    except Exception:  # code that reads layers by their number
        return None
    return None if differs else ShorterNetwork(copy, names, removed)


def _find_unchanging(model: nn.Module, inputs: Inputs, layers: list[str]) -> list[tuple[str, Inputs]]:
    """The layers that return their first input in every call of a run, with the inputs of the first
    call."""
    calls: dict[str, list[tuple[Inputs, bool]]] = defaultdict(list)
    work = copy_in_eval(model)

    def hook(path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            returned = output[0] if isinstance(output, tuple) and output else output
            rest = output[1:] if isinstance(output, tuple) else ()
            same = (
                isinstance(first, Tensor)
                and isinstance(returned, Tensor)
                and first.shape == returned.shape
                and torch.equal(first, returned)
                and all(x is None for x in rest)
            )
            calls[path].append(((args, kwargs), same))

        return note

    for path in layers:
        work.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True)
    try:
        run_seeded(work, inputs)
    except Exception:  # the caller's code: what runs it next says why
        return []
    return [(path, several[0][0]) for path, several in calls.items() if all(same for _, same in several)]


def _is_identity(smaller: Smaller, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer is proved to return its first input."""
    if not any(True for _ in layer.parameters()):
        return False
    try:
        graph = smaller(layer, args, kwargs)
    except DemaskError:
        return False
    if not isinstance(graph, GraphModule):
        return False
    (output,) = graph.graph.find_nodes(op="output")
    return all(_is_input(node) for node in output.all_input_nodes)


def _is_input(node: Any) -> bool:
    """Whether a node is an input, or casts of one to its own or a wider dtype, and back."""
    dtypes = []
    while node.target is torch.ops.aten.to.dtype:
        dtypes.append(fake(node).dtype)
        node = node.args[0]
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, Tensor):
        return False
    wide = all((d.is_floating_point and d.itemsize > value.dtype.itemsize) or d == value.dtype for d in dtypes)
    return wide and dtypes[:1] in ([], [value.dtype])


def _shorten(network: nn.Module, path: str, gone: set[int]) -> dict[str, str]:
    """Remove layers of a list, in place; the old path of each that has another number now."""
    holder: Any = network.get_submodule(path)
    count, names = len(holder), {}
    remaining = [k for k in range(count) if k not in gone]
    layers = [holder[k] for k in remaining]
    holder._modules = {str(n): layer for n, layer in enumerate(layers)}
    for new, (old, layer) in enumerate(zip(remaining, layers, strict=True)):
        if new == old:
            continue
        names[f"{path}.{new}".lstrip(".")] = f"{path}.{old}".lstrip(".")
        for part in layer.modules():
            for name, value in vars(part).items():
                if _NUMBER.fullmatch(name) and value == old and type(value) is int:
                    vars(part)[name] = new
    configs = {id(c): c for m in network.modules() if (c := getattr(m, "config", None)) is not None}
    for config in configs.values():
        counts = [
            name
            for name, value in vars(config).items()
            if _COUNT.fullmatch(name) and type(value) is int and value == count
        ]
        part = next((word for word in ("encoder", "decoder") if word in path), "")
        for name in [name for name in counts if part and part in name] or counts:
            setattr(config, name, len(remaining))
        for name, value in list(vars(config).items()):
            is_list = isinstance(value, (list, tuple)) and len(value) == count
            if is_list and re.search("layer|block", name):
                setattr(config, name, type(value)(value[k] for k in remaining))
    return names
