"""Sizes that a config can say.

A config has one size for all layers, and its class has rules of its own for it. What they are is
tried by building the class: the smallest config is taken of which the slices have the same members
and are as wide.
"""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from demask.checkpoint.family import ConfigData, Family, LayerStack
from demask.checkpoint.slices import SliceGroup, cut_shapes, find_slices
from demask.errors import NotExportable
from demask.shrink.own_class.pretrained import find_config, larger_configs


def choose_sizes(
    family: Family,
    data: ConfigData,
    stacks: Sequence[LayerStack],
    layers: Mapping[str, Sequence[int]],
    groups: Sequence[SliceGroup],
    live: Mapping[str, int],
) -> tuple[dict[str, int], ConfigData]:
    """The smallest config with room for some slices of each group, and the slices that it has: a
    config of which the slices have the same members and are as wide.

    Families have rules of their own for numbers of heads (that they divide the width, that groups
    have equally many): the next larger number is tried until one works, else no heads are cut.
    """
    wanted = {g.name: g.size if g.kind == "head" else live[g.name] for g in groups}
    uncut: tuple[dict[str, int], ConfigData] | None = None
    model = _cut_model(family, data, stacks, layers, groups, wanted)
    # Not the first of these configs, with fewer heads: what is in a head would change, too.
    for config, _ in islice(larger_configs(model, copies.deepcopy(model.config)), 1, None):
        sizes = _sizes_in(family, config.to_dict(), stacks, layers, groups)
        if sizes and all(sizes[name] >= n for name, n in wanted.items()):
            uncut = sizes, config.to_dict()
            break
    if uncut is None:
        raise NotExportable(
            "no config describes its sizes, not even its own", "unknown", "report it"
        )
    for heads in _counts_of_heads(groups, live):
        wanted = {**uncut[0], **heads}
        model = _cut_model(family, data, stacks, layers, groups, wanted)
        fitting = find_config(model, copies.deepcopy(model.config))
        if fitting is None:
            continue
        config = fitting[1].to_dict()
        # One slice alone is no group: the sizes of its tensors, which fit, must be enough.
        several = [group for group in groups if wanted[group.name] > 1]
        sizes = _sizes_in(family, config, stacks, layers, several)
        if sizes is not None and all(wanted[name] == n for name, n in sizes.items()):
            return wanted, config
    return uncut


def _cut_model(
    family: Family,
    data: ConfigData,
    stacks: Sequence[LayerStack],
    layers: Mapping[str, Sequence[int]],
    groups: Sequence[SliceGroup],
    counts: Mapping[str, int],
) -> Any:
    """A model on the meta device with some slices of each group."""
    model = family.build(data)
    cut_shapes(model, groups, stacks, layers, counts)
    return model


def _counts_of_heads(
    groups: Sequence[SliceGroup], live: Mapping[str, int]
) -> Iterator[dict[str, int]]:
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


def _sizes_in(
    family: Family,
    data: ConfigData,
    stacks: Sequence[LayerStack],
    layers: Mapping[str, Sequence[int]],
    groups: Sequence[SliceGroup],
) -> dict[str, int] | None:
    """The slices of groups in a model of a config; None where it does not run, or has others."""
    model = family.try_build(data)
    try:
        own_groups = () if model is None else find_slices(model, stacks, layers)[0]
    except NotExportable:
        return None
    own = {group.name: group for group in own_groups}
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
