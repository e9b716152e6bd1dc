"""Sizes that a config can say.

A config has one size for all layers, and its class has rules of its own for it. What they are is
tried by building the class: the smallest config is taken of which the slices have the same members
and are as wide.
"""

from __future__ import annotations

import copy as copies
from collections.abc import Iterator, Mapping, Sequence

from demask.checkpoint.family import ConfigData, numbers_of_config
from demask.checkpoint.slices import ReducedModel, SliceGroup
from demask.shrink.own_class.pretrained import HEADS, find_config, find_config_with_room


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
