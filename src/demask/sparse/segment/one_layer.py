"""One layer as a segment, to time it at other widths than a network has."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import Layer as LayerStep
from demask.exec.steps.segment_steps import SparseWeight, conv_step, linear_step
from demask.exec.tape.segment_plan import NoPlan, SegmentPlan
from demask.registry import RUNNERS
from demask.tune.layer_costs import Layer


def layer_in_segment(layer: Layer, times: int = 1) -> Callable[[], object]:
    """A call that computes a layer `times` times in one segment, on random tensors.

    The input is converted to the layout of the kernels once: the difference between two numbers of
    times is the time of the layer alone. Raises NoPlan, or BadInput, for what no segment computes.
    """
    if "transpose" in layer.target or len(layer.x) > 4:
        raise NoPlan(f"{layer.target} with an input of {len(layer.x)} axes")
    draw = torch.Generator().manual_seed(0)
    rows, numbers = layer.weight[0], prod(layer.weight)
    weights = [torch.randn(numbers + rows, generator=draw), torch.empty(0, dtype=torch.int32)]
    kind, step = _step(layer, SparseWeight((0, 0, numbers)), (0, numbers, numbers + rows))
    x = torch.randn(layer.x, generator=draw)
    program = SegmentProgram((kind,), (step,) * times, (times,))
    plan = SegmentPlan.of(program, weights, [x], torch.get_num_threads())
    return lambda: plan([x])


def _step(layer: Layer, weight: SparseWeight, bias: tuple[int, int, int]) -> tuple[str, LayerStep]:
    """The kind of the input of a layer, and its step."""
    rows = layer.weight[0]
    if not layer.convolves:
        return "tokens", linear_step(0, weight, bias, rows)
    stride, padding, dilation, groups = layer.geometry
    is_signal = len(layer.x) == 3
    one = (1,) * is_signal
    kernel: Any = (*one, *layer.weight[2:])
    pads = tuple((p, p) for p in (*(0,) * is_signal, *padding))
    geometry: Any = ((*one, *stride), pads, (*one, *dilation), groups)
    step = conv_step(0, weight, bias, rows, kernel, *geometry)
    return ("signal" if is_signal else "image"), step


RUNNERS.register("segment", layer_in_segment)
