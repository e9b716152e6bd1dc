"""Segments cut into tasks: a task reads the rows around its stripe again, so no task may overwrite
what another reads, and the plan is the same for one process and for several."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from demask.errors import BudgetTooSmall
from demask.exec.analysis.flow import flow_of
from demask.exec.planning.plan_memory import lay_out
from demask.exec.planning.planner import Planner
from demask.ops import TABLE
from demask.traverse import stream
from demask.traverse.captured_size import captured, network_of
from demask.traverse.execution.stream_job import StreamOptions, prepare_stream
from demask.traverse.stream import prepare
from tiled_networks import NETWORKS, decoder

PLENTY = "256MiB"


def in_bands(flow, rows):
    """The segments between forced cuts, in bands of so many rows, all maps in memory."""
    planner = Planner(flow, recompute=False, spills=False)
    cuts = sorted({0, *planner.forced, len(planner.calls)})
    return [planner.build_segment(a, b, "bands", rows, 0) for a, b in pairwise(cuts)]


def least(model, source, target):
    """The least budget of a stream; what the compiler of kernels takes is named at the second."""
    budget = 1
    for _ in range(2):
        try:
            prepare(model, source, target, memory=budget, stripe=8)
        except BudgetTooSmall as error:
            budget = int(error.least * 1.01)
    return budget


def test_no_map_overwrites_another_in_stripes():
    flow = flow_of(captured(network_of(decoder()), (1, 4, 48, 20), torch.float32), TABLE)
    whole = lay_out(flow, in_bands(flow, 4))
    assert any(placed.segment.over for placed in whole.segments)  # else this tests nothing
    striped = [replace(s, stripe=16 if s.mode == "bands" else 0) for s in in_bands(flow, 4)]
    assert not any(placed.segment.over for placed in lay_out(flow, striped).segments if placed.segment.stripe)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("budget", ["least", PLENTY])
def test_stripes_compute_what_the_network_computes(name, budget, tmp_path):
    make, shape = NETWORKS[name]
    model, x = make(), np.random.default_rng(0).standard_normal(shape, np.float32)
    np.save(tmp_path / "x.npy", x)
    source, target = tmp_path / "x.npy", tmp_path / "y.npy"
    if budget == "least":
        budget = least(model, source, target)
    stream(model, source, target, memory=budget, stripe=8)
    with torch.no_grad():
        expected = model(torch.from_numpy(x)).numpy()
    # Kernels of other sizes, and statistics summed in another order, round differently.
    limit = 64 * 2.0**-24 * np.abs(expected).max()
    assert np.abs(np.load(target) - expected).max() <= limit


@pytest.mark.parametrize("budget", ["16MiB", PLENTY])
def test_one_process_and_several_have_the_same_plan(budget, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 4, 48, 20), np.float32))
    jobs = [
        prepare_stream(
            decoder(),
            tmp_path / "x.npy",
            tmp_path / "y.npy",
            StreamOptions(memory=budget, stripe=16, shared=shared),
            table=TABLE,
        )
        for shared in (False, True)
    ]
    assert jobs[0].plan == jobs[1].plan
    assert jobs[0].identity == jobs[1].identity
    assert jobs[0].plan.peak <= jobs[0].plan.budget
