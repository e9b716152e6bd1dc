"""Full networks as segments give the same bits with any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cifar import ResNet, masked
from demask.graph.result.demasked_module import build
from demask.ops import TABLE
from demask.shrink.pipeline import capture_program, shrink_program
from demask.sparse.segment.build_segments import segmented
from demask.sparse.segment.candidates import _base_programs
from demask.tune.optimized_module import Optimized
from networks import built, mask

pytestmark = pytest.mark.nightly


def network(name: str) -> tuple[nn.Module, int]:
    """A network with half of its channels masked, and the size of its images."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    if name == "resnet56":
        return masked(ResNet(56).eval(), generator, shifts=True), 32
    return mask(built(name, generator).eval(), generator), 224


@pytest.mark.parametrize("name", ["resnet56", "resnet18", "mobilenet_v2", "efficientnet_b0"])
def test_networks(name: str) -> None:
    model, size = network(name)
    x = torch.randn(3, 3, size, size)
    threads = torch.get_num_threads()
    for batch in (1, 3):
        program = capture_program(model.eval(), (x[:batch],), None, None)
        program, provenance = shrink_program(program, TABLE)
        base = next(iter(_base_programs(program, None, TABLE)))[1]
        whole = segmented(base, lambda *_: True, lambda *_: True)
        fast = build(whole, provenance, Optimized).eval()
        try:
            outputs = []
            for count in (1, 2, 3, 4):
                torch.set_num_threads(count)
                with torch.no_grad():
                    outputs.append(fast(x[:batch]).view(torch.int32))
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(outputs[0], y) for y in outputs[1:])
