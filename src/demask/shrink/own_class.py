"""A demasked program as the caller's own network: the modules it came from, with cut tensors.

Where all that was cut can be said by shapes, a copy of the network whose tensors are the cut ones
computes the demasked program. That is proved, not assumed: the copy is captured, and its program
must be the demasked one, call by call and number by number.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import DemaskError
from demask.failures import described, is_strict
from demask.graph.capture import interface_of
from demask.graph.copying import structural_copy
from demask.graph.equal import difference
from demask.graph.fold import plain
from demask.graph.program import Constant, Program
from demask.graph.provenance import Cut, Positions
from demask.graph.resize import assign, bake, has_numbers, numbers_of, renumber
from demask.graph.result import Demasked
from demask.shrink.pool import cut, module_of
from demask.shrink.pretrained import fitting_configs

Capture = Callable[[nn.Module], Iterator[Program]]
Simplify = Callable[[Program], Program]
MOST_TRIES = 64


class Unlike(DemaskError):
    """How a copy with cut tensors differs from the demasked program. place: the module where."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


def own_class(
    model: nn.Module | ExportedProgram,
    before: Program,
    after: Program,
    cuts: Mapping[str, Cut],
    run: Callable[[nn.Module], Any],
    capture: Capture,
    forms: Sequence[Simplify],
) -> nn.Module:
    """A network of the class of `model` that computes `after`, the program that `before` became.

    run: calls a network on the example. capture: the programs of a network, called as `model` was.
    forms: how programs are spelled to be compared, the cheapest first. Raises Unlike where there is
    none.
    """
    if isinstance(model, ExportedProgram | Demasked) or interface_of(model) is not None:
        raise Unlike(f"a {type(model).__name__} has no class of its own")
    _refuse_branches(before)
    copy = structural_copy(model, share=True)
    bake(copy)
    lost = _assign(copy, before, after, cuts)
    if lost:
        raise Unlike(f"nothing of {lost[0]} is left", lost[0].rpartition(".")[0])
    for path, module in copy.named_modules():
        if isinstance(module, nn.MultiheadAttention) and not _is_whole(module):
            raise Unlike(f"{path} has no number for heads that are narrower than its input", path)
    calls = _calls(after)
    for path, module in copy.named_modules(remove_duplicate=False):
        if any(n is not None for n in module._parameters.values()) or path in calls:
            renumber(module, calls.get(path, [None])[0])
    _fit_numbers(copy, before, after, cuts, run, capture, forms)
    return copy


def changed_numbers(model: Any, own: nn.Module) -> dict[str, dict[str, Any]]:
    """The numbers of modules that are others in `own` than in the model, by path and name."""
    modules, found = dict(own.named_modules()), {}
    for path, module in model.named_modules():
        twin = modules.get(path)
        held = vars(twin) if twin is not None else {}
        new = {name: held[name] for name, value in numbers_of(module).items()
               if held.get(name, value) != value}  # fmt: skip
        if new:
            found[path] = new
    return found


def _refuse_branches(program: Program) -> None:
    """Raise Unlike where the network's code may take another way at other sizes or numbers: there
    nothing is proved. Limits of tables, and sizes that must be equal, decide nothing."""
    for guard in program.guards:
        if not re.fullmatch(r"\w+ <= \d+|\(\w+\) == \(\w+\)", guard):
            raise Unlike(f"its code depends on a size ({guard})")
    for node in program.graph.find_nodes(op="placeholder"):
        if type(node.meta.get("val")) in (int, float, complex):
            raise Unlike(f"input {node.target} is a number")


def _is_whole(module: nn.MultiheadAttention) -> bool:
    """Are an attention's heads together as wide as what goes in and out?"""
    joint, width = module.in_proj_weight, module.out_proj.weight.shape
    parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    rows = [len(joint) / 3] if joint is not None else [len(p) for p in parts if p is not None]
    return width[0] == width[1] == module.embed_dim and set(rows) == {width[0]}


def _assign(copy: nn.Module, before: Program, after: Program, cuts: Mapping[str, Cut]) -> list[str]:
    """Give the copy the tensors of the program, and copies of those that it does not read; the
    names of parameters that the network read and the program does not."""
    own = dict(_tensors(copy))
    done: dict[str, Tensor] = {}
    for name, constant in after.constants.items():
        made: Tensor | None = None
        for alias in map(plain, constant.aliases or (name,)):
            if made is None:
                made = _value(own.get(alias), constant, cuts.get(name), before)
            if assign(copy, alias, made):
                done[alias] = made
    clones: dict[int, Tensor] = {}
    for name, old in own.items():
        if name not in done:
            positions = _beside(name, old, cuts)
            if id(old) not in clones:
                clones[id(old)] = _like(cut(old.detach(), positions), old)
            assign(copy, name, clones[id(old)])
    for module in copy.modules():  # tensors that are neither parameters nor buffers
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not any(value is new for new in done.values()):
                vars(module)[name] = value.detach().clone()
    read = {plain(alias) for name, c in before.constants.items() if c.parameter
            for alias in c.aliases or (name,)}  # fmt: skip
    return sorted(name for name in read - done.keys() if name in own)


def _value(own: Tensor | None, constant: Constant, how: Cut | None, before: Program) -> Tensor:
    """What of the network's own tensor a program reads, where it is cut from it: what code computes
    of a tensor before it is used (one plus a scale, the rows of a table) it computes of the cut
    one. Else the tensor of the program."""
    kept = None if own is None or how is None else _kept(own, constant, how, before)
    if own is None or kept is None:
        tensor = constant.tensor
        return nn.Parameter(tensor, constant.requires_grad) if constant.parameter else tensor
    return _like(cut(own.detach(), _in_order(kept)), own)


def _kept(
    own: Tensor, constant: Constant, how: Cut, before: Program
) -> tuple[Positions, ...] | None:
    """The positions to keep of the network's own tensor; None if the program's holds others."""
    source = before.constants.get(how.source)
    if source is None or len(how.shape) < own.ndim:
        return None
    if not torch.equal(cut(source.tensor, how.kept), constant.tensor):
        return None
    more = len(how.shape) - own.ndim  # axes that its code adds
    if how.shape[more:] != tuple(own.shape) or any(how.kept[:more]):
        return None
    return how.kept[more:]


def _in_order(kept: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions as the network's own code has them, where a program put them in another order."""
    return tuple(None if axis is None else tuple(sorted(axis)) for axis in kept)


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor as a parameter, if the old one is."""
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _tensors(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have."""
    found = [*root.named_parameters(remove_duplicate=False),
             *root.named_buffers(remove_duplicate=False)]  # fmt: skip
    return [(str(name), tensor) for name, tensor in found]


def _beside(name: str, tensor: Tensor, cuts: Mapping[str, Cut]) -> tuple[Any, ...]:
    """The positions to keep of a buffer that nothing reads by itself and that broadcasts over a cut
    tensor of its module: a mask."""
    path = name.rpartition(".")[0]
    none = (None,) * tensor.ndim
    if isinstance(tensor, nn.Parameter) or not tensor.ndim:
        return none
    for other, how in cuts.items():
        if other.rpartition(".")[0] != path or len(how.shape) < tensor.ndim:
            continue
        pairs = list(zip(tensor.shape, how.shape[-tensor.ndim :], strict=True))
        if all(a in (1, b) for a, b in pairs) and any(a == b > 1 for a, b in pairs):
            kept = _in_order(how.kept[-tensor.ndim :])
            return tuple(p if a > 1 else None for (a, _), p in zip(pairs, kept, strict=True))
    return none


def _calls(program: Program) -> dict[str, list[fx.Node]]:
    """The calls of a program by the module whose code makes them."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            found[_path(node)].append(node)
    return found


def _path(node: fx.Node) -> str:
    return module_of(node).partition("@")[0]


def places_of(program: Program) -> tuple[str, ...]:
    """Where a program keeps shapes by more than smaller layers, and what would have to be masked
    alike so that it need not."""
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        if (effect := node.meta.get("effect")) is None:
            continue
        here = _around(node) or "the network"
        layers = sorted({_layer(source) for user in node.users
                         for source in user.all_input_nodes} - {""})  # fmt: skip
        alike = f": mask the same channels of {_and(layers)}" if len(layers) > 1 else ""
        found.setdefault(f"{effect} at {here}{alike}")
    return tuple(found)


def _around(node: fx.Node) -> str:
    """The module that reads what keeps a shape, or in which it stands."""
    return next(filter(None, map(_path, node.users)), "") or _path(node)


def constants_at_effects(program: Program) -> set[str]:
    """The tensors of the modules where a program keeps shapes by more than smaller layers."""
    paths = {_around(node) for node in program.graph.nodes if "effect" in node.meta} - {""}
    return {name for name in program.constants if name.rpartition(".")[0] in paths}


def spared(program: Program, names: Collection[str]) -> Program:
    """The program with tensors whose zeros remove nothing."""
    constants = {
        name: replace(c, declared=torch.zeros(c.tensor.shape, dtype=torch.bool))
        if name in names
        else c
        for name, c in program.constants.items()
    }
    return program.with_graph(program.graph, constants)


def _layer(node: fx.Node) -> str:
    """The nearest module with parameters that a value comes from."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        if any(source.op == "get_attr" for source in here.all_input_nodes) and _path(here):
            return _path(here)
        stack.extend(reversed(here.all_input_nodes))
    return ""


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


# ------------------------------------------------------------------- numbers that code reads


@dataclass(slots=True)
class _Choice:
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


def _fit_numbers(
    copy: nn.Module,
    before: Program,
    after: Program,
    cuts: Mapping[str, Cut],
    run: Callable[[nn.Module], Any],
    capture: Capture,
    forms: Sequence[Simplify],
) -> None:
    """Set the numbers that the modules' own code reads, until the copy is proved to compute
    `after`; raises Unlike where no numbers do."""
    targets = [lazily(form, after) for form in forms]
    for _ in fitting_configs(copy, cuts):
        if _unlike(copy, targets, run, capture, forms) is None:
            return
    choices = _choices(copy, forms[0](before), targets[0](), cuts)
    for choice in choices:
        choice.use()
    failure: Unlike | None = None
    for _ in range(MOST_TRIES):
        failure = _unlike(copy, targets, run, capture, forms)
        if failure is None:
            return
        choice = _next(choices, failure.place)
        if choice is None:
            raise failure
        choice.at += 1
        choice.use()
    assert failure is not None
    raise failure


def lazily(form: Simplify, program: Program) -> Callable[[], Program]:
    """The program in a form, made when it is first asked for."""
    return functools.cache(functools.partial(form, program))


def _next(choices: Sequence[_Choice], place: str) -> _Choice | None:
    """The choice to change: of the module where something differs, or of the nearest around it."""
    while True:
        for choice in choices:
            if place in choice.paths and choice.at + 1 < len(choice.values):
                return choice
        if not place:
            return None
        place = place.rpartition(".")[0]


def _unlike(
    copy: nn.Module,
    targets: Sequence[Callable[[], Program]],
    run: Callable[[nn.Module], Any],
    capture: Capture,
    forms: Sequence[Simplify],
) -> Unlike | None:
    """How the copy fails to compute the demasked program, in any form; None where it does not."""
    first: Unlike | None = None
    stack: list[str] = []
    watched = [_watch(module, path, stack) for path, module in copy.named_modules()]
    try:
        run(copy)
        for program in capture(copy):
            node = None
            for form, target in zip(forms, targets, strict=True):
                node = difference(target(), form(program))
                if node is None:
                    return None
            assert node is not None
            place = _path(node) if node.op == "call_function" else ""
            text = f"{place or 'the network'} makes another call than shapes say ({node.target})"
            first = first or Unlike(text, place)
    except Exception as error:
        if is_strict() and not isinstance(error, DemaskError | RuntimeError | ValueError):
            raise
        place = stack[-1] if stack else ""
        first = first or Unlike(f"{place or 'the network'} does not run: {described(error)}",
                                    place)  # fmt: skip
    finally:
        for handles in watched:
            for handle in handles:
                handle.remove()
    assert first is not None
    return first


def _watch(module: nn.Module, path: str, stack: list[str]) -> list[Any]:
    """Keep the paths of the modules that run on a stack; what raises stays on top."""

    def enter(*_: Any) -> None:
        if not path:
            stack.clear()
        stack.append(path)

    def leave(*_: Any) -> None:
        del stack[-1:]

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _choices(
    copy: nn.Module, before: Program, after: Program, cuts: Mapping[str, Cut]
) -> list[_Choice]:
    """The numbers of modules that could follow from sizes that became smaller."""
    old, new = _calls(before), _calls(after)
    found: dict[Any, _Choice] = {}
    for path, module in copy.named_modules():
        numbers = numbers_of(module)
        if has_numbers(module) or not numbers:
            continue
        sizes = _sizes(path, old, new, cuts)
        options = [_options(value, sizes) for value in numbers.values()]
        if all(len(values) == 1 and values[0] == value
               for values, value in zip(options, numbers.values(), strict=True)):  # fmt: skip
            continue
        key = (type(module), repr(numbers), repr(options))
        if key not in found:
            found[key] = _Choice([], tuple(numbers), _rows(tuple(numbers.values()), options))
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
