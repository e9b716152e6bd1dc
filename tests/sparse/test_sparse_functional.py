"""spmm and its kernels: against float64, in bounds, refusing what does not fit."""

from __future__ import annotations

import signal
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.library import opcheck

import own_process
from demask.errors import BadInput
from demask.kernels.cpu.csr import isa_of_sums, pieces, vector
from demask.kernels.llvm.isa import AVX2, AVX512, NEON, host
from demask.kernels.llvm.jit import assembly
from demask.machine.clock import set_threads
from demask.ops.activations import activation_module, presets
from demask.sparse import DCSR, spmm
from demask.sparse.csr_matrix import CSR_NUMBERS
from demask.sparse.products import cpu_products
from demask.sparse.products.cpu_products import CsrMatrix, Options, SpmmTask, multiplied, shares, split_rows
from guarded import guarded
from night import at_night
from sparse_cases import as_csr, csr, matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
SIZES = [(1, 1), (5, 7), (37, 16), (64, 129)]
COLUMNS = [1, 2, 3, 8, 16, 17, 100]


def uneven(rows, columns, density, dtype=torch.float32):
    """A random matrix with a dense row and an empty one."""
    made = matrix(rows, columns, density, dtype=dtype)
    if density and rows > 2:
        made[rows // 2], made[0] = 1.5, 0.0
    return made


def exact(w, x, bias=None):
    """The product in float64."""
    y = w.double() @ x.double()
    return y if bias is None else y + bias.double()[:, None]


def close(found, wanted):
    # float32: sums of at most 129 products near 1, in some order
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("index", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.nightly)], ids=str)
def test_products_with_any_number_of_columns(size, density, index):
    w = uneven(*size, density)
    given, short = as_csr(w, index), DCSR.from_csr(as_csr(w, index))
    for n in COLUMNS:
        x = torch.randn(size[1], n)
        close(spmm(given, x), exact(w, x))
        close(spmm(short, x), exact(w, x))
        close(spmm(x.T, as_csr(w, index).to_dense().T.to_sparse_csc()), exact(w, x).T)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("n", [17, *at_night(0, 1, 2)])
@pytest.mark.parametrize("activation", [*presets(), None])
def test_bias_and_activation(n, activation):
    w, bias = uneven(40, 30, 0.1), torch.randn(40)
    x = torch.randn(30, n)
    act = activation_module(presets()[activation]) if activation else lambda y: y
    wanted = act(exact(w, x, bias))
    close(spmm(as_csr(w), x, bias, activation), wanted)
    close(spmm(DCSR.from_csr(as_csr(w)), x, bias, activation), wanted)
    close(spmm(x.T, w.T.to_sparse_csc(), bias, activation), wanted.T)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        w = uneven(301, 200, 0.3)
        for n in (1, 5, 64):
            x = torch.randn(200, n)
            assert w.count_nonzero() * n > 1 << 14
            close(spmm(as_csr(w), x), exact(w, x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.T.contiguous().T,
        lambda x: x.repeat(1, 2)[:, : x.shape[1]],
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].reshape(x.shape),
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["transposed", "part", "every other column", "every other row", "misaligned", "expanded"],
)
@pytest.mark.parametrize("n", COLUMNS)
def test_inputs_of_any_strides(change, n):
    w, x = uneven(20, 33, 0.3), change(torch.randn(33, n))
    values, crow, col = csr(w)
    close(spmm(as_csr(w), x), exact(w, x))
    odd = [torch.cat([t[:1], t])[1:] for t in (crow, col, values)]
    close(multiplied(CsrMatrix(*odd, None, (20, 33)), x, None, None), exact(w, x))


def test_values_at_odd_addresses():
    w, x = uneven(5, 40, 0.5), torch.randn(40, 1)
    values, crow, col = csr(w)
    memory = bytearray(4 * len(values) + 1)
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=1).copy_(values)
    assert odd.data_ptr() % 4
    close(multiplied(CsrMatrix(crow, col, odd, None, (5, 40)), x, None, None), exact(w, x))


def test_rows_longer_than_any_vector():
    w = uneven(3, 1000, 0.9)
    for n in (1, 4, 20):
        x = torch.randn(1000, n)
        torch.testing.assert_close(spmm(as_csr(w), x).double(), exact(w, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    w, x = uneven(12, 9, 0.4, dtype), torch.randn(9, 5, dtype=dtype)
    found = spmm(as_csr(w), x)
    assert found.dtype == dtype
    allowed = torch.finfo(dtype).eps * 16
    torch.testing.assert_close(found.double(), exact(w, x), rtol=allowed, atol=allowed)
    close(spmm(DCSR.from_csr(as_csr(w)), x).double(), found.double())


def test_infinities_meet_no_zeros():
    w = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    x = torch.tensor([[float("inf")], [3.0]])
    assert spmm(as_csr(w), x).tolist() == [[6.0], [float("inf")]]
    assert spmm(as_csr(w), torch.full((2, 3), float("nan"))).isnan().all()


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_of_two_sparse_matrices(density, dtype):
    a, b = uneven(13, 20, density, dtype), matrix(20, 17, density, 3, dtype)
    found = spmm(as_csr(a), as_csr(b))
    for left, right in ((as_csr(a), DCSR.from_csr(as_csr(b))), (DCSR.from_csr(as_csr(a)), as_csr(b))):
        assert torch.equal(spmm(left, right).to_dense(), found.to_dense())
    assert found.layout == torch.sparse_csr
    torch.sparse_csr_tensor(
        found.crow_indices(), found.col_indices(), found.values(), found.shape, check_invariants=True
    )
    allowed = 0.01 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.to_dense().double(), a.double() @ b.double(), rtol=allowed, atol=allowed)
    there = (a != 0).double() @ (b != 0).double()
    assert found.values().numel() == there.count_nonzero()


def test_doubly_compressed_matrices():
    w = torch.zeros(1000, 50)
    w[[3, 500, 999]] = matrix(3, 50, 0.5, dtype=torch.float32)
    short = DCSR.from_csr(as_csr(w))
    assert short.rows.tolist() == [3, 500, 999]
    assert short.crow.numel() == 4
    assert torch.equal(short.to_csr().to_dense(), w)
    x, bias = torch.randn(50, 6), torch.randn(1000)
    close(spmm(short, x, bias, "silu"), torch.nn.functional.silu(exact(w, x, bias)))


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


ONES = torch.ones(3)
WRONG_DCSR = {
    "rows that fall": (ints(2, 1), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "a row twice": (ints(1, 1), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "a row beyond": (ints(1, 3), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "a negative row": (ints(-1, 2), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "a column beyond": (ints(1, 2), ints(0, 1, 3), ints(0, 1, 3), ONES, (3, 3)),
    "starts that fall": (ints(1, 2), ints(0, 4, 3), ints(0, 1, 2), ONES, (3, 3)),
    "starts too few": (ints(1, 2), ints(0, 3), ints(0, 1, 2), ONES, (3, 3)),
    "values too few": (ints(1, 2), ints(0, 1, 3), ints(0, 1, 2), ONES[:2], (3, 3)),
    "mixed indices": (ints(1, 2).long(), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "float rows": (torch.ones(2), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 3)),
    "a size too large": (ints(1, 2), ints(0, 1, 3), ints(0, 1, 2), ONES, (3, 2**40)),
}


@pytest.mark.parametrize("name", WRONG_DCSR)
def test_matrices_that_make_no_sense_are_refused(name):
    with pytest.raises(BadInput):
        DCSR(*WRONG_DCSR[name])


W = matrix(4, 6, 0.5, dtype=torch.float32)
X = torch.ones(6, 3)
WRONG = {
    "shapes": (lambda: spmm(as_csr(W), torch.ones(5, 3)), r"\[m, k\] and \[k, n\], got"),
    "one axis": (lambda: spmm(as_csr(W), torch.ones(6)), r"\[m, k\] and \[k, n\], got"),
    "dense": (lambda: spmm(W, X), "got torch.strided @ torch.strided; give a sparse one"),
    "coo": (lambda: spmm(W.to_sparse(), X), "got torch.sparse_coo.*give w.to_sparse_csr"),
    "coo on the right": (lambda: spmm(DCSR.from_csr(as_csr(W)), X.to_sparse()), "give x.to_spar"),
    "csr on the right": (lambda: spmm(W, as_csr(X)), "got torch.strided @ torch.sparse_csr; give x.to_sparse_csc"),
    "DCSR on the right": (lambda: spmm(W, DCSR.from_csr(as_csr(X))), "got torch.strided @ DCSR"),
    "array": (lambda: spmm(as_csr(W), X.numpy()), "or DCSR, got ndarray"),
    "list": (lambda: spmm([[1.0]], X), "or DCSR, got list"),
    "csc on the left": (lambda: spmm(W.to_sparse_csc(), X), "got torch.sparse_csc"),
    "float64": (lambda: spmm(as_csr(W), X.double()), "one dtype"),
    "integers": (lambda: spmm(as_csr(W), X.long()), "one dtype"),
    "integer matrices": (lambda: spmm(as_csr(W.long()), X.long()), "floating-point"),
    "bias": (lambda: spmm(as_csr(W), X, torch.ones(3)), r"bias of shape \(4,\)"),
    "bias type": (lambda: spmm(as_csr(W), X, torch.ones(4).double()), "one dtype"),
    "bias on the right": (lambda: spmm(X.T, W.T.to_sparse_csc(), torch.ones(3)), "bias of shape"),
    "activation": (lambda: spmm(as_csr(W), X, activation="softmax"), "expected an activation"),
    "bias of a sparse product": (lambda: spmm(as_csr(W), as_csr(X), torch.ones(4)), "no bias"),
    "blocks": (lambda: spmm(W.to_sparse_bsr((2, 2)), X), "got torch.sparse_bsr"),
    "devices": (lambda: spmm(as_csr(W), X.to("meta")), "one device"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    wrong, words = WRONG[name]
    with pytest.raises(BadInput, match=words):
        wrong()


HOSTILE = {
    "a column beyond": lambda crow, col: (crow, torch.cat([col[:-1], col[-1:] * 0 + 30])),
    "a column far beyond": lambda crow, col: (crow, torch.cat([col[:-1], col[-1:] * 0 + 2**31 - 1])),
    "a negative column": lambda crow, col: (crow, torch.cat([col[:-1], col[-1:] * 0 - 1])),
    "a start beyond": lambda crow, col: (torch.cat([crow[:-1], crow[-1:] + 1]), col),
    "a start far beyond": lambda crow, col: (torch.cat([crow[:-1], crow[-1:] * 0 + 2**31 - 1]), col),
    "a negative start": lambda crow, col: (torch.cat([crow[:1] - 1, crow[1:]]), col),
    "starts that fall": lambda crow, col: (crow.flip(0), col),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hostile_indices_are_refused(name, index, dtype):
    w = matrix(40, 30, 0.5, dtype=dtype)
    w[-1] = 1.0
    values, crow, col = csr(w)
    crow, col = HOSTILE[name](crow.to(index), col.to(index))
    bad = torch.sparse_csr_tensor(crow, col, values, (40, 30), check_invariants=False)
    for n in COLUMNS:
        for _ in range(2):
            with pytest.raises(BadInput):
                spmm(bad, guarded(torch.ones(30, n, dtype=dtype)))
    close(spmm(as_csr(w, index), torch.ones(30, 3, dtype=dtype)), w.double().sum(1, True).expand(40, 3))


def test_indices_that_change_unseen_are_refused():
    values, crow, col = csr(matrix(4, 6, 1.0, dtype=torch.float32))
    w = torch.sparse_csr_tensor(crow, col, values, (4, 6), check_invariants=True)
    spmm(w, X)
    col[5] = 6  # w's own counter of versions does not see this
    with pytest.raises(BadInput):
        spmm(w, X)
    col[5], crow[2] = 5, 25
    with pytest.raises(BadInput):
        spmm(w, X)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("end", [True, False], ids=["end", "beginning"])
@pytest.mark.parametrize(
    ("index", "named"),
    [(torch.int64, True), *at_night((torch.int32, False), (torch.int32, True), (torch.int64, False))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kernels_stay_in_their_buffers(end, index, named, dtype):
    numbers = CSR_NUMBERS[dtype]
    for rows, columns, density in ((1, 1, 1.0), (5, 7, 0.5), (37, 50, 0.2), (6, 40, 0.0)):
        w = uneven(rows, columns, density, dtype)
        values, crow, col = (guarded(t, end) for t in csr(w))
        crow, col = (guarded(t.to(index), end) for t in (crow, col))
        names = guarded(torch.arange(rows, dtype=index), end) if named else None
        m, bias = (CsrMatrix(crow, col, values, names, (rows, columns)), guarded(torch.randn(rows, dtype=dtype), end))
        for n in (*COLUMNS, 31, 33):
            x, made = (guarded(torch.randn(*size, dtype=dtype), end) for size in ((columns, n), (rows, n)))
            options = Options(8 * index.itemsize, named, True, ("relu", ()), numbers=numbers)
            assert SpmmTask(n, options, 2).run(m, x, made, bias)
            close(made, exact(w, x, bias).relu())
            lanes = vector(n, isa_of_sums(host(), numbers))
            whole = guarded(torch.nn.functional.pad(x, (0, -n % lanes)), end)
            assert SpmmTask(n, options._replace(padded=True), 2).run(m, whole, made, bias)
            close(made, exact(w, x, bias).relu())


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="signals and mprotect as on Linux")
@pytest.mark.parametrize("end", [True, False])
def test_a_planted_overrun_is_caught(end):
    code = f"""
import ctypes, torch
from guarded import guarded
x = guarded(torch.ones(10), {end})
ctypes.string_at(x.data_ptr(), 40)
print("in bounds", flush=True)
ctypes.string_at(x.data_ptr() {"" if end else "- 4"}, 44)
"""
    status, out, _ = own_process.run(code)
    assert out == "in bounds\n"
    assert status == -signal.SIGSEGV


def test_shares_of_threads_have_about_as_many_nonzeros():
    counts = (np.random.default_rng(0).pareto(1.2, 500) * 10).astype(np.int64).clip(0, 2000)
    crow = torch.tensor([0, *counts.cumsum()])
    for threads in (1, 2, 3, 16):
        ends = shares(crow, threads)
        assert ends == sorted(ends) and (ends[0], ends[-1], len(ends)) == (0, 500, threads + 1)
        sums = [counts[a:b].sum() for a, b in pairwise(ends)]
        assert max(sums) <= counts.sum() / threads + counts.max()
    assert shares(torch.tensor([0, 9, 2, 40, 3]), 3)[-1] == 4  # invalid, but every row is in a share


@pytest.mark.parametrize("n", [1, 3, 20])
def test_parts_of_long_rows_are_added(n: int, monkeypatch) -> None:
    """With the same bits for any number of threads, and gradients; rows that are renumbered, too."""
    w, x, bias = uneven(40, 129, 0.1), torch.randn(129, n), torch.randn(40)
    unsplit = spmm(as_csr(w), x, bias, "silu")
    monkeypatch.setattr(cpu_products, "LONG", 4)
    monkeypatch.setattr(cpu_products, "WORK", 16)
    values, crow, col = csr(w)
    split = split_rows(CsrMatrix(crow, col, values, None, (40, 129)))
    assert split is not None and int(split.parts.crow.diff().max()) <= 4 and int(split.counts.max()) == 33
    results = []
    for threads in (1, 2, 3):
        with set_threads(threads):
            results.append(spmm(as_csr(w), x, bias, "silu"))
            torch.testing.assert_close(results[-1], unsplit, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(spmm(DCSR.from_csr(as_csr(w)), x, bias, "silu"), unsplit, rtol=1e-5, atol=2e-5)
    assert all(torch.equal(result, results[0]) for result in results)
    y = x.clone().requires_grad_()
    spmm(as_csr(w), y).sum().backward()
    torch.testing.assert_close(y.grad, w.sum(0)[:, None].expand_as(x), rtol=1e-5, atol=2e-5)
    rows = torch.tensor([0, 9, 2, 40], dtype=torch.int32)  # do not rise
    with pytest.raises(BadInput):
        multiplied(CsrMatrix(rows, torch.zeros(40, dtype=torch.int32), torch.ones(40), None, (3, 129)), x, None, None)


def test_threads_share_a_row_that_is_far_longer_than_others():
    counts = (np.random.default_rng(0).pareto(0.9, 20_000) * 100).astype(np.int64).clip(0, 3_000_000)
    crow = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
    col = torch.zeros(int(crow[-1]), dtype=torch.int32)
    split = split_rows(CsrMatrix(crow, col, col, None, (20_000, 1)))
    assert split is not None and len(split.parts.crow) < 20_000 + 300
    loads = []
    for starts in (crow, split.parts.crow):
        ends = shares(starts, 16)
        loads.append(max(int(starts[b] - starts[a]) for a, b in pairwise(ends)) / (int(crow[-1]) / 16))
    assert loads[0] > 1.8 and loads[1] <= 1.13  # of the mean: a part is 1/128 of all


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_kernels_compile_for_other_machines(isa):
    word = {"AVX-512": "zmm", "AVX2": "ymm", "NEON": "fmla"}[isa.name]
    for n in (1, 3, 100):
        kernels = [p.kernel for p in pieces(n, isa, Options(32, False, True, None)._asdict())]
        text = assembly(kernels, isa)
        assert n == 3 or word in text


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_pieces_cover_all_columns_once(isa):
    for n in range(1, 400):
        covered = []
        for p in pieces(n, isa, {}):
            if n == 1:
                covered += [0]
                continue
            kernel, whole = p.kernel, p.kernel.tile * p.kernel.lanes
            last = p.left if kernel.partial else kernel.lanes
            size = whole - kernel.lanes + last
            assert kernel.tile <= isa.registers // 4
            for tile in range(p.tiles):
                covered += range(p.first + tile * whole, p.first + tile * whole + size)
        assert covered == list(range(n))


def parts(dtype=torch.float64):
    """A matrix's parts and an input that want gradients."""
    values, crow, col = csr(matrix(6, 5, 0.5, dtype=dtype))
    x, bias = torch.randn(5, 3, dtype=dtype), torch.randn(6, dtype=dtype)
    return crow, col, [t.requires_grad_() for t in (values, x, bias)]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients(activation):
    crow, col, given = parts()

    def run(values, x, bias):
        w = torch.sparse_csr_tensor(crow, col, values, (6, 5), check_invariants=True)
        return spmm(w, x, bias, activation)

    def short(values, x, bias):
        rows = torch.arange(0, 12, 2, dtype=torch.int32)
        wide = torch.cat([bias, bias])
        return spmm(DCSR(rows, crow, col, values, (12, 5)), x, wide, activation)

    def right(values, x, bias):
        w = torch.sparse_csc_tensor(crow, col, values, (5, 6), check_invariants=True)
        return spmm(x.T, w, bias, activation)

    for function in (run, short, right):
        assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given)


def test_gradients_of_a_sparse_product():
    crow, col, (values, _, _) = parts()
    other, starts, columns = csr(matrix(5, 4, 0.5, 7))
    other.requires_grad_()

    def run(values, other):
        a = torch.sparse_csr_tensor(crow, col, values, (6, 5), check_invariants=True)
        b = torch.sparse_csr_tensor(starts, columns, other, (5, 4), check_invariants=True)
        return spmm(a, b).values()

    assert torch.autograd.gradcheck(run, (values, other))


@pytest.mark.parametrize("dtype", [torch.float32, *at_night(torch.float64)])
def test_torch_checks_the_op(dtype):
    crow, col, (values, x, bias) = parts(dtype)
    op = torch.ops.demask.spmm.default
    opcheck(op, (crow, col, values, None, [6, 5], x, bias, "silu", []))
    rows = torch.arange(0, 12, 2, dtype=torch.int32)
    opcheck(op, (crow, col, values, rows, [12, 5], x, None, "", []))


def test_torch_compile():
    crow, col, (values, x, bias) = parts(torch.float32)

    def run(values, x):
        return torch.ops.demask.spmm(crow, col, values, None, [6, 5], x, bias, "", [])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values, x), run(values, x))
    found, wanted = (
        torch.autograd.grad(function(values, x).square().sum(), (values, x)) for function in (compiled, run)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
