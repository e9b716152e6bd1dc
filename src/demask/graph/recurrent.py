"""Recurrent calls of one layer and one direction each: the form that has an entry in the table.

backward(x) == flip(forward(flip(x)))        along time
layers(x)   == layer_n(... layer_1(x))       directions of a layer joined along features
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from demask.graph.build import Builder, mode_of
from demask.graph.program import Program, copied
from demask.ops import schema
from demask.ops.recurrent import GATES, LSTM, weights_of

aten = torch.ops.aten


def layered(program: Program) -> Program:
    """The program with every recurrent call of several layers or directions as calls of one."""
    if not any(map(_splits, program.graph.nodes)):
        return program
    graph, _ = copied(program)
    build = Builder(graph, mode_of(graph))
    for node in list(graph.nodes):
        if _splits(node):
            with graph.inserting_before(node):
                _split(build, node)
    return program.with_graph(graph)


def _splits(node: fx.Node) -> bool:
    """Has a recurrent call several layers or directions, and no dropout between them?"""
    if str(node.target) not in GATES:
        return False
    found = schema.arguments(node)
    parts = found["num_layers"] > 1 or found["bidirectional"]
    return parts and not (found["train"] and found["dropout"])


def _split(build: Builder, node: fx.Node) -> None:
    """Replace a call's outputs by those of one call per layer and direction."""
    found = schema.arguments(node)
    count, two = weights_of(node), 2 if found["bidirectional"] else 1
    time = 1 if found["batch_first"] else 0
    x, ends = found["input"], []
    for layer in range(found["num_layers"]):
        made = []
        for direction in range(two):
            k = layer * two + direction
            params = found["params"][k * count : (k + 1) * count]
            out, *states = _part(build, node, x, k, list(params), time if direction else None)
            made.append(out)
            ends.append(states)
        x = made[0] if two == 1 else _made(build, node, aten.cat.default, made, 2)
    joined = [
        _made(build, node, aten.cat.default, list(parts), 0) for parts in zip(*ends, strict=True)
    ]
    for user in list(node.users):
        user.replace_all_uses_with([x, *joined][user.args[1]])  # type: ignore[index]
        build.graph.erase_node(user)
    build.graph.erase_node(node)
    for end in joined:
        if not end.users:
            build.graph.erase_node(end)


def _part(
    build: Builder, node: fx.Node, x: fx.Node, k: int, params: list[Any], flipped: int | None
) -> list[fx.Node]:
    """The outputs of layer and direction number k. flipped: the axis along which time runs
    backward."""
    found = schema.arguments(node)
    given = found["hx"] if isinstance(found["hx"], (list, tuple)) else [found["hx"]]
    states = [_made(build, node, aten.slice.Tensor, h, 0, k, k + 1) for h in given]
    if flipped is not None:
        x = _made(build, node, aten.flip.default, x, [flipped])
    found |= {"input": x, "hx": states if str(node.target) == LSTM else states[0]}
    found |= {"params": params, "num_layers": 1, "dropout": 0.0, "bidirectional": False}
    args, kwargs = schema.call(node.target, found)
    call = _made(build, node, node.target, *args, **kwargs)
    parts = [build.call(operator.getitem, call, i) for i in range(len(states) + 1)]
    if flipped is not None:
        parts[0] = _made(build, node, aten.flip.default, parts[0], [flipped])
    return parts


def _made(build: Builder, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call that stands, in the module's code, where `node` stood."""
    made = build.call(target, *args, **kwargs)
    made.meta = {**node.meta, **made.meta}
    return made
