"""ONNX ops on text, in numpy arrays of Python strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.ops.data.patterns import compile_pattern
from demask.files.onnx.values import Host, numbers_of

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


@OPS("TfIdfVectorizer")
def tf_idf(
    x: Value,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    pool_int64s: Sequence[int] = (),
    pool_strings: Sequence[str] = (),
    weights: Sequence[float] = (),
    device: torch.device,
) -> Tensor:
    """Occurrences of n-grams of a pool in each row: counts (TF, TFIDF) or presence (IDF), times
    weights except for TF."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise BadInput(f"expected mode TF, IDF or TFIDF, got {mode!r}")
    grams = _grams(pool_strings or pool_int64s, ngram_counts)
    shape = x.array.shape if isinstance(x, Host) else x.shape  # type: ignore[union-attr]
    rows = np.array(numbers_of(x), dtype=object).reshape(-1, shape[-1] if shape else 1)
    occurrences = np.zeros((len(rows), max(ngram_indexes) + 1), dtype=np.float32)
    for counts, row in zip(occurrences, rows.tolist(), strict=True):
        for gram in _row_grams(row, min_gram_length, max_gram_length, max_skip_count):
            if gram in grams:
                counts[ngram_indexes[grams[gram]]] += 1
    if mode == "IDF":
        occurrences = (occurrences > 0).astype(np.float32)
    if mode != "TF" and weights:
        scale = np.zeros(occurrences.shape[1], dtype=np.float32)
        scale[list(ngram_indexes)] = weights
        occurrences = occurrences * scale
    return torch.from_numpy(occurrences if len(shape) == 2 else occurrences[0]).to(device)


def _grams(pool: Sequence[Any], starts: Sequence[int]) -> dict[tuple[Any, ...], int]:
    """The index of each n-gram; the pool lists those of size 1 first, then size 2, and so on."""
    indices: dict[tuple[Any, ...], int] = {}
    index = 0
    for size, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for position in range(start, end - size + 1, size):
            indices[tuple(pool[position : position + size])] = index
            index += 1
    return indices


def _row_grams(row: list[Any], least: int, most: int, skips: int) -> Any:
    """The n-grams of a row, with up to `skips` elements skipped between two of a gram."""
    for step in range(1, skips + 2):
        sizes = range(max(least, 2) if step > 1 else least, most + 1)  # one element skips nothing
        for size in sizes:
            reach = (size - 1) * step + 1
            for start in range(len(row) - reach + 1):
                yield tuple(row[start : start + reach : step])
