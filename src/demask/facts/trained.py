"""What is known of parameters, and of what calls make of them alone.

A parameter has its value until it is trained. So a value that is known counts where it follows from
one that was removed; what follows from unpruned parameters alone is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, fx

from demask.facts.masks import Fact, checked


def given_fact(value: Tensor, declared: Tensor | None) -> Fact:
    """The fact of a constant. declared: where a 0 of it counts (None: everywhere)."""
    fact = checked(torch.ones([1] * value.ndim, dtype=torch.bool), value)
    return fact if declared is None else replace(fact, removed=declared & fact.zero)


def computed(fact: Fact) -> Fact:
    """The fact of what a call makes of parameters: its zeros remove what they are multiplied with,
    and all of it is computed."""
    zero = fact.zero
    return Fact(torch.zeros_like(zero), torch.zeros(zero.shape, dtype=fact.fill.dtype), zero)


def trained_nodes(graph: fx.Graph, trained: Collection[str]) -> set[fx.Node]:
    """The parameters, and what calls make of them alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        called = node.all_input_nodes if node.op == "call_function" else ()
        sources = [s for s in called if isinstance(s.meta.get("val"), (Tensor, list, tuple))]
        held = node.op == "get_attr" and str(node.target) in trained
        if held or (sources and all(source in found for source in sources)):
            found.add(node)
    return found


def is_made(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Does a call make its value, of parameters alone? (Not one that transposes a weight: that is
    cut where the weight is.)"""
    called = node.op == "call_function" and node.target not in _VIEWS
    return called and node in weights


_VIEWS = (operator.getitem, torch.ops.aten.transpose.int)
