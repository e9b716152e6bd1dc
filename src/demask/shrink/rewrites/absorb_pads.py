"""Explicit pads, absorbed into the windows that read them while a graph is rewritten.

    conv(pad(x))         ==  padded_conv(x)            (see `ops.entries.padded`)
    pad(pad(x, a), b)    ==  pad(x, a + b)             pads of one value that only add
    f(pad(x, v))         ==  pad(f(x), f(v))           f elementwise
    max_pool(pad(x, v))  ==  max_pool(pad(x, -inf))    where no x is below v
    conv(pad(x, v))      ==  conv(pad(x - v, 0)) + v · Σ weight

Constant channels that enter a pad are then treated like those that enter a convolution with its own
padding. Nothing is cut here. `restore_pads` writes standard calls again.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.analysis import Analysis
from demask.facts.known import key_of
from demask.facts.masks import uniform_over
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.ops import Relation, Table, bind, schema
from demask.ops.entries.padded import PADDED, PLAIN, may_add_positions
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS, PADS
from demask.shrink.layout.layout_analysis import LayoutAnalysis

aten = torch.ops.aten


def absorb_pads(analysis: LayoutAnalysis) -> Program | None:
    """The program with pads absorbed by the windows that read them; None where no constant enters a
    pad that all of its readers can absorb."""
    if not any(_constant_pad(node) for node in analysis.program.graph.nodes):
        return None
    editor = GraphEditor(analysis.program)
    for node in list(editor.graph.nodes):
        if _constant_pad(node):
            _postpone_pad(editor, node, analysis.table)
    program = editor.finish()
    pads = [n for n in editor.graph.nodes if _constant_pad(n) and all(reader.target in PADDED for reader in n.users)]
    if not pads:
        return None
    analysis = analysis.again(program)
    pads = [node for node in pads if _has_constant_input(node, analysis.known)]
    values = {node: _pad_values(node, analysis) for node in pads}
    if not any(values.values()):
        return None
    for node, value in values.items():
        for window, pad_value in (value or {}).items():
            _absorb(editor, node, window, pad_value)
    return editor.finish()


def _constant_pad(node: fx.Node) -> tuple[list[Any], float] | None:
    """The pads and the value of a call that pads with one number; None for any other call."""
    if node.target not in PADS:
        return None
    call = schema.arguments(node)
    if call.get("mode", "constant") != "constant":
        return None
    value = 0 if call["value"] is None else call["value"]
    return (list(call["pad"]), float(value)) if isinstance(value, (int, float)) else None


def _postpone_pad(editor: GraphEditor, node: fx.Node, table: Table) -> None:
    """Move a pad after its reader while that is another pad, or an elementwise function."""
    while len(node.users) == 1:
        (reader,), (pads, value) = node.users, _constant_pad(node) or ([], 0.0)
        later = _constant_pad(reader)
        with editor.graph.inserting_before(reader):
            if later is not None:
                if later[1] != value or not _is_nonnegative([*pads, *later[0]]):
                    return
                node = _replace_with_pad(editor, reader, node.args[0], _add_pads(pads, later[0]), value)
            elif (new := _value_after(reader, node, value, table)) is not None:
                args = [node.args[0] if a is node else a for a in reader.args]
                moved = editor.call_for(reader, reader.target, *args, **reader.kwargs)
                node = _replace_with_pad(editor, reader, moved, pads, new)
            else:
                return


def _is_nonnegative(pads: list[Any]) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in pads)


def _add_pads(a: list[int], b: list[int]) -> list[int]:
    size = max(len(a), len(b))
    a, b = (pads + [0] * (size - len(pads)) for pads in (a, b))
    return [m + n for m, n in zip(a, b, strict=True)]


def _replace_with_pad(editor: GraphEditor, node: fx.Node, x: Any, pads: list[Any], value: float) -> fx.Node:
    new = editor.call(aten.constant_pad_nd.default, x, pads, value)
    editor.replace(node, new, inherit=True)
    return new


def _value_after(reader: fx.Node, pad: fx.Node, value: float, table: Table) -> float | None:
    """The value of an elementwise function at the value of a pad; None for other calls."""
    if reader.op != "call_function" or reader.all_input_nodes != [pad]:
        return None
    relation = bind(reader, table)
    if not isinstance(relation, Relation) or relation.entry.fill != "run" or relation.moved:
        return None
    alone = relation.ins and all(axes in ((), relation.outs[0]) for axes in relation.ins)
    if not alone or relation.complete or relation.window or relation.entry.free:
        return None
    dtype, rank = fake(pad).dtype, fake(pad).ndim
    result = schema.call_on(reader, lambda _: torch.full([1] * rank, value, dtype=dtype))
    number = float(result) if isinstance(result, Tensor) and result.numel() == 1 else inf
    return number if abs(number) < inf else None


def _has_constant_input(node: fx.Node, facts: Any) -> bool:
    """Whether a known position with another value than the pad's enters a pad."""
    pads, value = _constant_pad(node) or ([], 0.0)
    fact = facts[key_of(schema.source_of(node))]
    rank = fact.known.ndim
    space = {str(k) for k in range(rank - len(pads) // 2, rank)}
    fact = uniform_over(fact, [str(k) for k in range(rank)], space)
    return bool((fact.known & (fact.fill != value)).any())


def _pad_values(node: fx.Node, analysis: Analysis) -> dict[fx.Node, float] | None:
    """The pad value of each window that reads a pad; None if some reader cannot absorb it."""
    pads, value = _constant_pad(node) or ([], 0.0)
    least = -inf
    if value != -inf and any(_is_max_pool(window) for window in node.users):
        bounds = analysis.ranges
        least = bounds[node.args[0]].low if node.args[0] in bounds else -inf
    result = {}
    for window in node.users:
        if window.target not in PADDED or window.args[0] is not node:
            return None
        if window.all_input_nodes.count(node) != 1 or len(pads) > 2 * _window_rank(window):
            return None
        seen = value
        if _is_max_pool(window):
            if not _reads_input(window, pads):
                return None
            seen = -inf if value <= least or value == -inf else value
        elif seen != 0 and not _can_shift_input(window):
            return None
        result[window] = seen
    return result or None


def _can_shift_input(window: fx.Node) -> bool:
    """Whether a call is a convolution with a constant weight and no padding of its own."""
    call = schema.arguments(window)
    if window.target not in CONVOLUTIONS or call["weight"].op != "get_attr":
        return False
    return all(n == 0 for n in call["padding"])


def _is_max_pool(window: fx.Node) -> bool:
    return "max_pool" in str(window.target)


def _window_rank(window: fx.Node) -> int:
    """The number of axes a window slides over."""
    return int(str(window.target).partition("d.")[0][-1])


def _reads_input(window: fx.Node, pads: list[Any]) -> bool:
    """Whether every window of a maximum reads a position that is not padding."""
    call, rank = schema.arguments(window), _window_rank(window)
    wide = {
        name: [v] * rank if isinstance(v := call[name], int) else list(v) * (rank // len(v))
        for name in ("kernel_size", "padding", "dilation")
    }
    if call["ceil_mode"] or any(n != 1 for n in wide["dilation"]):
        return False
    ends = [max(pads[k], pads[k + 1]) if k < len(pads) else 0 for k in range(0, 2 * rank, 2)]
    limits = zip(ends[::-1], wide["padding"], wide["kernel_size"], strict=True)
    return all(isinstance(n, int) and max(n, 0) + own < kernel for n, own, kernel in limits)


def _absorb(editor: GraphEditor, node: fx.Node, window: fx.Node, value: float) -> None:
    """Replace a window that reads the result of a pad by one with the pads."""
    pads, _ = _constant_pad(node) or ([], 0.0)
    call = schema.arguments(window)
    name = next(iter(call))  # the first argument is what the window reads
    call |= {name: node.args[0], "pads": pads, "pad_value": value}
    with editor.graph.inserting_before(window):
        if value != 0 and not _is_max_pool(window):
            call |= _shift_input(editor, call, value)
        new = editor.call_named(PADDED[window.target], call)
    editor.replace(window, new, inherit=True)


def _shift_input(editor: GraphEditor, call: dict[str, Any], value: float) -> dict[str, Any]:
    """Arguments of a convolution of x - value, padded with zeros, with the same result."""
    weight = call["weight"]
    dims = list(range(1, fake(weight).ndim))
    bias = editor.call(aten.mul.Tensor, editor.call(aten.sum.dim_IntList, weight, dims), value)
    if call["bias"] is not None:
        bias = editor.call(aten.add.Tensor, call["bias"], bias)
    return {"input": editor.call(aten.sub.Tensor, call["input"], value), "bias": bias, "pad_value": 0.0}


def restore_pads(program: Program) -> Program:
    """The program with pads and windows separate again; pads that are equal on both sides become
    the convolution's own padding."""
    if not any(node.target in PLAIN for node in program.graph.nodes):
        return program
    editor = GraphEditor(program)
    done: dict[str, fx.Node] = {}
    for node in editor.calls(*PLAIN):
        with editor.graph.inserting_before(node):
            new = _restore_pad(editor, node, done)
        editor.replace(node, new, inherit=True)
    return editor.finish()


def _restore_pad(editor: GraphEditor, node: fx.Node, done: dict[str, fx.Node]) -> fx.Node:
    target, call = PLAIN[node.target], schema.arguments(node)
    pads, value = call.pop("pads"), call.pop("pad_value")
    own = _symmetric_padding(target, call, pads)
    name = next(iter(call))  # the first argument is what the window reads
    if own is not None:
        call["padding"] = own
    elif may_add_positions(pads) or any(n != 0 for n in pads):
        key = repr((call[name], pads, value))
        if key not in done:
            done[key] = editor.call(aten.constant_pad_nd.default, call[name], pads, value)
        call[name] = done[key]
    return editor.call_named(target, call)


def _symmetric_padding(target: Any, call: dict[str, Any], pads: list[Any]) -> list[int] | None:
    """The convolution's own padding that is equivalent, or None."""
    if target not in CONVOLUTIONS or not _is_nonnegative(pads):
        return None
    sides = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    if any(a != b for a, b in sides) or any(not isinstance(n, int) for n in call["padding"]):
        return None
    padding = list(call["padding"])
    if len(padding) == 1:
        padding *= int(str(target).partition("d.")[0][-1])
    sides = [(0, 0)] * (len(padding) - len(sides)) + sides
    return [n + a for n, (a, _) in zip(padding, sides, strict=True)]
