"""Amounts of memory in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demask.errors import BadInput
from demask.machine.byte_sizes import format_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5gb", 1_500_000_000),
        ("0.1 GB", 10**8),
        ("64000000", 64_000_000),
        (4096, 4096),
        ("2TiB", 2**41),
        ("1B", 1),
    ],
)
def test_amounts_are_read_exactly(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "5Q", "1.GB", "0", 0, -1, 1.5, None, True, "9" * 40, "0.1B"]
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(BadInput, match="memory"):
        parse_memory(text)


def test_a_unit_that_could_be_two_asks_which():
    with pytest.raises(BadInput, match="5GiB or 5GB"):
        parse_memory("5G")


@given(st.integers(1, 2**50))
def test_an_amount_in_words_reads_back_as_about_itself(size):
    back = parse_memory(format_bytes(size))
    assert abs(back - size) <= size / 100
