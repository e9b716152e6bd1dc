"""Sparse times dense by the kernels for GPUs: in Triton's interpreter, and on a GPU if one is here.

References are NumPy's, in float64. Memory that no one has written holds NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from demask.ops.activations import ACTIVATIONS, apply_activation
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products.gpu_formats import formats_of
from demask.sparse.products.gpu_products import KernelChoice, candidates
from interpreted import CLOSE, DEVICES, error, nowhere, poisoned, rows_of, run_on
from sparse_cases import matrix

pytestmark = pytest.mark.parametrize("device", DEVICES)
nightly = pytest.mark.nightly
ROWS = [KernelChoice("rows", 8, 32, 1), KernelChoice("rows", 1, 128, 1), KernelChoice("rows", 32, 8, 2)]
DENSE = KernelChoice("dense"), KernelChoice("cached")
FEW = {n: KernelChoice("rows", *shape) for n, shape in {1: (1, 1, 1, 32), 2: (4, 2, 2, 16), 4: (4, 4, 1, 8)}.items()}
FEW[8] = KernelChoice("rows", 16, 8, 4, 8)
TILES = [KernelChoice("bitmap", 128, 32, 4), KernelChoice("bitmap", 64, 16, 4, 3)]


def half_empty() -> torch.Tensor:
    w = matrix(24, 40, 0.3)
    w[::2] = 0
    return w


def one_long_row() -> torch.Tensor:
    w = matrix(5, 300, 0.03)
    w[3] = matrix(1, 300, 1.0)[0]
    return w


MATRICES = {
    "odd": lambda: matrix(13, 75, 0.3),
    "empty rows": half_empty,
    "no nonzeros": lambda: torch.zeros(5, 9),
    "one long row": one_long_row,
    "one element": lambda: torch.ones(1, 1),
    "no columns": lambda: torch.zeros(3, 0),
    "all there": lambda: torch.ones(4, 70),
}


def check(device, name, dtype, n, choice, act, lies="columns", shift=0):
    """One product against the reference; x [k, n] lies as told, memory begins `shift` elements
    behind an aligned address."""
    from demask.sparse.products import gpu_products as gpu

    torch.manual_seed(0)
    w = MATRICES[name]().to(dtype)
    m, x, bias = rows_of(w, device, shift), torch.randn(w.shape[1], n), torch.randn(len(w))
    x, bias = x.to(dtype), bias.to(dtype)
    wanted = w.double().numpy() @ x.double().numpy() + bias.double().numpy()[:, None]
    if act is not None:
        wanted = apply_activation(torch.from_numpy(wanted), act).numpy()
    x, bias = nowhere(x, device, shift), nowhere(bias, device, shift)
    x = x.t().contiguous().t() if lies == "rows" else x
    with poisoned(device):
        found = gpu.spmm(m, x, bias, act, choice)
        again = gpu.spmm(m, x, bias, act, choice)
    assert found.shape == wanted.shape
    assert torch.equal(found, again)
    assert error(found, wanted) <= CLOSE[dtype], (name, choice, error(found, wanted))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("choice", [ROWS[0], TILES[0], TILES[1]], ids=str)
def test_every_matrix(device, name, choice):
    run_on(device, check, name, torch.float32, 19, choice, ("relu", ()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize("choice", [ROWS[2], TILES[1]], ids=str)
def test_columns_of_x(device, n, choice):
    run_on(device, check, "empty rows", torch.float32, n, choice, None)
    run_on(device, check, "empty rows", torch.float32, n, choice, None, "rows")


def test_a_row_that_several_tasks_share(device):
    for choice in (ROWS[2], FEW[4]):
        run_on(device, check, "one long row", torch.float32, 3, choice, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", [ROWS[0], TILES[0], *DENSE], ids=str)
def test_narrow_types(device, dtype, choice):
    run_on(device, check, "odd", dtype, 5, choice, ("gelu", ()))


@pytest.mark.parametrize("choice", [ROWS[0], FEW[8], TILES[0]], ids=str)
def test_memory_that_begins_anywhere(device, choice):
    for shift in (1, 3):
        run_on(device, check, "empty rows", torch.float16, 8, choice, None, "columns", shift)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("choice", [ROWS[0], TILES[1]], ids=["rows", "bitmap"])
def test_activations(device, name, choice):
    """Of full rows; parts of a row are summed by `finish`, which has its own."""
    numbers = {"leaky_relu": (0.1,), "elu": (0.5,), "clamp": (-0.5, 0.75)}.get(name, ())
    run_on(device, check, "one element", torch.float32, 16, choice, (name, numbers))


def check_unread(device, choice):
    """Infinite values of other rows, and rows of x that meet no nonzero, are not read."""
    from demask.sparse.products import gpu_products as gpu

    w = matrix(10, 21, 0.4, dtype=torch.float32)
    w[:, 7], w[3] = 0, torch.inf
    x = torch.ones(21, 4)
    x[7] = torch.nan
    w[3, 7] = 0
    found = gpu.spmm(rows_of(w, device), x.to(device), None, None, choice).cpu()
    others = [k for k in range(10) if k != 3]
    assert torch.isinf(found[3]).all()
    wanted = np.delete(w.double().numpy(), 7, 1)[others] @ np.ones((20, 4))
    assert error(found[others], wanted) <= CLOSE[torch.float32]


@pytest.mark.parametrize("choice", [ROWS[0], FEW[4]], ids=str)
def test_nothing_else_is_read(device, choice):
    run_on(device, check_unread, choice)


def many_columns() -> torch.Tensor:
    w = torch.zeros(3, 65_539)
    w[:, [0, 7, 65_535, 65_536, 65_538]] = matrix(3, 5, 0.8).to(w.dtype)
    return w


def check_few_columns(device, name, dtype, n):
    """Columns that lanes of a warp sum: where x is not finite, too, as a sum over the nonzeros."""
    from demask.sparse.products import gpu_products as gpu

    torch.manual_seed(0)
    w = (MATRICES | {"many columns": many_columns})[name]().to(dtype)
    x, bias = torch.randn(w.shape[1], n).to(dtype), torch.randn(len(w)).to(dtype)
    choice = FEW[1 << (n - 1).bit_length()]
    for lies in ("columns", "rows"):
        for special in ((), (torch.inf, -torch.inf, torch.nan)):
            for k, value in enumerate(special[: len(x)]):
                x[-1 - k] = value
            terms = np.where(w[:, :, None] != 0, w[:, :, None].double() * x.double(), 0.0)
            wanted = terms.sum(1) + bias.double().numpy()[:, None]
            given = nowhere(x, device).t().contiguous().t() if lies == "rows" else nowhere(x, device)
            with poisoned(device):
                found = gpu.spmm(rows_of(w, device), given, nowhere(bias, device), None, choice)
            finite = np.isfinite(wanted)
            np.testing.assert_array_equal(found.cpu().double().numpy()[~finite], wanted[~finite])
            largest = np.abs(wanted[finite]).max(initial=1e-30)
            difference = np.abs(found.cpu().double().numpy()[finite] - wanted[finite]).max(initial=0)
            # the sums are in float32; the interpreter cuts bfloat16 off, where GPUs round
            assert difference / largest <= {torch.float32: 1e-6}.get(dtype, CLOSE[dtype])


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", [*MATRICES, "many columns"])
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_few_columns(device, name, n, dtype):
    run_on(device, check_few_columns, name, dtype, n)


def check_turned(device, name, dtype, choice):
    """The transposed product."""
    from demask.sparse.products import gpu_products as gpu

    torch.manual_seed(0)
    w = MATRICES[name]().to(dtype)
    y = torch.randn(len(w), 11).to(dtype)
    wanted = w.double().numpy().T @ y.double().numpy()
    with poisoned(device):
        found = gpu.spmm_transposed(rows_of(w, device), nowhere(y, device), choice)
    assert found.shape == wanted.shape
    assert error(found, wanted) <= CLOSE[dtype], error(found, wanted)


@pytest.mark.parametrize("name", ["odd", "no nonzeros", "one element", "no columns"])
@pytest.mark.parametrize(
    "choice", [ROWS[0], TILES[0], TILES[1], KernelChoice("dense"), KernelChoice("cached")], ids=str
)
def test_the_transposed_product(device, name, choice):
    run_on(device, check_turned, name, torch.float32, choice)


@pytest.mark.parametrize("choice", [ROWS[0], TILES[0]], ids=str)
def test_the_transposed_product_in_float16(device, choice):
    run_on(device, check_turned, "odd", torch.float16, choice)


def check_named(device, choice):
    """Rows with names: rows that are not there hold the bias."""
    from demask.sparse.products import gpu_products as gpu

    w = half_empty().float()
    m = rows_of(w, device)
    names = torch.arange(1, 24, 2, dtype=torch.int32, device=device)
    counts = m.crow.diff()[1::2]
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    m = m._replace(crow=crow, names=names)
    x, bias = torch.randn(40, 6), torch.randn(24)
    wanted = w.double().numpy() @ x.double().numpy() + bias.double().numpy()[:, None]
    with poisoned(device):
        given = x.to(device), bias.to(device), ("relu", ())
        assert error(gpu.spmm(m, *given, choice), wanted.clip(0)) <= CLOSE[torch.float32]
        assert torch.equal(gpu.densified(m).cpu(), w)
        turned = gpu.spmm_transposed(m, torch.ones(24, 3, device=device), choice)
    assert error(turned, w.double().numpy().T @ np.ones((24, 3))) <= CLOSE[torch.float32]


@pytest.mark.parametrize("choice", [ROWS[0], TILES[0]], ids=str)
def test_rows_with_names(device, choice):
    run_on(device, check_named, choice)


def check_loose(device):
    """Columns in any order, some of them twice, in 64 bits: no bitmap, and all the same."""
    from demask.sparse.products import gpu_products as gpu

    crow, col = torch.tensor([0, 3, 3, 5]), torch.tensor([4, 0, 4, 2, 1])
    m = CsrMatrix(crow.to(device), col.to(device), torch.arange(1.0, 6, device=device), None, (3, 6))
    w = torch.tensor([[2.0, 0, 0, 0, 4, 0], [0] * 6, [0, 5, 4, 0, 0, 0]])
    x = torch.randn(6, 4)
    assert formats_of(m).bitmap(m) is None
    assert torch.equal(gpu.densified(m).cpu(), w)
    assert {c.kind for c in candidates("spmm", m, 4, False, 4)} == {"rows", "dense"}
    for choice in (ROWS[0], FEW[4], KernelChoice("dense")):
        found = gpu.spmm(m, x.to(device), choice=choice)
        assert error(found, (w @ x).double().numpy()) <= CLOSE[torch.float32]


def test_columns_in_any_order(device):
    run_on(device, check_loose)


def check_every_candidate(device, dtype, n):
    from demask.sparse.products import gpu_products as gpu

    torch.manual_seed(1)
    w = matrix(70, 130, 0.1).to(dtype)
    m, x = rows_of(w, device), torch.randn(130, n).to(dtype)
    wanted = w.double().numpy() @ x.double().numpy()
    for task in ("spmm", "transposed"):
        for choice in candidates(task, m, n, True, 4):
            found = gpu.spmm(m, x.to(device), choice=choice) if task == "spmm" else None
            if found is None:
                y = torch.ones(70, n, dtype=dtype, device=device)
                other = w.double().numpy().T @ np.ones((70, n))
                found = gpu.spmm_transposed(m, y, choice)
                assert error(found, other) <= CLOSE[dtype], choice
            else:
                assert error(found, wanted) <= CLOSE[dtype], choice


@nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 20, 200])
def test_every_candidate(device, dtype, n):
    run_on(device, check_every_candidate, dtype, n)


@nightly
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("choice", [*ROWS, *TILES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_matrix_in_every_type(device, name, choice, dtype):
    for act in (None, ("silu", ())):
        run_on(device, check, name, dtype, 13, choice, act)


def check_planted(device):
    """A task that is forgotten, and a bit that is missing, are found."""
    from demask.sparse.products import gpu_products as gpu

    w = matrix(13, 75, 0.3, dtype=torch.float32)
    m, x = rows_of(w, device), torch.ones(75, 3, device=device)
    wanted = w.double().numpy() @ np.ones((75, 3))
    form, found = formats_of(m), []
    tasks, bits = form.tasks(m, 8), form.bitmap(m)
    bits.masks[0, 3] &= bits.masks[0, 3] - 1
    form._tasks[8, None] = tasks._replace(begins=tasks.begins[:-1])
    for choice in (ROWS[0], TILES[0]):
        with poisoned(device):
            found.append(error(gpu.spmm(m, x, choice=choice), wanted))
    assert not any(one <= CLOSE[torch.float32] for one in found)


def test_planted_faults_are_found(device):
    run_on(device, check_planted)
