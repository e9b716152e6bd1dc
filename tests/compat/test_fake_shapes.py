"""Shapes of norms and activations on fake tensors: the same as torch's, without its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

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
    return [
        (str(n.target), str(n.meta["val"].shape), str(n.meta["val"].stride()), n.meta["val"].dtype)
        for n in exported.graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_shapes_strides_and_types(dtype: torch.dtype) -> None:
    expected = values(dtype)
    before = dict(fake_shapes.get_fast_op_impls())
    with shapes_only():
        assert fake_shapes.get_fast_op_impls().keys() > before.keys()
        assert values(dtype) == expected
    assert fake_shapes.get_fast_op_impls() == before


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "volumes, channels last": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 5, 2, 3).permute(2, 3, 0, 1),
    "expanded": lambda: torch.randn(1, 3, 4, 5).expand(2, 3, 4, 5),
    "every second column": lambda: torch.randn(2, 3, 4, 10)[..., ::2],
}
OURS = {"rows", "channels last", "volumes, channels last"}  # layouts that our kernels know


def strides(op: Any, x: Tensor) -> list[str]:
    """Shapes, strides and types of what a call makes of a fake tensor of dynamic batch."""
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (x.ndim - 1)]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        outputs = op(fake, *(mode.from_tensor(value) for value in more(op)[:4]), *more(op)[4:])
        return [f"{y.dtype} {y.shape} {y.stride()}" for y in listed(outputs)]


def more(op: Any) -> tuple[Any, ...]:
    """What else a call takes: statistics and parameters of a norm."""
    if op is not fake_shapes._BATCH_NORM:
        return ()
    return torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), 0.1, 1e-5


def listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", fake_shapes._FITS, ids=str)
def test_values_are_laid_out_as_torch_does(op: Any, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, fits, ours = LAYOUTS[layout](), fake_shapes._FITS[op], list[bool]()
    expected = strides(op, x)

    def watched(*args: Any) -> bool:
        ours.append(fits(*args))
        return ours[-1]

    monkeypatch.setitem(fake_shapes._FITS, op, watched)
    with shapes_only():
        assert strides(op, x) == expected
    assert ours[0] == (layout in OURS)
    if layout in OURS:  # real values are laid out like this, too
        assert listed(op(x, *more(op)))[0].stride() == x.stride()


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
