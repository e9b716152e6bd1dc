"""`demask prune`: data, networks, training, results, and each way to use it wrong."""

import json
import zipfile
from dataclasses import replace
from io import BytesIO

import pytest
import torch

import demask
import test_cli
from demask.cli import pruning, pruning_inputs
from demask.cli.commands import prune as command
from demask.cli.pruning import Curves
from demask.cli.pruning_inputs import read_images
from demask.errors import BadInput
from demask.pages.html import draw_curves

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
run = test_cli.run  # a fixture

SHORT = ("--epochs", "1", "--tune", "1", "--rounds", "2")


@pytest.fixture
def few(monkeypatch):
    """The digits, cut down to a few batches."""
    every = read_images("digits", None, None, 0)
    data = replace(every, train=every.train.rows(torch.arange(320)), test=every.test.rows(torch.arange(64)))
    monkeypatch.setattr(pruning_inputs, "_read_digits", lambda seed: data)
    monkeypatch.setattr(pruning_inputs, "DIGITS_WIDTH", 8)
    return data


def test_digits_are_pruned_demasked_and_written(run, few, tmp_path):
    outcome = run("prune", "digits", "-o", "small.pt2", "--page", "page.html", *SHORT)
    assert outcome.code == 0, outcome.err
    rows = {line.split("  ")[0].strip(): line for line in outcome.out.splitlines()}
    assert {"parameters", "MACs per image", "bytes", "test accuracy"} <= set(rows)
    assert "written to small.pt2" in outcome.out and "report in page.html" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100
    slim = torch.export.load(tmp_path / "small.pt2").module()
    dense = pruning_inputs.build_network(None, 10, 1)
    assert count(slim) < 0.5 * count(dense)
    assert slim(torch.zeros(5, 1, 16, 16)).shape == (5, 10)
    page = (tmp_path / "page.html").read_text()
    assert page.count('svg class="chart"') >= 2 and page.count(": pruned</title>") == 2 * 2
    assert page.count(": demasked</title>") == 2 and "http" not in page


def count(network):
    return sum(p.numel() for p in network.parameters())


def test_json_and_an_archive(run, few, tmp_path):
    outcome = run("prune", "digits", "-o", "small.demask", "--json", "--macs", "0.4", "--score", "taylor", *SHORT)
    assert outcome.code == 0, outcome.err
    data = json.loads(outcome.out)
    assert data["after"]["macs"] <= 0.4 * data["before"]["macs"]
    assert data["verification"]["ok"] is True
    assert set(data["accuracies"]) == {"dense", "masked", "tuned"}
    assert [what for _, what in data["curves"]["events"]] == ["pruned", "pruned", "demasked"]
    steps = [step for step, _ in data["curves"]["losses"]]
    assert steps == list(range(1, 11))  # 2 epochs of 320 // 64 steps
    slim = demask.load(tmp_path / "small.demask")
    assert not demask.report(slim).nothing_removed


@pytest.mark.nightly
def test_a_number_of_macs_is_of_one_image(run, few):
    network = pruning_inputs.build_network(None, 10, 1)
    per_image = demask.demask(network, (torch.zeros(1, 1, 16, 16),)).demasked.before.macs
    outcome = run("prune", "digits", "-o", "b.pt2", "--json", "--macs", str(per_image // 2), *SHORT)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["before"]["macs"] == 2 * per_image
    assert 0.6 * per_image < found["after"]["macs"] <= per_image


def test_training_goes_on_where_it_was(few):
    """The optimizer is carried over: its moments are those of the small network's weights."""
    seen = []

    class Watched(pruning.Training):
        def run(self, steps, title):
            if title == "training the small network":
                seen.append({p: self.optimizer.state[p]["exp_avg"].shape for p in self.network.parameters()})
            super().run(steps, title)

    torch.manual_seed(0)
    network = pruning_inputs.build_network(None, 10, 1)
    watched = Watched(network, few, pruning.TrainingOptions(), lambda title, done=1: None)
    result = pruning.prune_classifier(watched, pruning.PruneOptions(1, 1, 2))
    [shapes] = seen
    assert shapes == {p: p.shape for p in result.network.parameters()}


# -- data ------------------------------------------------------------------------------------------


def picture(color, size=(8, 8), kind="JPEG"):
    data = BytesIO()
    image.new("RGB", size, color).save(data, kind)
    return data.getvalue()


def colors(folder, count=6, size=(8, 8)):
    """Red and blue pictures, in folders of their names."""
    for name in ("blue", "red"):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            (folder / name / f"{k:04}.jpg").write_bytes(picture(name, size))
    return folder


def test_folders_and_zips_have_a_folder_for_each_class(tmp_path):
    folder = colors(tmp_path / "colors")
    with zipfile.ZipFile(tmp_path / "colors.zip", "w") as archive:
        for file in folder.rglob("*.jpg"):
            archive.write(file, f"root/{file.relative_to(folder)}")
        archive.writestr("root/README.md", "hello")
    for source in (folder, tmp_path / "colors.zip"):
        data = read_images(str(source), None, None, 0)
        assert data.classes == ("blue", "red")
        assert (len(data.train), len(data.test)) == (10, 2)
        assert data.train.images.shape == (10, 3, 8, 8) and data.train.images.dtype == torch.uint8
        red, green, blue = data.train.images.float().mean((2, 3)).T
        assert bool(((red > blue) == data.train.labels.bool()).all()) and green.max() < 9


def test_test_images_may_come_from_elsewhere(tmp_path):
    train, test = colors(tmp_path / "all" / "train"), colors(tmp_path / "all" / "val", 2)
    for data in (read_images(str(tmp_path / "all"), None, None, 0), read_images(str(train), test, None, 0)):
        assert (len(data.train), len(data.test)) == (12, 4)
        assert data.test.labels.tolist() == [0, 0, 1, 1]


def test_sides(tmp_path):
    folder = colors(tmp_path / "colors")
    (folder / "red" / "large.png").write_bytes(picture("red", (12, 16), "PNG"))
    with pytest.raises(BadInput, match=r"several sizes \(8 x 8, 16 x 12\).*--side 32"):
        read_images(str(folder), None, None, 0)
    assert read_images(str(folder), None, 10, 0).train.images.shape[2:] == (10, 10)


def test_bad_data(tmp_path):
    folder = colors(tmp_path / "colors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.jpg").write_bytes(picture("red"))
    (tmp_path / "text.zip").write_text("no zip")
    other = colors(tmp_path / "other")
    (other / "red").rename(other / "green")
    broken = colors(tmp_path / "broken")
    (broken / "red" / "0000.jpg").write_bytes(picture("red")[:40])
    (tmp_path / "one" / "red").mkdir(parents=True)
    (tmp_path / "one" / "red" / "a.jpg").write_bytes(picture("red"))
    with zipfile.ZipFile(tmp_path / "damaged.zip", "w") as archive:
        archive.writestr("red/a.jpg", picture("red"))
    data = bytearray((tmp_path / "damaged.zip").read_bytes())
    data[200] ^= 255
    (tmp_path / "damaged.zip").write_bytes(data)
    for source, test, words in (
        ("one", None, r"has the classes \['red'\]: expected two or more"),
        ("damaged.zip", None, r"red/a\.jpg is damaged or encrypted .*copy the zip again"),
        ("nowhere", None, 'no such folder or file: .*the word "digits"'),
        ("text.zip", None, "expected a zip of class/name.jpg"),
        ("empty", None, "has no images"),
        ("flat", None, "images outside of folders"),
        ("broken", None, r"red/0000\.jpg: not an image"),
        (folder.name, other, "has classes that .* lacks: green"),
    ):
        with pytest.raises(BadInput, match=words):
            read_images(str(tmp_path / source), test, None, 0)


NETWORK = """
from torch import nn

def tiny(num_classes):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(8, num_classes))

def nothing():
    return 3

def fails():
    raise ValueError("no luck")
"""


def test_a_network_of_ones_own_on_images_of_ones_own(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "colors_network.py").write_text(NETWORK)
    colors(tmp_path / "colors", 20)
    words = ("prune", "colors", "-o", "a.pt2", "--network", "colors_network:tiny", "--batch", "8")
    outcome = run(*words, "--augment", "--json", *SHORT)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["after"]["macs"] < json.loads(outcome.out)["before"]["macs"]
    torch.manual_seed(1)
    import colors_network

    state = colors_network.tiny(2).state_dict()
    torch.save({n: v for n, v in state.items() if "num_batches" not in n}, tmp_path / "w.pt")
    outcome = run(*words, "--weights", "w.pt", "--json", "--tune", "1", "--normalize", "imagenet")
    assert outcome.code == 0, outcome.err
    assert len(json.loads(outcome.out)["curves"]["losses"]) == 4  # no epoch before
    torch.save({"0.weight": torch.ones(8, 3, 3, 3)}, tmp_path / "few.pt")
    torch.save({**state, "more": torch.ones(1)}, tmp_path / "more.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, complaint in (
        ("few.pt", "lacks 0.bias"),
        ("more.pt", "has unknown more"),
        ("text.pt", "does not fit"),
        ("none.pt", "cannot read none.pt"),
    ):
        outcome = run(*words, "--weights", name)
        assert outcome.code == 2 and complaint in outcome.err, outcome.err
    for name, complaint in (
        ("tiny", "MODULE:FUNCTION"),
        ("no_such:f", "No module"),
        ("colors_network:none", "has no attribute"),
        ("colors_network:nothing", "to return an nn.Module, got int"),
        ("colors_network:fails", "ValueError: no luck"),
    ):
        outcome = run(*words[:4], "--network", name)
        assert outcome.code == 2 and complaint in outcome.err, outcome.err
    assert run(*words[:4]).err.startswith("demask: expected --network MODULE:FUNCTION")


def test_augmented_images_are_the_images_moved():
    x = torch.arange(2 * 3 * 9 * 9.0).reshape(2, 3, 9, 9) + 1
    random = torch.Generator().manual_seed(0)
    for _ in range(8):
        moved = pruning._mirror_and_shift(x, random)
        assert moved.shape == x.shape
        for before, after in zip(x, moved, strict=True):
            inside = after[:, (after[0] != 0).any(1)][:, :, (after[0] != 0).any(0)]
            either = [before, before.flip(2)]
            assert any(
                bool(
                    (e.unfold(1, inside.shape[1], 1).unfold(2, inside.shape[2], 1) == inside[:, None, None])
                    .all((0, 3, 4))
                    .any()
                )
                for e in either
            )


# -- options and curves ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("-o", "a.onnx"), "ends in .pt2 or .demask"),
        (("-o", "missing/a.pt2"), "does not exist"),
        (("-o", "a.pt2", "--page", "a.txt"), "ends in .html"),
        (("-o", "a.pt2", "--amount", "1.5"), "--amount above 0 and below 1"),
        (("-o", "a.pt2", "--amount", "0.5", "--ms", "1"), "exclude one another"),
        (("-o", "a.pt2", "--normalize", "mine"), "data, imagenet or none"),
        (("-o", "a.pt2", "--score", "best"), "one of l1, l2, taylor"),
        (("-o", "a.pt2", "--structure", "layer", *SHORT), "expected a structure of channel"),
        (("-o", "a.pt2", "--macs", "9", *SHORT), "budget"),
    ],
)
def test_bad_options_write_nothing(run, few, tmp_path, words, complaint):
    outcome = run("prune", "digits", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert complaint in outcome.err and "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_curves_are_drawn_to_scale():
    curves = Curves([(1, 2.0), (2, 1.0), (4, float("nan"))], [(2, 0.5)], [(2, "pruned <b>")])
    svg = draw_curves(curves.charts())
    assert "pruned &lt;b&gt;" in svg and "nan" not in svg
    assert svg.count("<polyline") == 2
    assert draw_curves(Curves().charts()).count("<svg") == 2


def test_the_examples_in_the_help_run(run, few, monkeypatch):
    monkeypatch.setattr(command, "DIGITS_EPOCHS", 1.0)
    monkeypatch.setattr(command, "DIGITS_TUNE", 1.0)
    lines = [line.split() for line in run("prune", "--help").out.splitlines()]
    commands = [words[1:] for words in lines if words[:2] == ["demask", "prune"]]
    assert len(commands) == 2
    for words in commands:
        outcome = run(*words)
        assert outcome.code == 0, outcome.err
