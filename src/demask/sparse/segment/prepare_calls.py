"""Calls of a graph rewritten as calls that segments can hold, before regions are sought.

Attention as segments hold it: with its usual scale, and no mask or one that is added to the
scores of each head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.editor import GraphEditor, drop_unread
from demask.graph.queries import has_shape, input_dependent
from demask.ops import schema
from demask.ops.schema import fake, same_size
from demask.ops.traits import RESHAPES

aten = torch.ops.aten


SAME = 1e-6  # relative difference of scales, below which they are the same in float32


def prepare_attention(editor: GraphEditor) -> None:
    """Rewrite the attention of a graph for segments."""
    for node in editor.calls(aten.scaled_dot_product_attention.default):
        arguments = schema.arguments(node)
        query, key, mask = (arguments[name] for name in ("query", "key", "attn_mask"))
        if arguments["dropout_p"] or arguments["enable_gqa"]:
            continue
        scale, width = arguments["scale"], fake(query).shape[-1]
        if scale is not None and (type(width) is not int or type(scale) is not float):
            continue
        dtype = fake(query).dtype
        rows, columns = fake(query).shape[-2], fake(key).shape[-2]
        if arguments["is_causal"] and not (type(rows) is type(columns) is int):
            continue
        with editor.graph.inserting_before(node):
            if scale is not None and abs(scale * math.sqrt(width) - 1) > SAME:
                query = editor.call(aten.mul.Tensor, query, scale * math.sqrt(width))
            if arguments["is_causal"]:
                causal = torch.full((rows, columns), -math.inf, dtype=dtype).triu(1)
                mask = editor.add_constant(f"{node.name}_mask", causal, node)
            elif mask is not None:
                mask = _added(editor, mask, node, dtype)
            if mask is not None:
                sizes = [*editor.sizes(query)[:-1], editor.sizes(key)[-2]]
                mask = editor.call(aten.expand.default, mask, sizes)
            new = editor.insert(node, node, node.target, query, key, arguments["value"], mask)
        editor.replace(node, new)
    drop_unread(editor.graph)


def _added(editor: GraphEditor, mask: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The mask that is added to scores; None for one that masks nothing."""
    if fake(mask).dtype is not torch.bool:
        return mask
    known = _elements(editor, mask)
    if known is not None and bool(known.all()):
        return None
    numbers = [
        editor.add_constant(f"{node.name}_{name}", torch.tensor(number, dtype=dtype), node)
        for name, number in (("seen", 0.0), ("masked", -math.inf))
    ]
    return editor.call(aten.where.self, mask, *numbers)


def _elements(editor: GraphEditor, node: Any) -> Tensor | None:
    """A tensor with the elements of a constant value, perhaps repeated; None for another value."""
    while node.target is aten.expand.default or node.target in RESHAPES:
        node = node.args[0]
    known: dict[fx.Node, Any] = {}

    def value(of: Any) -> Any:
        if of not in known:
            if of.op == "call_function":
                args, kwargs = map_arg((of.args, of.kwargs), value)
                known[of] = of.target(*args, **kwargs)
            elif (constant := editor.tensor(of)) is not None:
                known[of] = constant
            else:
                raise LookupError(of.name)
        return known[of]

    try:
        result = value(node)
    except LookupError:
        return None
    return result if isinstance(result, Tensor) else None


def prepare_calls(editor: GraphEditor) -> None:
    """Rewrite calls of a graph for segments."""
    prepare_attention(editor)
    _slice_splits(editor)
    _select_added(editor)
    _expand_static_addends(editor)
    _read_sizes_from_inputs(editor)
    for node in editor.calls(aten.dropout.default):
        if not schema.draws_random_numbers(node):  # often between a layer and a residual sum
            editor.replace(node, node.args[0])


def _read_sizes_from_inputs(editor: GraphEditor) -> None:
    """Read dynamic sizes from inputs if possible: a segment does not return all of its values."""
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in editor.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for axis, size in enumerate(value.shape):
                if not isinstance(size, int):
                    known.setdefault(size.node.expr, (node, axis))
    for node in editor.calls(aten.sym_size.int):
        size = node.meta["val"]
        if not isinstance(size, int) and size.node.expr in known:
            node.args = known[size.node.expr]


def _slice_splits(editor: GraphEditor) -> None:
    """Replace splits of channels, whose value is a list, by slices."""
    for node in editor.calls(aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default):
        parts, axis = fake(node), schema.arguments(node)["dim"]
        sizes = [part.shape[axis] for part in parts]
        if not all(type(size) is int for size in sizes):
            continue
        for user in list(node.users):
            number: Any = user.args[1]
            begin, end = sum(sizes[:number]), sum(sizes[: number + 1])
            part = editor.insert(user, user, aten.slice.Tensor, node.args[0], axis, begin, end)
            editor.replace(user, part)
    drop_unread(editor.graph)


def _select_added(editor: GraphEditor) -> None:
    """Replace index_add by a selection from the added value and a sum."""
    for node in editor.calls(aten.index_add.default):
        arguments = schema.arguments(node)
        index, source = editor.tensor(arguments["index"]), arguments["source"]
        value, factor = fake(node), arguments["alpha"]
        axis = arguments["dim"] % value.ndim
        count, added = value.shape[axis], fake(source).shape[axis]
        if index is None or axis != 1 or value.ndim < 3 or type(factor) not in (int, float):
            continue
        if type(count) is not int or type(added) is not int or len(index.unique()) < len(index):
            continue
        numbers = torch.full((count,), added)
        numbers[index] = torch.arange(added)
        if factor != 1:
            source = editor.insert(node, None, aten.mul.Tensor, source, factor)
        pads = [0, 0] * (value.ndim - 2) + [0, 1]
        padded = editor.insert(node, None, aten.constant_pad_nd.default, source, pads)
        read = editor.add_constant(f"{node.name}_index", numbers, node)
        spread = editor.insert(node, None, aten.index_select.default, padded, axis, read)
        total = editor.insert(node, node, aten.add.Tensor, arguments["self"], spread)
        editor.replace(node, total)
    drop_unread(editor.graph)


def _expand_static_addends(editor: GraphEditor) -> None:
    """Expand values that depend on sizes alone, such as border maps, to the shapes to which they
    are added: segments add values of one shape."""
    live = input_dependent(editor.graph)
    for node in editor.calls(aten.add.Tensor):
        shape = fake(node).shape
        for side, other in ((0, 1), (1, 0)):
            value, x = node.args[side], node.args[other]
            if not isinstance(value, fx.Node) or value in live or x not in live:
                continue
            is_tensor = isinstance(value.meta.get("val"), Tensor) and len(shape) > 2
            if is_tensor and has_shape(x, shape) and not has_shape(value, shape):
                with editor.graph.inserting_before(node):
                    expanded = editor.call(aten.expand.default, value, _new_sizes(editor, value, x))
                node.update_arg(side, expanded)


def _new_sizes(editor: GraphEditor, value: fx.Node, x: fx.Node) -> list[Any]:
    """The sizes of x for an expansion of a value; -1 for those that the value has: they need not be
    read from x, which would be computed before the expansion, in another segment."""
    sizes, old = editor.sizes(x), fake(value).shape
    new = fake(x).shape
    first = len(new) - len(old)
    return [-1 if k >= first and same_size(new[k], old[k - first]) else size for k, size in enumerate(sizes)]
