"""Floats computed from sizes while a network is traced, as fractions.

Exporters compute sizes as floor(float(size) * 0.5). `torch.export` can compare such a size with
others if it is written as size // 2, but not if it contains floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from demask.compat.symbolic_shapes import statically_known_true

MAX_PARTS = 2**20  # a float that is not a fraction of integers up to this stays a float


@dataclass(frozen=True, slots=True, eq=False)
class Ratio:
    """whole / parts, with Python's arithmetic; results that are not fractions are floats."""

    whole: Any  # an int or a torch.SymInt
    parts: int = 1

    @property
    def number(self) -> Any:
        """As a float."""
        whole = torch.sym_float(self.whole)
        return whole if self.parts == 1 else whole / self.parts

    def __floor__(self) -> Any:
        return self.whole // self.parts

    def __ceil__(self) -> Any:
        return -(-self.whole // self.parts)

    def __trunc__(self) -> Any:
        if self.parts == 1 or statically_known_true(self.whole >= 0):
            return self.whole // self.parts
        return math.trunc(self.number)

    def __round__(self) -> Any:
        return self.whole if self.parts == 1 else round(self.number)

    def __neg__(self) -> Any:
        return Ratio(-self.whole, self.parts)

    def __abs__(self) -> Any:
        return Ratio(abs(self.whole), self.parts)

    def __add__(self, other: Any) -> Any:
        return _sum(self, other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return _sum(self, other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        factor = as_ratio(other)
        if factor is None or self.parts * factor.parts > MAX_PARTS:
            return self.number * plain(other)
        return Ratio(self.whole * factor.whole, self.parts * factor.parts)

    def __truediv__(self, other: Any) -> Any:
        factor = as_ratio(other)
        if factor is None or not isinstance(factor.whole, int) or factor.whole <= 0:
            return self.number / plain(other)
        return self * Ratio(factor.parts, factor.whole)

    def __rtruediv__(self, other: Any) -> Any:
        return plain(other) / self.number

    def __pow__(self, other: Any) -> Any:
        return self.number ** plain(other)

    def __rpow__(self, other: Any) -> Any:
        return plain(other) ** self.number

    def __mod__(self, other: Any) -> Any:
        return self.number % plain(other)

    def __rmod__(self, other: Any) -> Any:
        return plain(other) % self.number

    def __lt__(self, other: Any) -> Any:
        return _compare(self, other, operator.lt)

    def __le__(self, other: Any) -> Any:
        return _compare(self, other, operator.le)

    def __gt__(self, other: Any) -> Any:
        return _compare(self, other, operator.gt)

    def __ge__(self, other: Any) -> Any:
        return _compare(self, other, operator.ge)

    def __eq__(self, other: Any) -> Any:
        return _compare(self, other, operator.eq)

    def __ne__(self, other: Any) -> Any:
        return _compare(self, other, operator.ne)

    __radd__, __rmul__ = __add__, __mul__


def as_ratio(x: Any) -> Ratio | None:
    """A number as a ratio, None if it is not one."""
    if x is None or isinstance(x, Ratio):
        return x
    if isinstance(x, int | torch.SymInt):
        return Ratio(x)
    if not isinstance(x, float) or not math.isfinite(x):
        return None
    fraction = Fraction(str(x))
    if max(abs(fraction.numerator), fraction.denominator) > MAX_PARTS:
        return None
    return Ratio(fraction.numerator, fraction.denominator)


def plain(x: Any) -> Any:
    """A number as one of Python or torch, a ratio as float."""
    return x.number if isinstance(x, Ratio) else x


def extend_choice(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`function`, min or max of two integers, extended to ratios."""

    def call(a: Any, b: Any) -> Any:
        if not isinstance(a, Ratio) and not isinstance(b, Ratio):
            return function(a, b)
        return _sum(a, b, function)

    return call


def _sum(a: Any, b: Any, function: Callable[[Any, Any], Any]) -> Any:
    """function(a, b), where function(a * k, b * k) == function(a, b) * k."""
    wholes = _in_parts(a, b)
    if wholes is None:
        return function(plain(a), plain(b))
    return Ratio(function(*wholes[:2]), wholes[2])


def _compare(a: Any, b: Any, function: Callable[[Any, Any], Any]) -> Any:
    wholes = _in_parts(a, b)
    return function(plain(a), plain(b)) if wholes is None else function(*wholes[:2])


def _in_parts(a: Any, b: Any) -> tuple[Any, Any, int] | None:
    """Numerators of two numbers and their common denominator; None if one is not a ratio."""
    a, b = as_ratio(a), as_ratio(b)
    if a is None or b is None:
        return None
    parts = math.lcm(a.parts, b.parts)
    if parts > MAX_PARTS:
        return None
    return a.whole * (parts // a.parts), b.whole * (parts // b.parts), parts
