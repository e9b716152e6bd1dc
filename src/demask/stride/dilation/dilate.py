"""Strides pushed downstream: a convolution of stride 1, with calls after it on spaced axes.

    conv(x, stride s) == conv(x, stride 1) at positions 0, s, 2 s, ...

Calls that read the value read these positions: windows are dilated by s and padded s times as much
(the algorithme a trous), sums are masked, weights after a view are spread over more features. A
call without a rule reads a slice, if the target has slices. Masks select or multiply, as the target
allows. Padding beyond half a window, or asymmetric padding, becomes a pad before the window.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor, reshape_views
from demask.ops import Table, op_name
from demask.stride.dilation.spaced_axes import Emission, NotSpaced, SpacedPlan, SpacedReader, SpacedRule
from demask.stride.dilation.spaced_calls import rule_of
from demask.stride.dilation.spaced_windows import is_strided
from demask.stride.targets import Target

aten = torch.ops.aten


def dilate(editor: GraphEditor, node: fx.Node, target: Target, table: Table) -> str | None:
    """Replace a strided convolution or pool by one of stride 1, so that calls after it read every
    s-th position.

    None on success. The graph computes the same, exactly for integers, and up to the order and
    rounding of sums for floats. Strided convolutions and pools that read the value, or whose values
    are joined with it, get stride 1, too, and their nodes are removed. Otherwise the reason, and
    the graph is unchanged.
    """
    if not is_strided(node):
        return "it has no stride"
    seeds = {node: None}
    analysis = Analysis(editor.program.with_graph(editor.graph), table)
    while True:
        plan = _planned(editor, seeds, SpacedPlan(target, analysis))
        if isinstance(plan, SpacedPlan):
            _apply(editor, plan)
            return None
        more = [strided_node for short in plan.short for strided_node in _strided_before(short, seeds, table)]
        if not more:
            return plan.text
        seeds |= dict.fromkeys(more)


def _planned(editor: GraphEditor, seeds: Collection[fx.Node], plan: SpacedPlan) -> SpacedPlan | NotSpaced:
    """The plan with a rule for every call after the seeds; the graph is unchanged."""
    first = next(iter(seeds))
    for node in editor.graph.nodes:
        read = plan.read_by(node)
        if not read and node not in seeds:
            continue
        step = _step(editor, node, plan)
        short = step.broadcast if isinstance(step, SpacedRule) else step.short
        if any(_strided_before(operand, seeds, plan.analysis.table) for operand in short):
            return NotSpaced("", short)
        if isinstance(step, SpacedRule):
            non_finite = step.non_finite or any(plan.steps[n].non_finite for n in read)
            plan.steps[node] = replace(step, non_finite=non_finite)
            continue
        if node is first or not _may_slice(plan, read):
            return NotSpaced(_reason(node, step.text))
    return plan


def _step(editor: GraphEditor, node: fx.Node, plan: SpacedPlan) -> SpacedRule | NotSpaced:
    """The rule of a call, or why it has none."""
    if node.op == "output":
        return NotSpaced("")
    if node.op != "call_function":
        return NotSpaced("it is not a call of an op")
    if node.target is operator.getitem:
        source: Any = node.args[0]
        index: Any = node.args[1]
        spacing = plan.spacings(source)[index]
        return SpacedRule((spacing,), lambda here: here.call(operator.getitem, here.read(source), index))
    return rule_of(SpacedReader(editor, node, plan))


def _reason(node: fx.Node, text: str) -> str:
    """The message for a call without a rule."""
    if node.op == "output":
        return "every s-th position would be returned, and the target cannot slice"
    return f"{op_name(node.target)} ({node.name}) cannot read every s-th position: {text}"


def _may_slice(plan: SpacedPlan, read: Collection[fx.Node]) -> bool:
    """Whether slices can restore the operands of a call."""
    spacings = [plan.spacings(node) for node in read]
    even = all(part.gap is not None for outs in spacings for spacing in outs for part in spacing.values())
    return "slice" in plan.target.ops and even and all(len(outs) == 1 for outs in spacings)


def _strided_before(node: fx.Node, seeds: Collection[fx.Node], table: Table) -> list[fx.Node]:
    """The nearest strided calls, except for seeds, from which images are computed."""
    strided_calls, seen, stack = [], set(), [node]
    while stack:
        call = stack.pop()
        value = call.meta.get("val")
        if call in seen or call.op != "call_function" or not isinstance(value, Tensor):
            continue
        seen.add(call)
        if is_strided(call) and call not in seeds:
            strided_calls.append(call)
        elif value.ndim == node.meta["val"].ndim and not _sums_up(call, table):
            stack += call.all_input_nodes
    return strided_calls


def _sums_up(node: fx.Node, table: Table) -> bool:
    """Whether a call reduces images to a size without spaced positions."""
    name = op_name(node.target)
    entry = table.get(name)
    return name.startswith("aten.adaptive_") or (entry is not None and bool(entry.rest))


def _apply(editor: GraphEditor, plan: SpacedPlan) -> None:
    """Insert the calls of a plan, and slices for other calls that read their values."""
    replacements: dict[fx.Node, fx.Node] = {}
    for node, step in plan.steps.items():
        replacements[node] = step.emit(Emission(editor, node, replacements, plan))
    for node in plan.steps:
        others = [user for user in node.users if user not in plan.steps]
        value = replacements[node]
        for axis, part in plan.spacing(node).items() if others else ():
            last, gap = part.positions[-1] + 1, part.gap
            value = editor.insert(node, None, aten.slice.Tensor, value, axis, 0, last, gap)
        for user in others:
            user.replace_input_with(node, value)
        if others:
            reshape_views(editor.graph)  # a slice is not contiguous
    for node in reversed(list(plan.steps)):
        editor.graph.erase_node(node)
