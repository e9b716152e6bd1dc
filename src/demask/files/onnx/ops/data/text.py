"""ONNX ops on text, which stays in numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.ops.data.patterns import compiled
from demask.files.onnx.values import Host, numbers_of

OPS = Ops()


def texts(value: Value) -> np.ndarray:
    """The array of text of a value, its elements Python's; BadInput for any other value."""
    if not isinstance(value, Host) or value.dtype is not None:
        raise BadInput(f"expected text, got {getattr(value, 'dtype', type(value).__name__)}")
    return value.array.astype(object)


def _text(words: Any, shape: Sequence[int]) -> Host:
    """Words in a shape as a value."""
    array = np.empty(len(words), dtype=object)
    array[:] = words
    return Host.of(array.reshape(shape))


@OPS("StringConcat")
def string_concat(a: Value, b: Value) -> Host:
    """Each text of a with b's behind it; shapes are broadcast."""
    return Host.of(np.asarray(texts(a) + texts(b), dtype=object))


@OPS("StringSplit")
def string_split(
    x: Value, *, delimiter: str | None = None, maxsplit: int = -1
) -> tuple[Host, Host]:  # fmt: skip
    """The parts of each text on a new last axis, with "" behind them, and how many there are."""
    array = texts(x)
    words = array.flat if delimiter else [text.strip() for text in array.flat]
    parts = [text.split(delimiter or None, maxsplit) for text in words]
    counts = [len(p) for p in parts]
    most = max(counts, default=0)
    padded = [word for p in parts for word in [*p, *[""] * (most - len(p))]]
    found = np.array(counts, dtype=np.int64).reshape(array.shape)
    return _text(padded, (*array.shape, most)), Host.of(found)


@OPS("StringNormalizer")
def string_normalizer(
    x: Value, *, case_change_action: str = "NONE", is_case_sensitive: int = 0, locale: str = "",
    stopwords: Sequence[str] = (),
) -> Host:  # fmt: skip
    """The texts that are no stop words, in the case asked for; [""] if none is left.

    Cases are changed as Unicode says, each letter to one; in locale "C" of ASCII letters alone."""
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
    compared = str if is_case_sensitive else lower
    stops = {compared(word) for word in stopwords}
    kept = [change(word) for word in array.flat if compared(word) not in stops] or [""]
    return _text(kept, (*array.shape[:-1], len(kept)))


def _cased(text: str, change: Callable[[str], str], ascii_only: bool) -> str:
    pairs = ((c, change(c)) for c in text)
    return "".join(c if len(new) != 1 or (ascii_only and c > "\x7f") else new for c, new in pairs)


@OPS("RegexFullMatch")
def regex_full_match(x: Value, *, pattern: str) -> Host:
    """Does each text match the pattern as a whole? Patterns are RE2's, as far as Python's re reads
    them alike."""
    array = texts(x)
    matches = compiled(pattern).matches(list(array.flat))
    return Host.of(np.array(matches, dtype=bool).reshape(array.shape))


@OPS("TfIdfVectorizer")
def tf_idf(
    x: Value, *, max_gram_length: int, max_skip_count: int, min_gram_length: int, mode: str,
    ngram_counts: Sequence[int], ngram_indexes: Sequence[int], pool_int64s: Sequence[int] = (),
    pool_strings: Sequence[str] = (), weights: Sequence[float] = (), device: torch.device,
) -> Tensor:  # fmt: skip
    """How often n-grams of a pool are in each row: counts (TF), presence (IDF), or counts (TFIDF),
    times weights where these are given."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise BadInput(f"expected mode TF, IDF or TFIDF, got {mode!r}")
    grams = _grams(pool_strings or pool_int64s, ngram_counts)
    shape = x.array.shape if isinstance(x, Host) else x.shape  # type: ignore[union-attr]
    rows = np.array(numbers_of(x), dtype=object).reshape(-1, shape[-1] if shape else 1)
    found = np.zeros((len(rows), max(ngram_indexes) + 1), dtype=np.float32)
    for counts, row in zip(found, rows.tolist(), strict=True):
        for gram in _taken(row, min_gram_length, max_gram_length, max_skip_count):
            if gram in grams:
                counts[ngram_indexes[grams[gram]]] += 1
    if mode == "IDF":
        found = (found > 0).astype(np.float32)
    if mode != "TF" and weights:
        scale = np.zeros(found.shape[1], dtype=np.float32)
        scale[list(ngram_indexes)] = weights
        found = found * scale
    return torch.from_numpy(found if len(shape) == 2 else found[0]).to(device)


def _grams(pool: Sequence[Any], starts: Sequence[int]) -> dict[tuple[Any, ...], int]:
    """The place of each n-gram; the pool holds those of size 1 first, then size 2, and so on."""
    found: dict[tuple[Any, ...], int] = {}
    place = 0
    for size, (start, end) in enumerate(zip(starts, [*starts[1:], len(pool)], strict=True), 1):
        for at in range(start, end - size + 1, size):
            found[tuple(pool[at : at + size])] = place
            place += 1
    return found


def _taken(row: list[Any], least: int, most: int, skips: int) -> Any:
    """The n-grams of a row; elements of one stand up to `skips` + 1 apart."""
    for step in range(1, skips + 2):
        sizes = range(max(least, 2) if step > 1 else least, most + 1)  # one element skips nothing
        for size in sizes:
            reach = (size - 1) * step + 1
            for start in range(len(row) - reach + 1):
                yield tuple(row[start : start + reach : step])
