"""Which slices are dead, by the op table.

What becomes of a slice depends on which of its weights are zero, not on the values of the others.
So a small network of the same class decides: with as few slices as its config allows, zeros where
the checkpoint has them, and random numbers elsewhere. The facts of its program say whether what
reads a slice reads a known value, or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.checkpoint.slices import LayerKind, ReducedModel, SliceGroup, choose_sizes
from demask.facts.analysis import Analysis
from demask.facts.known import key_of
from demask.graph.program import Constant, module_of
from demask.numerics import all_along, any_along, is_all
from demask.prune.coupling import Coupling
from demask.shrink.own_class.numbers import is_below

SMALL_ELEMENTS = 2**19  # of one weight of the small network, at most, if its class allows it


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a slice."""

    dead: bool  # whether it can be removed
    # by reading member (its index in the group), the values that are read, float64 [positions of a slice], if it
    # is always the same and not 0
    constant: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Reading:
    """A call that reads slices of a group."""

    node: fx.Node
    operand: int  # its number
    axis: int  # of the operand
    size: int  # of the axis
    positions: Tensor  # of the slices, int64 [slices, positions]
    # of the group, that they are multiplied with, if it is a weight to whose products a bias is added
    member: int | None


@dataclass(frozen=True, slots=True, eq=False)
class SlicePattern:
    """A slice of a checkpoint. zeros: by member of its group, bool [positions], where it is zero
    all along the other axes. values: by member that is a vector, its numbers."""

    zeros: Sequence[Tensor]
    values: Mapping[int, Tensor] = field(default_factory=dict)


class SmallNetwork:
    """A small network with one layer of each kind, in which slices are decided."""

    def __init__(self, reduced: ReducedModel):
        self.prefixes, groups = reduced.prefixes, reduced.groups
        hollow = reduced.family.build(reduced.data)
        sizes = {name: p.numel() for name, p in hollow.named_parameters()}
        counts: dict[str, int] = {}
        for group in groups:
            largest = max(sizes[self.prefixes[m.kind] + m.name] // group.size for m in group.members if m.kind)
            slots = 2 if group.kind == "head" else max(8, SMALL_ELEMENTS // largest)
            counts[group.name] = min(group.size, slots)
        _, small = choose_sizes(reduced, counts)
        small_groups, self.coupling = reduced.in_float64(small)
        own = {group.name: group for group in small_groups}
        # A group that a smaller config changes cannot be decided in it: its slices stay.
        self.groups = {
            group.name: own[group.name] for group in groups if group.name in own and own[group.name].is_like(group)
        }
        self.readings = {name: self._find_readings(group) for name, group in self.groups.items()}
        self._memory: dict[tuple[str, bytes], Fate] = {}

    def fates(
        self, group: str, zeros: Sequence[Tensor], values: Mapping[int, Tensor], ties: Mapping[str, bool]
    ) -> list[Fate]:
        """What becomes of slices.

        Args:
            group: their name.
            zeros: by member, bool [slices, positions], True where the checkpoint is zero at a
                position all along the other axes.
            values: by member that is a vector (a bias), its values [slices, positions].
            ties: by name of other parameters of the layer, whether all of it is zero.
        """
        if group not in self.groups:
            return [Fate(False)] * len(zeros[0])
        own, count = self.groups[group], len(zeros[0])
        rows = torch.cat([z.reshape(count, -1) for z in zeros], 1)
        matrices = torch.cat([z.reshape(count, -1) for z, m in zip(zeros, own.members, strict=True) if m.rank > 1], 1)
        zero_names = repr(sorted(name for name, zero in ties.items() if zero)).encode()
        keys = [row.numpy().tobytes() + zero_names for row in rows]
        # Bits alone first: biases are as good as random, unless a constant is read.
        self._decide(own, keys, range(count), matrices.any(1), zeros, {}, ties)
        fates = [self._memory[group, key] for key in keys]
        constant = [k for k, fate in enumerate(fates) if fate.constant]
        more = {
            k: keys[k] + b"".join(values[m][k].double().numpy().tobytes() for m in sorted(values)) for k in constant
        }
        exact = [more.get(k, b"") for k in range(count)]
        chosen = torch.zeros(count, dtype=torch.bool)
        chosen[constant] = True
        self._decide(own, exact, constant, chosen, zeros, values, ties)
        return [self._memory[group, exact[k]] if k in more else fate for k, fate in enumerate(fates)]

    def _decide(
        self,
        group: SliceGroup,
        keys: Sequence[bytes],
        slices: Sequence[int],
        doubtful: Tensor,
        zeros: Sequence[Tensor],
        values: Mapping[int, Tensor],
        ties: Mapping[str, bool],
    ) -> None:
        """Decide slices of which a weight has zeros; the others are alive."""
        waiting: dict[bytes, int] = {}
        for k in slices:
            if (group.name, keys[k]) in self._memory:
                continue
            if doubtful[k]:
                waiting.setdefault(keys[k], k)
            else:
                self._memory[group.name, keys[k]] = Fate(False)
        order = list(waiting.items())
        for start in range(0, len(order), group.size):
            chunk = order[start : start + group.size]
            patterns = [SlicePattern([z[k] for z in zeros], {m: v[k] for m, v in values.items()}) for _, k in chunk]
            analysis = self._analyze_patterns(group.kinds, {group.name: patterns}, ties)
            for slot, (key, _) in enumerate(chunk):
                self._memory[group.name, key] = self._fate(group, slot, analysis)

    def _analyze_patterns(
        self, kinds: Collection[LayerKind], slots: Mapping[str, Sequence[SlicePattern]], ties: Mapping[str, bool]
    ) -> Analysis:
        """The analysis of the small network with patterns in the slices of some groups, zeros where
        `ties` says so, and nothing known of other weights."""
        at, generator = self.prefixes, torch.Generator().manual_seed(0)
        prefixes = [at[kind] for kind in kinds]
        members = {
            at[member.kind] + member.name
            for name in slots
            for member in self.groups[name].members
            if member.kind is not None
        }
        constants: dict[str, Constant] = {}
        for target, constant in self.coupling.program.constants.items():
            full = (constant.aliases or (constant.name,))[0]
            prefix = next((p for p in prefixes if full.startswith(p)), None)
            if not constant.parameter:
                constants[target] = constant
            elif prefix is not None and (ties.get(full[len(prefix) :]) or full in members):
                tensor = torch.rand(constant.tensor.shape, generator=generator, dtype=torch.float64)
                tensor += 0.5
                if ties.get(full[len(prefix) :]):
                    tensor.zero_()
                for name, patterns in slots.items():
                    for m, member in enumerate(self.groups[name].members):
                        if member.kind is not None and at[member.kind] + member.name == full:
                            along = tensor.movedim(member.axis, 0)
                            for pattern, positions in zip(patterns, member.positions, strict=False):
                                along[positions[pattern.zeros[m]]] = 0
                                if m in pattern.values:
                                    along[positions] = pattern.values[m].double()
                constants[target] = replace(constant, tensor=tensor, parameter=False, declared=None)
        return Analysis(replace(self.coupling.program, constants=constants), self.coupling.ties.table)

    def is_identity(self, kind: LayerKind, silent: Mapping[str, SlicePattern], ties: Mapping[str, bool]) -> bool:
        """Whether a layer of a kind returns its input.

        Args:
            silent: by group, the pattern of a slice that adds nothing; all its slices are such.
            ties: as in `fates`.
        """
        own = {name for name, group in self.groups.items() if kind in group.kinds}
        if own != silent.keys():
            return False
        slots = {name: [pattern] * self.groups[name].size for name, pattern in silent.items()}
        analysis = self._analyze_patterns([kind], slots, ties)
        path = self.prefixes[kind].removesuffix(".")
        nodes = list(self.coupling.program.graph.nodes)
        span = [k for k, node in enumerate(nodes) if is_below(module_of(node), [path])]
        # Calls between those of the layer are its own: passes that add some do not say of which.
        inside, after = set(nodes[span[0] : span[-1] + 1]), set(nodes[span[-1] + 1 :])
        outputs = [
            node
            for node in inside
            if any(
                isinstance(user.meta.get("val"), Tensor) or user.op == "output" for user in node.users.keys() & after
            )
        ]
        if len(outputs) != 1:
            return False
        node = outputs[0]
        while node in inside:
            terms = [value for value in node.args if isinstance(value, fx.Node)]
            if node.target is not torch.ops.aten.add.Tensor or len(terms) != 2 or node.kwargs:
                return False
            silent_terms = [is_all(analysis.known[key_of(term)].zero) for term in terms]
            if not any(silent_terms):
                return False
            node = terms[0] if silent_terms[1] else terms[1]
        return True

    def _fate(self, group: SliceGroup, slot: int, analysis: Analysis) -> Fate:
        constant: dict[int, Tensor] = {}
        for reading in self.readings[group.name]:
            relation, mine = self.coupling.ties.relations[reading.node], reading.positions[slot]
            fact = analysis.known[key_of(relation.operands[reading.operand].value)]
            rest = [d for d in range(fact.known.ndim) if d != reading.axis]
            needed = analysis.needed.edge.get((reading.node, reading.operand))
            if needed is None or not any_along(needed, rest).expand(reading.size)[mine].any():
                continue
            if not all_along(fact.known, rest).expand(reading.size)[mine].all():
                return Fate(False)
            fill = fact.fill.movedim(reading.axis, -1)
            fill = fill.expand(*fill.shape[:-1], reading.size).reshape(-1, reading.size)[:, mine]
            if not torch.equal(fill, fill[:1].expand_as(fill)):
                return Fate(False)
            if fill.any():
                if reading.member is None or reading.member in constant:
                    return Fate(False)
                constant[reading.member] = fill[0].double()
        return Fate(bool(self.readings[group.name]), constant)

    def _find_readings(self, group: SliceGroup) -> list[_Reading]:
        """The calls that read a group; none where a call reads it otherwise than in products."""
        coupling, readings = self.coupling, list[_Reading]()
        ties, numbers = coupling.ties, coupling.numbers[group.name]
        at = self.prefixes
        names = [(at[m.kind] if m.kind else "") + m.name for m in group.members]
        for node, relation in ties.relations.items():
            for k, operand in enumerate(relation.operands):
                if operand.value in ties.weights or not isinstance(operand.value, fx.Node):
                    continue
                for axis, letters in enumerate(relation.ins[k]):
                    if not relation.contracted & set(letters):
                        continue
                    along = coupling.slices_along([ties.letters[node][a] for a in letters])
                    slices = next((s for _, s in along if torch.isin(s, numbers).any()), None)
                    if slices is None:
                        continue
                    if relation.entry.fill != "sum" or k not in relation.factors:
                        return []
                    positions = torch.stack([(slices == n).nonzero()[:, 0] for n in numbers])
                    weights = {
                        _parameter_name(coupling, relation.operands[j].value) for j in relation.factors if j != k
                    }
                    added = [o.value for j, o in enumerate(relation.operands) if j not in relation.factors]
                    read = (m for m, own in enumerate(group.members) if not own.produces)
                    read = (m for m in read if {names[m]} == weights)
                    member = next(read, None)
                    if member is not None:  # the operand's positions are the weight's
                        same = torch.equal(positions, group.members[member].positions)
                        member = member if same else None
                    bias = member is not None and bias_of(names[member])
                    if not any(_parameter_name(coupling, value) == bias for value in added):
                        member = None
                    readings.append(_Reading(node, k, axis, len(slices), positions, member))
        return readings


def bias_of(weight: str) -> str:
    """The name of the bias that is added to the products of a weight."""
    return weight.removesuffix("weight") + "bias"


def _parameter_name(coupling: Coupling, value: Any) -> str:
    while isinstance(value, fx.Node) and value in coupling.ties.weights:
        if value.op == "get_attr":
            constant = coupling.program.constants[str(value.target)]
            return (constant.aliases or (constant.name,))[0]
        value = value.all_input_nodes[0] if len(value.all_input_nodes) == 1 else None
    return ""
