"""What is known of parameters, and of what calls make of them alone.

A parameter has its value until it is trained. So a value that is known counts where it follows from
one that was removed; what follows from unpruned parameters alone is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.masks import Fact, checked, nothing
from demask.ops import Relation


def given_fact(value: Tensor, declared: Tensor | None) -> Fact:
    """The fact of a constant. declared: where a 0 of it counts (None: everywhere)."""
    fact = checked(torch.ones([1] * value.ndim, dtype=torch.bool), value)
    return fact if declared is None else replace(fact, removed=declared & fact.zero)


def computed(fact: Fact) -> Fact:
    """The fact of what a call makes of parameters: its zeros remove what they are multiplied with,
    and all of it is computed."""
    return replace(nothing(fact.fill.ndim, fact.fill.dtype), removed=fact.zero)


def trained_nodes(
    graph: fx.Graph, relations: Mapping[fx.Node, Any], trained: Collection[str]
) -> set[fx.Node]:
    """The parameters, and what calls make of them and of other constants alone."""
    constant: set[fx.Node] = set()
    found: set[fx.Node] = set()
    for node in graph.nodes:
        relation, sources = relations.get(node), node.all_input_nodes
        free = isinstance(relation, Relation) and relation.entry.free
        called = node.op == "call_function" and bool(sources)
        if node.op == "get_attr" or free or (called and all(s in constant for s in sources)):
            constant.add(node)
            if str(node.target) in trained or (not free and any(s in found for s in sources)):
                found.add(node)
    return found


def is_made(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Does a call make its value, of parameters alone?"""
    return node.op == "call_function" and node.target is not operator.getitem and node in weights
