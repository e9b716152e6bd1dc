"""Outputs have the same bits for any number of threads, images at once, and grid of tiles."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_segment_moves import ISAS, STRIDES
from torch import Tensor

from demask.kernels.llvm.isa import Isa
from demask.sparse.plan import value_moves
from demask.sparse.plan.layers import pack_weights
from demask.sparse.plan.layers.dense import dense_layer
from demask.sparse.plan.segment_plan import SegmentPlan
from demask.sparse.segment_program import SegmentProgram
from demask.sparse.segment_steps import ActivationStep, FlattenStep, LinearStep
from night import at_night
from segment_drafts import RELU, Draft, all_at_once
from sparse_cases import csr, matrix, weight

THREADS = (1, 2, 3, 4)
ACTS = (None, RELU, ("silu", ()), ("gelu", ()))


class WholeDraft(Draft):
    """A draft with the steps that lead from images to tokens."""

    def convolved(self, draw: random.Random, x: int) -> int:
        """A convolution of any kind."""
        channels, act = self.shape(x)[1], draw.choice(ACTS)
        kernel, density = draw.choice([1, 1, 3, 5, 7]), draw.choice([0.1, 0.4, 1.0])
        stride = (draw.choice([1, 1, 2]),) * 2
        out = draw.choice([1, 3, 8, 17])
        match draw.choice(["dense", "dense", "depthwise", "groups", "transposed"]):
            case "depthwise":
                return self.conv(x, channels, kernel, 1.0, act=act, groups=channels, stride=stride)
            case "groups" if channels % 2 == 0:
                return self.conv(x, 2 * out, kernel, density, act=act, groups=2, stride=stride)
            case "transposed":
                pads = ((kernel // 2,) * 2,) * 2
                return self.conv(x, out, kernel, density, act=act, stride=stride, padding=pads,
                                 transposed=True)  # fmt: skip
        return self.conv(x, out, kernel, density, act=act, stride=stride)

    def classified(self, draw: random.Random, x: int) -> None:
        """A mean and linear layers, which have one position for one image."""
        tokens = self.mean(x, draw.random() < 0.5)
        if len(self.shape(tokens)) == 4:
            tokens = self.append(FlattenStep(tokens))
        for _ in range(2):
            y = self.linear(tokens, 37, draw.choice([0.2, 1.0]), act=draw.choice(ACTS))
            tokens = self.linear(y, 37, draw.choice([0.2, 1.0]), add=y, act=draw.choice(ACTS))


def drawn(seed: int, steps: int = 5) -> WholeDraft:
    """A random program with all kinds of steps."""
    draw = random.Random(seed)
    batch, size = draw.choice([1, 1, 2, 3]), (draw.randint(1, 30), draw.randint(1, 30))
    draft = WholeDraft((batch, draw.choice([3, 16]), *size), seed=seed)
    for _ in range(steps):
        x = draw.randrange(1 + len(draft.steps))
        shape = draft.shape(x)
        alike = [v for v in range(1 + len(draft.steps)) if draft.shape(v)[2:] == shape[2:]]
        same = [v for v in alike if draft.shape(v) == shape]
        match draw.choice(["conv"] * 4 + ["sum", "pool", "gate", "pick", "cat", "add", "map"]):
            case "conv":
                draft.convolved(draw, x)
            case "sum":
                draft.conv(x, shape[1], draw.choice([1, 3]), draw.choice([0.3, 1.0]),
                           add=draw.choice(same), act=draw.choice(ACTS))  # fmt: skip
            case "pool":
                draft.pool(x, draw.random() < 0.7, draw.choice([1, 2]), ceil=draw.random() < 0.5)
            case "gate":
                gate = draft.conv(draft.mean(x), shape[1], 1, draw.choice([0.5, 1.0]))
                draft.scale(x, gate, draw.choice(ACTS))
            case "pick":
                numbers = [draw.randrange(-1, shape[1]) for _ in range(draw.randint(1, 7))]
                draft.select(x, numbers, draw.choice(STRIDES))
            case "cat":
                draft.cat(*draw.choices(alike, k=draw.randint(1, 4)))
            case "add":
                draft.add(x, draw.choice(same), draw.choice(ACTS))
            case "map":
                draft.append(ActivationStep(x, ("silu", ())))
    draft.classified(draw, len(draft.steps))
    return draft


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.view(torch.int32) for t in tensors]


def check(program: SegmentProgram, weights: list[Tensor], inputs: list[Tensor], case: object,
          isa: Isa | None = None) -> None:  # fmt: skip
    """Assert that outputs have the same bits in all plans."""

    def outputs(threads: int) -> list[Tensor]:
        return bits(SegmentPlan.of(program, weights, inputs, threads, isa)(inputs))

    want = outputs(THREADS[0])
    for threads in THREADS[1:]:
        same = [torch.equal(a, b) for a, b in zip(want, outputs(threads), strict=True)]
        assert all(same), f"{case}, {threads} threads: output {same.index(False)}"
    with all_at_once():
        same = [torch.equal(a, b) for a, b in zip(want, outputs(2), strict=True)]
        assert all(same), f"{case}, all images at once: output {same.index(False)}"


def check_random(seed: int, isa: Isa | None = None) -> None:
    """Every value of a random program, or the last one alone: its grids are chosen by others."""
    draft = drawn(seed)
    program = draft.program(*random.Random(~seed).choice([(), (len(draft.steps),)]))
    check(program, draft.weights, draft.inputs, f"seed {seed}", isa)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "seeds", [range(2), *at_night(range(2, 4), range(4, 8), range(8, 12))], ids=str
)
def test_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(k, k + 25) for k in range(20, 520, 25)], ids=str)
def test_many_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed, ISAS[seed % len(ISAS)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (13, 14), (37, 40), (150, 131)], ids=str)
def test_means_of_values_of_all_sizes(size: tuple[int, int]) -> None:
    """Terms from 1e-12 to 1e12, of both signs; ones that nearly cancel; and ones that are halfway
    between two roundings."""
    draft = Draft((3, 5, *size), kind="image")
    x = draft.inputs[0]
    x[:, 1:3] *= 10 ** x[:, 1:3].mul(3).clamp(-12, 12)
    x[:, 3] = 1.0 + 2.0**-23 * (x[:, 3] * 100).round()
    x[:, 3, 0, 0] = 2.0**13
    x[:, 4] = 2.0**-149 * x[:, 4].mul(9).round()
    cancelled = x[:, 2].view(3, -1)
    half = cancelled.shape[1] // 2
    cancelled[:, half : 2 * half] = -cancelled[:, :half].flip(1)
    draft.mean(0)
    draft.check()
    for isa in ISAS:
        check(draft.program(), draft.weights, draft.inputs, size, isa)


@pytest.mark.parametrize("size", [(5, 9), (40, 31)], ids=str)
def test_means_that_are_not_finite(size: tuple[int, int]) -> None:
    x = torch.randn(2, 6, *size)
    x[0, 0, 2, 3] = x[1, 1, -1, -1] = torch.inf
    x[0, 2, 0, 0], x[0, 2, -1, -1] = torch.inf, -torch.inf
    x[1, 3, 1, 1] = -torch.inf
    x[1, 4, 2, 2] = torch.nan
    x[0, 5, 3, 1], x[0, 5, 1, 3] = torch.nan, torch.inf
    draft = Draft((1, 1, 1, 1))
    draft.inputs = [x]
    draft.mean(0)
    y = SegmentPlan.of(draft.program(1), [], [x], 1)([x])[0]
    want = x.mean((2, 3), keepdim=True)
    assert torch.equal(y.isnan(), want.isnan())
    torch.testing.assert_close(y, want, equal_nan=True)
    check(draft.program(1), [], [x], size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_rows_with_columns_in_any_order(dtype: str, count: int) -> None:
    """The order of sums is that of columns, not that in which a matrix has them."""
    weights, fields = csr(matrix(24, 3000, 0.2, dtype=torch.float32)), {}
    for begin, end in pairwise(weights[1].tolist()):
        order = begin + torch.randperm(end - begin)
        weights[0][begin:end], weights[2][begin:end] = weights[0][order], weights[2][order]
    weights += [torch.randn(24), torch.rand(24) + 0.5]
    if dtype == "int8":
        weights[0], fields = weights[0].mul(30).round().char(), {"scale": (4, 0, 24)}
    elif dtype == "bfloat16":
        weights[0] = weights[0].bfloat16()
    spans = replace(weight(24, len(weights[0])), **fields)
    step = LinearStep(0, spans, (3, 0, 24), 24)
    steps = step, replace(step, add=1, act=("silu", ()))
    inputs = [torch.randn(count, 3000)]
    check(SegmentProgram(("tokens",), steps, (1, 2)), weights, inputs, (dtype, count))


def sums_in_order(monkeypatch) -> None:
    """The first sums of means are so small that later ones are rounded by their order."""
    monkeypatch.setattr(value_moves, "exponent", lambda pixels: -30)


def columns_as_they_are(monkeypatch) -> None:
    monkeypatch.setattr(pack_weights, "_ascending", lambda rows, columns, values: (columns, values))


def channels_in_reverse(monkeypatch) -> None:
    """Dense layers add channels in reverse where threads share positions."""
    real = dense_layer._of_window

    def reverse(piece, block):
        block = real(piece, block)
        step = 1 if len(piece.shape.parts) == 1 else -1
        return replace(block, channels=block.channels[::step], weight=block.weight[:, ::step])

    monkeypatch.setattr(dense_layer, "_of_window", reverse)


@pytest.mark.parametrize("fault, test", [
    (sums_in_order, lambda: test_means_of_values_of_all_sizes((37, 40))),
    (columns_as_they_are, lambda: test_rows_with_columns_in_any_order("float32", 1)),
    (channels_in_reverse, lambda: test_random_programs(range(8))),
], ids=["means", "columns", "channels"])  # fmt: skip
def test_a_planted_fault_is_seen(fault, test, monkeypatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test()
