"""Selections, scales, sums and concatenations, whose values often share memory, equal the same
program in float64: step by step, for odd sizes, any number of threads and any width of vectors."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from demask.kernels.llvm.isa import AVX2, host
from demask.ops.activations import ACTIVATIONS
from demask.sparse.plan import tape_builder, value_moves
from demask.sparse.plan.shared_memory import find_parts, owner_of
from demask.sparse.plan.tape_builder import TapeBuilder
from demask.sparse.segment_steps import ConcatStep, FlattenStep
from segment_drafts import RELU, Draft, all_at_once, compare
from test_sparse_plan import WIDTHS

SIZES = [(1, 9, 7), (3, 5, 11), (1, 20, 33), (5, 1, 6)]
STRIDES = [(1, 1), (2, 2), (1, 3), (4, 1)]
NUMBERS = {
    "in order": [0, 1, 2, 3, 4],
    "the first": [0, 1],
    "the last": [3, 4],
    "one": [2],
    "reversed": [4, 3, 2, 1, 0],
    "repeated": [2, 2, 0, 2, 4, 4, 1, 1, 3],
    "with gaps": [0, 2, 4],
    "with zeros": [-1, 1, 2, -1, -1, 0],
    "only zeros": [-1, -1],
    "zeros behind": [0, 1, 2, 3, 4, -1, -1],
}
ISAS = [*WIDTHS, *([AVX2] if host().lanes > AVX2.lanes else [])]


def widths(*names: str):
    return pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


# ------------------------------------------------------------------------------------- selections


@pytest.mark.parametrize("name", NUMBERS)
def test_selections_of_images(name: str) -> None:
    for k, (batch, height, width) in enumerate(SIZES):
        draft = Draft((batch, 5, height, width), seed=k)
        for stride in STRIDES:
            y = draft.select(0, NUMBERS[name], stride)
            draft.select(y, [0])
        draft.check(threads=1 + k % 3)


@widths()
def test_selections_on_every_width(isa) -> None:
    draft = Draft((3, 5, 13, 10))
    x = draft.conv(0, 5, act=RELU)
    for k, numbers in enumerate(NUMBERS.values()):
        y = draft.select(x, numbers, STRIDES[k % len(STRIDES)])
        draft.conv(y, 3)
    draft.check(isa=isa)


@pytest.mark.parametrize("kind, shape", [
    ("tokens", (7, 5)), ("tokens", (2, 3, 5)), ("tokens", (5,)), ("tokens", (40, 5)),
    ("signal", (1, 5, 23)), ("signal", (3, 5, 4)),
], ids=str)  # fmt: skip
def test_selections_of_tokens_and_signals(kind: str, shape: tuple[int, ...]) -> None:
    draft = Draft(shape, kind=kind)
    for numbers in NUMBERS.values():
        draft.select(0, numbers)
    draft.cat(3, 0, 6)
    draft.check(threads=1)
    draft.check(4, 11)


def test_every_channel_of_zeros_is_zero() -> None:
    """Also where channel 0, which the kernel reads instead, is not finite."""
    draft = Draft((1, 3, 6, 6))
    y = draft.select(0, [-1, 1, -1])
    z = draft.conv(y, 2)
    draft.inputs[0][:, 0] = torch.nan
    found = draft.check(y, z)(draft.inputs)
    assert not found[0][:, [0, 2]].any() and bool(found[1].isfinite().all())


# ----------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("batch, together", [(1, False), (3, True), (3, False), (5, True)])
def test_scales(batch: int, together: bool) -> None:
    for k, (height, width) in enumerate(((9, 7), (1, 6), (20, 33), (1, 1))):
        draft = Draft((batch, 6, height, width), (batch, 6, 1, 1), seed=k)
        draft.scale(0, 1)
        draft.scale(0, 1, ("sigmoid", ()))
        gate = draft.conv(draft.mean(0), 6, 1, act=("hardsigmoid", ()))
        y = draft.scale(0, gate, RELU)
        draft.conv(y, 4, add=draft.conv(0, 4))
        draft.pool(draft.scale(y, 1, ("tanh", ())))
        with all_at_once() if together else nullcontext():
            draft.check(threads=1 + k % 3)
            draft.check(len(draft.steps) + 1, threads=1 + k % 3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_scales(name: str) -> None:
    draft = Draft((2, 3, 5, 6), (2, 3, 1, 1))
    draft.scale(0, 1, (name, (-0.5, 2.0)[: ACTIVATIONS[name].count]))
    draft.check()


@widths()
@pytest.mark.parametrize("batch", [1, 3])
def test_scales_on_every_width(batch: int, isa) -> None:
    draft = Draft((batch, 8, 11, 10))
    x = draft.conv(0, 8, act=RELU)
    gate = draft.conv(draft.conv(draft.mean(x), 4, 1, act=RELU), 8, 1, act=("sigmoid", ()))
    draft.conv(draft.scale(x, gate), 8, 1, add=x)
    with all_at_once():
        draft.check(len(draft.steps), isa=isa)


def test_factors_that_are_parts() -> None:
    """Slices of one gate, and a gate that is concatenated."""
    draft = Draft((2, 4, 6, 7))
    gate = draft.conv(draft.mean(0), 8, 1, act=("sigmoid", ()))
    a, b = (draft.select(gate, list(range(k, k + 4))) for k in (0, 4))
    y = draft.cat(draft.scale(0, a), draft.scale(0, b))
    z = draft.scale(y, draft.cat(b, a))
    draft.check(threads=1)
    with all_at_once():
        draft.check(z)


# ---------------------------------------------------------------------------------- shared memory


def parts_of(draft: Draft, threads: int = 2) -> dict[int, tuple[int, int]]:
    """The parts of the plan of a draft."""
    return TapeBuilder(draft.program(), draft.weights, draft.inputs, host(), threads).parts


def block(draft: Draft, x: int = 0) -> tuple[int, int]:
    """Two layers that read a value."""
    return draft.conv(x, 3, act=RELU), draft.conv(x, 2, 1)


def nested(draft: Draft) -> int:
    a, b = block(draft)
    inner = draft.cat(a, b)
    c = draft.conv(inner, 4)
    outer = draft.cat(inner, c)
    return draft.cat(draft.conv(outer, 2), outer, 0)


def dense_connections(draft: Draft) -> int:
    """Each layer reads all before it: concatenations that are the beginnings of longer ones."""
    values = [draft.conv(0, 4)]
    for _ in range(4):
        values.append(draft.conv(draft.cat(*values) if values[1:] else values[0], 3, act=RELU))
    return draft.cat(*values)


def in_two(draft: Draft) -> int:
    a, b = block(draft)
    first, second = draft.cat(a, b), draft.cat(b, a)
    return draft.cat(draft.conv(first, 3), draft.conv(second, 3))


def the_same_again(draft: Draft) -> int:
    a, b = block(draft)
    first = draft.conv(draft.cat(a, b), 3)
    return draft.add(first, draft.conv(draft.cat(a, b), 3))


def an_operand_twice(draft: Draft) -> int:
    a, b = block(draft)
    return draft.conv(draft.cat(a, b, a), 3)


def only_one_operand(draft: Draft) -> int:
    a, _ = block(draft)
    return draft.conv(draft.cat(draft.cat(a)), 3)


def of_slices(draft: Draft) -> int:
    x = draft.conv(0, 8)
    parts = [draft.select(x, list(range(k, k + 2))) for k in (0, 2, 4, 6)]
    changed = [parts[0], draft.conv(parts[1], 2), draft.conv(parts[2], 2, add=parts[3])]
    back = draft.cat(*parts)
    return draft.cat(draft.conv(draft.cat(*changed), 3), back, draft.cat(*parts[::-1]))


def slices_of(draft: Draft) -> int:
    a, b = block(draft)
    whole = draft.cat(a, b)
    across = draft.select(whole, [2, 3])
    again = draft.select(across, [1])
    return draft.add(draft.conv(across, 3), draft.conv(draft.cat(again, b), 3))


def shuffled(draft: Draft) -> int:
    """Channels are split, one half computed, both shuffled."""
    x = draft.conv(0, 6)
    for _ in range(3):
        left, right = draft.select(x, [0, 1, 2]), draft.select(x, [3, 4, 5])
        right = draft.conv(draft.conv(right, 3, groups=3, density=1.0), 3, 1, act=RELU)
        x = draft.select(draft.cat(left, right), [0, 3, 1, 4, 2, 5])
    return x


def with_borders(draft: Draft) -> int:
    """Readers need borders of one operand, of the whole, and of a slice."""
    a, b = block(draft)
    whole = draft.cat(a, b)
    y = draft.conv(a, 2, 5)
    z = draft.conv(whole, 2, 3, dilation=(2, 2), padding=((2, 2), (2, 2)))
    part = draft.conv(draft.select(whole, [1, 2, 3]), 2, 7)
    return draft.add(draft.add(y, z), part)


def pooled(draft: Draft) -> int:
    """Maxima of values below zero, whose border is not zero as that of other readers."""
    a, b = draft.conv(0, 3), draft.conv(0, 2, act=("clamp", (-3.0, -1.0)))
    whole = draft.cat(a, b)
    maxima = draft.cat(draft.pool(b), draft.pool(whole), draft.pool(draft.select(whole, [3, 4])))
    return draft.cat(draft.conv(b, 2), draft.pool(whole, mean=True), maxima, draft.conv(whole, 1))


def in_place(draft: Draft) -> int:
    """Sums that could overwrite what they add, which is also a part of another value."""
    a, b = block(draft)
    c = draft.conv(a, 3, 1, add=a)
    whole = draft.cat(c, b)
    d = draft.conv(draft.select(whole, [0, 1, 2]), 3, add=c)
    e = draft.conv(d, 3, 1, add=d)
    f = draft.conv(e, 5, 1, add=whole)
    return draft.conv(f, 5, 1, add=f)


def mixed_grids(draft: Draft) -> int:
    """Strides, transposed convolutions and sizes that do not divide."""
    a, b = block(draft)
    half = draft.conv(draft.cat(a, b), 4, stride=(2, 2))
    small = draft.cat(half, draft.pool(a, stride=2), draft.select(b, [1, 0], (2, 2)))
    rows, columns = (size % 2 for size in draft.shape(0)[2:])
    crop = ((1, rows), (1, columns))
    large = draft.conv(small, 3, stride=(2, 2), transposed=True, padding=crop)
    return draft.cat(large, a, 0, draft.conv(large, 2))


def inputs_and_outputs(draft: Draft) -> int:
    a, b = block(draft)
    part = draft.select(0, [1, 2])
    whole = draft.cat(0, a, part, b)
    draft.add(part, b)
    return draft.cat(whole, draft.select(whole, [0, 1, 2, 3]), 0)


def ends_in_means(draft: Draft) -> int:
    """Images of one pixel and tokens share memory too."""
    a, b = block(draft)
    whole = draft.cat(draft.mean(a), draft.mean(b))
    gate = draft.conv(whole, 5, 1, act=("sigmoid", ()))
    scaled = draft.scale(draft.cat(a, b), gate)
    rows = draft.append(FlattenStep(draft.mean(scaled)))
    both = draft.cat(rows, draft.mean(scaled, keep=False))
    return draft.linear(draft.cat(draft.linear(both, 4), both), 3)


SHARED: dict[str, Callable[[Draft], int]] = {
    f.__name__: f for f in (
        nested, dense_connections, in_two, the_same_again, an_operand_twice, only_one_operand,
        of_slices, slices_of, shuffled, with_borders, pooled, in_place, mixed_grids,
        inputs_and_outputs, ends_in_means,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name: str) -> None:
    for k, (batch, height, width) in enumerate(((1, 9, 7), (3, 6, 11), (1, 24, 33))):
        draft = Draft((batch, 4, height, width), seed=k)
        last = SHARED[name](draft)
        assert parts_of(draft), "nothing is shared"
        with all_at_once():
            draft.check(threads=1 + k)
        draft.check(last, threads=1 + k)


@pytest.mark.nightly
@widths()
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_on_every_width(name: str, threads: int, isa) -> None:
    for k, (batch, height, width) in enumerate(((1, 9, 7), (2, 16, 11), (5, 5, 4), (1, 40, 57))):
        draft = Draft((batch, 4, height, width), seed=k)
        last = SHARED[name](draft)
        draft.check(threads=threads, isa=isa)
        draft.check(last, threads=threads, isa=isa)


def test_tokens_share_memory() -> None:
    for count in (1, 3, 40):
        draft = Draft((count, 6), (count, 6), kind="tokens")
        a, b = draft.linear(0, 5, act=RELU), draft.linear(1, 4, density=1.0)
        whole = draft.cat(a, b, draft.select(1, [2, 3, 4]))
        c = draft.linear(draft.select(whole, [3, 4, 5, 6]), 12, add=whole)
        draft.cat(draft.linear(c, 12, add=c), a, whole)
        draft.check(threads=1 + count % 2)
        draft.check(len(draft.steps) + 1)


def test_what_is_copied_for_nothing() -> None:
    """The memory of a dense block: each concatenation is the beginning of the last one."""
    draft = Draft((1, 4, 12, 12))
    last = dense_connections(draft)
    parts = parts_of(draft)
    joins = [v for v, step in enumerate(draft.steps, 1) if isinstance(step, ConcatStep)]
    assert {owner_of(parts, v) for v in joins} == {(last, 0)}
    firsts = [owner_of(parts, x)[1] for x in draft.steps[-1].xs]
    assert firsts == [0, 4, 7, 10, 13]


def test_what_shares_no_memory() -> None:
    """Static values, which no call may write, and selections that are no slices."""
    draft = Draft((1, 4, 12, 12), (1, 4, 12, 12))
    a, _ = block(draft)
    draft.cat(1, a)
    draft.select(1, [0, 1])
    draft.cat(0, draft.select(0, [1, 0]), draft.select(0, [0, -1]), draft.select(0, [0], (2, 2)))
    draft.steps.pop()  # of another size
    program = draft.program(static=(1,))
    builder = TapeBuilder(program, draft.weights, draft.inputs, host(), 2)
    channels = [size[1] for size in builder.shapes]
    assert find_parts(program, draft.weights, channels, builder.grids) == {a: (4, 4)}
    draft.check(static=(1,))


# ------------------------------------------------------------------------------ values not finite


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_does_not_spread(name: str, value: float) -> None:
    """Outputs are finite wherever they are in float64: in other images, channels and pixels."""
    draft = Draft((2, 4, 9, 7))
    last = SHARED[name](draft)
    draft.inputs[0][1, 2, 8, 6] = value  # at the end of the last tile
    with all_at_once():
        draft.check(threads=2)
    draft.check(last, threads=1)


def test_windows_outside_of_the_image_are_not_counted() -> None:
    """The last pixel is read by a window outside of the output only."""
    for size in (5, 7, 11, 13):
        draft = Draft((1, 3, size, size))
        y = draft.conv(0, 4, 2, stride=(2, 2), padding=((0, 0), (0, 0)), density=1.0)
        draft.scale(y, draft.mean(y))
        draft.conv(y, 3)
        draft.pool(y)
        draft.inputs[0][:, :, size - 1] = torch.nan
        found = draft.check()(draft.inputs)
        assert all(bool(f.isfinite().all()) for f in found[1:])


# -------------------------------------------------------------------------------- random programs


def random_draft(seed: int) -> Draft:
    """A random program of up to 9 steps over small images of two sizes."""
    draw = random.Random(seed)
    batch, size = draw.choice([1, 1, 2, 3]), (draw.randint(1, 14), draw.randint(1, 14))
    draft = Draft((batch, draw.randint(1, 6), *size), (batch, 4, *size), seed=seed)
    for _ in range(draw.randint(3, 9)):
        x = draw.randrange(2 + len(draft.steps))
        shape = draft.shape(x)
        alike = [v for v in range(2 + len(draft.steps)) if draft.shape(v)[2:] == shape[2:]]
        same = [v for v in alike if draft.shape(v) == shape]
        gates = [v for v in range(2 + len(draft.steps))
                 if draft.shape(v) == (batch, shape[1], 1, 1)]  # fmt: skip
        act = draw.choice([None, RELU, ("tanh", ()), ("clamp", (-1.0, -0.5))])
        density, kernel = draw.choice([0.2, 0.6, 1.0]), draw.choice([1, 1, 3, 5])
        first = draw.randrange(shape[1])
        match draw.choice(["conv", "conv", "sum", "own", "pool", "mean", "slice", "slice", "pick",
                           "cat", "cat", "cat", "add", "scale"]):  # fmt: skip
            case "conv":
                stride = draw.choice([1, 1, 2])
                draft.conv(x, draw.randint(1, 6), kernel, density, act=act, stride=(stride,) * 2)
            case "sum":
                draft.conv(x, shape[1], kernel, density, act=act, add=draw.choice(same))
            case "own":
                draft.conv(x, shape[1], kernel, 1.0, act=act, groups=shape[1])
            case "pool":
                draft.pool(x, draw.random() < 0.5, draw.choice([1, 1, 2]), ceil=draw.random() < 0.5)
            case "mean":
                draft.mean(x)
            case "slice":
                draft.select(x, list(range(first, draw.randint(first + 1, shape[1]))))
            case "pick":
                numbers = [draw.randrange(-1, shape[1]) for _ in range(draw.randint(1, 7))]
                draft.select(x, numbers, draw.choice(STRIDES))
            case "cat":
                draft.cat(*draw.choices(alike, k=draw.randint(1, 4)))
            case "add":
                draft.add(x, draw.choice(same), act)
            case "scale" if gates:
                draft.scale(x, draw.choice(gates), act)
    return draft


def check_random(seed: int, isa=None) -> None:
    """All values, and the last ones alone, whose operands may be overwritten."""
    draft, draw = random_draft(seed), random.Random(~seed)
    count = 2 + len(draft.steps)
    static = draw.choice([(), (), (1,)])
    try:
        draft.check(static=static, threads=draw.randint(1, 3), isa=isa)
        last = {count - 1, draw.randrange(count)}
        with all_at_once():
            draft.check(*last, static=static, threads=draw.randint(1, 3), isa=isa)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r:.300}") from error


@pytest.mark.parametrize("seeds", [range(k, k + 10) for k in range(0, 40, 10)], ids=str)
def test_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(k, k + 50) for k in range(40, 1040, 50)], ids=str)
def test_many_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed, ISAS[seed % len(ISAS)])


# --------------------------------------------------------------------------------- planted faults


def wrong_channels(monkeypatch) -> None:
    """Slices begin one channel later."""
    real = tape_builder.owner_of

    def later(parts, value):
        owner, first = real(parts, value)
        return owner, first + (owner != value and first > 0)

    monkeypatch.setattr(tape_builder, "owner_of", later)


def no_copies(monkeypatch) -> None:
    """An operand that is in two concatenations is in the first one only."""
    real = tape_builder.find_parts
    monkeypatch.setattr(TapeBuilder, "_concatenate", lambda *_: None)
    monkeypatch.setattr(tape_builder, "find_parts", real)


def no_border(monkeypatch) -> None:
    """Readers of parts get no border."""
    real = TapeBuilder._border

    def own(self, value):
        parts, self.parts = self.parts, {}
        try:
            return real(self, value)
        finally:
            self.parts = parts

    monkeypatch.setattr(TapeBuilder, "_border", own)


def overwritten(monkeypatch) -> None:
    """Sums overwrite parts of other values."""
    real = TapeBuilder._out

    def out(self, value, earlier):
        parts, self.parts = self.parts, {}
        try:
            return real(self, value, earlier)
        finally:
            self.parts = parts

    monkeypatch.setattr(TapeBuilder, "_out", out)


def other_factors(monkeypatch) -> None:
    """Every image is scaled by the factors of the first one."""
    real = value_moves.move.ScaleKernel
    monkeypatch.setattr(
        value_moves.move, "ScaleKernel", lambda act, lanes: real(act, (lanes[0],) * len(lanes))
    )


def other_selection(monkeypatch) -> None:
    """Channels of zeros are channel 0."""
    real = tape_builder.selected
    monkeypatch.setattr(tape_builder, "selected", lambda *args: real(*args).clip(0))


def no_stride(monkeypatch) -> None:
    real = value_moves.Moves.select

    def select(self, step, *rest):
        real(self, replace(step, stride=(1, 1)), *rest)

    monkeypatch.setattr(value_moves.Moves, "select", select)


def test_programs_of_the_faults_pass() -> None:
    for name in ("of_slices", "with_borders", "in_place"):
        every(name)


def every(name: str) -> None:
    draft = Draft((2, 4, 9, 7))
    last = SHARED[name](draft)
    draft.check(last, threads=1)


def scales_and_selections() -> None:
    draft = Draft((2, 4, 9, 7), (2, 4, 1, 1))
    draft.scale(0, 1)
    draft.select(0, [1, -1, 0])
    draft.select(0, [1, 3], (2, 2))
    with all_at_once():
        draft.check(threads=1)


FAULTS = {
    wrong_channels: lambda: every("slices_of"),
    no_copies: lambda: every("in_two"),
    no_border: lambda: every("with_borders"),
    overwritten: lambda: every("in_place"),
    other_factors: scales_and_selections,
    other_selection: scales_and_selections,
    no_stride: scales_and_selections,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_seen(fault, monkeypatch) -> None:
    FAULTS[fault]()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        FAULTS[fault]()


def test_the_comparison_sees_what_is_not_finite() -> None:
    draft = Draft((1, 2, 3, 3))
    program = draft.program(draft.select(0, [1, 0]))
    found = draft.inputs[0][:, [1, 0]]
    compare([found], program, draft.weights, draft.inputs)
    found[0, 0, 0, 0] = torch.nan
    with pytest.raises(AssertionError):
        compare([found], program, draft.weights, draft.inputs)
