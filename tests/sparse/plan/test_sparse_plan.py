"""Segments by kernels equal the same program in float64, on every width of vectors this machine
has, for odd sizes, any strides, and any number of threads; nothing beside their memory is touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from demask.errors import BadInput
from demask.kernels import thread_team as team
from demask.kernels.cpu.tiles.dense.dense_tile import DenseTileKernel
from demask.kernels.cpu.tiles.depthwise_tile import DepthwiseTileKernel
from demask.kernels.cpu.tiles.mean import MeanKernel
from demask.kernels.cpu.tiles.relayout import (
    BorderKernel,
    Gather,
    Pointwise,
    PoolKernel,
    Scatter,
    TransposedKernel,
)
from demask.kernels.cpu.tiles.sparse_tile import SparseTileKernel
from demask.kernels.cpu.tiles.sparse_vector import SparseVectorKernel
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, Isa, host
from demask.kernels.llvm.jit import assembly
from demask.kernels.thread_team import TeamWork
from demask.ops.activations import ACTIVATIONS
from demask.sparse import reference as dense
from demask.sparse.plan import segment_plan as plan
from demask.sparse.plan import tape
from demask.sparse.plan.layers.pack_weights import dealt
from demask.sparse.plan.segment_plan import NoPlan, SegmentPlan
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import (
    ActivationStep,
    AddStep,
    ConcatStep,
    ConvStep,
    FlattenStep,
    LinearStep,
    SparseWeight,
)
from demask.sparse.segment_steps import MeanStep as MeanStep
from demask.sparse.segment_steps import PoolStep as PoolStep
from guarded import guarded
from sparse_cases import csr, layer, matrix

ULPS = 64.0  # of the largest output: sums are taken in another order


def narrower(lanes: int, registers: int) -> Isa:
    """This machine, with shorter vectors."""
    return replace(host(), name=f"{lanes} lanes", lanes=lanes, registers=registers)


WIDTHS = [isa for isa in (narrower(4, 16), narrower(8, 16), host()) if isa.lanes <= host().lanes]
# The narrowest at night: it differs from the middle one in numbers only.
MOST = [pytest.param(isa, marks=pytest.mark.nightly) if isa.lanes == 4 else isa for isa in WIDTHS]


def check(
    program: SegmentProgram, weights, inputs, threads: int = 2, isa: Isa | None = None
) -> SegmentPlan:
    """Compare a plan with the program in float64; twice, since memory is used again."""
    made = SegmentPlan.of(program, weights, inputs, threads, isa)
    wide = [w.double() if w.is_floating_point() else w for w in weights]
    expected = dense.run(program, [x.double() for x in inputs], wide)
    first, again = made(inputs), made(inputs)
    for a, b, want in zip(first, again, expected, strict=True):
        assert a.shape == want.shape and torch.equal(a, b)
        unit = torch.finfo(torch.float32).eps * max(float(want.abs().max()), 1e-30)
        assert float((a.double() - want).abs().max()) <= ULPS * unit
    return made


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GEOMETRY = [
    # kernel, stride, padding, dilation, groups, transposed
    ((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1, False),
    ((1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1), 2, False),
    ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1, False),
    ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1, False),
    ((3, 2), (2, 1), ((0, 1), (1, 0)), (1, 1), 2, False),
    ((3, 3), (1, 1), ((4, 4), (4, 4)), (4, 4), 1, False),
    ((5, 3), (3, 3), ((2, 2), (0, 0)), (1, 2), 6, False),
    ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1, True),
    ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), 2, True),
    ((2, 3), (3, 1), ((0, 0), (1, 0)), (1, 2), 1, True),
]
SIZES = [(1, 9, 7), (3, 14, 14), (1, 33, 20), (5, 6, 5)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("isa", MOST, ids=lambda isa: isa.name)
@pytest.mark.parametrize("place", range(len(GEOMETRY)))
def test_convolutions(place, isa):
    kernel, stride, padding, dilation, groups, transposed = GEOMETRY[place]
    for (batch, height, width), density in product(SIZES, (0.0, 0.1, 0.7)):
        weight = matrix(12, 12 // groups * kernel[0] * kernel[1], density, dtype=torch.float32)
        weight[3] = 0.0  # an empty row
        weight[5] = 1.5  # a dense one
        program, weights = layer(
            "image", weight, draw(12), kernel=kernel, stride=stride, padding=padding,
            dilation=dilation, groups=groups, transposed=transposed, act=("relu", ()),
        )  # fmt: skip
        check(program, weights, [draw(batch, 12, height, width)], 1 + place % 3, isa)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", MOST, ids=lambda isa: isa.name)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 17, 100])
def test_tokens(count, isa):
    for (rows, columns), density in product([(1, 5), (33, 64), (96, 7)], (0.0, 0.2, 1.0)):
        weight = matrix(rows, columns, density, dtype=torch.float32)
        program, weights = layer("tokens", weight, draw(rows))
        check(program, weights, [draw(count, columns)], 2, isa)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_with_a_sum(name):
    act = (name, (-0.5, 2.0)[: ACTIVATIONS[name].count])
    weight = matrix(20, 24, 0.3, dtype=torch.float32) * 3
    program, weights = layer("tokens", weight, draw(20))
    step = replace(program.steps[0], act=act, add=1)
    both = SegmentProgram(
        ("tokens", "tokens"), (step, ActivationStep(2, act), AddStep(2, 1, act)), (2, 3, 4)
    )
    check(both, weights, [draw(2, 9, 24), draw(2, 9, 20, seed=2)])


@pytest.mark.parametrize("mean", [False, True])
def test_pools_keep_what_is_not_finite(mean):
    """NaN or an infinity in any position of a window, as in torch."""
    program = SegmentProgram(("image",), (PoolStep(0, mean, (3, 3), (2, 2), (1, 1)),), (1,))
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
        spans.append(SparseWeight((first, 0, len(parts[0])), (first + 1, 0, rows + 1),
                            (first + 2, 0, len(parts[2]))))  # fmt: skip
        weights += parts
    relu = ("relu", ())
    steps = (
        ConvStep(0, spans[0], None, 8, (7, 7), (2, 2), ((3, 3), (3, 3)), act=relu),
        PoolStep(1, False, (3, 3), (2, 2), (1, 1)),
        ConvStep(2, spans[1], None, 16, (1, 1)),
        PoolStep(3, False, (3, 3), (2, 2), (1, 1), ceil=True),  # of negative values too
        PoolStep(3, True, (3, 3), (2, 2), (1, 1), ceil=True, counted=False),
        ConvStep(3, spans[2], None, 16, (3, 3), (2, 2), ((1, 1), (1, 1)), act=relu),
        ConvStep(3, spans[3], None, 24, (1, 1), (2, 2)),
        ConvStep(6, spans[4], None, 24, (1, 1), act=relu, add=7),  # over what it adds
        ConvStep(8, spans[5], None, 24, (1, 1), add=8, act=("silu", ())),
        MeanStep(9, False),
        LinearStep(10, spans[6], None, 10),
        MeanStep(9, True),
        FlattenStep(12),
        ConcatStep((3, 3)),
        PoolStep(2, True, (2, 2), (2, 2)),
    )
    program = SegmentProgram(("image",), steps, (4, 5, 11, 13, 14, 15))
    return program, weights, [draw(batch, 3, size, size)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("isa", WIDTHS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("batch, size, threads", [(1, 57, 2), (1, 64, 3), (3, 30, 2), (4, 9, 1)])
def test_networks(batch, size, threads, isa):
    program, weights, inputs = network(batch, size)
    assert SegmentProgram.parse(program.text()) == program
    check(program, weights, inputs, threads, isa)


def test_batches_are_cut_into_runs():
    program, weights, inputs = network(7, 40)
    made = check(program, weights, inputs, 2)
    assert sum(batch.images * batch.runs for batch in made.batches) == 7
    assert made.batches[0].alone


def test_memory_in_any_order():
    """Channels last, transposed, every other image, misaligned by one float."""
    program, weights = layer("image", matrix(6, 5 * 9, 0.3, dtype=torch.float32),
                             kernel=(3, 3), padding=((1, 1), (1, 1)))  # fmt: skip
    x = draw(4, 5, 12, 10)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for one in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[::2],
                x[:, :, 1:, 2:], shifted, x[:1].expand(3, -1, -1, -1)):  # fmt: skip
        check(program, weights, [one])
    program, weights = layer("tokens", matrix(40, 50, 0.2, dtype=torch.float32))
    for one in (draw(50, 21).T, draw(21, 60)[:, 3:53], draw(3, 7, 50)):
        check(program, weights, [one])


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
    program = SegmentProgram(
        ("tokens", "tokens"), (LinearStep(0, spans, bias, 32, ("relu", ()), 1),), (2,)
    )
    check(program, weights, [draw(count, 48), draw(count, 32)])


def test_threads_of_python(monkeypatch):
    """Where torch's OpenMP is not GNU's."""
    monkeypatch.setattr(team, "openmp", lambda: None)
    program, weights, inputs = network(1, 33)
    check(program, weights, inputs, 3)


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
    [
        ("kernels.cpu.tiles.sparse_tile", 20, "20 nonzeros"),
        ("sparse.plan.tape", 63, "more than 252"),
    ],
)
def test_numbers_beyond_32_bits(monkeypatch, where, most, words):
    """No plan, instead of tables whose numbers wrap: nonzeros of a stream, elements of a value."""
    program, weights = layer("tokens", matrix(6, 8, 0.5, dtype=torch.float32))
    check(program, weights, [draw(3, 8)], 1)
    monkeypatch.setattr(f"demask.{where}.MOST", most)
    with pytest.raises(NoPlan, match=words):
        SegmentPlan.of(program, weights, [draw(3, 8)], 1)


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


class Guarded(tape.TapeArena):
    """An arena that ends where memory ends."""

    def __init__(self, size: int):
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
        first = (room - size) // 64 * 64
        self.slots = np.frombuffer(self.memory, np.int64, tape.MAX_SLOTS, first)
        self.address = self.slots.ctypes.data
        self.slots[0] = self.address


@pytest.mark.parametrize("end", [True, False])
def test_nothing_beside_its_memory_is_touched(monkeypatch, end):
    """Inputs, weights, tables and the arena each end (or begin) at a page that cannot be read; of
    outputs the neighbours keep their values."""
    kept = []

    def held(self, call, offsets):
        for key, value in list(call.fields.items()):
            if isinstance(value, np.ndarray):
                raw = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
                made = guarded(torch.from_numpy(raw.copy()), end)
                kept.append(made)
                call.fields[key] = made.numpy()
        return fields(self, call, offsets)

    fields = tape.Tape._fields
    monkeypatch.setattr(tape.Tape, "_fields", held)
    monkeypatch.setattr(plan, "TapeArena", Guarded)
    cases = [network(1, 23), network(3, 12)]
    for place, density in ((3, 0.3), (6, 0.3), (7, 0.3), (0, 1.0), (3, 1.0), (5, 1.0)):
        kernel, stride, padding, dilation, groups, transposed = GEOMETRY[place]
        weight = matrix(12, 12 // groups * kernel[0] * kernel[1], density, dtype=torch.float32)
        cases.append((*layer("image", weight, draw(12), kernel=kernel, stride=stride,
                             padding=padding, dilation=dilation, groups=groups,
                             transposed=transposed), [draw(1, 12, 11, 13)]))  # fmt: skip
    for kernel, size in ((3, 11), (5, 40)):  # edges permuted, and stored
        weight = matrix(12, kernel**2, 1.0, dtype=torch.float32)
        made = layer("image", weight, draw(12), kernel=(kernel, kernel), groups=12,
                     padding=((kernel // 2,) * 2,) * 2)  # fmt: skip
        cases.append((*made, [draw(1, 12, size, size)]))
    for count in (1, 5, 40):
        weight = matrix(37, 21, 0.3, dtype=torch.float32)
        cases.append((*layer("tokens", weight, draw(37)), [draw(count, 21)]))
    for program, weights, inputs in cases:
        inputs = [guarded(x, end) for x in inputs]
        made = SegmentPlan.of(program, weights, inputs, 2)
        poisoned = [torch.full((torch.Size(s).numel() + 64,), 7.0) for s in made.shapes]
        views = [p[32:-32].view(s) for p, s in zip(poisoned, made.shapes, strict=True)]
        for batch in made.batches:
            batch.run(2, (*inputs, *views))
        assert all(bool((p[:32] == 7).all() and (p[-32:] == 7).all()) for p in poisoned)
        whole = made(inputs)
        assert all(map(torch.equal, whole, views))


KERNELS = [
    SparseTileKernel((0, 1, 2), (0, 1, 2), (0, 3, 6), 2, ("gelu", ())),
    SparseTileKernel((0,), (0,), None, 4, ("silu", ()), "bfloat16", True),
    DenseTileKernel((0, 1, 2), (0, 1, 2), (0, 3, 6), (0, 1, 8), 4, ("silu", ())),
    DenseTileKernel((0, 1), (0, 1), None, (0,), 3, None, 4),
    DepthwiseTileKernel(((0, 0, 1, 7),), ((0, 2, 4),) * 2, (2, 2), (20, 7), ("silu", ())),
    SparseTileKernel((0, 9), (0, 1), None, 1, ("gelu_tanh", ()), "int8"),
    SparseVectorKernel(True, ("hardswish", ()), "int8"),
    SparseVectorKernel(False, None, "bfloat16"),
    Gather(), Scatter(), TransposedKernel(True), TransposedKernel(False),
    PoolKernel((0, 1, 5), True), PoolKernel((0, 7), False),
    Pointwise(("tanh", ()), True), MeanKernel(((0, 1), (2, 3))), TeamWork(True), TeamWork(False),
]  # fmt: skip


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_code_for_other_processors(isa):
    """What cannot be run here is compiled at least, to the vector instructions it should have."""
    lanes = ((*range(1, isa.lanes), -1),)
    ends = BorderKernel(lanes, ((0, 0, 9, 1), (0, 3, 40, 30)))
    inside = DepthwiseTileKernel(((0, 0, 1, 3), (1, 0, 1, 3)), ((-1, 0, 1), (0, 1)), (1, 1),
                                 (3, 3, 5), None, ((-1, 0, 4, 0), (2, 3, 1, 0)), lanes)  # fmt: skip
    text = assembly([*KERNELS, ends, inside], isa)
    wanted = {"AVX-512": ("vfmadd", "zmm"), "AVX2": ("vfmadd", "ymm"), "NEON": ("fmla", "v0.4s")}
    assert all(word in text for word in wanted[isa.name])


def test_rows_are_dealt_by_their_nonzeros():
    counts = np.array([100, 1, 1, 1, 50, 1, 1, 45])
    parts = dealt(counts, 2)
    assert np.array_equal(np.concatenate(parts), np.arange(8))
    assert [int(counts[part].sum()) for part in parts] == [100, 100]
    assert [len(part) for part in dealt(np.array([5]), 3)] == [1, 0, 0]


def test_a_planted_fault_is_seen():
    """The comparison itself: one nonzero that is off by a thousandth."""
    program, weights = layer("tokens", matrix(16, 16, 0.5, dtype=torch.float32))
    spoiled = [weights[0].clone(), *weights[1:]]
    spoiled[0][3] *= 1.001
    x = draw(8, 16)
    made = SegmentPlan.of(program, spoiled, [x], 1)([x])[0]
    want = dense.run(program, [x.double()], [weights[0].double(), *weights[1:]])[0]
    unit = torch.finfo(torch.float32).eps * float(want.abs().max())
    assert float((made.double() - want).abs().max()) > ULPS * unit
