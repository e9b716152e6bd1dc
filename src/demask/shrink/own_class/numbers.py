"""The numbers that modules' own code reads, for tensors that became smaller."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from demask.graph.program import Program
from demask.graph.provenance import Cut
from demask.graph.result.resize import has_numbers, numbers_of
from demask.shrink.own_class.pretrained import fitting_configs
from demask.shrink.own_class.proof import Proof, Unlike, path_of

MOST_TRIES = 64


def fit_numbers(network: nn.Module, proof: Proof, parts: Collection[str] = ()) -> None:
    """Set the numbers that the modules' own code reads, until the network is proved to compute the
    smaller program; raises Unlike where no numbers do. parts: modules that are graphs already."""
    for _ in fitting_configs(network):
        if proof.unlike(network) is None:
            return
    choices = _choices(network, proof, parts)
    for choice in choices:
        choice.use()
    failure: Unlike | None = None
    for _ in range(MOST_TRIES):
        failure = proof.unlike(network)
        if failure is None:
            return
        choice = _next(choices, failure.place)
        if choice is None:
            raise failure
        choice.at += 1
        choice.use()
    assert failure is not None
    raise failure


def is_below(path: str, parts: Collection[str]) -> bool:
    """Does a path lead to one of some modules, or to what is below them?"""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def calls_of(program: Program) -> dict[str, list[fx.Node]]:
    """The calls of a program by the module whose code makes them."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            found[path_of(node)].append(node)
    return found


@dataclass(slots=True)
class _NumberChoice:
    """The numbers that modules of one kind, cut alike, could have: attributes, and their values in
    the order of trying; `at` is the one in use."""

    modules: list[nn.Module]
    names: tuple[str, ...]
    values: list[tuple[Any, ...]]
    at: int = 0
    paths: list[str] = field(default_factory=list)

    def use(self) -> None:
        for module in self.modules:
            for name, value in zip(self.names, self.values[self.at], strict=True):
                setattr(module, name, value)


def _next(choices: Sequence[_NumberChoice], place: str) -> _NumberChoice | None:
    """The choice to change: of the module where something differs, or of the nearest around it."""
    while True:
        for choice in choices:
            if place in choice.paths and choice.at + 1 < len(choice.values):
                return choice
        if not place:
            return None
        place = place.rpartition(".")[0]


def _choices(network: nn.Module, proof: Proof, parts: Collection[str]) -> list[_NumberChoice]:
    """The numbers of modules that could follow from sizes that became smaller."""
    old, new = calls_of(proof.forms[0](proof.before)), calls_of(proof.target(0))
    found: dict[Any, _NumberChoice] = {}
    for path, module in network.named_modules():
        numbers = numbers_of(module)
        if has_numbers(module) or not numbers or is_below(path, parts):
            continue
        sizes = _sizes(path, old, new, proof.cuts)
        options = [_options(value, sizes) for value in numbers.values()]
        if all(len(values) == 1 and values[0] == value
               for values, value in zip(options, numbers.values(), strict=True)):  # fmt: skip
            continue
        key = (type(module), repr(numbers), repr(options))
        if key not in found:
            found[key] = _NumberChoice([], tuple(numbers), _rows(tuple(numbers.values()), options))
        found[key].modules.append(module)
        found[key].paths.append(path)
    return list(found.values())


def _rows(old: tuple[Any, ...], options: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What numbers could be together, those first in which fewest change: a number that the call
    does not read (which of the layers this is) stays."""
    rows = itertools.islice(itertools.product(*options), 2**14)

    def changes(row: tuple[Any, ...]) -> int:
        return sum(a != b for a, b in zip(row, old, strict=True))

    return sorted(rows, key=changes)[:MOST_TRIES]


def _sizes(
    path: str,
    old: Mapping[str, list[fx.Node]],
    new: Mapping[str, list[fx.Node]],
    cuts: Mapping[str, Cut],
) -> dict[int, list[int]]:
    """What sizes in a module became: of its tensors, its layers', and the values that they make."""
    found: dict[int, dict[int, None]] = defaultdict(dict)

    def note(a: Any, b: Any) -> None:
        if isinstance(a, int) and isinstance(b, int):
            found[a].setdefault(b)

    for name, how in cuts.items():
        holder = name.rpartition(".")[0]
        if path in (holder, holder.rpartition(".")[0]):
            for size, kept in zip(how.shape, how.kept, strict=True):
                note(size, size if kept is None else len(kept))
    for place in [place for place in old if path in (place, place.rpartition(".")[0])]:
        for a, b in _aligned(old[place], new.get(place, [])):
            for one, other in zip(_shapes(a), _shapes(b), strict=False):
                for m, n in zip(one, other, strict=False):
                    note(m, n)
    return {a: list(bs) for a, bs in found.items()}


def _aligned(old: list[fx.Node], new: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Calls of one module in two programs: of each op, as many in both, in order."""
    for target in dict.fromkeys(node.target for node in old):
        mine, other = ([n for n in calls if n.target is target] for calls in (old, new))
        if len(mine) == len(other):
            yield from zip(mine, other, strict=True)


def _shapes(node: fx.Node) -> list[tuple[Any, ...]]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(v.shape) for v in values if isinstance(v, Tensor)]


def _options(value: Any, sizes: Mapping[int, list[int]]) -> list[Any]:
    """What a number could become: what sizes of it became; what it is, where some stayed or there
    is none."""
    if isinstance(value, int):
        return sorted({value, *sizes.get(value, ())}, reverse=True)
    each = itertools.product(*(_options(v, sizes) for v in value))
    return [type(value)(row) for row in itertools.islice(each, 4)]
