"""Bounds of values: every op's rule against what the op makes, and what follows through a graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from demask.facts.ranges import ANY, Range, compute_ranges, dtype_range, range_rule, tensor_range
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.ops import TABLE, Entry, Table, schema
from demask.ops.entry import Shape
from demask.ops.laws import target_of
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL

Function = Callable[..., Any]


class Net(nn.Module):
    def __init__(self, function: Function, **buffers: Tensor):
        super().__init__()
        self.function = function
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def told(function: Function, *args: Tensor, table: Table = TABLE, **buffers: Tensor) -> Range:
    """The range of what a function of inputs makes."""
    net = Net(function, **buffers).eval()
    program = rewrite(fold_constants(functionalize(capture(net, args))), CANONICAL)
    found = compute_ranges(program.graph.nodes, {k: c.tensor for k, c in program.constants.items()}, table)
    (made,) = program.graph.output_node().args[0]  # type: ignore[misc,union-attr]
    return found[made]  # type: ignore[index]


X = torch.zeros(2, 3, 8, 8)
CASES: list[tuple[Function, Range]] = [
    (lambda m, x: x, ANY),
    (lambda m, x: x.relu(), Range(0, inf)),
    (lambda m, x: F.relu6(x), Range(0, 6)),
    (lambda m, x: x.clamp(-1, 3), Range(-1, 3)),
    (lambda m, x: x.clamp(min=2).clamp(max=1), Range(1, 1)),
    (lambda m, x: x.sigmoid(), Range(0, 1)),
    (lambda m, x: F.hardsigmoid(x), Range(0, 1)),
    (lambda m, x: F.softplus(x), Range(0, inf)),
    (lambda m, x: x.exp(), Range(0, inf)),
    (lambda m, x: x.abs(), Range(0, inf)),
    (lambda m, x: x.square(), Range(0, inf)),
    (lambda m, x: x**2, Range(0, inf)),
    (lambda m, x: x**3, ANY),
    (lambda m, x: x**-2, Range(0, inf)),
    (lambda m, x: x**-1, ANY),
    (lambda m, x: x * x, Range(0, inf)),
    (lambda m, x: x.softmax(1), Range(0, 1)),
    (lambda m, x: x.sqrt(), Range(0, inf)),
    (lambda m, x: x.tanh(), Range(-1, 1)),
    (lambda m, x: F.silu(x), Range(-0.2785, inf)),
    (lambda m, x: F.gelu(x), Range(-0.1701, inf)),
    (lambda m, x: F.hardswish(x), Range(-0.3751, inf)),
    (lambda m, x: F.mish(x), Range(-0.3089, inf)),
    (lambda m, x: F.silu(x.clamp(max=-1)), Range(-0.2785, 0)),
    (lambda m, x: F.leaky_relu(x), ANY),
    (lambda m, x: F.leaky_relu(x, -0.5), Range(0, inf)),
    (lambda m, x: F.elu(x), Range(-1, inf)),
    (lambda m, x: -x.relu(), Range(-inf, 0)),
    (lambda m, x: x.relu() + 2, Range(2, inf)),
    (lambda m, x: 1 - x.sigmoid(), Range(0, 1)),
    (lambda m, x: x.relu() * 3, Range(0, inf)),
    (lambda m, x: F.relu6(x) / -2, Range(-3, 0)),
    (lambda m, x: F.relu6(x) - F.relu6(x + 1), Range(-6, 6)),
    (lambda m, x: x.relu() + x.sigmoid(), Range(0, inf)),
    (lambda m, x: x.relu() * x.sigmoid(), Range(0, inf)),
    (lambda m, x: x * x.sigmoid(), ANY),
    (lambda m, x: 1 / (1 + x.exp()), Range(0, 1)),
    (lambda m, x: 1 / (x.sigmoid() + 1), Range(0.5, 1)),
    (lambda m, x: 1 / x.sigmoid(), ANY),  # a zero may be -0.0
    (lambda m, x: 1 / x.tanh(), ANY),
    (lambda m, x: torch.maximum(x, x.sigmoid()), Range(0, inf)),
    (lambda m, x: torch.minimum(x, F.relu6(x)), Range(-inf, 6)),
    (lambda m, x: torch.where(x > 0, x.relu(), x.sigmoid()), Range(0, inf)),
    (lambda m, x: F.max_pool2d(F.relu6(x), 3, 2, 1), Range(0, 6)),
    (lambda m, x: F.avg_pool2d(F.relu6(x), 3, 2, 1), Range(0, inf)),
    (lambda m, x: F.avg_pool2d(x.exp() + 3, 3, 2, 1), Range(0, inf)),
    (lambda m, x: F.adaptive_avg_pool2d(x.relu(), 2), Range(0, inf)),
    (lambda m, x: x.relu().mean((2, 3)), Range(0, inf)),
    (lambda m, x: x.relu().sum(1), Range(0, inf)),
    (lambda m, x: F.relu6(x).amax((2, 3)), Range(0, 6)),
    (lambda m, x: F.relu6(x).flatten(1).view(2, -1).transpose(0, 1), Range(0, 6)),
    (lambda m, x: torch.cat([F.relu6(x), x.tanh()], 1), Range(-1, 6)),
    (lambda m, x: F.pad(x.exp() + 3, (1, 1)), Range(0, inf)),
    (lambda m, x: F.pad(F.relu6(x), (1, 1), value=-2.0), Range(-2, 6)),
    (lambda m, x: F.relu6(x)[:, 1:, ::2].permute(0, 2, 3, 1), Range(0, 6)),
    (lambda m, x: F.relu6(x).chunk(3, 1)[1], Range(0, 6)),
    (lambda m, x: F.interpolate(F.relu6(x), scale_factor=2.0), Range(0, 6)),
    (lambda m, x: F.interpolate(x.relu(), scale_factor=2.0, mode="bilinear"), Range(0, inf)),
    (lambda m, x: F.interpolate(x.relu(), scale_factor=2.0, mode="bicubic"), ANY),
    (lambda m, x: F.dropout(F.relu6(x), 0.5, False), Range(0, 6)),
    (lambda m, x: F.max_pool2d(F.relu6(x), 2, return_indices=True)[0], ANY),
    (lambda m, x: F.adaptive_max_pool2d(F.relu6(x), 2), Range(0, 6)),
    (lambda m, x: F.relu6(x).double(), Range(0, 6)),
    (lambda m, x: F.relu6(x).to(torch.int32), Range(0, 6)),
    (lambda m, x: x.to(torch.int8), Range(-128, 127)),
    (lambda m, x: x > 0, Range(0, 1)),
    (lambda m, x: x.relu().to(torch.int32) + 1, dtype_range(torch.int32)),
    (lambda m, x: x.sin(), Range(-1, 1)),
    (lambda m, x: x.nan_to_num(), ANY),
    (lambda m, x: torch.rand_like(x), ANY),
    (lambda m, x: torch.add(x.relu(), x.relu(), alpha=2), ANY),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_functions_range(case: int) -> None:
    function, expected = CASES[case]
    found = told(function, X)
    # Functions that round have bounds a few units in the last place further out.
    close = [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, expected, strict=True)]
    assert all(close), f"{found}, expected {expected}"
    assert found.low <= expected.low and found.high >= expected.high


def test_constants_count_with_their_least_and_largest_elements() -> None:
    shift = torch.tensor([0.5, -1.0, 2.0]).view(3, 1, 1)
    assert told(lambda m, x: F.relu6(x) + m.shift, X, shift=shift) == Range(-1, 8)
    assert told(lambda m, x: F.relu6(x) * m.shift, X, shift=shift) == Range(-6, 12)
    assert told(lambda m, x: x * m.zero, X, zero=torch.zeros(3, 1, 1)) == Range(0, 0)
    assert tensor_range(torch.tensor([torch.nan, 1, -inf])) == Range(-inf, 1)
    assert tensor_range(torch.tensor([torch.nan])) == tensor_range(torch.empty(0)) == ANY
    assert tensor_range(torch.tensor([True, True])) == Range(1, 1)


def test_convolutions_norms_and_unknown_ops_are_not_known() -> None:
    weight, one = torch.ones(3, 3, 1, 1), torch.ones(3)
    assert told(lambda m, x: F.conv2d(x.relu(), m.weight), X, weight=weight) == ANY
    assert told(lambda m, x: F.batch_norm(x.relu(), m.one, m.one), X, one=one) == ANY
    assert told(lambda m, x: torch.special.i0(x), X) == ANY


def test_bounds_are_those_of_what_is_computed() -> None:
    """Not of real numbers: in float32, 0.4 - 0.3 - 0.1 is below zero."""
    found = told(lambda m, x: x.clamp(min=0.4) - 0.3 - 0.1, X)
    least = float(torch.tensor([0.4]).sub(0.3).sub(0.1))
    assert least < 0 and found == Range(least, inf)


# --- every rule of the table ---


def drawn(shape: Shape, bounds: Range, draw: torch.Generator) -> Tensor:
    """Numbers between bounds, the bounds and zero among them."""
    if shape.of == "bool":
        return torch.rand(shape.sizes, generator=draw) < 0.5
    low, high = max(bounds.low, -9.0), min(bounds.high, 9.0)
    made = torch.rand(shape.sizes, generator=draw) * (high - low) + low
    flat = made.view(-1)
    if len(flat) > 4:
        flat[0], flat[1] = max(bounds.low, -3e38), min(bounds.high, 3e38)
        flat[2] = 0.0 if bounds.low <= 0 <= bounds.high else low
    return made.clamp(bounds.low, bounds.high)


BOUNDS = [ANY, Range(0, inf), Range(-inf, 0), Range(-2, 3), Range(0.1, 0.7), Range(-5, -1)]
RULED = sorted(name for name, entry in TABLE.items() if range_rule(entry) != "")


def outside(name: str, table: Table, bounds: Range) -> list[str]:
    """Where a call of an entry's cases makes numbers beyond the bounds that are told."""
    target, draw = target_of(name), torch.Generator().manual_seed(0)
    found = []
    for case in table[name].cases:
        graph, env = fx.Graph(), {}

        def filled(value: Any, graph: fx.Graph = graph, env: dict[Any, Tensor] = env) -> Any:
            if isinstance(value, Shape):
                node = graph.placeholder(f"x{len(env)}")
                whole = isinstance(value.of, int)
                env[node] = (
                    torch.randint(0, value.of, value.sizes, generator=draw)  # type: ignore[arg-type]
                    if whole
                    else drawn(value, bounds, draw)
                )
                node.meta["val"] = env[node]
                node.meta["positions"] = env[node]
                return node
            if isinstance(value, (list, tuple)):
                return type(value)(filled(v) for v in value)
            return value

        args = filled(case.args)
        call = graph.call_function(target, args, dict(case.kwargs))
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), env.__getitem__)
        call.meta["val"] = made = target(*args, **kwargs)
        values = {n: bounds if t.is_floating_point() else dtype_range(t.dtype) for n, t in env.items()}
        from demask.facts import ranges as module

        (low, high) = module._call_range(call, values, {}, table)
        for part in made if isinstance(made, (list, tuple)) else [made]:
            if part.dtype != schema.outputs(call)[0].dtype:
                continue
            numbers = part.double()[~part.double().isnan()]
            if numbers.numel() and not low <= float(numbers.min()) <= float(numbers.max()) <= high:
                found.append(f"{case}: {float(numbers.min())} to {float(numbers.max())} beyond {low} to {high}")
    return found


@pytest.mark.parametrize("name", RULED)
def test_no_call_goes_beyond_its_bounds(name: str) -> None:
    assert [wrong for bounds in BOUNDS for wrong in outside(name, TABLE, bounds)] == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("aten.sin.default", "ends"),
        ("aten.silu.default", 0.0),
        ("aten.gelu.default", -0.1),
        ("aten.upsample_bicubic2d.vec", "hull"),
        ("aten.exp.default", (0.0, 1.0)),
        ("aten.add.Tensor", "hull"),
        ("aten.relu.default", (1.0, inf)),
    ],
)
def test_a_wrong_rule_is_noticed(name: str, rule: Any) -> None:
    wrong: Entry = replace(TABLE[name], range=rule)
    table = Table([(key, wrong if key == name else entry) for key, entry in TABLE.items()])
    assert list(itertools.chain(*(outside(name, table, bounds) for bounds in BOUNDS)))


def test_least_values_are_below_the_functions() -> None:
    x = torch.linspace(-4, 1, 100001, dtype=torch.float64)
    for function in (F.silu, F.mish, F.hardswish, F.gelu, lambda v: F.gelu(v, approximate="tanh")):
        rule = told(lambda m, y, f=function: f(y), X).low
        assert rule <= float(function(x).min()) < rule + 2e-4
