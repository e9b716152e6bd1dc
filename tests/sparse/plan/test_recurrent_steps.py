"""Recurrent layers in plans: at most 64 units in the last place of the largest element more than
float64, with the same bits for any number of threads and rows of a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf, nan

import pytest
import torch
from test_called_steps import outputs
from test_segment_moves import ISAS, widths
from test_token_steps import UNITS, TokenDraft, same_bits
from torch import Tensor, nn

from demask.errors import BadInput
from demask.kernels.cpu.recurrent import RecurrentKernel, most_rows
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, Isa
from demask.kernels.llvm.jit import assembly
from demask.sparse.plan.calls import recurrent_layer
from demask.sparse.plan.segment_plan import SegmentPlan
from demask.sparse.plan.tape_builder import TapeBuilder
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import CallStep, ConvStep
from guarded import guarded
from segment_drafts import all_at_once, check, compare, exact

OPS = {"lstm": (4, 2), "gru": (3, 1)}  # gates, states
LAST = 2**63 - 1


class RecurrentDraft(TokenDraft):
    """A draft with recurrent layers."""

    def recurrent(self, name: str, x: int, hidden: int, *states: int, biases: bool = True,
                  batch_first: bool = False, backwards: bool = False) -> int:  # fmt: skip
        rows, columns = OPS[name][0] * hidden, self.shape(x)[-1]
        shapes = [(rows, columns), (rows, hidden), *[(rows,)] * (2 * biases)]
        span = self.factors(*(self._drawn(*s).flatten() / hidden**0.5 for s in shapes))
        numbers = hidden, int(biases), int(batch_first), int(backwards)
        return self.append(CallStep((x, *states), name, "tokens", numbers, span))

    def outputs_of(self, x: int, batch_first: bool = False) -> int:
        """The outputs among the rows of a layer."""
        return self.call("slice", x, numbers=(int(batch_first), 0, -1, 1))


def drawn(
    name: str, sizes: Sequence[int], given: bool, **flags: bool
) -> tuple[RecurrentDraft, int]:
    """One layer. sizes: steps, batch, features, hidden; given: whether there are initial states."""
    steps, batch, features, hidden = sizes
    x = (batch, steps, features) if flags.get("batch_first") else (steps, batch, features)
    states = [(1, batch, hidden)] * (OPS[name][1] * given)
    draft = RecurrentDraft(x, *states, kind="tokens")
    return draft, draft.recurrent(name, 0, hidden, *range(1, 1 + len(states)), **flags)


SIZES = [
    (1, 1, 1, 1),
    (50, 1, 3, 3),
    (9, 2, 5, 17),
    (3, 7, 40, 33),
    (2, 1, 128, 128),
    (17, 16, 2, 4),
]


@pytest.mark.sampled(8)
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


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_networks(batch: int, batch_first: bool) -> None:
    """Convolutions, layers in both directions, a linear layer; images are independent, or not."""
    draft = RecurrentDraft((batch, 4, 19), kind="signal")
    pads = (0, 0), (1, 1)
    y = draft.append(ConvStep(0, draft.weight(6, 12, 0.5), None, 6, (1, 3), padding=pads))
    axes = (0, 2, 1) if batch_first else (2, 0, 1)
    y = draft.call("permute", y, numbers=axes)
    both = [draft.recurrent("lstm", y, 5, batch_first=batch_first, backwards=way)
            for way in (False, True)]  # fmt: skip
    y = draft.cat(*(draft.outputs_of(way, batch_first) for way in both))
    y = draft.outputs_of(draft.recurrent("gru", y, 7, batch_first=batch_first), batch_first)
    y = draft.linear(y, 3)
    last = draft.call("slice", both[0], numbers=(int(batch_first), -1, LAST, 1))
    for threads in (1, 2, 3):
        draft.check(threads=threads)
        draft.check(y, threads=threads)
        with all_at_once():
            draft.check(y, last, threads=threads)
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


def random_draft(seed: int) -> RecurrentDraft:
    """A random program of recurrent layers and calls between them."""
    draw = random.Random(seed)
    first = draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 12)
    draft = RecurrentDraft(first, kind="tokens", seed=seed)
    for _ in range(draw.randint(2, 8)):
        x = draw.randrange(1 + len(draft.steps))
        shape = draft.shape(x)
        alike = [v for v in range(1 + len(draft.steps)) if draft.shape(v)[:2] == shape[:2]]
        batch_first = draw.random() < 0.5
        match draw.choice(["layer", "layer", "layer", "linear", "slice", "cat", "permute", "norm"]):
            case "layer":
                name, hidden = draw.choice(list(OPS)), draw.randint(1, 20)
                wanted = 1, shape[0] if batch_first else shape[1], hidden
                states = [v for v in range(1 + len(draft.steps)) if draft.shape(v) == wanted]
                given = draw.choices(states, k=OPS[name][1]) if states else []
                draft.recurrent(name, x, hidden, *given, biases=draw.random() < 0.5,
                                batch_first=batch_first, backwards=draw.random() < 0.5)  # fmt: skip
            case "linear":
                draft.linear(x, draw.randint(1, 9), draw.choice([0.3, 1.0]))
            case "slice":
                draft.call("slice", x, numbers=(draw.randrange(2), -1, LAST, 1))
            case "cat":
                draft.cat(*draw.choices(alike, k=2))
            case "permute":
                draft.call("permute", x, numbers=(1, 0, 2))
            case "norm":
                draft.norm(x)
    return draft


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(120))
def test_random_programs(seed: int) -> None:
    draft = random_draft(seed)
    every_value, last = draft.program(), draft.program(len(draft.steps))
    for program in (every_value, last):
        plans = [check(program, draft.weights, draft.inputs, threads, ISAS[seed % len(ISAS)])
                 for threads in (1, 2, 3)]  # fmt: skip
        first, *others = (plan(draft.inputs) for plan in plans)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_layers_stay_within_their_memory(name: str) -> None:
    """Reads of inputs and writes of outputs beside them would stop the process."""
    for sizes in ((7, 2, 3, 5), (1, 1, 1, 1), (3, 5, 8, 16)):
        for backwards in (False, True):
            draft, y = drawn(name, sizes, True, backwards=backwards)
            program = draft.program(y)
            for isa in ISAS:
                inputs = [guarded(x) for x in draft.inputs]
                plan = SegmentPlan.of(program, draft.weights, inputs, 1, isa)
                made = [guarded(torch.zeros(shape)) for shape in plan.shapes]
                for batch in plan.batches:
                    batch.run(1, (*inputs, *made))
                compare(made, program, draft.weights, inputs)


def test_outputs_are_a_slice_without_a_copy() -> None:
    """A layer that reads all outputs, and one that reads the last, of one batch."""
    draft, y = drawn("lstm", (20, 1, 4, 6), False)
    draft.linear(draft.outputs_of(y), 3)
    builder = TapeBuilder(draft.program(y + 2), draft.weights, draft.inputs, ISAS[0], 1)
    assert builder.estimate() > 0
    same_bits(draft, y + 2)


# ------------------------------------------------------------------------------ kernels and checks


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", OPS)
def test_code_for_other_processors(name: str, isa: Isa) -> None:
    text = assembly([RecurrentKernel(name, most_rows(name, isa.registers), True)], isa)
    wanted = {"AVX-512": ("vfmadd231ps", "vdivps", "zmm"), "AVX2": ("vfmadd", "vdivps", "ymm"),
              "NEON": ("fmla", "fdiv", "v0.4s")}  # fmt: skip
    assert all(word in text for word in wanted[isa.name])


@pytest.mark.parametrize("name, shapes, numbers, count", [
    ("lstm", [(4, 3)], (2, 0, 0, 0), 40), ("lstm", [(4, 1, 3)], (2, 0, 0, 0), 41),
    ("lstm", [(4, 1, 3)], (0, 0, 0, 0), 40), ("lstm", [(4, 1, 3)], (2, 2, 0, 0), 40),
    ("lstm", [(4, 1, 3), (1, 1, 2)], (2, 0, 0, 0), 40), ("gru", [(4, 1, 3)], (2, 1, 0, 0), 30),
    ("gru", [(4, 1, 3), (1, 4, 2)], (2, 0, 0, 0), 30),
    ("gru", [(4, 1, 3), (1, 1, 2)], (2, 0, 1, 0), 30),
], ids=str)  # fmt: skip
def test_invalid_sizes(name: str, shapes: list, numbers: tuple, count: int) -> None:
    step = CallStep(tuple(range(len(shapes))), name, "tokens", numbers, (0, 0, count))
    program = SegmentProgram(("tokens",) * len(shapes), (step,), (len(shapes),))
    with pytest.raises(BadInput):
        program.shapes(shapes)


def one_bias(monkeypatch) -> None:
    inner = recurrent_layer._RecurrentLayer._parameters

    def parameters(self) -> list[Tensor]:
        return [*inner(self)[:3], torch.zeros(self.gate_count)]

    monkeypatch.setattr(recurrent_layer._RecurrentLayer, "_parameters", parameters)


def forwards(monkeypatch) -> None:
    monkeypatch.setattr(recurrent_layer._RecurrentLayer, "backwards", False)


@pytest.mark.parametrize("plant, test", [
    (one_bias, lambda: test_layers("gru", SIZES[2], ISAS[0])),
    (forwards, lambda: test_rows_are_outputs_and_the_last_state("lstm", True, False)),
], ids=["one bias", "always forwards"])  # fmt: skip
def test_the_tests_see_faults(plant, test, monkeypatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test()
