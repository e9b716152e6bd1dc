"""The CIFAR ResNets: trained ones, masked ones, and ones built by hand at the widths that are left.

He et al. 2015, "Deep residual learning for image recognition", section 4.2, with option-A
shortcuts: where a stage widens, every second row and column, and zeros for the new channels on both
sides. The weights, and the images as JPEG, are in `shared/data` next to the project; its
README names sources.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

DATA = Path(__file__).parents[4] / "shared" / "data"
IMAGE = (3, 32, 32)
# Of the training images, as the weights' authors normalised them.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two 3 x 3 convolutions added onto a shortcut, which is padded with zeros where it widens."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.more = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return F.relu(x + y)


class ResNet(nn.Module):
    """`depth` = 6 n + 2 layers: a convolution, 3 stages of n blocks, a linear layer."""

    def __init__(self, depth: int, width: int = 16, classes: int = 10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels = width
        for stage in range(3):
            blocks = []
            for k in range((depth - 2) // 6):
                out, stride = width << stage, 2 if stage and not k else 1
                blocks.append(Block(channels, out, stride))
                channels = out
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.linear = nn.Linear(channels, classes)

    def stages(self) -> list[nn.Sequential]:
        return [self.layer1, self.layer2, self.layer3]

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        for stage in self.stages():
            x = stage(x)
        return self.linear(x.mean((2, 3)))


def trained(depth: int) -> ResNet:
    """ResNet-20 or -56 with its trained weights, in eval mode; FileNotFoundError without them."""
    model = ResNet(depth)
    absent, unknown = model.load_state_dict(load_file(DATA / f"cifar_resnet{depth}.safetensors"), strict=False)
    if unknown or any(not name.endswith("num_batches_tracked") for name in absent):
        raise ValueError(f"the weights have other names: no {absent[:3]}, but {unknown[:3]}")
    return model.eval()


def images(count: int, file: str = "cifar10_test_jpeg.zip") -> tuple[Tensor, Tensor]:
    """Test images, (count, 3, 32, 32) float32 and normalised, with their classes, (count,) int64;
    every class comes equally often. FileNotFoundError without the file."""
    with zipfile.ZipFile(DATA / file) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
        kinds = sorted({name.partition("/")[0] for name in names})
        each = len(names) // len(kinds)
        chosen = [names[k % len(kinds) * each + k // len(kinds)] for k in range(count)]
        pixels = [np.array(Image.open(io.BytesIO(archive.read(name)))) for name in chosen]
    values = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, DEVIATION))
    labels = torch.tensor([kinds.index(name.partition("/")[0]) for name in chosen])
    return (values - mean) / deviation, labels


@torch.no_grad()
def masked(model: ResNet, generator: torch.Generator, *, shifts: bool) -> ResNet:
    """The model with half of each convolution's output channels zeroed, in place, a draw per layer.

    shifts: keep the batch norms as they are, so that a masked channel is a constant. Else their
    scale and shift are zeroed too, and a masked channel is 0.
    """
    layers = dict(model.named_modules())
    for name, layer in layers.items():
        if isinstance(layer, nn.Conv2d):
            order = torch.randperm(layer.out_channels, generator=generator)
            gone = order[: layer.out_channels // 2]
            layer.weight[gone] = 0
            if not shifts:
                norm = layers[name.replace("conv", "bn")]
                norm.weight[gone] = norm.bias[gone] = 0
    return model


class HandBlock(nn.Module):
    """A block as one would write it for its widths: the branch added at its channels."""

    def __init__(self, block: Block, stream: list[int]):
        super().__init__()
        middle, ends = live(block.conv1), live(block.conv2)
        if block.more:
            stream = [c + block.more // 2 for c in stream]
        self.conv1, self.bn1 = cut(block.conv1, block.bn1, middle, _before(block, stream))
        self.conv2, self.bn2 = cut(block.conv2, block.bn2, ends, middle)
        self.stream = stream + [c for c in ends if c not in stream]
        self.new, self.stride = len(self.stream) - len(stream), block.stride
        self.register_buffer("index", torch.tensor([self.stream.index(c) for c in ends]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new))
        return F.relu(x.index_add(1, self.index, y))


class HandResNet(nn.Module):
    """The network someone would build for the channels a mask leaves: the same convolutions and
    batch norms at the remaining widths, joins by slices and index_add with constant indices.

    Equal to the masked network where shifts are zeroed; else it lacks what constants give, and is
    the same work but for that.
    """

    def __init__(self, model: ResNet):
        super().__init__()
        stream = live(model.conv1)
        self.conv1, self.bn1 = cut(model.conv1, model.bn1, stream, [0, 1, 2])
        for number, stage in enumerate(model.stages(), 1):
            blocks = []
            for block in stage:
                blocks.append(HandBlock(block, stream))
                stream = blocks[-1].stream
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.linear = nn.Linear(len(stream), model.linear.out_features)
        with torch.no_grad():
            self.linear.weight.copy_(model.linear.weight[:, stream])
            self.linear.bias.copy_(model.linear.bias)
        self.to(model.linear.weight.dtype).eval()

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def live(layer: nn.Conv2d) -> list[int]:
    """The output channels that have a weight other than 0."""
    return (layer.weight.flatten(1) != 0).any(1).nonzero().flatten().tolist()


def _before(block: Block, stream: list[int]) -> list[int]:
    """Stream positions as the channels that the block's first convolution reads."""
    return [c - block.more // 2 for c in stream] if block.more else stream


@torch.no_grad()
def cut(conv: nn.Conv2d, norm: nn.BatchNorm2d, rows: list[int], columns: list[int]):
    """A convolution and its batch norm at these output and input channels."""
    small = nn.Conv2d(len(columns), len(rows), 3, conv.stride, 1, bias=False)
    small.weight.copy_(conv.weight[rows][:, columns])
    after = nn.BatchNorm2d(len(rows), eps=norm.eps)
    for name, value in norm.state_dict().items():
        after.state_dict()[name].copy_(value[rows] if value.ndim else value)
    return small, after
