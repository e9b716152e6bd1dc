"""Recurrent layers in plans: at most 64 units in the last place of the largest element more than
float64, with the same bits for any number of threads and rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from random_segments import LAST, OPS, WIDTHS, SegmentDraft, outputs, same_bits, sees, stays_within_memory, widths
from torch import nn

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import call_step, conv_step
from demask.exec.tape import recurrent_layer
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tape_builder import TapeBuilder
from demask.kernels.llvm.isa import Isa
from segment_drafts import all_at_once, exact


def drawn(name: str, sizes: Sequence[int], given: bool, **flags: bool) -> tuple[SegmentDraft, int]:
    """One layer. sizes: steps, batch, features, hidden; given: whether there are initial states."""
    steps, batch, features, hidden = sizes
    x = (batch, steps, features) if flags.get("batch_first") else (steps, batch, features)
    states = [(1, batch, hidden)] * (OPS[name][1] * given)
    draft = SegmentDraft(x, *states, kind="tokens")
    return draft, draft.recurrent(name, 0, hidden, *range(1, 1 + len(states)), **flags)


UNITS = 64 * 2.0**-23
SIZES = [(1, 1, 1, 1), (50, 1, 3, 3), (9, 2, 5, 17), (3, 7, 40, 33), (2, 1, 128, 128), (17, 16, 2, 4)]


@pytest.mark.sampled(12)
@widths()
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layers(name: str, sizes: Sequence[int], isa: Isa) -> None:
    """With every combination of two flags: a third follows from them."""
    for biases in (True, False):
        for given in (True, False):
            flags = {"biases": biases, "batch_first": biases == given, "backwards": given}
            draft, y = drawn(name, sizes, given, **flags)
            same_bits(draft, y, isa=isa)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_layers_without_channels(name: str, batch_first: bool) -> None:
    """All of its inputs were removed: as with one that is zero."""
    (draft, y), (other, _) = (drawn(name, (4, 3, channels, 5), False, batch_first=batch_first) for channels in (0, 1))
    rows = 5 * OPS[name][0]
    other.weights[0] = torch.cat([torch.zeros(rows), draft.weights[0]])
    other.inputs[0] = torch.zeros_like(other.inputs[0])
    (actual,), (expected,) = (exact(one.program(y), one.weights, one.inputs) for one in (draft, other))
    assert actual.shape == expected.shape and torch.allclose(actual, expected, 0, 1e-15)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_rows_are_outputs_and_the_last_state(name: str, backwards: bool, batch_first: bool) -> None:
    """Those of the module of torch, which runs backwards on flipped values."""
    draft, y = drawn(name, (6, 3, 4, 5), False, batch_first=batch_first, backwards=backwards)
    (rows,) = outputs(draft, y)
    module = getattr(nn, name.upper())(4, 5, batch_first=batch_first)
    nn.utils.vector_to_parameters(draft.weights[0], module.parameters())
    time, x = int(batch_first), draft.inputs[0]
    with torch.no_grad():
        out, states = module(x.flip(time) if backwards else x)
    out = out.flip(time) if backwards else out
    last = states if name == "gru" else states[1]
    want = torch.cat([out, last.transpose(0, 1) if batch_first else last], time)
    assert torch.allclose(rows, want, 1e-5, 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    """Whatever rows are computed together, the sums of each are in one order."""
    draft, y = drawn(name, (5, 11, 6, 19), False)
    (whole,) = outputs(draft, y)
    x = draft.inputs[0]
    for first, end in ((0, 1), (1, 3), (4, 11)):
        draft.inputs = [x[:, first:end].contiguous()]
        assert torch.equal(outputs(draft, y)[0], whole[:, first:end])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_networks(batch: int, batch_first: bool) -> None:
    """Convolutions, layers in both directions, a linear layer; images are independent, or not."""
    draft = SegmentDraft((batch, 4, 19), kind="signal")
    pads = (0, 0), (1, 1)
    y = draft.append(conv_step(0, draft.weight(6, 12, 0.5), None, 6, (1, 3), padding=pads))
    axes = (0, 2, 1) if batch_first else (2, 0, 1)
    y = draft.call("permute", y, numbers=axes)
    both = [draft.recurrent("lstm", y, 5, batch_first=batch_first, backwards=way) for way in (False, True)]
    y = draft.cat(*(draft.outputs_of(way, batch_first) for way in both))
    y = draft.outputs_of(draft.recurrent("gru", y, 7, batch_first=batch_first), batch_first)
    y = draft.linear(y, 3)
    last = draft.call("slice", both[0], numbers=(int(batch_first), -1, LAST, 1))
    draft.check(threads=(1, 2, 3))
    draft.check(y, threads=(1, 2, 3))
    with all_at_once():
        draft.check(y, last, threads=(1, 2, 3))
    program = draft.program(y)
    alone = SegmentPlan.of(program, draft.weights, draft.inputs, 1).batches[0].runs
    assert batch_first or alone == 1


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("where", range(3))
def test_numbers_that_are_not_finite(name: str, where: int) -> None:
    """NaN and infinity spread as in torch, from the input and from each state."""
    if where > OPS[name][1]:
        return
    for number in (nan, inf, -inf):
        draft, y = drawn(name, (6, 3, 4, 5), True)
        draft.inputs[where].view(-1)[:: 7 if where else 23] = number
        (want,) = exact(draft.program(y), draft.weights, draft.inputs)
        (found,) = outputs(draft, y)
        assert torch.allclose(found.double(), want, 64 * UNITS, UNITS, equal_nan=True)


@pytest.mark.parametrize("name", OPS)
def test_large_and_small_numbers(name: str) -> None:
    draft, y = drawn(name, (4, 3, 4, 9), True)
    draft.inputs[0] *= torch.tensor([1e-40, 1e4, -1e30]).reshape(1, 3, 1)
    for state in draft.inputs[1:]:
        state *= torch.tensor([1e-39, 1.0, 1e3]).reshape(1, 3, 1)
    same_bits(draft, y)


@pytest.mark.parametrize("name", OPS)
def test_layers_stay_within_their_memory(name: str) -> None:
    """Reads of inputs and writes of outputs beside them would stop the process."""
    for sizes in ((7, 2, 3, 5), (1, 1, 1, 1), (3, 5, 8, 16)):
        for backwards in (False, True):
            draft, y = drawn(name, sizes, True, backwards=backwards)
            for isa in WIDTHS:
                stays_within_memory(draft.program(y), draft.weights, draft.inputs, 1, isa)


def test_outputs_are_a_slice_without_a_copy() -> None:
    """A layer that reads all outputs, and one that reads the last, of one batch."""
    draft, y = drawn("lstm", (20, 1, 4, 6), False)
    draft.linear(draft.outputs_of(y), 3)
    builder = TapeBuilder(draft.program(y + 2), draft.weights, draft.inputs, WIDTHS[0], 1)
    assert builder.estimate() > 0
    same_bits(draft, y + 2)


# ------------------------------------------------------------------------------ kernels and checks


@pytest.mark.parametrize(
    "name, shapes, numbers, count",
    [
        ("lstm", [(4, 3)], (2, 0, 0, 0), 40),
        ("lstm", [(4, 1, 3)], (2, 0, 0, 0), 41),
        ("lstm", [(4, 1, 3)], (0, 0, 0, 0), 40),
        ("lstm", [(4, 1, 3)], (2, 2, 0, 0), 40),
        ("lstm", [(4, 1, 3), (1, 1, 2)], (2, 0, 0, 0), 40),
        ("gru", [(4, 1, 3)], (2, 1, 0, 0), 30),
        ("gru", [(4, 1, 3), (1, 4, 2)], (2, 0, 0, 0), 30),
        ("gru", [(4, 1, 3), (1, 1, 2)], (2, 0, 1, 0), 30),
    ],
    ids=str,
)
def test_invalid_sizes(name: str, shapes: list, numbers: tuple, count: int) -> None:
    step = call_step(tuple(range(len(shapes))), name, "tokens", numbers, (0, 0, count))
    program = SegmentProgram(("tokens",) * len(shapes), (step,), (len(shapes),))
    with pytest.raises(BadInput):
        program.shapes(shapes)


def one_bias(real):
    return lambda self: [*real(self)[:3], torch.zeros(self.gate_count)]


@pytest.mark.parametrize(
    "name, wrong, test",
    [
        ("_parameters", one_bias, lambda: test_layers("gru", SIZES[2], WIDTHS[0])),
        ("backwards", lambda _: False, lambda: test_rows_are_outputs_and_the_last_state("lstm", True, False)),
    ],
    ids=["one bias", "always forwards"],
)
def test_a_planted_fault_is_seen(name: str, wrong, test) -> None:
    sees(recurrent_layer._RecurrentLayer, name, wrong, test)
