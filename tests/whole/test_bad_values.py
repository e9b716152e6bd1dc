"""Values of the right type that cannot be meant: each is refused where it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import demask
from demask.errors import BadInput
from demask.pilot import Constant, PacketReader, Regions, by_mean, clopper_pearson, compare, splits, write_packets
from demask.pilot.guarantee import Outcomes
from demask.stride import Target
from demask.traverse import Plan, plan

NAN, INF = math.nan, math.inf
NET, NONE = nn.Linear(4, 2), torch.zeros(1, 0, dtype=torch.bool)
CALLS: dict[str, Callable[[], Any]] = {
    "part of a tile": lambda: Regions(0.5, tile=1.5),  # type: ignore[arg-type]
    "a truth as tile": lambda: Regions(0.5, tile=True),
    "a word as tile": lambda: Regions(0.5, tile="a"),  # type: ignore[arg-type]
    "growth": lambda: Regions(0.5, grow=NAN),  # type: ignore[arg-type]
    "no fill": lambda: Regions(0.5, fill=None),  # type: ignore[arg-type]
    "fill": lambda: Regions(0.5, fill=NAN),
    "constant": lambda: Constant(0.5, value=INF),
    "count": lambda: clopper_pearson(True, 2),
    "level": lambda: clopper_pearson(1, 2, "a"),  # type: ignore[arg-type]
    "forms": lambda: Target("a", frozenset(), forms="slice"),  # type: ignore[arg-type]
    "ops": lambda: Target("a", 5),  # type: ignore[arg-type]
    "flag": lambda: Target("a", frozenset(), pool_ceil=5),  # type: ignore[arg-type]
    "no outcomes": lambda: by_mean(5),  # type: ignore[arg-type]
    "no examples": lambda: by_mean(Outcomes((0.5,), NONE, NONE, NONE)),
    "seed": lambda: splits(10, seed="a"),  # type: ignore[arg-type]
    "parts": lambda: splits(10, parts=(1, 1, NAN)),
    "inputs": lambda: compare(NET, 5),  # type: ignore[arg-type]
    "numbers": lambda: demask.resize(NET, NET.state_dict(), {"": 5}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str) -> None:
    with pytest.raises(BadInput, match="expected"):
        CALLS[name]()


def test_names_may_be_a_list() -> None:
    assert Target("a", ["slice"]) == Target("a", frozenset({"slice"}))  # type: ignore[arg-type]


def test_priorities(tmp_path) -> None:
    write_packets(tmp_path / "p", nn.Linear(1024, 64), {"weight": torch.arange(64.0)})
    with PacketReader(tmp_path / "p") as reader:
        for priority in (NAN, None, "a"):
            with pytest.raises(BadInput, match="number as priority"):
                reader.read_above(priority)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"notes": "abc"}, {"images": 5}, {"budget": True}])
def test_plans(change: dict[str, Any]) -> None:
    data = plan(nn.Conv2d(1, 1, 3), (torch.ones(1, 1, 9, 9),), memory="64MiB").to_dict()
    with pytest.raises(BadInput, match="damaged"):
        Plan.from_dict(data | change)
