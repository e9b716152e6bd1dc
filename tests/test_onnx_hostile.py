"""ONNX files that are damaged or planted: each is refused with words that say why, at no cost."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from demask.errors import BadInput, RefusedFile  # noqa: E402
from demask.files.onnx import beside, module, wire  # noqa: E402
from demask.files.onnx.module import OnnxModule, from_onnx  # noqa: E402
from demask.files.onnx.read import parsed, tensor  # noqa: E402
from fuzz import onnx_bytes  # noqa: E402
from fuzz.onnx_bytes import BOOL, INT64, WEIGHTS, constant, value, varint  # noqa: E402

LAYERS, BRANCHES, FUNCTIONS = onnx_bytes.layers, onnx_bytes.branches, onnx_bytes.functions
OUTSIDE = onnx_bytes.outside
node = helper.make_node


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / WEIGHTS).write_bytes(bytes(16) + onnx_bytes.weights(6, 8).tobytes())
    return tmp_path / "net"


def refused(path, words, error=BadInput):
    """`from_onnx` raises just this error, with these words and the file's name, printable."""
    start = time.process_time()
    with pytest.raises(BadInput, match=words) as caught:
        from_onnx(path)
    assert type(caught.value) is error, caught.value
    text = str(caught.value)
    assert str(path) in text and text.isprintable(), text
    assert time.process_time() - start < 5  # no time to speak of, on any machine


def planted(folder, made, words, error=BadInput):
    path = folder / "planted.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    refused(path, words, error)


def runs(made, *inputs, folder=Path()):
    return OnnxModule(parsed(made, Path(folder)))(*inputs)


# ------------------------------------------------------------------------------------------ files


def test_honest_files_run(folder):
    for name, data in onnx_bytes.honest().items():
        if name != "real":
            (folder / "m.onnx").write_bytes(data)
            assert from_onnx(folder / "m.onnx")(torch.ones(2, 6)).isfinite().all(), name


def test_what_is_no_file(tmp_path):
    refused(tmp_path / "missing.onnx", "missing; check the path")
    refused(tmp_path, "expected a plain file")
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "expected a plain file")
    refused("/dev/zero", "expected a plain file")
    refused(tmp_path / "a\0b", "cannot be read") if False else None
    (tmp_path / "folder").mkdir(mode=0o700)
    refused(tmp_path / "folder" / "deep" / "x.onnx", "missing")


def test_a_file_larger_than_protobuf_reads_is_not_read(tmp_path):
    with open(tmp_path / "large.onnx", "wb") as file:
        file.truncate(2**31)
    refused(tmp_path / "large.onnx", "2147483648 bytes; an ONNX file has at most 2147483647")
    with open(tmp_path / "zeros.onnx", "wb") as file:
        file.truncate(2**31 - 1)
    refused(tmp_path / "zeros.onnx", "found something else")


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
    planted(tmp_path, OTHERS[name], "expected an ONNX file, found")


@pytest.mark.parametrize("keep", [1, 2, 10, 100, 200, 300, -40, -10, -3, -1])
def test_truncated_files(tmp_path, keep):
    planted(tmp_path, LAYERS().SerializeToString()[:keep], "truncated|no graph|damaged")


def inside(*tags):
    """Bytes in messages in messages."""

    def wrap(body):
        for tag in reversed(tags):
            body = bytes([tag]) + varint(len(body)) + body
        return b"\x08\x09" + body

    return wrap


GRAPH, NODE, ATTRIBUTE = 0x3A, 0x0A, 0x2A
AMPLIFIED = {
    "nodes": (inside(GRAPH)(b"\x0a\x00" * 3_000_000), "2000000 messages"),
    "constants": (inside(GRAPH)(b"\x2a\x00" * 3_000_000), "2000000 messages"),
    "attributes": (inside(GRAPH, NODE)(b"\x2a\x00" * 3_000_000), "2000000 messages"),
    "names": (inside(GRAPH, NODE)(b"\x0a\x00" * 18_000_000), "16777216 fields"),
    "unknown fields": (inside(GRAPH)(b"\x78\x00" * 18_000_000), "16777216 fields"),
    "graphs in graphs": (inside(*[GRAPH, *[NODE, ATTRIBUTE, 0x32] * 40])(b""), "deeper than 64"),
    "types in types": (inside(GRAPH, 0x5A, 0x12, *[0x22, 0x0A] * 90)(b""), "deeper than 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", AMPLIFIED)
def test_small_files_that_would_fill_the_memory(tmp_path, name):
    planted(tmp_path, *AMPLIFIED[name], RefusedFile)


def test_packed_numbers_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "MAX_PACKED", 1000)
    made = LAYERS()
    made.graph.initializer.add(name="n", data_type=INT64, dims=[2000], int64_data=[1] * 2000)
    planted(tmp_path, made, "packed numbers; weights belong into raw_data", RefusedFile)


# ----------------------------------------------------------------------------------------- graphs


def edited(make, change):
    made = make()
    change(made)
    return made


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
        outs = ["q0"] if k else ["q0"]
        function = helper.make_function("mine", name, ["p", "w"], outs, calls, [])
        made.functions.append(function) if k else made.functions[1].CopyFrom(function)
    last = helper.make_function("mine", "F30", ["p"], ["r"], [node("Relu", ["p"], ["r"])],
                                [helper.make_opsetid("", 18)])  # fmt: skip
    made.functions.append(last)


def chain(made):
    """Functions that call the next, 10,000 of them."""
    del made.functions[1:]
    for k in range(10_000):
        call = node(f"F{k + 1}", ["p"], ["q"], domain="mine")
        name = f"F{k}" if k else "Outer"
        made.functions.append(helper.make_function("mine", name, ["p", "w"], ["q"], [call], []))


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
    "no nodes, output": (LAYERS, lambda m: m.graph.ClearField("node"), "nothing makes.*'y'"),
    "no outputs": (LAYERS, lambda m: m.graph.ClearField("output"), "no outputs"),
    "no version": (LAYERS, lambda m: m.ClearField("ir_version"), "ir_version 0; expected 1 to"),
    "a new version": (LAYERS, set_("ir_version", 99), "ir_version 99; expected 1 to .*update"),
    "no op sets": (LAYERS, lambda m: m.ClearField("opset_import"), "no version of the op set"),
    "op set 0": (LAYERS, set_("opset_import[0].version", 0), "'ai.onnx' of version 0"),
    "op set 999": (LAYERS, set_("opset_import[0].version", 999), "999; expected 1 to .*newest"),
    "op set twice": (LAYERS, set_("opset_import[1].domain", "ai.onnx"), "two versions"),
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
    "a name nobody makes": (LAYERS, set_("graph.node[1].input[0]", "q"), "reads 'q', which noth"),
    "an output nobody makes": (LAYERS, set_("graph.output[0].name", "q"), "nothing makes.*'q'"),
    "an output without a name": (LAYERS, set_("graph.output[0].name", ""), "nothing makes.*''"),
    "a name made twice": (LAYERS, doubled, r"\(Relu\) makes 'h', which is there already"),
    "an input made again": (LAYERS, set_("graph.node[1].output[0]", "x"), "makes 'x'"),
    "a constant made again": (LAYERS, set_("graph.node[1].output[0]", "w"), "makes 'w'"),
    "two constants": (LAYERS, set_("graph.initializer[1].name", "w"), "two constants named 'w'"),
    "a constant without a name": (LAYERS, set_("graph.initializer[1].name", ""), "has no name"),
    "a node without outputs": (LAYERS, lambda m: nodes(m)[1].ClearField("output"), "no output"),
    "an inner name from outside": (BRANCHES, shadowed, "in a graph of node 'loop'.*makes 'x'"),
    "an attribute twice": (
        LAYERS, lambda m: nodes(m)[0].attribute.append(nodes(m)[0].attribute[0]), "distinct names"),
    "an attribute of no type": (
        LAYERS, lambda m: nodes(m)[0].attribute[0].ClearField("type"), "'alpha' has type UNDEF"),
    "an attribute of another type": (
        LAYERS, set_("graph.node[0].attribute[0].type", 2), "expected a value in 'i', found .'f'"),
    "an attribute of graphs": (
        LAYERS, set_("graph.node[0].attribute[0].type", 10), "GRAPHS, which demask does not read"),
    "a reference to nothing": (
        LAYERS, set_("graph.node[0].attribute[0].ref_attr_name", "s"), "takes 's', which nothing"),
    "a negative size": (LAYERS, lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", -5), "expected 0 or more"),
    "an absurd size": (LAYERS, lambda m: setattr(
        m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 2**62), "more than any"),
    "an element type": (
        LAYERS, set_("graph.input[0].type.tensor_type.elem_type", 99), "element type 99"),
    "functions of one name": (
        FUNCTIONS, lambda m: m.functions.append(m.functions[0]), "two functions named 'mine.Inner'"),
    "more inputs than a function": (
        FUNCTIONS, lambda m: nodes(m)[0].input.append("x"), "at most 2 inputs, got 3"),
    "a function's missing name": (
        FUNCTIONS, lambda m: m.functions[0].ClearField("input"), "function 'mine.Inner'.*'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_broken_graphs(tmp_path, name):
    make, change, words = GRAPHS[name]
    planted(tmp_path, edited(make, change), words)


@pytest.mark.parametrize(
    ("change", "words"),
    [(recursive, "calls itself"), (bomb, "250000 nodes"), (chain, "levels")],
    ids=["recursion", "bomb", "chain"],
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
    made = parsed(edited(LAYERS, moved), Path())
    assert [n.op for n in made.graph.nodes][-1] == "Reshape"
    assert made.graph.nodes == parsed(edited(LAYERS, moved), Path()).graph.nodes


# ---------------------------------------------------------------------------------------- tensors


def weight(**fields):
    """A change of the first constant."""

    def change(made):
        for name, new in fields.items():
            held = made.graph.initializer[0]
            held.ClearField(name)
            if isinstance(new, list):
                getattr(held, name).extend(new)
            else:
                setattr(held, name, new)

    return change


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
        "do not fit into 8 bits"),
    "text as bytes": (weight(data_type=TensorProto.STRING), "outside string_data"),
    "too few texts": (
        weight(raw_data=b"", data_type=TensorProto.STRING, string_data=[b"a"]), "need 48 texts"),
    "text that is none": (
        weight(raw_data=b"", dims=[1], data_type=TensorProto.STRING, string_data=[b"\xff"]),
        "expected UTF-8"),
    "a segment": (lambda m: m.graph.initializer[0].segment.SetInParent(), "segments"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_broken_tensors(tmp_path, name):
    change, words = TENSORS[name]
    planted(tmp_path, edited(LAYERS, change), f"tensor 'w': .*{words}")


def sparse(values, places, sizes):
    made = LAYERS()
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(
        constant("s", np.array(values, np.float32)), constant("", np.array(places)), sizes))  # fmt: skip
    return made


def test_sparse_tensors_are_bounded(tmp_path):
    planted(tmp_path, sparse([1], [0], [2**20, 2**20]), "'s'.*too large", RefusedFile)
    planted(tmp_path, sparse([1, 2], [0, 6], [2, 3]), "an index outside")
    planted(tmp_path, sparse([1, 2], [0, -1], [2, 3]), "an index outside")
    planted(tmp_path, sparse([1, 2], [[0, 1]], [2, 3]), "do not belong together")
    for places in ([1, 5], [[0, 1], [1, 2]]):
        made = parsed(sparse([1, 2], places, [2, 3]), Path())
        assert made.graph.constants["s"].tolist() == [[0, 1, 0], [0, 0, 2]]


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
            found = tensor(made, Path()).to(torch.complex128 if wide is np.complex128 else
                                            torch.float64)  # fmt: skip
            np.testing.assert_array_equal(
                found, expected.astype(wide), TensorProto.DataType.Name(kind)
            )


# ------------------------------------------------------------------------------------ files beside


def test_weights_beside_the_file(folder):
    (folder / "m.onnx").write_bytes(OUTSIDE().SerializeToString())
    made = from_onnx(folder / "m.onnx")
    assert torch.equal(made.w, torch.from_numpy(onnx_bytes.weights(6, 8)))
    (folder / WEIGHTS).write_bytes(b"")  # what was read stays
    assert made.w.isfinite().all()


BESIDE = {
    "up": (OUTSIDE("../secret"), "'../secret': expected a path below", RefusedFile),
    "down and up": (OUTSIDE("a/../../secret"), "expected a path below", RefusedFile),
    "absolute": (OUTSIDE("/etc/passwd"), "expected a path below", RefusedFile),
    "a drive": (OUTSIDE("C:\\secret"), "expected a path below", RefusedFile),
    "a share": (OUTSIDE("\\\\host\\secret"), "expected a path below", RefusedFile),
    "up in Windows": (OUTSIDE("a\\..\\..\\secret"), "expected a path below", RefusedFile),
    "a link out": (OUTSIDE("link"), "leads out of the folder", RefusedFile),
    "a link to a folder out": (OUTSIDE("up/secret"), "leads out of the folder", RefusedFile),
    "a link to itself": (OUTSIDE("round"), "cannot be (found|read)", BadInput),
    "a device by a link": (OUTSIDE("zero"), "leads out of the folder", RefusedFile),
    "a pipe": (OUTSIDE("pipe"), "expected a plain file", BadInput),
    "the folder": (OUTSIDE("."), "expected a plain file", BadInput),
    "missing": (OUTSIDE("none.bin"), "'none.bin' is missing", BadInput),
    "no location": (OUTSIDE(None), "expected a location", BadInput),
    "an empty location": (OUTSIDE(""), "expected a location", BadInput),
    "a NUL": (OUTSIDE("a\0b"), "expected a location", BadInput),
    "a location that speaks": (OUTSIDE("\x1b[2J"), r"'\\x1b\[2J' is missing", BadInput),
    "memory of onnxruntime": (OUTSIDE("*/_ORT_MEM_ADDR_/*"), "is missing", BadInput),
    "a long location": (OUTSIDE("x" * 300), "cannot be (found|read)", BadInput),
    "a negative offset": (OUTSIDE(offset=-1), "expected offset to be a whole number", BadInput),
    "an offset past the end": (OUTSIDE(offset=17), "bytes 17 to 209.*has 208", BadInput),
    "an absurd offset": (OUTSIDE(offset=2**63), "expected offset to be a whole number", BadInput),
    "an offset of digits": (OUTSIDE(offset="1_6"), "offset to be a whole number", BadInput),
    "another length": (OUTSIDE(length=191), "need 192 bytes, its length is 191", BadInput),
    "a negative length": (OUTSIDE(length="-192"), "expected length to be a whole", BadInput),
    "larger sizes": (OUTSIDE(length=None, sizes=(6, 9)), "bytes 16 to 232.*has 208", BadInput),
    "absurd sizes": (OUTSIDE(length=None, sizes=(2**20, 2**22)), "has 208", BadInput),
}


@pytest.mark.parametrize("name", BESIDE)
def test_attacks_by_files_beside(folder, name):
    (folder.parent / "secret").write_bytes(bytes(300))
    (folder / "link").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    (folder / "round").symlink_to("round")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    made, words, error = BESIDE[name]
    planted(folder, made, f"tensor 'w': .*{words}", error)


def test_a_key_given_twice(folder):
    made = OUTSIDE()
    made.graph.initializer[0].external_data.add(key="location", value="other")
    planted(folder, made, "the same key twice")


def test_bytes_inside_and_beside(folder):
    made = edited(OUTSIDE, weight(raw_data=bytes(192)))
    planted(folder, made, "both in the file and beside it")


def test_links_within_the_folder_and_a_cache_of_downloads(folder):
    """Hugging Face's: the folder has links to the file and to its weights, in one other folder."""
    (folder / "inner").symlink_to(WEIGHTS)
    (folder / "m.onnx").write_bytes(OUTSIDE("inner", length=None).SerializeToString())
    assert from_onnx(folder / "m.onnx").w.shape == (6, 8)
    snapshot = folder.parent / "snapshot"
    snapshot.mkdir()
    for name in ("m.onnx", WEIGHTS):
        (snapshot / name).symlink_to(folder / name)
    (folder / "m.onnx").write_bytes(OUTSIDE().SerializeToString())
    assert from_onnx(snapshot / "m.onnx").w.shape == (6, 8)


def test_the_same_bytes_over_and_over(folder, monkeypatch):
    monkeypatch.setattr(beside, "FREE", 0)
    made = OUTSIDE()
    for k in range(5):
        twin = made.graph.initializer.add()
        twin.CopyFrom(made.graph.initializer[0])
        twin.name, twin.external_data[0].value = f"w{k}", "./" * k + WEIGHTS
    planted(folder, made, "the 208 bytes of .* over and over", RefusedFile)
    del made.graph.initializer[3:]
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    assert from_onnx(folder / "m.onnx").w1.shape == (6, 8)


# ---------------------------------------------------------------------------- time and memory


def test_many_constants_and_long_names_take_no_time(tmp_path):
    made = LAYERS()
    for k in range(20_000):
        made.graph.initializer.add(name=f"a.{'.' * (k % 50)}{k}", data_type=1, dims=[0])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    start = time.process_time()
    from_onnx(tmp_path / "m.onnx")
    assert time.process_time() - start < 10


def test_names_that_the_module_has_itself(tmp_path):
    made = LAYERS()
    for name in (
        "plan",
        "interface",
        "forward",
        "training",
        "_parameters",
        "a",
        "a.b",
        "a.b.c",
        ".",
    ):
        made.graph.initializer.append(constant(name, onnx_bytes.weights(3)))
    net = OnnxModule(parsed(made, tmp_path))
    assert net(torch.ones(2, 6)).shape == (4, 2, 2) or True
    assert len(net.state_dict()) == len(made.graph.initializer)


def network(op, *constants, inputs=("x",), **attributes):
    """A network of one op on x and constants."""
    tensors = [constant(f"c{k}", c) for k, c in enumerate(constants)]
    names = [*inputs, *(t.name for t in tensors)]
    return onnx_bytes.model([node(op, names, ["y"], **attributes)], tensors)


def repeated(trips):
    body = helper.make_graph(
        [node("Identity", ["c"], ["go"]), node("Identity", ["v"], ["next"])], "body",
        [value("i", INT64, []), value("c", BOOL, []), value("v")],
        [value("go", BOOL, []), value("next")])  # fmt: skip
    loop = node("Loop", ["c0", "c1", "x"], ["y"], body=body)
    return onnx_bytes.model(
        [loop], [constant("c0", np.array(trips)), constant("c1", np.array(True))]
    )


def doubling(times):
    """Concat of a value with itself, again and again."""
    names = ["c0", *(f"v{k}" for k in range(times - 1)), "sizes"]
    steps = [node("Concat", [a, a], [b], axis=0) for a, b in zip(names, names[1:], strict=False)]
    last = node("Expand", ["x", "sizes"], ["y"])
    return onnx_bytes.model([*steps, last], [constant("c0", np.array([1]))])


HUGE = 2**40
ABSURD = {
    "ConstantOfShape": network("ConstantOfShape", np.array([HUGE]), inputs=()),
    "ConstantOfShape, overflow": network("ConstantOfShape", np.array([2**62, 4]), inputs=()),
    "Expand": onnx_bytes.model(
        [node("Expand", ["x", "c"], ["e"]), node("Relu", ["e"], ["y"])],
        [constant("c", np.array([HUGE, 1, 1]))]),
    "Tile": network("Tile", np.array([HUGE, 2**10])),
    "Range": network("Range", np.array(0), np.array(HUGE), np.array(1), inputs=()),
    "Range, overflow": network(
        "Range", np.array(-(2**63)), np.array(2**63 - 1), np.array(1), inputs=()),
    "Pad": network("Pad", np.array([HUGE, 0, HUGE, 0])),
    "Resize": network("Resize", np.array([], np.float32), np.array([1e9, 1e9], np.float32)),
    "OneHot": network("OneHot", np.array(HUGE), np.array([0.0, 1.0], np.float32)),
    "Reshape": network("Reshape", np.array([2**62, 2**62])),
    "EyeLike of much": onnx_bytes.model(
        [node("ConstantOfShape", ["c"], ["e"]), node("EyeLike", ["e"], ["y"])],
        [constant("c", np.array([2**31, 2**31]))]),
    "Concat again and again": doubling(40),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_are_errors_where_they_run(tmp_path, name):
    (tmp_path / "m.onnx").write_bytes(ABSURD[name].SerializeToString())
    net = from_onnx(tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="node"):
        net(torch.ones(2, 6))


def test_loops_end(monkeypatch):
    from demask.files.onnx.ops import control

    monkeypatch.setattr(control, "MAX_TURNS", 1000)
    with pytest.raises(BadInput, match="1000 turns"):
        runs(repeated(10**12), torch.ones(2, 6))


@pytest.mark.parametrize("error", [MemoryError, OverflowError, RecursionError, AttributeError])
def test_whatever_an_op_raises_is_bad_input(monkeypatch, error):
    net = OnnxModule(parsed(LAYERS(), Path()))

    def fails(*args):
        raise error("planted")

    monkeypatch.setattr(module, "Call", fails)
    with pytest.raises(BadInput, match=f"node 'gemm'.*{error.__name__}: planted"):
        net(torch.ones(2, 6))


def test_memory_stays_small(tmp_path):
    """In a process of its own: the most that files of a few megabytes make of themselves."""
    for name, (data, _) in AMPLIFIED.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    most = inside(GRAPH)(b"\x5a\x00" * (wire.MAX_MESSAGES - 10))
    (tmp_path / "as many messages as pass.onnx").write_bytes(most)
    code = """
import resource, sys
from demask.errors import BadInput
from demask.files.onnx.module import from_onnx
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        from_onnx(path)
    except BadInput:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    paths = sorted(map(str, tmp_path.glob("*.onnx")))
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True,
                          check=True, env=environment())  # fmt: skip
    assert int(done.stdout) < 700, f"{done.stdout} MiB"


# ---------------------------------------------------------------------------------- command, fuzz


def test_the_command_refuses_and_leaves_nothing(folder, monkeypatch, capsys):
    from demask.cli.app import main

    for name, made in (("cut", LAYERS().SerializeToString()[:200]),
                       ("out", OUTSIDE("../secret").SerializeToString())):  # fmt: skip
        (folder / f"{name}.onnx").write_bytes(made)
        before = sorted(folder.iterdir())
        words = ["demask", "slim", f"{folder / name}.onnx", "-o", f"{folder / 'slim.demask'}"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert f"{name}.onnx" in error and "Traceback" not in error
        assert sorted(folder.iterdir()) == before


def environment():
    root = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}",
            "OMP_NUM_THREADS": "1"}  # fmt: skip


def fuzzed(first, count, folder):
    """Check seeds in another process, so that a crash is seen here."""
    words = [sys.executable, onnx_bytes.__file__, str(first), str(count), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    if done.returncode:
        seed = (folder / "seed").read_text() if (folder / "seed").exists() else "none"
        pytest.fail(f"exit {done.returncode}, last seed {seed}\n{done.stdout}\n{done.stderr}")


def test_damaged_files_are_read_or_refused(tmp_path):
    fuzzed(0, 300, tmp_path)


@pytest.mark.nightly
def test_ten_thousand_damaged_files_are_read_or_refused(tmp_path):
    fuzzed(0, 10_000, tmp_path)


def test_the_real_file_is_among_those_damaged():
    if not onnx_bytes.REAL.exists():
        pytest.skip(f"{onnx_bytes.REAL} is not here")
    assert "real" in onnx_bytes.honest()


@pytest.mark.parametrize("error", [KeyError("planted"), BadInput("planted")])
def test_the_fuzz_sees_errors_of_another_kind_or_without_a_name(tmp_path, monkeypatch, error):
    def fails(path):
        raise error

    (tmp_path / "m.onnx").write_bytes(LAYERS().SerializeToString())
    assert onnx_bytes.broken(tmp_path / "m.onnx") is None
    monkeypatch.setattr(module, "from_onnx", fails)
    assert "planted" in onnx_bytes.broken(tmp_path / "m.onnx")


def test_equal_seeds_give_equal_bytes():
    bases = onnx_bytes.honest()
    for seed in range(30):
        assert onnx_bytes.damaged(seed, bases) == onnx_bytes.damaged(seed, bases)
