"""ONNX ops on text, in numpy arrays of Python strings.

Regular expressions of files are matched in time proportional to the text (Thompson 1968). Python's `re`
backtracks: for `(a+)+b` its time doubles with every character. Here all states that a text can be in are
tracked at once, and `re` matches only single characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import Host

MAX_STATES, MAX_DEPTH = 10_000, 100
MAX_STEPS = 2**24  # states times characters: about ten seconds
_ATOM = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]"  # a class
    r"|\\x[0-9a-fA-F]{2}|\\[nrtfvadDwWsS]|\\[^\w\s]"  # escapes that RE2 and Python share
    r"|[^\\\[()*+?|^$]",
    re.DOTALL,
)
_WORD = re.compile(r"\w", re.ASCII)
_POSITION = re.compile(r"[\^$]|\\[bB]")
# Not allowed in a class: names of classes, set operators of later Pythons, unknown escapes.
_ODD = re.compile(r"\[:|--|&&|\|\||~~|\\[^\WnrtfvadDwWsSx]|\\x(?![0-9a-fA-F]{2})")
_REPEAT = re.compile(r"(?:([*+?])|\{(\d{1,4})(?:(,)(\d{0,4}))?\})\??")
_OPEN = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
_FLAGS = re.compile(r"\(\?([is]+)\)")
_ENDLESS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
OPS = Ops()


def texts(value: Value) -> np.ndarray:
    """The array of Python strings of a value; BadInput for any other value."""
    if not isinstance(value, Host) or value.dtype is not None:
        raise BadInput(f"expected text, got {getattr(value, 'dtype', type(value).__name__)}")
    return value.array.astype(object)


def _host_words(words: Any, shape: Sequence[int]) -> Host:
    array = np.empty(len(words), dtype=object)
    array[:] = words
    return Host.of(array.reshape(shape))


@OPS("StringConcat")
def string_concat(a: Value, b: Value) -> Host:
    """Texts of a followed by texts of b; shapes are broadcast."""
    return Host.of(np.asarray(texts(a) + texts(b), dtype=object))


@OPS("StringSplit")
def string_split(x: Value, *, delimiter: str | None = None, maxsplit: int = -1) -> tuple[Host, Host]:
    """The parts of each text on a new last axis, padded with "", and their number."""
    array = texts(x)
    words = array.flat if delimiter else [text.strip() for text in array.flat]
    parts = [text.split(delimiter or None, maxsplit) for text in words]
    counts = [len(p) for p in parts]
    most = max(counts, default=0)
    padded = [word for p in parts for word in [*p, *[""] * (most - len(p))]]
    part_counts = np.array(counts, dtype=np.int64).reshape(array.shape)
    return _host_words(padded, (*array.shape, most)), Host.of(part_counts)


@OPS("StringNormalizer")
def string_normalizer(
    x: Value,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "",
    stopwords: Sequence[str] = (),
) -> Host:
    """The texts that are not stop words, with their case changed; [""] if none is left.

    Case changes follow Unicode where one letter becomes one; in locale "C" only ASCII letters do.
    """
    changes = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    if case_change_action not in changes:
        raise BadInput(f"expected case NONE, LOWER or UPPER, got {case_change_action!r}")
    if locale[:2] in ("tr", "az", "lt"):
        raise BadInput(f"expected a locale with Unicode's own cases, got {locale!r}")
    ascii_only = locale in ("C", "POSIX")

    def lower(text: str) -> str:
        return _change_case(text, str.lower, ascii_only)

    def change(text: str) -> str:
        return _change_case(text, changes[case_change_action], ascii_only)

    array = texts(x)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != 1):
        raise BadInput(f"expected texts of shape [C] or [1, C], got {list(array.shape)}")
    key = str if is_case_sensitive else lower
    stops = {key(word) for word in stopwords}
    words = [change(word) for word in array.flat if key(word) not in stops] or [""]
    return _host_words(words, (*array.shape[:-1], len(words)))


def _change_case(text: str, change: Callable[[str], str], ascii_only: bool) -> str:
    pairs = ((c, change(c)) for c in text)
    return "".join(c if len(new) != 1 or (ascii_only and c > "\x7f") else new for c, new in pairs)


@OPS("RegexFullMatch")
def regex_full_match(x: Value, *, pattern: str) -> Host:
    """Whether each text matches all of the pattern. Patterns are those of RE2 with the
    same meaning in Python's re."""
    array = texts(x)
    matches = compile_pattern(pattern).matches(list(array.flat))
    return Host.of(np.array(matches, dtype=bool).reshape(array.shape))


@dataclass(frozen=True, slots=True)
class PatternNode:
    """Part of an expression. "atom": one character that `atom` matches. "position": a position that
    `atom` names. "row": `parts` in sequence. "either": one of `parts`. "repeat": the first part,
    from `least` to `most` times (None: any number)."""

    kind: Literal["atom", "position", "row", "either", "repeat"]
    parts: tuple[PatternNode, ...] = ()
    atom: str = ""
    least: int = 1
    most: int | None = 1


class PatternState(NamedTuple):
    """A state: match a character and continue with the next state (atom), or continue with
    `others`, if position is "^", "$", "\\b" or "\\B" only at such positions of the text."""

    atom: re.Pattern[str] | None
    others: tuple[int, ...] = ()
    position: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression as states; the index after the last state means a match."""

    states: tuple[PatternState, ...]

    def matches(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text matches completely. Raises BadInput where that would take minutes."""
        characters = sum(map(len, texts))
        if characters * len(self.states) > MAX_STEPS:
            raise BadInput(
                f"{characters:,} characters in a pattern of {len(self.states):,} states take too long to match"
            )
        return [self._matches(text) for text in texts]

    def _matches(self, text: str) -> bool:
        active = self._closed([0], text, 0)
        for position, character in enumerate(text, 1):
            matched = [k for k in active if k < len(self.states) and self._takes(k, character)]
            active = self._closed([k + 1 for k in matched], text, position)
        return len(self.states) in active

    def _takes(self, k: int, character: str) -> bool:
        atom = self.states[k].atom
        return atom is not None and atom.fullmatch(character) is not None

    def _closed(self, stack: list[int], text: str, at: int) -> set[int]:
        """These states and all that are reachable without a character, at position `at`."""
        reachable: set[int] = set()
        while stack:
            k = stack.pop()
            if k in reachable:
                continue
            reachable.add(k)
            state = self.states[k] if k < len(self.states) else None
            if state and state.atom is None and _is_at(state.position, text, at):
                stack += state.others
        return reachable


def _is_at(position: str, text: str, at: int) -> bool:
    """Whether the position before text[at] is of the kind `position` ("" is any)."""
    if not position:
        return True
    if position in "^$":
        return at == (0 if position == "^" else len(text))
    left, right = (_WORD.fullmatch(text[k : k + 1]) for k in (at - 1 if at else len(text), at))
    return (bool(left) != bool(right)) == (position == r"\b")


def compile_pattern(pattern: str) -> Pattern:
    """The compiled pattern, which matches complete texts. Raises BadInput for patterns that RE2 and
    Python may interpret differently, and for those that need too many states.

    >>> compile_pattern("(a+)+b|x{2,3}").matches(["a" * 100, "aab", "xxx"])
    [False, True, True]
    """
    flags, text = re.ASCII, pattern
    if flag_match := _FLAGS.match(text):
        flags |= re.IGNORECASE if "i" in flag_match[1] else 0
        flags |= re.DOTALL if "s" in flag_match[1] else 0
        text = text[flag_match.end() :]
    parser = _Parser(text, pattern)
    node = parser.either(0)
    if parser.at != len(text):
        raise parser.refusal()
    states = _States(flags, pattern)
    states.enter(node)
    return Pattern(tuple(states.states))


class _Parser:
    """Parses an expression from left to right."""

    def __init__(self, text: str, pattern: str):
        self.text, self.pattern, self.at = text, pattern, 0

    def refusal(self) -> BadInput:
        rest = self.text[self.at : self.at + 10]
        return BadInput(
            f"expected a pattern with equal meanings in RE2 and Python, got {self.pattern!r:.100} (at {rest!r})"
        )

    def either(self, depth: int) -> PatternNode:
        if depth > MAX_DEPTH:
            raise self.refusal()
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
                raise self.refusal()
            self.at += 1
            return inner
        if position := _POSITION.match(self.text, self.at):
            self.at = position.end()
            if _REPEAT.match(self.text, self.at):
                raise self.refusal()
            return PatternNode("position", atom=position[0])
        match = _ATOM.match(self.text, self.at)
        if match is None or (match[0].startswith("[") and _ODD.search(match[0])):
            raise self.refusal()
        self.at = match.end()
        return PatternNode("atom", atom=match[0])

    def _repeated(self, node: PatternNode) -> PatternNode:
        match = _REPEAT.match(self.text, self.at)
        if match is None:
            return node
        self.at = match.end()
        if _REPEAT.match(self.text, self.at):  # a** is an error, a++ exists in Python only
            raise self.refusal()
        sign, least, comma, most = match.groups()
        if sign:
            low, high = _ENDLESS[sign]
        else:
            low, high = int(least), int(most) if most else None if comma else int(least)
        if high is not None and high < low:
            raise self.refusal()
        return PatternNode("repeat", (node,), least=low, most=high)


class _States:
    """Appends the states of an expression to `states`. count: nodes so far."""

    def __init__(self, flags: int, pattern: str):
        self.flags, self.pattern, self.states, self.count = flags, pattern, list[PatternState](), 0

    def enter(self, node: PatternNode) -> None:
        self.count += 1
        if self.count > MAX_STATES:
            raise BadInput(f"the pattern {self.pattern!r:.100} needs more than {MAX_STATES:,} states")
        match node.kind:
            case "atom":
                self.states.append(PatternState(self._atom(node.atom)))
            case "position":
                self.states.append(PatternState(None, (len(self.states) + 1,), node.atom))
            case "row":
                for part in node.parts:
                    self.enter(part)
            case "either":
                self._either(node.parts)
            case "repeat":
                self._repeat(node)

    def _atom(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(re.escape(text) if len(text) == 1 and text != "." else text, self.flags)
        except re.error as error:
            raise BadInput(f"expected a regular expression, got {self.pattern!r:.100}: {error}") from error

    def _either(self, parts: tuple[PatternNode, ...]) -> None:
        fork, ends, starts = self._reserve(), [], []
        for part in parts:
            starts.append(len(self.states))
            self.enter(part)
            ends.append(self._reserve())
        self.states[fork] = PatternState(None, tuple(starts))
        for end in ends:
            self.states[end] = PatternState(None, (len(self.states),))

    def _repeat(self, node: PatternNode) -> None:
        (part,) = node.parts
        for _ in range(node.least):
            self.enter(part)
        if node.most is None:
            fork = self._reserve()
            self.enter(part)
            self.states.append(PatternState(None, (fork,)))
            self.states[fork] = PatternState(None, (fork + 1, len(self.states)))
            return
        forks = []
        for _ in range(node.most - node.least):
            forks.append(self._reserve())
            self.enter(part)
        for fork in forks:
            self.states[fork] = PatternState(None, (fork + 1, len(self.states)))

    def _reserve(self) -> int:
        """Index of a new state that is set later."""
        self.states.append(PatternState(None))
        return len(self.states) - 1
