"""Convolutions whose kernel has one position, of stride 1: they carry the positions of an image."""

from __future__ import annotations

from dataclasses import replace

from demask.ops import Declined, Relation, schema
from demask.ops.schema import fake


def is_point_convolution(relation: Relation) -> bool:
    """Whether a call is a convolution of static size without groups that reads one position."""
    arguments = schema.arguments(relation.node)
    if relation.entry.region != "conv" or relation.entry.fill != "sum" or "pads" in arguments:
        return False
    kernel = fake(arguments["weight"]).shape[2:]
    is_point = all(size == 1 for size in kernel) and arguments["groups"] == 1
    is_static = all(isinstance(n, int) for n in fake(relation.node).shape[-len(kernel) :])
    is_plain = all(step == 1 for step in arguments["stride"])
    return is_point and is_static and is_plain and not relation.entry.reads_padding(relation.node)


def with_carried_points(relation: Relation | Declined) -> Relation | Declined:
    """The relation in which such a convolution carries positions, instead of sliding a window."""
    if not isinstance(relation, Relation) or not is_point_convolution(relation):
        return relation
    kernel = relation.letters(relation.ins[relation.factors[1]]) & relation.window

    def carried(axis: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(letter.partition("<")[0].partition(">")[0] for letter in axis)
        return () if set(axis) & kernel else names

    ins, outs = (tuple(tuple(map(carried, axes)) for axes in side) for side in (relation.ins, relation.outs))
    size = {
        letter.partition("<")[0].partition(">")[0]: n for letter, n in relation.size.items() if letter not in kernel
    }
    return replace(relation, ins=ins, outs=outs, size=size, window=frozenset())
