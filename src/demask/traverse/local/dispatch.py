"""One call on parts of its operands.

    run(parts of operands that needs(window) names, window) == op(whole operands)[window]

A call runs in the way that its line in the table says: along axes that it carries, on the parts as
it stands; values that are only laid out anew are copied; windows that slide read a border only
where the image has one; what is moved is copied from where it stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from demask.ops import regions, schema
from demask.ops.entry import Declined, op_name
from demask.ops.flow import axis_of
from demask.ops.regions import Interval, Rule
from demask.ops.relation import Relation
from demask.traverse import axes as parts
from demask.traverse.axes import COLUMNS, NONE, ROWS, Axes, Window
from demask.traverse.local.call import LocalCall, LocalKind, OperandCut, Scratch, narrowed, nbytes
from demask.traverse.local.carried import Apply, Rearrange, is_rearranged
from demask.traverse.local.depthwise import quicker
from demask.traverse.local.moves import LocalMove
from demask.traverse.local.resize import Resize
from demask.traverse.local.windows import windowed
from demask.tune.epilogue import Epilogue, plain_call

RESIZES = ("nearest", "exact", "linear", "cubic")


@dataclass(frozen=True, slots=True)
class Read:
    """An operand that is cut. operand: its index. rules: what a window of the output needs along
    its rows and columns. whole: are all of its rows needed, whichever are made?"""

    node: fx.Node
    operand: int
    rules: tuple[Rule, Rule]
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A call that can be run on parts of its operands."""

    node: fx.Node
    relation: Relation
    axes: Axes
    reads: tuple[Read, ...]
    call: LocalCall
    kind: LocalKind

    @property
    def pointwise(self) -> bool:
        """May the output be written over an operand that it reads at the same positions?"""
        return self.kind.pointwise

    def needs(self, read: int, dim: int, start: int, end: int) -> Interval:
        """Positions of an operand that positions [start, end) along rows or columns need."""
        return self.reads[read].rules[dim](start, end)

    def run(
        self,
        operands: Sequence[Any],
        window: Window,
        into: Tensor | None = None,
        scratch: Scratch = parts.empty,
        *,
        after: Epilogue | None = None,
        add: bool = False,
    ) -> Tensor:
        """The positions of a window, in `into` where it is given.

        operands: of each operand of the relation, exactly the part that the window needs, or all
        of it where it is not cut. add: onto what `into` holds. after: an activation behind it.
        """
        if add and not self.kind.adds:
            raise ValueError(
                f"{self.node}: expected a convolution to add onto, got {self.node.target}"
            )
        call, made = self.call, self.kind.made(window)
        if into is None:
            into = parts.empty(call.sizes(window), self.axes, call.dtype)
        values = self._narrowed(operands, window)
        target = into if made == window else scratch(call.sizes(made), self.axes, call.dtype)
        if self.kind.adds:
            self.kind.run_onto(values, window, target, scratch, after, add)  # type: ignore[attr-defined]
            return into
        self.kind.run(values, window, target, scratch)
        if target is not into:
            origin = (made[ROWS][0], made[COLUMNS][0])
            into.copy_(parts.part(target, self.axes, window, origin))
        if after is not None:
            activate(after, into)
        return into

    def _narrowed(self, operands: Sequence[Any], window: Window) -> list[Any]:
        """The operands that come whole, along rows and columns, as the window needs them."""
        values = list(operands)
        for k, cut in enumerate(self.call.cuts):
            for axis, rule, arrives, w in zip(
                cut.axes, cut.rules, cut.arrives, window, strict=True
            ):
                if axis is not None and rule is not None and not arrives:
                    values[k] = narrowed(values[k], axis, rule(*w))
        return values

    def macs(self, window: Window) -> int:
        """Multiply-adds that `run` executes."""
        return self.kind.macs(self.kind.made(window))

    def temporary(self, window: Window) -> int:
        """Bytes that `run` asks scratch for."""
        made = self.kind.made(window)
        crop = 0 if made == window else nbytes(self.call.sizes(made), self.call.dtype)
        return crop + self.kind.temporary(window)

    def beside(self, window: Window) -> int:
        """Bytes that torch allocates for results while `run` runs."""
        return self.kind.beside(window)


def activate(after: Epilogue, into: Tensor) -> None:
    """An activation of what a part holds, in its place."""
    made = plain_call(after, into)
    if made is not into:
        into.copy_(made)


def local(
    node: fx.Node, relation: Relation | Declined, axes: Mapping[fx.Node, Axes]
) -> Local | Declined:
    """How a call is run on parts; Declined where it must be run whole.

    axes: of the values that are cut, the call's own among them.
    """
    if isinstance(relation, Declined):
        return relation
    name, pair = op_name(node.target), axes.get(node)
    if pair is None or pair[ROWS] is None:
        return Declined(f"{name}: no rows run through it")
    if len(relation.outs) != 1:
        return Declined(f"{name}: several outputs have no parts yet")
    found = [_read(relation, k, pair, axes) for k in range(len(relation.operands))]
    for cut, _ in found:
        if isinstance(cut, Declined):
            return cut
    call = _call(relation, pair, tuple(cut for cut, _ in found))  # type: ignore[arg-type]
    kind = _kind(call)
    if isinstance(kind, Declined):
        return kind
    return Local(node, relation, pair, tuple(r for _, r in found if r is not None), call, kind)


def _call(relation: Relation, pair: Axes, cuts: tuple[OperandCut, ...]) -> LocalCall:
    value = relation.node.meta["val"]
    found = dict(schema.arguments(relation.node))
    for name in relation.entry.indices:
        found[name] = found[name].meta["positions"]
    shape = tuple(schema.hint(n) for n in value.shape)
    return LocalCall(relation, pair, shape, value.dtype, found, cuts)


def _read(
    relation: Relation, k: int, pair: Axes, axes: Mapping[fx.Node, Axes]
) -> tuple[OperandCut | Declined, Read | None]:
    """How operand k runs along the output's rows and columns, and what is read of it."""
    operand, places, rules, arrives = relation.operands[k], [], [], []
    value = operand.value.meta["val"] if isinstance(operand.value, fx.Node) else None
    shape = () if value is None else tuple(schema.hint(n) for n in value.shape)
    theirs = axes.get(operand.value, NONE) if value is not None else NONE
    for dim, axis in enumerate(pair):
        along = None if axis is None else axis_of(relation, k, axis)
        here = along is not None and theirs[dim] == along
        if here and dim == ROWS and regions.is_whole(relation, k, axis or 0):
            return Declined(f"{op_name(relation.node.target)} needs all rows at once"), None
        places.append(along)
        rules.append(None if along is None else regions.rule(relation, k, axis or 0))
        arrives.append(here)
    cut = OperandCut((places[0], places[1]), (rules[0], rules[1]), (arrives[0], arrives[1]), shape)
    if theirs == NONE:
        return cut, None
    told = []
    for dim in (ROWS, COLUMNS):
        at, mine = theirs[dim], rules[dim]
        told.append(mine if arrives[dim] else _all(1 if at is None else shape[at]))
    return cut, Read(operand.value, k, (told[0], told[1]), whole=not arrives[ROWS])


def _all(length: int) -> Rule:
    return lambda start, end: (0, length)


def _kind(call: LocalCall) -> LocalKind | Declined:
    """The way to run a call, by what the table says of the axes that are cut."""
    relation = call.relation
    letters = {
        letter for axis in call.axes if axis is not None for letter in relation.outs[0][axis]
    }
    if letters & relation.moved:
        return LocalMove.of(call)
    if letters & relation.window and relation.entry.region in RESIZES:
        return Resize.of(call)
    if letters & relation.window:
        return quicker(windowed(call))
    if is_rearranged(call):
        return Rearrange.of(call)
    return Apply.of(call)


__all__ = ["Local", "Read", "local"]
