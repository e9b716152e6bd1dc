"""Records as JSON and back: what types say is checked, and what a later version adds is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from demask.errors import BadInput
from demask.records import OMITTED, Limit, Stored, decode, encode

Even = Annotated[int, Limit("an even number", lambda n: n % 2 == 0)]
Seconds = Annotated[float, Stored(lambda s: s if s < math.inf else None, lambda s: math.inf if s is None else float(s))]


@dataclass(frozen=True, slots=True)
class Inner:
    sizes: tuple[int | str, ...]
    pair: tuple[Even, str] | None = None
    note: Annotated[str, OMITTED] = ""


@dataclass(frozen=True, slots=True)
class Outer:
    rows: tuple[Inner, ...]
    kind: Literal["a", "b"]
    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    flag: bool = False
    share: float = 0.5


FULL = Outer((Inner((1, "n")), Inner((), (2, "x"), "word")), "b", {"plain": math.inf, "fast": 0.25}, True, 3)
DATA = {
    "rows": [{"sizes": [1, "n"], "pair": None}, {"sizes": [], "pair": [2, "x"], "note": "word"}],
    "kind": "b",
    "seconds": {"plain": None, "fast": 0.25},
    "flag": True,
    "share": 3,
}


def test_a_record_is_that_of_its_json() -> None:
    assert encode(Outer, FULL) == DATA
    assert decode(Outer, json.loads(json.dumps(DATA)), "file") == FULL
    assert type(decode(Outer, DATA, "file").rows[0].sizes) is tuple


def test_fields_of_other_versions() -> None:
    """What an earlier version did not write is the default; what a later one adds is left out."""
    least = {"rows": [], "kind": "a"}
    assert decode(Outer, least | {"new": 1}, "file") == Outer((), "a")
    for data in (least, DATA | {"new": 1}):
        with pytest.raises(BadInput, match=r"file: expected the field"):
            decode(Outer, data, "file", exact=True)
    complete = DATA | {"rows": []}
    assert decode(Outer, complete, "file", exact=True).rows == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": {}}, "file.rows: expected a list"),
        ({"rows": [{}]}, r"file.rows\[0\]: expected the field 'sizes'"),
        ({"rows": [{"sizes": [1.5]}]}, r"file.rows\[0\].sizes\[0\]: expected a text"),
        ({"rows": [{"sizes": [True]}]}, "expected a text"),
        ({"rows": [{"sizes": [], "pair": [3, "x"]}]}, "pair: expected an even number"),
        ({"rows": [{"sizes": [], "pair": [2]}]}, "pair: expected 2 values"),
        ({"kind": "c"}, "file.kind: expected one of"),
        ({"kind": []}, "file.kind: expected one of"),
        ({"seconds": {"plain": "soon"}}, "file.seconds.plain: could not convert"),
        ({"seconds": [1]}, "file.seconds: expected an object"),
        ({"flag": 1}, "file.flag: expected true or false"),
        ({"share": "1"}, "file.share: expected a number"),
        ({"share": False}, "file.share: expected a number"),
    ],
)
def test_other_data_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        decode(Outer, DATA | change, "file")
