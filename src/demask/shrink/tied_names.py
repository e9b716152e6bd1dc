"""Tied tensors have all their names, each for the tensor that its module reads.

torch.export reads a tied tensor under one of its names. Cut in two ways, it is two tensors, and the
embedding's rows belong under the embedding's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from demask.graph.capture.fold_constants import plain_name
from demask.graph.program import Constant, Program, copy_graph, module_of
from demask.graph.provenance import Cut
from demask.shrink.emit.constant_store import is_nested

Cuts = Mapping[str, Cut]


def name_tied_tensors(program: Program, cuts: Cuts) -> tuple[Program, dict[str, Cut]]:
    """The program with every tied tensor under original names, in the model's order: it is read
    under the first, the one that `named_parameters` of the model lists.

    A name is assigned to the tensor that calls of its module read, else to the one that has it
    already, else to the first cut of the tensor it named. Every name has its cut, whose source is
    the first name in the original.
    """
    groups = _group_tied(program)
    if not groups:
        return program, dict(cuts)
    names: dict[str, tuple[str, ...]] = {key: (key,) for key in program.constants}
    for group in groups.values():
        taken_names = {taken for key in names if key not in group for taken in names[key]}
        names |= _distribute_names(program, group, taken_names)
    graph, _ = copy_graph(program)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names[str(node.target)][0]
    constants: dict[str, Constant] = {}
    named_cuts: dict[str, Cut] = {}
    for key, own in names.items():
        constant, first = program.constants[key], own[0]
        constants[first] = replace(constant, name=first, aliases=own if len(own) > 1 else ())
        if key in cuts:
            named_cuts |= dict.fromkeys(own, _with_first_name(cuts[key], constant))
    return program.with_graph(graph, constants), named_cuts


def _group_tied(program: Program) -> dict[tuple[str, ...], list[str]]:
    """The constants that are cuts of one tied tensor, by the names that it had. A part of one (some
    groups of a convolution) has its own name, and is excluded."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key, constant in program.constants.items():
        whole = any(re.fullmatch(re.escape(a) + r"(_folded)?(_?\d+)?", key) for a in constant.aliases)
        if whole:
            groups.setdefault(tuple(map(plain_name, constant.aliases)), []).append(key)
    return groups


def _distribute_names(program: Program, group: Sequence[str], taken: set[str]) -> dict[str, tuple[str, ...]]:
    """The names of each tensor of one group: the free ones of those it had, distributed."""
    readers = {key: _reading_modules(program.graph, key) for key in group}
    names: dict[str, list[str]] = {key: [] for key in group}
    for k, alias in enumerate(program.constants[group[0]].aliases):
        module = plain_name(alias).rpartition(".")[0]
        own = next((key for key in group if program.constants[key].aliases[k] == key), group[0])
        key = next((key for key in group if module in readers[key]), own)
        name = program.constants[key].aliases[k]
        if not any(name == other or is_nested(name, other) for other in taken):
            names[key].append(name)
    used = taken | {name for own_names in names.values() for name in own_names}
    for key, own_names in names.items():
        if not own_names:
            own_names.append(_free_name(key, used))
            used.add(own_names[0])
    return {key: tuple(own_names) for key, own_names in names.items()}


def _free_name(name: str, used: set[str]) -> str:
    tries = (f"{name}_{k}" if k else name for k in range(len(used) + 1))
    return next(t for t in tries if not any(t == u or is_nested(t, u) for u in used))


def _reading_modules(graph: fx.Graph, key: str) -> set[str]:
    """The modules whose calls read a constant."""
    reads = [node for node in graph.nodes if node.op == "get_attr" and node.target == key]
    calls = [user for read in reads for user in read.users if user.meta.get("nn_module_stack")]
    return {module_of(call).partition("@")[0] for call in calls}


def _with_first_name(cut: Cut, constant: Constant) -> Cut:
    """A cut whose source, if tied, is the first of its names in the original."""
    tied = cut.source in constant.aliases
    return replace(cut, source=constant.aliases[0]) if tied else cut
