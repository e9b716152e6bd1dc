"""`demask slim` of ONNX files as files: op sets, replacement, weights in other files, no check."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from test_edited_files import half, layers, node, value, write

import demask
from demask.errors import BadInput, NotExportable
from demask.files.onnx.write.leftover_weights import remove_unnamed, weight_files
from test_cli import run  # noqa: F401  (a fixture)
from test_deploy import fast  # noqa: F401  (a fixture)

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


def outputs(data):
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X.numpy()})[0]


def widths(path):
    return {t.name: tuple(t.dims) for t in onnx.load(path).graph.initializer}


def opset(path):
    return next(e.version for e in onnx.load(path).opset_import if not e.domain)


def pools(path, version):
    """Two layers with a mean between them, whose axes are attributes before op set 18."""
    means = [node("ReduceMean", ["b3"], ["c"], name="mean", axes=[1], keepdims=0)]
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="first"),
        node("Relu", ["a"], ["b"], name="r"),
        node("Unsqueeze", ["b"], ["b3"], name="u", axes=[1]),
        *means,
        node("MatMul", ["c", "v"], ["y"], name="last"),
    ]
    tensors = {"w": half(16, 32, axis=1), "v": np.ones((32, 8), np.float32)}
    model = write(path, nodes, [value("x", ["B", 16])], [value("y", ["B", 8])], tensors, version, doc_string="of it")
    model.graph.initializer[1].doc_string, model.graph.input[0].doc_string = "of v", "of x"
    for item in (model.graph, model.graph.node[0], model.graph.initializer[1]):
        item.metadata_props.add(key="origin", value="a camera")
    model.graph.node[0].doc_string = "of first"
    model.training_info.add().algorithm.name = "descent"
    del model.opset_import[1:]
    onnx.save(model, path)


@pytest.mark.parametrize("minimal", [True, False])
def test_another_op_set(tmp_path, minimal):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    pools(path, 11)
    result = demask.optimize_onnx(path, out, (X,), minimal=minimal, opset=18)
    assert result.edited is not None or not minimal
    assert opset(out) == 18 and result.error < 1e-5
    np.testing.assert_allclose(outputs(out), outputs(path), atol=1e-5)
    if minimal:
        assert widths(out)["w"] == (16, 16)
        made = onnx.load(out)
        assert made.doc_string == "of it" and made.graph.initializer[1].doc_string == "of v"
        assert made.graph.input[0].doc_string == "of x"
        for item in (made.graph, made.graph.node[0], made.graph.initializer[1]):
            assert [p.value for p in item.metadata_props] == ["a camera"]
        assert made.graph.node[0].doc_string == "of first"
        assert made.training_info[0].algorithm.name == "descent"
        assert {n.name for n in made.graph.node} >= {"first", "r", "u", "mean", "last"}


def test_where_nothing_is_faster_the_file_is_in_the_op_set_too(tmp_path):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    write(path, [node("Relu", ["x"], ["y"])], [value("x", ["B", 16])], [value("y", ["B", 16])], {})
    result = demask.optimize_onnx(path, out, (X,), minimal=True, opset=21)
    assert opset(out) == 21 and result.error == 0 and onnx.load(out).ir_version >= 10
    onnx.checker.check_model(out, full_check=True)


def test_an_op_set_without_the_op_is_refused(tmp_path):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    layers(path, [node("Mish", ["b"], ["c"], name="mish")], opset=18)
    with pytest.raises(NotExportable, match="version converter fails from op set 18 to 9"):
        demask.optimize_onnx(path, out, (X,), opset=9)
    with pytest.raises(BadInput, match="op set"):
        demask.optimize_onnx(path, out, (X,), opset=999)
    assert not out.exists()


def test_a_network_is_written_in_the_op_set(tmp_path):
    out = tmp_path / "out.onnx"
    demask.optimize_onnx(torch.nn.Linear(16, 4), out, (X,), minimal=True, opset=19)
    assert opset(out) == 19


# -- in place --------------------------------------------------------------------------------------


def beside(path, location="in.data"):
    """The file of `layers` with its weights in another file."""
    layers(path)
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location=location, size_threshold=0)
    return outputs(path)


@pytest.mark.parametrize("options", [["--minimal"], ["--minimal", "--opset", "18"], []])
def test_in_place(run, tmp_path, options):  # noqa: F811
    expected = beside(tmp_path / "in.onnx")
    outcome = run("slim", "in.onnx", "--in-place", "--size", "B=3", "--json", *options)
    assert outcome.code == 0, outcome.err
    np.testing.assert_allclose(outputs(tmp_path / "in.onnx"), expected, atol=1e-5)
    names = {p.name for p in tmp_path.iterdir()}
    if "--minimal" in options:
        assert widths(tmp_path / "in.onnx") == {"w": (16, 16), "v": (16, 8)}
        assert "in.data" not in names and len(names) == 2
        assert "in.data was removed" in outcome.out


def test_what_another_file_names_is_left(run, tmp_path):  # noqa: F811
    beside(tmp_path / "in.onnx")
    (tmp_path / "copy.onnx").write_bytes((tmp_path / "in.onnx").read_bytes())
    outcome = run("slim", "in.onnx", "--in-place", "--minimal", "--size", "B=3", "--json")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "in.data").exists() and "copy.onnx names it" in outcome.out
    outputs(tmp_path / "copy.onnx")


def test_what_a_file_in_the_folder_above_names_is_left(tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    beside(folder / "in.onnx")
    model = onnx.load(folder / "in.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = "inner/in.data"
    onnx.save(model, tmp_path / "outer.onnx")
    demask.optimize_onnx(folder / "in.onnx", folder / "in.onnx", (X,), minimal=True)
    assert (folder / "in.data").exists()
    outputs(tmp_path / "outer.onnx")


def test_a_link_to_weights_is_left(tmp_path):
    beside(tmp_path / "in.onnx")
    layers(tmp_path / "in.onnx")
    (tmp_path / "in.data").rename(tmp_path / "blob")
    (tmp_path / "in.data").hardlink_to(tmp_path / "blob")
    assert "a link" in remove_unnamed(tmp_path / "in.onnx", {"in.data"})[0]
    (tmp_path / "in.data").unlink()
    (tmp_path / "in.data").symlink_to("blob")
    assert "a link" in remove_unnamed(tmp_path / "in.onnx", {"in.data"})[0]
    assert (tmp_path / "in.data").exists()


def test_where_nothing_changes_the_file_is_not_touched(tmp_path):
    path = tmp_path / "in.onnx"
    write(
        path,
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["B", 16])],
        [value("y", ["B", 16])],
        {"w": np.ones((16, 16), np.float32)},
    )
    before = path.stat()
    demask.optimize_onnx(path, path, (X,), minimal=True)
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_overwritten_result_leaves_no_weights(tmp_path):
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    expected = beside(path)
    demask.optimize_onnx(path, out, (X,), minimal=True)
    layers(out)
    beside(out, "old.data")
    demask.optimize_onnx(path, out, (X,), minimal=True)
    assert not (tmp_path / "old.data").exists() and (tmp_path / "in.data").exists()
    np.testing.assert_allclose(outputs(out), expected, atol=1e-5)


def test_weights_in_branches_are_named_too(tmp_path):
    branch = helper.make_graph(
        [node("Constant", [], ["z"], value=onnx.numpy_helper.from_array(np.ones(4, np.float32)))],
        "b",
        [],
        [value("z", [4])],
    )
    tensor = branch.node[0].attribute[0].t
    onnx.external_data_helper.set_external_data(tensor, "branch.data", 0, 16)
    tensor.ClearField("raw_data")
    made = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    write(tmp_path / "in.onnx", [made], [value("c", [], TensorProto.BOOL)], [value("y", [4])], {})
    assert weight_files(tmp_path / "in.onnx") == {"branch.data"}


# -- what the command says -------------------------------------------------------------------------


def test_options_of_onnx_files(run, tmp_path):  # noqa: F811
    layers(tmp_path / "in.onnx")
    (tmp_path / "in.pt2").touch()
    for words, complaint in (
        (["in.onnx"], "either --output FILE or --in-place"),
        (["in.onnx", "--in-place", "-o", "out.onnx"], "either --output FILE or --in-place"),
        (["in.pt2", "--in-place"], "--in-place is for .onnx files"),
        (["in.onnx", "-o", "out.pt2", "--opset", "18"], "--opset: for .onnx results"),
        (["in.onnx", "-o", "out.pt2", "--check", "off"], "--check: for .onnx results"),
    ):
        outcome = run("slim", *words)
        assert outcome.code == 2 and complaint in outcome.err
    outcome = run("slim", "in.onnx", "-o", "out.onnx", "--size", "B=3", "--minimal", "--check", "off", "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    assert told["error"] is None and told["checked"].startswith("unchecked")


def test_a_file_that_is_only_edited_is_measured_and_said(run, tmp_path, fast):  # noqa: F811
    """It has an op that demask has no function for."""
    fast(lambda name: 1.0 if name == "given" else 0.5)
    layers(tmp_path / "in.onnx", [node("BiasGelu", ["b", "v0"], ["c"], name="gelu", domain="com.microsoft")])
    model = onnx.load(tmp_path / "in.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(32, np.float32), "v0"))
    onnx.save(model, tmp_path / "in.onnx")
    outcome = run("slim", "in.onnx", "-o", "out.onnx", "--size", "B=3", "--threads", "1")
    assert outcome.code == 0, outcome.err
    assert "returned: " in outcome.out and "candidate" in outcome.out
    assert "(returned)" in outcome.out and "in ONNX Runtime)" in outcome.out


def test_inspect_says_which_nodes_change_and_which_stay(run, tmp_path):  # noqa: F811
    triangle = node("Trilu", ["b"], ["c"], name="triangle", domain="com.microsoft")
    layers(tmp_path / "in.onnx", [triangle])
    model = onnx.load(tmp_path / "in.onnx")
    more = [
        node("MatMul", ["y", "w2"], ["d"], name="second"),
        node("Relu", ["d"], ["e"], name="relu2"),
        node("MatMul", ["e", "v"], ["z"], name="third"),
    ]
    model.graph.node.extend(more)
    model.graph.output.append(value("z", ["B", 8]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(half(8, 32, axis=1), "w2"))
    onnx.save(model, tmp_path / "in.onnx")
    before = sorted(p.name for p in tmp_path.iterdir())
    data = json.loads(run("inspect", "in.onnx", "--size", "B=3", "--json").out)["edit"]
    changes = {row["node"]: row for row in data["changes"]}
    assert changes["second"]["op"] == "MatMul" and changes["second"]["change"].startswith(
        "w2 [8, 32] -> [8, 16] (50 %)"
    )
    assert "triangle" in dict(data["barriers"]) and data["bytes"][1] < data["bytes"][0]
    shown = run("inspect", "in.onnx", "--size", "B=3").out
    assert "not cut: triangle" in shown and "w2 [8, 32] -> [8, 16]" in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    demask.optimize_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx", (X,), minimal=True)
    assert widths(tmp_path / "out.onnx")["w2"] == (8, 16)


def test_inspect_names_barriers_where_nothing_is_removed(run, tmp_path):  # noqa: F811
    layers(tmp_path / "in.onnx", [node("Trilu", ["b"], ["c"], name="triangle", domain="com.microsoft")])
    model = onnx.load(tmp_path / "in.onnx")
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((16, 32), np.float32), "w"))
    onnx.save(model, tmp_path / "in.onnx")
    shown = run("inspect", "in.onnx", "--size", "B=3").out
    assert "removes nothing" in shown and "not cut: triangle" in shown
