"""What random networks of images are made of: how each kind of call is drawn, and how it runs.

A kind is drawn for a value, and gives its arguments, or None where it does not go with the value.
All but those marked `smooth` keep integers whole (or halves of them). Spatial axes are those
behind the second: one of sequences, two of images, three of volumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """draw: (network, values, index) -> arguments. run: (network, x, values, *arguments) -> value.
    often: how much more often than others. rank: of the only values that it takes, if not all."""

    draw: Callable[..., tuple | None]
    run: Callable[..., Tensor]
    often: int = 1
    smooth: bool = False
    rank: int | None = None


def spatial(x: Tensor) -> int:
    return x.ndim - 2


def channels_last(x: Tensor) -> Tensor:
    return x.permute(0, *range(2, x.ndim), 1)


def channels_first(x: Tensor) -> Tensor:
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))


def plain(*_: Any) -> tuple:
    return ()


def of(call: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """A call of one value and nothing else."""
    return lambda net, x, values: call(x)


# --- windows --------------------------------------------------------------------------------------


def draw_conv(net, values, at) -> tuple:
    pick, c = net.draw.choice, values[at].shape[1]
    groups = pick([1, 1, c, *[g for g in (2, 4) if c % g == 0]])
    out = groups * net.draw.randint(1, max(1, 8 // groups))
    axes = [
        [pick(row[k > 0]) for k in range(spatial(values[at]))]
        for row in (((1, 2, 3, 3, 5, 7), (1, 3, 3, 4)), ((1, 1, 1, 2, 3, 4), (1, 1, 2)), ((1, 1, 2, 3), (1, 1, 2)))
    ]
    kernel, stride, dilation = axes
    padding = [net.draw.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)]
    bias = net.weight((out,)) if net.draw.random() < 0.5 else None
    return net.weight((out, c // groups, *kernel)), bias, stride, padding, dilation, groups


def conv(net, x, values, weight, bias, *geometry) -> Tensor:
    call = (F.conv1d, F.conv2d, F.conv3d)[spatial(x) - 1]
    return call(x, net.weights[weight], None if bias is None else net.weights[bias], *geometry)


def draw_residual(net, values, at) -> tuple:
    """The sum of two convolutions, one of them a shortcut, as it is or below an activation."""
    width, inner, rank = net.draw.randint(1, 8), values[at].shape[1], spatial(values[at])
    weights = net.weight((width, inner, *[3] * rank)), net.weight((width, inner, *[1] * rank))
    return *weights, net.draw.choice(["relu", "none", "other first"])


def residual(net, x, values, long, short, how) -> Tensor:
    y, shortcut = conv(net, x, values, long, None, 1, 1), conv(net, x, values, short, None)
    y = shortcut + y if how == "other first" else y + shortcut
    return F.relu(y) if how == "relu" else y


def draw_causal(net, values, at) -> tuple:
    """Of frames, each with earlier ones: before the first are zeros or copies of it."""
    before = net.draw.randint(1, 3)
    weight = net.weight((net.draw.randint(1, 8), values[at].shape[1], before + 1, 3, 1))
    return weight, before, net.draw.choice(["zeros", "first", "first apart"])


def causal(net, x, values, weight, before, how) -> Tensor:
    if how == "zeros":
        y = F.pad(x, (0, 0, 1, 1, before, 0))
        return conv(net, y, values, weight, None)
    if how == "first apart":  # which others follow twice, as where frames become two
        x = torch.cat([x[:, :, :1], F.interpolate(x[:, :, 1:], scale_factor=(2, 1, 1))], 2)
    y = torch.cat([*[x[:, :, :1]] * before, x], 2)
    return conv(net, y, values, weight, None, 1, (0, 1, 0))


def draw_padded(net, values, at) -> tuple:
    """As convolutions with a padding mode."""
    mode = net.draw.choice(["reflect", "replicate", "circular"])
    weight, rank = values[at].shape[1], spatial(values[at])
    return mode, net.weight((3, weight, *[3] * rank)), net.draw.choice([1, 2])


def padded(net, x, values, mode, weight, stride) -> Tensor:
    x = F.pad(x, [1] * (2 * spatial(x)), mode=mode)
    return conv(net, x, values, weight, None, stride)


def draw_transposed(net, values, at) -> tuple:
    kernel = (net.draw.randint(1, 5), net.draw.randint(1, 3))
    stride = (3, net.draw.choice([1, 2]))
    padding = tuple(net.draw.randint(0, k // 2) for k in kernel)
    extra = tuple(net.draw.randint(0, s - 1) for s in stride)
    return net.weight((values[at].shape[1], 4, *kernel)), stride, padding, extra


def transposed(net, x, values, weight, *geometry) -> Tensor:
    return F.conv_transpose2d(x, net.weights[weight], None, *geometry)


def draw_max(net, values, at) -> tuple:
    kernel = net.draw.choice([2, 3])
    return (kernel, net.draw.choice([1, 2, 3]), net.draw.randint(0, kernel // 2), 1, net.draw.random() < 0.5)


def maximum(net, x, values, *geometry) -> Tensor:
    return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial(x) - 1](x, *geometry)


def draw_avg(net, values, at) -> tuple:
    stride = net.draw.choice([1, 2])
    if net.exact:  # windows of two, four or eight, which divide exactly
        return 2, stride, 0, False, True
    return 3, stride, net.draw.choice([0, 1]), net.draw.random() < 0.5, net.draw.random() < 0.5


def average(net, x, values, *geometry) -> Tensor:
    return (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[spatial(x) - 1](x, *geometry)


def draw_adaptive(net, values, at) -> tuple:
    most = [max(2, n // 2) for n in values[at].shape[2:]]
    return ([net.draw.randint(2, n) for n in most], not net.exact and net.draw.random() < 0.7)


def adaptive(net, x, values, size, mean) -> Tensor:
    calls = (
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
        if mean
        else (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)
    )
    return calls[spatial(x) - 1](x, size)


def draw_unfold(net, values, at) -> tuple:
    return (net.weight((3, 9 * values[at].shape[1], 1, 1)),)


def unfold(net, x, values, weight) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return F.conv2d(columns.view(*columns.shape[:2], *x.shape[2:]), net.weights[weight])


# --- where positions come from --------------------------------------------------------------------


def draw_pad(net, values, at) -> tuple:
    sides = [net.draw.randint(0, 3) for _ in range(2 * spatial(values[at]))]
    return sides, net.draw.choice(["constant", "reflect", "replicate", "circular"])


def draw_slice(net, values, at) -> tuple:
    return net.draw.randint(0, 3), net.draw.choice([1, 1, 2, 3])


def draw_roll(net, values, at) -> tuple:
    return net.draw.randint(1, 4), net.draw.randint(2, values[at].ndim - 1)


def draw_up(net, values, at) -> tuple:
    return (net.draw.choice([2, 2, 3, 1.5, 0.7]),)


def draw_bilinear(net, values, at) -> tuple:
    mode = net.draw.choice(["bilinear", "bilinear", "bicubic"])
    return net.draw.choice([2, 1.7, 0.6, 3]), mode, net.draw.random() < 0.5


def draw_shuffle(net, values, at) -> tuple | None:
    return () if values[at].shape[1] % 4 == 0 else None


def unshuffle(x: Tensor) -> Tensor:
    return F.pixel_unshuffle(x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2], 2)


# --- channels -------------------------------------------------------------------------------------


def alike(net, values, at, first: int) -> tuple:
    """Another value of the same shape from axis `first` on."""
    shape = values[at].shape[first:]
    return (net.draw.choice([k for k, v in enumerate(values) if v.shape[first:] == shape]),)


def halves(net, values, at) -> tuple | None:
    return (net.draw.choice(["chunk", "split"]),) if values[at].shape[1] % 2 == 0 else None


def halved(net, x, values, how) -> Tensor:
    a, b = x.chunk(2, 1) if how == "chunk" else x.split(x.shape[1] // 2, 1)
    return torch.cat([b, torch.maximum(a, b)], 1)


def draw_mixed(net, values, at) -> tuple:
    return net.weight((4, values[at].shape[1])), net.draw.choice(["einsum", "matmul", "linear"])


def mixed(net, x, values, weight, how) -> Tensor:
    w = net.weights[weight]
    if how == "einsum":
        return torch.einsum("nc...,oc->no...", x, w)
    rows = channels_last(x)
    return channels_first(rows @ w.T if how == "matmul" else F.linear(rows, w))


def draw_affine(net, values, at) -> tuple:
    c, ones = values[at].shape[1], [1] * spatial(values[at])
    return net.weight((c, *ones)), net.weight((1, c, *ones))


def draw_map(net, values, at) -> tuple:
    return (net.weight((1, 1, *values[at].shape[2:])),)


def draw_slopes(net, values, at) -> tuple:
    return (net.weight((values[at].shape[1],)),)


# --- over all positions ---------------------------------------------------------------------------


def every(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def draw_group(net, values, at) -> tuple:
    c = values[at].shape[1]
    return net.draw.choice([g for g in (1, 2, 3, 4) if c % g == 0]), net.weight((c,)), net.weight((c,))


def draw_gate(net, values, at) -> tuple:
    c = values[at].shape[1]
    return (net.weight((c, c, *[1] * spatial(values[at]))),)


def gate(net, x, values, weight) -> Tensor:
    return x * torch.sigmoid(conv(net, x.mean(every(x), keepdim=True), values, weight, None))


def draw_attention(net, values, at) -> tuple | None:
    if values[at][0, 0].numel() > 600:
        return None
    return net.draw.choice(["fused", "spelled"]), net.weight((values[at].shape[1], 4))


def attention(net, x, values, how, weight) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    query, key = tokens @ net.weights[weight], (tokens * 0.1) @ net.weights[weight]
    if how == "fused":
        found = F.scaled_dot_product_attention(query.unsqueeze(1), key.unsqueeze(1), tokens.unsqueeze(1)).squeeze(1)
    else:
        found = torch.softmax(query @ key.transpose(1, 2), -1) @ tokens
    return found.transpose(1, 2).reshape(x.shape)


def axial(x: Tensor) -> Tensor:
    """Attention along the last axis: each row for itself."""
    rows = channels_last(x)
    return channels_first(F.scaled_dot_product_attention(rows, rows * 0.1, rows))


def norm_channels(x: Tensor) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(every(x), keepdim=True) + x.amax(every(x), keepdim=True)


KINDS = {
    "conv": Kind(draw_conv, conv, often=7),
    "residual": Kind(draw_residual, residual, often=2),
    "causal": Kind(draw_causal, causal, often=4, rank=5),
    "padded": Kind(draw_padded, padded),
    "transposed": Kind(draw_transposed, transposed, rank=4),
    "max": Kind(draw_max, maximum),
    "avg": Kind(draw_avg, average),
    "adaptive": Kind(draw_adaptive, adaptive),
    "unfold": Kind(draw_unfold, unfold, rank=4),
    "pad": Kind(draw_pad, lambda net, x, values, sides, mode: F.pad(x, sides, mode=mode)),
    "slice": Kind(
        draw_slice, lambda net, x, values, start, step: x[:, :, start::step].narrow(-1, 0, x.shape[-1] - start)
    ),
    "roll": Kind(draw_roll, lambda net, x, values, by, axis: x.roll(by, axis)),
    "flip": Kind(plain, of(lambda x: x.flip(2))),
    "turn": Kind(plain, of(lambda x: x.transpose(2, 3)), rank=4),
    "up": Kind(draw_up, lambda net, x, values, scale: F.interpolate(x, scale_factor=scale)),
    "bilinear": Kind(
        draw_bilinear,
        lambda net, x, values, scale, mode, align: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=align),
        smooth=True,
        rank=4,
    ),
    "shuffle": Kind(draw_shuffle, of(lambda x: F.pixel_shuffle(x, 2)), rank=4),
    "unshuffle": Kind(plain, of(unshuffle), rank=4),
    "relu": Kind(plain, of(F.relu)),
    "clamp": Kind(plain, of(lambda x: torch.where(x > 0, x.clamp(max=9), -x))),
    "prelu": Kind(draw_slopes, lambda net, x, values, w: F.prelu(x, net.weights[w])),
    "cat": Kind(lambda *a: alike(*a, 2), lambda net, x, values, k: torch.cat([x, values[k]], 1)),
    "add": Kind(lambda *a: alike(*a, 1), lambda net, x, values, k: x + values[k], often=2),
    "spread": Kind(lambda *a: alike(*a, 2), lambda net, x, values, k: x + values[k][:, :1]),
    "halves": Kind(halves, halved),
    "mixed": Kind(draw_mixed, mixed),
    "affine": Kind(draw_affine, lambda net, x, values, a, b: x * net.weights[a] + net.weights[b]),
    "map": Kind(draw_map, lambda net, x, values, w: x + net.weights[w]),
    "profile": Kind(plain, of(lambda x: x + x.amax(-1, keepdim=True))),
    "cumsum": Kind(plain, of(lambda x: x.cumsum(1))),
    "down": Kind(plain, of(lambda x: x.cumsum(2))),
    "group": Kind(
        draw_group,
        lambda net, x, values, groups, w, b: F.group_norm(x, groups, net.weights[w], net.weights[b]),
        smooth=True,
    ),
    "instance": Kind(plain, of(F.instance_norm), smooth=True),
    "layer": Kind(plain, of(lambda x: F.layer_norm(x, x.shape[1:])), smooth=True),
    "channels": Kind(plain, of(norm_channels), smooth=True),
    "gate": Kind(draw_gate, gate, smooth=True),
    "softmax": Kind(plain, of(lambda x: x.flatten(2).softmax(-1).view(x.shape)), smooth=True),
    "mean": Kind(plain, of(centred), smooth=True),
    "attention": Kind(draw_attention, attention, smooth=True),
    "axial": Kind(plain, of(axial), smooth=True, rank=4),
}
