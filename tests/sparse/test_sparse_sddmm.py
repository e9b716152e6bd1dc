"""SDDMM on the CPU and the gradients made of it: against float64, in bounds, refusing what does not
fit."""

from __future__ import annotations

import pytest
import torch

from demask.errors import BadInput
from demask.kernels.cpu.sddmm import Sampled
from demask.kernels.llvm.isa import AVX2, AVX512, NEON
from demask.kernels.llvm.jit import assembly
from demask.sparse import DCSR, sddmm, spmm
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.cpu_products import sddmm as sddmm_on_cpu
from sparse_cases import as_csr, csr, matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
INDEX = [torch.int32, torch.int64]


def one_dense_row(rows, columns):
    made = torch.zeros(rows, columns)
    made[rows // 2] = 1.0
    return made


MASKS = {
    "odd": lambda: matrix(37, 19, 0.3, dtype=torch.float32),
    "empty rows": lambda: matrix(50, 23, 0.02, dtype=torch.float32),
    "nothing": lambda: torch.zeros(5, 7),
    "one dense row": lambda: one_dense_row(9, 133),
    "full": lambda: torch.ones(6, 17),
    "one column": lambda: matrix(41, 1, 0.5, dtype=torch.float32),
    "one row": lambda: matrix(1, 67, 0.5, dtype=torch.float32),
    "no columns": lambda: torch.zeros(3, 0),
    "no rows": lambda: torch.zeros(0, 3),
}


def wanted(a, b, mask):
    """The sums in float64, in the order of CSR."""
    return (a.double() @ b.double().T)[mask != 0]


def close(found, reference):
    # float32: sums of at most 200 products near 1, in some order
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_sums_of_any_length(name, index):
    mask = MASKS[name]()
    for k in (1, 2, 7, 8, 16, 17, 40, 200):
        a, b = torch.randn(len(mask), k), torch.randn(mask.shape[1], k)
        given = as_csr(mask, index)
        for found in (sddmm(a, b, given, transposed=True), sddmm(a, b.T.contiguous(), given)):
            close(found.values(), wanted(a, b, mask))
            assert torch.equal(found.crow_indices(), given.crow_indices())
            assert torch.equal(found.col_indices(), given.col_indices())
        short = sddmm(a, b, DCSR.from_csr(given), transposed=True)
        assert torch.equal(short.values, found.values())
        assert torch.equal(short.to_csr().to_dense(), found.to_dense())


def test_sums_without_terms_are_zero():
    found = sddmm(torch.ones(3, 0), torch.ones(0, 4), as_csr(torch.ones(3, 4)))
    assert torch.equal(found.to_dense(), torch.zeros(3, 4))


def test_as_torch_samples():
    """torch multiplies nothing by the mask either; its values may be anything."""
    mask = matrix(30, 20, 0.3, dtype=torch.float32)
    a, b = torch.randn(30, 9), torch.randn(9, 20)
    theirs = torch.sparse.sampled_addmm(as_csr(mask), a, b, beta=0.0)
    close(sddmm(a, b, as_csr(mask)).values(), theirs.values().double())
    yes = as_csr(mask, values=torch.zeros(int((mask != 0).sum()), dtype=torch.bool))
    assert torch.equal(sddmm(a, b, yes).values(), sddmm(a, b, as_csr(mask)).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_numbers(dtype):
    mask = matrix(30, 20, 0.3, dtype=dtype)
    a, b = torch.randn(30, 40).to(dtype), torch.randn(20, 40).to(dtype)
    found = sddmm(a, b, as_csr(mask), transposed=True).values()
    assert found.dtype == dtype
    reference = wanted(a, b, mask)
    # narrow ones are summed in float32 and rounded once: within half a unit of the largest
    eps = max(torch.finfo(dtype).eps, 1e-14)
    assert (found.double() - reference).abs().max() <= eps * reference.abs().max()


def test_operands_lie_anyhow():
    mask = matrix(33, 21, 0.3, dtype=torch.float32)
    a, b = torch.randn(40, 34).T[1:, ::2], torch.randn(60, 20)[2:44:2]
    assert a.stride(1) != 1
    close(sddmm(a, b, as_csr(mask), transposed=True).values(), wanted(a, b, mask))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_sums(threads):
    mask = matrix(301, 200, 0.3, dtype=torch.float32)
    torch.manual_seed(0)
    a, b = torch.randn(301, 65), torch.randn(200, 65)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sddmm(a, b, as_csr(mask), transposed=True).values()
        torch.set_num_threads(threads)
        assert torch.equal(sddmm(a, b, as_csr(mask), transposed=True).values(), alone)
    finally:
        torch.set_num_threads(before)


def test_infinities_stay_where_they_are():
    mask = matrix(20, 20, 0.4, dtype=torch.float32)
    a, b = torch.randn(20, 5), torch.randn(20, 5)
    b[3] = torch.inf
    found, reference = sddmm(a, b, as_csr(mask), transposed=True).values(), wanted(a, b, mask)
    assert torch.equal(found.isfinite(), reference.isfinite())


@pytest.mark.parametrize(
    ("starts", "columns", "names", "words"),
    [
        ([0, 1, 2], [0, -1], None, "columns below 4"),
        ([0, 1, 2], [0, 4], None, "columns below 4"),
        ([0, 1, 2], [0, 2**31 - 1], None, "columns below 4"),
        ([0, 3, 2], [0, 1], None, "row starts that rise to 2"),
        ([-1, 1, 2], [0, 1], None, "row starts that rise to 2"),
        ([0, 1, 9], [0, 1], None, "row starts that rise to 2"),
        ([0, 2**31 - 1, 2], [0, 1], None, "row starts that rise to 2"),
        ([0, 1], [0], [2], "rows below 2"),
    ],
)
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_bad_indices_are_refused(starts, columns, names, words, index):
    crow, col, rows = (None if n is None else torch.tensor(n, dtype=index) for n in (starts, columns, names))
    m = CsrMatrix(crow, col, torch.ones(len(columns)), rows, (2, 4))
    with pytest.raises(BadInput, match=words):
        sddmm_on_cpu(m, torch.ones(2, 3), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("a", "b", "transposed", "words"),
    [
        (torch.ones(2, 3), torch.ones(4, 3), False, "give transposed=True"),
        (torch.ones(2, 3), torch.ones(3, 4), True, "give transposed=False"),
        (torch.ones(3, 3), torch.ones(3, 4), False, r"expected a \[m, k\]"),
        (torch.ones(2), torch.ones(3, 4), False, r"expected a \[m, k\]"),
        (torch.ones(2, 3), torch.ones(3, 4).double(), False, "one dtype"),
        (torch.ones(2, 3).int(), torch.ones(3, 4).int(), False, "floating-point"),
        (torch.ones(2, 3), torch.ones(3, 4).to_sparse(), False, "dense"),
        (torch.ones(2, 3), torch.ones(3, 4, device="meta"), False, "one device"),
        (torch.ones(2, 3).numpy(), torch.ones(3, 4), False, "dense tensors, got ndarray"),
    ],
)
def test_what_does_not_fit_is_refused(a, b, transposed, words):
    with pytest.raises(BadInput, match=words):
        sddmm(a, b, as_csr(torch.ones(2, 4)), transposed=transposed)
    with pytest.raises(BadInput, match="as returned by to_sparse_csr"):
        sddmm(torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["odd", "empty rows", "nothing", "one dense row"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients(name, transposed):
    mask = MASKS[name]()[:12, :15].double()
    a = torch.randn(len(mask), 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, mask.shape[1], dtype=torch.float64)
    b = (b.T.contiguous() if transposed else b).requires_grad_()
    given = as_csr(mask)

    def run(a, b):
        return sddmm(a, b, given, transposed=transposed).values()

    def short(a, b):
        return sddmm(a, b, DCSR.from_csr(given), transposed=transposed).values

    assert torch.autograd.gradcheck(run, (a, b))
    assert torch.autograd.gradcheck(short, (a, b))
    # torch's sparse tensors pass on no gradients of gradients: values of DCSR are plain
    assert torch.autograd.gradgradcheck(short, (a, b))


@pytest.mark.parametrize("kind", ["csr", "dcsr", "csc"])
def test_gradients_of_products_in_float32(kind):
    """Those of kernels are those of dense matrices."""
    w, bias = matrix(37, 29, 0.2, dtype=torch.float32), torch.randn(37, requires_grad=True)
    x = torch.randn(29, 21, requires_grad=True)
    values = w[w != 0].clone().requires_grad_()
    _, crow, col = csr(w)
    rows = torch.arange(37).repeat_interleave(crow.diff())
    dense = torch.zeros(37, 29).index_put((rows, col.long()), values)
    if kind == "csr":
        given = torch.sparse_csr_tensor(crow, col, values, w.shape, check_invariants=True)
        found = spmm(given, x, bias, "tanh")
    elif kind == "dcsr":
        short = DCSR.from_csr(as_csr(w))
        found = spmm(DCSR(short.rows, short.crow, short.col, values, short.size), x, bias, "tanh")
    else:
        csc = torch.sparse_csc_tensor(crow, col, values, (29, 37), check_invariants=True)
        found = spmm(x.T, csc, bias, "tanh").T
    reference = torch.tanh(dense @ x + bias[:, None])
    slope = torch.randn(37, 21)
    for one, other in zip(
        torch.autograd.grad(found, (values, x, bias), slope),
        torch.autograd.grad(reference, (values, x, bias), slope),
        strict=True,
    ):
        close(one, other.double())


def test_the_transposed_order_is_made_once(monkeypatch):
    from demask.sparse.products import gpu_formats as gpu_forms

    made = []
    inner = gpu_forms.transpose_of
    monkeypatch.setattr(gpu_forms, "transpose_of", lambda m: made.append(1) or inner(m))
    w = as_csr(matrix(20, 30, 0.2, dtype=torch.float32))
    crow, col, values = w.crow_indices(), w.col_indices(), w.values()
    for _ in range(3):
        x = torch.randn(30, 4, requires_grad=True)
        values = values.detach() * 0.9
        given = torch.sparse_csr_tensor(crow, col, values, (20, 30), check_invariants=True)
        spmm(given, x).sum().backward()
    assert len(made) == 1


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_code_for_every_target(isa):
    text = assembly([Sampled(partial=True, column_bits=64, named=True, more=True)], isa)
    spelled = {AVX512.name: "vfmadd", AVX2.name: "vfmadd", NEON.name: "fmla"}
    assert spelled[isa.name] in text


def test_doubly_compressed_matrices_are_compiled_and_exported():
    """torch.compile takes no sparse tensors; DCSR holds plain ones."""
    torch.manual_seed(0)
    w = DCSR.from_csr(as_csr(matrix(13, 9, 0.3, dtype=torch.float32)))
    a, b = torch.randn(13, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)

    def run(a, b):
        return spmm(sddmm(a, b, w, transposed=True), b, activation="relu") + spmm(w, b)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(a, b).square().sum(), (a, b)),
        torch.autograd.grad(run(a, b).square().sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)

    class Product(torch.nn.Module):
        def forward(self, b):
            return spmm(w, b)

    exported = torch.export.export(Product(), (b.detach(),)).module()
    assert torch.equal(exported(b), spmm(w, b))


@pytest.mark.parametrize("kind", ["csr", "dcsr"])
def test_indices_that_are_written_to_are_read_again(kind):
    """torch counts no writes into the indices of a sparse_csr tensor: networks whose mask moves."""
    torch.manual_seed(0)
    w = matrix(12, 9, 0.4, dtype=torch.float32)
    values, crow, col = csr(w)
    for _ in range(3):
        x = torch.randn(9, 4, requires_grad=True)
        given = torch.sparse_csr_tensor(crow, col, values, w.shape, check_invariants=False)
        row = torch.arange(12).repeat_interleave(crow.diff())
        dense = torch.zeros(12, 9).index_put((row, col.long()), values, accumulate=True)
        spmm(given if kind == "csr" else DCSR.from_csr(given), x).sum().backward()
        torch.testing.assert_close(x.grad, dense.T @ torch.ones(12, 4))
        col.copy_((col + 1) % 9)
