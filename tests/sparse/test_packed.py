"""Packed matrices and layers, prepare and sparsify: against float64, in bounds, refusing what does not fit."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from llvmlite import ir
from torch import nn
from torch.library import opcheck
from torch.nn import functional as F

import architectures
import demask
from demask.errors import BadInput
from demask.kernels.cpu import few_columns
from demask.kernels.cpu.few_columns import MOST, BitmapDecode, BitmapRows, DenseRows
from demask.kernels.llvm import jit
from demask.kernels.llvm.emitter import I32, Emitter
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, host
from demask.kernels.llvm.jit import assembly
from demask.kernels.thread_team import SpareTasks
from demask.machine.cost import Costs
from demask.sparse import DCSR, PackedLinear, prepare, sparsify, spmm
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.packed_linear import PACKED_LINEAR
from demask.sparse.products import form_choice, packed_kernels, packed_product
from demask.sparse.products.packed import FORMS, PackedMatrix, check_tensors, pack, quantize
from demask.sparse.products.packed_product import linear, to_dense
from guarded import guarded

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SIZES = ((1, 1), (1, 8), (7, 40), (33, 96), (16, 129), (64, 64))


def packed_matrix(form: str, dtype: torch.dtype, rows: int, columns: int, group: int = 0) -> PackedMatrix:
    """A random matrix in a form. group: columns with a scale."""
    torch.manual_seed(rows * columns)
    matrix = torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.4)
    matrix, scale = quantize(matrix, group) if dtype == torch.int8 else (matrix.to(dtype), None)
    return pack(matrix, form, scale)


def groups(form: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Columns with a scale of their own, which matrices in a form may have."""
    return (0, 32, 64) if dtype == torch.int8 and form != "columns" else (0,)


def in_float64(packed: PackedMatrix, group: int = 0) -> torch.Tensor:
    """The matrix, by torch's ops alone."""
    values = packed.tensors[0].double()
    if packed.form == "bitmap":
        dense = packed.decode_bits(0, packed.size[0]).double()
    elif packed.form == "columns":
        dense = torch.zeros(packed.size, dtype=torch.float64)
        rows = torch.arange(packed.size[0]).repeat_interleave(packed.tensors[1].diff())
        dense[rows, packed.tensors[2].long() & 0xFFFF] = values
    else:
        dense = values
    if packed.scale is None:
        return dense
    scale = packed.scale.double()
    return dense * (scale[:, torch.arange(packed.size[1]) // group] if group else scale[:, None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_with_any_number_of_vectors(form: str, dtype: torch.dtype) -> None:
    for size, group in itertools.product((*SIZES, (600, 300)), groups(form, dtype)):
        packed = packed_matrix(form, dtype, *size, group)
        check_tensors(packed)
        exact = in_float64(packed, group)
        assert torch.equal(to_dense(packed, torch.float64), exact.float().double())
        for n in (0, 1, 2, 3, 4, 5, 8, 9, 40):
            x = torch.randn(n, size[1])
            expected, made = x.double() @ exact.T, linear(packed, x)
            assert made.shape == expected.shape and made.dtype == torch.float32
            assert float((made - expected).abs().amax()) <= 1e-6 * float(expected.abs().amax()) if n else True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("end", [True, False], ids=["end", "beginning"])
def test_kernels_stay_in_their_buffers(end: bool, dtype: torch.dtype, monkeypatch) -> None:
    for form in FORMS:
        for size, group in itertools.product(((1, 8), (7, 40), (33, 96), (6, 129)), groups(form, dtype)):
            packed = packed_matrix(form, dtype, *size, group)
            scale = None if packed.scale is None else guarded(packed.scale, end)
            inside = replace(packed, tensors=tuple(guarded(t, end) for t in packed.tensors), scale=scale)
            cases = [(x, linear(packed, x)) for x in (torch.randn(n, size[1]) for n in (1, 4, 8))]
            dense = to_dense(packed, torch.float32)
            with monkeypatch.context() as patch:  # the memory of calls, too
                patch.setattr(packed_kernels, "TASKS", SpareTasks())
                for name in ("zeros", "empty"):
                    make = getattr(torch, name)
                    patch.setattr(torch, name, lambda *a, make=make, **options: guarded(make(*a, **options), end))
                for x, expected in cases:
                    torch.testing.assert_close(linear(inside, guarded(x, end)), expected, rtol=1e-6, atol=1e-5)
                torch.testing.assert_close(to_dense(inside, torch.float32), dense, rtol=0, atol=0)


def test_calls_in_inference_mode_and_outside_share_memory() -> None:
    for form in FORMS:
        layer = PackedLinear(packed_matrix(form, torch.bfloat16, 34, 57), torch.randn(34), dtype=torch.float32)
        x = torch.randn(3, 57)
        with torch.inference_mode():
            inside = layer(x)
        outside = layer(x.requires_grad_())
        outside.sum().backward()
        assert torch.equal(inside, outside) and x.grad is not None


def test_a_sum_is_the_same_for_any_number_of_threads(monkeypatch) -> None:
    for form in FORMS:
        packed, x = packed_matrix(form, torch.bfloat16, 700, 512), torch.randn(3, 512)
        results = []
        for count in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
            results.append(linear(packed, x))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("form", FORMS)
def test_zeros_times_infinity(form: str) -> None:
    packed, x = pack(torch.tensor([[0.0, 2.0] * 8]), form), torch.ones(1, 16)
    x[0, 0] = torch.inf
    assert bool(linear(packed, x).isnan()) == (form != "columns")
    assert linear(pack(torch.tensor([[torch.nan, 2.0] * 8]), form), torch.ones(1, 16)).isnan().all()


def test_without_kernels(monkeypatch) -> None:
    monkeypatch.setattr(packed_product, "_kernels", lambda: None)
    for form in FORMS:
        packed, x = packed_matrix(form, torch.bfloat16, 33, 96), torch.randn(2, 96)
        torch.testing.assert_close(linear(packed, x).double(), x.double() @ in_float64(packed).T, rtol=1e-5, atol=1e-5)


def expand_by_lanes(e: Emitter, numbers: Any, mask: Any) -> Any:
    """What `few_columns.expand` returns, by instructions of any processor."""
    b, position, out = e.b, I32(0), ir.Constant(numbers.type, None)
    for lane in range(numbers.type.count):
        is_set = b.extract_element(mask, I32(lane))
        value = b.extract_element(numbers, position)
        out = b.insert_element(out, b.select(is_set, value, ir.Constant(value.type, 0)), I32(lane))
        position = b.add(position, b.zext(is_set, I32))
    return out


@pytest.mark.skipif(host().lanes < 8, reason="needs vectors of 8 lanes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_an_instruction_expands(dtype: torch.dtype, monkeypatch) -> None:
    isa = replace(host(), name="AVX2, and an instruction that expands")
    monkeypatch.setattr(few_columns, "has_expand", lambda *_: True)
    monkeypatch.setattr(few_columns, "expand", expand_by_lanes)
    monkeypatch.setattr(jit, "host", lambda: isa)
    monkeypatch.setattr(jit.CODE, "files", None)  # of which no other process may read these
    monkeypatch.setattr(packed_kernels, "TASKS", SpareTasks())
    for size, group in itertools.product(SIZES, groups("bitmap", dtype)):
        packed = packed_matrix("bitmap", dtype, *size, group)
        exact = in_float64(packed, group)
        assert torch.equal(to_dense(packed, torch.float64), exact.float().double())
        if dtype == torch.bfloat16:
            assert torch.equal(packed_kernels.decode(packed, 0, size[0], dtype).double(), exact)
        for n in (1, 2, 4, 7):
            x = torch.randn(n, size[1])
            expected = x.double() @ exact.T
            assert float((linear(packed, x) - expected).abs().amax()) <= 1e-6 * float(expected.abs().amax())


@pytest.mark.parametrize("form", FORMS)
def test_many_vectors_in_bfloat16(form: str, monkeypatch) -> None:
    """Where torch multiplies bfloat16 faster than float32: its products, of decoded rows."""
    monkeypatch.setattr(packed_product, "multiplies_in_bfloat16", lambda threads: True)
    monkeypatch.setattr(packed_product, "BLOCK", 256)  # several blocks of rows
    for rows, columns in SIZES:
        packed = packed_matrix(form, torch.bfloat16, rows, columns)
        weight, bias = to_dense(packed, torch.bfloat16), torch.randn(rows).bfloat16()
        if packed_product.has_bitmap(torch.bfloat16) and form == "bitmap":
            assert torch.equal(packed_kernels.decode(packed, 0, rows, torch.bfloat16), weight)
        if form == "columns":
            assert torch.equal(packed_kernels.decode_columns(packed, 0, rows), weight)
        x = torch.randn(3, 50, columns).bfloat16()
        exact = F.linear(x.double(), weight.double(), bias.double())
        found = linear(packed, x, bias)
        assert found.dtype == torch.bfloat16 and found.shape == exact.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-2)


VBMI2 = replace(AVX512, cpu="icelake-server", features="+avx512vbmi2,-prefer-256-bit")


EXPANDS = {torch.float32: "vexpandps", torch.bfloat16: "vpexpandw", torch.float16: "vpexpandw", torch.int8: "vpexpandb"}


@pytest.mark.parametrize(("dtype", "word"), list(EXPANDS.items()), ids=str)
def test_instructions_that_expand(dtype: torch.dtype, word: str) -> None:
    """One for eight columns of both rows."""
    numbers = NUMBERS[dtype]
    assert assembly([BitmapRows(numbers, 1)], VBMI2).count(f"\t{word}\t") == 4
    assert word in assembly([BitmapDecode(numbers)], VBMI2)


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_kernels_compile_for_other_machines(isa) -> None:
    kernels = [DenseRows(numbers, n) for numbers in ("f32", "bf16", "i8") for n in (1, MOST["dense"])]
    kernels += [BitmapRows("bf16", 1), BitmapRows("f32", 4), BitmapRows("i8", 2), BitmapDecode("bf16")]
    words = {"AVX-512": ["zmm"], "AVX2": ["vpshufb"], "NEON": ["fmla", "tbl"]}[isa.name]
    text = assembly(kernels, isa)
    assert all(word in text for word in words)


HOSTILE = {
    "bits that have no values": ("bitmap", 1, lambda t: t | 1),
    "starts": ("bitmap", 2, lambda t: t + 1),
    "few values": ("bitmap", 0, lambda t: t[:-1]),
    "a column": ("columns", 2, lambda t: t + 90),
    "row starts": ("columns", 1, lambda t: t.flip(0)),
    "columns of 32 bits": ("columns", 2, lambda t: t.int()),
    "another size": ("dense", 0, lambda t: t[1:]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_tensors_are_refused(name: str) -> None:
    form, number, change = HOSTILE[name]
    packed = packed_matrix(form, torch.float32, 7, 96)
    tensors = list(packed.tensors)
    tensors[number] = change(tensors[number])
    layer = PackedLinear(replace(packed, tensors=tuple(tensors)))
    with pytest.raises(BadInput):
        layer(torch.ones(1, 96))
    valid = PackedLinear(packed)
    valid(torch.ones(1, 96))
    if tensors[number].shape == packed.tensors[number].shape and tensors[number].dtype == packed.tensors[number].dtype:
        packed.tensors[number].copy_(tensors[number])  # a write is seen
        with pytest.raises(BadInput):
            valid(torch.ones(1, 96))


def masked_layer(dtype: torch.dtype, zeros: float = 0.6, bias: bool = True) -> nn.Linear:
    """A layer with zeros in no pattern."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 50, bias, dtype=dtype)
    with torch.no_grad():
        layer.weight *= torch.rand(50, 96) >= zeros
    return layer


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_layers(form: str, dtype: torch.dtype) -> None:
    layer = masked_layer(dtype)
    packed = PackedLinear.from_dense(layer, form)
    assert torch.equal(packed.weight, layer.weight) and torch.equal(packed.to_dense().weight, layer.weight)
    for shape in ((96,), (1, 96), (2, 3, 96), (0, 96), (40, 96)):
        x = torch.randn(shape, dtype=dtype)
        made, exact = packed(x), F.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert made.dtype == dtype and made.shape == exact.shape and made.is_contiguous()
        torch.testing.assert_close(made.double(), exact, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    x = torch.randn(3, 96, dtype=dtype)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(other(x), packed(x))
    for state in (packed.state_dict(), layer.state_dict()):  # packed, or dense
        loaded = PackedLinear.from_dense(masked_layer(dtype, 0.1), form)
        loaded.load_state_dict(state)
        assert torch.equal(loaded(x), packed(x))
    assert packed.to(torch.float32).weight.dtype == torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_gradients_and_compilers(form: str) -> None:
    layer = masked_layer(torch.float32)
    packed, x = PackedLinear.from_dense(layer, form), torch.randn(3, 96, requires_grad=True)
    expected = torch.autograd.grad(F.linear(x, layer.weight, layer.bias).square().sum(), (x, layer.bias))
    made = torch.autograd.grad(packed(x).square().sum(), (x, packed.bias))
    torch.testing.assert_close(made, expected)
    step = torch.compile(packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(step(x).square().sum(), (x, packed.bias)), expected)
    inputs = x.detach()
    assert torch.equal(torch.compile(packed, fullgraph=True, backend="aot_eager")(inputs), packed(inputs))
    assert torch.equal(torch.export.export(packed, (inputs,)).module()(inputs), packed(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_networks_and_files(form: str, tmp_path) -> None:
    layer = masked_layer(torch.float32)
    net, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), layer).eval(), torch.randn(2, 64)
    with torch.no_grad():
        net[0].weight[:40], net[0].bias[:40] = 0, 0
        expected = net(x)
    net[2] = PackedLinear.from_dense(layer, form)
    slim = demask.demask(net, (x,))
    assert slim.get_submodule("0").out_features == 56 and demask.verify(net, slim, (x,))
    demask.save(slim, tmp_path / "net.pt2")
    demask.to_onnx(net, tmp_path / "net.onnx", (x,))
    loaded, file = demask.load(tmp_path / "net.pt2"), demask.from_onnx(tmp_path / "net.onnx")
    for other in (slim, loaded, file):
        torch.testing.assert_close(other(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_torch_checks_the_op(form: str) -> None:
    packed, x = packed_matrix(form, torch.float32, 6, 40), torch.randn(2, 40, requires_grad=True)
    opcheck(PACKED_LINEAR, (x, list(packed.tensors), None, torch.randn(6, requires_grad=True), form, 6, 40))


def test_float64_and_shared_layers(monkeypatch) -> None:
    packed = PackedLinear.from_dense(masked_layer(torch.float32), "bitmap").double()
    x = torch.randn(3, 96, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed, (x,), fast_mode=True)
    with pytest.raises(BadInput, match=r"weight in torch.float64, got torch.float32"):
        packed(torch.ones(1, 96))
    monkeypatch.setattr("demask.sparse.sparsified._times_as_fast", lambda *_: (2.0, 2.0))
    net = nn.Sequential(nn.Linear(96, 96), nn.ReLU())
    net.append(net[0])
    assert "tied" in sparsify(net).layers[0].reason and net[0] is net[2]


@pytest.mark.parametrize("group", [0, 32, 128])
def test_8_bit_weights(group: int) -> None:
    layer = masked_layer(torch.bfloat16)
    packed = PackedLinear.from_dense(layer, dtype=torch.int8, group=group)
    weight = layer.weight.detach().float()
    largest = weight.abs().view(50, -1, min(group or 96, 96)).amax(2)
    step = largest.repeat_interleave(96 // largest.shape[1], 1) / 254
    assert ((to_dense(packed.packed, torch.float32) - weight).abs() <= 1.01 * step).all()
    assert packed.to(torch.float32).scale.dtype == torch.float32
    other = PackedLinear.from_dense(masked_layer(torch.bfloat16, 0.2), dtype=torch.int8, group=group)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.scale, packed.scale) and torch.equal(other(weight), packed(weight))


def test_groups_that_have_no_scales_are_refused() -> None:
    layer = masked_layer(torch.float32)
    for group, options in ((48, {}), (16, {}), (True, {}), (32, {"dtype": None}), (32, {"form": "columns"})):
        with pytest.raises(BadInput, match="expected"):
            PackedLinear.from_dense(layer, **({"dtype": torch.int8} | options), group=group)
    packed = packed_matrix("dense", torch.int8, 7, 96, 32)
    for scale in (packed.scale[:, :0], packed.scale[:, :2].repeat(1, 4), packed.scale[:6], packed.scale[..., None]):
        with pytest.raises(BadInput, match="scales"):
            check_tensors(replace(packed, scale=scale.contiguous()))
    with pytest.raises(BadInput, match="groups of columns"):
        prepare(layer.weight.detach(), group=64)
    with pytest.raises(BadInput, match="power of two"):
        sparsify(nn.Sequential(layer), dtype=torch.int8, group=33)


@pytest.mark.parametrize("columns", [1, 8, 100])
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_prepared_matrices(density: float, columns: int) -> None:
    torch.manual_seed(0)
    dense = torch.randn(40, 130) * (torch.rand(40, 130) < density)
    x, bias = torch.randn(130, columns), torch.randn(40)
    expected = F.relu(dense.double() @ x.double() + bias[:, None]).float()
    for matrix in (dense, dense.to_sparse_csr(), DCSR.from_csr(dense.to_sparse_csr())):
        prepared = prepare(matrix, columns=columns)
        torch.testing.assert_close(prepared(x, bias, "relu"), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(prepared.linear(x.T, bias, "relu"), expected.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(prepared @ x, spmm(dense.to_sparse_csr(), x), rtol=1e-5, atol=1e-5)
        assert prepared.packed.form in str(prepared)
    wide = torch.zeros(2, 70_000)
    wide[1, 69_999] = 2
    assert (prepare(wide.to_sparse_csr()) @ torch.ones(70_000, 1)).flatten().tolist() == [0, 2]


def test_what_prepare_refuses() -> None:
    matrix = torch.eye(4)
    prepared = prepare(matrix)
    matrix[0, 0] = 2
    with pytest.raises(BadInput, match="was written after"):
        prepared @ torch.ones(4, 1)
    csr = torch.eye(4).to_sparse_csr()
    prepared = prepare(csr)
    csr.values().mul_(2)
    with pytest.raises(BadInput, match="was written after"):
        prepared @ torch.ones(4, 1)
    bad = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([9]), torch.ones(1), (1, 4), check_invariants=False
    )
    for wrong in (bad, torch.ones(4, 4, dtype=torch.int32), torch.ones(4), "matrix", torch.eye(4).to_sparse_csc()):
        with pytest.raises(BadInput):
            prepare(wrong)
    for options in ({"columns": 0}, {"dtype": torch.float64}):
        with pytest.raises(BadInput):
            prepare(matrix, **options)
    with pytest.raises(BadInput, match=r"expected an input \[..., 4\]"):
        prepare(matrix).linear(torch.ones(2, 3))


def test_forms_are_timed_for_the_first_matrix_of_a_kind(tmp_path, monkeypatch) -> None:
    seconds = iter([*range(10**6)])
    costs = Costs.open(tmp_path / "costs.json", clock=lambda: next(seconds))
    monkeypatch.setattr(form_choice, "costs_of_machine", lambda threads: costs)
    prepare(torch.eye(64))
    names = set(json.loads((tmp_path / "costs.json").read_text())["machines"][costs.machine])
    forms = ["dense", "columns", *(["bitmap"] if packed_product.has_bitmap(torch.float32) else [])]
    assert names >= {f"packed {form} 64x64 torch.float32, 1%, 1 vectors" for form in forms}
    known = dict.fromkeys(names, 2.0) | {"packed columns 64x64 torch.float32, 1%, 1 vectors": 1.0}
    monkeypatch.setattr(form_choice, "costs_of_machine", lambda threads: replace(costs, _known=known, clock=None))
    assert prepare(torch.eye(64)).packed.form == "columns"
    assert prepare(torch.eye(64), form="dense").packed.form == prepare(torch.ones(64, 64)).packed.form == "dense"
    with pytest.raises(BadInput, match="one of the forms"):
        prepare(torch.eye(64).to_sparse_csr(), form="diagonal")


class Tied(nn.Module):
    """A network with a tied layer, one with a hook, one of another class and ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 96), nn.Linear(96, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.hooked, self.first, self.second = (nn.Linear(96, 96) for _ in range(3))
        self.hooked.register_forward_hook(lambda module, args, out: out)
        self.wide = nn.Linear(96, 96, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.hooked(self.embedding(x))))
        return self.head(self.wide(x.double()).to(x.dtype))


def test_sparsify(monkeypatch) -> None:
    timed = []
    monkeypatch.setattr("demask.sparse.sparsified._times_as_fast", lambda *_: timed.append(1) or (2.0, 2.0))
    torch.manual_seed(0)
    model = Tied().eval()
    with torch.no_grad():
        model.first.weight *= torch.rand(96, 96) < 0.5
        model.second.weight *= torch.rand(96, 96) < 0.02
    x = torch.arange(10)
    expected = model(x)
    report = sparsify(model)
    torch.testing.assert_close(model(x), expected)
    half = "bitmap" if packed_product.has_bitmap(torch.float32) else "dense"
    assert {c.name: c.form for c in report.layers if c.form} == {"first": half, "second": "columns"}
    reasons = {c.name: c.reason for c in report.layers}
    assert "tied" in reasons["head"] and "hooks" in reasons["hooked"] and "float64" in reasons["wide"]
    assert isinstance(model.first, nn.Linear) and "2 of 5 linear layers packed" in str(report)
    assert all("packed already" in c.reason for c in sparsify(model).layers if c.name in ("first", "second"))
    assert len(timed) == 2


def test_what_sparsify_leaves(monkeypatch) -> None:
    monkeypatch.setattr("demask.sparse.sparsified._times_as_fast", lambda *_: (1.0, 0.9))
    net = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))
    assert [c.reason for c in sparsify(net, skip=["0"]).layers] == ["skipped", "torch's is not slower than dense"]
    assert "fewer zeros" in sparsify(net, min_sparsity=0.5).layers[0].reason
    assert type(net[0]) is type(net[1]) is nn.Linear
    for options in ({"min_sparsity": 2}, {"tokens": 0}, {"dtype": torch.float64}, {"skip": ["head"]}):
        with pytest.raises(BadInput):
            sparsify(net, **options)
    with pytest.raises(BadInput, match="from_dense"):
        sparsify(nn.Linear(2, 2))


def test_a_language_model_generates_the_same(monkeypatch) -> None:
    transformers = architectures.transformers()
    monkeypatch.setattr("demask.sparse.sparsified._times_as_fast", lambda *_: (2.0, 2.0))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=99,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and "head" not in name:
                layer.weight *= torch.rand_like(layer.weight) < 0.5
    prompt, options = torch.randint(3, 99, (2, 7)), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    logits, tokens = model(prompt).logits, model.generate(prompt, **options)
    sparsify(model)
    assert type(model) is transformers.LlamaForCausalLM
    torch.testing.assert_close(model(prompt).logits, logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(prompt, **options), tokens)
