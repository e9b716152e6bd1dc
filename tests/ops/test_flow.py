"""Axes and parts of axes through every op of the table; planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from demask.ops import TABLE, Declined, Relation, Table, bind, flow
from demask.ops.flow import Part, carry, carry_back, follow, is_mixed, is_split
from demask.ops.laws import call_node, law_cases
from demask.ops.laws.flow import check_flow_law

aten = torch.ops.aten
CASES = list(law_cases(TABLE))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_the_flow_law_holds(name):
    for other, index, case in CASES:
        if other == name:
            broken = check_flow_law(name, case, index, TABLE)
            assert isinstance(broken, Declined) or broken == []


@pytest.mark.parametrize("name", ["aten.softmax.int", "aten.flip.default"])
def test_a_wrong_line_breaks_the_flow_law(name):
    wrong = Table(
        (other, replace(entry, line="... -> ...") if other == name else entry) for other, entry in TABLE.items()
    )
    assert breaks(name, wrong)


def breaks(name: str, table: Table = TABLE) -> bool:
    laws = [check_flow_law(name, case, index, table) for other, index, case in CASES if other == name]
    return any(laws)


def test_a_wrong_order_of_letters_breaks_the_flow_law(monkeypatch):
    assert not breaks("aten.pixel_shuffle.default")
    monkeypatch.setattr(flow, "_inner_size", lambda relation, letters: [1] * len(letters))
    assert breaks("aten.pixel_shuffle.default")


def bound(target, *args, **kwargs) -> Relation:
    relation = bind(call_node(target, *args, **kwargs), TABLE)
    assert isinstance(relation, Relation)
    return relation


def test_parts_of_composite_axes():
    """Rows and columns in one axis, split elsewhere than they were merged."""
    split = bound(aten.view.default, torch.zeros(3, 20), [3, 4, 5])
    assert follow(split, 0, Part(1, inner=5, size=4)) == Part(1, 1, 4)
    assert follow(split, 0, Part(1, inner=1, size=5)) == Part(2, 1, 5)
    assert follow(split, 0, Part(1, inner=10, size=2)) == Part(1, 2, 2)  # within one letter
    assert follow(split, 0, Part(1, inner=2, size=5)) is None  # of both
    shuffled = bound(aten.pixel_shuffle.default, torch.zeros(1, 8, 3, 5), 2)
    assert follow(shuffled, 0, Part(2, 1, 3)) == Part(2, 2, 3)


def test_of_a_part_of_several_letters_those_that_it_covers_go_on():
    """Channels (group, channel): a group holds whole pairs, and pairs hold no full channel."""
    conv = bound(aten.conv1d.default, torch.zeros(2, 4, 9), torch.zeros(12, 2, 3), None, [1], [1], [1], 2)
    assert conv.ins[1][0] == conv.outs[0][1] == ("g", "o")
    assert follow(conv, 1, Part(0, inner=1, size=12)) == Part(1, 1, 12)
    assert follow(conv, 1, Part(0, inner=2, size=6)) == Part(1, 6, 2)
    assert follow(conv, 1, Part(0, inner=3, size=4)) == Part(1, 6, 2)
    assert follow(conv, 1, Part(0, inner=4, size=3)) is None  # the second is of both groups


def test_windows_need_the_whole_axis():
    pool = bound(aten.max_pool2d.default, torch.zeros(1, 2, 8, 6), [2, 2])
    assert follow(pool, 0, Part(2, 1, 8)) == Part(2, 1, 4)
    assert follow(pool, 0, Part(2, 2, 4)) == Part(2, 1, 4)  # its major part is all of it
    assert follow(pool, 0, Part(2, 1, 4)) is None
    whole = bound(aten.max_pool2d.default, torch.zeros(1, 2, 8, 6), [8, 1])
    assert follow(whole, 0, Part(2, 1, 8)) is None  # one position of many
    assert is_mixed(pool, 0, 2) and not is_mixed(pool, 0, 1)


def test_tags_meet_where_operands_are_joined():
    add = bound(aten.add.Tensor, torch.zeros(2, 3, 4), torch.zeros(3, 4))
    assert carry(add, [{0: 1, 2: 4}, {0: 7, 1: 6}], max) == ({0: 1, 1: 7, 2: 6},)
    assert carry_back(add, {1: 5, 2: 8}) == ({1: 5, 2: 8}, {0: 5, 1: 8})
    linear = bound(aten.linear.default, torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4))
    assert carry(linear, [{0: 1, 1: 2}, {0: 3, 1: 4}, None], max) == ({0: 1, 1: 3},)


def test_recurrent_units_are_mixed():
    """What a unit reads back is made of all of them, also through the state that is given."""
    weights = [torch.zeros(8, 3), torch.zeros(8, 8)]
    call = bound(
        aten.rnn_relu.input, torch.zeros(5, 2, 3), torch.zeros(1, 2, 8), weights, False, 1, 0.0, False, False, False
    )
    assert carry_back(call, {2: True})[1] == {}
    assert carry_back(call, {1: True})[:2] == ({1: True}, {1: True})


def test_split_axes():
    split = bound(aten.view.default, torch.zeros(3, 20), [3, 4, 5])
    assert not is_split(split, 0)
    assert is_split(split, 1) and is_split(split, 2)
