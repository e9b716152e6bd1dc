"""The benchmark of sparse products on GPUs: it compares before it times, and says what it timed."""

from __future__ import annotations

import doctest
import json
from unittest import mock

import pytest
import torch

import dlmc
from benchmarks.common.ledger import Table
from benchmarks.sparse import gpu_problems, gpu_session, gpu_sparse
from demask.machine.clock import Timing
from interpreted import run_on

there = pytest.mark.skipif(not dlmc.DATA.exists(), reason="the patterns are in shared/data beside the project")


def test_examples_run():
    found = doctest.testmod(gpu_problems)
    assert found.failed == 0
    assert found.attempted > 0


@pytest.mark.parametrize("sparsity", [0.7, 0.9, 0.95])
def test_random_weights_vary_as_described(sparsity):
    mask = gpu_problems.draw_mask(2048, 2048, sparsity, torch.Generator().manual_seed(0)).float()
    assert mask.mean().item() == pytest.approx(1 - sparsity, abs=0.004)
    rows, columns = mask.sum(1), mask.sum(0)
    if sparsity == 0.9:
        assert (rows.std() / rows.mean()).item() == pytest.approx(0.25, abs=0.03)
        assert (columns.std() / columns.mean()).item() == pytest.approx(0.21, abs=0.03)


def check(device, task):
    """One small problem, and the same with a result that is wrong."""
    from benchmarks.sparse import gpu_contenders

    found = {p.task: p for p in gpu_problems.layers(((128, 128),), (4,), (0.9,))}
    row = gpu_sparse.measured(found[task], device, 0, 1)
    honest = gpu_contenders.ours_poisoned

    def wrong(case, choice=None):
        result, words = honest(case, choice)
        result.view(-1)[3] = torch.nan
        return result, words

    gpu_contenders.ours_poisoned = wrong
    try:
        return row, gpu_sparse.measured(found[task], device, 0, 1)
    finally:
        gpu_contenders.ours_poisoned = honest


@pytest.mark.nightly
def test_nothing_wrong_is_timed():
    row, wrong = run_on("cpu", check, "sddmm")
    assert row.errors["demask"] < 5e-3
    assert {"demask", "cuBLAS"} <= row.seconds.keys()
    assert "is wrong by nan" in wrong.not_run["demask"]
    assert not wrong.seconds
    page = gpu_sparse.page([row, wrong], ["another"])
    text = "\n".join(part for part in page.parts if isinstance(part, str))
    assert f"- demask, {wrong.choice} is wrong by nan: {wrong.problem.title}" in text
    assert "No time was left for 1: another." in text
    table = page.parts[2]
    assert isinstance(table, Table)
    assert [cells[0] for cells in table.rows] == [row.problem.title]


def check_sweep(device):
    """All our kernels on a small layer, without copies of its weights."""
    from benchmarks.sparse import gpu_contenders

    with mock.patch.object(gpu_contenders, "MOST", 1):
        return gpu_sparse.measured(gpu_problems.layer("spmm", 64, 64, 1, 0.9), device, 0, 1, sweep=1)


@pytest.mark.nightly
def test_a_session_times_every_kernel():
    row = run_on("cpu", check_sweep)
    assert {name.split()[0] for name in row.swept} == {"rows", "bitmap", "dense"}
    assert row.choice == min(row.swept, key=lambda name: row.swept[name].median)
    line = json.loads(gpu_session.stored(row))
    assert line["product"] == row.problem.title
    assert line["swept"].keys() == row.swept.keys()
    cells = gpu_session.network(0.7, 2, "cpu", 1, (1, 32, 48))
    assert cells[5] < 0.02  # bfloat16
    parts = gpu_session.page([row], [], [cells], "not run").parts
    assert [len(part.rows) for part in parts if isinstance(part, Table)][1:] == [1, 1, len(row.swept)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_session_without_a_gpu_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu_session", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu_session.main()
    assert "expected a GPU that torch sees" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_means_are_geometric():
    mask = torch.ones(1, 1)
    problem = gpu_problems.Problem("B", "", "", 1, 1, 1, 0.9, torch.float32, lambda _: mask)
    rows = [
        gpu_sparse.Row(problem, seconds={"demask": Timing(1e-5, 0, 0, 1), "cuSPARSE": Timing(s, 0, 0, 1)})
        for s in (1e-5, 4e-5)
    ]
    ((*_, goal, mean, least, most, faster, count),) = gpu_sparse.goals(rows)
    assert (goal, mean) == pytest.approx((3.0, 2.0))
    assert (least, most) == pytest.approx((1.0, 4.0))
    assert (faster, count) == (1, 2)


@there
def test_patterns_of_the_collection():
    found = list(gpu_problems.pruned(dlmc.DATA, 25))
    assert {p.n for p in found} >= {256, 2048}
    mask = found[0].make(torch.Generator())
    assert mask.shape == (found[0].m, found[0].k)
    assert 1 - mask.float().mean().item() == pytest.approx(found[0].sparsity, abs=1e-6)
