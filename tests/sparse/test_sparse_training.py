"""Layers whose nonzeros are trained: kernels against dense layers in float64, what they are not
for, what is made once, training from the start."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.library import opcheck

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.sparse import SparseConv1d, SparseConv2d, SparseConvTranspose1d, SparseConvTranspose2d, SparseLinear
from demask.sparse.products import conv_products as planes
from demask.sparse.segment import segment_op as op
from demask.sparse.trained_layers import takes

# of the largest: sums of some hundred products
LIMITS = {torch.float32: 2e-6, torch.float64: 1e-14}
CLOSE = LIMITS[torch.float32]


def pruned(layer, density=0.3):
    """The layer with so many of its weights, drawn with a seed; a row and a column are empty."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight *= torch.rand(layer.weight.shape, generator=g) < density
        if density < 1 and min(layer.weight.shape[:2]) > 2:
            layer.weight[1], layer.weight[:, 1] = 0, 0
    return layer


def as_matrix(layer, weight):
    """A weight of torch's layer as sparse layers have it: a row per output channel."""
    if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d):
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def error(found, wanted):
    """The largest difference, of the largest value."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


def check(dense, kind, x):
    """Output and gradients of the layer, in float32 and float64, are those of the dense one in float64."""
    for dtype in LIMITS:
        check_in(dtype, dense, kind, x)


def check_in(dtype, dense, kind, x):
    layer, exact = kind.from_dense(dense).to(dtype), copy.deepcopy(dense).double()
    inputs = x.to(dtype, copy=True).requires_grad_(), x.double().requires_grad_()
    found, wanted = layer(inputs[0]), exact(inputs[1])
    assert found.is_contiguous() and found.shape == wanted.shape
    slope = torch.randn(found.shape, dtype=dtype)
    found.backward(slope)
    wanted.backward(slope.double())
    rows = as_matrix(dense, dense.weight)
    pairs = [(found, wanted), (inputs[0].grad, inputs[1].grad)]
    pairs.append((layer.values.grad, as_matrix(dense, exact.weight.grad)[rows != 0]))
    if layer.bias is not None:
        pairs.append((layer.bias.grad, exact.bias.grad))
    for one, other in pairs:
        assert other.numel() == 0 or error(one, other) <= LIMITS[dtype], error(one, other)


@pytest.fixture
def by_kernels(monkeypatch):
    """Fails where gradients are computed by ATen ops."""

    def refuse(*given):
        raise AssertionError("dense gradients")

    monkeypatch.setattr(op, "recomputed", refuse)


CONVS = {
    "3x3": ({"kernel_size": 3, "padding": 1}, (5, 6, 12, 10)),
    "no bias": ({"kernel_size": 3, "padding": 1, "bias": False}, (2, 6, 9, 9)),
    "1x1": ({"kernel_size": 1}, (3, 6, 7, 5)),
    "1x1 strided": ({"kernel_size": 1, "stride": 2}, (3, 6, 8, 9)),
    "strided, odd": ({"kernel_size": 3, "padding": 1, "stride": 2}, (3, 6, 11, 12)),
    "strided, even": ({"kernel_size": 3, "padding": 1, "stride": 2}, (3, 6, 12, 11)),
    "all at once": (
        {"kernel_size": (5, 2), "padding": (2, 3), "dilation": (1, 3), "stride": (3, 2), "groups": 2},
        (3, 6, 14, 17),
    ),
    "depthwise": ({"kernel_size": 3, "padding": 1, "groups": 6}, (2, 6, 9, 8)),
    "dilated": ({"kernel_size": 3, "dilation": 2}, (2, 6, 40, 33)),
    "one pixel": ({"kernel_size": 3, "padding": 1}, (4, 6, 1, 1)),
    "one pixel is left": ({"kernel_size": 5}, (4, 6, 5, 5)),
    "one image": ({"kernel_size": 3, "padding": 1}, (1, 6, 20, 20)),
    "reflected": ({"kernel_size": 5, "padding": "same", "padding_mode": "reflect"}, (2, 6, 9, 8)),
    "uneven padding": ({"kernel_size": 4, "padding": "same"}, (2, 6, 9, 8)),
    "stride beyond the kernel": ({"kernel_size": 2, "stride": 5}, (2, 6, 14, 18)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONVS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_convolutions(name, threads, by_kernels):
    options, shape = CONVS[name]
    torch.manual_seed(0)
    dense = pruned(nn.Conv2d(6, 12, **options))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(dense, SparseConv2d, torch.randn(shape))
    finally:
        torch.set_num_threads(before)


TRANSPOSED = {
    "3x3": ({"kernel_size": 3, "padding": 1}, (3, 6, 9, 7)),
    "strided": ({"kernel_size": 3, "stride": 2, "padding": 1}, (3, 6, 6, 5)),
    "output_padding": ({"kernel_size": 3, "stride": 3, "padding": 1, "output_padding": (1, 2)}, (2, 6, 5, 4)),
    "gaps": ({"kernel_size": 2, "stride": 4, "output_padding": 1}, (2, 6, 5, 4)),
    "all at once": (
        {"kernel_size": (5, 2), "padding": (2, 1), "dilation": (1, 3), "stride": (3, 2), "groups": 2},
        (3, 6, 7, 9),
    ),
    "depthwise": ({"kernel_size": 4, "stride": 2, "padding": 1, "groups": 6}, (2, 6, 5, 8)),
    "padding beyond the kernel": ({"kernel_size": 2, "padding": 2}, (2, 6, 9, 8)),
    "one pixel": ({"kernel_size": 3}, (4, 6, 1, 1)),
    "one pixel is left": ({"kernel_size": 3, "padding": 1, "bias": False}, (4, 6, 1, 1)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name, threads, by_kernels):
    options, shape = TRANSPOSED[name]
    torch.manual_seed(0)
    dense = pruned(nn.ConvTranspose2d(6, 12, **options))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(dense, SparseConvTranspose2d, torch.randn(shape))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("stride", [1, 2])
def test_signals_and_inputs_without_a_batch(stride, by_kernels):
    torch.manual_seed(0)
    signal = pruned(nn.Conv1d(4, 6, 3, stride, padding=1))
    check(signal, SparseConv1d, torch.randn(3, 4, 21))
    check(signal, SparseConv1d, torch.randn(4, 21))
    back = pruned(nn.ConvTranspose1d(4, 6, 3, stride, padding=1, groups=2))
    check(back, SparseConvTranspose1d, torch.randn(3, 4, 21))
    check(back, SparseConvTranspose1d, torch.randn(4, 21))
    image = pruned(nn.Conv2d(4, 6, 3, stride))
    check(image, SparseConv2d, torch.randn(4, 9, 7))
    check(image, SparseConv2d, torch.randn(2, 9, 7, 4).permute(0, 3, 1, 2))


@pytest.mark.parametrize("shape", [(37,), (1, 37), (5, 37), (4, 33, 37)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers(shape, bias, by_kernels):
    torch.manual_seed(0)
    check(pruned(nn.Linear(37, 23, bias=bias)), SparseLinear, torch.randn(shape))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_and_everything(density, by_kernels):
    torch.manual_seed(0)
    check(pruned(nn.Linear(9, 7), density), SparseLinear, torch.randn(5, 9))
    check(pruned(nn.Conv2d(3, 4, 3), density), SparseConv2d, torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("activation", ["relu", "gelu", "hardswish"])
def test_activations(activation, by_kernels):
    torch.manual_seed(0)
    for dense, kind, x in (
        (nn.Linear(9, 7), SparseLinear, torch.randn(5, 9)),
        (nn.Conv2d(3, 4, 3), SparseConv2d, torch.randn(2, 3, 8, 8)),
    ):
        layer = kind.from_dense(pruned(dense), activation)
        exact = layer.to_dense().double()
        found = torch.autograd.grad(layer(x).square().sum(), layer.values)[0]
        slope = torch.autograd.grad(exact(x.double()).square().sum(), exact[0].weight)[0]
        assert error(found, slope.flatten(1)[dense.weight.flatten(1) != 0]) <= CLOSE


def test_only_what_is_wanted(by_kernels):
    torch.manual_seed(0)
    layer = SparseConv2d.from_dense(pruned(nn.Conv2d(3, 4, 3)))
    layer.get_parameter("bias").requires_grad_(False)
    layer(torch.randn(2, 3, 8, 8)).sum().backward()
    assert layer.values.grad is not None and layer.get_parameter("bias").grad is None


SMALL = {
    "linear": lambda: (nn.Linear(7, 5), SparseLinear, torch.randn(3, 7)),
    "conv": lambda: (nn.Conv2d(4, 6, 3, 2, groups=2), SparseConv2d, torch.randn(2, 4, 6, 7)),
    "transposed": lambda: (nn.ConvTranspose2d(4, 6, 3, 2, groups=2), SparseConvTranspose2d, torch.randn(2, 4, 3, 4)),
}


@pytest.mark.parametrize("activation", [None, "tanh"])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_gradients(name, activation, by_kernels):
    """In float64, by the same kernels."""
    torch.manual_seed(0)
    made, kind, x = SMALL[name]()
    layer = kind.from_dense(pruned(made).double(), activation)

    def run(values, bias, x):
        return torch.func.functional_call(layer, {"values": values, "bias": bias}, (x,))

    for trained in ((True, True, True), (True, False, False), (False, False, True)):
        numbers = [t.detach().double().clone() for t in (layer.values, layer.bias, x)]
        given = [t.requires_grad_(one) for t, one in zip(numbers, trained, strict=True)]
        assert torch.autograd.gradcheck(run, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


LARGE = {
    "linear": lambda: (nn.Linear(1024, 1024), SparseLinear, torch.randn(3, 1024)),
    "conv": lambda: (nn.Conv2d(256, 256, 3, 2), SparseConv2d, torch.randn(1, 256, 5, 5)),
    "transposed": lambda: (nn.ConvTranspose2d(256, 256, 3, 2), SparseConvTranspose2d, torch.randn(1, 256, 2, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_no_memory_as_large_as_a_dense_weight(dtype):
    """Of a step, and of gradients of gradients."""
    for make in LARGE.values():
        made, kind, x = make()
        with torch.no_grad():
            made.weight *= torch.rand_like(made.weight) < 0.01
        layer, x = kind.from_dense(made).to(dtype), x.to(dtype).requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
            (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            slope.square().sum().backward()
        assert layer.values.grad is not None
        largest = max(event.self_cpu_memory_usage for event in recorded.events())
        assert 0 < largest < layer.rows * layer.columns * dtype.itemsize / 4


def test_what_kernels_are_not_for():
    layer, x = SparseLinear.from_dense(nn.Linear(4, 3)), torch.randn(2, 4)
    program, weights = SegmentProgram.parse(layer.program), layer._program_weights()
    (step,) = program.steps
    assert takes(step, x, weights)
    assert not takes(step, x.double(), weights)
    assert not takes(step, x[:0], weights)
    assert not takes(step, x, [weights[0].double(), *weights[1:]])
    layer(x[:0]).sum().backward()
    assert not layer.values.grad.any()


def test_bad_indices_are_refused():
    for layer, x in (
        (SparseLinear.from_dense(nn.Linear(4, 3)), torch.randn(2, 4)),
        (SparseConv2d.from_dense(nn.Conv2d(4, 3, 2)), torch.randn(2, 4, 5, 5)),
    ):
        layer(x).sum().backward()
        layer.col[0] = 1000
        with pytest.raises(BadInput, match="columns below"):
            layer(x)


def test_offsets_are_made_once_per_mask(monkeypatch):
    made = []
    inner = planes._offsets
    monkeypatch.setattr(planes, "_offsets", lambda *given: made.append(1) or inner(*given))
    layer = SparseConv2d.from_dense(pruned(nn.Conv2d(3, 4, 3)))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for size in (8, 8, 8, 9):
        layer(torch.randn(2, 3, size, size)).sum().backward()
        optimizer.step()
    assert len(made) == 2


def test_the_same_call_gives_the_same_bits():
    torch.manual_seed(0)
    layer = SparseConv2d.from_dense(pruned(nn.Conv2d(8, 16, 3, padding=1)))
    x = torch.randn(7, 8, 16, 16)
    found = [torch.autograd.grad(layer(x).square().sum(), layer.values)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert "demask_convolved" in type(layer(x).grad_fn).__name__


def test_memory_scales_with_the_nonzeros():
    """Weights, gradients and the state of the optimizer: 4 numbers and an index per nonzero."""
    dense = pruned(nn.Linear(300, 200), 0.1)
    layer = SparseLinear.from_dense(dense)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    tensors = [layer.values, layer.values.grad, *optimizer.state[layer.values].values()]
    count = int((dense.weight != 0).sum())
    assert sum(t.nbytes for t in tensors) == 4 * 4 * count + 4  # and the number of steps
    assert layer.col.nbytes == 4 * count


def test_a_network_trains_as_its_masked_dense_twin():
    """The same losses, step by step, within float32's noise."""
    torch.manual_seed(0)
    dense = nn.Sequential(
        pruned(nn.Conv2d(3, 8, 3, padding=1)),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        pruned(nn.Conv2d(8, 8, 3, stride=2, padding=1)),
        nn.ReLU(),
        nn.Flatten(),
        pruned(nn.Linear(8 * 4 * 4, 10), 0.2),
    )
    kinds = {nn.Conv2d: SparseConv2d, nn.Linear: SparseLinear}
    sparse = nn.Sequential(*(kinds[type(m)].from_dense(m) if type(m) in kinds else copy.deepcopy(m) for m in dense))
    masks = [(m.weight, m.weight.detach() != 0) for m in dense if type(m) in kinds]
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (dense, sparse)]
    images, labels = torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,))
    losses = []
    for _ in range(20):
        row = []
        for net, optimizer in zip((dense, sparse), optimizers, strict=True):
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if net is dense:
                for weight, mask in masks:
                    weight.grad *= mask
            optimizer.step()
            row.append(loss.item())
        losses.append(row)
    assert losses[-1][0] < losses[0][0] - 0.1
    assert all(abs(a - b) <= 1e-4 * losses[0][0] for a, b in losses), losses


COMPILED = {
    "linear": lambda: (nn.Linear(64, 48), SparseLinear, torch.randn(5, 64)),
    "conv": lambda: (nn.Conv2d(8, 12, 3, 2), SparseConv2d, torch.randn(3, 8, 9, 9)),
    "transposed": lambda: (nn.ConvTranspose2d(8, 12, 3, 2), SparseConvTranspose2d, torch.randn(3, 8, 5, 5)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_makes_no_dense_weights(name, dtype):
    """Bits as without torch.compile, and nothing in either graph is as large as the weight."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    made, kind, x = COMPILED[name]()
    layer, x = kind.from_dense(pruned(made, 0.1), "relu").to(dtype), x.to(dtype)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        given = x.clone().requires_grad_()
        y = run(given)
        wanted = (given, *layer.parameters())
        found.append((y, *torch.autograd.grad(y.float().square().sum(), wanted)))
    assert all(map(torch.equal, *found))
    assert len(graphs) == 2
    values = [n.meta["val"] for g in graphs for n in g.graph.nodes if "val" in n.meta]
    shapes = {tuple(t.shape) for t in values if isinstance(t, torch.Tensor)}
    area = layer.rows * layer.columns
    assert (layer.values.numel(),) in shapes
    assert not [shape for shape in shapes if math.prod(shape) == area]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stride", [(1, 3), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("shape", [(7, 7), (1, 5), (2, 1)], ids=str)
def test_few_channels_and_pixels(stride, channels, shape, by_kernels):
    """Sizes of 1, where a reshape gives a view of what kernels want in order."""
    torch.manual_seed(0)
    x = torch.randn(3, channels, *shape)
    for make, kind in ((nn.Conv2d, SparseConv2d), (nn.ConvTranspose2d, SparseConvTranspose2d)):
        for kernel in (1, 3):
            check(make(channels, 2, kernel, stride, kernel // 2), kind, x)


@pytest.mark.parametrize("name", COMPILED)
def test_frozen_layers_pass_gradients_on_by_kernels(name, by_kernels):
    torch.manual_seed(0)
    made, kind, x = COMPILED[name]()
    layer, exact = kind.from_dense(pruned(made)), copy.deepcopy(made).double()
    layer.requires_grad_(False)
    given = x.clone().requires_grad_(), x.double().requires_grad_()
    for run, one in zip((layer, exact), given, strict=True):
        run(one).square().sum().backward()
    assert layer.values.grad is None
    assert given[1].grad is not None and error(given[0].grad, given[1].grad) <= CLOSE


@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_torch_checks_the_ops(name):
    made, kind, x = COMPILED[name]()
    layer = kind.from_dense(pruned(made, 0.1))
    text, weights = layer.program, layer._program_weights()
    ops = torch.ops.demask
    for bias in (weights[3], None):
        opcheck(ops.convolved.default, (x.requires_grad_(), *weights[:3], bias, text))
    given = [t.detach() for t in (layer(x), x, *weights[:3])]
    for wanted in ((True, True), (True, False), (False, True)):
        opcheck(ops.conv_gradients.default, (*given, text, *wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_narrow_numbers_train_by_kernels(name, dtype, by_kernels):
    """Sums in float32, rounded once: no further from float64 than one unit of the largest."""
    torch.manual_seed(0)
    made, kind, x = COMPILED[name]()
    made, x = pruned(made).to(dtype), x.to(dtype)
    layer, exact = kind.from_dense(made), copy.deepcopy(made).double()
    y, reference = layer(x), exact(x.double())
    slope = torch.randn(y.shape).to(dtype)
    (found,) = torch.autograd.grad(y, layer.values, slope)
    (wanted,) = torch.autograd.grad(reference, exact.weight, slope.double())
    there = as_matrix(made, made.weight) != 0
    assert y.dtype == found.dtype == dtype
    assert error(y, reference) <= torch.finfo(dtype).eps
    assert error(found, as_matrix(made, wanted)[there]) <= torch.finfo(dtype).eps


def test_loading_other_nonzeros_drops_their_gradients():
    torch.manual_seed(0)
    layer, other = (SparseLinear.from_dense(pruned(nn.Linear(9, 7), d)) for d in (0.2, 0.6))
    x = torch.randn(3, 9)
    layer(x).sum().backward()
    layer.load_state_dict(other.state_dict())
    layer(x).sum().backward()
    other(x).sum().backward()
    assert layer.values.grad is not None and torch.equal(layer.values.grad, other.values.grad)
