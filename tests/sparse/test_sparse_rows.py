"""Layers and products whose activations are sparse: against dense autograd in float64, what is not
multiplied, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.library import opcheck

from demask.errors import BadInput
from demask.kernels.cpu.sparse_rows import OPERANDS, SparseRows
from demask.kernels.llvm.isa import AVX2, AVX512, NEON
from demask.kernels.llvm.jit import assembly
from demask.sparse import DCSR, SparseLinear, spmm
from guarded import guarded
from sparse_cases import as_csr, csr, matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
LIMITS = {torch.float32: 2e-6, torch.float64: 1e-14}  # of the largest: sums of some hundred products
CASES = {  # tokens, inputs, outputs, density of x, density of w
    "few": (33, 70, 21, 0.04, 0.3),
    "decompressed": (33, 70, 21, 0.4, 0.3),
    "one input": (40, 1, 7, 0.05, 0.6),
    "one output": (9, 300, 1, 0.03, 0.5),
    "one token": (1, 500, 30, 0.05, 0.1),
    "no nonzeros of x": (5, 9, 4, 0.0, 0.5),
    "no nonzeros of w": (50, 40, 4, 0.05, 0.0),
    "a dense weight": (50, 40, 11, 0.05, 1.0),
}


def error(found, wanted):
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item() if wanted.numel() else 0


def operands(name, dtype, seed=0):
    """x and w with an empty row each and, of large ones, a dense row of w; a bias."""
    tokens, inputs, outputs, of_x, of_w = CASES[name]
    x, w = matrix(tokens, inputs, of_x, seed, dtype), matrix(outputs, inputs, of_w, seed + 1, dtype)
    if of_w and outputs > 4:
        w[1], w[2] = 0, 1.5
    x[tokens // 2] = 0
    return x, w, torch.randn(outputs, dtype=dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, DCSR], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_sparse_activations(name, kind, dtype):
    x, w, bias = operands(name, dtype)
    layer, values = SparseLinear(w, bias, "tanh"), x[x != 0].requires_grad_()
    given = as_csr(x, torch.int64 if kind is DCSR else kind, values)
    if kind is DCSR:
        short = DCSR.from_csr(given.detach())
        given = DCSR(short.rows, short.crow, short.col, values, short.size)
    found = layer(given)
    dense = [t.double().requires_grad_() for t in (x, w, bias)]
    wanted = torch.tanh(nn.functional.linear(*dense))
    slope = torch.rand(wanted.shape, dtype=dtype)  # positive: the bias's sums do not cancel
    found.backward(slope)
    wanted.backward(slope.double())
    assert found.is_contiguous() and found.dtype == dtype
    pairs = [(found, wanted), (values.grad, dense[0].grad[x != 0]), (layer.values.grad, dense[1].grad[w != 0])]
    for one, other in (*pairs, (layer.bias.grad, dense[2].grad)):
        assert one.shape == other.shape and error(one, other) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_numbers_are_rounded_once(dtype):
    for name in ("few", "decompressed"):
        x, w, _ = operands(name, dtype)
        found = SparseLinear(w)(as_csr(x))
        assert found.dtype == dtype and error(found, x.double() @ w.double().T) <= torch.finfo(dtype).eps


def test_products_with_a_transposed_matrix():
    """Leaves that are sparse tensors have sparse gradients."""
    x, w, bias = operands("few", torch.float64)
    left, right = (as_csr(t, torch.int64).requires_grad_() for t in (x, w))
    spmm(left, right.t(), bias, "relu").square().sum().backward()
    dense = [t.clone().requires_grad_() for t in (x, w)]
    nn.functional.linear(*dense, bias).relu().square().sum().backward()
    for one, other in zip((left, right), dense, strict=True):
        assert one.grad.layout == torch.sparse_csr
        assert error(one.grad.values(), other.grad[other != 0]) <= 1e-14
    assert torch.equal(spmm(DCSR.from_csr(left.detach()), right.detach().t()), spmm(left, right.t()))


@pytest.mark.parametrize("name", ["few", "decompressed"])
def test_gradients_of_any_order(name):
    x, w, _ = operands(name, torch.float64)
    (_, crow, col), (_, w_crow, w_col) = csr(x), csr(w)

    def run(values, w_values):
        return torch.ops.demask.sparse_rows(crow, col, values, w_crow, w_col, w_values, None, x.shape[1])

    given = x[x != 0].requires_grad_(), w[w != 0].requires_grad_()
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)
    y = torch.randn(len(x), len(w), dtype=torch.float64, requires_grad=True)
    for missing in range(3):
        three = [None if k == missing else t for k, t in enumerate((*given, y))]
        opcheck(torch.ops.demask.sparse_rows.default, (crow, col, three[0], w_crow, w_col, *three[1:], x.shape[1]))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr("demask.sparse.products.cpu_products.threads_for", lambda products: threads)
    test_a_layer_of_sparse_activations("few", torch.int32, torch.float64)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("end", [True, False])
def test_kernels_stay_in_their_buffers(end, dtype):
    for name in ("few", "one input", "one output", "one token", "a dense weight"):
        x, w, _ = operands(name, dtype)
        (values, crow, col), (w_values, w_crow, w_col) = ([guarded(t, end) for t in csr(m)] for m in (x, w))
        y = guarded(torch.randn(len(x), len(w), dtype=dtype), end)
        given = values, w_values, y
        for k, wanted in enumerate(((y @ w)[x != 0], (y.T @ x)[w != 0], x @ w.T)):
            three = [None if j == k else t for j, t in enumerate(given)]
            found = torch.ops.demask.sparse_rows(crow, col, three[0], w_crow, w_col, *three[1:], x.shape[1])
            assert error(found, wanted.double()) <= 4 * LIMITS[dtype]


def test_numbers_where_a_weight_is_zero_are_not_multiplied():
    w = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    x = torch.zeros(40, 2)
    x[3], x[5, 1] = torch.tensor([3.0, torch.nan]), torch.inf
    layer, values = SparseLinear(w), x[x != 0].requires_grad_()
    y = layer(as_csr(x, values=values))
    y.sum().backward()
    assert y[3].tolist() == [6.0, 0.0] and not y[4:].any()
    assert layer.values.grad.tolist() == [3.0] and values.grad.tolist() == [2.0, 0.0, 0.0]


def test_nothing_dense_is_allocated():
    """Neither a weight, nor activations that are sparse enough."""
    layer = SparseLinear(matrix(1000, 2000, 0.005, dtype=torch.float32))
    x = as_csr(matrix(500, 2000, 0.01, 1, torch.float32), torch.int64).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        layer(x).square().sum().backward()
    assert x.grad is not None and layer.values.grad is not None
    assert max(event.self_cpu_memory_usage for event in recorded.events()) <= 4 * 500 * 1000  # the output


@pytest.mark.parametrize("name", ["few", "decompressed"])
def test_compiled_steps(name):
    torch._dynamo.reset()
    x, w, bias = operands(name, torch.float32)
    layer = SparseLinear(w, bias, "relu")
    short = DCSR.from_csr(as_csr(x, torch.int64))

    def step(values):
        return layer(DCSR(short.rows, short.crow, short.col, values, short.size)).square().sum()

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        values = short.values.clone().requires_grad_()
        loss = run(values)
        found.append((loss, *torch.autograd.grad(loss, (values, *layer.parameters()))))
    assert all(map(torch.equal, *found))


def test_a_network_of_sparse_inputs_trains_as_its_dense_twin():
    torch.manual_seed(0)
    dense = nn.Linear(200, 16)
    with torch.no_grad():
        dense.weight *= torch.rand_like(dense.weight) < 0.2
    twin, head = SparseLinear.from_dense(dense, "relu"), nn.Linear(16, 3)
    mask, labels = dense.weight.detach() != 0, torch.randint(0, 3, (64,))
    words = torch.rand(64, 200) * (torch.rand(64, 200) < 0.05)
    curves = []
    for net, x, first in (
        (nn.Sequential(dense, nn.ReLU(), head), words, dense.weight),
        (nn.Sequential(twin, head), words.to_sparse_csr(), None),
    ):
        start = {key: value.clone() for key, value in head.state_dict().items()}
        optimizer, curve = torch.optim.SGD(net.parameters(), 0.5), []
        for _ in range(30):
            loss = nn.functional.cross_entropy(net(x), labels)
            optimizer.zero_grad()
            loss.backward()
            if first is not None:
                first.grad *= mask
            optimizer.step()
            curve.append(loss.item())
        head.load_state_dict(start)
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] - 0.02
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) <= 1e-5


X, LAYER = matrix(20, 6, 0.05, 2, torch.float32), SparseLinear(matrix(4, 6, 0.5, dtype=torch.float32), torch.ones(4))


def bad(crow, col, layer=LAYER):
    return layer(torch.sparse_csr_tensor(crow, col, torch.ones(2), (2, 6), check_invariants=False))


def moved():
    layer = SparseLinear(torch.ones(4, 6))
    layer.col[3] = 6
    return layer


REFUSED = {
    "columns": (lambda: LAYER(as_csr(X[:, :5])), r"expected x \[tokens, 6\]"),
    "float64": (lambda: LAYER(as_csr(X.double())), "torch.float64"),
    "coo": (lambda: LAYER(X.to_sparse()), "expected dense"),
    "csc": (lambda: LAYER(X.to_sparse_csc()), "expected dense"),
    "a column beyond": (lambda: bad(torch.tensor([0, 1, 2]), torch.tensor([0, 6])), "columns below 6"),
    "a negative column": (lambda: bad(torch.tensor([0, 1, 2]), torch.tensor([0, -1])), "columns below 6"),
    "starts that fall": (lambda: bad(torch.tensor([0, 3, 2]), torch.tensor([0, 1])), "row starts that rise"),
    "a weight's column": (lambda: bad(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), moved()), "columns below 6"),
    "bias": (lambda: spmm(as_csr(X), as_csr(X).t(), torch.ones(3)), "expected a bias"),
    "sizes": (lambda: spmm(as_csr(X), as_csr(X[:, :5]).t()), r"matrices \[m, k\]"),
    "dtypes": (lambda: spmm(as_csr(X), as_csr(X.double()).t()), "one dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    wrong, words = REFUSED[name]
    for _ in range(2):
        with pytest.raises(BadInput, match=words):
            wrong()


def test_indices_that_change_are_read_again():
    layer = SparseLinear(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
    x = as_csr(torch.eye(3).repeat(20, 1) * torch.tensor([1.0, 1.0, 0.0]))
    layer(x)
    layer.col[0] = 2
    assert torch.equal(layer(x), nn.functional.linear(x.to_dense(), layer.weight))


@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_code_for_every_target(isa):
    for numbers in ("f32", "f64"):
        assert "fm" in assembly([SparseRows(of, numbers) for of in OPERANDS], isa)
