"""The notation of the table: what it reads, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from demask.errors import TableError
from demask.ops import TABLE, Entry, Relation, SizedLine, Table, bind, parse
from demask.ops.laws import call_node

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("text", "ins", "outs"),
    [
        ("... -> ...", ((("...",),),), ((("...",),),)),
        ("i, i ->", ((("i",),), (("i",),)), ((),)),
        ("-> a b", (), ((("a",), ("b",)),)),
        ("a (b c) 1 -> (a b) c", ((("a",), ("b", "c"), ()),), ((("a", "b"), ("c",)),)),
        ("~h, ~k -> ~h", ((("h<0",),), (("k<1",),)), ((("h>0",),),)),
        ("@a b -> @a b, b", ((("a<0",), ("b",)),), ((("a>0",), ("b",)), (("b",),))),
        ("a !b -> a !b", ((("a",), ("b",)),), ((("a",), ("b",)),)),
        ("t h, (k h) ^h -> t h", ((("t",), ("h",)), (("k", "h"), ("h^",))), ((("t",), ("h",)),)),
    ],
)
def test_lines_are_read(text, ins, outs):
    line = parse(text)
    assert (line.ins, line.outs) == (ins, outs)


def test_marks_are_kept_apart():
    line = parse("~h !c @p, ^c -> ~h !c @p")
    assert line.window == {"h<0", "h>0"}
    assert line.complete == {"c"}
    assert line.moved == {"p<0", "p>0"}
    assert line.back == {"c^"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a b", "add an arrow"),
        ("a b = a -> b", "cannot read '='"),
        ("a ? -> a", "cannot read '?'"),
        ("(a b -> a b", "cannot read '('"),
        ("A -> A", "cannot read 'A'"),
        ("2 -> 2", "cannot read '2'"),
        ("a a -> a", "a letter stands twice"),
        ("(a b) a -> b", "a letter stands twice"),
        ("a -> a a", "a letter stands twice"),
        ("a -> ...", "in no input"),
        ("a ^b -> a", "reads back, under ^, a letter that no output has"),
    ],
)
def test_what_cannot_be_read_is_refused(text, complaint):
    with pytest.raises(TableError, match=re.escape(complaint)):
        parse(text)
    with pytest.raises(TableError, match=re.escape(complaint)):
        Table([("my.op.default", Entry(text))])


def bound(line, target, *args):
    """The relation of one call under an entry with this line."""
    return bind(call_node(target, *args), Table([(str(target), Entry(line))]))


@pytest.mark.parametrize(
    ("line", "args", "complaint"),
    [
        ("a b, b c -> a b", (torch.ones(2, 3), torch.ones(3, 4)), "axis ('b',) is 4 long"),
        ("a b, a c -> a c", (torch.ones(2, 3), torch.ones(3, 4)), "axis ('a',) is 3 long"),
        ("a b c, c d -> a d", (torch.ones(2, 3), torch.ones(3, 4)), "self of mm_default has 2 axes"),
        ("a b, b c -> a", (torch.ones(2, 3), torch.ones(3, 4)), "output of mm_default has 2 axes"),
        ("a b -> a b", (torch.ones(2, 3), torch.ones(3, 4)), "has 1 operands"),
        ("a b, b c -> a c, a c", (torch.ones(2, 3), torch.ones(3, 4)), "2 outputs"),
        ("(a e) b, b c -> (a e) c", (torch.ones(2, 3), torch.ones(3, 4)), "are not determined"),
    ],
)
def test_lines_that_contradict_their_call_are_refused(line, args, complaint):
    with pytest.raises(TableError, match=re.escape(complaint)):
        bound(line, aten.mm.default, *args)


def test_sizes_given_with_a_line_must_multiply_to_the_axis():
    table = Table([("aten.relu.default", Entry(lambda node: SizedLine("(g i) -> (g i)", {"g": 4})))])
    relation = bind(call_node(aten.relu.default, torch.ones(12)), table)
    assert isinstance(relation, Relation)
    assert relation.size == {"g": 4, "i": 3}
    sizes = {"g": 4, "i": 5}
    table = Table([("aten.relu.default", Entry(lambda node: SizedLine("(g i) -> (g i)", sizes)))])
    with pytest.raises(TableError, match=re.escape("is 12 long, the product of its letters is 20")):
        bind(call_node(aten.relu.default, torch.ones(12)), table)


def test_an_op_has_one_entry():
    with pytest.raises(TableError, match=r"'aten\.relu\.default' has two entries"):
        Table([("aten.relu.default", Entry("... -> ...")), ("aten.relu.default", Entry("... -> ..."))])
    with pytest.raises(TableError, match=r"'aten\.relu\.default' has two entries"):
        TABLE.extended({"aten::relu": "... -> ..."})


def test_broadcast_axes_are_literal_ones():
    relation = bound("..., ... -> ...", aten.add.Tensor, torch.ones(2, 3, 4), torch.ones(3, 1))
    assert relation.ins == ((("_2",), ("_1",), ("_0",)), (("_1",), ()))
    assert relation.size == {"_2": 2, "_1": 3, "_0": 4}


def test_operands_of_optional_arguments_that_are_none_are_left_out():
    node = call_node(aten.linear.default, torch.ones(2, 3), torch.ones(4, 3), None)
    relation = bind(node, TABLE)
    assert isinstance(relation, Relation)
    assert [operand.name for operand in relation.operands] == ["input", "weight"]
    assert relation.contracted == {"i"}


def test_tables_are_pickled_and_copied():
    assert pickle.loads(pickle.dumps(TABLE)) is TABLE and copy.deepcopy(TABLE) is TABLE
    extended = TABLE.extended({"my::op": "... -> ..."})
    for again in (pickle.loads(pickle.dumps(extended)), copy.deepcopy(extended)):
        assert list(again) == list(extended)
        assert again["aten.lstm.input"] is TABLE["aten.lstm.input"]
        assert again["my.op.default"] == extended["my.op.default"]
