"""Files refuse the sizes that the network refuses: ONNX, .pt2, and exports of it."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import demask
from demask.errors import RefusedFile
from demask.files.onnx.read import reader as read
from demask.files.onnx.write import writer as write
from demask.files.onnx.write.size_conditions import refuse_sizes
from demask.files.pt2 import read_model
from demask.graph.capture import export_guards
from demask.graph.guards import are_true
from demask.graph.provenance import InputSpec
from pt2_files import quietly
from test_guards import CONDITIONS, Branches, ByShape


def same_and_refused(run, model: nn.Module, same: Tensor, other: Tensor, refusal) -> None:
    np.testing.assert_array_equal(np.asarray(run(same)), np.asarray(model(same)))
    with pytest.raises(refusal, match=r"size|expected|equal"):
        run(other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("condition", "example", "same", "other"), CONDITIONS)
def test_files_refuse_what_the_network_refuses(condition, example, same, other, tmp_path) -> None:
    model = ByShape(condition)
    x = torch.randn(2, 3, *example)
    slim = demask.demask(model, (x,), dynamic_shapes="all")
    good, bad = torch.randn(2, 3, *same), torch.randn(2, 3, *other)
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "slim.onnx")
    same_and_refused(lambda x: session.run(None, {"x": x.numpy()})[0], model, good, bad, Exception)
    demask.to_pt2(slim, tmp_path / "slim.pt2")
    program = torch.export.load(tmp_path / "slim.pt2").module()
    same_and_refused(program, model, good, bad, (AssertionError, RuntimeError))
    back = demask.demask(read_model(tmp_path / "slim.pt2"), (x,))
    same_and_refused(back, model, good, bad, ValueError)


@pytest.mark.parametrize(("condition", "example", "same", "other"), CONDITIONS)
def test_programs_from_files_refuse_too(condition, example, same, other, tmp_path) -> None:
    model, x = ByShape(condition), torch.randn(2, 3, *example)
    dynamic = (dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO),)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=False)
    torch.export.save(program, tmp_path / "given.pt2")
    for read_back in (torch.export.load, read_model):
        slim = demask.demask(quietly(read_back, tmp_path / "given.pt2"))
        good, bad = torch.randn(2, 3, *same), torch.randn(2, 3, *other)
        same_and_refused(slim, model, good, bad, ValueError)


def test_an_export_of_a_result_has_its_conditions() -> None:
    slim = demask.demask(Branches(), (torch.randn(5, 3),))
    rows = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(slim, (torch.randn(5, 3),), dynamic_shapes=rows)
    x = torch.randn(4, 3)
    assert torch.equal(program.module()(x), x * 2)
    with pytest.raises(Exception, match="size"):
        program.module()(x[:3])


def test_a_file_that_refuses_sizes_is_read_again(tmp_path) -> None:
    slim = demask.demask(ByShape(CONDITIONS[0][0]), (torch.randn(2, 3, 25, 8),), dynamic_shapes="all")
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    again = demask.from_onnx(tmp_path / "slim.onnx")
    x = torch.randn(2, 3, 27, 9)
    assert torch.equal(again(x), slim(x))
    with pytest.raises(demask.BadInput, match="only for sizes with x_2 % 2 != 0"):
        again(torch.randn(2, 3, 24, 8))


EXPRESSIONS = [
    "a == b", "a != 3", "a < b", "a <= 3", "a > 5 - b", "not a >= b", "a % 3 == 1 and b % 2 == 0",
    "a == 1 or b == 2 or a == b", "(a - 7) // 2 == -2", "(a - 7) % 3 == 1", "a * b - a + 2 > 11",
    "a ** 2 == b + 5", "a / b > 1.5", "a / 2 == b", "int(a * 1.5) == 4", "round(a / 2) == 2",
    "float(a) // 2 == b", "max(a, b, 3) == 4", "min(a, b) == 2", "-a < -3", "a // (b - 3) == 2",
    "a ** 0.5 // 1 == 2", "a * 1.5 > 6", "int(-a / 2) == -1", "2 ** a > 9",
]  # fmt: skip


@pytest.fixture(scope="module")
def relu():
    return demask.demask(nn.ReLU(), (torch.randn(2, 3),), dynamic_shapes="all")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_conditions_come_out_as_in_python(expression: str, relu) -> None:
    model = write.proto_of(relu)
    refuse_sizes(model, [InputSpec("x", ("a", "b"), "float32", (2, 3))], [expression])
    data = write.serialized(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(data, options)
    reference = ReferenceEvaluator(read.installed().ModelProto.FromString(data))
    for run, step in ((session.run, 1), (reference.run, 5)):
        for a, b in list(itertools.product(range(1, 6), repeat=2))[::step]:
            try:
                run(None, {session.get_inputs()[0].name: np.ones((a, b), np.float32)})
                ran = True
            except Exception:
                ran = False
            if b != 3 or "(b - 3)" not in expression:
                assert ran == are_true([expression], {"a": a, "b": b}), (a, b)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')", "L['x'].data.size()[0] == 1", "L['x'].size()[-1] == 1",
        "L['x\"); print(1']..size()[0] == 1", "L['a b'].size()[0] == 1", "print(1)", "(", "a == 1",
        "2 ** L['x'].size()[0] == 1", "2 ** 3 ** 9 ** 9 == 1", "max(L['x'].size()[0]) == 1",
        "math.exp(L['x'].size()[0]) == 1", "L['x'].size(0)[0] == 1", "True == 1",
        "(lambda: 1)() == 1", "-" * 2000 + "1 == 1", "L['x'].size()[0] == 'a'",
    ],
)  # fmt: skip
def test_a_condition_of_a_file_compares_sizes(text: str) -> None:
    with pytest.raises(RefusedFile, match="expected a comparison of sizes"):
        export_guards.check_condition(text)


@pytest.mark.parametrize(
    "text",
    [
        "((L['x'].size()[3] // 2) % 4) == 0",
        "L['xs'][1]['k'].size()[0] > 3",
        "math.trunc(L['x'].size()[0] / 3) == 8",
        "math.floor(L['x'].size()[0] / 3) == 8",
        "math.ceil(L['x'].size()[0] / 3) == 8",
        "abs(L['x'].size()[0] - 3) >= 1",
        "torch.sym_float(L['x'].size()[0]) * 1.5 > 3.0",
        "torch._sym_sqrt(L['x'].size()[0]) > 2",
        "max(L['x'].size()[0], 3) == min(L['x'].size()[1], 7)",
        "not (L['x'].size()[0] == 3)",
        "L['x'].size()[0] == 3 or L['x'].size()[1] == 3 and L['x'].size()[2] != 1",
        "torch.sym_max(L['x'].size()[0], 3) == torch.sym_min(L['x'].size()[1], 7)",  # torch 2.14
    ],
)
def test_what_torch_writes_is_taken(text: str) -> None:
    export_guards.check_condition(text)
