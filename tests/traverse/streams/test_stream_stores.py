"""Stores of streams: Zarr, TIFF, GeoTIFF and others hold what the network computes."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from demask.errors import BadInput
from demask.traverse import stream
from demask.traverse.storage.boxes import chunks_in, view
from demask.traverse.storage.store import ArrayInfo, format_of
from demask.traverse.stream import prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # of the formats' packages
MEMORY = "64MiB"


def net(out=3, scale=2.0):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Upsample(scale_factor=scale),
        nn.Conv2d(8, out, 3, padding=1),
    )
    return nn.Sequential(*layers).eval()


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image in image.npy, and the network's result."""
    monkeypatch.chdir(tmp_path)
    x = torch.rand(1, 3, 330, 300, generator=torch.Generator().manual_seed(0))
    np.save("image.npy", x.numpy())
    with torch.no_grad():
        return x, net()(x)


def read(path):
    """The values of a file as (C, H, W), by another reader than ours."""
    if path.endswith(".zarr"):
        return pytest.importorskip("zarr").open(path)["0"][:]
    if ".cog." in path:
        with pytest.importorskip("rasterio").open(path) as data:
            return data.read()
    values = pytest.importorskip("tifffile").imread(path)
    return values if values.shape[0] == 3 else np.moveaxis(values, -1, 0)


WRITTEN = ["y.zarr", "y.ome.zarr", "y.tif", "y.ome.tiff", "y.cog.tif"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", WRITTEN)
@pytest.mark.parametrize("output", ["float32", "uint8", "uint16"])
def test_a_file_of_each_format_holds_the_result(image, path, output):
    for package in ("zarr", "tifffile", "rasterio"):
        pytest.importorskip(package)
    stream(net(), "image.npy", path, memory=MEMORY, output=output)
    expected, values = image[1][0], torch.from_numpy(read(path).astype(np.float32))
    largest = {"uint8": 255, "uint16": 65535}.get(output)
    if largest is None:
        torch.testing.assert_close(values, expected)
    else:
        wanted = (expected.clamp(0, 1) * largest).round()
        assert (values - wanted).abs().max() <= 1
        assert ((values - wanted) != 0).float().mean() < 0.01


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", WRITTEN)
def test_what_a_stream_wrote_a_stream_reads(image, path):
    for package in ("zarr", "tifffile", "rasterio"):
        pytest.importorskip(package)
    stream(net(), "image.npy", path, memory=MEMORY)
    stream(nn.AvgPool2d(2), path, "half.npy", memory=MEMORY)
    expected = nn.functional.avg_pool2d(image[1], 2)
    torch.testing.assert_close(torch.from_numpy(np.load("half.npy")), expected)


def test_a_pyramid_is_of_means_and_has_the_metadata_of_ngff(image):
    zarr = pytest.importorskip("zarr")
    stream(net(), "image.npy", "y.ome.zarr", memory=MEMORY, chunk=128)
    group = zarr.open("y.ome.zarr")
    scales = group.attrs["ome"]["multiscales"][0]
    assert group.attrs["ome"]["version"] == "0.5"
    assert [axis["name"] for axis in scales["axes"]] == ["c", "y", "x"]
    levels = [dataset["path"] for dataset in scales["datasets"]]
    assert [group[k].shape for k in levels] == [(3, 660, 600), (3, 330, 300)]
    expected = nn.functional.avg_pool2d(image[1], 2)[0]
    torch.testing.assert_close(torch.from_numpy(group["1"][:]), expected)
    transform = scales["datasets"][1]["coordinateTransformations"][0]
    assert transform == {"type": "scale", "scale": [1.0, 2.0, 2.0]}


@pytest.mark.parametrize("kind", ["zarr", "h5py", "tifffile"])
def test_any_array_that_can_be_sliced_is_a_source_and_a_destination(image, kind):
    x, expected = image
    source, target = x.numpy(), np.zeros(expected.shape, np.float32)
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        source = zarr.create_array("a.zarr", data=source, chunks=(1, 3, 100, 77))
        target = zarr.create_array("b.zarr", data=target, chunks=(1, 2, 90, 64))
    if kind == "h5py":
        file = pytest.importorskip("h5py").File("a.h5", "w")
        source = file.create_dataset("a", data=source, chunks=(1, 1, 50, 300))
        target = file.create_dataset("b", data=target)
    if kind == "tifffile":
        tifffile, zarr = pytest.importorskip("tifffile"), pytest.importorskip("zarr")
        tifffile.imwrite("a.tif", source[0], tile=(64, 64), photometric="minisblack")
        file = tifffile.imread("a.tif", aszarr=True)
        source = zarr.open(file, mode="r")
    layout = "CHW" if kind == "tifffile" else None
    stream(net(), source, target, memory=MEMORY, layout=layout)
    torch.testing.assert_close(torch.from_numpy(np.asarray(target[...])), expected)
    if kind == "tifffile":
        file.close()


@pytest.mark.parametrize("layout", ["HWC", "CHW", "NHWC", "YXS", "TCZYX"])
def test_axes_have_any_order(image, layout):
    x, expected = image
    shape = {"HWC": "hwc", "CHW": "chw", "NHWC": "nhwc", "YXS": "hwc", "TCZYX": "ncdhw"}[layout]
    values = x[:, :, None] if "d" in shape else x if "n" in shape else x[0]
    names = "ncdhw" if "d" in shape else "nchw" if "n" in shape else "chw"
    array = values.permute([names.index(k) for k in shape]).numpy()
    out = np.zeros(expected.shape, np.float32)
    stream(net(), array, out, memory=MEMORY, layout=layout)
    torch.testing.assert_close(torch.from_numpy(out), expected)


def test_the_cache_of_gdal_is_small_meanwhile_and_as_before_then(image, monkeypatch):
    """By default it has 5 % of the machine's memory, which a budget knows nothing of."""
    env = pytest.importorskip("rasterio.env")
    from demask.traverse.storage import raster

    before, sizes, copy = env.get_gdal_config(raster.CACHE_OPTION), [], raster.rasterio.shutil.copy

    def note(*args, **options):
        sizes.append(env.get_gdal_config(raster.CACHE_OPTION))
        return copy(*args, **options)

    monkeypatch.setattr(raster.rasterio.shutil, "copy", note)
    monkeypatch.setattr(
        raster,
        "_bands",
        lambda box: (sizes.append(env.get_gdal_config(raster.CACHE_OPTION)), list(range(box[0][0] + 1, box[0][1] + 1)))[
            1
        ],
    )
    stream(net(), "image.npy", "y.cog.tif", memory=MEMORY, output="uint8")
    assert len(sizes) > 1 and set(sizes) == {raster.CACHE}
    assert env.get_gdal_config(raster.CACHE_OPTION) == before > raster.CACHE


def test_coordinates_and_missing_values_of_a_geotiff_are_kept(image):
    rasterio = pytest.importorskip("rasterio")
    x, _ = image
    values = x[0].numpy().copy()
    values[:, :40, :50] = np.nan
    place = rasterio.Affine(0.5, 0, 1000, 0, -0.5, 2000)
    with rasterio.open(
        "in.tif", "w", driver="GTiff", count=3, height=330, width=300, dtype="float32",
        crs="EPSG:32633", transform=place, nodata=np.nan, tiled=True, blockxsize=128,
        blockysize=128,
    ) as file:  # fmt: skip
        file.write(values)
    model = net(scale=1.0)
    stream(model, "in.tif", "out.tif", memory=MEMORY, region=(10, 20, 200, 256))
    with rasterio.open("out.tif") as file:
        assert file.crs.to_epsg() == 32633
        assert file.transform == place * rasterio.Affine.translation(20, 10)
        found = torch.from_numpy(file.read())
    with torch.no_grad():
        part = torch.from_numpy(np.nan_to_num(values))[None, :, 10:210, 20:276]
        expected = model(part)[0]
    expected[:, :30, :30] = torch.nan
    torch.testing.assert_close(found, expected, equal_nan=True)
    stream(net(), "in.tif", "large.tif", memory=MEMORY)
    with rasterio.open("large.tif") as file:
        assert file.transform == place * rasterio.Affine.scale(0.5, 0.5)


def test_sizes_of_pixels_are_scaled_from_zarr_to_tiff(image):
    tifffile = pytest.importorskip("tifffile")
    stream(net(), "image.npy", "a.ome.zarr", memory=MEMORY)
    group = pytest.importorskip("zarr").open("a.ome.zarr", mode="r+")
    ome = group.attrs["ome"]
    ome["multiscales"][0]["axes"][1]["unit"] = "micrometer"
    ome["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"] = [1, 0.5, 0.25]
    group.attrs["ome"] = ome
    stream(net(), "a.ome.zarr", "b.ome.tif", memory=MEMORY)
    with tifffile.TiffFile("b.ome.tif") as file:
        metadata = tifffile.xml2dict(file.ome_metadata)
    assert float(metadata["OME"]["Image"]["Pixels"]["PhysicalSizeY"]) == 0.25


def test_classes_a_region_a_mask_and_normalization(image):
    x, _ = image
    model = net(out=5)
    with torch.no_grad():
        scores = model(x)
        normal = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True, unbiased=False)
        by_image = net()(normal)
    stream(model, "image.npy", "classes.npy", memory=MEMORY, output="argmax")
    classes = np.load("classes.npy")
    assert classes.dtype == np.uint8
    assert (classes[:, 0] != scores.argmax(1).numpy()).mean() < 1e-4
    mask = np.zeros((11, 10), bool)
    mask[2:5, 3:5] = True
    done = stream(model, "image.npy", "masked.npy", memory="14MiB", mask=mask)
    wanted = torch.from_numpy(np.kron(mask, np.ones((60, 60), bool)))
    expected = torch.where(wanted, scores, torch.zeros(()))
    torch.testing.assert_close(torch.from_numpy(np.load("masked.npy")), expected)
    whole = stream(model, "image.npy", "whole.npy", memory="14MiB")
    assert done.macs < whole.macs
    stream(net(), "image.npy", "normal.npy", memory=MEMORY, normalize="image")
    torch.testing.assert_close(torch.from_numpy(np.load("normal.npy")), by_image, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["y.npy", *WRITTEN])
def test_two_writers_of_a_file_lose_nothing_of_each_other(tmp_path, name):
    """Workers open a file for themselves, and write different chunks of it."""
    for package in ("zarr", "tifffile", "rasterio"):
        pytest.importorskip(package)
    values = torch.rand(3, 600, 1100, generator=torch.Generator().manual_seed(0))
    info, whole = ArrayInfo(values.shape, values.dtype, "CHW", (3, 512, 512)), ((0, 3), (0, 600), (0, 1100))
    module = format_of(name).load()
    module.create(tmp_path / name, info)
    stores = [module.open_again(tmp_path / name, info) for _ in range(2)]
    for k, chunk in enumerate(chunks_in(whole, values.shape, (3, 512, 512))):
        stores[k % 2].write(chunk, view(values, chunk).contiguous())
    for store in stores:
        store.close()
    assert torch.equal(module.open_store(tmp_path / name).read(whole), values)


BAD = {
    "object": (np.array([[["text"] * 4] * 4] * 3, object), None, "expected floating"),
    "records": (np.zeros((3, 4, 4), [("a", "f4")]), "CHW", "expected floating"),
    "axes": (np.zeros((3, 40, 40, 5), np.float32), "CHW", "names 3"),
    "letters": (np.zeros((3, 40, 40), np.float32), "CQW", "no axis H|more than"),
    "region": (np.zeros((1, 3, 40, 40), np.float32), None, "region="),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_image_is_refused(tmp_path, kind):
    source, layout, words = BAD[kind]
    region = (30, 30, 20, 20) if kind == "region" else None
    with pytest.raises(BadInput, match=words):
        prepare(net(), source, tmp_path / "y.npy", memory=MEMORY, layout=layout, region=region)


def test_damaged_chunks_and_formats_are_errors_by_name(image):
    zarr = pytest.importorskip("zarr")
    stream(net(), "image.npy", "a.ome.zarr", memory=MEMORY, chunk=128)
    chunk = next(p for p in sorted(Path("a.ome.zarr/0/c").rglob("*")) if p.is_file())
    chunk.write_bytes(chunk.read_bytes()[:20])
    with pytest.raises(BadInput, match=r"a.ome.zarr: positions .* cannot be read"):
        stream(nn.AvgPool2d(2), "a.ome.zarr", "y.npy", memory=MEMORY)
    shutil.rmtree(".y.npy.partial")
    zarr.open_group("empty.zarr", mode="w")
    for path in ("missing.zarr", "empty.zarr", "missing.tif"):
        with pytest.raises(BadInput, match=path):
            prepare(net(), path, "y.npy", memory=MEMORY)
    Path("bad.tif").write_bytes(struct.pack("<2sHI", b"II", 42, 10**6))
    with pytest.raises(BadInput, match=r"bad\.tif"):
        prepare(net(), "bad.tif", "y.npy", memory=MEMORY)
    with pytest.raises(BadInput, match="files have rows and columns, the result has the shape"):
        prepare(nn.Conv1d(3, 4, 5), torch.zeros(1, 3, 50), "y.tif", memory=MEMORY)
    with pytest.raises(BadInput, match="are only read"):
        prepare(net(), "image.npy", "y.svs", memory=MEMORY)
