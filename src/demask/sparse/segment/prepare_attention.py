"""Attention as segments hold it: with its usual scale, and no mask or one that is added to the
scores of each head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.editor import GraphEditor, drop_unread
from demask.ops import schema
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
        scale, width = arguments["scale"], query.meta["val"].shape[-1]
        if scale is not None and (type(width) is not int or type(scale) is not float):
            continue
        dtype = query.meta["val"].dtype
        rows, columns = query.meta["val"].shape[-2], key.meta["val"].shape[-2]
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
    if mask.meta["val"].dtype is not torch.bool:
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
