"""Detectors of ultralytics, from their own YAML files: they come back as the networks they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import demask
import networks

pytestmark = pytest.mark.nightly


def detector(name: str) -> Any:
    """A detector with random weights; half of the channels inside each bottleneck are masked."""
    networks.torchvision()
    tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)
    torch.manual_seed(0)
    model = tasks.DetectionModel(name, verbose=False).eval()
    with torch.no_grad():
        for part in model.modules():
            if type(part).__name__ == "Bottleneck":
                half = part.cv1.conv.out_channels // 2
                for tensor in (part.cv1.conv.weight, part.cv1.bn.weight, part.cv1.bn.bias):
                    tensor[:half] = 0
    return model


@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo11n.yaml"])
def test_a_detector_stays_one_and_trains(name: str) -> None:
    model = detector(name)
    x = torch.rand(2, 3, 128, 160)
    slim: Any = demask.demask(model, (x,))
    assert type(slim) is type(model)
    assert sum(p.numel() for p in slim.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(slim(x)[0], model(x)[0], rtol=1e-4, atol=1e-3)
    batch = {"img": x, "cls": torch.zeros(2, 1), "bboxes": torch.full((2, 4), 0.4), "batch_idx": torch.arange(2.0)}
    slim.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    slim.train()
    optimizer = torch.optim.SGD(slim.parameters(), 1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = slim(batch)[0].sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
