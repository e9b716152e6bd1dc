"""Calls on values whose positions stand apart, by what the op table says of their axes.

Along an axis that a call carries it works at each position alone: it is made as it was, on more
positions. Operands must stand alike; constants are stretched, each position up to the next one.
Over an axis that is summed up the positions between are masked first, or meet weights of zero. A
view merges places; a pad widens by the gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from demask.graph.queries import is_pointwise
from demask.ops import Declined, Relation, op_name, schema
from demask.ops.entries.movement import refined
from demask.ops.flow import lettered, tagged
from demask.ops.traits import PADS, RESHAPES
from demask.stride.average_pools import AveragePool
from demask.stride.dilation.spaced_axes import (
    NEUTRAL,
    Emission,
    NotSpaced,
    SpacedReader,
    SpacedRule,
    Spread,
    kept,
    mask_of,
    merged,
    reduced,
    share_of,
)
from demask.stride.dilation.spaced_windows import WINDOWS, average, windowed

aten = torch.ops.aten
Spreads = Mapping[str, Spread]  # by letter of a line of the table
# These stop at some integers (division by zero, no such row), which may stand between.
_STOPS = ("aten.div.", "aten.remainder.", "aten.fmod.", "aten.pow.", "aten.embedding.")
UNMASKED = "it reads what stands between too, which the target cannot mask"
# These are not defined everywhere.
_PARTIAL = frozenset(f"aten.{name}.default" for name in (
    "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "logit", "atanh", "atan2",
))  # fmt: skip


def rule(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """How a call that reads values on grids is made, or why it cannot be."""
    target = reader.node.target
    if target in WINDOWS:
        return windowed(reader)
    if target in RESHAPES:
        return _viewed(reader)
    if target in PADS:
        return _pad(reader)
    if target is aten.sym_size.int:
        x, axis = reader.node.args[:2]
        return _carried_size(reader, x, axis)
    return _by_table(reader)


def _carried_size(reader: SpacedReader, x: Any, axis: Any) -> SpacedRule | NotSpaced:
    if axis % x.meta["val"].ndim in reader.plan.grid(x):
        return NotSpaced("its size is read")
    return SpacedRule((), lambda here: here.again())


# --- calls by their line in the table -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Letters:
    """How the axes of a call stand. spreads: by letter. summed: letters that are contracted;
    reduced: that the call reduces, or sums up with a rule of its own. beside: as of a `SpacedRule`."""

    relation: Relation
    spreads: Spreads
    summed: frozenset[str]
    reduced: frozenset[str]
    beside: tuple[fx.Node, ...]

    def of(self, axes: tuple[tuple[str, ...], ...]) -> dict[int, Spread]:
        """The spread axes of an operand or an output."""
        return lettered(axes, self.spreads)


def _by_table(reader: SpacedReader) -> SpacedRule | NotSpaced:
    relation = reader.plan.analysis.relation(reader.node)
    if isinstance(relation, Declined):
        return NotSpaced(relation.text)
    made = {letter for axes in relation.outs for letter in relation.letters(axes)}
    if relation.entry.free and not any(relation.letters(axes) & made for axes in relation.ins):
        return SpacedRule(tuple({} for _ in relation.outs), lambda here: here.again())
    found = _letters(reader, relation)
    if isinstance(found, NotSpaced):
        return found
    if (text := _stops(reader, found)) is not None:
        return NotSpaced(text)
    if found.reduced:
        return _reduction(reader, found)
    if found.summed and not _may_sum(reader, found):
        return NotSpaced(f"{UNMASKED}: it may be Inf or NaN")
    outs = tuple(kept(found.of(axes)) for axes in relation.outs)
    wild = _is_wild(reader)
    return SpacedRule(outs, lambda here: _carried(here, reader, found), wild, found.beside)


def _letters(reader: SpacedReader, relation: Relation) -> _Letters | NotSpaced:
    found = _merged(reader, relation)
    if isinstance(found, NotSpaced):
        return found
    spreads, beside = found
    lines = (*relation.ins, *relation.outs)
    if any(len(axis) > 1 and set(axis) & set(spreads) for axes in lines for axis in axes):
        return NotSpaced("it splits an axis whose positions stand apart")
    short, alone = _plain(reader, relation, spreads)
    if short:
        names = ", ".join(node.name for node in short)
        return NotSpaced(f"it reads {names} beside it, whose positions stand together", short)
    made = {letter for axes in relation.outs for letter in relation.letters(axes)}
    summed = frozenset(spreads) & relation.contracted
    reduced = frozenset(spreads) & relation.complete
    if set(spreads) - made - summed - reduced:
        return NotSpaced("it has no rule for an axis whose positions stand apart")
    whole = relation.entry.rest not in NEUTRAL or len(relation.operands) != 1 or reduced & made
    if reduced and whole:
        return NotSpaced("it reads an axis whole")
    return _Letters(relation, spreads, summed, reduced, (*beside, *alone))


def _merged(
    reader: SpacedReader, relation: Relation
) -> tuple[dict[str, Spread], tuple[fx.Node, ...]] | NotSpaced:
    """How each letter stands in all operands on grids; and operands of one position that stand in
    shorter axes: any grid fits them, but not what follows."""
    spreads: dict[str, Spread] = {}
    stand: dict[str, list[tuple[fx.Node, Spread]]] = {}
    beside: list[fx.Node] = []
    grids = [reader.plan.grid(operand.value) for operand in relation.operands]
    for letter, k, part in tagged(relation, grids):
        if letter is None:
            return NotSpaced("it splits an axis, or reads one position many times")
        stand.setdefault(letter, []).append((relation.operands[k].value, part))
    for letter, found in stand.items():
        if (text := _marked(relation, letter)) is not None:
            return NotSpaced(text)
        last = max(part.places[-1] for _, part in found)
        short = tuple(node for node, part in found if part.places[-1] < last)
        if len({part.places for _, part in found}) > 1:
            return NotSpaced("its operands stand on different grids", short)
        size = max(part.size for _, part in found)
        spreads[letter] = Spread(found[0][1].places, size)
        beside += [node for node, part in found if part.count == 1 and part.size < size]
    return spreads, tuple(beside)


def _marked(relation: Relation, letter: str) -> str | None:
    """Why a call reads positions of an axis together, if it does."""
    if letter in relation.window:
        return "its windows have no rule"
    if letter in relation.moved:
        return "it moves positions"
    return "it reads back along an axis" if relation.back else None


def _plain(
    reader: SpacedReader, relation: Relation, spreads: Spreads
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Operands as they were, no constants, with an axis whose positions stand apart elsewhere;
    and those among such whose one position may be read beside all."""
    found: dict[fx.Node, bool] = {}
    for k, operand in enumerate(relation.operands):
        if (
            not isinstance(operand.value, fx.Node)
            or reader.editor.tensor(operand.value) is not None
        ):
            continue
        grid = reader.plan.grid(operand.value)
        for axis, letters in enumerate(relation.ins[k]):
            if len(letters) == 1 and letters[0] in spreads and axis not in grid:
                one = spreads[letters[0]].count == 1 and letters[0] not in relation.contracted
                found[operand.value] = one and found.get(operand.value, True)
    short = tuple(node for node, one in found.items() if not one)
    return short, tuple(node for node, one in found.items() if one)


def _stops(reader: SpacedReader, found: _Letters) -> str | None:
    """Why a call may stop at what stands between positions."""
    name = op_name(reader.node.target)
    values = [o.value for o in found.relation.operands if reader.plan.grid(o.value)]
    whole = any(not value.meta["val"].is_floating_point() for value in values)
    return "it stops at integers of no meaning" if whole and name.startswith(_STOPS) else None


def _is_wild(reader: SpacedReader) -> bool:
    """May a call make Inf or NaN of numbers that no position of the network holds?"""
    node = reader.node
    name = op_name(node.target)
    if name.startswith("aten.pow."):
        power = node.args[1]
        return not isinstance(power, int) or power < 0
    if name.startswith(_STOPS):
        return bool(reader.plan.grid(node.args[1]))
    return name in _PARTIAL


def _may_sum(reader: SpacedReader, found: _Letters) -> bool:
    """Can what stands between be kept out of sums of products?"""
    values = [o.value for o in found.relation.operands if reader.plan.grid(o.value)]
    plan = reader.plan
    return len(values) == 1 and (plan.may_mask(values[0]) or plan.is_finite(values[0]))


def _carried(here: Emission, reader: SpacedReader, found: _Letters) -> fx.Node:
    """The call on operands that stand alike."""
    values: list[Any] = []
    for k, operand in enumerate(found.relation.operands):
        value = operand.value
        if not isinstance(value, fx.Node):
            values.append(value)
            continue
        held = reader.editor.tensor(value)
        if held is not None:
            values.append(_stretched(here, value, held, k, found))
            continue
        values.append(_alike(here, reader, value, k, found))
    given = map_arg(schema.arguments(here.node), here.read)
    arguments = schema.replaced(given, found.relation.operands, values)
    if here.node.target is aten.expand.default:
        outs = found.of(found.relation.outs[0])
        arguments["size"] = [outs[k].size if k in outs else n
                             for k, n in enumerate(arguments["size"])]  # fmt: skip
    args, kwargs = schema.call(here.node.target, arguments)
    return here.call(here.node.target, *args, **kwargs)


def _alike(
    here: Emission, reader: SpacedReader, value: fx.Node, k: int, found: _Letters
) -> fx.Node:
    """An operand as long as the others along every spread axis, masked where it is summed."""
    made, grid = here.read(value), reader.plan.grid(value)
    axes = {axis: part for axis, part in found.of(found.relation.ins[k]).items() if axis in grid}
    summed = {axis: part for axis, part in grid.items()
              if found.relation.ins[k][axis][0] in found.summed}  # fmt: skip
    if summed and not reader.plan.is_finite(value):
        made = here.masked(value, summed)
    more = {axis: part.size - grid[axis].size for axis, part in axes.items()}
    if not is_pointwise(
        here.node, here.plan.analysis.table
    ):  # which reads one position beside all others
        alone = found.of(found.relation.ins[k]).items()
        more |= {axis: part.size - 1 for axis, part in alone if axis not in grid}
    return here.longer(made, more)


def _stretched(here: Emission, value: fx.Node, held: Tensor, k: int, found: _Letters) -> fx.Node:
    """A constant whose positions stand as those of the other operands; zero between them where
    products with it are summed."""
    made = held
    for axis, part in found.of(found.relation.ins[k]).items():
        made = made.index_select(axis, part.nearest())
        if found.relation.ins[k][axis][0] in found.summed:
            made = made * mask_of({axis: part}, made.ndim)
    return value if made is held else here.editor.replace_constant(value, made, here.node)


# --- reductions -----------------------------------------------------------------------------------


def _reduction(reader: SpacedReader, found: _Letters) -> SpacedRule | NotSpaced:
    """A sum, mean or extreme over axes of which positions stand apart."""
    relation = found.relation
    x = relation.operands[0].value
    kind = relation.entry.rest
    over = {k: part for k, part in found.of(relation.ins[0]).items()
            if relation.ins[0][k][0] in found.reduced}  # fmt: skip
    outs = tuple(kept(found.of(axes)) for axes in relation.outs)
    if reader.plan.may_mask(x, NEUTRAL[kind], share_of(over, kind)):
        return reduced(x, over, outs, kind)
    if kind == "mean" and not outs[0]:
        return _summed_mean(reader)
    return NotSpaced(UNMASKED)


def _summed_mean(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """A mean over images as a convolution that reads the grid alone."""
    arguments = schema.arguments(reader.node)
    value = arguments["self"].meta["val"]
    dims = sorted(dim % value.ndim for dim in arguments.get("dim") or range(value.ndim))
    rank = value.ndim - 2
    sizes = value.shape[2:]
    if dims != list(range(2, value.ndim)) or not 1 <= rank <= 3 or arguments.get("dtype"):
        return NotSpaced(UNMASKED)
    if not all(isinstance(n, int) for n in sizes):
        return NotSpaced("sizes of images are known at run time alone")
    step = average(reader, AveragePool(tuple(sizes), tuple(sizes), (0,) * rank))
    if isinstance(step, NotSpaced):
        return step
    if step.outs[0]:
        return NotSpaced(
            f"{UNMASKED}, and a window that reads the grid alone finds more than the mean"
        )

    def emit(here: Emission) -> fx.Node:
        made = step.emit(here)
        return made if arguments.get("keepdim") else here.call(aten.squeeze.dims, made, dims)

    return SpacedRule(({},), emit)


# --- views and pads -------------------------------------------------------------------------------


def _viewed(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """A view: axes that it merges have merged places, and those it squeezes join the axis before
    them where they have got longer."""
    x = reader.node.all_input_nodes[0]
    grid, old = reader.plan.grid(x), list(x.meta["val"].shape)
    new = list(reader.node.meta["val"].shape)
    found = refined(old, new)
    if isinstance(found, Declined):
        return NotSpaced(found.text)
    before, after, sizes = found
    spreads: dict[str, Spread] = {}
    for axis, part in sorted(grid.items()):
        if len(before[axis]) > 1:
            return NotSpaced("it splits an axis whose positions stand apart")
        if not before[axis]:
            before[axis] = [f"one{axis}"]
            _insert(after, f"one{axis}", [name for axes in before[:axis] for name in axes])
        spreads[before[axis][0]] = part
    axes: dict[int, Spread] = {}
    for axis, letters in enumerate(after):
        if not set(letters) & set(spreads):
            continue
        parts = [spreads.get(name) or _whole(sizes[name]) for name in letters]
        if any(part is None for part in parts):
            return NotSpaced("it merges them with an axis whose size is known at run time alone")
        axes[axis] = merged([part for part in parts if part is not None])
    shape = [axes[k].size if k in axes else n if isinstance(n, int) else -1
             for k, n in enumerate(new)]  # fmt: skip
    if shape.count(-1) > 1:
        return NotSpaced("a view of several sizes known at run time alone")
    outs = (kept(axes),)
    return SpacedRule(outs, lambda here: here.call(aten.reshape.default, here.read(x), shape))


def _whole(size: int | None) -> Spread | None:
    return None if size is None else Spread.even(size, 1, size)


def _insert(after: list[list[str]], name: str, front: list[str]) -> None:
    """Put the letter of an axis of one position behind the letters in front of it: on an axis of
    its own, if the view leaves one there."""
    at = max((k for k, axes in enumerate(after) if front and front[-1] in axes), default=-1)
    if at + 1 < len(after) and not after[at + 1]:
        after[at + 1] = [name]
    elif at < 0:
        after[0].insert(0, name)
    else:
        after[at].insert(after[at].index(front[-1]) + 1, name)


def _pad(reader: SpacedReader) -> SpacedRule | NotSpaced:
    """Constants around a value: gap times as many."""
    arguments = schema.arguments(reader.node)
    x, flat = arguments["self"], list(arguments["pad"])
    if arguments.get("mode", "constant") != "constant":
        return NotSpaced("it pads with what stands at the border")
    grid, rank = reader.plan.grid(x), x.meta["val"].ndim
    axes, pads = dict(grid), list(flat)
    for axis, part in grid.items():
        at = 2 * (rank - 1 - axis)
        if at >= len(flat) or not any(flat[at : at + 2]):
            continue
        if part.gap is None or not all(isinstance(n, int) for n in flat[at : at + 2]):
            return NotSpaced("it pads an axis whose positions stand on no even grid")
        front, behind = (n * part.gap for n in flat[at : at + 2])
        pads[at : at + 2] = [front, behind]
        count = part.count + sum(flat[at : at + 2])
        axes[axis] = Spread.even(count, part.gap, part.size + front + behind)
    wild = not math.isfinite(arguments["value"] or 0)  # a window may find nothing else
    return SpacedRule((kept(axes),), lambda here: here.again(pad=pads), wild)
