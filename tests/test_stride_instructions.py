"""Networks as instruction lists of an accelerator: the interpreter computes what they compute."""

import copy
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from architectures import transformers
from demask.errors import BadInput
from demask.graph.capture import capture
from demask.graph.fold import folded
from demask.graph.functional import functionalized
from demask.graph.spell import spelled
from demask.stride.instructions import Instructions, instructions, listed
from demask.stride.machine import ACTIVATIONS, HOST, WEIGHTS, Instruction, Machine, Operand
from demask.stride.units import ABILITIES, checked, unit_of
from demask.tune.affine import absorbed
from fuzz.images import Images


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """A network in eval mode with every parameter and statistic drawn."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if name.endswith("var"):
            value.uniform_(0.5, 1.5, generator=generator)
        elif value.ndim > 1:
            value.normal_(0, 1 / math.sqrt(value[0].numel()), generator=generator)
        elif value.is_floating_point():
            value.normal_(float(name.endswith("weight")), 0.2, generator=generator)
    return model.eval()


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def plain(model, args, machine=None, kwargs=None) -> Instructions:
    """The list of a network that has no strides."""
    given = spelled(folded(functionalized(capture(model, args, kwargs, dynamic_shapes={}))))
    return listed(absorbed(given), machine or Machine())


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest value."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def same(listing: Instructions, model: nn.Module, *inputs: torch.Tensor, most: float = 1e-5):
    """Does a list compute what the network does, in float32 and in float64?"""
    with torch.no_grad():
        expected = model(*inputs)
        exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
    made = listing.run(*inputs)
    for want in (expected, exact):
        for found, value in zip(flat(made), flat(want), strict=True):
            assert far(found, value) <= most


class Function(nn.Module):
    """A function of tensors as a network."""

    def __init__(self, function, *constants):
        super().__init__()
        self.function = function
        for k, value in enumerate(constants):
            self.register_buffer(f"c{k}", value)

    def forward(self, *xs):
        return self.function(*xs, *self.buffers())


class Block(nn.Module):
    """A residual block as in ResNet."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.a, self.an = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.b, self.bn = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.skip = None
        if stride != 1 or width != out:
            self.skip = nn.Sequential(
                nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        y = self.bn(self.b(F.relu(self.an(self.a(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


def resnet(stride: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1), Block(8, 8, 1), Block(8, 16, stride), Block(16, 24, stride),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.up(F.relu(self.down(scale))))


class Inverted(nn.Module):
    """An inverted residual as in MobileNet."""

    def __init__(self, width, out, stride, act, excite=False):
        super().__init__()
        wide = 3 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), act(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            act(), *([Excite(wide)] if excite else []),
            nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.joins = stride == 1 and width == out

    def forward(self, x):
        return x + self.body(x) if self.joins else self.body(x)


def mobilenet(stride: int = 2) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        Inverted(8, 8, 1, nn.ReLU6), Inverted(8, 12, stride, nn.ReLU6),
        Inverted(12, 12, 1, nn.Hardswish, excite=True), Inverted(12, 16, stride, nn.SiLU),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10),
    )  # fmt: skip


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 40), nn.Sigmoid(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 10),
        nn.LogSoftmax(1),
    )  # fmt: skip


class ConvNext(nn.Module):
    """A block of ConvNeXt: depthwise, norm over channels that are last, two layers, a scale."""

    def __init__(self, width):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Attention(nn.Module):
    """Heads over shifted windows, as in Swin, and what a patch merging does."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.merge = nn.LayerNorm(width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, height, wide, width = x.shape
        y = torch.roll(self.norm(x), (-1, -2), (1, 2)).reshape(batch, height * wide, width)
        parts = self.qkv(y).view(batch, -1, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        near = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.merge(torch.cat(near, -1))


PLAIN = {
    "lenet": (lenet, (2, 1, 28, 28)),
    "resnet, stride 1": (lambda: resnet(1), (2, 3, 20, 20)),
    "mobilenet, stride 1": (lambda: mobilenet(1), (2, 3, 18, 18)),
    "convnext block": (lambda: ConvNext(6), (2, 6, 9, 9)),
    "attention": (Attention, (2, 6, 8, 12)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), (2, 5, 16)),
    "depth in 3-D": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3)), nn.ReLU(), nn.AvgPool3d((1, 2, 2))),
        (2, 2, 4, 7, 8),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding="same", dilation=2), nn.GroupNorm(2, 6)),
        (3, 4, 11),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_networks_without_strides_run_as_they_are(name):
    make, shape = PLAIN[name]
    model, x = drawn(make()), images(*shape)
    same(plain(model, (x,)), model, x)


STRIDED = {
    "resnet": (resnet, (2, 3, 37, 40)),
    "mobilenet": (mobilenet, (2, 3, 33, 36)),
    "patches": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.LayerNorm(12)),
        (2, 3, 12, 16),
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_networks_run_on_a_machine_that_has_no_strides(name):
    make, shape = STRIDED[name]
    model, x = drawn(make()), images(*shape)
    listing = instructions(model, (x,))
    same(listing, model, x)
    assert listing.notes
    again = Instructions.from_dict(json.loads(json.dumps(listing.to_dict())))
    assert torch.equal(again.run(x), listing.run(x))


IMAGE_NETWORKS: dict[str, dict[str, Any]] = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [1, 1, 2],
                          "layer_type": "basic"},
    "MobileNetV2": {"depth_multiplier": 0.25, "image_size": 32},
    "EfficientNet": {"width_coefficient": 0.25, "depth_coefficient": 0.3,
                                      "image_size": 33, "hidden_dim": 320},
    "ConvNext": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    "Swin": {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
                      "num_heads": [2, 4], "window_size": 4},
}  # fmt: skip


class Logits(nn.Module):
    """What an image network of transformers says of each class."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits


@pytest.mark.nightly
@pytest.mark.parametrize("name", IMAGE_NETWORKS)
def test_image_networks_run_as_lists(name):
    try:
        hub = transformers()
    except ImportError as error:
        pytest.skip(f"transformers is not installed: {error}")
    options = IMAGE_NETWORKS[name]
    made = getattr(hub, f"{name}ForImageClassification")(getattr(hub, f"{name}Config")(**options))
    size = options.get("image_size", 33)
    model, x = Logits(drawn(made)).eval(), images(1, 3, size, size)
    listing = instructions(model, (x,))
    same(listing, model, x)
    counts = listing.counts
    assert counts.transfers == {"weights": len(listing.weights), "inputs": 1, "outputs": 1}
    assert all(row.op != "convolve" or "step" not in row.settings for row in listing.instructions)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_random_networks_run_as_lists(rank):
    """Whole numbers: the same bits. Those that the machine cannot run say so."""
    ran = 0
    for seed in range(0, 240, 2):
        net = Images(seed, rank=rank).eval()
        x = net.example.float()
        try:
            listing = instructions(copy.deepcopy(net).float(), (x,))
        except BadInput as error:
            assert re.search("cannot run this network|no form that is sound|is dynamic", str(error))
            continue
        with torch.no_grad():
            expected = net(net.example)
        for want, found in zip(flat(expected), flat(listing.run(x)), strict=True):
            small = want.abs().max() < 2**20
            assert far(found, want) == 0 if small else far(found, want) <= 1e-5, seed
        ran += 1
    assert ran > 40


def flat(value):
    return value if isinstance(value, tuple) else (value,)


X = (2, 3, 7, 9)
CALLS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "clamp": lambda x: x.clamp(-0.3, 0.4) + x.clamp(min=0) + x.clamp(max=0.1),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "elu": lambda x: F.elu(x, 0.7),
    "softplus": F.softplus,
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "mish": lambda x: F.mish(x) + F.silu(x) + F.hardswish(x),
    "numbers": lambda x: (2 - x) * 3 + x / 4 - 1 + torch.sub(x, 2, alpha=3) + 1 / (x.abs() + 1),
    "powers": lambda x: x**2 + x**3 + x.square() + (x.abs() + 1).rsqrt(),
    "maximum": lambda x: torch.maximum(x, -x) + torch.minimum(x, x * x),
    "broadcast": lambda x: x + x[:, :1, :1] * x.mean((2, 3), keepdim=True),
    "reductions": lambda x: x.mean((2, 3)) + x.sum((1, 2))[:, :3] + x.amax((0, 3))[:2, :3],
    "all": lambda x: x + x.mean() - x.sum(),
    "softmax": lambda x: x.softmax(-1) + x.softmax(1) + x.log_softmax(2),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool, ceil": lambda x: F.max_pool2d(x, (2, 3), (2, 2), (1, 0), (2, 1), ceil_mode=True),
    "max pool of one": lambda x: F.max_pool2d(x, 1, (2, 3)),
    "max pool with gaps": lambda x: F.max_pool2d(x, (1, 2), (2, 4), (0, 1)),
    "average pool with gaps": lambda x: F.avg_pool2d(x, 2, 3, ceil_mode=True),
    "average pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average, counts": lambda x: F.avg_pool2d(x, (2, 3), 2, (1, 1), count_include_pad=False),
    "average, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "average, sums": lambda x: F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=1),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (1, 3)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[..., :8], (7, 4)),
    "slices": lambda x: x[:, 1:, ::2, 1::3] + x[:, :2, 0:7:2, 0:3],
    "parts": lambda x: torch.cat([*x.split([1, 2], 1), x.chunk(3, 3)[1].repeat(1, 1, 1, 3)], 1),
    "stack": lambda x: torch.stack([x, x * 2], 2).flatten(1, 2) + torch.cat([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5) + F.pad(x, (-1, 4, 3, 0)),
    "crop": lambda x: F.pad(x, (-1, -2, 0, -3)),
    "permute": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1, 3) @ x.flatten(2)[:, :, :6],
    "shuffle": lambda x: x.transpose(1, 2).reshape(2, 7, 27).unflatten(2, (9, 3)).mT,
    "roll": lambda x: torch.roll(x, (2, -1), (2, -1)),
    "flip": lambda x: x.flip(1, -1) + x.movedim(1, 2).movedim((1, 2), (2, 1)) + x.narrow(1, 0, 3),
    "pad by what is inside": lambda x: (
        F.pad(x, (3, 2, 1, 4), mode="reflect")
        + F.pad(x, (3, 2, 1, 4), mode="replicate")
        + F.pad(x, (3, 2, 1, 4), mode="circular")
    ),
    "pixels": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2),
    "upsample": lambda x: F.interpolate(x, scale_factor=(2, 3), mode="nearest"),
    "index": lambda x: x[:, [2, 0, 1, 1]] + x.index_select(3, torch.tensor([4]))[:, :1],
    "two": lambda x: (x * 2, x.flatten(1)),
    "input": lambda x: (x, x.view(2, -1)),
    "glu": lambda x: F.glu(x[:, :2], 1),
    "instance norm": lambda x: F.instance_norm(x) + F.group_norm(x, 3),
    "rms norm": lambda x: F.rms_norm(x, (9,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_become_steps(name):
    model, x = Function(CALLS[name]).eval(), images(*X)
    same(plain(model, (x,)), model, x)


CONSTANTS = {
    "mask": (lambda x, m: x * m, torch.arange(9.0) % 2 == 0),
    "select": (lambda x, m: torch.where(m, x, 0.5), torch.arange(9.0) % 2 == 0),
    "fill": (lambda x, m: x.masked_fill(m, -2.0), torch.arange(9.0) % 2 == 0),
    "matrix": (lambda x, m: x @ m, torch.arange(18.0).reshape(9, 2)),
    "vector": (lambda x, m: x @ m, torch.arange(9.0)),
    "left": (lambda x, m: m @ x, torch.arange(14.0).reshape(2, 7)),
    "addmm": (lambda x, m: torch.addmm(m[0], x.flatten(1), m), images(189, 4)),
    "prelu": (F.prelu, torch.tensor([0.1, -0.2, 0.3])),
    "result": (lambda x, m: (x + 1, m * 2), torch.arange(3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_calls_with_constants_become_steps(name):
    function, constant = CONSTANTS[name]
    model, x = Function(function, constant).eval(), images(*X)
    same(plain(model, (x,)), model, x)


CONVOLUTIONS = [
    (nn.Conv2d(4, 6, (1, 3), padding=(0, 1)), (2, 4, 5, 7)),
    (nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2, bias=False), (2, 4, 5, 7)),
    (nn.Conv2d(4, 8, 5, padding="same", groups=4), (1, 4, 5, 7)),
    (nn.Conv2d(4, 8, (2, 4), padding="same", dilation=(3, 1)), (1, 4, 9, 7)),
    (nn.Conv2d(3, 2, 1), (3, 6, 6)),
    (nn.Conv1d(3, 6, 4, padding=3, groups=3), (2, 3, 5)),
    (nn.Conv3d(2, 4, 3, padding=1), (1, 2, 3, 4, 5)),
]


@pytest.mark.parametrize("k", range(len(CONVOLUTIONS)))
def test_convolutions_become_steps(k):
    layer, shape = CONVOLUTIONS[k]
    x = images(*shape)
    same(plain(drawn(layer), (x,)), layer, x)


class Named(nn.Module):
    """Its constants have the names of inputs and outputs."""

    def __init__(self):
        super().__init__()
        for k, name in enumerate(("x", "y", "output_0", "output_1")):
            self.register_buffer(name, images(3) * (k + 2))

    def forward(self, x, y):
        return (self.x * x + self.y * self.output_0, y - self.output_1)


def test_names_do_not_meet():
    model, given = Named().eval(), (images(2, 3), images(3))
    same(plain(model, given), model, *given)


class Scaled(nn.Module):
    def forward(self, x, *, scale):
        return x * 2 - scale


def test_inputs_by_keyword_come_behind_the_others():
    model, a, b = Scaled().eval(), images(2, 3), images(3)
    listing = plain(model, (a,), kwargs={"scale": b})
    assert [name for name, _ in listing.inputs] == ["x", "scale"]
    assert torch.equal(listing.run(a, b), a * 2 - b)


def test_norms_without_a_layer_before_them():
    first = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    for model, x in ((first, images(2, 3, 4, 5)), (nn.BatchNorm1d(5, affine=False), images(3, 5))):
        same(plain(drawn(model), (x,)), model, x)


def test_attention_under_masks():
    q, mask = images(2, 3, 5, 4), images(5, 5) > -0.5
    mask |= torch.eye(5, dtype=torch.bool)
    for bias in (mask, images(5, 5)):
        model = Function(
            lambda q, m: F.scaled_dot_product_attention(q, q, q, is_causal=True)
            + F.scaled_dot_product_attention(q, q * 2, q, attn_mask=m, scale=0.3), bias
        ).eval()  # fmt: skip
        x = q
        listing = plain(model, (x,))
        with torch.no_grad():
            assert far(listing.run(x), model(x)) <= 1e-5


def test_only_inputs_weights_and_outputs_cross():
    model, x = drawn(lenet()), images(2, 1, 28, 28)
    listing = plain(model, (x,))
    counts = listing.counts
    assert counts.transfers == {"weights": len(listing.weights), "inputs": 1, "outputs": 1}
    held = sum(tensor.numel() for tensor in model.state_dict().values())
    assert counts.transferred["weights"] == 4 * held
    assert counts.transferred["inputs"] == 4 * x.numel()
    assert counts.transferred["outputs"] == 4 * 20
    dma = [k for k, row in enumerate(listing.instructions) if unit_of(row.op) == "dma"]
    loads = len(listing.weights) + 1
    assert dma == [*range(loads), len(listing.instructions) - 1]
    between = listing.instructions[loads:-1]
    assert all(HOST not in [x.buffer for x in (*row.reads, row.writes)] for row in between)


def test_counts_are_those_of_the_model_of_cost():
    model, x = drawn(nn.Sequential(nn.Conv2d(3, 300, 3), nn.ReLU())), images(1, 3, 10, 10)
    machine = Machine(rows=16, columns=128, lanes=64, host_bytes=32)
    counts = plain(model, (x,), machine).counts
    made, tiles = 300 * 64, math.ceil(27 / 16) * math.ceil(300 / 128)
    assert counts.macs == 27 * made
    assert counts.cycles["matrix"] == tiles * 64 + 16 + 128
    assert counts.cycles["vector"] == 2 * made // 64  # bias and ReLU
    loaded = [math.ceil(4 * n / 32) for n in (27 * 300, 300, 300, made)]
    assert counts.cycles["dma"] == sum(loaded)
    assert counts.read[WEIGHTS] == 4 * (27 * 300 + 300)
    assert counts.written[ACTIVATIONS] == 4 * (300 + 3 * made)
    assert counts.read[ACTIVATIONS] == 4 * (3 * 300 + 3 * made)  # the image once per column tile
    assert counts.written[HOST] == 4 * made
    assert counts.loading == sum(loaded[:2])
    assert counts.total == sum(counts.cycles.values()) - counts.loading
    assert counts.instructions == {"dma": 4, "matrix": 1, "vector": 2, "pool": 0, "move": 0}


def test_pools_cost_the_taps_that_lie_in_the_image():
    model, x = nn.AvgPool2d(100, ceil_mode=True, padding=1), images(1, 128, 4, 5)
    counts = plain(model, (x,)).counts
    assert counts.cycles["pool"] == 5 * 6


def test_groups_share_a_tile_where_they_fit_on_its_diagonal():
    machine = Machine(rows=128, columns=128)
    assert machine.matrix(1000, 9, 1, 64) == math.ceil(64 / (128 // 9)) * 1000 + 256
    assert machine.matrix(1000, 200, 1, 4) == 4 * 2 * 1000 + 256
    assert machine.matrix(1, 128, 128, 1) == 128 + 256  # loading the tile takes its rows


def test_activations_share_places_and_vectors_write_over_what_they_read():
    model, x = drawn(lenet()), images(1, 1, 28, 28)
    listing = plain(model, (x,))
    values = {row.writes.value: row.writes for row in listing.instructions
              if row.writes.buffer == ACTIVATIONS}  # fmt: skip
    assert listing.sizes[ACTIVATIONS] < sum(operand.bytes for operand in values.values())
    vectors = [row for row in listing.instructions if unit_of(row.op) == "vector"]
    assert any(row.reads[0].address == row.writes.address for row in vectors)


def _moved(row: Instruction, value: str, address: int) -> Instruction:
    """An instruction that finds or leaves a value at another address."""
    reads, writes = (
        [replace(op, address=address) if op.buffer == ACTIVATIONS and op.value == value else op
         for op in ops] for ops in (row.reads, [row.writes])
    )  # fmt: skip
    return replace(row, reads=tuple(reads), writes=writes[0])


def test_a_value_laid_over_another_is_noticed():
    """Two values that are wanted at once, at one place: the read of the lost one stops the run."""
    model, x = drawn(Block(4, 4, 1)), images(1, 4, 6, 6)
    listing = plain(model, (x,))
    same(listing, model, x)
    made, read = {}, {}
    for k, row in enumerate(listing.instructions):
        read |= {op.value: k for op in row.reads if op.buffer == ACTIVATIONS}
        if row.writes.buffer == ACTIVATIONS:
            made.setdefault(row.writes.value, (k, row.writes.address))
    pairs = [(v, w) for v in made for w in made if made[v][0] < made[w][0] < read[v]]
    assert len(pairs) > 4
    for v, w in pairs:
        rows = tuple(_moved(row, w, made[v][1]) for row in listing.instructions)
        with pytest.raises(BadInput, match=r"instruction \d+ .*(holds|apart)"):
            replace(listing, instructions=rows).run(x)


def test_a_value_that_lies_elsewhere_is_noticed():
    model, x = drawn(Block(4, 4, 1)), images(1, 4, 6, 6)
    listing = plain(model, (x,))
    for k, row in enumerate(listing.instructions):
        if row.writes.buffer == ACTIVATIONS:
            rows = list(listing.instructions)
            rows[k] = _moved(row, row.writes.value, row.writes.address + 4)
            with pytest.raises(BadInput, match=r"instruction \d+"):
                replace(listing, instructions=tuple(rows)).run(x)


def test_a_word_that_is_overwritten_in_part_is_noticed():
    model, x = Function(lambda x: (x * 2).sum(1) + x.sum(1)).eval(), images(1, 3, 8)
    listing = plain(model, (x,))
    k = next(k for k, row in enumerate(listing.instructions) if row.op == "sum_pool")
    row = listing.instructions[k]
    inner = next(row for row in listing.instructions if row.op == "load").writes
    planted = Instruction("fill", (), Operand("stray", ACTIVATIONS, inner.address + 40, (1,)),
                          {"value": 0.0})  # fmt: skip
    rows = (*listing.instructions[:k], planted, *listing.instructions[k:])
    with pytest.raises(BadInput, match="byte 40 of them holds stray"):
        replace(listing, instructions=rows).run(x)
    assert row.op == "sum_pool"


def test_a_result_over_an_operand_of_another_form_is_noticed():
    x = Operand("x", ACTIVATIONS, 0, (1, 4))
    row = Instruction("product", (x, Operand("w", WEIGHTS, 0, (4, 4))),
                      replace(x, value="y", address=8), {"transposed": 0})  # fmt: skip
    listing = plain(Function(lambda x: x + 1).eval(), (images(1, 4),))
    with pytest.raises(BadInput, match="apart from the operands"):
        replace(listing, instructions=(row,), sizes={WEIGHTS: 64, ACTIVATIONS: 64}).run(
            images(1, 4)
        )


REFUSED = {
    "sort": (lambda x: x.sort(-1)[0], "sort.*no unit"),
    "two at once": (lambda x: x.cumsum(1) + x.logcumsumexp(1), "cumsum.*logcumsumexp"),
    "stride": (lambda x: F.conv2d(x, torch.ones(1, 3, 1, 1), stride=2), "steps of one"),
    "integers": (lambda x: (x > 0).sum(1), "float32 alone"),
    "condition": (lambda x: torch.where(x > 0, x, 0), "depends on the input"),
    "windows that differ": (lambda x: F.adaptive_avg_pool2d(x, 2), "windows differ"),
    "where the maximum was": (lambda x: x.max(1)[1], "no unit"),
    "constant integers": (lambda x: (x, torch.arange(3)), "output.*float32 alone"),
    "nothing": (lambda x: (x, None), "output.*None"),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "no unit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_machine_lacks_is_refused_by_name(name):
    function, words = REFUSED[name]
    with pytest.raises(BadInput, match=words):
        plain(Function(function).eval(), (images(*X),))


def test_numbers_other_than_float32_are_refused():
    with pytest.raises(BadInput, match=r"input_1.*torch.float64"):
        plain(nn.ReLU(), (images(2, 3).double(),))


def test_dynamic_sizes_are_refused():
    batch = {0: torch.export.Dim.AUTO}
    made = torch.export.export(nn.Linear(3, 2), (images(4, 3),), dynamic_shapes=(batch,))
    with pytest.raises(BadInput, match="sizes of input_1 are dynamic"):
        instructions(made, (images(4, 3),))


def test_an_exported_program_is_taken():
    model, x = drawn(nn.Linear(3, 2)), images(4, 3)
    listing = instructions(torch.export.export(model, (x,)))
    same(listing, model, x)


def test_a_buffer_that_is_too_small_is_refused_with_what_is_needed():
    model, x = drawn(lenet()), images(2, 1, 28, 28)
    needed = plain(model, (x,)).sizes
    for name, buffer in (("activation_bytes", ACTIVATIONS), ("weight_bytes", WEIGHTS)):
        enough = Machine(**{name: needed[buffer]})
        assert plain(model, (x,), enough).sizes == needed
        with pytest.raises(BadInput, match=f"{name}={needed[buffer]}"):
            plain(model, (x,), Machine(**{name: needed[buffer] - 1}))


def test_other_inputs_are_refused():
    listing = plain(nn.ReLU(), (images(2, 3),))
    for given in ((), (images(2, 4),), (images(2, 3).double(),), (images(2, 3),) * 2, ("x",)):
        with pytest.raises(BadInput, match=r"expected float32 tensors .*\(2, 3\)"):
            listing.run(*given)


def test_text_says_what_every_unit_does_and_where():
    listing = plain(drawn(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())),
                    (images(1, 3, 5, 5),))  # fmt: skip
    lines = str(listing).splitlines()
    assert lines[0].startswith("7 instructions, ")
    assert [line.split()[1] for line in lines[-7:]] == [
        "dma", "dma", "dma", "matrix", "vector", "vector", "dma"]  # fmt: skip
    convolve = lines[-4]
    for words in ("convolve", "(1, 3, 5, 5)", "weights+0 0.weight (4, 3, 3, 3) -> activations+",
                  "(1, 4, 5, 5)", "before 1 1", "groups 1"):  # fmt: skip
        assert words in convolve


@pytest.fixture(scope="module")
def stored():
    model, x = drawn(lenet()), images(1, 1, 28, 28)
    listing = plain(model, (x,))
    return listing, listing.to_dict(), x


def test_a_list_comes_back_from_json(stored):
    listing, data, x = stored
    again = Instructions.from_dict(json.loads(json.dumps(data, allow_nan=False)))
    assert again.to_dict() == data
    assert again.counts == listing.counts
    assert str(again) == str(listing)
    assert torch.equal(again.run(x), listing.run(x))


def test_settings_that_are_not_finite_come_back():
    model, x = Function(lambda x: F.pad(x, (1, 1), value=-math.inf)).eval(), images(2, 3)
    again = Instructions.from_dict(json.loads(json.dumps(plain(model, (x,)).to_dict())))
    assert torch.equal(again.run(x), model(x))


def _row(data, op):
    return next(row for row in data["instructions"] if row["op"] == op)


def _first(data, key, value):
    data[key][0] = value


HOSTILE = {
    "no object": lambda d: d.clear(),
    "format": lambda d: d.update(format="demask instructions 9"),
    "another key": lambda d: d.update(code="import os"),
    "machine": lambda d: d["machine"].update(rows=0),
    "machine of text": lambda d: d["machine"].update(rows="128"),
    "machine's keys": lambda d: d["machine"].pop("lanes"),
    "sizes": lambda d: d["sizes"].update(activations=2**60),
    "sizes of weights": lambda d: d["sizes"].update(weights=2**33),
    "sizes, negative": lambda d: d["sizes"].update(activations=-64),
    "sizes, odd": lambda d: d["sizes"].update(activations=63),
    "ports": lambda d: _first(d, "inputs", ["x", [2**50]]),
    "port of a weight's name": lambda d: _first(d, "inputs", ["0.weight", [1]]),
    "no output": lambda d: d["instructions"].pop(),
    "two outputs": lambda d: d["instructions"].append(d["instructions"][-1]),
    "op": lambda d: _row(d, "convolve").update(op="system"),
    "op of no text": lambda d: _row(d, "convolve").update(op=["convolve"]),
    "operands": lambda d: _row(d, "convolve").update(reads=[]),
    "operand": lambda d: _row(d, "convolve")["reads"].__setitem__(0, ["x", "host", 0]),
    "buffer": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, "disk"),
    "buffer of no text": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, {}),
    "host": lambda d: _row(d, "convolve")["reads"][0].__setitem__(1, "host"),
    "address": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, -4),
    "address, odd": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, 2),
    "address, far": lambda d: _row(d, "convolve")["reads"][0].__setitem__(2, 2**40),
    "shape": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1, 6, 28, 29]),
    "shape of zero": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1, 0, 28, 28]),
    "shape of floats": lambda d: _row(d, "convolve")["writes"].__setitem__(3, [1.0, 6, 28, 28]),
    "groups": lambda d: _row(d, "convolve")["settings"].update(groups=0),
    "groups of text": lambda d: _row(d, "convolve")["settings"].update(groups="1"),
    "dilation": lambda d: _row(d, "convolve")["settings"].update(dilation=[0, 1]),
    "padding": lambda d: _row(d, "convolve")["settings"].update(before=[2**40, 2]),
    "padding, negative": lambda d: _row(d, "convolve")["settings"].update(before=[-2, 2]),
    "setting missing": lambda d: _row(d, "convolve")["settings"].pop("after"),
    "setting unknown": lambda d: _row(d, "convolve")["settings"].update(stride=[2, 2]),
    "window": lambda d: _row(d, "average_pool")["settings"].update(window=[0, 2]),
    "step": lambda d: _row(d, "average_pool")["settings"].update(step=[3, 3]),
    "product": lambda d: _row(d, "product")["settings"].update(transposed=0),
    "immediate": lambda d: _row(d, "sigmoid")["settings"].update(immediate=1.0),
    "weight": lambda d: d["weights"]["0.weight"].update(data="!" * 800),
    "weight, short": lambda d: d["weights"]["0.weight"].update(data="AAAA"),
    "weight's shape": lambda d: d["weights"]["0.weight"].update(shape=[6, 1, 5, 6]),
    "weight gone": lambda d: d["weights"].pop("0.weight"),
    "weights": lambda d: d.update(weights=[]),
    "notes": lambda d: d.update(notes=[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_json_is_refused(stored, name):
    data = copy.deepcopy(stored[1])
    HOSTILE[name](data)
    with pytest.raises(BadInput):
        Instructions.from_dict(data)


@pytest.mark.parametrize("data", [None, [], 3, "list", {"format": "demask instructions 1"}])
def test_what_is_no_list_is_refused(data):
    with pytest.raises(BadInput):
        Instructions.from_dict(data)


def test_every_value_of_a_list_may_be_damaged(stored):
    """Each leaf of the JSON, replaced: refused, or a list that runs or stops with BadInput."""
    data = stored[1]
    seen = 0
    for row in range(len(data["instructions"])):
        for change in ([], None, -1, 2**62, "x", {}, 0.5, True):
            for where in ("reads", "writes", "settings", "op"):
                damaged = {**data, "instructions": list(data["instructions"])}
                damaged["instructions"][row] = {**data["instructions"][row], where: change}
                if damaged["instructions"][row] == data["instructions"][row]:
                    continue
                try:
                    Instructions.from_dict(damaged)
                except BadInput:
                    seen += 1
    assert seen > 500


@pytest.mark.parametrize("op", sorted(ABILITIES))
def test_every_op_checks_its_operands(op):
    """No op takes as many operands as none does, or a setting that nobody knows."""
    x = Operand("x", ACTIVATIONS, 0, (1,))
    with pytest.raises(BadInput, match="operands"):
        checked(Instruction(op, (x,) * 5, x, {}))
    count = ABILITIES[op].reads[0]
    with pytest.raises(BadInput):
        checked(Instruction(op, (x,) * count, x, {"unknown": 1}))


def test_the_model_is_left_alone():
    model, x = drawn(lenet()).train(), images(1, 1, 28, 28)
    before = copy.deepcopy(model.state_dict())
    plain(model, (x,))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
