"""What remains of a network after slices are removed: parameters and MACs, without removing them.

Both are sums of products. A call costs the product of the sizes of its letters, a tensor that of
its axes, and a size is a constant plus the positions of the slices that stay:

    MACs = sum over calls of  prod over letters of  (fixed + sum over slices of positions * stays)

So the MACs of a convolution between two groups are bilinear in the two numbers of slices. Which
slices a letter has is read off the op table (`slice_labels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from demask.facts.analysis import Analysis
from demask.graph.program import Program
from demask.ops import Relation, Table
from demask.prune.groups.groups import Group
from demask.prune.slice_labels import NONE, SliceLabels
from demask.shrink.program_size import letter_sizes, mac_products

Masks = Mapping[str, Tensor]  # by name of the group: bool [size], True: the slice stays
Counts = Mapping[str, float]  # by name of the group: how many slices stay


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of an axis or letter. fixed: positions that belong to no slice. slices: by name of
    the group, the positions of each slice, int64 [size]."""

    fixed: int
    slices: Mapping[str, Tensor]

    def masked(self, masks: Masks) -> int:
        """The size after slices are removed; groups without a mask stay whole."""
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
    """A product of sizes. node: the call that computes it; None for a tensor."""

    extents: tuple[Extent, ...]
    node: fx.Node | None = None

    def masked(self, masks: Masks) -> int:
        """The product after slices are removed."""
        return math.prod(extent.masked(masks) for extent in self.extents)


@dataclass(frozen=True, slots=True)
class CallExtents:
    """The sizes of the letters of a call."""

    relation: Relation
    letters: Mapping[str, Extent]


@dataclass(frozen=True, slots=True)
class RemovalCost:
    """The parameters and MACs of a network as functions of the slices that stay.

    groups: by name. calls: of the program, with the sizes of their letters. products: what sums to
    the MACs. tensors: what sums to the parameters, as in `Sizes`.

    Attributes that other costs are read off: `calls` has every letter of every call.
    """

    groups: Mapping[str, Group]
    calls: tuple[CallExtents, ...]
    products: tuple[SizeProduct, ...]
    tensors: tuple[SizeProduct, ...]

    @classmethod
    def of(cls, program: Program, groups: Iterable[Group], table: Table) -> RemovalCost:
        """The costs of a canonical program, of which `groups` are the groups."""
        by_name = {group.name: group for group in groups}
        relations = Analysis(program, table).relations
        starts, members = _member_labels(by_name.values())
        labels = SliceLabels.of(program, relations, members)
        slices = _SliceCounts(by_name, starts)
        calls = tuple(
            CallExtents(relation, {
                letter: slices.extent(labels.letters[node].get(letter), size)
                for letter, size in letter_sizes(relation, program.example).items()
            })
            for node, relation in relations.items() if isinstance(relation, Relation)
        )  # fmt: skip
        products = tuple(
            SizeProduct(tuple(call.letters[a] for a in letters), call.relation.node)
            for call in calls for letters in mac_products(call.relation)
        )  # fmt: skip
        tensors = tuple(
            SizeProduct(tuple(slices.extent(*pair) for pair in zip(axes, shape, strict=True)))
            for axes, shape in _stored(program, labels)
        )
        return cls(by_name, calls, products, tensors)

    def macs(self, masks: Masks) -> int:
        """MACs of one call on the example inputs after slices are removed. masks: by name of the
        group, bool [size], True where a slice stays; a group without a mask stays whole."""
        return sum(product.masked(masks) for product in self.products)

    def parameters(self, masks: Masks) -> int:
        """Parameters after slices are removed, as `Sizes` counts them."""
        return sum(tensor.masked(masks) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CountedProducts:
    """A sum of products as a function of the numbers of slices (a `Cost` of the knapsack).

    names: of the groups. widths, fixed: each extent is widths @ counts + fixed. factors: per
    product, the numbers of its extents; the last extent is 1.
    """

    names: tuple[str, ...]
    widths: np.ndarray
    fixed: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, products: Sequence[SizeProduct]) -> CountedProducts:
        """The function for these products."""
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
        return cls(names, widths, np.array([*(fixed for fixed, _ in lines), 1.0]), factors)

    def total(self, counts: Counts) -> float:
        """The sum; groups without a count are an error."""
        sizes = self.widths @ np.array([counts[name] for name in self.names]) + self.fixed
        return float(sizes[self.factors].prod(1).sum())


def _member_labels(
    groups: Iterable[Group],
) -> tuple[dict[str, int], dict[tuple[str, int], Tensor]]:
    """The number of each group's first slice, and the labels by parameter and axis."""
    starts: dict[str, int] = {}
    labels: dict[tuple[str, int], Tensor] = {}
    start = 0
    for group in groups:
        starts[group.name] = start
        for member in group.members:
            positions = [member.positions(k) for k in range(group.size)]
            length = 1 + max(int(p.max()) for p in positions)
            own = labels.get((member.parameter, member.axis), torch.empty(0, dtype=torch.int64))
            if len(own) < length:
                own = torch.cat([own, torch.full((length - len(own),), NONE)])
            for k, here in enumerate(positions):
                own[here] = start + k
            labels[member.parameter, member.axis] = own
        start += group.size
    return starts, labels


@dataclass(frozen=True, slots=True)
class _SliceCounts:
    """Turns labels into extents. starts: the number of each group's first slice."""

    groups: Mapping[str, Group]
    starts: Mapping[str, int]

    def extent(self, labels: Tensor | None, size: int) -> Extent:
        """The size of an axis with these labels; fixed where there are none."""
        if labels is None or len(labels) != size:
            return Extent(size, {})
        total = sum(group.size for group in self.groups.values())
        counts = torch.bincount(labels[labels != NONE], minlength=total)
        slices = {
            name: counts[start : start + self.groups[name].size]
            for name, start in self.starts.items()
        }
        present = {name: here for name, here in slices.items() if bool(here.any())}
        return Extent(int((labels == NONE).sum()), present)


def _stored(
    program: Program, labels: SliceLabels
) -> Iterable[tuple[Sequence[Tensor | None], Sequence[int]]]:
    """Labels and shape of every floating-point tensor; those that share memory count once."""
    seen: set[int] = set()
    for name, constant in program.constants.items():
        tensor = constant.tensor
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield labels.constants[name], tensor.shape
