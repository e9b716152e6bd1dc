"""Example inputs of commands: their sizes, from files, fixed, and numbers that networks expect."""

import numpy as np
import pytest
import torch
from torch import nn

import demask
import test_cli
from demask.cli.options import NetworkOptions
from demask.cli.read_network import computed_size, read_network
from demask.errors import BadInput
from demask.graph.example_inputs import PIXELS, draw_examples, expected_domains
from demask.graph.input_domains import Domain

run = test_cli.run  # a fixture
onnx = pytest.importorskip("onnx")


def write(path, inputs, nodes, constants=()):
    """An ONNX file. inputs: (name, type, sizes); nodes: (op, inputs, output, attributes)."""
    h = onnx.helper
    made = [h.make_node(op, list(reads), [to], **more) for op, reads, to, more in nodes]
    ports = [h.make_tensor_value_info(name, kind, sizes) for name, kind, sizes in inputs]
    outs = [h.make_tensor_value_info(node.output[0], 1, None) for node in made[-1:]]
    graph = h.make_graph(made, "g", ports, outs, [onnx.numpy_helper.from_array(a, n) for n, a in constants])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def images(tmp_path):
    """A convolution of stride 2 on images of open sizes, two of them without a name."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    node = ("Conv", "xw", "c", {"strides": [2, 2], "pads": [1, 1, 1, 1]})
    return write(
        tmp_path / "images.onnx", [("x", 1, ["n", 3, "?", "?"])], [node, ("Relu", "c", "y", {})], [("w", weight)]
    )


@pytest.fixture
def state(tmp_path):
    """A batch on two axes, and a length that has to be large."""
    weight = np.ones((1, 1, 300), np.float32)
    nodes = [
        ("Conv", "aw", "c", {}),
        ("ReduceMean", "c", "m", {"axes": [0, 1, 2], "keepdims": 1}),
        ("Add", "ms", "y", {}),
    ]
    ports = [("a", 1, ["batch", 1, "length"]), ("s", 1, [2, "batch", 4])]
    return write(tmp_path / "state.onnx", ports, nodes, [("w", weight)])


def shapes(network):
    return [tuple(x.shape) for x in network.args]


# -- sizes ----------------------------------------------------------------------------------------


def test_a_name_is_one_size_everywhere_and_lengths_are_tried_until_one_runs(state):
    assert shapes(read_network(state)) == [(1, 1, 512), (2, 1, 4)]
    assert shapes(read_network(state, NetworkOptions(sizes=["batch=3", "length=301"]))) == [(3, 1, 301), (2, 3, 4)]


def test_a_size_may_be_computed_from_others(tmp_path):
    ports = [
        ("x", 1, ["batch", "length"]),
        ("past", 1, ["batch", "past_length"]),
        ("mask", 1, ["batch", "past_length + length"]),
    ]
    nodes = [("Concat", ["past", "x"], "c", {"axis": 1}), ("Mul", ["c", "mask"], "y", {})]
    decoder = write(tmp_path / "decoder.onnx", ports, nodes)
    assert shapes(read_network(decoder, NetworkOptions(sizes=["length=3"]))) == [(1, 3), (1, 1), (1, 4)]
    cache = write(
        tmp_path / "cache.onnx",
        [ports[0], ("keys", 1, ["batch", 2, "past", 4])],
        [("ReduceSum", ["keys"], "s", {}), ("Add", "xs", "y", {})],
    )
    assert shapes(read_network(cache)) == [(1, 16), (1, 2, 1, 4)]
    assert computed_size("(a + 1) * b / 2 - 3", {"a": 5, "b": 4}) == 9
    assert computed_size("a - b", {"a": 5, "b": 9}) == 1
    for text in ("", "a.b", "a + c", "?", "f(a)", "a / 0", "a ** a", "(" * 9000):
        assert computed_size(text, {"a": 5}) is None


def test_lines_of_text_are_tried_too(tmp_path):
    weight = np.ones((4, 3, 48, 3), np.float32)
    axes = np.array([2])
    lines = write(
        tmp_path / "lines.onnx",
        [("x", 1, ["n", 3, "h", "w"])],
        [("Conv", "xw", "c", {}), ("Squeeze", "ca", "y", {})],
        [("w", weight), ("a", axes)],
    )
    assert shapes(read_network(lines)) == [(1, 3, 48, 320)]


def test_a_network_that_runs_with_none_says_what_to_give(state):
    with pytest.raises(BadInput, match=r"give --input FILE, or --size NAME=N for batch, length"):
        read_network(state, NetworkOptions(sizes=["length=20"]))


def test_axes_without_a_name_have_sizes_of_their_own(images):
    assert shapes(read_network(images, NetworkOptions(sizes=["x.2=10", "n=2"]))) == [(2, 3, 10, 224)]
    with pytest.raises(BadInput, match=r"no such size; it has n, x\.2, x\.3"):
        read_network(images, NetworkOptions(sizes=["width=10"]))


def test_sizes_of_torch_files(run, tmp_path):
    test_cli.write(test_cli.network(masked=True), tmp_path / "net.pt2")
    found = read_network(tmp_path / "net.pt2")
    assert found.args == () and [tuple(x.shape) for x in found.example] == [(2, 3, 6, 7)]
    (port,) = (p for p in demask.cli.read_network.ports_of(found))
    assert shapes(read_network(tmp_path / "net.pt2", NetworkOptions(sizes=[f"{port.sizes[0]}=5"]))) == [(5, 3, 6, 7)]


def test_static_fixes_all_sizes(run, tmp_path, images):
    test_cli.write(test_cli.network(masked=True), tmp_path / "net.pt2")
    for words in (("net.pt2",), (images, "--size", "x.2=12", "--size", "x.3=14")):
        assert run("slim", *words, "-o", "slim.demask", "--static").code == 0
        (spec,) = demask.load(tmp_path / "slim.demask").demasked.inputs
        assert spec.sizes == spec.example
    assert spec.sizes == (1, 3, 12, 14)


def test_the_batch_stays_dynamic_on_all_its_axes(state):
    record = read_network(state, inner=True).model.demasked
    (first, one, length), (two, second, four) = (spec.sizes for spec in record.inputs)
    assert isinstance(first, str) and isinstance(second, str)
    assert (one, length, two, four) == (1, 512, 2, 4)


def test_strides_are_lowered_and_raised_at_the_sizes_of_the_example(run, tmp_path, images):
    words = ("--size", "x.2=12", "--size", "x.3=14")
    outcome = run("lower", images, "-o", "low.onnx", "--target", "slice", *words)
    assert outcome.code == 0, outcome.err
    assert run("verify", images, "low.onnx", *words).code == 2  # whose sizes are fixed
    outcome = run("raise", "low.onnx", "-o", "high.onnx")
    assert outcome.code == 0, outcome.err
    (node,) = (n for n in onnx.load(tmp_path / "high.onnx").graph.node if n.op_type == "Conv")
    assert list(onnx.helper.get_node_attr_value(node, "strides")) == [2, 2]


# -- inputs in files ------------------------------------------------------------------------------


def test_inputs_from_files(state, tmp_path):
    a, s = np.ones((3, 1, 400), np.float32), np.full((2, 3, 4), 2.0)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "s.npy", s)
    np.savez(tmp_path / "both.npz", s=s, a=a)
    both = [str(tmp_path / name) for name in ("a.npy", "s.npy")]
    for words in (both, [f"s={both[1]}", both[0]], [str(tmp_path / "both.npz")]):
        args = read_network(state, NetworkOptions(inputs=words)).args
        assert torch.equal(args[0], torch.from_numpy(a)) and bool((args[1] == 2).all())
    assert shapes(read_network(state, NetworkOptions(inputs=both[:1]))) == [(3, 1, 400), (2, 3, 4)]
    for sizes, words, complaint in (
        (["batch=2"], both, "size batch: got 2 and 3"),
        (None, [f"s={both[0]}"], r"expected input s float32 \[2, any, 4\], got float32 \[3, 1, 40"),
        (None, [*both, both[0]], "expected one array for each input"),
        (None, ["none.npy"], "no such file"),
    ):
        with pytest.raises(BadInput, match=complaint):
            read_network(state, NetworkOptions(sizes=sizes, inputs=words))


def test_commands_check_with_the_inputs_given(run, tmp_path, monkeypatch):
    test_cli.write(test_cli.network(masked=True), tmp_path / "net.pt2")
    given = np.full((4, 3, 6, 7), 0.25, np.float32)
    np.save(tmp_path / "x.npy", given)
    seen, verify = [], demask.verify

    def watched(model, slim, args, **more):
        seen.append(args)
        return verify(model, slim, args, **more)

    monkeypatch.setattr(demask, "verify", watched)
    outcome = run("slim", "net.pt2", "-o", "slim.demask", "--input", "x.npy")
    assert outcome.code == 0, outcome.err
    assert torch.equal(seen[0][0], torch.from_numpy(given))


def test_the_tolerance_reaches_the_comparison(run, images, monkeypatch):
    pytest.importorskip("onnxruntime")
    outcome = run("slim", images, "-o", "slim.onnx", "--minimal", "--tolerance", "-1")
    assert outcome.code == 2 and "tolerance" in outcome.err
    assert run("slim", images, "-o", "slim.pt2", "--tolerance", "0.1").code == 2


def test_no_command_follows_a_file_that_no_other_command_reads(run, tmp_path):
    pytest.importorskip("onnxruntime")
    weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    weight[:, 3:] = 0
    nodes = [
        ("MatMul", "xw", "a", {}),
        ("Relu", "a", "b", {}),
        ("MatMul", "bv", "c", {}),
        ("Gelu", "c", "y", {"domain": "com.microsoft"}),
        ("Own", "y", "z", {"domain": "own"}),
    ]
    path = write(tmp_path / "own.onnx", [("x", 1, [2, 4])], nodes, [("w", weight), ("v", weight.T.copy())])
    model = onnx.load(path)
    model.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in ("com.microsoft", "own"))
    onnx.save(model, path)
    outcome = run("slim", path, "-o", "slim.onnx", "--minimal")
    assert outcome.code == 0, outcome.err
    assert "next: " not in outcome.err
    sizes = [list(one.dims) for one in onnx.load(tmp_path / "slim.onnx").graph.initializer]
    assert sorted(sizes) == [[3, 4], [4, 3]]


# -- numbers --------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Inputs that index a table, are pixels, a rate, a mask."""

    def __init__(self):
        super().__init__()
        self.table, self.long = nn.Embedding(7, 4), nn.Embedding(90, 4)
        self.register_buffer("rows", torch.randn(5, 4))

    def forward(self, words, places, image, byte, rate, mask, free):
        found = self.table(words.long()) + self.long(words) + self.rows.index_select(0, places)
        scaled = (image.permute(0, 2, 1) / 255).mean() + byte.float().mean() * (1 / 255)
        fast = torch.where(rate == 16000, 1.0, 2.0)
        return found.mean() * scaled * fast + mask.sum() + free.sum()


INPUTS = (
    torch.ones(3, dtype=torch.int32),
    torch.ones(3, dtype=torch.int64),
    torch.ones(2, 3, 4),
    torch.ones(2, 3, dtype=torch.uint8),
    torch.tensor(1),
    torch.ones(3, dtype=torch.bool),
    torch.ones(2, dtype=torch.int64),
)
EXPECTED = {"words": Domain(0, 6), "places": Domain(0, 4), "image": PIXELS, "rate": Domain(16000, 16000)}


@pytest.mark.parametrize("kind", ["pt2", "demask", "onnx"])
def test_numbers_are_those_that_the_first_ops_expect(tmp_path, kind):
    program = torch.export.export(Reads().eval(), INPUTS)
    path = tmp_path / f"net.{kind}"
    if kind == "pt2":
        torch.export.save(program, path)
    else:
        slim = demask.demask(program)
        (demask.save if kind == "demask" else demask.to_onnx)(slim, path)
    found = read_network(path)
    spans = expected_domains(found.model)
    assert sorted(map(str, spans.values())) == sorted(map(str, EXPECTED.values()))
    if kind != "onnx":  # whose inputs are counted
        assert spans.items() >= EXPECTED.items()
    words, places, image, byte, rate, mask, free = found.example
    assert words.max() == 6 or words.unique().numel() > 1
    assert places.max() < 5 and image.max() > 200 and byte.max() > 200
    assert rate == 16000 and bool(mask.all()) and not bool(free.any())
    if kind == "pt2":
        drawn, _ = draw_examples((found.model,), (), {})
        assert all(map(torch.equal, drawn, found.example))
