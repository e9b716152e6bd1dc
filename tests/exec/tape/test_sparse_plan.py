"""Segments by kernels equal the same program in float64, on every width of vectors this machine
has, for odd sizes, any strides, and any number of threads; nothing beside their memory is touched.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from random_segments import MOST, WIDTHS, computed_as, draw, stays_within_memory, widths

from demask.errors import BadInput
from demask.exec.steps import reference as dense
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import (
    SparseWeight,
    activation_step,
    add_step,
    concat_step,
    conv_step,
    flat_step,
    linear_step,
    mean_step,
    pool_step,
)
from demask.exec.tape.layers.pack_weights import Csr, LineOffsets, dealt, packed
from demask.exec.tape.segment_plan import NoPlan, SegmentPlan
from demask.exec.tape.tile_layout import NO_BORDER
from demask.kernels import thread_team as team
from demask.kernels.llvm.isa import Isa
from demask.ops.activations import ACTIVATIONS
from segment_drafts import RELU, Draft, check, compare
from sparse_cases import csr, layer, matrix

ACTS = {"sparse": RELU, "dense": ("silu", ()), "depthwise": ("silu", ()), "blocks": ("gelu", ())}


def window(
    kernel: tuple, stride: tuple = (1, 1), padding: tuple | None = None, dilation: tuple = (1, 1), **fields: bool
) -> dict:
    """Fields of a convolution that keeps the size of images, unless they say otherwise."""
    if padding is None:
        padding = tuple((d * (k // 2),) * 2 for d, k in zip(dilation, kernel, strict=True))
    given = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return given | fields


NONE = ((0, 0), (0, 0))
GEOMETRY = {
    "1x1": window((1, 1)),
    "1x1 stride": window((1, 1), (2, 2)),
    "3x3": window((3, 3)),
    "3x3 stride": window((3, 3), (2, 2)),
    "5x5": window((5, 5)),
    "5x5 stride": window((5, 5), (2, 2)),
    "7x7": window((7, 7)),
    "7x7 stride": window((7, 7), (2, 2)),
    "dilation 2": window((3, 3), dilation=(2, 2)),
    "dilation 2 stride": window((3, 3), (2, 2), dilation=(2, 2)),
    "dilation 4": window((3, 3), dilation=(4, 4)),
    "no padding": window((3, 3), padding=NONE),
    "uneven": window((3, 2), (2, 1), ((0, 1), (1, 0))),
    "far padding": window((2, 3), (3, 3), ((1, 2), (6, 5)), (1, 3)),
    "columns": window((5, 3), (3, 3), ((2, 2), (0, 0)), (1, 2)),
    "transposed 3x3": window((3, 3), (2, 2), transposed=True),
    "transposed 2x2": window((2, 2), (2, 2), NONE, transposed=True),
    "transposed uneven": window((2, 3), (3, 1), ((0, 0), (1, 0)), (1, 2), transposed=True),
}
BLOCKS = ("1x1", "3x3", "3x3 stride", "5x5")
DEPTHWISE = ("3x3", "3x3 stride", "5x5", "5x5 stride", "7x7", "dilation 2", "dilation 2 stride",
             "no padding", "1x1", "uneven", "far padding")  # fmt: skip
FORMS = {  # name -> geometries, groups
    "sparse": (("1x1", "3x3", "3x3 stride", "dilation 4", "transposed 3x3", "transposed uneven"), 1),
    "sparse 2 groups": (("1x1 stride", "uneven", "transposed 2x2"), 2),
    "sparse 6 groups": (("columns",), 6),
    "dense": (("1x1", "1x1 stride", "3x3", "3x3 stride", "uneven", "dilation 4", "7x7 stride"), 1),
    "blocks 2": (BLOCKS, 2),
    "blocks 4": (BLOCKS, 4),
    "blocks 6": (BLOCKS, 6),
    "depthwise stored": (DEPTHWISE, 0),
    "depthwise permuted": (DEPTHWISE, 0),
}
SIZES = [(1, 9, 7), (3, 14, 14), (1, 33, 20), (5, 6, 5)]  # batch, height, width
CHANNELS = {
    "dense": [(3, 13), (17, 8), (40, 1), (1, 31)],
    "depthwise": [(5, 5), (17, 17), (6, 12), (3, 9)],
    "blocks": [(12, 24)] * 4,
    "sparse": [(12, 12)] * 4,
}


@pytest.mark.sampled(6)
@widths(MOST)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 17, 100])
def test_tokens(count, isa):
    for (rows, columns), density in product([(1, 5), (33, 64), (96, 7)], (0.0, 0.2, 1.0)):
        weight = matrix(rows, columns, density, dtype=torch.float32)
        program, weights = layer("tokens", weight, draw(rows))
        check(program, weights, [draw(count, columns)], 2, isa, each=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_with_a_sum(name):
    act = (name, (-0.5, 2.0)[: ACTIVATIONS[name].count])
    weight = matrix(20, 24, 0.3, dtype=torch.float32) * 3
    program, weights = layer("tokens", weight, draw(20))
    step = replace(program.steps[0], reads=(0, 1), act=act, adds=True)
    both = SegmentProgram(("tokens", "tokens"), (step, activation_step(2, act), add_step(2, 1, act)), (2, 3, 4))
    check(both, weights, [draw(2, 9, 24), draw(2, 9, 20, seed=2)], each=True)


@pytest.mark.parametrize("mean", [False, True])
def test_pools_keep_what_is_not_finite(mean):
    """NaN or an infinity in any position of a window, as in torch."""
    program = SegmentProgram(("image",), (pool_step(0, mean, (3, 3), (2, 2), (1, 1)),), (1,))
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.zeros(25, 25).fill_diagonal_(value).reshape(25, 1, 5, 5)
        (found,) = SegmentPlan.of(program, [], [x], 1)([x])
        assert torch.equal(found.nan_to_num(7.0), dense.run(program, [x], [])[0].nan_to_num(7.0))


def network(batch: int, size: int):
    """Layers with residual sums, pools of every kind, means, channels joined."""
    dims = [(8, 3 * 49), (16, 8), (16, 16 * 9), (24, 16), (24, 16), (24, 24), (10, 24)]
    weights, spans = [], []
    for k, (rows, columns) in enumerate(dims):
        parts = csr(matrix(rows, columns, 0.2, k, torch.float32))
        first = len(weights)
        spans.append(SparseWeight((first, 0, len(parts[0])), (first + 1, 0, rows + 1), (first + 2, 0, len(parts[2]))))
        weights += parts
    relu = ("relu", ())
    steps = (
        conv_step(0, spans[0], None, 8, (7, 7), (2, 2), ((3, 3), (3, 3)), act=relu),
        pool_step(1, False, (3, 3), (2, 2), (1, 1)),
        conv_step(2, spans[1], None, 16, (1, 1)),
        pool_step(3, False, (3, 3), (2, 2), (1, 1), ceil=True),  # of negative values too
        pool_step(3, True, (3, 3), (2, 2), (1, 1), ceil=True, counted=False),
        conv_step(3, spans[2], None, 16, (3, 3), (2, 2), ((1, 1), (1, 1)), act=relu),
        conv_step(3, spans[3], None, 24, (1, 1), (2, 2)),
        conv_step(6, spans[4], None, 24, (1, 1), act=relu, add=7),  # over what it adds
        conv_step(8, spans[5], None, 24, (1, 1), add=8, act=("silu", ())),
        mean_step(9, False),
        linear_step(10, spans[6], None, 10),
        mean_step(9, True),
        flat_step(12),
        concat_step((3, 3)),
        pool_step(2, True, (2, 2), (2, 2)),
    )
    program = SegmentProgram(("image",), steps, (4, 5, 11, 13, 14, 15))
    return program, weights, [draw(batch, 3, size, size)]


@pytest.mark.sampled(4)
@widths()
@pytest.mark.parametrize("batch, size, threads", [(1, 57, 2), (1, 64, 3), (3, 30, 2), (4, 9, 1)])
def test_networks(batch, size, threads, isa):
    program, weights, inputs = network(batch, size)
    assert SegmentProgram.parse(program.text()) == program
    check(program, weights, inputs, threads, isa, each=True)


def test_batches_are_cut_into_runs():
    program, weights, inputs = network(7, 40)
    made = check(program, weights, inputs, 2, each=True)
    assert sum(batch.images * batch.runs for batch in made.batches) == 7
    assert made.batches[0].alone


def test_memory_in_any_order():
    """Channels last, transposed, every other image, misaligned by one float."""
    program, weights = layer(
        "image", matrix(6, 5 * 9, 0.3, dtype=torch.float32), kernel=(3, 3), padding=((1, 1), (1, 1))
    )
    x = draw(4, 5, 12, 10)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for one in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[::2],
        x[:, :, 1:, 2:],
        shifted,
        x[:1].expand(3, -1, -1, -1),
    ):
        check(program, weights, [one], each=True)
    program, weights = layer("tokens", matrix(40, 50, 0.2, dtype=torch.float32))
    for one in (draw(50, 21).T, draw(21, 60)[:, 3:53], draw(3, 7, 50)):
        check(program, weights, [one], each=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [1, 20])
def test_stored_in_less(dtype, count):
    """bfloat16 values, and int8 with a scale per row, count as what they stand for."""
    values, crow, col = csr(matrix(32, 48, 0.3, dtype=torch.float32))
    spans = SparseWeight((0, 0, len(values)), (1, 0, 33), (2, 0, len(col)))
    weights = [values.to(dtype) if dtype.is_floating_point else (values * 30).to(dtype), crow, col]
    if dtype is torch.int8:
        weights.append(draw(32).abs() + 0.1)
        spans = replace(spans, scale=(3, 0, 32))
    weights.append(draw(32, seed=3))
    bias = (len(weights) - 1, 0, 32)
    program = SegmentProgram(("tokens", "tokens"), (linear_step(0, spans, bias, 32, ("relu", ()), 1),), (2,))
    check(program, weights, [draw(count, 48), draw(count, 32)], each=True)


def test_threads_of_python(monkeypatch):
    """Where torch's OpenMP is not GNU's."""
    monkeypatch.setattr(team, "openmp", lambda: None)
    program, weights, inputs = network(1, 33)
    check(program, weights, inputs, 3, each=True)


def test_fewer_threads_than_the_plan_has():
    program, weights, inputs = network(1, 33)
    made = SegmentPlan.of(program, weights, inputs, 4)
    (batch,) = made.batches
    whole = made(inputs)
    outputs = [torch.empty(shape) for shape in made.shapes]
    for count in (1, 2, 3):
        batch.run(count, (*inputs, *outputs))
        assert all(map(torch.equal, whole, outputs))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda w: w[2].fill_(99), "columns below"),
        (lambda w: w[2].fill_(-1), "columns below"),
        (lambda w: w[1].fill_(3), "row starts"),
    ],
)
def test_weights_that_do_not_fit(spoil, words):
    program, weights = layer("tokens", matrix(6, 8, 0.5, dtype=torch.float32))
    spoil(weights)
    with pytest.raises(BadInput, match=words):
        SegmentPlan.of(program, weights, [draw(3, 8)], 1)


def test_what_kernels_do_not_take():
    """Another dtype, more tensors than an arena has slots for: the op computes these otherwise."""
    program, weights = layer("tokens", matrix(6, 8, 0.5, dtype=torch.float32))
    with pytest.raises(NoPlan, match="float64"):
        SegmentPlan.of(program, [weights[0].double(), *weights[1:]], [draw(3, 8)], 1)
    many = replace(program, outputs=program.outputs * 600)
    with pytest.raises(NoPlan, match="600 outputs"):
        SegmentPlan.of(many, weights, [draw(64, 8)], 2)


@pytest.mark.parametrize(
    "where, most, words",
    [("kernels.cpu.tiles.sparse_tile", 20, "20 nonzeros"), ("exec.tape.tape", 63, "more than 252")],
)
def test_numbers_beyond_32_bits(monkeypatch, where, most, words):
    """No plan, instead of tables whose numbers wrap: nonzeros of a stream, elements of a value."""
    program, weights = layer("tokens", matrix(6, 8, 0.5, dtype=torch.float32))
    check(program, weights, [draw(3, 8)], 1, each=True)
    monkeypatch.setattr(f"demask.{where}.MOST", most)
    with pytest.raises(NoPlan, match=words):
        SegmentPlan.of(program, weights, [draw(30, 8)], 1)


def test_a_forked_process_has_memory_of_its_own():
    program, weights, inputs = network(1, 33)
    made = SegmentPlan.of(program, weights, inputs, 1)
    made(inputs)
    (memory,) = made.batches[0].spare
    arena = memory.arenas[0]
    arena.slots[5] = 7
    pid = os.fork()
    if not pid:
        arena.slots[5] = 8
        os._exit(0)
    os.waitpid(pid, 0)
    assert arena.slots[5] == 7


def one_layer(form: str, geometry: str, density: float, size: int) -> tuple:
    kind, fields = form.partition(" ")[0], GEOMETRY[geometry]
    groups = FORMS[form][1] or 12
    weight = matrix(12, 12 // groups * math.prod(fields["kernel"]), density, dtype=torch.float32)
    made = layer("image", weight, draw(12), **fields, act=ACTS[kind], groups=groups)
    return *made, [draw(1, 12, size, size + 2)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", [
    lambda: network(1, 23), lambda: network(3, 12),
    *(partial(one_layer, form, name, density, size) for form, name, density, size in (
        ("sparse", "3x3 stride", 0.3, 11), ("sparse 6 groups", "columns", 0.3, 11),
        ("sparse", "transposed 3x3", 0.3, 11), ("dense", "1x1", 1.0, 11),
        ("dense", "3x3 stride", 1.0, 11), ("dense", "dilation 4", 1.0, 11),
        ("depthwise permuted", "3x3", 1.0, 11), ("depthwise stored", "5x5", 1.0, 40))),
    *(lambda count=count: (*layer("tokens", matrix(37, 21, 0.3, dtype=torch.float32), draw(37)),
                           [draw(count, 21)]) for count in (1, 5, 40)),
])  # fmt: skip
def test_nothing_beside_its_memory_is_touched(case) -> None:
    stays_within_memory(*case())


def test_rows_are_dealt_by_their_nonzeros():
    counts = np.array([100, 1, 1, 1, 50, 1, 1, 45])
    parts = dealt(counts, 2)
    assert np.array_equal(np.concatenate(parts), np.arange(8))
    assert [int(counts[part].sum()) for part in parts] == [100, 100]
    assert [len(part) for part in dealt(np.array([5]), 3)] == [1, 0, 0]


def test_a_planted_fault_is_seen() -> None:
    """The comparison itself: one nonzero that is off by a thousandth."""
    program, weights = layer("tokens", matrix(16, 16, 0.5, dtype=torch.float32))
    x = draw(8, 16)
    spoiled = [weights[0].clone(), *weights[1:]]
    spoiled[0][3] *= 1.001
    made = SegmentPlan.of(program, spoiled, [x], 1)([x])
    for each in (False, True):
        with pytest.raises(AssertionError):
            compare(made, program, weights, [x], each)


@pytest.mark.sampled(24)
@widths(MOST)
@pytest.mark.parametrize("form, geometry", [(form, name) for form, (names, _) in FORMS.items() for name in names])
def test_convolutions(form: str, geometry: str, isa: Isa, monkeypatch) -> None:
    """Each width of vectors has two of the sizes, so all of them together have each twice."""
    kind, place = form.partition(" ")[0], list(GEOMETRY).index(geometry) + WIDTHS.index(isa)
    fields = GEOMETRY[geometry]
    found = computed_as(form if kind == "depthwise" else "dense", monkeypatch)
    densities = {"sparse": (0.0, 0.1, 0.7), "blocks": (1.0,)}.get(kind)
    for k in (place % 4, (place + 2) % 4):
        (inputs, out), groups = CHANNELS[kind][k], FORMS[form][1]
        for density in densities or (1.0 if k % 2 == 0 or inputs * out <= 100 else 0.97,):
            weight = matrix(
                out, inputs // (groups or inputs) * math.prod(fields["kernel"]), density, dtype=torch.float32
            )
            if kind == "sparse":
                weight[3], weight[5] = 0.0, 1.5  # an empty row and a dense one
            program, weights = layer("image", weight, draw(out), **fields, act=ACTS[kind], groups=groups or inputs)
            x, *rest = SIZES[k]
            check(program, weights, [draw(x, inputs, *rest)], 1 + place % 3, isa, each=True)
    assert kind == "sparse" or len(found) >= 2
    if kind == "blocks":
        assert {shape[:2] for shape in found} == {(24 // groups, 12 // groups)}
    spans = zip(*(fields[n] for n in ("padding", "dilation", "kernel")), strict=True)
    pads = all(before + after >= d * (k - 1) for (before, after), d, k in spans)
    if form == "depthwise permuted" and pads:  # else tiles of an output do not cover its input
        assert all(piece.x.layout.border == NO_BORDER for piece in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["dense", "channels", "filtered", "depthwise stored", "depthwise permuted"])
def test_sums_are_added_and_may_be_overwritten(form: str, monkeypatch) -> None:
    found = computed_as(form, monkeypatch)
    sizes = ((1, 7, 7), (1, 1, 1), (1, 3, 14)) if form == "channels" else ((2, 19, 11),)
    for k, (batch, *size) in enumerate(sizes):
        draft = Draft((batch, 20, *size))
        fields = {"density": 1.0, "groups": 20 if form.startswith("depthwise") else 1}
        first = draft.conv(0, 20, act=RELU, **fields)
        second = draft.conv(first, 20, add=first, **fields)
        draft.conv(second, 20, add=first, act=("silu", ()), **fields)
        for outputs in ((3,), (1, 2, 3)):
            draft.check(*outputs, threads=1 + k % 2, each=True)
    assert len(found) >= 6 * len(sizes)


def test_padding_reads_lines_of_its_row() -> None:
    """Rows of 3, 1 and no nonzeros together, of two channels of 100 lines: 0 * inf is NaN."""
    rows, columns = np.array([0, 0, 0, 1], np.int32), np.array([5, 9, 15, 14], np.int32)
    numbers = np.ones(4, np.float32)
    weight = Csr(rows, columns, numbers, "float32", np.zeros(3, np.float32), np.ones(3, np.float32), 3)
    lines = LineOffsets(columns // 10, columns % 10, np.arange(3), np.arange(3), 100)
    stream = packed(weight, lines, np.arange(3), block=2, side=3, line=64)
    read = stream.offsets.reshape(-1, 3).tolist()
    assert read == [[5, 104, 5], [9, 104, 9], [105, 104, 105]]
    assert stream.values.reshape(-1, 3).tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
