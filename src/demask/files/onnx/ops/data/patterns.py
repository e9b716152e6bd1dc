"""Regular expressions of files, matched in time that is proportional to the text (Thompson 1968).

Python's `re` tries one way after the other: of `(a+)+b` there are twice as many for each character
more. Here all states that a text can be in are followed at once. `re` matches single characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from demask.errors import BadInput

MAX_STATES, MAX_DEPTH = 10_000, 100
MAX_STEPS = 2**24  # states times characters: some ten seconds
_ATOM = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]"  # a class
    r"|\\x[0-9a-fA-F]{2}|\\[nrtfvadDwWsS]|\\[^\w\s]"  # escapes that RE2 and Python read alike
    r"|[^\\\[()*+?|^$]",
    re.DOTALL,
)
_WORD = re.compile(r"\w", re.ASCII)
_PLACE = re.compile(r"[\^$]|\\[bB]")
# What a class may not have: names of classes, operators of Python's to come, odd escapes.
_ODD = re.compile(r"\[:|--|&&|\|\||~~|\\[^\WnrtfvadDwWsSx]|\\x(?![0-9a-fA-F]{2})")
_REPEAT = re.compile(r"(?:([*+?])|\{(\d{1,4})(?:(,)(\d{0,4}))?\})\??")
_OPEN = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_FLAGS = re.compile(r"\(\?([is]+)\)")
_ENDLESS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class PatternNode:
    """Part of an expression: one character that `atom` matches, a position that it describes,
    `parts` in a row, one of several, or the first of them from `least` to `most` times (None: any
    number)."""

    kind: Literal["atom", "position", "row", "either", "repeat"]
    parts: tuple[PatternNode, ...] = ()
    atom: str = ""
    least: int = 1
    most: int | None = 1


class PatternState(NamedTuple):
    """What to do in a state: match a character and go on to the next state, or go on to others,
    where position is "^", "$", "\\b" or "\\B" only at such positions of the text."""

    atom: re.Pattern[str] | None
    others: tuple[int, ...] = ()
    position: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression as states; the one behind the last means that all is matched."""

    states: tuple[PatternState, ...]

    def matches(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text matches as a whole. BadInput where that would take minutes."""
        characters = sum(map(len, texts))
        if characters * len(self.states) > MAX_STEPS:
            raise BadInput(f"{characters:,} characters in a pattern of {len(self.states):,} states "
                           "take too long to match")  # fmt: skip
        return [self._matches(text) for text in texts]

    def _matches(self, text: str) -> bool:
        now = self._closed([0], text, 0)
        for at, character in enumerate(text, 1):
            hits = [k for k in now if k < len(self.states) and self._takes(k, character)]
            now = self._closed([k + 1 for k in hits], text, at)
        return len(self.states) in now

    def _takes(self, k: int, character: str) -> bool:
        atom = self.states[k].atom
        return atom is not None and atom.fullmatch(character) is not None

    def _closed(self, stack: list[int], text: str, at: int) -> set[int]:
        """These states and all that they go on to without a character, before text[at]."""
        seen: set[int] = set()
        while stack:
            k = stack.pop()
            if k in seen:
                continue
            seen.add(k)
            state = self.states[k] if k < len(self.states) else None
            if state and state.atom is None and _is_at(state.position, text, at):
                stack += state.others
        return seen


def _is_at(position: str, text: str, at: int) -> bool:
    """Whether the position before text[at] is one that a pattern describes."""
    if not position:
        return True
    if position in "^$":
        return at == (0 if position == "^" else len(text))
    left, right = (_WORD.fullmatch(text[k : k + 1]) for k in (at - 1 if at else len(text), at))
    return (bool(left) != bool(right)) == (position == r"\b")


def compiled(pattern: str) -> Pattern:
    """The pattern, ready to match whole texts; BadInput where RE2 and Python may read it in
    different ways, or where it needs more than a bounded number of states.

    >>> compiled("(a+)+b|x{2,3}").matches(["a" * 100, "aab", "xxx"])
    [False, True, True]
    """
    flags, text = re.ASCII, pattern
    if found := _FLAGS.match(text):
        flags |= re.IGNORECASE if "i" in found[1] else 0
        flags |= re.DOTALL if "s" in found[1] else 0
        text = text[found.end() :]
    parser = _Parser(text, pattern)
    node = parser.either(0)
    if parser.at != len(text):
        raise parser.refused()
    states = _States(flags, pattern)
    states.enter(node)
    return Pattern(tuple(states.made))


class _Parser:
    """Reads an expression from left to right."""

    def __init__(self, text: str, pattern: str):
        self.text, self.pattern, self.at = text, pattern, 0

    def refused(self) -> BadInput:
        rest = self.text[self.at : self.at + 10]
        return BadInput(f"expected a pattern that RE2 and Python's re read alike, got "
                        f"{self.pattern!r:.100} (at {rest!r})")  # fmt: skip

    def either(self, depth: int) -> PatternNode:
        if depth > MAX_DEPTH:
            raise self.refused()
        rows = [self._row(depth)]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            rows.append(self._row(depth))
        return rows[0] if len(rows) == 1 else PatternNode("either", tuple(rows))

    def _row(self, depth: int) -> PatternNode:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._one(depth)))
        return PatternNode("row", tuple(parts))

    def _one(self, depth: int) -> PatternNode:
        if opened := _OPEN.match(self.text, self.at):
            self.at = opened.end()
            inner = self.either(depth + 1)
            if self.text[self.at : self.at + 1] != ")":
                raise self.refused()
            self.at += 1
            return inner
        if position := _PLACE.match(self.text, self.at):
            self.at = position.end()
            if _REPEAT.match(self.text, self.at):
                raise self.refused()
            return PatternNode("position", atom=position[0])
        found = _ATOM.match(self.text, self.at)
        if found is None or (found[0].startswith("[") and _ODD.search(found[0])):
            raise self.refused()
        self.at = found.end()
        return PatternNode("atom", atom=found[0])

    def _repeated(self, node: PatternNode) -> PatternNode:
        found = _REPEAT.match(self.text, self.at)
        if found is None:
            return node
        self.at = found.end()
        if _REPEAT.match(self.text, self.at):  # a** is an error, a++ is Python's alone
            raise self.refused()
        sign, least, comma, most = found.groups()
        if sign:
            low, high = _ENDLESS[sign]
        else:
            low, high = int(least), int(most) if most else None if comma else int(least)
        if high is not None and high < low:
            raise self.refused()
        return PatternNode("repeat", (node,), least=low, most=high)


class _States:
    """Writes the states of an expression, one after the other."""

    def __init__(self, flags: int, pattern: str):
        self.flags, self.pattern, self.made, self.entered = flags, pattern, list[PatternState](), 0

    def enter(self, node: PatternNode) -> None:
        self.entered += 1
        if self.entered > MAX_STATES:
            raise BadInput(f"the pattern {self.pattern!r:.100} needs more than {MAX_STATES:,} "
                           "states")  # fmt: skip
        match node.kind:
            case "atom":
                self.made.append(PatternState(self._atom(node.atom)))
            case "position":
                self.made.append(PatternState(None, (len(self.made) + 1,), node.atom))
            case "row":
                for part in node.parts:
                    self.enter(part)
            case "either":
                self._either(node.parts)
            case "repeat":
                self._repeat(node)

    def _atom(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(re.escape(text) if len(text) == 1 and text != "." else text,
                              self.flags)  # fmt: skip
        except re.error as error:
            raise BadInput(f"expected a regular expression, got {self.pattern!r:.100}: {error}"
                           ) from error  # fmt: skip

    def _either(self, parts: tuple[PatternNode, ...]) -> None:
        fork, ends, starts = self._hole(), [], []
        for part in parts:
            starts.append(len(self.made))
            self.enter(part)
            ends.append(self._hole())
        self.made[fork] = PatternState(None, tuple(starts))
        for end in ends:
            self.made[end] = PatternState(None, (len(self.made),))

    def _repeat(self, node: PatternNode) -> None:
        (part,) = node.parts
        for _ in range(node.least):
            self.enter(part)
        if node.most is None:
            fork = self._hole()
            self.enter(part)
            self.made.append(PatternState(None, (fork,)))
            self.made[fork] = PatternState(None, (fork + 1, len(self.made)))
            return
        forks = []
        for _ in range(node.most - node.least):
            forks.append(self._hole())
            self.enter(part)
        for fork in forks:
            self.made[fork] = PatternState(None, (fork + 1, len(self.made)))

    def _hole(self) -> int:
        """A state that is filled in later."""
        self.made.append(PatternState(None))
        return len(self.made) - 1


__all__ = ["Pattern", "compiled"]
