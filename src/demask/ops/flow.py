"""Where an axis goes: from a call to its outputs and back, read off the letters of the table.

An axis goes on where the output has its letters: carried as it is, as part of a composite axis,
seen through windows, or moved by a map of positions. It ends where it is summed over or reduced.

`follow` carries a part of an axis, `carry` and `carry_back` tags of whole axes. What engines tag,
and in which order they visit calls, is theirs.
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
        """Is it the whole axis, or the major part of it?"""
        return self.inner * self.size == length


def axis_of(relation: Relation, operand: int, axis: int, *, out: int = 0) -> int | None:
    """The operand's axis that axis `axis` of output `out` runs along, None if it has none."""
    axis %= len(relation.outs[out])
    letters = relation.outs[out][axis]
    if not letters:
        return None
    name = base(letters[0])
    for k, theirs in enumerate(relation.ins[operand]):
        if name in map(base, theirs):
            return k
    return None


def base(letter: str) -> str:
    """The letter as the table writes it: the same before and after a window or a move."""
    return letter.partition("<")[0].partition(">")[0]


# --- parts of axes --------------------------------------------------------------------------------


def follow(relation: Relation, operand: int, part: Part, *, out: int = 0) -> Part | None:
    """Where a part of an operand's axis is in an output; None where it ends.

    Of several letters as many as stay together go on. Windows and moves need the whole axis, and
    end it where they leave one position of many.

    >>> import torch
    >>> from demask.ops import TABLE, bind
    >>> from demask.ops.laws import call_node
    >>> flat = bind(call_node(torch.ops.aten.flatten.using_ints, torch.zeros(2, 3, 4, 5), 2), TABLE)
    >>> follow(flat, 0, Part(2, size=4)), follow(flat, 0, Part(3, size=5))
    (Part(axis=2, inner=5, size=4), Part(axis=2, inner=1, size=5))
    """
    letters = relation.ins[operand][part.axis]
    if letters and letters[0] in relation.window | relation.moved:
        return _through(relation, operand, part, out)
    first = _first(relation, letters, part)
    for axis, others in enumerate(relation.outs[out]):
        if first is not None and letters[first] in others:
            return _shared(relation, (letters, first), (axis, others), part)
    return None


def is_mixed(relation: Relation, operand: int, axis: int) -> bool:
    """Does a position of an output depend on several along an operand's axis that goes on?"""
    mixed = relation.window | relation.complete | relation.moved | relation.looped
    return bool(mixed & set(relation.ins[operand][axis]))


def _through(relation: Relation, operand: int, part: Part, out: int) -> Part | None:
    if not part.covers(_size(relation, relation.ins[operand][part.axis][0])):
        return None
    for axis, size in enumerate(schema.outputs(relation.node)[out].shape):
        if axis_of(relation, operand, axis, out=out) == part.axis:
            ends = schema.hint(size) == 1 and part.size != 1
            return None if ends else Part(axis, 1, size)
    return None


def _first(relation: Relation, letters: tuple[str, ...], part: Part) -> int | None:
    """The major letter of a part: of a dynamic one the letter that is dynamic."""
    if part.size == DYNAMIC:
        return next((k for k, name in enumerate(letters) if relation.size.get(name) is None), None)
    inner = _inner(relation, letters)
    first = next((k for k, n in enumerate(inner) if n < part.inner * part.size), None)
    if first is None or inner[first] * _size(relation, letters[first]) < part.inner:
        return None
    return first


def _shared(
    relation: Relation,
    before: tuple[tuple[str, ...], int],
    after: tuple[int, tuple[str, ...]],
    part: Part,
) -> Part | None:
    """before: letters of the operand's axis, and the first of the part; after: the output's."""
    (letters, first), (axis, others) = before, after
    inner, at = _inner(relation, letters), others.index(letters[first])
    minors = _inner(relation, others)
    if part.size == DYNAMIC:
        exact = part.inner % inner[first] == 0
        return Part(axis, part.inner // inner[first] * minors[at]) if exact else None
    period, span = part.inner * part.size, inner[first] * _size(relation, letters[first])
    if inner[first] <= part.inner:  # within one letter, of which it is whole positions
        fits = part.inner % inner[first] == 0 and span % period == 0
        return Part(axis, part.inner // inner[first] * minors[at], part.size) if fits else None
    size, k = 1, 0
    for mine, other in zip(letters[first:], others[at:], strict=False):
        if mine != other or inner[first + k] < part.inner:
            break
        size, k = size * _size(relation, mine), k + 1
    if period != span or part.size % size:
        return None
    return Part(axis, minors[at + k - 1], size)


def _inner(relation: Relation, letters: tuple[str, ...]) -> list[int]:
    """Positions of the axis per position of each letter: the product of the letters after it."""
    sizes = [_size(relation, letter) for letter in letters]
    return [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]


def _size(relation: Relation, letter: str) -> int:
    return relation.size.get(letter) or 1


# --- tags of whole axes ---------------------------------------------------------------------------


def tagged(
    relation: Relation, tags: Sequence[Tags[T] | None]
) -> Iterator[tuple[str | None, int, T]]:
    """The letter, the operand and the tag of each tagged axis of the operands; None for the letter
    of an axis that is not one letter."""
    for operand, (axes, mine) in enumerate(zip(relation.ins, tags, strict=True)):
        for axis, tag in (mine or {}).items():
            letters = axes[axis]
            yield letters[0] if len(letters) == 1 else None, operand, tag


def lettered(axes: Sequence[tuple[str, ...]], tags: Mapping[str, T]) -> dict[int, T]:
    """The tag of each axis that is one tagged letter."""
    return {k: tags[axis[0]] for k, axis in enumerate(axes) if len(axis) == 1 and axis[0] in tags}


def carry(
    relation: Relation, tags: Sequence[Tags[T] | None], combine: Callable[[T, T], T]
) -> tuple[dict[int, T], ...]:
    """The tags of each output's axes that the call works along position by position.

    tags: of each operand's axes, None for an operand that says nothing.
    """
    letters: dict[str, T] = {}
    for letter, _, tag in tagged(relation, tags):
        if letter is not None and letter not in relation.mixed:
            letters[letter] = combine(letters[letter], tag) if letter in letters else tag
    return tuple(lettered(axes, letters) for axes in relation.outs)


def carry_back(relation: Relation, tags: Tags[T], *, out: int = 0) -> tuple[dict[int, T], ...]:
    """The tags of each operand's axes along which an output's tagged axes are computed position by
    position."""
    letters = {
        axis[0]: tags[k] for k, axis in enumerate(relation.outs[out])
        if k in tags and len(axis) == 1 and axis[0] not in relation.mixed
    }  # fmt: skip
    return tuple(lettered(axes, letters) for axes in relation.ins)


def is_split(relation: Relation, axis: int, *, out: int = 0) -> bool:
    """Is an output's axis part of a composite axis of an operand, or composite itself?"""
    letters = set(relation.outs[out][axis])
    return len(letters) != 1 or any(
        len(theirs) > 1 and letters & set(theirs) for axes in relation.ins for theirs in axes
    )
