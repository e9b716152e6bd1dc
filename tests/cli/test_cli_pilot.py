"""`demask pilot`: what its commands print and write, and what they refuse."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import demask
import test_cli
from demask.pilot import ExecutionData
from pilot_networks import networks

run, model = test_cli.run, test_cli.model  # fixtures


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[nn.Module, Path]:
    """A network, and a folder with its files and inputs."""
    folder = tmp_path_factory.mktemp("stored")
    net, args = networks()["residual"]
    batch = torch.export.Dim("batch")
    exported = torch.export.export(net, args, dynamic_shapes=({0: batch},))
    torch.export.save(exported, folder / "model.pt2")
    demask.save(demask.demask(net, args), folder / "model.demask")
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    np.save(folder / "images.npy", images.numpy())
    np.savez(folder / "images.npz", x=images.numpy())
    save_file({"any": images.float() / 255}, folder / "images.safetensors")
    return net, folder


def test_compare(run, model, tmp_path):
    words = ("--by", "bits:8", "--by", "downsample:2:area", "--pairs", "0")
    outcome = run("pilot", "compare", "model.pt2", "images.npy", *words)
    assert outcome.code == 0, outcome.err
    assert "bits:8" in outcome.out and "5 inputs" in outcome.out
    outcome = run("pilot", "compare", "model.demask", "images.npz", *words, "--json", "--batch", 2)
    data = json.loads(outcome.out)
    assert [row["by"] for row in data["rows"]] == ["bits:8", "downsample:2:area"]
    assert data["inputs"] == 5 and data["rows"][0]["agreement"] == 1


def test_compare_draws(run, model, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    words = ("--by", "bits:8", "--by", "bits:2", "--pairs", "0", "--plot", "bars.png")
    outcome = run("pilot", "compare", "model.pt2", "images.safetensors", *words)
    assert outcome.code == 0, outcome.err
    assert image.imread(tmp_path / "bars.png").std() > 0.05


@pytest.mark.parametrize("source", ["model.pt2", "model.demask"])
def test_collect(run, model, tmp_path, source):
    more = ("--memory", "2000") if source == "model.demask" else ()
    outcome = run("pilot", "collect", source, "images.npy", "-o", "data.safetensors", *more)
    assert outcome.code == 0, outcome.err
    assert "written to data.safetensors" in outcome.out
    data = ExecutionData.load(tmp_path / "data.safetensors")
    expected = demask.pilot.collect(model, (torch.from_numpy(np.load("images.npy")) / 255,))
    assert list(data.magnitudes) == list(expected.magnitudes)
    for name, found in data.magnitudes.items():
        torch.testing.assert_close(found, expected.magnitudes[name])
    assert (data.slices > 1) == bool(more) and "images.npy, 5 inputs" in data.source


def test_collect_as_json_and_picture(run, model, tmp_path):
    pytest.importorskip("matplotlib")
    words = ("-o", "data.safetensors", "--per", "tile:8", "--plot", "data.png", "--json")
    outcome = run("pilot", "collect", "model.pt2", "images.npy", *words)
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    assert data["per"] == "tile:8" and len(data["mean"]["stem"]) == 4
    assert (tmp_path / "data.png").stat().st_size > 1000


def test_a_folder_of_images(run, model, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    pixels = np.load(tmp_path / "images.npy").transpose(0, 2, 3, 1)
    for k, one in enumerate(pixels):
        image.fromarray(one).save(tmp_path / "photos" / f"{k}.png")
    outcome = run("pilot", "compare", "model.pt2", "photos", "--by", "bits:8", "--pairs", 0)
    assert outcome.code == 0, outcome.err
    again = run("pilot", "compare", "model.pt2", "images.npy", "--by", "bits:8", "--pairs", 0)
    assert outcome.out == again.out
    image.fromarray(pixels[0][:8]).save(tmp_path / "photos" / "9.png")
    outcome = run("pilot", "compare", "model.pt2", "photos")
    assert outcome.code == 2 and "images of one size" in outcome.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("compare", "none.pt2", "images.npy"), "no such file"),
        (("compare", "model.pt2", "none.npy"), "no such file"),
        (("compare", "model.pt2", "data.txt"), "folder of images"),
        (("compare", "model.pt2", "small.npy"), "expected input x float32 [any, 3, 16, 16]"),
        (("compare", "model.pt2", "images.npy", "--by", "bits"), "such as 'bits:8'"),
        (("compare", "model.pt2", "images.npy", "--plot", "a.txt"), "ends in .svg"),
        (("collect", "model.pt2", "images.npy", "-o", "data.txt"), "ends in .safetensors"),
        (("collect", "model.pt2", "images.npy", "-o", "d.safetensors", "--per", "x"), "parts per"),
        (
            ("collect", "model.pt2", "images.npy", "-o", "d.safetensors", "--memory", "1MB"),
            "demask slim model.pt2 -o model.demask",
        ),
        (
            ("collect", "model.demask", "images.npy", "-o", "d.safetensors", "--memory", "9"),
            "weights of the largest layer",
        ),
    ],
)
def test_bad_input_exits_with_2_and_leaves_nothing(run, model, tmp_path, words, complaint):
    np.save(tmp_path / "small.npy", np.zeros((2, 3, 8, 8), np.float32))
    (tmp_path / "data.txt").write_text("1 2 3")
    before = sorted(p.name for p in tmp_path.iterdir())
    outcome = run("pilot", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err and "Traceback" not in outcome.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_explain(run, model, monkeypatch):
    from demask.pilot import explain
    from demask.pilot.chains import chain_cost as cost

    monkeypatch.setattr(
        explain if hasattr(explain, "measured") else sys.modules["demask.pilot.explain"],
        "measured",
        lambda costs: cost.NOMINAL,
    )
    monkeypatch.setattr(cost.Costs, "save", lambda self: None)
    outcome = run("pilot", "explain", "model.pt2", "images.npy", "--threads", 1, "--json")
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    assert data["lines"] and {"pilot", "condition", "use", "why"} <= set(data["lines"][0])


def test_condition(run, model, tmp_path):
    words = ("pilot", "condition", "model.pt2", "--condition")
    outcome = run(*words, "skip:0.5", "--pilot", "bits:8", "--unchecked")
    assert outcome.code == 0, outcome.err
    assert "skip:0.5 by bits:8" in outcome.out
    outcome = run(*words, "columns", "--data", "images.npy", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["decisions"]
    outcome = run(*words, "dance")
    assert (outcome.code, outcome.out) == (2, "") and "'dance'" in outcome.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["compare", "collect", "condition"])
def test_the_examples_in_the_help_run(run, model, command):
    pytest.importorskip("matplotlib")
    shown = run("pilot", command, "--help")
    found = test_cli.examples(shown.out.replace("Examples:", "Example:"))
    assert found
    for words in found:
        quick = ["--pairs", "0"] if command == "compare" else []
        outcome = run(*words[1:], *quick)
        assert outcome.code == 0, outcome.err
