"""Recurrent calls: units that stay 0 at every step, and units that the call itself reads. Both are
fixed points.

    still   the greatest set of units that start at 0 and compute 0 from zeros and each other
    read    the least set that contains what others read, and whatever its members read back

A unit is one letter in most calls. A projected LSTM has cells, and outputs computed from cells; it
reads the outputs back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from demask.facts.masks import Fact, along
from demask.ops import Relation
from demask.ops.schema import fake


@dataclass(frozen=True, slots=True)
class Roles:
    """The operands of a recurrent call by role, after the input.

    cell, unit: the letters of the memory and of what is read back; they differ only in projected
    calls.
    """

    states: tuple[int, ...]
    w_ih: int
    w_hh: int
    biases: tuple[int, ...]
    w_hr: int | None
    cell: str
    unit: str


def roles(relation: Relation) -> Roles:
    """The roles of a relation's operands: input weight, recurrent weight, biases, projection."""
    w_ih = relation.factors[1]
    w_hh = next(k for k, axes in enumerate(relation.ins) if relation.letters(axes) & relation.back)
    biases = tuple(k for k, axes in enumerate(relation.ins) if len(axes) == 1)
    last = len(relation.ins) - 1
    (_, cell), (back,) = relation.ins[w_hh]
    w_hr = None if last == w_hh or last in biases else last
    states = tuple(range(1, w_ih))
    return Roles(states, w_ih, w_hh, biases, w_hr, cell, back.removesuffix("^"))


def zero_unit_facts(relation: Relation, inputs: list[Fact]) -> list[Fact | None]:
    """Per output, the fact of the units known to be 0 at every step; None where there is none."""
    role, batch = roles(relation), _batch_axes(relation)
    cells, units = find_still_units(relation, inputs)
    facts: list[Fact | None] = []
    for k, axes in enumerate(relation.outs):
        mask = (cells if axes[-1] == (role.cell,) else units).unsqueeze(1 - batch[k])
        fill = torch.zeros(mask.shape, dtype=inputs[0].fill.dtype)
        facts.append(Fact(mask, fill) if bool(mask.any()) else None)
    return facts


def find_still_units(relation: Relation, inputs: list[Fact]) -> tuple[Tensor, Tensor]:
    """Cells and units that are 0 at every step: bool [n, c] and [n, p], n inputs of the batch (1:
    the same for all)."""
    role, gate, batch = roles(relation), relation.entry.main, _batch_axes(relation)[0]
    starts = {letter: torch.ones(1, _size(relation, letter), dtype=torch.bool) for letter in (role.cell, role.unit)}
    for k in role.states:
        letter = relation.ins[k][-1][0]
        starts[letter] = starts[letter] & inputs[k].zero.all(0)
    w_ih, w_hh = (_nonzero_weights(relation, inputs, k)[gate] for k in (role.w_ih, role.w_hh))
    fed = ~inputs[0].zero.all(1 - batch)
    fed = fed.expand(len(fed), w_ih.shape[1])
    cells = starts[role.cell] & ~_follow_edges(fed, w_ih.T) & _zero_at_biases(relation, inputs, role)
    while True:
        units = cells
        if role.w_hr is not None:
            w_hr = _nonzero_weights(relation, inputs, role.w_hr)[0]
            units = starts[role.unit] & ~_follow_edges(~cells, w_hr.T)
        fewer = cells & ~_follow_edges(~units, w_hh.T)
        if torch.equal(fewer, cells):
            return cells, units
        cells = fewer


def _batch_axes(relation: Relation) -> list[int]:
    """The batch axis of each output: that of a state is the second."""
    return [relation.outs[0].index(relation.outs[1][1]), *[1] * (len(relation.outs) - 1)]


def _zero_at_biases(relation: Relation, inputs: list[Fact], role: Roles) -> Tensor:
    """Where the biases alone leave a state of 0 at 0: bool [c]."""
    count = _size(relation, role.cell)
    if not role.biases:
        return torch.ones(count, dtype=torch.bool)
    rows = [_split_gates(relation, inputs[k].known, k) for k in role.biases]
    fills = [_split_gates(relation, inputs[k].fill, k) for k in role.biases]
    rule, gate = relation.entry.stays, relation.entry.main
    assert rule is not None
    return rows[0][gate] & rows[1][gate] & rule(fills[0][gate], fills[1][gate])


def _size(relation: Relation, letter: str) -> int:
    return relation.size[letter] or 0


def _split_gates(relation: Relation, mask: Tensor, operand: int) -> Tensor:
    """A mask over a parameter with its first axis split into gates and units: [k, c, ...]."""
    axes = relation.ins[operand]
    shape = [relation.size[letter] or 0 for axis in axes for letter in axis]
    full = mask.expand(fake(relation.operands[operand].value).shape).reshape(shape)
    return full if len(axes[0]) > 1 else full[None]


def _nonzero_weights(relation: Relation, inputs: list[Fact], operand: int) -> Tensor:
    """Where a weight is not known to be 0: bool [k, c, i]."""
    return ~_split_gates(relation, inputs[operand].zero, operand)


def _is_set_everywhere(mask: Tensor, axis: int) -> Tensor:
    """Where a mask is set all along the other axes: bool over one axis (1: the same all along)."""
    return ~along(~mask, axis)


def add_recurrent_needs(relation: Relation, inputs: list[Fact], live: list[Tensor]) -> list[Tensor]:
    """Per output, what its live positions and the recurrence of the call need of it."""
    role, batch = roles(relation), _batch_axes(relation)
    cells, units = find_still_units(relation, inputs)
    alive = {role.cell: ~cells, role.unit: ~units}
    need: dict[str, Tensor] = {}
    for mask, axes, batch_axis in zip(live, relation.outs, batch, strict=True):
        over, letter = mask.any(1 - batch_axis), axes[-1][0]
        need[letter] = need.get(letter, torch.zeros_like(alive[letter])) | over
    back = _nonzero_weights(relation, inputs, role.w_hh).any(0)
    projection = None if role.w_hr is None else _nonzero_weights(relation, inputs, role.w_hr)[0]
    while True:
        before = dict(need)
        if projection is not None:
            need[role.cell] = need[role.cell] | (_follow_edges(need[role.unit], projection) & alive[role.cell])
        need[role.unit] = need[role.unit] | (_follow_edges(need[role.cell], back) & alive[role.unit])
        if all(torch.equal(before[letter], need[letter]) for letter in need):
            break
    return [need[axes[-1][0]].unsqueeze(1 - batch_axis) for axes, batch_axis in zip(relation.outs, batch, strict=True)]


def _follow_edges(some: Tensor, edges: Tensor) -> Tensor:
    """Where edges (bool [a, b]) lead from a set (bool [n, a]): bool [n, b]."""
    return some.double() @ edges.double() > 0


def deciding_output(relation: Relation, operand: int) -> int:
    """The output whose need decides that of an operand: that of its units, else of the cells."""
    role = roles(relation)
    letters = relation.letters(relation.ins[operand])
    letter = role.unit if role.unit in letters else role.cell
    return next(k for k, axes in enumerate(relation.outs) if axes[-1] == (letter,))


def needed_features(relation: Relation, inputs: list[Fact], live: list[Tensor]) -> Tensor:
    """Input features that a live cell reads and the biases cannot absorb: bool [i].

    live: per output, what must be computed.
    """
    role = roles(relation)
    cells = along(live[deciding_output(relation, role.w_ih)], 2)
    read = (_nonzero_weights(relation, inputs, role.w_ih) & cells[:, None]).any(0).any(0)
    zero, constant = constant_features(relation, inputs)
    return read & ~zero & ~(constant if has_plain_biases(relation) else zero)


def constant_features(relation: Relation, inputs: list[Fact]) -> tuple[Tensor, Tensor]:
    """Input features known to be 0, and known to be one value, at every step of every input: bool
    [i] each (length 1: the same for all)."""
    fact = inputs[0]
    same = fact.known & (fact.fill == fact.fill[:1, :1])
    return _is_set_everywhere(fact.zero, 2), _is_set_everywhere(same, 2)


def has_plain_biases(relation: Relation) -> bool:
    """Whether there are biases, and constant weights, that can absorb constant features."""
    role = roles(relation)
    values = [relation.operands[k].value for k in (role.w_ih, *role.biases[:1])]
    return len(values) == 2 and all(value.op == "get_attr" for value in values)
