"""What remains of a network after slices are removed: parameters and MACs, without removing them.

Both are sums of products. A call costs the product of the sizes of its letters, a tensor that of
its axes, and a size is a constant plus the slices that stay:

    MACs = sum over calls of  prod over letters of  (fixed + sum over slices of positions * stays)

So the MACs of a convolution between two groups are bilinear in the two numbers of slices. Which
slices an axis has is read off the op table (`Coupling`). Letters without slices have the positions
that demask computes of the full network: of tokens, those that something reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from demask.graph.provenance import Sizes
from demask.ops import Relation
from demask.prune.coupling import Coupling, Group
from demask.shrink.layout.layout_analysis import LayoutAnalysis
from demask.shrink.layout.placement import Placer
from demask.shrink.program_size import letter_sizes, mac_products

Masks = Mapping[str, Tensor]  # by name of the group: bool [size], True: the slice stays
Counts = Mapping[str, int]  # by name of the group: how many slices stay


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a cell of an axis. fixed: positions that belong to no slice. slices: by name of
    the group, the positions of each slice, int64 [size]."""

    fixed: int
    slices: Mapping[str, Tensor]

    def masked(self, masks: Masks) -> int:
        """The size after slices are removed; groups without a mask stay uncut."""
        return self.fixed + sum(
            int(positions[masks[name]].sum() if name in masks else positions.sum())
            for name, positions in self.slices.items()
        )

    def linear(self) -> tuple[float, dict[str, float]]:
        """The size as a linear function of the numbers of slices: the constant and the factors.
        Exact where all slices of a group have equally many positions here; else their mean."""
        means = {n: float(p.double().mean()) for n, p in self.slices.items()}
        return float(self.fixed), means


@dataclass(frozen=True, slots=True)
class SizeProduct:
    """A product of sizes. node: the call that computes it; None for the elements of a tensor."""

    extents: tuple[Extent, ...]
    node: fx.Node | None = None

    def masked(self, masks: Masks) -> int:
        """The product after slices are removed."""
        return math.prod(extent.masked(masks) for extent in self.extents)


@dataclass(frozen=True, slots=True)
class RemainingTensor:
    """The elements of a tensor, and the bytes of each. is_parameter: else it is a buffer."""

    elements: SizeProduct
    bytes: int
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class CallExtents:
    """The sizes of the letters of a call; a letter is a product of cells."""

    relation: Relation
    letters: Mapping[str, tuple[Extent, ...]]


@dataclass(frozen=True, slots=True)
class RemovalCost:
    """The size of a network as a function of the slices that stay.

    groups: all groups of the network. calls: of the program, with the sizes of their letters.
    products: what sums to the MACs. tensors: the elements of the tensors in `coupling`, times the
    bytes of each. total: the size of all
    tensors, of which constants that are computed from others are stored instead of them.
    """

    groups: tuple[Group, ...]
    calls: tuple[CallExtents, ...]
    products: tuple[SizeProduct, ...]
    tensors: tuple[RemainingTensor, ...]
    total: Sizes

    @classmethod
    def of(cls, coupling: Coupling) -> RemovalCost:
        """The sizes of a network with these slices."""
        cells = _CellExtents.of(coupling, coupling.groups)
        placer = LayoutAnalysis.of(coupling.program, coupling.ties.table).placer
        calls = tuple(
            CallExtents(
                relation,
                {
                    letter: cells.letter(node, letter, size)
                    for letter, size in _sizes_computed(relation, placer, coupling).items()
                },
            )
            for node, relation in coupling.ties.relations.items()
        )
        products = tuple(
            SizeProduct(tuple(e for a in letters for e in call.letters[a]), call.relation.node)
            for call in calls
            for letters in mac_products(call.relation)
        )
        return cls(coupling.groups, calls, products, tuple(cells.tensors()), coupling.total)

    def macs(self, masks: Masks) -> int:
        """MACs of one call on the example inputs after slices are removed. masks: by name of the
        group, bool [size], True where a slice stays; a group without a mask stays uncut."""
        return sum(product.masked(masks) for product in self.products)

    def masked(self, masks: Mapping[str, Tensor]) -> Sizes:
        """As `sizes`, without the slices that masks make zero. masks: by parameter, bool of its
        shape, True where it stays."""
        return self.sizes(self.left(masks))

    def left(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By group, the slices that masks of parameters leave, bool [size]."""
        return {group.name: ~group.gone(masks) for group in self.groups}

    def sizes(self, masks: Masks) -> Sizes:
        """Parameters, buffers, MACs and bytes after slices are removed."""
        removed = [(t, t.elements.masked({}) - t.elements.masked(masks)) for t in self.tensors]
        return Sizes(
            self.total.parameters - sum(n for tensor, n in removed if tensor.is_parameter),
            self.macs(masks),
            self.total.bytes - sum(n * tensor.bytes for tensor, n in removed),
            self.total.buffers - sum(n for tensor, n in removed if not tensor.is_parameter),
        )


def _sizes_computed(relation: Relation, placer: Placer, coupling: Coupling) -> dict[str, int]:
    """The size of every letter of a call on the example inputs; of static ones, the number of
    positions that demask computes of the full network."""
    sizes, node = letter_sizes(relation, coupling.program.example), relation.node
    values = [(axes, placer.slot.get((node, k), ())) for k, axes in enumerate(relation.ins)]
    values += [(axes, placer.value.get((node, k), ())) for k, axes in enumerate(relation.outs)]
    axes = [pair for own, cells in values if cells for pair in zip(own, cells, strict=True)]
    for letters, cells in axes:  # those of outputs last: of strided windows, they are fewer
        if len(letters) == len(cells):  # else an axis is cut position by position
            for letter, cell in zip(letters, cells, strict=True):
                supports = [placer.cells.support(leaf) for leaf in placer.cells.leaves([cell])]
                if relation.size[letter] is not None:
                    sizes[letter] = math.prod(int(s.sum()) for s in supports if s is not None)
    return sizes


@dataclass(frozen=True, slots=True)
class _CellExtents:
    """Turns cells into extents. sizes: of the groups. owner, place: by number of a slice, which
    group it belongs to (-1: none), and which slice of that it is. known: extents by cell."""

    coupling: Coupling
    sizes: Mapping[str, int]
    owner: Tensor
    place: Tensor
    known: dict[int, Extent]

    @classmethod
    def of(cls, coupling: Coupling, groups: Iterable[Group]) -> _CellExtents:
        sizes = {group.name: group.size for group in groups}
        largest = max((int(n.max()) for n in coupling.slice_of.values() if len(n)), default=0)
        owner = torch.full((largest + 2,), -1)  # the last one for positions without a number
        place = torch.zeros_like(owner)
        for k, (name, size) in enumerate(sizes.items()):
            owner[coupling.numbers[name]] = k
            place[coupling.numbers[name]] = torch.arange(size)
        return cls(coupling, sizes, owner, place, {})

    def extent(self, cell: int) -> Extent:
        if cell not in self.known:
            numbers = self.coupling.slice_of.get(cell)
            size = self.coupling.ties.cells.size(cell) or 1
            self.known[cell] = Extent(size, {}) if numbers is None else self._of_slices(numbers)
        return self.known[cell]

    def _of_slices(self, numbers: Tensor) -> Extent:
        """The size of an axis with these numbers of slices."""
        owners, places, names = self.owner[numbers], self.place[numbers], list(self.sizes)
        slices = {
            names[k]: torch.bincount(places[owners == k], minlength=self.sizes[names[k]])
            for k in owners.unique().tolist()
            if k >= 0
        }
        return Extent(int((owners < 0).sum()), slices)

    def letter(self, node: fx.Node, letter: str, size: int) -> tuple[Extent, ...]:
        ties = self.coupling.ties
        leaves = ties.leaves([ties.letters[node][letter]])
        if not any(cell in self.coupling.slice_of for cell in leaves):
            return (Extent(size, {}),)
        return tuple(self.extent(cell) for cell in leaves)

    def tensors(self) -> Iterator[RemainingTensor]:
        """Every tensor with elements; those that share memory once."""
        ties, constants = self.coupling.ties, self.coupling.program.constants
        names = {(t.data_ptr(), t.shape): n for n in ties.names() if (t := constants[n].tensor).numel()}
        for name in names.values():
            tensor = constants[name].tensor
            leaves = [cell for axis in ties.constant(name) for cell in ties.leaves(axis)]
            elements = SizeProduct(tuple(self.extent(cell) for cell in leaves))
            yield RemainingTensor(elements, tensor.element_size(), constants[name].parameter)


@dataclass(frozen=True, slots=True)
class CountedProducts:
    """A sum of products as a function of the numbers of slices (a `CountedCost`).

    names: of the groups. current: their numbers of slices, for those without a count. widths, fixed:
    the extents are widths @ counts + fixed. factors: per product, the numbers of its extents; the
    last extent is 1.
    """

    names: tuple[str, ...]
    current: Mapping[str, int]
    widths: np.ndarray
    fixed: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, products: Sequence[SizeProduct], left: Masks) -> CountedProducts:
        """The function for these products. left: by group, the slices that are left, all."""
        extents = list({id(e): e for product in products for e in product.extents}.values())
        numbers = {id(extent): k for k, extent in enumerate(extents)}
        lines = [extent.linear() for extent in extents]
        names = tuple(dict.fromkeys(name for _, line in lines for name in line))
        widths = np.zeros((len(lines) + 1, len(names)))
        for k, (_, line) in enumerate(lines):
            widths[k] = [line.get(name, 0.0) for name in names]
        longest = max((len(product.extents) for product in products), default=0)
        factors = np.full((len(products), longest), len(lines))
        for row, product in zip(factors, products, strict=True):
            row[: len(product.extents)] = [numbers[id(extent)] for extent in product.extents]
        current = {name: int(left[name].sum()) for name in names}
        fixed = np.array([*(fixed for fixed, _ in lines), 1.0])
        return cls(names, current, widths, fixed, factors)

    def total(self, counts: Counts) -> float:
        """The sum for these counts; groups without one have what is left of them."""
        numbers = np.array([counts.get(name, self.current[name]) for name in self.names])
        sizes = self.widths @ numbers + self.fixed
        return float(sizes[self.factors].prod(1).sum())
