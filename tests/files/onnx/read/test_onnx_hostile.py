"""ONNX files that are damaged or planted: each is refused with words that say why, at no cost."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnx_files
from demask.errors import RefusedFile
from demask.files.onnx.module import OnnxModule, from_onnx
from demask.files.onnx.read.reader import parse_model, tensor
from onnx_files import BOOL, constant, edited, node, planted, refused, varint, weight

LAYERS, BRANCHES, FUNCTIONS = onnx_files.layers, onnx_files.branches, onnx_files.functions


def runs(made, *inputs):
    return OnnxModule(parse_model(made, Path()))(*inputs)


# ------------------------------------------------------------------------------------------ files


def test_honest_files_run(tmp_path):
    path = onnx_files.with_weights(tmp_path) / "m.onnx"
    for name, data in onnx_files.honest().items():
        if name != "real":
            path.write_bytes(data)
            assert from_onnx(path)(torch.ones(2, 6)).isfinite().all(), name


def test_what_is_no_file(tmp_path):
    refused(tmp_path / "missing.onnx", "no such file; check the path")
    refused(tmp_path, "expected a plain file")
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "expected a plain file")
    refused("/dev/zero", "expected a plain file")
    (tmp_path / "round.onnx").symlink_to("round.onnx")
    refused(tmp_path / "round.onnx", "cannot be read")


def test_a_file_larger_than_protobuf_reads_is_not_read(tmp_path):
    with open(tmp_path / "large.onnx", "wb") as file:
        file.truncate(2**31)
    refused(tmp_path / "large.onnx", "2147483648 bytes; an ONNX file has at most 2147483647")
    with open(tmp_path / "zeros.onnx", "wb") as file:
        file.truncate(2**31 - 1)
    refused(tmp_path / "zeros.onnx", "got something else")


OTHERS = {
    "empty": b"",
    "a zip archive": b"PK\x03\x04" + bytes(100),
    "text": b"import onnx\n" * 10,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a varint without end": b"\x08" + b"\xff" * 100,
    "a length past the end": b"\x3a" + varint(2**40) + b"x",
    "a group": b"\x08\x01\x3b\x3c",
    "field 0": b"\x08\x09\x02\x00",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_bytes(tmp_path, name):
    planted(tmp_path, OTHERS[name], "expected an ONNX file, got")


@pytest.mark.parametrize("keep", [1, 2, 10, 100, 200, 300, -40, -12, -3, -1])
def test_truncated_files(tmp_path, keep):
    planted(tmp_path, LAYERS().SerializeToString()[:keep], "truncated|no graph|damaged")


# ----------------------------------------------------------------------------------------- graphs


def nodes(made):
    return made.graph.node


def moved(made):
    """The file's nodes in another order, which can be put right."""
    whole = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(reversed(whole))


def circle(made):
    nodes(made)[1].input[0] = "y"


def doubled(made):
    nodes(made)[1].output[0] = "h"


def shadowed(made):
    graph = nodes(made)[0].attribute[0].g
    graph.node[0].output[0] = graph.node[1].input[0] = "x"


def recursive(made):
    made.functions[0].node[0].op_type, made.functions[0].node[0].domain = "Outer", "mine"


def bomb(made):
    """Functions of two calls each: 2 ** 30 nodes."""
    for k in range(30):
        name = f"F{k}" if k else "Outer"
        calls = [node(f"F{k + 1}", ["p"], [f"q{i}"], domain="mine") for i in range(2)]
        function = helper.make_function("mine", name, ["p", "w"], ["q0"], calls, [])
        made.functions.append(function) if k else made.functions[1].CopyFrom(function)
    last = helper.make_function(
        "mine", "F30", ["p"], ["r"], [node("Relu", ["p"], ["r"])], [helper.make_opsetid("", 18)]
    )
    made.functions.append(last)


def chain(made):
    """Functions that call the next, 10,000 of them."""
    del made.functions[1:]
    for k in range(10_000):
        call = node(f"F{k + 1}", ["p"], ["q"], domain="mine")
        name = f"F{k}" if k else "Outer"
        made.functions.append(helper.make_function("mine", name, ["p", "w"], ["q"], [call], []))


def wide(made):
    """A function of many inputs, called often."""
    made.functions[1].input.extend(f"more{k}" for k in range(1000))
    for k in range(600):
        made.graph.node.append(node("Outer", ["x", "w"], [f"n{k}"], domain="mine"))


def set_(path, new):
    """A change of one field: "graph.node[1].input[0]"."""

    def change(made):
        scope = {"m": made, "new": new}
        head, _, last = f"m.{path}".rpartition(".")
        if path.endswith("]"):
            exec(f"m.{path} = new", scope)
        else:
            setattr(eval(head, scope), last, new)

    return change


GRAPHS = {
    "no graph": (LAYERS, lambda m: m.ClearField("graph"), "no graph"),
    "no nodes, output": (LAYERS, lambda m: m.graph.ClearField("node"), "'y' is not defined"),
    "no outputs": (LAYERS, lambda m: m.graph.ClearField("output"), "no outputs"),
    "no version": (LAYERS, lambda m: m.ClearField("ir_version"), "ir_version 0; expected 1 to"),
    "a new version": (LAYERS, set_("ir_version", 99), "ir_version 99; expected 1 to .*update"),
    "no op sets": (LAYERS, lambda m: m.ClearField("opset_import"), "no version of the op set"),
    "op set 0": (LAYERS, set_("opset_import[0].version", 0), "'ai.onnx' of version 0"),
    "op set 999": (LAYERS, set_("opset_import[0].version", 999), "999; expected 1 to .*newest"),
    "op set twice": (LAYERS, set_("opset_import[1].domain", "ai.onnx"), "two versions"),
    "many op sets": (LAYERS, lambda m: m.opset_import.extend(
        [helper.make_opsetid(f"d{k}", 1) for k in range(100)]), "at most 100 op sets, got 102"),
    "an unknown domain": (LAYERS, set_("graph.node[1].domain", "yours"), "op set 'yours'"),
    "an unknown op": (LAYERS, set_("graph.node[1].op_type", "Rely"), r"ops: Rely \(1\)"),
    "no op": (LAYERS, set_("graph.node[1].op_type", ""), "without the name"),
    "an op that speaks": (LAYERS, set_("graph.node[1].op_type", "\x1b[2J"), r"got '\\x1b\[2J'"),
    "a domain that speaks": (LAYERS, set_("graph.node[1].domain", "a\nb"), "expected plain text"),
    "a name that speaks": (LAYERS, set_("graph.node[1].input[0]", "\x1b[2J"), r"'\\x1b\[2J', wh"),
    "an input that speaks": (LAYERS, set_("graph.input[0].name", "\u202ex"), "expected plain text"),
    "a size that speaks": (LAYERS, lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "\r"), "expected plain text"),
    "an endless name": (LAYERS, set_("graph.node[1].name", "x" * 5000), "at most 4096 characters"),
    "a circle": (LAYERS, circle, "wait for each other: node 'relu'.*Gather|wait for each other"),
    "a node that waits for itself": (
        LAYERS, set_("graph.node[1].input[0]", "r"), r"other: node 'relu' \(Relu\) -> node 'relu'"),
    "a name nobody makes": (LAYERS, set_("graph.node[1].input[0]", "q"), "'q', which is not def"),
    "an output nobody makes": (LAYERS, set_("graph.output[0].name", "q"), "'q' is not defined"),
    "an output without a name": (LAYERS, set_("graph.output[0].name", ""), "output has no name"),
    "a name made twice": (LAYERS, doubled, r"\(Relu\) defines 'h', which is already defined"),
    "an input made again": (LAYERS, set_("graph.node[1].output[0]", "x"), "defines 'x'"),
    "a constant made again": (LAYERS, set_("graph.node[1].output[0]", "w"), "defines 'w'"),
    "two constants": (LAYERS, set_("graph.initializer[1].name", "w"), "two constants named 'w'"),
    "a constant without a name": (LAYERS, set_("graph.initializer[1].name", ""), "has no name"),
    "a node without outputs": (LAYERS, lambda m: nodes(m)[1].ClearField("output"), "no output"),
    "an inner name from outside": (BRANCHES, shadowed, "in a graph of node 'loop'.*defines 'x'"),
    "an attribute twice": (
        LAYERS, lambda m: nodes(m)[0].attribute.append(nodes(m)[0].attribute[0]), "distinct names"),
    "an attribute of no type": (
        LAYERS, lambda m: nodes(m)[0].attribute[0].ClearField("type"), "'alpha' has type UNDEF"),
    "an attribute of another type": (
        LAYERS, set_("graph.node[0].attribute[0].type", 2), "expected a value in 'i', got .'f'"),
    "an attribute of graphs": (
        LAYERS, set_("graph.node[0].attribute[0].type", 10), "GRAPHS, which demask does not read"),
    "a reference to nothing": (
        LAYERS, set_("graph.node[0].attribute[0].ref_attr_name", "s"), "refers to 's', which"),
    "a negative size": (LAYERS, lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", -5), "expected 0 or more"),
    "an absurd size": (LAYERS, lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 2**62), "more than any"),
    "an element type": (
        LAYERS, set_("graph.input[0].type.tensor_type.elem_type", 99), "element type 99"),
    "functions of one name": (
        FUNCTIONS, lambda m: m.functions.append(m.functions[0]), "functions named 'mine.Inner'"),
    "more inputs than a function": (
        FUNCTIONS, lambda m: nodes(m)[0].input.append("x"), "at most 2 inputs, got 3"),
    "a function's missing name": (
        FUNCTIONS, set_("functions[0].node[0].input[0]", "q"), "function 'mine.Inner'.*reads 'q'"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_broken_graphs(tmp_path, name):
    make, change, words = GRAPHS[name]
    planted(tmp_path, edited(make, change), words)


@pytest.mark.parametrize(
    ("change", "words"),
    [(recursive, "calls itself"), (bomb, "500000 nodes"), (chain, "levels"), (wide, "500000")],
    ids=["recursion", "bomb", "chain", "names"],
)
def test_functions_without_end(tmp_path, change, words):
    planted(tmp_path, edited(FUNCTIONS, change), words, RefusedFile)


@pytest.mark.parametrize("field", ["graph.name", "graph.node[0].name", "graph.node[0].input[0]"])
def test_text_that_is_none(tmp_path, field):
    data = edited(LAYERS, set_(field, "QQQQ")).SerializeToString()
    planted(tmp_path, data.replace(b"QQQQ", b"\xff\xfe\x80Q"), r"UTF-8 text, got b'.xff.xfe")


def test_text_of_attributes_that_is_none(tmp_path):
    made = LAYERS()
    nodes(made)[0].attribute.append(helper.make_attribute("mode", b"\xff"))
    planted(tmp_path, made, "attribute 'mode': expected UTF-8 text")


def test_nodes_in_another_order_are_sorted():
    x = torch.ones(2, 6)
    assert torch.equal(runs(edited(LAYERS, moved), x), runs(LAYERS(), x))
    made = parse_model(edited(LAYERS, moved), Path())
    assert [n.op for n in made.graph.nodes][-1] == "Reshape"
    assert made.graph.nodes == parse_model(edited(LAYERS, moved), Path()).graph.nodes


# ---------------------------------------------------------------------------------------- tensors


TENSORS = {
    "too few bytes": (weight(raw_data=b"1234"), r"sizes \[6, 8\] need 192 bytes, it has 4"),
    "no bytes": (weight(raw_data=b""), "need 192 bytes, it has 0"),
    "larger sizes": (weight(dims=[6, 9]), "need 216 bytes, it has 192"),
    "absurd sizes": (weight(dims=[2**31, 2**31]), "more than any tensor has"),
    "sizes that overflow": (weight(dims=[2**62, 4, 0]), "more than any tensor has"),
    "negative sizes": (weight(dims=[-6, -8]), "sizes of at least 0"),
    "many sizes": (weight(dims=[1] * 65), "at most 64 dimensions, got 65"),
    "another type": (weight(data_type=TensorProto.INT8), "need 48 bytes, it has 192"),
    "no type": (weight(data_type=0), "element type 0"),
    "an unknown type": (weight(data_type=77), "element type 77"),
    "bytes twice": (weight(float_data=[1.0] * 48), "both in raw_data and in float_data"),
    "too few floats": (weight(raw_data=b"", float_data=[1.0]), "need 48 numbers.* has 1"),
    "the wrong field": (weight(raw_data=b"", int64_data=[1] * 48), "192 bytes, it has 0"),
    "numbers too large": (
        weight(raw_data=b"", dims=[1], data_type=TensorProto.INT8, int32_data=[300]),
        "do not fit into 8 bits",
    ),
    "text as bytes": (weight(data_type=TensorProto.STRING), "outside string_data"),
    "too few texts": (weight(raw_data=b"", data_type=TensorProto.STRING, string_data=[b"a"]), "need 48 texts"),
    "text that is none": (
        weight(raw_data=b"", dims=[1], data_type=TensorProto.STRING, string_data=[b"\xff"]),
        "expected UTF-8",
    ),
    "a segment": (lambda m: m.graph.initializer[0].segment.SetInParent(), "segments"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_broken_tensors(tmp_path, name):
    change, words = TENSORS[name]
    planted(tmp_path, edited(LAYERS, change), f"tensor 'w': .*{words}")


def sparse(values, places, sizes):
    made = LAYERS()
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(constant("sp", np.float32(values)), constant("", np.array(places)), sizes)
    )
    return made


def test_sparse_tensors_are_bounded(tmp_path):
    planted(tmp_path, sparse([1], [0], [2**20, 2**20]), "'sp'.*too large", RefusedFile)
    planted(tmp_path, sparse([1, 2], [0, 6], [2, 3]), "an index outside")
    planted(tmp_path, sparse([1, 2], [0, -1], [2, 3]), "an index outside")
    planted(tmp_path, sparse([1, 2], [[0, 1]], [2, 3]), "do not match")
    for places in ([1, 5], [[0, 1], [1, 2]]):
        made = parse_model(sparse([1, 2], places, [2, 3]), Path())
        assert made.graph.constants["sp"].tolist() == [[0, 1, 0], [0, 0, 2]]


def test_every_element_type_as_the_onnx_package_decodes_it():
    draw = np.random.default_rng(0)
    for kind in TensorProto.DataType.values():
        if kind in (TensorProto.UNDEFINED, TensorProto.STRING):
            continue
        numbers = draw.integers(0, 2, 7) if kind == BOOL else draw.integers(0, 4, 7) / 2
        for raw in (False, True):
            made = helper.make_tensor("t", kind, [7], numbers)
            if raw:
                made = numpy_helper.from_array(numpy_helper.to_array(made), "t")
            expected = numpy_helper.to_array(made)
            wide = np.complex128 if expected.dtype.kind == "c" else np.float64
            found = tensor(made, Path()).to(torch.complex128 if wide is np.complex128 else torch.float64)
            np.testing.assert_array_equal(found, expected.astype(wide), TensorProto.DataType.Name(kind))
