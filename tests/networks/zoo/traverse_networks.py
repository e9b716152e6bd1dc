"""Networks on images that the benchmarks of traverse share: by name, seeded, in eval mode.

TAEF2 has its trained weights and the latent of a real photograph, from shared/data next to the
project; the others are laid out as their papers say, with random weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import networks

DATA = Path(__file__).parents[4] / "shared" / "data"
WEIGHTS, LATENT = DATA / "taef2_decoder.safetensors", DATA / "taef2_latent.safetensors"
SEED = 0
SAMPLE = 32  # positions a side of the input that random weights are scaled with


# --- TAESD and TAEF2: small decoders of latents ------------------------------------------------


class Clamp(nn.Module):
    """Values softly limited to -3 and 3."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Block(nn.Module):
    """Three convolutions with a skip; a branch normalised over the image before them, or none."""

    def __init__(self, width: int, *, pooled: bool):
        super().__init__()
        self.conv = nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width))
        self.pool = _normalised(width, 4 * width) if pooled else None

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return F.relu(self.conv(x) + x)


def _normalised(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, inner, 1, bias=False),
        nn.GroupNorm(4, inner),
        nn.ReLU(),
        nn.Conv2d(inner, width, 1, bias=False),
    )


def conv(inner: int, outer: int, size: int = 3, **more) -> nn.Conv2d:
    """A convolution that keeps the image's size."""
    return nn.Conv2d(inner, outer, size, padding=size // 2, **more)


def tiny_decoder(channels: int, *, pooled: bool) -> nn.Sequential:
    """A decoder of latents to pictures eight times as large, with the names of TAESD's weights.

    channels: of the latent; 4 and not pooled is TAESD, 32 and pooled is TAEF2.
    """
    stages: list[nn.Module] = [Clamp(), conv(channels, 64), nn.ReLU()]
    for k, blocks in enumerate((3, 3, 3, 1)):
        if k:
            stages += [nn.Upsample(scale_factor=2), conv(64, 64, bias=False)]
        stages += [Block(64, pooled=pooled and not k) for _ in range(blocks)]
    return nn.Sequential(*stages, conv(64, 3))


def taef2() -> nn.Module:
    """The decoder of latents (n, 32, h, w) to pictures (n, 3, 8 h, 8 w), trained, in float32."""
    model = tiny_decoder(32, pooled=True)
    model.load_state_dict(load_file(WEIGHTS), strict=True)
    return model.eval()


def latent(height: int, width: int) -> Tensor:
    """The latent of the photograph, (1, 32, height, width), beyond its size reflected as in a
    mirror again and again."""
    rows, columns = _places(height, width)
    return _photograph()[:, :, rows][:, :, :, columns].contiguous()


def write_latent(path: Path, height: int, width: int) -> None:
    """The same as a .npy file, written channel by channel: it may be larger than memory."""
    rows, columns = _places(height, width)
    latent = _photograph()
    shape = (1, latent.shape[1], height, width)
    file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for k in range(latent.shape[1]):
        file[0, k] = latent[0, k][rows][:, columns].numpy()
    file.flush()


def _photograph() -> Tensor:
    return load_file(LATENT)["latent"]


def _places(height: int, width: int) -> tuple[Tensor, Tensor]:
    shape = _photograph().shape
    return mirrored(shape[2], height), mirrored(shape[3], width)


def mirrored(length: int, count: int) -> Tensor:
    """Positions of `count` steps to and fro over `length` positions, neither end taken twice.

    >>> mirrored(3, 8).tolist()
    [0, 1, 2, 1, 0, 1, 2, 1]
    """
    place = torch.arange(count) % max(2 * (length - 1), 1)
    return torch.minimum(place, 2 * (length - 1) - place)


# --- Real-ESRGAN: pictures enlarged four times --------------------------------------------------


class Dense(nn.Module):
    """Five convolutions, each of all that came before."""

    def __init__(self, width: int = 64, growth: int = 32):
        super().__init__()
        self.convs = nn.ModuleList(conv(width + k * growth, growth if k < 4 else width) for k in range(5))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.convs[:-1]:
            values.append(F.leaky_relu(layer(torch.cat(values, 1)), 0.2))
        return self.convs[-1](torch.cat(values, 1)) * 0.2 + x


class DenseTriple(nn.Module):
    """A residual in residual dense block (Wang et al. 2018, ESRGAN)."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Dense(), Dense(), Dense())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * 0.2 + x


class RRDB(nn.Module):
    """ESRGAN's generator, as Real-ESRGAN's x4plus (23 blocks) and anime 6B (6) use it."""

    def __init__(self, blocks: int = 23):
        super().__init__()
        self.first, self.after = conv(3, 64), conv(64, 64)
        self.body = nn.Sequential(*(DenseTriple() for _ in range(blocks)))
        self.ups = nn.ModuleList([conv(64, 64), conv(64, 64)])
        self.late, self.last = conv(64, 64), conv(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.after(self.body(x))
        for layer in self.ups:
            x = F.leaky_relu(layer(F.interpolate(x, scale_factor=2.0)), 0.2)
        return self.last(F.leaky_relu(self.late(x), 0.2))


class SRVGG(nn.Module):
    """Real-ESRGAN's compact generator: convolutions at the input's size, then pixel shuffle."""

    def __init__(self, layers: int = 16, width: int = 64):
        super().__init__()
        body: list[nn.Module] = [conv(3, width), nn.PReLU(width)]
        for _ in range(layers):
            body += [conv(width, width), nn.PReLU(width)]
        self.body = nn.Sequential(*body, conv(width, 48))

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.body(x), 4) + F.interpolate(x, scale_factor=4.0)


# --- Stable Diffusion's autoencoder -------------------------------------------------------------


class Residual(nn.Module):
    """Two normalised convolutions with a skip."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inner, 1e-6), conv(inner, outer)
        self.norm2, self.conv2 = nn.GroupNorm(32, outer, 1e-6), conv(outer, outer)
        self.skip = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """One head over all positions of the image, with a skip."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(32, width, 1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2).unsqueeze(1)
        attended = F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))
        return x + self.out(attended).transpose(2, 3).reshape(x.shape)


class Half(nn.Module):
    """A strided convolution, padded after the last row and column alone."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


def _ending(width: int, outer: int) -> list[nn.Module]:
    return [nn.GroupNorm(32, width, 1e-6), nn.SiLU(), conv(width, outer)]


def _middle(width: int) -> list[nn.Module]:
    return [Residual(width, width), Attention(width), Residual(width, width)]


def sd_decoder(width: int = 128) -> nn.Sequential:
    """Laid out as Stable Diffusion's decoder, with 30 group norms. width: at the full size."""
    inner = 4 * width
    layers: list[nn.Module] = [conv(4, inner), *_middle(inner)]
    for k, outer in enumerate((4 * width, 4 * width, 2 * width, width)):
        layers += [Residual(inner, outer), Residual(outer, outer), Residual(outer, outer)]
        layers += [nn.Upsample(scale_factor=2), conv(outer, outer)] if k < 3 else []
        inner = outer
    return nn.Sequential(*layers, *_ending(width, 3))


def sd_encoder(width: int = 128) -> nn.Sequential:
    """Laid out as Stable Diffusion's encoder. width: at the full size."""
    inner = width
    layers: list[nn.Module] = [conv(3, width)]
    for k, outer in enumerate((width, 2 * width, 4 * width, 4 * width)):
        layers += [Residual(inner, outer), Residual(outer, outer)]
        layers += [Half(outer)] if k < 3 else []
        inner = outer
    return nn.Sequential(*layers, *_middle(inner), *_ending(inner, 8))


# --- other shapes of graphs ---------------------------------------------------------------------


class UNet(nn.Module):
    """Ronneberger et al. 2015, padded: pools on the way down, concatenated skips on the way up."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 512)):
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = _twice(3, widths[0])
        self.downs = nn.ModuleList(_twice(a, b) for a, b in pairs)
        self.grows = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.ups = nn.ModuleList(_twice(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for down in self.downs:
            values.append(down(F.max_pool2d(values[-1], 2)))
        x = values.pop()
        for grow, up in zip(self.grows, self.ups, strict=True):
            x = up(torch.cat([values.pop(), grow(x)], 1))
        return self.last(x)


def _twice(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(*_normed(inner, outer), *_normed(outer, outer))


def _normed(inner: int, outer: int) -> list[nn.Module]:
    return [conv(inner, outer, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]


class Excited(nn.Module):
    """MobileNetV3's block: wider, depthwise, weighted by what the full image holds, narrow."""

    def __init__(self, width: int, inner: int, size: int):
        super().__init__()
        self.wide = _hard(nn.Conv2d(width, inner, 1, bias=False))
        self.deep = _hard(conv(inner, inner, size, groups=inner, bias=False))
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(inner, inner // 4, 1),
            nn.ReLU(),
            nn.Conv2d(inner // 4, inner, 1),
            nn.Hardsigmoid(),
        )
        self.narrow = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.wide(x))
        return x + self.narrow(y * self.weigh(y))


def _hard(layer: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), nn.Hardswish())


def squeeze_excite(width: int = 16, inner: int = 64) -> nn.Sequential:
    """Six such blocks at the image's size: no more than two layers lie between global pools."""
    blocks = (Excited(width, inner, size) for size in (3, 3, 5, 5, 3, 3))
    return nn.Sequential(conv(3, width), nn.Hardswish(), *blocks, conv(width, 3))


class Grown(nn.Module):
    """DenseNet's layer: its input, and a few channels computed from it."""

    def __init__(self, inner: int, growth: int):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inner), conv(inner, growth, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


def dense_net(width: int = 32, growth: int = 16, layers: int = 6) -> nn.Sequential:
    """Two dense blocks (Huang et al. 2017), a pool between them; the result is half as large."""
    wide = width + layers * growth
    first, second = ([Grown(width + k * growth, growth) for k in range(layers)] for _ in range(2))
    between = [nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, width, 1), nn.AvgPool2d(2)]
    return nn.Sequential(conv(3, width), *first, *between, *second, nn.ReLU(), conv(wide, 3))


def separable(rounds: int = 12, width: int = 32) -> nn.Sequential:
    """Depthwise and pointwise convolutions in turns: as good as no arithmetic per byte."""
    layers: list[nn.Module] = []
    for _ in range(rounds):
        layers += [conv(width, width, groups=width), nn.ReLU6(), nn.Conv2d(width, width, 1)]
    return nn.Sequential(*layers)


def blurs(count: int = 20, channels: int = 3) -> nn.Sequential:
    """A chain of blurs: weights are positive and sum to 1."""
    generator = torch.Generator().manual_seed(SEED)
    model = nn.Sequential(*(conv(channels, channels, groups=channels, bias=False) for _ in range(count)))
    for layer in model:
        drawn = torch.rand(layer.weight.shape, generator=generator)
        layer.weight.data.copy_(drawn / drawn.sum((2, 3), keepdim=True))
    return model.eval()


class Gated(nn.Module):
    """Four calls without weights: what comes in, weighted by its neighbourhood."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x * torch.sigmoid(F.avg_pool2d(x, 3, 1, 1)))


# --- by name ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """How to make a network and its inputs.

    channels: of the input. step: its rows and columns are a multiple of it. grows: rows of the
    output per row of the input, where it has more.
    """

    make: Callable[[], nn.Module]
    channels: int = 3
    step: int = 1
    grows: int = 1
    trained: bool = False

    def inputs(self, size: int) -> tuple[Tensor]:
        """One image; size: the rows and the columns of the larger of input and output."""
        side = size // self.grows
        if side % self.step or size % self.grows:
            raise ValueError(f"expected a multiple of {self.step * self.grows}, got {size}")
        if self.trained:
            return (latent(side, side),)
        generator = torch.Generator().manual_seed(SEED)
        return (torch.rand(1, self.channels, side, side, generator=generator),)


def drawn(make: Callable[[], nn.Module], channels: int = 3, *, middle: float = 0.5) -> Callable[[], nn.Module]:
    """A maker of the same network with random weights; its outputs spread as those of pictures do,
    so that their 8-bit values can be compared. middle: of what its last convolution gives."""

    def maker() -> nn.Module:
        generator = torch.Generator().manual_seed(SEED)
        model = networks.randomised(make(), generator, gain=2.0)
        sample = torch.rand(1, channels, SAMPLE, SAMPLE, generator=generator)
        return _as_pictures(model, sample, middle)

    return maker


@torch.no_grad()
def _as_pictures(model: nn.Module, sample: Tensor, middle: float) -> nn.Module:
    last = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)][-1]
    y = model(sample)
    scale = 0.2 / y.std()
    last.weight.mul_(scale)
    if last.bias is not None:
        last.bias.mul_(scale).add_(middle - scale * y.mean())
    return model


def resnet18() -> nn.Module:
    """Torchvision's classifier with random weights; an image of any size gives 1,000 logits."""
    return networks.built("resnet18", torch.Generator().manual_seed(SEED))


NETWORKS: Mapping[str, Network] = {
    "TAEF2": Network(taef2, 32, grows=8, trained=True),
    "TAESD": Network(drawn(lambda: tiny_decoder(4, pooled=False), 4), 4, grows=8),
    "RRDB-23": Network(drawn(RRDB), grows=4),
    "RRDB-6": Network(drawn(lambda: RRDB(6)), grows=4),
    "SRVGG-16": Network(drawn(SRVGG, middle=0.0), grows=4),
    "SD decoder": Network(drawn(sd_decoder, 4), 4, grows=8),
    "SD encoder": Network(drawn(sd_encoder), step=8),
    "U-Net": Network(drawn(UNet), step=16),
    "squeeze-excite": Network(drawn(squeeze_excite)),
    "dense": Network(drawn(dense_net), step=2),
    "ResNet-18": Network(resnet18),
    "dw12": Network(drawn(separable, 32), 32),
    "blur20": Network(blurs),
    "pool20": Network(lambda: nn.Sequential(*(Gated() for _ in range(5))).eval(), 16),
}


def named(names: Iterable[str]) -> dict[str, Network]:
    """Those networks; SystemExit naming what there is, or what TAEF2 needs."""
    names = list(names)
    unknown = sorted(set(names) - set(NETWORKS))
    if unknown:
        raise SystemExit(f"expected some of {', '.join(NETWORKS)}; got {', '.join(unknown)}")
    if "TAEF2" in names and not WEIGHTS.exists():
        raise SystemExit("TAEF2's weights are expected in shared/data next to the project")
    return {name: NETWORKS[name] for name in names}
