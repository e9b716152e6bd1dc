"""Each call as steps of an accelerator: the interpreter computes what the call does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from instruction_networks import Function, X, drawn, far, images, plain, same

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


@pytest.mark.sampled(2)
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
}


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
            lambda q, m: (
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
                + F.scaled_dot_product_attention(q, q * 2, q, attn_mask=m, scale=0.3)
            ),
            bias,
        ).eval()
        x = q
        listing = plain(model, (x,))
        with torch.no_grad():
            assert far(listing.run(x), model(x)) <= 1e-5
