"""Edits of graphs, and the fake values of calls: equal calls share one, and only equal ones do."""

from __future__ import annotations

import weakref

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from demask.graph.editor import GraphEditor
from demask.graph.program import Constant, Program

aten = torch.ops.aten


def edited(*tensors: torch.Tensor) -> tuple[GraphEditor, list[fx.Node]]:
    """An editor, and an input of its graph for each tensor, all its sizes dynamic."""
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    nodes = [graph.placeholder(f"x{k}") for k in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = mode.from_tensor(tensor)
    return GraphEditor.in_place(graph), nodes


def test_equal_calls_share_a_value_and_numbers_of_other_types_do_not() -> None:
    editor, (x,) = edited(torch.arange(6).view(2, 3))
    whole, again, real, flag = (editor.call(aten.mul.Tensor, x, number).meta["val"] for number in (1, 1, 1.0, True))
    assert whole is again
    assert (whole.dtype, real.dtype, flag.dtype) == (torch.int64, torch.float32, torch.int64)
    assert flag is not whole


def test_values_differ_with_strides_and_sizes() -> None:
    editor, (x, y) = edited(torch.randn(4, 6), torch.randn(7, 5).T)
    first, second = (editor.call(aten.relu.default, n).meta["val"] for n in (x, y))
    assert first.stride() != second.stride()
    assert first.shape[0].node.expr != second.shape[0].node.expr


def test_sizes_that_values_decide_are_new_in_each_call() -> None:
    editor, (x,) = edited(torch.randn(4, 6))
    mask = editor.call(aten.gt.Scalar, x, 0)
    calls = [editor.call(aten.masked_select.default, x, mask) for _ in range(2)]
    first, second = (call.meta["val"] for call in calls)
    assert first.shape[0].node.expr != second.shape[0].node.expr


def test_a_fake_tensor_does_not_keep_the_real_one() -> None:
    editor, _ = edited()
    real = torch.randn(3, 4)
    fake, watched = editor.values.like(real), weakref.ref(real)
    assert editor.values.like(torch.randn(3, 4)) is fake
    assert editor.values.like(torch.randn(3, 4, dtype=torch.float64)) is not fake
    del real
    assert watched() is None


def program() -> tuple[Program, fx.Node]:
    """relu(x + c), with a constant that nothing reads; and the sum."""
    constants = {name: Constant(torch.ones(3), name, parameter=False) for name in ("c", "unread")}
    editor, (x,) = edited(torch.ones(3))
    editor.constants |= constants
    total = editor.call(aten.add.Tensor, x, editor.read_constant("c"))
    editor.graph.output((editor.call(aten.relu.default, total),))
    return Program(editor.graph, constants, None, None, ()), total


def test_a_copy_is_edited_and_what_nothing_reads_is_dropped() -> None:
    before, total = program()
    text = str(before.graph)
    editor = GraphEditor(before)
    copy = editor.copies[total]
    editor.insert(copy, copy, aten.neg.default, copy.args[0])
    editor.replace(copy, copy.args[0])
    after = editor.finish()
    assert str(before.graph) == text
    assert [node.target for node in after.graph.nodes if node.op == "call_function"] == [aten.relu.default]
    assert not after.constants


def test_equal_names_of_constants_get_numbers() -> None:
    before, total = program()
    editor = GraphEditor(before)
    reader = editor.copies[total]
    names = [editor.add_constant("c", torch.zeros(1), reader).target for _ in range(2)]
    names += [editor.add_constant("c", torch.zeros(1), reader, separator="").target]
    assert names == ["c_1", "c_2", "c1"]
    assert not GraphEditor.empty(before).constants


def test_a_constant_that_others_read_is_not_replaced() -> None:
    before, total = program()
    editor = GraphEditor(before)
    reader = editor.copies[total]
    read = reader.args[1]
    assert editor.replace_constant(read, torch.zeros(2), reader) is read
    assert read.meta["val"].shape == (2,)
    editor.repeat_call(reader, reader.next)
    other = editor.replace_constant(read, torch.zeros(4), reader)
    assert (other.target, read.target) == ("c_1", "c")
