"""Constant folding: values computed from constants become constants with the names of layers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.failures import CallFailed, attributed
from demask.graph.capture.declared_masks import draw_weights
from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program
from demask.ops import schema
from demask.ops.entries.contraction import GROUPED

_RAW = re.compile(r"parametrizations\.(?P<p>[^.]+)\.original\d*$|(?P<o>[^.]+)_orig$|(?P<w>[^.]+)_[gv]$")
MAX_ADDED = 2**28  # elements that folding may compute, beyond those of the constants
_CREATED = re.compile(r"new_|\w+_like\b")  # their outputs do not depend on the operand's values


def fold_constants(program: Program, *, parameters: bool = True) -> Program:
    """The program with `weight_orig * weight_mask`, parametrizations, weight norm and other
    subgraphs of constants evaluated. A folded tensor is a parameter if it is computed from one, and
    has the name of that parameter: `conv.weight_orig` becomes `conv.weight`.

    parameters: False: what is computed from parameters that train remains a call, and every such
    parameter itself.
    """
    editor = GraphEditor(program)
    graph = editor.graph
    _share(editor)
    values: dict[fx.Node, Any] = {}
    room = MAX_ADDED + sum(c.tensor.numel() for c in program.constants.values())
    with torch.no_grad():
        for node in graph.nodes:
            if parameters or not _trains(node, program):
                room -= _evaluate(node, values, program, room)
    frontier = _frontier(graph, values, program)
    declared = find_declared_zeros(graph, frontier, values, program)
    constants = {
        str(n.target): program.constants[str(n.target)]
        for n in graph.nodes
        if n.op == "get_attr" and _is_read_by_live_node(n, values)
    }
    editor.constants, constants_by_node = constants, {}
    for node in frontier:
        constant = _constant(node, values[node], program, constants)
        constant = replace(constant, declared=declared.get(node))
        constants[constant.name] = constants_by_node[node] = constant
    for node, constant in constants_by_node.items():
        with graph.inserting_before(node):
            node.replace_all_uses_with(editor.read_constant(constant.name))
    result = editor.finish()
    for node in graph.nodes:
        if node.op == "get_attr" and not constants[str(node.target)].tensor.is_floating_point():
            node.meta["positions"] = constants[str(node.target)].tensor.cpu()
    return result


def find_declared_zeros(
    graph: fx.Graph, frontier: Sequence[fx.Node], values: Mapping[fx.Node, Any], program: Program
) -> dict[fx.Node, Tensor]:
    """By node, where computed weights are declared zeros: those that are 0 for all values of the
    remaining parameters (two random draws of opposite signs are tried), or whose parametrization
    computes 0."""
    candidates = {
        node for node in frontier if any(program.constants[str(n.target)].declared is not None for n in _leaves(node))
    }
    zeros = {node: values[node] == 0 for node in candidates}
    for sign in (1, -1) if candidates else ():
        other, drawn = program.with_graph(graph, draw_weights(program, sign)), {}
        with torch.no_grad():
            for node in graph.nodes:
                _evaluate(node, drawn, other, MAX_ADDED)
        for node in candidates:
            if not any("parametrizations." in str(n.target) for n in _leaves(node)):
                zero = drawn[node] == 0 if node in drawn else torch.zeros((), dtype=torch.bool)
                zeros[node] = zeros[node] & zero
    return zeros


def _frontier(graph: fx.Graph, values: dict[fx.Node, Any], program: Program) -> list[fx.Node]:
    """The computed constants with other readers that are no larger than the constants they are
    computed from: folding never expands a row to a matrix, or a kernel to an image. Those that share
    such constants are together no larger than what they replace: it stores no weight twice, except for
    what a parametrization computes, which its module has as a weight."""
    calls = [node for node in reversed(list(graph.nodes)) if node.op == "call_function" and node in values]
    refused: set[fx.Node] = set()
    while True:
        frontier: dict[fx.Node, list[fx.Node]] = {}  # with the constants that it is computed from
        folded = dict(values)
        for node in calls:
            if not _is_read_by_live_node(node, folded):
                continue
            value, leaves = folded[node], _leaves(node)
            stored = leaves
            if isinstance(value, Tensor) and value.is_floating_point():
                stored = [leaf for leaf in leaves if _is_weight(leaf, folded[leaf])]
            is_small = isinstance(value, Tensor) and value.numel() <= sum(folded[leaf].numel() for leaf in stored)
            if is_small and leaves and node not in refused:
                frontier[node] = stored
            else:
                del folded[node]  # It remains a call, which reads its operands.
        growing = [nodes for nodes in _sharing(frontier) if _grows(nodes, frontier, folded)]
        stored_twice = [[n for n in nodes if not _is_parametrized(frontier[n], program)][:1] for nodes in growing]
        if not any(stored_twice):
            break
        refused.update(*stored_twice)
    for node in values.keys() - folded.keys():
        del values[node]
    return [*frontier][::-1]


def _is_parametrized(leaves: Sequence[fx.Node], program: Program) -> bool:
    """Whether one of the constants is what a parametrization computes a weight from, under any of its names."""
    constants = [program.constants[str(leaf.target)] for leaf in leaves]
    return any(_RAW.search(name) for constant in constants for name in (constant.name, *constant.aliases))


def _sharing(frontier: Mapping[fx.Node, Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """The computed constants in groups that share no constant that they are computed from."""
    group_of: dict[fx.Node, list[fx.Node]] = {}
    for node, leaves in frontier.items():
        groups = {id(group): group for leaf in (node, *leaves) if (group := group_of.get(leaf)) is not None}
        merged = [member for group in groups.values() for member in group] + [node]
        for member in merged:
            group_of |= dict.fromkeys((member, *frontier[member]), merged)
    return list({id(group): group for group in group_of.values()}.values())


def _grows(nodes: Sequence[fx.Node], frontier: Mapping[fx.Node, Sequence[fx.Node]], values: dict[fx.Node, Any]) -> bool:
    """Whether floating-point constants are together larger than those that nothing else reads then."""
    replaced = {leaf for node in nodes for leaf in frontier[node] if not _is_read_by_live_node(leaf, values)}
    added = [values[node] for node in nodes if values[node].is_floating_point()]
    return bool(added) and sum(v.numel() for v in added) > sum(values[leaf].numel() for leaf in replaced)


def _is_weight(leaf: fx.Node, value: Tensor) -> bool:
    """Whether a constant contains weights, also quantized ones; indices are no weights."""
    dequantized = torch.ops.demask.dequantize.default
    return value.is_floating_point() or any(user.target is dequantized and user.args[0] is leaf for user in leaf.users)


def _share(editor: GraphEditor) -> None:
    """Merge equal calls on constants, in place: a module that is called twice masks twice."""
    constant: set[fx.Node] = set()
    first_calls: dict[Any, fx.Node] = {}
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
        if (twin := first_calls.setdefault(key, node)) is not node:
            editor.replace(node, twin)


def _is_read_by_live_node(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a node that is not constant reads a constant."""
    return any(user not in values for user in node.users)


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], program: Program, room: int) -> int:
    """Store the value of a node in `values` if its operands are constant and it has at most `room`
    elements; the number of its elements."""
    if node.op == "get_attr":
        values[node] = program.constants[str(node.target)].tensor
    elif node.op == "call_function" and _foldable(node, values, room):
        with contextlib.suppress(CallFailed), attributed(node):  # what fails here stays a call
            values[node] = schema.call_on(node, values.__getitem__)
            leaves = pytree.tree_leaves(values[node])
            return sum(leaf.numel() for leaf in leaves if _is_tensor(leaf))
    return 0


def _trains(node: fx.Node, program: Program) -> bool:
    return node.op == "get_attr" and program.constants[str(node.target)].trains


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _foldable(node: fx.Node, values: dict[fx.Node, Any], room: int) -> bool:
    if any(source not in values for source in node.all_input_nodes):
        return False
    if node.target is torch.ops.aten.transpose.int and _is_grouped_weight(node):
        return False  # It costs nothing, and the parameter retains its axes of the model.
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or not all(isinstance(s, int) for t in tensors for s in t.shape):
        return False
    return sum(t.numel() for t in tensors) <= room


def _is_grouped_weight(node: fx.Node) -> bool:
    """Whether a value is read only by grouped products, as their weights."""
    return all(str(user.target) in GROUPED and user.args[1] is node for user in node.users)


def _constant(node: fx.Node, value: Tensor, program: Program, taken: dict[str, Constant]) -> Constant:
    sources = [program.constants[str(n.target)] for n in _leaves(node)]
    parameters = [c for c in sources if c.parameter]
    main = parameters[0] if parameters else sources[0] if sources else None
    name = plain_name(main.name) if main else node.name
    if name in taken:
        name = _free(name, taken)
    grad = any(c.requires_grad for c in sources) and value.is_floating_point()
    aliases = tuple(map(plain_name, main.aliases)) if main else ()
    parameter = bool(parameters) and value.is_floating_point()
    return Constant(value.contiguous(), name, parameter, grad, aliases=aliases)


def _leaves(node: fx.Node) -> list[fx.Node]:
    """The constants that a node is computed from."""
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen[current] = None
        if not _CREATED.match(getattr(current.target, "__name__", "")):
            stack.extend(reversed(current.all_input_nodes))
    return [n for n in seen if n.op == "get_attr"]


def plain_name(name: str) -> str:
    """`a.weight_orig`, `a.parametrizations.weight.original0`, `a.weight_g` -> `a.weight`."""
    match = _RAW.search(name)
    if not match:
        return name
    return name[: match.start()] + next(group for group in match.groups() if group)


def _free(name: str, taken: dict[str, Constant]) -> str:
    return next(f"{name}_folded{k or ''}" for k in range(len(taken) + 1) if f"{name}_folded{k or ''}" not in taken)
