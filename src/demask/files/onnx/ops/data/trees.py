"""Ensembles of decision trees: ai.onnx.ml's TreeEnsemble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import numbers_of

OPS = Ops("ai.onnx.ml")
MEMBER = 6
#: comparisons by nodes_modes
MODES: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    0: torch.le,
    1: torch.lt,
    2: torch.ge,
    3: torch.gt,
    4: torch.eq,
    5: torch.ne,
}


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees in one numbering: first nodes, then leaves.

    roots: node per tree. feature, mode, split: column, comparison and threshold per node. missing:
    whether NaN selects `yes`. yes, no: the next node or leaf if the comparison is true or false; a
    leaf is its own. members: sets of membership nodes, padded with NaN. nodes: number of nodes.
    depth: steps after which every row is at a leaf.
    """

    roots: Tensor
    feature: Tensor
    mode: Tensor
    split: Tensor
    missing: Tensor
    yes: Tensor
    no: Tensor
    members: Tensor | None
    nodes: int
    depth: int

    def leaves(self, x: Tensor) -> Tensor:
        """The index of the leaf that each row of x reaches in each tree, [rows, trees]."""
        current = self.roots.expand(x.shape[0], -1)
        for _ in range(self.depth):
            value = x.gather(1, self.feature[current])
            current = torch.where(self._is_yes(value, current), self.yes[current], self.no[current])
        return current - self.nodes

    def _is_yes(self, value: Tensor, current: Tensor) -> Tensor:
        mode, split = self.mode[current], self.split[current]
        is_yes = value.isnan() & self.missing[current]
        for number, compare in MODES.items():
            is_yes = is_yes | ((mode == number) & compare(value, split))
        if self.members is not None:
            is_yes = is_yes | ((mode == MEMBER) & (value.unsqueeze(-1) == self.members[current]).any(-1))
        return is_yes


def _targets(indices: Sequence[int], leaf: Sequence[int]) -> list[int]:
    """Successors of nodes, in one numbering of nodes and leaves."""
    nodes = len(indices)
    return [index + nodes * bool(is_leaf) for index, is_leaf in zip(indices, leaf, strict=True)]


def _depth(roots: Sequence[int], yes: Sequence[int], no: Sequence[int], nodes: int) -> int:
    """Number of nodes on the longest path to a leaf; BadInput for a cycle."""
    level, depth = {r for r in roots if r < nodes}, 0
    while level:
        depth += 1
        if depth > nodes:
            raise BadInput("expected trees, got nodes that lead back to themselves")
        level = {n for k in level for n in (yes[k], no[k]) if n < nodes}
    return depth


def _members(values: Value, modes: list[int], x: Tensor) -> Tensor | None:
    """The set of members of each node and leaf (mode -1), padded with NaN. NaN separates the sets
    in the file."""
    if MEMBER not in modes:
        return None
    groups: list[list[float]] = [[]]
    for value in numbers_of(values):
        if value != value:
            groups.append([])
        else:
            groups[-1].append(value)
    width, sets = max(map(len, groups)), iter(groups)
    rows = [next(sets) if mode == MEMBER else [] for mode in modes]
    return x.new_tensor([[*row, *[torch.nan] * (width - len(row))] for row in rows])


def _aggregated(weights: Tensor, targets: Tensor, count: int, aggregate: int) -> Tensor:
    """Scores per target from the weights of all trees: mean, sum, minimum or maximum."""
    zeros = weights.new_zeros((weights.shape[0], count))
    if aggregate in (0, 1):
        total = zeros.scatter_add(1, targets, weights)
        return total / weights.shape[1] if aggregate == 0 else total
    how = {2: "amin", 3: "amax"}[aggregate]
    return zeros.scatter_reduce(1, targets, weights, how, include_self=False)


@OPS("TreeEnsemble")
def tree_ensemble(
    x: Tensor,
    *,
    nodes_splits: Tensor,
    nodes_modes: Value,
    nodes_featureids: Sequence[int],
    nodes_truenodeids: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_trueleafs: Sequence[int],
    nodes_falseleafs: Sequence[int],
    leaf_targetids: Sequence[int],
    leaf_weights: Tensor,
    tree_roots: Sequence[int],
    post_transform: int = 0,
    aggregate_function: int = 1,
    nodes_hitrates: Value = None,
    nodes_missing_value_tracks_true: Sequence[int] = (),
    membership_values: Value = None,
    n_targets: int,
) -> Tensor:
    """Score of each row and target, from the leaves that the row reaches."""
    if post_transform not in (0, 1, 2):
        raise BadInput(f"expected post_transform 0, 1 or 2, got {post_transform}")
    nodes, modes = len(nodes_featureids), [int(n) for n in numbers_of(nodes_modes)]
    leaves = range(nodes, nodes + len(leaf_targetids))
    yes = _targets(nodes_truenodeids, nodes_trueleafs)
    no = _targets(nodes_falsenodeids, nodes_falseleafs)
    missing = list(nodes_missing_value_tracks_true) or [0] * nodes

    def table(numbers: Sequence[int], rest: Sequence[int]) -> Tensor:
        return torch.tensor([*numbers, *rest], device=x.device)

    rest = [0] * len(leaves)
    modes = [*modes, *([-1] * len(leaves))]
    forest = Forest(
        table(tree_roots, []),
        table(nodes_featureids, rest),
        table(modes, []),
        torch.cat([nodes_splits, nodes_splits.new_zeros(len(leaves))]).to(x.device),
        table(missing, rest).bool(),
        table(yes, leaves),
        table(no, leaves),
        _members(membership_values, modes, x),
        nodes,
        _depth(tree_roots, yes, no, nodes),
    )
    reached = forest.leaves(x)
    weights = leaf_weights.to(x.device)[reached]
    targets = table(leaf_targetids, [])[reached]
    scores = _aggregated(weights, targets, n_targets, aggregate_function)
    return [scores, torch.softmax(scores, -1), torch.sigmoid(scores)][post_transform]
