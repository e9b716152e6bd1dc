"""Plans that print: a row per value, with all calls of the tape."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from demask.exec.tape.segment_plan import SegmentPlan
from demask.graph.result.demasked_module import build_plain
from demask.machine.clock import set_threads
from demask.shrink.pipeline import capture_program
from demask.sparse import SparseLinear, segment_plans
from demask.sparse.segment.build_segments import segmented


class Gated(nn.Module):
    """Layers of each lowering, with a gate and joined slices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.gate, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.stem(x)), 2)
        x = torch.relu(self.wide(x) + x)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        joined = torch.cat([x[:, ::2], x[:, :8]], 1)
        return torch.softmax(self.head(joined.mean((2, 3))), -1)


def plans(threads: int) -> list[SegmentPlan]:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad(), set_threads(threads):
        program = capture_program(Gated().eval(), (x,), None, {})
        fast = segmented(program, core=lambda *_: True, allowed=lambda *_: True)
        return segment_plans(build_plain(fast), x)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_plan_prints_all_that_its_tape_does(threads: int) -> None:
    every = plans(threads)
    assert len(every) == 1
    for plan in every:
        rows = plan.rows
        assert [row.value for row in rows] == list(range(len(rows)))
        assert sum(n for row in rows if row.together is None for *_, n in row.kernels) == len(
            plan.batches[0].ready.entries
        )
        assert all(row.kernels or row.owner != row.value or row.op == "cat" for row in rows)
        lines = str(plan).splitlines()
        assert lines[0].startswith(f"segment: {sum(row.op != 'input' for row in rows)} steps, ")
        assert f"{threads} thread" in lines[0]
        for row in rows:
            (line,) = [line for line in lines if line.split()[:1] == [str(row.value)]]
            assert row.op.split(",")[0] in line and row.where in line
    names = {row.name for plan in every for row in plan.rows}
    assert {"stem", "wide", "gate", "head"} <= names
    kernels = str(every[0])
    assert "depthwise tile" in kernels and "pool" in kernels and "softmax" in kernels


def test_plans_of_layers_and_of_none() -> None:
    (plan,) = segment_plans(nn.Sequential(nn.ReLU(), SparseLinear(torch.eye(8), activation="relu")), torch.ones(3, 8))
    assert "linear, relu" in str(plan)
    assert segment_plans(nn.Linear(3, 2), torch.ones(1, 3)) == []
