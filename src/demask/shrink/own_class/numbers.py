"""Number attributes that modules' own code reads, fitted to tensors that became smaller."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from demask.graph.program import Program, path_of
from demask.graph.provenance import Cut
from demask.graph.result.resize import has_numbers, numbers_of
from demask.shrink.own_class.pretrained import fitting_configs
from demask.shrink.own_class.proof import ProgramMismatch, Proof

MOST_TRIES = 64


def fit_numbers(network: nn.Module, proof: Proof) -> None:
    """Set the numbers that the modules' own code reads, such that the network is proved to compute
    the smaller program; raises ProgramMismatch where no numbers do."""
    for _ in fitting_configs(network):
        if proof.find_difference(network) is None:
            return
    choices = _choices(network, proof)
    for choice in choices:
        choice.use()
    failure: ProgramMismatch | None = None
    for _ in range(MOST_TRIES):
        failure = proof.find_difference(network)
        if failure is None:
            return
        choice = _choice_at(choices, failure.place)
        if choice is None:
            break
        choice.current += 1
        choice.use()
    assert failure is not None
    try:
        raise failure
    finally:
        del failure  # its traceback has this frame: the cycle would keep the network in memory


def is_below(path: str, parts: Collection[str]) -> bool:
    """Whether a path leads to one of some modules, or inside one."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def calls_of(program: Program) -> dict[str, list[fx.Node]]:
    """The calls of a program by the module whose code contains them."""
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            calls[path_of(node)].append(node)
    return calls


@dataclass(slots=True)
class _NumberChoice:
    """The possible numbers of modules of one class that were cut alike: attributes, and their
    values in the order of trial; `current` is the index of the current ones."""

    modules: list[nn.Module]
    names: tuple[str, ...]
    values: list[tuple[Any, ...]]
    current: int = 0
    paths: list[str] = field(default_factory=list)

    def use(self) -> None:
        for module in self.modules:
            for name, value in zip(self.names, self.values[self.current], strict=True):
                setattr(module, name, value)


def _choice_at(choices: Sequence[_NumberChoice], place: str) -> _NumberChoice | None:
    """The choice to change: of the module with the difference, or of the nearest one around it."""
    while True:
        for choice in choices:
            if place in choice.paths and choice.current + 1 < len(choice.values):
                return choice
        if not place:
            return None
        place = place.rpartition(".")[0]


def _choices(network: nn.Module, proof: Proof) -> list[_NumberChoice]:
    """The numbers of modules that could follow from sizes that became smaller."""
    old, new = calls_of(proof.forms[0](proof.before)), calls_of(proof.target(0))
    choices: dict[Any, _NumberChoice] = {}
    for path, module in network.named_modules():
        numbers = numbers_of(module)
        if has_numbers(module) or not numbers:
            continue
        sizes = _sizes(path, old, new, proof.cuts)
        options = [_possible_values(value, sizes) for value in numbers.values()]
        if all(
            len(values) == 1 and values[0] == value for values, value in zip(options, numbers.values(), strict=True)
        ):
            continue
        key = (type(module), repr(numbers), repr(options))
        if key not in choices:
            choices[key] = _NumberChoice([], tuple(numbers), _combinations(tuple(numbers.values()), options))
        choices[key].modules.append(module)
        choices[key].paths.append(path)
    return list(choices.values())


def _combinations(old: tuple[Any, ...], options: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Possible combinations of numbers, those with fewest changes first: a number that the call
    does not read (such as the index of the layer) stays."""
    rows = itertools.islice(itertools.product(*options), 2**14)

    def changes(row: tuple[Any, ...]) -> int:
        return sum(a != b for a, b in zip(row, old, strict=True))

    return sorted(rows, key=changes)[:MOST_TRIES]


def _sizes(
    path: str, old: Mapping[str, list[fx.Node]], new: Mapping[str, list[fx.Node]], cuts: Mapping[str, Cut]
) -> dict[int, list[int]]:
    """New sizes in a module by old size: of its tensors, its layers, and computed values."""
    new_sizes: dict[int, dict[int, None]] = defaultdict(dict)

    def note(a: Any, b: Any) -> None:
        if isinstance(a, int) and isinstance(b, int):
            new_sizes[a].setdefault(b)

    for name, cut in cuts.items():
        holder = name.rpartition(".")[0]
        if path in (holder, holder.rpartition(".")[0]):
            for size, positions in zip(cut.shape, cut.kept, strict=True):
                note(size, size if positions is None else len(positions))
    for place in [place for place in old if path in (place, place.rpartition(".")[0])]:
        for a, b in _pair_calls(old[place], new.get(place, [])):
            for one, other in zip(_shapes(a), _shapes(b), strict=False):
                for m, n in zip(one, other, strict=False):
                    note(m, n)
    return {a: list(bs) for a, bs in new_sizes.items()}


def _pair_calls(old: list[fx.Node], new: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of calls of one module in two programs, of each op with equally many calls."""
    for target in dict.fromkeys(node.target for node in old):
        mine, other = ([n for n in calls if n.target is target] for calls in (old, new))
        if len(mine) == len(other):
            yield from zip(mine, other, strict=True)


def _shapes(node: fx.Node) -> list[tuple[Any, ...]]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(v.shape) for v in values if isinstance(v, Tensor)]


def _possible_values(value: Any, sizes: Mapping[int, list[int]]) -> list[Any]:
    """Possible values of a number: what its size became, and itself if some size stayed."""
    if isinstance(value, int):
        return sorted({value, *sizes.get(value, ())}, reverse=True)
    each = itertools.product(*(_possible_values(v, sizes) for v in value))
    return [type(value)(row) for row in itertools.islice(each, 4)]
