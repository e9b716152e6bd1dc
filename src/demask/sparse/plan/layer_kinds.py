"""The layers of a program: their weights, read once, and by which kernels they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from demask.sparse.plan.layers.layer_windows import as_conv
from demask.sparse.plan.layers.window_piece import StepWeight, is_depthwise, read_weight
from demask.sparse.plan.layers.winograd_layer import filtered_sizes, is_filtered
from demask.sparse.plan.tile_layout import Size
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ConvStep, LinearStep, Step, reads


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The layers of a program whose values have these sizes.

    filtered: sizes of images, (rows, columns), at which layers are computed by minimal filtering.
    """

    program: SegmentProgram
    weights: Sequence[Tensor]
    shapes: Sequence[Size]
    filtered: frozenset[tuple[int, int]] = frozenset()
    read: dict[int, StepWeight] = field(default_factory=dict)  # by value

    @classmethod
    def of(cls, program: SegmentProgram, weights: Sequence[Tensor], shapes: Sequence[Size],
           lanes: int | None) -> LayerKinds:  # fmt: skip
        """The layers, with minimal filtering where it pays with this many lanes; None: nowhere."""
        if lanes is None:
            return cls(program, weights, shapes)
        steps = [(step, shapes[reads(step)[0]][1], shapes[value][2:])
                 for value, step in enumerate(program.steps, len(program.inputs))]  # fmt: skip
        sizes = filtered_sizes(steps, weights, lanes)
        return cls(program, weights, shapes, frozenset(sizes))

    def weight(self, value: int) -> StepWeight:
        """The weight of the layer that computes a value."""
        if value not in self.read:
            step = self.program.steps[value - len(self.program.inputs)]
            assert isinstance(step, (ConvStep, LinearStep))
            self.read[value] = read_weight(as_conv(step), self.weights, self.shapes[step.x][1])
        return self.read[value]

    def has_own_kernel(self, value: int) -> bool:
        """Whether a layer is dense or depthwise: the kernels of chains are for sparse ones."""
        weight = self.weight(value)
        return weight.depthwise or bool(weight.blocks)

    def is_filtered(self, value: int) -> bool:
        """Whether a layer is computed by minimal filtering."""
        if self.shapes[value][2:] not in self.filtered or len(self.weight(value).blocks) != 1:
            return False
        step = self.program.steps[value - len(self.program.inputs)]
        return is_filtered(step, self.shapes[reads(step)[0]][1], self.weights)

    def is_depthwise(self, step: Step) -> bool:
        """Whether the depthwise kernel computes a step."""
        return isinstance(step, ConvStep) and is_depthwise(
            step, self.shapes[step.x][1], self.weights
        )
