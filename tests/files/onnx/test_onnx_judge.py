"""The judge of ONNX files: faults that are planted in files, each of which it has to see."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import demask
from demask.errors import BadInput, Mismatch
from demask.files.onnx import check as checking
from demask.files.onnx.check import AROUND, REFERENCE, Judge
from demask.files.onnx.write import writer as writing
from demask.graph.rounding import Rounding
from demask.ops import TABLE

pytest.importorskip("onnxruntime")
node = helper.make_node


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes, outputs, tensors=None, inputs=None, domains=()):
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in (tensors or {}).items()]
    inputs = inputs or [value("x", ["n", 4])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", 17), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, ir_version=8, opset_imports=imports).SerializeToString()


def one(*nodes, shape=("n", 4), **tensors):
    """A file of nodes from x to y."""
    tensors = {name: np.asarray(a, np.float32) for name, a in tensors.items()}
    return model(nodes, [value("y", list(shape))], tensors)


X = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)
RELU = one(node("Relu", ["x"], ["y"]))


@pytest.mark.parametrize(
    "wrong",
    [
        one(node("Min", ["x", "top"], ["a"]), node("Relu", ["a"], ["y"]), top=[100.0]),
        one(node("Max", ["x", "low"], ["y"]), low=[-1e-3]),
        one(node("Relu", ["x"], ["a"]), node("Max", ["a", "low"], ["y"]), low=[1e-12]),
        one(node("Relu", ["x"], ["a"]), node("Mul", ["a", "k"], ["y"]), k=[[1.0]] * 2 + [[1.001]]),
        one(node("Relu", ["x"], ["a"]), node("Add", ["a", "rows"], ["y"]), rows=[[0.0]] * 3),
    ],
    ids=["large", "negative", "zeros", "a row", "other sizes"],
)
def test_a_file_that_is_wrong_on_some_inputs_is_seen(wrong):
    judge = Judge.of_file(RELU, X)
    assert judge.compare(RELU).error == 0
    with pytest.raises(Mismatch, match=r"(differs|fails|is float32) "):
        judge.compare(wrong)


def test_it_says_what_differs_and_where():
    rows = np.ones((3, 4), np.float32)
    rows[2, 1] = 1.01
    wrong = one(node("Relu", ["x"], ["a"]), node("Mul", ["a", "k"], ["y"]), k=rows)
    positive = (X[0].abs(),)
    with pytest.raises(Mismatch, match=r"output 0 .* at \(2, 1\), expected .*on the example"):
        Judge.of_file(RELU, positive).compare(wrong)


def test_a_tolerance_allows_a_difference_and_no_more():
    wrong = one(node("Relu", ["x"], ["a"]), node("Mul", ["a", "k"], ["y"]), k=[1.001])
    assert 9e-4 < Judge.of_file(RELU, X, 2e-3).compare(wrong).error < 1.1e-3
    with pytest.raises(Mismatch):
        Judge.of_file(RELU, X, 5e-4).compare(wrong)


def steps(shift):
    """Integers, of which rounding moves those of full inputs."""
    nodes = [
        node("Floor", ["x"], ["f"]),
        node("Cast", ["f"], ["i"], to=TensorProto.INT64),
        node("Add", ["i", "shift"], ["y"]),
    ]
    shift = np.asarray(shift, np.int64)
    return model(nodes, [value("y", ["n", 4], TensorProto.INT64)], {"shift": shift})


def test_whole_numbers_differ_only_where_rounding_moves_them():
    """Column 0 of the example is one: rounding the input moves it, and nothing else."""
    x = X[0][:1].clone()
    x[:, 0] = 1
    judge = Judge.of_file(steps([0, 0, 0, 0]), (x,))
    judge.draws = judge.draws[:1]
    judge.cases = judge.draws
    judge.compare(steps([-1, 0, 0, 0]))
    with pytest.raises(Mismatch, match="not equal: "):
        judge.compare(steps([-1, 0, 1, 0]))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 4)

    def forward(self, ids):
        return self.rows(ids)


def altered(real, change):
    """An exporter that writes something else."""

    def model(*args):
        made = real(*args)
        change(made.graph)
        return made

    return model


def test_other_whole_numbers_than_the_examples_are_compared(tmp_path, monkeypatch):
    import onnx_ir

    def change(graph):
        rows = graph.initializers["rows.weight"]
        array = rows.const_value.numpy().copy()
        array[3] += 1
        rows.const_value = onnx_ir.tensor(array, name="rows.weight")

    monkeypatch.setattr(writing, "_export_model", altered(writing._export_model, change))
    with pytest.raises(Mismatch, match="random numbers"):
        demask.to_onnx(Rows().eval(), tmp_path / "net.onnx", (torch.tensor([[0, 1, 5, 0]]),))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("minimal", [True, False])
def test_a_wrong_export_is_no_original(tmp_path, monkeypatch, minimal):
    """All candidates agree with it: they are compared with the network itself."""

    class Shift(nn.Module):
        def forward(self, x):
            return torch.relu(x) + 1

    def change(graph):
        for made in list(graph):
            if made.op_type == "Add":
                made.outputs[0].replace_all_uses_with(made.inputs[0], replace_graph_outputs=True)

    monkeypatch.setattr(writing, "_export_model", altered(writing._export_model, change))
    with pytest.raises(Mismatch):
        demask.optimize_onnx(Shift(), tmp_path / "net.onnx", X, minimal=minimal)
    assert not list(tmp_path.iterdir())


def test_without_a_runtime_the_reference_compares(monkeypatch):
    monkeypatch.setattr(checking, "onnxruntime", lambda: None)
    judge = Judge.of_file(RELU, X)
    assert judge.compare(RELU).by == REFERENCE
    with pytest.raises(Mismatch):
        judge.compare(one(node("LeakyRelu", ["x"], ["y"])))


def test_the_reference_stops_in_time(monkeypatch):
    monkeypatch.setattr(checking, "onnxruntime", lambda: None)
    monkeypatch.setattr(checking, "REFERENCE_SECONDS", 0.0)
    assert Judge.of_file(RELU, X).compare(RELU).by == f"{REFERENCE} on 1 of 14 inputs"


def foreign(*nodes, **tensors):
    mystery = node("Mystery", ["b"], ["c"], domain="org.example")
    nodes = [node("Relu", ["x"], ["a"]), *nodes, mystery, node("Mul", ["c", "k"], ["y"])]
    tensors = {name: np.asarray(a, np.float32) for name, a in tensors.items()}
    return model(nodes, [value("y", ["n", 4])], tensors, domains=["org.example"])


def test_files_are_compared_around_ops_of_nobody():
    original = foreign(node("Mul", ["a", "m"], ["b"]), m=2.0, k=3.0)
    judge = Judge.of_file(original, X)
    verdict = judge.compare(original)
    assert (verdict.error, verdict.by) == (0, AROUND)
    for before, behind in ((2.0, 3.1), (2.1, 3.0), (3.0, 2.0)):
        with pytest.raises(Mismatch):
            judge.compare(foreign(node("Mul", ["a", "m"], ["b"]), m=before, k=behind))


def test_what_nothing_compares_is_refused_and_written_unchecked(tmp_path):
    """The op of nobody is in front of all others, and takes a type that these do not."""
    w = np.zeros((4, 8), np.float32)
    w[:, ::2] = 1
    data = model(
        [
            node("Mystery", ["t"], ["a"], domain="org.example"),
            node("MatMul", ["a", "w"], ["b"]),
            node("Relu", ["b"], ["c"]),
            node("MatMul", ["c", "v"], ["y"]),
        ],
        [value("y", ["n", 2])],
        {"w": w, "v": np.ones((8, 2), np.float32)},
        [value("t", ["n", 4], TensorProto.INT64)],
        ["org.example"],
    )
    proto = onnx.ModelProto.FromString(data)
    proto.graph.value_info.append(value("a", ["n", 4]))
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(proto, path)
    x = (torch.ones(3, 4, dtype=torch.int64),)
    with pytest.raises(BadInput, match=r"check=False \(--check off\)"):
        demask.optimize_onnx(path, out, x, minimal=True)
    assert not out.exists()
    result = demask.optimize_onnx(path, out, x, minimal=True, check=False)
    assert result.error is None and result.checked.startswith("unchecked")
    assert {t.name: t.dims[0] for t in onnx.load(out).graph.initializer} == {"w": 4, "v": 4}


class IsUnmoved(nn.Module):
    """One where a factor and its inverse change nothing, which rounding decides."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((4,), 3.0))

    def forward(self, x):
        return (x * self.factor / 3 == x).float() * x.abs().amax()


def test_a_large_difference_that_rounding_explains_is_named(tmp_path, monkeypatch):
    import onnx_ir

    def change(graph):
        factor = graph.initializers["factor"]
        array = np.nextafter(factor.const_value.numpy(), np.float32(4))
        factor.const_value = onnx_ir.tensor(array, name="factor")

    monkeypatch.setattr(writing, "_export_model", altered(writing._export_model, change))
    with pytest.warns(UserWarning, match="differ by 1 of the largest on .*rounding alone"):
        demask.to_onnx(IsUnmoved().eval(), tmp_path / "net.onnx", (torch.randn(2, 4),))


def test_roundings_are_computed_only_where_outputs_differ(monkeypatch):
    monkeypatch.setattr(checking.FileOriginal, "roundings", None)
    assert Judge.of_file(RELU, X).compare(RELU).error == 0


class Indices(nn.Module):
    """Floats that are integers, of which some count from the end."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 4)

    def forward(self, x):
        ids = x.to(torch.int32)
        return self.rows(torch.where(ids.to(torch.float32) < 0, ids + 6, ids))


def test_whole_numbers_have_no_rounding_errors():
    """A zero that is moved below zero would be the index after the last."""
    network = demask.demask(Indices().eval(), (torch.zeros(1, 5),), result="graph")
    x = torch.tensor([[0.0, -1, 3, -6, 5]])
    with torch.no_grad():
        runs = [run[0] for run in Rounding(network, TABLE).runs((x,), {})]
        assert len(runs) == 5 and all(torch.equal(run.float(), network(x)) for run in runs)


FUNCTIONS = {
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Elu": nn.functional.elu,
    "Selu": nn.functional.selu,
}


@pytest.mark.parametrize("op", [*FUNCTIONS, "ReduceSum"])
def test_errors_of_the_runtimes_kernels_are_within_what_rounding_is_taken_to_move(op):
    draw = torch.Generator().manual_seed(0)
    if op == "ReduceSum":
        x, function = torch.rand(2048, 4, generator=draw), lambda x: x.sum(0)
        nodes = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
        data = model(nodes, [value("y", [4])], {"axes": np.array([0])})
    else:
        x, function = torch.linspace(-30, 30, 1_000_000).reshape(-1, 4), FUNCTIONS[op]
        data = one(node(op, ["x"], ["y"]))

    class Net(nn.Module):
        def forward(self, x):
            return function(x)

    with torch.no_grad():
        network = demask.demask(Net(), (x,), result="graph")
        exact, moved, *_ = [run[0] for run in Rounding(network, TABLE).runs((x,), {})]
    result = checking.runner(data)([x])[0]
    gaps = np.abs(result - exact.numpy())
    assert gaps.max() <= float((moved - exact).abs().max())


def test_sums_in_another_order_of_a_network_of_indices_are_no_difference():
    """No input can be rounded; scores near 1e-6 are steps of a sigmoid's error."""
    draw = np.random.default_rng(0)
    rows, w = draw.standard_normal((64, 256)), draw.standard_normal((256, 4)) * 0.05
    order = draw.permutation(256)
    files = []
    for table, weights in ((rows, w), (rows[:, order], w[order])):
        nodes = [
            node("Gather", ["t", "ids"], ["e"]),
            node("MatMul", ["e", "w"], ["a"]),
            node("Add", ["a", "b"], ["c"]),
            node("Sigmoid", ["c"], ["y"]),
        ]
        tensors = {"t": table, "w": weights, "b": np.full(4, -13.0)}
        tensors = {name: array.astype(np.float32) for name, array in tensors.items()}
        ids = [value("ids", ["n"], TensorProto.INT64)]
        files.append(model(nodes, [value("y", ["n", 4])], tensors, ids))
    judge = Judge.of_file(files[0], (torch.arange(64),))
    assert judge.compare(files[1]).error > 1e-3
    nodes[2] = node("Add", ["a", "b2"], ["c"])
    tensors["b2"] = np.full(4, -12.9, np.float32)
    with pytest.raises(Mismatch):
        judge.compare(model(nodes, [value("y", ["n", 4])], tensors, ids))


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"])
def test_outputs_of_few_bits_are_compared(kind):
    """In onnx's reference, as the runtime gives numpy no such arrays."""
    number = getattr(TensorProto, kind)
    files = []
    for k in (1.0, 1.5):
        nodes = [node("Mul", ["x", "k"], ["a"]), node("Cast", ["a"], ["y"], to=number)]
        proto = onnx.ModelProto.FromString(model(nodes, [value("y", ["n", 4], number)], {"k": np.float32(k)}))
        proto.opset_import[0].version, proto.ir_version = 19, 9
        files.append(proto.SerializeToString())
    judge = Judge.of_file(files[0], X)
    assert judge.compare(files[0]).error == 0
    with pytest.raises(Mismatch, match="differs"):
        judge.compare(files[1])
