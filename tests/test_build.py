"""Values of calls that passes add: equal calls share one, and only equal ones do."""

from __future__ import annotations

import weakref

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from demask.graph.build import Builder

aten = torch.ops.aten


def builder(*tensors: torch.Tensor) -> tuple[Builder, list[fx.Node]]:
    """A builder, and an input of a graph for each tensor, all its sizes dynamic."""
    build = Builder(fx.Graph(), FakeTensorMode(shape_env=ShapeEnv()))
    nodes = []
    for k, tensor in enumerate(tensors):
        nodes.append(build.graph.placeholder(f"x{k}"))
        nodes[-1].meta["val"] = build.mode.from_tensor(tensor)
    return build, nodes


def test_equal_calls_share_a_value_and_numbers_of_other_types_do_not() -> None:
    build, (x,) = builder(torch.arange(6).view(2, 3))
    whole, again, real, flag = (
        build.call(aten.mul.Tensor, x, number).meta["val"] for number in (1, 1, 1.0, True)
    )
    assert whole is again
    assert (whole.dtype, real.dtype, flag.dtype) == (torch.int64, torch.float32, torch.int64)
    assert flag is not whole


def test_values_differ_with_strides_and_sizes() -> None:
    build, (x, y) = builder(torch.randn(4, 6), torch.randn(7, 5).T)
    first, second = (build.call(aten.relu.default, n).meta["val"] for n in (x, y))
    assert first.stride() != second.stride()
    assert first.shape[0].node.expr != second.shape[0].node.expr


def test_sizes_that_values_decide_are_new_in_each_call() -> None:
    build, (x,) = builder(torch.randn(4, 6))
    mask = build.call(aten.gt.Scalar, x, 0)
    calls = [build.call(aten.masked_select.default, x, mask) for _ in range(2)]
    first, second = (call.meta["val"] for call in calls)
    assert first.shape[0].node.expr != second.shape[0].node.expr


def test_a_fake_tensor_does_not_keep_the_real_one() -> None:
    build, _ = builder()
    real = torch.randn(3, 4)
    fake, watched = build.fake(real), weakref.ref(real)
    assert build.fake(torch.randn(3, 4)) is fake
    assert build.fake(torch.randn(3, 4, dtype=torch.float64)) is not fake
    del real
    assert watched() is None
