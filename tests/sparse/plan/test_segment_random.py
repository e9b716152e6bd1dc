"""Random programs of moves, layers and sums equal the same programs in float64."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from test_segment_moves import ISAS, STRIDES

from demask.kernels.llvm.isa import Isa
from demask.sparse.plan import tape_builder, value_moves
from segment_drafts import RELU, Draft, all_at_once


def random_draft(seed: int, most: int = 9) -> Draft:
    """A random program of up to `most` steps over small images."""
    draw = random.Random(seed)
    batch, size = draw.choice([1, 1, 2, 3]), (draw.randint(1, 14), draw.randint(1, 14))
    draft = Draft((batch, draw.randint(1, 6), *size), (batch, 4, *size), seed=seed)
    for _ in range(draw.randint(3, most)):
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


def check_random(seed: int, most: int = 9, isa: Isa | None = None) -> None:
    """All values, or the last ones alone, whose operands may be overwritten."""
    draft, draw = random_draft(seed, most), random.Random(~seed)
    count = 2 + len(draft.steps)
    outputs = draw.choice([(), {count - 1, draw.randrange(count)}])
    static, threads = draw.choice([(), (), (1,)]), draw.randint(1, 3)
    try:
        with draw.choice([all_at_once, nullcontext])():
            draft.check(*outputs, static=static, threads=threads, isa=isa)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r:.300}") from error


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seeds", [range(k, k + 10) for k in range(0, 40, 10)], ids=str)
def test_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(k, k + 50) for k in range(40, 1040, 50)], ids=str)
def test_many_random_programs(seeds: range) -> None:
    for seed in seeds:
        check_random(seed, 9, ISAS[seed % len(ISAS)])


def first_channels(monkeypatch) -> None:
    """Values in the memory of others begin at their first channel."""
    monkeypatch.setattr(
        tape_builder, "owner_of",
        lambda parts, value: (OWNER_OF(parts, value)[0], 0),
    )  # fmt: skip


OWNER_OF = tape_builder.owner_of


def other_scale(monkeypatch) -> None:
    real = value_moves.Moves.pointwise
    monkeypatch.setattr(
        value_moves.Moves, "pointwise",
        lambda self, act, sources, out: real(self, None, sources, out),
    )  # fmt: skip


@pytest.mark.parametrize("fault", [first_channels, other_scale], ids=lambda f: f.__name__)
def test_a_planted_fault_is_seen(fault, monkeypatch) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(40):
            check_random(seed, 6)
