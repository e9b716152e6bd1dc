"""Sparse layers against torch's: all that one can ask of a layer, and what is made with layers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

import demask.sparse
from demask.errors import BadInput
from demask.ops.activations import ACTIVATIONS, act_of, activation_module, presets
from demask.sparse import SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
]
KINDS = {
    nn.Linear: SparseLinear,
    nn.Conv1d: SparseConv1d,
    nn.Conv2d: SparseConv2d,
    nn.ConvTranspose1d: SparseConvTranspose1d,
    nn.ConvTranspose2d: SparseConvTranspose2d,
}
#: layers and the shapes of their inputs
LAYERS = [
    (lambda: nn.Linear(37, 19), [(37,), (1, 37), (5, 37), (2, 3, 37), (0, 37)]),
    (lambda: nn.Linear(16, 1, bias=False), [(16,), (33, 16)]),
    (lambda: nn.Linear(1, 7), [(4, 1)]),
    (lambda: nn.Conv1d(6, 8, 3), [(2, 6, 11), (6, 11), (1, 6, 3)]),
    (lambda: nn.Conv1d(6, 9, 4, 2, 3, 2, 3), [(2, 6, 17)]),
    (lambda: nn.Conv1d(6, 6, 5, padding="same", groups=6, padding_mode="circular"), [(3, 6, 9)]),
    (lambda: nn.Conv2d(6, 10, 1), [(2, 6, 5, 7), (6, 5, 7), (1, 6, 1, 1), (0, 6, 5, 5)]),
    (lambda: nn.Conv2d(6, 10, 3, 2, 1, bias=False), [(2, 6, 9, 8), (1, 6, 1, 1)]),
    (lambda: nn.Conv2d(6, 10, (3, 2), (1, 3), (0, 2), (2, 1), 2), [(2, 6, 9, 8)]),
    (lambda: nn.Conv2d(6, 4, (2, 4), padding="same", dilation=(3, 1)), [(2, 6, 9, 8)]),
    (lambda: nn.Conv2d(6, 4, 3, padding="valid"), [(2, 6, 9, 8)]),
    (lambda: nn.Conv2d(6, 12, 3, padding=1, groups=6), [(2, 6, 9, 8)]),
    (lambda: nn.Conv2d(3, 16, 7, 2, 3), [(1, 3, 32, 32)]),
    (lambda: nn.Conv2d(4, 5, 3, padding=(2, 1), padding_mode="reflect"), [(2, 4, 9, 8)]),
    (lambda: nn.Conv2d(4, 5, 2, padding="same", padding_mode="replicate"), [(2, 4, 9, 8)]),
    (lambda: nn.ConvTranspose1d(6, 9, 4, 3, 2, 1, 3), [(2, 6, 7), (6, 7), (1, 6, 1)]),
    (lambda: nn.ConvTranspose1d(6, 4, 3), [(2, 6, 7)]),
    (lambda: nn.ConvTranspose2d(6, 4, 2, 2), [(2, 6, 5, 4), (6, 5, 4)]),
    (lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, 1), [(2, 6, 5, 4)]),
    (lambda: nn.ConvTranspose2d(6, 4, (3, 2), (3, 2), (0, 1), (2, 0), 2, False, (1, 2)), [(2, 6, 5, 4)]),
]


def pruned(layer: nn.Module, density: float = 0.4) -> nn.Module:
    """The layer with random zeros; its first row is dense and its second one is empty."""
    weight = layer.get_parameter("weight")
    with torch.no_grad():
        weight.mul_(torch.rand_like(weight) < density)
        if density and len(weight) > 2:
            weight[0], weight[1] = 0.5, 0.0
    return layer


@pytest.mark.parametrize(("make", "shapes"), LAYERS, ids=lambda a: str(a()) if callable(a) else "")
@pytest.mark.parametrize("density", [0.4, *(pytest.param(d, marks=pytest.mark.nightly) for d in (0.0, 1.0))])
def test_layers_compute_what_torch_computes(make, shapes, density):
    layer = pruned(make(), density)
    sparse = KINDS[type(layer)].from_dense(layer)
    double = copy.deepcopy(layer).double()
    for shape in shapes:
        x = torch.randn(shape)
        found, wanted = sparse(x), double(x.double())
        # float32: sums of at most 147 products in some order
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-6)
        found = copy.deepcopy(sparse).double()(x.double())
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", [make for make, _ in LAYERS], ids=lambda make: str(make()))
def test_layers_come_back(make):
    layer = pruned(make())
    sparse = KINDS[type(layer)].from_dense(layer)
    back = sparse.to_dense()
    assert repr(back) == repr(layer)
    assert back.state_dict().keys() == layer.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), layer.parameters(), strict=True))
    assert torch.equal(sparse.weight, layer.get_parameter("weight"))
    assert sparse.values.numel() == int((layer.get_parameter("weight") != 0).sum())


@pytest.mark.parametrize("activation", [*presets(), nn.Hardtanh(-0.5, 0.25), nn.GELU("tanh")], ids=str)
@pytest.mark.parametrize("make", [lambda: nn.Linear(9, 7), lambda: nn.Conv2d(3, 4, 3)])
def test_activations(make, activation):
    layer = pruned(make())
    sparse = KINDS[type(layer)].from_dense(layer, activation)
    x = torch.randn(2, 9) if isinstance(layer, nn.Linear) else torch.randn(2, 3, 6, 6)
    act = activation_module(act_of(activation))
    torch.testing.assert_close(sparse(x), act(layer(x)), rtol=1e-5, atol=2e-6)
    assert torch.equal(sparse.to_dense()(x), act(layer(x)))


def test_names_of_activations_are_those_of_modules():
    x = torch.linspace(-8, 8, 99)
    given = {"relu6": nn.ReLU6(), "leaky_relu": nn.LeakyReLU(), "gelu_tanh": nn.GELU("tanh")}
    modules = [m.target for entry in ACTIVATIONS.values() for m in entry.modules]
    for name, act in presets().items():
        plain = given.get(name) or next(m for m in modules if m.__name__.lower() == name)()
        assert act_of(plain) == act
        assert torch.equal(activation_module(act)(x), plain(x))


@pytest.mark.parametrize("activation", ["softmax", nn.Softmax(), nn.ReLU, 3])
def test_other_activations_are_refused(activation):
    with pytest.raises(BadInput, match="activation"):
        SparseLinear.from_dense(nn.Linear(2, 2), activation)


def test_matrices_in_and_out():
    weight = pruned(nn.Conv2d(4, 6, 3, groups=2)).weight
    csr = weight.detach().flatten(1).to_sparse_csr()
    layer = SparseConv2d(csr, kernel_size=3, groups=2)
    assert torch.equal(layer.weight, weight)
    assert layer.weight_csr.layout == torch.sparse_csr
    assert torch.equal(layer.weight_csr.to_dense(), weight.flatten(1))
    assert (layer.crow.dtype, layer.col.dtype) == (torch.int32, torch.int32)
    assert layer.density == layer.values.numel() / weight.numel()
    assert "density=0." in repr(layer)
    csr.values().zero_()
    assert torch.equal(layer.weight, weight)  # it has memory of its own


WRONG = [
    (lambda: SparseLinear(torch.ones(3)), "rows, columns"),
    (lambda: SparseLinear(torch.ones(3, 2).to_sparse()), "sparse_csr or dense"),
    (lambda: SparseLinear(torch.ones(3, 2, dtype=torch.int64)), "floating-point"),
    (lambda: SparseLinear(torch.ones(3, 2), torch.ones(2)), r"bias of shape \(3,\)"),
    (lambda: SparseLinear.from_dense(nn.Conv2d(1, 1, 1)), "expected nn.Linear"),
    (lambda: SparseConv2d.from_dense(nn.Conv1d(1, 1, 1)), "expected nn.Conv2d"),
    (lambda: SparseConv2d(torch.ones(3, 10), kernel_size=3), "kernel"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=(3,)), "kernel_size"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, stride=0), "stride"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, padding=-1), "padding"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, padding="full"), "padding"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, padding="same", stride=2), "stride"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, groups=2), "groups"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, padding_mode="wrap"), "padding mode"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3, output_padding=1), "output_padding"),
    (lambda: SparseConvTranspose2d(torch.ones(3, 9), kernel_size=3, stride=2, output_padding=2), "output_padding"),
    (lambda: SparseConvTranspose2d(torch.ones(3, 9), kernel_size=3, padding_mode="reflect"), "padding mode"),
    (lambda: SparseLinear(torch.ones(3, 2))(torch.ones(4, 3)), r"expected x \[..., 2\], got"),
    (lambda: SparseLinear(torch.ones(3, 2))(torch.tensor(1.0)), r"expected x \[..., 2\], got"),
    (lambda: SparseLinear(torch.ones(3, 2))(torch.ones(4, 2).double()), "torch.float32, got"),
    (lambda: SparseLinear(torch.ones(3, 2))(torch.ones(4, 2).long()), "torch.float32, got"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3)(torch.ones(1, 2, 5, 5)), "batch, 1, h"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3)(torch.ones(5, 5)), "batch, 1, height"),
    (lambda: SparseConv2d(torch.ones(3, 9), kernel_size=3)(torch.ones(1, 1, 2, 5)), "fit into"),
    (lambda: SparseConv1d(torch.ones(3, 3), kernel_size=3)(torch.ones(1, 1, 1, 5)), "length"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_what_does_not_fit_is_refused(wrong, words):
    with pytest.raises(BadInput, match=words):
        wrong()


def test_sizes_of_transposed_outputs():
    layer = pruned(nn.ConvTranspose2d(3, 4, 3, (3, 2), 1))
    sparse, x = SparseConvTranspose2d.from_dense(layer), torch.randn(2, 3, 4, 5)
    for height in (10, 11, 12):
        wanted = layer(x, output_size=[height, 9])
        found = sparse(x, output_size=[height, 9])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
        assert torch.equal(sparse(x, output_size=wanted.shape), found)
    for size in ([9, 9], [13, 9], [10]):
        with pytest.raises(BadInput, match="output size"):
            sparse(x, output_size=size)


def some() -> tuple[nn.Module, torch.Tensor]:
    """A network of sparse layers, an input."""
    net = nn.Sequential(
        SparseConv2d.from_dense(pruned(nn.Conv2d(3, 8, 3, padding=1)), "relu"),
        SparseConvTranspose2d.from_dense(pruned(nn.ConvTranspose2d(8, 4, 2, 2)), "silu"),
        nn.Flatten(2),
        SparseLinear.from_dense(pruned(nn.Linear(64, 5)), "gelu"),
    )
    return net, torch.randn(2, 3, 4, 4)


def test_copies_and_pickles():
    net, x = some()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), net(x))
        with torch.no_grad():
            other[0].values.mul_(2)
        assert not torch.equal(other(x), net(x))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(tmp_path, assign):
    net, x = some()
    other, _ = some()  # other nonzeros, and another number of them
    while other[3].col.shape == net[3].col.shape:
        other, _ = some()
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    state = safetensors.torch.load_file(tmp_path / "net.safetensors")
    other(x)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(x), net(x))
    assert set(net[3].state_dict()) == {"values", "crow", "col", "bias"}
    layer = SparseLinear.from_dense(nn.Linear(64, 6))
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(net[3].state_dict())


def test_hostile_state_dicts_are_refused():
    layer = SparseLinear.from_dense(pruned(nn.Linear(64, 5)))
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match="columns below 64"):
        layer.load_state_dict(state | {"col": state["col"] + 1000})
    with pytest.raises(BadInput, match="columns below 64"):
        layer(torch.ones(1, 64).double().float())


def test_training_finds_the_dense_weights():
    torch.manual_seed(0)
    goal = pruned(nn.Linear(8, 4), 0.5)
    layer = SparseLinear.from_dense(goal)
    with torch.no_grad():
        layer.values.add_(torch.randn_like(layer.values))
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    for _ in range(100):
        x = torch.randn(32, 8)
        loss = (layer(x) - goal(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3
    torch.testing.assert_close(layer.weight, goal.weight, rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    net, x = some()
    wanted = net(x)
    net.to(dtype)
    assert net[0].crow.dtype == torch.int32
    found = net(x.to(dtype))
    assert found.dtype == dtype
    allowed = {"rtol": 0.1, "atol": 0.1} if dtype != torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), wanted.double(), **allowed)


def test_autocast():
    net, x = some()
    wanted = net(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = net(x.bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)


def test_torch_compile():
    net, x = some()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)


def test_torch_export():
    net, x = some()
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(net.eval(), (x,), dynamic_shapes=shapes)
    again = torch.randn(5, 3, 4, 4)
    assert torch.equal(exported.module()(again), net(again))


def test_layers_keep_the_mode():
    layer = nn.Linear(2, 2).eval()
    assert not SparseLinear.from_dense(layer).training
    assert not SparseLinear.from_dense(layer, "relu").to_dense()[0].training


def test_public_names():
    assert {name for name in demask.sparse.__all__ if name.startswith("Sparse")} == {
        kind.__name__ for kind in KINDS.values()
    }
