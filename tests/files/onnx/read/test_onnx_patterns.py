"""Regular expressions of ONNX files match what Python's re matches, in linear time."""

import random
import re

import pytest

from demask.errors import BadInput
from demask.files.onnx.ops.data.text import compile_pattern

PIECES = (
    "a", "b", ".", "[ab]", "[^a]", "[a-c]", r"\d", r"\.", "(", "(?:", "(?P<n>", ")", "|", "*", "+",
    "?", "{2}", "{1,3}", "{0,}", "*?", "^", "$", r"\b", r"\B",
)  # fmt: skip


def expressions(count):
    """Random expressions that Python's re reads."""
    draw = random.Random(0)
    while count:
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
        try:
            # RE2's end of a text is the end, Python's may be before a last line break.
            found = re.compile(text.replace("$", r"\Z"), re.ASCII)
        except re.error:
            continue
        count -= 1
        yield text, found, draw


def test_random_expressions_match_as_in_re():
    refused = 0
    for text, found, draw in expressions(2000):
        try:
            ours = compile_pattern(text)
        except BadInput:
            refused += 1
            continue
        # Python 3.11 has no \B in an empty text; RE2 has.
        words = [
            *[""] * (r"\B" not in text),
            *("".join(draw.choices("aabc1.\n", k=draw.randrange(1, 6))) for _ in range(8)),
        ]
        assert ours.matches(words) == [found.fullmatch(w) is not None for w in words], text
    assert refused < 1000


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*b", "a*a*a*a*a*a*a*a*b", "((a{1,9}){1,9}){1,9}b"]
)
def test_patterns_that_python_takes_forever_for(pattern):
    assert compile_pattern(pattern).matches(["a" * 60, "a" * 60 + "b"]) == [False, True]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("^a$", "a"), ("(?i)AB", "aB"), ("(?s)a.b", "a\nb"), (r"\[x\]{2}", "[x]]"), ("a{,3}", "a{,3}")],
)
def test_anchors_flags_and_literals(pattern, text):
    assert compile_pattern(pattern).matches([text, text + "!"]) == [True, False]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1", "(?=a)a", "^*a", "a++", "a**", "[[:alpha:]]", r"\pL", "(", ")", "[a",
        "a{3,2}", "(" * 5000, "((a{1000}){1000}){1000}", "(((){1000}){1000}){1000}", "\\",
    ],
)  # fmt: skip
def test_what_is_read_in_two_ways_or_without_bounds_is_refused(pattern):
    with pytest.raises(BadInput, match=r"expected a|more than 10,000 states"):
        compile_pattern(pattern)


def test_long_texts_and_large_patterns_are_refused_before_they_are_matched():
    with pytest.raises(BadInput, match="too long to match"):
        compile_pattern("(a?){1000}").matches(["a" * 100_000])
