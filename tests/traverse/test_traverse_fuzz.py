"""Random networks, executed in bands, in tiles and layer by layer: the same results, and no more
work than planned. Every checker is shown to fail on a fault planted for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from demask.exec.planning import plan_memory as layout
from demask.exec.planning import schedule
from demask.traverse.execution import segment_executor as sweep
from fuzz.images import Images
from fuzz.traversed import BANDS, FRUSTUMS, LAYERWISE, difference, executed
from night import at_night

CHUNK, NIGHT = 20, 50
MODES = (BANDS, FRUSTUMS, LAYERWISE)
# Of the largest value: sums over space in another order. Integers above 2^24 are rounded in
# float32, in another order as well.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}


@dataclass(frozen=True)
class Setting:
    """How a seed's network is executed."""

    mode: str
    rows: int = 0
    columns: int = 0
    cuts: int = 0  # the seed of cuts that nothing forces; 0: none
    spills: bool = False
    again: bool = False
    workers: int = 1


def setting(seed: int, mode: str) -> Setting:
    rows, columns = {
        BANDS: ([1, 2, 3, 5, 8][seed % 5], 0),
        LAYERWISE: (0, 0),
        FRUSTUMS: ([3, 5, 8, 16][seed % 4], [4, 7, 16][seed % 3]),
    }[mode]
    workers = [1, 1, 2, 3][seed // 2 % 4] if mode == BANDS else 1
    return Setting(mode, rows, columns, seed if seed % 3 else 0, seed % 5 == 1, seed % 4 == 3, workers)


def network(seed: int) -> Images:
    return Images(seed, exact=seed % 2 == 0, rank=[2, 2, 2, 1, 2, 3][seed // 2 % 6]).eval()


def in_float32(seed: int) -> Images:
    """Of integers: convolutions, sums and activations that oneDNN fuses are drawn."""
    return Images(seed, rank=[2, 3][seed % 2], dtype=torch.float32).eval()


def broken(model: Images, chosen: Setting, count: int = 1) -> str:
    """What is wrong with a network executed as told; "" where nothing is. count: images."""
    x = model.example
    made = executed(
        model,
        x,
        chosen.mode,
        chosen.rows,
        chosen.columns,
        seed=chosen.cuts,
        spills=chosen.spills,
        again=chosen.again,
        workers=chosen.workers,
    )
    made.plan = replace(made.plan, images=True)
    found = difference(model, x if count == 1 else model.batch(count), made)
    is_exact = model.exact and x.dtype == torch.float64
    if found > (0.0 if is_exact else TOLERANCE[x.dtype]):
        return f"differs by {found:.3g}"
    if made.counted.macs != count * made.plan.macs:
        return f"{made.counted.macs} multiply-adds, planned {count} x {made.plan.macs}"
    twice = chosen.again or any(step[0] == "transposed" for step in model.steps)
    if chosen.mode != FRUSTUMS and not twice and made.plan.recompute > 1:
        return f"computes {made.plan.recompute} times as much"
    return ""


def checked(seeds: range, make: Callable[[int], Images] = network) -> None:
    failures = []
    for seed in seeds:
        model = make(seed)
        for mode in MODES:
            chosen = setting(seed, mode)
            try:
                text = broken(model, chosen, 1 + seed % 7 // 5)
            except Exception as error:
                text = f"{type(error).__name__}: {error!s:.200}"
            if text:
                failures.append(f"{seed} {chosen}: {text}; {[step[0] for step in model.steps]}")
    assert not failures, "\n".join(failures)


def chunks(start: int, end: int, size: int) -> list[range]:
    return [range(k, min(k + size, end)) for k in range(start, end, size)]


@pytest.mark.parametrize("seeds", chunks(0, 10, CHUNK), ids=str)
def test_random_networks_in_every_mode(seeds):
    checked(seeds)


@pytest.mark.parametrize("seeds", [range(5, 9), *at_night(range(5), *chunks(9, 400, NIGHT))], ids=str)
def test_random_networks_in_float32(seeds):
    checked(seeds, in_float32)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", chunks(10, 2000, NIGHT), ids=str)
def test_two_thousand_networks(seeds):
    checked(seeds)


# The checkers themselves: each sees a fault planted for it.


class Chain(nn.Module):
    """Convolutions of integers, one after another. steps, exact: as of drawn networks."""

    steps, exact = (), True

    def __init__(self, *layers: nn.Module):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*layers).double()
        for weight in self.parameters():
            weight.data = torch.randint(-2, 3, weight.shape).double()
        self.example = torch.randint(-2, 3, (1, 2, 24, 20)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def chain(*more: nn.Module) -> Chain:
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 5, padding=2), *more]
    return Chain(*layers).eval()


def alike() -> Chain:
    """Convolutions between maps of one shape."""
    return Chain(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))).eval()


def seen(model: nn.Module, chosen: Setting) -> str:
    """What the law says of a network, an error in words included."""
    try:
        return broken(model, chosen)  # type: ignore[arg-type]
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("chosen", [Setting(BANDS, 3), Setting(FRUSTUMS, 5, 7), Setting(LAYERWISE)])
def test_the_planted_networks_are_right_without_a_fault(chosen):
    assert [seen(model, chosen) for model in (chain(), averaged(), alike())] == [""] * 3


def averaged() -> Chain:
    model = chain(Centred())
    model.exact = False
    return model


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((2, 3), keepdim=True)


def test_a_line_buffer_one_row_short_is_noticed(monkeypatch):
    kept = schedule._first_rows_read

    def short(stage, strip, end):
        return {v: n + (n < end[v]) for v, n in kept(stage, strip, end).items()}

    monkeypatch.setattr(schedule, "_first_rows_read", short)
    assert seen(chain(), Setting(BANDS, 3))


def test_a_map_written_over_too_early_is_noticed(monkeypatch):
    monkeypatch.setattr(layout, "_can_overwrite", lambda *args: True)
    monkeypatch.setattr(layout, "_writes_no_live_rows", lambda *args: True)
    found = [seen(alike(), Setting(BANDS, 3, cuts=seed)) for seed in range(1, 6)]
    assert any("differs by" in text for text in found), found


def test_a_halo_one_column_short_is_noticed(monkeypatch):
    rows = sweep.SegmentExecutor._view_rows

    def short(self, node, step, low, high, columns=None):
        found = rows(self, node, step, low, high, columns)
        if columns is not None and columns[1] - columns[0] == 13:  # a tile of 7 with its halo
            found = found.clone()
            found[..., -1] = 0
        return found

    monkeypatch.setattr(sweep.SegmentExecutor, "_view_rows", short)
    assert "differs by" in seen(Chain(nn.Conv2d(2, 2, (1, 7), padding=(0, 3))).eval(), Setting(FRUSTUMS, 24, 7))


def test_a_moment_counted_twice_is_noticed(monkeypatch):
    gather = sweep.SegmentExecutor._update_reduction

    def twice(self, unit, step):
        gather(self, unit, step)
        if unit.node not in self.ends.uncut_values:
            gather(self, unit, step)

    monkeypatch.setattr(sweep.SegmentExecutor, "_update_reduction", twice)
    assert "differs by" in seen(averaged(), Setting(BANDS, 5))


def test_work_done_twice_is_noticed(monkeypatch):
    from fuzz import traversed

    plan = traversed.packed_plan
    monkeypatch.setattr(traversed, "packed_plan", lambda *args: replace(plan(*args), macs=plan(*args).macs - 1))
    assert "planned" in seen(chain(), Setting(BANDS, 5))
