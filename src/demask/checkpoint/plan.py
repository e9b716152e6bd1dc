"""What becomes of a folder's tensors: slices that stay, layers that go, biases that take constants.

A config has one size for all layers. So every layer is cut to the smallest size that a config can
say and that has room for the live slices of all layers: some dead slices stay, as they are. In
other formats each layer has a size of its own.
"""

from __future__ import annotations

import copy as copies
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from demask.checkpoint.decide import Fate, SlicePattern, SmallNetwork, bias_of
from demask.checkpoint.family import ConfigData, Family, LayerStack, as_class, keep_layers, slides
from demask.checkpoint.folder import cut, cut_shape, with_scales
from demask.checkpoint.slices import (
    KINDS,
    LayerKind,
    ReducedModel,
    SliceGroup,
    SliceMember,
    apply_changes,
    choose_sizes,
)
from demask.checkpoint.targets import HALVES, LayerFormat, LoaderTarget
from demask.checkpoint.tensors import StoredTensors
from demask.progress import ProgressStep
from demask.prune.axis_ties import LOOKUP, ROWS, find_roles
from demask.prune.coupling import Coupling

# Units of experts in one tensor: their products read rows that begin at multiples of 16 bytes.
EXPERT_MULTIPLE = 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerSlices:
    """The slices of a group in one layer, or in all layers that share them."""

    group: SliceGroup
    layers: tuple[tuple[LayerKind, int], ...]  # each with its kind
    fates: tuple[tuple[Fate, ...], ...]  # of each slice, by expert; of one expert where there are none

    @property
    def live(self) -> int:
        """The largest number of live slices of an expert."""
        return max(sum(not fate.dead for fate in fates) for fates in self.fates)

    @property
    def is_silent(self) -> bool:
        """Whether no slice adds anything to what reads it."""
        return all(fate.dead and not fate.constant for fates in self.fates for fate in fates)

    def width(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """The parameters of one slice of one expert, in all these layers."""
        total = 0
        for member, name in self.parameters():
            shape = shapes[name]
            rest = math.prod(shape) // shape[member.axis]
            rest //= shape[0] if member.rank == 3 else 1
            total += member.positions.shape[1] * rest
        return total

    def staying(self, count: int) -> list[Tensor]:
        """By expert, `count` slices that stay, in order: the live ones, and dead ones to fill up,
        those first that need no bias to be removed."""
        result: list[Tensor] = []
        for fates in self.fates:
            order = sorted(range(len(fates)), key=lambda k: (fates[k].dead, not fates[k].constant, k))
            result.append(torch.tensor(sorted(order[:count]), dtype=torch.int64))
        return result

    def parameters(self) -> Iterator[tuple[SliceMember, str]]:
        """The members and their parameters in these layers."""
        for member in self.group.members:
            if member.kind is None:
                yield member, member.name
            for kind, layer in self.layers:
                if kind == member.kind:
                    yield member, f"{kind.stack}.{layer}.{member.name}"


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointPlan:
    """What is written."""

    family: Family  # another class than the folder's where only that can say the sizes
    config: ConfigData  # with all keys of its class
    layers: Mapping[str, Sequence[int]]  # by stack, those that stay
    slices: Sequence[LayerSlices]  # what is known of all of them
    counts: Sequence[int]  # how many of each of `slices` stay
    # by tensor and axis, the positions that stay, int64 [positions], -1 for zeros; of a tensor of three axes, for
    # each position of the first: [first axis, positions]
    cuts: Mapping[str, Mapping[int, Tensor]]
    added: Mapping[str, Tensor]  # by tensor, float64 numbers that are added to it
    multiple: int  # units are rounded up to a multiple of it
    notes: tuple[str, ...] = ()  # what could be removed and is not, and why; what is another class now
    dropped: frozenset[str] = frozenset()  # tensors in layers that stay, without counterpart


@dataclass(frozen=True, slots=True, eq=False)
class KnownSlices:
    """What is known of the slices of a folder."""

    reduced: ReducedModel  # a model with one layer of each kind
    small: SmallNetwork  # what decides its slices
    slices: Sequence[LayerSlices]  # those of all layers

    @classmethod
    def of(cls, stored: StoredTensors, family: Family, data: ConfigData, step: ProgressStep) -> KnownSlices:
        """Those of a folder. data: its config, with all keys of its class. Raises NotExportable
        where the model cannot be captured."""
        reduced = ReducedModel(family, data, stored.stacks)
        step("capturing one layer of each kind")
        small = SmallNetwork(reduced)
        slices = [s for group in reduced.groups for s in decide_slices(stored, small, group, stored.stacks, step)]
        return cls(reduced, small, slices)


def plan_checkpoint(
    stored: StoredTensors,
    family: Family,
    data: ConfigData,
    target: LoaderTarget,
    own: LayerFormat | None,
    multiple: int,
    step: ProgressStep,
) -> CheckpointPlan:
    """The plan for a folder.

    Args:
        data: the config, with all keys of its class.
        target: what is to load the folder.
        own: the format, if layers have sizes of their own.
        multiple: units are rounded up to a multiple of it.

    Raises:
        NotExportable: the model cannot be captured.
    """
    stacks, notes = stored.stacks, list[str]()
    known = KnownSlices.of(stored, family, data, step)
    reduced, slices = known.reduced, known.slices
    groups = reduced.groups
    if not groups:
        notes.append(f"the layers of {family.model.__name__} have no units or heads of their own")
    for module, reason in reduced.coupling.heads_that_stay().items():
        notes.append(f"the heads of {module} stay: {reason}")
    # A config may have several layers of a kind, of which the first one's slices are decided.
    room: dict[tuple[object, ...], int] = {}
    for mine in slices:
        key = _group_key(mine.group, stacks)
        room[key] = max(mine.live, room.get(key, 0))
    model_type = str(data.get("model_type"))
    numbered = model_type in target.numbered
    layers, config = drop_layers(family, data, stacks, slices, known.small, stored, numbered, notes)
    slices = [s for s in slices if any(k in layers[kind.stack] for kind, k in s.layers)]
    dropped: frozenset[str] = frozenset()
    if own is not None:
        counts, dropped = fit_layers(stored, slices, layers, own, multiple)
    else:
        full = {group.name: group.size for group in groups}
        live = {group.name: room.get(_group_key(group, stacks), group.size) for group in groups}
        for group in groups:
            shared = max((_most_slices_per_scale(stored, s) for s in slices if s.group is group), default=1)
            if shared > 1 and (group.kind != "unit" or group.size % shared):
                if live[group.name] < group.size:
                    notes.append(
                        f"the {group.kind}s of {group.name} stay: they have scales in "
                        "common that cannot be cut between them"
                    )
                live[group.name] = group.size
            elif group.kind == "unit":
                merged = any(member.rank == 3 for member in group.members)
                fitting = math.lcm(multiple, shared, EXPERT_MULTIPLE if merged else 1)
                live[group.name] = round_units(live[group.name], group.size, fitting)
            live[group.name] = max(live[group.name], 1)
        units, heads = ([g.name for g in groups if g.kind == kind and live[g.name] < g.size] for kind in KINDS)
        if units and model_type in target.full_units:
            notes.append(f"{target.name} loads no {model_type} with fewer units: those of {_first(units)} stay")
            live |= {name: full[name] for name in units}
        if heads and not target.cuts_heads(model_type):
            other = target.other_classes.get(family.model.__name__)
            fewer, like = full, reduced
            if other is not None and not slides(stored.model.config):
                like = ReducedModel(*as_class(family, data, *other), stacks)
                fewer, _ = choose_sizes(like, live)
            text = f"{target.name} loads no {model_type} with fewer heads: "
            if other is not None and any(fewer[name] < full[name] for name in heads):
                notes.append(f"{text}the folder is of {other[0]}, which computes the same")
                reduced = like
                family, config = as_class(family, config, *other)
            else:
                notes.append(f"{text}those of {_first(heads)} stay")
                live |= {name: full[name] for name in heads}
        sizes = full
        if live != full:
            sizes, changed = choose_sizes(reduced, live)
            config = copies.deepcopy(config)
            apply_changes(config, reduced.data, changed)
        for kind in KINDS:
            similar = [g for g in groups if g.kind == kind]
            names = [
                g.name
                for g in similar
                if live[g.name] < sizes[g.name] == g.size
                and not any(live[o.name] == o.size == g.size and _stacks_of(o) & _stacks_of(g) for o in similar)
            ]
            if names:
                notes.append(
                    f"the {kind}s of {_first(names)} stay: no config of {family.model.__name__} has fewer there"
                )
        counts = [sizes[s.group.name] for s in slices]
    if silent := count_silent_channels(stored, known.reduced.coupling, known.reduced.layers):
        notes.append(
            f"{silent} channels of the residual stream are zero in all weights that write "
            "it, and stay: norms divide by the number of channels, so that with fewer "
            "their weights would have to be scaled and rounded"
        )
    cuts, added = find_cuts(stored, slices, counts), fold_constants(stored, slices, counts)
    return CheckpointPlan(family, config, layers, slices, counts, cuts, added, multiple, tuple(notes), dropped)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _stacks_of(group: SliceGroup) -> set[str]:
    return {kind.stack for kind in group.kinds}


def count_silent_channels(stored: StoredTensors, coupling: Coupling, layers: Mapping[str, Sequence[int]]) -> int:
    """How many channels of the embedding, and of what is added to it, are zero in all weights that
    compute them. They must stay if a call needs all of the axis.

    layers: as of `ReducedModel`.
    """
    ties, every = coupling.ties, find_roles(coupling.ties)
    writers: dict[int, list[tuple[str, int, set[str]]]] = defaultdict(list)  # by cell
    for target, axes in every.items():
        constant = coupling.program.constants[target]
        for axis, pairs in axes.items():
            roles = {role for _, role in pairs}
            for cell in ties.leaves(ties.constant(target)[axis]) if roles & {ROWS, LOOKUP} else ():
                writers[cell].append(((constant.aliases or (constant.name,))[0], axis, roles))
    silent = 0
    for cell, own in writers.items():
        lookups = [row for row in own if LOOKUP in row[2]]
        products = [row for row in own if LOOKUP not in row[2]]
        if not (lookups and products and ties.cells.forced(cell)):
            continue
        both: Tensor | None = None
        for name, axis, _ in (*products, *lookups):  # embeddings are large: only if need be
            names = [name]
            for stack in stored.stacks:
                if (split := stack.split(name)) is not None:
                    first = layers[stack.path][split[0]]
                    names = [stack.name(k, split[1]) for k, own in enumerate(stack.kinds) if own == first]
            axes = [(name, axis) for name in names] + [(bias_of(name), 0) for name in names]
            for parameter, k in axes:
                if parameter in stored.shapes and (both is None or both.any()):
                    zeros = stored.zeros(parameter, k)
                    zeros = torch.zeros(1, 1, dtype=torch.bool) if zeros is None else zeros
                    both = zeros.all(0) if both is None else both & zeros.all(0)
        silent = max(silent, 0 if both is None else int(both.sum()))
    return silent


def round_units(live: int, size: int, multiple: int) -> int:
    """How many of `size` units stay."""
    return min(size, -(-max(live, 1) // multiple) * multiple)


def fit_layers(
    stored: StoredTensors,
    slices: Sequence[LayerSlices],
    layers: Mapping[str, Sequence[int]],
    own: LayerFormat,
    multiple: int,
) -> tuple[list[int], frozenset[str]]:
    """How many of all slices stay in a format in which each layer has sizes of its own, and the
    tensors of the halves of layers that go."""
    counts: list[int] = []
    halves: list[str] = []
    for mine in slices:
        kind, layer = mine.layers[0]
        biases = [stored.name_of(bias_of(name)) for m, name in mine.parameters() if not m.produces]
        none = mine.is_silent and all(name is None or stored.pattern(name).everywhere for name in biases)
        if mine.group.kind == "unit":
            none = none and own.unitless
            count = round_units(mine.live, mine.group.size, multiple)
        else:
            number = layers[kind.stack].index(layer)
            none = none and own.headless is not None and number >= own.headless
            count = max(mine.live, 1)
        counts.append(0 if none else count)
        if none:
            halves += [f"{kind.stack}.{layer}.{name}" for name in HALVES[mine.group.kind]]
    dropped = (
        tensor
        for tensor, parameter in stored.parameter_of.items()
        if parameter is not None and parameter.startswith(tuple(halves))
    )
    return counts, frozenset(dropped)


def _group_key(group: SliceGroup, stacks: Sequence[LayerStack]) -> tuple[object, ...]:
    """What groups of layers of one kind have in common."""
    kinds = {LayerKind(s.path, k): first for s in stacks for k, first in enumerate(s.kinds)}
    return tuple((m.kind and (m.kind.stack, kinds[m.kind]), m.name, m.axis) for m in group.members)


def decide_slices(
    stored: StoredTensors, small: SmallNetwork, group: SliceGroup, stacks: Sequence[LayerStack], step: ProgressStep
) -> Iterator[LayerSlices]:
    """What becomes of the slices of a group, in each layer that has it."""
    numbered = {s.path: s.kinds for s in stacks}
    layers = [
        (kind, k) for kind in sorted(group.kinds) for k, first in enumerate(numbered[kind.stack]) if first == kind.layer
    ]
    for mine in [layers] if group.is_shared else [[layer] for layer in layers]:
        step(f"reading {mine[0][0].stack}.{mine[0][1]}")
        alive = LayerSlices(group, tuple(mine), ((Fate(False),) * group.size,))
        zeros: list[Tensor | None] = [None] * len(group.members)
        values: dict[int, Tensor] = {}
        index = {member.key: m for m, member in enumerate(group.members)}
        is_known = True
        for member, parameter in alive.parameters():
            m, own = index[member.key], stored.zeros(parameter, member.axis)
            if own is None:
                is_known = False
                break
            before = zeros[m]
            zeros[m] = own if before is None else before & own
            name = stored.name_of(parameter)
            if member.rank == 1 and name is not None and not group.is_shared:
                values[m] = stored.folder.tensor(name)[member.positions]
        if not is_known:
            yield alive
            continue
        count = max(len(z) for z in zeros if z is not None)
        names = {member.name for member in group.members}
        # Nor of biases that take constants: what is known altogether, nothing would read.
        names |= {bias_of(member.name) for member in group.members if not member.produces}
        prefixes = [f"{kind.stack}.{layer}." for kind, layer in mine]
        ties = other_zeros(stored, prefixes, names)
        fates = [
            small.fates(
                group.name,
                [
                    z[min(e, len(z) - 1)][member.positions]
                    for z, member in zip(zeros, group.members, strict=True)
                    if z is not None
                ],
                values,
                ties,
            )
            for e in range(count)
        ]
        # No single bias takes the constants of several, nor those that an adapter changes.
        adapter = stored.adapter
        is_changed = adapter is not None and adapter.changes(tuple(prefixes))
        if group.is_shared or count > 1 or is_changed:
            fates = [[fate if not fate.constant else Fate(False) for fate in f] for f in fates]
        yield _with_whole_blocks(stored, LayerSlices(group, tuple(mine), tuple(map(tuple, fates))))


def _with_whole_blocks(stored: StoredTensors, slices: LayerSlices) -> LayerSlices:
    """Slices that are alive also where others are that have a scale in common with them."""
    blocks = list(_blocks_of(stored, slices))
    if not blocks:
        return slices
    fates: list[tuple[Fate, ...]] = []
    for e, own in enumerate(slices.fates):
        alive = torch.tensor([not fate.dead for fate in own])
        before = -1
        while before < (before := int(alive.sum())):
            for expert, owner, block in blocks:
                if expert in (None, e):
                    stays = torch.zeros(int(block[-1]) + 1, dtype=torch.bool)
                    stays[block[(owner < 0) | alive[owner]]] = True
                    mine = owner[stays[block]]
                    alive[mine[mine >= 0]] = True
        fates.append(tuple(Fate(False) if live else fate for fate, live in zip(own, alive.tolist(), strict=True)))
    return replace(slices, fates=tuple(fates))


def _most_slices_per_scale(stored: StoredTensors, slices: LayerSlices) -> int:
    """The largest number of slices that have a scale in common."""
    counts = [
        torch.stack([owner, block])[:, owner >= 0].unique(dim=1)[1].bincount().max()
        for _, owner, block in _blocks_of(stored, slices)
    ]
    return max(map(int, counts), default=1)


def _blocks_of(stored: StoredTensors, slices: LayerSlices) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    """By tensor with scales that several positions have in common, its expert, and for each of its
    positions, the slice (-1: none) and the block, int64."""
    for member, parameter in slices.parameters():
        owner = torch.full((stored.shapes[parameter][member.axis],), -1)
        owner[member.positions] = torch.arange(slices.group.size).view(-1, 1)
        for part in stored.parts(parameter, member.axis):
            scale = stored.folder.scales.get(part.tensor)
            if scale is not None and scale.blocks[part.axis] > 1:
                own = owner if part.positions is None else owner[part.positions]
                yield part.expert, own, torch.arange(len(own)) // scale.blocks[part.axis]


def other_zeros(stored: StoredTensors, prefixes: Sequence[str], names: Collection[str]) -> dict[str, bool]:
    """Of the tensors of layers that are not in `names`, whether they are zero everywhere, by their
    names in a layer. prefixes: of the names of these layers."""
    first = prefixes[0]
    every = {name.removeprefix(first) for name in stored.shapes if name.startswith(first)}
    return {name: all(stored.is_zero(p + name) for p in prefixes) for name in every - set(names)}


def pattern_of(stored: StoredTensors, slices: LayerSlices, kind: LayerKind, layer: int) -> SlicePattern:
    """The pattern of the first slice of a group in a layer; what other layers have is unknown."""
    zeros: list[Tensor] = []
    for member in slices.group.members:
        mine = torch.zeros(member.positions.shape[1], dtype=torch.bool)
        if member.kind == kind:
            own = stored.zeros(f"{kind.stack}.{layer}.{member.name}", member.axis)
            mine = mine if own is None else own[0][member.positions[0]]
        zeros.append(mine)
    return SlicePattern(zeros)


def drop_layers(
    family: Family,
    data: ConfigData,
    stacks: Sequence[LayerStack],
    slices: Sequence[LayerSlices],
    small: SmallNetwork,
    stored: StoredTensors,
    numbered: bool,
    notes: list[str],
) -> tuple[dict[str, list[int]], ConfigData]:
    """The layers that stay, by stack, and the config that says so. A layer is removed if it returns
    its input, and the others are what they were with their new numbers. numbered: whether what
    loads them computes that from their numbers."""
    layers = {s.path: list(range(len(s.kinds))) for s in stacks}
    config = data
    for stack in stacks:
        dead = []
        for k, first in enumerate(stack.kinds):
            kind = LayerKind(stack.path, first)
            mine = [s for s in slices if (kind, k) in s.layers]
            if mine and all(s.is_silent for s in mine):
                silent = {s.group.name: pattern_of(stored, s, kind, k) for s in mine}
                names = {member.name for s in mine for member in s.group.members}
                ties = other_zeros(stored, [f"{stack.path}.{k}."], names)
                if small.is_identity(kind, silent, ties):
                    dead.append(k)
        # One layer of each kind stays: a class may need it, as for its cache of keys and values.
        alive = {first for k, first in enumerate(stack.kinds) if k not in dead}
        dead = [k for k in dead if stack.kinds[k] in alive or k != stack.kinds[k]]
        going: list[int] = []
        for more in (dead, *([k] for k in dead)) if dead and not numbered else ():
            tried = {**layers, stack.path: [k for k in layers[stack.path] if k not in (*going, *more)]}
            other = keep_layers(family, data, stacks, tried)
            if other is not None:
                layers, config, going = tried, other, [*going, *more]
            if going == dead:
                break
        left = [k for k in dead if k not in going]
        if left:
            notes.append(
                f"layers {', '.join(map(str, left))} of {stack.path} return their inputs "
                "and stay: what the others are depends on their numbers"
            )
    return layers, config


def find_cuts(
    stored: StoredTensors, slices: Sequence[LayerSlices], counts: Sequence[int]
) -> dict[str, Mapping[int, Tensor]]:
    """The positions of tensors that stay, as in `CheckpointPlan`."""
    masks: dict[tuple[str, int], Tensor] = {}
    for mine, count in zip(slices, counts, strict=True):
        if count == mine.group.size:
            continue
        gone = [torch.ones(mine.group.size, dtype=torch.bool).index_fill(0, k, False) for k in mine.staying(count)]
        for member, parameter in mine.parameters():
            length = stored.shapes[parameter][member.axis]
            stays = torch.ones(len(gone), length, dtype=torch.bool)
            for e, lost in enumerate(gone):
                stays[e, member.positions[lost].reshape(-1)] = False
            for part in stored.parts(parameter, member.axis):
                if part.expert is None:
                    own = stays if len(stays) > 1 else stays[0]
                else:
                    own = stays[part.expert][part.positions]
                key = part.tensor, part.axis
                masks[key] = masks[key] & own if key in masks else own
    cuts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for (name, axis), mask in masks.items():
        if mask.ndim == 1:
            cuts[name][axis] = mask.nonzero()[:, 0]
        else:
            cuts[name][axis] = torch.stack([m.nonzero()[:, 0] for m in mask])
    return with_scales(cuts, stored.folder.scales)


def fold_constants(stored: StoredTensors, slices: Sequence[LayerSlices], counts: Sequence[int]) -> dict[str, Tensor]:
    """What is added to biases in place of constant slices that go, as in `CheckpointPlan`."""
    added: dict[str, Tensor] = {}
    for mine, count in zip(slices, counts, strict=True):
        fates, stays = mine.fates[0], set(mine.staying(count)[0].tolist())
        for m, member in enumerate(mine.group.members):
            columns = {k: fate.constant[m] for k, fate in enumerate(fates) if k not in stays and m in fate.constant}
            if columns:
                _add_constants(stored, mine, member, columns, added)
    return added


def _add_constants(
    stored: StoredTensors,
    slices: LayerSlices,
    member: SliceMember,
    columns: Mapping[int, Tensor],
    added: dict[str, Tensor],
) -> None:
    """Add to a bias what a weight makes of constant slices."""
    (kind, layer), *_ = slices.layers
    parameter = f"{kind.stack}.{layer}.{member.name}"
    weight, bias = stored.name_of(parameter), stored.name_of(bias_of(parameter))
    assert weight is not None and bias is not None
    positions = torch.cat([member.positions[k] for k in columns])
    values = torch.cat(list(columns.values()))
    read = stored.folder.tensor(weight).index_select(member.axis, positions).double()
    total = (read @ values) if member.axis == 1 else (values @ read)
    added[bias] = added[bias] + total if bias in added else total


def new_name(stored: StoredTensors, plan: CheckpointPlan, name: str) -> str | None:
    """The name of a tensor in the new folder; None for one in a layer that is removed."""
    at = stored.layer_of(name)
    if name in plan.dropped:
        return None
    if at is None:
        return name
    stack, layer = at
    layers = list(plan.layers[stack.path])
    return stored.renumbered(name, layers.index(layer)) if layer in layers else None


def new_shape(stored: StoredTensors, plan: CheckpointPlan, name: str) -> tuple[int, ...]:
    """The shape of a tensor that is written."""
    return cut_shape(stored.folder.stored(name).shape, plan.cuts.get(name, {}))


def cut_tensor(stored: StoredTensors, plan: CheckpointPlan, name: str) -> Tensor:
    """A tensor that is written."""
    tensor = cut(stored.folder.written(name), plan.cuts.get(name, {}))
    if name in plan.added:
        tensor = (tensor.double() + plan.added[name]).to(tensor.dtype)
    return tensor
