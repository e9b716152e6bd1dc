"""The trained ResNet-20 for CIFAR-10, and the JPEG images, of shared/data next to the project."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

DATA = Path(__file__).parents[2] / "shared" / "data"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # the weights' authors'


class Block(nn.Module):
    """Two 3 x 3 convolutions added onto a shortcut without parameters (option A of He et al.)."""

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


class ResNet20(nn.Module):
    """He et al. 2015, section 4.2: 16, 32 and 64 channels, three blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        channels = 16
        for stage, out in enumerate((16, 32, 64), 1):
            strides = (1 if stage == 1 else 2, 1, 1)
            blocks = [Block(channels if k == 0 else out, out, s) for k, s in enumerate(strides)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            channels = out
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def pretrained() -> ResNet20:
    """The network with its published weights; FileNotFoundError without shared/data."""
    model = ResNet20()
    model.load_state_dict(load_file(DATA / "cifar_resnet20.safetensors"), strict=False)
    return model.to(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True)
class Images:
    """uint8 (n, 3, 32, 32), and int64 (n,)."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def read(cls, name: str, most: int | None) -> Images:
        """The images of a zip, or every n-th so that there are at most `most`; decoded once, into
        one tensor."""
        with zipfile.ZipFile(DATA / name) as archive:
            names = sorted(n for n in archive.namelist() if n.endswith(".jpg"))
            names = names[:: max(len(names) // (most or len(names)), 1)]
            classes = sorted({n.partition("/")[0] for n in names})
            pixels = [np.asarray(Image.open(io.BytesIO(archive.read(n)))) for n in names]
        labels = [classes.index(n.partition("/")[0]) for n in names]
        return cls(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels))

    def to(self, device: str) -> Images:
        """The images on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


def normalized(pixels: Tensor) -> Tensor:
    """float32, channels last."""
    mean_, deviation = (torch.tensor(v, device=pixels.device).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
    x = (pixels.float() / 255 - mean_) / deviation
    return x.to(memory_format=torch.channels_last)


def accuracy(model: nn.Module, test: Images) -> float:
    """Percent of the test images, on the device of the model, that are classified right."""
    model.eval()
    with torch.inference_mode():
        right = sum(
            (model(normalized(x)).argmax(1) == y).sum().item()
            for x, y in zip(test.pixels.split(500), test.labels.split(500), strict=True)
        )
    return 100 * right / len(test.labels)
