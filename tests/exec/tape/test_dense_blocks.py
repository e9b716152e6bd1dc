"""Dense blocks of weights: they hold every nonzero once, with few zeros; layers of blocks equal the
same program in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_segments import draw, sees, stays_within_memory
from torch import Tensor

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.tape.layers import dense_layer, window_piece
from demask.exec.tape.layers.pack_weights import DENSE, LEAST_ROWS, Csr, DenseBlock, dense_blocks
from demask.exec.tape.segment_plan import SegmentPlan
from segment_drafts import RELU, Draft, all_at_once, check
from sparse_cases import csr, layer, matrix

GELU = ("gelu", ())


def blocks_of(weight: Tensor, groups: int = 1) -> list[DenseBlock]:
    """The dense blocks of a weight [out, in / groups, taps]."""
    out, group_inputs, taps = weight.shape
    values, crow, col = (t.numpy() for t in csr(weight.reshape(out, -1).float()))
    rows = np.repeat(np.arange(out, dtype=np.int32), np.diff(crow))
    ones = np.ones(out, np.float32)
    whole = Csr(rows, col, values, "float32", 0 * ones, ones, out)
    channels = rows // (out // groups) * group_inputs + col // taps
    return dense_blocks(whole, channels, group_inputs * groups, taps)


def spread(weight: Tensor, groups: int) -> np.ndarray:
    """The weight [out, in, taps] of one group that computes the same."""
    out, group_inputs, taps = weight.shape
    whole = np.zeros((out, group_inputs * groups, taps), np.float32)
    for row in range(out):
        first = row // (out // groups) * group_inputs
        whole[row, first : first + group_inputs] = weight[row].numpy()
    return whole


def check_laws(weight: Tensor, groups: int = 1) -> list[DenseBlock]:
    """Assert what holds for blocks of any weight; returns them."""
    blocks = blocks_of(weight, groups)
    if not blocks:
        return blocks
    found = np.zeros((len(weight), weight.shape[1] * groups, weight.shape[2]), np.float32)
    for block in blocks:
        assert (np.diff(block.rows) > 0).all() and (np.diff(block.channels) > 0).all()
        assert block.weight.shape == (len(block.rows), len(block.channels), weight.shape[2])
        found[np.ix_(block.rows, block.channels)] += block.weight
    assert np.array_equal(found, spread(weight, groups))
    rows = np.concatenate([block.rows for block in blocks])
    assert np.array_equal(np.sort(rows), np.arange(len(weight)))
    assert int(weight.count_nonzero()) >= DENSE * sum(block.weight.size for block in blocks)
    return blocks


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).float()


def diagonal(count: int, rows: int, columns: int, taps: int) -> Tensor:
    """A weight [count * rows, count * columns, taps] of dense blocks along the diagonal."""
    weight = torch.zeros(count * rows, count * columns, taps)
    for k in range(count):
        rows_k, columns_k = (slice(k * n, (k + 1) * n) for n in (rows, columns))
        weight[rows_k, columns_k] = drawn(rows, columns, taps, seed=k)
    return weight


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_laws_of_blocks(data) -> None:
    """Rows are drawn from a few supports, some without channels, with some zeros."""
    groups, taps = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 4, 9]))
    out, inputs = groups * data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    supports = torch.rand(3, inputs, generator=generator) < data.draw(st.sampled_from([0.3, 0.9]))
    of = torch.randint(0, 3, (out,), generator=generator)
    share = data.draw(st.sampled_from([1.0, 0.97, 0.8]))
    kept = torch.rand(out, inputs, taps, generator=generator) < share
    weight = drawn(out, inputs, taps, seed=seed) * supports[of][..., None] * kept
    check_laws(weight, groups)


@pytest.mark.parametrize("taps", [1, 9])
@pytest.mark.parametrize("count, rows, columns", [(4, 8, 8), (2, 3, 17), (9, 5, 1), (1, 20, 20)])
def test_a_shuffled_block_diagonal_weight(count, rows, columns, taps) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = diagonal(count, rows, columns, taps)
    weight = weight[torch.randperm(len(weight), generator=generator)]
    weight = weight[:, torch.randperm(weight.shape[1], generator=generator)]
    blocks = check_laws(weight)
    assert sorted(block.weight.shape for block in blocks) == [(rows, columns, taps)] * count


@pytest.mark.parametrize("density, count", [(1.0, 1), (0.95, 1), (0.85, 0), (0.5, 0), (0.05, 0)])
def test_unstructured_weights(density: float, count: int) -> None:
    """Mostly nonzeros are one block, half of them none."""
    for taps in (1, 9):
        weight = matrix(64, 48 * taps, density).reshape(64, 48, taps).float()
        assert len(check_laws(weight)) == count


@pytest.mark.parametrize("groups, count", [(1, 1), (2, 2), (4, 4), (8, 8)])
def test_groups_are_blocks(groups: int, count: int) -> None:
    assert len(check_laws(drawn(24, 16 // groups, 9), groups)) == count


def test_blocks_of_few_rows_are_not_worth_it() -> None:
    for rows, count in ((1, 0), (LEAST_ROWS - 1, 0), (LEAST_ROWS, 7)):
        assert len(check_laws(diagonal(7, rows, 4, 9))) == count


def test_rows_and_columns_of_zeros() -> None:
    """Rows of zeros are a block without channels; columns of zeros are in no block."""
    weight = drawn(10, 8, 9)
    weight[[2, 3, 9]], weight[:, [0, 5]] = 0.0, 0.0
    empty, full = sorted(check_laws(weight), key=lambda block: block.weight.size)
    assert empty.rows.tolist() == [2, 3, 9] and empty.channels.size == 0
    assert full.channels.tolist() == [1, 2, 3, 4, 6, 7]
    assert len(check_laws(torch.zeros(6, 4, 1))) <= 1


# ------------------------------------------------------------------------------------------ layers


def convolution(weight: Tensor, kernel: int, **fields):
    """A layer with a weight [out, in / groups, taps]."""
    window = {"kernel": (kernel, kernel), "padding": ((kernel // 2,) * 2,) * 2}
    return layer("image", weight.reshape(len(weight), -1), draw(len(weight)), **window | fields)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_blocks_are_dealt_to_threads(threads: int, emitted) -> None:
    """At a position without parts, threads share blocks; with few blocks, the rows of each."""
    for count, size in ((9, 1), (2, 1), (9, 3), (3, 20)):
        weight = diagonal(count, 5, 4, 9)[torch.randperm(5 * count)]
        check(*convolution(weight, 3, act=RELU), [draw(2, 4 * count, size, size)], threads)
    assert len(emitted) >= 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "kernel, stride, padding", [(2, 2, (0, 0)), (3, 2, (1, 0)), (4, 2, (1, 1)), (2, 3, (0, 0)), (1, 2, (0, -1))]
)
def test_transposed_convolutions(kernel, stride, padding, groups, emitted) -> None:
    """Windows without a tap are the bias alone."""
    program, weights = convolution(
        drawn(8, 6 // groups, kernel**2),
        kernel,
        groups=groups,
        stride=(stride, stride),
        transposed=True,
        padding=(padding, padding),
        act=GELU,
    )
    for threads, (batch, height, width) in enumerate(((1, 7, 9), (2, 5, 4), (1, 1, 1)), 1):
        x = draw(batch, 6, height, width)
        if min(program.shapes([x.shape])[1][2:]) > 0:
            check(program, weights, [x], threads)
    assert emitted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch, size", [(3, 4), (1, 9), (1, 1)])
def test_rows_of_zeros_keep_bias_and_activation(batch: int, size: int, emitted) -> None:
    weight = drawn(12, 5, 9)
    weight[[0, 7, 11]], weight[:, 3] = 0.0, 0.0
    program, weights = convolution(weight, 3, act=GELU)
    x = draw(batch, 5, size, size)
    plan = check(program, weights, [x])
    (y,) = plan([x])
    expected = torch.nn.functional.gelu(draw(12))[[0, 7, 11]].reshape(1, 3, 1, 1)
    torch.testing.assert_close(y[:, [0, 7, 11]], expected.expand(batch, -1, size, size))
    assert emitted


def test_channels_of_zeros_are_not_read() -> None:
    """NaN in a channel that no block reads stays there; in one block it stays in its rows."""
    weight = diagonal(3, 4, 2, 9)
    program, weights = convolution(weight, 3)
    x = draw(1, 6, 8, 8)
    x[0, 2] = torch.nan
    (y,) = SegmentPlan.of(program, weights, [x], 2)([x])
    assert bool(y[0, 4:8].isnan().all()) and bool(y[0, [*range(4), *range(8, 12)]].isfinite().all())


def test_sums_with_blocks(emitted) -> None:
    draft = Draft((2, 12, 9, 7))
    y = draft.conv(0, 12, density=1.0, groups=3, act=RELU)
    z = draft.conv(y, 12, density=1.0, groups=2, add=y)
    draft.conv(draft.cat(z, y), 12, density=1.0, groups=4, add=z, act=GELU)
    with all_at_once():
        draft.check(threads=2)
    draft.check(4, threads=1)
    assert len(emitted) >= 6


def test_tokens_of_blocks(emitted) -> None:
    weight = diagonal(4, 6, 5, 1).reshape(24, 20)[torch.randperm(24)]
    program, weights = layer("tokens", weight, draw(24), act=GELU)
    for count in (2, 5, 16, 61):
        check(program, weights, [draw(count, 20)])
    assert len(emitted) >= 8


# ------------------------------------------------------------------------------------------ kernels

CASES = {
    "groups": lambda: convolution(drawn(12, 3, 9), 3, groups=4),
    "shuffled": lambda: convolution(diagonal(3, 5, 4, 9)[torch.randperm(15)], 3),
    "transposed": lambda: convolution(drawn(8, 12, 9), 3, transposed=True, stride=(2, 2)),
    "zeros": lambda: convolution(drawn(7, 12, 1) * (torch.arange(7) % 3 > 0).reshape(7, 1, 1), 1),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_nothing_beside_its_memory_is_touched(name: str, emitted) -> None:
    program, weights = CASES[name]()
    for threads, size in ((1, (11, 13)), (2, (3, 5)), (2, (1, 1))):
        stays_within_memory(program, weights, [draw(1, 12, *size)], threads)
    assert emitted


# --------------------------------------------------------------------------------- planted faults


def every_tap(_):
    """Windows of a transposed convolution read the first taps instead of their own."""

    def first(piece, block):
        count = sum(y is not None and x is not None for y in piece.window.taps[0] for x in piece.window.taps[1])
        return DenseBlock(block.rows, block.channels, block.weight[:, :, :count])

    return first


def blocks(change) -> tuple:
    """The blocks of a weight as `change` makes them."""
    return window_piece, "dense_blocks", lambda real: lambda *args: change(real(*args))


FAULTS = {
    "groups": blocks(  # read the channels behind their own
        lambda found: [DenseBlock(b.rows, np.roll(b.channels, 1), b.weight) for b in found]
    ),
    "shuffled": blocks(lambda found: [DenseBlock(b.rows[::-1], b.channels, b.weight) for b in found]),
    "zeros": blocks(lambda found: [b for b in found if b.channels.size]),  # never written
    "transposed": (dense_layer, "_restrict_to_window", every_tap),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    program, weights = CASES[name]()
    sees(*FAULTS[name], lambda: check(program, weights, [draw(1, 12, 9, 10)]))


def test_a_block_lost_or_met_twice_is_seen(monkeypatch) -> None:
    weight = diagonal(4, 5, 3, 1)
    blocks = blocks_of(weight)
    for wrong in (blocks[1:], [*blocks, blocks[0]]):
        monkeypatch.setitem(globals(), "blocks_of", lambda *_, wrong=wrong: wrong)
        with pytest.raises(AssertionError):
            check_laws(weight)


def test_dense_layers_of_float32_only(emitted) -> None:
    """Weights of fewer bits are for the sparse kernels."""
    program, weights = convolution(drawn(12, 3, 9), 3, groups=4)
    (step,) = program.steps
    assert step.op == "conv" and isinstance(program, SegmentProgram)
    check(program, [weights[0].bfloat16(), *weights[1:]], [draw(1, 12, 7, 7)])
    assert not emitted
