"""Slices of the layers of a checkpoint: heads and units that are only removed everywhere at once.

They are those of `demask.prune.groups`, by the op table, of a model with one layer of each kind.
It has the checkpoint's sizes; no value of its weights is read, so that none needs memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from demask.checkpoint.family import LayerStack
from demask.errors import DemaskError, NotExportable
from demask.failures import described
from demask.prune.coupling.coupling import Coupling
from demask.prune.coupling.groups import Group

KINDS = ("unit", "head")
IMAGE, SAMPLES = 64, 4000  # of images whose size no config says; of sound


class LayerKind(NamedTuple):
    """A kind of layer: a stack and the first layer of this kind in it."""

    stack: str
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class SliceMember:
    """Positions of slices along one axis of a parameter of a layer.

    Attributes:
        kind: the kind of the layer; None for a parameter in no layer.
        name: the parameter's name in its layer ("mlp.up_proj.weight"), or in the model.
        axis: the axis, of a tensor of rank `rank`.
        positions: int64 [slices, positions of each].
        produces: whether the slice is computed with these positions, rather than multiplied.
    """

    kind: LayerKind | None
    name: str
    axis: int
    rank: int
    positions: Tensor
    produces: bool

    @property
    def key(self) -> tuple[LayerKind | None, str, int]:
        return self.kind, self.name, self.axis


@dataclass(frozen=True, slots=True, eq=False)
class SliceGroup:
    """Slices of the layers of one kind, or of all layers, if they share them.

    Attributes:
        name: as of the group of the model that was captured.
        kind: "unit" or "head": with the keys and values that several heads share.
        members: where the slices are. Of a layer of another kind there are none.
        size: the number of slices.
    """

    name: str
    kind: str
    members: tuple[SliceMember, ...]
    size: int

    @property
    def kinds(self) -> frozenset[LayerKind]:
        """The kinds of layers that have these slices."""
        return frozenset(m.kind for m in self.members if m.kind is not None)

    def is_like(self, other: SliceGroup) -> bool:
        """Whether another group has the same members and its slices are as wide."""
        own, others = ([(m.key, m.produces, m.positions.shape[1]) for m in group.members]
                       for group in (self, other))  # fmt: skip
        return own == others

    @property
    def is_shared(self) -> bool:
        """Whether all layers of these kinds share the slices: a head is removed in all of them."""
        return len(self.kinds) > 1 or any(m.kind is None for m in self.members)


def find_slices(
    model: Any, stacks: Sequence[LayerStack], layers: Mapping[str, Sequence[int]]
) -> tuple[tuple[SliceGroup, ...], Coupling]:
    """The slices of a model on the meta device with few layers, and its coupling.

    Args:
        model: from `Family.build`; it loses its place on the meta device.
        layers: by stack, the layers of the checkpoint that it has, each the first of its kind.

    Raises:
        NotExportable: the model cannot be captured.
    """
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    try:
        coupling = Coupling.of(model, (), example_of(model))
    except NotExportable:
        raise
    except DemaskError as error:
        raise NotExportable(f"{type(model).__name__}: {error}", "unknown",
                            "its checkpoint stays as it is") from error  # fmt: skip
    numbers = {s.path: s for s in stacks}
    ranks = {name: p.ndim for name, p in model.named_parameters(remove_duplicate=False)}
    groups = [_slice_group(group, numbers, layers, ranks)
              for group in coupling.groups if group.kind in KINDS]  # fmt: skip
    return tuple(group for group in groups if group is not None), coupling


def _slice_group(
    group: Group,
    stacks: Mapping[str, LayerStack],
    layers: Mapping[str, Sequence[int]],
    ranks: Mapping[str, int],
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
            example["pixel_values"] = torch.zeros(
                1, getattr(vision, "num_channels", 3), height, width
            )
        elif model.main_input_name == "input_values":
            example["input_values"] = torch.zeros(1, SAMPLES)
        if "input_ids" in names and "input_features" not in names:
            example["input_ids"] = tokens
    except AttributeError as error:
        raise NotExportable(f"no inputs are known for {type(model).__name__}: {described(error)}",
                            "unknown", "its checkpoint stays as it is") from error  # fmt: skip
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        example["decoder_input_ids"] = tokens
    if "use_cache" in names:
        example["use_cache"] = False
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    example = {name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point()
               else value for name, value in example.items()}  # fmt: skip
    if not example:
        raise NotExportable(f"no inputs are known for {type(model).__name__}", "unknown",
                            "its checkpoint stays as it is")  # fmt: skip
    return example


def prefixes_of(
    stacks: Sequence[LayerStack], layers: Mapping[str, Sequence[int]]
) -> dict[LayerKind, str]:
    """The first part of the names of parameters of each kind of layer, in a model with few layers.
    layers: as of `find_slices`."""
    return {LayerKind(s.path, k): s.name(n, "")
            for s in stacks for n, k in enumerate(layers[s.path])}  # fmt: skip


def cut_shapes(
    model: nn.Module,
    groups: Sequence[SliceGroup],
    stacks: Sequence[LayerStack],
    layers: Mapping[str, Sequence[int]],
    counts: Mapping[str, int],
) -> None:
    """Cut a model on the meta device, in place: `counts` are the slices that stay, by group."""
    at = prefixes_of(stacks, layers)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    cut: dict[str, list[int]] = {name: list(p.shape) for name, p in tensors.items()}
    for group in groups:
        for member in group.members:
            name = (at[member.kind] if member.kind else "") + member.name
            lost = (group.size - counts[group.name]) * member.positions.shape[1]
            cut[name][member.axis] -= lost
    for name, shape in cut.items():
        if list(tensors[name].shape) != shape:
            path, _, leaf = name.rpartition(".")
            old = tensors[name]
            new = nn.Parameter(old.new_empty(shape), requires_grad=False)
            setattr(model.get_submodule(path), leaf, new)
