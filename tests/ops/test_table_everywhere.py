"""What is added at run time works in all engines: a custom op, by its entry in a table of the
caller's own, and an activation, softshrink, by one call."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from test_sparse_segments import always
from torch import Tensor, nn
from torch.nn import functional as F

from demask import demask, optimize, optimize_onnx, report, stride, to_onnx, verify
from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.kernels.llvm.activations import LOWERINGS, register
from demask.kernels.llvm.isa import host
from demask.ops import TABLE, Entry, Table
from demask.ops.activations import ACTIVATIONS, Activation, Equivalent, act_of
from demask.pilot import collect, compare, condition, explain, simplify
from demask.shrink.pipeline import capture_program
from demask.sparse import SparseLinear, spmm
from demask.sparse.segment.build_segments import segmented, segments_of
from demask.traverse import batch, halo, plan, stream, tile, traffic
from demask.tune.epilogue import epilogue_of
from demask.tune.fuse_epilogues import fuse_epilogues
from interpreted import DEVICES, rows_of, run_on
from test_kernels_activations import check, computed, points
from test_optimize import prefer, quick  # noqa: F401  (a fixture: costs are not measured)
from test_tune import ran

aten = torch.ops.aten
SOFTSHRINK = Activation(
    "softshrink",
    F.softshrink,
    (Equivalent(aten.softshrink.default, ("lambd",)),),
    (Equivalent(nn.Softshrink, ("lambd",)),),
    presets={"softshrink": (0.5,)},
)
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


@torch.library.custom_op("everywhere::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@squash.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Squash(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return squash(x)


# What computes each element by itself, and a table that has it.
OWN = TABLE.extended({"everywhere::squash": Entry("... -> ...")})
ADDED = {"an op": (Squash, OWN), "an activation": (partial(nn.Softshrink, 0.125), TABLE)}
everywhere = pytest.mark.parametrize(("act", "table"), ADDED.values(), ids=ADDED)
Act = Callable[[], nn.Module]


def images(act: Act, *, step: int = 1, density: float = 1.0) -> nn.Module:
    """Three convolutions; the channels 5, 6 and 7 of the first are masked, and 0 to 3 of the
    second, where a bias is left."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, step, 1), nn.Conv2d(8, 8, 3, padding=1)
    layers = nn.Sequential(first, act(), second, act(), nn.Conv2d(8, 2, 3, padding=1)).eval()
    with torch.no_grad():
        for layer, masked, bias in ((first, slice(5, 8), 0.0), (second, slice(4), 0.25)):
            layer.weight *= torch.rand(layer.weight.shape) < density
            layer.weight[masked], layer.bias[masked] = 0, bias
    return layers


def shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape[:2]) for name, p in module.named_parameters() if p.ndim == 4 and "border" not in name]


IMAGES = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1))
CUT, WHOLE = [(5, 3), (4, 5), (2, 4)], [(5, 3), (4, 8), (2, 8)]


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
    program = segmented(capture_program(model, (x,), None, None), always, always)
    ((_, segment),) = segments_of(program.graph)
    assert [getattr(step, "act", None) for step in segment.steps] == [("softshrink", (0.25,)), None]
    assert SegmentProgram.parse(segment.text()) == segment
    close(ran(program, (x,))[0], model(x).detach())
    assert LOWERED[-1] == 0.25


def test_onednn_leaves_it() -> None:
    model, x = network(), torch.randn(4, 9)
    program = fuse_epilogues(capture_program(model, (x,), None, None), lambda *_: True)
    (node,) = (n for n in program.graph.nodes if n.target is aten.softshrink.default)
    assert epilogue_of(node) is None
    close(ran(program, (x,))[0], model(x).detach())


@everywhere
def test_demask_cuts_through_it(act: Act, table: Table) -> None:
    model = images(act)
    slim = demask(model, (IMAGES,), table=table, result="graph")
    assert shapes(slim) == CUT and "no rule" not in str(report(slim))
    close(slim(IMAGES), model(IMAGES))


@everywhere
def test_verify_compares_with_its_network_cut_alike(act: Act, table: Table) -> None:
    model = images(act)
    slim = demask(model, (IMAGES,), table=table, result="graph")
    assert verify(model, slim, (IMAGES,), table=table).ok
    with torch.no_grad():
        slim.get_parameter("0.weight").mul_(1 + 1e-6)  # less than float32 may be rounded by
    assert not verify(model, slim, (IMAGES,), table=table, check=False).ok


@pytest.mark.sampled(4)
@everywhere
@pytest.mark.parametrize("form", ["demasked alone", "channels last", "segments of all layers"])
def test_optimize_keeps_what_was_cut(act: Act, table: Table, form: str, monkeypatch: Any) -> None:
    prefer(monkeypatch, form)
    model = images(act, density=0.2 if "segments" in form else 1.0)
    fast = optimize(model, (IMAGES,), table=table, cache=False)
    assert [d.chosen for d in fast.demasked.decisions[:1]] == [form]
    assert not any("left out" in note for note in fast.demasked.notes)
    assert fast.demasked.after.parameters < fast.demasked.before.parameters
    assert verify(model, fast, (IMAGES,), table=table).ok
    if form == "demasked alone":
        assert shapes(fast) == CUT
    # What is no function of each element alone has its operand in torch's usual layout.
    copies = fast.graph.find_nodes(op="call_function", target=aten.contiguous.default)
    moved = {node.args[0].target for node in copies}
    assert not moved & {torch.ops.everywhere.squash.default, aten.softshrink.default}


@everywhere
def test_strides_are_carried_through_it(act: Act, table: Table) -> None:
    class Mean(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean((2, 3))

    class Half(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[..., ::2, ::2]

    strided, wide = Mean(*images(act, step=2)).eval(), Half(*images(act)[:2]).eval()
    lowered = stride.lower(strided, (IMAGES,), target="no_pool", dynamic_shapes={}, table=table)
    assert {module.stride for module in lowered.modules() if type(module) is nn.Conv2d} == {(1, 1)}
    close(lowered(IMAGES), strided(IMAGES))
    raised = stride.raise_strides(wide, (IMAGES,), table=table)
    assert [m.stride for m in raised.modules() if type(m) is nn.Conv2d] == [(2, 2)]
    close(raised(IMAGES), wide(IMAGES))


@everywhere
def test_traversal_runs_it(act: Act, table: Table) -> None:
    torch.manual_seed(0)
    model, x = images(act), torch.randn(1, 3, 400, 320)
    y, rows = torch.empty(1, 2, 400, 320), nn.Sequential(nn.Linear(9, 16), act(), nn.Linear(16, 5))
    with torch.no_grad():
        tiled = tile(model, (x,), memory="14MiB", table=table)
        loaded = pickle.loads(pickle.dumps(tiled))
        loaded.table = table
        for module in (tiled, copy.deepcopy(tiled), loaded):
            close(module(x), model(x))
        stream(model, x, y, memory="20MiB", table=table)
        close(y, model(x))
        small = batch(rows, (torch.randn(2, 9),), inputs=3, table=table)
        close(small(x[0, 0, :5, :9]), rows(x[0, 0, :5, :9]))
    (segment,) = tiled.plan.segments
    assert segment.mode == "bands" and len(segment.nodes) == 5
    assert plan(model, (x,), memory="14MiB", table=table) == tiled.plan
    assert halo(model, (x,), table=table).inputs[0].rows.before == 3


@everywhere
def test_pilots_follow_it(act: Act, table: Table) -> None:
    model = images(act)
    rows = compare(model, (IMAGES,), by=["channels:0.5", "downsample:2"], pairs=0, table=table).rows
    assert not any(row.refused for row in rows)
    half = condition(model, (IMAGES,), pilot="bits:4", condition="skip:0.5", check=False, table=table)
    # Half of the channels of two layers: 4 of 8 are read, and 4 of 8 computed.
    assert half.network.demasked.after.macs == 2 * 16 * 12 * 9 * (3 * 4 + 4 * 4 + 4 * 2)


def test_public_functions_have_one_default() -> None:
    functions = (
        demask, verify, optimize, optimize_onnx, to_onnx, batch, halo, plan, stream, tile, traffic,
        collect, compare, condition, explain, simplify, stride.instructions, stride.lower,
        stride.raise_strides,
    )  # fmt: skip
    assert all(inspect.signature(f).parameters["table"].default is TABLE for f in functions)


def test_without_its_entry_an_op_is_a_barrier() -> None:
    model, x = images(Squash), torch.randn(1, 3, 400, 320)
    slim = demask(model, (IMAGES,), result="graph")
    assert shapes(slim)[:3] == WHOLE and "no rule for everywhere.squash" in str(report(slim))
    with pytest.raises(stride.NoSoundForm, match=r"no rule for everywhere\.squash"):
        stride.lower(
            nn.Sequential(*images(Squash, step=2), nn.AdaptiveAvgPool2d(1)).eval(),
            (IMAGES,),
            target="no_pool",
            dynamic_shapes={},
        )
    with pytest.raises(BadInput, match="no plan of this network fits"):
        tile(model, (x,), memory="14MiB")
    assert halo(model, (x,)).barriers[0].why == "no rule for everywhere.squash.default"
    (row,) = compare(model, (IMAGES,), by=["downsample:2"], pairs=0).rows
    assert "no rule for everywhere.squash.default" in row.refused


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
    from demask.sparse.products import gpu_products as gpu

    w, x = pruned(7, 9), torch.randn(9, 5)
    with nullcontext() if "softshrink" in ACTIVATIONS else registered():  # in another process
        result = gpu.spmm(rows_of(w, device), x.to(device), None, ("softshrink", (0.25,)))
    close(result.cpu(), F.softshrink(w @ x, 0.25))


@pytest.mark.parametrize("device", DEVICES)
def test_torch_computes_it_on_gpus(device: str) -> None:
    run_on(device, check_on_gpu)


def test_names_in_use_are_refused() -> None:
    with pytest.raises(BadInput, match="an unused activation name"):
        register(SOFTSHRINK, llvm=lower)
    assert act_of("softshrink") == ("softshrink", (0.5,))
    assert act_of(nn.Softshrink(0.1)) == ("softshrink", (0.1,))
