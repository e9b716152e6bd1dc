"""Constants computed from constants are computed once, and named after what they stand for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.failures import CallFailed, attributed
from demask.graph.capture.declared_masks import drawn_weights
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program
from demask.ops.entries.contraction import GROUPED

_RAW = re.compile(
    r"parametrizations\.(?P<p>[^.]+)\.original\d*$|(?P<o>[^.]+)_orig$|(?P<w>[^.]+)_[gv]$"
)
MAX_ADDED = 2**28  # elements that folding may compute, beyond those of the constants
_CREATED = re.compile(r"new_|\w+_like\b")  # what these make has no value of their operand


def folded(program: Program) -> Program:
    """The program with `weight_orig * weight_mask`, parametrizations, weight norm and every other
    subgraph over constants evaluated. A folded tensor is a parameter if one went into it, under the
    name a user would look for: `conv.weight_orig` comes back as `conv.weight`."""
    editor = GraphEditor(program)
    graph = editor.graph
    _share(editor)
    values: dict[fx.Node, Any] = {}
    room = MAX_ADDED + sum(c.tensor.numel() for c in program.constants.values())
    with torch.no_grad():
        for node in graph.nodes:
            room -= _evaluate(node, values, program, room)
    frontier = _frontier(graph, values)
    declared = declared_zeros(graph, frontier, values, program)
    constants = {str(n.target): program.constants[str(n.target)] for n in graph.nodes
                 if n.op == "get_attr" and _outlives(n, values)}  # fmt: skip
    editor.constants, made = constants, {}
    for node in frontier:
        constant = _constant(node, values[node], program, constants)
        constant = replace(constant, declared=declared.get(node))
        constants[constant.name] = made[node] = constant
    for node, constant in made.items():
        with graph.inserting_before(node):
            node.replace_all_uses_with(editor.read_constant(constant.name))
    result = editor.finish()
    for node in graph.nodes:
        if node.op == "get_attr" and not constants[str(node.target)].tensor.is_floating_point():
            node.meta["positions"] = constants[str(node.target)].tensor.cpu()
    return result


def declared_zeros(
    graph: fx.Graph, made: Sequence[fx.Node], values: Mapping[fx.Node, Any], program: Program
) -> dict[fx.Node, Tensor]:
    """Where computed weights are 0 because it was declared: whatever the parameters are that were
    not removed (two draws, of opposite signs), or since a parametrization makes it so."""
    held = {node for node in made if any(program.constants[str(n.target)].declared is not None
                                         for n in _leaves(node))}  # fmt: skip
    found = {node: values[node] == 0 for node in held}
    for sign in (1, -1) if held else ():
        other, drawn = program.with_graph(graph, drawn_weights(program, sign)), {}
        with torch.no_grad():
            for node in graph.nodes:
                _evaluate(node, drawn, other, MAX_ADDED)
        for node in held:
            if not any("parametrizations." in str(n.target) for n in _leaves(node)):
                zero = drawn[node] == 0 if node in drawn else torch.zeros((), dtype=torch.bool)
                found[node] = found[node] & zero
    return found


def _frontier(graph: fx.Graph, values: dict[fx.Node, Any]) -> list[fx.Node]:
    """Computed constants that something else reads and that are no larger than what they are
    computed from: folding never turns a row into a matrix, or a kernel into an image."""
    found: list[fx.Node] = []
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node not in values or not _outlives(node, values):
            continue
        value, leaves = values[node], _leaves(node)
        stored = leaves
        if isinstance(value, Tensor) and value.is_floating_point():
            stored = [leaf for leaf in leaves if _is_weight(leaf, values[leaf])]
        total = sum(values[leaf].numel() for leaf in stored)
        if isinstance(value, Tensor) and leaves and value.numel() <= total:
            found.append(node)
        else:
            del values[node]  # It stays a call; what it reads is now read by a live call.
    return found[::-1]


def _is_weight(leaf: fx.Node, value: Tensor) -> bool:
    """Does a constant hold numbers that are computed with? Indices do not; quantized weights do."""
    dequantized = torch.ops.demask.dequantize.default
    return value.is_floating_point() or any(
        user.target is dequantized and user.args[0] is leaf for user in leaf.users
    )


def _share(editor: GraphEditor) -> None:
    """Equal computations over constants become one: a module called twice masks twice."""
    constant: set[fx.Node] = set()
    known: dict[Any, fx.Node] = {}
    for node in list(editor.graph.nodes):
        sources = node.all_input_nodes
        if node.op == "get_attr":
            key = ("get_attr", node.target)
        elif node.op == "call_function" and sources and all(s in constant for s in sources):
            key = (node.target, repr(node.args), repr(node.kwargs))
        else:
            continue
        constant.add(node)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        if (twin := known.setdefault(key, node)) is not node:
            editor.replace(node, twin)


def _outlives(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Is a constant read by something that is not?"""
    return any(user not in values for user in node.users)


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], program: Program, room: int) -> int:
    """Compute the value of a node over constants, if it has at most `room` elements; how many."""
    if node.op == "get_attr":
        values[node] = program.constants[str(node.target)].tensor
    elif node.op == "call_function" and _foldable(node, values, room):
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        with contextlib.suppress(CallFailed), attributed(node):  # what fails here stays a call
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            leaves = pytree.tree_leaves(values[node])
            return sum(leaf.numel() for leaf in leaves if _is_tensor(leaf))
    return 0


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _foldable(node: fx.Node, values: dict[fx.Node, Any], room: int) -> bool:
    if any(source not in values for source in node.all_input_nodes):
        return False
    if node.target is torch.ops.aten.transpose.int and _is_grouped_weight(node):
        return False  # It costs nothing, and the parameter keeps the axes it has in the model.
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(isinstance(s, int) for t in tensors for s in t.shape):
        return False
    return sum(t.numel() for t in tensors) <= room


def _is_grouped_weight(node: fx.Node) -> bool:
    """Is a value read by grouped products alone, as their weights?"""
    return all(str(user.target) in GROUPED and user.args[1] is node for user in node.users)


def _constant(
    node: fx.Node, value: Tensor, program: Program, taken: dict[str, Constant]
) -> Constant:
    sources = [program.constants[str(n.target)] for n in _leaves(node)]
    parameters = [c for c in sources if c.parameter]
    main = parameters[0] if parameters else sources[0] if sources else None
    name = plain(main.name) if main else node.name
    if name in taken:
        name = _free(name, taken)
    grad = any(c.requires_grad for c in sources) and value.is_floating_point()
    aliases = tuple(map(plain, main.aliases)) if main else ()
    parameter = bool(parameters) and value.is_floating_point()
    return Constant(value.contiguous(), name, parameter, grad, aliases=aliases)


def _leaves(node: fx.Node) -> list[fx.Node]:
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen[here] = None
        if not _CREATED.match(getattr(here.target, "__name__", "")):
            stack.extend(reversed(here.all_input_nodes))
    return [n for n in seen if n.op == "get_attr"]


def plain(name: str) -> str:
    """`a.weight_orig`, `a.parametrizations.weight.original0`, `a.weight_g` -> `a.weight`."""
    match = _RAW.search(name)
    if not match:
        return name
    return name[: match.start()] + next(group for group in match.groups() if group)


def _free(name: str, taken: dict[str, Constant]) -> str:
    return next(f"{name}_folded{k or ''}" for k in range(len(taken) + 1)
                if f"{name}_folded{k or ''}" not in taken)  # fmt: skip
