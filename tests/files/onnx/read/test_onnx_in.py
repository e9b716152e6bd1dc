"""ONNX files as PyTorch modules that can be demasked: masks, sizes, exporters of other times."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from test_onnx_out import agree, run
from torch import nn

import demask
from architectures import transformers
from demask.errors import BadInput, NotExportable
from demask.files.onnx.module import OnnxModule
from night import at_night

ort = pytest.importorskip("onnxruntime")
FLOAT = TensorProto.FLOAT


def file(path, nodes, inputs, outputs, opset=17, **constants):
    """A file of these nodes; inputs, outputs: name -> sizes, or (element type, sizes)."""

    def ports(named):
        typed = {k: v if isinstance(v, tuple) else (FLOAT, v) for k, v in named.items()}
        return [helper.make_tensor_value_info(k, *v) for k, v in typed.items()]

    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "g", ports(inputs), ports(outputs), tensors)
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def drawn(*sizes):
    return np.random.default_rng(sum(sizes)).standard_normal(sizes).astype(np.float32)


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.state_dict().items()}


def check(path, *inputs, **wanted):
    """The module, demasked, written again: all three as the file itself in ONNX Runtime; and the
    shapes wanted of what is left."""
    net = demask.from_onnx(path)
    expected = run(path, *inputs)
    for module in (net, slim := demask.demask(net, inputs)):
        with torch.no_grad():
            made = module(*inputs)
        agree(made if isinstance(made, tuple) else (made,), expected)
    demask.verify(net, slim, inputs)
    demask.to_onnx(slim, path.with_suffix(".slim.onnx"))
    agree(run(path.with_suffix(".slim.onnx"), *inputs), expected)
    left = shapes(slim)
    assert {name: left[name] for name in wanted} == wanted
    return net, slim


MASK = np.array([1, 0, 1, 0, 1, 1, 0, 1], np.float32)


def masked(kind):
    """Nodes and constants of conv, norm, ReLU, conv: channels 1, 3 and 6 between them masked."""
    scale, shift = drawn(8) + 2, drawn(8)
    shift[MASK == 0] = 0
    w, bias = drawn(8, 3, 3, 3), drawn(8)
    nodes, name = [], "w"
    if kind == "initializer":
        w, bias = w * MASK[:, None, None, None], bias * MASK
    elif kind == "scale":
        scale = scale * MASK
    else:
        nodes, name = [node("Mul", "w mask", "w_masked")], "w_masked"
        bias = bias * MASK
    nodes += [
        node("Conv", f"x {name} b", "c", pads=[1] * 4),
        node("BatchNormalization", "c scale shift mean var", "n"),
        node("Relu", "n", "r"),
        node("Conv", "r w2", "y"),
    ]
    constants = {
        "w": w,
        "b": bias,
        "scale": scale,
        "shift": shift,
        "mean": np.zeros(8, np.float32),
        "var": np.ones(8, np.float32),
        "w2": drawn(4, 8, 1, 1),
    }
    if kind == "mul":
        constants["mask"] = MASK.reshape(8, 1, 1, 1)
    return nodes, constants


@pytest.mark.parametrize("kind", ["initializer", "mul", "scale"])
def test_masks_as_they_come_in_files(tmp_path, kind):
    nodes, constants = masked(kind)
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 4, 8, 8]}, **constants)
    check(path, torch.randn(2, 3, 8, 8), w=(5, 3, 3, 3), w2=(4, 5, 1, 1), scale=(5,))


def test_weights_are_parameters_and_the_rest_buffers(tmp_path):
    nodes, constants = masked("initializer")
    path = file(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 8, 8]}, **constants)
    net = demask.from_onnx(path)
    assert {name for name, _ in net.named_parameters()} == {"w", "b", "scale", "shift", "w2"}
    assert {name for name, _ in net.named_buffers()} == {"mean", "var"}
    net(torch.randn(1, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert net.training is False


def test_it_is_copied_pickled_pruned_and_moved_like_any_module(tmp_path):
    nodes, constants = masked("initializer")
    path = file(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 8, 8]}, **constants)
    net, x = demask.from_onnx(path), torch.randn(1, 3, 8, 8)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            assert torch.equal(twin(x), net(x))
            twin.get_parameter("w")[0] = 0
        assert net.get_parameter("w")[0].any()
        assert shapes(demask.demask(twin, (x,)))["w"] == (4, 3, 3, 3)
    assert net.double()(x.double()).dtype == torch.float64


def test_names_that_modules_cannot_have(tmp_path):
    """A dot makes a module, "forward" is taken, one name begins another."""
    names = ["a", "a.b", "forward", "x/y.training"]
    nodes, last = [], "x"
    for k, name in enumerate(names):
        nodes.append(helper.make_node("Add", [last, name], [f"v{k}"]))
        last = f"v{k}"
    constants = {name: drawn(k + 1, 3)[-1] for k, name in enumerate(names)}
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3]}, {last: ["N", 3]}, **constants)
    net, x = demask.from_onnx(path).requires_grad_(False), torch.randn(2, 3)
    agree([net(x)], run(path, x))
    assert len(dict(net.named_parameters())) == 4
    demask.save(demask.demask(net, (x,)), tmp_path / "m.demask")
    with torch.no_grad():
        agree([demask.load(tmp_path / "m.demask")(x)], run(path, x))


def branch(op, name):
    return helper.make_graph([node(op, "x", name)], op, [], [helper.make_tensor_value_info(name, FLOAT, None)])


def test_a_constant_condition_takes_its_branch(tmp_path):
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=branch("Relu", "t"), else_branch=branch("Neg", "e"))]
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3]}, {"y": ["N", 3]}, c=np.array(True))
    _, slim = check(path, torch.randn(2, 3))
    assert "relu" in slim.code and "neg" not in slim.code


def test_a_condition_on_values_is_refused_with_its_node(tmp_path):
    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "c"),
        helper.make_node(
            "If", ["c"], ["y"], name="the choice", then_branch=branch("Relu", "t"), else_branch=branch("Neg", "e")
        ),
    ]
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3]}, {"y": ["N", 3]}, zero=np.float32(0))
    net, x = demask.from_onnx(path), torch.randn(2, 3)
    agree([net(x)], run(path, x))
    with pytest.raises((NotExportable, BadInput), match="the choice"):
        demask.demask(net, (x,))


def test_a_loop_with_a_constant_count_is_unrolled(tmp_path):
    body = helper.make_graph(
        [node("Mul", "state w", "scaled"), node("Add", "scaled x", "next"), node("Identity", "go", "again")],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", FLOAT, ["N", 3]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", FLOAT, ["N", 3]),
        ],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3]}, {"y": ["N", 3]}, n=np.array(4), w=drawn(3))
    check(path, torch.randn(2, 3))


def test_arithmetic_on_sizes_disappears(tmp_path):
    """Shape, Gather, Concat, Reshape, as exporters write a flatten; batch and height dynamic."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Unsqueeze", "n axes", "n1"),
        node("Concat", "n1 rest", "to", axis=0),
        node("Relu", "x", "r"),
        node("Reshape", "r to", "flat"),
        node("ReduceSum", "flat axis1", "y", keepdims=1),
    ]
    path = file(
        tmp_path / "m.onnx",
        nodes,
        {"x": ["N", 3, "H", 5]},
        {"y": ["N", 1]},
        zero=np.array(0),
        axes=np.array([0]),
        rest=np.array([-1]),
        axis1=np.array([1]),
    )
    _, slim = check(path, torch.randn(2, 3, 4, 5))
    assert "torch.tensor" not in slim.code and ".item(" not in slim.code
    x = torch.randn(7, 3, 9, 5)
    agree(run(tmp_path / "m.slim.onnx", x), run(path, x))


def test_a_size_that_the_network_fixes_is_told(tmp_path):
    nodes = [node("Add", "x table", "y")]
    path = file(tmp_path / "m.onnx", nodes, {"x": ["N", 3]}, {"y": ["N", 3]}, table=drawn(4, 3))
    slim = demask.demask(demask.from_onnx(path), (torch.randn(4, 3),))
    assert any("'N'" in note and "static" in note for note in slim.demasked.notes)


def test_half_and_whole_numbers_keep_their_types(tmp_path):
    nodes = [
        node("Cast", "x", "h", to=TensorProto.FLOAT16),
        node("MatMul", "h w", "y"),
        node("ArgMax", "y", "best", axis=1, keepdims=0),
        node("Add", "k one", "k1"),
    ]
    outputs = {"y": (TensorProto.FLOAT16, ["N", 4]), "best": (TensorProto.INT64, ["N"]), "k1": (TensorProto.INT32, [])}
    w = drawn(3, 4).astype(np.float16)
    path = file(
        tmp_path / "m.onnx",
        nodes,
        {"x": ["N", 3], "k": (TensorProto.INT32, [])},
        outputs,
        w=w,
        one=np.array(1, np.int32),
    )
    check(path, torch.randn(2, 3), torch.tensor(5, dtype=torch.int32))


# -- files of torch's older exporter ---------------------------------------------------------------


def exported(module, x, path, opset, dynamic):
    """Written by the exporter of TorchScript, whose files most people hold."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), (x,), path, opset_version=opset, dynamo=False, input_names=["x"], dynamic_axes={"x": dynamic}
        )
    return path


class UNet(nn.Module):
    """A resize to a size that is read at run time, and a concatenation."""

    def __init__(self):
        super().__init__()
        self.a, self.b = self.block(3, 8), self.block(8, 16)
        self.c, self.up = self.block(24, 8), nn.ConvTranspose2d(16, 16, 2, 2)

    def block(self, i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x):
        a = self.a(x)
        b = self.up(self.b(nn.functional.max_pool2d(a, 2)))[:, :, ::2, ::2]
        b = nn.functional.interpolate(b, size=a.shape[2:], mode="bilinear", align_corners=False)
        return self.c(torch.cat([a, b], 1))


@pytest.mark.parametrize("opset", [11, 17])
def test_an_image_network_of_any_size(tmp_path, opset):
    torch.manual_seed(0)
    net = UNet()
    with torch.no_grad():
        for block in (net.a, net.b):
            block[0].weight[::2] = 0
            block[0].bias[::2] = 0
    path = exported(net, torch.randn(1, 3, 16, 24), tmp_path / "m.onnx", opset, {0: "n", 2: "h", 3: "w"})
    module = demask.from_onnx(path)
    slim = demask.demask(module, (torch.randn(2, 3, 16, 24),))
    assert slim.demasked.after.parameters < 0.6 * slim.demasked.before.parameters
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    for sizes in ((1, 3, 16, 24), (3, 3, 20, 12)):
        x = torch.randn(sizes)
        agree(run(tmp_path / "slim.onnx", x), run(path, x))


class Tagger(nn.Module):
    """Texts of any length through an LSTM and a GRU."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 12, batch_first=True)
        self.gru, self.out = nn.GRU(12, 8, batch_first=True, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.gru(self.lstm(self.words(x))[0])[0])


def test_a_recurrent_network_of_any_length(tmp_path):
    torch.manual_seed(0)
    net = Tagger()
    with torch.no_grad():
        for parameter in net.lstm.parameters():
            parameter[24:30] = 0  # the g-gate of six units: they stay zero
    path = exported(net, torch.randint(0, 50, (2, 7)), tmp_path / "m.onnx", 14, {0: "n", 1: "t"})
    module = demask.from_onnx(path)
    slim = demask.demask(module, (torch.randint(0, 50, (2, 7)),))
    assert slim.demasked.after.parameters < 0.75 * slim.demasked.before.parameters
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    for sizes in ((1, 3), (4, 11)):
        x = torch.randint(0, 50, sizes)
        agree(run(tmp_path / "slim.onnx", x), run(path, x))


@pytest.mark.parametrize("opset", [17, *at_night(12)])
def test_a_transformer_of_any_length(tmp_path, opset):
    """At opset 12 the layer norms are spelled out."""
    hub = transformers()
    torch.manual_seed(0)
    config = hub.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        attn_implementation="eager",
    )

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = hub.BertModel(config, add_pooling_layer=False)

        def forward(self, x):
            return self.bert(input_ids=x).last_hidden_state

    net = Bert().eval()
    with torch.no_grad():
        for layer in net.bert.encoder.layer:
            layer.intermediate.dense.weight[::2] = 0
            layer.attention.self.value.weight[:8] = 0
            layer.attention.self.value.bias[:8] = 0
    path = exported(net, torch.randint(0, 60, (2, 9)), tmp_path / "m.onnx", opset, {0: "n", 1: "t"})
    slim = demask.demask(demask.from_onnx(path), (torch.randint(0, 60, (2, 9)),))
    dynamic = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    whole = demask.demask(net, (torch.randint(0, 60, (2, 9)),), dynamic_shapes=dynamic)
    kept = slim.demasked.after.parameters / whole.demasked.after.parameters
    assert 0.97 < kept < 1.03
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    for sizes in ((1, 4), (3, 12)):
        x = torch.randint(0, 60, sizes)
        agree(run(tmp_path / "slim.onnx", x), run(path, x))


def test_two_paths_of_one_file_are_equal_modules(tmp_path):
    nodes, constants = masked("initializer")
    path = file(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 8, 8]}, **constants)
    a, b = demask.from_onnx(path), demask.from_onnx(str(path))
    assert isinstance(a, OnnxModule) and shapes(a) == shapes(b)
    assert a.interface == b.interface


def test_casts_to_the_type_that_a_value_has_do_not_keep_verify_from_float64(tmp_path):
    weight = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    path = file(tmp_path / "m.onnx", nodes, {"x": ["n", 4]}, {"y": ["n", 6]}, w=weight)
    net = demask.from_onnx(path)
    found = demask.verify(net, demask.demask(net, (torch.randn(2, 4),)), (torch.randn(2, 4),))
    assert found.ok and found.max_rel < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norms_by_their_definition(tmp_path, dtype):
    """Below op set 23, which has RMS norms."""
    torch.manual_seed(0)
    net, x = nn.RMSNorm(6).to(dtype).eval(), (torch.randn(3, 6) * 1e-3).to(dtype)
    with torch.no_grad():
        net.weight.uniform_(0.5, 1.5)
    demask.to_onnx(net, tmp_path / "norm.onnx", (x,))
    (y,) = run(tmp_path / "norm.onnx", x)
    limit = 2e-3 if dtype is torch.float16 else 1e-6
    np.testing.assert_allclose(np.asarray(y), net(x).detach().numpy(), rtol=0, atol=limit)


def test_weights_in_constant_nodes_are_parameters(tmp_path):
    """As some exporters write them, where a file has no others; single numbers are not."""
    weight = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    values = {"w": weight, "scale": np.float32([2.0])}
    nodes = [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(v)) for name, v in values.items()]
    nodes += [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Mul", ["y", "scale"], ["z"])]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 5]), ("z", [2, 4]))]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    net = demask.from_onnx(tmp_path / "m.onnx")
    assert [tuple(p.shape) for p in net.parameters()] == [(5, 4)]
    assert [tuple(b.shape) for b in net.buffers()] == [(1,)]
