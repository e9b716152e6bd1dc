"""Every command with `--report` writes a page that has the numbers which it prints."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import demask
import test_cli
import test_cli_prune
from html_page import HtmlPage, numbers
from night import at_night
from test_cli_help import COMMANDS

run, few_digits, few = test_cli.run, test_cli.few_digits, test_cli_prune.few  # fixtures
CALLS = (
    "slim model.pt2 -o slim.pt2",
    "slim model.onnx -o slim.onnx --minimal",
    "inspect model.pt2",
    "inspect model.onnx",
    "optimize model.pt2 -o fast.demask --threads 1 --cache costs.json",
    "bench model.pt2 --no-compile --pairs 2 --threads 1",
    "verify model.pt2 model.onnx",
    "stream model.pt2 image.npy result.npy --memory 16MiB",
    "stream model.pt2 image.npy result.npy --memory 16MiB --plan",
    "halo model.pt2 --tile 64",
    "lower model.pt2 -o lowered.pt2",
    "raise model.pt2 -o raised.pt2",
    "pilot compare model.pt2 image.npy --by bits:8 --pairs 2",
    "pilot collect model.pt2 image.npy -o data.safetensors",
    "pilot condition model.pt2 --condition skip:0.5 --pilot bits:8 --unchecked",
)
SLOW = (
    "pilot explain model.pt2 image.npy --threads 1",
    "slim model.onnx -o slim.onnx --threads 1",
    "slim llama -o slim",
    "demo --runs 2",
    "prune digits -o small.pt2 --epochs 1 --tune 1 --rounds 2",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a masked network for images of any size, and an image."""
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 1, 1)).eval()
    with torch.no_grad():
        net[0].weight[:3], net[0].bias[:3], net[2].weight[:, 5] = 0, 0, 0
    x, size = torch.randn(2, 3, 32, 32), torch.export.Dim.AUTO
    shapes = ({0: size, 2: size, 3: size},)
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=shapes), folder / "model.pt2")
    demask.to_onnx(net, folder / "model.onnx", (x,))
    np.save(folder / "image.npy", torch.randn(2, 3, 64, 48).numpy())
    return folder


@pytest.mark.parametrize("call", [*CALLS, *at_night(*SLOW)])
def test_a_page_has_the_numbers_of_the_terminal(run, stored, tmp_path, request, call):
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    words = call.split()
    if "llama" in words:
        pytest.importorskip("transformers")
        from masked_folders import llama

        llama().save_pretrained(tmp_path / "llama")
    if words[0] in ("demo", "prune"):
        request.getfixturevalue({"demo": "few_digits", "prune": "few"}[words[0]])
    outcome = run(*words, "--report", "page.html")
    assert outcome.code == 0, outcome.err
    printed, _, last = outcome.out.rstrip().rpartition("\n")
    assert last == "report in page.html"
    page = HtmlPage(Path("page.html").read_text(encoding="utf-8"))
    assert numbers(printed) and not numbers(printed) - numbers(page.text)
    following = outcome.err.rstrip().rpartition("next: ")[2]
    assert following and f"Next {following}" in page.text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_with_a_report_is_called_here(name):
    has_report = any("--report" in option.opts for option in COMMANDS[name].params)
    assert has_report == any(call.startswith(f"{name} ") for call in (*CALLS, *SLOW))
