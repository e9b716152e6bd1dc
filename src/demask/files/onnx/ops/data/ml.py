"""ONNX ops of ai.onnx.ml: encoders, linear models, ensembles of decision trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops, Value
from demask.files.onnx.values import Host, numbers_of

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
OPS = Ops("ai.onnx.ml")


OPS("Binarizer")(lambda x, *, threshold=0.0: (x > threshold).to(x.dtype))


@OPS("ArrayFeatureExtractor")
def array_feature_extractor(x: Value, indices: Tensor, *, as_tensor: Callable[[Value], Tensor]) -> Value:
    """Columns of x, as one row where x has one axis."""
    if isinstance(x, Host) and x.dtype is None:
        return Host.of(np.atleast_2d(x.array[..., indices.reshape(-1).tolist()]))
    columns = as_tensor(x).index_select(-1, indices.reshape(-1))
    return columns.unsqueeze(0) if columns.ndim == 1 else columns


@OPS("LabelEncoder")
def label_encoder(
    x: Value,
    *,
    classes_strings: Sequence[str] | None = None,
    keys_floats: Any = None,
    keys_int64s: Any = None,
    keys_strings: Any = None,
    keys_tensor: Value = None,
    values_floats: Any = None,
    values_int64s: Any = None,
    values_strings: Any = None,
    values_tensor: Value = None,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: Value = None,
    version: int,
    as_tensor: Callable[[Value], Tensor],
) -> Value:
    """For each element the value of the equal key, or a default.

    Of equal keys the last is used, and NaN equals NaN; before opset 4 the first, as in onnxruntime.
    """
    if classes_strings is not None:  # opset 1: from positions to texts, or back
        numbers = range(len(classes_strings))
        from_texts = isinstance(x, Host) and x.dtype is None
        keys_strings, values_int64s = (classes_strings, numbers) if from_texts else (None, None)
        keys_int64s, values_strings = (None, None) if from_texts else (numbers, classes_strings)
    keys = _first_present(keys_floats, keys_int64s, keys_strings, keys_tensor)
    values, default, dtype = _first_present(
        values_floats and (values_floats, default_float, torch.float32),
        values_int64s and (values_int64s, default_int64, torch.int64),
        values_strings and (values_strings, default_string, None),
        (values_tensor, default_tensor, getattr(values_tensor, "dtype", None)),
    )
    values = numbers_of(values)
    if default is None:
        default = "_Unused" if dtype is None else -0.0 if dtype.is_floating_point else -1
    default = numbers_of(default)[0] if isinstance(default, Host | Tensor) else default
    key_numbers = _key_numbers(x, numbers_of(keys), version >= 4, as_tensor)
    if dtype is None:
        words = np.array([default, *values], dtype=object)
        return Host.of(words[key_numbers.numpy(force=True)])
    return torch.tensor([default, *values], dtype=dtype, device=key_numbers.device)[key_numbers]


def _first_present(*options: Any) -> Any:
    return next(option for option in options if option is not None and option != ())


def _key_numbers(x: Value, keys: list[Any], last: bool, as_tensor: Callable[[Value], Tensor]) -> Tensor:
    """1-based position of each element among the keys; 0 if it is not one. last: of equal keys."""
    numbering = list(range(1, len(keys) + 1))
    if isinstance(x, Host) and x.dtype is None:
        pairs = list(zip(keys, numbering, strict=True))
        position_of = dict(pairs if last else pairs[::-1])
        positions = [position_of.get(text, 0) for text in x.array.flat]
        return torch.tensor(positions, dtype=torch.int64).reshape(x.array.shape)
    tensor = as_tensor(x)
    key_tensor = torch.tensor(keys, dtype=tensor.dtype, device=tensor.device)
    equal = tensor.unsqueeze(-1) == key_tensor
    if last:
        equal = equal | (tensor.isnan().unsqueeze(-1) & key_tensor.isnan())
    numbers = torch.tensor(numbering, device=tensor.device)
    if last:
        return torch.where(equal, numbers, 0).amax(-1)
    first = torch.where(equal, numbers, len(keys) + 1).amin(-1)
    return first.where(first <= len(keys), 0)


@OPS("Scaler")
def scaler(x: Tensor, *, offset: Sequence[float] = (0.0,), scale: Sequence[float] = (1.0,)) -> Tensor:
    """(x - offset) * scale in float32, with one value per column or for all."""
    x = x.to(torch.float32)
    return (x - x.new_tensor(offset)) * x.new_tensor(scale)


@OPS("Normalizer")
def normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    """Rows divided by their norm; MAX is the largest number, signed, as in onnxruntime."""
    if norm not in ("L1", "L2", "MAX"):
        raise BadInput(f"expected norm MAX, L1 or L2, got {norm!r}")
    x = x.to(torch.float32)
    if norm == "MAX":
        size = x.amax(-1, keepdim=True)
    else:
        size = torch.linalg.vector_norm(x, 1.0 if norm == "L1" else 2.0, -1, keepdim=True)
    return x / torch.where(size == 0, 1.0, size)


def _post_transform(scores: Tensor, name: str) -> Tensor:
    """Scores after `post_transform`."""
    if name == "NONE":
        return scores
    if name == "LOGISTIC":
        return torch.sigmoid(scores)
    if name == "SOFTMAX":
        return torch.softmax(scores, -1)
    raise BadInput(f"expected post_transform NONE, LOGISTIC or SOFTMAX, got {name!r}")


@OPS("LinearRegressor")
def linear_regressor(
    x: Tensor,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    targets: int = 1,
    post_transform: str = "NONE",
) -> Tensor:
    """x @ coefficients + intercepts, in float32."""
    x = x.to(torch.float32)
    scores = x @ x.new_tensor(coefficients).reshape(targets, -1).T
    return _post_transform(scores + x.new_tensor(intercepts) if intercepts else scores, post_transform)


@OPS("LinearClassifier")
def linear_classifier(
    x: Tensor,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    classlabels_ints: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Value, Tensor]:
    """The label with the largest score, and the scores of all labels."""
    x = x.to(torch.float32)
    labels = classlabels_strings or classlabels_ints
    rows = x.new_tensor(coefficients).reshape(-1, x.shape[-1])
    scores = x @ rows.T + (x.new_tensor(intercepts) if intercepts else 0.0)
    if rows.shape[0] == 1 and len(labels) == 2 and post_transform == "LOGISTIC":
        scores = torch.cat([-scores, scores], -1)
    if scores.shape[-1] != len(labels) or len(labels) < 2:
        raise BadInput(f"expected a label for each score, got {len(labels)} labels")
    best = scores.argmax(-1)
    scores = _post_transform(scores, post_transform)
    if classlabels_strings:
        words = np.array(classlabels_strings, dtype=object)
        return Host.of(words[best.numpy(force=True)]), scores
    return torch.tensor(classlabels_ints, device=x.device)[best], scores


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees in one numbering: first nodes, then leaves."""

    roots: Tensor  # node per tree
    feature: Tensor  # column per node
    mode: Tensor  # comparison per node
    split: Tensor  # threshold per node
    missing: Tensor  # whether NaN selects `yes`
    yes: Tensor  # the next node or leaf if the comparison is true; a leaf is its own
    no: Tensor
    members: Tensor | None  # sets of membership nodes, padded with NaN
    nodes: int  # their number
    depth: int  # steps after which every row is at a leaf

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


def _successors(indices: Sequence[int], leaf: Sequence[int]) -> list[int]:
    """Successors of nodes, in one numbering of nodes and leaves."""
    nodes = len(indices)
    return [index + nodes * bool(is_leaf) for index, is_leaf in zip(indices, leaf, strict=True)]


def _longest_path(roots: Sequence[int], yes: Sequence[int], no: Sequence[int], nodes: int) -> int:
    """Number of nodes on the longest path to a leaf; BadInput for a cycle."""
    level, depth = {r for r in roots if r < nodes}, 0
    while level:
        depth += 1
        if depth > nodes:
            raise BadInput("expected trees, got nodes that lead back to themselves")
        level = {n for k in level for n in (yes[k], no[k]) if n < nodes}
    return depth


def _membership_sets(values: Value, modes: list[int], x: Tensor) -> Tensor | None:
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


def _aggregate_trees(weights: Tensor, targets: Tensor, count: int, aggregate: int) -> Tensor:
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
    yes = _successors(nodes_truenodeids, nodes_trueleafs)
    no = _successors(nodes_falsenodeids, nodes_falseleafs)
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
        _membership_sets(membership_values, modes, x),
        nodes,
        _longest_path(tree_roots, yes, no, nodes),
    )
    reached = forest.leaves(x)
    weights = leaf_weights.to(x.device)[reached]
    targets = table(leaf_targetids, [])[reached]
    scores = _aggregate_trees(weights, targets, n_targets, aggregate_function)
    return [scores, torch.softmax(scores, -1), torch.sigmoid(scores)][post_transform]
