"""Micro-networks with a hand-counted number of weights that an exact demasker can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

Made = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Micro:
    """A network, its example inputs, and the weights (parameters and floating buffers, batch norm
    statistics included) that the smallest exact network holds."""

    name: str
    make: Callable[[], Made]
    weights: int
    resizable: bool = False  # exact at another image size from one demask


MICROS: list[Micro] = []


def micro(weights: int, resizable: bool = False):
    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        MICROS.append(Micro(make.__name__, make, weights, resizable))
        return make

    return add


class Net(nn.Module):
    """Modules by name and a forward that is a function of (modules, inputs)."""

    def __init__(self, forward: Callable[..., object], **modules: nn.Module):
        super().__init__()
        self.steps = nn.ModuleDict(modules)
        self.run = forward

    def forward(self, *xs: Tensor) -> object:
        return self.run(self.steps, *xs)


def dead(layer: nn.Module, rows: list[int], bias: bool = True) -> nn.Module:
    """Zero output rows; `bias` too."""
    with torch.no_grad():
        layer.weight[rows] = 0
        if bias and layer.bias is not None:
            layer.bias[rows] = 0
    return layer


def norm(channels: int, dims: int = 2, shift: bool = True) -> nn.Module:
    layer = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_() if shift else layer.bias.zero_()
        layer.running_mean.normal_() if shift else layer.running_mean.zero_()
        layer.running_var.uniform_(0.5, 1.5)
    return layer


def image(*sizes: int) -> tuple[Tensor, ...]:
    return (torch.randn(*(sizes or (2, 3, 8, 6))),)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def mlp() -> Made:
    return nn.Sequential(dead(nn.Linear(4, 8), [0, 2, 3, 5, 7]), nn.ReLU(), nn.Linear(8, 2)), image(3, 4)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def mlp_bias_remains() -> Made:
    net = nn.Sequential(dead(nn.Linear(4, 8), [0, 2, 3, 5, 7], bias=False), nn.GELU(), nn.Linear(8, 2))
    return net, image(3, 4)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def sigmoid_of_dead() -> Made:
    net = nn.Sequential(dead(nn.Linear(4, 8), [0, 2, 3, 5, 7]), nn.Sigmoid(), nn.Linear(8, 2))
    return net, image(3, 4)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def unread_columns() -> Made:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        net[2].weight[:, [0, 2, 3, 5, 7]] = 0
    return net, image(3, 4)


@micro(4 * 5 + 5)
def dead_outputs_are_scattered() -> Made:
    return dead(nn.Linear(4, 8), [1, 4, 6], bias=True), image(3, 4)


@micro(3 * 4 * 9 + 4 + 4 * 4 + 4 * 5 * 9 + 5, resizable=True)
def conv_bn_relu_conv() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3, padding=1), [0, 3, 4, 7]), norm(8, shift=False), nn.ReLU(), nn.Conv2d(8, 5, 3)
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 4 + 4 * 5 * 9 + 5 + 5 * 9, resizable=True)
def constants_under_padding() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3, padding=1), [0, 3, 4, 7]), norm(8), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1)
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 4 + 4 * 5 + 5, resizable=True)
def same_padding_of_1x1_pads_nothing() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3, padding="same"), [0, 3, 4, 7]), norm(8), nn.Conv2d(8, 5, 1, padding="same")
    )
    return net, image()


@micro(3 * 5 * 9 + 5 + 4 * 5 + 5 * 4 * 9 + 4, resizable=True)
def batch_norm_scale_zero_on_live_convolution() -> Made:
    bn = norm(8)
    with torch.no_grad():
        bn.weight[[1, 2, 6]] = 0
        bn.bias[[1, 2, 6]] = 0
    return nn.Sequential(nn.Conv2d(3, 8, 3), bn, nn.ReLU(), nn.Conv2d(8, 4, 3)), image()


@micro(3 * 4 * 9 + 4 + 3 * 5 * 9 + 5 + 7 * 2 + 2, resizable=False)
def misaligned_add() -> Made:
    net = Net(
        lambda m, x: m["fc"](F.adaptive_avg_pool2d(F.relu(m["a"](x) + m["b"](x)), 1).flatten(1)),
        a=dead(nn.Conv2d(3, 8, 3), [0, 1, 2, 3]),
        b=dead(nn.Conv2d(3, 8, 3), [0, 4, 5]),
        fc=nn.Linear(8, 2),
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 3 * 3 * 9 + 3 + 7 * 2 + 2, resizable=False)
def concat() -> Made:
    net = Net(
        lambda m, x: m["c"](torch.cat([m["a"](x), m["b"](x)], 1).relu().mean((2, 3))),
        a=dead(nn.Conv2d(3, 8, 3), [0, 1, 2, 3]),
        b=dead(nn.Conv2d(3, 5, 3), [0, 4]),
        c=nn.Linear(13, 2),
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 9 + 4 + 4 * 5 + 5, resizable=True)
def depthwise() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7]), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 5, 1)
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 9 + 4 + 4 * 5 + 5, resizable=True)
def dead_depthwise() -> Made:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), dead(nn.Conv2d(8, 8, 3, groups=8), [0, 3, 4, 7]), nn.Conv2d(8, 5, 1)
    )
    return net, image()


@micro(3 * 5 * 9 + 5 + (1 * 4 + 4 * 4) * 1 + 8 + 8 * 2 + 2, resizable=True)
def uneven_groups() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3), [0, 1, 3]), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 2 + 2 + 2 * 4 + 4 + 4 * 5 + 5, resizable=True)
def squeeze_excite() -> Made:
    net = Net(
        lambda m, x: _se(m, m["a"](x).relu()),
        a=dead(nn.Conv2d(3, 8, 3), [1, 2, 5, 6]),
        down=nn.Conv2d(8, 2, 1),
        up=nn.Conv2d(2, 8, 1),
        b=nn.Conv2d(8, 5, 1),
    )
    return net, image()


def _se(m: nn.ModuleDict, y: Tensor) -> Tensor:
    gate = torch.sigmoid(m["up"](F.relu(m["down"](F.adaptive_avg_pool2d(y, 1)))))
    return m["b"](y * gate)


@micro(3 * 4 * 9 + 4 + 4 * 5 * 9 + 5, resizable=True)
def transposed() -> Made:
    first = nn.ConvTranspose2d(3, 8, 3, stride=2, padding=1, output_padding=1)
    with torch.no_grad():
        first.weight[:, [0, 1, 4, 6]] = 0
        first.bias[[0, 1, 4, 6]] = 0
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 5, 3, dilation=2, padding=2)), image()


@micro(3 * 4 * 9 + 4 + 4 * 5 * 9 + 5 + 5 * 9, resizable=True)
def constants_into_transposed() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7], bias=False), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3, stride=2)
    )
    with torch.no_grad():
        net[0].bias[[0, 3, 4, 7]] = 0.5
    return net, image()


@micro(3 * 4 * 5 + 4 + 4 * 4 + 4 * 2 * 3 + 2, resizable=False)
def conv1d() -> Made:
    net = nn.Sequential(dead(nn.Conv1d(3, 8, 5), [0, 1, 2, 7]), norm(8, 1), nn.Conv1d(8, 2, 3))
    return net, image(2, 3, 17)


@micro(3 * 4 * 8 + 4 + 4 * 4 + 4 * 2 * 8 + 2, resizable=False)
def conv3d() -> Made:
    net = nn.Sequential(dead(nn.Conv3d(3, 8, 2), [0, 1, 2, 7]), norm(8, 3), nn.Conv3d(8, 2, 2))
    return net, image(2, 3, 5, 6, 7)


@micro(3 * 4 * 9 + 4 + 2 * 4 + 4 * 5 * 9 + 5, resizable=True)
def instance_norm() -> Made:
    layer = nn.InstanceNorm2d(8, affine=True)
    net = nn.Sequential(dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7], bias=False), layer, nn.Conv2d(8, 5, 3))
    return net, image(2, 3, 12, 11)


@micro(3 * 4 * 9 + 4 + 4 * 5 + 5, resizable=True)
def pooling_and_upsampling() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7], bias=False),
        nn.MaxPool2d(3, 2, 1),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(2),
        nn.Sigmoid(),
        nn.Conv2d(8, 5, 1),
    )
    return net, image(2, 3, 16, 12)


@micro(3 * 8 * 9 + 8 + 2 * 5 + 5, resizable=True)
def pixel_shuffle() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 16, 3), [4, 5, 6, 7, 12, 13, 14, 15]), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(4, 5, 1)
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 5 * 9 + 5, resizable=True)
def pad_modes() -> Made:
    net = Net(
        lambda m, x: m["b"](F.pad(F.pad(m["a"](x).relu(), (1, 2, 1, 1), mode="reflect"), (1, 0, 0, 1))),
        a=dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7]),
        b=nn.Conv2d(8, 5, 3),
    )
    return net, image()


@micro(3 * 4 * 9 + 4 + 4 * 24 * 5 + 5)
def flatten_into_linear() -> Made:
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 3), [0, 3, 4, 7], bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 24, 5)
    )
    return net, image()


@micro(4 * 3 + 3 + 5 * 4 + 4 + 7 * 2 + 2 + 7 * 3 + 3)
def several_inputs_and_outputs() -> Made:
    net = Net(
        lambda m, x, y: {"p": m["p"](_cat(m, x, y)), "q": (m["q"](_cat(m, x, y)), x)},
        a=dead(nn.Linear(4, 6), [0, 1, 5]),
        b=dead(nn.Linear(5, 6), [2, 3]),
        p=nn.Linear(12, 2),
        q=nn.Linear(12, 3),
    )
    return net, (torch.randn(3, 4), torch.randn(3, 5))


def _cat(m: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([m["a"](x).relu(), m["b"](y).relu()], -1)


@micro(3 * 3 + 3 + 3 * 2 + 2)
def tied_weights() -> Made:
    a, b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
    b.weight = a.weight
    with torch.no_grad():
        a.weight[[0, 2, 5]] = 0
        a.weight[:, [0, 2, 5]] = 0
        b.bias[[0, 2, 5]] = 0
    net = Net(lambda m, x: m["c"](m["b"](m["a"](x)).relu()), a=a, b=b, c=nn.Linear(6, 2))
    return net, image(3, 6)


@micro(6 * 3 + 3 * 3 + 3 + 3 + 3 * 2 + 2)
def reused_module() -> Made:
    a = dead(nn.Linear(6, 6), [0, 2, 5])
    net = Net(lambda m, x: m["c"](m["a"](m["a"](x).relu()).relu()), a=a, c=nn.Linear(6, 2))
    return net, image(3, 6)


@micro(4 * 4 + 4 + 4 * 2 + 2)
def in_place_writes() -> Made:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        y = m["a"](x)
        y[:, :3] = 0
        y[:, 3] += 1
        y.relu_()
        return m["b"](y)

    return Net(run, a=nn.Linear(4, 7), b=nn.Linear(7, 2)), image(3, 4)


@micro(4 * 5 + 5 + 5 * 2 + 2)
def dead_branch() -> Made:
    net = Net(
        lambda m, x: m["b"](F.relu(m["a"](x) + m["d2"](F.relu(m["d1"](x))))),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 2),
        d1=nn.Linear(4, 9),
        d2=dead(nn.Linear(9, 5), list(range(5))),
    )
    return net, image(3, 4)


@micro(2)
def dead_layer() -> Made:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), dead(nn.Linear(5, 5), list(range(5))), nn.Linear(5, 2))
    return net, image(3, 4)


@micro(3 * 4 * 9 + 4 + 4 * 5 * 9 + 5, resizable=True)
def pruned_with_hooks() -> Made:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3))
    prune.ln_structured(net[0], "weight", 0.5, 2, 0)
    prune.custom_from_mask(net[0], "bias", net[0].weight_mask[:, 0, 0, 0])
    return net, image()


def _expanded(depthwise: nn.Module, after: nn.Module | None = None) -> Made:
    """Dead channels of the first layer are constants before the depthwise one, maps after it."""
    net = nn.Sequential(
        dead(nn.Conv2d(3, 8, 1, bias=False), [0, 3, 4, 7]),
        norm(8),
        nn.ReLU(),
        depthwise,
        norm(8),
        nn.ReLU(),
        *([] if after is None else [after]),
        nn.Conv2d(8, 5, 1),
    )
    return net, image()


@micro(3 * 4 + 4 * 4 + 8 * 9 + 4 * 8 + 8 * 5 + 5, resizable=True)
def constants_through_padded_depthwise() -> Made:
    return _expanded(nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False))


@micro(3 * 4 + 4 * 4 + 8 * 4 + 8 + 4 * 8 + 8 * 5 + 5, resizable=True)
def constants_through_transposed_depthwise() -> Made:
    return _expanded(nn.ConvTranspose2d(8, 8, 2, 3, 1, groups=8), nn.AvgPool2d(3, 2, 1))


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.split(4, 1)
        return torch.cat([right, left], 1)


@micro(3 * 4 + 4 * 4 + 8 * 9 + 4 * 8 + 8 * 5 + 5, resizable=True)
def maps_split_and_joined_again() -> Made:
    return _expanded(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), _Swap())


class _Excite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b(self.a(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


# What is scaled by a factor of the image is a channel of the image again.
@micro(3 * 4 + 4 * 4 + 8 * 9 + 4 * 8 + (8 * 2 + 2) + (2 * 8 + 8) + 8 * 5 + 5, resizable=True)
def constants_excited_by_the_image() -> Made:
    return _expanded(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), _Excite())


class _Masked(nn.Module):
    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, w: Tensor) -> Tensor:
        return w * self.mask


def _keep(n: int, gone: list[int], *rest: int) -> Tensor:
    mask = torch.ones(n, *rest)
    mask[gone] = 0
    return mask


@micro(4 * 3 + 3 + 3 * 2 + 2)
def parametrized() -> Made:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    parametrize.register_parametrization(net[0], "weight", _Masked(_keep(8, [0, 2, 3, 5, 7], 1)))
    return net, image(3, 4)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def weight_norm() -> Made:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.utils.parametrizations.weight_norm(net[0])
    with torch.no_grad():
        net[0].parametrizations.weight.original0[[0, 2, 3, 5, 7]] = 0
    return net, image(3, 4)


class _MaskInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("mask", _keep(8, [0, 2, 3, 5, 7], 1))
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.weight * self.mask).relu())


@micro(4 * 3 + 3 * 2 + 2)
def mask_inside_forward() -> Made:
    return _MaskInForward(), image(3, 4)


@micro(4 * 3 + 3 + 3 * 2 + 2)
def mask_on_an_activation() -> Made:
    net = Net(
        lambda m, x: m["b"](m["mask"](m["a"](x)).relu()),
        a=nn.Linear(4, 8),
        b=nn.Linear(8, 2),
        mask=_Masked(_keep(8, [0, 2, 3, 5, 7])),
    )
    return net, image(3, 4)
