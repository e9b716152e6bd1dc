"""Slices of the layers of a checkpoint: heads and units that are only removed everywhere at once.

They are those of `demask.prune.groups`, by the op table, of a model with one layer of each kind.
It has the checkpoint's sizes; no value of its weights is read, so that none needs memory.

A config has one size for all layers, and its class has rules of its own for it. What they are is
tried by building the class: the smallest config is taken of which the slices have the same members
and are as wide.
"""

from __future__ import annotations

import copy as copies
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from demask.checkpoint.family import ConfigData, Family, LayerStack, numbers_of_config, reduced_config
from demask.errors import DemaskError, NotExportable
from demask.failures import described
from demask.graph.result.resize import assign_tensor
from demask.prune.coupling import Coupling, Group
from demask.shrink.own_class.pretrained import HEADS, find_config, find_config_with_room

KINDS = ("unit", "head")
IMAGE, SAMPLES = 64, 4000  # of images whose size no config says; of sound


class LayerKind(NamedTuple):
    """A kind of layer: a stack and the first layer of this kind in it."""

    stack: str
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class SliceMember:
    """Positions of slices along one axis of a parameter of a layer."""

    kind: LayerKind | None  # of the layer; None for a parameter in no layer
    name: str  # in its layer ("mlp.up_proj.weight"), or in the model
    axis: int
    rank: int  # of the tensor
    positions: Tensor  # int64 [slices, positions of each]
    produces: bool  # whether the slice is computed with these positions, rather than multiplied

    @property
    def key(self) -> tuple[LayerKind | None, str, int]:
        return self.kind, self.name, self.axis


@dataclass(frozen=True, slots=True, eq=False)
class SliceGroup:
    """Slices of the layers of one kind, or of all layers, if they share them."""

    name: str  # as of the group of the model that was captured
    kind: str  # "unit" or "head": with the keys and values that several heads share
    members: tuple[SliceMember, ...]  # of a layer of another kind there are none
    size: int  # the number of slices

    @property
    def kinds(self) -> frozenset[LayerKind]:
        """The kinds of layers that have these slices."""
        return frozenset(m.kind for m in self.members if m.kind is not None)

    def is_like(self, other: SliceGroup) -> bool:
        """Whether another group has the same members and its slices are as wide."""
        own, others = ([(m.key, m.produces, m.positions.shape[1]) for m in group.members] for group in (self, other))
        return own == others

    @property
    def is_shared(self) -> bool:
        """Whether all layers of these kinds share the slices: a head is removed in all of them."""
        return len(self.kinds) > 1 or any(m.kind is None for m in self.members)


class ReducedModel:
    """A class of models with one layer of each kind, of a checkpoint's config and of similar ones.
    None is captured twice: that takes longer than all else.

    Args:
        family: the class.
        data: the config of the checkpoint, with all keys of its class.
        stacks: its stacks of layers.

    Attributes:
        data: the config with few layers.
        layers: by stack, the layers of the checkpoint that it has, each the first of its kind.

    Raises:
        NotExportable: the class builds no fewer layers.
    """

    def __init__(self, family: Family, data: ConfigData, stacks: Sequence[LayerStack]):
        self.family, self.stacks = family, stacks
        self.data, self.layers = reduced_config(family, data, stacks)
        # The first part of the names of parameters of each kind of layer.
        self.prefixes = {LayerKind(s.path, k): s.name(n, "") for s in stacks for n, k in enumerate(self.layers[s.path])}
        self._memory: dict[str, tuple[SliceGroup, ...] | None] = {}
        self._last: tuple[str, Coupling] | None = None

    @cached_property
    def _captured(self) -> tuple[tuple[SliceGroup, ...], Coupling]:
        return self._capture(self.family.build(self.data))

    @property
    def groups(self) -> tuple[SliceGroup, ...]:
        """The slices of the checkpoint's config. Raises NotExportable."""
        return self._captured[0]

    @property
    def coupling(self) -> Coupling:
        """The coupling of the checkpoint's config. Raises NotExportable."""
        return self._captured[1]

    def _capture(self, model: Any) -> tuple[tuple[SliceGroup, ...], Coupling]:
        """The slices of a model on the meta device, which leaves it, and its coupling.
        Raises NotExportable where it cannot be captured."""
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for buffer in model.buffers():  # what is in new memory may be no position in a table
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
            else:
                buffer.fill_(int(buffer.dtype == torch.bool))
        try:
            coupling = Coupling.of(model, (), example_of(model))
        except NotExportable:
            raise
        except DemaskError as error:
            raise NotExportable(
                f"{type(model).__name__}: {error}", "unknown", "its checkpoint stays as it is"
            ) from error
        numbers = {s.path: s for s in self.stacks}
        ranks = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}
        groups = [_slice_group(group, numbers, self.layers, ranks) for group in coupling.groups if group.kind in KINDS]
        return tuple(group for group in groups if group is not None), coupling

    def groups_of(self, data: ConfigData) -> tuple[SliceGroup, ...] | None:
        """The slices of a config; None where its model does not run."""
        key = _config_key(data)
        if key == _config_key(self.data):
            return self.groups
        if key not in self._memory:
            model = self.family.try_build(data)
            try:
                if model is None:
                    self._memory[key] = None
                else:
                    self._memory[key], coupling = self._capture(model.double())
                    self._last = key, coupling
            except NotExportable:
                self._memory[key] = None
        return self._memory[key]

    def in_float64(self, data: ConfigData) -> tuple[tuple[SliceGroup, ...], Coupling]:
        """The slices of a config, and its coupling, in float64. Raises NotExportable."""
        groups = self._memory.get(_config_key(data))
        if groups is not None and self._last is not None and self._last[0] == _config_key(data):
            return groups, self._last[1]
        return self._capture(self.family.build(data).double())

    def cut(self, counts: Mapping[str, int]) -> Any:
        """A model on the meta device with `counts` slices, by group; the numbers of its modules are
        those of the checkpoint's config."""
        model = self.family.build(self.data)
        tensors = dict(model.named_parameters(remove_duplicate=False))
        shapes = {name: list(p.shape) for name, p in tensors.items()}
        for group in self.groups:
            for member in group.members:
                name = (self.prefixes[member.kind] if member.kind else "") + member.name
                lost = (group.size - counts[group.name]) * member.positions.shape[1]
                shapes[name][member.axis] -= lost
        for name, shape in shapes.items():
            if list(tensors[name].shape) != shape:
                new = nn.Parameter(tensors[name].new_empty(shape), requires_grad=False)
                assign_tensor(model, name, new)
        return model


def _config_key(data: ConfigData) -> str:
    return json.dumps(data, sort_keys=True, default=repr)


def _slice_group(
    group: Group, stacks: Mapping[str, LayerStack], layers: Mapping[str, Sequence[int]], ranks: Mapping[str, int]
) -> SliceGroup | None:
    """A group of a captured model as slices of layers; None for slices of parameters that are in no
    layer, and of slices with different numbers of positions."""
    members: list[SliceMember] = []
    for member in group.members:
        counts = torch.bincount(member.slices[member.slices >= 0], minlength=group.size)
        if len(counts.unique()) != 1:
            return None
        order = member.slices.argsort(stable=True)
        positions = order[int((member.slices < 0).sum()) :].view(group.size, -1)
        kind, name = None, member.parameter
        for path, stack in stacks.items():
            if (split := stack.split(member.parameter)) is not None:
                kind, name = LayerKind(path, layers[path][split[0]]), split[1]
        rank = ranks[member.parameter]
        members.append(SliceMember(kind, name, member.axis, rank, positions, member.produces))
    if all(m.kind is None for m in members):
        return None
    return SliceGroup(group.name, group.kind, tuple(members), group.size)


def example_of(model: Any) -> dict[str, Any]:
    """Inputs of a model of transformers, by the names of its arguments and the sizes in its config.
    Raises NotExportable for a model that takes others."""
    config, names = model.config, inspect.signature(model.forward).parameters
    tokens = torch.ones(1, 5, dtype=torch.int64)
    example: dict[str, Any] = {}
    try:
        if "input_features" in names:
            length = 2 * getattr(config, "max_source_positions", 50)
            example["input_features"] = torch.zeros(1, config.num_mel_bins, length)
        elif model.main_input_name == "pixel_values" or "pixel_values" in names:
            vision = getattr(config, "vision_config", config)
            size = getattr(vision, "image_size", IMAGE)
            height, width = (size, size) if isinstance(size, int) else size
            example["pixel_values"] = torch.zeros(1, getattr(vision, "num_channels", 3), height, width)
        elif model.main_input_name == "input_values":
            example["input_values"] = torch.zeros(1, SAMPLES)
        if "input_ids" in names and "input_features" not in names:
            example["input_ids"] = tokens
    except AttributeError as error:
        raise NotExportable(
            f"no inputs are known for {type(model).__name__}: {described(error)}",
            "unknown",
            "its checkpoint stays as it is",
        ) from error
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        example["decoder_input_ids"] = tokens
    if "use_cache" in names:
        example["use_cache"] = False
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    example = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in example.items()
    }
    if not example:
        raise NotExportable(
            f"no inputs are known for {type(model).__name__}", "unknown", "its checkpoint stays as it is"
        )
    return example


def choose_sizes(reduced: ReducedModel, live: Mapping[str, int]) -> tuple[dict[str, int], ConfigData]:
    """The smallest config with room for some slices of each group, and the slices that it has: a
    config of which the slices have the same members and are as wide.

    Families have rules of their own for numbers of heads (that they divide the width, that groups
    have equally many): the next larger number is tried until one works, else no heads are cut.

    Args:
        live: by group, how many slices there must be room for.
    """
    groups = reduced.groups
    wanted = {g.name: g.size if g.kind == "head" else live[g.name] for g in groups}
    uncut = {g.name: g.size for g in groups}, reduced.data
    if wanted != uncut[0]:
        model = reduced.cut(wanted)
        config = find_config_with_room(model, model.config)
        sizes = _sizes_in(reduced, config.to_dict(), groups)
        if sizes and all(sizes[name] >= n for name, n in wanted.items()):
            uncut = sizes, config.to_dict()
    for heads in _counts_of_heads(groups, live):
        wanted = {**uncut[0], **heads}
        model = reduced.cut(wanted)
        fitting = find_config(model, copies.deepcopy(model.config))
        if fitting is None:
            continue
        # One slice alone is no group: the sizes of its tensors, which fit, must be enough.
        several = [group for group in groups if wanted[group.name] > 1]
        config = fitting[1].to_dict()
        for candidate in (config, _with_equal_heads(reduced.data, config)):
            sizes = _sizes_in(reduced, candidate, several)
            if sizes is not None and all(wanted[name] == n for name, n in sizes.items()):
                return wanted, candidate
    return uncut


def _with_equal_heads(before: ConfigData, after: ConfigData) -> ConfigData:
    """A config with as many heads in numbers that no shape depends on, as those of keys that are
    computed from a common latent, as in those that another config had equal to them."""
    old, new = dict(numbers_of_config(before)), dict(numbers_of_config(after))
    heads = [k for k in old.keys() & new.keys() if HEADS.search(k[-1]) and k[-1][-3:] != "dim"]
    changed = {old[k]: new[k] for k in heads if old[k] != new[k]}
    other = copies.deepcopy(after)
    for keys in heads:
        part = other
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = changed.get(old[keys], new[keys]) if old[keys] == new[keys] else new[keys]
    return other


def _counts_of_heads(groups: Sequence[SliceGroup], live: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Numbers of heads with room for the live ones, by group, the fewest first. Those of one stack
    of layers are as many in all its groups."""
    heads = [group for group in groups if group.kind == "head"]
    most: dict[str, int] = {}
    for _ in heads:  # groups may connect stacks
        for group in heads:
            paths = {kind.stack for kind in group.kinds}
            top = max([live[group.name], *(most.get(path, 0) for path in paths)])
            most |= dict.fromkeys(paths, top)
    wanted = {g.name: min(g.size, max(most[k.stack] for k in g.kinds)) for g in heads}
    while any(wanted[g.name] < g.size for g in heads):
        yield wanted
        wanted = {g.name: min(g.size, wanted[g.name] + 1) for g in heads}


def _sizes_in(reduced: ReducedModel, data: ConfigData, groups: Sequence[SliceGroup]) -> dict[str, int] | None:
    """How many slices groups have in a config; None where its model does not run, or they have
    other members or are not as wide."""
    own = {group.name: group for group in reduced.groups_of(data) or ()}
    if not all(group.name in own and own[group.name].is_like(group) for group in groups):
        return None
    return {group.name: own[group.name].size for group in groups}


def apply_changes(config: ConfigData, before: ConfigData, after: ConfigData) -> None:
    """Set in a config, in place, what differs between two others, which have fewer layers."""
    for key in before.keys() - after.keys():
        config.pop(key, None)
    for key, value in after.items():
        if value == before.get(key):
            continue
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            apply_changes(config.setdefault(key, {}), before[key], value)
        else:
            config[key] = value
