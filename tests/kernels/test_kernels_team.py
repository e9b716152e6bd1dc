"""Threads that run a tape: refused, late, in a forked process; calls without memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import count

import numpy as np
import pytest
import torch

from demask.exec.steps import reference as dense
from demask.exec.tape.segment_plan import SegmentPlan, SpareOutputs
from demask.exec.tape.tape import TapeArena
from demask.kernels import thread_team as team
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm import isa
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.thread_team import SIZES, SpareTasks
from demask.pilot.chains.chain_op import chain
from demask.sparse.segment.segment_op import segment
from sparse_cases import layer, matrix

LIMIT = 20  # seconds


def case(threads: int):
    """A plan of a layer, its input, what it computes."""
    program, weights = layer("tokens", matrix(64, 48, 0.5, dtype=torch.float32))
    x = torch.randn(64, 48)
    wanted = dense.run(program, [x], weights)[0]
    return SegmentPlan.of(program, weights, [x], threads), x, wanted


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_threads_that_the_system_refuses(monkeypatch, refused):
    """Those that there are share the work; none of them is left behind."""
    monkeypatch.setattr(team, "openmp", lambda: None)
    made, x, wanted = case(4)
    start, number, before = threading.Thread.start, count(1), threading.active_count()

    def limited(self):
        if next(number) == refused:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    torch.testing.assert_close(made([x])[0], wanted)
    assert threading.active_count() == before


def test_a_thread_that_waits_for_long_sleeps():
    """For the second thread of an empty tape, which comes half a second later."""
    job = team.Job(np.zeros(1, team.ENTRY), np.zeros(3, np.int64), 2, np.zeros(1, np.int64))
    late = threading.Timer(0.5, job.numbered, (job.address, 1, 2))
    late.start()
    begin = time.thread_time()
    job.numbered(job.address, 0, 2)
    used = time.thread_time() - begin
    late.join()
    assert used < 0.05


def test_a_forked_process_has_a_team_of_its_own():
    """OpenMP's threads are not there, and whoever asks OpenMP for them waits forever."""
    made, x, wanted = case(2)
    made([x])
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if torch.allclose(made([x])[0], wanted, atol=1e-5) else 1)
        finally:
            os._exit(2)
    for _ in range(100 * LIMIT):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the forked process waits for threads that it does not have")
    assert os.waitstatus_to_exitcode(status) == 0


def test_no_memory_at_a_call(monkeypatch):
    """Plans that get no memory are left for torch's ops, and tried again at the next call."""
    program, weights = layer("tokens", matrix(64, 48, 0.5, dtype=torch.float32))
    text, x, w = program.text(), torch.randn(3, 48), torch.randn(64, 48)

    def answers():
        return [*segment([x], weights, text), chain(x, [w], "columns")]

    def none(self, size):
        raise NoPlan("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TapeArena, "__init__", none)
        found = answers()
    for one, wanted in zip(found, answers(), strict=True):
        torch.testing.assert_close(one, wanted)


def test_windows_runs_on_torch(monkeypatch):
    """Where the system lacks what the kernels need, one warning says so."""
    monkeypatch.setattr("sys.platform", "win32")
    llvm.is_installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Linux or macOS"):
            assert not llvm.is_installed()
        program, weights = layer("tokens", matrix(8, 8, 0.5, dtype=torch.float32))
        x, w = torch.randn(2, 8), torch.randn(4, 8)
        assert torch.equal(segment([x], weights, program.text())[0], dense.run(program, [x], weights)[0])
        linear = torch.nn.functional.linear(x, w)
        assert torch.equal(chain(x, [w], "columns"), linear)
    finally:
        llvm.is_installed.cache_clear()


def test_registers_of_macs(monkeypatch):
    """LLVM's name of their instruction set is arm64."""
    for name, value in {
        "get_process_triple": "arm64-apple-darwin23",
        "get_host_cpu_features": {},
        "get_host_cpu_name": "apple-m1",
    }.items():
        kind = type("Features", (dict,), {"flatten": lambda self: ""})
        given = kind() if value == {} else value
        monkeypatch.setattr(isa.llvm, name, lambda given=given: given)
    isa.host.cache_clear()
    try:
        assert isa.host().registers == 32
    finally:
        isa.host.cache_clear()


def test_calls_after_a_stall_are_alone():
    """For a multiple of the time that was lost, longer where stalls follow each other; jitter and
    small losses are no stalls."""
    company = team.Company()
    company.note(0.0, 0.002, 0.001)  # twice as slow
    company.note(0.0, 0.0009, 0.0001)  # short
    assert company.until == 0.0
    company.note(1.0, 1.011, 0.001)
    assert company.until == pytest.approx(1.011 + company.LEAST * 0.010)
    begin = company.until + 0.001  # together for a shorter time than it was alone
    company.note(begin, begin + 0.011, 0.001)
    assert company.until == pytest.approx(begin + 0.011 + 2 * company.LEAST * 0.010)
    begin = company.until + 1.0
    company.note(begin, begin + 0.011, 0.001)
    assert company.until == pytest.approx(begin + 0.011 + company.LEAST * 0.010)
    company.note(begin, begin + 100, 0.001)
    assert company.alone == company.LONGEST


def test_the_caller_alone_computes_the_same():
    """Equal bits while others use the cores, in every call: claims are reset."""
    made, x, _ = case(2)
    inputs = [x + k for k in range(3)]
    together = [made([y])[0] for y in inputs]
    job, counts = made.batches[0].spare[0].job, []
    job.company.until = float("inf")
    start = job.start
    job.start = lambda address, threads: (counts.append(threads), start(address, threads))
    for y, wanted in zip(inputs, together, strict=True):
        assert torch.equal(made([y])[0], wanted)
    assert counts == [1, 1, 1]


def test_outputs_are_float32_in_memory_of_their_own():
    """Also those that are allocated ahead, and with another default dtype; in inference mode they
    are inference tensors, elsewhere they are not."""
    made, x, wanted = case(1)
    made.outputs = SpareOutputs([tuple(wanted.shape)])
    made.outputs.count = 3
    torch.set_default_dtype(torch.float64)
    try:
        found = [made([x])[0] for _ in range(4)]
        with torch.inference_mode():
            found += (inference := [made([x])[0] for _ in range(4)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({y.untyped_storage().data_ptr() for y in found}) == 8
    assert [y.is_inference() for y in found] == [False] * 4 + [True] * 4 and len(inference) == 4
    for y in found:
        torch.testing.assert_close(y, wanted)


def test_a_task_is_one_threads_until_it_is_put_back() -> None:
    spare = SpareTasks[int, object]()
    first, second = spare.take(1, object), spare.take(1, object)
    assert first is not second
    spare.put(1, first)
    assert spare.take(2, object) is not first
    assert spare.take(1, object) is first
    assert spare.take(1, object) is not first


def test_tasks_of_many_sizes_are_forgotten() -> None:
    spare = SpareTasks[int, object]()
    for key in range(3 * SIZES):
        spare.put(key, spare.take(key, object))
    assert len(spare.tasks) <= SIZES
