"""What calls the kernels for GPUs: ops and their gradients, programs, public functions; and that
nothing is imported before it is needed. What needs a GPU is skipped without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from demask.exec.steps import reference as dense
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import SparseWeight, conv_step, linear_step, mean_step
from demask.sparse import DCSR, SparseConv2d, SparseLinear, spmm
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.functional import sparse_product
from demask.sparse.products import gpu_segment
from demask.sparse.products import gradient_ops as gpu_ops
from interpreted import DEVICES, error, rows_of, run_on
from sparse_cases import csr, matrix, weight

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def parts(dtype=torch.float64):
    """A matrix, and a [rows, n], b [columns, n] that want gradients."""
    values, crow, col = csr(matrix(6, 5, 0.5, dtype=dtype))
    a, b = torch.randn(6, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    return crow, col, [t.requires_grad_() for t in (values, a, b)]


@pytest.mark.parametrize("named", [False, True])
def test_gradients(named):
    crow, col, (values, a, b) = parts()
    size, names = (6, 5), None
    if named:
        size, names = (12, 5), torch.arange(0, 12, 2, dtype=torch.int32)
        a = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def turned(values, a):
        return gpu_ops.transposed_product(CsrMatrix(crow, col, values, names, size), a)

    def sampled(a, b):
        return gpu_ops.sampled(CsrMatrix(crow, col, values, names, size), a, b)

    for function, given in ((turned, (values, a)), (sampled, (a, b))):
        assert torch.autograd.gradcheck(function, given)
        assert torch.autograd.gradgradcheck(function, given)


def test_ops_are_what_they_say():
    crow, col, (values, a, b) = parts()
    w = torch.sparse_csr_tensor(crow, col, values, (6, 5), check_invariants=True).to_dense()
    m = CsrMatrix(crow, col, values, None, (6, 5))
    torch.testing.assert_close(gpu_ops.transposed_product(m, a), w.t() @ a)
    torch.testing.assert_close(gpu_ops.sampled(m, a, b), (a @ b.t())[w != 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_checks_the_ops(dtype):
    crow, col, (values, a, b) = parts(dtype)
    opcheck(torch.ops.demask.spmm_transposed.default, (crow, col, values, None, [6, 5], a))
    opcheck(torch.ops.demask.sampled.default, (crow, col, None, [6, 5], a, b))


def test_outputs_on_a_gpu_lie_as_inputs_do():
    """Told without a GPU: tokens are columns, and their rows of results are side by side."""
    with FakeTensorMode():
        crow, col = (torch.empty(n, dtype=torch.int32, device="cuda:0") for n in (7, 3))
        values, x = torch.empty(3, device="cuda:0"), torch.empty(5, 4, device="cuda:0")
        other = torch.empty(4, 5, device="cuda:0").t()
        for one, strides in ((x, (4, 1)), (other, (1, 6))):
            found = torch.ops.demask.spmm(crow, col, values, None, [6, 5], one, None, "", [])
            assert (found.shape, found.stride()) == ((6, 4), strides)


def network():
    """Convolutions of every kind, a residual sum, a mean and a linear layer."""
    shapes = ((8, 4), (8, 72), (4, 8), (3, 4))
    found = [csr(matrix(*shape, 0.4, k, torch.float32)) for k, shape in enumerate(shapes)]
    weights = [t for one in found for t in one]
    spans = []
    for k, (values, crow, _) in enumerate(found):
        n = len(values)
        spans.append(SparseWeight((3 * k, 0, n), (3 * k + 1, 0, len(crow)), (3 * k + 2, 0, n)))
    weights.append(torch.randn(8))
    relu = ("relu", ())
    steps = (
        conv_step(0, spans[0], (12, 0, 8), 8, (1, 1), act=relu),
        conv_step(1, spans[1], (12, 0, 8), 8, (3, 3), padding=((1, 1), (1, 1)), act=relu, add=1),
        conv_step(2, spans[2], None, 4, (1, 1), stride=(2, 2)),
        mean_step(3, True),
        conv_step(4, spans[3], None, 3, (1, 1), act=("silu", ())),
    )
    return SegmentProgram(("image",), steps, (5, 3)), weights


@pytest.mark.parametrize("batch", [1, 2])
def test_programs_are_what_they_are_elsewhere(batch):
    """The walk that a GPU takes, with ops of the CPU."""
    program, weights = network()
    x = torch.randn(batch, 4, 6, 6)
    found = gpu_segment.run(program, [x], weights)
    for a, b in zip(found, dense.run(program, [x], weights), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_programs_are_what_they_are_elsewhere():
    values, crow, col = csr(matrix(6, 5, 0.5, dtype=torch.float64))
    step = linear_step(0, weight(6, len(values)), (3, 0, 6), 6, ("silu", ()))
    program, bias = SegmentProgram(("tokens",), (step,), (1,)), torch.randn(6, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    made = []
    for run in (gpu_segment.run, dense.run):
        given = [t.clone().requires_grad_() for t in (x, values, bias)]
        (y,) = run(program, [given[0]], [given[1], crow, col, given[2]])
        made.append(torch.autograd.grad(y.square().sum(), given))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


def check_dispatch(device):
    """The op's kernel for devices other than the CPU, on tensors that say they are on a GPU."""
    from demask.sparse.products import gpu_products as gpu
    from demask.sparse.products import spmm_op as product

    w, x = matrix(13, 20, 0.4, dtype=torch.float32), torch.randn(20, 4)
    m, before = rows_of(w, device), product.kernels
    product.kernels = lambda x: gpu
    try:
        found = product.on_other_devices(*m[:4], list(m.size), x.to(device), None, "relu", [])
    finally:
        product.kernels = before
    assert error(found, (w.double() @ x.double()).clamp(min=0).numpy()) <= 2e-6


@pytest.mark.parametrize("device", DEVICES)
def test_the_op_calls_kernels(device):
    run_on(device, check_dispatch)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_spmm_on_a_gpu(dtype):
    w = matrix(130, 200, 0.2, dtype=dtype)
    x, bias = torch.randn(200, 17).to(dtype), torch.randn(130).to(dtype)
    wanted = (w.double() @ x.double() + bias.double()[:, None]).relu().numpy()
    close = 2e-6 if dtype != torch.bfloat16 else 5e-3
    there, given = w.to_sparse_csr().cuda(), (x.cuda(), bias.cuda(), "relu")
    assert error(spmm(there, *given), wanted) <= close
    assert error(spmm(DCSR.from_csr(there), *given), wanted) <= close
    right = spmm(x.t().cuda(), w.t().to_sparse_csc().cuda(), bias.cuda(), "relu")
    assert error(right, wanted.T) <= close
    both = sparse_product(there, x.to_sparse_csr().cuda()).to_dense()
    assert error(both, (w.double() @ x.double()).numpy()) <= close


@gpu
def test_layers_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for layer, x in (
        (nn.Linear(70, 90), torch.randn(3, 5, 70)),
        (nn.Conv2d(8, 16, 1), torch.randn(2, 8, 9, 9)),
        (nn.Conv2d(8, 16, 3, padding=1), torch.randn(2, 8, 9, 9)),
    ):
        with torch.no_grad():
            layer.weight *= torch.rand_like(layer.weight) < 0.2
        kind = SparseLinear if isinstance(layer, nn.Linear) else SparseConv2d
        sparse = kind.from_dense(layer).cuda()
        with torch.no_grad():
            assert error(sparse(x.cuda()), layer.double()(x.double()).numpy()) <= 2e-6
        sparse(x.cuda()).square().sum().backward()
        layer(x.double()).square().sum().backward()
        there = layer.weight != 0
        wanted = layer.weight.grad[there].numpy()
        assert error(sparse.values.grad, wanted) <= 2e-5


@gpu
def test_compiled_and_exported_on_a_gpu():
    layer = nn.Linear(64, 96)
    with torch.no_grad():
        layer.weight *= torch.rand_like(layer.weight) < 0.2
    sparse, x = SparseLinear.from_dense(layer).cuda().eval(), torch.randn(7, 64).cuda()
    with torch.no_grad():
        wanted = sparse(x)
        torch.testing.assert_close(torch.compile(sparse, fullgraph=True)(x), wanted)
        torch.testing.assert_close(torch.export.export(sparse, (x,)).module()(x), wanted)
