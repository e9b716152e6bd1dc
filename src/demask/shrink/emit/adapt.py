"""Converts values between layouts: the only code that emits gathers, slices, scatters and pads.

    adapt(scatter(small, have), want) == scatter(small', want)      on everything that is read

A position that the value lacks is filled with its known value, or with 0 where nothing reads it.
Supports are positions, progressions of them (slices), or indices known only at run time
(`RunTimeSupports`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Key, key_of, value_of
from demask.graph.editor import GraphEditor
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.cells import Layout, Positions, RunTimeIndex, RunTimeSupports

aten = torch.ops.aten


@dataclass(slots=True)
class EmittedValue:
    """A value in the new graph: its node and layout. run_time: axes of which only the positions at
    a run-time index are stored, with `fill` (broadcast over the value) elsewhere."""

    node: fx.Node
    layout: Layout
    run_time: RunTimeSupports = ()
    fill: Tensor | None = None


@dataclass(slots=True)
class Adapter:
    """Adapts values while a graph is emitted; marks the nodes that it adds with their effect.

    converted: values that were wanted in another layout than they have."""

    editor: GraphEditor
    store: ConstantStore
    facts: Facts
    emitted: dict[Key, EmittedValue] = field(default_factory=dict)
    converted: set[Key] = field(default_factory=set)
    adapted: dict[tuple[Key, Layout], fx.Node] = field(default_factory=dict)
    gathered: dict[tuple[fx.Node, RunTimeSupports], fx.Node] = field(default_factory=dict)
    whole: dict[tuple[fx.Node, RunTimeSupports], fx.Node] = field(default_factory=dict)
    index_nodes: dict[RunTimeIndex, fx.Node] = field(default_factory=dict)

    def have(self, key: Key) -> Layout | None:
        """The layout of a value in the new graph, None if it was not computed."""
        return self.emitted[key].layout if key in self.emitted else None

    def adapt(
        self, source: fx.Node, want: Layout, *, broadcast: bool = False, run_time: RunTimeSupports = ()
    ) -> fx.Node:
        """The value of a node of the old graph, in layout `want`.

        broadcast: whether a value known everywhere may have axes of size one. run_time: axes wanted
        only at run-time indices (`want` is None there).
        """
        key = key_of(source)
        if source.op == "get_attr":
            return self.gather(self.store.cut(source, want), run_time)
        if run_time or (key in self.emitted and self.emitted[key].run_time):
            return self._adapt_run_time(self.emitted[key], run_time)
        if self.have(key) != want:
            self.converted.add(key)
        if key not in self.emitted or not self._has_any(key, source, want):
            return self._emit_known(source, want, broadcast)
        value = self.emitted[key]
        if value.layout == want:
            return value.node
        if (key, want) not in self.adapted:
            self.adapted[key, want] = self._convert(key, source, value, want)
        return self.adapted[key, want]

    def _adapt_run_time(self, value: EmittedValue, run_time: RunTimeSupports) -> fx.Node:
        """A value of which some axes are stored, or wanted, only at run-time indices."""
        assert all(positions is None for positions in value.layout)
        node, rest = value.node, tuple(axis for axis in value.run_time if axis not in run_time)
        if rest and (node, rest) not in self.whole:
            assert value.fill is not None
            whole = node
            for axis, index in rest:
                whole = self.scatter_at(whole, axis, index, value.fill)
            self.whole[node, rest] = whole
        node = self.whole.get((node, rest), node)
        return self.gather(node, tuple(wanted for wanted in run_time if wanted not in value.run_time))

    def gather(self, node: fx.Node, run_time: RunTimeSupports) -> fx.Node:
        """A full value, gathered at run-time indices of some axes."""
        for k in range(len(run_time)):
            if (node, run_time[: k + 1]) not in self.gathered:
                axis, index = run_time[k]
                gathered = self.editor.call(aten.index_select.default, node, axis, self.positions(index))
                self.gathered[node, run_time[: k + 1]] = mark_effect(gathered, "gather")
            node = self.gathered[node, run_time[: k + 1]]
        return node

    def positions(self, index: RunTimeIndex) -> fx.Node:
        """The positions along an axis in a run-time index, int64."""
        if index not in self.index_nodes:
            node = self.emitted[index.source, 0].node
            if index.inner > 1:
                first = self.editor.call(aten.mul.Tensor, node, index.inner)
                node = self._sum_pairs(first, self.store.index(range(index.inner)))
            if index.outer > 1:
                step = index.size * index.inner
                starts = self.store.index(range(0, index.length, step))
                node = self._sum_pairs(starts, node)
            self.index_nodes[index] = node
        return self.index_nodes[index]

    def _sum_pairs(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """a[i] + b[j] for every i and j, flat."""
        column = self.editor.call(aten.unsqueeze.default, a, 1)
        both = self.editor.call(aten.add.Tensor, column, b)
        return self.editor.call(aten.reshape.default, both, [-1])

    def scatter_at(self, node: fx.Node, axis: int, index: RunTimeIndex, fill: Tensor | fx.Node) -> fx.Node:
        """A value stored at a run-time index of an axis, scattered to the full axis. `fill`
        elsewhere: a constant that broadcasts, or a full value of the new graph."""
        if isinstance(fill, fx.Node):
            base = fill
        else:
            sizes = self._size_expressions(node)
            sizes[axis] = index.length
            base = self._filled(node, sizes, fill)
        args = (base, axis, self.positions(index), node)
        return mark_effect(self.editor.call(aten.index_copy.default, *args), "scatter")

    def _filled(self, node: fx.Node, sizes: list[object], fill: Tensor) -> fx.Node:
        flat = fill.reshape(-1)
        if bool((flat == flat[0]).all()):
            return self.editor.call(aten.new_full.default, node, sizes, flat[0].item())
        constant = self.store.constant(fill, "fill")
        return self.editor.call(aten.expand.default, constant, sizes)

    def _has_any(self, key: Key, source: fx.Node, want: Layout) -> bool:
        """Whether the value has any wanted position."""
        have = self.emitted[key].layout
        return all(
            w != () and (h is None or w is None or bool(set(h) & set(w))) for h, w in zip(have, want, strict=True)
        )

    def _convert(self, key: Key, source: fx.Node, value: EmittedValue, want: Layout) -> fx.Node:
        node, layout = value.node, list(value.layout)
        sizes = [n if isinstance(n, int) else None for n in value_of(source).shape]
        # Gathers first: scatters then move less.
        for axis in range(len(want)):
            node, layout[axis] = self._gather_wanted(node, axis, layout[axis], want[axis], sizes[axis])
        for axis in range(len(want)):
            if layout[axis] != want[axis]:
                fill = self.fill(key, want, axis, layout)
                node = self._scatter_missing(node, axis, layout[axis], want[axis], sizes[axis], fill)
                layout[axis] = want[axis]
        return node

    def fill(self, key: Key, want: Layout, axis: int, layout: Sequence[Positions]) -> Tensor:
        """The known values at every wanted position of one axis (0 where unknown), the other axes
        as laid out; every dimension is 1 or as long as the layout."""
        fill = self.facts[key].fill
        for k, positions in enumerate(want if axis < 0 else layout):
            positions = want[k] if k == axis else positions
            if positions is not None and fill.shape[k] != 1:
                fill = fill.index_select(k, torch.tensor(positions, dtype=torch.long))
        return fill

    def _emit_known(self, source: fx.Node, want: Layout, broadcast: bool) -> fx.Node:
        """A value that is known everywhere, as a constant."""
        key = key_of(source)
        constant = self.store.value(self.fill(key, want, -1, want), "fill")
        if broadcast:
            return constant
        real = value_of(source)
        sizes = [self.build_size(size) if want[k] is None else len(want[k] or ()) for k, size in enumerate(real.shape)]
        wide = self.editor.call(aten.expand.default, constant, sizes)
        return self.editor.call(aten.clone.default, wide)

    def build_size(self, size: object) -> object:
        """A size as a call argument."""
        return self.store.size(size)

    def _gather_wanted(
        self, node: fx.Node, axis: int, have: Positions, want: Positions, size: int | None
    ) -> tuple[fx.Node, Positions]:
        """The value at the wanted positions that it has, in wanted order, and these positions."""
        if have == want or size is None:
            return node, have
        available = list(range(size)) if have is None else list(have)
        offsets = {position: k for k, position in enumerate(available)}
        wanted = range(size) if want is None else want
        take = [offsets[p] for p in wanted if p in offsets]
        if take == list(range(len(available))):
            return node, have
        if len(take) < len(wanted) and len(take) == len(available):
            return node, have  # Only the order differs: the following scatter indexes anyway.
        taken = [available[k] for k in take]
        positions = None if taken == list(range(size)) else tuple(taken)
        return self.select(node, axis, take), positions

    def select(self, node: fx.Node, axis: int, take: Sequence[int]) -> fx.Node:
        """Some entries of an axis: a slice where they are evenly spaced, else a gather."""
        step = take[1] - take[0] if len(take) > 1 else 1
        if step > 0 and list(take) == list(range(take[0], take[0] + step * len(take), step)):
            gathered = self.editor.call(aten.slice.Tensor, node, axis, take[0], take[-1] + 1, step)
            return mark_effect(gathered, "slice")
        gathered = self.editor.call(aten.index_select.default, node, axis, self.store.index(take))
        return mark_effect(gathered, "gather")

    def _scatter_missing(
        self, node: fx.Node, axis: int, have: Positions, want: Positions, size: int | None, fill: Tensor
    ) -> fx.Node:
        """The value with missing positions added. fill: over the wanted positions (or size 1)."""
        assert size is not None
        available = list(range(size)) if have is None else list(have)
        wanted = list(range(size)) if want is None else list(want)
        offsets = {position: k for k, position in enumerate(available)}
        missing = [k for k, p in enumerate(wanted) if p not in offsets]
        full = fill.expand([len(wanted) if k == axis else n for k, n in enumerate(fill.shape)])
        filler = full.index_select(axis, torch.tensor(missing, dtype=torch.long))
        flat = filler.reshape(-1)
        if bool((flat == flat[0]).all()):
            return self._pad_missing(node, axis, available, wanted, flat[0].item())
        distinct, which = torch.unique(filler, dim=axis, return_inverse=True)
        columns = self.store.constant(distinct, "fill")
        shape = [distinct.shape[axis] if k == axis else n for k, n in enumerate(self._size_expressions(node))]
        both = self.editor.call(aten.cat.default, [node, self.editor.call(aten.expand.default, columns, shape)], axis)
        column = {k: len(available) + int(c) for k, c in zip(missing, which.tolist(), strict=True)}
        take = [column[k] if k in column else offsets[p] for k, p in enumerate(wanted)]
        if take == list(range(len(available) + distinct.shape[axis])):
            return mark_effect(both, "scatter")
        scattered = self.editor.call(aten.index_select.default, both, axis, self.store.index(take))
        return mark_effect(scattered, "scatter")

    def _pad_missing(self, node: fx.Node, axis: int, available: list[int], wanted: list[int], value: float) -> fx.Node:
        """One value for all missing positions: a pad, indexed where it is not contiguous."""
        if available == wanted:
            return node
        rank = len(value_of(node).shape)
        before = [0, 0] * (rank - axis - 1)
        start = wanted.index(available[0]) if available else 0
        if len(available) == len(wanted) and available != wanted:
            return self.select(node, axis, [available.index(p) for p in wanted])
        if wanted[start : start + len(available)] == available:
            ends = [start, len(wanted) - start - len(available)]
            padded = self.editor.call(aten.constant_pad_nd.default, node, before + ends, value)
            return mark_effect(padded, "pad")
        one = self.editor.call(aten.constant_pad_nd.default, node, [*before, 0, 1], value)
        offsets = {position: k for k, position in enumerate(available)}
        take = [offsets.get(p, len(available)) for p in wanted]
        padded = self.editor.call(aten.index_select.default, one, axis, self.store.index(take))
        return mark_effect(padded, "scatter")

    def scatter(self, node: fx.Node, axis: int, positions: Sequence[int], size: int, value: float) -> fx.Node:
        """A value with its entries at some positions of an axis, and `value` everywhere else."""
        offsets = {place: k for k, place in enumerate(positions)}
        wanted = [offsets.get(k, len(positions) + k) for k in range(size)]
        return self._pad_missing(node, axis, list(range(len(positions))), wanted, value)

    def _size_expressions(self, node: fx.Node) -> list[object]:
        return [self.store.size(size) for size in value_of(node).shape]


def mark_effect(node: fx.Node, effect: str) -> fx.Node:
    """The node, marked as one that only preserves a shape. effect: how; the report counts these."""
    node.meta["effect"] = effect
    return node
