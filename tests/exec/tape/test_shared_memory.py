"""Concatenations and slices of channels share memory with their operands: they equal the same
programs in float64, whoever else reads, writes or overwrites that memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_segments import sees, widths

from demask.exec.steps.segment_rows import JOIN
from demask.exec.steps.segment_steps import flat_step
from demask.exec.tape import tape_builder
from demask.exec.tape.tape_builder import TapeBuilder, find_parts, owner_of
from demask.kernels.llvm.isa import host
from segment_drafts import RELU, Draft, all_at_once


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
    rows = draft.append(flat_step(draft.mean(scaled)))
    both = draft.cat(rows, draft.mean(scaled, keep=False))
    return draft.linear(draft.cat(draft.linear(both, 4), both), 3)


SHARED: dict[str, Callable[[Draft], int]] = {
    f.__name__: f for f in (
        nested, dense_connections, in_two, the_same_again, an_operand_twice, only_one_operand,
        of_slices, slices_of, shuffled, with_borders, pooled, in_place, mixed_grids,
        inputs_and_outputs, ends_in_means,
    )
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name: str) -> None:
    """For one size by day, for all by night."""
    place = list(SHARED).index(name) % 3
    batch, height, width = ((3, 6, 11), (1, 24, 33), (1, 9, 7))[place]
    draft = Draft((batch, 4, height, width))
    last = SHARED[name](draft)
    assert parts_of(draft), "nothing is shared"
    with all_at_once():
        draft.check(threads=1 + place)
    draft.check(last, threads=2 if batch == 1 else 1)


@pytest.mark.nightly
@widths()
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_on_every_width(name: str, isa) -> None:
    for k, (batch, height, width) in enumerate(((1, 9, 7), (2, 16, 11), (5, 5, 4), (1, 40, 57))):
        draft = Draft((batch, 4, height, width), seed=k)
        last = SHARED[name](draft)
        draft.check(threads=(1, 2, 3), isa=isa)
        draft.check(last, threads=(1, 2, 3), isa=isa)


def test_tokens_share_memory() -> None:
    for count in (1, 40):
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
    joins = [v for v, step in enumerate(draft.steps, 1) if step.op == "cat"]
    assert {owner_of(parts, v) for v in joins} == {(last, 0)}
    firsts = [owner_of(parts, x)[1] for x in draft.steps[-1].reads]
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
    assert find_parts(builder.moved, channels, builder.grids) == {a: (4, 4)}
    draft.check(static=(1,))


# ------------------------------------------------------------------------------ values not finite


@pytest.mark.sampled(6)
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


# --------------------------------------------------------------------------------- planted faults


def later(real):
    """Slices begin one channel later."""

    def owner(parts, value):
        owner, first = real(parts, value)
        return owner, first + (owner != value and first > 0)

    return owner


def without_parts(real):
    """A method that knows of no parts."""

    def own(self, *args):
        parts, self.parts = self.parts, {}
        try:
            return real(self, *args)
        finally:
            self.parts = parts

    return own


def shared(name: str) -> None:
    draft = Draft((2, 4, 9, 7))
    draft.check(SHARED[name](draft), threads=1)


FAULTS = {
    "slices_of": (tape_builder, "owner_of", later),
    # an operand that is in two concatenations is in the first one only
    "in_two": (tape_builder, "LOWERINGS", lambda real: real | {JOIN: real[JOIN]._replace(write=lambda _: [])}),
    "with_borders": (TapeBuilder, "_needed_border", without_parts),  # readers of parts get none
    "in_place": (TapeBuilder, "_output_buffer", without_parts),  # sums overwrite parts of other values
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    sees(*FAULTS[name], lambda: shared(name))
