"""The number of torch's threads is the caller's: after every call it is as before, here and in
threads that start later."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import demask
from demask.machine.clock import race, set_threads
from demask.traverse.execution import run as workers


def counts() -> tuple[int, int]:
    """Torch's threads for this thread and for one that starts now."""
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return torch.get_num_threads(), later[0]


def net() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    return model.eval(), torch.randn(1, 3, 2048, 128)


def tiled() -> None:
    model, x = net()
    small = demask.traverse.tile(model, (x,), memory="14MiB", workers=4)
    assert any(segment.workers > 1 for segment in small.plan.segments)
    small(x)


def tiled_and_failed() -> None:
    model, x = net()
    small = demask.traverse.tile(model, (x,), memory="14MiB", workers=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.SegmentExecutor, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small(x)


def measured() -> None:
    def failing() -> None:
        assert torch.get_num_threads() == 2
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        race({"failing": failing}, 1, threads=2)


@pytest.mark.parametrize("run", [tiled, tiled_and_failed, measured])
def test_threads_are_as_before(run) -> None:
    with set_threads(3):
        assert counts() == (3, 3)
        run()
        assert counts() == (3, 3)
