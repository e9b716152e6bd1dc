"""raise_strides(lower(network)) is the network: the same calls, in the same order and geometry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from demask.failures import Log
from demask.graph.result.module_calls import graph_of_calls
from demask.ops import schema
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.shrink.pipeline import capture_program
from demask.stride import NoSoundForm, Target, lower, raise_strides
from demask.stride.lower import lowered
from demask.stride.raise_strides import raised
from test_stride_lower import NETWORKS, drawn

TARGETS = ("max_pool", "slice", "avg_pool", "no_pool", "space_to_depth", "matrix_unit")


class Residual(nn.Module):
    """A stem, a pool, a block with a strided branch and a strided shortcut."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.a, self.b = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1)
        self.short, self.head = nn.Conv2d(8, 12, 1, 2), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        y = self.b(torch.relu(self.a(x)))
        return self.head(torch.relu(y + self.short(x)).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise convolutions of two strides, signed functions between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, 2, 1)
        self.deep = nn.Conv2d(8, 8, 5, 3, 2, groups=8, bias=False)
        self.last = nn.Conv2d(8, 6, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.silu(self.deep(nn.functional.hardswish(self.first(x)))))


def spelling(module: nn.Module) -> list[Any]:
    """The calls, with all their arguments that are no tensors. Alike are: a view and a reshape,
    whose sizes may be said in several ways; padding in words and in numbers; any stride along an
    axis of one window."""
    found = []
    for node in graph_of_calls(module).nodes:  # type: ignore[arg-type]
        name = str(node.target)
        if node.op == "call_module":
            found.append(name)
        elif node.op != "call_function" or "sym_size" in name:
            continue
        elif "reshape" in name or "view" in name or "expand" in name:
            found.append("expand" if "expand" in name else "view")
        elif isinstance(node.target, torch._ops.OpOverload):
            found.append(_call(node))
    return found


def _call(node: torch.fx.Node) -> tuple[str, dict[str, Any]]:
    given = schema.arguments(node)
    plain = {k: v for k, v in given.items() if not isinstance(v, torch.fx.Node) and k != "tensors"}
    name = str(node.target).replace(".padding", ".default").replace("constant_pad_nd", "pad")
    if name == "aten.pad.default":
        return name, {"pad": plain["pad"], "value": plain["value"] or 0}
    if name == "aten.slice.Tensor":
        plain["end"] = node.meta["val"].shape[plain["dim"]]  # how many there are
    if name.startswith("aten.conv"):
        rank = len(plain["stride"])
        kernel = given["weight"].meta["val"].shape[2:]
        plain["dilation"] = [d if n > 1 else 1 for d, n in zip(plain["dilation"], kernel, strict=True)]
        out = node.meta["val"].shape[-rank:]
        plain["stride"] = [s if n > 1 else 1 for s, n in zip(plain["stride"], out, strict=True)]
        if isinstance(plain["padding"], str):
            reach = [d * (n - 1) for d, n in zip(plain["dilation"], kernel, strict=True)]
            plain["padding"] = [n // 2 if plain["padding"] == "same" else 0 for n in reach]
    return name, plain


@torch.no_grad()
def goes_round(model: nn.Module, args: tuple[Tensor, ...], target: str | Target) -> None:
    lowered = lower(model, args, target=target)
    made, plain = raise_strides(lowered, args), raise_strides(model, args)
    assert spelling(made) == spelling(plain)
    expected, found = model(*args), made(*args)
    expected, found = (getattr(y, "logits", y) for y in (expected, found))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("make", "target"), [*itertools.product([Residual, Separable], TARGETS)])
def test_small_networks(make, target):
    if make is Separable and target == "no_pool":
        pytest.skip("its output keeps the image's axes: such a target cannot make it smaller")
    goes_round(make().eval(), (torch.randn(2, 3, 48, 64),), target)


POOLS = {
    "plain": {"kernel_size": 2},
    "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "without its padding": {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    "ceil": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "ceil, padded": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "ceil, without its padding": {
        "kernel_size": (3, 2),
        "stride": 2,
        "padding": (1, 0),
        "ceil_mode": True,
        "count_include_pad": False,
    },
    "another divisor": {"kernel_size": 2, "divisor_override": 3},
}
NO_MEAN = Target("no mean", frozenset({"slice", "multiply"}), forbidden=("avg_pool",))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("stride", "name"), [*itertools.product([1, 2], POOLS)])
def test_average_pools_become_convolutions_and_come_back(name, stride):
    torch.manual_seed(0)
    pool = nn.AvgPool2d(**POOLS[name])
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride, 1), nn.ReLU(), pool, nn.Conv2d(4, 2, 1), nn.AdaptiveAvgPool2d(1)
    ).eval()
    x = torch.randn(2, 3, 24, 17)  # so that ceil_mode makes a difference
    lowered = lower(net, (x,), target=NO_MEAN)
    targets = [n.target for n in lowered.graph.nodes]
    assert torch.ops.aten.avg_pool2d.default not in targets
    goes_round(net, (x,), NO_MEAN)


def test_traces_have_what_is_lowered_and_raised():
    """Every replacement of a stride is a change, with the calls before and after; so is its return."""
    program = rewrite(capture_program(nn.Conv2d(3, 4, 3, 2, 1), (torch.ones(1, 3, 8, 8),), None, None), CANONICAL)
    log = Log(changes=[])
    without, (choice,) = lowered(program, "slice", log=log)
    (change,) = log.changes
    assert (change.phase, change.rewrite, change.reason) == ("strides", choice.form, choice.why)
    assert [line.split("(")[0].split()[-1] for line in change.before] == ["aten.conv2d.default"]
    assert "aten.slice.Tensor" in "".join(change.after)
    log = Log(changes=[])
    raised(without, log=log)
    assert "absorbed slices" in [change.rewrite for change in log.changes]


def test_trained_weights_stay_a_convolution():
    """A mean that is a parameter is one that training moves."""
    blur = nn.Conv2d(2, 2, 2, 2, groups=2, bias=False)
    nn.init.constant_(blur.weight, 0.25)
    made = raise_strides(blur.eval(), (torch.randn(1, 2, 8, 8),))
    assert [str(n.target) for n in made.graph.nodes if n.op == "call_function"] == ["aten.conv2d.default"]


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_architectures(name, target):
    make, side = NETWORKS[name]
    try:
        goes_round(drawn(make()), (torch.randn(2, 3, side, side),), target)
    except NoSoundForm as error:
        pytest.skip(str(error))
