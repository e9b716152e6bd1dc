"""Networks written as ONNX files: what a runtime computes, and what people named."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import demask
from demask.errors import BadInput, NotExportable
from demask.files.onnx.module import from_onnx
from demask.files.onnx.write import writer as writing
from demask.files.onnx.write.writer import proto_of, save, serialized, to_onnx
from onnx_files import node, value

ort = pytest.importorskip("onnxruntime")


class Small(nn.Module):
    """Two convolutions and a norm; three outputs, one of them an input."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))

    def forward(self, image, scale):
        y = torch.relu(self.norm(self.a(image)))
        return self.b(y) * scale, image, y.mean((2, 3))


def small() -> Small:
    torch.manual_seed(0)
    net = Small().eval()
    with torch.no_grad():
        net.a.weight[:4] = 0
    return net


def run(path, *inputs):
    """The outputs of a file in ONNX Runtime, its inputs in their order."""
    onnx.checker.check_model(onnx.load(path), full_check=True)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    feed = {n: t.numpy() for n, t in zip(names, inputs, strict=True)}
    return [torch.from_numpy(np.asarray(out)) for out in session.run(None, feed)]


def agree(made, expected, ulps=84):
    """ulps: of the largest value; 1e-5 in float32, for sums in another order."""
    for a, b in zip(made, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.is_floating_point() and a.numel():
            unit = torch.finfo(a.dtype).eps * float(b.abs().max())
            assert float((a - b).abs().max()) <= ulps * unit
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("slim", [False, True])
def test_a_module_runs_in_onnx_runtime_at_other_batches(tmp_path, slim):
    net, x = small(), (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1))
    if slim:
        to_onnx(demask.demask(net, x), tmp_path / "net.onnx")
    else:
        to_onnx(net, tmp_path / "net.onnx", x)
    for batch in (1, 5):
        inputs = torch.randn(batch, 3, 9, 9), torch.randn(batch, 1, 1, 1)
        with torch.no_grad():
            agree(run(tmp_path / "net.onnx", *inputs), net(*inputs))


def test_arguments_name_inputs_and_the_batch_is_called_batch(tmp_path):
    to_onnx(small(), tmp_path / "net.onnx", (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1)))
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert [v.name for v in graph.input] == ["image", "scale"]
    assert [v.name for v in graph.output] == ["output_0", "output_1", "output_2"]
    assert {v.type.tensor_type.shape.dim[0].dim_param for v in graph.output} == {"batch"}
    assert {"a.weight", "b.weight"} <= {t.name for t in graph.initializer}


def test_no_path_of_this_machine_is_in_the_file(tmp_path):
    to_onnx(small(), tmp_path / "net.onnx", (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1)))
    data = (tmp_path / "net.onnx").read_bytes()
    assert b".py" not in data and b"/site-packages" not in data and b"File " not in data


def interface_file(path):
    """A file with odd names, types, dynamic axes, metadata; half of its channels zero."""
    generator = np.random.default_rng(0)
    w = generator.standard_normal((8, 3, 3, 3)).astype(np.float32)
    w[::2] = 0
    head = generator.standard_normal((8, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["my image/0", "w"], ["relu"], pads=[1] * 4, name="first"),
        helper.make_node("Relu", ["relu"], ["h"]),
        helper.make_node("GlobalAveragePool", ["h"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "head"], ["scores:0"]),
        helper.make_node("ArgMax", ["scores:0"], ["best"], axis=1, keepdims=0),
        helper.make_node("Add", ["count", "one"], ["count + 1"]),
    ]
    inputs = [
        helper.make_tensor_value_info("my image/0", TensorProto.FLOAT, ["N", 3, "height", "width"]),
        helper.make_tensor_value_info("count", TensorProto.INT64, [2]),
    ]
    outputs = [
        helper.make_tensor_value_info("scores:0", TensorProto.FLOAT, ["N", 5]),
        helper.make_tensor_value_info("best", TensorProto.INT64, ["N"]),
        helper.make_tensor_value_info("count + 1", TensorProto.INT64, [2]),
    ]
    constants = [
        onnx.numpy_helper.from_array(w, "w"),
        onnx.numpy_helper.from_array(head, "head"),
        onnx.numpy_helper.from_array(np.array(1), "one"),
    ]
    graph = helper.make_graph(nodes, "odd names", inputs, outputs, constants, doc_string="a doc")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {"labels": "cat,dog", "stride": "32"})
    onnx.save(model, path)


@pytest.mark.parametrize("slim", [False, True])
def test_names_types_dynamic_axes_and_metadata_survive(tmp_path, slim):
    interface_file(tmp_path / "given.onnx")
    net = from_onnx(tmp_path / "given.onnx")
    x = (torch.randn(2, 3, 10, 12), torch.tensor([1, 2]))
    made = demask.demask(net, x) if slim else net
    to_onnx(made, tmp_path / "made.onnx", () if slim else x)
    given, written = (onnx.load(tmp_path / f"{name}.onnx") for name in ("given", "made"))
    for kind in ("input", "output"):
        for a, b in zip(getattr(given.graph, kind), getattr(written.graph, kind), strict=True):
            assert (a.name, a.type) == (b.name, b.type)
    assert {p.key: p.value for p in written.metadata_props} == {"labels": "cat,dog", "stride": "32"}
    assert (written.graph.name, written.graph.doc_string) == ("odd names", "a doc")
    for sizes in ((1, 3, 7, 9), (3, 3, 32, 5)):
        inputs = torch.randn(sizes), torch.tensor([3, 4])
        agree(run(tmp_path / "made.onnx", *inputs), run(tmp_path / "given.onnx", *inputs))
    shapes = {t.name: tuple(t.dims) for t in written.graph.initializer}
    assert shapes["w"] == ((4, 3, 3, 3) if slim else (8, 3, 3, 3))


def test_a_demasked_archive_keeps_the_interface(tmp_path):
    interface_file(tmp_path / "given.onnx")
    x = (torch.randn(2, 3, 10, 12), torch.tensor([1, 2]))
    slim = demask.demask(from_onnx(tmp_path / "given.onnx"), x)
    demask.save(slim, tmp_path / "slim.demask")
    loaded = demask.load(tmp_path / "slim.demask")
    assert loaded.demasked.interface == slim.demasked.interface
    to_onnx(loaded, tmp_path / "made.onnx")
    names = [v.name for v in onnx.load(tmp_path / "made.onnx").graph.input]
    assert names == ["my image/0", "count"]


class Odd(nn.Module):
    """Outputs that are an input, a constant, and one value twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Buffer(torch.arange(3.0))

    def forward(self, x):
        y = x + 1
        return x, self.table, y, y


def test_outputs_may_be_inputs_constants_and_repeated(tmp_path):
    to_onnx(Odd(), tmp_path / "odd.onnx", (torch.randn(2, 3),))
    x = torch.randn(4, 3)
    agree(run(tmp_path / "odd.onnx", x), Odd()(x))


def test_large_weights_go_to_a_file_beside(tmp_path):
    net, x = small(), (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1))
    save(proto_of(net, x), tmp_path / "net.onnx", largest=100)
    (beside,) = [p for p in tmp_path.iterdir() if p.name != "net.onnx"]
    assert beside.name.startswith("net.") and beside.suffix == ".weights"
    with torch.no_grad():
        agree(run(tmp_path / "net.onnx", *x), net(*x))
        agree(from_onnx(tmp_path / "net.onnx")(*x), net(*x))
    first = (tmp_path / "net.onnx").read_bytes()
    with torch.no_grad():
        net.b.weight.mul_(2)
    save(proto_of(net, x), tmp_path / "other.onnx", largest=100)
    assert (tmp_path / "net.onnx").read_bytes() == first and beside.exists()


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"before")
    x = (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1))
    model = proto_of(small(), x)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    for largest in (100, 2**31):
        with pytest.raises(BadInput, match="cannot write"):
            save(model, path, largest=largest)
        assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_what_the_exporter_refuses_is_named(tmp_path):
    class Unheard(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(NotExportable, match="bessel_j0"):
        to_onnx(Unheard(), tmp_path / "net.onnx", (torch.randn(2, 3),))
    assert not (tmp_path / "net.onnx").exists()


def test_an_opset_can_be_asked_for():
    model = proto_of(small(), (torch.randn(2, 3, 9, 9), torch.randn(2, 1, 1, 1)), opset=18)
    proto = onnx.ModelProto.FromString(serialized(model))
    assert {o.domain: o.version for o in proto.opset_import}[""] == 18


class Sorted(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return torch.sort(x, stable=True, **self.how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("how", [{"dim": 1}, {"dim": 0, "descending": True}], ids=str)
def test_sorting_keeps_the_order_of_equal_numbers(how, dtype, tmp_path):
    x = torch.randint(0, 4, (5, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    to_onnx(Sorted(**how), tmp_path / "net.onnx", (x,), dynamic_shapes="all")
    for given in (x, x[:3, :4].contiguous()):
        agree(run(tmp_path / "net.onnx", given), Sorted(**how)(given))


class Attention(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.more = more

    def forward(self, q, v, mask=None):
        return nn.functional.scaled_dot_product_attention(q, q, v, attn_mask=mask, **self.more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [None, (4, 4), (2, 4, 4), (3, 2, 4, 4), (2, 3, 2, 4, 4)], ids=str)
def test_attention_over_windows(sizes, tmp_path):
    """Five axes: images, windows, heads, tokens, features."""
    q, v = torch.randn(2, 3, 2, 4, 8), torch.randn(2, 3, 2, 4, 6)
    inputs = (q, v) if sizes is None else (q, v, torch.randn(sizes))
    net = Attention(is_causal=True) if sizes is None else Attention(scale=0.3)
    for dynamic in (None, "all"):
        to_onnx(net, tmp_path / "net.onnx", inputs, dynamic_shapes=dynamic)
        agree(run(tmp_path / "net.onnx", *inputs), [net(*inputs)])


class Written(nn.Module):
    """Writes a size into a tensor, which ONNX has no op for."""

    def forward(self, x):
        places = torch.zeros(x.shape[0], 1, dtype=torch.int64)
        return x.scatter(1, places, float(x.shape[1]))


def test_what_cannot_be_written_for_all_sizes_is_written_for_one(tmp_path, monkeypatch):
    real = writing._translate

    def translated(slim, opset):
        if any(isinstance(n, str) for spec in slim.demasked.inputs for n in spec.sizes):
            raise NotExportable("an op", "a line", "nothing")
        return real(slim, opset)

    monkeypatch.setattr(writing, "_translate", translated)
    x = torch.randn(3, 5)
    slim = demask.demask(Written(), (x,), dynamic_shapes="all")
    with pytest.warns(UserWarning, match=r"these sizes alone: x \[3, 5\].*an op"):
        to_onnx(slim, tmp_path / "net.onnx")
    agree(run(tmp_path / "net.onnx", x), [Written()(x)])
    assert [d.dim_value for d in onnx.load(tmp_path / "net.onnx").graph.input[0].type.tensor_type.shape.dim] == [3, 5]


@pytest.mark.parametrize("net", [nn.ELU(), nn.CELU(2.0), nn.SELU()], ids=str)
def test_a_runtime_computes_exp_minus_one_as_it_does(net, tmp_path):
    to_onnx(net, tmp_path / "net.onnx", (torch.randn(2, 3),))


@pytest.mark.parametrize("opset", [0, 999, 18.5, True])
def test_an_op_set_that_onnx_does_not_have_is_refused(tmp_path, opset):
    with pytest.raises(BadInput, match="op set"):
        to_onnx(nn.ReLU(), tmp_path / "net.onnx", (torch.ones(2),), opset=opset)
    assert not list(tmp_path.iterdir())


def test_another_op_set_than_asked_for_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="has op set 18"):
        to_onnx(nn.ReLU(), tmp_path / "net.onnx", (torch.ones(2),), opset=3)


def test_names_of_inputs_and_outputs_that_inner_values_have(tmp_path) -> None:
    """The file's input and output are named like values that the exporter names."""
    calls = [node("Relu", ["add"], ["a"]), node("Add", ["a", "a"], ["b"]), node("Mul", ["b", "b"], ["relu"])]
    ports = [value("add")], [value("relu", sizes=None)]
    graph = helper.make_graph(calls, "g", *ports)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "a.onnx")
    net, x = from_onnx(tmp_path / "a.onnx"), torch.randn(2, 6)
    to_onnx(demask.demask(net, (x,)), tmp_path / "b.onnx")
    agree(run(tmp_path / "b.onnx", x), (net(x),))
