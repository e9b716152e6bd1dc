"""`demask optimize`: what it writes, what it says, what it refuses."""

import json

import pytest
import torch

import demask
import test_cli
from demask.cli.read_network import read_network
from demask.machine.clock import FEW, PAIRS
from demask.tune.optimized_module import Optimized

run, saved = test_cli.run, test_cli.saved  # fixtures
QUICK = ("--threads", 1, "--cache", "costs.json")


def outputs(path):
    given = read_network(path)
    return given.module(torch.ones(2, 3, 6, 7))


@pytest.mark.parametrize("name", ["fast.demask", "fast.pt2"])
def test_what_is_written_computes_the_same(run, saved, tmp_path, name):
    outcome = run("optimize", saved / "masked.pt2", "-o", name, *QUICK)
    assert outcome.code == 0, outcome.err
    assert "original" in outcome.out and "rounds in turns, 1 thread" in outcome.out
    torch.testing.assert_close(outputs(tmp_path / name), outputs(saved / "masked.pt2"))
    assert (tmp_path / "costs.json").exists()


def test_an_archive_keeps_the_form_and_its_reasons(run, saved, tmp_path):
    run("optimize", saved / "masked.pt2", "-o", "fast.demask", *QUICK)
    loaded = demask.load(tmp_path / "fast.demask")
    report = demask.report(loaded)
    assert report.speed is not None and report.speed.pairs in (FEW, PAIRS)
    assert report.decisions[0].chosen in report.decisions[0].seconds
    slower = report.speed.least < 0.97
    assert slower or isinstance(loaded, Optimized) or report.decisions[0].chosen.startswith("dem")


def test_json_is_one_object(run, saved):
    outcome = run("optimize", saved / "masked.pt2", "-o", "fast.demask", "--json", *QUICK)
    data = json.loads(outcome.out)
    assert data["verification"]["ok"] is True
    assert data["report"]["speed"]["threads"] == 1
    assert {"place", "chosen", "seconds"} == set(data["report"]["decisions"][0])


def test_the_example_of_the_help_runs(run, saved, tmp_path):
    help_text = run("optimize", "--help").out
    line = next(line for line in help_text.splitlines() if "demask optimize model.pt2" in line)
    (tmp_path / "model.pt2").write_bytes((saved / "masked.pt2").read_bytes())
    assert run(*line.split()[1:], "--cache", "costs.json").code == 0
