"""The benchmark of sparse products on GPUs: it compares before it times, and says what it timed."""

from __future__ import annotations

import doctest

import pytest
import torch

import dlmc
from benchmarks.common.ledger import Table
from benchmarks.sparse import gpu_problems, gpu_sparse
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

    def wrong(case):
        result, words = honest(case)
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
