"""Accelerators without strided convolutions: the ops that they have, and their limits.

Each built-in target demonstrates one kind of hardware. A custom target is a small TOML file:

    name = "my accelerator"
    ops = ["max_pool", "multiply", "relu", "add"]
    finite = true
    forms = ["mask_max_pool", "split"]      # optional: the first sound one, not the cheapest
    [conv]
    stride = 1                              # largest stride of convolutions
    [pool]
    size = 3                                # largest window and stride
    stride = 3
    windows = "stride"                      # windows are as large as their stride; else "any"
    ceil = false                            # windows must end inside the value
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from demask.errors import BadInput
from demask.files.bounded_read import read_toml
from demask.numerics import is_number

# Ops that a form may use, with descriptions.
OPS: Mapping[str, str] = {
    "max_pool": "the maximum of windows",
    "min_pool": "the minimum of windows: the negative of a maximum of negatives",
    "avg_pool": "the mean of windows, divided by their size",
    "sum_pool": "the sum of windows: a mean whose divisor is 1",
    "select": "one of two values at each position, chosen by a constant mask",
    "multiply": "a value times a constant, elementwise, or times a number",
    "relu": "the larger of a value and zero",
    "add": "the sum, difference and negative of values",
    "slice": "every s-th position of a value",
    "pad": "a constant around a value, or a value without part of its border",
    "space_to_depth": "blocks of positions as channels",
    "rotate": "positions moved cyclically along an axis",
    "crop": "the first positions of a value",
    "dilation": "convolutions of any dilation: strides are pushed downstream",
}
# Ops that a target may lack altogether, by prefix of their names. Average pools then become
# convolutions; means over all positions remain.
KINDS: Mapping[str, tuple[str, ...]] = {
    "max_pool": ("aten.max_pool", "aten.adaptive_max_pool", "aten.amax", "aten.max."),
    "avg_pool": ("aten.avg_pool",),
}
WINDOWS = ("any", "stride")


def _check_known(what: str, values: Any, names: Any, where: str) -> None:
    unknown = [name for name in values if name not in names]
    if unknown:
        raise BadInput(f"target {where}: {what} {unknown[0]!r} is unknown; expected some of {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Target:
    """The ops of an accelerator without strided convolutions, and their limits, for `lower`.

    Attributes:
        name: name for messages, a str.
        ops: a frozenset of names of ops: "max_pool", "min_pool", "avg_pool", "sum_pool", "select",
            "multiply", "relu", "add", "slice", "pad", "space_to_depth", "rotate", "crop" and "dilation";
            `demask.stride.targets.OPS` describes them. Convolutions are always allowed.
        conv_stride: largest stride of convolutions in positions, an int of at least 1. Default: 1.
        pool_size, pool_stride: largest window and largest stride of pools in positions, along each
            axis; integers of at least 1. Default: inf, no limit.
        pool_windows: "any" (default), or "stride" if each window must be as large as its stride.
        pool_ceil: whether the last window may extend beyond the input (`ceil_mode`). Default: True.
        finite: whether no value is Inf or NaN, also not times `mask`, so that 0 * x is 0. Default: False.
        largest: upper bound of absolute values, a number above 0. Default: inf, no bound.
        mask: the factor a of the form "two_masks", which multiplies by a and later by 1 / a, above 0; or a
            tuple of factors, one after another for the outputs of the strided convolution. Default: 2.
        forms: a tuple of names of forms (ways to write a convolution without its stride) in order
            of preference: the first exact one is used. Names: "mask_max_pool", "two_masks",
            "select_max_pool", "mask_min_pool", "select_min_pool", "pool_1x1", "slice",
            "mask_sum_pool", "mask_avg_pool", "split", "rotate", "space_to_depth", "phase_split"
            and "dilation". Default: (), which uses the exact one of the least cost.
        forbidden: a tuple of those of "max_pool" and "avg_pool" that no network on the target may
            contain. Default: ().

    Raises:
        BadInput: a name of an op or window is unknown, or a number is out of range. `lower` raises
            it for an unknown name of a form.

    Example:
        >>> import torch
        >>> from demask.stride import Target, lower
        >>> chip = Target("chip", frozenset({"slice"}))  # convolutions of stride 1, and slices
        >>> net, x = torch.nn.Conv2d(3, 8, 3, stride=2).eval(), torch.randn(1, 3, 9, 9)
        >>> plain = lower(net, (x,), target=chip)
        >>> torch.allclose(plain(x), net(x), atol=1e-6)
        True
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
    mask: float | tuple[float, ...] = 2.0
    forms: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what in ("ops", "forms", "forbidden"):
            if not isinstance(getattr(self, what), (frozenset, set, tuple, list)):
                raise BadInput(
                    f"target {self.name!r}: expected {what} as a collection of names, got {getattr(self, what)!r:.40}"
                )
        for what in ("pool_ceil", "finite"):
            if not isinstance(getattr(self, what), bool):
                raise BadInput(f"target {self.name!r}: expected {what}=True or False, got {getattr(self, what)!r:.40}")
        object.__setattr__(self, "ops", frozenset(self.ops))
        object.__setattr__(self, "forms", tuple(self.forms))
        object.__setattr__(self, "forbidden", tuple(self.forbidden))
        _check_known("op", self.ops, OPS, self.name)
        _check_known("forbidden op", self.forbidden, KINDS, self.name)
        _check_known("windows", (self.pool_windows,), WINDOWS, self.name)
        sizes = {"conv stride": self.conv_stride, "pool size": self.pool_size, "pool stride": self.pool_stride}
        for what, size in sizes.items():
            if not is_number(size) or size < 1 or size not in (inf, size // 1):
                raise BadInput(f"target {self.name!r}: expected a {what} of 1 or more, an integer, got {size!r}")
        if isinstance(self.mask, list):
            object.__setattr__(self, "mask", tuple(self.mask))
        are_numbers = bool(self.masks) and all(map(is_number, (*self.masks, self.largest)))
        if not are_numbers or not all(0 < a < inf for a in self.masks) or self.largest <= 0:
            raise BadInput(
                f"target {self.name!r}: expected mask and largest above 0, got {self.mask!r} and {self.largest!r}"
            )

    @property
    def masks(self) -> tuple[float, ...]:
        """The factors of the form "two_masks"."""
        return self.mask if isinstance(self.mask, tuple) else (self.mask,)


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
        _named(
            "fhe",
            "add multiply rotate crop dilation",
            finite=True,
            forms=("dilation", "rotate"),
            forbidden=("max_pool", "avg_pool"),
        ),
        _named("matrix_unit", "max_pool avg_pool multiply relu add pad", finite=True, pool_windows="stride"),
    )
}


def target(of: str | Path | Target) -> Target:
    """A target itself, a built-in one by name, or one from a TOML file.

    Raises BadInput if the name is unknown or the file is not valid.

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
# By key of the file and of its tables: the field of Target, and the expected type.
_KEYS: Mapping[str, tuple[str, str]] = {
    "name": ("name", _TEXT),
    "ops": ("ops", _WORDS),
    "finite": ("finite", _FLAG),
    "largest": ("largest", _NUMBER),
    "mask": ("mask", _NUMBER),
    "forms": ("forms", _WORDS),
    "forbidden": ("forbidden", _WORDS),
    "conv.stride": ("conv_stride", _NUMBER),
    "pool.size": ("pool_size", _NUMBER),
    "pool.stride": ("pool_stride", _NUMBER),
    "pool.windows": ("pool_windows", _TEXT),
    "pool.ceil": ("pool_ceil", _FLAG),
}


def parsed(data: Mapping[str, Any], where: str) -> Target:
    """The target of a TOML document. where: its origin, for error messages."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        inner = value if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    _check_known("key", flat, _KEYS, where)
    if "ops" not in flat:
        raise BadInput(f"target {where}: expected a list `ops` of {', '.join(OPS)}")
    values: dict[str, Any] = {"name": Path(where).stem}
    for key, value in flat.items():
        field, expected = _KEYS[key]
        if not _has_type(value, expected):
            raise BadInput(f"target {where}: {key} is {value!r:.60}; expected {expected}")
        values[field] = value
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    fields["ops"] = frozenset(fields["ops"])
    return Target(**fields)


def _has_type(value: Any, expected: str) -> bool:
    """Whether a value of a TOML document has the expected type, and is not NaN."""
    if expected is _WORDS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    types: Mapping[str, Any] = {_NUMBER: (int, float), _FLAG: bool, _TEXT: str}
    flag = isinstance(value, bool)
    return isinstance(value, types[expected]) and flag == (expected is _FLAG) and value == value


__all__ = ["KINDS", "OPS", "TARGETS", "Target", "parsed", "target"]
