"""The order of positions inside cells. It is free; a suitable one turns scatters into slices.

In a residual stream every tensor's support grows: x1 = x0 + f1, x2 = x1 + f2. Ranked by first
appearance, every stream tensor is a prefix of every later sum: a join pads and never scatters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


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
