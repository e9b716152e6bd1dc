"""An activation that is registered at run time, softshrink, in all engines: one call adds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask import demask
from demask.errors import BadInput
from demask.kernels.activations import LOWERINGS, register
from demask.kernels.isa import host
from demask.ops.activations import ACTIVATIONS, Activation, Equivalent, act_of
from demask.shrink.pipeline import given
from demask.sparse import SparseLinear, spmm
from demask.sparse.program import Program
from demask.sparse.segments import segmented, segments_of
from demask.traverse import tile
from demask.tune.epilogues import epilogue
from demask.tune.fuse import fused
from interpreted import DEVICES, rows_of, run_on
from test_kernels_activations import check, computed, points
from test_sparse_segments import always
from test_tune import ran

aten = torch.ops.aten
SOFTSHRINK = Activation(
    "softshrink", F.softshrink, (Equivalent(aten.softshrink.default, ("lambd",)),),
    (Equivalent(nn.Softshrink, ("lambd",)),), presets={"softshrink": (0.5,)},
)  # fmt: skip
LOWERED: list[float] = []  # the numbers that the lowering was called with


def lower(e: Any, x: Any, limit: float) -> Any:
    LOWERED.append(limit)
    above, below = e.b.fsub(x, e.splat(limit)), e.b.fadd(x, e.splat(limit))
    inside = e.b.fmul(x, e.splat(0.0))
    low = e.b.select(e.b.fcmp_ordered("<", x, e.splat(-limit)), below, inside)
    return e.b.select(e.b.fcmp_ordered(">", x, e.splat(limit)), above, low)


@contextmanager
def registered() -> Iterator[None]:
    register(SOFTSHRINK, llvm=lower)
    try:
        yield
    finally:
        del ACTIVATIONS["softshrink"], LOWERINGS["softshrink"]


@pytest.fixture(autouse=True)
def softshrink() -> Iterator[None]:
    with registered():
        yield


def pruned(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape) * (torch.rand(shape) < 0.4)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 16), nn.Softshrink(0.25), nn.Linear(16, 5))
    with torch.no_grad():
        for layer in (layers[0], layers[2]):
            layer.weight.copy_(pruned(*layer.weight.shape))
    return layers.eval()


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lanes", [n for n in (1, 4, 16) if n <= host().lanes])
def test_its_machine_code(lanes: int) -> None:
    x = points()
    for act, out in computed([("softshrink", (0.5,))], lanes, x):
        check(out, x, act)


def test_a_sparse_layer_computes_it() -> None:
    dense, x = nn.Linear(9, 7), torch.randn(3, 9)
    with torch.no_grad():
        dense.weight.copy_(pruned(7, 9))
        sparse = SparseLinear.from_dense(dense, nn.Softshrink(0.125))
        close(sparse(x), F.softshrink(dense(x), 0.125))
        assert LOWERED[-1] == 0.125
        assert torch.equal(sparse.to_dense()(x), F.softshrink(dense(x), 0.125))
        csr = dense.weight.to_sparse_csr()
        close(spmm(csr, x.T, dense.bias, "softshrink"), F.softshrink(dense(x), 0.5).T)
    sparse(x).sum().backward()
    F.softshrink(dense(x), 0.125).sum().backward()
    assert sparse.values.grad is not None and dense.weight.grad is not None
    close(sparse.values.grad, dense.weight.grad[dense.weight != 0])


def test_a_segment_takes_it() -> None:
    model, x = network(), torch.randn(4, 9)
    program = segmented(given(model, (x,), None, None), always, always)
    ((_, segment),) = segments_of(program.graph)
    assert [getattr(step, "act", None) for step in segment.steps] == [("softshrink", (0.25,)), None]
    assert Program.parse(segment.text()) == segment
    close(ran(program, (x,))[0], model(x).detach())
    assert LOWERED[-1] == 0.25


def test_onednn_leaves_it() -> None:
    model, x = network(), torch.randn(4, 9)
    program = fused(given(model, (x,), None, None), lambda *_: True)
    (node,) = (n for n in program.graph.nodes if n.target is aten.softshrink.default)
    assert epilogue(node) is None
    close(ran(program, (x,))[0], model(x).detach())


def test_masked_units_are_removed_through_it() -> None:
    model, x = network(), torch.randn(4, 9)
    with torch.no_grad():
        for values in (model[0].weight, model[0].bias):
            values[10:] = 0
        small = demask(model, (x,))
        assert [p.shape[0] for p in small.parameters() if p.ndim == 2] == [10, 5]
        close(small(x), model(x))


def test_tiles_run_it() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    model = nn.Sequential(first, nn.Softshrink(0.25), second, nn.Softshrink(0.5)).eval()
    x = torch.randn(1, 3, 400, 320)
    with torch.no_grad():
        tiled = tile(model, (x,), memory="13MiB")
        close(tiled(x), model(x))
    (segment,) = tiled.plan.segments
    assert segment.mode == "bands" and "softshrink_1" in segment.nodes


def check_on_gpu(device: str) -> None:
    from demask.sparse import gpu

    w, x = pruned(7, 9), torch.randn(9, 5)
    with nullcontext() if "softshrink" in ACTIVATIONS else registered():  # in another process
        result = gpu.spmm(rows_of(w, device), x.to(device), None, ("softshrink", (0.25,)))
    close(result.cpu(), F.softshrink(w @ x, 0.25))


@pytest.mark.parametrize("device", DEVICES)
def test_torch_computes_it_on_gpus(device: str) -> None:
    run_on(device, check_on_gpu)


def test_names_in_use_are_refused() -> None:
    with pytest.raises(BadInput, match="a new name"):
        register(SOFTSHRINK, llvm=lower)
    assert act_of("softshrink") == ("softshrink", (0.5,))
    assert act_of(nn.Softshrink(0.1)) == ("softshrink", (0.1,))
