"""How modules are called: which argument, and which part of a result, is which value of a region.

Determined from a run of both on the example; that the whole is then correct is proved separately
(`Proof`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.graph.example_runs import run_seeded
from demask.graph.module_copy import structural_copy
from demask.graph.recorded_run import RecordedRun
from demask.graph.result.resize import put_module
from demask.shrink.own_class.proof import ProgramMismatch, Proof
from demask.shrink.own_class.regions import ModuleRegion

NEAR = 1e-3  # largest relative difference of values that are equal except for rounding


@dataclass(slots=True)
class ModuleCall:
    """How a module is called, and what it returns, in terms of a region's values."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    inputs: Mapping[int, fx.Node] | None = None  # by leaf of the arguments
    outputs: Sequence[Any] = ()  # leaves of the result: nodes, or values that are not tensors
    out_spec: Any = None


def match_calls(
    network: nn.Module, model: nn.Module, proof: Proof, regions: Sequence[ModuleRegion]
) -> dict[str, ModuleCall]:
    """The calls of the regions' modules, by path. network: a copy of the model with the smaller
    tensors. Raises ProgramMismatch with the place where a call cannot be matched."""
    values = _record_values(regions, proof)
    returned = _record_results(model, [region.path for region in regions], proof)
    calls = {region.path: ModuleCall() for region in regions}
    probed = structural_copy(network, share=True)
    for region in regions:
        if region.path not in returned:
            raise ProgramMismatch(f"{region.path} is not called", region.path)
        matched = partial(_match_call, region, returned[region.path], values, calls[region.path])
        put_module(probed, region.path, _RegionProbe(matched))
    proof.run(probed)
    return calls


class _RegionProbe(nn.Module):
    """A module in place of a region's graph, for one run."""

    def __init__(self, function: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._function = (function,)  # a tuple, so that copies share it

    def __deepcopy__(self, memo: Any) -> _RegionProbe:
        return _RegionProbe(*self._function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function[0](args, kwargs)


def _record_values(regions: Sequence[ModuleRegion], proof: Proof) -> dict[fx.Node, Any]:
    """The values that enter and leave regions, for the example."""
    wanted = {node for region in regions for node in (*region.inputs, *region.outputs)}
    run = RecordedRun(proof.after, wanted)
    run_seeded(run.run, (tuple(pytree.tree_leaves(proof.inputs)), {}))
    return run.values


def _record_results(model: nn.Module, paths: Sequence[str], proof: Proof) -> dict[str, Any]:
    """The results of modules for the example."""
    results: dict[str, Any] = {}
    work = structural_copy(model, share=True)

    def store(path: str) -> Callable[..., None]:
        return lambda module, inputs, output: results.update({path: output})

    for path in paths:
        work.get_submodule(path).register_forward_hook(store(path))
    proof.run(work)
    return results


def _match_call(
    region: ModuleRegion, returned: Any, values: Mapping[fx.Node, Any], call: ModuleCall,
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The result of a region's module for a call; sets in `call` how the module is called."""
    leaves = pytree.tree_leaves((args, kwargs))
    inputs: dict[int, fx.Node] = {}
    for node in region.inputs:
        value = values[node]
        if not isinstance(value, Tensor):
            continue
        near = {k: _gap(leaf, value) for k, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and k not in inputs and leaf.shape == value.shape
                and leaf.dtype == value.dtype}  # fmt: skip
        best = min(near, key=near.__getitem__, default=None)
        if best is not None and near[best] <= NEAR:
            inputs[best] = node
    wanted, spec = pytree.tree_flatten(returned)
    outputs: list[Any] = list(wanted)
    free = list(region.outputs)
    for k, leaf in enumerate(wanted):
        if not isinstance(leaf, Tensor):
            continue
        fits = {node: _share(values[node], leaf) for node in free
                if _can_be_cut(values[node], leaf)}  # fmt: skip
        if not fits:
            raise ProgramMismatch(f"some results of {region.path} are not used", region.path)
        outputs[k] = max(fits, key=fits.__getitem__)
        free.remove(outputs[k])
    if free:
        raise ProgramMismatch(f"values inside {region.path} are read elsewhere", region.path)
    call.args, call.kwargs, call.inputs = args, kwargs, inputs
    call.outputs, call.out_spec = outputs, spec
    values_returned = [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in outputs]
    return pytree.tree_unflatten(values_returned, spec)


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().nan_to_num().max() / b.abs().nan_to_num().max().clamp(min=1e-30))


def _can_be_cut(value: Any, of: Tensor) -> bool:
    """Whether a value could be a cut of a tensor, by its dtype and shape."""
    same = isinstance(value, Tensor) and value.dtype == of.dtype and value.ndim == of.ndim
    return same and all(a <= b for a, b in zip(value.shape, of.shape, strict=True))


def _share(value: Tensor, of: Tensor) -> float:
    """The share of the elements of a value that another tensor has."""
    return float(torch.isin(value.detach(), of.detach()).double().mean()) if value.numel() else 1.0
