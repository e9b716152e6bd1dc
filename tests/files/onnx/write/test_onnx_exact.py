"""ONNX files compute what the network computes, to the bit where ONNX lets them, on odd numbers."""

import math

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import demask
from demask.errors import BadInput, Mismatch, NotExportable
from demask.files.onnx import check as checking
from demask.files.onnx.check import runner
from demask.files.onnx.write import writer as writing
from demask.files.onnx.write.clean import is_exact
from demask.files.onnx.write.writer import judge_of, proto_of, serialized, to_onnx
from demask.ops import TABLE
from graphs import to_graph

pytest.importorskip("onnxruntime")
INF, NAN = math.inf, math.nan
ODD = torch.tensor([0.0, -0.0, 1, -1, 0.5, -1.5, 2.5, 1e-9, -1e-9, 88, -88, 104, -104, 1e4, -1e4, INF, -INF, NAN])
LAST = 2**31 - 1
WHOLE = torch.tensor([7, -7, 7, -7, 0, 5, -5, LAST, -(2**31), 2**53 + 1])
BY = torch.tensor([2, 2, -2, -2, 3, 5, 5, 2, 2, 2])


class Calls(nn.Module):
    """Functions of the same inputs, all of them outputs."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, y):
        return tuple(f(x, y) for f in self.functions)


def outputs(net, inputs):
    """What the network returns, and what its file returns, neither runtime rewriting anything."""
    data = serialized(proto_of(net.eval(), inputs))
    return [y.numpy() for y in net(*inputs)], runner(data, optimized=False)(inputs)


# Constants next to those that leave a number as it is, by ever more units in the last place.
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_constant_is_taken_for_another(dtype):
    """x op c, for c near the neutral element of op, bit for bit."""
    eps, calls = torch.finfo(dtype).eps, []
    for name, neutral in NEUTRAL.items():
        for k in (0, 1, 3, 10, 20, 30, 40):
            for sign in (1, -1):
                near = neutral + sign * 2**k * eps * (1.0 if neutral else 1e-12)
                op = getattr(torch, name)
                calls.append(lambda x, y, op=op, c=near: op(x, c))
    x = torch.tensor([[0.0, 1e-9, 1.0, -3.0, 1e4]], dtype=dtype)
    expected, found = outputs(Calls(*calls), (x, x))
    for a, b in zip(expected, found, strict=True):
        assert a.tobytes() == (b + 0.0 if not a.any() else b).tobytes(), (a, b)


ODD_CALLS = {
    "log_sigmoid": lambda x, y: F.logsigmoid(x),
    "clamp": lambda x, y: torch.clamp(x, -1.0, 2.0),
    "clamp_min": lambda x, y: x.clamp_min(0.1),
    "clamp_max": lambda x, y: x.clamp(max=0.1),
    "bounds crossed": lambda x, y: torch.clamp(x, 2.0, -1.0),
    "whole bounds": lambda x, y: x.clamp(0, 1),
    "remainder": lambda x, y: torch.remainder(x[:15], -3.0),
    "fmod": lambda x, y: torch.fmod(x[:15], -3.0),
    "round": lambda x, y: torch.round(x),
    "floor div": lambda x, y: torch.div(x[:15], 0.1, rounding_mode="floor"),
    "trunc div": lambda x, y: torch.div(x, -2.0, rounding_mode="trunc"),
    "pow": lambda x, y: x**2,
    "power of": lambda x, y: 2**x,
    "nan_to_num": lambda x, y: torch.nan_to_num(x),
    "where": lambda x, y: torch.where(x > y, x, y),
    "softplus": lambda x, y: F.softplus(x),
    "log1p": lambda x, y: torch.log1p(x),
    "expm1": lambda x, y: torch.expm1(x),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "fill": lambda x, y: x.masked_fill(x > 0, -INF),
}
WHOLE_CALLS = {
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor_divide": lambda x, y: x // y,
    "by a number": lambda x, y: x // 3,
    "remainder": lambda x, y: x % y,
    "remainder of a number": lambda x, y: x % -3,
    "fmod": lambda x, y: torch.fmod(x, y),
    "overflow": lambda x, y: x * x,
    "clamp": lambda x, y: x.clamp(-3, 4),
}
PIECES = {
    "odd halves": lambda x, y: torch.cat([x[..., 3:], x[..., :3]], -1),
    "ties": lambda x, y: (x * 0).argmax(-1),
    "topk": lambda x, y: x.topk(2, -1)[1],
    "half to even": lambda x, y: (x * 4).round() / 4,
    "nearest": lambda x, y: F.interpolate(x, scale_factor=1.7),
    "nearest-exact": lambda x, y: F.interpolate(x, size=(8, 3), mode="nearest-exact"),
    "bilinear": lambda x, y: F.interpolate(x, size=(8, 3), mode="bilinear"),
    "corners": lambda x, y: F.interpolate(x, size=(8, 3), mode="bilinear", align_corners=True),
    "bicubic": lambda x, y: F.interpolate(x, size=(8, 9), mode="bicubic"),
    "ceil": lambda x, y: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "no padding counted": lambda x, y: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive": lambda x, y: F.adaptive_avg_pool2d(x, (1, 1)),
    "same": lambda x, y: F.conv2d(x, torch.ones(3, 2, 2, 2), padding="same", dilation=2),
    "no bias": lambda x, y: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3), stride=2),
    "var": lambda x, y: x.var(-1),
    "eps": lambda x, y: F.layer_norm(x * 0, (7,), eps=1e-12),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("calls", "x", "y"),
    [
        (ODD_CALLS, ODD, ODD.flip(0)),
        (WHOLE_CALLS, WHOLE, BY),
        (PIECES, torch.randn(1, 2, 5, 7, generator=torch.Generator().manual_seed(0)), ODD),
    ],
    ids=["odd floats", "integers", "pieces"],
)
def test_calls_at_the_edges_of_their_types(calls, x, y):
    expected, found = outputs(Calls(*calls.values()), (x, y))
    for name, a, b in zip(calls, expected, found, strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-6 * (calls is PIECES), err_msg=name)


def test_no_rule_with_a_tolerance_is_used(monkeypatch):
    """onnxscript's rewrite rules compare constants by math.isclose, and none of them runs."""
    from onnxscript.rewriter import RewriteRuleSet

    monkeypatch.setattr(RewriteRuleSet, "apply_to_model", None)
    proto_of(Calls(lambda x, y: x + 1e-10), (torch.randn(3), torch.randn(3)))


def padded():
    """Constant channels in front of a padded convolution, which leave a border map."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
    ).eval()
    with torch.no_grad():
        net[0].weight[:16] = 0
        net[1].bias.uniform_(0.5, 1)
    return net


def test_files_are_no_larger_than_the_network(tmp_path):
    """Border maps stay kernels: a map per pixel would be ten times the network."""
    slim = to_graph(padded(), (torch.randn(1, 1, 40, 40),), dynamic_shapes="all")
    for name, net in (("slim", slim), ("static", to_graph(padded(), (torch.ones(1, 1, 9, 9),), dynamic_shapes={}))):
        to_onnx(net, tmp_path / f"{name}.onnx")
        stored = onnx.load(tmp_path / f"{name}.onnx").graph.initializer
        count = sum(math.prod(tensor.dims) for tensor in stored)
        assert count <= sum(t.numel() for t in net.state_dict().values()) + 16


def test_a_known_network_is_not_traced_again(monkeypatch):
    """Tracing for the exporter takes most of its time on long graphs with dynamic sizes."""
    slim = to_graph(padded(), (torch.randn(2, 1, 8, 8),))
    monkeypatch.setattr(writing, "export_graph", None)
    proto_of(slim)


def broken(real):
    """An exporter that drops an addition of a small number."""

    def model(*args):
        made = real(*args)
        for node in list(made.graph):
            if node.op_type == "Add":
                node.outputs[0].replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)
        return made

    return model


class Norm(nn.Module):
    def forward(self, x):
        return torch.log(x * x + 1e-10)


def test_a_wrong_file_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_export_model", broken(writing._export_model))
    path, x = tmp_path / "net.onnx", (torch.randn(3, 8),)
    path.write_bytes(b"before")
    with pytest.raises(Mismatch, match=r"output 0 .*\(on .*\)\. Nothing was written"):
        to_onnx(Norm(), path, x)
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(checking, "onnxruntime", lambda: None)
    with pytest.raises(Mismatch, match="Nothing was written"), np.errstate(all="ignore"):
        to_onnx(Norm(), path, x)
    to_onnx(Norm(), path, x, check=False)
    assert path.read_bytes() != b"before"


class Faint(nn.Module):
    """Scores near 1e-5, of which a runtime's sigmoid knows two digits; cancels, if asked."""

    def __init__(self, far=-12.0):
        super().__init__()
        self.linear, self.far = nn.Linear(8, 8), far

    def forward(self, x):
        return torch.sigmoid(self.linear(x * 1e-3) + self.far)


def test_what_rounding_alone_makes_is_no_mismatch(tmp_path):
    torch.manual_seed(0)
    x = (torch.randn(2, 8),)
    to_onnx(Faint(), tmp_path / "net.onnx", x)
    with pytest.raises(Mismatch):
        to_onnx(Faint(), tmp_path / "net.onnx", x, tolerance=1e-9)
    with pytest.raises(BadInput, match="tolerance"):
        to_onnx(Faint(), tmp_path / "net.onnx", x, tolerance=0.0)


def test_rounding_allows_no_multiple_of_itself():
    """Scores near 1e-5, whose last digits rounding moves by about 1 %."""
    slim, x = to_graph(Faint().eval(), (torch.randn(2, 8),)), torch.randn(2, 8)
    data = serialized(proto_of(slim))
    judge = judge_of(slim, data, ((x,), {}), None, TABLE)
    assert judge.compare(data).error < 0.02
    model = onnx.ModelProto.FromString(data)
    bias = next(t for t in model.graph.initializer if "linear.bias" in t.name)
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.05, bias.name))
    with pytest.raises(Mismatch, match="allowed are"):
        judge.compare(model.SerializeToString())


class Narrow(nn.Module):
    def forward(self, x):
        return torch.cos(x.bfloat16()).float()


def test_what_the_runtime_does_not_take_runs_in_the_reference(tmp_path):
    with pytest.warns(UserWarning, match="compared in the reference implementation of onnx"):
        to_onnx(Narrow(), tmp_path / "net.onnx", (torch.randn(2, 3),))
    assert (tmp_path / "net.onnx").exists()


def test_what_nothing_runs_is_not_written(tmp_path, monkeypatch):
    def refuses(model, optimized):
        raise BadInput("it has no such op")

    monkeypatch.setitem(checking._RUNNERS, checking.REFERENCE, refuses)
    with pytest.raises(BadInput, match=r"nothing here runs the file: .*check=False"):
        to_onnx(Narrow(), tmp_path / "net.onnx", (torch.randn(2, 3),))
    assert not list(tmp_path.iterdir())
    to_onnx(Narrow(), tmp_path / "net.onnx", (torch.randn(2, 3),), check=False)


@pytest.mark.parametrize("op", ["Conv", "Div", "Expand", "Sqrt"])
def test_floats_are_left_to_the_runtime(op):
    import onnx_ir as ir

    values = [ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT)) for n in "ab"]
    assert not is_exact(ir.node(op, values))


class TiedWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mix(self.embed(ids)).relu())


class TiedLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).relu())


@pytest.mark.parametrize("result", [None, "class", "graph"])
@pytest.mark.parametrize(("kind", "x"), [(TiedWords, torch.arange(10).view(2, 5)), (TiedLayers, torch.randn(3, 16))])
def test_tied_weights_are_stored_once(tmp_path, kind, x, result):
    net = kind().eval()
    with torch.no_grad():
        (net.mix if kind is TiedWords else net.a).bias.zero_()
    slim = net if result is None else demask.demask(net, (x,), result=result)
    to_onnx(slim, tmp_path / "net.onnx", (x,))
    stored = onnx.load(tmp_path / "net.onnx").graph.initializer
    count = sum(math.prod(tensor.dims) for tensor in stored)
    assert count == sum(p.numel() for p in net.parameters())


def test_equal_weights_that_are_not_tied_stay_apart(tmp_path):
    """Training may change one of them."""
    net = TiedLayers().eval()
    net.b.weight = nn.Parameter(net.a.weight.detach().clone())
    to_onnx(demask.demask(net, (torch.randn(3, 16),)), tmp_path / "net.onnx")
    names = {tensor.name for tensor in onnx.load(tmp_path / "net.onnx").graph.initializer}
    assert names >= {"a.weight", "b.weight"}


@pytest.mark.filterwarnings("ignore")  # torch's own, of its quantization
def test_packed_weights_are_refused_with_the_way_out(tmp_path):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    packed = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(NotExportable, match=r"(?s)torch\.ao\.quantization .* 0, 2\n.*onnxruntime"):
        to_onnx(packed, tmp_path / "net.onnx", (torch.randn(3, 16),))


def test_a_file_quantized_as_it_runs_is_written_again(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(3, 16)
    to_onnx(net, tmp_path / "net.onnx", (x,))
    quantize_dynamic(tmp_path / "net.onnx", tmp_path / "given.onnx")
    given = demask.from_onnx(tmp_path / "given.onnx")
    to_onnx(given, tmp_path / "again.onnx", (x,))
    again = demask.from_onnx(tmp_path / "again.onnx")
    torch.testing.assert_close(again(x), given(x))


def spelled_out() -> onnx.ModelProto:
    """A network with the names and attributes that exporters write."""
    window = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [1, 1], "dilations": [1, 1]}
    layers = [
        ("Conv", ["x", "w"], {"group": 1, "auto_pad": "NOTSET", **window}),
        ("BatchNormalization", ["conv_0", *"sbmv"], {"momentum": 0.9, "epsilon": 1e-5}),
        ("Relu", ["batchnormalization_1"], {}),
        ("MaxPool", ["relu_2"], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 0}),
        ("Conv", ["maxpool_3", "u"], {**window, "pads": [0] * 4}),
        ("ReduceMean", ["conv_4"], {"axes": [2, 3], "keepdims": 0}),
        ("Gemm", ["reducemean_5", "c"], {"alpha": 1.0, "transB": 0}),
    ]
    h, rng = onnx.helper, np.random.default_rng(0)
    nodes = [
        h.make_node(op, reads, [f"{op.lower()}_{k}"], f"{op}_{k}", **more) for k, (op, reads, more) in enumerate(layers)
    ]
    sizes = {"w": (8, 3, 3, 3), "u": (4, 8, 3, 3), "c": (4, 5), **dict.fromkeys("sbmv", (8,))}
    tensors = [onnx.numpy_helper.from_array(rng.random(n).astype(np.float32), name) for name, n in sizes.items()]
    x = h.make_tensor_value_info("x", 1, ["n", 3, 12, 12])
    y = h.make_tensor_value_info("gemm_6", 1, ["n", 5])
    graph = h.make_graph(nodes, "g", [x], [y], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def test_a_file_does_not_grow(tmp_path):
    """Nothing is masked: attributes as left out, and the exporter's notes, are not written."""
    given, x = spelled_out(), (torch.randn(2, 3, 12, 12),)
    onnx.save(given, tmp_path / "given.onnx")
    slim = to_graph(demask.from_onnx(tmp_path / "given.onnx"), x)
    to_onnx(slim, tmp_path / "slim.onnx")
    assert (tmp_path / "slim.onnx").stat().st_size <= (tmp_path / "given.onnx").stat().st_size
    made = onnx.load(tmp_path / "slim.onnx").graph
    attributes = [sorted(a.name for a in n.attribute) for n in made.node if n.op_type == "Conv"]
    assert attributes == [["kernel_shape", "pads"], ["kernel_shape"]]
    parts = [made, *made.node, *made.input, *made.output, *made.initializer]
    assert not any(part.metadata_props for part in parts)
