"""Where a program restores shapes because layers are not masked alike, and what masking them alike
would save."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.graph.program import Program, path_of
from demask.ops import schema
from demask.ops.schema import fake
from demask.shrink.own_class.numbers import is_below

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PreservedShape:
    """A module in which a program preserves a shape by more than smaller layers, and the layers
    that would have to be masked alike to avoid it."""

    path: str
    layers: tuple[str, ...]


def find_preserved_shapes(program: Program) -> list[PreservedShape]:
    """Where a program preserves shapes by more than smaller layers."""
    shapes: dict[PreservedShape, None] = {}
    for node in program.graph.nodes:
        if _has_effect(node):
            layers = set[str]().union(*map(_source_layers, (node, *node.users)))
            shapes.setdefault(PreservedShape(_reading_module(node), tuple(sorted(layers))))
    return list(shapes)


def explain(path: str, shapes: Sequence[PreservedShape]) -> str:
    """Why a module is a graph, and what would have to be masked alike."""
    here = [place for place in shapes if is_below(place.path, [path])]
    return f"smaller layers alone would keep zeros in it{advise(here)}"


def advise(shapes: Sequence[PreservedShape]) -> str:
    """Which layers would have to be masked alike, those that share one as one group; else ''."""
    groups = _groups(shapes)
    return f": mask the same channels of {'; of '.join(map(_join_words, groups))}" if groups else ""


def _groups(shapes: Sequence[PreservedShape]) -> list[list[str]]:
    groups: list[list[str]] = []
    for place in shapes:
        if len(place.layers) > 1:
            joined = [group for group in groups if set(group) & set(place.layers)]
            group = dict.fromkeys([*itertools.chain(*joined), *place.layers])
            groups = [*(other for other in groups if other not in joined), list(group)]
    return groups


def count_saved(program: Program, shapes: Sequence[PreservedShape]) -> int:
    """Parameters that a program would have fewer if each layer of a group had as many masked
    channels as now, but the same ones: of what reads the values that such layers are joined to.
    Where other values are joined to these, nothing is counted."""
    return sum(_count_saved(program, frozenset(group)) for group in _groups(shapes))


def _count_saved(program: Program, layers: frozenset[str]) -> int:
    read = {node: _parameters(program, node) for node in program.graph.nodes}
    rows = [
        _axis_size(node, 1 if w.ndim > 2 else -1)
        for node, weights in read.items()
        if path_of(node) in layers
        for w in weights.values()
        if w.ndim > 1
    ]
    stays, saved = max(rows, default=0), dict[str, float]()
    shares: dict[fx.Node, float] = {}  # of the channels of a value, those that would stay
    for node, weights in read.items():
        before = [shares[value] for value in node.all_input_nodes if value in shares]
        is_join = _has_effect(node) and not layers.isdisjoint(_source_layers(node))
        if node.target is aten.cat.default and before:
            if len(before) < len(node.all_input_nodes):
                continue
            is_join = True
        if not before and not is_join:
            continue
        share = min(before, default=1.0)
        if is_join and isinstance(axis := schema.arguments(node).get("dim"), int):
            share = min(1.0, stays / max(_axis_size(node, axis), 1))
        matrices = {name: w for name, w in weights.items() if w.ndim > 1}
        for name, weight in (matrices or weights).items():
            saved[name] = max(saved.get(name, 0.0), (1 - share) * weight.numel())
        if not matrices:
            shares[node] = share
    return round(sum(saved.values()))


def _parameters(program: Program, node: fx.Node) -> dict[str, Tensor]:
    """The parameters that a call reads, by name."""
    names = [str(value.target) for value in node.all_input_nodes if value.op == "get_attr"]
    return {name: program.constants[name].tensor for name in names if program.constants[name].parameter}


def _axis_size(node: fx.Node, axis: int) -> int:
    """The size of an axis of a value; 0 if it is dynamic, or there is none."""
    shape = getattr(node.meta.get("val"), "shape", ())
    size = shape[axis] if -len(shape) <= axis < len(shape) else 0
    return size if isinstance(size, int) else 0


def _has_effect(node: fx.Node) -> bool:
    """Whether a call does nothing but restore a shape. Border maps, which constants of one layer
    cause, are not among these."""
    return node.meta.get("effect", "border map") != "border map"


def _source_layers(node: fx.Node) -> set[str]:
    return {*map(_source_layer, node.all_input_nodes)} - {""}


def _reading_module(node: fx.Node) -> str:
    """The module that reads a node that preserves a shape, else the one that computes it."""
    return next(filter(None, map(path_of, node.users)), "") or path_of(node)


def _source_layer(node: fx.Node) -> str:
    """The nearest module with a matrix or a kernel that a value is computed from; if there is none,
    the nearest with parameters, such as a norm."""
    seen: set[fx.Node] = set()
    stack, others = [node], [""]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        path = path_of(here)
        own = (n for n in here.all_input_nodes if n.op == "get_attr")
        read = [fake(n).ndim for n in own if str(n.target).startswith(f"{path}.")]
        if path and read and "effect" not in here.meta:
            if max(read) > 1:
                return path
            others.append(path)
        stack.extend(reversed(here.all_input_nodes))
    return others[min(1, len(others) - 1)]


def _join_words(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
