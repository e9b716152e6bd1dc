"""The only maker of gathers, slices, scatters and pads: a value in the layout that a reader wants.

    adapt(scatter(small, have), want) == scatter(small', want)      on everything that is read

A position the value does not hold is filled with what is known of it, or with 0 where nobody reads.
Supports are positions, even spacings of them (slices), or indices that come at run time (`at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from demask.facts.known import Facts, Key, key_of, value_of
from demask.graph.editor import GraphEditor
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.layout.cells import At, Layout, Positions, RunTimeIndex

aten = torch.ops.aten


@dataclass(slots=True)
class Made:
    """A value as the new graph makes it: its node and layout; at: axes held at run-time indices
    alone, `fill` (broadcast over the value) elsewhere."""

    node: fx.Node
    layout: Layout
    at: At = ()
    fill: Tensor | None = None


@dataclass(slots=True)
class Adapter:
    """Adapts values while a graph is rewritten; marks what it makes with its effect."""

    editor: GraphEditor
    pool: ConstantStore
    facts: Facts
    made: dict[Key, Made] = field(default_factory=dict)
    done: dict[tuple[Key, Layout], fx.Node] = field(default_factory=dict)
    indexed: dict[tuple[fx.Node, At], fx.Node] = field(default_factory=dict)
    spread: dict[tuple[fx.Node, At], fx.Node] = field(default_factory=dict)
    places: dict[RunTimeIndex, fx.Node] = field(default_factory=dict)

    def have(self, key: Key) -> Layout | None:
        """The layout a value is in, None if it was not computed."""
        return self.made[key].layout if key in self.made else None

    def adapt(
        self, source: fx.Node, want: Layout, *, broadcast: bool = False, at: At = ()
    ) -> fx.Node:
        """The value that an old node stands for, in layout `want`.

        broadcast: a value known everywhere may come with axes of size one. at: the axes that are
        wanted at run-time indices alone (`want` is None there).
        """
        key = key_of(source)
        if source.op == "get_attr":
            return self.picked(self.pool.cut(source, want), at)
        if at or (key in self.made and self.made[key].at):
            return self._indexed(self.made[key], at)
        if key not in self.made or not self._meets(key, source, want):
            return self._known(source, want, broadcast)
        made = self.made[key]
        if made.layout == want:
            return made.node
        if (key, want) not in self.done:
            self.done[key, want] = self._adapted(key, source, made, want)
        return self.done[key, want]

    def _indexed(self, made: Made, at: At) -> fx.Node:
        """A value of which some axes are held, or wanted, at run-time indices alone."""
        assert all(positions is None for positions in made.layout)
        node, gone = made.node, tuple(held for held in made.at if held not in at)
        if gone and (node, gone) not in self.spread:
            assert made.fill is not None
            whole = node
            for axis, index in gone:
                whole = self.put(whole, axis, index, made.fill)
            self.spread[node, gone] = whole
        node = self.spread.get((node, gone), node)
        return self.picked(node, tuple(wanted for wanted in at if wanted not in made.at))

    def picked(self, node: fx.Node, at: At) -> fx.Node:
        """A whole value, of some axes only what run-time indices tell."""
        for k in range(len(at)):
            if (node, at[: k + 1]) not in self.indexed:
                axis, index = at[k]
                made = self.editor.call(
                    aten.index_select.default, node, axis, self.positions(index)
                )
                self.indexed[node, at[: k + 1]] = marked(made, "gather")
            node = self.indexed[node, at[: k + 1]]
        return node

    def positions(self, index: RunTimeIndex) -> fx.Node:
        """The positions along an axis that a run-time index tells, int64."""
        if index not in self.places:
            node = self.made[index.source, 0].node
            if index.inner > 1:
                first = self.editor.call(aten.mul.Tensor, node, index.inner)
                node = self._crossed(first, self.pool.index(range(index.inner)))
            if index.outer > 1:
                step = index.size * index.inner
                starts = self.pool.index(range(0, index.length, step))
                node = self._crossed(starts, node)
            self.places[index] = node
        return self.places[index]

    def _crossed(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """a[i] + b[j] for every i and j, flat."""
        column = self.editor.call(aten.unsqueeze.default, a, 1)
        both = self.editor.call(aten.add.Tensor, column, b)
        return self.editor.call(aten.reshape.default, both, [-1])

    def put(self, node: fx.Node, axis: int, index: RunTimeIndex, fill: Tensor | fx.Node) -> fx.Node:
        """A value held at a run-time index of an axis, whole: `fill` elsewhere, a constant that
        broadcasts, or a whole value of the new graph."""
        if isinstance(fill, fx.Node):
            base = fill
        else:
            sizes = self._sizes(node)
            sizes[axis] = index.length
            base = self._filled(node, sizes, fill)
        args = (base, axis, self.positions(index), node)
        return marked(self.editor.call(aten.index_copy.default, *args), "scatter")

    def _filled(self, node: fx.Node, sizes: list[object], fill: Tensor) -> fx.Node:
        flat = fill.reshape(-1)
        if bool((flat == flat[0]).all()):
            return self.editor.call(aten.new_full.default, node, sizes, flat[0].item())
        constant = self.pool.constant(fill, "fill")
        return self.editor.call(aten.expand.default, constant, sizes)

    def _meets(self, key: Key, source: fx.Node, want: Layout) -> bool:
        """Is any wanted position held?"""
        held = self.made[key].layout
        return all(
            w != () and (h is None or w is None or bool(set(h) & set(w)))
            for h, w in zip(held, want, strict=True)
        )

    def _adapted(self, key: Key, source: fx.Node, made: Made, want: Layout) -> fx.Node:
        node, layout = made.node, list(made.layout)
        sizes = [n if isinstance(n, int) else None for n in value_of(source).shape]
        # Gathers first: scatters then move less.
        for axis in range(len(want)):
            node, layout[axis] = self._gathered(node, axis, layout[axis], want[axis], sizes[axis])
        for axis in range(len(want)):
            if layout[axis] != want[axis]:
                fill = self.fill(key, want, axis, layout)
                node = self._scattered(node, axis, layout[axis], want[axis], sizes[axis], fill)
                layout[axis] = want[axis]
        return node

    def fill(self, key: Key, want: Layout, axis: int, layout: Sequence[Positions]) -> Tensor:
        """What is known at every wanted position of one axis (0 where nothing is), others as laid
        out; every dimension 1 or as long as the layout."""
        fill = self.facts[key].fill
        for k, positions in enumerate(want if axis < 0 else layout):
            positions = want[k] if k == axis else positions
            if positions is not None and fill.shape[k] != 1:
                fill = fill.index_select(k, torch.tensor(positions, dtype=torch.long))
        return fill

    def _known(self, source: fx.Node, want: Layout, broadcast: bool) -> fx.Node:
        """A value that is known everywhere, as a constant."""
        key = key_of(source)
        constant = self.pool.value(self.fill(key, want, -1, want), "fill")
        if broadcast:
            return constant
        real = value_of(source)
        sizes = [
            self.build_size(size) if want[k] is None else len(want[k] or ())
            for k, size in enumerate(real.shape)
        ]
        wide = self.editor.call(aten.expand.default, constant, sizes)
        return self.editor.call(aten.clone.default, wide)

    def build_size(self, size: object) -> object:
        """A size as a call argument."""
        return self.pool.size(size)

    def _gathered(
        self, node: fx.Node, axis: int, have: Positions, want: Positions, size: int | None
    ) -> tuple[fx.Node, Positions]:
        """The positions that are held and wanted, in wanted order."""
        if have == want or size is None:
            return node, have
        held = list(range(size)) if have is None else list(have)
        at = {position: k for k, position in enumerate(held)}
        wanted = range(size) if want is None else want
        take = [at[p] for p in wanted if p in at]
        if take == list(range(len(held))):
            return node, have
        if len(take) < len(wanted) and len(take) == len(held):
            return node, have  # Only the order differs: the scatter to come indexes anyway.
        left = [held[k] for k in take]
        positions = None if left == list(range(size)) else tuple(left)
        return self.select(node, axis, take), positions

    def select(self, node: fx.Node, axis: int, take: Sequence[int]) -> fx.Node:
        """The given entries of an axis: a slice where they are evenly spaced, else a gather."""
        step = take[1] - take[0] if len(take) > 1 else 1
        if step > 0 and list(take) == list(range(take[0], take[0] + step * len(take), step)):
            made = self.editor.call(aten.slice.Tensor, node, axis, take[0], take[-1] + 1, step)
            return marked(made, "slice")
        made = self.editor.call(aten.index_select.default, node, axis, self.pool.index(take))
        return marked(made, "gather")

    def _scattered(
        self,
        node: fx.Node,
        axis: int,
        have: Positions,
        want: Positions,
        size: int | None,
        fill: Tensor,
    ) -> fx.Node:
        """Missing positions put in. fill: over the wanted positions (dimension 1: all alike)."""
        assert size is not None
        held = list(range(size)) if have is None else list(have)
        wanted = list(range(size)) if want is None else list(want)
        at = {position: k for k, position in enumerate(held)}
        missing = [k for k, p in enumerate(wanted) if p not in at]
        full = fill.expand([len(wanted) if k == axis else n for k, n in enumerate(fill.shape)])
        filler = full.index_select(axis, torch.tensor(missing, dtype=torch.long))
        flat = filler.reshape(-1)
        if bool((flat == flat[0]).all()):
            return self._padded(node, axis, held, wanted, flat[0].item())
        distinct, which = torch.unique(filler, dim=axis, return_inverse=True)
        columns = self.pool.constant(distinct, "fill")
        shape = [distinct.shape[axis] if k == axis else n for k, n in enumerate(self._sizes(node))]
        both = self.editor.call(
            aten.cat.default, [node, self.editor.call(aten.expand.default, columns, shape)], axis
        )
        column = {k: len(held) + int(c) for k, c in zip(missing, which.tolist(), strict=True)}
        take = [column[k] if k in column else at[p] for k, p in enumerate(wanted)]
        if take == list(range(len(held) + distinct.shape[axis])):
            return marked(both, "scatter")
        made = self.editor.call(aten.index_select.default, both, axis, self.pool.index(take))
        return marked(made, "scatter")

    def _padded(
        self, node: fx.Node, axis: int, held: list[int], wanted: list[int], value: float
    ) -> fx.Node:
        """One value for all missing positions: a pad, indexed where it is not contiguous."""
        if held == wanted:
            return node
        rank = len(value_of(node).shape)
        before = [0, 0] * (rank - axis - 1)
        start = wanted.index(held[0])
        if len(held) == len(wanted) and held != wanted:
            return self.select(node, axis, [held.index(p) for p in wanted])
        if wanted[start : start + len(held)] == held:
            ends = [start, len(wanted) - start - len(held)]
            made = self.editor.call(aten.constant_pad_nd.default, node, before + ends, value)
            return marked(made, "pad")
        one = self.editor.call(aten.constant_pad_nd.default, node, [*before, 0, 1], value)
        at = {position: k for k, position in enumerate(held)}
        take = [at.get(p, len(held)) for p in wanted]
        made = self.editor.call(aten.index_select.default, one, axis, self.pool.index(take))
        return marked(made, "scatter")

    def scattered(
        self, node: fx.Node, axis: int, places: Sequence[int], size: int, value: float
    ) -> fx.Node:
        """A new node's entries at `places` of an axis of `size`, `value` everywhere else."""
        held = {place: k for k, place in enumerate(places)}
        wanted = [held.get(k, len(places) + k) for k in range(size)]
        return self._padded(node, axis, list(range(len(places))), wanted, value)

    def _sizes(self, node: fx.Node) -> list[object]:
        """The sizes of a new node's value, dynamic ones by expression."""
        return [self.pool.size(size) for size in value_of(node).shape]


def marked(node: fx.Node, effect: str) -> fx.Node:
    """Note on a new node that it is there to keep a shape, and how; the report counts these."""
    node.meta["effect"] = effect
    return node
