"""Placement: which positions of every axis are live, and in which order.

Ties are rigid (an axis that a unary op, a norm, a move or a product carries) or soft (contractions
with a constant weight, joins of several values, windows, complete axes, inputs and outputs, ops
without an entry). A rigid tie whose reader needs less than the value has is cut: a gather is
emitted there. A soft tie forces nothing, and `adapt` converts between the layouts.

The order of positions inside cells. It is free; a suitable one turns scatters into slices.

In a residual stream every tensor's support grows: x1 = x0 + f1, x2 = x1 + f2. Ranked by first
appearance, every stream tensor is a prefix of every later sum: a join pads and never scatters.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.facts.analysis import Analysis
from demask.facts.known import Key, key_of, operand_facts
from demask.facts.masks import along, any_over
from demask.facts.needed import Needs
from demask.facts.recurrent import needed_features, roles
from demask.failures import attributed
from demask.numerics import any_along, has_any
from demask.ops import Relation, schema
from demask.ops.notation import Axis
from demask.ops.schema import fake
from demask.shrink.layout.cells import Cells, Layout, Positions, cut_positions
from demask.shrink.layout.ties import is_join, needed_products, strided_axes, whole_letters


def rank_positions(component: Iterable[int], supports: Mapping[int, Tensor], fixed: bool) -> list[int] | None:
    """One order for all cells of a component (cells joined by adds): every position, by first
    appearance; None for the natural order.

    component: cells in the order of their tensors. supports: bool [size] of each. fixed: whether
    some cell must stay in natural order.
    """
    masks: list[Tensor] = []
    for cell in component:
        mask = supports[cell]
        if bool(mask.any()) and not any(torch.equal(mask, seen) for seen in masks):
            masks.append(mask)
    if fixed or len(masks) < 2:
        return None
    # Lexicographic in membership: those in the first support, among them those in the second, ...
    keys = torch.stack(masks).to(torch.int8).T.tolist()
    return sorted(range(len(keys)), key=lambda p: ([-k for k in keys[p]], p))


def connect_cells(links: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components of cells, each sorted: cells are numbered in tensor order."""
    parents: dict[int, int] = {}

    def root(cell: int) -> int:
        parents.setdefault(cell, cell)
        while parents[cell] != cell:
            parents[cell] = parents[parents[cell]]
            cell = parents[cell]
        return cell

    for a, b in links:
        low, high = sorted((root(a), root(b)))
        parents[high] = low
    components: dict[int, list[int]] = {}
    for cell in sorted(parents):
        components.setdefault(root(cell), []).append(cell)
    return list(components.values())


CellAxes = tuple[tuple[int, ...], ...]  # the cells of each axis


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of each value, and of each call's operands.

    value: per value; one that is absent is not computed at all. slot: per call and operand.
    """

    value: Mapping[Key, Layout]
    slot: Mapping[tuple[fx.Node, int], Layout]


def place(analysis: Analysis, *, tied: bool = False) -> Placement:
    """The smallest layouts that compute every live position. tied: whether a weight that several
    calls read is cut alike in all of them, and so stays one tensor."""
    return settle_needs(analysis, lambda needs: Placer(analysis, needs, tied=tied))[1].placement()


def settle_needs(analysis: Analysis, new_placer: Callable[[Needs], Placer]) -> tuple[Needs, Placer]:
    """The needs and the tied axes, such that calls that are not finite for all operands (quotients,
    powers) read no fill: wherever they are computed, their operands are needed."""
    computed: dict[fx.Node, list[Tensor]] = {}
    needs = analysis.needed
    while True:
        placer = new_placer(needs)
        placer.tie()
        boxes = placer.boxes()
        if all(node in computed and _all_equal(boxes[node], computed[node]) for node in boxes):
            return needs, placer
        computed |= boxes
        needs = analysis.needed_with(computed)


def _all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Placer:
    """Ties the axes of a graph, and computes their layouts."""

    _cuts_norms = True  # whether norms return fewer positions than they read

    def __init__(self, analysis: Analysis, needs: Needs, *, tied: bool = False):
        self.graph, self.relations = analysis.program.graph, analysis.relations
        self.facts, self.needs, self.tied = analysis.known, needs, tied
        self.weights: dict[object, CellAxes] = {}
        self.cells = Cells()
        self.value: dict[Key, CellAxes] = {}
        self.slot: dict[tuple[fx.Node, int], CellAxes] = {}
        self.links: list[tuple[CellAxes, CellAxes]] = []

    def tie(self) -> None:
        """Create cells for the axes of live values and operands, tied where they must agree."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._add_whole(node)
            elif node.op == "call_function" and node.target is not operator.getitem:
                with attributed(node):
                    self._add_call(node)
        for key, axes in self.value.items():
            self._add_need(axes, self.needs.live[key])
        for node, relation in self.relations.items():
            if isinstance(relation, Relation) and relation.back and (node, 0) in self.slot:
                with attributed(node):
                    self._need_more_cells(relation)
            if isinstance(relation, Relation) and relation.entry.align > 1:
                with attributed(node):
                    self._align_rows(relation)

    def placement(self) -> Placement:
        """The layouts, after all axes are tied."""
        order = self._find_orders()
        return Placement(
            {key: self._layout(axes, order) for key, axes in self.value.items()},
            {edge: self._layout(axes, order) for edge, axes in self.slot.items()},
        )

    def boxes(self) -> dict[fx.Node, list[Tensor]]:
        """For each call that is not finite for all operands, and is computed at more positions than
        needed: a mask of these positions per output."""
        computed = {}
        for node, relation in self.relations.items():
            if not isinstance(relation, Relation) or relation.total:
                continue
            keys = [(node, k) for k in range(len(relation.outs))]
            with attributed(node):
                boxes = [self._box(key) for key in keys]
            if any(bool((b & ~self.needs.live[k]).any()) for k, b in zip(keys, boxes, strict=True)):
                computed[node] = boxes
        return computed

    def _box(self, key: Key) -> Tensor:
        """Where a value is computed: the product of the supports of its axes."""
        box = torch.ones([1] * self.needs.live[key].ndim, dtype=torch.bool)
        if key not in self.value:
            return torch.zeros_like(box)
        for axis, cells in enumerate(self.value[key]):
            line = self.cells.line(cells)
            if line is not None and len(line) > 1 and not bool(line.all()):
                box = box & line.view([-1 if k == axis else 1 for k in range(box.ndim)])
        return box

    def live(self, key: Key) -> bool:
        return has_any(self.needs.live[key]) if key in self.needs.live else False

    def _add_whole(self, node: fx.Node) -> None:
        """Require inputs, and outputs of ops without an entry, to be whole."""
        for k, output in enumerate(schema.outputs(node)):
            if isinstance(output, Tensor) and (node.op == "placeholder" or self.live((node, k))):
                axes = tuple((self.cells.new(size),) for size in schema.sizes(output))
                self.cells.force(cell for axis in axes for cell in axis)
                self.value[node, k] = axes

    def _add_call(self, node: fx.Node) -> None:
        relation = self.relations.get(node)
        if not isinstance(relation, Relation):
            self._add_whole(node)
            return
        outs = [k for k in range(len(relation.outs)) if self.live((node, k))]
        if not outs:
            return
        letters = {letter: self.cells.new(size) for letter, size in relation.size.items()}
        for letter in relation.back:
            letters[letter] = letters[letter.removesuffix("^")]
        self.cells.force(letters[a] for a in whole_letters(relation))
        flat = relation.is_grouped
        norm = self._cuts_norms and relation.entry.affine is not None and bool(relation.complete)
        output_letters = letters
        if norm:
            # A norm reads full axes; only needed positions are scaled and shifted.
            output_letters = letters | {a: self.cells.new(relation.size[a]) for a in relation.complete}
            self._add_need(self._axes(relation.outs[0], letters, relation, False), self.needs.live[node, 0])
        output_letters = output_letters | self._strided_letters(relation)
        for k in outs:
            self.value[node, k] = self._axes(relation.outs[k], output_letters, relation, flat or norm)
        for k, operand in enumerate(relation.operands):
            if isinstance(operand.value, fx.Node) and not relation.entry.free:
                axes = self._axes(relation.ins[k], letters, relation, flat)
                self.slot[node, k] = axes
                self._need_products(relation, k, axes)
                self._tie_operand(relation, k, axes)

    def _strided_letters(self, relation: Relation) -> dict[str, int]:
        """Cells of the axes along which a convolution can compute evenly spaced windows only."""
        letters: dict[str, int] = {}
        for axis in strided_axes(relation):
            live = along(self.needs.live[relation.node, 0], axis)
            size = fake(relation.node).shape[axis]
            if not isinstance(size, int) or len(live) != size or bool(live.all()):
                continue
            (letter,) = relation.outs[0][axis]
            letters[letter] = self.cells.new(size)
            self.cells.order([letters[letter]])
        return letters

    def _axes(self, axes, letters: dict[str, int], relation: Relation, flat: bool) -> CellAxes:
        """Cells of axes; composite axes of grouped contractions are cut position by position."""

        def cells_of(axis: Axis) -> tuple[int, ...]:
            if not (flat and len(axis) > 1):
                return tuple(letters[letter] for letter in axis)
            size = 1
            for letter in axis:
                size *= relation.size[letter] or 1
            return (self.cells.new(size),)

        return tuple(cells_of(axis) for axis in axes)

    def _need_products(self, relation: Relation, operand: int, axes: CellAxes) -> None:
        """Need summed positions for which a live output needs a product that is not known."""
        if relation.back and operand == 0:
            live = [self.needs.live[relation.node, k] for k in range(len(relation.outs))]
            inputs = operand_facts(relation, self.facts)
            self.cells.need(axes[-1], needed_features(relation, inputs, live))
            return
        if relation.entry.fill not in ("sum", "mix") or operand not in relation.factors[:1]:
            return
        mask = needed_products(relation, self.facts, self.needs)
        order = list(relation.size)
        for axis, cells in zip(relation.ins[operand], axes, strict=True):
            if set(axis) & relation.contracted:
                others = set(order) - set(axis)
                line = any_over(mask, order, others).reshape([mask.shape[order.index(a)] for a in axis])
                sizes = [relation.size[a] or 1 for a in axis]
                if relation.entry.fill == "mix" and not bool(line.any()):
                    line[:1] = True  # Weights computed from no product still need one, of zeros.
                self.cells.need(cells, line.expand(sizes).reshape(-1) if len(axis) > 1 else line)

    def _need_more_cells(self, relation: Relation) -> None:
        """Give a projected call more cells than outputs, which is how torch recognizes it."""
        projection = roles(relation).w_hr
        if projection is None:
            return
        units, cells = self.slot[relation.node, projection]
        unit_support, support = (self.cells.support(self.cells.leaves(c)[0]) for c in (units, cells))
        assert unit_support is not None
        assert support is not None
        missing = int(unit_support.sum()) + 1 - int(support.sum())
        if missing > 0:
            more = (~support).nonzero().squeeze(1)[:missing]
            self.cells.need(cells, support.index_fill(0, more, True))

    def _align_rows(self, relation: Relation) -> None:
        """Add positions to the support until rows have the alignment that the call needs."""
        if (relation.node, 0) not in self.value:
            return
        multiple = max(relation.entry.align // fake(relation.node).element_size(), 1)
        for axes in (self.slot[relation.node, 0], self.value[relation.node, 0]):
            leaves = self.cells.leaves(axes[-1])
            support = self.cells.support(leaves[0])
            if len(leaves) > 1 or support is None:
                self.cells.force(leaves)
                continue
            more = (~support).nonzero().squeeze(1)[: -int(support.sum()) % multiple]
            self.cells.need([leaves[0]], support.index_fill(0, more, True))

    def _tie_operand(self, relation: Relation, operand: int, axes: CellAxes) -> None:
        source = relation.operands[operand].value
        key = key_of(source)
        if source.op == "get_attr" and self.tied:
            for mine, theirs in zip(axes, self.weights.setdefault(source.target, axes), strict=True):
                self.cells.unify(mine, theirs)
        if schema.is_constant(source) or key not in self.value:
            return
        if is_join(relation):
            self.links.append((axes, self.value[key]))
            return
        read = self.needs.edge[relation.node, operand] & ~self.facts[key].known
        soft = relation.window | relation.complete | relation.moved
        for k, (mine, theirs) in enumerate(zip(axes, self.value[key], strict=True)):
            letters = relation.ins[operand][k]
            rigid = mine and not set(letters) & soft and self._needs_full_axis(key, k, along(read, k))
            if rigid and not self._is_outgrown(relation, key, k, letters):
                self.cells.unify(mine, theirs)

    def _is_outgrown(self, relation: Relation, key: Key, axis: int, letters: Axis) -> bool:
        """Whether a call that moves or scatters several values has more live positions along an
        axis than this one of them. Then this one is not widened before the call."""
        joined = [o for o in relation.operands if isinstance(o.value, fx.Node)]
        combines = len(joined) > 1 and (relation.moved or relation.entry.fill == "scatter")
        if not combines or letters not in relation.outs[0]:
            return False
        live = along(self.needs.live[relation.node, 0], relation.outs[0].index(letters))
        return not self._needs_full_axis(key, axis, live)

    def _needs_full_axis(self, key: Key, axis: int, read: Tensor) -> bool:
        """Whether the reader needs everything that the value has along an axis."""
        available = self._available(key, axis)
        return bool((read.expand(max(len(available), len(read))) == available).all())

    def _available(self, key: Key, axis: int) -> Tensor:
        """The positions that the value will have along an axis: the product of its supports."""
        live = along(self.needs.live[key], axis)
        cells = self.cells.leaves(self.value[key][axis])
        sizes = [self.cells.size(cell) for cell in cells]
        whole = [self.cells.forced(cell) for cell in cells]
        if all(whole) or None in sizes:
            return torch.ones(1, dtype=torch.bool)
        if len(cells) == 1 or len(live) == 1:
            return live
        part, product = live.reshape([n or 1 for n in sizes]), torch.ones((), dtype=torch.bool)
        for k in range(len(cells)):
            rest = [d for d in range(len(cells)) if d != k]
            mine = any_along(part, rest) if not whole[k] else torch.ones(part.shape[k], dtype=torch.bool)
            product = product.unsqueeze(-1) & mine
        return product.reshape(-1)

    def _add_need(self, axes: CellAxes, mask: Tensor) -> None:
        for k, cells in enumerate(axes):
            self.cells.need(cells, along(mask, k))

    def _find_orders(self) -> dict[int, list[int]]:
        links = []
        for left, right in self.links:
            for mine, theirs in zip(left[::-1], right[::-1], strict=False):
                a, b = self.cells.leaves(mine), self.cells.leaves(theirs)
                if len(a) == len(b) == 1 and self.cells.size(a[0]) == self.cells.size(b[0]):
                    links.append((a[0], b[0]))
        result: dict[int, list[int]] = {}
        for component in connect_cells(links):
            supports = {c: s for c in component if (s := self.cells.support(c)) is not None}
            if len(supports) < len(component):
                continue  # Dynamic axes are never cut, nor reordered.
            rank = rank_positions(component, supports, any(self.cells.ordered(c) for c in component))
            if rank is not None:
                result |= dict.fromkeys(component, rank)
        above, below = self._order_constraints()
        self._order_parts(result, above)
        self._order_moves(result, below)
        return result

    def _order_constraints(self) -> tuple[set[int], set[int]]:
        """Cells whose order is decided by what computes them, and cells whose order is decided by
        what reads them: all but constant weights, which can be stored in any order, and moves of
        these."""
        written: set[int] = set()
        read: set[int] = set()
        moves: list[tuple[int, int]] = []  # cells of the output and of the operand of a move
        for node in self.graph.nodes:
            relation = self.relations.get(node)
            if not isinstance(relation, Relation):
                written |= self._cells_of((node, 0))
                read |= {c for source in node.all_input_nodes for c in self._cells_of(key_of(source))}
                continue
            for k, operand in enumerate(relation.operands):
                if (node, k) in self.slot and key_of(operand.value) in self.value:
                    self._add_constraints(relation, k, written, read, moves)
        while True:
            sizes = len(written), len(read)
            written |= {output for output, source in moves if source in written}
            read |= {source for output, source in moves if output in read}
            if sizes == (len(written), len(read)):
                return written, read

    def _cells_of(self, key: Key) -> set[int]:
        return {c for cells in self.value.get(key, ()) for c in self.cells.leaves(cells)}

    def _add_constraints(self, relation: Relation, k: int, written: set[int], read: set[int], moves: list) -> None:
        """Add the constraints of one operand on the order of its cells."""
        node, value_axes = relation.node, self.value[key_of(relation.operands[k].value)]
        factors = relation.factors if relation.entry.fill == "sum" else ()
        weighed = any(schema.is_constant(relation.operands[j].value) for j in factors)
        summed = relation.contracted if weighed else frozenset()
        for d, (mine, theirs) in enumerate(zip(self.slot[node, k], value_axes, strict=True)):
            letters = set(relation.ins[k][d])
            leaves = set(self.cells.leaves(theirs))
            if letters & relation.moved and len(relation.outs) == 1:
                output_axes = self.value.get((node, 0), ())
                same = len(output_axes) == len(value_axes)
                outs = set(self.cells.leaves(output_axes[d])) if same else leaves
                moves += [(a, b) for a in outs for b in leaves]
                (written if same else read).update(set() if same else leaves)
            elif not letters & summed and self.cells.leaves(mine) != self.cells.leaves(theirs):
                read |= leaves
                written |= set(self.cells.leaves(mine))

    def _single_free_cell(self, key: Key, axis: int, taken: Mapping[int, list[int]]) -> int | None:
        """The single cell of an axis, if its order is still free; else None."""
        leaves = self.cells.leaves(self.value[key][axis])
        free = len(leaves) == 1 and leaves[0] not in taken and not self.cells.ordered(leaves[0])
        return leaves[0] if free else None

    def _order_parts(self, orders: dict[int, list[int]], above: set[int]) -> None:
        """Order axes of which calls take only parts: one part after another, each a slice."""
        for key, axes in reversed(self.value.items()):
            users = [u for u in key[0].users if u.op == "output" or (u, 0) in self.value]
            for k in range(len(axes)):
                leaf = self._single_free_cell(key, k, orders)
                leaf = None if leaf in above else leaf
                parts = [] if leaf is None else [self._positions_taken(u, key[0], k, orders) for u in users]
                if leaf is None or not parts or None in parts:
                    continue
                flat = [p for part in parts for p in part or ()]
                if len(flat) == self.cells.size(leaf) == len(set(flat)):
                    orders[leaf] = flat

    def _positions_taken(
        self, user: fx.Node, source: fx.Node, axis: int, orders: Mapping[int, list[int]]
    ) -> list[int] | None:
        """The positions that a call takes along an axis, if it does nothing else; else None."""
        relation = self.relations.get(user)
        if not isinstance(relation, Relation) or len(relation.operands) != 1:
            return None
        if len(relation.outs) != 1 or relation.operands[0].value is not source:
            return None
        letter = "".join(relation.ins[0][axis])
        move = relation.moves[0].get(letter.partition("<")[0]) if letter in relation.moved else None
        if move is None or bool((move.source < 0).any()):
            return None
        positions = move.position.tolist()
        if (user, 0) in self.value and len(relation.outs[0]) == len(relation.ins[0]):
            leaves = self.cells.leaves(self.value[user, 0][axis])
            if len(leaves) == 1 and leaves[0] in orders:
                positions = [positions[p] for p in orders[leaves[0]]]
        return positions

    def _order_moves(self, orders: dict[int, list[int]], below: set[int]) -> None:
        """Order axes that a call moves in the order of its operand, so that they need not move."""
        for node, relation in self.relations.items():
            if not isinstance(relation, Relation) or len(relation.outs) != 1:
                continue
            if not relation.moved or (node, 0) not in self.value:
                continue
            for axis, letters in enumerate(relation.outs[0]):
                base = "".join(letters).partition(">")[0]
                move = relation.moves[0].get(base) if set(letters) & relation.moved else None
                leaf = None if move is None else self._single_free_cell((node, 0), axis, orders)
                if move is None or leaf is None or leaf in below or len(move.source) != self.cells.size(leaf):
                    continue
                ranks = [self._ranks(o.value, axis, orders) for o in relation.operands]
                pairs = zip(move.source.tolist(), move.position.tolist(), strict=True)
                keys = [(k, ranks[k].get(p, p) if k >= 0 else p) for k, p in pairs]
                orders[leaf] = sorted(range(len(keys)), key=keys.__getitem__)

    def _ranks(self, source: object, axis: int, orders: Mapping[int, list[int]]) -> dict[int, int]:
        """The rank of each position of an operand's axis in its order; {} for the natural order."""
        axes = self.value.get(key_of(source)) if isinstance(source, fx.Node) else None
        if axes is None or axis >= len(axes):
            return {}
        leaves = self.cells.leaves(axes[axis])
        order = orders.get(leaves[0]) if len(leaves) == 1 else None
        return {} if order is None else {p: k for k, p in enumerate(order)}

    def _layout(self, axes: CellAxes, order: Mapping[int, list[int]]) -> Layout:
        return tuple(self._positions(self.cells.leaves(cells), order) for cells in axes)

    def _positions(self, cells: list[int], order: Mapping[int, list[int]]) -> Positions:
        """Old positions of an axis in their new order: the product of its cells' positions."""
        total, positions = 1, [0]
        for cell in cells:
            size, support = self.cells.size(cell), self.cells.support(cell)
            if size is None or support is None:
                return None
            lives = support.tolist()  # reading a tensor element by element is slow
            mine = [p for p in order.get(cell, range(size)) if lives[p]]
            positions = [before * size + p for before in positions for p in mine]
            total *= size
        return cut_positions(positions, total)
