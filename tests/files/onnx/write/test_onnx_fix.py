"""Inputs of ONNX files as constants: what they decide is decided, the others are called."""

import numpy as np
import onnx
import pytest
import torch

import demask
import test_cli
from demask.cli.options import NetworkOptions
from demask.cli.read_network import read_network
from demask.errors import BadInput, NotExportable
from onnx_files import BOOL, FLOAT, INT64, constant, helper, node, value, weights

ort = pytest.importorskip("onnxruntime")
run = test_cli.run  # a fixture
X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


def speech(path):
    """An `If` on a rate between two layers, the second of which has two dead units; a factor for
    each example; and whether to square."""
    other = weights(6, 4)
    other[:, :2] = 0
    branches = {
        f"{k}_branch": helper.make_graph([node("MatMul", ["x", w], [k])], k, [], [value(k, sizes=None)])
        for k, w in (("then", "first"), ("else", "second"))
    }
    nodes = [
        node("Equal", ["rate", "low"], ["is_low"]),
        node("If", ["is_low"], ["h"], **branches),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "last"], ["m"]),
        node("Mul", ["m", "factor"], ["y"]),
    ]
    ports = [value("x"), value("rate", INT64, []), value("factor", FLOAT, ["n", 1])]
    tensors = [
        constant("first", weights(6, 4)),
        constant("second", other),
        constant("last", weights(4, 3)),
        constant("low", np.array(8000)),
    ]
    graph = helper.make_graph(nodes, "g", ports, [value("y", sizes=["n", 3])], tensors)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.fixture
def path(tmp_path):
    return speech(tmp_path / "speech.onnx")


def called(path, **inputs):
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == list(inputs)
    return session.run(None, inputs)[0]


@pytest.mark.parametrize("rate", [16000, torch.tensor(16000), np.int32(16000)])
def test_what_an_input_decides_is_decided(path, tmp_path, rate):
    factor = torch.tensor([[2.0], [3.0]])
    net = demask.from_onnx(path, inputs={"rate": rate})
    slim = demask.demask(net, (X, factor))
    assert demask.verify(net, slim, (X, factor)).ok
    assert slim.demasked.after.parameters < slim.demasked.before.parameters
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    expected = called(path, x=X.numpy(), rate=np.array(16000), factor=factor.numpy())
    found = called(tmp_path / "slim.onnx", x=X.numpy(), factor=factor.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net(X, factor).detach(), torch.from_numpy(expected))


def test_without_it_the_refusal_says_what_to_do(path):
    net = demask.from_onnx(path)
    words = r"\(If\).*condition.*inputs=\{NAME: VALUE\}.*--fix NAME=VALUE"
    with pytest.raises(NotExportable, match=words):
        demask.demask(net, (X, torch.tensor(16000), torch.ones(2, 1)))


def test_a_named_size_is_one_size_everywhere(path):
    net = demask.from_onnx(path, inputs={"factor": [[2.0], [3]], "rate": 8000})
    (port,) = net.interface.inputs
    assert (port.name, port.sizes) == ("x", (2, 6))
    assert net.interface.outputs[0].sizes == (2, 3)
    assert {"factor", "rate"} <= dict(net.named_buffers()).keys()
    doubled = demask.from_onnx(path, inputs={"rate": 8000})(X, torch.full((2, 1), 2.0))
    torch.testing.assert_close(net(X)[0], doubled[0])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"speed": 3}, "no input 'speed' to fix; expected one of .*'rate'"),
        ({"first": 3}, "no input 'first'"),
        ({"rate": 16000.0}, "input 'rate': expected int64, got float64"),
        ({"rate": True}, "input 'rate': expected int64, got bool"),
        ({"rate": 2**63}, "input 'rate': expected numbers that int64 has"),
        ({"rate": [16000]}, r"input 'rate': expected sizes \[\], got \[1\]"),
        ({"rate": "fast"}, "input 'rate': expected a number, a list or an array, got 'fast'"),
        ({"rate": None}, "input 'rate': expected a number"),
        ({"rate": 10**30}, "input 'rate': expected a number"),
        ({"factor": [1.0, 2.0]}, r"input 'factor': expected sizes \['n', 1\], got \[2\]"),
        ({"factor": [[1.0], [2.0, 3.0]]}, "input 'factor': expected a number"),
        ({"factor": [[1e300]]}, "input 'factor': expected numbers that float32 has"),
        ({"factor": [[1j]]}, "input 'factor': expected float32, got complex128"),
        ({"factor": [[1.0]], "x": np.ones((2, 6))}, "size 'n': expected one number, got 1 and 2"),
    ],
)
def test_what_does_not_fit_is_refused(path, inputs, words):
    with pytest.raises(BadInput, match=words):
        demask.from_onnx(path, inputs=inputs)


def test_kinds_of_numbers(tmp_path):
    kinds = {
        "a": (BOOL, [True, False]),
        "b": (onnx.TensorProto.UINT8, [1, 255]),
        "c": (onnx.TensorProto.BFLOAT16, [1, 0.5]),
        "d": (FLOAT, [float("inf"), -1]),
        "e": (onnx.TensorProto.COMPLEX64, [1, 2j]),
        "f": (onnx.TensorProto.UINT64, [2**63, 2**64 - 1]),
    }
    ports = [value("x", sizes=[2]), *(value(k, kind, [2]) for k, (kind, _) in kinds.items())]
    outs = [value(f"{p.name}_out", p.type.tensor_type.elem_type, [2]) for p in ports]
    nodes = [node("Identity", [p.name], [f"{p.name}_out"]) for p in ports]
    graph = helper.make_graph(nodes, "g", ports, outs)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(made, tmp_path / "kinds.onnx")
    given = {name: numbers for name, (_, numbers) in kinds.items()}
    net = demask.from_onnx(tmp_path / "kinds.onnx", inputs=given)
    found = [t.tolist() for t in net(torch.ones(2))]
    for array in (np.array([1, 255], ">i4"), torch.tensor([1, 255]), (1, 255)):
        assert demask.from_onnx(tmp_path / "kinds.onnx", inputs=given | {"b": array}).b.tolist() == [1, 255]
    assert found == [[1.0, 1.0], *given.values()]
    for name, wrong in (("a", [1, 0]), ("b", [1, 256]), ("b", [-1, 0]), ("b", [0.5, 1])):
        with pytest.raises(BadInput, match=f"input '{name}': expected"):
            demask.from_onnx(tmp_path / "kinds.onnx", inputs=given | {name: wrong})


def test_commands_take_constants(run, path, tmp_path):
    fixed = ("--fix", "rate=16000")
    shown = run("slim", path, "-o", "slim.onnx", "--size", "n=2", "--threads", 1, *fixed)
    assert shown.code == 0, shown.err
    names = [port.name for port in onnx.load(tmp_path / "slim.onnx").graph.input]
    assert names == ["x", "factor"]
    for other in (path, "slim.onnx"):
        assert run("verify", path, other, *fixed).out.startswith("equal: ")
    assert run("inspect", path, *fixed, "--fix", "factor=[[2],[3]]").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fix", "rate"), "expected --fix NAME=VALUE"),
        (("--fix", "rate=fast"), "expected --fix NAME=VALUE"),
        (("--fix", "rate=0.5"), "input 'rate': expected int64, got float64"),
        (("--fix", "speed=3"), "no input 'speed'"),
        (("--fix", "rate=1", "--fix", "rate=2"), "--fix rate appears twice"),
    ],
)
def test_commands_refuse_what_does_not_fit(run, path, words, said):
    outcome = run("inspect", path, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err and len(outcome.err.splitlines()) == 1


def test_constants_are_for_onnx_files(tmp_path):
    with pytest.raises(BadInput, match=r"--fix is for \.onnx files"):
        read_network(tmp_path / "model.pt2", NetworkOptions(fix=["rate=16000"]))
