"""What an accelerator without strided convolutions can do instead: its table of ops, and its sizes.

Built in are targets of one idea each. A user's own is a small TOML file:

    name = "my accelerator"
    ops = ["max_pool", "multiply", "relu", "add"]
    finite = true
    forms = ["mask_max_pool", "split"]      # optional: the first that is sound, not the cheapest
    [conv]
    stride = 1                              # the largest that convolutions have
    [pool]
    size = 3                                # the largest window and stride
    stride = 3
    windows = "stride"                      # windows have their stride's size; else "any"
    ceil = false                            # windows end inside; what is left over is padded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from demask.errors import BadInput
from demask.files.bounded_read import read_toml

# What a form may use, in words.
OPS: Mapping[str, str] = {
    "max_pool": "the maximum of windows",
    "avg_pool": "the mean of windows, divided by their size",
    "sum_pool": "the sum of windows: a mean whose divisor is 1",
    "select": "of two values, position by position, as a constant mask says",
    "multiply": "a value times a constant, position by position; or times a number",
    "relu": "the larger of a value and zero",
    "add": "the sum, difference and negative of values",
    "slice": "every s-th position of a value",
    "pad": "a constant around a value, or less of its border",
    "space_to_depth": "blocks of positions as channels",
    "rotate": "positions moved around by as much as is said",
    "crop": "the first positions of a value",
    "dilation": "convolutions of any dilation: strides are pushed downstream",
}
# Ops that a network may hold and a target may not have at all. Average pools then become
# convolutions; means over all positions stay.
KINDS: Mapping[str, tuple[str, ...]] = {
    "max_pool": ("aten.max_pool", "aten.adaptive_max_pool", "aten.amax", "aten.max."),
    "avg_pool": ("aten.avg_pool",),
}
WINDOWS = ("any", "stride")


def _known(what: str, given: Any, names: Any, where: str) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise BadInput(f"target {where}: {what} {unknown[0]!r} is unknown; "
                       f"expected some of {', '.join(names)}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What an accelerator has: `ops`, names of `OPS`, and sizes of them.

    conv_stride: the largest stride of its convolutions. pool_size, pool_stride: the largest of its
    pools. pool_windows: "stride" if windows are as large as their stride, which do not overlap;
    else "any". pool_ceil: may the last window reach beyond the value? finite: no value on it is Inf
    or NaN, so that 0 * x is 0. largest: no value on it is larger. mask: a of the two masks a and
    1 / a. forms: if given, the forms it takes, the first sound one before the others; else the
    cheapest is. forbidden: kinds of ops (`KINDS`) that no network on it may hold.

    >>> Target("mine", frozenset({"slice"})).finite
    False
    """

    name: str
    ops: frozenset[str]
    conv_stride: int = 1
    pool_size: float = inf
    pool_stride: float = inf
    pool_windows: str = "any"
    pool_ceil: bool = True
    finite: bool = False
    largest: float = inf
    mask: float = 2.0
    forms: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _known("op", self.ops, OPS, self.name)
        _known("forbidden op", self.forbidden, KINDS, self.name)
        _known("windows", (self.pool_windows,), WINDOWS, self.name)
        sizes = {"conv stride": self.conv_stride, "pool size": self.pool_size,
                 "pool stride": self.pool_stride}  # fmt: skip
        for what, size in sizes.items():
            if size < 1 or size not in (inf, size // 1):
                raise BadInput(f"target {self.name!r}: expected a {what} of 1 or more, a whole "
                               f"number, got {size}")  # fmt: skip
        if not 0 < self.mask < inf or self.largest <= 0:
            raise BadInput(f"target {self.name!r}: expected mask and largest above 0, "
                           f"got {self.mask} and {self.largest}")  # fmt: skip


def _named(name: str, ops: str, **more: Any) -> Target:
    return Target(name, frozenset(ops.split()), **more)


TARGETS: Mapping[str, Target] = {
    t.name: t
    for t in (
        _named("max_pool", "max_pool select pad relu add", pool_windows="stride"),
        _named("avg_pool", "avg_pool sum_pool select multiply pad", pool_windows="stride"),
        _named("slice", "slice"),
        _named("no_pool", "dilation select multiply"),
        _named("space_to_depth", "space_to_depth pad", finite=True),
        _named("fhe", "add multiply rotate crop dilation", finite=True,
               forms=("dilation", "rotate"), forbidden=("max_pool", "avg_pool")),
        _named("matrix_unit", "max_pool avg_pool multiply relu add pad", finite=True,
               pool_windows="stride"),
    )
}  # fmt: skip


def target(of: str | Path | Target) -> Target:
    """A target itself, the built-in one of a name, or the one that a TOML file describes.

    BadInput: there is none of this name, or what is wrong with the file.

    >>> target("slice").ops
    frozenset({'slice'})
    """
    if isinstance(of, Target):
        return of
    if not isinstance(of, (str, Path)):
        raise BadInput(f"expected a target's name, a TOML file or a Target, got {of!r:.60}")
    if isinstance(of, str) and of in TARGETS:
        return TARGETS[of]
    path = Path(of)
    if path.suffix != ".toml":
        raise BadInput(f"no target {str(of)!r}: expected {', '.join(TARGETS)}, or a file *.toml")
    return parsed(read_toml(path), str(path))


_NUMBER, _FLAG, _TEXT, _WORDS = "a number", "true or false", "text", "a list of names"
# Per key of the file, and of its tables: the field, and what is expected.
_KEYS: Mapping[str, tuple[str, str]] = {
    "name": ("name", _TEXT), "ops": ("ops", _WORDS), "finite": ("finite", _FLAG),
    "largest": ("largest", _NUMBER), "mask": ("mask", _NUMBER), "forms": ("forms", _WORDS),
    "forbidden": ("forbidden", _WORDS), "conv.stride": ("conv_stride", _NUMBER),
    "pool.size": ("pool_size", _NUMBER), "pool.stride": ("pool_stride", _NUMBER),
    "pool.windows": ("pool_windows", _TEXT), "pool.ceil": ("pool_ceil", _FLAG),
}  # fmt: skip


def parsed(data: Mapping[str, Any], where: str) -> Target:
    """The target that a TOML document describes; `where` it comes from is said in errors."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        inner = value if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    _known("key", flat, _KEYS, where)
    if "ops" not in flat:
        raise BadInput(f"target {where}: expected a list `ops` of {', '.join(OPS)}")
    made: dict[str, Any] = {"name": Path(where).stem}
    for key, value in flat.items():
        field, expected = _KEYS[key]
        if not _is(value, expected):
            raise BadInput(f"target {where}: {key} is {value!r:.60}; expected {expected}")
        made[field] = value
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in made.items()}
    fields["ops"] = frozenset(fields["ops"])
    return Target(**fields)


def _is(value: Any, expected: str) -> bool:
    if expected is _WORDS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    kinds: Mapping[str, Any] = {_NUMBER: (int, float), _FLAG: bool, _TEXT: str}
    flag = isinstance(value, bool)
    return isinstance(value, kinds[expected]) and flag == (expected is _FLAG) and value == value


__all__ = ["KINDS", "OPS", "TARGETS", "Target", "parsed", "target"]
