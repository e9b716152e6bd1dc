"""Axis flow: the axes of a call's outputs that an operand's axis becomes, and the reverse.

An axis continues in an output that has its letters: unchanged, as part of a composite axis, under
a window, or moved by an index map. An axis that is summed over or reduced ends.

`follow` propagates a part of an axis, `carry` and `carry_back` propagate tags of full axes.
Engines choose the tags, and the order in which they visit calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from demask.ops import schema
from demask.ops.relation import Relation

T = TypeVar("T")
DYNAMIC = -1
Tags = Mapping[int, T]  # by axis


@dataclass(frozen=True, slots=True)
class Part:
    """Positions along an axis: index i of the axis belongs to position `i // inner % size`.

    Rows of an image flattened to (rows columns) have inner = columns.
    """

    axis: int
    inner: int = 1
    size: int = DYNAMIC

    def covers(self, length: int) -> bool:
        """Whether it is the full axis, or its major part."""
        return self.inner * self.size == length


def axis_of(relation: Relation, operand: int, axis: int, *, out: int = 0) -> int | None:
    """The operand's axis that has the major letter of an output's axis; None if it has none."""
    axis %= len(relation.outs[out])
    letters = relation.outs[out][axis]
    if not letters:
        return None
    name = base(letters[0])
    for k, candidates in enumerate(relation.ins[operand]):
        if name in map(base, candidates):
            return k
    return None


def base(letter: str) -> str:
    """The letter in the table: "h" for "h<0" and "h>0", input and output of a window or move."""
    return letter.partition("<")[0].partition(">")[0]


# --- parts of axes --------------------------------------------------------------------------------


def follow(relation: Relation, operand: int, part: Part, *, out: int = 0, single: bool = False) -> Part | None:
    """The part of an output's axis that a part of an operand's axis becomes; None if it ends.

    Of a part with several letters, the major ones that stay together continue. Under windows and
    moves only full axes continue, and those end that are reduced to one position; with `single`
    those continue of which a move selects one (a slice of one row).

    >>> import torch
    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> flat = bind(call_node(torch.ops.aten.flatten.using_ints, torch.zeros(2, 3, 4, 5), 2), TABLE)
    >>> follow(flat, 0, Part(2, size=4)), follow(flat, 0, Part(3, size=5))
    (Part(axis=2, inner=5, size=4), Part(axis=2, inner=1, size=5))
    """
    letters = relation.ins[operand][part.axis]
    if letters and letters[0] in relation.window | relation.moved:
        return _through(relation, operand, part, out, single)
    first = _first(relation, letters, part)
    for axis, letters_after in enumerate(relation.outs[out]):
        if first is not None and letters[first] in letters_after:
            return _shared(relation, (letters, first), (axis, letters_after), part)
    return None


def is_mixed(relation: Relation, operand: int, axis: int) -> bool:
    """Whether an output position depends on several positions of an operand's axis."""
    mixed = relation.window | relation.complete | relation.moved | relation.looped
    return bool(mixed & set(relation.ins[operand][axis]))


def _through(relation: Relation, operand: int, part: Part, out: int, single: bool) -> Part | None:
    """The part of an output's axis that an axis under a window or a move becomes, or None."""
    if not part.covers(_size(relation, relation.ins[operand][part.axis][0])):
        return None
    for axis, size in enumerate(schema.outputs(relation.node)[out].shape):
        if axis_of(relation, operand, axis, out=out) == part.axis:
            ends = schema.example_size(size) == 1 and part.size != 1
            ends &= not (single and relation.outs[out][axis][0] in relation.moved)
            return None if ends else Part(axis, 1, size)
    return None


def _first(relation: Relation, letters: tuple[str, ...], part: Part) -> int | None:
    """The number of a part's major letter, or of the dynamic letter if the part is dynamic."""
    if part.size == DYNAMIC:
        return next((k for k, name in enumerate(letters) if relation.size.get(name) is None), None)
    inner = _inner_size(relation, letters)
    first = next((k for k, n in enumerate(inner) if n < part.inner * part.size), None)
    if first is None or inner[first] * _size(relation, letters[first]) < part.inner:
        return None
    return first


def _shared(
    relation: Relation, before: tuple[tuple[str, ...], int], after: tuple[int, tuple[str, ...]], part: Part
) -> Part | None:
    """The part of an output's axis that shares letters with a part of an operand's axis, or None.

    before: the letters of the operand's axis and the number of the part's first letter; after: the
    output's axis and its letters.
    """
    (letters, first), (axis, letters_after) = before, after
    inner, index = _inner_size(relation, letters), letters_after.index(letters[first])
    inner_after = _inner_size(relation, letters_after)
    if part.size == DYNAMIC:
        exact = part.inner % inner[first] == 0
        return Part(axis, part.inner // inner[first] * inner_after[index]) if exact else None
    period, span = part.inner * part.size, inner[first] * _size(relation, letters[first])
    if inner[first] <= part.inner:  # within one letter, full positions of it
        fits = part.inner % inner[first] == 0 and span % period == 0
        scale = part.inner // inner[first] * inner_after[index]
        return Part(axis, scale, part.size) if fits else None
    size, k = 1, 0
    for letter_before, letter_after in zip(letters[first:], letters_after[index:], strict=False):
        if letter_before != letter_after or inner[first + k] < part.inner:
            break
        size, k = size * _size(relation, letter_before), k + 1
    if period != span or part.size % size:
        return None
    return Part(axis, inner_after[index + k - 1], size)


def _inner_size(relation: Relation, letters: tuple[str, ...]) -> list[int]:
    """Positions of the axis per position of each letter: the product of the sizes after it."""
    sizes = [_size(relation, letter) for letter in letters]
    return [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]


def _size(relation: Relation, letter: str) -> int:
    return relation.size.get(letter) or 1


# --- tags of full axes ---------------------------------------------------------------------------


def iterate_tags(relation: Relation, tags: Sequence[Tags[T] | None]) -> Iterator[tuple[str | None, int, T]]:
    """The letter, operand and tag of each tagged axis of the operands. The letter is None for an
    axis that does not have exactly one letter."""
    for operand, (axes, operand_tags) in enumerate(zip(relation.ins, tags, strict=True)):
        for axis, tag in (operand_tags or {}).items():
            letters = axes[axis]
            yield letters[0] if len(letters) == 1 else None, operand, tag


def tags_by_axis(axes: Sequence[tuple[str, ...]], tags: Mapping[str, T]) -> dict[int, T]:
    """The tags of the axes that are one tagged letter, by axis."""
    return {k: tags[axis[0]] for k, axis in enumerate(axes) if len(axis) == 1 and axis[0] in tags}


def carry(relation: Relation, tags: Sequence[Tags[T] | None], combine: Callable[[T, T], T]) -> tuple[dict[int, T], ...]:
    """The tags of each output's axes along which the call is computed position by position.

    tags: of each operand's axes; None for an operand without tags.
    """
    letters: dict[str, T] = {}
    for letter, _, tag in iterate_tags(relation, tags):
        if letter is not None and letter not in relation.mixed:
            letters[letter] = combine(letters[letter], tag) if letter in letters else tag
    return tuple(tags_by_axis(axes, letters) for axes in relation.outs)


def carry_back(relation: Relation, tags: Tags[T], *, out: int = 0) -> tuple[dict[int, T], ...]:
    """The tags of each operand's axes along which an output is computed position by position, from
    the tags of that output's axes."""
    letters = {
        axis[0]: tags[k]
        for k, axis in enumerate(relation.outs[out])
        if k in tags and len(axis) == 1 and axis[0] not in relation.mixed
    }
    return tuple(tags_by_axis(axes, letters) for axes in relation.ins)


def is_split(relation: Relation, axis: int, *, out: int = 0) -> bool:
    """Whether an output's axis is composite, or part of a composite axis of an operand."""
    letters = set(relation.outs[out][axis])
    return len(letters) != 1 or any(
        len(operand_letters) > 1 and letters & set(operand_letters) for axes in relation.ins for operand_letters in axes
    )
