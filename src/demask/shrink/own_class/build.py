"""Builds a demasked program as the caller's own network: the same modules, with cut tensors.

Where every cut is expressed by shapes, a copy of the network with the cut tensors computes the
demasked program. That is proved, not assumed: the copy is captured, and its program must equal the
demasked one, call by call and number by number.
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

from demask.graph.capture.capture import recorded_interface
from demask.graph.capture.fold_constants import plain_name
from demask.graph.module_copy import structural_copy, without_caches
from demask.graph.program import Constant, Program
from demask.graph.provenance import Cut, Positions
from demask.graph.result.demasked_module import Demasked
from demask.graph.result.resize import (
    assign_tensor,
    numbers_of,
    remove_parametrizations,
    tensors_of,
    update_attributes,
)
from demask.graph.result.restore_modules import Originals
from demask.shrink.emit.constant_store import cut
from demask.shrink.own_class.numbers import calls_of, fit_numbers, is_below
from demask.shrink.own_class.proof import ProgramMismatch, Proof, path_of
from demask.shrink.own_class.region_graphs import insert_graphs
from demask.shrink.own_class.regions import regions_of

Order = Callable[[Sequence[Positions]], tuple[Positions, ...]]
MOST_ROUNDS = 4  # attempts to replace modules by graphs


def own_class(model: nn.Module | ExportedProgram, proof: Proof) -> nn.Module:
    """A network of the class of `model` that computes the smaller program. Raises ProgramMismatch
    where there is none."""
    copy = _resize(model, proof, ())
    fit_numbers(copy, proof)
    return copy


def own_class_with_graphs(
    model: nn.Module, proof: Proof, originals: Originals | None, failure: ProgramMismatch
) -> tuple[nn.Module, tuple[str, ...]]:
    """Such a network with graphs in place of the smallest modules in which more than shapes
    changed, and their paths. failure: why there is no network without graphs. Raises
    ProgramMismatch."""
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
            copy = _resize(model, proof, parts)
            insert_graphs(copy, model, proof, regions, originals)
            fit_numbers(copy, proof, parts)
            return _without_caches(copy), parts
        except ProgramMismatch as error:
            failure = error
        inside = next((part for part in parts if is_below(failure.place, [part])), None)
        place = failure.place if inside is None else inside.rpartition(".")[0]
        if not place:
            break
        more.add(place)
    raise failure


def _without_caches(network: nn.Module) -> nn.Module:
    """The network, set to generate without a cache of keys and values: graphs accept none."""
    without_caches(network)
    for module in network.modules():
        options = getattr(module, "generation_config", None)
        if getattr(options, "use_cache", None):
            options.use_cache = False  # type: ignore[union-attr]
    return network


def _resize(model: nn.Module | ExportedProgram, proof: Proof, parts: Collection[str]) -> nn.Module:
    """A copy of the model with the tensors of the smaller program, and torch's modules with numbers
    that fit them. parts: modules that become graphs. Raises ProgramMismatch where there is no such
    network."""
    if isinstance(model, ExportedProgram | Demasked) or recorded_interface(model) is not None:
        raise ProgramMismatch(f"a {type(model).__name__} has no class of its own")
    _refuse_branches(proof.before)
    copy = structural_copy(model, share=True)
    remove_parametrizations(copy)
    for name in _assign(copy, proof, _ascending if not parts else _unchanged):
        if not is_below(name, parts):
            raise ProgramMismatch(f"nothing of {name} is left", name.rpartition(".")[0])
    calls = calls_of(proof.after)
    for path, module in copy.named_modules(remove_duplicate=False):
        if is_below(path, parts):
            continue
        if isinstance(module, nn.MultiheadAttention) and not _is_whole(module):
            raise ProgramMismatch(
                f"{path} has no attribute for heads that are narrower than its input", path
            )
        if any(n is not None for n in module._parameters.values()) or path in calls:
            update_attributes(module, calls.get(path, ()))
    return copy


def changed_numbers(model: Any, own: nn.Module) -> dict[str, dict[str, Any]]:
    """The number attributes of modules that differ in `own` from the model, by path and name."""
    modules, changed = dict(own.named_modules()), {}
    for path, module in model.named_modules():
        twin = modules.get(path)
        attributes = vars(twin) if twin is not None else {}
        new = {name: attributes[name] for name, value in numbers_of(module).items()
               if attributes.get(name, value) != value}  # fmt: skip
        if new:
            changed[path] = new
    return changed


def _refuse_branches(program: Program) -> None:
    """Raise ProgramMismatch where the network's code may branch differently at other sizes or
    numbers: there nothing is proved. Limits of tables, and sizes that must be equal, decide
    nothing."""
    for guard in program.guards:
        if not re.fullmatch(r"\w+ <= \d+|\(\w+\) == \(\w+\)", guard):
            raise ProgramMismatch(f"its code depends on a size ({guard})")
    for node in program.graph.find_nodes(op="placeholder"):
        if type(node.meta.get("val")) in (int, float, complex):
            raise ProgramMismatch(f"input {node.target} is a number")


def _is_whole(module: nn.MultiheadAttention) -> bool:
    """Whether an attention's heads together are as wide as its input and output."""
    joint, width = module.in_proj_weight, module.out_proj.weight.shape
    parts = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    rows = [len(joint) / 3] if joint is not None else [len(p) for p in parts if p is not None]
    return width[0] == width[1] == module.embed_dim and set(rows) == {width[0]}


def _assign(copy: nn.Module, proof: Proof, order: Order) -> list[str]:
    """Assign the tensors of the program to the copy, and copies of those that it does not read;
    returns the names of parameters that the network read and the program does not."""
    before, after, cuts = proof.before, proof.after, proof.cuts
    own = dict(tensors_of(copy))
    assigned: dict[str, Tensor] = {}
    for name, constant in after.constants.items():
        tensor: Tensor | None = None
        for alias in map(plain_name, constant.aliases or (name,)):
            if tensor is None:
                tensor = _cut_value(own.get(alias), constant, cuts.get(name), before, order)
            if assign_tensor(copy, alias, tensor):
                assigned[alias] = tensor
    clones: dict[int, Tensor] = {}
    for name, old in own.items():
        if name not in assigned:
            positions = _mask_positions(name, old, cuts, order)
            if id(old) not in clones:
                clones[id(old)] = _as_parameter_like(cut(old.detach(), positions), old)
            assign_tensor(copy, name, clones[id(old)])
    for module in copy.modules():  # tensors that are neither parameters nor buffers
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not any(value is new for new in assigned.values()):
                vars(module)[name] = value.detach().clone()
    read = {plain_name(alias) for name, c in before.constants.items() if c.parameter
            for alias in c.aliases or (name,)}  # fmt: skip
    return sorted(name for name in read - assigned.keys() if name in own)


def _cut_value(
    own: Tensor | None, constant: Constant, how: Cut | None, before: Program, order: Order
) -> Tensor:
    """The tensor for a constant of the program: a cut of the network's own tensor, if the constant
    is computed from it (one plus a scale, the rows of a table), so that the code computes the same
    from the cut; else the constant itself."""
    positions = (
        None if own is None or how is None else _remaining_positions(own, constant, how, before)
    )
    if own is None or positions is None:
        tensor = constant.tensor
        return nn.Parameter(tensor, constant.requires_grad) if constant.parameter else tensor
    return _as_parameter_like(cut(own.detach(), order(positions)), own)


def _remaining_positions(
    own: Tensor, constant: Constant, how: Cut, before: Program
) -> tuple[Positions, ...] | None:
    """The positions that remain of the network's own tensor; None if the program's constant
    differs.

    The constant may be computed from the tensor: with more axes, or some of its rows. Its last axes
    are the tensor's, and nothing may be cut where sizes differ.
    """
    source = before.constants.get(how.source)
    if source is None or not torch.equal(cut(source.tensor, how.kept), constant.tensor):
        return None
    pairs = itertools.zip_longest(reversed(how.shape), reversed(how.kept), reversed(own.shape))
    remaining: list[Positions] = []
    for size, positions, other in pairs:
        if size != other and positions is not None:
            return None
        remaining.append(positions)
    return tuple(reversed(remaining[: own.ndim]))


def _ascending(positions: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions in ascending order, as the network's own code has them."""
    return tuple(None if axis is None else tuple(sorted(axis)) for axis in positions)


def _unchanged(positions: Sequence[Positions]) -> tuple[Positions, ...]:
    """Positions in the order of the program, which graphs in place of modules read."""
    return tuple(positions)


def _as_parameter_like(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor as a parameter, if the old one is."""
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _mask_positions(
    name: str, tensor: Tensor, cuts: Mapping[str, Cut], order: Order
) -> tuple[Any, ...]:
    """The positions that remain of a buffer that is never read by itself and that broadcasts over a
    cut tensor of its module: a mask."""
    path = name.rpartition(".")[0]
    none = (None,) * tensor.ndim
    if isinstance(tensor, nn.Parameter) or not tensor.ndim:
        return none
    for other, how in cuts.items():
        if other.rpartition(".")[0] != path or len(how.shape) < tensor.ndim:
            continue
        pairs = list(zip(tensor.shape, how.shape[-tensor.ndim :], strict=True))
        if all(a in (1, b) for a, b in pairs) and any(a == b > 1 for a, b in pairs):
            remaining = order(how.kept[-tensor.ndim :])
            return tuple(p if a > 1 else None for (a, _), p in zip(pairs, remaining, strict=True))
    return none


@dataclass(frozen=True, slots=True)
class PreservedShape:
    """A place where a program preserves a shape by more than smaller layers: the module, the effect
    ("scatter"), and the layers that would have to be masked alike to avoid it."""

    path: str
    effect: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.effect} at {self.path or 'the network'}{_advice([self])}"


def find_preserved_shapes(program: Program) -> list[PreservedShape]:
    """The places where a program preserves shapes by more than smaller layers."""
    shapes: dict[PreservedShape, None] = {}
    for node in program.graph.nodes:
        if (effect := node.meta.get("effect")) is not None:
            sources = (source for user in node.users for source in user.all_input_nodes)
            layers = tuple(sorted({*map(_source_layer, sources)} - {""}))
            shapes.setdefault(PreservedShape(_reading_module(node), effect, layers))
    return list(shapes)


def explain_graphs(
    parts: Sequence[str], shapes: Sequence[PreservedShape], failure: ProgramMismatch
) -> list[str]:
    """Why modules are graphs, one line for each. failure: why the network needs any."""
    lines = []
    for part in parts:
        here = [place for place in shapes if is_below(place.path, [part])]
        effects = ", ".join(dict.fromkeys(place.effect for place in here))
        why = f"{effects}{_advice(here)}" if here else str(failure)
        lines.append(f"{part} is a graph: {why}")
    return lines


def _advice(shapes: Sequence[PreservedShape]) -> str:
    several = dict.fromkeys(_join_words(place.layers) for place in shapes if len(place.layers) > 1)
    return f": mask the same channels of {', or of '.join(several)}" if several else ""


def _reading_module(node: fx.Node) -> str:
    """The module that reads a node that preserves a shape, else the one that computes it."""
    return next(filter(None, map(path_of, node.users)), "") or path_of(node)


def effect_constants(program: Program) -> set[str]:
    """The tensors of the modules where a program preserves shapes by more than smaller layers."""
    paths = {_reading_module(node) for node in program.graph.nodes if "effect" in node.meta} - {""}
    return {name for name in program.constants if name.rpartition(".")[0] in paths}


def count_zeros(program: Program, names: Collection[str], cuts: Mapping[str, Cut]) -> int:
    """About how many more numbers a smaller program would store if zeros of some of its tensors
    removed nothing: each whole slice of zeros, as long as the remaining slices."""
    cost = 0
    for name in names:
        how, constant = cuts.get(name), program.constants.get(name)
        if how is None or constant is None:
            continue
        whole = constant.tensor != 0
        pairs = zip(how.shape, how.kept, strict=True)
        left = [size if positions is None else len(positions) for size, positions in pairs]
        for axis, size in enumerate(left):
            others = [k for k in range(whole.ndim) if k != axis]
            zeros = whole.shape[axis] - int(whole.amax(others).sum() if others else whole.sum())
            cost += zeros * math.prod(left) // max(size, 1)
    return cost


def retain_zeros(program: Program, names: Collection[str]) -> Program:
    """The program with tensors whose zeros remove nothing."""
    constants = {
        name: replace(c, declared=torch.zeros(c.tensor.shape, dtype=torch.bool))
        if name in names
        else c
        for name, c in program.constants.items()
    }
    return program.with_graph(program.graph, constants)


def _source_layer(node: fx.Node) -> str:
    """The nearest module with parameters that a value is computed from."""
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


def _join_words(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
