"""Programs whose norms and softmax are computed in parts: the same as the whole programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import demask
from demask.exec.analysis.split_global_ops import global_calls, split_global_calls
from demask.exec.axes import axes_of
from demask.facts.analysis import Analysis
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.program import Program
from demask.ops import TABLE
from demask.ops.laws import check_scatter_law, law_cases
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from night import at_night
from test_traverse_reductions import EXACT, ROWS_AND_COLUMNS, SPLIT, gap, in_parts

aten, own = torch.ops.aten, torch.ops.demask


class Excited(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


class Spelled(nn.Module):
    """A norm and a context written by the user."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, (2, 3), keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-5)
        weights = F.softmax(x.mean(1, keepdim=True).flatten(2), -1)
        context = (weights * x.flatten(2)).sum(-1)
        return F.normalize(x, dim=2) + context[:, :, None, None] * x.std((2, 3), keepdim=True)


class Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        c, d = torch.split(a * b.sigmoid(), [1, 3], 1)
        first, second = x[:, :2].unbind(1)
        return torch.cat([c, d, x[:, :4]], 1) + (first * second)[:, None]


class Applied(nn.Module):
    def __init__(self, run: Any):
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


NETWORKS = {
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()),
    "group norm, bare": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8, affine=False)),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)),
    "batch norm of its batch": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.GroupNorm(4, 8)
    ),
    "layer norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 11, 8])),
    "layer norm, bare": lambda: nn.LayerNorm([13, 10], elementwise_affine=False),
    "layer norm, no bias": lambda: nn.LayerNorm([13, 10], bias=False),
    "rms norm": lambda: nn.RMSNorm([3, 13, 10], eps=1e-4),
    "excited": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Excited(8), nn.Conv2d(8, 4, 1)),
    "spelled": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Spelled()),
    "gated": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Gated()),
    "softmax": lambda: Applied(lambda x: (F.softmax(x, 2), F.log_softmax(x.flatten(2), -1))),
    "extrema": lambda: Applied(lambda x: (*x.max(2), *x.min(3, keepdim=True), x.argmax(1))),
    "pools": lambda: Applied(
        lambda x: (
            F.avg_pool2d(x, (13, 10))
            + F.adaptive_max_pool2d(x, 1)
            + F.max_pool2d(x, (13, 10))
            + F.adaptive_avg_pool2d(x, (1, 5)).amax(3, keepdim=True)
        )
    ),
}


def program_of(network: str, dtype: torch.dtype = torch.float64) -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    net, x = NETWORKS[network]().to(dtype).eval(), torch.randn(1, 3, 13, 10, dtype=dtype)
    for value in net.parameters():
        nn.init.normal_(value, 0.5)
    return fold_constants(rewrite(capture(net, (x,), dynamic_shapes={}), CANONICAL)), x


def run(program: Program, x: Tensor, seed: int | None = None) -> tuple[Tensor, ...]:
    """What a program makes; seed: reductions are computed from parts drawn with it."""
    relations = Analysis(program, SPLIT).relations
    inputs = dict.fromkeys(program.graph.find_nodes(op="placeholder"), ROWS_AND_COLUMNS)
    axes = axes_of(program.graph, relations, inputs)
    values: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.get)
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "get_attr":
            values[node] = program.constants[str(node.target)].tensor
        elif node.op == "output":
            return args[0]
        elif seed is not None and node not in axes and node.all_input_nodes[0] in axes:
            case = (node.target, args[1:], kwargs)
            values[node] = in_parts(case, args[0], seed, axes[node.all_input_nodes[0]])
        else:
            values[node] = node.target(*args, **kwargs)
        made = node.meta.get("val")
        if isinstance(made, Tensor):
            assert values[node].shape == made.shape and values[node].dtype == made.dtype, node
    raise AssertionError("a graph without an output")


@pytest.mark.parametrize("network", NETWORKS)
def test_the_program_in_parts_equals_the_program(network):
    program, x = program_of(network)
    before, expected = str(program.graph), run(program, x)
    changed = split_global_calls(program, SPLIT)
    assert str(program.graph) == before
    for seed in (None, 1, 2):
        found = run(changed, x, seed)
        assert max(gap(a, b) for a, b in zip(expected, found, strict=True)) <= EXACT
    assert global_calls(changed, SPLIT) == ()
    calls = [n for n in changed.graph.nodes if n.op == "call_function"]
    assert all(isinstance(n.meta["val"], Tensor) for n in calls)


@pytest.mark.parametrize("network", ["group norm", "instance norm", "layer norm", "softmax"])
def test_single_precision_is_in_the_class_of_torch(network):
    single, x = program_of(network, torch.float32)
    double, _ = program_of(network)
    exact = run(double, x.double())
    for e, plain, mine in zip(exact, run(single, x), run(split_global_calls(single, SPLIT), x), strict=True):
        assert gap(e, mine.double()) <= max(2 * gap(e, plain.double()), 3e-7)


@pytest.mark.parametrize("network", ["group norm", "layer norm", "softmax", "rms norm"])
def test_half_precision_is_rounded_once(network):
    program, x = program_of(network, torch.bfloat16)
    for plain, mine in zip(run(program, x), run(split_global_calls(program, SPLIT), x), strict=True):
        assert gap(plain, mine) <= 2 * torch.finfo(torch.bfloat16).eps


def spelling(program: Program) -> list[str]:
    """The calls of a program, each as its op and its operands' places among the calls."""
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    place = {n: f"%{k}" for k, n in enumerate(calls)}
    return [
        f"{n.target._opname} {' '.join(place.get(a, str(a.target)) for a in n.all_input_nodes)}"  # type: ignore[union-attr]
        for n in calls
    ]


def test_an_instance_norm_before_and_after():
    program, _ = program_of("instance norm")
    assert spelling(program)[1:] == ["instance_norm %0 1.weight 1.bias"]
    assert spelling(split_global_calls(program, SPLIT))[1:] == [
        "moments %0",
        "select %1",
        "select %1",
        "reshape %2",
        "reshape %3",
        "add %5",
        "rsqrt %6",
        "reshape 1.weight",
        "reshape 1.bias",
        "mul %8 %7",
        "mul %4 %10",
        "neg %11",
        "add %9 %12",
        "reshape %10",
        "reshape %13",
        "addcmul %15 %0 %14",
    ]


shrink = partial(demask.demask, check=False)  # the law is the check


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "index", "case"), [pytest.param(*c, id=f"{c[0]}-{c[1]}") for c in law_cases(SPLIT) if c[0] not in TABLE]
)
@pytest.mark.parametrize("seed", [0, *at_night(1, 2, 3)])
def test_entries_of_the_wider_table_keep_the_scatter_law(name, index, case, seed):
    assert check_scatter_law(name, case, seed, SPLIT, shrink).ok


def test_moments_are_an_op_with_a_fake():
    x = torch.randn(2, 3, 4, 5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(own.moments.default, (x, [0, -1]), test_utils=checks)
    variance, mean = torch.var_mean(x.double(), (0, 3), correction=0, keepdim=True)
    wanted = torch.stack([mean, variance])
    unit = torch.finfo(torch.float32).eps * float(wanted.abs().max())  # pieces are summed in float32
    assert gap(wanted, own.moments(x, [0, -1])) <= unit
