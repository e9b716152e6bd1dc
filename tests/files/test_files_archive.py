"""Demasked networks on disk: what is saved comes back equal, and hostile files do not load."""

import collections
import contextlib
import copy
import json
import math
import operator
import os
import random
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeInfo
from torch.utils import _pytree as pytree

import demask
import own_process
from demask.errors import BadInput, DemaskError, NotExportable, RefusedFile
from demask.failures import strict
from demask.files import archive, pt2
from demask.files.allowed_names import BUILTINS
from demask.files.node_codec import decode, decode_target, encode, encode_target
from demask.files.pt2 import read_model, to_pt2
from demask.graph.provenance import Cut, InputSpec, Provenance, Reason, Sizes
from demask.graph.result.codegen import Codegen
from pt2_files import change_one_value

aten = torch.ops.aten
BATCH_NORMS = {
    "bn": nn.BatchNorm2d(6),
    "plain": nn.BatchNorm2d(6, eps=1e-3, momentum=None, affine=False),
    "stateless": nn.BatchNorm2d(6, track_running_stats=False),
}


def provenance(*inputs):
    return Provenance(
        cuts={"conv.weight": Cut("conv.weight", (8, 3, 3, 3), ((0, 2, 5), None, None, None))},
        reasons=(Reason("relu", "act", 1, 3, "no rule for aten.foo"),),
        effects={"gather": 1},
        notes=("batch is dynamic",),
        inputs=inputs,
        before=Sizes(10, 20, 40),
        after=Sizes(5, 10, 20),
        removed={"conv": 5},
    )


def network():
    """A hand-made result: convolution, batch norms, dropout, ties, kwargs, sizes, constants."""
    root = nn.Module()
    root.body = nn.Module()
    weight = torch.randn(6, 3, 3, 3).to(memory_format=torch.channels_last)
    root.body.weight = nn.Parameter(weight)
    root.body.bias = nn.Parameter(torch.randn(6), requires_grad=False)
    root.register_buffer("index", torch.tensor([2, 0, 1]))
    root.body.register_buffer("scale", torch.randn(6, 1, 1).bfloat16(), persistent=False)
    for name, norm in copy.deepcopy(BATCH_NORMS).items():
        root.body.add_module(name, norm)
    root.body.drop, root.a, root.b = nn.Dropout(0.25), nn.Module(), nn.Module()
    root.a.weight = root.b.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    graph = fx.Graph()
    x, offset = graph.placeholder("x"), graph.placeholder("options_offset")
    get, call = graph.get_attr, graph.call_function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fx: the graph has no module yet
        weight, bias, index = get("body.weight"), get("body.bias"), get("index")
        scale, left, right = get("body.scale"), get("a.weight"), get("b.weight")
    y = call(aten.conv2d.default, (x, weight, bias, [1, 1], [1, 1]))
    for name in BATCH_NORMS:
        y = graph.call_module(f"body.{name}", (y,))
    y = call(aten.mul.Tensor, (graph.call_module("body.drop", (y,)), scale))
    y = call(aten.index_select.default, (y, 2, index))
    rows = call(operator.add, (call(operator.mul, (call(aten.sym_size.int, (x, 0)), 2)), -1))
    ones = call(aten.full.default, ([rows, 6], math.inf), {"dtype": torch.float64, "device": torch.device("cpu")})
    z = call(aten.matmul.default, (call(aten.mul.Tensor, (left, right)), offset))
    z = call(aten.pad.default, (z, [0, 1], "constant", math.nan))
    first = call(operator.getitem, (call(aten.split.Tensor, (y, 4, 1)), 0))
    graph.output((first, ones, z))
    shape = ((0,), {"options": {"offset": 0}})
    out = collections.OrderedDict(y=0, rest=(0, 0))
    specs = pytree.tree_structure(shape), pytree.tree_structure(out)
    history = provenance(
        InputSpec("x", ("batch", 3, 5, 5), "float32", (1, 3, 5, 5)), InputSpec("offset", (6,), "float64", (6,))
    )
    graph.set_codegen(Codegen(_PyTreeInfo(["x", "options"], *specs), history))
    slim = fx.GraphModule(root, graph)
    slim.body._non_persistent_buffers_set.add("scale")  # fx makes buffers persistent
    slim.demasked = history
    return slim


def inputs(batch=2):
    return (torch.randn(batch, 3, 5, 5),), {"options": {"offset": torch.randn(6).double()}}


def same(left, right):
    pairs = list(zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True))
    return bool(pairs) and all(a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


DTYPES = (
    "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 complex32 complex64 complex128 bool uint8 uint16 uint32 "
    "uint64 int8 int16 int32 int64"
)


class Stored(nn.Module):
    """A network with a buffer of any dtype, which it returns, and an input of that dtype."""

    def __init__(self, values):
        super().__init__()
        self.register_buffer("values", values)
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        return self.layer(x), self.values, y


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", DTYPES.split())
def test_every_dtype_comes_back(tmp_path, name):
    dtype = getattr(torch, name)
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (3, 2 * dtype.itemsize), dtype=torch.uint8, generator=draw)
    values, x = codes.clone().view(dtype), torch.randn(3, 4)
    net = Stored(codes.view(dtype)).eval()
    rare = name in ("complex32", "float4_e2m1fn_x2")  # torch does not compare or copy these
    with strict(not rare):  # where the slim network's tensors come from is left out
        slim = demask.demask(net, (x, values), result="graph")
    demask.save(slim, tmp_path / "slim.demask")
    y, stored, given = demask.load(tmp_path / "slim.demask")(x, values)
    assert torch.equal(y, net(x, values)[0])
    for other in (stored, given):
        assert other.dtype == dtype and torch.equal(other.view(torch.uint8), codes)
    if not rare:
        assert demask.verify(net, slim, (x, values)).ok


@pytest.mark.parametrize("dtype", ["complex128", "float8_e8m0fnu", "float32", "load", 1])
def test_another_dtype_than_is_stored_is_refused(file, tmp_path, dtype):
    with pytest.raises(RefusedFile, match="a tensor of"):
        archive.load(repack(file, tmp_path / "m.demask", lambda d: d["tensors"][0].update(dtype=dtype)))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.demask"
    archive.save(network().eval(), path)
    return path


# --------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("training", [False, True])
def test_a_loaded_network_equals_the_saved_one(tmp_path, training):
    slim = network().train(training)
    slim.body.bn.eval()  # a frozen batch norm stays frozen
    before = {name: value.clone() for name, value in slim.state_dict().items()}
    archive.save(slim, tmp_path / "m.demask")
    loaded = archive.load(tmp_path / "m.demask")
    assert loaded.demasked == slim.demasked and loaded.code == slim.code
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in slim.graph.nodes]
    assert dict(loaded.state_dict()).keys() == before.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])
        assert value.stride() == before[name].stride()
    for name, value in slim.named_parameters():
        assert loaded.get_parameter(name).requires_grad == value.requires_grad
    assert loaded.a.weight is loaded.b.weight
    modes = {name: module.training for name, module in slim.named_modules()}
    assert {name: module.training for name, module in loaded.named_modules()} == modes
    args, kwargs = inputs()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        want = slim(*args, **kwargs)
        torch.manual_seed(3)
        assert same(want, loaded(*args, **kwargs))
    assert same(slim.state_dict(), loaded.state_dict())  # batch norm moved alike


def test_a_loaded_network_is_an_ordinary_module(file):
    loaded, (args, kwargs) = archive.load(file), inputs(3)
    want = loaded(*args, **kwargs)
    assert type(want) is collections.OrderedDict
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of copies of its own specs
        twin = copy.deepcopy(loaded)
    assert same(want, twin(*args, **kwargs)) and twin.demasked == loaded.demasked
    torch._dynamo.reset()
    compiled = torch.compile(loaded, fullgraph=True, backend="eager")
    assert same(want, compiled(*args, **kwargs))
    want["y"].sum().backward()
    assert loaded.body.weight.grad is not None and loaded.body.bias.grad is None


def test_the_same_network_gives_the_same_bytes(file, tmp_path):
    archive.save(archive.load(file), tmp_path / "again.demask")
    assert (tmp_path / "again.demask").read_bytes() == file.read_bytes()


def test_an_exported_module_comes_back(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 3, batch_first=True)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch.export warns of its own LSTM
        exported = torch.export.export(model, (torch.zeros(2, 5, dtype=torch.int64),))
    slim = fx.GraphModule(unlifted := exported.module(check_guards=False), unlifted.graph)
    slim.demasked = provenance(InputSpec("x", (2, 5), "int64", (2, 5)))
    archive.save(slim, tmp_path / "m.demask")
    x = torch.randint(9, (2, 5))
    assert same(archive.load(tmp_path / "m.demask")(x), model(x))


def test_arguments_come_back():
    node = fx.Graph().placeholder("x")
    values = [None, True, 3, -2.5, "text", [1, [2, (3, None)]], (), slice(0, None, 2), node, 1 + 2j,
              math.inf, -math.inf, torch.bfloat16, torch.channels_last, torch.strided,
              torch.device("cuda:1"), complex(math.inf, 0)]  # fmt: skip
    for value in values:
        text = json.dumps(encode(value), allow_nan=False)
        back = decode(json.loads(text), {"x": node})
        assert back == value and type(back) is type(value), value
    assert math.isnan(decode(encode(math.nan), {}))
    with pytest.raises(BadInput, match="set"):
        encode({1, 2})


def test_targets_come_back():
    for target in (aten.add.Tensor, aten.relu.default, aten._softmax.default, *BUILTINS.values()):
        assert decode_target(encode_target(target)) is target
    for bad in (aten.relu_.default, aten.add.out, aten.from_file.default, aten.set_.source_Tensor):
        with pytest.raises(BadInput):
            encode_target(bad)
    with pytest.raises(BadInput, match="getenv"):
        encode_target(os.getenv)


# ------------------------------------------------------------------------------------ hostile files


def repack(file, path, edit=None, tensors=None, extra=None):
    """The archive with its graph changed by `edit`, its tensors or further entries replaced."""
    with zipfile.ZipFile(file) as source:
        document = json.loads(source.read(archive.GRAPH))
        data = source.read(archive.TENSORS)
    changed = edit(document) if edit else None
    with zipfile.ZipFile(path, "w") as target:
        target.writestr(archive.GRAPH, json.dumps(document if changed is None else changed))
        target.writestr(archive.TENSORS, data if tensors is None else tensors)
        for name in extra or ():
            target.writestr(name, b"")
    return path


def node_of(document, op):
    return next(node for node in document["nodes"] if node["op"] == op)


def change(kind, **fields):
    return lambda document: node_of(document, kind).update(fields)


LEAF = {"type": None, "context": None, "children_spec": []}
ENUM = json.dumps([{"__enum__": 1, "fqn": "planted:X", "name": "A"}])
PLANTED = {"type": "builtins.dict", "context": ENUM, "children_spec": [LEAF]}
CODE = 'open("planted", "w")'
HOSTILE = {
    "op": change("call_function", target="torch.load"),
    "walk": change("call_function", target="aten.add.__class__"),
    "dunder": change("call_function", target="operator.__class__"),
    "attrgetter": change("call_function", target="operator.attrgetter"),
    "in place": change("call_function", target="aten.relu_.default"),
    "out": change("call_function", target="aten.add.out"),
    "file op": change("call_function", target="aten.from_file.default"),
    "namespace": change("call_function", target="prims.add.default"),
    "call_method": change("call_function", op="call_method", target="backward"),
    "node name": change("call_function", name=f"y = {CODE} #"),
    "keyword name": change("call_function", name="class"),
    "placeholder": change("placeholder", target=f"x={CODE}"),
    "placeholder default": change("placeholder", args=[1]),
    "argument name": lambda d: d.update(orig_args=["x", f"options={CODE}"]),
    "argument twice": lambda d: d.update(orig_args=["x", "x"]),
    "kwarg": change("call_function", kwargs={f"a={CODE}, b": 1}),
    "later node": change("call_function", args=[{"node": "output"}]),
    "no node": change("call_function", args=[{"node": "nobody"}]),
    "strange value": change("call_function", args=[{"eval": CODE}]),
    "strange dtype": change("call_function", args=[{"dtype": "load"}]),
    "strange float": change("call_function", args=[{"float": []}]),
    "strange device": change("call_function", args=[{"device": CODE}]),
    "large int": change("call_function", args=[2**63]),
    "deep": change("call_function", args=[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]),
    "no tensor": change("get_attr", target="body.nothing"),
    "path": change("get_attr", target='body.weight") or ("'),
    "no module": change("call_module", target="body"),
    "root": change("call_module", target=""),
    "module type": lambda d: d["modules"]["body.bn"].update(type="Sequential"),
    "module numbers": lambda d: d["modules"]["body.bn"].update(num_features=-1),
    "module flag": lambda d: d["modules"]["body.bn"].update(num_features=True),
    "module size": lambda d: d["modules"]["body.bn"].update(num_features=2**30),
    "dropout": lambda d: d["modules"]["body.drop"].update(p=7),
    "module path": lambda d: d["modules"].update({"__class__.x": d["modules"]["body.drop"]}),
    "module name": lambda d: d["modules"].update({"forward": d["modules"]["body.drop"]}),
    "tensor name": lambda d: d["tensors"][0].update(name="forward"),
    "tensor path": lambda d: d["tensors"][0].update(name="a..b"),
    "tensor twice": lambda d: d["tensors"].append(d["tensors"][0]),
    "tensor order": lambda d: d["tensors"][0].update(order=[0, 0, 0, 0]),
    "tensor order type": lambda d: d["tensors"][0].update(order=["a", None]),
    "tensor missing": lambda d: d["tensors"][0].update(stored="t99"),
    "gradient of ints": lambda d: next(t for t in d["tensors"] if t["name"] == "index").update(requires_grad=True),
    "inputs": lambda d: d.update(in_spec=d["out_spec"]),
    "spec": lambda d: d.update(out_spec=json.dumps([1, PLANTED])),
}
BROKEN = {
    "format": lambda d: d.update(format="other"),
    "version": lambda d: d.update(version=99),
    "no output": lambda d: d["nodes"].pop() and None,
    "no nodes": lambda d: d.update(nodes=None),
    "history": lambda d: d.update(demasked={}),
    "history type": lambda d: d["demasked"].update(cuts=[]),
    "lost statistics": lambda d: d.update(tensors=[t for t in d["tensors"] if "running_mean" not in t["name"]]),
    "training": lambda d: d.update(training=[[]]),
    "not an object": lambda d: [],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_graphs_are_refused(file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = repack(file, tmp_path / "m.demask", HOSTILE[name])
    with pytest.raises(RefusedFile, match=r"m\.demask"):
        archive.load(path)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graphs_are_bad_input(file, tmp_path, name):
    with pytest.raises(BadInput, match=r"m\.demask"):
        archive.load(repack(file, tmp_path / "m.demask", BROKEN[name]))


def test_other_entries_and_types_are_refused(file, tmp_path):
    with pytest.raises(RefusedFile, match="only"):
        archive.load(repack(file, tmp_path / "m.demask", extra=["weights.pkl"]))
    with pytest.raises(BadInput, match="damaged"):
        archive.load(repack(file, tmp_path / "m.demask", tensors=b"\xff" * 100))
    with pytest.raises(RefusedFile):
        small = safetensors.torch.save({"t0": torch.ones(3)})
        archive.load(repack(file, tmp_path / "m.demask", tensors=small))

    def unknown(document):
        document["out_spec"] = document["out_spec"].replace("collections.OrderedDict", "lib.Output")

    with pytest.raises(BadInput, match="import lib"):
        archive.load(repack(file, tmp_path / "m.demask", unknown))


@pytest.mark.parametrize("keep", [0, 3, 50, 2000, -3000, -100, -21, -1])
def test_truncated_archives_are_bad_input(file, tmp_path, keep):
    path = tmp_path / "cut.demask"
    path.write_bytes(file.read_bytes()[:keep])
    for read in (archive.load, read_model):
        with pytest.raises(BadInput, match=r"cut\.demask"):
            read(path)


NASTY = [None, True, -1, 0, 2**40, 1.5, "", "x", "a.b", "__init__", "aten.add.Tensor", [], {}, [[]],
         {"node": "x"}, {"tuple": []}, "output", "call_module", "operator.getitem"]  # fmt: skip


def test_changed_values_load_or_are_refused(file, tmp_path):
    draw, refused = random.Random(0), 0
    for trial in range(400):
        path = repack(file, tmp_path / f"{trial}.demask", lambda document: change_one_value(document, draw, NASTY))
        try:
            archive.load(path)
        except DemaskError as error:
            assert str(path) in str(error)
            refused += 1
    assert 100 < refused < 400


def test_flipped_bits_load_or_are_refused(file, tmp_path):
    draw, data, path = random.Random(1), file.read_bytes(), tmp_path / "m.demask"
    for _ in range(200):
        damaged = bytearray(data)
        damaged[draw.randrange(draw.choice([0, len(data) - 200]), len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            archive.load(path)
        except DemaskError as error:
            assert str(path) in str(error)


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.demask"
    archive.save(network(), path)
    old = path.read_bytes()
    slim = network()
    slim.body.drop = nn.Upsample(2)
    with pytest.raises(BadInput, match=r"body\.drop is a Upsample"):
        archive.save(slim, path)
    with pytest.raises(BadInput, match="demask"):
        archive.save(fx.symbolic_trace(nn.Linear(2, 2)), path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["m.demask"]


# ----------------------------------------------------------------------------------------- .pt2

READER = """
import sys, torch
sys.modules["demask"] = None  # importing it would fail
program = torch.export.load(sys.argv[1])
saved = torch.load(sys.argv[2], weights_only=False)
for (args, kwargs), want in saved:
    got = program.module()(*args, **kwargs)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want)))
    assert type(got).__name__ == "OrderedDict", type(got)
print("equal", len(saved))
"""


def test_a_pt2_is_read_without_demask(tmp_path):
    slim = network().train()
    path = tmp_path / "m.pt2"
    to_pt2(slim, path)
    assert slim.training and all(module.training for module in slim.modules())
    slim.eval()
    saved = [(call, slim(*call[0], **call[1])) for call in (inputs(1), inputs(2), inputs(7))]
    torch.save(pytree.tree_map(lambda t: t.detach(), saved), tmp_path / "calls.pt")
    status, out, err = own_process.run(READER, path, tmp_path / "calls.pt")
    assert status == 0 and out.split() == ["equal", "3"], err
    data = path.read_bytes()
    assert os.path.dirname(torch.__file__).encode() not in data and b"demask" not in data
    program = read_model(path)
    assert isinstance(program, torch.export.ExportedProgram) and program.example_inputs is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own pytree internals
        module = program.module()
    for call, want in saved:
        assert same(module(*call[0], **call[1]), want)


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_pt2_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, failure):
    """torch's own writer ends the process where writing raises."""
    writes = []

    def refused(data):
        writes.append(data)
        if len(writes) > 3:
            raise failure

    full = contextlib.nullcontext(SimpleNamespace(write=refused))
    monkeypatch.setattr(pt2, "write", lambda path: full)
    with pytest.raises(type(failure)):
        to_pt2(network(), tmp_path / "m.pt2")
    assert len(writes) == 4  # and none after the first that failed


def test_content_decides_what_a_file_is(file, tmp_path):
    disguised = tmp_path / "m.pt2"
    disguised.write_bytes(file.read_bytes())
    assert isinstance(read_model(disguised), fx.GraphModule)
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        other.writestr("hello.txt", "hello")
    with pytest.raises(BadInput, match=r"torch\.export\.save"):
        read_model(tmp_path / "other.pt2")


def test_what_does_not_export_says_so(tmp_path):
    slim = network()
    slim.demasked = provenance(
        InputSpec("x", ("batch", 3, "h", 5), "float32", (1, 3, 5, 5)),
        InputSpec("offset", ("n",), "float64", (6,)),  # the weights fix it at 6
    )
    with pytest.raises(NotExportable, match="dynamic"):
        to_pt2(slim, tmp_path / "m.pt2")
    slim.demasked = provenance(InputSpec("x", (2, 3), "__doc__", (2, 3)), slim.demasked.inputs[1])
    with pytest.raises(BadInput, match="dtype"):
        to_pt2(slim, tmp_path / "m.pt2")
    with pytest.raises(BadInput, match="does not exist"):
        to_pt2(slim, tmp_path / "no" / "m.pt2")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("function", [demask.report, demask.save, demask.to_pt2])
def test_a_network_without_provenance_is_refused(function, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = () if function is demask.report else ("net.pt2",)
    with pytest.raises(demask.BadInput, match="Linear without the attribute `demasked`"):
        function(nn.Linear(2, 3), *paths)
    assert not any(tmp_path.iterdir())


def test_a_path_of_modules_is_taken_once_and_not_too_deep() -> None:
    spec = {"type": "ReLU"}
    with pytest.raises(RefusedFile, match="module 'a' occurs twice"):
        archive._attach_modules(nn.Module(), {"a.b": spec, "a": spec})
    deepest = ".".join("a" * 101)
    assert archive._parent_module(nn.Module(), deepest)[1] == "a"
    with pytest.raises(RefusedFile, match="does not lead to a module"):
        archive._parent_module(nn.Module(), f"a.{deepest}")


def test_a_program_that_cannot_be_written_whole_is_not_written(tmp_path, monkeypatch) -> None:
    slim, write = demask.demask(nn.Linear(4, 2).eval(), (torch.zeros(1, 4),)), pt2.write

    def no_space(_):
        raise OSError(28, "No space left on device")

    @contextlib.contextmanager
    def full(path):
        with write(path):
            yield SimpleNamespace(write=no_space)

    monkeypatch.setattr(pt2, "write", full)
    with pytest.raises(DemaskError, match="No space left"):
        to_pt2(slim, tmp_path / "net.pt2")
    assert os.listdir(tmp_path) == []
