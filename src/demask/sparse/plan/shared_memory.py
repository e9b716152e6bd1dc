"""Values that are channels of another value, and need no memory of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from demask.sparse.plan.layers.pack_weights import selected
from demask.sparse.plan.moved_values import MovedValues, is_move
from demask.sparse.plan.tile_layout import TileGrid
from demask.sparse.segment_steps import ConcatStep, SelectStep

Place = tuple[int, int]  # a value and one of its channels


def find_parts(moved: MovedValues, channels: Sequence[int], grids: Sequence[TileGrid]) -> dict[int, Place]:
    """Values that are channels of others, with the value and the first channel.

    Operands of concatenations are written into their results. A concatenation of values that are in
    order in a longer one is a part of that, a slice of channels a part of its operand, and so is a
    moved value that is such a slice in the layout of kernels, such as one head of several.
    """
    program, weights = moved.program, moved.weights
    parts: dict[int, Place] = {}

    def place(value: int, whole: int, first: int) -> None:
        owner = owner_of(parts, whole)[0]
        is_static = value in program.static or owner in program.static
        if grids[value] == grids[whole] and value not in parts and owner != value and not is_static:
            parts[value] = whole, first

    steps = list(enumerate(program.steps, len(program.inputs)))
    joins = [(value, step) for value, step in steps if isinstance(step, ConcatStep)]
    for value, step in sorted(joins, key=lambda join: -len(join[1].xs)):
        firsts = np.cumsum([0] + [channels[x] for x in step.xs]).tolist()[:-1]
        places = [parts.get(x, (x, 0)) for x in step.xs]
        whole, first = places[0]
        if len(places) > 1 and places == [(whole, first + shift) for shift in firsts]:
            place(value, whole, first)
            continue
        for x, shift in zip(step.xs, firsts, strict=True):
            if step.xs.count(x) == 1:
                place(x, value, shift)
    for value, step in steps:
        if isinstance(step, SelectStep) and step.stride == (1, 1):
            numbers = selected(step, weights, channels[step.x])
            if numbers[0] >= 0 and (np.diff(numbers) == 1).all():
                place(value, step.x, int(numbers[0]))
        elif is_move(step) and value in moved.written:
            whole = moved.place(value)
            if whole is not None:
                place(value, *whole)
    return parts


def owner_of(parts: Mapping[int, Place], value: int) -> Place:
    """The value that owns the memory of a value, and the first channel of that there."""
    first = 0
    while value in parts:
        value, shift = parts[value]
        first += shift
    return value, first
