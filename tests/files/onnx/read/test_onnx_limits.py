"""What an ONNX file can ask of the machine is bounded: its time and memory, read or run."""

import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

import onnx_files
import own_process
from demask.errors import BadInput, RefusedFile
from demask.files.onnx import module, plan
from demask.files.onnx.module import OnnxModule, from_onnx
from demask.files.onnx.read import reader, tensors
from demask.files.onnx.read.reader import parse_model
from fuzz import onnx_bytes
from night import at_night
from onnx_files import BOOL, INT64, constant, node, planted, value, varint

LAYERS = onnx_files.layers

# -------------------------------------------------------------------------------------- reading


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
}


LONG = ("names", "unknown fields")  # as many fields as may be take seconds: by night


@pytest.mark.parametrize("name", [*(n for n in AMPLIFIED if n not in LONG), *at_night(*LONG)])
def test_small_files_that_would_fill_the_memory(tmp_path, name):
    planted(tmp_path, *AMPLIFIED[name], RefusedFile)


@pytest.mark.parametrize("tag", [b"\x0a", b"\x78"], ids=LONG)
def test_more_fields_than_there_may_be(tmp_path, monkeypatch, tag):
    monkeypatch.setattr(reader, "MAX_FIELDS", 1000)
    made = inside(GRAPH, NODE)((tag + b"\x00") * 1001)
    planted(tmp_path, made, "more than 1000 fields", RefusedFile)


def test_packed_numbers_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_PACKED", 1000)
    made = LAYERS()
    made.graph.initializer.add(name="n", data_type=INT64, dims=[2000], int64_data=[1] * 2000)
    planted(tmp_path, made, "packed numbers; weights belong into raw_data", RefusedFile)


def test_long_lists_that_would_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "MAX_EXPANDED", 4000)
    made = LAYERS()
    made.graph.node[1].attribute.append(helper.make_attribute("axes", [1] * 101))
    planted(tmp_path, made, "attribute 'axes' is too large", RefusedFile)


def test_constants_of_many_folders_are_not_as_many_modules(monkeypatch):
    monkeypatch.setattr(plan, "MAX_MODULES", 100)
    made = LAYERS()
    for k in range(100):
        made.graph.initializer.append(constant(f"a{k}.b.c.d", np.float32([k])))
    net = OnnxModule(parse_model(made, Path()))
    assert len(list(net.modules())) < 110 and len(net.state_dict()) == 105


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
    for name in ("plan", "interface", "forward", "training", "_parameters", "a", "a.b", "a.b.c", "."):
        made.graph.initializer.append(constant(name, onnx_files.weights(3)))
    net = OnnxModule(parse_model(made, tmp_path))
    assert net(torch.ones(2, 6)).shape == (2, 2, 4)
    assert len(net.state_dict()) == len(made.graph.initializer)


def network(op, *constants, inputs=("x",), **attributes):
    """A network of one op on x and constants."""
    tensors = [constant(f"c{k}", c) for k, c in enumerate(constants)]
    names = [*inputs, *(t.name for t in tensors)]
    return onnx_files.model([node(op, names, ["y"], **attributes)], tensors)


def repeated(trips):
    body = helper.make_graph(
        [node("Identity", ["c"], ["go"]), node("Identity", ["v"], ["next"])],
        "body",
        [value("i", INT64, []), value("c", BOOL, []), value("v")],
        [value("go", BOOL, []), value("next")],
    )
    loop = node("Loop", ["c0", "c1", "x"], ["y"], body=body)
    return onnx_files.model([loop], [constant("c0", np.array(trips)), constant("c1", np.array(True))])


def doubling(times):
    """Concat of a value with itself, again and again."""
    names = ["c0", *(f"v{k}" for k in range(times - 1)), "sizes"]
    steps = [node("Concat", [a, a], [b], axis=0) for a, b in pairwise(names)]
    last = node("Expand", ["x", "sizes"], ["y"])
    return onnx_files.model([*steps, last], [constant("c0", np.array([1]))])


HUGE = 2**40
ABSURD = {
    "ConstantOfShape": network("ConstantOfShape", np.array([HUGE]), inputs=()),
    "ConstantOfShape, overflow": network("ConstantOfShape", np.array([2**62, 4]), inputs=()),
    "Expand": onnx_files.model(
        [node("Expand", ["x", "c"], ["e"]), node("Relu", ["e"], ["y"])], [constant("c", np.array([HUGE, 1, 1]))]
    ),
    "Tile": network("Tile", np.array([HUGE, 2**10])),
    "Range": network("Range", np.array(0), np.array(HUGE), np.array(1), inputs=()),
    "Range, overflow": network("Range", np.array(-(2**63)), np.array(2**63 - 1), np.array(1), inputs=()),
    "Pad": network("Pad", np.array([HUGE, 0, HUGE, 0])),
    "Resize": network("Resize", np.array([], np.float32), np.array([1e9, 1e9], np.float32)),
    "OneHot": network("OneHot", np.array(HUGE), np.array([0.0, 1.0], np.float32)),
    "Reshape": network("Reshape", np.array([2**62, 2**62])),
    "EyeLike of much": onnx_files.model(
        [node("ConstantOfShape", ["c"], ["e"]), node("EyeLike", ["e"], ["y"])],
        [constant("c", np.array([2**31, 2**31]))],
    ),
    "Concat again and again": doubling(23),
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_are_errors_where_they_run(tmp_path, name):
    (tmp_path / "m.onnx").write_bytes(ABSURD[name].SerializeToString())
    net = from_onnx(tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="node"):
        net(torch.ones(2, 6))


def test_loops_end(monkeypatch):
    from demask.files.onnx.ops.data import control

    monkeypatch.setattr(control, "MAX_ITERATIONS", 1000)
    with pytest.raises(BadInput, match="1000 iterations"):
        OnnxModule(parse_model(repeated(10**12), Path()))(torch.ones(2, 6))


@pytest.mark.parametrize("error", [MemoryError, OverflowError, RecursionError, AttributeError])
def test_whatever_an_op_raises_is_bad_input(monkeypatch, error):
    net = OnnxModule(parse_model(LAYERS(), Path()))

    def fails(*args):
        raise error("planted")

    monkeypatch.setattr(module, "OnnxCall", fails)
    with pytest.raises(BadInput, match=f"node 'gemm'.*{error.__name__}: planted"):
        net(torch.ones(2, 6))


@pytest.mark.nightly
def test_memory_stays_small(tmp_path):
    """In a process of its own: the most that files of a few megabytes make of themselves."""
    (tmp_path / "nodes.onnx").write_bytes(AMPLIFIED["nodes"][0])
    most = inside(GRAPH)(b"\x6a\x00" * (reader.MAX_MESSAGES - 10))
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
    status, out, err = own_process.run(code, *sorted(tmp_path.glob("*.onnx")))
    assert status == 0, err
    assert int(out) < 700, f"{out} MiB"


def test_the_command_refuses_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    from demask.cli.main import main

    for name, made in (
        ("cut", LAYERS().SerializeToString()[:200]),
        ("out", onnx_files.outside("../secret").SerializeToString()),
    ):
        (tmp_path / f"{name}.onnx").write_bytes(made)
        before = sorted(tmp_path.iterdir())
        words = ["demask", "slim", f"{tmp_path / name}.onnx", "-o", f"{tmp_path / 'slim.demask'}"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert f"{name}.onnx" in error and "Traceback" not in error
        assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------- fuzz


def fuzzed(first, count, folder, *law):
    """Check seeds in another process, so that a crash is seen here."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    status, out, err = own_process.run(code, onnx_bytes.__file__, first, count, folder, *law)
    if status:
        seed = (folder / "seed").read_text() if (folder / "seed").exists() else "none"
        pytest.fail(f"exit {status}, last seed {seed}\n{out}\n{err}")


def test_damaged_files_are_read_or_refused(tmp_path):
    fuzzed(0, 300, tmp_path)


@pytest.mark.nightly
def test_ten_thousand_damaged_files_are_read_or_refused(tmp_path):
    fuzzed(0, 10_000, tmp_path)


def test_damaged_files_are_edited_or_refused(tmp_path):
    fuzzed(0, 40, tmp_path, "edit")


@pytest.mark.nightly
def test_two_thousand_damaged_files_are_edited_or_refused(tmp_path):
    fuzzed(0, 2_000, tmp_path, "edit")


def test_the_fuzz_sees_what_an_edit_leaves_behind(tmp_path, monkeypatch):
    def fails(edited, path):
        Path(path).with_suffix(".part").write_bytes(b"half")
        raise BadInput("planted")

    (tmp_path / "m.onnx").write_bytes(onnx_files.masked()["relu"])
    assert onnx_bytes.edit_broken(tmp_path / "m.onnx", 1) is None
    monkeypatch.setattr("demask.files.onnx.edit.edit_file.save_edited", fails)
    assert "is left" in onnx_bytes.edit_broken(tmp_path / "m.onnx", 1)


def test_the_real_file_is_among_those_damaged():
    if not onnx_files.REAL.exists():
        pytest.skip(f"{onnx_files.REAL} is not here")
    assert "real" in onnx_files.honest()


@pytest.mark.parametrize("error", [KeyError("planted"), BadInput("planted")])
def test_the_fuzz_sees_errors_of_another_kind_or_without_a_name(tmp_path, monkeypatch, error):
    def fails(path):
        raise error

    (tmp_path / "m.onnx").write_bytes(LAYERS().SerializeToString())
    assert onnx_bytes.broken(tmp_path / "m.onnx") is None
    monkeypatch.setattr(module, "from_onnx", fails)
    assert "planted" in onnx_bytes.broken(tmp_path / "m.onnx")


def test_equal_seeds_give_equal_bytes():
    bases = onnx_files.honest()
    for seed in range(30):
        assert onnx_bytes.damaged(seed, bases) == onnx_bytes.damaged(seed, bases)
