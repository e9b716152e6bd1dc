"""Programs exported with gradients keep regions without them as graphs of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import demask


class Regions(nn.Module):
    """A factor computed without gradients, in a region with several outputs, and one cast."""

    def __init__(self, enabled: bool):
        super().__init__()
        self.a, self.b, self.enabled = nn.Linear(4, 8), nn.Linear(8, 2), enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale, shift = x.mean(-1, keepdim=True).cos(), x.sum(-1, keepdim=True).sin()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            x = torch.relu(self.a(x)) * scale
        return self.b(x) + shift


def exported(enabled: bool) -> tuple[Regions, torch.export.ExportedProgram, Tensor]:
    torch.manual_seed(0)
    model, x = Regions(enabled).eval(), torch.randn(3, 4)
    with torch.no_grad():
        model.a.weight[:5] = 0
        model.a.bias[:5] = 0
    return model, torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)), x


def test_regions_are_put_back() -> None:
    model, program, x = exported(enabled=False)
    assert any("wrap_with" in str(node.target) for node in program.graph.nodes)
    slim = demask.demask(program)
    assert slim.get_parameter("a.weight").shape == (3, 4)
    for y in (x, torch.randn(5, 4)):
        assert torch.allclose(slim(y), model(y), atol=1e-6)
    assert demask.verify(program, slim, (x,)).ok


def test_a_cast_that_stands_in_no_graph_is_refused() -> None:
    with pytest.raises(demask.NotExportable, match="autocast"):
        demask.demask(exported(enabled=True)[1])
