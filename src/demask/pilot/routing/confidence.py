"""Rows of a batch: their class scores, how sure these are, and the inputs of some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.machine.clock import Timing

SMALL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Routed:
    """What the last call did.

    rows: of the call. escalated: rows that the full network ran. calls: of the full network.
    latency:
    of a stream, seconds from the arrival of a batch to its complete answers.
    """

    rows: int
    escalated: int
    calls: int
    latency: Timing | None = None

    @property
    def share(self) -> float:
        """The share of rows that the full network ran."""
        return self.escalated / self.rows if self.rows else 0.0


def scores(outputs: Any) -> Tensor:
    """The class scores of a network's outputs: the first tensor, [rows, classes]."""
    leaves = pytree.tree_leaves(outputs)
    first = leaves[0] if leaves else None
    if not isinstance(first, Tensor) or first.ndim != 2 or not first.is_floating_point():
        got = list(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise BadInput(f"to route, a network's first output must be class scores, floats [rows, classes]; got {got}")
    return first


def picked(call: Any, rows: Tensor, count: int) -> Any:
    """Inputs of some rows: of every tensor that has `count` rows."""

    def of(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == count
        return leaf.index_select(0, rows) if has_rows else leaf

    return pytree.tree_map(of, call)


def margin(logits: Tensor) -> Tensor:
    """The difference of the two largest probabilities: [rows, classes] -> [rows], 0 to 1.

    >>> margin(torch.tensor([[0.0, 0.0], [20.0, -20.0]]))
    tensor([0., 1.])
    """
    if logits.shape[1] < 2:
        raise BadInput(f"expected scores of two classes or more, got {list(logits.shape)}")
    best = logits.softmax(1).topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def softmax(logits: Tensor) -> Tensor:
    """The largest probability: [rows, classes] -> [rows], 1 / classes to 1."""
    return logits.softmax(1).amax(1)


def entropy(logits: Tensor) -> Tensor:
    """1 less the entropy divided by that of equal probabilities: [rows, classes] -> [rows].

    >>> entropy(torch.zeros(1, 4)).abs() < 1e-6
    tensor([True])
    """
    logs = logits.log_softmax(1)
    return 1 + (logs.exp() * logs.clamp(min=math.log(SMALL))).sum(1) / math.log(logits.shape[1])


CONFIDENCES: Mapping[str, Callable[[Tensor], Tensor]] = {"margin": margin, "softmax": softmax, "entropy": entropy}

__all__ = ["CONFIDENCES", "Routed", "entropy", "margin", "picked", "scores", "softmax"]
