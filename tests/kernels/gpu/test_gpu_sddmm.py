"""SDDMM and sparse times sparse by the kernels for GPUs: in Triton's interpreter, and on a GPU if
one is here. References are NumPy's, in float64."""

from __future__ import annotations

import pytest
import torch
from test_gpu_spmm import MATRICES

from demask.sparse.products.gpu_products import KernelChoice
from interpreted import CLOSE, DEVICES, error, nowhere, poisoned, rows_of, run_on
from sparse_cases import matrix

pytestmark = pytest.mark.parametrize("device", DEVICES)
nightly = pytest.mark.nightly
CHOICES = [
    KernelChoice("rows", 16, 32, 1),
    KernelChoice("rows", 8, 128, 1),
    KernelChoice("bitmap", 128, 32, 4),
    KernelChoice("bitmap", 64, 64, 4),
    KernelChoice("dense"),
]


def check(device, name, dtype, k, choice, plain=False, shift=0):
    """a @ b.T where the matrix has nonzeros; plain: b comes as [k, columns], and is turned."""
    from demask.sparse.products import gpu_products as gpu

    torch.manual_seed(0)
    w = MATRICES[name]()
    a, b = torch.randn(w.shape[0], k).to(dtype), torch.randn(w.shape[1], k).to(dtype)
    wanted = (a.double().numpy() @ b.double().numpy().T)[(w != 0).numpy()]
    m = rows_of(w.to(dtype), device, shift)
    a = nowhere(a, device, shift)
    b = nowhere(b.t(), device, shift).t() if plain else nowhere(b, device, shift)
    with poisoned(device):
        found = gpu.sddmm(m, a, b, choice)
        assert torch.equal(found, gpu.sddmm(m, a, b, choice))
    assert found.shape == wanted.shape
    assert error(found, wanted) <= CLOSE[dtype], (name, choice, error(found, wanted))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[2]], ids=str)
def test_every_matrix(device, name, choice):
    run_on(device, check, name, torch.float32, 19, choice)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_sums_of_any_length(device, choice):
    for k in (1, 130):
        run_on(device, check, "empty rows", torch.float16, k, choice)


@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[2]], ids=str)
def test_operands_lie_anyhow(device, choice):
    run_on(device, check, "odd", torch.float32, 40, choice, True)
    run_on(device, check, "odd", torch.bfloat16, 40, choice, False, 1)


@nightly
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_type(device, name, choice, dtype):
    run_on(device, check, name, dtype, 33, choice, True)


def check_planted(device):
    """One entry too few is found."""
    from demask.sparse.products import gpu_products as gpu
    from demask.sparse.products.gpu_formats import formats_of

    w = matrix(13, 75, 0.3)
    m, a = rows_of(w.float(), device), torch.ones(13, 4, device=device)
    begins, ends, rows = formats_of(m).parts(m, 16)
    formats_of(m)._derived["parts 16"] = begins[:-1], ends[:-1], rows[:-1]
    with poisoned(device):
        found = gpu.sddmm(m, a, torch.ones(75, 4, device=device), CHOICES[0])
    wanted = (a.cpu() @ torch.ones(4, 75)).double()[w != 0].numpy()
    assert not error(found, wanted) <= CLOSE[torch.float32]


def test_a_planted_fault_is_found(device):
    run_on(device, check_planted)


def check_pair(device, left, right, dtype):
    """Sparse times sparse: positions and values."""
    from demask.sparse.products import gpu_products as gpu

    a, b = left().to(dtype), right().to(dtype)
    size = (a.shape[0], b.shape[1])
    with poisoned(device):
        crow, col, values = gpu.sparse_product(rows_of(a, device), rows_of(b, device))
    found = torch.sparse_csr_tensor(crow, col, values, size, check_invariants=True).to_dense()
    wanted = a.double().numpy() @ b.double().numpy()
    there = ((a != 0).double() @ (b != 0).double()).numpy() > 0
    assert col.numel() == there.sum()
    assert error(found, wanted) <= CLOSE[dtype]


PAIRS = {
    "odd": (MATRICES["odd"], lambda: matrix(75, 21, 0.2, 7)),
    "empty rows": (MATRICES["empty rows"], lambda: torch.ones(40, 3)),
    "rows of b that are empty": (lambda: torch.ones(3, 24), MATRICES["empty rows"]),
    "nothing meets": (lambda: torch.eye(4).roll(1, 0)[:, :3], lambda: torch.zeros(3, 5)),
    "no columns": (MATRICES["no columns"], lambda: torch.zeros(0, 4)),
    "long rows": (lambda: torch.ones(2, 30), lambda: torch.ones(30, 9)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sparse_times_sparse(device, name):
    run_on(device, check_named_pair, name, torch.float32)


def check_named_pair(device, name, dtype):
    check_pair(device, *PAIRS[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sparse_times_sparse_in_narrow_types(device, dtype):
    run_on(device, check_named_pair, "odd", dtype)
