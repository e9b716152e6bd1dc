"""Edited files as a whole: what is copied byte for byte, foreign ops, clashing names."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from demask.errors import Mismatch
from demask.files.onnx import from_onnx
from demask.files.onnx.edit.edit_file import edit_file, save_edited
from demask.files.onnx.edit.verdict import compare_files
from demask.ops import TABLE
from demask.optimize_onnx import optimize_onnx


def half(*shape, axis):
    """Random numbers of which every second slice is zero."""
    a = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    a[(slice(None),) * axis + (slice(None, None, 2),)] = 0
    return a


def write(path, nodes, inputs, outputs, tensors, opset=17, **header):
    tensors = [numpy_helper.from_array(np.asarray(a), n) for n, a in tensors.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=8, opset_imports=imports, **header)
    onnx.save(model, path)
    return model


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


node = helper.make_node


def run(path, **feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def layers(path, middle=(), opset=17, **header):
    """Two layers, `middle` between them, with 32 hidden units of which half are zero."""
    before = [
        node("MatMul", ["x", "w"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="relu"),
    ]
    last = node("MatMul", [middle[-1].output[0] if middle else "b", "v"], ["y"], name="last")
    tensors = {"w": half(16, 32, axis=1), "v": np.ones((32, 8), np.float32)}
    return write(path, [*before, *middle, last], [value("x", ["B", 16])], [value("y", ["B", 8])],
                 tensors, opset, **header)  # fmt: skip


def test_what_does_not_change_is_copied_byte_for_byte(tmp_path):
    path = tmp_path / "in.onnx"
    before = layers(path, opset=11, producer_name="trainer", doc_string="of it", model_version=3)
    after = edit_file(path, (torch.randn(3, 16),), TABLE).model
    sizes = {t.name: tuple(t.dims) for t in after.graph.initializer}
    assert sizes == {"w": (16, 16), "v": (16, 8)}
    del before.graph.initializer[:], after.graph.initializer[:]
    assert after.SerializeToString() == before.SerializeToString()


def test_ops_of_others_stay_and_the_rest_is_cut(tmp_path):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    gelu = node("BiasGelu", ["b", "bias"], ["c"], name="gelu", domain="com.microsoft")
    before = layers(path, [gelu])
    before.graph.initializer.append(numpy_helper.from_array(half(32, axis=0), "bias"))
    onnx.save(before, path)
    x = torch.randn(3, 16)
    result = optimize_onnx(path, out, (x,), minimal=True)
    if result.edited is not None:
        assert "BiasGelu" in {n.op_type for n in onnx.load(out).graph.node}
    np.testing.assert_allclose(run(out, x=x.numpy())[0], run(path, x=x.numpy())[0], atol=1e-5)


def test_nodes_named_as_values_are_do_not_clash(tmp_path):
    path = tmp_path / "in.onnx"
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="s"),
        node("Relu", ["a"], ["b"], name="t"),
        node("Shape", ["b"], ["s"], name="u"),
        node("MatMul", ["b", "v"], ["y"], name="y"),
    ]
    write(path, nodes, [value("x", ["B", 16])],
          [value("y", ["B", 8]), value("s", [2], TensorProto.INT64)],
          {"w": half(16, 32, axis=1), "v": np.ones((32, 8), np.float32)})  # fmt: skip
    x = torch.randn(3, 16)
    edited = edit_file(path, (x,), TABLE)
    save_edited(edited, tmp_path / "out.onnx")
    names = [n.name for n in edited.model.graph.node]
    assert len(set(names)) == len(names)
    y, sizes = run(tmp_path / "out.onnx", x=x.numpy())
    assert sizes.tolist() == [3, 32]
    np.testing.assert_allclose(y, run(path, x=x.numpy())[0], atol=1e-5)


def test_weights_in_other_files_stay_in_other_files(tmp_path):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    layers(path)
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="in.data",
                    size_threshold=0)  # fmt: skip
    x = torch.randn(3, 16)
    optimize_onnx(path, out, (x,), minimal=True)
    tensors = onnx.load(out, load_external_data=False).graph.initializer
    assert all(t.data_location == t.EXTERNAL for t in tensors)
    np.testing.assert_allclose(run(out, x=x.numpy())[0], run(path, x=x.numpy())[0], atol=1e-5)


@pytest.mark.parametrize("change", [1e-3, np.nan])
def test_a_difference_is_a_mismatch(tmp_path, change):
    path = tmp_path / "in.onnx"
    model = layers(path)
    compare_files(str(path), model.SerializeToString(), (torch.randn(3, 16),), None)
    weights = numpy_helper.to_array(model.graph.initializer[1]) + np.float32(change)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(weights, "v"))
    with pytest.raises(Mismatch, match="output 0 differs"):
        compare_files(str(path), model.SerializeToString(), (torch.randn(3, 16),), None)


@pytest.mark.parametrize("k", range(2))
def test_exports_of_tensors_with_the_exporters_names(tmp_path, k):
    """The edit is larger than the file, so that it is exported anew."""
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    nodes = [node("MatMul", ["x", f"val_{k}"], ["a"]), node("MatMul", ["x", "v"], ["b"]),
             node("Relu", ["a"], ["ra"]), node("Max", ["ra", "b"], ["m"]),
             node("MatMul", ["m", "u"], ["y"])]  # fmt: skip
    tensors = {f"val_{k}": half(8, 16, axis=1), "v": half(8, 16, axis=1)[:, ::-1].copy(),
               "u": np.ones((16, 4), np.float32)}  # fmt: skip
    write(path, nodes, [value("x", ["B", 8])], [value("y", ["B", 4])], tensors, opset=18)
    x = torch.randn(3, 8)
    optimize_onnx(path, out, (x,), minimal=True)
    np.testing.assert_allclose(run(out, x=x.numpy())[0], run(path, x=x.numpy())[0], atol=1e-5)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_files_of_torchs_exporter_are_exported_again(tmp_path):
    """Values that are folded become tensors, with names that tensors of the file have."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 12)
            self.convs = nn.ModuleList(nn.Conv1d(12, 24, k, padding=k // 2) for k in (3, 5))
            self.a, self.b = nn.Linear(24, 16), nn.Linear(16, 2)

        def forward(self, ids):
            y = self.embed(ids).mT
            y = torch.stack([conv(y) for conv in self.convs]).amax(0)
            return self.b(self.a(y.mT).relu())

    torch.manual_seed(0)
    net, ids = Net().eval(), torch.arange(20)[None]
    length = torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        for conv in net.convs:  # other channels of each: an export has gathers
            masked = torch.randperm(24)[:12]
            conv.weight[masked] = conv.bias[masked] = 0
    torch.onnx.export(net, (ids,), tmp_path / "in.onnx", dynamo=True, verbose=False,
                      dynamic_shapes={"ids": {1: length}})  # fmt: skip
    for minimal in (True, False):
        optimize_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx", (ids,), minimal=minimal)
        again = from_onnx(tmp_path / "out.onnx")
        torch.testing.assert_close(again(ids[:, :7])[0], net(ids[:, :7])[0])


def branches_of_other_units(path, width, count):
    """A sum of layers of `width` inputs and 16 units, each with zeros at others of these."""
    rng = np.random.default_rng(width)
    nodes, tensors = [], {"v": rng.standard_normal((16, 4)).astype(np.float32)}
    for k in range(count):
        w = rng.standard_normal((width, 16)).astype(np.float32)
        w[:, rng.permutation(16)[:8]] = 0
        tensors[f"w{k}"] = w
        nodes += [node("MatMul", ["x", f"w{k}"], [f"a{k}"]), node("Relu", [f"a{k}"], [f"r{k}"])]
    names = [f"r{k}" for k in range(count)]
    nodes += [node("Sum", names, ["s"]), node("MatMul", ["s", "v"], ["y"])]
    write(path, nodes, [value("x", ["B", width])], [value("y", ["B", 4])], tensors)


@pytest.mark.parametrize("width", [4, 8, 24, 100, 400])
@pytest.mark.parametrize("count", [2, 3])
def test_nodes_are_inserted_only_where_that_is_smaller(tmp_path, width, count):
    path, out, x = tmp_path / "in.onnx", tmp_path / "out.onnx", torch.randn(3, width)
    branches_of_other_units(path, width, count)
    sizes = []
    for insert in (False, True):
        edited = edit_file(path, (x,), TABLE, insert=insert)
        if edited is None:
            sizes.append(path.stat().st_size)
            continue
        save_edited(edited, out)
        sizes.append(out.stat().st_size)
        assert sizes[-1] < path.stat().st_size
        outputs = run(out, x=x.numpy())[0]
        np.testing.assert_allclose(outputs, run(path, x=x.numpy())[0], atol=1e-4)
        is_inserted = any(n.op_type in ("Pad", "Gather") for n in edited.model.graph.node)
        assert not is_inserted or (insert and 1.01 * sizes[1] < sizes[0])
        assert not insert or is_inserted or width < 400
