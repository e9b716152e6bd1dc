"""Quantized ONNX files stay quantized: the pairs of ops, the weights, what the runtime fuses."""

import copy
import functools
import importlib
import itertools
import json
import tempfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import demask
from demask.errors import BadInput, RefusedFile
from demask.files.onnx.quantized_weights import quantize_exactly
from demask.graph.provenance import Cut, Provenance, QuantizationGrid
from demask.ops import TABLE
from demask.ops.quantization import dequantize_values, quantize_values
from demask.optimize_onnx import deploy
from demask.shrink.pipeline import capture_program as captured
from demask.tune.onnxruntime_candidate import for_runtime
from night import at_night
from torch_release import since

deploying = importlib.import_module("demask.optimize_onnx")

ort = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")
Kind = quantization.QuantType
PLACES = {np.uint8: 128, np.int8: -3, np.uint16: 32768, np.int16: 5}
STORED = [
    pytest.param(kind, marks=since(2, 12, "torch.where of uint16")) if kind is np.uint16 else kind for kind in PLACES
]


class Net(nn.Module):
    """A depthwise stage, a join, a constant that enters a layer, a head."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.d = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.b = nn.Conv2d(16, 12, 3, bias=False)
        self.c = nn.Conv2d(12, 12, 1)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        y = torch.relu(self.b(torch.relu(self.d(torch.relu(self.a(x))))))
        return self.fc(torch.relu(self.c(y) + y).mean((2, 3)))


class Tokens(nn.Module):
    """Products of matrices, of stacks of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 40), nn.Linear(40, 24, bias=False), nn.Linear(24, 5)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x.flatten(2).transpose(1, 2))))))


def masked(kind) -> nn.Module:
    torch.manual_seed(0)
    net = kind().eval()
    with torch.no_grad():
        net.a.weight[:5] = 0
        net.a.bias[:5] = torch.tensor([0.0, -1, 0, 0, 0])
        if kind is Net:
            net.d.weight[:5] = 0
            net.d.bias[:5] = torch.tensor([0.0, 0, 0, 0.7, 0])
            net.c.weight[[1, 4]] = 0
            net.c.bias[[1, 4]] = 0
        net.b.weight[::3] = 0
    return net


class Draws(quantization.CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": image(seed)} for seed in range(3)])

    def get_next(self):
        return next(self.left, None)


def image(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, 12, 12)).astype(np.float32)


@functools.cache
def quantized_file(kind, per_channel, values, weights) -> bytes:
    """A masked network that ONNX Runtime's own tool has quantized."""
    with tempfile.TemporaryDirectory() as name:
        whole, given = Path(name, "float.onnx"), Path(name, "given.onnx")
        demask.to_onnx(masked(kind), whole, (torch.from_numpy(image(0)),))
        quantization.quantize_static(
            whole,
            given,
            Draws(),
            per_channel=per_channel,
            activation_type=values,
            weight_type=weights,
            quant_format=quantization.QuantFormat.QDQ,
            # 7 bits: without VNNI the runtime clips the sum of two products to 16 bits, and which
            # two are summed depends on how many channels there are.
            reduce_range=weights is Kind.QInt8,
        )
        return given.read_bytes()


def made(folder, kind=Net, per_channel=True, values=Kind.QUInt8, weights=Kind.QInt8):
    path = folder / "given.onnx"
    path.write_bytes(quantized_file(kind, per_channel, values, weights))
    return path


@functools.cache
def demasked_file() -> nn.Module:
    """The network of `made` in its usual form, demasked: shared, so never to be changed."""
    with tempfile.TemporaryDirectory() as name:
        net = demask.from_onnx(made(Path(name)))
    return demask.demask(net, (torch.from_numpy(image(9)),))


def test_a_report_counts_quantized_weights(tmp_path):
    path = made(tmp_path, Tokens)
    result = demask.optimize_onnx(path, tmp_path / "slim.onnx", (torch.from_numpy(image(9)),), minimal=True)
    before, after = result.slim.demasked.before, result.slim.demasked.after
    layers = sum(p.numel() for p in masked(Tokens).parameters())
    assert before.parameters == layers and 0 < after.parameters < layers
    assert not any(p.requires_grad for p in demask.from_onnx(path).parameters() if p.dtype.itemsize < 4)


def test_a_report_counts_weights_that_are_quantized_with_their_inputs(tmp_path):
    """MatMulInteger and DynamicQuantizeLinear: the file is edited, though weights do not train."""
    demask.to_onnx(masked(Tokens), tmp_path / "net.onnx", (torch.from_numpy(image(0)),))
    path, out = tmp_path / "given.onnx", tmp_path / "slim.onnx"
    # In 7 bits: sums of two products in 16 bits, as on processors without VNNI, are exact.
    quantization.quantize_dynamic(tmp_path / "net.onnx", path, reduce_range=True)
    x = (torch.from_numpy(image(9)),)
    result = demask.optimize_onnx(path, out, x, minimal=True)
    assert calls(path)["MatMulInteger"] == calls(out)["MatMulInteger"] == 3
    before, after = result.slim.demasked.before, result.slim.demasked.after
    assert 0 < after.parameters < 0.8 * before.parameters
    np.testing.assert_array_equal(run(out, image(3)), run(path, image(3)))


def slimmed(path, out, x=None):
    x = torch.from_numpy(image(9)) if x is None else x
    slim = demask.demask(demask.from_onnx(path), (x,))
    demask.to_onnx(slim, out)
    onnx.checker.check_model(onnx.load(out), full_check=True)
    return slim


def session(path, optimized=None, *, fused=True):
    options = ort.SessionOptions()
    if not fused:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path, x):
    """What a file computes. ONNX Runtime does not fuse: without VNNI its kernels for 8-bit numbers
    saturate sums of two products in 16 bits, differently for every order of the channels."""
    return session(path, fused=False).run(None, {"x": x})[0]


def kernels(path, folder) -> Counter:
    """The ops that ONNX Runtime makes of a file."""
    session(path, folder / "optimized.onnx")
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def calls(path) -> Counter:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def tensors(path) -> dict[str, np.ndarray]:
    graph = onnx.load(path).graph
    return {t.name: numpy_helper.to_array(t) for t in graph.initializer}


def weights_of(path) -> list[np.ndarray]:
    """What layers multiply by, as it is stored."""
    graph, stored = onnx.load(path).graph, tensors(path)
    makers = {out: node for node in graph.node for out in node.output}
    layers = [n for n in graph.node if n.op_type in ("Conv", "Gemm", "MatMul")]
    found = [makers.get(n.input[1]) for n in layers]
    found = [makers.get(n.input[0], n) if n and n.op_type == "Transpose" else n for n in found]
    return [stored[n.input[0] if n else layer.input[1]] for layer, n in zip(layers, found, strict=True)]


TYPES = [(Kind.QUInt8, Kind.QInt8), (Kind.QInt8, Kind.QInt8), (Kind.QUInt8, Kind.QUInt8)]
EVERY = list(itertools.product([Net, Tokens], TYPES, [True, False]))


# By day each kind of network, pair of types and kind of scales once.
@pytest.mark.parametrize(("kind", "types", "per_channel"), [EVERY[3], *at_night(*EVERY[:3], *EVERY[4:])], ids=str)
def test_a_quantized_file_stays_quantized(tmp_path, kind, types, per_channel):
    values, weights = types
    path, out = made(tmp_path, kind, per_channel, values, weights), tmp_path / "slim.onnx"
    slim = slimmed(path, out)
    before, after = slim.demasked.before, slim.demasked.after  # integers are no parameters
    assert after.parameters + after.buffers < 0.9 * (before.parameters + before.buffers)
    for seed in (9, 10, 11):
        # No tolerance: sums of integers, and what constants add to a bias is whole too.
        np.testing.assert_array_equal(run(out, image(seed)), run(path, image(seed)))
    before, after = weights_of(path), weights_of(out)
    assert [w.dtype for w in after] == [w.dtype for w in before] and len(after) == len(before)
    assert sum(w.nbytes for w in after) < 0.9 * sum(w.nbytes for w in before)
    assert calls(out)["QuantizeLinear"] == calls(path)["QuantizeLinear"]
    fused, first = kernels(out, tmp_path), kernels(path, tmp_path)
    layers = ("QLinearConv", "QGemm") if kind is Net else ("QLinearMatMul",)
    assert {k: fused[k] for k in layers} == {k: first[k] for k in layers}
    assert first[layers[0]] >= (2 if kind is Net else 3)
    if values is Kind.QUInt8 and kind is Net:  # the runtime has no depthwise kernel for int8
        assert first["QLinearConv"] == 4


@pytest.mark.parametrize("kind", [Kind.QInt16, *at_night(Kind.QUInt16)])
def test_values_of_16_bits_stay_too(tmp_path, kind):
    path, out = made(tmp_path, values=kind), tmp_path / "slim.onnx"
    slim = slimmed(path, out)
    assert calls(out)["QuantizeLinear"] == calls(path)["QuantizeLinear"]
    step = max(np.max(v) for k, v in tensors(path).items() if k.endswith("_scale"))
    assert np.abs(run(out, image(9)) - run(path, image(9))).max() <= step  # float kernels
    with pytest.raises(BadInput, match="opset 18; expected 21"):
        demask.to_onnx(slim, out, opset=18)


def layer(kind, point) -> onnx.ModelProto:
    """Q, a convolution with an int32 bias, Q, a choice of channels, DQ, a second one, whose weight
    is float and is quantized in the file, and a product. Channels 0, 4, 9 are zero, 3 constant."""
    rng = np.random.default_rng(0)
    w = rng.integers(-60, 61, (12, 3, 3, 3)).astype(np.int8)  # pairs of products fit 16 bits
    w[[0, 3, 4, 9]] = 0
    bias = rng.integers(-3000, 3000, 12).astype(np.int32)
    bias[[0, 3, 4, 9]] = 0, 700, 0, 0
    ws = (np.arange(1, 13) * 0.0101).astype(np.float32)
    tensors = {
        "w": w,
        "ws": ws,
        "wz": np.zeros(12, np.int8),
        "b": bias,
        "xs": np.float32(0.0313),
        "bs": ws * np.float32(0.0313),
        "point": kind(point),
        "ys": np.float32(0.517),
        "at": np.array([1, 0, 3, 5, 8, 9, 11, 2]),
        "v": rng.standard_normal((6, 8, 1, 1)).astype(np.float32),
        "vs": np.float32(0.0213),
        "vz": np.int8(0),
        "m": rng.integers(0, 255, (7, 4)).astype(np.uint8),
        "ms": np.float32([0.1, 0.2, 0.3, 0.4]),
        "mz": np.uint8([127, 128, 0, 9]),
    }
    make = helper.make_node
    nodes = [
        make("QuantizeLinear", ["x", "xs", "point"], ["q"]),
        make("DequantizeLinear", ["q", "xs", "point"], ["d"]),
        make("DequantizeLinear", ["w", "ws", "wz"], ["W"], axis=0),
        make("DequantizeLinear", ["b", "bs"], ["B"], axis=0),
        make("Conv", ["d", "W", "B"], ["c"], pads=[0] * 4),
        make("QuantizeLinear", ["c", "ys", "point"], ["q2"]),
        make("Gather", ["q2", "at"], ["g"], axis=1),
        make("DequantizeLinear", ["g", "ys", "point"], ["d2"]),
        make("QuantizeLinear", ["v", "vs", "vz"], ["v8"]),
        make("DequantizeLinear", ["v8", "vs", "vz"], ["V"]),
        make("Conv", ["d2", "V"], ["y"]),
        make("DequantizeLinear", ["m", "ms", "mz"], ["M"], axis=1),
        make("MatMul", ["y", "M"], ["out"]),
    ]
    sizes = ["N", 3, 9, 9]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["N", 6, 7, 4])]
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in tensors.items()]
    graph = helper.make_graph(nodes, "layer", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", STORED)
def test_each_way_to_store_a_constant(tmp_path, kind):
    path, out = tmp_path / "given.onnx", tmp_path / "slim.onnx"
    onnx.save(layer(kind, PLACES[kind]), path)
    x = np.random.default_rng(1).standard_normal((2, 3, 9, 9)).astype(np.float32)
    slim = slimmed(path, out, torch.from_numpy(x))
    kept = list(slim.demasked.cuts["w"].kept[0])
    assert sorted(kept) == [1, 2, 5, 8, 11]
    stored = tensors(out)
    assert {k: (stored[k].dtype, stored[k].shape) for k in "wbvm"} == {
        "w": (np.int8, (5, 3, 3, 3)),
        "b": (np.int32, (5,)),
        "v": (np.int8, (6, 5, 1, 1)),
        "m": (np.uint8, stored["m"].shape),
    }
    assert stored["v_bias"].dtype == np.int32 and stored["v_bias"].any()  # of constant channel 3
    given = tensors(path)
    np.testing.assert_array_equal(stored["w"], given["w"][kept])
    np.testing.assert_array_equal(stored["b"], given["b"][kept])
    np.testing.assert_array_equal(stored["w_scale"], given["ws"][kept])
    a, b = run(path, x), run(out, x)
    # A value halfway between two steps goes to either, as sums are ordered.
    step = (
        0.517
        * np.abs(given["v"]).max()
        * np.abs(dequantize_values(*(torch.tensor(given[k]) for k in ("m", "ms", "mz")), 1).numpy()).sum(0).max()
    )
    assert np.abs(a - b).max() <= step and np.abs(a - b).mean() < 1e-3 * np.abs(a).mean()


def grid(scales, points=None, dtype="int8", axis=0):
    return QuantizationGrid(dtype, axis, tuple(scales), tuple(points or [0] * len(scales)))


SCALES = (torch.arange(1, 9) * 0.0137 + torch.linspace(0, 1e-3, 8)).tolist()


def weight():
    """Integers of 8 rows, and the float weight that they stand for."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-127, 128, (8, 5, 3), generator=generator, dtype=torch.int8)
    return whole, dequantize_values(whole, torch.tensor(SCALES), None, 0)


def test_a_cut_says_which_scale_a_row_has():
    whole, w = weight()
    found = quantize_exactly(w[[6, 1]], grid(SCALES), Cut("w", (8, 5, 3), ((6, 1), None, None)))
    assert torch.equal(found.integers, whole[[6, 1]])
    assert found.scale.tolist() == torch.tensor(SCALES)[[6, 1]].tolist()


@pytest.mark.parametrize("order", [[6, 1], [7, 7, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_without_one_scales_are_tried(order):
    whole, w = weight()
    wrong = Cut("w", (8, 5, 3), (tuple(range(len(order)))[::-1], None, None))
    for cut in (None, wrong):
        found = quantize_exactly(torch.cat([w[order], torch.zeros(3, 5, 3)]), grid(SCALES), cut)
        assert torch.equal(found.integers[: len(order)], whole[order])
        assert not found.integers[len(order) :].any()


def test_axes_may_have_moved():
    whole, w = weight()
    found = quantize_exactly(w.permute(1, 2, 0), grid(SCALES))
    assert found.axis == 2 and torch.equal(found.integers, whole.permute(1, 2, 0))


def test_zero_points_go_along():
    whole, scales = torch.tensor([[0, 255, 7], [3, 255, 11]], dtype=torch.uint8), [0.1, 0.31]
    w = dequantize_values(whole, torch.tensor(scales), torch.tensor([128, 3]), 0)
    found = quantize_exactly(w, grid(scales, [128, 3], "uint8"))
    assert torch.equal(found.integers, whole) and found.zero_point.tolist() == [128, 3]


@pytest.mark.parametrize("change", ["scale", "value", "range", "nan", "dtype", "points", "double"])
def test_what_is_not_on_its_grid_stays_float(change):
    _, w = weight()
    scales, kind, points = list(SCALES), "int8", None
    match change:
        case "scale":
            scales[3] *= 1 + 2**-20
        case "value":
            w[2, 1, 1] = torch.nextafter(w[2, 1, 1], torch.tensor(9.0))
        case "range":
            w[2, 1, 1] = 300 * torch.tensor(SCALES[2])
        case "nan":
            w[0, 0, 0] = float("nan")
        case "dtype":
            kind = "float32"
        case "points":
            points = [0] * 7 + [300]
        case "double":
            w = w.double()
    assert quantize_exactly(w, grid(scales, points, kind)) is None


def test_a_bias_is_not_placed_by_chance():
    bias = torch.tensor([0.5, 0.25]) * 3
    assert quantize_exactly(bias, grid([0.25, 0.5], dtype="int32")) is None
    cut = Cut("b", (2,), ((1, 0),))
    assert quantize_exactly(bias, grid([0.25, 0.5], dtype="int32"), cut).integers.tolist() == [3, 3]


def test_a_wrong_scale_in_the_history_leaves_a_weight_float(tmp_path):
    path, out = made(tmp_path), tmp_path / "slim.onnx"
    slim = copy.deepcopy(demasked_file())
    interface = slim.demasked.interface
    wrong = interface.grids["b.weight_quantized"]
    scales = list(wrong.scales)
    scales[2] *= 1.01
    grids = {**interface.grids, "b.weight_quantized": replace(wrong, scales=tuple(scales))}
    slim.demasked = replace(slim.demasked, interface=replace(interface, grids=grids))
    before = {name: t.clone() for name, t in slim.state_dict().items()}
    demask.to_onnx(slim, out)
    assert [w.dtype.kind for w in weights_of(out)] == ["i", "i", "f", "i", "i"]
    step = tensors(path)["output_scale"]
    assert np.abs(run(out, image(9)) - run(path, image(9))).max() <= 2 * step
    after = slim.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())


@pytest.mark.nightly
def test_the_file_to_run_has_round_widths(tmp_path, monkeypatch):
    monkeypatch.setattr(deploying, "MULTIPLES", (4,))
    monkeypatch.setattr(deploying, "ROUNDS", 2)
    monkeypatch.setattr(deploying, "PAIRS", 4)
    path, out = made(tmp_path), tmp_path / "out.onnx"
    net, x = demask.from_onnx(path), torch.from_numpy(image(9))
    program = captured(demasked_file(), (x,), None, None)
    wide = for_runtime(program, TABLE, 5)
    shapes = {k: tuple(c.tensor.shape) for k, c in wide.constants.items() if "weight" in k}
    assert shapes["b.weight_quantized"][1] == shapes["a.weight_quantized"][0] == 15
    for minimal in (True, False):
        result = deploy(lambda: net, (x,), out, file=path, minimal=minimal, threads=1)
        assert result.error == 0.0
        assert {w.dtype for w in weights_of(out)} == {np.dtype(np.int8)}
        assert kernels(out, tmp_path)["QLinearConv"] == 4
        np.testing.assert_array_equal(run(out, image(5)), run(path, image(5)))


def test_archives_and_pt2_files(tmp_path):
    net, x = demask.from_onnx(made(tmp_path)), torch.from_numpy(image(9))
    slim = demasked_file()
    assert Provenance.from_dict(json.loads(json.dumps(slim.demasked.to_dict()))) == slim.demasked
    demask.save(slim, tmp_path / "slim.demask")
    again = demask.load(tmp_path / "slim.demask")
    assert again.demasked == slim.demasked
    demask.to_onnx(again, tmp_path / "again.onnx")
    demask.to_onnx(slim, tmp_path / "slim.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "slim.onnx").read_bytes()
    demask.to_pt2(slim, tmp_path / "slim.pt2")
    plain = torch.export.load(tmp_path / "slim.pt2")
    assert all("aten" in str(n.target) for n in plain.graph.nodes if n.op == "call_function")
    with torch.no_grad():
        for made_again in (again, plain.module()):
            assert torch.equal(made_again(x), slim(x)) and torch.equal(slim(x), net(x))


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> dict[str, bytes]:
    """What an archive of the demasked network holds."""
    folder = tmp_path_factory.mktemp("archive")
    demask.save(demasked_file(), folder / "slim.demask")
    with zipfile.ZipFile(folder / "slim.demask") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    ("place", "value"),
    [(3, 10**9), (3, -7), (4, {"dtype": "float32"}), (4, "float32"), (4, 99), (0, None), (1, 0.5), (3, None)],
)
def test_odd_arguments_in_an_archive_are_errors(entries, tmp_path, place, value):
    document = json.loads(entries["graph.json"])
    row = next(r for r in document["nodes"] if r["target"] == "demask.quantize.default")
    scale = next(t for t in document["tensors"] if t["name"] == "a.weight_quantized")
    if place == 3:  # a scale for each place on an axis
        document["nodes"].insert(
            1, {"op": "get_attr", "name": "odd", "target": scale["name"], "args": [], "kwargs": {}}
        )
        row["args"][1] = {"node": "odd"}
    row["args"][place] = value
    odd = entries | {"graph.json": json.dumps(document).encode()}
    with zipfile.ZipFile(tmp_path / "odd.demask", "w") as archive:
        for name, data in odd.items():
            archive.writestr(name, data)
    with pytest.raises((BadInput, RefusedFile, RuntimeError, TypeError, AttributeError)):
        demask.load(tmp_path / "odd.demask")(torch.from_numpy(image(9)))


def test_odd_grids_in_an_archive_are_refused():
    good = Provenance.from_dict
    data = {
        "cuts": {},
        "reasons": [],
        "effects": {},
        "notes": [],
        "inputs": [],
        "removed": {},
        "before": dict.fromkeys(("parameters", "macs", "bytes"), 0),
        "after": dict.fromkeys(("parameters", "macs", "bytes"), 0),
    }
    base = {"dtype": "int8", "axis": 0, "scales": [0.1], "zero_points": [0]}
    port = {"inputs": [], "outputs": [], "name": "", "doc": "", "metadata": {}}
    assert good(data | {"interface": port | {"grids": {"w": base}}}).interface.grids["w"].axis == 0
    for odd in ({"scales": [float("nan")]}, {"scales": [-1.0]}, {"zero_points": [2**63]}):
        with pytest.raises(ValueError, match=r"expected (finite scales|zero points)"):
            good(data | {"interface": port | {"grids": {"w": base | odd}}})


def test_the_ops_say_what_they_take():
    x, scale = torch.randn(2, 3), torch.ones(3)
    with pytest.raises(BadInput, match="per position of axis 0"):
        torch.ops.demask.quantize(x, scale, None, 0, "int8")
    with pytest.raises(BadInput, match="to quantize to"):
        quantize_values(x, scale, None, 1, "int64")
    with pytest.raises(BadInput, match="expected integers"):
        torch.ops.demask.dequantize(x, scale, None, 1)
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, 300.0, -300.0])
    assert quantize_values(halves, torch.tensor(1.0), None, 0, "int8").tolist() == [0, 2, 2, 0, 127, -128]
    whole, slope = (torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), torch.ones(2, requires_grad=True))
    torch.ops.demask.dequantize(whole, slope, None, 1).sum().backward()
    assert slope.grad.tolist() == [4.0, 6.0]
