"""`demask stream`: what it writes, what it says, what it refuses. `demask halo`: the numbers that other tools need."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import test_cli
import test_traverse_stream
from demask.progress import progress
from demask.traverse.stream import prepare
from test_traverse_stream import BUDGET, net

run = test_cli.run  # fixtures
files, stored = test_traverse_stream.files, test_traverse_stream.stored


def test_the_command_writes_and_tells(run, files, tmp_path):
    words = ("stream", "model.pt2", "image.npy", "result.npy", "--memory", BUDGET)
    outcome = run(*words)
    assert outcome.code == 0, outcome.err
    assert "2 images, 120 rows in " in outcome.out and "predicted peak" in outcome.out
    assert "written to result.npy" in outcome.out
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "result.npy")), files[1])
    outcome = run(*words, "--output", "uint8", "--spill", tmp_path, "--json")
    data = json.loads(outcome.out)
    assert (data["rows"], data["dtype"], data["shape"]) == (120, "uint8", [2, 3, 60, 50])
    assert data["peak"] == data["plan"]["peak"] <= 16 * 2**20
    assert np.load(tmp_path / "result.npy").dtype == np.uint8


def test_the_command_prints_a_plan_and_runs_nothing(run, files, tmp_path):
    words = ("stream", "model.pt2", "image.npy", "result.npy", "--memory", BUDGET, "--plan")
    outcome = run(*words)
    assert outcome.code == 0, outcome.err
    assert "segments" in outcome.out and "peak" in outcome.out
    assert json.loads(run(*words, "--json").out)["rows"] == 120
    assert not (tmp_path / "result.npy").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("image.npy", "result.png"), "ends in one of .npy .ome.zarr"),
        (("image.npy", "no/result.npy"), "does not exist"),
        (("missing.npy", "result.npy"), "no such file"),
        (("image.npy", "result.npy", "--memory", "much"), "amount of memory"),
        (("image.npy", "result.npy", "--memory", "1MiB"), "least budget"),
        (("image.npy", "result.npy", "--output", "int4"), "expected output"),
        (("image.npy",), ""),
        (("image.npy", "result.svs"), "are only read"),
        (("image.npy", "folder.zarr"), "would be replaced"),
        (("image.npy", "result.npy", "--region", "1,2,3"), "expected --region Y,X,H,W"),
        (("image.npy", "result.npy", "--region", "0,0,99,10"), "inside of 60 x 50"),
        (("image.npy", "result.npy", "--mask", "none.npy"), "--mask none.npy"),
        (("image.npy", "result.npy", "--mask", "image.npy"), "expected bools"),
        (("image.npy", "result.npy", "--normalize", "1,2"), "expected --normalize"),
        (("image.npy", "result.npy", "--normalize", "1,2/1,2"), "each of 3 channels"),
        (("image.npy", "result.npy", "--layout", "NHW"), "names 3"),
        (("image.npy", "result.npy", "--chunk", "64"), "chunk=64"),
        (("image.npy", "result.npy", "--scheduler", "nothing"), "--scheduler nothing"),
    ],
)
def test_the_command_exits_with_2_and_leaves_nothing(run, files, tmp_path, words, complaint):
    (tmp_path / "folder.zarr").mkdir()
    (tmp_path / "folder.zarr" / "photograph").touch()
    before = sorted(p.name for p in tmp_path.iterdir())
    outcome = run("stream", "model.pt2", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err and "Traceback" not in outcome.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_the_examples_of_the_help_run(run, files, tmp_path):
    lines = [line.split() for line in run("stream", "--help").out.splitlines()]
    examples = [words[1:] for words in lines if words[:2] == ["demask", "stream"]]
    assert len(examples) == 2
    for words in examples:
        outcome = run(*words)
        assert outcome.code == 0, outcome.err
    assert np.load(tmp_path / "result.npy").dtype == np.uint8


def test_the_bar_shows_rows(files):
    console = test_cli.terminal(True)
    job = prepare(net(), "image.npy", "result.npy", memory=BUDGET)
    with progress("streaming", job.steps, patience=0, terminal=console) as step:
        test_cli.wait_for(lambda: "streaming" in console.file.getvalue())
        job.run(step)
        test_cli.wait_for(lambda: "120 of 120 rows" in console.file.getvalue())


def test_options_reach_the_stream(run, files, tmp_path):
    zarr = pytest.importorskip("zarr")
    images = np.load(tmp_path / "image.npy")
    np.save("nhwc.npy", images.transpose(0, 2, 3, 1))
    np.save("mask.npy", np.arange(10).reshape(1, 10) < 4)
    deviations = "1,2,4"
    outcome = run("stream", "model.pt2", "nhwc.npy", "result.zarr", "--memory", BUDGET,
                  "--layout", "NHWC", "--region", "0,10,60,40", "--mask", "mask.npy",
                  "--normalize", f"0.5,0.5,0.5/{deviations}", "--chunk", "16")  # fmt: skip
    assert outcome.code == 0, outcome.err
    group = zarr.open("result.zarr")
    assert group["0"].chunks[-2:] == (16, 16)
    part = torch.from_numpy((images[..., 10:50] - 0.5) / np.reshape([1, 2, 4], (1, 3, 1, 1)))
    with torch.no_grad():
        expected = torch.cat([net()(one[None].float()) for one in part])
    expected[..., 16:] = 0  # 4 of 10 columns of the mask, each of which is 4 of the image
    torch.testing.assert_close(torch.from_numpy(group["0"][:]), expected)


def test_what_is_interrupted_goes_on_with_the_same_command(run, files, monkeypatch, tmp_path):
    from demask.traverse.execution import stream_job

    words = ("stream", "model.pt2", "image.npy", "result.npy", "--memory", BUDGET, "--stripe", "20")
    calls, step = [], stream_job.RowProgress.step

    def interrupt(self, *args):
        calls.append(self.rows)
        if self.rows > 70:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(stream_job.RowProgress, "step", interrupt)
    outcome = run(*words)
    assert outcome.code == 130, outcome.err
    assert outcome.err == "demask: interrupted; the same command continues from here\n"
    assert not (tmp_path / "result.npy").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    other = run(*words, "--output", "uint8")
    assert other.code == 2 and "unfinished stream of another plan" in other.err
    assert "--no-resume" in other.err
    outcome = run(*words)
    assert outcome.code == 0, outcome.err
    assert "120 rows (60 of them before)" in outcome.out
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "result.npy")), files[1])


def test_time_left_is_that_of_the_work_to_come(files, monkeypatch):
    from demask.traverse.execution import stream_job

    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(stream_job.time, "perf_counter", lambda: float(next(clock)))
    texts = []
    prepare(net(), "image.npy", "result.npy", memory=BUDGET).run(lambda text, done=1: texts.append(text))
    left = [text.partition("rows, ")[2] for text in texts]
    assert all(text.endswith(" left") for text in left[:-1]) and left[-1] == ""


# -- halo ------------------------------------------------------------------------------------------

ANY = ({2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)


def write(model, path):
    torch.export.save(torch.export.export(model.eval(), (torch.zeros(1, 1, 64, 64),), dynamic_shapes=ANY), path)


def test_padding_halo_and_overlap(run, tmp_path):
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 5, padding=2))
    write(nn.Sequential(*layers), tmp_path / "model.pt2")
    outcome = run("halo", "model.pt2", "--tile", "64")
    assert outcome.code == 0, outcome.err
    # Two rows of the larger image are one of the input, and one more before the upsampling.
    assert "Real-ESRGAN tile_pad 2; bioimage.io halo 4; MONAI overlap 0.063" in outcome.out
    data = json.loads(run("halo", "model.pt2", "--json").out)
    rows = data["entries"][0]
    assert (rows["axis"], rows["tile_pad"], rows["halo"], rows["exact"]) == ("rows", 2, 4, True)


def test_a_tile_begins_where_strides_do(run, tmp_path):
    write(nn.Sequential(nn.Conv2d(1, 4, 3, 4, 1), nn.Conv2d(4, 1, 3, padding=1)), tmp_path / "m.pt2")
    entry = json.loads(run("halo", "m.pt2", "--json", "--tile", "8").out)["entries"][1]
    assert entry["align"] == 4 and entry["tile_pad"] % 4 == 0
    assert entry["overlap"] is None
    assert "larger tiles are required" in run("halo", "m.pt2", "--tile", "8").out


def test_a_norm_over_the_image_is_named(run, tmp_path):
    write(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)), tmp_path / "m.pt2")
    outcome = run("halo", "m.pt2")
    assert "read the full image" in outcome.out and "group_norm" in outcome.out
    assert not json.loads(run("halo", "m.pt2", "--json").out)["entries"][0]["exact"]
