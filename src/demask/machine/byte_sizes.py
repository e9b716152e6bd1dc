"""Amounts of memory: parsed from text, formatted as text, and the most of this process."""

from __future__ import annotations

import re
import sys

from demask.errors import BadInput

BUDGET = "512MiB"  # of a call, by default
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})", re.ASCII)


def parse_memory(amount: str | int) -> int:
    """Bytes of an amount: a number of bytes, or a text such as "512MiB", "1.5 GB" or "64000000".

    B, kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB are powers of 1024; case is ignored.

    Raises:
        BadInput: another text, or less than one byte.

    >>> parse_memory("512MiB"), parse_memory("1.5GB"), parse_memory(4096)
    (536870912, 1500000000, 4096)
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        size = amount
    else:
        match = _AMOUNT.fullmatch(amount.strip()) if isinstance(amount, str) else None
        if match is None or match[2].upper() not in UNITS:
            raise BadInput(
                f"expected an amount of memory such as '512MiB', '1.5GB' or a number of "
                f"bytes, got {amount!r:.60}{_unit_hint(match)}"
            )
        units, _, rest = match[1].partition(".")
        unit = UNITS[match[2].upper()]
        # In integers: 0.1 GB has no exact float.
        size = int(units) * unit + int(rest or 0) * unit // 10 ** len(rest)
    if size < 1:
        raise BadInput(f"expected at least one byte of memory, got {amount!r}")
    return size


def _unit_hint(match: re.Match[str] | None) -> str:
    """The two units that an unknown unit K, M, G or T may mean, for the message; or ""."""
    letter = match[2].upper() if match else ""
    return f": write {match[1]}{letter}iB or {match[1]}{letter}B" if letter in (*"KMGT",) and match else ""


def format_bytes(size: float) -> str:
    """An amount of bytes as text, in units of powers of 1024.

    >>> format_bytes(512), format_bytes(1536 * 2**20), format_bytes(300 * 2**20)
    ('512 B', '1.50 GiB', '300 MiB')
    """
    if size < 2**10:
        return f"{size:.0f} B"
    power = next((p for p in (4, 3, 2, 1) if size >= 2 ** (10 * p)), 1)
    value = size / 2 ** (10 * power)
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {'KMGT'[power - 1]}iB"


def peak_memory() -> int | None:
    """The most bytes of memory that this process has had; None where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
