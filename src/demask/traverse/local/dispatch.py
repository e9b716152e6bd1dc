"""One call on parts of its operands.

    run(parts of operands that needs(window) names, window) == op(whole operands)[window]

The op's entry in the table selects the way: along carried axes, the op runs on the parts; views and
shuffles are copied; sliding windows read a border only where the image has one; moved positions are
copied from their source.
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
from demask.ops.schema import fake
from demask.traverse import axes as parts
from demask.traverse.axes import COLUMNS, NONE, ROWS, Axes, Window
from demask.traverse.local.call import LocalCall, LocalKind, OperandCut, Scratch, narrowed, nbytes
from demask.traverse.local.carried import LocalApply, LocalRearrange, is_rearranged
from demask.traverse.local.kernels import faster_kind
from demask.traverse.local.moves import LocalMove
from demask.traverse.local.resize import LocalResize
from demask.traverse.local.windows import windowed
from demask.tune.epilogue import Epilogue, apply_activation

RESIZES = ("nearest", "exact", "linear", "cubic")


@dataclass(frozen=True, slots=True)
class Read:
    """An operand that is cut.

    operand: its index. rules: what a window of the output needs along its rows and columns. whole:
    whether every window needs all of its rows.
    """

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
        """Whether the output may be written over an operand that is read at the same positions."""
        return self.kind.pointwise

    def needs(self, read: int, dim: int, start: int, end: int) -> Interval:
        """The interval of an operand that positions [start, end) along rows or columns need."""
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
        """The output's part of a window, written into `into` where that is not None.

        Args:
            operands: of each operand of the relation, exactly the part that the window needs; the
                whole operand where it is not cut.
            add: whether to add to the values in `into`.
            after: an activation to apply last.

        Raises:
            ValueError: if `add` is set and the call is no convolution.
        """
        if add and not self.kind.adds:
            raise ValueError(f"{self.node}: expected a convolution to add onto, got {self.node.target}")
        call, computed = self.call, self.kind.computed_window(window)
        if into is None:
            into = parts.empty(call.sizes(window), self.axes, call.dtype)
        values = self._narrowed(operands, window)
        target = into if computed == window else scratch(call.sizes(computed), self.axes, call.dtype)
        if self.kind.adds:
            self.kind.run_onto(values, window, target, scratch, after, add)  # type: ignore[attr-defined]
            return into
        self.kind.run(values, window, target, scratch)
        if target is not into:
            origin = (computed[ROWS][0], computed[COLUMNS][0])
            into.copy_(parts.part(target, self.axes, window, origin))
        if after is not None:
            activate(after, into)
        return into

    def _narrowed(self, operands: Sequence[Any], window: Window) -> list[Any]:
        """The operands; those that arrive whole are narrowed to what the window needs."""
        values = list(operands)
        for k, cut in enumerate(self.call.cuts):
            for axis, rule, arrives, w in zip(cut.axes, cut.rules, cut.arrives, window, strict=True):
                if axis is not None and rule is not None and not arrives:
                    values[k] = narrowed(values[k], axis, rule(*w))
        return values

    def macs(self, window: Window) -> int:
        """Multiply-adds that `run` executes."""
        return self.kind.macs(self.kind.computed_window(window))

    def scratch_bytes(self, window: Window) -> int:
        """Bytes that `run` requests from scratch."""
        computed = self.kind.computed_window(window)
        crop = 0 if computed == window else nbytes(self.call.sizes(computed), self.call.dtype)
        return crop + self.kind.scratch_bytes(window)

    def allocated_bytes(self, window: Window) -> int:
        """Bytes that torch allocates during `run`."""
        return self.kind.allocated_bytes(window)


def activate(after: Epilogue, into: Tensor) -> None:
    """Apply an activation to a part in place."""
    activated = apply_activation(after, into)
    if activated is not into:
        into.copy_(activated)


def local(node: fx.Node, relation: Relation | Declined, axes: Mapping[fx.Node, Axes]) -> Local | Declined:
    """How a call runs on parts; Declined where it must run whole.

    axes: of the values that are cut, including the call's own.
    """
    if isinstance(relation, Declined):
        return relation
    name, pair = op_name(node.target), axes.get(node)
    if pair is None or pair[ROWS] is None:
        return Declined(f"{name}: no rows run through it")
    if len(relation.outs) != 1:
        return Declined(f"{name}: several outputs have no parts yet")
    operands = [_read(relation, k, pair, axes) for k in range(len(relation.operands))]
    for cut, _ in operands:
        if isinstance(cut, Declined):
            return cut
    call = _call(relation, pair, tuple(cut for cut, _ in operands))  # type: ignore[arg-type]
    kind = _kind(call)
    if isinstance(kind, Declined):
        return kind
    return Local(node, relation, pair, tuple(r for _, r in operands if r is not None), call, kind)


def _call(relation: Relation, pair: Axes, cuts: tuple[OperandCut, ...]) -> LocalCall:
    value = fake(relation.node)
    bound = dict(schema.arguments(relation.node))
    for name in relation.entry.indices:
        bound[name] = bound[name].meta["positions"]
    shape = tuple(schema.example_size(n) for n in value.shape)
    return LocalCall(relation, pair, shape, value.dtype, bound, cuts)


def _read(
    relation: Relation, k: int, pair: Axes, axes: Mapping[fx.Node, Axes]
) -> tuple[OperandCut | Declined, Read | None]:
    """How operand k is cut along the output's rows and columns, and what is read of it."""
    operand, operand_axes, rules, arrives = relation.operands[k], [], [], []
    value = fake(operand.value) if isinstance(operand.value, fx.Node) else None
    shape = () if value is None else tuple(schema.example_size(n) for n in value.shape)
    value_axes = axes.get(operand.value, NONE) if value is not None else NONE
    for dim, axis in enumerate(pair):
        along = None if axis is None else axis_of(relation, k, axis)
        here = along is not None and value_axes[dim] == along
        if here and dim == ROWS and regions.is_whole(relation, k, axis or 0):
            return Declined(f"{op_name(relation.node.target)} needs all rows at once"), None
        operand_axes.append(along)
        rules.append(None if along is None else regions.region_rule(relation, k, axis or 0))
        arrives.append(here)
    cut = OperandCut((operand_axes[0], operand_axes[1]), (rules[0], rules[1]), (arrives[0], arrives[1]), shape)
    if value_axes == NONE:
        return cut, None
    window_rules = []
    for dim in (ROWS, COLUMNS):
        cut_axis, rule = value_axes[dim], rules[dim]
        window_rules.append(rule if arrives[dim] else _all(1 if cut_axis is None else shape[cut_axis]))
    return cut, Read(operand.value, k, (window_rules[0], window_rules[1]), whole=not arrives[ROWS])


def _all(length: int) -> Rule:
    return lambda start, end: (0, length)


def _kind(call: LocalCall) -> LocalKind | Declined:
    """The way to run a call, selected by the table's roles of the axes that are cut."""
    relation = call.relation
    letters = {letter for axis in call.axes if axis is not None for letter in relation.outs[0][axis]}
    if letters & relation.moved:
        return LocalMove.of(call)
    if letters & relation.window and relation.entry.region in RESIZES:
        return LocalResize.of(call)
    if letters & relation.window:
        return faster_kind(windowed(call))
    if is_rearranged(call):
        return LocalRearrange.of(call)
    return LocalApply.of(call)


__all__ = ["Local", "Read", "local"]
