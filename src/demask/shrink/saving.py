"""`save_pretrained` of demasked networks: what it writes is what `from_pretrained` reads.

A config has one size for all layers, and its class may derive sizes from others. Where no config
describes the sizes that are left, the network that is written has zeros again: as few as the
smallest config with room for it asks for. The network itself stays as it is.
"""

from __future__ import annotations

import copy as copies
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.failures import described, warn_caller
from demask.graph.example_inputs import draw_examples
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Provenance
from demask.graph.result.resize import assign_tensor, tensors_of
from demask.registry import RUNNERS
from demask.shrink.check import describe_difference
from demask.shrink.own_class.pretrained import SAVE, build_on_meta, copy_numbers, is_never_written, try_config

_ADVICE = (
    "demask.save(model, path) and demask.load(path, into=Model(config)) need none, nor do networks "
    "with as many heads and units masked in every layer"
)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedSave:
    """`save_pretrained` of a demasked network: writes what its class reads, or raises BadInput."""

    network: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        network: Any = self.network
        save = getattr(type(network), SAVE, None)
        adapters_alone = getattr(network, "_hf_peft_config_loaded", False)
        state = args[2] if len(args) > 2 else kwargs.get("state_dict")
        state = network.state_dict() if state is None else state
        wrong = "it is a graph, without a class"
        if save is not None:
            wrong = "" if adapters_alone else find_misfit(network, state)
        if wrong and save is not None and "state_dict" not in kwargs and len(args) < 3:
            padded = pad_to_config(network)
            if padded is not None:
                sizes = [sum(p.numel() for p in n.parameters()) for n in (network, padded)]
                warn_caller(
                    f"save_pretrained writes sizes that a config can say: {sizes[1]:,} "
                    f"parameters in place of {sizes[0]:,}, some of them zeros, as none "
                    f"describes this network ({wrong}). {_ADVICE}"
                )
                return save(padded, *args, **kwargs)
        if wrong:
            raise BadInput(
                f"save_pretrained wrote nothing, because from_pretrained would not read "
                f"this network from its config: {wrong}. {_ADVICE}"
            )
        return save(network, *args, **kwargs)  # type: ignore[misc]


def check_saves(network: nn.Module, original: Any = None) -> None:
    """Check what a demasked network and the models in it write with `save_pretrained`, in place.
    original: the network that a graph was computed from."""
    for module in network.modules():
        if callable(getattr(type(module), SAVE, None)):
            vars(module)[SAVE] = CheckedSave(module)
    if hasattr(original, SAVE):
        vars(network)[SAVE] = CheckedSave(network)


def find_misfit(model: Any, state: Mapping[str, Tensor]) -> str:
    """Why `from_pretrained` would not read a model from the tensors that `save_pretrained` writes:
    the first difference from a model that is built from the written config; "" if there is none."""
    graph = next((path for path, m in model.named_modules() if isinstance(m, fx.GraphModule)), None)
    if graph is not None:
        return f"{graph} is a graph"
    try:
        fresh: Any = build_on_meta(model, type(model.config), json.loads(model.config.to_json_string()))
    except Exception as error:  # sizes that do not fit each other, in the words of any library
        return f"its class refuses the config: {described(error)}"
    own = {name: t for name, t in fresh.state_dict(keep_vars=True).items() if not is_never_written(fresh, name)}
    for name in state:
        if name not in own and not is_never_written(fresh, name):
            return f"its config has no {name}"
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        tied[id(tensor)].append(name)
    places: dict[Any, str] = {}
    for names in tied.values():
        written = [name for name in names if name in state]
        if not written:
            return f"{names[0]} is missing"
        for name in written:
            here, there = tuple(state[name].shape), tuple(own[name].shape)
            if here != there:
                return f"{name} is {here}, and {there} by its config"
        first = state[written[0]]
        for name in written[1:]:
            if state[name].data_ptr() != first.data_ptr() and not torch.equal(state[name], first):
                return f"its config ties {name} to {written[0]}, which differs"
        other = places.setdefault((first.data_ptr(), first.device), written[0])
        if other != written[0] and first.numel() and not first.is_meta:
            return f"{written[0]} is tied to {other}, which its config does not say"
    buffers = dict(model.named_buffers())
    for name, buffer in fresh.named_buffers():
        here, there = tuple(buffers.get(name, buffer).shape), tuple(buffer.shape)
        if here != there:
            return f"{name} is {here}, and {there} by its config"
    return ""


def pad_to_config(network: Any) -> nn.Module | None:
    """A network that computes the same as a demasked one, and whose class reads it from its config:
    with zeros where that has more heads, units or channels. None where the sizes are not those that
    `demask()` returned."""
    full = _with_original_sizes(network)
    if full is None:
        return None
    args, kwargs = draw_examples((network,), (), {})
    for padded in (RUNNERS.get("smaller")(full), full):
        if padded is None or find_misfit(padded, padded.state_dict()):
            continue
        if not describe_difference(padded, network, args, kwargs):
            return padded
    return None


def _with_original_sizes(network: Any) -> Any | None:
    """A copy of a demasked network in which its tensors have their original sizes, zeros in the
    positions that were removed; None where that is unknown."""
    record = vars(network).get("demasked")
    config = copies.deepcopy(getattr(network, "config", None))
    fresh = None if config is None else try_config(network, config)
    if fresh is None or not isinstance(record, Provenance):
        return None
    shapes = {name: tuple(t.shape) for name, t in tensors_of(fresh)}
    larger: dict[str, Tensor] = {}
    for name, own in tensors_of(network):
        shape, cut = shapes.get(name), record.cuts.get(name)
        if shape == tuple(own.shape):
            continue
        if shape is None or cut is None or cut.shape != shape:
            return None
        positions = [sorted(range(n) if axis is None else axis) for n, axis in zip(shape, cut.kept, strict=True)]
        if [len(axis) for axis in positions] != list(own.shape):
            return None
        zeros = own.detach().new_zeros(shape)
        zeros[torch.meshgrid(*map(torch.tensor, positions), indexing="ij")] = own.detach()
        is_parameter = isinstance(own, nn.Parameter)
        larger[name] = nn.Parameter(zeros, own.requires_grad) if is_parameter else zeros
    if not larger:
        return None
    copy, tied = structural_copy(network, share=True), dict[int, Tensor]()
    for name, own in tensors_of(network):
        if name in larger:
            assign_tensor(copy, name, tied.setdefault(id(own), larger[name]))
    copy_numbers(copy, fresh, config)
    return copy
