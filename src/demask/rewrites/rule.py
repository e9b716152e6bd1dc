"""Entries of the table of rewrites: rules for calls of some ops, and passes over programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from demask.graph.program import Program
from demask.graph.value import Value
from demask.ops import Table

ROUNDING = 1e-12  # other orders of short sums in float64, relative to the largest output


@dataclass(frozen=True, slots=True)
class NetworkCase:
    """A network on which a rewrite is tested.

    call: the network, or its forward as a function. inputs: shapes of float inputs in [-1, 1), or
    the inputs. dynamic: the axes whose sizes are known only at run time, by index of the input.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    dynamic: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def network(self) -> nn.Module:
        """The network, with the function as its forward."""
        return self.call if isinstance(self.call, nn.Module) else FunctionNetwork(self.call)


class FunctionNetwork(nn.Module):
    """A function as a network. Tensors of its closure are not its parameters."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def case(call: Callable[..., Any], *inputs: Any, dynamic: Mapping[int, tuple[int, ...]] | None = None) -> NetworkCase:
    """A case of a rewrite; see `NetworkCase`."""
    return NetworkCase(call, inputs, dynamic or {})


Replacement = Value | tuple[Value | None, ...] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite of calls of some ops, one call at a time.

    ops: the ops whose calls it is asked for, any overload or Python function. apply: called with the
    value of the call and its arguments in the order of the op's schema; returns the value that
    replaces the call, a tuple of values for a call with several outputs, or None for a call that
    stays. Its docstring is what a trace gives as the reason. cases: networks that it changes;
    refused: networks with calls of these ops that it does not change, one for each of its guards.
    exact: whether outputs are equal bit for bit; tolerance: else, how much they may differ in
    float64, relative to the largest.
    """

    ops: frozenset[Any]
    apply: Callable[..., Replacement]
    cases: tuple[NetworkCase, ...] = ()
    refused: tuple[NetworkCase, ...] = ()
    exact: bool = True
    tolerance: float = ROUNDING

    @property
    def name(self) -> str:
        """The function's name, as words."""
        return self.apply.__name__.replace("_", " ")

    @property
    def reason(self) -> str:
        """The first sentence of the function's docstring."""
        text = " ".join((inspect.getdoc(self.apply) or "").split("\n\n")[0].split())
        return text.partition(". ")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Pass:
    """A rewrite of a program: one that a rule for single calls cannot state.

    name: what a note says is left out, if it fails. apply: a program and a table -> a program that
    computes the same. reason: what a trace says. cases, exact, tolerance: as
    of a rule.
    """

    name: str
    apply: Callable[[Program, Table], Program]
    reason: str
    cases: tuple[NetworkCase, ...] = ()
    exact: bool = True
    tolerance: float = ROUNDING


@dataclass(frozen=True, slots=True)
class Phase:
    """Entries that are applied one after the other; rules that follow one another, in one walk over
    the calls, of which the first that applies replaces the call. repeat: until none changes anything."""

    name: str
    entries: tuple[Rule | Pass, ...]
    repeat: bool = False

    @property
    def ops(self) -> frozenset[Any]:
        """The ops that its rules are for."""
        return frozenset().union(*(entry.ops for entry in self.entries if isinstance(entry, Rule)))


def rule(
    *ops: Any,
    cases: tuple[NetworkCase, ...] = (),
    refused: tuple[NetworkCase, ...] = (),
    exact: bool = True,
    tolerance: float = ROUNDING,
) -> Callable[[Callable[..., Replacement]], Rule]:
    """A decorator that makes a function the rule for calls of these ops; see `Rule`."""
    return lambda function: Rule(frozenset(ops), function, cases, refused, exact, tolerance)
