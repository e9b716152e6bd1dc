"""Constants that enter explicit pads: as much is removed as with padding inside the window."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import demask
import onnx_files
from demask.graph.editor import GraphEditor
from demask.shrink.emit.adapt import Adapter
from demask.shrink.emit.constant_store import ConstantStore
from demask.shrink.pipeline import programs_of
from night import at_night

INF = float("inf")
SIZES = {1: (9,), 2: (8, 9), 3: (7, 8, 7)}  # no less, cropped, than a dilated kernel
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
# Of one axis each: (before, behind), mode, value.
PADS = {
    "zeros": ((1, 1), "constant", 0.0),
    "zeros behind": ((0, 1), "constant", 0.0),
    "crop": ((-1, -1), "constant", 0.0),
    "zeros and crop": ((2, -1), "constant", 0.0),
    "reflect": ((1, 2), "reflect", None),
    "replicate": ((1, 2), "replicate", None),
    "circular": ((1, 2), "circular", None),
}
WINDOWS = {
    "dense": {},
    "strided": {"stride": 2},
    "dilated": {"dilation": 2},
    "own padding": {"padding": 1},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 8},
    "transposed": {"transposed": True, "stride": 2},
}


class Padded(nn.Module):
    """Eight channels, three of them constants, behind a pad that a convolution reads."""

    def __init__(self, d: int, pad: str, window: str, fills: tuple[float, ...]):
        super().__init__()
        options = dict(WINDOWS[window])
        kinds = TRANSPOSED if options.pop("transposed", False) else CONVS
        self.a, self.b = CONVS[d](3, 8, 1), kinds[d](8, 8, 3, **options)
        self.c = CONVS[d](8, 2, 1)
        (before, behind), self.mode, self.value = PADS[pad]
        self.pads = [before, behind] * d
        with torch.no_grad():
            self.a.weight[[0, 3, 5]] = 0
            self.a.bias[[0, 3, 5]] = torch.tensor(fills)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(F.pad(self.a(x), self.pads, self.mode, self.value)))


def shrunk(model: nn.Module, d: int, **options: object) -> nn.Module:
    """The demasked network, checked in float64 on two batches (and sizes, where they are free)."""
    model = model.eval().double()
    torch.manual_seed(1)
    slim = demask.demask(model, (torch.randn(2, 3, *SIZES[d], dtype=torch.float64),), result="graph", **options)
    more = 2 if options else 0
    for batch, grown in ((3, 0), (1, more)):
        x = torch.randn(batch, 3, *(n + grown for n in SIZES[d]), dtype=torch.float64)
        torch.testing.assert_close(slim(x), model(x), rtol=1e-10, atol=1e-10)
    return slim


def rows(slim: nn.Module) -> int:
    return slim.get_parameter("a.weight").shape[0]


ALL = list(itertools.product((1, 2, 3), PADS, WINDOWS))
DAILY = [(2, pad, "dense") for pad in PADS]
DAILY += [(2, "zeros behind", window) for window in WINDOWS if window not in ("dense", "depthwise")]
DAILY += [(1, "zeros behind", "dense"), (3, "zeros and crop", "strided")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("d", "pad", "window"), [*DAILY, *at_night(*(case for case in ALL if case not in DAILY))])
def test_constants_leave_through_pads(d: int, pad: str, window: str) -> None:
    torch.manual_seed(0)
    slim = shrunk(Padded(d, pad, window, (0.5, -1.0, 0.25)), d)
    assert rows(slim) == 5, demask.report(slim)


@pytest.mark.parametrize("pad", ["zeros behind", "reflect"])
def test_constants_leave_through_pads_of_any_size(pad: str) -> None:
    torch.manual_seed(0)
    slim = shrunk(Padded(2, pad, "strided", (0.5, -1.0, 0.25)), 2, dynamic_shapes="all")
    assert rows(slim) == 5, demask.report(slim)


def test_pads_on_both_sides_are_the_padding_of_the_convolution() -> None:
    torch.manual_seed(0)
    outside = Padded(2, "zeros", "dense", (0.5, -1.0, 0.25))
    inside = Padded(2, "zeros", "own padding", (0.5, -1.0, 0.25))
    inside.pads = [0, 0, 0, 0]
    inside.load_state_dict(outside.state_dict())
    first, second = (shrunk(model, 2) for model in (outside, inside))
    assert first.demasked.after == second.demasked.after
    assert not [n for n in first.graph.nodes if "pad_nd" in str(n.target)]
    again = demask.demask(first, (torch.randn(2, 3, 8, 9, dtype=torch.float64),), result="graph")
    assert len(again.graph.nodes) == len(first.graph.nodes)


class Chain(nn.Module):
    """The same producer, then a list of functions of one value."""

    def __init__(self, *functions: object, fills: tuple[float, ...] = (0.5, 1.0, 0.25)):
        super().__init__()
        self.a, self.functions = nn.Conv2d(3, 8, 1), functions
        self.b, self.c = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)
        with torch.no_grad():
            self.a.weight[[0, 3, 5]] = 0
            self.a.bias[[0, 3, 5]] = torch.tensor(fills)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for function in self.functions:
            x = function(x)
        return self.c(self.b(x))


def padded(*pads: int, value: float = 0.0) -> object:
    return lambda x: F.pad(x, pads, value=value)


CHAINS = {
    "a function of each element behind": (padded(1, 1, 0, 1), F.silu, F.relu),
    "a function that moves the pad's value": (padded(1, 1, value=-0.5), torch.relu),
    "two pads": (padded(0, 1), padded(1, 0, 1, 1)),
    "another number": (padded(1, 1, 1, 1, value=0.7),),
    "a maximum over pads below every number": (padded(0, 1, 0, 1, value=-INF), lambda x: F.max_pool2d(x, 2, 1)),
    "a maximum over zeros, of what is not below": (torch.relu, padded(1, 1, 1, 1), lambda x: F.max_pool2d(x, 3, 2)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHAINS)
def test_constants_leave_through_chains(name: str) -> None:
    torch.manual_seed(0)
    slim = shrunk(Chain(*CHAINS[name]), 2)
    assert rows(slim) == 5, demask.report(slim)


class Fork(Chain):
    """A pad that two convolutions read."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.a(x), (1, 0, 1, 0))
        return self.c(self.b(x)) + self.b(x).mean(1, keepdim=True)


def test_several_readers_share_a_pad() -> None:
    torch.manual_seed(0)
    slim = shrunk(Fork(), 2)
    assert rows(slim) == 5, demask.report(slim)
    pads = [n for n in slim.graph.nodes if "pad_nd" in str(n.target)]
    assert len(pads) == 2  # of the image, of the ones of the border map


def test_constants_leave_a_file_whose_convolutions_pad_one_side(tmp_path) -> None:
    """As converters of TensorFlow write it: `auto_pad`, an op `Pad` in front of a convolution."""
    torch.manual_seed(0)
    weights = {
        "w": torch.randn(8, 3, 1, 1),
        "b": torch.randn(8),
        "v": torch.randn(8, 8, 3, 3),
        "u": torch.randn(4, 8, 3, 3),
    }
    weights["w"][:3] = 0
    weights["v"][:2] = 0
    constants = [onnx_files.constant(name, w.numpy()) for name, w in weights.items()]
    constants.append(onnx_files.constant("pads", np.array([0, 0, 0, 0, 0, 0, 1, 1])))
    bias = onnx_files.constant("c", np.arange(8, dtype=np.float32))
    graph = onnx.helper.make_graph(
        [
            onnx_files.node("Conv", ["x", "w", "b"], ["h"]),
            onnx_files.node("Conv", ["h", "v", "c"], ["i"], auto_pad="SAME_UPPER", strides=[2, 2]),
            onnx_files.node("Pad", ["i", "pads"], ["p"]),
            onnx_files.node("Conv", ["p", "u"], ["y"], strides=[2, 2]),
        ],
        "g",
        [onnx_files.value("x", sizes=("n", 3, 16, 16))],
        [onnx_files.value("y", sizes=None)],
        [*constants, bias],
    )
    opset = onnx.helper.make_opsetid("", 18)
    path = tmp_path / "net.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    model = demask.from_onnx(path)
    x = torch.randn(2, 3, 16, 16)
    slim = demask.demask(model, (x,), result="graph")
    torch.testing.assert_close(slim(x), model(x), rtol=1e-5, atol=1e-5)
    assert [tuple(slim.get_parameter(name).shape[:2]) for name in "wvu"] == [(5, 3), (6, 5), (4, 6)]


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :0]


def test_a_value_without_positions_is_scattered() -> None:
    """All positions of an axis are constants."""
    program = next(programs_of(Nothing(), (torch.randn(2, 3),), None, None))
    editor = GraphEditor(program)
    empty = [n for n in editor.graph.nodes if n.op == "call_function"][-1]
    with editor.graph.inserting_after(empty):
        filled = Adapter(editor, ConstantStore(editor), {}).scatter(empty, 1, [], 4, 0.5)  # type: ignore[arg-type]
    assert filled.meta["val"].shape[1] == 4 and filled.meta["effect"] == "pad"
