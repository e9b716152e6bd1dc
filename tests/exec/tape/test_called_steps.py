"""Calls of single ops in plans: moves have torch's bits, the others at most 64 units in the last
place more than float64."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, nan

import pytest
import torch
from random_segments import WIDTHS, SegmentDraft, outputs, stays_within_memory

from demask.errors import BadInput
from demask.exec.steps import reference as dense
from demask.exec.steps.called_op import MOVED
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import AnyStep, call_step
from demask.exec.tape.moved_values import MovedValues
from demask.exec.tape.segment_plan import SegmentPlan, _batches
from demask.kernels.llvm.isa import host
from segment_drafts import RELU, all_at_once, bits

SHAPE = (2, 6, 5, 7)
MOVES = {  # name -> steps from an image of SHAPE: (call, kind, numbers, index)
    "tokens": [("permute", "tokens", (0, 2, 3, 1), None)],
    "heads": [
        ("permute", "tokens", (0, 2, 3, 1), None),
        ("reshape", "tokens", (-1, 35, 3, 2), None),
        ("permute", "image", (0, 2, 1, 3), None),
    ],
    "slice": [("slice", "image", (2, 1, 5, 2), None), ("slice", "image", (-1, -3, 2**63 - 1, 1), None)],
    "take": [("take", "image", (3,), [6, 0, 0, 3]), ("take", "image", (1,), [5, 1])],
    "pad": [("pad", "image", (1, 2, 0, 3), None), ("pad", "image", (0, 0, 0, 0, 2, 1), None)],
    "zeros taken": [
        ("reshape", "tokens", (-1, 42, 5), None),
        ("pad", "tokens", (0, 0, 0, 1), None),
        ("take", "tokens", (1,), [42, 3, 42, 41, 0]),
    ],
    "nearest": [("nearest", "image", (2.0, 3.0), None), ("nearest exact", "image", (13, 4), None)],
    "twice": [("nearest", "image", (10, 14), None), ("replicate", "image", (0, 0, 2, 1), None)],
    "borders": [
        ("reflect", "image", (1, 2, 0, 3), None),
        ("circular", "image", (4, 0, 1, 1), None),
        ("replicate", "image", (2, 0, 9, 0), None),
    ],
    "resized signal": [
        ("reshape", "signal", (2, 6, 35), None),
        ("nearest of a signal", "signal", (1.7,), None),
        ("nearest exact of a signal", "signal", (23,), None),
    ],
    "pick": [("pick", "signal", (1, -2), None), ("pick", "tokens", (2, 3), None)],
    "expand": [
        ("reshape", "tokens", (-1, 1, 210), None),
        ("expand", "tokens", (3, -1, 4, -1), None),
        ("reshape", "tokens", (-1, 4, 210), None),
    ],
    "pixels": [("permute", "pixels", (0, 2, 3, 1), None), ("slice", "pixels", (3, 1, 4, 1), None)],
    "matrices": [("permute", "matrices", (0, 2, 1, 3), None)],
    "signal": [("reshape", "signal", (2, 6, 35), None)],
    "images exchanged": [("take", "image", (0,), [1, 0])],
    "images mixed": [("permute", "tokens", (1, 0, 2, 3), None), ("reshape", "image", (-1, 6, 5, 7), None)],
}
POINTWISE = {"times": (0.1,), "over": (3,), "plus": (-2.5,), "exp": ()}


def moved(draft: SegmentDraft, name: str, x: int = 0) -> int:
    for call, kind, numbers, index in MOVES[name]:
        x = draft.call(call, x, kind=kind, numbers=numbers, index=index)
    return x


# ------------------------------------------------------------------------------------------ moves


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("threads", [1, 3])
def test_moves_keep_the_bits(name: str, threads: int) -> None:
    """As outputs, and of values that are not finite."""
    draft = SegmentDraft(SHAPE)
    draft.inputs[0].view(-1)[::9] = torch.tensor([nan, inf, -inf, -0.0]).repeat(12)[:47]
    moved(draft, name)
    program = draft.program()
    expected = dense.run(program, draft.inputs, draft.weights)
    for y, want in zip(outputs(draft, threads=threads), expected, strict=True):
        assert y.shape == want.shape and torch.equal(bits(y), bits(want))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MOVES)
def test_other_steps_read_moves(name: str) -> None:
    for k, isa in enumerate(WIDTHS):
        draft = SegmentDraft(SHAPE, seed=k)
        x = moved(draft, name, draft.conv(0, 6, act=RELU))
        kind = draft.program().kinds[x]
        channels = draft.shape(x)[-1 if kind == "tokens" else 1]
        if kind == "tokens":
            draft.linear(x, 4)
            draft.call("softmax", x)
        elif kind == "image":
            draft.conv(x, 3)
            draft.pool(draft.select(x, [channels - 1, 0]))
        draft.add(x, x, RELU)
        if kind != "matrices":
            draft.cat(x, x)
        draft.check(threads=1 + k % 3, isa=isa)
        draft.check(len(draft.steps), x, threads=1 + k % 3, isa=isa)


def test_joins_read_several_sources() -> None:
    """Lines of vectors with elements of several values, of zeros, and of one twice."""
    draft = SegmentDraft((1, 5, 3), (1, 7, 3), (1, 1, 3), kind="tokens")
    y = draft.linear(1, 3)
    joined = draft.call("join", 0, y, 2, 0, numbers=(1,))
    padded = draft.call("pad", joined, numbers=(1, 0, 2, 3))
    draft.call("join", padded, padded, numbers=(-1,))
    draft.linear(padded, 5)
    for outputs_read in ((), (len(draft.steps) + 1,)):
        draft.check(*outputs_read, threads=(1, 2, 3))


@pytest.mark.skipif(host().lanes < 8, reason="has six images at once")
def test_a_sum_is_not_written_over_a_value_that_is_moved_later() -> None:
    draft = SegmentDraft((1, 6, 9, 9))
    x = draft.conv(0, 6)
    turned = draft.call("permute", x, kind="image", numbers=(0, 1, 3, 2))
    y = draft.conv(draft.conv(0, 6), 6, add=x)
    again = draft.call("permute", turned, kind="image", numbers=(1, 0, 2, 3))
    late = draft.conv(draft.call("permute", again, kind="image", numbers=(1, 0, 2, 3)), 2)
    for outputs_read in ((y, late), (y, turned)):
        draft.check(*outputs_read, threads=(1, 2))


@pytest.mark.parametrize("together", [False, True])
def test_batches_are_split_only_if_moves_keep_images(together: bool) -> None:
    for name, keeps in (("heads", True), ("zeros taken", True), ("images exchanged", False), ("images mixed", False)):
        draft = SegmentDraft(SHAPE)
        moved(draft, name, draft.conv(0, 6))
        program = draft.program(len(draft.steps))
        shapes = program.shapes([SHAPE])
        assert MovedValues(program, draft.weights, shapes).keeps_images([1, 2]) is keeps
        parts = _batches(program, draft.weights, draft.inputs, 1, WIDTHS[0], {})
        assert keeps or parts == [(0, 0, 1)]
        with all_at_once() if together else nullcontext():
            draft.check(len(draft.steps))


def test_sizes_of_the_batch_in_a_reshape_keep_it_whole() -> None:
    draft = SegmentDraft((4, 2, 3, 3))
    draft.call("reshape", 0, numbers=(4, -1))
    assert not MovedValues(draft.program(1), [], draft.program().shapes([(4, 2, 3, 3)])).keeps_images([1])
    draft.check(1)


def test_kernels_stay_within_their_memory() -> None:
    """Reads of inputs and writes of outputs beside them would stop the process."""
    for width in (7, 16, 20, 48, 53):
        draft = SegmentDraft((1, 3, 4, width))
        draft.conv(0, 4)
        draft.call("permute", 1, numbers=(0, 2, 3, 1))
        draft.call("permute", 0, numbers=(0, 2, 3, 1))
        for isa in WIDTHS:
            stays_within_memory(draft.program(0, 1, 2, 3), draft.weights, draft.inputs, 1, isa)


# ---------------------------------------------------------------------------- pointwise, softmax


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_calls(name: str) -> None:
    special = torch.tensor([0.0, -0.0, inf, -inf, nan, 88.5, 88.8, 89.0, -87.5, -100.0, -104.5, 1e-30])
    x = torch.cat([special, torch.linspace(-100, 88.7, 990)]).reshape(2, 3, 167)
    program = SegmentProgram(("tokens",), (call_step((0,), name, "tokens", POINTWISE[name]),), (1,))
    (want,) = dense.run(program, [x.double()], [])
    (own,) = dense.run(program, [x], [])
    for isa in WIDTHS:
        (y,) = SegmentPlan.of(program, [], [x], 2, isa)([x])
        assert torch.equal(y.isnan(), own.isnan())
        rounded = want.float()
        assert torch.equal(y[rounded.isinf()], rounded[rounded.isinf()])
        inside = rounded.isfinite()
        ulp = torch.finfo(torch.float32).eps * want.abs().clamp(min=2.0**-126)
        assert bool(((y.double() - want).abs() <= 64 * ulp)[inside].all())
        assert torch.equal(torch.signbit(y[inside]), torch.signbit(own[inside]))


@pytest.mark.parametrize("name", ["product", "difference"])
def test_pointwise_calls_of_two(name: str) -> None:
    for kind, shape in (("tokens", (2, 9, 5)), ("image", (3, 4, 7, 6))):
        draft = SegmentDraft(shape, shape, kind=kind)
        draft.call(name, 0, 1, kind=kind)
        draft.check(threads=3)


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (3, 5, 11), (1, 40, 20, 17)], ids=str)
def test_prelu(shape: tuple[int, ...]) -> None:
    """Bits of torch, a weight for each channel, also over the memory of its operand."""
    draft = SegmentDraft(shape, kind="image" if len(shape) == 4 else "signal")
    x = draft.conv(0, shape[1]) if len(shape) == 4 else draft.call("pad", 0, kind="signal", numbers=(0, 0))
    y = draft.prelu(x)
    stays_within_memory(draft.program(y), draft.weights, draft.inputs, 1)
    special = torch.tensor([0.0, -0.0, inf, -inf, nan, -1e-38, -3.4e38])
    draft.inputs[0].view(-1)[: len(special)] = special
    for source in (0, x):
        y = draft.prelu(source)
        for isa in WIDTHS:
            for threads in (1, 3):
                plan = SegmentPlan.of(draft.program(source, y), draft.weights, draft.inputs, threads, isa)
                before, after = plan(draft.inputs)
                slopes = draft.weights[-1]
                assert torch.equal(bits(after), bits(torch.prelu(before, slopes)))


def test_prelu_needs_a_weight_for_each_channel() -> None:
    for kind, shape, count in (("image", (1, 4, 5, 6), 6), ("signal", (1, 4, 6), 6), ("image", (1, 4, 5, 6), 1)):
        program = SegmentProgram((kind,), (call_step((0,), "prelu", kind, (), (0, 0, count)),), (1,))
        with pytest.raises(BadInput, match="a weight for each of 4 channels"):
            program.shapes([shape])
    with pytest.raises(BadInput):
        SegmentProgram(("tokens",), (call_step((0,), "prelu", "tokens", (), (0, 0, 4)),), (1,))


def test_softmax() -> None:
    for channels in (1, 2, 5, 40):
        draft = SegmentDraft((3, 11, channels), kind="tokens")
        draft.inputs[0] *= 30
        draft.call("softmax", 0)
        for isa in WIDTHS:
            found = draft.check(1, threads=(1, 3), isa=isa)(draft.inputs)[0]
            want = draft.inputs[0].double().softmax(-1)
            assert bool(((found - want).abs() <= 64 * 1.2e-7 * want + 1e-37).all())


def test_softmax_of_values_that_are_not_finite() -> None:
    rows = [[nan, 1, 2], [inf, 1, 2], [-inf, 1, 2], [-inf] * 3, [3.3e38, -3.3e38, 0]]
    draft = SegmentDraft((len(rows), 3), kind="tokens")
    draft.inputs[0] = torch.tensor(rows)
    draft.call("softmax", 0)
    (y,) = outputs(draft, 1)
    assert torch.allclose(y, torch.tensor(rows).softmax(-1), equal_nan=True)


def test_threads_do_not_change_bits() -> None:
    draft = SegmentDraft((2, 6, 20, 9))
    x = moved(draft, "tokens", draft.conv(0, 6))
    y = draft.call("exp", draft.call("softmax", x))
    draft.linear(draft.call("reshape", y, numbers=(2, 90, 12)), 5)
    draft.check(y, y + 2, threads=(1, 2, 3))


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize(
    "step",
    [
        call_step((0,), "no such", "tokens"),
        call_step((0,), "permute", "other", (0, 1)),
        call_step((0, 0), "exp", "tokens"),
        call_step((0,), "exp", "tokens", (1,)),
        call_step((0,), "permute", "tokens", (0.5, 1)),
        call_step((0,), "take", "tokens", (0,)),
        call_step((0,), "exp", "tokens", (), (0, 0, 1)),
        call_step((0,), "times", "tokens", (inf,)),
        call_step((0,), "take", "tokens", (0,), (0, 3, 3)),
        call_step((1,), "exp", "tokens"),
        call_step((0,), "softmax", "image"),
    ],
    ids=str,
)
def test_invalid_steps(step: AnyStep) -> None:
    with pytest.raises(BadInput):
        SegmentProgram(("tokens",), (step,), (1,))


@pytest.mark.parametrize("name, numbers, kind", [
    ("permute", (0, 0), "tokens"), ("permute", (1, 0), "image"), ("reshape", (-1, -1), "tokens"),
    ("reshape", (5, 5), "tokens"), ("reshape", (0, 3), "tokens"), ("slice", (2, 0, 1, 1), "tokens"),
    ("slice", (0, 0, 1, 0), "tokens"), ("pad", (1,), "tokens"), ("pad", (-1, 0), "tokens"),
    ("join", (2,), "tokens"), ("reshape", (), "tokens"),
], ids=str)  # fmt: skip
def test_invalid_sizes(name: str, numbers: tuple, kind: str) -> None:
    program = SegmentProgram(("tokens",), (call_step((0,), name, kind, numbers),), (1,))
    with pytest.raises(BadInput):
        program.shapes([(4, 3)])


def test_shapes_are_those_of_torch() -> None:
    for name in MOVES:
        draft = SegmentDraft(SHAPE)
        moved(draft, name)
        program = draft.program()
        made = dense.run(program, draft.inputs, draft.weights)
        assert [tuple(y.shape) for y in made] == program.shapes([SHAPE])
    assert {call for steps in MOVES.values() for call, *_ in steps} | {"join"} == {
        name for name, entry in CALLED.items() if entry.lowering == MOVED
    }


def test_positions_beyond_the_value() -> None:
    draft = SegmentDraft((4, 3), kind="tokens")
    draft.call("take", 0, numbers=(0,), index=[0, 4])
    with pytest.raises(BadInput):
        outputs(draft, 1)
