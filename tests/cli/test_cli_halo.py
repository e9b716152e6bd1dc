"""`demask halo`: the numbers that other tools ask for."""

import json

import pytest
import torch
from torch import nn

import test_cli

run = test_cli.run  # fixture
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
    assert "read the whole image" in outcome.out and "group_norm" in outcome.out
    assert not json.loads(run("halo", "m.pt2", "--json").out)["entries"][0]["exact"]


@pytest.mark.parametrize("words", [("missing.pt2",), ("--tile", "0", "x.pt2")])
def test_wrong_words_end_with_2(run, words):
    outcome = run("halo", *words)
    assert outcome.code == 2 and "Traceback" not in outcome.err
