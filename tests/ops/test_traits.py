"""Sets of ops against the table's entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from demask.compat.dispatch import OpOverload
from demask.ops import TABLE, traits
from demask.ops.activations import activations_by_op

aten = traits.aten
WINDOWS = {
    ("conv", "sum"): traits.CONVOLUTIONS_ANY_PADDING,
    ("transposed", "sum"): traits.TRANSPOSED_CONVOLUTIONS,
    ("conv", "same"): traits.AVERAGE_POOLS | traits.MAX_POOLS,
    ("adaptive", "same"): traits.ADAPTIVE_AVERAGE_POOLS | traits.ADAPTIVE_MAX_POOLS,
}
# Ops that passes rewrite before the table is asked, or that it declines.
NOT_IN_TABLE = {
    "aten.add_.Tensor",
    "aten.index_add.default",
    "aten.mT.default",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    *map(str, traits.OF_TWO_TENSORS),
    *map(str, traits.OF_TWO_TENSORS.values()),
    *map(str, traits.DECOMPOSED_WITH_NUMBERS),
}
NAMES = [name for name in vars(traits) if name.isupper()]


@pytest.mark.parametrize(("region", "fill"), WINDOWS)
def test_windows_are_those_of_the_table(region: str, fill: str) -> None:
    entries = {name for name in TABLE if (TABLE[name].region, TABLE[name].fill) == (region, fill)}
    assert set(map(str, WINDOWS[region, fill])) == entries


@pytest.mark.parametrize("name", NAMES)
def test_sets_are_of_ops_that_the_table_knows(name: str) -> None:
    ops: Iterable[Any] = getattr(traits, name)
    names = {str(op) for op in ops if isinstance(op, str | OpOverload)}
    assert {op for op in names if op not in TABLE} <= NOT_IN_TABLE


@pytest.mark.parametrize("name", ["RESHAPES", "ALIASES", "COPIES", "DROPOUTS"])
def test_what_keeps_values_is_bounded_by_its_operand(name: str) -> None:
    for op in getattr(traits, name):
        assert TABLE[str(op)].fill == "same" or TABLE[str(op)].range == "hull"


def test_number_of_axes() -> None:
    assert list(traits.POOLS.values()) == [1, 2, 3] * 3
    assert traits.CONV_OF_AXES[3] is aten.conv3d.default
    assert traits.OUTPUT_AXIS[aten.conv_transpose2d.input] == 1


def test_relus_and_clamps_are_activations() -> None:
    names = {op: activation.name for op, entries in activations_by_op().items() for activation, _ in entries}
    assert {names[op] for op in traits.RELUS} == {"relu", "clamp"}
    assert {names.get(op, "clamp") for op in traits.CLAMPS} == {"clamp"}
