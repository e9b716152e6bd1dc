"""The demo's subject: a small residual network that reads handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from demask.errors import BadInput
from demask.installation import install_command

SIDE = 16  # pixels; the bundled scans are 8 x 8
BATCH = 64


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (n, 1, SIDE, SIDE) in 0..1 and labels (n,), to train with and, never seen, to test."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(test_share: float = 0.3, seed: int = 0) -> Digits:
    """scikit-learn's 1,797 bundled scans (no download), enlarged to SIDE x SIDE.

    Raises BadInput where scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(
            f"the demo needs scikit-learn's handwritten digits, but scikit-learn cannot be "
            f"imported ({error}); run: {install_command('demo')}"
        ) from error
    scans, digits = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(scans, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images = functional.interpolate(images, size=SIDE, mode="bilinear")
    labels = torch.as_tensor(digits, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([int(test_share * len(labels))])
    return Digits(images[train], labels[train], images[test], labels[test])


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions added onto what came in (projected where the shape changes)."""

    def __init__(self, channels: int, out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.project = None if (channels, stride) == (out, 1) else projection(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + (x if self.project is None else self.project(x)))


def projection(channels: int, out: int, stride: int) -> nn.Sequential:
    """The 1 x 1 convolution and batch norm that carry a residual across a change of shape."""
    conv = nn.Conv2d(channels, out, 1, stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class DigitNet(nn.Module):
    """A residual network for (n, 1, SIDE, SIDE) images: a stem, two stages, ten logits."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width), ResidualBlock(width, 2 * width, stride=2), ResidualBlock(2 * width, 2 * width)
        )
        self.classify = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.bn(self.stem(images))))
        return self.classify(x.mean((2, 3)))


def batches(count: int, epochs: int, seed: int) -> list[Tensor]:
    """Shuffled indices of `count` images, BATCH at a time, `epochs` times over; tails dropped."""
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(count, generator=random) for _ in range(epochs)]
    return [part for order in orders for part in order.split(BATCH) if len(part) == BATCH]


def train(
    model: nn.Module, digits: Digits, epochs: int, tick: Callable[[], None], *, rate: float = 3e-3, seed: int = 0
) -> None:
    """Train `model` in place with AdamW on a one-cycle rate; masks of pruning stay active.

    tick: called once per batch. The model is left in eval mode.
    """
    plan = batches(len(digits.train_labels), epochs, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(plan))
    model.train()
    for part in plan:
        loss = functional.cross_entropy(model(digits.train_images[part]), digits.train_labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tick()
    model.eval()


def prune_channels(model: nn.Module, amount: float = 0.5) -> None:
    """Mask the weakest `amount` of every convolution's output channels, in place, by 2-norm.

    Each convolution is pruned alone, so the two sides of a residual add lose different channels,
    and the batch norms after them keep their shifts: a masked channel becomes a constant, not zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            prune.ln_structured(module, "weight", amount=amount, n=2, dim=0)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of test images that `model` reads right."""
    with torch.inference_mode():
        guesses = torch.cat([model(part).argmax(1) for part in digits.test_images.split(256)])
    return (guesses == digits.test_labels).float().mean().item()
