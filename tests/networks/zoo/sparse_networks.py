"""Networks with unstructured zeros for cpu_sparse.py: random values at fixed positions,
drawn so that activations stay of order one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import dlmc
import networks

SIZE, HIDDEN, INNER = 224, 768, 3072
BRANCH = 0.2
LEAST = 0.01  # of a channel's variance: one that is always 0 would be multiplied by 300
WIDTHS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
Layer = nn.Conv2d | nn.Linear


@torch.no_grad()
def weigh(layer: Layer, mask: Tensor, generator: torch.Generator) -> None:
    """Gives a layer random values on the positions of a mask, zeros elsewhere, and a random bias
    where it has one. Outputs are about as large as inputs, over all rows: their counts differ."""
    values = torch.randn(mask.shape, generator=generator)
    per_row = max(1.0, int(mask.sum()) / len(mask))
    layer.weight.copy_(values * mask / math.sqrt(per_row))
    if layer.bias is not None:
        layer.bias.copy_(0.2 * torch.randn(layer.bias.shape, generator=generator))


def uniform(shape: torch.Size, sparsity: float, generator: torch.Generator) -> Tensor:
    """A mask of this shape with its share of zeros, to the element, at random positions.

    >>> int(uniform(torch.Size([10, 10]), 0.9, torch.Generator().manual_seed(0)).sum())
    10
    """
    mask = torch.zeros(shape.numel(), dtype=torch.bool)
    count = round((1 - sparsity) * shape.numel())
    mask[torch.randperm(shape.numel(), generator=generator)[:count]] = True
    return mask.view(shape)


@torch.no_grad()
def settled(model: nn.Module, images: Tensor, generator: torch.Generator) -> nn.Module:
    """The model in eval mode, the statistics of its norms those of the images: so that every layer
    gets values of order one. Their scales and shifts are drawn around 1 and 0; those that end a
    residual branch around `BRANCH`, as in trained networks: with 1, rounding errors grow from block
    to block until float32 has no answer that two orders of summation agree on."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    ends = [part.bn3 for part in model.modules() if hasattr(part, "bn3")]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.normal_(0, 0.2, generator=generator)
        norm.momentum = 1.0  # the last batch alone
    for norm in ends:
        norm.weight.mul_(BRANCH)
    model.train()(images)
    for norm in norms:
        norm.momentum = 0.1
        norm.get_buffer("running_var").clamp_(min=LEAST)
    return model.eval()


def drawn(batch: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=generator)


def layers(model: nn.Module) -> dict[str, Layer]:
    """Its convolutions and linear layers, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def nonzeros(layer: Layer) -> int:
    """How many of its weights are not zero."""
    return int(torch.count_nonzero(layer.weight))


def resnet(sparsity: float, generator: torch.Generator, *, pruned: bool) -> nn.Module:
    """torchvision's ResNet-50 with all 54 weights sparse. pruned: by the masks of `dlmc`, which has
    three sparsities; else as many zeros in each layer, at random."""
    with torch.random.fork_rng(devices=[]):
        model = networks.torchvision().models.resnet50(weights=None)
    masks = dlmc.masks(sparsity) if pruned else {}
    for name, layer in layers(model).items():
        shape = layer.weight.shape
        mask = dlmc.shaped(masks[name], shape) if pruned else uniform(shape, sparsity, generator)
        weigh(layer, mask, generator)
    return settled(model, drawn(2, generator), generator)


class MobileNet(nn.Sequential):
    """MobileNetV1 at its full width, with ReLU6 (Howard et al., 2017)."""

    def __init__(self) -> None:
        parts, width = [*self.block(3, 32, 3, 2)], 32
        for outputs, stride in WIDTHS:
            parts += [*self.block(width, width, 3, stride, width), *self.block(width, outputs, 1)]
            width = outputs
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))

    @staticmethod
    def block(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        return convolution, nn.BatchNorm2d(outputs), nn.ReLU6()


def mobilenet(sparsity: float, generator: torch.Generator) -> nn.Module:
    """MobileNetV1 with sparse 1x1 convolutions; the first one, depthwise ones and the classifier
    are dense, as they are where such networks are pruned."""
    model = MobileNet()
    for layer in layers(model).values():
        sparse = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
        mask = uniform(layer.weight.shape, sparsity if sparse else 0.0, generator)
        weigh(layer, mask, generator)
    return settled(model, drawn(2, generator), generator)


class Projections(nn.Module):
    """The four projections of a BERT-base layer's attention, of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def feed_forward() -> nn.Module:
    """The feed-forward part of a BERT-base layer."""
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, INNER))


def sparse(make: Callable[[], nn.Module], sparsity: float, generator: torch.Generator) -> nn.Module:
    """A network whose linear layers all have so many zeros at random positions."""
    model = make().eval()
    for layer in layers(model).values():
        weigh(layer, uniform(layer.weight.shape, sparsity, generator), generator)
    return model


@dataclass(frozen=True, slots=True)
class Case:
    """A network and a size of input. rows: images, or tokens."""

    title: str
    sparsity: float
    rows: int
    unit: str
    make: Callable[[torch.Generator], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]

    def __str__(self) -> str:
        return f"{self.title}, {self.sparsity:.0%}, {self.unit} {self.rows}"


def tokens(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, HIDDEN, generator=generator)


def sequence(count: int, generator: torch.Generator) -> Tensor:
    return tokens(count, generator)[None]


def of_images(title: str, sparsity: float, make: Callable[[torch.Generator], nn.Module]) -> list[Case]:
    return [Case(title, sparsity, batch, "batch", make, drawn) for batch in (1, 16)]


def of_tokens(
    title: str,
    sparsity: float,
    make: Callable[[], nn.Module],
    inputs: Callable[[int, torch.Generator], Tensor] = sequence,
) -> list[Case]:
    build = partial(sparse, make, sparsity)
    return [Case(title, sparsity, count, "tokens", build, inputs) for count in (1, 16, 128)]


RESNET, RANDOM, MOBILENET, FORWARD, ATTENTION, LINEAR = (
    "ResNet-50, pruned",
    "ResNet-50, random masks",
    "MobileNetV1",
    "BERT-base feed-forward",
    "BERT-base projections",
    "Linear 768 to 3072",
)
KEYS = {
    "resnet50": RESNET,
    "resnet50-random": RANDOM,
    "mobilenet": MOBILENET,
    "feed-forward": FORWARD,
    "projections": ATTENTION,
    "linear": LINEAR,
}


def cases() -> list[Case]:
    """All settings, in the order of the tables."""
    all_cases = of_images(RANDOM, 0.7, partial(resnet, 0.7, pruned=False))
    for sparsity in dlmc.SPARSITIES:
        all_cases += of_images(RESNET, sparsity, partial(resnet, sparsity, pruned=True))
    all_cases += of_images(MOBILENET, 0.9, partial(mobilenet, 0.9))
    all_cases += of_tokens(FORWARD, 0.9, feed_forward)
    all_cases += of_tokens(ATTENTION, 0.9, Projections)
    for sparsity in (0.7, 0.8, 0.9, 0.95):
        all_cases += of_tokens(LINEAR, sparsity, linear, tokens)
    return all_cases
