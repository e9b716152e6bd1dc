"""A stride pushed downstream: a convolution of stride 1, and all behind it on a grid.

    conv(x, stride s) == conv(x, stride 1) on the grid 0, s, 2 s, ...

What reads the value reads the grid: windows are dilated by s and padded by s times as much (the
algorithme a trous), sums are masked, weights behind a view are spread over more features. The
grid is given up where nothing has a rule, by a slice, if the target has one. Masks choose or
multiply, as the target can; what a window is padded by beyond half of it, or more at one end, is a
pad before it, which counts as a part of the window.
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
from demask.stride.dilation.spaced_axes import (
    Emission,
    NotSpaced,
    SpacedPlan,
    SpacedReader,
    SpacedRule,
)
from demask.stride.dilation.spaced_calls import rule
from demask.stride.dilation.spaced_windows import is_strided
from demask.stride.targets import Target

aten = torch.ops.aten


def dilated(editor: GraphEditor, node: fx.Node, target: Target, table: Table) -> str | None:
    """Make a strided convolution one of stride 1, and let all behind it read every s-th position.

    None when done: the editor computes what it did, bit for bit in integers, and but for the order
    and rounding of sums in floating point. Strided convolutions and pools that read the grid, and
    those whose values are joined with it, are then of stride 1 too, and their nodes are gone.
    Otherwise the reason in words why it cannot be, and the editor is as it was. The node may be a
    strided pool as well.
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
        more = [found for short in plan.short for found in _strided_before(short, seeds, table)]
        if not more:
            return plan.text
        seeds |= dict.fromkeys(more)


def _planned(
    editor: GraphEditor, seeds: Collection[fx.Node], plan: SpacedPlan
) -> SpacedPlan | NotSpaced:
    """The plan with how every call behind the seeds is made; nothing is changed yet."""
    first = next(iter(seeds))
    for node in editor.graph.nodes:
        read = plan.read_by(node)
        if not read and node not in seeds:
            continue
        found = _step(editor, node, plan)
        short = found.beside if isinstance(found, SpacedRule) else found.short
        if any(_strided_before(operand, seeds, plan.analysis.table) for operand in short):
            return NotSpaced("", short)
        if isinstance(found, SpacedRule):
            wild = found.wild or any(plan.steps[n].wild for n in read)
            plan.steps[node] = replace(found, wild=wild)
            continue
        if node is first or not _may_slice(plan, read):
            return NotSpaced(_told(node, found.text))
    return plan


def _step(editor: GraphEditor, node: fx.Node, plan: SpacedPlan) -> SpacedRule | NotSpaced:
    if node.op == "output":
        return NotSpaced("")
    if node.op != "call_function":
        return NotSpaced("it is no call of an op")
    if node.target is operator.getitem:
        source: Any = node.args[0]
        index: Any = node.args[1]
        grid = plan.grids(source)[index]
        return SpacedRule(
            (grid,), lambda here: here.call(operator.getitem, here.read(source), index)
        )
    return rule(SpacedReader(editor, node, plan))


def _told(node: fx.Node, text: str) -> str:
    if node.op == "output":
        return "every s-th position would be returned, and the target cannot slice"
    return f"{op_name(node.target)} ({node.name}) cannot read every s-th position: {text}"


def _may_slice(plan: SpacedPlan, read: Collection[fx.Node]) -> bool:
    """Can what a call reads be given as it was?"""
    grids = [plan.grids(node) for node in read]
    even = all(part.gap is not None for found in grids for grid in found for part in grid.values())
    return "slice" in plan.target.ops and even and all(len(found) == 1 for found in grids)


def _strided_before(node: fx.Node, seeds: Collection[fx.Node], table: Table) -> list[fx.Node]:
    """The nearest strided calls, no seeds, that a value of images comes from."""
    found, seen, stack = [], set(), [node]
    while stack:
        here = stack.pop()
        value = here.meta.get("val")
        if here in seen or here.op != "call_function" or not isinstance(value, Tensor):
            continue
        seen.add(here)
        if is_strided(here) and here not in seeds:
            found.append(here)
        elif value.ndim == node.meta["val"].ndim and not _sums_up(here, table):
            stack += here.all_input_nodes
    return found


def _sums_up(node: fx.Node, table: Table) -> bool:
    """Is nothing left of images whose positions could stand apart?"""
    name = op_name(node.target)
    entry = table.get(name)
    return name.startswith("aten.adaptive_") or (entry is not None and bool(entry.rest))


def _apply(editor: GraphEditor, plan: SpacedPlan) -> None:
    """Make the calls of a plan, and slices for all others that read what they make."""
    made: dict[fx.Node, fx.Node] = {}
    for node, step in plan.steps.items():
        made[node] = step.emit(Emission(editor, node, made, plan))
    for node in plan.steps:
        others = [user for user in node.users if user not in plan.steps]
        value = made[node]
        for axis, part in plan.grid(node).items() if others else ():
            last, gap = part.places[-1] + 1, part.gap
            value = editor.insert(node, None, aten.slice.Tensor, value, axis, 0, last, gap)
        for user in others:
            user.replace_input_with(node, value)
        if others:
            reshape_views(editor.graph)  # a slice does not lie in one piece
    for node in reversed(list(plan.steps)):
        editor.graph.erase_node(node)
