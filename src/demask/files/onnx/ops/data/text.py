"""ONNX ops on text, in numpy arrays of Python strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.ops.data.patterns import compile_pattern
from demask.files.onnx.values import Host

OPS = Ops()


def texts(value: Value) -> np.ndarray:
    """The array of Python strings of a value; BadInput for any other value."""
    if not isinstance(value, Host) or value.dtype is not None:
        raise BadInput(f"expected text, got {getattr(value, 'dtype', type(value).__name__)}")
    return value.array.astype(object)


def _text(words: Any, shape: Sequence[int]) -> Host:
    """A value of words in a shape."""
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
    return _text(padded, (*array.shape, most)), Host.of(part_counts)


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
        return _cased(text, str.lower, ascii_only)

    def change(text: str) -> str:
        return _cased(text, changes[case_change_action], ascii_only)

    array = texts(x)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != 1):
        raise BadInput(f"expected texts of shape [C] or [1, C], got {list(array.shape)}")
    key = str if is_case_sensitive else lower
    stops = {key(word) for word in stopwords}
    words = [change(word) for word in array.flat if key(word) not in stops] or [""]
    return _text(words, (*array.shape[:-1], len(words)))


def _cased(text: str, change: Callable[[str], str], ascii_only: bool) -> str:
    pairs = ((c, change(c)) for c in text)
    return "".join(c if len(new) != 1 or (ascii_only and c > "\x7f") else new for c, new in pairs)


@OPS("RegexFullMatch")
def regex_full_match(x: Value, *, pattern: str) -> Host:
    """Whether each text matches the pattern as a whole. Patterns are those of RE2 with the
    same meaning in Python's re."""
    array = texts(x)
    matches = compile_pattern(pattern).matches(list(array.flat))
    return Host.of(np.array(matches, dtype=bool).reshape(array.shape))
