"""Training of an image classifier, step by step, so that it can be pruned in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demask.cli.pruning.curves import Curves
from demask.cli.pruning.images import ImageData, LabelledImages
from demask.progress import ProgressStep

TEST_BATCH = 256
EVALUATIONS = 12  # per phase, besides those at its ends
MARGIN = 4  # pixels by which augmented images are shifted at most
WARM_UP = 0.1  # of the steps: the learning rate rises
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """batch: images per step. rate: the highest learning rate. normalize: "data", "imagenet" or
    "none". augment: mirror and shift training images. seed: of the order of images."""

    batch: int = 64
    rate: float = 3e-3
    normalize: str = "data"
    augment: bool = False
    seed: int = 0


class Training:
    """A network in training. `network` may be replaced by a smaller one between steps, when the
    optimizer was carried over."""

    def __init__(self, network: nn.Module, data: ImageData, options: TrainingOptions, progress: ProgressStep):
        self.network, self.data, self.options = network, data, options
        self.curves = Curves()
        self.optimizer: Any = None
        self._schedule: Any = None
        self._progress = progress
        self._every = 1  # steps between evaluations
        self._mean, self._deviation = _statistics(data.train, options.normalize)
        self._random = torch.Generator().manual_seed(options.seed)
        self._order = self._batches()

    def steps(self, epochs: float) -> int:
        """Steps of so many passes over the training images; the last, smaller batch is dropped."""
        return round(epochs * max(len(self.data.train) // self.options.batch, 1))

    def start(self, steps: int, rate: float) -> None:
        """Start a phase of so many steps: AdamW, a rate that rises to `rate` and falls to 0."""
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rate, total_steps=max(steps, 1), pct_start=WARM_UP
        )
        self._every = max(steps // EVALUATIONS, 1)

    def run(self, steps: int, title: str) -> None:
        """Train so many steps. The network is left in eval mode, with its last gradients."""
        self.network.train()
        for _ in range(steps):
            part = self.data.train.rows(next(self._order))
            loss = F.cross_entropy(self.network(self._images(part.images, True)), part.labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self._schedule.step()
            self.curves.losses.append((self.curves.step + 1, loss.item()))
            self._progress(title)
            if self.curves.step % self._every == 0:
                self.evaluate()
                self.network.train()
        self.network.eval()

    def evaluate(self) -> float:
        """The accuracy on the test images, 0 to 1, noted in the curves. Leaves eval mode."""
        accuracy = self.accuracy(self.network.eval())
        self.curves.accuracies.append((self.curves.step, accuracy))
        return accuracy

    def accuracy(self, network: nn.Module) -> float:
        """The share of test images that a network in eval mode classifies right."""
        test = self.data.test
        with torch.no_grad():
            right = sum(
                (network(self._images(images, False)).argmax(1) == labels).sum().item()
                for images, labels in zip(test.images.split(TEST_BATCH), test.labels.split(TEST_BATCH), strict=True)
            )
        return right / len(test)

    def example(self, count: int) -> Tensor:
        """The first test images, as the network takes them."""
        return self._images(self.data.test.images[:count], False)

    def _batches(self) -> Iterator[Tensor]:
        count, batch = len(self.data.train), self.options.batch
        while True:
            order = torch.randperm(count, generator=self._random)
            parts = [part for part in order.split(batch) if len(part) == batch]
            yield from parts or [order]

    def _images(self, images: Tensor, train: bool) -> Tensor:
        x = (images.float() / 255 - self._mean) / self._deviation
        return _augmented(x, self._random) if train and self.options.augment else x


def _statistics(images: LabelledImages, normalize: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, (1, channels, 1, 1)."""
    channels = images.images.shape[1]
    if normalize == "imagenet" and channels == 3:
        mean, deviation = map(torch.tensor, IMAGENET)
    elif normalize == "data":
        values = images.images[:10_000].transpose(0, 1).flatten(1).float() / 255
        mean, deviation = values.mean(1), values.std(1).clamp(min=1e-3)
    else:
        mean, deviation = torch.zeros(channels), torch.ones(channels)
    return mean.view(1, -1, 1, 1), deviation.view(1, -1, 1, 1)


def _augmented(x: Tensor, random: torch.Generator) -> Tensor:
    """Half of the images mirrored, and all shifted by up to MARGIN pixels, zeros moving in."""
    n, _, height, width = x.shape
    mirrored = torch.rand(n, 1, 1, 1, generator=random) < 0.5
    padded = F.pad(torch.where(mirrored, x.flip(3), x), [MARGIN] * 4)
    down, right = torch.randint(2 * MARGIN + 1, (2, n), generator=random)
    rows = (down.view(-1, 1) + torch.arange(height)).view(n, 1, height, 1)
    columns = (right.view(-1, 1) + torch.arange(width)).view(n, 1, 1, width)
    first, channel = torch.arange(n).view(n, 1, 1, 1), torch.arange(x.shape[1]).view(1, -1, 1, 1)
    return padded[first, channel, rows, columns]
