"""Facts of parameters, and of what calls compute from parameters alone.

A parameter has its value until it is trained. So a known value counts only where it follows from a
removed weight; what follows from unpruned parameters alone is computed at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, fx

from demask.facts.masks import Fact, finite_fact


def constant_fact(value: Tensor, declared: Tensor | None) -> Fact:
    """The fact of a constant. declared: where a 0 of it counts as removed (None: everywhere)."""
    fact = finite_fact(torch.ones([1] * value.ndim, dtype=torch.bool), value)
    return fact if declared is None else replace(fact, removed=declared & fact.zero)


def computed_fact(fact: Fact) -> Fact:
    """The fact of a value that a call computes from parameters: its zeros remove what they are
    multiplied with, and all of it is computed."""
    zero = fact.zero
    return Fact(torch.zeros_like(zero), torch.zeros(zero.shape, dtype=fact.fill.dtype), zero)


def trained_nodes(graph: fx.Graph, trained: Collection[str]) -> set[fx.Node]:
    """The parameters, and the calls that compute from parameters alone."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        operands = node.all_input_nodes if node.op == "call_function" else ()
        sources = [s for s in operands if isinstance(s.meta.get("val"), (Tensor, list, tuple))]
        is_parameter = node.op == "get_attr" and str(node.target) in trained
        if is_parameter or (sources and all(source in nodes for source in sources)):
            nodes.add(node)
    return nodes


def is_computed_weight(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether a call computes its value from parameters alone. False for a transposed weight, which
    is cut where the weight is."""
    called = node.op == "call_function" and node.target not in _VIEWS
    return called and node in weights


_VIEWS = (operator.getitem, torch.ops.aten.transpose.int)
