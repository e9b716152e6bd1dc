"""Causal decoders of videos with random weights, laid out as those of Wan 2.1 and CogVideoX.

Latents (1, c, t, h, w) become videos (1, 3, 4 (t - 1) + 1, 8 h, 8 w): a frame depends on its own
latent frame and earlier ones. The layers, their names and order are those of diffusers' classes
AutoencoderKLWan (Wan Team 2025, arXiv 2503.20314) and AutoencoderKLCogVideoX (Yang et al. 2024,
arXiv 2408.06072), so that weights can be exchanged. Those classes decode a few frames per call and
pass the last frames of each layer to the next call; here all frames are one call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConv(nn.Conv3d):
    """A convolution of frames with earlier ones, which are zeros before the first frame."""

    def __init__(self, inner: int, outer: int, size: tuple[int, int, int] | int = 3):
        super().__init__(inner, outer, size)
        t, h, w = (n // 2 for n in self.kernel_size)
        self.before = (w, w, h, h, 2 * t, 0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.before))


# --- Wan 2.1: norms over channels, attention in each frame ---------------------------------------


class ChannelNorm(nn.Module):
    """Channels of each position divided by their root of squares."""

    def __init__(self, width: int, axes: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, *[1] * axes))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma


class WanResidual(nn.Module):
    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.conv1 = ChannelNorm(inner, 3), CausalConv(inner, outer)
        self.norm2, self.conv2 = ChannelNorm(outer, 3), CausalConv(outer, outer)
        self.conv_shortcut = nn.Identity() if inner == outer else CausalConv(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(y))) + self.conv_shortcut(x)


def frames(x: Tensor) -> Tensor:
    """The frames of videos as images: (b, c, t, h, w) -> (b t, c, h, w)."""
    b, c, t, h, w = x.shape
    return x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w)


def video(x: Tensor, batch: int) -> Tensor:
    """Images as the frames of videos: (b t, c, h, w) -> (b, c, t, h, w)."""
    return x.view(batch, x.shape[0] // batch, *x.shape[1:]).permute(0, 2, 1, 3, 4)


class FrameAttention(nn.Module):
    """Attention of one head over the positions of each frame."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = ChannelNorm(width, 2)
        self.to_qkv, self.proj = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        images = frames(x)
        n, c, h, w = images.shape
        qkv = self.to_qkv(self.norm(images)).reshape(n, 1, 3 * c, h * w).permute(0, 1, 3, 2)
        y = F.scaled_dot_product_attention(*qkv.contiguous().chunk(3, dim=-1))
        y = self.proj(y.squeeze(1).permute(0, 2, 1).reshape(n, c, h, w))
        return video(y, x.shape[0]) + x


class WanUpsample(nn.Module):
    """Frames twice as high and wide; in time, two frames of each but the first."""

    def __init__(self, width: int, *, in_time: bool):
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"), nn.Conv2d(width, width // 2, 3, padding=1)
        )
        self.time_conv = CausalConv(width, 2 * width, (3, 1, 1)) if in_time else None

    def forward(self, x: Tensor) -> Tensor:
        if self.time_conv is not None:
            b, c, t, h, w = x.shape
            pairs = self.time_conv(x[:, :, 1:]).reshape(b, 2, c, t - 1, h, w)
            later = torch.stack((pairs[:, 0], pairs[:, 1]), 3).reshape(b, c, 2 * (t - 1), h, w)
            x = torch.cat([x[:, :, :1], later], 2)
        return video(self.resample(frames(x)), x.shape[0])


class WanMiddle(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.resnets = nn.ModuleList(WanResidual(width, width) for _ in range(2))
        self.attentions = nn.ModuleList([FrameAttention(width)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class WanUp(nn.Module):
    def __init__(self, inner: int, outer: int, blocks: int, upsample: nn.Module | None):
        super().__init__()
        widths = [inner, *[outer] * blocks]
        self.resnets = nn.ModuleList(map(WanResidual, widths[:-1], widths[1:]))
        self.upsamplers = None if upsample is None else nn.ModuleList([upsample])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.resnets, *(self.upsamplers or ())):
            x = block(x)
        return x


class WanDecoder(nn.Module):
    """Wan's decoder; it has width 96, 16 latent channels and three blocks a stage."""

    def __init__(self, width: int = 96, latent: int = 16, blocks: int = 3):
        super().__init__()
        self.post_quant_conv = CausalConv(latent, latent, 1)
        self.conv_in, self.mid_block = CausalConv(latent, 4 * width), WanMiddle(4 * width)
        stages = [(4, 4, True), (2, 4, True), (2, 2, False), (1, 1, None)]
        self.up_blocks = nn.ModuleList()
        for inner, outer, in_time in stages:
            upsample = None if in_time is None else WanUpsample(outer * width, in_time=in_time)
            self.up_blocks.append(WanUp(inner * width, outer * width, blocks, upsample))
        self.norm_out, self.conv_out = ChannelNorm(width, 3), CausalConv(width, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(self.post_quant_conv(z)))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x))).clamp(-1.0, 1.0)


# --- CogVideoX: group norms, conditioned on the latent; the first frame repeated before itself ---


class FirstFrameConv(nn.Module):
    """A convolution of frames with earlier ones, which are copies of the first frame before it."""

    def __init__(self, inner: int, outer: int, size: int = 3):
        super().__init__()
        self.conv = nn.Conv3d(inner, outer, size, padding=(0, size // 2, size // 2))

    def forward(self, x: Tensor) -> Tensor:
        copies = [x[:, :, :1]] * (self.conv.kernel_size[0] - 1)
        return self.conv(torch.cat([*copies, x], 2) if copies else x)


class SpatialNorm(nn.Module):
    """A group norm with a scale and a shift per position from the latent.

    per_frame: whether each frame is normalized by its own statistics, else all frames by theirs.
    """

    def __init__(self, width: int, latent: int, groups: int, *, per_frame: bool):
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, width, eps=1e-6)
        self.conv_y = FirstFrameConv(latent, width, 1)
        self.conv_b = FirstFrameConv(latent, width, 1)
        self.per_frame = per_frame

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        t, h, w = x.shape[2:]
        first = F.interpolate(z[:, :, :1], size=(1, h, w))
        z = torch.cat([first, F.interpolate(z[:, :, 1:], size=(t - 1, h, w))], 2)
        if self.per_frame:
            normed = video(self.norm_layer(frames(x)), x.shape[0])
        else:
            normed = self.norm_layer(x)
        return normed * self.conv_y(z) + self.conv_b(z)


class CogResidual(nn.Module):
    def __init__(self, inner: int, outer: int, latent: int, groups: int, *, per_frame: bool):
        super().__init__()
        self.norm1 = SpatialNorm(inner, latent, groups, per_frame=per_frame)
        self.norm2 = SpatialNorm(outer, latent, groups, per_frame=per_frame)
        self.conv1, self.conv2 = FirstFrameConv(inner, outer), FirstFrameConv(outer, outer)
        self.conv_shortcut = nn.Identity() if inner == outer else nn.Conv3d(inner, outer, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x, z)))
        return self.conv2(F.silu(self.norm2(y, z))) + self.conv_shortcut(x)


class CogUpsample(nn.Module):
    """Frames twice as high and wide; in time, two frames of each but the first."""

    def __init__(self, width: int, *, in_time: bool):
        super().__init__()
        self.conv, self.in_time = nn.Conv2d(width, width, 3, padding=1), in_time

    def forward(self, x: Tensor) -> Tensor:
        if self.in_time:
            first = F.interpolate(x[:, :, 0], scale_factor=2.0)[:, :, None]
            images = frames(torch.cat([first, F.interpolate(x[:, :, 1:], scale_factor=2.0)], 2))
        else:
            images = F.interpolate(frames(x), scale_factor=2.0)
        return video(self.conv(images), x.shape[0])


class CogStage(nn.Module):
    def __init__(self, blocks: list[CogResidual], upsample: nn.Module | None = None):
        super().__init__()
        self.resnets = nn.ModuleList(blocks)
        self.upsamplers = None if upsample is None else nn.ModuleList([upsample])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for block in self.resnets:
            x = block(x, z)
        return x if self.upsamplers is None else self.upsamplers[0](x)


class CogVideoXDecoder(nn.Module):
    """CogVideoX's decoder of an odd number of frames; it has width 128 and four blocks a stage.

    per_frame: whether norms are over each frame, else over all frames as in the original.
    """

    def __init__(
        self, width: int = 128, latent: int = 16, groups: int = 32, blocks: int = 4, *, per_frame: bool = False
    ):
        super().__init__()

        def residual(inner: int, outer: int) -> CogResidual:
            return CogResidual(inner, outer, latent, groups, per_frame=per_frame)

        widths = [4 * width, 2 * width, 2 * width, width]
        self.conv_in = FirstFrameConv(latent, widths[0])
        self.mid_block = CogStage([residual(widths[0], widths[0]) for _ in range(2)])
        self.up_blocks = nn.ModuleList()
        for k, (inner, outer) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            stage = [residual(inner if not n else outer, outer) for n in range(blocks)]
            upsample = CogUpsample(outer, in_time=k < 2) if k < 3 else None
            self.up_blocks.append(CogStage(stage, upsample))
        self.norm_out = SpatialNorm(width, latent, groups, per_frame=per_frame)
        self.conv_out = FirstFrameConv(width, 3)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(z), z)
        for block in self.up_blocks:
            x = block(x, z)
        return self.conv_out(F.silu(self.norm_out(x, z)))
