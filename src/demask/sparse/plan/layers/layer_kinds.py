"""The layers of a program: their weights, read once, and by which kernels they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from demask.sparse.plan.layers.dense.dense_blocks import DenseBlock
from demask.sparse.plan.layers.dense.winograd_layer import filtered_block, filtered_sizes
from demask.sparse.plan.layers.layer_windows import as_conv
from demask.sparse.plan.layers.window_piece import StepWeight, is_depthwise, read_weight
from demask.sparse.plan.tile_layout import Size
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ConvStep, LinearStep, Step

Weights = dict[int, StepWeight]  # of layers, by the numbers of their values


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The layers of a program whose values have these sizes.

    read: weights, read when they are needed. filtered: sizes of images, (rows, columns), at which
    layers are computed by minimal filtering.
    """

    program: SegmentProgram
    weights: Sequence[Tensor]
    shapes: Sequence[Size]
    read: Weights
    filtered: frozenset[tuple[int, int]] = frozenset()

    def with_filters(self, lanes: int) -> LayerKinds:
        """The same with minimal filtering where it pays with this many lanes."""
        layers = [
            (step, self.weight(value), self.shapes[value][2:])
            for value, step in enumerate(self.program.steps, len(self.program.inputs))
            if isinstance(step, (ConvStep, LinearStep))
        ]
        return replace(self, filtered=filtered_sizes(layers, lanes))

    def step(self, value: int) -> ConvStep | LinearStep:
        """The layer that computes a value."""
        step = self.program.steps[value - len(self.program.inputs)]
        assert isinstance(step, (ConvStep, LinearStep))
        return step

    def weight(self, value: int) -> StepWeight:
        """The weight of the layer that computes a value."""
        if value not in self.read:
            step = self.step(value)
            self.read[value] = read_weight(as_conv(step), self.weights, self.shapes[step.x][1])
        return self.read[value]

    def has_own_kernel(self, value: int) -> bool:
        """Whether a layer is dense or depthwise: the kernels of chains are for sparse ones."""
        weight = self.weight(value)
        return weight.depthwise or bool(weight.blocks)

    def filtered_block(self, value: int) -> DenseBlock | None:
        """The block of a layer that is computed by minimal filtering, if there is one."""
        if self.shapes[value][2:] not in self.filtered:
            return None
        return filtered_block(self.step(value), self.weight(value).blocks)

    def is_depthwise(self, step: Step) -> bool:
        """Whether the depthwise kernel computes a step."""
        return isinstance(step, ConvStep) and is_depthwise(step, self.shapes[step.x][1], self.weights)
