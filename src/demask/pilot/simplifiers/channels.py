"""A subset of channels: those with the largest weights, cut out by demask().

Axes that must agree follow from the table, as in placement, joins included: a residual stream is
one group, and so is a hidden layer. Of each group the positions with the largest L2 norm of weights
remain; the others are masked with zeros in a copy of the weights, biases, and scales and shifts of
norms; then demask() removes them. So the graph is consistent whatever is chosen. The criterion is
from Li et al. 2017, "Pruning filters for efficient ConvNets" (there with L1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.known import key_of
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.numerics import is_number
from demask.ops import Declined, Relation, schema
from demask.ops.schema import fake
from demask.pilot.weight_layers import layers_of
from demask.shrink.layout.cells import Cells
from demask.shrink.pipeline import build_shrunk

ConstantAxis = tuple[str, int]  # name of a constant and one of its axes
CellAxes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """A simplifier that removes the channels, units and features with the smallest weights.

    A simplifier derives a cheaper network from a network. Channels that must have the same size
    (those of a residual stream, or the two sides of a hidden layer) form one group. In each group
    the channels are ordered by the L2 norm of their weights, and the largest remain (Li et al.
    2017, "Pruning filters for efficient ConvNets", there with L1). The number and size of attention
    heads and the sizes of inputs and outputs do not change. Pass `Channels(0.5)`, or its text
    "channels:0.5", as `by` of `simplify` and `compare`.

    Args:
        fraction: share of each group that remains, above 0, at most 1. The number of channels is
            rounded to the nearest integer, half to even, and is at least one per group.

    Raises:
        BadInput: `fraction` is out of range.

    Example:
        >>> import torch
        >>> from demask.pilot import Channels, simplify
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> small = simplify(net, (torch.zeros(1, 4),), by=Channels(0.5))  # 4 of 8 hidden units
        >>> sum(p.numel() for p in net.parameters()), sum(p.numel() for p in small.parameters())
        (58, 30)
    """

    fraction: float

    def __post_init__(self) -> None:
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise BadInput(
                f"expected a fraction of the channels above 0 and up to 1, got "
                f"{self.fraction!r}; such as 'channels:0.5'"
            )

    def text(self) -> str:
        """The simplifier's text, such as "channels:0.5"."""
        return f"channels:{self.fraction:g}"

    def applied(self, analysis: Analysis) -> Demasked:
        """The smaller network, whose `demasked.cuts` lists the remaining positions per weight.

        Args:
            analysis: facts about the captured network, which is not changed.
        """
        program, groups = analysis.program, ChannelGroups.of(analysis)
        note = f"{self.text()}: {len(groups.members)} groups of channels cut"
        masked = replace(_masked(program, groups, self.fraction), notes=(*program.notes, note))
        return build_shrunk(masked, analysis.table)

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes of one weight in its own dtype.

        Args:
            weight: a tensor of any shape.
            rows: not used.
        """
        return weight.numel() * weight.element_size()


@dataclass(frozen=True, slots=True)
class ChannelGroups:
    """Axes of constants that run along one group of channels.

    members: by group, the axes of weights whose rows are its positions; axes: all axes with its
    positions.
    """

    members: Mapping[int, tuple[ConstantAxis, ...]]
    axes: Mapping[int, tuple[ConstantAxis, ...]]

    @classmethod
    def of(cls, analysis: Analysis) -> ChannelGroups:
        relations = analysis.relations
        ties = _Ties(analysis.program, relations)
        members: dict[int, dict[ConstantAxis, None]] = defaultdict(dict)
        for layer in layers_of(analysis):
            for axis in () if layer.relation.back else layer.rows:
                cell = ties.group(ties.slots[layer.node, layer.operand][axis])
                if cell is not None:
                    members[cell][layer.weight, axis] = None
        group_axes: dict[int, dict[ConstantAxis, None]] = defaultdict(dict)
        for (node, k), axes in ties.slots.items():
            for axis, cells in enumerate(axes):
                cell = ties.group(cells)
                name = _masked_by(relations[node], k)
                if cell in members and name is not None:
                    group_axes[cell][name, axis] = None
        return cls({c: tuple(m) for c, m in members.items()}, {c: tuple(group_axes[c]) for c in members})


class _Ties:
    """Cells of all values and operands of a graph, tied wherever one is read as the other."""

    def __init__(self, program: Program, relations: Mapping[fx.Node, Relation | Declined]):
        self.cells, self.relations = Cells(), relations
        self.values: dict[object, CellAxes] = {}
        self.slots: dict[tuple[fx.Node, int], CellAxes] = {}
        for node in program.graph.nodes:
            relation = relations.get(node)
            if isinstance(relation, Relation):
                self._tie_call(relation)
            elif node.op == "output":
                self._fix_axes(node.all_input_nodes)
            elif node.op in ("placeholder", "get_attr", "call_function"):
                self._fix_opaque_call(node)

    def group(self, cells: Sequence[int]) -> int | None:
        cells_left = [c for c in self.cells.leaves(cells) if self.cells.size(c) != 1]
        return cells_left[0] if len(cells_left) == 1 and not self.cells.forced(cells_left[0]) else None

    def _tie_call(self, relation: Relation) -> None:
        letters = {letter: self.cells.new(size) for letter, size in relation.size.items()}
        for letter in relation.back:
            letters[letter] = letters[letter.removesuffix("^")]
        for k, axes in enumerate(relation.outs):
            self.values[relation.node, k] = _axis_cells(axes, letters)
        for k, operand in enumerate(relation.operands):
            if isinstance(operand.value, fx.Node):
                self.slots[relation.node, k] = mine = _axis_cells(relation.ins[k], letters)
                self._tie(mine, self.values.get(key_of(operand.value), ()))

    def _tie(self, mine: CellAxes, theirs: CellAxes) -> None:
        for a, b in zip(mine, theirs, strict=False):
            if a and b and not self.cells.unify(a, b):
                self.cells.force([*a, *b])

    def _fix_opaque_call(self, node: fx.Node) -> None:
        """A call without an entry keeps its shape, and so does all that it reads; constants have
        free axes."""
        self._fix_axes(node.all_input_nodes)
        for k, output in enumerate(schema.outputs(node)):
            if isinstance(output, Tensor):
                axes = tuple((self.cells.new(size),) for size in schema.sizes(output))
                self.values[node, k] = axes
                if node.op != "get_attr":
                    self.cells.force(cell for axis in axes for cell in axis)

    def _fix_axes(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            for axes in self.values.get(key_of(node), ()):
                self.cells.force(axes)


def _axis_cells(axes: Sequence[Sequence[str]], letters: Mapping[str, int]) -> CellAxes:
    return tuple(tuple(letters[letter] for letter in axis) for axis in axes)


def _masked_by(relation: Relation | Declined | None, operand: int) -> str | None:
    """The constant that is masked where a call reads it: weights, biases, addends; of norms the
    scale and the shift alone."""
    assert isinstance(relation, Relation)
    value = relation.operands[operand].value
    affine = relation.entry.affine
    if value.op != "get_attr" or (affine is not None and operand not in affine):
        return None
    return str(value.target) if fake(value).is_floating_point() else None


def _masked(program: Program, groups: ChannelGroups, fraction: float) -> Program:
    constants = {name: replace(c, tensor=c.tensor.clone()) for name, c in program.constants.items()}
    for cell, members in groups.members.items():
        scores = sum(_relative_norms(program, members))
        assert isinstance(scores, Tensor)
        count = max(1, round(fraction * len(scores)))
        removed = scores.argsort(descending=True, stable=True)[count:]
        for name, axis in groups.axes[cell]:
            constants[name].tensor.index_fill_(axis, removed, 0)
    return program.with_graph(program.graph, constants)


def _relative_norms(program: Program, members: Sequence[ConstantAxis]) -> Iterator[Tensor]:
    """The squared norm of every position's weights, relative to the layer's mean."""
    for name, axis in members:
        weight = program.constants[name].tensor
        rows = weight.detach().double().movedim(axis, 0).flatten(1).square().sum(1)
        yield rows / rows.mean().clamp_min(torch.finfo(torch.float64).tiny)
