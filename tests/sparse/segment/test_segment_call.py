"""Segments called as optimized networks call them: the plan of the last call is used again only for
what it was made for."""

from __future__ import annotations

import threading

import pytest
import torch

from demask.exec.steps import reference as dense
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (
    activation_step,
    add_step,
    concat_step,
    flat_step,
    mean_step,
    pool_step,
    scale_step,
    select_step,
)
from demask.machine.clock import set_threads
from demask.sparse.segment import inline
from demask.sparse.segment.inline import bound
from sparse_cases import layer, matrix


class Called:
    """A bound layer that has been called, with its weights and input."""

    def __init__(self) -> None:
        self.program, weights = layer("tokens", matrix(64, 48, 0.5, dtype=torch.float32))
        self.weights = [w.clone() for w in weights]
        self.memory = torch.randn(2 * len(weights[0]))
        self.weights[0] = self.memory[: len(weights[0])].copy_(weights[0])
        self.x = torch.randn(5, 48)
        self.call, _ = bound({"inputs": 0, "weights": 1, "program": self.program.text()})
        self.check()
        self.check()

    def check(self, x: torch.Tensor | None = None) -> None:
        """The call computes what ATen ops do."""
        x = self.x if x is None else x
        wanted = dense.run(self.program, [x], self.weights)[0]
        with torch.no_grad():
            found = self.call([x], self.weights)[0]
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def written(c: Called) -> None:
    c.weights[0][1] += 1  # not one of those that are compared: only the version tells


def replaced(c: Called) -> None:
    c.old = c.weights[0].data
    c.weights[0].data = c.weights[0] * 2


def changed_uncounted(c: Called) -> None:
    c.weights[0].numpy()[...] *= 3


def other_tensors(c: Called) -> None:
    """Other elements of the same memory, from the same address on, of the same version."""
    values = c.weights[0]
    c.weights[0] = c.memory[::2]
    assert c.weights[0].data_ptr() == values.data_ptr()


CHANGES = (written, replaced, changed_uncounted, other_tensors)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights(change):
    c = Called()
    change(c)
    for _ in range(3):
        c.check()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(7, 48),
        torch.randn(1, 48),
        torch.randn(48, 5).T,
        torch.randn(5, 96)[:, ::2],
        torch.randn(2, 5, 48),
        torch.randn(5, 48).double(),
    ],
)
def test_other_inputs(x):
    c = Called()
    c.check(x)
    c.check()


def test_threads_and_weights_of_the_plan():
    """A plan is for a number of threads; one that nobody keeps is made anew."""
    c = Called()
    used = []
    known = c.call.__closure__
    for count in (1, 2, 1):
        with set_threads(count):
            c.check()
            (last,) = [cell.cell_contents for cell in known if type(cell.cell_contents).__name__ == "_KnownCall"]
            used.append(last.plan().threads)
    assert used == [1, 2, 1]


def test_a_tensor_of_a_number_that_was_used_before():
    """Freed weights forget the call, even where a new tensor has their number and address."""
    c = Called()
    (last,) = [cell.cell_contents for cell in c.call.__closure__ if type(cell.cell_contents).__name__ == "_KnownCall"]
    numbers = last.numbers
    c.weights[0] = c.weights[0] * 2
    last.numbers = list(map(id, c.weights))
    assert not last.are_alive and last.outputs([c.x], c.weights) is None and numbers
    c.check()


def test_two_threads_call_at_once():
    c, failures = Called(), []

    def work() -> None:
        x = torch.randn(5, 48)
        for _ in range(50):
            try:
                c.check(x)
            except AssertionError as error:
                failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_outputs_are_never_shared():
    """Small outputs are allocated for several calls, but each call has its own."""
    text = SegmentProgram(("tokens",), (activation_step(0, ("relu", ())),), (1,)).text()
    call, _ = bound({"inputs": 0, "weights": 1, "program": text})
    with torch.no_grad():
        outputs = [call([torch.full((2, 3), float(k))], [])[0] for k in range(20)]
    for k, y in enumerate(outputs):
        assert torch.equal(y, torch.full((2, 3), float(k)))


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (select_step(0, (0, 0, 3), padded=True), "image"),
        (select_step(0, (0, 0, 3), stride=(2, 2), padded=True), "image"),
        (select_step(0, (0, 0, 3), padded=True), "signal"),
        (select_step(0, (0, 0, 3), padded=True), "tokens"),
        (select_step(0, (0, 0, 3)), "pixels"),
        (concat_step((0, 1)), "image"),
        (add_step(0, 1, ("relu", ())), "tokens"),
        (scale_step(0, 1), "image"),
        (pool_step(0, True, (3, 3), (2, 2), (1, 1), ceil=True, counted=False), "image"),
        (pool_step(0, False, (2, 2), (2, 2)), "image"),
        (mean_step(0, False), "image"),
        (flat_step(0), "image"),
        (activation_step(0, ("gelu", ())), "signal"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.op,
)
def test_the_calls_of_a_step_name_no_size(step, kind, monkeypatch):
    """Steps are traced with the fewest channels, and their calls used for any number."""
    calls = inline._calls(step, kind)
    shape_of = inline._value_shape
    pixels = step.op == "flat"

    def larger(step, kind, channels):
        batch, *sizes = shape_of(step, kind, channels)
        return batch + 3, sizes[0] + 4, *(n if pixels else n + 4 for n in sizes[1:])

    monkeypatch.setattr(inline, "_value_shape", larger)
    inline._traced.cache_clear()
    assert inline._calls(step, kind).python_code("self").src == calls.python_code("self").src
    inline._traced.cache_clear()
