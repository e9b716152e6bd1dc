"""The notation of the table: one line states how an op's output axes depend on its input axes.

    "... i, o i, o -> ... o"                                   linear
    "n (g i) ~h ~w, (g o) i ~k ~l, (g o) -> n (g o) ~h ~w"      grouped convolution
    "... !d, d, d -> ... !d"                                   layer norm
    "!t n i, 1 n h, (!k h) i, (!k h) ^h -> !t n h, 1 n h"       recurrent, of k gates, no biases

Operands are separated by commas, axes by spaces. A letter (or short name) names an axis; a letter
of the output is *carried*, a letter only in inputs is *contracted* (two operands) or *reduced*
(one). `(a b)` is a row-major composite, `1` an axis of size one, `...` the broadcast axes.
Marks: `~` a window slides along the axis (convolution, pooling, resizing); `!` the axis must be
complete (it is normalized over); `@` positions are moved along the axis by an index map, which is
computed by running the op on positions (slice, cat, pad); `^` the call reads its own output of the
step before along this letter. Under `~` and `@` the axes of input and output are different and get
different letters: "h" is "h<0" in operand 0 and "h>0" in output 0. Under `^` they are one axis with
two names: "^h" is "h^".
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from demask.errors import TableError

Axis = tuple[str, ...]  # the letters of one axis, major first; () is an axis of size one
Axes = tuple[Axis, ...]

ELLIPSIS: Axis = ("...",)
_TOKEN = re.compile(r"\([^()]*\)|\.\.\.|[!~@^]?[a-z]\w*|1")
_LETTER = re.compile(r"([!~@^]?)([a-z]\w*)")


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line of the op table: the axes of an op's operands and outputs.

    `parse` returns it. An axis is a tuple of letters (strings); several letters share one axis in
    row-major order, and () is an axis of size one. The last four attributes are frozensets of
    letters; default: empty.

    Attributes:
        ins: a tuple with one entry per operand: the tuple of its axes, in order.
        outs: a tuple with one entry per output: the tuple of its axes, in order.
        window: letters of axes along which a window slides (mark `~`). "h" is "h<0" in operand 0
            and "h>0" in output 0, since the two axes have different sizes.
        complete: letters of axes over which the op normalizes (mark `!`), without the mark.
        moved: letters of axes whose positions the op moves (mark `@`), named as in `window`.
        back: letters along which a call reads its own output of the previous step (mark `^`): "^h"
            is "h^".

    Example:
        >>> from demask.ops import parse
        >>> line = parse("... ~h, i -> ... ~h")
        >>> line.ins, sorted(line.window)
        (((('...',), ('h<0',)), (('i',),)), ['h<0', 'h>0'])
    """

    ins: tuple[Axes, ...]
    outs: tuple[Axes, ...]
    window: frozenset[str] = frozenset()
    complete: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    back: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Line:
    """The `Line` of a text in the notation of `demask.ops.notation`.

    Args:
        text: operands and outputs, such as "... i, o i -> ... o" for a matrix product. Commas
            separate operands, and spaces separate axes. An axis is a letter or short name; letters
            that share it, such as (a b), a the major one; 1, an axis of size one; or ..., any
            number of axes, which broadcast. A mark before a letter: ~ a window slides along the
            axis; ! the op normalizes over it; @ positions are moved along it; ^ the call reads its
            own output of the previous step.

    Raises:
        TableError: the text is not in the notation; the message quotes the part that is wrong.

    Example:
        >>> from demask.ops import parse
        >>> parse("... i, o i -> ... o").outs
        ((('...',), ('o',)),)
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise TableError(f"expected 'inputs -> outputs', got {text!r}: add an arrow")
    marks: dict[str, set[str]] = {mark: set() for mark in "~!@^"}
    ins = [_axes(part, f"<{k}", marks, text) for k, part in enumerate(_operands(left))]
    outs = [_axes(part, f">{k}", marks, text) for k, part in enumerate(_operands(right) or [""])]
    _check(ins, outs, text)
    window, complete, moved, back = (frozenset(marks[m]) for m in "~!@^")
    output_letters = {f"{letter}^" for axes in outs for axis in axes for letter in axis}
    if back - output_letters:
        raise TableError(f"{text!r} reads back, under ^, a letter that no output has")
    return Line(tuple(ins), tuple(outs), window, complete, moved, back)


def _operands(side: str) -> list[str]:
    """The texts of the operands on one side of the arrow."""
    return side.split(",") if side.strip() else []


def _axes(part: str, suffix: str, marks: dict[str, set[str]], text: str) -> Axes:
    """The axes in the text of an operand; adds its marked letters to `marks`."""
    unknown = _TOKEN.sub("", part).strip()
    if unknown:
        raise TableError(f"cannot read {unknown!r} in {text!r}: letters, (a b), 1, ... and ! ~ @ ^ only")
    return tuple(_axis(token, suffix, marks) for token in _TOKEN.findall(part))


def _axis(token: str, suffix: str, marks: dict[str, set[str]]) -> Axis:
    """The letters of one axis; adds those with marks to `marks`."""
    if token == "...":
        return ELLIPSIS
    if token == "1":
        return ()
    letters = []
    for mark, letter in _LETTER.findall(token):
        # Windows and moves change the size of an axis: input and output axes are different.
        name = letter + suffix if mark in ("~", "@") else letter + "^" * (mark == "^")
        if mark:
            marks[mark].add(name)
        letters.append(name)
    return tuple(letters)


def _check(ins: list[Axes], outs: list[Axes], text: str) -> None:
    """Raise TableError for a repeated letter in one operand, or for dots in outputs alone."""
    for axes in [*ins, *outs]:
        letters = [letter for axis in axes for letter in axis]
        if len(set(letters)) != len(letters):
            raise TableError(f"a letter stands twice in one operand of {text!r}")
    if any(ELLIPSIS in axes for axes in outs) and not any(ELLIPSIS in axes for axes in ins):
        raise TableError(f"'...' in an output of {text!r} but in no input")
