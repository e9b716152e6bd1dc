"""Small networks for lists of instructions, and what compares a list with its network."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.rewrites.driver import rewrite
from demask.rewrites.normalize import CANONICAL
from demask.stride.accelerator.instructions import Instructions, listed
from demask.stride.accelerator.machine import Machine
from demask.tune.fold_affine import FOLD


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """A network in eval mode with every parameter and statistic drawn."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if name.endswith("var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.ndim > 1:
            value.normal_(0, 1 / math.sqrt(value[0].numel()), generator=generator)
        elif value.is_floating_point():
            value.normal_(float(name.endswith("weight")), 0.2, generator=generator)
    return model.eval()


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def plain(model, args, machine=None, kwargs=None) -> Instructions:
    """The list of a network that has no strides."""
    program = rewrite(fold_constants(functionalize(capture(model, args, kwargs, dynamic_shapes={}))), CANONICAL)
    return listed(rewrite(program, FOLD), machine or Machine())


def far(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest value."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


def same(listing: Instructions, model: nn.Module, *inputs: torch.Tensor, most: float = 1e-5):
    """Does a list compute what the network does, in float32 and in float64?"""
    with torch.no_grad():
        expected = model(*inputs)
        exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
    outputs = listing.run(*inputs)
    for want in (expected, exact):
        for output, value in zip(flat(outputs), flat(want), strict=True):
            assert far(output, value) <= most


class Function(nn.Module):
    """A function of tensors as a network."""

    def __init__(self, function, *constants):
        super().__init__()
        self.function = function
        for k, value in enumerate(constants):
            self.register_buffer(f"c{k}", value)

    def forward(self, *xs):
        return self.function(*xs, *self.buffers())


class Block(nn.Module):
    """A residual block as in ResNet."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.a, self.an = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.b, self.bn = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.skip = None
        if stride != 1 or width != out:
            self.skip = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn(self.b(F.relu(self.an(self.a(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


def resnet(stride: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Block(8, 8, 1),
        Block(8, 16, stride),
        Block(16, 24, stride),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.up(F.relu(self.down(scale))))


class Inverted(nn.Module):
    """An inverted residual as in MobileNet."""

    def __init__(self, width, out, stride, act, excite=False):
        super().__init__()
        wide = 3 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            act(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            act(),
            *([Excite(wide)] if excite else []),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.joins = stride == 1 and width == out

    def forward(self, x):
        return x + self.body(x) if self.joins else self.body(x)


def mobilenet(stride: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        Inverted(8, 8, 1, nn.ReLU6),
        Inverted(8, 12, stride, nn.ReLU6),
        Inverted(12, 12, 1, nn.Hardswish, excite=True),
        Inverted(12, 16, stride, nn.SiLU),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 10),
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 40),
        nn.Sigmoid(),
        nn.Linear(40, 20),
        nn.Tanh(),
        nn.Linear(20, 10),
        nn.LogSoftmax(1),
    )


def flat(value):
    return value if isinstance(value, tuple) else (value,)


X = (2, 3, 7, 9)  # of an image batch
