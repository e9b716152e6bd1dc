"""`demask stream`: what it writes, what it says, what it refuses."""

import json

import numpy as np
import pytest
import torch

import test_cli
import test_traverse_stream
from demask.progress import progress
from demask.traverse.stream import prepare
from test_traverse_stream import BUDGET, net

run, files = test_cli.run, test_traverse_stream.files  # fixtures


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
        (("image.npy", "result.png"), "ends in .npy"),
        (("image.npy", "no/result.npy"), "does not exist"),
        (("missing.npy", "result.npy"), "no such file"),
        (("image.npy", "result.npy", "--memory", "much"), "amount of memory"),
        (("image.npy", "result.npy", "--memory", "1MiB"), "least budget"),
        (("image.npy", "result.npy", "--output", "int4"), "expected output"),
        (("image.npy",), ""),
    ],
)
def test_the_command_exits_with_2_and_leaves_nothing(run, files, tmp_path, words, complaint):
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
