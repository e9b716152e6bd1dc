"""The layers of a program: calls that sum products with a constant weight, and their names.

The entry of a call says which axes of its weight are rows (they become the layer's outputs) and
which are columns (they are summed over), so every contraction with an entry is a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.program import Constant
from demask.ops import Relation, schema
from demask.ops.schema import fake


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """A call that sums products with a constant weight.

    name: the fully qualified name of the module with the weight; a second call that reads it
    is `name#2`. operand: the weight's index among the relation's operands. weight: its key in the
    program's constants. rows, columns: its axes. axis: of the call's output, where the rows run;
    None where no axis of the output is the weight's rows (recurrent calls).
    """

    name: str
    node: fx.Node
    relation: Relation
    operand: int
    weight: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    axis: int | None

    @property
    def read(self) -> fx.Node:
        """The node that reads the weight."""
        return self.relation.operands[self.operand].value


def layers_of(analysis: Analysis) -> tuple[WeightLayer, ...]:
    """The layers in the order in which they run."""
    counts: Counter[str] = Counter()
    return tuple(_unique_names(analysis, counts))


def _unique_names(analysis: Analysis, counts: Counter[str]) -> Iterator[WeightLayer]:
    for node, relation in analysis.relations.items():
        if not isinstance(relation, Relation) or not (relation.entry.fill == "sum" or relation.back):
            continue
        for operand in _weight_operands(relation):
            key = str(relation.operands[operand].value.target)
            name = module_of(analysis.program.constants[key])
            counts[name] += 1
            rows, columns = _weight_axes(relation, operand)
            axis = None if relation.back else _output_axis(relation, operand, rows)
            shown = name if counts[name] == 1 else f"{name}#{counts[name]}"
            yield WeightLayer(shown, node, relation, operand, key, rows, columns, axis)


def _weight_operands(relation: Relation) -> Iterator[int]:
    """The constant operands that products are summed with."""
    which = range(len(relation.operands)) if relation.back else relation.factors
    for k in which:
        value = relation.operands[k].value
        read = isinstance(value, fx.Node) and schema.is_constant(value)
        if read and fake(value).ndim >= 2 and fake(value).is_floating_point():
            yield k


def _weight_axes(relation: Relation, operand: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    axes = relation.ins[operand]
    if relation.back:
        return (0,), tuple(range(1, len(axes)))
    output_letters = relation.letters(relation.outs[0])
    rows = [k for k, axis in enumerate(axes) if axis and set(axis) <= output_letters]
    return tuple(rows), tuple(k for k in range(len(axes)) if k not in rows)


def _output_axis(relation: Relation, operand: int, rows: tuple[int, ...]) -> int | None:
    letters = [set(relation.ins[operand][k]) for k in rows]
    matches = [k for k, axis in enumerate(relation.outs[0]) if set(axis) in letters]
    return matches[0] if len(matches) == 1 else None


def module_of(constant: Constant) -> str:
    """The module of a constant; its own name where it belongs to the model itself."""
    return constant.name.rpartition(".")[0] or constant.name


def by_rows(weight: Tensor, rows: tuple[int, ...]) -> Tensor:
    """A weight as a matrix (rows, columns), its columns in order.

    >>> by_rows(torch.zeros(4, 3, 5, 5), (0,)).shape, by_rows(torch.zeros(4, 6), (1,)).shape
    (torch.Size([4, 75]), torch.Size([6, 4]))
    """
    order = _call_order(weight.ndim, rows)
    count = 1
    for axis in rows:
        count *= weight.shape[axis]
    return weight.permute(order).reshape(count, -1)


def from_rows(matrix: Tensor, like: Tensor, rows: tuple[int, ...]) -> Tensor:
    """The inverse of `by_rows` for a weight of the shape and dtype of `like`."""
    order = _call_order(like.ndim, rows)
    back = [order.index(axis) for axis in range(like.ndim)]
    shape = [like.shape[axis] for axis in order]
    return matrix.reshape(shape).permute(back).to(like.dtype).contiguous()


def _call_order(rank: int, rows: tuple[int, ...]) -> list[int]:
    return [*rows, *(k for k in range(rank) if k not in rows)]


def check_finite(weight: Tensor, name: str) -> None:
    """Raise BadInput for a weight with Inf or NaN."""
    if not bool(torch.isfinite(weight).all()):
        raise BadInput(f"{name} holds Inf or NaN, which cannot be rounded; repair the weight")
