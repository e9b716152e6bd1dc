"""What the gate refuses because it misleads or exhausts, what it lets pass, and a fuzz."""

import collections
import json
import os
import random
import stat
import time
import warnings
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from demask.errors import BadInput, DemaskError, RefusedFile
from demask.files.allowed_names import check_spec
from demask.files.pt2_gate import check, check_expression, open_pt2
from pt2_files import AUTO, CALL, CONSTANTS, MODEL, WEIGHTS, Small, change_one_value, edited, export, pack, quietly

# ------------------------------------------------------------------------ what exhausts or misleads


def test_archives_that_are_not_plain_are_refused(honest, tmp_path):
    path = pack(tmp_path / "bomb.pt2", {**honest, "extra/zeros": bytes(2**24)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(RefusedFile, match="compressed"):
        open_pt2(path)
    for name in ("../../escape", "/etc/escape", "a\\b", "a//b", "..", "a/../b", "nul\u202e"):
        path = tmp_path / "names.pt2"
        pack(path, honest)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, b"")
        with pytest.raises(RefusedFile, match="plain relative name"):
            open_pt2(path)


def test_duplicates_links_and_overlaps_are_refused(honest, tmp_path):
    path = pack(tmp_path / "twice.pt2", honest)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # zipfile warns of the duplicate planted here
        archive.writestr(f"model/{MODEL}", honest[MODEL])
    with pytest.raises(RefusedFile, match="two entries"):
        open_pt2(path)

    path = pack(tmp_path / "link.pt2", honest)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("model/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(RefusedFile, match="link"):
        open_pt2(path)

    path = pack(tmp_path / "overlap.pt2", {**honest, "extra/big": bytes(2**16)})
    with zipfile.ZipFile(path, "a") as archive:
        big = archive.getinfo("model/extra/big")
        for i in range(50):  # fifty names for the same bytes
            twin = zipfile.ZipInfo(f"model/extra/big{i}")
            twin.header_offset, twin.CRC = big.header_offset, big.CRC
            twin.file_size = twin.compress_size = big.file_size
            archive.filelist.append(twin)
        archive._didModify = True
    with pytest.raises(RefusedFile, match="zip bomb"):
        open_pt2(path)


@pytest.mark.parametrize("keep", [0, 1, 10, 100, 1000, 5000, -2000, -100, -30, -10, -1])
def test_truncated_files_are_bad_input(honest, tmp_path, keep):
    data = pack(tmp_path / "whole.pt2", honest).read_bytes()
    path = tmp_path / "cut.pt2"
    path.write_bytes(data[:keep])
    with pytest.raises(BadInput, match=r"cut\.pt2.*(truncated|damaged|complete)"):
        open_pt2(path)


def test_other_files_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        open_pt2(tmp_path / "missing.pt2")
    with pytest.raises(BadInput, match="cannot be read"):
        open_pt2(tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / "state.pt2")
    with pytest.raises(BadInput, match=r"torch\.export\.save"):
        open_pt2(tmp_path / "state.pt2")


METAS = {
    "sizes beyond the bytes": {"sizes": [{"as_int": 300}, {"as_int": 500}]},
    "strides beyond the bytes": {"strides": [{"as_int": 500}, {"as_int": 1}]},
    "offset": {"storage_offset": {"as_int": 1}},
    "negative offset": {"storage_offset": {"as_int": -1}},
    "negative stride": {"strides": [{"as_int": -5}, {"as_int": 1}]},
    "negative size": {"sizes": [{"as_int": -3}, {"as_int": 5}]},
    "repeats without end": {"sizes": [{"as_int": 2**40}, {"as_int": 5}], "strides": [{"as_int": 0}, {"as_int": 1}]},
    "symbolic size": {"sizes": [{"as_expr": {"expr_str": "s0", "hint": None}}, {"as_int": 5}]},
    "ranks differ": {"sizes": [{"as_int": 15}]},
    "odd bytes": {"dtype": 11},
    "sparse": {"layout": 1},
    "unknown dtype": {"dtype": 0},
}


@pytest.mark.parametrize("name", METAS)
def test_tensors_outside_their_bytes_are_refused(honest, tmp_path, name):
    def edit(config):
        config["config"]["fc.weight"]["tensor_meta"].update(METAS[name])

    with pytest.raises(RefusedFile, match=r"fc\.weight"):
        open_pt2(pack(tmp_path / "m.pt2", edited(honest, WEIGHTS, edit)))


def test_a_large_tensor_of_no_bytes_is_refused(honest, tmp_path):
    """torch would allocate it."""

    def edit(config):
        sizes = [{"as_int": 2**20}, {"as_int": 2**20}]
        config["config"]["fc.weight"]["path_name"] = "weight_9"
        config["config"]["fc.weight"]["tensor_meta"].update(sizes=sizes)

    entries = {**edited(honest, WEIGHTS, edit), "data/weights/weight_9": b""}
    with pytest.raises(RefusedFile, match="out of bounds"):
        open_pt2(pack(tmp_path / "m.pt2", entries))


def test_odd_programs_are_refused(honest, tmp_path):
    def refuse(edit, match, error=RefusedFile):
        with pytest.raises(error, match=match):
            open_pt2(pack(tmp_path / "m.pt2", edited(honest, MODEL, edit)))

    def node(program):
        return program["graph_module"]["graph"]["nodes"][0]

    refuse(lambda p: p["range_constraints"].update(u99999999999={"min_val": 0, "max_val": 1}), "u999")
    refuse(lambda p: node(p).update(target="torch.ops.aten.save.default"), "save")
    refuse(lambda p: node(p).update(target="torch.ops.aten.__class__.__init__"), "__class__")
    refuse(lambda p: node(p).update(target="torch.ops.aten.fbgemm_linear_fp16_weight.default"), "fbg")
    refuse(lambda p: node(p).update(target="torch.ops.higher_order.cond"), "cond")
    refuse(lambda p: node(p).update(target="torch.ops.mine.op.default"), "aten")
    refuse(lambda p: node(p).update(target="torch.load"), "torch.load")
    refuse(lambda p: node(p).update(target="_operator.attrgetter"), "attrgetter")
    refuse(lambda p: node(p)["inputs"][0].update(arg={"as_operator": "torch.load"}), "operator")
    refuse(lambda p: node(p)["inputs"][0].update(arg={"as_int": True}), "int", BadInput)
    refuse(lambda p: node(p).update(color="red"), "newer torch", BadInput)
    refuse(lambda p: p["schema_version"].update(major=99), "schema version", BadInput)
    refuse(lambda p: [], "ExportedProgram", BadInput)
    refuse(lambda p: p.pop("graph_module") and None, "graph_module", BadInput)
    deep = b"[" * 100_000 + b"]" * 100_000
    for text in (deep, b"[" * 300 + b"]" * 300, b'{"a": 1, "a": 2}', b"[NaN]", b"[" + b"9" * 99 + b"]"):
        with pytest.raises(RefusedFile):
            open_pt2(pack(tmp_path / "m.pt2", {**honest, MODEL: text}))
    for text in (b"\xff\xfe", b"", b"{"):
        with pytest.raises(BadInput, match="JSON"):
            open_pt2(pack(tmp_path / "m.pt2", {**honest, MODEL: text}))


GOOD = [
    "Symbol('s77', positive=True, integer=True)",
    "s0",
    "-3",
    "s0 + 2*s1 - 1",
    "(s0 // 2) % 3",
    "Add(FloorDiv(Symbol('s0', integer=True), Integer(2)), Integer(-1))",
    "Max(1, s0)",
    "s0 >= 2",
    "Pow(Symbol('s0', integer=True), Integer(2))",
    "PowByNatural(s0, 2)",
    "Float('0.5', precision=53)",
    "Equality(Mod(Symbol('s0', integer=True), Integer(8)), Integer(0))",
    "Where(s0 < 3, s0, 4)",
]
BAD = [
    "", "x", "__import__('os')", "().__class__", "Symbol.__init__", "Symbol('__x__')", "s0.args",
    "Symbol(s0)", "Symbol('s0', cls=1)", "Integer('1')", "lambda: 0", "[s0]", "s0 if s0 else 1",
    "2**99999999", "Pow(9, 99999999)", "Pow(Pow(9, 16), 16)", "Pow(9, s0)", "PowByNatural(9, 9999)",
    "LShift(1, 99999999)", "factorial(99999)", "s0 << 99999999", "9" * 40, "Float('1e999999999')",
    "Add(*s0)", "Add(s0, evaluate=False)", "-" * 19_999 + "1", "(" * 9_000 + "1" + ")" * 9_000,
    "Add(" * 70 + "1" + ")" * 70, f"Max({','.join(f's{i}' for i in range(9))})",
    "Max(s0,s1,s2,s3,Min(s4,s5,s6,s7,s8))", "s0+" * 9_999 + "s0", "f'{s0}'", "s0;s1", "(y := 3)",
    "print(1)", "'s0'",
]  # fmt: skip


def test_the_grammar_of_expressions():
    start = time.monotonic()
    for text in GOOD:
        assert check_expression(text) == text
    for text in BAD:
        with pytest.raises(RefusedFile, match="symbolic expression"):
            check_expression(text)
    assert time.monotonic() - start < 5


def test_specs_of_unknown_types_name_the_library():
    leaf = {"type": None, "context": None, "children_spec": []}

    def spec(kind, context, children=1):
        return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf] * children}])

    with pytest.raises(BadInput, match="import lexicon") as caught:
        check_spec(spec("lexicon.outputs.Output", '["logits"]'))
    assert not isinstance(caught.value, RefusedFile)
    with pytest.raises(BadInput, match="named tuple"):
        check_spec(spec("collections.namedtuple", "somewhere.Pair"))
    check_spec(spec("collections.deque", "null"))
    for bad in (
        "{}",
        "[2, {}]",
        "[1, {}]",
        spec("builtins.dict", '["a", "b"]'),
        "[1, null]",
        7,
        spec("builtins.dict", '{"a": 1}'),
        spec("builtins.tuple", "[" * 5000 + "]" * 5000),
    ):
        with pytest.raises(RefusedFile):
            check_spec(bad)


# ----------------------------------------------------------------------------- what must pass


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU6(inplace=True), nn.Conv2d(6, 6, 3, groups=6, padding=1)
        )
        self.head = nn.ModuleDict({"a-b": nn.Linear(6, 4)})

    def forward(self, x):
        y = F.interpolate(self.body(x), scale_factor=2, mode="bilinear")
        y = F.max_pool2d(y, 2)
        return self.head["a-b"](y.mean((2, 3))), y[:, :, ::2].flatten(1)


class Attention(nn.Module):
    """Tied weights, a buffer that is not saved, a region without gradients, dynamic lengths."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.register_buffer("freq", torch.arange(4.0), persistent=False)

    def forward(self, input, mask=None):
        b, t = input.shape
        with torch.no_grad():
            position = torch.outer(torch.arange(t), self.freq).sin().repeat(1, 2)
        x = self.embed(input) + position
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + y.transpose(1, 2).reshape(b, t, 8))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(5, 6, 2, bidirectional=True), nn.GRU(12, 3)

    def forward(self, *xs, **options):
        y, (h, c) = self.lstm(xs[0] + xs[1])
        return collections.OrderedDict(y=self.gru(y)[0], state=(h, c), none=None, o=options["o"] + 1)


class Kinds(nn.Module):
    """float64, bfloat16, int64, bool and expanded buffers, channels_last, an empty parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.float64), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("brief", torch.randn(3).bfloat16())
        self.register_buffer("index", torch.tensor([2, 0]))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.ones(1, 3).expand(7, 3))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = (x.double() @ self.w).where(self.flag, float("-inf"))[:, self.index]
        z = self.conv(torch.ones(1, 2, 4, 4)).sum() + self.wide.sum() + self.empty.sum()
        return [y, self.brief * 2, z.to(torch.float16)]


LEGIT = {
    "conv": (Conv, (torch.randn(2, 3, 16, 20),), {}, {"x": {0: AUTO, 2: AUTO, 3: AUTO}}),
    "attention": (Attention, (torch.randint(11, (2, 5)),), {"mask": None}, {"input": {0: AUTO, 1: AUTO}, "mask": None}),
    "recurrent": (Recurrent, (torch.randn(4, 2, 5), torch.randn(4, 2, 5)), {"o": torch.ones(2)}, None),
    "even sizes": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
        (torch.randn(1, 3, 16, 20),),
        {},
        ({2: 2 * torch.export.Dim("h", max=64), 3: 2 * torch.export.Dim("w", max=64)},),
    ),
    "kinds": (Kinds, (torch.randn(4, 3),), {}, {"x": {0: AUTO}}),
    "small": (Small, *CALL, None),
}


@pytest.mark.parametrize("name", LEGIT)
def test_what_torch_exports_passes(name, tmp_path):
    make, args, kwargs, shapes = LEGIT[name]
    model = make().eval()
    exported = export(model, args, kwargs, shapes)
    quietly(torch.export.save, exported, tmp_path / "m.pt2", extra_files={"note.txt": "hello"})
    check(tmp_path / "m.pt2")
    program = open_pt2(tmp_path / "m.pt2")
    assert list(program.state_dict) == list(exported.state_dict)
    for key, value in exported.state_dict.items():
        got = program.state_dict[key]
        assert got.dtype == value.dtype and got.stride() == value.stride()
        assert got.requires_grad == value.requires_grad and torch.equal(got, value)
    assert str(program.range_constraints) == str(exported.range_constraints)
    want = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    got = torch.utils._pytree.tree_leaves(quietly(program.module)(*args, **kwargs))
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert a is b or torch.equal(a, b)


def test_ties_survive(tmp_path):
    make, args, kwargs, shapes = LEGIT["attention"]
    torch.export.save(export(make().eval(), args, kwargs, shapes), tmp_path / "m.pt2")
    state = open_pt2(tmp_path / "m.pt2").state_dict
    assert state["embed.weight"].data_ptr() == state["out.weight"].data_ptr()


def test_other_namespaces_pass_when_named(tmp_path):
    with torch.library._scoped_library("gatetest", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        class Own(nn.Module):
            def forward(self, x):
                return torch.ops.gatetest.twice(x)

        torch.export.save(export(Own(), (torch.ones(2),)), tmp_path / "m.pt2")
        with pytest.raises(RefusedFile, match="gatetest"):
            open_pt2(tmp_path / "m.pt2")
        program = open_pt2(tmp_path / "m.pt2", namespaces=("gatetest",))
        assert program.module()(torch.ones(2)).tolist() == [2, 2]


# ------------------------------------------------------------------------------------- fuzzing

NASTY = [
    None, True, -1, 0, 1, 2**63, 1.5, "", "x", "a.b", "__class__", "s0", "Symbol('s0')", "cuda",
    [], {}, [[]], {"as_int": -5}, {"as_name": "x"}, {"as_none": True}, {"name": "x"}, "Infinity",
    "torch.ops.aten.add.Tensor", "torch.ops.aten.relu.default",
]  # fmt: skip


def survives(path):
    try:
        quietly(open_pt2, path)
    except DemaskError as error:
        assert str(path) in str(error)


def test_changed_values_load_or_are_refused(honest, tmp_path):
    draw, start = random.Random(0), time.monotonic()
    for trial in range(400):
        name = draw.choice([MODEL, MODEL, MODEL, WEIGHTS, CONSTANTS])
        entries = edited(honest, name, lambda document: change_one_value(document, draw, NASTY))
        survives(pack(tmp_path / f"{trial}.pt2", entries))
        os.unlink(tmp_path / f"{trial}.pt2")
        if time.monotonic() - start > 10:
            break


def test_flipped_bits_load_or_are_refused(honest, tmp_path):
    draw = random.Random(1)
    data = pack(tmp_path / "whole.pt2", honest).read_bytes()
    directory = data.rindex(b"PK\x01\x02", 0, len(data) - 1500)
    for trial in range(150):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 1, 4])):
            low = draw.choice([0, directory])
            damaged[draw.randrange(low, len(data))] ^= 1 << draw.randrange(8)
        path = tmp_path / f"{trial}.pt2"
        path.write_bytes(damaged)
        survives(path)
