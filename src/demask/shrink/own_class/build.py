"""A demasked program as the caller's own network: the modules it came from, with cut tensors.

Where all that was cut can be said by shapes, a copy of the network whose tensors are the cut ones
computes the demasked program. That is proved, not assumed: the copy is captured, and its program
must be the demasked one, call by call and number by number.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.graph.capture.capture import interface_of
from demask.graph.capture.fold_constants import plain
from demask.graph.module_copy import structural_copy, without_caches
from demask.graph.program import Constant, Program
from demask.graph.provenance import Cut, Positions
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.resize import assign, bake, numbers_of, renumber, tensors_of
from demask.graph.result.restore_modules import Originals
from demask.shrink.emit.constant_store import cut
from demask.shrink.own_class.numbers import calls_of, fit_numbers, is_below
from demask.shrink.own_class.proof import Proof, Unlike, path_of
from demask.shrink.own_class.region_graphs import graphs_in
from demask.shrink.own_class.regions import regions_of

Order = Callable[[Sequence[Positions]], tuple[Positions, ...]]
MOST_ROUNDS = 4  # of putting graphs in place of parts


def own_class(model: nn.Module | ExportedProgram, proof: Proof) -> nn.Module:
    """A network of the class of `model` that computes the smaller program. Raises Unlike where
    there is none."""
    copy = _resized(model, proof, ())
    fit_numbers(copy, proof)
    return copy


def own_class_with_graphs(
    model: nn.Module, proof: Proof, originals: Originals | None, failure: Unlike
) -> tuple[nn.Module, tuple[str, ...]]:
    """The same with graphs in place of the smallest modules that more than shapes changed in, and
    the paths of those. failure: why there is no network without. Raises Unlike."""
    more: set[str] = set()
    for _ in range(MOST_ROUNDS):
        regions = regions_of(proof.after, model, more)
        if not regions and failure.place:
            more = {failure.place}
            regions = regions_of(proof.after, model, more)
        if not regions:
            break
        parts = tuple(region.path for region in regions)
        try:
            copy = _resized(model, proof, parts)
            graphs_in(copy, model, proof, regions, originals)
            fit_numbers(copy, proof, parts)
            return _without_caches(copy), parts
        except Unlike as error:
            failure = error
        inside = next((part for part in parts if is_below(failure.place, [part])), None)
        place = failure.place if inside is None else inside.rpartition(".")[0]
        if not place:
            break
        more.add(place)
    raise failure


def _without_caches(network: nn.Module) -> nn.Module:
    """A language model that generates without a cache of keys and values: graphs take none."""
    without_caches(network)
    for module in network.modules():
        options = getattr(module, "generation_config", None)
        if getattr(options, "use_cache", None):
            options.use_cache = False  # type: ignore[union-attr]
    return network


def _resized(model: nn.Module | ExportedProgram, proof: Proof, parts: Collection[str]) -> nn.Module:
    """A copy of the model with the tensors of the smaller program, and torch's modules with numbers
    that fit them. parts: modules that become graphs. Raises Unlike where that is no such network.
    """
    if isinstance(model, ExportedProgram | Demasked) or interface_of(model) is not None:
        raise Unlike(f"a {type(model).__name__} has no class of its own")
    _refuse_branches(proof.before)
    copy = structural_copy(model, share=True)
    bake(copy)
    for name in _assign(copy, proof, _by_number if not parts else _as_program):
        if not is_below(name, parts):
            raise Unlike(f"nothing of {name} is left", name.rpartition(".")[0])
    calls = calls_of(proof.after)
    for path, module in copy.named_modules(remove_duplicate=False):
        if is_below(path, parts):
            continue
        if isinstance(module, nn.MultiheadAttention) and not _is_whole(module):
            raise Unlike(f"{path} has no number for heads that are narrower than its input", path)
        if any(n is not None for n in module._parameters.values()) or path in calls:
            renumber(module, calls.get(path, ()))
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


def _assign(copy: nn.Module, proof: Proof, order: Order) -> list[str]:
    """Give the copy the tensors of the program, and copies of those that it does not read; the
    names of parameters that the network read and the program does not."""
    before, after, cuts = proof.before, proof.after, proof.cuts
    own = dict(tensors_of(copy))
    done: dict[str, Tensor] = {}
    for name, constant in after.constants.items():
        made: Tensor | None = None
        for alias in map(plain, constant.aliases or (name,)):
            if made is None:
                made = _value(own.get(alias), constant, cuts.get(name), before, order)
            if assign(copy, alias, made):
                done[alias] = made
    clones: dict[int, Tensor] = {}
    for name, old in own.items():
        if name not in done:
            positions = _beside(name, old, cuts, order)
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


def _value(
    own: Tensor | None, constant: Constant, how: Cut | None, before: Program, order: Order
) -> Tensor:
    """What of the network's own tensor a program reads, where it is cut from it: what code computes
    of a tensor before it is used (one plus a scale, the rows of a table) it computes of the cut
    one. Else the tensor of the program."""
    kept = None if own is None or how is None else _kept(own, constant, how, before)
    if own is None or kept is None:
        tensor = constant.tensor
        return nn.Parameter(tensor, constant.requires_grad) if constant.parameter else tensor
    return _like(cut(own.detach(), order(kept)), own)


def _kept(
    own: Tensor, constant: Constant, how: Cut, before: Program
) -> tuple[Positions, ...] | None:
    """The positions to keep of the network's own tensor; None if the program's holds others.

    The program may hold what code computes of the tensor: with more axes, or some of its rows. Its
    last axes are the tensor's, and where sizes differ nothing may be cut.
    """
    source = before.constants.get(how.source)
    if source is None or not torch.equal(cut(source.tensor, how.kept), constant.tensor):
        return None
    pairs = itertools.zip_longest(reversed(how.shape), reversed(how.kept), reversed(own.shape))
    kept: list[Positions] = []
    for size, positions, other in pairs:
        if size != other and positions is not None:
            return None
        kept.append(positions)
    return tuple(reversed(kept[: own.ndim]))


def _by_number(kept: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions as the network's own code has them, where a program put them in another order."""
    return tuple(None if axis is None else tuple(sorted(axis)) for axis in kept)


def _as_program(kept: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions in the order of the program: where parts are graphs, which read that."""
    return tuple(kept)


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor as a parameter, if the old one is."""
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _beside(name: str, tensor: Tensor, cuts: Mapping[str, Cut], order: Order) -> tuple[Any, ...]:
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
            kept = order(how.kept[-tensor.ndim :])
            return tuple(p if a > 1 else None for (a, _), p in zip(pairs, kept, strict=True))
    return none


@dataclass(frozen=True, slots=True)
class PreservedShape:
    """Where a program keeps a shape by more than smaller layers: the module, how ("scatter"), and
    the layers that would have to be masked alike so that it need not."""

    path: str
    effect: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.effect} at {self.path or 'the network'}{_advice([self])}"


def places_of(program: Program) -> list[PreservedShape]:
    """Where a program keeps shapes by more than smaller layers."""
    found: dict[PreservedShape, None] = {}
    for node in program.graph.nodes:
        if (effect := node.meta.get("effect")) is not None:
            sources = (source for user in node.users for source in user.all_input_nodes)
            layers = tuple(sorted({*map(_layer, sources)} - {""}))
            found.setdefault(PreservedShape(_around(node), effect, layers))
    return list(found)


def reasons_for(
    parts: Sequence[str], places: Sequence[PreservedShape], failure: Unlike
) -> list[str]:
    """Why parts are graphs, one line for each. failure: why there is no network without."""
    lines = []
    for part in parts:
        here = [place for place in places if is_below(place.path, [part])]
        effects = ", ".join(dict.fromkeys(place.effect for place in here))
        why = f"{effects}{_advice(here)}" if here else str(failure)
        lines.append(f"{part} is a graph: {why}")
    return lines


def _advice(places: Sequence[PreservedShape]) -> str:
    several = dict.fromkeys(_and(place.layers) for place in places if len(place.layers) > 1)
    return f": mask the same channels of {', or of '.join(several)}" if several else ""


def _around(node: fx.Node) -> str:
    """The module that reads what keeps a shape, or in which it stands."""
    return next(filter(None, map(path_of, node.users)), "") or path_of(node)


def constants_at_effects(program: Program) -> set[str]:
    """The tensors of the modules where a program keeps shapes by more than smaller layers."""
    paths = {_around(node) for node in program.graph.nodes if "effect" in node.meta} - {""}
    return {name for name in program.constants if name.rpartition(".")[0] in paths}


def zeros_cost(program: Program, names: Collection[str], cuts: Mapping[str, Cut]) -> int:
    """About how many numbers more a smaller program would hold if zeros of some of its tensors
    removed nothing: each whole slice of zeros, as long as the slices that are left."""
    cost = 0
    for name in names:
        how, constant = cuts.get(name), program.constants.get(name)
        if how is None or constant is None:
            continue
        whole = constant.tensor != 0
        pairs = zip(how.shape, how.kept, strict=True)
        left = [size if kept is None else len(kept) for size, kept in pairs]
        for axis, size in enumerate(left):
            others = [k for k in range(whole.ndim) if k != axis]
            zeros = whole.shape[axis] - int(whole.amax(others).sum() if others else whole.sum())
            cost += zeros * math.prod(left) // max(size, 1)
    return cost


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
        reads = any(source.op == "get_attr" for source in here.all_input_nodes)
        if reads and "effect" not in here.meta and path_of(here):
            return path_of(here)
        stack.extend(reversed(here.all_input_nodes))
    return ""


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
