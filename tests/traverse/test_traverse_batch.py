"""Fully connected layers run for N inputs: the same results, each weight read once a pass."""

import copy
import gc
import itertools
import math
import random
import re
import sys
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from demask.errors import BadInput
from demask.exec.device import Device
from demask.traverse.batching.batch import batch, traffic
from demask.traverse.batching.levels import WORK
from night import at_night


class Head(nn.Module):
    """Convolutions, then fully connected layers in a row with activations between."""

    example = (2, 3, 9, 7)

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.first, self.second = nn.Linear(60, 31), nn.Linear(31, 37)
        self.last = nn.Linear(37, 11, bias=False)

    def forward(self, x):
        x = torch.flatten(self.features(x), 1)
        return self.last(F.gelu(self.second(torch.relu(self.first(x)))))


class Middle(nn.Module):
    """Convolution, fully connected, reshape, convolution again, fully connected; two outputs."""

    example = (2, 2, 6, 5)

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.first, self.second = nn.Linear(90, 90), nn.Linear(48, 7)

    def forward(self, x):
        y = self.before(x)
        z = self.first(y.flatten(1)).view(x.shape[0], 3, 6, 5) + y
        return {"z": z, "logits": self.second(self.after(z).flatten(1)).softmax(-1)}


class Tied(nn.Module):
    """One weight in two layers, one of them transposed, and two layers that read one value."""

    example = (2, 13)

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.twin = nn.Linear(13, 29)
        self.twin.weight = self.up.weight
        self.bias = nn.Parameter(torch.randn(13))

    def forward(self, x):
        h = torch.tanh(self.up(x)) * self.twin(x)
        return torch.addmm(self.bias, h, self.up.weight), x @ self.up.weight.T


class Matrices(nn.Module):
    """Weights [in, out]: mm, addmm, matmul on tokens, a permuted one."""

    example = (2, 3, 10)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(10, 17)), nn.Parameter(torch.randn(51, 23))
        self.c, self.bias = nn.Parameter(torch.randn(23, 9)), nn.Parameter(torch.randn(9))

    def forward(self, x):
        y = torch.mm((x @ self.a).relu().flatten(1), self.b)
        z = torch.addmm(self.bias, y, self.c.permute(0, 1))
        return torch.mm(z, self.c.permute(1, 0)), torch.addmm(self.bias, y, self.c)


class Attention(nn.Module):
    """A class token for each input, tokens in front of the batch, attention."""

    example = (2, 4, 12)

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.last = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        y, _ = self.layer.self_attn(x, x, x, need_weights=False)
        y = self.layer.linear2(F.relu(self.layer.linear1(self.layer.norm1(x + y))))
        return self.last(y[:, 0])


class Recurrent(nn.Module):
    example = (2, 6, 5)

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.lstm(x)[0][:, -1])


class Computed(nn.Module):
    """A masked weight, a constant result, an embedding that shares its matrix with a layer."""

    example = (2, 6)

    def __init__(self):
        super().__init__()
        self.raw, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8, bias=False)
        self.register_buffer("mask", (torch.rand(8, 8) > 0.5).float())
        self.table = nn.Embedding(11, 8)

    def forward(self, x):
        y = self.table((x * 3).long().clamp(0, 10)).mean(1)
        y = F.linear(self.last(y), self.raw * self.mask)
        return F.linear(y, self.table.weight), self.raw.sum(0)


NETWORKS = (Head, Middle, Tied, Matrices, Attention, Recurrent, Computed)
PLACES = ("module", "file", "folder")
EVERY = list(itertools.product(NETWORKS, PLACES))
# Each network at one place by day.
PLACED = [*EVERY[::4], EVERY[11], *at_night(*(case for k, case in enumerate(EVERY) if k % 4 and k != 11))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}  # of the largest


def made(kind, dtype=torch.float64):
    torch.manual_seed(0)
    model = kind().to(dtype).eval()
    return model, torch.randn(kind.example, dtype=dtype)


def source(place, model, folder):
    """What to give for `weights`."""
    if place == "file":
        # safetensors refuses shared memory: one name each, as checkpoints have it
        seen, state = set(), {}
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state[name] = tensor
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    return folder if place == "folder" else None


def leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def check(result, model, x, dtype):
    with torch.no_grad():
        expected = model(x)
    assert type(result) is type(expected)
    for ours, theirs in zip(leaves(result), leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "place"), PLACED)
def test_same_results_at_any_batch_and_traffic_as_predicted(kind, place, tmp_path):
    model, x = made(kind)
    weights = source(place, model, tmp_path)
    for at_once in (None, 3):
        options = {"inputs": 4, "weights": weights, "at_once": at_once, "memory": "8MiB"}
        module = batch(model, (x,), **options)
        for size in (4, 1, 3, 11):
            fresh = copy.deepcopy(module)
            inputs = torch.randn(size, *kind.example[1:], dtype=torch.float64)
            check(fresh(inputs), model, inputs, torch.float64)
            assert fresh.traffic == module.plan.traffic(size)
        assert module.traffic.weight_bytes_read == 0  # copies count for themselves
    assert module.plan.traffic(11) == traffic(model, (x,), batch=11, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", (Head, Tied, Matrices))
def test_other_types(kind, place, dtype, tmp_path):
    model, x = made(kind, dtype)
    module = batch(model, (x,), inputs=4, weights=source(place, model, tmp_path), memory="8MiB")
    x = torch.randn(6, *kind.example[1:]).to(dtype)
    check(module(x), model, x, dtype)


def test_weights_in_memory_are_the_same_calls():
    model, x = made(Head, torch.float32)
    x = torch.randn(6, *Head.example[1:])
    assert torch.equal(batch(model, (x,), inputs=6)(x), model(x))


class Wide(nn.Module):
    """A layer of 8 MiB, and one of 4 MiB whose weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1024, 2048)
        self.b = nn.Parameter(torch.randn(2048, 512) / 50)

    def forward(self, x):
        return torch.relu(self.a(x)) @ self.b


def _bytes_read():
    with open("/proc/self/io") as file:
        return int(re.search(r"rchar: (\d+)", file.read())[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_fit_the_budget_and_the_file_is_read_once(dtype, tmp_path):
    torch.manual_seed(0)
    model = Wide().to(dtype)
    x = torch.randn(16, 1024).to(dtype)
    module = batch(model, (x,), weights=tmp_path, memory=WORK + 2**20)
    layers = [level.streamed for level in module.plan.levels if level.streamed]
    assert [layer.out_first for layer in layers] == [True, False]
    assert all(layer.rows < layer.stored.shape[0] for layer in layers)
    assert module.plan.least <= module.plan.peak <= WORK + 2**20
    before = _bytes_read() if sys.platform == "linux" else None
    check(module(x), model, x, dtype)
    weights = model.a.weight.nbytes + model.b.nbytes
    assert module.traffic.weight_bytes_read == module.traffic.weight_bytes == weights
    if before is not None:
        assert weights <= _bytes_read() - before <= weights + 2**16  # /proc is read through, too


def test_a_budget_too_small_is_refused_with_the_least_that_would_do(tmp_path):
    x = torch.randn(2, 1024)
    with pytest.raises(BadInput, match="or fewer inputs") as caught:
        batch(Wide(), (x,), weights=tmp_path, memory=WORK + 2**17)
    least = int(re.search(r"memory=(\d+)", str(caught.value))[1])
    model = Wide()
    module = batch(model, (x,), weights=tmp_path, memory=least)
    assert module.plan.peak == module.plan.least == least
    layers = [level.streamed for level in module.plan.levels if level.streamed]
    assert all(layer.rows < 64 for layer in layers)
    check(module(x), model, x, torch.float32)
    with pytest.raises(BadInput):
        batch(model, (x,), weights=tmp_path, memory=least - 1)
    assert batch(model, (x,), inputs=1, weights=tmp_path, memory=least - 1)(x).shape == (2, 512)


def test_fewer_inputs_at_once_where_the_budget_is_small():
    model, x = made(Head, torch.float32)
    x = torch.randn(2, 3, 128, 128)
    model.first = nn.Linear(5 * 64 * 64, 31)
    large, small = (batch(model, (x,), memory=m) for m in ("256MiB", "8MiB"))
    assert large.plan.at_once == 16 and 1 <= small.plan.at_once < 16
    assert small.plan.peak <= 8 * 2**20
    x = torch.randn(16, 3, 128, 128)
    assert torch.allclose(large(x), small(x), atol=1e-5)


def test_the_model_may_be_on_the_meta_device(tmp_path):
    model, x = made(Head, torch.float32)
    weights = source("file", model, tmp_path)
    with torch.device("meta"):
        shell = Head().eval()
    module = batch(shell, (x,), weights=weights, memory="8MiB")
    x = torch.randn(5, *Head.example[1:])
    check(module(x), model, x, torch.float32)
    held = {name for name, _ in module.held.named_parameters()}
    assert not any(name in held for name in ("first.weight", "second.weight", "last.weight"))


class Vgg(nn.Module):
    """VGG's plan in small; `units` of the first fully connected layer make 90 % of all weights."""

    def __init__(self, units):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(24 * 16, units), nn.ReLU(), nn.Linear(units, 96), nn.ReLU(), nn.Linear(96, 11)
        )

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def test_84_percent_of_the_traffic_is_saved_where_90_percent_are_connected():
    model = Vgg(1)
    conv = sum(p.numel() for p in model.features.parameters())
    units = round((9 * conv - 96 * 11) / (24 * 16 + 96))
    model = Vgg(units)
    matrices = sum(m.weight.numel() for m in model.classifier if isinstance(m, nn.Linear))
    share = matrices / (matrices + conv)
    assert abs(share - 0.9) < 1e-3
    x = torch.randn(16, 3, 16, 16)
    module = batch(model, (x,), at_once=1)
    assert torch.allclose(module(x), model(x), atol=1e-6)
    found = module.traffic
    assert found == traffic(model, (x,), at_once=1)
    assert found.connected.saved == 15 / 16
    assert math.isclose(found.saved, 15 / 16 * share)
    assert f"{found.saved:.0%}" == "84%"
    table = str(found).splitlines()
    assert len(table) == 2 + len(found.layers) + 3 and table[-1].endswith("84.4 %")
    assert table[-2].split()[-2:] == ["93.8", "%"]


def test_the_patents_example():
    """16M weights of two bytes: 32 MB a pass; sixteen images one by one read 512 MB."""
    model = nn.Linear(4096, 4096, bias=False).to(torch.bfloat16)
    found = traffic(model, (torch.randn(2, 4096).to(torch.bfloat16),))
    assert (found.weight_bytes, found.unbatched) == (32 * 2**20, 512 * 2**20)
    assert found.weight_bytes_read == 32 * 2**20


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x, w: F.linear(x - x.mean(0), w), "no axis for the batch"),
        (lambda x, w: F.linear(x.flip(0), w), "mixes the inputs"),
        (lambda x, w: F.linear(x, w).softmax(0), "mixes the inputs"),
        (lambda x, w: F.linear(x, w) @ x[:, :6].T, "mixes the inputs"),
        (lambda x, w: F.linear(x, w) + torch.arange(x.shape[0])[:, None], "no rule"),
        (lambda x, w: F.linear(x, w).cumsum(0), "no rule|mixes"),
        (lambda x, w: F.linear(x[:1], w), "no axis for the batch"),
        (lambda x, w: (F.linear(x, w), x.shape[0]), "returns the size"),
    ],
)
def test_networks_that_mix_inputs_are_refused(forward, words):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 8))

        def forward(self, x):
            return forward(x, self.w)

    with pytest.raises(BadInput, match=words):
        batch(Mixing(), (torch.randn(3, 8),))


def test_a_network_of_one_batch_size_is_refused():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x.view(1, -1))

    with pytest.raises(BadInput, match="the first dimension of the inputs is static"):
        batch(Single(), (torch.randn(1, 8),))


def test_calls_are_checked_as_the_model_was_captured(tmp_path):
    model, x = made(Head, torch.float32)
    module = batch(model, (x,), inputs=4)
    with pytest.raises(ValueError, match="expected sizes"):
        module(torch.randn(2, 3, 9, 8))
    with pytest.raises(TypeError):
        module(x, flag=True)
    with pytest.raises(BadInput, match="one input or more"):
        module(x[:0])
    for wrong in ({"inputs": 0}, {"at_once": 0}, {"memory": "lots"}, {"inputs": 2.5}):
        with pytest.raises(BadInput):
            batch(model, (x,), **wrong)


def test_keywords_and_inputs_beside_the_batch():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x, scale=None, *, double=False):
            y = self.layer(x)
            return (y * 2 if double else y) if scale is None else y * scale

    model, x, s = Scaled(), torch.randn(7, 8), torch.randn(7, 1)
    module = batch(model, (x,), {"scale": s, "double": True}, inputs=3)
    assert torch.allclose(module(x, scale=s, double=True), model(x, scale=s), atol=1e-6)
    module = batch(model, (x,), {"double": True}, inputs=3)
    assert torch.allclose(module(x, double=True), model(x, double=True), atol=1e-6)


def test_constants_in_a_file_are_let_go(tmp_path):
    """Of the model's tensors, none is in memory because of the module or its plan."""

    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.unread = nn.Linear(8, 6), nn.Linear(3, 3)
            self.register_buffer("rows", torch.tensor([4, 0, 1]))

        def forward(self, x):
            return self.layer(x).index_select(1, self.rows)

    model, alive = Selected(), set()
    for name, tensor in model.state_dict().items():
        alive.add(name)
        weakref.finalize(tensor.untyped_storage(), alive.discard, name)
    module = batch(model, (torch.randn(2, 8),), weights=source("file", model, tmp_path))
    expected = model(torch.ones(2, 8))
    assert torch.allclose(module(torch.ones(2, 8)), expected)
    module = batch(model, (torch.randn(2, 8),), weights=tmp_path)
    del model, tensor, expected
    gc.collect()
    assert alive == set() and torch.is_tensor(module(torch.ones(2, 8)))


def test_the_model_is_left_alone_and_gradients_are_not_kept():
    model, x = made(Head, torch.float32)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = batch(model, (x,))(x)
    assert model.training and not result.requires_grad
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


class Live(TorchDispatchMode):
    """Bytes of the storages that calls make and that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if torch.is_tensor(t)}
        for tensor in leaves(made):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in given | self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def free(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", ["module", "file"])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("at_once", [None, 2])
def test_memory_is_at_most_what_the_plan_says(kind, place, at_once, tmp_path):
    model, x = made(kind, torch.float32)
    weights = source(place, model, tmp_path)
    module = batch(model, (x,), inputs=8, weights=weights, at_once=at_once)
    x = torch.randn(8, *kind.example[1:])
    module(x)
    with Live() as live:
        module(x)
    plan = module.plan
    if weights is not None:
        assert plan.resident == sum(t.nbytes for t in module.held.state_dict().values())
    assert 0 < live.peak <= plan.peak - WORK - plan.resident


class Turned(nn.Module):
    """A square matrix in a file, as it is and transposed; values with the batch as their second axis."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(12, 12)) for _ in range(2))

    def forward(self, x):
        y = F.linear(x.transpose(0, 1), self.first.T)
        return F.linear(torch.sigmoid(y) * y, self.second).transpose(0, 1)


@pytest.mark.parametrize("place", PLACES)
def test_matrices_with_equal_sides_and_parts_that_are_copied(place, tmp_path):
    model, x = Turned(), torch.randn(64, 40, 12)
    module = batch(model, (x[:2],), inputs=64, at_once=32, weights=source(place, model, tmp_path))
    check(module(x), model, x, torch.float32)
    with Live() as live:
        module(x)
    values, half = x.nbytes, x.nbytes // 2
    assert live.peak <= module.plan.peak - WORK - module.plan.resident
    assert module.plan.peak - WORK - module.plan.resident <= 2 * values + 3 * half


def test_values_count_until_their_last_reader():
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()]
    peaks = [batch(nn.Sequential(*layers * count), (torch.randn(2, 64),)).plan.peak for count in (1, 4)]
    assert peaks[0] == peaks[1]


class Shuffled(nn.Module):
    """Random moves of a batch's axis among others, with products between; some mix its inputs."""

    def __init__(self, seed):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6)) for _ in range(3)])
        self.seed = seed

    def forward(self, x):  # x: batch, 2, 3, 6
        draw, n = random.Random(self.seed), x.shape[0]
        for _ in range(draw.randint(2, 5)):
            order = draw.sample(range(3), 3)
            back = [order.index(k) for k in range(3)]
            sizes = [(n, 2, 3)[k] for k in order]
            weight = self.weights[draw.randrange(3)]
            y = x.permute(*order, 3)
            match draw.randrange(6):
                case 0:
                    y = F.linear(y, weight)
                case 1:
                    y = F.linear(y.reshape(sizes[0] * sizes[1], sizes[2], 6), weight).relu()
                case 2:
                    y = torch.mm(y.reshape(-1, 6), weight)
                case 3:
                    y = y - y.mean(draw.randrange(4), keepdim=True)
                case 4:
                    y = y.softmax(draw.randrange(4))
                case 5:
                    y = y.flip(draw.randrange(4)) + y
            x = y.reshape(*sizes, 6).permute(*back, 3)
        return x @ self.weights[0]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_not_refused_is_right(seed):
    torch.manual_seed(seed)
    model = Shuffled(seed).double()
    x = torch.randn(5, 2, 3, 6, dtype=torch.float64)
    expected = model(x)
    alone = torch.cat([model(x[k : k + 1]) for k in range(5)])
    apart = torch.allclose(expected, alone, rtol=1e-12, atol=1e-12)
    if not apart:
        with pytest.raises(BadInput):
            batch(model, (x,))
        return
    for at_once in (None, 1, 2):
        module = batch(model, (x,), inputs=3, at_once=at_once)
        assert torch.allclose(module(x), expected, rtol=1e-12, atol=1e-12)


def test_a_device_has_the_memory() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(2, 64)
    inside = batch(model, (x,), memory=Device("6MiB"), inputs=4)
    assert inside.plan.peak == batch(model, (x,), memory="6MiB", inputs=4).plan.peak <= 6 * 2**20
    assert torch.equal(inside(x), model(x))
    assert traffic(model, (x,), memory=Device("6MiB")).saved == traffic(model, (x,), memory="6MiB").saved
    with pytest.raises(BadInput, match="memory"):
        batch(model, (x,), memory=Device(1))
    with pytest.raises(BadInput, match="dense"):
        batch(model, (x,), memory=Device("1MiB", weights="compressed"))
