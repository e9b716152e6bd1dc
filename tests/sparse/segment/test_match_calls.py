"""Calls of a graph as steps of segments: which ones match, as what step, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sparse_segments import all_sparse, check, segments_of, steps
from test_sparse_segments import made as plainly_made
from torch import Tensor, nn

from demask.exec.steps import match_calls
from demask.exec.steps.match_calls import MatchedCall, calls_of
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from micro import Net

IMAGE = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))
constant_pad = torch.constant_pad_nd  # which `F.pad` becomes in programs without its name
Body = Callable[[nn.ModuleDict, Tensor], Tensor]


class Norm(nn.BatchNorm2d):
    """A norm that no pass folds into a layer: its statistics may be those of the batch."""

    def __init__(self, channels: int, training: bool = False, **fields):
        super().__init__(channels, **fields)
        self.is_training = training

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.is_training)


def made(model: nn.Module, x: Tensor, dynamic: tuple[int, ...] = ()) -> tuple[Program, Any]:
    """The canonical program of a model, where full slices are gone, and its arguments.

    dynamic: axes of x whose sizes are dynamic.
    """
    sizes = dict.fromkeys(dynamic, torch.export.Dim.AUTO)
    program, args = plainly_made(model, x, shapes=((sizes,),) if dynamic else None)
    return rewrite(program, CANONICAL), args


def net(body: Body, out: int, channels: int = 4, middle: nn.Module | None = None, groups: int = 2) -> nn.Module:
    """A layer of groups, which computes no selection, the calls in question, and a layer that reads
    `out` channels."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["b"](body(m, m["a"](x)))

    first = nn.Conv2d(channels, channels, 3, groups=groups)
    layers: dict[str, nn.Module] = {"a": first, "b": nn.Conv2d(out, 3, 1)}
    if middle is not None:
        layers["m"] = middle
    return Net(run, **layers)


def numbers(*channels: int) -> Tensor:
    return torch.tensor(channels)


def with_gate(x: Tensor, flip: bool = False) -> Tensor:
    gate = x.mean((2, 3), keepdim=True).sigmoid()
    return gate * x if flip else x * gate


# Calls between two layers; channels of their result; the segments of the network.
MATCHED: dict[str, tuple[Body, int, list[str]]] = {
    "slice": (lambda m, x: x[:, 1:3], 2, ["conv, select, conv"]),
    "slice of every second channel": (lambda m, x: x[:, ::2], 2, ["conv, select, conv"]),
    "slice from the end": (lambda m, x: x[:, -3:], 3, ["conv, select, conv"]),
    "rows and columns": (lambda m, x: x[:, :, ::2, ::3], 4, ["conv, select, conv"]),
    "index_select": (lambda m, x: x.index_select(1, numbers(3, 0, 0)), 3, ["conv, select, conv"]),
    "negative axis": (lambda m, x: x.index_select(-3, numbers(2, 1)), 2, ["conv, select, conv"]),
    "pad": (lambda m, x: constant_pad(x, (0, 0, 0, 0, 1, 2)), 7, ["conv, select, conv"]),
    "slice and pad": (lambda m, x: constant_pad(x[:, :, ::2, ::2], (0,) * 4 + (2, 2)), 8, ["conv, select, conv"]),
    "split": (lambda m, x: torch.cat(x.split([1, 3], 1)[::-1], 1), 4, ["conv, select, select, cat, conv"]),
    "chunk": (lambda m, x: x.chunk(2, 1)[1], 2, ["conv, select, conv"]),
    "gate": (lambda m, x: with_gate(x).relu(), 4, ["conv, mean, map sigmoid, scale relu, conv"]),
    "gate first": (lambda m, x: with_gate(x, True), 4, ["conv, mean, map sigmoid, scale, conv"]),
}


@pytest.mark.parametrize("name", MATCHED)
def test_calls_that_match(name: str) -> None:
    body, out, expected = MATCHED[name]
    program, args = made(net(body, out), IMAGE)
    found = check(program, all_sparse, args)
    assert steps(found) == expected


@pytest.mark.parametrize("name", [name for name, case in MATCHED.items() if "select" in case[2][0]])
def test_a_layer_computes_selections_of_its_channels(name: str) -> None:
    body, out, _ = MATCHED[name]
    program, args = made(net(body, out, groups=1), IMAGE)
    has_strides = name in ("rows and columns", "slice and pad", "split")
    assert (steps(check(program, all_sparse, args)) == ["conv, conv"]) is not has_strides


@pytest.mark.parametrize("sign", [1, 2])
def test_sums_by_index(sign: int) -> None:
    """An index_add of channels is a sum with a layer that writes at these channels."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = m["a"](x).relu()
        return m["c"](x.index_add(1, numbers(3, 1), m["b"](x), alpha=sign).relu())

    model = Net(run, a=nn.Conv2d(4, 4, 3), b=nn.Conv2d(4, 2, 3, padding=1), c=nn.Conv2d(4, 2, 1))
    program, args = made(model, IMAGE)
    found = steps(check(program, all_sparse, args))
    assert (found == ["conv relu, conv+ relu, conv"]) is (sign == 1)


NORMS = {"affine": {}, "not affine": {"affine": False}, "large epsilon": {"eps": 0.5}}


@pytest.mark.parametrize("name", NORMS)
def test_norms_that_match(name: str) -> None:
    """A norm behind a sum, which no convolution in front of it can take."""
    program, args = made(
        net(lambda m, x: m["m"](x + x.relu()).relu(), 4, middle=nn.BatchNorm2d(4, **NORMS[name])), IMAGE
    )
    found = check(program, all_sparse, args)
    assert steps(found) in (["conv, map relu, add, conv relu, conv"], ["conv, add, conv relu, conv"])


def calls(model: nn.Module, x: Tensor) -> list[MatchedCall]:
    """The calls that match in the graph as captured."""
    program, _ = made(model, x)
    return list(calls_of(GraphEditor(program), torch.float64).values())


def test_the_step_of_a_norm() -> None:
    """Depthwise, 1x1: one factor and one addend per channel."""
    norm = Norm(4)
    (call,) = calls(Net(lambda m, x: m["m"](x), m=norm), IMAGE)
    assert call.step.op == "conv" and call.affine is not None
    assert (call.step.fields.kernel, call.step.fields.groups, call.step.fields.out) == ((1, 1), 4, 4)
    x, (scale, shift) = IMAGE.double(), call.affine
    y = x * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)
    torch.testing.assert_close(y, norm(x), rtol=0, atol=1e-12)


# Calls that no step computes; the kinds of steps that must not be among those that match.
OTHERS: dict[str, Callable[[nn.ModuleDict, Tensor], Tensor]] = {
    "rows of zeros": lambda m, x: constant_pad(x, (0, 0, 1, 1)),
    "rows and channels of zeros": lambda m, x: constant_pad(x, (0, 0, 1, 0, 1, 0)),
    "channels of ones": lambda m, x: constant_pad(x, (0, 0, 0, 0, 1, 1), value=1.0),
    "channels cut off": lambda m, x: constant_pad(x, (0, 0, 0, 0, -1, 0)),
    "channels cut off and added": lambda m, x: constant_pad(x, (0, 0, 0, 0, 2, -1)),
    "images of zeros": lambda m, x: constant_pad(x, (0, 0, 0, 0, 0, 0, 1, 0)),
    "indexed images": lambda m, x: x.index_select(0, numbers(1, 0)),
    "indexed rows": lambda m, x: x.index_select(2, numbers(1, 0)),
    "sliced images": lambda m, x: x[1:],
    "rows from the second": lambda m, x: x[:, :, 1:],
    "every second row from the second": lambda m, x: x[:, :, 1::2],
    "rows up to the fifth": lambda m, x: x[:, :, :5],
    "columns but the last": lambda m, x: x[..., :-1],
    "product of equal shapes": lambda m, x: x * x.relu(),
    "square": lambda m, x: x * x,
    "one factor per image": lambda m, x: x * x.mean((1, 2, 3), keepdim=True),
    "one factor per pixel": lambda m, x: x * x.mean(1, keepdim=True),
    "a number": lambda m, x: x * 3.0,
    "factors of one image": lambda m, x: x * x[:1].mean((2, 3), keepdim=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_calls_that_do_not_match(name: str) -> None:
    body = OTHERS[name]
    model = Net(lambda m, x: body(m, x.cos()))
    assert not [c for c in calls(model, IMAGE) if c.op in ("select", "scale")]


@pytest.mark.parametrize(
    "name", ["channels of ones", "channels cut off", "one factor per image", "one factor per pixel"]
)
def test_what_does_not_match_stays_between_segments(name: str) -> None:
    out = {"channels of ones": 6, "channels cut off": 3}.get(name, 4)
    program, args = made(net(OTHERS[name], out), IMAGE)
    found = check(program, all_sparse, args)
    assert len(segments_of(found.graph)) == 2
    assert not any("select" in s or "scale" in s for s in steps(found))


def test_norms_of_training_do_not_match() -> None:
    assert not calls(Net(lambda m, x: m["m"](x), m=Norm(4, training=True)), IMAGE)
    without = Norm(4, training=True, track_running_stats=False)
    assert not calls(Net(lambda m, x: m["m"](x), m=without), IMAGE)


def test_norms_with_computed_weights_do_not_match() -> None:
    """A weight or statistics that depend on the input."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return F.batch_norm(x, m["m"].running_mean, m["m"].running_var, x.mean((0, 2, 3)))

    assert not [c for c in calls(Net(run, m=Norm(4)), IMAGE) if c.is_layer]
    tokens = Net(lambda m, x: m["m"](x), m=nn.BatchNorm1d(6))
    assert not calls(tokens, ROWS)


def test_selections_of_rows_of_tokens() -> None:
    """Channels of tokens are the last axis, which is axis 1 of a matrix."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = m["a"](x)
        return m["b"](torch.cat([y[:, 1:3], y.index_select(1, numbers(4, 0))], 1))

    program, args = made(Net(run, a=nn.Linear(6, 5), b=nn.Linear(4, 3)), ROWS)
    found = check(program, all_sparse, args)
    assert steps(found) == ["linear, select, select, cat, linear"]


def test_axis_one_of_longer_tokens_is_none_of_channels() -> None:
    model = Net(lambda m, x: x.cos()[:, 1:3].index_select(1, numbers(0)))
    found = calls(model, torch.randn(2, 5, 6))
    assert [call.op for call in found] == ["slice", "take"]


# Calls between two layers that only a step with that op computes.
CALLED: dict[str, tuple[Callable[[nn.ModuleDict, Tensor], Tensor], str]] = {
    "rows of zeros": (lambda m, x: OTHERS["rows of zeros"](m, x).sigmoid(), "call, map sigmoid"),
    "rows from the second": (OTHERS["rows from the second"], "call"),
    "product of equal shapes": (OTHERS["product of equal shapes"], "map relu, call"),
    "a power of e": (lambda m, x: x.exp(), "call"),
    "rows turned": (lambda m, x: x.transpose(2, 3), "call"),
    "a weight for each channel": (lambda m, x: F.prelu(x, torch.tensor([0.25, -0.5, 1.5, 0], dtype=x.dtype)), "call"),
    "softmax of pixels": (lambda m, x: x.permute(0, 2, 3, 1).softmax(-1).permute(0, 3, 1, 2), "call, call, call"),
    "halves exchanged": (lambda m, x: torch.cat([x[:, :, 2:], x[:, :, :2]], 2), "call, call, call"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("dynamic", [(), (0,)], ids=str)
def test_calls_of_single_ops(name: str, dynamic: tuple[int, ...]) -> None:
    body, expected = CALLED[name]
    program, args = made(net(body, 4), IMAGE, dynamic=dynamic)
    assert steps(check(program, all_sparse, args)) == [f"conv, {expected}, conv"]


def test_a_layer_computes_a_prelu_of_one_weight() -> None:
    model = net(lambda m, x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)), 4)
    program, args = made(model, IMAGE)
    assert steps(check(program, all_sparse, args)) == ["conv leaky_relu, conv"]


# Borders of zeros in front of a layer, and whether the layer computes with them.
BORDERS: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], bool]] = {
    "as of TensorFlow": (nn.Conv2d(4, 4, 3, 2), lambda x: constant_pad(x, (0, 1, 0, 1)), True),
    "and its own": (nn.Conv2d(4, 4, 3, padding=1), lambda x: constant_pad(x, (2, 0, 1, 3)), True),
    "wider than the kernel": (nn.Conv2d(4, 4, 3, groups=4, dilation=2), lambda x: constant_pad(x, (9, 0, 0, 7)), True),
    "of rows, same": (nn.Conv2d(4, 4, (2, 3), padding="same"), lambda x: constant_pad(x, (0, 0, 1, 0)), True),
    "of zero channels": (nn.Conv2d(4, 4, 3), lambda x: constant_pad(x, (1, 1, 0, 0, 0, 0)), True),
    "of channels": (nn.Conv2d(5, 4, 3), lambda x: constant_pad(x, (1, 1, 0, 0, 1, 0)), False),
    "of ones": (nn.Conv2d(4, 4, 3), lambda x: constant_pad(x, (1, 1, 1, 1), value=1.0), False),
    "cut": (nn.Conv2d(4, 4, 3), lambda x: constant_pad(x, (1, -1, 1, 1)), False),
    "reflected": (nn.Conv2d(4, 4, 3), lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), False),
    "of a transposed layer": (nn.ConvTranspose2d(4, 4, 3), lambda x: constant_pad(x, (1, 1, 1, 1)), False),
}


@pytest.mark.parametrize("name", BORDERS)
def test_a_layer_computes_with_a_border_of_zeros(name: str) -> None:
    layer, border, is_absorbed = BORDERS[name]
    program, args = made(Net(lambda m, x: m["b"](border(m["a"](x).relu())), a=nn.Conv2d(4, 4, 1), b=layer), IMAGE)
    assert (steps(check(program, all_sparse, args)) == ["conv relu, conv"]) is is_absorbed


def test_a_border_that_others_read_stays() -> None:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = constant_pad(m["a"](x), (1, 1, 1, 1))
        return m["b"](y).relu() + y[:, :, 1:-1, 1:-1]

    program, args = made(Net(run, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 3)), IMAGE)
    check(program, all_sparse, args)
    signal, args = made(
        Net(lambda m, x: m["b"](constant_pad(m["a"](x), (3, 1))), a=nn.Conv1d(4, 4, 1), b=nn.Conv1d(4, 4, 3)),
        torch.randn(2, 4, 9),
    )
    assert steps(check(signal, all_sparse, args)) == ["conv, conv"]


def test_the_last_calls_of_a_network_are_in_its_segment() -> None:
    """Heads of detectors: maps as rows, joined, and their scores."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        maps = m["b"](m["a"](x)), m["c"](m["a"](x))
        rows = [y.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 2) for y in maps]
        joined = torch.cat(rows, 1)
        return torch.cat([joined.softmax(-1), (joined * 0.2).exp()[:, 1:]], 1)

    convs = {"a": nn.Conv2d(4, 4, 1), "b": nn.Conv2d(4, 2, 3), "c": nn.Conv2d(4, 6, 3, stride=2)}
    program, args = made(Net(run, **convs), IMAGE, dynamic=(0,))
    found = check(program, all_sparse, args)
    assert len(segments_of(found.graph)) == 1
    live = [n for n in found.graph.nodes if n.op == "call_function"]
    assert len(live) == 2  # the segment, and its output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["slice", "index_select", "pad", "gate"])
def test_dynamic_sizes(name: str) -> None:
    body, out, expected = MATCHED[name]
    program, args = made(net(body, out), IMAGE, dynamic=(0, 2, 3))
    assert steps(check(program, all_sparse, args)) == expected


def test_a_dynamic_end_is_no_whole_axis() -> None:
    """Rows up to a size that depends on the input."""
    model = Net(lambda m, x: x.cos()[:, :, : x.shape[3]])
    program, _ = made(model, IMAGE, dynamic=(2, 3))
    found = calls_of(GraphEditor(program), torch.float64).values()
    assert not [c for c in found if c.step.op == "select"]


def test_a_dynamic_end_that_is_the_whole_axis() -> None:
    """Every second row up to the height, which the graph reads from the input."""
    body = lambda m, x: x[:, :, : x.shape[2] : 2]  # noqa: E731
    program, args = made(net(body, 4), IMAGE, dynamic=(0, 2, 3))
    assert len(steps(check(program, all_sparse, args))) in (1, 2)


# --------------------------------------------------------------------------------- planted faults


def later(node, axis, channels, stride=(1, 1)):
    return SELECTION(node, axis, channels.roll(1), stride)


def other_norm(editor, node, arguments):
    return NORM(editor, node, {**arguments, "eps": 0.1})


SELECTION, NORM = match_calls._selection, match_calls._norm


@pytest.mark.parametrize("name", ["slice and pad", "index_select", "split"])
def test_a_wrong_selection_is_seen(name: str, monkeypatch) -> None:
    monkeypatch.setattr(match_calls, "_selection", later)
    body, out, _ = MATCHED[name]
    program, args = made(net(body, out), IMAGE)
    with pytest.raises(AssertionError):
        check(program, all_sparse, args)


def test_a_wrong_norm_is_seen(monkeypatch) -> None:
    monkeypatch.setitem(match_calls._RULES, torch.ops.aten.batch_norm.default, other_norm)
    model = net(lambda m, x: m["m"](x + x.relu()).relu(), 4, middle=nn.BatchNorm2d(4))
    program, args = made(model, IMAGE)
    with pytest.raises(AssertionError):
        check(program, all_sparse, args)


def test_a_pad_of_ones_that_matched_would_be_seen(monkeypatch) -> None:
    real = match_calls._padded
    monkeypatch.setitem(
        match_calls._RULES,
        torch.ops.aten.constant_pad_nd.default,
        lambda editor, node, arguments: real(editor, node, {**arguments, "value": 0}),
    )
    program, args = made(net(OTHERS["channels of ones"], 6), IMAGE)
    with pytest.raises(AssertionError):
        check(program, all_sparse, args)
