"""Which values an input may have: one contract for every check that draws inputs.

A domain is learned from the example (integers stay in its range; masks of zeros and ones, one-hot
rows, sorted and distinct numbers stay such), or stated by the caller.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.records import Limit

Form = Literal["any", "mask", "one-hot", "sorted", "distinct"]
FORMS: tuple[Form, ...] = ("any", "mask", "one-hot", "sorted", "distinct")
Domains = Mapping[int, "Domain"]  # by number of the leaf among a call's inputs
NOTHING: Domains = MappingProxyType({})
FITTING = Limit("a number of 64 bits", lambda number: number is None or abs(number) < 2**63)


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that one input may have.

    low, high: the smallest and the largest; None: of floats, normally distributed numbers are
    drawn. form: "mask" has zeros and ones in no pattern, "one-hot" a single one along `axis`;
    "sorted" numbers do not fall along the last axis, "distinct" ones differ along it.
    """

    low: Annotated[float | None, FITTING] = None
    high: Annotated[float | None, FITTING] = None
    form: Form = "any"
    axis: Annotated[int, Limit("an axis", range(-64, 64).__contains__)] = -1
    ascending: bool = False

    @classmethod
    def of(cls, leaf: Tensor) -> Domain:
        """The domain that an example shows.

        >>> Domain.of(torch.tensor([0, 2, 2, 5])).form, Domain.of(torch.eye(3)).form
        ('sorted', 'one-hot')
        """
        if leaf.numel() == 0 or leaf.is_complex() or leaf.dtype is torch.float4_e2m1fn_x2:
            return cls()
        if leaf.dtype == torch.bool:
            return cls(0, 1, "mask")
        # torch lacks comparisons of many dtypes of few bits, and of unsigned ones of more than 8
        value = leaf.detach().double() if leaf.is_floating_point() else leaf.detach().long()
        form, axis = _binary_form(value)
        if form != "any":
            return cls(0, 1, form, axis)
        if value.is_floating_point():
            steps = value.diff() if value.ndim == 1 else value.reshape(-1)[:0]
            rising = len(steps) > 1 and bool((steps >= 0).all()) and bool((steps > 0).any())
            return cls(float(value[0]), float(value[-1]), "sorted") if rising else cls()
        low, high = int(value.min()), int(value.max())
        if value.ndim == 0 or value.shape[-1] < 3 or low == high:
            return cls(low, high)
        steps = value.sort(-1).values.diff(dim=-1)
        ascending = bool((value.diff(dim=-1) >= 0).all())
        if bool((steps > 0).all()):
            return cls(low, high, "distinct", ascending=ascending)
        return cls(low, high, "sorted" if ascending else "any")

    @property
    def is_range(self) -> bool:
        """Whether the smallest number is not above the largest."""
        return self.low is None or self.high is None or self.low <= self.high

    def draw(self, like: Tensor, draw: torch.Generator) -> Tensor:
        """Seeded random values of the domain with the shape, dtype and device of a tensor."""
        if like.numel() == 0 or like.dtype is torch.float4_e2m1fn_x2:
            return like
        if self.form == "mask":
            share = min(max(float(like.detach().double().mean()), 0.25), 0.75)
            return (torch.rand(like.shape, generator=draw) < share).to(like)
        if self.form == "one-hot":
            numbers = torch.rand(like.shape, generator=draw)
            return (numbers == numbers.amax(self.axis, keepdim=True)).to(like)
        if self.low is None or self.high is None:
            dtype = torch.complex64 if like.is_complex() else torch.float32
            return torch.randn(like.shape, dtype=dtype, generator=draw).to(like)
        if self.form == "distinct":
            return self._draw_distinct(like, draw)
        if like.is_floating_point():
            numbers = torch.rand(like.shape, generator=draw, dtype=torch.float64)
            numbers = self.low + numbers * (self.high - self.low)
        else:
            numbers = torch.randint(int(self.low), int(self.high) + 1, like.shape, generator=draw)
        return (numbers.sort(-1).values if self.form == "sorted" else numbers).to(like)

    def _draw_distinct(self, like: Tensor, draw: torch.Generator) -> Tensor:
        assert self.low is not None and self.high is not None
        count, rows = int(self.high - self.low) + 1, math.prod(like.shape[:-1])
        if count < like.shape[-1] or count > 2**20:
            return like
        drawn = [torch.randperm(count, generator=draw)[: like.shape[-1]] for _ in range(rows)]
        numbers = torch.stack(drawn) + int(self.low)
        numbers = numbers.sort(-1).values if self.ascending else numbers
        return numbers.view(like.shape).to(like)

    def reorder(self, leaf: Tensor, draw: torch.Generator) -> Tensor:
        """The values of a floating-point tensor in another order, a quarter of them 0 (or the
        number of the domain next to it); of other tensors and forms as they are."""
        if not leaf.is_floating_point() or leaf.numel() < 2 or self.form not in ("any", "mask"):
            return leaf
        order = torch.randperm(leaf.numel(), generator=draw).to(leaf.device)
        values = leaf.detach().reshape(-1)[order]
        if self.form == "any":
            zero = min(max(0.0, self.low or 0.0), self.high if self.high is not None else 0.0)
            few = torch.rand(values.shape, generator=draw).to(leaf.device) < 0.25
            values = torch.where(few, zero, values)
        return values.to(leaf.dtype).reshape(leaf.shape)

    def within(self, values: Tensor, size: int) -> Tensor:
        """Integers as positions along an axis of `size`: too large ones become smaller."""
        if values.is_floating_point() or values.dtype == torch.bool or values.is_complex():
            return values
        return values.clamp(max=size - 1) if self.form == "sorted" else values.remainder(size)

    def has(self, values: Tensor) -> bool:
        """Whether values are in the range of the domain."""
        bounds = -math.inf if self.low is None else self.low, self.high
        high = math.inf if bounds[1] is None else bounds[1]
        return bool(((values >= bounds[0]) & (values <= high)).all())


def _binary_form(value: Tensor) -> tuple[Form, int]:
    """ "mask" or "one-hot" and its axis for a tensor in which both 0 and 1 occur, and nothing else;
    else "any"."""
    ones = value == 1
    if value.numel() < 3 or not bool(((value == 0) | ones).all()):
        return "any", -1
    if not bool(ones.any()) or bool(ones.all()):
        return "any", -1
    for axis in range(value.ndim - 1, -1, -1):
        if value.shape[axis] > 2 and bool((ones.sum(axis) == 1).all()):
            return "one-hot", axis - value.ndim
    return "mask", -1


def draw_like(leaf: Tensor, draw: torch.Generator, domain: Domain | None = None) -> Tensor:
    """Random values in the shape of a tensor: of a domain, by default the one that it shows."""
    return (Domain.of(leaf) if domain is None else domain).draw(leaf, draw)


def domains_of(leaves: Iterable[Any], stated: Domains) -> list[Domain]:
    """The domain of each leaf of a call: the stated one, or the one that the example shows."""
    return [
        stated.get(k) or (Domain.of(leaf) if isinstance(leaf, Tensor) else Domain()) for k, leaf in enumerate(leaves)
    ]


def state_domains(
    model: Any, args: Any, kwargs: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None
) -> dict[int, Domain]:
    """The domains that a caller states, by number of the leaf.

    inputs: by name of an argument of forward: (low, high), both included, or one of FORMS. Raises
    BadInput for other values, and for names of no input.
    """
    if not inputs:
        return {}
    if not isinstance(inputs, Mapping):
        raise BadInput(
            f'inputs must be a mapping such as {{"index": (0, 9), "keep": "mask"}}, got {type(inputs).__name__}'
        )
    kwargs = dict(kwargs or {})
    names = _leaf_names(model, args, kwargs)
    unknown = [name for name in inputs if name not in names]
    if unknown:
        raise BadInput(f"inputs names {unknown[0]!r}; expected one of {sorted(set(names))}")
    leaves = pytree.tree_leaves((args, kwargs))
    domains: dict[int, Domain] = {}
    for k, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if name in inputs and isinstance(leaf, Tensor):
            domains[k] = domain = _parse(name, inputs[name])
            if not leaf.is_complex() and not domain.has(leaf):
                raise BadInput(
                    f"the example of {name!r} is not in its range {inputs[name]}: it has {leaf.min()} to {leaf.max()}"
                )
    return domains


def _parse(name: str, value: Any) -> Domain:
    if isinstance(value, Domain):
        return value
    if isinstance(value, str) and value in FORMS:
        form = cast(Form, value)
        return Domain(0, 1, form) if form in ("mask", "one-hot") else Domain(form=form)
    numbers = (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in value)
    )
    if not numbers or value[0] > value[1]:
        raise BadInput(f"inputs[{name!r}] must be (low, high) with low <= high, or one of {FORMS}, got {value!r}")
    low, high = cast(Any, value)
    return Domain(low, high)


def _leaf_names(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """For each leaf of a call, the name of the argument of forward that has it."""
    forward: Callable[..., Any] | None = getattr(model, "forward", None)
    parameters = list(inspect.signature(forward).parameters) if callable(forward) else []
    names: list[str] = []
    for k, arg in enumerate(args):
        name = parameters[k] if k < len(parameters) else f"input_{k}"
        names += [name] * len(pytree.tree_leaves(arg))
    for name, value in kwargs.items():
        names += [name] * len(pytree.tree_leaves(value))
    return names
