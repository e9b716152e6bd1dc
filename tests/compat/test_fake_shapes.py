"""Shapes of norms and activations on fake tensors: the same as torch's, without its calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from demask.compat import fake_shapes
from demask.compat.fake_shapes import shapes_only

aten = torch.ops.aten


class Net(nn.Module):
    """Norms and activations on values that are laid out in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.flat = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.norm(self.a(x)))
        z = nn.functional.silu(y.transpose(2, 3))[:, ::2]
        return y, torch.sigmoid(z), self.flat(y.flatten(2)), nn.functional.gelu(y[0])


def values(dtype: torch.dtype) -> list[tuple[Any, ...]]:
    net, x = Net().to(dtype).eval(), torch.randn(4, 3, 9, 7, dtype=dtype)
    exported = torch.export.export(net, (x,), dynamic_shapes=({0: Dim.DYNAMIC},), strict=False)
    return [(str(n.target), str(n.meta["val"].shape), str(n.meta["val"].stride()),
             n.meta["val"].dtype) for n in exported.graph.nodes
            if isinstance(n.meta.get("val"), torch.Tensor)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_shapes_strides_and_types(dtype: torch.dtype) -> None:
    expected = values(dtype)
    before = dict(fake_shapes.get_fast_op_impls())
    with shapes_only():
        assert fake_shapes.get_fast_op_impls().keys() > before.keys()
        assert values(dtype) == expected
    assert fake_shapes.get_fast_op_impls() == before


def test_other_threads_have_torchs_own() -> None:
    """A thread that did not ask runs torch's form meanwhile, and leaving restores it."""
    ran: list[bool] = []
    kernel = fake_shapes._ShapeKernel
    fits = fake_shapes._FITS[aten.relu.default]

    def watched(*args: Any) -> bool:
        ran.append(threading.current_thread() is threading.main_thread())
        return fits(*args)

    fake_shapes._FITS[aten.relu.default] = watched
    try:
        with shapes_only():
            assert isinstance(fake_shapes.get_fast_op_impls()[aten.relu.default], kernel)
            thread = threading.Thread(target=values, args=(torch.float32,))
            thread.start()
            thread.join()
            assert not ran
            values(torch.float32)
            assert ran and all(ran)
    finally:
        fake_shapes._FITS[aten.relu.default] = fits


def test_what_does_not_fit_is_torchs() -> None:
    """Sizes that do not fit each other raise what they raise without us."""

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, torch.zeros(5), torch.ones(5))

    x = torch.randn(4, 3, 9)
    with shapes_only(), pytest.raises(Exception, match="should contain"):
        torch.export.export(Wrong(), (x,), dynamic_shapes=({0: Dim.DYNAMIC},), strict=False)
