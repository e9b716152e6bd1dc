"""Slices of groups along every axis of a program: one forward sweep over its relations.

A label is the number of a slice, or -1 for a position that belongs to none. Weights have the labels
of their members, and the table carries them on: a letter has one label per position in all operands
and outputs of its call, a moved letter by its index map. So sizes after a removal are known for
values that no parameter shows, such as the heads of a product of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from demask.facts.known import Key, Relations, key_of
from demask.facts.movement import moved_axis
from demask.graph.program import Constant, Program
from demask.ops import Relation
from demask.ops.notation import Axes, Axis

NONE = -1  # the label of positions that always stay
Labels = Tensor | None  # int64, one per position of an axis; None: all positions stay
AxisLabels = list[Labels]  # of a tensor


@dataclass(slots=True)
class SliceLabels:
    """The labels of a program. letters: by call and letter. constants: by name of the constant."""

    letters: dict[fx.Node, dict[str, Tensor]] = field(default_factory=dict)
    constants: dict[str, AxisLabels] = field(default_factory=dict)
    _values: dict[Key, AxisLabels] = field(default_factory=dict)

    @classmethod
    def of(
        cls, program: Program, relations: Relations, members: Mapping[tuple[str, int], Tensor]
    ) -> SliceLabels:
        """The labels of a program. members: by parameter and axis, the labels of a group's members.

        Labels of a value that several operands give are the first operand's that has any there.
        """
        labels = cls()
        for name, constant in program.constants.items():
            labels.constants[name] = _labels_of(constant, members)
        for node in program.graph.nodes:
            if node.op == "get_attr" and str(node.target) in labels.constants:
                labels._values[node, 0] = labels.constants[str(node.target)]
            elif isinstance(relation := relations.get(node), Relation):
                labels._add_call(relation)
        return labels

    def _add_call(self, relation: Relation) -> None:
        """Add the letters of a call, and the labels of its outputs and of its constants."""
        letters: dict[str, Tensor] = {}
        for operand, axes in zip(relation.operands, relation.ins, strict=True):
            for letter, labels in _letters_of(relation, axes, self._value(operand.value)):
                letters[letter] = _merged(letters.get(letter), labels)
        for k in range(len(relation.outs)):
            letters |= self._moved_letters(relation, k)
        self.letters[relation.node] = letters
        for k, axes in enumerate(relation.outs):
            self._values[relation.node, k] = [_composed(axis, letters, relation) for axis in axes]
        for operand, axes in zip(relation.operands, relation.ins, strict=True):
            node = operand.value
            if isinstance(node, fx.Node) and node.op == "get_attr":
                composed = [_composed(axis, letters, relation) for axis in axes]
                mine = self.constants.get(str(node.target), composed)
                # the same list object as in _values: later readers of the tensor see the labels
                mine[:] = [b if a is None else a for a, b in zip(mine, composed, strict=True)]

    def _value(self, value: Any) -> AxisLabels:
        """The labels of an operand; none for numbers, inputs and results of ops without a rule."""
        return self._values.get(key_of(value), []) if isinstance(value, fx.Node) else []

    def _moved_letters(self, relation: Relation, k: int) -> dict[str, Tensor]:
        """The labels of the moved letters of output k, each from the operand it is copied from."""
        moved: dict[str, Tensor] = {}
        for base, index in relation.moves[k].items():
            axis = moved_axis(relation, base)
            labels = torch.full_like(index.position, NONE)
            for number, operand in enumerate(relation.operands):
                source = self._value(operand.value)
                own = source[axis] if axis < len(source) else None
                if own is not None:
                    here = index.source == number
                    labels[here] = own[index.position[here]]
            if bool((labels != NONE).any()):
                letter = next((a for a in sorted(relation.letters(relation.outs[k]))
                               if a.partition(">")[0] == base), base)  # fmt: skip
                moved[letter] = labels
        return moved


def _labels_of(constant: Constant, members: Mapping[tuple[str, int], Tensor]) -> AxisLabels:
    """The labels of a constant's axes: those of the members that are its parameter."""
    names = (constant.name, *constant.aliases)
    labels: AxisLabels = []
    for axis, size in enumerate(constant.tensor.shape):
        own = next((members[n, axis] for n in names if (n, axis) in members), None)
        if own is not None:  # up to the last position of a member
            own = torch.nn.functional.pad(own[:size], (0, max(size - len(own), 0)), value=NONE)
        labels.append(own)
    return labels


def _letters_of(
    relation: Relation, axes: Axes, labels: Sequence[Labels]
) -> list[tuple[str, Tensor]]:
    """The labels of the letters of an operand's axes that do not move."""
    pairs = []
    for axis, own in zip(axes, labels, strict=False):
        sizes = [relation.size.get(letter) for letter in axis]
        if own is None or None in sizes or math.prod(sizes) != len(own):  # type: ignore[arg-type]
            continue
        for k, letter in enumerate(axis):
            lines = own.view(sizes).movedim(k, 0).reshape(sizes[k], -1)  # type: ignore[arg-type]
            # a position belongs to a slice if all of the axis at it does
            labelled = torch.where((lines == lines[:, :1]).all(1), lines[:, 0], NONE)
            if letter not in relation.moved and bool((labelled != NONE).any()):
                pairs.append((letter, labelled))
    return pairs


def _merged(first: Tensor | None, second: Tensor) -> Tensor:
    """The first labels, and the second where those have none."""
    if first is None or len(first) != len(second):
        return second if first is None or len(first) == 1 else first
    return torch.where(first == NONE, second, first)


def _composed(axis: Axis, letters: Mapping[str, Tensor], relation: Relation) -> Labels:
    """The labels of an axis, from those of the one letter of it that has any."""
    sizes = [relation.size.get(letter) for letter in axis]
    labelled = [k for k, letter in enumerate(axis) if letter in letters]
    if len(labelled) != 1 or None in sizes:
        return None
    (k,) = labelled
    line = letters[axis[k]]
    if len(axis) == 1:
        return line
    shape = [len(line) if d == k else 1 for d in range(len(axis))]
    return line.view(shape).expand(sizes).reshape(-1)  # type: ignore[arg-type]
