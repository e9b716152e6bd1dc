"""Depthwise layers of segments equal the same program in float64, with edges of tiles stored or
permuted as they are read: odd sizes, any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_segments import MOST, draw, record, sees, widths
from torch.nn.functional import conv2d

from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import SparseWeight, add_step, conv_step, pool_step
from demask.exec.tape.layers import depthwise_layer, layer_plan
from demask.exec.tape.layers.depthwise_layer import permutes_edges
from demask.exec.tape.layers.window_piece import WindowPiece
from demask.exec.tape.segment_plan import SegmentPlan
from demask.exec.tape.tile_layout import NO_BORDER, GridLayout, TileGrid
from demask.kernels.llvm.isa import AVX2, host
from demask.ops.activations import ACTIVATIONS
from segment_drafts import check
from sparse_cases import csr, layer, matrix


def depthwise(channels: int, kernel: int = 3, outputs: int = 1, density: float = 1.0, **fields):
    """A program of one depthwise layer that keeps the size of an image, and its weights."""
    weight = matrix(channels * outputs, kernel**2, density, dtype=torch.float32)
    given = {"kernel": (kernel, kernel), "padding": ((kernel // 2,) * 2,) * 2, "groups": channels}
    return layer("image", weight, draw(channels * outputs), **(given | fields))


@pytest.fixture
def emitted(monkeypatch) -> list[WindowPiece]:
    """The layers that were emitted as depthwise layers."""
    return record(monkeypatch, layer_plan, "emit_depthwise", lambda tape, isa, piece: [piece])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [(7, 7), (14, 9), (3, 1), (40, 25)], ids=str)
def test_threads(size, edges):
    program, weights = depthwise(7, act=("relu", ()))
    check(program, weights, [draw(1, 7, *size)], (1, 2, 3, 5), each=True)
    assert len(edges) == 4


@pytest.mark.sampled(2)
def test_wide_rows_are_cut(edges):
    """Sixteen images in the lanes of a vector: a row has as many lines as pixels."""
    program, weights = depthwise(2, 5)
    check(program, weights, [draw(host().lanes, 2, 3, 61)], 1)
    check(program, weights, [draw(host().lanes - 1, 2, 2, 37)], 2)
    assert len(edges) >= 2


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_with_a_sum(name, emitted):
    act = (name, (-0.5, 2.0)[: ACTIVATIONS[name].count])
    program, weights = depthwise(6, act=act)
    both = SegmentProgram(("image", "image"), (replace(program.steps[0], reads=(0, 1), adds=True),), (2,))
    for size in (9, 30):
        check(both, weights, [draw(1, 6, size, size), draw(1, 6, size, size, seed=2)])
    assert len(emitted) == 2


@pytest.mark.sampled(2)
def test_other_readers_of_the_input(edges):
    """Layers that need the border, and ones that read a copy in another grid."""
    program, weights = depthwise(8)
    image, wide = program.steps[0], matrix(8, 8 * 25, 0.2, dtype=torch.float32)
    values, crow, col = csr(wide)
    first = len(weights)
    span = SparseWeight((first, 0, len(values)), (first + 1, 0, 9), (first + 2, 0, len(col)))
    steps = (
        replace(image, act=("relu", ())),
        replace(image, reads=(1,)),
        replace(image, reads=(1,), fields=image.fields._replace(stride=(2, 2))),
        replace(
            image, reads=(1,), fields=image.fields._replace(stride=(3, 3), dilation=(2, 2), padding=((2, 2), (2, 2)))
        ),
        pool_step(1, False, (3, 3), (1, 1), (1, 1)),
        conv_step(1, span, None, 8, (5, 5), (1, 1), ((2, 2), (2, 2))),
        add_step(1, 2),
    )
    whole = SegmentProgram(("image",), steps, (2, 3, 4, 5, 6, 7))
    for threads, size in ((1, (15, 15)), (2, (13, 22)), (2, (7, 7))):
        check(whole, [*weights, values, crow, col], [draw(1, 8, *size)], threads)
    assert len(edges) == 12


def bottleneck(channels: int, inner: int):
    """Expand, depthwise, project, added to the input; dense weights."""
    shapes = [(inner, channels), (inner, 9), (channels, inner)]
    weights, spans = [], []
    for k, shape in enumerate(shapes):
        parts, first = csr(matrix(*shape, 1.0, k, torch.float32)), 3 * k
        spans.append(
            SparseWeight((first, 0, len(parts[0])), (first + 1, 0, shape[0] + 1), (first + 2, 0, len(parts[2])))
        )
        weights += parts
    relu6 = ("clamp", (0.0, 6.0))
    steps = (
        conv_step(0, spans[0], None, inner, (1, 1), act=relu6),
        conv_step(1, spans[1], None, inner, (3, 3), (1, 1), ((1, 1), (1, 1)), groups=inner, act=relu6),
        conv_step(2, spans[2], None, channels, (1, 1), add=0),
    )
    return SegmentProgram(("image",), steps, (3,)), weights


@pytest.mark.sampled(4)
@widths(MOST)
@pytest.mark.parametrize("batch, size, threads", [(1, 7, 1), (1, 14, 2), (3, 14, 2), (1, 31, 3)])
def test_bottlenecks(batch, size, threads, isa, emitted):
    program, weights = bottleneck(6, 35)
    check(program, weights, [draw(batch, 6, size, size)], threads, isa)
    assert emitted


def test_small_tiles_need_no_stored_border(emitted):
    for size, is_stored in ((7, False), (14, False), (112, True)):
        program, weights = depthwise(32)
        check(program, weights, [draw(1, 32, size, size)], 1)
        assert (emitted[-1].x.layout.border != NO_BORDER) is is_stored


def test_what_is_not_finite_stays_in_its_channel(edges):
    """Taps of a zero weight times infinity are NaN, as in torch; other channels are as before."""
    weight = matrix(4, 9, 1.0, dtype=torch.float32)
    weight[0, 4], weight[1, 0] = 0.0, 0.0
    fields = {"kernel": (3, 3), "padding": ((1, 1), (1, 1)), "groups": 4}
    program, weights = layer("image", weight, **fields)
    x = draw(1, 4, 14, 14)
    (before,) = SegmentPlan.of(program, weights, [x], 1)([x])
    x[0, 0, 5, 5], x[0, 0, 0, 13], x[0, 1, 3, 3], x[0, 1, 13, 4] = torch.tensor(
        [torch.inf, torch.nan, torch.nan, -torch.inf]
    )
    (output,) = SegmentPlan.of(program, weights, [x], 1)([x])
    expected = conv2d(x.double(), weight.double().reshape(4, 1, 3, 3), padding=1, groups=4)
    assert torch.equal(output.isnan(), expected.isnan()) and bool(output.isnan().any())
    assert torch.equal(output.isinf(), expected.isinf()) and bool(output.isinf().any())
    assert torch.equal(output[:, 2:], before[:, 2:])
    assert len(edges) == 2


@pytest.mark.parametrize("density, fields", [(0.3, {}), (1.0, {"transposed": True}), (1.0, {"groups": 3})])
def test_other_layers_use_other_kernels(density, fields, emitted):
    weight = matrix(6, 9 * 6 // fields.get("groups", 6), density, dtype=torch.float32)
    given = {"kernel": (3, 3), "padding": ((1, 1), (1, 1)), "groups": 6}
    program, weights = layer("image", weight, draw(6), **(given | fields))
    check(program, weights, [draw(1, 6, 14, 14)])
    assert not emitted


def test_bfloat16_weights_use_the_sparse_kernel(emitted):
    program, weights = depthwise(6)
    check(program, [weights[0].bfloat16(), *weights[1:]], [draw(1, 6, 14, 14)])
    assert not emitted


@pytest.mark.parametrize("size, taps", [((1, 1), 3), ((2, 2), 3), ((14, 14), 3), ((7, 50), 7)])
def test_blocks_fit_in_registers(size, taps):
    for isa in (host(), AVX2):
        rows, columns = depthwise_layer._depthwise_block(size, taps, isa)
        assert 1 <= rows <= size[0] and 1 <= columns <= size[1]
        assert rows * columns + taps + depthwise_layer.OTHER <= isa.registers


def test_edges_are_permuted_where_they_are_many():
    window = depthwise(6)[0].steps[0].fields

    def permutes(tile: int, border: int, pixels: int = 0) -> bool:
        size, grid = 4 * tile + pixels, TileGrid(1, 4, 4, tile, tile)
        return permutes_edges(window, GridLayout((1, 6, size, size), grid, (border,) * 4, 16), grid)

    assert [permutes(tile, 1) for tile in (2, 4, 7, 14, 28)] == [True, True, True, False, False]
    assert not permutes(4, 0)
    assert not permutes(4, 1, pixels=1)


def other_weights(real):
    return lambda tape, isa, piece: real(
        tape, isa, replace(piece, weight=replace(piece.weight, columns=8 - piece.weight.columns))
    )


def other_lanes(real):
    return lambda *args: {lanes[1:] + lanes[:1]: own for lanes, own in real(*args).items()}


def other_blocks(real):
    def kernel(*args):
        made = real(*args)
        return replace(made, blocks=made.blocks[:-1])

    return kernel


@pytest.mark.parametrize(
    "fault",
    [
        (layer_plan, "emit_depthwise", other_weights),
        (depthwise_layer, "permutations", other_lanes),
        (depthwise_layer, "_depthwise_kernel", other_blocks),
    ],
    ids=["weights", "edges", "blocks"],
)
def test_a_planted_fault_is_seen(fault):
    program, weights = depthwise(6)
    sees(*fault, lambda: check(program, weights, [draw(1, 6, 14, 14)], 1))
