"""Networks as instruction lists of an accelerator: the interpreter computes what they compute."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from architectures import transformers
from demask.errors import BadInput
from demask.stride.accelerator.instructions import Instructions, instructions
from fuzz.images import Images
from instruction_networks import drawn, far, flat, images, lenet, mobilenet, plain, resnet, same


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


class Tagged(nn.Module):
    """A recurrent layer, and a layer on its outputs and its last states."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer, self.last = layer, nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = self.layer(x)
        return self.last(outputs), states[0]


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
    "lstm": (lambda: Tagged(nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)), (2, 7, 4)),
    "gru": (lambda: Tagged(nn.GRU(4, 6)), (7, 2, 4)),
    "rnn": (lambda: Tagged(nn.RNN(4, 6, nonlinearity="relu", batch_first=True)), (2, 7, 4)),
    "sequence": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding="same", dilation=2), nn.GroupNorm(2, 6)), (3, 4, 11)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLAIN)
def test_networks_without_strides_run_as_they_are(name):
    make, shape = PLAIN[name]
    model, x = drawn(make()), images(*shape)
    same(plain(model, (x,)), model, x)


STRIDED = {
    "resnet": (resnet, (2, 3, 37, 40)),
    "mobilenet": (mobilenet, (2, 3, 33, 36)),
    "patches": (lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.LayerNorm(12)), (2, 3, 12, 16)),
}


@pytest.mark.sampled(2)
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
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [1, 1, 2], "layer_type": "basic"},
    "MobileNetV2": {"depth_multiplier": 0.25, "image_size": 32},
    "EfficientNet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 33, "hidden_dim": 320},
    "ConvNext": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
}


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
    """Integers: the same bits. Those that the machine cannot run say so."""
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


def test_an_exported_program_is_taken():
    model, x = drawn(nn.Linear(3, 2)), images(4, 3)
    listing = instructions(torch.export.export(model, (x,)))
    same(listing, model, x)


def test_the_model_is_left_alone():
    model, x = drawn(lenet()).train(), images(1, 1, 28, 28)
    before = copy.deepcopy(model.state_dict())
    plain(model, (x,))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
