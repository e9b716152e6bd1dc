"""Causal decoders of videos within budgets: frames stay together, rows of frames are tiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import video_networks as videos
from demask.errors import BadInput
from demask.traverse import stream, tile
from fuzz.traversed import BANDS, executed
from night import at_night
from tiled_networks import least, same

ROUNDED = 1024  # ulps: dozens of norms, one after another, each of which divides what is rounded


class WanPart(nn.Module):
    """What Wan's decoder has of each kind but attention: latents to frames twice as large."""

    def __init__(self):
        super().__init__()
        self.first, self.last = videos.CausalConv(4, 8), videos.CausalConv(4, 3)
        self.up = videos.WanUp(8, 8, 1, videos.WanUpsample(8, in_time=True))
        self.wider = videos.WanResidual(4, 4)

    def forward(self, z: Tensor) -> Tensor:
        return self.last(self.wider(self.up(self.first(z))))


class CogPart(nn.Module):
    """What CogVideoX's decoder has of each kind."""

    def __init__(self, *, per_frame: bool):
        super().__init__()
        self.first = videos.FirstFrameConv(4, 8)
        self.block = videos.CogResidual(8, 4, 4, 2, per_frame=per_frame)
        self.up = videos.CogUpsample(4, in_time=True)

    def forward(self, z: Tensor) -> Tensor:
        return self.up(F.relu(self.block(self.first(z), z)))


NETWORKS = {
    "part of Wan": WanPart,
    "part of CogVideoX": lambda: CogPart(per_frame=False),
    "part of CogVideoX, norms of each frame": lambda: CogPart(per_frame=True),
    "Wan": lambda: videos.WanDecoder(4, 4, 1),
    "CogVideoX": lambda: videos.CogVideoXDecoder(8, 4, 4, 1),
    "CogVideoX, norms of each frame": lambda: videos.CogVideoXDecoder(8, 4, 4, 1, per_frame=True),
}
PARTS = [name for name in NETWORKS if name.startswith("part")]


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[name]().to(dtype).eval(), torch.randn(1, 4, 5, 9, 6, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *at_night(torch.float64)])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_decoders_some_frames_at_a_time(name: str, dtype: torch.dtype) -> None:
    model, z = build(name, dtype)
    for frames in (1, 3):
        module = executed(model, z, BANDS, frames)
        same(model, module, z)
        assert module.counted.macs == module.plan.macs


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_decoders_within_the_least_budget_and_plenty(name: str, dtype: torch.dtype) -> None:
    model, z = build(name, dtype)
    for memory in (least(model, z), 2**30):
        module = tile(model, (z,), memory=memory)
        assert module.plan.peak <= memory
        same(model, module, z, ulps=ROUNDED)
        assert module.counted.macs == module.plan.macs


# --- files ----------------------------------------------------------------------------------------

ORDERS = {None: (0, 1, 2, 3, 4), "NCTHW": (0, 1, 2, 3, 4), "TNHWC": (2, 0, 3, 4, 1), "NTCYX": (0, 2, 1, 3, 4)}


@pytest.mark.parametrize("layout", ["NTCYX", *at_night(None, "NCTHW", "TNHWC")])
def test_a_stream_of_latents(layout: str | None, tmp_path) -> None:
    model, z = build("part of Wan", torch.float32)
    z = torch.cat([z, z.flip(2)])
    source, target = tmp_path / "latents.npy", tmp_path / "videos.npy"
    np.save(source, z.permute(ORDERS[layout]).numpy())
    stream(model, source, target, memory="16MiB", layout=layout)
    result = torch.from_numpy(np.load(target))
    assert result.shape == (2, 3, 9, 18, 12)
    same(model, lambda _: result, z)


def test_a_stream_of_latents_to_zarr(tmp_path) -> None:
    zarr = pytest.importorskip("zarr")
    model, z = build("part of Wan", torch.float32)
    source = zarr.create_array(tmp_path / "z.zarr", data=z.numpy(), chunks=(1, 4, 1, 4, 4))
    stream(model, source, tmp_path / "y.zarr", memory="16MiB", chunk=8)
    result = torch.from_numpy(np.asarray(zarr.open_group(tmp_path / "y.zarr")["0"]))
    same(model, lambda _: result[None], z)


def test_frames_as_a_series_of_images_are_refused() -> None:
    model, z = build("part of Wan", torch.float32)
    with pytest.raises(BadInput, match="one image of the source"):
        stream(model, z[0].movedim(1, 0).numpy(), np.zeros((1, 3, 9, 18, 12)), layout="TCYX")
