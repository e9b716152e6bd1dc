"""Networks that resize and pad between layers become one segment, also for sizes known only at run
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sparse_segments import all_sparse, and_back, made
from torch import Tensor, nn

from demask.exec.steps.segment_calls import CALLED
from demask.graph.result.demasked_module import build_plain
from demask.sparse.segment.build_segments import segments_of

MIDDLES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), "nearest"),
    "exact": (lambda x: F.interpolate(x, (7, 20), mode="nearest-exact"), "nearest exact"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), "bilinear"),
    "corners": (lambda x: F.interpolate(x, (9, 5), mode="bilinear", align_corners=True), "bilinear"),
    "bicubic": (lambda x: F.interpolate(x, (12, 11), mode="bicubic"), "bicubic"),
    "reflect": (lambda x: F.pad(x, (1, 2, 0, 1), "reflect"), "reflect"),
    "replicate": (lambda x: F.pad(x, (1, 2, 0, 1), "replicate"), "replicate"),
    "circular": (lambda x: F.pad(x, (1, 2, 0, 1), "circular"), "circular"),
    "zeros": (lambda x: F.pad(x, (1, 2, 0, 1)).sigmoid(), "pad"),
}
DYNAMIC = {
    "factor": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "size": lambda x: F.interpolate(x, size=(2 * x.shape[2], 4 * x.shape[3])),
}


class Between(nn.Module):
    """Two convolutions with a function between them."""

    def __init__(self, middle: Callable[[Tensor], Tensor], conv: Any = nn.Conv2d):
        super().__init__()
        self.a, self.b, self.middle = conv(3, 6, 3, padding=1), conv(6, 4, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x).relu()))


def calls(program: Any) -> list[str]:
    """The calls of single ops of the only segment."""
    ((_, inner),) = segments_of(program.graph)
    return [step.op for step in inner.steps if step.op in CALLED]


def equal(program: Any, model: nn.Module, x: Tensor) -> bool:
    return torch.allclose(build_plain(program)(x), model(x), rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MIDDLES)
def test_layers_around_a_resize_are_one_segment(name: str) -> None:
    middle, step = MIDDLES[name]
    model = Between(middle)
    program, (x,) = made(model, torch.randn(2, 3, 6, 8))
    assert calls(all_sparse(program)) == [step]
    assert equal(all_sparse(program), model, x) and equal(and_back(program), model, x)


@pytest.mark.parametrize(
    "mode, step",
    [
        ("nearest", "nearest of a signal"),
        ("nearest-exact", "nearest exact of a signal"),
        ("linear", "linear of a signal"),
    ],
)
def test_signals(mode: str, step: str) -> None:
    model = Between(lambda x: F.interpolate(x, scale_factor=1.7, mode=mode), nn.Conv1d)
    program, (x,) = made(model, torch.randn(2, 3, 11))
    assert calls(all_sparse(program)) == [step] and equal(all_sparse(program), model, x)


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_known_at_run_time(name: str) -> None:
    model = Between(DYNAMIC[name])
    sizes = {k: torch.export.Dim(f"s{k}", min=3, max=40) for k in (2, 3)}
    program, (x,) = made(model, torch.randn(1, 3, 6, 8), shapes=(sizes,))
    segmented = all_sparse(program)
    assert len(calls(segmented)) == 1
    for other in (x, torch.randn(1, 3, 9, 5, dtype=torch.float64)):
        assert equal(segmented, model, other)


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: F.pad(x, (1, 1), value=1.0),
        lambda x: F.pad(x, (-1, 1)),
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True),
    ],
)
def test_other_calls_stay_outside(middle: Callable[[Tensor], Tensor]) -> None:
    model = Between(middle)
    program, (x,) = made(model, torch.randn(1, 3, 6, 8))
    assert len(segments_of(all_sparse(program).graph)) == 2
    assert equal(all_sparse(program), model, x)
