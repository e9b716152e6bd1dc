"""Streams that are killed, changed or run twice: what was done is not lost, nor trusted."""

from __future__ import annotations

import json
import random
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import own_process
from demask.errors import BadInput
from demask.traverse import stream
from demask.traverse.execution.journal import Journal
from demask.traverse.storage.store import format_of
from test_stream_stores import read

MEMORY = "14MiB"
SCRIPT = """
    import torch
    from torch import nn
    from demask.traverse import stream

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
            self.last = nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x):
            y = torch.relu(self.norm(self.first(x)))
            return self.last(nn.functional.interpolate(y, scale_factor=2.0))

    def network():
        torch.manual_seed(0)
        return Decoder().eval()

    if __name__ == "__main__":
        torch.set_num_threads(1)
        print(stream(network(), "image.npy", "result.npy", memory="14MiB").resumed)
"""


def network():
    names: dict = {"__name__": "script"}
    exec(textwrap.dedent(SCRIPT), names)
    return names["network"]()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an image."""
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).random((1, 3, 600, 300), dtype=np.float32)
    np.save("image.npy", image)
    return tmp_path


def lines(folder, text=b"\n", name="result.npy"):
    path = folder / f".{name}.partial" / "journal.jsonl"
    return path.read_bytes().count(text) if path.exists() else 0


def begin(folder):
    return own_process.start(textwrap.dedent(SCRIPT), folder=folder)


def kill_after(folder, count):
    """Kill a stream once its journal has so many lines, or let it end."""
    deadline = time.monotonic() + 120
    process = begin(folder)
    while process.returncode is None and lines(folder) < count and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_a_stream_that_is_killed_goes_on_and_writes_the_same_bytes(folder, kills):
    stream(network(), "image.npy", "at_once.npy", memory=MEMORY)
    random.seed(kills)
    count = 3
    for _ in range(kills):
        kill_after(folder, count)
        if (folder / "result.npy").exists():
            break
        assert lines(folder) >= count - 1
        count = lines(folder) + random.randint(1, max(1, 120 // kills))
    process = begin(folder)
    output, err = process.communicate()
    assert process.returncode == 0, err
    assert int(output) > 0
    assert (folder / "result.npy").read_bytes() == (folder / "at_once.npy").read_bytes()
    assert not (folder / ".result.npy.partial").exists()


class Stop(Exception):
    """Ends a stream in the middle."""


def interrupt(model, source="image.npy", tasks=5, name="result.npy", memory=MEMORY, **options):
    """Run a stream until its journal has so many tasks that wrote rows."""

    def step(*_, **__):
        if lines(Path.cwd(), b'"written": [[', name) >= tasks:
            raise Stop

    with pytest.raises(Stop):
        stream(model, source, name, memory=memory, progress=step, **options)


def is_done(folder):
    journal = folder / ".result.npy.partial" / "journal.jsonl"
    return [json.loads(line) for line in journal.read_text().splitlines()[1:]]


@pytest.mark.parametrize("what", ["network", "input", "plan"])
def test_another_stream_is_refused_by_name(folder, what):
    model = network()
    interrupt(model)
    before = is_done(folder)
    options = {}
    if what == "network":
        with torch.no_grad():
            model.last.bias += 1
    if what == "input":
        np.save("image.npy", np.zeros((1, 3, 600, 300), np.float32))
    if what == "plan":
        options["stripe"] = 100
    with pytest.raises(BadInput, match=f"unfinished stream of another {what}; finish it"):
        stream(model, "image.npy", "result.npy", memory=MEMORY, **options)
    assert is_done(folder) == before
    done = stream(model, "image.npy", "result.npy", memory=MEMORY, resume=False, **options)
    assert done.resumed == 0


def test_what_was_written_is_checked_before_it_is_trusted(folder):
    model = network()
    stream(model, "image.npy", "at_once.npy", memory=MEMORY)
    interrupt(model)
    written = [task for task in is_done(folder) if task["written"]]
    assert written
    part = folder / ".result.npy.partial" / "result.npy"
    values = np.lib.format.open_memmap(part, "r+")
    values[..., 0, 0] = 7
    values.flush()
    del values
    done = stream(model, "image.npy", "result.npy", memory=MEMORY)
    rows = sum(box[2][1] - box[2][0] for task in written for box, _ in task["written"])
    assert 0 < done.resumed < rows
    assert (folder / "result.npy").read_bytes() == (folder / "at_once.npy").read_bytes()


def damage(name, columns):
    """Change some positions in the first rows of the unfinished file."""
    part = f".{name}.partial/{name}"
    if name.endswith(".zarr"):
        pytest.importorskip("zarr").open(part, mode="r+")["0"][0, :8, columns] = 7
        return
    rasterio = pytest.importorskip("rasterio")
    values = np.full((8, columns.stop - columns.start), 7, np.float32)
    with rasterio.open(part, "r+") as file:
        file.write(values, 1, window=rasterio.windows.Window.from_slices(slice(0, 8), columns))


@pytest.mark.filterwarnings("ignore")  # of the formats' packages
@pytest.mark.parametrize("name", ["result.zarr", "result.tif", "result.ome.tif", "result.cog.tif"])
@pytest.mark.parametrize("columns", [None, slice(8, 16), slice(550, 560)])
def test_each_format_goes_on_and_writes_again_what_was_damaged(folder, name, columns):
    """Zeros, too: the right tiles of the result are zero."""
    for package in ("zarr", "tifffile", "rasterio"):
        pytest.importorskip(package)
    model, options = network(), {"memory": "40MiB", "mask": np.arange(600)[None] < 512}
    stream(model, "image.npy", "at_once.npy", **options)
    expected = np.load("at_once.npy")[0]
    assert not expected[..., 512:].any() and expected[:, :512, :512].any()
    interrupt(model, tasks=1, name=name, **options)
    if columns is not None:
        damage(name, columns)
    done = stream(model, "image.npy", name, **options)
    assert (done.resumed > 0) == (columns is None)
    np.testing.assert_allclose(read(name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["result.npy", "result.zarr", "result.tif"])
def test_a_file_that_was_not_created_in_full_is_no_unfinished_file(folder, name, monkeypatch):
    """A process may be killed between a new file and its header, or a new folder and its arrays."""
    for package in ("zarr", "tifffile"):
        pytest.importorskip(package)
    module, create = format_of(name).load(), format_of(name).load().create

    def stop(path, info):
        create(path, info)
        if path.is_dir():
            (path / "zarr.json").unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
        raise Stop

    monkeypatch.setattr(module, "create", stop)
    with pytest.raises(Stop):
        stream(network(), "image.npy", name, memory="40MiB")
    monkeypatch.setattr(module, "create", create)
    stream(network(), "image.npy", name, memory="40MiB")
    expected = network()(torch.from_numpy(np.load("image.npy"))).detach().numpy()[0]
    values = np.load(name)[0] if name.endswith(".npy") else read(name)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_a_half_written_line_is_no_finished_task(folder):
    model = network()
    interrupt(model)
    journal = folder / ".result.npy.partial" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    opened = Journal.open(journal.parent, json.loads(whole.splitlines()[0])["identity"], resume=True)
    assert len(opened.done) == len(whole.splitlines()) - 2
    opened.close()


def test_two_processes_do_not_write_the_same_file(folder):
    model = network()
    interrupt(model)
    identity = json.loads((folder / ".result.npy.partial/journal.jsonl").read_text().splitlines()[0])["identity"]
    held = Journal.open(folder / ".result.npy.partial", identity, resume=True)
    with pytest.raises(BadInput, match="another process is writing"):
        stream(model, "image.npy", "result.npy", memory=MEMORY)
    held.close()


def test_tasks_do_not_change_what_is_computed(folder):
    """Stripes of any height give the network's result; the statistics are merged as a tree."""
    model, x = network(), torch.from_numpy(np.load("image.npy"))
    with torch.no_grad():
        expected = model(x)
    for stripe in (None, 64, 333, 5000):
        stream(model, "image.npy", "result.npy", memory=MEMORY, stripe=stripe)
        torch.testing.assert_close(torch.from_numpy(np.load("result.npy")), expected)


def test_each_position_is_counted_once_by_reductions(tmp_path):
    """A value that is read with a halo and reduced: tasks must not count the halo twice."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)

        def forward(self, x):
            y = self.a(x)
            z = self.b(y)
            return z * y.mean((2, 3), keepdim=True) + z.amax((2, 3), keepdim=True)

    torch.manual_seed(0)
    model, x = Both().eval(), torch.randn(2, 3, 500, 200)
    stream(model, x, tmp_path / "y.npy", memory="12MiB", stripe=50)
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "y.npy")), expected)
