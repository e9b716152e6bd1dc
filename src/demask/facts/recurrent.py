"""Recurrent calls: which units stay 0 at every step, and which the call itself reads: fixed points.

    still   the greatest set of units that start at 0 and make, of zeros and each other alone, 0
    read    the least set that holds what others read, and whatever its members read back

A unit is one letter in most calls; a projected LSTM has cells, and outputs made of them, which are
what it reads back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from demask.facts.masks import Fact, along
from demask.ops import Relation


@dataclass(frozen=True, slots=True)
class Roles:
    """The operands of a recurrent call by what they are for, after the input.

    cell, unit: the letters of what has a memory and of what is read back, one letter but for
    projected calls.
    """

    states: tuple[int, ...]
    w_ih: int
    w_hh: int
    biases: tuple[int, ...]
    w_hr: int | None
    cell: str
    unit: str


def roles(relation: Relation) -> Roles:
    """Read off the line: what is summed over the input, what reads back, what has one axis."""
    w_ih = relation.factors[1]
    w_hh = next(k for k, axes in enumerate(relation.ins) if relation.letters(axes) & relation.back)
    biases = tuple(k for k, axes in enumerate(relation.ins) if len(axes) == 1)
    last = len(relation.ins) - 1
    (_, cell), (back,) = relation.ins[w_hh]
    w_hr = None if last == w_hh or last in biases else last
    states = tuple(range(1, w_ih))
    return Roles(states, w_ih, w_hh, biases, w_hr, cell, back.removesuffix("^"))


def unchanging(relation: Relation, inputs: list[Fact]) -> list[Fact | None]:
    """Per output, the units known to be 0 at every step; None where there is none."""
    who, batch = roles(relation), _batch(relation)
    cells, units = still(relation, inputs)
    found: list[Fact | None] = []
    for k, axes in enumerate(relation.outs):
        mask = (cells if axes[-1] == (who.cell,) else units).unsqueeze(1 - batch[k])
        fill = torch.zeros(mask.shape, dtype=inputs[0].fill.dtype)
        found.append(Fact(mask, fill) if bool(mask.any()) else None)
    return found


def still(relation: Relation, inputs: list[Fact]) -> tuple[Tensor, Tensor]:
    """Which cells, and which units, are 0 at every step: bool [n, c] and [n, p], n inputs of the
    batch (1: all alike)."""
    who, gate, batch = roles(relation), relation.entry.main, _batch(relation)[0]
    starts = {letter: torch.ones(1, _size(relation, letter), dtype=torch.bool)
              for letter in (who.cell, who.unit)}  # fmt: skip
    for k in who.states:
        letter = relation.ins[k][-1][0]
        starts[letter] = starts[letter] & inputs[k].zero.all(0)
    w_ih, w_hh = (_weights(relation, inputs, k)[gate] for k in (who.w_ih, who.w_hh))
    fed = ~inputs[0].zero.all(1 - batch)
    fed = fed.expand(len(fed), w_ih.shape[1])
    cells = starts[who.cell] & ~_reach(fed, w_ih.T) & _stays(relation, inputs, who)
    while True:
        units = cells
        if who.w_hr is not None:
            w_hr = _weights(relation, inputs, who.w_hr)[0]
            units = starts[who.unit] & ~_reach(~cells, w_hr.T)
        fewer = cells & ~_reach(~units, w_hh.T)
        if torch.equal(fewer, cells):
            return cells, units
        cells = fewer


def _batch(relation: Relation) -> list[int]:
    """The batch axis of each output: the states' is the second."""
    return [relation.outs[0].index(relation.outs[1][1]), *[1] * (len(relation.outs) - 1)]


def _stays(relation: Relation, inputs: list[Fact], who: Roles) -> Tensor:
    """Where the biases alone make nothing new: bool [c]."""
    count = _size(relation, who.cell)
    if not who.biases:
        return torch.ones(count, dtype=torch.bool)
    rows = [_rows(relation, inputs[k].known, k) for k in who.biases]
    fills = [_rows(relation, inputs[k].fill, k) for k in who.biases]
    rule, gate = relation.entry.stays, relation.entry.main
    assert rule is not None
    return rows[0][gate] & rows[1][gate] & rule(fills[0][gate], fills[1][gate])


def _size(relation: Relation, letter: str) -> int:
    return relation.size[letter] or 0


def _rows(relation: Relation, mask: Tensor, operand: int) -> Tensor:
    """A mask over a parameter with its first axis in gates and units: [k, c, ...]."""
    axes = relation.ins[operand]
    shape = [relation.size[letter] or 0 for axis in axes for letter in axis]
    full = mask.expand(relation.operands[operand].value.meta["val"].shape).reshape(shape)
    return full if len(axes[0]) > 1 else full[None]


def _weights(relation: Relation, inputs: list[Fact], operand: int) -> Tensor:
    """Where a weight is not known to be 0: bool [k, c, i]."""
    return ~_rows(relation, inputs[operand].zero, operand)


def _everywhere(mask: Tensor, axis: int) -> Tensor:
    """Where a mask holds all along the other axes: bool over one axis (1: the same all along)."""
    return ~along(~mask, axis)


def read_back(relation: Relation, inputs: list[Fact], live: list[Tensor]) -> list[Tensor]:
    """Per output, what its live positions and the call's own reading need of it."""
    who, batch = roles(relation), _batch(relation)
    cells, units = still(relation, inputs)
    alive = {who.cell: ~cells, who.unit: ~units}
    need: dict[str, Tensor] = {}
    for mask, axes, at in zip(live, relation.outs, batch, strict=True):
        over, letter = mask.any(1 - at), axes[-1][0]
        need[letter] = need.get(letter, torch.zeros_like(alive[letter])) | over
    back = _weights(relation, inputs, who.w_hh).any(0)
    made = None if who.w_hr is None else _weights(relation, inputs, who.w_hr)[0]
    while True:
        before = dict(need)
        if made is not None:
            need[who.cell] = need[who.cell] | (_reach(need[who.unit], made) & alive[who.cell])
        need[who.unit] = need[who.unit] | (_reach(need[who.cell], back) & alive[who.unit])
        if all(torch.equal(before[letter], need[letter]) for letter in need):
            break
    return [need[axes[-1][0]].unsqueeze(1 - at)
            for axes, at in zip(relation.outs, batch, strict=True)]  # fmt: skip


def _reach(some: Tensor, edges: Tensor) -> Tensor:
    """Where an edge (bool [a, b]) leads from some (bool [n, a]): bool [n, b]."""
    return some.double() @ edges.double() > 0


def told_by(relation: Relation, operand: int) -> int:
    """The output whose need tells what is needed of an operand: that of its units, else of the
    cells."""
    who = roles(relation)
    letters = relation.letters(relation.ins[operand])
    letter = who.unit if who.unit in letters else who.cell
    return next(k for k, axes in enumerate(relation.outs) if axes[-1] == (letter,))


def kept_features(relation: Relation, inputs: list[Fact], live: list[Tensor]) -> Tensor:
    """Which input features a live cell reads and the biases cannot take: bool [i].

    live: per output, what must be computed.
    """
    who = roles(relation)
    cells = along(live[told_by(relation, who.w_ih)], 2)
    read = (_weights(relation, inputs, who.w_ih) & cells[:, None]).any(0).any(0)
    zero, constant = steady(relation, inputs)
    return read & ~zero & ~(constant if takes_constants(relation) else zero)


def steady(relation: Relation, inputs: list[Fact]) -> tuple[Tensor, Tensor]:
    """Which input features are known to be 0, and to be one value, at every step of every input:
    bool [i] each (length 1: all alike)."""
    fact = inputs[0]
    same = fact.known & (fact.fill == fact.fill[:1, :1])
    return _everywhere(fact.zero, 2), _everywhere(same, 2)


def takes_constants(relation: Relation) -> bool:
    """Are there biases, and plain weights, to put what constant features give into?"""
    who = roles(relation)
    values = [relation.operands[k].value for k in (who.w_ih, *who.biases[:1])]
    return len(values) == 2 and all(value.op == "get_attr" for value in values)
