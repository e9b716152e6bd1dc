"""Strides pushed downstream: a convolution of stride 1, with calls after it on spaced axes.

    conv(x, stride s) == conv(x, stride 1) at positions 0, s, 2 s, ...

Calls that read the value read these positions: windows are dilated by s and padded s times as much
(the algorithme a trous), sums are masked, weights after a view are spread over more features. A
call without a rule reads a slice, if the target has slices. Masks select or multiply, as the target
allows. Padding beyond half a window, or asymmetric padding, becomes a pad before the window.

Rules of calls on values with spaced axes, derived from the op table.

Along an axis that a call carries, it computes each position separately: the same call runs on the
longer axis. All operands must be spaced alike; constants are stretched, each position up to the
next one. Before a sum over a spaced axis, invalid positions are masked or get weights of zero. A
view merges axes; a pad is multiplied by the gap.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor, reshape_views
from demask.graph.queries import is_pointwise
from demask.ops import Declined, Relation, Table, op_name, schema
from demask.ops.entries.movement import common_refinement
from demask.ops.flow import iterate_tags, tags_by_axis
from demask.ops.schema import fake
from demask.ops.traits import PADS, RESHAPES
from demask.stride.average_pools import AveragePool
from demask.stride.spaced_windows import (
    NEUTRAL,
    WINDOWS,
    Emission,
    NotSpaced,
    SpacedAxis,
    SpacedPlan,
    SpacedReader,
    SpacedRule,
    average_rule,
    is_strided,
    mask_of,
    mean_correction,
    merge_axes,
    only_spaced,
    reduced,
    window_rule,
)
from demask.stride.targets import Target

aten = torch.ops.aten


LetteredAxes = Mapping[str, SpacedAxis]  # spaced axes by letter of the op table's line
# These raise for some integers (division by zero, no such row), which invalid positions may have.
_STOPS = ("aten.div.", "aten.remainder.", "aten.fmod.", "aten.pow.", "aten.embedding.")
UNMASKED = "it also reads invalid positions, which the target cannot mask"
# These are not defined for all numbers.
_PARTIAL = frozenset(
    f"aten.{name}.default"
    for name in ("log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "logit", "atanh", "atan2")
)


def rule_of(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a call that reads values with spaced axes, or why there is none."""
    target = reader.node.target
    if target in WINDOWS:
        return window_rule(reader)
    if target in RESHAPES:
        return _viewed(reader)
    if target in PADS:
        return _pad(reader)
    if target is aten.sym_size.int:
        x, axis = reader.node.args[:2]
        return _carried_size(reader, x, axis)
    return _by_table(reader)


def _carried_size(reader: SpacedReader, x: Any, axis: Any) -> SpacedRule | NotSpaced:
    if axis % fake(x).ndim in reader.plan.spacing(x):
        return NotSpaced("its size is read")
    return SpacedRule((), lambda here: here.again())


# --- calls by their line in the table -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Letters:
    """The spaced axes of a call. spreads: by letter. summed: letters that are contracted. reduced:
    letters that the call reduces. broadcast: as of a `SpacedRule`."""

    relation: Relation
    spreads: LetteredAxes
    summed: frozenset[str]
    reduced: frozenset[str]
    broadcast: tuple[fx.Node, ...]

    def of(self, axes: tuple[tuple[str, ...], ...]) -> dict[int, SpacedAxis]:
        """The spaced axes of an operand or an output."""
        return tags_by_axis(axes, self.spreads)


def _by_table(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a call that follows from its entry in the op table."""
    relation = reader.plan.analysis.relation(reader.node)
    if isinstance(relation, Declined):
        return NotSpaced(relation.text)
    output_letters = {letter for axes in relation.outs for letter in relation.letters(axes)}
    if relation.entry.free and not any(relation.letters(axes) & output_letters for axes in relation.ins):
        return SpacedRule(tuple({} for _ in relation.outs), lambda here: here.again())
    letters = _letters(reader, relation)
    if isinstance(letters, NotSpaced):
        return letters
    if (text := _reason_to_stop(reader, letters)) is not None:
        return NotSpaced(text)
    if letters.reduced:
        return _reduction(reader, letters)
    if letters.summed and not _may_sum(reader, letters):
        return NotSpaced(f"{UNMASKED}: it may be Inf or NaN")
    outs = tuple(only_spaced(letters.of(axes)) for axes in relation.outs)
    non_finite = _may_be_non_finite(reader)
    return SpacedRule(outs, lambda here: _carried(here, reader, letters), non_finite, letters.broadcast)


def _letters(reader: SpacedReader, relation: Relation) -> _Letters | NotSpaced:
    merged_axes = _merged(reader, relation)
    if isinstance(merged_axes, NotSpaced):
        return merged_axes
    spreads, broadcast = merged_axes
    lines = (*relation.ins, *relation.outs)
    if any(len(axis) > 1 and set(axis) & set(spreads) for axes in lines for axis in axes):
        return NotSpaced("it splits a spaced axis")
    short, alone = _plain(reader, relation, spreads)
    if short:
        names = ", ".join(node.name for node in short)
        return NotSpaced(f"it also reads {names}, whose axis is not spaced", short)
    output_letters = {letter for axes in relation.outs for letter in relation.letters(axes)}
    summed = frozenset(spreads) & relation.contracted
    reduced = frozenset(spreads) & relation.complete
    if set(spreads) - output_letters - summed - reduced:
        return NotSpaced("it has no rule for a spaced axis")
    complete = relation.entry.rest not in NEUTRAL or len(relation.operands) != 1 or reduced & output_letters
    if reduced and complete:
        return NotSpaced("it reads a full axis")
    return _Letters(relation, spreads, summed, reduced, (*broadcast, *alone))


def _merged(reader: SpacedReader, relation: Relation) -> tuple[dict[str, SpacedAxis], tuple[fx.Node, ...]] | NotSpaced:
    """The spaced axis of each letter, merged over operands. And operands of one position with a
    shorter axis: every spacing fits them."""
    spreads: dict[str, SpacedAxis] = {}
    by_letter: dict[str, list[tuple[fx.Node, SpacedAxis]]] = {}
    broadcast: list[fx.Node] = []
    spacings = [reader.plan.spacing(operand.value) for operand in relation.operands]
    for letter, k, part in iterate_tags(relation, spacings):
        if letter is None:
            return NotSpaced("it splits an axis, or reads one position many times")
        by_letter.setdefault(letter, []).append((relation.operands[k].value, part))
    for letter, axes in by_letter.items():
        if (text := _marked(relation, letter)) is not None:
            return NotSpaced(text)
        last = max(part.positions[-1] for _, part in axes)
        short = tuple(node for node, part in axes if part.positions[-1] < last)
        if len({part.positions for _, part in axes}) > 1:
            return NotSpaced("its operands have different spaced axes", short)
        size = max(part.size for _, part in axes)
        spreads[letter] = SpacedAxis(axes[0][1].positions, size)
        broadcast += [node for node, part in axes if part.count == 1 and part.size < size]
    return spreads, tuple(broadcast)


def _marked(relation: Relation, letter: str) -> str | None:
    """Why a call reads several positions of an axis together, if it does."""
    if letter in relation.window:
        return "its windows have no rule"
    if letter in relation.moved:
        return "it moves positions"
    return "it reads back along an axis" if relation.back else None


def _plain(
    reader: SpacedReader, relation: Relation, spreads: LetteredAxes
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Operands (no constants) with an unspaced axis that is spaced in others: those that do not
    fit, and those of one position, which is broadcast."""
    fits: dict[fx.Node, bool] = {}
    for k, operand in enumerate(relation.operands):
        if not isinstance(operand.value, fx.Node) or reader.editor.tensor(operand.value) is not None:
            continue
        spacing = reader.plan.spacing(operand.value)
        for axis, letters in enumerate(relation.ins[k]):
            if len(letters) == 1 and letters[0] in spreads and axis not in spacing:
                one = spreads[letters[0]].count == 1 and letters[0] not in relation.contracted
                fits[operand.value] = one and fits.get(operand.value, True)
    short = tuple(node for node, one in fits.items() if not one)
    return short, tuple(node for node, one in fits.items() if one)


def _reason_to_stop(reader: SpacedReader, letters: _Letters) -> str | None:
    """Why a call may raise on invalid positions; None if it cannot."""
    name = op_name(reader.node.target)
    values = [o.value for o in letters.relation.operands if reader.plan.spacing(o.value)]
    integral = any(not fake(value).is_floating_point() for value in values)
    return "it may fail on integers at invalid positions" if (integral and name.startswith(_STOPS)) else None


def _may_be_non_finite(reader: SpacedReader) -> bool:
    """Whether a call may compute Inf or NaN from numbers at invalid positions."""
    node = reader.node
    name = op_name(node.target)
    if name.startswith("aten.pow."):
        power = node.args[1]
        return not isinstance(power, int) or power < 0
    if name.startswith(_STOPS):
        return bool(reader.plan.spacing(node.args[1]))
    return name in _PARTIAL


def _may_sum(reader: SpacedReader, letters: _Letters) -> bool:
    """Whether invalid positions can be excluded from sums of products."""
    values = [o.value for o in letters.relation.operands if reader.plan.spacing(o.value)]
    plan = reader.plan
    return len(values) == 1 and (plan.may_mask(values[0]) or plan.is_finite(values[0]))


def _carried(here: Emission, reader: SpacedReader, letters: _Letters) -> fx.Node:
    """The call on operands that are spaced alike."""
    values: list[Any] = []
    for k, operand in enumerate(letters.relation.operands):
        value = operand.value
        if not isinstance(value, fx.Node):
            values.append(value)
            continue
        tensor = reader.editor.tensor(value)
        if tensor is not None:
            values.append(_stretched(here, value, tensor, k, letters))
            continue
        values.append(_alike(here, reader, value, k, letters))
    own = map_arg(schema.arguments(here.node), here.read)
    arguments = schema.replace_operands(own, letters.relation.operands, values)
    if here.node.target is aten.expand.default:
        outs = letters.of(letters.relation.outs[0])
        arguments["size"] = [outs[k].size if k in outs else n for k, n in enumerate(arguments["size"])]
    args, kwargs = schema.bind_arguments(here.node.target, arguments)
    return here.call(here.node.target, *args, **kwargs)


def _alike(here: Emission, reader: SpacedReader, value: fx.Node, k: int, letters: _Letters) -> fx.Node:
    """An operand, padded to the length of the others along spaced axes, and masked if it is summed
    over them."""
    x, spacing = here.read(value), reader.plan.spacing(value)
    axes = {axis: part for axis, part in letters.of(letters.relation.ins[k]).items() if axis in spacing}
    summed = {axis: part for axis, part in spacing.items() if letters.relation.ins[k][axis][0] in letters.summed}
    if summed and not reader.plan.is_finite(value):
        x = here.masked(value, summed)
    more = {axis: part.size - spacing[axis].size for axis, part in axes.items()}
    # A pointwise call broadcasts a single position.
    if not is_pointwise(here.node, here.plan.analysis.table):
        alone = letters.of(letters.relation.ins[k]).items()
        more |= {axis: part.size - 1 for axis, part in alone if axis not in spacing}
    return here.longer(x, more)


def _stretched(here: Emission, value: fx.Node, tensor: Tensor, k: int, letters: _Letters) -> fx.Node:
    """A constant operand, spaced as the other operands; zero at invalid positions if products with
    it are summed."""
    stretched = tensor
    for axis, part in letters.of(letters.relation.ins[k]).items():
        stretched = stretched.index_select(axis, part.nearest())
        if letters.relation.ins[k][axis][0] in letters.summed:
            stretched = stretched * mask_of({axis: part}, stretched.ndim)
    if stretched is tensor:
        return value
    return here.editor.replace_constant(value, stretched, here.node)


# --- reductions -----------------------------------------------------------------------------------


def _reduction(reader: SpacedReader, letters: _Letters) -> SpacedRule | NotSpaced:
    """The rule of a sum, mean or extreme over spaced axes."""
    relation = letters.relation
    x = relation.operands[0].value
    kind = relation.entry.rest
    over = {k: part for k, part in letters.of(relation.ins[0]).items() if relation.ins[0][k][0] in letters.reduced}
    outs = tuple(only_spaced(letters.of(axes)) for axes in relation.outs)
    if reader.plan.may_mask(x, NEUTRAL[kind], mean_correction(over, kind)):
        return reduced(x, over, outs, kind)
    if kind == "mean" and not outs[0]:
        return _summed_mean(reader)
    return NotSpaced(UNMASKED)


def _summed_mean(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a mean over images: a convolution that reads only valid positions."""
    arguments = schema.arguments(reader.node)
    value = fake(arguments["self"])
    dims = sorted(dim % value.ndim for dim in arguments.get("dim") or range(value.ndim))
    rank = value.ndim - 2
    sizes = value.shape[2:]
    if dims != list(range(2, value.ndim)) or not 1 <= rank <= 3 or arguments.get("dtype"):
        return NotSpaced(UNMASKED)
    if not all(isinstance(n, int) for n in sizes):
        return NotSpaced("sizes of images are known only at run time")
    step = average_rule(reader, AveragePool(tuple(sizes), tuple(sizes), (0,) * rank))
    if isinstance(step, NotSpaced):
        return step
    if step.outs[0]:
        return NotSpaced(f"{UNMASKED}, and a window over the valid positions has several outputs")

    def emit(here: Emission) -> fx.Node:
        mean = step.emit(here)
        return mean if arguments.get("keepdim") else here.call(aten.squeeze.dims, mean, dims)

    return SpacedRule(({},), emit)


# --- views and pads -------------------------------------------------------------------------------


def _viewed(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a view. Merged axes have merged positions. A squeezed axis that became longer is
    merged into the axis before it."""
    x = reader.node.all_input_nodes[0]
    spacing, old = reader.plan.spacing(x), list(fake(x).shape)
    new = list(fake(reader.node).shape)
    factors = common_refinement(old, new)
    if isinstance(factors, Declined):
        return NotSpaced(factors.text)
    before, after, sizes = factors
    spreads: dict[str, SpacedAxis] = {}
    for axis, part in sorted(spacing.items()):
        if len(before[axis]) > 1:
            return NotSpaced("it splits a spaced axis")
        if not before[axis]:
            before[axis] = [f"one{axis}"]
            _insert(after, f"one{axis}", [name for axes in before[:axis] for name in axes])
        spreads[before[axis][0]] = part
    axes: dict[int, SpacedAxis] = {}
    for axis, letters in enumerate(after):
        if not set(letters) & set(spreads):
            continue
        parts = [spreads.get(name) or _whole(sizes[name]) for name in letters]
        if any(part is None for part in parts):
            return NotSpaced("it merges them with an axis whose size is known only at run time")
        axes[axis] = merge_axes([part for part in parts if part is not None])
    shape = [axes[k].size if k in axes else n if isinstance(n, int) else -1 for k, n in enumerate(new)]
    if shape.count(-1) > 1:
        return NotSpaced("a view with several sizes known only at run time")
    outs = (only_spaced(axes),)
    return SpacedRule(outs, lambda here: here.call(aten.reshape.default, here.read(x), shape))


def _whole(size: int | None) -> SpacedAxis | None:
    return None if size is None else SpacedAxis.even(size, 1, size)


def _insert(after: list[list[str]], name: str, previous: list[str]) -> None:
    """Insert the letter of an axis of one position after the letters before it: on a separate axis,
    if the view has one there."""
    index = max((k for k, axes in enumerate(after) if previous and previous[-1] in axes), default=-1)
    if index + 1 < len(after) and not after[index + 1]:
        after[index + 1] = [name]
    elif index < 0:
        after[0].insert(0, name)
    else:
        after[index].insert(after[index].index(previous[-1]) + 1, name)


def _pad(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """The rule of a pad by constants: the gap times as many."""
    arguments = schema.arguments(reader.node)
    x, flat = arguments["self"], list(arguments["pad"])
    if arguments.get("mode", "constant") != "constant":
        return NotSpaced("it pads with values of the border")
    spacing, rank = reader.plan.spacing(x), fake(x).ndim
    axes, pads = dict(spacing), list(flat)
    for axis, part in spacing.items():
        k = 2 * (rank - 1 - axis)
        if k >= len(flat) or not any(flat[k : k + 2]):
            continue
        if part.gap is None or not all(isinstance(n, int) for n in flat[k : k + 2]):
            return NotSpaced("it pads an axis whose positions are not evenly spaced")
        before, after = (n * part.gap for n in flat[k : k + 2])
        pads[k : k + 2] = [before, after]
        count = part.count + sum(flat[k : k + 2])
        axes[axis] = SpacedAxis.even(count, part.gap, part.size + before + after)
    non_finite = not math.isfinite(arguments["value"] or 0)  # a window may read only padding
    return SpacedRule((only_spaced(axes),), lambda here: here.again(pad=pads), non_finite)


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
            return NotSpaced(_message_of_call(node, step.text))
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


def _message_of_call(node: fx.Node, text: str) -> str:
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
        elif value.ndim == fake(node).ndim and not _sums_up(call, table):
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
