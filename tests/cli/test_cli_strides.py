"""`demask lower` and `demask raise`: what they write, what they say, what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import demask
import test_cli
from demask.cli.read_network import read_network
from demask.graph.result.module_calls import graph_of_calls

run, model = test_cli.run, test_cli.model  # fixtures


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> tuple[nn.Module, Path]:
    """A network, and a folder with its files."""
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 2, 1, 2), nn.AdaptiveAvgPool2d(1)).eval()
    x = torch.randn(1, 3, 12, 12)
    torch.export.save(torch.export.export(net, (x,)), folder / "model.pt2")
    demask.to_onnx(net, folder / "model.onnx", (x,))
    return net, folder


def strides(path) -> list[list[int]]:
    program = read_network(path).model
    graph = graph_of_calls(program) if isinstance(program, fx.GraphModule) else program.graph
    return [list(n.args[3]) if len(n.args) > 3 else [1, 1] for n in graph.nodes if "conv2d" in str(n.target)]


@pytest.mark.parametrize("suffix", [".pt2", ".onnx", ".demask"])
def test_there_and_back(run, model, tmp_path, suffix):
    kind = ".onnx" if suffix == ".onnx" else ".pt2"
    outcome = run("lower", f"model{kind}", "-o", f"low{suffix}", "--target", "max_pool")
    assert outcome.code == 0, outcome.err
    assert "select_max_pool" in outcome.out and f"written to low{suffix}" in outcome.out
    assert strides(tmp_path / f"low{suffix}") == [[1, 1], [1, 1]]
    outcome = run("raise", f"low{suffix}", "-o", f"back{suffix}", "--json")
    assert outcome.code == 0, outcome.err
    assert len([n for n in json.loads(outcome.out)["notes"] if "stride [2, 2]" in n]) == 2
    assert strides(tmp_path / f"back{suffix}") == [[2, 2], [2, 2]]
    given, x = read_network(tmp_path / f"back{suffix}"), torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        torch.testing.assert_close(given.module(x), model(x))


def test_a_target_of_ones_own(run, model, tmp_path):
    (tmp_path / "own.toml").write_text('ops = ["slice"]\n')
    outcome = run("lower", "model.pt2", "-o", "low.pt2", "--target", "own.toml")
    assert outcome.code == 0 and "slice, the only sound form" in outcome.out
    (tmp_path / "none.toml").write_text('ops = ["add"]\n')
    outcome = run("lower", "model.pt2", "-o", "none.pt2", "--target", "none.toml")
    assert outcome.code == 2 and "has no form that is sound" in outcome.err
    assert not (tmp_path / "none.pt2").exists()
