"""Kinds of files and arrays that others write: read right, or refused with the reason."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from demask.errors import BadInput
from demask.traverse import stream

pytestmark = pytest.mark.filterwarnings("ignore")  # of the formats' packages
PICTURE = np.random.default_rng(0).integers(0, 255, (3, 300, 280), np.uint8)
GRAY = np.random.default_rng(1).integers(0, 65535, (1, 200, 190), np.uint16)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(source, image, **options):
    """Whether a source has the values of an image (C, H, W) as a network sees them."""
    torch.manual_seed(0)
    net = nn.Conv2d(len(image), 2, 3, padding=1).eval()
    largest = {"uint8": 255, "uint16": 65535}.get(image.dtype.name, 1)
    found = torch.zeros(1, 2, *image.shape[1:])
    stream(net, source, found, memory="64MiB", **options)
    with torch.no_grad():
        expected = net(torch.from_numpy(image.astype(np.float32) / largest)[None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["rgb", "rgba", "gray", "compressed"])
def test_pictures_of_tifffile(kind):
    tifffile = pytest.importorskip("tifffile")
    image, options = {
        "rgb": (PICTURE, {"photometric": "rgb", "tile": (128, 128)}),
        "rgba": (np.concatenate([PICTURE, PICTURE[:1]]), {"photometric": "rgb"}),
        "gray": (GRAY, {}),
        "compressed": (PICTURE, {"photometric": "rgb", "compression": "zlib", "tile": (64, 64)}),
    }[kind]
    tifffile.imwrite("a.tif", GRAY[0] if kind == "gray" else image.transpose(1, 2, 0), **options)
    check("a.tif", image)


def test_a_slide_and_a_region_of_it():
    tifffile = pytest.importorskip("tifffile")
    pytest.importorskip("openslide", reason="needs openslide-python and openslide-bin")
    tifffile.imwrite("a.tif", PICTURE.transpose(1, 2, 0), tile=(128, 128), photometric="rgb")
    os.replace("a.tif", "a.svs")
    check("a.svs", PICTURE)
    check("a.svs", PICTURE[:, 10:110, 20:200], region=(10, 20, 100, 180))


def test_arrays_of_zarr_2_and_3():
    zarr = pytest.importorskip("zarr")
    old = zarr.open_array("v2.zarr", mode="w", shape=PICTURE.shape, chunks=(1, 100, 100), dtype="u1", zarr_format=2)
    old[:] = PICTURE
    check("v2.zarr", PICTURE, layout="CHW")
    sharded = zarr.create_array(
        "shards.zarr", shape=PICTURE.shape, chunks=(1, 50, 50), shards=(3, 100, 100), dtype="u1"
    )
    sharded[:] = PICTURE
    check("shards.zarr", PICTURE, layout="CHW")
    group = zarr.open_group("ngff.zarr", mode="w", zarr_format=2)
    level = group.create_array("0", shape=(1, 3, 1, 300, 280), chunks=(1, 1, 1, 128, 128), dtype="u1")
    level[:] = PICTURE[None, :, None]
    group.attrs["multiscales"] = [
        {"version": "0.4", "axes": [{"name": k} for k in "tczyx"], "datasets": [{"path": "0"}]}
    ]
    check("ngff.zarr", PICTURE)


def test_arrays_of_other_kinds():
    np.save("big.npy", GRAY[0].astype(">u2"))
    check("big.npy", GRAY, layout="YX")
    half = PICTURE.astype(np.float16) / 255
    np.save("half.npy", half[None])
    check("half.npy", half)
    h5py = pytest.importorskip("h5py")
    with h5py.File("a.h5", "w") as file:
        data = file.create_dataset("a", data=PICTURE.transpose(1, 2, 0), compression="gzip")
        check(data, PICTURE, layout="HWC")
        with pytest.raises(BadInput, match="elements of object"):
            check(file.create_dataset("b", data=["a", "b"]), PICTURE)
    with pytest.raises(BadInput, match="open array"):
        check(data, PICTURE)
