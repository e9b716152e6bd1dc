"""A network executed in a mode that is told, not chosen: what the laws of traversal check."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from demask.exec.analysis.flow import Flow, capture_at_sizes, flow_of
from demask.exec.planning.plan import BANDS, BARRIER, FRUSTUMS, LAYERWISE, Segment
from demask.exec.planning.plan_memory import lay_out
from demask.exec.planning.planner import Planner, packed_plan
from demask.ops import TABLE
from demask.traverse.execution.tiled_module import Tiled, tiled


def executed(
    model: nn.Module,
    x: Tensor,
    mode: str,
    rows: int,
    columns: int = 0,
    *,
    seed: int = 0,
    spills: bool = False,
    again: bool = False,
    workers: int = 1,
) -> Tiled:
    """The network with every segment that can in this mode; the others layer-wise. seed: draws
    further cuts; 0 draws none."""
    program = capture_at_sizes(model, (x,))
    flow = flow_of(program, TABLE)
    segments = told(flow, mode, rows, columns, seed=seed, spills=spills, again=again)
    segments = [replace(s, workers=workers, over={}) if s.mode == BANDS and workers > 1 else s for s in segments]
    layout = lay_out(flow, segments)
    return tiled(program, packed_plan(flow, layout, 2**40, 0), flow, layout, TABLE)


def told(
    flow: Flow, mode: str, rows: int, columns: int = 0, *, seed: int = 0, spills: bool = False, again: bool = False
) -> list[Segment]:
    planner = Planner(flow, recompute=again, spills=spills, smallest=0)
    draw, last = random.Random(seed), len(planner.calls)
    drawn = {draw.randint(0, last) for _ in range(2)} if seed else set[int]()
    ends = sorted({0, last, *planner.forced, *drawn})
    found = []
    for low, high in itertools.pairwise(ends):
        found.append(planner.build_segment(low, high, mode, rows, columns))
    return found


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def difference(model: nn.Module, x: Tensor, module: nn.Module) -> float:
    """The largest difference over the largest value, of all outputs; infinite where NaNs differ."""
    with torch.no_grad():
        expected, got = flat(model(x)), flat(module(x))
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        # What is zero but for rounding (a norm of a constant) has no scale of its own.
        scale = max(a.nan_to_num().abs().max().item(), 1e-3)
        worst = max(worst, (a - b).nan_to_num().abs().max().item() / scale)
    return worst


__all__ = ["BANDS", "BARRIER", "FRUSTUMS", "LAYERWISE", "difference", "executed", "flat", "told"]
