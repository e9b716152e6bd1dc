"""Border maps of one size as one convolution: their kernels stacked, its output split.

    conv(x, cat(a, b)) == cat(conv(x, a), conv(x, b))

The cost of a small call is that of calling, and a deep network has a border map per layer.
`unstack_border_maps` is the inverse, for a network that is demasked again.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import schema
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS

aten = torch.ops.aten
# Most elements of one stack on the example sizes: larger ones cost memory and save no time.
ELEMENTS = 2**18
_CONVOLUTIONS = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS


def stack_border_maps(program: Program) -> Program:
    """The program with its small border maps of equal geometry computed together."""
    editor = GraphEditor(program)
    alike: dict[Any, list[list[fx.Node]]] = defaultdict(lambda: [[]])
    for node in editor.calls(*_CONVOLUTIONS):
        if _is_border(node):
            stacks = alike[_geometry(node)]
            if sum(map(_elements, [*stacks[-1], node])) > ELEMENTS:
                stacks.append([])
            stacks[-1].append(node)
    for stacks in alike.values():
        for stack in stacks:
            if len(stack) > 1:
                _stack(editor, stack)
    return editor.finish()


def unstack_border_maps(program: Program) -> Program:
    """The program with every convolution over stacked kernels split into its parts."""
    editor = GraphEditor(program)
    for node in editor.calls(*_CONVOLUTIONS):
        weights = _stacked_weights(node)
        if weights is None:
            continue
        (split,) = node.users
        arguments = schema.arguments(node)
        with editor.graph.inserting_before(node):
            parts = [editor.call_named(node.target, arguments | {"weight": w}, node) for w in weights]
        for part in list(split.users):
            k: Any = part.args[1]
            part.replace_all_uses_with(parts[k])
    return editor.finish()


def _is_border(node: fx.Node) -> bool:
    """Whether a convolution reads a channel of ones, or of ones with pads, by a stored kernel."""
    arguments = schema.arguments(node)
    plain = arguments["bias"] is None and arguments["groups"] == 1
    ones, _ = _unpadded_ones(arguments["input"])
    return plain and ones.target is aten.new_ones.default and arguments["weight"].op == "get_attr"


def _unpadded_ones(source: Any) -> tuple[Any, tuple[Any, ...]]:
    """The operand of a pad and its pads; any other value itself, without pads."""
    if source.target is aten.constant_pad_nd.default:
        return source.args[0], source.args[1:]
    return source, ()


def _geometry(node: fx.Node) -> Any:
    """What two calls must have in common to be stacked: all but their kernels."""
    arguments = schema.arguments(node)
    ones, pads = _unpadded_ones(arguments["input"])
    rest = {k: v for k, v in arguments.items() if k not in ("input", "weight")}
    kernel = fake(arguments["weight"]).shape[2:]
    shape = repr((ones.args[1:], ones.kwargs, pads))
    return (node.target, ones.target, shape, repr(rest), kernel)


def _elements(node: fx.Node) -> int:
    total = 1
    for size in fake(node).shape:
        total *= schema.example_size(size)
    return total


def _output_axis(node: fx.Node) -> int:
    return 1 if "output_padding" in schema.arguments(node) else 0


def _stack(editor: GraphEditor, nodes: list[fx.Node]) -> None:
    first, axis = nodes[0], _output_axis(nodes[0])
    weights = [schema.arguments(node)["weight"] for node in nodes]
    later = set(editor.graph.nodes)
    for node in editor.graph.nodes:
        if node is first:
            break
        later.discard(node)
    for weight in weights:
        if weight in later:
            first.prepend(weight)
    with editor.graph.inserting_before(first):
        kernel = editor.call(aten.cat.default, weights, axis)
        whole = editor.call_named(first.target, schema.arguments(first) | {"weight": kernel})
        sizes = [fake(weight).shape[axis] for weight in weights]
        parts = editor.call(aten.split_with_sizes.default, whole, sizes, 1)
        for k, node in enumerate(nodes):
            part = editor.call_for(node, operator.getitem, parts, k)
            node.replace_all_uses_with(part)


def _stacked_weights(node: fx.Node) -> list[fx.Node] | None:
    """The kernels of a stack, if the output of the call is split accordingly; else None."""
    arguments, axis = schema.arguments(node), _output_axis(node)
    weight, users = arguments["weight"], list(node.users)
    if weight.target is not aten.cat.default or arguments["groups"] != 1 or arguments["bias"] is not None:
        return None
    weights: Any = weight.args[0]
    cut = schema.arguments(weight)["dim"]
    if cut != axis or any(w.op != "get_attr" for w in weights) or len(users) != 1:
        return None
    if users[0].target is not aten.split_with_sizes.default:
        return None
    sizes = schema.arguments(users[0])
    alike = sizes["split_sizes"] == [fake(w).shape[axis] for w in weights]
    return list(weights) if alike and sizes["dim"] == 1 else None
