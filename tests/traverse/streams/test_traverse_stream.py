"""stream(): files to files within a budget, equal to the network; what it refuses."""

from __future__ import annotations

import os
import shutil
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import demask
import own_process
from demask.errors import BadInput
from demask.traverse.execution.stream_job import Counted, RowProgress
from demask.traverse.stream import prepare, stream

AUTO = torch.export.Dim.AUTO
BUDGET = "16MiB"


def net(out=3):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, out, 3, padding=1)
    return nn.Sequential(*layers).eval()


class Bytes(nn.Module):
    """A network that takes bytes and converts them itself."""

    def __init__(self):
        super().__init__()
        self.conv = net()

    def forward(self, x):
        return self.conv(x.flip(3).float() / 128 - 1)


def images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export warns of its own internals
        return function(*args, **kwargs)


def exported(model, example, shapes=None):
    return quietly(torch.export.export, model, (example,), dynamic_shapes=shapes)


ANY = ({0: AUTO, 2: AUTO, 3: AUTO},)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """model.pt2, for images of any size."""
    path = tmp_path_factory.mktemp("stored") / "model.pt2"
    quietly(torch.export.save, exported(net(), images(2, 3, 16, 16), ANY), path)
    return path


@pytest.fixture
def files(stored, tmp_path, monkeypatch):
    """An empty folder with model.pt2 for images of any size, image.npy, and what comes out."""
    monkeypatch.chdir(tmp_path)
    x = images(2, 3, 60, 50)
    shutil.copy(stored, "model.pt2")
    np.save("image.npy", x.numpy())
    return x, net()(x).detach()


# -- equal to the network --------------------------------------------------------------------------


def test_a_file_becomes_a_file(files):
    _, expected = files
    done = stream("model.pt2", "image.npy", "result.npy", memory=BUDGET)
    found = np.load("result.npy")
    torch.testing.assert_close(torch.from_numpy(found), expected)
    assert (done.shape, done.dtype, done.images, done.rows) == ((2, 3, 60, 50), "float32", 2, 120)
    assert 0 < done.peak <= 16 * 2**20
    assert done.macs == 2 * 60 * 50 * 9 * (3 * 8 + 8 * 3)


def as_memmap(x, name):
    np.save(name, x.numpy())
    return np.load(name, mmap_mode="r+")


@pytest.mark.parametrize("kind", ["path", "memmap", "array", "tensor", "channels last", "fortran"])
def test_every_kind_of_source_and_destination(files, kind):
    x, expected = files
    made = torch.zeros_like(expected)
    make = {
        "path": lambda t, name: Path("image.npy") if t is x else Path("result.npy"),
        "memmap": as_memmap,
        "array": lambda t, name: t.numpy(),
        "tensor": lambda t, name: t,
        "channels last": lambda t, name: t.to(memory_format=torch.channels_last),
        "fortran": lambda t, name: np.asfortranarray(t.numpy()),
    }[kind]
    source, destination = make(x, "a.npy"), make(made, "b.npy")
    stream(net(), source, destination, memory=BUDGET)
    if kind == "path":
        destination = np.load(destination)
    torch.testing.assert_close(torch.as_tensor(destination), expected)


@pytest.mark.parametrize("kind", ["module", "program", "demask", "onnx"])
def test_every_kind_of_network(files, kind):
    x, expected = files
    model = {"module": net, "program": lambda: exported(net(), images(2, 3, 16, 16), ANY)}.get(kind)
    made = torch.zeros_like(expected)
    if kind == "demask":
        slim = demask.demask(net(), (images(2, 3, 16, 16),), dynamic_shapes=ANY)
        demask.save(slim, "model.demask")
    if kind == "onnx":
        pytest.importorskip("onnx")
        quietly(demask.to_onnx, net(), "model.onnx", (images(2, 3, 60, 50),))
    stream(model() if model else f"model.{kind}", x, made, memory=BUDGET)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(3, 4, 3), (2, 3, 40)),
        (nn.Conv3d(3, 4, 3), (2, 3, 6, 9, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 8 * 6, 5)), (2, 3, 10, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (2, 3, 10, 8)),
        (nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.GroupNorm(2, 4)), (2, 3, 31, 18)),
    ],
    ids=["sequence", "volume", "logits", "pooled", "norm"],
)
def test_every_kind_of_value(layer, shape, tmp_path):
    x = images(*shape)
    expected = layer.eval()(x).detach()
    stream(layer, x, tmp_path / "y.npy", memory=BUDGET)
    found = torch.from_numpy(np.load(tmp_path / "y.npy"))
    torch.testing.assert_close(found, expected)


def test_bytes_in_and_bytes_out(files):
    x, _ = files
    held = (x * 255).round().to(torch.uint8)
    np.save("bytes.npy", held.numpy())
    done = stream(net(), "bytes.npy", "result.npy", memory=BUDGET, output="uint8")
    expected = net()(held / 255).detach().clamp(0, 1).mul(255).round().to(torch.uint8)
    found = torch.from_numpy(np.load("result.npy"))
    assert done.dtype == "uint8" and found.dtype == torch.uint8
    assert ((found.int() - expected.int()).abs() > 0).float().mean() < 1e-3  # halves may round apart


def test_a_network_that_takes_bytes_is_given_bytes(files):
    held = (files[0] * 255).to(torch.uint8)
    made = torch.zeros(2, 3, 60, 50)
    stream(Bytes(), held, made, memory=BUDGET)
    torch.testing.assert_close(made, Bytes()(held).detach())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, bias=False),
        nn.ConvTranspose2d(3, 4, 3),
        nn.BatchNorm2d(3),
        nn.Sequential(nn.ReLU(), nn.Linear(6, 2)),
    ],
    ids=["conv", "transposed", "norm", "linear"],
)
def test_a_network_that_cannot_take_bytes_is_given_numbers(layer):
    """Fake tensors let such calls pass."""
    held = (images(1, 3, 8, 6) * 255).to(torch.uint8)
    expected = layer.eval()(held / 255).detach()
    made = torch.zeros_like(expected)
    stream(layer, held, made, memory=BUDGET)
    torch.testing.assert_close(made, expected)


def test_numbers_take_the_dtype_of_the_network(files):
    x, _ = files
    double = net().double()
    made = torch.zeros(2, 3, 60, 50)
    stream(double, x, made, memory=BUDGET)
    assert torch.equal(made, double(x.double()).float().detach())
    small = torch.zeros(2, 3, 60, 50, dtype=torch.float32)
    stream(net().bfloat16(), x, small, memory=BUDGET)
    expected = net().bfloat16()(x.bfloat16()).detach().float()
    torch.testing.assert_close(small, expected, rtol=2e-2, atol=2e-2)


def test_the_source_may_be_replaced_by_the_result(files):
    stream(net(), "image.npy", "image.npy", memory=BUDGET)
    torch.testing.assert_close(torch.from_numpy(np.load("image.npy")), files[1])


def norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 1, 3)).eval()


def test_maps_that_do_not_fit_go_to_the_folder_for_them_and_from_it(tmp_path):
    x, net = images(1, 3, 500, 600), norm()
    made, folder = torch.zeros(1, 1, 496, 596), tmp_path / "spill"
    folder.mkdir()
    job = prepare(net, x, made, memory="20MiB", spill=folder)
    assert [name for segment in job.plan.segments for name in segment.spills]
    job.run()
    assert os.listdir(folder) == []
    torch.testing.assert_close(made, net(x).detach(), rtol=1e-5, atol=1e-5)


def test_progress_tells_every_step(files):
    told = []
    job = prepare(net(), "image.npy", "result.npy", memory=BUDGET)
    job.run(lambda words, done: told.append((words, done)))
    assert sum(done for _, done in told) == job.steps
    assert told[-1][0] == "120 of 120 rows"


def test_a_plan_writes_nothing(files, tmp_path):
    before = sorted(p.name for p in tmp_path.iterdir())
    job = prepare("model.pt2", "image.npy", "result.npy", memory=BUDGET)
    assert "MACs" in str(job.plan)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client": object()}, "expected a dask"),
        ({"output": "int8"}, "expected output=None or one of"),
        ({"memory": "5 apples"}, "amount of memory"),
        ({"memory": "1MiB"}, "least budget"),
        ({"spill": "nowhere"}, "a folder that exists"),
        ({"source": "missing.npy"}, "missing.npy: no such file"),
        ({"source": "text.npy"}, "text.npy: expected an array"),
        ({"source": 3}, "the source: expected an open array"),
        ({"source": torch.zeros(3, 60)}, r"expected images \(N, C, H, W\)"),
        ({"source": torch.zeros(0, 3, 6, 6)}, "of at least one position"),
        ({"source": torch.zeros(1, 3, 6, 6, dtype=torch.complex64)}, "complex64"),
        ({"source": torch.zeros(1, 4, 60, 50)}, "expected 3 channels on axis 1, got 4"),
        ({"source": torch.zeros(1, 3, 60)}, "takes inputs of 4 axes"),
        ({"destination": "result.png"}, r"ends in one of \.npy"),
        ({"destination": "no/result.npy"}, "does not exist"),
        ({"destination": 3}, "destination: expected a path"),
        ({"destination": torch.zeros(2, 3, 60, 51)}, r"60, 51\), the result \(2, 3, 60, 50\)"),
        ({"destination": torch.zeros(2, 3, 60, 50, dtype=torch.int32)}, "be stored as int32"),
        ({"destination": torch.zeros(2, 3, 60, 50), "output": "uint8"}, "leave `output` out"),
        ({"model": "missing.pt2"}, "missing.pt2"),
        ({"model": 3}, "expected a network"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(files, tmp_path, change, words):
    (tmp_path / "text.npy").write_text("text")
    given = {"model": "model.pt2", "source": "image.npy", "destination": "result.npy"}
    given |= {"memory": BUDGET} | change
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(BadInput, match=words):
        stream(given.pop("model"), given.pop("source"), given.pop("destination"), **given)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


class Two(nn.Module):
    def forward(self, x):
        return x + 1, x * 2


class Total(nn.Module):
    def forward(self, x):
        return x.sum((0, 1, 2, 3))


class Forked(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Two(), "one output"),
        (Total(), "no axis for 2 images"),
        (nn.Bilinear(3, 3, 3), "does not take"),
        (Forked(), "(?i)data-dependent"),
        (nn.Conv2d(5, 3, 3), "does not take float32"),
    ],
    ids=["two outputs", "no batch", "two inputs", "forked", "channels"],
)
def test_networks_that_cannot_be_streamed(files, model, words):
    with pytest.raises((BadInput, demask.NotExportable), match=words):
        stream(model, "image.npy", "result.npy", memory=BUDGET)


def test_three_axes_are_explained(files):
    with pytest.raises(BadInput, match=r"array\[None\]"):
        stream(net(), images(3, 60, 50), "result.npy", memory=BUDGET)


@pytest.mark.parametrize("kind", ["pt2", "program", "demask", "onnx"])
def test_fixed_sizes_are_refused_with_the_call_that_helps(files, kind):
    """And that call helps."""
    x, expected = files
    small = images(2, 3, 16, 16)
    model = f"fixed.{kind}"
    if kind == "pt2":
        quietly(torch.export.save, exported(net(), small), model)
    elif kind == "program":
        model = exported(net(), small)
    elif kind == "demask":
        demask.save(demask.demask(net(), (small,), result="graph"), model)
    else:
        pytest.importorskip("onnx")
        quietly(demask.to_onnx, net(), model, (small,))
    with pytest.raises(BadInput, match=r"its sizes are fixed[\s\S]*dynamic_shapes") as caught:
        stream(model, x, "result.npy", memory=BUDGET)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    space = {"torch": torch, "demask": demask, "model": net(), "path": "again.onnx"}
    exec(lines[0], space)
    if kind == "onnx":  # it takes long, and needs a package
        assert lines[1].startswith("torch.onnx.export(model, (torch.randn(2, 3, ")
        return
    made = torch.zeros_like(expected)
    stream(quietly(eval, lines[1], space), x, made, memory=BUDGET)
    torch.testing.assert_close(made, expected)


def test_sizes_beyond_those_exported_are_refused(files):
    bound = ({0: AUTO, 2: torch.export.Dim("h", max=40), 3: AUTO},)
    model = exported(net(), images(2, 3, 16, 16), bound)
    with pytest.raises(BadInput, match="<= 40"):
        stream(model, "image.npy", "result.npy", memory=BUDGET)


def test_source_and_destination_that_share_memory_are_refused(files):
    x = torch.cat([files[0], files[0]])
    with pytest.raises(BadInput, match="share memory"):
        stream(net(), x[:2], x[1:3], memory=BUDGET)
    stream(net(), x[:2], x[2:], memory=BUDGET)
    torch.testing.assert_close(x[2:], files[1])
    both = [np.load("image.npy", mmap_mode=mode) for mode in ("r", "r+")]
    with pytest.raises(BadInput, match=r"both in .*image\.npy"):
        stream(net(), *both, memory=BUDGET)


def test_positions_left_out_never_make_a_file():
    class Nowhere:
        def write(self, window, part):
            pass

    sink = Counted(Nowhere(), ((0, 4), (0, 5)), RowProgress(4, None))
    sink.write(((0, 3), (0, 5)), None)
    with pytest.raises(RuntimeError, match="15 positions"):
        sink.check()


# -- planted failures in a process of its own ------------------------------------------------------

START = """
    import os, resource, time
    import numpy as np, torch
    from torch import nn
    from demask.traverse.stream import prepare, stream
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)
    net = nn.Sequential(*layers).eval()
"""


def child(code, folder):
    return own_process.start(textwrap.dedent(START) + textwrap.dedent(code), folder=folder)


def test_a_kill_in_the_middle_leaves_the_old_destination(files, tmp_path):
    (tmp_path / "result.npy").write_text("earlier")
    code = """
        def told(words, done):
            print(words, flush=True)
            time.sleep(100)
        stream(net, "image.npy", "result.npy", memory="16MiB", progress=told)
    """
    process = child(code, tmp_path)
    assert "of 120 rows" in process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)
    assert (tmp_path / "result.npy").read_text() == "earlier"


@pytest.mark.nightly
def test_a_full_disk_is_found_before_anything_runs(files, tmp_path):
    (tmp_path / "result.npy").write_text("earlier")
    code = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            stream(net, "image.npy", "result.npy", memory="16MiB", progress=print)
        except ValueError as error:
            print(error)
    """
    out, err = child(code, tmp_path).communicate(timeout=120)
    assert out.startswith(str(tmp_path)) and f"{2 * 3 * 60 * 50 * 4 + 128:,} bytes" in out, err
    assert (tmp_path / "result.npy").read_text() == "earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["image.npy", "model.pt2", "result.npy"]


@pytest.mark.nightly
def test_a_full_disk_for_maps_says_how_much_they_need(tmp_path):
    code = """
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 1, 3)).eval()
        job = prepare(net, torch.rand(1, 3, 500, 600), torch.zeros(1, 1, 496, 596), memory="20MiB",
                      spill=".")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            job.run()
        except ValueError as error:
            print(error)
    """
    out, err = child(code, tmp_path).communicate(timeout=120)
    assert f"{16 * 498 * 598 * 4:,} bytes" in out and "no room" in out, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads Linux's /proc")
def test_neither_the_example_nor_the_files_cost_memory(tmp_path):
    """Images of 1.5 GiB are planned, and 200 MiB streamed, within the budget's memory."""
    code = """
        def kib(key):
            return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
        def made(name, *shape):
            np.lib.format.open_memmap(name, "w+", np.float32, shape)._mmap.close()
        made("large.npy", 1, 3, 8192, 16384)
        made("small.npy", 1, 3, 2048, 8192)
        made("tiny.npy", 1, 3, 64, 64)
        stream(net, "tiny.npy", "y.npy", memory="32MiB")
        open("/proc/self/clear_refs", "w").write("5")
        before = kib("VmRSS")
        prepare(net, "large.npy", "y.npy", memory="32MiB")
        stream(net, "small.npy", "y.npy", memory="32MiB", output="uint8")
        print(kib("VmHWM") - before)
    """
    out, err = child(code, tmp_path).communicate(timeout=300)
    assert out, err
    assert int(out) < 32 * 1024
    for path in tmp_path.iterdir():
        path.unlink()  # pytest keeps folders
